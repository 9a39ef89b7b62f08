"""Packages whose public names are imported on first touch."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = [
    importlib.import_module(f"labkit.{name}") for name in ("design", "design.online", "filtering", "procurement", "sparsity")
]
NAMES = [(package, module, name) for package in PACKAGES for module, names in package._HOME.items() for name in names]


@pytest.mark.parametrize(("package", "module", "name"), NAMES, ids=lambda part: getattr(part, "__name__", part))
def test_every_public_name_is_where_the_package_says(package, module, name):
    home = importlib.import_module(f"{package.__name__}.{module}")
    assert getattr(package, name) is vars(home)[name]
    assert name in dir(package)
    assert name in package.__all__


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'kalman'"):
        _ = package.kalman


@pytest.mark.parametrize(
    "touch",
    [
        "import labkit.filtering as lab; [getattr(lab, name) for name in lab.__all__]",
        "import labkit.design.online as lab; lab.eig, lab.eig_grad",
    ],
)
def test_the_concepts_load_neither_a_plotting_library_nor_a_test_peer(touch):
    unwanted = "{'plotly', 'ipywidgets', 'pyro', 'scipy.stats', 'particles', 'filterpy'}"
    code = f"import sys; {touch}; print(*{unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

import importlib
import subprocess
import sys

import pytest

import labkit.filtering


@pytest.mark.parametrize("name", labkit.filtering.__all__)
def test_every_public_name_is_where_the_package_says(name):
    found = getattr(labkit.filtering, name)
    home = importlib.import_module(f"labkit.filtering.{labkit.filtering._MODULE[name]}")
    assert found is vars(home)[name]
    assert name in dir(labkit.filtering)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'labkit\.filtering' has no attribute 'kalman'"):
        _ = labkit.filtering.kalman


def test_the_concepts_load_neither_a_plotting_library_nor_a_test_peer():
    code = (
        "import sys, labkit.filtering as f; [getattr(f, n) for n in f.__all__]; "
        "print(*{'plotly', 'ipywidgets', 'pyro', 'scipy.stats', 'particles', 'filterpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

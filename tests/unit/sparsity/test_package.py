import importlib

import pytest

import labkit.sparsity


@pytest.mark.parametrize("name", labkit.sparsity.__all__)
def test_every_public_name_is_where_the_package_says(name):
    found = getattr(labkit.sparsity, name)
    home = importlib.import_module(f"labkit.sparsity.{labkit.sparsity._MODULE[name]}")
    assert found is vars(home)[name]
    assert name in dir(labkit.sparsity)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'labkit\.sparsity' has no attribute 'prune'"):
        _ = labkit.sparsity.prune

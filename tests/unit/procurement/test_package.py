import importlib

import pytest

import labkit.procurement


@pytest.mark.parametrize("name", labkit.procurement.__all__)
def test_every_public_name_is_where_the_package_says(name):
    found = getattr(labkit.procurement, name)
    home = importlib.import_module(f"labkit.procurement.{labkit.procurement._MODULE[name]}")
    assert found is vars(home)[name]
    assert name in dir(labkit.procurement)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'labkit\.procurement' has no attribute 'auction'"):
        _ = labkit.procurement.auction

"""A missing package is answered with the command that installs it."""

import importlib
import sys

import numpy as np
import pytest

from labkit.errors import MissingAsset, MissingDependency, check_number, require


def test_require_imports_the_innermost_module():
    assert require("xml.etree.ElementTree", "llm") is importlib.import_module("xml.etree.ElementTree")


def test_require_names_the_extra():
    with pytest.raises(MissingDependency, match=r'no_such_module is not installed: pip install "labkit\[llm\]"'):
        require("no_such_module", "llm")


def test_require_names_the_package_that_is_really_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency, match="no_such_module") as caught:
        require("needs_more", "dock")
    assert caught.value.name == "no_such_module"
    assert "needs_more" not in sys.modules


def test_a_module_that_fails_otherwise_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        require("broken", "llm")


def test_the_errors_are_kinds_of_the_usual_ones():
    assert issubclass(MissingAsset, FileNotFoundError)
    assert issubclass(MissingDependency, ImportError)


@pytest.mark.parametrize("value", ["1", b"1", None, [1.0], np.ones(1), 0.0, -1, float("nan"), float("inf"), 10**400])
def test_what_is_not_one_positive_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^rate=.*: expected a finite number > 0"):
        check_number("rate", value)


def test_a_number_comes_back_as_a_float():
    assert check_number("rate", np.float32(0.5)) == 0.5
    assert check_number("share", 1, "a number in (0, 1]", lambda x: 0 < x <= 1) == 1.0

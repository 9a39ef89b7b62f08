"""The two errors that a missing piece raises, each naming the one command that brings it; and checks that many labs make."""

import importlib
import math
from collections.abc import Callable
from numbers import Integral
from types import ModuleType
from typing import Any


class MissingAsset(FileNotFoundError):
    """A model, data set or script that is not in the cache and could not be brought there."""


class MissingDependency(ImportError):
    """An optional Python package that is not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of labkit brings it.

    Args:
        module: dotted name, as in an import statement.
        extra: labkit's extra that lists the package, e.g. "llm".

    Returns:
        The imported module (the innermost one of a dotted name).

    Raises:
        MissingDependency: the module, or a module that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(f'{error.name} is not installed: pip install "labkit[{extra}]"', name=error.name) from error


def check_size(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number ≥ `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: expected an int >= {least}")


def check_number(
    name: str,
    value: Any,
    allowed: str = "a finite number > 0",
    holds: Callable[[float], bool] = lambda x: 0 < x < math.inf,
) -> float:
    """One number for which `holds` is true, as a float, or a ValueError that says what is `allowed`. Text is no number."""
    try:
        number = math.nan if isinstance(value, str | bytes) or getattr(value, "ndim", 0) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not holds(number):
        raise ValueError(f"{name}={repr(value) if isinstance(value, str) else value}: expected {allowed}")
    return number

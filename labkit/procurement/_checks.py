"""Refuse a bad argument by its name, with what it got and what is allowed."""

import reprlib
from typing import Any

import numpy as np

from labkit.errors import check_number


def not_negative(name: str, value: Any) -> float:
    """A finite number ≥ 0, or a ValueError."""
    return check_number(name, value, "a finite number ≥ 0", lambda x: 0 <= x < np.inf)


def floats(name: str, numbers: Any, allowed: str) -> np.ndarray:
    """Numbers as float64, in their own shape and memory layout, or a ValueError. Text is no number."""
    try:
        array = np.asarray(numbers)
        if array.dtype.kind in "biuf" or (array.dtype.kind == "O" and not any(isinstance(x, str) for x in array.flat)):
            return np.asarray(array, dtype=float)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name}={reprlib.repr(getattr(numbers, 'tolist', lambda: numbers)())}: expected {allowed}")


def refuse(name: str, array: np.ndarray, bad: np.ndarray, allowed: str) -> None:
    """A ValueError that names the first entry of `array` where `bad`, of the same shape, is true."""
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}[{', '.join(map(str, where))}]={array[where]}: expected {allowed}")


def generator(rng: Any) -> np.random.Generator:
    """The generator, or one of seed 0 for None. A seed is refused: it would draw the same numbers for every seller."""
    if rng is None:
        return np.random.default_rng(0)
    if not isinstance(rng, np.random.Generator):
        raise ValueError(f"rng={rng!r}: expected a numpy.random.Generator, e.g. numpy.random.default_rng(0)")
    return rng

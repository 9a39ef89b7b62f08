"""Checks that several modules of the lab make."""

from numbers import Real
from typing import Any

import numpy as np


def check_gamma(gamma: float) -> None:
    """Refuse a green fraction outside (0, 1)."""
    if not isinstance(gamma, Real) or not 0 < gamma < 1:
        raise ValueError(f"gamma={gamma!r}: expected a number in (0, 1)")


def check_probability(name: str, value: Any) -> None:
    """Refuse what is not in [0, 1]; arrays entry by entry."""
    if not np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
        raise ValueError(f"{name}={value!r}: expected numbers in [0, 1]")


def check_bits(bits: Any) -> np.ndarray:
    """Green bits (..., T) as uint8, T ≥ 1."""
    try:
        array = np.asarray(bits)
    except ValueError as error:  # numpy's own for rows that do not line up
        raise ValueError("bits: rows of different length; truncate to a common T first") from error
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"bits of shape {array.shape}: expected (..., T) with T >= 1")
    if array.dtype.kind not in "buif" or not ((array == 0) | (array == 1)).all():
        raise ValueError(f"bits of dtype {array.dtype}: expected 0 and 1 only")
    return array.astype(np.uint8, copy=False)

"""Bayesian experimental design: which measurement to make next. `estimates` what every estimator of information returns."""

import importlib

_HOME = {"estimates": ("EIGEstimate",)}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str):
    if name not in _MODULE:
        raise AttributeError(f"module 'labkit.design' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.design.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

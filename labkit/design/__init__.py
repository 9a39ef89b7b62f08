"""Bayesian experimental design: which measurement to make next. `estimates` what every estimator of information returns."""

from labkit.lazy import public

_HOME = {"estimates": ("EIGEstimate",)}

__getattr__, __dir__, __all__ = public(__name__, _HOME)

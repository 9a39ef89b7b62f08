"""State-space models with static unknown parameters, and the nested particle filter that learns both (commons of lab 05).

    model → NestedParticleFilter.step(design, y) → FilterStep

`state_space` what a model is, `sir`, `source` and `linear_gaussian` three of them, `nested` the filter, `resampling` and
`jitter` its two random choices, `grid` a reference posterior from independent filters.
"""

import importlib

_HOME = {
    "state_space": (
        "StateSpaceModel",
        "check_design",
        "check_model",
        "check_observation",
        "check_truth",
        "check_designs",
        "log_likelihood",
        "parameter_box",
        "reveal",
        "sample",
        "seeded_generator",
        "simulate",
        "truth_generator",
    ),
    "sir": ("TwoGroupSIR",),
    "source": ("MovingSource", "wrap"),
    "linear_gaussian": ("LinearGaussianSSM",),
    "resampling": ("RESAMPLERS", "multinomial", "systematic"),
    "jitter": ("JITTERS", "bernoulli", "liu_west", "paper", "truncated_normal"),
    "nested": ("Clouds", "FilterStep", "NestedParticleFilter", "weighted_quantiles"),
    "grid": ("GridPosterior", "evidence", "grid_posterior"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str):
    if name not in _MODULE:
        raise AttributeError(f"module 'labkit.filtering' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.filtering.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

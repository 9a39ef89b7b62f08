"""State-space models with static unknown parameters, and the nested particle filter that learns both (commons of lab 05).

    model → NestedParticleFilter.step(design, y) → FilterStep

`state_space` what a model is, `sir`, `source` and `linear_gaussian` three of them, `nested` the filter, `jitter` how it moves
parameters, `grid` a reference posterior from independent filters.
"""

from labkit.lazy import public

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
        "simulate",
        "truth_generator",
    ),
    "sir": ("TwoGroupSIR",),
    "source": ("MovingSource", "wrap"),
    "linear_gaussian": ("LinearGaussianSSM",),
    "jitter": ("JITTERS", "bernoulli", "liu_west", "paper", "truncated_normal"),
    "nested": ("Clouds", "FilterStep", "NestedParticleFilter", "weighted_quantiles"),
    "grid": ("GridPosterior", "evidence", "grid_posterior"),
}

__getattr__, __dir__, __all__ = public(__name__, _HOME)

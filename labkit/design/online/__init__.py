"""BAD-PODS: online Bayesian experimental design for partially observed dynamical systems (lab 05, arXiv:2511.04403).

    NestedParticleFilter → eig, eig_grad → a policy → run_online → information

The filter and its models live in `labkit.filtering`. Here `eig` and `gradient` estimate what a design is worth and how to
improve it, `policies` choose one, `loop` runs the experiment, `metrics` says what it taught; then `experiment`, `figures` and
`widgets`.
"""

from labkit.design.online.eig import eig as eig  # now: the module of that name, imported later, would take its place
from labkit.lazy import public

_HOME = {
    "eig": ("METHODS", "nested_terms"),
    "gradient": ("ESTIMATORS", "eig_grad", "eig_grad_autograd"),
    "policies": (
        "AdamPolicy",
        "AimPolicy",
        "AscentStep",
        "BestStaticPolicy",
        "FixedPolicy",
        "GridPolicy",
        "OpenLoopPolicy",
        "PlugInPolicy",
        "RandomPolicy",
        "adam_ascent",
        "best_static",
        "candidate_designs",
        "exact_method",
    ),
    "loop": ("OnlineTrace", "online_steps", "run_online"),
    "metrics": ("information", "mean_stderr", "paired", "reference_noise"),
    "experiment": ("PLAYBACKS", "SETTINGS", "stored", "stored_reference", "stored_trace"),
}

__getattr__, __dir__, _names = public(__name__, _HOME)
__all__ = sorted(["eig", *_names])

"""Bayesian experimental design under constraints: which measurement to make next (lab 03, arXiv:2605.26990).

    DesignModel, Constraint → ParticleBelief → TreePlanner.plan → design → outcome → belief → …

`models`, `ces` and `pyro_bridge` what an experiment is, `constraints` and `obstacles` which designs are allowed after which,
`checker` whether a path obeys them, `belief` what is known, `information` what a design would tell, `tree`, `nodes` and
`search` the planner, `policies` it and its rivals, `posterior` and `dad` the networks and `training` how they came about,
`loop` whole runs, `bounds` what they have told, `corridor` a small world with an exact answer; then `experiment`, `figures` and
`widgets`. Lab 05, on systems that move, is `labkit.design.online`.
"""

from labkit.lazy import public

_HOME = {
    "estimates": ("EIGEstimate",),
    "models": (
        "DesignModel",
        "GaussianModel",
        "HyperbolicDiscounting",
        "LinearGaussian",
        "LocationFinding",
        "Pharmacokinetics",
        "is_gaussian",
    ),
    "ces": ("CES",),
    "pyro_bridge": ("from_pyro", "to_pyro"),
    "constraints": (
        "Budget",
        "Constraint",
        "InfeasibleError",
        "Intersection",
        "Monotone",
        "Region",
        "State",
        "StepLimit",
        "Unconstrained",
        "position_cost",
        "require_feasible",
        "switching_cost",
    ),
    "obstacles": ("Availability", "Forbidden"),
    "checker": ("violations",),
    "belief": ("DegenerateBeliefError", "ParticleBelief", "PlanningParticles", "reweight"),
    "information": ("ace_eig", "eig", "node_eig"),
    "bounds": ("InformationEstimate", "barber_agakov", "information_is", "plug_in_spce", "snmc", "spce"),
    "tree": ("BaseNoise", "Plan", "ScenarioTree", "TreePlanner", "tree_value", "tree_value_recursive"),
    "nodes": ("AmortizedNodes", "GaussianNodes", "ParticleNodes"),
    "search": ("BallSearch",),
    "policies": (
        "GreedyPolicy",
        "GreedyVIPolicy",
        "ProjectedPolicy",
        "RandomPolicy",
        "StaticPolicy",
        "StepDADPolicy",
        "TreePolicy",
    ),
    "posterior": ("AmortizedPosterior", "load_posterior"),
    "dad": ("DADNetwork", "DADPolicy", "fit_dad", "load_policy"),
    "loop": ("RolloutTrace", "compare", "rollout", "score"),
    "corridor": ("Corridor", "CorridorPath", "optimal_path", "planned_path"),
}

__getattr__, __dir__, __all__ = public(__name__, _HOME)

"""The lab's tables: the planner beside its baselines and ablations, on the same parameters, starts and outcome noise.

`reproduce` runs every setting, policy and block of rollouts as a part of its own, so that an interrupted run goes on where it
stopped and several processes can share the work (`cells` lists the parts, `run_cell` makes one). `build` trains the networks,
does the same and leaves small tables in `data/`.
"""

import functools
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from labkit.design.ces import CES
from labkit.design.constraints import Budget, Constraint, Monotone, StepLimit
from labkit.design.corridor import Corridor, optimal_path, planned_path
from labkit.design.dad import DADPolicy, load_policy
from labkit.design.loop import BROKEN, rollout, score, worst_decile
from labkit.design.models import DesignModel, LocationFinding, Pharmacokinetics
from labkit.design.policies import (
    GreedyPolicy,
    GreedyVIPolicy,
    Policy,
    ProjectedPolicy,
    RandomPolicy,
    StaticPolicy,
    StepDADPolicy,
    TreePolicy,
)
from labkit.design.posterior import load_posterior
from labkit.design.training import DATA, RECIPES, train
from labkit.design.tree import TreePlanner
from labkit.parts import claim, once, write_table
from labkit.report import Reproduction, Verdict

PUBLISHED = pd.DataFrame(
    [
        ("ces-100", "COPEx, H = 1", 7.03, 0.55),
        ("ces-100", "COPEx, H = 3", 6.36, math.nan),
        ("ces-100", "RL-BOED, projected", 4.93, math.nan),
        ("ces-100", "ALINE, projected", 4.46, math.nan),
        ("ces-100", "VPCE", 2.18, math.nan),
        ("ces-150", "COPEx, H = 1", 7.47, 0.55),
        ("ces-150", "ALINE, projected", 5.70, math.nan),
        ("ces-150", "RL-BOED, projected", 4.98, math.nan),
    ],
    columns=["setting", "method", "spce", "spce_stderr"],
)  # nats, as the paper prints them; its likelihood is that of "ces-100-published"


@dataclass(frozen=True)
class Setting:
    """A task and the sizes of its runs.

    Attributes:
        title: for tables and panels.
        model: makes the model.
        limit: model -> constraint.
        steps: T, the first design included where it is drawn at random and measured (`measured`).
        block: rollouts that run side by side, at one seed.
        measured: whether the first design is drawn and counts, or is free.
    """

    title: str
    model: Callable[[], DesignModel]
    limit: Callable[[DesignModel], Constraint]
    steps: int
    block: int
    measured: bool = True


def _location(delta: float) -> Setting:
    return Setting(f"location, steps ≤ {delta:g}", LocationFinding, lambda model: StepLimit(delta, bounds=model.bounds), 30, 8)


def _ces(budget: float, variant: str = "standard") -> Setting:
    title = f"CES, budget {budget:g}" + (", published likelihood" if variant != "standard" else "")
    return Setting(
        title,
        functools.partial(CES, variant),
        lambda model: Budget(budget, pacing="half", bounds=model.bounds),
        10,
        16,
    )


def _pharmacokinetics(prior_var: float) -> Setting:
    return Setting(
        f"pharmacokinetics, prior variance {prior_var:g}",
        functools.partial(Pharmacokinetics, prior_var),
        lambda model: Monotone(0.25, bounds=model.bounds),
        5,
        16,
        measured=False,
    )


SETTINGS = {
    "location-0.05": _location(0.05),
    "location-0.1": _location(0.1),
    "location-0.2": _location(0.2),
    "pk": _pharmacokinetics(0.05),
    "pk-wide": _pharmacokinetics(0.3),
    "ces-100": _ces(100),
    "ces-150": _ces(150),
    "ces-100-published": _ces(100, "published_code"),
}


@dataclass(frozen=True)
class Study:
    """Policies that run on the same blocks of rollouts."""

    setting: str
    blocks: int
    policies: tuple[str, ...]


PLAN = (
    *(Study(f"location-{delta}", 16, ("random", "static", "dad", "greedy", "tree-2")) for delta in ("0.1", "0.05", "0.2")),
    Study("pk", 8, ("random", "static", "greedy", "tree-1", "tree-2")),
    Study("pk-wide", 8, ("random", "static", "greedy", "tree-1", "tree-2")),
    Study("ces-100", 8, ("random", "greedy", "tree-2")),
    Study("ces-150", 4, ("greedy",)),
    Study("ces-100-published", 4, ("random", "greedy")),
    Study("ces-100", 4, ("greedy-projected", "static")),
    Study("location-0.1", 16, ("dad-constrained",)),
    *(Study(f"location-{delta}", 4, ("greedy_vi", "step_dad")) for delta in ("0.1", "0.05", "0.2")),
    Study("location-0.1", 4, ("tree-1", "tree-3", "tree-1-m4", "tree-1-m8", "tree-2-m1", "tree-2-m3", "tree-2-discounted")),
    Study("location-0.1", 4, ("tree-1-pce", "tree-1-policy", "tree-1-random")),
    Study("location-0.1", 2, ("tree-4",)),
    Study("location-0.1", 1, ("tree-1-joint", "tree-1-product")),
    Study("ces-100", 2, ("tree-1", "tree-2-unpaced")),
)

TREES = {  # what their names say, the rest as `TreePlanner` has it
    **{f"tree-{depth}": {"depth": depth} for depth in (1, 2, 3, 4)},
    **{f"tree-1-m{branching}": {"depth": 1, "branching": branching} for branching in (4, 8)},
    **{f"tree-2-m{branching}": {"depth": 2, "branching": branching} for branching in (1, 3)},
    "tree-2-discounted": {"depth": 2, "discount": 0.6},
    "tree-2-unpaced": {"depth": 2},
    "tree-1-pce": {"depth": 1, "estimator": "pce"},
    "tree-1-random": {"depth": 1, "num_random": 10, "starts": 10},
    "tree-1-policy": {"depth": 1, "num_random": 0, "starts": 1},
    "tree-1-joint": {"depth": 1, "estimator": "ace"},
    "tree-1-product": {"depth": 1, "estimator": "ace"},
}

Cell = tuple[str, str, int]  # setting, policy, block


@dataclass(frozen=True)
class Recipe:
    """Sizes of a reproduction and a build. Everything in `data/` follows from these.

    Attributes:
        blocks: upper limit on the blocks of each study in `PLAN`.
        block: upper limit on the rollouts of a block.
        steps: upper limit on T.
        num_particles: of the belief.
        static_iterations: Adam steps of the static designs.
        num_draws: of importance sampling; `num_contrastive`: L of sPCE.
        iterations: of the tree's optimiser.
    """

    blocks: int = 1000
    block: int = 1000
    steps: int = 1000
    num_particles: int = 1000
    static_iterations: int = 300
    num_draws: int = 5000
    num_contrastive: int = 100_000
    iterations: int = 15


_FAST = Recipe(
    blocks=1,
    block=2,
    steps=3,
    num_particles=100,
    static_iterations=3,
    num_draws=200,
    num_contrastive=500,
    iterations=2,
)


def cells(recipe: Recipe, seeds: int | None = None) -> list[Cell]:
    """(setting, policy, block) of every part of the plan.

    Args:
        recipe: its limit on the blocks applies.
        seeds: a number of blocks per policy of one's own.
    """
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: expected at least 1")
    return [
        (study.setting, policy, block)
        for study in PLAN
        for block in range(seeds or min(study.blocks, recipe.blocks))
        for policy in study.policies
    ]


def run_cell(cell: Cell, recipe: Recipe, parts: Path, networks: Path = DATA) -> pd.DataFrame:
    """One block of rollouts, one row each; run once and kept in `parts`."""
    name, policy, block = cell
    setting = SETTINGS[name]

    def run(path: Path) -> None:
        model = setting.model()
        constraint = setting.limit(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "warm_start")  # the policy network knows of no constraint: that is the point
            trace = rollout(
                model,
                make_policy(name, policy, model, constraint, recipe, parts, networks),
                constraint,
                steps=min(setting.steps, recipe.steps),
                num_rollouts=min(setting.block, recipe.block),
                seed=block,
                num_particles=recipe.num_particles,
                measure_start=setting.measured,
            )
        table = score(trace, num_draws=recipe.num_draws, num_contrastive=recipe.num_contrastive, seed=block)
        if isinstance(model, LocationFinding):
            table["error"] = (trace.mean[:, -1] - trace.theta).norm(dim=-1).numpy()
        for t in range(setting.steps if isinstance(model, Pharmacokinetics) else 0):
            table[f"time{t + 1}"] = trace.designs[:, t, 0].numpy() if t < trace.designs.shape[1] else math.nan
        labels = {"setting": name, "policy": policy, "plan_ms": trace.plan_ms, "belief_ms": trace.belief_ms}
        table.assign(**labels).to_csv(path, index=False)

    return pd.read_csv(once(parts / f"run-{name}-{policy}-{block:02d}.csv", run))


def make_policy(
    setting: str, name: str, model: DesignModel, constraint: Constraint, recipe: Recipe, parts: Path, networks: Path = DATA
) -> Policy:
    """A policy of the plan. "static" designs are optimised once and kept in `parts`; networks are read from `networks`."""
    steps = min(SETTINGS[setting].steps, recipe.steps) - SETTINGS[setting].measured

    def network() -> torch.nn.Module:
        return load_policy(networks / f"{setting.partition('-')[0]}-policy.safetensors", model)

    def planner(**options) -> Policy:
        if name.endswith("-policy") or name == "copex":
            options["warm_start"] = network()
        for head in ("joint", "product"):
            if name.endswith(head) or (name, head) == ("copex", "product"):
                options["posterior"] = load_posterior(networks / "location-posterior.safetensors", model).using(head)
        rule = Budget(constraint.total, bounds=model.bounds) if name.endswith("unpaced") else constraint
        return TreePolicy(TreePlanner(model, rule, iterations=recipe.iterations, **options), name)

    if name in TREES:
        return planner(**TREES[name])
    return {
        "random": lambda: RandomPolicy(constraint),
        "static": lambda: StaticPolicy(_static_designs(setting, model, constraint, steps, recipe, parts), constraint),
        "dad": lambda: ProjectedPolicy(network(), constraint, name=name),
        "dad-constrained": lambda: DADPolicy(load_policy(networks / "location-policy-0.1.safetensors", model, constraint)),
        "step_dad": lambda: StepDADPolicy(network(), constraint, steps=steps),
        "greedy": lambda: GreedyPolicy(model, constraint, iterations=recipe.iterations),
        "greedy_vi": lambda: GreedyVIPolicy(model, constraint),
        "greedy-projected": lambda: _greedy_projected(model, constraint),
        "copex": lambda: planner(preset="paper"),
    }[name]()


def _static_designs(
    setting: str, model: DesignModel, constraint: Constraint, steps: int, recipe: Recipe, parts: Path
) -> torch.Tensor:
    """Optimised once, (T, d). Where the first design is drawn at random they start from the middle of the box."""

    def search(path: Path) -> None:
        start = model.bounds.mean(0) if SETTINGS[setting].measured else None
        options = {"steps": max(steps, 1), "start": start, "iterations": recipe.static_iterations}
        pd.DataFrame(StaticPolicy.optimise(model, constraint, **options).designs.numpy()).to_csv(path, index=False)

    designs = pd.read_csv(once(parts / f"static-{setting}.csv", search)).to_numpy()
    return torch.tensor(designs, dtype=torch.float32)


def _greedy_projected(model: DesignModel, constraint: Constraint) -> Policy:
    """The greedy policy that does not know of the budget, projected onto what is left."""
    free = Budget(1e6, bounds=model.bounds)
    return ProjectedPolicy(GreedyPolicy(model, free), constraint, planned_under=free, name="greedy-projected")


def corridor_table(steps: tuple[int, ...] = (8, 12), depths: int = 9) -> pd.DataFrame:
    """Information of a planner in the corridor, in nats, for every depth H and discount γ, and of the exact optimum."""
    corridor, rows = Corridor(), []
    for count in steps:
        best = optimal_path(corridor, count)
        rows.append({"steps": count, "planner": "dynamic programming", "depth": count - 1, "discount": 1.0} | _end(best))
        for discount in (1.0, 0.6):
            for depth in range(depths):
                path = planned_path(corridor, count, depth, discount)
                rows.append({"steps": count, "planner": "lookahead", "depth": depth, "discount": discount} | _end(path))
    return pd.DataFrame(rows)


def _end(path) -> dict[str, float]:
    return {"information": float(path.information[-1]), "last_place": int(path.places[-1])}


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting and policy: means with standard errors over rollouts, worst decile, milliseconds, published value."""
    rows = []
    for (setting, policy), cell in runs.groupby(["setting", "policy"], sort=False):
        row = {"setting": setting, "policy": policy, "rollouts": len(cell)}
        for column in ("kl", "information", "spce"):
            row[column], row[f"{column}_stderr"] = cell[column].mean(), cell[column].sem()
        row["worst_decile"] = worst_decile(cell["information"])
        if "error" in cell:
            row["median_error"] = cell["error"].median()
        row["plan_ms"], row["belief_ms"] = cell["plan_ms"].mean(), cell["belief_ms"].mean()
        row["least_ess"] = cell["ess"].min()
        row["violations"] = int((cell["violation"] > BROKEN).sum())
        rows.append(row)
    return pd.DataFrame(rows)


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Paired differences of the two-step tree, and of the exact greedy choice, to every other policy: KL in nats."""
    rows = [
        {"setting": setting, "first": first, "second": second} | _paired(cell, first, second)
        for setting, cell in runs.groupby("setting", sort=False)
        for first in ("tree-2", "greedy")
        for second in cell["policy"].unique()
        if first in set(cell["policy"]) and second != first
    ]
    return pd.DataFrame(rows)


def _paired(runs: pd.DataFrame, first: str, second: str) -> dict[str, float]:
    """Mean difference of KL over the rollouts that both have run, nats."""
    wide = runs.pivot(index=["seed", "rollout"], columns="policy", values="kl")[[first, second]].dropna()
    gap = wide[first] - wide[second]
    return {"rollouts": len(gap), "difference": float(gap.mean()), "difference_stderr": float(gap.sem())}


def reproduce(*, fast: bool = False, seeds: int | None = None, out: Path) -> Reproduction:
    """Run every policy in every setting, and measure the total information of each rollout.

    Args:
        fast: one short block of two rollouts per policy, to see that it works; not for figures.
        seeds: blocks of 8 or 16 paired rollouts per policy; None is what `PLAN` says, 128 rollouts for the main claims.
        out: folder whose `parts/` keeps each finished block; a second call goes on from there.
    """
    recipe = _FAST if fast else Recipe()
    parts = Path(out) / ("parts-fast" if fast else "parts")
    runs = _measure(recipe, seeds, parts, DATA)
    corridor = corridor_table()
    tables = {
        "summary": summarise(runs),
        "differences": differences(runs),
        "published": PUBLISHED,
        "corridor": corridor,
        "runs": runs,
    }
    notes = [
        "kl: KL(posterior ‖ prior) of a rollout, nats; information: log p(y | θ) − log p(y), the same mean with more noise; "
        "both by importance sampling. spce: L = 10⁵, and for CES plugged in at L = 10⁷ from the importance estimate.",
        "± is the standard error over rollouts; differences are paired: equal parameters, first designs and outcome noise.",
        "plan_ms, belief_ms: processor time per decision and rollout.",
        "Aims are ours throughout, also where the paper claims the direction. dad, step_dad: a network of 1,000 steps.",
        "published: sPCE as the paper prints it; its likelihood is that of the setting ces-100-published.",
    ]
    return Reproduction(tables, _verdicts(runs, corridor), notes)


def _measure(recipe: Recipe, seeds: int | None, parts: Path, networks: Path) -> pd.DataFrame:
    """All rollouts; what `parts` holds already is not run again."""
    todo = tqdm(cells(recipe, seeds), desc="rollouts", unit="block")
    return pd.concat([run_cell(cell, recipe, parts, networks) for cell in todo], ignore_index=True)


def _verdicts(runs: pd.DataFrame, corridor: pd.DataFrame) -> list[Verdict]:
    summary = summarise(runs).set_index(["setting", "policy"])
    verdicts = []

    def level(claim: str, setting: str, policy: str, target: float, column: str = "kl") -> None:
        row = summary.loc[(setting, policy)]
        title = f"{SETTINGS[setting].title}: {claim}, {row['rollouts']:.0f} rollouts"
        value, stderr = float(row[column]), float(row[f"{column}_stderr"])
        verdicts.append(Verdict(title, value, stderr, f"≥ {target:g}", value >= target, "ours"))

    def gain(claim: str, setting: str, first: str, second: str, target: float, slack: float = 0) -> None:
        pair = _paired(runs[runs["setting"] == setting], first, second)
        value, stderr = pair["difference"], pair["difference_stderr"]
        wanted = f"≥ {target:g}" + (f" − {slack:g} s.e." if slack else "")
        title = f"{SETTINGS[setting].title}: {claim}, nats, {pair['rollouts']} pairs"
        verdicts.append(Verdict(title, value, stderr, wanted, value >= target - slack * stderr, "ours"))

    for delta in ("0.05", "0.1", "0.2"):
        setting = f"location-{delta}"
        level("KL of the tree (H = 2, m = 2), nats", setting, "tree-2", 9.5)
        gain("tree minus the projected policy network", setting, "tree-2", "dad", 2)
        gain("tree minus greedy with a variational belief", setting, "tree-2", "greedy_vi", 3)
        gain("tree minus greedy with the exact belief", setting, "tree-2", "greedy", 0, slack=1)
        worst = summary.loc[(setting, "tree-2"), "worst_decile"] - summary.loc[(setting, "greedy"), "worst_decile"]
        title = f"{SETTINGS[setting].title}: worst decile of the tree minus that of exact greedy, nats"
        verdicts.append(Verdict(title, float(worst), None, "> 0", bool(worst > 0), "ours"))
    for setting in ("pk", "pk-wide"):
        gain("tree minus greedy with the exact belief", setting, "tree-2", "greedy", 0.7)
    gain("tree minus the best static schedule", "pk", "tree-2", "static", -0.1)
    gain("tree minus the best static schedule", "pk-wide", "tree-2", "static", 0)

    level("KL of exact greedy, nats", "ces-100", "greedy", 15.0)
    level("KL of the nested tree (H = 2, m = 2), nats", "ces-100", "tree-2", 15.3)
    level("plug-in sPCE at L = 10⁷ of the nested tree, nats", "ces-100", "tree-2", 14, "spce")
    gain("nested tree minus random walk", "ces-100", "tree-2", "random", 7)
    gain("exact greedy inside the budget minus the same planner projected", "ces-100", "greedy", "greedy-projected", 3.5)
    gain("nested tree minus exact greedy", "ces-100", "tree-2", "greedy", 0.3)
    level("KL of exact greedy, nats", "ces-150", "greedy", 15.8)
    both = runs[(runs["policy"] == "greedy") & runs["setting"].isin(["ces-100", "ces-150"])]
    pair = _paired(both.assign(policy=both["setting"]), "ces-150", "ces-100")
    title = f"CES: exact greedy with budget 150 minus with 100, nats, {pair['rollouts']} pairs"
    verdicts.append(Verdict(title, pair["difference"], pair["difference_stderr"], "> 0", pair["difference"] > 0, "ours"))
    level("KL of exact greedy, nats", "ces-100-published", "greedy", 11.5)

    twelve = corridor[corridor["steps"] == 12].set_index(["planner", "discount", "depth"])["information"]
    best = float(twelve["dynamic programming"].iloc[0])
    for depth, discount, target in ((5, 1.0, 1.2825), (6, 1.0, best), (8, 0.6, 1.2825)):
        value = float(twelve[("lookahead", discount, depth)])
        title = f"corridor, T = 12: information of the planner with H = {depth}, γ = {discount:g}, nats (optimum {best:.4f})"
        verdicts.append(Verdict(title, value, None, f"= {target:.4f}", abs(value - target) < 1e-4, "ours"))
    broken = int((runs["violation"] > BROKEN).sum())
    title = f"rollouts that broke a constraint, of {len(runs):,}"
    verdicts.append(Verdict(title, broken, None, "= 0", broken == 0, "ours"))
    return verdicts


def build(*, out: Path | None = None, fast: bool = False, recipe: Recipe | None = None) -> None:
    """Train the networks, run everything and write what `stored` reads. Finished parts are kept.

    Args:
        out: folder of the build; None is the package's own `data/`.
        fast: a recipe of minutes instead of hours, to try the machinery; not for figures.
        recipe: sizes of one's own.

    Raises:
        ValueError: `out` holds a build with another recipe.
    """
    out = DATA if out is None else Path(out)
    recipe = recipe or (_FAST if fast else Recipe())
    claim(out, recipe)
    for name in RECIPES:
        train(name, out, fast=fast)
    parts = out / "parts"
    if not (out / "runs.csv.gz").is_file():
        runs = _measure(recipe, None, parts, out).map(lambda x: float(f"{x:.5g}") if isinstance(x, float) else x)
        once(out / "runs.csv.gz", functools.partial(write_table, runs))
    shutil.rmtree(parts, ignore_errors=True)


def stored(data: Path = DATA) -> pd.DataFrame:
    """The rollouts that `build` left, one row each: setting, policy, seed, rollout, kl, information, spce, …"""
    return pd.read_csv(Path(data) / "runs.csv.gz")

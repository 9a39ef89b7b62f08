"""The lab's tables and curves: the paper's policy beside its baselines and ablations, on the same truths at the same seeds.

`reproduce` runs every setting, policy and seed as a part of its own, so that an interrupted run goes on where it stopped and
several processes can share the work (`cells` lists the runs, `run_cell` makes one). `build` does the same and leaves small
tables, traces for the playback and a reference posterior in `data/`.
"""

import contextlib
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from labkit.design.online.loop import OnlineTrace, run_online
from labkit.design.online.metrics import information, mean_stderr, paired, reference_noise
from labkit.design.online.peers import smc2
from labkit.design.online.policies import (
    AdamPolicy,
    AimPolicy,
    FixedPolicy,
    GridPolicy,
    OpenLoopPolicy,
    PlugInPolicy,
    Policy,
    RandomPolicy,
    best_static,
)
from labkit.filtering.grid import grid_posterior
from labkit.filtering.nested import NestedParticleFilter
from labkit.filtering.sir import TwoGroupSIR
from labkit.filtering.source import MovingSource
from labkit.filtering.state_space import StateSpaceModel, parameter_box, simulate, steps, truth_generator
from labkit.parts import claim, once, write_table
from labkit.report import Reproduction, Verdict

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Setting:
    """A task and the sizes of its runs.

    Attributes:
        title: for tables and panels.
        model: makes the model.
        steps: T.
        num_params, num_states: M and N of the filter that the policies use.
        cells: points of the reference posterior per parameter; empty where there are too many parameters for a grid.
        grid_states: its particles per point, or per importance draw where there is no grid. Noise of variance v in their
            log-evidences adds about v / 2 to the KL.
    """

    title: str
    model: Callable[[], StateSpaceModel]
    steps: int
    num_params: int
    num_states: int
    cells: tuple[int, ...] = ()
    grid_states: int = 1000


SETTINGS = {
    "sir2": Setting("SIR, 2 parameters", TwoGroupSIR.two_parameter, 80, 200, 50, (13, 15), 800),
    "sir2-scarce": Setting(
        "SIR, 2 parameters, 8 tests per step", functools.partial(TwoGroupSIR.two_parameter, tests=8), 40, 200, 50, (13, 13)
    ),
    "sir4": Setting("SIR, 4 parameters", TwoGroupSIR.four_parameter, 80, 200, 40, grid_states=400),
    "seeded": Setting("seeded outbreak", TwoGroupSIR.seeded_outbreak, 120, 200, 40, grid_states=400),
    "source": Setting("moving source, low noise", functools.partial(MovingSource, "low_noise"), 50, 200, 50, (11, 11), 2000),
    "source-paper": Setting(
        "moving source, paper's noise", functools.partial(MovingSource, "paper"), 50, 100, 50, (9, 9), 2000
    ),
    "source-paper-400": Setting(
        "moving source, paper's noise, N = 400", functools.partial(MovingSource, "paper"), 50, 100, 400, (9, 9), 2000
    ),
}
SHARES = (0.02, 0.25, 0.75, 0.98)  # constant shares of the seeded outbreak, beside ½


@dataclass(frozen=True)
class Study:
    """Policies that run on the same truths: `truth` "fixed" is the model's own, "prior" draws one per seed."""

    setting: str
    truth: str
    seeds: int
    policies: tuple[str, ...]


PLAN = (
    Study("sir2", "fixed", 30, ("random", "fixed", "best_static", "grid", "adam")),
    Study("seeded", "fixed", 20, ("random", "fixed", "grid", *(f"share-{share:g}" for share in SHARES))),
    Study("source", "fixed", 20, ("random", "fixed", "best_static", "aim", "grid", "adam")),
    Study("source-paper-400", "fixed", 6, ("random", "fixed", "aim")),
    Study("source-paper", "fixed", 6, ("random", "fixed", "aim")),
    Study("source-paper", "fixed", 2, ("adam",)),
    Study("sir2-scarce", "fixed", 20, ("random", "fixed", "best_static", "grid")),
    Study("sir2", "prior", 30, ("random", "fixed", "best_static", "grid")),
    Study("sir2", "fixed", 4, ("adam-exact", "grid-jackknife", "plug_in", "open_loop")),
    Study("sir4", "fixed", 6, ("random", "fixed", "grid")),
    Study("source", "fixed", 6, ("grid-jackknife",)),
    Study("source", "fixed", 1, ("adam-jackknife", "adam-pathwise")),
)
PLAYBACKS = {
    "sir2": ("adam", "grid", "random", "fixed", "best_static"),
    "seeded": ("grid", "random", "fixed"),
    "source": ("adam", "random", "fixed", "best_static", "aim"),
    "source-paper": ("adam", "random", "fixed", "aim"),
}
KERNELS = {
    "paper": {"jitter": "paper"},
    "paper, c = 0.2": {"jitter": "paper", "jitter_scale": 0.2},
    "bernoulli": {"jitter": "bernoulli"},
    "liu_west": {"jitter": "liu_west"},
    "none": {"jitter": None},
}
METRICS = (
    "kl",
    "ceiling",
    "gain",
    "teig",
    "teig_jackknife",
    "rmse",
    "reference_rmse",
    "state_rmse",
    "position_l2",
    "aim_cosine",
    "ess",
    "seconds",
)

Cell = tuple[str, str, str, int]  # setting, truth, policy, seed


@dataclass(frozen=True)
class Recipe:
    """Sizes of a reproduction and a build. Everything in `data/` follows from these.

    Attributes:
        seeds: upper limit on the paired runs per policy of each study in `PLAN`.
        steps, num_params, num_states, grid_states: upper limits on the settings' own.
        warm_starts, climb, num_obs: of the paper's optimiser; `designs` and `angles`: candidate shares, and
            directions of a sensor, of the grid policy.
        static_runs: simulated experiments per candidate in the search for a constant design.
        cells: upper limit on the reference posterior's points per parameter.
        draws: of the reference posterior of four parameters; `truth_states`: particles of the filter that knows θ*.
        data_sets, inference_runs, inference_steps: of the comparison of filter and reference posterior.
        cost_steps: length of the comparison of costs.
        curve: designs of the gain curves in the playback.
    """

    seeds: int = 1000
    steps: int = 1000
    num_params: int = 10_000
    num_states: int = 10_000
    grid_states: int = 10_000
    warm_starts: int = 20
    climb: int = 50
    num_obs: int = 200
    designs: int = 41
    angles: int = 10
    static_runs: int = 8
    cells: int = 1000
    truth_states: int = 4000
    draws: int = 200
    data_sets: int = 6
    inference_runs: int = 4
    inference_steps: int = 100
    cost_steps: int = 80
    curve: int = 41


_FAST = Recipe(
    seeds=2,
    steps=10,
    num_params=40,
    num_states=16,
    warm_starts=2,
    climb=3,
    num_obs=40,
    designs=7,
    angles=4,
    static_runs=1,
    cells=7,
    grid_states=40,
    truth_states=200,
    draws=40,
    data_sets=1,
    inference_runs=2,
    inference_steps=10,
    cost_steps=4,
    curve=9,
)


def cells(recipe: Recipe, seeds: int | None = None) -> list[Cell]:
    """(setting, truth, policy, seed) of every run of the plan.

    Args:
        seeds: a number of paired runs per policy of one's own.
    """
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: expected at least 1")
    return [
        (study.setting, study.truth, policy, seed)
        for study in PLAN
        for seed in range(seeds or min(study.seeds, recipe.seeds))
        for policy in study.policies
    ]


def run_cell(cell: Cell, recipe: Recipe, parts: Path) -> pd.DataFrame:
    """One run with its metrics, one row; measured once and kept in `parts` with its trace."""
    setting, truth, policy, seed = cell
    name = f"run-{setting}-{truth}-{policy}-{seed:02d}"
    task, model = _sized(SETTINGS[setting], recipe), SETTINGS[setting].model()

    def run(path: Path) -> None:
        trace = _run(cell, recipe, parts)
        empty = np.empty((len(trace) + 1, 0, 0), np.float32)
        replace(trace, theta_cloud=empty, position_cloud=empty).save(path)

    def measure(path: Path) -> None:
        trace = OnlineTrace.load(once(parts / f"{name}.npz", run))
        measured = information(
            trace,
            model,
            grid=_axes(model, task.cells),
            grid_states=task.grid_states,
            truth_states=recipe.truth_states,
            draws=recipe.draws,
            seed=seed,
        )
        measured["ess"] /= task.num_params
        if task.cells:
            measured["ceiling"] = full_state_kl(model, trace.states, _axes(model, tuple(3 * n for n in task.cells)))
        labels = {"setting": setting, "truth": truth, "policy": policy, "seed": seed}
        pd.DataFrame([labels | measured]).to_csv(path, index=False)

    return pd.read_csv(once(parts / f"{name}.csv", measure))


def full_state_kl(model: TwoGroupSIR | MovingSource, states: np.ndarray, axes: list[torch.Tensor]) -> float:
    """KL(posterior || prior) in nats of an observer who sees every state (T + 1, dx) exactly: a ceiling for any design.

    Args:
        axes: of a grid over the prior's box; two parameters.
    """
    theta = torch.cartesian_prod(*axes).double()  # (G, 2)
    x, dt = torch.as_tensor(states, dtype=torch.float64), model.dt
    if isinstance(model, MovingSource):
        heading = torch.stack([x[:-1, 2].cos(), x[:-1, 2].sin()], -1)
        surprise = x[1:, :2] - x[:-1, :2] - dt * theta[:, None] * heading  # (G, T, 2)
        log_likelihood = -(surprise**2 / (2 * dt * torch.tensor(model.process_variance[:2]))).sum((1, 2))
    else:
        move = torch.tensor([[-1, 0, 0, 0], [1, -1, 0, 0], [0, 0, -1, 0], [0, 0, 1, -1]], dtype=torch.float64)
        pressure = x[:-1, 1::2] / torch.tensor(model.population) @ torch.tensor(model.mixing, dtype=torch.float64).T
        known = torch.tensor([model.beta2, model.gamma2]).double().expand(len(theta), 2)
        rates = torch.cat([theta, known], 1)[:, None]  # (G, 1, 4)
        drivers = torch.stack([x[:-1, 0] * pressure[:, 0], x[:-1, 1], x[:-1, 2] * pressure[:, 1], x[:-1, 3]], -1)
        reactions = dt * rates * drivers  # (G, T, 4)
        covariance = (move * reactions[..., None, :]) @ move.T + (1e-3 * dt + 1e-6) * torch.eye(4)
        law = torch.distributions.MultivariateNormal(x[:-1] + reactions @ move.T, covariance)
        log_likelihood = law.log_prob(x[1:]).sum(1)
    log_posterior = log_likelihood.log_softmax(0)
    return float((log_posterior.exp() * (log_posterior + math.log(len(theta)))).sum())


def _sized(setting: Setting, recipe: Recipe) -> Setting:
    """The setting within the recipe's limits."""
    limits = {
        name: min(getattr(setting, name), getattr(recipe, name))
        for name in ("steps", "num_params", "num_states", "grid_states")
    }
    return replace(setting, cells=tuple(min(count, recipe.cells) for count in setting.cells), **limits)


def _axes(model: StateSpaceModel, counts: tuple[int, ...]) -> list[torch.Tensor] | None:
    """Midpoints of equal cells of the prior's box, so that equal weights are the prior."""
    low, high = parameter_box(model.prior())
    return [a + (b - a) * (torch.arange(n) + 0.5) / n for a, b, n in zip(low, high, counts, strict=False)]


def _run(cell: Cell, recipe: Recipe, parts: Path, curve: int | None = None) -> OnlineTrace:
    setting, truth, policy, seed = cell
    task = _sized(SETTINGS[setting], recipe)
    return run_online(
        task.model(),
        make_policy(setting, policy, recipe, parts),
        theta="prior" if truth == "prior" else None,
        steps=task.steps,
        seed=seed,
        num_params=task.num_params,
        num_states=task.num_states,
        curve=curve,
    )


def make_policy(setting: str, name: str, recipe: Recipe, parts: Path) -> Policy:
    """A policy of the plan. "best_static" is searched for once and "open_loop" planned once; both are kept in `parts`."""
    task = _sized(SETTINGS[setting], recipe)
    model = task.model()
    source = hasattr(model, "sensors")
    paper = AdamPolicy.source if source else AdamPolicy.sir
    ascent = functools.partial(paper, warm_starts=recipe.warm_starts, steps=recipe.climb, num_obs=recipe.num_obs)
    if name == "best_static":
        file = once(parts / f"static-{setting}.csv", lambda path: _search(task, recipe).to_csv(path, index=False))
        mean = pd.read_csv(file).groupby([f"design{j}" for j in range(model.design_dim)])["kl"].mean()
        return FixedPolicy(torch.tensor(np.atleast_1d(mean.idxmax()), dtype=torch.float32), name)
    if name == "open_loop":
        file = once(parts / f"plan-{setting}.csv", lambda path: _plan(task, recipe).to_csv(path, index=False))
        return OpenLoopPolicy(torch.tensor(pd.read_csv(file).to_numpy(), dtype=torch.float32))
    if name.startswith("share-"):
        return FixedPolicy(model.design_of_share(torch.tensor([float(name.removeprefix("share-"))])), name)
    return {
        "random": lambda: RandomPolicy(),
        "fixed": lambda: FixedPolicy(torch.zeros(model.design_dim)),
        "aim": lambda: AimPolicy(),
        "grid": lambda: _grid(model, recipe),
        "grid-jackknife": lambda: replace(_grid(model, recipe), jackknife=True, name=name),
        "plug_in": lambda: PlugInPolicy(_grid(model, recipe)),
        "adam": lambda: ascent(),
        "adam-exact": lambda: ascent(estimator="exact", name=name),
        "adam-jackknife": lambda: ascent(jackknife=True, name=name),
        "adam-pathwise": lambda: ascent(estimator="pathwise", name=name),
    }[name]()


def _grid(model: StateSpaceModel, recipe: Recipe) -> GridPolicy:
    """Evenly spaced shares, or all pairs of evenly spaced sensor angles."""
    if not hasattr(model, "sensors"):
        return GridPolicy(recipe.designs)
    angles = torch.arange(recipe.angles) * (2 * math.pi / recipe.angles)
    return GridPolicy(designs=torch.cartesian_prod(*[angles] * model.design_dim))


def _search(task: Setting, recipe: Recipe) -> pd.DataFrame:
    """Mean KL of constant designs: shares, or pairs of sensor angles in steps of 45°."""
    model = task.model()
    if hasattr(model, "sensors"):
        angles = torch.arange(-3, 5) * (math.pi / 4)
        designs = torch.cartesian_prod(angles, angles)
    else:
        designs = model.design_of_share(torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])).reshape(-1, 1)
    options = {"grid": _axes(model, task.cells), "num_states": min(400, task.grid_states), "runs": recipe.static_runs}
    return best_static(model, designs, steps=task.steps, **options).search


def _plan(task: Setting, recipe: Recipe) -> pd.DataFrame:
    sizes = {"num_params": task.num_params, "num_states": task.num_states}
    plan = OpenLoopPolicy.plan(task.model(), _grid(task.model(), recipe), steps=task.steps, **sizes)
    return pd.DataFrame(plan.designs.numpy(), columns=[f"design{j}" for j in range(plan.designs.shape[1])])


def inference_data(recipe: Recipe, data_set: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half of the tests to each group for T steps: designs (T, 1), hidden states (T + 1, 4), counts (T, 2)."""
    model = TwoGroupSIR.two_parameter()
    designs = torch.zeros(recipe.inference_steps, 1)
    states, ys = simulate(model, model.truth, designs, truth_generator(data_set))
    return designs, states, ys


def _reference(recipe: Recipe, data_set: int, path: Path) -> None:
    """The grid posterior of a data set, with the data, as arrays."""
    model = TwoGroupSIR.two_parameter()
    designs, states, ys = inference_data(recipe, data_set)
    axes = _axes(model, tuple(min(count, recipe.cells) for count in (25, 41)))
    posterior = grid_posterior(model, designs, ys, axes, num_states=min(1000, recipe.grid_states), seed=data_set)
    np.savez_compressed(
        path,
        theta=model.truth.numpy(),
        designs=designs.numpy(),
        states=states.numpy(),
        observations=ys.numpy(),
        axis0=axes[0].numpy(),
        axis1=axes[1].numpy(),
        probability=np.asarray(posterior.probability, np.float32),
        mean=np.asarray(posterior.mean),
        std=np.asarray(posterior.std),
        log_evidence=posterior.log_evidence_total,
    )


def _inference(recipe: Recipe, data_set: int, parts: Path) -> pd.DataFrame:
    """Nested filter against the grid posterior: one row per size, kernel, run and parameter."""
    model = TwoGroupSIR.two_parameter()
    designs, _, ys = inference_data(recipe, data_set)
    with np.load(once(parts / f"reference-{data_set}.npz", lambda path: _reference(recipe, data_set, path))) as file:
        reference = dict(file)
    sizes = [(52, 50, "paper"), (1000, 30, "paper"), *((300, 100, kernel) for kernel in KERNELS)]
    rows = []
    for num_params, num_states, kernel in sizes:
        size = min(num_params, recipe.num_params), min(num_states, recipe.num_states)
        for run in range(recipe.inference_runs):
            belief = NestedParticleFilter(model, *size, seed=100 * data_set + run, **KERNELS[kernel])
            seen = [belief.step(design, y) for design, y in steps(designs, ys)]
            for j, name in enumerate(model.param_names):
                row = {"data_set": data_set, "num_params": num_params, "num_states": num_states, "kernel": kernel, "run": run}
                row["parameter"] = name
                row["z"] = (float(seen[-1].theta_mean[j]) - reference["mean"][j]) / reference["std"][j]
                row["sd_ratio"] = float(seen[-1].theta_std[j]) / reference["std"][j]
                row["log_evidence_error"] = seen[-1].log_evidence - float(reference["log_evidence"])
                row["ess"] = np.mean([step.ess for step in seen]) / size[0]
                rows.append(row)
    return pd.DataFrame(rows)


def _cost(recipe: Recipe) -> pd.DataFrame:
    """Process seconds of each step: the nested filter's do not grow with t; those of SMC², where `particles` is there, do."""
    model, rows = TwoGroupSIR.two_parameter(), []
    designs = torch.zeros(recipe.cost_steps, 1)
    _, ys = simulate(model, model.truth, designs, truth_generator(1))

    def clock(method: str, taken: Iterable) -> None:
        start = time.process_time()
        for t, _ in enumerate(taken, start=1):
            now = time.process_time()
            rows.append({"method": method, "t": t, "seconds": now - start})
            start = now

    for size in ((50, 50), (300, 100)):
        belief = NestedParticleFilter(model, *size)
        clock(f"NPF {size[0]} × {size[1]}", (belief.step(design, y) for design, y in steps(designs, ys)))
    with contextlib.suppress(ImportError):
        clock("SMC² 50 × 50", smc2(model, ys.numpy(), 50))
    return pd.DataFrame(rows)


def _measure(recipe: Recipe, seeds: int | None, parts: Path) -> dict[str, pd.DataFrame]:
    """All measurements as tidy tables; what `parts` holds already is not measured again."""
    todo = cells(recipe, seeds)
    runs = pd.concat([run_cell(cell, recipe, parts) for cell in tqdm(todo, desc="runs", unit="run")], ignore_index=True)
    # there is so little to learn there that the noise of the reference filters would pass for information
    runs.loc[runs["setting"].str.startswith("source-paper"), "kl"] = math.nan
    inference = [
        pd.read_csv(
            once(parts / f"inference-{i}.csv", lambda path, i=i: _inference(recipe, i, parts).to_csv(path, index=False))
        )
        for i in tqdm(range(recipe.data_sets), desc="filter against grid", unit="data set")
    ]
    cost = pd.read_csv(once(parts / "cost.csv", lambda path: _cost(recipe).to_csv(path, index=False)))
    noise, judged = [], set(runs.dropna(subset="kl")["setting"])
    for setting in (name for name in PLAYBACKS if SETTINGS[name].cells and name in judged):
        seed = typical_seed(runs, setting)
        traces = (OnlineTrace.load(parts / f"run-{setting}-fixed-{policy}-{seed:02d}.npz") for policy in PLAYBACKS[setting])
        noise.append(
            pd.read_csv(
                once(
                    parts / f"noise-{setting}-{seed:02d}.csv",
                    lambda path, s=setting, t=traces: _noise(s, t, recipe).to_csv(path, index=False),
                )
            )
        )
    tables = {"runs": runs, "paths": _paths(todo, parts), "inference": pd.concat(inference), "cost": cost}
    return tables | {"noise": pd.concat(noise)}


def _noise(setting: str, traces: Iterable[OnlineTrace], recipe: Recipe) -> pd.DataFrame:
    """How noisy the reference posterior's KL is, one row per run of a setting."""
    task, model, rows = _sized(SETTINGS[setting], recipe), SETTINGS[setting].model(), []
    for trace in traces:
        found = reference_noise(trace, model, grid=_axes(model, task.cells), grid_states=task.grid_states, seed=trace.seed)
        rows.append({"setting": setting, "policy": trace.policy, "seed": trace.seed} | found)
    return pd.DataFrame(rows)


def _paths(todo: list[Cell], parts: Path) -> pd.DataFrame:
    """Mean over seeds at each step: the share of tests in group 1, the running gains, the distance to the source."""
    frames = []
    for setting, truth, policy, seed in todo:
        trace = OnlineTrace.load(parts / f"run-{setting}-{truth}-{policy}-{seed:02d}.npz")
        frame = pd.DataFrame({"t": np.arange(1, len(trace) + 1), "seed": seed})
        model = SETTINGS[setting].model()
        if hasattr(model, "share"):
            frame["share"] = model.share(torch.as_tensor(trace.designs)).numpy().reshape(len(trace), -1)[:, 0]
        else:
            frame["position_l2"] = np.linalg.norm((trace.state_mean - trace.states[1:])[:, :2], axis=-1)
        frame["teig"], frame["teig_jackknife"] = trace.eig.cumsum(), trace.eig_jackknife.cumsum()
        frames.append(frame.assign(setting=setting, truth=truth, policy=policy))
    by_step = pd.concat(frames).groupby(["setting", "truth", "policy", "t"], sort=False)
    columns = [name for name in ("share", "position_l2", "teig", "teig_jackknife") if any(name in f for f in frames)]
    mean, stderr = by_step[columns].mean(), by_step[columns].sem().add_suffix("_stderr")
    return pd.concat([mean, stderr], axis=1).reset_index()


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting, truth and policy: mean and standard error of each metric over seeds."""
    rows = []
    for (setting, truth, policy), cell in runs.groupby(["setting", "truth", "policy"], sort=False):
        row = {"setting": setting, "truth": truth, "policy": policy, "seeds": len(cell)}
        for metric in METRICS:
            row[metric], row[f"{metric}_stderr"] = mean_stderr(cell[metric]) if metric in cell else (math.nan, math.nan)
        rows.append(row)
    return pd.DataFrame(rows)


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Paired differences of the paper's policy, and of the grid policy, to every other, in nats and units of length.

    Positive gains, and negative distances, speak for the first policy.
    """
    rows = []
    columns = [metric for metric in METRICS[:9] if metric in runs and metric != "ceiling"]
    for (setting, truth), cell in runs.groupby(["setting", "truth"], sort=False):
        policies = list(cell["policy"].unique())
        for first in ("adam", "grid", "aim"):
            for second in policies if first in policies else ():
                if first != second and (first != "aim" or "adam" not in policies):
                    labels = {"setting": setting, "truth": truth, "first": first, "second": second}
                    rows.append(labels | paired(cell, columns, first, second))
    return pd.DataFrame(rows)


def summarise_inference(inference: pd.DataFrame) -> pd.DataFrame:
    """One row per filter size, kernel and parameter: bias in posterior standard deviations, spread, evidence, sample size.

    Errors are over data sets, whose runs are averaged first.
    """
    rows = []
    for labels, cell in inference.groupby(["num_params", "num_states", "kernel", "parameter"], sort=False):
        row = dict(zip(("num_params", "num_states", "kernel", "parameter"), labels, strict=True))
        for metric in ("z", "sd_ratio", "log_evidence_error", "ess"):
            row[metric], row[f"{metric}_stderr"] = mean_stderr(cell.groupby("data_set")[metric].mean())
        rows.append(row)
    return pd.DataFrame(rows)


def share_blocks(paths: pd.DataFrame, setting: str = "seeded", policy: str = "grid", length: int = 20) -> pd.Series:
    """Mean share of tests in group 1 by blocks of steps."""
    path = paths[(paths["setting"] == setting) & (paths["policy"] == policy) & (paths["truth"] == "fixed")]
    return path.groupby((path["t"] - 1) // length)["share"].mean()


def reproduce(*, fast: bool = False, seeds: int | None = None, out: Path) -> Reproduction:
    """Run every policy on every setting, measure what each learned, and compare filter and grid posterior.

    Args:
        fast: short runs of two seeds, to see that it works; not for figures.
        seeds: paired runs per policy; None is what `PLAN` says, 30 and 20 for the claims.
        out: folder whose `parts/` keeps each finished run; a second call goes on from there.
    """
    recipe = _FAST if fast else Recipe()
    measured = _measure(recipe, seeds, Path(out) / ("parts-fast" if fast else "parts"))
    runs, paths = measured["runs"], measured["paths"]
    tables = {
        "summary": summarise(runs),
        "differences": differences(runs),
        "shares": _share_table(paths),
        "inference": summarise_inference(measured["inference"]),
        "runs": runs,
        "paths": paths,
        "cost": measured["cost"],
        "noise": measured["noise"],
    }
    notes = [
        "kl: reference posterior from bootstrap filters on a grid, or at importance draws for four parameters, nats. gain: "
        "log p(y | θ*) − log p(y), nats. teig: summed expected gain at the designs played, fresh key, plain and jackknifed.",
        "ceiling: KL of an observer who sees every state exactly, whatever the designs.",
        "noise: the variance v of the reference filters' log p̂(y | θ), from a second reference of one run per policy. A KL is "
        "v/2 too large, so that single KLs of the source can exceed the ceiling; spread is the sd between two references.",
        _noise_in_words(measured["noise"]),
        f"Full-state bound of the source over 50 steps: {_bound('source-paper'):.2f} nats with the paper's noise, "
        f"{_bound('source'):.2f} with low noise.",
        "± is the standard error over seeds; differences are paired: truths and process noise are the same at a seed.",
        _margin_in_words(),
        "“fixed” truths are the paper's, “prior” ones are drawn from the prior.",
    ]
    return Reproduction(tables, _verdicts(runs, paths, measured["inference"]), notes)


def _noise_in_words(noise: pd.DataFrame) -> str:
    v = noise.set_index(["setting", "policy"])["noise"]
    excess = {setting: (v[setting, "adam"] - v[setting, "fixed"]) / 2 for setting in ("sir2", "source") if setting in v}
    words = " and ".join(f"{value:+.3f} nats ({SETTINGS[setting].title})" for setting, value in excess.items())
    return f"In KL of BAD-PODS minus fixed that noise makes {words}. Position errors and tEIG use no reference."


def _margin_in_words() -> str:
    trace = stored_trace("seeded", "grid")
    steps, shares = trace.curve.shape
    return (
        f"Seeded outbreak: at its own beliefs the stored run of the policy forgoes {forgone(trace):.3f} nats in {steps} steps "
        f"against the best of {shares} shares by the debiased gain: no search among them adds more to its margin."
    )


def forgone(trace: OnlineTrace) -> float:
    """Nats by which the best candidate of each step's stored curve exceeds the one nearest to the design played, summed."""
    played = np.abs(trace.designs[:, None] - trace.curve_designs).sum(-1).argmin(1)
    return float((trace.curve.max(1) - trace.curve[np.arange(len(trace)), played]).sum())


def _bound(setting: str) -> float:
    return float(SETTINGS[setting].model().full_state_bound(SETTINGS[setting].steps))


def _share_table(paths: pd.DataFrame) -> pd.DataFrame:
    """Mean share by blocks of 20 steps, one row per SIR setting and policy that chooses."""
    rows = []
    for setting, truth, policy in paths[["setting", "truth", "policy"]].drop_duplicates().itertuples(index=False):
        if truth == "fixed" and "source" not in setting and policy in ("adam", "grid", "plug_in", "open_loop"):
            blocks = share_blocks(paths, setting, policy)
            rows.append({"setting": setting, "policy": policy} | {f"from {20 * b + 1}": value for b, value in blocks.items()})
    return pd.DataFrame(rows)


def _verdicts(runs: pd.DataFrame, paths: pd.DataFrame, inference: pd.DataFrame) -> list[Verdict]:
    verdicts = []

    def of(setting: str, truth: str = "fixed") -> pd.DataFrame:
        return runs[(runs["setting"] == setting) & (runs["truth"] == truth)]

    def exceeds(claim, table, column, first, second, target, sigmas, source="ours"):
        pair = paired(table, [column], first, second)
        value, stderr = pair[column], pair[f"{column}_stderr"]
        wanted = (f"≥ {target:g}" if target else "> 0") + (f", > {sigmas:g} s.e." if sigmas else "")
        holds = value >= target and value > sigmas * stderr
        verdicts.append(Verdict(f"{claim}, {pair['seeds']} seeds", value, stderr, wanted, bool(holds), source))

    for setting in ("sir2", "source"):
        for second in ("random", "fixed"):
            claim = f"{SETTINGS[setting].title}: BAD-PODS learns more than {second}, KL in nats"
            exceeds(claim, of(setting), "kl", "adam", second, 0, 2, "paper")
    for policy, name in (("adam", "paper's schedule"), ("grid", "grid of the enumerated gain")):
        for second, target in (("fixed", 0.3), ("random", 0.2)):
            claim = f"SIR, 2 parameters: KL of BAD-PODS ({name}) minus {second}, nats"
            exceeds(claim, of("sir2"), "kl", policy, second, target, 2)
    for second in ("fixed", "random"):
        claim = f"SIR, 2 parameters, truths from the prior: KL of BAD-PODS (grid) minus {second}, nats"
        exceeds(claim, of("sir2", "prior"), "kl", "grid", second, 0, 2)
    for second in ("fixed", "random"):
        claim = f"SIR, 2 parameters, 8 tests per step: KL of BAD-PODS (grid) minus {second}, nats"
        exceeds(claim, of("sir2-scarce"), "kl", "grid", second, 0, 2)

    blocks = share_blocks(paths).tolist()
    claim = "seeded outbreak: mean share of tests in group 1 over the first 20 steps"
    verdicts.append(Verdict(claim, blocks[0], None, "> 0.7", blocks[0] > 0.7, "ours"))
    claim = "seeded outbreak: the same over the last 20 steps"
    verdicts.append(Verdict(claim, blocks[-1], None, "≤ 0.5", blocks[-1] <= 0.5, "ours"))
    for second in ("random", "fixed"):
        claim = f"seeded outbreak: realised gain of BAD-PODS minus {second}, nats"
        exceeds(claim, of("seeded"), "gain", "grid", second, 0, 1)
        claim = f"seeded outbreak: KL of BAD-PODS minus {second}, nats"
        exceeds(claim, of("seeded"), "kl", "grid", second, 0, 2)
    constants = ["fixed", *(f"share-{share:g}" for share in SHARES)]
    best = of("seeded").groupby("policy")["teig_jackknife"].mean()[constants].idxmax()
    claim = f"seeded outbreak: jackknifed tEIG of BAD-PODS minus the best constant share's ({best}), nats"
    exceeds(claim, of("seeded"), "teig_jackknife", "grid", best, 0, 1)

    source = of("source")
    exceeds("source, low noise: KL of BAD-PODS minus fixed, nats", source, "kl", "adam", "fixed", 0.3, 1)
    exceeds("source, low noise: KL of BAD-PODS (grid of exact gains) minus fixed, nats", source, "kl", "grid", "fixed", 0.3, 1)
    for second in ("random", "aim"):
        value, stderr = _ratio(source, "position_l2", "adam", second)
        claim = f"source, low noise: position error of BAD-PODS relative to {second}"
        verdicts.append(Verdict(claim, value, stderr, "≤ 0.85", value <= 0.85, "ours"))

    filters = summarise_inference(inference)
    for _, row in filters[(filters["num_params"] == 1000)].iterrows():
        name = row["parameter"]
        claim = f"filter against grid at M = 1000, bias of {name} in posterior sd"
        verdicts.append(Verdict(claim, row["z"], row["z_stderr"], "|z| < 0.5", bool(abs(row["z"]) < 0.5), "predecessor"))
        claim = f"filter against grid at M = 1000, sd ratio of {name}"
        ratio = row["sd_ratio"]
        verdicts.append(Verdict(claim, ratio, row["sd_ratio_stderr"], "≤ 1.3", bool(ratio <= 1.3), "predecessor"))

    bound = _bound("source-paper")
    fine, coarse = of("source-paper-400"), of("source-paper")
    value, stderr = mean_stderr(fine.groupby("seed")["teig_jackknife"].mean())
    claim = f"source, paper's noise: jackknifed tEIG at N = 400 over the bound of {bound:.2f} nats"
    verdicts.append(Verdict(claim, value / bound, stderr / bound, "≤ 1.15", value <= 1.15 * bound, "ours"))
    value, stderr = mean_stderr(coarse.groupby("seed")["teig"].mean())
    claim = "source, paper's noise: plain tEIG at N = 50 over the same bound, an impossible number"
    verdicts.append(Verdict(claim, value / bound, stderr / bound, "> 2", value > 2 * bound, "ours"))
    return verdicts


def _ratio(runs: pd.DataFrame, column: str, first: str, second: str) -> tuple[float, float]:
    """Ratio of two policies' means over the seeds that both have run, and its standard error (delta method)."""
    a, b = (runs[runs["policy"] == policy].set_index("seed")[column] for policy in (first, second))
    a, b = a.align(b, join="inner")
    ratio = a.mean() / b.mean()
    return float(ratio), float((a - ratio * b).sem() / b.mean())


def build(*, out: Path | None = None, fast: bool = False, recipe: Recipe | None = None) -> None:
    """Measure everything and write what `stored`, `stored_trace` and `stored_reference` read. Finished parts are kept.

    Args:
        out: folder of the build; None is the package's own `data/`.
        fast: a recipe of a minute instead of hours, to try the machinery; not for figures.
        recipe: sizes of one's own.

    Raises:
        ValueError: `out` holds a build with another recipe.
    """
    out = DATA if out is None else Path(out)
    recipe = recipe or (_FAST if fast else Recipe())
    claim(out, recipe)
    parts = out / "parts"
    if not all((out / f"{name}.csv.gz").is_file() for name in _TABLES):
        for name, table in _measure(recipe, None, parts).items():
            once(out / f"{name}.csv.gz", functools.partial(write_table, _rounded(table)))
    once(out / "reference.npz", lambda path: _reference(recipe, 1, path))
    runs = pd.read_csv(out / "runs.csv.gz")
    for setting, policies in PLAYBACKS.items():
        seed = typical_seed(runs, setting)
        curve = recipe.curve if "source" not in setting else None
        for policy in tqdm(policies, desc=f"playback, {setting}", unit="trace"):
            cell = setting, "fixed", policy, seed
            once(
                out / f"trace-{setting}-{policy}.npz",
                lambda path, cell=cell, curve=curve: _run(cell, recipe, parts, curve).save(path),
            )
    shutil.rmtree(parts, ignore_errors=True)


_TABLES = ("runs", "paths", "inference", "cost", "noise")


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Six significant digits: what the tables can tell, in a fifth of the bytes."""
    return table.map(lambda value: float(f"{value:.6g}") if isinstance(value, float) else value)


def typical_seed(runs: pd.DataFrame, setting: str) -> int:
    """The seed whose runs lie closest to their policies' means, in standard deviations: no lucky playback."""
    table = runs[(runs["setting"] == setting) & (runs["truth"] == "fixed")]
    metric = "teig_jackknife" if table["kl"].isna().all() else "kl"
    wide = table.pivot(index="seed", columns="policy", values=metric)[list(PLAYBACKS[setting])].dropna()
    return int((((wide - wide.mean()) / wide.std()) ** 2).sum(axis=1).idxmin())


def stored(name: str, data: Path = DATA) -> pd.DataFrame:
    """A table that `build` left: "runs", "paths", "inference", "cost" or "noise"."""
    if name not in _TABLES:
        raise ValueError(f"name={name!r}: expected one of {', '.join(_TABLES)}")
    return pd.read_csv(Path(data) / f"{name}.csv.gz")


def stored_trace(setting: str, policy: str, data: Path = DATA) -> OnlineTrace:
    """The playback of a setting and policy; see `PLAYBACKS`."""
    if policy not in PLAYBACKS.get(setting, ()):
        known = "; ".join(f"{key}: {', '.join(policies)}" for key, policies in PLAYBACKS.items())
        raise ValueError(f"setting={setting!r}, policy={policy!r}: the playbacks are {known}")
    return OnlineTrace.load(Path(data) / f"trace-{setting}-{policy}.npz")


def stored_reference(data: Path = DATA) -> dict[str, np.ndarray]:
    """The data set of the filter panel with its grid posterior.

    Returns:
        `theta` (2,), `designs` (T, 1), `states` (T + 1, 4), `observations` (T, 2), `axis0` (G0,), `axis1` (G1,),
        `probability` (G0, G1), `mean` (2,), `std` (2,), `log_evidence` in nats.
    """
    with np.load(Path(data) / "reference.npz", allow_pickle=False) as file:
        return dict(file)

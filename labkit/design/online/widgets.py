"""Live panels of lab 05. Each opens on something worth looking at; stored runs come from `labkit build 05`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch

from labkit.design.online import experiment, figures
from labkit.design.online.eig import eig
from labkit.design.online.gradient import eig_grad
from labkit.design.online.loop import OnlineTrace, online_steps
from labkit.design.online.policies import FixedPolicy, GridPolicy, RandomPolicy, adam_ascent
from labkit.filtering.linear_gaussian import LinearGaussianSSM
from labkit.filtering.nested import Clouds, NestedParticleFilter
from labkit.filtering.sir import TwoGroupSIR
from labkit.filtering.source import wrap
from labkit.panel import Panel, Playback, Progress
from labkit.theme import fmt, percent

Stored = Callable[[str, str], OnlineTrace]

CANDIDATES = 17  # shares among which a new run chooses
FEW = 6  # pairs of runs below which no difference is called clear
_KEPT = 8  # new runs in memory


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs on the same truth: the designed one and the one beside it; `key` is (setting, other policy, seed)."""

    key: tuple[str, str, int]
    policy: OnlineTrace
    other: OnlineTrace


def playback(stored: Stored = experiment.stored_trace, step: int = 90) -> Panel:
    """The headline: an epidemic under two ways to test, step by step, stored or run anew with another seed.

    Args:
        stored: `(setting, policy) -> OnlineTrace`.
        step: the frame to open with.
    """
    designed = {"seeded": "grid", "sir2": "adam"}
    beside = {name: [p for p in experiment.PLAYBACKS[name] if p in ("random", "fixed", "best_static")] for name in designed}
    trace_of = functools.lru_cache(maxsize=16)(stored)
    finished: dict[tuple[str, str, int], Pair] = {}

    def at_rest(setting: str, other: str) -> Pair:
        policy = trace_of(setting, designed[setting])
        return Pair((setting, other, policy.seed), policy, trace_of(setting, other))

    def compute() -> Iterator[Progress]:
        key = epidemic.value, rival.value, luck.value
        if key in finished:
            yield Progress(1, 1, finished[key])
            return
        task = experiment.SETTINGS[key[0]]
        policies = {"random": RandomPolicy(), "fixed": FixedPolicy(torch.zeros(1))}
        if key[1] not in policies:
            policies[key[1]] = FixedPolicy(torch.as_tensor(trace_of(key[0], key[1]).designs[0]), key[1])
        options = dict(steps=task.steps, num_params=task.num_params, num_states=task.num_states, seed=key[2], curve=CANDIDATES)
        runs = (online_steps(task.model(), policy, **options) for policy in (GridPolicy(CANDIDATES), policies[key[1]]))
        for t, (policy, other) in enumerate(zip(*runs, strict=True), 1):
            latest = Pair(key, policy, other)
            shown = t == task.steps or t % max(1, task.steps // 20) == 0  # drawing every step would take a third of the time
            yield Progress(t, task.steps, latest if shown else None)
        while len(finished) >= _KEPT:
            finished.pop(next(iter(finished)))
        finished[key] = latest

    def draw(figure, result: Pair, step: int, setting: str, other: str, compartment: str, seed: int) -> str:
        key = setting, other, seed
        pair = finished.get(key) or (result if result.key == key else at_rest(setting, other))
        task = experiment.SETTINGS[setting]
        length = len(pair.policy.designs)
        t = min(step, length)
        figures.draw_playback(figure, pair.policy, pair.other, task, t, compartment)
        words = _step_in_words(pair, task, t)
        if step > length:
            words = f"{words} (This run has come to step {length} only.)"
        return words if pair.key == key else f"{words} (Seed {pair.key[2]}: press <b>Run this seed</b> for seed {seed}.)"

    first = at_rest("seeded", beside["seeded"][0])
    epidemics = [("outbreak in group 1, four unknown rates", "seeded"), ("both groups, two unknown rates", "sir2")]
    epidemic = widgets.Dropdown(options=epidemics, description="Epidemic")
    rival = widgets.Dropdown(options=_named(beside["seeded"]), description="Beside the design")
    luck = widgets.IntSlider(value=first.key[2], min=0, max=max(29, first.key[2]), description="Seed of truth and noise")
    clock = Playback(len(first.policy.designs) + 1, description="Step", interval=250, value=step)

    def offer(change: Mapping) -> None:
        panel.cancel()  # else its progress would pass for that of the epidemic shown
        trace = trace_of(change["new"], designed[change["new"]])
        rival.options = _named(beside[change["new"]])
        luck.max = max(29, trace.seed)
        luck.value, clock.frames = trace.seed, len(trace.designs) + 1

    epidemic.observe(offer, "value")  # before the panel looks at it
    panel = Panel(
        "playback",
        figure=figures.playback(),
        compute=compute,
        draw=draw,
        controls={},
        view={
            "step": clock,
            "setting": epidemic,
            "other": rival,
            "compartment": widgets.Dropdown(options=list(figures.COMPARTMENTS), description="People shown"),
            "seed": luck,
        },
        caption="Dots: positives of each step, scaled up to the group. Shading: what each share promised about then, darkest "
        "at the best. Look how the best share moves with the epidemic, and who follows. Below: rates that are still credible, "
        "50 and 90 %; crosses are the true ones, with the number of their group.",
        start="Run this seed",
        initial=first,
    )
    return panel


def _named(policies: list[str]) -> list[tuple[str, str]]:
    return [(figures.NAMES[policy], policy) for policy in policies]


def _step_in_words(pair: Pair, task: experiment.Setting, t: int) -> str:
    if t == 0:
        return "Before the first test: all rates in the box are equally credible, and nothing has been measured."
    name = figures.NAMES[pair.other.policy]
    share, rival_share = (percent(float(figures.share_of(run.designs[t - 1 : t])[0])) for run in (pair.policy, pair.other))
    found, rival_found = (" + ".join(f"{n:.0f}" for n in run.observations[t - 1]) for run in (pair.policy, pair.other))
    gain, rival_gain = (fmt(float(run.eig_jackknife[:t].sum()), 2) for run in (pair.policy, pair.other))
    sick = " and ".join(f"{n:.0f}" for n in pair.policy.states[t, 1::2])
    return (
        f"Step <b>{t}</b> of {task.steps}: {sick} people are infected. Tests to group 1: <b>{share}</b> by design, {name} "
        f"{rival_share}. Positives: {found}, {name} {rival_found}. Information expected so far: <b>{gain}</b> nats, {name} "
        f"{rival_gain}."
    )


def source_playback(stored: Stored = experiment.stored_trace, step: int = 30) -> Panel:
    """A moving source and two sensors to turn: the paper's policy beside another, step by step.

    Args:
        stored: `(setting, policy) -> OnlineTrace`.
        step: the frame to open with.
    """
    trace_of = functools.lru_cache(maxsize=16)(stored)
    names = {setting: [p for p in experiment.PLAYBACKS[setting] if p != "adam"] for setting in ("source", "source-paper")}

    def draw(figure, _, step: int, setting: str, other: str) -> str:
        task = experiment.SETTINGS[setting]
        policy, beside, model = trace_of(setting, "adam"), trace_of(setting, other), task.model()
        figures.draw_source_playback(figure, policy, beside, model, step)
        bound = fmt(model.full_state_bound(task.steps), 2)
        if step == 0:
            return f"Before the first step. No way to turn the sensors can bring more than {bound} nats in {task.steps} steps."
        angles = " and ".join(f"{np.degrees(float(wrap(torch.tensor(a)))):.0f}°" for a in policy.designs[step - 1])
        gaps = [np.linalg.norm((run.state_mean - run.states[1:])[:step, :2], axis=1).mean() for run in (policy, beside)]
        gains = [run.eig_jackknife[:step].sum() for run in (policy, beside)]
        plain = policy.eig[:step].sum()
        name = figures.NAMES[other]
        return (
            f"Step <b>{step}</b> of {task.steps}: the sensors look along {angles.replace('-', '−')} (0° is east, 90° north). "
            f"Mean distance to the source <b>{fmt(gaps[0], 2)}</b>, {name} {fmt(gaps[1], 2)}. Expected information "
            f"<b>{fmt(gains[0], 2)}</b> nats, {name} {fmt(gains[1], 2)}; without the jackknife {fmt(plain, 2)}. At most "
            f"{bound} can be had by the end."
        )

    noise = widgets.ToggleButtons(
        options=[("low noise", "source"), ("paper's noise", "source-paper")], description="Process noise"
    )
    rival = widgets.Dropdown(options=_named(names["source"]), description="Beside the paper's policy")

    def offer(change: Mapping) -> None:
        kept = rival.value
        rival.options = _named(names[change["new"]])
        if kept in names[change["new"]]:
            rival.value = kept

    noise.observe(offer, "value")
    return Panel(
        "source-playback",
        figure=figures.source_playback(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "step": Playback(experiment.SETTINGS["source"].steps + 1, description="Step", interval=300, value=step),
            "setting": noise,
            "other": rival,
        },
        caption="A sensor hears best along its lobe. Look where the design turns them: not at the source but past it, where "
        "the edge of a lobe tells angles apart. Dashed: what one who sees the source itself could learn.",
    )


def share(trace: OnlineTrace, model: TwoGroupSIR, value: float = 0.5) -> Panel:
    """Where do you test? One share for the whole outbreak, beside the best share at each step.

    Args:
        trace: a run with EIG curves; its truth and beliefs are used.
        model: the model it ran on.
        value: share of the tests in group 1 to open with, from 0.02 to 0.98.
    """
    if not 0.02 <= value <= 0.98:
        raise ValueError(f"value={value}: expected a share of the tests from 0.02 to 0.98")

    def draw(figure, _, share: float) -> str:
        yours, best = figures.draw_share(figure, trace, model, share)
        return (
            f"{percent(share)} of the tests in group 1, always: <b>{fmt(yours, 2)}</b> nats promised over {len(trace.designs)} "
            f"steps. The best share at each step promises {fmt(best, 2)}: you forgo {percent(1 - yours / best)} of it."
        )

    slider = widgets.FloatSlider(value=value, min=0.02, max=0.98, step=0.02, readout_format=".0%")
    slider.description = "Tests given to group 1"
    return Panel(
        "share",
        figure=figures.share(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={"share": slider},
        caption="Left, the positives that your share finds; right, how much of what a step's tests could teach about the four "
        "rates it forgoes. Move from one end to the other: look when each end is the wrong one.",
    )


def simulator(paths: int = 200, steps: int = 150) -> Panel:
    """Two hundred simulated epidemics beside their noise-free limit.

    Args:
        paths: simulations.
        steps: T.
    """

    def compute(beta: float, gamma: float, mixing: float, tests: int, sensitivity: float, again: int):
        meets = ((1 - mixing, mixing), (mixing, 1 - mixing))
        model = TwoGroupSIR.seeded_outbreak(mixing=meets, tests=tests, sensitivity=(0.95, sensitivity))
        theta = torch.tensor([[beta, gamma, beta, gamma]])
        generator = torch.Generator().manual_seed(again)
        states = [model.initial(theta, paths, generator)]
        for _ in range(steps):
            states.append(model.transition(states[-1], theta, None, generator))
        states = torch.cat(states)  # (T + 1, R, 4)
        expected = model.positive_rates(states[1:, 0], torch.zeros(1))
        ode = model.ode(theta[0], model.dt * np.arange(steps + 1))
        return (
            states[..., 1::2].movedim(0, 1).numpy(),
            ode[:, 1::2],
            expected.numpy(),
            torch.poisson(expected, generator).numpy(),
        )

    def draw(figure, result) -> str:
        infected, ode, expected, found = result
        figures.draw_simulator(figure, infected, ode, expected, found)
        died = percent(float((infected[:, -1].sum(1) < 1).mean()))
        late = float(np.ptp(np.quantile(infected.argmax(1)[:, 0], (0.05, 0.95))))
        return (
            f"At its peak {ode[:, 0].max():.0f} people of group 1 are infected in the limit without noise; the peaks of "
            f"{percent(0.9)} of the simulations lie within {late:.0f} steps, and {died} have died out by the last step. "
            f"One of them gave {found.sum(0)[0]:.0f} and {found.sum(0)[1]:.0f} positive tests, half of the tests in each group."
        )

    def rate(description: str, value: float, low: float, high: float) -> widgets.FloatSlider:
        return widgets.FloatSlider(description=description, value=value, min=low, max=high, step=0.05)

    figure = figures.simulator()
    figure.layout.xaxis.range = figure.layout.xaxis2.range = (0, steps)
    figure.layout.yaxis.range, figure.layout.yaxis2.range = (0, 160), (0, 60)
    return Panel(
        "simulator",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "beta": rate("Infection rate β (1/time)", 0.6, 0.1, 1.0),
            "gamma": rate("Recovery rate γ (1/time)", 0.15, 0.1, 1.0),
            "mixing": rate("Contacts with the other group (share)", 0.1, 0.0, 0.5),
            "tests": widgets.IntSlider(description="Tests per step κ", value=100, min=10, max=200, step=10),
            "sensitivity": rate("Sensitivity of group 2's test ρ₂", 0.5, 0.1, 0.95),
            "again": widgets.Button(description="Simulate again"),
        },
        caption="Five infected people in group 1, none in group 2. Look at the spread of the thin lines: the limit without "
        "noise (dashed) hides when the outbreak comes, and whether it comes at all.",
        fit=True,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FilterRun:
    """A nested filter's way through a data set: clouds (M, 2) at t = 0 … T, quantiles (T, 3, 4), ESS / M (T,), and the end."""

    size: tuple[int, int]
    clouds: list[np.ndarray]
    quantiles: np.ndarray
    ess: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    log_evidence: float


def nested_filter(reference: Mapping[str, np.ndarray], seed: int = 0) -> Panel:
    """The nested particle filter at work beside the posterior of a grid of filters.

    Args:
        reference: a data set with its grid posterior, from `experiment.stored_reference`.
        seed: of the filter.
    """
    model = TwoGroupSIR.two_parameter()
    designs, ys = (torch.as_tensor(reference[name]) for name in ("designs", "observations"))
    steps = len(designs)

    def compute(num_params: int, num_states: int, scale: float) -> Iterator[Progress]:
        belief = NestedParticleFilter(model, num_params, num_states, jitter_scale=scale, seed=seed)
        clouds, found = [belief.theta.numpy()], []
        for t, (design, y) in enumerate(zip(designs, ys, strict=True), 1):
            found.append(belief.step(design, y))
            clouds.append(belief.theta.numpy())
            run = None
            if t == steps:
                quantiles = np.stack([step.state_quantiles.numpy() for step in found])
                ess = np.array([step.ess for step in found]) / num_params
                mean, std = found[-1].theta_mean.numpy(), found[-1].theta_std.numpy()
                run = FilterRun((num_params, num_states), clouds, quantiles, ess, mean, std, found[-1].log_evidence)
            yield Progress(t, steps, run)

    def draw(figure, run: FilterRun, step: int) -> str:
        figures.draw_nested_filter(figure, run.clouds, run.quantiles, run.ess, step)
        bias, spread = (run.mean - reference["mean"]) / reference["std"], run.std / reference["std"]
        names = ("β₁", "γ₁")
        words = "; ".join(
            f"{name} is off by {fmt(float(b), 2)} sd and <b>{fmt(float(r), 2)} times</b> as wide"
            for name, b, r in zip(names, bias, spread, strict=True)
        )
        shown = "before the first test" if step == 0 else f"ESS/M {fmt(float(run.ess[step - 1]), 2)} at step {step}"
        sizes = f"{run.size[0]} × {run.size[1]} particles"
        return f"{sizes}, {shown}. At the end, against the reference: {words}; log evidence {fmt(run.log_evidence, 4)}."

    figure = figures.nested_filter()
    truth = reference["states"], reference["theta"]
    figures.draw_reference(figure, (reference["axis0"], reference["axis1"]), reference["probability"], *truth)
    numbers = dict(continuous_update=False)
    kernels = [("0.02", 0.02), ("0.2", 0.2), ("2, the paper's code", 2.0), ("10", 10.0)]
    return Panel(
        "nested-filter",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "num_params": widgets.SelectionSlider(
                options=[25, 52, 100, 300, 1000], value=300, description="Parameters M", **numbers
            ),
            "num_states": widgets.SelectionSlider(
                options=[10, 25, 50, 100], value=50, description="States per parameter N", **numbers
            ),
            "scale": widgets.SelectionSlider(options=kernels, value=2.0, description="Jitter c", **numbers),
        },
        view={"step": Playback(steps + 1, description="Step", interval=200, value=steps)},
        caption="At the last step the cloud should fill the grey regions and no more. Look at M = 52, the default of the "
        "paper's code: jitter of variance c / M^1.5 then blows the posterior of γ₁ up.",
        background=True,
    )


def bias(slope: float = 1.5, spread: float = 0.1, prior_sd: float = 0.05) -> Panel:
    """A linear-Gaussian case with a closed form: how wrong is an estimate from N states per parameter?

    Args:
        slope: c, of the state's mean in θ.
        spread: P, the state's variance given θ.
        prior_sd: s of θ; small, so that there is little to learn and the bias stands out.
    """
    model = LinearGaussianSSM(prior_sd=prior_sd)
    designs = torch.linspace(0.1, 2, 9)[:, None]
    fine = torch.linspace(0.05, 2.05, 81)[:, None]
    exact = model.closed_form_eig(fine, c=slope, P=spread, s=prior_sd).numpy()
    num_params, repeats = 100, 4

    def compute(num_states: int, jackknife: bool):
        values = []
        for repeat in range(repeats):
            generator = torch.Generator().manual_seed(repeat)
            theta = prior_sd * torch.randn(num_params, 1, generator=generator)
            noise = torch.randn(num_params, num_states, 1, generator=generator)
            belief = Clouds(model, theta, slope * theta[:, None] + spread**0.5 * noise)
            values.append(eig(belief, designs, method="quadrature", jackknife=jackknife, seed=repeat).value.numpy())
        values = np.stack(values)
        return num_states, jackknife, values.mean(0), values.std(0, ddof=1) / repeats**0.5

    def draw(figure, result) -> str:
        num_states, jackknife, value, stderr = result
        traces = figures.keyed(figure)
        traces["exact"].update(x=fine[:, 0].numpy(), y=exact)
        traces["estimate"].update(x=designs[:, 0].numpy(), y=value, error_y_array=2 * stderr)
        truth = float(model.closed_form_eig(designs[4], c=slope, P=spread, s=prior_sd))
        kind = "with" if jackknife else "without"
        return (
            f"N = {num_states}, {kind} the jackknife: at the middle design the estimate is <b>{fmt(float(value[4]) / truth)} "
            f"times</b> the exact {fmt(truth)} nats."
        )

    figure = figures.bias()
    figure.layout.xaxis.range, figure.layout.yaxis.range = (0, 2.1), (-0.005, 0.13)
    return Panel(
        "bias",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "num_states": widgets.SelectionSlider(options=[10, 20, 50, 100], value=20, description="States per parameter N"),
            "jackknife": widgets.Checkbox(value=False, description="Jackknife over N"),
        },
        caption=f"Mean of {repeats} clouds of M = {num_params}. A small cloud betrays which parameter it belongs to, and that "
        "looks like information: look how the points come down as N grows, and what the jackknife does at N = 20.",
    )


def eig_curve(beliefs: Mapping[int, Clouds]) -> Panel:
    """What each share is worth at a step: all counts enumerated, beside a sampled estimate with its error.

    Args:
        beliefs: step → clouds of an SIR model.
    """
    model = next(iter(beliefs.values())).model
    shares = torch.linspace(0, 1, CANDIDATES)
    designs, few = model.design_of_share(shares)[:, None], shares[1::2]
    exact = dict(method="enumerate", jackknife=True)
    curves = {step: eig(belief, designs, **exact).value.numpy() for step, belief in beliefs.items()}

    def compute(step: int, num_obs: int, again: int):
        options = dict(num_obs=num_obs, jackknife=True, seed=again)
        return step, num_obs, eig(beliefs[step], model.design_of_share(few)[:, None], **options)

    def draw(figure, result) -> str:
        step, num_obs, sampled = result
        traces, curve = figures.keyed(figure), curves[step]
        best = int(curve.argmax())
        traces["enumerated"].update(x=100 * shares.numpy(), y=curve)
        traces["best"].update(x=[100 * float(shares[best])], y=[curve[best]])
        traces["sampled"].update(x=100 * few.numpy(), y=sampled.value.numpy(), error_y_array=2 * sampled.stderr.numpy())
        return (
            f"After {step} steps the best share for the next is <b>{percent(float(shares[best]))}</b>. Between the best and "
            f"the worst share lie {fmt(float(np.ptp(curve)), 2)} nats; a value sampled with L = {num_obs} has a standard error "
            f"of {fmt(float(sampled.stderr.median()), 2)}."
        )

    figure = figures.eig_curve()
    figure.layout.yaxis.range = (0, figures.nice(1.5 * max(curve.max() for curve in curves.values())))
    steps = list(beliefs)
    return Panel(
        "eig-curve",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "step": widgets.SelectionSlider(
                options=steps, value=steps[len(steps) // 2], description="Steps observed so far", continuous_update=False
            ),
            "num_obs": widgets.SelectionSlider(
                options=[50, 200, 800, 3200], value=200, description="Simulated observations L", continuous_update=False
            ),
            "again": widgets.Button(description="Sample again"),
        },
        caption="The curve is flat: look how the sampled values scatter by more than it rises, and how many observations it "
        "takes to see its top.",
    )


def ascent(beliefs: Mapping[int, Clouds], source: Clouds) -> Panel:
    """Adam on one decision, and the spread of two gradient estimators.

    Args:
        beliefs: step → clouds of an SIR model.
        source: clouds of a source model, whose Gaussian observations allow both estimators.
    """
    model = next(iter(beliefs.values())).model
    shares = torch.linspace(0, 1, 21)
    angles = torch.tensor([2.36, -0.79])
    iterations, draws = 50, 40

    @functools.lru_cache(maxsize=64)
    def curve(step: int) -> np.ndarray:
        return eig(beliefs[step], model.design_of_share(shares)[:, None], method="enumerate").value.numpy()

    @functools.lru_cache(maxsize=16)
    def gradients(num_obs: int) -> dict[str, np.ndarray]:
        return {
            name: np.array(
                [float(eig_grad(source, angles, estimator=name, num_obs=num_obs, seed=k)[1][0]) for k in range(draws)]
            )
            for name in ("score", "pathwise")
        }

    def compute(step: int, share: float, rate: float, num_obs: int) -> Iterator[Progress]:
        path = []
        seeds = range(iterations)
        for k, now in enumerate(
            adam_ascent(beliefs[step], model.design_of_share([share]), seeds, lr=rate, bound=6.0, num_obs=num_obs)
        ):
            path.append(float(model.share(now.after)))
            done = k + 1 == iterations
            yield Progress(k + 1, iterations, (curve(step), np.array(path), gradients(num_obs)) if done else None)

    def draw(figure, result) -> str:
        values, path, spread = result
        traces = figures.keyed(figure)
        traces["curve"].update(x=100 * shares.numpy(), y=values)
        heights = np.interp(path, shares.numpy(), values)
        traces["path"].update(x=100 * path, y=heights, marker_color=np.arange(len(path)), marker_cmax=len(path))
        traces["end"].update(x=[100 * path[-1]], y=[heights[-1]])
        for place, (name, sample) in enumerate(spread.items()):
            offset = np.linspace(-0.25, 0.25, len(sample))
            traces[name].update(x=place + offset, y=sample)
            error = 2 * sample.std(ddof=1) / len(sample) ** 0.5
            traces[f"{name}/mean"].update(x=[place], y=[sample.mean()], error_y_array=[error])
        low, high = values.min(), values.max()
        figure.layout.yaxis.range = (low - 0.15 * (high - low), high + 0.15 * (high - low))
        ratio = spread["score"].std() / spread["pathwise"].std()
        return (
            f"Adam ends at <b>{percent(float(path[-1]))}</b>, where the gain is {percent(float(heights[-1] / high))} of the "
            f"best. Right: single score gradients spread <b>{fmt(float(ratio), 2)} times</b> as far as pathwise ones."
        )

    steps = list(beliefs)
    figure = figures.ascent()
    reach = float(np.abs(gradients(200)["score"]).max())
    figure.layout.yaxis2.range = (-figures.nice(1.5 * reach), figures.nice(1.5 * reach))
    release = dict(continuous_update=False)
    return Panel(
        "ascent",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "step": widgets.SelectionSlider(
                options=steps, value=steps[len(steps) // 4], description="Steps observed so far", **release
            ),
            "share": widgets.FloatSlider(
                value=0.2,
                min=0.02,
                max=0.98,
                step=0.02,
                description="Tests to group 1 at the start",
                readout_format=".0%",
                **release,
            ),
            "rate": widgets.SelectionSlider(
                options=[0.01, 0.03, 0.1, 0.3], value=0.1, description="Learning rate α", **release
            ),
            "num_obs": widgets.SelectionSlider(
                options=[50, 200, 800], value=200, description="Simulated observations L", **release
            ),
        },
        caption="Fifty steps, each with fresh samples. Look how far they carry at 0.03, the rate of the paper's code, and how "
        "they wander on the flat top.",
        background=True,
    )


def comparison(runs: pd.DataFrame) -> Panel:
    """All policies on the same truths: means with 95 % intervals by Student's t, and paired differences.

    Args:
        runs: from `experiment.stored("runs")`.
    """
    summary, pairs = experiment.summarise(runs), experiment.differences(runs)
    cases = list(runs[["setting", "truth"]].drop_duplicates().itertuples(index=False, name=None))

    def rows_of(table: pd.DataFrame, case: tuple[str, str]) -> pd.DataFrame:
        return table[(table["setting"] == case[0]) & (table["truth"] == case[1])]

    def measured(case: tuple[str, str]) -> list[tuple[str, str]]:
        rows = rows_of(summary, case)
        return [(text, name) for name, text in figures.METRICS.items() if name in pairs and rows[name].notna().all()]

    def draw(figure, _, case: tuple[str, str], metric: str) -> str:
        gaps = rows_of(pairs, case)
        gaps = gaps[gaps["first"] == gaps["first"].iloc[0]]
        figures.draw_comparison(figure, rows_of(summary, case), gaps, metric)
        random = gaps[gaps["second"] == "random"].iloc[0]
        value, stderr = random[metric], random[f"{metric}_stderr"]
        count = int(random["seeds"])
        if count < FEW:
            verdict = "too few to tell whether it is luck"
        elif abs(value) > figures.interval_factor(count) * stderr:
            verdict = "the 95\u202f% interval leaves out zero"
        else:
            verdict = "the 95\u202f% interval holds zero"
        return (
            f"{figures.NAMES[random['first']]} minus random: <b>{fmt(value, 2)} ± {fmt(stderr, 2)}</b> (s.e. over "
            f"{count} pairs of runs): {verdict}."
        )

    def title(setting: str, truth: str) -> str:
        return experiment.SETTINGS[setting].title + ("; true rates drawn from the prior" if truth == "prior" else "")

    case = widgets.Dropdown(options=[(title(*case), case) for case in cases], description="Setting")
    metric = widgets.Dropdown(options=measured(cases[0]), description="Metric")

    def offer(change: Mapping) -> None:
        offered = measured(change["new"])
        kept = metric.value if metric.value in dict(map(reversed, offered)) else offered[0][1]
        metric.options = offered
        metric.value = kept

    case.observe(offer, "value")
    return Panel(
        "comparison",
        figure=figures.comparison(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={"case": case, "metric": metric},
        caption="Bars are 95 % intervals by Student's t; in brackets, the number of runs. The right half compares runs on the "
        "same truths: look whether a bar crosses zero. Policies with few runs met few truths: judge them there, not left.",
    )


def cost(table: pd.DataFrame) -> Panel:
    """What a step costs in processor time: the nested filter beside a method that re-runs the past.

    Args:
        table: from `experiment.stored("cost")`: `method`, `t`, `seconds`.
    """
    methods = list(table["method"].unique())
    totals = table.groupby("method", sort=False)["seconds"].sum()

    def draw(figure, _, total: bool) -> str:
        figures.draw_cost(figure, table, total)
        words = ", ".join(f"{method} <b>{fmt(float(seconds), 2)}</b> s" for method, seconds in totals.items())
        return f"All {int(table['t'].max())} steps together: {words}."

    return Panel(
        "cost",
        figure=figures.cost(methods),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={"total": widgets.ToggleButtons(options=[("each step", False), ("all so far", True)], description="Time of")},
        caption="M × N are parameters and states. Look at the level lines of the nested filter, and at the peaks where SMC² "
        "re-runs the past: each is higher than the one before.",
    )

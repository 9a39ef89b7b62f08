"""Live panels of lab 03. Each opens on something worth looking at; tables come from `labkit build 03`."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from labkit.design import experiment, figures
from labkit.design.belief import ParticleBelief
from labkit.design.bounds import information_is, snmc, spce
from labkit.design.constraints import Budget, Constraint, Intersection, StepLimit, Unconstrained
from labkit.design.corridor import AMPLITUDES, Corridor, optimal_path, planned_path
from labkit.design.dad import DADNetwork
from labkit.design.information import eig
from labkit.design.loop import draw_truth
from labkit.design.loop import experiment as experiments
from labkit.design.models import DesignModel, LinearGaussian, LocationFinding, Pharmacokinetics
from labkit.design.policies import GreedyPolicy, Policy, ProjectedPolicy
from labkit.design.posterior import AmortizedPosterior
from labkit.design.training import approaches
from labkit.design.tree import ScenarioTree, TreePlanner, level_sizes
from labkit.panel import Panel, Progress
from labkit.randomness import seeded_generator
from labkit.theme import fmt, percent

LIVE = dict(iterations=10, num_random=6, num_particles=100)  # of a planner that answers while one waits
AT_ONCE = 15  # nodes of a tree that is planned in one go; larger ones deepen level by level
_KEPT = 32  # results in memory


@dataclasses.dataclass(frozen=True)
class World:
    """A hidden source and its noise, the same for whoever looks for it.

    Attributes:
        model: of the experiment.
        seed: of the source, the noise and the belief.
        start: where the robot stands at first (2,).
        num_particles: N of the belief.
    """

    model: LocationFinding
    seed: int
    start: tuple[float, float]
    num_particles: int = 1000

    @functools.cached_property
    def source(self) -> Tensor:
        """θ (1, p)."""
        return draw_truth(self.model, 1, self.seed)

    def begin(self) -> ParticleBelief:
        """What is believed after a first measurement at the start."""
        belief = ParticleBelief.prior(self.model, 1, self.num_particles, seeded_generator(self.seed, "belief"))
        return self.measure(belief, torch.tensor([self.start]))

    def measure(self, belief: ParticleBelief, design: Tensor) -> ParticleBelief:
        """One experiment at a design (1, 2); the noise of the t-th is always the same."""
        step = belief.outcomes.shape[1]
        noise = self.model.noise((step + 1,), seeded_generator(self.seed, "outcomes"))[step:]
        return belief.update(design, self.model.simulate(self.source, design, noise))


def learned(belief: ParticleBelief) -> Tensor:
    """KL(posterior ‖ prior) of each rollout (R,), nats, from the belief's own estimate of the evidence."""
    return (belief.log_weights.exp() * belief.log_likelihood).sum(1) - belief.log_evidence.to(belief.log_likelihood)


def travelled(belief: ParticleBelief) -> Tensor:
    """Length of each rollout's way (R,)."""
    return belief.designs.diff(dim=1).norm(dim=-1).sum(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """The exact log posterior on a grid of sources.

    Attributes:
        model: of the experiment.
        axes: coordinates (G,) in each direction.
        log_posterior: (G, G), rows along θ₂, up to a constant.
    """

    model: LocationFinding
    axes: tuple[np.ndarray, np.ndarray]
    log_posterior: Tensor

    @classmethod
    def of(cls, belief: ParticleBelief, low: np.ndarray, high: np.ndarray, size: int = figures.GRID) -> "Chart":
        """The posterior of a belief's history (one rollout), in a box."""
        middles = (np.arange(size) + 0.5) / size
        axes = tuple(low[i] + (high[i] - low[i]) * middles for i in (0, 1))
        return cls(belief.model, axes, torch.zeros(size, size)).after(belief.designs[0], belief.outcomes[0])

    @property
    def sources(self) -> Tensor:
        """θ of each place (G, G, 2)."""
        x, y = np.meshgrid(*self.axes)
        return torch.tensor(np.stack([x, y], -1), dtype=torch.float32)

    def after(self, designs: Tensor, outcomes: Tensor) -> "Chart":
        """The posterior after further experiments (k, 2), (k,)."""
        fit = self.model.log_prob(outcomes[:, None, None], self.sources[None], designs[:, None, None])
        return dataclasses.replace(self, log_posterior=self.log_posterior + fit.sum(0))

    def posterior(self, tree: ScenarioTree, path: list[int]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Axes and log posterior (G, G) at the end of a path of nodes, with the outcomes that the tree imagined."""
        chart = self.after(tree.design[0, path[:-1]], tree.outcome[0, path[1:]]) if len(path) > 1 else self
        return self.axes, chart.log_posterior.numpy()


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """A plan and where it was made.

    Attributes:
        tree: of one decision.
        value: V̂ in nats.
        greedy: the greedy design (2,); its expected gain `greedy_gain`.
        designs, outcomes: so far (t, 2), (t,).
        learned: KL(posterior ‖ prior) so far, nats.
        delta, left: step limit and travel budget left.
        source: the truth (2,).
        whole, zoomed: exact posteriors on the whole map and around the belief.
        milliseconds: processor time of the plan.
    """

    tree: ScenarioTree
    value: float
    greedy: np.ndarray
    greedy_gain: float
    designs: np.ndarray
    outcomes: np.ndarray
    learned: float
    delta: float
    left: float
    source: np.ndarray
    whole: Chart
    zoomed: Chart
    milliseconds: float

    @property
    def position(self) -> np.ndarray:
        """Where the robot is (2,)."""
        return self.designs[-1]

    def expected_below(self, node: int) -> np.ndarray:
        """Mean expected gain on each level below a node (levels,), nats."""
        tree, nodes, means = self.tree, [node], []
        while nodes := [int(child) for parent in nodes for child in torch.nonzero(tree.parents == parent)[:, 0]]:
            means.append(float(tree.eig[0, nodes].mean()))
        return np.array(means)


def explorer(seed: int = 5, *, start: tuple[float, float] = (0.2, 0.25), opened: int = 1) -> Panel:
    """The headline: the scenario tree of a robot on a leash, node by node; execute its root, replan, change the limits.

    Args:
        seed: of the hidden source and the noise.
        start: where the robot begins.
        opened: experiments that were made before the panel opens.
    """
    world = World(LocationFinding(), seed, start)
    history = [world.begin()]
    handled = dict(execute=0, undo=0, reset=0)
    chosen: list[Tensor] = []  # the root of the last plan

    def leash(delta: float, left: float) -> Constraint:
        bounds = world.model.bounds
        return Intersection(StepLimit(delta, bounds=bounds), Budget(max(left, 0.0), bounds=bounds))

    def act(**presses: int) -> None:
        for name, count in presses.items():
            fresh, handled[name] = count - handled[name], count
            for _ in range(fresh):
                if name == "execute" and chosen:
                    history.append(world.measure(history[-1], chosen.pop()))
                elif name == "undo":
                    del history[max(len(history) - 1, 1) :]
                elif name == "reset":
                    del history[1:]

    def compute(
        depth: int,
        branching: int,
        delta: float,
        budget: float,
        discount: float,
        execute: int,
        replan: int,
        undo: int,
        reset: int,
    ) -> Iterator[Progress]:
        act(execute=execute, undo=undo, reset=reset)
        belief = history[-1]
        left = max(budget - float(travelled(belief)), 0.0)
        constraint = leash(delta, left)
        nodes = level_sizes((branching,) * depth)
        began = time.process_time()
        greedy = plan(belief, constraint, 0, 1, 1.0, replan)
        depths = [depth] if sum(nodes) <= AT_ONCE else range(1, depth + 1)
        done = 0
        for level in depths:
            found = plan(belief, constraint, level, branching, discount, replan) if level else greedy
            spent = 1e3 * (time.process_time() - began)
            done += sum(nodes[: level + 1])
            chosen[:] = [found.design]
            yield Progress(done, sum(sum(nodes[: d + 1]) for d in depths), scene(belief, found, greedy, delta, left, spent))

    def plan(belief: ParticleBelief, constraint: Constraint, depth: int, branching: int, discount: float, seed: int):
        planner = TreePlanner(world.model, constraint, depth=depth, branching=branching, discount=discount, seed=seed, **LIVE)
        return planner.plan(belief, constraint.init(belief.designs[:, -1], depth + 1), depth + 1)

    def scene(belief: ParticleBelief, found, greedy, delta: float, left: float, spent: float) -> Scene:
        theta = belief.theta[0].numpy()
        low, high = np.quantile(theta, 0.002, axis=0), np.quantile(theta, 0.998, axis=0)
        middle, half = (low + high) / 2, max(0.55 * float((high - low).max()), 0.01)
        return Scene(
            tree=found.tree,
            value=float(found.value),
            greedy=greedy.design[0].numpy(),
            greedy_gain=float(greedy.value),
            designs=belief.designs[0].numpy(),
            outcomes=belief.outcomes[0].numpy(),
            learned=float(learned(belief)),
            delta=delta,
            left=left,
            source=world.source[0].numpy(),
            whole=Chart.of(belief, np.zeros(2), np.ones(2)),
            zoomed=Chart.of(belief, middle - half, middle + half),
            milliseconds=spent,
        )

    def draw(figure, scene: Scene, node: int, source: bool) -> str:
        node = min(node, len(scene.tree.parents) - 1)  # a tree of another size is on its way
        figures.draw_explorer(figure, scene, node, source)
        return _scene_in_words(scene, node)

    release = dict(continuous_update=False)
    levels = widgets.IntSlider(value=2, min=0, max=4, description="Depth H (levels below the root)", **release)
    branches = widgets.IntSlider(value=3, min=1, max=4, description="Branching m (outcomes per node)", **release)
    selection = widgets.Dropdown(options=_nodes(2, 3), value=2, description="Node (or click one)")

    def offer(_: Mapping) -> None:
        selection.options = _nodes(levels.value, branches.value)
        selection.value = min(2, len(selection.options) - 1)

    for control in (levels, branches):
        control.observe(offer, "value")  # before the panel looks at it
    for _ in range(opened):
        constraint = leash(0.15, 1.2 - float(travelled(history[-1])))
        history.append(world.measure(history[-1], plan(history[-1], constraint, 0, 1, 1.0, 0).design))

    panel = Panel(
        "explorer",
        figure=figures.explorer(),
        compute=compute,
        draw=draw,
        controls={
            "execute": widgets.Button(description="Execute the root, observe, replan", button_style="primary"),
            "replan": widgets.Button(description="Replan with other fantasies"),
            "depth": levels,
            "branching": branches,
            "delta": widgets.FloatSlider(value=0.15, min=0.02, max=0.5, step=0.01, description="Largest step δ", **release),
            "budget": widgets.FloatSlider(value=1.2, min=0.2, max=3, step=0.05, description="Travel budget", **release),
            "discount": widgets.FloatSlider(value=1.0, min=0.1, max=1, step=0.05, description="Discount γ", **release),
            "undo": widgets.Button(description="Undo the last experiment"),
            "reset": widgets.Button(description="Reset to the start"),
        },
        view={"node": selection, "source": widgets.Checkbox(value=False, description="Show the hidden source")},
        caption="Colour: what a node's design is expected to teach. Thickness: probability of the outcome that leads there. "
        "Look at the three branches of one node: each outcome leaves another belief, and the plan goes on to another place. "
        "Lines in the belief hold 50 and 90 % of it; dotted, before the imagined outcomes.",
        background=True,
    )
    nodes = next(i for i, trace in enumerate(panel.figure.data) if trace.meta == "nodes")
    panel.on_click(nodes, lambda i: setattr(panel.node, "value", i))
    return panel


def _nodes(depth: int, branching: int) -> list[tuple[str, int]]:
    options = []
    for level, count in enumerate(level_sizes((branching,) * depth)):
        options += [
            ("the root" if level == 0 else f"{len(options) + i}, on level {level}", len(options) + i) for i in range(count)
        ]
    return options


def _measurements(count: int) -> str:
    return f"{count} measurement{'s' if count > 1 else ''}"


def _scene_in_words(scene: Scene, node: int) -> str:
    tree, path = scene.tree, scene.tree.path(node)
    levels, count = int(tree.depth.max()), len(tree.parents)
    promised = f"{fmt(scene.value, 3)} nats in {levels + 1} experiments" if levels else f"{fmt(scene.value, 3)} nats"
    at = "the root" if node == 0 else f"node {node}, reached by outcome {fmt(float(tree.outcome[0, node]), 2)}"
    below = scene.expected_below(node)
    more = f", <b>{fmt(float(below.sum()), 2)}</b> more are expected below" if len(below) else ""
    way = fmt(float(tree.eig[0, path].sum()), 2)
    return (
        f"{_measurements(len(scene.outcomes))} taught {fmt(scene.learned, 2)} nats; {scene.left:.2f} of travel is left. A "
        f"tree of {count} node{'s' if count > 1 else ''} promises <b>{promised}</b>; greedy takes {fmt(scene.greedy_gain, 2)} "
        f"nats next. At {at}: EIG <b>{fmt(float(tree.eig[0, node]), 2)}</b> nats, {way} along the path{more}; "
        f"{float(tree.budget[0, node]):.2f} of travel remains. Planned in {scene.milliseconds:.0f} ms of processor time."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Stand:
    """Where the player's robot stands.

    Attributes:
        axes: coordinates of the reachable places, two arrays (G,).
        gain: expected gain there (G, G), rows along x₂.
        belief: after the measurements.
        learned, rival: KL after each measurement, the player's (t,) and the greedy robot's (T,).
        source: the truth (2,).
        constraint: of the next step.
    """

    axes: tuple[np.ndarray, np.ndarray]
    gain: np.ndarray
    belief: ParticleBelief
    learned: np.ndarray
    rival: np.ndarray
    source: np.ndarray
    constraint: Constraint

    @property
    def designs(self) -> np.ndarray:
        """(t, 2)."""
        return self.belief.designs[0].numpy()

    @property
    def outcomes(self) -> np.ndarray:
        """(t,)."""
        return self.belief.outcomes[0].numpy()

    @property
    def particles(self) -> np.ndarray:
        """Some of the belief (300, 2)."""
        return self.belief.sample(300)[0].numpy()

    @property
    def steps(self) -> int:
        """T."""
        return len(self.rival)

    @property
    def over(self) -> bool:
        """Whether all experiments are done."""
        return len(self.learned) >= self.steps


def robot(seed: int = 1, *, steps: int = 8, start: tuple[float, float] = (0.5, 0.5), size: int = 17) -> Panel:
    """Find the source yourself: a map of what each reachable place is worth, and a greedy robot beside you.

    Args:
        seed: of the hidden source and the noise.
        steps: T.
        start: where both robots begin.
        size: of the map's grid in each direction.
    """
    model = LocationFinding()
    history: list[ParticleBelief] = []
    seen = dict(move=0, undo=0, again=0, delta=0.0)

    @functools.lru_cache(maxsize=_KEPT)
    def world(again: int) -> World:
        return World(model, seed + again, start)

    @functools.lru_cache(maxsize=_KEPT)
    def rival(again: int, delta: float) -> np.ndarray:
        rule = StepLimit(delta, bounds=model.bounds)
        planner = TreePlanner(model, rule, depth=0, **LIVE)
        belief = world(again).begin()
        found = [learned(belief)]
        for remaining in range(steps - 1, 0, -1):
            plan = planner.plan(belief, rule.init(belief.designs[:, -1], remaining), remaining)
            belief = world(again).measure(belief, plan.design)
            found.append(learned(belief))
        return torch.cat(found).numpy()

    def compute(delta: float, particles: int, move: int, undo: int, again: int) -> Stand:
        rule = StepLimit(delta, bounds=model.bounds)
        if not history or again != seen["again"] or delta != seen["delta"]:
            history[:] = [world(again).begin()]
        elif move > seen["move"] and len(history) < steps:
            state = rule.init(history[-1].designs[:, -1], 1)
            history.append(world(again).measure(history[-1], rule.project(state, torch.tensor([[x1.value, x2.value]]))))
        elif undo > seen["undo"] and len(history) > 1:
            history.pop()
        seen.update(move=move, undo=undo, again=again, delta=delta)
        belief = history[-1]
        region = rule.reachable(rule.init(belief.designs[:, -1], 1))
        axes = tuple(np.linspace(float(region.low[0, i]), float(region.high[0, i]), size) for i in (0, 1))
        places = torch.tensor(np.stack(np.meshgrid(*axes), -1).reshape(-1, 2), dtype=torch.float32)
        gain = eig(belief.subset(particles), places.clamp(*model.bounds)).value.reshape(size, size).numpy()
        scores = torch.cat([learned(one) for one in history]).numpy()
        return Stand(axes, gain, belief, scores, rival(again, delta), world(again).source[0].numpy(), rule)

    def draw(figure, stand: Stand, x1: float, x2: float) -> str:
        state = stand.constraint.init(stand.belief.designs[:, -1], 1)
        target = stand.constraint.project(state, torch.tensor([[x1, x2]]))
        figures.draw_robot(figure, stand, target[0].numpy())
        t, mine, other = len(stand.learned), float(stand.learned[-1]), float(stand.rival[len(stand.learned) - 1])
        score = f"you know <b>{fmt(mine, 3)}</b> nats, the greedy robot {fmt(other, 3)}"
        if stand.over:
            return f"All {t} measurements are made: {score}. The cross is the source. Undo, or look for another one."
        here = float(eig(stand.belief, target).value)
        row, column = np.unravel_index(stand.gain.argmax(), stand.gain.shape)
        best = f"({stand.axes[0][column]:.2f}, {stand.axes[1][row]:.2f})"
        return (
            f"Measurement {t} of {stand.steps} read y = {fmt(float(stand.outcomes[-1]), 2)}; {score}. Your next place promises "
            f"<b>{fmt(here, 2)}</b> nats; the best within reach, {best}, {fmt(float(stand.gain.max()), 2)}."
        )

    across, up = (
        widgets.FloatSlider(value=value, min=0, max=1, step=0.01, description=f"Next place, x{sub}")
        for value, sub in ((start[0] + 0.1, "₁"), (start[1] - 0.05, "₂"))
    )
    x1, x2 = across, up
    panel = Panel(
        "robot",
        figure=figures.robot(),
        compute=compute,
        draw=draw,
        controls={
            "move": widgets.Button(description="Go there and measure", button_style="primary"),
            "undo": widgets.Button(description="Undo"),
            "again": widgets.Button(description="Another source"),
            "delta": widgets.SelectionSlider(
                options=[0.05, 0.1, 0.15, 0.2, 0.3], value=0.15, description="Largest step δ (starts again)"
            ),
            "particles": widgets.SelectionSlider(
                options=[50, 100, 200, 500], value=200, description="Particles behind the map"
            ),
        },
        view={"x1": across, "x2": up},
        caption="Colour: what a measurement there is expected to teach. Look how the best place is rarely where the source "
        "seems to be: a distance is told best from a place that tells near from far.",
    )
    places = next(i for i, trace in enumerate(panel.figure.data) if trace.meta == "places")

    def clicked(i: int) -> None:
        trace = panel.figure.data[places]
        panel.x1.value, panel.x2.value = float(trace.x[i]), float(trace.y[i])

    panel.on_click(places, clicked)
    return panel


def bounds(runs: int = 40, seed: int = 0) -> Panel:
    """Estimates of the information of linear-Gaussian runs beside their exact log p(y | θ) − log p(y).

    Args:
        runs: simulated runs R.
        seed: of the runs.
    """
    draws = {"spce": (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000), "is": (30, 300)}
    draws["snmc"] = draws["spce"]

    def features(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x), x], -1)

    def compute(steps: int, noise: float) -> Iterator[Progress]:
        model = LinearGaussian(features, torch.eye(2), noise, bounds=[[-1.0], [1.0]])
        generator = seeded_generator(seed, "bounds")
        designs = model.sample_designs((1, steps), generator)
        theta = model.sample_prior((runs,), generator)
        X = designs.expand(runs, -1, -1)
        Y = model.simulate(theta[:, None], X, generator=generator)
        phi = features(designs[0])
        precision = torch.eye(2) + phi.T @ phi / noise**2
        mean = torch.linalg.solve(precision, phi.T @ Y.T / noise**2).T
        spread = torch.linalg.cholesky(torch.linalg.inv(precision))
        particles = mean[:, None] + torch.randn(runs, 200, 2, generator=generator) @ spread.T
        law = torch.distributions.MultivariateNormal(
            torch.zeros(steps, dtype=torch.float64), phi.double() @ phi.double().T + noise**2 * torch.eye(steps).double()
        )
        own = model.log_prob(Y.double(), theta[:, None].double(), X.double()).sum(1)
        exact = own - law.log_prob(Y.double())
        estimators = {
            "spce": lambda count: spce(model, theta, X, Y, count, seed),
            "snmc": lambda count: snmc(model, theta, X, Y, count, seed),
            "is": lambda count: information_is(model, theta, X, Y, particles, count, seed).information,
        }
        found = {}
        for k, (name, estimate) in enumerate(estimators.items(), 1):
            values = torch.stack([estimate(count) for count in draws[name]])
            found[name] = draws[name], values.mean(1).numpy(), (values - exact).std(1).numpy() / runs**0.5
            yield Progress(k, len(estimators), (float(exact.mean()), found) if k == len(estimators) else None)

    def draw(figure, result) -> str:
        exact, estimates = result
        figures.draw_bounds(figure, exact, estimates)
        low, high = (float(estimates[name][1][-1]) for name in ("spce", "snmc"))
        return (
            f"These {runs} runs are worth {fmt(exact)} nats. With L = 10,000 that is put between <b>{fmt(low)}</b> (sPCE) and "
            f"<b>{fmt(high)}</b> (sNMC). Below L = {fmt(float(np.expm1(exact)), 2)}, sPCE cannot show that much."
        )

    release = dict(continuous_update=False)
    return Panel(
        "bounds",
        figure=figures.bounds(),
        compute=compute,
        draw=draw,
        controls={
            "steps": widgets.IntSlider(value=6, min=1, max=20, description="Experiments T", **release),
            "noise": widgets.SelectionSlider(
                options=[0.01, 0.03, 0.1, 0.3, 1.0], value=0.1, description="Noise σ of one outcome", **release
            ),
        },
        caption="Lower the noise: the runs become worth more than log(L + 1), and sPCE sticks to its ceiling while sNMC "
        "promises too much. Importance sampling has no ceiling.",
        background=True,
    )


def corridor() -> Panel:
    """A planner of depth H with discount γ in the corridor, beside the optimum and the greedy walk."""
    place = Corridor()

    def compute(steps: int, depth: int, discount: float):
        return {
            "optimum": optimal_path(place, steps),
            "greedy": planned_path(place, steps, 0),
            "planner": planned_path(place, steps, depth, discount),
        }, f"H = {depth} and γ = {discount:.2f}"

    def draw(figure, result) -> str:
        walks, planner = result
        pairs = {name: (walk.places, walk.information) for name, walk in walks.items()}
        figures.draw_corridor(figure, pairs, place.start)
        ends = {name: float(walk.information[-1]) for name, walk in walks.items()}
        last = int(walks["planner"].places[-1])
        share = percent(ends["planner"] / ends["optimum"])
        return (
            f"With {planner} the planner ends at place <b>{last}</b> with <b>{fmt(ends['planner'], 5)}</b> nats, {share} of "
            f"the optimum {fmt(ends['optimum'], 5)}; greedy gets {fmt(ends['greedy'], 5)}."
        )

    return Panel(
        "corridor",
        figure=figures.corridor(AMPLITUDES),
        compute=compute,
        draw=draw,
        controls={
            "steps": widgets.IntSlider(value=12, min=1, max=16, description="Experiments T"),
            "depth": widgets.IntSlider(value=5, min=0, max=11, description="Depth H"),
            "discount": widgets.FloatSlider(value=1.0, min=0.5, max=1, step=0.01, description="Discount γ"),
        },
        caption="Grey: what one measurement at each place adds. Look at H = 5 and H = 6: one level more, and the planner "
        "crosses the poor stretch. Then lower γ.",
    )


def posterior(network: AmortizedPosterior, seed: int = 3, size: int = 64) -> Panel:
    """A history's exact posterior beside a network's.

    Args:
        network: with the heads "product" and "joint".
        seed: of the first source.
        size: of the grid in each direction.
    """
    model, longest = network.model, 12

    @functools.lru_cache(maxsize=_KEPT)
    def history(again: int) -> tuple[ParticleBelief, ...]:
        generator = seeded_generator(seed + again, "history")
        theta = model.sample_prior((1,), generator)
        designs = approaches(model, theta, longest, generator)[0]
        outcomes = model.simulate(theta[0], designs, generator=generator)
        belief = ParticleBelief.prior(model, 1, 1000, generator)
        found = []
        for design, y in zip(designs, outcomes, strict=True):
            belief = belief.update(design[None], y[None])
            found.append(belief)
        return theta, found

    def compute(length: int, head: str, again: int):
        theta, beliefs = history(again)
        belief = beliefs[length - 1]
        chart = Chart.of(belief, np.zeros(2), np.ones(2), size)
        q = network.using(head)
        X, Y = belief.designs[0], belief.outcomes[0]
        with torch.no_grad():
            learned = q.log_prob(chart.sources.reshape(-1, 2), X, Y).reshape(size, size)
            drawn = q.sample(X, Y, 300, seeded_generator(again, "draws"))
        exact = chart.log_posterior.flatten().log_softmax(0).reshape(size, size)
        inside = learned.flatten().log_softmax(0).reshape(size, size)
        gap = float((exact.exp() * (exact - inside)).sum())
        draws = {"exact": belief.sample(300)[0].numpy(), "network": drawn.numpy()}
        return chart.axes, exact.numpy(), learned.numpy(), draws, X.numpy(), theta[0].numpy(), head, gap

    def draw(figure, result) -> str:
        *picture, gap = result
        figures.draw_posterior(figure, *picture)
        designs, head = picture[4], picture[6]
        what = "a product of two marginals" if head == "product" else "one mixture with full covariances"
        return (
            f"After {_measurements(len(designs))}, the network, {what}, misses the exact "
            f"posterior by <b>{fmt(gap, 2)}</b> nats (KL)."
        )

    return Panel(
        "posterior",
        figure=figures.posterior(),
        compute=compute,
        draw=draw,
        controls={
            "head": widgets.ToggleButtons(options=["product", "joint"], value="product", description="Head of the network"),
            "length": widgets.IntSlider(value=2, min=1, max=longest, description="Measurements made"),
            "again": widgets.Button(description="Another history"),
        },
        caption="One distance leaves a ring. Look what becomes of it as a product of two marginals, and how much of it the "
        "joint head keeps.",
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """What a policy did: designs (R, T, 2), KL after each experiment (R, T), way so far (R, T), sources (R, 2)."""

    designs: np.ndarray
    learned: np.ndarray
    travelled: np.ndarray
    theta: np.ndarray


def follow(
    model: DesignModel,
    policy: Policy,
    constraint: Constraint,
    *,
    steps: int,
    rollouts: int,
    seed: int,
    num_particles: int = 400,
) -> Iterator[Runs]:
    """Run a policy from random starts and yield what it has done so far, after each step.

    Args:
        model, policy, constraint, steps: see `labkit.design.loop.experiment`.
        rollouts: R ≥ 2, with sources and noise that depend on the seed alone.
        seed: of everything random.
        num_particles: of the belief.
    """
    theta = draw_truth(model, rollouts, seed)
    noise = model.noise((rollouts, steps), seeded_generator(seed, "outcomes"))
    found: list[Tensor] = []
    for step in experiments(
        ParticleBelief.prior(model, rollouts, num_particles, seeded_generator(seed, "belief")),
        policy,
        constraint,
        lambda t, design: model.simulate(theta, design, noise[:, t]),
        steps=steps,
        generator=seeded_generator(seed, "policy"),
        start=model.sample_designs((rollouts,), seeded_generator(seed, "start")),
    ):
        found.append(learned(step.belief))
        path = step.belief.designs
        way = torch.cat([path.new_zeros(rollouts, 1), path.diff(dim=1).norm(dim=-1).cumsum(1)], 1)
        yield Runs(path.numpy(), torch.stack(found, 1).numpy(), way.numpy(), theta.numpy())


def _several(
    model: DesignModel,
    entries: Mapping[str, tuple[Policy, Constraint]],
    kept: dict[tuple, Runs],
    keys: Mapping[str, tuple],
    **options: int,
) -> Iterator[Progress]:
    """Run policies one after the other, each at most once, and yield all their runs in the end."""
    found, total = {}, len(entries) * options["steps"]
    for number, (name, (policy, constraint)) in enumerate(entries.items()):
        if keys[name] not in kept:
            runs = follow(model, policy, constraint, **options)
            for t, found[name] in enumerate(runs, 1):
                yield Progress(number * options["steps"] + t, total)
            kept[keys[name]] = found[name]
        found[name] = kept[keys[name]]
    yield Progress(total, total, found)


def projection(network: DADNetwork, *, steps: int = 15, rollouts: int = 6, seed: int = 0) -> Panel:
    """A policy network that does not know the step limit, projected onto it, beside greedy planning within it.

    Args:
        network: trained without the limit.
        steps: T.
        rollouts: R, with random starts.
        seed: of sources, starts and noise.
    """
    model, kept = network.model, {}

    def compute(delta: float) -> Iterator[Progress]:
        rule = Unconstrained(model.bounds) if np.isinf(delta) else StepLimit(delta, bounds=model.bounds)
        entries = {
            "DAD, projected": (ProjectedPolicy(network, rule), rule),
            "greedy, exact belief": (GreedyPolicy(model, rule, **LIVE), rule),
        }
        keys = {name: (name, delta) for name in entries}
        yield from _several(model, entries, kept, keys, steps=steps, rollouts=rollouts, seed=seed)

    def draw(figure, found: Mapping[str, Runs], rollout: int) -> str:
        figures.draw_runs(figure, found, rollout)
        policy, greedy = (run.learned[:, -1].mean() for run in found.values())
        return (
            f"{steps} experiments, mean of {rollouts} runs: the projected network learns <b>{fmt(float(policy))}</b> nats, "
            f"greedy inside the limit <b>{fmt(float(greedy))}</b>."
        )

    menu = widgets.Dropdown(options=[("none", np.inf), ("0.2", 0.2), ("0.1", 0.1), ("0.05", 0.05)], description="Step limit δ")
    menu.value = 0.1
    return Panel(
        "projection",
        figure=figures.runs(),
        compute=compute,
        draw=draw,
        controls={"delta": menu},
        view={"rollout": widgets.IntSlider(value=1, min=0, max=rollouts - 1, description="Run shown on the map")},
        caption="Blue aims where it learned to aim without a limit, and is stopped on the way. Look how far it has come when "
        "its experiments are used up.",
        background=True,
    )


def pacing(*, steps: int = 10, rollouts: int = 6, seed: int = 2) -> Panel:
    """Greedy robots that may spend their travel budget at once, by halves or evenly.

    Args:
        steps: T.
        rollouts: R, with random starts.
        seed: of sources, starts and noise.
    """
    model, kept = LocationFinding(), {}
    ways = {"all at once": None, "half of what is left": "half", "evenly": "even"}

    def compute(budget: float) -> Iterator[Progress]:
        rules = {name: Budget(budget, pacing=pace, bounds=model.bounds) for name, pace in ways.items()}
        entries = {name: (GreedyPolicy(model, rule, **LIVE), rule) for name, rule in rules.items()}
        keys = {name: (name, budget) for name in entries}
        yield from _several(model, entries, kept, keys, steps=steps, rollouts=rollouts, seed=seed)

    def draw(figure, found: Mapping[str, Runs], rollout: int) -> str:
        figures.draw_runs(figure, found, rollout)
        parts = [
            f"{name}: <b>{fmt(float(run.learned[:, -1].mean()))}</b> nats, {fmt(float(run.travelled[:, -1].mean()), 2)} "
            "travelled"
            for name, run in found.items()
        ]
        return f"Mean of {rollouts} runs. {'; '.join(parts)}."

    return Panel(
        "pacing",
        figure=figures.runs(),
        compute=compute,
        draw=draw,
        controls={
            "budget": widgets.SelectionSlider(
                options=[0.25, 0.5, 1.0, 2.0], value=0.5, description="Travel budget", continuous_update=False
            )
        },
        view={"rollout": widgets.IntSlider(value=0, min=0, max=rollouts - 1, description="Run shown on the map")},
        caption="Bands: 95 % intervals of the mean. Below: how fast the budget is spent. Look whether whoever spends it all on "
        "the first moves learns less in the end.",
        background=True,
    )


def schedules(runs: pd.DataFrame, patients: int = 300) -> Panel:
    """When each policy draws blood, and what it learned from it.

    Args:
        runs: rows of `experiment.stored()`.
        patients: simulated for the curves.
    """
    hours = np.linspace(0, 24, 97)
    settings = {"narrow (0.05)": "pk", "wide (0.3)": "pk-wide"}

    @functools.cache
    def curves(setting: str) -> np.ndarray:
        model: Pharmacokinetics = experiment.SETTINGS[setting].model()
        theta = model.sample_prior((patients,), seeded_generator(0, "patients"))
        return model.mean(theta[:, None], torch.tensor(hours, dtype=torch.float32)[:, None]).numpy()

    def draw(figure, _, setting: str) -> str:
        rows = runs[runs["setting"].isin(settings.values())]
        cells = rows.groupby(["setting", "policy"])["kl"]
        low, high = float((cells.mean() - 2.5 * cells.sem()).min()), float((cells.mean() + 2.5 * cells.sem()).max())
        table = rows[rows["setting"] == setting]
        figures.draw_schedules(figure, hours, curves(setting), table, (low, high))
        means = table.groupby("policy")["kl"].mean()
        return (
            f"Five draws teach <b>{fmt(means['tree-2'])}</b> nats if planned two experiments ahead, {fmt(means['greedy'])} "
            f"greedily, {fmt(means['static'])} with one good schedule for all, {fmt(means['random'])} at random times."
        )

    return Panel(
        "schedules",
        figure=figures.schedules(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "setting": widgets.ToggleButtons(options=list(settings.items()), description="Variance of the patients' log rates")
        },
        caption="Dots: single draws; ticks: medians of the first, second, … draw. A draw forbids all earlier times. Look where "
        "greedy takes its first one.",
    )


def race(runs: pd.DataFrame) -> Panel:
    """All policies of a setting: information against processor time, and paired differences.

    Args:
        runs: rows of `experiment.stored()`.
    """
    summary, pairs = experiment.summarise(runs), experiment.differences(runs)
    ablations = {name for name in figures.NAMES if name.startswith("tree-")} - {"tree-1", "tree-2"}
    shown = [name for name in experiment.SETTINGS if name in set(summary["setting"])]

    def draw(figure, _, setting: str, metric: str, reference: str) -> str:
        rows = summary[(summary["setting"] == setting) & ~summary["policy"].isin(ablations)]
        first = reference if reference in set(rows["policy"]) else "greedy"
        gaps = pairs[(pairs["setting"] == setting) & (pairs["first"] == first) & ~pairs["second"].isin(ablations)]
        published = experiment.PUBLISHED
        published = published[published["method"].isin(figures.PUBLISHED_LINES) & (published["setting"] == setting)]
        figures.draw_race(figure, rows, gaps, metric, published)
        table = rows.set_index("policy")
        best, title = table[metric].idxmax(), experiment.SETTINGS[setting].title
        words = f"{title}: <b>{figures.NAMES[best]}</b> learns most, {fmt(table.loc[best, metric])} nats."
        if first != reference or not len(gaps):
            words += f" There is nothing to compare with {figures.NAMES[reference]} here."
        for row in gaps[gaps["second"].isin(["random", "greedy"])].itertuples():
            words += (
                f" {figures.NAMES[first]} − {figures.NAMES[row.second]}: {fmt(row.difference, 2)} ± "
                f"{fmt(row.difference_stderr, 2)} (s.e., {row.rollouts} pairs)."
            )
        return f"{words} Broken constraints: {int(rows['violations'].sum())}."

    return Panel(
        "race",
        figure=figures.race(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "setting": widgets.Dropdown(
                options=[(experiment.SETTINGS[name].title, name) for name in shown],
                value="ces-100" if "ces-100" in shown else shown[0],
                description="Setting",
            ),
            "metric": widgets.Dropdown(options=[(text, name) for name, text in figures.METRICS.items()], description="Metric"),
            "reference": widgets.ToggleButtons(
                options=[("tree", "tree-2"), ("exact greedy", "greedy")], description="Compare the others with"
            ),
        },
        caption="Left: best is top left; bars are 95 % intervals; dotted: the paper's, for another variant of the model. "
        "Right: equal sources, starts and noise, paired (number in brackets): look whether a bar crosses zero.",
    )

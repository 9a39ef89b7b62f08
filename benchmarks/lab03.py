"""Lab 03: what a scenario tree, its optimisation, an expected information gain and a whole decision cost.

Peers: the same tree as a recursion over its nodes; SciPy's SLSQP, one decision at a time, as published; the adaptive
contrastive estimate with a posterior network; BoTorch's `qMultiStepLookahead`, a one-shot tree of the same shape whose nodes
are Gaussian processes fantasised for Bayesian optimisation, not for information. Where the peer is a limit in seconds, the
ratio says how often ours would fit into it. All on one thread.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks._runner import Row, compare, interleave, one_thread, ratio_row
from labkit.design.belief import ParticleBelief
from labkit.design.ces import CES
from labkit.design.constraints import Budget, State, StepLimit
from labkit.design.loop import rollout
from labkit.design.models import LocationFinding
from labkit.design.nodes import AmortizedNodes, ParticleNodes
from labkit.design.policies import RandomPolicy
from labkit.design.posterior import AmortizedPosterior
from labkit.design.tree import BaseNoise, TreePlanner, level_sizes, tree_value, tree_value_recursive
from labkit.errors import require

MODEL = LocationFinding()
STEP = StepLimit(0.1, bounds=MODEL.bounds)
PARTICLES = 150
ROUNDS = 9


def benchmarks() -> Iterator[Row]:
    """All comparisons of the lab: about two minutes of processor time."""
    with one_thread():
        belief = learnt(16, 5)
        yield from value_and_gradient(belief)
        yield from optimisers(belief)
        yield from node(belief)
        yield from baskets()


def value_and_gradient(belief: ParticleBelief, branching: tuple[int, ...] = (3, 3), starts: int = 3) -> Iterator[Row]:
    """V̂ and its gradient for one decision: batched, node by node, and of BoTorch's tree of the same shape."""
    root = ParticleNodes.root(belief, PARTICLES, "quadrature").part(slice(0, 1))
    state = standing(belief).map(lambda x: x[:1])
    generator = torch.Generator().manual_seed(0)
    noise = BaseNoise.draw(MODEL, 1, branching, generator)
    moves = [torch.randn(1, starts, n, 2, generator=generator).requires_grad_() for n in level_sizes(branching)]

    def gradient(value: Callable) -> None:
        torch.autograd.grad(value(root, state, moves, noise, STEP).sum(), moves)

    calls = {
        "batched": partial(gradient, tree_value),
        "recursion": partial(gradient, tree_value_recursive),
        "botorch": botorch_tree(branching, starts),
    }
    seconds = interleave(calls, ROUNDS, progress="tree")
    nodes = sum(level_sizes(branching))
    row = partial(compare, "03", "V̂ and gradient", seconds["batched"], sizes=f"H = 2, m = 3: {nodes} nodes, {starts} starts")
    yield row("a recursion over nodes", seconds["recursion"], target="≥ 8")
    yield row("BoTorch's qMultiStepLookahead", seconds["botorch"])


def botorch_tree(branching: tuple[int, ...], starts: int, points: int = 6) -> Callable[[], None]:
    """Value and gradient of BoTorch's multi-step tree with the same nodes, on a Gaussian process of a few points."""
    botorch = require("botorch", "bench")
    acquisition = require("botorch.acquisition.multi_step_lookahead", "bench")
    gp = require("botorch.models", "bench").SingleTaskGP
    X = torch.rand(points, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", botorch.exceptions.InputDataWarning)
        model = gp(X, torch.sin(6 * X).sum(1, keepdim=True))
    lookahead = acquisition.qMultiStepLookahead(model, batch_sizes=[1] * len(branching), num_fantasies=list(branching))
    designs = torch.rand(starts, lookahead.get_augmented_q_batch_size(1), 2, dtype=torch.float64).requires_grad_()

    def gradient() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the scaling of its inputs
            torch.autograd.grad(lookahead(designs).sum(), designs)

    return gradient


def optimisers(belief: ParticleBelief, rounds: int = 2) -> Iterator[Row]:
    """Sixteen decisions by Adam in one program, and by SLSQP one at a time, from the same three starts each."""
    state = standing(belief)
    for branching in ((2,), (3, 3)):
        plans = {}

        def plan(optimizer: str, branching: tuple[int, ...] = branching, plans: dict = plans) -> None:
            planner = TreePlanner(
                MODEL,
                STEP,
                depth=len(branching),
                branching=branching,
                optimizer=optimizer,
                iterations=100,
                num_particles=PARTICLES,
            )
            plans[optimizer] = planner.plan(belief, state, 20)

        seconds = interleave({name: partial(plan, name) for name in ("adam", "slsqp")}, rounds, progress="optimisers")
        sizes = f"16 decisions, H = {len(branching)}, m = {branching[0]}, 3 starts, {PARTICLES} particles"
        yield compare(
            "03", "Adam, per decision", seconds["adam"] / 16, "SLSQP", seconds["slsqp"] / 16, target="≥ 3", sizes=sizes
        )
        ratio = float(plans["adam"].value.mean() / plans["slsqp"].value.mean())
        yield ratio_row("03", "V̂ that Adam reaches, as a share", ratio, "of SLSQP's", target="≥ 0.99", sizes=sizes)


def node(belief: ParticleBelief, count: int = 16, num_obs: int = 20, num_contrastive: int = 32) -> Iterator[Row]:
    """Expected gain with gradient at the nodes of one level: from particles, and with a posterior network."""
    design = torch.rand(count, 1, 1, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    posterior = AmortizedPosterior(MODEL).requires_grad_(False)
    options = {"num_obs": num_obs, "num_contrastive": num_contrastive}
    nodes = {
        "pce": ParticleNodes.root(belief, PARTICLES, "pce", **options),
        "quadrature": ParticleNodes.root(belief, PARTICLES, "quadrature"),
        "ace": AmortizedNodes.root(belief, posterior, num_obs, num_contrastive, 0),
    }

    def gradient(name: str) -> None:
        torch.autograd.grad(nodes[name].gain(design).sum(), design)

    seconds = interleave({name: partial(gradient, name) for name in nodes}, ROUNDS, progress="nodes")
    sizes = f"{count} nodes, {num_obs} outcomes, {num_contrastive} contrastives, {belief.outcomes.shape[1]} past outcomes"
    peer = f"ACE, {sum(p.numel() for p in posterior.parameters()):,} weights"
    yield compare("03", "gain by PCE", seconds["pce"], peer, seconds["ace"], target="≥ 8", sizes=sizes)
    yield compare("03", "gain by quadrature", seconds["quadrature"], peer, seconds["ace"], sizes=sizes)


def baskets(rollouts: int = 8, steps: int = 4) -> Iterator[Row]:
    """Decisions on CES with the update of the belief, each rollout's share, against their limits."""
    model = CES()
    budget = Budget(100.0, pacing="half", bounds=model.bounds)
    history = rollout(model, RandomPolicy(budget), budget, steps=steps, num_rollouts=rollouts, seed=0)
    past = ParticleBelief.prior(model, rollouts, 1000, torch.Generator().manual_seed(0))
    for t in range(steps - 1):
        past = past.update(history.designs[:, t], history.outcomes[:, t])
    state = budget.init(history.designs[:, -1], 9)
    for depth, limit in ((0, 0.15), (2, 1.0)):
        planner = TreePlanner(model, budget, depth=depth)

        def decide(planner: TreePlanner = planner) -> None:
            planner.plan(past.update(history.designs[:, -1], history.outcomes[:, -1]), state, 7)

        ours = interleave({"ours": decide}, 3, progress=f"CES, H = {depth}")["ours"] / rollouts
        sizes = f"CES, {rollouts} rollouts at once, 1000 particles, belief update included"
        yield compare(
            "03", f"decision at H = {depth}", ours, f"{limit:g} s", np.full_like(ours, limit), target="≥ 1", sizes=sizes
        )


def learnt(rollouts: int, steps: int) -> ParticleBelief:
    """Beliefs about a source after a random walk."""
    return rollout(MODEL, RandomPolicy(STEP), STEP, steps=steps, num_rollouts=rollouts, seed=0).belief


def standing(belief: ParticleBelief) -> State:
    """Where the walks of `learnt` have arrived."""
    return STEP.init(belief.designs[:, -1], 25)

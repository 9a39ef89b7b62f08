"""The scenario tree: which design to execute now, if the experiments after it are to be chosen well too.

A tree has levels ℓ = 0 … h, h = min(H, experiments left − 1), with a design at every node and m fantasised outcomes below
each. All designs are optimised together [paper; predecessor: Jiang et al. 2020, one-shot multi-step trees]:

    V̂(X; ε) = Σ_ℓ γ^ℓ · mean over the nodes of level ℓ of EIG(x_node; D_node)

The base noise ε is drawn once, so that V̂ is a deterministic, differentiable function of the designs X. With γ = 1 and the
chain rule, V̂ estimates the information of the next h + 1 experiments together; H = 0 is the greedy choice.

A design is x = decode(state, move) of an unconstrained move, where the state is the constraint's along the path from the root
[ours]. So every path of every tree that the optimiser looks at is feasible, and Adam runs over [decisions × starts × nodes] in
one tensor program. The published alternative, SLSQP over the designs themselves under the constraints' `slack`, is the preset
"paper".

Shapes: R decisions, S starts, n = m^ℓ nodes of a level, d coordinates of a design.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from labkit.design.belief import check_likelihood
from labkit.design.ces import CES
from labkit.design.constraints import Budget, Constraint, Intersection, State, require_feasible
from labkit.design.information import METHODS, Posterior
from labkit.design.models import DesignModel, as_numbers, check_generator, is_gaussian
from labkit.design.nodes import AmortizedNodes, GaussianNodes, Level, Nodes, ParticleNodes, value_of
from labkit.design.search import BallSearch
from labkit.errors import check_number, check_size

MAX_NODES = 5000
_BLOCK = 4e5  # nodes × particles that are optimised together: larger blocks leave the cache

Policy = Callable[[Tensor, Tensor], Tensor]  # designs (R, t, d), outcomes (R, t) -> design (R, d)


@dataclass(frozen=True, eq=False)
class ScenarioTree:
    """The optimised tree of each of R decisions, nodes in order of their level.

    Attributes:
        parents: index of the parent (n,), −1 for the root.
        depth: level (n,).
        design: (R, n, d).
        outcome: fantasised outcome that leads to the node (R, n), NaN for the root.
        theta: particles of the node's belief (R, n, N, p).
        log_weights: their normalised weights (R, n, N).
        eig: expected gain of the node's design (R, n), nats.
        budget: what is left after the node's design (R, n), inf without a budget.
    """

    parents: Tensor
    depth: Tensor
    design: Tensor
    outcome: Tensor
    theta: Tensor
    log_weights: Tensor
    eig: Tensor
    budget: Tensor

    @property
    def probability(self) -> Tensor:
        """Probability of the node's outcomes within the tree (n,): siblings are equally likely."""
        probability = torch.ones(len(self.parents))
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                probability[node] = probability[parent] / (self.parents == parent).sum()
        return probability

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def to_records(self, decision: int = 0) -> list[dict[str, Any]]:
        """One row per node of a decision's tree, for a table."""
        return [
            {
                "node": node,
                "parent": int(self.parents[node]),
                "depth": int(self.depth[node]),
                "probability": float(self.probability[node]),
                "outcome": float(self.outcome[decision, node]),
                "design": self.design[decision, node].tolist(),
                "eig": float(self.eig[decision, node]),
                "budget": float(self.budget[decision, node]),
            }
            for node in range(len(self.parents))
        ]


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do next.

    Attributes:
        design: the roots' designs (R, d), feasible.
        value: V̂ of the best tree of each decision (R,), nats.
        tree: these trees.
        moves: their unconstrained moves, one tensor (R, n, d) per level; empty for the nested search and SLSQP.
        num_projected: designs of the warm-start policy that the constraint forbade and that were projected.
    """

    design: Tensor
    value: Tensor
    tree: ScenarioTree
    moves: tuple[Tensor, ...] = ()
    num_projected: int = 0


@dataclass(frozen=True, eq=False)
class BaseNoise:
    """What fantasised outcomes are made of, one pair of tensors (R, 1, n, m) per level that has children.

    Attributes:
        uniform: picks the parameter.
        noise: of the model's `simulate`; both are stratified over the m branches of a node.
    """

    uniform: tuple[Tensor, ...]
    noise: tuple[Tensor, ...]

    @classmethod
    def draw(cls, model: DesignModel, num_decisions: int, branching: Sequence[int], generator: torch.Generator) -> "BaseNoise":
        """Base noise of R trees with branching (m_1, …, m_h)."""
        uniform, noise, nodes = [], [], 1
        for branches in branching:
            shape = (num_decisions, 1, nodes, branches)
            first, second = (stratified(shape, generator) for _ in range(2))
            uniform.append(first)
            noise.append(second if model.outcomes is not None else torch.special.ndtri(second.clamp(1e-6, 1 - 1e-6)))
            nodes *= branches
        return cls(tuple(uniform), tuple(noise))

    def part(self, rows: slice) -> "BaseNoise":
        """The noise of some of the decisions."""
        return BaseNoise(tuple(u[rows] for u in self.uniform), tuple(e[rows] for e in self.noise))


def stratified(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers, one in each m-th of (0, 1) along the last dimension of size m, in random order."""
    order = torch.rand(shape, generator=generator).argsort(-1)
    return (order + torch.rand(shape, generator=generator)) / shape[-1]


def unroll(
    root: Nodes,
    state: State,
    moves: Sequence[Tensor],
    noise: BaseNoise,
    constraint: Constraint,
    place: Callable[[State, Tensor], Tensor] | None = None,
) -> list[Level]:
    """Follow the moves (R, S, n, d) of each level down the trees.

    Args:
        root: beliefs of the roots (R, 1, 1).
        state: of the constraint, batch shape (R,).
        moves: unconstrained, one tensor per level.
        noise: base noise of the outcomes.
        constraint: decodes the moves.
        place: (state, move) -> design; the constraint's `decode` if None.
    """
    place = place or constraint.decode
    starts = moves[0].shape[1]
    state = state.map(lambda x: x[:, None, None].expand(-1, starts, *[-1] * x.dim()))
    levels, nodes, outcome = [], root, None
    for depth, move in enumerate(moves):
        design = place(state, move)
        levels.append(Level(nodes, state, constraint.step(state, design), design, outcome))
        if depth + 1 < len(moves):
            branches = noise.noise[depth].shape[-1]
            outcome, nodes = nodes.observe(design, noise.uniform[depth], noise.noise[depth])
            state = levels[-1].after.map(lambda x, m=branches: x.repeat_interleave(m, 2))
    return levels


def tree_value(
    root: Nodes,
    state: State,
    moves: Sequence[Tensor],
    noise: BaseNoise,
    constraint: Constraint,
    *,
    discount: float = 1.0,
    leaf_value: float = 0.0,
) -> Tensor:
    """V̂ of R × S trees (R, S) in one tensor program; the first six arguments are those of `unroll`."""
    return value_of(unroll(root, state, moves, noise, constraint), discount, leaf_value)


def tree_value_recursive(
    root: Nodes, state: State, moves: Sequence[Tensor], noise: BaseNoise, constraint: Constraint, *, discount: float = 1.0
) -> Tensor:
    """The same V̂ (R, S), tree by tree and node by node: the definition, for tests and benchmarks."""

    def visit(nodes: Nodes, state: State, depth: int, node: int) -> Tensor:
        design = constraint.decode(state, moves[depth][row, start, node].reshape(1, 1, 1, -1))
        value = nodes.gain(design)[0, 0, 0]
        if depth + 1 == len(moves):
            return value
        uniform, shock = (array[depth][row, 0, node].reshape(1, 1, 1, -1) for array in (noise.uniform, noise.noise))
        _, children = nodes.observe(design, uniform, shock)
        after, branches = constraint.step(state, design), shock.shape[-1]
        below = [visit(children.part(nodes=slice(j, j + 1)), after, depth + 1, node * branches + j) for j in range(branches)]
        return value + discount * torch.stack(below).mean()

    decisions, starts = moves[0].shape[:2]
    values = moves[0].new_empty(decisions, starts)
    for row in range(decisions):
        own = state.map(lambda x, r=row: x[r : r + 1, None, None])
        for start in range(starts):
            values[row, start] = visit(root.part(rows=slice(row, row + 1)), own, 0, 0)
    return values


def ascend(
    value: Callable[[Sequence[Tensor]], Tensor], moves: Sequence[Tensor], *, iterations: int, lr: float = 0.4
) -> tuple[Tensor, list[Tensor]]:
    """Adam on all trees at once; the best iterate of each is kept.

    Args:
        value: moves -> V̂ (R, S).
        moves: one tensor (R, S, n, d) per level.
        iterations: ≥ 0 steps.
        lr: step size of the moves.

    Returns:
        The best values (R, S) and their moves.
    """
    current = [move.detach().clone().requires_grad_() for move in moves]
    optimiser = torch.optim.Adam(current, lr=lr, betas=(0.8, 0.95), maximize=True)
    best, kept = None, [move.detach().clone() for move in current]
    for i in range(iterations + 1):
        with torch.set_grad_enabled(i < iterations):
            values = value(current)
        now = values.detach().nan_to_num(-math.inf)
        better = torch.ones_like(now, dtype=torch.bool) if best is None else now > best
        best = now if best is None else torch.maximum(best, now)
        kept = [torch.where(better[:, :, None, None], new.detach(), old) for new, old in zip(current, kept, strict=True)]
        if i < iterations:
            grads = torch.autograd.grad(values, current, torch.ones_like(values))
            for move, grad in zip(current, grads, strict=True):
                move.grad = grad.nan_to_num(0, 0, 0)
            optimiser.step()
    return best, kept


def slsqp(
    value: Callable[[Sequence[Tensor]], Tensor],
    slack: Callable[[Sequence[Tensor]], Tensor],
    designs: Sequence[Tensor],
    bounds: Tensor,
    iterations: int = 600,
) -> list[Tensor]:
    """Maximise one tree's V̂ over its designs by SciPy's SLSQP with analytic gradients [paper].

    Args:
        value: designs -> V̂ (1, 1).
        slack: designs -> non-negative where feasible, any shape.
        designs: start, one tensor (1, 1, n, d) per level.
        bounds: box (2, d).
        iterations: at most.

    Returns:
        Designs of the same shapes; slightly infeasible where SLSQP is.
    """
    shapes, sizes = [x.shape for x in designs], [x.numel() for x in designs]

    def split(vector: Tensor) -> list[Tensor]:
        return [part.reshape(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]

    def tensor(vector: np.ndarray) -> Tensor:
        return torch.as_tensor(vector, dtype=designs[0].dtype).requires_grad_()

    def loss(vector: np.ndarray) -> tuple[float, np.ndarray]:
        at = tensor(vector)
        total = -value(split(at)).sum()
        (grad,) = torch.autograd.grad(total, at)
        return total.item(), grad.nan_to_num(0, 0, 0).double().numpy()

    def flat_slack(at: Tensor) -> Tensor:
        return slack(split(at)).flatten()

    limits = {
        "type": "ineq",
        "fun": lambda vector: flat_slack(tensor(vector)).detach().double().numpy(),
        "jac": lambda vector: torch.autograd.functional.jacobian(flat_slack, tensor(vector)).double().numpy(),
    }
    low, high = (np.tile(bound.double().numpy(), sum(sizes) // len(bound)) for bound in bounds)
    start = torch.cat([x.detach().flatten() for x in designs]).double().numpy()
    with torch.enable_grad(), np.errstate(all="ignore"):
        found = minimize(
            loss,
            start,
            jac=True,
            method="SLSQP",
            bounds=np.stack([low, high], 1),
            constraints=[limits],
            options={"maxiter": iterations, "ftol": 1e-6},
        )
    return split(tensor(found.x).detach())


def tree_of(levels: Sequence[Level]) -> ScenarioTree:
    """The nodes of R unrolled trees with one start each."""
    parents, depth = [-1], [0]
    for at, level in enumerate(levels[1:], 1):
        above, here = (x.design.shape[2] for x in (levels[at - 1], level))
        first = len(parents) - above
        parents += [first + node // (here // above) for node in range(here)]
        depth += [at] * here
    root = levels[0].design[:, 0, :, 0]
    outcomes = [torch.full_like(root, math.nan) if level.outcome is None else level.outcome[:, 0] for level in levels]
    budgets = [
        torch.full_like(level.design[:, 0, :, 0], math.inf) if level.after.budget is None else level.after.budget[:, 0]
        for level in levels
    ]
    theta, log_weights = zip(*(level.nodes.particles() for level in levels), strict=True)
    return ScenarioTree(
        parents=torch.tensor(parents),
        depth=torch.tensor(depth),
        design=torch.cat([level.design[:, 0] for level in levels], 1),
        outcome=torch.cat(outcomes, 1),
        theta=torch.cat([part[:, 0] for part in theta], 1),
        log_weights=torch.cat([part[:, 0] for part in log_weights], 1),
        eig=torch.cat([level.nodes.gain(level.design)[:, 0] for level in levels], 1),
        budget=torch.cat(budgets, 1),
    )


def preset_paper(model: DesignModel) -> dict[str, Any]:
    """Settings of the published configuration files [code]; a deterministic policy gives one warm start, not several."""
    common = {"discount": 0.6, "estimator": "ace", "optimizer": "slsqp", "depth": 2, "num_contrastive": 32}
    if isinstance(model, CES):
        return common | {"branching": 1, "num_obs": 40, "num_random": 25, "starts": 2}
    return common | {"branching": 3, "num_obs": 20, "num_random": 0, "starts": 1}


def default_estimator(model: DesignModel) -> str:
    """The estimator of `node_eig` with the least noise that the model allows."""
    if model.limit is not None:
        return "atoms"
    if model.outcomes is not None:
        return "enumerate"
    return "quadrature" if is_gaussian(model) else "pce"


class TreePlanner:
    """Chooses designs by optimising a scenario tree.

    Args:
        model: of the experiment.
        constraint: which designs are allowed after which.
        depth: H ≥ 0, levels below the root; 0 is greedy.
        branching: m ≥ 1 fantasised outcomes per node, or one number per level.
        discount: γ in (0, 1]; 1 [ours], 0.6 [paper].
        estimator: of the nodes' gain: one of `eig`'s methods, or "gaussian" for the closed form of `LinearGaussian`; None
            takes what suits the model.
        optimizer: "adam" over moves [ours], "slsqp" over designs [paper] or "nested" ball search [ours]; None takes "nested"
            for `CES`, else "adam".
        pacing: how much of a budget one step may take: "half", "even" or None; replaces that of the constraint if given.
        leaf_value: nats per unit of budget that is left below the deepest level; None takes 0.02 for "nested", else 0.
        root_candidates: of the nested search, designs for the root that get a subtree each.
        starts: trees that are optimised, ≥ 1: the best-scoring ones of all that were proposed.
        iterations: steps of Adam, ≥ 0; SLSQP takes up to 600.
        lr: step size of Adam.
        num_random: random trees that are proposed; with other proposals at least as many as `starts`.
        warm_start: a policy (designs (R, t, d), outcomes (R, t)) -> design (R, d) that proposes a tree when rolled down it.
        posterior: q(θ | D), for estimator "ace".
        num_particles: planning particles per decision.
        num_obs, num_contrastive: of the estimators that sample.
        search: settings of the nested search.
        preset: None or "paper": the published settings, which replace `depth`, `branching`, `discount`, `estimator`,
            `optimizer`, `num_obs`, `num_random` and `starts`.
        seed: of the base noise where `plan` gets no generator.

    Raises:
        ValueError: an argument is out of range, or does not suit the model.
    """

    def __init__(
        self,
        model: DesignModel,
        constraint: Constraint,
        *,
        depth: int = 2,
        branching: int | Sequence[int] = 2,
        discount: float = 1.0,
        estimator: str | None = None,
        optimizer: str | None = None,
        pacing: str | None = None,
        leaf_value: float | None = None,
        root_candidates: int = 3,
        starts: int = 3,
        iterations: int = 15,
        lr: float = 0.4,
        num_random: int = 12,
        warm_start: Policy | None = None,
        posterior: Posterior | None = None,
        num_particles: int | None = None,
        num_obs: int | None = None,
        num_contrastive: int = 32,
        search: BallSearch | None = None,
        preset: str | None = None,
        seed: int = 0,
    ):
        if not isinstance(model, DesignModel):
            raise ValueError(f"model={model!r}: expected a DesignModel")
        if not isinstance(constraint, Constraint) or constraint.bounds.shape != model.bounds.shape:
            got = f"one of {constraint.bounds.shape[1]} coordinates" if isinstance(constraint, Constraint) else repr(constraint)
            raise ValueError(f"constraint: got {got}; expected a Constraint of {model.design_dim} coordinates")
        if preset not in (None, "paper"):
            raise ValueError(f'preset={preset!r}: expected None or "paper"')
        given = {
            "depth": depth,
            "branching": branching,
            "discount": discount,
            "estimator": estimator or default_estimator(model),
            "optimizer": optimizer or ("nested" if isinstance(model, CES) else "adam"),
            "num_obs": (32 if model.limit is not None else 20) if num_obs is None else num_obs,
            "num_contrastive": num_contrastive,
            "num_random": num_random,
            "starts": starts,
        }
        for name, value in (given | (preset_paper(model) if preset else {})).items():
            setattr(self, name, value)
        self.model, self.constraint = model, paced(constraint, pacing)
        self.leaf_value = (0.02 if self.optimizer == "nested" else 0.0) if leaf_value is None else leaf_value
        self.root_candidates, self.iterations, self.lr, self.seed = root_candidates, iterations, lr, seed
        self.num_particles = (128 if model.limit is not None else 150) if num_particles is None else num_particles
        self.warm_start, self.posterior, self.search = warm_start, posterior, search or BallSearch()
        self._warned = False
        self._check()

    def _check(self) -> None:
        for name, low in (("depth", 0), ("starts", 1), ("iterations", 0), ("root_candidates", 1), ("num_particles", 2)):
            check_size(name, getattr(self, name), low)
        for name, low in (("num_random", 0), ("num_obs", 1), ("num_contrastive", 1)):
            check_size(name, getattr(self, name), low)
        check_size("seed", self.seed, 0)
        self._check_branching()
        check_number("discount", self.discount, "a number in (0, 1]", lambda x: 0 < x <= 1)
        check_number("leaf_value", self.leaf_value, "a finite number", math.isfinite)
        check_number("lr", self.lr)
        if self.warm_start is not None and not callable(self.warm_start):
            raise ValueError(f"warm_start={self.warm_start!r}: expected a function of designs and outcomes, or None")
        if not isinstance(self.search, BallSearch):
            raise ValueError(f"search={self.search!r}: expected a BallSearch")
        if self.estimator == "atoms" and self.num_obs > self.num_particles:
            raise ValueError(f"num_obs={self.num_obs}: expected at most num_particles={self.num_particles}")
        if self.optimizer not in ("adam", "slsqp", "nested"):
            raise ValueError(f'optimizer={self.optimizer!r}: expected "adam", "slsqp" or "nested"')
        if self.optimizer == "nested" and self.root_candidates > len(self.search.shares):
            raise ValueError(
                f"root_candidates={self.root_candidates}: search.shares has {len(self.search.shares)}, one for each candidate"
            )
        self._check_estimator()

    def _check_branching(self) -> None:
        """Bring `branching` to one number per level; refuse trees that are too large before anything is made of them."""
        single = isinstance(self.branching, Integral) and not isinstance(self.branching, bool)
        if not single and (isinstance(self.branching, str) or not isinstance(self.branching, Sequence)):
            raise ValueError(f"branching={self.branching!r}: expected a whole number >= 1, or one per level")
        for branches in [self.branching] if single else self.branching:
            check_size("branching", branches, 1)
        if not single and len(self.branching) < self.depth:
            raise ValueError(f"branching={self.branching}: expected one number for each of depth={self.depth} levels")
        width = nodes = 1
        for level in range(self.depth):
            width *= int(self.branching if single else self.branching[level])
            nodes += width
            if nodes > MAX_NODES:
                memory = 32 * 4 * nodes * self.num_particles * self.starts / 2**30
                more = "more than " if level + 1 < self.depth else ""
                raise ValueError(
                    f"depth={self.depth}, branching={self.branching}: {more}{nodes} nodes, about {memory:.1f} GiB per "
                    f"decision; at most {MAX_NODES} are allowed"
                )
        self.branching = (int(self.branching),) * self.depth if single else tuple(map(int, self.branching[: self.depth]))

    def _check_estimator(self) -> None:
        estimator, model = self.estimator, self.model
        if estimator not in (*METHODS, "gaussian"):
            raise ValueError(f"estimator={estimator!r}: expected one of {', '.join((*METHODS, 'gaussian'))}")
        check_likelihood(model)
        suits = {
            "quadrature": is_gaussian(model),
            "enumerate": model.outcomes is not None,
            "atoms": model.limit is not None,
            "gaussian": hasattr(model, "features"),
            "ace": hasattr(self.posterior, "sample") and hasattr(self.posterior, "log_prob"),
        }
        needs = {
            "quadrature": "a model whose outcome is one Gaussian number",
            "enumerate": "a model with finitely many outcomes",
            "atoms": "a model with censored outcomes, as CES",
            "gaussian": "a LinearGaussian model",
            "ace": "posterior=, a network q(θ | D) with sample and log_prob",
        }
        if not suits.get(estimator, True):
            raise ValueError(f"estimator={estimator!r} for {type(model).__name__}: it needs {needs[estimator]}")
        if self.optimizer == "nested" and estimator in ("ace", "gaussian"):
            raise ValueError(f"estimator={estimator!r}: optimizer='nested' updates particles; take another estimator or 'adam'")

    @torch.no_grad()
    def plan(
        self,
        belief: Any,
        state: State,
        remaining: int,
        *,
        generator: torch.Generator | None = None,
        previous: Plan | None = None,
    ) -> Plan:
        """Optimise one tree for each of R rollouts.

        Args:
            belief: what is known, a `ParticleBelief`; the estimators "ace" and "gaussian" look at its history alone.
            state: of the constraint, batch shape (R,).
            remaining: experiments left, the one to choose included, ≥ 1.
            generator: of base noise and random trees.
            previous: the plan whose root was executed just before: its subtree whose outcome came closest is proposed too.

        Raises:
            ValueError: `remaining` < 1, or a state that is not of R rollouts in the dtype of the belief.
            InfeasibleError: no design is allowed.
        """
        check_size("remaining", remaining, 1)
        state = self._fitting(state, belief)
        if generator is not None:
            check_generator(generator)
        require_feasible(self.constraint, state)
        generator = generator or torch.Generator().manual_seed(self.seed + 1009 * remaining)
        branching = self.branching[: remaining - 1]
        if self.optimizer == "nested":
            levels, value = self.search.tree(
                belief, state, self.constraint, generator=generator, **self._search_options(branching)
            )
            return self._finish(state, value, levels)
        root = self._root(belief, generator)
        noise = BaseNoise.draw(self.model, len(belief.outcomes), branching, generator)
        proposals, num_projected = self._propose(belief, root, state, noise, branching, generator, previous)
        rows = max(int(_BLOCK / (self.starts * sum(level_sizes(branching)) * self.num_particles)), 1)
        parts = [
            self._solve(
                root.part(part), state.map(lambda x, p=part: x[p]), noise.part(part), [move[part] for move in proposals]
            )
            for part in (slice(first, first + rows) for first in range(0, len(belief.outcomes), rows))
        ]
        values, designs, moves = zip(*parts, strict=True)
        designs, moves = ([torch.cat(level) for level in zip(*several, strict=True)] for several in (designs, moves))
        levels = unroll(root, state, designs, noise, self.constraint, lambda state, x: x)
        return self._finish(state, torch.cat(values), levels, tuple(move[:, 0] for move in moves), num_projected)

    def _fitting(self, state: State, belief: Any) -> State:
        """The constraint's state in the dtype of the belief."""
        if not isinstance(state, State):
            raise ValueError(f"state={state!r}: expected the State that constraint.init or constraint.step gives")
        rollouts, dtype = len(belief.outcomes), belief.designs.dtype
        if state.x is not None and state.x.shape != (rollouts, self.model.design_dim):
            raise ValueError(f"state: got x of shape {tuple(state.x.shape)}; expected {(rollouts, self.model.design_dim)}")
        if any(tensor is not None and tensor.isnan().any() for tensor in (state.x, state.budget)):
            raise ValueError(f"state={state}: expected no NaN")
        return state.map(lambda tensor: tensor.to(dtype))

    def _root(self, belief: Any, generator: torch.Generator) -> Nodes:
        seed = int(torch.randint(2**31, (), generator=generator))
        if self.estimator == "gaussian":
            return GaussianNodes.root(belief)
        if self.estimator == "ace":
            return AmortizedNodes.root(belief, self.posterior, self.num_obs, self.num_contrastive, seed)
        options = {"num_obs": self.num_obs, "num_contrastive": self.num_contrastive, "seed": seed}
        return ParticleNodes.root(belief, self.num_particles, self.estimator, **options)

    def _propose(
        self,
        belief: Any,
        root: Nodes,
        state: State,
        noise: BaseNoise,
        branching: Sequence[int],
        generator: torch.Generator,
        previous: Plan | None,
    ) -> tuple[list[Tensor], int]:
        """Moves (R, S', n, d) of the trees to choose the starts from, and how many designs of the policy were projected."""
        shapes = [(len(belief.outcomes), 1, count, self.model.design_dim) for count in level_sizes(branching)]
        trees, num_projected = [], 0
        if self.warm_start is not None:
            moves, num_projected = self._policy_tree(belief, root, state, noise, len(branching))
            trees.append(moves)
        if previous is not None and previous.moves:
            trees.append(shifted(previous, belief.outcomes[:, -1], shapes))
        wanted = max(self.num_random, self.starts - len(trees))
        for tree in range(wanted):
            # every other tree is a path, the same for all outcomes: good paths are easier to hit than good trees
            drawn = [(*shape[:2], 1, shape[3]) if tree % 2 == 0 else shape for shape in shapes]
            moves = [torch.randn(size, generator=generator).expand(shape) for size, shape in zip(drawn, shapes, strict=True)]
            trees.append(moves)
        return [torch.cat(level, 1) for level in zip(*trees, strict=True)], num_projected

    def _policy_tree(self, belief: Any, root: Nodes, state: State, noise: BaseNoise, depth: int) -> tuple[list[Tensor], int]:
        """The warm-start policy rolled down the tree, each node's history with its fantasised outcomes [paper]."""
        X, Y = belief.designs[:, None, None], belief.outcomes[:, None, None]  # (R, 1, n, t, d), (R, 1, n, t)
        state, nodes, moves, num_projected = state.map(lambda x: x[:, None, None]), root, [], 0
        for at in range(depth + 1):
            proposal = as_numbers("warm_start", self.warm_start(X.flatten(0, 2), Y.flatten(0, 2)), X.dtype)
            if proposal.shape != (X.shape[:3].numel(), X.shape[-1]) or not proposal.isfinite().all():
                got = f"shape {tuple(proposal.shape)}, {int((~proposal.isfinite()).sum())} numbers not finite"
                raise ValueError(f"warm_start: got {got}; expected finite designs {(X.shape[:3].numel(), X.shape[-1])}")
            proposal = proposal.unflatten(0, X.shape[:3])
            num_projected += int((~self.constraint.is_feasible(state, proposal)).sum())
            moves.append(self.constraint.encode(state, self.constraint.project(state, proposal)))
            if at == depth:
                break
            design, branches = self.constraint.decode(state, moves[-1]), noise.noise[at].shape[-1]
            outcome, nodes = nodes.observe(design, noise.uniform[at], noise.noise[at])
            state = self.constraint.step(state, design).map(lambda x, m=branches: x.repeat_interleave(m, 2))
            X = torch.cat([X, design[..., None, :]], 3).repeat_interleave(branches, 2)
            Y = torch.cat([Y.repeat_interleave(branches, 2), outcome[..., None].to(Y)], 3)
        if num_projected and not self._warned:
            self._warned = True
            warnings.warn(
                f"warm_start: {num_projected} designs were not allowed by {self.constraint!r} and were projected; "
                "later ones are counted in Plan.num_projected",
                stacklevel=4,
            )
        return moves, num_projected

    def _solve(
        self, root: Nodes, state: State, noise: BaseNoise, proposals: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Best value (R,), designs and moves (R, 1, n, d) per level, of the trees that were proposed (R, S', n, d)."""

        def value(moves: Sequence[Tensor], place: Callable[[State, Tensor], Tensor] | None = None) -> Tensor:
            return value_of(unroll(root, state, moves, noise, self.constraint, place), self.discount, self.leaf_value)

        starts = proposals
        if proposals[0].shape[1] > self.starts:
            starts = take_trees(proposals, value(proposals).topk(self.starts, 1).indices)
        if self.optimizer == "slsqp":
            return self._solve_slsqp(root, state, noise, starts, value)
        values, moves = ascend(value, starts, iterations=self.iterations, lr=self.lr)
        best = values.argmax(1, keepdim=True)
        moves = take_trees(moves, best)
        designs = [level.design for level in unroll(root, state, moves, noise, self.constraint)]
        return values.gather(1, best)[:, 0], designs, moves

    def _solve_slsqp(
        self,
        root: Nodes,
        state: State,
        noise: BaseNoise,
        starts: Sequence[Tensor],
        value: Callable[[Sequence[Tensor], Callable[[State, Tensor], Tensor] | None], Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The same by SLSQP, tree by tree; a start stays if its result, projected onto the constraint, is no better."""
        begun = [level.design for level in unroll(root, state, starts, noise, self.constraint)]
        found = [torch.empty_like(level) for level in begun]
        for row in range(len(begun[0])):
            part = slice(row, row + 1)
            at = (root.part(part), state.map(lambda x, p=part: x[p]), noise.part(part))

            def follow(designs: Sequence[Tensor], at: tuple = at) -> list[Level]:
                return unroll(at[0], at[1], designs, at[2], self.constraint, lambda state, x: x)

            def slack(designs: Sequence[Tensor], at: tuple = at) -> Tensor:
                return torch.cat([each.flatten() for each in path_slack(at[1], designs, self.constraint)])

            for start in range(begun[0].shape[1]):
                tree = [level[part, start : start + 1] for level in begun]
                result = slsqp(
                    lambda designs: value_of(follow(designs), self.discount, self.leaf_value),
                    slack,
                    tree,
                    self.constraint.bounds,
                )
                for level, design in zip(found, result, strict=True):
                    level[row, start] = design[0, 0]
        levels = unroll(root, state, found, noise, self.constraint, self.constraint.project)
        designs = [torch.cat([new.design, old], 1) for new, old in zip(levels, begun, strict=True)]
        values = value(designs, lambda state, x: x).nan_to_num(-math.inf)
        best = values.argmax(1, keepdim=True)
        return values.gather(1, best)[:, 0], take_trees(designs, best), []

    def _search_options(self, branching: Sequence[int]) -> dict[str, Any]:
        return {
            "branching": branching,
            "root_candidates": self.root_candidates,
            "num_particles": self.num_particles,
            "num_obs": self.num_obs,
            "estimator": self.estimator,
            "discount": self.discount,
            "leaf_value": self.leaf_value,
        }

    def _finish(
        self,
        state: State,
        value: Tensor,
        levels: Sequence[Level],
        moves: tuple[Tensor, ...] = (),
        num_projected: int = 0,
    ) -> Plan:
        """Check the roots' designs by the constraint itself; rounding errors of a solver are projected away."""
        design = levels[0].design[:, 0, 0]
        allowed = self.constraint.is_feasible(state, design)
        design = torch.where(allowed[..., None], design, self.constraint.project(state, design))
        require_feasible(self.constraint, state, design)
        return Plan(design, value, tree_of(levels), moves, num_projected)


def level_sizes(branching: Sequence[int]) -> list[int]:
    """Nodes of each level of a tree with branching (m_1, …, m_h): 1, m_1, m_1 m_2, …"""
    return list(accumulate(branching, operator.mul, initial=1))


def take_trees(moves: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """The trees `index` (R, k) of each decision, from levels (R, S, n, d)."""
    return [move.take_along_dim(index[:, :, None, None], 1) for move in moves]


def shifted(previous: Plan, outcome: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The subtree of the previous plan whose first outcome is nearest to the observed one (R,), as moves of the given shapes.

    Levels that the subtree lacks repeat the moves of the level above.
    """
    if len(previous.moves) == 1:
        deeper, branches = [previous.moves[0][:, None]], 1
    else:
        branches = previous.moves[1].shape[1]
        first = (previous.tree.outcome[:, 1 : 1 + branches] - outcome[:, None]).abs().argmin(1)
        deeper = [
            move.unflatten(1, (branches, -1)).take_along_dim(first[:, None, None, None], 1) for move in previous.moves[1:]
        ]
    moves = []
    for depth, shape in enumerate(shapes):
        move = deeper[depth] if depth < len(deeper) else moves[-1]
        moves.append(move[:, :, torch.arange(shape[2]) * move.shape[2] // shape[2]])
    return moves


def path_slack(state: State, designs: Sequence[Tensor], constraint: Constraint) -> Iterator[Tensor]:
    """`slack` (1, 1, n, k) of a tree's designs (1, 1, n, d), level by level."""
    state = state.map(lambda x: x[:, None, None])
    for depth, design in enumerate(designs):
        yield constraint.slack(state, design)
        if depth + 1 < len(designs):
            branches = designs[depth + 1].shape[2] // design.shape[2]
            state = constraint.step(state, design).map(lambda x, m=branches: x.repeat_interleave(m, 2))


def paced(constraint: Constraint, pacing: str | None) -> Constraint:
    """The same constraint with another pacing of its budgets; `pacing=None` changes nothing.

    Raises:
        ValueError: the constraint has no budget to pace.
    """
    if pacing is None:
        return constraint
    if isinstance(constraint, Budget):
        return Budget(constraint.total, constraint.cost, pacing, cheapest=constraint.cheapest, bounds=constraint.bounds)
    if isinstance(constraint, Intersection) and any(isinstance(member, Budget) for member in constraint.members):
        return Intersection(*(paced(m, pacing) if isinstance(m, Budget) else m for m in constraint.members))
    raise ValueError(f"pacing={pacing!r}: {constraint!r} has no budget to pace")

"""Search without gradients, for designs with d ≥ 4 and a gain of many peaks: the two baskets of `CES` [ours].

One decision looks at K candidates within reach of the latest design x_{t−1}, then refines the best in a few rounds of Gaussian
moves. For a model with a utility U, most candidates are first moved onto a surface U(z) − U(z′) = c of a random particle of the
belief, close to 0 on the scale of the buyer's marks: elsewhere the outcome is censored and tells little.

The nested tree looks ahead by the same search. A few designs compete for the root: the best within each share of the reach.
Each gets the same fantasised outcomes; after each of them the belief is updated by Markov moves, since reweighting alone would
leave hardly any particle (an outcome of CES leaves e⁻⁴ of the effective sample size), and the best next design is searched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.design.constraints import Constraint, State
from labkit.design.nodes import Level, ParticleNodes, value_of
from labkit.errors import check_number, check_size

_BAND = 3.0  # s.d. of a surface's η
_WIDEST = 5.0  # largest 1/u that the band follows
_NEWTON = 3
_SHRINK = 0.4  # of the moves from round to round
_ROWS = 48  # decisions that are searched together


@dataclass(frozen=True)
class BallSearch:
    """Settings of the search; the defaults are the "light" ones.

    Attributes:
        candidates: K ≥ 1 for the root.
        rounds: refinements of the best candidates of the root.
        keep: candidates that a round refines.
        moves: Gaussian moves around each of them.
        inner_candidates, inner_rounds: the same for the nodes below the root.
        shares: of the reach, each of which sends its best design into the competition for the root; `root_candidates` takes
            the last ones.
        fantasy_particles: of the beliefs after a fantasised outcome.
        fantasy_sweeps: Metropolis sweeps of their update.
    """

    candidates: int = 200
    rounds: int = 2
    keep: int = 8
    moves: int = 16
    inner_candidates: int = 60
    inner_rounds: int = 1
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    fantasy_particles: int = 160
    fantasy_sweeps: int = 2

    def __post_init__(self):
        for name in ("candidates", "keep", "moves", "inner_candidates", "fantasy_sweeps"):
            check_size(name, getattr(self, name), 1)
        for name, low in (("rounds", 0), ("inner_rounds", 0), ("fantasy_particles", 2)):
            check_size(name, getattr(self, name), low)
        if not isinstance(self.shares, Sequence) or isinstance(self.shares, str) or not self.shares:
            raise ValueError(f"shares={self.shares!r}: expected a sequence of numbers in (0, 1]")
        for share in self.shares:
            check_number("shares", share, "numbers in (0, 1]", lambda x: 0 < x <= 1)

    def best(
        self,
        nodes: ParticleNodes,
        state: State,
        constraint: Constraint,
        generator: torch.Generator,
        *,
        shares: Sequence[float] = (1.0,),
        inner: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The best design found within each share of the reach.

        Args:
            nodes: beliefs (R, 1, 1).
            state: of the constraint, batch shape (R,).
            constraint: its feasible set is convex, else designs are projected.
            generator: of the candidates.
            shares: C numbers in (0, 1].
            inner: search as at the nodes below a root.

        Returns:
            Designs (R, C, d) and their gains (R, C).
        """
        count, rounds = (self.inner_candidates, self.inner_rounds) if inner else (self.candidates, self.rounds)
        parts = []
        for first in range(0, len(nodes.theta), _ROWS):
            rows = slice(first, first + _ROWS)
            ball = Ball.around(state.map(lambda x, rows=rows: x[rows]), constraint, shares)
            parts.append(self._climb(nodes.part(rows), ball, count, rounds, generator))
        return tuple(torch.cat(several) for several in zip(*parts, strict=True))

    def _climb(
        self, nodes: ParticleNodes, ball: "Ball", count: int, rounds: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        designs = propose(nodes, ball, count, generator)  # (R, C, K, d)
        gains = nodes.gain(designs).nan_to_num(-1e9)
        for k in range(rounds):
            keep = min(self.keep, gains.shape[-1])
            gains, index = gains.topk(keep, -1)
            designs = designs.take_along_dim(index[..., None], 2)
            shape = (*designs.shape[:2], keep, self.moves, designs.shape[-1])
            width = 0.25 * _SHRINK**k * torch.exp(-1.5 * torch.rand(shape[:-1], generator=generator))[..., None]
            steps = torch.randn(shape, generator=generator) * width * ball.radius[..., None, None, None]
            new = ball.confine((designs[..., None, :] + steps).flatten(2, 3))
            designs, gains = torch.cat([designs, new], 2), torch.cat([gains, nodes.gain(new).nan_to_num(-1e9)], 2)
        top = gains.argmax(-1, keepdim=True)
        return designs.take_along_dim(top[..., None], 2)[:, :, 0], gains.gather(-1, top)[..., 0]

    def tree(
        self,
        belief: Any,
        state: State,
        constraint: Constraint,
        *,
        generator: torch.Generator,
        branching: Sequence[int],
        root_candidates: int,
        num_particles: int,
        num_obs: int,
        estimator: str,
        discount: float,
        leaf_value: float,
    ) -> tuple[list[Level], Tensor]:
        """The best of a few nested trees for each of R decisions.

        Args:
            belief: a `ParticleBelief` of R rollouts.
            state: of the constraint, batch shape (R,).
            branching: fantasised outcomes per node of each level that has children.
            root_candidates: designs that compete for the root, at most as many as there are `shares`.
            num_particles, num_obs, estimator: of the gains.
            discount: γ of a level.
            leaf_value: nats per unit of budget left after the deepest level, if experiments are.

        Returns:
            Levels with S = 1, and values (R,).
        """
        shares = self.shares[-root_candidates:] if branching else (1.0,)
        options = {"num_obs": num_obs, "seed": int(torch.randint(2**31, (), generator=generator))}
        nodes = ParticleNodes.root(belief, num_particles, estimator, **options)
        designs, _ = self.best(nodes, state, constraint, generator, shares=shares)
        start = state.map(lambda x: x[:, None, None].expand(-1, len(shares), *[-1] * x.dim()))
        levels = [self._level(nodes, start, constraint, designs[:, :, None], None)]
        for depth, branches in enumerate(branching):
            above = levels[-1]
            shape = (*above.design.shape[:3], branches)  # (R, C, n, m)
            theta = belief.sample(branches, generator)
            theta = theta[:, None, None] if depth == 0 else theta.unflatten(0, shape[:3])
            noise = nodes.model.noise((shape[0], 1, *shape[2:]), generator)
            y = nodes.model.simulate(theta, above.design[..., None, :], noise)
            copies = branches * (len(shares) if depth == 0 else 1)
            belief = belief.thin(self.fantasy_particles, copies=copies, sweeps=self.fantasy_sweeps, generator=generator)
            belief = belief.update(above.design.flatten(0, 2).repeat_interleave(branches, 0), y.flatten())
            flat = ParticleNodes.root(belief, min(num_particles, self.fantasy_particles), estimator, **options)
            after = above.after.map(lambda x, m=branches: x.flatten(0, 2).repeat_interleave(m, 0))
            designs, _ = self.best(flat, after, constraint, generator, inner=True)
            children = (*shape[:2], shape[2] * branches)
            nodes = replace(
                flat,
                theta=flat.theta[:, 0, 0].unflatten(0, children),
                log_weights=flat.log_weights[:, 0, 0].unflatten(0, children),
            )
            state = after.map(lambda x, to=children: x.unflatten(0, to))
            levels.append(self._level(nodes, state, constraint, designs[:, 0].unflatten(0, children), y.flatten(2)))
        values = value_of(levels, discount, leaf_value)
        best = values.argmax(1)
        return [_take(level, best) for level in levels], values.gather(1, best[:, None])[:, 0]

    @staticmethod
    def _level(nodes: ParticleNodes, state: State, constraint: Constraint, design: Tensor, outcome: Tensor | None) -> Level:
        return Level(nodes, state, constraint.step(state, design), design, outcome)


@dataclass(frozen=True, eq=False)
class Ball:
    """Designs within a share of what can be reached: R decisions, C shares.

    Attributes:
        state: of the constraint, batch shape (R, 1, 1).
        constraint: of the designs.
        centre: (R, 1, 1, d), the latest design, or the middle of the box before the first.
        radius: (R, C).
        whole: which shares are all of the reach (C,).
    """

    state: State
    constraint: Constraint
    centre: Tensor
    radius: Tensor
    whole: Tensor

    @classmethod
    def around(cls, state: State, constraint: Constraint, shares: Sequence[float]) -> "Ball":
        """Balls around the latest design."""
        region, shares = constraint.reachable(state), torch.tensor(shares)
        reach = region.balls[0][1] if region.balls else (region.high - region.low).amax(-1) / 2
        if not reach.isfinite().all():
            raise ValueError(f"constraint={constraint!r}: a search needs a finite reach, from a box or from the constraint")
        centre = (constraint.bounds.mean(0) if state.x is None else state.x).expand(len(reach), -1)
        state = state.map(lambda x: x[:, None, None])
        return cls(state, constraint, centre[:, None, None], reach[:, None] * shares, shares == 1)

    def confine(self, designs: Tensor) -> Tensor:
        """Allowed designs (R, C, K, d) within the balls; a step is shortened, which keeps convex sets feasible."""
        designs = self.constraint.project(self.state, designs)
        step = designs - self.centre
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True).clamp(min=1e-9)
        share = (self.radius[..., None, None] / length).clamp(max=1)
        return torch.where((self.whole[:, None, None] | (share >= 1)), designs, self.centre + share * step)


def propose(nodes: ParticleNodes, ball: Ball, count: int, generator: torch.Generator) -> Tensor:
    """Candidates (R, C, K, d): to stay, random steps, and steps that end where the outcome is informative."""
    shape = (*ball.radius.shape, count)
    d = ball.centre.shape[-1]
    direction = torch.nn.functional.normalize(torch.randn((*shape, d), generator=generator), dim=-1)
    length = ball.radius[..., None] * torch.rand(shape, generator=generator)
    designs = ball.confine(ball.centre + direction * length[..., None])
    if hasattr(nodes.model, "utility"):
        plain = count // 3
        pulled = count // 6
        moved = designs[:, :, plain:]
        moved = torch.cat([_pull(moved[:, :, :pulled], generator), moved[:, :, pulled:]], 2)
        designs = torch.cat([designs[:, :, :plain], ball.confine(to_surface(nodes, moved, generator))], 2)
    stay = ball.confine(ball.centre.expand(*shape[:2], 1, d))
    return torch.cat([stay, designs[:, :, 1:]], 2)


def _pull(designs: Tensor, generator: torch.Generator) -> Tensor:
    """Both baskets of designs (..., 2 k) pulled toward their mean by a random factor."""
    baskets = designs.unflatten(-1, (2, -1))
    middle = baskets.mean(-2, keepdim=True)
    factor = torch.rand((*designs.shape[:-1], 1, 1), generator=generator)
    return (middle + factor * (baskets - middle)).flatten(-2)


def to_surface(nodes: ParticleNodes, designs: Tensor, generator: torch.Generator) -> Tensor:
    """Newton steps from designs (R, C, K, d) onto U(z) − U(z′) = c of a random particle, c ~ N(0, (3/u)²), inside the box."""
    model, shape = nodes.model, designs.shape[:-1]
    index = torch.randint(nodes.theta.shape[-2], (shape[0], shape[1] * shape[2], 1), generator=generator)
    theta = nodes.theta[:, 0, 0].take_along_dim(index, 1).reshape(*shape, -1)
    wide = (-theta[..., -1]).exp().clamp(max=_WIDEST)
    level = _BAND * wide * torch.randn(shape, generator=generator)
    half = designs.shape[-1] // 2
    low, high = model.bounds
    for _ in range(_NEWTON):
        with torch.enable_grad():
            at = designs.detach().requires_grad_()
            gap = model.utility(theta, at[..., :half]) - model.utility(theta, at[..., half:]) - level
            (slope,) = torch.autograd.grad(gap.sum(), at)
        step = gap.detach()[..., None] * slope / slope.square().sum(-1, keepdim=True).clamp(min=1e-12)
        designs = (at.detach() - step.nan_to_num(0, 0, 0)).clamp(low, high)
    return designs


def _take(level: Level, best: Tensor) -> Level:
    """One of the S trees of each decision (R,), as levels with S = 1."""
    rows = torch.arange(len(best))

    def take(x: Tensor) -> Tensor:
        return x[rows, best if x.shape[1] > 1 else 0][:, None]

    nodes = replace(level.nodes, theta=take(level.nodes.theta), log_weights=take(level.nodes.log_weights))
    outcome = None if level.outcome is None else take(level.outcome)
    return Level(nodes, level.state.map(take), level.after.map(take), take(level.design), outcome)

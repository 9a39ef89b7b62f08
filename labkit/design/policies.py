"""How to choose the next designs of R rollouts at once: planners, baselines, and networks that ignore the constraint.

A policy is a callable

    policy(belief, state, remaining, generator) -> designs (R, d)

with `belief` a `ParticleBelief` of R rollouts, `state` the constraint's, `remaining` the experiments left, this one included,
and `generator` its source of randomness. It never sees the true θ.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.design.belief import ParticleBelief, PlanningParticles
from labkit.design.bounds import prior_contrastive
from labkit.design.constraints import Constraint, Monotone, State
from labkit.design.models import DesignModel, as_numbers
from labkit.design.tree import Plan, TreePlanner
from labkit.errors import check_number, check_size
from labkit.randomness import frozen, seeded_generator

Policy = Callable[[ParticleBelief, State, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class RandomPolicy:
    """Feasible designs at random.

    Uniform where the feasible set is a box; under `Monotone`, the first of the remaining times if all were uniform and sorted;
    where it is a ball, a step of full length in a uniform direction, which under a paced budget is an evenly paced random walk.

    Attributes:
        constraint: of the designs.
    """

    constraint: Constraint
    name: str = "random"

    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        shape = (len(belief.outcomes), belief.model.design_dim)
        box, region = self.constraint.interval(state), self.constraint.reachable(state)
        if box is not None and all(edge.isfinite().all() for edge in box):
            share = torch.rand(shape, generator=generator)
            if isinstance(self.constraint, Monotone):
                share = 1 - (1 - share) ** (1 / remaining)
            return self.constraint.project(state, box[0] + (box[1] - box[0]) * share)
        if region.balls:
            direction = nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)
            return self.constraint.project(state, state.x + region.balls[0][1][:, None] * direction)
        return self.constraint.project(state, belief.model.sample_designs((shape[0],), generator))


@dataclass(frozen=True)
class StaticPolicy:
    """Designs that were all chosen before the first experiment, projected onto the constraint.

    Attributes:
        designs: (T, d), the last ones of a run: with `remaining` experiments left, row T − remaining is played.
        constraint: of the designs.
    """

    designs: Tensor
    constraint: Constraint
    name: str = "static"

    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        if not 1 <= remaining <= len(self.designs):
            raise ValueError(f"remaining={remaining}: designs has {len(self.designs)} rows")
        designs = as_numbers("designs", self.designs, belief.designs.dtype)
        if designs.shape[1:] != (belief.model.design_dim,) or not designs.isfinite().all():
            got = f"shape {tuple(designs.shape)}, {int((~designs.isfinite()).sum())} numbers not finite"
            raise ValueError(f"designs: got {got}; expected finite designs (T, {belief.model.design_dim})")
        design = designs[len(designs) - remaining].expand(len(belief.outcomes), -1)
        return self.constraint.project(state, design)

    @classmethod
    def optimise(
        cls,
        model: DesignModel,
        constraint: Constraint,
        *,
        steps: int,
        planned_under: Constraint | None = None,
        start: Tensor | None = None,
        iterations: int = 300,
        batch: int = 64,
        num_contrastive: int = 600,
        lr: float = 0.05,
        seed: int = 0,
    ) -> "StaticPolicy":
        """Maximise the sequential prior contrastive estimate over one sequence of designs, by Adam on pathwise gradients.

        Args:
            model: of the experiment.
            constraint: what the designs are projected onto when they are played.
            steps: T ≥ 1.
            planned_under: what the sequence obeys while it is optimised; None takes `constraint`.
            start: design (d,) that the sequence starts from, if the constraint needs one.
            iterations, lr: of Adam.
            batch: simulated experiments per iteration.
            num_contrastive: L, parameters that they are told apart from.
            seed: of the experiments.
        """
        for name, size, least in (
            ("steps", steps, 1),
            ("iterations", iterations, 0),
            ("batch", batch, 1),
            ("num_contrastive", num_contrastive, 1),
        ):
            check_size(name, size, least)
        check_number("lr", lr)
        if model.outcomes is not None:
            name = type(model).__name__
            raise ValueError(f"model: the outcomes of {name} are finitely many; pathwise gradients need a density")
        generator = seeded_generator(seed, "static designs")
        rule = planned_under or constraint
        if start is not None:
            start = as_numbers("start", start, model.bounds.dtype)
            if start.shape != (model.design_dim,):
                raise ValueError(f"start: got shape {tuple(start.shape)}; expected ({model.design_dim},)")
            start = start[None]
        state = rule.init(start, steps)
        moves = torch.randn(steps, 1, model.design_dim, generator=generator).requires_grad_()
        optimiser = torch.optim.Adam([moves], lr=lr, maximize=True)
        for _ in range(iterations):
            theta = model.sample_prior((batch + num_contrastive,), generator)
            noise = model.noise((batch, steps), generator)
            with torch.enable_grad():
                value = contrastive_bound(model, theta, noise, follow(rule, state, moves))
                (moves.grad,) = torch.autograd.grad(value, moves)
            optimiser.step()
        with torch.no_grad():
            return cls(follow(rule, state, moves), constraint)


def follow(constraint: Constraint, state: State, moves: Tensor) -> Tensor:
    """Designs (T, d) of moves (T, 1, d)."""
    designs = []
    for move in moves:
        designs.append(constraint.decode(state, move))
        state = constraint.step(state, designs[-1])
    return torch.cat(designs)


def contrastive_bound(model: DesignModel, theta: Tensor, noise: Tensor, designs: Tensor) -> Tensor:
    """sPCE of a sequence of designs (T, d): experiments with the first θ of (B + L, p), told apart from the other L."""
    batch = len(noise)
    y = model.simulate(theta[:batch, None], designs, noise)  # (B, T)
    own = model.log_prob(y, theta[:batch, None], designs).sum(-1)
    others = model.log_prob(y[:, None], theta[None, batch:, None], designs).sum(-1)  # (B, L)
    return prior_contrastive(own, others).mean()


class TreePolicy:
    """Plan a scenario tree and execute its root; the rest of the tree is the next plan's first proposal.

    Args:
        planner: a `TreePlanner`.
        name: in tables.
    """

    def __init__(self, planner: TreePlanner, name: str = "tree"):
        self.planner, self.name = planner, name
        self._last: Plan | None = None

    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        self._last = self.planner.plan(belief, state, remaining, generator=generator, previous=self._executed(belief))
        return self._last.design

    def _executed(self, belief: ParticleBelief) -> Plan | None:
        """The last plan, if these rollouts executed it."""
        if self._last is None or not belief.outcomes.shape[1]:
            return None
        latest = belief.designs[:, -1]
        return self._last if latest.shape == self._last.design.shape and torch.equal(latest, self._last.design) else None


class GreedyPolicy(TreePolicy):
    """The design with the largest expected gain among those allowed now: a tree of depth 0.

    Args:
        model, constraint: of the experiment.
        options: others of `TreePlanner`.
    """

    def __init__(self, model: DesignModel, constraint: Constraint, *, name: str = "greedy", **options: Any):
        super().__init__(TreePlanner(model, constraint, depth=0, **options), name)


@dataclass(frozen=True)
class ProjectedPolicy:
    """A policy that does not know the constraint; its designs are projected onto it.

    Attributes:
        policy: a network (designs (R, t, d), outcomes (R, t)) -> designs (R, d), such as `DADPolicy`, or another policy.
        constraint: of the designs.
        planned_under: the constraint that another policy plans under.
    """

    policy: nn.Module | Policy
    constraint: Constraint
    planned_under: Constraint | None = None
    name: str = "projected"

    @torch.no_grad()
    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        if isinstance(self.policy, nn.Module):
            design = self.policy(belief.designs, belief.outcomes)
        else:
            free = state if self.planned_under is None else self.planned_under.init(state.x, remaining)
            design = self.policy(belief, free, remaining, generator)
        if not design.isfinite().all():
            raise ValueError(f"policy={self.name!r}: its designs are not finite")
        return self.constraint.project(state, design)


@dataclass(frozen=True)
class VariationalBelief:
    """Draws of a fitted normal law, in the role of a particle belief.

    Attributes:
        model: whose parameters they are.
        theta: (R, n, p).
        designs, outcomes: history (R, t, d), (R, t).
    """

    model: DesignModel
    theta: Tensor
    designs: Tensor
    outcomes: Tensor

    def subset(self, num_particles: int) -> PlanningParticles:
        """The first draws, equally weighted."""
        theta = self.theta[:, :num_particles]
        return PlanningParticles(self.model, theta, theta.new_full(theta.shape[:2], -math.log(theta.shape[1])))


class GreedyVIPolicy:
    """Greedy under a variational belief: a normal law of each free coordinate, fitted by pyro's SVI [predecessor: VPCE].

    Args:
        model, constraint: of the experiment.
        iterations: steps of SVI per decision.
        lr: its step size.
        num_elbo: draws per step.
        seed: of the planner.
        options: others of `TreePlanner`; the gain is the prior contrastive estimate.
    """

    def __init__(
        self,
        model: DesignModel,
        constraint: Constraint,
        *,
        iterations: int = 150,
        lr: float = 0.05,
        num_elbo: int = 8,
        name: str = "greedy_vi",
        **options: Any,
    ):
        for argument, value in (("iterations", iterations), ("num_elbo", num_elbo)):
            check_size(argument, value, 1)
        check_number("lr", lr)
        self.planner = TreePlanner(model, constraint, depth=0, **{"estimator": "pce"} | options)
        self.iterations, self.lr, self.num_elbo, self.name = iterations, lr, num_elbo, name

    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        mean, scale = self.fit(belief, generator)
        noise = torch.randn((len(mean), self.planner.num_particles, mean.shape[1]), generator=generator)
        theta = belief.model.from_unconstrained(mean[:, None] + scale[:, None] * noise)
        guess = VariationalBelief(belief.model, theta, belief.designs, belief.outcomes)
        return self.planner.plan(guess, state, remaining, generator=generator).design

    def fit(self, belief: ParticleBelief, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Means and standard deviations (R, q) in the coordinates `model.to_unconstrained`."""
        import pyro  # takes a second
        from pyro import distributions as dist
        from pyro.infer import SVI, Trace_ELBO
        from pyro.optim import ClippedAdam

        model, (rollouts, q) = belief.model, (len(belief.v), belief.v.shape[-1])
        X, Y = belief.designs, belief.outcomes
        prior = model.to_unconstrained(model.sample_prior((2000,), seeded_generator(0, "spread of the prior")))
        start, spread = (value.expand(rollouts, q).clone() for value in (prior.mean(0), prior.std(0)))

        def joint() -> None:
            with pyro.plate("rollouts", rollouts):
                v = pyro.sample("v", dist.Normal(start, spread).to_event(1).mask(False))
                fit = model.log_prob(Y, model.from_unconstrained(v)[..., None, :], X).sum(-1)
                pyro.factor("log_joint", model.log_prior_unconstrained(v) + fit)

        def guide() -> None:
            mean = pyro.param("mean", start)
            scale = pyro.param("scale", spread, constraint=dist.constraints.positive)
            with pyro.plate("rollouts", rollouts):
                pyro.sample("v", dist.Normal(mean, scale).to_event(1))

        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.enable_grad(), frozen(seed), pyro.get_param_store().scope():
            elbo = Trace_ELBO(num_particles=self.num_elbo, vectorize_particles=True, max_plate_nesting=1)
            svi = SVI(joint, guide, ClippedAdam({"lr": self.lr, "clip_norm": 10.0}), elbo)
            for _ in range(self.iterations):
                svi.step()
            return pyro.param("mean").detach().clone(), pyro.param("scale").detach().clone()


class StepDADPolicy:
    """A policy network that is tuned during the run: at some times, on experiments simulated from the current belief, with the
    projection in the loop [predecessor: Hedman et al. 2025].

    Args:
        network: (designs (R, t, d), outcomes (R, t)) -> designs (R, d); each rollout tunes a copy.
        constraint: of the designs.
        steps: T of the run.
        fractions: of T, after which the copies are tuned.
        iterations, lr: of Adam.
        batch, num_contrastive: simulated experiments per iteration, and the θ they are told apart from.
    """

    def __init__(
        self,
        network: nn.Module,
        constraint: Constraint,
        *,
        steps: int,
        fractions: Sequence[float] = (1 / 3, 2 / 3),
        iterations: int = 20,
        lr: float = 1e-3,
        batch: int = 32,
        num_contrastive: int = 200,
        name: str = "step_dad",
    ):
        for argument, value in (("steps", steps), ("iterations", iterations), ("batch", batch)):
            check_size(argument, value, 1)
        check_size("num_contrastive", num_contrastive, 1)
        check_number("lr", lr)
        if not isinstance(network, nn.Module):
            raise ValueError(f"network={network!r}: expected a torch module of designs and outcomes")
        if isinstance(fractions, str) or not isinstance(fractions, Sequence):
            raise ValueError(f"fractions={fractions!r}: expected a sequence of numbers in [0, 1)")
        for fraction in fractions:
            check_number("fractions", fraction, "numbers in [0, 1)", lambda x: 0 <= x < 1)
        self.network, self.constraint, self.steps, self.name = network, constraint, steps, name
        self.times = {round(fraction * steps) for fraction in fractions}
        self.iterations, self.lr, self.batch, self.num_contrastive = iterations, lr, batch, num_contrastive
        self._copies: list[nn.Module] = []

    def __call__(self, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> Tensor:
        time = self.steps - remaining
        if time <= 1 or len(self._copies) != len(belief.outcomes):
            self._copies = [self.network] * len(belief.outcomes)
        if time in self.times:
            self._copies = [self._tune(row, belief, state, remaining, generator) for row in range(len(self._copies))]
        with torch.no_grad():
            rows = [
                network(belief.designs[row : row + 1], belief.outcomes[row : row + 1])
                for row, network in enumerate(self._copies)
            ]
            return self.constraint.project(state, torch.cat(rows))

    def _tune(self, row: int, belief: ParticleBelief, state: State, remaining: int, generator: torch.Generator) -> nn.Module:
        """A copy of one rollout's network, after some steps of Adam on sPCE with the belief as prior."""
        model, network = belief.model, deepcopy(self._copies[row]).requires_grad_()
        optimiser = torch.optim.Adam(network.parameters(), lr=self.lr, maximize=True)
        start = state.map(lambda x: x[row : row + 1].expand(self.batch, *x.shape[1:]))
        history = [past[row : row + 1].expand(self.batch, *past.shape[1:]) for past in (belief.designs, belief.outcomes)]
        for _ in range(self.iterations):
            theta = belief.sample(self.batch + self.num_contrastive, generator)[row]
            noise = model.noise((remaining, self.batch), generator)
            with torch.enable_grad():
                optimiser.zero_grad()
                self._simulated_bound(model, network, start, history, theta, noise).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
        return network

    def _simulated_bound(
        self,
        model: DesignModel,
        network: nn.Module,
        state: State,
        history: Sequence[Tensor],
        theta: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """sPCE of the rest of the run, simulated with the network in charge."""
        X, Y = history
        truth, rivals = theta[: self.batch], theta[self.batch :]
        own, others = torch.zeros(self.batch), torch.zeros(self.batch, len(rivals))
        for shock in noise:
            design = self.constraint.project(state, network(X, Y))
            y = model.simulate(truth, design, shock)
            own = own + model.log_prob(y, truth, design)
            others = others + model.log_prob(y[:, None], rivals, design[:, None])
            X, Y = torch.cat([X, design[:, None]], 1), torch.cat([Y, y[:, None]], 1)
            state = self.constraint.step(state, design)
        return prior_contrastive(own, others).mean()

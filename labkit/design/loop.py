"""The receding-horizon loop: choose, observe, learn, move on; for R rollouts at once.

    for t = 1 … T:  x_t = policy(belief, z_t),  y_t ~ p(y | x_t, θ),  belief ← (x_t, y_t),  z_{t+1} = f(z_t, x_t)

`experiment` is the loop itself, one step at a time, for any source of outcomes. `rollout` feeds it from parameters drawn from
the prior. Parameters, starts and outcome noise depend on the seed alone, so that policies are compared in pairs.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from labkit.design.belief import ParticleBelief
from labkit.design.bounds import information_is, plug_in_spce, spce
from labkit.design.ces import CES
from labkit.design.checker import violations
from labkit.design.constraints import Constraint, State, require_feasible
from labkit.design.models import DesignModel, as_numbers, check_designs, check_generator
from labkit.design.policies import Policy
from labkit.errors import check_size
from labkit.randomness import seeded_generator

BROKEN = 1e-4  # of a constraint, in units of the design: float32 over 30 steps


@dataclass(frozen=True, eq=False)
class Step:
    """One experiment of R rollouts.

    Attributes:
        design, outcome: (R, d), (R,).
        belief: after the outcome.
        state: of the constraint, after the design.
        plan_seconds, belief_seconds: processor time of the decision and of the update.
    """

    design: Tensor
    outcome: Tensor
    belief: ParticleBelief
    state: State
    plan_seconds: float
    belief_seconds: float


@dataclass(frozen=True, eq=False)
class RolloutTrace:
    """R experiments of T steps under one policy.

    Attributes:
        policy: name.
        model: of the experiment.
        seed: of the run.
        theta: true parameters (R, p).
        start: where the constraint starts (R, d), or None.
        designs, outcomes: (R, T, d), (R, T).
        budget: left after each step (R, T), inf without a budget.
        mean: posterior means (R, T, p).
        ess: effective number of particles (R, T).
        violation: by how much each design breaks the constraint, recomputed from the path alone (R, T).
        planned: which steps the policy chose (T,): not the first, where the start was measured.
        plan_seconds, belief_seconds: processor time of each step, all rollouts together (T,).
        belief: after the last step.
    """

    policy: str
    model: DesignModel
    seed: int
    theta: Tensor
    start: Tensor | None
    designs: Tensor
    outcomes: Tensor
    budget: Tensor
    mean: Tensor
    ess: Tensor
    violation: Tensor
    planned: Tensor
    plan_seconds: Tensor
    belief_seconds: Tensor
    belief: ParticleBelief = field(repr=False)

    def __repr__(self) -> str:
        rollouts, steps = self.outcomes.shape
        return f"RolloutTrace(policy={self.policy!r}, seed={self.seed}, R={rollouts}, T={steps})"

    @property
    def plan_ms(self) -> float:
        """Milliseconds per decision and rollout."""
        return 1e3 * float(self.plan_seconds[self.planned].mean()) / len(self.theta)

    @property
    def belief_ms(self) -> float:
        """Milliseconds per update of the belief and rollout."""
        return 1e3 * float(self.belief_seconds.mean()) / len(self.theta)


@torch.no_grad()
def experiment(
    belief: ParticleBelief,
    policy: Policy,
    constraint: Constraint,
    observe: Callable[[int, Tensor], Tensor],
    *,
    steps: int,
    generator: torch.Generator,
    start: Tensor | None = None,
    measure_start: bool = True,
) -> Iterator[Step]:
    """Run R experiments, step by step.

    Args:
        belief: before the first experiment.
        policy: see `labkit.design.policies`.
        constraint: checked at every step, whatever the policy promises.
        observe: (t from 0 on, designs (R, d)) -> outcomes (R,).
        steps: T ≥ 1.
        generator: of the policy.
        start: where the constraint starts (R, d); None if the first design is free.
        measure_start: the start is the first design, and counts.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: the policy's design is not allowed, or none is.
    """
    check_size("steps", steps, 1)
    check_generator(generator)
    if not callable(policy):
        raise ValueError(f"policy={policy!r}: expected a function (belief, state, remaining, generator) -> designs")
    if not isinstance(constraint, Constraint) or constraint.bounds.shape != belief.model.bounds.shape:
        raise ValueError(f"constraint={constraint!r}: expected a Constraint of {belief.model.design_dim} coordinates")
    shape, dtype = (len(belief.outcomes), belief.model.design_dim), belief.designs.dtype
    if start is not None:
        start = as_numbers("start", start, dtype)
        if start.shape != shape:
            raise ValueError(f"start: got shape {tuple(start.shape)}; expected {shape}")
    if measure_start and start is None:
        raise ValueError("start=None: expected designs (R, d), since measure_start=True measures there first")
    state = constraint.init(start, steps - measure_start) if steps > measure_start else None
    for t in range(steps):
        begin = time.process_time()
        if t == 0 and measure_start:
            design = start
        else:
            design = as_numbers("policy", policy(belief, state, steps - t, generator), dtype)
            if design.shape != shape:
                raise ValueError(f"policy: its designs have shape {tuple(design.shape)}; expected {shape}")
            require_feasible(constraint, state, design)
            state = constraint.step(state, design)
        middle = time.process_time()
        outcome = as_numbers("observe", observe(t, design), dtype)
        belief = belief.update(design, outcome)
        yield Step(design, outcome, belief, state, middle - begin, time.process_time() - middle)


@torch.no_grad()
def rollout(
    model: DesignModel,
    policy: Policy,
    constraint: Constraint,
    *,
    steps: int,
    num_rollouts: int,
    seed: int,
    num_particles: int = 1000,
    start: Tensor | None = None,
    measure_start: bool = True,
    progress: bool = False,
) -> RolloutTrace:
    """Simulate R experiments with parameters from the prior.

    Args:
        model: of the experiment, and of the belief.
        policy, constraint, steps, measure_start: see `experiment`.
        num_rollouts: R ≥ 1.
        seed: of everything random.
        num_particles: N of the belief.
        start: (d,) or (R, d); None draws it uniformly if it is measured, else leaves the first design free.
        progress: show a bar.
    """
    check_size("num_rollouts", num_rollouts, 1)
    check_size("steps", steps, 1)
    theta = draw_truth(model, num_rollouts, seed)
    if start is None and measure_start:
        start = model.sample_designs((num_rollouts,), seeded_generator(seed, "start"))
    elif start is not None:
        start = as_numbers("start", start, model.bounds.dtype)
        if start.shape not in ((model.design_dim,), (num_rollouts, model.design_dim)):
            got = f"got shape {tuple(start.shape)}"
            raise ValueError(f"start: {got}; expected ({model.design_dim},) or ({num_rollouts}, {model.design_dim})")
        start = start.expand(num_rollouts, -1)
        check_designs(model, start, "start")
    noise = model.noise((num_rollouts, steps), seeded_generator(seed, "outcomes"))
    belief = ParticleBelief.prior(model, num_rollouts, num_particles, seeded_generator(seed, "belief"))
    run = experiment(
        belief,
        policy,
        constraint,
        lambda t, design: model.simulate(theta, design, noise[:, t]),
        steps=steps,
        generator=seeded_generator(seed, "policy"),
        start=start,
        measure_start=measure_start,
    )
    name = getattr(policy, "name", type(policy).__name__)
    done = list(tqdm(run, total=steps, desc=name, disable=not progress, leave=False))
    return _trace(model, name, constraint, seed, theta, start, measure_start, done)


def _trace(
    model: DesignModel,
    name: str,
    constraint: Constraint,
    seed: int,
    theta: Tensor,
    start: Tensor | None,
    measured: bool,
    done: list[Step],
) -> RolloutTrace:
    designs = torch.stack([step.design for step in done], 1)
    unlimited = torch.full((len(theta),), torch.inf)
    budget = [unlimited if step.state is None or step.state.budget is None else step.state.budget for step in done]
    violation = torch.zeros(designs.shape[:2], dtype=torch.float64)
    if len(done) > measured:
        violation[:, measured:] = violations(constraint, start, designs[:, measured:])
    return RolloutTrace(
        policy=name,
        model=model,
        seed=seed,
        theta=theta,
        start=start,
        designs=designs,
        outcomes=torch.stack([step.outcome for step in done], 1),
        budget=torch.stack(budget, 1),
        mean=torch.stack([step.belief.mean() for step in done], 1),
        ess=torch.stack([step.belief.ess for step in done], 1),
        violation=violation,
        planned=torch.arange(len(done)) >= measured,
        plan_seconds=torch.tensor([step.plan_seconds for step in done], dtype=torch.float64),
        belief_seconds=torch.tensor([step.belief_seconds for step in done], dtype=torch.float64),
        belief=done[-1].belief,
    )


def draw_truth(model: DesignModel, num_rollouts: int, seed: int) -> Tensor:
    """True parameters (R, p) from the prior; for `CES`, log u is stratified over the rollouts, since its spread dominates."""
    generator = seeded_generator(seed, "true parameters")
    theta = model.sample_prior((num_rollouts,), generator)
    if isinstance(model, CES):
        order = torch.randperm(num_rollouts, generator=generator)
        level = (order + torch.rand(num_rollouts, generator=generator)) / num_rollouts
        theta[:, 4] = 1 + 3 * torch.special.ndtri(level.clamp(1e-6, 1 - 1e-6))
    return theta


def score(trace: RolloutTrace, *, num_draws: int = 5000, num_contrastive: int = 100_000, seed: int = 0) -> pd.DataFrame:
    """Total information of each rollout, in nats.

    Args:
        trace: what happened.
        num_draws: of importance sampling.
        num_contrastive: L of sPCE; for `CES`, whose information exceeds log L, sPCE is plugged in at L = 10⁷.
        seed: of the estimates.

    Returns:
        One row per rollout: `policy`, `rollout`, `seed`, `kl`, `information` (IS), `spce`, `ess` of the draws, `violation`
        (the largest of the run).
    """
    estimate = information_is(
        trace.model,
        trace.theta,
        trace.designs,
        trace.outcomes,
        trace.belief.sample(min(1000, trace.belief.log_weights.shape[1])),
        num_draws,
        seed,
    )
    if isinstance(trace.model, CES):
        bound = plug_in_spce(estimate.information, 1e7)
    else:
        bound = spce(trace.model, trace.theta, trace.designs, trace.outcomes, num_contrastive, seed)
    return pd.DataFrame(
        {
            "policy": trace.policy,
            "seed": trace.seed,
            "rollout": range(len(trace.theta)),
            "kl": estimate.kl.numpy(),
            "information": estimate.information.numpy(),
            "spce": bound.numpy(),
            "ess": estimate.ess.numpy(),
            "violation": trace.violation.amax(1).numpy(),
        }
    )


def compare(
    policies: Mapping[str, Policy],
    model: DesignModel,
    constraint: Constraint,
    *,
    steps: int,
    num_rollouts: int,
    seed: int,
    reference: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Run several policies on the same parameters, starts and outcome noise, and compare them in pairs.

    Args:
        policies: name -> policy.
        model, constraint, steps, num_rollouts, seed: see `rollout`.
        reference: the policy that the others are compared with; None takes the first.
        score_options: of `score`.
        options: others of `rollout`.

    Returns:
        One row per policy; see `summarise`.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise ValueError(f"policies={policies!r}: expected a mapping of names to policies, at least one")
    if reference is not None and reference not in policies:
        raise ValueError(f"reference={reference!r}: expected one of {', '.join(policies)}")
    tables, seconds = [], {}
    for name, policy in policies.items():
        trace = rollout(model, policy, constraint, steps=steps, num_rollouts=num_rollouts, seed=seed, **options)
        tables.append(score(trace, **score_options or {}).assign(policy=name))
        seconds[name] = {"plan_ms": trace.plan_ms, "belief_ms": trace.belief_ms}
    table = summarise(pd.concat(tables, ignore_index=True), reference or next(iter(policies)))
    return table.join(pd.DataFrame(seconds).T)


def summarise(table: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Means and paired differences of rollouts.

    Args:
        table: rows of `score` for several policies, with common `seed` and `rollout`.
        reference: the policy that the others are compared with.

    Returns:
        Indexed by `policy`: `kl`, `information`, `spce` with standard errors `…_se`; `worst_decile`, the mean information of
        the worst tenth; `gain`, the paired difference of `kl` to the reference, with `gain_se`; `violations`, rollouts
        that broke the constraint by more than `BROKEN`.
    """
    if reference not in set(table["policy"]):
        raise ValueError(f"reference={reference!r}: expected one of {', '.join(sorted(set(table['policy'])))}")
    wide = table.pivot(index=["seed", "rollout"], columns="policy", values="kl")
    gains = wide.sub(wide[reference], axis=0)
    groups = table.groupby("policy", sort=False)
    columns = {}
    for name in ("kl", "information", "spce"):
        columns |= {name: groups[name].mean(), f"{name}_se": groups[name].sem()}
    columns["worst_decile"] = groups["information"].apply(worst_decile)
    columns |= {"gain": gains.mean(), "gain_se": gains.sem()}
    columns["violations"] = groups["violation"].apply(lambda x: int((x > BROKEN).sum()))
    return pd.DataFrame(columns).loc[list(groups.groups)]


def worst_decile(values: pd.Series) -> float:
    """Mean of the worst tenth, of at least one."""
    return float(values.nsmallest(max(len(values) // 10, 1)).mean())

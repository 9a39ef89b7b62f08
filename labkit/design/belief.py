"""What is believed about θ: weighted particles, one independent population for each of R rollouts run side by side.

An outcome y at the design x enters by adaptive tempering. With ℓ_i = log p(y | x, θ_i) and an exponent that rises from 0 to 1,
one stage is

    δ: the rest of the exponent, or as much of it as leaves ESS = 1 / Σ w_i² at N/2
    log w_i ← log w_i + δ ℓ_i, normalised;    log p̂(y | past) ← + log Σ_i w_i exp(δ ℓ_i)
    unless ESS ≥ N/2 at the end: systematic resampling, then Metropolis sweeps that leave the tempered posterior unchanged

    p(θ) Π_{s<t} p(y_s | x_s, θ) · p(y_t | x_t, θ)^exponent

so an ordinary outcome costs a reweighting, and one that only a few particles explain costs several stages, none of which loses
more than half of the population: IBIS [predecessor: Chopin 2002] with tempering [ours]. Sweeps alternate between a random walk
with the population's covariance and differential evolution, in coordinates v ∈ R^q without bounds (θ and its density carry the
Jacobian). Shapes: v (R, N, q), θ (R, N, p), history (R, t, d) and (R, t).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from labkit.design.models import DesignModel, as_numbers, check_designs, check_generator, check_outcomes
from labkit.errors import check_size
from labkit.resampling import systematic

_THRESHOLD = 0.5  # of ESS / N, below which a population is resampled
_LADDER = 33  # exponents that a stage tries at once
_STAGES = 60  # then the rest of the exponent comes in one step
_BLOCK = 2**17  # likelihoods per block of rollouts: it stays in the processor's cache


class DegenerateBeliefError(ValueError):
    """No particle can explain an outcome."""


@dataclass(frozen=True, eq=False)
class PlanningParticles:
    """A few weighted particles that planners compute with. All leading dimensions are batches.

    Attributes:
        model: whose parameters they are.
        theta: (..., n, p).
        log_weights: (..., n), normalised.
    """

    model: DesignModel
    theta: Tensor
    log_weights: Tensor


def reweight(particles: PlanningParticles, design: Tensor, y: Tensor) -> PlanningParticles:
    """Bayes' rule by weights alone: log w ← log w + log p(y | x, θ), normalised. Differentiable in x, y, θ and w.

    Args:
        particles: theta (..., n, p), log_weights (..., n).
        design: (..., d), leading dimensions that broadcast against those of the particles.
        y: (...).

    Raises:
        ValueError: the design or y is not finite.
        DegenerateBeliefError: y is impossible under all particles of one population.
    """
    design, y = (as_numbers(name, value, particles.theta.dtype) for name, value in (("design", design), ("y", y)))
    for name, value in (("design", design), ("y", y)):
        if not value.isfinite().all():
            raise ValueError(f"{name}={value.tolist()}: expected finite numbers")
    fit = particles.model.log_prob(y[..., None], particles.theta, design[..., None, :])
    raw = particles.log_weights + fit
    _check_explained(raw, y)
    return replace(particles, log_weights=raw.log_softmax(-1))


@dataclass(frozen=True, eq=False)
class ParticleBelief:
    """Posterior particles of R rollouts. It never changes: `update` returns a new belief, and equal calls give equal beliefs.

    Attributes:
        model: whose parameters they are; it needs `log_prob`.
        v: particles in the coordinates `model.to_unconstrained` (R, N, q).
        log_weights: (R, N), normalised.
        designs: x_{1:t} (R, t, d).
        outcomes: y_{1:t} (R, t).
        log_likelihood: log p(y_{1:t} | x_{1:t}, θ) of each particle (R, N).
        log_evidence: log p̂(y_{1:t} | x_{1:t}) (R,), float64, in nats; of one run it is noisy and biased low.
        generator: where the random numbers of the next call start.
        sweeps: Metropolis sweeps after a resampling, ≥ 1.
    """

    model: DesignModel
    v: Tensor
    log_weights: Tensor
    designs: Tensor
    outcomes: Tensor
    log_likelihood: Tensor
    log_evidence: Tensor
    generator: torch.Generator
    sweeps: int = 6

    @classmethod
    def prior(
        cls,
        model: DesignModel,
        num_rollouts: int,
        num_particles: int,
        generator: torch.Generator,
        *,
        sweeps: int = 6,
    ) -> "ParticleBelief":
        """Beliefs before the first experiment: N draws of the prior for each rollout.

        Args:
            model: an experiment with a likelihood.
            num_rollouts: R ≥ 1.
            num_particles: N ≥ 2.
            generator: of the draws; later updates have a stream of their own, so it can be used for other things.
            sweeps: Metropolis sweeps after a resampling, ≥ 1.

        Raises:
            ValueError: an argument is not as above, or the model has no `log_prob`.
        """
        check_size("num_rollouts", num_rollouts, 1)
        check_size("num_particles", num_particles, 2)
        check_size("sweeps", sweeps, 1)
        check_likelihood(model)
        own = _spawn(generator)
        v = model.to_unconstrained(model.sample_prior((num_rollouts, num_particles), own))
        return cls(
            model=model,
            v=v,
            log_weights=v.new_full(v.shape[:2], -math.log(num_particles)),
            designs=v.new_empty(num_rollouts, 0, model.design_dim),
            outcomes=v.new_empty(num_rollouts, 0),
            log_likelihood=v.new_zeros(v.shape[:2]),
            log_evidence=torch.zeros(num_rollouts, dtype=torch.float64),
            generator=own,
            sweeps=sweeps,
        )

    @cached_property
    def theta(self) -> Tensor:
        """Parameters (R, N, p)."""
        return self.model.from_unconstrained(self.v)

    @property
    def ess(self) -> Tensor:
        """Effective number of particles 1 / Σ w² (R,), in [1, N]."""
        return _ess(self.log_weights)

    @torch.no_grad()
    def update(self, design: Tensor, y: Tensor) -> "ParticleBelief":
        """Learn from one outcome per rollout.

        Args:
            design: (R, d), in the model's box.
            y: (R,).

        Raises:
            ValueError: an argument has another shape or is not finite, the design is outside, or the model cannot produce y.
            DegenerateBeliefError: y is impossible under all particles of one rollout.
        """
        rollouts, steps = self.outcomes.shape
        design, y = (as_numbers(name, value, self.v.dtype) for name, value in (("design", design), ("y", y)))
        for name, value, shape in (("design", design, (rollouts, self.model.design_dim)), ("y", y, (rollouts,))):
            if tuple(value.shape) != shape:
                raise ValueError(f"{name}: got shape {tuple(value.shape)}; expected {shape}")
        check_designs(self.model, design)
        check_outcomes(self.model, y)
        generator = self.generator.clone_state()
        fit = _finite(self.model.log_prob(y[:, None], self.theta, design[:, None]))
        _check_explained(self.log_weights + fit, y)
        posterior = _Posterior(
            model=self.model,
            designs=torch.cat([self.designs, design[:, None].to(self.designs)], 1),
            outcomes=torch.cat([self.outcomes, y[:, None].to(self.outcomes)], 1),
        )
        rows = max(_BLOCK // (self.log_weights.shape[1] * (steps + 1)), 1)
        population = _Population(self.v, self.log_weights, self.log_likelihood, fit, self.log_evidence)
        parts = [
            _temper(posterior.rows(index), population.rows(index), self.sweeps, generator)
            for index in torch.arange(rollouts).split(rows)
        ]
        moved = _Population(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))
        return replace(
            self,
            v=moved.v,
            log_weights=moved.log_weights,
            designs=posterior.designs,
            outcomes=posterior.outcomes,
            log_likelihood=moved.past + moved.fit,
            log_evidence=moved.log_evidence,
            generator=generator,
        )

    def mean(self) -> Tensor:
        """Posterior mean of θ (R, p)."""
        return (self.log_weights.exp()[..., None] * self.theta).sum(1)

    def cov(self) -> Tensor:
        """Posterior covariance of θ (R, p, p)."""
        centred = self.theta - self.mean()[:, None]
        return (self.log_weights.exp()[..., None] * centred).mT @ centred

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of θ (R, n, p): stratified copies of particles, in random order.

        Args:
            num_samples: n ≥ 1; more than N gives copies.
            generator: without one, equal calls give equal draws.
        """
        index = self._choose(num_samples, generator)
        return self.theta.take_along_dim(index[..., None], 1)

    def subset(self, num_particles: int, generator: torch.Generator | None = None) -> PlanningParticles:
        """n equally weighted particles of each rollout, as `sample` draws them."""
        theta = self.sample(num_particles, generator)
        return PlanningParticles(self.model, theta, theta.new_full(theta.shape[:2], -math.log(num_particles)))

    def rows(self, index: Tensor | slice) -> "ParticleBelief":
        """Some of the rollouts, e.g. `slice(3, 4)`."""
        names = ("v", "log_weights", "designs", "outcomes", "log_likelihood", "log_evidence")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def thin(
        self, num_particles: int, *, copies: int = 1, sweeps: int = 2, generator: torch.Generator | None = None
    ) -> "ParticleBelief":
        """A smaller belief with the same history, to be updated with fantasised outcomes.

        Args:
            num_particles: n ≥ 2, equally weighted, chosen as by `sample`.
            copies: c ≥ 1; rollout r becomes the rows r·c … r·c + c − 1, all with the same particles.
            sweeps: Metropolis sweeps after a resampling, ≥ 1.
            generator: without one, equal calls give equal beliefs.
        """
        check_size("num_particles", num_particles, 2)
        check_size("copies", copies, 1)
        check_size("sweeps", sweeps, 1)
        own = _spawn(self.generator.clone_state() if generator is None else generator)
        index = self._choose(num_particles, own)
        v = self.v.take_along_dim(index[..., None], 1)
        several = (
            values.repeat_interleave(copies, 0)
            for values in (v, self.designs, self.outcomes, self.log_likelihood.take_along_dim(index, 1), self.log_evidence)
        )
        v, designs, outcomes, log_likelihood, log_evidence = several
        log_weights = v.new_full(v.shape[:2], -math.log(num_particles))
        return ParticleBelief(self.model, v, log_weights, designs, outcomes, log_likelihood, log_evidence, own, sweeps)

    def _choose(self, number: int, generator: torch.Generator | None) -> Tensor:
        """Indices (R, n) of particles: one in each of n equal shares of the weight, in random order."""
        check_size("num_particles", number, 1)
        generator = self.generator.clone_state() if generator is None else generator
        check_generator(generator)
        rollouts, num_particles = self.log_weights.shape
        cumulated = self.log_weights.double().exp().cumsum(1)
        order = torch.rand(rollouts, number, generator=generator).argsort(1)
        points = (order + torch.rand(rollouts, number, generator=generator, dtype=torch.float64)) / number
        return torch.searchsorted(cumulated, points * cumulated[:, -1:], right=True).clamp_(max=num_particles - 1)


def check_likelihood(model: DesignModel) -> None:
    """Refuse a model that can only simulate."""
    if not hasattr(model, "log_prob"):
        raise ValueError(
            f"model: {type(model).__name__} has no log_prob, which this needs; for a simulator, train an AmortizedPosterior "
            "and take barber_agakov"
        )


@dataclass(frozen=True)
class _Posterior:
    """Histories of some rollouts, (r, t, d) and (r, t)."""

    model: DesignModel
    designs: Tensor
    outcomes: Tensor

    def rows(self, index: Tensor) -> "_Posterior":
        return replace(self, designs=self.designs[index], outcomes=self.outcomes[index])

    def log_likelihoods(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of the past and of the last outcome, (r, N) each, at v (r, N, q)."""
        theta = self.model.from_unconstrained(v)[:, None]
        each = _finite(self.model.log_prob(self.outcomes[..., None], theta, self.designs[:, :, None]))  # (r, t, N)
        return each[:, :-1].sum(1), each[:, -1]


@dataclass(frozen=True)
class _Population:
    """Particles of some rollouts: v (r, N, q), normalised log weights, log-likelihoods of the past and of the last outcome
    (r, N) each, and the log-evidence (r,)."""

    v: Tensor
    log_weights: Tensor
    past: Tensor
    fit: Tensor
    log_evidence: Tensor

    def rows(self, index: Tensor) -> "_Population":
        return _Population(*(value[index] for value in vars(self).values()))

    def put(self, index: Tensor, other: "_Population") -> "_Population":
        """Replace some rollouts."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Population(*(value.index_copy(0, index, new) for value, new in pairs))


def _temper(posterior: _Posterior, population: _Population, sweeps: int, generator: torch.Generator) -> _Population:
    """Bring in the last outcome, stage by stage; rollouts that are done wait for the others."""
    active = torch.arange(len(population.v))
    exponent = population.v.new_zeros(len(active))
    for stage in range(_STAGES):
        part, target = population.rows(active), posterior.rows(active)
        rest = 1 - exponent
        step = rest if stage == _STAGES - 1 else _exponent_step(part.log_weights, part.fit, rest)
        raw = part.log_weights + step[:, None] * part.fit
        part = replace(
            part,
            log_weights=raw.log_softmax(1),
            log_evidence=part.log_evidence + raw.double().logsumexp(1),
        )
        exponent = torch.where(step == rest, 1, exponent + step)
        poor = _ess(part.log_weights) < _THRESHOLD * raw.shape[1]
        move = poor | (exponent < 1)
        if move.any():
            rows = move.nonzero()[:, 0]
            moved = _rejuvenate(target.rows(rows), part.rows(rows), exponent[rows], sweeps, generator)
            part = part.put(rows, moved)
        population = population.put(active, part)
        active, exponent = active[exponent < 1], exponent[exponent < 1]
        if not len(active):
            break
    return population


def _exponent_step(log_weights: Tensor, fit: Tensor, rest: Tensor) -> Tensor:
    """The largest δ ≤ rest (r,) that leaves ESS ≥ N/2, to the accuracy of a geometric ladder and a line between its rungs."""
    rungs = torch.linspace(-8, 0, _LADDER, dtype=fit.dtype)
    trial = rest[:, None] * 10**rungs  # (r, G)
    ess = _ess(log_weights[:, None] + trial[..., None] * fit[:, None])  # (r, G)
    wanted = _THRESHOLD * fit.shape[1]
    first = (ess < wanted).int().argmax(1, keepdim=True)  # first rung that is too high, 0 if there is none
    above = first.clamp(min=1)
    high, low = ess.gather(1, above - 1), ess.gather(1, above)
    share = ((high - wanted) / (high - low).clamp(min=1e-6)).clamp(0, 1)
    between = trial.gather(1, above - 1) * (trial.gather(1, above) / trial.gather(1, above - 1)) ** share
    step = torch.where(ess[:, :1] < wanted, trial[:, :1], between)[:, 0]
    return torch.where((ess < wanted).any(1), step, rest)


def _rejuvenate(
    posterior: _Posterior, population: _Population, exponent: Tensor, sweeps: int, generator: torch.Generator
) -> _Population:
    """Resample, then move every particle by Metropolis steps on p(θ) p(past | θ) p(y_t | θ)^exponent."""
    ancestors = systematic(population.log_weights.exp(), generator)
    v = population.v.take_along_dim(ancestors[..., None], 1)
    past, fit = population.past.take_along_dim(ancestors, 1), population.fit.take_along_dim(ancestors, 1)
    log_prior = posterior.model.log_prior_unconstrained(v)
    root = _root(v)
    for sweep in range(sweeps):
        propose = _random_walk if sweep % 2 == 0 else _differential_evolution
        new = propose(v, root, generator)
        new_prior, (new_past, new_fit) = posterior.model.log_prior_unconstrained(new), posterior.log_likelihoods(new)
        gain = new_prior - log_prior + new_past - past + exponent[:, None] * (new_fit - fit)
        accept = torch.rand(gain.shape, generator=generator, dtype=gain.dtype).log() < gain  # NaN is refused
        v = torch.where(accept[..., None], new, v)
        log_prior, past, fit = (
            torch.where(accept, a, b) for a, b in ((new_prior, log_prior), (new_past, past), (new_fit, fit))
        )
    return replace(
        population,
        v=v,
        past=past,
        fit=fit,
        log_weights=torch.full_like(fit, -math.log(fit.shape[1])),
    )


def _random_walk(v: Tensor, root: Tensor, generator: torch.Generator) -> Tensor:
    """Steps with the population's covariance, 2.38/√q times a factor 10^{−U}."""
    size = 2.38 / v.shape[-1] ** 0.5 * 10 ** -torch.rand(v.shape[:2], generator=generator, dtype=v.dtype)
    noise = torch.randn(v.shape, generator=generator, dtype=v.dtype)
    return v + size[..., None] * (noise @ root.mT)


def _differential_evolution(v: Tensor, root: Tensor, generator: torch.Generator) -> Tensor:
    """Steps γ (v_a − v_b) between random particles: γ = 1 for one in five, else 2.38/√(2q) times a factor 5^{−U}."""
    rollouts, number, q = v.shape
    pair = torch.randint(number, (2, rollouts, number), generator=generator)
    difference = v.take_along_dim(pair[0, ..., None], 1) - v.take_along_dim(pair[1, ..., None], 1)
    draw = torch.rand((2, rollouts, number), generator=generator, dtype=v.dtype)
    size = torch.where(draw[0] < 0.2, 1.0, 2.38 / (2 * q) ** 0.5 * 5 ** -draw[1])
    return v + size[..., None] * difference


def _root(v: Tensor) -> Tensor:
    """Cholesky factors (r, q, q) of the populations' covariances."""
    centred = v - v.mean(1, keepdim=True)
    cov = centred.mT @ centred / v.shape[1]
    spread = cov.diagonal(dim1=-2, dim2=-1)
    factor, failed = torch.linalg.cholesky_ex(cov + torch.diag_embed(1e-5 * spread + 1e-12))
    return torch.where(failed[:, None, None] > 0, torch.diag_embed(spread.sqrt()), factor)


def _ess(log_weights: Tensor) -> Tensor:
    """(Σ w)² / Σ w² over the last dimension."""
    weights = (log_weights - log_weights.amax(-1, keepdim=True)).exp()
    return weights.sum(-1).square() / weights.square().sum(-1)


def _finite(log_likelihood: Tensor) -> Tensor:
    """NaN, as of a θ beyond the range of floating point, becomes impossible."""
    return log_likelihood.nan_to_num(-math.inf, math.inf, -math.inf)


def _check_explained(log_weights: Tensor, y: Tensor) -> None:
    lost = (log_weights.detach().amax(-1) == -math.inf).nonzero()
    if len(lost):
        at = tuple(lost[0].tolist())
        value = y.expand(log_weights.shape[:-1])[at]
        raise DegenerateBeliefError(
            f"y={float(value):g} of rollout {list(at)}: impossible under all {log_weights.shape[-1]} particles"
        )


def _spawn(generator: torch.Generator) -> torch.Generator:
    """A stream of its own, from one draw of the given one."""
    check_generator(generator)
    return torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))

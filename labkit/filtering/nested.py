"""The nested particle filter: M parameters θ_m, each with its own cloud of N states, learnt online at a cost constant in t.

One step, given ξ_t and y_t:

    θ̄_m ~ κ_M(· | θ_m)                            jitter every parameter
    x̄_mn ~ f(· | x_mn, θ̄_m, ξ_t)                  propagate its cloud, grown under earlier θ: no re-run of the past
    ℓ_mn = log g(y_t | x̄_mn, ξ_t)
    u_m = logsumexp_n ℓ_mn − log N                 an estimate of log p(y_t | θ̄_m, h_{t-1})
    log p̂(y_t | h_{t-1}) = logsumexp_m u_m − log M
    W_mn = softmax_n ℓ_mn,   w_m = softmax_m u_m,   ESS = 1 / Σ w_m²
    θ̂_t = Σ_m w_m θ̄_m,   x̂_t = Σ_m w_m Σ_n W_mn x̄_mn
    resample N of N in every cloud, then M of M parameters, each with its cloud

Shapes: θ (M, dθ), x (M, N, dx), float32; log-evidences float64. Source: Crisan and Míguez, Bernoulli 24 (2018) [predecessor],
with the schedule of Pérez-Vieites et al. 2026 [paper]; outer resampling on an ESS threshold is ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch

from labkit.errors import check_size
from labkit.filtering.jitter import JITTERS, Kernel, jittered
from labkit.filtering.state_space import (
    LOG_FLOOR,
    StateSpaceModel,
    check_design,
    check_model,
    check_observation,
    log_likelihood,
    parameter_box,
    transition,
)
from labkit.randomness import sample, seeded_generator
from labkit.resampling import RESAMPLERS

LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True, eq=False)
class Clouds:
    """A belief about parameters and states, all particles equally weighted.

    Attributes:
        model: whose parameters and states they are.
        theta: (M, dθ).
        x: nested states (M, N, dx).
        jitter: the kernel `(theta, generator) -> theta` that the filter uses, or None.
    """

    model: StateSpaceModel
    theta: torch.Tensor
    x: torch.Tensor
    jitter: Kernel | None = None


@dataclass(frozen=True, eq=False)
class FilterStep:
    """What one step learnt, from the weighted particles before they are resampled.

    Attributes:
        t: number of steps so far.
        theta_mean: (dθ,).
        theta_std: (dθ,).
        theta_quantiles: 5, 50 and 95 %, (3, dθ).
        state_mean: (dx,).
        state_std: (dx,).
        state_quantiles: (3, dx).
        ess: effective number of parameter particles, in [1, M].
        log_evidence_increment: log p̂(y_t | h_{t-1}); 0 for a missing observation.
        log_evidence: log p̂(y_1 … y_t).
    """

    t: int
    theta_mean: torch.Tensor
    theta_std: torch.Tensor
    theta_quantiles: torch.Tensor
    state_mean: torch.Tensor
    state_std: torch.Tensor
    state_quantiles: torch.Tensor
    ess: float
    log_evidence_increment: float
    log_evidence: float


class NestedParticleFilter:
    """A nested particle filter, stepped by hand: `filter.step(design, y)`.

    Args:
        model: any `StateSpaceModel`.
        num_params: M ≥ 2.
        num_states: N ≥ 1 states per parameter.
        jitter: "paper", "bernoulli", "liu_west", a kernel `(theta (M, dθ), generator) -> (M, dθ)`, or None.
        jitter_scale: c of the variance c / M^{3/2}, by default `model.jitter_scale`; for "liu_west" the shrinkage, by default
            0.99.
        resampler: "systematic", or "multinomial" [paper].
        ess_threshold: resample the parameters only where ESS falls below this share of M, in (0, 1]; None at every step
            [paper]. The clouds of states are always resampled.
        seed: a whole number ≥ 0; equal seeds give equal runs, bit by bit.

    Attributes:
        theta: parameters (M, dθ).
        x: nested states (M, N, dx).
        log_weights: (M,), float64, with mean weight one: zeros when the parameters are equally weighted.
        log_evidence: log p̂(y_1 … y_t), in nats.
        ess: of the last step's parameter weights, before resampling.
        t: number of steps so far.
        jitter: the kernel, or None.

    Raises:
        ValueError: an argument is not as above, or the model is none.
    """

    def __init__(
        self,
        model: StateSpaceModel,
        num_params: int = 300,
        num_states: int = 100,
        *,
        jitter: str | Kernel | None = "paper",
        jitter_scale: float | None = None,
        resampler: str = "systematic",
        ess_threshold: float | None = None,
        seed: int = 0,
    ) -> None:
        check_model(model)
        check_size("num_params", num_params, 2)
        check_size("num_states", num_states, 1)
        if resampler not in tuple(RESAMPLERS):
            raise ValueError(f"resampler={resampler!r}: expected one of {', '.join(RESAMPLERS)}")
        if ess_threshold is not None and not (isinstance(ess_threshold, Real) and 0 < ess_threshold <= 1):
            raise ValueError(f"ess_threshold={ess_threshold!r}: expected a share of M in (0, 1], or None")
        self.model = model
        self.jitter = _kernel(model, jitter, jitter_scale)
        self._resample = RESAMPLERS[resampler]
        self._threshold = 1.0 if ess_threshold is None else float(ess_threshold)
        self._always = ess_threshold is None
        self._generator = seeded_generator(seed, "filter")
        self.theta = sample(model.prior(), self._generator, (num_params,)).to(torch.float32)
        self.x = model.initial(self.theta, num_states, self._generator)
        expected = (num_params, num_states, model.state_dim)
        if self.x.shape != expected or self.x.dtype != torch.float32:
            raise ValueError(
                f"initial: {type(model).__name__}.initial gave {self.x.dtype} states of shape {tuple(self.x.shape)}; "
                f"expected float32 and {expected}"
            )
        self.log_weights = torch.zeros(num_params, dtype=torch.float64)
        self.log_evidence = 0.0
        self.ess = float(num_params)
        self.t = 0

    @torch.no_grad()
    def step(self, design: torch.Tensor, y: torch.Tensor | None) -> FilterStep:
        """Learn from one observation.

        Args:
            design: ξ_t (dξ,).
            y: y_t (dy,); None for a missing observation, which moves the states and leaves the parameters alone.

        Returns:
            Means, spreads and evidence of this step.

        Raises:
            ValueError: a design or an observation of the wrong shape, dtype or range; or no particle explains y_t. Parameters,
                states and weights then stay as they were.
        """
        design = check_design(self.model, design)
        if y is None:
            x = transition(self.model, self.x, self.theta, design, self._generator)
            inner = x.new_full(x.shape[:2], 1 / x.shape[1])
            outer = self.log_weights.softmax(0)
            self.x, self.t = x, self.t + 1
            return self._summary(self.theta, x, inner, outer, 0.0)
        y = check_observation(self.model, y)
        theta = jittered(self.jitter, self.theta, self._generator)
        x = transition(self.model, self.x, theta, design, self._generator)
        num_params, num_states = x.shape[:2]
        log_g = log_likelihood(self.model, y, x, design)  # ℓ (M, N)
        peak = log_g.amax(1, keepdim=True)
        inner = (log_g - peak).exp_()
        total = inner.sum(1, keepdim=True)
        fit = (total.log() + peak).squeeze(1).double() - math.log(num_states)  # u (M,)
        if float(fit.max()) <= LOG_FLOOR / 2:
            raise ValueError(
                f"y={y.tolist()}: no particle explains y_t at step {self.t + 1}; widen the prior or raise num_states (N)"
            )
        weighted = self.log_weights + fit
        increment = float(weighted.logsumexp(0)) - math.log(num_params)
        inner /= total
        outer = weighted.softmax(0)
        self.log_evidence += increment
        self.t += 1
        summary = self._summary(theta, x, inner, outer, increment)
        ancestors = self._resample(inner, self._generator)  # (M, N)
        if self._always or summary.ess < self._threshold * num_params:
            parents = self._resample(outer, self._generator)  # (M,)
            self.log_weights = torch.zeros_like(outer)
        else:
            parents = torch.arange(num_params)
            self.log_weights = outer.log() + math.log(num_params)
        chosen = (ancestors[parents] + num_states * parents[:, None]).flatten()
        self.theta = theta[parents]
        self.x = x.flatten(0, 1).index_select(0, chosen).view_as(x)
        return summary

    @torch.no_grad()
    def predict(self, design: torch.Tensor | None = None) -> torch.Tensor:
        """One draw of the next states (M, N, dx), equally weighted, of `snapshot`'s particles; the filter does not change.

        Args:
            design: (dξ,), where the model's states react to it.
        """
        design = None if design is None else check_design(self.model, design)
        now = self.snapshot()
        return transition(self.model, now.x, now.theta, design, self._generator.clone_state())

    def snapshot(self) -> Clouds:
        """The belief of now, equally weighted (a resampled copy where weights are carried); later steps do not change it."""
        if not self.log_weights.any():
            return Clouds(self.model, self.theta, self.x, self.jitter)
        parents = self._resample(self.log_weights.softmax(0), self._generator.clone_state())
        return Clouds(self.model, self.theta[parents], self.x[parents], self.jitter)

    def _summary(
        self, theta: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, increment: float
    ) -> FilterStep:
        """Weighted moments and quantiles of θ (M, dθ), w (M,) and x (M, N, dx), W (M, N)."""
        self.ess = min(max(1 / float(outer.square().sum()), 1.0), float(len(outer)))
        outer = outer.to(x.dtype)
        weights = (outer[:, None] * inner).flatten()
        parameters = torch.stack(theta.unbind(1))  # (dθ, M), contiguous
        states = torch.stack(x.flatten(0, 1).unbind(1)).nan_to_num_(0, 0, 0)  # (dx, M N); a state that blew up weighs nothing
        theta_mean, theta_std = _moments(parameters, outer)
        state_mean, state_std = _moments(states, weights)
        return FilterStep(
            t=self.t,
            theta_mean=theta_mean,
            theta_std=theta_std,
            theta_quantiles=weighted_quantiles(parameters, outer),
            state_mean=state_mean,
            state_std=state_std,
            state_quantiles=weighted_quantiles(states, weights),
            ess=self.ess,
            log_evidence_increment=increment,
            log_evidence=self.log_evidence,
        )


def weighted_quantiles(values: torch.Tensor, weights: torch.Tensor, levels: tuple[float, ...] = LEVELS) -> torch.Tensor:
    """Quantiles of weighted values, from a histogram of 1024 bins: sorting the states would outweigh the step.

    Args:
        values: one coordinate per row, (d, n), finite.
        weights: (n,), ≥ 0.
        levels: in [0, 1].

    Returns:
        (len(levels), d), exact to 1/1024 of the coordinate's range.
    """
    bins = 1024
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    width = (high - low) / bins
    index = (values - low).div_(width.clamp(min=1e-30)).to(torch.int32).clamp_(max=bins - 1)
    mass = torch.stack([torch.bincount(row, weights, bins) for row in index])  # (d, bins)
    cumulated = mass.cumsum(1)
    wanted = torch.tensor(levels, dtype=mass.dtype) * cumulated[:, -1:]  # (d, levels)
    found = torch.searchsorted(cumulated, wanted).clamp_(max=bins - 1)
    missing = (cumulated.gather(1, found) - wanted) / mass.gather(1, found).clamp(min=1e-30)  # share of the bin to the right
    return (low + width * (found + 1 - missing.clamp(0, 1))).T


def _moments(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (d,) of weighted values (d, n)."""
    mean = values @ weights
    return mean, ((values - mean[:, None]).square_() @ weights).sqrt()


def _kernel(model: StateSpaceModel, jitter: str | Kernel | None, scale: float | None) -> Kernel | None:
    """The jitter kernel of a name, on the model's box."""
    if jitter is None or isinstance(jitter, Callable):
        return jitter
    if jitter not in tuple(JITTERS):
        raise ValueError(f"jitter={jitter!r}: expected one of {', '.join(JITTERS)}, a kernel, or None")
    if scale is None and jitter != "liu_west":
        scale = getattr(model, "jitter_scale", None)
        if scale is None:
            raise ValueError(f"jitter_scale: {type(model).__name__} brings none, so give one, in squared units of θ")
    return JITTERS[jitter](*parameter_box(model.prior()), **({} if scale is None else {"scale": scale}))

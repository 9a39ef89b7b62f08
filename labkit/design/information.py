"""Expected information gain of one experiment: how far its outcome will move the belief, on average, in nats.

    EIG(x) = E[log p(y | x, θ) − log p(y | x)],    θ ~ Σ_i w_i δ(θ_i),   y ~ p(y | x, θ)                              (1)

Estimators, all for many beliefs and designs at once:

    quadrature  y ~ N(μ_i, σ_i²): H[Σ_i w_i N(μ_i, σ_i²)] − Σ_i w_i ½ log 2πe σ_i², the entropy by the trapezoid rule on a fixed
                lattice of spacing σ. Exact for the particles, smooth and without noise in x                         [ours]
    enumerate   finitely many outcomes: H[Σ_i w_i p_i] − Σ_i w_i H[p_i], exact for the particles
    atoms       y = clip(η, −E, E), η ~ N(μ_j, s_j²): the two atoms exactly, the density between them by n outer samples [ours]

                Σ_± [Σ_j w_j P±_j log P±_j − P̄± log P̄±]
                + Σ_{i≤n} ω_i P°_i [log N(η_i; μ_i, s_i²) − log Σ_j w_j N(η_i; μ_j, s_j²)]

                with P±, P° the probabilities of the atoms and of the rest, η_i a truncated-normal quantile; at most log N
    pce, nmc    E[log p(y | x, θ_0) − log mean_l p(y | x, θ_l)] with L draws θ_l; θ_0 among them (pce, a lower bound,
                at most log(L+1)) or not (nmc, an upper bound)          [predecessors: Foster 2020, Rainforth 2018]
    ace         the same with θ_l ~ q(· | D, x, y) of a network, weighted q(θ_l | D) / q(θ_l | D, x, y)              [paper]

Random numbers are frozen: a seed gives the same ones at every node and design, so that values are smooth in x and compare.
Shapes: θ (..., N, p), log w (..., N), designs (..., d) with leading dimensions that broadcast.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.design.belief import ParticleBelief, PlanningParticles, check_likelihood
from labkit.design.estimates import EIGEstimate
from labkit.design.models import DesignModel, as_numbers, check_designs, is_gaussian
from labkit.errors import check_size
from labkit.randomness import frozen, seeded_generator

METHODS = ("quadrature", "enumerate", "atoms", "pce", "nmc", "ace")

_BLOCK = 2**16  # densities at once: in float32 they stay in the processor's second cache
_OUTCOMES = 2**15  # outcome laws, or contrastive likelihoods, at once
_LARGEST_LATTICE = 2**14
_REACH = 5.0  # standard deviations of the lattice beyond the outermost mean
_FAR = 8.0  # exp(−8²) is nothing, and smaller ones would end as denormal numbers, a hundred times as slow
_HALF_LOG_2PIE = 0.5 * math.log(2 * math.pi * math.e)
_EDGE = 1e-6  # quantile levels stay this far from 0 and 1

Terms = tuple[Tensor, Tensor, Tensor]  # value (...), its terms (..., L) and their weights (..., L)


class Posterior(Protocol):
    """A conditional law q(θ | D) for B histories X (B, t, d), Y (B, t), where t may be 0."""

    def sample(self, X: Tensor, Y: Tensor, num_samples: int) -> Tensor:
        """θ (B, n, p) by torch's own random stream, differentiable in the history."""

    def log_prob(self, theta: Tensor, X: Tensor, Y: Tensor) -> Tensor:
        """log q(θ | D) (B, n) of θ (B, n, p)."""


def eig(
    belief: ParticleBelief | PlanningParticles,
    designs: Tensor,
    *,
    method: str = "quadrature",
    num_obs: int = 20,
    num_contrastive: int = 32,
    seed: int = 0,
    posterior: Posterior | None = None,
) -> EIGEstimate:
    """Expected information gain of one experiment at each of K designs.

    Args:
        belief: of one rollout: theta (1, N, p) or (N, p).
        designs: (K, d), in the model's box.
        method: "quadrature" for Gaussian outcomes, "enumerate" for finitely many, "atoms" for censored Gaussian ones (CES),
            "pce" or "nmc" for any likelihood, "ace" for a `ParticleBelief` and a posterior network.
        num_obs: outer samples, n of "atoms", "pce", "nmc" and "ace"; at most N for "atoms".
        num_contrastive: L ≥ 1 of "pce", "nmc" and "ace".
        seed: of the frozen random numbers, ≥ 0.
        posterior: q of "ace".

    Returns:
        `value` (K,), differentiable in the designs; `stderr` (K,) over particles ("quadrature", "enumerate") or outer samples.

    Raises:
        ValueError: an argument is not as above, or the method does not fit the model.
    """
    if not isinstance(belief, ParticleBelief | PlanningParticles):
        raise ValueError(f"belief: got a {type(belief).__name__}; expected a ParticleBelief or PlanningParticles")
    model, designs = belief.model, as_numbers("designs", designs, belief.theta.dtype)
    if designs.dim() != 2 or not len(designs):
        raise ValueError(f"designs: got shape {tuple(designs.shape)}; expected (K, {model.design_dim}) with K >= 1")
    check_designs(model, designs, "designs")
    if belief.theta.dim() > 3 or belief.theta.shape[:-2].numel() != 1:
        raise ValueError(f"belief: got theta of shape {tuple(belief.theta.shape)}; expected one rollout, (1, N, p) or (N, p)")
    _check_particles(belief.theta, belief.log_weights)
    _check(model, method, num_obs, num_contrastive, belief.log_weights.shape[-1])
    if method == "ace":
        if posterior is None or not isinstance(belief, ParticleBelief):
            raise ValueError("posterior: method='ace' needs a posterior network and a ParticleBelief, whose history it reads")
        X, Y = (history.expand(len(designs), *history.shape[1:]) for history in (belief.designs, belief.outcomes))
        value, terms, weights = _ace(model, posterior, X, Y, designs, num_obs, num_contrastive, seed)
    else:
        theta, log_weights = belief.theta.reshape(1, -1, model.theta_dim), belief.log_weights.reshape(1, -1)
        value, terms, weights = _blockwise(
            model, theta, log_weights, designs, method, num_obs=num_obs, num_contrastive=num_contrastive, seed=seed
        )
    with torch.no_grad():
        finite = terms.isfinite()
        deviation = torch.where(finite, terms - (weights * terms).sum(-1, keepdim=True), 0)
        stderr = (weights * deviation).square().sum(-1).sqrt()
        counted = (weights * terms.where(finite, 0)).sum(-1)
    value = torch.where(value.isfinite(), value, counted)
    return EIGEstimate(value, stderr, int((~finite).sum()))


def node_eig(
    model: DesignModel,
    theta: Tensor,
    log_weights: Tensor,
    design: Tensor,
    method: str = "quadrature",
    *,
    num_obs: int = 20,
    num_contrastive: int = 32,
    seed: int = 0,
) -> Tensor:
    """Expected information gain at one design per node, as planners need it: batched, differentiable in design and weights.

    Args:
        model: the experiment.
        theta: (..., N, p).
        log_weights: (..., N), normalised.
        design: (..., d).
        method: one of `METHODS` but "ace", for which there is `ace_eig`. "atoms" has the first `num_obs` particles as its outer
            samples, so their order must be random, as that of `ParticleBelief.subset` is.
        num_obs, num_contrastive, seed: as in `eig`.

    Returns:
        (...), the broadcast leading dimensions.

    Raises:
        ValueError: the method does not fit the model.
    """
    _check(model, method, num_obs, num_contrastive, log_weights.shape[-1])
    if method == "ace":
        raise ValueError("method='ace': particles have no q(θ | D, x, y); take ace_eig with a posterior network")
    options = {"num_obs": num_obs, "num_contrastive": num_contrastive, "seed": seed}
    value = _blockwise(model, theta, log_weights, design, method, **options)[0]
    return value.reshape(torch.broadcast_shapes(theta.shape[:-2], log_weights.shape[:-1], design.shape[:-1]))


def ace_eig(
    model: DesignModel,
    posterior: Posterior,
    X: Tensor,
    Y: Tensor,
    design: Tensor,
    *,
    num_obs: int = 20,
    num_contrastive: int = 32,
    seed: int = 0,
) -> Tensor:
    """Adaptive contrastive estimate at one design per history [paper]; a lower bound for the joint law q(θ | D) p(y | x, θ).

    Args:
        model: the experiment.
        posterior: q.
        X: designs so far (..., t, d).
        Y: outcomes so far (..., t).
        design: (..., d).
        num_obs: n_y ≥ 1 outer samples.
        num_contrastive: L ≥ 1 draws of the posterior after each of them.
        seed: of the frozen random numbers, ≥ 0.

    Returns:
        (...), differentiable in `design`, `X` and `Y`.
    """
    _check(model, "ace", num_obs, num_contrastive, num_obs)
    return _ace(model, posterior, X, Y, design, num_obs, num_contrastive, seed)[0]


def _check_particles(theta: Tensor, log_weights: Tensor) -> None:
    """Refuse particles that are not finite, or whose weights are not one number each that sum to one."""
    if log_weights.shape != theta.shape[:-1] or not log_weights.shape[-1]:
        got = f"log_weights {tuple(log_weights.shape)} for theta {tuple(theta.shape)}"
        raise ValueError(f"belief: got {got}; expected one weight for each of N >= 1 particles")
    if not theta.isfinite().all():
        raise ValueError(f"belief: got {int((~theta.isfinite()).sum())} entries of theta that are not finite; expected none")
    total = log_weights.detach().logsumexp(-1)
    if not (total.abs() < 1e-3).all():
        raise ValueError(
            f"belief: got weights with the sum {float(total.flatten()[0].exp()):g}; expected normalised log_weights"
        )


def _check(model: DesignModel, method: str, num_obs: int, num_contrastive: int, num_particles: int) -> None:
    """Refuse a method that is unknown or does not fit the model, and numbers of samples out of range."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    check_likelihood(model)
    name = type(model).__name__
    if method == "quadrature" and not is_gaussian(model):
        raise ValueError(f"method='quadrature': {name} has no Gaussian outcome; take {_advice(model)}")
    if method == "enumerate" and model.outcomes is None:
        raise ValueError(f"method='enumerate': {name} has infinitely many outcomes; take {_advice(model)}")
    if method == "atoms" and not (model.limit is not None and hasattr(model, "mean")):
        raise ValueError(f"method='atoms': {name} has no censored Gaussian outcome; take {_advice(model)}")
    check_size("num_obs", num_obs, 1)
    check_size("num_contrastive", num_contrastive, 1)
    if method == "atoms" and num_obs > num_particles:
        raise ValueError(f"num_obs={num_obs}: expected at most the number of particles, {num_particles}")


def _advice(model: DesignModel) -> str:
    if model.outcomes is not None:
        return "'enumerate'"
    if model.limit is not None and hasattr(model, "mean"):
        return "'atoms'"
    return "'quadrature' or 'pce'" if is_gaussian(model) else "'pce'"


def _blockwise(model: DesignModel, theta: Tensor, log_weights: Tensor, design: Tensor, method: str, **options: Any) -> Terms:
    """Estimate in blocks that fit into the cache, along the first leading dimension that is larger than one."""
    batch = torch.broadcast_shapes(theta.shape[:-2], log_weights.shape[:-1], design.shape[:-1], (1,))
    theta, log_weights, design = (
        value.reshape((1,) * (len(batch) + own - value.dim()) + value.shape)
        for value, own in ((theta, 2), (log_weights, 1), (design, 1))
    )
    per_node = options["num_obs"] * options["num_contrastive"] if method in ("pce", "nmc") else theta.shape[-2]
    pieces = math.ceil(math.prod(batch) * per_node / _OUTCOMES)
    axis = next((axis for axis, size in enumerate(batch) if size > 1), None)
    if pieces == 1 or axis is None:
        return _ESTIMATORS[method](model, theta, log_weights, design, **options)
    size = math.ceil(batch[axis] / pieces)
    parts = []
    for start in range(0, batch[axis], size):
        rows = (
            value if value.shape[axis] == 1 else value.narrow(axis, start, min(size, batch[axis] - start))
            for value in (theta, log_weights, design)
        )
        parts.append(_blockwise(model, *rows, method, **options))
    value, terms, weights = (torch.cat(values, axis) for values in zip(*parts, strict=True))
    return value, terms, weights


def _quadrature(model: DesignModel, theta: Tensor, log_weights: Tensor, design: Tensor, **_: Any) -> Terms:
    mean, scale = _outcome_law(model, theta, design)
    batch = torch.broadcast_shapes(mean.shape, log_weights.shape)
    scale = scale.expand(*batch[:-1], scale.shape[-1] if scale.dim() else 1)  # (..., N), or (..., 1) if it is known
    mean, log_scale, log_w = (value.flatten(0, -2) for value in (mean.expand(batch), scale.log(), log_weights.expand(batch)))
    value, divergence = _MixtureInformation.apply(mean, log_scale, log_w)
    return value.reshape(batch[:-1]), divergence.reshape(batch), log_weights.detach().exp().expand(batch)


def _outcome_law(model: DesignModel, theta: Tensor, design: Tensor) -> tuple[Tensor, Tensor]:
    """Means (..., N), and standard deviations that broadcast against them."""
    mean = model.mean(theta, design[..., None, :])
    batch = torch.broadcast_shapes(theta.shape[:-1], (*design.shape[:-1], 1))
    if mean.shape != batch:
        raise ValueError(
            f"model: {type(model).__name__}.mean gave shape {tuple(mean.shape)}; expected {tuple(batch)}, for this "
            "method needs a scalar outcome; take 'pce'"
        )
    return mean, model.scale(theta, design[..., None, :])


class _MixtureInformation(torch.autograd.Function):
    """EIG (B,) and the divergences KL(N_i ‖ Σ_j w_j N_j) (B, N) of Gaussian mixtures, from μ and log w (B, N) and log σ (B, N)
    or, known, (B, 1).

    With p = Σ_i w_i g_i on the lattice y_q of spacing h and Λ = log p + 1, the derivatives need only the sums
    A_k = h Σ_q Λ_q g_iq (y_q)^k, which are one matrix product: nothing of size B N Q is kept for the backward pass.

        ∂/∂w_i = −A_0 − ½ log 2πe σ_i²,  ∂/∂μ_i = −w_i (A_1 − μ_i A_0) / σ_i²,
        ∂/∂log σ_i = −w_i [(A_2 − 2 μ_i A_1 + μ_i² A_0) / σ_i² − A_0 + 1]
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_scale: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        weights, precision = log_weights.exp(), (-log_scale).exp()
        y, spacing, centre = _lattice(mean, log_scale.exp())  # (B, Q) about the centre (B, 1)
        mean = mean - centre
        height = precision / math.sqrt(2 * math.pi)
        scaled = (weights * height)[:, None]
        parts = []
        for rows, bell in _bells(y, mean, precision):
            p = torch.bmm(scaled[rows], bell).clamp_min_(torch.finfo(mean.dtype).tiny)  # (b, 1, Q)
            log_p, y_rows = p.log(), y[rows, None]
            mass = torch.cat([log_p + 1, (log_p + 1) * y_rows, (log_p + 1) * y_rows.square()], 1)
            parts.append(((p * log_p).sum(-1), torch.bmm(mass, bell.mT)))  # bell @ massᵀ would take three times as long
        negative, A = (torch.cat(part) for part in zip(*parts, strict=True))  # (B, 1) and (B, 3, N)
        A = A * (spacing * height)[:, None]
        by_weight = -A[:, 0] - _HALF_LOG_2PIE - log_scale
        by_mean = -weights * precision.square() * (A[:, 1] - mean * A[:, 0])
        square = A[:, 2] - 2 * mean * A[:, 1] + mean.square() * A[:, 0]
        by_log_scale = (-weights * (precision.square() * square - A[:, 0] + 1)).sum_to_size(log_scale.shape)
        ctx.save_for_backward(by_mean, by_log_scale, weights * by_weight)
        value = -(spacing * negative)[:, 0] - (weights * (_HALF_LOG_2PIE + log_scale)).sum(-1)
        divergence = by_weight + 1
        ctx.mark_non_differentiable(divergence)
        return value, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(by_value[:, None] * gradient for gradient in ctx.saved_tensors)


def _lattice(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points y − centre (B, Q) around all components (B, N), their spacing (B, 1) and the centre (B, 1).

    The points are multiples of σ, so that they stay where they are while the means move. Where σ depends on θ, and so moves
    with the design, they are denser, or the derivatives would lack that of the sum's error.
    """
    spacing = scale if scale.shape[1] == 1 else 0.7 * scale.amin(-1, keepdim=True)
    low = ((mean - _REACH * scale).amin(-1, keepdim=True) / spacing).floor()
    count = ((mean + _REACH * scale).amax(-1, keepdim=True) / spacing).ceil() - low
    largest = float(count.max())
    if not largest < _LARGEST_LATTICE:
        raise ValueError(
            f"method='quadrature': outcomes spread over {largest:.3g} standard deviations of the noise, allowed are "
            f"{_LARGEST_LATTICE}; take 'pce'"
        )
    half = (count / 2).floor()
    steps = torch.arange(int(largest) + 1, dtype=mean.dtype)
    return (steps - half) * spacing, spacing, (low + half) * spacing


def _bells(y: Tensor, mean: Tensor, precision: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """exp(−½ ((y_q − μ_i) / σ_i)²) (b, N, Q) of a few rows at a time, each block overwritten by the next.

    Args:
        y: (B, Q).
        mean: (B, N).
        precision: 1/σ, (B, N) or (B, 1).
    """
    c = math.sqrt(0.5) * precision
    if c.shape[1] == 1:
        y, mean, c = y * c, mean * c, None  # one pass less
    step = max(_BLOCK // (mean.shape[1] * y.shape[1]), 1)
    scratch = mean.new_empty(min(step, len(y)), mean.shape[1], y.shape[1])
    for start in range(0, len(y), step):
        rows = slice(start, min(start + step, len(y)))
        block = scratch[: rows.stop - start]
        torch.sub(y[rows, None], mean[rows, :, None], out=block)
        if c is not None:
            block.mul_(c[rows, :, None])
        block.clamp_(-_FAR, _FAR)
        yield rows, torch.addcmul(block.new_zeros(()), block, block, value=-1, out=block).exp_()


def _enumerate(model: DesignModel, theta: Tensor, log_weights: Tensor, design: Tensor, **_: Any) -> Terms:
    outcomes = model.outcomes.to(theta.dtype)
    log_p = model.log_prob(outcomes, theta[..., None, :], design[..., None, None, :])  # (..., N, Y)
    log_p = log_p.clamp(min=math.log(torch.finfo(theta.dtype).tiny))
    log_mixture = (log_weights[..., None] + log_p).logsumexp(-2, keepdim=True)
    divergence = (log_p.exp() * (log_p - log_mixture)).sum(-1)
    weights = log_weights.exp().expand(divergence.shape)
    return (weights * divergence).sum(-1), divergence.detach(), weights.detach()


def _atoms(
    model: DesignModel, theta: Tensor, log_weights: Tensor, design: Tensor, *, num_obs: int, seed: int, **_: Any
) -> Terms:
    mean, scale = _outcome_law(model, theta, design)
    batch = torch.broadcast_shapes(mean.shape, log_weights.shape)
    mean, scale, log_weights = (value.expand(batch).flatten(0, -2) for value in (mean, scale, log_weights))
    weights, precision = log_weights.exp(), scale.reciprocal()
    low, high = (  # P⁻, P⁺ (B, N)
        torch.special.ndtr(((sign * mean - model.limit) * precision).clamp(-_FAR, _FAR)) for sign in (-1, 1)
    )
    at_atoms = sum(torch.special.entr((weights * P).sum(-1)) - (weights * torch.special.entr(P)).sum(-1) for P in (low, high))
    outer = slice(num_obs)
    between = (1 - low - high)[:, outer].clamp(min=0)
    level = _stratified((num_obs,), seeded_generator(seed, "atoms"), mean.dtype)
    e = torch.special.ndtri((low[:, outer] + between * level).clamp(_EDGE, 1 - _EDGE))  # (B, n)
    eta = mean[:, outer] + scale[:, outer] * e
    # Σ_j w_j N(η_i; μ_j, s_j²) / N(η_i; μ_i, s_i²); its own component keeps it from underflow
    heights = (weights * precision)[:, None]
    if eta.requires_grad:
        gap = (eta[:, None] - mean[..., None]) * (math.sqrt(0.5) * precision)[..., None]  # (B, N, n)
        density = torch.bmm(heights, (-gap.clamp(-_FAR, _FAR).square()).exp())
    else:
        density = torch.cat([torch.bmm(heights[rows], bell) for rows, bell in _bells(eta, mean, precision)])
    ratio = density[:, 0] * scale[:, outer]
    gains = -between * (ratio.log() + 0.5 * e.square())
    share = log_weights[:, outer].softmax(-1)
    value = at_atoms + (share * gains).sum(-1)
    terms = (at_atoms[:, None] + gains).detach()
    return value.reshape(batch[:-1]), terms.reshape(*batch[:-1], num_obs), share.detach().reshape(*batch[:-1], num_obs)


def _contrastive(
    model: DesignModel,
    theta: Tensor,
    log_weights: Tensor,
    design: Tensor,
    *,
    num_obs: int,
    num_contrastive: int,
    seed: int,
    own: bool,
) -> Terms:
    generator, dtype = seeded_generator(seed, "contrastive"), theta.dtype
    levels = _stratified((num_obs,), generator, dtype)
    noise = model.noise((num_obs,), generator, dtype)
    others = torch.rand(num_obs * num_contrastive, generator=generator, dtype=dtype)
    draws, log_ratio = draw(theta, log_weights, torch.cat([levels, others]))
    theta_0, theta_l = draws[..., :num_obs, :], draws[..., num_obs:, :].unflatten(-2, (num_obs, num_contrastive))
    # of value 0: the gradient of the weights that the draws followed
    ratio_0, ratio_l = log_ratio[..., :num_obs], log_ratio[..., num_obs:].unflatten(-1, (num_obs, num_contrastive))
    y = model.simulate(theta_0, design[..., None, :], noise)  # (..., n)
    fit_0 = model.log_prob(y, theta_0, design[..., None, :])
    fits = model.log_prob(y[..., None], theta_l, design[..., None, None, :]) + ratio_l  # (..., n, L)
    if own:
        fits = torch.cat([fit_0[..., None].expand(*fits.shape[:-1], 1), fits], -1)
    terms = fit_0 - (fits.logsumexp(-1) - math.log(fits.shape[-1]))
    return (ratio_0.exp() * terms).mean(-1), terms.detach(), torch.full_like(terms, 1 / num_obs).detach()


def _pce(*args: Any, **options: Any) -> Terms:
    return _contrastive(*args, own=True, **options)


def _nmc(*args: Any, **options: Any) -> Terms:
    return _contrastive(*args, own=False, **options)


_ESTIMATORS: dict[str, Callable[..., Terms]] = {
    "quadrature": _quadrature,
    "enumerate": _enumerate,
    "atoms": _atoms,
    "pce": _pce,
    "nmc": _nmc,
}


def draw(theta: Tensor, log_weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Particles at quantile levels of their weights, by inverse CDF; which ones counts as constant.

    Args:
        theta: (..., N, p).
        log_weights: (..., N).
        levels: (m,) in (0, 1).

    Returns:
        θ (..., m, p), and log w − stop_gradient(log w) (..., m): zeros with the gradient of the weights.
    """
    batch = torch.broadcast_shapes(theta.shape[:-1], log_weights.shape)
    cumulated = log_weights.detach().double().exp().cumsum(-1)
    points = (levels.double() * cumulated[..., -1:]).contiguous()
    index = torch.searchsorted(cumulated, points, right=True).clamp_(max=batch[-1] - 1)  # (..., m)
    log_w = log_weights.gather(-1, index)
    index = index.expand(*batch[:-1], -1)
    chosen = theta.expand(*batch, -1).gather(-2, index[..., None].expand(*index.shape, theta.shape[-1]))
    return chosen, log_w - log_w.detach()


def _stratified(shape: tuple[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniform numbers (n,), one in each n-th of (0, 1), in random order."""
    order = torch.randperm(shape[0], generator=generator)
    return (order + torch.rand(shape, generator=generator, dtype=dtype)) / shape[0]


def _ace(
    model: DesignModel,
    posterior: Posterior,
    X: Tensor,
    Y: Tensor,
    design: Tensor,
    num_obs: int,
    num_contrastive: int,
    seed: int,
) -> Terms:
    batch = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-1], design.shape[:-1])
    X = X.expand(*batch, -1, -1).flatten(0, -3)  # (B, t, d)
    Y = Y.expand(*batch, -1).flatten(0, -2)
    x = design.expand(*batch, -1).reshape(-1, 1, design.shape[-1])  # (B, 1, d)
    noise = model.noise((num_obs,), seeded_generator(seed, "ace noise"), design.dtype)
    with frozen(seeded_generator(seed, "ace posterior").initial_seed()):
        theta_0 = posterior.sample(X, Y, num_obs)  # (B, n, p)
        y = model.simulate(theta_0, x, noise)
        after = [history.repeat_interleave(num_obs, 0) for history in (torch.cat([X, x], 1), Y)]
        after[1] = torch.cat([after[1], y.reshape(-1, 1).to(Y.dtype)], 1)
        theta_l = posterior.sample(*after, num_contrastive)  # (B n, L, p)
    theta = torch.cat([theta_0.flatten(0, 1)[:, None], theta_l], 1)  # (B n, 1 + L, p)
    prior = posterior.log_prob(theta.reshape(len(X), -1, theta.shape[-1]), X, Y).reshape(*y.shape, -1)
    proposal = posterior.log_prob(theta, *after).reshape(prior.shape)
    fit = model.log_prob(y[..., None], theta.unflatten(0, y.shape), x[:, :, None])
    evidence = (prior + fit - proposal).logsumexp(-1) - math.log(1 + num_contrastive)
    terms = (fit[..., 0] - evidence).reshape(*batch, num_obs)
    return terms.mean(-1), terms.detach(), torch.full_like(terms, 1 / num_obs).detach()

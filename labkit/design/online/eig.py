"""Expected information gain about the parameters of a partially observed system, its states marginalised.

Pérez-Vieites, Iqbal, Särkkä and Baumann, ICML 2026 (arXiv:2511.04403). After the history h of designs and observations, the
next design ξ is worth

    I(ξ) = E[ log p(y | θ, ξ, h) − log p(y | ξ, h) ]  nats,     θ ~ p(θ | h),  y ~ p(y | θ, ξ, h).                   (1)

Both densities integrate over the latent state. A belief holds M parameters θ_m with N states x_mn each, equally weighted. One
step ahead they are x' ~ f(· | x, θ, ξ), and x̃ likewise under jittered parameters θ̃, with the same random numbers. Then

    L̂_b = 1/N Σ_n g(y_b | x'_mn, ξ),    Ẑ_b = 1/(MN) Σ_in g(y_b | x̃_in, ξ),    Î = mean_b [log L̂_b − log Ẑ_b].       (2)

`nested` [paper] draws L observations, y_b from a state of cloud m = m_b; all states serve every Ẑ_b: L M N densities.
`enumerate` [ours] sums over all counts y and `quadrature` [ours] over a lattice of Gaussian observations: no noise in y, smooth
and differentiable in ξ,

    p̂_m(y) = 1/N Σ_n Π_j g_j(y_j | x'_mn, ξ),    Î = mean_m Σ_y p̂_m(y) [log p̂_m(y) − log mean_i p̂_i(y)].              (3)

(2) and (3) are O(1/N) too large: a small cloud's noise looks like information about which parameter it belongs to. The
split-half jackknife [ours] shuffles each cloud, halves it and cancels that order, with each half's own observations in Î_N/2:

    Î_J = 2 Î_N − ½ (Î_N/2 + Î'_N/2).                                                                                 (4)

For an exponential family, log g = s(y)·η(x, ξ) − A(x, ξ) + b(y), the log-densities of many y are one matrix product
[s, −1] [η, A]ᵀ, and b(y) cancels in (2). Shapes: designs (K, dξ), θ (M, dθ), x (M, N, dx), y (L, dy), features [η, A]
(M, N, F = dy + 1), and H = 2 halves for the jackknife, else 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from numbers import Integral

import numpy as np
import torch
from scipy.special import pdtr, pdtrc
from torch import Tensor
from torch.distributions import Binomial, Distribution, Normal, Poisson

from labkit.design.estimates import EIGEstimate
from labkit.filtering.jitter import jittered
from labkit.filtering.nested import Clouds
from labkit.filtering.state_space import LOG_FLOOR, StateSpaceModel, check_designs, log_density, transition
from labkit.randomness import base_law, sample, seeded_generator

METHODS = ("nested", "enumerate", "quadrature")

_BLOCK = 2**18  # densities per block of the kernel: 1 MiB in float32 stays in the cache from the first pass to the last
_NEGLIGIBLE = -60.0  # log of a share of L̂ or Ẑ; smaller ones would end as denormal numbers, a hundred times as slow
_UNDERFLOW = -80.0  # log of the smallest product of densities in the exact sums, for the same reason
_DENSITIES = 2**20  # of single coordinates, per block of the exact sums
_GRAPH = 2**22  # densities per block where all of its intermediate values are kept
_CELLS = 2**25  # of all p̂_m(y) together: 128 MiB in float32
_SPACING = 0.75  # of a Gaussian lattice, in standard deviations: the sum is the integral to six digits
_TAIL = 1e-7  # mass of one coordinate that may lie beyond either end of its lattice


def eig(
    belief: Clouds,
    designs: Tensor,
    *,
    method: str = "nested",
    num_obs: int = 200,
    jackknife: bool = False,
    seed: int = 0,
) -> EIGEstimate:
    """Expected information gain about θ of observing once at each design.

    All designs and all methods of one seed meet the same states x', so that they compare. The values of the two exact sums
    are differentiable in `designs`.

    Args:
        belief: nested particle filter or its `Clouds`: `model`, `theta` (M, dθ), `x` (M, N, dx), `jitter` (None: x̃ = x').
        designs: (K, dξ).
        method: "nested" for any model, "enumerate" for independent counts (or other finite observations), "quadrature"
            for independent Gaussian observations, dy ≤ 2.
        num_obs: L in [1, M N], of "nested" only.
        jackknife: remove the bias of order 1/N; N must be even.
        seed: of the step ahead and of the observations, ≥ 0.

    Returns:
        `value` (K,) in nats; `stderr` (K,) over the L observations, or over the M parameters for the exact sums.

    Raises:
        ValueError: an argument is not as above, the method does not fit the model, the lattice is too large, or a state one
            step ahead is not finite.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    designs, halves = check(belief, designs, jackknife, num_obs if method == "nested" else 1)
    ahead = predict(belief, designs[0], seed, halves)
    moving = len(designs) > 1 and moves_states(belief, designs)
    terms = []
    for design in designs:
        if moving:
            ahead = predict(belief, design, seed, halves)
        if method == "nested":
            terms.append(_sampled(belief.model, ahead, design, num_obs, seed))
        else:
            terms.append(_summed(belief.model, ahead, design, method))
    return EIGEstimate.from_terms(torch.stack(terms))


def nested_terms(belief: Clouds, design: Tensor, *, num_obs: int = 200, jackknife: bool = False, seed: int = 0) -> Tensor:
    """The summands (L,) of (2), in nats, at one design (dξ,); their mean is the value of `eig(..., method="nested")`."""
    (design,), halves = check(belief, torch.as_tensor(design)[None], jackknife, num_obs)
    return _sampled(belief.model, predict(belief, design, seed, halves), design, num_obs, seed)


def check(belief: Clouds, designs: Tensor, jackknife: bool, num_obs: int) -> tuple[Tensor, int]:
    """Refuse what no estimator can work on.

    Returns:
        The designs (K, dξ) in the precision of the clouds, and the number H of parts of each cloud.
    """
    if not all(hasattr(belief, name) for name in ("model", "theta", "x", "jitter")):
        raise ValueError(f"belief: expected a NestedParticleFilter or its Clouds, got {type(belief).__name__}")
    M, N, _ = belief.x.shape
    if len(belief.theta) != M:
        raise ValueError(f"belief: theta has {len(belief.theta)} rows and x has {M} clouds: expected the same M")
    if belief.x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"belief.x of {belief.x.dtype}: expected torch.float32 or torch.float64")
    if jackknife and N % 2:
        raise ValueError(f"N={N} states per parameter: the jackknife halves every cloud, expected an even number")
    whole = isinstance(num_obs, Integral) and not isinstance(num_obs, bool)
    if not (whole and 1 <= num_obs <= M * N):
        raise ValueError(f"num_obs={num_obs!r}: expected an int from 1 to M·N = {M * N}, for no state is observed twice")
    return check_designs(belief.model, designs, belief.x.dtype), 2 if jackknife else 1


@dataclass(frozen=True)
class Ahead:
    """A belief one step ahead at one design.

    Attributes:
        before: states of t − 1 (M, N, dx), each cloud shuffled if it is to be halved.
        theta, jittered: θ and θ̃ (M, dθ).
        outer, inner: x' under θ and x̃ under θ̃ (M, N, dx), from the same random numbers; without jitter the same tensor.
        halves: H; states n < N/2 make the first half.
    """

    before: Tensor
    theta: Tensor
    jittered: Tensor
    outer: Tensor
    inner: Tensor
    halves: int


def predict(belief: Clouds, design: Tensor, seed: int, halves: int) -> Ahead:
    """Move every cloud one step, under its own and under its jittered parameter."""
    model, theta, x = belief.model, belief.theta, belief.x
    if halves == 2:  # resampling leaves copies of a state side by side, in one half
        order = torch.rand(x.shape[:2], generator=seeded_generator(seed, "eig shuffle")).argsort(1)
        x = x.take_along_dim(order[..., None], 1)
    outer = _moved(model, x, theta, design, seed)
    if belief.jitter is None:
        return Ahead(x, theta, theta, outer, outer, halves)
    near = jittered(belief.jitter, theta, seeded_generator(seed, "eig jitter"))
    return Ahead(x, theta, near, outer, _moved(model, x, near, design, seed), halves)


def _moved(model: StateSpaceModel, x: Tensor, theta: Tensor, design: Tensor, seed: int) -> Tensor:
    """States one step ahead (M, N, dx), all finite."""
    moved = transition(model, x, theta, design, seeded_generator(seed, "eig move"))
    if not moved.sum().isfinite() and not (finite := moved.isfinite()).all():
        raise ValueError(
            f"transition: {type(model).__name__}.transition gave {int((~finite).any(-1).sum())} of {finite[..., 0].numel()} "
            f"states that are not finite; clip them there"
        )
    return moved


def moves_states(belief: Clouds, designs: Tensor) -> bool:
    """Whether f depends on the design, as eight clouds or more show that move by the same random numbers at each (K, dξ)."""
    few = slice(None, None, max(len(belief.theta) // 8, 1))
    x, theta = belief.x[few], belief.theta[few]
    with torch.no_grad():
        moved = [transition(belief.model, x, theta, at, seeded_generator(0, "eig move")) for at in designs]
    return any(not torch.equal(moved[0], other) for other in moved[1:])


def observe(ahead: Ahead, num_obs: int, seed: int) -> tuple[Tensor, Tensor]:
    """States to draw observations from, m (L,) and n (L,): all clouds alike often, no state twice."""
    M, N, _ = ahead.outer.shape
    turn, generator = torch.arange(num_obs), seeded_generator(seed, "eig states")
    m = torch.randperm(M, generator=generator)[turn % M]
    several = torch.multinomial(torch.ones(min(num_obs, M), N), math.ceil(num_obs / M), generator=generator)  # of each cloud
    return m, several[turn % M, turn // M]


def draw(model: StateSpaceModel, x: Tensor, design: Tensor, seed: int) -> Tensor:
    """One observation y (L, dy) of each state (L, dx); Gaussian ones are differentiable in the design."""
    return sample(model.observation(x, design), seeded_generator(seed, "eig noise"))


@torch.no_grad()
def _sampled(model: StateSpaceModel, ahead: Ahead, design: Tensor, num_obs: int, seed: int) -> Tensor:
    """Summands (L,) of (2), or of (4)."""
    m, n = observe(ahead, num_obs, seed)
    y = draw(model, ahead.outer[m, n], design, seed)
    if hasattr(model, "natural"):
        S, halves = statistics(model, y), ahead.halves
        own, inner = (features(model, x, design) for x in (ahead.outer, ahead.inner))
        _, log_own = own_densities(S, m, own, halves)
        log_all = torch.cat([log_z for *_, log_z in all_densities(S, by_half(inner, halves))])
    else:
        blocks = zip(y.split(block_rows(ahead)), m.split(block_rows(ahead)), strict=True)
        log_own, log_all = map(torch.cat, zip(*(density_means(model, ahead, *block, design) for block in blocks), strict=True))
    return debias(log_own, log_all, half_of(ahead, n))


def half_of(ahead: Ahead, n: Tensor) -> Tensor:
    """Half (L,) that state n (L,) of its cloud lies in: 0 or, with the jackknife, 1."""
    return n * ahead.halves // ahead.outer.shape[1]


def debias(log_own: Tensor, log_all: Tensor, half: Tensor) -> Tensor:
    """Summands (L,) from log L̂ and log Ẑ of each part of the clouds (L, H): of (2) for H = 1, of (4) for H = 2."""
    parts = log_own - log_all
    if parts.shape[1] == 1:
        return parts[:, 0]
    whole = log_own.logsumexp(1) - log_all.logsumexp(1)  # the halves are alike large
    return 2 * whole - parts.take_along_dim(half[:, None], 1)[:, 0]


def features(model: StateSpaceModel, x: Tensor, design: Tensor) -> Tensor:
    """[η, A] (..., F) of an exponential family."""
    eta, A = model.natural(x, design)
    return torch.cat([eta, A[..., None]], -1)


def statistics(model: StateSpaceModel, y: Tensor) -> Tensor:
    """[s, −1] (L, F), whose product with the features is log g − b(y)."""
    s, _ = model.statistic(y)
    return torch.cat([s, -torch.ones_like(s[..., :1])], -1)


def by_half(E: Tensor, halves: int) -> Tensor:
    """Features (M, N, F) of all states as the columns of one matrix per half (H, F, MN/H)."""
    return E.unflatten(1, (halves, -1)).permute(1, 3, 0, 2).flatten(2).contiguous()


def own_densities(S: Tensor, m: Tensor, own: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    """log g − b(y) of each observation at the states of its own cloud (L, H, N/H), and log L̂ (L, H)."""
    logs = torch.bmm(own[m], S[:, :, None])[..., 0].unflatten(1, (halves, -1))
    return logs, logs.logsumexp(2) - math.log(logs.shape[2])


def all_densities(S: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """The kernel: densities of blocks of observations that fit into a processor's second cache, at the states of all clouds.

    Args:
        S: [s, −1] (L, F).
        columns: `by_half` of the features of x̃ (H, F, MN/H).

    Yields:
        The c rows of a block; g up to a factor per row and half (H, c, MN/H), overwritten by the next block; its sums (c, H);
        log Ẑ up to b(y) (c, H).
    """
    halves, _, states = columns.shape
    step = max(_BLOCK // (halves * states), 1)
    block = columns.new_empty(halves, min(step, len(S)), states)
    for start in range(0, len(S), step):
        rows = slice(start, start + step)
        s = S[rows].expand(halves, -1, -1)
        g = torch.bmm(s, columns, out=block[:, : s.shape[1]])
        top = g.amax(2, keepdim=True)
        g.sub_(top).clamp_(min=_NEGLIGIBLE).exp_()
        total = g.sum(2).T
        yield rows, g, total, top[..., 0].T + (total / states).log()


def block_rows(ahead: Ahead) -> int:
    """Observations per block of `density_means`."""
    return max(_GRAPH // ahead.inner[..., 0].numel(), 1)


def density_means(
    model: StateSpaceModel,
    ahead: Ahead,
    y: Tensor,
    m: Tensor,
    design: Tensor,
    shifts: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """log L̂ and log Ẑ as they are written, by the law's `log_prob`: for any model, differentiable in the design.

    Args:
        y: (L, dy).
        m: cloud of each observation (L,).
        shifts: added to the log-densities of x' and of x̃, (M, N) each.

    Returns:
        log L̂ (L, H) and log Ẑ (L, H).
    """
    log_own, log_all = (  # (L, N) and (L, MN)
        log_density(model.observation(x, design), y[:, None]).to(x.dtype).nan_to_num(LOG_FLOOR, LOG_FLOOR, LOG_FLOOR)
        for x in (ahead.outer[m], ahead.inner.flatten(0, 1))
    )
    if shifts is not None:
        log_own, log_all = log_own + shifts[0][m], log_all + shifts[1].flatten()
    parts = (ahead.halves, ahead.outer.shape[1] // ahead.halves)
    log_own, log_all = log_own.unflatten(1, parts), log_all.unflatten(1, (-1, *parts))
    return (
        log_own.logsumexp(2) - math.log(log_own[0, 0].numel()),
        log_all.logsumexp((1, 3)) - math.log(log_all[0, :, 0].numel()),
    )


def _summed(model: StateSpaceModel, ahead: Ahead, design: Tensor, method: str) -> Tensor:
    """Summands (M,) over m of (3), or of (4): Kullback–Leibler divergences of p̂_m from their mean."""
    M, N, _ = ahead.outer.shape
    law = _coordinates(model.observation(ahead.outer, design), (M, N, model.obs_dim), method)
    axes = [lattice(law, j) for j in range(model.obs_dim)]
    cells = math.prod(count for _, _, count in axes)
    if M * ahead.halves * cells > _CELLS:
        size = " × ".join(str(count) for _, _, count in axes)
        raise ValueError(
            f"method={method!r}: p(y | θ) on a lattice of {size} observations for M·H = {M * ahead.halves} clouds has "
            f"{M * ahead.halves * cells:.3g} values, allowed are {_CELLS:.3g}; take method='nested'"
        )
    step = max(_DENSITIES // (N * max(count for _, _, count in axes)), 1)
    clouds = [slice(start, start + step) for start in range(0, M, step)]
    p = torch.cat([_joint([_factor(law, j, axis, rows) for j, axis in enumerate(axes)], ahead.halves) for rows in clouds])
    volume = math.prod(spacing for _, spacing, _ in axes)

    def divergences(p: Tensor) -> Tensor:
        log_p, log_mean = (q.clamp_min(torch.finfo(q.dtype).tiny).log() for q in (p, p.mean(0)))
        return (torch.linalg.vecdot(p, log_p) - p @ log_mean) * volume

    if ahead.halves == 1:
        return divergences(p[:, 0])
    return 2 * divergences(p.mean(1)) - (divergences(p[:, 0]) + divergences(p[:, 1])) / 2


def _coordinates(law: Distribution, shape: tuple[int, ...], method: str) -> Distribution:
    """The law of the single coordinates of y, batch shape (M, N, dy), if they are independent and fit the method."""
    if method == "quadrature" and shape[-1] > 2:
        raise ValueError(f"method='quadrature': the model has dy = {shape[-1]} observations, expected at most 2")
    if summable(law, shape) != method:
        kind = "observations with countable values" if method == "enumerate" else "Gaussian observations"
        raise ValueError(f"method={method!r}: expected independent {kind}, got {type(base_law(law)).__name__}")
    return base_law(law)


def summable(law: Distribution, shape: tuple[int, ...]) -> str | None:
    """The exact method that fits a law with independent coordinates, (..., dy) of them; None if none does."""
    law = base_law(law)
    if law.batch_shape != shape or law.event_shape:
        return None
    if isinstance(law, Normal):
        return "quadrature" if shape[-1] <= 2 else None
    return "enumerate" if isinstance(law, Poisson) or law.has_enumerate_support else None


def lattice(law: Distribution, j: int) -> tuple[float, float, int]:
    """Start, spacing and number of the lattice's values of y_j, around all states' laws."""
    if isinstance(law, Binomial):  # whose number of trials may depend on the state
        return 0.0, 1.0, int(law.total_count[..., j].max()) + 1
    if not isinstance(law, Normal | Poisson):
        return 0.0, 1.0, len(law.enumerate_support(expand=False))
    mean, scale = law.mean.detach()[..., j], law.stddev.detach()[..., j]
    low, high = map(float, mean.aminmax())
    if not math.isfinite(high - low):
        raise ValueError(f"observation: the means of y_{j + 1} reach from {low} to {high}; expected finite numbers")
    if isinstance(law, Poisson):
        k = np.arange(int(high + 6 * math.sqrt(high) + 8) + 1)
        first, last = np.argmax(pdtr(k, low) > _TAIL), np.argmax(pdtrc(k, high) <= _TAIL)
        return float(first), 1.0, int(last - first) + 1
    reach, spacing = 6 * float(scale.max()), _SPACING * float(scale.min())
    return low - reach, spacing, math.ceil((high - low + 2 * reach) / spacing) + 1


def _factor(law: Distribution, j: int, axis: tuple[float, float, int], rows: slice) -> Tensor:
    """g_j at the values of the lattice's axis j, for the states of some clouds (c, N, Y_j).

    Gaussian and Poisson log-densities are products of three functions of the state with three of y. About a centre, y − c or
    λ/c, the products stay small, and float32 keeps five digits of g.
    """
    start, spacing, count = axis
    y = start + spacing * torch.arange(count, dtype=torch.float64)
    if isinstance(law, Normal):
        loc, precision = law.loc[rows, :, j], law.scale[rows, :, j] ** -2
        centre = float(y.mean())
        loc, y = loc - centre, y - centre
        states = [precision * loc, (precision / (2 * math.pi)).log() / 2 - precision * loc.square() / 2, precision]
        values = [y, torch.ones_like(y), -y.square() / 2]
    elif isinstance(law, Poisson):
        rate = law.rate[rows, :, j].clamp_min(1e-30)
        centre = float(rate.detach().mean())
        states = [(rate / centre).log(), centre - rate, torch.ones_like(rate)]
        values = [y, torch.ones_like(y), y * math.log(centre) - centre - torch.lgamma(y + 1)]
    elif isinstance(law, Binomial):
        part = Binomial(law.total_count[rows, :, j], logits=law.logits[rows, :, j], validate_args=False)
        return log_density(part, y.to(part.logits.dtype)[:, None, None]).exp().movedim(0, -1)
    else:
        every = law.enumerate_support(expand=False)  # (Y, 1, 1, 1)
        return law.log_prob(every).exp()[:, rows, :, j].movedim(0, -1)
    logs = torch.stack(states, -1) @ torch.stack(values).to(states[0].dtype)
    return logs.clamp_(min=_UNDERFLOW / law.batch_shape[-1]).exp_()


def _joint(factors: list[Tensor], halves: int) -> Tensor:
    """p̂_m(y) of every half from the factors (c, N, Y_j): (c, H, Π Y_j)."""
    clouds = len(factors[0])
    *first, last = (factor.unflatten(1, (halves, -1)).flatten(0, 1) for factor in factors)  # (cH, N/H, Y_j)
    if not first:
        return last.mean(1).unflatten(0, (clouds, halves))
    left = reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).flatten(2), first)
    return (left.mT @ last).flatten(1).unflatten(0, (clouds, halves)) / last.shape[1]

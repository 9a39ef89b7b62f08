"""Jitter: small random moves that keep a cloud of static parameters from collapsing under repeated resampling.

A kernel maps a cloud θ (M, dθ) to a new one, and every kernel here keeps it in the prior's box [low, high] (infinite sides
are no bound):

    paper        θ̄_m ~ N(θ_m, c / M^{3/2}) truncated to the box, every particle          [paper]
    bernoulli    the same move with probability M^{−1/2}, otherwise θ̄_m = θ_m            [predecessor]
    liu_west     θ̄_m ~ N(a θ_m + (1−a) mean, (1−a²) Var), truncated to the box            [ours]

A variance of order M^{−3/2} keeps the filter's error at O(M^{−1/2} + N^{−1/2}), but it also inflates the posterior: with the
paper's c a cloud of M = 300 is 15 to 40 % too wide on the epidemic. Liu and West's shrinkage keeps the cloud's mean and
variance.
Sources: Crisan and Míguez, Bernoulli 24 (2018); Liu and West (2001).
"""

from collections.abc import Callable
from numbers import Real

import torch
from torch.special import ndtr, ndtri

Kernel = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def paper(low: torch.Tensor, high: torch.Tensor, scale: float) -> Kernel:
    """Kernel that moves every particle: variance c / M^{3/2} per coordinate, truncated to the box.

    Args:
        low: (dθ,).
        high: (dθ,).
        scale: c > 0, in squared units of θ.
    """
    _check_scale(scale)

    def move(theta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return truncated_normal(theta, (scale / len(theta) ** 1.5) ** 0.5, low, high, generator)

    return move


def bernoulli(low: torch.Tensor, high: torch.Tensor, scale: float) -> Kernel:
    """Kernel that moves a particle as `paper` does, but only with probability M^{−1/2}."""
    move_all = paper(low, high, scale)

    def move(theta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        moved = torch.rand((len(theta), 1), generator=generator) < len(theta) ** -0.5
        return torch.where(moved, move_all(theta, generator), theta)

    return move


def liu_west(low: torch.Tensor, high: torch.Tensor, scale: float = 0.99) -> Kernel:
    """Kernel that shrinks towards the mean before it spreads, so that neither mean nor variance of the cloud grows.

    Args:
        low: (dθ,).
        high: (dθ,).
        scale: the shrinkage a in (0, 1); the closer to 1, the smaller the moves.
    """
    if not (isinstance(scale, Real) and 0 < scale < 1):
        raise ValueError(f"jitter_scale={scale!r}: the shrinkage of 'liu_west' must lie in (0, 1)")

    def move(theta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        centre = scale * theta + (1 - scale) * theta.mean(0)
        std = (1 - scale**2) ** 0.5 * theta.std(0, correction=0)
        return truncated_normal(centre, std, low, high, generator)

    return move


JITTERS: dict[str, Callable[..., Kernel]] = {"paper": paper, "bernoulli": bernoulli, "liu_west": liu_west}


def jittered(kernel: Kernel | None, theta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """θ̄ (M, dθ) of a kernel, with its shape and precision checked; without a kernel θ itself."""
    if kernel is None:
        return theta
    moved = kernel(theta, generator)
    if moved.shape != theta.shape or moved.dtype != theta.dtype:
        raise ValueError(
            f"jitter: the kernel gave {moved.dtype} parameters of shape {tuple(moved.shape)}; "
            f"expected {theta.dtype} and {tuple(theta.shape)}"
        )
    return moved


def truncated_normal(
    mean: torch.Tensor, std: torch.Tensor | float, low: torch.Tensor, high: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """N(mean, std²) truncated to [low, high], by inversion of its distribution function.

    Args:
        mean: (M, dθ), inside the box (from outside it the tails lose digits).
        std: scalar or (dθ,); zero returns the mean.
        low: (dθ,), may be −∞.
        high: (dθ,), may be ∞.
    """
    mean64 = mean.double()
    std = torch.as_tensor(std, dtype=torch.float64).clamp(min=1e-150)
    lower, upper = ndtr((low - mean64) / std), ndtr((high - mean64) / std)
    u = lower + (upper - lower) * torch.rand(mean.shape, generator=generator, dtype=torch.float64)
    moved = mean64 + std * ndtri(u).clamp(-38, 38)  # u = 0 or 1 by rounding is not infinitely far
    return moved.to(mean.dtype).clamp(low.to(mean.dtype), high.to(mean.dtype))


def _check_scale(scale: float) -> None:
    if not (isinstance(scale, Real) and 0 < scale < float("inf")):
        raise ValueError(f"jitter_scale={scale!r}: the constant c of the variance c / M^(3/2) must be positive")

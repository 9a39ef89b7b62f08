"""Resampling: replace n weighted particles by n equally weighted copies, E[number of copies of i] = n W_i.

Both schemes put n points on [0, 1) and let the cumulated weights C_i = W_1 + … + W_i, steps of a staircase, catch them:

    multinomial   n independent uniforms                    Var[copies of i] = n W_i (1 − W_i)
    systematic    (U + k) / n for k = 0 … n−1, one U        copies of i ∈ {⌊n W_i⌋, ⌈n W_i⌉}

Leading dimensions are independent populations: (M, N) resamples M clouds of N at once. Source: the paper resamples
multinomially at every step [paper]; systematic, of lower variance, is the default here [ours].
"""

from collections.abc import Callable

import torch


def multinomial(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Ancestors (..., n) in 0 … n−1, drawn independently with probability proportional to the weights (..., n)."""
    cumulated = _cumulate(weights)
    points = torch.rand(weights.shape, generator=generator, dtype=torch.float64)
    return torch.searchsorted(cumulated, points, right=True).clamp_(max=weights.shape[-1] - 1)


def systematic(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Ancestors (..., n) in 0 … n−1, in ascending order, caught by a comb of n equidistant points with one random offset.

    Copies of one particle stand side by side: shuffle before splitting a resampled cloud into halves.
    """
    n = weights.shape[-1]
    offset = torch.rand((*weights.shape[:-1], 1), generator=generator, dtype=torch.float64)
    below = (n * _cumulate(weights) - offset).ceil_().clamp_(0, n).long()  # (..., n): points k + U of the comb below n C_i
    copies = below.diff(prepend=torch.zeros_like(below[..., :1]))
    ancestors = torch.repeat_interleave(copies.flatten(), output_size=copies.numel()).view(copies.shape)
    return ancestors.remainder_(n)


RESAMPLERS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "multinomial": multinomial,
    "systematic": systematic,
}


def _cumulate(weights: torch.Tensor) -> torch.Tensor:
    """C (..., n) in float64, of weights that need not sum to one; its last entry, and every one after the last weight, is 1."""
    cumulated = weights.to(torch.float64).cumsum(-1)
    total = cumulated[..., -1:]
    if float(weights.amin()) < 0 or not bool(((total > 0) & total.isfinite()).all()):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)}: expected finite weights >= 0 with a positive sum in each population"
        )
    return cumulated / total

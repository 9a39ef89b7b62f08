"""What green bits do in theory: closed forms against which the estimates of this lab are read.

γ is the green fraction, δ the bias, α = e^δ, p the chance that a scored token is green, T the number of scored tokens. Bits are
taken as independent unless a line says otherwise. All functions broadcast over arrays.

[KGW] Kirchenbauer et al. 2023, arXiv 2301.10226.
"""

import numpy as np
from scipy import special

from labkit.errors import check_size
from labkit.watermark._checks import check_gamma, check_probability


def uniform_green_rate(gamma: float, delta: float | np.ndarray) -> float | np.ndarray:
    """P(green) = γα / (1 + (α − 1)γ) when all logits are equal: the most that the bias δ ≥ 0 achieves on average."""
    check_gamma(gamma)
    _check_delta(delta)
    return gamma / (gamma + (1 - gamma) * np.exp(-np.asarray(delta, dtype=float)))


def spike_entropy(probabilities: np.ndarray, gamma: float, delta: float | np.ndarray) -> float | np.ndarray:
    """S = Σ_v p_v / (1 + m p_v), m = (1 − γ)(α − 1) / (1 + (α − 1)γ): near 1 of a flat p, 1 / (1 + m) of a sure token.

    Args:
        probabilities: next-token distributions before the watermark (..., V).
        gamma: green fraction in (0, 1).
        delta: bias δ ≥ 0, scalar or (...).

    Returns:
        (...).

    Source: [KGW] definition 4.1, modulus of theorem 4.2.
    """
    probabilities = np.asarray(probabilities, dtype=float)
    check_gamma(gamma)
    check_probability("probabilities", probabilities)
    _check_delta(delta)
    modulus = np.asarray((1 - gamma) * np.expm1(delta) / (1 + np.expm1(delta) * gamma))
    return (probabilities / (1 + modulus[..., None] * probabilities)).sum(-1)


def green_rate_bound(spike_entropy: float | np.ndarray, gamma: float, delta: float | np.ndarray) -> float | np.ndarray:
    """Least mean of P(green) over random lists of γV tokens: γα / (1 + (α − 1)γ) · S, S from `spike_entropy` [KGW thm 4.2]."""
    return uniform_green_rate(gamma, delta) * spike_entropy


def expected_z(rate: float | np.ndarray, gamma: float, length: int | np.ndarray) -> float | np.ndarray:
    """E[z] = √T (p − γ) / √(γ (1 − γ))."""
    check_gamma(gamma)
    check_probability("rate", rate)
    return np.sqrt(length) * (rate - gamma) / np.sqrt(gamma * (1 - gamma))


def variance_z(rate: float | np.ndarray, gamma: float) -> float | np.ndarray:
    """Var[z] = p (1 − p) / (γ (1 − γ)), whatever T."""
    check_gamma(gamma)
    check_probability("rate", rate)
    return rate * (1 - rate) / (gamma * (1 - gamma))


def gaussian_auc(mean: float | np.ndarray, variance: float | np.ndarray) -> float | np.ndarray:
    """AUC Φ(E / √(1 + Var)) of a normal score against the standard normal of texts without a watermark."""
    return special.ndtr(mean / np.sqrt(1 + np.asarray(variance)))


def surviving_rate(rate: float, gamma: float, q: float | np.ndarray, depth: int | np.ndarray) -> float | np.ndarray:
    """Green rate γ + (p − γ)(1 − q)^d after d rounds, each of which redraws a scored token with probability q.

    Hence E[z_d] = (1 − q)^d E[z_0]. A green bit lives on only where both tokens of its bigram do, so q is the loss of bigrams.
    """
    check_gamma(gamma)
    check_probability("rate", rate)
    check_probability("q", q)
    return gamma + (rate - gamma) * (1 - np.asarray(q)) ** depth


def pss_null_level(num_depths: int, q: float) -> float:
    """E[PSS²] = 1 − K⁻² Σ_{a,b} (1 − q)^|a−b| of unexpanded windows over K consecutive depths without a watermark.

    Args:
        num_depths: K ≥ 2.
        q: chance that one round redraws a scored token, in [0, 1]. 0 gives 0, 1 gives 1 − 1 / K.
    """
    check_size("num_depths", num_depths, 2)
    check_probability("q", q)
    depths = np.arange(num_depths)
    return 1 - float(np.mean((1 - q) ** np.abs(depths[:, None] - depths)))


def expected_runs(rate: float | np.ndarray, length: int | np.ndarray) -> float | np.ndarray:
    """Expected number of green runs, p + (T − 1) p (1 − p)."""
    check_probability("rate", rate)
    return rate + (length - 1) * rate * (1 - rate)


def num_windows(length: int, size: int = 50, stride: int = 10) -> int:
    """Number of windows m(T) = 1 if T ≤ W, else ⌈(T − W) / S⌉ + 1."""
    check_size("length", length, 1)
    check_size("size", size, 1)
    check_size("stride", stride, 1)
    return 1 if length <= size else -(-(length - size) // stride) + 1


def _check_delta(delta: float | np.ndarray) -> None:
    if not np.all((np.asarray(delta) >= 0) & np.isfinite(delta)):
        raise ValueError(f"delta={delta!r}: expected a finite number >= 0")

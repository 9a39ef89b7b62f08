"""Paraphrasing as a channel: each round redraws some green bits, and a redrawn bit is green with probability γ again.

Nothing of language is left, so what a detector can gain from order, runs or depth is known here: on independent bits nothing,
because their count is sufficient. Redrawing in bursts, as a paraphraser that rewrites phrases does, gives order a meaning.
Source: [ours].
"""

import numpy as np

from labkit.errors import check_size
from labkit.watermark._checks import check_bits, check_gamma, check_probability


def redraw(bits: np.ndarray, q: float, p: float, generator: np.random.Generator, *, bursts: float | None = None) -> np.ndarray:
    """One round of paraphrasing: each bit is redrawn with probability q.

    Args:
        bits: green bits (..., T).
        q: share of bits that are redrawn, in [0, 1].
        p: green rate of redrawn bits.
        bursts: mean length of the stretches that are redrawn together, ≥ 1 and ≥ q / (1 − q); None redraws bits independently.

    Returns:
        uint8 (..., T).
    """
    bits = check_bits(bits)
    check_probability("q", q)
    check_probability("p", p)
    hit = generator.random(bits.shape) < q if bursts is None else _bursts(bits.shape, q, bursts, generator)
    return np.where(hit, generator.random(bits.shape) < p, bits).astype(np.uint8)


def lineage(
    n: int, length: int, p: float, q: float, depth: int, seed: int, *, gamma: float = 0.25, bursts: float | None = None
) -> np.ndarray:
    """Chains of texts: independent bits of green rate p, then `depth` rounds that redraw a share q at rate γ.

    Args:
        n: number of chains.
        length: T, scored tokens of each text.
        p: green rate before the first round; γ gives texts without a watermark.
        q: share of bits that a round redraws, in [0, 1].
        depth: number of rounds ≥ 0.
        seed: whole number ≥ 0.
        gamma: green fraction in (0, 1).
        bursts: as in `redraw`.

    Returns:
        uint8 (n, depth + 1, T).
    """
    check_size("n", n, 1)
    check_size("length", length, 1)
    check_size("depth", depth, 0)
    check_size("seed", seed, 0)
    check_probability("p", p)
    check_gamma(gamma)
    generator = np.random.default_rng(seed)
    chain = [(generator.random((n, length)) < p).astype(np.uint8)]
    for _ in range(depth):
        chain.append(redraw(chain[-1], q, gamma, generator, bursts=bursts))
    return np.stack(chain, axis=1)


def copy_paste(marked: np.ndarray, host: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    """Put a random stretch of each watermarked text into the same place of a text without: the case WinMax is made for.

    Args:
        marked: green bits of watermarked texts (n, T).
        host: green bits of texts without a watermark (n, T).
        length: tokens that are pasted, 1 … T.

    Returns:
        uint8 (n, T).
    """
    marked, host = check_bits(marked), check_bits(host)
    if marked.ndim != 2 or marked.shape != host.shape:
        raise ValueError(f"marked of shape {marked.shape}, host of shape {host.shape}: expected (n, T) twice")
    total = marked.shape[1]
    check_size("length", length, 1)
    if length > total:
        raise ValueError(f"length={length}: expected at most the {total} scored tokens of a text")
    start = generator.integers(0, total - length + 1, len(marked))[:, None]
    column = np.arange(total)
    return np.where((column >= start) & (column < start + length), marked, host)


def _bursts(shape: tuple[int, ...], q: float, mean: float, generator: np.random.Generator) -> np.ndarray:
    """Stationary on-off process along the last axis: share q on, stretches of geometric length."""
    if not (mean >= 1 and (q == 1 or q <= mean * (1 - q))):
        raise ValueError(f"bursts={mean!r}: expected a mean length >= 1 and >= q / (1 - q) of q={q}")
    end, begin = (0.0, 1.0) if q == 1 else (1 / mean, q / ((1 - q) * mean))
    uniform = generator.random(shape)
    hit = np.empty(shape, dtype=bool)
    hit[..., 0] = uniform[..., 0] < q
    for t in range(1, shape[-1]):
        hit[..., t] = uniform[..., t] < np.where(hit[..., t - 1], 1 - end, begin)
    return hit

"""How much green a text holds: one z-test, the same on distinct bigrams, and the best stretch of the text.

Of T scored tokens, b_t ∈ {0, 1} says whether token t is on the green list of its predecessor, which holds a share γ of the
vocabulary. Without a watermark n = Σ b_t has mean γT, so

    z = (n − γT) / √(T γ (1 − γ)),        p = 1 − Φ(z)                                                     [KGW]

A bigram that comes back brings the same bit again. Counting each bigram once removes that dependence [KGW]. WinMax takes the
highest z of any stretch, for watermarked passages inside a long text that is not [REL].

[KGW] Kirchenbauer et al. 2023, arXiv 2301.10226. [REL] Kirchenbauer et al. 2024, arXiv 2306.04634.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from labkit.errors import check_size
from labkit.watermark._checks import check_bits, check_gamma

_BLOCK = 1 << 17  # counts per block of texts, so that differences stay in the processor's cache


def z_score(bits: np.ndarray, gamma: float, where: np.ndarray | None = None) -> float | np.ndarray:
    """z of the number of green tokens.

    Args:
        bits: green bits (..., T).
        gamma: green fraction in (0, 1).
        where: which tokens count, (..., T) of 0 and 1; None counts all. `fresh` marks first occurrences.

    Returns:
        (...).

    Raises:
        ValueError: bits that are not 0 or 1, shapes that differ, or a text of which no token counts.

    Source: [KGW] section 3.
    """
    bits = check_bits(bits)
    check_gamma(gamma)
    if where is None:
        return z_of_counts(bits.sum(-1, dtype=np.int64), bits.shape[-1], gamma)
    where = check_bits(where)
    if where.shape != bits.shape:
        raise ValueError(f"where of shape {where.shape}: expected the shape of bits, {bits.shape}")
    counted = where.sum(-1, dtype=np.int64)
    if not np.all(counted):
        raise ValueError("where: a text of which no token counts has no z")
    return z_of_counts((bits & where).sum(-1, dtype=np.int64), counted, gamma)


def z_of_counts(green: np.ndarray, length: np.ndarray | int, gamma: float) -> np.ndarray:
    """(n − γT) / √(T γ (1 − γ)) of n green among T tokens, any shapes that broadcast."""
    return (green - gamma * length) / np.sqrt(length * gamma * (1 - gamma))


def z_unique(ids: Sequence[int] | np.ndarray, bits: np.ndarray, gamma: float) -> float:
    """z of the distinct bigrams of one text.

    Args:
        ids: token ids (T + 1,).
        bits: green bits (T,).
        gamma: green fraction in (0, 1).

    Source: [KGW]; equals transformers' detector with `ignore_repeated_ngrams=True`.
    """
    return z_score(bits, gamma, where=fresh(ids))


def fresh(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Which scored tokens complete a bigram that the text has not had before.

    Args:
        ids: token ids (T + 1,).

    Returns:
        uint8 (T,). A prefix of it belongs to that prefix of the text.
    """
    ids = check_ids(ids)
    first = np.zeros(len(ids) - 1, dtype=np.uint8)
    codes = ids[:-1] * (int(ids.max()) + 1) + ids[1:]
    first[np.unique(codes, return_index=True)[1]] = 1
    return first


def winmax(bits: np.ndarray, gamma: float, min_len: int = 1) -> float | np.ndarray:
    """The highest z of any stretch of at least `min_len` tokens.

    Args:
        bits: green bits (..., T).
        gamma: green fraction in (0, 1).
        min_len: 1 … T. At 1 any green token already gives √((1 − γ) / γ).

    Returns:
        (...), never below `z_score`, for the whole text is one of the stretches (which [REL] leaves out).

    Source: [REL]. O(T²) for each text, vectorised over texts.
    """
    bits = check_bits(bits)
    check_gamma(gamma)
    length = bits.shape[-1]
    check_size("min_len", min_len, 1)
    if min_len > length:
        raise ValueError(f"min_len={min_len}: expected at most the {length} scored tokens of a text")
    rows = bits.reshape(-1, length)
    best = np.empty(len(rows))
    sizes = np.arange(min_len, length + 1)[:, None]
    step = max(1, _BLOCK // length)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        best[start : start + step] = z_of_counts(_most_green(block, min_len), sizes, gamma).max(0)
    return best.reshape(bits.shape[:-1])[()]


def best_window(bits: np.ndarray, gamma: float, min_len: int = 1) -> tuple[int, int, float]:
    """The stretch that WinMax finds in one text.

    Args:
        bits: green bits (T,).
        gamma, min_len: as in `winmax`.

    Returns:
        Its first token, the one after its last, and its z.
    """
    total = np.concatenate([[0], np.cumsum(bits.astype(int))])
    start, stop = np.triu_indices(len(total), min_len)
    z = z_of_counts(total[stop] - total[start], stop - start, gamma)
    best = int(z.argmax())
    return int(start[best]), int(stop[best]), float(z[best])


def p_value(z: float | np.ndarray) -> float | np.ndarray:
    """Chance of a z at least this high without a watermark, 1 − Φ(z), any shape."""
    return special.ndtr(-np.asarray(z))


def check_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids (L,) as int64, L ≥ 2."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids of shape {array.shape}: expected the ids of one text, (L,)")
    if len(array) < 2:
        raise ValueError(f"need at least 2 tokens to score one, got {len(array)}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids of dtype {array.dtype}: expected integers")
    return array.astype(np.int64, copy=False)


def _most_green(bits: np.ndarray, min_len: int) -> np.ndarray:
    """Most green tokens in any stretch of each length min_len … T, of texts (n, T): (T − min_len + 1, n)."""
    n, length = bits.shape
    counts = np.zeros((length + 1, n), dtype=np.int16 if length < 2**15 else np.int64)  # texts last: each step is contiguous
    np.cumsum(bits.T, axis=0, out=counts[1:])
    return np.array([(counts[size:] - counts[:-size]).max(0) for size in range(min_len, length + 1)])

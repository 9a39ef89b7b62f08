"""Windows along a text and what they are summarised by: 21 static features, and the pattern stability score over depth.

A window starts every S tokens and holds W; each edge then moves outward while it would cut a run of green, so a window ends on
a red token or at the text's edge:

    a = last red token at or before s (else 0),        f = 1 + first red token at or after e − 1 (else T)

Of window i three numbers: local z_i = (n_i − γ L_i) / √(L_i γ (1 − γ)), the longest run of green r_i, and f_i, how many runs
are that long. Over the m windows of a text each series has mean, variance, minimum, maximum, skewness and excess kurtosis; with
the autocorrelation of z_i at lags 1 and 2 and the z of the whole text these are the 21 static features. Over K texts of one
chain of paraphrases, window i by window i,

    PSS_i = std_d z_{d,i}

is large where z falls along the chain, as a watermark does [predecessor].

Texts are rows of equal length: with unequal lengths the number of windows would tell the classes apart [ours]. Sources:
windows, features and PSS [predecessor]; z of the whole text among the features [paper]; `compact_pss` [ours].
"""

import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from labkit.watermark._checks import check_bits, check_gamma
from labkit.watermark.scores import z_of_counts, z_score
from labkit.watermark.theory import num_windows

FEATURES = (
    *("z_mean", "z_var", "z_min", "z_max", "z_skew", "z_kurt", "z_ac1", "z_ac2"),
    *("run_mean", "run_var", "run_min", "run_max", "run_skew", "run_kurt"),
    *("freq_mean", "freq_var", "freq_min", "freq_max", "freq_skew", "freq_kurt"),
    "z_global",
)
RELIABLE_LENGTH = 25  # scored tokens below which nothing local can be said

_SAME = 1e-12  # a series that varies less is constant up to rounding
_BLOCK = 1 << 18  # bits per block of texts, so that the table of runs × windows stays small


@dataclass(frozen=True)
class Local:
    """Local statistics of texts' windows.

    Attributes:
        z: local z (..., m).
        run: longest green run (..., m), 0 where there is none.
        freq: number of runs of that length (..., m), 0 where there is none.
        reliable: whether the texts have at least `RELIABLE_LENGTH` scored tokens.
    """

    z: np.ndarray
    run: np.ndarray
    freq: np.ndarray
    reliable: bool


def windows(bits: np.ndarray, size: int = 50, stride: int = 10, expand: bool = True) -> np.ndarray:
    """Bounds of the windows, half open.

    Args:
        bits: green bits (..., T).
        size: W ≥ 1, tokens of a window before it grows.
        stride: S ≥ 1.
        expand: let each edge grow until it cuts no run of green.

    Returns:
        (..., m, 2), m = `num_windows(T, size, stride)`.
    """
    bits = check_bits(bits)
    length = bits.shape[-1]
    start = stride * np.arange(num_windows(length, size, stride))
    end = np.minimum(start + size, length)
    if expand:
        column, red = np.arange(length, dtype=np.int32), bits == 0
        last_red = np.maximum.accumulate(np.where(red, column, 0), axis=-1)
        next_red = np.minimum.accumulate(np.where(red, column, length - 1)[..., ::-1], axis=-1)[..., ::-1]
        start, end = last_red[..., start], next_red[..., end - 1] + 1
    bounds = np.stack([start, end], axis=-1).astype(np.int64, copy=False)
    return np.broadcast_to(bounds, (*bits.shape[:-1], *bounds.shape[-2:]))


def local_stats(bits: np.ndarray, gamma: float, size: int = 50, stride: int = 10, expand: bool = True) -> Local:
    """Local z, longest run and its frequency, for each window of each text.

    Args:
        bits: green bits (..., T).
        gamma: green fraction in (0, 1).
        size, stride, expand: as in `windows`.

    Warns:
        UserWarning: T < W, so that a text is one window and has no shape over windows.
    """
    bits = check_bits(bits)
    check_gamma(gamma)
    length = bits.shape[-1]
    if length < size:
        warnings.warn(f"{length} scored tokens fill no window of {size}: each text is one window", stacklevel=2)
    rows = bits.reshape(-1, length)
    shape = len(rows), num_windows(length, size, stride)
    z, run, freq = np.empty(shape), np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    step = max(1, _BLOCK // length)
    for i in range(0, len(rows), step):
        block = slice(i, i + step)
        bounds = windows(rows[block], size, stride, expand)
        z[block] = _local_z(rows[block], bounds, gamma)
        run[block], freq[block] = _longest_runs(rows[block], bounds)
    parts = (part.reshape(*bits.shape[:-1], -1) for part in (z, run, freq))
    return Local(*parts, reliable=length >= RELIABLE_LENGTH)


def static_features(
    bits2d: np.ndarray, gamma: float, size: int = 50, stride: int = 10, expand: bool = True, include_global: bool = True
) -> pd.DataFrame:
    """The static features of texts of equal length.

    Args:
        bits2d: green bits (n, T).
        gamma: green fraction in (0, 1).
        size, stride, expand: as in `windows`.
        include_global: with the z of the whole text, the last column.

    Returns:
        One row per text, columns `FEATURES`. Skewness, kurtosis and autocorrelation are 0 where they are not defined: of a
        constant series, of fewer than 3, 4 and lag + 1 windows. `attrs` keeps the settings, by their names, `length` and
        `reliable`.

    Raises:
        ValueError: rows of different length, or bits that are not 0 or 1.
    """
    bits = check_bits(bits2d)
    if bits.ndim != 2:
        raise ValueError(f"bits2d of shape {bits.shape}: expected (n, T)")
    local = local_stats(bits, gamma, size, stride, expand)
    autocorrelation = np.stack([_autocorrelation(local.z, lag) for lag in (1, 2)], axis=-1)
    blocks = [_summary(local.z), autocorrelation, _summary(local.run), _summary(local.freq), z_score(bits, gamma)[:, None]]
    table = pd.DataFrame(np.concatenate(blocks, axis=1), columns=FEATURES)
    table.attrs = dict(gamma=gamma, size=size, stride=stride, expand=expand, length=bits.shape[1], reliable=local.reliable)
    return table if include_global else table.drop(columns="z_global")


def pss(local_z: np.ndarray) -> np.ndarray:
    """Pattern stability score: how much each window's z varies along a chain of paraphrases.

    Args:
        local_z: local z of K ≥ 2 texts of each chain (n, K, m).

    Returns:
        Standard deviation over the K texts (n, m), exactly 0 where they are alike.
    """
    z = _check_lineage("local_z", local_z, 3)
    return np.std(z - z[:, :1], axis=1)


def compact_pss(z: np.ndarray) -> np.ndarray:
    """Chain of paraphrases in three numbers that do not depend on the length of the texts.

    Args:
        z: z of the whole text, at K ≥ 2 consecutive depths of each chain (n, K).

    Returns:
        Mean, maximum and least-squares slope over depth (n, 3).
    """
    z = _check_lineage("z", z, 2)
    depth = np.arange(z.shape[1]) - (z.shape[1] - 1) / 2
    return np.stack([z.mean(1), z.max(1), z @ depth / (depth @ depth)], axis=1)


def _check_lineage(name: str, values: np.ndarray, ndim: int) -> np.ndarray:
    try:
        values = np.asarray(values, dtype=float)
    except ValueError as error:  # numpy's own for rows that do not line up
        raise ValueError(f"{name}: numbers of windows differ; truncate the texts to a common T first") from error
    if values.ndim != ndim or values.shape[1] < 2:
        expected = "(n, K, m)" if ndim == 3 else "(n, K)"
        raise ValueError(f"{name} of shape {values.shape}: expected {expected} with K >= 2 depths")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: a depth of a chain is missing (not a finite number)")
    return values


def _local_z(bits: np.ndarray, bounds: np.ndarray, gamma: float) -> np.ndarray:
    counts = np.zeros((len(bits), bits.shape[1] + 1), dtype=np.int64)
    np.cumsum(bits, axis=1, out=counts[:, 1:])
    green = np.take_along_axis(counts, bounds[..., 1], 1) - np.take_along_axis(counts, bounds[..., 0], 1)
    return z_of_counts(green, bounds[..., 1] - bounds[..., 0], gamma)


def _longest_runs(bits: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Longest run and its frequency (n, m) in windows (n, m, 2) of bits (n, T); a run that a window cuts counts as cut.

    The runs that meet a window are consecutive, so runs × windows is a ragged table, kept flat and reduced row by row.
    """
    n, length = bits.shape
    padded = np.zeros((n, length + 2), dtype=np.int8)
    padded[:, 1:-1] = bits
    steps = np.diff(padded, axis=1)  # 1 where a run begins, −1 behind its last token
    begin, end = (np.nonzero(steps == sign)[1] for sign in (1, -1))
    begun = np.cumsum(steps == 1).reshape(n, -1)  # runs up to here, over all texts
    ended = np.cumsum(steps == -1).reshape(n, -1)
    first = np.take_along_axis(ended, bounds[..., 0], 1)  # the window's first run is the first that has not ended
    count = np.take_along_axis(begun, bounds[..., 1] - 1, 1) - first
    filled = count > 0
    count = count[filled]
    before = np.cumsum(count) - count
    run = np.repeat(first[filled] - before, count) + np.arange(count.sum())
    left, right = np.repeat(bounds[filled], count, axis=0).T
    size = np.minimum(end[run], right) - np.maximum(begin[run], left)
    longest, frequency = np.zeros((2, *filled.shape), dtype=np.int64)
    if len(count):
        longest[filled] = np.maximum.reduceat(size, before)
        frequency[filled] = np.add.reduceat((size == np.repeat(longest[filled], count)).astype(np.int64), before)
    return longest, frequency


def _summary(series: np.ndarray) -> np.ndarray:
    """Mean, variance, minimum, maximum, skewness, excess kurtosis (n, 6) of series (n, m)."""
    low, high, varies = series.min(1), series.max(1), _varies(series)
    mean = np.where(varies, series.mean(1), low)
    shape = np.zeros((3, len(series)))  # variance, skewness, kurtosis
    if varies.any():
        kept, m = series[varies], series.shape[1]
        shape[0, varies] = kept.var(1)
        if m >= 3:
            shape[1, varies] = stats.skew(kept, axis=1)
        if m >= 4:
            shape[2, varies] = stats.kurtosis(kept, axis=1)
    return np.stack([mean, shape[0], low, high, shape[1], shape[2]], axis=1)


def _autocorrelation(series: np.ndarray, lag: int) -> np.ndarray:
    """ρ_l = Σ_{i>l} (z_i − z̄)(z_{i−l} − z̄) / Σ (z_i − z̄)² of series (n, m)."""
    rho = np.zeros(len(series))
    varies = _varies(series)
    centred = series[varies] - series[varies].mean(1, keepdims=True)
    rho[varies] = (centred[:, lag:] * centred[:, :-lag]).sum(1) / (centred**2).sum(1)
    return rho


def _varies(series: np.ndarray) -> np.ndarray:
    return np.ptp(series, axis=1) > _SAME

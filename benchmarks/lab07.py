"""Lab 07: green bits looked up instead of drawn, and features of a thousand texts at once.

Peers: transformers' own detector on the same texts, and Python loops over texts with the same definitions. All on one thread;
what ours and the peer return is compared before it is timed.
"""

import tracemalloc
from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import torch
from transformers import PretrainedConfig, WatermarkDetector

from benchmarks._runner import Row, compare, interleave, one_thread, ratio_row
from labkit.watermark import FEATURES, GreenBits, Watermark, static_features, winmax, z_score

VOCABULARY, TEXTS, TOKENS, GAMMA = 49_152, 40, 200, 0.25
FEATURE_TEXTS = 1000


def benchmarks() -> Iterator[Row]:
    """All comparisons of the lab: about a minute and a half of processor time."""
    with one_thread():
        yield from detector()
        yield from memory()
        yield from features()
        yield from growth()


def detector() -> Iterator[Row]:
    """z of texts with tokens as uneven as words are, all lists drawn anew and all lists known."""
    wm, ids = Watermark(VOCABULARY, GAMMA), _zipf_texts(TEXTS, TOKENS + 1)
    config, tokens = PretrainedConfig(vocab_size=VOCABULARY, bos_token_id=1), torch.as_tensor(ids)
    peer, warm = WatermarkDetector(config, "cpu", wm.to_hf()), GreenBits(wm)
    calls = {
        "peer": lambda: peer(tokens, return_dict=True).z_score,
        "cold": lambda: _z(GreenBits(wm), ids),
        "warm": lambda: _z(warm, ids),
    }
    if not all(np.array_equal(calls[name](), calls["peer"]()) for name in ("cold", "warm")):
        raise AssertionError("z differs from that of transformers")
    seconds = interleave(calls, 5, progress="detector")
    distinct = len(np.unique(ids[:, :-1]))
    sizes = f"{TEXTS} texts × {TOKENS} tokens, {distinct:,} of them distinct, vocabulary {VOCABULARY:,}, z equal to the bit"
    for name, target in (("cold", "≥ 2"), ("warm", "≥ 100")):
        yield compare(
            "07", f"z, {name}", seconds[name], "transformers.WatermarkDetector", seconds["peer"], target=target, sizes=sizes
        )


def memory() -> Iterator[Row]:
    """Bytes for each list that can be kept: all that the detector asks for, which it asks for at once."""
    rows = 20_000
    tracemalloc.start()
    try:
        green = GreenBits(Watermark(VOCABULARY, GAMMA), max_rows=rows)
        green(_zipf_texts(1, TOKENS + 1)[0])
        size = tracemalloc.get_traced_memory()[0] / rows
    finally:
        tracemalloc.stop()
    sizes = f"{rows:,} lists of {VOCABULARY:,} tokens"
    yield ratio_row("07", f"green lists: {size:,.0f} bytes each", 6200 / size, "6.2 kB", target="≥ 1", sizes=sizes)


def features() -> Iterator[Row]:
    """The 21 features and WinMax against loops over texts."""
    bits = _bits(FEATURE_TEXTS)
    cases = {  # ours, peer, what the peer is, target
        "21 features": (
            lambda b: static_features(b, GAMMA).to_numpy(),
            _features_loop,
            "a loop over texts and windows",
            "≥ 10",
        ),
        "WinMax": (lambda b: winmax(b, GAMMA), _winmax_loop, "numpy, text by text", None),
    }
    for name, (ours, peer, peer_name, target) in cases.items():
        if not np.allclose(ours(bits), peer(bits), rtol=0, atol=1e-9):
            raise AssertionError(f"{name} differ from the loop's")
        seconds = interleave({"ours": partial(ours, bits), "peer": partial(peer, bits)}, 5, progress=name)
        sizes = f"{FEATURE_TEXTS} texts × {TOKENS} tokens"
        yield compare("07", name, seconds["ours"], peer_name, seconds["peer"], target=target, sizes=sizes)
        if name == "21 features":
            yield ratio_row("07", f"{name}, time", 0.5 / seconds["ours"], "0.5 s", target="≥ 1", sizes=sizes)


def growth() -> Iterator[Row]:
    """Time of the features at twice the texts over time: linear is 2."""
    calls = {n: partial(static_features, _bits(n), GAMMA) for n in (4 * FEATURE_TEXTS, 8 * FEATURE_TEXTS)}
    seconds = interleave(calls, 15, progress="21 features, growth")
    # the least times: fresh memory and whatever else the machine does can only add
    ratio = seconds[8 * FEATURE_TEXTS].min() / seconds[4 * FEATURE_TEXTS].min()
    yield ratio_row(
        "07", "21 features, time on 8,000 texts", ratio, "itself on 4,000 texts", target="≤ 2.4", sizes=f"{TOKENS} tokens"
    )


def _zipf_texts(n: int, length: int) -> np.ndarray:
    weights = 1 / np.arange(1, VOCABULARY + 1)
    weights[1] = 0  # the detector of transformers takes id 1 for the start of a text
    return np.random.default_rng(0).choice(VOCABULARY, (n, length), p=weights / weights.sum())


def _bits(n: int) -> np.ndarray:
    return (np.random.default_rng(0).random((n, TOKENS)) < 0.35).astype(np.uint8)


def _z(green: GreenBits, ids: np.ndarray) -> np.ndarray:
    return z_score(np.stack([green(text) for text in ids]), GAMMA)


def _features_loop(bits: np.ndarray) -> np.ndarray:
    return pd.DataFrame([_features_of(text.tolist()) for text in bits], columns=FEATURES).to_numpy()


def _features_of(bits: list[int], size: int = 50, stride: int = 10) -> list[float]:
    z, run, freq, start = [], [], [], 0
    while True:
        a, f = start, min(start + size, len(bits))
        last = f == len(bits)
        while a > 0 and bits[a]:
            a -= 1
        while f < len(bits) and bits[f - 1]:
            f += 1
        lengths, current = [], 0
        for bit in (*bits[a:f], 0):
            if bit:
                current += 1
            elif current:
                lengths.append(current)
                current = 0
        z.append(_z_of(sum(lengths), f - a))
        run.append(max(lengths, default=0))
        freq.append(lengths.count(run[-1]))
        if last:
            break
        start += stride
    summaries = [_moments(np.array(series, dtype=float)) for series in (z, run, freq)]
    centred = np.array(z) - np.mean(z)
    total = centred @ centred
    correlations = [centred[lag:] @ centred[:-lag] / total if total > 1e-12 else 0.0 for lag in (1, 2)]
    return [*summaries[0], *correlations, *summaries[1], *summaries[2], _z_of(sum(bits), len(bits))]


def _z_of(green: int, length: int) -> float:
    return (green - GAMMA * length) / (length * GAMMA * (1 - GAMMA)) ** 0.5


def _moments(series: np.ndarray) -> list[float]:
    low, high = series.min(), series.max()
    if high - low < 1e-12:
        return [low, 0.0, low, high, 0.0, 0.0]
    centred = series - series.mean()
    variance = np.mean(centred**2)
    return [series.mean(), variance, low, high, np.mean(centred**3) / variance**1.5, np.mean(centred**4) / variance**2 - 3]


def _winmax_loop(bits: np.ndarray) -> np.ndarray:
    sizes = np.arange(1, bits.shape[1] + 1)
    scale = np.sqrt(sizes * GAMMA * (1 - GAMMA))
    best = []
    for text in bits:
        counts = np.concatenate([[0], np.cumsum(text, dtype=np.int64)])
        most = np.array([(counts[size:] - counts[:-size]).max() for size in sizes])
        best.append(((most - GAMMA * sizes) / scale).max())
    return np.array(best)

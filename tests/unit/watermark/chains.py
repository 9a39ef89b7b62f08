"""Corpora of synthetic chains that several tests share: green bits through a channel, no language."""

import numpy as np
import pandas as pd

from labkit.watermark import Lineages, lineage, window_preset
from labkit.watermark.corpus import Corpus

DOMAINS = ("news", "fiction", "learned")


def synthetic_corpus(
    docs=20, length=80, depth=8, rate=0.5, q=0.3, bursts=None, paraphrasers=("strong",), llms=("smollm2",), seed=0
):
    """Three kinds of chains per document; human and un-watermarked bits are alike, and a wrong key sees chance alone."""
    tables, bits, wrong = [], [], []
    for i, llm in enumerate(llms):
        for j, paraphraser in enumerate(paraphrasers):
            for k, kind in enumerate(("watermarked", "unwatermarked", "human")):
                rates = rate if kind == "watermarked" else 0.25, 0.25
                chains = (
                    lineage(docs, length, p, q, depth, seed=10_000 * seed + 100 * i + 10 * j + k + 1000 * w, bursts=bursts)
                    for w, p in enumerate(rates)
                )
                for chain, found in zip(chains, (bits, wrong), strict=True):
                    found.append(chain.reshape(-1, length))
                tables.append(
                    pd.DataFrame(
                        {
                            "doc": np.repeat(np.arange(docs), depth + 1),
                            "domain": np.repeat(np.resize(DOMAINS, docs), depth + 1),
                            "llm": llm,
                            "kind": kind,
                            "label": int(kind == "watermarked"),
                            "paraphraser": paraphraser,
                            "depth": np.tile(np.arange(depth + 1), docs),
                            "survival": np.tile((1 - q) ** np.arange(depth + 1), docs),
                            "length": length,
                        }
                    )
                )
    bits = np.concatenate(bits)
    rows = pd.concat(tables, ignore_index=True)
    return Corpus(rows, bits, np.concatenate(wrong), np.ones_like(bits), [None] * len(rows))


def taken(corpus, order):
    """The texts at these places, in this order."""
    parts = (array[order] for array in (corpus.bits, corpus.wrong_bits, corpus.fresh))
    return Corpus(corpus.rows.iloc[order].reset_index(drop=True), *parts, [None] * len(order))


def channel_lineages(n=200, length=100, depth=8, rate=0.5, q=0.3, bursts=None, seed=0):
    """n watermarked and n other chains, each a document of its own."""
    bits = np.concatenate([lineage(n, length, p, q, depth, seed + k, bursts=bursts) for k, p in enumerate((rate, 0.25))])
    label = np.repeat([1, 0], n)
    kind = np.where(label == 1, "watermarked", "unwatermarked")
    rows = pd.DataFrame({"doc": np.arange(2 * n), "kind": kind, "label": label})
    size, stride = window_preset(length)
    return Lineages(rows, bits, np.ones_like(bits), tuple(range(depth + 1)), size=size, stride=stride)

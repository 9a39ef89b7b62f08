"""A made-up corpus with ids, a tokenizer of 97 words and tables whose numbers are known: what the lab's page is drawn from."""

import itertools

import numpy as np
import pandas as pd

from labkit.watermark.corpus import Corpus
from labkit.watermark.experiment import FPR, Roc
from tests.unit.watermark.chains import synthetic_corpus

VOCABULARY = 97


class Words:
    """Token i is the word " wi"; what is no such word becomes token 0."""

    def __len__(self):
        return VOCABULARY

    def __call__(self, text, **_):
        return {"input_ids": [int(word[1:]) if word[1:].isdigit() else 0 for word in text.split()]}

    def decode(self, ids):
        return "".join(f" w{int(i)}" for i in ids)

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


def made_up_corpus(docs=12, length=200, paraphrasers=("wordnet", "strong")):
    texts = synthetic_corpus(docs=docs, length=length, paraphrasers=paraphrasers, rate=0.5)
    rng = np.random.default_rng(0)
    ids = [None if kind == "human" else rng.integers(1, VOCABULARY, length + 1) for kind in texts.rows["kind"]]
    return Corpus(texts.rows, texts.bits, texts.wrong_bits, texts.fresh, ids, gamma=0.25)


def made_up_tables():
    """AUC of z falls by 0.05 a round from 0.95, features of one text lie 0.02 below it; what reads D1 does not fall."""
    level = dict.fromkeys(("z", "z_unique", "winmax"), lambda depth: 0.95 - 0.05 * depth)
    level["one text: static+lr"] = lambda depth: 0.93 - 0.05 * depth
    constant = {"pss+static+lr": 0.9, "z@first": 0.92, "lr_z": 0.91, "z_mean": 0.8, "static+lr": 0.88}
    level |= {name: (lambda _, value=value: value) for name, value in constant.items()}
    one_text = ("z", "z_unique", "winmax", "static+lr")
    lineage = ("pss+static+lr", "z@first", "lr_z", "z_mean", "static+lr", "z")
    places = [("single", depth, one_text) for depth in range(9)]
    places += [("prefix", depth, lineage) for depth in range(2, 9)] + [("suffix", depth, lineage) for depth in range(1, 8)]
    aucs, gaps, curves = [], [], {}
    for (protocol, depth, names), length, paraphraser, negatives in itertools.product(
        places, (40, 100), ("wordnet", "strong"), ("human", "unwatermarked", "both")
    ):
        where = dict(protocol=protocol, depth=depth, T=length, paraphraser=paraphraser, negatives=negatives)
        judged = {"single": depth, "prefix": depth, "suffix": 8}[protocol]
        value = {name: level[name](judged) for name in names}
        if protocol == "single":
            value["static+lr"] = level["one text: static+lr"](depth)
        for name in names:
            aucs.append(where | dict(detector=name, auc=value[name], se=0.01, lo=value[name] - 0.02, hi=value[name] + 0.02))
            straight = (255 * np.minimum(1, FPR + value[name] - 0.5)).astype(np.uint8).tobytes().hex()
            curves[protocol, name, length, paraphraser, depth, negatives] = straight
        own = "static+lr" if protocol == "single" else "pss+static+lr"
        for versus in names:
            gap = value[own] - value[versus]
            gaps.append(where | dict(detector=own, versus=versus, difference=gap, se=0.01, lo=gap - 0.01, hi=gap + 0.01))
    return {"auc": pd.DataFrame(aucs), "differences": pd.DataFrame(gaps)}, Roc(FPR, pd.Series(curves).sort_index())

"""Detectors: what each reads off the texts it is given, and what it learns from that.

    design: Lineages → scores (n,), features (n, p) or bits (n, K, T)        estimator: None, where the score needs no training

    one text    z, z_unique, winmax                        tests, no training                                [KGW, REL]
                static+lr, static+xgb                      21 window features and a classifier               [predecessor]
                cnn                                        convolutions over the bits                        [ours]
    a lineage   pss+static+lr, pss+static+xgb, pss_only    the paper's method                               [paper, predecessor]
                no runs, no freq, no local z, …            pss+static+lr with one block left out             [ours]
                z@first, z_mean, lr_z                      z of the first text, mean z, regression on all z  [ours]
                pss+z+lr, compact+lr                       PSS and all z; mean, maximum and slope of z       [ours]

z@first, z_mean and lr_z see the same texts as PSS. Given a lineage, z, z_unique and winmax judge the text in question alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from labkit.watermark.features import FEATURES, compact_pss, pss
from labkit.watermark.lineages import Lineages

Design = Callable[[Lineages], np.ndarray]
Estimator = Any  # scikit-learn's: fit(X, y), and decision_function(X) or predict_proba(X)


@dataclass(frozen=True)
class Detector:
    """A detector by its two halves.

    Attributes:
        name: for tables.
        design: reads texts; scores (n,) if there is nothing to learn, else one row per text or lineage.
        estimator: seed → a fresh scikit-learn classifier, or None.
        lineage: whether it needs at least two texts.
    """

    name: str
    design: Design
    estimator: Callable[[int], Estimator] | None = None
    lineage: bool = False


def logistic(strength: float = 1.0) -> Callable[[int], Pipeline]:
    """ℓ2 logistic regression on standardised features; `strength` is scikit-learn's C, smaller is stiffer."""
    return lambda seed: make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))


def boosting(trees: int = 200, depth: int = 3) -> Callable[[int], Estimator]:
    """XGBoost as the predecessor sets it, with fewer and shallower trees by default, on one thread."""

    def make(seed: int) -> Estimator:
        from xgboost import XGBClassifier  # takes a second to import

        sampling = {"subsample": 0.85, "colsample_bytree": 0.8, "max_bin": 64}
        return XGBClassifier(n_estimators=trees, max_depth=depth, learning_rate=0.05, n_jobs=1, random_state=seed, **sampling)

    return make


def convolutional(seed: int) -> Estimator:
    """A small 1-D convolutional network on raw bits."""
    from labkit.watermark.cnn import BitCNN  # brings torch

    return BitCNN(seed=seed)


def character_ngrams() -> Callable[[int], Pipeline]:
    """Logistic regression on TF-IDF of character 3- to 5-grams: what can be told without the key."""
    return lambda seed: make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, max_features=20_000),
        LogisticRegression(C=10.0, max_iter=1000),
    )


def score_with(estimator: Estimator, design: np.ndarray) -> np.ndarray:
    """Scores (n,) of a fitted classifier, higher for watermarked: log-odds where it has them, else the probability."""
    if hasattr(estimator, "decision_function"):
        return estimator.decision_function(design)
    return estimator.predict_proba(design)[:, 1]


def _pss(texts: Lineages) -> np.ndarray:
    return pss(texts.local_z)


def _pss_and_static(texts: Lineages) -> np.ndarray:
    return np.hstack([texts.static, _pss(texts)])


def _pss_static_and_z(texts: Lineages) -> np.ndarray:
    return np.hstack([_pss_and_static(texts), texts.z])


def _compact(texts: Lineages) -> np.ndarray:
    return np.hstack([texts.static, compact_pss(texts.z)])


BLOCKS: dict[str, tuple[str, ...]] = {
    "runs": tuple(name for name in FEATURES if name.startswith("run_")),
    "freq": tuple(name for name in FEATURES if name.startswith("freq_")),
    "autocorrelation": ("z_ac1", "z_ac2"),
    "local z": ("z_mean", "z_var", "z_min", "z_max", "z_skew", "z_kurt"),
}
"""Blocks of the static features that an ablation leaves out; the z of the whole text, and PSS, stay."""


def _without(block: Sequence[str]) -> Design:
    kept = [k for k, name in enumerate(FEATURES) if name not in block]
    return lambda texts: np.hstack([texts.static[:, kept], _pss(texts)])


DETECTORS: dict[str, Detector] = {
    detector.name: detector
    for detector in (
        Detector("z", lambda texts: texts.z[:, texts.text]),
        Detector("z_unique", lambda texts: texts.z_unique[:, texts.text]),
        Detector("winmax", lambda texts: texts.winmax[:, texts.text]),
        Detector("static+lr", lambda texts: texts.static, logistic()),
        Detector("static+xgb", lambda texts: texts.static, boosting()),
        Detector("cnn", lambda texts: texts.bits, convolutional),
        Detector("pss+static+lr", _pss_and_static, logistic(), lineage=True),
        Detector("pss+static+xgb", _pss_and_static, boosting(), lineage=True),
        Detector("pss+static+xgb600", _pss_and_static, boosting(600, 6), lineage=True),
        Detector("pss_only", _pss, logistic(), lineage=True),
        *(Detector(f"no {name}", _without(block), logistic(), lineage=True) for name, block in BLOCKS.items()),
        Detector("z@first", lambda texts: texts.z[:, 0], lineage=True),
        Detector("z_mean", lambda texts: texts.z.mean(1), lineage=True),
        Detector("lr_z", lambda texts: texts.z, logistic(), lineage=True),
        Detector("pss+z+lr", _pss_static_and_z, logistic(0.01), lineage=True),
        Detector("compact+lr", _compact, logistic(0.01), lineage=True),
    )
}
"""By name. "static+lr" of a lineage is the method without PSS."""

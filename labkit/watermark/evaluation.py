"""How well a detector tells watermarked text from the rest: cross-validation by document, AUC, and intervals over documents.

AUC is the chance that a watermarked text scores higher than another one, ties counting half. All texts of a document are drawn
together, so sums are kept per pair of documents: with W[a, c] the wins of watermarked texts of document a over negatives of
document c, P[a, c] the number of these comparisons, and w_a how often a bootstrap sample holds document a,

    AUC(w) = wᵀ W w / wᵀ P w.

Only texts that the same classifier has scored are compared: between folds, a text that helped to train the other's classifier
would meet it, and AUC would fall below ½ where there is nothing to learn. W and P are summed over the cross-validations. Two
detectors on the same texts are compared under one w: paired. The bootstrap keeps the fitted classifiers; `se_repeats` says how
they vary with the split. [ours: the predecessor splits rows]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from sklearn.metrics import roc_curve
from sklearn.model_selection import StratifiedGroupKFold

from labkit.atomic import replacing
from labkit.errors import check_size
from labkit.watermark.detectors import DETECTORS, Detector, Estimator, score_with
from labkit.watermark.lineages import Lineages, Protocol, segments

if TYPE_CHECKING:
    from labkit.watermark.corpus import Corpus

NEGATIVES = ("human", "unwatermarked", "both")
RESAMPLES = 2000


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, ties counting half.

    Args:
        scores: (n,), higher for label 1.
        labels: (n,) in {0, 1}, both present.
    """
    labels = np.asarray(labels)
    _check_classes(labels)
    wins = _wins(np.asarray(scores)[None], labels, np.zeros(len(labels), int)).item()
    return float(wins / ((labels == 1).sum() * (labels == 0).sum()))


def _check_classes(labels: np.ndarray) -> None:
    found = sorted(np.unique(labels).tolist())
    if found != [0, 1]:
        raise ValueError(f"labels: got the classes {found}, expected both 0 and 1")


def _wins(scores: np.ndarray, labels: np.ndarray, document: np.ndarray) -> np.ndarray:
    """W (R, D, D) of scores (R, n); documents are numbered 0 … D−1."""
    count = document.max() + 1
    order = np.argsort(document, kind="stable")
    sides = [order[labels[order] == label] for label in (1, 0)]
    (winners, first), (losers, second) = (np.unique(document[side], return_index=True) for side in sides)
    wins = np.zeros((len(scores), count, count))
    for total, row in zip(wins, scores, strict=True):
        high, low = row[sides[0], None], row[sides[1]]
        halves = (high > low).view(np.int8) + (high >= low).view(np.int8)  # 2 for a win, 1 for a tie
        by_loser = np.add.reduceat(halves, second, axis=1, dtype=np.int32)
        total[np.ix_(winners, losers)] = np.add.reduceat(by_loser, first, axis=0) / 2
    return wins


@dataclass(frozen=True, eq=False)
class Result:
    """Out-of-fold scores of one detector, and what follows from them.

    Attributes:
        detector, protocol: by name.
        rows: (n,) table of the texts: `doc`, `kind`, `label`, ….
        scores: (R, n) out-of-fold scores of each repeat, higher for watermarked; R = 1 where nothing was learned.
        fold: (R, n) which classifier of the repeat scored a text; a document's texts share it.
        reliable: False where texts have fewer than 25 scored tokens.
    """

    detector: str
    protocol: str
    rows: pd.DataFrame
    scores: np.ndarray
    fold: np.ndarray
    reliable: bool = True

    @cached_property
    def documents(self) -> np.ndarray:
        """(n,) documents numbered 0 … D−1."""
        return np.unique(self.rows["doc"], return_inverse=True)[1]

    @cached_property
    def wins(self) -> np.ndarray:
        """W (R, D, D) of each repeat."""
        return _wins(self.scores, self.rows["label"].to_numpy(), self.documents) * self._same

    @cached_property
    def comparisons(self) -> np.ndarray:
        """P (R, D, D) of each repeat."""
        labels, count = self.rows["label"].to_numpy(), self.documents.max() + 1
        positive, negative = (np.bincount(self.documents[labels == label], minlength=count) for label in (1, 0))
        return np.outer(positive, negative) * self._same

    @cached_property
    def _same(self) -> np.ndarray:
        """(R, D, D) whether one classifier scored both documents."""
        fold = self.fold[:, np.unique(self.documents, return_index=True)[1]]
        return fold[:, :, None] == fold[:, None, :]

    @cached_property
    def auc(self) -> float:
        """Of all repeats together."""
        return float(self.wins.sum() / self.comparisons.sum())

    @cached_property
    def se_repeats(self) -> float:
        """Standard error of the mean over repeats: the share of the splits alone; 0 where nothing was learned."""
        if len(self.scores) == 1:
            return 0.0
        each = self.wins.sum((1, 2)) / self.comparisons.sum((1, 2))
        return float(each.std(ddof=1) / np.sqrt(len(each)))

    @cached_property
    def bootstrap(self) -> np.ndarray:
        """(2000,) AUC of samples of documents drawn with replacement, the same samples for every result on these documents."""
        return self._resampled(_resampling(self.wins.shape[1]))

    @property
    def se(self) -> float:
        """Standard error over documents."""
        return float(np.nanstd(self.bootstrap))

    @property
    def ci(self) -> tuple[float, float]:
        """95 % interval over documents, by percentiles."""
        low, high = np.nanpercentile(self.bootstrap, [2.5, 97.5])
        return float(low), float(high)

    @cached_property
    def roc(self) -> pd.DataFrame:
        """False and true positive rate and threshold, `fpr`, `tpr`, `threshold`, of the score averaged over repeats."""
        return pd.DataFrame(
            dict(zip(("fpr", "tpr", "threshold"), roc_curve(self.rows["label"], self.scores.mean(0)), strict=True))
        )

    def against(self, negatives: str) -> Result:
        """The same scores with only these negatives: "human", "unwatermarked" or "both"."""
        mask = _against(self.rows, negatives)
        return replace(self, rows=self.rows[mask].reset_index(drop=True), scores=self.scores[:, mask], fold=self.fold[:, mask])

    def _resampled(self, weights: np.ndarray) -> np.ndarray:
        """AUC (B,) for weights (B, D) of the documents; nan where a sample lacks a class."""
        won, compared = (((weights @ sums.sum(0)) * weights).sum(1) for sums in (self.wins, self.comparisons))
        with np.errstate(invalid="ignore"):
            return won / compared


@lru_cache(maxsize=8)
def _resampling(documents: int) -> np.ndarray:
    """(2000, D) how often each document is drawn."""
    return np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), RESAMPLES).astype(float)


def _against(rows: pd.DataFrame, negatives: str) -> np.ndarray:
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives={negatives!r}: expected one of {', '.join(NEGATIVES)}")
    return np.ones(len(rows), bool) if negatives == "both" else rows["kind"].isin(["watermarked", negatives]).to_numpy()


@dataclass(frozen=True)
class Difference:
    """AUC of the first detector minus that of the second on the same texts.

    Attributes:
        value: the difference.
        se: its standard error over documents.
        ci: 95 % interval over documents, drawn in pairs.
    """

    value: float
    se: float
    ci: tuple[float, float]


def difference(first: Result, second: Result) -> Difference:
    """Paired difference of two results, `first` minus `second`.

    Raises:
        ValueError: the two did not judge the same texts.
    """
    columns = [name for name in ("doc", "kind", "segment", "llm", "paraphraser") if name in first.rows]
    if len(first.rows) != len(second.rows) or not first.rows[columns].equals(second.rows[columns]):
        raise ValueError(f"second: {second.detector} judged other texts than {first.detector}; their difference is not paired")
    gaps = first.bootstrap - second.bootstrap
    low, high = np.nanpercentile(gaps, [2.5, 97.5])
    return Difference(first.auc - second.auc, float(np.nanstd(gaps)), (float(low), float(high)))


def folds(rows: pd.DataFrame, groups: str = "doc", n_splits: int = 5, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stratified splits into training and test rows, with whole groups on one side.

    Args:
        rows: table with `doc`, `label` and the column `groups`.
        groups: column to split by: `doc`, or a coarser one such as `domain`.
        n_splits: ≥ 2.
        seed: of the shuffling.

    Yields:
        Boolean masks (n,) of the training and of the test rows.

    Raises:
        ValueError: one class only, fewer groups than folds, or a document on both sides.
    """
    check_size("n_splits", n_splits, 2)
    _check_classes(rows["label"].to_numpy())
    members = rows[[groups, "label"]].drop_duplicates()  # a group counts once per class, however many texts it has
    least = int(members["label"].value_counts().min())
    if least < n_splits:
        raise ValueError(f"{groups}: a class has {least} groups, expected at least as many as the {n_splits} folds")
    for held_out in _held_out(tuple(members[groups]), tuple(members["label"]), n_splits, seed):
        test = rows[groups].isin(held_out).to_numpy()
        check_apart(rows["doc"][~test], rows["doc"][test])
        yield ~test, test


@lru_cache(maxsize=64)
def _held_out(groups: tuple, labels: tuple, n_splits: int, seed: int) -> tuple[list, ...]:
    """The groups of each test fold; many detectors are judged on the same splits."""
    splitter = StratifiedGroupKFold(n_splits, shuffle=True, random_state=seed)
    return tuple([groups[i] for i in test] for _, test in splitter.split(groups, labels, groups))


def check_apart(train: pd.Series, test: pd.Series) -> None:
    """Refuse documents that occur both in training and in test."""
    both = sorted(set(train) & set(test))
    if both:
        raise ValueError(f"{len(both)} documents are in training and in test, the first {both[0]!r}: split by document")


def evaluate(
    texts: Corpus | Lineages,
    protocol: Protocol,
    detector: str | Detector,
    *,
    negatives: str = "both",
    groups: str = "doc",
    n_splits: int = 5,
    n_repeats: int = 5,
    seed: int = 0,
) -> Result:
    """Out-of-fold AUC of a detector under a protocol.

    Args:
        texts: a corpus, its texts taken whole, or what `segments` made of one.
        protocol: which texts of a chain the detector sees.
        detector: a name in `DETECTORS`, or one of your own.
        negatives: what stands against watermarked text, in training too; `Result.against` narrows it afterwards.
        groups: as for `folds`.
        n_splits: folds; classifiers are fitted on the others and score this one.
        n_repeats: cross-validations with other splits and other seeds of the classifier.
        seed: of the first; the following ones use seed + 1, ….

    Raises:
        ValueError: unknown names, a detector of lineages with `single`, one class only, too few documents.
    """
    detector = _named(detector)
    texts = _lineages(texts)
    texts = texts.take(_against(texts.rows, negatives)) if negatives != "both" else texts
    given = _given(texts, protocol, detector)
    if detector.estimator is None:
        _check_classes(texts.rows["label"].to_numpy())
        scores = detector.design(given)[None]
        fold = np.zeros(scores.shape, int)
    else:
        scores, fold = cross_validate(detector, detector.design(given), texts.rows, groups, n_splits, n_repeats, seed)
    return Result(detector.name, str(protocol), texts.rows, scores, fold, texts.reliable)


def cross_validate(
    detector: Detector,
    design: np.ndarray,
    rows: pd.DataFrame,
    groups: str = "doc",
    n_splits: int = 5,
    n_repeats: int = 5,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Out-of-fold scores (n_repeats, n) of a classifier on what its design read, (n, …), and in which fold each text was."""
    check_size("n_repeats", n_repeats, 1)
    labels, scores, fold = rows["label"].to_numpy(), np.empty((n_repeats, len(rows))), np.empty((n_repeats, len(rows)), int)
    for repeat in range(n_repeats):
        for number, (train, test) in enumerate(folds(rows, groups, n_splits, seed + repeat)):
            fitted = detector.estimator(seed + repeat).fit(design[train], labels[train])
            scores[repeat, test], fold[repeat, test] = score_with(fitted, design[test]), number
    return scores, fold


def transfer(
    texts: Lineages,
    protocol: Protocol,
    detector: str | Detector,
    train: np.ndarray,
    test: np.ndarray,
    *,
    n_splits: int = 5,
    seed: int = 0,
) -> Result:
    """Train on some chains and test on others; no document of the test is ever trained on.

    Where documents occur on both sides, those of the test are held out fold by fold.

    Args:
        texts: all chains.
        train, test: boolean masks (n,).
    """
    detector, rows = _named(detector), texts.rows
    given = _given(texts, protocol, detector)
    for side, mask in {"train": train, "test": test}.items():
        if set(rows["label"][mask]) != {0, 1}:
            raise ValueError(
                f"{side}: got {mask.sum()} chains of {rows['label'][mask].nunique()} classes, expected both classes"
            )
    design, labels = detector.design(given), rows["label"].to_numpy()
    scores, fold = np.full((1, len(rows)), np.nan), np.zeros((1, len(rows)), int)
    if detector.estimator is None:
        scores[0] = design
    else:
        for number, (fitted_on, judged) in enumerate(_apart(rows, train, test, n_splits, seed)):
            fitted = detector.estimator(seed).fit(design[fitted_on], labels[fitted_on])
            scores[0, judged], fold[0, judged] = score_with(fitted, design[judged]), number
    kept = rows[test].reset_index(drop=True)
    return Result(detector.name, str(protocol), kept, scores[:, test], fold[:, test], texts.reliable)


def _apart(
    rows: pd.DataFrame, train: np.ndarray, test: np.ndarray, n_splits: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Masks of training and test rows whose documents are disjoint and whose tests make up `test`."""
    if not set(rows["doc"][train]) & set(rows["doc"][test]):
        yield train, test
        return
    tested = rows[test]
    for _, fold in folds(tested, "doc", n_splits, seed):
        held_out = rows["doc"].isin(tested["doc"][fold]).to_numpy()
        yield train & ~held_out, test & held_out


def _named(detector: str | Detector) -> Detector:
    if isinstance(detector, Detector):
        return detector
    if detector not in DETECTORS:
        raise ValueError(f"detector={detector!r}: expected one of {', '.join(DETECTORS)}")
    return DETECTORS[detector]


def _lineages(texts: Corpus | Lineages) -> Lineages:
    return texts if isinstance(texts, Lineages) else segments(texts, texts.bits.shape[1], most=1)


def _given(texts: Lineages, protocol: Protocol, detector: Detector) -> Lineages:
    given = texts.given(protocol)
    if detector.lineage and len(given.depths) < 2:
        raise ValueError(f"detector={detector.name!r}: a lineage needs at least 2 texts, got {protocol}")
    return given


# A detector to keep


@dataclass(frozen=True, eq=False)
class FittedDetector:
    """A classifier that knows what it was fitted on, and refuses anything else.

    Attributes:
        detector: its name in `DETECTORS`.
        estimator: the fitted scikit-learn classifier.
        gamma, size, stride: green share, window and stride of its features.
        length: T, scored tokens per text.
        texts: K, texts of a lineage.
    """

    detector: str
    estimator: Estimator
    gamma: float
    size: int
    stride: int
    length: int
    texts: int

    def score(self, bits: np.ndarray, *, gamma: float = 0.25, size: int | None = None, stride: int | None = None) -> np.ndarray:
        """Probability (n,) of a watermark, at the odds of the training set.

        Args:
            bits: (n, T), or (n, K, T) of lineages.
            gamma: green share that the bits were made with.
            size, stride: windows to be used; None is those of the training.

        Raises:
            ValueError: γ, W, S, T or the number of texts differ from those of the training.
        """
        bits = np.asarray(bits)
        bits = bits[:, None] if bits.ndim == 2 else bits
        found = {"gamma": gamma, "size": size or self.size, "stride": stride or self.stride}
        found |= {"length": bits.shape[-1], "texts": bits.shape[1]}
        wrong = [
            f"{name}={value} (fitted with {getattr(self, name)})"
            for name, value in found.items()
            if value != getattr(self, name)
        ]
        if wrong:
            raise ValueError(f"{self.detector} was fitted in another setting: got {', '.join(wrong)}")
        rows = pd.DataFrame(index=range(len(bits)))
        windows = {"gamma": self.gamma, "size": self.size, "stride": self.stride}
        texts = Lineages(rows, bits, np.ones_like(bits), tuple(range(self.texts)), **windows)
        return self.estimator.predict_proba(DETECTORS[self.detector].design(texts))[:, 1]

    def save(self, path: Path) -> None:
        """Write a logistic regression as JSON.

        Raises:
            ValueError: the classifier is of another kind.
        """
        if not hasattr(self.estimator, "named_steps") or "logisticregression" not in self.estimator.named_steps:
            raise ValueError(
                f"detector={self.detector!r}: only logistic regressions are written, boosting is refitted in seconds"
            )
        scaler, model = self.estimator.named_steps.values()
        weights = {"mean": scaler.mean_, "scale": scaler.scale_, "coefficients": model.coef_[0], "intercept": model.intercept_}
        setting = {name: value for name, value in vars(self).items() if name != "estimator"}
        with replacing(path) as partial:
            partial.write_text(
                json.dumps(setting | {name: value.tolist() for name, value in weights.items()}), encoding="utf-8"
            )

    @classmethod
    def load(cls, path: Path) -> FittedDetector:
        """Read what `save` wrote."""
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        weights = {name: np.array(stored.pop(name)) for name in ("mean", "scale", "coefficients", "intercept")}
        pipeline = DETECTORS[stored["detector"]].estimator(0)
        scaler, model = pipeline.named_steps.values()
        scaler.mean_, scaler.scale_, scaler.n_features_in_ = weights["mean"], weights["scale"], len(weights["mean"])
        model.coef_, model.intercept_, model.classes_ = weights["coefficients"][None], weights["intercept"], np.array([0, 1])
        return cls(estimator=pipeline, **stored)


def fit(texts: Lineages, protocol: Protocol, detector: str = "static+lr", *, seed: int = 0) -> FittedDetector:
    """Fit a detector on all chains, to be used on new text.

    Raises:
        ValueError: the detector does not learn, or there is one class only.
    """
    found = _named(detector)
    if found.estimator is None:
        raise ValueError(f"detector={detector!r}: has nothing to fit")
    given, labels = _given(texts, protocol, found), texts.rows["label"].to_numpy()
    _check_classes(labels)
    estimator = found.estimator(seed).fit(found.design(given), labels)
    return FittedDetector(
        found.name, estimator, texts.gamma, texts.size, texts.stride, length=texts.length, texts=len(given.depths)
    )

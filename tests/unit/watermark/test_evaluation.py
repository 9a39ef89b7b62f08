import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from labkit.watermark import (
    DETECTORS,
    Detector,
    Lineages,
    auc,
    difference,
    evaluate,
    fit,
    folds,
    prefix,
    probe,
    segments,
    single,
    transfer,
)
from labkit.watermark.detectors import logistic
from labkit.watermark.evaluation import FittedDetector, check_apart
from tests.unit.watermark.chains import channel_lineages, synthetic_corpus

SINGLE = ("z", "z_unique", "winmax", "static+lr", "static+xgb")


@pytest.fixture(scope="module")
def chains():
    return segments(synthetic_corpus(docs=20, length=80), 40)


# Truth 14: AUC


def tied_scores(n=60, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 3 == 0).astype(int)
    return rng.integers(0, 6, n) + labels, labels


def test_auc_is_scikit_learns():
    scores, labels = tied_scores()
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_of_flipped_labels_is_the_rest():
    scores, labels = tied_scores()
    assert auc(scores, 1 - labels) == pytest.approx(1 - auc(scores, labels), abs=1e-12)


@pytest.mark.parametrize("transform", [np.exp, lambda s: s**3 + 2 * s, np.arctan])
def test_auc_does_not_change_under_monotone_transforms(transform):
    scores, labels = tied_scores()
    assert auc(transform(scores), labels) == auc(scores, labels)


def test_auc_needs_both_classes():
    with pytest.raises(ValueError, match=r"labels: got the classes \[1\], expected both 0 and 1"):
        auc(np.arange(3), np.ones(3, int))


# The bootstrap over documents


def test_weights_of_documents_are_weights_of_their_texts(chains):
    result = evaluate(chains, single(4), "z")
    weights = np.random.default_rng(0).integers(0, 4, (3, 20)).astype(float)
    found = result._resampled(weights)
    for row, value in zip(weights, found, strict=True):
        by_hand = roc_auc_score(result.rows["label"], result.scores[0], sample_weight=row[result.documents])
        assert value == pytest.approx(by_hand, abs=1e-12)


def test_standard_error_is_that_of_drawing_documents_anew():
    errors, aucs = [], []
    for seed in range(60):
        result = evaluate(channel_lineages(n=60, length=40, depth=1, rate=0.35, seed=10 * seed), single(0), "z")
        errors.append(result.se)
        aucs.append(result.auc)
    assert np.mean(errors) == pytest.approx(np.std(aucs), rel=0.3)


def test_interval_covers_the_estimate_and_repeats_itself(chains):
    first, second = (evaluate(chains, single(4), "static+lr", n_repeats=2) for _ in range(2))
    assert first.ci[0] < first.auc < first.ci[1]
    assert (first.auc, first.ci) == (second.auc, second.ci)
    assert first.scores.shape == (2, len(chains))
    assert first.se_repeats > 0
    assert evaluate(chains, single(4), "z").se_repeats == 0


def test_result_against_one_kind_keeps_scores(chains):
    result = evaluate(chains, single(4), "z")
    parts = [result.against(kind) for kind in ("human", "unwatermarked")]
    assert result.auc == pytest.approx(np.mean([part.auc for part in parts]), abs=1e-12)  # equally many of both
    assert set(parts[0].rows["kind"]) == {"watermarked", "human"}
    curve = parts[0].roc
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(parts[0].auc, abs=1e-12)


def test_difference_of_a_result_with_itself_is_nothing(chains):
    result = evaluate(chains, single(4), "z")
    gap = difference(result, result)
    assert (gap.value, gap.se, gap.ci) == (0, 0, (0, 0))


def test_pairing_narrows_the_interval_of_two_detectors_that_agree(chains):
    first, second = evaluate(chains, single(4), "z"), evaluate(chains, single(4), "static+lr", n_repeats=2)
    gap = difference(first, second)
    assert gap.value == pytest.approx(first.auc - second.auc)
    assert gap.ci[0] < gap.value < gap.ci[1]
    assert gap.se < 0.9 * np.hypot(first.se, second.se)


def test_difference_needs_the_same_texts(chains):
    result = evaluate(chains, single(4), "z")
    with pytest.raises(ValueError, match="judged other texts"):
        difference(result, result.against("human"))


# Cross-validation


def noise(docs=24, width=12, seed=0):
    rng = np.random.default_rng(seed)
    rows = pd.DataFrame({"doc": np.repeat(np.arange(docs), 2), "label": np.tile([0, 1], docs)})
    rows["kind"] = np.where(rows["label"] == 1, "watermarked", "unwatermarked")
    design = rng.normal(size=(2 * docs, width))
    bits = np.zeros((2 * docs, 1, 30), np.uint8)
    return Lineages(rows, bits, np.ones_like(bits), (0,)), Detector("noise", lambda texts: design, logistic())


def test_nothing_to_learn_gives_one_half():
    found = [evaluate(*(noise(seed=seed)[0], single(0), noise(seed=seed)[1]), n_repeats=1).auc for seed in range(60)]
    assert abs(np.mean(found) - 0.5) < 3 * np.std(found) / np.sqrt(len(found))


def test_scores_of_different_classifiers_are_not_compared():
    texts, _ = noise(docs=10)
    shifted = Detector("offset", lambda given: np.arange(20.0)[:, None], lambda seed: _Offset())
    result = evaluate(texts, single(0), shifted, n_splits=5, n_repeats=3)
    assert result.auc == 1.0  # within a fold the classifier is perfect, whatever it adds to all scores


class _Offset:
    """Scores labels perfectly, up to a constant that hangs on the training rows."""

    def fit(self, design, labels):
        self.offset = 1000 * design.sum()
        return self

    def decision_function(self, design):
        return design[:, 0] % 2 + self.offset


# Truth 15: documents stay on one side


@pytest.mark.parametrize("groups", ["doc", "domain"])
def test_folds_share_no_document_and_cover_all_rows(chains, groups):
    n_splits = 5 if groups == "doc" else 3
    seen = np.zeros(len(chains), int)
    for train, test in folds(chains.rows, groups, n_splits):
        assert not set(chains.rows["doc"][train]) & set(chains.rows["doc"][test])
        assert set(chains.rows["label"][test]) == {0, 1}
        np.testing.assert_array_equal(train, ~test)
        seen += test
    assert (seen == 1).all()


def test_a_planted_leak_is_refused(chains):
    with pytest.raises(ValueError, match=r"documents are in training and in test.*split by document"):
        list(folds(chains.rows, "segment", 2))
    with pytest.raises(ValueError, match="1 documents are in training and in test, the first 3"):
        check_apart(pd.Series([1, 2, 3]), pd.Series([3, 4]))


def test_one_class_is_refused_before_fitting(chains):
    only = chains.take((chains.rows["label"] == 1).to_numpy())
    for name in ("z", "static+lr"):
        with pytest.raises(ValueError, match=r"labels: got the classes \[1\]"):
            evaluate(only, single(0), name)


def test_fewer_documents_than_folds_are_refused(chains):
    few = chains.take((chains.rows["doc"] < 4).to_numpy())
    with pytest.raises(ValueError, match="doc: a class has 4 groups, expected at least as many as the 5 folds"):
        evaluate(few, single(0), "static+lr")


def test_unknown_names_are_listed(chains):
    with pytest.raises(ValueError, match="detector='zz': expected one of z, z_unique"):
        evaluate(chains, single(0), "zz")
    with pytest.raises(ValueError, match="negatives='none': expected one of human, unwatermarked, both"):
        evaluate(chains, single(0), "z", negatives="none")


@pytest.mark.parametrize("name", [name for name, detector in DETECTORS.items() if detector.lineage])
def test_a_detector_of_lineages_refuses_one_text(chains, name):
    with pytest.raises(ValueError, match="a lineage needs at least 2 texts"):
        evaluate(chains, single(0), name)


def test_a_corpus_is_taken_whole():
    corpus = synthetic_corpus(docs=10, length=60, depth=2)
    assert evaluate(corpus, single(1), "z").auc == evaluate(segments(corpus, 60), single(1), "z").auc
    assert not evaluate(synthetic_corpus(docs=10, length=24, depth=1), single(1), "z").reliable


# Truth 6: on independent bits the count says it all


@pytest.mark.parametrize("depth", [1, 4])
def test_no_single_text_detector_beats_z_on_independent_bits(depth):
    texts = channel_lineages(n=250, length=60, depth=4, rate=0.45)
    best = evaluate(texts, single(depth), "z")
    for name in ("winmax", "static+lr", "static+xgb"):
        gap = difference(evaluate(texts, single(depth), name, n_repeats=1), best)
        assert gap.value < 3 * gap.se


def test_order_of_the_bits_moves_local_features_but_not_z():
    texts = channel_lineages(n=20, length=80, depth=0)
    order = np.random.default_rng(0).permutation(80)
    shuffled = Lineages(texts.rows, texts.bits[..., order], texts.fresh, texts.depths)
    np.testing.assert_array_equal(shuffled.z, texts.z)
    moved = np.abs(shuffled.static - texts.static).max(0) > 1e-9
    assert moved[:-1].all()
    assert not moved[-1]


def test_probing_cannot_beat_the_best_detector_of_the_text_itself():
    texts = channel_lineages(n=250, length=60, depth=4, rate=0.45)
    best = evaluate(texts, single(2), "z")
    for name in ("pss+static+lr", "lr_z", "z_mean"):
        gap = difference(evaluate(texts, probe(2, 2), name, n_repeats=1), best)
        assert gap.value < 3 * gap.se


# Truth 16: without the key nothing is told apart


def test_with_a_wrong_key_every_detector_is_at_chance():
    corpus = synthetic_corpus(docs=40, length=80)
    blind = segments(type(corpus)(corpus.rows, corpus.wrong_bits, corpus.bits, corpus.fresh, corpus.ids), 40)
    for name in DETECTORS:
        if name in ("cnn", "pss+static+xgb600"):
            continue
        protocol = prefix(8) if DETECTORS[name].lineage else single(0)
        result = evaluate(blind, protocol, name, negatives="unwatermarked", n_repeats=1)
        assert abs(result.auc - 0.5) < 3 * result.se, name


def test_with_the_right_key_they_are_not():
    chains = segments(synthetic_corpus(docs=20, length=80), 40)
    for name in SINGLE:
        assert evaluate(chains, single(0), name, n_repeats=1).auc > 0.9, name


# Transfer


def test_transfer_trains_here_and_tests_there():
    corpus = synthetic_corpus(docs=30, length=40, paraphrasers=("strong", "wordnet"))
    texts = segments(corpus, 40)
    news, other = (texts.rows["domain"] == "news").to_numpy(), (texts.rows["domain"] == "fiction").to_numpy()
    result = transfer(texts, prefix(8), "pss+static+lr", news, other)
    fitted = fit(texts.take(news), prefix(8), "pss+static+lr")
    expected = fitted.score(texts.bits[other][:, 1:])
    np.testing.assert_allclose(1 / (1 + np.exp(-result.scores[0])), expected, atol=1e-9)
    assert set(result.rows["domain"]) == {"fiction"}
    assert transfer(texts, prefix(8), "z", news, other).auc == evaluate(texts.take(other), prefix(8), "z").auc


def test_transfer_holds_documents_out_that_are_on_both_sides():
    corpus = synthetic_corpus(docs=12, length=40, paraphrasers=("strong", "wordnet"))
    texts = segments(corpus, 40)
    seen = []

    class Spy:
        def fit(self, design, labels):
            self.known = set(design[:, 0])
            return self

        def decision_function(self, design):
            seen.append((self.known, set(design[:, 0])))
            return design[:, 0]

    spy = Detector("spy", lambda given: given.rows[["doc"]].to_numpy(float), lambda seed: Spy())
    here, there = ((texts.rows["paraphraser"] == name).to_numpy() for name in ("strong", "wordnet"))
    result = transfer(texts, single(0), spy, here, there)
    assert len(seen) == 5
    assert all(not known & judged for known, judged in seen)
    assert np.isfinite(result.scores).all()


def test_transfer_needs_both_classes_on_both_sides(chains):
    marked = (chains.rows["label"] == 1).to_numpy()
    with pytest.raises(ValueError, match="train: got 40 chains of 1 classes, expected both"):
        transfer(chains, single(0), "z", marked, np.ones(len(chains), bool))


# A detector to keep


def test_a_fitted_detector_survives_the_disk(chains, tmp_path):
    fitted = fit(chains, prefix(4), "pss+static+lr")
    fitted.save(tmp_path / "detector.json")
    again = FittedDetector.load(tmp_path / "detector.json")
    bits = chains.bits[:, 1:5]
    np.testing.assert_array_equal(again.score(bits), fitted.score(bits))
    assert ((again.score(bits) > 0) & (again.score(bits) < 1)).all()
    assert auc(fitted.score(bits), chains.rows["label"].to_numpy()) > 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0.5}, r"gamma=0.5 \(fitted with 0.25\)"),
        ({"size": 50}, r"size=50 \(fitted with 25\)"),
        ({"stride": 10}, r"stride=10 \(fitted with 5\)"),
        ({"gamma": 0.5, "stride": 10}, r"gamma=0.5 \(fitted with 0.25\), stride=10 \(fitted with 5\)"),
    ],
)
def test_a_fitted_detector_refuses_another_setting(chains, change, message):
    fitted = fit(chains, single(2), "static+lr")
    with pytest.raises(ValueError, match=message):
        fitted.score(chains.bits[:, 2], **change)


def test_a_fitted_detector_refuses_other_lengths_and_lineages(chains):
    with pytest.raises(ValueError, match=r"length=39 \(fitted with 40\)"):
        fit(chains, single(2), "static+lr").score(chains.bits[:, 2, :39])
    with pytest.raises(ValueError, match=r"texts=1 \(fitted with 3\)"):
        fit(chains, prefix(3), "pss_only").score(chains.bits[:, 2])


def test_only_logistic_regressions_are_written_and_only_learners_fitted(chains, tmp_path):
    with pytest.raises(ValueError, match="only logistic regressions are written"):
        fit(chains, single(0), "static+xgb").save(tmp_path / "detector.json")
    with pytest.raises(ValueError, match="detector='z': has nothing to fit"):
        fit(chains, single(0), "z")

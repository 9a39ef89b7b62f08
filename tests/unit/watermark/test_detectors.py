import numpy as np
import pytest

from labkit.watermark import DETECTORS, FEATURES, evaluate, prefix, pss, single
from labkit.watermark.detectors import BLOCKS, score_with
from tests.unit.watermark.chains import channel_lineages


@pytest.fixture(scope="module")
def chains():
    return channel_lineages(n=60, length=60, depth=4)


def test_blocks_are_disjoint_and_leave_the_global_z():
    named = [name for block in BLOCKS.values() for name in block]
    assert len(named) == len(set(named)) == 20
    assert set(FEATURES) - set(named) == {"z_global"}


@pytest.mark.parametrize(
    ("name", "width"),
    [("static+lr", 21), ("pss+static+lr", 23), ("pss_only", 2), ("lr_z", 4), ("pss+z+lr", 27), ("compact+lr", 24)]
    + [(f"no {block}", 23 - len(names)) for block, names in BLOCKS.items()],
)
def test_designs_have_one_row_per_lineage(chains, name, width):
    design = DETECTORS[name].design(chains.given(prefix(4)))
    assert design.shape == (120, width)
    assert np.isfinite(design).all()


def test_the_method_is_static_features_of_the_first_text_and_pss_of_all(chains):
    given = chains.given(prefix(4))
    design = DETECTORS["pss+static+lr"].design(given)
    np.testing.assert_array_equal(design[:, :21], chains.given(single(1)).static)
    np.testing.assert_array_equal(design[:, 21:], pss(given.local_z))


def test_pss_of_identical_texts_is_zero_so_that_it_cannot_tell_them_apart():
    still = channel_lineages(n=30, length=60, depth=3, q=0.0)
    assert not DETECTORS["pss_only"].design(still.given(prefix(3))).any()
    assert evaluate(still, prefix(3), "pss_only", n_repeats=1).auc == 0.5


def test_tests_in_a_lineage_judge_the_text_in_question_and_baselines_the_first_or_all(chains):
    given = chains.given(prefix(4))
    np.testing.assert_array_equal(DETECTORS["z"].design(given), chains.z[:, 4])
    np.testing.assert_array_equal(DETECTORS["winmax"].design(given), chains.winmax[:, 4])
    np.testing.assert_array_equal(DETECTORS["z@first"].design(given), chains.z[:, 1])
    np.testing.assert_allclose(DETECTORS["z_mean"].design(given), chains.z[:, 1:].mean(1), rtol=1e-12)


@pytest.mark.parametrize("name", ["static+lr", "static+xgb", "cnn"])
def test_a_classifier_scores_the_watermarked_higher_and_repeats_itself(chains, name):
    given, labels = chains.given(single(0)), chains.rows["label"].to_numpy()
    design = DETECTORS[name].design(given)
    scores = [score_with(DETECTORS[name].estimator(seed).fit(design, labels), design) for seed in (3, 3)]
    np.testing.assert_array_equal(*scores)
    assert scores[0][labels == 1].mean() > scores[0][labels == 0].mean()


def test_the_network_is_small():
    labels = np.array([0, 1])
    network = DETECTORS["cnn"].estimator(0).fit(np.zeros((2, 8, 40)), labels)
    assert sum(weight.numel() for weight in network.net_.parameters()) < 5000

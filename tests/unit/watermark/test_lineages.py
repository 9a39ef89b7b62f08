import numpy as np
import pytest

from labkit.watermark import (
    Lineages,
    local_stats,
    prefix,
    probe,
    segments,
    single,
    static_features,
    suffix,
    window_preset,
    winmax,
    z_score,
)
from tests.unit.watermark.chains import channel_lineages, synthetic_corpus, taken

NINE = range(9)


@pytest.mark.parametrize(
    ("protocol", "depths", "question"),
    [
        (single(3), (3,), 3),
        (prefix(2), (1, 2), 2),
        (prefix(8), tuple(range(1, 9)), 8),
        (suffix(7), (7, 8), 8),
        (probe(4, 2), (4, 5, 6), 4),
    ],
)
def test_a_protocol_opens_these_depths_and_judges_this_one(protocol, depths, question):
    assert protocol.depths(NINE) == depths
    assert protocol.text_in_question(NINE) == question


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefix_is_a_lineage_of_at_least_two(depth):
    with pytest.raises(ValueError, match=rf"depth={depth}: expected an int >= 2"):
        prefix(depth)


def test_a_suffix_of_the_last_text_alone_is_refused():
    with pytest.raises(ValueError, match=r"suffix\(8\): a lineage needs at least 2 texts"):
        suffix(8).depths(NINE)


@pytest.mark.parametrize(("protocol", "missing"), [(single(9), "9"), (prefix(10), "9, 10"), (probe(7), "9, 10")])
def test_missing_depths_are_named(protocol, missing):
    with pytest.raises(ValueError, match=rf"depths \[{missing}\] are missing"):
        protocol.depths(NINE)


def test_segments_keep_bits_documents_and_depths_together():
    corpus = synthetic_corpus(docs=3, length=50, depth=2)
    texts = segments(corpus, 20)
    assert texts.bits.shape == (3 * 3 * 2, 3, 20)
    assert (texts.size, texts.stride) == window_preset(20) == (25, 5)
    for k in (0, 7, 17):
        row = texts.rows.iloc[k]
        same = (corpus.rows["doc"] == row["doc"]) & (corpus.rows["kind"] == row["kind"])
        start = 20 * row["segment"]
        np.testing.assert_array_equal(texts.bits[k], corpus.bits[same][:, start : start + 20])


def test_rows_of_a_corpus_may_come_in_any_order():
    corpus = synthetic_corpus(docs=4, length=30, depth=2)
    order = np.random.default_rng(0).permutation(len(corpus))
    shuffled = taken(corpus, order)
    a, b = segments(corpus, 30), segments(shuffled, 30)
    np.testing.assert_array_equal(a.bits, b.bits)
    assert a.rows.equals(b.rows)


def test_texts_of_unequal_length_are_refused():
    corpus = synthetic_corpus(docs=3, length=50, depth=2)
    corpus.rows.loc[4, "length"] = 39
    with pytest.raises(ValueError, match=r"length=40: 1 texts are shorter.*truncate to a common T first"):
        segments(corpus, 40)


def test_a_chain_that_lacks_a_depth_is_named():
    corpus = synthetic_corpus(docs=3, length=30, depth=2)
    rest = (corpus.rows["doc"] == 1) & (corpus.rows["depth"] == 1) & (corpus.rows["kind"] == "human")
    broken = taken(corpus, np.flatnonzero(~rest))
    with pytest.raises(ValueError, match=r"strong, kind human, doc 1 has depths \[0, 2\], others have \[0, 1, 2\]"):
        segments(broken, 30)


def test_what_is_read_off_a_view_is_that_of_its_texts():
    texts = channel_lineages(n=5, length=60, depth=4)
    view = texts.given(suffix(2))
    np.testing.assert_array_equal(view.bits, texts.bits[:, 2:])
    np.testing.assert_array_equal(view.z, z_score(texts.bits[:, 2:], 0.25))
    np.testing.assert_array_equal(view.winmax, winmax(texts.bits[:, 2:], 0.25, min_len=10))
    np.testing.assert_array_equal(view.local_z, local_stats(texts.bits[:, 2:], 0.25, 50, 10).z)
    np.testing.assert_array_equal(view.static, static_features(texts.bits[:, 2], 0.25, 50, 10))
    some = np.arange(10) % 2 == 0
    np.testing.assert_array_equal(view.take(some).z, view.z[some])


def test_z_of_distinct_bigrams_leaves_repeats_out():
    texts = channel_lineages(n=2, length=40, depth=1)
    fresh = np.zeros_like(texts.bits)
    fresh[:, :, :25] = 1
    fresh[0] = 0  # a text that only repeats what stood before says nothing
    texts = Lineages(texts.rows, texts.bits, fresh, texts.depths)
    np.testing.assert_array_equal(texts.z_unique[1:], z_score(texts.bits[1:, :, :25], 0.25))
    np.testing.assert_array_equal(texts.z_unique[0], 0)


@pytest.mark.parametrize(("length", "reliable"), [(24, False), (25, True)])
def test_short_texts_are_marked_as_unreliable(length, reliable):
    assert channel_lineages(n=2, length=length, depth=1).reliable is reliable


def test_shapes_must_agree():
    texts = channel_lineages(n=2, length=30, depth=1)
    with pytest.raises(ValueError, match=r"bits: got shape \(4, 2, 30\), expected \(4, 3, T\)"):
        Lineages(texts.rows, texts.bits, texts.fresh, (0, 1, 2))
    with pytest.raises(ValueError, match="fresh: got shape"):
        Lineages(texts.rows, texts.bits, texts.fresh[..., :-1], (0, 1))

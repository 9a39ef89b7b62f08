import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from labkit.watermark import copy_paste, expected_runs, lineage, redraw, winmax, z_score


def changed(q, bursts=None, n=2000, length=400):
    """Where all-red bits, redrawn green, turn: the redrawn positions themselves."""
    return redraw(np.zeros((n, length)), q, 1.0, np.random.default_rng(0), bursts=bursts)


@pytest.mark.parametrize("bursts", [None, 2.0, 12.0])
@pytest.mark.parametrize("q", [0.0, 0.1, 0.3, 0.6])
def test_each_position_is_redrawn_with_probability_q(q, bursts):
    hit = changed(q, bursts)
    assert hit.dtype == np.uint8
    for position in (0, 1, 200, 399):
        assert hit[:, position].mean() == pytest.approx(q, abs=4 * np.sqrt(q * (1 - q) / 2000))


def test_bursts_have_their_mean_length():
    hit = changed(0.3, bursts=12.0).astype(int)
    starts = np.diff(hit, axis=1) == 1
    ends = np.diff(hit, axis=1) == -1
    assert hit[:, 1:-1].sum() / ((starts.sum() + ends.sum()) / 2) == pytest.approx(12, rel=0.05)


def test_without_bursts_runs_are_those_of_independent_bits():
    hit = changed(0.3).astype(int)
    runs = np.diff(hit, axis=1, prepend=0).clip(0).sum(1)
    assert runs.mean() == pytest.approx(expected_runs(0.3, 400), abs=4 * stats.sem(runs))


def test_redrawn_bits_are_green_at_their_rate():
    bits = redraw(np.ones((500, 200)), 1.0, 0.25, np.random.default_rng(0), bursts=3.0)
    assert bits.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 100_000))


def test_a_chain_fades_to_the_green_fraction():
    chains = lineage(500, 200, 0.6, 0.3, 8, seed=0)
    assert chains.shape == (500, 9, 200)
    assert chains.dtype == np.uint8
    expected = 0.25 + 0.35 * 0.7 ** np.arange(9)
    assert np.abs(chains.mean((0, 2)) - expected).max() < 4 * np.sqrt(0.25 / 100_000)


def test_consecutive_texts_share_what_was_not_redrawn():
    first, second = lineage(500, 200, 0.25, 0.3, 1, seed=0).swapaxes(0, 1).astype(float)
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("bursts", [None, 12.0])
def test_bursts_do_not_change_the_rate_of_fading(bursts):
    chains = lineage(2000, 100, 0.6, 0.3, 4, seed=0, bursts=bursts)
    assert z_score(chains, 0.25).mean(0) == pytest.approx(0.7 ** np.arange(5) * 8.083, abs=0.15)


def test_equal_seeds_give_equal_chains():
    assert np.array_equal(lineage(5, 50, 0.5, 0.3, 2, seed=1, bursts=4), lineage(5, 50, 0.5, 0.3, 2, seed=1, bursts=4))
    assert not np.array_equal(lineage(5, 50, 0.5, 0.3, 2, seed=1), lineage(5, 50, 0.5, 0.3, 2, seed=2))
    assert np.array_equal(lineage(5, 50, 0.5, 0.3, 4, seed=1)[:, :3], lineage(5, 50, 0.5, 0.3, 2, seed=1))


def test_a_pasted_stretch_is_where_winmax_beats_z():
    marked, host, null = (lineage(1000, 400, p, 0, 0, seed=s)[:, 0] for s, p in enumerate((0.7, 0.25, 0.25)))
    pasted = copy_paste(marked, host, 30, np.random.default_rng(0))
    assert ((pasted != host).sum(1) <= 30).all()
    label, bits = np.repeat([1, 0], 1000), np.concatenate([pasted, null])
    assert roc_auc_score(label, winmax(bits, 0.25, 10)) > roc_auc_score(label, z_score(bits, 0.25)) + 0.02


def test_a_pasted_stretch_is_contiguous_and_may_be_the_text():
    marked, host, generator = np.ones((300, 50)), np.zeros((300, 50)), np.random.default_rng(0)
    pasted = copy_paste(marked, host, 20, generator)
    edges = np.abs(np.diff(pasted.astype(int), axis=1, prepend=0, append=0)).sum(1)
    assert (pasted.sum(1) == 20).all()
    assert (edges == 2).all()
    assert pasted.any(0).all()
    assert copy_paste(marked, host, 50, generator).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: redraw([0, 2], 0.3, 0.25, g), "expected 0 and 1 only"),
        (lambda g: redraw([0, 1], 1.3, 0.25, g), "q=1.3"),
        (lambda g: redraw([0, 1], 0.3, -0.1, g), "p=-0.1"),
        (lambda g: redraw([0, 1], 0.3, 0.25, g, bursts=0.5), "bursts=0.5: expected a mean length >= 1"),
        (lambda g: redraw([0, 1], 0.9, 0.25, g, bursts=8.0), "bursts=8.0"),
        (lambda g: lineage(0, 50, 0.5, 0.3, 2, 0), "n=0"),
        (lambda g: lineage(5, 0, 0.5, 0.3, 2, 0), "length=0"),
        (lambda g: lineage(5, 50, 0.5, 0.3, -1, 0), "depth=-1"),
        (lambda g: lineage(5, 50, 1.5, 0.3, 2, 0), "p=1.5"),
        (lambda g: lineage(5, 50, 0.5, 0.3, 2, -1), "seed=-1"),
        (lambda g: lineage(5, 50, 0.5, 0.3, 2, 0, gamma=0), "gamma=0"),
        (lambda g: copy_paste(np.ones((2, 9)), np.zeros((2, 8)), 3, g), r"expected \(n, T\) twice"),
        (lambda g: copy_paste(np.ones((2, 9)), np.zeros((2, 9)), 10, g), "length=10: expected at most the 9"),
        (lambda g: copy_paste(np.ones((2, 9)), np.zeros((2, 9)), 0, g), "length=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.random.default_rng(0))

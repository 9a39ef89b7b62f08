from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from labkit.watermark import best_window, fresh, p_value, winmax, z_score, z_unique
from tests.unit.watermark.zipf import zipf_texts


def random_bits(*shape, p=0.35, seed=0):
    """Independent green bits."""
    return (np.random.default_rng(seed).random(shape) < p).astype(np.uint8)


def winmax_by_hand(bits, gamma, min_len):
    """Every stretch, one after another."""
    best = -np.inf
    for start in range(len(bits)):
        for end in range(start + min_len, len(bits) + 1):
            length = end - start
            best = max(best, (bits[start:end].sum() - gamma * length) / np.sqrt(length * gamma * (1 - gamma)))
    return best


def test_z_of_all_green_all_red_and_as_many_as_expected():
    assert z_score(np.ones(100), 0.25) == pytest.approx(np.sqrt(100 * 0.75 / 0.25)) == pytest.approx(17.3205, abs=1e-4)
    assert z_score(np.zeros(100), 0.25) == pytest.approx(-np.sqrt(100 * 0.25 / 0.75)) == pytest.approx(-5.7735, abs=1e-4)
    assert z_score(np.arange(100) % 4 == 0, 0.25) == 0


def test_z_scores_all_texts_at_once():
    bits = random_bits(3, 4, 50)
    assert np.array_equal(z_score(bits, 0.25), [[z_score(text, 0.25) for text in chain] for chain in bits])


def test_z_does_not_see_the_order_of_bits():
    bits = random_bits(200)
    assert z_score(np.random.default_rng(1).permutation(bits), 0.25) == z_score(bits, 0.25)


def test_fresh_marks_the_first_of_each_bigram():
    assert fresh([4, 5, 4, 5, 5, 5, 6]).tolist() == [1, 1, 0, 1, 0, 1]


def test_fresh_of_a_prefix_is_a_prefix():
    text = zipf_texts(1, 101, 30)[0]
    assert np.array_equal(fresh(text)[:40], fresh(text[:41]))
    assert fresh(text)[:40].sum() == len(set(pairwise(text[:41].tolist())))


def test_z_unique_is_z_of_the_fresh_bits():
    text, bits = zipf_texts(1, 101, 30)[0], random_bits(100)
    assert 0 < fresh(text).sum() < 100
    assert z_unique(text, bits, 0.25) == z_score(bits[fresh(text) == 1], 0.25)
    assert z_score(bits[None], 0.25, where=fresh(text)[None])[0] == z_unique(text, bits, 0.25)


@pytest.mark.parametrize("length", [1, 2, 17, 60])
@pytest.mark.parametrize("p", [0.05, 0.35, 0.9])
def test_winmax_is_the_best_of_all_stretches(length, p):
    bits = random_bits(6, length, p=p)
    for min_len in {1, min(10, length), length}:
        expected = [winmax_by_hand(text, 0.25, min_len) for text in bits]
        assert winmax(bits, 0.25, min_len) == pytest.approx(expected, abs=1e-12)


def test_winmax_of_stretches_as_long_as_the_text_is_z():
    bits = random_bits(20, 50)
    assert np.array_equal(winmax(bits, 0.25, 50), z_score(bits, 0.25))


def test_winmax_is_at_least_z_and_at_least_that_of_one_green_token():
    bits = random_bits(500, 60, p=0.1)
    assert (winmax(bits, 0.25) >= z_score(bits, 0.25)).all()
    assert (winmax(bits, 0.25, 10) >= z_score(bits, 0.25)).all()
    green = bits.any(1)
    assert green.any()
    assert not green.all()
    assert (winmax(bits[green], 0.25) >= np.sqrt(0.75 / 0.25)).all()
    assert (winmax(bits[~green], 0.25) < 0).all()


def test_red_tokens_at_the_end_never_raise_winmax():
    bits = random_bits(300, 50)
    longer = np.concatenate([bits, np.zeros((300, 5), np.uint8)], axis=1)
    assert np.array_equal(winmax(longer, 0.25), winmax(bits, 0.25))
    assert (z_score(longer, 0.25) < z_score(bits, 0.25)).all()


def test_winmax_keeps_leading_dimensions_and_does_not_depend_on_blocks():
    bits = random_bits(2, 700, 200)
    scores = winmax(bits, 0.25, 10)
    assert scores.shape == (2, 700)
    assert scores[1, 699] == winmax(bits[1, 699], 0.25, 10)
    assert np.ndim(winmax(bits[0, 0], 0.25)) == 0


def test_winmax_counts_beyond_sixteen_bits():
    bits = np.zeros(2**15 + 10, np.uint8)
    bits[5:] = 1
    assert winmax(bits, 0.25, 2**15) == pytest.approx(np.sqrt((2**15 + 5) * 3))


def test_p_value_is_the_upper_tail():
    z = np.array([-2.0, 0, 4, 10])
    assert p_value(z) == pytest.approx(stats.norm.sf(z), rel=1e-12)
    assert p_value(4.0) == pytest.approx(3.17e-5, rel=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: z_score([0, 2], 0.25), "expected 0 and 1 only"),
        (lambda: z_score([0.0, np.nan], 0.25), "expected 0 and 1 only"),
        (lambda: z_score(["0", "1"], 0.25), "expected 0 and 1 only"),
        (lambda: z_score([], 0.25), r"bits of shape \(0,\)"),
        (lambda: z_score(1, 0.25), r"bits of shape \(\)"),
        (lambda: z_score([[0, 1], [0]], 0.25), "truncate to a common T first"),
        (lambda: z_score([0, 1], 1), "gamma=1"),
        (lambda: z_score([0, 1], "half"), "gamma='half'"),
        (lambda: z_score([0, 1], 0.25, where=[1]), r"where of shape \(1,\)"),
        (lambda: z_score([0, 1], 0.25, where=[0, 0]), "no token counts"),
        (lambda: z_unique([1, 2, 3], [0], 0.25), r"where of shape \(2,\)"),
        (lambda: winmax([0, 1], 0.25, 0), "min_len=0"),
        (lambda: winmax([0, 1], 0.25, 3), "min_len=3: expected at most the 2 scored tokens"),
        (lambda: winmax([0, 3], 0.25), "expected 0 and 1 only"),
        (lambda: fresh([1]), "need at least 2 tokens"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_best_stretch_is_winmaxs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        bits = (rng.random(60) < 0.4).astype(np.uint8)
        start, stop, z = best_window(bits, 0.25, 5)
        assert z == pytest.approx(winmax(bits, 0.25, 5))
        assert z == pytest.approx(z_score(bits[start:stop], 0.25))
        assert stop - start >= 5

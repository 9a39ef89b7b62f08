import numpy as np
import pytest
from scipy import special, stats
from sklearn.metrics import roc_auc_score

from labkit.watermark import (
    Watermark,
    expected_runs,
    expected_z,
    gaussian_auc,
    green_rate_bound,
    lineage,
    local_stats,
    num_windows,
    pss,
    pss_null_level,
    spike_entropy,
    surviving_rate,
    uniform_green_rate,
    variance_z,
    z_score,
)


def green_rate(probabilities, lists, delta):
    """P(green) on each of several green lists (n, V), by the definition of the watermark."""
    biased = probabilities * np.exp(delta * lists)
    return (biased * lists).sum(1) / biased.sum(1)


def random_lists(n, wm, seed=0):
    """Green lists of exact size (n, V)."""
    lists = np.zeros((n, wm.vocab_size))
    lists[:, : wm.green_size] = 1
    return np.random.default_rng(seed).permuted(lists, axis=1)


@pytest.mark.parametrize(("delta", "rate"), [(0, 0.25), (1.5, 0.5990), (2, 0.7112)])
def test_equal_logits_are_green_at_the_rate_of_the_formula(delta, rate):
    assert uniform_green_rate(0.25, delta) == pytest.approx(rate, abs=5e-5)
    wm = Watermark(400)
    assert green_rate(np.full(400, 1 / 400), random_lists(3, wm), delta) == pytest.approx(uniform_green_rate(0.25, delta))
    green = random_lists(1, wm)[0]
    draws = green[np.random.default_rng(0).choice(400, 100_000, p=special.softmax(delta * green))]
    assert draws.mean() == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / 100_000) + 5e-5)
    assert uniform_green_rate(0.25, 800.0) == 1  # no overflow


def test_spike_entropy_of_a_flat_and_of_a_sure_token():
    modulus = 0.75 * np.expm1(2) / (1 + np.expm1(2) * 0.25)
    assert spike_entropy(np.full(1000, 1e-3), 0.25, 2) == pytest.approx(1 / (1 + modulus / 1000))
    assert spike_entropy(np.eye(5)[0], 0.25, 2) == pytest.approx(1 / (1 + modulus))
    assert spike_entropy(np.eye(5)[0], 0.25, np.array([0.0, 2])) == pytest.approx([1, 1 / (1 + modulus)])


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5, 6.0])
def test_no_distribution_is_less_green_than_the_bound(exponent):
    wm, weights = Watermark(100), np.arange(1, 101) ** -exponent
    probabilities = weights / weights.sum()
    mean = green_rate(probabilities, random_lists(20_000, wm), 2.0)
    bound = green_rate_bound(spike_entropy(probabilities, 0.25, 2.0), 0.25, 2.0)
    assert mean.mean() + 4 * stats.sem(mean) >= bound
    assert mean.mean() <= uniform_green_rate(0.25, 2.0) + 4 * stats.sem(mean)


def test_the_bound_is_met_by_equal_logits_over_a_large_vocabulary():
    flat = np.full(100_000, 1e-5)
    assert green_rate_bound(spike_entropy(flat, 0.25, 2.0), 0.25, 2.0) == pytest.approx(uniform_green_rate(0.25, 2.0), rel=1e-4)


def test_mean_and_variance_of_z():
    z = z_score(lineage(40_000, 200, 0.35, 0, 0, seed=0)[:, 0], 0.25)
    assert expected_z(0.35, 0.25, 200) == pytest.approx(3.266, abs=5e-4)
    assert variance_z(0.35, 0.25) == pytest.approx(1.2133, abs=5e-5)
    assert z.mean() == pytest.approx(expected_z(0.35, 0.25, 200), abs=4 * z.std() / 200)
    assert z.var() == pytest.approx(variance_z(0.35, 0.25), rel=0.03)
    assert (expected_z(0.25, 0.25, 200), variance_z(0.25, 0.25)) == (0, 1)


def test_auc_of_z():
    gaussian = gaussian_auc(expected_z(0.35, 0.25, 200), variance_z(0.35, 0.25))
    null, marked = (stats.binom.pmf(np.arange(201), 200, p) for p in (0.25, 0.35))
    exact = marked @ (null.cumsum() - null / 2)  # ties count half
    assert gaussian == pytest.approx(0.9859, abs=5e-5)
    assert exact == pytest.approx(0.98571, abs=5e-6)
    bits = np.concatenate([lineage(20_000, 200, p, 0, 0, seed=s)[:, 0] for s, p in enumerate((0.25, 0.35))])
    assert roc_auc_score(np.repeat([0, 1], 20_000), z_score(bits, 0.25)) == pytest.approx(gaussian, abs=0.003)
    assert gaussian_auc(0.0, 1.0) == 0.5
    assert gaussian_auc(-1.3, 0.8) == pytest.approx(1 - gaussian_auc(1.3, 0.8))


def test_z_decays_geometrically_with_depth():
    chains = lineage(4000, 100, 0.6, 0.3, 6, seed=0)
    z = z_score(chains, 0.25)
    depth = np.arange(7)
    expected = expected_z(surviving_rate(0.6, 0.25, 0.3, depth), 0.25, 100)
    assert expected == pytest.approx(0.7**depth * expected[0])
    assert np.abs(z.mean(0) - expected).max() < 4 * z.std() / np.sqrt(4000)


@pytest.mark.parametrize("q", [0.0, 0.3, 0.7, 1.0])
def test_null_level_of_the_stability_score(q):
    chains = lineage(4000, 60, 0.25, q, 7, seed=1)
    scores = pss(local_stats(chains, 0.25, size=30, stride=10, expand=False).z)
    assert (scores**2).mean() == pytest.approx(pss_null_level(8, q), rel=0.03)


def test_null_level_at_its_limits():
    assert pss_null_level(8, 0) == 0
    assert pss_null_level(8, 1) == pytest.approx(1 - 1 / 8)
    assert pss_null_level(8, 0.3) == pytest.approx(0.520711, abs=5e-7)


def test_number_of_runs_and_the_longest():
    bits = lineage(20_000, 200, 0.35, 0, 0, seed=2)[:, 0]
    runs = np.diff(bits.astype(int), axis=1, prepend=0).clip(0).sum(1)
    assert runs.mean() == pytest.approx(expected_runs(0.35, 200), abs=4 * stats.sem(runs))
    longest = local_stats(bits, 0.25, size=200).run[:, 0]
    assert longest.mean() == pytest.approx(np.log(200 * 0.65) / -np.log(0.35), abs=1)


@pytest.mark.parametrize(
    ("length", "size", "stride", "count"),
    [(160, 50, 10, 12), (200, 50, 10, 16), (40, 50, 10, 1), (60, 50, 10, 2), (50, 50, 10, 1), (51, 50, 10, 2), (40, 25, 5, 4)],
)
def test_number_of_windows(length, size, stride, count):
    assert num_windows(length, size, stride) == count


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_green_rate(0.25, -1), "delta=-1"),
        (lambda: uniform_green_rate(0.25, np.array([1, np.inf])), "delta=.*inf"),
        (lambda: uniform_green_rate(1, 2), "gamma=1"),
        (lambda: spike_entropy([0.5, 1.5], 0.25, 2), "probabilities=.*expected numbers"),
        (lambda: expected_z(1.2, 0.25, 100), "rate=1.2"),
        (lambda: variance_z(np.nan, 0.25), "rate=nan"),
        (lambda: surviving_rate(0.5, 0.25, 1.1, 2), "q=1.1"),
        (lambda: pss_null_level(1, 0.3), "num_depths=1"),
        (lambda: pss_null_level(8, -0.1), "q=-0.1"),
        (lambda: num_windows(0), "length=0"),
        (lambda: num_windows(100, size=0), "size=0"),
        (lambda: num_windows(100, stride=0), "stride=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from statsmodels.tsa.stattools import acf

from labkit.watermark import (
    FEATURES,
    compact_pss,
    expected_runs,
    lineage,
    local_stats,
    num_windows,
    pss,
    static_features,
    windows,
    z_score,
)

SETTINGS = [(50, 10, 200), (40, 5, 160), (60, 15, 150), (25, 5, 40), (50, 10, 50), (7, 3, 61), (3, 5, 41), (1, 1, 30)]


def random_bits(*shape, p=0.35, seed=0):
    """Independent green bits."""
    return (np.random.default_rng(seed).random(shape) < p).astype(np.uint8)


def mixed_bits(n, length):
    """Texts from all red to all green."""
    return np.concatenate([random_bits(n // 5, length, p=p, seed=int(10 * p)) for p in (0.0, 0.2, 0.5, 0.9, 1.0)])


def windows_by_hand(bits, size, stride, expand=True):
    """Each edge moves outward token by token."""
    length, bounds, start = len(bits), [], 0
    while True:
        a, f = start, min(start + size, length)
        last = f == length
        if expand:
            while a > 0 and bits[a] == 1:
                a -= 1
            while f < length and bits[f - 1] == 1:
                f += 1
        bounds.append((a, f))
        if last:
            return bounds
        start += stride


def runs_by_hand(bits):
    """Lengths of the green runs."""
    return [len(run) for run in "".join(map(str, bits)).split("0") if run]


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize(("size", "stride", "length"), SETTINGS)
def test_windows_and_their_statistics_by_hand(size, stride, length, expand):
    bits = mixed_bits(25, length)
    bounds, local = windows(bits, size, stride, expand), quiet_stats(bits, size, stride, expand)
    assert bounds.shape == (len(bits), num_windows(length, size, stride), 2)
    for i, text in enumerate(bits):
        expected = windows_by_hand(text, size, stride, expand)
        assert list(map(tuple, bounds[i])) == expected
        for j, (a, f) in enumerate(expected):
            runs = runs_by_hand(text[a:f])
            assert local.run[i, j] == max(runs, default=0)
            assert local.freq[i, j] == runs.count(max(runs, default=0))
            assert local.z[i, j] == z_score(text[a:f], 0.25)


def quiet_stats(bits, size, stride, expand):
    """`local_stats` of texts that may be shorter than a window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if bits.shape[-1] < size else "error")
        return local_stats(bits, 0.25, size, stride, expand)


def test_windows_cover_the_text_and_end_on_red():
    for bits in random_bits(200, 120, p=0.6):
        plain, grown = windows(bits, 30, 7, expand=False), windows(bits, 30, 7)
        assert np.unique(np.concatenate([np.arange(*bounds) for bounds in plain])).tolist() == list(range(120))
        assert (grown[:, 0] <= plain[:, 0]).all()
        assert (grown[:, 1] >= plain[:, 1]).all()
        assert all(a == 0 or bits[a] == 0 for a in grown[:, 0])
        assert all(f == 120 or bits[f - 1] == 0 for f in grown[:, 1])


def test_all_green_makes_every_window_the_text_and_all_red_moves_none():
    green, red = np.ones(120), np.zeros(120)
    assert (windows(green) == (0, 120)).all()
    assert np.array_equal(windows(red), windows(red, expand=False))


def test_runs_add_up_to_the_green_tokens():
    bits = random_bits(2000, 200)
    runs = [runs_by_hand(text) for text in bits]
    assert [sum(r) for r in runs] == bits.sum(1).tolist()
    assert all(len(r) <= n for r, n in zip(runs, bits.sum(1), strict=True))
    counts = np.array([len(r) for r in runs])
    assert counts.mean() == pytest.approx(expected_runs(0.35, 200), abs=4 * stats.sem(counts))
    assert local_stats(bits, 0.25, size=200).run[:, 0].tolist() == [max(r) for r in runs]


def test_static_features_by_their_definitions():
    bits, gamma = random_bits(50, 200), 0.25
    table, local = static_features(bits, gamma), local_stats(bits, gamma)
    assert tuple(table.columns) == FEATURES
    assert len(FEATURES) == 21
    assert table.shape == (50, 21)
    for name, series in (("z", local.z), ("run", local.run), ("freq", local.freq)):
        varies = np.ptp(series, axis=1) > 0
        assert varies.sum() > 20
        for statistic, function in STATISTICS.items():
            expected = [function(row) for row in series[varies]]
            assert table[f"{name}_{statistic}"].values[varies] == pytest.approx(expected, abs=1e-12)
    for lag in (1, 2):
        expected = [acf(row, nlags=2, fft=False)[lag] for row in local.z]
        assert table[f"z_ac{lag}"].values == pytest.approx(expected, abs=1e-12)
        assert table[f"z_ac{lag}"].abs().max() <= 1
    assert np.array_equal(table["z_global"], z_score(bits, gamma))
    assert tuple(static_features(bits, gamma, include_global=False).columns) == FEATURES[:-1]


STATISTICS = {"mean": np.mean, "var": np.var, "min": np.min, "max": np.max, "skew": stats.skew, "kurt": stats.kurtosis}


def test_a_constant_series_has_no_shape():
    table = static_features(np.stack([np.zeros(200), np.ones(200)]), 0.1)
    shape = [name for name in FEATURES if name.endswith(("var", "skew", "kurt", "ac1", "ac2"))]
    assert len(shape) == 11
    assert (table[shape] == 0).all(axis=None)
    assert (table["z_mean"] == table["z_min"]).all()
    assert table[["run_max", "freq_max"]].values.tolist() == [[0, 0], [200, 1]]


@pytest.mark.parametrize(
    ("length", "zero"), [(50, ["skew", "kurt", "ac1", "ac2"]), (60, ["skew", "kurt", "ac2"]), (70, ["kurt"])]
)
def test_few_windows_have_no_shape(length, zero):
    table = static_features(random_bits(100, length), 0.25)
    for statistic in ("skew", "kurt", "ac1", "ac2"):
        assert (table[f"z_{statistic}"] == 0).all() == (statistic in zero)


def test_a_text_shorter_than_a_window_is_one_window_with_a_warning():
    bits = random_bits(3, 24)
    with pytest.warns(UserWarning, match="24 scored tokens fill no window of 50"):
        table = static_features(bits, 0.25)
    assert (table["z_mean"] == table["z_global"]).all()
    assert table.attrs == dict(gamma=0.25, size=50, stride=10, expand=True, length=24, reliable=False)
    assert local_stats(bits, 0.25, size=24).reliable is False
    assert local_stats(random_bits(25), 0.25, size=25).reliable is True


def test_features_do_not_depend_on_the_other_texts_or_on_leading_dimensions():
    bits = random_bits(3, 700, 200)
    table = static_features(bits.reshape(-1, 200), 0.25)
    order = np.random.default_rng(1).permutation(2100)
    shuffled = static_features(bits.reshape(-1, 200)[order], 0.25)
    assert np.array_equal(shuffled, table.iloc[order])
    local = local_stats(bits, 0.25)
    assert local.z.shape == local.run.shape == local.freq.shape == (3, 700, 16)
    assert np.array_equal(local.z[2, 699], local_stats(bits[2, 699], 0.25).z)


def test_order_of_bits_moves_run_features_but_not_z():
    bits = random_bits(300, 200)
    table, sorted_table = static_features(bits, 0.25), static_features(np.sort(bits, axis=1), 0.25)
    assert np.array_equal(table["z_global"], sorted_table["z_global"])
    assert (sorted_table["run_max"] > table["run_max"]).all()
    assert (sorted_table["z_ac1"] > table["z_ac1"]).mean() > 0.9


def test_no_features_beat_z_on_independent_bits():
    bits = np.concatenate([random_bits(1000, 100, p=p, seed=s) for s, p in enumerate((0.25, 0.32))])
    label, features = np.repeat([0, 1], 1000), static_features(bits, 0.25, 25, 5)
    test = np.arange(2000) % 2 == 1
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features[~test], label[~test])
    label, learned, z = label[test], model.decision_function(features[test]), features["z_global"].values[test]
    resampled = np.random.default_rng(0).integers(0, 1000, (60, 1000))
    gain = [roc_auc_score(label[i], learned[i]) - roc_auc_score(label[i], z[i]) for i in resampled]
    assert np.mean(gain) <= 3 * np.std(gain)
    assert 0.8 < roc_auc_score(label, learned) < 0.95


def test_stability_of_identical_texts_is_exactly_zero():
    z = local_stats(random_bits(20, 200), 0.3).z
    for depths in (2, 3, 7):
        assert (pss(np.repeat(z[:, None], depths, axis=1)) == 0).all()


def test_stability_is_the_spread_over_depth():
    z = local_stats(lineage(50, 200, 0.5, 0.3, 4, seed=0), 0.25).z
    assert pss(z).shape == (50, 16)
    assert pss(z) == pytest.approx(z.std(axis=1), abs=1e-12)
    assert pss(z)[7, 3] == pytest.approx(np.std(z[7, :, 3]), abs=1e-12)


def test_stability_is_larger_where_a_watermark_fades():
    marked, plain = (pss(local_stats(lineage(300, 200, p, 0.3, 8, seed=1), 0.25).z).mean() for p in (0.6, 0.25))
    assert marked > 1.5 * plain


def test_compact_stability_is_mean_maximum_and_slope():
    z = np.random.default_rng(0).normal(size=(30, 5))
    expected = [(row.mean(), row.max(), np.polyfit(np.arange(5), row, 1)[0]) for row in z]
    assert compact_pss(z) == pytest.approx(np.array(expected))


def test_what_reads_bits_loads_neither_torch_nor_a_plotting_library():
    code = (
        "import sys; from labkit.watermark import Watermark, lineage, pss_null_level, static_features, winmax;"
        "static_features(lineage(9, 60, 0.3, 0.3, 1, 0)[:, 0], 0.25);"
        "print(*{'torch', 'transformers', 'plotly', 'ipywidgets', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: static_features([[0, 1, 0], [1, 0]], 0.25), "rows of different length; truncate to a common T first"),
        (lambda: static_features(np.zeros(60), 0.25), r"bits2d of shape \(60,\)"),
        (lambda: static_features(np.zeros((0, 60)), 0.25), r"bits of shape \(0, 60\)"),
        (lambda: static_features(np.full((2, 60), 2), 0.25), "expected 0 and 1 only"),
        (lambda: static_features(np.zeros((2, 60)), 0.0), "gamma=0.0"),
        (lambda: windows(np.zeros(60), size=0), "size=0"),
        (lambda: windows(np.zeros(60), stride=-1), "stride=-1"),
        (lambda: windows(np.zeros(60), stride=2.5), "stride=2.5"),
        (lambda: windows(np.full(60, 0.5)), "expected 0 and 1 only"),
        (lambda: local_stats(np.zeros(60), 0.25, size=0), "size=0"),
        (lambda: pss(np.zeros((4, 1, 9))), "K >= 2 depths"),
        (lambda: pss(np.zeros((4, 9))), r"expected \(n, K, m\)"),
        (lambda: pss([[np.zeros(3), np.zeros(2)]]), "numbers of windows differ; truncate"),
        (lambda: pss(np.full((4, 2, 9), np.nan)), "a depth of a chain is missing"),
        (lambda: compact_pss(np.zeros((4, 1))), r"expected \(n, K\) with K >= 2 depths"),
        (lambda: compact_pss(np.full((4, 2), np.inf)), "a depth of a chain is missing"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

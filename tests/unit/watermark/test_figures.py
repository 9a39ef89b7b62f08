"""Figures of a few bits, whose numbers are known."""

import re

import numpy as np
import pandas as pd
import pytest

from labkit.theme import keyed
from labkit.watermark import FEATURES, figures


def numbers(values):
    return np.asarray(values, dtype=float)


@pytest.mark.parametrize(
    "make",
    [
        lambda: figures.auc_curves(list(figures.DETECTORS)),
        figures.make_one,
        figures.z_test,
        figures.chain,
        figures.local_view,
        lambda: figures.features(FEATURES),
        figures.channel,
        figures.transfer,
    ],
)
def test_every_trace_that_is_filled_later_has_a_key_of_its_own(make):
    keys = [trace.meta for trace in make().data if trace.x is None]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_runs_are_told_by_each_of_their_tokens():
    np.testing.assert_array_equal(figures.run_of_each(np.array([1, 1, 0, 1, 0, 0, 0])), [2, 2, 1, 1, 3, 3, 3])
    np.testing.assert_array_equal(figures.run_of_each(np.ones(4, dtype=np.uint8)), [4, 4, 4, 4])


def test_chips_have_one_class_per_bit_and_tell_pair_and_run():
    shown = figures.chips(["the", " moon", " rose", " <b>"], np.array([1, 1, 0], dtype=np.uint8))
    assert re.findall('<span class="(.)"', shown) == ["n", "g", "g", "r"]
    assert "&#x27; moon&#x27; → &#x27; rose&#x27;: green, run of 2" in shown
    assert "> &lt;b&gt;</span>" in shown  # a text is no markup


def test_without_bits_a_text_stays_plain():
    shown = figures.chips(["a", " b\n"], None, height=50)
    assert "<span" not in shown
    assert "a b⏎\n" in shown
    assert "height:50px" in shown


def test_a_bit_too_many_is_refused():
    with pytest.raises(ValueError, match="bits: 3 of them for 3 tokens"):
        figures.chips(["a", "b", "c"], [1, 0, 1])


def curve(auc, depths=(0, 1, 2)):
    return pd.DataFrame({"depth": depths, "auc": auc, "lo": np.array(auc) - 0.1, "hi": np.array(auc) + 0.1})


def test_curves_carry_their_bands_and_a_detector_that_is_missing_is_hidden():
    figure = figures.auc_curves(["z", "pss+static+lr"], depth=2)
    roc = np.array([[0, 0.5, 1], [0, 0.9, 1]])
    figures.draw_auc_curves(figure, {"z": curve([0.9, 0.8, 0.7])}, {"z": roc}, depth=1)
    traces = keyed(figure)
    np.testing.assert_allclose(numbers(traces["z/auc"].y), [0.9, 0.8, 0.7])
    np.testing.assert_allclose(numbers(traces["z/band"].y), [1.0, 0.9, 0.8, 0.6, 0.7, 0.8])
    np.testing.assert_allclose(numbers(traces["z/roc"].y), roc[1])
    assert traces["pss+static+lr/auc"].visible is False
    assert list(traces["cursor"].x) == [1, 1]
    figures.draw_auc_curves(figure, {"pss+static+lr": curve([0.9] * 3)}, {}, depth=2)
    assert traces["pss+static+lr/auc"].visible is True
    assert traces["z/auc"].visible is False
    assert list(traces["z/roc"].x) == [None]


def test_a_histogram_is_a_density():
    figure = figures.z_test()
    flat = np.array([[0.0, 1.0], [0.0, 1.0]])
    curves = {"z": np.zeros(2), "null": np.zeros(2), "alternative": np.zeros(2)}
    edges = np.array([0.0, 0.5, 1.0, 3.0, 4.0])
    figures.draw_z_test(figure, edges, {"human": np.array([0.1, 0.1, 0.6, 3.3])}, {"human": flat}, curves, flat)
    bars = keyed(figure)["human/bars"]
    np.testing.assert_allclose(numbers(bars.x), edges)
    np.testing.assert_allclose(numbers(bars.y), [1.0, 0.5, 0.0, 0.25, 0.0])


def test_the_chain_predicts_z_by_survival():
    figure = figures.chain(depth=1)
    rows = [("watermarked", 0, 8.0, 0.1, 1.0), ("watermarked", 1, 4.0, 0.1, 0.6)]
    means = pd.DataFrame(rows, columns=["kind", "depth", "z", "z_se", "survival"])
    figures.draw_chain(figure, np.array([1.0, 0.5]), np.array([9.0, 5.0]), means, depth=1)
    traces = keyed(figure)
    np.testing.assert_allclose(numbers(traces["predicted"].y), [8.0, 4.8])
    assert [*traces["here1"].y, *traces["here2"].y] == [0.5, 5.0]


def test_windows_are_drawn_where_they_lie():
    figure = figures.local_view()
    local = {"z": np.array([1.0, 2.0]), "run": np.array([1, 2]), "freq": np.array([1, 1])}
    bits = np.array([0, 1, 0, 1, 1, 0])
    figures.draw_local_view(figure, bits, np.array([[0, 3], [2, 6]]), local, 1.5, (3, 5, 2.4))
    traces = keyed(figure)
    np.testing.assert_allclose(numbers(traces["spans"].x), [0.5, 3.5, np.nan, 2.5, 6.5, np.nan])
    np.testing.assert_allclose(numbers(traces["local"].x), [2.0, 4.5])
    np.testing.assert_array_equal(np.asarray(traces["bits"].z), bits[None])
    assert list(traces["winmax"].x) == [3.5, 5.5]


def test_hills_of_features_stand_on_their_rows_and_point_apart():
    names = ["a", "b"]
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(50, 2)), columns=names)
    scale = pd.DataFrame([rows.mean(), rows.std()], index=["centre", "spread"])
    aucs = pd.DataFrame({0: [0.9, 0.5]}, index=names)
    figure = figures.features(names, depth=0)
    figures.draw_features(figure, {"watermarked": rows, "negatives": rows}, rows.iloc[0], scale, aucs, 0)
    traces = keyed(figure)
    up, down = numbers(traces["watermarked"].y), numbers(traces["negatives"].y)
    assert np.nanmin(up) == pytest.approx(-0.75)
    assert np.nanmax(down) == pytest.approx(1.75)
    assert np.nanmax(up) == 1
    assert [data[0] for data in traces["text"].customdata] == names


def test_a_constant_feature_is_drawn():
    rows = pd.DataFrame({"a": np.zeros(5)})
    scale = pd.DataFrame({"a": [0.0, 0.0]}, index=["centre", "spread"])
    figure = figures.features(["a"], depth=0)
    figures.draw_features(
        figure, {"watermarked": rows, "negatives": rows}, rows.iloc[0], scale, pd.DataFrame({0: [0.5]}, index=["a"]), 0
    )
    assert np.isfinite(numbers(keyed(figure)["watermarked"].y)[:-1]).all()


def test_intervals_reach_from_lo_to_hi():
    rows = [("z", "right key", 0.8, 0.7, 0.85), ("z", "wrong key", 0.5, 0.4, 0.6)]
    figure = figures.intervals(pd.DataFrame(rows, columns=["detector", "control", "auc", "lo", "hi"]), "control", "auc", 0.5)
    assert [trace.name for trace in figure.data] == ["right key", "wrong key"]
    assert numbers(figure.data[0].error_x.array)[0] == pytest.approx(0.05)
    assert numbers(figure.data[0].error_x.arrayminus)[0] == pytest.approx(0.1)
    assert list(figure.layout.yaxis.ticktext) == ["z at depth d"]


def test_visible_tokens():
    assert figures.visible(" a\n") == "␣a⏎"
    assert figures.visible("") == "∅"

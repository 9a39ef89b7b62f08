"""Figures of made-up runs, whose numbers are known: an epidemic of straight lines and a source on a circle."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.design.online import experiment, figures
from labkit.design.online.loop import OnlineTrace
from labkit.filtering.sir import TwoGroupSIR
from labkit.filtering.source import MovingSource

T, K, M = 20, 11, 60
SETTING = replace(experiment.SETTINGS["seeded"], steps=T, num_params=M)


def epidemic(policy="grid", shares=None, params=4, seed=0):
    """A run in which I1 grows by one a step, I2 by a half, and the best share falls from 1 to 0."""
    rng = np.random.default_rng(seed)
    time = np.arange(T + 1.0)
    infected = np.stack([5 + time, time / 2], 1)
    states = np.stack([190 - 2 * time, infected[:, 0], 195 - time, infected[:, 1]], 1)
    shares = np.linspace(0.9, 0.3, T) if shares is None else np.asarray(shares)
    grid = np.linspace(0.01, 0.99, K)
    best = np.linspace(1, 0, T)
    return OnlineTrace(
        policy=policy,
        seed=seed,
        theta=np.array([0.65, 0.15, 0.55, 0.15])[:params],
        designs=np.log(shares / (1 - shares))[:, None],
        observations=rng.poisson(3, (T, 2)).astype(float),
        states=states,
        theta_cloud=rng.uniform(0.1, 1, (T + 1, M, params)),
        position_cloud=states[:, None] + rng.normal(0, 1, (T + 1, 40, 4)),
        theta_mean=np.full((T, params), 0.5),
        theta_std=np.full((T, params), 0.1),
        theta_quantiles=np.full((T, 3, params), 0.5),
        state_mean=states[1:],
        state_quantiles=np.stack([states[1:] - 2, states[1:], states[1:] + 2], 1),
        predicted=np.zeros((T, 3, 2)),
        ess=np.full(T, 0.9 * M),
        log_evidence=np.zeros(T),
        eig=np.full(T, 0.05),
        eig_jackknife=np.full(T, 0.04),
        curve_designs=np.log(grid / (1 - grid))[:, None],
        curve=0.05 - 0.02 * (grid - best[:, None]) ** 2,
        seconds=np.zeros(T),
        num_nonfinite=0,
    )


def flight(policy="adam", angles=(2.0, -1.0)):
    """A run in which the source walks along a quarter circle and the sensors look along fixed angles."""
    base = epidemic(policy, params=2)
    turn = np.linspace(0, np.pi / 2, T + 1)
    states = np.stack([2 * np.sin(turn), 2 - 2 * np.cos(turn), turn], 1)
    return replace(
        base,
        theta=np.ones(2),
        designs=np.tile(angles, (T, 1)),
        states=states,
        theta_cloud=np.random.default_rng(0).uniform(0.5, 1.5, (T + 1, M, 2)),
        position_cloud=np.repeat(states[:, None], 30, 1),
        predicted=np.stack([np.full((T, 2), level) for level in (-1.0, 0.0, 1.0)], 1),
        state_mean=states[1:],
    )


def drawn(t, policy=None, other=None, setting=SETTING, **options):
    figure = figures.playback()
    figures.draw_playback(figure, policy or epidemic(), other or epidemic("random", np.full(T, 0.5)), setting, t, **options)
    return figure, figures.keyed(figure)


def ranges(figure):
    return {axis.plotly_name: axis.range for axis in [*figure.select_xaxes(), *figure.select_yaxes()]}


def test_half_of_a_gaussian_lies_in_its_fifty_percent_region():
    points = np.random.default_rng(1).normal(0.5, 0.05, (800, 2))
    x, y, mass = figures.highest_density(points, (0, 1), size=50)
    area = (mass <= 0.5).mean() * np.ptp(x) * np.ptp(y)
    widened = 0.05**2 * (1 + (1.3 * 800 ** (-1 / 6)) ** 2)  # the kernel adds its own variance
    assert area == pytest.approx(2 * np.pi * np.log(2) * widened, rel=0.1)


def test_the_ninety_percent_region_holds_the_fifty_percent_region_and_the_mode():
    points = np.random.default_rng(2).normal(0.3, 0.1, (300, 2))
    x, y, mass = figures.highest_density(points, (0, 1))
    row, column = np.unravel_index(mass.argmin(), mass.shape)
    assert np.hypot(x[column] - 0.3, y[row] - 0.3) < 0.07
    assert (mass <= 0.9).sum() > (mass <= 0.5).sum() > 1
    assert mass.max() == pytest.approx(1)


def test_regions_stay_in_the_box_of_the_prior():
    points = np.random.default_rng(3).uniform(0.1, 1, (200, 2))
    x, y, _ = figures.highest_density(points, (0.1, 1.0))
    assert min(x[0], y[0]) >= 0.1
    assert max(x[-1], y[-1]) <= 1.0


def test_a_cloud_of_equal_points_has_a_region_too():
    _, _, mass = figures.highest_density(np.full((50, 2), 0.4), (0.1, 1.0))
    assert np.isfinite(mass).all()


def test_a_trailing_mean_looks_back_only():
    values = np.random.default_rng(0).normal(size=(30, 2))
    slow = [values[max(0, t - 6) : t + 1].mean(0) for t in range(30)]
    np.testing.assert_allclose(figures.trailing_mean(values, 7), slow)
    np.testing.assert_allclose(figures.trailing_mean(values[:3], 7), slow[:3])


def test_share_of_inverts_the_models_logit():
    shares = torch.tensor([0.1, 0.5, 0.9])
    np.testing.assert_allclose(figures.share_of(TwoGroupSIR.design_of_share(shares)[:, None]), shares, rtol=1e-6)


@pytest.mark.parametrize("make", [figures.playback, figures.source_playback, figures.share, figures.simulator])
def test_every_trace_has_a_key_of_its_own(make):
    keys = [trace.meta for trace in make().data]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_playback_shows_the_past_and_no_more():
    for t in (1, 7, T):
        _, traces = drawn(t)
        assert len(traces["policy/truth1"].x) == t + 1
        assert len(traces["policy/gained"].x) == t + 1
        assert len(traces["policy/ess"].x) == t
        assert np.shape(traces["policy/ridge"].z) == (K, t)
        assert np.isfinite(traces["policy/ridge"].z).all()


def test_playback_starts_at_the_prior_with_no_design():
    _, traces = drawn(0)
    assert len(traces["policy/share"].x) == len(traces["policy/chosen"].x) == 0
    assert len(traces["policy/cloud1"].x) == M
    np.testing.assert_allclose(traces["policy/gained"].y, [0])


def test_the_chosen_share_lies_on_the_curve_it_was_chosen_from():
    trace = epidemic()
    _, traces = drawn(9, trace)
    np.testing.assert_allclose(traces["policy/curve"].y, trace.curve[8])
    np.testing.assert_allclose(traces["policy/chosen"].x, traces["policy/share"].y)
    shares = 100 * figures.share_of(trace.curve_designs)
    assert traces["policy/chosen"].y[0] == pytest.approx(np.interp(traces["policy/share"].y[0], shares, trace.curve[8]))


def test_information_so_far_is_the_sum_of_the_debiased_gains():
    _, traces = drawn(12)
    assert traces["policy/gained"].y[-1] == pytest.approx(12 * 0.04)


def test_positives_scale_back_to_the_infected_they_came_from():
    model = SETTING.model()
    trace = epidemic()
    design = torch.as_tensor(trace.designs, dtype=torch.float64)
    expected = model.positive_rates(torch.as_tensor(trace.states[1:]), design).numpy()
    _, traces = drawn(T, replace(trace, observations=expected))
    np.testing.assert_allclose(traces["policy/tests1"].y, trace.states[1:, 1], rtol=1e-5)
    np.testing.assert_allclose(traces["policy/tests2"].y, trace.states[1:, 3], rtol=1e-5)


def test_a_group_that_is_hardly_tested_shows_no_dots_and_more_tests_make_larger_ones():
    shares = np.append(np.full(T - 1, 0.99), 0.5)
    _, traces = drawn(T, epidemic(shares=shares))
    assert list(traces["policy/tests2"].x) == [T]
    sizes = traces["policy/tests1"].marker.size
    assert sizes[0] > sizes[-1]


def test_axes_do_not_move_from_step_to_step():
    assert ranges(drawn(1)[0]) == ranges(drawn(T)[0])


def test_other_compartments_replace_the_infected():
    trace = epidemic()
    _, susceptible = drawn(T, trace, compartment="susceptible")
    np.testing.assert_allclose(susceptible["policy/truth2"].y, trace.states[:, 2])
    figure, recovered = drawn(T, trace, compartment="recovered")
    np.testing.assert_allclose(recovered["policy/truth1"].y, 200 - trace.states[:, 0] - trace.states[:, 1])
    assert figure.layout.yaxis.title.text == "recovered (people)"
    assert len(recovered["policy/tests1"].x) == 0


def test_recovered_band_is_that_of_the_state_cloud():
    trace = epidemic()
    _, traces = drawn(T, trace, compartment="recovered")
    cloud = 200 - trace.position_cloud[1:, :, 0] - trace.position_cloud[1:, :, 1]
    upper = np.asarray(traces["policy/band1"].y)[:T]
    np.testing.assert_allclose(upper, np.quantile(cloud, 0.95, axis=1))


def test_with_two_unknown_rates_group_two_has_no_cloud():
    setting = replace(experiment.SETTINGS["sir2"], steps=T, num_params=M)
    _, traces = drawn(5, epidemic(params=2), epidemic("fixed", params=2), setting)
    assert traces["policy/cloud1"].visible
    assert not traces["policy/cloud2"].visible
    assert list(traces["policy/rates"].x) == [0.65]


def test_the_right_heading_names_the_other_policy():
    figure, _ = drawn(5, other=epidemic("fixed"))
    assert "fixed" in figure.layout.annotations[1].text


def test_a_lobe_reaches_furthest_where_the_sensor_looks():
    figure = figures.source_playback()
    model = MovingSource("low_noise")
    figures.draw_source_playback(figure, flight(angles=(2.0, -1.0)), flight("random", (0.5, 0.5)), model, 5)
    traces = figures.keyed(figure)
    for sensor, angle in enumerate((2.0, -1.0)):
        lobe = traces[f"policy/lobe{sensor + 1}"]
        offset = np.stack([lobe.x, lobe.y], 1) - np.asarray(model.sensors[sensor])
        far = offset[np.linalg.norm(offset, axis=1).argmax()]
        assert np.arctan2(far[1], far[0]) == pytest.approx(angle, abs=0.05)


def test_source_playback_shows_the_past_and_the_bound_of_every_step():
    model, figure = MovingSource("low_noise"), figures.source_playback()
    figures.draw_source_playback(figure, flight(), flight("random"), model, 8)
    traces = figures.keyed(figure)
    assert len(traces["policy/path"].x) == 9
    assert len(traces["other/heard2"].x) == 8
    assert traces["bound"].y[0] == 0
    assert traces["bound"].y[T] == pytest.approx(model.full_state_bound(T))
    assert traces["policy/gained"].y[-1] == pytest.approx(8 * 0.04)


def test_source_axes_do_not_move_and_the_map_keeps_its_shape():
    def at(t):
        figure = figures.source_playback()
        figures.draw_source_playback(figure, flight(), flight("random"), MovingSource("low_noise"), t)
        return figure

    assert ranges(at(0)) == ranges(at(T))
    assert at(0).layout.yaxis.scaleanchor == "x"
    assert at(0).layout.yaxis2.scaleanchor == "x2"


def test_a_constant_share_finds_its_part_of_the_positives_and_promises_less_than_the_best():
    figure, trace, model = figures.share(), epidemic(), TwoGroupSIR.seeded_outbreak()
    yours, best = figures.draw_share(figure, trace, model, 0.25)
    traces = figures.keyed(figure)
    design = TwoGroupSIR.design_of_share([0.25])
    expected = model.positive_rates(torch.as_tensor(trace.states[1:]).float(), design).numpy()
    np.testing.assert_allclose(traces["expected1"].y, expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(traces["expected2"].y, expected[:, 1], rtol=1e-5)
    assert yours < best == pytest.approx(trace.curve.max(1).sum())
    assert min(traces["lost"].y) >= 0


def test_the_share_that_is_best_at_the_first_step_forgoes_nothing_there_and_much_later():
    figure = figures.share()
    figures.draw_share(figure, epidemic(), TwoGroupSIR.seeded_outbreak(), 0.99)
    lost = figures.keyed(figure)["lost"].y
    assert lost[0] == pytest.approx(0, abs=0.01)
    assert lost[-1] > 10


def test_found_positives_have_the_expected_mean():
    long = SimpleNamespace(**vars(epidemic()))
    long.states = np.tile([150.0, 40.0, 150.0, 40.0], (4001, 1))
    long.designs, long.curve = np.zeros((4000, 1)), np.tile(long.curve[:1], (4000, 1))
    figure = figures.share()
    figures.draw_share(figure, long, TwoGroupSIR.seeded_outbreak(), 0.5)
    traces = figures.keyed(figure)
    mean = float(np.mean(traces["expected1"].y))
    assert np.mean(traces["found1"].y) == pytest.approx(mean, abs=4 * np.sqrt(mean / 4000))


def test_the_simulators_band_leaves_five_percent_on_either_side():
    paths = np.random.default_rng(0).uniform(0, 100, (400, 11, 2))
    figure = figures.simulator()
    figures.draw_simulator(figure, paths, np.zeros((11, 2)), np.zeros((10, 2)), np.zeros((10, 2)), shown=3)
    traces = figures.keyed(figure)
    high, low = np.split(np.asarray(traces["band1"].y), 2)
    assert np.mean(paths[:, :, 0] > high) == pytest.approx(0.05, abs=0.003)
    assert np.mean(paths[:, :, 0] < low[::-1]) == pytest.approx(0.05, abs=0.003)
    assert np.isnan(np.asarray(traces["paths1"].y)).sum() == 3


def test_the_reference_regions_hold_half_and_nine_tenths_of_its_mass():
    axes = np.linspace(0.1, 1, 30), np.linspace(0.1, 1, 40)
    probability = np.exp(-(((axes[0][:, None] - 0.6) / 0.1) ** 2) - ((axes[1] - 0.2) / 0.05) ** 2)
    probability /= probability.sum()
    figure = figures.nested_filter()
    figures.draw_reference(figure, axes, probability, epidemic().states, (0.65, 0.15))
    outside = np.asarray(figures.keyed(figure)["reference"].z).T
    for level in (0.5, 0.9):
        assert probability[outside >= 1 - level].sum() == pytest.approx(level, abs=0.05)


def test_the_filter_figure_shows_one_cloud_and_the_bands_so_far():
    clouds = [np.full((9, 2), t / 10) for t in range(T + 1)]
    figure = figures.nested_filter()
    figures.draw_nested_filter(figure, clouds, epidemic().state_quantiles, np.full(T, 0.9), 4)
    traces = figures.keyed(figure)
    assert set(traces["cloud"].x) == {0.4}
    assert len(traces["band1"].x) == 8
    assert len(traces["ess"].y) == 4


def comparison(metric="kl"):
    summary = pd.DataFrame(
        {
            "policy": ["random", "fixed", "grid"],
            "seeds": [9, 9, 4],
            metric: [2.0, 1.8, 2.5],
            f"{metric}_stderr": [0.1, 0.1, 0.2],
        }
    )
    pairs = pd.DataFrame({"first": "grid", "second": ["random", "fixed"], metric: [0.5, 0.7], f"{metric}_stderr": [0.1, 0.4]})
    pairs["seeds"] = [4, 3]
    figure = figures.comparison()
    figures.draw_comparison(figure, summary, pairs, metric)
    return figure, figures.keyed(figure)


def test_comparison_shows_ninety_five_percent_intervals_of_students_t():
    _, traces = comparison()
    np.testing.assert_allclose(traces["values"].error_x.array, [0.2306, 0.2306, 2 * 0.31824], rtol=1e-4)  # 8, 8, 3 degrees
    np.testing.assert_allclose(traces["differences"].error_x.array, [0.31824, 4 * 0.43027], rtol=1e-4)  # 3, 2 degrees


def test_differences_stand_beside_their_policy_and_zero_is_in_view():
    figure, traces = comparison()
    assert list(traces["differences"].y) == list(traces["values"].y)[:2] == ["random (9)", "fixed (9)"]
    assert figure.layout.xaxis2.range[0] < 0 < figure.layout.xaxis2.range[1]
    assert figure.layout.yaxis2.matches == "y"


def test_the_papers_method_is_blue_and_random_orange_everywhere():
    _, traces = comparison()
    assert list(traces["values"].marker.color) == ["#E69F00", "#56B4E9", "#0072B2"]
    play = figures.keyed(figures.playback())
    assert play["policy/gained"].line.color == "#0072B2"
    assert play["other/gained"].line.color == "#E69F00"


def test_cost_has_a_curve_for_each_method_on_a_logarithmic_axis_that_holds_it():
    table = pd.DataFrame({"method": ["a"] * 3 + ["b"] * 3, "t": [1, 2, 3] * 2, "seconds": [0.01, 0.01, 0.01, 0.1, 0.2, 0.3]})
    figure = figures.cost(["a", "b"])
    figures.draw_cost(figure, table, total=False)
    assert [trace.name for trace in figure.data] == ["a", "b"]
    assert figure.layout.yaxis.type == "log"
    low, high = 10 ** np.array(figure.layout.yaxis.range)
    assert low < 0.01
    assert high > 0.3
    figures.draw_cost(figure, table, total=True)
    np.testing.assert_allclose(figure.data[1].y, [0.1, 0.3, 0.6])


@pytest.mark.parametrize(
    "make",
    [
        figures.playback, figures.source_playback, figures.share, figures.simulator, figures.nested_filter, figures.bias,
        figures.eig_curve, figures.ascent,
    ],
)  # fmt: skip
def test_axes_that_show_numbers_have_titles_and_heights_are_fixed(make):
    figure = make()
    assert figure.layout.height >= 360
    for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
        assert axis.title.text or axis.showticklabels is False or axis.matches

"""Figures of small markets, whose numbers are known."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from labkit.procurement import (
    UTILITY,
    Market,
    Outcome,
    figures,
    prior_free_utility_lottery,
    solve_ex_ante,
    value_clock,
)
from labkit.procurement.widgets import COSTS, VALUES, clock_run

MECHANISMS = ("λ-clock", "posted prices", "value clock")


def ranges(figure):
    return {axis.plotly_name: axis.range for axis in [*figure.select_xaxes(), *figure.select_yaxes()]}


def numbers(values):
    return np.asarray(values, dtype=float)


@pytest.mark.parametrize(
    "make",
    [
        figures.lie,
        figures.objectives,
        figures.value_clock,
        figures.worst_case,
        figures.impossibility,
        figures.virtual_cost,
        figures.ex_ante,
        lambda: figures.spending(MECHANISMS),
        lambda: figures.allocation_map(("ex-ante prices", "λ-clock")),
        lambda: figures.closeness(MECHANISMS),
        lambda: figures.payroll(MECHANISMS),
    ],
)
def test_every_trace_that_is_filled_later_has_a_key_of_its_own(make):
    keys = [trace.meta for trace in make().data if trace.name is None or not trace.name.startswith("buys from")]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_a_lie_earns_the_payment_less_the_cost_where_it_is_hired():
    figure = figures.lie()
    figure.layout.yaxis.range, figure.layout.yaxis2.range = (0, 6), (-2, 3)
    reports = np.array([0.0, 1.0, 2.0, 3.0])
    won = np.array([True, True, True, False])
    figures.draw_lie(figure, reports, np.where(won, 2.0, 0.0), won, np.where(won, reports, 0.0), won, cost=1.0, here=2)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(numbers(traces["utility"].y), [1, 1, 1, 0])
    np.testing.assert_allclose(numbers(traces["foil"].y), [-1, 0, 1, 0])
    assert [*traces["here"].x, *traces["here"].y] == [2, 1]
    assert list(traces["truth2"].x) == [1.0, 1.0]


def clock_figure(t, budget=5.0):
    figure, run = figures.value_clock(), clock_run(VALUES, COSTS, budget, steps=10)
    figures.draw_value_clock(figure, COSTS, VALUES, budget, run.thetas, run.active, t, "ABCDE")
    return figure, figures.keyed(figure), run


def test_boxes_have_the_sellers_values_as_widths_and_costs_as_areas():
    _, traces, _ = clock_figure(0)
    x, y = (numbers(traces["active"][axis]).reshape(-1, 6) for axis in "xy")
    order = np.argsort(COSTS / VALUES)
    np.testing.assert_allclose(x[:, 2] - x[:, 0], VALUES[order])
    np.testing.assert_allclose((x[:, 2] - x[:, 0]) * y[:, 1], COSTS[order])
    assert len(traces["left"].x) == 0


def test_the_clock_stops_with_its_corner_under_the_budget_curve_and_its_winners_as_boxes():
    for t in range(10):
        _, traces, _ = clock_figure(t)
        assert traces["corner"].x[0] * traces["corner"].y[0] > 5
        assert len(traces["spend"].x) == t + 1
    _, traces, _ = clock_figure(10)
    winners = value_clock(COSTS, VALUES, 5.0)
    assert traces["corner"].x[0] * traces["corner"].y[0] == pytest.approx(winners.spend)
    assert len(traces["active"].x) == 6 * winners.allocation.sum()
    np.testing.assert_allclose(numbers(traces["hyperbola"].x) * numbers(traces["hyperbola"].y), 5.0)


def test_axes_of_the_clock_do_not_move_from_step_to_step():
    assert ranges(clock_figure(0)[0]) == ranges(clock_figure(10)[0])


def test_the_lottery_obtains_its_ratio_at_every_cost_and_sure_prices_do_not():
    figure, lottery = figures.impossibility(), prior_free_utility_lottery(1.0, 0.9)
    figures.draw_impossibility(figure, lottery, 0.9)
    traces = figures.keyed(figure)
    x, density = numbers(traces["density"].x), numbers(traces["density"].y)
    mass = (np.diff(x) * (density[1:] + density[:-1]) / 2).sum() + density[-1] * (0.9 - x[-1])
    assert mass + traces["atom"].y[1] == pytest.approx(1, abs=2e-3)
    assert set(numbers(traces["share"].y)) == {lottery.ratio}
    assert numbers(traces["safe"].y)[0] == pytest.approx(0.1)
    assert numbers(traces["bold"].y)[-1] == 0
    assert numbers(traces["here"].x) == pytest.approx(10)


def test_the_worst_case_compares_the_mechanisms_with_the_first_best():
    table = pd.DataFrame({"first-best": [0.6, 0.7], "clock": [0.1, 0.2], "single": [0.5, 0.5], "lottery": [0.7 / 3, 0.3]})
    figure = figures.worst_case()
    figures.draw_worst_case(figure, np.array([0.1, 0.2]), table, here=0)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(numbers(traces["welfare"].y), table.iloc[0])
    np.testing.assert_allclose(numbers(traces["clock"].y), [6, 3.5])
    assert traces["here"].y[0] == pytest.approx(0.6 * 3 / 0.7)


def test_bars_of_the_objectives_follow_the_table():
    scores = pd.DataFrame([[3, 2, 1.0], [2.5, 2.2, 1.1], [2, 1.9, 1.5]], index=["value", "welfare", "utility"])
    scores.columns = scores.index
    figure = figures.objectives()
    figures.draw_objectives(figure, scores)
    np.testing.assert_allclose(numbers(figures.keyed(figure)["utility"].y), [2, 1.9, 1.5])
    assert list(figures.keyed(figure)["value"].x) == ["value", "welfare", "utility"]


def test_the_tangent_has_slope_lambda_and_goes_through_the_point():
    figure = figures.virtual_cost()
    line = np.array([0.0, 0.5, 1.0])
    curves = dict.fromkeys(("c", "cdf", "phi", "ironed", "q", "spend", "q hull", "spend hull", "R hull"), line)
    figures.draw_prior(figure, curves | {"gain": line / 2, "gain hull": line / 2})
    figures.draw_multiplier(figure, 0.7, 0.8, price=0.4, virtual=0.8, q=0.4, spend=0.16, gain=0.24)
    traces = figures.keyed(figure)
    x, y = numbers(traces["tangent"].x), numbers(traces["tangent"].y)
    assert np.diff(y) / np.diff(x) == pytest.approx(0.7)
    assert np.interp(0.16, x, y) == pytest.approx(0.24)
    assert list(traces["limit"].y) == [0.8, 0.8]
    assert [traces[f"here{k}"].x[0] for k in (1, 2, 3)] == [0.4, 0.4, 0.16]


def test_the_ex_ante_point_lies_on_the_curve_and_a_slack_budget_on_the_floor():
    market = Market(np.array([0.6, 1.0, 1.5]), [stats.uniform()] * 3, 0.5)
    solution = solve_ex_ante(market, UTILITY)
    path = pd.DataFrame({"spend": [0.1, 0.5, 0.9], "value": [0.3, solution.value, 0.95], "multiplier": [4.0, 1.0, 0.0]})
    figure = figures.ex_ante()
    figures.draw_ex_ante(figure, market.values, solution, market.values / 2, path, 0.5)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(numbers(traces["prices"].y), solution.prices)
    assert traces["value here"].y[0] == pytest.approx(np.interp(0.5, path["spend"], path["value"]))
    rich = solve_ex_ante(Market(market.values, market.priors, 3.0), UTILITY)
    figures.draw_ex_ante(figure, market.values, rich, market.values / 2, path, 3.0)
    assert np.log10(traces["multiplier here"].y[0]) == pytest.approx(figure.layout.yaxis3.range[0])


def test_spending_counts_every_realisation_once_and_the_budget_itself_is_not_too_much():
    figure = figures.spending(MECHANISMS)
    spends = {
        "λ-clock": np.array([0.2, 0.7, 1.0, 1.0]),
        "posted prices": np.array([0.5, 0.99, 1.2, 5.0]),
        "value clock": np.full(4, 1.0),
    }
    often = figures.draw_spending(figure, spends, dict.fromkeys(MECHANISMS, 0.9))
    assert often == [0, 0.5, 0]
    traces = figures.keyed(figure)
    for name, share in zip(spends, often, strict=True):
        assert numbers(traces[f"{name}/within"].y).sum() == pytest.approx(1 - share)
        assert numbers(traces[f"{name}/over"].y).sum() == pytest.approx(share)
    assert "50" in figure.layout.annotations[1].text


def test_posted_prices_make_four_rectangles_and_overspend_where_both_are_dear():
    figure = figures.allocation_map(("ex-ante prices", "λ-clock"))
    figures.draw_posted_map(figure, np.array([0.5, 0.4]), budget=0.6)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(numbers(traces["map1"].x)[:2], [0, 0.5])
    np.testing.assert_allclose(numbers(traces["map1"].y)[:2], [0, 0.4])
    assert np.asarray(traces["map1"].z).tolist() == [[3, 2], [1, 0]]
    assert traces["map1"].text[0][1] == "0 and 0.4"
    assert list(traces["over"].x) == [0, 0.5, 0.5]
    figures.draw_posted_map(figure, np.array([0.3, 0.3]), budget=0.6)
    assert list(traces["over"].x) == [None]


def test_regions_of_the_map_say_who_is_hired_and_what_is_paid():
    figure = figures.allocation_map(("ex-ante prices", "λ-clock"))
    allocation = np.array([[True, True], [False, True], [True, False], [False, False]])
    outcome = Outcome(allocation, 0.25 * allocation)
    figures.draw_allocation_map(figure, np.array([0.1, 0.9]), np.array([0.2, 0.8]), outcome, "value clock")
    trace = figures.keyed(figure)["map2"]
    assert np.asarray(trace.z).tolist() == [[3, 2], [1, 0]]
    assert trace.text[0][1] == "0 and 0.25"
    assert "value clock" in figure.layout.annotations[1].text


def sweep_table():
    rows = [
        {"mechanism": name, "n": 20, "budget": 20.0 * x, "k": 20 * x, "ratio": 0.9 + 0.04 * x, "ratio_stderr": 0.02}
        for name in MECHANISMS
        for x in (0.5, 1.0, 2.0)
    ]
    exact = [0.9 if row["mechanism"] == "λ-clock" else np.nan for row in rows]
    return pd.DataFrame(rows).assign(exact=exact, bound=0.8)


def test_gaps_are_exact_where_they_can_be_and_left_out_where_noise_hides_them():
    figure, table = figures.closeness(MECHANISMS), sweep_table()
    figures.draw_closeness(figure, table, table, share=0.5)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(numbers(traces["λ-clock/size"].y), 0.1)
    gaps = numbers(traces["value clock/size"].y)
    assert gaps[0] == pytest.approx(0.08)
    assert np.isnan(gaps[2])
    np.testing.assert_allclose(numbers(traces["value clock/budget"].x), [0.5, 1, 2])
    np.testing.assert_allclose(numbers(traces["root"].y), 1 / np.sqrt(2 * np.pi * np.array([10, 20, 40])))
    np.testing.assert_allclose(numbers(traces["proven"].y), 0.2)
    assert list(traces["cursor1"].x) == [0.5, 0.5]


def test_each_small_market_is_a_dot_and_each_mean_a_bar():
    rows = [
        {"objective": objective, "mechanism": name, "ratio": ratio}
        for objective in ("utility", "welfare")
        for name in MECHANISMS
        for ratio in (0.8, 0.9, 1.0)
    ]
    figure = figures.small_markets(pd.DataFrame(rows), MECHANISMS)
    dots, means = figure.data[:2]
    assert len(dots.x) == 9
    np.testing.assert_allclose(numbers(means.x), 0.9)
    assert list(figure.layout.yaxis.ticktext) == list(MECHANISMS)[::-1]
    assert means.y[0] == pytest.approx(2.16)


def test_players_are_hired_or_not_and_scores_stand_in_the_order_of_the_bars():
    figure = figures.payroll(MECHANISMS)
    players = pd.DataFrame({"position": ["catcher"] * 3, "years": [1, 2, 3], "value": [1, 2, 3.0], "cost": [0.2, 0.5, 3]})
    outcome = Outcome(np.array([True, True, False]), np.array([0.3, 0.6, 0]))
    scores = pd.DataFrame({"welfare": [3, 2, 1.0], "utility": [2, 1, -0.5]}, index=["value clock", "λ-clock", "posted prices"])
    figures.draw_payroll(figure, players, outcome, scores, best=3.2)
    traces = figures.keyed(figure)
    assert list(traces["in"].x) == [1, 2]
    assert list(traces["out"].y) == [3]
    np.testing.assert_allclose(numbers(traces["welfare"].x), [2, 1, 3])
    assert figure.layout.xaxis2.range[0] < -0.5

"""The lab's panels without a front end."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from labkit.panel import Panel
from labkit.procurement import (
    UTILITY,
    VALUE,
    Market,
    experiment,
    figures,
    first_best,
    prior_free_utility_ratio,
    solve_ex_ante,
    value_clock,
    widgets,
)


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Errors of callbacks reach the test."""
    monkeypatch.setattr(Panel, "raise_errors", True)


def words(panel):
    return re.sub("<[^>]*>", "", panel.readout.value).replace("\u202f", " ")


def keyed(panel):
    return figures.keyed(panel.figure)


def numbers(values):
    return np.asarray(values, dtype=float)


def test_the_lie_opens_on_a_lie_that_pays_only_a_naive_buyers_seller():
    panel = widgets.lie()
    assert "earns 1.00; the truth earns just as much" in words(panel)
    assert "Paid as bid it would earn 0.750; the truth earns 0.750 less" in words(panel)


@pytest.mark.parametrize(
    "mechanism", ["value clock", "λ-clock", "posted prices", "prior-free, deterministic", "best single seller"]
)
def test_no_report_earns_more_than_the_truth_by_any_offered_mechanism_but_one(mechanism):
    panel = widgets.lie(mechanism=mechanism)
    for i, seller in enumerate("ABCDE"):
        panel.seller.value = seller
        utility = numbers(keyed(panel)["utility"].y)
        truth = round(widgets.COSTS[i] / 0.025)
        assert utility.max() <= utility[truth] + 1e-9
        assert utility[truth] >= 0


@pytest.mark.parametrize("budget", [1.0, 5.0, 12.0])
def test_every_seller_stays_inside_the_axes(budget):
    panel = widgets.lie(budget=budget)
    payment, utility = panel.figure.layout.yaxis.range, panel.figure.layout.yaxis2.range
    for mechanism in panel.mechanism.options:
        panel.mechanism.value = mechanism
        for panel.seller.value in "ABCDE":
            for keys, (low, high) in ((("paid", "foil paid"), payment), (("utility", "foil"), utility)):
                drawn = np.concatenate([numbers(keyed(panel)[key].y) for key in keys])
                assert (low <= drawn).all()
                assert (drawn < high).all()


def test_pay_as_bid_rewards_a_lie():
    panel = widgets.lie(mechanism="pay as bid")
    utility = numbers(keyed(panel)["utility"].y)
    assert utility.max() > utility[40] + 0.5
    np.testing.assert_array_equal(numbers(keyed(panel)["foil"].y), utility)


def test_a_seller_that_is_not_hired_earns_nothing_and_the_words_say_so():
    panel = widgets.lie()
    panel.report.value = 5.0
    assert "is not hired and earns 0; the truth earns 1.00 more" in words(panel)


def test_each_objective_is_best_served_by_its_own_purchase():
    panel = widgets.objectives()
    for budget in (2.0, 15.0):
        panel.budget.value = budget
        bars = keyed(panel)
        table = np.array([numbers(bars[name].y) for name in ("value", "welfare", "utility")])  # bought for, worth as
        assert (table.argmax(0) == [0, 1, 2]).all() or np.allclose(table.max(0), np.diag(table))
    values = np.random.default_rng(0).uniform(0.5, 2, 20)
    market = Market(values, [stats.uniform()] * 20, 15.0)
    assert table[0, 0] == pytest.approx(solve_ex_ante(market, VALUE).value)
    assert table[2, 2] == pytest.approx(solve_ex_ante(market, UTILITY).value)


def test_the_clock_panel_ends_where_the_mechanism_does():
    panel = widgets.playback(steps=20, step=10)
    assert "the clock goes on" in words(panel)
    panel.step.value = 20
    run, outcome = panel.result, value_clock(widgets.COSTS, widgets.VALUES, 5.0)
    np.testing.assert_array_equal(run.active[-1], outcome.allocation)
    assert run.thetas[-1] == outcome.theta
    assert "hires A, B, D and pays 4.50 of 5.00" in words(panel)
    assert "1.38 times" in words(panel)  # 8.8 / 6.4


def test_nobody_comes_back_to_the_clock_and_it_pays_too_much_until_it_stops():
    panel = widgets.playback(steps=30, step=30)
    for draw in range(1, 10):
        panel.market.value = draw
        run = panel.result
        assert (run.active[1:] <= run.active[:-1]).all()
        spend = run.thetas * (run.active @ run.values)
        assert spend[-1] <= run.budget * (1 + 1e-9)
        if run.thetas[-1] < 1:
            assert (spend[:-1] > run.budget).all()


def test_with_a_large_budget_the_clock_pays_full_value_at_once():
    panel = widgets.playback(step=0)
    panel.budget.value = 20
    assert set(panel.result.thetas) == {1.0}
    assert "stops at θ* = 1.00" in words(panel)


def test_a_market_in_which_nobody_can_be_paid_is_said_to_be_one():
    run = widgets.clock_run(np.array([1.0]), np.array([2.0]), 1.5, 4)
    assert not run.active.any()
    assert run.outcome.spend == 0


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.1, "2.57"), (0.01, "2.94"), (1e-4, "2.999")])
def test_the_unkind_family_climbs_to_three(epsilon, ratio):
    panel = widgets.worst_case(epsilon)
    assert f"ratio of {ratio}" in words(panel)
    lottery = numbers(keyed(panel)["lottery"].y)
    assert (lottery < 3).all()
    assert (np.diff(lottery) <= 1e-9).all()


def test_the_linear_programme_lies_on_the_impossibility_curve():
    panel = widgets.impossibility()
    dots = keyed(panel)["programme"]
    exact = [prior_free_utility_ratio(1.0, 1 - 1 / h) for h in dots.x]
    np.testing.assert_allclose(numbers(dots.y), exact, rtol=0.02)
    panel.max_cost.value = 0.99
    assert keyed(panel)["here"].y[0] == pytest.approx(prior_free_utility_ratio(1.0, 0.99))
    assert "guarantees 17.8 %" in words(panel)


def test_the_price_is_where_the_tangent_touches_the_envelope():
    panel = widgets.virtual_costs()
    for prior in widgets.PRIORS:
        panel.prior.value = prior
        for multiplier in (0.0, 0.5, 2.0):
            panel.multiplier.value = multiplier
            traces = keyed(panel)
            hull = numbers(traces["gain hull"].y) - multiplier * numbers(traces["gain hull"].x)
            point = traces["here3"].y[0] - multiplier * traces["here3"].x[0]
            assert point == pytest.approx(hull.max(), abs=1e-3)


def test_an_irregular_price_jumps_and_a_regular_one_meets_its_virtual_cost():
    panel = widgets.virtual_costs()
    high = keyed(panel)["here1"].x[0]
    panel.multiplier.value += 0.05
    assert (high, keyed(panel)["here1"].x[0]) == pytest.approx((1.0, 0.2), abs=2e-3)
    assert "never posted" in words(panel)
    panel.prior.value, panel.value.value, panel.multiplier.value = "uniform on [0, 1]", 1.0, 1.0
    assert keyed(panel)["here1"].x[0] == pytest.approx(0.25, abs=1e-3)  # 2 · 2p = 1
    assert "never posted" not in words(panel)


@pytest.mark.parametrize("prior", list(widgets.PRIORS))
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_solution_lies_on_the_curve_of_all_budgets(prior, alpha):
    panel = widgets.ex_ante()
    panel.prior.value, panel.alpha.value, panel.budget.value = prior, alpha, 1.0
    market, solution, _, path = panel.result
    on_curve = np.interp(np.log(1.0), np.log(path["spend"]), path["value"])
    assert solution.value == pytest.approx(on_curve, rel=0.01)
    slope = np.interp(1.0, path["spend"], path["multiplier"])
    assert solution.multiplier == pytest.approx(slope, rel=0.05)
    assert market.n == 20


def test_a_slack_budget_is_called_no_brake():
    panel = widgets.ex_ante()
    panel.budget.value = 50
    assert "the budget is no brake, λ = 0" in words(panel)
    panel.n.value = 100
    assert panel.result[0].n == 100


def test_only_the_ex_ante_prices_overspend():
    panel = widgets.spending(draws=1000)
    for prior in widgets.PRIORS:
        panel.prior.value = prior
        _, _, spends, shares = panel.result
        assert spends["posted prices"].max() <= 1 + 1e-9
        assert spends["λ-clock"].max() <= 1 + 1e-9
        assert (spends["ex-ante prices"] > 1 + 1e-9).mean() > 0.2
        assert shares["ex-ante prices"] == pytest.approx(1, abs=0.05)
        assert shares["posted prices"] < shares["λ-clock"] < 1.02
    assert "the others never" in words(panel)


def test_a_larger_market_keeps_the_costs_of_the_smaller_one():
    panel = widgets.spending(draws=200)
    panel.n.value, panel.budget.value = 60, 9.0
    assert panel.result[1].prices.shape == (60,)
    assert panel.status.value == ""


def test_the_map_shows_a_rectangle_beside_a_cut_corner():
    panel = widgets.allocation_map(size=41)
    region = np.asarray(keyed(panel)["map2"].z)
    assert region[2, 2] == 3  # both cheap
    assert region[16, 14] == 1  # 0.40 and 0.35: the dearer one has left
    assert region[14, 16] == 2
    assert region[-1, -1] == 0
    assert "the ex-ante prices pay 0.500 and 0.500" in words(panel)
    assert "overspend with probability 25 %" in words(panel)


def test_hovering_over_the_map_tells_the_payments():
    panel = widgets.allocation_map(size=21)
    for name in ("posted prices", "value clock"):
        panel.mechanism.value = name
        payments, told = panel.result[-1].payments, np.asarray(keyed(panel)["map2"].text).reshape(-1)
        amounts = np.array([text.split(" and ") for text in told], dtype=float)
        np.testing.assert_allclose(amounts, payments, rtol=5e-3, atol=5e-5)


def test_the_cross_moves_without_a_new_map():
    panel = widgets.allocation_map(size=21)
    before = panel.result
    panel.first.value, panel.second.value = 0.9, 0.9
    assert panel.result is before
    assert "pay 0 and 0" in words(panel)
    assert list(keyed(panel)["here2"].x) == [0.9]


def test_every_mechanism_of_the_map_keeps_the_budget():
    panel = widgets.allocation_map(size=21)
    for name in panel.mechanism.options:
        panel.mechanism.value = name
        assert panel.result[-1].spend.max() <= panel.budget.value * (1 + 1e-9)
        assert name in panel.figure.layout.annotations[1].text


@pytest.fixture(scope="module")
def sweeps():
    return [experiment.stored(name) for name in ("budget_sweep", "market_size")]


def test_the_key_figure_says_that_knowing_nothing_is_worthless_with_a_large_budget(sweeps):
    panel = widgets.closeness(*sweeps, share=1.0)
    assert "value clock 0 %" in words(panel).replace("−0", "0")
    panel.share.value = 0.1
    share = int(re.search(r"value clock (\d+) %", words(panel))[1])
    assert share > 85
    panel.objective.value = "welfare"
    assert "bound on welfare" in words(panel)
    for n in dict.fromkeys(sweeps[0]["n"]):
        panel.n.value = int(n)
        assert words(panel).startswith(f"{n} sellers")


@pytest.fixture
def players(monkeypatch):
    """Twelve made-up players in place of the data set."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"years": 3, "position": "catcher", "value": rng.uniform(1, 4, 12), "cost": rng.uniform(0.1, 2, 12)})

    def payroll(budget, value_per_run=0.05):
        values = table["value"].to_numpy() * value_per_run / 0.05
        return Market(values, [stats.uniform(0, 2)] * 12, budget), table["cost"].to_numpy(), table.assign(value=values)

    monkeypatch.setattr(experiment, "payroll", payroll)
    return table


def test_the_payroll_panel_hires_whom_the_mechanism_hires(players):
    panel = widgets.payroll(budget=3.0)
    outcome = value_clock(players["cost"].to_numpy(), players["value"].to_numpy(), 3.0)
    assert len(keyed(panel)["in"].x) == outcome.allocation.sum()
    assert words(panel).startswith(f"By value clock, 3.00 million hire {outcome.allocation.sum()} of 12 players: they are paid")
    best = first_best(players["cost"].to_numpy(), players["value"].to_numpy(), 3.0)
    assert keyed(panel)["best"].x[0] == pytest.approx(best)


def test_the_payroll_panel_keeps_every_budget_and_follows_the_worth_of_a_run(players):
    panel = widgets.payroll(budget=3.0)
    for budget in (1.0, 10.0, 100.0):
        panel.budget.value = budget
        assert all(outcome.spend <= budget * (1 + 1e-9) for outcome in panel.result[2].values())
    panel.value_per_run.value = 0.1
    np.testing.assert_allclose(panel.result[0].values, 2 * players["value"])
    panel.mechanism.value = "pay as bid"
    assert words(panel).startswith("By pay as bid, 100 million hire 12 of 12 players")

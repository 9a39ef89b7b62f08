from functools import partial

import numpy as np
import pytest
from scipy import stats

from labkit.procurement import (
    UTILITY,
    WELFARE,
    Market,
    Outcome,
    Violation,
    adaptive_posted_prices,
    audit,
    bayesian_clock,
    best_single_seller,
    clock_auction,
    ex_ante_mechanism,
    monopsony_posted_prices,
    pay_as_bid_greedy,
    post_prices,
    price_path,
    prior_free_welfare,
    sequential_posted_prices,
    solve_ex_ante,
    threshold_payments,
    uniform_posted_price,
    value_clock,
    virtual_cost,
)

BUDGET = 0.9
PRIORS = [stats.expon(scale=0.5), stats.lognorm(0.6, scale=0.5), stats.gamma(2, scale=0.3)]
MARKET = Market([1.0, 1.3, 1.6], PRIORS, BUDGET)
VALUES = MARKET.values
PATH = price_path(MARKET, UTILITY, ticks=400)
TRAINING = MARKET.sample(300, np.random.default_rng(9))
POSTED = partial(sequential_posted_prices, market=MARKET, objective=UTILITY, solution=solve_ex_ante(MARKET, UTILITY))
TRUTHFUL = {
    "posted prices": POSTED,
    "posted prices for welfare": partial(POSTED, objective=WELFARE, solution=solve_ex_ante(MARKET, WELFARE)),
    "posted prices in random order": partial(POSTED, order="random"),
    "posted prices, best set": partial(POSTED, selection="knapsack"),
    "adaptive posted prices": partial(adaptive_posted_prices, market=MARKET, objective=UTILITY, ticks=64),
    "uniform posted price": partial(uniform_posted_price, market=MARKET, objective=UTILITY, training=TRAINING),
    "monopsony": partial(monopsony_posted_prices, market=MARKET, objective=UTILITY),
    "clock": partial(clock_auction, prices=PATH.prices, budget=BUDGET),
    "clock, one by one": partial(clock_auction, prices=PATH.prices[::40], budget=BUDGET, jumps=[False, True, True]),
    "clock, refined": partial(clock_auction, prices=PATH.prices[::10], budget=BUDGET, refine=True),
    "value clock": partial(value_clock, values=VALUES, budget=BUDGET),
    "proportional share": partial(value_clock, values=VALUES, budget=BUDGET, cost_weight=0),
    "best single seller": partial(best_single_seller, values=VALUES, budget=BUDGET),
    "prior-free, randomized": partial(prior_free_welfare, values=VALUES, budget=BUDGET),
    "prior-free, deterministic": partial(prior_free_welfare, values=VALUES, budget=BUDGET, variant="deterministic"),
}
SLOW = {"prior-free, deterministic", "uniform posted price", "adaptive posted prices"}


@pytest.mark.parametrize("name", TRUTHFUL)
def test_no_lie_pays_in_3000_profiles(name):
    costs = MARKET.sample(300 if name in SLOW else 3000, np.random.default_rng(0))
    report = audit(TRUTHFUL[name], costs, BUDGET, np.linspace(0, 1.6, 41))
    assert report.first_violation is None
    assert report.max_gain <= 1e-12
    assert report.min_seller_utility >= -1e-12
    assert report.max_spend <= BUDGET * (1 + 1e-12)
    assert report.monotone


@pytest.mark.parametrize("name", TRUTHFUL)
def test_winners_are_paid_the_highest_report_that_still_wins(name):
    costs = MARKET.sample(100, np.random.default_rng(1))
    outcome = TRUTHFUL[name](costs)
    assert outcome.allocation.any()
    assert threshold_payments(TRUTHFUL[name], costs, 3.0) == pytest.approx(outcome.payments, abs=1e-9)


@pytest.mark.parametrize("name", [*sorted(TRUTHFUL.keys() - SLOW), "prior-free, deterministic", "adaptive posted prices"])
def test_mean_payments_are_mean_virtual_costs(name):
    size = 20_000
    costs = MARKET.sample(size, np.random.default_rng(2))
    outcome = TRUTHFUL[name](costs)
    phi = np.stack([virtual_cost(prior, c) for prior, c in zip(PRIORS, costs.T, strict=True)], axis=1)
    difference = outcome.spend - np.where(outcome.allocation, phi, 0).sum(1)
    assert difference.mean() == pytest.approx(0, abs=4 * difference.std() / np.sqrt(size))


def test_discrete_reports_and_ties_are_audited_too():
    costs = np.random.default_rng(0).integers(0, 5, (200, 3)) / 4
    for name, mechanism in TRUTHFUL.items():
        report = audit(mechanism, costs, BUDGET, np.arange(7) / 4)
        assert report.first_violation is None, name


def test_a_wrong_belief_costs_no_truthfulness():
    wrong = Market(VALUES, [stats.uniform(0, 0.2)] * 3, BUDGET)
    costs = MARKET.sample(500, np.random.default_rng(0))
    for mechanism in (sequential_posted_prices, bayesian_clock):
        report = audit(lambda c, f=mechanism: f(c, wrong, UTILITY), costs, BUDGET, np.linspace(0, 1.5, 7))
        assert report.first_violation is None


# what the audit must find


def test_paying_as_bid_invites_lies():
    costs = MARKET.sample(300, np.random.default_rng(0))
    report = audit(partial(pay_as_bid_greedy, values=VALUES, budget=BUDGET), costs, BUDGET, np.linspace(0, 1.6, 41))
    assert report.max_gain > 0.05
    assert report.monotone
    lie = report.first_violation
    assert lie.kind == "lie"
    reported = costs.copy()
    reported[lie.profile, lie.seller] = lie.report
    before, after = (pay_as_bid_greedy(c[lie.profile], VALUES, BUDGET) for c in (costs, reported))
    gain = after.payments[lie.seller] - costs[lie.profile, lie.seller] * after.allocation[lie.seller]
    assert not before.payments[lie.seller] - costs[lie.profile, lie.seller] * before.allocation[lie.seller]
    assert lie.amount == pytest.approx(gain)


def test_paying_the_next_cost_of_the_clock_invites_lies():
    def next_cost(costs):
        """The value clock's winners, each paid c_{k+1} / v_{k+1} per unit of value though B / v(S) is less."""
        outcome = value_clock(costs, VALUES, BUDGET)
        density = np.where(outcome.allocation | (costs > np.minimum(VALUES, BUDGET)), 1.0, costs / VALUES).min(1)
        return Outcome(outcome.allocation, outcome.allocation * density[:, None] * VALUES)

    costs = MARKET.sample(300, np.random.default_rng(0))
    report = audit(next_cost, costs, BUDGET, np.linspace(0, 1.6, 21))
    assert report.max_gain > 0.05
    assert report.max_spend > BUDGET


def test_the_optimum_in_expectation_overspends():
    solution = solve_ex_ante(MARKET, UTILITY)
    costs = MARKET.sample(300, np.random.default_rng(0))
    report = audit(partial(ex_ante_mechanism, solution=solution), costs, BUDGET, np.linspace(0, 1, 5))
    assert report.first_violation.kind == "budget"
    assert report.first_violation.seller is None
    assert report.first_violation.amount == pytest.approx(ex_ante_mechanism(costs, solution).spend.max() - BUDGET)
    assert report.max_spend > BUDGET
    assert report.max_gain <= 0


def test_losses_paid_losers_and_wins_by_high_reports_are_found():
    costs = np.array([[0.2, 0.6], [0.4, 0.3]])
    grid = np.linspace(0, 1, 11)

    def underpaid(c):
        return Outcome(c <= 0.5, np.where(c <= 0.5, 0.25, 0))

    def paid_for_nothing(c):
        return Outcome(np.zeros(c.shape, dtype=bool), np.array([[0, 0.1]]) + 0 * c)

    def upside_down(c):
        return Outcome(c >= 0.5, np.where(c >= 0.5, c, 0))

    assert audit(underpaid, costs, 2, grid).first_violation == Violation("loss", 1, 0, None, pytest.approx(0.15))
    assert audit(underpaid, costs, 2, grid).min_seller_utility == pytest.approx(-0.15)
    assert audit(paid_for_nothing, costs, 2, grid).first_violation == Violation("paid loser", 0, 1, None, 0.1)
    assert not audit(upside_down, costs, 2, grid).monotone


def test_a_win_that_pays_nothing_more_is_still_not_monotone():
    def odd(c):
        wins = (c < 0.2) | ((c > 0.5) & (c < 0.6))
        return Outcome(wins, np.where(wins, c, 0) * 0)

    report = audit(odd, np.zeros((1, 1)), 1, np.array([0.1, 0.3, 0.55]))
    assert report.first_violation == Violation("not monotone", 0, 0, 0.55, 0.0)
    report = audit(odd, np.full((1, 1), 0.55), 1, np.array([0.3]))  # loses at a report below the truth, at which it wins
    assert not report.monotone


def test_one_profile_can_be_audited():
    report = audit(partial(post_prices, prices=np.full(3, 0.5), budget=1.1), np.full(3, 0.2), 1.1, np.array([0.4, 0.6]))
    assert report.max_gain == 0
    assert report.min_seller_utility == 0
    assert report.max_spend == 1
    assert threshold_payments(partial(post_prices, prices=np.full(3, 0.5), budget=1.1), np.full(3, 0.2), 2.0) == pytest.approx(
        [0.5, 0.5, 0]
    )


def test_who_wins_at_the_highest_report_has_it_for_a_threshold():
    always = lambda c: Outcome(np.ones(c.shape, dtype=bool), np.ones(c.shape))  # noqa: E731
    assert threshold_payments(always, np.full((2, 1), 0.3), 1.0).tolist() == [[1.0], [1.0]]


# bad inputs


@pytest.mark.parametrize(
    ("costs", "budget", "grid", "message"),
    [
        (np.empty((0, 3)), 1, [0.1], r"costs of shape \(0, 3\): expected at least one profile"),
        (np.array(0.1), 1, [0.1], r"costs of shape \(\)"),
        (np.array([0.1, -0.1, 0]), 1, [0.1], r"costs\[1\]=-0\.1"),
        (np.zeros(3), 0, [0.1], "budget=0: expected a finite number > 0"),
        (np.zeros(3), 1, [], r"report_grid=\[\]: expected finite numbers \(G,\) ≥ 0"),
        (np.zeros(3), 1, ["a"], r"report_grid=\['a'\]: expected finite numbers \(G,\) ≥ 0"),
        (["a", "b", "c"], 1, [0.1], r"costs=\['a', 'b', 'c'\]: expected finite numbers ≥ 0"),
        (np.zeros(3), 1, [-0.1], r"report_grid=\[-0\.1\]"),
        (np.zeros(3), 1, [0.1, np.nan], "report_grid="),
        (np.zeros(3), 1, [[0.1]], "report_grid="),
    ],
)
def test_bad_profiles_and_grids_are_named(costs, budget, grid, message):
    with pytest.raises(ValueError, match=message):
        audit(TRUTHFUL["value clock"], costs, budget, grid)


@pytest.mark.parametrize("highest", [0, -1, np.inf, np.nan, "1"])
def test_thresholds_are_sought_below_a_finite_report(highest):
    with pytest.raises(ValueError, match=f"highest={highest!r}: expected a finite number > 0"):
        threshold_payments(TRUTHFUL["value clock"], np.zeros(3), highest)

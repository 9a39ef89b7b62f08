import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from labkit.procurement import (
    UTILITY,
    VALUE,
    WELFARE,
    DiscretePrior,
    Market,
    MixturePrior,
    Objective,
    bayesian_clock,
    clock_auction,
    iid_clock_value,
    iid_posted_price_ratio,
    price_path,
    prices_at,
    solve_ex_ante,
)
from tests.unit.procurement.markets import mixed_market

UNIFORM = stats.uniform()
IRREGULAR = MixturePrior([stats.uniform(0, 0.2), stats.uniform(0.8, 0.2)], [0.5, 0.5])


def run_by_hand(c, prices, budget):
    """The clock of one profile, row by row."""
    for row in prices:
        active = c <= row
        if row[active].sum() <= budget:
            return active, np.where(active, row, 0)
    return np.zeros(len(c), dtype=bool), np.zeros(len(c))


def random_rows(rng, ticks, n):
    """Rows that fall, each seller's prices at its own pace and sometimes not at all."""
    steps = rng.random((ticks, n)) * (rng.random((ticks, n)) < 0.5)
    return np.maximum(1 - 2 * np.cumsum(steps, axis=0) / ticks, 0)


# the engine


@pytest.mark.parametrize("ticks", [1, 2, 7, 64, 65])
def test_bisection_stops_at_the_row_where_the_clock_does(ticks):
    rng = np.random.default_rng(ticks)
    prices, costs = random_rows(rng, ticks, 6), rng.random((500, 6))
    outcome = clock_auction(costs, prices, 0.9)
    for c, allocation, payments in zip(costs, outcome.allocation, outcome.payments, strict=True):
        active, paid = run_by_hand(c, prices, 0.9)
        assert (allocation == active).all()
        assert (payments == paid).all()


def test_a_clock_whose_last_row_is_too_dear_buys_nothing():
    outcome = clock_auction(np.array([[0.1, 0.1], [0.1, 0.9]]), np.array([[0.8, 0.8], [0.6, 0.6]]), 1.0)
    assert outcome.allocation.tolist() == [[False, False], [True, False]]
    assert outcome.payments.tolist() == [[0, 0], [0.8, 0]]


def test_a_cost_equal_to_the_price_sells_and_prices_that_add_up_to_the_budget_fit():
    outcome = clock_auction(np.array([0.1, 0.2]), np.array([[0.1, 0.2]]), 0.3)  # 0.1 + 0.2 > 0.3 in floating point
    assert outcome.payments.tolist() == [0.1, 0.2]


def test_prices_that_jump_fall_one_by_one_by_index():
    rows = np.array([[0.8, 0.8, 0.8], [0.2, 0.2, 0.2]])
    costs = np.array([[0.1, 0.1, 0.1], [0.5, 0.1, 0.1], [0.1, 0.5, 0.1], [0.5, 0.5, 0.5]])
    outcome = clock_auction(costs, rows, 1.7, jumps=np.ones(3, dtype=bool))
    assert outcome.payments.tolist() == [[0.2, 0.2, 0.8], [0, 0.8, 0.8], [0.2, 0, 0.8], [0, 0.8, 0.8]]
    together = clock_auction(costs, rows, 1.7)
    assert together.payments.tolist() == [[0.2, 0.2, 0.2], [0, 0.2, 0.2], [0.2, 0, 0.2], [0, 0, 0]]


def test_refined_prices_fall_linearly_between_rows():
    rows = np.array([[0.8, 0.4], [0.2, 0.1]])
    outcome = clock_auction(np.array([[0.1, 0.05], [0.1, 0.35], [0.7, 0.05]]), rows, 0.9, refine=True)
    # after a share s of the step the prices add up to 1.2 − 0.9 s; in the last two profiles a seller leaves at s = 1 / 6
    expected = [[0.6, 0.3], [0.7, 0], [0, 0.35]]
    assert outcome.payments == pytest.approx(np.array(expected), abs=1e-8)
    assert (outcome.spend <= 0.9 * (1 + 1e-12)).all()


def test_one_profile_in_one_outcome_out():
    outcome = bayesian_clock(np.full(8, 0.1), mixed_market(), UTILITY)
    assert outcome.allocation.shape == outcome.payments.shape == (8,)


# the Bayesian clock


@pytest.mark.parametrize(
    ("n", "value", "budget", "exact"), [(20, 1, 1, 3.307481), (20, 1, 3, 4.643101), (7, 1.4, 0.9, 2.420730)]
)
def test_exact_value_of_identical_uniform_sellers(n, value, budget, exact):
    assert iid_clock_value(UNIFORM, value, n, budget, UTILITY) == pytest.approx(exact, abs=1e-6)
    market = Market(np.full(n, value), [UNIFORM] * n, budget)
    costs = market.sample(40_000, np.random.default_rng(0))
    utility = bayesian_clock(costs, market, UTILITY, ticks=200, refine=True).utility(market)
    assert utility.mean() == pytest.approx(exact, abs=4 * utility.std() / 200)


@pytest.mark.parametrize("objective", [UTILITY, WELFARE, VALUE, Objective.mixture(0.5)])
@pytest.mark.parametrize("prior", [stats.expon(scale=0.5), stats.beta(2, 1)])
def test_exact_value_for_every_objective_and_prior(objective, prior):
    market = Market(np.full(5, 1.2), [prior] * 5, 0.8)
    costs = market.sample(40_000, np.random.default_rng(0))
    reached = bayesian_clock(costs, market, objective, refine=True).objective(market, costs, objective)
    assert iid_clock_value(prior, 1.2, 5, 0.8, objective) == pytest.approx(reached.mean(), abs=4 * reached.std() / 200)


def test_the_exact_value_of_two_sellers_by_integrating_over_both_costs():
    v, B, top = 1.0, 0.6, 0.5  # p(0) = v / 2

    def utility(y, x):
        low, high = min(x, y), max(x, y)
        if high <= B / 2:
            return 2 * (v - B / 2)
        return (v - min(high, top)) * (low <= top)

    expected = sum(
        integrate.dblquad(utility, *xs, *ys, epsabs=1e-10)[0]
        for xs, ys in itertools.product([(0, B / 2), (B / 2, top), (top, 1)], repeat=2)
        if not (xs == ys == (B / 2, top))
    )
    inside = (top - B / 2) ** 2 * (v - (B / 2 + 2 / 3 * (top - B / 2)))  # E max of two uniform costs in the middle square
    assert iid_clock_value(UNIFORM, v, 2, B, UTILITY) == pytest.approx(expected + inside, abs=1e-8)


def test_refining_leaves_no_loss_at_any_number_of_ticks():
    market = Market(np.ones(20), [UNIFORM] * 20, 3.0)
    costs = market.sample(4000, np.random.default_rng(0))
    values = {
        ticks: bayesian_clock(costs, market, UTILITY, ticks=ticks, refine=True).utility(market).mean()
        for ticks in (400, 1600, 6400)
    }
    assert values[400] == pytest.approx(values[6400], rel=1e-5)
    assert values[1600] == pytest.approx(values[6400], rel=1e-6)


def test_more_ticks_lose_less_and_4096_lose_a_thousandth():
    market = Market(np.ones(20), [UNIFORM] * 20, 1.0)
    costs = market.sample(4000, np.random.default_rng(0))
    full = bayesian_clock(costs, market, UTILITY, refine=True).utility(market).mean()
    loss = [1 - bayesian_clock(costs, market, UTILITY, ticks=t).utility(market).mean() / full for t in (50, 200, 1000, 4096)]
    assert loss == sorted(loss, reverse=True)
    assert 0 <= loss[-1] < 1e-3


@pytest.mark.parametrize("objective", [UTILITY, WELFARE, Objective.mixture(0.3)])
def test_a_large_budget_stops_the_clock_at_lambda_zero(objective):
    market = mixed_market(budget=1e3)
    costs = market.sample(500, np.random.default_rng(0))
    prices = prices_at(market, objective, np.zeros(1))[0]
    outcome = bayesian_clock(costs, market, objective)
    assert (outcome.payments == np.where(costs <= prices, prices, 0)).all()


@pytest.mark.parametrize("objective", [UTILITY, WELFARE, VALUE])
def test_a_vanishing_budget_buys_nothing(objective):
    market = mixed_market(budget=1e-9)
    costs = np.maximum(market.sample(500, np.random.default_rng(0)), 1e-6)
    assert not bayesian_clock(costs, market, objective).allocation.any()


@pytest.mark.parametrize("prior", [UNIFORM, stats.expon(scale=0.5), stats.beta(2, 1), stats.lognorm(0.6, scale=0.5)])
@pytest.mark.parametrize("objective", [UTILITY, WELFARE])
@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_for_identical_sellers_the_clock_beats_static_prices(prior, objective, budget):
    solution = solve_ex_ante(Market(np.ones(8), [prior] * 8, budget), objective)
    static = iid_posted_price_ratio(8, float(solution.accept_prob[0]), solution.market_size) * solution.value
    assert static <= iid_clock_value(prior, 1.0, 8, budget, objective) <= solution.value


def test_the_gap_to_the_upper_bound_falls_like_one_fifth_over_k():
    for n in (40, 160):
        solution = solve_ex_ante(Market(np.ones(n), [UNIFORM] * n, n / 10), UTILITY)
        gap = 1 - iid_clock_value(UNIFORM, 1.0, n, n / 10, UTILITY) / solution.value
        assert 0.15 < gap * solution.market_size < 0.25


@pytest.mark.parametrize("objective", [UTILITY, WELFARE, VALUE, Objective.mixture(0.5)])
@pytest.mark.parametrize("refine", [False, True])
def test_the_budget_holds_in_every_one_of_1e5_profiles(objective, refine):
    market = mixed_market(4, 0.9)
    costs = market.sample(100_000, np.random.default_rng(0))
    spend = bayesian_clock(costs, market, objective, ticks=500, refine=refine).spend
    assert spend.max() <= 0.9 * (1 + 1e-12)
    assert spend.max() > 0.85


@pytest.mark.parametrize("refine", [False, True])
def test_permuting_sellers_permutes_the_outcome(refine):
    market, to = mixed_market(), np.random.default_rng(1).permutation(8)
    permuted = Market(market.values[to], [market.priors[i] for i in to], market.budget)
    costs = market.sample(500, np.random.default_rng(0))
    outcome = bayesian_clock(costs, market, UTILITY, refine=refine)
    other = bayesian_clock(costs[:, to], permuted, UTILITY, refine=refine)
    assert (other.allocation == outcome.allocation[:, to]).all()
    assert other.payments == pytest.approx(outcome.payments[:, to], rel=1e-9)


def test_irregular_sellers_are_lowered_one_by_one():
    market = Market(np.ones(6), [IRREGULAR] * 6, 2.0)
    costs = market.sample(4000, np.random.default_rng(0))
    path = price_path(market, WELFARE)
    assert path.jumps.all()
    outcome = clock_auction(costs, path.prices, 2.0, path.jumps)
    assert outcome.spend.max() <= 2 * (1 + 1e-12)
    dear = ((costs > 0.5) & outcome.allocation).any(1)
    cheap = ((costs < 0.5) & outcome.allocation & (outcome.payments < 0.5)).any(1)
    assert (dear & cheap).any()  # high price for some, low price for others
    together = clock_auction(costs, path.prices, 2.0)
    gain = outcome.welfare(market, costs) - together.welfare(market, costs)
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


def test_discrete_sellers_are_bought_at_their_types():
    market = Market([1.0, 1.3, 0.8], [DiscretePrior([0.1, 0.3, 0.6], [0.2, 0.5, 0.3])] * 3, 0.9)
    costs = np.array(list(itertools.product([0.1, 0.3, 0.6], repeat=3)))
    outcome = bayesian_clock(costs, market, UTILITY)
    paid = outcome.payments[outcome.allocation]
    assert np.isclose(paid[:, None], [0.1, 0.3, 0.6], rtol=1e-9).any(1).all()


def test_price_paths_start_at_lambda_zero_and_end_where_everyone_fits():
    for objective in (UTILITY, WELFARE, VALUE):
        market = mixed_market()
        path = price_path(market, objective, ticks=300)
        assert path.multipliers[0] == 0
        assert (np.diff(path.multipliers) > 0).all()
        assert path.prices.shape == (300, 8)
        assert path.prices[0].sum() > market.budget >= path.prices[-1].sum()
        assert not path.jumps.any()


# bad inputs


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([[0.1, 0.2], [0.1, 0.3]], r"prices\[0:2, 1\]=\[0\.2 0\.3\]: expected rows that do not increase"),
        ([0.1, 0.2], r"prices of shape \(2,\): expected \(T, n\)"),
        (np.empty((0, 2)), r"prices of shape \(0, 2\): expected \(T, n\) with T ≥ 1"),
        ([[0.1, -0.2]], r"prices from -0\.2 to 0\.1: expected finite numbers ≥ 0"),
        ([[np.inf, 1.0], [0.5, 0.5]], "prices from 0.5 to inf: expected finite"),
        ([[1.0, 1.0], [np.nan, 1.0], [0.5, 0.5]], r"prices\[0:2, 0\]=\[ 1\. nan\]: expected rows that do not increase"),
    ],
)
def test_rows_of_a_clock_are_finite_and_fall(prices, message):
    with pytest.raises(ValueError, match=message):
        clock_auction(np.array([0.1, 0.1]), np.array(prices), 1.0)


@pytest.mark.parametrize("ticks", [1, 0, -3, 2.5, "9"])
def test_a_clock_has_two_ticks(ticks):
    with pytest.raises(ValueError, match=f"ticks={ticks!r}: expected an int >= 2"):
        bayesian_clock(np.full(8, 0.1), mixed_market(), UTILITY, ticks=ticks)


def test_bad_costs_budgets_and_flags_are_named():
    rows = np.array([[0.5, 0.5]])
    with pytest.raises(ValueError, match=r"costs of shape \(3,\): expected \(n,\) or \(S, n\) with n = 2"):
        clock_auction(np.zeros(3), rows, 1.0)
    with pytest.raises(ValueError, match=r"costs\[0, 1\]=nan"):
        clock_auction(np.array([[0.1, np.nan]]), rows, 1.0)
    with pytest.raises(ValueError, match="budget=0: expected a finite number > 0"):
        clock_auction(np.zeros(2), rows, 0)
    with pytest.raises(ValueError, match=r"jumps of shape \(3,\): expected \(n,\) with n = 2"):
        clock_auction(np.zeros(2), rows, 1.0, jumps=np.zeros(3))
    with pytest.raises(ValueError, match=r"prices=\[\['a', 'b'\]\]: expected finite numbers ≥ 0"):
        clock_auction(np.zeros(2), [["a", "b"]], 1.0)


@pytest.mark.parametrize(
    ("prior", "value", "n", "message"),
    [
        (UNIFORM, 1.0, 0, "n=0: expected an int >= 1"),
        (UNIFORM, 1.0, 2.5, r"n=2\.5: expected an int >= 1"),
        (UNIFORM, np.nan, 3, "value=nan: expected a finite number > 0"),
        (stats.uniform, 1.0, 3, r"prior is the family uniform: expected one of its members, stats\.uniform\(…\)"),
        (DiscretePrior([0.1, 0.3], [0.5, 0.5]), 1.0, 3, "prior has no pdf: expected a continuous prior"),
        (IRREGULAR, 3.0, 3, r"prior is irregular: expected a virtual cost φ that does not decrease up to the price 1\.0"),
    ],
)
def test_the_exact_value_is_that_of_one_regular_continuous_prior(prior, value, n, message):
    with pytest.raises(ValueError, match=message):
        iid_clock_value(prior, value, n, 1.0, UTILITY)

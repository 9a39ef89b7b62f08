import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from labkit.procurement import (
    UNCONDITIONAL_BOUND,
    UTILITY,
    VALUE,
    WELFARE,
    DiscretePrior,
    Market,
    Objective,
    adaptive_posted_prices,
    iid_posted_price_ratio,
    monopsony_posted_prices,
    optimal_mechanism_lp,
    optimal_sequential_prices,
    post_prices,
    posted_price_bound,
    prices_at,
    sequential_posted_prices,
    solve_ex_ante,
    uniform_posted_price,
)
from tests.unit.procurement.markets import mixed_market

UNIFORM = stats.uniform()
OBJECTIVES = [UTILITY, WELFARE, VALUE, Objective.mixture(0.5)]
MECHANISMS = {
    "density": sequential_posted_prices,
    "random": lambda *args: sequential_posted_prices(*args, order="random"),
    "index": lambda *args: sequential_posted_prices(*args, order="index"),
    "knapsack": lambda *args: sequential_posted_prices(*args, selection="knapsack"),
    "adaptive": adaptive_posted_prices,
    "monopsony": monopsony_posted_prices,
    "uniform": lambda costs, market, objective: uniform_posted_price(
        costs, market, objective, market.sample(500, np.random.default_rng(9))
    ),
}


def two_types(budget):
    return Market([1.0, 1.0], [DiscretePrior([0.2, 0.8], [0.5, 0.5])] * 2, budget)


# the proven bound


@pytest.mark.parametrize(
    ("k", "factor", "bound"),
    [
        (1, 0.63212, 0),
        (2, 0.72933, 0.36466),
        (4, 0.80463, 0.60347),
        (10, 0.87489, 0.78740),
        (25, 0.92048, 0.88366),
        (100, 0.96014, 0.95054),
    ],
)
def test_the_bound_at_integers(k, factor, bound):
    assert posted_price_bound(k) == pytest.approx(bound, abs=1e-5)
    assert stats.poisson(k).expect(lambda j: np.minimum(j, k)) / k == pytest.approx(factor, abs=1e-5)


@pytest.mark.parametrize("k", [1.5, 2.999, 3.0, 7.3, 40.9])
def test_the_bound_between_integers_is_the_expected_minimum(k):
    expected = stats.poisson(k).expect(lambda j: np.minimum(j, k)) / k
    assert posted_price_bound(k) == pytest.approx((1 - 1 / k) * expected, rel=1e-9)


def test_eleven_sellers_per_budget_suffice_for_four_fifths():
    assert posted_price_bound(10) < 0.8 <= posted_price_bound(11) == pytest.approx(0.8006, abs=5e-5)


def test_the_bound_rises_to_1_and_beats_the_square_root_rate():
    assert (np.diff(posted_price_bound(np.linspace(1, 300, 3000))) > 0).all()
    k = np.arange(2, 300)
    assert (posted_price_bound(k) > (1 - 1 / k) * (1 - 1 / np.sqrt(2 * np.pi * k))).all()
    assert posted_price_bound(np.inf) == 1


def test_the_bound_of_very_large_markets_follows_stirlings_formula():
    k = 10.0 ** np.arange(4, 300)
    gap = 1 / k + (1 - 1 / k) * (1 - 1 / (12 * k)) / np.sqrt(2 * np.pi * k)
    np.testing.assert_allclose(posted_price_bound(k), 1 - gap, rtol=1e-12)
    assert posted_price_bound(1e16) < 1
    assert (np.diff(posted_price_bound(np.linspace(9990, 10010, 2001))) > 0).all()


def test_a_fifth_is_safe_in_every_market():
    dear = (1 - np.exp(-2)) / 2
    assert pytest.approx(0.19782, abs=1e-5) == UNCONDITIONAL_BOUND == pytest.approx(1 / (1 / posted_price_bound(2) + 1 / dear))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_static_prices_reach_the_bound(objective, seed):
    market = mixed_market(12, budget=(0.8, 1.5, 3, 6)[seed], seed=seed)
    solution = solve_ex_ante(market, objective)
    costs = market.sample(10_000, np.random.default_rng(seed))
    reached = sequential_posted_prices(costs, market, objective).objective(market, costs, objective)
    assert reached.mean() >= posted_price_bound(solution.market_size) * solution.value - 4 * reached.std() / 100


@pytest.mark.parametrize(
    ("n", "value", "budget", "exact"), [(20, 1, 1, 2.712027), (20, 1, 3, 3.964099), (7, 1.4, 0.9, 1.807759)]
)
def test_exact_value_of_identical_uniform_sellers(n, value, budget, exact):
    market = Market(np.full(n, value), [UNIFORM] * n, budget)
    solution = solve_ex_ante(market, UTILITY)
    ratio = iid_posted_price_ratio(n, float(solution.accept_prob[0]), solution.market_size)
    assert ratio * solution.value == pytest.approx(exact, abs=1e-6)
    costs = market.sample(20_000, np.random.default_rng(0))
    utility = sequential_posted_prices(costs, market, UTILITY).utility(market)
    assert utility.mean() == pytest.approx(exact, abs=4 * utility.std() / np.sqrt(20_000))


def test_the_gap_to_the_upper_bound_falls_like_one_over_root_k():
    for n, ratio in ((10, 0.794), (40, 0.881), (160, 0.948), (640, 0.976)):
        solution = solve_ex_ante(Market(np.ones(n), [UNIFORM] * n, n / 10), UTILITY)
        assert iid_posted_price_ratio(n, float(solution.accept_prob[0]), solution.market_size) == pytest.approx(ratio, abs=6e-4)


# the engine


@pytest.mark.parametrize("layout", ["C", "F"])
def test_offers_in_order_are_the_plain_loop(layout):
    rng = np.random.default_rng(0)
    costs, prices, order = np.asarray(rng.random((400, 9)), order=layout), rng.uniform(0.2, 0.8, 9), rng.permutation(9)
    outcome = post_prices(costs, prices, 1.3, order)
    for c, allocation, payments in zip(costs, outcome.allocation, outcome.payments, strict=True):
        spent, bought = 0.0, []
        for i in order:
            if c[i] <= prices[i] and spent + prices[i] <= 1.3:
                spent += prices[i]
                bought.append(i)
        assert np.flatnonzero(allocation).tolist() == sorted(bought)
        assert (payments == np.where(allocation, prices, 0)).all()


def test_a_cost_equal_to_the_price_sells_and_prices_that_add_up_to_the_budget_fit():
    assert post_prices(np.array([0.1, 0.2]), np.array([0.1, 0.2]), 0.3).payments.tolist() == [0.1, 0.2]


def test_density_is_value_per_price_for_utility_and_value():
    market = mixed_market()
    costs = market.sample(300, np.random.default_rng(0))
    for objective in (UTILITY, VALUE):
        prices = solve_ex_ante(market, objective).prices
        order = np.argsort(-market.values / prices)
        outcome = sequential_posted_prices(costs, market, objective)
        assert (outcome.payments == post_prices(costs, prices, market.budget, order).payments).all()


def test_density_is_expected_gain_per_price_for_welfare():
    market = mixed_market()
    costs = market.sample(300, np.random.default_rng(0))
    prices = solve_ex_ante(market, WELFARE).prices
    draws = market.sample(200_000, np.random.default_rng(1))
    cost = np.array([column[column <= p].mean() for column, p in zip(draws.T, prices, strict=True)])
    order = np.argsort(-(market.values - cost) / prices)
    outcome = sequential_posted_prices(costs, market, WELFARE)
    assert (outcome.payments == post_prices(costs, prices, market.budget, order).payments).all()


def test_a_random_order_is_new_for_each_profile_and_depends_on_the_seed_alone():
    market = Market(np.ones(4), [UNIFORM] * 4, 0.3)  # one price of 0.27 fits
    costs = np.zeros((4000, 4))
    outcome = sequential_posted_prices(costs, market, UTILITY, order="random", rng=np.random.default_rng(5))
    assert (outcome.allocation.sum(1) == 1).all()
    assert outcome.allocation.mean(0) == pytest.approx(np.full(4, 0.25), abs=4 * np.sqrt(3 / 16 / 4000))
    again = sequential_posted_prices(costs, market, UTILITY, order="random", rng=np.random.default_rng(5))
    assert (outcome.allocation == again.allocation).all()


def test_scaled_prices_are_those_of_another_budget_under_the_same_cap():
    market = mixed_market()
    costs = market.sample(300, np.random.default_rng(0))
    for scale in (0.7, 1.3):
        prices = solve_ex_ante(replace(market, budget=scale * market.budget), UTILITY, price_cap=market.budget).prices
        outcome = sequential_posted_prices(costs, market, UTILITY, scale=scale)
        assert (
            outcome.payments == post_prices(costs, prices, market.budget, np.argsort(-market.values / prices)).payments
        ).all()


@pytest.mark.parametrize("objective", [UTILITY, WELFARE])
def test_the_knapsack_is_the_best_of_all_sets(objective):
    market = mixed_market(7, 1.2)
    costs = market.sample(300, np.random.default_rng(0))
    prices = solve_ex_ante(market, objective).prices
    draws = market.sample(200_000, np.random.default_rng(1))
    cost = np.array([column[column <= p].mean() for column, p in zip(draws.T, prices, strict=True)])
    gains = market.values - objective.payment_weight * prices - objective.cost_weight * cost
    outcome = sequential_posted_prices(costs, market, objective, selection="knapsack")
    sets = np.array(list(itertools.product([False, True], repeat=7)))
    sets = sets[sets @ prices <= 1.2]
    for c, allocation in zip(costs, outcome.allocation, strict=True):
        possible = sets[(sets <= (c <= prices)).all(1)]
        assert gains[allocation].sum() == pytest.approx((possible @ gains).max(), abs=1e-2)
        assert any((allocation == row).all() for row in possible)


def test_a_lottery_mixes_its_two_prices():
    market = two_types(1.0)
    solution = solve_ex_ante(market, WELFARE)
    seller, low, high, prob_high = solution.lottery
    costs = market.sample(40_000, np.random.default_rng(0))
    reached = sequential_posted_prices(costs, market, WELFARE).welfare(market, costs)
    expected = 0.0
    for price, weight in ((high, prob_high), (low, 1 - prob_high)):
        prices = solution.prices.copy()
        prices[seller] = price
        order = [0, 1] if prices[0] < prices[1] else [1, 0]  # of equal values the cheaper price has the higher density
        profiles = np.array(list(itertools.product([0.2, 0.8], repeat=2)))
        expected += weight * post_prices(profiles, prices, 1.0, order).welfare(market, profiles).mean()
    assert 0 < prob_high < 1
    assert reached.mean() == pytest.approx(expected, abs=4 * reached.std() / 200)


# prices that react to answers


def test_the_adaptive_price_is_that_of_the_problem_that_is_left():
    market = mixed_market(6)
    order = np.argsort(-market.values / solve_ex_ante(market, UTILITY).prices)
    for costs in market.sample(5, np.random.default_rng(0)):
        outcome = adaptive_posted_prices(costs, market, UTILITY)
        left = 1.5
        for j, i in enumerate(order[:4]):
            rest = Market(market.values[order[j:]], [market.priors[k] for k in order[j:]], left)
            price = solve_ex_ante(rest, UTILITY, price_cap=1.5).prices[0]
            if abs(costs[i] - price) > 2e-3:
                assert outcome.allocation[i] == (costs[i] <= price)
                assert outcome.payments[i] == pytest.approx(price * (costs[i] <= price), abs=2e-3)
            left -= outcome.payments[i]


def test_adaptive_prices_beat_static_ones():
    for n, budget in ((5, 1.0), (20, 3.0)):
        market = mixed_market(n, budget)
        costs = market.sample(4000, np.random.default_rng(0))
        gain = adaptive_posted_prices(costs, market, UTILITY).utility(market)
        gain -= sequential_posted_prices(costs, market, UTILITY).utility(market)
        assert gain.mean() > 4 * gain.std() / np.sqrt(4000)


def test_identical_discrete_sellers_get_high_prices_one_by_one_while_the_budget_lasts():
    market = Market(np.ones(3), [DiscretePrior([0.2, 0.8], [0.5, 0.5])] * 3, 1.2)
    # seller 0, whose static price is the high one, comes last; .8 + .1 + .1 ≤ 1.2 in expectation, so seller 1 is offered .8,
    # and what is left is too little for another such offer
    outcome = adaptive_posted_prices(np.array([[0.8, 0.2, 0.2], [0.2, 0.8, 0.8]]), market, WELFARE)
    assert outcome.payments == pytest.approx(np.array([[0, 0.8, 0.2], [0.2, 0.8, 0]]), rel=1e-9)


@pytest.mark.parametrize(("budget", "optimum"), [(0.3, 0.6), (1.0, 0.9)])
def test_optimal_prices_of_two_types(budget, optimum):
    two = dict(values=[1.0, 1.0], types=[[0.2, 0.8]] * 2, probs=[[0.5, 0.5]] * 2)
    assert optimal_sequential_prices(**two, budget=budget, objective=WELFARE) == pytest.approx(optimum)


@pytest.mark.parametrize("objective", [UTILITY, WELFARE])
def test_optimal_prices_of_one_seller_are_the_best_type(objective):
    types, probs = np.array([0.1, 0.4, 0.7]), np.array([0.3, 0.3, 0.4])
    a, b = objective.payment_weight, objective.cost_weight
    gains = [((1 - a * p - b * types) * probs)[types <= p].sum() for p in types[:2]]  # 0.7 exceeds the budget
    assert optimal_sequential_prices([1.0], [types], [probs], 0.5, objective) == pytest.approx(max(gains))


@pytest.mark.parametrize("unit", [1e-300, 1e-13, 1e-3, 1e13, 1e300])
def test_another_unit_of_money_only_scales_the_optimal_prices(unit):
    types, probs = np.array([[0.1, 0.3, 0.6], [0.2, 0.4, 0.9], [0.15, 0.5, 0.7]]), [[0.2, 0.5, 0.3]] * 3
    values = np.array([1.0, 1.3, 0.8])
    best = optimal_sequential_prices(values, types, probs, 0.9, WELFARE)
    assert optimal_sequential_prices(unit * values, unit * types, probs, unit * 0.9, WELFARE) / unit == pytest.approx(best)


@pytest.mark.parametrize("unit", [1e-13, 1 / 3, 1.0, 1e13])
def test_optimal_prices_may_add_up_to_the_budget(unit):
    costs = unit * np.array([[0.1], [0.2], [0.6]])
    assert optimal_sequential_prices(np.ones(3), costs, [[1.0]] * 3, unit * 0.9, VALUE) == pytest.approx(3)
    assert optimal_sequential_prices(np.ones(3), costs, [[1.0]] * 3, unit * 0.9 * (1 - 1e-10), VALUE) == pytest.approx(2)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_posted_prices_are_ordered_static_optimal_dsic_optimum(objective, seed):
    rng = np.random.default_rng(seed)
    n, m = (2, 4) if seed else (3, 3)
    types, probs = [np.sort(rng.uniform(0.05, 1, m)) for _ in range(n)], [rng.dirichlet(np.ones(m)) for _ in range(n)]
    values, budget = rng.uniform(0.6, 1.4, n), float(rng.uniform(0.4, 1))
    market = Market(values, [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)], budget)
    profiles = np.array(list(itertools.product(*types)))
    weights = np.array([np.prod(f) for f in itertools.product(*probs)])
    best = optimal_sequential_prices(values, types, probs, budget, objective)
    adaptive = weights @ adaptive_posted_prices(profiles, market, objective).objective(market, profiles, objective)
    assert adaptive <= best + 1e-9
    optimum = optimal_mechanism_lp(values, types, probs, budget, objective, budget_kind="ex_post", truth="DSIC").value
    assert best <= optimum + 1e-9
    assert best >= 0.8 * optimum


# baselines


def test_the_uniform_price_is_the_best_of_its_grid_on_the_training_profiles():
    market = mixed_market()
    training = market.sample(800, np.random.default_rng(1))
    paid = uniform_posted_price(training, market, UTILITY, training).payments
    price = paid.max()
    assert np.unique(paid).tolist() == [0, price]
    grid = np.arange(1, 31) / 30 * min(market.budget, market.values.max(), training.max())
    order = np.argsort(-market.values)
    scores = [post_prices(training, np.full(8, p), market.budget, order).utility(market).mean() for p in grid]
    assert price == pytest.approx(grid[np.argmax(scores)])


def test_the_monopsonist_offers_its_prices_without_a_budget():
    market = mixed_market()
    costs = market.sample(2000, np.random.default_rng(0))
    outcome = monopsony_posted_prices(costs, market, UTILITY)
    prices = prices_at(market, UTILITY, np.zeros(1))[0]
    assert (outcome.payments == np.where(outcome.allocation, prices, 0)).all()
    refused = (costs <= prices) & ~outcome.allocation
    left = market.budget - outcome.spend
    assert (np.broadcast_to(prices, costs.shape)[refused] > np.repeat(left, refused.sum(1))).all()


# what holds for all of them


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_budget_holds_in_every_one_of_1e5_profiles(name, objective):
    market = mixed_market(5, 0.9)
    costs = market.sample(100_000, np.random.default_rng(0))
    spend = MECHANISMS[name](costs, market, objective).spend
    assert spend.max() <= 0.9 * (1 + 1e-12)
    assert spend.max() > 0.5


@pytest.mark.parametrize("name", ["density", "knapsack", "adaptive", "uniform"])
def test_permuting_sellers_permutes_the_outcome(name):
    market, to = mixed_market(), np.random.default_rng(1).permutation(8)
    permuted = Market(market.values[to], [market.priors[i] for i in to], market.budget)
    costs, training = (market.sample(400, np.random.default_rng(seed)) for seed in (0, 1))
    if name == "uniform":
        outcome = uniform_posted_price(costs, market, UTILITY, training)
        other = uniform_posted_price(costs[:, to], permuted, UTILITY, training[:, to])
    else:
        outcome, other = MECHANISMS[name](costs, market, UTILITY), MECHANISMS[name](costs[:, to], permuted, UTILITY)
    assert (other.allocation == outcome.allocation[:, to]).all()
    assert other.payments == pytest.approx(outcome.payments[:, to], rel=1e-6)


@pytest.mark.parametrize("name", MECHANISMS)
def test_one_profile_in_one_outcome_out_and_free_sellers_work(name):
    outcome = MECHANISMS[name](np.zeros(8), mixed_market(), UTILITY)
    assert outcome.allocation.shape == outcome.payments.shape == (8,)
    assert outcome.allocation.any()


@pytest.mark.parametrize("name", ["density", "random", "index", "knapsack", "adaptive", "monopsony"])
def test_a_large_budget_posts_the_prices_of_lambda_zero(name):
    market = mixed_market(budget=1e3)
    costs = market.sample(400, np.random.default_rng(0))
    prices = solve_ex_ante(market, UTILITY, price_cap=np.inf).prices
    outcome = MECHANISMS[name](costs, market, UTILITY)
    assert outcome.payments == pytest.approx(np.where(costs <= prices, prices, 0), rel=1e-3)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_vanishing_budget_buys_nothing(name):
    market = mixed_market(budget=1e-9)
    costs = np.maximum(market.sample(400, np.random.default_rng(0)), 1e-6)
    assert not MECHANISMS[name](costs, market, UTILITY).allocation.any()


def test_value_at_unbounded_costs_stays_within_the_cap():
    market = Market(np.ones(3), [stats.expon()] * 3, 40.0)
    outcome = sequential_posted_prices(np.full((2, 3), [0.5, 5, 20]), market, VALUE)
    assert np.isfinite(outcome.payments).all()
    assert (outcome.spend <= 40 * (1 + 1e-12)).all()


# bad inputs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(order="price"), r"order='price': expected one of \('density', 'random', 'index'\)"),
        (dict(selection="best"), r"selection='best': expected one of \('greedy', 'knapsack'\)"),
        (dict(scale=0), "scale=0: expected a finite number > 0"),
        (dict(scale=np.nan), "scale=nan"),
        (dict(scale="1"), "scale='1': expected a finite number > 0"),
        (dict(rng=0), r"rng=0: expected a numpy\.random\.Generator"),
        (
            dict(solution=solve_ex_ante(mixed_market(7), UTILITY)),
            "solution has 7 prices: expected one for each of the n = 8 sellers",
        ),
    ],
)
def test_unknown_names_and_scales_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        sequential_posted_prices(np.zeros(8), mixed_market(), UTILITY, **wrong)


def test_the_knapsack_lists_the_sets_of_at_most_20_sellers():
    market = Market(np.ones(21), [UNIFORM] * 21, 1.0)
    with pytest.raises(ValueError, match=r"got n = 21, allowed are at most 20"):
        sequential_posted_prices(np.zeros(21), market, UTILITY, selection="knapsack")


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (np.zeros(7), r"costs of shape \(7,\): expected \(n,\) or \(S, n\) with n = 8"),
        (np.array([0.1] * 7 + [-1e-9]), r"costs\[7\]=-1e-09: expected finite numbers ≥ 0"),
        (np.array([[0.1] * 7 + [np.nan]]), r"costs\[0, 7\]=nan"),
    ],
)
def test_bad_costs_are_named(name, costs, message):
    with pytest.raises(ValueError, match=message):
        MECHANISMS[name](costs, mixed_market(), UTILITY)


@pytest.mark.parametrize(
    ("prices", "budget", "order", "message"),
    [
        ([0.1, -0.1], 1, None, r"prices=\[ 0\.1 -0\.1\]: expected finite numbers \(n,\) ≥ 0"),
        ([0.1, np.inf], 1, None, r"prices=\[0\.1 inf\]: expected finite numbers \(n,\) ≥ 0"),
        (["0.1", "0.2"], 1, None, r"prices=\['0\.1', '0\.2'\]: expected finite numbers"),
        ([0.1, np.nan], 1, None, "prices="),
        ([0.1, 0.1], 0, None, "budget=0: expected a finite number > 0"),
        ([0.1, 0.1], 1, [0, 0], r"order=\[0 0\]: expected a permutation of 0 … 1"),
        ([0.1, 0.1], 1, [0], r"order=\[0\]: expected a permutation"),
    ],
)
def test_bad_offers_are_named(prices, budget, order, message):
    with pytest.raises(ValueError, match=message):
        post_prices(np.zeros(2), np.array(prices), budget, order)


@pytest.mark.parametrize("k", [0.99, -1.0, np.nan])
def test_the_bound_needs_a_price_below_the_budget(k):
    with pytest.raises(ValueError, match=f"k={k}: expected numbers ≥ 1"):
        posted_price_bound(k)


@pytest.mark.parametrize(
    ("n", "q", "k", "message"),
    [
        (0, 0.5, 2, "n=0: expected an int >= 1"),
        (2.5, 0.5, 2, r"n=2\.5: expected an int >= 1"),
        (3, 0, 2, r"accept_prob=0: expected a number in \(0, 1\]"),
        (3, 1.1, 2, r"accept_prob=1\.1: expected a number in \(0, 1\]"),
        (3, np.nan, 2, "accept_prob=nan"),
        (3, 0.5, 0.5, r"k=0\.5: expected a number ≥ 1"),
    ],
)
def test_identical_sellers_accept_with_a_probability(n, q, k, message):
    with pytest.raises(ValueError, match=message):
        iid_posted_price_ratio(n, q, k)


def test_a_uniform_price_is_tuned_on_something():
    market = mixed_market()
    with pytest.raises(ValueError, match=r"training of shape \(0, 8\): expected \(R, n\) with R ≥ 1 profiles"):
        uniform_posted_price(np.zeros(8), market, UTILITY, np.empty((0, 8)))
    for number in (0, 2.5):
        with pytest.raises(ValueError, match=f"num_prices={number}: expected an int >= 1"):
            uniform_posted_price(np.zeros(8), market, UTILITY, np.ones((1, 8)), num_prices=number)


def test_optimal_prices_are_for_at_most_four_sellers_with_proper_types():
    five = dict(values=[1.0] * 5, types=[[0.1]] * 5, probs=[[1.0]] * 5)
    with pytest.raises(ValueError, match="values: got 5 sellers; allowed are at most 4"):
        optimal_sequential_prices(**five, budget=1, objective=UTILITY)
    with pytest.raises(ValueError, match="1 values, 2 types, 1 probs: expected one of each per seller"):
        optimal_sequential_prices([1.0], [[0.1], [0.2]], [[1.0]], 1, UTILITY)
    with pytest.raises(ValueError, match="expected finite types ≥ 0 in increasing order"):
        optimal_sequential_prices([1.0], [[0.2, 0.1]], [[0.5, 0.5]], 1, UTILITY)
    with pytest.raises(ValueError, match="expected numbers > 0 that sum to 1"):
        optimal_sequential_prices([1.0], [[0.1, 0.2]], [[0.5, 0.4]], 1, UTILITY)

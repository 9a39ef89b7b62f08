import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from labkit.procurement.ex_ante import envelope, ex_ante_mechanism, prices_at, solve_ex_ante
from labkit.procurement.lp import optimal_mechanism_lp
from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.priors import DiscretePrior, EmpiricalPrior, MixturePrior, virtual_cost

UNIFORM = stats.uniform(0, 1)
TWO_TYPES = DiscretePrior([0.2, 0.8], [0.5, 0.5])
CHEAP_OR_DEAR = MixturePrior([stats.uniform(0, 0.2), stats.uniform(0.8, 0.2)], [0.5, 0.5])
OBJECTIVES = {"utility": UTILITY, "mixture": Objective.mixture(0.5), "welfare": WELFARE, "value": VALUE}
EVERYTHING = np.append(0, np.geomspace(1e-3, 1e3, 300))


def alike(n, budget, prior=UNIFORM, value=1.0):
    return Market(np.full(n, value), [prior] * n, budget)


def discrete_market(seed):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(2, 6)), int(rng.integers(2, 7))
    priors = [DiscretePrior(np.sort(rng.uniform(0, 1.2, m)), rng.dirichlet(np.ones(m))) for _ in range(n)]
    return Market(rng.uniform(0.5, 1.5, n), priors, float(rng.uniform(0.2, 1.5)))


def continuous_market(budget):
    priors = [
        stats.uniform(0, 1.1),
        stats.expon(scale=0.5),
        stats.lognorm(0.6, scale=0.4),
        stats.truncnorm(-3, np.inf, loc=0.6, scale=0.2),
        stats.beta(2, 1, scale=0.9),
        stats.uniform(0.3, 0.5),
    ]
    return Market([1.0, 1.6, 0.8, 1.2, 0.7, 1.4], priors, budget)


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


# closed forms


@pytest.mark.parametrize(("n", "budget", "value"), [(10, 1.0, 2.162278), (50, 2.0, 8.0)])
def test_utility_of_uniform_costs(n, budget, value):
    solution = solve_ex_ante(alike(n, budget), UTILITY)
    price = np.sqrt(budget / n)
    assert solution.value == pytest.approx(value, abs=1e-6)
    assert solution.value == pytest.approx(n * price * (1 - price), rel=1e-11)
    assert solution.multiplier == pytest.approx(1 / (2 * price) - 1, rel=1e-10)
    np.testing.assert_allclose(solution.prices, price, rtol=1e-11)
    np.testing.assert_allclose(solution.accept_prob, price, rtol=1e-11)
    assert solution.expected_spend == pytest.approx(budget, rel=1e-11)
    assert solution.market_size == pytest.approx(budget / price)
    assert solution.lottery is None


@pytest.mark.parametrize(("n", "budget", "value"), [(10, 1.0, 2.662278), (50, 2.0, 9.0)])
def test_welfare_of_uniform_costs(n, budget, value):
    solution = solve_ex_ante(alike(n, budget), WELFARE)
    price = np.sqrt(budget / n)
    assert solution.value == pytest.approx(value, abs=1e-6)
    assert solution.value == pytest.approx(n * (price - price**2 / 2), rel=1e-11)
    assert solution.multiplier == pytest.approx((1 / price - 1) / 2, rel=1e-10)


@pytest.mark.parametrize(("v", "top", "n", "budget"), [(1.4, 0.9, 7, 0.9), (0.6, 2.0, 12, 3.0), (3.0, 1.0, 4, 9.0)])
def test_uniform_costs_on_any_range(v, top, n, budget):
    utility = solve_ex_ante(alike(n, budget, stats.uniform(0, top), v), UTILITY)
    welfare = solve_ex_ante(alike(n, budget, stats.uniform(0, top), v), WELFARE)
    p, r = min(v / 2, top, np.sqrt(budget * top / n)), min(v, top, np.sqrt(budget * top / n))
    assert utility.value == pytest.approx(n * p / top * (v - p), rel=1e-10)
    assert welfare.value == pytest.approx(n * (v * r / top - r**2 / (2 * top)), rel=1e-10)
    np.testing.assert_allclose(utility.prices, p, rtol=1e-10)
    np.testing.assert_allclose(welfare.prices, r, rtol=1e-10)


def test_a_slack_budget_has_multiplier_zero_exactly():
    solution = solve_ex_ante(alike(5, 4.0), UTILITY)
    assert solution.value == pytest.approx(1.25, rel=1e-12)
    assert solution.multiplier == 0
    assert solution.expected_spend == pytest.approx(1.25, rel=1e-12)


def test_exponential_costs():
    solution = solve_ex_ante(alike(12, 1.5, stats.expon(scale=1 / 2), 1.2), UTILITY)
    np.testing.assert_allclose(solution.prices, 0.286550, atol=1e-6)
    assert solution.multiplier == pytest.approx(0.781929, abs=1e-6)
    assert solution.value == pytest.approx(4.781634, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "multiplier", "prices", "value"),
    [(UTILITY, 0.173447, [0.426095, 0.6, 0.198844], 0.954792), (WELFARE, 0.721564, [0.409311, 0.6, 0.221191], 1.213171)],
)
def test_power_laws_with_one_price_at_the_cap(objective, multiplier, prices, value):
    priors = [stats.beta(alpha, 1, scale=top) for alpha, top in [(1, 1.0), (2, 0.8), (0.5, 1.2)]]
    solution = solve_ex_ante(Market([1.0, 1.5, 0.7], priors, 0.6), objective)
    assert solution.multiplier == pytest.approx(multiplier, abs=1e-6)
    np.testing.assert_allclose(solution.prices, prices, atol=1e-6)
    assert solution.value == pytest.approx(value, abs=1e-6)
    assert solution.market_size == pytest.approx(1)


def test_value_ignores_payments_and_exhausts_the_budget():
    solution = solve_ex_ante(alike(10, 1.0), VALUE)
    np.testing.assert_allclose(solution.prices, np.sqrt(0.1), rtol=1e-11)
    assert solution.multiplier == pytest.approx(1 / (2 * np.sqrt(0.1)), rel=1e-10)


# the first-order condition, against an independent root finder


def test_prices_and_multiplier_solve_the_first_order_conditions(objective):
    market = continuous_market(1.0)
    a, b = objective.payment_weight, objective.cost_weight

    def price(seller, multiplier):
        prior, v = market.priors[seller], market.values[seller]
        top = min(market.budget, prior.ppf(1 - 1e-12))

        def surplus(c):
            return v - b * c - (a + multiplier) * virtual_cost(prior, c)

        low = prior.ppf(0)
        if surplus(top) >= 0 or surplus(low) <= 0:
            return top if surplus(top) >= 0 else low
        return brentq(surplus, low, top, xtol=1e-14)

    def overspend(multiplier):
        prices = np.array([price(i, multiplier) for i in range(6)])
        return prices @ market.accept_prob(prices) - market.budget

    multiplier = brentq(overspend, 1e-6, 10, xtol=1e-13)
    solution = solve_ex_ante(market, objective)
    assert solution.multiplier == pytest.approx(multiplier, abs=1e-9)
    sold = solution.accept_prob > 0
    want = np.array([price(i, multiplier) for i in range(6)])
    np.testing.assert_allclose(solution.prices[sold], want[sold], atol=1e-9)
    cost = market.expected_cost(want)
    value = market.values @ market.accept_prob(want) - a * market.budget - b * cost.sum()
    assert solution.value == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("budget", [1e-9, 1e-4, 0.01, 0.3, 1.0, 2.0, 3.0, 50.0])
def test_the_grid_only_brackets_a_regular_optimum(budget, objective):
    coarse, fine = (solve_ex_ante(continuous_market(budget), objective, grid=grid) for grid in (16, 2048))
    assert coarse.value == pytest.approx(fine.value, rel=1e-10)
    assert coarse.multiplier == pytest.approx(fine.multiplier, rel=1e-8)
    assert coarse.lottery is None
    assert coarse.expected_spend <= budget * (1 + 1e-9)
    assert (coarse.multiplier == 0) == (coarse.expected_spend < budget * (1 - 1e-9))


@pytest.mark.parametrize(
    "prior",
    [stats.lognorm(3.0), stats.gamma(0.3), stats.beta(2, 2), stats.weibull_min(0.7), stats.triang(0.5), stats.pareto(1.5)],
    ids=lambda prior: prior.dist.name,
)
def test_heavy_tails_and_poles_are_solved_to_rounding(prior, objective):
    market = Market(np.linspace(1.0, 2.0, 7), [prior] * 7, 4.0)
    for cap in (None, np.inf):
        coarse, fine = (solve_ex_ante(market, objective, cap, grid) for grid in (512, 4096))
        assert coarse.value == pytest.approx(fine.value, rel=1e-9)
        assert coarse.lottery is None


def test_a_normal_truncated_at_zero_is_solved_though_rounding_starts_its_support_below():
    mean = 0.4497133105998256
    prior = stats.truncnorm(-mean / 0.2, np.inf, loc=mean, scale=0.2)
    assert prior.ppf(0) < 0
    for budget in (1.0, 3.0):
        solution = solve_ex_ante(alike(20, budget, prior, 1.7), UTILITY)
        assert solution.expected_spend == pytest.approx(budget, rel=1e-10)
        assert solution.value == pytest.approx(
            solve_ex_ante(alike(20, budget, prior, 1.7), UTILITY, grid=2048).value, rel=1e-10
        )


def test_any_object_with_the_four_functions_is_a_prior():
    class Uniform:
        """Its distribution function never quite reaches 0."""

        def cdf(self, c):
            return np.clip(c, 1e-17, 1)

        def pdf(self, c):
            return np.where((np.asarray(c) >= 0) & (np.asarray(c) <= 1), 1.0, 0.0)

        def ppf(self, q):
            return np.asarray(q, dtype=float)

        def rvs(self, size, random_state):
            return random_state.random(size)

    for objective in OBJECTIVES.values():
        own, scipys = (solve_ex_ante(alike(10, 1.0, prior), objective) for prior in (Uniform(), UNIFORM))
        assert own.value == pytest.approx(scipys.value, rel=1e-12)
        np.testing.assert_allclose(own.prices, scipys.prices, rtol=1e-12)


# discrete markets


@pytest.mark.parametrize(
    ("budget", "cap", "value", "lotteries"),
    [(0.3, np.inf, 0.8 + 0.1 / 7, 1), (0.3, None, 0.8, 0), (1.0, np.inf, 0.9142857, 1)],
)
def test_two_types_and_one_lottery(budget, cap, value, lotteries):
    solution = solve_ex_ante(alike(2, budget, TWO_TYPES), WELFARE, cap)
    assert solution.value == pytest.approx(value, abs=1e-7)
    assert (solution.lottery is not None) == lotteries


def test_the_lottery_spends_what_whole_steps_leave():
    solution = solve_ex_ante(alike(2, 0.3, TWO_TYPES), WELFARE, np.inf)
    seller, low, high, chance = solution.lottery
    assert (seller, low, high) == (0, 0.2, 0.8)
    assert chance == pytest.approx(0.1 / 0.7)
    assert solution.expected_spend == pytest.approx(0.3)
    np.testing.assert_allclose(solution.accept_prob, [0.5 + 0.5 / 7, 0.5])
    np.testing.assert_array_equal(solution.prices, [0.2, 0.2])
    assert solution.market_size == pytest.approx(0.3 / 0.8)
    assert solution.multiplier == pytest.approx(1 / 7)


def test_a_lottery_between_no_offer_and_the_lowest_type():
    solution = solve_ex_ante(alike(3, 0.25, TWO_TYPES), VALUE)
    seller, low, high, chance = solution.lottery
    assert seller == 2
    assert low < 0.2
    assert TWO_TYPES.cdf(low) == 0
    assert (high, chance) == (0.2, pytest.approx(0.5))
    np.testing.assert_allclose(solution.accept_prob, [0.5, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "value"), [("utility", 1.405), ("welfare", 1.636538), ("mixture", 1.505192), ("value", 2.276)]
)
def test_the_fixed_market_of_three_types(name, value):
    types = [[0.1, 0.3, 0.6], [0.2, 0.4, 0.9], [0.15, 0.5, 0.7]]
    probs = [[0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4]]
    market = Market([1.0, 1.3, 0.8], [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)], 0.9)
    assert solve_ex_ante(market, OBJECTIVES[name]).value == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("seed", range(15))
def test_the_hull_is_the_optimum_of_the_interim_linear_program(seed, objective):
    market = discrete_market(seed)
    types, probs = [prior.costs for prior in market.priors], [prior.probs for prior in market.priors]
    for cap in (None, np.inf):
        lp = optimal_mechanism_lp(market.values, types, probs, market.budget, objective, price_cap=cap)
        assert solve_ex_ante(market, objective, cap).value == pytest.approx(lp.value, abs=1e-9)


def test_free_sellers_are_bought_first():
    free = DiscretePrior([0.0, 0.5], [0.4, 0.6])
    solution = solve_ex_ante(alike(2, 0.05, free), UTILITY, np.inf)
    # each is bought at 0, and the step from 0 to 0.5 buys 0.6 more for 0.5
    assert solution.value == pytest.approx(0.8 + 0.05 / 0.5 * (0.6 - 0.5), rel=1e-12)
    assert solve_ex_ante(alike(2, 0.05, DiscretePrior([0.0], [1.0])), UTILITY).value == 2
    assert solve_ex_ante(alike(2, 0.05, DiscretePrior([0.0], [1.0])), UTILITY).market_size == np.inf


def test_nothing_is_bought_above_the_cap_or_the_value():
    dear = solve_ex_ante(Market([1.0, 0.1, 0.1], [TWO_TYPES, TWO_TYPES, stats.uniform(0.5, 1)], 0.15), WELFARE)
    assert dear.value == 0
    assert dear.expected_spend == 0
    np.testing.assert_array_equal(dear.accept_prob, 0)
    # below the support φ(c) = c, so the price is v / (a + b + λ) unless the cap is lower
    np.testing.assert_allclose(dear.prices, [0.15, 0.1, 0.1])


@pytest.mark.parametrize("budget", [0.15, 0.4, 0.6, 1.0])
def test_discrete_and_continuous_sellers_share_one_budget(budget):
    market = Market([1.0, 1.0, 1.0, 1.2], [TWO_TYPES, UNIFORM, TWO_TYPES, stats.expon(scale=0.5)], budget)
    for objective in OBJECTIVES.values():
        solution = solve_ex_ante(market, objective)
        fine = solve_ex_ante(market, objective, grid=2048)
        assert solution.value == pytest.approx(fine.value, rel=1e-10)
        assert solution.expected_spend <= budget * (1 + 1e-11)
        assert (solution.multiplier > 0) == (solution.expected_spend > budget * (1 - 1e-9))
        # the continuous sellers sit where their marginal gain equals the multiplier, whoever is marginal
        phi = virtual_cost(UNIFORM, solution.prices[1])
        a, b = objective.payment_weight, objective.cost_weight
        left = 1 - (a + solution.multiplier) * phi - b * solution.prices[1]
        assert left == pytest.approx(0, abs=1e-9) or (left > 0 and solution.prices[1] == min(budget, 1.0))


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9])
def test_a_type_just_not_worth_the_multiplier_is_left_and_one_just_worth_it_gets_the_lottery(gap):
    budget, cost = 0.1, 0.05
    worth = 1 / (2 * np.sqrt(budget))  # 1 + λ of the uniform seller alone
    for sign in (-1, 1):
        value = cost * worth * (1 + sign * gap)
        market = Market([1.0, value], [UNIFORM, DiscretePrior([cost], [1.0])], budget)
        solution = solve_ex_ante(market, UTILITY, np.inf)
        if sign < 0:
            assert solution.multiplier == pytest.approx(worth - 1, rel=1e-11)
            assert solution.accept_prob[1] == 0
            assert solution.lottery is None
        else:
            assert solution.multiplier == pytest.approx(value / cost - 1, rel=1e-12)
            price = 1 / (2 * value / cost)
            assert solution.prices[0] == pytest.approx(price, rel=1e-11)
            assert solution.accept_prob[1] == pytest.approx((budget - price**2) / cost, rel=1e-6)
            assert solution.lottery[0] == 1


def test_a_type_that_fits_beside_the_continuous_sellers_is_bought_for_certain():
    budget, cost = 0.1, 1e-4
    market = Market([1.0, 2e-4], [UNIFORM, DiscretePrior([cost], [1.0])], budget)
    solution = solve_ex_ante(market, UTILITY, np.inf)
    assert solution.accept_prob[1] == 1
    assert solution.prices[0] == pytest.approx(np.sqrt(budget - cost), rel=1e-11)


# irregular priors


def test_an_irregular_mixture_is_ironed_into_a_lottery():
    solution = solve_ex_ante(alike(4, 2.0, CHEAP_OR_DEAR, 2.0), UTILITY, np.inf)
    # from p = 0.2 (q = 1/2, R = 0.1) straight to p = 1 (q = 1, R = 1), at 0.9 more spend for 0.5 more probability
    assert solution.multiplier == pytest.approx(2 * 0.5 / 0.9 - 1, rel=1e-12)
    assert solution.lottery == (1, 0.2, 1.0, pytest.approx(0.7 / 0.9))
    assert solution.value == pytest.approx(4 * 0.9 + 1.6 * (2 * 0.5 / 0.9 - 1), rel=1e-12)
    np.testing.assert_allclose(solution.prices, [1.0, 0.2, 0.2, 0.2])


def test_a_regular_seller_beside_an_irregular_one_is_solved_exactly():
    market = Market([2.0, 2.0], [CHEAP_OR_DEAR, UNIFORM], 0.4)
    solution = solve_ex_ante(market, UTILITY, np.inf)
    price = np.sqrt(0.3)  # the mixture stays at its kink 0.2, which costs 0.1
    np.testing.assert_allclose(solution.prices, [0.2, price], rtol=1e-11)
    assert solution.multiplier == pytest.approx(2 / (2 * price) - 1, rel=1e-10)


def test_an_envelope_by_hand():
    points = np.array([[0, 0], [1, 3], [2, 3.5], [3, 6], [4, 6], [5, 5]], dtype=float)
    hull = envelope(points[:, 0], points[:, 1])
    np.testing.assert_array_equal(hull.vertices, [0, 1, 3, 4, 5])
    np.testing.assert_allclose(hull.slopes, [3, 1.5, 0, -1])
    np.testing.assert_array_equal(hull.jumps, [False, True, False, False])


@pytest.mark.parametrize("seed", range(10))
def test_the_envelope_lies_on_or_above_every_point_and_touches_its_vertices(seed):
    rng = np.random.default_rng(seed)
    R, g = np.append(0, np.cumsum(rng.uniform(0.1, 1, 40))), np.append(0, rng.normal(size=40).cumsum())
    hull = envelope(R, g)
    above = np.interp(R, R[hull.vertices], g[hull.vertices])
    assert (above >= g - 1e-12).all()
    assert (np.diff(hull.slopes) < 0).all()
    np.testing.assert_allclose(hull.slopes, np.diff(g[hull.vertices]) / np.diff(R[hull.vertices]), rtol=1e-9)


# comparative statics


@pytest.mark.parametrize("market", [alike(10, 1.0), discrete_market(4), alike(5, 1.0, CHEAP_OR_DEAR)], ids=["u", "d", "mix"])
def test_with_a_fixed_cap_the_value_of_budget_is_increasing_and_concave(market, objective):
    budgets = np.linspace(0.1, 12, 18)
    solved = [solve_ex_ante(Market(market.values, market.priors, budget), objective, np.inf) for budget in budgets]
    values, multipliers = np.array([s.value for s in solved]), np.array([s.multiplier for s in solved])
    assert (np.diff(values) >= -1e-10).all()
    assert (np.diff(values, 2) <= 1e-9).all()
    assert (np.diff(multipliers) <= 1e-9).all()
    assert multipliers[-1] == 0
    slack = multipliers == 0
    np.testing.assert_allclose(values[slack], values[-1], rtol=1e-12)


def test_the_multiplier_is_the_value_of_one_more_unit_of_budget(objective):
    h = 1e-5
    low, middle, high = (solve_ex_ante(continuous_market(1 + d), objective, np.inf) for d in (-h, 0, h))
    assert (high.value - low.value) / (2 * h) == pytest.approx(middle.multiplier, abs=1e-6)


@pytest.mark.parametrize("market", [continuous_market(1.0), discrete_market(2)], ids=["continuous", "discrete"])
def test_a_lighter_objective_is_worth_more(market):
    values = [solve_ex_ante(market, OBJECTIVES[name]).value for name in ("utility", "mixture", "welfare", "value")]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_a_cap_costs_value():
    market = discrete_market(3)
    assert solve_ex_ante(market, WELFARE).value <= solve_ex_ante(market, WELFARE, np.inf).value + 1e-12
    assert solve_ex_ante(alike(2, 0.3, TWO_TYPES), WELFARE).value < solve_ex_ante(alike(2, 0.3, TWO_TYPES), WELFARE, 0.8).value


@pytest.mark.parametrize("seed", range(5))
def test_another_seller_never_lowers_the_bound(seed, objective):
    market = discrete_market(seed)
    more = Market(np.append(market.values, [0.9, 1.1]), [*market.priors, TWO_TYPES, UNIFORM], market.budget)
    assert solve_ex_ante(more, objective).value >= solve_ex_ante(market, objective).value - 1e-12


def test_permuting_sellers_permutes_prices(objective):
    market, order = continuous_market(1.0), np.array([3, 0, 5, 2, 4, 1])
    shuffled = Market(market.values[order], [market.priors[i] for i in order], market.budget)
    first, second = solve_ex_ante(market, objective), solve_ex_ante(shuffled, objective)
    np.testing.assert_allclose(second.prices, first.prices[order], rtol=1e-10)
    assert second.value == pytest.approx(first.value, rel=1e-12)


def test_the_currency_scales_out(objective):
    market, s = continuous_market(1.0), 1000.0
    scaled = [
        stats.uniform(0, 1.1 * s),
        stats.expon(scale=0.5 * s),
        stats.lognorm(0.6, scale=0.4 * s),
        stats.truncnorm(-3, np.inf, loc=0.6 * s, scale=0.2 * s),
        stats.beta(2, 1, scale=0.9 * s),
        stats.uniform(0.3 * s, 0.5 * s),
    ]
    first, second = solve_ex_ante(market, objective), solve_ex_ante(Market(s * market.values, scaled, s), objective)
    np.testing.assert_allclose(second.prices, s * first.prices, rtol=1e-9)
    assert second.multiplier == pytest.approx(first.multiplier, rel=1e-8)


def test_an_empirical_prior_of_distinct_samples_is_solved_like_the_discrete_one(objective):
    samples = np.random.default_rng(8).uniform(0, 1, (3, 25))
    empirical = solve_ex_ante(Market(np.ones(3), [EmpiricalPrior(s) for s in samples], 0.5), objective)
    discrete = solve_ex_ante(
        Market(np.ones(3), [DiscretePrior(np.sort(s), np.full(25, 0.04)) for s in samples], 0.5), objective
    )
    assert empirical.value == discrete.value
    np.testing.assert_array_equal(empirical.prices, discrete.prices)


# the price family


def test_the_price_family_of_uniform_costs_has_closed_forms():
    market = Market([1.0, 3.0, 1.4], [UNIFORM, stats.uniform(0, 2), UNIFORM], 1.0)
    v, top = market.values, np.array([1.0, 2.0, 1.0])
    utility = np.minimum(v / (2 * (1 + EVERYTHING[:, None])), top)
    welfare = np.minimum(v / (1 + 2 * EVERYTHING[:, None]), top)
    np.testing.assert_allclose(prices_at(market, UTILITY, EVERYTHING, np.inf), utility, rtol=1e-12)
    np.testing.assert_allclose(prices_at(market, WELFARE, EVERYTHING, np.inf), welfare, atol=1e-5)
    np.testing.assert_allclose(prices_at(market, WELFARE, EVERYTHING), np.minimum(welfare, 1.0), atol=1e-5)


def test_the_price_family_passes_through_the_ex_ante_optimum(objective):
    for budget in (0.3, 1.0, 2.5):
        market = continuous_market(budget)
        solution = solve_ex_ante(market, objective)
        family = prices_at(market, objective, [solution.multiplier])[0]
        np.testing.assert_allclose(family, solution.prices, atol=2e-4)


@pytest.mark.parametrize("seed", range(6))
def test_the_price_family_of_types_is_the_best_response_to_the_multiplier(seed, objective):
    market = discrete_market(seed)
    a, b = objective.payment_weight, objective.cost_weight
    family = prices_at(market, objective, EVERYTHING)
    for i, (v, prior) in enumerate(zip(market.values, market.priors, strict=True)):
        c = np.append(0, prior.costs)
        F = np.append(0, np.cumsum(prior.probs))
        g = v * F - a * F * c - b * np.append(0, np.cumsum(prior.probs * prior.costs))
        allowed = c <= market.budget
        surplus = np.where(allowed, g - EVERYTHING[:, None] * F * c, -np.inf)
        best = surplus.argmax(axis=1)
        sold = best > 0
        np.testing.assert_array_equal(family[sold, i], c[best[sold]])
        np.testing.assert_array_equal(prior.cdf(family[~sold, i]), 0)


def test_at_a_tie_the_higher_price_is_offered():
    slope = solve_ex_ante(alike(2, 0.3, TWO_TYPES), WELFARE, np.inf).multiplier
    family = prices_at(alike(2, 0.3, TWO_TYPES), WELFARE, [0.0, slope, slope * (1 + 1e-9)], np.inf)
    np.testing.assert_array_equal(family, [[0.8, 0.8], [0.8, 0.8], [0.2, 0.2]])


def test_prices_below_the_support_fall_like_the_value():
    dear = Market([1.0, 1.0], [stats.uniform(2, 1), DiscretePrior([2.0], [1.0])], 9.0)
    family = prices_at(dear, UTILITY, [0.0, 1.0, 4.0, np.inf])
    np.testing.assert_allclose(family, np.repeat([[1.0], [0.5], [0.2], [0.0]], 2, axis=1), rtol=1e-12)


@pytest.mark.parametrize("market", [continuous_market(1.0), discrete_market(5), alike(3, 1.0, CHEAP_OR_DEAR)])
def test_prices_never_rise_with_the_multiplier(market, objective):
    family = prices_at(market, objective, EVERYTHING)
    assert family.shape == (len(EVERYTHING), market.n)
    assert (np.diff(family, axis=0) <= 0).all()
    assert (family >= 0).all()
    assert (family <= market.budget).all()


# the mechanism


def test_the_mechanism_spends_its_budget_on_average_and_often_more():
    market = alike(20, 3.0)
    solution = solve_ex_ante(market, UTILITY, np.inf)
    outcome = ex_ante_mechanism(market.sample(20_000, np.random.default_rng(0)), solution)
    error = outcome.spend.std() / np.sqrt(20_000)
    assert abs(outcome.spend.mean() - 3) <= 4 * error
    assert abs(outcome.utility(market).mean() - solution.value) <= 4 * outcome.utility(market).std() / np.sqrt(20_000)
    assert (outcome.spend > 3).mean() > 0.2


def test_mean_payments_are_mean_virtual_costs(objective):
    market = continuous_market(1.0)
    costs = market.sample(20_000, np.random.default_rng(1))
    outcome = ex_ante_mechanism(costs, solve_ex_ante(market, objective))
    phi = np.stack([virtual_cost(prior, c) for prior, c in zip(market.priors, costs.T, strict=True)], axis=1)
    surplus = outcome.spend - np.where(outcome.allocation, phi, 0).sum(axis=1)
    assert abs(surplus.mean()) <= 4 * surplus.std() / np.sqrt(20_000)


def test_the_mechanism_draws_its_lottery():
    market = alike(2, 0.3, TWO_TYPES)
    solution = solve_ex_ante(market, WELFARE, np.inf)
    costs = np.full((20_000, 2), 0.8)
    outcome = ex_ante_mechanism(costs, solution, np.random.default_rng(2))
    p = solution.lottery[-1]
    assert not outcome.allocation[:, 1].any()
    assert abs(outcome.allocation[:, 0].mean() - p) <= 4 * np.sqrt(p * (1 - p) / 20_000)
    np.testing.assert_array_equal(outcome.payments[:, 0], np.where(outcome.allocation[:, 0], 0.8, 0))
    again = ex_ante_mechanism(costs, solution)
    np.testing.assert_array_equal(again.allocation, ex_ante_mechanism(costs, solution, np.random.default_rng(0)).allocation)


def test_a_cost_equal_to_the_price_is_accepted_and_one_profile_gives_one_outcome():
    solution = solve_ex_ante(alike(2, 0.3, TWO_TYPES), WELFARE)
    outcome = ex_ante_mechanism([0.2, 0.2 + 1e-12], solution)
    np.testing.assert_array_equal(outcome.allocation, [True, False])
    np.testing.assert_array_equal(outcome.payments, [0.2, 0.0])


# bad inputs


def test_value_without_a_cap_on_unbounded_costs_has_no_finite_optimum_once_the_budget_is_slack():
    market = alike(3, 1000.0, stats.expon(scale=0.5))
    with pytest.raises(ValueError, match=r"price_cap=inf: no finite optimum, budget=1000\.0 buys from everyone at any cost"):
        solve_ex_ante(market, VALUE, np.inf)
    capped = solve_ex_ante(alike(1, 1000.0, stats.expon(scale=0.5)), VALUE)
    assert capped.value == pytest.approx(1)
    assert capped.prices[0] <= 1000
    np.testing.assert_array_equal(solve_ex_ante(alike(1, 5.0, stats.expon(scale=0.5)), VALUE).prices, 5)
    assert solve_ex_ante(market, UTILITY, np.inf).multiplier == 0
    assert solve_ex_ante(alike(3, 5.0, stats.expon(scale=0.5)), VALUE, np.inf).multiplier > 0


@pytest.mark.parametrize("cap", [0.0, -1.0, np.nan, "1"])
def test_a_cap_that_is_not_positive_is_refused(cap):
    for call in (lambda: solve_ex_ante(alike(2, 1.0), UTILITY, cap), lambda: prices_at(alike(2, 1.0), UTILITY, [0.0], cap)):
        with pytest.raises(ValueError, match=f"price_cap={cap!r}: expected a number > 0, inf, or None for the budget"):
            call()


def test_a_coarse_grid_is_refused():
    with pytest.raises(ValueError, match="grid=4: expected an int >= 8"):
        solve_ex_ante(alike(2, 1.0), UTILITY, grid=4)


@pytest.mark.parametrize("multipliers", [[0.5, 0.1], [-0.1], [np.nan], [[0.0]], 0.0, ["0"]])
def test_multipliers_must_rise_from_zero(multipliers):
    with pytest.raises(ValueError, match=r"expected a non-decreasing array \(T,\) of numbers ≥ 0"):
        prices_at(alike(2, 1.0), UTILITY, multipliers)


def test_costs_of_other_sellers_are_refused():
    with pytest.raises(ValueError, match=r"costs of shape \(3,\): expected \(n,\) or \(S, n\) with n = 2 sellers"):
        ex_ante_mechanism([0.1, 0.2, 0.3], solve_ex_ante(alike(2, 1.0), UTILITY))

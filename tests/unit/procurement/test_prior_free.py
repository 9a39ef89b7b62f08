import numpy as np
import pytest
from scipy import integrate

from labkit.procurement import (
    Objective,
    audit,
    best_single_seller,
    first_best,
    pay_as_bid_greedy,
    prior_free_utility_lottery,
    prior_free_utility_ratio,
    prior_free_welfare,
    value_clock,
)
from labkit.procurement.prior_free import by_density

FIVE_VALUES, FIVE_COSTS = np.array([4.0, 3, 6, 2, 5]), np.array([1, 1.2, 3, 0.4, 4])
MECHANISMS = {
    "value clock": value_clock,
    "best single seller": best_single_seller,
    "randomized": lambda *args, **kwargs: prior_free_welfare(*args, variant="randomized", **kwargs),
    "deterministic": lambda *args, **kwargs: prior_free_welfare(*args, variant="deterministic", **kwargs),
}


def random_instances(count=12, size=500):
    """(costs (S, n), values, budget): continuous and tied costs, few and many sellers, budgets that bind or do not."""
    rng = np.random.default_rng(0)
    for i in range(count):
        n = (1, 2, 3, 5, 8, 20)[i % 6]
        values = rng.uniform(0.1, 2, n) if i % 2 else rng.exponential(1, n) + 0.01
        costs = rng.random((size, n)) * rng.uniform(0.5, 2) if i % 4 < 2 else rng.integers(0, 5, (size, n)) / 4
        yield costs, values, float(rng.uniform(0.3, 0.4 * n + 0.5))


def clock_by_hand(c, values, budget, theta_max=1.0):
    """Winners and θ* of one profile, from the closed form."""
    ranked = sorted((c[i] / values[i], i) for i in range(len(c)) if c[i] <= min(theta_max * values[i], budget))
    winners, worth, theta = [], 0.0, theta_max
    for density, i in ranked:
        if density > budget / (worth + values[i]):
            theta = min(theta, density)
            break
        worth += values[i]
        winners.append(i)
    return winners, min(theta, budget / worth) if winners else theta


@pytest.mark.parametrize(
    ("budget", "winners", "theta", "payments", "welfare", "optimum"),
    [
        (5, [0, 1, 3], 0.5, [2, 1.5, 0, 1, 0], 6.4, 8.8),
        (3, [0, 3], 0.4, [1.6, 0, 0, 0.8, 0], 4.6, 6.8),
    ],
)
def test_the_clock_on_five_sellers(budget, winners, theta, payments, welfare, optimum):
    outcome = value_clock(FIVE_COSTS, FIVE_VALUES, budget)
    assert np.flatnonzero(outcome.allocation).tolist() == winners
    assert outcome.theta == pytest.approx(theta)
    assert outcome.payments == pytest.approx(np.array(payments))
    assert outcome.welfare(FIVE_VALUES, FIVE_COSTS) == pytest.approx(welfare)
    assert first_best(FIVE_COSTS, FIVE_VALUES, budget) == pytest.approx(optimum)


def test_the_best_single_seller_of_five_is_the_first_and_is_paid_1():
    outcome = best_single_seller(FIVE_COSTS, FIVE_VALUES, 5)  # w = 3, 1.8, 3, 1.6, 1: a tie
    assert outcome.payments.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.1, 2.5714), (0.01, 2.9423), (1e-4, 2.9994)])
def test_three_is_tight(epsilon, ratio):
    values, costs, budget = np.array([epsilon, 1]), np.array([0, 0.5]), 0.5
    clock, single = (f(costs, values, budget).welfare(values, costs) for f in (value_clock, best_single_seller))
    assert first_best(costs, values, budget) / (2 / 3 * clock + single / 3) == pytest.approx(ratio, abs=1e-4)


def test_the_first_best_is_at_most_twice_the_clock_and_once_the_best_seller():
    for costs, values, budget in random_instances():
        optimum = first_best(costs, values, budget)
        clock, single = (f(costs, values, budget).welfare(values, costs) for f in (value_clock, best_single_seller))
        best = np.where(costs <= np.minimum(values, budget), values - costs, 0).max(1)
        assert single == pytest.approx(best, abs=1e-12)
        assert (optimum <= (2 * clock + single) * (1 + 1e-9)).all()


@pytest.mark.parametrize("cost_weight", [0.0, 0.5, 1.0])
def test_guarantees_of_3_and_2_plus_root_2_for_every_cost_weight(cost_weight):
    objective, worst = Objective(0, cost_weight), 0.0
    for costs, values, budget in random_instances():

        def welfare(f, costs=costs, values=values, budget=budget):
            return f(costs, values, budget, cost_weight=cost_weight).objective(values, costs, objective)

        optimum = first_best(costs, values, budget, cost_weight)
        expected = (2 * welfare(value_clock) + welfare(best_single_seller)) / 3
        assert (optimum <= 3 * expected * (1 + 1e-9)).all()
        reached = welfare(MECHANISMS["deterministic"])
        assert (optimum <= (2 + np.sqrt(2)) * reached * (1 + 1e-9)).all()
        worst = max(worst, (optimum[optimum > 0] / reached[optimum > 0]).max())
    assert worst > 3  # the instances are hard enough to tell it from a better bound


@pytest.mark.parametrize("alpha", [0.25, 0.75])
def test_a_third_of_welfares_share_for_mixtures(alpha):
    for costs, values, budget in random_instances():
        reached = [
            f(costs, values, budget).objective(values, costs, Objective.mixture(alpha))
            for f in (value_clock, best_single_seller)
        ]
        assert (
            (2 * reached[0] + reached[1]) / 3 >= (1 - alpha) / 3 * first_best(costs, values, budget) * (1 - 1e-9) - 1e-12
        ).all()


def test_one_coin_per_profile_takes_the_clock_twice_as_often():
    costs = np.random.default_rng(0).random((9000, 4))
    values, budget = np.full(4, 1.2), 1.1
    outcome = prior_free_welfare(costs, values, budget, rng=np.random.default_rng(3))
    clock, single = value_clock(costs, values, budget), best_single_seller(costs, values, budget)
    same = [(outcome.payments == branch.payments).all(1) for branch in (clock, single)]
    assert (same[0] | same[1]).all()
    differ = ~(same[0] & same[1])
    assert same[0][differ].mean() == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / differ.sum()))
    again = prior_free_welfare(costs, values, budget, rng=np.random.default_rng(3))
    assert (again.payments == outcome.payments).all()


def test_packed_keys_choose_the_winners_of_the_plain_loop():
    for costs, values, budget in random_instances(size=300):
        outcome = value_clock(costs, values, budget)
        for c, allocation, payments, theta in zip(costs, outcome.allocation, outcome.payments, outcome.theta, strict=True):
            winners, expected = clock_by_hand(c.tolist(), values.tolist(), budget)
            assert np.flatnonzero(allocation).tolist() == sorted(winners)
            assert theta == expected
            assert (payments == np.where(allocation, theta * values, 0)).all()


def test_densities_that_differ_in_the_last_bits_are_sorted_exactly_and_ties_by_index():
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 40, (200, 50))
    densities = 1 + steps * np.finfo(float).eps
    densities[:, :5] = np.inf
    order, place, ranked = by_density(densities)
    assert (order == np.argsort(densities, axis=1, kind="stable")).all()
    assert (ranked == np.sort(densities, axis=1)).all()
    assert (densities.take(place) == ranked).all()


def test_equal_densities_keep_the_lowest_index():
    outcome = value_clock(np.full(3, 0.4), np.ones(3), 0.9)
    assert outcome.allocation.tolist() == [True, True, False]
    assert outcome.payments.tolist() == [0.4, 0.4, 0]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("scale", [2.0, 0.125])
def test_scaling_the_currency_scales_payments(name, scale):
    for costs, values, budget in random_instances(6, 100):
        outcome = MECHANISMS[name](costs, values, budget)
        scaled = MECHANISMS[name](scale * costs, scale * values, scale * budget)
        assert (scaled.allocation == outcome.allocation).all()
        assert scaled.payments == pytest.approx(scale * outcome.payments, rel=1e-12)


def test_much_larger_values_make_welfare_the_value_mechanism():
    rng = np.random.default_rng(0)
    costs, values = rng.random((500, 6)), rng.uniform(0.5, 2, 6)
    value = value_clock(costs, values, 1.5, cost_weight=0)
    assert (value_clock(costs, 1e6 * values, 1.5).allocation == value.allocation).all()
    winners = [clock_by_hand(c, values, 1.5, np.inf)[0] for c in costs]
    assert [np.flatnonzero(row).tolist() for row in value.allocation] == [sorted(w) for w in winners]


def test_proportional_share_hires_above_value_where_the_welfare_clock_does_not():
    assert value_clock([1.5], [1.0], 2.0, cost_weight=0).payments.tolist() == [2.0]
    assert not value_clock([1.5], [1.0], 2.0).allocation.any()


def test_without_a_budget_everyone_worth_its_cost_is_hired_and_utility_is_zero():
    costs, values = np.random.default_rng(0).random((200, 5)) * 2, np.array([0.5, 0.8, 1, 1.2, 1.9])
    outcome = value_clock(costs, values, 1e9)
    assert (outcome.theta == 1).all()
    assert outcome.utility(values) == pytest.approx(0, abs=1e-12)
    assert outcome.welfare(values, costs) == pytest.approx(np.maximum(values - costs, 0).sum(1))


def test_without_money_nothing_is_bought():
    costs, values = np.random.default_rng(0).uniform(0.1, 1, (200, 5)), np.ones(5)
    for name, mechanism in MECHANISMS.items():
        assert not mechanism(costs, values, 1e-9).allocation.any(), name


@pytest.mark.parametrize("name", MECHANISMS)
def test_free_sellers_and_costs_at_the_limit_are_accepted(name):
    outcome = MECHANISMS[name](np.array([[0.0, 2], [-0.0, 2], [1, 2], [2, 1]]), np.array([1.0, 1]), 1.0)
    assert outcome.allocation.any(1).all()
    assert (outcome.spend <= 1).all()
    assert np.array_equal(outcome.payments[0], outcome.payments[1])


@pytest.mark.parametrize("name", MECHANISMS)
def test_permuting_sellers_permutes_the_outcome(name):
    rng = np.random.default_rng(0)
    costs, values, to = rng.random((300, 7)), rng.uniform(0.5, 2, 7), rng.permutation(7)
    outcome, permuted = MECHANISMS[name](costs, values, 1.7), MECHANISMS[name](costs[:, to], values[to], 1.7)
    assert (permuted.allocation == outcome.allocation[:, to]).all()
    assert permuted.payments == pytest.approx(outcome.payments[:, to], rel=1e-12)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_budget_holds_in_every_one_of_1e5_profiles(name):
    rng = np.random.default_rng(0)
    costs, values = rng.exponential(0.5, (100_000, 4)), rng.uniform(0.5, 2, 4)
    assert MECHANISMS[name](costs, values, 1.3).spend.max() <= 1.3 * (1 + 1e-12)


@pytest.mark.parametrize("name", MECHANISMS)
def test_one_profile_in_one_outcome_out(name):
    outcome = MECHANISMS[name](FIVE_COSTS, FIVE_VALUES, 5)
    assert outcome.allocation.shape == outcome.payments.shape == (5,)
    assert outcome.spend.shape == ()


def test_memory_order_does_not_matter():
    rows = np.random.default_rng(0).random((9000, 20))
    values = np.linspace(0.5, 2, 20)
    for name, mechanism in MECHANISMS.items():
        by_row, by_seller = (mechanism(costs, values, 4.0) for costs in (rows, np.asfortranarray(rows)))
        assert (by_row.payments == by_seller.payments).all(), name


def test_pay_as_bid_hires_while_the_budget_lasts_and_invites_lies():
    outcome = pay_as_bid_greedy(
        FIVE_COSTS, FIVE_VALUES, 5
    )  # densities .25, .4, .5, .2, .8: what is left for seller 2 is 2.4 < 3
    assert outcome.payments.tolist() == [1, 1.2, 0, 0.4, 0]
    costs = np.random.default_rng(0).random((200, 4))
    report = audit(lambda c: pay_as_bid_greedy(c, np.full(4, 1.2), 1.5), costs, 1.5, np.linspace(0, 1.2, 41))
    assert report.max_gain > 0.05
    assert report.first_violation.kind == "lie"


# utility


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.1, 0.30279), (0.01, 0.17841), (0.001, 0.12646)])
def test_the_guarantee_on_utility_vanishes(epsilon, ratio):
    assert prior_free_utility_ratio(1.0, 1 - epsilon) == pytest.approx(ratio, abs=1e-5)
    assert prior_free_utility_ratio(3.0, 3 * (1 - epsilon)) == pytest.approx(ratio, abs=1e-5)


def test_utility_is_safe_without_uncertainty_and_hopeless_at_its_limit():
    assert prior_free_utility_ratio(1.0, 0.0) == 1
    assert prior_free_utility_ratio(1.0, 1.0) == 0


def test_the_lottery_earns_the_ratio_at_every_cost():
    lottery = prior_free_utility_lottery(2.0, 1.8)
    for cost in np.linspace(0, 1.8, 10):
        above, _ = integrate.quad(lambda p: (2 - p) * lottery.pdf(p), cost, 1.8)
        assert above + (2 - 1.8) * lottery.ratio == pytest.approx(lottery.ratio * (2 - cost), rel=1e-9)


def test_no_price_earns_more_than_the_ratio_against_the_worst_prior():
    v, top = 2.0, 1.8  # costs with P(c ≤ p) = (v − top) / (v − p): every price earns v − top
    prices = np.linspace(0, top, 50)
    accept = (v - top) / (v - prices)
    assert (v - prices) * accept == pytest.approx(np.full(50, v - top))
    expected, _ = integrate.quad(lambda c: (v - top) / (v - c), 0, top)  # ∫ F
    first_best_value = v - top + expected
    assert (v - top) / first_best_value == pytest.approx(prior_free_utility_ratio(v, top))


def test_density_distribution_and_quantiles_of_the_lottery_agree():
    lottery = prior_free_utility_lottery(1.0, 0.9)
    prices = np.linspace(0, 0.899, 7)
    for price in prices:
        below, _ = integrate.quad(lottery.pdf, 0, price)
        assert lottery.cdf(price) == pytest.approx(below, abs=1e-12)
    assert lottery.ppf(lottery.cdf(prices)) == pytest.approx(prices, abs=1e-12)
    assert lottery.ppf([0, 1 - lottery.ratio / 2, 1]) == pytest.approx([0, 0.9, 0.9])
    assert lottery.cdf([-1, 0.9, 2]).tolist() == [0, 1, 1]
    assert lottery.pdf([-1, 0.9, 2]).tolist() == [0, 0, 0]


# bad inputs


@pytest.mark.parametrize("mechanism", [*MECHANISMS.values(), pay_as_bid_greedy])
@pytest.mark.parametrize(
    ("costs", "values", "budget", "message"),
    [
        ([], [], 1, r"values of shape \(0,\)"),
        ([0.1], [0.0], 1, r"values\[0\]=0\.0: expected finite numbers > 0"),
        ([0.1, 0.1], [1, np.nan], 1, r"values\[1\]=nan"),
        ([0.1], [np.inf], 1, r"values\[0\]=inf"),
        ([-0.1], [1], 1, r"costs\[0\]=-0\.1: expected finite numbers ≥ 0"),
        ([np.nan], [1], 1, r"costs\[0\]=nan"),
        (["a"], [1], 1, r"costs=\['a'\]: expected finite numbers ≥ 0"),
        ([0.1], ["a"], 1, r"values=\['a'\]: expected finite numbers > 0"),
        ([0.1], [1], "5", "budget='5': expected a finite number > 0"),
        ([0.1], [1], 0, "budget=0: expected a finite number > 0"),
        ([0.1], [1], np.nan, "budget=nan"),
        ([0.1], [1], np.inf, "budget=inf"),
        ([0.1, 0.2], [1], 1, r"costs of shape \(2,\): expected \(n,\) or \(S, n\) with n = 1"),
    ],
)
def test_bad_costs_values_and_budgets_are_named(mechanism, costs, values, budget, message):
    with pytest.raises(ValueError, match=message):
        mechanism(np.array(costs), np.array(values), budget)


def test_unknown_variants_are_named():
    with pytest.raises(ValueError, match=r"variant='random': expected one of \('randomized', 'deterministic'\)"):
        prior_free_welfare(FIVE_COSTS, FIVE_VALUES, 5, variant="random")


@pytest.mark.parametrize("cost_weight", [-0.1, np.nan, np.inf, "1"])
def test_cost_weights_are_finite_and_not_negative(cost_weight):
    with pytest.raises(ValueError, match=f"cost_weight={cost_weight!r}: expected a finite number ≥ 0"):
        value_clock(FIVE_COSTS, FIVE_VALUES, 5, cost_weight=cost_weight)


@pytest.mark.parametrize(
    ("value", "max_cost", "message"),
    [
        (0, 0, "value=0: expected a finite number > 0"),
        (np.nan, 0.5, "value=nan"),
        ("1", 0.5, "value='1': expected a finite number > 0"),
        (1, "0.5", r"max_cost='0\.5': expected a number in \[0, 1\]"),
        (1, 1.1, r"max_cost=1\.1: expected a number in \[0, 1\]"),
        (1, -0.1, r"max_cost=-0\.1"),
        (1, 1, "max_cost=1: no price guarantees anything; expected a number below the value 1"),
    ],
)
def test_a_cost_range_the_lottery_cannot_cover_is_refused(value, max_cost, message):
    with pytest.raises(ValueError, match=message):
        prior_free_utility_lottery(value, max_cost)

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from labkit.procurement.knapsack import first_best

VALUES = np.array([4.0, 3.0, 6.0, 2.0, 5.0])
COSTS = np.array([1.0, 1.2, 3.0, 0.4, 4.0])


def random_market(seed, n=7, profiles=20):
    """Costs with zeros, ties, sellers above their value and above the budget."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 9, (profiles, n)) / 4
    return costs, rng.integers(1, 7, n) / 4, float(rng.uniform(0.3, 2.0))


def useful(costs, values, budget, weight):
    return (costs <= budget) & (weight * costs <= values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weight", [1.0, 0.4, 0.0])
def test_the_fractional_optimum_is_that_of_its_linear_program(seed, weight):
    costs, values, budget = random_market(seed)
    best = first_best(costs, values, budget, cost_weight=weight)
    for c, got in zip(costs, best, strict=True):
        keep = useful(c, values, budget, weight).astype(float)
        lp = linprog(-(values - weight * c), A_ub=c[None], b_ub=[budget], bounds=np.stack([0 * keep, keep], axis=1))
        assert got == pytest.approx(-lp.fun, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_integral_optimum_is_the_best_of_all_sets(seed):
    costs, values, budget = random_market(seed, n=6, profiles=8)
    best = first_best(costs, values, budget, integral=True)
    sets = np.array(list(itertools.product([0, 1], repeat=6)))
    for c, got in zip(costs, best, strict=True):
        fits = sets[(sets @ c <= budget + 1e-12)]
        assert got == pytest.approx((fits @ (values - c)).max(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_integral_at_most_fractional_at_most_integral_plus_the_best_seller(seed):
    costs, values, budget = random_market(seed)
    whole, fractional = first_best(costs, values, budget, integral=True), first_best(costs, values, budget)
    best = np.where(useful(costs, values, budget, 1.0), values - costs, 0).max(axis=1)
    assert (whole <= fractional + 1e-12).all()
    assert (fractional <= whole + best + 1e-12).all()
    assert (whole < fractional - 1e-3).any()


@pytest.mark.parametrize(("budget", "optimum"), [(5.0, 8.8), (3.0, 6.8)])
def test_the_fixed_market(budget, optimum):
    assert first_best(COSTS, VALUES, budget) == pytest.approx(optimum, abs=1e-12)


def test_free_sellers_are_all_bought_and_dear_ones_never():
    assert first_best([0.0, 0.0, 2.0], [1.0, 2.0, 9.0], 1.0) == 3.0
    assert first_best([0.5, 0.9], [0.4, 1.0], 1.0) == pytest.approx(0.1)
    assert first_best([0.5, 0.9], [0.4, 1.0], 1.0, integral=True) == pytest.approx(0.1)


def test_one_profile_gives_one_number():
    both = first_best(np.stack([COSTS, COSTS[::-1]]), VALUES, 5.0)
    assert both.shape == (2,)
    assert np.ndim(first_best(COSTS, VALUES, 5.0)) == 0
    assert first_best(COSTS, VALUES, 5.0) == both[0]


def test_the_optimum_scales_with_the_currency_and_forgets_the_order():
    order = [3, 0, 4, 2, 1]
    assert first_best(7 * COSTS, 7 * VALUES, 35.0) == pytest.approx(7 * 8.8)
    assert first_best(COSTS[order], VALUES[order], 5.0) == pytest.approx(8.8)


@pytest.mark.parametrize("excess", [1e-6, 1e-7, 1e-9])
def test_a_set_that_exceeds_the_budget_by_less_than_the_solver_sees_is_still_not_bought(excess):
    costs, values = np.full(5, (1 + excess) / 3), np.full(5, 1.0)
    assert first_best(costs, values, 1.0, integral=True) == pytest.approx(2 * (1 - costs[0]), rel=1e-12)
    assert first_best(costs, values, 1.0, integral=True) <= first_best(costs, values, 1.0)


def test_sets_of_unequal_sellers_just_above_the_budget():
    rng = np.random.default_rng(0)
    costs = (1 + 1e-8 * rng.uniform(0.1, 1, 6)) / 3
    values = costs + 1 + 1e-3 * rng.random(6)
    best = np.sort(values - costs)[-2:].sum()
    assert first_best(costs, values, 1.0, integral=True) == pytest.approx(best, rel=1e-12)


def test_a_gain_far_below_another_counts_too():
    costs, gains = np.full(3, 0.5), np.array([1.0, 1e-8, 2e-8])
    assert first_best(costs, costs + gains, 1.0, integral=True) == pytest.approx(1 + 2e-8, rel=1e-12)


@pytest.mark.parametrize("unit", [1e-300, 1e-19, 1e-8, 1e9, 1e300])
def test_whole_sellers_are_bought_alike_in_every_unit_of_money(unit):
    for budget in (3.0, 5.0, 7.0):
        best = first_best(COSTS, VALUES, budget, integral=True)
        assert first_best(unit * COSTS, unit * VALUES, unit * budget, integral=True) / unit == pytest.approx(best, rel=1e-12)


def test_a_vanishing_budget_buys_whom_it_need_not_pay():
    assert first_best([0.1, 0.2], [1.0, 1.0], 1e-19, integral=True) == 0
    assert first_best([0.0, 0.2], [1.0, 1.0], 1e-19, integral=True) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(costs=[0.1, -0.2]), r"costs\[1\]=-0\.2: expected finite numbers ≥ 0"),
        (dict(costs=[[0.1, 0.2], [np.nan, 0.1]]), r"costs\[1, 0\]=nan"),
        (dict(costs=[0.1, 0.2, 0.3]), r"costs of shape \(3,\): expected \(n,\) or \(S, n\) with n = 2 sellers"),
        (dict(values=[1.0, 0.0]), r"values\[1\]=0\.0: expected finite numbers > 0"),
        (dict(budget=-1.0), r"budget=-1\.0: expected a finite number > 0"),
        (dict(cost_weight=-0.5), r"cost_weight=-0\.5: expected a finite number ≥ 0"),
        (dict(cost_weight="1"), "cost_weight='1': expected a finite number ≥ 0"),
        (dict(costs=["0.1", "0.2"]), r"costs=\['0\.1', '0\.2'\]: expected finite numbers ≥ 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        first_best(**dict(costs=[0.1, 0.2], values=[1.0, 1.0], budget=1.0) | arguments)

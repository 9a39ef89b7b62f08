import itertools

import numpy as np
import pytest

from labkit.procurement.ex_ante import solve_ex_ante
from labkit.procurement.lp import optimal_mechanism_lp, prior_free_utility_lp
from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.priors import DiscretePrior

OBJECTIVES = {"utility": UTILITY, "welfare": WELFARE, "mixture": Objective.mixture(0.5), "value": VALUE}
KINDS = [("ex_ante", "BIC"), ("ex_post", "BIC"), ("ex_post", "DSIC")]
THREE = dict(
    values=[1.0, 1.3, 0.8],
    types=[[0.1, 0.3, 0.6], [0.2, 0.4, 0.9], [0.15, 0.5, 0.7]],
    probs=[[0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4]],
    budget=0.9,
)


def random_market(seed):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    types = [np.sort(rng.uniform(0, 1, m)) for _ in range(n)]
    probs = [rng.dirichlet(np.ones(m)) for _ in range(n)]
    return dict(values=rng.uniform(0.5, 1.5, n), types=types, probs=probs, budget=float(rng.uniform(0.3, 1.2)))


def profiles(market):
    """Every profile of types, its costs (n,) and its probability."""
    for index in itertools.product(*(range(len(c)) for c in market["types"])):
        costs = np.array([c[t] for c, t in zip(market["types"], index, strict=True)])
        yield index, costs, np.prod([f[t] for f, t in zip(market["probs"], index, strict=True)])


@pytest.mark.parametrize(
    ("name", "optima"),
    [
        ("utility", (1.405, 1.405, 1.405)),
        ("welfare", (1.636538, 1.614650, 1.591714)),
        ("mixture", (1.505192, 1.489000, 1.485029)),
        ("value", (2.276, 2.222206, 2.159135)),
    ],
)
def test_the_fixed_market_of_three_types(name, optima):
    for (kind, truth), optimum in zip(KINDS, optima, strict=True):
        solution = optimal_mechanism_lp(**THREE, objective=OBJECTIVES[name], budget_kind=kind, truth=truth)
        assert solution.value == pytest.approx(optimum, abs=1e-6)


@pytest.mark.parametrize(("budget", "optima"), [(0.3, (0.8, 0.6, 0.6)), (1.0, (0.9142857, 0.9071429, 0.9))])
def test_two_types(budget, optima):
    two = dict(values=[1.0, 1.0], types=[[0.2, 0.8]] * 2, probs=[[0.5, 0.5]] * 2, budget=budget)
    for (kind, truth), optimum in zip(KINDS, optima, strict=True):
        assert optimal_mechanism_lp(**two, objective=WELFARE, budget_kind=kind, truth=truth).value == pytest.approx(
            optimum, abs=1e-6
        )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_dsic_at_most_bic_at_most_ex_ante_at_most_ex_ante_without_a_cap(seed, name):
    market, objective = random_market(seed), OBJECTIVES[name]
    priors = [DiscretePrior(c, f) for c, f in zip(market["types"], market["probs"], strict=True)]
    dsic = optimal_mechanism_lp(**market, objective=objective, budget_kind="ex_post", truth="DSIC").value
    bic = optimal_mechanism_lp(**market, objective=objective, budget_kind="ex_post", truth="BIC").value
    ours = Market(market["values"], priors, market["budget"])
    capped, free = (solve_ex_ante(ours, objective, cap).value for cap in (None, np.inf))
    assert dsic <= bic + 1e-9
    assert bic <= capped + 1e-9
    assert capped <= free + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_dsic_optimum_is_truthful_rational_and_within_its_budget(seed):
    market = random_market(seed)
    solution = optimal_mechanism_lp(**market, objective=UTILITY, budget_kind="ex_post")
    value = 0.0
    for index, costs, chance in profiles(market):
        x, paid = solution.allocation[index], solution.payments[index]
        value += chance * (market["values"] @ x - paid.sum())
        assert paid.sum() <= market["budget"] + 1e-9
        assert (paid >= costs * x - 1e-9).all()
        assert ((x >= -1e-9) & (x <= 1 + 1e-9)).all()
        for i, c in enumerate(costs):
            for report in range(len(market["types"][i])):
                lie = (*index[:i], report, *index[i + 1 :])
                assert paid[i] - c * x[i] >= solution.payments[lie][i] - c * solution.allocation[lie][i] - 1e-9
    assert value == pytest.approx(solution.value, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_bic_optimum_is_truthful_on_average_only(seed):
    market = random_market(seed)
    solution = optimal_mechanism_lp(**market, objective=WELFARE, budget_kind="ex_post", truth="BIC")
    for i, (types, probs) in enumerate(zip(market["types"], market["probs"], strict=True)):
        x, paid = np.zeros(len(types)), np.zeros(len(types))
        for index, _, chance in profiles(market):
            x[index[i]] += chance / probs[index[i]] * solution.allocation[(*index, i)]
            paid[index[i]] += chance / probs[index[i]] * solution.payments[(*index, i)]
        gain = paid[None] - np.outer(types, x) - (paid - types * x)[:, None]
        assert gain.max() <= 1e-9
        assert (paid >= types * x - 1e-9).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_ex_ante_optimum_is_truthful_rational_and_spends_its_budget_on_average(seed):
    market = random_market(seed)
    solution = optimal_mechanism_lp(**market, objective=WELFARE)
    spend = 0.0
    for types, probs, x, paid in zip(market["types"], market["probs"], solution.allocation, solution.payments, strict=True):
        assert (paid[None] - np.outer(types, x) <= (paid - types * x)[:, None] + 1e-9).all()
        assert (paid >= types * x - 1e-9).all()
        assert (x[types > market["budget"]] == 0).all()
        spend += probs @ paid
    assert spend <= market["budget"] + 1e-9


def test_an_ex_post_mechanism_never_buys_above_its_budget():
    market = dict(values=[5.0], types=[[0.2, 0.8]], probs=[[0.5, 0.5]], budget=0.5)
    assert optimal_mechanism_lp(**market, objective=VALUE, budget_kind="ex_post").value == pytest.approx(2.5)
    assert optimal_mechanism_lp(**market, objective=VALUE).value == pytest.approx(2.5)
    assert optimal_mechanism_lp(**market, objective=VALUE, price_cap=np.inf).value == pytest.approx(2.5 + 2.5 * 0.4 / 0.7)


@pytest.mark.parametrize("unit", [1e-8, 1e9])
@pytest.mark.parametrize(("kind", "truth"), KINDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_unit_of_money_scales_the_optimum_and_changes_nothing_else(unit, kind, truth, name):
    solve = dict(objective=OBJECTIVES[name], budget_kind=kind, truth=truth)
    scaled = dict(values=unit * np.array(THREE["values"]), types=unit * np.array(THREE["types"]), budget=unit * THREE["budget"])
    solution, here = optimal_mechanism_lp(**THREE | scaled, **solve), optimal_mechanism_lp(**THREE, **solve)
    assert solution.value / unit == pytest.approx(here.value, rel=1e-9)
    largest = max(np.max(paid) for paid in solution.payments)
    assert 0.1 < largest / unit <= THREE["budget"] * (1 + 1e-9)


@pytest.mark.parametrize(("kind", "truth"), KINDS)
def test_a_budget_that_could_pay_everyone_the_highest_cost_is_no_brake(kind, truth):
    solve = dict(objective=UTILITY, budget_kind=kind, truth=truth)
    enough = optimal_mechanism_lp(**THREE | dict(budget=2.2), **solve).value  # 0.6 + 0.9 + 0.7
    for budget in (1e3, 1e9, 1e300):
        assert optimal_mechanism_lp(**THREE | dict(budget=budget), **solve).value == pytest.approx(enough, rel=1e-9)


@pytest.mark.parametrize(("kind", "truth"), KINDS)
def test_how_far_a_type_lies_above_the_cap_does_not_matter(kind, truth):
    near, far = (
        optimal_mechanism_lp(
            **THREE | dict(types=[*THREE["types"][:2], [0.15, 0.5, cost]]), objective=WELFARE, budget_kind=kind, truth=truth
        ).value
        for cost in (1.0, 1e12)
    )
    assert far == pytest.approx(near, rel=1e-9)


def test_sellers_who_cost_nothing_are_bought_for_nothing():
    solution = optimal_mechanism_lp([1.0, 2.0], [[0.0]] * 2, [[1.0]] * 2, 5.0, UTILITY, "ex_post")
    assert solution.value == pytest.approx(3.0)


# without a prior


@pytest.mark.parametrize(("margin", "share"), [(0.1, 0.30279), (0.01, 0.17841), (0.001, 0.12646)])
def test_no_price_lottery_guarantees_more_than_one_over_one_plus_log_h(margin, share):
    ratio, prices, probs = prior_free_utility_lp(1.0, 1 - margin)
    assert ratio == pytest.approx(1 / (1 + np.log(1 / margin)), rel=0.01)
    assert ratio == pytest.approx(share, rel=0.01)
    # the lottery itself: the guarantee holds at every cost on the grid, and the highest price has an atom of the same size
    assert probs.min() >= -1e-12
    assert probs.sum() == pytest.approx(1)
    gain = np.cumsum((probs * (1 - prices))[::-1])[::-1]
    assert (gain >= ratio * (1 - prices) - 1e-9).all()
    assert probs[-1] == pytest.approx(ratio, abs=1e-9)


def test_another_unit_of_money_scales_the_prices_and_not_the_share():
    ratio, prices, probs = prior_free_utility_lp(1e-8, 0.9e-8, points=100)
    here = prior_free_utility_lp(1.0, 0.9, points=100)
    assert ratio == pytest.approx(here[0], rel=1e-9)
    np.testing.assert_allclose(prices, 1e-8 * here[1], rtol=1e-9)
    np.testing.assert_allclose(probs, here[2], atol=1e-9)


def test_a_finer_grid_comes_closer():
    exact = 1 / (1 + np.log(10))
    errors = [prior_free_utility_lp(2.0, 1.8, points)[0] - exact for points in (50, 200, 800)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0


# bad inputs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(budget_kind="interim"), r"budget_kind='interim': expected one of \('ex_ante', 'ex_post'\)"),
        (dict(truth="IC"), r"truth='IC': expected one of \('DSIC', 'BIC'\)"),
        (dict(budget=0.0), r"budget=0\.0: expected a finite number > 0"),
        (dict(values=[1.0, 1.3, -0.8]), r"values\[2\]=-0\.8: expected finite numbers > 0"),
        (dict(values=[1.0, 1.3]), "2 values, 3 types, 3 probs: expected one of each per seller"),
        (dict(probs=[[0.2, 0.5, 0.2]] * 3), "expected numbers > 0 that sum to 1"),
        (dict(types=[[0.3, 0.1, 0.6]] * 3), "in increasing order"),
        (dict(price_cap=0.0), r"price_cap=0\.0: expected a number > 0, inf, or None for the budget"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal_mechanism_lp(**THREE | arguments, objective=UTILITY)


def test_a_program_that_is_too_large_says_its_size():
    types, probs = [np.arange(10) / 10] * 5, [np.full(10, 0.1)] * 5
    with pytest.raises(ValueError, match=r"100000 profiles of types · 32 sets of sellers = 3200000: expected at most 200000"):
        optimal_mechanism_lp(np.ones(5), types, probs, 1.0, UTILITY, "ex_post")


@pytest.mark.parametrize("max_cost", [1.0, 0.0, np.nan, "0.5"])
def test_the_highest_cost_lies_below_the_value(max_cost):
    with pytest.raises(ValueError, match=rf"max_cost={max_cost!r}: expected a number > 0 and below the value 1\.0"):
        prior_free_utility_lp(1.0, max_cost)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_the_value_is_positive_and_finite(value):
    with pytest.raises(ValueError, match=f"value={value}: expected a finite number > 0"):
        prior_free_utility_lp(value, 0.5)


@pytest.mark.parametrize("points", [1, 2.5])
def test_a_lottery_needs_two_prices(points):
    with pytest.raises(ValueError, match=f"points={points}: expected an int >= 2"):
        prior_free_utility_lp(1.0, 0.5, points=points)

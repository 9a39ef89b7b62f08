import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.priors import DiscretePrior, EmpiricalPrior, MixturePrior, expected_cost

UNIFORM = stats.uniform(0, 1)
MIXED = [
    stats.uniform(0, 1.3),
    DiscretePrior([0.1, 0.4], [0.3, 0.7]),
    stats.expon(scale=0.4),
    stats.uniform(0, 0.7),
    MixturePrior([stats.uniform(0, 0.2), stats.uniform(0.8, 0.2)], [0.5, 0.5]),
    stats.expon(scale=0.8),
]


def test_the_objectives_are_points_of_one_family():
    assert (UTILITY.payment_weight, UTILITY.cost_weight) == (1, 0)
    assert (WELFARE.payment_weight, WELFARE.cost_weight) == (0, 1)
    assert (VALUE.payment_weight, VALUE.cost_weight) == (0, 0)
    assert Objective.mixture(1) == UTILITY
    assert Objective.mixture(0) == WELFARE
    assert Objective.mixture(0.25) == Objective(0.25, 0.75)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, np.nan, "a"])
def test_a_mixture_weight_outside_the_unit_interval_is_refused(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha!r}: expected a number in \[0, 1\]"):
        Objective.mixture(alpha)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, "1", None])
def test_negative_weights_are_refused(bad):
    with pytest.raises(ValueError, match=f"payment_weight={bad!r}: expected a finite number ≥ 0"):
        Objective(bad, 0)
    with pytest.raises(ValueError, match=f"cost_weight={bad!r}: expected a finite number ≥ 0"):
        Objective(0, bad)


def test_acceptance_and_expected_cost_are_each_sellers_own():
    market = Market(np.ones(6), MIXED, 1.0)
    prices = np.array([0.5, 0.2, 0.3, 0.9, 0.85, 0.05])
    np.testing.assert_allclose(market.accept_prob(prices), [F.cdf(p) for F, p in zip(MIXED, prices, strict=True)], rtol=1e-14)
    want = [expected_cost(F, p) for F, p in zip(MIXED, prices, strict=True)]
    np.testing.assert_allclose(market.expected_cost(prices), want, rtol=1e-13)


def test_samples_follow_the_priors_and_the_seed():
    market = Market(np.ones(6), MIXED, 1.0)
    costs = market.sample(20_000, np.random.default_rng(5))
    assert costs.shape == (20_000, 6)
    error = costs.std(axis=0) / np.sqrt(20_000)
    assert (np.abs(costs.mean(axis=0) - [prior.mean() for prior in MIXED]) <= 4 * error).all()
    assert np.abs(np.corrcoef(costs.T) - np.eye(6)).max() < 4 / np.sqrt(20_000)
    np.testing.assert_array_equal(costs, market.sample(20_000, np.random.default_rng(5)))


@pytest.mark.parametrize("prices", [[0.1], [0.1, 0.2, 0.3], [[0.1, 0.2]]])
def test_prices_are_one_per_seller(prices):
    market = Market(np.ones(2), [UNIFORM] * 2, 1.0)
    for curve in (market.accept_prob, market.expected_cost):
        with pytest.raises(ValueError, match=r"prices of shape .*: expected \(n,\) with n = 2 sellers"):
            curve(prices)


def test_draws_need_a_size_and_a_generator():
    market = Market(np.ones(2), [UNIFORM] * 2, 1.0)
    with pytest.raises(ValueError, match=r"size=2\.5: expected an int >= 0"):
        market.sample(2.5, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"rng=0: expected a numpy\.random\.Generator"):
        market.sample(2, 0)


def test_a_support_that_starts_at_zero_but_for_rounding_is_accepted():
    prior = stats.truncnorm(-3, np.inf, loc=0.6, scale=0.2)
    assert prior.ppf(0) < 0
    assert Market([1.0], [prior], 1.0).sample(1000, np.random.default_rng(0)).min() >= 0


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_values_must_be_positive_and_finite(bad):
    with pytest.raises(ValueError, match=rf"values\[1\]={bad}: expected finite numbers > 0"):
        Market([1.0, bad], [UNIFORM] * 2, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, "5", None, (1, 2)])
def test_the_budget_must_be_positive_and_finite(bad):
    with pytest.raises(ValueError, match=re.escape(f"budget={bad!r}: expected a finite number > 0")):
        Market([1.0], [UNIFORM], bad)


@pytest.mark.parametrize(
    ("values", "priors", "message"),
    [
        ([], [], r"values of shape \(0,\): expected \(n,\) with n ≥ 1 sellers"),
        ([[1.0]], [UNIFORM], r"values of shape \(1, 1\)"),
        ([1.0, 2.0], [UNIFORM], "priors: got 1 for 2 values; expected one prior per seller"),
        ([1.0, 1.0], [UNIFORM, stats.norm(1, 0.1)], r"priors\[1\]: its lowest cost is -inf; expected a finite number ≥ 0"),
        ([1.0, 1.0], [UNIFORM, stats.uniform(-0.5, 1)], r"priors\[1\]: its lowest cost is -0\.5"),
        ([1.0], [stats.uniform(0, -1)], r"priors\[0\]: its lowest cost is nan"),
        ([1.0, 1.0], UNIFORM, "priors: got 1 for 2 values; expected one prior per seller"),
        (["1", "2"], [UNIFORM] * 2, r"values=\['1', '2'\]: expected finite numbers > 0"),
        ([[1.0], [1.0, 2.0]], [UNIFORM] * 2, r"values=\[\[1\.0\], \[1\.0, 2\.0\]\]: expected finite numbers > 0"),
        ([1.0], [stats.lognorm], r"priors\[0\] is the family lognorm: expected one of its members, stats\.lognorm\(…\)"),
        ([1.0], [0.5], r"priors\[0\] has no cdf: expected cdf, pdf, ppf and rvs"),
        ([1.0], [stats.poisson(2)], r"priors\[0\] has no pdf: .*; make discrete costs a DiscretePrior"),
    ],
)
def test_bad_sellers_are_refused(values, priors, message):
    with pytest.raises(ValueError, match=message):
        Market(values, priors, 1.0)


def test_a_prior_without_quantiles_is_refused():
    class Halfway:
        def cdf(self, c):
            return np.clip(c, 0, 1)

    with pytest.raises(ValueError, match=r"priors\[1\] has no ppf: expected cdf, pdf, ppf and rvs"):
        Market([1.0, 1.0], [UNIFORM, Halfway()], 1.0)


@pytest.fixture
def table():
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {"worth": rng.uniform(1, 2, 30), "wage": rng.uniform(0, 1, 30), "region": np.repeat(["N", "S", "W"], 10)}
    )


def test_every_row_of_a_csv_is_a_seller(table, tmp_path):
    table.to_csv(tmp_path / "wages.csv", index=False)
    market, costs = Market.from_csv(tmp_path / "wages.csv", value="worth", cost="wage", budget=3.0)
    np.testing.assert_allclose(market.values, table["worth"])
    np.testing.assert_allclose(costs, table["wage"])
    assert market.budget == 3
    np.testing.assert_array_equal(market.priors[0].costs, np.sort(costs))


def test_a_group_is_learned_on_one_half_and_sells_with_the_other(table):
    market, costs = Market.from_table(table, value="worth", cost="wage", budget=3.0, group="region")
    assert market.n == 15
    for row, region in enumerate("NSW"):
        sellers = slice(5 * row, 5 * row + 5)
        seen = market.priors[5 * row]
        assert isinstance(seen, EmpiricalPrior)
        together = np.sort(np.append(seen.costs, costs[sellers]))
        np.testing.assert_array_equal(together, np.sort(table.loc[table["region"] == region, "wage"]))
    again, _ = Market.from_table(table, value="worth", cost="wage", budget=3.0, group="region", seed=1)
    assert not np.array_equal(again.values, market.values)


def test_a_missing_column_is_named(table):
    with pytest.raises(ValueError, match=r"column 'pay' is missing; the table has \['worth', 'wage', 'region'\]"):
        Market.from_table(table, value="worth", cost="pay", budget=1.0)


def test_a_cell_that_is_no_number_is_named_by_its_row(tmp_path):
    path = tmp_path / "bids.csv"
    path.write_text("worth,wage\n1,0.5\n2,half\n3,0.5\n")
    with pytest.raises(ValueError, match="column 'wage', row 1: 'half' is not a finite number"):
        Market.from_csv(path, value="worth", cost="wage", budget=1.0)
    path.write_text("worth,wage\n1,0.5\n,0.2\n")
    with pytest.raises(ValueError, match="column 'worth', row 1: an empty cell is not a finite number > 0"):
        Market.from_csv(path, value="worth", cost="wage", budget=1.0)
    path.write_text("worth,wage\n1,inf\n")
    with pytest.raises(ValueError, match="column 'wage', row 0: inf is not a finite number >= 0"):
        Market.from_csv(path, value="worth", cost="wage", budget=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"path='.*bids\.csv': expected a line of column names and a line per seller; No columns to parse"),
        ("worth,wage\n", r"the table has the columns \['worth', 'wage'\] and no rows; expected a row per seller"),
        ("worth,wage\n1,2\n1,2,3,4\n", "expected a line of column names and a line per seller; .*line 3"),
        ("worth,wage,wage\n1,2,3\n", "column 'wage' is there 2 times; expected it once"),
        ("worth;wage\n1;2\n", r"column 'worth' is missing; the table has \['worth;wage'\]"),
    ],
)
@pytest.mark.parametrize("group", [None, "worth"])
def test_a_file_that_is_no_table_of_sellers_is_refused(tmp_path, text, message, group):
    path = tmp_path / "bids.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Market.from_csv(path, value="worth", cost="wage", budget=1.0, group=group)


def test_a_column_that_a_table_has_twice_is_named():
    twice = pd.DataFrame([[1.0, 0.2, 0.3]], columns=["worth", "wage", "wage"])
    with pytest.raises(ValueError, match="column 'wage' is there 2 times; expected it once"):
        Market.from_table(twice, value="worth", cost="wage", budget=1.0)


def test_the_seed_of_a_split_is_a_whole_number(table):
    with pytest.raises(ValueError, match="seed=-1: expected an int >= 0"):
        Market.from_table(table, value="worth", cost="wage", budget=1.0, group="region", seed=-1)


@pytest.mark.parametrize(
    ("column", "number", "allowed"), [("value", 0.0, "> 0"), ("value", -3.0, "> 0"), ("cost", -1.0, ">= 0")]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_number_out_of_range_is_named_in_whichever_half_it_falls(column, number, allowed, seed):
    table = pd.DataFrame({"value": [1.0, 3.0, 2.0, 4.0], "cost": [2.0, 1.0, 1.0, 0.5], "group": ["x"] * 4})
    table.loc[1, column] = number
    with pytest.raises(ValueError, match=f"column '{column}', row 1: .*{number}.* is not a finite number {allowed}"):
        Market.from_table(table, value="value", cost="cost", budget=2, group="group", seed=seed)


def test_a_group_of_one_cannot_be_split(table):
    table.loc[0, "region"] = "E"
    with pytest.raises(ValueError, match="group 'E' of column 'region' has 1 row; expected at least 2"):
        Market.from_table(table, value="worth", cost="wage", budget=1.0, group="region")


def test_a_row_without_a_group_is_named(table):
    table.loc[4, "region"] = None
    with pytest.raises(ValueError, match="column 'region', row 4: names no group"):
        Market.from_table(table, value="worth", cost="wage", budget=1.0, group="region")

import numpy as np
import pytest
from scipy import stats

from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.outcome import Outcome

VALUES = np.array([4.0, 3.0, 6.0])
COSTS = np.array([[1.0, 1.2, 3.0], [0.5, 2.0, 1.0]])
OUTCOME = Outcome(np.array([[True, False, True], [False, True, False]]), np.array([[2.0, 0.0, 3.5], [0.0, 2.5, 0.0]]))


def test_scores_of_each_profile():
    np.testing.assert_allclose(OUTCOME.spend, [5.5, 2.5])
    np.testing.assert_allclose(OUTCOME.value(VALUES), [10, 3])
    np.testing.assert_allclose(OUTCOME.utility(VALUES), [4.5, 0.5])
    np.testing.assert_allclose(OUTCOME.welfare(VALUES, COSTS), [6, 1])


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_the_objective_mixes_utility_and_welfare(alpha):
    mixed = alpha * OUTCOME.utility(VALUES) + (1 - alpha) * OUTCOME.welfare(VALUES, COSTS)
    np.testing.assert_allclose(OUTCOME.objective(VALUES, COSTS, Objective.mixture(alpha)), mixed, rtol=1e-15)


def test_value_utility_and_welfare_are_objectives():
    np.testing.assert_allclose(OUTCOME.objective(VALUES, COSTS, VALUE), OUTCOME.value(VALUES))
    np.testing.assert_allclose(OUTCOME.objective(VALUES, COSTS, UTILITY), OUTCOME.utility(VALUES))
    np.testing.assert_allclose(OUTCOME.objective(VALUES, COSTS, WELFARE), OUTCOME.welfare(VALUES, COSTS))


def test_a_market_stands_for_its_values_and_one_profile_scores_one_number():
    market = Market(VALUES, [stats.uniform()] * 3, 5.0)
    first = Outcome(OUTCOME.allocation[0], OUTCOME.payments[0])
    assert first.spend.shape == ()
    assert first.utility(market) == OUTCOME.utility(VALUES)[0]
    assert first.welfare(market, COSTS[0]) == OUTCOME.welfare(VALUES, COSTS)[0]

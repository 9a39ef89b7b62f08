"""Who sells, and for how much: the outcome (x, p) of a mechanism on one profile of costs or on many.

    spend = Σ p_i     value = Σ v_i x_i     utility = Σ v_i x_i − p_i     welfare = Σ (v_i − c_i) x_i
    J_{a,b} = Σ (v_i − b c_i) x_i − a p_i

Allocations and payments have shape (n,) or (S, n); every score drops the last axis.
"""

from dataclasses import dataclass

import numpy as np

from labkit.procurement.market import Market, Objective


@dataclass(frozen=True)
class Outcome:
    """Allocation and payments of a mechanism.

    `market` in the scores below is a `Market`, or just the values (n,) where no beliefs are at hand.

    Attributes:
        allocation: who sells, bool (..., n).
        payments: what each is paid, (..., n); losers get 0.
    """

    allocation: np.ndarray
    payments: np.ndarray

    @property
    def spend(self) -> np.ndarray:
        """Total payment Σ p_i, (...)."""
        return self.payments.sum(-1)

    def value(self, market: Market | np.ndarray) -> np.ndarray:
        """The buyer's value Σ v_i x_i, (...)."""
        return np.einsum("...i,i", self.allocation, _values(market))  # unlike @ it takes booleans as they lie in memory

    def utility(self, market: Market | np.ndarray) -> np.ndarray:
        """The buyer's utility Σ v_i x_i − p_i, (...)."""
        return self.value(market) - self.spend

    def cost(self, costs: np.ndarray) -> np.ndarray:
        """The sellers' total cost Σ c_i x_i at costs (..., n), (...)."""
        return np.einsum("...i,...i", self.allocation, costs)

    def welfare(self, market: Market | np.ndarray, costs: np.ndarray) -> np.ndarray:
        """Welfare Σ (v_i − c_i) x_i at costs (..., n), (...)."""
        return self.value(market) - self.cost(costs)

    def objective(self, market: Market | np.ndarray, costs: np.ndarray, objective: Objective) -> np.ndarray:
        """J_{a,b} at costs (..., n), (...)."""
        a, b = objective.payment_weight, objective.cost_weight
        return self.value(market) - a * self.spend - b * self.cost(costs)


def _values(market: Market | np.ndarray) -> np.ndarray:
    return market.values if isinstance(market, Market) else np.asarray(market, dtype=float)

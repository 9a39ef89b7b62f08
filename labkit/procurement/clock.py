"""Descending clocks: posted prices that react to who is still there [ours], and their exact value for identical sellers.

A clock runs down the rows of a price matrix P (T, n). Everyone is active at first; seller i leaves when its price falls below
c_i. The clock stops at the first row t where the active sellers can all be paid,

    Σ_{i active} P[t, i] ≤ B,        active at t: c_i ≤ P[t, i],

and buys from them at these prices. A seller cannot move its price, only leave. So for any rows, however they were chosen, the
truth is an obviously dominant strategy, no seller loses, and the budget holds in every realisation; a wrong belief costs
objective only.

The Bayesian clock takes the rows from the optimum in expectation, p_i(λ) at rising λ (`ex_ante.prices_at`). Where the prices of
several sellers jump between two rows they fall one after the other, and `refine` looks for the stop between the rows.

With n identical sellers of value v and prior F, p = p(λ = 0), b_k = min(B / k, p) and g(m) = v − a m − b E[c | c ≤ m], the k
cheapest win if the next one costs y > b_{k+1}, at m = min(b_k, y):

    E[J] = Σ_{k=1}^{n} k g(b_k) P(Bin(n, F(b_k)) = k)
         + n Σ_{k=1}^{n−1} k ∫ g(y) P(Bin(n − 1, F(y)) = k) dF(y)   over y in [b_{k+1}, b_k].
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from labkit.errors import check_number, check_size
from labkit.procurement._checks import floats
from labkit.procurement._profiles import BUDGET_SLACK, blocks
from labkit.procurement.ex_ante import envelope, prices_at
from labkit.procurement.market import Market, Objective, check_budget, check_costs
from labkit.procurement.outcome import Outcome
from labkit.procurement.priors import Prior, check_prior, expected_cost, spend_curve, spend_curves


@dataclass(frozen=True)
class PricePath:
    """The rows of a Bayesian clock.

    Attributes:
        multipliers: λ (T,), increasing from 0.
        prices: p_i(λ) (T, n), non-increasing along T.
        jumps: sellers whose price falls in jumps (n,), bool: discrete and irregular priors.
    """

    multipliers: np.ndarray
    prices: np.ndarray
    jumps: np.ndarray


def clock_auction(
    costs: np.ndarray, prices: np.ndarray, budget: float, jumps: np.ndarray | None = None, refine: bool = False
) -> Outcome:
    """Run a descending clock.

    Args:
        costs: reported costs (n,) or (S, n).
        prices: rows of the clock (T, n), T ≥ 1, non-increasing along T, finite, ≥ 0. Where the last row is still too dear,
            nothing is bought.
        budget: B > 0.
        jumps: sellers (n,), bool, that are lowered one by one, by index, from the row before the last to the last, until the
            budget holds. None means no one: all fall together.
        refine: let the prices of the others fall linearly between these two rows and stop on the way, within 2⁻³⁰ of the step,
            instead of at the row.

    Returns:
        Outcome; a cost equal to the price sells.
    """
    prices, budget = np.ascontiguousarray(floats("prices", prices, "finite numbers ≥ 0")), check_budget(budget)
    if prices.ndim != 2 or not prices.size:
        raise ValueError(f"prices of shape {prices.shape}: expected (T, n) with T ≥ 1 rows")
    if not (prices[-1].min() >= 0 and prices[0].max() < np.inf):
        raise ValueError(f"prices from {prices[-1].min()} to {prices[0].max()}: expected finite numbers ≥ 0")
    falls = np.diff(prices, axis=0) <= 0
    if not falls.all():
        row, seller = np.argwhere(~falls)[0]
        pair = prices[row : row + 2, seller]
        raise ValueError(f"prices[{row}:{row + 2}, {seller}]={pair}: expected rows that do not increase from one to the next")
    costs = check_costs(costs, prices.shape[1])
    jumps = np.zeros(prices.shape[1], dtype=bool) if jumps is None else np.asarray(jumps, dtype=bool)
    if jumps.shape != prices.shape[1:]:
        raise ValueError(f"jumps of shape {jumps.shape}: expected (n,) with n = {prices.shape[1]} sellers")

    rows, limit = np.atleast_2d(costs), budget * (1 + BUDGET_SLACK)
    allocation, payments = np.empty(rows.shape, dtype=bool), np.empty(rows.shape)
    for block in blocks(len(rows), 8 * rows.shape[1]):
        c = np.ascontiguousarray(rows[block])
        stop = _first_affordable(c, prices, limit)
        final = prices.take(stop, axis=0, mode="clip")
        if refine or jumps.any():
            inner = np.flatnonzero((stop > 0) & (stop < len(prices)))
            final[inner] = _between(c[inner], prices[stop[inner] - 1], prices[stop[inner]], limit, jumps, refine)
        np.less_equal(c, final, out=allocation[block])
        allocation[block] &= (stop < len(prices))[:, None]
        np.multiply(allocation[block], final, out=payments[block])
    return Outcome(allocation.reshape(costs.shape), payments.reshape(costs.shape))


def price_path(market: Market, objective: Objective, ticks: int = 4096) -> PricePath:
    """Prices p_i(λ), capped at the budget, from λ = 0 to where all of them together fit the budget, evenly in log(a + b + λ).

    Args:
        market: sellers, priors and budget.
        objective: weights (a, b).
        ticks: number of rows T, ≥ 2.
    """
    multipliers, prices = falling_prices(market, objective, ticks, market.budget)
    kinds, which = market.kinds
    curves = spend_curves(kinds, np.full(len(kinds), market.budget), grid=512)
    jumps = np.array([curve.discrete or envelope(curve.spends, curve.probs).jumps.any() for curve in curves])
    return PricePath(multipliers, prices, jumps[which])


def falling_prices(market: Market, objective: Objective, ticks: int, total: float) -> tuple[np.ndarray, np.ndarray]:
    """λ (T,) from 0 to the first at which the prices p_i(λ) add up to at most `total`, and these prices (T, n)."""
    check_size("ticks", ticks, 2)
    scan = np.append(0.0, 2.0 ** np.arange(-40, 80, 0.125))
    prices = prices_at(market, objective, scan)
    last = scan[np.argmax(prices.sum(1) <= total)]
    worth = objective.payment_weight + objective.cost_weight
    first = worth or scan[1:][np.count_nonzero((prices[1:] == prices[0]).all(1)) - 1]  # value: where prices begin to move
    multipliers = np.geomspace(first, max(worth + last, first), ticks) - worth
    multipliers[0] = 0.0
    return multipliers, prices_at(market, objective, multipliers)


def bayesian_clock(costs: np.ndarray, market: Market, objective: Objective, ticks: int = 4096, refine: bool = False) -> Outcome:
    """The clock along the price family of the optimum in expectation: near-optimal, and its budget always holds [ours].

    To run the same clock often, take its `price_path` once and call `clock_auction`.

    Args:
        costs: reported costs (n,) or (S, n).
        market: sellers, the buyer's beliefs and the budget.
        objective: weights (a, b).
        ticks: number of rows, ≥ 2; fewer rows cost objective, never truthfulness or budget.
        refine: stop between rows, which leaves a loss below 1e-6 at any number of ticks.
    """
    path = price_path(market, objective, ticks)
    return clock_auction(costs, path.prices, market.budget, path.jumps, refine)


def iid_clock_value(prior: Prior, value: float, n: int, budget: float, objective: Objective) -> float:
    """Exact E[J] of the continuous-time Bayesian clock for n sellers of equal value and one regular continuous prior [ours].

    Args:
        prior: F, continuous and regular.
        value: v > 0.
        n: number of sellers, ≥ 1.
        budget: B > 0.
        objective: weights (a, b).
    """
    check_size("n", n, 1)
    check_number("value", value)
    check_prior("prior", prior, continuous=True)
    top = prices_at(Market([value], [prior], budget), objective, np.zeros(1))[0, 0]
    curve = spend_curve(prior, top=top)
    if envelope(curve.spends, curve.probs).jumps.any():
        raise ValueError(f"prior is irregular: expected a virtual cost φ that does not decrease up to the price {top}")
    k = np.arange(1, n + 1)
    bounds = np.minimum(budget / k, top)  # b_k
    q = prior.cdf(bounds)

    def gain(m: np.ndarray, q: np.ndarray) -> np.ndarray:
        """g(m), q = F(m)."""
        cost = np.divide(expected_cost(prior, m), q, out=np.array(m, dtype=float), where=q > 0)
        return value - objective.payment_weight * m - objective.cost_weight * cost

    total = (k * gain(bounds, q) * stats.binom.pmf(k, n, q)).sum()
    x, w = np.polynomial.legendre.leggauss(40)
    width = q[:-1] - q[1:]
    u = q[1:] + width * (x[:, None] + 1) / 2  # (nodes, n - 1)
    inner = k[:-1] * gain(prior.ppf(u), u) * stats.binom.pmf(k[:-1], n - 1, u)
    return float(total + n * (w @ inner / 2 * width).sum())


def _first_affordable(c: np.ndarray, prices: np.ndarray, limit: float) -> np.ndarray:
    """First row (s,) at which the active sellers of each profile c (s, n) can be paid, T if there is none.

    Bisection: along the clock both the prices and the set of active sellers shrink.
    """
    low, high = np.zeros(len(c), dtype=np.int64), np.full(len(c), len(prices))
    offered, active = np.empty(c.shape), np.empty(c.shape, dtype=bool)
    for _ in range(len(prices).bit_length()):
        middle = (low + high) // 2
        prices.take(middle, axis=0, mode="clip", out=offered)
        np.less_equal(c, offered, out=active)
        fits = np.einsum("si,si->s", offered, active) <= limit
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    return high


def _between(c: np.ndarray, high: np.ndarray, low: np.ndarray, limit: float, jumps: np.ndarray, refine: bool) -> np.ndarray:
    """Final prices (s, n) of profiles c (s, n) that cannot be paid at prices `high` (s, n) and can at `low` (s, n)."""

    def spend(offered: np.ndarray) -> np.ndarray:
        return np.where(c <= offered, offered, 0.0)

    before = spend(high)
    change = np.where(jumps, spend(low) - before, 0.0)
    running = np.cumsum(
        np.concatenate([before.sum(1, keepdims=True), change], axis=1), axis=1
    )  # before each seller's turn, and at last
    final = np.where(jumps & (running[:, :-1] > limit), low, high)
    rest = np.flatnonzero(running[:, -1] > limit)
    c, high, low = c[rest], final[rest], low[rest]
    if refine:
        short, enough = np.zeros(len(c)), np.ones(len(c))  # shares of the step
        for _ in range(30):
            share = (short + enough) / 2
            offered = np.maximum(low, high + share[:, None] * (low - high))
            fits = np.einsum("si,si->s", offered, c <= offered) <= limit
            short, enough = np.where(fits, short, share), np.where(fits, share, enough)
        low = np.where(enough[:, None] < 1, np.maximum(low, high + enough[:, None] * (low - high)), low)
    final[rest] = low
    return final

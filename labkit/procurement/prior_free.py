"""What a buyer can do without beliefs: welfare within a constant factor, utility not at all [paper: claims; ours: the rest].

Welfare. Keep the sellers with c_i ≤ min(v_i, B), write w_i = v_i − c_i and OPT = max Σ x_i w_i over Σ x_i c_i ≤ B, 0 ≤ x_i ≤ 1.
The value clock [predecessor: Singer 2010; Chen, Gravin and Lu 2011] lowers one price θ per unit of value from 1. Seller i stays
while c_i ≤ θ v_i, and the clock stops when it can pay everyone. With sellers sorted by c_i / v_i,

    k = largest index with c_k / v_k ≤ B / v({1..k}),      θ* = min(1, B / v({1..k}), c_{k+1} / v_{k+1}),

and the k winners are paid θ* v_i. Its welfare W satisfies OPT ≤ 2 W + w_{k+1}, so

- the clock with probability 2/3 and the best single seller with 1/3 obtain OPT / 3 in expectation, and
- the best single seller i* if (1 + √2) w_{i*} ≥ OPT without i*, else the clock, obtain OPT / (2 + √2).

With `cost_weight` b the same holds for Σ (v_i − b c_i) x_i, with b c_i ≤ v_i and θ ≤ 1 / b; b = 0 is the value case, where the
clock is the proportional share mechanism.

Utility. One seller with cost in [0, c_max], c_max < v ≤ B: a random price P guarantees E[(v − P) 1{P ≥ c}] ≥ ρ (v − c) for all
c with at best ρ = 1 / (1 + ln(v / (v − c_max))), which vanishes as c_max → v.

Costs are (n,) or (S, n).
"""

from dataclasses import dataclass

import numpy as np

from labkit.errors import check_number
from labkit.procurement._checks import generator, not_negative
from labkit.procurement._profiles import BUDGET_SLACK, blocks
from labkit.procurement.knapsack import first_best
from labkit.procurement.market import check_budget, check_costs, check_values
from labkit.procurement.outcome import Outcome

VARIANTS = ("randomized", "deterministic")
KAPPA = 1 + np.sqrt(2)


@dataclass(frozen=True)
class ValueClockOutcome(Outcome):
    """Outcome of the value clock.

    Attributes:
        theta: the final price per unit of value θ* (...).
    """

    theta: np.ndarray


def value_clock(costs: np.ndarray, values: np.ndarray, budget: float, cost_weight: float = 1.0) -> ValueClockOutcome:
    """Lower one price per unit of value until everyone who stays can be paid.

    Args:
        costs: reported costs (n,) or (S, n).
        values: v (n,) > 0.
        budget: B > 0.
        cost_weight: b ≥ 0; 1 is welfare, and 0 the proportional share mechanism for value, which hires at costs above v_i too.

    Returns:
        Outcome with `theta`. Of sellers with equal c_i / v_i the lowest index stays longest; where nobody is eligible, θ* = 1 /
        b.

    Source: closed form of the clock, [predecessor: Singer 2010; Chen, Gravin and Lu 2011]; the cap on θ is [ours].
    """
    rule = _Rule(values, budget, cost_weight)
    rows, allocation, payments, result = _outcome(costs, rule)
    theta = np.empty(len(rows))
    for block in blocks(len(rows), 8 * rows.shape[1]):
        allocation[block], theta[block] = rule.clock(rows[block])
        np.multiply(allocation[block], rule.values, out=payments[block])
        payments[block] *= np.where(np.isinf(theta[block]), 0.0, theta[block])[:, None]  # inf: nobody is eligible
    return ValueClockOutcome(*result, theta.reshape(np.shape(costs)[:-1]))


def best_single_seller(costs: np.ndarray, values: np.ndarray, budget: float, cost_weight: float = 1.0) -> Outcome:
    """Hire only i* = argmax{v_i − b c_i ≥ 0 : c_i ≤ B}, of equals the first, at the highest cost it could have reported.

    Args:
        costs: reported costs (n,) or (S, n).
        values: v (n,) > 0.
        budget: B > 0.
        cost_weight: b ≥ 0.
    """
    rule = _Rule(values, budget, cost_weight)
    rows, allocation, payments, result = _outcome(costs, rule)
    for block in blocks(len(rows), 8 * rows.shape[1]):
        allocation[block], payments[block] = rule.single(rows[block])
    return Outcome(*result)


def prior_free_welfare(
    costs: np.ndarray,
    values: np.ndarray,
    budget: float,
    variant: str = "randomized",
    rng: np.random.Generator | None = None,
    cost_weight: float = 1.0,
) -> Outcome:
    """Truthful mechanism whose welfare is within a constant factor of the fractional first-best on every profile [ours].

    Args:
        costs: reported costs (n,) or (S, n).
        values: v (n,) > 0.
        budget: B > 0.
        variant: "randomized" flips a coin between the value clock and the best single seller, factor 3 in expectation;
            "deterministic" decides by whether the best seller outweighs the others, factor 2 + √2.
        rng: flips the coins, one per profile; None means a generator of seed 0.
        cost_weight: b ≥ 0; the guarantee is for Σ (v_i − b c_i) x_i.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: expected one of {VARIANTS}")
    rule = _Rule(values, budget, cost_weight)
    rows, allocation, payments, result = _outcome(costs, rule)
    heads = generator(rng).random(len(rows)) < 2 / 3 if variant == "randomized" else None
    for block in blocks(len(rows), 8 * rows.shape[1]):
        if heads is None:
            allocation[block], payments[block] = rule.deterministic(rows[block])
            continue
        for which, mechanism in ((heads[block], rule.paid_clock), (~heads[block], rule.single)):
            allocation[block][which], payments[block][which] = mechanism(rows[block][which])
    return Outcome(*result)


def pay_as_bid_greedy(costs: np.ndarray, values: np.ndarray, budget: float) -> Outcome:
    """Hire by increasing c_i / v_i while the budget lasts and pay each its report: what a naive buyer does, and not truthful.

    Args:
        costs: reported costs (n,) or (S, n).
        values: v (n,) > 0.
        budget: B > 0; a seller that no longer fits, or that costs more than its value, is passed over.
    """
    rule = _Rule(values, budget, 1.0)
    rows, allocation, payments, result = _outcome(costs, rule)
    for block in blocks(len(rows), 8 * rows.shape[1]):
        c = rows[block]
        _, place, densities = by_density(rule.densities(c))
        spent, hired = np.zeros(len(c)), np.empty(place.shape[::-1], dtype=bool)
        for hire, cost, density in zip(hired, np.ascontiguousarray(c).take(place).T, densities.T, strict=True):
            np.less_equal(spent + cost, budget * (1 + BUDGET_SLACK), out=hire)
            hire &= np.isfinite(density)
            spent += hire * cost
        allocation[block].reshape(-1)[place] = hired.T
        payments[block] = allocation[block] * c
    return Outcome(*result)


def by_density(densities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort each row, equal entries by index.

    Args:
        densities: (s, n) ≥ 0, inf allowed.

    Returns:
        Sellers (s, n) by increasing density, their places in the flattened array (s, n), and the sorted densities (s, n).
    """
    s, n = densities.shape
    # The bits of non-negative floats sort like the floats. With the index in the lowest bits one plain sort does what an
    # argsort and two gathers do, several times faster; rows where the lost bits mattered are sorted again.
    low = (1 << (n - 1).bit_length()) - 1
    keys = densities.view(np.int64) & ~np.int64(low)
    keys |= np.arange(n)
    keys.sort(axis=1)
    order = np.bitwise_and(keys, low, out=keys)
    starts = n * np.arange(s)[:, None]
    place = order + starts
    ranked = densities.take(place)
    falls = ranked[:, 1:] < ranked[:, :-1]
    if falls.any():
        wrong = np.flatnonzero(falls.any(1))
        order[wrong] = np.argsort(densities[wrong], axis=1, kind="stable")
        place[wrong] = order[wrong] + starts[wrong]
        ranked[wrong] = densities.take(place[wrong])
    return order, place, ranked


@dataclass(frozen=True)
class PriceLottery:
    """The random price P with the best guarantee on utility: density ρ / (v − p) on [0, c_max), and an atom of mass ρ at c_max.

    Attributes:
        value: v.
        max_cost: c_max < v.
        ratio: ρ, also the mass of the atom.
    """

    value: float
    max_cost: float
    ratio: float

    def pdf(self, price: np.ndarray) -> np.ndarray:
        """Density at prices of any shape, the atom left out."""
        price = np.asarray(price, dtype=float)
        inside = (price >= 0) & (price < self.max_cost)
        return np.where(inside, self.ratio / (self.value - np.where(inside, price, 0.0)), 0.0)

    def cdf(self, price: np.ndarray) -> np.ndarray:
        """P(price ≤ p), for p of any shape."""
        price = np.asarray(price, dtype=float)
        below = -self.ratio * np.log1p(-np.clip(price, 0, self.max_cost) / self.value)
        return np.where(price >= self.max_cost, 1.0, below)

    def ppf(self, q: np.ndarray) -> np.ndarray:
        """The price at quantiles q in [0, 1] of any shape; uniform q make it a draw."""
        return np.minimum(self.max_cost, -self.value * np.expm1(-np.asarray(q, dtype=float) / self.ratio))


def prior_free_utility_ratio(value: float, max_cost: float) -> float:
    """Best guaranteed share of v − c that a price can secure for a buyer who knows only c ≤ c_max [ours].

    Args:
        value: v > 0 of the one seller, at most the budget.
        max_cost: c_max in [0, v].

    Returns:
        ρ = 1 / (1 + ln(v / (v − c_max))); 0 at c_max = v.
    """
    check_number("value", value)
    check_number("max_cost", max_cost, f"a number in [0, {value}], the value", lambda c: 0 <= c <= value)
    return float(1 / (1 - np.log1p(-max_cost / value))) if max_cost < value else 0.0


def prior_free_utility_lottery(value: float, max_cost: float) -> PriceLottery:
    """The random price that attains `prior_free_utility_ratio` [ours].

    Args:
        value: v > 0.
        max_cost: c_max in [0, v).
    """
    ratio = prior_free_utility_ratio(value, max_cost)
    if not ratio:
        raise ValueError(f"max_cost={max_cost}: no price guarantees anything; expected a number below the value {value}")
    return PriceLottery(float(value), float(max_cost), ratio)


class _Rule:
    """The allocation and payment rules on blocks of profiles c (s, n)."""

    def __init__(self, values: np.ndarray, budget: float, cost_weight: float):
        self.values, self.budget = check_values(values), check_budget(budget)
        self.b = not_negative("cost_weight", cost_weight)
        self.theta_max = 1 / self.b if self.b else np.inf
        self.highest = np.minimum(self.theta_max * self.values, self.budget)  # costs above are never worth paying

    def densities(self, c: np.ndarray) -> np.ndarray:
        """c_i / v_i in rows that lie together in memory, inf for the sellers dropped."""
        densities = np.divide(c, self.values, out=np.empty(c.shape))
        np.abs(densities, out=densities)  # −0.0 has the sign bit set
        np.copyto(densities, np.inf, where=c > self.highest)
        return densities

    def clock(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Winners (s, n) and θ* (s,)."""
        s, n = c.shape
        order, place, ranked = by_density(self.densities(c))
        worth = self.values.take(order)
        np.cumsum(worth, axis=1, out=worth)  # v({1..k})
        wins = ranked <= self.budget / worth  # true up to k, then false: densities rise, the right-hand side falls
        k, rows = np.where(wins[:, -1], n, wins.argmin(1)), np.arange(s)
        following = np.where(k < n, ranked[rows, np.minimum(k, n - 1)], np.inf)
        share = np.where(k > 0, self.budget / worth[rows, np.maximum(k - 1, 0)], np.inf)
        allocation = np.empty((s, n), dtype=bool)
        allocation.reshape(-1)[place] = wins
        return allocation, np.minimum(self.theta_max, np.minimum(share, following))

    def paid_clock(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Winners and payments (s, n)."""
        allocation, theta = self.clock(c)
        return allocation, np.where(allocation, theta[:, None], 0.0) * self.values

    def single(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best seller alone (s, n), and its payment (s, n)."""
        top, best, second = self.best_two(c)
        hired = np.isfinite(best)
        allocation, payments = np.zeros(c.shape, dtype=bool), np.zeros(c.shape)
        rows = np.flatnonzero(hired)
        allocation[rows, top[rows]] = True
        payments[rows, top[rows]] = self.highest_report(top[rows], second[rows])
        return allocation, payments

    def best_two(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best seller (s,), its w (s,), −inf if nobody is eligible, and the better of 0 and the second best w (s,)."""
        surplus = np.where(c <= self.highest, self.values - self.b * c, -np.inf)
        top, rows = surplus.argmax(1), np.arange(len(c))
        best = surplus[rows, top]
        surplus[rows, top] = 0.0
        return top, best, np.maximum(surplus.max(1), 0.0)

    def highest_report(self, seller: np.ndarray, surplus: np.ndarray) -> np.ndarray:
        """The highest cost ≤ B at which each seller has at least the given surplus v − b c."""
        if not self.b:
            return np.full(len(seller), self.budget)
        return np.minimum(self.budget, (self.values[seller] - surplus) / self.b)

    def alone(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best seller (s,), whether it is hired alone (s,), and how small its w could be for that (s,)."""
        top, best, second = self.best_two(c)
        others = c.copy()
        others[np.arange(len(c)), top] = 2 * self.budget  # never affordable
        enough = np.maximum(first_best(others, self.values, self.budget, self.b) / KAPPA, second)
        return top, best >= enough, enough

    def deterministic(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best seller alone or the clock's winners, each at its threshold.

        Whatever it reports up to its clock payment, a seller wins unless the best of the others is hired alone; reporting more
        only makes that likelier. So the threshold is the highest report up to there, or up to where it is hired alone itself,
        at which it is not shut out like this.
        """
        top, alone, enough = self.alone(c)
        allocation, payments = self.paid_clock(c)
        rows = np.flatnonzero(alone)
        free = c[rows]
        free[np.arange(len(rows)), top[rows]] = 0.0
        in_clock = self.paid_clock(free)[1][np.arange(len(rows)), top[rows]]
        allocation[rows], payments[rows] = False, 0.0
        allocation[rows, top[rows]] = True
        payments[rows, top[rows]] = np.maximum(in_clock, self.highest_report(top[rows], enough[rows]))

        profile, seller = np.nonzero(allocation)
        for part in blocks(len(profile), 8 * c.shape[1]):
            at = profile[part], seller[part]
            payments[at] = self.largest_not_shut_out(c[at[0]], at[1], payments[at])
        return allocation, payments

    def largest_not_shut_out(self, c: np.ndarray, seller: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Largest report in [c_i, high] (p,) of one seller (p,) in each profile c (p, n) at which no other is hired alone."""
        threshold, c = high.copy(), c.copy()
        rows = np.arange(len(c))

        def shut_out(report: np.ndarray, rows: np.ndarray) -> np.ndarray:
            reported = c[rows]
            reported[np.arange(len(rows)), seller[rows]] = report
            top, alone, _ = self.alone(reported)
            return alone & (top != seller[rows])

        rows = rows[shut_out(high, rows)]
        low, high = c[rows, seller[rows]], high[rows]
        for _ in range(55):
            middle = (low + high) / 2
            out = shut_out(middle, rows)
            low, high = np.where(out, low, middle), np.where(out, middle, high)
        threshold[rows] = low
        return threshold


def _outcome(costs: np.ndarray, rule: _Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Profiles (S, n), an allocation and payments to be filled in, and views of these in the shape of `costs`."""
    costs = check_costs(costs, len(rule.values))
    rows = np.atleast_2d(costs)
    allocation, payments = np.empty(rows.shape, dtype=bool), np.empty(rows.shape)
    return rows, allocation, payments, (allocation.reshape(costs.shape), payments.reshape(costs.shape))

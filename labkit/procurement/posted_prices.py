"""Posted prices whose budget always holds, from the prices whose budget holds in expectation [ours, unless tagged].

Sequential posted prices [predecessor: Balkanski and Hartline 2016]. Take the prices p_i of the ex-ante optimum with cap B, and
let g_i = E[v_i − a p_i − b c_i | c_i ≤ p_i]. Offer p_i to the sellers by decreasing g_i / p_i, each if it fits what is left of
the budget; i accepts iff c_i ≤ p_i. With k = B / max_i p_i ≥ 1 and the upper bound UB of `ex_ante`,

    E[J] ≥ (1 − 1/k) · E min(k, N) / k · UB,   N ~ Poisson(k),   where   E min(k, N) / k = 1 − k^m e^{−k} / m!,   m = ⌊k⌋.

For n identical sellers who accept with probability q it is exact that E[J] = E min(⌊k⌋, Bin(n, q)) / (n q) · UB.

Prices may also depend on earlier answers: re-solving the ex-ante problem with the budget that is left, or the exact optimum of
all such policies for a few discrete sellers. A price never depends on the seller's own report, so all of them are truthful.

Costs are (n,) or (S, n).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from scipy import stats

from labkit.errors import check_number, check_size
from labkit.procurement._checks import floats, generator
from labkit.procurement._profiles import BUDGET_SLACK, blocks
from labkit.procurement.clock import falling_prices
from labkit.procurement.ex_ante import ExAnteSolution, prices_at, solve_ex_ante
from labkit.procurement.market import Market, Objective, check_budget, check_costs
from labkit.procurement.outcome import Outcome
from labkit.procurement.priors import DiscretePrior, stack

ORDERS = ("density", "random", "index")
SELECTIONS = ("greedy", "knapsack")
MOST_SETS = 20  # sellers of which all 2^n sets can be listed

UNCONDITIONAL_BOUND = 1 / (2 / (1 - 2 * np.exp(-2)) + 2 / (1 - np.exp(-2)))
"""Share of UB that posted prices reach in every market, 0.1978 [ours]: by the better of those for the sellers with p_i ≤ B / 2,
where k ≥ 2, and hiring one of those with p_i > B / 2."""


def post_prices(costs: np.ndarray, prices: np.ndarray, budget: float, order: np.ndarray | None = None) -> Outcome:
    """Offer fixed prices one after the other, each if it fits what is left of the budget.

    Args:
        costs: (n,) or (S, n); who costs at most its price accepts.
        prices: (n,), finite, ≥ 0.
        budget: B > 0.
        order: sellers in the order of the offers, a permutation (n,); None means by index.
    """
    prices = floats("prices", prices, "finite numbers (n,) ≥ 0")
    if prices.ndim != 1 or not ((prices >= 0) & (prices < np.inf)).all():
        raise ValueError(f"prices={prices}: expected finite numbers (n,) ≥ 0")
    order = np.arange(len(prices)) if order is None else np.asarray(order)
    if sorted(order.tolist()) != list(range(len(prices))):
        raise ValueError(f"order={order}: expected a permutation of 0 … {len(prices) - 1}")
    costs, limit = check_costs(costs, len(prices)), check_budget(budget) * (1 + BUDGET_SLACK)
    return _offer(costs, prices, partial(_serve, prices=prices, limit=limit, order=order))


def sequential_posted_prices(
    costs: np.ndarray,
    market: Market,
    objective: Objective,
    order: str = "density",
    selection: str = "greedy",
    scale: float = 1.0,
    rng: np.random.Generator | None = None,
    solution: ExAnteSolution | None = None,
) -> Outcome:
    """Post the prices of the ex-ante optimum until the budget is spent [predecessor: Balkanski and Hartline 2016, for value].

    Args:
        costs: reported costs (n,) or (S, n).
        market: sellers, the buyer's beliefs and the budget.
        objective: weights (a, b).
        order: "density" by decreasing g_i / p_i, "random" (new for each profile) or "index".
        selection: "greedy" makes the offers in this order; "knapsack" asks everyone first and then buys from those who accept
            the set that is worth most and fits the budget, for up to 20 sellers.
        scale: s > 0; prices are computed for the budget s B, capped at B.
        rng: draws the random order and the lottery, if there is one; None means a generator of seed 0.
        solution: the ex-ante optimum of this market at the scaled budget, if it is at hand; None solves for it.
    """
    for name, got, allowed in (("order", order, ORDERS), ("selection", selection, SELECTIONS)):
        if got not in allowed:
            raise ValueError(f"{name}={got!r}: expected one of {allowed}")
    check_number("scale", scale)
    if selection == "knapsack" and market.n > MOST_SETS:
        raise ValueError(f"selection='knapsack' lists all sets of sellers: got n = {market.n}, allowed are at most {MOST_SETS}")
    costs, rng = check_costs(costs, market.n), generator(rng)
    if solution is None:
        scaled = market if scale == 1 else replace(market, budget=scale * market.budget)
        solution = solve_ex_ante(scaled, objective, price_cap=market.budget)
    elif len(solution.prices) != market.n:
        raise ValueError(f"solution has {len(solution.prices)} prices: expected one for each of the n = {market.n} sellers")
    limit = market.budget * (1 + BUDGET_SLACK)

    def post(costs: np.ndarray, prices: np.ndarray) -> Outcome:
        gains = _gains(market, objective, prices)
        if selection == "knapsack":
            serve = _best_sets(prices, gains, limit)
        else:
            ranks = {"density": _by_density(gains, prices), "index": np.arange(market.n), "random": rng}
            serve = partial(_serve, prices=prices, limit=limit, order=ranks[order])
        return _offer(costs, prices, serve)

    if solution.lottery is None:
        return post(costs, solution.prices)
    seller, low, high, prob_high = solution.lottery
    rows = np.atleast_2d(costs)
    draws = rng.random(len(rows)) < prob_high
    allocation, payments = np.empty(rows.shape, dtype=bool), np.empty(rows.shape)
    for which, price in ((draws, high), (~draws, low)):
        prices = solution.prices.copy()
        prices[seller] = price
        part = post(rows[which], prices)
        allocation[which], payments[which] = part.allocation, part.payments
    return Outcome(allocation.reshape(costs.shape), payments.reshape(costs.shape))


def adaptive_posted_prices(costs: np.ndarray, market: Market, objective: Objective, ticks: int = 4096) -> Outcome:
    """Posted prices that solve the ex-ante problem again before each offer, for the sellers and the budget that are left.

    A heuristic [ours]. In the order of `sequential_posted_prices`, seller j is offered its price at the lowest λ at which the
    sellers from j on spend at most the rest of the budget in expectation, and at which the offer itself fits.

    Args:
        costs: reported costs (n,) or (S, n).
        market: sellers, the buyer's beliefs and the budget.
        objective: weights (a, b).
        ticks: number of λ that are tried, ≥ 2.
    """
    costs = check_costs(costs, market.n)
    static = solve_ex_ante(market, objective).prices
    _, prices = falling_prices(market, objective, ticks, total=market.budget / 64)
    spends = prices.copy()  # E[p_i x_i] (T, n)
    for prior, index in stack(market.priors):
        spends[:, index] *= prior.cdf(prices[:, index])
    order = _by_density(_gains(market, objective, static), static)
    later = np.cumsum(spends[:, order[::-1]], axis=1)[:, ::-1] - spends[:, order]  # of the sellers after each in the order

    rows, limit = np.atleast_2d(costs), market.budget * (1 + BUDGET_SLACK)
    allocation, payments = np.zeros(rows.shape, dtype=bool), np.zeros(rows.shape)
    for block in blocks(len(rows), 8 * market.n):
        left = np.full(block.stop - block.start, limit)
        for i, rest in zip(order, later.T, strict=True):
            # where prices jump at the same λ, those of later sellers fall first
            needed = np.minimum.accumulate(spends[:, i] + np.append(rest[1:], rest[-1]))
            tick = np.maximum(np.searchsorted(-needed, -left), np.searchsorted(-prices[:, i], -left))
            offer = np.where(tick < ticks, prices[:, i].take(tick, mode="clip"), -1.0)
            accept = rows[block, i] <= offer
            allocation[block, i], payments[block, i] = accept, np.where(accept, offer, 0.0)
            left -= payments[block, i]
    return Outcome(allocation.reshape(costs.shape), payments.reshape(costs.shape))


def optimal_sequential_prices(
    values: np.ndarray,
    types: Sequence[np.ndarray],
    probs: Sequence[np.ndarray],
    budget: float,
    objective: Objective,
) -> float:
    """Best E[J] of all posted-price policies for at most 4 discrete sellers.

    Whom to ask next, and at what price, may depend on the answers so far. Exact dynamic programming over the sellers not yet
    asked and the budget left [ours].

    Args:
        values: v (n,), n ≤ 4.
        types: possible costs of each seller, increasing.
        probs: their probabilities.
        budget: B > 0.
        objective: weights (a, b).
    """
    if not len(values) == len(types) == len(probs):
        raise ValueError(f"{len(values)} values, {len(types)} types, {len(probs)} probs: expected one of each per seller")
    if len(values) > 4:
        raise ValueError(f"values: got {len(values)} sellers; allowed are at most 4")
    market = Market(values, [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)], budget)
    a, b = objective.payment_weight, objective.cost_weight
    offers = []  # of each seller: (share of the budget, probability of acceptance, E[gain])
    for v, prior in zip(market.values, market.priors, strict=True):
        q = np.cumsum(prior.probs)
        gains = (v - a * prior.costs) * q - b * np.cumsum(prior.costs * prior.probs)
        offers.append(list(zip((prior.costs / market.budget).tolist(), q.tolist(), gains.tolist(), strict=True)))

    @cache
    def best(sellers: frozenset[int], left: float) -> float:
        most = 0.0
        for i in sellers:
            others = sellers - {i}
            for share, q, gain in offers[i]:
                if share <= left + BUDGET_SLACK:
                    after = round(left - share, 13)  # one state for sums that differ by rounding
                    most = max(most, gain + q * best(others, after) + (1 - q) * best(others, left))
        return most

    return best(frozenset(range(market.n)), 1.0)


def uniform_posted_price(
    costs: np.ndarray, market: Market, objective: Objective, training: np.ndarray, num_prices: int = 30
) -> Outcome:
    """The folklore baseline: one price for everyone, tuned on training profiles, offered by decreasing value.

    Args:
        costs: reported costs (n,) or (S, n).
        market: values and budget; the priors are not used.
        objective: what the price is tuned for.
        training: other profiles (R, n), R ≥ 1.
        num_prices: ≥ 1 candidates, evenly spaced up to the budget, the highest value or the highest training cost, whichever
            is least.
    """
    training = np.atleast_2d(check_costs(training, market.n))
    if not training.size:
        raise ValueError(f"training of shape {training.shape}: expected (R, n) with R ≥ 1 profiles")
    check_size("num_prices", num_prices, 1)
    order = np.argsort(-market.values, kind="stable")
    highest = min(market.budget, market.values.max(), training.max())
    candidates = highest * np.arange(1, num_prices + 1) / num_prices
    scores = []
    for price in candidates:
        outcome = post_prices(training, np.full(market.n, price), market.budget, order)
        scores.append(outcome.objective(market, training, objective).mean())
    return post_prices(costs, np.full(market.n, candidates[np.argmax(scores)]), market.budget, order)


def monopsony_posted_prices(
    costs: np.ndarray, market: Market, objective: Objective, rng: np.random.Generator | None = None
) -> Outcome:
    """The naive baseline: offer the best prices without a budget, p_i(λ = 0), in random order while the budget lasts.

    Args:
        costs: reported costs (n,) or (S, n).
        market: sellers, the buyer's beliefs and the budget.
        objective: weights (a, b).
        rng: draws an order for each profile; None means a generator of seed 0.
    """
    costs, rng = check_costs(costs, market.n), generator(rng)
    prices, limit = prices_at(market, objective, np.zeros(1))[0], market.budget * (1 + BUDGET_SLACK)
    return _offer(costs, prices, partial(_serve, prices=prices, limit=limit, order=rng))


def posted_price_bound(k: np.ndarray | float) -> np.ndarray | float:
    """Proven share of UB that sequential posted prices reach, (1 − 1/k) E min(k, N) / k with N ~ Poisson(k) [ours].

    Args:
        k: B / max_i p_i ≥ 1, any shape; inf gives 1.
    """
    k = floats("k", k, "numbers ≥ 1")
    if not (k >= 1).all():
        raise ValueError(f"k={k}: expected numbers ≥ 1")
    finite = np.where(np.isinf(k), 1.0, k)
    bound = np.where(np.isinf(k), 1.0, (1 - 1 / finite) * (1 - _mode_chance(finite)))
    return bound if bound.ndim else float(bound)


def _mode_chance(k: np.ndarray) -> np.ndarray:
    """k^m e^{−k} / m!, m = ⌊k⌋; for large k, where its factors lose their digits, by Stirling's formula."""
    m = np.floor(k)
    excess = (k - m) / m
    stirling = np.exp(-m * (excess - np.log1p(excess)) - 1 / (12 * m)) / np.sqrt(2 * np.pi * m)
    few = np.minimum(k, 1e4)
    return np.where(k > few, stirling, stats.poisson.pmf(np.floor(few), few))


def iid_posted_price_ratio(n: int, accept_prob: float, k: float) -> float:
    """Exact E[J] / UB of sequential posted prices for n identical sellers: E min(⌊k⌋, Bin(n, q)) / (n q) [ours].

    Args:
        n: number of sellers, ≥ 1.
        accept_prob: q in (0, 1], the probability that a seller accepts.
        k: B / p ≥ 1.
    """
    check_size("n", n, 1)
    check_number("accept_prob", accept_prob, "a number in (0, 1]", lambda q: 0 < q <= 1)
    check_number("k", k, "a number ≥ 1", lambda k: k >= 1)
    sold = np.arange(n + 1)
    return float(np.minimum(np.floor(k * (1 + BUDGET_SLACK)), sold) @ stats.binom.pmf(sold, n, accept_prob) / (n * accept_prob))


def _gains(market: Market, objective: Objective, prices: np.ndarray) -> np.ndarray:
    """g_i = E[v_i − a p_i − b c_i | c_i ≤ p_i] (n,); a price that nobody accepts counts as the cost."""
    q = market.accept_prob(prices)
    cost = np.divide(market.expected_cost(prices), q, out=prices.copy(), where=q > 0)
    return market.values - objective.payment_weight * prices - objective.cost_weight * cost


def _by_density(gains: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Sellers by decreasing g_i / p_i, by index where it is equal up to rounding, as it is for all U[0, h]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        densities = np.where(prices > 0, gains / prices, np.inf)
        order = np.argsort(-densities, kind="stable")
        falls = np.diff(-densities[order]) > 1e-9 * np.abs(densities[order[1:]])  # not between two prices of 0
    return order[np.lexsort((order, np.append(0, np.cumsum(falls))))]


def _offer(costs: np.ndarray, prices: np.ndarray, serve: Callable[[np.ndarray], np.ndarray]) -> Outcome:
    """Ask who accepts, block by block, and let `serve` choose among them: accept (s, n) → bought (s, n)."""
    rows = np.atleast_2d(costs)
    # as Market.sample draws them: the profiles of one seller lie together
    allocation, payments = np.empty(rows.shape[::-1], dtype=bool).T, np.empty(rows.shape[::-1]).T
    for block in blocks(len(rows), rows.shape[1]):
        allocation[block] = serve(rows[block] <= prices)
        np.multiply(allocation[block], prices, out=payments[block])
    return Outcome(allocation.reshape(costs.shape), payments.reshape(costs.shape))


def _serve(accept: np.ndarray, prices: np.ndarray, limit: float, order: np.ndarray | np.random.Generator) -> np.ndarray:
    """Buy in order what fits: accept (s, n) → bought (s, n). A generator draws an order for each profile."""
    s, n = accept.shape
    bought = np.empty((n, s), dtype=bool)
    if isinstance(order, np.random.Generator):
        order = order.permuted(np.tile(np.arange(n), (s, 1)), axis=1)
        answers, offers = np.take_along_axis(accept, order, axis=1).T, prices[order].T  # (n, s)
        _buy(np.ascontiguousarray(answers), np.ascontiguousarray(offers), limit, bought)
        np.put_along_axis(accept, order, bought.T, axis=1)
        return accept
    _buy(accept.T[order], prices[order], limit, bought)
    accept.T[order] = bought
    return accept


def _buy(answers: np.ndarray, offers: np.ndarray, limit: float, bought: np.ndarray) -> None:
    """Fill `bought` (n, s) from answers (n, s) and offers (n,) or (n, s), both in the order of the offers."""
    spent = np.zeros(answers.shape[1])
    for answer, price, out in zip(answers, offers, bought, strict=True):
        np.less_equal(spent, limit - price, out=out)
        out &= answer
        spent += out * price


def _best_sets(prices: np.ndarray, gains: np.ndarray, limit: float) -> Callable[[np.ndarray], np.ndarray]:
    """For any acceptors (s, n): the set among them that fits the limit and has the largest Σ g_i."""
    bits = 1 << np.arange(len(prices))
    spend, worth = np.zeros(1), np.zeros(1)  # by set, seller i in the sets with bit i
    for price, gain in zip(prices, gains, strict=True):
        spend, worth = np.concatenate([spend, spend + price]), np.concatenate([worth, worth + gain])
    worth[spend > limit] = -np.inf
    best = np.arange(len(worth), dtype=np.int32)  # the best subset of each set
    for bit in bits:
        worth, best = worth.reshape(-1, 2, bit), best.reshape(-1, 2, bit)
        best[:, 1] = np.where(worth[:, 0] >= worth[:, 1], best[:, 0], best[:, 1])
        np.maximum(worth[:, 0], worth[:, 1], out=worth[:, 1])
    best = best.reshape(-1)
    return lambda accept: (best[accept @ bits][:, None] & bits) > 0

"""The best mechanism whose budget holds in expectation: one posted price per seller, at most one lottery.

That such a mechanism exists is the paper's claim [paper]; its form and proof are ours [ours]:

    max Σ_i E[g_i]   subject to   Σ_i E[R_i] ≤ B,        g_i(q) = v_i q − a R_i(q) − b C_i(q)

where q is the probability of buying from seller i, R_i the spend curve and C_i the cost curve (`priors`). A price is a point
(R, g) of its seller, a lottery over prices a convex combination, so only the upper concave envelope of g against R matters.
Pool the envelopes' segments of positive slope and buy them by decreasing slope until Σ ΔR = B: the linear relaxation of a
multiple-choice knapsack [predecessor: Sinha and Zoltners 1979]. The slope of the marginal segment is the multiplier λ, what one
more unit of budget is worth. Equivalently i is bought iff (a + λ) φ_i(c_i) + b c_i ≤ v_i, with φ_i ironed, at the price

    p_i(λ) = sup{c ≤ cap : (a + λ) φ_i(c) + b c ≤ v_i}.

Discrete priors are solved exactly. Continuous ones are bracketed on a grid of prices, an unbounded support cut at its
(1 − 1e-12)-quantile; Newton's method on these equations and on Σ_i R_i = B then finds λ and the prices to rounding. Only where
φ is ironed across a jump do prices and λ keep the error of the grid, O(grid^-2).
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import isotonic_regression

from labkit.errors import check_number
from labkit.procurement._checks import floats, generator
from labkit.procurement.market import Market, Objective, check_costs
from labkit.procurement.outcome import Outcome
from labkit.procurement.priors import MixturePrior, Prior, SpendCurve, expected_cost, spend_curves, stack

_DUST = 1e-12  # relative size of what counts as rounding


@dataclass(frozen=True)
class Envelope:
    """Upper concave envelope of points in the plane.

    Attributes:
        vertices: indices of the points (k + 1,) on the envelope.
        slopes: of the segments between them (k,), decreasing.
        jumps: whether points between a segment's ends lie below it (k,).
    """

    vertices: np.ndarray
    slopes: np.ndarray
    jumps: np.ndarray


@dataclass(frozen=True)
class ExAnteSolution:
    """Optimal posted prices under a budget in expectation.

    Attributes:
        value: expected objective.
        expected_spend: Σ E[p_i x_i] ≤ B.
        multiplier: λ ≥ 0, the objective's gain from one more unit of budget; 0 if the budget is slack.
        prices: posted prices (n,); of the seller with a lottery the lower one.
        accept_prob: probability of buying from each seller (n,), lottery included.
        lottery: (seller, low, high, prob_high): this seller is offered `high` with probability `prob_high`, otherwise `low`;
            None if all prices are certain.
        market_size: k = B / the highest price that someone may accept; inf if there is none.
    """

    value: float
    expected_spend: float
    multiplier: float
    prices: np.ndarray
    accept_prob: np.ndarray
    lottery: tuple[int, float, float, float] | None
    market_size: float


def envelope(spends: np.ndarray, gains: np.ndarray) -> Envelope:
    """Upper concave envelope of gain against spend, by isotonic regression of the slopes.

    Args:
        spends: R (m,), non-decreasing from 0; of the points that cost nothing only the last counts.
        gains: g (m,).
    """
    start = max(0, int(np.searchsorted(spends, 0.0, side="right")) - 1)
    keep = start + np.append(0, np.flatnonzero(np.diff(spends[start:]) > 0) + 1)
    if len(keep) == 1:
        return Envelope(keep, np.empty(0), np.empty(0, dtype=bool))
    R, g = spends[keep], gains[keep]
    fit = isotonic_regression(np.diff(g) / np.diff(R), weights=np.diff(R), increasing=False)
    first = fit.blocks[:-1]
    begin = np.repeat(first, np.diff(fit.blocks))  # of each point's segment
    depth = g[begin] + fit.x * (R[:-1] - R[begin]) - g[:-1]
    return Envelope(keep[fit.blocks], fit.x[first], np.maximum.reduceat(depth, first) > _DUST * np.abs(g).max())


def solve_ex_ante(market: Market, objective: Objective, price_cap: float | None = None, grid: int = 512) -> ExAnteSolution:
    """Maximise E[J] over truthful mechanisms whose expected spend is at most B.

    Args:
        market: sellers, priors and budget.
        objective: weights (a, b).
        price_cap: highest price; None means the budget, which makes `value` an upper bound on every mechanism that keeps its
            budget in all realisations; inf gives the unrestricted optimum.
        grid: prices on which a continuous prior is bracketed, ≥ 8.

    Raises:
        ValueError: a cap ≤ 0, a grid < 8, or no finite optimum: payments and costs weigh nothing, no cap, an unbounded support,
            and a budget that would buy from everyone.
    """
    pairs = _pairs(market, objective, price_cap, grid)
    hull = _hull(pairs, market.budget)
    if hull.multiplier == 0 and pairs.unbounded:
        raise ValueError(
            f"price_cap=inf: no finite optimum, budget={market.budget} buys from everyone at any cost; pass a finite price_cap"
        )
    return _solution(market, pairs, _polish(pairs, market.budget, hull))


def prices_at(market: Market, objective: Objective, multipliers: np.ndarray, price_cap: float | None = None) -> np.ndarray:
    """The price family p_i(λ) = sup{c ≤ cap : (a + λ) φ_i(c) + b c ≤ v_i}, φ ironed, on a grid of 512 prices per seller.

    Below the support of F_i, where no one accepts, φ_i(c) = c makes this v_i / (a + b + λ).

    Args:
        market: sellers, priors and budget.
        objective: weights (a, b).
        multipliers: λ (T,), ≥ 0, non-decreasing; inf gives price 0.
        price_cap: highest price; None means the budget.

    Returns:
        Prices (T, n), non-increasing along T; exact for discrete priors, otherwise with an error of O(grid^-2).
    """
    multipliers = floats("multipliers", multipliers, "a non-decreasing array (T,) of numbers ≥ 0")
    if multipliers.ndim != 1 or not (multipliers >= 0).all() or (multipliers[1:] < multipliers[:-1]).any():
        raise ValueError(f"multipliers={multipliers}: expected a non-decreasing array (T,) of numbers ≥ 0")
    pairs = _pairs(market, objective, price_cap, grid=512)
    return np.minimum.accumulate(_prices(pairs, multipliers), axis=0)[:, pairs.pair_of]


def ex_ante_mechanism(costs: np.ndarray, solution: ExAnteSolution, rng: np.random.Generator | None = None) -> Outcome:
    """Offer every seller its price of the ex-ante optimum, whatever the others do. The total may exceed the budget.

    Args:
        costs: (n,) or (S, n).
        solution: of `solve_ex_ante`.
        rng: draws the lottery, if there is one; None means a generator of seed 0.
    """
    costs = check_costs(costs, len(solution.prices))
    prices = np.broadcast_to(solution.prices, costs.shape)
    if solution.lottery is not None:
        seller, low, high, prob_high = solution.lottery
        prices = prices.copy()
        prices[..., seller] = np.where(generator(rng).random(costs.shape[:-1]) < prob_high, high, low)
    allocation = costs <= prices
    return Outcome(allocation, np.where(allocation, prices, 0.0))


def check_cap(price_cap: float) -> float:
    """A price cap > 0, or a ValueError."""
    return check_number("price_cap", price_cap, "a number > 0, inf, or None for the budget", lambda x: x > 0)


@dataclass(frozen=True)
class _Pairs:
    """The market's U distinct pairs of value and prior, in order of their first sellers; arrays are (U,) unless said."""

    a: float
    b: float
    values: np.ndarray
    priors: list[Prior]
    count: np.ndarray  # sellers of each pair
    pair_of: np.ndarray  # (n,) pair of each seller
    caps: np.ndarray  # highest price worth offering
    curves: list[SpendCurve]
    envelopes: list[Envelope]
    unbounded: bool  # whether nothing bounds some price


@dataclass(frozen=True)
class _Point:
    """A solution in terms of pairs.

    `marginal` is (pair, high price, number of the pair's sellers who get it); the others of the pair get the price in `prices`,
    and a fractional number is a lottery.
    """

    multiplier: float
    prices: np.ndarray
    segments: np.ndarray  # envelope segments bought in full
    marginal: tuple[int, float, float] | None


def _pairs(market: Market, objective: Objective, price_cap: float | None, grid: int) -> _Pairs:
    cap = market.budget if price_cap is None else check_cap(price_cap)
    a, b = objective.payment_weight, objective.cost_weight
    kinds, which = market.kinds
    index: dict[tuple[int, float], int] = {}
    pair_of = np.array([index.setdefault(key, len(index)) for key in zip(which, market.values, strict=True)])
    kind, values = (np.array(column) for column in zip(*index, strict=True))
    caps = np.minimum(cap, values / (a + b)) if a + b else np.full(len(values), cap)  # φ(c) ≥ c: a higher price never pays
    tops = np.zeros(len(kinds))
    np.maximum.at(tops, kind, caps)
    by_kind = spend_curves(kinds, tops, grid)
    curves = [by_kind[d] for d in kind]
    envelopes = [
        envelope(curve.spends, v * curve.probs - a * curve.spends - b * curve.costs)
        for v, curve in zip(values, curves, strict=True)
    ]
    unbounded = any(np.isinf(c) and np.isinf(kinds[d].ppf(1.0)) for c, d in zip(caps, kind, strict=True))
    priors = [kinds[d] for d in kind]
    return _Pairs(a, b, values, priors, np.bincount(pair_of), pair_of, caps, curves, envelopes, unbounded)


def _hull(pairs: _Pairs, budget: float) -> _Point:
    """Buy the pooled segments by decreasing slope until the budget is spent: exact on the points of the curves."""
    good = [np.count_nonzero(env.slopes > 0) for env in pairs.envelopes]
    pair = np.repeat(np.arange(len(good)), good)
    hulls = list(zip(pairs.curves, pairs.envelopes, good, strict=True))
    slopes = np.concatenate([env.slopes[:k] for _, env, k in hulls])
    spends = np.concatenate([np.diff(curve.spends[env.vertices[: k + 1]]) for curve, env, k in hulls])
    order = np.argsort(-slopes, kind="stable")
    total = np.append(0.0, np.cumsum((spends * pairs.count[pair])[order]))
    whole = int(np.searchsorted(total, budget * (1 + _DUST), side="right")) - 1
    segments = np.bincount(pair[order[:whole]], minlength=len(good))
    prices = np.array([curve.prices[env.vertices[k]] for (curve, env, _), k in zip(hulls, segments, strict=True)])
    if whole == len(order):
        return _Point(0.0, prices, segments, None)
    last = order[whole]
    u = int(pair[last])
    high = float(pairs.curves[u].prices[pairs.envelopes[u].vertices[segments[u] + 1]])
    number = float((budget - total[whole]) / spends[last])
    return _Point(float(slopes[last]), prices, segments, (u, high, number) if number > _DUST else None)


def _prices(pairs: _Pairs, multipliers: np.ndarray) -> np.ndarray:
    """p(λ) (T, U). In the variable 1 / (a + b + λ) every price is v times it below the support, and near linear above."""
    with np.errstate(divide="ignore"):
        x = 1 / (pairs.a + pairs.b + multipliers)
    columns = [np.minimum(np.interp(x, *_knots(pairs, u)), pairs.caps[u]) for u in range(len(pairs.values))]
    return np.stack(columns, axis=1)


def _knots(pairs: _Pairs, u: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a pair's price (K,) bends or jumps as a function of 1 / (a + b + λ) (K,)."""
    curve, env, v = pairs.curves[u], pairs.envelopes[u], pairs.values[u]
    prices = curve.prices[env.vertices]
    worth = pairs.a + pairs.b + env.slopes
    worth = worth[worth > 0]
    if not worth.size:
        return np.array([0.0, prices[-1] / v]), np.array([0.0, prices[-1]])
    low, high = prices[:-1][: len(worth)], prices[1:][: len(worth)]
    x = 1 / worth
    if curve.discrete:
        first = np.array([min(low[0], v * x[0])])  # just short of the lowest type
        return np.concatenate([[0.0], x[:1], np.repeat(x, 2)[1:]]), np.concatenate([[0.0], first, _interleave(low, high)[1:]])
    middle = np.where(env.jumps[: len(worth)], 0.0, (low + high) / 2)
    low, high = (np.where(env.jumps[: len(worth)], end, middle) for end in (low, high))
    rate = (x[-1] - x[-2]) / (low[-1] - high[-2]) if len(x) > 1 and low[-1] > high[-2] else 0.0
    end = prices[len(worth)]
    x = np.concatenate([[0.0, prices[0] / v], np.repeat(x, 2), [x[-1] + rate * (end - high[-1])]])
    return np.maximum.accumulate(x), np.concatenate([[0.0, prices[0]], _interleave(low, high), [end]])


def _interleave(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack([low, high], axis=1).reshape(-1)


def _polish(pairs: _Pairs, budget: float, hull: _Point) -> _Point:
    """Move the hull's prices to exact ones; where Newton's method does not settle they stay.

    The exact prices of continuous pairs leave a little more or less for a lottery than the hull's. Where that is more than the
    whole segment or less than nothing, another segment is marginal.
    """
    guess = hull
    for _ in range(8):
        if guess.marginal is not None and _leaps(pairs, guess):
            exact = _settle(pairs, budget, guess, binding=False)
            if exact is None:
                return hull
            u, _, number = exact.marginal
            if 0 <= number <= pairs.count[u]:
                return exact
            guess = _move(pairs, guess, u, guess.segments[u] + (number > 0))
        else:
            tight, slack = replace(guess, marginal=None), replace(guess, marginal=None, multiplier=0.0)
            tries = [(tight, True), (slack, False)] if guess.multiplier > 0 else [(slack, False), (tight, True)]
            exact = next((p for p in (_settle(pairs, budget, *attempt) for attempt in tries) if p), None)
            misplaced = None if exact is None else _misplaced(pairs, exact)
            if misplaced is None:
                return exact or hull
            u, k = misplaced
            guess = _move(pairs, guess, u, k)
            high = pairs.curves[u].prices[pairs.envelopes[u].vertices[k + 1]]
            guess = replace(guess, multiplier=float(pairs.envelopes[u].slopes[k]), marginal=(u, float(high), 0.0))
    return hull


def _leaps(pairs: _Pairs, point: _Point) -> bool:
    """Whether nothing lies between the two prices of the marginal segment, so that only a lottery does."""
    u = point.marginal[0]
    return bool(pairs.curves[u].discrete or pairs.envelopes[u].jumps[point.segments[u]])


def _move(pairs: _Pairs, point: _Point, u: int, k: int) -> _Point:
    """The point with a pair at its k-th vertex, and no lottery."""
    prices, segments = point.prices.copy(), point.segments.copy()
    prices[u], segments[u] = pairs.curves[u].prices[pairs.envelopes[u].vertices[k]], k
    return replace(point, prices=prices, segments=segments, marginal=None)


def _misplaced(pairs: _Pairs, point: _Point) -> tuple[int, int] | None:
    """A discrete pair's segment (pair, k) that is worth more than λ but not bought, or bought but worth less."""
    for u, (curve, env, k) in enumerate(zip(pairs.curves, pairs.envelopes, point.segments, strict=True)):
        if curve.discrete and (env.slopes[k : k + 1] > point.multiplier * (1 + _DUST)).any():
            return u, int(k)
        if curve.discrete and k and env.slopes[k - 1] < point.multiplier * (1 - _DUST):
            return u, int(k - 1)
    return None


def _settle(pairs: _Pairs, budget: float, hull: _Point, binding: bool) -> _Point | None:
    """Newton's method on v = (a + λ) φ(c) + b c for the continuous pairs and, where `binding`, on Σ R = B with λ unknown.

    Discrete pairs, and one with a lottery, keep the hull's prices. Without `binding` λ is the hull's, and the lottery takes up
    the rest of the budget, be it more than there is to buy or less than nothing.
    """
    smooth = np.array([not curve.discrete for curve in pairs.curves])
    if hull.marginal is not None:
        smooth[hull.marginal[0]] = False
    if not smooth.any():
        return None
    families = stack([prior for prior, chosen in zip(pairs.priors, smooth, strict=True) if chosen])
    low, c, high = np.array([_region(pairs, u, hull.segments[u]) for u in np.flatnonzero(smooth)]).T
    v, count = pairs.values[smooth], pairs.count[smooth]
    spends = [curve.spends[env.vertices[k]] for curve, env, k in zip(pairs.curves, pairs.envelopes, hull.segments, strict=True)]
    left = budget - (pairs.count * spends)[~smooth].sum()
    multiplier = hull.multiplier
    c = np.clip(c, low, high)
    F, f = np.empty((2, 3, len(c)))
    for _ in range(40):
        points = np.clip(c + 1e-5 * np.outer([-1, 0, 1], np.minimum(c, high - low)), low, high)
        for prior, index in families:
            F[:, index], f[:, index] = prior.cdf(points[:, index]), prior.pdf(points[:, index])
        weight = pairs.a + multiplier
        with np.errstate(divide="ignore", invalid="ignore"):
            phi = points + np.where(F > 0, F / f, 0.0)
            slope = pairs.b + (weight * (phi[2] - phi[0]) / (points[2] - points[0]) if weight else np.zeros(len(c)))
            excess = v - pairs.b * c - (weight * phi[1] if weight else 0.0)
        free = ~((c >= high) & (excess >= 0) | (c <= low) & (excess <= 0))
        phi, slope, excess = phi[1, free], slope[free], excess[free]
        if not (np.isfinite(excess) & (slope > 0) & (slope < np.inf)).all() or (binding and not free.any()):
            return None
        spend, step = (count * c * F[1]).sum(), 0.0
        if binding:
            rise = (count * (F[1] + c * f[1]))[free] / slope  # d spend / d excess
            step = (spend - left + rise @ excess) / max(rise @ phi, np.finfo(float).tiny)
        move = np.zeros(len(c))
        move[free] = (excess - phi * step) / slope
        multiplier, c = max(0.0, float(multiplier + step)), np.clip(c + move, np.maximum(low, c / 4), high)
        if np.abs(move).max() <= _DUST * c.max() and abs(step) <= _DUST * (1 + multiplier):
            break
    else:
        return None
    prices = hull.prices.copy()
    prices[smooth] = c
    if hull.marginal is None:
        return replace(hull, multiplier=multiplier, prices=prices) if spend <= left + 100 * _DUST * budget else None
    u, high_price, _ = hull.marginal
    vertices = pairs.envelopes[u].vertices[hull.segments[u] :][:2]
    number = float((left - spend) / np.diff(pairs.curves[u].spends[vertices])[0])
    return replace(hull, prices=prices, marginal=(u, high_price, number))


def _region(pairs: _Pairs, u: int, k: int) -> tuple[float, float, float]:
    """A pair's price at its k-th vertex, between the prices up to which its envelope neither jumps nor has a kink."""
    curve, env = pairs.curves[u], pairs.envelopes[u]
    prices = curve.prices[env.vertices]
    barriers = np.flatnonzero(env.jumps)
    left, right = max([0, *(barriers[barriers < k] + 1)]), min([len(env.slopes), *barriers[barriers >= k]])
    kinks = np.flatnonzero(np.isin(prices, pairs.priors[u].kinks)) if isinstance(pairs.priors[u], MixturePrior) else np.empty(0)
    left, right = max([left, *kinks[kinks <= k]]), min([right, *kinks[kinks >= k]])
    start = prices[k] if k else prices[:2].mean()
    return prices[int(left)], start, min(prices[int(right)], pairs.caps[u])


def _solution(market: Market, pairs: _Pairs, point: _Point) -> ExAnteSolution:
    prices, lottery = point.prices[pairs.pair_of], None
    if point.marginal is not None:
        u, high, number = point.marginal
        sellers = np.flatnonzero(pairs.pair_of == u)
        whole = int(number + _DUST)
        prices[sellers[:whole]] = high
        if number - whole > _DUST:
            lottery = (int(sellers[whole]), high, number - whole)
    accept, cost = market.accept_prob(prices), market.expected_cost(prices)
    spend = prices * accept
    highest = prices[accept > 0].max(initial=0.0)
    prices = np.where(accept > 0, prices, _unsold(pairs, point.multiplier)[pairs.pair_of])
    if lottery is not None:
        seller, high, chance = lottery
        lottery = (seller, float(prices[seller]), high, chance)
        prior = market.priors[seller]
        accept[seller] += chance * (prior.cdf(high) - accept[seller])
        spend[seller] += chance * (high * prior.cdf(high) - spend[seller])
        cost[seller] += chance * (expected_cost(prior, high) - cost[seller])
        highest = max(highest, high)
    value = market.values @ accept - pairs.a * spend.sum() - pairs.b * cost.sum()
    size = market.budget / highest if highest else np.inf
    return ExAnteSolution(float(value), float(spend.sum()), point.multiplier, prices, accept, lottery, float(size))


def _unsold(pairs: _Pairs, multiplier: float) -> np.ndarray:
    """Prices (U,) at which no one sells: v / (a + b + λ), or what is just short of the support or of the cap."""
    lowest = np.array([curve.prices[0] for curve in pairs.curves])
    worth = pairs.a + pairs.b + multiplier
    return np.minimum(np.minimum(lowest, pairs.caps), pairs.values / worth if worth else np.inf)

"""Exact optima of small discrete markets by linear programming (HiGHS): oracles for everything else in this lab [ours].

Ex ante. Interim allocation x_i(t) ∈ [0, 1] and payment P_i(t) of each type t of each seller:

    max Σ_i Σ_t f_i(t) [(v_i − b c_t) x_i(t) − a P_i(t)]
    P_i(t) − c_t x_i(t) ≥ max(0, P_i(s) − c_t x_i(s)) for all s,     Σ_i Σ_t f_i(t) P_i(t) ≤ B,     x_i(t) = 0 where c_t > cap

Ex post. A randomised mechanism tosses its coins, then keeps budget and individual rationality whatever came up. In each profile
t of types it picks the set S of sellers with probability y_{t,S}, and seller i ∈ S earns the rent z_{t,S,i} ≥ 0 over its cost:

    Σ_S y_{t,S} = 1,      Σ_{i∈S} z_{t,S,i} + c_t(S) y_{t,S} ≤ B y_{t,S}
    U_i(t) = Σ_S z_{t,S,i} ≥ Σ_{S∋i} [z_{s,S,i} + (c_s − c_t)_i y_{s,S}]   for all profiles s that differ from t in i's type

(DSIC), or the last line averaged over the other sellers' types (BIC). An expected allocation in [0, 1] per profile with
Σ_i P_i ≤ B would be a larger problem: it buys at c > B with probability B / c, which no outcome can.

HiGHS's tolerances are absolute, so money is counted in units of the budget, or of Σ_i max_t c_t if that is less: no optimum
spends more. A type above the cap is never bought; any cost above the cap stands for its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from labkit.errors import check_number, check_size
from labkit.procurement.ex_ante import check_cap
from labkit.procurement.market import Objective, check_budget, check_values
from labkit.procurement.priors import DiscretePrior

BUDGET_KINDS = ("ex_ante", "ex_post")
TRUTHS = ("DSIC", "BIC")
LARGEST = 200_000  # profiles · subsets


@dataclass(frozen=True)
class LPSolution:
    """An optimal mechanism.

    Attributes:
        value: its expected objective.
        allocation: ex ante the interim x_i(t), one array (m_i,) per seller; ex post the probability of buying from each seller
            in each profile of types, (m_1, …, m_n, n).
        payments: expected payments in the shape of `allocation`.
    """

    value: float
    allocation: tuple[np.ndarray, ...] | np.ndarray
    payments: tuple[np.ndarray, ...] | np.ndarray


def optimal_mechanism_lp(
    values: np.ndarray,
    types: Sequence[np.ndarray],
    probs: Sequence[np.ndarray],
    budget: float,
    objective: Objective,
    budget_kind: str = "ex_ante",
    truth: str = "DSIC",
    price_cap: float | None = None,
) -> LPSolution:
    """The optimal mechanism of a discrete market.

    Args:
        values: v (n,) > 0.
        types: costs of each seller's types, n increasing arrays (m_i,).
        probs: their probabilities, n arrays (m_i,).
        budget: B > 0.
        objective: weights (a, b).
        budget_kind: whether the budget holds in expectation ("ex_ante") or in every outcome ("ex_post").
        truth: "DSIC" (truth is best against any reports) or "BIC" (against truthful ones). Ex ante both have the same optimum.
        price_cap: of "ex_ante": no type above it is bought; None means the budget.

    Raises:
        ValueError: bad sellers, an unknown kind or truth, or more than 200 000 pairs of a profile and a set of sellers ex post.
    """
    values, budget = check_values(values), check_budget(budget)
    if not len(values) == len(types) == len(probs):
        raise ValueError(f"{len(values)} values, {len(types)} types, {len(probs)} probs: expected one of each per seller")
    priors = [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)]
    if budget_kind not in BUDGET_KINDS:
        raise ValueError(f"budget_kind={budget_kind!r}: expected one of {BUDGET_KINDS}")
    if truth not in TRUTHS:
        raise ValueError(f"truth={truth!r}: expected one of {TRUTHS}")
    cap = budget if price_cap is None or budget_kind == "ex_post" else check_cap(price_cap)
    unit = min(budget, float(sum(prior.costs[-1] for prior in priors))) or budget
    costs = [np.minimum(prior.costs, 2 * cap) / unit for prior in priors]
    chances = [prior.probs for prior in priors]
    if budget_kind == "ex_post":
        solution = _ex_post(values / unit, costs, chances, objective, truth)
        return LPSolution(unit * solution.value, solution.allocation, unit * solution.payments)
    solution = _ex_ante(values / unit, costs, chances, objective, cap / unit)
    return LPSolution(unit * solution.value, solution.allocation, tuple(unit * paid for paid in solution.payments))


def prior_free_utility_lp(value: float, max_cost: float, points: int = 800) -> tuple[float, np.ndarray, np.ndarray]:
    """The best share of v − c that a random posted price guarantees for every cost c in [0, max_cost], on a grid.

    max ρ over probabilities w with Σ_{p_k ≥ c} w_k (v − p_k) ≥ ρ (v − c) for all c on the grid of prices.

    Args:
        value: v > 0, finite.
        max_cost: in (0, v).
        points: prices, evenly spaced in log(v − p), ≥ 2.

    Returns:
        ρ, the prices (points,) and their probabilities (points,).
    """
    check_number("value", value)
    check_number("max_cost", max_cost, f"a number > 0 and below the value {value}", lambda c: 0 < c < value)
    check_size("points", points, 2)
    margins = np.geomspace(1.0, (value - max_cost) / value, points)  # (v − p) / v
    # variables ρ and G_j = Σ_{k≥j} w_k (v − p_k) / v, so that w_j = (G_j − G_{j+1}) / ((v − p_j) / v)
    weight = sparse.diags_array([1 / margins, -1 / margins[:-1]], offsets=[0, 1])
    column = sparse.csr_array((points, 1))
    A = sparse.vstack(
        [
            sparse.hstack([column, -weight]),
            sparse.hstack([sparse.csr_array(margins[:, None]), -sparse.eye_array(points)]),
            sparse.hstack([sparse.csr_array((1, 1)), sparse.csr_array(weight.sum(axis=0)[None])]),
        ]
    )
    gain = np.append(1.0, np.zeros(points))
    solution = _maximise(gain, A_ub=A, b_ub=np.append(np.zeros(2 * points), 1.0))
    return float(solution[0]), value * (1 - margins), weight @ solution[1:]


def _ex_ante(
    values: np.ndarray, costs: list[np.ndarray], probs: list[np.ndarray], objective: Objective, cap: float
) -> LPSolution:
    """Money in units of the budget."""
    a, b = objective.payment_weight, objective.cost_weight
    blocks, gain, spend, upper = [], [], [], []
    for v, c, f in zip(values, costs, probs, strict=True):
        m = len(c)
        pair, (true, report) = np.arange(m * m), np.indices((m, m)).reshape(2, -1)
        here, there = (sparse.csr_array((np.ones(m * m), (pair, index)), shape=(m * m, m)) for index in (true, report))
        # variables x (m,), P (m,). Neither a lie, P(s) − c_t x(s), nor staying out beats the truth, P(t) − c_t x(t)
        lies = sparse.hstack([sparse.diags_array(c[true]) @ (here - there), there - here])
        out = sparse.hstack([sparse.diags_array(c), -sparse.eye_array(m)])
        blocks.append(sparse.vstack([lies, out]))
        gain += [f * (v - b * c), -a * f]
        spend += [np.zeros(m), f]
        upper += [(c <= cap).astype(float), np.full(m, np.inf)]
    limits, gain, spend, upper = sparse.block_diag(blocks), *map(np.concatenate, (gain, spend, upper))
    solution = _maximise(
        gain,
        A_ub=sparse.vstack([limits, sparse.csr_array(spend[None])]),
        b_ub=np.append(np.zeros(limits.shape[0]), 1.0),
        bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
    )
    halves = np.split(solution, np.cumsum([len(c) for c in costs for _ in range(2)])[:-1])
    return LPSolution(float(gain @ solution), tuple(halves[::2]), tuple(halves[1::2]))


def _ex_post(
    values: np.ndarray, types: list[np.ndarray], probs: list[np.ndarray], objective: Objective, truth: str
) -> LPSolution:
    """Money in units of the budget."""
    n, sizes = len(values), tuple(map(len, types))
    profiles = math.prod(sizes)
    if profiles * 2**n > LARGEST:
        raise ValueError(
            f"{profiles} profiles of types · {2**n} sets of sellers = {profiles * 2**n}: expected at most {LARGEST}"
        )
    index = np.indices(sizes).reshape(n, -1)  # (n, N) type of each seller in each profile
    costs = np.stack([c[i] for c, i in zip(types, index, strict=True)])  # (n, N)
    chance = np.prod([f[i] for f, i in zip(probs, index, strict=True)], axis=0)  # (N,)
    member = (np.arange(2**n)[:, None] >> np.arange(n)) & 1  # (2^n, n)
    total = costs.T @ member.T  # (N, 2^n) cost of each set
    profile, chosen = np.nonzero(total <= 1 + 1e-12)
    pairs = len(profile)  # probabilities y come first, then one rent z per pair and member
    pair, seller = np.nonzero(member[chosen])
    a, b = objective.payment_weight, objective.cost_weight
    worth = (member @ values)[chosen] - (a + b) * total[profile, chosen]
    gain = np.concatenate([chance[profile] * worth, -a * chance[profile[pair]]])

    def rows(row: np.ndarray, column: np.ndarray, data: np.ndarray | float, height: int) -> sparse.csr_array:
        data = np.broadcast_to(data, row.shape)
        return sparse.csr_array((data, (row, column)), shape=(height, len(gain)))

    rent_column = pairs + np.arange(len(pair))
    rents = [rows(profile[pair[seller == i]], rent_column[seller == i], 1.0, profiles) for i in range(n)]  # U_i(t)
    bought = [rows(profile[pair[seller == i]], pair[seller == i], 1.0, profiles) for i in range(n)]  # P(i sells | t)
    limits = [rows(pair, rent_column, 1.0, pairs) + rows(np.arange(pairs), np.arange(pairs), total[profile, chosen] - 1, pairs)]
    for i, (c, f) in enumerate(zip(types, probs, strict=True)):
        U, X, place, cost = rents[i], bought[i], index[i], costs[i]
        if truth == "BIC":
            others = chance / f[place]
            mean = sparse.csr_array((others, (place, np.arange(profiles))), shape=(sizes[i], profiles))
            U, X, place, cost = mean @ U, mean @ X, np.arange(sizes[i]), c
        stride = 1 if truth == "BIC" else math.prod(sizes[i + 1 :])
        here = np.arange(len(place))
        for report in range(sizes[i]):
            there = here + (report - place) * stride
            limits.append(U[there] + sparse.diags_array(c[report] - cost) @ X[there] - U)
    A = sparse.vstack(limits)
    certain = rows(profile, np.arange(pairs), 1.0, profiles)
    solution = _maximise(gain, A_ub=A, b_ub=np.zeros(A.shape[0]), A_eq=certain, b_eq=np.ones(profiles))
    x = np.stack([X @ solution for X in bought], axis=-1)  # (N, n)
    paid = np.stack([U @ solution for U in rents], axis=-1) + costs.T * x
    return LPSolution(float(gain @ solution), x.reshape(*sizes, n), paid.reshape(*sizes, n))


def _maximise(gain: np.ndarray, **constraints) -> np.ndarray:
    result = linprog(-gain / (np.abs(gain).max() or 1.0), method="highs", **constraints)
    if not result.success:
        raise RuntimeError(f"HiGHS: {result.message}")
    return result.x

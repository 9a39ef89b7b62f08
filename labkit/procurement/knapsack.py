"""The first-best: what a buyer who knows all costs could get, the benchmark of every mechanism.

    OPT = max Σ_i (v_i − b c_i) x_i   subject to   Σ_i c_i x_i ≤ B

over the sellers with c_i ≤ B and b c_i ≤ v_i; the others are dropped. With x_i in [0, 1] it is a fractional knapsack: buy in
increasing order of c_i / v_i, which is decreasing density (v_i − b c_i) / c_i, and split the last. With x_i in {0, 1} it is an
integer program, and OPT_integral ≤ OPT_fractional ≤ OPT_integral + max_i (v_i − b c_i).
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from labkit.procurement._checks import not_negative
from labkit.procurement._profiles import BUDGET_SLACK, blocks
from labkit.procurement.market import check_budget, check_costs, check_values


def first_best(
    costs: np.ndarray, values: np.ndarray, budget: float, cost_weight: float = 1.0, integral: bool = False
) -> np.ndarray:
    """The best objective with known costs.

    Args:
        costs: (n,) or (S, n), ≥ 0.
        values: (n,) > 0.
        budget: B > 0.
        cost_weight: b ≥ 0; 1 is welfare (and utility, where payments are costs), 0 is value.
        integral: whole sellers only, by one integer program per profile, instead of the fractional relaxation.

    Returns:
        (S,), or a scalar for costs (n,).
    """
    values = check_values(values)
    costs, budget = check_costs(costs, len(values)), check_budget(budget)
    cost_weight = not_negative("cost_weight", cost_weight)
    profiles = np.atleast_2d(costs)
    best = np.empty(len(profiles))
    for rows in blocks(len(profiles), 8 * len(values)):
        block = profiles[rows]
        gains = values - cost_weight * block
        gains = np.where((block <= budget) & (gains >= 0), gains, 0.0)
        if integral:
            best[rows] = [_whole(w, c, budget) for w, c in zip(gains, block, strict=True)]
        else:
            best[rows] = _fractional(gains, block, values, budget)
    return best.reshape(costs.shape[:-1])[()]


def _fractional(gains: np.ndarray, costs: np.ndarray, values: np.ndarray, budget: float) -> np.ndarray:
    order = np.argsort(costs / values, axis=-1, kind="stable")
    w, c = (np.take_along_axis(array, order, axis=-1) for array in (gains, np.where(gains > 0, costs, 0.0)))
    left = budget - (np.cumsum(c, axis=-1) - c)  # (S, n) before each seller
    share = np.divide(left, c, out=np.ones_like(c), where=c > 0)
    return (w * np.clip(share, 0.0, 1.0)).sum(-1)


def _whole(gains: np.ndarray, costs: np.ndarray, budget: float) -> float:
    w, c = gains[gains > 0], costs[gains > 0]
    if not w.size:
        return 0.0
    # HiGHS stops within 1e-6 of the best objective, and lets a constraint be broken by as much: so gains are made large, and a
    # set over the budget is cut off, with every set of the same size that puts dearer sellers in place of some of its own
    worth, rows, limits = w / w.max() * 2**20, [c / budget], [1.0]
    while True:
        fits = LinearConstraint(np.array(rows), ub=limits)
        result = milp(-worth, constraints=fits, bounds=Bounds(0, 1), integrality=np.ones(len(w)), options={"mip_rel_gap": 0})
        chosen = result.x > 0.5
        if c[chosen].sum() <= budget * (1 + BUDGET_SLACK):
            return float(w[chosen].sum())
        rows.append((chosen | (c >= c[chosen].max())).astype(float))
        limits.append(chosen.sum() - 1.0)

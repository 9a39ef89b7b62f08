"""Search for a profitable lie, a loss, or an overspent budget in any mechanism.

A mechanism maps reported costs (S, n) to an `Outcome`. It is truthful if no seller's utility p_i − c_i x_i rises when it alone
reports another cost, individually rational if the utility is never negative at the truth and losers are paid nothing, and
feasible if Σ p_i ≤ B for all reports. With one parameter per seller it is truthful iff who wins falls with the own report and a
winner is paid its threshold, the highest report that still wins [predecessor: Myerson 1981].

A randomised mechanism is audited flip by flip, provided that it draws the same numbers on every call: pass no generator.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from labkit.errors import check_number
from labkit.procurement._checks import floats
from labkit.procurement.market import check_budget, check_costs
from labkit.procurement.outcome import Outcome

_DUST = 1e-12  # times the budget: what counts as rounding


@dataclass(frozen=True)
class Violation:
    """One broken requirement.

    Attributes:
        kind: "budget", "loss" (negative utility at the truth), "paid loser", "lie" (a profitable one) or "not monotone".
        profile: row of the costs.
        seller: who; None for the budget.
        report: what the seller reported; None at the truth.
        amount: excess over the budget, utility lost, payment, or gain; 0 for "not monotone".
    """

    kind: str
    profile: int
    seller: int | None
    report: float | None
    amount: float


@dataclass(frozen=True)
class AuditReport:
    """What a search over profiles, sellers and reports found.

    Attributes:
        max_gain: largest gain in utility from a lie; at most 0 means that none pays.
        min_seller_utility: smallest utility of a seller at the truth.
        max_spend: largest total payment, at the truth and at lies.
        monotone: whether no seller ever wins at a report and loses at a lower one.
        first_violation: beyond rounding (1e-12 B), at the truth and then by seller and report; None if there is none.
    """

    max_gain: float
    min_seller_utility: float
    max_spend: float
    monotone: bool
    first_violation: Violation | None


def audit(mechanism: Callable[[np.ndarray], Outcome], costs: np.ndarray, budget: float, report_grid: np.ndarray) -> AuditReport:
    """Let every seller lie in every way on the grid, one at a time.

    Args:
        mechanism: reported costs (S, n) → `Outcome`.
        costs: true costs (n,) or (S, n).
        budget: B > 0.
        report_grid: reports to try (G,), finite, ≥ 0. The mechanism is called n G + 1 times.
    """
    costs, budget = np.atleast_2d(_costs(costs)), check_budget(budget)
    reports = np.sort(floats("report_grid", report_grid, "finite numbers (G,) ≥ 0, G ≥ 1"))
    if reports.ndim != 1 or not reports.size or not (reports[0] >= 0 and reports[-1] < np.inf):
        raise ValueError(f"report_grid={report_grid}: expected finite numbers (G,) ≥ 0, G ≥ 1")
    dust = _DUST * budget
    violations: list[Violation] = []

    def note(kind: str, amount: np.ndarray, seller: int | None = None, report: float | None = None) -> None:
        """Note the worst profile of an amount (S,) or (S, n) that should not be positive."""
        if not violations and amount.max() > dust:
            profile, *who = np.unravel_index(amount.argmax(), amount.shape)
            violations.append(Violation(kind, int(profile), int(who[0]) if who else seller, report, float(amount.max())))

    truth = mechanism(costs)
    utility = truth.payments - costs * truth.allocation  # (S, n)
    spend = truth.spend
    max_spend, max_gain, monotone = spend.max(), -np.inf, True
    note("budget", spend - budget)
    note("loss", -utility)
    note("paid loser", np.where(truth.allocation, 0.0, np.abs(truth.payments)))
    for seller in range(costs.shape[1]):
        true = costs[:, seller]
        lost = np.zeros(len(costs), dtype=bool)  # at a lower report
        reported = costs.copy()
        for report in reports:
            reported[:, seller] = report
            outcome = mechanism(reported)
            wins, spend = outcome.allocation[:, seller], outcome.spend
            gain = outcome.payments[:, seller] - true * wins - utility[:, seller]
            lost |= (report >= true) & ~truth.allocation[:, seller]
            odd = (wins & lost) | (~wins & truth.allocation[:, seller] & (report <= true))
            lost |= ~wins
            max_spend, max_gain = max(max_spend, spend.max()), max(max_gain, gain.max())
            monotone &= not odd.any()
            note("lie", gain, seller, float(report))
            note("budget", spend - budget, None, float(report))
            if odd.any() and not violations:
                violations.append(Violation("not monotone", int(odd.argmax()), seller, float(report), 0.0))
    return AuditReport(
        float(max_gain), float(utility.min()), float(max_spend), bool(monotone), violations[0] if violations else None
    )


def threshold_payments(mechanism: Callable[[np.ndarray], Outcome], costs: np.ndarray, highest: float) -> np.ndarray:
    """The highest winning report of every winner, others as they are: what a truthful mechanism must pay.

    Bisection to 2⁻⁵⁰ of `highest`; the mechanism is called 51 n + 1 times.

    Args:
        mechanism: reported costs (S, n) → `Outcome`.
        costs: true costs (n,) or (S, n).
        highest: a report at which everyone loses; of a seller who still wins there it is the answer.

    Returns:
        Thresholds in the shape of `costs`, 0 for losers.
    """
    costs = _costs(costs)
    check_number("highest", highest)
    rows = np.atleast_2d(costs)
    wins = mechanism(rows).allocation
    thresholds = np.zeros(rows.shape)
    for seller in range(rows.shape[1]):
        reported = rows.copy()
        low, high = rows[:, seller], np.full(len(rows), float(highest))
        reported[:, seller] = np.maximum(low, high)
        still = mechanism(reported).allocation[:, seller]
        for _ in range(50):
            middle = (low + high) / 2
            reported[:, seller] = middle
            enough = mechanism(reported).allocation[:, seller]
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        thresholds[:, seller] = np.where(still, highest, low) * wins[:, seller]
    return thresholds.reshape(costs.shape)


def _costs(costs: np.ndarray) -> np.ndarray:
    costs = floats("costs", costs, "finite numbers ≥ 0")
    if not costs.size:
        raise ValueError(f"costs of shape {costs.shape}: expected at least one profile")
    return check_costs(costs, costs.shape[-1] if costs.ndim else 0)

"""Lab 04: a hundred thousand profiles of costs at once, and the optimum in expectation without an LP solver.

Peers: plain Python loops with the same inputs and outputs, and HiGHS on the same linear program. All on one thread; what ours
and the peer return is compared before it is timed.
"""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
from scipy import sparse, stats
from scipy.optimize import linprog

from benchmarks._runner import Row, compare, interleave, ratio_row
from labkit.procurement import (
    UTILITY,
    DiscretePrior,
    Market,
    Outcome,
    adaptive_posted_prices,
    clock_auction,
    optimal_mechanism_lp,
    post_prices,
    price_path,
    solve_ex_ante,
    value_clock,
)
from labkit.procurement.priors import spend_curve

PROFILES, SELLERS, BUDGET = 100_000, 50, 6.0
SIZES = f"{PROFILES:,} profiles × {SELLERS} sellers, float64"


def benchmarks() -> Iterator[Row]:
    """All comparisons of the lab: about two minutes of processor time and 2 GB."""
    yield from engines()
    yield from growth()
    yield from hull()
    yield from memory()


def engines() -> Iterator[Row]:
    """Mechanisms against loops over profiles and sellers."""
    market = _market(SELLERS)
    costs = market.sample(PROFILES, np.random.default_rng(0))
    prices = solve_ex_ante(market, UTILITY).prices
    order, rows = np.argsort(-market.values / prices), price_path(market, UTILITY).prices
    cases = {  # ours, peer, on how many profiles, target
        "posted prices": (
            lambda c: post_prices(c, prices, BUDGET, order),
            lambda c: _posted_prices_loop(c, prices, BUDGET, order),
            PROFILES,
            "≥ 20",
        ),
        "value clock": (
            lambda c: value_clock(c, market.values, BUDGET),
            lambda c: _value_clock_loop(c, market.values, BUDGET),
            PROFILES,
            "≥ 10",
        ),
        "λ-clock of 4096 ticks": (
            lambda c: clock_auction(c, rows, BUDGET),
            lambda c: _clock_loop(c, rows, BUDGET),
            PROFILES // 10,
            None,
        ),
    }
    for name, (ours, peer, size, target) in cases.items():
        part = costs[:size]
        _check_same(ours(part), peer(part))
        seconds = interleave({"ours": partial(ours, part), "peer": partial(peer, part)}, 5, progress=name)
        sizes = SIZES if size == PROFILES else f"{size:,} profiles × {SELLERS} sellers, float64"
        yield compare("04", name, seconds["ours"], "a Python loop", seconds["peer"], target=target, sizes=sizes)


def growth() -> Iterator[Row]:
    """Time at twice the profiles over time: linear is 2."""
    market = _market(SELLERS)
    costs = market.sample(2 * PROFILES, np.random.default_rng(0))
    prices, rows = solve_ex_ante(market, UTILITY).prices, price_path(market, UTILITY).prices
    mechanisms = {
        "posted prices": lambda c: post_prices(c, prices, BUDGET),
        "value clock": lambda c: value_clock(c, market.values, BUDGET),
        "λ-clock": lambda c: clock_auction(c, rows, BUDGET),
        "adaptive posted prices": lambda c: adaptive_posted_prices(c, market, UTILITY, ticks=512),
    }
    for name, mechanism in mechanisms.items():
        calls = {size: partial(mechanism, costs[:size]) for size in (PROFILES, 2 * PROFILES)}
        seconds = interleave(calls, 15, progress=f"{name}, growth")
        for target in ("≥ 1.6", "≤ 2.4"):
            # the least times: fresh memory and whatever else the machine does can only add
            ratio, peer = seconds[2 * PROFILES].min() / seconds[PROFILES].min(), f"itself on {PROFILES:,} profiles"
            yield ratio_row("04", f"{name}, time on {2 * PROFILES:,}", ratio, peer, target=target, sizes=f"{SELLERS} sellers")


def hull() -> Iterator[Row]:
    """The optimum in expectation of discrete priors against HiGHS, on mechanisms in general and on prices alone."""
    for n, m, peer, program, target in (
        (15, 60, "HiGHS, interim allocation and payments", _interim_lp, "≥ 100"),
        (30, 200, "HiGHS, multiple-choice knapsack", _knapsack_lp, None),
        (100, 500, "HiGHS, multiple-choice knapsack", _knapsack_lp, None),
    ):
        rng = np.random.default_rng(0)
        priors = [DiscretePrior(np.sort(rng.uniform(0, 1.5, m)), rng.dirichlet(np.ones(m))) for _ in range(n)]
        market = Market(rng.uniform(0.5, 2, n), priors, 0.1 * n)
        value, optimum = solve_ex_ante(market, UTILITY).value, program(market)
        if not np.isclose(value, optimum, rtol=1e-9, atol=0):
            raise AssertionError(f"hull {value!r}, HiGHS {optimum!r}")
        calls = {"ours": partial(solve_ex_ante, market, UTILITY), "peer": partial(program, market)}
        seconds = interleave(calls, 5, progress=f"hull, n = {n}")
        sizes = f"{n} sellers × {m} types, values equal to {abs(value - optimum) / value:.0e}"
        yield compare("04", "ex-ante optimum", seconds["ours"], peer, seconds["peer"], target=target, sizes=sizes)


def memory() -> Iterator[Row]:
    """Peak memory of a process that runs a mechanism on a million profiles of 100 sellers; Linux only."""
    if sys.platform != "linux":
        return
    for name, call in {
        "posted prices": "post_prices(costs, np.full(100, 0.3), 6.0)",
        "value clock": "value_clock(costs, np.linspace(0.5, 2, 100), 6.0)",
        "λ-clock": "clock_auction(costs, np.geomspace(1, 1e-3, 512)[:, None] * np.linspace(0.5, 1, 100), 6.0)",
        "prior-free welfare": "prior_free_welfare(costs, np.linspace(0.5, 2, 100), 6.0)",
    }.items():
        script = (
            "import numpy as np\n"
            "from labkit.procurement import *\n"
            "costs = np.random.default_rng(0).random((100, 1_000_000)).T\n"
            f"outcome = {call}\n"
            "assert outcome.spend.max() <= 6 * (1 + 1e-12)\n"
            "print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        peak = int(done.stdout.split()[1]) * 1024 / 1e9  # "VmHWM:  … kB"
        yield ratio_row(
            "04",
            f"{name}: {peak:.2f} GB",
            2 / peak,
            "2 GB",
            target="≥ 1",
            sizes="1,000,000 profiles × 100 sellers, peak resident memory",
        )


def _market(n: int) -> Market:
    rng = np.random.default_rng(0)
    return Market(rng.uniform(0.5, 2, n), [stats.uniform(0, h) for h in rng.uniform(0.5, 1.5, n)], BUDGET)


def _check_same(ours: Outcome, peer: Outcome) -> None:
    if not (np.array_equal(ours.allocation, peer.allocation) and np.array_equal(ours.payments, peer.payments)):
        raise AssertionError("the peer's outcome differs")


def _posted_prices_loop(costs: np.ndarray, prices: np.ndarray, budget: float, order: np.ndarray) -> Outcome:
    allocation, payments = np.zeros(costs.shape, dtype=bool), np.zeros(costs.shape)
    prices, order = prices.tolist(), order.tolist()
    for s, c in enumerate(costs.tolist()):
        spent = 0.0
        for i in order:
            if spent + prices[i] <= budget and c[i] <= prices[i]:
                allocation[s, i] = True
                payments[s, i] = prices[i]
                spent += prices[i]
    return Outcome(allocation, payments)


def _value_clock_loop(costs: np.ndarray, values: np.ndarray, budget: float) -> Outcome:
    allocation, payments = np.zeros(costs.shape, dtype=bool), np.zeros(costs.shape)
    values = values.tolist()
    for s, c in enumerate(costs.tolist()):
        ranked = sorted((c[i] / values[i], i) for i in range(len(c)) if c[i] <= values[i] and c[i] <= budget)
        winners, worth, theta = [], 0.0, 1.0
        for density, i in ranked:
            if density > budget / (worth + values[i]):
                theta = density
                break
            worth += values[i]
            winners.append(i)
        if winners:
            theta = min(1.0, theta, budget / worth)
        for i in winners:
            allocation[s, i] = True
            payments[s, i] = theta * values[i]
    return Outcome(allocation, payments)


def _clock_loop(costs: np.ndarray, prices: np.ndarray, budget: float) -> Outcome:
    allocation, payments = np.zeros(costs.shape, dtype=bool), np.zeros(costs.shape)
    rows = prices.tolist()
    for s, c in enumerate(costs.tolist()):
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            if sum(p for p, cost in zip(rows[middle], c, strict=True) if cost <= p) <= budget:
                high = middle
            else:
                low = middle + 1
        for i, (p, cost) in enumerate(zip(rows[high], c, strict=True)):
            if cost <= p:
                allocation[s, i] = True
                payments[s, i] = p
    return Outcome(allocation, payments)


def _interim_lp(market: Market) -> float:
    """The best mechanism of interim allocations and payments that no type gains by misreporting."""
    types, probs = [prior.costs for prior in market.priors], [prior.probs for prior in market.priors]
    return optimal_mechanism_lp(market.values, types, probs, market.budget, UTILITY, budget_kind="ex_ante", truth="BIC").value


def _knapsack_lp(market: Market) -> float:
    """max Σ_ij y_ij g_ij over Σ_j y_ij ≤ 1 and Σ_ij y_ij R_ij ≤ B, y_ij the probability of offering seller i price j."""
    curves = [spend_curve(prior, top=market.budget) for prior in market.priors]
    gains = np.concatenate([v * curve.probs - curve.spends for v, curve in zip(market.values, curves, strict=True)])
    seller = np.repeat(np.arange(market.n), [len(curve.prices) for curve in curves])
    choice = sparse.csr_array((np.ones(len(seller)), (seller, np.arange(len(seller)))))
    limits = sparse.vstack([choice, sparse.csr_array(np.concatenate([curve.spends for curve in curves])[None])])
    bounds = np.append(np.ones(market.n), market.budget)
    return -linprog(-gains, A_ub=limits, b_ub=bounds, bounds=(0, None), method="highs").fun

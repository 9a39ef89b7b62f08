"""Live panels of lab 04. Each opens on something worth looking at; the tables of sections 10 and 11 come from `experiment`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import ipywidgets as widgets
import numpy as np
import pandas as pd
from scipy import stats

from labkit.panel import Panel, Playback
from labkit.procurement import experiment, figures
from labkit.procurement.clock import clock_auction
from labkit.procurement.ex_ante import envelope, ex_ante_mechanism, prices_at, solve_ex_ante
from labkit.procurement.knapsack import first_best
from labkit.procurement.lp import prior_free_utility_lp
from labkit.procurement.market import UTILITY, VALUE, WELFARE, Market, Objective
from labkit.procurement.outcome import Outcome
from labkit.procurement.posted_prices import sequential_posted_prices
from labkit.procurement.prior_free import best_single_seller, prior_free_utility_lottery, value_clock
from labkit.procurement.priors import MixturePrior, spend_curve, virtual_cost
from labkit.theme import fmt, percent

PRIORS = {
    "uniform on [0, 1]": stats.uniform(),
    "exponential, mean 0.5": stats.expon(scale=0.5),
    "lognormal, median 0.5": stats.lognorm(0.6, scale=0.5),
    "increasing density on [0, 1]": stats.beta(2, 1),
    "cheap or dear: irregular": MixturePrior([stats.uniform(0, 0.2), stats.uniform(0.8, 0.2)], [0.5, 0.5]),
}
LABELS = "ABCDEFGHIJKLMNO"
VALUES, COSTS = np.array([4, 3, 6, 2, 5.0]), np.array([1, 1.2, 3, 0.4, 4])
"""Five sellers; the buyer believes that their costs are uniform on [0, 5]."""


def _five(budget: float) -> Market:
    return Market(VALUES, [stats.uniform(0, 5)] * len(VALUES), budget)


def _slider(description: str, value: float, low: float, high: float, step: float, **options) -> widgets.FloatSlider:
    return widgets.FloatSlider(description=description, value=value, min=low, max=high, step=step, **options)


def _log_slider(description: str, value: float, low: float, high: float) -> widgets.FloatLogSlider:
    """From 10^low to 10^high in steps of a twentieth of a decade."""
    return widgets.FloatLogSlider(description=description, value=value, min=low, max=high, step=0.05, readout_format=".3g")


def _alpha_slider(value: float = 1.0) -> widgets.FloatSlider:
    return _slider("Weight of utility α (rest: welfare)", value, 0, 1, 0.05)


def _prior_choice(value: str = "uniform on [0, 1]") -> widgets.Dropdown:
    return widgets.Dropdown(options=list(PRIORS), value=value, description="Belief about a cost")


def lie(seller: str = "A", report: float = 1.75, budget: float = 5.0, mechanism: str = "value clock") -> Panel:
    """The headline: one of five sellers reports a cost, true or not. What is it paid, and what does it earn?

    Args:
        seller: "A" to "E".
        report: its reported cost, in [0, 6].
        budget: B, in [1, 12].
        mechanism: a name in `experiment.MECHANISMS`.
    """
    step = 0.025
    reports = step * np.arange(241)
    offered = ["pay as bid", "value clock", "λ-clock", "posted prices", "prior-free, deterministic", "best single seller"]

    def compute(seller: str, report: float, budget: float, mechanism: str):
        i = LABELS.index(seller)
        profiles = np.tile(COSTS, (len(reports), 1))
        profiles[:, i] = reports
        outcomes = [experiment.MECHANISMS[name](profiles, _five(budget), UTILITY) for name in (mechanism, "pay as bid")]
        return i, round(report / step), mechanism, [(o.payments[:, i], o.allocation[:, i]) for o in outcomes]

    def draw(figure, result) -> str:
        i, here, name, (chosen, foil) = result
        cost = float(COSTS[i])
        figures.draw_lie(figure, reports, *chosen, *foil, cost, here)
        truth = round(cost / step)
        (paid, hired), gain = chosen, _earned(chosen, cost, here) - _earned(chosen, cost, truth)
        fate = f"it is hired, paid <b>{fmt(float(paid[here]))}</b> and earns" if hired[here] else "it is not hired and earns"
        words = (
            f"Seller {LABELS[i]} has a cost of {fmt(cost)} and reports <b>{fmt(float(reports[here]))}</b>. By <i>{name}</i> "
            f"{fate} {fmt(_earned(chosen, cost, here))}; {_compared(gain)}."
        )
        if name == "pay as bid":
            return words
        gain = _earned(foil, cost, here) - _earned(foil, cost, truth)
        return f"{words} Paid as bid it would earn {fmt(_earned(foil, cost, here))}; {_compared(gain)}."

    figure = figures.lie()
    figure.update_xaxes(range=(0, 6))
    figure.layout.yaxis.range, figure.layout.yaxis2.range = (0, 6), (-4.3, 3.4)
    return Panel(
        "lie",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "seller": widgets.ToggleButtons(options=list("ABCDE"), value=seller, description="Seller"),
            "report": _slider("Its reported cost", report, 0, 6, 0.05),
            "budget": _slider("Budget B", budget, 1, 12, 0.25),
            "mechanism": widgets.Dropdown(options=offered, value=mechanism, description="Mechanism"),
        },
        caption="Left, what the seller is paid at every report (shaded where it is hired); right, what it earns. Look at the "
        "truth (dashed): paid as bid, a higher report earns more, until the job is lost. A truthful payment makes it flat.",
    )


def _earned(side: tuple[np.ndarray, np.ndarray], cost: float, at: int) -> float:
    payments, hired = side
    return float(payments[at] - cost * hired[at])


def _compared(gain: float) -> str:
    if abs(gain) < 1e-9:
        return "the truth earns just as much"
    return f"the truth earns <b>{fmt(abs(gain))} {'less' if gain > 0 else 'more'}</b>"


def objectives(n: int = 20, budget: float = 15.0, seed: int = 0) -> Panel:
    """Buy for value, for welfare or for utility, in expectation and within the same budget; score each by all three.

    Args:
        n: sellers, values U[0.5, 2] and costs U[0, 1].
        budget: B, in [0.5, 20].
        seed: of the values.
    """
    values, goals = np.random.default_rng(seed).uniform(0.5, 2, n), {"value": VALUE, "welfare": WELFARE, "utility": UTILITY}

    def compute(budget: float):
        market, rows = Market(values, [stats.uniform()] * n, budget), {}
        for name, goal in goals.items():
            solution = solve_ex_ante(market, goal)
            value, cost = values @ solution.accept_prob, market.expected_cost(solution.prices).sum()
            rows[name] = (value, value - cost, value - solution.expected_spend, solution.expected_spend)
        return budget, pd.DataFrame.from_dict(rows, orient="index", columns=[*goals, "spend"])

    def draw(figure, result) -> str:
        budget, scores = result
        figures.draw_objectives(figure, scores[list(goals)])
        careless = max(0.0, 1 - scores.loc["value", "utility"] / scores.loc["utility", "utility"])
        spends = ", ".join(f"{fmt(float(spend))} when bought for {name}" for name, spend in scores["spend"].items())
        return (
            f"Of a budget of {fmt(budget)} are spent: {spends}. Who buys for value forgoes <b>{percent(careless)}</b> of the "
            "utility that could be had."
        )

    figure = figures.objectives()
    figure.layout.yaxis.range = (0, 1.15 * values.sum())
    return Panel(
        "objectives",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={"budget": _slider("Budget B", budget, 0.5, 20, 0.5)},
        caption=f"{n} sellers, values between 0.5 and 2, costs uniform on [0, 1], budget in expectation. Look at the right "
        "group as the budget grows: value knows no price that is too high.",
    )


@dataclass(frozen=True, eq=False)
class ClockRun:
    """A value clock on its way: sellers (n,), prices per unit of value (T,), who is there (T, n), and the outcome."""

    values: np.ndarray
    costs: np.ndarray
    budget: float
    thetas: np.ndarray
    active: np.ndarray
    outcome: Outcome


def clock_run(values: np.ndarray, costs: np.ndarray, budget: float, steps: int) -> ClockRun:
    """The value clock in `steps` even steps from θ = 1 to where it stops."""
    outcome = value_clock(costs, values, budget)
    thetas = np.linspace(1.0, float(outcome.theta), steps + 1)
    active = (costs <= thetas[:, None] * values) & (costs <= budget)
    active[-1] = outcome.allocation
    return ClockRun(values, costs, budget, thetas, active, outcome)


def playback(budget: float = 5.0, step: int = 40, steps: int = 60) -> Panel:
    """The value clock, step by step: sellers as boxes of width v and height c / v.

    Args:
        budget: B, in [1, 20].
        step: to open with, up to `steps`.
        steps: from θ = 1 to where the clock stops.
    """

    def compute(market: int, budget: float) -> ClockRun:
        values, costs = VALUES, COSTS
        if market:
            rng = np.random.default_rng(market)
            values = rng.uniform(0.5, 2.5, 15)
            costs = values * rng.uniform(0, 1.1, 15)
        return clock_run(values, costs, budget, steps)

    def draw(figure, run: ClockRun, step: int) -> str:
        figures.draw_value_clock(figure, run.costs, run.values, run.budget, run.thetas, run.active, step, LABELS)
        theta, stays = float(run.thetas[step]), run.active[step]
        worth, budget = float(run.values[stays].sum()), fmt(run.budget)
        if step < steps and run.thetas[-1] < 1:
            return (
                f"θ = <b>{fmt(theta)}</b>: {stays.sum()} of {len(stays)} sellers are still there, worth {fmt(worth)} in all. "
                f"To pay them would take <b>{fmt(theta * worth)}</b> of a budget of {budget}: too much, the clock goes on."
            )
        best = float(first_best(run.costs, run.values, run.budget))
        welfare = float(run.outcome.welfare(run.values, run.costs))
        names = ", ".join(LABELS[i] for i in np.flatnonzero(run.outcome.allocation))
        return (
            f"The clock stops at θ* = <b>{fmt(theta)}</b>, hires {names} and pays {fmt(float(run.outcome.spend))} of {budget}. "
            f"Welfare {fmt(welfare)}; with all costs known it could be {fmt(best)}, <b>{fmt(best / welfare)} times</b> that."
            if welfare
            else f"Nobody can be hired with a budget of {budget}."
        )

    return Panel(
        "value-clock",
        figure=figures.value_clock(),
        compute=compute,
        draw=draw,
        controls={
            "market": widgets.Dropdown(
                options=[("the five of the first panel", 0), *((f"fifteen at random, draw {k}", k) for k in range(1, 10))],
                description="Sellers",
            ),
            "budget": _slider("Budget B", budget, 1, 20, 0.25),
        },
        view={"step": Playback(steps + 1, description="Step", interval=100, value=step)},
        caption="Everyone is offered θ per unit of value. The orange area is what all who are still there would be paid: look "
        "when its corner touches the budget curve. Whoever leaves cannot come back, so nobody gains by leaving early or late.",
    )


def worst_case(epsilon: float = 0.1) -> Panel:
    """Two sellers that are as bad as it gets: v = (ε, 1), c = (0, B), B = 1/2.

    Args:
        epsilon: value of the small seller, in [1e-4, 0.5].
    """
    budget, grid = 0.5, 10 ** np.linspace(-4, -0.3, 75)
    rows = []
    for eps in grid:
        values, costs = np.array([eps, 1.0]), np.array([0.0, budget])
        clock, single = (rule(costs, values, budget).welfare(values, costs) for rule in (value_clock, best_single_seller))
        rows.append((first_best(costs, values, budget), clock, single, (2 * clock + single) / 3))
    table = pd.DataFrame(rows, columns=["first-best", "clock", "single", "lottery"], dtype=float)

    def draw(figure, _, epsilon: float) -> str:
        here = int(np.abs(np.log(grid / epsilon)).argmin())
        figures.draw_worst_case(figure, grid, table, here)
        row = table.iloc[here]
        return (
            f"ε = {fmt(float(grid[here]))}: the clock drops the large seller, the single seller forgoes the small one. The "
            f"lottery of both has a ratio of <b>{row['first-best'] / row['lottery']:.4f}</b>; it never exceeds 3."
        )

    figure = figures.worst_case()
    figure.layout.yaxis.range = (0, 1.2)
    return Panel(
        "worst-case",
        figure=figure,
        compute=lambda: None,
        draw=draw,
        controls={},
        view={"epsilon": _log_slider("Value ε of the small seller", epsilon, -4, -0.3)},
        caption="Move ε to the left: the clock alone becomes worthless, and the lottery's ratio climbs to 3 but not beyond.",
    )


def impossibility(max_cost: float = 0.9) -> Panel:
    """One seller, no prior: what share of v − c can a price guarantee for every cost up to c_max?

    Args:
        max_cost: c_max as a part of v.
    """
    options = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999, 0.99999]
    dots = np.array([0.5, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9999])
    found = [prior_free_utility_lp(1.0, c, 400)[0] for c in dots]

    def draw(figure, _, max_cost: float) -> str:
        lottery = prior_free_utility_lottery(1.0, max_cost)
        figures.draw_impossibility(figure, lottery, max_cost)
        return (
            f"Costs up to {max_cost:g} v: the best lottery guarantees <b>{percent(lottery.ratio, 1)}</b> of v − c at any cost. "
            f"It bids c_max with probability {fmt(lottery.ratio)}; the sure bid c_max guarantees "
            f"{percent(1 - max_cost, 1 if max_cost < 0.99 else 3)}, and any lower sure price nothing."
        )

    figure = figures.impossibility()
    margins = np.geomspace(1, 1e-5, 120)
    traces = figures.keyed(figure)
    traces["curve"].update(x=1 / margins, y=1 / (1 - np.log(margins)))
    traces["programme"].update(x=1 / (1 - dots), y=found)
    return Panel(
        "impossibility",
        figure=figure,
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "max_cost": widgets.SelectionSlider(
                options=[(f"{c:g}", c) for c in options], value=max_cost, description="Highest cost c_max (in v)"
            )
        },
        caption="Left, the lottery; middle, what it obtains at each true cost, beside two sure prices. Move c_max up to v: the "
        "level blue line sinks, and no price, lottery or budget can hold it.",
    )


def virtual_costs(prior: str = "cheap or dear: irregular", value: float = 2.0, multiplier: float = 0.1) -> Panel:
    """How a prior becomes a price, for a buyer who wants utility: virtual cost, ironing, and the tangent of slope λ.

    Args:
        prior: a name in `PRIORS`.
        value: v of the seller, in [0.5, 3].
        multiplier: λ, in [0, 4].
    """
    step = 0.05
    multipliers = step * np.arange(81)
    c = np.linspace(0, 1.25, 501)

    @functools.cache
    def of_cost(name: str) -> dict[str, np.ndarray]:
        belief = PRIORS[name]
        phi = {"phi": virtual_cost(belief, c), "ironed": virtual_cost(belief, c, ironed=True)}
        return {"cdf": belief.cdf(c)} | {key: np.where(np.isfinite(y), y, np.nan) for key, y in phi.items()}

    def compute(prior: str, value: float):
        curve = spend_curve(PRIORS[prior], top=value)
        gain = value * curve.probs - curve.spends
        convex, concave = envelope(curve.probs, -curve.spends).vertices, envelope(curve.spends, gain).vertices
        curves = {"c": c, "q": curve.probs, "spend": curve.spends, "gain": gain} | of_cost(prior)
        curves |= {"q hull": curve.probs[convex], "spend hull": curve.spends[convex]}
        curves |= {"R hull": curve.spends[concave], "gain hull": gain[concave]}
        prices = prices_at(Market([value], [PRIORS[prior]], 1.0), UTILITY, multipliers, price_cap=np.inf)[:, 0]
        return prior, value, curves, prices

    def draw(figure, result, multiplier: float) -> str:
        name, value, curves, prices = result
        price = float(prices[round(multiplier / step)])
        q = float(PRIORS[name].cdf(price))
        virtual = float(np.interp(price, c, np.nan_to_num(curves["ironed"], nan=9.0)))
        limit, gain = value / (1 + multiplier), (value - price) * q
        figures.draw_prior(figure, curves)
        figures.draw_multiplier(figure, multiplier, limit, price, virtual, q, price * q, gain)
        ironed = np.nanmax(curves["ironed"] - curves["phi"]) > 1e-6
        odd = (
            " Here φ falls on the way; ironed, it is level, and prices inside the level part are never posted."
            if ironed
            else ""
        )
        return (
            f"At λ = {fmt(multiplier)} virtual costs up to v / (1 + λ) = {fmt(limit)} are worth paying. The price is "
            f"<b>{fmt(price)}</b>: accepted with {percent(q)}, it spends {fmt(price * q)} and gains {fmt(gain)} on average."
            f"{odd}"
        )

    for name in PRIORS:
        of_cost(name)
    return Panel(
        "virtual-cost",
        figure=figures.virtual_cost(),
        compute=compute,
        draw=draw,
        controls={"prior": _prior_choice(prior), "value": _slider("Value v of the seller", value, 0.5, 3, 0.1)},
        view={"multiplier": _slider("Multiplier λ: worth of a unit of budget", multiplier, 0, 4, step)},
        caption="Left, buy up to the cost where the ironed φ meets the red line. Right, the same price is where a line of "
        "slope λ touches the envelope (blue). Move λ a step to the right: with this irregular prior the point jumps.",
    )


def ex_ante(n: int = 20, budget: float = 2.0, seed: int = 0) -> Panel:
    """The optimum whose budget holds in expectation: a price for each seller, its value, and what more budget is worth.

    Args:
        n: sellers, 2 to 100, with values U[0.5, 2].
        budget: B, in [0.1, 100].
        seed: of the values.
    """
    everyone = np.random.default_rng(seed).uniform(0.5, 2, 100)
    multipliers = np.append(0.0, np.geomspace(3e-3, 60, 70))

    @functools.lru_cache(maxsize=64)
    def without_budget(n: int, alpha: float, prior: str) -> tuple[np.ndarray, pd.DataFrame]:
        """Prices at λ = 0, and the optimum for all budgets at once: `spend`, `value`, `multiplier`."""
        belief, goal = PRIORS[prior], Objective.mixture(alpha)
        market = Market(everyone[:n], [belief] * n, 1.0)
        prices = prices_at(market, goal, multipliers, price_cap=np.inf)  # (T, n)
        curve, q = spend_curve(belief), belief.cdf(prices)
        cost = np.interp(prices, curve.prices, curve.costs)
        value = q @ market.values - goal.payment_weight * (prices * q).sum(1) - goal.cost_weight * cost.sum(1)
        path = pd.DataFrame({"spend": (prices * q).sum(1), "value": value, "multiplier": multipliers})
        return prices[0], path[path["spend"] > 0].iloc[::-1]

    def compute(budget: float, n: int, alpha: float, prior: str):
        market = Market(everyone[:n], [PRIORS[prior]] * n, budget)
        solution = solve_ex_ante(market, Objective.mixture(alpha), price_cap=np.inf)
        return market, solution, *without_budget(n, alpha, prior)

    def draw(figure, result) -> str:
        market, solution, free, path = result
        figures.draw_ex_ante(figure, market.values, solution, free, path, market.budget)
        low, high = fmt(float(solution.prices.min())), fmt(float(solution.prices.max()))
        worth = (
            f"one more unit of budget is worth <b>λ = {fmt(solution.multiplier)}</b>"
            if solution.multiplier
            else f"only {fmt(solution.expected_spend)} are spent: the budget is no brake, <b>λ = 0</b>"
        )
        odd = "" if solution.lottery is None else " One seller is offered a lottery of two prices."
        return (
            f"Budget {fmt(market.budget)}: prices from {low} to {high}, {fmt(float(solution.accept_prob.sum()))} of {market.n} "
            f"sellers hired on average, objective <b>{fmt(solution.value)}</b>; {worth}.{odd}"
        )

    return Panel(
        "ex-ante",
        figure=figures.ex_ante(),
        compute=compute,
        draw=draw,
        controls={
            "budget": _log_slider("Budget B", budget, -1, 2),
            "n": widgets.IntSlider(description="Sellers n", value=n, min=2, max=100),
            "alpha": _alpha_slider(),
            "prior": _prior_choice(),
        },
        caption="Left, one posted price for each seller, whatever the others say; right, the optimum at every budget. Look "
        "where λ falls to nothing: from there on more money changes no price.",
    )


def spending(n: int = 20, budget: float = 3.0, draws: int = 5000, seed: int = 0) -> Panel:
    """What is spent in many realisations: prices whose budget holds on average, and mechanisms whose budget always holds.

    Args:
        n: sellers, 2 to 60, with values U[0.5, 2].
        budget: B, in [0.5, 12].
        draws: profiles of costs.
        seed: of values and costs.
    """
    everyone = np.random.default_rng(seed).uniform(0.5, 2, 60)
    names = ("ex-ante prices", "posted prices", "λ-clock")

    @functools.cache
    def profiles(prior: str) -> np.ndarray:
        return Market(everyone, [PRIORS[prior]] * len(everyone), 1.0).sample(draws, np.random.default_rng([seed, 1]))

    def compute(budget: float, n: int, alpha: float, prior: str):
        goal, costs = Objective.mixture(alpha), profiles(prior)[:, :n]
        market = Market(everyone[:n], [PRIORS[prior]] * n, budget)
        solution = solve_ex_ante(market, goal)
        outcomes = (
            ex_ante_mechanism(costs, solution),
            sequential_posted_prices(costs, market, goal, solution=solution),
            _quick_clock(costs, market, goal),
        )
        spends = {name: outcome.spend / budget for name, outcome in zip(names, outcomes, strict=True)}
        shares = {
            name: float(outcome.objective(market, costs, goal).mean() / solution.value)
            for name, outcome in zip(names, outcomes, strict=True)
        }
        return budget, solution, spends, shares

    def draw(figure, result) -> str:
        budget, solution, spends, shares = result
        often = figures.draw_spending(figure, spends, shares)
        binding = "binds" if solution.multiplier else "does not bind"
        return (
            f"A budget of {fmt(budget)} {binding} (k = {fmt(solution.market_size)}). The ex-ante prices overspend in "
            f"<b>{percent(often[0])}</b> of {draws:,} realisations; the others never. Keeping the budget costs posted prices "
            f"{percent(1 - shares['posted prices'], 1)} of the objective, the λ-clock {percent(1 - shares['λ-clock'], 1)}."
        )

    return Panel(
        "spending",
        figure=figures.spending(names),
        compute=compute,
        draw=draw,
        controls={
            "budget": _slider("Budget B", budget, 0.5, 12, 0.25),
            "n": widgets.IntSlider(description="Sellers n", value=n, min=2, max=60),
            "alpha": _alpha_slider(),
            "prior": _prior_choice(),
        },
        caption="Each histogram shows the total paid, the line the budget. Look at the top one: right on average, and over the "
        "line in about half of the cases. The clock spends nearly all it may, and never more.",
    )


def _quick_clock(costs: np.ndarray, market: Market, objective: Objective) -> Outcome:
    """The λ-clock on a schedule that is quick to make: any is truthful and keeps the budget, and this one loses little."""
    multipliers = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 800), [np.inf]])
    prices = prices_at(market, objective, multipliers)
    return clock_auction(costs, prices, market.budget, jumps=np.ones(market.n, dtype=bool))


def allocation_map(budget: float = 0.6, size: int = 101) -> Panel:
    """Two sellers: who sells at every pair of costs, and for how much, beside the ex-ante prices.

    Args:
        budget: B, in [0.1, 1.2].
        size: costs per seller.
    """
    first_costs, second_costs = np.linspace(0, 1, size), np.linspace(0.003, 0.996, size)  # never equal
    profiles = np.stack(np.meshgrid(first_costs, second_costs), axis=-1).reshape(-1, 2)  # seller 1's cost changes fastest
    offered = ["λ-clock", "posted prices", "adaptive prices", "value clock", "best single seller", "pay as bid"]

    def compute(mechanism: str, budget: float, value: float, alpha: float):
        market, goal = Market([1.0, value], [stats.uniform()] * 2, budget), Objective.mixture(alpha)
        outcome = experiment.MECHANISMS[mechanism](profiles, market, goal)
        return budget, mechanism, solve_ex_ante(market, goal).prices, outcome

    def draw(figure, result, first: float, second: float) -> str:
        budget, mechanism, prices, outcome = result
        if drawn.get("last") is not outcome:  # not again for a cross that moves
            figures.draw_posted_map(figure, prices, budget)
            figures.draw_allocation_map(figure, first_costs, second_costs, outcome, mechanism)
            drawn["last"] = outcome
        for number in (1, 2):
            figures.keyed(figure)[f"here{number}"].update(x=[first], y=[second])
        column, row = (int(np.abs(costs - x).argmin()) for costs, x in ((first_costs, first), (second_costs, second)))
        fixed = np.where(np.array([first, second]) <= prices, prices, 0.0)
        paid = outcome.payments[row * size + column]
        texts = (" and ".join(fmt(float(p)) for p in pair) for pair in (fixed, paid))
        over = float(prices.prod()) if prices.sum() > budget * (1 + 1e-9) else 0.0
        return (
            f"At costs {fmt(first)} and {fmt(second)}, budget {fmt(budget)}, the ex-ante prices pay {next(texts)}, and by "
            f"<i>{mechanism}</i> it is {next(texts)}. Ex-ante prices overspend with probability <b>{percent(over)}</b>."
        )

    drawn: dict[str, Outcome] = {}
    cursor = dict(low=0, high=1, step=1 / (size - 1))
    return Panel(
        "allocation-map",
        figure=figures.allocation_map(("ex-ante prices", offered[0])),
        compute=compute,
        draw=draw,
        controls={
            "mechanism": widgets.Dropdown(options=offered, description="On the right"),
            "budget": _slider("Budget B", budget, 0.1, 1.2, 0.05),
            "value": _slider("Value of seller 2 (seller 1: 1)", 1.0, 0.5, 2, 0.05),
            "alpha": _alpha_slider(),
        },
        view={
            "first": _slider("Cost of seller 1 (cross)", 0.2, **cursor),
            "second": _slider("Cost of seller 2 (cross)", 0.4, **cursor),
        },
        caption="Ex-ante prices make rectangles, since no price depends on the other's report; where both accept they may pay "
        "too much (red edge). Look what the clock does there: it lowers both prices until the dearer one leaves.",
    )


def closeness(sweep: pd.DataFrame, sizes: pd.DataFrame, share: float = 0.6) -> Panel:
    """The key figure: how much of the upper bound each mechanism attains, against the budget and the size of the market.

    Args:
        sweep: "budget_sweep" of `experiment`.
        sizes: "market_size" of `experiment`.
        share: B / n of the cursor.
    """
    shares = sorted({float(x) for x in (sweep["budget"] / sweep["n"]).round(6)})
    counts = sorted(int(n) for n in sweep["n"].unique())
    shown = set(sweep["mechanism"]) - {"proportional share"}  # with equal values it is the value clock

    def draw(figure, _, objective: str, n: int, share: float) -> str:
        rows = sweep[(sweep["objective"] == objective) & (sweep["n"] == n)]
        figures.draw_closeness(figure, rows, sizes[sizes["objective"] == objective], share)
        here = rows[np.isclose(rows["budget"], share * n)].set_index("mechanism")["ratio"]
        words = ", ".join(f"{name} <b>{percent(here[name])}</b>" for name in ("value clock", "λ-clock", "posted prices"))
        return f"{n} sellers, a budget of {fmt(share * n)}. Share of the upper bound on {objective}: {words}."

    return Panel(
        "closeness",
        figure=figures.closeness([name for name in figures.ROLES if name in shown]),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "objective": widgets.ToggleButtons(options=["utility", "welfare"], description="Objective"),
            "n": widgets.ToggleButtons(options=counts, value=20 if 20 in counts else counts[0], description="Sellers n (left)"),
            "share": widgets.SelectionSlider(
                options=[(f"{x:g}", x) for x in shares],
                value=min(shares, key=lambda x: abs(x - share)),
                description="Budget per seller B / n",
            ),
        },
        caption="Values 1, costs uniform on [0, 1]. Look at the green line: without a prior it is among the best while the "
        "budget is the only brake, and falls to nothing once it is not. Right: the λ-clock's gap closes like 1 / k, that of "
        "posted prices like 1 / √k.",
    )


def payroll(budget: float = 20.0, value_per_run: float = 0.05) -> Panel:
    """Baseball players as sellers: whom does a club hire with its budget?

    Args:
        budget: B in million dollars, in [1, 158].
        value_per_run: of a run a year, in million dollars, in [0.02, 0.1].
    """
    names = ("value clock", "λ-clock", "posted prices", "pay as bid")
    sellers = functools.lru_cache(maxsize=64)(lambda value_per_run: experiment.payroll(1.0, value_per_run))

    def compute(budget: float, value_per_run: float):
        market, costs, players = sellers(value_per_run)
        market = replace(market, budget=budget)
        outcomes = {name: experiment.MECHANISMS[name](costs, market, UTILITY) for name in names if name != "λ-clock"}
        outcomes["λ-clock"] = _quick_clock(costs, market, UTILITY)
        scores = {name: (float(o.welfare(market, costs)), float(o.utility(market))) for name, o in outcomes.items()}
        table = pd.DataFrame.from_dict(scores, orient="index", columns=["welfare", "utility"]).loc[list(names)]
        return market, players, outcomes, table, float(first_best(costs, market.values, budget))

    def draw(figure, result, mechanism: str) -> str:
        market, players, outcomes, scores, best = result
        outcome = outcomes[mechanism]
        figures.draw_payroll(figure, players, outcome, scores, best)
        hired = outcome.allocation
        return (
            f"By <i>{mechanism}</i>, {fmt(market.budget)} million hire <b>{hired.sum()}</b> of {market.n} players: they are "
            f"paid {fmt(float(outcome.spend))}, cost {fmt(float(players['cost'][hired].sum()))} and bring "
            f"<b>{percent(scores.loc[mechanism, 'welfare'] / best)}</b> of the first-best welfare."
        )

    return Panel(
        "payroll",
        figure=figures.payroll(names),
        compute=compute,
        draw=draw,
        controls={
            "budget": _log_slider("Budget B (million $)", budget, 0, 2.2),
            "value_per_run": _slider(
                "Value of a run a year (million $)", value_per_run, 0.02, 0.1, 0.005, readout_format=".3f"
            ),
        },
        view={"mechanism": widgets.Dropdown(options=list(names), description="Winners shown")},
        caption="Salaries of 1993 as costs. Pay as bid seems best, but its bids would not stay what they are: the first panel "
        "shows why. Look at the utility bars as the budget grows.",
    )

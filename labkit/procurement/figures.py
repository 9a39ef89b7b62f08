"""Figures of lab 04: outcomes and tables in, plotly figures out.

A figure with many traces is built empty once and filled by the function `draw_…` of the same name, which finds its traces
by their `meta` key. Axes keep their ranges while a control moves, unless the market itself changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit import theme
from labkit.theme import keyed, nice

ROLES = {
    "λ-clock": "method",
    "posted prices": "baseline1",
    "value clock": "baseline2",
    "adaptive prices": "baseline3",
    "uniform price, tuned": "baseline4",
    "proportional share": "reference",
    "ex-ante prices": "reference",
    "pay as bid": "violation",
}
REGIONS = ("nobody", "seller 1", "seller 2", "both")
_REGION_COLOURS = ("#F2F2F2", "#B5DCF3", "#F7D9A0", "#7FB8DA")


def _plots(
    x: Sequence[str], y: Sequence[str], widths: Sequence[float], height: int = 400, gap: float = 0.09, top: int = 64
) -> go.Figure:
    """An empty row of plots with titled axes and margins that never move."""
    figure = make_subplots(1, len(x), column_widths=list(widths), horizontal_spacing=gap)
    figure.update_layout(template=theme.template, height=height, margin=dict(l=56, r=12, t=top, b=48))
    for column, (across, up) in enumerate(zip(x, y, strict=True), 1):
        figure.update_xaxes(title_text=across, title_standoff=6, automargin=False, row=1, col=column)
        figure.update_yaxes(title_text=up, title_standoff=4, automargin=False, row=1, col=column)
    return figure


def _vertical(figure: go.Figure, key: str, line: dict, columns: Sequence[int], **options) -> None:
    """A vertical line through each of the plots, from the bottom to the top; `_place` moves it."""
    for number, column in enumerate(columns):
        options["showlegend"] = bool(options.get("name")) and not number
        figure.add_scatter(meta=f"{key}{column}", mode="lines", line=line, hoverinfo="skip", row=1, col=column, **options)


def _place(traces: Mapping[str, go.Scatter], key: str, columns: Sequence[int], x: float, reach: tuple[float, float]) -> None:
    for column in columns:
        traces[f"{key}{column}"].update(x=[x, x], y=reach)


def lie() -> go.Figure:
    """What one seller is paid at every report, and what it earns; see `draw_lie`."""
    figure = _plots(("reported cost", "reported cost"), ("payment", "seller's utility: payment − true cost"), (0.5, 0.5))
    won = dict(fill="tozeroy", fillcolor=theme.tint("method", 0.12), line_width=0, mode="lines")
    figure.add_scatter(meta="hired", name="hired", hoverinfo="skip", **won, row=1, col=1)
    foil = dict(name="pay as bid", mode="lines", line=theme.line("violation", 3), legendgroup="foil", hoverinfo="skip")
    figure.add_scatter(meta="foil paid", **foil, row=1, col=1)
    figure.add_scatter(meta="foil", showlegend=False, **foil, row=1, col=2)
    chosen = dict(name="chosen mechanism", mode="lines", line=theme.line("method", 3), legendgroup="chosen")
    figure.add_scatter(meta="paid", hovertemplate="report %{x:.2f}: paid %{y:.2f}<extra></extra>", **chosen, row=1, col=1)
    hover = dict(hovertemplate="report %{x:.2f}: earns %{y:.2f}<extra></extra>", showlegend=False)
    figure.add_scatter(meta="utility", **chosen, **hover, row=1, col=2)
    _vertical(figure, "truth", theme.line("truth", 1.5), (1, 2), name="true cost")
    _vertical(figure, "report", dict(color=theme.INK, width=1.2), (1, 2), name="report")
    for column, mark, role in ((1, "paid here", "method"), (2, "here", "method"), (2, "foil here", "violation")):
        figure.add_scatter(
            meta=mark, mode="markers", marker=theme.marker(role, 12), showlegend=False, hoverinfo="skip", row=1, col=column
        )
    return figure


def draw_lie(
    figure: go.Figure,
    reports: np.ndarray,
    payments: np.ndarray,
    hired: np.ndarray,
    foil: np.ndarray,
    foil_hired: np.ndarray,
    cost: float,
    here: int,
) -> None:
    """Show one seller.

    Args:
        reports: costs it may report (R,), increasing.
        payments, hired: by the chosen mechanism, (R,).
        foil, foil_hired: the same by pay as bid.
        cost: the true cost.
        here: index of the report that is marked.
    """
    traces = keyed(figure)
    top, low = figure.layout.yaxis.range[1], figure.layout.yaxis2.range
    utility, foil_utility = payments - cost * hired, foil - cost * foil_hired
    traces["hired"].update(x=reports, y=top * hired, line_shape="hv")
    traces["paid"].update(x=reports, y=payments)
    traces["foil paid"].update(x=reports, y=foil)
    traces["utility"].update(x=reports, y=utility)
    traces["foil"].update(x=reports, y=foil_utility)
    for key, heights in (("paid here", payments), ("here", utility), ("foil here", foil_utility)):
        traces[key].update(x=reports[here : here + 1], y=heights[here : here + 1])
    for column, reach in ((1, (0, top)), (2, low)):
        _place(traces, "truth", (column,), cost, reach)
        _place(traces, "report", (column,), reports[here], reach)


def objectives() -> go.Figure:
    """Three purposes, each pursued and each scored: grouped bars `value`, `welfare` and `utility`; see `draw_objectives`."""
    figure = theme.figure(x="what the result is worth as", y="", height=380)
    for key, role, shape in (("value", "baseline2", ""), ("welfare", "baseline1", "/"), ("utility", "method", "x")):
        marks = dict(
            marker_color=theme.ROLE[role].colour,
            marker_pattern=dict(shape=shape, fillmode="overlay", fgcolor="white", size=7, solidity=0.15),
        )
        figure.add_bar(meta=key, name=f"bought for {key}", texttemplate="%{y:.2f}", textposition="outside", **marks)
    return figure.update_layout(bargap=0.25, bargroupgap=0.06).update_yaxes(title_text="expected amount")


def draw_objectives(figure: go.Figure, scores: pd.DataFrame) -> None:
    """Show `scores`: rows are what was bought for, columns what it is worth as, in the same order."""
    traces = keyed(figure)
    for purpose, row in scores.iterrows():
        traces[purpose].update(x=list(scores.columns), y=row.to_numpy())


def value_clock() -> go.Figure:
    """A value clock at one price per unit of value: sellers as boxes, what they would be paid; see `draw_value_clock`."""
    names = ("value, sellers by increasing c / v", "price per unit of value θ")
    figure = _plots(names, ("cost per unit of value c / v", "would be paid: θ · v(active)"), (0.62, 0.38), height=420)
    offer = dict(fill="toself", fillcolor=theme.tint("baseline1", 0.25), line_width=0, mode="lines", hoverinfo="skip")
    figure.add_scatter(meta="offer", name="θ · v(active)", **offer, row=1, col=1)
    for key, name, tint, edge in (
        ("active", "still there", theme.tint("method", 0.45), theme.ROLE["method"].colour),
        ("left", "has left", "rgba(200,200,200,0.35)", "#AAAAAA"),
    ):
        box = dict(fill="toself", fillcolor=tint, line=dict(color=edge, width=1), mode="lines", hoverinfo="skip")
        figure.add_scatter(meta=key, name=name, **box, row=1, col=1)
    rule = dict(mode="lines", line=theme.line("violation", 1.6), hoverinfo="skip")
    figure.add_scatter(meta="hyperbola", name="the budget: θ · v = B", **rule, row=1, col=1)
    figure.add_scatter(meta="theta", name="θ", mode="lines", line=theme.line("baseline1", 2.5), hoverinfo="skip", row=1, col=1)
    figure.add_scatter(meta="labels", mode="text", textfont_size=13, showlegend=False, hoverinfo="skip", row=1, col=1)
    corner = dict(mode="markers", marker=theme.marker("baseline1", 12), showlegend=False, hoverinfo="skip")
    figure.add_scatter(meta="corner", **corner, row=1, col=1)
    path = dict(mode="lines", line=theme.line("baseline1", 2.5), showlegend=False)
    figure.add_scatter(meta="spend", hovertemplate="θ = %{x:.2f}: %{y:.2f}<extra></extra>", **path, row=1, col=2)
    figure.add_scatter(meta="budget", showlegend=False, **rule, row=1, col=2)
    figure.add_scatter(meta="now", **corner, row=1, col=2)
    figure.update_yaxes(range=(0, 1.08), row=1, col=1)
    figure.update_xaxes(range=(1.02, 0), row=1, col=2)
    return figure


def draw_value_clock(
    figure: go.Figure,
    costs: np.ndarray,
    values: np.ndarray,
    budget: float,
    thetas: np.ndarray,
    active: np.ndarray,
    t: int,
    labels: Sequence[str],
) -> None:
    """Show the clock after `t` of its steps.

    Args:
        costs, values: of the sellers (n,).
        budget: B.
        thetas: prices per unit of value (T,), falling from 1 to θ*.
        active: who is still there (T, n), bool.
        t: in 0 … T − 1.
        labels: of the sellers, n short strings.
    """
    traces = keyed(figure)
    order = np.argsort(costs / values, kind="stable")
    density, width, stays = (costs / values)[order], values[order], active[t, order]
    right = np.cumsum(width)
    for key, chosen in (("active", stays), ("left", ~stays)):
        x, y = _boxes(right - width, right, np.maximum(density, 0.006), chosen)
        traces[key].update(x=x, y=y)
    reach, total = width[stays].sum(), right[-1]
    traces["offer"].update(x=[0, 0, reach, reach, 0], y=[0, thetas[t], thetas[t], 0, 0])
    traces["theta"].update(x=[0, total], y=[thetas[t]] * 2)
    traces["corner"].update(x=[reach], y=[thetas[t]])
    across = np.linspace(budget / 1.2, max(1.02 * total, budget), 120)
    traces["hyperbola"].update(x=across, y=budget / across)
    height = np.minimum(density, 1.0)
    names = [labels[i] for i in order]
    traces["labels"].update(x=right - width / 2, y=np.where(height > 0.12, height / 2, height + 0.04), text=names)
    spends = thetas * (active @ values)
    traces["spend"].update(x=thetas[: t + 1], y=spends[: t + 1])
    traces["now"].update(x=thetas[t : t + 1], y=spends[t : t + 1])
    traces["budget"].update(x=[1.02, 0], y=[budget, budget])
    figure.layout.xaxis.range = (0, 1.02 * total)
    figure.layout.yaxis2.range = (0, 1.08 * values.sum())


def _boxes(left: np.ndarray, right: np.ndarray, height: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outlines (6 m,) of the chosen boxes, apart from each other by NaN."""
    left, right, height = left[chosen], right[chosen], height[chosen]
    nothing, ground = np.full(len(left), np.nan), np.zeros(len(left))
    x = np.stack([left, left, right, right, left, nothing], axis=1)
    y = np.stack([ground, height, height, ground, ground, nothing], axis=1)
    return x.ravel(), y.ravel()


def worst_case() -> go.Figure:
    """A market that is bad for the clock and for the single seller alike; see `draw_worst_case`."""
    figure = _plots(("", "value ε of the small seller"), ("welfare", "first-best / welfare"), (0.42, 0.58), gap=0.11)
    figure.add_bar(meta="welfare", texttemplate="%{y:.3f}", textposition="outside", showlegend=False, row=1, col=1)
    lines = (("clock", "value clock alone", "baseline2"), ("single", "best single alone", "baseline4"))
    for key, name, role in (*lines, ("lottery", "two thirds clock, one third single", "method")):
        figure.add_scatter(meta=key, name=name, mode="lines", line=theme.line(role, 2.5), row=1, col=2)
    figure.add_scatter(meta="bound", name="bound 3", mode="lines", line=theme.line("truth", 1.5), row=1, col=2)
    figure.add_scatter(meta="here", mode="markers", marker=theme.marker("method", 12), showlegend=False, row=1, col=2)
    figure.update_xaxes(type="log", dtick=1, tickformat="~r", row=1, col=2)
    figure.update_yaxes(range=(0.9, 6), row=1, col=2)
    return figure


def draw_worst_case(figure: go.Figure, epsilons: np.ndarray, welfare: pd.DataFrame, here: int) -> None:
    """Show the family.

    Args:
        epsilons: (E,), increasing.
        welfare: columns `first-best`, `clock`, `single` and `lottery`, (E, 4).
        here: index of the marked ε.
    """
    traces = keyed(figure)
    row = welfare.iloc[here]
    colours = ["truth", "baseline2", "baseline4", "method"]
    names = ["first-best", "clock", "single", "lottery<br>of both"]
    traces["welfare"].update(x=names, y=row.to_numpy(), marker_color=[theme.ROLE[role].colour for role in colours])
    for key in ("clock", "single", "lottery"):
        traces[key].update(x=epsilons, y=welfare["first-best"] / welfare[key])
    traces["bound"].update(x=epsilons[[0, -1]], y=[3, 3])
    traces["here"].update(x=epsilons[here : here + 1], y=[row["first-best"] / row["lottery"]])
    figure.layout.xaxis2.range = tuple(np.log10(epsilons[[0, -1]]))


def impossibility() -> go.Figure:
    """The best lottery over prices for one seller, what it guarantees, how little that is; see `draw_impossibility`."""
    x = ("price p", "true cost c", "v / (v − c_max)")
    figure = _plots(x, ("density (dot: probability)", "share of v − c obtained", "guaranteed share ρ"), (0.34, 0.33, 0.33))
    fill = dict(fill="tozeroy", fillcolor=theme.tint("method", 0.15), line=theme.line("method"), mode="lines")
    figure.add_scatter(meta="density", name="lottery over prices", **fill, row=1, col=1)
    atom = dict(mode="lines+markers", line=theme.line("method", 3), marker=theme.marker("method", 12), showlegend=False)
    figure.add_scatter(meta="atom", **atom, row=1, col=1)
    same = dict(mode="lines", line=theme.line("method", 3), showlegend=False)
    figure.add_scatter(meta="share", **same, row=1, col=2)
    for key, name, role in (("safe", "price c_max, always bought", "baseline1"), ("bold", "price v / 2", "baseline2")):
        figure.add_scatter(meta=key, name=name, mode="lines", line=theme.line(role), row=1, col=2)
    figure.add_scatter(meta="curve", name="1 / (1 + ln H)", mode="lines", line=theme.line("truth"), row=1, col=3)
    dots = dict(mode="markers", marker=theme.marker("reference", 9))
    figure.add_scatter(meta="programme", name="linear programme", **dots, row=1, col=3)
    figure.add_scatter(meta="here", mode="markers", marker=theme.marker("method", 13), showlegend=False, row=1, col=3)
    figure.update_xaxes(range=(-0.02, 1.02), row=1, col=1).update_xaxes(range=(-0.02, 1.02), row=1, col=2)
    figure.update_xaxes(type="log", dtick=1, tickformat="~s", range=(0, 5.1), row=1, col=3)
    figure.update_yaxes(range=(0, 1.05)).update_yaxes(range=(0, 3), row=1, col=1)
    return figure


def draw_impossibility(figure: go.Figure, lottery, max_cost: float) -> None:
    """Show the `PriceLottery` of a seller of value 1 whose cost is at most `max_cost`."""
    traces = keyed(figure)
    prices = np.linspace(0, max_cost, 200)[:-1]
    traces["density"].update(x=prices, y=lottery.pdf(prices))
    traces["atom"].update(x=[max_cost, max_cost], y=[0, lottery.ratio], marker_opacity=[0, 1])
    costs = np.linspace(0, max_cost, 200)
    traces["share"].update(x=costs, y=np.full(len(costs), lottery.ratio))
    traces["safe"].update(x=costs, y=(1 - max_cost) / (1 - costs))
    traces["bold"].update(x=costs, y=np.where(costs <= 0.5, 0.5 / (1 - costs), 0.0))
    traces["here"].update(x=[1 / (1 - max_cost)], y=[lottery.ratio])


def virtual_cost() -> go.Figure:
    """A prior's virtual cost, its spend curve, and gain against spend; see `draw_prior` and `draw_multiplier`."""
    y = ("cost, virtual cost φ (F in grey)", "expected spend R", "expected gain g")
    figure = _plots(("cost c", "probability of buying q", "expected spend R"), y, (0.36, 0.3, 0.34), height=420, gap=0.08)
    grey = dict(fill="tozeroy", fillcolor=theme.tint("reference", 0.12), line_width=0, mode="lines", hoverinfo="skip")
    figure.add_scatter(meta="cdf", name="F(c)", **grey, row=1, col=1)
    figure.add_scatter(meta="cost", name="cost", mode="lines", line=theme.line("reference", 1.3), row=1, col=1)
    figure.add_scatter(meta="phi", name="φ", mode="lines", line=theme.line("baseline1"), row=1, col=1)
    figure.add_scatter(meta="ironed", name="φ ironed", mode="lines", line=theme.line("method", 3), row=1, col=1)
    limit = dict(mode="lines", line=theme.line("violation", 1.6), hoverinfo="skip")
    figure.add_scatter(meta="limit", name="worth paying at λ", **limit, row=1, col=1)
    for column, (key, hull) in enumerate((("spend", "spend hull"), ("gain", "gain hull")), 2):
        both = dict(mode="lines", hoverinfo="skip", showlegend=False, row=1, col=column)
        figure.add_scatter(meta=key, line=theme.line("baseline1"), **both)
        figure.add_scatter(meta=hull, line=theme.line("method", 3), **both)
    figure.add_scatter(
        meta="tangent", name="slope λ", mode="lines", line=theme.line("truth", 1.6), hoverinfo="skip", row=1, col=3
    )
    for column in (1, 2, 3):
        mark = dict(mode="markers", marker=theme.marker("violation", 12), showlegend=False, hoverinfo="skip")
        figure.add_scatter(meta=f"here{column}", **mark, row=1, col=column)
    figure.update_xaxes(range=(0, 1.25), row=1, col=1).update_xaxes(range=(0, 1.02), row=1, col=2)
    figure.update_yaxes(range=(0, 3), row=1, col=1)
    return figure


def draw_prior(figure: go.Figure, curves: Mapping[str, np.ndarray]) -> None:
    """Show a prior.

    Args:
        curves: costs `c` (G,) with `cdf`, `phi` and `ironed`; probabilities `q` (m,) with `spend` and `gain`; `q hull` and
            `spend hull`; `R hull` and `gain hull`.
    """
    traces = keyed(figure)
    c = curves["c"]
    for key in ("cdf", "phi", "ironed"):
        traces[key].update(x=c, y=curves[key])
    traces["cost"].update(x=[0, 3], y=[0, 3])
    traces["spend"].update(x=curves["q"], y=curves["spend"])
    traces["spend hull"].update(x=curves["q hull"], y=curves["spend hull"])
    traces["gain"].update(x=curves["spend"], y=curves["gain"])
    traces["gain hull"].update(x=curves["R hull"], y=curves["gain hull"])
    figure.layout.yaxis2.range = figure.layout.xaxis3.range = (0, 1.04 * curves["spend"].max())
    figure.layout.yaxis3.range = (min(0.0, 1.1 * curves["gain"].min()), 1.15 * curves["gain"].max())


def draw_multiplier(
    figure: go.Figure, multiplier: float, limit: float, price: float, virtual: float, q: float, spend: float, gain: float
) -> None:
    """Mark the price at a multiplier λ.

    Args:
        multiplier: λ.
        limit: highest virtual cost worth paying.
        price: p(λ), with its ironed virtual cost `virtual`, probability `q` of buying, expected `spend` and `gain`.
    """
    traces = keyed(figure)
    traces["limit"].update(x=[0, 3], y=[limit, limit])
    ends = np.array(figure.layout.xaxis3.range)
    traces["tangent"].update(x=ends, y=gain + multiplier * (ends - spend))
    for column, point in enumerate(((price, virtual), (q, spend), (spend, gain)), 1):
        traces[f"here{column}"].update(x=[point[0]], y=[point[1]])


def ex_ante() -> go.Figure:
    """Posted prices against values, and value and shadow price against the budget; see `draw_ex_ante`."""
    figure = make_subplots(
        2,
        2,
        specs=[[{"rowspan": 2}, {}], [None, {}]],
        column_widths=[0.46, 0.54],
        horizontal_spacing=0.11,
        vertical_spacing=0.08,
    )
    figure.update_layout(template=theme.template, height=440, margin=dict(l=56, r=12, t=48, b=48))
    figure.update_xaxes(title_standoff=6, automargin=False).update_yaxes(title_standoff=4, automargin=False)
    free = dict(mode="markers", marker=dict(theme.marker("reference", 8), opacity=0.7))
    figure.add_scatter(meta="free", name="price without a budget", hoverinfo="skip", **free, row=1, col=1)
    hover = dict(hovertemplate="value %{x:.2f}: price %{y:.3f}, accepted with %{customdata:.0%}<extra></extra>")
    figure.add_scatter(
        meta="prices", name="posted price", mode="markers", marker=theme.marker("method", 9), **hover, row=1, col=1
    )
    for row, key in ((1, "value"), (2, "multiplier")):
        figure.add_scatter(meta=key, mode="lines", line=theme.line("method"), showlegend=False, row=row, col=2)
        mark = dict(mode="markers", marker=theme.marker("method", 12), showlegend=False, hoverinfo="skip")
        figure.add_scatter(meta=f"{key} here", **mark, row=row, col=2)
    figure.update_xaxes(title_text="value v of the seller", range=(0.45, 2.05), row=1, col=1)
    figure.update_yaxes(title_text="price p", range=(0, 1.25), row=1, col=1)
    log = dict(type="log", range=(-1, 2.04), dtick=1)
    figure.update_xaxes(**log, showticklabels=False, row=1, col=2)
    figure.update_xaxes(**log, title_text="budget B", row=2, col=2)
    figure.update_yaxes(title_text="expected objective", row=1, col=2)
    figure.update_yaxes(title_text="shadow price λ", type="log", range=(-1.5, 1.5), dtick=1, row=2, col=2)
    return figure


def draw_ex_ante(figure: go.Figure, values: np.ndarray, solution, free: np.ndarray, path: pd.DataFrame, budget: float) -> None:
    """Show an `ExAnteSolution`.

    Args:
        values: of the sellers (n,).
        solution: at the budget.
        free: prices (n,) at λ = 0.
        path: `spend`, `value` and `multiplier` of the optimum along all budgets, by increasing spend.
        budget: B.
    """
    traces = keyed(figure)
    traces["free"].update(x=values, y=free)
    traces["prices"].update(x=values, y=solution.prices, customdata=solution.accept_prob)
    ends = [*path["spend"], 10.0 ** figure.layout.xaxis2.range[1]]
    traces["value"].update(x=ends, y=[*path["value"], path["value"].iloc[-1]])
    traces["multiplier"].update(x=path["spend"], y=np.maximum(path["multiplier"], 1e-9))
    traces["value here"].update(x=[budget], y=[solution.value])
    floor = 10.0 ** figure.layout.yaxis3.range[0]
    traces["multiplier here"].update(x=[budget], y=[max(solution.multiplier, floor)])
    figure.layout.yaxis2.range = (0, nice(1.05 * path["value"].max()))


def spending(names: Sequence[str]) -> go.Figure:
    """Total payments of mechanisms in many realisations, one row each, and what they obtain; see `draw_spending`."""
    rows = len(names)
    figure = make_subplots(
        rows, 2, specs=[[{}, {"rowspan": rows}], *[[{}, None]] * (rows - 1)], column_widths=[0.66, 0.34],
        horizontal_spacing=0.1, vertical_spacing=0.07, shared_xaxes=True,
    )  # fmt: skip
    figure.update_layout(template=theme.template, height=440, margin=dict(l=56, r=12, t=48, b=48), bargap=0, showlegend=False)
    figure.update_xaxes(title_standoff=6, automargin=False).update_yaxes(title_standoff=4, automargin=False)
    for row, name in enumerate(names, 1):
        colour = theme.ROLE[ROLES[name]].colour
        for key, fill in (("within", colour), ("over", theme.ROLE["violation"].colour)):
            bar = dict(marker_color=fill, hovertemplate="spend %{x:.2f} B: %{y:.1%}<extra></extra>")
            figure.add_bar(meta=f"{name}/{key}", **bar, row=row, col=1)
        figure.add_vline(x=1, line=dict(color=theme.INK, width=1.5), row=row, col=1)
        figure.update_yaxes(showticklabels=False, ticks="", rangemode="tozero", showgrid=False, row=row, col=1)
        place = dict(
            xref="paper", yref=f"y{'' if row == 1 else row + 1} domain", x=0.006, y=0.96, showarrow=False, align="left"
        )
        figure.add_annotation(text=name, xanchor="left", yanchor="top", font_color=colour, **place)
    figure.update_xaxes(range=(0, 2), row=rows, col=1)
    figure.update_xaxes(title_text="total paid, in budgets", row=rows, col=1)
    colours = [theme.ROLE[ROLES[name]].colour for name in names]
    figure.add_bar(
        meta="objective",
        marker_color=colours,
        width=0.62,
        texttemplate="%{y:.0%}",
        textposition="outside",
        hoverinfo="skip",
        row=1,
        col=2,
    )
    figure.update_yaxes(title_text="mean objective / upper bound", range=(0, 1.12), tickformat=".0%", row=1, col=2)
    return figure


def draw_spending(figure: go.Figure, spends: Mapping[str, np.ndarray], shares: Mapping[str, float]) -> list[float]:
    """Show realisations.

    Args:
        spends: total payments in budgets (S,), by name of the mechanism.
        shares: mean objective as a part of the upper bound, by name.

    Returns:
        How often each spends more than its budget.
    """
    traces = keyed(figure)
    edges = np.linspace(0, 2, 41)
    middle = (edges[1:] + edges[:-1]) / 2
    often = []
    notes = figure.layout.annotations
    for (name, spend), note in zip(spends.items(), notes, strict=True):
        # a spend of just B belongs to the last bin below it
        share = np.histogram(np.minimum(spend, 2) - 1e-9, edges)[0] / len(spend)
        over = middle > 1
        traces[f"{name}/within"].update(x=middle[~over], y=share[~over])
        traces[f"{name}/over"].update(x=middle[over], y=share[over])
        often.append(float((spend > 1 + 1e-9).mean()))
        note.text = f"<b>{name}</b><br>over budget: {theme.percent(often[-1])}"
    traces["objective"].update(x=[name.replace(" ", "<br>") for name in shares], y=list(shares.values()))
    return often


def allocation_map(names: Sequence[str]) -> go.Figure:
    """Who sells at every pair of costs, by posted prices on the left and by a mechanism on the right.

    Filled by `draw_posted_map` and `draw_allocation_map`.
    """
    figure = _plots(["cost of seller 1"] * 2, ("cost of seller 2", ""), (0.5, 0.5), height=theme.MAP_HEIGHT, gap=0.08, top=84)
    steps = [(k / 4 + end, colour) for k, colour in enumerate(_REGION_COLOURS) for end in (0, 0.25)]
    for column, name in enumerate(names, 1):
        shading = dict(zmin=-0.5, zmax=3.5, colorscale=steps, showscale=False, row=1, col=column)
        hover = dict(hovertemplate="costs %{x:.2f} and %{y:.2f}: paid %{text}<extra></extra>")
        figure.add_heatmap(meta=f"map{column}", **shading, **hover)
        cross = dict(symbol="cross-thin", size=16, line=dict(color=theme.INK, width=2.5))
        place = dict(showlegend=False, hoverinfo="skip", row=1, col=column)
        figure.add_scatter(meta=f"here{column}", mode="markers", marker=cross, **place)
        axis = "x" if column == 1 else "x2"
        title = dict(x=0.5, y=1.0, xref=f"{axis} domain", yref="paper", yanchor="bottom", showarrow=False)
        figure.add_annotation(text=f"<b>{name}</b>", font_size=14, **title)
        figure.update_yaxes(scaleanchor=axis, constrain="domain", range=(0, 1), row=1, col=column)
    for name, colour in zip(REGIONS, _REGION_COLOURS, strict=True):
        square = dict(color=colour, size=13, symbol="square", line=dict(color="#888888", width=1))
        figure.add_scatter(x=[None], y=[None], name=f"buys from {name}", mode="markers", marker=square, row=1, col=1)
    edge = dict(mode="lines", line=dict(color=theme.ROLE["violation"].colour, width=3), hoverinfo="skip")
    figure.add_scatter(meta="over", name="over budget", **edge, row=1, col=1)
    figure.update_xaxes(range=(0, 1), constrain="domain")
    return figure.update_layout(legend=dict(y=1.07))


def draw_posted_map(figure: go.Figure, prices: np.ndarray, budget: float) -> None:
    """Show what two posted prices (2,) do, and where they pay more than the budget."""
    traces = keyed(figure)
    first, second = (float(p) for p in prices)
    paid = [[f"{p:.3g} and {q:.3g}" for p in (first, 0)] for q in (second, 0)]
    edges = ([0.0, p, max(1.0, p) + 1e-6] for p in (first, second))
    traces["map1"].update(**dict(zip(("x", "y"), edges, strict=True)), z=[[3, 2], [1, 0]], text=paid)
    over = first + second > budget * (1 + 1e-9)
    traces["over"].update(x=[0, first, first] if over else [None], y=[second, second, 0] if over else [None])


def draw_allocation_map(figure: go.Figure, first: np.ndarray, second: np.ndarray, outcome, name: str) -> None:
    """Show the `Outcome` of the mechanism called `name`.

    Args:
        first, second: costs (G,) of seller 1 and of seller 2; the outcome has G² profiles in which the first changes fastest.
    """
    trace, shape = keyed(figure)["map2"], (len(second), len(first))
    region = outcome.allocation @ np.array([1, 2])
    amounts, which = np.unique(outcome.payments.round(4), return_inverse=True)
    words = np.array([f"{p:.3g}" for p in amounts], dtype=object)[which.reshape(-1, 2)]
    paid = words[:, 0] + " and " + words[:, 1]
    trace.update(x=first, y=second, z=region.reshape(shape), text=paid.reshape(shape))
    figure.layout.annotations[1].text = f"<b>{name}</b>"


def closeness(mechanisms: Sequence[str]) -> go.Figure:
    """Share of the upper bound against the budget, and the gap to it against the market size; see `draw_closeness`."""
    x = ("budget per seller B / n", "market size k = B / highest price")
    figure = _plots(x, ("share of the upper bound", "gap: 1 − share"), (0.54, 0.46), height=440, gap=0.1, top=84)
    for name in mechanisms:
        role = ROLES[name]
        style = dict(mode="lines+markers", line=theme.line(role), marker=theme.marker(role, 7), legendgroup=name)
        hover = "B / n = %{x:.3g}: %{y:.1%}<extra>" + name + "</extra>"
        figure.add_scatter(meta=f"{name}/budget", name=name, hovertemplate=hover, **style, row=1, col=1)
        hover = "k = %{x:.3g}: gap %{y:.2%}<extra>" + name + "</extra>"
        figure.add_scatter(meta=f"{name}/size", showlegend=False, hovertemplate=hover, **style, row=1, col=2)
    guides = (
        ("proven", "proven for posted prices", "truth"),
        ("root", "1 / √(2πk)", "baseline1"),
        ("fast", "0.2 / k", "method"),
    )
    for key, name, role in guides:
        line = dict(color=theme.ROLE[role].colour, width=1.2, dash="dot" if key != "proven" else "dash")
        figure.add_scatter(meta=key, name=name, mode="lines", line=line, hoverinfo="skip", row=1, col=2)
    _vertical(figure, "cursor", dict(color=theme.INK, width=1.2), (1,))
    figure.update_xaxes(range=(0, 1.03), row=1, col=1).update_xaxes(type="log", range=(0.4, 2.4), dtick=1, row=1, col=2)
    figure.update_yaxes(range=(-0.02, 1.06), tickformat=".0%", row=1, col=1)
    ticks = dict(tickvals=[0.001, 0.01, 0.1, 1], ticktext=["0.1%", "1%", "10%", "100%"])
    figure.update_yaxes(type="log", range=(-3.3, 0.05), **ticks, row=1, col=2)
    return figure


def draw_closeness(figure: go.Figure, sweep: pd.DataFrame, sizes: pd.DataFrame, share: float) -> None:
    """Show two tables of `experiment`.

    Args:
        sweep: rows of "budget_sweep" of one objective and number of sellers.
        sizes: rows of "market_size" of the same objective.
        share: B / n of the cursor.
    """
    traces = keyed(figure)
    for key, trace in traces.items():
        name, _, which = key.partition("/")
        if which == "budget":
            rows = sweep[sweep["mechanism"] == name].sort_values("budget")
            trace.update(x=rows["budget"] / rows["n"], y=rows["ratio"])
        elif which == "size":
            rows = sizes[sizes["mechanism"] == name].sort_values("k")
            gap = 1 - rows["exact"].fillna(rows["ratio"])
            clear = rows["exact"].notna() | (gap > 3 * rows["ratio_stderr"])
            trace.update(x=rows["k"], y=gap.where(clear))
    posted = sizes[sizes["mechanism"] == "posted prices"].sort_values("k")
    k = posted["k"].to_numpy()
    traces["proven"].update(x=k, y=1 - posted["bound"])
    traces["root"].update(x=k, y=1 / np.sqrt(2 * np.pi * k))
    traces["fast"].update(x=k, y=0.2 / k)
    _place(traces, "cursor", (1,), share, figure.layout.yaxis.range)


def small_markets(table: pd.DataFrame, mechanisms: Sequence[str]) -> go.Figure:
    """Mechanisms beside the optimal truthful one in small markets, a dot for each market.

    Args:
        table: "small_markets" of `experiment`.
        mechanisms: which, from top to bottom.
    """
    figure = theme.figure(x="expected objective / that of the optimal truthful mechanism", y="", height=380)
    for objective, role, shift in (("utility", "method", 0.16), ("welfare", "baseline1", -0.16)):
        rows = table[table["objective"] == objective].set_index("mechanism")
        shown = {name: rows.loc[name, "ratio"].to_numpy() for name in mechanisms}
        height = {name: len(mechanisms) - 1 - place + shift for place, name in enumerate(mechanisms)}
        dots = dict(mode="markers", marker=dict(theme.marker(role, 8), opacity=0.45), hoverinfo="x", legendgroup=objective)
        x = np.concatenate(list(shown.values()))
        y = np.concatenate([np.full(len(ratios), height[name]) for name, ratios in shown.items()])
        figure.add_scatter(x=x, y=y, name=objective, **dots)
        bar = dict(symbol="line-ns", size=18, line=dict(color=theme.ROLE[role].colour, width=4))
        means = [ratios.mean() for ratios in shown.values()]
        figure.add_scatter(x=means, y=list(height.values()), name="mean", mode="markers", marker=bar, legendgroup=objective)
    figure.add_vline(x=1, line=theme.line("truth", 1.2))
    figure.update_yaxes(tickvals=list(range(len(mechanisms))), ticktext=list(mechanisms)[::-1], showgrid=False)
    return figure.update_layout(margin_l=180)


def payroll(mechanisms: Sequence[str]) -> go.Figure:
    """Players by value and salary, who is hired, and what each mechanism obtains; see `draw_payroll`."""
    x = ("value: runs a year × value of a run (million $)", "million $")
    figure = _plots(x, ("salary (million $)", ""), (0.58, 0.42), height=440, gap=0.19)
    for key, name, mark in (
        ("out", "not hired", dict(color="rgba(160,160,160,0.55)", size=6, symbol="circle-open")),
        ("in", "hired", dict(theme.marker("method", 8), opacity=0.8)),
    ):
        hover = "%{customdata[0]}, %{customdata[1]} years<br>value %{x:.2f}, salary %{y:.2f}, paid %{customdata[2]:.2f}"
        figure.add_scatter(
            meta=key, name=name, mode="markers", marker=mark, hovertemplate=f"{hover}<extra></extra>", row=1, col=1
        )
    price = dict(mode="lines", line=theme.line("truth", 1.2), hoverinfo="skip")
    figure.add_scatter(meta="worth", name="salary = value", **price, row=1, col=1)
    for key, role, shape in (("welfare", "baseline1", "/"), ("utility", "method", "")):
        marks = dict(
            marker_color=theme.ROLE[role].colour,
            marker_pattern=dict(shape=shape, fillmode="overlay", fgcolor="white", size=7, solidity=0.15),
        )
        text = dict(texttemplate="%{x:.0f}", textposition="outside", orientation="h", y=list(mechanisms))
        figure.add_bar(meta=key, name=key, **marks, **text, row=1, col=2)
    best = dict(mode="lines", line=theme.line("truth", 2), hoverinfo="skip", name="first-best welfare", showlegend=False)
    figure.add_scatter(meta="best", **best, row=1, col=2)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=1, col=2)
    log = dict(type="log", tickvals=[0.03, 0.1, 0.3, 1, 3])
    figure.update_xaxes(**log, range=(-1.75, 1.05), row=1, col=1)
    figure.update_yaxes(**log, range=(-1.1, 0.95), row=1, col=1)
    return figure.update_layout(bargap=0.3, bargroupgap=0.05)


def draw_payroll(figure: go.Figure, players: pd.DataFrame, outcome, scores: pd.DataFrame, best: float) -> None:
    """Show one hiring.

    Args:
        players: `position`, `years`, `value` and `cost`, one row per seller.
        outcome: the `Outcome` whose winners are marked.
        scores: `welfare` and `utility` by mechanism.
        best: first-best welfare.
    """
    traces = keyed(figure)
    details = np.stack([players["position"], players["years"], outcome.payments], axis=1)
    for key, chosen in (("in", outcome.allocation), ("out", ~outcome.allocation)):
        traces[key].update(x=players["value"][chosen], y=players["cost"][chosen], customdata=details[chosen])
    traces["worth"].update(x=[0.01, 100], y=[0.01, 100])
    for key in ("welfare", "utility"):
        traces[key].x = scores.loc[list(traces[key].y), key]
    traces["best"].update(x=[best, best], y=[scores.index[0], scores.index[-1]])
    figure.layout.xaxis2.range = (min(0.0, 1.15 * float(scores.min().min())), 1.2 * best)

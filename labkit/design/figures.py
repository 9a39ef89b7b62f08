"""Figures of lab 03: trees, beliefs and tables in, plotly figures out.

A figure that a control changes is built empty once and filled by the function `draw_…` of the same name, which finds its
traces by their `meta` key. Axes keep their ranges while a control moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from labkit import theme
from labkit.theme import at, axis_of, keyed, nice, place_axes

NAMES = {
    "tree-1": "tree, H = 1",
    "tree-2": "tree, H = 2",
    "tree-3": "tree, H = 3",
    "tree-4": "tree, H = 4",
    "tree-1-m4": "tree, H = 1, m = 4",
    "tree-1-m8": "tree, H = 1, m = 8",
    "tree-2-m1": "tree, H = 2, m = 1",
    "tree-2-m3": "tree, H = 2, m = 3",
    "tree-2-discounted": "tree, H = 2, γ = 0.6",
    "tree-2-unpaced": "tree, H = 2, no pacing",
    "tree-1-policy": "tree, H = 1, one policy start",
    "tree-1-random": "tree, H = 1, ten random starts",
    "tree-1-pce": "tree, H = 1, sampled gains (PCE)",
    "tree-1-joint": "tree, H = 1, network, joint head",
    "tree-1-product": "tree, H = 1, network, product head",
    "copex": "paper's settings",
    "greedy": "greedy, exact belief",
    "greedy_vi": "greedy, variational belief",
    "greedy-projected": "greedy, projected",
    "dad": "DAD, projected",
    "dad-constrained": "DAD, trained with δ = 0.1",
    "step_dad": "Step-DAD, projected",
    "static": "static",
    "random": "random",
}
ROLES = {
    **{name: "method" for name, title in NAMES.items() if title.startswith(("tree", "paper"))},
    "greedy": "baseline1",
    "static": "baseline2",
    **dict.fromkeys(("dad", "dad-constrained", "step_dad", "greedy-projected"), "baseline3"),
    "greedy_vi": "baseline4",
    "random": "reference",
}
METRICS = {
    "kl": "KL(posterior || prior), nats",
    "information": "log p(y | θ) − log p(y), nats",
    "spce": "sPCE, nats",
}
SHORT = NAMES | {
    "tree-1": "H = 1",
    "tree-2": "H = 2",
    "greedy": "greedy",
    "greedy_vi": "greedy, variational",
    "dad": "DAD",
    "dad-constrained": "DAD, δ in training",
    "step_dad": "Step-DAD",
}
PUBLISHED_LINES = ("COPEx, H = 1", "ALINE, projected", "VPCE")  # the others lie too near to these to be told apart

SHADES = [(0.0, "rgba(255,255,255,0)"), (0.15, "#EAF2F8"), (1.0, "#8FC1E3")]  # light enough for marks on top
GRID = 48  # points of a map in each direction
FASTEST = 0.05  # ms: where a policy that does not plan is drawn on a logarithmic axis
_EDGES = 4  # deepest level of a tree that is drawn
_LABELLED = 15  # nodes of a tree whose outcomes are written beside them


def credible_mass(log_density: np.ndarray) -> np.ndarray:
    """For each place of a grid, the mass of the places at least as dense: its 0.5 contour encloses half of the probability.

    Args:
        log_density: any shape, up to a constant.
    """
    density = np.exp(log_density - log_density.max()).ravel()
    order = np.argsort(-density)
    mass = np.empty_like(density)
    mass[order] = density[order].cumsum() / density.sum()
    return mass.reshape(log_density.shape)


def tree_layout(parents: Sequence[int], outcomes: Sequence[float]) -> np.ndarray:
    """Heights of a tree's nodes in (0, 1): children share their parent's room, in the order of their outcomes.

    Args:
        parents: index of the parent (n,), −1 for the root, parents before children.
        outcomes: (n,).
    """
    parents, outcomes = np.asarray(parents), np.asarray(outcomes)
    room = {0: (0.0, 1.0)}
    for node in range(len(parents)):
        low, high = room[node]
        children = np.flatnonzero(parents == node)
        for place, child in enumerate(children[np.argsort(outcomes[children], kind="stable")]):
            size = (high - low) / len(children)
            room[int(child)] = low + place * size, low + (place + 1) * size
    return np.array([sum(room[node]) / 2 for node in range(len(parents))])


def reach_outline(centre: np.ndarray, low: np.ndarray, high: np.ndarray, radius: float, points: int = 97) -> np.ndarray:
    """Closed outline (points, 2) of the designs in a box and within a distance of its point `centre`.

    Args:
        centre, low, high: (2,).
        radius: may be infinite if the box is not.
    """
    angle = np.linspace(0, 2 * np.pi, points)
    direction = np.stack([np.cos(angle), np.sin(angle)], 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        walls = np.where(direction > 0, (high - centre) / direction, (low - centre) / direction)
    walls = np.where(np.abs(direction) < 1e-12, np.inf, np.maximum(walls, 0)).min(1)
    return centre + np.minimum(walls, radius)[:, None] * direction


def _headline(figure: go.Figure, number: int, text: str) -> None:
    """A small title above one of the axes."""
    (x0, x1), (_, y1) = (axis_of(figure, letter, number).domain for letter in "xy")
    figure.add_annotation(
        x=(x0 + x1) / 2, y=y1, xref="paper", yref="paper", xanchor="center", yanchor="bottom", showarrow=False,
        text=f"<b>{text}</b>", font=dict(color=theme.INK, size=13),
    )  # fmt: skip


def _square(figure: go.Figure, number: int, ranges: tuple = ((0, 1), (0, 1))) -> None:
    """Equal scales on the axes of a map."""
    axis_of(figure, "x", number).update(range=ranges[0], constrain="domain")
    axis_of(figure, "y", number).update(range=ranges[1], constrain="domain", scaleanchor=at(number)["xaxis"])


def _regions(figure: go.Figure, meta: str, role: str, number: int, name: str | None = None, dash: str = "solid") -> None:
    """Contours around 50 and 90 % of a posterior, filled by `z=credible_mass(...)`."""
    line = dict(color=theme.ROLE[role].colour, width=1.6, dash=dash)
    levels = dict(coloring="none", start=0.5, end=0.9, size=0.4)
    figure.add_contour(
        meta=meta, contours=levels, line=line, showscale=False, hoverinfo="skip", name=name, showlegend=name is not None,
        **at(number),
    )  # fmt: skip


def _source_mark(size: float = 11) -> dict:
    return dict(symbol="x-thin", size=size, line=dict(color="black", width=2.5))


def explorer() -> go.Figure:
    """A scenario tree and what belongs to one of its nodes: gains along the path, the way on the map, the posterior.

    Empty until `draw_explorer`.
    """
    figure = place_axes([(0, 0.52, 0.43, 1), (0, 0.52, 0, 0.27), (0.68, 1, 0.55, 1), (0.68, 1, 0, 0.41)], 640, t=84, r=8)
    for level in range(1, _EDGES + 1):
        figure.add_scatter(
            meta=f"edges{level}", mode="lines", line_color="#C9D3DA", hoverinfo="skip", showlegend=False, **at(1)
        )
    chosen = dict(color=theme.ROLE["method"].colour, width=3)
    figure.add_scatter(meta="branch", mode="lines", line=chosen, hoverinfo="skip", showlegend=False, **at(1))
    ring = dict(symbol="circle-open", size=26, color=theme.INK, line_width=2)
    figure.add_scatter(meta="selected", mode="markers", marker=ring, hoverinfo="skip", showlegend=False, **at(1))
    bar = dict(x=0.535, xanchor="left", y=0.715, len=0.6, thickness=10, title=dict(text="EIG<br>(nats)", font_size=11))
    hover = "node %{customdata[0]}: EIG %{marker.color:.2f} nats%{customdata[1]}<extra></extra>"
    figure.add_scatter(
        meta="nodes", mode="markers+text", textposition="top center", textfont=dict(size=10, color="#555555"),
        marker=dict(opacity=1, colorscale=theme.SEQUENTIAL, cmin=0, colorbar=bar, line=dict(color="white", width=1)),
        hovertemplate=hover, showlegend=False, **at(1),
    )  # fmt: skip
    for meta, colour, name in (("path", 1.0, "on the way to the node"), ("below", 0.35, "expected below it")):
        figure.add_bar(
            meta=meta, name=name, marker_color=theme.tint("method", colour), width=0.4,
            hovertemplate="level %{x}: %{y:.2f} nats<extra></extra>", **at(2),
        )  # fmt: skip
    figure.add_scatter(
        meta="level", name="mean of the level", mode="markers", marker=theme.marker("reference", 9),
        hovertemplate="mean of level %{x}: %{y:.2f} nats<extra></extra>", **at(2),
    )  # fmt: skip

    figure.add_heatmap(meta="belief", colorscale=SHADES, zmin=0, zmax=1, showscale=False, hoverinfo="skip", **at(3))
    figure.add_scatter(
        meta="budget", name="with all the travel left", mode="lines", line=dict(color="#888888", width=1.2, dash="dot"),
        hoverinfo="skip", **at(3),
    )  # fmt: skip
    figure.add_scatter(
        meta="reach", name="reachable from there", mode="lines", line=dict(color=theme.ROLE["method"].colour, width=1.2),
        fill="toself", fillcolor=theme.tint("method", 0.08), hoverinfo="skip", **at(3),
    )  # fmt: skip
    figure.add_scatter(
        meta="done", name="measured", mode="lines+markers", line=dict(color="#444444", width=1.5),
        marker=dict(color="#444444", size=6), hovertemplate="experiment %{customdata[0]}: y = %{customdata[1]:.2f}"
        "<extra></extra>", **at(3),
    )  # fmt: skip
    figure.add_scatter(
        meta="plan", name="planned", mode="lines+markers", line=dict(color=theme.ROLE["method"].colour, width=2),
        marker=dict(theme.marker("method", 9), symbol="diamond"), hoverinfo="skip", **at(3),
    )  # fmt: skip
    hollow = dict(symbol="diamond-open", size=11, color=theme.ROLE["baseline1"].colour, line_width=2.5)
    figure.add_scatter(
        meta="greedy", name="greedy would go", mode="markers", marker=hollow, hoverinfo="skip", **at(3)
    )  # fmt: skip
    figure.add_scatter(
        meta="source", name="hidden source", mode="markers", marker=_source_mark(), hoverinfo="skip", **at(3)
    )  # fmt: skip

    dots = dict(color=theme.tint("method", 0.5), line_width=0)
    figure.add_scatter(meta="particles", mode="markers", marker=dots, hoverinfo="skip", showlegend=False, **at(4))
    _regions(figure, "root", "reference", 4, dash="dot")
    _regions(figure, "posterior", "method", 4)
    figure.add_scatter(
        meta="zoomed", mode="markers", marker=_source_mark(), hoverinfo="skip", showlegend=False, **at(4)
    )  # fmt: skip

    axis_of(figure, "x", 1).update(showticklabels=False, showgrid=False, dtick=1)
    axis_of(figure, "y", 1).update(range=(-0.02, 1.06), showticklabels=False, showgrid=False, ticks="", showline=False)
    axis_of(figure, "x", 2).update(title_text="level of the tree (experiments ahead)", dtick=1)
    axis_of(figure, "y", 2).update(title_text="EIG (nats)")
    for number in (3, 4):
        axis_of(figure, "x", number).update(title_text="x₁")
        axis_of(figure, "y", number).update(title_text="x₂")
        _square(figure, number)
    for number, text in ((1, "The tree"), (2, "Along the path"), (3, "Map"), (4, "Belief at the node")):
        _headline(figure, number, text)
    return figure.update_layout(legend=dict(y=1.045, font_size=11, itemwidth=30), barmode="overlay")


def draw_explorer(figure, scene, node: int, show_source: bool) -> None:
    """Show a node of a scene in a figure of `explorer`.

    Args:
        scene: a `labkit.design.widgets.Scene`.
        node: index in its tree.
        show_source: whether the hidden source is drawn.
    """
    traces, tree = keyed(figure), scene.tree
    path, deepest = tree.path(node), int(tree.depth.max())
    _draw_tree(figure, traces, scene, path, deepest)
    _draw_gains(figure, traces, scene, path, deepest)

    designs = tree.design[0].numpy()
    before = scene.position if len(path) == 1 else designs[path[-2]]
    left = scene.left if len(path) == 1 else float(tree.budget[0, path[-2]])
    box = np.zeros(2), np.ones(2)
    near = np.maximum(before - scene.delta, 0), np.minimum(before + scene.delta, 1)
    for meta, outline in (("reach", reach_outline(before, *near, left)), ("budget", reach_outline(before, *box, left))):
        traces[meta].update(x=outline[:, 0], y=outline[:, 1])
    done = np.asarray(scene.designs)
    numbered = np.column_stack([np.arange(1, len(done) + 1), scene.outcomes])
    traces["done"].update(x=done[:, 0], y=done[:, 1], customdata=numbered)
    way = np.concatenate([scene.position[None], designs[path]])
    traces["plan"].update(x=way[:, 0], y=way[:, 1])
    traces["greedy"].update(x=scene.greedy[:1], y=scene.greedy[1:])
    for meta in ("source", "zoomed"):
        traces[meta].update(x=scene.source[:1], y=scene.source[1:], visible=show_source)

    axis, whole = scene.whole.posterior(tree, path)
    traces["belief"].update(x=axis[0], y=axis[1], z=1 - credible_mass(whole))
    axis, near = scene.zoomed.posterior(tree, path)
    traces["posterior"].update(x=axis[0], y=axis[1], z=credible_mass(near))
    traces["root"].update(x=axis[0], y=axis[1], z=credible_mass(scene.zoomed.posterior(tree, path[:1])[1]))
    weights = tree.log_weights[0, node].exp().numpy()
    theta = tree.theta[0, node].numpy()
    size = 1 + 7 * np.sqrt(weights / weights.max())
    traces["particles"].update(x=theta[:, 0], y=theta[:, 1], marker_size=size)
    _square(figure, 4, tuple((float(a[0]), float(a[-1])) for a in axis))


def _draw_tree(figure, traces: Mapping, scene, path: list[int], deepest: int) -> None:
    tree = scene.tree
    parents, depth, eig = tree.parents.numpy(), tree.depth.numpy(), tree.eig[0].numpy()
    outcomes, height = tree.outcome[0].numpy(), tree_layout(tree.parents.numpy(), tree.outcome[0].numpy())
    probability = tree.probability.numpy()
    for level in range(1, _EDGES + 1):
        nodes = np.flatnonzero(depth == level)
        x, y = np.full(3 * len(nodes), None), np.full(3 * len(nodes), None)
        x[0::3], x[1::3] = level - 1, level
        y[0::3], y[1::3] = height[parents[nodes]], height[nodes]
        width = 1 + 9 * float(probability[nodes[0]]) if len(nodes) else 1
        traces[f"edges{level}"].update(x=x, y=y, line_width=width)
    traces["branch"].update(x=depth[path], y=height[path])
    traces["selected"].update(x=[depth[path[-1]]], y=[height[path[-1]]])
    words = ["", *(f", outcome {y:.2f} (probability {p:.2g})" for y, p in zip(outcomes[1:], probability[1:], strict=True))]
    labelled = len(parents) <= _LABELLED
    text = (
        ["now", *(f"y = {y:z.1f}".replace("-", "−") for y in outcomes[1:])] if labelled else ["now"] + [""] * (len(parents) - 1)
    )
    traces["nodes"].update(
        x=depth,
        y=height,
        text=text,
        customdata=list(zip(range(len(parents)), words, strict=True)),
        marker=dict(
            color=eig,
            cmax=nice(float(eig.max())),
            symbol=["diamond"] + ["circle"] * (len(parents) - 1),
            size=np.where(
                depth == 0, 20, np.clip(22 / np.sqrt(np.maximum(deepest, 1)) * (30 / max(len(parents), 30)) ** 0.35, 5, 17)
            ),
        ),
    )
    axis_of(figure, "x", 1).range = (-0.32, max(deepest, 1) + 0.32)


def _draw_gains(figure, traces: Mapping, scene, path: list[int], deepest: int) -> None:
    tree = scene.tree
    depth, eig = tree.depth.numpy(), tree.eig[0].numpy()
    below = scene.expected_below(path[-1])
    traces["path"].update(x=depth[path], y=eig[path])
    traces["below"].update(x=depth[path[-1]] + 1 + np.arange(len(below)), y=below)
    levels = np.arange(deepest + 1)
    traces["level"].update(x=levels, y=[eig[depth == level].mean() for level in levels])
    axis_of(figure, "x", 2).range = (-0.32, max(deepest, 1) + 0.32)
    axis_of(figure, "y", 2).range = (0, nice(1.05 * float(eig.max())))


def robot() -> go.Figure:
    """A map with the gain of every reachable place, and what has been learned; empty until `draw_robot`."""
    figure = place_axes([(0, 0.56, 0, 1), (0.74, 1, 0, 1)], theme.MAP_HEIGHT, t=60)
    bar = dict(x=0.585, xanchor="left", len=0.8, thickness=10, title=dict(text="EIG<br>(nats)", font_size=11))
    hover = "(%{x:.2f}, %{y:.2f}): %{z:.2f} nats<extra></extra>"
    figure.add_heatmap(meta="gain", colorscale=theme.SEQUENTIAL, zmin=0, colorbar=bar, hovertemplate=hover, **at(1))
    figure.add_scatter(
        meta="places", mode="markers", marker=dict(size=16, symbol="square", color="rgba(0,0,0,0)"), showlegend=False,
        hovertemplate="(%{x:.2f}, %{y:.2f}): %{customdata:.2f} nats<extra></extra>", **at(1),
    )  # fmt: skip
    dots = dict(color="rgba(100,100,100,0.35)", size=3, line_width=0)
    figure.add_scatter(meta="particles", name="where it may be", mode="markers", marker=dots, hoverinfo="skip", **at(1))
    figure.add_scatter(
        meta="done", name="your measurements", mode="lines+markers", line=dict(color="#444444", width=1.5),
        marker=dict(color="white", size=8, line=dict(color="black", width=1.5)),  # seen on a dark map and on white
        hovertemplate="y = %{customdata:.2f}<extra></extra>", **at(1),
    )  # fmt: skip
    target = dict(theme.marker("baseline4", 15), line=dict(color="black", width=1.2))
    figure.add_scatter(meta="target", name="your next", mode="markers", marker=target, hoverinfo="skip", **at(1))
    figure.add_scatter(meta="source", name="the source", mode="markers", marker=_source_mark(13), hoverinfo="skip", **at(1))
    for meta, role, name in (("greedy", "baseline1", "greedy robot"), ("you", "baseline4", "you")):
        figure.add_scatter(
            meta=meta, name=name, mode="lines+markers", line=theme.line(role), marker=theme.marker(role, 7),
            hovertemplate="experiment %{x}: %{y:.2f} nats<extra></extra>", **at(2),
        )  # fmt: skip
    axis_of(figure, "x", 1).update(title_text="x₁")
    axis_of(figure, "y", 1).update(title_text="x₂")
    _square(figure, 1)
    axis_of(figure, "x", 2).update(title_text="experiment", dtick=2)
    axis_of(figure, "y", 2).update(title_text="learned so far: KL(posterior || prior), nats")
    return figure.update_layout(legend_itemsizing="constant")


def draw_robot(figure, view, target: np.ndarray) -> None:
    """Show where the robot stands.

    Args:
        view: a `labkit.design.widgets.Stand`.
        target: where it would go next (2,).
    """
    traces = keyed(figure)
    x, y = np.meshgrid(*view.axes)
    traces["gain"].update(x=view.axes[0], y=view.axes[1], z=view.gain, zmax=nice(float(view.gain.max())))
    traces["places"].update(x=x.ravel(), y=y.ravel(), customdata=view.gain.ravel())
    traces["particles"].update(x=view.particles[:, 0], y=view.particles[:, 1])
    traces["done"].update(x=view.designs[:, 0], y=view.designs[:, 1], customdata=view.outcomes)
    traces["target"].update(x=target[:1], y=target[1:], visible=not view.over)
    traces["source"].update(x=view.source[:1], y=view.source[1:], visible=view.over)
    for meta, values in (("you", view.learned), ("greedy", view.rival)):
        traces[meta].update(x=np.arange(1, len(values) + 1), y=values)
    axis_of(figure, "x", 2).range = (0.5, view.steps + 0.5)
    top = max(float(view.rival.max()), float(view.learned.max()))
    axis_of(figure, "y", 2).range = (min(-0.2, 1.1 * float(view.learned.min())), nice(1.15 * top))


def bounds() -> go.Figure:
    """Estimates of the information of linear-Gaussian runs against the number of contrastive draws; see `draw_bounds`."""
    figure = theme.figure(x="contrastive draws L", y="information (nats)", height=theme.HEIGHT)
    figure.update_xaxes(type="log", range=(-0.15, 4.15), dtick=1)
    figure.add_scatter(meta="ceiling", name="log (L + 1)", mode="lines", line=dict(color="#BBBBBB", width=1.5, dash="dot"))
    figure.add_scatter(meta="exact", name="exact", mode="lines", line=theme.line("truth"))
    for meta, role, name in (
        ("spce", "baseline1", "sPCE"),
        ("snmc", "baseline3", "sNMC"),
        ("is", "method", "importance sampling"),
    ):
        bars = dict(type="data", thickness=1.4, width=4, color=theme.ROLE[role].colour)
        figure.add_scatter(
            meta=meta, name=name, mode="lines+markers", line=theme.line(role), marker=theme.marker(role), error_y=bars,
            hovertemplate="L = %{x}: %{y:.2f} nats<extra></extra>",
        )  # fmt: skip
    return figure


def draw_bounds(figure, exact: float, estimates: Mapping[str, tuple]) -> None:
    """Show estimates as means, with 95 % bars of their difference to the exact values.

    Args:
        exact: nats.
        estimates: "spce", "snmc" and "is" → numbers of draws, mean and standard error of the difference, (k,) each.
    """
    traces = keyed(figure)
    fine = np.geomspace(0.7, 1.4e4, 60)
    traces["ceiling"].update(x=fine, y=np.log(fine + 1))
    traces["exact"].update(x=fine[[0, -1]], y=[exact, exact])
    for name, (draws, mean, stderr) in estimates.items():
        traces[name].update(x=draws, y=mean, error_y_array=1.96 * stderr)
    figure.layout.yaxis.range = (0, nice(1.6 * exact))


def corridor(amplitudes: Sequence[float]) -> go.Figure:
    """Walks through the corridor over the amplitudes, and their information; see `draw_corridor`."""
    figure = place_axes([(0, 0.5, 0.0, 0.7), (0, 0.5, 0.75, 1), (0.62, 1, 0, 1)], 440, t=56)
    places = np.arange(len(amplitudes))
    figure.add_bar(x=places, y=np.square(amplitudes), marker_color="#C9D3DA", showlegend=False, hoverinfo="skip", **at(2))
    for meta, role, name in (
        ("optimum", "truth", "optimum"),
        ("greedy", "baseline1", "greedy"),
        ("planner", "method", "planner"),
    ):
        mark, width = theme.marker(role, 7), 5 if meta == "greedy" else 2  # seen below a planner that does the same
        for number, x in ((1, "place %{x}, experiment %{y}"), (3, "experiment %{x}: %{y:.3f} nats")):
            figure.add_scatter(
                meta=f"{meta}{number}", name=name, legendgroup=meta, showlegend=number == 1, mode="lines+markers",
                line=theme.line(role, width), marker=mark, hovertemplate=f"{name}: {x}<extra></extra>", **at(number),
            )  # fmt: skip
    axis_of(figure, "x", 1).update(title_text="place", range=(-0.6, len(amplitudes) - 0.4), dtick=1)
    axis_of(figure, "y", 1).update(title_text="experiment", dtick=2)
    axis_of(figure, "x", 2).update(range=(-0.6, len(amplitudes) - 0.4), showticklabels=False, dtick=1)
    axis_of(figure, "y", 2).update(title_text="a(x)²", range=(0, 7), nticks=4)
    axis_of(figure, "x", 3).update(title_text="experiment", dtick=2)
    axis_of(figure, "y", 3).update(title_text="information so far (nats)", range=(0, 2.2))
    return figure


def draw_corridor(figure, walks: Mapping[str, tuple[np.ndarray, np.ndarray]], start: int) -> None:
    """Show walks.

    Args:
        walks: "optimum", "greedy" and "planner" → places (T,) and information (T,).
        start: x_0.
    """
    traces = keyed(figure)
    for shift, (name, (places, information)) in zip((-0.09, 0.09, 0.0), walks.items(), strict=True):
        time = np.arange(len(places) + 1)
        traces[f"{name}1"].update(x=np.append(start, places) + shift, y=time)  # shifted, so that none hides another
        traces[f"{name}3"].update(x=time, y=np.append(0, information))
    steps = len(places)
    axis_of(figure, "y", 1).update(range=(steps + 0.5, -0.5), dtick=2 if steps > 6 else 1)
    axis_of(figure, "x", 3).update(range=(-0.3, steps + 0.3), dtick=2 if steps > 6 else 1)


def posterior() -> go.Figure:
    """The exact posterior of a history beside what a network says; see `draw_posterior`."""
    figure = place_axes([(0, 0.44, 0, 1), (0.54, 0.98, 0, 1)], theme.MAP_HEIGHT - 10, t=88)
    shown = dict(colorscale=SHADES, zmin=0, zmax=1, showscale=False, hoverinfo="skip")
    for number, (meta, role) in enumerate((("exact", "truth"), ("network", "method")), 1):
        figure.add_heatmap(meta=f"{meta}/shade", **shown, **at(number))
        dots = dict(color="rgba(80,80,80,0.4)", size=3, line_width=0)
        figure.add_scatter(
            meta=f"{meta}/draws", name="particles, draws of q", mode="markers", marker=dots, hoverinfo="skip",
            showlegend=number == 1, legendgroup="draws", **at(number),
        )  # fmt: skip
        _regions(figure, f"{meta}/region", role, number, dash="solid")
        figure.add_scatter(
            meta=f"{meta}/path", name="measurements", mode="lines+markers", line=dict(color="#444444", width=1),
            marker=dict(color="#444444", size=6), hoverinfo="skip", showlegend=number == 1, **at(number),
        )  # fmt: skip
        figure.add_scatter(
            meta=f"{meta}/source", name="the source", mode="markers", marker=_source_mark(13), hoverinfo="skip",
            showlegend=number == 1, **at(number),
        )  # fmt: skip
        axis_of(figure, "x", number).update(title_text="θ₁")
        axis_of(figure, "y", number).update(title_text="θ₂")
        _square(figure, number)
    _headline(figure, 1, "Bayes' rule")
    _headline(figure, 2, "network")
    return figure.update_layout(legend_y=1.09)


def draw_posterior(
    figure, axes, exact: np.ndarray, learned: np.ndarray, draws: Mapping, designs: np.ndarray, source, head: str
) -> None:
    """Show both posteriors.

    Args:
        axes: coordinates of the grid, two arrays.
        exact, learned: log-densities on it, rows along θ₂.
        draws: "exact" and "network" → points (n, 2).
        designs: (t, 2).
        source: (2,).
        head: name of the network's head.
    """
    traces = keyed(figure)
    for meta, log_density in (("exact", exact), ("network", learned)):
        mass = credible_mass(log_density)
        traces[f"{meta}/shade"].update(x=axes[0], y=axes[1], z=1 - mass)
        traces[f"{meta}/region"].update(x=axes[0], y=axes[1], z=mass)
        traces[f"{meta}/draws"].update(x=draws[meta][:, 0], y=draws[meta][:, 1])
        traces[f"{meta}/path"].update(x=designs[:, 0], y=designs[:, 1])
        traces[f"{meta}/source"].update(x=source[:1], y=source[1:])
    figure.layout.annotations[1].text = f"<b>Network, {head} head</b>"


def runs() -> go.Figure:
    """One run of several policies on a map, and what all runs have learned and spent; see `draw_runs`."""
    figure = place_axes([(0, 0.42, 0, 1), (0.53, 1, 0.46, 1), (0.53, 1, 0, 0.34)], theme.MAP_HEIGHT, t=60)
    for number, role in enumerate(("method", "baseline1", "baseline2"), 1):
        line, mark, group = theme.line(role), theme.marker(role, 5), dict(legendgroup=f"run{number}")
        figure.add_scatter(
            meta=f"way{number}", mode="lines+markers", line=line, marker=mark, hoverinfo="skip", **group, **at(1)
        )
        band = theme.band([], [], [], role).update(meta=f"band{number}", **at(2), **group)
        figure.add_trace(band)
        for meta, place in (("mean", 2), ("spent", 3)):
            figure.add_scatter(meta=f"{meta}{number}", mode="lines", line=line, showlegend=False, **group, **at(place))
    figure.add_scatter(meta="source", name="the source", mode="markers", marker=_source_mark(13), hoverinfo="skip", **at(1))
    for letter, title in (("x", "x₁"), ("y", "x₂")):
        axis_of(figure, letter, 1).title.text = title
    _square(figure, 1)
    axis_of(figure, "x", 2).update(showticklabels=False)
    axis_of(figure, "y", 2).update(title_text="learned (nats)")
    axis_of(figure, "x", 3).update(title_text="experiment")
    axis_of(figure, "y", 3).update(title_text="travelled (map sides)")
    return figure


def draw_runs(figure, found: Mapping[str, object], rollout: int) -> None:
    """Show runs of up to three policies with the same sources and noise.

    Args:
        found: name → `labkit.design.widgets.Runs`.
        rollout: which run the map shows.
    """
    traces, top, far = keyed(figure), 0.0, 0.0
    for number in (1, 2, 3):
        for meta in ("way", "band", "mean", "spent"):
            traces[f"{meta}{number}"].visible = number <= len(found)
    for number, (name, run) in enumerate(found.items(), 1):
        path, time = run.designs[rollout], np.arange(1, run.learned.shape[1] + 1)
        traces[f"way{number}"].update(x=path[:, 0], y=path[:, 1], name=name)
        mean, stderr = run.learned.mean(0), run.learned.std(0, ddof=1) / len(run.learned) ** 0.5
        x, y = theme.outline(time, mean - 1.96 * stderr, mean + 1.96 * stderr)
        traces[f"band{number}"].update(x=x, y=y)
        traces[f"mean{number}"].update(x=time, y=mean)
        traces[f"spent{number}"].update(x=time, y=run.travelled.mean(0))
        top, far = max(top, float((mean + 1.96 * stderr).max())), max(far, float(run.travelled.mean(0).max()))
    traces["source"].update(x=run.theta[rollout, :1], y=run.theta[rollout, 1:])
    for number in (2, 3):
        axis_of(figure, "x", number).range = (0.5, len(time) + 0.5)
    axis_of(figure, "y", 2).range = (0, nice(1.05 * top))
    axis_of(figure, "y", 3).range = (0, nice(1.05 * max(far, 1e-3)))


SCHEDULES = ("greedy", "static", "tree-1", "tree-2", "random")


def schedules() -> go.Figure:
    """When blood is drawn: concentrations under the prior, the times of each policy, what they tell; see `draw_schedules`."""
    figure = place_axes([(0, 0.64, 0.66, 1), (0, 0.64, 0, 0.58), (0.72, 1, 0, 0.58)], theme.MAP_HEIGHT, l=150, t=36)
    figure.add_scatter(
        meta="band", mode="lines", line_width=0, fill="toself", fillcolor=theme.tint("reference", 0.18), hoverinfo="skip",
        name="90 % of patients", **at(1),
    )  # fmt: skip
    figure.add_scatter(meta="median", mode="lines", line=theme.line("truth"), hoverinfo="skip", name="median patient", **at(1))
    for policy in SCHEDULES:
        role = ROLES[policy]
        dots = dict(color=theme.tint(role, 0.3), size=5, line_width=0)
        figure.add_scatter(meta=f"{policy}/times", mode="markers", marker=dots, showlegend=False, hoverinfo="skip", **at(2))
        ticks = dict(symbol="line-ns", size=18, line=dict(color=theme.ROLE[role].colour, width=3))
        figure.add_scatter(
            meta=f"{policy}/medians", mode="markers", marker=ticks, showlegend=False,
            hovertemplate="median of draw %{customdata}: %{x:.1f} h<extra></extra>", **at(2),
        )  # fmt: skip
        bars = dict(type="data", color=theme.INK, thickness=1.4, width=4)
        figure.add_scatter(
            meta=f"{policy}/value", mode="markers", marker=theme.marker(role, 11), error_x=bars, showlegend=False,
            hovertemplate="%{x:.2f} nats<extra></extra>", **at(3),
        )  # fmt: skip
    names = [NAMES[policy] for policy in SCHEDULES]
    axis_of(figure, "x", 1).update(range=(0, 24), dtick=4, showticklabels=False)
    axis_of(figure, "x", 2).update(range=(0, 24), dtick=4, title_text="hours after the dose")
    axis_of(figure, "y", 1).update(title_text="concentration (a.u.)")
    rows = dict(range=(len(names) - 0.5, -0.5), tickvals=list(range(len(names))))
    axis_of(figure, "y", 2).update(ticktext=names, **rows)
    axis_of(figure, "y", 3).update(showticklabels=False, **rows)
    axis_of(figure, "x", 3).update(title_text="KL (nats)")
    return figure


def draw_schedules(figure, hours: np.ndarray, curves: np.ndarray, table: pd.DataFrame, limits: tuple[float, float]) -> None:
    """Show one setting.

    Args:
        hours: (k,) times of the curves.
        curves: concentrations of simulated patients (n, k).
        table: rows of `experiment.stored()` for one pharmacokinetic setting.
        limits: of the information axis.
    """
    traces = keyed(figure)
    low, middle, high = np.quantile(curves, (0.05, 0.5, 0.95), axis=0)
    x, y = theme.outline(hours, low, high)
    traces["band"].update(x=x, y=y)
    traces["median"].update(x=hours, y=middle)
    axis_of(figure, "y", 1).range = (0, nice(1.02 * float(high.max())))
    columns = [column for column in table if column.startswith("time")]
    for row, policy in enumerate(SCHEDULES):
        cell = table[table["policy"] == policy]
        times = cell[columns].to_numpy()
        jitter = np.random.default_rng(0).uniform(-0.24, 0.24, times.shape)
        traces[f"{policy}/times"].update(x=times.ravel(), y=row + jitter.ravel())
        traces[f"{policy}/medians"].update(
            x=np.median(times, axis=0) if len(cell) else [],
            y=np.full(len(columns), row),
            customdata=np.arange(1, len(columns) + 1),
        )
        traces[f"{policy}/value"].update(x=[cell["kl"].mean()], y=[row], error_x_array=[1.96 * cell["kl"].sem()])
    axis_of(figure, "x", 3).range = limits


def race() -> go.Figure:
    """Policies in one setting: information against time per decision, and paired differences; see `draw_race`."""
    figure = place_axes([(0, 0.46, 0, 1), (0.74, 1, 0, 1)], 460, t=28)
    lines = dict(color="#999999", width=1.2, dash="dot")
    words = dict(size=11, color="#777777")
    figure.add_scatter(meta="published", mode="lines", line=lines, showlegend=False, hoverinfo="skip", **at(1))
    figure.add_scatter(
        meta="published/names", mode="text", textposition="top left", textfont=words, showlegend=False, hoverinfo="skip",
        **at(1),
    )  # fmt: skip
    bars = dict(type="data", color=theme.INK, thickness=1.4, width=4)
    figure.add_scatter(
        meta="policies", mode="markers+text", error_y=bars, marker=dict(size=12, line=dict(color="white", width=1)),
        textfont_size=11, showlegend=False, customdata=[], cliponaxis=False,
        hovertemplate="%{customdata}: %{y:.2f} nats at %{x:.3g} ms<extra></extra>", **at(1),
    )  # fmt: skip
    figure.add_scatter(
        meta="differences", mode="markers", error_x=bars, marker=dict(size=11, line=dict(color="white", width=1)),
        showlegend=False, hovertemplate="%{x:.2f} nats<extra></extra>", **at(2),
    )  # fmt: skip
    figure.add_shape(type="line", x0=0, x1=0, y0=0, y1=1, xref="x2", yref="y2 domain", line=dict(color=theme.INK, width=1))
    axis_of(figure, "x", 1).update(type="log", title_text="processor time per decision (ms)", dtick=1)
    return figure


def draw_race(figure, summary: pd.DataFrame, pairs: pd.DataFrame, metric: str, published: pd.DataFrame) -> None:
    """Show one setting.

    Args:
        summary: rows of `experiment.summarise`, one per policy.
        pairs: rows of `experiment.differences` with the same `first`.
        metric: a key of `METRICS`.
        published: rows of `experiment.PUBLISHED` to draw, possibly none.
    """
    traces = keyed(figure)
    colours = [theme.ROLE[ROLES[policy]].colour for policy in summary["policy"]]
    time = (summary["plan_ms"] + summary["belief_ms"]).clip(lower=FASTEST).to_numpy()
    value, half = summary[metric].to_numpy(), 1.96 * summary[f"{metric}_stderr"].fillna(0).to_numpy()
    names = [NAMES[policy] for policy in summary["policy"]]
    low, high = np.log10(time.min()) - 0.35, np.log10(time.max()) + 0.75
    above = _away_from_neighbours(np.log10(time) / (high - low), value / float(np.ptp(value) or 1))
    sides = np.where(np.log10(time) < 0.7 * high + 0.3 * low, "right", "left")  # names of the slow ones stand on the left
    traces["policies"].update(
        x=time, y=value, error_y_array=half, marker_color=colours, customdata=names,
        text=[SHORT[policy] for policy in summary["policy"]],
        textposition=[f"{'top' if up else 'bottom'} {side}" for up, side in zip(above, sides, strict=True)],
    )  # fmt: skip
    floor = min(0.0, float((value - half).min()))
    axis_of(figure, "x", 1).range = (low, high)
    axis_of(figure, "y", 1).update(range=(floor, nice(1.08 * float((value + half).max()))), title_text=METRICS[metric])
    heights = published["spce"].to_numpy()
    x, y = np.full(3 * len(heights), None), np.full(3 * len(heights), None)
    x[0::3], x[1::3], y[0::3], y[1::3] = 10**low, 10**high, heights, heights
    traces["published"].update(x=x, y=y)
    notes = [f"{method}, published" for method in published["method"]]
    traces["published/names"].update(x=np.full(len(heights), 10**high), y=heights, text=notes)

    half = 1.96 * pairs["difference_stderr"].fillna(0)
    traces["differences"].update(
        x=pairs["difference"], y=[f"{NAMES[p]} ({n})" for p, n in zip(pairs["second"], pairs["rollouts"], strict=True)],
        error_x_array=half, marker_color=[theme.ROLE[ROLES[policy]].colour for policy in pairs["second"]],
    )  # fmt: skip
    if not len(pairs):  # a policy alone
        axis_of(figure, "x", 2).title.text = "nothing to compare with"
        return
    ends = min(0.0, float((pairs["difference"] - half).min())), max(0.0, float((pairs["difference"] + half).max()))
    pad = 0.08 * (ends[1] - ends[0]) or 0.5
    title = f"KL, {NAMES[pairs['first'].iloc[0]].partition(',')[0]} − policy (nats)"
    axis_of(figure, "x", 2).update(range=(ends[0] - pad, ends[1] + pad), title_text=title)
    axis_of(figure, "y", 2).range = (len(pairs) - 0.4, -0.6)


def _away_from_neighbours(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether each point's nearest neighbour lies below it (n,), so that its name has room above."""
    distance = np.hypot(x[:, None] - x, y[:, None] - y) + np.diag(np.full(len(x), np.inf))
    return y >= y[distance.argmin(1)]


def step_limits(summary: pd.DataFrame, metric: str = "kl") -> go.Figure:
    """Information of each policy against the step limit δ of location finding.

    Args:
        summary: from `experiment.summarise`.
        metric: a key of `METRICS`.
    """
    figure = theme.figure(x="largest step δ (map sides)", y=METRICS[metric])
    rows = summary[summary["setting"].str.startswith("location-")]
    rows = rows.assign(delta=rows["setting"].str.partition("-")[2].astype(float)).sort_values("delta")
    for policy in ("tree-2", "greedy", "dad", "step_dad", "static", "greedy_vi", "random"):
        cell = rows[rows["policy"] == policy]
        if len(cell):
            role = "violation" if policy == "step_dad" else ROLES[policy]
            figure.add_scatter(
                x=cell["delta"], y=cell[metric], name=NAMES[policy], mode="lines+markers", line=theme.line(role),
                marker=theme.marker(role),
                error_y=dict(type="data", array=1.96 * cell[f"{metric}_stderr"], width=3, thickness=1.2),
            )  # fmt: skip
    figure.update_xaxes(tickvals=sorted(set(rows["delta"])), range=(0.035, 0.215))
    return figure.update_layout(legend=dict(orientation="v", x=1.02, y=1, yanchor="top"), margin_r=200)


def ablation(pairs: pd.DataFrame, summary: pd.DataFrame, setting: str = "location-0.1") -> go.Figure:
    """What each part of the planner is worth: paired differences to the default tree, beside the time they save.

    Args:
        pairs: from `experiment.differences`; rows whose `first` is "tree-2".
        summary: from `experiment.summarise`.
        setting: key of `experiment.SETTINGS`.
    """
    rows = pairs[(pairs["setting"] == setting) & (pairs["first"] == "tree-2")].set_index("second")
    time = summary[summary["setting"] == setting].set_index("policy")["plan_ms"]
    policies = [policy for policy in NAMES if policy in rows.index and (ROLES[policy] == "method" or policy == "greedy")]
    figure = place_axes([(0, 0.56, 0, 1), (0.62, 1, 0, 1)], 440, l=240, t=16)
    names = [f"{NAMES[policy]} ({int(rows.loc[policy, 'rollouts'])})" for policy in policies]
    bars = dict(type="data", array=1.96 * rows.loc[policies, "difference_stderr"], color=theme.INK, thickness=1.4, width=4)
    colours = [theme.ROLE[ROLES[policy]].colour for policy in policies]
    mark = dict(size=11, color=colours, line=dict(color="white", width=1))
    figure.add_scatter(
        x=-rows.loc[policies, "difference"], y=names, mode="markers", marker=mark, error_x=bars, showlegend=False, **at(1)
    )
    figure.add_scatter(x=time[policies] / time["tree-2"], y=names, mode="markers", marker=mark, showlegend=False, **at(2))
    axis_of(figure, "x", 2).update(type="log", dtick=1)
    for number in (1, 2):
        axis_of(figure, "y", number).update(categoryorder="array", categoryarray=names[::-1], showticklabels=number == 1)
    for number, x in ((1, 0), (2, 1)):
        figure.add_shape(
            type="line", x0=x, x1=x, y0=0, y1=1, xref=f"x{number}".replace("x1", "x"),
            yref=f"y{number} domain".replace("y1", "y"), line=dict(color=theme.INK, width=1),
        )  # fmt: skip
    axis_of(figure, "x", 1).title.text = "KL of the variant − tree, H = 2 (nats)"
    axis_of(figure, "x", 2).title.text = "time, relative to tree, H = 2"
    return figure

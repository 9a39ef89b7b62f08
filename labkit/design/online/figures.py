"""Figures of lab 05: traces and tables in, plotly figures out.

A figure with many traces is built empty once and filled by the function `draw_…` of the same name, which finds its traces
by their `meta` key, such as "policy/truth1". Axes keep their ranges from step to step; only a new run may change them.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from scipy import special

from labkit import theme
from labkit.theme import at, axis_of, keyed, nice, place_axes

NAMES = {
    "adam": "BAD-PODS",
    "grid": "BAD-PODS, grid",
    "adam-exact": "BAD-PODS, exact gradient",
    "adam-jackknife": "BAD-PODS, jackknife",
    "adam-pathwise": "BAD-PODS, pathwise",
    "grid-jackknife": "BAD-PODS, grid, jackknife",
    "random": "random",
    "fixed": "fixed",
    "best_static": "best constant",
    "aim": "aim at the mean",
    "plug_in": "state plugged in",
    "open_loop": "planned ahead",
    **{f"share-{share:g}": f"always {100 * share:g} %" for share in (0.02, 0.25, 0.75, 0.98)},
}
POLICY_ROLES = {
    **dict.fromkeys((name for name, title in NAMES.items() if title.startswith("BAD-PODS")), "method"),
    "random": "baseline1",
    "fixed": "baseline3",
    "best_static": "baseline2",
    "aim": "baseline4",
}
METRICS = {
    "kl": "KL(posterior || prior), nats",
    "gain": "realised information gain, nats",
    "teig_jackknife": "sum of expected gains, jackknifed, nats",
    "teig": "sum of expected gains, plain, nats",
    "rmse": "error of the filtered parameters (RMSE)",
    "position_l2": "distance to the source",
}
GROUPS = ("baseline2", "baseline4")  # roles of the two groups, of the two sensors
SIDES = {"policy": "method", "other": "baseline1"}
COMPARTMENTS = {"infected": "I", "susceptible": "S", "recovered": "R"}

_RIDGE = [(0.0, "#FFFFFF"), (0.6, "#DCEBF5"), (1.0, "#8FC1E3")]  # from poor to best, light enough for marks on top
_FLAT = 0.75  # shares that promise less than this part of the best are white
_REACH = 1.4  # length of a drawn lobe
WINDOW = 15  # steps of a running mean


def highest_density(points: np.ndarray, box: tuple[float, float], size: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each place, the mass of all places denser than it: its 0.5 and 0.9 contours are 50 and 90 % regions.

    Args:
        points: a cloud (n, 2), smoothed by a Gaussian kernel a little wider than Scott's.
        box: the range of both coordinates; the grid covers the cloud and stays inside.
        size: of the grid.

    Returns:
        x (size,), y (size,) and the mass (size, size), rows along y.
    """
    n, centre = len(points), points.mean(0)
    covariance = np.cov(points.T) + 1e-8 * np.eye(2)
    width = 1.3 * n ** (-1 / 6)
    reach = 2.5 * width * np.sqrt(np.diag(covariance))
    low, high = np.maximum(points.min(0) - reach, box[0]), np.minimum(points.max(0) + reach, box[1])
    x, y = (np.linspace(low[i], high[i], size) for i in (0, 1))
    whiten = np.linalg.inv(np.linalg.cholesky(width**2 * covariance)).T
    grid = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2) - centre
    grid, cloud = ((values @ whiten).astype(np.float32) for values in (grid, points - centre))
    distance = (grid**2).sum(1)[:, None] + (cloud**2).sum(1) - 2 * grid @ cloud.T  # (size², n)
    density = np.exp(-distance / 2).sum(1, dtype=float)
    order = np.argsort(-density)
    mass = np.empty_like(density)
    mass[order] = density[order].cumsum() / density.sum()
    return x, y, mass.reshape(size, size)


def _headline(x: float, text: str, role: str | None, y: float = 1.0) -> dict:
    colour = theme.ROLE[role].colour if role else theme.INK
    return dict(
        x=x, y=y, xref="paper", yref="paper", xanchor="center", yanchor="bottom", showarrow=False,
        text=f"<b>{text}</b>", font=dict(color=colour, size=14),
    )  # fmt: skip


def playback() -> go.Figure:
    """The epidemic under two ways to test, side by side, and both together on the right; empty until `draw_playback`.

    Rows: people hidden and filtered, share of tests over how good each share is, posterior of the rates. Right column:
    expected information of every share at this step, information so far, effective sample size.
    """
    columns, rows = ((0.0, 0.30), (0.325, 0.625), (0.74, 1.0)), ((0.735, 1.0), (0.37, 0.635), (0.0, 0.25))
    figure = place_axes([column + row for row in rows for column in columns], height=640, t=76)
    for column, (side, role) in enumerate(SIDES.items(), 1):
        for group, colour in enumerate(GROUPS, 1):
            first = dict(legendgroup=f"group{group}", showlegend=side == "policy")
            people = dict(**at(column), hoverinfo="skip")
            tint = dict(fill="toself", fillcolor=theme.tint(colour, 0.3), line_width=0)
            figure.add_scatter(
                meta=f"{side}/band{group}", name=f"filter, group {group}", mode="lines", **tint, **people, **first
            )
        for group, colour in enumerate(GROUPS, 1):
            mark = dict(color=theme.tint(colour, 0.8), symbol=("circle", "diamond")[group - 1], line_width=0)
            hover = dict(hovertemplate="step %{x}: %{customdata[0]} positive of %{customdata[1]:.0f} tests<extra></extra>")
            people = dict(**at(column), legendgroup=f"group{group}", showlegend=False)
            figure.add_scatter(meta=f"{side}/tests{group}", mode="markers", marker=mark, **hover, **people)
        for group in (1, 2):
            first = dict(name="hidden truth", legendgroup="truth", showlegend=side == "policy" and group == 1)
            line = dict(color=theme.INK, width=1.4, dash="solid" if group == 1 else "dash")
            figure.add_scatter(meta=f"{side}/truth{group}", mode="lines", line=line, **at(column), hoverinfo="skip", **first)

        here = at(3 + column)
        shading = dict(colorscale=_RIDGE, zmin=_FLAT, zmax=1, showscale=False, hoverinfo="skip")
        figure.add_heatmap(meta=f"{side}/ridge", **shading, **here)
        mark = dict(theme.marker(role, 5), opacity=0.5)
        hover = dict(hovertemplate="step %{x}: %{y:.0f} % of the tests to group 1<extra></extra>", showlegend=False)
        figure.add_scatter(meta=f"{side}/shares", mode="markers", marker=mark, **hover, **here)
        line = dict(color=theme.ROLE[role].colour, width=2.5)
        figure.add_scatter(meta=f"{side}/trend", mode="lines", line=line, hoverinfo="skip", showlegend=False, **here)
        figure.add_scatter(meta=f"{side}/share", mode="markers", marker=_now(role), **hover, **here)

        here = dict(**at(6 + column), showlegend=False, hoverinfo="skip")
        for group, colour in enumerate(GROUPS, 1):
            mark = dict(color=theme.tint(colour, 0.4), size=3.5, symbol=("circle", "diamond")[group - 1], line_width=0)
            figure.add_scatter(meta=f"{side}/cloud{group}", mode="markers", marker=mark, **here)
        for group, colour in enumerate(GROUPS, 1):
            levels = dict(coloring="none", start=0.5, end=0.9, size=0.4)
            line = dict(color=theme.ROLE[colour].colour, width=1.6)
            figure.add_contour(meta=f"{side}/region{group}", contours=levels, line=line, showscale=False, **here)
        mark = dict(symbol="x-thin", size=9, line=dict(color="black", width=2.2))
        number = dict(mode="markers+text", text=["1", "2"], textposition="top right", textfont=dict(color="black", size=12))
        figure.add_scatter(meta=f"{side}/rates", marker=mark, **number, **here)

    for side, role in SIDES.items():
        figure.add_scatter(meta=f"{side}/curve", mode="lines", line=theme.line(role), showlegend=False, **at(3))
        figure.add_scatter(meta=f"{side}/chosen", mode="markers", marker=_now(role), showlegend=False, **at(3))
        figure.add_scatter(meta=f"{side}/gained", mode="lines", line=theme.line(role), showlegend=False, **at(6))
        figure.add_scatter(meta=f"{side}/ess", mode="lines", line=theme.line(role, 1.4), showlegend=False, **at(9))

    for number, title in ((1, "infected (people)"), (4, "tests to group 1 (%)"), (7, "recovery rate γ (1/time)")):
        axis_of(figure, "y", number).update(title_text=title)
    for number in (2, 5, 8):
        axis_of(figure, "y", number).update(matches=f"y{number - 1 if number > 2 else ''}", showticklabels=False)
    for number in (1, 2):
        axis_of(figure, "x", number).update(showticklabels=False)
    for number in (4, 5, 6, 9):
        axis_of(figure, "x", number).update(title_text="step")
    for number in (7, 8):
        axis_of(figure, "x", number).update(title_text="infection rate β (1/time)", range=(0.08, 1.02))
    axis_of(figure, "y", 7).update(range=(0.08, 1.02))
    axis_of(figure, "y", 4).update(range=(0, 100), tickvals=(0, 50, 100))
    axis_of(figure, "x", 3).update(title_text="tests to group 1 (%)", range=(0, 100), tickvals=(0, 50, 100))
    axis_of(figure, "y", 3).update(title_text="EIG now (nats)")
    axis_of(figure, "y", 6).update(title_text="EIG so far (nats)")
    axis_of(figure, "y", 9).update(title_text="ESS / M", range=(0, 1.04))
    centres = [sum(column) / 2 for column in columns]
    titles = zip(centres, (NAMES["adam"], NAMES["random"], "both"), ("method", "baseline1", None), strict=True)
    figure.layout.annotations = [_headline(x, text, role) for x, text, role in titles]
    return figure.update_layout(legend=dict(y=1.045, font_size=12))


def draw_playback(figure, policy, other, setting, t: int, compartment: str = "infected") -> None:
    """Show step `t` of two runs of the SIR model in a figure of `playback`; t = 0 is the prior, before the first test.

    Args:
        policy, other: `OnlineTrace`s of the same truth with EIG curves, t steps long or more.
        setting: the `Setting` they ran in.
        compartment: "infected", "susceptible" or "recovered".
    """
    traces, model = keyed(figure), setting.model()
    groups = len(model.param_names) // 2  # whose rates are unknown
    for side, trace in (("policy", policy), ("other", other)):
        _draw_people(traces, side, trace, model, t, compartment)
        _draw_shares(traces, side, trace, t)
        for group in (1, 2):
            cloud, region = traces[f"{side}/cloud{group}"], traces[f"{side}/region{group}"]
            if group <= groups:
                _draw_cloud(cloud, region, trace.theta_cloud[t, :, 2 * group - 2 : 2 * group], model.prior_box)
            cloud.visible = region.visible = group <= groups
        traces[f"{side}/rates"].update(x=trace.theta[::2], y=trace.theta[1::2])

        now = max(t, 1) - 1  # the decision of step t was taken on the belief after step t − 1
        shares = 100 * share_of(trace.curve_designs)
        chosen = 100 * share_of(trace.designs[now : now + 1]) if t else []
        traces[f"{side}/curve"].update(x=shares, y=trace.curve[now])
        traces[f"{side}/chosen"].update(x=chosen, y=np.interp(chosen, shares, trace.curve[now]))
        time = np.arange(t + 1)
        traces[f"{side}/gained"].update(x=time, y=np.append(0, trace.eig_jackknife[:t].cumsum()))
        traces[f"{side}/ess"].update(x=time[1:], y=trace.ess[:t] / setting.num_params)
    for number in (1, 2, 4, 5, 6, 9):
        axis_of(figure, "x", number).range = (0, setting.steps)
    runs = (policy, other)
    people = nice(1.04 * max(_people(run, model, compartment)[1].max() for run in runs))
    axis_of(figure, "y", 1).update(range=(0, people), title_text=f"{compartment} (people)")
    axis_of(figure, "y", 3).range = (0, nice(1.1 * max(np.quantile(run.curve.max(1), 0.95) for run in runs)))
    axis_of(figure, "y", 6).range = (0, nice(1.04 * max(run.eig_jackknife.sum() for run in runs)))
    figure.layout.annotations[1].text = f"<b>{NAMES.get(other.policy, other.policy)}</b>"


def _draw_cloud(cloud, region, particles: np.ndarray, box: tuple[float, float]) -> None:
    particles = np.asarray(particles, dtype=float)
    cloud.update(x=particles[:, 0], y=particles[:, 1])
    x, y, mass = highest_density(particles, box)
    region.update(x=x, y=y, z=mass)


def _draw_people(traces: dict, side: str, trace, model, t: int, compartment: str) -> None:
    truth, quantiles = _people(trace, model, compartment)
    time = np.arange(t + 1)
    tests = _tests_by_group(trace, model)
    for group in (0, 1):
        traces[f"{side}/truth{group + 1}"].update(x=time, y=truth[: t + 1, group])
        x, y = theme.outline(time[1:], quantiles[:t, 0, group], quantiles[:t, 2, group])
        traces[f"{side}/band{group + 1}"].update(x=x, y=y)
        enough = (tests[:t, group] >= 5) & (compartment == "infected")  # fewer tests say next to nothing
        found = trace.observations[:t, group][enough]
        given = tests[:t, group][enough]
        scaled = found / (given * model.sensitivity[group]) * model.population[group]
        size = 1.5 + 5 * np.sqrt(given / model.tests)
        traces[f"{side}/tests{group + 1}"].update(
            x=time[1:][enough], y=scaled, marker_size=size, customdata=np.column_stack([found, given])
        )


def _draw_shares(traces: dict, side: str, trace, t: int) -> None:
    steps = np.arange(1, len(trace.designs) + 1)
    shares = 100 * share_of(trace.designs[:t])
    promised = trailing_mean(trace.curve)
    relative = promised / np.maximum(promised.max(1, keepdims=True), 1e-12)
    traces[f"{side}/ridge"].update(x=steps[:t], y=100 * share_of(trace.curve_designs), z=relative[:t].T)
    traces[f"{side}/shares"].update(x=steps[: max(t - 1, 0)], y=shares[:-1])
    traces[f"{side}/trend"].update(x=steps[:t], y=trailing_mean(shares))
    traces[f"{side}/share"].update(x=steps[:t][-1:], y=shares[-1:])


def trailing_mean(values: np.ndarray, length: int = WINDOW) -> np.ndarray:
    """Mean of each row and the up to `length` − 1 rows before it, for values (T, ...)."""
    total = np.cumsum(np.asarray(values, dtype=float), axis=0)
    count = np.minimum(np.arange(1, len(total) + 1), length)
    late = total.copy()
    late[length:] -= total[:-length]
    return late / count.reshape(-1, *[1] * (late.ndim - 1))


def _people(trace, model, compartment: str) -> tuple[np.ndarray, np.ndarray]:
    """Truth (T+1, 2) and filtered 5, 50 and 95 % quantiles (T, 3, 2) of one compartment in both groups."""
    susceptible, infected = slice(0, 4, 2), slice(1, 4, 2)
    if compartment != "recovered":
        chosen = infected if compartment == "infected" else susceptible
        return trace.states[:, chosen], trace.state_quantiles[:, :, chosen]
    total = np.asarray(model.population, dtype=float)
    cloud = total - trace.position_cloud[1:, :, susceptible] - trace.position_cloud[1:, :, infected]  # (T, P, 2)
    truth = total - trace.states[:, susceptible] - trace.states[:, infected]
    return truth, np.quantile(cloud, (0.05, 0.5, 0.95), axis=1).swapaxes(0, 1)


def _tests_by_group(trace, model) -> np.ndarray:
    share = share_of(trace.designs)
    return model.tests * np.stack([share, 1 - share], 1)  # (T, 2)


def share_of(designs: np.ndarray) -> np.ndarray:
    """Share of the tests given to group 1 (n,) for designs (n, 1), the logits."""
    return special.expit(np.asarray(designs, dtype=float)[:, 0])


def _now(role: str) -> dict:
    return dict(color=theme.ROLE[role].colour, symbol=theme.ROLE[role].marker, size=11, line=dict(color="white", width=1.5))


def source_playback() -> go.Figure:
    """A moving source heard by two sensors, under two ways to turn them; empty until `draw_source_playback`.

    Rows: map with the sensors' lobes, the path so far and the filtered position; what the sensors hear beside the
    prediction; posterior of the velocities, and on the right the expected information of both.
    """
    halves, thirds = ((0.0, 0.48), (0.52, 1.0)), ((0.0, 0.27), (0.31, 0.58), (0.71, 1.0))
    boxes = [(*half, 0.58, 1.0) for half in halves] + [(*half, 0.34, 0.49) for half in halves]
    figure = place_axes(boxes + [(*third, 0.0, 0.23) for third in thirds], height=760, t=92)
    for column, (side, role) in enumerate(SIDES.items(), 1):
        place = dict(**at(column), hoverinfo="skip")
        for sensor, colour in enumerate(GROUPS, 1):
            first = dict(name=f"sensor {sensor}", legendgroup=f"sensor{sensor}", showlegend=side == "policy")
            edge = dict(color=theme.ROLE[colour].colour, width=1.2)
            lobe = dict(mode="lines", fill="toself", fillcolor=theme.tint(colour, 0.25), line=edge)
            figure.add_scatter(meta=f"{side}/lobe{sensor}", **lobe, **place, **first)
        mark = dict(color=theme.tint(role, 0.5), size=3.5, line_width=0)
        figure.add_scatter(meta=f"{side}/positions", mode="markers", marker=mark, showlegend=False, **place)
        line = dict(color=theme.INK, width=1.4)
        first = dict(name="hidden path", showlegend=side == "policy", legendgroup="path")
        figure.add_scatter(meta=f"{side}/path", mode="lines", line=line, **first, **place)
        mark = dict(color="black", size=9, symbol="x-thin", line=dict(color="black", width=2.2))
        figure.add_scatter(meta=f"{side}/source", mode="markers", marker=mark, showlegend=False, **place)
        mark = dict(color=theme.INK, size=7, symbol="circle")
        figure.add_scatter(meta=f"{side}/sensors", mode="markers", marker=mark, showlegend=False, **place)

        place = dict(**at(2 + column), showlegend=False, hoverinfo="skip")
        for sensor, colour in enumerate(GROUPS, 1):
            tint = dict(fill="toself", fillcolor=theme.tint(colour, 0.25), line_width=0, mode="lines")
            figure.add_scatter(meta=f"{side}/predicted{sensor}", **tint, **place)
        for sensor, colour in enumerate(GROUPS, 1):
            mark = dict(color=theme.ROLE[colour].colour, size=4.5, symbol=("circle", "diamond")[sensor - 1])
            figure.add_scatter(meta=f"{side}/heard{sensor}", mode="markers", marker=mark, **place)

        place = dict(**at(4 + column), showlegend=False, hoverinfo="skip")
        mark = dict(color=theme.tint(role, 0.4), size=3.5, line_width=0)
        figure.add_scatter(meta=f"{side}/cloud", mode="markers", marker=mark, **place)
        levels = dict(coloring="none", start=0.5, end=0.9, size=0.4)
        line = dict(color=theme.ROLE[role].colour, width=1.6)
        figure.add_contour(meta=f"{side}/region", contours=levels, line=line, showscale=False, **place)
        mark = dict(symbol="x-thin", size=9, line=dict(color="black", width=2.2))
        figure.add_scatter(meta=f"{side}/velocity", mode="markers", marker=mark, **place)

    figure.add_scatter(meta="bound", name="full-state bound", mode="lines", line=theme.line("truth"), **at(7))
    for side, role in SIDES.items():
        figure.add_scatter(meta=f"{side}/gained", mode="lines", line=theme.line(role), showlegend=False, **at(7))
    for number in (1, 2):
        equal = dict(scaleanchor=f"x{number if number > 1 else ''}", constrain="domain")
        axis_of(figure, "y", number).update(**equal, showticklabels=number == 1)
        axis_of(figure, "x", number).update(constrain="domain", title_text="east (length)")
    for number in (3, 4, 7):
        axis_of(figure, "x", number).title.text = "step"
    for number, title in (
        (1, "north (length)"),
        (3, "log intensity"),
        (5, "velocity north (length/time)"),
        (7, "EIG so far (nats)"),
    ):
        axis_of(figure, "y", number).title.text = title
    for number in (4, 6):
        axis_of(figure, "y", number).update(matches=f"y{number - 1}", showticklabels=False)
    for number in (5, 6):
        axis_of(figure, "x", number).update(
            title_text="velocity east (length/time)", range=(0.48, 1.52), tickvals=(0.5, 1, 1.5)
        )
        axis_of(figure, "y", number).update(range=(0.48, 1.52), tickvals=(0.5, 1, 1.5))
    titles = zip((0.24, 0.76), (NAMES["adam"], NAMES["random"]), SIDES.values(), strict=True)
    figure.layout.annotations = [_headline(x, text, role) for x, text, role in titles]
    return figure.update_layout(legend=dict(y=1.04, font_size=12))


def draw_source_playback(figure, policy, other, model, t: int) -> None:
    """Show step `t` of two runs of the source model in a figure of `source_playback`; t = 0 is before the first step.

    Args:
        policy, other: `OnlineTrace`s of the same truth, as long as each other.
        model: the `MovingSource` they ran on.
    """
    traces = keyed(figure)
    steps, sensors = len(policy.designs), np.asarray(model.sensors, dtype=float)
    time = np.arange(t + 1)
    for side, trace in (("policy", policy), ("other", other)):
        for sensor, place in enumerate(sensors):
            angle = trace.designs[t - 1, sensor] if t else np.nan
            x, y = _lobe(place, angle)
            traces[f"{side}/lobe{sensor + 1}"].update(x=x, y=y)
            x, y = theme.outline(time[1:], trace.predicted[:t, 0, sensor], trace.predicted[:t, 2, sensor])
            traces[f"{side}/predicted{sensor + 1}"].update(x=x, y=y)
            traces[f"{side}/heard{sensor + 1}"].update(x=time[1:], y=trace.observations[:t, sensor])
        traces[f"{side}/sensors"].update(x=sensors[:, 0], y=sensors[:, 1])
        cloud = np.asarray(trace.position_cloud[t], dtype=float)
        traces[f"{side}/positions"].update(x=cloud[:, 0], y=cloud[:, 1])
        traces[f"{side}/path"].update(x=trace.states[: t + 1, 0], y=trace.states[: t + 1, 1])
        traces[f"{side}/source"].update(x=trace.states[t : t + 1, 0], y=trace.states[t : t + 1, 1])
        _draw_cloud(traces[f"{side}/cloud"], traces[f"{side}/region"], trace.theta_cloud[t], model.prior_box)
        traces[f"{side}/velocity"].update(x=trace.theta[:1], y=trace.theta[1:])
        traces[f"{side}/gained"].update(x=time, y=np.append(0, trace.eig_jackknife[:t].cumsum()))
    bound = np.array([model.full_state_bound(n) if n else 0.0 for n in range(steps + 1)])
    traces["bound"].update(x=np.arange(steps + 1), y=bound)

    seen = np.concatenate([policy.states[:, :2], sensors - _REACH, sensors + _REACH])
    low, high = seen.min(0), seen.max(0)
    for number in (1, 2):
        axis_of(figure, "x", number).range = (low[0], high[0])
        axis_of(figure, "y", number).range = (low[1], high[1])
    heard = np.concatenate([run.observations for run in (policy, other)])
    for number in (3, 4):
        axis_of(figure, "x", number).range = (0, steps)
        axis_of(figure, "y", number).range = (heard.min() - 0.5, heard.max() + 0.5)
    total = max(run.eig_jackknife.sum() for run in (policy, other))
    axis_of(figure, "x", 7).range = (0, steps)
    axis_of(figure, "y", 7).range = (0, nice(1.04 * max(total, bound[-1])))
    figure.layout.annotations[1].text = f"<b>{NAMES.get(other.policy, other.policy)}</b>"


def _lobe(place: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Outline of a sensor's sensitivity ((1 + cos(ξ − ψ)) / 2)⁴ around its place; NaN for an unknown angle."""
    turn = np.linspace(0, 2 * np.pi, 73)
    reach = _REACH * ((1 + np.cos(angle - turn)) / 2) ** 4
    return place[0] + reach * np.cos(turn), place[1] + reach * np.sin(turn)


def share() -> go.Figure:
    """One share of the tests for the whole outbreak: what it finds, and what it forgoes; see `draw_share`."""
    figure = place_axes([(0.0, 0.44, 0.0, 1.0), (0.56, 1.0, 0.0, 1.0)], height=theme.HEIGHT, t=56)
    for group, role in enumerate(GROUPS, 1):
        mark = dict(color=theme.tint(role, 0.6), size=5, symbol=("circle", "diamond")[group - 1])
        figure.add_scatter(meta=f"found{group}", mode="markers", marker=mark, showlegend=False, hoverinfo="skip", **at(1))
        line = dict(color=theme.ROLE[role].colour, width=2, dash=("solid", "dash")[group - 1])
        figure.add_scatter(meta=f"expected{group}", name=f"positives in group {group}", mode="lines", line=line, **at(1))
    lost = dict(fill="tozeroy", fillcolor=theme.tint("violation", 0.2), line=theme.line("violation", 1.5))
    figure.add_scatter(meta="lost", name="information forgone", mode="lines", **lost, **at(2))
    for number, title in ((1, "positive tests per step"), (2, f"forgone, mean of {WINDOW} steps (%)")):
        axis_of(figure, "x", number).title.text = "step"
        axis_of(figure, "y", number).title.text = title
    axis_of(figure, "y", 2).range = (0, 100)
    return figure


def draw_share(figure, trace, model, share: float) -> tuple[float, float]:
    """Show what a constant `share` of tests in group 1 would have found along the truth of a run with EIG curves.

    Returns:
        The sums over steps of the EIG of this share and of the best share at each step, in nats, at the run's beliefs.
    """
    traces = keyed(figure)
    steps = np.arange(1, len(trace.designs) + 1)
    infected = trace.states[1:, 1::2] / np.asarray(model.population)
    most = model.tests * infected * np.asarray(model.sensitivity)  # (T, 2) positives if the group had all tests
    luck = np.random.default_rng(0).uniform(size=most.shape)  # the same at every share
    for group, part in enumerate((share, 1 - share)):
        expected = np.maximum(part * most[:, group], 1e-9)
        traces[f"expected{group + 1}"].update(x=steps, y=expected)
        found = np.ceil(special.pdtrik(luck[:, group], expected)).clip(0)
        traces[f"found{group + 1}"].update(x=steps, y=np.nan_to_num(found))
    shares = share_of(trace.curve_designs)
    yours = np.array([np.interp(share, shares, curve) for curve in trace.curve])
    best = trace.curve.max(1)
    traces["lost"].update(x=steps, y=100 * (1 - trailing_mean(yours) / trailing_mean(best)))
    for number in (1, 2):
        axis_of(figure, "x", number).range = (0, len(steps))
    axis_of(figure, "y", 1).range = (0, nice(1.2 * most.max()))
    return float(yours.sum()), float(best.sum())


def simulator() -> go.Figure:
    """Simulated epidemics beside their noise-free limit, and the positives that tests would find; see `draw_simulator`."""
    figure = place_axes([(0.0, 0.44, 0.0, 1.0), (0.56, 1.0, 0.0, 1.0)], height=theme.HEIGHT, t=56)
    for group, role in enumerate(GROUPS, 1):
        first = dict(legendgroup=f"group{group}", hoverinfo="skip", mode="lines", **at(1))
        tint = dict(fill="toself", fillcolor=theme.tint(role, 0.2), line_width=0)
        figure.add_scatter(meta=f"band{group}", name=f"group {group}, 90 % of the paths", **tint, **first)
        line = dict(color=theme.tint(role, 0.35), width=0.8)
        figure.add_scatter(meta=f"paths{group}", showlegend=False, line=line, **first)
    for group, role in enumerate(GROUPS, 1):
        first = dict(name="no noise (ODE)", showlegend=group == 1, legendgroup="ode")
        figure.add_scatter(meta=f"ode{group}", mode="lines", line=theme.line("truth", 1.8), **first, **at(1))
        mark = dict(color=theme.ROLE[role].colour, size=4.5, symbol=("circle", "diamond")[group - 1])
        figure.add_scatter(meta=f"found{group}", mode="markers", marker=mark, showlegend=False, **at(2))
        line = dict(color=theme.ROLE[role].colour, width=1.5, dash=("solid", "dash")[group - 1])
        figure.add_scatter(meta=f"expected{group}", mode="lines", line=line, showlegend=False, hoverinfo="skip", **at(2))
    axis_of(figure, "y", 1).title.text = "infected (people)"
    axis_of(figure, "y", 2).title.text = "positive tests per step"
    for number in (1, 2):
        axis_of(figure, "x", number).title.text = "step"
    return figure


def draw_simulator(
    figure, paths: np.ndarray, ode: np.ndarray, expected: np.ndarray, found: np.ndarray, shown: int = 25
) -> None:
    """Show simulated paths.

    Args:
        paths: infected people (R, T + 1, 2) in R simulations.
        ode: their noise-free limit (T + 1, 2).
        expected, found: positives per step along the first path, (T, 2).
        shown: number of paths drawn as lines; the band holds all of them.
    """
    traces = keyed(figure)
    time = np.arange(paths.shape[1])
    low, high = np.quantile(paths, (0.05, 0.95), axis=0)
    for group in (0, 1):
        x, y = theme.outline(time, low[:, group], high[:, group])
        traces[f"band{group + 1}"].update(x=x, y=y)
        lines = np.pad(paths[:shown, :, group], ((0, 0), (0, 1)), constant_values=np.nan)
        traces[f"paths{group + 1}"].update(x=np.tile(np.append(time, np.nan), len(lines)), y=lines.ravel())
        traces[f"ode{group + 1}"].update(x=time, y=ode[:, group])
        traces[f"expected{group + 1}"].update(x=time[1:], y=expected[:, group])
        traces[f"found{group + 1}"].update(x=time[1:], y=found[:, group])


def nested_filter() -> go.Figure:
    """A nested filter at one step: parameter cloud over the reference posterior, filtered band, sample size.

    Filled by `draw_nested_filter`.
    """
    boxes = [(0.0, 0.42, 0.0, 1.0), (0.56, 1.0, 0.55, 1.0), (0.56, 1.0, 0.0, 0.33)]
    figure = place_axes(boxes, height=420, t=56)
    levels = dict(coloring="fill", start=0.1, end=0.5, size=0.4)
    greys = [(0.0, "rgba(255,255,255,0)"), (0.5, "#E0E0E0"), (1.0, "#B5B5B5")]  # outside 90 %, 50 to 90, inside 50 %
    shading = dict(contours=levels, colorscale=greys, zmin=-0.1, zmax=0.7, line=dict(width=0), showscale=False)
    figure.add_contour(meta="reference", name="reference, 50 and 90 %", showlegend=True, hoverinfo="skip", **shading, **at(1))
    mark = dict(color=theme.tint("method", 0.5), size=4, line_width=0)
    figure.add_scatter(meta="cloud", name="filter", mode="markers", marker=mark, hoverinfo="skip", **at(1))
    mark = dict(symbol="x-thin", size=10, line=dict(color=theme.ROLE["violation"].colour, width=2.5))
    figure.add_scatter(meta="rates", name="truth", mode="markers", marker=mark, **at(1))
    for group, role in enumerate(GROUPS, 1):
        tint = dict(fill="toself", fillcolor=theme.tint(role, 0.3), line_width=0, mode="lines", hoverinfo="skip")
        figure.add_scatter(meta=f"band{group}", name=f"group {group}", **tint, **at(2))
    for group in (1, 2):
        line = dict(color=theme.INK, width=1.3, dash=("solid", "dash")[group - 1])
        figure.add_scatter(meta=f"truth{group}", mode="lines", line=line, showlegend=False, hoverinfo="skip", **at(2))
    figure.add_scatter(meta="ess", mode="lines", line=theme.line("method", 1.5), showlegend=False, **at(3))
    box = dict(range=(0.08, 1.02))
    axis_of(figure, "x", 1).update(title_text="infection rate β₁ (1/time)", **box)
    axis_of(figure, "y", 1).update(title_text="recovery rate γ₁ (1/time)", **box)
    axis_of(figure, "y", 2).title.text = "infected (people)"
    axis_of(figure, "y", 3).update(title_text="ESS / M", range=(0, 1.04))
    axis_of(figure, "x", 2).update(showticklabels=False)
    axis_of(figure, "x", 3).title.text = "step"
    return figure


def draw_nested_filter(figure, clouds: list[np.ndarray], quantiles: np.ndarray, ess: np.ndarray, t: int) -> None:
    """Show step `t` of a filter's run.

    Args:
        clouds: parameter particles (M, 2) before step 1 and after each step.
        quantiles: 5, 50 and 95 % of the state, (T, 3, 4).
        ess: effective sample sizes as parts of M, (T,).
    """
    traces = keyed(figure)
    time = np.arange(1, t + 1)
    traces["cloud"].update(x=clouds[t][:, 0], y=clouds[t][:, 1])
    for group in (0, 1):
        x, y = theme.outline(time, quantiles[:t, 0, 1 + 2 * group], quantiles[:t, 2, 1 + 2 * group])
        traces[f"band{group + 1}"].update(x=x, y=y)
    traces["ess"].update(x=time, y=ess[:t])


def draw_reference(figure, axes: tuple[np.ndarray, np.ndarray], probability: np.ndarray, states: np.ndarray, theta) -> None:
    """Put what the filter is compared with into a figure of `nested_filter`: grid posterior, hidden states, true rates.

    Args:
        axes: of the grid, (G1,) and (G2,).
        probability: of its cells (G1, G2).
        states: the truth (T + 1, 4).
        theta: true (β₁, γ₁).
    """
    traces = keyed(figure)
    order = np.argsort(-probability, axis=None)
    mass = np.empty(probability.size)
    mass[order] = probability.ravel()[order].cumsum() / probability.sum()
    traces["reference"].update(x=axes[0], y=axes[1], z=1 - mass.reshape(probability.shape).T)  # plotly fills upwards
    traces["rates"].update(x=[theta[0]], y=[theta[1]])
    time = np.arange(len(states))
    for group in (0, 1):
        traces[f"truth{group + 1}"].update(x=time, y=states[:, 1 + 2 * group])
    for number in (2, 3):
        axis_of(figure, "x", number).range = (0, len(states) - 1)
    axis_of(figure, "y", 2).range = (0, nice(1.3 * states[:, 1::2].max()))


def bias() -> go.Figure:
    """Exact gain of a linear-Gaussian design beside the estimate from finite clouds: traces `exact` and `estimate`."""
    figure = theme.figure(x="design ξ (gain of the sensor)", y="expected information gain (nats)")
    figure.add_scatter(meta="exact", name="exact", mode="lines", line=theme.line("truth"))
    bars = dict(type="data", thickness=1.3, width=3)
    style = dict(mode="markers", marker=theme.marker("method", 9), error_y=bars)
    return figure.add_scatter(meta="estimate", name="estimate ± 2 s.e.", **style)


def eig_curve() -> go.Figure:
    """Expected gain of every share at one step: traces `enumerated`, `sampled` with two standard errors, and `best`."""
    figure = theme.figure(x="share of the tests given to group 1 (%)", y="expected information gain (nats)", x_range=(0, 100))
    figure.add_scatter(meta="enumerated", name="all counts enumerated", mode="lines", line=theme.line("method"))
    bars = dict(type="data", thickness=1.3, width=3)
    mark = dict(mode="markers", marker=theme.marker("baseline1", 8), error_y=bars)
    figure.add_scatter(meta="sampled", name="sampled ± 2 s.e.", **mark)
    return figure.add_scatter(meta="best", name="best share", mode="markers", marker=_now("method"))


def ascent() -> go.Figure:
    """Left, Adam's path over the gain of each share (traces `curve`, `path`, `end`); right, the spread of gradients.

    The right half has a cloud and a mean for each estimator: `score`, `score/mean`, `pathwise`, `pathwise/mean`.
    """
    figure = place_axes([(0.0, 0.56, 0.0, 1.0), (0.7, 1.0, 0.0, 1.0)], height=theme.HEIGHT, t=56)
    figure.add_scatter(meta="curve", name="gain", mode="lines", line=theme.line("reference"), **at(1))
    mark = dict(size=6, colorscale=theme.SEQUENTIAL, cmin=0, showscale=False, line=dict(color="white", width=0.5))
    figure.add_scatter(meta="path", name="Adam, dark to light", mode="markers", marker=mark, **at(1))
    figure.add_scatter(meta="end", name="design played", mode="markers", marker=_now("method"), **at(1))
    for name, role in (("score", "baseline1"), ("pathwise", "method")):
        cloud = dict(mode="markers", marker=dict(color=theme.tint(role, 0.5), size=5), showlegend=False, hoverinfo="skip")
        figure.add_scatter(meta=name, **cloud, **at(2))
        bars = dict(type="data", color="black", thickness=1.8, width=8)
        mean = dict(mode="markers", marker=dict(color="black", size=8, symbol=theme.ROLE[role].marker), error_y=bars)
        figure.add_scatter(meta=f"{name}/mean", showlegend=False, **mean, **at(2))
    axis_of(figure, "x", 1).update(title_text="tests to group 1 (%)", range=(0, 100))
    axis_of(figure, "y", 1).title.text = "expected information gain (nats)"
    kinds = dict(tickvals=(0, 1), ticktext=("score", "pathwise"), range=(-0.6, 1.6), showgrid=False)
    axis_of(figure, "x", 2).update(title_text="estimator", **kinds)
    axis_of(figure, "y", 2).title.text = "gradient, source model (nats/rad)"
    return figure


def comparison() -> go.Figure:
    """Policies in one setting: a metric with its 95 % interval (Student's t), and the paired difference to the first policy.

    Traces `values` and `differences`; see `draw_comparison`.
    """
    figure = place_axes([(0.0, 0.46, 0.0, 1.0), (0.54, 1.0, 0.0, 1.0)], height=400, l=186, t=40)
    for number, name in ((1, "values"), (2, "differences")):
        bars = dict(type="data", color=theme.INK, thickness=1.4, width=4)
        style = dict(mode="markers", error_x=bars, marker=dict(size=11, line=dict(color="white", width=1)))
        figure.add_scatter(meta=name, showlegend=False, **style, **at(number))
    figure.add_shape(type="line", x0=0, x1=0, y0=0, y1=1, xref="x2", yref="y2 domain", line=dict(color=theme.INK, width=1))
    axis_of(figure, "y", 2).update(matches="y", showticklabels=False)
    axis_of(figure, "y", 1).update(showgrid=True)
    return figure


def draw_comparison(figure, summary, pairs, metric: str) -> None:
    """Show one setting's policies.

    Args:
        summary: rows of `experiment.summarise`, one per policy.
        pairs: rows of `experiment.differences` with the same `first`, one per other policy.
        metric: a key of `METRICS`.
    """
    traces = keyed(figure)
    label = {policy: f"{NAMES[policy]} ({seeds})" for policy, seeds in zip(summary["policy"], summary["seeds"], strict=True)}
    for number, name, rows, policies in ((1, "values", summary, "policy"), (2, "differences", pairs, "second")):
        half = (interval_factor(rows["seeds"]) * rows[f"{metric}_stderr"]).fillna(0)
        traces[name].update(
            x=rows[metric],
            y=[label[policy] for policy in rows[policies]],
            error_x_array=half,
            marker_color=[theme.ROLE[POLICY_ROLES.get(policy, "reference")].colour for policy in rows[policies]],
        )
        low, high = float((rows[metric] - half).min()), float((rows[metric] + half).max())
        if name == "differences":
            low, high = min(low, 0.0), max(high, 0.0)
        pad = 0.06 * (high - low) or 0.5
        axis_of(figure, "x", number).range = (low - pad, high + pad)
    axis_of(figure, "x", 1).title.text = METRICS[metric]
    axis_of(figure, "x", 2).title.text = f"{NAMES[pairs['first'].iloc[0]]} − policy"
    order = list(label.values())[::-1]
    axis_of(figure, "y", 1).update(categoryorder="array", categoryarray=order, range=(-0.6, len(order) - 0.4))


def interval_factor(runs):
    """Standard errors to either side of a mean of `runs` values that make a 95 % interval, by Student's t; NaN for one run."""
    return special.stdtrit(runs - 1, 0.975)


def cost(methods) -> go.Figure:
    """Processor time of each step, or of all steps so far, on a logarithmic axis: one trace for each of `methods`."""
    figure = theme.figure(x="step t", y="")
    for role, method in zip(("baseline3", "method", "baseline1", "baseline2"), methods, strict=False):
        style = dict(mode="lines+markers", line=theme.line(role), marker=theme.marker(role, 6))
        figure.add_scatter(meta=method, name=method, **style)
    return figure.update_yaxes(type="log")


def draw_cost(figure, table, total: bool) -> None:
    """Show the `seconds` of each step `t` of every `method` in a table, or their running sums."""
    shown = table.assign(seconds=table.groupby("method")["seconds"].cumsum()) if total else table
    for method, trace in keyed(figure).items():
        rows = shown[shown["method"] == method]
        trace.update(x=rows["t"], y=rows["seconds"])
    low, high = np.log10(shown["seconds"].min()), np.log10(shown["seconds"].max())
    figure.layout.xaxis.range = (0, int(table["t"].max()) + 1)
    figure.layout.yaxis.range = (low - 0.3, high + 0.3)
    figure.layout.yaxis.title.text = f"processor time of {'all steps so far' if total else 'the step'} (s)"

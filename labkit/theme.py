"""One look for every figure: colours by role, a plotly template, number formats.

A colour means the same thing in every lab. The palette is Okabe and Ito's, which readers with any common
colour-vision deficiency can tell apart; each role also has its own dash and marker, so figures survive a grey printer.
Importing this module makes the template plotly's default.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

HEIGHT = 360  # px
MAP_HEIGHT = 480  # px: maps and trees
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
INK = "#222222"
GRID = "#E8E8E8"


@dataclass(frozen=True)
class Style:
    """How one role is drawn: hexadecimal colour, plotly dash, plotly marker symbol."""

    colour: str
    dash: str
    marker: str


ROLE: dict[str, Style] = {
    "method": Style("#0072B2", "solid", "circle"),  # the paper's method
    "truth": Style("#000000", "dash", "x"),  # exact values, theory
    "reference": Style("#7F7F7F", "dot", "square"),  # dense model, oracle
    "baseline1": Style("#E69F00", "dashdot", "diamond"),
    "baseline2": Style("#009E73", "longdash", "triangle-up"),
    "baseline3": Style("#56B4E9", "longdashdot", "triangle-down"),
    "baseline4": Style("#CC79A7", "8px,3px,2px,3px,2px,3px", "star"),
    "violation": Style("#D55E00", "3px,2px", "cross"),  # errors, broken constraints
}

SEQUENTIAL = "Cividis"
DIVERGING = [(0.0, "#D55E00"), (0.5, "#FFFFFF"), (1.0, "#0072B2")]

_AXIS = dict(
    gridcolor=GRID, linecolor="#BBBBBB", showline=True, zeroline=False, ticks="outside", ticklen=4, tickcolor="#BBBBBB",
    title=dict(standoff=8, font=dict(size=13)), automargin=True,
)  # fmt: skip

template = go.layout.Template(
    layout=dict(
        font=dict(family=FONT, size=13, color=INK),
        autosize=True,
        paper_bgcolor="white",
        plot_bgcolor="white",
        colorway=[style.colour for style in ROLE.values()],
        colorscale=dict(sequential=SEQUENTIAL, sequentialminus=SEQUENTIAL, diverging=DIVERGING),
        xaxis=_AXIS,
        yaxis=_AXIS,
        legend=dict(orientation="h", x=0, xanchor="left", y=1.02, yanchor="bottom", bgcolor="rgba(0,0,0,0)"),
        margin=dict(l=64, r=16, t=40, b=48),
        hoverlabel=dict(bgcolor="white", bordercolor="#BBBBBB", font=dict(family=FONT, size=13, color=INK)),
        hovermode="closest",
        uirevision="fixed",
    )
)
pio.templates["labkit"] = template
pio.templates.default = "labkit"


def figure(
    *,
    x: str,
    y: str,
    x_range: Sequence[float] | None = None,
    y_range: Sequence[float] | None = None,
    height: int = HEIGHT,
) -> go.Figure:
    """An empty figure in the common look.

    Args:
        x, y: axis titles, with units.
        x_range, y_range: fixed axis limits, low then high (decimal exponents once an axis is logarithmic).
        height: pixels.
    """
    return go.Figure(
        layout=dict(
            template=template,
            height=height,
            xaxis=dict(title=dict(text=x), range=x_range),
            yaxis=dict(title=dict(text=y), range=y_range),
        )
    )


def line(role: str, width: float = 2) -> dict:
    """Plotly `line` of a role: colour, dash and width in pixels."""
    style = ROLE[role]
    return dict(color=style.colour, dash=style.dash, width=width)


def marker(role: str, size: float = 8) -> dict:
    """Plotly `marker` of a role: colour, symbol, size in pixels, thin white rim."""
    style = ROLE[role]
    return dict(color=style.colour, symbol=style.marker, size=size, line=dict(color="white", width=0.5))


def tint(role: str, opacity: float) -> str:
    """A role's colour as CSS `rgba(...)`; opacity in [0, 1]."""
    red, green, blue = bytes.fromhex(ROLE[role].colour[1:])
    return f"rgba({red},{green},{blue},{opacity:g})"


def outline(x, low, high) -> tuple[np.ndarray, np.ndarray]:
    """The closed polygon around the area between two curves: `(x, y)`, each (2T,), for inputs (T,)."""
    x, low, high = (np.asarray(v, dtype=float) for v in (x, low, high))
    return np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])


def band(x, low, high, role: str, name: str | None = None) -> go.Scatter:
    """A 95 % band as one trace at 15 % opacity; redraw it with `outline`. Named bands enter the legend."""
    xs, ys = outline(x, low, high)
    return go.Scatter(
        x=xs, y=ys, fill="toself", fillcolor=tint(role, 0.15), line=dict(width=0), mode="lines", hoverinfo="skip",
        name=name, showlegend=name is not None,
    )  # fmt: skip


def fit_axes(figure: go.Figure) -> None:
    """Set every numeric axis to the range of the visible data on it and 5 % more on each side. Bars keep zero."""
    extents: dict[str, list[float]] = {}
    for trace in figure.data:
        if trace.visible in (False, "legendonly"):
            continue
        for letter in "xy":
            values = getattr(trace, letter, None)
            if values is None or np.asarray(values).dtype.kind not in "iuf":
                continue
            axis = figure.layout[f"{letter}axis{(getattr(trace, letter + 'axis') or letter)[1:]}"]
            values = np.asarray(values, dtype=float)
            if trace.type == "bar" and letter == ("x" if trace.orientation == "h" else "y"):
                values = np.append(values, 0.0)
            if axis.type == "log":
                values = np.log10(values[values > 0])
            extents.setdefault(axis.plotly_name, []).extend(values[np.isfinite(values)])
    for name, values in extents.items():
        if not values:
            continue
        low, high = min(values), max(values)
        pad = 0.05 * (high - low) if high > low else 0.5
        figure.layout[name].range = [low - pad, high + pad]


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def fmt(x: float, digits: int = 3) -> str:
    """A number as readers like it: significant digits, thousands separated, true minus sign; integers stay exact.

    >>> fmt(-12345.6), fmt(0.07134), fmt(4096), fmt(2.5e-7)
    ('−12,300', '0.0713', '4,096', '2.50 × 10⁻⁷')
    """
    if isinstance(x, numbers.Integral):
        text = f"{int(x):,}"
    elif math.isnan(x):
        text = "NaN"
    elif math.isinf(x):
        text = "∞" if x > 0 else "-∞"
    elif x == 0:
        text = "0"
    else:
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
        power = int(exponent)
        if -4 <= power < 7:
            text = f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - power)}f}"
        else:
            text = f"{mantissa} × 10{str(power).translate(_SUPERSCRIPT)}"
    return text.replace("-", "−")


def percent(x: float, decimals: int = 0) -> str:
    """A fraction as a percentage with a thin space: `percent(0.6)` is `60 %`."""
    return f"{100 * x:,.{decimals}f}\u202f%".replace("-", "−")


def keyed(figure: go.Figure) -> dict[str, Any]:
    """The traces of a figure by their `meta` key."""
    return {trace.meta: trace for trace in figure.data if trace.meta is not None}


def nice(top: float) -> float:
    """The next round number above `top`, so that an axis stays put when its data grow a little."""
    power = 10.0 ** math.floor(math.log10(max(top, 1e-12)))
    return power * next(step for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= 0.999999 * top)


def place_axes(boxes: Sequence[tuple[float, float, float, float]], height: int, **margin: int) -> go.Figure:
    """An empty figure with axes number 1, 2, … at given places (x0, x1, y0, y1), and margins that never move."""
    figure = go.Figure(layout=dict(template=template, height=height, margin=dict(l=58, r=12, t=44, b=46) | margin))
    small = dict(title_font_size=12, tickfont_size=11, title_standoff=4, ticklen=3, automargin=False)
    for number, (x0, x1, y0, y1) in enumerate(boxes, 1):
        suffix = "" if number == 1 else str(number)
        figure.layout[f"xaxis{suffix}"] = dict(domain=(x0, x1), anchor=f"y{suffix}", **small)
        figure.layout[f"yaxis{suffix}"] = dict(domain=(y0, y1), anchor=f"x{suffix}", **small)
    return figure


def at(number: int) -> dict[str, str]:
    """What a trace on axes `number` is given."""
    suffix = "" if number == 1 else str(number)
    return dict(xaxis=f"x{suffix}", yaxis=f"y{suffix}")


def axis_of(figure: go.Figure, letter: str, number: int) -> Any:
    """The x or y axis of that number."""
    return figure.layout[f"{letter}axis{'' if number == 1 else number}"]

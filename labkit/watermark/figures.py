"""Figures of lab 07: bits, scores and tables in, plotly figures or HTML out.

A figure with many traces is built empty once and filled by the function `draw_…` of the same name, which finds its traces
by their `meta` key. Axes keep their ranges while a control moves.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from labkit import theme
from labkit.theme import at, axis_of, keyed, place_axes

KINDS = {"watermarked": "method", "unwatermarked": "baseline1", "human": "baseline2"}
KIND_NAMES = {"watermarked": "watermarked", "unwatermarked": "same model, no watermark", "human": "human"}
DETECTORS = {
    "z": ("z at depth d", "baseline1", 1.0),
    "z_unique": ("z, distinct bigrams", "baseline1", 0.55),
    "winmax": ("WinMax", "baseline2", 1.0),
    "static+lr": ("features, one text, LR", "baseline3", 1.0),
    "static@first": ("features of the first text, LR", "baseline3", 1.0),
    "static+xgb": ("features, one text, XGBoost", "baseline3", 0.55),
    "pss+static+lr": ("PSS + features, LR", "method", 1.0),
    "pss+static+xgb": ("PSS + features, XGBoost", "method", 0.55),
    "pss+static+xgb600": ("PSS + features, 600 trees", "method", 0.55),
    "pss+z+lr": ("PSS + features + all z's", "method", 0.55),
    "compact+lr": ("features + level and slope of z", "method", 0.55),
    "pss_only": ("PSS alone, LR", "violation", 1.0),
    "z@first": ("z of the first text", "reference", 1.0),
    "z_mean": ("mean of the z's", "baseline4", 0.55),
    "lr_z": ("LR on the z's", "baseline4", 1.0),
    "cnn": ("CNN on the bits", "truth", 1.0),
    "tfidf": ("text only, no key", "truth", 0.55),
}
"""Detector → what the reader calls it, the role it is drawn in, and the opacity that tells two of one role apart."""

GREEN, RED = "#009E73", "#D55E00"
_TOP = 76  # px above the plots: two rows of legend

_CHIPS = """<style>
.labkit-text { line-height: 1.75; white-space: pre-line; overflow-wrap: anywhere; overflow-y: auto; font-size: 14px;
  color: #222; padding: 4px 10px; border-left: 4px solid #DDD; }
.labkit-text:focus-visible { outline: 2px solid #0072B2; }
.labkit-text .g { background: #BFE7DB; box-shadow: inset 0 -3px 0 #00735A; }
.labkit-text .r { background: #F9DCC8; }
.labkit-text .n { background: #EEE; }
.labkit-text .g, .labkit-text .r, .labkit-text .n { border-radius: 2px; padding: 1px 0; margin-right: 1px; }
.labkit-text .g + .g { margin-left: -1px; }
.labkit-texts { display: flex; gap: 16px; } .labkit-texts > div { flex: 1 1 0; min-width: 0; }
.labkit-texts h4 { margin: 0 0 6px 0; font-size: 14px; }
</style>"""


def chips(tokens: Sequence[str], bits: Sequence[int] | None, height: int = 0) -> str:
    """A text token by token: green ones on green and underlined, so that a run is one line; red ones on orange.

    Args:
        tokens: T + 1 pieces of text.
        bits: T zeros and ones for all but the first token; None leaves the text plain.
        height: of the box in pixels, which then scrolls; 0 lets it grow.

    Returns:
        HTML; the pointer over a token shows the pair that its colour hangs on, and the length of its run.
    """
    size = f'tabindex="0" role="region" aria-label="text" style="height:{height}px"' if height else ""
    shown = [html.escape(token).replace("\n", "⏎\n") for token in tokens]
    if bits is None:
        return f'{_CHIPS}<div class="labkit-text" {size}>{"".join(shown)}</div>'
    if len(bits) != len(tokens) - 1:
        raise ValueError(f"bits: {len(bits)} of them for {len(tokens)} tokens; every token but the first has one")
    runs = run_of_each(np.asarray(bits))
    pieces = [f'<span class="n" title="first token: not scored">{shown[0]}</span>']
    for t, (bit, run) in enumerate(zip(bits, runs, strict=True), 1):
        pair = html.escape(f"{tokens[t - 1]!r} → {tokens[t]!r}: {'green' if bit else 'red'}, run of {run}", quote=True)
        pieces.append(f'<span class="{"g" if bit else "r"}" title="{pair}">{shown[t]}</span>')
    return f'{_CHIPS}<div class="labkit-text" {size}>{"".join(pieces)}</div>'


def beside(texts: Mapping[str, str]) -> str:
    """Blocks of HTML next to each other, each under its title."""
    blocks = "".join(f"<div><h4>{title}</h4>{text}</div>" for title, text in texts.items())
    return f'<div class="labkit-texts">{blocks}</div>'


def run_of_each(bits: np.ndarray) -> np.ndarray:
    """For each bit (T,) the length of the run of equal bits around it (T,)."""
    starts = np.flatnonzero(np.diff(bits, prepend=bits[:1] ^ 1))
    return np.repeat(np.diff(starts, append=len(bits)), np.diff(starts, append=len(bits)))


def _titled(boxes: Sequence[tuple[float, float, float, float]], titles: Sequence[tuple[str, str]], height: int) -> go.Figure:
    figure = place_axes(boxes, height, t=_TOP)
    for number, (x, y) in enumerate(titles, 1):
        axis_of(figure, "x", number).title.text, axis_of(figure, "y", number).title.text = x, y
    return figure


def _band(figure: go.Figure, key: str, role: str, number: int, opacity: float = 0.15) -> None:
    figure.add_scatter(
        meta=key, fill="toself", fillcolor=theme.tint(role, opacity), line_width=0, mode="lines", hoverinfo="skip",
        showlegend=False, **at(number),
    )  # fmt: skip


def auc_curves(detectors: Sequence[str], depth: int = 8) -> go.Figure:
    """AUC of detectors against the depth of paraphrase, and their ROC at one depth; see `draw_auc_curves`."""
    boxes = [(0, 0.6, 0, 1), (0.7, 1, 0, 1)]
    titles = [("paraphrase depth d", "AUC"), ("false positive rate", "true positive rate")]
    figure = _titled(boxes, titles, 440)
    for name in detectors:
        _band(figure, f"{name}/band", DETECTORS[name][1], 1, 0.1)
    chance = dict(mode="lines", line=dict(color="#BBBBBB", width=1), hoverinfo="skip", showlegend=False)
    figure.add_scatter(x=[0, 1], y=[0, 1], **chance, **at(2))
    figure.add_scatter(x=[-1, depth + 1], y=[0.5, 0.5], **chance, **at(1))
    for name in detectors:
        label, role, opacity = DETECTORS[name]
        style = dict(line=theme.line(role, 2.5 if role == "method" else 2), opacity=opacity, legendgroup=name)
        hover = dict(
            hovertemplate="depth %{x}: AUC %{y:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra>" + label + "</extra>"
        )
        marker = theme.marker(role, 8)
        figure.add_scatter(meta=f"{name}/auc", name=label, mode="lines+markers", marker=marker, **style, **hover, **at(1))
        figure.add_scatter(meta=f"{name}/roc", mode="lines", showlegend=False, hoverinfo="skip", **style, **at(2))
    cursor = dict(mode="lines", line=dict(color=theme.INK, width=1.2), hoverinfo="skip", showlegend=False)
    figure.add_scatter(meta="cursor", **cursor, **at(1))
    axis_of(figure, "x", 1).update(range=(-0.3, depth + 0.3), dtick=1)
    axis_of(figure, "y", 1).update(range=(0.43, 1.02))
    for letter in "xy":
        axis_of(figure, letter, 2).update(range=(-0.01, 1.01))
    return figure.update_layout(legend_font_size=12)


def draw_auc_curves(figure: go.Figure, curves: Mapping[str, pd.DataFrame], rocs: Mapping[str, np.ndarray], depth: int) -> None:
    """Show curves.

    Args:
        curves: by detector, columns `depth`, `auc`, `lo` and `hi`; a detector that is missing is not shown.
        rocs: by detector, false and true positive rates (2, P) at `depth`.
        depth: of the cursor.
    """
    for key, trace in keyed(figure).items():
        name, _, what = key.partition("/")
        if what == "roc":
            roc = rocs.get(name)
            trace.update(x=[None], y=[None]) if roc is None else trace.update(x=roc[0], y=roc[1])
        elif what and (rows := curves.get(name)) is None:
            trace.update(x=[None], y=[None], visible=False)
        elif what == "auc":
            trace.update(x=rows["depth"], y=rows["auc"], customdata=rows[["lo", "hi"]].to_numpy(), visible=True)
        elif what == "band":
            x, y = theme.outline(rows["depth"], rows["lo"], rows["hi"])
            trace.update(x=x, y=y, visible=True)
        else:
            trace.update(x=[depth, depth], y=figure.layout.yaxis.range)


def make_one(shown: int = 12) -> go.Figure:
    """A next-token distribution before and after the bias, and P(green) of many; see `draw_make_one`."""
    boxes = [(0.1, 0.5, 0, 1), (0.62, 1, 0, 1)]
    figure = _titled(boxes, [("probability of the next token", ""), ("spike entropy S", "P(green)")], 440)
    for key, name, colour in (("green", "on the green list", GREEN), ("red", "not on it", RED)):
        pattern = dict(shape="" if key == "green" else "/", fillmode="overlay", fgcolor="white", size=7, solidity=0.2)
        bar = dict(orientation="h", marker_color=colour, marker_pattern=pattern, hoverinfo="x", width=0.72)
        figure.add_bar(meta=key, name=name, **bar, **at(1))
    before = dict(mode="markers", marker=dict(symbol="line-ns", size=15, line=dict(color=theme.INK, width=2.5)), hoverinfo="x")
    figure.add_scatter(meta="before", name="without δ", **before, **at(1))
    dot = dict(mode="markers", hovertemplate="%{text}<br>S = %{x:.2f}, P(green) = %{y:.2f}<extra></extra>")
    marks = dict(marker=theme.marker("method", 8))
    figure.add_scatter(meta="contexts", name="P(green), mean over lists", **dot, **marks, **at(2))
    figure.add_scatter(meta="bound", name="lower bound", mode="lines", line=theme.line("truth"), hoverinfo="skip", **at(2))
    flat = dict(mode="lines", line=theme.line("reference"), hoverinfo="skip")
    figure.add_scatter(meta="uniform", name="all tokens equally likely", **flat, **at(2))
    here = dict(mode="markers", marker=dict(symbol="circle-open", size=16, color=theme.INK, line_width=2.5))
    figure.add_scatter(meta="here", showlegend=False, hoverinfo="skip", **here, **at(2))
    axis_of(figure, "x", 1).update(range=(0, 1))
    axis_of(figure, "y", 1).update(range=(shown - 0.4, -0.6), showgrid=False, tickmode="array", tickvals=list(range(shown)))
    axis_of(figure, "x", 2).update(range=(0, 1.02))
    axis_of(figure, "y", 2).update(range=(0, 1.02))
    return figure.update_layout(barmode="overlay")


def draw_make_one(
    figure: go.Figure,
    tokens: Sequence[str],
    before: np.ndarray,
    after: np.ndarray,
    green: np.ndarray,
    prompts: Sequence[str],
    entropies: np.ndarray,
    rates: np.ndarray,
    here: int,
    uniform: float,
) -> None:
    """Show one context among C.

    Args:
        tokens: of the chosen context, the likeliest K first; `before` and `after`, (K,), are their probabilities without and
            with the bias, and `green` (K,) says which are on the green list.
        prompts: of all contexts.
        entropies, rates: spike entropy and mean P(green) of each context (C,).
        here: index of the chosen context.
        uniform: P(green) of equally likely tokens, and slope of the bound, a line through the origin.
    """
    traces = keyed(figure)
    rows = np.arange(len(tokens))
    traces["green"].update(x=np.where(green, after, 0), y=rows)
    traces["red"].update(x=np.where(green, 0, after), y=rows)
    traces["before"].update(x=before, y=rows)
    axis_of(figure, "y", 1).ticktext = [html.escape(visible(token)) for token in tokens]
    traces["contexts"].update(x=entropies, y=rates, text=[html.escape(prompt) for prompt in prompts])
    traces["here"].update(x=entropies[here : here + 1], y=rates[here : here + 1])
    traces["bound"].update(x=[0, 1], y=[0, uniform])
    traces["uniform"].update(x=[0, 1.02], y=[uniform, uniform])


def visible(token: str) -> str:
    """A token as text in which its spaces and line breaks can be seen."""
    return token.replace(" ", "␣").replace("\n", "⏎") or "∅"


Z_RANGE = (-5.0, 20.0)


def z_test() -> go.Figure:
    """Histograms of z by class, with the normal curves of independent bits, and the ROC; see `draw_z_test`."""
    titles = [("z", "share of texts per unit of z"), ("false positive rate", "true positive rate")]
    figure = _titled([(0, 0.6, 0, 1), (0.7, 1, 0, 1)], titles, 440)
    for kind, role in KINDS.items():
        step = dict(fill="tozeroy", fillcolor=theme.tint(role, 0.25), line=theme.line(role, 1.8) | dict(shape="hv"))
        hover = dict(hovertemplate="z from %{x:.1f}: %{y:.2f}<extra></extra>")
        figure.add_scatter(meta=f"{kind}/bars", name=KIND_NAMES[kind], mode="lines", **step, **hover, **at(1))
    for key in ("null", "alternative"):
        name = dict(name="closed form", legendgroup="theory", showlegend=key == "null")
        figure.add_scatter(meta=key, mode="lines", line=theme.line("truth", 1.8), hoverinfo="skip", **name, **at(1))
    for kind in ("unwatermarked", "human"):
        curve = dict(mode="lines", line=theme.line(KINDS[kind], 2.5), showlegend=False)
        figure.add_scatter(meta=f"{kind}/roc", hovertemplate="FPR %{x:.2f}: TPR %{y:.2f}<extra></extra>", **curve, **at(2))
    figure.add_scatter(meta="theory", mode="lines", line=theme.line("truth", 1.8), showlegend=False, hoverinfo="skip", **at(2))
    line = dict(mode="lines", line=theme.line("violation", 1.6), hoverinfo="skip")
    figure.add_scatter(meta="threshold", name="threshold 4", **line, **at(1))
    axis_of(figure, "x", 1).update(range=Z_RANGE, dtick=2)
    axis_of(figure, "y", 1).update(range=(0, 0.62))
    for letter in "xy":
        axis_of(figure, letter, 2).update(range=(-0.01, 1.01))
    return figure


def draw_z_test(
    figure: go.Figure,
    edges: np.ndarray,
    scores: Mapping[str, np.ndarray],
    rocs: Mapping[str, np.ndarray],
    curves: Mapping[str, np.ndarray],
    theory: np.ndarray,
) -> None:
    """Show z scores.

    Args:
        edges: of the bins (B + 1,); between two of them lies the same number of possible values.
        scores: z by kind of text, (n,) each.
        rocs: false and true positive rates (2, P) against each kind of negatives.
        curves: `z` (G,) and the densities `null` and `alternative` of independent bits.
        theory: (2, G), the ROC of the closed form.
    """
    traces = keyed(figure)
    for kind, z in scores.items():
        share = np.histogram(z, edges)[0] / (len(z) * np.diff(edges))
        traces[f"{kind}/bars"].update(x=edges, y=[*share, 0])
    for kind, roc in rocs.items():
        traces[f"{kind}/roc"].update(x=roc[0], y=roc[1])
    for key in ("null", "alternative"):
        traces[key].update(x=curves["z"], y=curves[key])
    traces["theory"].update(x=theory[0], y=theory[1])
    traces["threshold"].update(x=[4, 4], y=axis_of(figure, "y", 1).range)


def chain(depth: int = 8) -> go.Figure:
    """What is left of a text's bigrams and of its z along a chain of paraphrases; see `draw_chain`."""
    titles = [("paraphrase depth d", "bigrams of the original left"), ("paraphrase depth d", "z")]
    figure = _titled([(0, 0.44, 0, 1), (0.56, 1, 0, 1)], titles, 330)
    bar = dict(marker_color=theme.tint("baseline3", 0.7), hovertemplate="depth %{x}: %{y:.0%}<extra></extra>")
    figure.add_bar(meta="survival", name="survival: this text", **bar, **at(1))
    mean = dict(mode="lines+markers", line=theme.line("reference"), marker=theme.marker("reference", 7))
    figure.add_scatter(meta="mean survival", name="mean of all texts", **mean, hoverinfo="skip", **at(1))
    for kind in ("watermarked", "unwatermarked", "human"):
        _band(figure, f"{kind}/band", KINDS[kind], 2)
        line = dict(mode="lines", line=theme.line(KINDS[kind]), hoverinfo="skip")
        figure.add_scatter(meta=f"{kind}/z", name=f"mean z, {KIND_NAMES[kind]}", **line, **at(2))
    product = dict(mode="lines", line=theme.line("truth", 1.8), hoverinfo="skip")
    figure.add_scatter(meta="predicted", name="mean z at 0 × mean survival", **product, **at(2))
    this = dict(
        mode="markers", marker=dict(theme.marker("violation", 9)), hovertemplate="depth %{x}: z = %{y:.2f}<extra></extra>"
    )
    figure.add_scatter(meta="z", name="z: this text", **this, **at(2))
    ring = dict(mode="markers", marker=dict(symbol="circle-open", size=16, color=theme.INK, line_width=2.5))
    for number in (1, 2):
        figure.add_scatter(meta=f"here{number}", showlegend=False, hoverinfo="skip", **ring, **at(number))
        axis_of(figure, "x", number).update(range=(-0.5, depth + 0.5), dtick=1)
    axis_of(figure, "y", 1).update(range=(0, 1.06), tickformat=".0%")
    return figure


def draw_chain(figure: go.Figure, survival: np.ndarray, z: np.ndarray, means: pd.DataFrame, depth: int) -> None:
    """Show one chain.

    Args:
        survival, z: of the chosen text at depths 0 … D, (D + 1,).
        means: one row per depth and `kind`: `depth`, `kind`, `z`, its standard error `z_se`, and `survival`.
        depth: that is marked.
    """
    traces = keyed(figure)
    depths = np.arange(len(z))
    traces["survival"].update(x=depths, y=survival)
    traces["z"].update(x=depths, y=z)
    for kind, rows in means.groupby("kind"):
        x, y, half = rows["depth"], rows["z"], 1.96 * rows["z_se"]
        traces[f"{kind}/z"].update(x=x, y=y)
        outline = theme.outline(x, y - half, y + half)
        traces[f"{kind}/band"].update(x=outline[0], y=outline[1])
    marked = means[means["kind"] == "watermarked"].sort_values("depth")
    traces["mean survival"].update(x=marked["depth"], y=marked["survival"])
    traces["predicted"].update(x=marked["depth"], y=marked["survival"] * marked["z"].iloc[0])
    traces["here1"].update(x=[depth], y=survival[depth : depth + 1])
    traces["here2"].update(x=[depth], y=z[depth : depth + 1])


def local_view() -> go.Figure:
    """Windows of a text with their z, above its bits; see `draw_local_view`."""
    titles = [("", "z of the window"), ("token", "")]
    figure = _titled([(0, 1, 0.22, 1), (0, 1, 0, 0.13)], titles, 400)
    spans = dict(mode="lines", line=dict(color=theme.tint("method", 0.45), width=4), hoverinfo="skip")
    figure.add_scatter(meta="spans", name="windows", **spans, **at(1))
    trace = dict(mode="lines+markers", line=theme.line("method", 2), marker=theme.marker("method", 8))
    hover = (
        "tokens %{customdata[0]} to %{customdata[1]}: z = %{y:.2f}<br>"
        "longest run %{customdata[2]}, %{customdata[3]} of them<extra></extra>"
    )
    figure.add_scatter(meta="local", name="local z", hovertemplate=hover, **trace, **at(1))
    whole = dict(mode="lines", line=theme.line("baseline1", 2), hoverinfo="skip")
    figure.add_scatter(meta="global", name="z of the whole text", **whole, **at(1))
    best = dict(mode="lines", line=theme.line("baseline2", 3), hoverinfo="skip")
    figure.add_scatter(meta="winmax", name="WinMax: the best window", **best, **at(1))
    scale = [(0, "#F9DCC8"), (0.5, "#F9DCC8"), (0.5, GREEN), (1, GREEN)]
    strip = dict(zmin=0, zmax=1, colorscale=scale, showscale=False, hovertemplate="token %{x}: %{z}<extra></extra>")
    figure.add_heatmap(meta="bits", z=[[0]], **strip, **at(2))
    axis_of(figure, "y", 2).update(showticklabels=False, ticks="", showgrid=False, title_text="bits")
    axis_of(figure, "x", 1).update(showticklabels=False)
    return figure


def draw_local_view(
    figure: go.Figure,
    bits: np.ndarray,
    windows: np.ndarray,
    local: Mapping[str, np.ndarray],
    z: float,
    best: tuple[int, int, float],
) -> None:
    """Show one text.

    Args:
        bits: (T,).
        windows: (m, 2), half-open.
        local: `z`, `run` and `freq` of the windows, (m,) each.
        z: of the whole text.
        best: first and last token and z of WinMax's window.
    """
    traces = keyed(figure)
    a, f = windows.T
    gap = np.full(len(a), np.nan)
    traces["spans"].update(x=np.stack([a + 0.5, f + 0.5, gap], 1).ravel(), y=np.repeat(local["z"], 3))
    data = np.stack([a + 1, f, local["run"], local["freq"]], axis=1)
    traces["local"].update(x=(a + f + 1) / 2, y=local["z"], customdata=data)
    traces["global"].update(x=[0.5, len(bits) + 0.5], y=[z, z])
    traces["winmax"].update(x=[best[0] + 0.5, best[1] + 0.5], y=[best[2]] * 2)
    traces["bits"].update(x=np.arange(1, len(bits) + 1), y=[0], z=bits[None].astype(int))
    for number in (1, 2):
        axis_of(figure, "x", number).range = (0, len(bits) + 1)


_FEATURE_RANGE = (-4, 8)


def features(names: Sequence[str], depth: int = 8) -> go.Figure:
    """Class distributions of features with one text marked, and how well each alone separates; see `draw_features`."""
    titles = [("distance from the median of all texts, in spreads", ""), ("paraphrase depth d", "")]
    figure = _titled([(0.06, 0.66, 0, 1), (0.7, 0.93, 0, 1)], titles, 600)
    for kind, role in (("watermarked", "method"), ("negatives", "baseline1")):
        hill = dict(fill="toself", fillcolor=theme.tint(role, 0.55), line=dict(color=theme.ROLE[role].colour, width=1))
        figure.add_scatter(meta=kind, name=kind, mode="lines", hoverinfo="skip", **hill, **at(1))
    dot = dict(mode="markers", marker=theme.marker("violation", 10))
    hover = dict(hovertemplate="%{customdata[0]} = %{customdata[1]:.3g}<extra></extra>")
    figure.add_scatter(meta="text", name="the chosen text", **dot, **hover, **at(1))
    bar = dict(title=dict(text="AUC", side="top"), thickness=12, len=0.6, tickvals=[0, 0.5, 1])
    square = dict(zmin=0, zmax=1, colorscale=theme.DIVERGING, colorbar=bar, xgap=1, ygap=1)
    hover = dict(hovertemplate="%{text} at depth %{x}: AUC %{z:.2f}<extra></extra>")
    figure.add_heatmap(meta="auc", z=[[0.5]], **square, **hover, **at(2))
    edge = dict(mode="lines", line=dict(color=theme.INK, width=2), hoverinfo="skip", showlegend=False)
    figure.add_scatter(meta="here", **edge, **at(2))
    rows = dict(tickvals=list(range(len(names))), ticktext=list(names), range=(len(names) - 0.1, -0.9), showgrid=False)
    axis_of(figure, "x", 1).update(range=_FEATURE_RANGE)
    axis_of(figure, "y", 1).update(rows)
    axis_of(figure, "x", 2).update(range=(-0.5, depth + 0.5), dtick=1, showgrid=False)
    axis_of(figure, "y", 2).update(rows, showticklabels=False, ticks="")
    return figure


def draw_features(
    figure: go.Figure, classes: Mapping[str, pd.DataFrame], text: pd.Series, scale: pd.DataFrame, aucs: pd.DataFrame, depth: int
) -> None:
    """Show features.

    Args:
        classes: features (n, F) of the `watermarked` texts and of the `negatives`.
        text: features of the chosen text (F,).
        scale: rows `centre` and `spread` of all texts, by feature.
        aucs: of each feature alone, rows features and columns depths.
        depth: that is marked.
    """
    traces, rows = keyed(figure), np.arange(len(text))
    centre, spread = scale.loc["centre"], scale.loc["spread"].replace(0, 1)
    for kind, up in (("watermarked", -1), ("negatives", 1)):
        x, y = _hills(((classes[kind] - centre) / spread).to_numpy(), up)
        traces[kind].update(x=x, y=y)
    data = list(zip(text.index, text, strict=True))
    traces["text"].update(x=((text - centre) / spread).clip(*_FEATURE_RANGE).to_numpy(), y=rows, customdata=data)
    names = [[name] * aucs.shape[1] for name in aucs.index]
    traces["auc"].update(x=list(aucs.columns), y=rows, z=aucs.to_numpy().round(3), text=names)
    low, high, bottom = depth - 0.5, depth + 0.5, len(rows) - 0.5
    traces["here"].update(x=[low, high, high, low, low], y=[-0.5, -0.5, bottom, bottom, -0.5])


def _hills(scores: np.ndarray, up: int, width: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed densities of the columns of scores (n, F), each a polygon on a row of its own, apart from each other by NaN."""
    grid = np.linspace(*_FEATURE_RANGE, 121)
    kernel = np.exp(-0.5 * ((grid[:, None, None] - np.clip(scores, *_FEATURE_RANGE)) / width) ** 2)  # (G, n, F)
    density = kernel.mean(1).T
    height = 0.75 * density / density.max(1, keepdims=True)
    base = np.arange(len(height))[:, None] + np.zeros_like(height)
    y = np.concatenate([base + up * height, base, np.full((len(height), 1), np.nan)], axis=1)
    return np.tile([*grid, *grid[::-1], np.nan], len(height)), y.ravel().round(3)


def channel(depth: int = 8) -> go.Figure:
    """AUC on synthetic bits whose paraphraser redraws at random, with the closed form; see `draw_channel`."""
    boxes, titles = [(0, 0.6, 0, 1), (0.7, 1, 0, 1)], [("paraphrase depth d", "AUC"), ("round", "one text's bits")]
    figure = _titled(boxes, titles, 420)
    for name in ("z", "winmax", "z_mean", "lr_z", "z@first"):
        label, role, opacity = DETECTORS[name]
        style = dict(
            mode="lines+markers", line=theme.line(role), marker=theme.marker(role, 8), opacity=opacity, connectgaps=True
        )
        figure.add_scatter(
            meta=name, name=label, hovertemplate="depth %{x}: %{y:.3f}<extra>" + label + "</extra>", **style, **at(1)
        )
    for name in ("static+lr", "pss+static+lr"):
        label, role, _ = DETECTORS[name]
        dots = dict(mode="markers", marker=dict(theme.marker(role, 13), line=dict(color=theme.INK, width=1.2)))
        figure.add_scatter(meta=name, name=f"{label} (stored)", **dots, **at(1))
    figure.add_scatter(
        meta="theory", name="closed form for z", mode="lines", line=theme.line("truth"), hoverinfo="skip", **at(1)
    )
    scale = [(0, "#F9DCC8"), (0.5, "#F9DCC8"), (0.5, GREEN), (1, GREEN)]
    figure.add_heatmap(
        meta="bits", z=[[0]], zmin=0, zmax=1, colorscale=scale, showscale=False, ygap=2, hoverinfo="skip", **at(2)
    )
    axis_of(figure, "x", 1).update(range=(-0.3, depth + 0.3), dtick=1)
    axis_of(figure, "y", 1).update(range=(0.43, 1.02))
    axis_of(figure, "x", 2).update(title_text="token")
    axis_of(figure, "y", 2).update(title_text="round", range=(depth + 0.5, -0.5), dtick=1)
    return figure


def draw_channel(
    figure: go.Figure, aucs: pd.DataFrame, theory: np.ndarray, bits: np.ndarray, stored: Mapping[str, pd.DataFrame]
) -> None:
    """Show one setting of the channel.

    Args:
        aucs: rows depths, a column per detector.
        theory: closed form for z at each depth (D + 1,).
        bits: of one watermarked text at each depth (D + 1, T).
        stored: classifiers' AUC by detector, columns `depth` and `auc`; empty where this setting was not measured.
    """
    traces = keyed(figure)
    for name in aucs:
        traces[name].update(x=list(aucs.index), y=aucs[name].to_numpy())
    traces["theory"].update(x=np.arange(len(theory)), y=theory)
    traces["bits"].update(x=np.arange(1, bits.shape[1] + 1), y=np.arange(len(bits)), z=bits.astype(int))
    axis_of(figure, "x", 2).range = (0.5, bits.shape[1] + 0.5)
    for name in ("static+lr", "pss+static+lr"):
        rows = stored.get(name)
        traces[name].update(x=[None] if rows is None else rows["depth"], y=[None] if rows is None else rows["auc"])


def transfer() -> go.Figure:
    """A heat map of AUC by what was trained on (rows) and what was tested on (columns); see `draw_transfer`."""
    figure = theme.figure(x="tested on", y="trained on", height=560)
    bar = dict(title=dict(text="AUC", side="top"), thickness=12, len=0.6)
    hover = "trained on %{customdata[0]}<br>tested on %{customdata[1]}<br>AUC %{z:.3f}<extra></extra>"
    cell = dict(zmin=0.5, zmax=1, colorscale=theme.SEQUENTIAL, colorbar=bar, xgap=1, ygap=1, texttemplate="%{text}")
    figure.add_heatmap(meta="auc", z=[[0.5]], hovertemplate=hover, textfont_size=10, **cell)
    ring = dict(symbol="square-open", size=24, color=theme.ROLE["violation"].colour, line_width=2)
    name = "domain, paraphraser and model all differ"
    figure.add_scatter(meta="all differ", name=name, mode="markers", marker=ring, hoverinfo="skip")
    groups = dict(mode="lines", line=dict(color=theme.INK, width=1.5), hoverinfo="skip", showlegend=False)
    figure.add_scatter(meta="groups", **groups)
    quiet = dict(tickfont_size=11, showgrid=False, ticks="")
    return figure.update_xaxes(quiet, tickangle=0).update_yaxes(quiet)


def draw_transfer(figure: go.Figure, table: pd.DataFrame, apart: np.ndarray) -> None:
    """Show one detector.

    Args:
        table: AUC, rows trained on and columns tested on, both with two levels: paraphraser and model, then domain.
        apart: bool of the same shape, the cells in which everything differs.
    """
    traces = keyed(figure)
    rows, columns = ([", ".join(cell) for cell in index] for index in (table.index, table.columns))
    names = np.stack(np.broadcast_arrays(np.array(rows)[:, None], np.array(columns)), axis=-1)
    hundredths = table.map(lambda auc: "" if pd.isna(auc) else f"{100 * auc:.0f}").to_numpy()
    place = dict(x=np.arange(len(columns)), y=np.arange(len(rows)))
    traces["auc"].update(**place, z=table.to_numpy(), text=hundredths, customdata=names)
    row, column = np.nonzero(apart)
    traces["all differ"].update(x=column, y=row)
    bottom, right = len(rows) - 0.5, len(columns) - 0.5
    lines = [((-0.5, right, None), (k, k, None)) for k in _borders(table.index)]
    lines += [((k, k, None), (-0.5, bottom, None)) for k in _borders(table.columns)]
    traces["groups"].update(x=[x for line in lines for x in line[0]], y=[y for line in lines for y in line[1]])
    figure.layout.xaxis.update(range=(-0.5, right), **_group_ticks(table.columns, _below))
    figure.layout.yaxis.update(range=(bottom, -0.5), **_group_ticks(table.index, "<b>{}</b>  {}".format))


def _borders(index: pd.MultiIndex) -> list[float]:
    """Where one group of an axis ends and the next begins."""
    groups = index.get_level_values(0)
    return [k - 0.5 for k in range(1, len(groups)) if groups[k] != groups[k - 1]]


def _below(group: str, name: str) -> str:
    return f"{name[0].upper()}<br><b>{group.replace(', ', '<br>').replace(' + ', ' +<br>')}</b>"


def _group_ticks(index: pd.MultiIndex, middle: Callable[[str, str], str]) -> dict:
    """Ticks with the second level; the one in the middle of a group is made of both."""
    groups = index.get_level_values(0)
    centre = {group: int(np.flatnonzero(groups == group).mean()) for group in groups}
    text = [middle(*cell) if centre[cell[0]] == k else middle("", cell[1]) for k, cell in enumerate(index)]
    return dict(tickvals=list(range(len(index))), ticktext=text)


def intervals(table: pd.DataFrame, group: str, x: str, reference: float) -> go.Figure:
    """Estimates with 95 % intervals, one row per detector, one colour per group.

    Args:
        table: columns `detector`, `group`, `x`, `lo` and `hi`.
        group: column that is told apart by colour.
        x: column of the estimate, which names the axis.
        reference: where a vertical line stands.
    """
    detectors = list(dict.fromkeys(table["detector"]))
    groups = list(dict.fromkeys(table[group]))
    figure = theme.figure(x=x, y="", height=80 + 26 * (len(detectors) * len(groups) + 2))
    roles = ("method", "violation", "baseline1", "baseline2", "baseline3", "baseline4")
    for number, (name, role) in enumerate(zip(groups, roles, strict=False)):
        rows = table[table[group] == name]
        shift = 0.6 * ((number + 0.5) / len(groups) - 0.5)
        y = [detectors.index(detector) + shift for detector in rows["detector"]]
        reach = dict(type="data", array=rows["hi"] - rows[x], arrayminus=rows[x] - rows["lo"], thickness=1.6, width=4)
        dots = dict(mode="markers", marker=theme.marker(role, 9), error_x=reach, hovertemplate="%{x:.3f}<extra></extra>")
        figure.add_scatter(x=rows[x], y=y, name=str(name), **dots)
    figure.add_vline(x=reference, line=dict(color="#888888", width=1, dash="dash"))
    ticks = [DETECTORS[name][0] if name in DETECTORS else name for name in detectors]
    return figure.update_yaxes(tickvals=list(range(len(detectors))), ticktext=ticks, range=(len(detectors) - 0.4, -0.6))

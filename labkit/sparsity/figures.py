"""Figures of the sparsity lab: results in, plotly figures out."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit import theme
from labkit.sparsity import theory

ROLES = {
    "dense": "reference",
    "spon": "method",
    "teal": "baseline1",
    "greedy": "baseline2",
    "wina": "baseline3",
    "mean-residual": "baseline4",
    "random": "violation",
}
NAMES = {
    "dense": "dense",
    "spon": "SPON",
    "teal": "TEAL",
    "greedy": "greedy TEAL",
    "wina": "WINA",
    "mean-residual": "mean residual",
    "random": "random mask",
    "random-rescaled": "random mask, rescaled",
    "greedy+spon": "greedy + SPON",
    "wina+spon": "WINA + SPON",
}
CURVES = tuple(method for method in ROLES if method != "random")  # a random mask is orders of magnitude off the chart
METRICS = {
    "perplexity": "Perplexity (held-out wiki)",
    "extra_nll": "Extra NLL over dense (nats per token)",
    "kl": "KL from dense (nats per token)",
    "agreement": "Top-1 agreement with dense (share)",
}


def next_token_bars() -> go.Figure:
    """Probability of ten next tokens under the dense, the sparse and the SPON model: three empty bar traces."""
    figure = theme.figure(x="Probability of the next token", y="", x_range=(0, 1), height=420)
    for method in ("spon", "teal", "dense"):
        bars = go.Bar(orientation="h", name=NAMES[method], marker_color=theme.ROLE[ROLES[method]].colour)
        figure.add_trace(bars.update(marker_pattern_shape="/" if method == "teal" else ""))
    return figure.update_layout(barmode="group", bargap=0.25, legend_traceorder="reversed").update_yaxes(autorange="reversed")


def layer() -> go.Figure:
    """Left, a site's activations with its threshold; right, the output error that masking costs. Empty traces.

    Traces: 0 histogram, 1 Gaussian, 2 Laplace, 3 threshold; 4 to 6 error by score, 7 and 8 theory, 9 cursor.
    """
    figure = make_subplots(1, 2, horizontal_spacing=0.12).update_layout(template=theme.template, height=400)
    figure.add_bar(name="activations", marker_color=theme.tint("reference", 0.6), row=1, col=1)
    curves = [("Gaussian", "truth"), ("Laplace", "baseline4")]
    for name, role in curves:
        figure.add_scatter(name=name, mode="lines", line=theme.line(role), row=1, col=1)
    figure.add_scatter(name="threshold ±τ", mode="lines", line=theme.line("violation"), row=1, col=1)
    for score, role in (("magnitude", "baseline1"), ("wina", "baseline3"), ("random", "violation")):
        name = {"magnitude": "TEAL", "wina": "WINA", "random": "random mask"}[score]
        figure.add_scatter(name=name, mode="lines+markers", line=theme.line(role), marker=theme.marker(role, 6), row=1, col=2)
    for name, role in (("Gaussian theory", "truth"), ("√p", "reference")):
        figure.add_scatter(name=name, mode="lines", line=theme.line(role), showlegend=name == "√p", row=1, col=2)
    figure.add_scatter(name="here", mode="markers", marker=theme.marker("method", 13), showlegend=False, row=1, col=2)
    figure.update_xaxes(title_text="Activation x (standard deviations)", range=(-4, 4), row=1, col=1)
    figure.update_yaxes(title_text="Density", range=(0, 1.6), row=1, col=1)
    figure.update_xaxes(title_text="Sparsity p", range=(0, 0.95), row=1, col=2)
    figure.update_yaxes(title_text="Relative output error", range=(0, 1), row=1, col=2)
    return figure.update_layout(bargap=0, margin_t=64)


def density_curves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian and Laplace densities of unit variance at x, for the overlay."""
    return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), np.exp(-np.sqrt(2) * abs(x)) / np.sqrt(2)


def quality(table: pd.DataFrame, metric: str = "perplexity", domain: str = "wiki") -> go.Figure:
    """A quality metric against sparsity, one curve per method with 95 % bands, from `experiment.summarise`.

    Traces: for each method in `CURVES` a band and a curve; last, the cursor.
    """
    figure = theme.figure(x="Sparsity p (share of inputs zeroed)", y=METRICS[metric], x_range=(0.26, 0.74))
    for method in CURVES:
        role = ROLES[method]
        x, y, half = quality_curve(table, method, metric, domain)
        figure.add_trace(theme.band(x, y - half, y + half, role))
        style = dict(line=theme.line(role), marker=theme.marker(role))
        figure.add_scatter(x=x, y=y, name=NAMES[method], mode="lines+markers", **style)
    figure.add_scatter(name="you are here", mode="lines", line=dict(color=theme.INK, width=1), showlegend=False)
    scale_quality(figure, table, metric, domain)
    return figure


def quality_curve(table: pd.DataFrame, method: str, metric: str, domain: str = "wiki"):
    """x, y and 95 % half-width of one curve; the dense model is a level line."""
    rows = table[(table["domain"] == domain) & (table["method"] == method)].sort_values("p")
    y = rows[metric].to_numpy()
    if metric == "perplexity":  # the band of the extra NLL, carried through exp
        half = y * (np.exp(1.96 * rows["extra_nll_stderr"].fillna(0).to_numpy()) - 1)
    else:
        half = 1.96 * rows[f"{metric}_stderr"].fillna(0).to_numpy()
    if method == "dense":
        return np.array([0.0, 1.0]), np.repeat(y, 2), np.repeat(half, 2)
    return rows["p"].to_numpy(), y, half


def scale_quality(figure: go.Figure, table: pd.DataFrame, metric: str, domain: str = "wiki") -> None:
    """Set the axis that suits a metric; perplexity spans decades."""
    values = table[(table["domain"] == domain) & table["method"].isin(CURVES)][metric]
    log = metric == "perplexity"
    figure.layout.yaxis.type = "log" if log else "linear"
    high = float(values.max())
    figure.layout.yaxis.range = (np.log10(values.min() / 1.3), np.log10(high * 1.3)) if log else (0, 1.05 * high)
    figure.layout.yaxis.title.text = METRICS[metric]


def positions(length: int) -> go.Figure:
    """KL to the dense model at each position of a window: traces 0 TEAL, 1 SPON, 2 the edge of the dense prefix."""
    figure = theme.figure(x="Position in the window (tokens)", y="KL from dense (nats)", x_range=(0, length), y_range=(0, 3))
    for method in ("teal", "spon"):
        figure.add_scatter(name=NAMES[method], mode="lines", line=theme.line(ROLES[method]))
    return figure.add_scatter(name="dense up to here", mode="lines", line=theme.line("reference"))


def always_on(length: int, levels: tuple[float, ...]) -> go.Figure:
    """Share of always-on channels against sequence length, one curve per sparsity with its independence reference.

    Traces: one measured curve per level, then one reference curve per level.
    """
    figure = theme.figure(
        x="Tokens read so far, T", y="Channels on at every token, f(T)", x_range=(0, np.log10(length)), y_range=(-3, 0.05)
    )
    for index, p in enumerate(levels):
        colour = list(theme.ROLE.values())[index % len(theme.ROLE)].colour
        figure.add_scatter(name=theme.percent(p), mode="lines", line=dict(color=colour, width=2))
    for index, p in enumerate(levels):
        colour = list(theme.ROLE.values())[index % len(theme.ROLE)].colour
        x = np.arange(1, length + 1)
        figure.add_scatter(
            x=x, y=np.maximum((1 - p) ** x, 1e-9), mode="lines", line=dict(color=colour, width=1, dash="dot"), showlegend=False
        )
    return figure.update_xaxes(type="log").update_yaxes(type="log")


def training() -> go.Figure:
    """KL while neurons train: traces 0 training batches, 1 held-out windows, 2 the sparse model without neurons."""
    figure = theme.figure(x="Optimiser step", y="KL from dense (nats)", x_range=(0, 40), y_range=(0, 1))
    figure.add_scatter(name="training batch", mode="lines", line=dict(color=theme.tint("method", 0.5), width=1.5))
    figure.add_scatter(name="held-out windows", mode="lines+markers", line=theme.line("method"), marker=theme.marker("method"))
    return figure.add_scatter(name="without neurons (held-out)", mode="lines", line=theme.line("baseline1"))


def drift(table: pd.DataFrame, p: float) -> go.Figure:
    """Cosine, relative L2 and both CKAs per layer, TEAL beside SPON."""
    panels = {
        "cosine": "Cosine (higher is closer)",
        "relative_l2": "Relative L2 (lower is closer)",
        "cka": "CKA of raw states",
        "cka_rms": "CKA, tokens scaled to rms 1",
    }
    figure = make_subplots(2, 2, subplot_titles=list(panels.values()), horizontal_spacing=0.09, vertical_spacing=0.17)
    figure.update_layout(template=theme.template, height=theme.MAP_HEIGHT, margin_t=72, legend_y=1.08)
    for index, metric in enumerate(panels):
        row, col = divmod(index, 2)
        for method in ("teal", "spon"):
            rows = table[(table["method"] == method) & (table["p"] == p)]
            style = dict(line=theme.line(ROLES[method]), marker=theme.marker(ROLES[method], 5), showlegend=index == 0)
            style |= dict(mode="lines+markers", name=NAMES[method])
            figure.add_scatter(x=rows["layer"], y=rows[metric].round(3), **style, row=row + 1, col=col + 1)
    return figure.update_xaxes(title_text="Block", row=2)


def gap_bars(table: pd.DataFrame, label: str) -> go.Figure:
    """Share of TEAL's gap closed as horizontal bars with 95 % intervals, one per row, named by the column `label`."""
    rows = table.iloc[::-1]
    figure = theme.figure(x="Share of TEAL's NLL gap closed", y="", height=80 + 26 * len(rows))
    colour = theme.ROLE["method"].colour
    error = dict(type="data", array=(1.96 * rows["gap_closed_stderr"]).round(4), color=theme.INK, thickness=1.2)
    style = dict(orientation="h", marker_color=colour, error_x=error, width=0.6)
    figure.add_bar(x=rows["gap_closed"].round(4), y=rows[label], **style)
    return figure.add_vline(x=0, line=dict(color=theme.INK, width=1)).update_layout(showlegend=False)


def speed(rows: pd.DataFrame) -> go.Figure:
    """Measured speed-up of one product against sparsity, beside the bound that bytes read set.

    Args:
        rows: of the benchmark.
    """
    figure = theme.figure(x="Sparsity p", y="Speed-up (times)", x_range=(0, 0.95), y_range=(0, 11))
    p = np.linspace(0, 0.93, 60)
    figure.add_scatter(x=p, y=1 / (1 - p), name="bound 1 / (1 − p)", mode="lines", line=theme.line("truth"))
    roles = ["method", "baseline1", "baseline2", "baseline3", "baseline4", "reference"]
    for role, (name, group) in zip(roles, speed_rows(rows).groupby("series", sort=False), strict=False):
        low, high = group["ratio"] - group["ratio_min"], group["ratio_max"] - group["ratio"]
        spread = dict(type="data", symmetric=False, array=high, arrayminus=low, thickness=1)
        style = dict(line=theme.line(role), marker=theme.marker(role), error_y=spread)
        figure.add_scatter(x=group["p"], y=group["ratio"], name=name, mode="lines+markers", **style)
    return figure


def loss_theory() -> go.Figure:
    """Energy lost by masking against sparsity for Gaussian, Laplace and random masks."""
    figure = theme.figure(x="Sparsity p", y="Share of the energy lost", x_range=(0, 1), y_range=(0, 1))
    p = np.linspace(0, 0.99, 100)
    for distribution, role in (("random", "violation"), ("gaussian", "truth"), ("laplace", "baseline4")):
        share = theory.energy_lost(p, distribution).round(4)
        figure.add_scatter(x=p.round(3), y=share, name=distribution, mode="lines", line=theme.line(role))
    return figure


def speed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Pick the matrix-vector products out of the benchmark's rows: `series`, `p`, `ratio`, `ratio_min`, `ratio_max`."""
    found = rows["name"].str.extract(r"^sparse_gemv at (\d+)%$")[0]
    rows = rows[found.notna()].assign(p=found.dropna().astype(int) / 100)
    shape = rows["sizes"].str.split(" ").str[0]
    return rows.assign(series=shape + " against " + rows["peer"].replace("sparse_gemv at 0%", "own kernel at 0 %"))


def token_profile(rows: pd.DataFrame) -> go.Figure:
    """Where a decoded token's time goes: head, linears and the rest, one stacked bar per build, from the benchmark's rows."""
    parts = rows["name"].str.extract(r"^(linears|head|rest) of (\S+) at (\d+)%, (\w+) head$")
    parts = parts.dropna().set_axis(["part", "kernel", "percent", "head"], axis=1)
    parts["milliseconds"] = 1000 * rows.loc[parts.index, "ours_seconds"]
    kernels = {"dense": "torch.mv", "dense-own": "own kernel, 0 %"}
    build = parts["kernel"].map(kernels).fillna("skip, " + parts["percent"] + " %") + ", " + parts["head"] + " head"
    figure = theme.figure(x="Milliseconds per token (one thread)", y="", height=theme.HEIGHT)
    for part, role in (("linears", "method"), ("head", "baseline1"), ("rest", "reference")):
        chosen = parts["part"] == part
        x, y = parts.loc[chosen, "milliseconds"].round(2), build[chosen]
        figure.add_bar(x=x, y=y, name=part, orientation="h", marker_color=theme.ROLE[role].colour)
    return figure.update_layout(barmode="stack").update_yaxes(autorange="reversed")

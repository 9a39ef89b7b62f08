"""The panel of the first notebook, and the pattern for a new one: how far off is the mean of a sample?

Many samples of `n` draws are taken from a population whose mean is 1. Above: where their means fall, beside what
theory says (the central limit theorem, n → ∞). Below: the usual 95 % intervals, mean ± t · s / √n; those that miss
the truth stand out. On skewed populations more than 5 % miss, and the mean of Cauchy draws never settles at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import plotly.graph_objects as go
from ipywidgets import Button, Dropdown, IntSlider
from plotly.subplots import make_subplots
from scipy.special import stdtrit

from labkit import theme
from labkit.panel import Panel
from labkit.theme import fmt, percent

REPEATS = 2000  # samples behind the panel
SHOWN = 50  # intervals in the lower figure
LARGEST = 100  # draws in a sample
EDGES = np.linspace(0, 2.5, 76)
CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
TRUTH = 1.0

_SIGMA = 1.2  # of log income

# name → (sampler, standard deviation); every mean is 1, but for Cauchy's, which has none and is centred there
POPULATIONS = {
    "Coins: 0 or 2": (lambda rng, shape: 2.0 * rng.integers(0, 2, shape), 1.0),
    "Waiting times (exponential)": (lambda rng, shape: rng.standard_exponential(shape), 1.0),
    "Incomes (log-normal)": (
        lambda rng, shape: np.exp(_SIGMA * rng.standard_normal(shape) - _SIGMA**2 / 2),
        float(np.sqrt(np.expm1(_SIGMA**2))),
    ),
    "Wild errors (Cauchy)": (lambda rng, shape: 1 + rng.standard_cauchy(shape), float("inf")),
}


@dataclass(frozen=True)
class SampleMeans:
    """Means of R samples, the ends of their 95 % intervals (R,), and the density that theory predicts at CENTRES."""

    population: str
    n: int
    means: np.ndarray
    low: np.ndarray
    high: np.ndarray
    theory: np.ndarray

    @property
    def covered(self) -> np.ndarray:
        """Which intervals hold the true mean, (R,) bool."""
        return (self.low <= TRUTH) & (self.high >= TRUTH)


@lru_cache(maxsize=8)
def _draws(population: str, seed: int, repeats: int) -> np.ndarray:
    sampler, _ = POPULATIONS[population]
    return sampler(np.random.default_rng(seed), (repeats, LARGEST))  # (R, N)


def theory(population: str, n: int) -> np.ndarray:
    """Density of the mean of `n` draws at CENTRES: normal with the central limit's width, or Cauchy's own."""
    _, sd = POPULATIONS[population]
    if np.isinf(sd):
        return 1 / (np.pi * (1 + (CENTRES - TRUTH) ** 2))
    se = sd / np.sqrt(n)
    return np.exp(-((CENTRES - TRUTH) ** 2) / (2 * se**2)) / (se * np.sqrt(2 * np.pi))


def sample_means(population: str, n: int, *, repeats: int = REPEATS, seed: int = 0) -> SampleMeans:
    """Take `repeats` samples of `n` draws, 2 ≤ n ≤ 100; a larger `n` adds draws to the same samples."""
    if not 2 <= n <= LARGEST:
        raise ValueError(f"n: between 2 and {LARGEST} draws, got {n}")
    draws = _draws(population, seed, repeats)[:, :n]
    means = draws.mean(1)
    reach = stdtrit(n - 1, 0.975) * draws.std(1, ddof=1) / np.sqrt(n)
    return SampleMeans(population, n, means, means - reach, means + reach, theory(population, n))


def figure(result: SampleMeans) -> go.Figure:
    """Histogram of the means over theory, and the first fifty intervals under it."""
    plot = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.55, 0.45])
    plot.add_bar(marker=dict(color=theme.tint("method", 0.55), line_width=0), name="means of samples")
    plot.add_scatter(mode="lines", line=theme.line("truth"), name="theory")
    interval = dict(mode="lines", row=2, col=1)
    plot.add_scatter(line=dict(color=theme.ROLE["reference"].colour, width=1.5), name="95 % intervals", **interval)
    plot.add_scatter(line=dict(color=theme.ROLE["violation"].colour, width=2.5), name="…that miss the truth", **interval)
    plot.add_vline(TRUTH, line=dict(color="black", width=1))
    plot.update_layout(height=theme.HEIGHT, bargap=0, margin_t=36)
    plot.update_xaxes(range=[EDGES[0], EDGES[-1]])
    plot.update_xaxes(title_text="mean of the sample (true mean = 1)", row=2, col=1)
    plot.update_yaxes(title_text="density", row=1, col=1)
    plot.update_yaxes(title_text="sample", range=[-1, SHOWN], showgrid=False, row=2, col=1)
    draw(plot, result)
    return plot


def draw(plot: go.Figure, result: SampleMeans) -> str:
    """Write a result into the figure; returns the read-out."""
    bars, curve, hits, misses = plot.data
    counts, _ = np.histogram(result.means, EDGES)
    bars.x, bars.y = CENTRES, counts / len(result.means) / np.diff(EDGES)
    curve.x, curve.y = CENTRES, result.theory
    for trace, chosen in ((hits, result.covered), (misses, ~result.covered)):
        rows = np.flatnonzero(chosen[:SHOWN])
        gap = np.full(len(rows), np.nan)
        trace.x = np.column_stack([result.low[rows], result.high[rows], gap]).ravel()
        trace.y = np.column_stack([rows, rows, gap]).ravel()
    plot.layout.yaxis.range = [0, 1.1 * theory(result.population, LARGEST).max()]
    off = np.median(np.abs(result.means - TRUTH))
    return (
        f"<b>{result.n}</b> draws a sample: half of the means are off by more than <b>{fmt(off, 2)}</b>, "
        f"and the “95 %” interval holds the truth in <b>{percent(result.covered.mean())}</b> of {fmt(len(result.means))} tries."
    )


def sampling_panel(population: str = "Incomes (log-normal)", n: int = 12) -> Panel:
    """The live panel: population, sample size, and a button that draws anew."""
    return Panel(
        "sample-means",
        figure=figure(sample_means(population, n)),
        compute=lambda population, n, again: sample_means(population, n, seed=again),
        draw=draw,
        controls=dict(
            population=Dropdown(description="Population", options=list(POPULATIONS), value=population),
            n=IntSlider(description="Sample size n (draws)", min=2, max=LARGEST, value=n),
            again=Button(description="Draw new samples"),
        ),
        caption="Look at the share of intervals that miss: it is what “95 %” is worth here. Then try the Cauchy draws.",
    )

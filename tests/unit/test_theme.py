import itertools

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from labkit import theme


def luminance(colour: str) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> list[float]:
    return [value / 255 for value in bytes.fromhex(colour[1:])]


def test_every_role_has_a_colour_a_dash_and_a_marker_of_its_own():
    for a, b in itertools.combinations(theme.ROLE.values(), 2):
        assert a.colour != b.colour
        assert a.dash != b.dash
        assert a.marker != b.marker


def test_the_method_and_the_truth_stand_out_on_white():
    for role in ("method", "truth", "violation"):
        contrast = 1.05 / (luminance(theme.ROLE[role].colour) + 0.05)
        assert contrast >= 3  # the WCAG floor for graphics


def test_importing_the_theme_makes_it_plotlys_default():
    assert pio.templates.default == "labkit"
    drawn = go.Figure(go.Scatter(y=[1, 2]))
    assert drawn.layout.template.layout.font.size == 13
    assert drawn.layout.template.layout.plot_bgcolor == "white"


def test_a_figure_has_titles_fixed_ranges_and_height():
    drawn = theme.figure(x="sparsity (%)", y="perplexity", x_range=[0, 90], y_range=[0, 100])
    assert drawn.layout.xaxis.title.text == "sparsity (%)"
    assert drawn.layout.yaxis.range == (0, 100)
    assert drawn.layout.height == 360


def test_line_and_marker_carry_the_style_of_their_role():
    trace = go.Scatter(line=theme.line("baseline4"), marker=theme.marker("baseline4"))
    assert trace.line.color == trace.marker.color == "#CC79A7"
    assert trace.line.dash == theme.ROLE["baseline4"].dash


def test_a_band_is_the_closed_outline_at_fifteen_per_cent():
    trace = theme.band([0, 1, 2], [1, 2, 3], [4, 5, 6], "method")
    assert list(trace.x) == [0, 1, 2, 2, 1, 0]
    assert list(trace.y) == [4, 5, 6, 3, 2, 1]
    assert trace.fillcolor == "rgba(0,114,178,0.15)"
    assert trace.showlegend is False


def test_fit_axes_covers_the_data_and_five_per_cent_more():
    drawn = theme.figure(x="x", y="y", x_range=[0, 1], y_range=[0, 1])
    drawn.add_scatter(x=[10, 20], y=[-1, np.nan])
    drawn.add_scatter(x=[12, 30], y=[3, 0])
    drawn.add_scatter(x=[0, 99], y=[0, 99], visible="legendonly")
    theme.fit_axes(drawn)
    assert drawn.layout.xaxis.range == (9, 31)
    assert drawn.layout.yaxis.range == (-1.2, 3.2)


def test_fit_axes_takes_exponents_on_logarithmic_axes_and_keeps_zero_under_bars():
    drawn = go.Figure([go.Bar(x=["a", "b"], y=[2, 4]), go.Scatter(x=[1, 100], y=[1, 2], xaxis="x2", yaxis="y2")])
    drawn.update_layout(xaxis2=dict(type="log"), yaxis2=dict(anchor="x2"))
    theme.fit_axes(drawn)
    assert drawn.layout.xaxis.range is None
    assert drawn.layout.yaxis.range == pytest.approx((-0.2, 4.2))
    assert drawn.layout.xaxis2.range == pytest.approx((-0.1, 2.1))
    assert drawn.layout.yaxis2.range == pytest.approx((0.95, 2.05))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0"),
        (0.5, "0.500"),
        (90.64, "90.6"),
        (0.07134, "0.0713"),
        (12345.6, "12,300"),
        (999.9, "1,000"),
        (9.999, "10.0"),
        (-1.5, "−1.50"),
        (4096, "4,096"),
        (np.int64(-12), "−12"),
        (2.5e-7, "2.50 × 10⁻⁷"),
        (-6.02e23, "−6.02 × 10²³"),
        (np.float32(0.25), "0.250"),
        (float("nan"), "NaN"),
        (float("-inf"), "−∞"),
    ],
)
def test_fmt_gives_three_significant_digits_and_true_signs(x, text):
    assert theme.fmt(x) == text


def test_percent_separates_the_sign_by_a_thin_space():
    assert theme.percent(0.6) == "60\u202f%"
    assert theme.percent(-0.0471, 1) == "−4.7\u202f%"


@pytest.mark.parametrize("top", [0.00013, 0.04, 0.999, 1.0, 7.7, 86.0, 200.0])
def test_nice_is_the_next_round_number_and_stays_there(top):
    ceiling = theme.nice(top)
    assert top <= ceiling * (1 + 1e-6)
    assert ceiling <= 1.34 * top
    assert theme.nice(ceiling) == pytest.approx(ceiling)

"""A move of a slider: how long an update of a panel's figure takes, beside showing the same figure again."""

import statistics

TARGET = 0.5
MOVES = 30

CELL = """
import numpy as np
from IPython.display import display
from ipywidgets import IntSlider, Output, VBox, interactive_output
from labkit import theme
from labkit.panel import Panel

x = np.linspace(0, 10, 500)

def waves(phase):
    return [np.sin(x + 0.1 * phase + k) for k in range(5)]

def write(figure, curves):
    for trace, y in zip(figure.data, curves):
        trace.y = y
    return ""

def empty():
    figure = theme.figure(x="time (s)", y="signal (V)", x_range=[0, 10], y_range=[-1, 1])
    for role in list(theme.ROLE)[:5]:
        figure.add_scatter(x=x, line=theme.line(role), name=role)
    return figure

def show(phase):
    figure = empty()
    write(figure, waves(phase))
    display(figure)

slider = IntSlider(description="Phase", max=100)
again = VBox([slider, interactive_output(show, {"phase": slider})]).add_class("shown-again")
panel = Panel("waves", figure=empty(), compute=waves, draw=write,
              controls=dict(phase=IntSlider(description="Phase", max=100)))
display(panel)
display(again)
"""

# Resolves, in milliseconds from the key press, at the second frame after the first curve has changed.
ARM = """box => {
    const curve = () => box.querySelector('.js-line')?.getAttribute('d'), before = curve();
    const changed = () => ![before, undefined].includes(curve());
    addEventListener('keydown', () => window.pressed = performance.now(), {capture: true, once: true});
    window.painted = new Promise(resolve => {
        const tick = () => changed() ? requestAnimationFrame(() => resolve(performance.now() - window.pressed))
                                     : requestAnimationFrame(tick);
        tick();
    });
}"""

# Resolves once the page has drawn twelve frames in a row without delay: what the last move left behind is done.
CALM = """() => new Promise(resolve => {
    let calm = 0, last = performance.now(), end = last + 5000;
    const tick = now => {
        calm = now - last < 40 ? calm + 1 : 0;
        last = now;
        if (calm >= 12 || now > end) resolve(); else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
})"""


def test_an_update_takes_half_as_long_as_showing_again(lab, notebook, unexpected, capsys):
    lab.page.set_viewport_size({"width": 1400, "height": 1600})
    lab.open(notebook(CELL))
    lab.run_all()
    cell = lab.cell(0)
    boxes = {way: cell.wait_for_selector(css) for way, css in (("update", ".labkit-panel"), ("again", ".shown-again"))}
    for box in boxes.values():
        box.wait_for_selector(".js-line")
    times = {way: [] for way in boxes}
    for _ in range(MOVES):
        for way, box in boxes.items():
            box.query_selector(".noUi-handle").focus()
            lab.page.evaluate(CALM)
            box.evaluate(ARM)
            lab.page.keyboard.press("ArrowRight")
            times[way].append(lab.page.evaluate("() => window.painted"))
    ratios = [update / again for update, again in zip(times["update"], times["again"], strict=True)]
    ratio = statistics.median(times["update"]) / statistics.median(times["again"])
    with capsys.disabled():
        print(
            f"\nslider to redraw: update {statistics.median(times['update']):.0f} ms, shown again"
            f" {statistics.median(times['again']):.0f} ms, ratio {ratio:.2f} (moves {min(ratios):.2f}-{max(ratios):.2f})"
        )
    assert ratio <= TARGET
    assert unexpected() == []

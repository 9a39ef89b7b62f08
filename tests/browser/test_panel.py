"""What only a browser can show of a panel: work that runs, playback, errors, keyboard, narrow pages."""

import re

SETUP = """
import threading, time
import numpy as np
from ipywidgets import Dropdown, IntSlider
from labkit import theme
from labkit.panel import Panel, Playback, Progress

def figure():
    empty = theme.figure(x="step", y="value", x_range=[0, 100], y_range=[-1, 1])
    return empty.add_scatter(x=np.arange(101.0), line=theme.line("method"))
"""

TRAINING = """
allowed = threading.Semaphore(0)  # the next cell lets steps happen

def train(rate):
    if rate == 9:
        raise ValueError("rate: below 9, got 9")
    for step in range(1, 101):
        allowed.acquire()
        yield Progress(step, 100, np.sin(rate * np.arange(step) / 10))

def draw(figure, y):
    figure.data[0].y = y
    return f"{len(y)} steps"

Panel("training", figure=figure(), compute=train, draw=draw, start="Train", initial=np.zeros(101),
      controls=dict(rate=IntSlider(description="Rate", min=1, max=9, value=8)))
"""

SLOW_PLAYBACK = """
drawn = []

def draw(figure, y, frame):
    time.sleep(0.25)  # five times the interval
    drawn.append(frame)
    figure.data[0].y = y[:frame]
    return f"frame {frame}, drawing {len(drawn)}"

Panel("playback", figure=figure(), compute=lambda phase: np.sin(phase + np.arange(101) / 9), draw=draw,
      controls=dict(phase=IntSlider(description="Phase (rad)", max=6)),
      view=dict(frame=Playback(101, description="Frame", interval=50)))
"""

MENU = """
def draw(figure, kind):
    figure.data[0].y = np.linspace(-1, 1, 101) ** len(kind)
    return f"chosen: {kind}"

Panel("menu", figure=figure(), compute=lambda kind: kind, draw=draw,
      controls=dict(kind=Dropdown(description="Kind", options=["one", "three", "seventh"])))
"""


def show(lab, notebook, *cells):
    """Run a notebook of these cells and return the panel of the last one."""
    lab.open(notebook(SETUP, *cells))
    lab.run_all()
    panel = lab.cell(len(cells)).wait_for_selector(".labkit-panel")
    panel.wait_for_selector(".labkit-figure .main-svg")
    return panel


def read_out_becomes(lab, panel, pattern):
    lab.page.wait_for_function(
        "([panel, pattern]) => new RegExp(pattern).test(panel.querySelector('.labkit-readout').innerText)",
        arg=[panel, pattern],
    )


def status_becomes(lab, panel, pattern):
    lab.page.wait_for_function(
        "([panel, pattern]) => new RegExp(pattern).test(panel.querySelector('.labkit-status').innerText)",
        arg=[panel, pattern],
    )


def in_kernel(lab, code):
    """Run code beside the notebook, as its cells would."""
    lab.page.evaluate(
        """code => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
            .requestExecute({code, silent: true}).done.then(() => null)""",
        code,
    )


def test_work_shows_progress_is_cancelled_by_keyboard_and_reports_errors(lab, notebook, unexpected):
    panel = show(lab, notebook, TRAINING)
    read_out_becomes(lab, panel, "^101 steps$")
    start = panel.query_selector("button:text-is('Train')")
    cancel = panel.query_selector("button:text-is('Cancel')")
    assert cancel.is_disabled()

    start.press("Enter")
    status_becomes(lab, panel, "computing")
    in_kernel(lab, "for _ in range(40): allowed.release(); time.sleep(0.02)")
    status_becomes(lab, panel, r"computing… \d+ of 100")
    assert panel.query_selector(".labkit-progress").is_visible()
    cancel.press("Enter")
    status_becomes(lab, panel, "stopping")
    in_kernel(lab, "allowed.release()")
    status_becomes(lab, panel, "stopped")
    read_out_becomes(lab, panel, "^4[01] steps$")
    assert cancel.is_disabled()
    assert not panel.query_selector(".labkit-progress").is_visible()

    handle = panel.query_selector(".noUi-handle")
    assert handle.get_attribute("aria-label") == "Rate"
    handle.press("ArrowRight")
    start.press("Enter")
    status_becomes(lab, panel, "rate: below 9, got 9")
    read_out_becomes(lab, panel, "^4[01] steps$")
    assert unexpected() == []


def test_playback_slower_than_its_interval_does_not_queue(lab, notebook, unexpected):
    panel = show(lab, notebook, SLOW_PLAYBACK)
    play = panel.query_selector(".widget-play button")
    assert play.evaluate("e => getComputedStyle(e.querySelector('i'), '::before').content") == '"Play"'
    play.press("Enter")
    lab.page.wait_for_function("panel => +panel.querySelectorAll('.noUi-handle')[1].ariaValueNow >= 60", arg=panel)
    play.press("Enter")

    def state():
        text = panel.query_selector(".labkit-readout").inner_text()
        return [int(number) for number in re.findall(r"\d+", text)]

    _, drawings = state()
    frame = round(float(panel.query_selector_all(".noUi-handle")[1].get_attribute("aria-valuenow")))
    read_out_becomes(lab, panel, f"^frame {frame}, ")
    _, settled = state()
    print(f"{frame} frames played, {settled} drawn, {settled - drawings} after the pause")
    assert settled - drawings <= 3
    assert settled < frame
    assert unexpected() == []


def test_keys_move_a_menu_and_leave_the_notebook_alone(lab, notebook):
    panel = show(lab, notebook, MENU)
    cells = len(lab.outputs())
    menu = panel.query_selector("select")
    menu.press("ArrowDown")
    read_out_becomes(lab, panel, "^chosen: three$")
    menu.press("d")  # twice, with the focus on a cell, this would delete it
    menu.press("d")
    menu.press("ArrowDown")
    read_out_becomes(lab, panel, "^chosen: seventh$")
    assert len(lab.outputs()) == cells


def test_a_page_opened_later_shows_the_panel_as_it_is_now(lab, notebook, unexpected):
    panel = show(lab, notebook, MENU)
    curve = "panel => panel.querySelector('.scatterlayer .js-line')?.getAttribute('d')"
    changed = f"([panel, d]) => ![d, undefined].includes(({curve})(panel))"
    first = panel.evaluate(curve)
    panel.query_selector("select").press("ArrowDown")
    read_out_becomes(lab, panel, "^chosen: three$")
    lab.page.wait_for_function(changed, arg=[panel, first])
    before = panel.evaluate(curve)
    lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.reload()
    lab.ready()
    panel = lab.cell(1).wait_for_selector(".labkit-panel")
    panel.wait_for_selector(".labkit-figure .main-svg")
    read_out_becomes(lab, panel, "^chosen: three$")
    lab.page.wait_for_function(f"([panel, d]) => ({curve})(panel) === d", arg=[panel, before])
    panel.query_selector("select").press("ArrowDown")
    read_out_becomes(lab, panel, "^chosen: seventh$")
    lab.page.wait_for_function(changed, arg=[panel, before])
    assert unexpected() == []


def test_a_narrow_page_puts_the_controls_above_and_the_figure_follows_the_width(lab, notebook):
    panel = show(lab, notebook, MENU)

    def box(selector):
        return panel.query_selector(selector).bounding_box()

    def plot_fits():
        lab.page.wait_for_function(
            "p => Math.abs(p.querySelector('.main-svg').clientWidth - p.querySelector('.labkit-figure').clientWidth) <= 1",
            arg=panel,
        )

    plot_fits()
    assert box(".labkit-controls")["width"] == 280
    assert box(".labkit-controls")["x"] + 280 <= box(".labkit-figure")["x"]
    wide = box(".labkit-figure")["width"]
    lab.page.set_viewport_size({"width": 900, "height": 1000})
    lab.page.wait_for_function(
        "p => p.querySelector('.labkit-figure').getBoundingClientRect().top >"
        " p.querySelector('.labkit-controls').getBoundingClientRect().bottom - 1",
        arg=panel,
    )
    plot_fits()
    assert box(".labkit-figure")["width"] != wide
    assert box(".labkit-figure")["height"] == 360


def test_a_plot_that_comes_later_than_anywidget_waits_follows_its_controls(lab, notebook, unexpected):
    lab.page.add_init_script(
        """AbortSignal.timeout = () => {
            const controller = new AbortController();
            queueMicrotask(() => controller.abort());
            return controller.signal;
        };"""
    )
    panel = show(lab, notebook, MENU)
    lines = ".scatterlayer .js-line"
    before = panel.wait_for_selector(lines, state="attached").get_attribute("d")
    panel.query_selector("select").press("ArrowDown")
    lab.page.wait_for_function(
        "([panel, lines, before]) => panel.querySelector(lines).getAttribute('d') !== before", arg=[panel, lines, before]
    )
    read_out_becomes(lab, panel, "^chosen: three$")
    assert unexpected() == []

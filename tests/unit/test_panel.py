"""A panel in a plain interpreter: no browser, no kernel, no time."""

import threading

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.callbacks import InputDeviceState, Points

from labkit import theme
from labkit.panel import Panel, Playback, Progress

X = np.arange(5.0)


def line_figure():
    figure = theme.figure(x="x", y="y", x_range=[0, 4], y_range=[0, 100])
    figure.add_scatter(x=X, y=0 * X)
    return figure


def slope(value=2, **options):
    return widgets.IntSlider(description="Slope (1/step)", value=value, max=10, **options)


def line(slope):
    if slope == 7:
        raise ValueError("slope: below 7 & above, got <7>")
    return slope * X


def draw_line(figure, y):
    figure.data[0].y = y
    figure.data[0].line.width = 1 + y[1]
    figure.layout.title.text = f"up to {y[-1]:g}"
    if y[1] == 8:
        raise KeyError("eight")
    return f"ends at {y[-1]:g}"


def make(**options):
    defaults = dict(figure=line_figure(), compute=line, draw=draw_line, controls=dict(slope=slope()))
    return Panel("line", **(defaults | options))


class Gate:
    """A compute function that says when it has begun and goes on when told to; it remembers what was asked of it."""

    def __init__(self):
        self.asked, self.begun, self.go = [], threading.Event(), threading.Event()

    def __call__(self, slope):
        self.asked.append(slope)
        self.begun.set()
        assert self.go.wait(30)
        return slope * X


def test_a_panel_opens_with_its_first_result():
    panel = make()
    assert list(panel.figure.data[0].y) == [0, 2, 4, 6, 8]
    assert panel.readout.value == "ends at 8"
    assert panel.status.value == ""


def test_moving_a_control_computes_and_redraws_the_same_figure():
    panel = make()
    figure = panel.figure
    panel.slope.value = 5
    assert panel.figure is figure
    assert list(figure.data[0].y) == [0, 5, 10, 15, 20]
    assert panel.readout.value == "ends at 20"
    assert figure.layout.xaxis.range == (0, 4)


def test_a_redraw_is_one_message_to_the_browser():
    panel, sent = make(), []
    panel.figure.observe(lambda change: change["new"] and sent.append(change["new"]), "_py2js_update")
    panel.figure.observe(lambda change: change["new"] and sent.append(change["new"]), ["_py2js_restyle", "_py2js_relayout"])
    panel.slope.value = 5
    assert len(sent) == 1
    assert sent[0]["layout_data"] == {"title.text": "up to 20"}


def test_the_figure_passed_in_is_left_alone():
    figure = line_figure()
    make(figure=figure)
    assert list(figure.data[0].y) == [0] * 5


def test_a_button_tells_compute_how_often_it_was_pressed():
    panel = make(
        compute=lambda slope, again: slope * X + again,
        controls=dict(slope=slope(), again=widgets.Button(description="Again")),
    )
    panel.again.click()
    panel.again.click()
    assert list(panel.figure.data[0].y) == [2, 4, 6, 8, 10]
    assert panel.values() == {"slope": 2, "again": 2}


def test_a_view_control_redraws_without_computing():
    computed = []

    def compute(slope):
        computed.append(slope)
        return slope * X

    def draw(figure, y, step):
        figure.data[0].y = y[: step + 1]
        return f"step {step}"

    panel = make(compute=compute, draw=draw, view=dict(step=Playback(5, description="Step")))
    panel.step.value = 3
    assert list(panel.figure.data[0].y) == [0, 2, 4, 6]
    assert panel.readout.value == "step 3"
    assert computed == [2]


def test_any_widget_can_stand_in_the_figures_place():
    def draw(view, y):
        view.value = f"<i>{y[-1]:g}</i>"
        return "done"

    panel = make(figure=widgets.HTML(), draw=draw)
    panel.slope.value = 3
    assert panel.figure.value == "<i>12</i>"


def test_fit_axes_follows_the_data_and_then_stays():
    panel = make(fit=True)
    panel.fit_axes()
    fitted = panel.figure.layout.yaxis.range
    assert fitted == pytest.approx((-0.4, 8.4))
    panel.slope.value = 9
    assert panel.figure.layout.yaxis.range == fitted


def test_a_click_on_a_point_reaches_the_handler_by_its_index():
    panel = make()
    panel.on_click(0, lambda i: setattr(panel.slope, "value", i))
    panel.figure.data[0]._dispatch_on_click(Points([3], [3.0], [6.0], "", 0), InputDeviceState())
    assert panel.slope.value == 3
    assert panel.readout.value == "ends at 12"


# Errors


def test_an_error_at_the_opening_is_raised():
    with pytest.raises(ValueError, match="below 7"):
        make(controls=dict(slope=slope(7)))


def test_a_later_error_is_shown_and_the_last_good_plot_stays():
    panel = make()
    panel.slope.value = 7
    assert "slope: below 7 &amp; above, got &lt;7&gt;" in panel.status.value
    assert panel.readout.value == "ends at 8"
    panel.slope.value = 3
    assert panel.status.value == ""
    assert panel.readout.value == "ends at 12"


def test_an_error_in_the_middle_of_drawing_leaves_no_half_picture():
    panel = make()
    panel.slope.value = 8
    assert "KeyError: &#x27;eight&#x27;" in panel.status.value
    assert list(panel.figure.data[0].y) == [0, 2, 4, 6, 8]
    assert panel.figure.layout.title.text == "up to 8"
    assert panel.result[1] == 2


def test_raise_errors_raises_what_the_status_line_shows():
    panel = make()
    panel.raise_errors = True
    with pytest.raises(ValueError, match="below 7"):
        panel.slope.value = 7
    assert "below 7" in panel.status.value


def test_an_error_in_a_view_is_cleared_by_the_next_view_but_one_of_compute_is_not():
    def draw(figure, y, step):
        return f"{y[step]}"

    panel = make(draw=draw, view=dict(step=widgets.IntSlider(description="Step", max=9)))
    panel.step.value = 9
    assert "IndexError" in panel.status.value
    panel.step.value = 1
    assert panel.status.value == ""
    panel.slope.value = 7
    panel.step.value = 2
    assert "below 7" in panel.status.value


def test_handlers_of_ones_own_are_caught_at_the_boundary():
    panel = make()
    with panel.boundary():
        raise RuntimeError("no such node")
    assert "RuntimeError: no such node" in panel.status.value


@pytest.mark.parametrize("name", ["layout", "children", "figure", "values", "2nd", "a b"])
def test_a_control_may_not_take_an_attribute_of_the_panel(name):
    with pytest.raises(ValueError, match=f"{name!r} is an attribute of every panel or no identifier"):
        make(compute=lambda **_: X, controls={name: slope()})


def test_a_name_cannot_be_control_and_view_at_once():
    with pytest.raises(ValueError, match=r"\['slope'\] are names of controls already"):
        make(view=dict(slope=slope()))


def test_a_control_without_value_or_description_is_refused():
    with pytest.raises(ValueError, match="'box' must be a Button or a widget with a value, got HBox"):
        make(controls=dict(box=widgets.HBox()))
    with pytest.raises(ValueError, match="'slope' has no description"):
        make(controls=dict(slope=widgets.IntSlider()))


# In the background


def test_the_newest_request_wins_and_none_pile_up():
    gate = Gate()
    panel = make(compute=gate, background=True, initial=X)
    panel.slope.value = 3
    assert gate.begun.wait(30)
    for value in (4, 5, 6, 9):
        panel.slope.value = value
    gate.go.set()
    panel.wait()
    assert gate.asked == [3, 9]
    assert panel.readout.value == "ends at 36"
    assert panel.status.value == ""


def test_an_overtaken_result_is_never_drawn():
    gate, drawn = Gate(), []

    def draw(figure, y):
        drawn.append(y[1])
        return ""

    panel = make(compute=gate, draw=draw, background=True, initial=X)
    panel.slope.value = 3
    assert gate.begun.wait(30)
    panel.slope.value = 5
    gate.go.set()
    panel.wait()
    assert drawn == [1, 5]


def test_a_view_follows_while_work_is_running():
    gate = Gate()
    panel = make(
        compute=gate,
        draw=lambda figure, y, step: f"{y[step]:g} at {step}",
        view=dict(step=widgets.IntSlider(description="Step", max=4)),
        background=True,
        initial=X,
    )
    panel.slope.value = 3
    assert gate.begun.wait(30)
    panel.step.value = 2
    assert panel.readout.value == "2 at 2"
    assert panel.status.value == "computing…"
    gate.go.set()
    panel.wait()
    assert panel.readout.value == "6 at 2"


def test_cancel_stops_between_two_steps_and_keeps_what_was_reached():
    begun, go, steps = threading.Event(), threading.Event(), []

    def climb(slope):
        for step in range(1, 5):
            steps.append(step)
            yield Progress(step, 4, slope * X[: step + 1])
            begun.set()
            assert go.wait(30)

    panel = make(compute=climb, background=True, initial=X)
    panel.slope.value = 3
    assert begun.wait(30)
    panel.cancel()
    assert panel.status.value == "stopping…"
    go.set()
    panel.wait()
    assert panel.status.value == "stopped"
    assert steps == [1, 2]
    assert list(panel.figure.data[0].y) == [0, 3, 6]


def cancel_when(panel, status):
    panel.status.observe(lambda change: panel.cancel() if change["new"] == status else None, "value")


def test_cancel_comes_too_late_once_the_work_is_done():
    panel = make(background=True)
    cancel_when(panel, "")
    panel.slope.value = 3
    panel.wait()
    assert panel.status.value == ""
    assert panel.readout.value == "ends at 12"


def test_cancel_before_the_work_begins_leaves_nothing_to_wait_for():
    gate = Gate()
    panel = make(compute=gate, background=True, initial=X)
    cancel_when(panel, "computing…")
    panel.slope.value = 3
    panel.wait()
    assert panel.status.value == "stopped"
    assert gate.asked == []


def test_work_that_fails_after_it_was_cancelled_has_stopped():
    begun, go = threading.Event(), threading.Event()

    def fail(slope):
        begun.set()
        assert go.wait(30)
        raise ValueError("cut short")

    panel = make(compute=fail, background=True, initial=X)
    panel.slope.value = 3
    assert begun.wait(30)
    panel.cancel()
    go.set()
    panel.wait()
    assert panel.status.value == "stopped"


def test_progress_without_a_result_draws_only_the_last_one():
    def climb(slope):
        yield Progress(1, 3)
        yield Progress(2, 3)
        yield Progress(3, 3, slope * X)

    panel = make(compute=climb, background=True)
    assert panel.readout.value == "ends at 8"
    panel.slope.value = 4
    panel.wait()
    assert panel.readout.value == "ends at 16"


def test_an_error_in_the_background_is_shown_and_raised_by_wait():
    panel = make(background=True)
    panel.slope.value = 7
    panel.wait()
    assert "below 7" in panel.status.value
    assert panel.readout.value == "ends at 8"
    panel.raise_errors = True
    panel.slope.value = 6
    panel.wait()
    panel.slope.value = 7
    with pytest.raises(ValueError, match="below 7"):
        panel.wait()


def test_wait_gives_up_after_its_timeout():
    gate = Gate()
    panel = make(compute=gate, background=True, initial=X)
    panel.slope.value = 3
    with pytest.raises(TimeoutError, match=r"Panel\(line: slope\) is still computing after 0 s"):
        panel.wait(timeout=0)
    gate.go.set()
    panel.wait()


def test_with_a_start_button_only_the_button_computes():
    panel = make(start="Fit the line")
    panel.slope.value = 5
    panel.wait()
    assert panel.readout.value == "ends at 8"
    panel.start()
    panel.wait()
    assert panel.readout.value == "ends at 20"


def test_an_initial_result_is_drawn_instead_of_computed():
    gate = Gate()
    panel = make(compute=gate, initial=3 * X)
    assert gate.asked == []
    assert panel.readout.value == "ends at 12"


def test_closing_a_panel_stops_its_work():
    begun, go, steps = threading.Event(), threading.Event(), []

    def climb(slope):
        for step in range(100):
            steps.append(step)
            begun.set()
            assert go.wait(30)
            yield Progress(step, 100)

    panel = make(compute=climb, background=True, initial=X)
    panel.slope.value = 3
    assert begun.wait(30)
    panel.close()
    go.set()
    panel.wait()
    assert steps == [0]


def test_background_work_prints_nothing(capfd):
    panel = make(background=True)
    panel.slope.value = 7
    panel.slope.value = 3
    panel.wait()
    assert capfd.readouterr() == ("", "")


# In the browser


def test_repr_and_css_class_do_not_change_from_run_to_run():
    panel = make()
    assert repr(panel) == "Panel(line: slope)"
    assert panel._repr_mimebundle_()["text/plain"] == "Panel(line: slope)"
    panel.slope.value = 3
    assert repr(panel) == "Panel(line: slope)"
    assert set(panel._dom_classes) == {"labkit-panel", "labkit-panel-line"}


def test_a_page_opened_later_is_told_what_the_figure_shows_now():
    panel = make()
    panel.slope.value = 5
    state = panel.figure.get_state()
    y = state["_widget_data"][0]["y"]
    assert np.frombuffer(y["buffer"], y["dtype"]).tolist() == [0, 5, 10, 15, 20]
    assert state["_widget_layout"]["title"]["text"] == "up to 20"


def test_plotlys_front_end_travels_once_for_all_panels():
    first, second = make().figure.get_state(), make().figure.get_state()
    assert first["_plotly"] == second["_plotly"]
    assert len(first["_esm"]) < 10_000


def test_a_still_is_the_plot_as_it_stands_and_the_same_in_every_run():
    stills = []
    for _ in range(2):
        panel = make()
        panel.slope.value = 5
        stills.append(panel.still())
    assert not isinstance(stills[0], go.FigureWidget)
    assert list(stills[0].data[0].y) == [0, 5, 10, 15, 20]
    assert stills[0].to_json() == stills[1].to_json()


def test_the_style_travels_with_the_panel_and_asks_for_nothing_outside():
    frame = make().children[0]
    assert ".labkit-panel" in frame._css
    for text in (frame._css, frame._esm):
        assert "http" not in text
        assert "@import" not in text


def test_playback_moves_as_one_with_its_slider():
    play = Playback(10, description="Frame", value=2)
    assert play.slider.value == 2
    play.slider.value = 7
    assert play.value == 7
    play.value = 3
    assert play.slider.value == 3
    play.frames = 3
    assert (play.slider.max, play.play.max, play.value) == (2, 2, 2)

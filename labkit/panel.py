"""The live widget every lab uses: controls on the left, one figure, a read-out in words, a caption, a status line.

A panel joins two plain functions. `compute` turns control values into a result and knows nothing of widgets; `draw`
writes a result into an existing figure and returns the read-out, one or two sentences of HTML::

    def compute(n, population, again):             # one argument per control, by name
        return sample_means(population, n, seed=again)

    def draw(figure, means):                       # assign to existing traces; the axes stay where they are
        figure.data[0].y = means.histogram
        return f"Means of {fmt(means.n)} draws spread by {fmt(means.sd)}"

    panel = Panel(
        "sample-means",                            # names the panel in its repr and its CSS class
        figure=figures.sample_means(),             # a go.Figure (turned into a FigureWidget), or any other widget
        compute=compute,
        draw=draw,
        controls=dict(
            n=IntSlider(description="Sample size (draws)", min=1, max=100, value=30),
            population=Dropdown(description="Population", options=[...]),
            again=Button(description="Draw again"),    # compute receives how often it was pressed, say as a seed
        ),
        caption="Look at how the width shrinks by half when the sample grows fourfold.",
    )

Controls become attributes and the panel works with no front end: `panel.n.value = 50` computes and redraws, so a test
sets a value and reads `panel.figure.data[0].y`, `panel.readout.value`, `panel.status.value` or `panel.result`.
`panel.still()` is the plot as a plain figure, for readers without a kernel.

**What is shown of a result.** Controls given as `view=dict(step=Playback(50, description="Step"))` do not compute:
they redraw the last result, and `draw` receives their values by name, `draw(figure, result, step)`. Use them for
playback over precomputed frames, cursors, toggles and selections. `panel.on_click(trace, handler)` runs `handler(i)`
when point `i` of a trace is clicked; let it set such a control, so that the keyboard reaches the same state.

**Slow work.** With `background=True`, `compute` runs in a thread: the newest request wins, an older one is cancelled
and none pile up. A generator function shows progress and can be stopped between two steps::

    def train(steps, rate):
        for step, state in enumerate(descend(rate), start=1):
            yield Progress(step, steps, state)     # a third value, when given, is drawn
            if step == steps:
                return

`start="Train"` adds a button and computes only when it is pressed, not when a control moves. `panel.wait()` returns
when nothing is running, as a script or a test needs it. Background work must not print. The first result is computed
before the constructor returns, so that a panel never opens empty; give `initial=` a stored result where that is slow.

**Errors.** The first result raises in the cell. Later an exception is caught, shown in the status line, and the last
good plot stays; with `panel.raise_errors = True` (or `Panel.raise_errors`, for all) it is raised as well, by the
assignment or by `wait()`. Handlers of your own belong in `with panel.boundary():`.
"""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly
import plotly.graph_objects as go
import traitlets
from plotly.serializers import custom_serializers

from labkit import theme

_SLOW = 0.2  # seconds: a compute that took longer last time announces itself
_FRAME = 0.15  # seconds between partial results sent to the browser
_MODEBAR = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]


@dataclass(frozen=True)
class Progress:
    """One step of a background computation: `done` of `total`, and optionally a result to draw."""

    done: int
    total: int
    result: Any = None


@dataclass(eq=False)
class _Job:
    values: dict[str, Any]
    cancelled: threading.Event = field(default_factory=threading.Event)


class _Frame(anywidget.AnyWidget):
    """Brings the style sheet, keeps a plot as wide as its box, and makes the controls fit for keyboard and screen reader."""

    _esm = Path(__file__).with_name("panel.js")
    _css = Path(__file__).with_name("panel.css")


class _Plotly(anywidget.AnyWidget):
    """Carries plotly's front end to the browser, once for all figures of a kernel."""

    _esm = "export default {}"
    code = traitlets.Unicode().tag(sync=True)
    version = traitlets.Unicode().tag(sync=True)


class _Figure(go.FigureWidget):
    _esm = Path(__file__).with_name("figure.js")
    _plotly = traitlets.Instance(_Plotly).tag(sync=True, **widgets.widget_serialization)

    # A message from the browser holds back all notifications of the figure until it is applied, including those of a
    # redraw in another thread, which would be merged into nothing. One lock keeps the two apart.
    def __init__(self, figure: go.Figure, lock: threading.RLock) -> None:
        self._redraw_lock = lock
        super().__init__(figure)
        self._config = dict(displaylogo=False, modeBarButtons=_MODEBAR, responsive=True)
        self.open()

    def open(self) -> None:
        """Tell the browser of the figure once it is complete: plotly announces an empty one, which a page that has just
        reconnected to its kernel may draw, and never again."""
        if "_layout_obj" in vars(self):
            super().open()

    @traitlets.default("_plotly")
    def _shared_plotly(self) -> _Plotly:
        return _plotly()

    def set_state(self, sync_data: dict) -> None:
        with self._redraw_lock:
            super().set_state(sync_data)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict:
        state = super().get_state(key, drop_defaults)
        if "_layout_obj" in vars(self):
            # plotly answers with what the figure was made with; a page opened later needs what it shows now
            now = {"_widget_data": self._data, "_widget_layout": self._layout_obj._props}
            state |= {name: custom_serializers["to_json"](now[name], self) for name in now.keys() & state.keys()}
        return state


@functools.cache
def _plotly() -> _Plotly:
    bundle = Path(plotly.__file__).parent / "package_data" / "widgetbundle.js"
    return _Plotly(code=bundle.read_text(encoding="utf-8"), version=plotly.__version__)


class Playback(widgets.VBox):
    """Play, pause and scrub over frames 0 … frames − 1; `value` is the frame shown.

    The browser moves the slider by itself, and drops frames while the kernel is busy, so playback never queues.

    Args:
        frames: how many there are, at least 1; may be assigned later.
        description: label with unit.
        interval: milliseconds between frames.
    """

    value = traitlets.Int(0)
    frames = traitlets.Int(1)

    def __init__(self, frames: int, *, description: str, interval: int = 200, value: int = 0) -> None:
        self.slider = widgets.IntSlider(value=value, min=0, max=frames - 1, description=description)
        self.play = widgets.Play(value=value, min=0, max=frames - 1, interval=interval, show_repeat=False)
        super().__init__([self.slider, self.play], frames=frames, value=value)
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        traitlets.link((self, "value"), (self.slider, "value"))
        self.observe(self._resize, "frames")

    @property
    def description(self) -> str:
        return self.slider.description

    def _resize(self, change: Mapping) -> None:
        self.slider.max = self.play.max = change["new"] - 1


class Panel(widgets.VBox):
    """Controls, figure, read-out, caption and status line around `compute` and `draw`; the module explains them.

    Args:
        name: lower-case slug; the panel's CSS class is `labkit-panel-NAME`.
        figure: `go.Figure` or a widget that `draw` updates in place.
        compute: `compute(**control values) -> result`, or in the background a generator function of `Progress`.
        draw: `draw(figure, result, **view values) -> read-out` (HTML).
        controls: name → widget with a `value`, or `Button`; each needs a description (with its unit).
        view: controls that redraw without computing.
        caption: one sentence that says what to look for (HTML).
        background: compute in a thread.
        start: text of a button that starts the work; implies `background`.
        initial: a result to open with instead of computing one.
        fit: offer a button that fits the axes to the data.

    Attributes:
        figure, readout, status: the widgets; `readout.value` and `status.value` are HTML strings.
        result: what was last drawn.
        controls: name → widget, views included; each is also an attribute of the panel.
        raise_errors: raise what the status line shows.

    Raises:
        ValueError: a control whose name is taken or no identifier, with no value, or with no description.
    """

    raise_errors = False

    def __init__(
        self,
        name: str,
        *,
        figure: go.Figure | widgets.DOMWidget,
        compute: Callable[..., Any],
        draw: Callable[..., str],
        controls: Mapping[str, widgets.Widget],
        view: Mapping[str, widgets.Widget] | None = None,
        caption: str = "",
        background: bool = False,
        start: str | None = None,
        initial: Any = None,
        fit: bool = False,
    ) -> None:
        super().__init__()
        self._name = name
        self._compute, self._draw = compute, draw
        self._background = background or start is not None
        self._view = dict(view or {})
        self.controls = {**controls, **self._view}
        if len(self.controls) < len(controls) + len(self._view):
            raise ValueError(f"view: {sorted(set(controls) & set(self._view))} are names of controls already")
        self._presses = {key: 0 for key, control in controls.items() if isinstance(control, widgets.Button)}

        self._changed = threading.Condition(threading.RLock())  # guards drawing and the three below
        self._worker: threading.Thread | None = None
        self._job: _Job | None = None
        self._pending: _Job | None = None
        self._error: Exception | None = None
        self._view_failed = False  # the status line speaks of a view; a later good one clears it
        self._seconds = 0.0

        is_plot = isinstance(figure, go.Figure)
        self.figure = go.Figure(figure) if is_plot else figure
        self.readout = widgets.HTML().add_class("labkit-readout")
        self.status = widgets.HTML().add_class("labkit-status")
        self._bar = widgets.IntProgress(value=0, max=1).add_class("labkit-progress")
        self._cancel = widgets.Button(description="Cancel", disabled=True)
        self._start = widgets.Button(description=start or "", button_style="primary")
        self._fit = widgets.Button(description="Fit axes")
        self._set_running(False)

        for key, control in self.controls.items():
            self._check(key, control)
        if initial is None:
            for step in self._steps(self.values()):
                initial = step.result if step.result is not None else initial
        # A plot is live only when complete: before it is on the page, plotly's front end takes an update that names a
        # property for some traces only as its loss for the others.
        self.result: Any = initial
        self.readout.value = draw(self.figure, initial, **self._view_values())
        if is_plot:
            self.figure = _Figure(self.figure, self._changed)

        for key, control in self.controls.items():
            setattr(self, key, control)
            if isinstance(control, widgets.Button):
                control.on_click(lambda _, key=key: self._press(key))
            else:
                control.observe(self._redraw if key in self._view else self._moved, "value")
        self._cancel.on_click(lambda _: self.cancel())
        self._start.on_click(lambda _: self.start())
        self._fit.on_click(lambda _: self.fit_axes())

        column = [*self.controls.values()]
        column += [self._start] if start else []
        column += [self._cancel] if self._background else []
        column += [self._fit] if fit else []
        column += [self._bar] if self._background else []
        plot = widgets.Box([self.figure]).add_class("labkit-figure")
        if is_plot:
            plot.layout.height = f"{self.figure.layout.height or theme.HEIGHT}px"
        left = widgets.VBox([*column, self.status]).add_class("labkit-controls")
        note = widgets.HTML(caption).add_class("labkit-caption")
        right = widgets.VBox([plot, self.readout, note]).add_class("labkit-main")
        self.children = [_Frame(_dom_classes=("labkit-frame",)), widgets.Box([left, right]).add_class("labkit-body")]
        self.add_class("labkit-panel").add_class(f"labkit-panel-{name}")
        if start:
            self.add_class("labkit-on-start")

    def __repr__(self) -> str:
        return f"Panel({self._name}: {', '.join(self.controls)})"

    def still(self) -> go.Figure:
        """The plot as it stands, for a page that has no kernel."""
        plot = go.Figure(self.figure)
        return plot.update_traces(uid=None)  # random, so it would differ from run to run

    def values(self) -> dict[str, Any]:
        """What `compute` receives now, by control name."""
        apart = self._presses.keys() | self._view.keys()
        return {key: control.value for key, control in self.controls.items() if key not in apart} | self._presses

    def refresh(self) -> None:
        """Compute with the present values and redraw, as if a control had moved."""
        if self._background:
            return self._request()
        with self.boundary(), self._changed:
            if self._seconds > _SLOW:
                self.status.value = "computing…"
            began = time.perf_counter()
            result = self._compute(**self.values())
            self._seconds = time.perf_counter() - began
            self._show(result)
            self.status.value = ""

    def start(self) -> None:
        """Begin the background work, cancelling any that runs."""
        self._request()

    def cancel(self) -> None:
        """Stop the background work after its present step; what was drawn last stays."""
        with self._changed:
            if self._job is not None:
                self._job.cancelled.set()
                self.status.value = "stopping…"
            elif self._pending is not None:
                self.status.value = "stopped"
            self._pending = None

    def wait(self, timeout: float = 60.0) -> None:
        """Return when no background work is left; `TimeoutError` after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._worker is None, timeout):
                raise TimeoutError(f"{self!r} is still computing after {timeout:g} s")
            error, self._error = self._error, None
        if error is not None and self.raise_errors:
            raise error

    def fit_axes(self) -> None:
        """Set the axes to the range of what is plotted; they stay there while controls move."""
        with self.boundary(), self._changed, self.figure.batch_update():
            theme.fit_axes(self.figure)

    def on_click(self, trace: int, handler: Callable[[int], None]) -> None:
        """Call `handler(i)` when point `i` of trace number `trace` is clicked."""

        def clicked(_, points, __) -> None:
            with self.boundary():
                for i in points.point_inds[:1]:
                    handler(i)

        self.figure.data[trace].on_click(clicked)

    @contextlib.contextmanager
    def boundary(self) -> Iterator[None]:
        """Show an exception of the body in the status line instead of losing it."""
        try:
            yield
        except Exception as error:
            self._report(error)
            if self.raise_errors:
                raise

    def close(self) -> None:
        self.cancel()
        super().close()

    def _check(self, key: str, control: widgets.Widget) -> None:
        if not key.isidentifier() or hasattr(self, key):
            raise ValueError(f"controls: {key!r} is an attribute of every panel or no identifier; choose another name")
        if not (isinstance(control, widgets.Button) or control.has_trait("value")):
            raise ValueError(f"controls: {key!r} must be a Button or a widget with a value, got {type(control).__name__}")
        if not control.description:
            raise ValueError(f"controls: {key!r} has no description; say what it sets, with its unit")

    def _moved(self, _: Mapping) -> None:
        if not self._start.description:
            self.refresh()

    def _press(self, key: str) -> None:
        self._presses[key] += 1
        self._moved({})

    def _redraw(self, _: Mapping) -> None:
        with self._changed:
            if self._view_failed:
                self.status.value = ""
            self._view_failed = True
            with self.boundary():
                self._show(self.result)
                self._view_failed = False

    def _view_values(self) -> dict[str, Any]:
        return {key: control.value for key, control in self._view.items()}

    def _show(self, result: Any) -> None:
        view = self._view_values()
        plot = self.figure
        if not isinstance(plot, go.FigureWidget):
            readout = self._draw(plot, result, **view)
        else:
            with plot.batch_update():
                try:
                    readout = self._draw(plot, result, **view)
                except Exception:
                    plot._batch_trace_edits.clear()  # else half a picture would be sent on leaving the batch
                    plot._batch_layout_edits.clear()
                    raise
        self.result, self.readout.value = result, readout

    def _report(self, error: Exception) -> None:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.status.value = f'<span class="labkit-error">{html.escape(f"{kind}{error}")}</span>'

    def _set_running(self, running: bool) -> None:
        self._cancel.disabled = not running
        self._bar.layout.visibility = "visible" if running else "hidden"

    def _request(self) -> None:
        with self._changed:
            if self._job is not None:
                self._job.cancelled.set()
            self._pending = _Job(self.values())
            self.status.value = "computing…"
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"panel-{self._name}", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                job, self._pending = self._pending, None
                if job is None:
                    self._worker = None
                    self._set_running(False)
                    self._changed.notify_all()
                    return
                self._job, self._error = job, None
                self._bar.value, self._bar.max = 0, 1
                self._set_running(True)
            try:
                self._run(job)
            except Exception as error:
                with self._finished(job):
                    if not job.cancelled.is_set():
                        self._report(error)
                        self._error = error

    def _run(self, job: _Job) -> None:
        latest, shown = None, time.monotonic()
        for step in self._steps(job.values):
            latest = step.result if step.result is not None else latest
            if job.cancelled.is_set():
                break
            if time.monotonic() - shown > _FRAME:
                with self._changed:
                    self._bar.max, self._bar.value = step.total, step.done
                    self.status.value = f"computing… {step.done:,} of {step.total:,}"
                    if step.result is not None:
                        self._show(step.result)
                shown = time.monotonic()
        with self._finished(job):
            if latest is not None and self._pending is None:  # else a newer request has come, and this result is not wanted
                self._show(latest)

    @contextlib.contextmanager
    def _finished(self, job: _Job) -> Iterator[None]:
        """In one hold of the lock, so that nothing cancels a job that has said its last word."""
        with self._changed:
            yield
            self._job = None
            if self._pending is None and self._error is None:
                self.status.value = "stopped" if job.cancelled.is_set() else ""

    def _steps(self, values: dict[str, Any]) -> Iterator[Progress]:
        if inspect.isgeneratorfunction(self._compute):
            yield from self._compute(**values)
        else:
            yield Progress(1, 1, self._compute(**values))

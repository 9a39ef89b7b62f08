"""Each notebook as a reader meets it: JupyterLab, no network, Restart & Run All, every control moved by keyboard."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from playwright.sync_api import ElementHandle, Page, TimeoutError

NOTEBOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
BAD_TEXTS = ("Traceback", "Error displaying widget", "Loading widget", "failed to load", "model not found")
CONTROLS = ".noUi-handle, select, textarea, input[type=text], input[type=number], input[type=checkbox], \
    input[type=radio]:checked, button:not(:disabled):not(.mod-active)"

WATCH = """panel => {  // from now on keep the lowest height of the figure, and whether its node was ever missing
    const box = panel.querySelector('.labkit-figure'), node = () => box.querySelector('.js-plotly-plot, canvas');
    const watch = panel.watch = {node: node(), height: box.clientHeight, lowest: box.clientHeight, missing: 0};
    const tick = () => {
        if (!panel.isConnected) return;
        watch.lowest = Math.min(watch.lowest, box.clientHeight);
        watch.missing += node() !== watch.node;
        requestAnimationFrame(tick);
    };
    tick();
}"""

# A fingerprint of what a panel shows, except the control itself.
SHOWN = """(panel, control) => {
    const own = control.closest('.labkit-controls > *');
    const parts = [...panel.querySelectorAll('.labkit-controls > *')].filter(e => e !== own).map(e => e.innerText);
    parts.push(...[...panel.querySelectorAll('.labkit-main')].map(e => e.innerHTML));
    return [...parts.join('\\n')].reduce((hash, letter) => (31 * hash + letter.codePointAt(0)) | 0, 0);
}"""
CHANGED = f"([panel, control, before]) => ({SHOWN})(panel, control) !== before"
CANCEL = "[...panel.querySelectorAll('button')].find(b => b.textContent === 'Cancel')"

COLOURS = """async png => {  // how many different colours a picture has
    const image = await createImageBitmap(await (await fetch('data:image/png;base64,' + png)).blob());
    const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    return new Set(new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer)).size;
}"""


def keys(control: ElementHandle) -> list[str]:
    """What a reader presses to move a control."""
    kind = control.evaluate("e => e.classList.contains('noUi-handle') ? 'slider' : e.type || e.tagName")
    if kind == "slider":
        at_end = control.evaluate("e => +e.ariaValueNow >= +e.ariaValueMax")
        return ["ArrowLeft" if at_end else "ArrowRight"]
    if kind == "select-one":
        at_end = control.evaluate("e => e.selectedIndex === e.length - 1")
        return ["ArrowUp" if at_end else "ArrowDown"]
    if kind == "number":
        at_end = control.evaluate("e => e.max !== '' && +e.value >= +e.max")
        return ["ArrowDown" if at_end else "ArrowUp", "Tab"]
    return {
        "radio": ["ArrowDown"],
        "checkbox": ["Space"],
        "text": ["End", "Space", "a", "n", "d", "Enter"],
        "textarea": ["Control+End", "Space", "a", "n", "d", "Tab"],
    }.get(kind, ["Enter"])


def move(page: Page, panel: ElementHandle, control: ElementHandle, timeouts: tuple[int, ...]) -> bool:
    """Press the control's keys, once per timeout (ms), until the panel shows something else."""
    before = panel.evaluate(SHOWN, control)
    for timeout in timeouts:
        control.focus()
        for key in keys(control):
            page.keyboard.press(key)
        try:
            page.wait_for_function(CHANGED, arg=[panel, control, before], timeout=timeout)
            return True
        except TimeoutError:
            pass
    return False


def settle(page: Page, panel: ElementHandle) -> None:
    """Pause what plays, cancel what computes, and wait until it has stopped."""
    pause = panel.query_selector(".widget-play button:has(.fa-pause)")
    if pause:
        pause.press("Enter")
    cancel = panel.query_selector("button:not(:disabled):text-is('Cancel')")
    if cancel:
        cancel.press("Enter")
    page.wait_for_function(
        f"panel => ({CANCEL}?.disabled ?? true) && !/computing|stopping/.test(panel.querySelector('.labkit-status').innerText)",
        arg=panel,
    )


def check_panel(page: Page, panel: ElementHandle, pictures: Path) -> None:
    name = panel.evaluate("e => [...e.classList].find(c => c.startsWith('labkit-panel-'))")
    panel.wait_for_selector(".labkit-figure :is(.main-svg, canvas, .widget-html-content)")
    page.wait_for_function(
        "p => { const svg = p.querySelector('.labkit-figure .main-svg');"
        " return !svg || Math.abs(svg.clientWidth - svg.closest('.labkit-figure').clientWidth) <= 1 }",
        arg=panel,
    )
    panel.evaluate(WATCH)
    panel.screenshot(path=pictures / f"{name}.png")
    waits_for_start = panel.evaluate("e => e.classList.contains('labkit-on-start')")
    for control in panel.query_selector_all(f".labkit-controls :is({CONTROLS})"):
        if not control.is_visible():
            continue  # a Play widget hides its repeat button
        label = control.evaluate("e => e.closest('.labkit-controls > *').innerText.trim() || e.className")
        if waits_for_start and control.evaluate("e => e.tagName !== 'BUTTON'"):
            move(page, panel, control, (3_000,))  # may show nothing before the start
        else:
            assert move(page, panel, control, (3_000, 3_000, 3_000, 3_000, 30_000)), f"{name}: nothing changes with {label!r}"
        settle(page, panel)
        error = panel.query_selector(".labkit-error")
        assert error is None, f"{name}: {label!r} led to: {error.inner_text()}"
    panel.screenshot(path=pictures / f"{name}-moved.png")
    watch = panel.evaluate("e => ({...e.watch, node: null})")
    assert watch["missing"] == 0, f"{name}: the figure's node was replaced"
    assert watch["lowest"] >= watch["height"] > 0, f"{name}: the figure shrank from {watch['height']} to {watch['lowest']}"
    for canvas in panel.query_selector_all(".labkit-figure canvas"):
        picture = base64.b64encode(canvas.screenshot()).decode()
        assert page.evaluate(COLOURS, picture) > 8, f"{name}: the canvas is blank"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_every_control_moves(notebook, lab, unexpected, tmp_path):
    lab.open(notebook)
    lab.run_all()
    outputs = lab.outputs()
    errors = [o["evalue"] for cell in outputs for o in cell if o["output_type"] == "error"]
    assert errors == []
    for index, cell in enumerate(outputs):
        if not any(WIDGET_VIEW in output.get("data", {}) for output in cell):
            continue
        element = lab.cell(index)
        element.wait_for_selector(".jp-OutputArea-output :is(.labkit-panel, .jupyter-widgets)")
        for panel in element.query_selector_all(".labkit-panel"):
            check_panel(lab.page, panel, tmp_path)
        text = element.inner_text()
        assert [bad for bad in BAD_TEXTS if bad in text] == []
    assert unexpected() == []

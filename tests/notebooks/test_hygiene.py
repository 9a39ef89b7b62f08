"""What every committed notebook must look like, and proof that each rule can be broken."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from labkit.run import WIDGET_VIEW

NOTEBOOKS = sorted(Path(__file__).parents[2].joinpath("notebooks").glob("*.ipynb"))
FIGURE = "application/vnd.plotly.v1+json"
MAX_BYTES = 1_000_000
MAX_LINES = 15
CELL_METADATA = {"tags", "jupyter", "slideshow", "editable", "deletable"}
NOTEBOOK_METADATA = {"kernelspec", "language_info"}
PLACES = re.compile(r"(?<![\w/.])/(?:home|root|tmp|work|Users)/|https?://(?!arxiv\.org/|doi\.org/)", re.IGNORECASE)


def problems(text: str) -> list[str]:
    """Everything that is wrong with the notebook whose file holds `text`."""
    nb = nbformat.reads(text, 4)
    nbformat.validate(nb)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    found = []
    if len(text.encode()) >= MAX_BYTES:
        found.append(f"size: {len(text.encode())} bytes")
    if extra := set(nb.metadata) - NOTEBOOK_METADATA:
        found.append(f"metadata: {sorted(extra)}")
    if "version" in nb.metadata.get("language_info", {}):
        found.append("metadata: language_info.version")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("metadata: kernel is not python3")
    if [cell.execution_count for cell in code] != [*range(1, len(code) + 1)]:
        found.append("counts: not 1 to n in order")
    if sum("parameters" in tags(cell) for cell in nb.cells) != 1:
        found.append("parameters: not exactly one cell has this tag")
    for number, cell in enumerate(nb.cells, 1):
        found += [f"{problem} in cell {number}" for problem in cell_problems(cell)]
    return found


def cell_problems(cell):
    if extra := set(cell.metadata) - CELL_METADATA:
        yield f"metadata: {sorted(extra)}"
    if "nbval-skip" in tags(cell) or "NBVAL_SKIP" in cell.source:
        yield "nbval-skip"
    if cell.cell_type != "code":
        return
    if len(cell.source.splitlines()) > MAX_LINES:
        yield f"lines: {len(cell.source.splitlines())}"
    if "parameters" in tags(cell) and fast_by_default(cell.source) is not True:
        yield "parameters: fast is not True"
    if places := PLACES.findall(cell.source):
        yield f"places: {places}"
    if "nbval-ignore-output" in tags(cell) and not any(FIGURE in output.get("data", {}) for output in cell.outputs):
        yield "outputs: ignored, but no figure"
    for output in cell.outputs:
        if WIDGET_VIEW in output.get("data", {}):
            yield "outputs: widget view"
        if output.output_type == "error" and "raises-exception" not in tags(cell):
            yield f"outputs: {output.ename}"
        if output.get("name") == "stderr":
            yield "outputs: stderr"
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
        if places := PLACES.findall("\n".join(texts)):
            yield f"places: {places}"


def tags(cell):
    return cell.metadata.get("tags", [])


def fast_by_default(source):
    values = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: getattr(node.value, "value", None) for node in values}.get("fast")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_fit_to_be_committed(path):
    assert problems(path.read_text(encoding="utf-8")) == []


def sound():
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    nb.cells = [
        nbformat.v4.new_markdown_cell("# A lab"),
        nbformat.v4.new_code_cell("fast = True", metadata={"tags": ["parameters"]}, execution_count=1),
        nbformat.v4.new_code_cell("print(1)", execution_count=2),
    ]
    return nb


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def test_sound_notebook_has_no_problems():
    assert problems(nbformat.writes(sound())) == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda nb: nb.cells[2].outputs.append(stream("x" * MAX_BYTES)), "size: "),
        (lambda nb: nb.metadata.update(widgets={}), "metadata: ['widgets']"),
        (lambda nb: nb.metadata.update(language_info={"name": "python", "version": "3.11.7"}), "metadata: language"),
        (lambda nb: nb.metadata.kernelspec.update(name="ir"), "metadata: kernel"),
        (lambda nb: nb.cells[2].update(execution_count=5), "counts: "),
        (lambda nb: nb.cells[2].update(execution_count=None), "counts: "),
        (lambda nb: nb.cells[1].metadata.update(tags=[]), "parameters: not exactly one"),
        (lambda nb: nb.cells[2].metadata.update(tags=["parameters"]), "parameters: not exactly one"),
        (lambda nb: nb.cells[1].update(source="fast = False"), "parameters: fast is not True in cell 2"),
        (lambda nb: nb.cells[2].metadata.update(execution={}), "metadata: ['execution'] in cell 3"),
        (lambda nb: nb.cells[2].metadata.update(tags=["nbval-skip"]), "nbval-skip in cell 3"),
        (lambda nb: nb.cells[2].metadata.update(tags=["nbval-ignore-output"]), "outputs: ignored, but no figure in cell 3"),
        (lambda nb: nb.cells[2].update(source="# NBVAL_SKIP\n1"), "nbval-skip in cell 3"),
        (lambda nb: nb.cells[2].update(source="1\n" * 16), "lines: 16 in cell 3"),
        (lambda nb: nb.cells[2].update(source="open('/Users/me/x.csv')"), "places: "),
        (lambda nb: nb.cells[2].outputs.append(stream("warning", "stderr")), "outputs: stderr in cell 3"),
        (lambda nb: nb.cells[2].outputs.append(stream("saved in /tmp/x")), "places: "),
        (
            lambda nb: nb.cells[2].outputs.append(nbformat.v4.new_output("error", ename="KeyError")),
            "outputs: KeyError in cell 3",
        ),
        (
            lambda nb: nb.cells[2].outputs.append(nbformat.v4.new_output("display_data", {WIDGET_VIEW: {}})),
            "outputs: widget view in cell 3",
        ),
    ],
)
def test_each_rule_finds_its_offence(spoil, problem):
    nb = sound()
    spoil(nb)
    assert any(found.startswith(problem) for found in problems(nbformat.writes(nb)))


def test_error_that_is_announced_is_allowed():
    nb = sound()
    nb.cells[2].outputs.append(nbformat.v4.new_output("error", ename="ValueError"))
    nb.cells[2].metadata.update(tags=["raises-exception"])
    assert problems(nbformat.writes(nb)) == []

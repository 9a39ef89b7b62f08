"""Every notebook also runs with odd parameters, from an empty folder, with its exercises solved."""

import re
from pathlib import Path

import nbformat
import pytest

from labkit.labs import LABS
from labkit.run import run_notebook

LIMIT = 120  # s; 30 s on an idle machine
ODD = {
    "00": {"fast": True},
    "01": {"seed": 7},
    "03": {"seed": 7},
    "04": {"seed": 7},
    "05": {"seed": 7},
    "07": {"seed": 7},
}
READY = [lab for lab in LABS.values() if lab.ready]
SOLUTIONS = Path(__file__).parents[1] / "solutions"
UNSOLVED = re.compile(r"^(answer_\w+) = \.\.\.$", re.MULTILINE)


def solved(notebook, solutions):
    """The notebook with each `answer_k = ...` replaced by the solution's line, and how many there were."""
    answers = dict(re.findall(r"^(answer_\w+) = (.+)$", solutions, re.MULTILINE))
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, found = UNSOLVED.subn(lambda match: f"{match[1]} = {answers[match[1]]}", cell.source)
            count += found
    assert count == len(answers), "solutions and exercises do not match"
    return notebook, count


@pytest.mark.parametrize("lab", READY, ids=lambda lab: lab.number)
def test_notebook_runs_with_odd_parameters_in_an_empty_folder_and_its_solutions_are_right(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    solutions = (SOLUTIONS / f"{lab.number}.py").read_text(encoding="utf-8")
    notebook, exercises = solved(nbformat.read(lab.notebook, 4), solutions)
    nbformat.write(notebook, tmp_path / "solved.ipynb")
    output = tmp_path / lab.notebook.name
    run_notebook(tmp_path / "solved.ipynb", output, ODD[lab.number], cell_timeout=LIMIT, total_timeout=LIMIT)
    printed = "".join(out.get("text", "") for cell in nbformat.read(output, 4).cells for out in cell.get("outputs", []))
    verdicts = re.findall(r"^(\S) Exercise (\w+):", printed, re.MULTILINE)
    assert [mark for mark, _ in verdicts] == ["✓"] * exercises

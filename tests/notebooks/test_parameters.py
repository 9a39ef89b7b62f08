"""Every notebook also runs with the smallest and oddest sizes that make sense: no loop forgets its parameter."""

import pytest

from labkit.labs import LABS
from labkit.run import run_notebook

LIMIT = 60  # s; 30 s on an idle machine
ODD = {
    "00": {"fast": True},
    "01": {"seed": 7},
}
READY = [lab for lab in LABS.values() if lab.ready]


@pytest.mark.parametrize("lab", READY, ids=lambda lab: lab.number)
def test_notebook_runs_with_odd_parameters_in_an_empty_folder(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = tmp_path / lab.notebook.name
    run_notebook(lab.notebook, output, ODD[lab.number], cell_timeout=LIMIT, total_timeout=LIMIT)
    assert output.is_file()

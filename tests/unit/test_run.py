import os
import sys
import time

import nbformat
import psutil
import pytest

from labkit import run
from labkit.run import NotebookError, clean, refresh, run_notebook

# A cell that starts a child in a session of its own, writes both process numbers to a file, and hangs.
HANG = """\
import os, pathlib, subprocess, sys, threading
hang = [sys.executable, "-c", "import threading; threading.Event().wait()"]
child = subprocess.Popen(hang, start_new_session=True)
part = pathlib.Path({pids!r} + ".part")
part.write_text(f"{{os.getpid()}} {{child.pid}}")
part.rename({pids!r})
{then}
threading.Event().wait()
"""


@pytest.fixture
def notebook(tmp_path):
    def make(*cells, metadata=None):
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        parameters = nbformat.v4.new_code_cell("fast = True\nsize = 3", metadata={"tags": ["parameters"]})
        nb = nbformat.v4.new_notebook(metadata={"kernelspec": kernel, **(metadata or {})})
        nb.cells = [nbformat.v4.new_markdown_cell("# A notebook"), parameters]
        nb.cells += map(nbformat.v4.new_code_cell, cells)
        path = tmp_path / "some_lab.ipynb"
        nbformat.write(nb, path)
        return path

    return make


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "done.ipynb"


def streams(path):
    return "".join(o.text for c in nbformat.read(path, 4).cells for o in c.get("outputs", []) if "text" in o)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_parameters_replace_the_defaults(notebook, out):
    values = {"size": [1, 2.5, 1e-5], "fast": False}
    done = run_notebook(notebook("print(size, fast)"), out, values)
    assert done.output == out
    assert streams(out) == "[1, 2.5, 1e-05] False\n"
    assert list(out.parent.iterdir()) == [out]


def test_peak_memory_is_that_of_the_kernel(notebook, out, tmp_path, monkeypatch):
    block = 200 * 2**20
    seen, measure = tmp_path / "seen", run._peak_memory
    os.mkfifo(seen)

    def measured(pid):
        peak = measure(pid)
        if peak > block and seen.exists():
            seen.write_text("seen")  # the cell waits for it: its end cannot come between two looks
            seen.unlink()
        return peak

    monkeypatch.setattr(run, "_peak_memory", measured)
    done = run_notebook(notebook(f"data = bytearray({block})\nopen({str(seen)!r}).read()\ndel data"), out)
    assert block < done.peak_memory < 4 * block
    assert done.seconds > 0


def test_unknown_parameter_names_those_there_are(notebook, out):
    with pytest.raises(ValueError, match=r"some_lab.ipynb has no 'sizes' \(got 5\); allowed are fast, size"):
        run_notebook(notebook(), out, {"sizes": 5})


def test_missing_notebook(out):
    with pytest.raises(ValueError, match=r"there is no file nowhere\.ipynb"):
        run_notebook("nowhere.ipynb", out)


def test_failing_cell_is_named_and_leaves_no_file(notebook, out):
    path = notebook("print('before')", "value = 0\n1 / value", "print('after')")
    reason = r"some_lab.ipynb: code cell 3 \(value = 0\) raised ZeroDivisionError: division by zero"
    with pytest.raises(NotebookError, match=reason):
        run_notebook(path, out, {"size": 1})
    assert list(out.parent.iterdir()) == []


def test_error_that_a_cell_announces_is_part_of_the_notebook(notebook, out):
    path = notebook("1 / 0", "print('after')")
    nb = nbformat.read(path, 4)
    nb.cells[2].metadata["tags"] = ["raises-exception"]
    nbformat.write(nb, path)
    run_notebook(path, out)
    cells = nbformat.read(out, 4).cells
    assert [cell.source for cell in cells] == [cell.source for cell in nb.cells]
    assert cells[2].outputs[0].ename == "ZeroDivisionError"
    assert streams(out) == "after\n"


def test_failed_run_keeps_the_earlier_output(notebook, out):
    out.parent.mkdir()
    out.write_text("good")
    with pytest.raises(NotebookError):
        run_notebook(notebook("1 / 0"), out)
    assert out.read_text() == "good"


def test_cell_limit(notebook, out):
    path = notebook("import threading", "threading.Event().wait()")
    with pytest.raises(NotebookError, match=r"code cell 3 \(threading.*\) ran past the cell limit of 1 s"):
        run_notebook(path, out, cell_timeout=1)
    assert list(out.parent.iterdir()) == []


def test_dead_kernel_is_told_from_a_failing_cell(notebook, out):
    with pytest.raises(NotebookError, match=r"code cell 3 \(os._exit\(1\)\) stopped: .*Kernel died"):
        run_notebook(notebook("import os", "os._exit(1)"), out)


def test_total_limit_ends_kernel_and_its_children(notebook, out, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setattr(time, "monotonic", lambda: 1e9 if pids.exists() else 0.0)  # late once the cell hangs
    path = notebook(HANG.format(pids=str(pids), then=""))
    with pytest.raises(NotebookError, match=r"code cell 2 \(import os.*\) was running at the limit of 600 s"):
        run_notebook(path, out)
    assert not any(map(running, map(int, pids.read_text().split())))
    assert list(out.parent.iterdir()) == []


# The interrupt may strike while psutil has a file of /proc open, which is then left to the collector.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in.*/proc/:pytest.PytestUnraisableExceptionWarning")
def test_interrupt_ends_kernel_and_its_children(notebook, out, tmp_path):
    pids = tmp_path / "pids"
    interrupt = f"import signal; os.kill({os.getpid()}, signal.SIGINT)"
    with pytest.raises(KeyboardInterrupt):
        run_notebook(notebook(HANG.format(pids=str(pids), then=interrupt)), out)
    assert not any(map(running, map(int, pids.read_text().split())))
    assert list(out.parent.iterdir()) == []


def test_children_that_outlive_the_kernel_are_ended(notebook, out, tmp_path):
    pids = tmp_path / "pids"
    code = HANG.format(pids=str(pids), then="").rpartition("threading.Event")[0]
    run_notebook(notebook(code), out)
    assert not any(map(running, map(int, pids.read_text().split())))


def test_run_inside_a_run_belongs_to_both(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_RUN", "outer")
    hang = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with run._child(hang, tmp_path / "log") as process:
        child = psutil.Process(process.pid)
        marks = next(filter(None, (run._marks(child) for _ in range(10_000))), [])  # none until it has its environment
        assert marks[0] == "outer"
        assert len(marks) == 2
    assert not running(process.pid)


def test_progress_counts_finished_cells(notebook, out, capsys):
    run_notebook(notebook("1", "2"), out, progress=True)
    assert "cell" in capsys.readouterr().err


def test_refresh_writes_outputs_and_counts_and_nothing_volatile_and_the_same_again(notebook):
    path = notebook(
        "import ipywidgets, sys\nprint('a')\nsys.stdout.flush()\nprint('b')",
        "ipywidgets.IntSlider(value=7)",
        metadata={"widgets": {"state": {}}, "papermill": {}},
    )
    refresh(path)
    nb = nbformat.read(path, 4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3]
    assert [output.text for output in code[1].outputs] == ["a\nb\n"]
    assert code[2].outputs[0].data == {"text/plain": "IntSlider(value=7)"}
    assert set(nb.metadata) == {"kernelspec"}
    assert code[0].metadata == {"tags": ["parameters"]}
    nbformat.validate(nb)
    once = path.read_bytes()
    refresh(path)
    assert path.read_bytes() == once


def test_refresh_that_fails_leaves_the_notebook(notebook):
    path = notebook("1 / 0")
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="ZeroDivisionError"):
        refresh(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_traceback_is_cut_to_its_last_line():
    lines = ["Traceback", "/some/where/labkit/x.py in f()", "ValueError: no"]
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=lines)
    cell = nbformat.v4.new_code_cell("f()", outputs=[error])
    clean(nbformat.v4.new_notebook(cells=[cell]))
    assert cell.outputs[0].traceback == ["ValueError: no"]


def test_output_that_was_only_a_widget_view_goes():
    view = nbformat.v4.new_output("display_data", {run.WIDGET_VIEW: {"model_id": "1"}})
    figure = nbformat.v4.new_output("display_data", {run.WIDGET_VIEW: {"model_id": "2"}, "text/plain": "Panel"})
    cell = nbformat.v4.new_code_cell("panel", outputs=[view, figure])
    clean(nbformat.v4.new_notebook(cells=[cell]))
    assert cell.outputs == [nbformat.v4.new_output("display_data", {"text/plain": "Panel"})]

"""Notebooks run from outside: as a child process that can always be stopped, or rewritten in place.

papermill executes the notebook in a process group of its own. Its kernel leads another group and may have
children too, so every descendant carries a mark in its environment; when a run ends, whichever way, all that
carry the mark are killed.

`python -m labkit.run NOTEBOOK…` executes notebooks with their default parameters and rewrites them in place.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm.auto import tqdm

from labkit.atomic import replacing
from labkit.errors import require

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
VOLATILE_METADATA = (
    "metadata.widgets",
    "metadata.papermill",
    "metadata.signature",
    "metadata.language_info.version",
    "cell.metadata.papermill",
    "cell.metadata.execution",
    "cell.metadata.ExecuteTime",
    "cell.metadata.collapsed",
    "cell.metadata.scrolled",
)
_MARK = "LABKIT_RUN"
_POLL = 0.2  # s


class NotebookError(RuntimeError):
    """A notebook failed or ran past a limit. The message names the notebook, the cell and the reason."""


@dataclass(frozen=True)
class NotebookRun:
    """A finished run.

    Attributes:
        notebook: what was run.
        output: where the executed notebook lies.
        seconds: wall time.
        peak_memory: bytes, of the run's largest process; what came after the last look, every 0.2 s, is not in it.
    """

    notebook: Path
    output: Path
    seconds: float
    peak_memory: int


def run_notebook(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, object] | None = None,
    *,
    start_timeout: int = 60,
    cell_timeout: int = 120,
    total_timeout: int = 600,
    progress: bool = False,
) -> NotebookRun:
    """Execute a notebook with papermill under hard limits.

    Args:
        notebook: the notebook to run; it is not changed.
        output: where the executed notebook goes. It appears only after the last cell has finished.
        parameters: values for names of the notebook's `parameters` cell.
        start_timeout: seconds that the kernel may take to start.
        cell_timeout: seconds that one cell may take.
        total_timeout: seconds that the whole run may take.
        progress: show a bar that counts code cells.

    Returns:
        The finished run.

    Raises:
        ValueError: no such notebook, or a name that its `parameters` cell does not define.
        NotebookError: a cell raised, or a limit was reached. No process and no file of the run is left.
        MissingDependency: papermill is not installed.
    """
    notebook, output = Path(notebook), Path(output)
    if not notebook.is_file():
        raise ValueError(f"notebook: there is no file {notebook}")
    parameters = dict(parameters or {})
    _check_parameters(notebook, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.stem}-", dir=output.parent) as scratch:
        partial, log = Path(scratch, "notebook.ipynb"), Path(scratch, "log")
        command = [sys.executable, "-m", "papermill", notebook, partial, "--no-progress-bar"]
        command += ["--start-timeout", str(start_timeout), "--execution-timeout", str(cell_timeout)]
        if parameters:
            text = require("yaml", "lab").safe_dump(parameters)
            command += ["--parameters_base64", base64.b64encode(text.encode())]
        start = time.monotonic()
        with _child(command, log) as process:
            exit_code, peak_memory = _wait(process, partial, start + total_timeout, progress)
        seconds = time.monotonic() - start
        if exit_code is None:
            raise NotebookError(f"{_place(notebook, partial)} was running at the limit of {total_timeout} s")
        if exit_code != 0 and not _ran_to_the_end(partial, log):
            raise NotebookError(f"{_place(notebook, partial)} {_reason(partial, log, cell_timeout)}")
        partial.replace(output)
    return NotebookRun(notebook, output, seconds, peak_memory)


def refresh(notebook: Path, **limits: int) -> None:
    """Execute a notebook with its default parameters and rewrite it in place, ready to be committed.

    Outputs and execution counts are new. Widget state, views of widgets that no longer live, and all metadata
    that changes from run to run are left out. Two refreshes of an unchanged notebook give the same bytes.

    Args:
        notebook: the notebook to rewrite; the file is replaced whole, or not at all.
        limits: as for `run_notebook`.

    Raises:
        NotebookError, ValueError: as `run_notebook`.
        MissingDependency: nbstripout is not installed.
    """
    nbformat = require("nbformat", "lab")
    with tempfile.TemporaryDirectory() as scratch:
        executed = nbformat.read(run_notebook(notebook, Path(scratch, "executed.ipynb"), **limits).output, 4)
    source = nbformat.read(notebook, 4)
    for cell, done in zip(source.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    with replacing(notebook) as partial:
        nbformat.write(clean(source), partial)


def clean(notebook):
    """Drop from an executed notebook (a `NotebookNode`, changed and returned) what must not be committed."""
    coalesce = require("nbconvert.preprocessors", "lab").CoalesceStreamsPreprocessor()
    strip_output = require("nbstripout", "test").strip_output
    strip_output(notebook, keep_output=True, keep_count=True, keep_id=True, extra_keys=[*VOLATILE_METADATA])
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET_VIEW, None)
            if output.output_type == "error":
                output.traceback = output.traceback[-1:]  # the lines above name files of this machine
        cell.outputs = [output for output in cell.outputs if output.get("data") != {}]
        coalesce.preprocess_cell(cell, {}, 0)
    return notebook


def _check_parameters(notebook: Path, parameters: dict) -> None:
    known = require("papermill", "lab").inspect_notebook(str(notebook))
    for name, value in parameters.items():
        if name not in known:
            allowed = ", ".join(known) or "none, it has no parameters cell"
            raise ValueError(f"parameters: {notebook.name} has no {name!r} (got {value!r}); allowed are {allowed}")


@contextmanager
def _child(command: list, log: Path):
    """A process in a group of its own, gone with all its descendants when the block ends."""
    mark = uuid.uuid4().hex
    env = os.environ | {_MARK: f"{os.environ.get(_MARK, '')} {mark}"}  # a run inside a run keeps the outer mark
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while stragglers := [p for p in psutil.process_iter() if mark in _marks(p)]:
            for straggler in stragglers:
                straggler.kill()
            psutil.wait_procs(stragglers, timeout=5)


def _marks(process: psutil.Process) -> list[str]:
    try:
        return process.environ().get(_MARK, "").split()
    except (psutil.Error, OSError):  # of another user, or gone
        return []


def _wait(process: subprocess.Popen, partial: Path, deadline: float, progress: bool) -> tuple[int | None, int]:
    """Exit code, None if the deadline came first, and peak memory in bytes of the largest descendant."""
    peak = 0
    with tqdm(disable=not progress, unit="cell") as bar:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return process.returncode, peak
            peak = max(peak, _peak_memory(process.pid))
            if progress:
                _advance(bar, partial)
            time.sleep(_POLL)
    return None, peak


def _peak_memory(pid: int) -> int:
    """Bytes, of the largest process in the tree below `pid`: its peak so far on Linux, its present size elsewhere.

    The operating system's own account of a finished child (ru_maxrss) would count what its parent held when it forked.
    """
    largest = 0
    with suppress(psutil.Error, OSError):
        parent = psutil.Process(pid)
        for member in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                status = Path(f"/proc/{member.pid}/status")
                if status.is_file():
                    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
                    largest = max(largest, int(found[1]) * 1024 if found else 0)
                else:
                    largest = max(largest, member.memory_info().rss)
    return largest


def _advance(bar: tqdm, partial: Path) -> None:
    cells = _code_cells(partial)
    done = sum(_papermill(cell, "end_time") is not None for cell in cells)
    if done > bar.n:
        bar.total = len(cells)
        bar.update(done - bar.n)


def _code_cells(partial: Path) -> list[dict]:
    """The code cells as papermill last saved them; none while the file is missing or half written."""
    try:
        cells = json.loads(partial.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return []
    injected = "injected-parameters"
    return [c for c in cells if c["cell_type"] == "code" and injected not in c["metadata"].get("tags", [])]


def _papermill(cell: dict, key: str) -> object:
    return cell["metadata"].get("papermill", {}).get(key)


def _ran_to_the_end(partial: Path, log: Path) -> bool:
    """Whether all that papermill complains of are errors that cells announce with the tag `raises-exception`.

    It runs such a notebook to the end, then inserts a notice and exits with an error. The notice is taken out.
    """
    if any(_papermill(cell, "exception") for cell in _code_cells(partial)):
        return False
    if "PapermillExecutionError" not in log.read_text(encoding="utf-8", errors="replace"):
        return False
    nbformat, execute = require("nbformat", "lab"), require("papermill.execute", "lab")
    nbformat.write(execute.remove_error_markers(nbformat.read(partial, 4)), partial)
    return True


def _place(notebook: Path, partial: Path) -> str:
    """Notebook and cell, for an error message: the last cell that was started is the one to blame."""
    started = [(n, cell) for n, cell in enumerate(_code_cells(partial), 1) if _papermill(cell, "start_time")]
    if not started:
        return f"{notebook.name}: the kernel, before the first cell,"
    number, cell = started[-1]
    first_line = "".join(cell["source"]).strip().partition("\n")[0]
    return f"{notebook.name}: code cell {number} ({first_line})"


def _reason(partial: Path, log: Path, cell_timeout: int) -> str:
    for cell in _code_cells(partial):
        if _papermill(cell, "exception"):
            (error,) = (output for output in cell["outputs"] if output["output_type"] == "error")
            return f"raised {error['ename']}: {error['evalue']}"
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    if "CellTimeoutError" in text:
        return f"ran past the cell limit of {cell_timeout} s"
    return f"stopped: {text.splitlines()[-1] if text else 'no output'}"


if __name__ == "__main__":
    for path in tqdm(sys.argv[1:], unit="notebook"):
        refresh(Path(path))

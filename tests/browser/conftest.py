"""One JupyterLab server and one Chromium for all browser tests, with everything but loopback blocked and recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, ElementHandle, Page, sync_playwright

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
]  # fmt: skip
PATIENCE = 120_000  # ms: how long a page of a loaded two-core machine may take
HARMLESS = (
    # The widget manager asks a FigureWidget, which has no ipywidgets layout, for the view of that layout.
    "Cannot read properties of undefined (reading 'then')",
    # A request to a kernel that is being restarted.
    "Canceled future for",
    # A model that took over two seconds on a busy machine; test_panel.py shows that plots live on.
    "[anywidget] Failed to initialize model.",
)
NOTEBOOK = "window.jupyterapp.shell.currentWidget"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@dataclass(frozen=True)
class Server:
    url: str
    root: Path  # what JupyterLab shows; notebooks are copied here so that autosave leaves the originals alone

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            body = response.read()
        return json.loads(body) if body else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _until_up(server: Server, process: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, f"JupyterLab ended at once:\n{log.read_text()}"
        try:
            server.api("status")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"JupyterLab did not answer within 120 s:\n{log.read_text()}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab of this environment, without token, with a configuration of its own."""
    home = tmp_path_factory.mktemp("jupyter")
    for folder in ("config/labconfig", "data", "runtime", "ipython", "root"):
        (home / folder).mkdir(parents=True)
    news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (home / "config/labconfig/page_config.json").write_text(json.dumps(news))
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    port, log = _free_port(), home / "server.log"
    running = Server(f"http://127.0.0.1:{port}", home / "root")
    command = [
        sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={running.root}", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True",
        "--LabApp.news_url=None",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _until_up(running, process, log)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "the browser tests need Debian's chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@dataclass
class Lab:
    """One page of JupyterLab with one notebook in it."""

    page: Page
    server: Server
    external: list[str] = field(default_factory=list)  # addresses outside loopback that were asked for
    errors: list[str] = field(default_factory=list)  # uncaught errors of the page

    def open(self, notebook: Path) -> None:
        """Show a copy of `notebook`, with its outputs cleared and its kernel idle."""
        shutil.copy(notebook, self.server.root)
        self.page.goto(f"{self.server.url}/lab/tree/{notebook.name}?reset", timeout=PATIENCE)
        self.ready()
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")

    def ready(self) -> None:
        """Wait until the notebook is on the page and its kernel idle."""
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=PATIENCE)
        self.page.wait_for_function(
            f"() => {NOTEBOOK}?.context?.isReady && {NOTEBOOK}.sessionContext.session?.kernel?.status === 'idle'",
            timeout=PATIENCE,
        )

    def run_all(self, timeout: float = 300_000) -> None:
        """Restart the kernel, run every cell, and wait for the end or for an output that is an error."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-run-all') }")
        self.page.click(".jp-Dialog button.jp-mod-accept", timeout=PATIENCE)
        self.page.wait_for_function(
            f"""() => {{
                const cells = [...{NOTEBOOK}.content.model.cells].filter(c => c.type === 'code');
                const ran = c => c.executionCount !== null && c.executionState !== 'running';
                const failed = c => c.toJSON().outputs.some(o => o.output_type === 'error')
                    && !(c.getMetadata('tags') || []).includes('raises-exception');
                return cells.some(failed) || cells.filter(c => c.sharedModel.source.trim()).every(ran);
            }}""",
            timeout=timeout,
        )

    def outputs(self) -> list[list[dict]]:
        """The outputs of each cell; [] for text cells, and without the errors of cells that demonstrate one."""
        return self.page.evaluate(
            f"""() => [...{NOTEBOOK}.content.model.cells].map(c => (c.toJSON().outputs || []).filter(
                o => o.output_type !== 'error' || !(c.getMetadata('tags') || []).includes('raises-exception')))"""
        )

    def cell(self, index: int) -> ElementHandle:
        """Scroll cell number `index` into view and return its element (JupyterLab detaches cells out of view)."""
        self.page.evaluate(f"i => {NOTEBOOK}.content.scrollToItem(i, 'start')", index)
        self.page.wait_for_function(
            f"""i => {{
                const nb = {NOTEBOOK}.content, node = nb.widgets[i].node;
                if (!node.isConnected) {{ nb.scrollToItem(i, 'start'); return false; }}
                node.scrollIntoView({{block: 'start'}});
                return node.getBoundingClientRect().height > 0;
            }}""",
            arg=index,
            timeout=PATIENCE,
        )
        return self.page.evaluate_handle(f"i => {NOTEBOOK}.content.widgets[i].node", index).as_element()


@pytest.fixture
def lab(server: Server, browser: Browser) -> Iterator[Lab]:
    """A fresh JupyterLab page; kernels started through it are shut down afterwards."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    view = Lab(page, server)

    def gate(route) -> None:
        if urlsplit(route.request.url).hostname in ("127.0.0.1", "localhost", None):  # None: data: and blob:
            route.continue_()
        else:
            view.external.append(route.request.url)
            route.abort()

    context.route("**/*", gate)
    page.on("websocket", lambda s: urlsplit(s.url).hostname == "127.0.0.1" or view.external.append(s.url))
    page.on("pageerror", lambda error: view.errors.append(str(error)))
    yield view
    context.close()
    for session in server.api("sessions"):
        server.api(f"sessions/{session['id']}", "DELETE")


@pytest.fixture
def notebook(tmp_path: Path) -> Callable[..., Path]:
    """Writes a notebook of the given code cells and returns its path."""

    def write(*cells: str) -> Path:
        path = tmp_path / "made.ipynb"
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=kernel), path)
        return path

    return write


@pytest.fixture
def unexpected(lab: Lab):
    """Call it to get what must be empty at the end: outside requests and page errors, save those known to be harmless."""
    return lambda: lab.external + [error for error in lab.errors if not any(known in error for known in HARMLESS)]

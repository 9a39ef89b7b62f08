"""`labkit lab` as a newcomer meets it: a home folder with no settings."""

import json
import os
import re
import subprocess
import sys
import threading

import pytest

from labkit.labs import LABS


@pytest.fixture
def address(tmp_path):
    """Where `labkit lab` serves the laboratory, started in an empty home folder."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("JUPYTER")}
    command = [sys.executable, "-m", "labkit.cli", "lab", "--copy", str(tmp_path / "notebooks")]
    process = subprocess.Popen(
        [*command, "--no-browser", "--port=0"],
        env=env | {"HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = iter(process.stderr.readline, "")
    try:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+/\S+", line) for line in lines)))
        drain = threading.Thread(target=process.stderr.read)  # a full pipe would stop the server
        drain.start()
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join()
        process.stderr.close()


def test_first_notebook_opens_and_no_news_pop_up(address, browser):
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.wait_for_load_state("networkidle")
    assert page.locator(".lm-TabBar-tabLabel", has_text=LABS["00"].notebook.name).count() == 1
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0
    config = json.loads(page.locator("#jupyter-config-data").text_content())
    assert "@jupyterlab/apputils-extension:announcements" in config["disabledExtensions"]
    page.close()

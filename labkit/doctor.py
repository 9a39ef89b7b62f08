"""Is this machine ready? Each check says what it found and, where it matters, the line that mends it."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from labkit import assets
from labkit.labs import LABS

PACKAGES = "labkit jupyterlab papermill ipywidgets anywidget plotly numpy torch transformers".split()
LAB_EXTENSIONS = {  # extension -> Python package that ships it
    "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets",
    "anywidget": "anywidget",
    "jupyterlab-plotly": "plotly",
}
DEBIAN_PACKAGES = ("apertium", "apertium-eng-spa", "apertium-eng-cat", "dataset-fashion-mnist")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MEMORY_GB = 1.5  # a kernel in fast mode and the server


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        topic: "packages", "widgets", "machine", "assets" or "programs".
        name: what was looked at.
        found: what is there, in words.
        ok: whether that will do.
        fix: the command or step that mends it, empty when all is well.
        optional: whether the labs that are ready run without it.
    """

    topic: str
    name: str
    found: str
    ok: bool
    fix: str = ""
    optional: bool = False


def checks() -> list[Check]:
    """Look at packages, widget extensions, the machine, assets of ready labs, programs. Changes nothing."""
    return [*_packages(), *_widgets(), *_machine(), *_assets(), *_programs()]


def _packages() -> Iterator[Check]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    fix = "" if supported else "make the environment with Python 3.11 or 3.12"
    yield Check("packages", "python", platform.python_version(), supported, fix)
    for name in PACKAGES:
        version = _version(name)
        fix = "" if version else 'pip install -c constraints.txt -e ".[all]"'
        yield Check("packages", name, version or "not installed", version is not None, fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _widgets() -> Iterator[Check]:
    """The widgets' front ends, as a JupyterLab server finds them, beside this kernel's packages."""
    if find_spec("jupyterlab") is None:
        return
    from jupyter_core.paths import jupyter_path
    from jupyterlab.commands import AppOptions, get_app_info

    info = get_app_info(AppOptions(labextensions_path=jupyter_path("labextensions")))
    for extension, package in LAB_EXTENSIONS.items():
        shipped, served = _shipped_version(extension), info["federated_extensions"].get(extension)
        if served is None:
            found, ok = "not found by JupyterLab", False
        elif extension in info["disabled"]:
            found, ok = f"{served['version']}, disabled", False
        else:
            found, ok = (
                f"{served['version']} enabled, {package} {_version(package)}",
                served["version"] == shipped,
            )
        fix = f"pip install --force-reinstall {package}=={_version(package)}, where JupyterLab runs"
        if extension in info["disabled"]:
            fix = f"jupyter labextension enable {extension}"
        yield Check("widgets", extension, found, ok, "" if ok else fix)


def _shipped_version(extension: str) -> str | None:
    """The version of a lab extension inside this environment, the one that its Python package speaks to."""
    manifest = Path(sys.prefix, "share", "jupyter", "labextensions", extension, "package.json")
    return json.loads(manifest.read_text(encoding="utf-8"))["version"] if manifest.is_file() else None


def _machine() -> Iterator[Check]:
    free = psutil.virtual_memory().available / 1e9
    fix = "" if free >= MEMORY_GB else "shut down other kernels or programs"
    yield Check("machine", "free memory", f"{free:.1f} GB", free >= MEMORY_GB, fix)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Check("machine", "threads", f"{os.cpu_count()} cores, OMP_NUM_THREADS {threads}", True)
    kernel = _kernel_python()
    if kernel:
        same = Path(kernel).exists() and Path(kernel).samefile(sys.executable)
        fix = "" if same else f"{sys.executable} -m ipykernel install --sys-prefix"
        yield Check("machine", "notebook kernel", kernel, same, fix)


def _kernel_python() -> str | None:
    """The interpreter that a notebook's `python3` kernel starts."""
    if find_spec("jupyter_client") is None:
        return None
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return None
    return sys.executable if program.startswith("python") else program


def _assets() -> Iterator[Check]:
    ready = {lab.number for lab in LABS.values() if lab.ready}
    for asset in assets.manifest().values():
        if ready.isdisjoint(asset.labs):
            continue
        sound = assets.verify(asset.name)
        present = assets.is_present(asset.name)
        found = f"{asset.size / 1e6:.1f} MB" if sound else "damaged" if present else "not fetched"
        fix = "" if sound else f"labkit assets fetch {asset.name}"
        yield Check("assets", asset.name, found, sound, fix, asset.optional)


def _programs() -> Iterator[Check]:
    debian = shutil.which("dpkg-query") is not None
    for package in DEBIAN_PACKAGES:
        there = _debian_has(package) if debian else shutil.which(package) is not None
        fix = "" if there else f"apt-get install {package}" if debian else f"install {package}, if there is one"
        yield Check("programs", package, "installed" if there else "not installed", there, fix, optional=True)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    fix = "" if browser else "install Chromium (only the browser tests need it)"
    yield Check("programs", "chromium", browser or "not installed", browser is not None, fix, optional=True)


def _debian_has(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True).stdout == "installed"

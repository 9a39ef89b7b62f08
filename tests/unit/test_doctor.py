import json
from pathlib import Path

import pytest

from labkit import doctor, labs

ROOT = Path(__file__).parents[2]


def find(topic, name):
    (check,) = [check for check in doctor.checks() if (check.topic, check.name) == (topic, name)]
    return check


def test_every_problem_has_a_fix_and_nothing_else_has(monkeypatch, tmp_path):
    monkeypatch.setattr(labs.Lab, "ready", True)
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path))
    found = doctor.checks()
    assert {check.topic for check in found} == {"packages", "widgets", "machine", "assets", "programs"}
    assert [check for check in found if check.ok == bool(check.fix)] == []


def test_this_environment_has_all_packages_and_lab_extensions():
    found = [check for check in doctor.checks() if check.topic in ("packages", "widgets")]
    assert [check for check in found if not check.ok] == []
    assert set(doctor.LAB_EXTENSIONS) <= {check.name for check in found}


def test_disabled_lab_extension_is_found(monkeypatch, tmp_path):
    page_config = tmp_path / "labconfig" / "page_config.json"
    page_config.parent.mkdir()
    page_config.write_text(json.dumps({"disabledExtensions": {"anywidget": True}}))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    check = find("widgets", "anywidget")
    assert not check.ok
    assert check.fix == "jupyter labextension enable anywidget"


def test_lab_extension_of_another_version_is_found(monkeypatch, tmp_path):
    shadow = tmp_path / "labextensions" / "anywidget" / "package.json"
    shadow.parent.mkdir(parents=True)
    build = {"load": "static/remoteEntry.js"}
    shadow.write_text(json.dumps({"name": "anywidget", "version": "0.1.0", "jupyterlab": {"_build": build}}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    check = find("widgets", "anywidget")
    assert not check.ok
    assert check.fix.startswith("pip install --force-reinstall anywidget==")


def test_kernel_of_another_environment_is_found(monkeypatch, tmp_path):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["/elsewhere/python", "-m", "x"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    check = find("machine", "notebook kernel")
    assert not check.ok
    assert check.found == "/elsewhere/python"


@pytest.mark.parametrize("optional", [True, False])
def test_asset_of_a_ready_lab_that_is_not_here(optional, monkeypatch, tmp_path):
    monkeypatch.setattr(labs.Lab, "ready", True)
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path))
    missing = [check for check in doctor.checks() if check.topic == "assets" and check.found == "not fetched"]
    check = next(check for check in missing if check.optional == optional)
    assert check.fix == f"labkit assets fetch {check.name}"


def test_programs_are_those_that_binder_installs():
    assert list(doctor.DEBIAN_PACKAGES) == (ROOT / "binder" / "apt.txt").read_text().split()

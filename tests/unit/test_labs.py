import dataclasses
import tomllib
from pathlib import Path

import pytest

from labkit import assets, labs
from labkit.errors import MissingDependency

ROOT = Path(__file__).parents[2]


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """An empty notebook folder in place of the real one."""
    monkeypatch.setattr(labs, "notebook_dir", lambda: tmp_path)
    return tmp_path


def test_eight_labs_in_order():
    assert list(labs.LABS) == [f"{i:02d}" for i in range(8)]
    assert all(number == lab.number for number, lab in labs.LABS.items())


def test_every_notebook_belongs_to_a_lab():
    known = {f"{lab.number}_{lab.slug}.ipynb" for lab in labs.LABS.values()}
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} <= known


def test_assets_are_those_that_the_manifest_requires():
    for lab in labs.LABS.values():
        required = {asset.name for asset in assets.for_lab(lab.number) if not asset.optional}
        assert set(lab.assets) == required, lab.number


def test_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {lab.extra for lab in labs.LABS.values()} <= set(project["optional-dependencies"])


def test_find_takes_one_digit_or_two():
    assert labs.find("1") is labs.find("01") is labs.LABS["01"]


@pytest.mark.parametrize("number", ["8", "", "one", "001"])
def test_find_names_the_labs_there_are(number):
    with pytest.raises(ValueError, match=r"no lab .*00, 01, .*07"):
        labs.find(number)


def test_lab_is_ready_once_its_notebook_is_there(notebooks):
    lab = labs.LABS["03"]
    assert not lab.ready
    assert lab.notebook is None
    with pytest.raises(ValueError, match=r"lab 03 \(Scenario trees\) is in preparation"):
        labs.find_ready("3")
    path = notebooks / "03_scenario_trees.ipynb"
    path.touch()
    assert labs.find_ready("3").notebook == path


def test_source_tree_uses_its_own_notebooks():
    assert labs.notebook_dir() == ROOT / "notebooks"


def test_map_of_the_lab_has_no_experiment():
    with pytest.raises(ValueError, match="lab 00"):
        labs.experiment(labs.LABS["00"])


def test_missing_package_of_a_lab_names_its_extra():
    lab = dataclasses.replace(labs.LABS["06"], package="package_that_is_not_there")
    with pytest.raises(MissingDependency, match=r'package_that_is_not_there.*pip install "labkit\[dock\]"'):
        labs.experiment(lab)


def test_readme_lists_the_labs_as_they_are():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| 0")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    for lab, (number, title, paper, library, state) in zip(labs.LABS.values(), cells, strict=True):
        assert (number, title) == (lab.number, lab.title)
        assert library.strip("`") == lab.package
        assert lab.paper.startswith(paper) or not lab.package
        assert state == ("ready" if lab.ready else "in preparation")

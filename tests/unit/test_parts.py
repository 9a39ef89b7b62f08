"""Parts of long work."""

import json
from dataclasses import dataclass

import pandas as pd
import pytest

from labkit.parts import claim, once, write_table


@dataclass(frozen=True)
class Recipe:
    lr: float = 0.1
    levels: tuple[float, ...] = (0.5, 0.6)


def test_a_part_is_made_once(tmp_path):
    made = []
    for text in ("first", "second"):
        once(tmp_path / "deep" / "part", lambda path, text=text: made.append(path.write_text(text)))
    assert (tmp_path / "deep" / "part").read_text() == "first"
    assert len(made) == 1


def test_a_part_that_fails_leaves_nothing(tmp_path):
    def fail(path):
        path.write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        once(tmp_path / "part", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_table_comes_back_and_its_bytes_depend_on_it_alone(tmp_path):
    table = pd.DataFrame({"p": [0.5, 0.6], "method": ["teal", "spon"]})
    for name in ("a.csv.gz", "b.csv.gz"):
        write_table(table, tmp_path / name)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "a.csv.gz"), table)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


def test_a_build_is_claimed_once_and_again_by_the_same_recipe(tmp_path):
    claim(tmp_path, Recipe(), packages=("numpy",))
    claim(tmp_path, Recipe())
    stored = json.loads((tmp_path / "recipe.json").read_text(encoding="utf-8"))
    assert stored["recipe"] == {"lr": 0.1, "levels": [0.5, 0.6]}
    assert set(stored["versions"]) == {"numpy", "python"}


def test_another_recipe_is_refused_by_what_differs(tmp_path):
    claim(tmp_path, Recipe())
    with pytest.raises(ValueError, match=r"holds a build with other levels, lr: empty it or choose another folder"):
        claim(tmp_path, Recipe(lr=0.2, levels=(0.7,)))

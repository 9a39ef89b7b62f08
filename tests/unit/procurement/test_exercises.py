"""What the checkers of the notebook say to answers that are wrong, each in its own way."""

import re

import nbformat
import numpy as np
import pytest

from labkit import quiz
from labkit.labs import LABS

UNCAPPED = "lambda c, wins: np.where(wins, values * np.where(wins, 1e9, c / values).min(-1, keepdims=True), 0)"
CAPPED = UNCAPPED.replace("1e9", "1")
EPSILON = "((0.01, 1), (0, 0.5), {})"


@pytest.fixture(scope="module")
def notebook():
    """The notebook's imports, parameters, first market and checkers, by name."""
    names = {}
    code = [cell.source for cell in nbformat.read(LABS["04"].notebook, 4).cells if cell.cell_type == "code"]
    for source in code:
        if source.startswith(("import ", "fast = ", "values, ")) or "answer_" in source:
            exec(source, names)
    return names


@pytest.mark.parametrize(
    ("checker", "answer", "words"),
    [
        ("lies", CAPPED, None),
        ("lies", "lambda c, wins: c * wins", "you pay .* but the price is 0.50 of each value"),
        ("lies", UNCAPPED, "but the price is 1.00 of each value"),
        ("lies", "lambda c, wins: pr.value_clock(c, values, 5).payments", "you pay .* but the price is"),
        ("lies", "lambda c, wins: values + 0 * c", "you pay .* but the price is"),
        ("bad_enough", EPSILON.format(0.5), None),
        ("bad_enough", EPSILON.format(0.4), "the ratio is 1.000, with a budget of 0.4 for costs of 0.0 and 0.5"),
        ("bad_enough", EPSILON.format(0), "a budget above 0 are wanted"),
        ("bad_enough", EPSILON.format(np.inf).replace("inf", "np.inf"), "a budget above 0 are wanted"),
        ("bad_enough", EPSILON.format("(0.5, 0.5)"), "a budget above 0 are wanted"),
        ("bad_enough", "((1,), (0.5,), 1)", "two values, two costs"),
        ("bad_enough", "((1, 1), (0.5, 0.5), 0.1)", "a budget of 0.1 hires nobody who is worth it"),
        ("smallest", "11", None),
        ("smallest", "10", "at k = 10 the bound is 0.787"),
        ("smallest", "12", "at k = 11 the bound is 0.801 already"),
        ("smallest", "1", "a whole number of at least 2 is wanted"),
        ("smallest", "10.5", "a whole number of at least 2 is wanted"),
        ("half", "14.75", None),
        ("half", "14", "there it is .* of the bound"),
        ("half", "0.2", "there it is .* of the bound"),
        ("half", "0", "a budget above 0 is wanted"),
    ],
)
def test_an_answer_is_right_or_told_what_is_wrong_with_it(notebook, checker, answer, words):
    check = quiz.check_property("1", eval(answer, notebook), holds=notebook[checker])
    assert check.status == ("wrong" if words else "right"), check.message
    assert "raised" not in check.message
    assert "not yet" not in check.message
    if words:
        assert re.search(words, check.message)

import numpy as np
import pytest
import torch

from labkit import quiz


@pytest.mark.parametrize("blank", [None, ...])
def test_an_unsolved_exercise_is_not_attempted(blank, capsys):
    checks = [
        quiz.check_number("1", blank, expected=1.0),
        quiz.check_choice("2", blank, options=["a", "b"], correct="a"),
        quiz.check_property("3", blank, holds=lambda f: f(1) == 2),
    ]
    assert [check.status for check in checks] == ["not attempted"] * 3
    assert capsys.readouterr().out.splitlines()[0] == "○ Exercise 1: not attempted"


@pytest.mark.parametrize("answer", [0.0713, np.float32(0.0713), np.array(0.0713), torch.tensor([0.0713]), "0.0713"])
def test_a_number_within_tolerance_is_right_whatever_its_type(answer):
    assert quiz.check_number("1", answer, expected=0.0714).status == "right"


def test_tolerances_add_up():
    assert quiz.check_number("1", 101.5, expected=100, rtol=0.01, atol=0.5).status == "right"
    assert quiz.check_number("1", 101.6, expected=100, rtol=0.01, atol=0.5).status == "wrong"
    assert quiz.check_number("1", 0.001, expected=0, atol=0.01).status == "right"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (3.0, "3.00 is too small"),
        (5.0, "5.00 is too large"),
        (float("nan"), "NaN"),
        ("four", "a number is wanted, got 'four'"),
        ([1, 2], "a number is wanted, got list"),
        (torch.ones(2), "a number is wanted, got Tensor"),
    ],
)
def test_a_wrong_number_gets_the_reason_and_the_hint(answer, reason):
    check = quiz.check_number("1", answer, expected=4.0, hint="Square both sides.")
    assert check.status == "wrong"
    assert reason in check.message
    assert check.message.endswith("Square both sides.")


def test_a_choice_ignores_case_and_blanks():
    choose = {"options": ["Narrower", "same"], "correct": "same"}
    assert quiz.check_choice("1", " SAME ", **choose).status == "right"
    assert quiz.check_choice("1", "narrower", **choose).status == "wrong"
    assert "choose one of Narrower, same" in quiz.check_choice("1", 7, **choose).message


def test_a_property_calls_the_answer_and_passes_on_its_reason():
    def doubles(f):
        return f(3) == 6 or f"f(3) should be 6, got {f(3)}."

    assert quiz.check_property("1", lambda x: 2 * x, holds=doubles).status == "right"
    check = quiz.check_property("1", lambda x: x**2, holds=doubles, hint="Twice, not squared.")
    assert check.message == "✗ Exercise 1: not quite: f(3) should be 6, got 9. Twice, not squared."


def test_an_answer_that_raises_is_wrong_and_stops_nothing():
    check = quiz.check_property("1", lambda x: x / 0, holds=lambda f: f(1) == 1)
    assert check.status == "wrong"
    assert "ZeroDivisionError" in check.message
    assert quiz.check_property("1", 3, holds=lambda f: f(1) == 1).status == "wrong"


def test_an_array_as_the_outcome_of_a_property_is_no_crash():
    assert quiz.check_property("1", np.ones(2), holds=lambda a: a == 1).status == "wrong"
    assert quiz.check_property("1", np.ones(2), holds=lambda a: np.all(a == 1)).status == "right"


def test_a_check_has_a_fixed_repr_and_shows_nothing_twice(capsys):
    check = quiz.check_number("1", 4, expected=4)
    assert capsys.readouterr().out == "✓ Exercise 1: right\n"
    assert repr(check) == "Check('1', 'right')"
    check._ipython_display_()
    assert capsys.readouterr().out == ""


def test_a_sealed_choice_is_right_only_by_its_option():
    options = ("noise", "Objective", "overfit")
    sealed = quiz.seal("objective")
    found = [quiz.check_choice("5", answer, options=options, correct=sealed).status for answer in (*options, sealed)]
    assert found == ["wrong", "right", "wrong", "wrong"]

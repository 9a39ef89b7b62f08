"""Checkers for the exercises: they print one line, never raise, and leave an unsolved notebook running.

An answer of `None` or `...` is "not attempted". A wrong one gets a hint, a right one is confirmed. What comes back
carries the status, so a solution can be tested and a folder of notebooks graded::

    answer = ...
    quiz.check_number("2", answer, expected=4.0, hint="Both sides are squared.")
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from labkit.theme import fmt

Status = Literal["not attempted", "wrong", "right"]
_MARK = {"not attempted": "○", "wrong": "✗", "right": "✓"}


@dataclass(frozen=True)
class Check:
    """What a checker found: the exercise, the status, and the line it printed."""

    name: str
    status: Status
    message: str

    def __repr__(self) -> str:
        return f"Check({self.name!r}, {self.status!r})"

    def _ipython_display_(self) -> None:
        """The line is printed already; the last value of a cell adds nothing to it."""


def check_number(name: str, answer: Any, *, expected: float, rtol: float = 0.01, atol: float = 0.0, hint: str = "") -> Check:
    """Right if `|answer − expected| ≤ atol + rtol |expected|`. Accepts whatever `float` does."""

    def verdict() -> str | None:
        try:
            value = float(answer)
        except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for more than one element
            return f"a number is wanted, got {_kind(answer)}."
        if math.isnan(value):
            return "your number is NaN."
        if abs(value - expected) <= atol + rtol * abs(expected):
            return None
        return f"{fmt(value)} is too {'large' if value > expected else 'small'}."

    return _check(name, answer, verdict, hint)


def check_choice(name: str, answer: Any, *, options: Sequence[str], correct: str, hint: str = "") -> Check:
    """Right if `answer` is the `correct` one of `options`, whatever its case and outer blanks.

    `correct` may be the `seal` of the right option, for a cell that should not give its own answer away.
    """

    def verdict() -> str | None:
        given = str(answer).strip().casefold()
        if given not in [option.casefold() for option in options]:
            return f"choose one of {', '.join(options)}; got {_short(answer)}."
        return None if correct.casefold() in (given, seal(given)) else f"not {_short(answer)}."

    return _check(name, answer, verdict, hint)


def seal(option: str) -> str:
    """A short hash of an option, which `check_choice` takes in place of the option itself."""
    return hashlib.sha256(option.strip().casefold().encode()).hexdigest()[:8]


def check_property(name: str, answer: Any, *, holds: Callable[[Any], bool | str], hint: str = "") -> Check:
    """Right if `holds(answer)` is true; false is wrong, and a string is wrong with that string as the reason.

    `answer` may be a function, which `holds` calls; what either of them raises is reported as a wrong answer.
    """

    def verdict() -> str | None:
        outcome = holds(answer)
        if isinstance(outcome, str):
            return outcome
        return None if outcome else "not yet."

    return _check(name, answer, verdict, hint)


def _check(name: str, answer: Any, verdict: Callable[[], str | None], hint: str) -> Check:
    if answer is None or answer is ...:
        status, text = "not attempted", "not attempted"
    else:
        try:
            fault = verdict()
        except Exception as error:
            fault = f"your answer raised {type(error).__name__}: {error}"
        status = "right" if fault is None else "wrong"
        text = "right" if fault is None else f"not quite: {fault} {hint}".rstrip()
    check = Check(name, status, f"{_MARK[status]} Exercise {name}: {text}")
    print(check.message)
    return check


def _kind(answer: Any) -> str:
    return _short(answer) if isinstance(answer, str) else type(answer).__name__


def _short(answer: Any) -> str:
    text = repr(answer)
    return text if len(text) <= 40 else f"{text[:37]}…"

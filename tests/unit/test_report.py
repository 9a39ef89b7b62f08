import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from labkit.report import Reproduction, Verdict, show, write

PERPLEXITY = pd.DataFrame(
    {
        "method": ["dense", "SPON"],
        "sparsity": [0.0, 0.6],
        "perplexity": [23.6, 1234.5],
        "perplexity_stderr": [np.nan, 0.42],
        "tokens": [16384, 16384],
    }
)
HOLDS = Verdict("gap closed at 60 %", 0.61, 0.02, "≥ 0.5", True, "ours")
FAILS = Verdict("gap closed at 50 %", 0.19, None, "≥ 0.25", False, "paper")
OUTCOME = Reproduction({"perplexity": PERPLEXITY}, [HOLDS, FAILS], ["three seeds"])


def shown(outcome):
    console = Console(file=io.StringIO(), width=110)
    show(outcome, console)
    return console.file.getvalue()


def test_csv_holds_every_column_at_full_precision(tmp_path):
    write(OUTCOME, tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "perplexity.csv"), PERPLEXITY)


def test_verdicts_are_written_as_they_are(tmp_path):
    write(OUTCOME, tmp_path)
    rows = json.loads((tmp_path / "verdicts.json").read_text())
    assert [row["holds"] for row in rows] == [True, False]
    assert rows[0] == {
        "claim": "gap closed at 60 %",
        "value": 0.61,
        "stderr": 0.02,
        "target": "≥ 0.5",
        "holds": True,
        "source": "ours",
    }


def test_value_that_is_not_finite_becomes_null(tmp_path):
    verdict = Verdict("a ratio", math.nan, math.inf, "≥ 1", False, "ours")
    write(Reproduction({}, [verdict], []), tmp_path)
    (row,) = json.loads((tmp_path / "verdicts.json").read_text())
    assert row["value"] is None
    assert row["stderr"] is None


def test_only_the_named_files_are_left(tmp_path):
    files = write(OUTCOME, tmp_path / "results")
    assert sorted(files) == sorted((tmp_path / "results").iterdir())
    assert {file.name for file in files} == {"perplexity.csv", "verdicts.json", "report.md"}


def test_markdown_joins_values_and_standard_errors(tmp_path):
    write(OUTCOME, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| method | sparsity | perplexity | tokens |" in text
    assert "| dense | 0 | 23.6 | 16,384 |" in text
    assert "| SPON | 0.600 | 1,230 ± 0.420 | 16,384 |" in text
    assert "three seeds" in text


@pytest.mark.parametrize("render", ["console", "markdown"])
def test_failing_verdict_is_said_to_fail(render, tmp_path):
    write(OUTCOME, tmp_path)
    text = shown(OUTCOME) if render == "console" else (tmp_path / "report.md").read_text()
    assert "holds: gap closed at 60 %: 0.610 ± 0.0200 (target ≥ 0.5) [ours]" in text
    assert "FAILS: gap closed at 50 %: 0.190 (target ≥ 0.25) [paper]" in text


def test_console_shows_tables_and_notes():
    text = shown(OUTCOME)
    assert "1,230 ± 0.420" in text
    assert "perplexity_stderr" not in text
    assert "three seeds" in text


def test_markup_in_a_cell_is_shown_not_obeyed():
    table = pd.DataFrame({"tag": ["[paper]", "[/]"]})
    text = shown(Reproduction({"tags": table}, [], []))
    assert "[paper]" in text
    assert "[/]" in text


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match=r"source: got 'rumour', allowed are paper, predecessor, ours"):
        Verdict("a claim", 1.0, None, "≥ 1", True, "rumour")


def test_a_verdict_without_an_error_shows_none(tmp_path):
    verdicts = [Verdict("a claim", 0.5, stderr, "≥ 0", True, "ours") for stderr in (None, math.nan)]
    write(Reproduction({}, verdicts, []), tmp_path)
    (text,) = (path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md"))
    assert text.count("holds: a claim: 0.500 (target ≥ 0) [ours]") == 2

"""What a reproduction found: tables and one verdict per claim, shown on the console and written to files.

A table column `x_stderr` is the standard error of the column `x`; the two are shown as one, "x ± s.e.".
"""

import json
import math
import numbers
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit.atomic import replacing
from labkit.theme import fmt

_LONGEST = 150  # rows of a table that is shown
SOURCES = ("paper", "predecessor", "ours")


@dataclass(frozen=True)
class Verdict:
    """One claim, the number measured for it and whether it holds.

    Attributes:
        claim: the claim in words, units included.
        value: what was measured.
        stderr: its standard error, or None where there is none.
        target: what the claim asks for, such as "≥ 0.25".
        holds: whether the value meets the target.
        source: who makes the claim: "paper", "predecessor" or "ours".
    """

    claim: str
    value: float
    stderr: float | None
    target: str
    holds: bool
    source: str

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"source: got {self.source!r}, allowed are {', '.join(SOURCES)}")


@dataclass(frozen=True)
class Reproduction:
    """The outcome of one reproduction run.

    Attributes:
        tables: tidy results by name; the name becomes the CSV file's.
        verdicts: one per claim, failing ones included.
        notes: what a reader must know to read the numbers (sizes, seeds, what is not shown).
    """

    tables: dict[str, pd.DataFrame]
    verdicts: list[Verdict]
    notes: list[str]


def write(reproduction: Reproduction, out: Path) -> list[Path]:
    """Write `<table>.csv` for each table, `verdicts.json` and `report.md` into the folder `out`.

    Each file is replaced whole. Values that are not finite become null in the JSON file.

    Returns:
        The files written.
    """
    out = Path(out)
    texts = {f"{name}.csv": table.to_csv(index=False) for name, table in reproduction.tables.items()}
    verdicts = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in map(asdict, reproduction.verdicts)
    ]
    texts["verdicts.json"] = json.dumps(verdicts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts["report.md"] = _markdown(reproduction)
    for name, text in texts.items():
        with replacing(out / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def show(reproduction: Reproduction, console: Console | None = None) -> None:
    """Print the tables (of at most 150 rows), one line per verdict (failing ones as failing) and the notes."""
    console = console or Console()
    for name, table in _short(reproduction).items():
        cells = _readable(table)
        grid = Table(title=escape(name), title_justify="left", box=box.SIMPLE_HEAD)
        for column in cells:
            numeric = pd.api.types.is_numeric_dtype(table[column])
            grid.add_column(escape(column), justify="right" if numeric else "left")
        for row in cells.itertuples(index=False):
            grid.add_row(*map(escape, row))
        console.print(grid)
    for verdict in reproduction.verdicts:
        style = "green" if verdict.holds else "bold red"
        console.print(_verdict_line(verdict), style=style, markup=False, highlight=False)
    for note in reproduction.notes:
        console.print(note, markup=False, highlight=False)


def _short(reproduction: Reproduction) -> dict[str, pd.DataFrame]:
    """The tables to read; single observations are for the CSV files."""
    return {name: table for name, table in reproduction.tables.items() if len(table) <= _LONGEST}


def _markdown(reproduction: Reproduction) -> str:
    parts = []
    for name, table in _short(reproduction).items():
        cells = _readable(table)
        rows = [list(cells.columns), ["---"] * len(cells.columns), *cells.values.tolist()]
        parts.append(f"## {name}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    if reproduction.verdicts:
        parts.append("## Verdicts\n\n" + "\n".join(f"- {_verdict_line(v)}" for v in reproduction.verdicts))
    if reproduction.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in reproduction.notes))
    return "\n\n".join(parts) + "\n"


def _verdict_line(verdict: Verdict) -> str:
    word = "holds" if verdict.holds else "FAILS"
    value = _text(verdict.value) + ("" if pd.isna(verdict.stderr) else f" ± {_text(verdict.stderr)}")
    return f"{word}: {verdict.claim}: {value} (target {verdict.target}) [{verdict.source}]"


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """The same table as text, standard errors joined to their values."""
    columns = {}
    for name in table.columns:
        if name.endswith("_stderr") and name.removesuffix("_stderr") in table.columns:
            continue
        texts = [_text(value) for value in table[name]]
        if f"{name}_stderr" in table.columns:
            errors = table[f"{name}_stderr"]
            pairs = zip(texts, errors, strict=True)
            texts = [text if pd.isna(error) else f"{text} ± {_text(error)}" for text, error in pairs]
        columns[name] = texts
    return pd.DataFrame(columns)


def _text(value) -> str:
    """A number at three significant digits, a missing value as nothing, all else in its own words."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return "" if math.isnan(value) else fmt(value)
    return "" if value is None else str(value)

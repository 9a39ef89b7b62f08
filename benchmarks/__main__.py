"""`python -m benchmarks [NN] [--json FILE]`: run the benchmarks of one lab, or of all."""

import argparse
import importlib
from pathlib import Path

from benchmarks._runner import Row, describe, write_json


def main(arguments: list[str] | None = None) -> None:
    """Print one line per comparison as it is measured; a missed target is printed as failing, the exit status is 0."""
    labs = sorted(path.stem.removeprefix("lab") for path in Path(__file__).parent.glob("lab[0-9][0-9].py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("lab", nargs="?", choices=labs, help="two digits; all labs by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args(arguments)

    rows: list[Row] = []
    for lab in [options.lab] if options.lab else labs:
        for row in importlib.import_module(f"benchmarks.lab{lab}").benchmarks():
            if not rows or (row.lab, row.threads, row.sizes) != (rows[-1].lab, rows[-1].threads, rows[-1].sizes):
                print(f"\nLab {row.lab} · {row.threads} thread{'s' * (row.threads > 1)} · {row.sizes}")
            print(" ", describe(row), flush=True)
            rows.append(row)
            if options.json:  # after each row, so that an interrupted run keeps what it measured
                write_json(rows, options.json)
    hold, missed = (sum(row.holds is verdict for row in rows) for verdict in (True, False))
    print(f"\n{len(rows)} ratios (median of peer / ours, extremes over rounds): {hold} targets hold, {missed} missed")


if __name__ == "__main__":
    main()

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks._runner import Row, compare, describe, interleave, meets, ratio_row, write_json


def test_every_round_calls_each_alternative_once_and_starts_with_another():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleave(calls, 4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"  # the first round is not counted
    assert {name: s.shape for name, s in seconds.items()} == dict.fromkeys("abc", (4,))


def test_each_call_is_charged_its_own_time():
    now = [0.0]

    def work(duration):
        now[0] += duration

    calls = {"short": lambda: work(1), "long": lambda: work(3)}
    seconds = interleave(calls, 5, clock=lambda: now[0])
    assert seconds["short"].tolist() == [1] * 5
    assert seconds["long"].tolist() == [3] * 5


def test_ratio_is_the_median_of_paired_rounds():
    row = compare("01", "kernel", np.array([1.0, 2.0, 4.0]), "peer", np.array([2.0, 8.0, 4.0]), target="≥ 2", sizes="n = 3")
    assert (row.ratio, row.ratio_min, row.ratio_max) == (2, 1, 4)
    assert (row.ours_seconds, row.peer_seconds) == (2, 4)
    assert row.holds is True


def test_a_missed_target_is_said_to_fail():
    row = compare("01", "kernel", np.array([1.0]), "peer", np.array([1.5]), target="≥ 2")
    assert row.holds is False
    assert "FAILS" in describe(row)
    assert compare("01", "kernel", np.array([1.0]), "peer", np.array([1.5])).holds is None


def test_a_quantity_without_time_has_no_seconds():
    row = ratio_row("01", "memory", 0.8, "limit", target="≤ 1")
    assert row.ours_seconds is None
    assert row.peer_seconds is None
    assert row.holds is True
    assert "None" not in describe(row)


@pytest.mark.parametrize(("ratio", "target", "expected"), [(2, "≥ 2", True), (1.9, "≥ 2", False), (1.2, "≤ 1.1", False)])
def test_targets(ratio, target, expected):
    assert meets(ratio, target) is expected


def test_a_malformed_target_is_named():
    with pytest.raises(ValueError, match="target='> 2'; allowed"):
        meets(3, "> 2")


def test_seconds_are_shown_in_the_unit_that_fits():
    row = compare("01", "kernel", np.array([2e-5]), "peer", np.array([0.25]))
    assert "20 µs / 250 ms" in describe(row)


COLUMNS = "lab name ours_seconds peer peer_seconds ratio ratio_min ratio_max target holds threads sizes".split()


def test_json_is_a_list_of_rows(tmp_path):
    rows = [compare("01", "kernel", np.array([1.0, 1.0]), "peer", np.array([2.0, 3.0]), target="≥ 2", sizes="n = 3")]
    write_json(rows, tmp_path / "new" / "rows.json")
    loaded = json.loads((tmp_path / "new" / "rows.json").read_text("utf-8"))
    assert [list(row) for row in loaded] == [COLUMNS]
    assert Row(**loaded[0]) == rows[0]


def test_an_interrupted_run_keeps_the_rows_it_measured(tmp_path, monkeypatch, capsys):
    def benchmarks():
        yield ratio_row("01", "first", 3.0, "peer", target="≥ 2", sizes="small")
        yield ratio_row("01", "second", 1.0, "peer", target="≥ 2", sizes="small")
        raise KeyboardInterrupt

    monkeypatch.setattr(command.importlib, "import_module", lambda name: SimpleNamespace(benchmarks=benchmarks))
    with pytest.raises(KeyboardInterrupt):
        command.main(["01", "--json", str(tmp_path / "rows.json")])
    assert [row["name"] for row in json.loads((tmp_path / "rows.json").read_text("utf-8"))] == ["first", "second"]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]
    printed = capsys.readouterr().out
    assert printed.count("Lab 01 · 1 thread · small") == 1
    assert "holds" in printed
    assert "FAILS" in printed


def test_missed_targets_do_not_fail_the_run(monkeypatch, capsys):
    module = SimpleNamespace(benchmarks=lambda: iter([ratio_row("01", "x", 1.0, "peer", target="≥ 2")]))
    monkeypatch.setattr(command.importlib, "import_module", lambda name: module)
    command.main(["01"])
    assert "1 ratios" in capsys.readouterr().out


def test_an_unknown_lab_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["99"])
    assert "invalid choice: '99'" in capsys.readouterr().err

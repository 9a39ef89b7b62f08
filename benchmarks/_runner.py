"""Measure alternatives in turns and state the outcome as a ratio.

Seconds depend on the machine and on what else it does; ratios of calls that take turns in one process hardly do. So each
round calls every alternative once, starting with a different one each time, and a row reports the median over rounds of
peer / ours, with the smallest and largest. Thread CPU time is the default clock, for it leaves out other processes.
"""

import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from labkit.atomic import replacing

_RELATIONS = {"≥": operator.ge, "≤": operator.le}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        lab: two digits.
        name: what was measured.
        ours_seconds, peer_seconds: medians per call; None where the quantity is not a time.
        peer: what it is measured against.
        ratio, ratio_min, ratio_max: peer / ours, median and extremes over rounds; above 1 means that ours is faster.
        target: for the ratio, such as "≥ 1.7"; None where there is none.
        holds: whether the ratio meets the target; None without one.
        threads: number of threads of both.
        sizes: what was computed on, in words.
    """

    lab: str
    name: str
    ours_seconds: float | None
    peer: str
    peer_seconds: float | None
    ratio: float
    ratio_min: float
    ratio_max: float
    target: str | None
    holds: bool | None
    threads: int
    sizes: str


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.thread_time,
    progress: str | None = None,
) -> dict[str, np.ndarray]:
    """Time each call once per round, after one round that is not counted.

    Args:
        calls: name → function without arguments.
        rounds: ≥ 1.
        clock: returns seconds.
        progress: description of the progress bar; None shows none.

    Returns:
        name → seconds (rounds,).
    """
    names = list(calls)
    for name in names:
        calls[name]()
    seconds = {name: np.empty(rounds) for name in names}
    for i in tqdm(
        range(rounds),
        desc=progress,
        disable=None if progress else True,  # None: only on a terminal
        leave=False,
    ):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            start = clock()
            calls[name]()
            seconds[name][i] = clock() - start
    return seconds


def compare(
    lab: str,
    name: str,
    ours: np.ndarray,
    peer_name: str,
    peer: np.ndarray,
    *,
    target: str | None = None,
    threads: int = 1,
    sizes: str = "",
) -> Row:
    """Row of paired measurements, seconds (rounds,) each."""
    ratios = np.asarray(peer) / np.asarray(ours)
    row = ratio_row(lab, name, ratios, peer_name, target=target, threads=threads, sizes=sizes)
    return Row(**asdict(row) | {"ours_seconds": float(np.median(ours)), "peer_seconds": float(np.median(peer))})


def ratio_row(
    lab: str,
    name: str,
    ratios: np.ndarray | float,
    peer_name: str,
    *,
    target: str | None = None,
    threads: int = 1,
    sizes: str = "",
) -> Row:
    """Row of a quantity that is no time: memory, bytes, a coefficient of determination."""
    ratios = np.atleast_1d(ratios)
    ratio = float(np.median(ratios))
    return Row(
        lab=lab,
        name=name,
        ours_seconds=None,
        peer=peer_name,
        peer_seconds=None,
        ratio=ratio,
        ratio_min=float(ratios.min()),
        ratio_max=float(ratios.max()),
        target=target,
        holds=None if target is None else meets(ratio, target),
        threads=threads,
        sizes=sizes,
    )


def meets(ratio: float, target: str) -> bool:
    """Whether a ratio satisfies "≥ number" or "≤ number"."""
    relation, _, number = target.partition(" ")
    if relation not in _RELATIONS:
        raise ValueError(f"target={target!r}; allowed are '≥ number' and '≤ number'")
    return bool(_RELATIONS[relation](ratio, float(number)))


def describe(row: Row) -> str:
    """One line: what, against what, ratio with its extremes, medians, verdict. Threads and sizes are left to the caller."""
    ratio = f"{row.ratio:.3g}× ({row.ratio_min:.3g}–{row.ratio_max:.3g})"
    times = "" if row.ours_seconds is None else f"{_time(row.ours_seconds)} / {_time(row.peer_seconds)}"
    verdict = "" if row.target is None else f"{row.target} {'holds' if row.holds else 'FAILS'}"
    return f"{row.name:<44} against {row.peer:<40} {ratio:<22} {times:<20} {verdict}".rstrip()


def write_json(rows: Iterable[Row], path: Path) -> None:
    """Write rows as a list of objects, atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n", "utf-8")


def _time(seconds: float) -> str:
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, and restore."""
    import torch  # not every lab needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

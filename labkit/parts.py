"""Long work in parts: each finished part is a file, so that an interrupted run goes on where it stopped."""

import gzip
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.atomic import replacing


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Have `make(temporary path)` write the file `path`, unless it is there already.

    Returns:
        `path`.
    """
    path = Path(path)
    if not path.is_file():
        with replacing(path) as partial:
            make(partial)
    return path


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Compressed CSV whose bytes depend on the table alone."""
    Path(path).write_bytes(gzip.compress(table.to_csv(index=False).encode(), mtime=0))


def claim(out: Path, recipe: Any, packages: Iterable[str] = ("torch",)) -> None:
    """Write `recipe.json` into the folder of a new build, or check that a begun one has the same recipe.

    Args:
        out: folder of the build.
        recipe: a dataclass with the sizes that everything in the folder follows from.
        packages: their versions are noted beside it.

    Raises:
        ValueError: `out` holds a build with another recipe; the changed entries are named.
    """
    wanted = json.loads(json.dumps(asdict(recipe)))
    file = Path(out) / "recipe.json"
    if file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))["recipe"]
        changed = sorted(key for key in wanted.keys() | stored.keys() if stored.get(key) != wanted.get(key))
        if changed:
            raise ValueError(
                f"out={str(out)!r} holds a build with other {', '.join(changed)}: empty it or choose another folder"
            )
        return
    versions = {package: version(package) for package in packages} | {"python": platform.python_version()}
    with replacing(file) as partial:
        partial.write_text(json.dumps({"recipe": wanted, "versions": versions}, indent=1) + "\n", encoding="utf-8")

"""Public names of a package that are imported when they are first touched, so that a lab costs only what it uses (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def public(package: str, home: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package's `__init__` needs: `__getattr__, __dir__, __all__ = public(__name__, _HOME)`.

    Args:
        package: its dotted name.
        home: module of the package → public names defined there.
    """
    module_of = {name: module for module, names in home.items() for name in names}

    def getter(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return getter, names, sorted(module_of)

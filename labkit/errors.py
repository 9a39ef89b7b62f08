"""The two errors that a missing piece raises, each naming the one command that brings it."""

import importlib
from types import ModuleType


class MissingAsset(FileNotFoundError):
    """A model, data set or script that is not in the cache and could not be brought there."""


class MissingDependency(ImportError):
    """An optional Python package that is not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of labkit brings it.

    Args:
        module: dotted name, as in an import statement.
        extra: labkit's extra that lists the package, e.g. "llm".

    Returns:
        The imported module (the innermost one of a dotted name).

    Raises:
        MissingDependency: the module, or a module that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(f'{error.name} is not installed: pip install "labkit[{extra}]"', name=error.name) from error

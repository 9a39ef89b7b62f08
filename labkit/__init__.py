"""Seven ICML 2026 papers you can touch: faithful methods, real models and data, live widgets, no network.

`import labkit` loads nothing but this file. Its modules (`labkit.sparsity`, `labkit.assets`, …) are imported
when they are first touched, so a lab costs only what it uses.
"""

import importlib

__all__ = ["__version__"]


def __getattr__(name: str):
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("labkit")
    if name.startswith("_"):
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    try:
        return importlib.import_module(f"labkit.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"labkit.{name}":
            raise
        raise AttributeError(f"module 'labkit' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    pkgutil = importlib.import_module("pkgutil")
    return sorted({*globals(), *__all__, *(module.name for module in pkgutil.iter_modules(__path__))})

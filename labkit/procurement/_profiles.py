"""Walk many profiles of costs in blocks that stay in the cache, so that only costs and outcome are ever held whole."""

from collections.abc import Iterator

BUDGET_SLACK = 5e-13  # relative excess over a budget that counts as rounding: prices .1 + .2 fit a budget of .3
_BYTES = 2**18  # a few such tables fit the cache of one core


def blocks(size: int, row_bytes: int) -> Iterator[slice]:
    """Slices that cover `size` profiles in order, each as many as a table with rows of `row_bytes` may have in the cache."""
    length = max(1, _BYTES // row_bytes)
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))

"""Draws that depend on nothing but an explicit generator, and one generator for each purpose of a seed."""

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributions import Distribution, Independent, Normal, Poisson, Uniform

from labkit.errors import check_size

_GLOBAL_GENERATOR = threading.Lock()


def seeded_generator(seed: int, stream: str) -> torch.Generator:
    """Generator of one purpose: equal (seed, stream) give equal numbers, different streams independent ones.

    Args:
        seed: a whole number ≥ 0.
        stream: what the numbers are for, e.g. "filter".
    """
    check_size("seed", seed, 0)
    entropy = np.random.SeedSequence([int(seed), zlib.crc32(stream.encode())])
    return torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))


def sample(distribution: Distribution, generator: torch.Generator, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Draw from any torch or pyro distribution with an explicit generator, which their own `sample` does not take.

    Args:
        distribution: Poisson, Normal and Uniform (also inside `Independent`) are drawn directly, a Normal differentiably in its
            mean and scale. For any other law torch's global generator is borrowed and put back.
        shape: of the sample, before the batch and event dimensions.

    Returns:
        (*shape, *batch, *event).
    """
    base = base_law(distribution)
    size = torch.Size(shape) + distribution.batch_shape + distribution.event_shape
    if isinstance(base, Poisson):
        return torch.poisson(base.rate.detach().expand(size), generator=generator)
    if isinstance(base, Normal):
        return base.loc + base.scale * torch.randn(size, generator=generator, dtype=base.loc.dtype)
    if isinstance(base, Uniform):
        return base.low + (base.high - base.low) * torch.rand(size, generator=generator, dtype=base.low.dtype)
    seed = int(torch.randint(2**31, (), generator=generator))
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return distribution.sample(torch.Size(shape))


def base_law(distribution: Distribution) -> Distribution:
    """The law inside `Independent`."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


@contextmanager
def frozen(seed: int) -> Iterator[None]:
    """Start torch's own random stream at `seed`, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield

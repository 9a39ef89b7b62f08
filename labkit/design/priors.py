"""Priors whose coordinates follow different laws."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

NO_SHAPE = torch.Size()


class Joint(Distribution):
    """Independent laws, flattened and put one after the other.

    Args:
        laws: at least one, with the same batch shape; any event shapes.
    """

    arg_constraints: ClassVar = {}

    def __init__(self, laws: Sequence[Distribution]):
        self.laws = tuple(laws)
        self.sizes = tuple(law.event_shape.numel() for law in self.laws)
        super().__init__(self.laws[0].batch_shape, torch.Size((sum(self.sizes),)), validate_args=False)

    @property
    def has_rsample(self) -> bool:
        """Whether every law has."""
        return all(law.has_rsample for law in self.laws)

    @property
    def support(self) -> constraints.Constraint:
        """The product of the supports."""
        parts = [law.support if law.event_shape else constraints.independent(law.support, 1) for law in self.laws]
        return constraints.cat(parts, -1, self.sizes)

    def sample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        """Draws (*sample_shape, *batch, p) without gradient."""
        with torch.no_grad():
            return self._join([law.sample(sample_shape) for law in self.laws])

    def rsample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        """Draws (*sample_shape, *batch, p)."""
        return self._join([law.rsample(sample_shape) for law in self.laws])

    def split(self, value: Tensor) -> list[Tensor]:
        """The draw of each law, (..., p) -> (..., *event)."""
        parts = value.split(self.sizes, -1)
        return [part.reshape(part.shape[:-1] + law.event_shape) for part, law in zip(parts, self.laws, strict=True)]

    def log_prob(self, value: Tensor) -> Tensor:
        """(..., p) -> (...)."""
        return sum(law.log_prob(part) for law, part in zip(self.laws, self.split(value), strict=True))

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "Joint":
        """The same law for each member of a batch."""
        return Joint([law.expand(torch.Size(batch_shape)) for law in self.laws])

    def _join(self, draws: Sequence[Tensor]) -> Tensor:
        shapes = [draw.shape[: draw.dim() - len(law.event_shape)] for draw, law in zip(draws, self.laws, strict=True)]
        return torch.cat([draw.reshape(*shape, -1) for draw, shape in zip(draws, shapes, strict=True)], -1)

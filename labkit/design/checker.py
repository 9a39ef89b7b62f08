"""Whether a path keeps to a constraint, recomputed from the path alone: nothing here reads a constraint's states or methods."""

from functools import singledispatch

import torch
from torch import Tensor

from labkit.design.constraints import Budget, Constraint, Intersection, Monotone, StepLimit, Unconstrained
from labkit.design.obstacles import Availability, Forbidden

SEGMENT_POINTS = 128


@singledispatch
def violations(constraint: Constraint, x0: Tensor | None, path: Tensor) -> Tensor:
    """By how much each design of a path breaks a constraint, computed in float64 from the path alone.

    Args:
        constraint: any registered kind.
        x0: start (..., d), or None.
        path: designs (..., T, d).

    Returns:
        (..., T), 0 where a design is allowed; in units of the design, or of the cost.
    """
    raise TypeError(f"constraint={constraint!r}: register a checker for it by violations.register")


@violations.register
def _(constraint: Unconstrained, x0: Tensor | None, path: Tensor) -> Tensor:
    return _outside(constraint, path)


@violations.register
def _(constraint: StepLimit, x0: Tensor, path: Tensor) -> Tensor:
    moves = torch.diff(path.double(), dim=-2, prepend=x0.double()[..., None, :])
    if constraint.norm == "l2":
        excess = moves.square().sum(-1).sqrt() - constraint.delta.double()
    else:
        excess = (moves.abs() - constraint.delta.double()).amax(-1)
    return excess.clamp(min=0) + _outside(constraint, path)


@violations.register
def _(constraint: Budget, x0: Tensor, path: Tensor) -> Tensor:
    whole = torch.cat([x0.double()[..., None, :], path.double()], -2)
    before, after = whole[..., :-1, :], whole[..., 1:, :]
    if callable(constraint.cost):
        costs = constraint.cost(before, after)
    else:
        moves = (after - before).abs()
        costs = moves.sum(-1) if constraint.cost == "l1" else moves.square().sum(-1).sqrt()
    return (costs.cumsum(-1) - constraint.total).clamp(min=0) + _outside(constraint, path)


@violations.register
def _(constraint: Monotone, x0: Tensor | None, path: Tensor) -> Tensor:
    start = path.double()[..., :1, :] - constraint.gap if x0 is None else x0.double()[..., None, :]
    gaps = torch.diff(path.double(), dim=-2, prepend=start)
    return (constraint.gap - gaps).amax(-1).clamp(min=0) + _outside(constraint, path)


@violations.register
def _(constraint: Intersection, x0: Tensor | None, path: Tensor) -> Tensor:
    return sum(violations(member, x0, path) for member in constraint.members)


@violations.register
def _(constraint: Forbidden, x0: Tensor | None, path: Tensor) -> Tensor:
    path = path.double()
    if constraint.segments:
        before = torch.cat([x0.double()[..., None, :], path[..., :-1, :]], -2)
        share = torch.linspace(0, 1, SEGMENT_POINTS, dtype=torch.float64)[:, None]
        points = before[..., None, :] + share * (path - before)[..., None, :]  # (..., T, points, d)
    else:
        points = path[..., None, :]
    depth = _inside(points, constraint.discs, constraint.boxes).amax(-1)
    return depth + _outside(constraint, path)


@violations.register
def _(constraint: Availability, x0: Tensor | None, path: Tensor) -> Tensor:
    path = path.double()
    excess = _outside(constraint, path)
    for box, (first, last) in zip(constraint.boxes, constraint.windows.tolist(), strict=True):
        time = torch.arange(1, path.shape[-2] + 1)
        closed = (time < first) | (time > last)
        excess = excess + torch.where(closed, _inside(path, path.new_zeros(0, path.shape[-1] + 1), box[None]), 0)
    return excess


def _outside(constraint: Constraint, path: Tensor) -> Tensor:
    """How far outside the box, in its worst coordinate."""
    low, high = constraint.bounds.double()
    return torch.maximum(low - path.double(), path.double() - high).amax(-1).clamp(min=0)


def _inside(points: Tensor, discs: Tensor, boxes: Tensor) -> Tensor:
    """How deep points (..., d) are in any obstacle (...), ≥ 0."""
    deepest = points.new_zeros(points.shape[:-1])
    for *centre, radius in discs.double().tolist():
        deepest = torch.maximum(deepest, radius - (points - points.new_tensor(centre)).square().sum(-1).sqrt())
    for low, high in boxes.double():
        deepest = torch.maximum(deepest, torch.minimum(points - low, high - points).amin(-1))
    return deepest

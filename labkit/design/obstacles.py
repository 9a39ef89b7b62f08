"""Designs that are not allowed: obstacles, and options that are open for a time only.

A design in an obstacle is pushed out by the shortest way that stays in the box. Where obstacles overlap so that this leads
nowhere, it goes to the nearest of a fixed set of allowed points.
"""

import bisect
import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from labkit.design.constraints import Constraint, Region, State
from labkit.design.models import as_numbers, check_bounds

ANCHORS = 1024


class Forbidden(Constraint):
    """Discs and boxes that no design may lie in; their edges are allowed [ours].

    Args:
        discs: rows (n, d + 1) of a centre and a radius > 0.
        boxes: (n, 2, d), lowest and highest values.
        segments: whether the straight way from one design to the next must avoid the discs too (for discs only). Then a move
            ends where it would enter the first one.
        bounds: box of designs (2, d), finite.

    Raises:
        ValueError: nothing is forbidden, shapes do not fit, or hardly any design is left.
    """

    def __init__(self, discs: Any = (), boxes: Any = (), *, segments: bool = False, bounds: Any):
        self.bounds = check_bounds(bounds)
        d, dtype = self.bounds.shape[1], self.bounds.dtype
        if not self.bounds.isfinite().all():
            raise ValueError(f"bounds={self.bounds.tolist()}: expected a finite box around obstacles")
        self.discs = as_numbers("discs", discs, dtype)
        if not self.discs.numel():
            self.discs = self.bounds.new_zeros(0, d + 1)
        self.boxes = _check_boxes(boxes, d, dtype)
        if self.discs.shape[1:] != (d + 1,) or not (self.discs.isfinite().all() and (self.discs[:, d] > 0).all()):
            got = f"shape {tuple(self.discs.shape)}, {self.discs.tolist()}"
            raise ValueError(f"discs: got {got}; expected finite rows (n, {d + 1}) of a centre and a radius > 0")
        if len(self.discs) + len(self.boxes) == 0 or (segments and len(self.boxes)):
            raise ValueError("discs, boxes: expected at least one; with segments=True discs alone")
        self.segments = segments
        if not len(self._anchors):
            raise ValueError("discs, boxes: expected to leave some design of the box allowed")

    def init(self, x0: Tensor | None, steps: int) -> State:
        """State before the first design; a start x0 must be allowed itself.

        Raises:
            ValueError: see `Constraint.init`; x0 is forbidden, or None although `segments` needs it.
        """
        state = super().init(x0, steps)
        x0 = state.x
        if x0 is None and self.segments:
            raise ValueError("x0=None: segments=True needs a design to start from")
        if x0 is not None and (self._depths(x0) > 1e-6 * self._unit).any():
            raise ValueError(f"x0={x0.tolist()}: expected designs outside {self!r}")
        return state

    def slack(self, state: State, x: Tensor) -> Tensor:
        """Distance to each disc and to each box (..., n), negative inside; of the whole way if `segments`."""
        if not self.segments:
            return -self._depths(x)
        way = x - state.x
        to_centre = self.discs[:, :-1] - state.x[..., None, :]  # (..., n, d)
        share = (to_centre * way[..., None, :]).sum(-1) / way.square().sum(-1, keepdim=True).clamp(min=1e-12)
        nearest = to_centre - share.clamp(0, 1)[..., None] * way[..., None, :]
        return torch.linalg.vector_norm(nearest, dim=-1) - self.discs[:, -1]

    def decode(self, state: State, u: Tensor) -> Tensor:
        """Sigmoid into the box, then as `project`."""
        low, high = self.bounds.to(u.dtype)
        return self.project(state, low + (high - low) * torch.sigmoid(u))

    def project(self, state: State, x: Tensor) -> Tensor:
        """Pushed out of obstacles or, if `segments`, stopped before the first."""
        x = super().project(state, x)
        return self._stopped(state.x, x) if self.segments else self._push_out(x)

    def reachable(self, state: State, n: int = 1) -> Region:
        """The box without the obstacles."""
        return Region(*self.bounds, discs=self.discs, boxes=self.boxes)

    def _depths(self, x: Tensor) -> Tensor:
        """How deep x is in each disc and each box (..., n); ≤ 0 outside."""
        discs = self.discs[:, -1] - torch.linalg.vector_norm(x[..., None, :] - self.discs[:, :-1], dim=-1)
        return torch.cat([discs, _box_depths(x, self.boxes)], -1)

    def _push_out(self, x: Tensor) -> Tensor:
        for _ in range(len(self.discs) + len(self.boxes) + 1):
            depths = self._depths(x)
            if (depths <= 0).all():
                return x
            which = depths.argmax(-1)  # (...): the obstacle that x is deepest in
            moved = torch.stack([self._out_of(k, x) for k in range(depths.shape[-1])], -2)
            moved = moved.gather(-2, which[..., None, None].expand(*x.shape[:-1], 1, x.shape[-1]))[..., 0, :]
            x = torch.where((depths.amax(-1) > 0)[..., None], moved, x)
        stuck = self._depths(x).amax(-1) > 0
        nearest = torch.cdist(x.detach().reshape(-1, x.shape[-1]), self._anchors.to(x.dtype)).argmin(-1)
        return torch.where(stuck[..., None], self._anchors.to(x.dtype)[nearest].reshape(x.shape), x)

    def _out_of(self, k: int, x: Tensor) -> Tensor:
        if k >= len(self.discs):
            return _out_of_box(x, self.boxes[k - len(self.discs)], self.bounds)
        centre, radius = self.discs[k, :-1], self.discs[k, -1] + 1e-6 * self._unit
        away = x - centre
        distance = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        first = torch.zeros_like(away).index_fill(-1, torch.tensor(0), 1.0)
        direction = torch.where(distance > 1e-9, away / distance.clamp(min=1e-9), first)
        return super().project(None, centre + radius * direction)

    def _stopped(self, start: Tensor, x: Tensor) -> Tensor:
        """The way from start to x, ended where it first enters a disc."""
        way, radius = x - start, self.discs[:, -1] + 1e-6 * self._unit
        from_centre = start[..., None, :] - self.discs[:, :-1]  # (..., n, d)
        a = way.square().sum(-1, keepdim=True).clamp(min=1e-12)
        b = (from_centre * way[..., None, :]).sum(-1)
        c = (from_centre.square().sum(-1) - radius.square()).clamp(min=0)
        discriminant = b.square() - a * c
        enters = (discriminant > 0) & (b < 0)
        share = torch.where(enters, (-b - torch.where(enters, discriminant, 1).sqrt()) / a, 1)  # (..., n)
        return start + share.amin(-1).clamp(0, 1)[..., None] * way

    @cached_property
    def _anchors(self) -> Tensor:
        """Allowed points (k, d) that are spread over the box."""
        low, high = self.bounds
        points = low + (high - low) * SobolEngine(self.bounds.shape[1]).draw(ANCHORS, dtype=self.bounds.dtype)
        return points[self._depths(points).amax(-1) <= 0]

    def __repr__(self) -> str:
        return f"Forbidden({len(self.discs)} discs, {len(self.boxes)} boxes{', segments' if self.segments else ''})"


class Availability(Constraint):
    """Regions that can be used for a time only; what lies in none of them always can [ours].

    Args:
        boxes: the regions (n, 2, d).
        windows: for each the first and the last experiment that may use it (n, 2), counted from 1 at the first decision.
        bounds: box of designs (2, d), finite.

    Raises:
        ValueError: shapes do not fit, a window ends before it starts, or at some time hardly any design is left.
    """

    def __init__(self, boxes: Any, windows: Any, *, bounds: Any):
        self.bounds = check_bounds(bounds)
        self.boxes = _check_boxes(boxes, self.bounds.shape[1], self.bounds.dtype)
        self.windows = as_numbers("windows", windows, torch.float64)
        if not len(self.boxes) or self.windows.shape != (len(self.boxes), 2):
            raise ValueError(f"windows: got shape {tuple(self.windows.shape)}; expected ({len(self.boxes)}, 2), one per box")
        if not (self.windows[:, 0] <= self.windows[:, 1]).all() or (self.windows != self.windows.round()).any():
            raise ValueError(f"windows={self.windows.tolist()}: expected whole numbers, and no window to end before it starts")
        changes = torch.cat([self.windows[:, 0], self.windows[:, 1] + 1])
        self._changes = sorted({time for time in changes.tolist() if math.isfinite(time)})  # what is open changes then
        self._closed = [self._obstacles(time) for time in [-math.inf, *self._changes]]

    def slack(self, state: State, x: Tensor) -> Tensor:
        """Distance to each region (..., n), negative inside a closed one, 1 for an open one."""
        open_now = (self.windows[:, 0] <= state.time) & (state.time <= self.windows[:, 1])
        return torch.where(open_now, 1.0, -_box_depths(x, self.boxes))

    def decode(self, state: State, u: Tensor) -> Tensor:
        """Sigmoid into the box, then as `project`."""
        low, high = self.bounds.to(u.dtype)
        return self.project(state, low + (high - low) * torch.sigmoid(u))

    def project(self, state: State, x: Tensor) -> Tensor:
        """Pushed out of the regions that are closed now."""
        closed = self._now(state.time)
        return super().project(state, x) if closed is None else closed.project(state, x)

    def reachable(self, state: State, n: int = 1) -> Region:
        """The box without the regions that are closed at the n-th next experiment."""
        closed = self._now(state.time + n - 1)
        return Region(*self.bounds, boxes=None if closed is None else closed.boxes)

    def _now(self, time: int) -> Forbidden | None:
        return self._closed[bisect.bisect_right(self._changes, time)]

    def _obstacles(self, time: float) -> Forbidden | None:
        closed = (time < self.windows[:, 0]) | (time > self.windows[:, 1])
        return Forbidden(boxes=self.boxes[closed], bounds=self.bounds) if closed.any() else None

    def __repr__(self) -> str:
        return f"Availability({len(self.boxes)} regions)"


def _check_boxes(boxes: Any, d: int, dtype: torch.dtype) -> Tensor:
    boxes = as_numbers("boxes", boxes, dtype)
    if not boxes.numel():
        return torch.zeros(0, 2, d, dtype=dtype)
    if boxes.shape[1:] != (2, d) or not (boxes[:, 0] < boxes[:, 1]).all():
        raise ValueError(f"boxes: got shape {tuple(boxes.shape)}; expected (n, 2, {d}) with lowest values below the highest")
    return boxes


def _box_depths(x: Tensor, boxes: Tensor) -> Tensor:
    """How deep x (..., d) is in each of n boxes: (..., n)."""
    return torch.minimum(x[..., None, :] - boxes[:, 0], boxes[:, 1] - x[..., None, :]).amin(-1)


def _out_of_box(x: Tensor, box: Tensor, bounds: Tensor) -> Tensor:
    """x moved to the nearest face of a box that lies inside the bounds."""
    faces = torch.cat([box[0], box[1]])  # (2d,)
    both = torch.cat([x, x], -1)
    usable = torch.cat([box[0] > bounds[0], box[1] < bounds[1]])
    distance = torch.where(usable, (both - faces).abs(), torch.inf)
    face = distance.argmin(-1, keepdim=True)
    target = faces.expand(both.shape).gather(-1, face)
    return x.scatter(-1, face % x.shape[-1], target.to(x.dtype))

"""Which designs are allowed next: constraints as state machines with feasible coordinates.

A constraint is a pair (f, X): in state z the design must lie in X(z), and z' = f(z, x). Three ways to stay in X(z): `slack` for
a solver with inequalities, `project` for a design that somebody else proposes, and `decode`, which maps free coordinates
u ∈ R^d to feasible designs, so that a whole tree of designs is feasible by construction [ours].

Everything is batched and differentiable in u: states hold x (..., d), `decode(state, u (..., d)) -> x (..., d)`. Lengths and
costs are in the units of the design. Obstacles and windows of time are in `labkit.design.obstacles`; `labkit.design.checker`
recomputes from a path alone what the states have been counting.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from labkit.design.models import as_numbers, check_bounds
from labkit.errors import check_number, check_size

TOLERANCE = 1e-6  # relative to the box
EDGE = 1e-3  # encode keeps this far, relative to the set, from its edge, where decode is flat

Cost = Callable[[Tensor, Tensor], Tensor]


class InfeasibleError(ValueError):
    """No design is allowed, or the chosen one is not.

    Attributes:
        time: number of the experiment, from 1 on.
        constraint: the constraint that fails.
        state: its state.
    """

    def __init__(self, message: str, time: int, constraint: "Constraint", state: "State"):
        super().__init__(message)
        self.time, self.constraint, self.state = time, constraint, state


@dataclass(frozen=True)
class State:
    """Where a run stands before its next design.

    Attributes:
        x: the latest design (..., d); None where there is none yet.
        remaining: how many designs are still to be chosen.
        time: number of the next one, from 1 on.
        budget: what is left (...), or None.
        parts: the states of an intersection's members.
    """

    x: Tensor | None
    remaining: int
    time: int = 1
    budget: Tensor | None = None
    parts: tuple["State", ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> "State":
        """Apply `change` to each tensor; it may expand or index the batch dimensions."""
        x, budget = (None if tensor is None else change(tensor) for tensor in (self.x, self.budget))
        return replace(self, x=x, budget=budget, parts=tuple(part.map(change) for part in self.parts))


@dataclass(frozen=True)
class Region:
    """Designs that can be reached, for drawing; an outer bound where obstacles are in the way.

    Attributes:
        low, high: the smallest box around it, shape (..., d) or (d,).
        center: (..., d) of the balls, or None.
        balls: pairs of a norm, "l1" or "l2", and a radius (...).
        discs: rows of centre and radius (n, d + 1) that are excluded.
        boxes: excluded boxes (n, 2, d).
    """

    low: Tensor
    high: Tensor
    center: Tensor | None = None
    balls: tuple[tuple[str, Tensor], ...] = ()
    discs: Tensor | None = None
    boxes: Tensor | None = None


class Constraint(ABC):
    """What each constraint can do. A user's own needs `bounds` (2, d), `slack` and `decode`, and `project` and `encode` where
    a box is not enough; `checker.violations.register` adds it to the independent checker.
    """

    bounds: Tensor

    def init(self, x0: Tensor | None, steps: int) -> State:
        """State before the first design.

        Args:
            x0: where the run starts (..., d), or None if the first design is free, for constraints that allow it.
            steps: how many designs will be chosen, ≥ 1.

        Raises:
            ValueError: x0 is not finite, has another dimension or lies outside the box; steps < 1.
        """
        check_size("steps", steps, 1)
        if x0 is not None:
            x0 = as_numbers("x0", x0)
            if x0.shape[-1:] != self.bounds.shape[1:]:
                raise ValueError(f"x0: got shape {tuple(x0.shape)}; expected (..., {self.bounds.shape[1]})")
            if not (x0.isfinite().all() and self._in_box(x0, TOLERANCE).all()):
                raise ValueError(f"x0={x0.tolist()}: expected finite designs in the box {self.bounds.tolist()}")
        return State(x0, steps)

    def step(self, state: State, x: Tensor) -> State:
        """f(z, x)."""
        return replace(state, x=x, remaining=state.remaining - 1, time=state.time + 1)

    @abstractmethod
    def slack(self, state: State, x: Tensor) -> Tensor:
        """Inequalities (..., k) that are ≥ 0 where x is allowed, the box apart."""

    def is_feasible(self, state: State, x: Tensor, tol: float = TOLERANCE) -> Tensor:
        """Whether x ∈ X(z), within `tol` of the size of the box: (...)."""
        slack = self.slack(state, x)
        if slack.dim() < x.dim():
            raise ValueError(f"slack: {self!r} gave shape {tuple(slack.shape)} for designs {tuple(x.shape)}; expected (..., k)")
        return self._in_box(x, tol) & (slack >= -tol * self._unit).all(-1)

    @abstractmethod
    def decode(self, state: State, u: Tensor) -> Tensor:
        """Feasible design (..., d) of free coordinates u (..., d)."""

    def encode(self, state: State, x: Tensor) -> Tensor:
        """u with `decode(state, u)` = x, or nearly so where x is at the edge of the feasible set."""
        return _to_free(x, *self.bounds.to(x.dtype))

    def project(self, state: State, x: Tensor) -> Tensor:
        """A feasible design near x; x itself where it is feasible."""
        return x.clamp(*self.bounds.to(x.dtype))

    def reachable(self, state: State, n: int = 1) -> Region:
        """What can be reached in the next n designs."""
        return Region(*self.bounds)

    def nonempty(self, state: State) -> Tensor:
        """Whether any design is allowed (...)."""
        return torch.tensor(True)

    def interval(self, state: State) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest value of each coordinate (..., d) if X(z) is a box, else None."""
        return None

    def _in_box(self, x: Tensor, tol: float) -> Tensor:
        low, high = self.bounds.to(x.dtype)
        slack = tol * torch.where((high - low).isfinite(), high - low, 1)
        return ((x >= low - slack) & (x <= high + slack)).all(-1)

    @property
    def _unit(self) -> float:
        """Size of the box, or 1 if it has none."""
        width = self.bounds[1] - self.bounds[0]
        return float(width[width.isfinite()].max()) if width.isfinite().any() else 1.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def require_feasible(constraint: Constraint, state: State, x: Tensor | None = None) -> None:
    """Raise `InfeasibleError` unless some design is allowed in every member of the batch and, if given, x is.

    Raises:
        ValueError: x is not finite.
        InfeasibleError: names the experiment, the constraint (of an intersection, the member) and the first bad state.
    """
    if x is not None:
        if x.shape[-1:] != constraint.bounds.shape[1:]:
            raise ValueError(f"design: got shape {tuple(x.shape)}; expected (..., {constraint.bounds.shape[1]})")
        if not x.isfinite().all():
            raise ValueError(f"design={x.tolist()}: expected finite numbers")
    ok = constraint.nonempty(state) if x is None else constraint.is_feasible(state, x)
    if ok.all():
        return
    for part, part_state in zip(getattr(constraint, "members", ()), state.parts, strict=False):
        require_feasible(part, part_state, x)
    what = "no design is allowed" if x is None else f"the design {_first(x, ~ok, 1)} is not allowed"
    where = ", ".join(
        f"{name} {_first(value, ~ok, extra)}"
        for name, value, extra in (("at", state.x, 1), ("budget left", state.budget, 0))
        if value is not None
    )
    raise InfeasibleError(
        f"experiment {state.time}: {what} by {constraint!r}{f' ({where})' if where else ''}", state.time, constraint, state
    )


def _first(value: Tensor, bad: Tensor, event_dims: int) -> str:
    """The first bad member of a batch, as text."""
    return _text(value[bad.expand(value.shape[: value.dim() - event_dims])][0])


def _text(value: Tensor) -> str:
    numbers = [f"{number:g}" for number in value.flatten().tolist()]
    return f"[{', '.join(numbers)}]" if value.dim() else numbers[0]


class Unconstrained(Constraint):
    """The box alone; a coordinate without finite bounds is free."""

    def __init__(self, bounds: Any):
        self.bounds = check_bounds(bounds)

    def slack(self, state: State, x: Tensor) -> Tensor:
        """No inequality but the box: (..., 0)."""
        return x[..., :0]

    def decode(self, state: State, u: Tensor) -> Tensor:
        """Sigmoid between finite bounds, the clamped identity elsewhere."""
        return _from_free(u, *self.bounds.to(u.dtype))

    def interval(self, state: State) -> tuple[Tensor, Tensor]:
        """The bounds."""
        return self.bounds[0], self.bounds[1]


class StepLimit(Constraint):
    """Each design is close to the one before: ‖x_t − x_{t−1}‖ ≤ δ [paper].

    Args:
        delta: δ ≥ 0, a number or, for "linf", one per coordinate (d,); 0 freezes the design, ∞ leaves the box alone.
        norm: "linf", each coordinate on its own (a square in the plane), or "l2", the distance (a disc).
        bounds: box of designs (2, d).
    """

    def __init__(self, delta: float | Tensor, norm: str = "linf", *, bounds: Any):
        self.bounds = check_bounds(bounds)
        delta = as_numbers("delta", delta, self.bounds.dtype)
        if norm not in ("linf", "l2"):
            raise ValueError(f'norm={norm!r}: expected "linf" or "l2"')
        if delta.shape not in ((), self.bounds.shape[1:] if norm == "linf" else ()) or not (delta >= 0).all():
            raise ValueError(f"delta={delta.tolist()}: expected a number >= 0, or one per coordinate with the norm linf")
        width = self.bounds[1] - self.bounds[0]
        reach = torch.minimum(delta, width if norm == "linf" else width.square().sum().sqrt())  # further than any two designs
        if not reach.isfinite().all():
            raise ValueError(f"delta={delta.tolist()}: expected a finite step where the box has no bounds")
        self.delta, self.norm, self._reach = delta, norm, reach

    def init(self, x0: Tensor | None, steps: int) -> State:
        """State before the first step from x0 (..., d)."""
        return super().init(_required(self, x0), steps)

    def slack(self, state: State, x: Tensor) -> Tensor:
        """Two linear inequalities per coordinate (..., 2d), or δ − ‖x − x_{t−1}‖₂ (..., 1)."""
        move = x - state.x
        if self.norm == "l2":
            return self._reach.to(x.dtype) - torch.linalg.vector_norm(move, dim=-1, keepdim=True)
        return torch.cat([self._reach + move, self._reach - move], -1)

    def decode(self, state: State, u: Tensor) -> Tensor:
        """x_{t−1} + δ tanh u, clamped to the box; for "l2", u scaled into the ball."""
        reach = self._reach.to(u.dtype)
        move = reach * torch.tanh(u) if self.norm == "linf" else _into_ball(u, reach, "l2")
        return (state.x + move).clamp(*self.bounds.to(u.dtype))

    def encode(self, state: State, x: Tensor) -> Tensor:
        """The inverse of `decode` inside the box."""
        move, reach = x - state.x, self._reach.to(x.dtype)
        if self.norm == "l2":
            return _from_ball(move, reach, "l2")
        return torch.atanh((move / reach.clamp(min=1e-12)).clamp(EDGE - 1, 1 - EDGE))

    def project(self, state: State, x: Tensor) -> Tensor:
        """The nearest feasible design for "linf"; for "l2", the step shortened."""
        if self.norm == "linf":
            low, high = self.interval(state)
            return torch.minimum(torch.maximum(x, low), high)
        return _shorten(state.x, x.clamp(*self.bounds.to(x.dtype)), self._reach.to(x.dtype), "l2")

    def reachable(self, state: State, n: int = 1) -> Region:
        """n steps away."""
        reach = n * self._reach
        low, high = self.bounds
        low, high = torch.maximum(low, state.x - reach), torch.minimum(high, state.x + reach)
        return Region(low, high, state.x, () if self.norm == "linf" else (("l2", reach.expand(state.x.shape[:-1])),))

    def interval(self, state: State) -> tuple[Tensor, Tensor] | None:
        """[x_{t−1} − δ, x_{t−1} + δ] in the box, for "linf"."""
        if self.norm == "l2":
            return None
        low, high = self.bounds.to(state.x.dtype)
        return torch.maximum(low, state.x - self._reach), torch.minimum(high, state.x + self._reach)

    def __repr__(self) -> str:
        return f"StepLimit({_text(self.delta)}, {self.norm!r})"


class Budget(Constraint):
    """All designs together may cost no more than a budget B: b_{t+1} = b_t − c(x_{t−1}, x_t) ≥ 0 [paper].

    Args:
        total: B ≥ 0.
        cost: "l2" or "l1", the distance travelled, or a function c(previous (..., d), x (..., d)) -> (...) ≥ 0, for instance of
            `position_cost`. With a function, `decode` and `project` shorten a move until it is affordable, which finds the edge
            of the affordable set if the cost grows along the move.
        pacing: how much of b_t one design may cost in `decode` and `project` [ours]: None, all of it; "half", b_t / 2, and all
            of it for the last design; "even", b_t / remaining. `is_feasible` and `slack` know the budget only.
        cheapest: a design (d,) that costs least, for a function under which staying is not the cheapest.
        bounds: box of designs (2, d).
    """

    def __init__(
        self,
        total: float,
        cost: str | Cost = "l2",
        pacing: str | None = None,
        *,
        cheapest: Any = None,
        bounds: Any,
    ):
        self.bounds = check_bounds(bounds)
        total = check_number("total", total, "a finite budget >= 0", lambda x: 0 <= x < math.inf)
        if not (callable(cost) or cost in ("l1", "l2")):
            raise ValueError(f'cost={cost!r}: expected "l2", "l1" or a function of two designs')
        if pacing not in (None, "half", "even"):
            raise ValueError(f'pacing={pacing!r}: expected None, "half" or "even"')
        if cheapest is not None:
            cheapest = as_numbers("cheapest", cheapest, self.bounds.dtype)
            if cheapest.shape != self.bounds.shape[1:] or not self._in_box(cheapest, 0.0):
                raise ValueError(f"cheapest={cheapest.tolist()}: expected a design in the box {self.bounds.tolist()}")
        self.total, self.cost, self.pacing, self.cheapest = total, cost, pacing, cheapest

    def init(self, x0: Tensor | None, steps: int) -> State:
        """State at x0 (..., d) with the whole budget left.

        Raises:
            ValueError: see `Constraint.init`; a cost function returns another shape, or a number < 0 or NaN.
        """
        state = super().init(_required(self, x0), steps)
        self._price(state.x, state.x)
        return replace(state, budget=state.x.new_full(state.x.shape[:-1], self.total))

    def step(self, state: State, x: Tensor) -> State:
        """b_{t+1} = b_t − c."""
        return replace(super().step(state, x), budget=state.budget - self._price(state.x, x))

    def spend(self, state: State) -> Tensor:
        """What the next design may cost under the pacing (...), ≥ 0."""
        budget = state.budget.clamp(min=0)
        if self.pacing is None or state.remaining <= 1:
            return budget
        return budget / (2 if self.pacing == "half" else state.remaining)

    def slack(self, state: State, x: Tensor) -> Tensor:
        """b − c (..., 1)."""
        return (state.budget - self._price(state.x, x))[..., None]

    def decode(self, state: State, u: Tensor) -> Tensor:
        """u scaled into the ball that the paced budget allows, clamped to the box; for a cost function, the part of the way to
        a design in the box that is affordable.
        """
        if callable(self.cost):
            return self._affordable(state, _from_free(u, *self.bounds.to(u.dtype)))
        move = _into_ball(u, self._radius(state), self.cost)
        return (state.x + move).clamp(*self.bounds.to(u.dtype))

    def encode(self, state: State, x: Tensor) -> Tensor:
        """The inverse of `decode` inside the box."""
        if callable(self.cost):
            return super().encode(state, x)
        return _from_ball(x - state.x, self._radius(state), self.cost)

    def project(self, state: State, x: Tensor) -> Tensor:
        """The move shortened to what the paced budget allows."""
        x = x.clamp(*self.bounds.to(x.dtype))
        if callable(self.cost):
            return self._affordable(state, x)
        return torch.where(
            (_norm(x - state.x, self.cost) <= self.spend(state))[..., None],
            x,
            _shorten(state.x, x, self._radius(state), self.cost),
        )

    def reachable(self, state: State, n: int = 1) -> Region:
        """As far as the budget goes, for n = 1 under the pacing; the box, for a cost function."""
        low, high = self.bounds
        if callable(self.cost):
            return Region(low, high)
        radius = self.spend(state) if n == 1 else state.budget.clamp(min=0)
        low = torch.maximum(low, state.x - radius[..., None])
        return Region(low, torch.minimum(high, state.x + radius[..., None]), state.x, ((self.cost, radius),))

    def nonempty(self, state: State) -> Tensor:
        """Whether the cheapest design is affordable."""
        anchor = self._anchor(state)
        return state.budget - self._price(state.x, anchor) >= -TOLERANCE * self._unit

    def _anchor(self, state: State) -> Tensor:
        return state.x if self.cheapest is None else self.cheapest.to(state.x.dtype).expand(state.x.shape)

    def _price(self, previous: Tensor, x: Tensor) -> Tensor:
        if not callable(self.cost):
            return _norm(x - previous, self.cost)
        price = as_numbers("cost", self.cost(previous, x), x.dtype)
        shape = torch.broadcast_shapes(previous.shape, x.shape)[:-1]
        if price.shape != shape:
            raise ValueError(f"cost: got shape {tuple(price.shape)} for designs {tuple(x.shape)}; expected {tuple(shape)}")
        if not (price >= 0).all():
            raise ValueError(f"cost: got {price[~(price >= 0)][0].item()}; expected numbers >= 0")
        return price

    def _radius(self, state: State) -> Tensor:
        """The paced budget less what rounding the coordinates may add to a length."""
        spend, size = self.spend(state), self.bounds.abs().max()
        if not size.isfinite():
            size = state.x.detach().abs().amax(-1) + spend.detach()
        margin = (self.bounds.shape[1] + 2) * torch.finfo(spend.dtype).eps * size
        return (spend - margin).clamp(min=0)

    def _affordable(self, state: State, x: Tensor) -> Tensor:
        """The last design on the way from the cheapest one to x that is affordable."""
        anchor, spend = self._anchor(state), self.spend(state)
        way = x - anchor
        with torch.no_grad():
            enough, too_far = torch.zeros_like(way[..., 0]), torch.ones_like(way[..., 0])
            whole = self._price(state.x, x) <= spend
            for _ in range(24):
                middle = (enough + too_far) / 2
                fits = self._price(state.x, anchor + middle[..., None] * way) <= spend
                enough, too_far = torch.where(fits, middle, enough), torch.where(fits, too_far, middle)
            share = torch.where(whole, 1.0, enough)
        price = self._price(state.x, anchor + share[..., None] * way)
        slope = (price - self._price(state.x, anchor + 0.999 * share[..., None] * way)).detach() / (1e-3 * share).clamp(
            min=1e-12
        )
        excess = price - spend  # stays 0 at the edge: the share moves with x by the implicit function theorem
        change = (excess - excess.detach()) / torch.where(slope > 0, slope, 1)
        share = share - torch.where(whole | (slope <= 0), 0, change)
        return torch.where(whole[..., None], x, anchor + share[..., None] * way)

    @property
    def _unit(self) -> float:
        return max(self.total, 1.0) if callable(self.cost) else super()._unit

    def __repr__(self) -> str:
        cost = "a cost function" if callable(self.cost) else repr(self.cost)
        return f"Budget({self.total:g}, {cost}, pacing={self.pacing!r})"


class Monotone(Constraint):
    """Each coordinate grows by at least a gap, as sampling times do: x_t ≥ x_{t−1} + Δ [ours].

    Args:
        gap: Δ > 0.
        bounds: box of designs (2, d).
    """

    def __init__(self, gap: float, *, bounds: Any):
        self.bounds = check_bounds(bounds)
        self.gap = check_number("gap", gap)

    def init(self, x0: Tensor | None, steps: int) -> State:
        """State after x0 (..., d); None if the first time is free.

        Raises:
            ValueError: see `Constraint.init`; the gaps do not fit into the box.
        """
        state = super().init(x0, steps)
        low, high = self.interval(state)
        if (low > high).any():
            room = self.bounds[1] - (self.bounds[0] if state.x is None else state.x)
            raise ValueError(f"gap={self.gap}, steps={steps}: {steps} designs do not fit into a range of {room.min():g}")
        return state

    def slack(self, state: State, x: Tensor) -> Tensor:
        """Distance to the earliest design and to the latest that leaves room for the rest, (..., 2d)."""
        low, high = self.interval(state)
        return torch.cat([x - low, high - x], -1)

    def decode(self, state: State, u: Tensor) -> Tensor:
        """Sigmoid between the earliest design and the latest that leaves room for the rest."""
        low, high = self.interval(state)
        return low + (high - low).clamp(min=0) * torch.sigmoid(u)

    def encode(self, state: State, x: Tensor) -> Tensor:
        """The inverse of `decode`."""
        return _to_free(x, *self.interval(state))

    def project(self, state: State, x: Tensor) -> Tensor:
        """The nearest feasible design."""
        low, high = self.interval(state)
        return torch.minimum(torch.maximum(x, low), high)

    def reachable(self, state: State, n: int = 1) -> Region:
        """From the earliest n-th design to the latest."""
        low, high = self.interval(state)
        return Region(low + (n - 1) * self.gap, high + (n - 1) * self.gap)

    def nonempty(self, state: State) -> Tensor:
        """Whether the remaining designs fit in."""
        low, high = self.interval(state)
        return (low <= high + TOLERANCE * self._unit).all(-1)

    def interval(self, state: State) -> tuple[Tensor, Tensor]:
        """[x_{t−1} + Δ, highest − Δ (remaining − 1)]."""
        low, high = self.bounds if state.x is None else self.bounds.to(state.x.dtype)
        low = low if state.x is None else state.x + self.gap
        return low, high - self.gap * (state.remaining - 1)

    def __repr__(self) -> str:
        return f"Monotone({self.gap:g})"


class Intersection(Constraint):
    """Several constraints at once.

    Members that are boxes are intersected exactly; then the others project in turn. A design that still is not feasible, for
    instance because shortening a step led into an obstacle, is moved toward the latest design until it is.

    Args:
        members: at least one constraint.
    """

    def __init__(self, *members: Constraint):
        if not members:
            raise ValueError("members: expected at least one constraint")
        if not all(isinstance(member, Constraint) for member in members):
            raise ValueError(f"members={members!r}: expected constraints, one argument each")
        if len({member.bounds.shape for member in members}) > 1:
            raise ValueError(f"members: got boxes of shape {[tuple(m.bounds.shape) for m in members]}; expected one shape")
        self.members = members
        low = reduce(torch.maximum, [member.bounds[0] for member in members])
        self.bounds = check_bounds(torch.stack([low, reduce(torch.minimum, [member.bounds[1] for member in members])]))

    def init(self, x0: Tensor | None, steps: int) -> State:
        """The states of all members."""
        super().init(x0, steps)
        return self._gather([member.init(x0, steps) for member in self.members])

    def step(self, state: State, x: Tensor) -> State:
        """Each member's step."""
        return self._gather([member.step(part, x) for member, part in self._parts(state)])

    def slack(self, state: State, x: Tensor) -> Tensor:
        """All inequalities of all members."""
        return torch.cat([member.slack(part, x) for member, part in self._parts(state)], -1)

    def is_feasible(self, state: State, x: Tensor, tol: float = TOLERANCE) -> Tensor:
        """Whether every member allows x."""
        return reduce(torch.logical_and, [member.is_feasible(part, x, tol) for member, part in self._parts(state)])

    def decode(self, state: State, u: Tensor) -> Tensor:
        """Into the box, if some member is one, else by the first member; then as `project`."""
        box = self.interval(state)
        x = self.members[0].decode(state.parts[0], u) if box is None else _from_free(u, *box)
        return self.project(state, x)

    def encode(self, state: State, x: Tensor) -> Tensor:
        """Nearly the inverse of `decode`."""
        box = self.interval(state)
        return self.members[0].encode(state.parts[0], x) if box is None else _to_free(x, *box)

    def project(self, state: State, x: Tensor, rounds: int = 4) -> Tensor:
        """A feasible design near x, where one is found."""
        for _ in range(rounds):
            for member, part in self._parts(state):
                x = member.project(part, x)
            feasible = self.is_feasible(state, x.detach())
            if feasible.all():
                return x
        if state.x is None:
            return x
        shares = torch.linspace(1, 0, 65, dtype=x.dtype).reshape(-1, *[1] * x.dim())
        allowed = self.is_feasible(state, (state.x + shares * (x - state.x)).detach())  # (65, ...)
        share = shares.flatten()[allowed.to(torch.uint8).argmax(0)]  # the first, hence largest, that is allowed
        return torch.where(feasible[..., None], x, state.x + share[..., None] * (x - state.x))

    def reachable(self, state: State, n: int = 1) -> Region:
        """What all members can reach."""
        regions = [member.reachable(part, n) for member, part in self._parts(state)]
        low = reduce(torch.maximum, [region.low for region in regions])
        high = reduce(torch.minimum, [region.high for region in regions])
        balls = tuple(ball for region in regions for ball in region.balls)
        excluded = [
            torch.cat([shape for shape in shapes if shape is not None]) if any(s is not None for s in shapes) else None
            for shapes in ([r.discs for r in regions], [r.boxes for r in regions])
        ]
        return Region(low, high, state.x, balls, *excluded)

    def nonempty(self, state: State) -> Tensor:
        """Whether each member, and the box they share, allows some design; obstacles may still leave none."""
        allowed = [member.nonempty(part) for member, part in self._parts(state)]
        if (box := self.interval(state)) is not None:
            allowed.append((box[0] <= box[1] + TOLERANCE * self._unit).all(-1))
        return reduce(torch.logical_and, allowed)

    def interval(self, state: State) -> tuple[Tensor, Tensor] | None:
        """The box that the boxes among the members share."""
        boxes = [box for member, part in self._parts(state) if (box := member.interval(part)) is not None]
        if not boxes:
            return None
        return reduce(torch.maximum, [low for low, _ in boxes]), reduce(torch.minimum, [high for _, high in boxes])

    def _parts(self, state: State):
        return zip(self.members, state.parts, strict=True)

    def _gather(self, parts: Sequence[State]) -> State:
        budget = next((part.budget for part in parts if part.budget is not None), None)
        return State(parts[0].x, parts[0].remaining, parts[0].time, budget, tuple(parts))

    def __repr__(self) -> str:
        return f"Intersection({', '.join(map(repr, self.members))})"


def switching_cost(price: float, mode: Callable[[Tensor], Tensor]) -> Cost:
    """The cost of a change of mode [ours]: c = price · 1[mode(x_{t−1}) ≠ mode(x_t)], with mode (..., d) -> (...)."""
    return lambda previous, x: price * (mode(previous) != mode(x)).to(x.dtype)


def position_cost(cost: Callable[[Tensor], Tensor]) -> Cost:
    """A cost c(x) of where one measures, whatever the way there: (..., d) -> (...)."""
    return lambda previous, x: cost(x)


def _required(constraint: Constraint, x0: Tensor | None) -> Tensor:
    if x0 is None:
        raise ValueError(f"x0=None: {constraint!r} needs a design to start from")
    return x0


def _norm(move: Tensor, norm: str) -> Tensor:
    return torch.linalg.vector_norm(move, ord=1 if norm == "l1" else 2, dim=-1)


def _into_ball(u: Tensor, radius: Tensor, norm: str) -> Tensor:
    """A vector of length radius · tanh‖u‖ in the direction of u (..., d)."""
    length = (u.square().sum(-1) + 1e-12).sqrt() if norm == "l2" else u.abs().sum(-1) + 1e-6
    return u * (radius * torch.tanh(length) / length)[..., None]


def _from_ball(move: Tensor, radius: Tensor, norm: str) -> Tensor:
    length = _norm(move, norm).clamp(min=1e-12)
    return move * (torch.atanh((length / radius.clamp(min=1e-12)).clamp(max=1 - EDGE)) / length)[..., None]


def _shorten(start: Tensor, x: Tensor, radius: Tensor, norm: str) -> Tensor:
    """x, or the point on the way to it at the distance `radius` from the start."""
    move = x - start
    length = _norm(move, norm)
    share = radius / length.clamp(min=1e-12)
    return torch.where((length <= radius)[..., None], x, start + share[..., None] * move)


def _from_free(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Sigmoid between finite bounds, the clamped identity elsewhere."""
    width = (high - low).clamp(min=0)
    bounded = width.isfinite()
    inside = torch.where(bounded, low, 0) + torch.where(bounded, width, 1) * torch.sigmoid(u)
    return torch.where(bounded, inside, torch.minimum(torch.maximum(u, low), high))


def _to_free(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    width = (high - low).clamp(min=1e-12)
    bounded = width.isfinite()
    share = (x - torch.where(bounded, low, 0)) / torch.where(bounded, width, 1)
    return torch.where(bounded, torch.logit(share.clamp(EDGE, 1 - EDGE)), x)

"""A corridor that only lookahead crosses: one unknown number, twelve places to measure it, one step at a time [ours].

    θ ~ N(0, 1),   y_t ~ N(a(x_t) θ, σ²),   x_t − x_{t−1} ∈ {−1, 0, 1}

Measuring at x_1, …, x_T tells I = ½ log(1 + S_T), S_t = Σ_{s≤t} a(x_s)² / σ² in nats, whatever the outcomes. The best places
lie behind a stretch of poor ones, so a planner sees them only if its horizon reaches across, and only if it does not discount
them away. Everything is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.design.models import as_numbers
from labkit.errors import check_number, check_size

AMPLITUDES = (0.6, 0.8, 1.0, 0.8, 0.2, 0.1, 0.1, 0.2, 1.5, 2.5, 2.5, 1.5)
MOVES = (0, 1, -1)  # in this order of preference, where two plans are worth the same


@dataclass(frozen=True)
class Corridor:
    """Places 0, 1, …, n − 1 to measure at.

    Args:
        amplitudes: a (n,), n ≥ 1.
        start: x_0, which is not measured.
        noise_sd: σ > 0.
    """

    amplitudes: Sequence[float] = AMPLITUDES
    start: int = 1
    noise_sd: float = 1.0

    def __post_init__(self):
        amplitudes = as_numbers("amplitudes", self.amplitudes)
        if amplitudes.dim() != 1 or not len(amplitudes) or not amplitudes.isfinite().all():
            raise ValueError(f"amplitudes={self.amplitudes}: expected at least one, all finite")
        check_size("start", self.start, 0)
        if self.start >= len(self.amplitudes):
            raise ValueError(f"start={self.start}: expected a place in 0, …, {len(self.amplitudes) - 1}")
        check_number("noise_sd", self.noise_sd)

    @property
    def precision(self) -> np.ndarray:
        """What one measurement at each place adds to S, (n,)."""
        return (np.asarray(self.amplitudes) / self.noise_sd) ** 2

    def information(self, path: Sequence[int]) -> np.ndarray:
        """I(θ; y_1, …, y_t) in nats for t = 1, …, T (T,), of a path (T,)."""
        places = as_numbers("path", path).numpy()
        if not np.isin(places, np.arange(len(self.amplitudes))).all():
            raise ValueError(f"path={list(path)}: expected places in 0, …, {len(self.amplitudes) - 1}")
        return 0.5 * np.log1p(np.cumsum(self.precision[places.astype(int)]))


@dataclass(frozen=True)
class CorridorPath:
    """A walk through the corridor.

    Attributes:
        places: x_1, …, x_T (T,).
        information: I(θ; y_1, …, y_t) in nats (T,).
    """

    places: np.ndarray
    information: np.ndarray


def optimal_path(corridor: Corridor, steps: int) -> CorridorPath:
    """The most informative walk, by dynamic programming: maximising I is maximising S, which is additive.

    Args:
        corridor: where to walk.
        steps: T ≥ 1.
    """
    check_size("steps", steps, 1)
    moves, precision, n = np.array(MOVES), corridor.precision, len(corridor.amplitudes)
    targets = np.arange(n)[:, None] + moves  # (n, 3)
    allowed = (targets >= 0) & (targets < n)
    targets = targets.clip(0, n - 1)
    to_go, best = np.zeros(n), []
    for _ in range(steps):
        worth = np.where(allowed, (precision + to_go)[targets], -np.inf)
        best.append(targets[np.arange(n), worth.argmax(1)])
        to_go = worth.max(1)
    places = [corridor.start]
    for choice in reversed(best):
        places.append(int(choice[places[-1]]))
    return CorridorPath(np.array(places[1:]), corridor.information(places[1:]))


def planned_path(corridor: Corridor, steps: int, depth: int, discount: float = 1.0) -> CorridorPath:
    """The walk of a planner that replans at each step, looks `depth` measurements beyond the next one and discounts them.

    Each step maximises Σ_{ℓ=0}^{h} γ^ℓ (I_{t+ℓ} − I_{t+ℓ−1}), h = min(H, T − t), exactly.

    Args:
        corridor: where to walk.
        steps: T ≥ 1.
        depth: H ≥ 0; 0 is greedy.
        discount: γ ∈ (0, 1].
    """
    check_size("steps", steps, 1)
    check_size("depth", depth, 0)
    check_number("discount", discount, "a number in (0, 1]", lambda x: 0 < x <= 1)
    precision = corridor.precision
    place, total, places = corridor.start, 0.0, []
    for t in range(1, steps + 1):
        place = _first_move(precision, place, total, min(depth, steps - t), discount)
        total += precision[place]
        places.append(place)
    return CorridorPath(np.array(places), corridor.information(places))


def _first_move(precision: np.ndarray, place: int, total: float, horizon: int, discount: float) -> int:
    """Where the best plan of `horizon` + 1 measurements goes first.

    Plans are extended together. Of those that are at the same place with the same S only the one worth most is kept: S, not the
    order in which it came together, decides what further measurements are worth.
    """
    moves = np.array(MOVES)
    at, sums, worth, first = np.array([place]), np.array([total]), np.zeros(1), np.array([place])
    for level in range(horizon + 1):
        ahead = (at[:, None] + moves).ravel()
        inside = (ahead >= 0) & (ahead < len(precision))
        ahead, before = ahead[inside], np.repeat(sums, 3)[inside]
        sums = before + precision[ahead]
        worth = np.repeat(worth, 3)[inside] + discount**level * 0.5 * np.log((1 + sums) / (1 + before))
        first = ahead if level == 0 else np.repeat(first, 3)[inside]
        keep = _best_of_each(ahead, sums, worth)
        at, sums, worth, first = ahead[keep], sums[keep], worth[keep], first[keep]
    best = worth >= worth.max() - 1e-12
    return min(first[best].tolist(), key=lambda x: MOVES.index(x - place))


def _best_of_each(at: np.ndarray, sums: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Indices of the plans worth most among those with equal place and equal S."""
    key = at + 1j * sums.round(9)
    order = np.lexsort((-worth, key.imag, key.real))
    _, start = np.unique(key[order], return_index=True)
    return order[start]

"""What the buyer believes about a seller's cost, and what it costs to buy in expectation.

A prior F is a frozen continuous `scipy.stats` distribution on [0, ∞) or one of the three classes here. A posted price p buys
with probability q = F(p). In quantile space, q ∈ [0, 1] [predecessor: Myerson 1981, turned from selling to buying]:

    spend curve  R(q) = q F⁻¹(q),            R'(q) = φ(F⁻¹(q))
    cost curve   C(q) = ∫_0^q F⁻¹(s) ds      (expected cost of those who accept)
    virtual cost φ(c) = c + F(c) / f(c)      (spend on one more unit of probability)

With types c_1 < … < c_m of probabilities f_j and F_j = f_1 + … + f_j these are R_j = F_j c_j, C_j = Σ_{l≤j} f_l c_l and
φ_j = (R_j − R_{j−1}) / f_j = c_j + (c_j − c_{j−1}) F_{j−1} / f_j. A prior is regular if φ does not decrease. Where it does,
ironing replaces R by its lower convex envelope, and φ by that envelope's slope.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats
from scipy.optimize import isotonic_regression

from labkit.errors import check_number, check_size
from labkit.procurement._checks import floats, refuse

# ∫_0^1 h(x) dx ≈ Σ_k w_k h(x_k) after x = (1 + tanh(π/2 sinh u)) / 2: exact to rounding for quantile functions, which may be
# singular at either end
_U = np.linspace(-3.2, 3.2, 81)
_NODES = np.minimum(1 / (1 + np.exp(-np.pi * np.sinh(_U))), 1 - 2**-53)
_WEIGHTS = (_U[1] - _U[0]) * np.pi / 4 * np.cosh(_U) / np.cosh(np.pi / 2 * np.sinh(_U)) ** 2


class Prior(Protocol):
    """A distribution of costs on [0, ∞). One that is not a `DiscretePrior` also has a density `pdf(c)`."""

    def cdf(self, c: np.ndarray) -> np.ndarray:
        """F(c) = P(cost ≤ c)."""

    def ppf(self, q: np.ndarray) -> np.ndarray:
        """F⁻¹(q), the lowest c with F(c) ≥ q; at q = 0 the lowest cost."""

    def rvs(self, size: int, random_state: np.random.Generator) -> np.ndarray:
        """Independent draws (size,)."""


class DiscretePrior:
    """Finitely many types c_1 < … < c_m.

    Args:
        costs: types (m,), increasing, finite, ≥ 0.
        probs: their probabilities (m,), > 0, summing to 1 within 1e-9.
    """

    def __init__(self, costs: np.ndarray, probs: np.ndarray):
        self.costs = floats("costs", costs, "finite types ≥ 0 in increasing order").copy()
        self.probs = floats("probs", probs, "numbers > 0 that sum to 1").copy()
        if self.costs.ndim != 1 or not self.costs.size or self.costs.shape != self.probs.shape:
            raise ValueError(f"costs {self.costs.shape}, probs {self.probs.shape}: expected two arrays (m,) with m ≥ 1")
        if not (self.costs[0] >= 0 and np.isfinite(self.costs).all() and (np.diff(self.costs) > 0).all()):
            raise ValueError(f"costs={self.costs}: expected finite types ≥ 0 in increasing order, each once")
        if not ((self.probs > 0).all() and abs(self.probs.sum() - 1) <= 1e-9):
            raise ValueError(f"probs={self.probs}: expected numbers > 0 that sum to 1, got the sum {self.probs.sum()}")
        self._cumulative = np.append(np.cumsum(self.probs)[:-1], 1.0)

    def cdf(self, c: np.ndarray) -> np.ndarray:
        """F(c), a step at each type."""
        return np.append(0.0, self._cumulative)[np.searchsorted(self.costs, c, side="right")]

    def ppf(self, q: np.ndarray) -> np.ndarray:
        """The lowest type c with F(c) ≥ q."""
        return self.costs[np.searchsorted(self._cumulative, q)]

    def rvs(self, size: int, random_state: np.random.Generator) -> np.ndarray:
        """Independent draws (size,)."""
        return self.ppf(random_state.random(size))

    def support(self) -> tuple[float, float]:
        """The lowest and the highest type."""
        return float(self.costs[0]), float(self.costs[-1])

    def mean(self) -> float:
        """E[c]."""
        return float(self.probs @ self.costs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.costs)} types in [{self.costs[0]:g}, {self.costs[-1]:g}])"


class EmpiricalPrior(DiscretePrior):
    """The types of a sample (m,), each with its relative frequency."""

    def __init__(self, samples: np.ndarray):
        samples = floats("samples", samples, "finite numbers ≥ 0")
        if samples.ndim != 1 or not samples.size:
            raise ValueError(f"samples of shape {samples.shape}: expected (m,) with m ≥ 1")
        refuse("samples", samples, ~((samples >= 0) & (samples < np.inf)), "finite numbers ≥ 0")
        costs, counts = np.unique(samples, return_counts=True)
        super().__init__(costs, counts / len(samples))


class MixturePrior:
    """A mixture of continuous priors; often irregular, e.g. of cheap and dear sellers.

    Args:
        components: continuous priors (discrete types mix into one `DiscretePrior`).
        weights: their probabilities, > 0, summing to 1 within 1e-9.
    """

    def __init__(self, components: Sequence[Prior], weights: Sequence[float]):
        self.components, self.weights = tuple(components), floats("weights", weights, "numbers > 0 that sum to 1").copy()
        if not self.components or self.weights.shape != (len(self.components),):
            raise ValueError(f"{len(self.components)} components, weights {self.weights.shape}: expected one weight each")
        if not ((self.weights > 0).all() and abs(self.weights.sum() - 1) <= 1e-9):
            raise ValueError(f"weights={self.weights}: expected numbers > 0 that sum to 1, got the sum {self.weights.sum()}")
        for k, component in enumerate(self.components):
            check_prior(f"components[{k}]", component, continuous=True)
        ends = np.array([float(prior.ppf(q)) for prior in self.components for q in (0.0, 1.0)])
        self.kinks = np.unique(ends[np.isfinite(ends)])

    def cdf(self, c: np.ndarray) -> np.ndarray:
        """F(c) = Σ_k w_k F_k(c)."""
        return sum(w * prior.cdf(c) for w, prior in self._parts)

    def pdf(self, c: np.ndarray) -> np.ndarray:
        """f(c) = Σ_k w_k f_k(c)."""
        return sum(w * prior.pdf(c) for w, prior in self._parts)

    def ppf(self, q: np.ndarray) -> np.ndarray:
        """The lowest c with F(c) ≥ q, by bisection between the components' quantiles."""
        q = np.asarray(q, dtype=float)
        quantiles = np.array([prior.ppf(q) for prior in self.components])
        low, high = quantiles.min(0), quantiles.max(0)
        if (q <= 0).all():
            return low
        infinite = np.isinf(high)
        low, high = np.where(infinite, 0.0, np.where(q > 0, [low, high], low))
        while (high - low > 2**-52 * high + 2**-90 * high.max()).any():
            middle = low + (high - low) / 2
            enough = self.cdf(middle) >= q
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(infinite, np.inf, high)

    def rvs(self, size: int, random_state: np.random.Generator) -> np.ndarray:
        """Independent draws (size,)."""
        which = random_state.choice(len(self.components), size=size, p=self.weights / self.weights.sum())
        draws = np.empty(size)
        for k, prior in enumerate(self.components):
            draws[which == k] = prior.rvs(size=np.count_nonzero(which == k), random_state=random_state)
        return draws

    def support(self) -> tuple[float, float]:
        """The lowest and the highest cost of any component."""
        low, high = zip(*((prior.ppf(0.0), prior.ppf(1.0)) for prior in self.components), strict=True)
        return float(min(low)), float(max(high))

    def mean(self) -> float:
        """E[c]."""
        return float(sum(w * prior.mean() for w, prior in self._parts))

    @property
    def _parts(self):
        return zip(self.weights, self.components, strict=True)

    def __repr__(self) -> str:
        return f"MixturePrior({len(self.components)} components, weights {self.weights})"


@dataclass(frozen=True)
class SpendCurve:
    """Points of a prior's curves in order of price, from q = 0 on.

    Attributes:
        prices: p (m,), increasing; of a discrete prior a price that buys nothing, then its types.
        probs: q = F(p) (m,).
        spends: R = q p (m,).
        costs: C = E[c 1{c ≤ p}] (m,); of a continuous prior by the trapezoid rule, with an error of O(m^-2).
        discrete: whether prices between the points are worth nothing.
    """

    prices: np.ndarray
    probs: np.ndarray
    spends: np.ndarray
    costs: np.ndarray
    discrete: bool


def spend_curve(prior: Prior, grid: int = 512, top: float = np.inf) -> SpendCurve:
    """Spend and cost curve of one prior.

    Args:
        prior: any prior.
        grid: number of prices of a continuous prior, ≥ 8: half of them evenly spaced in price, half in probability.
        top: highest price, > 0; an unbounded support ends at its (1 − 1e-12)-quantile.
    """
    check_prior("prior", prior)
    top = check_number("top", top, "a number > 0 or inf", lambda x: x > 0)
    return spend_curves([prior], np.array([top]), grid)[0]


def spend_curves(priors: Sequence[Prior], tops: np.ndarray, grid: int) -> list[SpendCurve]:
    """`spend_curve` of many priors with their own highest prices (d,), one evaluation per family of distributions."""
    check_size("grid", grid, 8)
    curves: list[SpendCurve] = [None] * len(priors)
    for prior, index in stack(priors):
        if isinstance(prior, DiscretePrior):
            for i in index:
                curves[i] = _discrete_curve(prior, tops[i])
            continue
        low, high = _support(prior, len(index))
        high = np.minimum(high, tops[index])
        steps = np.arange(grid // 2 + 1)[:, None] / (grid // 2)
        even = low + np.maximum(high - low, 0) * steps  # (points, d)
        quantiles = prior.ppf(prior.cdf(high) * (steps[:-1] + steps[1] / 2))
        prices = np.sort(np.concatenate([even, np.clip(quantiles, low, np.maximum(low, high))]), axis=0)
        if isinstance(prior, MixturePrior):
            kinks = prior.kinks[(prior.kinks > low) & (prior.kinks < high)]
            prices = np.sort(np.concatenate([prices, np.repeat(kinks[:, None], len(index), axis=1)]), axis=0)
        probs = np.maximum.accumulate(np.where(prices > low, prior.cdf(prices), 0.0), axis=0)
        areas = np.diff(probs, axis=0) * (prices[1:] + prices[:-1]) / 2
        costs = np.concatenate([np.zeros((1, len(index))), np.cumsum(areas, axis=0)])
        for column, i in enumerate(index):
            p, q = prices[:, column], probs[:, column]
            curves[i] = SpendCurve(p, q, p * q, costs[:, column], discrete=False)
    return curves


def virtual_cost(prior: Prior, c: np.ndarray, ironed: bool = False) -> np.ndarray:
    """Virtual cost φ(c) = c + F(c) / f(c), or its ironed version.

    Args:
        prior: any prior.
        c: costs, any shape; types of the prior if it is discrete.
        ironed: the slope of the spend curve's lower convex envelope instead; for a continuous prior its straight parts are
            found on 4096 prices.

    Returns:
        Virtual costs in the shape of `c`; below the support φ(c) = c, above it inf.
    """
    check_prior("prior", prior)
    c = floats("c", c, "costs")
    if isinstance(prior, DiscretePrior):
        place = np.minimum(np.searchsorted(prior.costs, c), len(prior.costs) - 1)
        if (prior.costs[place] != c).any():
            raise ValueError(f"c={c}: expected types of the prior, {prior.costs}")
        curve = _discrete_curve(prior, np.inf)
        phi = np.diff(curve.spends) / prior.probs
        return (isotonic_regression(phi, weights=prior.probs).x if ironed else phi)[place]
    F, f = prior.cdf(c), prior.pdf(c)
    with np.errstate(divide="ignore", invalid="ignore"):
        phi = c + np.where(F > 0, F / f, 0.0)
    for low, high, level in _flat_parts(spend_curve(prior, grid=4096)) if ironed else []:
        phi = np.where((c > low) & (c <= high), level, phi)
    return phi


def expected_cost(prior: Prior, price: np.ndarray) -> np.ndarray:
    """E[c 1{c ≤ p}] = C(F(p)), exact to rounding: prices of any shape in, the same shape out."""
    price = np.asarray(price, dtype=float)
    if isinstance(prior, DiscretePrior):
        partial = np.append(0.0, np.cumsum(prior.probs * prior.costs))
        return partial[np.searchsorted(prior.costs, price, side="right")]
    if isinstance(prior, MixturePrior):
        return sum(w * expected_cost(part, price) for w, part in zip(prior.weights, prior.components, strict=True))
    q = np.asarray(prior.cdf(price))
    shape = (-1,) + (1,) * q.ndim
    return q * (_WEIGHTS.reshape(shape) * prior.ppf(q * _NODES.reshape(shape))).sum(0)


def check_prior(name: str, prior: Prior, continuous: bool = False) -> None:
    """Refuse what cannot be a prior: a family that is not frozen, a missing method, or discrete types if `continuous`."""
    if isinstance(prior, stats.rv_continuous | stats.rv_discrete):
        raise ValueError(f"{name} is the family {prior.name}: expected one of its members, stats.{prior.name}(…)")
    if continuous and not hasattr(prior, "pdf"):
        raise ValueError(f"{name} has no pdf: expected a continuous prior")
    for method in ("cdf", "ppf", "rvs") + (() if isinstance(prior, DiscretePrior) else ("pdf",)):
        if not hasattr(prior, method):
            hint = "; make discrete costs a DiscretePrior" if hasattr(prior, "pmf") else ""
            raise ValueError(f"{name} has no {method}: expected cdf, pdf, ppf and rvs{hint}")


def stack(priors: Sequence[Prior]) -> list[tuple[Prior, np.ndarray]]:
    """Group priors that one call can evaluate.

    Args:
        priors: n priors.

    Returns:
        Pairs of a prior and the indices (g,) of its group. The prior broadcasts over arrays (..., g): it is the one that the
        group shares, or stands for a `scipy.stats` family with parameters (g,).
    """
    groups: dict[Hashable, list[int]] = {}
    for i, prior in enumerate(priors):
        groups.setdefault(_family(prior), []).append(i)
    return [(_merge([priors[i] for i in index]), np.array(index)) for index in groups.values()]


def prior_key(prior: Prior) -> Hashable:
    """Equal for equal priors, as far as it is cheap to tell."""
    if isinstance(prior, DiscretePrior):
        return prior.costs.tobytes(), prior.probs.tobytes()
    if _is_scipy(prior):
        return prior.dist.name, *map(float, prior.args), *sorted((k, float(v)) for k, v in prior.kwds.items())
    return id(prior)


def _support(prior: Prior, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest cost (size,) of a (stacked) prior; an unbounded support ends at its (1 − 1e-12)-quantile."""
    low, high = (np.broadcast_to(prior.ppf(np.full(size, q)), size) for q in (0.0, 1.0))
    low, unbounded = np.maximum(low, 0.0), np.isinf(high)
    if unbounded.any():
        high = np.where(unbounded, prior.ppf(np.full(size, 1 - 1e-12)), high)
    return low, high


def _family(prior: Prior) -> Hashable:
    if _is_scipy(prior):
        return prior.dist.name, len(prior.args), tuple(prior.kwds)
    return prior_key(prior)


def _is_scipy(prior: Prior) -> bool:
    """A frozen distribution that its name and scalar parameters describe in full."""
    dist = getattr(prior, "dist", None)
    return (
        isinstance(dist, stats.rv_continuous)
        and type(dist) is type(getattr(stats, dist.name, None))
        and all(np.ndim(x) == 0 for x in (*prior.args, *prior.kwds.values()))
    )


@dataclass(frozen=True)
class _Stacked:
    """One `scipy.stats` family with arrays (g,) of parameters; freezing it anew would take longer than evaluating it."""

    dist: stats.rv_continuous
    args: np.ndarray
    kwds: dict[str, np.ndarray]

    def cdf(self, c: np.ndarray) -> np.ndarray:
        return self.dist.cdf(c, *self.args, **self.kwds)

    def pdf(self, c: np.ndarray) -> np.ndarray:
        return self.dist.pdf(c, *self.args, **self.kwds)

    def ppf(self, q: np.ndarray) -> np.ndarray:
        return self.dist.ppf(q, *self.args, **self.kwds)


def _merge(priors: list[Prior]) -> Prior:
    first = priors[0]
    if all(prior is first for prior in priors) or not _is_scipy(first):
        return first
    args = np.array([prior.args for prior in priors], dtype=float).T
    kwds = {name: np.array([prior.kwds[name] for prior in priors], dtype=float) for name in first.kwds}
    return _Stacked(first.dist, args, kwds)


def _discrete_curve(prior: DiscretePrior, top: float) -> SpendCurve:
    types = prior.costs[prior.costs <= top]
    below = prior.costs[0] * (1 - 1e-12)  # buys from no type
    prices, probs = np.append(below, types), np.append(0.0, prior._cumulative[: len(types)])
    costs = np.append(0.0, np.cumsum(prior.probs * prior.costs)[: len(types)])
    return SpendCurve(prices, probs, prices * probs, costs, discrete=True)


def _flat_parts(curve: SpendCurve) -> list[tuple[float, float, float]]:
    """Intervals (low, high] of cost on which ironing makes φ constant, with that constant."""
    keep = np.append(True, np.diff(curve.probs) > 0)
    p, q, R = curve.prices[keep], curve.probs[keep], curve.spends[keep]
    fit = isotonic_regression(np.diff(R) / np.diff(q), weights=np.diff(q))
    parts = []
    for i, j in zip(fit.blocks[:-1], fit.blocks[1:], strict=True):
        bulge = R[i:j] - R[i] - fit.x[i] * (q[i:j] - q[i])
        if bulge.max() > 1e-12 * R[-1]:
            parts.append((p[i], p[j], fit.x[i]))
    return parts

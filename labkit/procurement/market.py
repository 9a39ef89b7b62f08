"""A buyer's market: sellers with public values and uncertain costs, a budget, and what the buyer wants.

n sellers offer one service each. Seller i is worth v_i > 0 to the buyer, costs c_i ~ F_i independently, and only seller i knows
c_i. The buyer spends at most B and maximises the linear objective

    J_{a,b} = Σ_i (v_i − b c_i) x_i − a p_i

where x_i says who sells and p_i what is paid. (a, b) = (1, 0) is the buyer's utility, (0, 1) welfare, (0, 0) value, and
(α, 1 − α) the mixture of utility and welfare [paper: the objectives; ours: the parametrisation].

Costs have shape (n,) for one profile and (S, n) for many. Costs, values, payments and budget share one currency.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd

from labkit.errors import check_number, check_size
from labkit.procurement._checks import floats, generator, not_negative, refuse
from labkit.procurement.priors import EmpiricalPrior, Prior, check_prior, expected_cost, prior_key, stack


@dataclass(frozen=True)
class Objective:
    """J_{a,b} = Σ (v_i − b c_i) x_i − a p_i.

    Attributes:
        payment_weight: a ≥ 0, what a payment costs the buyer's objective.
        cost_weight: b ≥ 0, what a seller's cost does.
    """

    payment_weight: float
    cost_weight: float

    def __post_init__(self):
        for name in ("payment_weight", "cost_weight"):
            not_negative(name, getattr(self, name))

    @classmethod
    def mixture(cls, alpha: float) -> Self:
        """α · utility + (1 − α) · welfare, α in [0, 1]."""
        check_number("alpha", alpha, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        return cls(alpha, 1 - alpha)


_ROUNDING = 1e-12  # a normal truncated at -mean / deviation may start a little below 0

UTILITY = Objective(1.0, 0.0)
WELFARE = Objective(0.0, 1.0)
VALUE = Objective(0.0, 0.0)


@dataclass(frozen=True)
class Market:
    """Sellers with public values and independent cost priors, and a budget.

    Attributes:
        values: v (n,) > 0.
        priors: n priors: frozen continuous `scipy.stats` distributions on [0, ∞), `DiscretePrior`, `EmpiricalPrior`,
            `MixturePrior`, or anything with their `cdf`, `pdf`, `ppf` and `rvs`.
        budget: B > 0.
    """

    values: np.ndarray
    priors: Sequence[Prior]
    budget: float

    def __post_init__(self):
        object.__setattr__(self, "values", check_values(self.values))
        object.__setattr__(self, "priors", tuple(self.priors) if np.iterable(self.priors) else (self.priors,))
        object.__setattr__(self, "budget", check_budget(self.budget))
        if len(self.priors) != self.n:
            raise ValueError(f"priors: got {len(self.priors)} for {self.n} values; expected one prior per seller")
        _check_priors(*self.kinds)

    @property
    def n(self) -> int:
        """Number of sellers."""
        return len(self.values)

    def sample(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw `size` profiles of costs (S, n); each seller's draws lie together in memory."""
        check_size("size", size, 0)
        costs, rng = np.empty((self.n, size)), generator(rng)
        for row, prior in zip(costs, self.priors, strict=True):
            np.maximum(prior.rvs(size=size, random_state=rng), 0.0, out=row)
        return costs.T

    def accept_prob(self, prices: np.ndarray) -> np.ndarray:
        """Probability F_i(p_i) that each seller accepts its price: prices (n,) in, (n,) out."""
        return self._evaluate(lambda prior, p: prior.cdf(p), prices)

    def expected_cost(self, prices: np.ndarray) -> np.ndarray:
        """Expected cost E[c_i 1{c_i ≤ p_i}] incurred at each seller's price: prices (n,) in, (n,) out."""
        return self._evaluate(expected_cost, prices)

    @classmethod
    def from_csv(
        cls, path: str | Path, *, value: str, cost: str, budget: float, group: str | None = None, seed: int = 0
    ) -> tuple[Self, np.ndarray]:
        """A market of the rows of a CSV file (or of a compressed one); see `from_table`."""
        try:
            # with a header, pandas renames a column that is there twice
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].fillna("")
            _check_columns(header, value, cost, group)
            table = pd.read_csv(path)
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            got = str(error).strip()
            raise ValueError(f"path={str(path)!r}: expected a line of column names and a line per seller; {got}") from error
        return cls.from_table(table, value=value, cost=cost, budget=budget, group=group, seed=seed)

    @classmethod
    def from_table(
        cls, table: pd.DataFrame, *, value: str, cost: str, budget: float, group: str | None = None, seed: int = 0
    ) -> tuple[Self, np.ndarray]:
        """A market of the rows of a table.

        Without `group` every row is a seller and all share the empirical prior of the whole cost column, which has seen the
        costs it predicts. With `group` a random half of each group makes that group's empirical prior, and the other half are
        the sellers.

        Args:
            table: one row per seller.
            value: column of values, > 0.
            cost: column of costs, ≥ 0, in the currency of the values.
            budget: B > 0.
            group: column that names each row's group.
            seed: of the split into halves.

        Returns:
            The market and its sellers' costs (n,).

        Raises:
            ValueError: a column that is missing or there twice, no rows, a cell that is no number or names no group (given by
                its row, counting from 0 below the header), or a group of fewer than 2 rows.
        """
        _check_columns(table.columns, value, cost, group)
        if table.empty:
            raise ValueError(f"the table has the columns {list(table.columns)} and no rows; expected a row per seller")
        check_size("seed", seed, 0)
        values, costs = _numbers(table[value], "> 0"), _numbers(table[cost], ">= 0")
        if group is None:
            return cls(values, [EmpiricalPrior(costs)] * len(values), budget), costs
        if table[group].isna().any():
            raise ValueError(f"column {group!r}, row {int(np.argmax(table[group].isna()))}: names no group")
        rng = np.random.default_rng(seed)
        sellers, priors = [], []
        for label, rows in table.groupby(group, sort=True).indices.items():
            if len(rows) < 2:
                raise ValueError(f"group {label!r} of column {group!r} has {len(rows)} row; expected at least 2")
            seen, held_out = np.split(rng.permutation(rows), [(len(rows) + 1) // 2])
            sellers.append(np.sort(held_out))
            priors += [EmpiricalPrior(costs[seen])] * len(held_out)
        rows = np.concatenate(sellers)
        return cls(values[rows], priors, budget), costs[rows]

    @cached_property
    def kinds(self) -> tuple[tuple[Prior, ...], np.ndarray]:
        """The distinct priors, and which of them each seller has (n,)."""
        index: dict[Hashable, int] = {}
        which = np.array([index.setdefault(prior_key(prior), len(index)) for prior in self.priors])
        first = np.unique(which, return_index=True)[1]
        return tuple(self.priors[i] for i in first), which

    @cached_property
    def _stacked(self) -> list[tuple[Prior, np.ndarray]]:
        return stack(self.priors)

    def _evaluate(self, function, prices: np.ndarray) -> np.ndarray:
        prices = floats("prices", prices, "numbers (n,)")
        if prices.shape != (self.n,):
            raise ValueError(f"prices of shape {prices.shape}: expected (n,) with n = {self.n} sellers")
        out = np.empty(self.n)
        for prior, index in self._stacked:
            out[index] = function(prior, prices[index])
        return out


def check_values(values: np.ndarray) -> np.ndarray:
    """Values as float64 (n,), n ≥ 1, finite and > 0, or a ValueError."""
    values = floats("values", values, "finite numbers > 0")
    if values.ndim != 1 or not values.size:
        raise ValueError(f"values of shape {values.shape}: expected (n,) with n ≥ 1 sellers")
    refuse("values", values, ~((values > 0) & (values < np.inf)), "finite numbers > 0")
    return values


def check_costs(costs: np.ndarray, n: int) -> np.ndarray:
    """Costs as float64 (n,) or (S, n), finite and ≥ 0, or a ValueError."""
    costs = floats("costs", costs, "finite numbers ≥ 0")
    if costs.ndim not in (1, 2) or costs.shape[-1] != n:
        raise ValueError(f"costs of shape {costs.shape}: expected (n,) or (S, n) with n = {n} sellers")
    if costs.size and not (costs.min() >= 0 and costs.max() < np.inf):
        refuse("costs", costs, ~((costs >= 0) & (costs < np.inf)), "finite numbers ≥ 0")
    return costs


def check_budget(budget: float) -> float:
    """A finite budget > 0, or a ValueError."""
    return check_number("budget", budget)


def _check_priors(kinds: Sequence[Prior], which: np.ndarray) -> None:
    for kind, prior in enumerate(kinds):
        check_prior(f"priors[{np.argmax(which == kind)}]", prior)
    for prior, index in stack(kinds):
        lowest, median = (np.broadcast_to(prior.ppf(np.full(len(index), q)), len(index)) for q in (0.0, 0.5))
        for kind, low, middle in zip(index, lowest, median, strict=True):
            if not -_ROUNDING * middle <= low < np.inf:
                raise ValueError(f"priors[{np.argmax(which == kind)}]: its lowest cost is {low}; expected a finite number ≥ 0")


def _check_columns(columns: Sequence[str], value: str, cost: str, group: str | None) -> None:
    columns = list(columns)
    for name in (value, cost) if group is None else (value, cost, group):
        if name not in columns:
            raise ValueError(f"column {name!r} is missing; the table has {columns}")
        if columns.count(name) > 1:
            raise ValueError(f"column {name!r} is there {columns.count(name)} times; expected it once, the table has {columns}")


def _numbers(column: pd.Series, allowed: str) -> np.ndarray:
    """The column as numbers "> 0" or ">= 0"."""
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=float)
    good = np.isfinite(numbers) & (numbers > 0 if allowed == "> 0" else numbers >= 0)
    if not good.all():
        row = int(np.argmin(good))
        cell = column.iloc[row]
        got = "an empty cell" if pd.isna(cell) else repr(cell) if isinstance(cell, str) else cell
        raise ValueError(f"column {column.name!r}, row {row}: {got} is not a finite number {allowed}")
    return numbers

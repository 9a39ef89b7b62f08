"""What a state-space model with static unknown parameters is, and the few things one does with any of them.

    θ ~ p(θ),   x_0 ~ p(x_0 | θ),   x_t ~ f(x_t | x_{t-1}, θ, ξ_t),   y_t ~ g(y_t | x_t, ξ_t)

θ is unknown and constant, x_t is never seen, the design ξ_t is chosen before y_t is. A model is any object with the attributes
and methods of `StateSpaceModel`; nothing has to be inherited. Shapes, batch dimensions first: θ (M, dθ), nested states x
(M, N, dx), one design ξ (dξ,), an observation y (dy,).

All randomness comes from an explicit generator. `seeded_generator(seed, stream)` gives each purpose its own stream, so that the
truth, the filter and the policy of one seed are independent; `reveal` spends the truth's randomness in a way that does not
depend on the design, so that two policies with the same seed meet the same epidemic.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributions import Distribution, Poisson
from torch.distributions.constraints import nonnegative_integer

from labkit.randomness import base_law, sample, seeded_generator

RATE_FLOOR = 1e-12  # of a Poisson mean, so that its logarithm exists
LOG_FLOOR = -1e12  # stands for log 0, and for the log-density of a state that is not finite


@runtime_checkable
class StateSpaceModel(Protocol):
    """A state-space model with unknown static parameters θ and a design ξ at each step.

    Attributes:
        param_names: one name per parameter, dθ of them.
        state_names: dx of them.
        obs_names: dy of them.
        design_names: dξ of them.
        state_dim, obs_dim, design_dim: dx, dy and dξ.

    Two more things are optional. `jitter_scale`, the constant c of the jitter variance c / M^{3/2}, in squared units of θ. And
    for an observation law of the exponential family, log g(y | x, ξ) = s(y)·η(x, ξ) − A(x, ξ) + b(y), the pair
    `natural(x, design) -> (η (..., dy), A (...))` and `statistic(y) -> (s (..., dy), b (...))`, both differentiable in the
    design: all densities of many observations at many states are then one matrix product.
    """

    param_names: tuple[str, ...]
    state_names: tuple[str, ...]
    obs_names: tuple[str, ...]
    design_names: tuple[str, ...]
    state_dim: int
    obs_dim: int
    design_dim: int

    def prior(self) -> Distribution:
        """p(θ), with event shape (dθ,) and independent coordinates; its support is the box that jitter stays in."""

    def initial(self, theta: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        """n draws of x_0 for each row of θ (M, dθ): (M, n, dx)."""

    def transition(
        self, x: torch.Tensor, theta: torch.Tensor, design: torch.Tensor | None, generator: torch.Generator
    ) -> torch.Tensor:
        """One draw of x_t for each x_{t-1} (M, N, dx) under θ (M, dθ): (M, N, dx).

        `design` (dξ,) may be None where states are predicted without a measurement. The random numbers it takes from the
        generator must not depend on θ: estimators compare two θ under common random numbers.
        """

    def observation(self, x: torch.Tensor, design: torch.Tensor) -> Distribution:
        """g(· | x, ξ) for states (..., dx): batch shape that of x without dx, event shape (dy,).

        `design` is (dξ,), or has leading dimensions that broadcast against those of x. The support may depend on the state. A
        law that torch validates must be possible at every finite state.
        """

    def sample_designs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """n designs (n, dξ) from the law of the random policy, which is also that of an optimiser's first guesses."""


_MEMBERS = (*StateSpaceModel.__annotations__, "prior", "initial", "transition", "observation", "sample_designs")


def truth_generator(seed: int) -> torch.Generator:
    """Generator of the simulated truth at one seed, for `reveal` and `simulate`."""
    return seeded_generator(seed, "truth")


def log_likelihood(model: StateSpaceModel, y: torch.Tensor, x: torch.Tensor, design: torch.Tensor) -> torch.Tensor:
    """log g(y | x, ξ) of one observation (dy,) at states (..., dx): (...), never NaN.

    It is −1e12 where the density is zero or not finite, and at states that are not finite, which the model is not asked about.

    Raises:
        ValueError: y lies outside a support that is the same for all states, or the law has the wrong shape.
    """
    if not x.sum().isfinite() and not (finite := x.isfinite().all(-1)).all():
        value = x.new_full(finite.shape, LOG_FLOOR)
        if finite.any():
            value[finite] = log_likelihood(model, y, x[finite], design)
        return value
    law = model.observation(x, design)
    if law.batch_shape != x.shape[:-1] or law.event_shape != (model.obs_dim,):
        raise ValueError(
            f"observation: {type(model).__name__}.observation has batch shape {tuple(law.batch_shape)}, event shape "
            f"{tuple(law.event_shape)} at states {tuple(x.shape)}; expected {tuple(x.shape[:-1])} and ({model.obs_dim},)"
        )
    base, supported = base_law(law), law.support.check(y)
    if not supported.dim() and not supported:
        allowed = "whole numbers >= 0" if base.support is nonnegative_integer else f"values in {base.support}"
        raise ValueError(f"y={y.tolist()}: expected {allowed}")
    y = y.to(x.dtype)
    if isinstance(base, Poisson):  # whose own log_prob evaluates log y! again at every state
        log_rate = base.rate.clamp(min=RATE_FLOOR).log()
        value = reduce(torch.add, (log_rate * y - base.rate).unbind(-1)) - torch.lgamma(y + 1).sum()
    else:
        value = log_density(law, y).to(x.dtype)
    return value.nan_to_num(LOG_FLOOR, LOG_FLOOR, LOG_FLOOR)


def log_density(law: Distribution, y: torch.Tensor) -> torch.Tensor:
    """`law.log_prob(y)`, but −1e12 outside the law's support, where torch raises an error for all of y."""
    supported = law.support.check(y)
    if supported.all():
        return law.log_prob(y)
    within = sample(law, seeded_generator(0, "within")).detach()
    inside = supported.reshape(*supported.shape, *[1] * len(law.event_shape))
    return law.log_prob(y.where(inside, within)).where(supported, LOG_FLOOR)


def component_first(values: torch.Tensor, dims: int) -> torch.Tensor:
    """(..., d) as a view (d, 1, …, 1, ...) with `dims` dimensions after the first, so that batches broadcast.

    Arithmetic over a last dimension of two or three is slow; computed component by component, and seen as (..., d) again by
    `movedim(0, -1)`, it runs at memory speed.
    """
    values = values.movedim(-1, 0)
    return values.reshape(len(values), *[1] * (dims + 1 - values.dim()), *values.shape[1:])


def transition(
    model: StateSpaceModel, x: torch.Tensor, theta: torch.Tensor, design: torch.Tensor | None, generator: torch.Generator
) -> torch.Tensor:
    """`model.transition`, with its result checked: (M, N, dx) in, (M, N, dx) of the same precision out."""
    moved = model.transition(x, theta, design, generator)
    if moved.shape != x.shape or moved.dtype != x.dtype:
        raise ValueError(
            f"transition: {type(model).__name__}.transition gave {moved.dtype} states of shape {tuple(moved.shape)}; "
            f"expected {x.dtype} and {tuple(x.shape)}"
        )
    return moved


def reveal(
    model: StateSpaceModel, theta: torch.Tensor, x: torch.Tensor, design: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the truth one step and measure it: x_t ~ f(· | x_{t-1}, θ, ξ), y_t ~ g(· | x_t, ξ).

    It takes two seeds from the generator, one for the state and one for the measurement. A counting law takes more or fewer
    random numbers for another design; this way the next state's noise stays the same.

    Args:
        theta: true parameters (dθ,).
        x: true state (dx,).
        design: (dξ,).

    Returns:
        State (dx,) and observation (dy,).
    """
    seeds = torch.randint(2**31, (2,), generator=generator).tolist()
    for_state, for_measurement = (torch.Generator().manual_seed(s) for s in seeds)
    x = transition(model, x[None, None], theta[None], design, for_state)[0, 0]
    return x, sample(model.observation(x, design), for_measurement)


def simulate(
    model: StateSpaceModel, theta: torch.Tensor, designs: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One run of the truth under given designs.

    Args:
        theta: (dθ,).
        designs: (T, dξ), for instance `model.sample_designs(T, generator)`.

    Returns:
        States (T + 1, dx), from x_0 on, and observations (T, dy).
    """
    designs = check_designs(model, designs)
    theta = check_vector(theta, "theta", len(model.param_names), "parameters").to(designs.dtype)
    states, observations = [model.initial(theta[None], 1, generator)[0, 0]], []
    for design in designs:
        x, y = reveal(model, theta, states[-1], design, generator)
        states.append(x)
        observations.append(y)
    return torch.stack(states), torch.stack(observations)


def check_model(model: StateSpaceModel) -> None:
    """Refuse, by name, what a model lacks or gets wrong: attributes, prior, and the shape of its first states."""
    if isinstance(model, type):
        raise ValueError(f"model: {model.__name__} is a class; expected an instance of it, such as {model.__name__}()")
    kind = type(model).__name__
    missing = [name for name in _MEMBERS if not hasattr(model, name)]
    if missing:
        raise ValueError(f"model: {kind} lacks {', '.join(missing)}; see labkit.filtering.StateSpaceModel")
    for names, dimension in (("state_names", "state_dim"), ("obs_names", "obs_dim"), ("design_names", "design_dim")):
        if len(getattr(model, names)) != getattr(model, dimension):
            raise ValueError(
                f"{names}: {kind} names {len(getattr(model, names))} of them, but {dimension}={getattr(model, dimension)}"
            )
    event = tuple(model.prior().event_shape)
    if event != (len(model.param_names),):
        raise ValueError(
            f"prior: {kind}.prior has event shape {event}; expected ({len(model.param_names)},), one per param_names"
        )


def check_design(model: StateSpaceModel, design: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One design as a tensor (dξ,) of the given dtype; a wrong length, a half-precision or a non-finite one is refused."""
    return check_vector(design, "design", model.design_dim, "/".join(model.design_names)).to(dtype)


def check_designs(model: StateSpaceModel, designs: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """K ≥ 1 designs as a tensor (K, dξ) of the given dtype, checked like `check_design`."""
    designs = _as_floating(designs, "designs")
    if designs.dim() != 2 or designs.shape[1] != model.design_dim or not len(designs):
        raise ValueError(
            f"designs of shape {tuple(designs.shape)}: expected (K, {model.design_dim}) with K >= 1, "
            f"one row of {'/'.join(model.design_names)} each"
        )
    if not designs.isfinite().all():
        raise ValueError(f"designs={designs.tolist()}: expected finite numbers")
    return designs.to(dtype)


def check_observation(model: StateSpaceModel, y: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One observation as a finite tensor (dy,) of the given dtype."""
    y = _as_floating(y, "y")
    if y.dim() and y.isnan().any():
        raise ValueError(f"y={y.tolist()} has NaN; a missing observation is step(design, None)")
    return check_vector(y, "y", model.obs_dim, "/".join(model.obs_names)).to(dtype)


def check_truth(model: StateSpaceModel, theta: Any) -> torch.Tensor:
    """True parameters as a tensor (dθ,), finite and inside the prior's support, without which no filter could find them."""
    theta = check_vector(theta, "theta", len(model.param_names), "/".join(model.param_names)).to(torch.float32)
    if not bool(model.prior().support.check(theta)):
        raise ValueError(f"theta={theta.tolist()}: the truth lies outside the prior's support {parameter_range(model)}")
    return theta


def parameter_range(model: StateSpaceModel) -> str:
    """The prior's box in words, e.g. "beta1 in [0.1, 1], gamma1 in [0.1, 1]"."""
    low, high = parameter_box(model.prior())
    sides = zip(model.param_names, low.tolist(), high.tolist(), strict=True)
    return ", ".join(f"{name} in [{a:.3g}, {b:.3g}]" for name, a, b in sides)


def parameter_box(prior: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bounds (dθ,) of a prior's support, infinite where it has none."""
    support = prior.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    bounds = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    low, high = (torch.as_tensor(b, dtype=torch.float64).expand(prior.event_shape) for b in bounds)
    return low, high


def steps(designs: torch.Tensor, ys: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (design (dξ,), observation (dy,)) of a run; refuses runs of unequal or no length."""
    if len(designs) != len(ys) or not len(designs):
        raise ValueError(f"ys has {len(ys)} rows and designs has {len(designs)}: expected the same T >= 1")
    return zip(designs, ys, strict=True)


def check_vector(value: Any, name: str, length: int, what: str) -> torch.Tensor:
    """`value` as a floating tensor (length,) of finite numbers; `name` and `what` are for the error."""
    value = _as_floating(value, name)
    if value.shape != (length,):
        raise ValueError(f"{name} of shape {tuple(value.shape)}: expected ({length},), that is {what}")
    if not value.isfinite().all():
        raise ValueError(f"{name}={value.tolist()}: expected finite numbers")
    return value


def check_numbers(name: str, value: Any, *shape: int | None, allowed: str = "a number") -> np.ndarray:
    """`value` as floats of a shape, None being any length ≥ 1; text and truth values are no numbers.

    Args:
        name, allowed: for the error.
    """
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal length, or a tensor that cannot be read
        numbers = np.empty(0, object)
    fits = len(numbers.shape) == len(shape) and all(
        length == wanted or (wanted is None and length) for length, wanted in zip(numbers.shape, shape, strict=True)
    )
    if numbers.dtype.kind not in "iuf" or not fits:
        raise ValueError(f"{name}={value!r}: expected {allowed}")
    return numbers.astype(float)


def check_scalars(model: object) -> None:
    """Refuse a dataclass's first attribute that is declared a `float` and is no number."""
    for item in fields(model):
        if item.type is float:
            check_numbers(item.name, getattr(model, item.name))


def check_fields(model: object, *checks: tuple[str, str, bool]) -> None:
    """Refuse a model's first bad attribute: triples of its name, what is allowed, and whether it is so."""
    for name, allowed, good in checks:
        if not good:
            raise ValueError(f"{name}={getattr(model, name)}: must be {allowed}")


def _as_floating(value: Any, name: str) -> torch.Tensor:
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={value!r}: expected numbers") from error
    if value.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name} is {value.dtype}: log-likelihoods need single precision, give {name}.float()")
    if value.is_complex():
        raise ValueError(f"{name} is {value.dtype}: expected real numbers")
    return value if value.is_floating_point() else value.to(torch.float32)

"""Reference posterior of a few static parameters: one bootstrap filter at each point of a grid.

    p(θ_g | y_{1:T}, ξ_{1:T}) ∝ p(θ_g) Ẑ(θ_g),      Ẑ(θ) = Π_t (1/N) Σ_n g(y_t | x_t^n, ξ_t),   E Ẑ(θ) = p(y_{1:T} | θ, ξ_{1:T})

It costs G T N and knows nothing online, but no approximation of the nested filter enters it: posteriors, information and
evidence reported for a design policy come from here. The grid stands at the midpoints of G_j equal cells of the prior's box.
Shapes: a grid of (G1, …, G_dθ) points, dθ ≤ 3. Source: ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from labkit.errors import check_size
from labkit.filtering.state_space import (
    LOG_FLOOR,
    StateSpaceModel,
    check_designs,
    check_model,
    check_observation,
    check_vector,
    log_likelihood,
    parameter_box,
    steps,
    transition,
)
from labkit.randomness import seeded_generator
from labkit.resampling import systematic

_CLOUD = 32_768  # states moved at once: more would leave the processor's cache


@dataclass(frozen=True, eq=False)
class GridPosterior:
    """A posterior on a grid of parameters.

    Attributes:
        axes: one tensor (G_j,) per parameter, float64.
        log_evidence: log p̂(y_{1:T} | θ), (G1, …, G_dθ), float64.
        probability: of each grid point, summing to one.
        mean: (dθ,).
        std: (dθ,).
        kl_to_prior: KL(posterior ‖ prior) on the grid, in nats; over runs with the truth drawn from the prior its mean is the
            mutual information.
        log_evidence_total: log p̂(y_{1:T}), the parameters integrated out.
    """

    axes: tuple[torch.Tensor, ...]
    log_evidence: torch.Tensor
    probability: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    kl_to_prior: float
    log_evidence_total: float


@torch.no_grad()
def grid_posterior(
    model: StateSpaceModel,
    designs: torch.Tensor,
    ys: torch.Tensor,
    grid: int | Sequence[torch.Tensor],
    num_states: int = 300,
    seed: int = 0,
) -> GridPosterior:
    """Posterior of θ by one bootstrap filter at every grid point.

    Args:
        model: a model with dθ ≤ 3 parameters.
        designs: (T, dξ).
        ys: (T, dy).
        grid: points per parameter, at the midpoints of equal cells of the prior's box; or one ascending axis per parameter.
        num_states: N of each filter.
        seed: a whole number ≥ 0.

    Raises:
        ValueError: dθ > 3, no observation, an observation no filter explains, or a box without bounds and no axes given.
    """
    check_model(model)
    check_size("num_states", num_states, 1)
    if len(model.param_names) > 3:
        raise ValueError(
            f"model has dθ={len(model.param_names)} parameters: a grid is possible for at most 3, use NestedParticleFilter"
        )
    prior = model.prior()
    axes = _axes(model, grid)
    points = torch.cartesian_prod(*axes).reshape(-1, len(axes))  # (G, dθ)
    generator = seeded_generator(seed, "grid")
    size = max(1, _CLOUD // num_states)
    log_evidence = torch.cat([log_evidences(model, part, designs, ys, num_states, generator) for part in points.split(size)])
    if float(log_evidence.max()) <= LOG_FLOOR / 2:
        raise ValueError("ys: no grid point explains the observations; widen the prior or raise num_states")
    high = parameter_box(prior)[1].float()
    below = torch.nextafter(high, torch.full_like(high, -math.inf))  # a uniform law's upper bound has density zero
    within = torch.minimum(points.float(), below)
    log_prior = prior.log_prob(within).double().log_softmax(0)
    total = torch.logsumexp(log_prior + log_evidence, 0)
    log_posterior = log_prior + log_evidence - total
    probability = log_posterior.exp()
    mean = probability @ points
    shape = [len(axis) for axis in axes]
    return GridPosterior(
        axes=axes,
        log_evidence=log_evidence.view(shape),
        probability=probability.view(shape),
        mean=mean,
        std=(probability @ (points - mean).square()).sqrt(),
        kl_to_prior=float((probability * (log_posterior - log_prior)).sum()),
        log_evidence_total=float(total),
    )


@torch.no_grad()
def evidence(
    model: StateSpaceModel, theta: torch.Tensor, designs: torch.Tensor, ys: torch.Tensor, num_states: int = 4000, seed: int = 0
) -> float:
    """log p̂(y_{1:T} | θ, ξ_{1:T}) of one parameter (dθ,), by one bootstrap filter of N states.

    Raises:
        ValueError: an argument of the wrong shape, or no state explains the observations.
    """
    check_model(model)
    check_size("num_states", num_states, 1)
    theta = check_vector(theta, "theta", len(model.param_names), "/".join(model.param_names))
    value = float(log_evidences(model, theta[None], designs, ys, num_states, seeded_generator(seed, "evidence")))
    if value <= LOG_FLOOR / 2:
        raise ValueError(f"theta={theta.tolist()}: no state explains the observations; is it outside the prior's support?")
    return value


@torch.no_grad()
def log_evidences(
    model: StateSpaceModel,
    theta: torch.Tensor,
    designs: torch.Tensor,
    ys: torch.Tensor,
    num_states: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """log p̂(y_{1:T} | θ_g, ξ_{1:T}), (G,) in float64, of parameters (G, dθ): G bootstrap filters side by side."""
    theta = theta.to(torch.float32)
    x = model.initial(theta, num_states, generator)
    rows = num_states * torch.arange(len(theta))[:, None]
    total = torch.zeros(len(theta), dtype=torch.float64)
    for design, y in steps(check_designs(model, designs), ys):
        y = check_observation(model, y)
        x = transition(model, x, theta, design, generator)
        log_g = log_likelihood(model, y, x, design)  # (G, N)
        peak = log_g.amax(1, keepdim=True)
        weights = (log_g - peak).exp_()
        total += weights.mean(1).double().log() + peak.squeeze(1)
        chosen = (systematic(weights, generator) + rows).flatten()
        x = x.flatten(0, 1).index_select(0, chosen).view_as(x)
    return total


def _axes(model: StateSpaceModel, grid: int | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One ascending axis per parameter, float64."""
    low, high = parameter_box(model.prior())
    if grid is None or isinstance(grid, str | Real):
        check_size("grid", grid, 2)
        if not (low.isfinite() & high.isfinite()).all():
            raise ValueError(f"grid={grid}: the prior's box has no bounds, so give one axis for each of {model.param_names}")
        cells = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
        return tuple(a + (b - a) * cells for a, b in zip(low, high, strict=True))
    axes = tuple(torch.as_tensor(axis, dtype=torch.float64) for axis in grid)
    if len(axes) != len(low) or any(axis.dim() != 1 or not len(axis) for axis in axes):
        raise ValueError(f"grid has axes of shapes {[tuple(a.shape) for a in axes]}: expected {len(low)} one-dimensional ones")
    for name, axis, a, b in zip(model.param_names, axes, low, high, strict=True):
        inside = (axis.float() >= a.float()) & (axis.float() <= b.float())  # the box is the prior's, in single precision
        if not inside.all() or not (axis.diff() > 0).all():
            raise ValueError(
                f"grid: the axis of {name} must ascend inside [{float(a):.3g}, {float(b):.3g}], got {axis.tolist()}"
            )
    return axes

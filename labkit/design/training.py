"""The networks that this lab keeps: how each is trained, on which designs, and how far it is from the exact posterior.

    train("location-posterior", out)             writes location-posterior.safetensors and its log, location-posterior.csv.gz
    amortisation_gap(network, theta, X, Y)       log p(θ | D) − log q_φ(θ | D), whose mean is E KL(p ‖ q_φ)

Uniform designs alone [paper] never look like the path of a planner. Training designs are therefore a mixture [ours]: a third
uniform, a third random walks, and a third what somebody does who knows roughly where θ is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.design.belief import ParticleBelief
from labkit.design.bounds import information_is
from labkit.design.ces import CES
from labkit.design.constraints import Constraint, StepLimit
from labkit.design.dad import fit_dad
from labkit.design.models import DesignModel, LocationFinding
from labkit.design.networks import save
from labkit.design.posterior import AmortizedPosterior, DesignSampler, simulate_histories
from labkit.parts import once, write_table

STEP_LIMITS = (0.05, 0.1, 0.2)
DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Recipe:
    """How one network is trained. Everything in its file follows from this.

    Attributes:
        kind: "posterior" or "policy".
        model: makes the experiment.
        horizon: T.
        steps: Adam steps.
        batch: histories or runs per step.
        constraint: makes what a policy is trained within.
        seed: of everything random.
    """

    kind: str
    model: Callable[[], DesignModel]
    horizon: int
    steps: int
    batch: int
    constraint: Callable[[DesignModel], Constraint] | None = None
    seed: int = 0


RECIPES = {
    "location-posterior": Recipe("posterior", LocationFinding, 30, 8000, 64),
    "location-policy": Recipe("policy", LocationFinding, 30, 1500, 64),
    "location-policy-0.1": Recipe("policy", LocationFinding, 30, 1000, 64, lambda m: StepLimit(0.1, bounds=m.bounds)),
    "ces-posterior": Recipe("posterior", CES, 10, 4000, 64),
}


def train(name: str, out: Path | None = None, *, fast: bool = False, progress: bool = True) -> Path:
    """Train a network and write `NAME.safetensors` and `NAME.csv.gz`, its loss every 100 steps. A finished one is kept.

    Args:
        name: one of `RECIPES`.
        out: folder; None is the package's own `data/`. An interrupted training goes on from a checkpoint in its `parts/`.
        fast: 20 small steps, to try the machinery.
        progress: show a bar.

    Returns:
        The path of the weights.

    Raises:
        ValueError: no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(f"name={name!r}: expected one of {', '.join(RECIPES)}")
    out, recipe = DATA if out is None else Path(out), RECIPES[name]
    model = recipe.model()
    options = {"steps": 20 if fast else recipe.steps, "seed": recipe.seed}
    options |= {"progress": progress, "checkpoint": out / "parts" / f"{name}.safetensors"}

    def make(path: Path) -> None:
        if recipe.kind == "posterior":
            network = AmortizedPosterior(model, seed=recipe.seed)
            table = network.fit(training_designs(model), horizon=recipe.horizon, batch=recipe.batch, **options)
            reference = torch.cat([exact_log_posterior(model, *runs) for runs in held_out(recipe, 2 if fast else 30)])
            table = table.assign(exact=-reference.mean().item())
        else:
            constraint = recipe.constraint(model) if recipe.constraint else None
            network, table = fit_dad(model, recipe.horizon, constraint, num_rollouts=recipe.batch, **options)
        write_table(table, out / f"{name}.csv.gz")
        save(network, path)

    return once(out / f"{name}.safetensors", make)


def held_out(recipe: Recipe, count: int, seed: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Histories like those of a posterior's training, which it has not seen: (θ, X, Y) for ten lengths up to the horizon.

    Args:
        count: histories of each length.
        seed: of the histories.
    """
    model, generator = recipe.model(), torch.Generator().manual_seed(-1 - seed)
    lengths = torch.linspace(1, recipe.horizon, min(10, recipe.horizon)).round().int().tolist()
    return [simulate_histories(model, training_designs(model), count, length, generator) for length in lengths]


def exact_log_posterior(
    model: DesignModel, theta: Tensor, X: Tensor, Y: Tensor, *, num_particles: int = 500, num_draws: int = 5000, seed: int = 0
) -> Tensor:
    """log p(θ | D) of the true θ, by importance sampling around a particle belief: float64 (B,).

    Args:
        theta: (B, p).
        X: (B, t, d), t ≥ 1.
        Y: (B, t).
        num_particles: of the belief.
        num_draws: of the importance sample.
        seed: of both.
    """
    belief = ParticleBelief.prior(model, len(theta), num_particles, torch.Generator().manual_seed(seed))
    for t in range(Y.shape[1]):
        belief = belief.update(X[:, t], Y[:, t])
    estimate = information_is(model, theta, X, Y, belief.sample(num_particles), num_draws, seed)
    return estimate.information + model.prior().log_prob(theta).double()


def amortisation_gap(posterior: AmortizedPosterior, theta: Tensor, X: Tensor, Y: Tensor, **options) -> Tensor:
    """log p(θ | D) − log q_φ(θ | D) of each history (B,), nats; its mean is E[KL(p(θ | D) ‖ q_φ)] ≥ 0.

    Args:
        theta: what the histories arose from (B, p).
        X: (B, t, d), t ≥ 1.
        Y: (B, t).
        **options: of `exact_log_posterior`.
    """
    with torch.no_grad():
        log_q = posterior.log_prob(theta[:, None], X, Y)[:, 0].double()
    return exact_log_posterior(posterior.model, theta, X, Y, **options) - log_q


def training_designs(model: DesignModel) -> DesignSampler:
    """The mixture of uniform designs, random walks and informed designs, one kind per history.

    Informed are, in a `LocationFinding`, steps of at most δ to a source and a search around it; in a `CES`, two baskets that
    the buyer likes about equally. Other experiments have walks in their place.
    """

    def sampler(theta: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        count = len(theta)
        uniform = model.sample_designs((count, steps), generator)
        walks = random_walks(model, count, steps, generator)
        informed = walks
        if isinstance(model, LocationFinding):
            informed = approaches(model, theta, steps, generator)
        elif isinstance(model, CES):
            informed = indifferent(model, theta, steps, generator)
        kind = torch.randint(3, (count, 1, 1), generator=generator)
        return torch.where(kind == 0, uniform, torch.where(kind == 1, walks, informed))

    return sampler


def random_walks(model: DesignModel, count: int, steps: int, generator: torch.Generator) -> Tensor:
    """Walks (B, t, d) from a random design, each step uniform within ±δ of the box's width, δ one of `STEP_LIMITS`."""
    low, high = model.bounds
    limit = _limits(model, count, generator)
    moves = limit[:, None] * (2 * torch.rand(count, steps, model.design_dim, generator=generator) - 1)
    path = [model.sample_designs((count,), generator)]
    for t in range(1, steps):
        path.append((path[-1] + moves[:, t]).clamp(low, high))
    return torch.stack(path, 1)


def approaches(model: LocationFinding, theta: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Walks (B, t, d) of steps ≤ δ toward points near one of the sources, a new point each step.

    Args:
        theta: sources (B, p).
    """
    low, high = model.bounds
    count, limit = len(theta), _limits(model, len(theta), generator)
    sources = theta.unflatten(1, (-1, model.design_dim))
    which = torch.randint(sources.shape[1], (count,), generator=generator)
    spread = 10 ** -(1 + 1.5 * torch.rand(count, 1, 1, generator=generator))  # 0.003 to 0.1
    noise = torch.randn(count, steps, model.design_dim, generator=generator)
    aims = sources[torch.arange(count), which][:, None] + spread * noise
    path = [model.sample_designs((count,), generator)]
    for t in range(1, steps):
        move = (aims[:, t] - path[-1]).clamp(-limit, limit)
        path.append((path[-1] + move).clamp(low, high))
    return torch.stack(path, 1)


def indifferent(model: CES, theta: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Uniform baskets (B, t, 6), the better one shrunk to the other's utility as a buyer near θ sees it.

    Args:
        theta: (B, 5).
    """
    x = model.sample_designs((len(theta), steps), generator)
    v = model.to_unconstrained(theta)[:, None]
    blur = 10 ** -(2 * torch.rand(len(theta), 1, 1, generator=generator))  # 0.01 to 1
    seen = model.from_unconstrained(v + blur * torch.randn(len(theta), steps, v.shape[-1], generator=generator))
    ratio = (model.utility(seen, x[..., :3]) / model.utility(seen, x[..., 3:]))[..., None]  # U is homogeneous of degree 1
    return torch.cat([x[..., :3] / ratio.clamp(min=1), x[..., 3:] * ratio.clamp(max=1)], -1)


def _limits(model: DesignModel, count: int, generator: torch.Generator) -> Tensor:
    """δ times the width of the box, or 1 where there is none (B, d)."""
    low, high = model.bounds
    width = torch.where((high - low).isfinite(), high - low, 1)
    return torch.tensor(STEP_LIMITS)[torch.randint(len(STEP_LIMITS), (count, 1), generator=generator)] * width

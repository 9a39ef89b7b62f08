"""How to choose the next design: the paper's gradient ascent on the expected information gain, its ablations, the baselines.

A policy is a callable that looks at the clouds of t − 1 and names the design of time t,

    policy(belief, state, remaining, generator) -> design (dξ,)

with `belief` a nested particle filter or its `Clouds`, `state` unused here (no constraints), `remaining` the number of
steps left, this one included, and `generator` its source of randomness.

`AdamPolicy` is the paper's: K_w steps of Adam from each of 20 random designs, all under one key, then 50 steps with fresh
samples from the best of them; 20 K_w + 50 estimates of ∇I per decision.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from labkit.design.online.eig import eig, summable
from labkit.design.online.gradient import ESTIMATORS, eig_grad
from labkit.errors import check_size
from labkit.filtering.grid import grid_posterior
from labkit.filtering.nested import Clouds, NestedParticleFilter
from labkit.filtering.state_space import StateSpaceModel, check_design, check_designs, simulate
from labkit.randomness import sample, seeded_generator

Policy = Callable[[Clouds, None, int, torch.Generator], Tensor]


def _key(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator))


def candidate_designs(model: StateSpaceModel, size: int) -> Tensor:
    """A fixed set of designs (size, dξ) to choose from: evenly spaced shares for an SIR model, else random designs."""
    check_size("size", size, 2)
    if hasattr(model, "design_of_share"):
        return model.design_of_share(torch.linspace(0, 1, size)).reshape(size, model.design_dim)
    designs = model.sample_designs(size, seeded_generator(0, "candidates"))
    return designs.sort(dim=0).values if model.design_dim == 1 else designs


def exact_method(belief: Clouds) -> str:
    """The estimator of `eig` with the least noise that the model's observations allow: "enumerate", "quadrature", "nested"."""
    model = belief.model
    design = check_design(model, model.sample_designs(1, seeded_generator(0, "candidates"))[0])
    return summable(model.observation(belief.x[0, :1], design), (1, model.obs_dim)) or "nested"


def enough(belief: Clouds) -> int:
    """Simulated observations for `eig`: its default of 200, or as many as there are states."""
    return min(200, belief.x[..., 0].numel())


@dataclass(frozen=True)
class RandomPolicy:
    """Designs from the model's law `sample_designs` [paper]: uniform shares, uniform angles."""

    name: str = "random"

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        return belief.model.sample_designs(1, generator)[0]


@dataclass(frozen=True)
class FixedPolicy:
    """The same design (dξ,) at every step [paper]: zeros there, which is half of the tests, or both sensors at angle 0."""

    design: Tensor
    name: str = "fixed"

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        return self.design


@dataclass(frozen=True)
class BestStaticPolicy:
    """The constant design that did best in simulated experiments [ours]; made by `best_static`.

    Attributes:
        design: (dξ,).
        search: one row per candidate and run: `candidate`, `run`, `kl` in nats, and the design's coordinates.
    """

    design: Tensor
    search: pd.DataFrame = field(repr=False)
    name: str = "best_static"

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        return self.design


def best_static(
    model: StateSpaceModel,
    designs: Tensor,
    *,
    steps: int,
    runs: int = 8,
    grid=13,
    num_states: int = 200,
    seed: int = 0,
    progress: bool = False,
) -> BestStaticPolicy:
    """Find the constant design with the largest mean KL(posterior || prior) over experiments simulated before the real one.

    The parameters come from the prior, so the mean estimates the information that the constant design yields. All designs
    meet the same parameters.

    Args:
        designs: candidates (K, dξ).
        steps: length T ≥ 1 of an experiment.
        runs: simulated experiments per candidate, ≥ 1.
        grid, num_states: of the reference posterior; see `grid_posterior` (at most three parameters).
        seed: of the experiments; the runs of `run_online` draw from other streams.
    """
    designs = check_designs(model, designs)
    check_size("steps", steps, 1)
    check_size("runs", runs, 1)
    rows = []
    for run in tqdm(range(runs), desc="best static design", unit="run", disable=not progress):
        theta = sample(model.prior(), seeded_generator(1000 * seed + run, "best static"))
        for candidate, design in enumerate(designs):
            played = design.expand(steps, -1)
            _, ys = simulate(model, theta, played, seeded_generator(1000 * seed + run, "best static truth"))
            kl = grid_posterior(model, played, ys, grid, num_states=num_states, seed=run).kl_to_prior
            coordinates = {f"design{j}": float(value) for j, value in enumerate(design)}
            rows.append({"candidate": candidate, "run": run, "kl": float(kl)} | coordinates)
    search = pd.DataFrame(rows)
    best = int(search.groupby("candidate")["kl"].mean().idxmax())
    return BestStaticPolicy(designs[best], search)


@dataclass(frozen=True)
class AimPolicy:
    """Point every sensor at the filtered mean position of the source [ours]: the domain's rule of thumb."""

    name: str = "aim"

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        sensors = getattr(belief.model, "sensors", None)
        if sensors is None:
            raise ValueError(
                f"model {type(belief.model).__name__}: AimPolicy needs a model with `sensors`, as MovingSource has"
            )
        east, north = (belief.x[..., :2].mean((0, 1)) - belief.x.new_tensor(sensors)).unbind(-1)
        return torch.atan2(north, east)


@dataclass(frozen=True)
class GridPolicy:
    """The candidate with the largest expected information gain, no gradient [ours].

    For count data the gain is enumerated, so that this is the maximiser at particle level up to the spacing.

    Attributes:
        size: number of candidates where `designs` is None; see `candidate_designs`.
        designs: candidates (K, dξ) of one's own.
        jackknife: maximise the debiased gain.
    """

    size: int = 41
    designs: Tensor | None = None
    jackknife: bool = False
    name: str = "grid"

    def __post_init__(self) -> None:
        check_size("size", self.size, 2)

    @torch.no_grad()
    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        designs = candidate_designs(belief.model, self.size) if self.designs is None else self.designs
        options = {"method": exact_method(belief), "num_obs": enough(belief), "jackknife": self.jackknife}
        return designs[eig(belief, designs, **options, seed=_key(generator)).value.argmax()]


@dataclass(frozen=True)
class AscentStep:
    """One step of Adam: the gain `value` in nats and its gradient `grad` (dξ,) at `design` (dξ,), and the design `after` it."""

    design: Tensor
    value: float
    grad: Tensor
    after: Tensor


def adam_ascent(
    belief: Clouds,
    design: Tensor,
    seeds: Iterable[int],
    *,
    lr: float = 0.03,
    clip: float = 0.5,
    bound: float | None = None,
    estimator: str = "score",
    num_obs: int = 200,
    jackknife: bool = False,
) -> Iterator[AscentStep]:
    """Climb the expected information gain by Adam (β = .9, .999; ε = 1e-6) on unconstrained designs [paper].

    Args:
        belief: clouds of t − 1.
        design: start (dξ,).
        seeds: the key of each step's samples; as many steps as keys.
        lr: α, 0.03 for the SIR model, 0.01 for the source.
        clip: largest move of a coordinate in one step.
        bound: largest |ξ|; None for angles.
        estimator: "score" or "pathwise", see `eig_grad`; or "exact", which sums over the observations of `exact_method`
            where it applies and leaves the noise of the states alone [ours].
        num_obs, jackknife: of `eig_grad`.

    Yields:
        One `AscentStep` per key.
    """
    _check_ascent(estimator)
    point = design.detach().clone()
    optimiser = torch.optim.Adam([point], lr=lr, betas=(0.9, 0.999), eps=1e-6, maximize=True)
    for seed in seeds:
        before = point.clone()
        if estimator == "exact":
            value, point.grad = _exact_gradient(belief, before, jackknife, seed)
        else:
            options = {"estimator": estimator, "num_obs": num_obs, "jackknife": jackknife, "seed": seed}
            gain, point.grad = eig_grad(belief, before, **options)
            value = float(gain.value)
        optimiser.step()
        point.copy_(before + (point - before).clamp(-clip, clip))
        if bound is not None:
            point.clamp_(-bound, bound)
        yield AscentStep(before, value, point.grad.clone(), point.clone())


def _check_ascent(estimator: str) -> None:
    if estimator not in (*ESTIMATORS, "exact"):
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(ESTIMATORS)}, exact")


def _exact_gradient(belief: Clouds, design: Tensor, jackknife: bool, seed: int) -> tuple[float, Tensor]:
    """Gain and gradient (dξ,) summed over all observations instead of a sample of them."""
    with torch.enable_grad():
        at = design.clone().requires_grad_()
        method = exact_method(belief)
        if method == "nested":
            raise ValueError("estimator='exact': expected counts or one or two Gaussian observations; take 'score'")
        gain = eig(belief, at[None], method=method, jackknife=jackknife, seed=seed).value[0]
        (grad,) = torch.autograd.grad(gain, at)
    return float(gain.detach()), grad.nan_to_num(0, 0, 0)


@dataclass(frozen=True)
class AdamPolicy:
    """The paper's optimiser: short climbs from random designs under one key, then a long one from the best [paper].

    Attributes:
        lr, clip, bound: of `adam_ascent`.
        warm_starts: random designs.
        warm_steps: K_w, steps from each, all with the same samples, so that the last gains compare.
        steps: of the main climb, each with fresh samples; its last iterate is played.
        num_obs: L, simulated observations per estimate.
        estimator: "score" [paper], "pathwise" or "exact" [ours]; see `adam_ascent`.
        jackknife: climb the debiased gain [ours].
    """

    lr: float = 0.03
    clip: float = 0.5
    bound: float | None = None
    warm_starts: int = 20
    warm_steps: int = 1
    steps: int = 50
    num_obs: int = 200
    estimator: str = "score"
    jackknife: bool = False
    name: str = "adam"

    def __post_init__(self) -> None:
        for field_name in ("warm_starts", "warm_steps", "steps", "num_obs"):
            check_size(field_name, getattr(self, field_name), 1)
        _check_ascent(self.estimator)

    @classmethod
    def sir(cls, **options) -> "AdamPolicy":
        """α = 0.03, 20 × 1 + 50 estimates [paper]; |logit| ≤ 6, because the best share can be 0 or 1 [ours]."""
        return cls(**{"lr": 0.03, "clip": 0.5, "bound": 6.0, "warm_steps": 1} | options)

    @classmethod
    def source(cls, **options) -> "AdamPolicy":
        """α = 0.01, 20 × 5 + 50 estimates [paper]."""
        return cls(**{"lr": 0.01, "clip": 0.1, "warm_steps": 5} | options)

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        shared = [_key(generator)] * self.warm_steps
        starts = belief.model.sample_designs(self.warm_starts, generator)
        warm = [self._climb(belief, start, shared) for start in starts]
        best = max(warm, key=lambda step: step.value)
        return self._climb(belief, best.after, [_key(generator) for _ in range(self.steps)]).after

    def _climb(self, belief: Clouds, design: Tensor, seeds: Iterable[int]) -> AscentStep:
        options = {name: getattr(self, name) for name in ("lr", "clip", "bound", "estimator", "num_obs", "jackknife")}
        *_, last = adam_ascent(belief, design, seeds, **options)
        return last


@dataclass(frozen=True)
class PlugInPolicy:
    """Ablation: another policy that is told each θ's state as if it were known, the mean of its cloud [ours]."""

    inner: Policy
    name: str = "plug_in"

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        x = belief.x.mean(1, keepdim=True).expand_as(belief.x)
        return self.inner(Clouds(belief.model, belief.theta, x.contiguous(), belief.jitter), state, remaining, generator)


@dataclass(frozen=True)
class OpenLoopPolicy:
    """Ablation: designs (T, dξ) that were all chosen before the experiment, from clouds that saw no data [ours]."""

    designs: Tensor
    name: str = "open_loop"

    @classmethod
    def plan(
        cls, model: StateSpaceModel, inner: Policy, *, steps: int, num_params: int = 300, num_states: int = 100, seed: int = 0
    ) -> "OpenLoopPolicy":
        """Let `inner` choose at every step on the prior predictive clouds."""
        twin = NestedParticleFilter(model, num_params, num_states, jitter=None, seed=seed)
        generator, designs = seeded_generator(seed, "plan"), []
        for remaining in range(steps, 0, -1):
            designs.append(inner(twin.snapshot(), None, remaining, generator))
            twin.step(designs[-1], None)
        return cls(torch.stack(designs))

    def __call__(self, belief: Clouds, state: None, remaining: int, generator: torch.Generator) -> Tensor:
        if not 1 <= remaining <= len(self.designs):
            raise ValueError(f"remaining={remaining}: this plan has {len(self.designs)} steps")
        return self.designs[len(self.designs) - remaining]

"""The online experiment: choose a design, observe, update the belief, again.

For t = 1 … T: ξ_t from the clouds of t − 1, x_t ~ f(·|x_{t−1}, θ*, ξ_t) and y_t ~ g(·|x_t, ξ_t) from the hidden truth, then one
step of the nested particle filter. The truth's process noise, its observation noise, the filter, the policy and the reported
gains each have their own stream of random numbers, so that all policies meet the same epidemic at the same seed.

The gain of the design that was played is estimated again with a fresh key, for every policy alike and by the estimator
with the least noise: a policy that picks its design by a noisy estimate must not be credited with that noise.
"""

import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from labkit.atomic import replacing
from labkit.design.online.eig import eig
from labkit.design.online.policies import Policy, candidate_designs, enough, exact_method
from labkit.errors import check_size
from labkit.filtering.nested import NestedParticleFilter
from labkit.filtering.state_space import StateSpaceModel, check_design, check_model, check_truth, reveal, truth_generator
from labkit.randomness import sample, seeded_generator

_CLOUD = 150  # particles of a cloud that a trace keeps
_LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class OnlineTrace:
    """One experiment of T steps, all arrays NumPy.

    Attributes:
        policy: name of the policy.
        seed: of the run.
        theta: true parameters (dθ,).
        designs, observations: (T, dξ), (T, dy).
        states: the hidden truth (T + 1, dx), from x_0.
        theta_cloud, position_cloud: at most 150 parameter and state particles after each step, (T + 1, M', dθ) and
            (T + 1, P, dx); row 0 is the prior.
        theta_mean, theta_std, theta_quantiles: filtered parameters (T, dθ), (T, dθ), (T, 3, dθ) at .05, .5, .95.
        state_mean, state_quantiles: filtered state (T, dx), (T, 3, dx).
        predicted: quantiles of y_t before it was seen, at the design played, (T, 3, dy).
        ess: effective number of parameter particles in [1, M], (T,).
        log_evidence: log p(y_{1:t} | ξ_{1:t}) in nats, (T,).
        eig, eig_jackknife: expected gain of the design played, nats, plain and debiased, (T,).
        curve_designs, curve: candidates (K, dξ) and their debiased gains (T, K); empty unless asked for.
        seconds: process time of each decision, (T,).
        num_nonfinite: estimates of the gain that were not finite and left out.
    """

    policy: str
    seed: int
    theta: np.ndarray
    designs: np.ndarray
    observations: np.ndarray
    states: np.ndarray
    theta_cloud: np.ndarray
    position_cloud: np.ndarray
    theta_mean: np.ndarray
    theta_std: np.ndarray
    theta_quantiles: np.ndarray
    state_mean: np.ndarray
    state_quantiles: np.ndarray
    predicted: np.ndarray
    ess: np.ndarray
    log_evidence: np.ndarray
    eig: np.ndarray
    eig_jackknife: np.ndarray
    curve_designs: np.ndarray
    curve: np.ndarray
    seconds: np.ndarray
    num_nonfinite: int

    def __len__(self) -> int:
        return len(self.designs)

    def __repr__(self) -> str:
        return f"OnlineTrace(policy={self.policy!r}, seed={self.seed}, T={len(self)}, tEIG={self.eig_jackknife.sum():.3g} nats)"

    def save(self, path: Path) -> None:
        """Write a compressed `.npz` at exactly this path, no pickle.

        Particles are in float16 where its range (±65504) holds them, else in float32 as quantiles and gains are.
        """
        arrays = {}
        for item in fields(self):
            value = np.asarray(getattr(self, item.name))
            if value.dtype == np.float64 and item.name != "log_evidence":
                value = value.astype(np.float32)
            if item.name.endswith("_cloud") and np.abs(value).max(initial=0) <= np.finfo(np.float16).max:
                value = value.astype(np.float16)
            arrays[item.name] = value
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "OnlineTrace":
        """Read what `save` wrote; particles come back as float32.

        Raises:
            ValueError: the file is no trace.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (zipfile.BadZipFile, ValueError) as error:
            raise ValueError(f"path={str(path)!r} is not a stored trace") from error
        missing = sorted({item.name for item in fields(cls)} - set(arrays))
        if missing:
            raise ValueError(f"path={str(path)!r} is not a stored trace: {', '.join(missing)} missing")
        for name, value in arrays.items():
            arrays[name] = value.astype(np.float32) if value.dtype == np.float16 else value
        scalars = {"policy": str(arrays["policy"]), "seed": int(arrays["seed"]), "num_nonfinite": int(arrays["num_nonfinite"])}
        return cls(**arrays | scalars)


def run_online(model: StateSpaceModel, policy: Policy, *, steps: int, progress: bool = False, **options) -> OnlineTrace:
    """Run one experiment to its end; the arguments are those of `online_steps`.

    Args:
        progress: show a bar.
    """
    for trace in tqdm(online_steps(model, policy, steps=steps, **options), total=steps, unit="step", disable=not progress):
        last = trace
    return last


@torch.no_grad()
def online_steps(
    model: StateSpaceModel,
    policy: Policy,
    *,
    steps: int,
    seed: int,
    theta: Tensor | str | None = None,
    num_params: int = 300,
    num_states: int = 100,
    filter_kwargs: dict | None = None,
    curve: int | None = None,
) -> Iterator[OnlineTrace]:
    """One experiment, step by step.

    Args:
        model: what is observed, and what the filter believes.
        policy: names the design of each step; see `labkit.design.online.policies`.
        steps: length T ≥ 1.
        seed: of everything random; policies compare at the same seed.
        theta: true parameters (dθ,); None is the model's own `truth`, "prior" draws them.
        num_params, num_states: M and N of the nested filter; N must be even, for the jackknife.
        filter_kwargs: its other arguments, such as `jitter`.
        curve: also store the gain of that many candidate designs, ≥ 2, at each step.

    Yields:
        The trace so far, after each step.

    Raises:
        ValueError: an argument out of range; the message names it.
    """
    check_size("steps", steps, 1)
    check_size("num_states", num_states, 2)
    if num_states % 2:
        raise ValueError(f"num_states={num_states}: the jackknife halves every cloud, expected an even number")
    if curve is not None:
        check_size("curve", curve, 2)
    if not callable(policy) or isinstance(policy, type):
        raise ValueError(f"policy={policy!r}: expected a policy, such as RandomPolicy()")
    check_model(model)
    theta = _truth(model, theta, seed)
    truth, choice, shown = truth_generator(seed), seeded_generator(seed, "policy"), seeded_generator(seed, "shown")
    fresh = seeded_generator(seed, "gain")
    x = model.initial(theta[None], 1, truth)[0, 0]
    belief = NestedParticleFilter(model, num_params, num_states, seed=seed, **filter_kwargs or {})
    curve_designs = candidate_designs(model, curve) if curve else torch.empty(0, model.design_dim)
    columns: dict[str, np.ndarray] = {}
    num_nonfinite = 0

    def note(row: int, length: int, values: dict[str, Tensor | float]) -> None:
        """Write one row of some columns; made for all steps at once, a column is never copied."""
        for name, value in values.items():
            value = np.asarray(value)
            if name not in columns:
                columns[name] = np.empty((length, *value.shape), value.dtype)
            columns[name][row] = value

    def look(row: int) -> None:
        particles = {"theta_cloud": _some(clouds.theta, shown), "position_cloud": _some(clouds.x.flatten(0, 1), shown)}
        note(row, steps + 1, {"states": x} | particles)

    clouds = belief.snapshot()
    look(0)
    for t in range(steps):
        start = time.process_time()
        design = policy(clouds, None, steps - t, choice)
        seconds = time.process_time() - start
        design = check_design(model, design)
        key = {
            "method": exact_method(clouds),
            "num_obs": enough(clouds),
            "seed": int(torch.randint(2**31, (), generator=fresh)),
        }
        plain, debiased = (eig(clouds, design[None], jackknife=jackknife, **key) for jackknife in (False, True))
        gains = eig(clouds, curve_designs, jackknife=True, **key).value if curve else torch.empty(0)
        ahead = sample(model.observation(belief.predict(design), design), shown)
        x, y = reveal(model, theta, x, design, truth)
        filtered = belief.step(design, y)
        clouds = belief.snapshot()
        look(t + 1)
        row = {
            "designs": design,
            "observations": y,
            "predicted": _quantiles(ahead.flatten(0, -2)),
            "theta_mean": filtered.theta_mean,
            "theta_std": filtered.theta_std,
            "theta_quantiles": filtered.theta_quantiles,
            "state_mean": filtered.state_mean,
            "state_quantiles": filtered.state_quantiles,
            "ess": filtered.ess,
            "log_evidence": filtered.log_evidence,
            "eig": plain.value[0],
            "eig_jackknife": debiased.value[0],
            "curve": gains,
            "seconds": seconds,
        }
        note(t, steps, row)
        num_nonfinite += plain.num_nonfinite + debiased.num_nonfinite
        yield OnlineTrace(
            policy=getattr(policy, "name", type(policy).__name__),
            seed=seed,
            theta=theta.numpy(),
            curve_designs=curve_designs.numpy(),
            num_nonfinite=num_nonfinite,
            **{name: column[: len(column) - steps + t + 1] for name, column in columns.items()},
        )


def _truth(model: StateSpaceModel, theta: Tensor | str | None, seed: int) -> Tensor:
    if isinstance(theta, str):
        if theta != "prior":
            raise ValueError(f"theta={theta!r}: expected None, 'prior' or a tensor ({len(model.param_names)},)")
        return sample(model.prior(), seeded_generator(seed, "true parameters")).to(torch.float32)
    if theta is None and not hasattr(model, "truth"):
        raise ValueError(f"theta=None: {type(model).__name__} has no `truth`; give a tensor, or 'prior' to draw it")
    return check_truth(model, model.truth if theta is None else theta)


def _some(cloud: Tensor, generator: torch.Generator) -> Tensor:
    """At most 150 particles of (P, d)."""
    return cloud[torch.randperm(len(cloud), generator=generator)[:_CLOUD]]


def _quantiles(values: Tensor) -> Tensor:
    """Quantiles .05, .5, .95 (3, d) of values (P, d)."""
    return torch.quantile(values, torch.tensor(_LEVELS, dtype=values.dtype), dim=0)

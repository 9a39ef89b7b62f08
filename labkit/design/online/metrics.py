"""What an experiment taught, measured without the estimator that chose its designs.

    KL(p(θ | y_{1:T}, ξ_{1:T}) || p(θ))                      from bootstrap filters at many θ, a grid or importance draws; its
                                                             mean over θ* ~ p(θ) is the information gained
    log p(y_{1:T} | θ*, ξ) − log p(y_{1:T} | ξ)              the gain realised by this one experiment; the same mean
    tEIG = Σ_t I_t(ξ_t)                                      the gain that the nested filter expected, plain and debiased

The plain tEIG counts the noise of finite clouds as information and can exceed what the data hold; the other two cannot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch.distributions import MultivariateNormal

from labkit.design.online.loop import OnlineTrace
from labkit.errors import check_size
from labkit.filtering.grid import evidence, grid_posterior, log_evidences
from labkit.filtering.nested import NestedParticleFilter
from labkit.filtering.state_space import StateSpaceModel, steps
from labkit.randomness import seeded_generator


def information(
    trace: OnlineTrace,
    model: StateSpaceModel,
    *,
    grid=21,
    grid_states: int = 300,
    truth_states: int = 4000,
    draws: int = 500,
    seed: int = 0,
) -> dict[str, float]:
    """Measure one experiment.

    Args:
        trace: the experiment.
        model: the model it ran on.
        grid: of the reference posterior for at most three parameters; see `grid_posterior`.
        draws: of the reference posterior for more parameters; see `importance_posterior`.
        grid_states: states per point of either.
        truth_states: particles of the filter that gives log p(y | θ*).
        seed: of all reference filters.

    Returns:
        `kl` (nats), `gain` (realised, nats), `teig` and `teig_jackknife` (nats), `rmse` of the filtered θ, `reference_rmse` of
        the reference posterior's mean, `state_rmse` (of a source: of its position), `ess` (mean, in [1, M]), `seconds` per
        decision, `num_nonfinite`; for a source also `position_l2` (mean distance of the filtered position) and `aim_cosine`
        (mean cosine of the angle between sensor and true bearing).
    """
    designs, ys, theta = (torch.as_tensor(a) for a in (trace.designs, trace.observations, trace.theta))
    if len(trace.theta) <= 3:
        posterior = grid_posterior(model, designs, ys, grid, num_states=grid_states, seed=seed)
    else:
        posterior = importance_posterior(model, designs, ys, draws=draws, num_states=grid_states, seed=seed)
    known = evidence(model, theta, designs, ys, num_states=truth_states, seed=seed)
    measured = {
        "kl": float(posterior.kl_to_prior),
        "gain": known - float(posterior.log_evidence_total),
        "teig": float(trace.eig.sum()),
        "teig_jackknife": float(trace.eig_jackknife.sum()),
        "rmse": _rms(trace.theta_mean[-1] - trace.theta),
        "reference_rmse": _rms(np.asarray(posterior.mean) - trace.theta),
        "state_rmse": _rms((trace.state_mean - trace.states[1:])[:, : 2 if _has_sensors(model) else None]),
        "ess": float(trace.ess.mean()),
        "seconds": float(trace.seconds.mean()),
        "num_nonfinite": trace.num_nonfinite,
    }
    if _has_sensors(model):
        position = trace.states[1:, :2]
        measured["position_l2"] = float(np.linalg.norm(trace.state_mean[:, :2] - position, axis=-1).mean())
        measured["aim_cosine"] = float(np.cos(trace.designs - bearing(position, np.asarray(model.sensors))).mean())
    return measured


def reference_noise(trace: OnlineTrace, model: StateSpaceModel, *, grid=21, grid_states: int = 300, seed: int = 0) -> dict:
    """How much a KL(posterior || prior) owes to the noise of its reference filters, of variance v in log p̂(y | θ).

    Two independent references give posteriors p, p' and ℓ = log p̂(y | θ) − log p̂(y), ℓ'. To first order in v

        Σ p ℓ   is too large by v/2, for p favours the θ that were lucky,      Σ p ℓ'   too small by v/2,

    so their difference is v, and their mean is free of it [ours].

    Args:
        grid, grid_states, seed: as for `information`; at most three parameters.

    Returns:
        `plain`, `corrected` and `noise` (v), nats, means over the two references; `spread`, the standard deviation between
        the two plain values.
    """
    designs, ys = torch.as_tensor(trace.designs), torch.as_tensor(trace.observations)
    options = {"grid": grid, "num_states": grid_states}
    pair = [grid_posterior(model, designs, ys, seed=2 * seed + k, **options) for k in (0, 1)]
    plain = np.array([one.kl_to_prior for one in pair])
    crossed = [
        float((one.probability * (other.log_evidence - other.log_evidence_total)).sum()) for one, other in (pair, pair[::-1])
    ]
    noise = float(plain.mean() - np.mean(crossed))
    mean = float(plain.mean())
    return {"plain": mean, "corrected": mean - noise / 2, "noise": noise, "spread": float(plain.std(ddof=1))}


@dataclass(frozen=True)
class ImportancePosterior:
    """A posterior as weighted draws.

    Attributes:
        theta: draws inside the prior's support (n, dθ).
        weights: (n,), summing to one.
        mean: (dθ,).
        kl_to_prior: KL(posterior || prior), nats.
        log_evidence_total: log p̂(y_{1:T}).
    """

    theta: torch.Tensor
    weights: torch.Tensor
    mean: torch.Tensor
    kl_to_prior: float
    log_evidence_total: float


@torch.no_grad()
def importance_posterior(
    model: StateSpaceModel,
    designs: torch.Tensor,
    ys: torch.Tensor,
    *,
    draws: int = 500,
    num_states: int = 1000,
    seed: int = 0,
) -> ImportancePosterior:
    """Reference posterior where there are too many parameters for a grid: adaptive importance sampling.

    Three rounds of draws from Gaussians. The first has twice the covariance of a nested filter's last cloud, each later one
    1.5 times that of all draws so far as they are weighted. A bootstrap filter at each draw gives p̂(y | θ), and its weight is
    p(θ) p̂(y | θ) over the density of the mixture of all rounds. The nested filter is only a first guess: its errors cancel.

    Source: adaptive multiple importance sampling (Cornuet et al. 2012), here with estimated likelihoods.

    Args:
        designs: (T, dξ).
        ys: (T, dy).
        draws: ≥ 20 of the last round, by bootstrap filters of `num_states` states; the two before make do with half of it.
        seed: of all of it.
    """
    check_size("draws", draws, 20)
    prior, generator = model.prior(), seeded_generator(seed, "importance")
    guide = NestedParticleFilter(model, draws, 50, seed=seed)
    for design, y in steps(designs, ys):
        guide.step(design, y)
    mean, covariance = guide.theta.double().mean(0), 2 * guide.theta.double().T.cov()
    theta, log_likelihood, rounds = torch.empty(0, len(mean)), torch.empty(0, dtype=torch.float64), []
    for part in (0.5, 0.5, 1):
        count, size = round(part * draws), round(part * num_states)
        rounds.append((count, MultivariateNormal(mean, covariance + 1e-6 * torch.eye(len(mean)))))
        z = torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
        drawn = (mean + z @ rounds[-1][1].scale_tril.T).float()
        drawn = drawn[prior.support.check(drawn)]
        chunks = [log_evidences(model, few, designs, ys, size, generator) for few in drawn.split(max(1, 32_768 // size))]
        theta, log_likelihood = torch.cat([theta, drawn]), torch.cat([log_likelihood, *chunks])
        total = sum(count for count, _ in rounds)
        mixture = [law.log_prob(theta.double()) + math.log(count / total) for count, law in rounds]
        log_weights = prior.log_prob(theta).double() + log_likelihood - torch.stack(mixture).logsumexp(0)
        weights = log_weights.softmax(0)
        mean = weights @ theta.double()
        covariance = 1.5 * torch.cov(theta.double().T, aweights=weights, correction=0)
    log_evidence = float(log_weights.logsumexp(0)) - math.log(total)
    return ImportancePosterior(theta, weights, mean, float(weights @ log_likelihood) - log_evidence, log_evidence)


def bearing(position: np.ndarray, sensors: np.ndarray) -> np.ndarray:
    """Angle (..., J) in (−π, π] from each sensor (J, 2) to positions (..., 2)."""
    east, north = np.moveaxis(position[..., None, :] - sensors, -1, 0)
    return np.arctan2(north, east)


def mean_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN for the error of a single value."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def paired(runs: pd.DataFrame, columns: Sequence[str], first: str, second: str) -> dict[str, float]:
    """Mean difference between two policies over the seeds that both have run, and its standard error.

    Args:
        runs: one row per `policy` and `seed` of one setting.
        columns: metrics to compare.
        first, second: policies; the difference is the first's value minus the second's.

    Returns:
        `seeds`, and for each column its mean difference and `<column>_stderr`.
    """
    a, b = (runs[runs["policy"] == policy].set_index("seed") for policy in (first, second))
    shared = a.index.intersection(b.index)
    if not len(shared):
        raise ValueError(f"first={first!r}, second={second!r}: no seed that both have run")
    row: dict[str, float] = {"seeds": len(shared)}
    for column in columns:
        row[column], row[f"{column}_stderr"] = mean_stderr(a.loc[shared, column] - b.loc[shared, column])
    return row


def _has_sensors(model: StateSpaceModel) -> bool:
    return hasattr(model, "sensors")


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))

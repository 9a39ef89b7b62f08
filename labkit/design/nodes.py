"""Beliefs at the nodes of a scenario tree: what a node's design is worth, and what is believed after a fantasised outcome.

All three kinds have the same two methods, batched over R decisions, S starts and n nodes of a level:

    gain(design (R, S, n, d))            -> expected information gain (R, S, n), nats
    observe(design, uniform, noise)      -> m outcomes per node (R, S, n·m), and the beliefs of these n·m children

with frozen base noise `uniform` and `noise` (R, 1, n, m), so that a tree's value is a deterministic function of its designs
[paper: sample-average approximation]. The children of node i are the nodes i·m … i·m + m − 1 of the next level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.design.constraints import State
from labkit.design.information import Posterior, ace_eig, node_eig
from labkit.design.models import DesignModel, LinearGaussian
from labkit.randomness import frozen

ALL = slice(None)


class Nodes(Protocol):
    """Beliefs of the nodes of one level."""

    def gain(self, design: Tensor) -> Tensor: ...

    def observe(self, design: Tensor, uniform: Tensor, noise: Tensor) -> tuple[Tensor, "Nodes"]: ...

    def particles(self) -> tuple[Tensor, Tensor]: ...

    def part(self, rows: slice = ALL, nodes: slice = ALL) -> "Nodes": ...


@dataclass(frozen=True)
class ParticleNodes:
    """Weighted particles; a fantasised outcome changes the weights alone [ours].

    The outcome is y = simulate(θ_i, x, ε): the index i follows the node's weights by inverse CDF at the frozen uniform and
    counts as constant, the new weights log w + log p(y | x, θ) are differentiable in the designs. Particles are sorted by the
    outcome they expect: so m branches cover the outcomes evenly, and y is continuous in x.

    Attributes:
        model: of the experiment.
        theta: particles (R, 1, 1, N, p) common to all nodes, or (R, S, n, N, p).
        log_weights: normalised (R, S, n, N).
        method: estimator of the gain: "quadrature", "pce", "nmc", "enumerate" or "atoms".
        options: further arguments of `node_eig`.
    """

    model: DesignModel
    theta: Tensor
    log_weights: Tensor
    method: str = "quadrature"
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def root(cls, belief: Any, num_particles: int, method: str, **options) -> "ParticleNodes":
        """The root of R trees: `num_particles` of each belief's particles."""
        particles = belief.subset(num_particles)
        return cls(belief.model, particles.theta[:, None, None], particles.log_weights[:, None, None], method, options)

    def gain(self, design: Tensor) -> Tensor:
        return node_eig(self.model, self.theta, self.log_weights, design, method=self.method, **self.options)

    def observe(self, design: Tensor, uniform: Tensor, noise: Tensor) -> tuple[Tensor, "ParticleNodes"]:
        index = draw_index(self.log_weights.detach(), uniform, self.order(design))  # (R, S, n, m)
        particles = self.theta.expand(*index.shape[:3], -1, -1)
        theta = particles.take_along_dim(index[..., None], 3)  # (R, S, n, m, p)
        y = self.model.simulate(theta, design[..., None, :], noise)
        fit = self.model.log_prob(y[..., None], self.theta[:, :, :, None], design[..., None, None, :])
        log_weights = (self.log_weights[..., None, :] + fit).log_softmax(-1)  # (R, S, n, m, N)
        particles = self.theta.repeat_interleave(y.shape[-1], 2) if self.theta.shape[2] > 1 else self.theta
        return y.flatten(2), replace(self, theta=particles, log_weights=log_weights.flatten(2, 3))

    def order(self, design: Tensor) -> Tensor | None:
        """Particles by the outcome that they expect (R, S, n, N), so that stratified uniforms give low and high outcomes."""
        if not hasattr(self.model, "mean"):
            return None
        with torch.no_grad():
            return self.model.mean(self.theta, design[..., None, :]).argsort(-1)

    def particles(self) -> tuple[Tensor, Tensor]:
        """Particles (R, S, n, N, p) and their normalised log weights (R, S, n, N)."""
        return self.theta.expand(*self.log_weights.shape, -1), self.log_weights

    def part(self, rows: slice = ALL, nodes: slice = ALL) -> "ParticleNodes":
        """Some of the decisions, or of a level's nodes."""
        theta = self.theta[rows] if self.theta.shape[2] == 1 else self.theta[rows, :, nodes]
        return replace(self, theta=theta, log_weights=self.log_weights[rows, :, nodes])


@dataclass(frozen=True)
class GaussianNodes:
    """Exact beliefs of a linear-Gaussian model: the gain is ½ log(1 + φᵀΣφ / σ²), an outcome is one Kalman step.

    Attributes:
        model: of the experiment.
        mean: (R, S, n, p).
        cov: (R, S, n, p, p).
    """

    model: LinearGaussian
    mean: Tensor
    cov: Tensor

    @classmethod
    def root(cls, belief: Any) -> "GaussianNodes":
        """The root of R trees: the exact posteriors of the beliefs' histories."""
        mean, cov = belief.model.posterior(belief.designs, belief.outcomes)
        return cls(belief.model, mean[:, None, None], cov[:, None, None])

    def gain(self, design: Tensor) -> Tensor:
        return self.model.expected_information(design, self.cov)

    def condition(self, design: Tensor, y: Tensor) -> "GaussianNodes":
        """Beliefs after outcomes y (R, S, n), one per node."""
        phi = self.model.features(design)
        column = (self.cov @ phi[..., None])[..., 0]
        gain = column / ((phi * column).sum(-1, keepdim=True) + self.model.noise_sd**2)
        surprise = y - (phi * self.mean).sum(-1)
        return replace(
            self, mean=self.mean + gain * surprise[..., None], cov=self.cov - gain[..., :, None] * column[..., None, :]
        )

    def observe(self, design: Tensor, uniform: Tensor, noise: Tensor) -> tuple[Tensor, "GaussianNodes"]:
        phi = self.model.features(design)
        spread = (phi * (self.cov @ phi[..., None])[..., 0]).sum(-1) + self.model.noise_sd**2
        y = ((phi * self.mean).sum(-1) + 0 * spread)[..., None] + spread.sqrt()[..., None] * noise
        branches = y.shape[-1]
        parents = replace(
            self,
            mean=self.mean.expand(*spread.shape, -1).repeat_interleave(branches, 2),
            cov=self.cov.expand(*spread.shape, -1, -1).repeat_interleave(branches, 2),
        )
        return y.flatten(2), parents.condition(design.repeat_interleave(branches, 2), y.flatten(2))

    def particles(self, count: int = 200) -> tuple[Tensor, Tensor]:
        """Draws (R, S, n, count, p) at the quantiles of a Sobol sequence, and their log weights (R, S, n, count)."""
        points = torch.quasirandom.SobolEngine(self.mean.shape[-1], scramble=True, seed=0).draw(count).clamp(1e-6, 1 - 1e-6)
        normal = torch.special.ndtri(points.to(self.mean))
        theta = self.mean[..., None, :] + normal @ torch.linalg.cholesky(self.cov).mT
        return theta, theta.new_full(theta.shape[:-1], -math.log(count))

    def part(self, rows: slice = ALL, nodes: slice = ALL) -> "GaussianNodes":
        """Some of the decisions, or of a level's nodes."""
        return replace(self, mean=self.mean[rows, :, nodes], cov=self.cov[rows, :, nodes])


@dataclass(frozen=True)
class AmortizedNodes:
    """Beliefs of a posterior network: each node is the history that leads to it [paper].

    Attributes:
        model: of the experiment.
        posterior: q(θ | D), differentiable in the history.
        designs, outcomes: histories (R, S, n, t, d), (R, S, n, t).
        num_obs: n_y, fantasised outcomes per gain.
        num_contrastive: L, draws of the posterior after each of them.
        seed: of the network's draws, which are the same at every call.
    """

    model: DesignModel
    posterior: Posterior
    designs: Tensor
    outcomes: Tensor
    num_obs: int = 20
    num_contrastive: int = 32
    seed: int = 0

    @classmethod
    def root(cls, belief: Any, posterior: Posterior, num_obs: int, num_contrastive: int, seed: int) -> "AmortizedNodes":
        """The root of R trees."""
        designs, outcomes = belief.designs[:, None, None], belief.outcomes[:, None, None].to(belief.designs.dtype)
        return cls(belief.model, posterior, designs, outcomes, num_obs, num_contrastive, seed)

    def gain(self, design: Tensor) -> Tensor:
        X, Y = self.history(design)
        options = {"num_obs": self.num_obs, "num_contrastive": self.num_contrastive, "seed": self.seed}
        return ace_eig(self.model, self.posterior, X, Y, design, **options)

    def observe(self, design: Tensor, uniform: Tensor, noise: Tensor) -> tuple[Tensor, "AmortizedNodes"]:
        branches = noise.shape[-1]
        X, Y = self.history(design)
        with frozen(self.seed):
            theta = self.posterior.sample(X.flatten(0, 2), Y.flatten(0, 2), branches)
        theta = theta.unflatten(0, design.shape[:-1])  # (R, S, n, m, p)
        y = self.model.simulate(theta, design[..., None, :], noise)  # (R, S, n, m)
        X = torch.cat([X, design[..., None, :]], -2).repeat_interleave(branches, 2)
        Y = torch.cat([Y.repeat_interleave(branches, 2), y.flatten(2)[..., None].to(Y.dtype)], -1)
        return y.flatten(2), replace(self, designs=X, outcomes=Y)

    def history(self, design: Tensor) -> tuple[Tensor, Tensor]:
        """Designs (R, S, n, t, d) and outcomes (R, S, n, t) of every node."""
        shape = design.shape[:-1]
        return self.designs.expand(*shape, -1, -1), self.outcomes.expand(*shape, -1)

    def particles(self, count: int = 200) -> tuple[Tensor, Tensor]:
        """Draws of the network (R, S, n, count, p) and their log weights (R, S, n, count)."""
        with frozen(self.seed):
            theta = self.posterior.sample(self.designs.flatten(0, 2), self.outcomes.flatten(0, 2), count)
        theta = theta.unflatten(0, self.outcomes.shape[:3])
        return theta, theta.new_full(theta.shape[:-1], -math.log(count))

    def part(self, rows: slice = ALL, nodes: slice = ALL) -> "AmortizedNodes":
        """Some of the decisions, or of a level's nodes."""
        return replace(self, designs=self.designs[rows, :, nodes], outcomes=self.outcomes[rows, :, nodes])


def draw_index(log_weights: Tensor, uniform: Tensor, order: Tensor | None = None) -> Tensor:
    """Indices (..., m) that follow weights (..., N), by inverse CDF at uniforms (..., m) in (0, 1).

    Args:
        log_weights: normalised.
        uniform: leading dimensions that broadcast against those of the weights.
        order: indices (..., N) of the particles in the order of the CDF; None takes them as they are.
    """
    weights = log_weights.exp()
    cdf = (weights if order is None else weights.expand(order.shape).take_along_dim(order, -1)).cumsum(-1)
    shape = torch.broadcast_shapes(cdf.shape[:-1], uniform.shape[:-1])
    points = uniform.expand(*shape, -1) * cdf[..., -1:]
    index = torch.searchsorted(cdf.expand(*shape, -1).contiguous(), points.contiguous()).clamp(max=cdf.shape[-1] - 1)
    return index if order is None else order.expand(*shape, -1).take_along_dim(index, -1)


@dataclass(frozen=True, eq=False)
class Level:
    """One level of R × S trees.

    Attributes:
        nodes: beliefs.
        state: of the constraint, before the design.
        after: of the constraint, after it.
        design: (R, S, n, d).
        outcome: that leads to the node (R, S, n); None at the root.
    """

    nodes: Nodes
    state: State
    after: State
    design: Tensor
    outcome: Tensor | None


def value_of(levels: Sequence[Level], discount: float = 1.0, leaf_value: float = 0.0) -> Tensor:
    """V̂ of unrolled trees (R, S): discounted gains, plus `leaf_value` nats per unit of budget left at the leaves."""
    value = sum(discount**depth * level.nodes.gain(level.design).mean(-1) for depth, level in enumerate(levels))
    left = levels[-1].after.budget if leaf_value and levels[-1].after.remaining else None
    return value if left is None else value + discount ** (len(levels) - 1) * leaf_value * left.mean(-1)

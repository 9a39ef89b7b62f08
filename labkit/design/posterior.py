"""A network that has learned Bayes' rule: q_φ(θ | D) for any history D = {(x_s, y_s)}, in one pass [paper; predecessor: ALINE].

    e_s = f_x(x_s) + f_y(y_s),   (h_1, …, h_q) = transformer(queries, e_1, …, e_t),   q_φ(v | D) = head(h_1, …, h_q)

The set transformer has no positional code, so that the order of the history cannot matter; there is one learned query token
per coordinate of v = `model.to_unconstrained(θ)`, and log q_φ(θ | D) includes the Jacobian of that map. Heads:

    product [paper]   q_φ(v | D) = Π_j Σ_k w_jk N(v_j; μ_jk, σ_jk²)
    joint [ours]      q_φ(v | D) = Σ_k w_k N(v; μ_k, L_k L_kᵀ), because a sensor of distance alone has a ring for a posterior
    nsf [ours]        a neural spline flow of zuko

It is trained on −log q_φ(θ | D) with θ from the prior and D of random length, which is minimal at the exact posterior.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from labkit.design.models import DesignModel, log_normal
from labkit.design.networks import Units, check_history, descend, describe, read, restore
from labkit.errors import check_size, require
from labkit.randomness import frozen

HEADS = ("product", "joint", "nsf")
SMALLEST_SCALE = 1e-4
LARGEST_SAMPLE = 8.0  # prior standard deviations; beyond, bounded parameters round to their bounds

DesignSampler = Callable[[Tensor, int, torch.Generator], Tensor]
"""Training designs (B, t, d) of histories with parameters θ (B, p): (θ, t, generator) -> designs."""


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """Mixture of K Gaussians in R^q.

    Attributes:
        log_weights: (..., K), normalised.
        mean: (..., K, q).
        scale_tril: Cholesky factors of the covariances (..., K, q, q).
    """

    log_weights: Tensor
    mean: Tensor
    scale_tril: Tensor

    def log_prob(self, v: Tensor) -> Tensor:
        """(..., n, q) -> (..., n)."""
        log_terms = self.log_weights[..., None, :]
        for _, _, log_density in self._conditionals(v):
            log_terms = log_terms + log_density
        return log_terms.logsumexp(-1)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws (..., n, q) that are differentiable in weights, means and covariances.

        Implicit reparameterisation (Figurnov et al. 2018): with F_j the c.d.f. of v_j given the coordinates before it,
        F_j(v_j; φ) is held constant, hence dv_j = −∂F_j / F_j′.
        """
        batch, dim = self.log_weights.shape[:-1], self.mean.shape[-1]
        uniform = torch.rand(*batch, num_samples, generator=generator, dtype=self.mean.dtype)
        normal = torch.randn(*batch, num_samples, dim, generator=generator, dtype=self.mean.dtype)
        with torch.no_grad():
            cdf = self.log_weights.exp().cumsum(-1)
            index = torch.searchsorted(cdf.contiguous(), uniform * cdf[..., -1:]).clamp(max=cdf.shape[-1] - 1)
            mean = self.mean.gather(-2, index[..., None].expand(*index.shape, dim))
            tril = self.scale_tril.gather(-3, index[..., None, None].expand(*index.shape, dim, dim))
            v = mean + (tril @ normal[..., None])[..., 0]
        return self._attach(v) if torch.is_grad_enabled() and self.mean.requires_grad else v

    def _attach(self, v: Tensor) -> Tensor:
        attached = list(v.unbind(-1))
        log_terms = self.log_weights[..., None, :]
        for j in range(v.shape[-1]):
            shift, scale = self._conditional(j, attached)  # (..., n, K)
            standard = (v[..., j, None] - shift) / scale
            weights = log_terms.softmax(-1)
            cdf = (weights * torch.special.ndtr(standard)).sum(-1)
            density = (weights * log_normal(v[..., j, None], shift, scale).exp()).sum(-1).detach()
            attached[j] = v[..., j] - (cdf - cdf.detach()) / density.clamp(min=1e-20)
            log_terms = log_terms + log_normal(attached[j][..., None], shift, scale)
        return torch.stack(attached, -1)

    def _conditional(self, j: int, v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (..., n, K) of v_j in each component, given v_i (..., n), i < j."""
        tril = self.scale_tril[..., None, :, :, :]
        shift, standard = self.mean[..., None, :, j], []
        for i in range(j):  # forward substitution: q is small, and triangular_solve is slow on small matrices
            before = self.mean[..., None, :, i] + sum(tril[..., i, l] * standard[l] for l in range(i))
            standard.append((v[i][..., None] - before) / tril[..., i, i])
            shift = shift + tril[..., j, i] * standard[i]
        return shift, tril[..., j, j]

    def _conditionals(self, v: Tensor):
        columns = v.unbind(-1)
        for j, column in enumerate(columns):
            shift, scale = self._conditional(j, columns)
            yield shift, scale, log_normal(column[..., None], shift, scale)


@dataclass(frozen=True, eq=False)
class Marginals:
    """Independent coordinates, each with a mixture of its own: `mixture` has batch shape (..., q) and dimension 1."""

    mixture: GaussianMixture

    def log_prob(self, v: Tensor) -> Tensor:
        """(..., n, q) -> (..., n)."""
        return self.mixture.log_prob(v.movedim(-1, -2)[..., None]).sum(-2)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws (..., n, q)."""
        return self.mixture.sample(num_samples, generator)[..., 0].movedim(-2, -1)


@dataclass(frozen=True, eq=False)
class Flow:
    """A conditional flow of zuko; `law` has batch shape (..., 1) and event shape (q,)."""

    law: torch.distributions.Distribution

    def log_prob(self, v: Tensor) -> Tensor:
        """(..., n, q) -> (..., n)."""
        return self.law.log_prob(v)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws (..., n, q), reparameterised."""
        base = torch.randn(*self.law.batch_shape[:-1], num_samples, *self.law.event_shape, generator=generator)
        return self.law.transform.inv(base)


class ProductHead(nn.Module):
    """Each query token (..., q, width) -> its coordinate's mixture."""

    def __init__(self, dim: int, width: int, hidden: int, components: int):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3 * components))

    def forward(self, tokens: Tensor) -> Marginals:
        logits, mean, raw = self.network(tokens).chunk(3, -1)
        scale = softplus(raw) + SMALLEST_SCALE
        return Marginals(GaussianMixture(logits.log_softmax(-1), mean[..., None], scale[..., None, None]))


class JointHead(nn.Module):
    """All query tokens together -> one mixture with full covariances."""

    def __init__(self, dim: int, width: int, hidden: int, components: int):
        super().__init__()
        self.dim, self.components = dim, components
        self.lower = torch.tril_indices(dim, dim, -1)
        size = components * (1 + 2 * dim + self.lower.shape[1])
        self.network = nn.Sequential(nn.Linear(dim * width, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self, tokens: Tensor) -> GaussianMixture:
        raw = self.network(tokens.flatten(-2)).unflatten(-1, (self.components, -1))
        logits, mean, diagonal, slope = raw.split([1, self.dim, self.dim, self.lower.shape[1]], -1)
        scale = softplus(diagonal) + SMALLEST_SCALE
        unit = torch.diag_embed(torch.ones_like(scale))
        unit[..., self.lower[0], self.lower[1]] = slope
        # row j is σ_j (slopes, 1): the slopes keep their meaning when the posterior contracts
        return GaussianMixture(logits[..., 0].log_softmax(-1), mean, scale[..., None] * unit)


class FlowHead(nn.Module):
    """All query tokens together -> the context of a neural spline flow (three autoregressive transforms)."""

    def __init__(self, dim: int, width: int, hidden: int, components: int):
        super().__init__()
        flows = require("zuko.flows", "bayes")
        self.flow = flows.NSF(dim, dim * width, bins=components, transforms=3, hidden_features=(hidden // 2,) * 2)

    def forward(self, tokens: Tensor) -> Flow:
        return Flow(self.flow(tokens.flatten(-2)[..., None, :]))


_HEAD = {"product": ProductHead, "joint": JointHead, "nsf": FlowHead}


class AmortizedPosterior(nn.Module):
    """q_φ(θ | D) for one experiment; histories are X (..., t, d), Y (..., t), t ≥ 0.

    Args:
        model: the experiment.
        heads: which heads to train together, on one trunk; the last one is used unless `using` chooses another.
        width: of a token.
        layers: of the transformer.
        attention_heads: per layer.
        hidden: units between two linear layers.
        components: of each mixture (bins of the spline flow).
        seed: of the initial weights.

    Raises:
        ValueError: an unknown head, or a size that is out of range.
    """

    def __init__(
        self,
        model: DesignModel,
        heads: Sequence[str] = ("product", "joint"),
        *,
        width: int = 32,
        layers: int = 3,
        attention_heads: int = 4,
        hidden: int = 128,
        components: int = 10,
        seed: int = 0,
    ):
        super().__init__()
        if not heads or set(heads) - set(HEADS):
            raise ValueError(f"heads={tuple(heads)}: expected some of {HEADS}")
        named = {"width": width, "layers": layers, "attention_heads": attention_heads}
        for name, size in (named | {"hidden": hidden, "components": components}).items():
            check_size(name, size, 1)
        check_size("seed", seed, 0)
        if width % attention_heads:
            raise ValueError(f"width={width}: expected a multiple of attention_heads={attention_heads}")
        self.model, self.head = model, heads[-1]
        sizes = {"heads": list(heads), "width": width, "layers": layers, "attention_heads": attention_heads}
        sizes |= {"hidden": hidden, "components": components}
        self.config = {"kind": "posterior", "model": describe(model), "sizes": sizes}
        self.units = Units(model)
        dim = len(self.units.theta_scale)
        with frozen(seed):
            self.embed_design = _perceptron(model.design_dim, hidden, width)
            self.embed_outcome = _perceptron(self.units.outcome_features, hidden, width)
            self.queries = nn.Parameter(torch.randn(dim, width))
            layer = nn.TransformerEncoderLayer(width, attention_heads, hidden, dropout=0.0, batch_first=True)
            self.trunk = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.heads = nn.ModuleDict({name: _HEAD[name](dim, width, hidden, components) for name in heads})

    def using(self, head: str) -> "AmortizedPosterior":
        """The same network, read through another of its heads."""
        if head not in self.heads:
            raise ValueError(f"head={head!r}: this network has {', '.join(self.heads)}")
        other = copy.copy(self)
        other.head = head
        return other

    def tokens(self, X: Tensor, Y: Tensor) -> Tensor:
        """The query tokens after the transformer (..., q, width)."""
        check_history(self.model.design_dim, X, Y)
        batch, length = Y.shape[:-1], Y.shape[-1]
        context = self.embed_design(self.units.design(X)) + self.embed_outcome(self.units.outcome(Y))
        context = context.reshape(batch.numel(), length, context.shape[-1])
        queries = self.queries.expand(len(context), -1, -1)
        encoded = self.trunk(torch.cat([queries, context], 1))
        return encoded[:, : len(self.queries)].reshape(*batch, *self.queries.shape)

    def log_prob(self, theta: Tensor, X: Tensor, Y: Tensor) -> Tensor:
        """log q_φ(θ | D) in nats.

        Args:
            theta: (..., n, p).
            X, Y: histories (..., t, d), (..., t).

        Returns:
            (..., n).
        """
        v, jacobian = self._standardise(theta)
        return self.heads[self.head](self.tokens(X, Y)).log_prob(v) + jacobian

    def sample(self, X: Tensor, Y: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws θ (..., n, p) of q_φ(θ | D), differentiable in X and Y."""
        check_size("num_samples", num_samples, 1)
        v = self.heads[self.head](self.tokens(X, Y)).sample(num_samples, generator)
        v = v.clamp(-LARGEST_SAMPLE, LARGEST_SAMPLE)
        return self.model.from_unconstrained(self.units.theta_shift + self.units.theta_scale * v)

    def fit(
        self,
        design_sampler: DesignSampler | None = None,
        *,
        horizon: int,
        steps: int = 8000,
        batch: int = 64,
        lr: float = 1e-3,
        seed: int = 0,
        checkpoint: Path | None = None,
        progress: bool = False,
    ) -> pd.DataFrame:
        """Train all heads on −log q_φ(θ | D), D of a length that is uniform on 1 … `horizon` (one length per minibatch).

        Args:
            design_sampler: training designs; None draws them uniformly [paper]. See `labkit.design.training`.
            horizon: longest history.
            steps: Adam steps.
            batch: histories per step.
            lr: highest learning rate (1e-4 in the paper, with ten times the steps).
            seed: of everything random.
            checkpoint: file that an interrupted training goes on from.
            progress: show a bar.

        Returns:
            Table with `step` and, per head, the mean loss in nats over the 100 steps before.
        """
        check_size("horizon", horizon, 1)
        check_size("batch", batch, 1)
        design_sampler = design_sampler or self._uniform

        def losses(generator: torch.Generator) -> dict[str, Tensor]:
            length = int(torch.randint(1, horizon + 1, (), generator=generator))
            theta, X, Y = simulate_histories(self.model, design_sampler, batch, length, generator)
            v, jacobian = self._standardise(theta[:, None])
            tokens = self.tokens(X, Y)
            return {name: -(head(tokens).log_prob(v) + jacobian).mean() for name, head in self.heads.items()}

        table = descend(
            self.train(), losses, steps=steps, lr=lr, seed=seed, checkpoint=checkpoint, progress=progress, name="posterior"
        )
        self.eval()
        return table

    def _standardise(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates of unit scale (..., n, q), and the log of |dv/dθ| (..., n)."""
        v = self.model.to_unconstrained(theta)
        jacobian = self.model.prior().log_prob(theta) - self.model.log_prior_unconstrained(v)
        return (v - self.units.theta_shift) / self.units.theta_scale, jacobian - self.units.theta_scale.log().sum()

    def _uniform(self, theta: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        return self.model.sample_designs((len(theta), steps), generator)


def simulate_histories(
    model: DesignModel, design_sampler: DesignSampler, count: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters from the prior (B, p) with histories X (B, t, d), Y (B, t) of sampled designs."""
    theta = model.sample_prior((count,), generator)
    X = design_sampler(theta, length, generator)
    Y = model.simulate(theta[:, None], X, generator=generator)
    return theta, X, Y


def load_posterior(path: Path, model: DesignModel) -> AmortizedPosterior:
    """Read an `AmortizedPosterior` that `labkit.design.networks.save` wrote, without gradients.

    Raises:
        ValueError: the file is for another experiment or another kind of network; the differing entries are named.
    """
    config, tensors = read(path, "posterior", model)
    network = AmortizedPosterior(model, **config["sizes"])
    restore(network, tensors, path)
    return network


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

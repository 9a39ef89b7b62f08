"""Which of two baskets of goods does a buyer prefer, and by how much: constant elasticity of substitution."""

import math

import torch
from torch import Tensor
from torch.distributions import Dirichlet, Distribution, Normal, Uniform

from labkit.design.models import DesignModel, log_normal
from labkit.design.priors import Joint

CENSOR = math.log(2**22 - 1)  # sigmoid(CENSOR) = 1 − 2⁻²²
TAU = 0.005
SMALLEST_AMOUNT = 1e-3


class CES(DesignModel):
    """A buyer with utility U(z) = (Σ_i α_i z_i^ρ)^{1/ρ} marks on a scale how much better z is than z′ [paper, predecessor]

        η ~ N(u (U(z) − U(z′)), u² τ² (1 + ‖z − z′‖)²),   τ = 0.005

    A design is x = (z, z′) ∈ [0, 100]⁶. The buyer's mark is clip(sigmoid η, ε, 1 − ε), ε = 2⁻²². The outcome here is
    y = clip(η, −E, E) with E = logit(1 − ε) = 15.249, a bijection of the mark [ours]: a float32 mark loses η beyond |η| ≈ 8.
    Its law has a density on (−E, E) and an atom at −E and at E.

    θ = (ρ, α_1, α_2, α_3, log u): ρ = 0.01 + 0.99 Beta(1, 1), α ~ Dirichlet(1, 1, 1), log u ~ N(1, 3²). Its coordinates
    v = (logit((ρ − 0.01) / 0.99), log α_1/α_3, log α_2/α_3, log u) are free.

    Args:
        variant: "standard", or "published_code": the likelihood of the authors' code, which squashes once more,
            ρ → 0.01 + 0.98 sigmoid(ρ), α → softmax(α), and clamps log u to ±10 and amounts to [0.01, 100] [code].
    """

    limit = CENSOR

    def __init__(self, variant: str = "standard"):
        if variant not in ("standard", "published_code"):
            raise ValueError(f'variant={variant!r}: expected "standard" or "published_code"')
        self.variant = variant
        self.theta_dim, self.design_dim = 5, 6
        self.design_names = tuple(f"{basket}{i}" for basket in ("z", "z′") for i in (1, 2, 3))
        self.bounds = torch.tensor([[0.0], [100.0]]).expand(2, 6).clone()

    def prior(self) -> Distribution:
        """p(ρ) p(α) p(log u)."""
        return Joint([Uniform(torch.tensor(0.01), 1.0), Dirichlet(torch.ones(3)), Normal(torch.tensor(1.0), 3.0)])

    def utility(self, theta: Tensor, basket: Tensor) -> Tensor:
        """U(z) of baskets (..., 3): (...)."""
        rho, alpha, _ = self._preferences(theta)
        if self.variant == "published_code":
            basket = basket.clamp(0.01, 100.0)
        logs = basket.clamp(min=SMALLEST_AMOUNT).log()
        # relative to the geometric mean e^M, which is the limit ρ → 0: no overflow, no cancellation; and good by good, because
        # sums over a last dimension of three are slow
        goods = list(zip(alpha.unbind(-1), logs.unbind(-1), strict=True))
        middle = sum(share * log for share, log in goods)
        excess = sum(share * torch.expm1(rho * (log - middle)) for share, log in goods)
        return (middle + torch.log1p(excess) / rho).exp()

    def mean(self, theta: Tensor, design: Tensor) -> Tensor:
        """E[η | θ, x] = u (U(z) − U(z′)), before the clip."""
        self._check(theta, design)
        scale = self._preferences(theta)[2].exp()
        return scale * (self.utility(theta, design[..., :3]) - self.utility(theta, design[..., 3:]))

    def scale(self, theta: Tensor, design: Tensor) -> Tensor:
        """Standard deviation of η, u τ (1 + ‖z − z′‖)."""
        self._check(theta, design)
        distance = torch.linalg.vector_norm(design[..., :3] - design[..., 3:], dim=-1)
        return self._preferences(theta)[2].exp() * TAU * (1 + distance)

    def simulate(
        self, theta: Tensor, design: Tensor, noise: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """clip(η, −E, E)."""
        mean = self.mean(theta, design)
        noise = self.noise(mean.shape, generator, mean.dtype) if noise is None else noise
        return (mean + self.scale(theta, design) * noise).clamp(-CENSOR, CENSOR)

    def log_prob(self, y: Tensor, theta: Tensor, design: Tensor) -> Tensor:
        """Log-density of η where |y| < E, log-probability of the atom where |y| = E."""
        return censored_log_prob(y, self.mean(theta, design), self.scale(theta, design))

    def to_unconstrained(self, theta: Tensor) -> Tensor:
        """v (..., 4)."""
        rho, log_alpha = (theta[..., :1] - 0.01) / 0.99, theta[..., 1:4].log()
        return torch.cat([torch.logit(rho), log_alpha[..., :2] - log_alpha[..., 2:], theta[..., 4:]], -1)

    def from_unconstrained(self, v: Tensor) -> Tensor:
        """θ (..., 5)."""
        alpha = torch.softmax(torch.cat([v[..., 1:3], torch.zeros_like(v[..., :1])], -1), -1)
        return torch.cat([0.01 + 0.99 * torch.sigmoid(v[..., :1]), alpha, v[..., 3:]], -1)

    def log_prior_unconstrained(self, v: Tensor) -> Tensor:
        """A logistic law, 2 α_1 α_2 α_3 and a normal law: (..., 4) -> (...)."""
        logsigmoid = torch.nn.functional.logsigmoid
        logits = torch.cat([v[..., 1:3], torch.zeros_like(v[..., :1])], -1)
        alpha = torch.log_softmax(logits, -1).sum(-1) + math.log(2)
        log_u = log_normal(v[..., 3], v.new_tensor(1.0), v.new_tensor(3.0))
        return logsigmoid(v[..., 0]) + logsigmoid(-v[..., 0]) + alpha + log_u

    def _preferences(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ρ (...), α (..., 3) and log u (...) as the likelihood uses them."""
        rho, alpha, log_u = theta[..., 0], theta[..., 1:4], theta[..., 4]
        if self.variant == "published_code":
            return 0.01 + 0.98 * torch.sigmoid(rho), torch.softmax(alpha, -1), log_u.clamp(-10, 10)
        return rho, alpha, log_u


def censored_log_prob(y: Tensor, mean: Tensor, scale: Tensor, limit: float = CENSOR) -> Tensor:
    """Log-law of clip(N(mean, scale²), −limit, limit): a density inside, the log-probability of an atom at either end."""
    inside, density = y.abs() < limit, log_normal(y, mean, scale)
    if inside.all():
        return density
    return torch.where(inside, density, _log_ndtr((y.clamp(-limit, limit) / limit * mean - limit) / scale))


def _log_ndtr(z: Tensor) -> Tensor:
    """log Φ(z). `torch.special.log_ndtr` has wrong gradients far below 0 in single precision, and NaN from z ≈ −1e20 on."""
    low = z.clamp(max=-1)
    tail = (torch.special.erfcx(-low / math.sqrt(2)) / 2).log() - low.square() / 2
    return torch.where(z < -1, tail, torch.special.log_ndtr(z.clamp(min=-1)))

"""The linear-Gaussian state-space model: one unknown drift, one state, one gain to choose. Everything has a closed form.

    x_t = a x_{t-1} + θ + q w_t,    y_t = ξ_t x_t + r v_t,    θ ~ N(0, s0²),   x_0 ~ N(0, sd0²),   w, v ~ N(0, 1)

(x, θ) together are a linear-Gaussian state without unknowns, so a Kalman filter gives the exact posterior of both
(`LinearGaussianSSM.augmented`), and one observation's information about θ is `closed_form_eig`. Shapes: θ (M, 1), x (M, N, 1),
ξ (1,), y (1,). Source: ours, as the ground truth of the estimators.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributions import Independent, Normal

from labkit.filtering.state_space import check_fields, check_scalars


@dataclass(frozen=True)
class LinearGaussianSSM:
    """The linear-Gaussian model, as a `StateSpaceModel`. Its prior is unbounded, so jitter does not truncate.

    Attributes:
        a: how much of the state stays.
        q: standard deviation of the process noise, ≥ 0.
        r: standard deviation of the measurement noise, > 0.
        prior_sd: s0 of θ, > 0.
        initial_sd: of x_0, ≥ 0.
    """

    a: float = 0.9
    q: float = 0.3
    r: float = 0.5
    prior_sd: float = 0.5
    initial_sd: float = 0.2

    param_names: ClassVar = ("theta",)
    state_names: ClassVar = ("x",)
    obs_names: ClassVar = ("y",)
    design_names: ClassVar = ("gain",)
    state_dim: ClassVar = 1
    obs_dim: ClassVar = 1
    design_dim: ClassVar = 1
    jitter_scale: ClassVar = 0.15

    def __post_init__(self) -> None:
        check_scalars(self)
        check_fields(
            self,
            ("a", "finite", math.isfinite(self.a)),
            ("q", ">= 0", 0 <= self.q < math.inf),
            ("r", "positive", 0 < self.r < math.inf),
            ("prior_sd", "positive", 0 < self.prior_sd < math.inf),
            ("initial_sd", ">= 0", 0 <= self.initial_sd < math.inf),
        )

    @property
    def truth(self) -> torch.Tensor:
        """A plausible true θ (1,): one prior standard deviation."""
        return torch.tensor([self.prior_sd], dtype=torch.float32)

    def prior(self) -> Independent:
        """N(0, s0²), event shape (1,)."""
        return Independent(Normal(torch.zeros(1), self.prior_sd), 1)

    def initial(self, theta: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        """(M, n, 1), about 0."""
        return self.initial_sd * torch.randn((len(theta), n, 1), generator=generator, dtype=theta.dtype)

    def transition(
        self, x: torch.Tensor, theta: torch.Tensor, design: torch.Tensor | None, generator: torch.Generator
    ) -> torch.Tensor:
        """One step of (M, N, 1) under θ (M, 1)."""
        return self.a * x + theta[:, None] + self.q * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def observation(self, x: torch.Tensor, design: torch.Tensor) -> Independent:
        """N(ξ x, r²)."""
        return Independent(Normal(design * x, self.r, validate_args=False), 1, validate_args=False)

    def natural(self, x: torch.Tensor, design: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """η = ξ x (..., 1) and A = η² / 2r² (...)."""
        mean = design * x
        return mean, mean.square().sum(-1) / (2 * self.r**2)

    def statistic(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s = y / r² (..., 1) and b = −y² / 2r² − ½ log 2πr² (...)."""
        return y / self.r**2, -y.square().sum(-1) / (2 * self.r**2) - math.log(2 * math.pi * self.r**2) / 2

    def sample_designs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Gains (n, 1), uniform on [0.5, 2]."""
        return 0.5 + 1.5 * torch.rand((n, 1), generator=generator)

    def augmented(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model of z = (x, θ) for a Kalman filter: z_t = F z_{t-1} + N(0, Q), z_0 ~ N(m, P), y_t = (ξ_t, 0) z_t + N(0, r²).

        Returns:
            F (2, 2), Q (2, 2), m (2,) and P (2, 2), float64.
        """
        transition = torch.tensor([[self.a, 1.0], [0.0, 1.0]], dtype=torch.float64)
        noise = torch.tensor([[self.q**2, 0.0], [0.0, 0.0]], dtype=torch.float64)
        start = torch.tensor([[self.initial_sd**2, 0.0], [0.0, self.prior_sd**2]], dtype=torch.float64)
        return transition, noise, torch.zeros(2, dtype=torch.float64), start

    def closed_form_eig(self, design: torch.Tensor, *, c: float, P: float, s: float) -> torch.Tensor:
        """Exact expected information, in nats, of one observation about θ; differentiable in the design.

        With x_{t-1} | θ ~ N(μ + c θ, P) and θ ~ N(m, s²), whatever μ and m,

            I(ξ) = ½ log(1 + ξ² (a c + 1)² s² / (ξ² (a² P + q²) + r²))

        Args:
            design: (..., 1).
            c: slope of the state's mean in θ.
            P: variance of the state given θ.
            s: standard deviation of θ.

        Returns:
            (...).
        """
        squared = design[..., 0].square()
        signal = squared * (self.a * c + 1) ** 2 * s**2
        return torch.log1p(signal / (squared * (self.a**2 * P + self.q**2) + self.r**2)) / 2

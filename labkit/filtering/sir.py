"""Two groups, one epidemic: a stochastic SIR model observed through tests that must be shared between the groups.

State x = (S1, I1, S2, I2), the susceptible and infected of each group; R_g = N_g − S_g − I_g. Infection of group g feels the
mixed prevalence e = C (I1/N1, I2/N2). Rates, per unit time, and one Euler–Maruyama step of the chemical Langevin equation:

    a = (β1 S1 e1, γ1 I1, β2 S2 e2, γ2 I2)
    x_t = Π[ x + S (a Δt + √(a Δt) ⊙ z) + √(1e-3 Δt + 1e-6) z' ],       z, z' ~ N(0, Id)

The columns of S move one person: infection S_g −1, I_g +1; recovery I_g −1. Π clips S_g to [0, N_g], then I_g to
[0, N_g − S_g]. Drawing the reactions' noise by itself gives the covariance S diag(a) Sᵀ Δt + (1e-3 Δt + 1e-6) Id without a
factorisation. Of κ tests per step the share p = sigmoid(ξ) goes to group 1, and positive tests are counted:

    y_1 ~ Poisson(κ p ρ1 I1/N1),   y_2 ~ Poisson(κ (1−p) ρ2 I2/N2)

Shapes: θ (M, dθ), x (M, N, 4), ξ (1,) the logit of the share, y (2,). Source: the task of Pérez-Vieites et al. 2026 [paper];
the seeded outbreak is ours.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.distributions import Independent, Poisson, Uniform

from labkit.filtering.state_space import RATE_FLOOR, check_fields, check_numbers, check_scalars, component_first

RATES = ("beta1", "gamma1", "beta2", "gamma2")
LOGIT_LIMIT = 6.0  # |ξ| of a design: shares from 0.25 % to 99.75 %


@dataclass(frozen=True)
class TwoGroupSIR:
    """The epidemic, as a `StateSpaceModel`.

    Attributes:
        params: the unknown rates, in the order of θ; any of `RATES`.
        beta1: infection rate of group 1, per unit time. The four rates are the truth for the unknown ones and the known value
            for the others.
        gamma1: recovery rate of group 1.
        beta2: of group 2.
        gamma2: of group 2.
        prior_box: bounds of the uniform prior, the same for every unknown rate.
        population: N_g.
        infected: I_g(0), known exactly; nobody has recovered yet.
        mixing: C, rows say whom a group meets.
        tests: κ, tests per step.
        sensitivity: ρ_g in (0, 1], the chance that an infected person's test is positive.
        dt: Δt, one Euler step per observation.
    """

    params: tuple[str, ...] = ("beta1", "gamma1")
    beta1: float = 0.65
    gamma1: float = 0.15
    beta2: float = 0.55
    gamma2: float = 0.15
    prior_box: tuple[float, float] = (0.1, 1.0)
    population: tuple[float, float] = (200, 200)
    infected: tuple[float, float] = (5, 5)
    mixing: tuple[tuple[float, float], tuple[float, float]] = ((0.9, 0.1), (0.1, 0.9))
    tests: float = 100
    sensitivity: tuple[float, float] = (0.95, 0.5)
    dt: float = 0.1

    state_names: ClassVar = ("S1", "I1", "S2", "I2")
    obs_names: ClassVar = ("positives 1", "positives 2")
    design_names: ClassVar = ("logit of share 1",)
    state_dim: ClassVar = 4
    obs_dim: ClassVar = 2
    design_dim: ClassVar = 1
    jitter_scale: ClassVar = 2.0

    def __post_init__(self) -> None:
        check_scalars(self)
        for name in ("population", "infected", "sensitivity", "prior_box"):
            pair = check_numbers(name, getattr(self, name), 2, allowed="2 numbers")
            object.__setattr__(self, name, tuple(pair.tolist()))
        allowed = "a 2 x 2 matrix of numbers >= 0"
        mixing = check_numbers("mixing", self.mixing, 2, 2, allowed=allowed)
        object.__setattr__(self, "mixing", tuple(map(tuple, mixing.tolist())))
        if isinstance(self.params, list):
            object.__setattr__(self, "params", tuple(self.params))
        known = isinstance(self.params, tuple) and all(name in RATES for name in self.params)
        if not known or not self.params or len(set(self.params)) < len(self.params):
            raise ValueError(f"params={self.params!r}: expected different names out of {RATES}")
        low, high = self.prior_box
        if not 0 <= low < high < math.inf:
            raise ValueError(f"prior_box={self.prior_box}: expected 0 <= low < high")
        for name in RATES:
            rate = getattr(self, name)
            if not 0 <= rate < math.inf:
                raise ValueError(f"{name}={rate}: a rate must be >= 0")
            if name in self.params and not low <= rate <= high:
                raise ValueError(f"{name}={rate}: the truth lies outside the prior's box [{low:g}, {high:g}]")
        fits = all(0 <= i <= n for i, n in zip(self.infected, self.population, strict=True))
        check_fields(
            self,
            ("population", "positive", all(0 < n < math.inf for n in self.population)),
            ("sensitivity", "in (0, 1]", all(0 < r <= 1 for r in self.sensitivity)),
            ("infected", f"between 0 and the population {self.population}", fits),
            ("mixing", allowed, bool(np.isfinite(mixing).all() and (mixing >= 0).all())),
            ("tests", "positive", 0 < self.tests < math.inf),
            ("dt", "positive", 0 < self.dt < math.inf),
        )

    @classmethod
    def two_parameter(cls, **changes: object) -> "TwoGroupSIR":
        """θ = (β1, γ1), both groups seeded alike [paper]."""
        return cls(**changes)

    @classmethod
    def four_parameter(cls, **changes: object) -> "TwoGroupSIR":
        """θ = (β1, γ1, β2, γ2), both groups seeded alike [paper]."""
        return cls(**{"params": RATES, **changes})

    @classmethod
    def seeded_outbreak(cls, **changes: object) -> "TwoGroupSIR":
        """All four rates unknown, infection in group 1 only: the best share travels with the epidemic [ours]."""
        return cls(**{"params": RATES, "infected": (5, 0), **changes})

    @property
    def param_names(self) -> tuple[str, ...]:
        """The unknown rates."""
        return self.params

    @property
    def truth(self) -> torch.Tensor:
        """True θ (dθ,)."""
        return torch.tensor([getattr(self, name) for name in self.params], dtype=torch.float32)

    def prior(self) -> Independent:
        """Uniform over the box, event shape (dθ,)."""
        low, high = (torch.full((len(self.params),), float(b)) for b in self.prior_box)
        return Independent(Uniform(low, high), 1)

    def initial(self, theta: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        """The known start, (M, n, 4): I_g infected, everybody else susceptible."""
        return self.start.to(theta.dtype).expand(len(theta), n, 4).clone()

    @property
    def start(self) -> torch.Tensor:
        """x_0 (4,), float64."""
        (n1, n2), (i1, i2) = self.population, self.infected
        return torch.tensor([n1 - i1, i1, n2 - i2, i2], dtype=torch.float64)

    def transition(
        self, x: torch.Tensor, theta: torch.Tensor, design: torch.Tensor | None, generator: torch.Generator
    ) -> torch.Tensor:
        """One Euler–Maruyama step of (M, N, 4) under θ (M, dθ); the share of tests does not matter to the epidemic."""
        z = torch.randn((3, 2, *x.shape[:2]), generator=generator, dtype=x.dtype)
        blur = 1e-3 * self.dt + 1e-6
        planes = x.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)  # (4, M, N), a plane per compartment
        susceptible, infected = planes[0::2], planes[1::2]  # (2, M, N), group first, views
        beta, gamma = self._rates(theta)  # (2, M, 1)
        population = x.new_tensor(self.population)
        pressure = torch.tensordot(x.new_tensor(self.mixing) / population, infected, 1)  # e, (2, M, N)
        infections = pressure.mul_(susceptible).mul_(beta * self.dt)
        infections.addcmul_(infections.sqrt(), z[0])
        recoveries = infected * (gamma * self.dt)
        recoveries.addcmul_((recoveries + blur).sqrt_(), z[1])  # two independent normals of I_g drawn as one
        population = population[:, None, None]
        susceptible.sub_(infections).add_(z[2], alpha=math.sqrt(blur)).clamp_(min=0)
        torch.minimum(susceptible, population, out=susceptible)
        infected.add_(infections).sub_(recoveries).clamp_(min=0)
        torch.minimum(infected, population - susceptible, out=infected)
        return planes.permute(1, 2, 0).contiguous()

    def positive_rates(self, x: torch.Tensor, design: torch.Tensor) -> torch.Tensor:
        """Expected positive tests per step, (..., 2), at least 1e-12."""
        dims = max(x.dim(), design.dim()) - 1
        per_test = x.new_tensor([self.tests * r / n for r, n in zip(self.sensitivity, self.population, strict=True)])
        shares = torch.cat((design, -design), -1).sigmoid()  # (..., 2)
        rates = component_first(x[..., 1::2], dims) * component_first(shares * per_test, dims)  # (2, ...)
        return rates.clamp(min=RATE_FLOOR).movedim(0, -1)

    def observation(self, x: torch.Tensor, design: torch.Tensor) -> Independent:
        """Two independent Poisson counts of positive tests."""
        return Independent(Poisson(self.positive_rates(x, design), validate_args=False), 1, validate_args=False)

    def natural(self, x: torch.Tensor, design: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """η = log λ (..., 2) and A = λ_1 + λ_2 (...) of the counts."""
        rates = self.positive_rates(x, design)
        return rates.log(), rates.sum(-1)

    def statistic(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s = y (..., 2) and b = −Σ log y! (...)."""
        return y, -torch.lgamma(y + 1).sum(-1)

    def sample_designs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Logits (n, 1) of shares drawn uniformly on (0, 1) [paper]."""
        return self.design_of_share(torch.rand((n, 1), generator=generator))

    @staticmethod
    def share(design: torch.Tensor) -> torch.Tensor:
        """Share p of the tests that goes to group 1, for designs of any shape."""
        return torch.as_tensor(design).sigmoid()

    @staticmethod
    def design_of_share(share: torch.Tensor | float) -> torch.Tensor:
        """ξ = logit p, clipped to |ξ| ≤ 6: the information may be greatest at the boundary, where the logit is infinite."""
        share = torch.as_tensor(share, dtype=torch.get_default_dtype())
        if not ((share >= 0) & (share <= 1)).all():
            raise ValueError(f"share={share.tolist()}: expected numbers in [0, 1]")
        return share.logit().clamp(-LOGIT_LIMIT, LOGIT_LIMIT)

    def ode(self, theta: torch.Tensor, times: np.ndarray) -> np.ndarray:
        """The epidemic without noise, dx/dt = S a(x), by `scipy.integrate.solve_ivp`.

        Args:
            theta: (dθ,).
            times: (T,), ascending, from 0 on, in units of time (an observation comes every Δt).

        Returns:
            States (T, 4).
        """
        from scipy.integrate import solve_ivp

        beta, gamma = (r[:, 0, 0].double().numpy() for r in self._rates(torch.as_tensor(theta)[None]))
        population, mixing = np.array(self.population), np.array(self.mixing)

        def slope(_: float, x: np.ndarray) -> np.ndarray:
            infections = beta * x[0::2] * (mixing @ (x[1::2] / population))
            recoveries = gamma * x[1::2]
            return np.stack((-infections, infections - recoveries), 1).ravel()

        times = np.asarray(times, dtype=float)
        return solve_ivp(slope, (0, times[-1]), self.start.numpy(), t_eval=times, rtol=1e-8, atol=1e-8).y.T

    def _rates(self, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """β and γ of both groups, (2, M, 1) each, from θ (M, dθ) where unknown."""
        columns = {name: theta[:, j] for j, name in enumerate(self.params)}
        known = theta.new_ones(len(theta))
        beta1, gamma1, beta2, gamma2 = (columns.get(name, getattr(self, name) * known) for name in RATES)
        return torch.stack((beta1, beta2))[..., None], torch.stack((gamma1, gamma2))[..., None]

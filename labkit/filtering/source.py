"""A source that moves in a slow turn, heard by sensors that hear best where they look.

State x = (p_x, p_y, φ), unknown velocities θ = (v_x, v_y), known turn rate v_φ:

    x_t = x_{t-1} + Δt (v_x cos φ, v_y sin φ, v_φ) + N(0, Δt diag(q, q, q_φ)),        φ wrapped to (−π, π]

Sensor j at s_j looks in direction ξ_j; ψ_j is the bearing from the sensor to the source. It hears the logarithm of

    μ_j = b + α / (m + |p − s_j|²) · ((1 + d cos(ξ_j − ψ_j)) / (1 + d))^k,      y_j ~ N(log μ_j, σ²)

so with d = 1 a sensor that looks away hears the background b only. Shapes: θ (M, 2), x (M, N, 3), ξ (J,) in radians, y (J,).
Source: the task of Pérez-Vieites et al. 2026 [paper], whose process noise leaves almost nothing to learn about the velocities
(`MovingSource.full_state_bound`); `noise="low_noise"`, a tenth of its variance, is ours.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.distributions import Independent, Normal, Uniform

from labkit.errors import check_size
from labkit.filtering.state_space import check_fields, check_numbers, check_scalars, component_first

NOISES = {"paper": 1.0, "low_noise": 0.1}  # factor on the process noise's variance


def wrap(angle: torch.Tensor) -> torch.Tensor:
    """The same angle in (−π, π]."""
    return math.pi - torch.remainder(math.pi - angle, 2 * math.pi)


@dataclass(frozen=True)
class MovingSource:
    """The moving source, as a `StateSpaceModel`.

    The filter's means are those of numbers: a mean heading is one only while the cloud stays clear of ±π.

    Attributes:
        noise: "paper" or "low_noise".
        sensors: positions s_j, J pairs.
        dt: Δt.
        turn_rate: v_φ, radians per unit time.
        velocity: true (v_x, v_y).
        prior_box: bounds of the uniform prior of both velocities.
        process: (q, q, q_φ), variance per unit time of the paper's process noise.
        initial_sd: of the particles' first state about 0, where the source starts.
        background: b > 0.
        strength: α.
        softening: m > 0, keeps the intensity finite at a sensor.
        directivity: d in [0, 1]; 0 hears the same from everywhere.
        focus: k > 0, the narrowness of the lobe.
        noise_sd: σ of the measured log-intensity.
    """

    noise: str = "paper"
    sensors: tuple[tuple[float, float], ...] = ((3, 0), (0, 3))
    dt: float = 0.1
    turn_rate: float = 0.3
    velocity: tuple[float, float] = (1.0, 1.0)
    prior_box: tuple[float, float] = (0.5, 1.5)
    process: tuple[float, float, float] = (0.2, 0.2, 0.01)
    initial_sd: float = 0.01
    background: float = 0.1
    strength: float = 5.0
    softening: float = 0.1
    directivity: float = 1.0
    focus: float = 4.0
    noise_sd: float = 0.1

    param_names: ClassVar = ("v_x", "v_y")
    state_names: ClassVar = ("p_x", "p_y", "phi")
    state_dim: ClassVar = 3
    jitter_scale: ClassVar = 0.15

    def __post_init__(self) -> None:
        allowed = "at least one pair of finite coordinates"
        sensors = check_numbers("sensors", self.sensors, None, 2, allowed=allowed)
        object.__setattr__(self, "sensors", tuple(map(tuple, sensors.tolist())))
        for name, length in (("velocity", 2), ("prior_box", 2), ("process", 3)):
            numbers = check_numbers(name, getattr(self, name), length, allowed=f"{length} numbers")
            object.__setattr__(self, name, tuple(numbers.tolist()))
        check_scalars(self)
        if self.noise not in tuple(NOISES):
            raise ValueError(f"noise={self.noise!r}: expected one of {', '.join(NOISES)}")
        low, high = self.prior_box
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"prior_box={self.prior_box}: expected low < high")
        if not all(low <= v <= high for v in self.velocity):
            raise ValueError(f"velocity={self.velocity}: the truth lies outside the prior's box [{low:g}, {high:g}]")
        check_fields(
            self,
            ("sensors", allowed, bool(np.isfinite(sensors).all())),
            ("dt", "positive", 0 < self.dt < math.inf),
            ("turn_rate", "finite", math.isfinite(self.turn_rate)),
            ("process", "three numbers >= 0", all(0 <= q < math.inf for q in self.process)),
            ("initial_sd", ">= 0", 0 <= self.initial_sd < math.inf),
            ("background", "positive", 0 < self.background < math.inf),
            ("strength", ">= 0", 0 <= self.strength < math.inf),
            ("softening", "positive", 0 < self.softening < math.inf),
            ("directivity", "in [0, 1]", 0 <= self.directivity <= 1),
            ("focus", "positive", 0 < self.focus < math.inf),
            ("noise_sd", "positive", 0 < self.noise_sd < math.inf),
        )

    @property
    def obs_dim(self) -> int:
        """J, one observation per sensor."""
        return len(self.sensors)

    @property
    def design_dim(self) -> int:
        """J, one direction per sensor."""
        return len(self.sensors)

    @property
    def obs_names(self) -> tuple[str, ...]:
        """Log-intensities."""
        return tuple(f"log intensity {j + 1}" for j in range(self.obs_dim))

    @property
    def design_names(self) -> tuple[str, ...]:
        """Directions, in radians."""
        return tuple(f"angle {j + 1}" for j in range(self.design_dim))

    @property
    def truth(self) -> torch.Tensor:
        """True θ (2,)."""
        return torch.tensor(self.velocity, dtype=torch.float32)

    @property
    def process_variance(self) -> tuple[float, ...]:
        """Variance of the process noise per unit time and coordinate, as the preset scales it."""
        return tuple(NOISES[self.noise] * q for q in self.process)

    def prior(self) -> Independent:
        """Uniform over the box, event shape (2,)."""
        low, high = (torch.full((2,), float(b)) for b in self.prior_box)
        return Independent(Uniform(low, high), 1)

    def initial(self, theta: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        """About the origin, heading along the first axis: (M, n, 3)."""
        return self.initial_sd * torch.randn((len(theta), n, 3), generator=generator, dtype=theta.dtype)

    def transition(
        self, x: torch.Tensor, theta: torch.Tensor, design: torch.Tensor | None, generator: torch.Generator
    ) -> torch.Tensor:
        """One step of (M, N, 3) under θ (M, 2); where the sensors look does not matter to the source."""
        spread = x.new_tensor(self.process_variance).mul_(self.dt).sqrt_()
        noise = torch.randn((3, *x.shape[:2]), generator=generator, dtype=x.dtype).mul_(spread[:, None, None])
        planes = x.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)  # (3, M, N), a plane per coordinate
        v_x, v_y = self.dt * theta.T[..., None]  # (M, 1) each
        noise[0].addcmul_(planes[2].cos(), v_x)
        noise[1].addcmul_(planes[2].sin(), v_y)
        planes += noise
        planes[2] = wrap(planes[2] + self.dt * self.turn_rate)
        return planes.permute(1, 2, 0).contiguous()

    def mean_log_intensity(self, x: torch.Tensor, design: torch.Tensor) -> torch.Tensor:
        """log μ (..., J) of states (..., 3) heard by sensors that look along ξ (..., J)."""
        dims = max(x.dim(), design.dim()) - 1
        angle = component_first(design, dims)  # (J, ...)
        s_x, s_y = (component_first(coordinate, dims) for coordinate in x.new_tensor(self.sensors).T)
        away, across = x[..., 0] - s_x, x[..., 1] - s_y  # from the sensor to the source
        squared = away.square() + across.square()
        # cos(ξ − ψ) without ψ; at the sensor itself there is no bearing, and the sum is 0
        cosine = (away * angle.cos() + across * angle.sin()) * squared.clamp(min=1e-30).rsqrt()
        d = self.directivity
        lobe = ((1 + d * cosine) / (1 + d)).clamp(min=0).pow(self.focus)
        return (self.background + self.strength * lobe / (self.softening + squared)).log().movedim(0, -1)

    def observation(self, x: torch.Tensor, design: torch.Tensor) -> Independent:
        """Independent Gaussian log-intensities."""
        mean = self.mean_log_intensity(x, design)
        return Independent(Normal(mean, self.noise_sd, validate_args=False), 1, validate_args=False)

    def natural(self, x: torch.Tensor, design: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """η = log μ (..., J) and A = |η|² / 2σ² (...)."""
        mean = self.mean_log_intensity(x, design)
        return mean, mean.square().sum(-1) / (2 * self.noise_sd**2)

    def statistic(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s = y / σ² (..., J) and b = −|y|² / 2σ² − J/2 log 2πσ² (...)."""
        constant = self.obs_dim / 2 * math.log(2 * math.pi * self.noise_sd**2)
        return y / self.noise_sd**2, -y.square().sum(-1) / (2 * self.noise_sd**2) - constant

    def sample_designs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Directions (n, J) uniform on (−π, π] [paper]."""
        return math.pi * (1 - 2 * torch.rand((n, self.design_dim), generator=generator))

    def full_state_bound(self, steps: int) -> float:
        """Most information about θ, in nats, that any designs can bring in `steps` steps [ours].

        Even an observer who sees every position exactly learns no more. Along the nominal heading φ_t = v_φ Δt t that observer
        has T noisy readings of each velocity, and of all priors of variance s² the Gaussian is the most informative:

            ½ Σ_j log(1 + s² F_j),   F = (Σ_t cos² φ_t, Σ_t sin² φ_t) Δt / q
        """
        check_size("steps", steps, 0)
        heading = self.turn_rate * self.dt * np.arange(steps)
        low, high = self.prior_box
        variance = (high - low) ** 2 / 12
        readings = np.array([np.sum(np.cos(heading) ** 2), np.sum(np.sin(heading) ** 2)])
        return float(np.log1p(variance * readings * self.dt / np.array(self.process_variance[:2])).sum() / 2)

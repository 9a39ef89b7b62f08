"""What an experiment is that one wants to design, and five of them.

    θ ~ p(θ),   y_t ~ p(y | x_t, θ)

θ ∈ R^p is unknown and constant, the design x ∈ R^d is chosen before the outcome y, a scalar. Batch dimensions come first and
broadcast: θ (..., p) and x (..., d) give y (...). An outcome is a deterministic function of (θ, x, noise), so that planners can
freeze the noise and differentiate in the rest.

A user's model subclasses `DesignModel` (or `GaussianModel`, which needs a mean and a scale only), or comes from a pyro program
by `labkit.design.pyro_bridge.from_pyro`. The market of two baskets, `CES`, has its own file, `labkit.design.ces`.
"""

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, HalfNormal, Independent, MultivariateNormal, Normal, Uniform, biject_to

from labkit.design.priors import Joint
from labkit.errors import check_number, check_size
from labkit.randomness import sample


class DesignModel(ABC):
    """An experiment p(y | x, θ) with a prior p(θ).

    Attributes:
        theta_dim, design_dim: p and d.
        bounds: the box of designs (2, d), lowest values first; ±inf where there is no bound.
        design_names: one name per coordinate of the design.
        outcomes: the possible outcomes (Y,) if they are finitely many, else None.
        limit: E, where outcomes outside [−E, E] are recorded as −E or E (two atoms), else None.

    `simulate` and `prior` suffice for estimators that learn the posterior; those that use the likelihood also need
    `log_prob(y, theta, design) -> (...)`. If `outcomes` is None, `simulate` is differentiable in θ and x at fixed noise.
    """

    theta_dim: int
    design_dim: int
    bounds: Tensor
    design_names: tuple[str, ...]
    outcomes: Tensor | None = None
    limit: float | None = None

    @abstractmethod
    def prior(self) -> Distribution:
        """p(θ), event shape (p,)."""

    @abstractmethod
    def simulate(
        self, theta: Tensor, design: Tensor, noise: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """One outcome per pair (θ, x).

        Args:
            theta: (..., p).
            design: (..., d).
            noise: what `noise(shape)` draws, (...); drawn from the generator if None.
            generator: of the noise.

        Returns:
            y (...).
        """

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The standard noise of `simulate`: N(0, 1), or U(0, 1) if the outcomes are finitely many."""
        draw = torch.randn if self.outcomes is None else torch.rand
        return draw(tuple(shape), generator=generator, dtype=dtype)

    def sample_prior(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Independent draws of θ (*shape, p)."""
        check_generator(generator)
        return sample(self.prior(), generator, tuple(shape))

    def sample_designs(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Independent designs (*shape, d): uniform where the box is finite, N(0, 1) in the other coordinates."""
        check_generator(generator)
        low, high = self.bounds
        size = (*shape, self.design_dim)
        uniform = torch.rand(size, generator=generator, dtype=low.dtype)
        normal = torch.randn(size, generator=generator, dtype=low.dtype)
        bounded = (high - low).isfinite()
        return torch.where(bounded, torch.where(bounded, low, 0) + torch.where(bounded, high - low, 1) * uniform, normal)

    def to_unconstrained(self, theta: Tensor) -> Tensor:
        """Coordinates v ∈ R^q for MCMC and networks, θ (..., p) -> v (..., q)."""
        return biject_to(self.prior().support).inv(theta)

    def from_unconstrained(self, v: Tensor) -> Tensor:
        """The inverse of `to_unconstrained`, (..., q) -> (..., p)."""
        return biject_to(self.prior().support)(v)

    def log_prior_unconstrained(self, v: Tensor) -> Tensor:
        """Log-density of v = `to_unconstrained(θ)` under the prior, (..., q) -> (...)."""
        prior = self.prior()
        bijection = biject_to(prior.support)
        theta = bijection(v)
        jacobian = bijection.log_abs_det_jacobian(v, theta)
        if bijection.codomain.event_dim == 0:
            jacobian = jacobian.sum(-1)
        return prior.log_prob(theta) + jacobian

    def pyro_model(self) -> Callable[[Tensor], Tensor]:
        """The same experiment as a pyro program: design (..., d) -> y (...), with sites "theta" and "y"."""
        from labkit.design.pyro_bridge import to_pyro  # loads pyro, which takes a second

        return to_pyro(self)

    def _check(self, theta: Tensor, design: Tensor) -> None:
        for name, value, size in (("theta", theta, self.theta_dim), ("design", design, self.design_dim)):
            if value.shape[-1:] != (size,):
                raise ValueError(f"{name}: got shape {tuple(value.shape)}; {type(self).__name__} expects (..., {size})")


class GaussianModel(DesignModel):
    """An experiment whose outcome is N(mean(θ, x), scale(θ, x)²)."""

    @abstractmethod
    def mean(self, theta: Tensor, design: Tensor) -> Tensor:
        """E[y | θ, x] (...)."""

    @abstractmethod
    def scale(self, theta: Tensor, design: Tensor) -> Tensor:
        """Standard deviation of y given θ and x; any shape that broadcasts against that of the mean."""

    def simulate(
        self, theta: Tensor, design: Tensor, noise: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """mean + scale · noise."""
        self._check(theta, design)
        mean = self.mean(theta, design)
        if noise is None:
            noise = self.noise(mean.shape, generator, mean.dtype)
        return mean + self.scale(theta, design) * noise

    def log_prob(self, y: Tensor, theta: Tensor, design: Tensor) -> Tensor:
        """log p(y | θ, x), for y, θ and x with batch shapes that broadcast."""
        self._check(theta, design)
        return log_normal(y, self.mean(theta, design), self.scale(theta, design))


def is_gaussian(model: DesignModel) -> bool:
    """Whether the outcome is Gaussian given θ and x, not censored."""
    return model.limit is None and hasattr(model, "mean") and hasattr(model, "scale")


def log_normal(y: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """log N(y; mean, scale²), shapes that broadcast."""
    return -0.5 * ((y - mean) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


def check_bounds(bounds: Any, design_dim: int | None = None) -> Tensor:
    """A box of designs as a tensor (2, d).

    Args:
        bounds: lowest and highest values, ±inf allowed.
        design_dim: d, if it is known.

    Raises:
        ValueError: the shape is not (2, d), or a lowest value is not below the highest.
    """
    bounds = as_numbers("bounds", bounds)
    if bounds.dim() != 2 or bounds.shape[0] != 2 or bounds.shape[1] != (design_dim or bounds.shape[1]) or not bounds.numel():
        raise ValueError(f"bounds: got shape {tuple(bounds.shape)}; expected (2, {design_dim or 'd'})")
    if not (bounds[0] < bounds[1]).all():
        raise ValueError(f"bounds={bounds.tolist()}: expected the lowest value of each coordinate below its highest")
    return bounds


def check_designs(model: DesignModel, designs: Tensor, name: str = "design") -> None:
    """Refuse designs (..., d) that have another dimension, are not finite, or leave the box by more than 1e-6 of it."""
    if designs.shape[-1:] != (model.design_dim,):
        raise ValueError(f"{name}: got shape {tuple(designs.shape)}; {type(model).__name__} expects (..., {model.design_dim})")
    if not designs.isfinite().all():
        raise ValueError(f"{name}={designs.tolist()}: expected finite numbers")
    low, high = model.bounds
    slack = 1e-6 * torch.where((high - low).isfinite(), high - low, 1)
    if ((designs < low - slack) | (designs > high + slack)).any():
        raise ValueError(f"{name}={designs.tolist()}: expected designs in the box {model.bounds.tolist()}")


def check_outcomes(model: DesignModel, y: Tensor, name: str = "y") -> None:
    """Refuse outcomes that are not finite, or that the model cannot produce."""
    if not y.isfinite().all():
        raise ValueError(f"{name}={y.tolist()}: expected finite numbers")
    if model.outcomes is not None and not torch.isin(y, model.outcomes.to(y.dtype)).all():
        raise ValueError(f"{name}={y.tolist()}: expected outcomes among {model.outcomes.tolist()}")
    if model.limit is not None and (y.abs() > (1 + 1e-6) * model.limit).any():
        raise ValueError(f"{name}={y.tolist()}: expected outcomes in [−{model.limit:g}, {model.limit:g}]")


def check_positive(**values: float) -> None:
    """Refuse arguments that are not finite numbers > 0."""
    for name, value in values.items():
        check_number(name, value)


def check_generator(generator: Any) -> None:
    """Refuse what is no torch generator of the CPU: a seed would draw the same numbers at every call."""
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        got = f"one on {generator.device}" if isinstance(generator, torch.Generator) else repr(generator)
        raise ValueError(f"generator: got {got}; expected a torch.Generator of the CPU, as torch.Generator().manual_seed(0)")


def as_numbers(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Real numbers in any nesting as a floating tensor on the CPU; `dtype=None` keeps that of a floating tensor.

    Raises:
        ValueError: they are none; `name` is for the message.
    """
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex() or tensor.device.type != "cpu":
        raise ValueError(f"{name}={reprlib.repr(value)}: expected real numbers, in rows of equal length, on the CPU")
    return tensor.to(dtype or (tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()))


class LocationFinding(GaussianModel):
    """Where are K sources whose signals add up? [paper; predecessor: Foster et al. 2021]

        y ~ N(log(b + Σ_k 1 / (m + ‖θ_k − x‖²)), σ²)

    Args:
        n_sources: K ≥ 1; θ holds the sources one after the other, p = K · dim.
        dim: dimension of the plane that sources and designs lie in.
        prior: "uniform", θ and x in the unit cube [paper], or "normal", θ_k ~ N(0, I), x anywhere [predecessor].
        background: b > 0.
        max_signal: m > 0, the inverse of the largest signal.
        noise_sd: σ > 0.
    """

    def __init__(
        self,
        n_sources: int = 1,
        dim: int = 2,
        prior: str = "uniform",
        background: float = 0.1,
        max_signal: float = 1e-4,
        noise_sd: float = 0.5,
    ):
        check_size("n_sources", n_sources, 1)
        check_size("dim", dim, 1)
        if prior not in ("uniform", "normal"):
            raise ValueError(f'prior={prior!r}: expected "uniform" or "normal"')
        check_positive(background=background, max_signal=max_signal, noise_sd=noise_sd)
        self.n_sources, self.prior_kind = n_sources, prior
        self.background, self.max_signal, self.noise_sd = background, max_signal, noise_sd
        self.theta_dim, self.design_dim = n_sources * dim, dim
        self.design_names = tuple(f"x{j + 1}" for j in range(dim))
        limits = (0.0, 1.0) if prior == "uniform" else (-math.inf, math.inf)
        self.bounds = torch.tensor(limits)[:, None].expand(2, dim).clone()

    def prior(self) -> Distribution:
        """U[0, 1]^p or N(0, I)."""
        law = Uniform if self.prior_kind == "uniform" else Normal
        return Independent(law(torch.zeros(self.theta_dim), torch.ones(self.theta_dim)), 1)

    def mean(self, theta: Tensor, design: Tensor) -> Tensor:
        """log(b + Σ_k 1 / (m + ‖θ_k − x‖²))."""
        d = self.design_dim  # coordinate by coordinate: a sum over a last dimension of two is slow
        signal = self.background
        for k in range(self.n_sources):
            squared = sum((theta[..., k * d + j] - design[..., j]).square() for j in range(d))
            signal = signal + 1 / (self.max_signal + squared)
        return signal.log()

    def scale(self, theta: Tensor, design: Tensor) -> Tensor:
        """σ."""
        return theta.new_tensor(self.noise_sd)


class Pharmacokinetics(GaussianModel):
    """How fast is a drug taken up and washed out? Blood is drawn at time t, in hours [predecessor: Ivanova et al. 2021]

        c(t) = (dose / V) k_a / (k_a − k_e) (e^{−k_e t} − e^{−k_a t}),   y ~ N(c, 0.01 c² + 0.1)

    θ = (log k_a, log k_e, log V) ~ N(log(1, 0.1, 20), v I).

    Args:
        prior_var: v > 0.
        dose: > 0, 400 in the predecessor.
    """

    def __init__(self, prior_var: float = 0.05, dose: float = 400.0):
        check_positive(prior_var=prior_var, dose=dose)
        self.prior_var, self.dose = prior_var, dose
        self.theta_dim, self.design_dim, self.design_names = 3, 1, ("hours",)
        self.bounds = torch.tensor([[0.0], [24.0]])

    def prior(self) -> Distribution:
        """Independent normals of the logarithms."""
        return Independent(Normal(torch.tensor([1.0, 0.1, 20.0]).log(), torch.full((3,), self.prior_var**0.5)), 1)

    def mean(self, theta: Tensor, design: Tensor) -> Tensor:
        """Concentration c(t)."""
        absorption, elimination, volume = theta.exp().unbind(-1)
        time, gap = design[..., 0], absorption - elimination
        gap = torch.where(gap.abs() < 1e-6, 1e-6, gap)  # the limit k_a → k_e, without 0 / 0
        return self.dose / volume * absorption * (-elimination * time).exp() * -torch.expm1(-gap * time) / gap

    def scale(self, theta: Tensor, design: Tensor) -> Tensor:
        """√(0.01 c² + 0.1)."""
        return (0.01 * self.mean(theta, design).square() + 0.1).sqrt()

    def log_prob(self, y: Tensor, theta: Tensor, design: Tensor) -> Tensor:
        """log p(y | θ, x); the concentration is computed once."""
        self._check(theta, design)
        mean = self.mean(theta, design)
        return log_normal(y, mean, (0.01 * mean.square() + 0.1).sqrt())


class LinearGaussian(GaussianModel):
    """Bayesian linear regression, where every expected information has a closed form.

        θ ~ N(0, Σ),   y ~ N(φ(x)ᵀ θ, σ²)

    Args:
        features: φ, (..., d) -> (..., p), differentiable.
        prior_cov: Σ (p, p), positive definite; its dtype is that of the model.
        noise: σ > 0.
        bounds: box of designs (2, d).
    """

    def __init__(self, features: Callable[[Tensor], Tensor], prior_cov: Any, noise: float = 1.0, *, bounds: Any):
        check_positive(noise=noise)
        cov = as_numbers("prior_cov", prior_cov)
        square = cov.dim() == 2 and len(cov) == cov.shape[1] > 0
        if not square or not torch.allclose(cov, cov.T) or torch.linalg.cholesky_ex(cov).info:
            got = cov.tolist() if square else f"shape {tuple(cov.shape)}"
            raise ValueError(f"prior_cov: got {got}; expected a symmetric, positive definite matrix (p, p)")
        if not callable(features):
            raise ValueError(f"features={features!r}: expected a function of designs, (..., d) -> (..., p)")
        self.features, self.prior_cov, self.noise_sd = features, cov, noise
        self.bounds = check_bounds(bounds).to(cov.dtype)
        self.theta_dim, self.design_dim = len(cov), self.bounds.shape[1]
        self.design_names = tuple(f"x{j + 1}" for j in range(self.design_dim))
        shape = tuple(features(self.bounds.nan_to_num(0, 0, 0).mean(0, keepdim=True)).shape)
        if shape != (1, self.theta_dim):
            raise ValueError(f"features: got shape {shape} for one design; expected (1, {self.theta_dim}), as prior_cov has it")

    def prior(self) -> Distribution:
        """N(0, Σ)."""
        return MultivariateNormal(self.prior_cov.new_zeros(self.theta_dim), self.prior_cov)

    def mean(self, theta: Tensor, design: Tensor) -> Tensor:
        """φ(x)ᵀ θ."""
        return (self.features(design) * theta).sum(-1)

    def scale(self, theta: Tensor, design: Tensor) -> Tensor:
        """σ."""
        return theta.new_tensor(self.noise_sd)

    def expected_information(self, design: Tensor, cov: Tensor | None = None) -> Tensor:
        """EIG(x) = ½ log(1 + φᵀ Σ φ / σ²) in nats.

        Args:
            design: (..., d).
            cov: covariance (..., p, p) of the current belief, the prior's if None.
        """
        phi = self.features(design)
        cov = self.prior_cov if cov is None else cov
        return 0.5 * torch.log1p((phi * (cov @ phi[..., None])[..., 0]).sum(-1) / self.noise_sd**2)

    def total_information(self, designs: Tensor) -> Tensor:
        """I(θ; y_{1:T}) = ½ log det(I + Φ Σ Φᵀ / σ²) in nats, for designs (..., T, d)."""
        phi = self.features(designs)
        gram = phi @ self.prior_cov @ phi.mT / self.noise_sd**2
        return 0.5 * torch.logdet(gram + torch.eye(gram.shape[-1], dtype=gram.dtype))

    def posterior(self, designs: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
        """Exact posterior mean (..., p) and covariance (..., p, p) after designs (..., T, d) and outcomes (..., T)."""
        phi = self.features(designs)
        gain = self.prior_cov @ phi.mT  # (..., p, T)
        noise = self.noise_sd**2 * torch.eye(phi.shape[-2], dtype=phi.dtype)
        weights = torch.linalg.solve(phi @ gain + noise, gain.mT)  # (..., T, p)
        return (weights * outcomes[..., None]).sum(-2), self.prior_cov - gain @ weights


class HyperbolicDiscounting(DesignModel):
    """Money now or more money later? How strongly a person discounts the future [predecessor: Foster et al. 2021]

    A design is a reward R paid now (option A) against 100 paid after D days (option B). With V_A = R and V_B = 100 / (1 + k D)
    the person takes B (y = 1) with probability ε + (1 − 2 ε) Φ((V_B − V_A) / α), Φ(z) = (1 + erf z) / 2.
    θ = (log k, a), α = 0.001 + a, log k ~ N(−4.25, 1.5²), a ~ |N(0, 2²)|, ε = 0.01.

    Args:
        max_delay: largest D in days, > 0 [ours: the predecessor has no bound].
    """

    outcomes = torch.tensor([0.0, 1.0])

    def __init__(self, max_delay: float = 1000.0):
        check_positive(max_delay=max_delay)
        self.theta_dim, self.design_dim, self.design_names = 2, 2, ("reward", "delay")
        self.bounds = torch.tensor([[0.0, 0.0], [100.0, max_delay]])

    def prior(self) -> Distribution:
        """Independent coordinates: a normal and a half-normal one."""
        return Joint([Normal(torch.tensor(-4.25), 1.5), HalfNormal(torch.tensor(2.0))])

    def probability(self, theta: Tensor, design: Tensor) -> Tensor:
        """P(y = 1 | θ, x)."""
        self._check(theta, design)
        later = 100 / (1 + theta[..., 0].exp() * design[..., 1])
        return 0.01 + 0.98 * 0.5 * (1 + torch.erf((later - design[..., 0]) / (1e-3 + theta[..., 1])))

    def simulate(
        self, theta: Tensor, design: Tensor, noise: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """1 where noise ~ U(0, 1) is below the probability of B."""
        p = self.probability(theta, design)
        noise = self.noise(p.shape, generator, p.dtype) if noise is None else noise
        return (noise < p).to(p.dtype)

    def log_prob(self, y: Tensor, theta: Tensor, design: Tensor) -> Tensor:
        """log P(y | θ, x), for y, θ and x with batch shapes that broadcast."""
        p = self.probability(theta, design)
        return torch.where(y == 1, p, torch.where(y == 0, 1 - p, 0)).log()

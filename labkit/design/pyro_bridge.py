"""Experiments as pyro programs, and pyro programs as experiments."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints

from labkit.design.models import DesignModel, check_bounds
from labkit.design.priors import NO_SHAPE, Joint
from labkit.randomness import frozen


def to_pyro(model: DesignModel) -> Callable[[Tensor], Tensor]:
    """The experiment as a pyro program for `pyro.contrib.oed`.

    Args:
        model: with `log_prob`.

    Returns:
        A function design (..., d) -> y (...), with sites "theta" and "y" inside one plate per batch dimension.
    """
    prior = _Wrapped(model.prior())

    def program(design: Tensor) -> Tensor:
        with pyro.plate_stack("designs", design.shape[:-1]):
            theta = pyro.sample("theta", prior.expand(design.shape[:-1]))
            return pyro.sample("y", _Outcome(model, theta, design))

    return program


def from_pyro(
    program: Callable[[Tensor], Any], *, bounds: Any, latents: Sequence[str] = ("theta",), outcome: str = "y"
) -> DesignModel:
    """A pyro program as an experiment.

    Args:
        program: design (..., d) -> anything, as `pyro.contrib.oed` wants it: one plate per batch dimension of the design around
            all sites, `pyro.plate_stack("designs", design.shape[:-1])`. The outcome is a scalar; its law is normal, or has
            finitely many values, or has an inverse distribution function. The laws of the latent sites may not depend on the
            design or on each other.
        bounds: box of designs (2, d).
        latents: names of the unknown sites; θ holds them one after the other.
        outcome: name of the measured site.

    Raises:
        ValueError: a site is missing, a latent site's law is not fixed, or the outcome's law is none of these.
    """
    if isinstance(latents, str) or not isinstance(latents, Sequence):
        raise ValueError(f"latents={latents!r}: expected a sequence of site names, as ('theta',)")
    return _PyroModel(program, check_bounds(bounds), tuple(latents), outcome)


class _PyroModel(DesignModel):
    def __init__(self, program: Callable[[Tensor], Any], bounds: Tensor, latents: tuple[str, ...], outcome: str):
        if not callable(program):
            raise ValueError(f"program={program!r}: expected a pyro program, a function of designs")
        if not latents or len(set(latents)) < len(latents) or outcome in latents:
            raise ValueError(f"latents={latents}: expected names of unknown sites, each once, without the outcome {outcome!r}")
        self.program, self.bounds, self.latents, self.outcome = program, bounds, latents, outcome
        self.design_dim = bounds.shape[1]
        self.design_names = tuple(f"x{j + 1}" for j in range(self.design_dim))
        generator = torch.Generator().manual_seed(0)
        sites, again = (self._trace_sites(self.sample_designs((), generator), seed=seed) for seed in (0, 1))
        for name in (*latents, outcome):
            if name not in sites:
                raise ValueError(f"program: has no site {name!r}, only {sorted(sites)}")
        hidden = sorted(name for name, site in sites.items() if name not in (*latents, outcome) and not site["is_observed"])
        hidden = [name for name in hidden if type(sites[name]["fn"]).__name__ != "_Subsample"]
        if hidden:
            raise ValueError(f"latents={latents}: the sites {hidden} are random too; expected them among the latents")
        for name in latents:
            law = sites[name]["fn"]
            value = sites[name]["value"]
            if not torch.equal(law.log_prob(value), again[name]["fn"].log_prob(value)):
                raise ValueError(f"latents={latents}: the law of {name!r} changes with the design or with another site")
            if law.has_enumerate_support or law.support.is_discrete:
                raise ValueError(f"latents={latents}: {name!r} has the discrete law {law}; expected continuous parameters")
            if biject_to(law.support).inverse_shape(law.event_shape) != law.event_shape:
                raise ValueError(f"latents={latents}: {name!r} lives on {law.support}; expected as many free coordinates")
        self._prior = Joint([sites[name]["fn"] for name in latents])
        self.theta_dim = self._prior.event_shape.numel()
        law = sites[outcome]["fn"]
        if law.event_shape:
            raise ValueError(f"program: the outcome {outcome!r} has event shape {tuple(law.event_shape)}; expected a scalar")
        self._gaussian = isinstance(law, dist.Normal)
        if law.has_enumerate_support:
            self.outcomes = law.enumerate_support(expand=False).flatten()
        if self._gaussian:
            self.mean = lambda theta, design: self._law(theta, design).loc
            self.scale = lambda theta, design: self._law(theta, design).scale
        elif self.outcomes is None:
            self._check_quantiles(law)
        self._check_batches(sites[outcome]["value"])

    def prior(self) -> Distribution:
        return self._prior

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
        draw = torch.randn if self._gaussian else torch.rand
        return draw(tuple(shape), generator=generator, dtype=dtype)

    def simulate(
        self, theta: Tensor, design: Tensor, noise: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        self._check(theta, design)
        law = self._law(theta, design)
        noise = self.noise(law.batch_shape, generator, theta.dtype) if noise is None else noise
        if self._gaussian:
            return law.loc + law.scale * noise
        if self.outcomes is None:
            return law.icdf(noise)
        shape = torch.broadcast_shapes(law.batch_shape, noise.shape)
        values = self.outcomes.to(theta.dtype)
        probs = law.log_prob(values.reshape(-1, *[1] * len(shape))).exp()  # (Y, ...)
        below = (noise >= probs.cumsum(0)).sum(0).clamp(max=len(values) - 1)
        return values[below]

    def log_prob(self, y: Tensor, theta: Tensor, design: Tensor) -> Tensor:
        self._check(theta, design)
        return self._law(theta, design).log_prob(y)

    def pyro_model(self) -> Callable[[Tensor], Any]:
        return self.program

    def _law(self, theta: Tensor, design: Tensor) -> Distribution:
        """p(y | θ, x) with the batch shape that θ and x share."""
        shape = torch.broadcast_shapes(theta.shape[:-1], design.shape[:-1])
        theta, design = theta.expand(*shape, -1), design.expand(*shape, -1)
        data = dict(zip(self.latents, self._prior.split(theta), strict=True))
        return self._trace_sites(design, data)[self.outcome]["fn"]

    def _trace_sites(self, design: Tensor, data: dict[str, Tensor] | None = None, seed: int = 0) -> dict[str, Any]:
        with frozen(seed):  # the outcome is drawn too, and not used
            trace = poutine.trace(poutine.condition(self.program, data or {})).get_trace(design)
        return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}

    def _check_batches(self, y: Tensor) -> None:
        """Refuse a program that mixes the members of a batch, for lack of plates or by a sum over all designs."""
        generator = torch.Generator().manual_seed(1)
        theta, design = self.sample_prior((2, 3), generator), self.sample_designs((2, 3), generator)
        together = self._law(theta, design)
        apart = torch.stack([self._law(theta[i, j], design[i, j]).log_prob(y) for i in range(2) for j in range(3)])
        if together.batch_shape != (2, 3) or not torch.allclose(together.log_prob(y).flatten(), apart, 1e-4, 1e-4):
            raise ValueError(
                f"program: the law of {self.outcome!r} for designs (2, 3, {self.design_dim}) has batch shape "
                f"{tuple(together.batch_shape)} or mixes them; expected one law per design, as with pyro.plate_stack"
            )

    def _check_quantiles(self, law: Distribution) -> None:
        try:
            law.icdf(torch.tensor(0.5))
        except NotImplementedError:
            raise ValueError(
                f"program: the outcome {self.outcome!r} has the law {type(law).__name__}; expected a normal law, finitely many "
                "values, or an inverse distribution function"
            ) from None


class _Wrapped(TorchDistribution):
    """A torch distribution that pyro can sample and expand."""

    arg_constraints: ClassVar = {}

    def __init__(self, law: Distribution):
        self.law = law
        super().__init__(law.batch_shape, law.event_shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return self.law.support

    @property
    def has_rsample(self) -> bool:
        return self.law.has_rsample

    def sample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        return self.law.sample(sample_shape)

    def rsample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        return self.law.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.law.log_prob(value)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "_Wrapped":
        return _Wrapped(self.law.expand(torch.Size(batch_shape)))


class _Outcome(TorchDistribution):
    """p(y | θ, x)."""

    arg_constraints: ClassVar = {}

    def __init__(self, model: DesignModel, theta: Tensor, design: Tensor):
        self.model, self.theta, self.design = model, theta, design
        shape = torch.broadcast_shapes(theta.shape[:-1], design.shape[:-1])
        super().__init__(shape, torch.Size(), validate_args=False)
        self.has_enumerate_support = model.outcomes is not None

    @property
    def support(self) -> constraints.Constraint:
        return constraints.boolean if self.has_enumerate_support else constraints.real

    @property
    def has_rsample(self) -> bool:
        return not self.has_enumerate_support

    def rsample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        noise = self.model.noise(torch.Size(sample_shape) + self.batch_shape, dtype=self.theta.dtype)
        return self.model.simulate(self.theta, self.design, noise)

    def sample(self, sample_shape: torch.Size = NO_SHAPE) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.model.log_prob(value, self.theta, self.design)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = self.model.outcomes.reshape(-1, *[1] * len(self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "_Outcome":
        shape = torch.Size(batch_shape)
        return _Outcome(self.model, self.theta.expand(*shape, -1), self.design.expand(*shape, -1))

"""The two-parameter SIR model in plain NumPy, and SMC² on it: what the nested filter's costs are compared with.

SMC² [predecessor: Chopin, Jacob and Papaspiliopoulos 2013] comes from the package `particles`. Whenever its parameters
degenerate, it moves them by re-running the whole past.
"""

from typing import Any

import numpy as np
from scipy.special import gammaln

from labkit.filtering.sir import TwoGroupSIR


def move(model: TwoGroupSIR, x: np.ndarray, beta: float, gamma: float, rng: Any) -> np.ndarray:
    """One step of states (n, 4) under one parameter (β1, γ1); `rng` draws by `normal`."""
    population, dt = np.array(model.population), model.dt
    susceptible, infected = x[:, 0::2], x[:, 1::2]
    pressure = infected / population @ np.array(model.mixing).T
    infections = np.array([beta, model.beta2]) * susceptible * pressure * dt
    recoveries = np.array([gamma, model.gamma2]) * infected * dt
    z = rng.normal(size=(4, *susceptible.shape))
    infections = infections + np.sqrt(infections) * z[0]
    recoveries = recoveries + np.sqrt(recoveries) * z[1]
    blur = np.sqrt(1e-3 * dt + 1e-6)
    susceptible = np.clip(susceptible - infections + blur * z[2], 0, population)
    infected = np.clip(infected + infections - recoveries + blur * z[3], 0, population - susceptible)
    return np.stack([susceptible, infected], 2).reshape(x.shape)


def log_density(model: TwoGroupSIR, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log g(y | x) (n,) at half of the tests per group."""
    rates = np.maximum(model.tests / 2 * np.array(model.sensitivity) * x[:, 1::2] / np.array(model.population), 1e-12)
    return (y * np.log(rates) - rates - gammaln(y + 1)).sum(1)


def smc2(model: TwoGroupSIR, ys: np.ndarray, size: int, seed: int = 0) -> Any:
    """SMC² over a run with half of the tests per group: an iterator over t.

    Args:
        model: with unknown (β1, γ1).
        ys: observations (T, 2).
        size: parameters, and states of each to begin with.
        seed: of NumPy's global generator, the only one that `particles` knows.

    Returns:
        `particles.SMC`.

    Raises:
        ImportError: `particles` is not installed.
    """
    import particles
    from particles import distributions, smc_samplers, state_space_models

    class Law(distributions.ProbDist):
        """A law from a function that draws, or from one that evaluates."""

        def __init__(self, rvs=None, logpdf=None):
            self.rvs, self.logpdf = rvs, logpdf

    class Epidemic(state_space_models.StateSpaceModel):
        def PX0(self) -> Law:
            return Law(rvs=lambda size: self.moved(np.tile(model.start.numpy(), (size, 1))))

        def PX(self, t: int, xp: np.ndarray) -> Law:
            return Law(rvs=lambda size: self.moved(xp))

        def PY(self, t: int, xp: np.ndarray, x: np.ndarray) -> Law:
            return Law(logpdf=lambda y: log_density(model, x, y))

        def moved(self, x: np.ndarray) -> np.ndarray:
            return move(model, x, self.beta1, self.gamma1, np.random)

    np.random.seed(seed)  # noqa: NPY002
    prior = distributions.StructDist({name: distributions.Uniform(*model.prior_box) for name in model.param_names})
    problem = smc_samplers.SMC2(ssm_cls=Epidemic, data=list(ys), prior=prior, init_Nx=size)
    return particles.SMC(fk=problem, N=size)

"""What magnitude sparsification should cost if activations were Gaussian or Laplace, channel by channel independent.

Zeroing the share p of smallest entries of x ~ N(0, sigma^2) loses the energy share

    E[x^2 1{|x| <= tau}] / sigma^2 = p - 2 t phi(t),      t = tau / sigma = Phi^-1((1 + p) / 2),

a Laplace x loses 1 - (1 - p)(1 + u + u^2 / 2), u = -ln(1 - p), and a mask that ignores x loses p. Through white weights the
relative error of the output is the square root of the share.
"""

import numpy as np
from scipy.special import ndtri

DISTRIBUTIONS = ("gaussian", "laplace", "random")


def threshold(p: np.ndarray | float, distribution: str = "gaussian") -> np.ndarray:
    """Threshold tau, in standard deviations of x, that zeroes a share p in [0, 1) of the entries."""
    p = np.asarray(p, dtype=float)
    if distribution == "gaussian":
        return ndtri((1 + p) / 2)
    if distribution == "laplace":
        return -np.log1p(-p) / np.sqrt(2)  # a Laplace variable of scale beta has standard deviation sqrt(2) beta
    raise ValueError(f"distribution={distribution!r}: thresholds are known for 'gaussian' and 'laplace'")


def energy_lost(p: np.ndarray | float, distribution: str = "gaussian") -> np.ndarray:
    """Share of E[x^2] lost by zeroing a share p in [0, 1) of the entries: the smallest ones, or for "random" any."""
    p = np.asarray(p, dtype=float)
    if distribution == "gaussian":
        t = threshold(p)
        return p - 2 * t * np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)
    if distribution == "laplace":
        u = -np.log1p(-p)
        return 1 - (1 - p) * (1 + u + u**2 / 2)
    if distribution == "random":
        return p
    raise ValueError(f"distribution={distribution!r}: expected one of {DISTRIBUTIONS}")

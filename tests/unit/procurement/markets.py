"""Markets that several tests share."""

import numpy as np
from scipy import stats

from labkit.procurement import Market


def mixed_market(n=8, budget=1.5, seed=0):
    """Values in [0.5, 2] and costs of four families in turn."""
    rng = np.random.default_rng(seed)
    families = [
        lambda s: stats.uniform(0.1, 2 * s),
        lambda s: stats.expon(scale=s),
        lambda s: stats.lognorm(0.6, scale=s),
        lambda s: stats.beta(2, 1, loc=0.1, scale=s),
    ]
    priors = [families[i % 4](scale) for i, scale in enumerate(rng.uniform(0.3, 0.8, n))]
    return Market(rng.uniform(0.5, 2, n), priors, budget)

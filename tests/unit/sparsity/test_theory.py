import numpy as np
import pytest
from scipy import integrate, stats

from labkit.sparsity.theory import energy_lost, threshold

DENSITIES = {"gaussian": stats.norm(), "laplace": stats.laplace(scale=1 / np.sqrt(2))}  # variance 1


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("distribution", DENSITIES)
def test_the_threshold_zeroes_share_p_and_the_lost_energy_is_its_second_moment(distribution, p):
    density, tau = DENSITIES[distribution], float(threshold(p, distribution))
    assert density.cdf(tau) - density.cdf(-tau) == pytest.approx(p, abs=1e-12)
    share, _ = integrate.quad(lambda x: x**2 * density.pdf(x), -tau, tau, points=[0], epsabs=1e-12)
    assert float(energy_lost(p, distribution)) == pytest.approx(share, abs=1e-10)


@pytest.mark.parametrize(
    ("distribution", "p", "share"),
    [
        ("gaussian", 0.25, 0.008347),
        ("gaussian", 0.5, 0.071326),
        ("gaussian", 0.6, 0.12876),
        ("gaussian", 0.9, 0.56071),
        ("laplace", 0.5, 0.033313),
        ("laplace", 0.6, 0.065566),
        ("random", 0.6, 0.6),
    ],
)
def test_lost_energy_at_usual_sparsities(distribution, p, share):
    assert float(energy_lost(p, distribution)) == pytest.approx(share, rel=1e-4)


def test_the_gaussian_median_is_067449_standard_deviations():
    assert float(threshold(0.5)) == pytest.approx(0.67449, abs=1e-5)


def test_heavier_tails_lose_less_and_any_threshold_less_than_chance():
    p = np.linspace(0.01, 0.99, 99)
    assert (energy_lost(p, "laplace") < energy_lost(p, "gaussian")).all()
    assert (energy_lost(p, "gaussian") < energy_lost(p, "random")).all()
    assert (np.diff(energy_lost(p)) > 0).all()


def test_unknown_distributions_are_named():
    with pytest.raises(ValueError, match="distribution='cauchy': expected one of"):
        energy_lost(0.5, "cauchy")
    with pytest.raises(ValueError, match="distribution='random': thresholds are known for 'gaussian' and 'laplace'"):
        threshold(0.5, "random")

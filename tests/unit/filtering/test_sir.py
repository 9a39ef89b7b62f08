import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from labkit.filtering import TwoGroupSIR

RATES = ("beta1", "gamma1", "beta2", "gamma2")
STOICHIOMETRY = np.array([[-1, 0, 0, 0], [1, -1, 0, 0], [0, 0, -1, 0], [0, 0, 1, -1]])  # S1, I1, S2, I2 by reaction


def reaction_rates(x, beta, gamma, population, mixing):
    """a (4,) of the module's equation, by hand."""
    (s1, i1, s2, i2), (n1, n2) = x, population
    e1 = mixing[0][0] * i1 / n1 + mixing[0][1] * i2 / n2
    e2 = mixing[1][0] * i1 / n1 + mixing[1][1] * i2 / n2
    return np.array([beta[0] * s1 * e1, gamma[0] * i1, beta[1] * s2 * e2, gamma[1] * i2])


def deterministic(**changes):
    """An epidemic so large that chance does not matter: relative noise 1e-6."""
    n = 1e12
    return TwoGroupSIR.four_parameter(population=(n, n), infected=(0.02 * n, 0.01 * n), **changes)


def path(model, theta, steps):
    """States (steps + 1, 4) of the model's own transitions, in float64."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.tensor([theta], dtype=torch.float64)
    x = [model.initial(theta, 1, generator)]
    for _ in range(steps):
        x.append(model.transition(x[-1], theta, None, generator))
    return torch.stack(x)[:, 0, 0].numpy()


# one step


@pytest.mark.parametrize("dt", [0.1, 0.05])
def test_one_step_has_the_mean_and_covariance_of_the_langevin_equation(generator, dt):
    population, mixing, draws = (200, 150), ((0.8, 0.2), (0.3, 0.7)), 200_000
    model = TwoGroupSIR.four_parameter(population=population, mixing=mixing, dt=dt)
    x, theta = np.array([120.0, 50.0, 70.0, 40.0]), np.array([0.6, 0.3, 0.9, 0.2])
    moved = model.transition(torch.tensor(x).expand(1, draws, 4), torch.tensor(theta)[None], None, generator)[0].numpy()
    a = reaction_rates(x, theta[0::2], theta[1::2], population, mixing) * dt
    mean = x + STOICHIOMETRY @ a
    covariance = STOICHIOMETRY @ np.diag(a) @ STOICHIOMETRY.T + (1e-3 * dt + 1e-6) * np.eye(4)
    variance = np.diag(covariance)
    assert (np.abs(moved.mean(0) - mean) < 4 * np.sqrt(variance / draws)).all()
    stderr = np.sqrt((np.outer(variance, variance) + covariance**2) / draws)  # of a Gaussian sample covariance
    assert (np.abs(np.cov(moved.T) - covariance) < 4 * stderr).all()


def test_no_step_leaves_the_population(generator):
    model = TwoGroupSIR.four_parameter(dt=1.0, infected=(150, 0))
    theta = torch.rand((40, 4), generator=generator)
    x = model.initial(theta, 50, generator)
    touched = torch.zeros(4, dtype=torch.bool)
    for _ in range(60):
        x = model.transition(x, theta, None, generator)
        susceptible, infected = x[..., 0::2], x[..., 1::2]
        assert ((susceptible >= 0) & (susceptible <= 200)).all()
        assert ((infected >= 0) & (infected <= 200 - susceptible)).all()
        touched |= (x == 0).flatten(0, 1).any(0)
    assert touched.all()  # the bounds were met, not only approached


def test_equal_random_numbers_move_two_parameters_together():
    model = TwoGroupSIR()
    x = torch.tensor([150.0, 30.0, 160.0, 20.0]).expand(2, 500, 4)
    close, far = torch.tensor([[0.6, 0.2], [0.6, 0.2]]), torch.tensor([[0.601, 0.2], [0.9, 0.2]])
    base, moved = (model.transition(x, theta, None, torch.Generator().manual_seed(3)) for theta in (close, far))
    assert (base[0] - moved[0]).abs().max() < 0.01
    assert (base[1] - moved[1])[:, 0].abs().mean() > 0.2


# without chance


def test_without_chance_the_steps_approach_the_differential_equation_like_dt():
    theta, horizon = [0.65, 0.15, 0.55, 0.25], 20.0
    n = 1e12

    def slope(_, x):
        return STOICHIOMETRY @ reaction_rates(x, theta[0::2], theta[1::2], (n, n), ((0.9, 0.1), (0.1, 0.9)))

    start = [0.98 * n, 0.02 * n, 0.99 * n, 0.01 * n]
    exact = solve_ivp(slope, (0, horizon), start, rtol=1e-10, atol=1).y[:, -1]
    errors = []
    for dt in (0.1, 0.05, 0.025):
        steps = round(horizon / dt)
        errors.append(np.abs(path(deterministic(dt=dt), theta, steps)[-1] - exact).max() / n)
    assert errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.15)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)


def test_the_models_own_differential_equation_is_that_one():
    model, theta, times = TwoGroupSIR.four_parameter(), [0.65, 0.15, 0.55, 0.25], np.linspace(0, 30, 16)

    def slope(_, x):
        return STOICHIOMETRY @ reaction_rates(x, theta[0::2], theta[1::2], model.population, model.mixing)

    exact = solve_ivp(slope, (0, 30), [195, 5, 195, 5], t_eval=times, rtol=1e-10, atol=1e-10).y.T
    np.testing.assert_allclose(model.ode(torch.tensor(theta), times), exact, atol=1e-4)


def test_known_rates_complete_the_unknown_ones():
    two, four = TwoGroupSIR(), TwoGroupSIR.four_parameter()
    times = np.linspace(0, 10, 5)
    np.testing.assert_allclose(
        two.ode(torch.tensor([0.4, 0.3]), times), four.ode(torch.tensor([0.4, 0.3, 0.55, 0.15]), times), atol=1e-4
    )


def test_an_isolated_group_ends_at_the_final_size(generator):
    n, start = 1e12, 1e-3
    model = TwoGroupSIR(mixing=((1, 0), (0, 1)), population=(n, n), infected=(start * n, 0), dt=0.01)
    theta = torch.tensor([[0.65, 0.15], [0.5, 0.3]], dtype=torch.float64)
    x = model.initial(theta, 1, generator)
    for _ in range(7000):
        x = model.transition(x, theta, None, generator)
    for (beta, gamma), left in zip(theta.tolist(), (x[:, 0, 0] / n).tolist(), strict=True):
        assert math.log(left) == pytest.approx(-beta / gamma * (1 - left), abs=1e-2)
        assert left < 0.4


def test_a_group_that_nobody_infects_stays_healthy():
    model = TwoGroupSIR.seeded_outbreak(mixing=((1, 0), (0, 1)))
    x = path(model, [0.65, 0.15, 0.55, 0.15], 100)
    assert x[-1, 0] < 190
    assert (x[:, 2] > 198).all()


# tests of persons


def test_positive_tests_are_shared_by_the_logit():
    model = TwoGroupSIR(sensitivity=(0.95, 0.5), tests=100, population=(200, 400))
    x = torch.tensor([[150.0, 40.0, 300.0, 60.0]], dtype=torch.float64)
    share = 0.3
    rates = model.positive_rates(x, torch.logit(torch.tensor([share], dtype=torch.float64)))
    assert rates[0].tolist() == pytest.approx([100 * 0.3 * 0.95 * 40 / 200, 100 * 0.7 * 0.5 * 60 / 400])


def test_without_infection_a_rate_is_the_floor():
    rates = TwoGroupSIR().positive_rates(torch.tensor([200.0, 0.0, 200.0, 0.0]), torch.zeros(1))
    assert rates.tolist() == pytest.approx([1e-12, 1e-12])


@pytest.mark.parametrize("logit", [-20.0, 20.0])
def test_a_group_without_tests_stays_above_the_floor(logit):
    rates = TwoGroupSIR().positive_rates(torch.tensor([150.0, 50.0, 150.0, 50.0]), torch.tensor([logit]))
    assert float(rates.min()) == pytest.approx(100 * math.exp(-20) * 0.25 * (0.95 if logit < 0 else 0.5), rel=1e-4)


def test_share_and_design_are_inverse_and_clipped():
    share = torch.tensor([0.01, 0.25, 0.5, 0.9])
    torch.testing.assert_close(TwoGroupSIR.share(TwoGroupSIR.design_of_share(share)), share)
    assert TwoGroupSIR.design_of_share(torch.tensor([0.0, 1.0])).tolist() == [-6, 6]
    assert float(TwoGroupSIR.design_of_share(0.5)) == 0


def test_random_shares_are_uniform(generator):
    share = TwoGroupSIR.share(TwoGroupSIR().sample_designs(20_000, generator))
    assert share.shape == (20_000, 1)
    assert float(share.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 20_000))
    assert float(share.var()) == pytest.approx(1 / 12, rel=0.03)


# presets and arguments


def test_the_presets_are_the_papers_and_ours():
    two, four, seeded = TwoGroupSIR.two_parameter(), TwoGroupSIR.four_parameter(), TwoGroupSIR.seeded_outbreak()
    assert two.param_names == ("beta1", "gamma1")
    assert four.param_names == seeded.param_names == RATES
    assert two.truth.tolist() == pytest.approx([0.65, 0.15])
    assert four.truth.tolist() == pytest.approx([0.65, 0.15, 0.55, 0.15])
    assert two.start.tolist() == four.start.tolist() == [195, 5, 195, 5]
    assert seeded.start.tolist() == [195, 5, 200, 0]
    assert TwoGroupSIR.seeded_outbreak(tests=30, infected=(0, 7)).start.tolist() == [200, 0, 193, 7]
    low, high = two.prior().base_dist.low, two.prior().base_dist.high
    assert (low.tolist(), high.tolist()) == (pytest.approx([0.1, 0.1]), [1, 1])


def test_a_model_is_a_value():
    assert TwoGroupSIR(mixing=np.eye(2)) == TwoGroupSIR(mixing=((1, 0), (0, 1)))
    assert hash(TwoGroupSIR()) == hash(TwoGroupSIR.two_parameter())
    assert TwoGroupSIR() != TwoGroupSIR(tests=50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tests": 0}, "tests=0: must be positive"),
        ({"tests": math.nan}, "tests=nan: must be positive"),
        ({"sensitivity": (0.9, 0)}, r"sensitivity=\(0\.9, 0\.0\): must be in \(0, 1\]"),
        ({"sensitivity": (1.1, 0.5)}, r"sensitivity=\(1\.1, 0\.5\)"),
        ({"sensitivity": 0.5}, "sensitivity=0.5: expected 2 numbers"),
        ({"population": (200, 0)}, r"population=\(200\.0, 0\.0\): must be positive"),
        ({"population": (200, 200, 200)}, r"population=\(200, 200, 200\): expected 2 numbers"),
        ({"infected": (201, 5)}, r"infected=\(201\.0, 5\.0\): must be between 0 and the population \(200\.0, 200\.0\)"),
        ({"infected": (-1, 5)}, r"infected=\(-1\.0, 5\.0\)"),
        ({"mixing": ((0.9, -0.1), (0.1, 0.9))}, r"mixing=\(\(0\.9, -0\.1\), \(0\.1, 0\.9\)\): must be a 2 x 2 matrix"),
        ({"mixing": (0.9, 0.1)}, r"mixing=\(0\.9, 0\.1\): expected a 2 x 2 matrix of numbers >= 0"),
        ({"mixing": ((math.nan, 0), (0, 1))}, "mixing="),
        ({"dt": 0}, "dt=0: must be positive"),
        ({"dt": -0.1}, "dt=-0.1: must be positive"),
        ({"beta1": 1.2}, r"beta1=1\.2: the truth lies outside the prior's box \[0\.1, 1\]"),
        ({"gamma2": -0.1}, r"gamma2=-0\.1: a rate must be >= 0"),
        ({"params": ("beta1", "delta")}, r"params=\('beta1', 'delta'\): expected different names out of \('beta1',"),
        ({"params": ("beta1", "beta1")}, r"params=\('beta1', 'beta1'\)"),
        ({"params": ()}, r"params=\(\)"),
        ({"prior_box": (1.0, 0.1)}, r"prior_box=\(1\.0, 0\.1\): expected 0 <= low < high"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TwoGroupSIR(**changes)


def test_a_known_rate_may_lie_outside_the_box():
    assert TwoGroupSIR(beta2=1.5).truth.tolist() == pytest.approx([0.65, 0.15])


@pytest.mark.parametrize("share", [-0.1, 1.1, [0.5, float("nan")]])
def test_a_share_lies_between_none_and_all(share):
    with pytest.raises(ValueError, match=r"share=.*: expected numbers in \[0, 1\]"):
        TwoGroupSIR.design_of_share(share)

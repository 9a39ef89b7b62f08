import math

import numpy as np
import pytest
import torch
from filterpy.kalman import KalmanFilter

from labkit.filtering import LinearGaussianSSM


def kalman(model):
    """filterpy's filter of the state (x, θ)."""
    transition, noise, mean, covariance = (part.numpy() for part in model.augmented())
    reference = KalmanFilter(dim_x=2, dim_z=1)
    reference.F, reference.Q, reference.P, reference.R = transition, noise, covariance, np.array([[model.r**2]])
    reference.x = mean[:, None]
    return reference


def closed_form(model, design, covariance):
    """One step's information about θ, from the joint covariance of (x, θ) before it."""
    variance = covariance[1, 1]
    c = covariance[0, 1] / variance
    rest = covariance[0, 0] - c * covariance[0, 1]
    design = torch.tensor([design], dtype=torch.float64)
    return float(model.closed_form_eig(design, c=c, P=rest, s=math.sqrt(variance)))


def test_the_closed_form_has_the_tabulated_value_and_slope():
    design = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    information = LinearGaussianSSM().closed_form_eig(design, c=1.5, P=0.1, s=0.5)
    information.backward()
    assert information.item() == pytest.approx(0.3894, abs=5e-5)
    assert design.grad.item() == pytest.approx(0.9241, abs=5e-5)


def test_the_closed_form_is_half_the_log_ratio_of_kalman_variances():
    model, s, c, rest = LinearGaussianSSM(a=0.7, q=0.4, r=0.6), 0.8, -0.3, 0.25
    for gain in (0.1, 1.0, -2.0):
        reference = kalman(model)
        reference.P = np.array([[c**2 * s**2 + rest, c * s**2], [c * s**2, s**2]])
        expected = closed_form(model, gain, reference.P)
        reference.predict()
        reference.update([0.3], H=np.array([[gain, 0.0]]))
        assert math.log(s**2 / reference.P[1, 1]) / 2 == pytest.approx(expected, abs=1e-12)


def test_the_informations_of_all_steps_add_up_to_the_variance_reduction():
    model, reference, total = LinearGaussianSSM(), None, 0.0
    reference = kalman(model)
    for gain in np.random.default_rng(0).uniform(0.5, 2, 30):
        total += closed_form(model, gain, reference.P)
        reference.predict()
        reference.update([0.0], H=np.array([[gain, 0.0]]))
    assert total == pytest.approx(math.log(model.prior_sd**2 / reference.P[1, 1]) / 2, abs=1e-9)


def test_a_blind_observation_brings_nothing_and_a_clear_one_the_most():
    model = LinearGaussianSSM()
    gains = torch.tensor([[0.0], [0.5], [1.0], [-1.0], [1e6]], dtype=torch.float64)
    information = model.closed_form_eig(gains, c=1.5, P=0.1, s=0.5)
    assert information.shape == (5,)
    assert float(information[0]) == 0
    assert float(information[2]) == float(information[3])
    limit = math.log1p((0.9 * 1.5 + 1) ** 2 * 0.25 / (0.81 * 0.1 + 0.09)) / 2
    assert information[0] < information[1] < information[2] < information[4]
    assert float(information[4]) == pytest.approx(limit)


def test_one_step_is_the_augmented_matrices(generator):
    model, draws = LinearGaussianSSM(), 200_000
    transition, noise, mean, covariance = model.augmented()
    theta = model.prior_sd * torch.randn((draws, 1), generator=generator)
    x = model.initial(theta, 1, generator)
    z = torch.cat((x[:, 0], theta), 1).double()
    torch.testing.assert_close(z.mean(0), mean, rtol=0, atol=4 * 0.5 / math.sqrt(draws))
    torch.testing.assert_close(z.T.cov(), covariance, rtol=0, atol=0.004)
    moved = torch.cat((model.transition(x, theta, None, generator)[:, 0], theta), 1).double()
    torch.testing.assert_close(moved.T.cov(), transition @ covariance @ transition.T + noise, rtol=0, atol=0.008)


def test_an_observation_is_the_gained_state_in_noise():
    law = LinearGaussianSSM().observation(torch.tensor([[2.0], [-1.0]]), torch.tensor([0.5]))
    assert law.mean.tolist() == [[1.0], [-0.5]]
    assert law.stddev.flatten().tolist() == [0.5, 0.5]


def test_random_gains_are_uniform_between_a_half_and_two(generator):
    gains = LinearGaussianSSM().sample_designs(20_000, generator)
    assert gains.shape == (20_000, 1)
    assert 0.5 <= float(gains.min()) < 0.51
    assert 1.99 < float(gains.max()) <= 2
    assert float(gains.mean()) == pytest.approx(1.25, abs=4 * 1.5 / math.sqrt(12 * 20_000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": math.nan}, "a=nan: must be finite"),
        ({"q": -0.1}, "q=-0.1: must be >= 0"),
        ({"r": 0}, "r=0: must be positive"),
        ({"prior_sd": 0}, "prior_sd=0: must be positive"),
        ({"initial_sd": -1}, "initial_sd=-1: must be >= 0"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LinearGaussianSSM(**changes)

import dataclasses
import math

import numpy as np
import pytest
import torch

from labkit.filtering import MovingSource, log_likelihood, wrap

STATES = 3 * torch.randn((50, 3), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ANGLES = 2 * torch.randn((20, 2), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def log_intensity(x, angle, sensor, b=0.1, alpha=5.0, m=0.1, d=1.0, k=4.0):
    """log μ of one state at one sensor, as the paper writes it."""
    dx, dy = x[0] - sensor[0], x[1] - sensor[1]
    bearing = math.atan2(dy, dx)
    lobe = ((1 + d * math.cos(angle - bearing)) / (1 + d)) ** k
    return math.log(b + alpha / (m + dx**2 + dy**2) * lobe)


@pytest.mark.parametrize(("d", "k"), [(1.0, 4.0), (0.3, 2.5), (0.0, 1.0)])
def test_the_intensity_is_the_papers_cardioid(d, k):
    model = MovingSource(directivity=d, focus=k)
    for angle in ANGLES[:5]:
        found = model.mean_log_intensity(STATES, angle)
        expected = [[log_intensity(x, a, s, d=d, k=k) for a, s in zip(angle, model.sensors, strict=True)] for x in STATES]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_a_full_turn_changes_nothing():
    model = MovingSource()
    y = torch.tensor([0.3, -1.0])
    for turn in (-2 * math.pi, 2 * math.pi, 4 * math.pi):
        for x, angle in ((STATES, ANGLES[0]), (STATES.float(), ANGLES[0].float())):
            difference = log_likelihood(model, y, x, angle + turn) - log_likelihood(model, y, x, angle)
            scale = log_likelihood(model, y, x, angle).abs().clamp(min=1)
            assert (difference / scale).abs().max() < 1e-5
            moved = model.mean_log_intensity(x, angle + turn) - model.mean_log_intensity(x, angle)
            assert moved.abs().max() < 1e-5


def test_a_sensor_that_looks_away_hears_the_background_exactly():
    model = MovingSource(sensors=((3, 0),))
    for dtype in (torch.float32, torch.float64):
        offsets = STATES[:, :2].to(dtype)
        x = torch.cat((offsets + torch.tensor([3.0, 0.0]), STATES[:, 2:].to(dtype)), -1)
        away = torch.atan2(x[:, 1], x[:, 0] - 3) + math.pi
        heard = model.mean_log_intensity(x, away[:, None])
        torch.testing.assert_close(heard, torch.full_like(heard, math.log(0.1)), rtol=0, atol=1e-6)


def test_a_sensor_hears_most_where_it_looks():
    model = MovingSource(sensors=((0, 0),))
    x = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    angles = torch.linspace(-math.pi, math.pi, 721, dtype=torch.float64)[:, None]
    heard = model.mean_log_intensity(x, angles)
    assert float(angles[heard.argmax()]) == pytest.approx(math.pi / 4)
    assert float(heard.max()) == pytest.approx(math.log(0.1 + 5 / (0.1 + 2)))


def test_swapping_the_axes_swaps_nothing_else():
    model = MovingSource(sensors=((3, 0.5), (-1, 2)))
    mirrored = MovingSource(sensors=((0.5, 3), (2, -1)))
    for angle in ANGLES:
        torch.testing.assert_close(
            mirrored.mean_log_intensity(STATES[:, [1, 0, 2]], math.pi / 2 - angle),
            model.mean_log_intensity(STATES, angle),
            rtol=0,
            atol=1e-9,
        )


def test_at_the_sensor_itself_intensity_and_slope_are_finite():
    model = MovingSource()
    angle = torch.tensor([0.4, 0.2], requires_grad=True)
    heard = model.mean_log_intensity(torch.tensor([3.0, 0.0, 1.0]), angle)
    heard.sum().backward()
    assert heard.isfinite().all()
    assert heard.tolist()[0] == pytest.approx(math.log(0.1 + 50 / 16))
    assert angle.grad.isfinite().all()


def test_a_sensor_more_leaves_the_others_as_they_were():
    two, three = MovingSource(), MovingSource(sensors=((3, 0), (0, 3), (-2, -2)))
    angle = torch.tensor([0.4, 0.2, -1.0], dtype=torch.float64)
    torch.testing.assert_close(three.mean_log_intensity(STATES, angle)[:, :2], two.mean_log_intensity(STATES, angle[:2]))
    assert three.obs_dim == three.design_dim == len(three.obs_names) == len(three.design_names) == 3


@pytest.mark.parametrize(("noise", "factor"), [("paper", 1.0), ("low_noise", 0.1)])
def test_one_step_has_the_mean_and_covariance_of_the_source(generator, noise, factor):
    model, draws = MovingSource(noise), 200_000
    x, theta = torch.tensor([0.5, -1.0, 0.7], dtype=torch.float64), torch.tensor([[1.2, 0.8]], dtype=torch.float64)
    moved = model.transition(x.expand(1, draws, 3), theta, None, generator)[0].numpy()
    mean = [0.5 + 0.12 * math.cos(0.7), -1 + 0.08 * math.sin(0.7), 0.73]
    variance = factor * 0.1 * np.array([0.2, 0.2, 0.01])
    assert (np.abs(moved.mean(0) - mean) < 4 * np.sqrt(variance / draws)).all()
    np.testing.assert_allclose(np.cov(moved.T), np.diag(variance), atol=4 * variance.max() * math.sqrt(2 / draws))
    np.testing.assert_allclose(moved.var(0), variance, rtol=4 * math.sqrt(2 / draws))


def test_a_heading_is_wrapped(generator):
    model = MovingSource(process=(0, 0, 0), initial_sd=0)
    theta = torch.ones(1, 2)
    x = model.initial(theta, 1, generator)
    headings = []
    for _ in range(150):
        x = model.transition(x, theta, None, generator)
        headings.append(float(x[0, 0, 2]))
    np.testing.assert_allclose(np.exp(1j * np.array(headings)), np.exp(0.03j * np.arange(1, 151)), atol=1e-4)
    assert max(headings) <= math.pi
    assert min(headings) < -3


def test_a_wrapped_angle_lies_in_the_half_open_turn():
    angles = torch.tensor([0, math.pi, -math.pi, 3 * math.pi, 1.5 * math.pi, -7.0], dtype=torch.float64)
    expected = [0, math.pi, math.pi, math.pi, -math.pi / 2, -7 + 2 * math.pi]
    assert wrap(angles).tolist() == pytest.approx(expected)


def test_without_noise_the_source_drives_a_circle(generator):
    model = MovingSource(process=(0, 0, 0), initial_sd=0, dt=0.01)
    theta = torch.ones(1, 2, dtype=torch.float64)
    x = model.initial(theta, 1, generator)
    for _ in range(1000):
        x = model.transition(x, theta, None, generator)
    # p(t) = (sin, 1 − cos)(0.3 t) / 0.3
    assert x[0, 0, :2].tolist() == pytest.approx([math.sin(3) / 0.3, (1 - math.cos(3)) / 0.3], abs=0.02)


@pytest.mark.parametrize(("noise", "bound"), [("paper", 0.71), ("low_noise", 2.43)])
def test_the_full_state_bound_after_50_steps(noise, bound):
    assert MovingSource(noise).full_state_bound(50) == pytest.approx(bound, abs=0.005)


def test_the_full_state_bound_is_the_gaussian_channels_capacity():
    model, steps = MovingSource(), 30
    heading = 0.3 * 0.1 * np.arange(steps)
    information = 0.0
    for regressor in (np.cos(heading), np.sin(heading)):  # Δp = Δt v cos φ + N(0, q Δt), v ~ N(1, 1/12)
        regressor = 0.1 * regressor[:, None]
        covariance = 0.02 * np.eye(steps) + regressor @ regressor.T / 12
        information += (np.linalg.slogdet(covariance)[1] - steps * math.log(0.02)) / 2
    assert model.full_state_bound(steps) == pytest.approx(information)
    assert model.full_state_bound(0) == 0


def test_random_directions_are_uniform(generator):
    angles = MovingSource().sample_designs(20_000, generator)
    assert angles.shape == (20_000, 2)
    assert (angles.abs() <= math.pi + 1e-6).all()
    assert float(angles.mean()) == pytest.approx(0, abs=4 * math.pi / math.sqrt(3 * 40_000))
    assert float(angles.var()) == pytest.approx(math.pi**2 / 3, rel=0.03)


def test_the_source_starts_near_the_origin(generator):
    x = MovingSource().initial(torch.ones(100, 2), 200, generator)
    assert x.shape == (100, 200, 3)
    assert float(x.std()) == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": "loud"}, "noise='loud': expected one of paper, low_noise"),
        ({"sensors": ()}, r"sensors=\(\): expected at least one pair"),
        ({"sensors": (3, 0)}, r"sensors=\(3, 0\)"),
        ({"sensors": ((3, math.inf),)}, "sensors="),
        ({"dt": 0}, "dt=0: must be positive"),
        ({"velocity": (1, 2)}, r"velocity=\(1\.0, 2\.0\): the truth lies outside the prior's box \[0\.5, 1\.5\]"),
        ({"prior_box": (1.5, 0.5)}, r"prior_box=\(1\.5, 0\.5\): expected low < high"),
        ({"process": (0.2, 0.2)}, r"process=\(0\.2, 0\.2\): expected 3 numbers"),
        ({"initial_sd": -1}, "initial_sd=-1: must be >= 0"),
        ({"background": 0}, "background=0: must be positive"),
        ({"strength": math.nan}, "strength=nan: must be >= 0"),
        ({"softening": 0}, "softening=0: must be positive"),
        ({"directivity": 1.1}, r"directivity=1\.1: must be in \[0, 1\]"),
        ({"focus": 0}, "focus=0: must be positive"),
        ({"noise_sd": 0}, "noise_sd=0: must be positive"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MovingSource(**changes)


def test_a_model_is_a_value():
    assert MovingSource(sensors=np.array([[3, 0], [0, 3]])) == MovingSource()
    assert dataclasses.replace(MovingSource(), noise="low_noise") == MovingSource("low_noise")


@pytest.mark.parametrize("steps", [-1, 1.5])
def test_a_bound_needs_a_number_of_steps(steps):
    with pytest.raises(ValueError, match=f"steps={steps}: expected an int >= 0"):
        MovingSource().full_state_bound(steps)

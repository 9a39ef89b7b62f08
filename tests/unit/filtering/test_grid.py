import dataclasses
import math

import numpy as np
import particles
import pytest
import torch
from filterpy.kalman import KalmanFilter
from particles import distributions as dists
from particles import state_space_models
from scipy import stats

from labkit.filtering import (
    LinearGaussianSSM,
    MovingSource,
    NestedParticleFilter,
    TwoGroupSIR,
    evidence,
    grid_posterior,
    log_likelihood,
    simulate,
    truth_generator,
)
from labkit.filtering import grid as grid_module

AXIS = torch.linspace(-1.5, 1.5, 101, dtype=torch.float64)


def kalman(model, designs, ys, theta=None):
    """log p(y | θ), or for θ unknown: log p(y), and mean and standard deviation of θ; by filterpy."""
    reference = KalmanFilter(dim_x=2, dim_z=1)
    reference.F, reference.Q, mean, covariance = (part.numpy().copy() for part in model.augmented())
    if theta is not None:
        mean[1], covariance[1, 1] = theta, 0
    reference.x, reference.P, reference.R = mean[:, None], covariance, np.array([[model.r**2]])
    total = 0.0
    for design, y in zip(designs.numpy(), ys.numpy(), strict=True):
        reference.predict()
        reference.update(y, H=np.array([[design[0], 0.0]]))
        total += reference.log_likelihood
    return total, reference.x[1, 0], math.sqrt(reference.P[1, 1])


@pytest.fixture(scope="module")
def linear():
    """A run of the linear-Gaussian model, its grid posterior and its exact one."""
    model, generator = LinearGaussianSSM(), truth_generator(0)
    designs = model.sample_designs(12, generator)
    _, ys = simulate(model, model.truth, designs, generator)
    return model, designs, ys, grid_posterior(model, designs, ys, [AXIS], num_states=1500)


# against exact answers


def test_the_grid_posterior_is_kalmans(linear):
    model, designs, ys, posterior = linear
    total, mean, std = kalman(model, designs, ys)
    assert float(posterior.mean) == pytest.approx(mean, abs=0.05 * std)
    assert float(posterior.std) == pytest.approx(std, rel=0.05)
    spacing = 0.03  # the grid's sum of prior × likelihood stands for the integral
    correction = math.log(spacing * stats.norm(0, 0.5).pdf(AXIS.numpy()).sum())
    assert correction == pytest.approx(0, abs=0.01)
    assert posterior.log_evidence_total == pytest.approx(total, abs=0.05)


def test_each_grid_point_has_the_evidence_of_its_parameter(linear):
    model, designs, ys, posterior = linear
    assert posterior.log_evidence.shape == (101,)
    for index in (60, 68, 75):  # inside the posterior; far outside, no state comes near the observations
        exact, _, _ = kalman(model, designs, ys, theta=float(AXIS[index]))
        assert float(posterior.log_evidence[index]) == pytest.approx(exact, abs=0.4)


def test_the_information_is_the_gaussian_divergence(linear):
    model, designs, ys, posterior = linear
    _, mean, std = kalman(model, designs, ys)
    expected = math.log(0.5 / std) + (std**2 + mean**2) / (2 * 0.25) - 0.5
    assert posterior.kl_to_prior == pytest.approx(expected, abs=0.05)


def test_the_evidence_of_a_parameter_is_kalmans(linear):
    model, designs, ys, _ = linear
    for theta in (0.2, 0.5):
        exact, _, _ = kalman(model, designs, ys, theta)
        assert evidence(model, [theta], designs, ys, num_states=4000) == pytest.approx(exact, abs=0.15)


def test_the_evidence_is_unbiased(linear):
    model, designs, ys, _ = linear
    designs, ys = designs[:4], ys[:4]
    exact, _, _ = kalman(model, designs, ys, 0.3)
    ratios = [math.exp(evidence(model, [0.3], designs, ys, 20, seed=s) - exact) for s in range(300)]
    assert abs(np.mean(ratios) - 1) < 3 * np.std(ratios) / math.sqrt(300)


class Draws(dists.ProbDist):
    """A law of `particles` that is only drawn from."""

    def __init__(self, rvs):
        self.rvs = rvs


class Density(dists.ProbDist):
    """A law of `particles` that is only evaluated."""

    def __init__(self, logpdf):
        self.logpdf = logpdf


def in_particles(model, designs, generator):
    """A model under given designs (T, dξ) as a class of `particles`, whose time 0 is our first observation."""

    class Model(state_space_models.StateSpaceModel):
        def theta(self):
            return torch.tensor([[float(getattr(self, name)) for name in model.param_names]])

        def move(self, x):
            return model.transition(x, self.theta(), None, generator)[0].numpy()

        def PX0(self):
            return Draws(lambda size: self.move(model.initial(self.theta(), size, generator)))

        def PX(self, t, xp):
            return Draws(lambda size: self.move(torch.tensor(xp)[None]))

        def PY(self, t, xp, x):
            return Density(lambda y: log_likelihood(model, y, torch.tensor(x), designs[t]).numpy())

    return Model


def test_the_epidemics_evidence_is_that_of_particles(run, generator):
    model = TwoGroupSIR()
    designs, _, ys = run(model, 40)
    ssm = in_particles(model, designs, generator)(beta1=0.5, gamma1=0.2)
    np.random.seed(0)  # noqa: NPY002  particles knows no other
    peer = []
    for _ in range(4):
        smc = particles.SMC(fk=state_space_models.Bootstrap(ssm=ssm, data=ys), N=2000, collect="off")
        smc.run()
        peer.append(float(smc.logLt))
    ours = [evidence(model, [0.5, 0.2], designs, ys, num_states=2000, seed=seed) for seed in range(4)]
    stderr = math.sqrt((np.var(peer, ddof=1) + np.var(ours, ddof=1)) / 4)
    assert np.mean(ours) == pytest.approx(np.mean(peer), abs=4 * stderr)
    assert stderr < 0.2


# the epidemic's posterior


def test_two_references_of_the_epidemic_agree_and_the_nested_filter_with_them(run):
    model = TwoGroupSIR()
    designs, _, ys = run(model, 100, seed=1, design=[0.0])
    axes = [torch.linspace(a, b, 13, dtype=torch.float64) for a, b in ((0.3, 0.98), (0.1, 0.28))]
    first, second = (grid_posterior(model, designs, ys, axes, num_states=2000, seed=seed) for seed in (0, 1))
    assert ((first.mean - second.mean).abs() < 0.1 * first.std).all()
    assert ((first.std / second.std - 1).abs() < 0.1).all()
    nested = NestedParticleFilter(model, 1000, 30)
    for design, y in zip(designs, ys, strict=True):
        step = nested.step(design, y)
    assert ((step.theta_mean - first.mean).abs() < 0.6 * first.std).all()
    ratio = step.theta_std / first.std
    assert ((ratio > 0.8) & (ratio < 1.5)).all()


# the grid itself


def test_the_grid_is_made_of_the_midpoints_of_equal_cells(run):
    model = MovingSource("low_noise")
    designs, _, ys = run(model, 3)
    posterior = grid_posterior(model, designs, ys, 5, num_states=30)
    assert [axis.tolist() for axis in posterior.axes] == [pytest.approx([0.6, 0.8, 1.0, 1.2, 1.4])] * 2
    assert posterior.log_evidence.shape == posterior.probability.shape == (5, 5)


def test_mean_spread_and_information_are_those_of_the_probabilities(run):
    model = MovingSource("low_noise")
    designs, _, ys = run(model, 10)
    axes = [np.linspace(0.5, 1.5, 7), np.linspace(0.6, 1.4, 4)]
    posterior = grid_posterior(model, designs, ys, axes, num_states=40)
    likelihood = (posterior.log_evidence - posterior.log_evidence.max()).exp().numpy()
    probability = likelihood / likelihood.sum()
    np.testing.assert_allclose(posterior.probability, probability, atol=1e-12)
    for j, marginal in enumerate((probability.sum(1), probability.sum(0))):
        assert float(posterior.mean[j]) == pytest.approx((marginal * axes[j]).sum())
        assert float(posterior.std[j]) == pytest.approx(
            math.sqrt((marginal * axes[j] ** 2).sum() - float(posterior.mean[j]) ** 2)
        )
    assert posterior.kl_to_prior == pytest.approx((probability * np.log(probability * 28)).sum())
    assert posterior.log_evidence_total == pytest.approx(float(posterior.log_evidence.exp().mean().log()))


def test_three_parameters_are_possible_and_four_are_not(run):
    designs, _, ys = run(TwoGroupSIR(), 4)
    three = TwoGroupSIR(params=("beta1", "gamma1", "beta2"))
    assert grid_posterior(three, designs, ys, 3, num_states=10).probability.shape == (3, 3, 3)
    with pytest.raises(
        ValueError, match=r"model has dθ=4 parameters: a grid is possible for at most 3, use NestedParticleFilter"
    ):
        grid_posterior(TwoGroupSIR.four_parameter(), designs, ys, 3)


def test_a_seed_determines_a_reference(run):
    model = TwoGroupSIR()
    designs, _, ys = run(model, 5)
    one, same, other = (grid_posterior(model, designs, ys, 4, num_states=20, seed=s).log_evidence.tolist() for s in (0, 0, 1))
    assert one == same != other
    assert evidence(model, model.truth, designs, ys, 50) == evidence(model, model.truth, designs, ys, 50)


def test_grid_points_are_filtered_in_parts_that_do_not_matter(run, monkeypatch):
    model = LinearGaussianSSM(q=0.0, initial_sd=0.0)  # without chance, so that the parts can be compared
    designs, _, ys = run(model, 4)
    whole = grid_posterior(model, designs, ys, [AXIS], num_states=2)
    monkeypatch.setattr(grid_module, "_CLOUD", 14)
    parts = grid_posterior(model, designs, ys, [AXIS], num_states=2)
    assert whole.log_evidence.tolist() == parts.log_evidence.tolist()
    exact = [kalman(model, designs, ys, float(theta))[0] for theta in AXIS]
    np.testing.assert_allclose(whole.log_evidence, exact, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": 1}, "grid=1: expected an int >= 2"),
        ({"grid": 2.5}, r"grid=2\.5: expected an int >= 2"),
        ({"grid": None}, "grid=None: expected an int >= 2"),
        ({"grid": [torch.ones(3)]}, r"grid has axes of shapes \[\(3,\)\]: expected 2 one-dimensional ones"),
        ({"grid": [torch.ones(2, 2), torch.ones(2)]}, r"grid has axes of shapes \[\(2, 2\), \(2,\)\]"),
        ({"grid": [[0.2, 0.3], [0.2, 1.3]]}, r"grid: the axis of gamma1 must ascend inside \[0\.1, 1\], got \[0\.2, 1\.3\]"),
        ({"grid": [[0.3, 0.2], [0.2, 0.3]]}, r"grid: the axis of beta1 must ascend"),
        ({"num_states": 0}, "num_states=0: expected an int >= 1"),
        ({"seed": 1.5}, r"seed=1\.5: expected an int >= 0"),
        ({"designs": torch.zeros(0, 1), "ys": torch.zeros(0, 2)}, r"designs of shape \(0, 1\): expected \(K, 1\) with K >= 1"),
        ({"ys": torch.zeros(3, 2)}, "ys has 3 rows and designs has 4: expected the same T >= 1"),
        ({"ys": -torch.ones(4, 2)}, r"y=\[-1\.0, -1\.0\]: expected whole numbers >= 0"),
        ({"ys": torch.zeros(4, 3)}, r"y of shape \(3,\): expected \(2,\)"),
        ({"ys": torch.full((4, 2), math.nan)}, "has NaN"),
        ({"ys": torch.full((4, 2), 1e30)}, "ys: no grid point explains the observations; widen the prior or raise num_states"),
    ],
)
def test_bad_arguments_are_refused(run, changes, message):
    designs, _, ys = run(TwoGroupSIR(), 4)
    arguments = {"designs": designs, "ys": ys, "grid": 3, "num_states": 10, "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        grid_posterior(TwoGroupSIR(), **arguments)


def test_an_unbounded_prior_needs_its_axis(run):
    model = LinearGaussianSSM()
    designs, _, ys = run(model, 4)
    with pytest.raises(ValueError, match=r"grid=5: the prior's box has no bounds, so give one axis for each of \('theta',\)"):
        grid_posterior(model, designs, ys, 5)


def test_the_evidence_of_no_parameter_is_refused(run):
    designs, _, ys = run(TwoGroupSIR(), 4)
    with pytest.raises(ValueError, match=r"theta of shape \(1,\): expected \(2,\), that is beta1/gamma1"):
        evidence(TwoGroupSIR(), [0.5], designs, ys)
    with pytest.raises(ValueError, match="model: dict lacks param_names"):
        evidence({}, [0.5], designs, ys)
    with pytest.raises(ValueError, match=r"theta=\[-1\.0, -1\.0\]: no state explains the observations"):
        evidence(TwoGroupSIR(), [-1.0, -1.0], designs, ys, 10)


def test_a_result_is_frozen(linear):
    with pytest.raises(dataclasses.FrozenInstanceError):
        linear[-1].mean = 0

import dataclasses
import math

import pytest
import torch
from torch.distributions import Independent, Normal

from labkit.design.online import eig, eig_grad, eig_grad_autograd
from labkit.filtering import (
    LinearGaussianSSM,
    MovingSource,
    NestedParticleFilter,
    TwoGroupSIR,
)
from tests.unit.design.online.beliefs import LG, SLOPE, SPREAD, filtered, gaussian

HALF = torch.tensor([0.5])  # ξ of the closed form


def belief(model, steps, dtype=torch.float64, **kwargs):
    """What a small nested filter believes, in double precision."""
    clouds = filtered(model, 60, 20, steps, **kwargs)
    return dataclasses.replace(clouds, theta=clouds.theta.to(dtype), x=clouds.x.to(dtype))


@pytest.fixture(scope="module")
def epidemic():
    return belief(TwoGroupSIR(), 25)


@pytest.fixture(scope="module")
def source():
    return belief(MovingSource("low_noise"), 15)


def mean_stderr(values):
    values = torch.stack(values).double()
    return values.mean(0), values.std(0) / len(values) ** 0.5


def test_gradient_has_the_derivative_of_the_closed_form_as_its_mean():
    at = HALF.clone().requires_grad_()
    (exact,) = torch.autograd.grad(LG.closed_form_eig(at[None], c=SLOPE, P=SPREAD, s=0.5).sum(), at)
    assert exact.item() == pytest.approx(0.9241, abs=5e-5)
    slopes = [eig_grad(gaussian(100, 50, seed), HALF, num_obs=1000, seed=seed)[1] for seed in range(60)]
    assert torch.stack(slopes).mean().item() == pytest.approx(exact.item(), abs=0.06)


CASES = [
    ("epidemic", "score"),
    ("source", "score"),
    ("source", "pathwise"),
]


@pytest.mark.parametrize("jackknife", [False, True])
@pytest.mark.parametrize(("name", "estimator"), CASES)
def test_kernel_agrees_with_reverse_mode_on_the_same_samples(name, estimator, jackknife, request):
    clouds = request.getfixturevalue(name)
    design = torch.tensor([1.0, 2.5], dtype=torch.float64)[: clouds.model.design_dim]
    options = {"estimator": estimator, "num_obs": 150, "jackknife": jackknife, "seed": 5}
    estimate, slope = eig_grad(clouds, design, **options)
    reference, expected = eig_grad_autograd(clouds, design, **options)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-10)
    torch.testing.assert_close(estimate.value, reference.value, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(estimate.stderr, reference.stderr)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize(("name", "estimator"), CASES)
def test_single_precision_keeps_three_digits_of_the_gradient(name, estimator, request):
    clouds = request.getfixturevalue(name)
    clouds = dataclasses.replace(clouds, theta=clouds.theta.float(), x=clouds.x.float())
    design = torch.tensor([1.0, 2.5])[: clouds.model.design_dim]
    _, slope = eig_grad(clouds, design, estimator=estimator, seed=5)
    _, expected = eig_grad_autograd(clouds, design, estimator=estimator, seed=5)
    assert slope.dtype == torch.float32
    torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("jackknife", [False, True])
def test_the_value_is_that_of_the_nested_estimate(jackknife, epidemic):
    design = torch.tensor([0.3])
    options = {"num_obs": 150, "jackknife": jackknife, "seed": 2}
    estimate, _ = eig_grad(epidemic, design, **options)
    torch.testing.assert_close(estimate.value, eig(epidemic, design[None], **options).value)


def test_score_and_pathwise_gradients_agree_in_the_mean_and_pathwise_spreads_less(source):
    design = torch.tensor([2.0, -1.0])
    slopes = {
        estimator: [eig_grad(source, design, estimator=estimator, seed=seed)[1] for seed in range(100)]
        for estimator in ("score", "pathwise")
    }
    (score, score_error), (pathwise, pathwise_error) = map(mean_stderr, slopes.values())
    assert ((score - pathwise).abs() < 3 * (score_error**2 + pathwise_error**2).sqrt()).all()
    assert (pathwise_error <= score_error).all()


def test_the_gradient_points_where_the_enumerated_gain_grows(epidemic):
    """The mean of the score estimator is the derivative of the exact sum, on the same clouds."""
    clouds, at = dataclasses.replace(epidemic, jitter=None), torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    mean, stderr = mean_stderr([eig_grad(clouds, at[0], num_obs=1200, seed=seed)[1] for seed in range(100)])
    exact = [torch.autograd.grad(eig(clouds, at, method="enumerate", seed=s).value.sum(), at)[0][0] for s in range(10)]
    assert (mean - torch.stack(exact).mean(0)).abs() < 3 * stderr
    assert stderr < 0.01


class Driven(LinearGaussianSSM):
    """The design pushes the state, x_t = a x + ξ θ + q w, and does not touch the observation y = x + r v."""

    def transition(self, x, theta, design, generator):
        return super().transition(x, design * theta, design, generator)

    def transition_log_prob(self, moved, x, theta, design):
        return Normal(self.a * x + (design * theta)[:, None], self.q).log_prob(moved).sum(-1)

    def observation(self, x, design):
        return super().observation(x, torch.ones(1))

    def natural(self, x, design):
        return super().natural(x, torch.ones(1))


class Both(Driven):
    """Here the design is also the gain of the observation."""

    observation, natural = LinearGaussianSSM.observation, LinearGaussianSSM.natural


@pytest.mark.parametrize("estimator", ["score", "pathwise"])
def test_a_design_that_moves_the_states_is_followed_through_the_transition(estimator):
    clouds, push = [gaussian(100, 50, seed, model=Driven(), slope=0.0) for seed in range(150)], torch.tensor([1.5])
    # y = ξ θ + Gaussian noise of variance a² P + q² + r², so I = ½ log(1 + ξ² s² / variance)
    variance, s = LG.a**2 * SPREAD + LG.q**2 + LG.r**2, 0.5
    exact = 1.5 * s**2 / (variance + 1.5**2 * s**2)
    slopes = [eig_grad(c, push, estimator=estimator, num_obs=500, seed=seed)[1] for seed, c in enumerate(clouds)]
    mean, stderr = mean_stderr(slopes)
    assert abs(mean.item() - exact) < 3 * stderr.item() + 0.02
    assert stderr < 0.1 * exact


@pytest.mark.parametrize("jackknife", [False, True])
@pytest.mark.parametrize("estimator", ["score", "pathwise"])
@pytest.mark.parametrize("model", [Driven(), Both()])
def test_kernel_agrees_with_reverse_mode_where_the_design_moves_the_states(model, estimator, jackknife):
    jitter = NestedParticleFilter(LG, 2, 1).jitter
    clouds = dataclasses.replace(gaussian(30, 20, model=model, dtype=torch.float64), jitter=jitter)
    options = {"estimator": estimator, "jackknife": jackknife}
    estimate, slope = eig_grad(clouds, torch.tensor([1.5]), **options)
    reference, expected = eig_grad_autograd(clouds, torch.tensor([1.5]), **options)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-10)
    torch.testing.assert_close(estimate.value, reference.value, rtol=1e-8, atol=1e-10)


def test_a_design_that_moves_the_states_needs_their_density():
    class Mute(Driven):
        transition_log_prob = property()  # as if there were none

    with pytest.raises(
        ValueError, match=r"Mute\.transition depends on the design; the gradient then needs transition_log_prob"
    ):
        eig_grad(gaussian(5, 4, model=Mute()), HALF, num_obs=20)


def test_a_density_of_the_wrong_shape_is_named():
    class Wide(Driven):
        def transition_log_prob(self, moved, x, theta, design):
            return super().transition_log_prob(moved, x, theta, design)[..., None]

    with pytest.raises(ValueError, match=r"transition_log_prob: Wide gave shape \(5, 4, 1\); expected \(5, 4\)"):
        eig_grad(gaussian(5, 4, model=Wide()), HALF, num_obs=20)


def test_a_design_without_any_effect_has_gradient_zero():
    class Deaf(LinearGaussianSSM):
        def observation(self, x, design):
            return super().observation(x, torch.ones(1))

        def natural(self, x, design):
            return super().natural(x, torch.ones(1))

    for gradient in (eig_grad, eig_grad_autograd):
        estimate, slope = gradient(gaussian(20, 20, model=Deaf()), HALF)
        assert slope.tolist() == [0]
        assert estimate.value > 0


def test_a_model_outside_the_exponential_family_takes_reverse_mode():
    class Laplace(LinearGaussianSSM):
        natural = statistic = property()  # hides the Gaussian's

        def observation(self, x, design):
            return Independent(torch.distributions.Laplace(design * x, self.r), 1)

    clouds, h = gaussian(40, 10, model=Laplace(), dtype=torch.float64), torch.tensor([[0.1]])
    slopes, differences = [], []
    for seed in range(40):
        estimate, slope = eig_grad(clouds, HALF, num_obs=400, seed=seed)
        assert estimate.value == eig(clouds, HALF[None], num_obs=400, seed=seed).value
        slopes.append(slope)
        ahead, back = (eig(clouds, HALF[None] + step, num_obs=400, seed=seed).value for step in (h, -h))
        differences.append((ahead - back) / 0.2)
    (mean, stderr), (expected, uncertainty) = map(mean_stderr, (slopes, differences))
    assert abs(mean - expected) < 3 * (stderr**2 + uncertainty**2).sqrt()
    assert stderr < 0.1 * expected
    with pytest.raises(ValueError, match="estimator='pathwise': expected Gaussian observations, got Laplace"):
        eig_grad(clouds, HALF, estimator="pathwise")


def test_reverse_mode_agrees_with_itself_in_several_blocks(source, monkeypatch):
    design = torch.tensor([2.0, -1.0])
    _, whole = eig_grad_autograd(source, design)
    monkeypatch.setitem(eig.__globals__, "_GRAPH", 60 * 20 * 7)  # seven observations
    _, parts = eig_grad_autograd(source, design)
    torch.testing.assert_close(parts, whole)


def test_many_observations_of_one_cloud_add_up(epidemic):
    """L > M: several observations of the same cloud share its derivatives."""
    options = {"num_obs": 60 * 20, "seed": 1}
    _, slope = eig_grad(epidemic, torch.tensor([0.3]), **options)
    _, expected = eig_grad_autograd(epidemic, torch.tensor([0.3]), **options)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-10)


def test_gradients_are_taken_even_where_autograd_is_off(epidemic):
    with torch.no_grad():
        for gradient in (eig_grad, eig_grad_autograd):
            assert gradient(epidemic, torch.tensor([0.3]))[1].abs() > 0


def test_equal_seeds_give_equal_gradients_and_touch_no_global_state(epidemic):
    state = torch.random.get_rng_state()
    slopes = [eig_grad(epidemic, torch.tensor([0.3]), seed=seed)[1] for seed in (1, 1, 2)]
    assert slopes[0] == slopes[1]
    assert slopes[0] != slopes[2]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("gradient", [eig_grad, eig_grad_autograd])
def test_a_gradient_that_is_not_finite_becomes_zero_and_is_reported(gradient):
    class Steep(LinearGaussianSSM):
        """The square root has an infinite slope at ξ = 0."""

        def natural(self, x, design):
            return super().natural(x, design.abs().sqrt())

        def observation(self, x, design):
            return super().observation(x, design.abs().sqrt())

    estimate, slope = gradient(gaussian(10, 10, model=Steep()), torch.zeros(1), num_obs=30)
    assert slope.tolist() == [0]
    assert estimate.num_nonfinite == 30
    assert estimate.value.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "reinforce"}, "estimator='reinforce': expected one of score, pathwise"),
        ({"estimator": "pathwise"}, "estimator='pathwise': expected Gaussian observations, got Poisson; take 'score'"),
        ({"num_obs": 201}, "num_obs=201: expected an int from 1 to M·N = 200"),
        ({"seed": True}, "seed=True: expected an int"),
        ({"design": torch.zeros(2)}, r"design of shape \(2,\): expected \(1,\)"),
        ({"design": torch.tensor([math.inf])}, r"design=\[inf\]: expected finite numbers"),
        ({"design": torch.zeros(1).half()}, "design is torch.float16"),
    ],
)
@pytest.mark.parametrize("gradient", [eig_grad, eig_grad_autograd])
def test_bad_arguments_are_named(gradient, changes, message):
    arguments = {"design": torch.zeros(1)} | changes
    with pytest.raises(ValueError, match=message):
        gradient(NestedParticleFilter(TwoGroupSIR(), 20, 10), **arguments)


def test_an_odd_number_of_states_cannot_be_halved():
    with pytest.raises(ValueError, match="N=5 states per parameter: the jackknife halves every cloud"):
        eig_grad(NestedParticleFilter(TwoGroupSIR(), 20, 5), torch.zeros(1), num_obs=50, jackknife=True)

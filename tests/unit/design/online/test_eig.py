import dataclasses
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from filterpy.kalman import KalmanFilter
from pyro.contrib.oed.eig import nmc_eig
from scipy.stats import poisson
from torch.distributions import Bernoulli, Binomial, Categorical, Independent, MultivariateNormal, Normal, Uniform

import labkit.design.online
from labkit.design.online.eig import eig, lattice, nested_terms
from labkit.filtering import (
    Clouds,
    LinearGaussianSSM,
    MovingSource,
    NestedParticleFilter,
    TwoGroupSIR,
    simulate,
    truth_generator,
)
from tests.unit.design.online.beliefs import LG, SLOPE, SPREAD, filtered, gaussian

HALF = torch.tensor([[0.5]])  # ξ of the closed form


@pytest.fixture(scope="module")
def epidemic():
    return filtered(TwoGroupSIR(), 60, 20, 25)


@pytest.fixture(scope="module")
def source():
    return filtered(MovingSource("low_noise"), 60, 20, 15)


def mean_stderr(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def test_nested_estimate_has_the_closed_form_as_its_mean():
    exact = LG.closed_form_eig(HALF, c=SLOPE, P=SPREAD, s=0.5).item()
    assert exact == pytest.approx(0.3894, abs=5e-5)
    values = [eig(gaussian(100, 50, seed), HALF, num_obs=1000, seed=seed).value.item() for seed in range(60)]
    assert np.mean(values) == pytest.approx(exact, abs=0.02)


def test_quadrature_has_the_closed_form_as_its_limit():
    exact = LG.closed_form_eig(HALF, c=SLOPE, P=SPREAD, s=0.5).item()
    clouds = gaussian(4000, 100)
    clouds = dataclasses.replace(clouds, theta=clouds.theta * 0.5 / clouds.theta.std())
    assert eig(clouds, HALF, method="quadrature", jackknife=True).value.item() == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("jackknife", [False, True])
@pytest.mark.parametrize("method", ["nested", "enumerate", "quadrature"])
def test_one_parameter_cannot_be_told_from_itself(method, jackknife, epidemic, source):
    full = source if method == "quadrature" else epidemic
    single = Clouds(full.model, full.theta[:1], full.x[:1], None)
    design = full.model.sample_designs(3, torch.Generator().manual_seed(0))
    estimate = eig(single, design, method=method, num_obs=20, jackknife=jackknife)
    torch.testing.assert_close(estimate.value, torch.zeros(3), atol=1e-5, rtol=0)
    assert estimate.stderr.tolist() == pytest.approx([0] * 3, abs=1e-5)


class Frozen(LinearGaussianSSM):
    """The state stays where it is."""

    def transition(self, x, theta, design, generator):
        return x


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_equal_parameters_with_equal_clouds_have_nothing_to_tell(method):
    clouds = gaussian(1, 20, model=Frozen())
    clouds = dataclasses.replace(clouds, theta=clouds.theta.expand(30, 1), x=clouds.x.expand(30, -1, -1))
    assert eig(clouds, HALF, method=method).value.item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_a_gain_of_zero_measures_nothing(method):
    jittered = NestedParticleFilter(LG, 50, 20).snapshot()
    assert eig(jittered, torch.zeros(1, 1), method=method).value.item() == pytest.approx(0, abs=1e-6)


def test_without_jitter_no_summand_exceeds_log_M():
    clouds = gaussian(10, 5, prior_sd=20.0, dtype=torch.float64)  # so far apart that the bound is nearly met
    terms = nested_terms(clouds, torch.tensor([3.0]), num_obs=50)
    assert terms.max() <= math.log(10) + 1e-5
    assert terms.max() > math.log(10) - 0.1


def test_quadrature_obeys_the_data_processing_bound_once_debiased_and_the_plain_estimate_does_not():
    model, steps = MovingSource("paper"), 50
    bound = model.full_state_bound(steps)
    assert bound == pytest.approx(0.71, abs=0.01)

    def total(num_states, seed, **kwargs):
        designs = torch.zeros(steps, 2)
        _, ys = simulate(model, model.truth, designs, truth_generator(seed))
        nested, gain = NestedParticleFilter(model, 100, num_states, seed=seed), 0.0
        for design, y in zip(designs, ys, strict=True):
            gain += eig(nested, design[None], method="quadrature", seed=seed, **kwargs).value.item()
            nested.step(design, y)
        return gain

    mean, stderr = mean_stderr([total(400, seed, jackknife=True) for seed in range(6)])
    assert 0 < mean <= 1.15 * bound + 3 * stderr
    assert total(50, 0) > 2 * bound


def test_a_group_that_is_cut_off_and_not_tested_tells_nothing():
    model = TwoGroupSIR(mixing=((1, 0), (0, 1)))  # θ = (β1, γ1), so only group 1 can tell
    nested = NestedParticleFilter(model, 200, 100, jitter=None)
    for _ in range(40):
        nested.step(torch.zeros(1), None)
    untested, shared = eig(nested, torch.tensor([[-20.0], [0.0]]), method="enumerate", jackknife=True).value.tolist()
    assert abs(untested) < 3e-3
    assert shared == pytest.approx(0.43, abs=0.1)


def test_enumeration_is_the_expectation_of_the_nested_estimate(epidemic):
    clouds, design = Clouds(epidemic.model, epidemic.theta, epidemic.x, None), torch.tensor([[0.3]])
    gaps = [
        eig(clouds, design, num_obs=clouds.x[..., 0].numel(), seed=seed).value.item()
        - eig(clouds, design, method="enumerate", seed=seed).value.item()
        for seed in range(20)
    ]
    mean, stderr = mean_stderr(gaps)
    assert abs(mean) < 3 * stderr
    assert stderr < 0.01


def test_quadrature_is_the_expectation_of_the_nested_estimate(source):
    clouds, design = Clouds(source.model, source.theta, source.x, None), torch.tensor([[2.0, -1.0]])
    gaps = [
        eig(clouds, design, num_obs=clouds.x[..., 0].numel(), jackknife=True, seed=seed).value.item()
        - eig(clouds, design, method="quadrature", jackknife=True, seed=seed).value.item()
        for seed in range(20)
    ]
    mean, stderr = mean_stderr(gaps)
    assert abs(mean) < 3 * stderr
    assert stderr < 0.02


@pytest.mark.parametrize("share", [0.0025, 0.5, 0.9975])
def test_the_counts_enumerated_capture_the_mass_of_every_state(epidemic, share):
    design = epidemic.model.design_of_share(share)[None]
    rates = epidemic.model.positive_rates(epidemic.x, design).double()
    law = epidemic.model.observation(epidemic.x, design).base_dist
    captured = torch.ones(rates.shape[:2], dtype=torch.float64)
    for j in range(2):
        start, spacing, count = lattice(law, j)
        inside = poisson.cdf(start + count - 1, rates[..., j]) - poisson.cdf(start - 1, rates[..., j])
        captured *= torch.as_tensor(inside)
        assert spacing == 1
    assert captured.min() >= 1 - 1e-6


class StillEpidemic(TwoGroupSIR):
    def transition(self, x, theta, design, generator):
        return x


class StillSource(MovingSource):
    def transition(self, x, theta, design, generator):
        return x


@pytest.mark.parametrize("name", ["epidemic", "source"])
def test_exact_sums_in_single_precision_have_four_digits(name, epidemic, source):
    """No cancellation between counts, their logarithms and factorials, or between squares of Gaussian means."""
    clouds, model, method = {
        "epidemic": (epidemic, StillEpidemic(tests=2000), "enumerate"),
        "source": (source, StillSource(), "quadrature"),
    }[name]
    designs = model.sample_designs(5, torch.Generator().manual_seed(0))
    single, double = (
        eig(Clouds(model, clouds.theta.to(dtype), clouds.x.to(dtype), None), designs, method=method).value
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=0, atol=5e-5)


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_the_jackknife_halves_the_bias_of_small_clouds_at_least(method):
    gain, prior_sd = torch.ones(1, 1), 0.0514
    exact = LG.closed_form_eig(gain, c=SLOPE, P=SPREAD, s=prior_sd).item()
    assert exact == pytest.approx(0.017, abs=5e-5)
    ratios = {}
    for jackknife in (False, True):
        values = [
            eig(
                gaussian(100, 50, seed, prior_sd=prior_sd), gain, method=method, num_obs=2000, jackknife=jackknife, seed=seed
            ).value
            for seed in range(60)
        ]
        ratios[jackknife] = torch.cat(values).mean().item() / exact
    assert ratios[False] > 1.2
    assert abs(ratios[True] - 1) < abs(ratios[False] - 1) / 2


def test_halves_are_drawn_at_random_because_resampling_leaves_copies_side_by_side():
    """Sorted clouds: unshuffled halves would be as different as can be, and the jackknife far off."""
    clouds = gaussian(200, 50)
    in_order = dataclasses.replace(clouds, x=clouds.x.sort(1).values)
    gains = [eig(c, HALF, method="quadrature", jackknife=True).value.item() for c in (clouds, in_order)]
    assert gains[1] == pytest.approx(gains[0], abs=0.01)


def test_enumerated_derivative_agrees_with_central_differences(epidemic):
    clouds = Clouds(epidemic.model, epidemic.theta.double(), epidemic.x.double(), None)
    designs = torch.tensor([[-2.0], [0.3], [1.5]], dtype=torch.float64, requires_grad=True)
    gain = eig(clouds, designs, method="enumerate", jackknife=True)
    (slope,) = torch.autograd.grad(gain.value.sum(), designs)
    with torch.no_grad():
        ahead, back = (eig(clouds, designs + h, method="enumerate", jackknife=True).value for h in (1e-3, -1e-3))
    torch.testing.assert_close(slope[:, 0], (ahead - back) / 2e-3, rtol=1e-3, atol=1e-6)


def test_quadrature_derivative_agrees_with_central_differences(source):
    clouds = Clouds(source.model, source.theta.double(), source.x.double(), None)
    design = torch.tensor([[2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(eig(clouds, design, method="quadrature").value.sum(), design)
    steps = 1e-3 * torch.eye(2, dtype=torch.float64)
    ahead, back = (eig(clouds, (design + steps * sign).detach(), method="quadrature").value for sign in (1, -1))
    torch.testing.assert_close(slope[0], (ahead - back) / 2e-3, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_a_full_turn_of_a_sensor_changes_nothing(method, source):
    clouds = Clouds(source.model, source.theta.double(), source.x.double(), None)
    designs = torch.tensor([[2.0, -1.0], [2.0 + 2 * math.pi, -1.0], [2.0, -1.0 - 4 * math.pi]], dtype=torch.float64)
    gains = eig(clouds, designs, method=method).value
    torch.testing.assert_close(gains, gains[:1].expand(3), atol=1e-5, rtol=0)


def test_another_sensor_never_lowers_the_gain(source):
    one = dataclasses.replace(source.model, sensors=source.model.sensors[:1])
    designs = source.model.sample_designs(8, torch.Generator().manual_seed(0))
    fewer = eig(Clouds(one, source.theta, source.x, None), designs[:, :1].contiguous(), method="quadrature").value
    more = eig(Clouds(source.model, source.theta, source.x, None), designs, method="quadrature").value
    assert (more >= fewer - 1e-3).all()


def test_a_known_state_reduces_to_nested_monte_carlo_as_in_pyro():
    known, gain = LinearGaussianSSM(q=0.0, initial_sd=0.0), torch.tensor([0.8])  # x_1 = θ, so y = ξ θ + noise
    nested = NestedParticleFilter(known, 3000, 1, jitter=None)
    ours = eig(nested, gain[None], num_obs=3000).value.item()

    def model(design):
        theta = pyro.sample("theta", dist.Normal(torch.zeros(design.shape[:-1]), known.prior_sd))
        return pyro.sample("y", dist.Normal(design[..., 0] * theta, known.r))

    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        peer = nmc_eig(model, gain, "y", "theta", N=10000, M=200).item()
    assert ours == pytest.approx(peer, abs=0.05)
    assert ours == pytest.approx(known.closed_form_eig(gain[None], c=0.0, P=0.0, s=known.prior_sd).item(), abs=0.05)


def kalman_covariances(model, designs):
    """Covariance (2, 2) of (x, θ) before each step and after the last, by filterpy; no observation changes it."""
    reference = KalmanFilter(dim_x=2, dim_z=1)
    reference.F, reference.Q, mean, reference.P = (part.numpy() for part in model.augmented())
    reference.x, reference.R = mean[:, None], np.array([[model.r**2]])
    covariances = [reference.P]
    for design in designs.tolist():
        reference.predict()
        reference.update(np.zeros(1), H=np.array([[design[0], 0.0]]))
        covariances.append(reference.P)
    return covariances


@pytest.fixture(scope="module")
def random_gains():
    return LG.sample_designs(30, torch.Generator().manual_seed(0)).double()


def test_gains_add_up_to_the_entropy_lost_exactly_in_the_kalman_recursion(random_gains):
    *before, last = kalman_covariances(LG, random_gains)
    total = sum(
        LG.closed_form_eig(gain, c=P[0, 1] / P[1, 1], P=P[0, 0] - P[0, 1] ** 2 / P[1, 1], s=P[1, 1] ** 0.5).item()
        for gain, P in zip(random_gains, before, strict=True)
    )
    assert total == pytest.approx(0.5 * math.log(LG.prior_sd**2 / last[1, 1]), abs=1e-9)


def test_gains_add_up_to_the_entropy_lost_on_filtered_clouds(random_gains):
    exact = 0.5 * math.log(LG.prior_sd**2 / kalman_covariances(LG, random_gains)[-1][1, 1])
    _, ys = simulate(LG, torch.tensor([0.3]), random_gains.float(), truth_generator(0))
    nested, total = NestedParticleFilter(LG, 400, 200, jitter=None), 0.0
    for design, y in zip(random_gains.float(), ys, strict=True):
        gain = eig(nested, design[None], method="quadrature", jackknife=True)
        assert gain.value >= -3 * gain.stderr
        total += gain.value.item()
        nested.step(design, y)
    assert total == pytest.approx(exact, rel=0.15)


class Coins(LinearGaussianSSM):
    """Three coins whose odds depend on θ: finite observations, dy = 3, no fast path."""

    obs_dim = 3
    natural = statistic = property()  # hides the Gaussian's

    def transition(self, x, theta, design, generator):
        return theta[:, None].expand_as(x)

    def observation(self, x, design):
        return Independent(Bernoulli(logits=design * x * torch.tensor([1.0, 2.0, -3.0])), 1)


class Dice(Coins):
    """Two dice with three faces."""

    obs_dim = 2

    def observation(self, x, design):
        faces = torch.tensor([[0.0, 1.0, -1.0], [0.0, -2.0, 0.5]])
        return Independent(Categorical(logits=(design * x)[..., None] * faces), 1)


@pytest.mark.parametrize(("model", "values"), [(Coins(), (0.0, 1.0)), (Dice(), (0.0, 1.0, 2.0))])
def test_any_finite_observations_are_enumerated(model, values):
    """Against the entropies of the joint law of all coordinates, written out."""
    clouds = gaussian(40, 2, model=model)
    every = torch.cartesian_prod(*[torch.tensor(values)] * model.obs_dim)  # (Y, dy)
    p = model.observation(clouds.theta, HALF[0]).log_prob(every[:, None]).exp()  # (Y, M)
    exact = torch.special.entr(p.mean(1)).sum() - torch.special.entr(p).sum(0).mean()
    estimate = eig(clouds, HALF, method="enumerate")
    assert estimate.value.item() == pytest.approx(exact.item(), abs=1e-6)
    sampled = eig(clouds, HALF, num_obs=80)
    assert abs(sampled.value.item() - exact.item()) < 4 * sampled.stderr.item()


class Plain:
    """A model without its fast path."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        if name in ("natural", "statistic"):
            raise AttributeError(name)
        return getattr(self._model, name)


@pytest.mark.parametrize("jackknife", [False, True])
@pytest.mark.parametrize("name", ["epidemic", "source"])
def test_the_kernel_agrees_with_the_densities_of_the_law(name, jackknife, request):
    clouds = request.getfixturevalue(name)
    design = clouds.model.sample_designs(1, torch.Generator().manual_seed(1))[0]
    terms = nested_terms(clouds, design, jackknife=jackknife)
    plain = nested_terms(dataclasses.replace(clouds, model=Plain(clouds.model)), design, jackknife=jackknife)
    torch.testing.assert_close(terms, plain, atol=2e-4, rtol=1e-4)


def test_the_kernel_agrees_with_itself_in_several_blocks(epidemic, monkeypatch):
    whole = nested_terms(epidemic, torch.zeros(1))
    monkeypatch.setitem(eig.__globals__, "_BLOCK", 5000)
    torch.testing.assert_close(nested_terms(epidemic, torch.zeros(1)), whole)


@pytest.mark.parametrize("method", ["enumerate", "quadrature"])
def test_exact_sums_agree_with_themselves_in_several_blocks(method, epidemic, source, monkeypatch):
    clouds = epidemic if method == "enumerate" else source
    designs = clouds.model.sample_designs(2, torch.Generator().manual_seed(1))
    whole = eig(clouds, designs, method=method, jackknife=True).value
    monkeypatch.setitem(eig.__globals__, "_DENSITIES", 5000)
    torch.testing.assert_close(eig(clouds, designs, method=method, jackknife=True).value, whole, atol=1e-5, rtol=1e-5)


def test_designs_are_compared_under_common_random_numbers(epidemic):
    designs = torch.tensor([[0.3], [-1.0], [0.3]])
    for method in ("nested", "enumerate"):
        together = eig(epidemic, designs, method=method, seed=3).value
        assert together[0] == together[2]
        assert together[1] == eig(epidemic, designs[1:2], method=method, seed=3).value[0]


class Driven(LinearGaussianSSM):
    """The design pushes the state, x_t = a x + ξ θ + q w, and does not touch the observation y = x + r v."""

    def transition(self, x, theta, design, generator):
        return super().transition(x, design * theta, design, generator)

    def observation(self, x, design):
        return super().observation(x, torch.ones(1))

    def natural(self, x, design):
        return super().natural(x, torch.ones(1))


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_a_design_that_moves_the_states_has_its_own_prediction(method):
    model, pushes = Driven(initial_sd=0.5), torch.tensor([[0.0], [1.0], [2.0]])
    nested = NestedParticleFilter(model, 800, 50, jitter=None)
    signal, noise = (pushes[:, 0] * model.prior_sd) ** 2, (model.a * model.initial_sd) ** 2 + model.q**2 + model.r**2
    gains = eig(nested, pushes, method=method, num_obs=1000, jackknife=True).value
    torch.testing.assert_close(gains, torch.log1p(signal / noise) / 2, atol=0.04, rtol=0)


class Switched(LinearGaussianSSM):
    """From a dose of a half on, x = a x + θ + q w instead of x = a x + q w; y = x + r v."""

    def transition(self, x, theta, design, generator):
        return super().transition(x, theta * (design > 0.5), design, generator)

    def observation(self, x, design):
        return super().observation(x, torch.ones(1))

    natural = statistic = property()


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_the_order_of_designs_does_not_matter_where_they_switch_the_dynamics(method):
    nested = NestedParticleFilter(Switched(), 60, 10)
    off_on, on_off = (eig(nested, torch.tensor(doses), method=method).value for doses in ([[0.0], [1.0]], [[1.0], [0.0]]))
    assert torch.equal(off_on, on_off.flip(0))
    assert off_on[1] > off_on[0] + 0.1


def test_states_may_bound_their_own_observations():
    """y ~ U(x − 1, x + 1) with x = θ = ± 0.5 tells nothing on the half of its range that both share, else all: I = ½ log 2."""

    class Window(Coins):
        obs_dim = 1

        def observation(self, x, design):
            return Independent(Uniform(x - 1, x + 1), 1)

    theta = torch.tensor([-0.5, 0.5]).repeat(100)[:, None]
    clouds = Clouds(Window(), theta, theta[:, None].expand(200, 2, 1), None)
    estimate = eig(clouds, HALF, num_obs=400)
    assert abs(estimate.value.item() - math.log(2) / 2) < 4 * estimate.stderr.item()


def test_the_number_of_trials_may_depend_on_the_state():
    class Trials(Coins):
        obs_dim = 1

        def observation(self, x, design):
            return Independent(Binomial(1 + (x > 0).to(x.dtype), torch.full_like(x, 0.5)), 1)

    theta = torch.tensor([-1.0, 1.0])[:, None]
    clouds = Clouds(Trials(), theta, theta[:, None].expand(2, 4, 1), None)
    p = torch.tensor([[0.5, 0.5, 0], [0.25, 0.5, 0.25]])
    exact = torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(1).mean()
    assert eig(clouds, HALF, method="enumerate").value.item() == pytest.approx(exact.item(), abs=1e-6)


@pytest.mark.parametrize("method", ["nested", "quadrature"])
def test_states_ahead_that_are_not_finite_are_named(method):
    class Bomb(LinearGaussianSSM):
        def transition(self, x, theta, design, generator):
            moved = super().transition(x, theta, design, generator)
            moved[1, 2] = torch.nan
            return moved

    with pytest.raises(ValueError, match=r"transition: Bomb\.transition gave 1 of 20 states that are not finite"):
        eig(gaussian(5, 4, model=Bomb()), HALF, method=method, num_obs=20)


def test_stderr_is_the_spread_over_keys():
    clouds = gaussian(500, 20)
    estimates = [eig(clouds, HALF, num_obs=100, seed=seed) for seed in range(60)]
    spread = torch.cat([estimate.value for estimate in estimates]).std().item()
    assert torch.cat([estimate.stderr for estimate in estimates]).mean().item() == pytest.approx(spread, rel=0.3)


def test_equal_seeds_give_equal_estimates_and_touch_no_global_state(epidemic):
    state = torch.random.get_rng_state()
    first, again, other = (eig(epidemic, torch.zeros(1, 1), seed=seed).value for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_filter_serves_as_its_own_belief(epidemic):
    nested = NestedParticleFilter(TwoGroupSIR(), 30, 10)
    theta, x = nested.theta.clone(), nested.x.clone()
    assert eig(nested, torch.zeros(1, 1)).value == eig(nested.snapshot(), torch.zeros(1, 1)).value
    assert torch.equal(nested.theta, theta)
    assert torch.equal(nested.x, x)


def test_a_model_that_breaks_down_is_reported_and_not_hidden_in_the_mean():
    class Broken(LinearGaussianSSM):
        def natural(self, x, design):
            eta, A = super().natural(x, design)
            return eta, A * torch.nan

    estimate = eig(gaussian(10, 10, model=Broken()), HALF, num_obs=30)
    assert estimate.num_nonfinite == 30
    assert estimate.value.item() == 0


def test_the_package_offers_the_function_under_the_name_of_its_module():
    assert labkit.design.online.eig is eig
    assert set(labkit.design.online.__all__) <= set(dir(labkit.design.online))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "exact"}, "method='exact': expected one of nested, enumerate, quadrature"),
        ({"method": "quadrature"}, "method='quadrature': expected independent Gaussian observations, got Poisson"),
        ({"num_obs": 201}, r"num_obs=201: expected an int from 1 to M·N = 200"),
        ({"num_obs": 0}, "num_obs=0: expected"),
        ({"num_obs": 2.5}, "num_obs=2.5: expected"),
        ({"num_obs": None}, "num_obs=None: expected"),
        ({"seed": 0.5}, "seed=0.5: expected an int"),
        ({"seed": -1}, "seed=-1: expected an int"),
        ({"designs": torch.zeros(1)}, r"designs of shape \(1,\): expected \(K, 1\)"),
        ({"designs": torch.zeros(0, 1)}, r"designs of shape \(0, 1\)"),
        ({"designs": torch.zeros(2, 3)}, r"designs of shape \(2, 3\): expected \(K, 1\)"),
        ({"designs": torch.tensor([[torch.nan]])}, r"designs=\[\[nan\]\]: expected finite numbers"),
        ({"designs": torch.zeros(1, 1).half()}, "designs is torch.float16"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    nested = NestedParticleFilter(TwoGroupSIR(), 20, 10)
    arguments = {"designs": torch.zeros(1, 1)} | changes
    with pytest.raises(ValueError, match=message):
        eig(nested, **arguments)


def test_what_is_no_belief_is_named(epidemic):
    with pytest.raises(ValueError, match="belief: expected a NestedParticleFilter or its Clouds, got TwoGroupSIR"):
        eig(epidemic.model, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="belief: theta has 7 rows and x has 60 clouds"):
        eig(dataclasses.replace(epidemic, theta=epidemic.theta[:7]), torch.zeros(1, 1))


@pytest.mark.parametrize("method", ["nested", "enumerate"])
def test_an_odd_number_of_states_cannot_be_halved(method):
    with pytest.raises(ValueError, match="N=5 states per parameter: the jackknife halves every cloud, expected an even"):
        eig(NestedParticleFilter(TwoGroupSIR(), 20, 5), torch.zeros(1, 1), method=method, num_obs=50, jackknife=True)


def test_half_precision_clouds_are_refused(epidemic):
    clouds = dataclasses.replace(epidemic, x=epidemic.x.half())
    with pytest.raises(ValueError, match=r"belief\.x of torch\.float16: expected torch\.float32 or torch\.float64"):
        eig(clouds, torch.zeros(1, 1))


def test_gaussian_observations_cannot_be_enumerated():
    with pytest.raises(
        ValueError, match="method='enumerate': expected independent observations with countable values, got Normal"
    ):
        eig(gaussian(5, 4), HALF, method="enumerate")


def test_three_gaussian_observations_are_too_many_for_quadrature():
    model = MovingSource(sensors=((3, 0), (0, 3), (1, 1)))
    with pytest.raises(ValueError, match="method='quadrature': the model has dy = 3 observations, expected at most 2"):
        eig(NestedParticleFilter(model, 5, 4), torch.zeros(1, 3), method="quadrature")


def test_correlated_observations_do_not_fit_a_product_lattice():
    class Correlated(LinearGaussianSSM):
        def observation(self, x, design):
            return MultivariateNormal(design * x, torch.eye(1))

    with pytest.raises(ValueError, match="expected independent Gaussian observations, got MultivariateNormal"):
        eig(gaussian(5, 4, model=Correlated()), HALF, method="quadrature")


def test_a_lattice_over_budget_is_refused_with_its_size_and_the_limit():
    nested = NestedParticleFilter(TwoGroupSIR(tests=1e5, infected=(5, 100)), 300, 10)
    with pytest.raises(ValueError, match=r"lattice of \d+ × \d+ observations for M·H = 300 clouds.*allowed are.*'nested'"):
        eig(nested, torch.zeros(1, 1), method="enumerate")


def test_means_that_are_not_finite_have_no_lattice():
    class Exploding(LinearGaussianSSM):
        def observation(self, x, design):
            return Independent(Normal(x / 0, 1.0, validate_args=False), 1, validate_args=False)

    with pytest.raises(ValueError, match=r"observation: the means of y_1 reach from .*; expected finite numbers"):
        eig(gaussian(5, 4, model=Exploding()), HALF, method="quadrature")


def test_a_transition_of_the_wrong_shape_is_named():
    class Flat(LinearGaussianSSM):
        def transition(self, x, theta, design, generator):
            return x[..., 0]

    with pytest.raises(ValueError, match=r"Flat\.transition gave torch\.float32 states of shape \(5, 4\)"):
        eig(gaussian(5, 4, model=Flat()), HALF, num_obs=20)

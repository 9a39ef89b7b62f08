import math
import types

import pytest
import torch
from torch.distributions import Independent, Laplace, MultivariateNormal, Normal

from labkit.design.bounds import barber_agakov, information_is, plug_in_spce, prior_contrastive, snmc, spce
from labkit.design.ces import CES
from labkit.design.models import DesignModel, HyperbolicDiscounting, LinearGaussian, LocationFinding
from tests.unit.design.histories import learnt, runs

STEPS, RUNS = 5, 150
LG = LinearGaussian(
    lambda x: x, torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64), 0.7, bounds=[[-2.0, -2.0], [2.0, 2.0]]
)


def mean_stderr(values):
    return values.mean().item(), values.std().item() / len(values) ** 0.5


def exact_law(theta, designs, outcomes):
    """log p(y | θ_0) − log p(y), and KL(posterior ‖ prior), of linear-Gaussian runs."""
    phi = LG.features(designs)
    cov = phi @ LG.prior_cov @ phi.mT + LG.noise_sd**2 * torch.eye(designs.shape[1], dtype=torch.float64)
    log_evidence = MultivariateNormal(torch.zeros_like(outcomes), cov).log_prob(outcomes)
    own = LG.log_prob(outcomes, theta[:, None], designs).sum(1)
    mean, posterior = LG.posterior(designs, outcomes)
    return own - log_evidence, torch.distributions.kl_divergence(MultivariateNormal(mean, posterior), LG.prior())


@pytest.fixture(scope="module")
def gaussian():
    """Linear-Gaussian runs, their exact information per run, and draws of their exact posteriors."""
    theta, designs, outcomes = runs(LG, RUNS, STEPS)
    mean, cov = LG.posterior(designs, outcomes)
    torch.manual_seed(0)
    particles = MultivariateNormal(mean, cov).sample((500,)).movedim(0, 1)
    return (theta, designs, outcomes), exact_law(theta, designs, outcomes), particles


def test_bounds_enclose_importance_sampling_and_the_exact_information(gaussian):
    run, (information, _), particles = gaussian
    importance = information_is(LG, *run, particles, 400).information
    lower, upper = spce(LG, *run, 100), snmc(LG, *run, 100)
    for small, large in ((lower, importance), (importance, upper), (lower, information), (information, upper)):
        gap, stderr = mean_stderr(large - small)
        assert gap > -2 * stderr
    assert (lower <= math.log(101)).all()
    assert (upper - lower).mean() > 0.05


def test_the_gap_between_the_bounds_shrinks_with_the_number_of_draws(gaussian):
    run, (information, _), _ = gaussian
    gaps = [(snmc(LG, *run, L) - spce(LG, *run, L)).mean().item() for L in (100, 1000, 10_000)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > 0
    for bound in (spce, snmc):
        assert (bound(LG, *run, 10_000) - information).abs().median() < 0.05


def test_contrastive_bound_of_one_draw_by_hand(gaussian):
    (theta, designs, outcomes), _, _ = gaussian
    run = theta[:1], designs[:1], outcomes[:1]
    lower, upper = spce(LG, *run, 1, seed=3).item(), snmc(LG, *run, 1, seed=3).item()
    assert lower == pytest.approx(math.log(2) - math.log1p(math.exp(-upper)))  # upper is ℓ_0 − ℓ_1


def test_importance_sampling_is_the_exact_information_of_every_run(gaussian):
    run, (information, kl), particles = gaussian
    estimate = information_is(LG, *run, particles, 1000)
    assert (estimate.information - information).abs().max() < 0.2
    assert (estimate.kl - kl).abs().max() < 0.2
    assert (estimate.log_evidence.exp() / (estimate.log_evidence + estimate.information - information).exp()).mean() == (
        pytest.approx(1, abs=0.02)
    )
    assert estimate.ess.min() > 200
    total = LG.total_information(run[1])
    for values in (estimate.information, estimate.kl):
        gap, stderr = mean_stderr(values - total)
        assert abs(gap) < 4 * stderr
    assert estimate.kl.sub(total).std() < estimate.information.sub(total).std()  # without the noise of θ_0


def test_importance_sampling_of_few_draws_is_noisy_but_unbiased(gaussian):
    run, (information, _), particles = gaussian
    ratios = torch.stack([(information - information_is(LG, *run, particles, 40, s).information).exp() for s in range(2)])
    mean, stderr = mean_stderr(ratios.flatten())  # p̂ / p
    assert abs(mean - 1) < 4 * stderr
    assert 0.02 < ratios.std() < 1


class Network:
    """N(mean, cov) of the exact posterior, its mean moved by `shift` standard deviations."""

    def __init__(self, shift=0.0):
        self.shift = shift

    def log_prob(self, theta, X, Y):
        mean, cov = LG.posterior(X, Y)
        root = torch.linalg.cholesky(cov)
        law = MultivariateNormal(mean + self.shift * root[..., 0], scale_tril=root)
        return law.log_prob(theta.movedim(-2, 0)).movedim(0, -1)


def test_barber_agakov_is_tight_for_the_exact_posterior(gaussian):
    run, (information, _), _ = gaussian
    torch.testing.assert_close(barber_agakov(LG, Network(), *run), information, atol=1e-6, rtol=0)


def test_barber_agakov_loses_the_divergence_of_a_wrong_posterior(gaussian):
    run, (information, _), _ = gaussian
    gap, stderr = mean_stderr(information - barber_agakov(LG, Network(0.8), *run))
    assert abs(gap - 0.8**2 / 2) < 4 * stderr  # KL of two Gaussians 0.8 standard deviations apart
    assert gap > 0


def test_plug_in_is_what_the_contrastive_bound_gives(gaussian):
    run, (information, _), _ = gaussian
    for count in (3, 30):
        bound = torch.stack([spce(LG, *run, count, seed) for seed in range(10)]).mean(0)
        gap, stderr = mean_stderr(bound - plug_in_spce(information, count))
        assert gap > -2 * stderr  # log(1 + e^IS/L) of the mean evidence, and (L+1)/L
        assert gap < 0.5
    large = torch.tensor([1.0, 40.0])
    assert plug_in_spce(large, 1e7).tolist() == pytest.approx([1.0, math.log(1e7)], abs=1e-5)


def test_published_check_location_finding_under_random_designs():
    model = LocationFinding()
    value, stderr = mean_stderr(spce(model, *runs(model, 200, 30), 100_000))
    assert abs(value - 5.17) < 3 * stderr + 0.1


@pytest.mark.slow
def test_published_check_ces_under_random_designs():
    model = CES()
    run = runs(model, 64, 10)
    importance = information_is(model, *run, learnt(model, *run[1:]).sample(1000))
    assert importance.ess.median() > 500
    value, stderr = mean_stderr(spce(model, *run, 100_000))
    assert abs(value - 7.56) < 3 * math.hypot(stderr, 0.50)
    plug_in = plug_in_spce(importance.information, 1e7)
    for estimate, measured in ((importance.information, 9.94), (importance.kl, 9.94), (plug_in, 9.23)):
        value, stderr = mean_stderr(estimate)
        assert abs(value - measured) < 3 * math.hypot(stderr, 0.83)


def test_importance_sampling_agrees_with_contrasts_on_ces():
    model = CES()
    run = runs(model, 24, 3, seed=2)
    importance = information_is(model, *run, learnt(model, *run[1:], 500).sample(500), 3000)
    known = importance.information < 6  # far from the ceiling log 20 000 = 9.9
    direct = spce(model, *(part[known] for part in run), 20_000)
    gap, stderr = mean_stderr(direct - plug_in_spce(importance.information[known], 20_000))
    assert abs(gap) < 4 * stderr + 0.05
    assert known.sum() >= 8


def test_bounds_repeat_bit_by_bit_and_seeds_differ(gaussian):
    run, _, particles = gaussian
    run, particles = [part[:3] for part in run], particles[:3]
    for estimate in (
        lambda seed: spce(LG, *run, 50, seed),
        lambda seed: snmc(LG, *run, 50, seed),
        lambda seed: information_is(LG, *run, particles, 50, seed).information,
    ):
        assert torch.equal(estimate(1), estimate(1))
        assert not torch.equal(estimate(1), estimate(2))


class Simulator(DesignModel):
    theta_dim, design_dim, bounds, design_names = 2, 2, LG.bounds, ("x1", "x2")

    def prior(self):
        return Independent(Laplace(torch.zeros(2), torch.ones(2)), 1)

    def simulate(self, theta, design, noise=None, *, generator=None):
        return theta[..., 0]


class Standard:
    def log_prob(self, theta, X, Y):
        return Independent(Normal(torch.zeros(2), torch.ones(2)), 1).log_prob(theta)


def test_a_simulator_without_likelihood_has_barber_agakov_only(gaussian):
    run, _, particles = gaussian
    assert barber_agakov(Simulator(), Standard(), *run).shape == (RUNS,)
    for call in (
        lambda: spce(Simulator(), *run, 10),
        lambda: snmc(Simulator(), *run, 10),
        lambda: information_is(Simulator(), *run, particles),
    ):
        with pytest.raises(ValueError, match=r"Simulator has no log_prob.*barber_agakov"):
            call()


ONES = torch.ones(2, 2), torch.ones(2, 3, 2), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ((torch.ones(2, 3), *ONES[1:]), r"theta: got shape \(2, 3\); expected \(R, 2\)"),
        ((ONES[0], torch.ones(2, 3, 1), ONES[2]), r"designs: got shape \(2, 3, 1\); expected \(2, 3, 2\)"),
        ((*ONES[:2], torch.ones(3, 3)), r"outcomes: got shape \(3, 3\); expected \(2, T\)"),
        ((ONES[0], torch.ones(2, 0, 2), torch.ones(2, 0)), "outcomes: .* T >= 1"),
        ((*ONES[:2], ONES[2] * torch.nan), "outcomes: expected finite numbers, got 6 that are not"),
        ((ONES[0], ONES[1] * torch.inf, ONES[2]), "designs: expected finite"),
        ((ONES[0], ONES[1] * 99, ONES[2]), "designs=.*in the box"),
        ((torch.ones(0, 2), torch.ones(0, 3, 2), torch.ones(0, 3)), "theta: got shape .* R >= 1"),
        (("theta", *ONES[1:]), "theta='theta'"),
    ],
)
def test_bad_runs_are_refused(run, message):
    calls = (lambda: spce(LG, *run, 5), lambda: snmc(LG, *run, 5), lambda: barber_agakov(LG, Network(), *run))
    for call in (*calls, lambda: information_is(LG, *run, torch.ones(2, 9, 2))):
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_numbers_are_refused():
    for bound in (spce, snmc):
        with pytest.raises(ValueError, match="num_contrastive=0"):
            bound(LG, *ONES, 0)
    with pytest.raises(ValueError, match="num_contrastive=0"):
        plug_in_spce(torch.ones(1), 0)
    with pytest.raises(ValueError, match="num_draws=5"):
        information_is(LG, *ONES, torch.ones(2, 9, 2), 5)
    for particles in (torch.ones(2, 1, 2), torch.ones(3, 9, 2), torch.ones(2, 9, 3), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="particles: got shape"):
            information_is(LG, *ONES, particles)


def test_prior_contrastive_estimate_is_at_most_log_l_plus_one():
    own, others = torch.tensor([0.0, 3.0]), torch.tensor([[-900.0] * 9, [3.0] * 9])
    assert prior_contrastive(own, others).tolist() == pytest.approx([math.log(10), 0.0], abs=1e-6)


def test_runs_that_the_model_cannot_produce_are_refused():
    money, location = HyperbolicDiscounting(), LocationFinding()
    with pytest.raises(ValueError, match=r"outcomes=.*expected outcomes among"):
        spce(money, torch.ones(1, 2), torch.ones(1, 1, 2), torch.full((1, 1), 0.3), 5)
    with pytest.raises(ValueError, match=r"theta=.*impossible under the prior"):
        spce(location, torch.full((1, 2), 5.0), torch.ones(1, 1, 2), torch.ones(1, 1), 5)
    with pytest.raises(ValueError, match="outcomes: those of run 0 are impossible under its own theta"):
        snmc(location, torch.full((1, 2), 0.5), torch.ones(1, 1, 2), torch.full((1, 1), 1e30), 5)
    with pytest.raises(ValueError, match="particles: expected finite numbers, got 36"):
        information_is(LG, *ONES, torch.full((1, 9, 2), math.nan).expand(2, 9, 2)[:2])


def test_a_posterior_network_that_returns_nonsense_is_refused():
    for answer in (torch.full((2, 1), math.nan), torch.zeros(5)):
        network = types.SimpleNamespace(log_prob=lambda theta, X, Y, answer=answer: answer)
        with pytest.raises(ValueError, match="posterior: its log_prob gave"):
            barber_agakov(LG, network, *ONES)


def test_runs_in_double_precision_are_worth_the_same():
    model, generator = CES(), torch.Generator().manual_seed(3)
    theta, designs = model.sample_prior((3,), generator), model.sample_designs((3, 2), generator)
    outcomes = torch.full((3, 2), model.limit)  # in single precision a little above the limit in double precision
    single, double = spce(model, theta, designs, outcomes, 50), spce(model, theta, designs.double(), outcomes.double(), 50)
    assert torch.allclose(single, double, atol=1e-4)

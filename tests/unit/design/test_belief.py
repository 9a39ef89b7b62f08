import math

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Uniform

from labkit.design.belief import DegenerateBeliefError, ParticleBelief, PlanningParticles, reweight
from labkit.design.ces import CES
from labkit.design.models import DesignModel, HyperbolicDiscounting, LinearGaussian, LocationFinding
from tests.unit.design.histories import learnt, runs, seeded

STEPS, ROLLOUTS, PARTICLES = 6, 40, 1000
LG = LinearGaussian(lambda x: x, torch.tensor([[2.0, 0.6], [0.6, 1.0]]), 0.7, bounds=[[-2.0, -2.0], [2.0, 2.0]])


@pytest.fixture(scope="module")
def gaussian():
    """Runs of the linear-Gaussian model and the belief in them."""
    theta, designs, outcomes = runs(LG, ROLLOUTS, STEPS)
    return theta, designs, outcomes, learnt(LG, designs, outcomes)


def test_posterior_moments_are_those_of_the_linear_gaussian_model(gaussian):
    _, designs, outcomes, belief = gaussian
    mean, cov = LG.posterior(designs, outcomes)
    root = torch.linalg.cholesky(cov)
    error = torch.linalg.solve_triangular(root, (belief.mean() - mean)[..., None], upper=False)[..., 0]
    assert error.mean(0).abs().max() < 4 * (error.std(0) / ROLLOUTS**0.5).max()  # no bias
    assert error.square().mean().sqrt() < 4 * (2 / PARTICLES) ** 0.5  # of N particles with ESS >= N/2
    white = torch.linalg.solve_triangular(root, torch.linalg.solve_triangular(root, belief.cov(), upper=False).mT, upper=False)
    excess = white - torch.eye(2)
    assert excess.mean(0).abs().max() < 4 * excess.std(0).max() / ROLLOUTS**0.5
    assert excess.abs().mean() < 0.1


def test_log_evidence_is_that_of_the_linear_gaussian_model(gaussian):
    _, designs, outcomes, belief = gaussian
    phi = LG.features(designs)
    cov = phi @ LG.prior_cov @ phi.mT + LG.noise_sd**2 * torch.eye(STEPS)
    exact = torch.distributions.MultivariateNormal(torch.zeros(ROLLOUTS, STEPS), cov).log_prob(outcomes)
    error = belief.log_evidence - exact
    assert error.mean().abs() < 4 * error.std() / ROLLOUTS**0.5
    assert error.abs().max() < 0.6


def test_one_population_stays_weighted_while_its_effective_size_allows():
    belief = ParticleBelief.prior(LG, 1, PARTICLES, seeded())
    weak = belief.update(torch.full((1, 2), 0.1), torch.zeros(1))
    assert torch.equal(weak.v, belief.v)
    assert PARTICLES / 2 <= weak.ess.item() < PARTICLES
    torch.testing.assert_close(weak.log_weights.logsumexp(1), torch.zeros(1), atol=1e-5, rtol=0)
    strong = belief.update(torch.full((1, 2), 2.0), torch.full((1,), 6.0))
    assert not torch.equal(strong.v, belief.v)
    assert strong.ess.item() >= PARTICLES / 2


def test_tempering_reaches_an_outcome_that_no_particle_of_the_prior_explains():
    sharp = LinearGaussian(lambda x: x, torch.eye(1), 1e-4, bounds=[[-1.0], [1.0]])
    belief = ParticleBelief.prior(sharp, 1, 500, seeded()).update(torch.ones(1, 1), torch.tensor([4.0]))
    assert belief.mean().item() == pytest.approx(4.0, abs=1e-4)
    assert belief.cov().sqrt().item() == pytest.approx(1e-4, rel=0.2)
    assert belief.log_evidence.item() == pytest.approx(-8 - 0.5 * math.log(2 * math.pi), abs=1.5)


def test_the_cached_likelihood_is_that_of_the_whole_history(gaussian):
    _, designs, outcomes, belief = gaussian
    again = LG.log_prob(outcomes[..., None], belief.theta[:, None], designs[:, :, None]).sum(1)
    torch.testing.assert_close(belief.log_likelihood, again, atol=1e-3, rtol=1e-4)
    assert torch.equal(belief.designs, designs)
    assert torch.equal(belief.outcomes, outcomes)


@pytest.mark.parametrize("model", [LocationFinding(), HyperbolicDiscounting(), CES()], ids=["location", "discounting", "CES"])
def test_true_parameters_have_uniform_ranks_in_the_posterior(model):
    rollouts = 60
    theta, designs, outcomes = runs(model, rollouts, 5, seed=3)
    belief = learnt(model, designs, outcomes, 500)
    below = (belief.theta < theta[:, None]) * belief.log_weights.exp()[..., None]
    ranks = below.sum(1)  # (R, p)
    assert (ranks.mean(0) - 0.5).abs().max() < 4 * (1 / 12 / rollouts) ** 0.5
    tails = ((ranks < 0.1) | (ranks > 0.9)).float().mean(0)
    assert (tails - 0.2).abs().max() < 4 * (0.16 / rollouts) ** 0.5


def test_updates_are_pure_and_repeat_bit_by_bit():
    _, designs, outcomes = runs(LocationFinding(), 3, 4)
    first, second = (learnt(LocationFinding(), designs, outcomes, 200) for _ in range(2))
    assert torch.equal(first.v, second.v)
    again = [first.update(designs[:, 0], outcomes[:, 0]) for _ in range(2)]
    assert torch.equal(again[0].v, again[1].v)
    assert first.outcomes.shape == (3, 4)


def test_planning_does_not_change_what_is_learnt_next():
    _, designs, outcomes = runs(LocationFinding(), 2, 3)
    belief = learnt(LocationFinding(), designs, outcomes, 200)
    expected = belief.update(designs[:, 0], outcomes[:, 0])
    belief.subset(50)
    belief.sample(10)
    belief.thin(50, copies=2).update(designs[:, 0].repeat_interleave(2, 0), outcomes[:, 0].repeat_interleave(2))
    actual = belief.update(designs[:, 0], outcomes[:, 0])
    assert torch.equal(actual.v, expected.v)
    assert torch.equal(actual.log_weights, expected.log_weights)


def test_the_generator_given_to_the_prior_stays_free_for_other_uses():
    draw, other = seeded(), seeded()
    belief = ParticleBelief.prior(LG, 1, 10, draw)
    torch.randint(2**62, (), generator=other)
    assert torch.equal(torch.rand(3, generator=draw), torch.rand(3, generator=other))
    before = torch.rand(3, generator=draw.clone_state())
    belief.update(torch.ones(1, 2), torch.ones(1))
    assert torch.equal(torch.rand(3, generator=draw), before)


def test_reweighting_is_bayes_rule_and_differentiable():
    theta = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    model = LinearGaussian(lambda x: x, torch.eye(1, dtype=torch.float64), 1.0, bounds=[[-3.0], [3.0]])
    particles = PlanningParticles(model, theta, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log())
    x, y = torch.tensor([1.5], dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    unnormalised = torch.tensor([0.5, 0.3, 0.2]).double() * (-0.5 * (1 - 1.5 * theta[:, 0]) ** 2).exp()
    after = reweight(particles, x, y)
    torch.testing.assert_close(after.log_weights.exp(), unnormalised / unnormalised.sum())
    inputs = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, y: reweight(particles, x, y).log_weights, inputs)


def test_reweighting_and_updating_agree_without_resampling():
    belief = ParticleBelief.prior(LG, 2, 300, seeded())
    design, y = torch.full((2, 2), 0.2), torch.tensor([0.1, -0.1])
    particles = PlanningParticles(LG, belief.theta, belief.log_weights)
    torch.testing.assert_close(reweight(particles, design, y).log_weights, belief.update(design, y).log_weights)


def test_a_subset_is_a_stratified_sample_in_random_order():
    belief = ParticleBelief.prior(LG, 2, 400, seeded()).update(torch.full((2, 2), 0.3), torch.tensor([1.0, -1.0]))
    index = belief._choose(100, None)
    shares = belief.log_weights.exp().cumsum(1).gather(1, index.sort(1).values)
    strata = torch.arange(1, 101) / 100
    assert ((shares - strata + 0.01) > -1e-5).all()  # the k-th particle lies in the k-th hundredth of the weight
    assert not torch.equal(index, index.sort(1).values)
    subset = belief.subset(100)
    assert subset.theta.shape == (2, 100, 2)
    torch.testing.assert_close(subset.log_weights.exp(), torch.full((2, 100), 0.01))
    deviation = (subset.theta.mean(1) - belief.mean()) / belief.cov().diagonal(dim1=1, dim2=2).sqrt()
    assert deviation.abs().max() < 0.4


def test_a_thinned_belief_keeps_the_history_and_learns_like_the_whole():
    theta, designs, outcomes = runs(CES(), 2, 3, seed=5)
    belief = learnt(CES(), designs, outcomes, 500)
    small = belief.thin(160, copies=3)
    assert small.v.shape == (6, 160, 4)
    assert torch.equal(small.v[0], small.v[2])
    assert not torch.equal(small.v[0], small.v[3])
    assert torch.equal(small.outcomes, outcomes.repeat_interleave(3, 0))
    x = CES().sample_designs((2,), seeded(9))
    y = CES().simulate(theta, x, generator=seeded(9))
    after = small.update(x.repeat_interleave(3, 0), y.repeat_interleave(3))
    assert after.outcomes.shape == (6, 4)
    assert (after.ess >= 80).all()


def test_rows_select_rollouts(gaussian):
    belief = gaussian[-1]
    part = belief.rows(slice(3, 5))
    assert torch.equal(part.theta, belief.theta[3:5])
    assert part.update(torch.ones(2, 2), torch.zeros(2)).outcomes.shape == (2, STEPS + 1)


class Bounded(DesignModel):
    """Outcomes within ½ of θ, so that many are impossible."""

    theta_dim, design_dim, bounds, design_names = 1, 1, torch.tensor([[0.0], [1.0]]), ("x",)

    def prior(self):
        return Independent(Uniform(torch.zeros(1), torch.ones(1)), 1)

    def simulate(self, theta, design, noise=None, *, generator=None):
        return theta[..., 0]

    def log_prob(self, y, theta, design):
        return torch.where((y - theta[..., 0]).abs() < 0.5, 0.0, -math.inf)


def test_outcomes_that_most_particles_exclude_are_learnt_from():
    belief = ParticleBelief.prior(Bounded(), 1, 2000, seeded()).update(torch.zeros(1, 1), torch.tensor([1.4]))
    assert belief.log_evidence.item() == pytest.approx(math.log(0.1), abs=0.3)
    assert 0.9 <= belief.theta.min() < 0.91
    assert belief.mean().item() == pytest.approx(0.95, abs=0.005)


def test_impossible_outcomes_are_named():
    belief = ParticleBelief.prior(Bounded(), 2, 50, seeded())
    with pytest.raises(DegenerateBeliefError, match=r"y=3 of rollout \[1\]: impossible under all 50 particles"):
        belief.update(torch.zeros(2, 1), torch.tensor([0.5, 3.0]))
    with pytest.raises(DegenerateBeliefError, match="y=3"):
        reweight(belief.subset(20), torch.zeros(2, 1), torch.tensor([0.5, 3.0]))


class Simulator(DesignModel):
    theta_dim, design_dim, bounds, design_names = 1, 1, torch.tensor([[0.0], [1.0]]), ("x",)

    def prior(self):
        return Independent(Uniform(torch.zeros(1), torch.ones(1)), 1)

    def simulate(self, theta, design, noise=None, *, generator=None):
        return theta[..., 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LG, 0, 10), "num_rollouts=0"),
        ((LG, 1, 1), "num_particles=1"),
        ((Simulator(), 1, 10), "Simulator has no log_prob.*barber_agakov"),
    ],
)
def test_bad_priors_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParticleBelief.prior(*arguments, seeded())


@pytest.mark.parametrize(
    ("model", "design", "y", "message"),
    [
        (LG, torch.ones(2, 3), torch.ones(2), r"design: got shape \(2, 3\); expected \(2, 2\)"),
        (LG, torch.ones(2, 2), torch.ones(3), r"y: got shape \(3,\); expected \(2,\)"),
        (LG, torch.tensor([[0.0, torch.nan]] * 2), torch.ones(2), "design=.*finite"),
        (LG, torch.ones(2, 2), torch.tensor([0.0, torch.inf]), "y=.*finite"),
        (HyperbolicDiscounting(), torch.ones(2, 2), torch.full((2,), 0.5), "y=.*among"),
        (CES(), torch.ones(2, 6), torch.full((2,), 16.0), "y=.*expected outcomes in"),
    ],
)
def test_bad_outcomes_are_refused(model, design, y, message):
    belief = ParticleBelief.prior(model, 2, 10, seeded())
    with pytest.raises(ValueError, match=message):
        belief.update(design, y)


def test_bad_sizes_of_subsets_are_refused():
    belief = ParticleBelief.prior(LG, 1, 10, seeded())
    for call in (lambda: belief.subset(0), lambda: belief.thin(1), lambda: belief.sample(0)):
        with pytest.raises(ValueError, match="num_particles="):
            call()
    with pytest.raises(ValueError, match="copies=0"):
        belief.thin(5, copies=0)
    with pytest.raises(ValueError, match="sweeps=0"):
        ParticleBelief.prior(LG, 1, 10, seeded(), sweeps=0)


def test_numpy_and_double_outcomes_enter_in_the_precision_of_the_belief():
    belief = ParticleBelief.prior(LG, 2, 50, seeded())
    single = belief.update(torch.ones(2, 2), torch.tensor([3.0, 60.0]))
    for design, y in (([[1, 1], [1, 1]], [3, 60]), (np.ones((2, 2)), np.array([3.0, 60.0]))):
        other = belief.update(design, y)
        assert torch.equal(other.v, single.v)
        assert other.designs.dtype == single.designs.dtype


def test_outcomes_at_designs_outside_the_box_and_seeds_for_generators_are_refused():
    belief = ParticleBelief.prior(LG, 2, 10, seeded())
    with pytest.raises(ValueError, match=r"design=.*in the box"):
        belief.update(torch.full((2, 2), 99.0), torch.ones(2))
    for call in (lambda: ParticleBelief.prior(LG, 2, 10, 3), lambda: belief.sample(3, 5), lambda: LG.sample_prior((2,), None)):
        with pytest.raises(ValueError, match=r"generator: got .*expected a torch.Generator"):
            call()


def test_bayes_rule_by_weights_refuses_what_is_not_finite():
    particles = ParticleBelief.prior(LG, 1, 10, seeded()).subset(5)
    for design, y, name in ((torch.ones(2), math.nan, "y"), (torch.full((2,), math.inf), 1.0, "design")):
        with pytest.raises(ValueError, match=f"{name}=.*finite"):
            reweight(particles, design, y)
    assert reweight(particles, [1.0, 1.0], 0.5).log_weights.isfinite().all()

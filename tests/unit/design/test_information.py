import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.oed.eig import nmc_eig, posterior_eig, vnmc_eig
from scipy.integrate import quad
from scipy.stats import norm
from torch.distributions import Independent, MultivariateNormal, Normal

from labkit.design.belief import ParticleBelief, PlanningParticles, reweight
from labkit.design.ces import CES
from labkit.design.information import ace_eig, eig, node_eig
from labkit.design.models import (
    DesignModel,
    GaussianModel,
    HyperbolicDiscounting,
    LinearGaussian,
    LocationFinding,
    Pharmacokinetics,
)
from tests.unit.design.histories import seeded

EXACT = 0.5 * math.log(5)  # p = 1, φ = 2, Σ = 1, σ = 1
LINE = LinearGaussian(lambda x: x, torch.eye(1, dtype=torch.float64), 1.0, bounds=[[-3.0], [3.0]])
TWO = torch.tensor([[2.0]], dtype=torch.float64)


def equal_weights(model, theta):
    return PlanningParticles(model, theta, theta.new_full(theta.shape[:-1], -math.log(theta.shape[-2])))


def prior_particles(model, number, seed=0):
    return equal_weights(model, model.sample_prior((number,), seeded(seed)))


def standard_normal(number, seed=0):
    """N(0, 1) at the midpoints of equal shares, in random order (N, 1)."""
    level = (torch.randperm(number, generator=seeded(seed)) + 0.5) / number
    return torch.special.ndtri(level.double())[:, None]


def random_weights(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype).log_softmax(-1)


class Exact:
    """The posterior N(mean, cov) of a linear-Gaussian model, as a network would give it, `shift` standard deviations off."""

    def __init__(self, model, shift=0.0):
        self.model, self.shift = model, shift

    def law(self, X, Y):
        mean, cov = self.model.posterior(X, Y)
        return MultivariateNormal(mean + self.shift * cov.diagonal(dim1=-2, dim2=-1).sqrt(), cov)

    def sample(self, X, Y, num_samples):
        return self.law(X, Y).rsample((num_samples,)).movedim(0, -2)

    def log_prob(self, theta, X, Y):
        return self.law(X, Y).log_prob(theta.movedim(-2, 0)).movedim(0, -1)


def test_quadrature_is_the_closed_form_of_the_linear_gaussian_model():
    assert pytest.approx(0.804719, abs=1e-6) == EXACT
    value = eig(equal_weights(LINE, standard_normal(2000)), TWO).value.item()
    assert value == pytest.approx(EXACT, abs=2e-2)
    assert value == pytest.approx(LINE.expected_information(TWO).item(), abs=2e-2)


def test_contrastive_estimates_enclose_the_closed_form():
    particles = equal_weights(LINE, standard_normal(4000))
    lower, upper = (eig(particles, TWO, method=m, num_obs=4000, num_contrastive=1000) for m in ("pce", "nmc"))
    for estimate in (lower, upper):
        assert abs(estimate.value.item() - EXACT) < 4 * estimate.stderr.item()
    assert lower.value < upper.value
    assert 0.005 < lower.stderr.item() < 0.02


def test_few_contrasts_make_pce_too_small_and_nmc_too_large():
    particles = equal_weights(LINE, standard_normal(4000))
    lower, upper = (eig(particles, TWO, method=m, num_obs=4000, num_contrastive=4) for m in ("pce", "nmc"))
    assert lower.value.item() < EXACT - 4 * lower.stderr.item()
    assert upper.value.item() > EXACT + 4 * upper.stderr.item()
    assert lower.value.item() < math.log(5)


def test_ace_with_the_exact_posterior_has_no_error_but_that_of_the_outcomes():
    X, Y = torch.zeros(1, 0, 1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64)
    values = [ace_eig(LINE, Exact(LINE), X, Y, TWO, num_obs=4000, num_contrastive=count).item() for count in (1, 8)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)
    belief = ParticleBelief.prior(LINE, 1, 10, seeded())
    estimate = eig(belief, TWO, method="ace", posterior=Exact(LINE), num_obs=4000, num_contrastive=1)
    assert estimate.value.item() == pytest.approx(values[0])
    assert abs(estimate.value.item() - EXACT) < 4 * estimate.stderr.item()


def test_ace_knows_the_history_and_is_differentiable():
    X = torch.tensor([[[1.0], [2.0]]], dtype=torch.float64)
    Y = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    exact = LINE.expected_information(TWO, LINE.posterior(X, Y)[1]).item()
    value = ace_eig(LINE, Exact(LINE), X, Y, TWO, num_obs=4000, num_contrastive=2)
    assert value.item() == pytest.approx(exact, abs=0.03)
    inputs = (X.requires_grad_(), Y.requires_grad_(), TWO.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda *at: ace_eig(LINE, Exact(LINE), *at, num_obs=3, num_contrastive=2), inputs)


def test_ace_with_a_wrong_posterior_is_smaller():
    X, Y = torch.zeros(1, 0, 1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64)

    class Wrong(Exact):
        def law(self, X, Y):
            return Exact(LINE, 1.0 if X.shape[-2] else 0.0).law(X, Y)

    right, wrong = (ace_eig(LINE, q(LINE), X, Y, TWO, num_obs=4000, num_contrastive=2).item() for q in (Exact, Wrong))
    assert wrong < right - 0.1


def mixture_entropy(weights, means, scales):
    def integrand(y):
        p = float(np.dot(weights, norm.pdf(y, means, scales)))
        return -p * math.log(p) if p > 0 else 0.0

    low, high = min(means - 9 * scales), max(means + 9 * scales)
    return quad(integrand, low, high, limit=500, points=sorted(means), epsabs=1e-10)[0]


@pytest.mark.parametrize("model", [LINE, Pharmacokinetics()], ids=["constant noise", "noise that depends on θ"])
def test_quadrature_is_the_integral(model):
    theta = model.sample_prior((6,), seeded(1)).double()
    log_weights = random_weights(6)
    design = torch.full((1, 1), 2.5, dtype=torch.float64)
    mean, weights = model.mean(theta, design).numpy(), log_weights.exp().numpy()
    scale = model.scale(theta, design).expand(6).numpy()
    exact = mixture_entropy(weights, mean, scale) - weights @ (0.5 * np.log(2 * math.pi * math.e * scale**2))
    estimate = eig(PlanningParticles(model, theta, log_weights), design)
    assert estimate.value.item() == pytest.approx(exact, abs=1e-4)
    single = node_eig(model, theta.float(), log_weights.float(), design[0].float())
    assert single.item() == pytest.approx(exact, abs=1e-4)


def test_the_standard_error_of_quadrature_is_that_of_its_particles():
    values = [eig(equal_weights(LINE, torch.randn(300, 1, generator=seeded(s)).double()), TWO) for s in range(40)]
    spread = torch.stack([v.value for v in values]).std().item()
    assert values[0].stderr.item() == pytest.approx(spread, rel=0.35)


class Clipped(GaussianModel):
    """y = clip(θ x + x N(0, 1) / 2, −limit, limit)."""

    theta_dim, design_dim, bounds, design_names = 1, 1, torch.tensor([[0.0], [9.0]]), ("x",)

    def __init__(self, limit):
        self.limit = limit

    def prior(self):
        return Independent(Normal(torch.zeros(1), torch.ones(1)), 1)

    def mean(self, theta, design):
        return theta[..., 0] * design[..., 0]

    def scale(self, theta, design):
        return 0.5 * design[..., 0] * (1 + theta[..., 0].square())


@pytest.mark.parametrize("limit", [0.5, 2.0, 50.0])
def test_atoms_are_the_integral_and_the_two_sums(limit):
    model, number = Clipped(limit), 2000
    theta = torch.tensor([[-1.0], [0.2], [1.5]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    design = torch.tensor([[1.3]], dtype=torch.float64)
    mean, scale = model.mean(theta, design).numpy(), model.scale(theta, design).numpy()
    w, exact = weights.numpy(), 0.0
    for P in (norm.cdf(-limit, mean, scale), norm.sf(limit, mean, scale)):
        exact += w @ (P * np.log(P.clip(1e-300))) - w @ P * math.log((w @ P).clip(1e-300))
    for k in range(3):
        inside = (max(-limit, mean[k] - 9 * scale[k]), min(limit, mean[k] + 9 * scale[k]))
        exact += (
            w[k]
            * quad(
                lambda y, k=k: (
                    norm.pdf(y, mean[k], scale[k])
                    * (norm.logpdf(y, mean[k], scale[k]) - math.log(w @ norm.pdf(y, mean, scale)))
                ),
                *inside,
                limit=200,
            )[0]
        )
    copies = theta.repeat(number, 1)  # each particle with many quantiles of its own
    log_weights = (weights / number).log().repeat(number)
    estimate = eig(PlanningParticles(model, copies, log_weights), design, method="atoms", num_obs=3 * number)
    assert estimate.value.item() == pytest.approx(exact, abs=max(4 * estimate.stderr.item(), 1e-3))
    assert estimate.stderr.item() < 0.02


def test_atoms_of_ces_at_the_prior_agree_with_nested_monte_carlo():
    particles = prior_particles(CES(), 20_000)
    probe = torch.tensor([[10.0, 20.0, 30.0, 12.0, 15.0, 25.0]])
    estimate = eig(particles, probe, method="atoms", num_obs=4000)
    assert abs(estimate.value.item() - 3.70) < 4 * math.hypot(estimate.stderr.item(), 0.04)
    few = eig(equal_weights(CES(), particles.theta[:32]), probe, method="atoms", num_obs=32)
    assert 0 < few.value.item() < math.log(32)


def test_enumeration_is_the_mutual_information_of_a_table():
    model = HyperbolicDiscounting()
    theta = model.sample_prior((5,), seeded()).double()
    design = torch.tensor([[40.0, 30.0]], dtype=torch.float64)
    log_weights = random_weights(5)
    w, p = log_weights.exp(), model.probability(theta, design)
    entropy = lambda q: torch.special.entr(q) + torch.special.entr(1 - q)  # noqa: E731
    exact = entropy(w @ p) - w @ entropy(p)
    estimate = eig(PlanningParticles(model, theta, log_weights), design, method="enumerate")
    assert estimate.value.item() == pytest.approx(exact.item(), abs=1e-12)


def pyro_estimate(estimator, model, design, seed=0, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    with torch.random.fork_rng():
        return estimator(model.pyro_model(), design, observation_labels=["y"], target_labels=["theta"], **options)


def test_nested_monte_carlo_of_pyro_agrees_on_the_linear_gaussian_model():
    line = LinearGaussian(lambda x: x, torch.eye(1), 1.0, bounds=[[-3.0], [3.0]])
    values = torch.stack([pyro_estimate(nmc_eig, line, torch.tensor([[2.0]]), seed, N=400, M=400) for seed in range(8)])
    stderr = values.std().item() / 8**0.5
    ours = eig(equal_weights(LINE, standard_normal(2000)), TWO, method="nmc", num_obs=2000, num_contrastive=400)
    assert abs(values.mean().item() - ours.value.item()) < 3 * math.hypot(stderr, ours.stderr.item())


def guide_on(sites):
    """θ ~ N(a y, s²) with learnt a and s, for a batch of one design."""

    def guide(y, design, observation_labels, target_labels):
        a = pyro.param("a", torch.tensor(0.3))
        s = pyro.param("s", torch.tensor(0.6), constraint=torch.distributions.constraints.positive)
        loc = a * y["y"][..., None]
        pyro.sample("theta", dist.Normal(loc, s.expand(loc.shape)).to_event(1))

    return guide


@pytest.mark.parametrize(("estimator", "samples"), [(posterior_eig, 200), (vnmc_eig, (100, 10))])
def test_variational_estimates_of_pyro_agree_on_the_linear_gaussian_model(estimator, samples):
    line = LinearGaussian(lambda x: x, torch.eye(1), 1.0, bounds=[[-3.0], [3.0]])
    final = 4000 if estimator is posterior_eig else (2000, 50)
    options = {"num_samples": samples, "num_steps": 250, "guide": guide_on("theta"), "final_num_samples": final}
    if estimator is posterior_eig:
        options["eig"] = False  # the mean entropy of the posterior
    optimiser = pyro.optim.Adam({"lr": 0.02})
    value = pyro_estimate(estimator, line, torch.tensor([[2.0]]), optim=optimiser, **options).item()
    if estimator is posterior_eig:
        value = LINE.prior().entropy().item() - value
    ours = eig(equal_weights(LINE, standard_normal(2000)), TWO)
    assert value == pytest.approx(ours.value.item(), abs=3 * 0.02)  # 4000 log-densities of spread 1.2 have s.e. 0.02


def test_pyro_and_enumeration_agree_on_discounting():
    model, design = HyperbolicDiscounting(), torch.tensor([[40.0, 30.0]])
    values = torch.stack([pyro_estimate(nmc_eig, model, design, seed, N=2000, M=300) for seed in range(6)])
    ours = eig(prior_particles(model, 20_000), design, method="enumerate")
    assert abs(values.mean().item() - ours.value.item()) < 0.01 + 3 * values.std().item() / 6**0.5


def test_chain_rule_in_any_order():
    generator_ = seeded(2)
    cov = torch.tensor([[2.0, 0.6, 0.1], [0.6, 1.0, 0.0], [0.1, 0.0, 0.5]], dtype=torch.float64)
    model = LinearGaussian(lambda x: x, cov, 0.7, bounds=[[-2.0] * 3, [2.0] * 3])
    designs = model.sample_designs((6,), generator_)
    for order in (torch.arange(6), torch.randperm(6, generator=generator_)):
        path = designs[order]
        steps = [
            model.expected_information(path[t], model.posterior(path[:t], torch.zeros(t, dtype=torch.float64))[1])
            for t in range(6)
        ]
        assert sum(steps).item() == pytest.approx(model.total_information(designs).item(), abs=1e-10)


def test_chain_rule_of_a_finite_parameter_by_enumeration():
    model = HyperbolicDiscounting()
    particles = prior_particles(model, 40)
    first, second = torch.tensor([40.0, 30.0]), torch.tensor([60.0, 10.0])

    def total(x1, x2):
        value = node_eig(model, particles.theta, particles.log_weights, x1, "enumerate")
        for y in model.outcomes:
            p = (particles.log_weights + model.log_prob(y, particles.theta, x1)).logsumexp(0).exp()
            after = reweight(particles, x1, y)
            value = value + p * node_eig(model, after.theta, after.log_weights, x2, "enumerate")
        return value.item()

    assert total(first, second) == pytest.approx(total(second, first), abs=1e-5)


class Deaf(LinearGaussian):
    def mean(self, theta, design):
        return 0 * super().mean(theta, design) + 1.0


def test_an_outcome_that_does_not_depend_on_the_parameter_tells_nothing():
    deaf = Deaf(lambda x: x, torch.eye(1, dtype=torch.float64), 1.0, bounds=[[-3.0], [3.0]])
    particles = equal_weights(deaf, standard_normal(200))
    for method in ("quadrature", "pce", "nmc"):
        assert eig(particles, TWO, method=method).value.item() == pytest.approx(0, abs=1e-6)
    model = HyperbolicDiscounting()
    never = torch.tensor([[100.0, 0.0]])  # 100 now or 100 now: chance decides
    assert eig(prior_particles(model, 50), never, method="enumerate").value.item() == pytest.approx(0, abs=1e-6)


def test_information_is_not_negative_and_at_most_the_entropies():
    designs = LocationFinding().sample_designs((50,), seeded(1))
    finite = prior_particles(LocationFinding(), 3)
    value = eig(finite, designs).value
    assert (value >= -1e-6).all()
    assert (value <= math.log(3) + 1e-6).all()
    assert value.max() > 0.1
    model = HyperbolicDiscounting()
    binary = eig(prior_particles(model, 300), model.sample_designs((200,), seeded(2)), method="enumerate").value
    assert (binary >= -1e-6).all()
    assert (binary <= math.log(2)).all()


def test_far_apart_outcomes_tell_which_particle_it_is():
    theta = torch.tensor([[-30.0], [0.0], [30.0]], dtype=torch.float64)
    log_weights = random_weights(3)
    value = node_eig(LINE, theta, log_weights, TWO[0])
    assert value.item() == pytest.approx(torch.special.entr(log_weights.exp()).sum().item(), abs=1e-4)


@pytest.mark.parametrize("method", ["quadrature", "pce", "nmc", "enumerate", "atoms"])
def test_gradients_are_those_of_finite_differences(method):
    model = {"enumerate": HyperbolicDiscounting(), "atoms": Clipped(1.0)}.get(method, LocationFinding())
    theta = model.sample_prior((12,), seeded(4)).double()
    design = model.sample_designs((2,), seeded(5)).double()
    logits = torch.randn(12, generator=seeded(6), dtype=torch.float64)
    options = {"num_obs": 5, "num_contrastive": 4}
    if method in ("pce", "nmc"):  # which particles are drawn follows the weights, at their values
        call = lambda x: node_eig(model, theta, logits.log_softmax(0), x, method, **options)  # noqa: E731
        assert torch.autograd.gradcheck(call, (design.requires_grad_(),), rtol=1e-4)
        return
    call = lambda x, w: node_eig(model, theta, w.log_softmax(0), x, method, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (design.requires_grad_(), logits.requires_grad_()), rtol=1e-4)


def test_quadrature_is_differentiable_in_the_spread_too():
    model = Pharmacokinetics()
    theta = model.sample_prior((7,), seeded(4)).double()
    design = torch.tensor([[2.0], [11.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: node_eig(model, theta, random_weights(7), x), (design,), rtol=1e-4)


def test_contrastive_gradients_include_that_of_the_weights():
    logits = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    theta = standard_normal(200)
    gradients = []
    for method, options in (("quadrature", {}), ("pce", {"num_obs": 3000, "num_contrastive": 300})):
        value = node_eig(LINE, theta, (logits * theta[:, 0].square()).log_softmax(0), TWO[0], method, **options)
        gradients.append(torch.autograd.grad(value, logits)[0].sum().item())
    assert gradients[1] == pytest.approx(gradients[0], rel=0.15)


@pytest.mark.parametrize("method", ["quadrature", "pce", "enumerate", "atoms"])
def test_nodes_do_not_depend_on_their_batch(method, monkeypatch):
    model = {"enumerate": HyperbolicDiscounting(), "atoms": CES()}.get(method, LocationFinding())
    theta = model.sample_prior((3, 1, 1, 40), seeded(4))
    log_weights = random_weights(3, 2, 4, 40, dtype=torch.float32)
    design = model.sample_designs((3, 2, 4), seeded(5))
    options = {"num_obs": 6, "num_contrastive": 5, "method": method}
    whole = node_eig(model, theta, log_weights, design, **options)
    assert whole.shape == (3, 2, 4)
    alone = [
        node_eig(model, theta[r, 0, 0], log_weights[r, s, n], design[r, s, n], **options)
        for r in range(3)
        for s in range(2)
        for n in range(4)
    ]
    torch.testing.assert_close(whole.flatten(), torch.stack(alone), rtol=1e-5, atol=2e-5)
    monkeypatch.setattr("labkit.design.information._OUTCOMES", 100)
    monkeypatch.setattr("labkit.design.information._BLOCK", 1000)
    torch.testing.assert_close(node_eig(model, theta, log_weights, design, **options), whole, rtol=1e-5, atol=2e-5)


def test_estimates_repeat_bit_by_bit_and_seeds_differ():
    particles = prior_particles(LocationFinding(), 100)
    designs = LocationFinding().sample_designs((4,), seeded())
    first, second, other = (eig(particles, designs, method="pce", seed=seed).value for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_particle_belief_and_its_particles_give_the_same():
    model = LocationFinding()
    belief = ParticleBelief.prior(model, 2, 200, seeded()).update(torch.full((2, 2), 0.4), torch.tensor([0.5, 2.0]))
    designs = model.sample_designs((5,), seeded(1))
    expected = node_eig(model, belief.theta[1], belief.log_weights[1], designs)
    torch.testing.assert_close(eig(belief.rows(slice(1, 2)), designs).value, expected)


class Simulator(DesignModel):
    theta_dim, design_dim, bounds, design_names = 1, 1, torch.tensor([[0.0], [1.0]]), ("x",)

    def prior(self):
        return Independent(Normal(torch.zeros(1), torch.ones(1)), 1)

    def simulate(self, theta, design, noise=None, *, generator=None):
        return theta[..., 0]


class Vector(LinearGaussian):
    """Two outcomes at once."""

    def mean(self, theta, design):
        return torch.stack([super().mean(theta, design)] * 2, -1)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (LINE, {"method": "exact"}, "method='exact': expected one of quadrature"),
        (LINE, {"method": "enumerate"}, "infinitely many outcomes; take 'quadrature' or 'pce'"),
        (LINE, {"method": "atoms"}, "no censored Gaussian outcome"),
        (LINE, {"method": "ace"}, "posterior: method='ace' needs"),
        (LINE, {"method": "pce", "num_contrastive": 0}, "num_contrastive=0"),
        (LINE, {"method": "pce", "num_obs": 0}, "num_obs=0"),
        (LINE, {"method": "pce", "seed": -1}, "seed=-1"),
        (Clipped(1.0), {}, "no Gaussian outcome; take 'atoms'"),
        (Clipped(1.0), {"method": "atoms", "num_obs": 11}, "num_obs=11: expected at most the number of particles, 10"),
        (Simulator(), {"method": "pce"}, "Simulator has no log_prob.*barber_agakov"),
        (
            Vector(lambda x: x, torch.eye(1, dtype=torch.float64), 1.0, bounds=[[-3.0], [3.0]]),
            {},
            r"mean gave shape \(1, 10, 2\); expected \(1, 10\).*scalar outcome",
        ),
    ],
)
def test_methods_that_do_not_fit_are_refused(model, options, message):
    particles = equal_weights(model, torch.linspace(-1, 1, 10, dtype=torch.float64)[:, None])
    with pytest.raises(ValueError, match=message):
        eig(particles, torch.ones(1, 1, dtype=torch.float64), **options)


@pytest.mark.parametrize(
    ("designs", "message"),
    [
        (torch.ones(2), r"designs: got shape \(2,\); expected \(K, 1\)"),
        (torch.ones(2, 3), "designs: got shape"),
        (torch.tensor([[torch.nan]]), "designs=.*finite"),
        (torch.tensor([[4.0]]), "designs=.*box"),
    ],
)
def test_bad_designs_are_refused(designs, message):
    with pytest.raises(ValueError, match=message):
        eig(equal_weights(LINE, standard_normal(10)), designs.double())


def test_several_beliefs_or_too_wide_ones_are_refused():
    with pytest.raises(ValueError, match="expected one rollout"):
        eig(ParticleBelief.prior(LINE, 2, 10, seeded()), TWO)
    with pytest.raises(ValueError, match=r"spread over .* standard deviations.*take 'pce'"):
        eig(equal_weights(LINE, 1e6 * standard_normal(10)), TWO)
    with pytest.raises(ValueError, match="take ace_eig"):
        node_eig(LINE, standard_normal(10), random_weights(10), TWO[0], "ace")


def test_designs_in_double_precision_are_worth_the_same():
    model = LocationFinding()
    belief = ParticleBelief.prior(model, 1, 50, torch.Generator().manual_seed(0))
    for method in ("quadrature", "pce"):
        single = eig(belief, torch.tensor([[0.25, 0.5]]), method=method).value
        assert torch.equal(eig(belief, np.array([[0.25, 0.5]]), method=method).value, single)


@pytest.mark.parametrize(
    ("theta", "log_weights", "message"),
    [
        (torch.full((5, 2), 0.5), torch.zeros(5), "weights sum to 5; expected a sum of 1|weights with the sum 5"),
        (torch.full((4, 2), 0.5), torch.full((5,), -math.log(5)), "expected one weight for each"),
        (torch.ones(0, 2), torch.ones(0), "N >= 1 particles"),
        (torch.full((5, 2), math.nan), torch.full((5,), -math.log(5)), "10 entries of theta that are not finite"),
        (torch.full((5, 2), 0.5), torch.full((5,), math.nan), "weights"),
    ],
)
def test_bad_particles_are_refused(theta, log_weights, message):
    with pytest.raises(ValueError, match=message):
        eig(PlanningParticles(LocationFinding(), theta, log_weights), torch.full((1, 2), 0.5), method="pce")


def test_what_is_no_belief_is_refused():
    with pytest.raises(ValueError, match="belief: got a LocationFinding"):
        eig(LocationFinding(), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="designs='here'"):
        eig(PlanningParticles(LocationFinding(), torch.full((1, 2), 0.5), torch.zeros(1)), "here")


def test_terms_that_are_not_finite_count_as_zero_and_are_counted():
    model = LocationFinding(noise_sd=1e-30)
    belief = ParticleBelief.prior(model, 1, 60, torch.Generator().manual_seed(0))
    estimate = eig(belief, torch.full((1, 2), 0.3), method="nmc", num_contrastive=1)
    assert estimate.num_nonfinite > 0
    assert estimate.value.isfinite().all()

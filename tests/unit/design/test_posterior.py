import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from labkit.design.bounds import barber_agakov
from labkit.design.ces import CES
from labkit.design.models import LinearGaussian, LocationFinding
from labkit.design.posterior import AmortizedPosterior, GaussianMixture, Marginals, load_posterior, simulate_histories
from labkit.design.training import (
    DATA,
    RECIPES,
    amortisation_gap,
    approaches,
    exact_log_posterior,
    held_out,
    indifferent,
    random_walks,
    training_designs,
)

SMALL = {"width": 16, "layers": 1, "hidden": 32, "components": 3}


class LineFit(LinearGaussian):
    """y ~ N(θ_1 + θ_2 x, 0.5²), θ ~ N(0, Σ), with the exact posterior as a `log_prob`."""

    def __init__(self):
        cov = torch.tensor([[1.0, 0.3], [0.3, 0.5]])
        super().__init__(lambda x: torch.cat([torch.ones_like(x), x], -1), cov, 0.5, bounds=[[-1.0], [1.0]])

    def posterior(self, X, Y):
        phi = self.features(X).double()
        precision = torch.linalg.inv(self.prior_cov.double()) + phi.mT @ phi / self.noise_sd**2
        mean = torch.linalg.solve(precision, (phi.mT @ Y.double()[..., None])[..., 0] / self.noise_sd**2)
        return MultivariateNormal(mean, precision_matrix=precision)

    def evidence(self, X, Y):
        phi = self.features(X).double()
        cov = phi @ self.prior_cov.double() @ phi.mT + self.noise_sd**2 * torch.eye(X.shape[-2], dtype=torch.float64)
        return MultivariateNormal(torch.zeros(X.shape[-2], dtype=torch.float64), cov).log_prob(Y.double())


class Exact:
    """The exact posterior in the place of a network."""

    def __init__(self, model):
        self.model = model

    def log_prob(self, theta, X, Y):
        return self.model.posterior(X, Y).log_prob(theta.double().movedim(-2, 0)).movedim(0, -1)


@pytest.fixture(scope="module")
def trained():
    """A small network after 400 steps, its experiment, and the trace of its loss."""
    model = LineFit()
    network = AmortizedPosterior(model, **SMALL)
    trace = network.fit(horizon=4, steps=400, batch=64, lr=3e-3)
    return network, model, trace


def histories(model, count, length, seed=99):
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda theta, steps, generator: model.sample_designs((len(theta), steps), generator)  # noqa: E731
    return simulate_histories(model, uniform, count, length, generator)


def random_mixture(batch=(), components=3, dim=2, requires_grad=False):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(*batch, components, generator=generator, dtype=torch.float64)
    mean = 2 * torch.randn(*batch, components, dim, generator=generator, dtype=torch.float64)
    raw = torch.randn(*batch, components, dim, dim, generator=generator, dtype=torch.float64)
    tril = raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())
    for tensor in (logits, mean, tril):
        tensor.requires_grad_(requires_grad)
    return GaussianMixture(logits.log_softmax(-1), mean, tril), (logits, mean, tril)


def test_the_density_of_a_mixture_is_that_of_torch():
    mixture, (logits, mean, tril) = random_mixture(batch=(4,), dim=3)
    v = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i in range(4):
        law = MixtureSameFamily(Categorical(logits=logits[i]), MultivariateNormal(mean[i], scale_tril=tril[i]))
        torch.testing.assert_close(mixture.log_prob(v)[i], law.log_prob(v[i]), rtol=1e-10, atol=1e-10)


def test_draws_of_a_mixture_have_its_moments():
    mixture, (logits, mean, tril) = random_mixture()
    v = mixture.sample(200_000, torch.Generator().manual_seed(0))
    weights = logits.softmax(-1)
    expected = weights @ mean
    second = (weights[:, None, None] * (tril @ tril.mT + mean[:, :, None] * mean[:, None, :])).sum(0)
    torch.testing.assert_close(v.mean(0), expected, rtol=0, atol=4 * float(v.std(0).max()) / 200_000**0.5)
    products = v[:, :, None] * v[:, None, :]
    assert ((products.mean(0) - second).abs() <= 4 * products.std(0) / 200_000**0.5).all()


def test_draws_of_a_mixture_carry_the_gradient_of_an_expectation():
    mixture, leaves = random_mixture(requires_grad=True)
    logits, mean, tril = leaves
    v = mixture.sample(400_000, torch.Generator().manual_seed(0))
    sampled = torch.autograd.grad((v[..., 0] * v[..., 1] + v[..., 0].square()).mean(), leaves)
    second = tril.tril() @ tril.tril().mT + mean[:, :, None] * mean[:, None, :]
    exact = torch.autograd.grad((logits.softmax(-1) * (second[:, 0, 1] + second[:, 0, 0])).sum(), leaves)
    for estimate, truth in zip(sampled, exact, strict=True):
        torch.testing.assert_close(estimate, truth, rtol=0.05, atol=0.02)


def test_marginals_are_independent():
    mixture, _ = random_mixture(batch=(2,), dim=1)
    law = Marginals(mixture)
    v = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = [GaussianMixture(*(t[j] for t in (mixture.log_weights, mixture.mean, mixture.scale_tril))) for j in (0, 1)]
    expected = sum(column.log_prob(v[:, j, None]) for j, column in enumerate(columns))
    torch.testing.assert_close(law.log_prob(v), expected)
    assert law.sample(5, torch.Generator()).shape == (5, 2)


@pytest.mark.parametrize("heads", [("product",), ("joint",), ("nsf",)])
def test_a_network_is_a_density_on_the_support_of_the_prior(heads):
    model = LocationFinding()
    q = AmortizedPosterior(model, heads, **SMALL).eval()
    _, X, Y = histories(model, 1, 5)
    side = (torch.arange(400) + 0.5) / 400
    grid = torch.cartesian_prod(side, side)[None]
    with torch.no_grad():
        assert q.log_prob(grid, X, Y).exp().mean() == pytest.approx(1, abs=5e-3)
        draws = q.sample(X, Y, 1000, torch.Generator().manual_seed(0))
    assert draws.shape == (1, 1000, 2)
    assert ((draws > 0) & (draws < 1)).all()


@pytest.mark.parametrize("heads", [("product",), ("joint",), ("nsf",)])
def test_draws_follow_the_density_and_the_seed(heads):
    model = LineFit()
    q = AmortizedPosterior(model, heads, **SMALL).eval()
    _, X, Y = histories(model, 3, 2)
    with torch.no_grad():
        first, second = (q.sample(X, Y, 4000, torch.Generator().manual_seed(1)) for _ in range(2))
        entropy = -q.log_prob(first, X, Y)
        # E_q[exp(−log q) 1{box}] = volume of the box
        box = (first.abs() < 1).all(-1)
        volume = torch.where(box, entropy.exp(), 0.0)
    assert torch.equal(first, second)
    error = volume.std(-1) / 4000**0.5
    assert ((volume.mean(-1) - 4).abs() <= 4 * error).all()


def test_batch_dimensions_are_free_and_histories_do_not_mix(trained):
    network, model, _ = trained
    theta, X, Y = histories(model, 6, 3)
    with torch.no_grad():
        flat = network.log_prob(theta[:, None], X, Y)
        nested = network.log_prob(theta.reshape(2, 3, 1, 2), X.reshape(2, 3, 3, 1), Y.reshape(2, 3, 3))
        single = network.log_prob(theta[4:5, None], X[4:5], Y[4:5])
        prior = network.log_prob(theta[:, None], X[:, :0], Y[:, :0])
    torch.testing.assert_close(nested.reshape(6, 1), flat, rtol=0, atol=1e-5)
    torch.testing.assert_close(single, flat[4:5], rtol=0, atol=1e-5)
    assert prior.isfinite().all()


@pytest.mark.parametrize("head", ["product", "joint"])
def test_the_order_of_a_history_does_not_matter(head):
    model = LocationFinding()
    q = AmortizedPosterior(model).eval().using(head)
    theta, X, Y = histories(model, 5, 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            q.log_prob(theta[:, None], X[:, order], Y[:, order]), q.log_prob(theta[:, None], X, Y), rtol=0, atol=1e-5
        )


def test_draws_are_differentiable_in_the_history(trained):
    network, model, _ = trained
    _, X, Y = histories(model, 1, 3)
    mean = lambda y: network.sample(X, y, 20_000, torch.Generator().manual_seed(0)).mean((0, 1))  # noqa: E731
    y = Y.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(mean(y)[0], y)
    step = 0.05 * torch.eye(3)[0]
    with torch.no_grad():
        difference = (mean(Y + step) - mean(Y - step))[0] / 0.1
    assert gradient[0, 0] == pytest.approx(difference.item(), abs=0.05)
    assert abs(difference) > 0.05


def test_training_lowers_the_loss(trained):
    trace = trained[2]
    assert trace.step.tolist() == [100, 200, 300, 400]
    for head in ("product", "joint"):
        assert trace[head].iloc[-1] < trace[head].iloc[0] - 0.2


@pytest.mark.parametrize("head", ["product", "joint"])
def test_no_network_beats_the_exact_posterior(trained, head):
    network, model, _ = trained
    theta, X, Y = histories(model, 4000, 4)
    with torch.no_grad():
        gap = Exact(model).log_prob(theta[:, None], X, Y) - network.using(head).log_prob(theta[:, None], X, Y)
    gap = gap[:, 0].double()
    assert gap.mean() >= -3 * gap.std() / 4000**0.5
    assert gap.mean() < 0.8  # and this one has learned


def test_barber_agakov_is_exact_for_the_exact_posterior_and_below_for_a_network(trained):
    network, model, _ = trained
    theta, X, Y = histories(model, 2000, 4)
    likelihood = model.log_prob(Y.double(), theta[:, None].double(), X.double()).sum(-1)
    information = likelihood - model.evidence(X, Y)
    exact = barber_agakov(model, Exact(model), theta, X, Y)
    torch.testing.assert_close(exact, information, rtol=0, atol=1e-5)
    with torch.no_grad():
        difference = information - barber_agakov(model, network, theta, X, Y)
    assert difference.mean() >= -3 * difference.std() / 2000**0.5
    assert difference.mean() > 0


def test_training_designs_stay_in_the_box_and_keep_their_step():
    model, generator = LocationFinding(), torch.Generator().manual_seed(0)
    theta = model.sample_prior((300,), generator)
    for X in (random_walks(model, 300, 30, generator), approaches(model, theta, 30, generator)):
        assert ((X >= 0) & (X <= 1)).all()
        assert (X.diff(dim=1).abs() <= 0.2 + 1e-6).all()
    distance = (X[:, 20:] - theta[:, None]).norm(dim=-1)
    assert distance.median() < 0.1
    X = training_designs(model)(theta, 30, generator)
    assert X.shape == (300, 30, 2)
    free = (X.diff(dim=1).abs() > 0.2 + 1e-6).any(-1).any(-1).double().mean()
    assert free == pytest.approx(1 / 3, abs=0.1)


def test_informed_baskets_are_liked_about_equally():
    model, generator = CES(), torch.Generator().manual_seed(0)
    theta = model.sample_prior((500,), generator)
    X = indifferent(model, theta, 10, generator)
    uniform = model.sample_designs((500, 10), generator)
    assert ((X >= 0) & (X <= 100)).all()

    def contrast(x):
        first, second = model.utility(theta[:, None], x[..., :3]), model.utility(theta[:, None], x[..., 3:])
        return (first / second).log().abs().median()

    assert contrast(X) < 0.3 * contrast(uniform)


def test_bad_arguments_are_named():
    model = LineFit()
    with pytest.raises(ValueError, match=r"heads=\('mixture',\)"):
        AmortizedPosterior(model, ("mixture",))
    q = AmortizedPosterior(model, ("joint",), **SMALL)
    with pytest.raises(ValueError, match="head='product': this network has joint"):
        q.using("product")
    with pytest.raises(ValueError, match=r"X, Y: got X \(2, 3, 2\), Y \(2, 3\)"):
        q.log_prob(torch.zeros(2, 1, 2), torch.zeros(2, 3, 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="horizon=0"):
        q.fit(horizon=0)


def test_the_amortisation_gap_is_measured_against_the_exact_posterior(trained):
    network, model, _ = trained
    theta, X, Y = histories(model, 30, 4)
    exact = Exact(model).log_prob(theta[:, None], X, Y)[:, 0]
    torch.testing.assert_close(exact_log_posterior(model, theta, X, Y), exact, rtol=0, atol=0.1)
    with torch.no_grad():
        gap = exact - network.log_prob(theta[:, None], X, Y)[:, 0]
    torch.testing.assert_close(amortisation_gap(network, theta, X, Y), gap, rtol=0, atol=0.1)


@pytest.fixture(scope="module")
def stored():
    """The stored network of the lab."""
    return load_posterior(DATA / "location-posterior.safetensors", LocationFinding())


def test_the_stored_network_is_near_the_exact_posterior_and_not_above(stored):
    runs = held_out(RECIPES["location-posterior"], 4)
    exact = torch.cat([exact_log_posterior(stored.model, *run) for run in runs])
    for head in ("product", "joint"):
        gap = exact - torch.cat([stored.using(head).log_prob(theta[:, None], X, Y)[:, 0] for theta, X, Y in runs])
        assert gap.mean() >= -3 * gap.std() / len(gap) ** 0.5
        assert gap.mean() < 1.2


def test_the_joint_head_is_closer_than_the_product_of_marginals(stored):
    differences = []
    for theta, X, Y in held_out(RECIPES["location-posterior"], 200):
        product, joint = (stored.using(head).log_prob(theta[:, None], X, Y)[:, 0] for head in ("product", "joint"))
        differences.append(joint - product)
    difference = torch.cat(differences)
    assert difference.mean() > 3 * difference.std() / len(difference) ** 0.5


def test_the_stored_network_does_not_mind_the_order_of_a_history(stored):
    _, X, Y = histories(stored.model, 8, 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stored.tokens(X[:, order], Y[:, order]), stored.tokens(X, Y), rtol=0, atol=1e-5)

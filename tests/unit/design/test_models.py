import itertools
import math

import pytest
import torch
from torch.distributions import Independent, Normal

from labkit.design.ces import CES
from labkit.design.models import (
    DesignModel,
    GaussianModel,
    HyperbolicDiscounting,
    LinearGaussian,
    LocationFinding,
    Pharmacokinetics,
    check_bounds,
    check_designs,
    check_outcomes,
    is_gaussian,
)
from tests.unit.design.histories import seeded


def quadratic(dtype=torch.float64):
    """y = θ_1 + θ_2 x + θ_3 x² + noise, with correlated coefficients."""
    root = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.8, 0.0], [-0.3, 0.2, 0.5]], dtype=dtype)
    return LinearGaussian(lambda x: torch.cat([torch.ones_like(x), x, x**2], -1), root @ root.mT, 0.7, bounds=[[-2.0], [2.0]])


MODELS = {
    "one source": LocationFinding(),
    "two sources": LocationFinding(2, prior="normal"),
    "pharmacokinetics": Pharmacokinetics(),
    "linear": quadratic(torch.float32),
    "discounting": HyperbolicDiscounting(),
    "ces": CES(),
    "ces of the published code": CES("published_code"),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request):
    return request.param


def test_batches_of_parameters_and_designs_broadcast(model):
    theta, designs = model.sample_prior((5, 1), seeded()), model.sample_designs((4,), seeded(1))
    noise = model.noise((5, 4), seeded(2))
    y = model.simulate(theta, designs, noise)
    log_prob = model.log_prob(y, theta, designs)
    assert y.shape == log_prob.shape == (5, 4)
    assert log_prob.isfinite().all()
    one = model.simulate(theta[2, 0], designs[3], noise[2, 3])
    torch.testing.assert_close(y[2, 3], one)
    torch.testing.assert_close(log_prob[2, 3], model.log_prob(one, theta[2, 0], designs[3]))


def test_equal_seeds_give_equal_bits(model):
    def draw(seed):
        theta, designs = model.sample_prior((6,), seeded(seed)), model.sample_designs((6,), seeded(seed))
        return torch.cat([theta.flatten(), designs.flatten(), model.simulate(theta, designs, generator=seeded(seed))])

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_drawing_from_the_prior_leaves_torchs_global_generator_alone(model):
    before = torch.get_rng_state()
    model.sample_prior((3,), seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_designs_are_drawn_inside_the_box(model):
    designs = model.sample_designs((1000,), seeded())
    check_designs(model, designs)
    assert len(model.design_names) == model.design_dim == model.bounds.shape[1]
    bounded = model.bounds.isfinite().all(0)
    low, high = model.bounds[:, bounded]
    shares = (designs[:, bounded] - low) / (high - low)
    torch.testing.assert_close(shares.mean(0), torch.full_like(low, 0.5), rtol=0, atol=4 * 12**-0.5 / 1000**0.5)


def test_unconstrained_coordinates_go_there_and_back(model):
    theta = model.sample_prior((200,), seeded())
    v = model.to_unconstrained(theta)
    torch.testing.assert_close(model.from_unconstrained(v), theta, rtol=1e-4, atol=1e-5)
    anywhere = 2 * torch.randn((200, v.shape[-1]), generator=seeded(1))
    torch.testing.assert_close(model.to_unconstrained(model.from_unconstrained(anywhere)), anywhere, rtol=1e-3, atol=1e-3)


def test_the_unconstrained_prior_is_the_prior_times_the_jacobian(model):
    # E_q[p / q] = 1 for a wide q, and E_q[(p / q) θ] = E[θ]
    theta = model.sample_prior((20_000,), seeded()).double()
    v = model.to_unconstrained(theta)
    q = Independent(Normal(v.mean(0), 1.5 * v.std(0)), 1)
    draws = v.mean(0) + 1.5 * v.std(0) * torch.randn((200_000, v.shape[1]), generator=seeded(1), dtype=torch.float64)
    weights = (model.log_prior_unconstrained(draws) - q.log_prob(draws)).exp()
    stderr = weights.std() / len(weights) ** 0.5
    assert abs(weights.mean() - 1) < 4 * stderr + 1e-6
    means = weights @ model.from_unconstrained(draws) / weights.sum()
    torch.testing.assert_close(means, theta.mean(0), rtol=0, atol=0.05 * float(theta.std(0).max()))


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.outcomes is None])
def test_outcomes_are_differentiable_at_fixed_noise(name):
    model = MODELS[name]
    theta = model.sample_prior((20,), seeded()).double().requires_grad_()
    designs = model.sample_designs((20,), seeded(1)).double().requires_grad_()
    noise = model.noise((20,), seeded(2)).double()
    gradients = torch.autograd.grad(model.simulate(theta, designs, noise).sum(), (theta, designs))
    for gradient, at in zip(gradients, (0, 1), strict=True):
        step = 1e-6
        for j in range(gradient.shape[1]):
            shift = torch.zeros(gradient.shape[1], dtype=torch.float64).index_fill(0, torch.tensor(j), step)
            up, down = (
                model.simulate(theta + s * shift, designs, noise)
                if at == 0
                else model.simulate(theta, designs + s * shift, noise)
                for s in (1, -1)
            )
            torch.testing.assert_close(gradient[:, j], ((up - down) / (2 * step)).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["one source", "two sources", "pharmacokinetics", "linear"])
def test_a_gaussian_law_integrates_to_one_and_is_that_of_the_simulated_outcomes(name):
    model = MODELS[name]
    assert is_gaussian(model)
    theta, design = model.sample_prior((3,), seeded()).double(), model.sample_designs((3,), seeded(1)).double()
    mean, scale = model.mean(theta, design), model.scale(theta, design).expand(3)
    y = mean + scale * torch.linspace(-9, 9, 4001, dtype=torch.float64)[:, None]
    density = model.log_prob(y, theta, design).exp()
    torch.testing.assert_close(torch.trapezoid(density, y, dim=0), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-9)
    draws = model.simulate(theta, design, torch.randn((40_000, 3), generator=seeded(2), dtype=torch.float64))
    torch.testing.assert_close((draws.mean(0) - mean) / scale, torch.zeros_like(mean), rtol=0, atol=4 / 200)
    torch.testing.assert_close(draws.std(0) / scale, torch.ones_like(mean), rtol=0, atol=4 / 280)


def test_only_uncensored_continuous_models_are_gaussian():
    assert [name for name, model in MODELS.items() if is_gaussian(model)] == [
        "one source", "two sources", "pharmacokinetics", "linear"
    ]  # fmt: skip


def test_the_probabilities_of_finitely_many_outcomes_sum_to_one_and_are_their_frequencies():
    model = MODELS["discounting"]
    theta, design = model.sample_prior((50,), seeded()), model.sample_designs((50,), seeded(1))
    probs = model.log_prob(model.outcomes[:, None], theta, design).exp()
    torch.testing.assert_close(probs.sum(0), torch.ones(50))
    frequency = model.simulate(theta, design, torch.rand((20_000, 50), generator=seeded(2))).mean(0)
    torch.testing.assert_close(frequency, probs[1], rtol=0, atol=4.5 * 0.5 / 141)


# --- location finding


def test_the_mean_at_the_source_and_far_from_it():
    model, source = LocationFinding(), torch.tensor([0.3, 0.6])
    assert model.mean(source, source).item() == pytest.approx(math.log(0.1 + 1e4), abs=1e-4)
    assert model.mean(source, torch.tensor([1e6, 0.0])).item() == pytest.approx(math.log(0.1), abs=1e-5)


def test_sources_can_be_numbered_in_any_order():
    model = LocationFinding(3, prior="normal")
    theta, design = model.sample_prior((10,), seeded()), model.sample_designs((10,), seeded(1))
    for order in itertools.permutations(range(3)):
        swapped = theta.unflatten(-1, (3, 2))[:, list(order)].flatten(-2)
        torch.testing.assert_close(model.mean(swapped, design), model.mean(theta, design))


def test_the_signal_is_the_textbook_sum_over_sources():
    model = LocationFinding(2, dim=3, prior="normal")
    theta, design = model.sample_prior((10,), seeded()).double(), model.sample_designs((10,), seeded(1)).double()
    squared = (theta.unflatten(-1, (2, 3)) - design[:, None]).square().sum(-1)
    torch.testing.assert_close(model.mean(theta, design), (0.1 + (1 / (1e-4 + squared)).sum(-1)).log())


@pytest.mark.parametrize("reflect", [(0,), (1,), (0, 1)])
def test_information_is_invariant_under_reflections_of_the_unit_square(reflect):
    model = LocationFinding()
    theta, designs = model.sample_prior((2000,), seeded()).double(), model.sample_designs((7,), seeded(1)).double()
    noise = model.noise((200, 7), seeded(2))

    def information(flip):
        y = model.simulate(flip(theta[:200, None]), flip(designs), noise)
        log_probs = model.log_prob(y[:, None], flip(theta[:, None]), flip(designs))  # (200, 2000, 7)
        own = model.log_prob(y, flip(theta[:200, None]), flip(designs))
        return (own - log_probs.logsumexp(1) + math.log(2000)).mean(0)

    def mirror(points):
        return points.index_copy(-1, torch.tensor(reflect), 1 - points[..., list(reflect)])

    plain = information(lambda points: points)
    torch.testing.assert_close(information(mirror), plain, rtol=1e-9, atol=1e-9)
    assert plain.std() > 0.01


def test_uniform_random_designs_reproduce_the_published_location_information():
    model = LocationFinding()
    theta, designs = model.sample_prior((200,), seeded()), model.sample_designs((200, 30), seeded(1))
    y = model.simulate(theta[:, None], designs, generator=seeded(2))
    contrastive = model.sample_prior((30_000,), seeded(3)).split(1000)  # far above the e^5 that matter
    own = model.log_prob(y, theta[:, None], designs).sum(-1).double()
    others = [
        torch.cat([model.log_prob(outcomes, part[:, None], path).sum(-1) for part in contrastive]).double().logsumexp(0)
        for path, outcomes in zip(designs, y, strict=True)
    ]
    information = own - torch.logaddexp(own, torch.stack(others)) + math.log(30_001)
    assert abs(information.mean() - 5.17) < 3 * information.std() / 200**0.5 + 0.1


# --- pharmacokinetics


def test_the_concentration_starts_at_zero_and_peaks_where_calculus_says():
    model = Pharmacokinetics()
    theta = torch.tensor([1.0, 0.1, 20.0], dtype=torch.float64).log()
    assert model.mean(theta, torch.zeros(1, dtype=torch.float64)) == 0
    peak = math.log(1.0 / 0.1) / (1.0 - 0.1)
    assert peak == pytest.approx(2.5584, abs=5e-5)
    time = torch.linspace(0, 24, 240_001, dtype=torch.float64)[:, None]
    assert time[model.mean(theta, time).argmax()].item() == pytest.approx(peak, abs=1e-4)


def test_the_concentration_is_linear_in_the_dose():
    theta, time = Pharmacokinetics().sample_prior((9,), seeded()), torch.linspace(0.5, 24, 9)[:, None]
    double = Pharmacokinetics(dose=800).mean(theta, time)
    torch.testing.assert_close(double, 2 * Pharmacokinetics().mean(theta, time))


def test_equal_rates_of_uptake_and_washout_are_the_limit():
    theta = torch.tensor([0.3, 0.3, 20.0], dtype=torch.float64).log()
    time = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    limit = 400 / 20 * 0.3 * time[:, 0] * torch.exp(-0.3 * time[:, 0])
    torch.testing.assert_close(Pharmacokinetics().mean(theta, time), limit, rtol=1e-5, atol=0)


def test_the_noise_grows_with_the_concentration():
    model = Pharmacokinetics()
    theta, time = model.sample_prior((9,), seeded()), torch.linspace(0, 24, 9)[:, None]
    torch.testing.assert_close(model.scale(theta, time) ** 2, 0.01 * model.mean(theta, time) ** 2 + 0.1)


# --- linear-Gaussian


def test_information_along_a_linear_gaussian_path_adds_up_in_any_order():
    model = quadratic()
    designs = model.sample_designs((6,), seeded())
    total = model.total_information(designs)
    phi = model.features(designs)
    exact = 0.5 * torch.logdet(torch.eye(6, dtype=torch.float64) + phi @ model.prior_cov @ phi.mT / 0.7**2)
    for order in (range(6), (3, 1, 5, 0, 4, 2)):
        steps = designs[list(order)]
        gains = [
            model.expected_information(x, model.posterior(steps[:t], torch.zeros(t, dtype=torch.float64))[1])
            for t, x in enumerate(steps)
        ]
        assert sum(gains).item() == pytest.approx(total.item(), abs=1e-10)
    assert total.item() == pytest.approx(exact.item(), abs=1e-10)


def test_the_information_of_the_textbook_design():
    model = LinearGaussian(lambda x: x, [[1.0]], 1.0, bounds=[[0.0], [3.0]])
    assert model.expected_information(torch.tensor([2.0])).item() == pytest.approx(0.804719, abs=1e-6)


def test_the_linear_gaussian_posterior_is_that_of_the_normal_equations():
    model = quadratic()
    designs, y = model.sample_designs((2, 5), seeded()), torch.randn((2, 5), generator=seeded(1), dtype=torch.float64)
    mean, cov = model.posterior(designs, y)
    phi = model.features(designs)
    precision = torch.linalg.inv(model.prior_cov) + phi.mT @ phi / 0.7**2
    torch.testing.assert_close(cov, torch.linalg.inv(precision))
    torch.testing.assert_close(mean, torch.linalg.solve(precision, phi.mT @ y[..., None] / 0.7**2)[..., 0])


# --- discounting


def test_a_person_is_torn_where_both_options_are_worth_the_same():
    model = HyperbolicDiscounting()
    theta, days = torch.tensor([math.log(0.02), 3.0]), 50.0
    same = 100 / (1 + 0.02 * days)
    probs = model.probability(theta, torch.tensor([[same, days], [0.0, 0.0], [100.0, 1000.0]]))
    torch.testing.assert_close(probs, torch.tensor([0.5, 0.99, 0.01]))
    expected = 0.01 + 0.98 * 0.5 * (1 + math.erf((same - 48) / 3.001))
    assert model.probability(theta, torch.tensor([48.0, days])).item() == pytest.approx(expected, abs=1e-6)


def test_larger_rewards_now_and_longer_delays_make_waiting_less_likely():
    model = HyperbolicDiscounting()
    theta = model.sample_prior((30, 1), seeded()).double()
    rewards = torch.stack([torch.linspace(0, 100, 50), torch.full((50,), 70.0)], -1).double()
    delays = torch.stack([torch.full((50,), 40.0), torch.linspace(0, 1000, 50)], -1).double()
    for designs in (rewards, delays):
        assert (torch.diff(model.probability(theta, designs), dim=-1) <= 1e-12).all()


# --- users' own models and bad arguments


class Coin(DesignModel):
    """A user's model: a coin of unknown bias, thrown x times."""

    theta_dim = design_dim = 1
    design_names, bounds = ("throws",), torch.tensor([[1.0], [9.0]])

    def prior(self):
        return Independent(torch.distributions.Uniform(torch.zeros(1), torch.ones(1)), 1)

    def simulate(self, theta, design, noise=None, *, generator=None):
        noise = self.noise(theta.shape[:-1], generator) if noise is None else noise
        return theta[..., 0] * design[..., 0] + noise


class Line(GaussianModel):
    """A user's model with a mean and a scale."""

    theta_dim = design_dim = 1
    design_names, bounds = ("x",), torch.tensor([[0.0], [1.0]])

    def prior(self):
        return Independent(Normal(torch.zeros(1), torch.ones(1)), 1)

    def mean(self, theta, design):
        return (theta * design)[..., 0]

    def scale(self, theta, design):
        return torch.tensor(0.5)


def test_a_users_model_needs_two_methods_and_a_gaussian_one_a_mean_and_a_scale():
    coin, line = Coin(), Line()
    assert not hasattr(coin, "log_prob")
    assert not is_gaussian(coin)
    assert coin.simulate(coin.sample_prior((4,), seeded()), coin.sample_designs((4,), seeded()), generator=seeded()).shape == (
        4,
    )
    assert is_gaussian(line)
    y = line.log_prob(torch.tensor(0.3), torch.tensor([0.2]), torch.tensor([1.0]))
    assert y.item() == pytest.approx(Normal(0.2, 0.5).log_prob(torch.tensor(0.3)).item())


def test_parameters_and_designs_of_another_dimension_are_refused(model):
    theta, design = model.sample_prior((2,), seeded()), model.sample_designs((2,), seeded())
    y = model.simulate(theta, design, generator=seeded())
    with pytest.raises(ValueError, match=r"theta: got shape \(2, 9\)"):
        model.simulate(theta.new_zeros(2, 9), design)
    with pytest.raises(ValueError, match=r"design: got shape \(2, 9\)"):
        model.log_prob(y, theta, design.new_zeros(2, 9))


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ([0.5], r"design: got shape \(1,\)"),
        ([0.5, math.nan], "expected finite"),
        ([math.inf, 0.5], "expected finite"),
        ([0.5, 1.1], "box"),
    ],
)
def test_bad_designs_are_refused(design, message):
    with pytest.raises(ValueError, match=message):
        check_designs(LocationFinding(), torch.tensor(design))


@pytest.mark.parametrize(
    ("model", "y", "message"),
    [
        (LocationFinding(), math.nan, "expected finite"),
        (LocationFinding(), -math.inf, "expected finite"),
        (HyperbolicDiscounting(), 0.5, "expected outcomes among"),
        (CES(), 15.3, "expected outcomes in"),
    ],
)
def test_bad_outcomes_are_refused(model, y, message):
    with pytest.raises(ValueError, match=message):
        check_outcomes(model, torch.tensor([1.0, y]))
    check_outcomes(model, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0.0, 1.0], r"got shape \(2,\)"),
        ([[0.0], [1.0], [2.0]], r"got shape \(3, 1\)"),
        ([[], []], r"got shape \(2, 0\)"),
        ([[0.0, 1.0], [1.0, 1.0]], "below its highest"),
        ([[0.0], [math.nan]], "below its highest"),
    ],
)
def test_bad_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        check_bounds(bounds)


def test_bounds_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match=r"expected \(2, 3\)"):
        check_bounds([[0.0], [1.0]], 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocationFinding(0), "n_sources=0"),
        (lambda: LocationFinding(dim=0), "dim=0"),
        (lambda: LocationFinding(prior="flat"), "prior='flat'"),
        (lambda: LocationFinding(noise_sd=0.0), "noise_sd=0.0"),
        (lambda: Pharmacokinetics(prior_var=-1.0), "prior_var=-1.0"),
        (lambda: Pharmacokinetics(dose=math.nan), "dose=nan"),
        (lambda: HyperbolicDiscounting(max_delay=0.0), "max_delay=0.0"),
        (lambda: LinearGaussian(lambda x: x, [[-1.0]], bounds=[[0.0], [1.0]]), "prior_cov"),
        (lambda: LinearGaussian(lambda x: x, [1.0], bounds=[[0.0], [1.0]]), "prior_cov"),
        (lambda: LinearGaussian(lambda x: x, [[1.0]], 0.0, bounds=[[0.0], [1.0]]), "noise=0.0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocationFinding(n_sources=1.5), "n_sources=1.5"),
        (lambda: LocationFinding(noise_sd="a"), "noise_sd='a'"),
        (lambda: Pharmacokinetics(dose=None), "dose=None"),
        (lambda: LinearGaussian(lambda x: x, [[1.0, 2.0], [0.0, 5.0]], bounds=[[0, 0], [1, 1]]), "prior_cov: .*symmetric"),
        (lambda: LinearGaussian(lambda x: x, "a", bounds=[[0.0], [1.0]]), "prior_cov='a'"),
        (lambda: LinearGaussian(None, [[1]], bounds=[[0.0], [1.0]]), "features=None"),
        (lambda: LinearGaussian(lambda x: x.sum(-1), [[1]], bounds=[[0.0], [1.0]]), "features: got"),
    ],
)
def test_numbers_of_the_wrong_kind_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_outcomes_that_cannot_be_have_no_probability():
    money, market = HyperbolicDiscounting(), CES()
    generator = torch.Generator().manual_seed(0)
    theta, design = money.sample_prior((3,), generator), money.sample_designs((3,), generator)
    assert (money.log_prob(torch.tensor(0.3), theta, design) == -math.inf).all()
    theta, design = market.sample_prior((3,), generator), market.sample_designs((3,), generator)
    assert market.log_prob(torch.tensor(math.nan), theta, design).isnan().all()

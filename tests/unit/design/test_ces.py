import math

import pytest
import torch
from torch.distributions import Normal

from labkit.design.ces import CENSOR, CES, censored_log_prob
from tests.unit.design.histories import seeded

THETA = torch.tensor([0.2, 0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
DESIGN = torch.tensor([10.0, 20.0, 30.0, 12.0, 15.0, 25.0], dtype=torch.float64)


@pytest.fixture(params=["standard", "published_code"])
def model(request):
    return CES(request.param)


def test_the_probe_of_utilities_mean_and_spread():
    model = CES()
    assert model.utility(THETA, DESIGN[:3]).item() == pytest.approx(13.027087, abs=5e-7)
    assert model.utility(THETA, DESIGN[3:]).item() == pytest.approx(13.572887, abs=5e-7)
    assert model.mean(THETA, DESIGN).item() == pytest.approx(-0.545800, abs=5e-7)
    assert model.scale(THETA, DESIGN).item() == pytest.approx(0.041742, abs=5e-7)


def test_the_published_code_squashes_once_more():
    theta = torch.tensor([0.2, 0.7, 0.2, 0.1, 12.0], dtype=torch.float64)
    rho, alpha = 0.01 + 0.98 * torch.sigmoid(THETA[:1]), torch.softmax(THETA[1:4], -1)
    as_standard = torch.cat([rho, alpha, torch.tensor([10.0], dtype=torch.float64)])
    published = CES("published_code")
    torch.testing.assert_close(published.mean(theta, DESIGN), CES().mean(as_standard, DESIGN))
    torch.testing.assert_close(published.scale(theta, DESIGN), CES().scale(as_standard, DESIGN))
    empty = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(published.utility(theta, empty), torch.tensor(0.01, dtype=torch.float64))
    torch.testing.assert_close(CES().utility(theta, empty), torch.tensor(1e-3, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_utility_is_homogeneous_of_degree_one(model, scale):
    theta = model.sample_prior((200,), seeded()).double()
    baskets = 1 + 29 * torch.rand((200, 3), generator=seeded(1), dtype=torch.float64)
    torch.testing.assert_close(model.utility(theta, scale * baskets), scale * model.utility(theta, baskets))


def test_utility_at_rho_one_is_the_weighted_mean_and_near_zero_the_geometric_one():
    alpha, baskets = THETA[1:4], 100 * torch.rand((50, 3), generator=seeded(), dtype=torch.float64)
    at = torch.cat([torch.ones(1, dtype=torch.float64), THETA[1:]])
    torch.testing.assert_close(CES().utility(at, baskets), baskets @ alpha)
    at = torch.cat([torch.full((1,), 1e-9, dtype=torch.float64), THETA[1:]])
    torch.testing.assert_close(CES().utility(at, baskets), (baskets.log() @ alpha).exp(), rtol=1e-6, atol=0)


def test_utility_is_the_power_mean_it_says():
    theta = CES().sample_prior((200,), seeded()).double()
    baskets = 0.1 + 99 * torch.rand((200, 3), generator=seeded(1), dtype=torch.float64)
    theta[:, 1:4] /= theta[:, 1:4].sum(-1, keepdim=True)  # to more digits than float32 has
    rho = theta[:, 0]
    power = (theta[:, 1:4] * baskets ** rho[:, None]).sum(-1) ** (1 / rho)
    torch.testing.assert_close(CES().utility(theta, baskets), power, rtol=1e-9, atol=0)


def test_swapping_the_baskets_mirrors_the_mark(model):
    theta, designs = model.sample_prior((100,), seeded()).double(), model.sample_designs((100,), seeded(1)).double()
    noise = model.noise((100,), seeded(2), torch.float64)
    swapped = torch.cat([designs[:, 3:], designs[:, :3]], -1)
    y = model.simulate(theta, designs, noise)
    torch.testing.assert_close(model.simulate(theta, swapped, -noise), -y)  # sigmoid(−η) = 1 − sigmoid(η)
    torch.testing.assert_close(model.log_prob(-y, theta, swapped), model.log_prob(y, theta, designs))


def test_the_law_of_the_mark_integrates_to_one_with_its_two_atoms(model):
    theta, designs = model.sample_prior((300,), seeded()).double(), model.sample_designs((300,), seeded(1)).double()
    mean, scale = model.mean(theta, designs), model.scale(theta, designs)
    low, high = (mean - 9 * scale).clamp(-CENSOR, CENSOR), (mean + 9 * scale).clamp(-CENSOR, CENSOR)
    edge = CENSOR - 1e-12
    y = (low + (high - low) * torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None]).clamp(-edge, edge)
    inside = torch.trapezoid(model.log_prob(y, theta, designs).exp(), y, dim=0)
    atoms = sum(model.log_prob(torch.full((300,), end, dtype=torch.float64), theta, designs).exp() for end in (-CENSOR, CENSOR))
    assert (inside > 0.9).any()
    assert (atoms > 0.9).any()
    torch.testing.assert_close(inside + atoms, torch.ones(300, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_largest_outcome_is_the_logit_of_the_largest_mark():
    assert math.log1p(-(2**-22)) - math.log(2**-22) == pytest.approx(CENSOR, abs=1e-12)
    assert CES.limit == CENSOR == pytest.approx(15.249, abs=5e-4)


def test_atoms_are_tail_probabilities_even_far_out():
    mean, scale = torch.tensor([10.0, -40.0, 300.0]).double(), torch.tensor([4.0, 2.0, 1.0]).double()
    upper = censored_log_prob(torch.tensor(CENSOR).double(), mean, scale)
    lower = censored_log_prob(torch.tensor(-CENSOR).double(), mean, scale)
    law = Normal(mean, scale)
    torch.testing.assert_close(upper[0], (1 - law.cdf(torch.tensor(CENSOR).double())[0]).log())
    torch.testing.assert_close(lower[1], torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)
    assert -2000 < upper[1] < -300  # finite, where 1 − Φ has underflown
    assert lower[2].isfinite()


def test_information_of_the_probe_under_the_prior():
    model = CES()
    theta, design = model.sample_prior((40_000,), seeded()).double(), DESIGN
    mean, scale = model.mean(theta, design), model.scale(theta, design)
    noise = model.noise((1000,), seeded(1), torch.float64)
    y = (mean[:1000] + scale[:1000] * noise).clamp(-CENSOR, CENSOR)
    marginal = torch.cat([censored_log_prob(part[:, None], mean[1000:], scale[1000:]).logsumexp(1) for part in y.split(25)])
    terms = model.log_prob(y, theta[:1000], design) - marginal + math.log(39_000)
    assert abs(terms.mean() - 3.70) < 0.04 + 3 * terms.std() / 1000**0.5
    censored = ((mean + scale * model.noise((40_000,), seeded(2), torch.float64)).abs() >= CENSOR).double().mean()
    assert censored == pytest.approx(0.36, abs=0.01)


def test_random_designs_reproduce_the_measured_ces_information():
    # the value is saturated: most rollouts learn more than log L, so that a smaller L would give less
    model = CES()
    theta, designs = model.sample_prior((64,), seeded()), model.sample_designs((64, 10), seeded(1))
    y = model.simulate(theta[:, None], designs, generator=seeded(2))
    own = model.log_prob(y, theta[:, None], designs).sum(-1).double()
    contrastive = model.sample_prior((100_000,), seeded(3)).split(2000)
    others = [
        torch.cat([model.log_prob(outcomes, part[:, None], path).sum(-1) for part in contrastive]).double().logsumexp(0)
        for path, outcomes in zip(designs, y, strict=True)
    ]
    information = own - torch.logaddexp(own, torch.stack(others)) + math.log(100_001)
    assert (information <= math.log(100_001)).all()
    assert abs(information.mean() - 7.56) < 2 * math.hypot(0.50, information.std() / 8)


def test_the_prior_has_the_stated_moments():
    theta = CES().sample_prior((50_000,), seeded())
    assert theta[:, 0].min() >= 0.01
    assert theta[:, 0].max() <= 1
    torch.testing.assert_close(theta[:, 1:4].sum(-1), torch.ones(50_000))
    mean = torch.tensor([0.505, 1 / 3, 1 / 3, 1 / 3, 1.0])
    spread = torch.tensor([0.99 * 12**-0.5, 18**-0.5, 18**-0.5, 18**-0.5, 3.0])
    torch.testing.assert_close((theta.mean(0) - mean) / spread, torch.zeros(5), rtol=0, atol=4 / 50_000**0.5)
    torch.testing.assert_close(theta.std(0) / spread, torch.ones(5), rtol=0, atol=0.02)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="variant='paper'"):
        CES("paper")


def test_an_atom_far_from_the_mean_has_the_gradient_of_its_tail():
    # d/dz log Φ(z) → −z − 1/z for z ≪ −1, here with z = (mean − E) / scale
    mean = torch.tensor([-85.0, -985.0, -1e6], requires_grad=True)
    scale = torch.ones(3)
    censored_log_prob(torch.tensor(CENSOR), mean, scale).sum().backward()
    z = mean.detach() - CENSOR
    torch.testing.assert_close(mean.grad, -z - 1 / z, rtol=1e-4, atol=0)

import math

import pyro.distributions as pyro_dist
import pytest
import torch
from scipy import stats
from torch.distributions import Independent, Normal, Poisson, Uniform

from labkit.randomness import sample, seeded_generator


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_each_seed_and_each_stream_has_its_own_numbers():
    draws = {
        (seed, stream): float(torch.rand((), generator=seeded_generator(seed, stream)))
        for seed in (0, 1, 2**40)
        for stream in ("truth", "filter", "policy")
    }
    assert len(set(draws.values())) == len(draws)


@pytest.mark.parametrize("seed", [1.0, "1", None, True, -1])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"seed=.*: expected an int >= 0"):
        seeded_generator(seed, "truth")


LAWS = {
    "poisson": (Independent(Poisson(torch.tensor([0.4, 7.0])), 1), lambda i: stats.poisson([0.4, 7.0][i])),
    "normal": (Independent(Normal(torch.tensor([-1.0, 2.0]), 0.5), 1), lambda i: stats.norm([-1.0, 2.0][i], 0.5)),
    "uniform": (Uniform(torch.tensor([0.0, -3.0]), torch.tensor([1.0, 3.0])), lambda i: stats.uniform([0, -3][i], [1, 6][i])),
    "gamma": (pyro_dist.Gamma(torch.tensor([2.0, 3.0]), 1.5).to_event(1), lambda i: stats.gamma([2, 3][i], scale=1 / 1.5)),
}


@pytest.mark.parametrize(("law", "reference"), LAWS.values(), ids=LAWS)
def test_a_sample_follows_its_law(law, reference, generator):
    draws = sample(law, generator, (4000,))
    assert draws.shape == (4000, 2)
    for i in range(2):
        expected, n = reference(i), 4000
        assert float(draws[:, i].mean()) == pytest.approx(expected.mean(), abs=4 * expected.std() / math.sqrt(n))
        assert float(draws[:, i].var()) == pytest.approx(expected.var(), rel=0.2)


@pytest.mark.parametrize("law", [law for law, _ in LAWS.values()], ids=LAWS)
def test_a_sample_depends_on_its_generator_alone(law):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = sample(law, seeded_generator(0, "a"), (3,))
    assert torch.get_rng_state().tolist() == before.tolist()
    torch.manual_seed(6)
    assert sample(law, seeded_generator(0, "a"), (3,)).tolist() == first.tolist()
    assert sample(law, seeded_generator(1, "a"), (3,)).tolist() != first.tolist()


def test_a_gaussian_sample_moves_with_its_mean(generator):
    mean = torch.zeros(3, requires_grad=True)
    sample(Independent(Normal(mean, 1.0), 1), generator, (5,)).sum().backward()
    assert mean.grad.tolist() == [5, 5, 5]

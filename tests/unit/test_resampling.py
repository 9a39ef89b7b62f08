import math

import pytest
import torch
from scipy import stats

from labkit.resampling import RESAMPLERS, multinomial, systematic

WEIGHTS = torch.tensor([0.05, 0.3, 0.001, 0.249, 0.1, 0.3], dtype=torch.float64)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def counts(ancestors, n):
    return torch.nn.functional.one_hot(ancestors, n).sum(-2)


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
def test_a_particle_has_n_times_its_weight_copies_on_average(resample, generator):
    repeats, n = 20_000, len(WEIGHTS)
    mean = counts(resample(WEIGHTS.expand(repeats, n), generator), n).double().mean(0)
    # systematic copies vary less than multinomial ones, whose variance is n W (1 − W)
    stderr = (n * WEIGHTS * (1 - WEIGHTS) / repeats).sqrt()
    assert ((mean - n * WEIGHTS).abs() < 4 * stderr).all()


def test_multinomial_counts_pass_the_chi_square_test(generator):
    observed = counts(multinomial(WEIGHTS.expand(2000, -1), generator), len(WEIGHTS)).sum(0)
    assert stats.chisquare(observed, (observed.sum() * WEIGHTS).numpy()).pvalue > 0.01


def test_multinomial_counts_have_multinomial_variance(generator):
    n = len(WEIGHTS)
    variance = counts(multinomial(WEIGHTS.expand(20_000, n), generator), n).double().var(0)
    torch.testing.assert_close(variance, n * WEIGHTS * (1 - WEIGHTS), rtol=0.06, atol=1e-3)


def test_systematic_counts_are_the_two_neighbouring_whole_numbers(generator):
    weights = torch.rand((500, 37), generator=generator, dtype=torch.float64)
    expected = 37 * weights / weights.sum(-1, keepdim=True)
    found = counts(systematic(weights, generator), 37)
    assert (found.sum(-1) == 37).all()
    assert ((found == expected.floor()) | (found == expected.ceil())).all()
    assert (found != expected.round()).any()


def test_equal_weights_keep_every_particle_once_systematically(generator):
    assert systematic(torch.full((40,), 0.3), generator).tolist() == list(range(40))


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
@pytest.mark.parametrize("survivor", [0, 3, 8])
def test_one_weight_of_one_is_copied_everywhere(resample, survivor, generator):
    weights = torch.zeros(50, 9)
    weights[:, survivor] = 1
    assert (resample(weights, generator) == survivor).all()


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
def test_a_weightless_particle_has_no_descendant(resample, generator):
    weights = torch.rand((200, 20), generator=generator)
    weights[:, [0, 7, 18, 19]] = 0
    assert not torch.isin(resample(weights, generator), torch.tensor([0, 7, 18, 19])).any()


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
def test_a_batch_of_clouds_equals_a_loop_over_them(resample, generator):
    weights = torch.rand((4, 5, 30), generator=generator)
    one = torch.Generator().manual_seed(1)
    batched = resample(weights, torch.Generator().manual_seed(1))
    assert batched.shape == (4, 5, 30)
    looped = torch.stack([resample(row, one) for row in weights.flatten(0, 1)]).view(4, 5, 30)
    assert batched.tolist() == looped.tolist()


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
def test_only_ratios_of_weights_matter(resample):
    weights = torch.tensor([1.0, 2.0, 5.0, 8.0], dtype=torch.float64)
    first, second = (resample(w, torch.Generator().manual_seed(2)) for w in (weights, 2.0**-40 * weights))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_weights_that_are_no_weights_are_refused(resample, bad, generator):
    weights = torch.ones(3, 4)
    weights[1, 2] = bad
    with pytest.raises(ValueError, match=r"weights of shape \(3, 4\): expected finite weights >= 0"):
        resample(weights, generator)


@pytest.mark.parametrize("resample", RESAMPLERS.values(), ids=RESAMPLERS)
def test_a_cloud_without_any_weight_is_refused(resample, generator):
    with pytest.raises(ValueError, match="with a positive sum in each population"):
        resample(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), generator)

import math

import pytest
import torch
from scipy import stats

from labkit.filtering import JITTERS, bernoulli, liu_west, paper, truncated_normal

LOW, HIGH = torch.tensor([0.1, 0.1], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
INFINITE = torch.full((2,), math.inf, dtype=torch.float64)
KERNELS = {"paper": paper(LOW, HIGH, 2.0), "bernoulli": bernoulli(LOW, HIGH, 2.0), "liu_west": liu_west(LOW, HIGH)}


def cloud(generator, m=400):
    return 0.1 + 0.9 * torch.rand((m, 2), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_no_kernel_leaves_the_box(kernel, generator):
    theta = cloud(generator).float()
    for _ in range(100):
        theta = kernel(theta, generator)
        assert theta.dtype == torch.float32
        assert ((theta >= LOW.float()) & (theta <= HIGH.float())).all()


@pytest.mark.parametrize("mean", [0.1, 0.13, 0.5, 0.97])
def test_the_papers_kernel_is_a_truncated_gaussian(generator, mean):
    m, c = 400, 2.0
    std = math.sqrt(c / m**1.5)  # 0.0158
    moved = torch.cat([KERNELS["paper"](torch.full((m, 2), mean, dtype=torch.float64), generator) for _ in range(20)])
    law = stats.truncnorm((0.1 - mean) / std, (1 - mean) / std, loc=mean, scale=std)
    for column in moved.T:
        assert stats.kstest(column.numpy(), law.cdf).pvalue > 0.01


@pytest.mark.parametrize("m", [100, 1000])
def test_far_from_the_box_the_papers_variance_is_c_over_m_to_the_three_halves(generator, m):
    theta = torch.full((m, 2), 0.55, dtype=torch.float64)
    moves = torch.cat([paper(LOW, HIGH, 0.15)(theta, generator) - theta for _ in range(20_000 // m)])
    assert float(moves.var()) == pytest.approx(0.15 / m**1.5, rel=0.05)


def test_without_bounds_nothing_is_truncated(generator):
    moved = torch.cat([paper(-INFINITE, INFINITE, 0.15)(torch.zeros(100, 2), generator) for _ in range(200)])
    assert stats.kstest(moved.flatten().numpy(), stats.norm(0, math.sqrt(0.15 / 1000)).cdf).pvalue > 0.01


def test_bernoulli_moves_whole_particles_with_probability_one_over_root_m(generator):
    m, repeats = 400, 200
    theta = cloud(generator, m)
    moved = torch.stack([KERNELS["bernoulli"](theta, generator) != theta for _ in range(repeats)])
    assert (moved[..., 0] == moved[..., 1]).all()
    share = float(moved[..., 0].double().mean())
    assert share == pytest.approx(m**-0.5, abs=4 * math.sqrt(m**-0.5 / (m * repeats)))


def test_a_move_of_bernoulli_is_as_wide_as_the_papers(generator):
    theta = torch.full((400, 2), 0.55, dtype=torch.float64)
    moves = torch.stack([KERNELS["bernoulli"](theta, generator) - theta for _ in range(400)])
    assert float(moves[moves != 0].var()) == pytest.approx(2 / 400**1.5, rel=0.05)


def test_liu_and_west_keep_the_clouds_mean_and_variance(generator):
    theta = 3 + torch.randn((20_000, 2), generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.2])
    moved = liu_west(-INFINITE, INFINITE, 0.9)(theta, generator)
    torch.testing.assert_close(moved.mean(0), theta.mean(0), rtol=0, atol=4 * 1 / math.sqrt(20_000))
    torch.testing.assert_close(moved.var(0), theta.var(0), rtol=0.05, atol=0)
    assert float((moved - theta).abs().mean()) > 0.05


def test_liu_and_west_regress_to_the_mean_by_the_shrinkage(generator):
    theta = torch.randn((20_000, 1), generator=generator, dtype=torch.float64)
    moved = liu_west(-INFINITE[:1], INFINITE[:1], 0.8)(theta, generator)
    assert float((theta * moved).mean() / theta.square().mean()) == pytest.approx(0.8, abs=0.02)


def test_a_collapsed_cloud_stays_where_liu_and_west_find_it(generator):
    theta = torch.full((50, 2), 0.4)
    torch.testing.assert_close(KERNELS["liu_west"](theta, generator), theta)


def test_a_tiny_spread_far_from_the_bounds_stays_finite(generator):
    moved = truncated_normal(torch.full((1000, 2), 0.5), 1e-9, LOW, HIGH, generator)
    assert (moved - 0.5).abs().max() < 1e-7


@pytest.mark.parametrize("name", JITTERS)
@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_scale_is_refused(name, scale):
    with pytest.raises(ValueError, match=f"jitter_scale={scale!r}"):
        JITTERS[name](LOW, HIGH, scale)


def test_a_shrinkage_of_one_or_more_is_refused():
    with pytest.raises(ValueError, match=r"jitter_scale=1\.5: the shrinkage of 'liu_west' must lie in \(0, 1\)"):
        liu_west(LOW, HIGH, 1.5)

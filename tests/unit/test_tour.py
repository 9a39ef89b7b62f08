import numpy as np
import pytest

from labkit import tour


@pytest.mark.parametrize("population", [name for name in tour.POPULATIONS if "Cauchy" not in name])
def test_populations_have_mean_one_and_the_stated_spread(population):
    sampler, sd = tour.POPULATIONS[population]
    draws = sampler(np.random.default_rng(0), 400_000)
    assert draws.mean() == pytest.approx(1, abs=5 * sd / np.sqrt(len(draws)))
    assert draws.std() == pytest.approx(sd, rel=0.05)


def test_the_mean_of_coins_scatters_by_the_standard_error():
    result = tour.sample_means("Coins: 0 or 2", 25, repeats=20_000)
    assert result.means.std() == pytest.approx(1 / 5, rel=0.03)


def test_the_mean_of_cauchy_draws_scatters_like_one_draw():
    for n in (2, 100):
        result = tour.sample_means("Wild errors (Cauchy)", n, repeats=20_000)
        assert np.median(np.abs(result.means - 1)) == pytest.approx(1, rel=0.05)


def test_theory_is_a_density():
    inside = tour.theory("Coins: 0 or 2", 100).sum() * np.diff(tour.EDGES)[0]
    assert inside == pytest.approx(1, abs=1e-6)


def test_intervals_keep_their_promise_for_large_samples_only():
    few, many = (tour.sample_means("Incomes (log-normal)", n, repeats=20_000).covered.mean() for n in (5, 100))
    assert few < 0.85 < many < 0.95


def test_samples_grow_instead_of_being_drawn_anew():
    small, large = (tour.sample_means("Coins: 0 or 2", n) for n in (9, 10))
    np.testing.assert_allclose(10 * large.means - 9 * small.means, np.round(10 * large.means - 9 * small.means))


def test_a_sample_of_one_is_refused():
    with pytest.raises(ValueError, match="n: between 2 and 100 draws, got 1"):
        tour.sample_means("Coins: 0 or 2", 1)


def test_the_panel_redraws_bars_intervals_and_read_out():
    panel = tour.sampling_panel()
    before = panel.figure.data[0].y
    panel.n.value = 90
    assert panel.figure.data[0].y.sum() > before.sum()  # fewer means fall outside the axis
    assert "<b>90</b> draws" in panel.readout.value
    shown = panel.result.covered[: tour.SHOWN]
    assert len(panel.figure.data[2].x) == 3 * shown.sum()
    assert len(panel.figure.data[3].x) == 3 * (~shown).sum()


def test_drawing_again_changes_the_samples_and_nothing_else():
    panel = tour.sampling_panel()
    before = panel.result
    panel.again.click()
    assert panel.result.n == before.n
    assert not np.array_equal(panel.result.means, before.means)
    np.testing.assert_array_equal(panel.result.theory, before.theory)

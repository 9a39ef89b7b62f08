import itertools
import math

import numpy as np
import pytest

from labkit.design.corridor import Corridor, optimal_path, planned_path


def reached(steps, depth, discount=1.0):
    return planned_path(Corridor(), steps, depth, discount).information[-1]


@pytest.mark.parametrize("depth", range(6))
def test_a_short_horizon_stays_at_the_nearest_good_place(depth):
    path = planned_path(Corridor(), 12, depth)
    assert (path.places == 2).all()
    assert path.information[-1] == pytest.approx(0.5 * math.log(13), abs=1e-12)
    assert reached(8, depth) == pytest.approx(0.5 * math.log(9), abs=1e-12)


@pytest.mark.parametrize("depth", [6, 7, 8, 11])
def test_a_horizon_of_six_crosses_and_is_optimal(depth):
    assert reached(12, depth) == pytest.approx(0.5 * math.log(36.24), abs=1e-12)
    assert reached(12, depth) == pytest.approx(optimal_path(Corridor(), 12).information[-1], abs=1e-12)
    assert reached(8, min(depth, 7)) == pytest.approx(1.2097, abs=5e-5)
    assert reached(8, min(depth, 7)) == pytest.approx(optimal_path(Corridor(), 8).information[-1], abs=1e-12)


@pytest.mark.parametrize("depth", range(9))
def test_a_discount_of_0_6_never_crosses(depth):
    assert reached(12, depth, 0.6) == pytest.approx(1.2825, abs=5e-5)


def test_the_discount_from_which_a_horizon_of_eight_leaves_the_nearest_good_place():
    assert (planned_path(Corridor(), 12, 8, 0.8447).places == 2).all()
    assert (planned_path(Corridor(), 12, 8, 0.8467).places != 2).any()
    assert reached(12, 8, 0.9) == pytest.approx(1.7951, abs=5e-5)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_programme_finds_the_best_of_all_walks(start):
    corridor = Corridor((0.3, 1.1, 0.2, 0.7, 0.9), start=start, noise_sd=0.8)
    walks = [start + np.cumsum(moves) for moves in itertools.product((-1, 0, 1), repeat=6)]
    values = [corridor.information(walk)[-1] for walk in walks if walk.min() >= 0 and walk.max() <= 4]
    assert optimal_path(corridor, 6).information[-1] == pytest.approx(max(values), abs=1e-12)


@pytest.mark.parametrize("discount", [0.5, 0.8, 1.0])
def test_the_planner_values_its_first_move_as_an_enumeration_does(discount):
    corridor, horizon = Corridor((0.3, 1.1, 0.2, 0.7, 1.9, 0.4)), 4
    best = {}
    for moves in itertools.product((-1, 0, 1), repeat=horizon + 1):
        walk = corridor.start + np.cumsum(moves)
        if walk.min() >= 0 and walk.max() <= 5:
            gains = np.diff(corridor.information(walk), prepend=0.0)
            best[walk[0]] = max(best.get(walk[0], -np.inf), gains @ discount ** np.arange(horizon + 1))
    first = planned_path(corridor, horizon + 1, horizon, discount).places[0]
    assert best[first] == pytest.approx(max(best.values()), abs=1e-12)


def test_a_full_horizon_without_discount_is_never_beaten():
    rng = np.random.default_rng(0)
    for _ in range(20):
        corridor = Corridor(rng.exponential(size=7), start=int(rng.integers(7)))
        best = optimal_path(corridor, 6).information[-1]
        assert planned_path(corridor, 6, 5).information[-1] == pytest.approx(best, abs=1e-9)
        assert planned_path(corridor, 6, 1).information[-1] <= best + 1e-12


def test_paths_obey_the_moves_and_report_their_own_information():
    corridor = Corridor(start=0)
    for path in (optimal_path(corridor, 9), planned_path(corridor, 9, 3, 0.7)):
        steps = np.diff(path.places, prepend=0)
        assert np.abs(steps).max() <= 1
        S = np.cumsum(np.square(corridor.amplitudes)[path.places])
        np.testing.assert_allclose(path.information, 0.5 * np.log(1 + S), rtol=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_path(Corridor(), 0), "steps=0"),
        (lambda: planned_path(Corridor(), 0, 1), "steps=0"),
        (lambda: planned_path(Corridor(), 5, -1), "depth=-1"),
        (lambda: planned_path(Corridor(), 5, 1, 0.0), "discount=0.0"),
        (lambda: planned_path(Corridor(), 5, 1, 1.1), "discount=1.1"),
        (lambda: Corridor(start=12), "start=12"),
        (lambda: Corridor(()), "amplitudes="),
        (lambda: Corridor((1.0, math.nan), 0), "amplitudes="),
        (lambda: Corridor(noise_sd=0.0), "noise_sd=0.0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Corridor("abc"), "amplitudes='abc'"),
        (lambda: Corridor(start=1.5), "start=1.5"),
        (lambda: Corridor(noise_sd="a"), "noise_sd='a'"),
        (lambda: optimal_path(Corridor(), 1.5), "steps=1.5"),
        (lambda: planned_path(Corridor(), 3, 1.5), "depth=1.5"),
        (lambda: planned_path(Corridor(), 3, 1, "a"), "discount='a'"),
        (lambda: Corridor().information([-1]), "path=.*expected places in 0"),
        (lambda: Corridor().information([1.5]), "path="),
    ],
)
def test_numbers_of_the_wrong_kind_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""The lab's panels without a front end, on short runs of small filters."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.design.online import experiment, figures, widgets
from labkit.design.online.loop import online_steps, run_online
from labkit.design.online.policies import RandomPolicy
from labkit.filtering.linear_gaussian import LinearGaussianSSM
from labkit.filtering.nested import NestedParticleFilter
from labkit.filtering.sir import TwoGroupSIR
from labkit.filtering.state_space import simulate
from labkit.panel import Panel

STEPS = {"seeded": 6, "sir2": 5, "source": 4, "source-paper": 4}


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Errors of callbacks reach the test, and a new run is as small as the stored ones."""
    monkeypatch.setattr(Panel, "raise_errors", True)
    monkeypatch.setattr(widgets, "CANDIDATES", 5)
    for name, steps in STEPS.items():
        small = replace(experiment.SETTINGS[name], steps=steps, num_params=20, num_states=8)
        monkeypatch.setitem(experiment.SETTINGS, name, small)


@pytest.fixture(scope="module")
def traces():
    """One short random run for every playback, under its policy's name; the seed differs by setting."""
    found = {}
    for seed, (setting, policies) in enumerate(experiment.PLAYBACKS.items(), start=3):
        model = experiment.SETTINGS[setting].model()
        size = dict(steps=STEPS[setting], num_params=20, num_states=8, curve=None if "source" in setting else 5)
        for policy in policies:
            trace = run_online(model, RandomPolicy(), seed=seed, **size)
            found[setting, policy] = replace(trace, policy=policy)
    return found


@pytest.fixture
def stored(traces):
    return lambda setting, policy: traces[setting, policy]


@pytest.fixture(scope="module")
def beliefs():
    """Clouds of an SIR filter before and after four steps."""
    model = TwoGroupSIR.seeded_outbreak()
    belief = NestedParticleFilter(model, 40, 20)
    clouds = {0: belief.snapshot()}
    designs = torch.zeros(4, 1)
    _, ys = simulate(model, model.truth, designs, torch.Generator().manual_seed(0))
    for t, (design, y) in enumerate(zip(designs, ys, strict=True), start=1):
        belief.step(design, y)
        clouds[t] = belief.snapshot()
    return clouds


def words(panel):
    return re.sub("<[^>]*>", "", panel.readout.value)


def keyed(panel):
    return figures.keyed(panel.figure)


def test_the_playback_opens_on_the_seeded_outbreak_in_full_swing(stored):
    panel = widgets.playback(stored, step=4)
    assert panel.step.value == 4
    assert panel.step.frames == STEPS["seeded"] + 1
    assert len(keyed(panel)["policy/truth1"].x) == 5
    assert words(panel).startswith("Step 4 of 6")


def test_every_frame_of_every_stored_pair_can_be_shown(stored):
    panel = widgets.playback(stored, step=2)
    for setting, _ in (("seeded", 0), ("sir2", 0)):
        panel.setting.value = setting
        for _, other in panel.other.options:
            panel.other.value = other
            for step in (0, 1, panel.step.frames - 1):
                panel.step.value = step
                assert len(keyed(panel)["other/gained"].x) == step + 1
        assert panel.status.value == ""


def test_another_epidemic_brings_its_own_rivals_length_and_seed(stored, traces):
    panel = widgets.playback(stored, step=6)
    panel.setting.value = "sir2"
    assert [name for _, name in panel.other.options] == ["random", "fixed", "best_static"]
    assert panel.step.frames == STEPS["sir2"] + 1
    assert panel.seed.value == traces["sir2", "adam"].seed
    assert panel.figure.layout.xaxis.range == (0, STEPS["sir2"])


def test_the_read_out_says_what_the_trace_says(stored, traces):
    panel = widgets.playback(stored, step=3)
    trace = traces["seeded", "grid"]
    share = float(figures.share_of(trace.designs[2:3])[0])
    assert f"Tests to group 1: {100 * share:.0f}\u202f%" in words(panel)
    assert f"{trace.states[3, 1]:.0f} and {trace.states[3, 3]:.0f} people" in words(panel)


def test_a_seed_that_was_not_run_says_so_and_keeps_the_stored_run(stored):
    panel = widgets.playback(stored, step=3)
    before = list(keyed(panel)["policy/gained"].y)
    panel.seed.value += 1
    assert "press Run this seed" in words(panel)
    assert list(keyed(panel)["policy/gained"].y) == before


def test_a_new_run_meets_the_same_truth_in_both_columns_and_is_kept(stored, monkeypatch):
    started = []
    monkeypatch.setattr(widgets, "online_steps", lambda *a, **k: started.append(k["seed"]) or online_steps(*a, **k))
    panel = widgets.playback(stored, step=6)
    panel.seed.value = 11
    panel.start()
    panel.wait()
    pair = panel.result
    assert pair.key == ("seeded", "random", 11)
    assert len(pair.policy) == len(pair.other) == STEPS["seeded"]
    np.testing.assert_array_equal(pair.policy.states, pair.other.states)
    assert "press" not in words(panel)
    panel.start()
    panel.wait()
    assert started == [11, 11]  # two columns, once


def test_a_new_run_is_what_the_loop_gives_for_that_seed(stored):
    panel = widgets.playback(stored, step=2)
    panel.seed.value = 5
    panel.start()
    panel.wait()
    task = experiment.SETTINGS["seeded"]
    size = dict(steps=task.steps, num_params=20, num_states=8, curve=5)
    again = run_online(task.model(), RandomPolicy(), seed=5, **size)
    np.testing.assert_array_equal(panel.result.other.designs, again.designs)
    np.testing.assert_array_equal(panel.result.other.eig, again.eig)


def test_a_run_that_is_stopped_shows_how_far_it_came(stored, monkeypatch):
    panel = widgets.playback(stored, step=6)

    def stopped_after_two(*args, **kwargs):
        for t, trace in enumerate(online_steps(*args, **kwargs), start=1):
            yield trace
            if t == 2:
                panel.cancel()

    monkeypatch.setattr(widgets, "online_steps", stopped_after_two)
    panel.seed.value = 12
    panel.start()
    panel.wait()
    assert panel.status.value == "stopped"
    reached = len(panel.result.policy)
    assert reached < STEPS["seeded"]
    assert words(panel).startswith(f"Step {reached} of 6")
    assert f"(This run has come to step {reached} only.)" in words(panel)
    panel.step.value = 1
    assert words(panel).startswith("Step 1 of 6")
    assert "only" not in words(panel)


def test_another_epidemic_stops_the_run_that_is_under_way(stored, monkeypatch):
    panel, taken = widgets.playback(stored, step=6), []

    def switched_after_two(*args, **kwargs):
        for t, trace in enumerate(online_steps(*args, **kwargs), start=1):
            taken.append(t)
            yield trace
            if t == 2:
                panel.setting.value = "sir2"

    monkeypatch.setattr(widgets, "online_steps", switched_after_two)
    panel.seed.value = 12
    panel.start()
    panel.wait()
    assert max(taken) < STEPS["seeded"]
    assert panel.status.value == "stopped"
    assert words(panel).startswith("Step 5 of 5")


def test_the_constant_share_of_a_new_run_is_the_stored_one(stored, traces):
    panel = widgets.playback(stored, step=2)
    panel.setting.value, panel.other.value = "sir2", "best_static"
    panel.seed.value = 8
    panel.start()
    panel.wait()
    constant = traces["sir2", "best_static"].designs[0]
    np.testing.assert_array_equal(panel.result.other.designs, np.tile(constant, (STEPS["sir2"], 1)))


def test_the_source_playback_knows_both_noises_and_their_bounds(stored):
    panel = widgets.source_playback(stored, step=3)
    bounds = {}
    for noise in ("source", "source-paper"):
        panel.setting.value = noise
        model = experiment.SETTINGS[noise].model()
        bounds[noise] = keyed(panel)["bound"].y[-1]
        assert bounds[noise] == pytest.approx(model.full_state_bound(STEPS[noise]))
        assert panel.status.value == ""
    assert bounds["source"] > bounds["source-paper"]


def test_the_source_playback_keeps_the_rival_where_it_can(stored):
    panel = widgets.source_playback(stored, step=2)
    panel.other.value = "fixed"
    panel.setting.value = "source-paper"
    assert panel.other.value == "fixed"
    assert "fixed" in panel.figure.layout.annotations[1].text
    for step in range(STEPS["source"] + 1):
        panel.step.value = step
    assert "best_static" not in [name for _, name in panel.other.options]


def test_a_share_is_never_better_than_the_best_share_of_each_step(traces):
    panel = widgets.share(traces["seeded", "grid"], TwoGroupSIR.seeded_outbreak(), 0.5)
    for share in (0.02, 0.5, 0.98):
        panel.share.value = share
        assert min(keyed(panel)["lost"].y) >= -1e-6
    assert words(panel).startswith("98\u202f% of the tests")
    with pytest.raises(ValueError, match=r"value=50: expected a share of the tests from 0\.02 to 0\.98"):
        widgets.share(traces["seeded", "grid"], TwoGroupSIR.seeded_outbreak(), 50)


def test_simulated_paths_surround_the_limit_without_noise():
    panel = widgets.simulator(paths=60, steps=40)
    infected, ode, expected, _ = panel.result
    assert infected.shape == (60, 41, 2)
    error = infected.mean(0) - ode
    assert (np.abs(error[-1]) < 4 * infected[:, -1].std(0) / 60**0.5 + 0.05 * ode[-1]).all()  # Euler's step costs 5 %
    assert expected.shape == (40, 2)


def test_a_better_test_in_group_two_finds_more_there_and_changes_nothing_else():
    panel = widgets.simulator(paths=5, steps=30)
    before = panel.result
    panel.sensitivity.value = 0.95
    np.testing.assert_array_equal(panel.result[0], before[0])
    some = before[2][:, 1] > 1e-6
    np.testing.assert_allclose(panel.result[2][some, 1], 0.95 / 0.5 * before[2][some, 1], rtol=1e-5)
    np.testing.assert_allclose(panel.result[2][:, 0], before[2][:, 0])


def test_simulating_again_draws_new_paths():
    panel = widgets.simulator(paths=5, steps=10)
    before = panel.result
    panel.again.click()
    assert not np.array_equal(panel.result[0], before[0])
    np.testing.assert_array_equal(panel.result[1], before[1])


@pytest.fixture(scope="module")
def reference():
    model, designs = TwoGroupSIR.two_parameter(), torch.zeros(6, 1)
    states, ys = simulate(model, model.truth, designs, torch.Generator().manual_seed(0))
    axes = np.linspace(0.1, 1, 5)
    arrays = dict(designs=designs, states=states, observations=ys, theta=model.truth)
    return {name: value.numpy() for name, value in arrays.items()} | dict(
        axis0=axes, axis1=axes, probability=np.full((5, 5), 1 / 25), mean=np.array([0.5, 0.5]), std=np.array([0.26, 0.26])
    )


def test_the_filter_panel_runs_the_filter_it_names(reference):
    panel = widgets.nested_filter(reference, seed=4)
    panel.num_params.value = 52
    panel.wait()
    belief = NestedParticleFilter(TwoGroupSIR.two_parameter(), 52, panel.num_states.value, jitter_scale=2.0, seed=4)
    for design, y in zip(reference["designs"], reference["observations"], strict=True):
        last = belief.step(torch.as_tensor(design), torch.as_tensor(y))
    np.testing.assert_array_equal(panel.result.mean, last.theta_mean)
    np.testing.assert_array_equal(panel.result.clouds[-1], belief.theta)
    assert panel.result.log_evidence == belief.log_evidence
    assert words(panel).startswith("52 × 50 particles")


def test_the_filter_panel_scrubs_without_running_again(reference):
    panel = widgets.nested_filter(reference)
    run = panel.result
    panel.step.value = 2
    assert panel.result is run
    np.testing.assert_array_equal(keyed(panel)["cloud"].x, run.clouds[2][:, 0])
    panel.step.value = 0
    assert "before the first test" in words(panel)


def test_the_bias_falls_with_more_states_and_the_jackknife_removes_most_of_it():
    panel = widgets.bias()
    exact = LinearGaussianSSM(prior_sd=0.05).closed_form_eig(torch.linspace(0.1, 2, 9)[:, None], c=1.5, P=0.1, s=0.05).numpy()
    excess = {}
    for states, jackknife in ((10, False), (20, False), (50, False), (20, True)):
        panel.num_states.value, panel.jackknife.value = states, jackknife
        excess[states, jackknife] = (panel.result[2] - exact)[4:].mean()
    assert excess[10, False] > excess[20, False] > excess[50, False] > 0
    assert abs(excess[20, True]) < excess[20, False] / 3
    np.testing.assert_allclose(np.interp(1.0, keyed(panel)["exact"].x, keyed(panel)["exact"].y), exact[4], rtol=0.1)


def test_sampled_gains_agree_with_the_enumerated_ones(beliefs):
    panel = widgets.eig_curve(beliefs)
    panel.step.value, panel.num_obs.value = 4, 800
    traces = keyed(panel)
    curve = np.interp(traces["sampled"].x, traces["enumerated"].x, traces["enumerated"].y)
    error = np.abs(np.asarray(traces["sampled"].y) - curve)
    assert (error < 2.5 * np.asarray(traces["sampled"].error_y.array)).all()  # 5 s.e.
    assert traces["best"].y[0] == max(traces["enumerated"].y)


def test_more_observations_shorten_the_error_bars(beliefs):
    panel = widgets.eig_curve(beliefs)
    bars = []
    for num_obs in (50, 800):
        panel.num_obs.value = num_obs
        bars.append(np.mean(keyed(panel)["sampled"].error_y.array))
    assert bars[1] == pytest.approx(bars[0] / 4, rel=0.5)


@pytest.fixture(scope="module")
def source():
    return NestedParticleFilter(experiment.SETTINGS["source"].model(), 20, 10).snapshot()


def test_adam_climbs_and_both_gradients_have_one_mean(beliefs, source):
    panel = widgets.ascent(beliefs, source)
    panel.wait()
    values, path, spread = panel.result
    assert len(path) == 50
    heights = np.interp(path, np.linspace(0, 1, len(values)), values)
    assert heights[-1] > heights[0]
    means = [spread[name].mean() for name in ("score", "pathwise")]
    errors = [spread[name].std(ddof=1) / len(spread[name]) ** 0.5 for name in ("score", "pathwise")]
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


def test_a_small_learning_rate_stays_near_the_start(beliefs, source):
    panel = widgets.ascent(beliefs, source)
    panel.share.value = 0.3
    panel.wait()
    panel.rate.value = 0.01
    panel.wait()
    path = panel.result[1]
    assert abs(path - 0.3).max() < 50 * 0.01 * 0.3 * 0.7 * 1.3  # logit steps of at most 0.01, turned into shares


@pytest.fixture(scope="module")
def runs():
    """Seven seeds of three policies; the design is one nat better, and `rmse` was never measured."""
    rng = np.random.default_rng(0)
    rows = [
        {"setting": "sir2", "truth": "fixed", "policy": policy, "seed": seed, "kl": better + 0.1 * rng.normal()}
        for seed in range(7)
        for policy, better in (("random", 1.0), ("fixed", 1.1), ("grid", 2.0))
    ]
    empty = {metric: np.nan for metric in experiment.METRICS if metric != "kl"}
    return pd.DataFrame(rows).assign(**empty)


def test_the_comparison_is_paired_and_says_when_it_is_clear(runs):
    panel = widgets.comparison(runs)
    wide = runs.pivot(index="seed", columns="policy", values="kl")
    difference = wide["grid"] - wide["random"]
    assert keyed(panel)["differences"].x[0] == pytest.approx(difference.mean())
    assert keyed(panel)["differences"].error_x.array[0] == pytest.approx(2.4469 * difference.sem(), rel=1e-4)  # t, 6 degrees
    assert "7 pairs of runs): the 95\u202f% interval leaves out zero" in words(panel)
    few = widgets.comparison(runs[runs["seed"] < 5])
    assert "5 pairs of runs): too few to tell whether it is luck" in words(few)


def test_only_what_was_measured_in_a_setting_is_offered(runs):
    other = runs.assign(setting="seeded", gain=runs["kl"], kl=np.nan)
    panel = widgets.comparison(pd.concat([runs, other]))
    assert [name for _, name in panel.metric.options] == ["kl"]
    panel.case.value = ("seeded", "fixed")
    assert panel.metric.value == "gain"
    assert panel.status.value == ""


def test_the_cost_panel_adds_up():
    table = pd.DataFrame({"method": ["NPF", "NPF", "SMC²", "SMC²"], "t": [1, 2, 1, 2], "seconds": [0.01, 0.01, 0.5, 1.5]})
    panel = widgets.cost(table)
    assert "NPF 0.020 s, SMC² 2.0 s" in words(panel)
    panel.total.value = True
    assert keyed(panel)["SMC²"].y[-1] == 2.0
    assert panel.figure.layout.yaxis.title.text == "processor time of all steps so far (s)"

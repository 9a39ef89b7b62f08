import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from labkit import report
from labkit.design.online import experiment
from labkit.design.online.experiment import (
    DATA,
    PLAN,
    PLAYBACKS,
    SETTINGS,
    Recipe,
    build,
    cells,
    differences,
    forgone,
    make_policy,
    reproduce,
    run_cell,
    share_blocks,
    stored,
    stored_reference,
    stored_trace,
    summarise,
    summarise_inference,
    typical_seed,
)

TINY = replace(
    experiment._FAST,
    steps=4,
    num_params=16,
    num_states=8,
    grid_states=20,
    warm_starts=1,
    climb=1,
    num_obs=10,
    designs=3,
    angles=2,
    cells=4,
    truth_states=40,
    draws=20,
    inference_runs=1,
    inference_steps=4,
    cost_steps=2,
    curve=3,
)


def runs(seeds=30, **levels):
    """Runs whose policies differ by known amounts of KL; every seed shifts all of them alike."""
    rng = np.random.default_rng(0)
    shift = rng.normal(2, 0.5, seeds)
    rows = [
        {"setting": "sir2", "truth": "fixed", "policy": policy, "seed": seed, "kl": shift[seed] + level + rng.normal(0, 0.05)}
        for policy, level in levels.items()
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


def test_the_plan_knows_its_settings_and_policies(tmp_path):
    recipe = replace(TINY, seeds=1)
    planned = {(study.setting, policy) for study in PLAN for policy in study.policies}
    for setting, policy in planned:
        assert make_policy(setting, policy, recipe, tmp_path).name == policy
    assert {(setting, policy) for setting, policies in PLAYBACKS.items() for policy in policies} <= planned
    assert {study.seeds for study in PLAN if study.setting == "sir2" and "adam" in study.policies} == {30}
    assert all(study.seeds >= 20 for study in PLAN if study.setting in ("source", "seeded") and "random" in study.policies)


def test_every_policy_of_a_study_meets_the_same_seeds():
    todo = cells(Recipe())
    assert len(todo) == len(set(todo))
    for study in PLAN:
        for policy in study.policies:
            assert [c[3] for c in todo if c[:3] == (study.setting, study.truth, policy)] == list(range(study.seeds))
    assert {cell[3] for cell in cells(Recipe(), seeds=2)} == {0, 1}
    with pytest.raises(ValueError, match="seeds=0"):
        cells(Recipe(), seeds=0)


def test_a_finished_run_is_not_done_again(tmp_path, monkeypatch):
    cell = ("sir2", "fixed", "random", 3)
    first = run_cell(cell, TINY, tmp_path)
    assert first[["setting", "truth", "policy", "seed"]].iloc[0].tolist() == list(cell)
    assert 0 < first["ess"].iloc[0] <= 1
    monkeypatch.setattr(experiment, "run_online", None)
    monkeypatch.setattr(experiment, "information", None)
    pd.testing.assert_frame_equal(run_cell(cell, TINY, tmp_path), first)


def test_the_paper_s_schedule_is_the_full_one(tmp_path):
    sir, source = (make_policy(setting, "adam", Recipe(), tmp_path) for setting in ("sir2", "source"))
    assert (sir.lr, sir.warm_starts, sir.warm_steps, sir.steps, sir.num_obs) == (0.03, 20, 1, 50, 200)
    assert (source.lr, source.warm_starts, source.warm_steps, source.steps, source.num_obs) == (0.01, 20, 5, 50, 200)
    assert make_policy("source", "adam-pathwise", Recipe(), tmp_path).estimator == "pathwise"
    assert make_policy("source", "adam-jackknife", Recipe(), tmp_path).jackknife
    share = SETTINGS["seeded"].model().share(make_policy("seeded", "share-0.75", Recipe(), tmp_path).design)
    assert float(share) == pytest.approx(0.75)


def test_reference_axes_are_midpoints_of_the_prior_s_box():
    beta, gamma = experiment._axes(SETTINGS["sir2"].model(), (3, 9))
    assert beta.tolist() == pytest.approx([0.25, 0.55, 0.85])
    assert gamma[0] == pytest.approx(0.15)
    assert experiment._axes(SETTINGS["seeded"].model(), ()) == []


# The ceiling: what an observer of all states would learn


def test_who_sees_the_source_learns_what_a_linear_regression_does():
    """Δp = v Δt (cos φ, sin φ) + noise is a regression with known variance; far from the box's edges its KL is Gaussian."""
    model = SETTINGS["source"].model()
    heading = 0.3 * 0.1 * np.arange(51)
    step = 0.1 * np.stack([np.cos(heading), np.sin(heading)], 1)
    states = np.column_stack([np.vstack([[0, 0], step.cumsum(0)[:-1]]), heading])
    axes = [torch.linspace(0.5, 1.5, 401, dtype=torch.float64)] * 2
    precision = (step[:-1] ** 2).sum(0) / (0.1 * 0.02)
    gaussian = sum(-0.5 * math.log(2 * math.pi * math.e / f) for f in precision)
    assert experiment.full_state_kl(model, states, axes) == pytest.approx(gaussian, abs=0.01)


def test_who_sees_the_epidemic_finds_its_rates():
    """A long, large epidemic pins θ: the ceiling is then that of a posterior on one cell of the grid."""
    model = SETTINGS["sir2"].model()
    big = replace(model, population=(2_000_000, 2_000_000), infected=(50_000, 50_000))
    states, _ = experiment.simulate(big, big.truth, torch.zeros(80, 1), experiment.truth_generator(0))
    axes = [torch.tensor([0.25, 0.65, 0.85]), torch.tensor([0.15, 0.45])]
    assert experiment.full_state_kl(big, states.numpy(), axes) == pytest.approx(math.log(6), abs=1e-6)
    still = np.tile([200.0, 0, 200, 0], (10, 1))  # nobody is infected: nothing to learn
    assert experiment.full_state_kl(model, still, axes) == pytest.approx(0, abs=1e-9)


# Summaries of synthetic runs


def test_differences_are_paired_by_seed():
    table = runs(adam=0.4, random=0.0, fixed=0.1)
    pairs = differences(table).set_index(["first", "second"])
    assert pairs.loc[("adam", "random"), "kl"] == pytest.approx(0.4, abs=0.05)
    assert pairs.loc[("adam", "fixed"), "kl_stderr"] < 0.03  # the shift of 0.5 per seed cancels
    assert pairs.loc[("adam", "random"), "seeds"] == 30
    summary = summarise(table).set_index("policy")
    assert summary.loc["adam", "kl_stderr"] > 0.05
    assert math.isnan(summary.loc["adam", "position_l2"])


def test_a_typical_seed_is_near_the_mean_of_every_policy(monkeypatch):
    monkeypatch.setattr(experiment, "PLAYBACKS", {"sir2": ("adam", "random")})
    table = runs(seeds=3, adam=0.0, random=0.0)
    table["kl"] = [1.0, 2.0, 9.0, 1.0, 2.1, 3.2]  # means 4 and 2.1; spreads 4.4 and 1.1
    assert typical_seed(table, "sir2") == 1


def test_shares_are_averaged_by_blocks():
    paths = pd.DataFrame({"t": range(1, 61), "share": [0.9] * 20 + [0.6] * 20 + [0.4] * 20})
    blocks = share_blocks(paths.assign(setting="seeded", truth="fixed", policy="grid"))
    assert blocks.tolist() == pytest.approx([0.9, 0.6, 0.4])


def test_what_is_forgone_is_the_distance_to_the_top_of_each_curve():
    curve = np.array([[0.1, 0.4, 0.2], [0.5, 0.3, 0.6]])
    designs = np.array([[-2.0], [0.0], [2.0]])
    trace = replace(stored_trace("seeded", "grid"), curve_designs=designs, curve=curve, designs=designs[[1, 0]] + 0.1)
    assert forgone(trace) == pytest.approx(0.1)
    assert forgone(replace(trace, designs=designs[[1, 2]])) == 0


def test_a_ratio_of_means_has_its_delta_method_error():
    rng = np.random.default_rng(1)
    b = rng.normal(2, 0.2, 400)
    a = 0.8 * b + rng.normal(0, 0.1, 400)
    frame = pd.concat(
        [pd.DataFrame({"policy": p, "seed": range(400), "position_l2": values}) for p, values in (("adam", a), ("aim", b))]
    )
    ratio, stderr = experiment._ratio(frame, "position_l2", "adam", "aim")
    assert ratio == pytest.approx(a.mean() / b.mean())
    picks = rng.integers(400, size=(2000, 400))
    assert stderr == pytest.approx((a[picks].mean(1) / b[picks].mean(1)).std(), rel=0.1)


def test_filters_are_summarised_over_data_sets():
    rows = [
        {"num_params": 1000, "num_states": 30, "kernel": "paper", "parameter": "beta1", "data_set": d, "run": r}
        | {"z": 0.1 * d, "sd_ratio": 1.1, "log_evidence_error": r, "ess": 0.9}
        for d in range(4)
        for r in range(2)
    ]
    (row,) = summarise_inference(pd.DataFrame(rows)).to_dict("records")
    assert row["z"] == pytest.approx(0.15)
    assert row["z_stderr"] == pytest.approx(np.std([0, 0.1, 0.2, 0.3], ddof=1) / 2)
    assert (row["log_evidence_error"], row["log_evidence_error_stderr"]) == (0.5, 0)


# Whole, tiny runs


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "PLAYBACKS", {"sir2": ("adam", "random"), "seeded": ("grid",)})
        folder = tmp_path_factory.mktemp("build")
        build(out=folder, recipe=replace(TINY, seeds=1))
        yield folder


def test_reproduce_gives_a_verdict_per_claim_and_tables_that_print(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "_FAST", TINY)
    outcome = reproduce(fast=True, seeds=2, out=tmp_path)
    claims = [verdict.claim for verdict in outcome.verdicts]
    assert len(claims) == len(set(claims))
    for part in ("SIR, 2 parameters: KL", "seeded outbreak: realised", "low noise: position", "filter against grid", "N = 400"):
        assert any(part in claim for claim in claims)
    assert len(outcome.tables["runs"]) == len(cells(TINY, 2))
    assert {"summary", "differences", "shares", "inference", "runs", "paths", "cost", "noise"} == set(outcome.tables)
    report.show(outcome)
    report.write(outcome, tmp_path)
    claimed = [
        verdict["claim"] for verdict in json.loads((tmp_path / "verdicts.json").read_text()) if verdict["source"] == "paper"
    ]
    assert len(claimed) == 4  # more than random and than fixed, on both of the paper's tasks


def test_build_writes_what_the_panels_read(built):
    for name in ("runs", "paths", "inference", "cost", "noise"):
        assert len(stored(name, built))
    trace = stored_trace("sir2", "adam", built)
    assert (trace.policy, len(trace)) == ("adam", 4)
    assert trace.curve.shape == (4, 3)
    assert trace.theta_cloud.shape == (5, 16, 2)
    reference = stored_reference(built)
    assert reference["probability"].sum() == pytest.approx(1, abs=1e-5)
    assert reference["probability"].shape == (len(reference["axis0"]), len(reference["axis1"]))
    assert not (built / "parts").exists()


def test_a_played_back_run_is_one_of_the_table(built):
    trace = stored_trace("sir2", "random", built)
    table = stored("runs", built)
    row = table[(table["setting"] == "sir2") & (table["policy"] == "random") & (table["truth"] == "fixed")].set_index("seed")
    assert trace.eig.sum() == pytest.approx(row.loc[trace.seed, "teig"], rel=1e-4)


def test_a_second_build_changes_nothing_and_another_recipe_is_refused(built):
    before = {file.name: file.read_bytes() for file in built.iterdir()}
    build(out=built, recipe=replace(TINY, seeds=1))
    assert {file.name: file.read_bytes() for file in built.iterdir()} == before
    with pytest.raises(ValueError, match="other num_obs"):
        build(out=built, recipe=replace(TINY, seeds=1, num_obs=11))


def test_unknown_names_are_listed(built):
    with pytest.raises(ValueError, match=r"name='speed': expected one of runs, paths"):
        stored("speed", built)
    with pytest.raises(ValueError, match=r"setting='sir2', policy='aim': the playbacks are sir2: adam, random;"):
        stored_trace("sir2", "aim", built)


# The package's own build


def test_the_stored_results_are_small_and_complete(monkeypatch):
    monkeypatch.setattr(experiment, "PLAYBACKS", PLAYBACKS)  # the tiny build of this module has fewer
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 4_000_000
    table = stored("runs")
    measured = set(table[["setting", "truth", "policy", "seed"]].itertuples(index=False, name=None))
    assert measured == set(cells(Recipe()))
    for setting, policies in PLAYBACKS.items():
        traces = [stored_trace(setting, policy) for policy in policies]
        assert len({trace.seed for trace in traces}) == 1
        assert all(len(trace) == SETTINGS[setting].steps for trace in traces)
        for trace in traces[1:]:
            np.testing.assert_array_equal(trace.states, traces[0].states)

import json
import math

import pandas as pd
import pytest

from labkit.design import experiment
from labkit.design.experiment import (
    DATA,
    PLAN,
    PUBLISHED,
    SETTINGS,
    Recipe,
    build,
    cells,
    corridor_table,
    differences,
    reproduce,
    run_cell,
    stored,
    summarise,
)

TINY = Recipe(
    blocks=1, block=2, steps=3, num_particles=60, static_iterations=2, num_draws=100, num_contrastive=200, iterations=1
)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    return reproduce(fast=True, out=out), out


def rows(setting, policy, kl, **columns):
    """Rollouts as `stored` has them."""
    table = pd.DataFrame({"kl": kl, "information": kl, "spce": kl}, dtype=float)
    table = table.assign(setting=setting, policy=policy, seed=0, rollout=range(len(kl)), ess=500.0, violation=0.0)
    return table.assign(plan_ms=1.0, belief_ms=2.0, **columns)


# what is run


def test_the_main_claims_rest_on_128_rollouts():
    counts = {}
    for setting, policy, _ in cells(Recipe()):
        counts[setting, policy] = counts.get((setting, policy), 0) + SETTINGS[setting].block
    for setting in ("location-0.05", "location-0.1", "location-0.2", "pk", "pk-wide", "ces-100"):
        assert counts[setting, "tree-2"] == counts[setting, "greedy"] == counts[setting, "random"] == 128
    for delta in ("0.05", "0.1", "0.2"):
        assert counts[f"location-{delta}", "step_dad"] == counts[f"location-{delta}", "greedy_vi"] == 32


def test_a_number_of_blocks_of_ones_own():
    assert len(cells(Recipe(), 2)) == 2 * sum(len(study.policies) for study in PLAN)
    with pytest.raises(ValueError, match="seeds=0: expected at least 1"):
        cells(Recipe(), 0)


def test_policies_meet_the_same_parameters_and_a_finished_block_is_not_run_again(tmp_path, monkeypatch):
    first = run_cell(("pk", "random", 0), TINY, tmp_path)
    assert len(first) == 2
    assert {"time1", "time5"} <= set(first)
    assert math.isnan(first["time5"][0])  # three steps only
    monkeypatch.setattr(experiment, "rollout", None)
    pd.testing.assert_frame_equal(run_cell(("pk", "random", 0), TINY, tmp_path), first)


def test_a_run_within_a_budget_keeps_it(tmp_path):
    table = run_cell(("ces-100", "greedy", 0), TINY, tmp_path)
    assert (table["violation"] <= 1e-4).all()
    assert set(table["policy"]) == {"greedy"}


def test_the_settings_of_the_paper_run_on_the_stored_networks(tmp_path):
    recipe = Recipe(1, 1, 2, num_particles=60, num_draws=100, num_contrastive=200)
    table = run_cell(("location-0.1", "copex", 0), recipe, tmp_path)
    assert (table["violation"] <= 1e-4).all()


# summaries


def test_a_summary_has_means_errors_and_the_worst_tenth():
    runs = rows("pk", "greedy", range(1, 21), error=math.nan)
    (row,) = summarise(runs).to_dict("records")
    assert row["rollouts"] == 20
    assert row["kl"] == pytest.approx(10.5)
    assert row["kl_stderr"] == pytest.approx(pd.Series(range(1, 21)).std() / 20**0.5)
    assert row["worst_decile"] == pytest.approx(1.5)
    assert row["violations"] == 0


def test_differences_are_paired():
    runs = pd.concat([rows("pk", "greedy", [1, 5, 9]), rows("pk", "tree-2", [2, 6, 10]), rows("pk", "random", [0, 0])])
    table = differences(runs).set_index(["first", "second"])
    assert table.loc[("tree-2", "greedy"), "difference"] == 1
    assert table.loc[("tree-2", "greedy"), "difference_stderr"] == 0
    assert table.loc[("tree-2", "random"), "rollouts"] == 2
    assert table.loc[("greedy", "tree-2"), "difference"] == -1


def test_only_a_horizon_across_the_corridor_crosses_it():
    table = corridor_table().query("steps == 12").set_index(["planner", "discount", "depth"])["information"]
    assert table[("lookahead", 1.0, 5)] == pytest.approx(0.5 * math.log(13), abs=1e-9)
    assert table[("lookahead", 1.0, 6)] == pytest.approx(0.5 * math.log(36.24), abs=1e-9)
    assert table[("lookahead", 0.6, 8)] == pytest.approx(0.5 * math.log(13), abs=1e-9)
    assert table["dynamic programming"].iloc[0] == pytest.approx(0.5 * math.log(36.24), abs=1e-9)


# reproduction and build


def test_a_reproduction_has_a_verdict_per_claim(reproduced):
    result, out = reproduced
    assert set(result.tables) == {"summary", "differences", "published", "corridor", "runs"}
    claims = [verdict.claim for verdict in result.verdicts]
    assert len(claims) == len(set(claims))
    assert set(zip(result.tables["summary"]["setting"], result.tables["summary"]["policy"], strict=True)) == {
        (setting, policy) for setting, policy, _ in cells(Recipe())
    }
    assert len(list((out / "parts-fast").glob("run-*.csv"))) == len(cells(Recipe(), 1))


@pytest.mark.parametrize(
    ("setting", "policy", "column", "value", "claim"),
    [
        ("location-0.1", "tree-2", "kl", 0.0, "location, steps ≤ 0.1: tree minus the projected policy network"),
        ("pk", "tree-2", "kl", -5.0, "pharmacokinetics, prior variance 0.05: tree minus greedy"),
        ("ces-100", "tree-2", "kl", 0.0, "CES, budget 100: KL of the nested tree"),
        ("ces-150", "greedy", "kl", 0.0, "CES: exact greedy with budget 150"),
        ("ces-100", "greedy", "violation", 1.0, "rollouts that broke a constraint"),
    ],
)
def test_a_verdict_fails_when_its_measurement_does(reproduced, setting, policy, column, value, claim):
    good = {"kl": 20.0, "information": 20.0, "spce": 20.0, "violation": 0.0}
    runs = reproduced[0].tables["runs"].assign(**good)
    corridor = reproduced[0].tables["corridor"]
    runs.loc[(runs["setting"] == setting) & (runs["policy"] == policy), column] = value
    (verdict,) = [v for v in experiment._verdicts(runs, corridor) if v.claim.startswith(claim)]
    assert not verdict.holds


def test_published_values_are_of_settings_that_are_run():
    assert set(PUBLISHED["setting"]) <= set(SETTINGS)


def test_a_build_with_another_recipe_is_refused(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"blocks": 7}, "versions": {}}))
    with pytest.raises(ValueError, match="holds a build with other"):
        build(out=tmp_path, recipe=TINY)


def test_the_committed_build_is_that_of_the_default_recipe_and_small():
    recipe = json.loads((DATA / "recipe.json").read_text(encoding="utf-8"))["recipe"]
    assert Recipe(**recipe) == Recipe()
    runs = stored()
    wanted = {(setting, policy): 0 for setting, policy, _ in cells(Recipe())}
    for setting, policy, _ in cells(Recipe()):
        wanted[setting, policy] += SETTINGS[setting].block
    assert runs.groupby(["setting", "policy"]).size().to_dict() == wanted
    assert (runs["violation"] <= 1e-4).all()
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 5e6

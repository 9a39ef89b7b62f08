import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from labkit import assets, corpora, report
from labkit.errors import MissingAsset
from labkit.sparsity import experiment
from labkit.sparsity.experiment import Recipe, build, differences, open_workbench, reproduce, summarise

RECIPE = Recipe(
    window=16,
    calibration_windows=8,
    greedy_windows=1,
    training_windows=8,
    ablation_windows=4,
    windows_per_step=1,
    lr=0.05,
    runs=("spon-0.3-0", "spon-0.5-0", "spon-0.6-0", "spon-0.6-1", "greedy+spon-0.6-0", "wina+spon-0.6-0"),
)


# Summaries of synthetic observations


SHARES = {"dense": 1.0, "teal": 0.0, "spon": 0.6, "greedy": 0.3, "greedy+spon": 0.7, "wina": 0.0, "wina+spon": 0.5}


def observations(windows=40, noise=0.02, **shares):
    """Scores per window whose means are known: NLL 3, TEAL 1 above at 60 %, a method its share of that gap below TEAL."""
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.5, windows)
    gap = rng.normal(1, 0.2, windows)
    share = SHARES | shares
    frames = []
    for domain in ("wiki", "news"):
        for method, removed in share.items():
            for p in [0.0] if method == "dense" else [0.3, 0.5, 0.6]:
                for one in range(2 if method == "spon" else 1):
                    extra = (1 - removed) * gap * p / 0.6
                    nll = base + extra + (noise * rng.normal(size=windows) if method != "dense" else 0)
                    labels = {"domain": domain, "method": method, "p": p, "seed": one}
                    frame = pd.DataFrame({"window": range(windows), "nll": nll, "kl": extra, "agree": 1 - extra / 3})
                    frames.append(frame.assign(**labels))
    return pd.concat(frames)


def cell(table, **labels):
    chosen = np.logical_and.reduce([table[name] == value for name, value in labels.items()])
    (row,) = table[chosen].to_dict("records")
    return row


def test_the_share_of_the_gap_is_a_ratio_of_means_with_its_jackknife_error():
    rng = np.random.default_rng(0)
    dense, teal = (pd.Series(rng.normal(mean, 0.3, 25)) for mean in (3, 4))
    method = teal - 0.4 * (teal - dense) + rng.normal(0, 0.1, 25)
    share, stderr = experiment._gap(dense, teal, method)

    def ratio(kept):
        return (teal[kept].mean() - method[kept].mean()) / (teal[kept].mean() - dense[kept].mean())

    everything = np.ones(25, bool)
    assert share == pytest.approx(ratio(everything))
    without = [ratio(everything & (np.arange(25) != i)) for i in range(25)]
    assert stderr == pytest.approx(math.sqrt(24 / 25 * sum((r - np.mean(without)) ** 2 for r in without)))
    scattered = stats.bootstrap(
        (dense, teal, method),
        lambda d, t, m: (t.mean() - m.mean()) / (t.mean() - d.mean()),
        paired=True,
        vectorized=False,
        n_resamples=500,
        random_state=0,
    ).standard_error
    assert stderr == pytest.approx(scattered, rel=0.25)


def test_a_summary_averages_seeds_before_windows():
    scored = observations()
    row = cell(summarise(scored), domain="wiki", method="spon", p=0.6)
    wiki = scored[scored["domain"] == "wiki"]
    spon = wiki[(wiki["method"] == "spon") & (wiki["p"] == 0.6)]
    dense = wiki[wiki["method"] == "dense"]["nll"].to_numpy()
    teal = wiki[(wiki["method"] == "teal") & (wiki["p"] == 0.6)]["nll"].to_numpy()
    runs = [spon[spon["seed"] == seed]["nll"].to_numpy() for seed in (0, 1)]
    mean = (runs[0] + runs[1]) / 2
    assert row["seeds"] == 2
    assert row["perplexity"] == pytest.approx(math.exp(mean.mean()))
    assert row["extra_nll"] == pytest.approx((mean - dense).mean())
    assert row["extra_nll_stderr"] == pytest.approx(stats.sem(mean - dense))
    assert row["gap_closed"] == pytest.approx((teal - mean).mean() / (teal - dense).mean())
    gaps = [(teal - run).mean() / (teal - dense).mean() for run in runs]
    assert row["gap_seed_sd"] == pytest.approx(np.std(gaps, ddof=1))
    assert row["gap_closed"] == pytest.approx(0.6, abs=5 * row["gap_closed_stderr"])
    teal_row = cell(summarise(scored), domain="wiki", method="teal", p=0.6)
    assert teal_row["gap_closed"] == 0
    assert math.isnan(teal_row["gap_seed_sd"])


def test_a_summary_has_one_row_per_corpus_method_and_sparsity():
    scored = observations()
    table = summarise(scored)
    cells = [set(zip(t["domain"], t["method"], t["p"], strict=True)) for t in (scored, table)]
    assert cells[0] == cells[1]
    assert len(table) == len(cells[1])
    dense = cell(table, domain="news", method="dense", p=0.0)
    assert dense["extra_nll"] == dense["kl"] == 0
    assert dense["agreement"] == 1
    assert math.isnan(dense["gap_closed"])


def test_differences_are_paired_first_minus_second():
    scored = observations()
    table = differences(scored)
    row = cell(table, domain="wiki", p=0.5, first="spon", second="teal")
    wiki = scored[(scored["domain"] == "wiki") & (scored["p"] == 0.5)]
    spon = wiki[wiki["method"] == "spon"].groupby("window")["nll"].mean()
    teal = wiki[wiki["method"] == "teal"]["nll"]
    test = stats.ttest_rel(spon, teal)
    assert row["nll"] == pytest.approx(spon.mean() - teal.mean())
    assert row["nll"] / row["nll_stderr"] == pytest.approx(test.statistic)
    assert row["nll"] < 0 < 1 < test.statistic**2
    pairs = set(zip(table["first"], table["second"], strict=True))
    assert ("greedy+spon", "spon") in pairs
    assert not any("random" in pair for pair in pairs)  # it was not measured


def test_windows_are_paired_by_their_number_not_their_order():
    scored = observations(windows=10)
    scored = scored[scored["p"] != 0.3]
    shuffled = scored.sample(frac=1, random_state=0)
    for summary, keys in ((summarise, ["domain", "method", "p"]), (differences, ["domain", "p", "first", "second"])):
        expected, got = (summary(o).set_index(keys).sort_index() for o in (scored, shuffled))
        pd.testing.assert_frame_equal(got, expected, check_exact=False, rtol=1e-9)


def answers(gain, items=400, seed=0):
    rng = np.random.default_rng(seed)
    luck = rng.random(items)
    frames = []
    for method, p in [("dense", 0.0), ("teal", 0.5), ("spon", 0.5), ("teal", 0.6), ("spon", 0.6)]:
        accuracy = {"dense": 0.6, "teal": 0.4, "spon": 0.4 + gain}[method]
        correct = (luck < accuracy).astype(int)
        frame = pd.DataFrame({"item": range(items), "correct": correct, "correct_normalised": 1 - correct})
        frames.append(frame.assign(task="social_iqa", method=method, p=p, chance=1 / 3))
    return pd.concat(frames)


def test_accuracy_is_compared_item_by_item_with_the_dense_model():
    table = experiment.summarise_accuracy(observed := answers(0.1))
    row = cell(table, method="spon", p=0.5)
    spon = observed[(observed["method"] == "spon") & (observed["p"] == 0.5)]["correct"]
    dense = observed[observed["method"] == "dense"]["correct"]
    assert row["items"] == 400
    assert row["accuracy"] == spon.mean() == 1 - row["normalised"]
    assert row["minus_dense"] == pytest.approx(spon.mean() - dense.mean())
    assert row["minus_dense_stderr"] == pytest.approx(stats.sem(spon - dense))
    assert cell(table, method="dense", p=0.0)["minus_dense"] == 0


def test_ablations_are_compared_with_the_reference():
    windows = np.arange(12)
    rng = np.random.default_rng(0)
    frames = []
    for variant, nll in {"dense": 3.0, "TEAL": 4.0, "reference": 3.5, "sites: o": 3.8}.items():
        frame = pd.DataFrame({"window": windows, "nll": nll + 0.01 * rng.normal(size=12)})
        frames.append(frame.assign(variant=variant, parameters=10.0, training_tokens=640.0))
    table = experiment.summarise_ablations(pd.concat(frames)).set_index("variant")
    assert list(table.index) == ["reference", "sites: o"]
    assert table.loc["reference", "gap_closed"] == pytest.approx(0.5, abs=0.02)
    assert table.loc["reference", "nll_minus_reference"] == 0
    assert table.loc["sites: o", "gap_closed"] == pytest.approx(0.2, abs=0.02)
    assert table.loc["sites: o", "nll_minus_reference"] == pytest.approx(0.3, abs=0.02)


def drift(sign):
    rows = [
        {"layer": layer, "cosine": 0.9 + sign * 0.01 * spon, "relative_l2": 0.4 - sign * 0.01 * spon, "method": method, "p": p}
        for p in (0.5, 0.6)
        for method, spon in (("teal", 0), ("spon", 1))
        for layer in range(10)
    ]
    return pd.DataFrame(rows)


def verdicts(scored, gain=0.1, sign=1):
    return {verdict.claim: verdict for verdict in experiment._verdicts(scored, answers(gain), drift(sign))}


def test_claims_that_the_numbers_bear_out_hold():
    found = verdicts(observations())
    assert len(found) == 22
    assert [claim for claim, verdict in found.items() if not verdict.holds] == []


def test_claims_that_the_numbers_do_not_bear_out_fail():
    scored = observations(spon=-0.2, **{"greedy+spon": -0.5, "wina+spon": -0.5})
    found = verdicts(scored, gain=-0.1, sign=-1)
    assert len(found) == 22
    assert [claim for claim, verdict in found.items() if verdict.holds] == []


def test_a_curve_of_two_points_does_not_grow_or_shrink():
    scored = observations()
    assert not any("grows from 30" in claim for claim in verdicts(scored[scored["p"] != 0.3]))


def test_a_gain_that_shrinks_with_sparsity_is_a_failed_claim():
    scored = observations()
    lost = (scored["method"] == "spon") & (scored["p"] == 0.6)
    found = verdicts(scored.assign(nll=scored["nll"] + 0.5 * lost))
    (claim,) = (verdict for text, verdict in found.items() if "grows from 30" in text)
    assert not claim.holds
    assert claim.value < 0


def test_a_gain_within_its_error_is_not_claimed():
    noisy = verdicts(observations(windows=4, noise=2.0))
    assert not all(verdict.holds for claim, verdict in noisy.items() if "minus" in claim)
    few = experiment._verdicts(observations(), answers(0.1, items=5), drift(1))
    assert not any(verdict.holds for verdict in few if "5 multiple-choice items" in verdict.claim)


def test_verdicts_tell_value_error_and_source():
    found = verdicts(observations())
    gap = found["share of TEAL's NLL gap that SPON closes at 60% on wiki"]
    assert gap.value == pytest.approx(0.6, abs=0.03)
    assert 0 < gap.stderr < 0.02
    assert gap.target == "≥ 0.5, difference > 5 s.e."
    assert gap.source == "ours"
    assert found["share of layers whose drift (cosine) falls under SPON at 50%"].value == 1
    assert found["share of layers whose drift (cosine) falls under SPON at 50%"].source == "paper"


# The whole experiment on the tiny model


@pytest.fixture(scope="module")
def tokenizer():
    letters = Tokenizer(WordLevel({letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz .:QA")}, unk_token="?"))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def document(domain, split, number):
    letters = np.random.default_rng([len(domain), len(split), number]).choice(list("abcdefgh  "), 700)
    return "".join(letters)


def counted(function, calls):
    def call(*args, **options):
        calls.append(function.__name__)
        return function(*args, **options)

    return call


@pytest.fixture
def world(tiny, tokenizer, tmp_path, monkeypatch):
    """The tiny model in place of SmolLM2, random letters in place of prose and questions; counts what is computed."""
    monkeypatch.setattr(experiment, "load_lm", lambda name: (tiny(dtype=torch.float32), tokenizer))
    monkeypatch.setattr(corpora, "documents", lambda domain, split: [document(domain, split, i) for i in range(3)])
    for task in experiment.TASKS:
        examples = [{"input": document(task, "q", i)[:20], "target_scores": {"a b": 1, "c": 0}} for i in range(6)]
        folder = tmp_path / "bigbench" / task
        folder.mkdir(parents=True)
        (folder / "task.json").write_text(json.dumps({"examples": examples}), encoding="utf-8")
    monkeypatch.setattr(assets, "path", lambda name: tmp_path / name)
    monkeypatch.setattr(experiment, "_FULL", replace(experiment._FULL, windows=4, drift_windows=2))
    calls = []
    for name in ("calibrate", "greedy_path", "fit_spon", "evaluate", "mcq_accuracy"):
        monkeypatch.setattr(experiment, name, counted(getattr(experiment, name), calls))
    return calls


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of one build for all tests."""
    return tmp_path_factory.mktemp("build")


@pytest.fixture
def built(world, finished):
    build(out=finished, recipe=RECIPE)
    world.clear()
    return finished


def build_files(recipe):
    tables = {f"{name}.csv.gz" for name in ("greedy", "ablations", "quality", "answers", "drift", "protocol")}
    return {"recipe.json", "calibration.safetensors", *tables, *(f"alpha-{run}.safetensors" for run in recipe.runs)}


def test_a_build_writes_what_a_workbench_reads(built, tiny):
    assert {path.name for path in built.iterdir()} == build_files(RECIPE)
    bench = open_workbench(built)
    assert bench.recipe == RECIPE
    assert json.loads((built / "recipe.json").read_text())["versions"]["torch"] == torch.__version__
    for method in experiment.METHODS:
        with bench.sparse(method, 0.6) as sparse:
            assert bool(sparse.alpha) == (method == "mean-residual" or method.endswith("spon"))
            assert (len(set(sparse.sparsity.values())) > 1) == method.startswith("greedy")
            assert sparse.dense_prefix == 0.01
    ablations = pd.read_csv(built / "ablations.csv.gz")
    sizes = ablations.dropna().drop_duplicates("variant").set_index("variant")
    assert sizes.loc["reference", "training_tokens"] == 4 * 16
    assert sizes.loc["tokens: a quarter", "training_tokens"] == 16
    assert sizes.loc["reference", "parameters"] == 2 * (6 * 32 + 48)
    assert sizes.loc["sites: o + down", "parameters"] == 2 * (32 + 48)
    assert sizes.loc["layers: first half", "parameters"] == 6 * 32 + 48


def test_a_finished_build_is_not_done_again(built, world):
    before = {path.name: path.stat().st_mtime_ns for path in built.iterdir()}
    build(out=built, recipe=RECIPE)
    assert world == []
    assert {path.name: path.stat().st_mtime_ns for path in built.iterdir()} == before


def test_an_interrupted_build_goes_on_where_it_stopped(built, world, tmp_path, monkeypatch):
    out = tmp_path / "interrupted"
    train = experiment.fit_spon

    def interrupted(sparse, *args, **options):
        if world.count("fit_spon") == 2:
            raise KeyboardInterrupt
        return train(sparse, *args, **options)

    monkeypatch.setattr(experiment, "fit_spon", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(out=out, recipe=RECIPE)
    assert world.count("fit_spon") == 2
    assert sorted(path.name for path in out.glob("alpha-*")) == ["alpha-spon-0.3-0.safetensors", "alpha-spon-0.5-0.safetensors"]
    monkeypatch.setattr(experiment, "fit_spon", train)
    world.clear()
    build(out=out, recipe=RECIPE)
    assert "calibrate" not in world
    assert "greedy_path" not in world
    assert world.count("fit_spon") == len(RECIPE.runs) - 2 + 13
    for path in built.glob("*.safetensors"):
        first, second = load_file(path), load_file(out / path.name)  # as if it had never stopped
        assert set(first) == set(second)
        assert all(torch.equal(first[name], second[name]) for name in first)
    for path in built.glob("*.csv.gz"):
        pd.testing.assert_frame_equal(pd.read_csv(out / path.name), pd.read_csv(path))


def test_a_folder_with_another_recipe_is_refused(built, world):
    with pytest.raises(ValueError, match=r"holds a build with other lr, training_windows: empty it or choose another folder"):
        build(out=built, recipe=replace(RECIPE, lr=0.1, training_windows=6))
    assert world == []


def test_without_a_build_the_command_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no build of lab 01: run  labkit build 01"):
        open_workbench(tmp_path)
    with pytest.raises(FileNotFoundError, match="labkit build 01"):
        reproduce(fast=True, out=tmp_path, data=tmp_path)


def test_a_run_that_was_not_trained_leaves_the_model_free(built):
    bench = open_workbench(built)
    with pytest.raises(FileNotFoundError, match=r"run='spon-0\.4-0' has not been trained: labkit build 01 trains"):
        bench.sparse("spon", 0.4)
    with pytest.raises(ValueError, match=r"p=0\.4: mean residuals were calibrated at \[0\.3, 0\.5, 0\.6, 0\.7\]"):
        bench.sparse("mean-residual", 0.4)
    with pytest.raises(ValueError, match="method='sparsegpt': expected one of"):
        bench.sparse("sparsegpt", 0.5)
    with bench.sparse("teal", 0.5):
        pass


def test_fast_measures_everything_once(built, world, tmp_path):
    result = reproduce(fast=True, out=tmp_path / "out", data=built)
    quality = result.tables["quality"]
    assert set(quality["p"]) == {0.0, 0.6}
    assert set(quality[quality["domain"] == "wiki"]["method"]) == {"dense", *experiment.METHODS}
    assert set(quality[quality["domain"] == "news"]["method"]) == {"dense", "teal", "spon"}
    assert cell(quality, domain="wiki", method="spon", p=0.6)["seeds"] == 2
    assert (quality["perplexity"] > 1).all()
    assert cell(quality, domain="wiki", method="spon", p=0.6)["kl"] < cell(quality, domain="wiki", method="teal", p=0.6)["kl"]
    assert result.tables["accuracy"]["method"].tolist() == ["dense", "teal", "spon"]
    assert len(result.tables["drift"]) == 2 * 2  # layers times methods
    assert result.tables["protocol"]["dense_prefix"].tolist() == ["0", "1", "0.01", "0.5"]
    assert len(result.tables["ablations"]) == 13
    assert any("dense_prefix=0.01" in note for note in result.notes)
    assert {verdict.source for verdict in result.verdicts} == {"paper", "ours"}
    files = report.write(result, tmp_path / "report")
    assert {file.name for file in files} >= {"quality.csv", "verdicts.json", "report.md"}

    world.clear()
    again = reproduce(fast=True, out=tmp_path / "out", data=built)
    assert world == []
    for name, table in result.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)
    assert again.verdicts == result.verdicts


def test_an_interrupted_measurement_goes_on_where_it_stopped(built, world, tmp_path, monkeypatch):
    measure = experiment.evaluate

    def interrupted(*args, **options):
        if world.count("evaluate") == 3:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(experiment, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce(fast=True, out=tmp_path, data=built)
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts-fast").iterdir()}
    assert len(parts) == 3
    monkeypatch.setattr(experiment, "evaluate", measure)
    reproduce(fast=True, out=tmp_path, data=built)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts-fast").iterdir()}
    assert parts.items() <= after.items()


def test_the_full_sizes_add_sparsities_tasks_and_seeds(built, tmp_path):
    result = reproduce(fast=False, out=tmp_path, data=built)
    quality = result.tables["quality"]
    assert set(quality["p"]) == {0.0, *experiment.LEVELS}
    assert set(result.tables["accuracy"]["task"]) == set(experiment.TASKS)
    assert set(quality[quality["domain"] == "news"]["p"]) == {0.0, 0.5, 0.6}
    claims = [verdict.claim for verdict in result.verdicts]
    assert len(claims) == len(set(claims)) == 4 + 2 + 3 + 1 + 4 + 2
    for name, table in {"quality": "observations", "answers": "answers", "drift": "drift", "protocol": "protocol"}.items():
        stored = experiment.stored(name, built)  # the build has measured the same
        pd.testing.assert_frame_equal(stored, result.tables[table].reset_index(drop=True))
    assert experiment.stored("greedy", built)["layer"].unique().tolist() == [0, 1]
    one = reproduce(fast=False, seeds=1, out=tmp_path, data=built).tables["quality"]
    assert cell(one, domain="wiki", method="spon", p=0.6)["seeds"] == 1
    assert cell(quality, domain="wiki", method="spon", p=0.6)["seeds"] == 2


@pytest.mark.parametrize("seeds", [0, -1])
def test_no_seeds_are_refused(built, tmp_path, seeds):
    with pytest.raises(ValueError, match=f"seeds={seeds}: expected at least 1"):
        reproduce(fast=True, seeds=seeds, out=tmp_path, data=built)


def test_a_missing_second_corpus_is_noted(built, world, tmp_path, monkeypatch):
    def documents(domain, split):
        if domain == "news":
            raise MissingAsset("asset 'news': labkit assets fetch news")
        return [document(domain, split, i) for i in range(3)]

    monkeypatch.setattr(corpora, "documents", documents)
    result = reproduce(fast=True, out=tmp_path, data=built)
    assert set(result.tables["quality"]["domain"]) == {"wiki"}
    assert "The other corpus is missing: labkit assets fetch news" in result.notes


# The committed build


def test_the_committed_build_is_the_default_recipes_for_the_real_model(smollm2):
    model, tokenizer = smollm2
    bench = open_workbench(model=model, tokenizer=tokenizer)
    assert bench.recipe == Recipe()
    assert build_files(Recipe()) <= {path.name for path in experiment.DATA.iterdir()}
    for method in experiment.METHODS:
        with bench.sparse(method, 0.6) as sparse:
            assert len(sparse.sites) == 210
    for run in Recipe().runs:
        vectors = bench.alpha(run).values()
        assert sum(vector.numel() for vector in vectors) == 149_760
        assert all(vector.isfinite().all() for vector in vectors)


def test_the_committed_build_is_small():
    files = [path for path in experiment.DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    assert {path.suffix for path in files} <= {".gz", ".json", ".safetensors"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fast_on_the_real_model(tmp_path):
    result = reproduce(fast=True, out=tmp_path)
    quality = result.tables["quality"]
    dense, teal, spon = (cell(quality, domain="wiki", method=m, p=p) for m, p in (("dense", 0), ("teal", 0.6), ("spon", 0.6)))
    assert dense["perplexity"] < spon["perplexity"] < teal["perplexity"]
    assert all(math.isfinite(verdict.value) for verdict in result.verdicts)

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from labkit import report
from labkit.errors import MissingAsset
from labkit.watermark import experiment
from labkit.watermark.corpus import Corpus
from labkit.watermark.experiment import (
    FPR,
    HARD,
    MAIN,
    METHOD,
    SAME_TEXTS,
    STORED,
    Recipe,
    build,
    reproduce,
    stored,
    stored_roc,
)
from tests.unit.watermark.chains import synthetic_corpus

TINY = Recipe(
    documents=18, lengths=(40, 100), depths=(0, 1, 8), repeats=1, paraphrasers=(HARD,), thorough=(40, 100), slow=False, rows=40
)
OTHER = "gemma3-270m"


def where(table, **labels):
    return table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]


def only(table, **labels):
    (row,) = where(table, **labels).to_dict("records")
    return row


@pytest.fixture(scope="module")
def corpus():
    """Two models with documents of their own, 200 tokens each."""
    parts = [
        synthetic_corpus(docs=18, length=200, paraphrasers=("mt+wordnet", HARD), llms=(llm,), seed=seed)
        for seed, llm in enumerate((MAIN, OTHER))
    ]
    parts[1].rows["doc"] += 100
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("bits", "wrong_bits", "fresh"))
    rows = pd.concat([part.rows for part in parts], ignore_index=True)
    return Corpus(rows, *arrays, [None] * len(rows))


@pytest.fixture(scope="module")
def reproduced(corpus, tmp_path_factory):
    """A run, a second run in the same folder, and the folder."""
    out = tmp_path_factory.mktemp("reproduced")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "_FAST", TINY)
        patch.setattr(experiment, "load_corpus", lambda: corpus)
        first = reproduce(fast=True, out=out)
        patch.setattr(experiment, "evaluate", None)  # nothing is measured again
        return first, reproduce(fast=True, out=out), out


@pytest.fixture(scope="module")
def built(corpus, reproduced, tmp_path_factory):
    """A build that was interrupted after the last measurement."""
    out = tmp_path_factory.mktemp("built")
    shutil.copytree(reproduced[2] / "parts-fast-1", out / "parts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "build_parts", lambda folder, recipe: corpus.save(folder))
        patch.setattr(experiment, "_contexts", lambda path: path.write_bytes(b""))
        build(out=out, recipe=TINY)
    return out


@pytest.fixture(scope="module")
def tables(built):
    return {name: stored(name, built) for name in STORED}


def test_the_build_leaves_what_is_read_and_nothing_else(built):
    names = {f"{name}.csv.gz" for name in STORED} | {"corpus.npz", "rows.csv.gz", "contexts.npz", "recipe.json"}
    assert {path.name for path in built.iterdir()} == names
    assert json.loads((built / "recipe.json").read_text())["recipe"]["documents"] == 18


def test_a_build_of_another_size_is_refused(built):
    with pytest.raises(ValueError, match="holds a build with other repeats: empty it or choose another folder"):
        build(out=built, recipe=replace(TINY, repeats=2))


def test_every_row_has_an_estimate_inside_its_interval(tables):
    for name, column in {
        "auc": "auc",
        "differences": "difference",
        "transfer": "auc",
        "channel": "auc",
        "copy_paste": "auc",
    }.items():
        table = tables[name]
        assert (table["lo"] <= table[column] + 1e-9).all(), name
        assert (table[column] <= table["hi"] + 1e-9).all(), name
        assert (table["se"] >= 0).all(), name


def test_the_main_table_has_every_detector_against_every_kind_of_negatives(tables):
    levels = where(tables["auc"], T=40)
    for negatives in ("human", "unwatermarked", "both"):
        cell = where(levels, negatives=negatives)
        one = set(where(cell, protocol="single", depth=8)["detector"])
        many = set(where(cell, protocol="prefix", depth=8)["detector"])
        assert one == {"z", "winmax", "static+lr"}
        assert many >= {METHOD, "pss_only", "static+lr", "no runs", "no local z", "z", *SAME_TEXTS}
    assert set(levels["protocol"]) == {"single", "prefix", "suffix", "probe"}
    assert not levels.duplicated(["protocol", "depth", "detector", "T", "paraphraser", "negatives"]).any()


def test_pooled_negatives_are_the_mean_of_both_kinds(tables):
    labels = {"protocol": "single", "depth": 8, "detector": "z", "T": 40}
    found = {kind: only(tables["auc"], **labels, negatives=kind)["auc"] for kind in ("human", "unwatermarked", "both")}
    assert found["both"] == pytest.approx((found["human"] + found["unwatermarked"]) / 2, abs=2e-4)


def test_differences_are_those_of_the_levels(tables):
    labels = {"protocol": "prefix", "depth": 8, "T": 40, "negatives": "both", "paraphraser": HARD}
    levels = where(tables["auc"], **labels).set_index("detector")["auc"]
    for row in where(tables["differences"], **labels).to_dict("records"):
        assert row["difference"] == pytest.approx(levels[row["detector"]] - levels[row["versus"]], abs=2e-4)


def test_a_whole_suffix_is_a_whole_prefix(tables):
    for detector in (METHOD, "lr_z", "z", "z@first"):
        labels = {"detector": detector, "T": 40, "negatives": "both"}
        pair = [only(tables["auc"], protocol=name, depth=d, **labels) for name, d in (("prefix", 8), ("suffix", 1))]
        assert pair[0]["auc"] == pair[1]["auc"]


def test_roc_curves_belong_to_their_rows(built, tables):
    curves = stored_roc(built)
    np.testing.assert_array_equal(curves.fpr, FPR)
    tpr = curves.of("single", "z", 40, HARD, 1, "human")
    assert (np.diff(tpr) >= 0).all()
    assert tpr[-1] == 1
    area = only(tables["auc"], protocol="single", detector="z", T=40, paraphraser=HARD, depth=1, negatives="human")["auc"]
    assert np.trapezoid(tpr, curves.fpr) == pytest.approx(area, abs=0.02)
    with pytest.raises(ValueError, match=r"no ROC of .*'nothing'.* is stored"):
        curves.of("single", "nothing", 40, HARD, 1)


def test_z_falls_as_its_bits_do_not_survive(tables):
    row = where(tables["decay"], paraphraser=HARD, llm=MAIN, kind="watermarked").set_index("depth")
    np.testing.assert_allclose(row["z"] / row.loc[0, "z"], 0.7**row.index, atol=0.06)
    np.testing.assert_allclose(row["step"][1:], row["z"].diff()[1:], atol=2e-3)


def test_the_wrong_key_is_at_chance_and_the_right_one_is_not(tables):
    wrong, right = (where(tables["controls"], control=f"{key} key") for key in ("wrong", "right"))
    assert len(wrong) == len(right)
    assert ((wrong["auc"] - 0.5).abs() < 4 * wrong["se"]).all()
    assert where(right, protocol="single", depth=0)["auc"].min() > 0.95


def test_unequal_lengths_alone_separate_texts_without_a_watermark(tables):
    controls = tables["controls"].set_index("control")
    assert controls.loc["unequal lengths", "auc"] > 0.95
    assert abs(controls.loc["equal lengths", "auc"] - 0.5) < 4 * controls.loc["equal lengths", "se"]


def test_winmax_wins_where_a_short_stretch_is_pasted(tables):
    gap = where(tables["copy_paste"], detector="winmax", versus="z").set_index("span")["auc"]
    assert gap[[20, 30]].max() > 0.05
    assert gap[200] <= 0


def test_transfer_covers_all_pairs_and_counts_what_differs(tables):
    moved = where(tables["transfer"], detector=METHOD)
    assert len(moved) == 12 * (12 + 4)  # 3 domains × 2 paraphrasers × 2 models; and both other domains together
    assert moved["differ"].value_counts().to_dict() == {0: 12, 1: 12 * (4 + 1), 2: 12 * (5 + 2), 3: 12 * (2 + 1)}
    assert moved["auc"].min() > 0.8


def test_a_second_run_reads_the_finished_parts(reproduced):
    first, second, _ = reproduced
    assert first.verdicts == second.verdicts
    assert all(table.equals(second.tables[name]) for name, table in first.tables.items())


def test_the_report_can_be_written(reproduced, tmp_path):
    report.write(reproduced[0], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## hard_chain" in text
    assert "FAILS: PSS minus z@first on the same texts" in text


def test_without_the_tokenizer_the_classifier_of_text_is_left_out(corpus, tmp_path, monkeypatch):
    def nowhere(*_):
        raise MissingAsset("smollm2 is not here: labkit assets fetch smollm2")

    monkeypatch.setattr(experiment, "_parts", lambda corpus, recipe: {"text": nowhere, "decay": experiment._decay})
    found, missing = experiment._measure(corpus, TINY, tmp_path)
    assert list(found) == ["decay"]
    assert missing == ["text is left out: smollm2 is not here: labkit assets fetch smollm2"]


def test_aims_of_ours_and_claims_of_the_paper_are_kept_apart(reproduced):
    verdicts = reproduced[0].verdicts
    of_the_paper = [verdict for verdict in verdicts if verdict.source == "paper"]
    assert {verdict.target for verdict in of_the_paper} == {"≥ 0.10", "≥ 0.837"}
    by_claim = {verdict.claim: verdict for verdict in verdicts}
    gain = next(
        verdict for claim, verdict in by_claim.items() if claim.startswith("PSS of depths 1–8 minus z at depth 8, T = 40")
    )
    assert gain.holds
    assert gain.value > 0.2  # the first paraphrase holds what the eighth has lost
    same = [verdict for claim, verdict in by_claim.items() if "minus z@first on the same texts" in claim]
    assert len(same) == 2
    assert not any(verdict.holds for verdict in same)


def test_documents_are_taken_evenly_from_all_domains(corpus):
    kept = experiment._limited(corpus, 6, llm=MAIN)
    assert kept.rows["doc"].nunique() == 6
    assert kept.rows.groupby("domain")["doc"].nunique().tolist() == [2, 2, 2]


def test_unknown_tables_are_listed():
    with pytest.raises(ValueError, match="name='nothing': expected one of auc, differences"):
        stored("nothing")

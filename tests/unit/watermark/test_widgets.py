"""The lab's panels without a front end."""

import re

import numpy as np
import pandas as pd
import pytest

from labkit.panel import Panel
from labkit.theme import fmt, keyed
from labkit.watermark import GreenBits, Watermark, auc, theory, widgets, z_score
from tests.unit.watermark.page import VOCABULARY, Words, made_up_corpus, made_up_tables


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Errors of callbacks reach the test."""
    monkeypatch.setattr(Panel, "raise_errors", True)


@pytest.fixture(scope="module")
def corpus():
    return made_up_corpus()


@pytest.fixture(scope="module")
def tables():
    return made_up_tables()


def words(panel):
    text = re.sub("<style>.*?</style>|<[^>]*>", "", panel.readout.value, flags=re.DOTALL)
    return text.replace("\u202f", " ")


def traces(panel):
    return keyed(panel.figure)


def numbers(values):
    return np.asarray(values, dtype=float)


def at(corpus, **equal):
    """Positions of texts."""
    mask = np.logical_and.reduce([corpus.rows[column] == value for column, value in equal.items()])
    return np.flatnonzero(mask)


# AUC over depth


def test_the_claim_opens_with_the_papers_comparison(tables):
    panel = widgets.claim(*tables)
    assert words(panel) == (
        "The text D8 alone: z has an AUC of 0.550 [0.530, 0.570]; PSS and features of the texts given 0.900 [0.880, 0.920]: "
        "+35.0 points [+34.0, +36.0]."
    )


def test_the_lead_is_gone_when_the_detector_is_given_one_text(tables):
    panel = widgets.claim(*tables)
    panel.protocol.value = "single"
    assert words(panel).endswith("its 21 features 0.530 [0.510, 0.550]: −2.0 points [−3.0, −1.0].")
    assert traces(panel)["pss+static+lr/auc"].visible is False
    assert list(traces(panel)["static+lr/auc"].x) == list(range(9))


def test_a_suffix_is_compared_with_z_at_the_end_of_the_chain(tables):
    panel = widgets.claim(*tables)
    panel.protocol.value, panel.depth.value = "suffix", 4
    assert "The text D8 alone" in words(panel)
    np.testing.assert_allclose(numbers(traces(panel)["z/auc"].y), [0.55] * 7)
    panel.depth.value = 8
    assert "Not measured" in words(panel)


def test_a_pattern_over_depth_needs_two_texts(tables):
    panel = widgets.claim(*tables)
    panel.depth.value = 1
    assert "needs at least two texts" in words(panel)
    assert list(traces(panel)["cursor"].x) == [1, 1]


def test_the_main_figure_ranks_what_a_protocol_shows(tables):
    panel = widgets.main_figure(*tables)
    assert words(panel).startswith("Depth 8, best to worst: z, distinct bigrams 0.550")
    panel.protocol.value = "prefix"
    assert words(panel).startswith("Depth 8, best to worst: PSS + features, LR 0.900")
    np.testing.assert_allclose(numbers(traces(panel)["pss+static+lr/roc"].y).max(), 1.0)


@pytest.mark.parametrize("make", [widgets.claim, widgets.main_figure, widgets.information])
def test_every_choice_of_an_auc_panel_is_drawn_on_the_same_axes(make, tables):
    panel = make(*tables)
    ranges = [axis.range for axis in [*panel.figure.select_xaxes(), *panel.figure.select_yaxes()]]
    for name in ("protocol", "length", "paraphraser", "negatives"):
        control = panel.controls[name]
        for option in control.options:
            control.value = option[1] if isinstance(option, tuple) else option
            assert words(panel)
    assert [axis.range for axis in [*panel.figure.select_xaxes(), *panel.figure.select_yaxes()]] == ranges


@pytest.mark.parametrize("make", [widgets.claim, widgets.main_figure, widgets.information])
def test_a_short_chain_ends_where_it_ends_and_is_missed_where_its_texts_are_too_short(make, tables):
    short = {
        name: table.query("paraphraser == 'strong' or (T == 40 and depth <= 4 and protocol != 'suffix')")
        for name, table in tables[0].items()
    }
    ends = tables[0]["auc"].query("paraphraser == 'wordnet' and T == 40 and protocol == 'suffix' and depth <= 3")
    panel = make(short | {"auc": pd.concat([short["auc"], ends])}, tables[1])
    panel.paraphraser.value, panel.length.value, panel.protocol.value = "wordnet", 40, "suffix"
    np.testing.assert_allclose(numbers(traces(panel)["z/auc"].y), [0.75] * 3)  # that of D4
    for protocol in dict(panel.protocol.options).values():
        panel.protocol.value, panel.length.value = protocol, 100
        assert "Not measured" in words(panel)


def test_equal_information_is_said_in_one_breath(tables):
    panel = widgets.information(*tables)
    assert "+35.0 points [+34.0, +36.0] against z of D8 alone" in words(panel)
    assert "−2.0 points [−3.0, −1.0] against the z of the first one" in words(panel)
    np.testing.assert_allclose(numbers(traces(panel)["static@first/auc"].y), [0.88] * 7)
    panel.depth.value = 1
    assert "Not measured" in words(panel)


# Texts


def test_two_passages_start_plain_and_show_their_bits_with_a_key(corpus):
    panel = widgets.tokens(corpus, Words())
    assert "<span" not in panel.figure.value
    for key, bits in (("right", corpus.bits), ("wrong", corpus.wrong_bits)):
        panel.shown.value = key
        here = dict(doc=panel.document.value, depth=0, paraphraser="strong")
        pair = [bits[at(corpus, kind=kind, **here)[0]] for kind in ("watermarked", "unwatermarked")]
        assert panel.figure.value.count('class="g"') == sum(int(b.sum()) for b in pair)
        for own in pair:
            assert f"{own.sum()} of 200 green" in words(panel)


def test_the_right_key_names_the_watermarked_passage(corpus):
    panel = widgets.tokens(corpus, Words(), shown="right")
    for document in (0, 1):
        panel.document.value = document
        green = {name: int(count) for name, count in re.findall(r"([AB]): (\d+) of", words(panel))}
        assert f"Passage {max(green, key=green.get)} carries the watermark" in words(panel)


def test_making_one_obeys_the_theory():
    panel = widgets.make_one()
    for gamma, delta, temperature in ((0.25, 2.0, 0.7), (0.5, 4.0, 1.5), (0.1, 0.0, 0.3)):
        panel.gamma.value, panel.delta.value, panel.temperature.value = gamma, delta, temperature
        prompt, _, green, before, after, entropies, rates, uniform = panel.result
        assert after.sum() == pytest.approx(1)
        assert uniform == pytest.approx(theory.uniform_green_rate(gamma, delta))
        assert (rates > uniform * entropies - 0.12).all()  # a hundred lists by lot
        ratio = after[green].sum() / after[~green].sum() / (before[green].sum() / before[~green].sum())
        assert np.log(ratio) == pytest.approx(delta, abs=1e-6)
        assert traces(panel)["here"].x[0] == entropies[prompt]


def test_more_bias_never_makes_less_green():
    panel = widgets.make_one(prompt=3)
    shares = []
    for delta in (0.0, 1.0, 2.0, 6.0):
        panel.delta.value = delta
        shares.append(panel.result[6].mean())
    assert (np.diff(shares) > 0).all()


def test_the_z_test_shows_the_scores_of_the_library(corpus):
    panel = widgets.z_test(corpus)
    panel.length.value, panel.depth.value, panel.paraphraser.value = 100, 2, "strong"
    z = {}
    for kind in ("watermarked", "unwatermarked", "human"):
        rows = at(corpus, kind=kind, depth=2, paraphraser="strong")
        z[kind] = z_score(corpus.bits[rows, :100], 0.25)
        np.testing.assert_allclose(np.sort(panel.result[1][kind]), np.sort(z[kind]))
    pooled = np.concatenate([z["watermarked"], z["human"]])
    labels = np.repeat([1, 0], [len(z["watermarked"]), len(z["human"])])
    assert f"{auc(pooled, labels):.3f} against human text" in words(panel)
    x, y = (numbers(traces(panel)["human/roc"][axis]) for axis in "xy")
    assert np.trapezoid(y, x) == pytest.approx(auc(pooled, labels))


def test_the_wrong_key_sees_chance(corpus):
    panel = widgets.z_test(corpus)
    assert panel.result[4]["human"] > 0.9
    panel.key.value = "wrong"
    assert abs(panel.result[4]["human"] - 0.5) < 0.3
    assert panel.result[2]["watermarked"] == pytest.approx(0.25, abs=0.05)


def test_a_paraphrase_is_shown_with_what_is_left(corpus):
    panel = widgets.paraphrase(corpus, Words(), depth=3)
    rows = at(corpus, doc=panel.document.value, kind="watermarked", paraphraser="strong")
    z = z_score(corpus.bits[rows], 0.25)
    np.testing.assert_allclose(numbers(traces(panel)["z"].y), z)
    assert traces(panel)["here1"].y[0] == pytest.approx(0.7**3)
    assert panel.readout.value.count('class="g"') == corpus.bits[rows[3]].sum()
    panel.depth.value = 0
    assert "After 0 rounds 100 % of the bigrams are left" in words(panel)
    panel.kind.value, panel.paraphraser.value = "unwatermarked", "wordnet"
    assert panel.result[0] == "wordnet"


def test_local_windows_are_those_of_the_library(corpus):
    panel = widgets.local_view(corpus)
    bits = corpus.bits[at(corpus, doc=panel.document.value, kind="watermarked", depth=0, paraphraser="strong")[0]]
    np.testing.assert_array_equal(panel.result[0], bits)
    assert f"z = {z_score(bits, 0.25):.2f}" in words(panel)
    panel.expand.value, panel.size.value, panel.stride.value = False, 40, 20
    assert words(panel).startswith("9 windows, the widest of 40 tokens")


def test_single_features_are_ranked_by_their_auc(corpus):
    panel = widgets.features(corpus)
    rows = at(corpus, depth=0, paraphraser="strong")
    expected = auc(z_score(corpus.bits[rows], 0.25), corpus.rows["label"].to_numpy()[rows])
    assert f"(z_global) reaches {expected:.2f}" in words(panel)
    heat = np.asarray(traces(panel)["auc"].z, dtype=float)
    assert heat.shape == (21, 9)
    assert heat[-1, 0] == pytest.approx(expected, abs=1e-3)
    panel.depth.value, panel.negatives.value, panel.kind.value = 8, "human", "human"
    assert words(panel).startswith("Depth 8")


# Synthetic bits


def test_on_independent_bits_z_follows_the_closed_form_and_nothing_beats_it():
    panel = widgets.channel()
    table, closed, *_ = panel.result
    np.testing.assert_allclose(table["z"], closed, atol=0.06)
    assert (table["winmax"].dropna() < table.loc[table["winmax"].notna(), "z"] + 0.03).all()
    assert (table["z@first"][2:] > table["z"][2:]).all()


def test_without_redrawing_all_rounds_are_alike():
    panel = widgets.channel()
    panel.q.value = 0.0
    assert panel.result[0]["z"].nunique() == 1
    panel.bursts.value, panel.q.value = "bursts", 0.5
    assert (panel.result[0]["z"].diff()[1:] < 0.02).all()


def test_stored_classifiers_are_shown_where_they_were_measured():
    rows = [("iid", 100, "single", "static+lr", 8, 0.6), ("iid", 100, "prefix", "pss+static+lr", 8, 0.99)]
    rows += [("iid", 100, "prefix", "static+lr", 8, 0.98)]  # of the first text
    stored = pd.DataFrame(rows, columns=["channel", "T", "protocol", "detector", "depth", "auc"])
    panel = widgets.channel(stored)
    assert list(traces(panel)["static+lr"].y) == [0.6]
    assert list(traces(panel)["pss+static+lr"].y) == [0.99]
    panel.q.value = 0.5
    assert list(traces(panel)["static+lr"].y) == [None]


def test_transfer_frames_the_cells_in_which_everything_differs():
    cells = [("news", "strong", "a"), ("fiction", "wordnet", "b"), ("news", "wordnet", "b")]
    rows = []
    for train in cells:
        for test in [*cells, ("other two", "strong", "a")]:
            differ = sum(one != other for one, other in zip(train, test, strict=True))
            rows.append((*train, *test, differ, "z", 40, 0.7 if differ == 3 else 0.9))
    sides = [f"{side}_{part}" for side in ("train", "test") for part in ("domain", "paraphraser", "llm")]
    panel = widgets.transfer(pd.DataFrame(rows, columns=[*sides, "differ", "detector", "T", "auc"]))
    framed = traces(panel)["all differ"]
    cells = np.asarray(traces(panel)["auc"].customdata)
    assert sorted(map(tuple, cells[list(framed.y), list(framed.x)])) == [
        ("a, strong, news", "b, WordNet, fiction"),
        ("b, WordNet, fiction", "a, strong, news"),
    ]
    assert "AUC 0.700 on average" in words(panel)


# A text of one's own


@pytest.fixture
def pasted(corpus):
    class Repeat:
        def __call__(self, texts, round, seed):
            return [text.replace("w1 ", "w2 ") for text in texts]

    return widgets.paste(corpus, Words(), Repeat())


def test_a_pasted_text_is_read_with_the_key(pasted):
    ids = np.random.default_rng(5).integers(0, VOCABULARY, 120)
    pasted.text.value = Words().decode(ids)
    bits = GreenBits(Watermark(VOCABULARY, 0.25))(ids)
    assert f"{bits.sum()} of 119 tokens are green: z = {fmt(float(z_score(bits, 0.25)))}" in words(pasted)
    pasted.key.value = 7919
    other = GreenBits(Watermark(VOCABULARY, 0.25, key=7919))(ids)
    assert f"{other.sum()} of 119 tokens" in words(pasted)


def test_a_short_text_is_said_to_be_too_short(pasted):
    pasted.text.value = " ".join(f"w{i}" for i in range(30))
    assert "Too short: with 29 tokens" in words(pasted)
    pasted.ask.click()
    assert "wants at least 50 tokens" in words(pasted)


def test_the_classifier_speaks_on_a_button_only(pasted):
    assert "probability" not in words(pasted)
    pasted.ask.click()
    assert "By the 21 features of its first 200 tokens" in words(pasted)
    assert "After 1, 2 and 3 rounds of WordNet z is" in words(pasted)
    pasted.text.value += " w5 w6"
    assert "probability" not in words(pasted)


def test_an_empty_text_leaves_the_last_one_and_says_why(pasted, monkeypatch):
    monkeypatch.setattr(Panel, "raise_errors", False)
    before = pasted.figure.value
    pasted.text.value = "  "
    assert "need at least 2 tokens" in pasted.status.value
    assert pasted.figure.value == before

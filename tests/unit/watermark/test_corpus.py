from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from labkit.watermark import corpus as corpus_module
from labkit.watermark import generate as generate_module
from labkit.watermark.corpus import KINDS, WRONG_KEY, Chain, Recipe, Source, build_corpus, build_parts, load_corpus
from labkit.watermark.generate import encode, load_tokenizer
from labkit.watermark.prose import passages
from labkit.watermark.scheme import GreenBits, Watermark
from labkit.watermark.scores import fresh, z_score
from tests.unit.watermark.models import uniform_model

SIX = Recipe(
    (Source("smollm2", 6, 0, (Chain("wordnet", 2, 45), Chain("strong", 2, 36, documents=2, n_tokens=54)), n_tokens=60),),
    domains=("news",),
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of six documents, by the code that builds the lab's own."""
    out = tmp_path_factory.mktemp("corpus")
    build_parts(out, SIX)
    return out


@pytest.fixture(scope="module")
def six(folder):
    return load_corpus(folder)


@pytest.fixture(scope="module")
def shipped():
    return load_corpus()


def test_every_document_has_all_its_texts(six):
    counts = six.rows.groupby(["paraphraser", "doc"]).size()
    assert (counts == 3 * 3).all()
    assert counts.groupby("paraphraser").size().to_dict() == {"wordnet": 6, "strong": 2}
    assert not six.rows.duplicated(["llm", "paraphraser", "doc", "kind", "depth"]).any()
    assert set(six.rows["kind"]) == set(KINDS)
    assert (six.rows["label"] == (six.rows["kind"] == "watermarked")).all()
    assert (six.rows.groupby("doc")["domain"].nunique() == 1).all()


def test_bits_are_those_of_the_ids(six):
    right, wrong = GreenBits(Watermark(49152)), GreenBits(Watermark(49152, key=WRONG_KEY))
    for i, row in enumerate(six.rows.itertuples()):
        assert (six.ids[i] is None) == (row.kind == "human")
        if six.ids[i] is not None:
            assert len(six.ids[i]) == row.length + 1
            np.testing.assert_array_equal(six.bits[i, : row.length], right(six.ids[i]))
            np.testing.assert_array_equal(six.wrong_bits[i, : row.length], wrong(six.ids[i]))
            np.testing.assert_array_equal(six.fresh[i, : row.length], fresh(six.ids[i]))
        assert not six.bits[i, row.length :].any()


def test_ids_are_those_of_the_received_text(six, folder, tokenizer):
    """Not of the tokens drawn: what was written is decoded, and encoded again."""
    start = six.select(paraphraser="wordnet", depth=0, kind=["watermarked", "unwatermarked"])
    for domain in SIX.domains:
        for kind in ("watermarked", "unwatermarked"):
            texts = pd.read_json(folder / "parts" / f"smollm2-{domain}-{kind}.json").set_index("doc")["text"]
            for i in np.flatnonzero((start.rows["domain"] == domain) & (start.rows["kind"] == kind)):
                np.testing.assert_array_equal(start.ids[i], encode(tokenizer, texts[start.rows["doc"][i]])[:46])


def test_human_texts_are_named_by_their_place(six, tokenizer):
    human = six.select(kind="human", depth=0, paraphraser="wordnet")
    for i, row in enumerate(human.rows.itertuples()):
        document = next(p for p in passages(row.domain) if p.doc == row.doc)
        bits = GreenBits(Watermark(49152))(encode(tokenizer, document.text[row.start : row.stop])[:46])
        np.testing.assert_array_equal(human.bits[i], bits)
    assert (six.rows.query("kind != 'human' or depth > 0")[["start", "stop"]] == -1).all(axis=None)


def test_the_watermark_is_there_and_only_there(six):
    rows = six.select(depth=0, paraphraser="wordnet")
    z = pd.Series(z_score(rows.bits, six.gamma)).groupby(rows.rows["kind"]).mean()
    wrong = pd.Series(z_score(rows.wrong_bits, six.gamma)).groupby(rows.rows["kind"]).mean()
    assert z["watermarked"] > 3
    assert z[["unwatermarked", "human"]].abs().max() < 2
    assert wrong.abs().max() < 2


def test_a_finished_build_is_not_done_again(six, folder, tmp_path, monkeypatch):
    """Neither is a begun one: the parts are there, so no model is loaded and no paraphraser called."""
    monkeypatch.setattr(generate_module, "load", None)
    monkeypatch.setattr("labkit.watermark.paraphrase.chain", None)
    (tmp_path / "parts").symlink_to(folder / "parts")
    again = build_parts(tmp_path, SIX)
    pd.testing.assert_frame_equal(again.rows, six.rows)
    for name in ("corpus.npz", "rows.csv.gz"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_saving_and_loading_give_the_same(six, tmp_path):
    wide = replace(six, ids=[None if row is None else row + 200_000 for row in six.ids], dropped=("smollm2 200 7",))
    wide.save(tmp_path)
    back = load_corpus(tmp_path)
    pd.testing.assert_frame_equal(back.rows, six.rows)
    for name in ("bits", "wrong_bits", "fresh"):
        np.testing.assert_array_equal(getattr(back, name), getattr(six, name))
    for stored, row in zip(back.ids, wide.ids, strict=True):
        assert (stored is None) == (row is None)
        np.testing.assert_array_equal(stored, row)
    assert (back.gamma, back.dropped) == (0.25, ("smollm2 200 7",))


def test_selecting_and_truncating(six, tokenizer):
    strong = six.select(paraphraser="strong", kind=["watermarked", "unwatermarked"])
    assert strong.bits.shape == (2 * 2 * 3, 36)
    assert set(strong.rows["kind"]) == {"watermarked", "unwatermarked"}
    short = six.truncate(25)
    assert short.bits.shape == (len(six), 25)
    assert (short.rows["length"] == 25).all()
    np.testing.assert_array_equal(short.wrong_bits, six.wrong_bits[:, :25])
    assert all(row is None or len(row) == 26 for row in short.ids)
    texts = strong.texts(tokenizer)
    assert texts[0] == tokenizer.decode(strong.ids[0])
    with pytest.raises(ValueError, match=r"length=50: a text has 36 scored tokens.*truncate to a common T first"):
        six.truncate(50)
    with pytest.raises(ValueError, match="no text with depth=7"):
        six.select(depth=7)
    with pytest.raises(ValueError, match="colour='red': the columns are doc, domain"):
        six.select(colour="red")


def test_no_corpus(tmp_path):
    with pytest.raises(FileNotFoundError, match="labkit build 07"):
        load_corpus(tmp_path)


@dataclass
class Shortening:
    """Cuts one text to its first words from the second round on."""

    index: int
    name: str = "shortening"

    def __call__(self, texts, round, seed, earlier=()):
        return [" ".join(t.split()[:4]) if round > 1 and i == self.index else t for i, t in enumerate(texts)]


def test_a_document_with_one_short_text_goes_in_all_kinds_and_depths(tokenizer):
    model = uniform_model(tokenizer)
    documents = passages("news", 3)
    arguments = (model, tokenizer, documents, Watermark(49152, delta=2.0), 30)
    kept = build_corpus(*arguments, [Shortening(4)], 2, 0, length=20, llm="tiny")
    assert kept.dropped == (f"tiny 20 {documents[1].doc}",)
    assert set(kept.rows["doc"]) == {documents[0].doc, documents[2].doc}
    assert len(kept) == 2 * 3 * 3
    with pytest.raises(ValueError, match="every document has a text of fewer than 200 scored tokens"):
        build_corpus(*arguments, [Shortening(4)], 2, 0)


def test_survival_falls_along_real_chains(shipped):
    survival = shipped.select(length=200).rows.groupby(["llm", "paraphraser", "depth"])["survival"].mean().unstack()
    assert (survival[0] == 1).all()
    assert (survival.diff(axis=1).iloc[:, 1:] < 0.03).all(axis=None)
    assert survival.loc[("smollm2", "strong")].is_monotonic_decreasing


def test_real_chains_lose_z_as_they_lose_bigrams(shipped):
    """E z_d / E z_0 tracks the survival of the original bigrams, both over what the same chain shows without a watermark."""
    for paraphraser in ("wordnet", "mt+wordnet", "strong"):
        texts = shipped.select(llm="smollm2", paraphraser=paraphraser)
        rows = texts.rows.assign(z=z_score(texts.bits, texts.gamma))
        z = rows.groupby(["kind", "depth"])["z"].mean()
        excess = z["watermarked"] - z["unwatermarked"]
        survival = rows.query("kind == 'watermarked'").groupby("depth")["survival"].mean()
        assert (excess / excess[0] - survival).abs().max() < 0.08


def test_the_strong_chain_still_falls_after_its_fourth_round(shipped):
    texts = shipped.select(llm="smollm2", paraphraser="strong", kind="watermarked")
    z = pd.Series(z_score(texts.bits, texts.gamma)).groupby(texts.rows["depth"]).mean()
    assert z[8] < 0.8 * z[4] < 0.8 * z[2]


def test_the_shipped_corpus_is_small_and_complete(shipped):
    size = sum((corpus_module.DATA / name).stat().st_size for name in ("corpus.npz", "rows.csv.gz"))
    assert size < 3_000_000
    main = shipped.select(llm="smollm2", length=200).rows
    assert main["doc"].nunique() >= 120
    assert (main.groupby(["paraphraser", "doc"]).size() == 27).all()

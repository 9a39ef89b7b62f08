import bz2
import csv
import html
import io
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from labkit import assets, corpora
from labkit.corpora import MIN_PARAGRAPH, documents, windows
from labkit.errors import MissingAsset


@pytest.fixture(scope="module")
def tokenizer():
    """One token per letter."""
    letters = Tokenizer(WordLevel({letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz")}, unk_token="?"))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters)


TEXTS = ["abcdefghij", "klm", "nopqrstu"]


def test_windows_tile_each_document_and_never_cross_into_the_next(tokenizer):
    cut = windows(tokenizer, TEXTS, 4)
    assert cut.dtype == torch.long
    assert ["".join(tokenizer.convert_ids_to_tokens(row)) for row in cut] == ["abcd", "efgh", "nopq", "rstu"]


def test_fewer_windows_are_spread_evenly(tokenizer):
    everything = windows(tokenizer, ["abcdefghijklmnopqrst"], 2)
    assert torch.equal(windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 4), everything[[0, 3, 6, 9]])
    assert torch.equal(windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 10), everything)
    assert torch.equal(windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 1), everything[:1])


def test_drawn_windows_are_distinct_and_follow_the_seed(tokenizer):
    everything = windows(tokenizer, ["abcdefghijklmnopqrst"], 2).tolist()
    drawn = windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 6, seed=0).tolist()
    assert all(row in everything for row in drawn)
    assert len({tuple(row) for row in drawn}) == 6
    assert drawn == windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 6, seed=0).tolist()
    assert drawn != windows(tokenizer, ["abcdefghijklmnopqrst"], 2, 6, seed=1).tolist()


@pytest.mark.parametrize(
    ("texts", "length", "count", "message"),
    [
        (TEXTS, 11, None, "length=11 asked for, but the 3 texts hold 0 .the longest has 10 tokens"),
        (TEXTS, 4, 5, "count=5 windows of length=4 asked for, but the 3 texts hold 4"),
        (TEXTS, 4, 0, "count=0: ask for at least 1 window"),
        ([], 4, None, "the 0 texts hold 0"),
        (TEXTS, 1, None, "length=1: a window needs at least 2 tokens"),
    ],
)
def test_a_corpus_that_is_too_short_says_what_it_holds(tokenizer, texts, length, count, message):
    with pytest.raises(ValueError, match=message):
        windows(tokenizer, texts, length, count)


def test_wikipedia_is_clean_prose_split_by_article():
    splits = {split: documents("wiki", split) for split in ("train", "validation", "test")}
    total = sum(map(len, splits.values()))
    assert total == 96
    assert [len(articles) for articles in splits.values()] == [67, 10, 19]
    everything = [article for articles in splits.values() for article in articles]
    assert len(set(everything)) == total
    for article in everything:
        assert not any(mark in article for mark in ("[[", "]]", "{{", "'''", "<ref"))
        assert all(len(paragraph) > 0.8 * MIN_PARAGRAPH for paragraph in article.split("\n\n"))  # counted with quote marks
    assert splits["train"][0].startswith("Anarchism")
    assert documents("wiki") == splits["train"]


def test_what_a_caller_does_to_a_list_stays_with_the_caller():
    documents("wiki", "test").clear()
    assert documents("wiki", "test")


@pytest.fixture
def news(tmp_path, monkeypatch):
    """A news archive of ten long articles and one short one."""
    table = io.StringIO()
    writer = csv.DictWriter(table, ["id", "text"])
    writer.writeheader()
    writer.writerows({"id": i, "text": f"{i} “quoted”, and so on. " * 20} for i in range(10))
    writer.writerow({"id": 10, "text": "too short"})
    with zipfile.ZipFile(tmp_path / "news.zip", "w") as archive:
        archive.writestr("NewsArticles.csv", table.getvalue())
    monkeypatch.setattr(assets, "path", {"news": tmp_path / "news.zip"}.__getitem__)
    corpora._news.cache_clear()
    yield
    corpora._news.cache_clear()


def test_news_are_split_seven_one_two(news):
    splits = {split: documents("news", split) for split in ("train", "validation", "test")}
    assert [[int(text[0]) for text in texts] for texts in splits.values()] == [list(range(7)), [7], [8, 9]]


PROSE = "The sun is a [[star|nearby star]], about '''150 million km''' away.{{cite|x}}<ref>A book</ref> " * 5
PAGE = "<page><title>{}</title><ns>{}</ns><id>{}</id><revision><id>1</id><text>{}</text></revision></page>"


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """A Wikipedia dump of an article, an article of short lines only, and a talk page."""
    article = f"{PROSE}\n\n== Heading ==\n* a list item\n\n{PROSE}\n"
    pages = [("Sun", 0, 1, article), ("List", 0, 2, "* one\n* two\n" * 200), ("Talk:Sun", 1, 3, article)]
    body = "".join(PAGE.format(*map(html.escape, map(str, page))) for page in pages)
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{body}</mediawiki>'
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(xml.encode()))
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path))
    monkeypatch.setattr(assets, "path", {"wikipedia": tmp_path / "dump.xml.bz2"}.__getitem__)
    return tmp_path / "dump.xml.bz2"


def test_articles_are_their_long_paragraphs_without_markup(dump, tmp_path):
    corpora._remove_markup(dump, tmp_path / "clean.json")
    (article,) = json.loads((tmp_path / "clean.json").read_text(encoding="utf-8"))
    paragraph = " ".join(["The sun is a nearby star, about 150 million km away."] * 5)
    assert article == f"{paragraph}\n\n{paragraph}"


def test_markup_is_removed_once(dump, tmp_path, monkeypatch):
    started = []

    def run(command, **_options):
        started.append(command)
        corpora._remove_markup(*map(Path, command[-2:]))

    monkeypatch.setattr(subprocess, "run", run)
    read = corpora._wiki.__wrapped__
    assert read() == read()
    assert [str(dump) in command for command in started] == [True]


def test_a_missing_corpus_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise MissingAsset(f"asset {name!r}: labkit assets fetch {name}")

    monkeypatch.setattr(assets, "path", missing)
    corpora._news.cache_clear()
    with pytest.raises(MissingAsset, match="labkit assets fetch news"):
        documents("news")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("books", "train"), r"domain='books': expected one of \['news', 'wiki'\]"),
        (("wiki", "dev"), r"split='dev': expected one of \['test', 'train', 'validation'\]"),
    ],
)
def test_unknown_domains_and_splits_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        documents(*arguments)

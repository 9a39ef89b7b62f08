import pytest

from labkit.watermark.prose import DOMAINS, Passage, passages, plain

TAGGED = """

	The/at jury/nn said/vbd ,/, ``/`` no/at evidence/nn ''/'' that/cs any/dti (/( or/cc few/ap )/) took/vbd place/nn ./.

	Who/wps knows/vbz ?/. ?/.
1/4''/nn rod/nn ;/. ;/.
"""


def test_tags_go_and_punctuation_moves_to_its_word():
    assert plain(TAGGED) == "The jury said, \"no evidence\" that any (or few) took place. Who knows? 1/4'' rod;"


@pytest.mark.parametrize(("domain", "count"), [("news", 88), ("fiction", 117), ("learned", 128)])
def test_domains_are_groups_of_categories(domain, count):
    documents = passages(domain)
    assert len({p.doc for p in documents}) == count
    assert all(p.domain == domain and p.span == (0, len(p.text)) and len(p.text) > 9000 for p in documents)
    assert not any(mark in p.text for p in documents for mark in ("``", " ''", "/at", "\n", "  "))


def test_domains_share_no_document_and_skipping_gives_the_rest():
    documents = {p.doc for domain in DOMAINS for p in passages(domain)}
    assert len(documents) == 88 + 117 + 128
    first, second = passages("news", 40), passages("news", 48, skip=40)
    assert {p.doc for p in first} | {p.doc for p in second} == {p.doc for p in passages("news")}
    assert not {p.doc for p in first} & {p.doc for p in second}


def test_the_seed_draws_the_order():
    assert passages("news", 5) == passages("news", 5)
    assert [p.doc for p in passages("news", 20)] != [p.doc for p in passages("news", 20, seed=1)]


def test_a_cut_knows_its_place_in_the_document():
    document = passages("fiction", 1)[0]
    piece = document.cut(10, 500).cut(7, 60).stripped()
    assert document.text[slice(*piece.span)] == piece.text == document.text[17:70].strip()
    assert Passage(1, "news", "  a b ", (10, 16)).stripped() == Passage(1, "news", "a b", (12, 15))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domain": "poetry"}, r"domain='poetry': expected one of \['fiction', 'learned', 'news'\]"),
        ({"domain": "news", "count": 0}, "count=0: expected an int >= 1"),
        ({"domain": "news", "count": 80, "skip": 9}, "count=80 after skip=9: news has 88 documents"),
        ({"domain": "news", "skip": -1}, "skip=-1: expected an int >= 0"),
    ],
)
def test_bad_requests_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        passages(**arguments)

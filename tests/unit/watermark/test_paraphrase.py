import re
from dataclasses import dataclass

import numpy as np
import pytest

from labkit.watermark.generate import encode
from labkit.watermark.paraphrase import (
    DEBIAN_PACKAGES,
    PARAPHRASERS,
    LLMParaphraser,
    MachineTranslation,
    MTWordNet,
    Strong,
    WordNet,
    chain,
    round_trip,
    survival,
    tidied,
)
from labkit.watermark.prose import passages

TEXTS = [
    'The old man walked quickly to the big house; "it began to rain", he said. Dogs ran around an ancient tree.',
    "A large number of people asked questions about the new plan (in 1961), and the answer was given slowly.",
]
RULES = [WordNet(), MachineTranslation(), MTWordNet(), Strong()]


@pytest.fixture(scope="module")
def prose():
    """The first 1100 characters of six documents of the Brown corpus."""
    return [p.text[:1100] for domain in ("news", "fiction", "learned") for p in passages(domain, 2)]


def words(text):
    return set(re.findall("[a-z]+", text.lower()))


def test_survival_counts_bigrams_as_often_as_both_have_them():
    assert survival([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert survival([1, 2, 3, 4], [4, 3, 2, 1]) == 0
    assert survival([1, 2, 1, 2, 1], [5, 1, 2, 1, 7]) == 0.5  # bigrams 12, 21, 12, 21; one of each is left
    assert survival([1, 2, 3], [9, 2, 3, 1, 2]) == 1  # order apart
    with pytest.raises(ValueError, match="original has 1 tokens: need at least 2"):
        survival([1], [1, 2])


def test_one_swapped_token_costs_two_bigrams():
    original = list(range(50))
    assert survival(original, [*original[:20], 99, *original[21:]]) == 47 / 49


@pytest.mark.parametrize("paraphraser", RULES, ids=lambda p: p.name)
def test_a_chain_starts_with_the_texts_and_is_repeatable(paraphraser):
    depths = chain(TEXTS, paraphraser, 2, seed=0)
    assert len(depths) == 3
    assert depths[0] == TEXTS
    assert all(new != old for new, old in zip(depths[1], TEXTS, strict=True))
    assert depths == chain(TEXTS, paraphraser, 2, seed=0)


@pytest.mark.parametrize("returning", [True, False])
def test_a_text_gets_the_same_synonyms_alone_as_in_company(returning):
    """Not so in translation: Apertium reads the sentences of one call as one text."""
    paraphraser = WordNet(returning=returning)
    together = chain(TEXTS, paraphraser, 3, seed=3)
    alone = [chain([text], paraphraser, 3, seed=3) for text in TEXTS]
    assert together == [[texts[0] for texts in depth] for depth in zip(*alone, strict=True)]


def test_swapping_keeps_everything_but_the_words():
    assert WordNet(q=0)(TEXTS, 1, 0) == TEXTS
    swapped = WordNet(q=1)(TEXTS, 1, 0)
    for old, new in zip(TEXTS, swapped, strict=True):
        assert re.sub("[A-Za-z]+", "", old) == re.sub("[A-Za-z]+", "", new)
        assert len(re.findall("[A-Za-z]+", old)) == len(re.findall("[A-Za-z]+", new))
        assert words(new) >= words(old) & {"the", "of", "and", "was", "about", "he", "to"}


def test_the_share_of_swapped_words_is_q(prose):
    """Among the words that q = 1 swaps, within four standard errors."""
    tokens = [re.findall("[A-Za-z]+", text) for text in prose]

    def swapped(q):
        new = [re.findall("[A-Za-z]+", text) for text in WordNet(q)(prose, 1, 0)]
        return sum(a != b for old, row in zip(tokens, new, strict=True) for a, b in zip(old, row, strict=True) if b not in "an")

    eligible = swapped(1)
    assert eligible > 200
    assert abs(swapped(0.3) / eligible - 0.3) < 4 * np.sqrt(0.3 * 0.7 / eligible)


def test_articles_follow_the_new_word():
    for seed in range(30):
        (new,) = WordNet(q=1)(["He gave an answer to a question and bought a car."], 1, seed)
        for article, word in re.findall(r"\b(an?) (\w+)", new):
            if word not in ("answer", "question", "car"):
                assert (article == "an") == (word[0] in "aeiou")


def test_a_word_of_the_lineage_never_comes_back(prose):
    depths = chain(prose, WordNet(q=1, top=4, broader=True, returning=False), 5, seed=0)
    for lineage in zip(*depths, strict=True):
        for depth in range(2, 6):
            fresh_words = words(lineage[depth]) - words(lineage[depth - 1])
            assert not fresh_words & set().union(*map(words, lineage[: depth - 1])) - {"a", "an"}


def test_without_that_rule_words_do_come_back(prose):
    depths = chain(prose, WordNet(q=1), 3, seed=0)
    assert any((words(c) - words(b)) & words(a) - {"a", "an"} for a, b, c in zip(*depths[1:], strict=True))


def test_one_pivot_reaches_a_fixed_point(smollm2, prose):
    """Measured in the spec: after one or two rounds nothing more is lost."""
    tokenizer = smollm2[1]
    depths = chain(prose, MachineTranslation(("spa",)), 4, seed=0)
    ids = [[encode(tokenizer, text) for text in depth] for depth in depths]
    last_step = np.mean([survival(a, b) for a, b in zip(ids[3], ids[4], strict=True)])
    assert last_step > 0.95
    assert np.mean([survival(a, b) for a, b in zip(ids[0], ids[1], strict=True)]) < 0.75


def test_the_strong_chain_keeps_losing_where_the_translated_one_stands(smollm2, prose):
    tokenizer = smollm2[1]

    def lost(paraphraser):
        ids = [[encode(tokenizer, text) for text in depth] for depth in chain(prose[::2], paraphraser, 4, seed=0)]
        share = [np.mean([survival(a, b) for a, b in zip(ids[0], depth, strict=True)]) for depth in ids]
        return share[2] - share[4], share[4]

    late_strong, left_strong = lost(Strong())
    late_mt, left_mt = lost(MachineTranslation())
    assert late_strong > late_mt + 0.03
    assert left_strong < left_mt - 0.05


def test_sentences_come_back_one_for_one():
    sentences = ["The house is big.", "He said\n [odd] things & <more>; it cost $5/2 ^ @ ~ {x} \\ ok.", "no full stop", "Yes!"]
    for pivot in ("spa", "cat"):
        back = round_trip(sentences, pivot)
        assert len(back) == 4
        assert all(text and "\n" not in text for text in back)
        assert [text.count("[") for text in back] == [0, 1, 0, 0]


def test_a_sentence_that_apertium_breaks_off_at_stays_as_it_is():
    """Its neighbours are translated all the same."""
    fatal = (
        "Logical analysis is about approaching a problem in a more structured and systematic way, looking for just one step at "
        "a time, and then following that one step, and then the next one, and the next one"
    )
    before, after = "The white house was bought by a rich man.", "The children did not answer the question of the teacher."
    back = round_trip([before, fatal, after], "cat")
    assert len(back) == 3
    assert back[0] != before
    assert back[2] != after
    assert back[1].startswith("Logical analysis is about approaching")
    assert round_trip([fatal], "cat") == [back[1]]


def test_without_apertium_the_packages_are_named_and_synonyms_still_work(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=f"Apertium is not installed: sudo apt install {' '.join(DEBIAN_PACKAGES)}"):
        MachineTranslation()(TEXTS, 1, 0)
    assert WordNet()(TEXTS, 1, 0) != TEXTS


@dataclass
class Broken:
    answer: list
    name: str = "broken"

    def __call__(self, texts, round, seed, earlier=()):
        return texts if round == 1 else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["one"], "broken returned 1 texts of 2 in round 2"),
        (["one", " \n"], "broken returned an empty text at index 1 in round 2"),
    ],
)
def test_a_paraphraser_that_loses_texts_is_caught(answer, message):
    with pytest.raises(RuntimeError, match=message):
        chain(TEXTS, Broken(answer), 2, seed=0)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"texts\[1\] is empty"):
        chain(["one", " "], WordNet(), 1, 0)
    with pytest.raises(ValueError, match="texts is empty"):
        chain([], WordNet(), 1, 0)
    with pytest.raises(TypeError, match=r"texts\[0\] of type int: expected a str"):
        chain([5], WordNet(), 1, 0)
    with pytest.raises(ValueError, match="depth=0: expected an int >= 1"):
        chain(TEXTS, WordNet(), 0, 0)
    with pytest.raises(ValueError, match=r"q=1\.5: expected a probability"):
        WordNet(q=1.5)
    with pytest.raises(ValueError, match=r"q_closed=-0\.1: expected a probability"):
        Strong(q_closed=-0.1)
    with pytest.raises(ValueError, match=r"pivots=\('deu',\): expected some of \['cat', 'spa'\]"):
        MachineTranslation(("deu",))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("The dog was asleep.", "The dog was asleep."),
        ('Rewrite: "The dog was asleep."\nThis means ...', "The dog was asleep."),
        ("", "The dog slept."),
        ("Dog.", "The dog slept."),
        ("The dog slept for a very long time in its kennel.", "The dog slept."),
    ],
)
def test_only_a_rewriting_of_like_length_is_kept(answer, kept):
    assert tidied(answer, "The dog slept.") == kept


def test_a_language_model_rewrites_sentences(smollm2):
    texts = ["The old man walked slowly to the big house. It was raining.", "Nobody knew the answer."]
    new = LLMParaphraser(*smollm2)(texts, 1, 0)
    assert len(new) == 2
    assert new != texts
    assert all(0.5 <= len(b.split()) / len(a.split()) <= 1.7 for a, b in zip(texts, new, strict=True))


def test_paraphrasers_are_known_by_name():
    assert {name: PARAPHRASERS[name]().name for name in ("mt", "wordnet", "mt+wordnet", "strong")} == {
        name: name for name in ("mt", "wordnet", "mt+wordnet", "strong")
    }

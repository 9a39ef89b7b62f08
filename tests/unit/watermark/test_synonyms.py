import pytest

from labkit.watermark.synonyms import CLOSED_STEPS, Reading, inflect, thesaurus


@pytest.mark.parametrize(
    ("lemma", "part", "form", "word"),
    [
        ("dog", "n", "plural", "dogs"),
        ("box", "n", "plural", "boxes"),
        ("city", "n", "plural", "cities"),
        ("day", "n", "plural", "days"),
        ("woman", "n", "plural", "women"),
        ("carry", "v", "third", "carries"),
        ("stop", "v", "past", "stopped"),
        ("hope", "v", "past", "hoped"),
        ("carry", "v", "past", "carried"),
        ("play", "v", "past", "played"),
        ("go", "v", "past", "went"),
        ("go", "v", "participle", "gone"),
        ("undertake", "v", "past", "undertook"),
        ("lie", "v", "gerund", "lying"),
        ("see", "v", "gerund", "seeing"),
        ("run", "v", "gerund", "running"),
        ("write", "v", "gerund", "writing"),
        ("green", "a", "base", "green"),
    ],
)
def test_english_inflection(lemma, part, form, word):
    assert inflect(Reading(lemma, part, form)) == word


@pytest.mark.parametrize(
    ("word", "previous", "reading"),
    [
        ("houses", "the", Reading("house", "n", "plural")),
        ("houses", "she", Reading("house", "v", "third")),
        ("took", "", Reading("take", "v", "past")),
        ("broken", "was", Reading("break", "v", "participle")),
        ("walked", "had", Reading("walk", "v", "participle")),
        ("walked", "he", Reading("walk", "v", "past")),
        ("understood", "", Reading("understand", "v", "past")),
        ("quickly", "", Reading("quickly", "r")),
    ],
)
def test_words_are_taken_apart(word, previous, reading):
    assert thesaurus().read(word, previous) == reading


@pytest.mark.parametrize("word", ["the", "which", "been", "seven", "xyzzy", "of"])
def test_closed_classes_and_unknown_words_have_no_reading(word):
    assert thesaurus().read(word) is None


def alternatives(*reading, top=1, broader=False):
    return {word for sense in thesaurus().alternatives(Reading(*reading), top, broader) for word in sense}


def test_alternatives_share_a_sense_and_keep_the_form():
    assert "autos" in alternatives("car", "n", "plural")
    assert "started" in alternatives("begin", "v", "past", top=4)
    assert "got" not in alternatives("begin", "v", "gerund", top=4)


def test_hypernyms_are_broader_words():
    assert alternatives("house", "n") == set()
    assert alternatives("house", "n", broader=True) >= {"home", "building"}
    assert alternatives("quickly", "r", broader=True) == alternatives("quickly", "r")


def test_a_word_is_no_alternative_of_its_own():
    words = thesaurus()
    for lemma, part in [("house", "n"), ("begin", "v"), ("large", "a"), ("quickly", "r")]:
        senses = words.alternatives(Reading(lemma, part), 4, broader=True)
        assert senses
        assert all(lemma not in sense and len(set(sense)) == len(sense) for sense in senses)


def test_steps_of_the_closed_classes_never_lead_back():
    for start in CLOSED_STEPS:
        seen, word = {start}, CLOSED_STEPS[start]
        while word in CLOSED_STEPS:
            assert word not in seen
            seen.add(word)
            word = CLOSED_STEPS[word]
        assert word != start

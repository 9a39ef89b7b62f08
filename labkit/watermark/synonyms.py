"""Synonyms from WordNet's dictionary files, put into the grammatical form of the word that they replace.

A word form is taken apart by English's regular endings and a table of common irregular forms; an analysis counts only if
putting the form together again gives the same word. Between parts of speech the word before it decides where that is easy, and
otherwise the sense counts of WordNet's own tagged texts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from labkit import assets

WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")

_FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}
_PARTS = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}  # sense keys number the parts of speech
_ENDINGS = {
    ("n", "plural"): ("s", "es", "ies"),
    ("v", "third"): ("s", "es", "ies"),
    ("v", "past"): ("ed", "d", "ied"),
    ("v", "participle"): ("ed", "d", "ied"),
    ("v", "gerund"): ("ing", "ying"),
}
_IRREGULAR_PLURALS = dict(
    pair.split("/")
    for pair in """man/men woman/women child/children foot/feet tooth/teeth mouse/mice goose/geese wife/wives life/lives
    knife/knives leaf/leaves half/halves self/selves shelf/shelves wolf/wolves loaf/loaves thief/thieves calf/calves hero/heroes
    potato/potatoes analysis/analyses basis/bases crisis/crises thesis/theses hypothesis/hypotheses phenomenon/phenomena
    criterion/criteria medium/media datum/data bacterium/bacteria sheep/sheep species/species series/series means/means
    aircraft/aircraft""".split()
)
_IRREGULAR_VERBS = {
    row.split("/")[0]: tuple(row.split("/")[1:])
    for row in """arise/arose/arisen awake/awoke/awoken bear/bore/borne beat/beat/beaten become/became/become begin/began/begun
    bend/bent/bent bind/bound/bound bite/bit/bitten bleed/bled/bled blow/blew/blown break/broke/broken breed/bred/bred
    bring/brought/brought build/built/built burst/burst/burst buy/bought/bought cast/cast/cast catch/caught/caught
    choose/chose/chosen cling/clung/clung come/came/come cost/cost/cost creep/crept/crept cut/cut/cut deal/dealt/dealt
    dig/dug/dug draw/drew/drawn drink/drank/drunk drive/drove/driven eat/ate/eaten fall/fell/fallen feed/fed/fed feel/felt/felt
    fight/fought/fought find/found/found flee/fled/fled fly/flew/flown forbid/forbade/forbidden forget/forgot/forgotten
    forgive/forgave/forgiven freeze/froze/frozen get/got/got give/gave/given go/went/gone grind/ground/ground grow/grew/grown
    hang/hung/hung hear/heard/heard hide/hid/hidden hit/hit/hit hold/held/held hurt/hurt/hurt keep/kept/kept know/knew/known
    lay/laid/laid lead/led/led leave/left/left lend/lent/lent let/let/let lie/lay/lain lose/lost/lost make/made/made
    mean/meant/meant meet/met/met pay/paid/paid put/put/put read/read/read
    ride/rode/ridden ring/rang/rung rise/rose/risen run/ran/run say/said/said see/saw/seen seek/sought/sought sell/sold/sold
    send/sent/sent set/set/set shake/shook/shaken shed/shed/shed shine/shone/shone shoot/shot/shot shrink/shrank/shrunk
    shut/shut/shut sing/sang/sung sink/sank/sunk sit/sat/sat sleep/slept/slept slide/slid/slid speak/spoke/spoken
    spend/spent/spent spin/spun/spun split/split/split spread/spread/spread spring/sprang/sprung stand/stood/stood
    steal/stole/stolen stick/stuck/stuck strike/struck/struck strive/strove/striven swear/swore/sworn sweep/swept/swept
    swim/swam/swum swing/swung/swung take/took/taken teach/taught/taught tear/tore/torn tell/told/told think/thought/thought
    throw/threw/thrown wake/woke/woken wear/wore/worn
    weave/wove/woven win/won/won wind/wound/wound write/wrote/written""".split()
}
_PREFIXES = ("fore", "mis", "out", "over", "re", "un", "under", "up", "with")  # with which an irregular verb stays irregular

# Closed classes, auxiliaries and number words, none of which a synonym can stand in for.
_CLOSED = frozenset(
    """a about above across after again against all almost along already also although always am among an and another any
    anyone anything are around as at away be because been before behind being below beneath beside between beyond both
    but by can could did do does doing done down during each eight either enough even ever every everyone everything far
    few first five for four from further had has have having he hence her here hers herself him himself his how however
    i if in inside instead into is it its itself just last least less like many may me might mine more most much must my
    myself near neither never next nine no nobody none nor not nothing now of off often on once one only onto or other
    others ought our ours ourselves out outside over own per perhaps quite rather same second seven several shall she
    should since six so some someone something still such ten than that the their theirs them themselves then there
    therefore these they third this those though three through throughout thus till to together too toward towards two
    under until up upon us very was we well were what when where whether which while who whom whose why will with within
    without would yes yet you your yours yourself mr mrs dr""".split()
)
# Near equivalents of words of the closed classes [ours]. The steps never lead back.
CLOSED_STEPS = {
    old: new.replace("_", " ")
    for old, new in (
        pair.split("/")
        for pair in """the/this this/that these/those a/one an/one and/plus but/yet yet/however however/nevertheless in/within
        within/inside into/within on/upon upon/over over/above at/near near/beside by/via with/alongside from/out_of
        about/concerning concerning/regarding after/following before/prior_to during/throughout between/among against/versus
        under/beneath beneath/below through/across until/till because/since since/as although/though while/whereas if/provided
        when/whenever which/that who/that is/remains are/remain was/had_been were/had_been not/never will/shall would/might
        can/may may/might could/might must/should should/ought_to also/too very/quite quite/rather many/numerous some/certain
        each/every all/every only/merely just/merely so/thus therefore/thus thus/hence then/afterwards now/currently
        more/further first/earliest he/this_man she/this_woman they/these_people them/these_people him/this_man we/all_of_us
        their/these_people's""".split()
    )
}
_BEFORE_NOUN = frozenset("the a an this that these those his her its their my our your some any no each every".split())
_BEFORE_VERB = frozenset("to will would can could may might must should shall i we they you he she who did does do not".split())
_BEFORE_PARTICIPLE = frozenset("have has had having be been being is are was were am".split())


@dataclass(frozen=True)
class Reading:
    """One way to understand a word form: its dictionary word, part of speech ("n", "v", "a", "r") and grammatical form."""

    lemma: str
    part: str
    form: str = "base"


@dataclass(frozen=True)
class Thesaurus:
    """WordNet as far as synonyms need it.

    Attributes:
        senses: (lemma, part of speech) → its synsets, the most frequent sense first.
        counts: (lemma, part of speech) → occurrences in WordNet's tagged texts.
        members: synset → its single words.
        broader: synset → its hypernyms.
    """

    senses: dict[tuple[str, str], list[str]]
    counts: dict[tuple[str, str], int]
    members: dict[str, list[str]]
    broader: dict[str, list[str]]

    def read(self, word: str, previous: str = "") -> Reading | None:
        """The likeliest reading of a lower-case word form after the word `previous`; None if WordNet cannot replace it."""
        if word in _CLOSED or len(word) < 3:
            return None
        found = list(self._readings(word))
        if previous in _BEFORE_NOUN:
            found = [r for r in found if r.part in "na" or r.form in ("participle", "gerund")] or found
        elif previous in _BEFORE_VERB:
            found = [r for r in found if r.part == "v"] or found
        elif previous in _BEFORE_PARTICIPLE:
            found = [r for r in found if (r.part, r.form) != ("v", "past")] or found
        return max(found, key=lambda r: self.counts[r.lemma, r.part], default=None)

    def alternatives(self, reading: Reading, top: int, broader: bool = False) -> list[list[str]]:
        """Other words for a reading in its form, one list for each of its `top` most frequent senses that has any.

        Words that WordNet's tagged texts never use are left out: they are mostly slang or jargon.

        Args:
            top: senses, at least 1.
            broader: also take the words of the sense's hypernyms, which say less than the original.
        """
        words = []
        for synset in self.senses[reading.lemma, reading.part][:top]:
            near = [synset, *(self.broader[synset] if broader else ())]
            lemmas = dict.fromkeys(word for s in near for word in self.members[s])
            known = [w for w in lemmas if w != reading.lemma and w not in _CLOSED and self.counts.get((w, reading.part))]
            if known:
                words.append([inflect(Reading(lemma, reading.part, reading.form)) for lemma in known])
        return words

    def _readings(self, word: str) -> Iterator[Reading]:
        for part in "nvar":
            if (word, part) in self.senses:
                yield Reading(word, part)
        for (part, form), endings in _ENDINGS.items():
            for lemma in _stems(word, part, form, endings):
                reading = Reading(lemma, part, form)
                if (lemma, part) in self.senses and inflect(reading) == word:
                    yield reading


def inflect(reading: Reading) -> str:
    """Put a dictionary word into a grammatical form."""
    lemma, form = reading.lemma, reading.form
    if form == "base":
        return lemma
    if form == "plural":
        return _IRREGULAR_PLURALS.get(lemma) or _with_s(lemma)
    if form == "third":
        return _with_s(lemma)
    if form == "gerund":
        return lemma[:-2] + "ying" if lemma.endswith("ie") else _stem_before_vowel(lemma) + "ing"
    for prefix in ("", *_PREFIXES):
        if lemma.startswith(prefix) and lemma[len(prefix) :] in _IRREGULAR_VERBS:
            return prefix + _IRREGULAR_VERBS[lemma[len(prefix) :]][form == "participle"]
    return re.sub(r"(?<=[^aeiou])y$", "i", _stem_before_vowel(lemma)) + "ed"


@functools.cache
def thesaurus() -> Thesaurus:
    """Read WordNet's files, once per process."""
    folder = assets.path("wordnet")
    members, broader = {}, {}
    for part, name in _FILES.items():
        for line in (folder / name).read_text(encoding="latin-1").splitlines():
            if not line.startswith(" "):
                fields = line.split(" | ")[0].split()
                key, size = part + fields[0], int(fields[3], 16)
                words = (re.sub(r"\(.*\)$", "", word) for word in fields[4 : 4 + 2 * size : 2])  # adjectives carry "(p)"
                members[key] = [word for word in words if re.fullmatch("[a-z]{3,}", word)]
                pointers = fields[5 + 2 * size :]
                broader[key] = [part + pointers[i + 1] for i, mark in enumerate(pointers) if mark == "@" and part in "nv"]
    ranked, counts = {}, {}
    for line in (folder / "index.sense").read_text(encoding="latin-1").splitlines():
        sense, offset, rank, count = line.split()
        lemma, _, rest = sense.partition("%")
        if re.fullmatch("[a-z]{3,}", lemma):
            part = _PARTS[rest[0]]
            ranked.setdefault((lemma, part), {})[part + offset] = int(rank)
            counts[lemma, part] = counts.get((lemma, part), 0) + int(count)
    senses = {word: sorted(synsets, key=synsets.get) for word, synsets in ranked.items()}
    return Thesaurus(senses, counts, members, broader)


def _stems(word: str, part: str, form: str, endings: tuple[str, ...]) -> Iterator[str]:
    for prefix in ("", *_PREFIXES):
        if word.startswith(prefix):
            yield from (prefix + stem for stem in _irregular_stems().get((word[len(prefix) :], part, form), ()))
    for ending in endings:
        stem = word.removesuffix(ending)
        if stem != word and len(stem) > 1:
            yield stem
            yield stem + "y" if ending.startswith("i") and ending != "ing" else stem + ("ie" if ending == "ying" else "e")
            if stem[-1] == stem[-2]:
                yield stem[:-1]


@functools.cache
def _irregular_stems() -> dict[tuple[str, str, str], list[str]]:
    stems = {}
    for lemma, plural in _IRREGULAR_PLURALS.items():
        stems.setdefault((plural, "n", "plural"), []).append(lemma)
    for lemma, (past, participle) in _IRREGULAR_VERBS.items():
        stems.setdefault((past, "v", "past"), []).append(lemma)
        stems.setdefault((participle, "v", "participle"), []).append(lemma)
    return stems


def _with_s(lemma: str) -> str:
    if re.search(r"[^aeiou]y$", lemma):
        return lemma[:-1] + "ies"
    return lemma + ("es" if re.search(r"(s|x|z|ch|sh)$", lemma) else "s")


def _stem_before_vowel(lemma: str) -> str:
    """Drop a silent e, or double the last consonant of one short syllable, as before -ed and -ing."""
    if re.search(r"[^eoy]e$", lemma):
        return lemma[:-1]
    return lemma + lemma[-1] if re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", lemma) else lemma

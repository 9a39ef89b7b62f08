"""Paraphrasers that do not know the key, and chains of them: P₀ = text, P_r = paraphrase(P_{r−1}) [paper].

A green bit survives a round only if both of its tokens do, so what a paraphraser costs the watermark is the share of bigrams
that it breaks. The rule-based round trip through another language is deterministic and reaches a fixed point after one or two
rounds; synonyms drawn at random go on, but wander back. `Strong` is built to keep going: another pivot for every sentence and
round, and no synonym that the lineage has had [ours].
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from labkit.errors import check_size
from labkit.randomness import frozen, seeded_generator
from labkit.watermark.generate import load
from labkit.watermark.synonyms import CLOSED_STEPS, WORD, thesaurus

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PIVOTS = {"spa": ("eng-spa", "spa-eng"), "cat": ("eng-cat", "cat-eng")}  # Apertium's names of the two directions
DEBIAN_PACKAGES = ("apertium", "apertium-eng-spa", "apertium-eng-cat")


class Paraphraser(Protocol):
    """One round of rewriting."""

    name: str

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        """Rewrite each text.

        Args:
            texts: what the last round left.
            round: 1, 2, …
            seed: of the draws.
            earlier: the texts of the rounds before, oldest first, each as long as `texts`.
        """
        ...


def chain(texts: Sequence[str], paraphraser: Paraphraser, depth: int, seed: int) -> list[list[str]]:
    """Paraphrase again and again.

    Args:
        texts: depth 0.
        depth: rounds, at least 1.
        seed: of all rounds.

    Returns:
        The texts of depth 0 … `depth`.

    Raises:
        ValueError: no text, an empty one, or no round.
        TypeError: a text that is no string.
        RuntimeError: the paraphraser lost a text or returned an empty one.
    """
    check_size("depth", depth, 1)
    if not texts:
        raise ValueError("texts is empty: nothing to paraphrase")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{i}] of type {type(text).__name__}: expected a str")
        if not text.strip():
            raise ValueError(f"texts[{i}] is empty: nothing to paraphrase")
    depths = [list(texts)]
    for round in range(1, depth + 1):
        new = paraphraser(depths[-1], round, seed, depths[:-1])
        if len(new) != len(texts):
            raise RuntimeError(f"{paraphraser.name} returned {len(new)} texts of {len(texts)} in round {round}")
        empty = [i for i, text in enumerate(new) if not text.strip()]
        if empty:
            raise RuntimeError(f"{paraphraser.name} returned an empty text at index {empty[0]} in round {round}")
        depths.append(new)
    return depths


def survival(original: Sequence[int], paraphrased: Sequence[int]) -> float:
    """Share of the original's bigrams of token ids that are still there, each counted as often as it occurs in both."""
    before, after = Counter(pairwise(original)), Counter(pairwise(paraphrased))
    if not before:
        raise ValueError(f"original has {len(original)} tokens: need at least 2 for a bigram")
    return (before & after).total() / before.total()


@dataclass(frozen=True)
class MachineTranslation:
    """Round trip through another language by Apertium's rules; deterministic.

    Attributes:
        pivots: languages taken in turn, round after round: "spa", "cat".
    """

    pivots: tuple[str, ...] = ("spa", "cat")
    name: str = "mt"

    def __post_init__(self):
        _check_pivots(self.pivots)

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        pivot = self.pivots[(round - 1) % len(self.pivots)]
        return _by_sentence(texts, lambda sentences: round_trip(sentences, pivot))


@dataclass(frozen=True)
class WordNet:
    """Content words swapped for synonyms.

    Attributes:
        q: probability that an eligible word is swapped in one round.
        top: a word's most frequent senses, among which one is drawn.
        broader: also take the words of hypernyms.
        returning: allow a word that the lineage has had before.
    """

    q: float = 0.3
    top: int = 2
    broader: bool = False
    returning: bool = True
    name: str = "wordnet"

    def __post_init__(self):
        _check_probability("q", self.q)
        check_size("top", self.top, 1)

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        barred = [set() if self.returning else _vocabulary(versions) for versions in zip(texts, *earlier, strict=True)]
        return [self._swap(text, words, _generator(text, round, seed)) for text, words in zip(texts, barred, strict=True)]

    def _swap(self, text: str, barred: set[str], generator: np.random.Generator) -> str:
        words, gaps = WORD.findall(text), WORD.split(text)
        for i, draw in enumerate(generator.random(len(words))):
            if draw < self.q and (words[i].islower() or _starts_sentence(gaps[i])):
                previous = words[i - 1] if i else ""
                senses = self._options(words[i].lower(), previous.lower(), barred)
                if senses:
                    sense = senses[generator.integers(len(senses))]
                    new = sense[generator.integers(len(sense))]
                    words[i] = _cased(new, words[i])
                    if previous.lower() in ("a", "an"):
                        words[i - 1] = previous[0] + ("n" if new[0] in "aeiou" else "")
        return _join(gaps, words)

    def _options(self, word: str, previous: str, barred: set[str]) -> list[list[str]]:
        reading = thesaurus().read(word, previous)
        if reading is None:
            return []
        senses = thesaurus().alternatives(reading, self.top, self.broader)
        return [kept for sense in senses if (kept := [new for new in sense if new not in barred])]


@dataclass(frozen=True)
class MTWordNet:
    """Round trip through another language, then synonyms."""

    q: float = 0.3
    pivots: tuple[str, ...] = ("spa", "cat")
    name: str = "mt+wordnet"

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        translated = MachineTranslation(self.pivots)(texts, round, seed)
        return WordNet(self.q)(translated, round, seed)


@dataclass(frozen=True)
class Strong:
    """A crude attack that keeps breaking bigrams, at the price of sense [ours].

    Each sentence takes a random pivot or none; content words are swapped, over four senses and their hypernyms, for words that
    the lineage has not had; and words of the closed classes, which no thesaurus lists and which hold the longest-lived bigrams,
    step to a near equivalent.

    Attributes:
        q: probability that an eligible content word is swapped in one round.
        q_closed: the same for words of the closed classes.
        pivots: what a sentence draws from; "" leaves it as it is.
    """

    q: float = 0.4
    q_closed: float = 0.15
    pivots: tuple[str, ...] = ("spa", "cat", "")
    name: str = "strong"

    def __post_init__(self):
        _check_probability("q", self.q)
        _check_probability("q_closed", self.q_closed)
        _check_pivots(self.pivots, ("", *PIVOTS))

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        translated = _by_sentence(texts, lambda sentences: self._translate(sentences, round, seed))
        swap = WordNet(self.q, top=4, broader=True, returning=False)
        swapped = swap(translated, round, seed, [*earlier, texts])
        return [_step(text, self.q_closed, _generator(text, round, seed)) for text in swapped]

    def _translate(self, sentences: list[str], round: int, seed: int) -> list[str]:
        drawn = [self.pivots[_generator(text, round, seed).integers(len(self.pivots))] for text in sentences]
        new = list(sentences)
        for pivot in set(drawn) - {""}:
            chosen = [i for i, name in enumerate(drawn) if name == pivot]
            for i, text in zip(chosen, round_trip([sentences[i] for i in chosen], pivot), strict=True):
                new[i] = text
        return new


def _step(text: str, q: float, generator: np.random.Generator) -> str:
    """Move words of the closed classes, each with probability q, to a near equivalent."""
    words, gaps = WORD.findall(text), WORD.split(text)
    for i, draw in enumerate(generator.random(len(words))):
        if draw < q and words[i].lower() in CLOSED_STEPS:
            words[i] = _cased(CLOSED_STEPS[words[i].lower()], words[i])
    return _join(gaps, words)


@dataclass(frozen=True)
class LLMParaphraser:
    """Sentences rewritten by a language model, whose answer is kept where it is of a sensible length.

    Attributes:
        model, tokenizer: of a model that follows instructions, from `generate.load`.
        temperature, top_p: of its draws [predecessor].
        batch: sentences at once.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    temperature: float = 0.8
    top_p: float = 0.95
    batch: int = 48
    name: str = "llm"

    def __call__(self, texts: list[str], round: int, seed: int, earlier: Sequence[Sequence[str]] = ()) -> list[str]:
        return _by_sentence(texts, lambda sentences: self._rewrite(sentences, round, seed))

    def _rewrite(self, sentences: list[str], round: int, seed: int) -> list[str]:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # so that a batch's answers end together
        new = list(sentences)
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            draws = seeded_generator(seed, f"llm {round} {start}").initial_seed()
            answers = self._answers([sentences[i] for i in chosen], draws)
            for i, answer in zip(chosen, answers, strict=True):
                new[i] = tidied(answer, sentences[i])
        return new

    def _answers(self, sentences: list[str], seed: int) -> list[str]:
        chats = [[{"role": "user", "content": REQUEST.format(sentence)}] for sentence in sentences]
        prompts = [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        inputs = self.tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        longest = max(len(ids) for ids in self.tokenizer(sentences, add_special_tokens=False)["input_ids"])
        with frozen(seed), torch.inference_mode():
            out = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=0,
                max_new_tokens=longest + longest // 2,
            )
        return self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


REQUEST = "Rewrite this sentence in other words, keeping its meaning. Answer with the new sentence only.\n\n{}"


def tidied(answer: str, sentence: str) -> str:
    """The first line of a model's answer without a label or quotation marks.

    The sentence itself stands in where that is no rewriting, that is, has less than half or more than 1.7 times as many words.
    """
    lines = answer.strip().splitlines() or [""]
    new = re.sub(r"^[A-Z][\w ]{0,30}: ?", "", lines[0].strip()).strip(' "')
    ratio = len(new.split()) / len(sentence.split())
    return new if 0.5 <= ratio <= 1.7 else sentence


def round_trip(sentences: Sequence[str], pivot: str) -> list[str]:
    """English → pivot language → English by Apertium, all sentences in one call of each direction.

    Apertium reads them as one text, so that a sentence's translation may hang on the ones before it.

    Args:
        sentences: white space becomes single blanks; a sentence that Apertium cannot take stays as it is.
        pivot: a key of `PIVOTS`.

    Raises:
        RuntimeError: Apertium or a language pair is missing.
    """
    _check_pivots((pivot,))
    if shutil.which("apertium") is None:
        raise RuntimeError(f"Apertium is not installed: sudo apt install {' '.join(DEBIAN_PACKAGES)}")
    blocks = [" ".join(sentence.split()) for sentence in sentences]
    for direction in PIVOTS[pivot]:
        blocks = _translated(blocks, direction)
    return blocks


def _translated(blocks: list[str], direction: str) -> list[str]:
    """Translate lines without line breaks in one call; where a line makes Apertium break off, halve until it stands alone."""
    done = subprocess.run(
        ["apertium", "-u", direction], input="\n\n".join(blocks), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise RuntimeError(f"apertium {direction} failed: {reason} It needs the Debian packages {' '.join(DEBIAN_PACKAGES)}")
    new = [" ".join(block.split()) for block in done.stdout.strip("\n").split("\n\n")]
    if len(new) == len(blocks) and all(new):
        return new
    if len(blocks) <= 1:
        return blocks
    half = len(blocks) // 2
    return _translated(blocks[:half], direction) + _translated(blocks[half:], direction)


def _by_sentence(texts: Sequence[str], rewrite: Callable[[list[str]], list[str]]) -> list[str]:
    """Rewrite the sentences of all texts in one call."""
    parts = [_SENTENCE_END.split(" ".join(text.split())) for text in texts]
    new = iter(rewrite([sentence for sentences in parts for sentence in sentences]))
    return [" ".join(next(new) for _ in sentences) for sentences in parts]


_SENTENCE_END = re.compile(r"(?<=[.!?])[ ]+(?=[\"'(A-Z])")


def _join(gaps: Sequence[str], words: Sequence[str]) -> str:
    """Put words back between the gaps that `WORD.split` left, one more than there are words."""
    return "".join(map(str.__add__, gaps, [*words, ""]))


def _cased(new: str, old: str) -> str:
    return new[0].upper() + new[1:] if old[0].isupper() else new


def _starts_sentence(gap: str) -> bool:
    return not gap or any(mark in gap for mark in ".!?\n")


def _vocabulary(versions: Sequence[str]) -> set[str]:
    return {word.lower() for text in versions for word in WORD.findall(text)}


def _generator(text: str, round: int, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, round, zlib.crc32(text.encode())])


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: expected a probability in [0, 1]")


def _check_pivots(pivots: Sequence[str], allowed: Sequence[str] = tuple(PIVOTS)) -> None:
    if not pivots or not set(pivots) <= set(allowed):
        raise ValueError(f"pivots={tuple(pivots)}: expected some of {sorted(allowed)}")


PARAPHRASERS: dict[str, Callable[[], Paraphraser]] = {
    "mt": MachineTranslation,
    "wordnet": WordNet,
    "mt+wordnet": MTWordNet,
    "strong": Strong,
    "llm": lambda: LLMParaphraser(*load()),
}

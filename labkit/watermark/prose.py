"""Human prose by domain: the Brown corpus of 1961 (Francis & Kučera), 500 texts of about 2000 words.

Three groups of its categories stand in for the corpora of the paper [ours]: news for CNN/DailyMail, fiction for PG-19, and
learned prose and popular lore for WikiText.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit import assets
from labkit.errors import check_size

DOMAINS = {"news": "abc", "fiction": "klmnp", "learned": "jf"}  # Brown's category letters

_OPENING = {"``", "(", "["}
_CLOSING = {"''", ")", "]", ",", ".", ";", ":", "?", "!"}
_WRITTEN = {"``": '"', "''": '"'}


@dataclass(frozen=True)
class Passage:
    """A stretch of one document.

    Attributes:
        doc: the document's place among the 500 texts of the corpus.
        domain: "news", "fiction" or "learned".
        text: the words, on one line.
        span: first and last-plus-one character of `text` in the document.
    """

    doc: int
    domain: str
    text: str
    span: tuple[int, int]

    def cut(self, start: int, stop: int) -> "Passage":
        """Characters start … stop − 1 of this passage."""
        return Passage(self.doc, self.domain, self.text[start:stop], (self.span[0] + start, self.span[0] + stop))

    def stripped(self) -> "Passage":
        """Without the white space around it."""
        start = len(self.text) - len(self.text.lstrip())
        return self.cut(start, start + len(self.text.strip()))


def passages(domain: str, count: int | None = None, *, skip: int = 0, seed: int = 0) -> list[Passage]:
    """Whole documents of one domain in an order drawn by `seed`.

    Args:
        domain: "news" (88 documents), "fiction" (117) or "learned" (128).
        count: documents wanted; None takes the rest.
        skip: documents of that order to leave out at its beginning, so that two sets share none.
        seed: of the order.

    Raises:
        ValueError: an unknown domain, or more documents asked for than there are.
        MissingAsset: the corpus is not in the cache and could not be fetched.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r}: expected one of {sorted(DOMAINS)}")
    check_size("skip", skip, 0)
    folder = assets.path("brown")
    names = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name))
    numbers = [i for i, name in enumerate(names) if name[1] in DOMAINS[domain]]
    if count is not None:
        check_size("count", count, 1)
        if skip + count > len(numbers):
            raise ValueError(f"count={count} after skip={skip}: {domain} has {len(numbers)} documents")
    order = np.random.default_rng(seed).permutation(numbers)[skip:][:count]
    texts = {doc: plain((folder / names[doc]).read_text(encoding="latin-1")) for doc in order.tolist()}
    return [Passage(doc, domain, text, (0, len(text))) for doc, text in texts.items()]


def plain(tagged: str) -> str:
    """Running text, on one line, of `word/tag word/tag …`.

    Quotation marks become plain ones (two strokes within a word, which are inches, stay), punctuation moves to the word it
    belongs to, and the corpus's doubled sentence ends ("?/. ?/.") are written once.
    """
    return "".join(_spaced([token.rpartition("/")[0] for token in tagged.split()]))


def _spaced(words: Sequence[str]) -> Iterator[str]:
    glued, last = True, ""
    for word in words:
        if word == last and word in {";", "?", "!"}:
            continue
        if not glued and word not in _CLOSING:
            yield " "
        yield _WRITTEN.get(word, word)
        glued, last = word in _OPENING, word

"""Real prose by domain, split by document, and cut into windows of token ids.

Two domains. "wiki": about a hundred full English Wikipedia articles (the sample that gensim carries; CC BY-SA), a stand-in for
WikiText. "news": some 3 800 news articles of 2016-2017 (an optional asset, tokens of a different register, with the encoding
scars of real scraped text). Documents, never windows, are split into train, validation and test.
"""

import bz2
import csv
import functools
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from labkit import assets
from labkit.atomic import replacing

MIN_PARAGRAPH = 250  # characters; shorter paragraphs of an article are headings, captions and list items


def documents(domain: str = "wiki", split: str = "train") -> list[str]:
    """Return the documents of one split, in the corpus's own order.

    Args:
        domain: "wiki" or "news".
        split: "train" (the first 70 % of the documents), "validation" (the next 10 %) or "test" (the rest).
    """
    if domain not in _READERS:
        raise ValueError(f"domain={domain!r}: expected one of {sorted(_READERS)}")
    bounds = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
    if split not in bounds:
        raise ValueError(f"split={split!r}: expected one of {sorted(bounds)}")
    texts = _READERS[domain]()
    start, stop = (round(share * len(texts)) for share in bounds[split])
    return list(texts[start:stop])


def windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    length: int = 128,
    count: int | None = None,
    *,
    seed: int | None = None,
) -> torch.Tensor:
    """Cut documents into non-overlapping windows of token ids; a window never crosses from one document to the next.

    Args:
        length: tokens per window, at least 2 (one to predict from, one to predict).
        count: windows wanted; None takes all. With `seed=None` they are spread evenly over the whole corpus, otherwise drawn
            without replacement.

    Returns:
        LongTensor of shape (count, length).
    """
    if length < 2:
        raise ValueError(f"length={length}: a window needs at least 2 tokens, one to predict from and one to predict")
    if count is not None and count < 1:
        raise ValueError(f"count={count}: ask for at least 1 window, or None for all")
    encoded = [_encode(tokenizer, text) for text in texts]
    cut = [ids[i : i + length] for ids in encoded for i in range(0, len(ids) - length + 1, length)]
    count = len(cut) if count is None else count
    if not cut or count > len(cut):
        longest = max(map(len, encoded), default=0)
        raise ValueError(
            f"count={count} windows of length={length} asked for, but the {len(texts)} texts hold {len(cut)} "
            f"(the longest has {longest} tokens)"
        )
    if seed is None:
        chosen = torch.linspace(0, len(cut) - 1, count).round().long()
    else:
        chosen = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([cut[i] for i in chosen]).long()  # (B, T)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids of one document, kept at four bytes each: a corpus has millions."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)


@functools.cache
def _wiki() -> tuple[str, ...]:
    """Articles without markup. Removing it takes seconds and memory, so that is done once, in a child process."""
    dump = assets.path("wikipedia")
    clean = assets.cache_root() / "prepared" / f"{dump.name.removesuffix('.bz2')}.json"
    if not clean.is_file():
        subprocess.run([sys.executable, "-m", "labkit.corpora", str(dump), str(clean)], check=True)
    return tuple(json.loads(clean.read_text(encoding="utf-8")))


def _remove_markup(source: Path, target: Path) -> None:
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki  # heavy, and only this child process needs it

    articles = []
    with bz2.open(source) as dump:
        for _title, markup, _page in extract_pages(dump, filter_namespaces=("0",)):
            lines = (" ".join(line.split()) for line in filter_wiki(markup).split("\n"))
            paragraphs = [re.sub("'{2,}", "", line) for line in lines if len(line) > MIN_PARAGRAPH]
            if paragraphs:
                articles.append("\n\n".join(paragraphs))
    with replacing(target) as partial:
        partial.write_text(json.dumps(articles), encoding="utf-8")


@functools.cache
def _news() -> tuple[str, ...]:
    with zipfile.ZipFile(assets.path("news")) as archive, archive.open("NewsArticles.csv") as raw:
        rows = csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8"))
        return tuple(row["text"] for row in rows if len(row["text"]) > MIN_PARAGRAPH)


_READERS = {"wiki": _wiki, "news": _news}


if __name__ == "__main__":
    _remove_markup(Path(sys.argv[1]), Path(sys.argv[2]))

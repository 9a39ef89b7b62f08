"""Paraphrase lineages of texts as arrays of green bits, with the table that says which is which.

Each document gives three texts of equal length: what the model wrote after the document's first tokens with and without a
watermark, and what its human author wrote there. All three go through the same chain of paraphrases. Bits are read from the
texts as they would be received, by the tokenizer of the model under suspicion, and cut to one number of scored tokens: a
document of which any text falls short is left out altogether.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit.atomic import replacing
from labkit.errors import check_size
from labkit.parts import once, write_table
from labkit.watermark.scheme import GreenBits, Watermark
from labkit.watermark.scores import fresh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from labkit.watermark.paraphrase import Paraphraser
    from labkit.watermark.prose import Passage

DATA = Path(__file__).with_name("data")
KINDS = ("watermarked", "unwatermarked", "human")
WRONG_KEY = 7919


@dataclass(frozen=True)
class Corpus:
    """Texts at every depth of their lineages.

    Attributes:
        rows: one row per text: doc, domain, llm (whose prompts and tokenizer), kind, label (1 is watermarked), paraphraser,
            depth, survival (share of the depth-0 bigrams of scored tokens that the text still has), length (scored tokens),
            start and stop (characters of its document, for human texts of depth 0; else −1).
        bits: green bits, uint8 (n, T), T the largest length; zeros follow where a text is shorter.
        wrong_bits: the same with `WRONG_KEY`.
        fresh: 1 where a bigram stands for the first time in its text.
        ids: token ids (length + 1,) of each text; None for human ones, which are not passed on.
        gamma: green fraction.
        dropped: documents that were left out because a text of theirs fell short, as "llm length doc".
    """

    rows: pd.DataFrame
    bits: np.ndarray
    wrong_bits: np.ndarray
    fresh: np.ndarray
    ids: list[np.ndarray | None]
    gamma: float = 0.25
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, **equal: Any) -> Corpus:
        """Texts whose columns have the given values; a list or an array allows any of its entries.

        Raises:
            ValueError: no such column, or no such text.
        """
        mask = np.ones(len(self), dtype=bool)
        for column, value in equal.items():
            if column not in self.rows:
                raise ValueError(f"{column}={value!r}: the columns are {', '.join(self.rows)}")
            mask &= self.rows[column].isin(np.atleast_1d(value)).to_numpy()
        if not mask.any():
            raise ValueError(f"no text with {', '.join(f'{column}={value!r}' for column, value in equal.items())}")
        chosen = np.flatnonzero(mask)
        rows = self.rows.iloc[chosen].reset_index(drop=True)
        longest = rows["length"].max()
        arrays = (array[chosen, :longest] for array in (self.bits, self.wrong_bits, self.fresh))
        return Corpus(rows, *arrays, [self.ids[i] for i in chosen], self.gamma, self.dropped)

    def truncate(self, length: int) -> Corpus:
        """Every text cut to the same number of scored tokens; `survival` stays that of the whole text.

        Raises:
            ValueError: a text is shorter.
        """
        check_size("length", length, 1)
        shortest = self.rows["length"].min()
        if length > shortest:
            raise ValueError(
                f"length={length}: a text has {shortest} scored tokens; select(...) or truncate to a common T first"
            )
        arrays = (array[:, :length] for array in (self.bits, self.wrong_bits, self.fresh))
        ids = [None if row is None else row[: length + 1] for row in self.ids]
        return Corpus(self.rows.assign(length=length), *arrays, ids, self.gamma, self.dropped)

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
        """The scored part of every text; None for human ones."""
        return [None if row is None else tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in self.ids]

    def save(self, folder: Path) -> None:
        """Write `corpus.npz` and `rows.csv.gz`."""
        counts = [0 if row is None else len(row) for row in self.ids]
        flat = np.concatenate([row for row in self.ids if row is not None] or [np.empty(0, dtype=np.int64)])
        with replacing(Path(folder) / "corpus.npz") as partial:
            np.savez_compressed(
                partial,
                **{name: np.packbits(getattr(self, name), axis=1) for name in ("bits", "wrong_bits", "fresh")},
                width=self.bits.shape[1],
                counts=np.array(counts, dtype=np.uint16),
                low=(flat & 0xFFFF).astype(np.uint16),
                high=(flat >> 16).astype(np.uint8),  # zeros for a vocabulary below 65536
                gamma=self.gamma,
                dropped=np.array(self.dropped, dtype=np.str_),
            )
        with replacing(Path(folder) / "rows.csv.gz") as partial:
            write_table(self.rows, partial)


def load_corpus(folder: Path = DATA) -> Corpus:
    """Read what `Corpus.save` wrote; without a folder, the corpus that comes with the lab.

    Raises:
        FileNotFoundError: no corpus there.
    """
    if not (Path(folder) / "corpus.npz").is_file():
        raise FileNotFoundError(f"{folder} holds no corpus of lab 07: run  labkit build 07")
    rows = pd.read_csv(Path(folder) / "rows.csv.gz")
    with np.load(Path(folder) / "corpus.npz") as stored:
        width = int(stored["width"])
        bits = (np.unpackbits(stored[name], axis=1, count=width) for name in ("bits", "wrong_bits", "fresh"))
        flat = stored["low"].astype(np.int64) | stored["high"].astype(np.int64) << 16
        counts = stored["counts"]
        ids = [part if len(part) else None for part in np.split(flat, np.cumsum(counts)[:-1])]
        return Corpus(rows, *bits, ids, float(stored["gamma"]), tuple(stored["dropped"].tolist()))


@dataclass(frozen=True)
class Chain:
    """One paraphraser's lineages.

    Attributes:
        paraphraser: a key of `paraphrase.PARAPHRASERS`.
        depth: rounds.
        length: scored tokens kept of each text.
        documents: of each domain; None takes all of the source's.
        n_tokens: tokens of a text that enter the chain; None takes them all.
    """

    paraphraser: str
    depth: int = 8
    length: int = 200
    documents: int | None = None
    n_tokens: int | None = None


@dataclass(frozen=True)
class Source:
    """One language model's texts and what becomes of them.

    Attributes:
        llm: what `generate.load` takes.
        documents: of each domain.
        skip: documents of each domain that are left to other sources.
        name: what the table calls the model; None takes `llm`.
        chains: what the texts go through.
        n_prompt: tokens of a document that the model reads.
        n_tokens: tokens that it writes.
        delta: bias of the watermark, after temperature.
        temperature, top_p, repetition_penalty, no_repeat_ngram_size: as in `generate.generate`.
    """

    llm: str
    documents: int
    skip: int
    chains: tuple[Chain, ...]
    name: str | None = None
    n_prompt: int = 24
    n_tokens: int = 256
    delta: float = 2.0
    temperature: float = 0.7
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    @property
    def title(self) -> str:
        """Name in the table and in the names of the parts."""
        return self.name or self.llm


@dataclass(frozen=True)
class Recipe:
    """Sizes of a corpus. Everything in it follows from these, the models, the prose, Apertium and WordNet."""

    sources: tuple[Source, ...] = (
        Source("smollm2", 42, 0, (Chain("wordnet"), Chain("mt+wordnet"), Chain("strong"))),
        Source("gemma3-270m", 14, 42, (Chain("mt+wordnet", length=100), Chain("strong", length=100)), n_tokens=150),
    )
    domains: tuple[str, ...] = ("news", "fiction", "learned")
    gamma: float = 0.25
    seed: int = 0


FAST = Recipe((Source("smollm2", 2, 0, (Chain("wordnet", length=100), Chain("strong", length=100)), n_tokens=130),))


def build_parts(out: Path, recipe: Recipe | None = None) -> Corpus:
    """Write and paraphrase the corpus into a folder, going on where an interrupted run stopped (`out/parts`).

    Args:
        out: gets `corpus.npz` and `rows.csv.gz`.
        recipe: None is the lab's own.

    Raises:
        RuntimeError: Apertium is missing, or a paraphraser lost a text.
    """
    from labkit.watermark.generate import load_tokenizer

    recipe, out = recipe or Recipe(), Path(out)
    pieces = []
    for source in recipe.sources:
        tokenizer = load_tokenizer(source.llm)
        reader = _Reader(tokenizer, recipe.gamma)
        texts = {domain: _written(source, domain, recipe, out / "parts") for domain in recipe.domains}
        for link in source.chains:
            for domain in recipe.domains:
                chosen = _shortened(texts[domain], tokenizer, link)
                lineages = _chained(chosen, source, link, domain, recipe.seed, out / "parts")
                pieces.append(reader.read(chosen, lineages, link.length, llm=source.title, paraphraser=link.paraphraser))
    corpus = _joined(pieces, recipe.gamma)
    corpus.save(out)
    return corpus


def build_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Passage],
    watermark: Watermark,
    n_tokens: int,
    paraphrasers: Sequence[Paraphraser],
    depth: int,
    seed: int,
    *,
    length: int = 200,
    n_prompt: int = 24,
    llm: str = "",
) -> Corpus:
    """Write, paraphrase and read a small corpus in memory.

    Args:
        passages: documents of at least `n_prompt + n_tokens` tokens.
        watermark: of the watermarked third.
        n_tokens: tokens written per text.
        paraphrasers: each starts a chain from the same texts.
        depth: rounds.
        seed: of the texts and of all rounds.
        length: scored tokens kept, fewer than `n_tokens`.
        llm: name of the model in the table.

    Raises:
        ValueError: a passage is too short, or no document has all its texts of `length` scored tokens.
    """
    from labkit.watermark.paraphrase import chain

    source = Source(llm, len(passages), 0, (), n_prompt=n_prompt, n_tokens=n_tokens)
    texts = pd.concat(
        [_write(model, tokenizer, source, passages, kind, watermark, seed).assign(kind=kind) for kind in KINDS],
        ignore_index=True,
    )
    reader = _Reader(tokenizer, watermark.gamma, watermark)
    pieces = [
        reader.read(texts, chain(texts["text"].tolist(), p, depth, seed), length, llm=llm, paraphraser=p.name)
        for p in paraphrasers
    ]
    return _joined(pieces, watermark.gamma)


def _written(source: Source, domain: str, recipe: Recipe, parts: Path) -> pd.DataFrame:
    """Texts of one domain, from their finished parts or new."""
    from labkit.watermark.generate import load, load_tokenizer
    from labkit.watermark.prose import passages

    whole = functools.cache(lambda: passages(domain, source.documents, skip=source.skip, seed=recipe.seed))
    frames = []
    for kind in KINDS:

        def write(path: Path, kind: str = kind) -> None:
            model, tokenizer = (None, load_tokenizer(source.llm)) if kind == "human" else load(source.llm)
            watermark = Watermark(len(tokenizer), recipe.gamma, source.delta)
            if model is not None and model.config.vocab_size != len(tokenizer):
                raise ValueError(
                    f"llm={source.llm!r}: {model.config.vocab_size} logits, but {len(tokenizer)} tokens to read them"
                )
            table = _write(model, tokenizer, source, whole(), kind, watermark, recipe.seed)
            path.write_text(json.dumps(table.to_dict("records")), encoding="utf-8")

        part = once(parts / f"{source.title}-{domain}-{kind}.json", write)
        frames.append(pd.DataFrame(json.loads(part.read_text(encoding="utf-8"))).assign(kind=kind))
    return pd.concat(frames, ignore_index=True)


def _write(model, tokenizer, source: Source, whole: Sequence[Passage], kind: str, watermark, seed: int) -> pd.DataFrame:
    """One kind of text for each document: doc, domain, text, start, stop."""
    from labkit.randomness import seeded_generator
    from labkit.watermark.generate import decode, generate, split_prompt

    place = {"doc": [passage.doc for passage in whole], "domain": [passage.domain for passage in whole]}
    if kind == "human":
        rest = [split_prompt(tokenizer, passage, source.n_prompt, source.n_tokens)[1].stripped() for passage in whole]
        start, stop = zip(*(passage.span for passage in rest), strict=True)
        return pd.DataFrame(place | {"text": [passage.text for passage in rest], "start": start, "stop": stop})
    ids = generate(
        model,
        tokenizer,
        [passage.text for passage in whole],
        watermark if kind == "watermarked" else None,
        source.n_tokens,
        seeded_generator(seed, f"{source.title} {whole[0].domain} {kind}").initial_seed(),
        n_prompt=source.n_prompt,
        temperature=source.temperature,
        top_p=source.top_p,
        repetition_penalty=source.repetition_penalty,
        no_repeat_ngram_size=source.no_repeat_ngram_size,
    )
    return pd.DataFrame(place | {"text": decode(tokenizer, ids), "start": -1, "stop": -1})


def _shortened(texts: pd.DataFrame, tokenizer, link: Chain) -> pd.DataFrame:
    """The texts that enter a chain, which may be fewer and shorter than those written."""
    docs = texts["doc"].unique()[: link.documents]
    chosen = texts[texts["doc"].isin(docs)].reset_index(drop=True)
    if link.n_tokens is None:
        return chosen
    cut = tokenizer(chosen["text"].tolist(), add_special_tokens=False, truncation=True, max_length=link.n_tokens)["input_ids"]
    return chosen.assign(text=tokenizer.batch_decode(cut, clean_up_tokenization_spaces=False))


def _chained(texts: pd.DataFrame, source: Source, link: Chain, domain: str, seed: int, parts: Path) -> list[list[str]]:
    from labkit.watermark.paraphrase import PARAPHRASERS, chain

    def write(path: Path) -> None:
        lineages = chain(texts["text"].tolist(), PARAPHRASERS[link.paraphraser](), link.depth, seed)
        path.write_text(json.dumps(lineages), encoding="utf-8")

    part = once(parts / f"{source.title}-{domain}-{link.paraphraser}.json", write)
    return json.loads(part.read_text(encoding="utf-8"))


class _Reader:
    """Texts → token ids → bits of the right and of the wrong key."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, gamma: float, watermark: Watermark | None = None):
        watermark = watermark or Watermark(len(tokenizer), gamma)
        self._tokenizer = tokenizer
        self._right = GreenBits(watermark)
        self._wrong = GreenBits(replace(watermark, key=WRONG_KEY))

    def read(self, texts: pd.DataFrame, lineages: list[list[str]], length: int, **names: str) -> Corpus:
        """A corpus of one chain. Texts that are too short keep their true length: `_joined` leaves them out."""
        from labkit.watermark.generate import encode
        from labkit.watermark.paraphrase import survival

        scored = [[encode(self._tokenizer, text)[: length + 1] for text in depth] for depth in lineages]
        ids = [row for depth in scored for row in depth]
        rows = pd.concat([texts.drop(columns="text").assign(depth=depth) for depth in range(len(lineages))], ignore_index=True)
        rows[["start", "stop"]] = rows[["start", "stop"]].where(rows["depth"] == 0, -1)
        rows = rows.assign(
            **names,
            label=(rows["kind"] == "watermarked").astype(int),
            survival=[round(survival(first, row), 4) for depth in scored for first, row in zip(scored[0], depth, strict=True)],
            length=[len(row) - 1 for row in ids],
            wanted=length,
        )
        arrays = (np.stack([_padded(read(row), length) for row in ids]) for read in (self._right, self._wrong, fresh))
        human = rows["kind"] == "human"
        return Corpus(rows, *arrays, [None if hidden else row for hidden, row in zip(human, ids, strict=True)])


def _padded(bits: np.ndarray, length: int) -> np.ndarray:
    return np.pad(bits, (0, length - len(bits)))


_COLUMNS = "doc domain llm kind label paraphraser depth survival length start stop".split()


def _joined(pieces: Iterable[Corpus], gamma: float) -> Corpus:
    """One corpus without the documents of which a text fell short."""
    pieces = list(pieces)
    rows = pd.concat([piece.rows for piece in pieces], ignore_index=True)
    place = rows["llm"] + " " + rows["wanted"].astype(str) + " " + rows["doc"].astype(str)
    short = place[rows["length"] < rows["wanted"]].unique()
    keep = ~place.isin(short)
    if not keep.any():
        raise ValueError(
            f"every document has a text of fewer than {rows['wanted'].min()} scored tokens: write more, or ask for fewer"
        )
    rows = rows[keep].assign(place=place[keep])
    order = rows.sort_values(["llm", "paraphraser", "doc", "kind", "depth"], kind="stable").index  # alike texts side by side
    width = max(piece.bits.shape[1] for piece in pieces)
    arrays = [
        np.concatenate([np.pad(getattr(p, name), ((0, 0), (0, width - p.bits.shape[1]))) for p in pieces])[order]
        for name in ("bits", "wrong_bits", "fresh")
    ]
    ids = [row for piece in pieces for row in piece.ids]
    return Corpus(
        rows.loc[order, _COLUMNS].reset_index(drop=True), *arrays, [ids[i] for i in order], gamma, tuple(sorted(short))
    )

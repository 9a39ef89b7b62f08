"""Which texts a detector may see: chains of paraphrases cut to one length, and the protocols that open part of a chain.

A lineage is one text and its paraphrases, D_0 → D_1 → … → D_8. A protocol names the depths that a detector is given:

    single(d)     D_d                     one text in hand                                    (deployable)
    prefix(d)     D_1 … D_d               the paper's comparison; D_1 is nearly the original   [paper]
    suffix(k)     D_k … D_8               the late texts only                                  [predecessor]
    probe(d, J)   D_d … D_{d+J}           the detector paraphrases D_d itself, J times over    (deployable) [ours]

Static features are those of the first text given. Once D_d is given, what a key-blind paraphraser makes of it does not depend
on the label: no use of `probe` beats the best detector of D_d alone. `prefix` is different: D_1 holds evidence that D_d lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.errors import check_size
from labkit.watermark.features import RELIABLE_LENGTH, local_stats, static_features
from labkit.watermark.scores import winmax, z_of_counts, z_score

if TYPE_CHECKING:
    from labkit.watermark.corpus import Corpus

CHAIN = ("llm", "paraphraser", "kind", "doc")  # columns that name a lineage
MIN_SPAN = 10  # shortest span of WinMax, tokens


def window_preset(length: int) -> tuple[int, int]:
    """Window and stride for texts of so many scored tokens: (25, 5) up to 50, then the predecessor's (50, 10)."""
    return (25, 5) if length <= 50 else (50, 10)


@dataclass(frozen=True)
class Protocol:
    """What a detector is given of each chain; made by `single`, `prefix`, `suffix` and `probe`.

    Attributes:
        name: "single", "prefix", "suffix" or "probe".
        depth: the number in its brackets.
        extra: J of `probe`, else 0.
    """

    name: str
    depth: int
    extra: int = 0

    def depths(self, available: Sequence[int]) -> tuple[int, ...]:
        """The depths given, ascending, of those available.

        Raises:
            ValueError: one is missing, or a lineage of fewer than two texts is left.
        """
        first = {"prefix": 1}.get(self.name, self.depth)
        last = {"suffix": max(available), "probe": self.depth + self.extra}.get(self.name, self.depth)
        wanted = tuple(range(first, last + 1))
        missing = sorted(set(wanted) - set(available))
        if missing:
            raise ValueError(f"{self}: depths {missing} are missing, available are {sorted(available)}")
        if self.name != "single" and len(wanted) < 2:
            raise ValueError(f"{self}: a lineage needs at least 2 texts, got depths {list(wanted)} of {sorted(available)}")
        return wanted

    def text_in_question(self, available: Sequence[int]) -> int:
        """Depth of the text that is to be judged: of a prefix or suffix the last, of a probe the first."""
        return self.depths(available)[0 if self.name == "probe" else -1]

    def __str__(self) -> str:
        return f"{self.name}({self.depth}{f', {self.extra}' if self.extra else ''})"


def single(depth: int) -> Protocol:
    """The text at this depth alone, depth ≥ 0."""
    check_size("depth", depth, 0)
    return Protocol("single", depth)


def prefix(depth: int) -> Protocol:
    """D_1 … D_depth, depth ≥ 2."""
    check_size("depth", depth, 2)
    return Protocol("prefix", depth)


def suffix(depth: int) -> Protocol:
    """D_depth … up to the end of the chain, at least two texts."""
    check_size("depth", depth, 0)
    return Protocol("suffix", depth)


def probe(depth: int, extra: int = 3) -> Protocol:
    """D_depth and `extra` ≥ 1 paraphrases of it, the next rounds of the same chain."""
    check_size("depth", depth, 0)
    check_size("extra", extra, 1)
    return Protocol("probe", depth, extra)


@dataclass(frozen=True, eq=False)
class Lineages:
    """n chains of texts of T scored tokens at D depths, and what detectors read off them, computed once.

    Attributes:
        rows: (n,) table with at least `doc`, `kind` ("watermarked", "unwatermarked" or "human") and `label` (1 or 0).
        bits: (n, D, T) green bits.
        fresh: (n, D, T), 1 at the first occurrence of each bigram.
        depths: of the D texts, ascending.
        gamma, size, stride: green share, window and stride, for all features.
        text: position among the D texts of the one in question.
    """

    rows: pd.DataFrame
    bits: np.ndarray
    fresh: np.ndarray
    depths: tuple[int, ...]
    gamma: float = 0.25
    size: int = 50
    stride: int = 10
    text: int = -1
    _known: dict = field(default_factory=dict, init=False, repr=False)  # shared by all views

    def __post_init__(self):
        if self.bits.ndim != 3 or self.bits.shape[:2] != (len(self.rows), len(self.depths)):
            expected = f"({len(self.rows)}, {len(self.depths)}, T) for the rows and depths"
            raise ValueError(f"bits: got shape {self.bits.shape}, expected {expected}")
        if self.fresh.shape != self.bits.shape:
            raise ValueError(f"fresh: got shape {self.fresh.shape}, expected that of the bits, {self.bits.shape}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """T, scored tokens per text."""
        return self.bits.shape[-1]

    @property
    def reliable(self) -> bool:
        """Whether the texts have the 25 tokens below which no verdict is to be trusted."""
        return self.length >= RELIABLE_LENGTH

    def given(self, protocol: Protocol) -> Lineages:
        """The same chains with only the texts that the protocol opens; what is known of them is kept."""
        if protocol not in self._known:
            self._known[protocol] = self._view(protocol)
        return self._known[protocol]

    def _view(self, protocol: Protocol) -> Lineages:
        depths = protocol.depths(self.depths)
        at = [self.depths.index(depth) for depth in depths]
        text = depths.index(protocol.text_in_question(self.depths))
        view = replace(self, bits=self.bits[:, at], fresh=self.fresh[:, at], depths=depths, text=text)
        object.__setattr__(view, "_known", self._known)
        return view

    def take(self, mask: np.ndarray) -> Lineages:
        """Some of the chains, by a boolean mask (n,)."""
        rows = self.rows[mask].reset_index(drop=True)
        return replace(self, rows=rows, bits=self.bits[mask], fresh=self.fresh[mask])

    @property
    def z(self) -> np.ndarray:
        """(n, D) global z of every text."""
        return self._each("z", lambda bits, _: z_score(bits, self.gamma))

    @property
    def z_unique(self) -> np.ndarray:
        """(n, D), each distinct bigram counted once."""
        return self._each("z_unique", lambda bits, fresh: _z_where(bits, fresh, self.gamma))

    @property
    def winmax(self) -> np.ndarray:
        """(n, D), over spans of at least ten tokens."""
        return self._each("winmax", lambda bits, _: winmax(bits, self.gamma, min_len=min(MIN_SPAN, self.length)))

    @property
    def local_z(self) -> np.ndarray:
        """(n, D, m) local z of every window."""
        return self._each("local_z", lambda bits, _: local_stats(bits, self.gamma, self.size, self.stride).z)

    @property
    def static(self) -> np.ndarray:
        """(n, 21) static features of the first text, in the order of `features.FEATURES`."""
        return self._of("static", 0, self._static)

    def _static(self, bits: np.ndarray, _: np.ndarray) -> np.ndarray:
        return static_features(bits, self.gamma, size=self.size, stride=self.stride).to_numpy()

    def _each(self, name: str, compute: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([self._of(name, k, compute) for k in range(len(self.depths))], axis=1)

    def _of(self, name: str, k: int, compute: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        key = name, self.depths[k]
        if key not in self._known:
            self._known[key] = compute(self.bits[:, k], self.fresh[:, k])
        return self._known[key]


def _z_where(bits: np.ndarray, fresh: np.ndarray, gamma: float) -> np.ndarray:
    """z (n,) of the tokens that count; 0 where none does, as in a text that goes round in a circle."""
    counted = fresh.sum(-1, dtype=int)
    return np.where(counted > 0, z_of_counts((bits & fresh).sum(-1, dtype=int), counted.clip(1), gamma), 0.0)


def segments(
    corpus: Corpus, length: int, *, size: int | None = None, stride: int | None = None, most: int | None = None
) -> Lineages:
    """Cut every text into segments of so many scored tokens, and line up the depths of each chain.

    The i-th segment of a text is matched with the i-th segment of its paraphrases: by place, not by content, which paraphrasing
    shifts. Segments of one document stay together wherever data is split. A bigram is a repeat if it stood earlier in the text,
    be it in another segment.

    Args:
        corpus: rows of any paraphrasers and models, each text at all the depths of the others.
        length: T ≥ 1, scored tokens of a segment.
        size, stride: windows of the features; None is `window_preset`.
        most: limit on the segments per text; None is as many as there are.

    Raises:
        ValueError: a text is shorter than `length`, or a chain lacks a depth.
    """
    check_size("length", length, 1)
    short = corpus.rows["length"].to_numpy() < length
    if short.any() or length > corpus.bits.shape[1]:
        shortest = min(corpus.rows["length"].min(), corpus.bits.shape[1])
        raise ValueError(f"length={length}: {short.sum()} texts are shorter ({shortest} tokens): truncate to a common T first")
    order, rows, depths = _chains(corpus.rows)
    count = int(corpus.rows["length"].min()) // length
    count = count if most is None else min(count, most)

    def cut(bits: np.ndarray) -> np.ndarray:
        chains = bits[order, : count * length].reshape(-1, len(depths), count, length)
        return chains.swapaxes(1, 2).reshape(-1, len(depths), length)

    rows = rows.loc[rows.index.repeat(count)].reset_index(drop=True)
    rows["segment"] = np.tile(np.arange(count), len(rows) // count)
    preset = window_preset(length)
    windows = {"size": size or preset[0], "stride": stride or preset[1]}
    return Lineages(rows, cut(corpus.bits), cut(corpus.fresh), depths, getattr(corpus, "gamma", 0.25), **windows)


def _chains(table: pd.DataFrame) -> tuple[np.ndarray, pd.DataFrame, tuple[int, ...]]:
    """Positions of the texts, chain by chain with depths ascending; one row per chain; and the depths."""
    depths = tuple(sorted(int(depth) for depth in table["depth"].unique()))
    ordered = table.reset_index(drop=True).sort_values([*CHAIN, "depth"], kind="stable")
    found = ordered["depth"].to_numpy()
    if len(found) % len(depths) or (found.reshape(-1, len(depths)) != depths).any():
        sizes = table.groupby(list(CHAIN))["depth"].agg(lambda chain: tuple(sorted(chain)))
        broken = sizes[sizes != depths]
        chain = ", ".join(f"{name} {value}" for name, value in zip(CHAIN, broken.index[0], strict=True))
        raise ValueError(f"corpus: the chain of {chain} has depths {list(broken.iloc[0])}, others have {list(depths)}")
    columns = [name for name in ("doc", "domain", "llm", "kind", "label", "paraphraser") if name in table]
    return ordered.index.to_numpy(), ordered.iloc[:: len(depths)][columns].reset_index(drop=True), depths

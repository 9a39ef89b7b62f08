"""Which tokens are green: the same lists that transformers draws, remembered, so that a text is read by looking them up.

Before token x_t a generator is seeded with s_t = (k · x_{t−1}) mod (2⁶⁴ − 1), k the key, and the green list G_t is the first
⌊γV⌋ entries of a random permutation of the V tokens. Generation adds δ to the logits of G_t; detection asks whether x_t ∈ G_t.
A list depends on the previous token alone ("lefthash"), so it is kept as V bits and costs one permutation per distinct token.

Other schemes: "selfhash" seeds with the pair (x_{t−1}, x_t), so nothing can be remembered and each distinct bigram costs a
permutation; "unigram" has one list for all; SynthID-text draws a bit per layer from hashes of the last tokens. transformers
applies the bias after temperature and top-p: δ here is always "after temperature".

Sources: [KGW] arXiv 2301.10226; transformers' `WatermarkingConfig` and `SynthIDTextWatermarkingConfig` [HF]; unigram as a
configuration, and the cache, are [ours].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import check_size
from labkit.watermark._checks import check_gamma
from labkit.watermark.scores import check_ids

if TYPE_CHECKING:
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

SCHEMES = ("lefthash", "selfhash", "unigram")
_CONTEXT_WIDTH = {"lefthash": 1, "selfhash": 2, "unigram": 1}


@dataclass(frozen=True)
class Watermark:
    """A green-list watermark.

    Attributes:
        vocab_size: V ≥ 4, number of logits of the model.
        gamma: green fraction in (0, 1), with ⌊γV⌋ ≥ 1.
        delta: bias ≥ 0 on green logits, after temperature.
        key: whole number from 1 to 2⁶³ − 1.
        scheme: one of `SCHEMES`.

    Source: defaults of γ and key [KGW][HF], of δ [predecessor]; 2 is the default of [KGW][HF].
    """

    vocab_size: int
    gamma: float = 0.25
    delta: float = 1.5
    key: int = 15485863
    scheme: str = "lefthash"

    def __post_init__(self):
        check_size("vocab_size", self.vocab_size, 4)
        check_gamma(self.gamma)
        if self.green_size == 0:
            raise ValueError(f"gamma={self.gamma}: the green list of vocab_size={self.vocab_size} tokens would be empty")
        if not isinstance(self.delta, Real) or not 0 <= self.delta < math.inf:
            raise ValueError(f"delta={self.delta!r}: expected a finite number >= 0")
        _check_key(self.key)
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r}: expected one of {SCHEMES}")

    @property
    def green_size(self) -> int:
        """⌊γV⌋, tokens on each green list."""
        return int(self.vocab_size * self.gamma)

    def to_hf(self) -> "WatermarkingConfig":
        """The configuration that `generate(watermarking_config=...)` takes."""
        from transformers import WatermarkingConfig  # seconds: reading bits does without

        from labkit.watermark._unigram import UnigramConfig

        config = UnigramConfig if self.scheme == "unigram" else WatermarkingConfig
        return config(
            greenlist_ratio=self.gamma,
            bias=self.delta,
            hashing_key=self.key,
            seeding_scheme="lefthash" if self.scheme == "unigram" else self.scheme,
            context_width=_CONTEXT_WIDTH[self.scheme],
        )


class GreenBits:
    """Detector core: ids → green bits, the green lists of previous tokens kept as packed rows.

    Args:
        wm: the watermark to look for.
        max_rows: how many lists are kept, the least recently used going first; ⌈V / 8⌉ bytes each, taken as they are filled.
    """

    def __init__(self, wm: Watermark, max_rows: int = 20_000):
        from labkit.watermark._lists import GreenLists  # torch, seconds: a Watermark alone does without

        check_size("max_rows", max_rows, 1)
        self.wm = wm
        self._lists = GreenLists(wm)
        self._lock = Lock()
        size = min(max_rows, wm.vocab_size)
        self._rows = np.empty((size, -(-wm.vocab_size // 8)), dtype=np.uint8)
        self._slot = np.full(wm.vocab_size, -1, dtype=np.int32)  # token → row, −1 where it has none
        self._owner = np.full(size, -1, dtype=np.int64)  # row → token
        self._used = np.zeros(size, dtype=np.int64)  # row → time of its last use
        self._time = 0

    def __call__(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Green bits of one text.

        Args:
            ids: token ids (T + 1,), without special tokens.

        Returns:
            uint8 (T,); the first token has no predecessor and is not scored.

        Raises:
            ValueError: fewer than 2 ids, or an id that is not in 0 … V − 1.
            TypeError: ids that are not integers.
        """
        ids = check_ids(ids)
        _check_vocabulary(ids, self.wm.vocab_size)
        previous, current = ids[:-1], ids[1:]
        if self.wm.scheme == "selfhash":
            return self._pair_bits(previous, current)
        if self.wm.scheme == "unigram":
            previous = np.zeros_like(previous)
        step = len(self._rows)
        parts = [self._look_up(previous[i : i + step], current[i : i + step]) for i in range(0, len(previous), step)]
        return np.concatenate(parts)

    def green_row(self, prev: int) -> np.ndarray:
        """Green list after token `prev` as a mask, bool (V,).

        Raises:
            ValueError: an id out of range, or "selfhash", where a list of its own belongs to each candidate.
        """
        if self.wm.scheme == "selfhash":
            raise ValueError("scheme='selfhash': the previous token alone fixes no green list")
        token = np.array([prev])
        _check_vocabulary(token, self.wm.vocab_size)
        with self._lock:
            row = self._find(token if self.wm.scheme == "lefthash" else np.zeros(1, dtype=np.int64))[0]
            return np.unpackbits(self._rows[row], count=self.wm.vocab_size).astype(bool)

    def _look_up(self, previous: np.ndarray, current: np.ndarray) -> np.ndarray:
        with self._lock:
            rows = self._find(previous)
            return self._rows[rows, current >> 3] >> (7 - (current & 7)).astype(np.uint8) & 1

    def _find(self, previous: np.ndarray) -> np.ndarray:
        """Rows of tokens, at most as many distinct ones as there are rows; what is missing is drawn."""
        self._time += 1
        rows = self._slot[previous]
        self._used[rows[rows >= 0]] = self._time
        missing = np.unique(previous[rows < 0])
        if len(missing) == 0:
            return rows
        for token, row in zip(missing, np.argpartition(self._used, len(missing) - 1)[: len(missing)], strict=True):
            if self._owner[row] >= 0:
                self._slot[self._owner[row]] = -1
            self._owner[row] = -1  # an interrupt during the draw leaves the row without an owner
            self._rows[row] = np.packbits(self._lists.after(int(token)))
            self._owner[row], self._slot[token], self._used[row] = token, row, self._time
        return self._slot[previous]

    def _pair_bits(self, previous: np.ndarray, current: np.ndarray) -> np.ndarray:
        pairs, inverse = np.unique(np.stack([previous, current], axis=1), axis=0, return_inverse=True)
        with self._lock:
            return np.array([self._lists.of_pair(*pair) for pair in pairs.tolist()], dtype=np.uint8)[inverse]


@dataclass(frozen=True)
class SynthID:
    """SynthID-text: each layer of a tournament prefers tokens whose pseudo-random bit is 1 [HF].

    Attributes:
        key: whole number from 1 to 2⁶³ − 1, from which the layers' keys are drawn [ours].
        layers: m ≥ 1, bits per token.
        ngram_len: a bit depends on this many last tokens, the scored one among them, ≥ 2.

    Source: defaults of layers and n-gram length as in transformers' documentation [HF].
    """

    key: int = 15485863
    layers: int = 30
    ngram_len: int = 5

    def __post_init__(self):
        _check_key(self.key)
        check_size("layers", self.layers, 1)
        check_size("ngram_len", self.ngram_len, 2)

    def to_hf(self) -> "SynthIDTextWatermarkingConfig":
        """The configuration that `generate(watermarking_config=...)` takes."""
        from transformers import SynthIDTextWatermarkingConfig  # seconds: reading bits of green lists does without

        keys = np.random.default_rng(self.key).integers(2**16, size=self.layers)
        return SynthIDTextWatermarkingConfig(ngram_len=self.ngram_len, keys=keys.tolist())


def synthid_bits(wm: SynthID, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bits of SynthID-text; `z_score(bits.ravel(), 0.5)` is the z of their mean.

    Args:
        wm: the watermark to look for.
        ids: token ids (L,) without special tokens, L ≥ `ngram_len`.

    Returns:
        uint8 (T, m), one row for each token whose context of n − 1 tokens is complete and new.
    """
    import torch

    ids = check_ids(ids)
    if len(ids) < wm.ngram_len:
        raise ValueError(f"need at least ngram_len={wm.ngram_len} tokens to score one, got {len(ids)}")
    tokens = torch.as_tensor(ids)[None]
    processor = wm.to_hf().construct_processor(0, "cpu")
    new = processor.compute_context_repetition_mask(tokens)[0]
    return processor.compute_g_values(tokens)[0, new].numpy().astype(np.uint8)


def _check_key(key: int) -> None:
    check_size("key", key, 1)
    if key >= 2**63:
        raise ValueError(f"key={key}: expected at most 2**63 - 1")


def _check_vocabulary(ids: np.ndarray, vocab_size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token id {low if low < 0 else high}: expected 0 ... {vocab_size - 1}; another tokenizer's?")

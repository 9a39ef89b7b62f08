"""Green lists drawn as transformers draws them: a seed from the tokens, then the head of torch's random permutation."""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from labkit.watermark.scheme import Watermark

_TABLE_SIZE = 1_000_003  # entries of the table that "selfhash" hashes tokens with [HF]


class GreenLists:
    """The lists of one watermark; half a millisecond each at 49,152 tokens, about in proportion to V."""

    def __init__(self, wm: "Watermark"):
        self._wm = wm
        self._generator = torch.Generator()
        if wm.scheme == "selfhash":
            self._table = torch.randperm(_TABLE_SIZE, generator=self._generator.manual_seed(wm.key)) + 1

    def after(self, token: int) -> np.ndarray:
        """Mask (V,) of the tokens that are green after `token`; of "unigram", after any."""
        mask = np.zeros(self._wm.vocab_size, dtype=bool)
        mask[self._draw(self._wm.key * (1 if self._wm.scheme == "unigram" else token))] = True
        return mask

    def of_pair(self, previous: int, current: int) -> bool:
        """Whether `current` is green after `previous` under "selfhash", whose list depends on both."""
        hashes = self._table[torch.tensor([previous, current]) % _TABLE_SIZE]
        seed = int((self._wm.key * hashes * hashes[1]).min())  # of int64, which may wrap around
        return current in self._draw(seed)

    def _draw(self, seed: int) -> np.ndarray:
        self._generator.manual_seed(seed % (2**64 - 1))
        return torch.randperm(self._wm.vocab_size, generator=self._generator, dtype=torch.int32).numpy()[: self._wm.green_size]

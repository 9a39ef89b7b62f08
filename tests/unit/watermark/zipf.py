"""Random texts that several tests share."""

import numpy as np


def zipf_texts(n, length, vocab_size, seed=0, exponent=1.3):
    """Token ids (n, length) with few frequent tokens and many rare ones; never id 1, which a detector may take for a start."""
    weights = np.arange(1, vocab_size + 1) ** -exponent
    weights[1] = 0
    return np.random.default_rng(seed).choice(vocab_size, (n, length), p=weights / weights.sum())

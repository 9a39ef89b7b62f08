"""Next-token distributions to watermark by hand: forty beginnings of a sentence, and the 200 likeliest ways to go on.

With logits ℓ, temperature τ, a green list g ∈ {0, 1}^V and a bias δ added *after* the temperature, as transformers does,
the next token is drawn from softmax(ℓ / τ + δ g), so it is green with probability

    P(green) = Σ_v g_v e^(ℓ_v/τ + δ) / Σ_v e^(ℓ_v/τ + δ g_v).

Only the 200 likeliest tokens are kept, as in top-k sampling with k = 200, so that a slider needs no model [ours].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.atomic import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DATA = Path(__file__).with_name("data") / "contexts.npz"
TOP = 200  # tokens kept of each distribution

PROMPTS = (
    "The capital of France is",
    "Water boils at one hundred degrees",
    "The first president of the United States was George",
    "Monday, Tuesday, Wednesday, Thursday,",
    "Two plus two is",
    "The Earth moves around the",
    "To be, or not to",
    "She opened the door and saw",
    "My favourite colour is",
    "He looked out of the window and",
    "Once upon a time there was a",
    "The most important thing in life is",
    "In the year 1969 a man walked on the",
    "The recipe needs two eggs, some flour and",
    "Yesterday evening the old captain",
    "For breakfast they ate bread and",
    "The committee decided that",
    "It was raining, so I took my",
    "The opposite of hot is",
    "The detective found a",
    "After a long silence she said",
    "The price of coffee has",
    "Thank you very",
    "The experiment showed that the",
    "At the end of the street there is a",
    "A triangle has three",
    "The orchestra played",
    "Scientists have discovered a new",
    "The dog chased the",
    "When the lights went out, everybody",
    "In winter the lake is covered with",
    "The letter began with the words",
    "He had never been to",
    "The train to London leaves at",
    "If you mix blue and yellow you get",
    "Nobody knew why the",
    "On the table lay a book, a pencil and",
    "The museum is open from nine to",
    "Her grandmother used to tell",
    "We hold these truths to be self-",
)


@dataclass(frozen=True, eq=False)
class Contexts:
    """C prompts and the K likeliest tokens after each, the likeliest first.

    Attributes:
        prompts: (C,) the beginnings.
        last: (C,) id of each prompt's last token, on which the green list hangs.
        ids: (C, K) token ids.
        tokens: (C, K) the same as text.
        logits: (C, K) natural logarithms of probabilities at temperature 1, up to a constant.
        vocab_size: of the model.
    """

    prompts: np.ndarray
    last: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray
    vocab_size: int


def build_contexts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, top: int = TOP) -> Contexts:
    """What a causal language model expects after each of `PROMPTS`."""
    import torch  # only the build needs it

    last, ids, logits = [], [], []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            best = model(input_ids=inputs).logits[0, -1].float().log_softmax(-1).topk(top)
        last.append(int(inputs[0, -1]))
        ids.append(best.indices.numpy())
        logits.append(best.values.numpy())
    tokens = [tokenizer.batch_decode([[int(i)] for i in row]) for row in ids]
    arrays = np.array(PROMPTS), np.array(last), np.stack(ids), np.array(tokens), np.stack(logits)
    return Contexts(*arrays, vocab_size=model.config.vocab_size)


def save_contexts(contexts: Contexts, path: Path = DATA) -> None:
    """Write the file that `load_contexts` reads; logits are rounded to three decimals."""
    with replacing(path) as partial:
        np.savez_compressed(partial, **vars(contexts) | {"logits": contexts.logits.round(3).astype(np.float32)})


def load_contexts(path: Path = DATA) -> Contexts:
    """The stored distributions, of SmolLM2-135M-Instruct."""
    with np.load(path) as stored:
        return Contexts(
            **{name: stored[name] for name in stored.files if name != "vocab_size"}, vocab_size=int(stored["vocab_size"])
        )


def next_token(logits: np.ndarray, green: np.ndarray, delta: float, temperature: float) -> np.ndarray:
    """Probabilities of a watermarked next token.

    Args:
        logits: (..., K).
        green: (..., K) bool, whether each token is on the green list; leading dimensions broadcast.
        delta: bias δ ≥ 0, added after the temperature.
        temperature: τ > 0.

    Returns:
        (..., K), summing to one.
    """
    biased = logits / temperature + delta * green
    weights = np.exp(biased - biased.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def green_probability(logits: np.ndarray, green: np.ndarray, delta: float, temperature: float) -> np.ndarray:
    """P(green) of the next token, (...,); arguments as for `next_token`."""
    return (next_token(logits, green, delta, temperature) * green).sum(-1)

"""Text with and without a watermark, from the same model, prompts and sampling.

transformers draws the tokens and adds the watermark's bias; nothing of either is written here. `generate()` applies the bias
after temperature and top-p [HF], while [KGW]'s own code adds it before the temperature: δ here at temperature τ is δ·τ there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoTokenizer

from labkit.errors import check_size
from labkit.llm import BUNDLED, load_lm, prepare
from labkit.randomness import frozen
from labkit.watermark.prose import Passage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from labkit.watermark.scheme import Watermark


def load(
    source: str | os.PathLike = "smollm2", *, gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A language model that writes, with its tokenizer; `labkit.llm.load_lm` explains the arguments and errors."""
    return load_lm(source, gguf_file=gguf_file)


def load_tokenizer(source: str | os.PathLike = "smollm2") -> PreTrainedTokenizerBase:
    """The tokenizer alone, for whoever only reads texts.

    Args:
        source: a bundled name, a .gguf file, a local transformers folder, or a hub id.

    Raises:
        FileNotFoundError: no such file or folder, and no hub in reach.
    """
    local = source in BUNDLED or Path(source).suffix == ".gguf"
    try:
        return AutoTokenizer.from_pretrained(prepare(source) if local else source)
    except OSError as error:
        raise FileNotFoundError(f"source={os.fspath(source)!r}: no tokenizer there: {str(error).splitlines()[0]}") from error


def split_prompt(tokenizer: PreTrainedTokenizerBase, passage: Passage, n_prompt: int, n_tokens: int) -> tuple[Passage, Passage]:
    """The first tokens of a passage, to be continued by a model, and the human continuation of the same length.

    Args:
        n_prompt: tokens of the prompt.
        n_tokens: tokens of the continuation.

    Raises:
        ValueError: the passage is shorter than both together.
    """
    offsets = tokenizer(passage.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) < n_prompt + n_tokens:
        raise ValueError(f"document {passage.doc} has {len(offsets)} tokens, n_prompt + n_tokens = {n_prompt + n_tokens}")
    middle, end = offsets[n_prompt - 1][1], offsets[n_prompt + n_tokens - 1][1]
    return passage.cut(0, middle), passage.cut(middle, end)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    watermark: Watermark | None,
    n_tokens: int,
    seed: int,
    *,
    n_prompt: int = 24,
    temperature: float = 0.7,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
) -> np.ndarray:
    """Continue prompts by sampling; special tokens are never drawn, so every row has the full length.

    Args:
        prompts: the texts to continue, each of at least `n_prompt` tokens (the rest is cut off, so that rows align).
        watermark: None writes without one.
        n_tokens: tokens to draw per prompt.
        seed: of the draws; equal seeds and batches give equal tokens.
        n_prompt: tokens of each prompt that the model reads.
        temperature, top_p, repetition_penalty, no_repeat_ngram_size: as in transformers. The defaults are ours; the authors'
            code has 0.7, 0.9, 1.2 and 3 [code].

    Returns:
        Token ids, int64 (B, n_tokens).

    Raises:
        ValueError: no prompt, a prompt that is too short, or a size below 1.
    """
    check_size("n_tokens", n_tokens, 1)
    check_size("n_prompt", n_prompt, 1)
    ids = torch.tensor(_prompt_ids(tokenizer, prompts, n_prompt))  # (B, P)
    special = sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    with frozen(seed), torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            suppress_tokens=special,
            min_new_tokens=n_tokens,
            max_new_tokens=n_tokens,
            watermarking_config=None if watermark is None else watermark.to_hf(),
        )
    return out[:, ids.shape[1] :].numpy()


def decode(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """What a reader receives: the text of each row, without the white space around it."""
    return [text.strip() for text in tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """What the detector sees: token ids of a received text, int64 (T + 1,), without special tokens.

    Decoding and encoding again may change ids, so bits are always computed on these.

    Raises:
        TypeError: `text` is no string.
        ValueError: fewer than 2 tokens, so nothing can be scored.
    """
    if not isinstance(text, str):
        raise TypeError(f"text of type {type(text).__name__}: expected a str")
    ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if len(ids) < 2:
        raise ValueError(f"need at least 2 tokens to score one, got {len(ids)} from {text[:40]!r}")
    return ids


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], n_prompt: int) -> list[list[int]]:
    if not prompts:
        raise ValueError("prompts is empty: nothing to continue")
    start = tokenizer("")["input_ids"]  # a model's own beginning-of-text token, where it has one
    rows = [tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] for prompt in prompts]
    short = [len(row) for row in rows if len(row) < n_prompt]
    if short:
        raise ValueError(f"n_prompt={n_prompt}: a prompt has only {min(short)} tokens")
    return [start + row[:n_prompt] for row in rows]

"""A tiny random Llama, and SmolLM2, loaded once."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit.llm import load_lm


@pytest.fixture(scope="session")
def tiny_llama():
    """Random model over 97 tokens without special ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def smollm2():
    """The lab's own model and its tokenizer."""
    return load_lm("smollm2")

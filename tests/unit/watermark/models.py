"""Random models that read SmolLM2's tokens and cost nothing."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def uniform_model(tokenizer):
    """A Llama of 16 dimensions whose next token is uniform over the tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.zero_()
    return model

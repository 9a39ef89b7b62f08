"""Tiny random models of every known layout, a model that is one linear layer, and SmolLM2, loaded once."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from labkit import corpora
from labkit.llm import load_lm
from labkit.sparsity.calibration import calibrate

VOCABULARY = 61
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SWIGLU = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
LAYOUTS = {  # random weights far from the zero function, so that a wrong mask shows
    "llama": (LlamaForCausalLM, LlamaConfig(**SWIGLU)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SWIGLU, attention_bias=True, mlp_bias=True)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(**COMMON, n_positions=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SWIGLU, pad_token_id=0, bos_token_id=None, eos_token_id=None)),
    "opt": (OPTForCausalLM, OPTConfig(**COMMON, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=16, init_std=0.3)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SWIGLU, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        ),
    ),
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)),
    "bert": (BertLMHeadModel, BertConfig(**COMMON, intermediate_size=48, is_decoder=True)),
}


def build(layout="llama", dtype=torch.float64, seed=0):
    """Random model; Llama's norms compute in the model's dtype, where transformers' own round to float32 inside."""
    cls, config = LAYOUTS[layout]
    torch.manual_seed(seed)
    model = cls(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.3)
    if cls is LlamaForCausalLM:
        for parent in list(model.modules()):
            for name, _ in list(parent.named_children()):
                if name.endswith("norm"):
                    setattr(parent, name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps).requires_grad_(False))
    return model.to(dtype)


class OneLinear(PreTrainedModel):
    """logits = W x + b: a language model that is its last projection, fed with activations of any distribution."""

    config_class = PretrainedConfig

    def __init__(self, weight, bias=None):
        super().__init__(PretrainedConfig(hidden_size=weight.shape[1], vocab_size=weight.shape[0]))
        self.q_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.q_proj.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.q_proj.bias = nn.Parameter(bias, requires_grad=False)
        self.to(weight.dtype).eval()

    def forward(self, inputs_embeds, use_cache=False):
        return CausalLMOutput(logits=self.q_proj(inputs_embeds))


@pytest.fixture(scope="session")
def tiny():
    """`build`, for tests that choose the layout or the dtype."""
    return build


@pytest.fixture
def model():
    """Tiny Llama in float64."""
    return build()


@pytest.fixture
def one_linear():
    """The class `OneLinear`."""
    return OneLinear


@pytest.fixture(scope="session")
def ids():
    """Token ids (4, 20)."""
    return torch.randint(0, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def calib(model, ids):
    """Calibration of `model` on `ids` with every order statistic."""
    return calibrate(model, ids, wina=True, levels=(0.5, 0.6), resolution=10**6)


@pytest.fixture
def random_vectors():
    """Random vectors (d,) for each site, of a given scale."""

    def make(sites, scale=0.5, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return {s: scale * torch.randn(s.width, generator=generator, dtype=s.weight.dtype) for s in sites}

    return make


@pytest.fixture(scope="session")
def smollm2():
    """The lab's own model and its tokenizer."""
    return load_lm("smollm2")


@pytest.fixture(scope="session")
def wiki_windows(smollm2):
    """Windows of real prose by split, (4, 64) each."""
    _, tokenizer = smollm2
    return {split: corpora.windows(tokenizer, corpora.documents("wiki", split)[:6], 64, 4) for split in ("train", "test")}

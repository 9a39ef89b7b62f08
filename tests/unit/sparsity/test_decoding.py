import sys

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from labkit.errors import MissingDependency
from labkit.sparsity.calibration import calibrate
from labkit.sparsity.decoding import GROUPS, Decoder, decode, lay_out
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel

VOCABULARY, PROMPT, STEPS = 97, 6, 14
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,  # far from the zero function, so that a wrong mask shows
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama, biases, wide heads": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
}


def tiny_model(architecture="llama", dtype=torch.float64):
    """Random model with norms in its own dtype: those of transformers round to float32 inside."""
    torch.manual_seed(0)
    cls, config = ARCHITECTURES[architecture]
    model = cls(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if name.endswith("norm"):
                exact = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    return model.to(dtype)


def token_ids(length=PROMPT + STEPS):
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1))


def wrap(model, sparsity, alpha_scale=0.0, dense_prefix=PROMPT - 1):
    generator = torch.Generator().manual_seed(2)
    calibration_ids = torch.randint(0, VOCABULARY, (4, 24), generator=generator)
    sparse = SparseModel(model, calibrate(model, calibration_ids), sparsity, dense_prefix=dense_prefix)
    if alpha_scale:
        sparse.set_alpha(
            {site: alpha_scale * torch.randn(site.width, generator=generator, dtype=model.dtype) for site in sparse.sites}
        )
    return sparse


def teacher_forced(model, sparse, **options):
    ids = token_ids()
    return decode(model, sparse, ids[:PROMPT], STEPS, forced_ids=ids[PROMPT:], **options)


def full_forward(model):
    """Logits after each prefix that `teacher_forced` decodes, from one pass over the whole sequence."""
    return model(token_ids()[None]).logits[0, PROMPT - 1 : -1]


@pytest.mark.parametrize("kernel", ["dense", "dense-own"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_loop_is_the_model(architecture, kernel):
    model = tiny_model(architecture)
    result = teacher_forced(model, None, kernel=kernel)
    torch.testing.assert_close(result.logits, full_forward(model), rtol=0, atol=1e-9)
    assert (result.kept == 1).all()


def test_dense_loop_is_the_model_in_float32_with_its_own_norms():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    result = teacher_forced(model, None)
    torch.testing.assert_close(result.logits, full_forward(model), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_generate():
    model = tiny_model()
    prompt = token_ids(PROMPT)[None]
    generated = model.generate(prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert decode(model, None, prompt, STEPS).tokens.tolist() == generated[0, PROMPT:].tolist()


def test_a_one_token_prompt_needs_no_prefill():
    model, ids = tiny_model(), token_ids()
    result = decode(model, None, ids[:1], 5, forced_ids=ids[1:6])
    torch.testing.assert_close(result.logits, model(ids[None, :5]).logits[0], rtol=0, atol=1e-9)


def test_skipping_nothing_is_the_dense_model():
    model = tiny_model()
    with wrap(model, 0.0) as sparse:
        skipped = teacher_forced(model, sparse, kernel="skip")
    torch.testing.assert_close(skipped.logits, teacher_forced(model, None).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha_scale", [0.0, 0.5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_skipping_one_token_at_a_time_is_the_sparse_model_on_the_whole_sequence(architecture, alpha_scale):
    model = tiny_model(architecture)
    dense = full_forward(model)
    with wrap(model, 0.5, alpha_scale) as sparse:
        expected = full_forward(sparse)
        result = teacher_forced(model, sparse, kernel="skip")
    torch.testing.assert_close(result.logits, expected, rtol=0, atol=1e-9)
    assert (expected - dense).abs().max() > 0.1


@pytest.mark.parametrize("dense_prefix", [0, 3])
def test_cached_sparse_model_is_the_sparse_model_on_the_whole_sequence(dense_prefix):
    model, ids = tiny_model(), token_ids()[None]
    with wrap(model, 0.5, alpha_scale=0.5, dense_prefix=dense_prefix) as sparse:
        expected = sparse(ids).logits[0]
        _, cache = sparse(ids[:, :PROMPT], use_cache=True, return_dict=False)
        steps = []
        for t in range(PROMPT, ids.shape[1]):
            logits, cache = sparse(ids[:, t : t + 1], cache=cache, use_cache=True, return_dict=False)
            steps.append(logits[0, 0])
    torch.testing.assert_close(torch.stack(steps), expected[PROMPT:], rtol=0, atol=1e-9)


def test_linears_that_share_an_input_may_differ_in_threshold():
    model = tiny_model()
    levels = {"q": 0.2, "k": 0.7, "v": 0.4, "o": 0.5, "gate": 0.6, "up": 0.1, "down": 0.8}
    with wrap(model, {site: levels[site.name] for site in find_sites(model)}) as sparse:
        expected = full_forward(sparse)
        result = teacher_forced(model, sparse, kernel="skip")
    torch.testing.assert_close(result.logits, expected, rtol=0, atol=1e-9)


def test_kept_is_the_share_of_weights_that_the_masks_leave():
    model, ids = tiny_model(), token_ids(1 + STEPS)
    with wrap(model, 0.6, dense_prefix=0) as sparse:
        result = decode(model, sparse, ids[:1], STEPS, kernel="skip", forced_ids=ids[1:])
        sparse(ids[None, :STEPS])
        masked = {(site.layer, site.name): share for site, share in sparse.actual_sparsity().items()}
    assert result.kept.shape == (STEPS, 2, 4)
    expected = [[1 - masked[layer, names[0]] for names in GROUPS] for layer in range(2)]
    np.testing.assert_allclose(result.kept.mean(0), expected, atol=1e-6)


def test_absorbed_neurons_leave_the_dense_builds_alone():
    model = tiny_model("qwen2")
    dense = teacher_forced(model, None)
    with wrap(model, 0.5, alpha_scale=0.5) as sparse:
        before = teacher_forced(model, sparse, kernel="skip")
        sparse.absorb()
        after = teacher_forced(model, sparse, kernel="skip")
        peer = teacher_forced(model, sparse, kernel="dense")
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(peer.logits, dense.logits, rtol=0, atol=1e-12)


def test_two_threads_compute_the_same():
    model = tiny_model()
    before = torch.get_num_threads()
    with wrap(model, {s: 0.3 + 0.05 * "qkvo".find(s.name) for s in find_sites(model)}) as sparse:
        one = teacher_forced(model, sparse, kernel="skip")
        two = teacher_forced(model, sparse, kernel="skip", threads=2)
    torch.testing.assert_close(two.logits, one.logits, rtol=0, atol=1e-12)
    assert torch.get_num_threads() == before


def test_bf16_head_rounds_only_the_head():
    model = tiny_model(dtype=torch.float32)
    exact, rounded = teacher_forced(model, None), teacher_forced(model, None, head="bf16")
    assert 0 < (rounded.logits - exact.logits).abs().max() < 2**-7 * exact.logits.abs().max()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_sparse_head_keeps_the_largest_entries(p):
    model, ids = tiny_model(), token_ids(PROMPT)
    with wrap(model, p) as sparse:
        result = decode(model, sparse, ids, 1, kernel="dense", head="sparse")
    hidden = model.model(ids[None])[0][0, -1]
    hidden[hidden.abs().argsort()[: int(p * 48)]] = 0
    torch.testing.assert_close(result.logits[0], model.lm_head(hidden), rtol=0, atol=1e-9)


def test_builds_with_one_layout_can_share_it():
    model, ids = tiny_model(), token_ids()
    weights = lay_out(model, transposed=True)
    with wrap(model, 0.0) as sparse:
        builds = [
            Decoder(model, None, 4, kernel="dense-own", weights=weights),
            Decoder(model, sparse, 4, kernel="skip", weights=weights),
        ]
    first, second = ([build.step(token).clone() for token in ids[:4].tolist()] for build in builds)
    torch.testing.assert_close(torch.stack(first), torch.stack(second), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="all 4 positions"):
        builds[0].step(0)
    with pytest.raises(ValueError, match="transposed=True; kernel='dense'"):
        Decoder(model, None, 4, kernel="dense", weights=weights)


def test_one_clock_reading_per_step():
    result = teacher_forced(tiny_model(), None)
    assert result.seconds.shape == result.cpu_seconds.shape == (STEPS,)
    assert (result.seconds > 0).all()


def test_profile_is_a_step_that_accounts_for_its_time():
    model, ids = tiny_model(), token_ids(3)
    decoder = Decoder(model, None, 3)
    parts = [decoder.profile(token) for token in ids[:2].tolist()]
    assert all(set(p) == {"linears", "head", "rest"} and min(p.values()) >= 0 for p in parts)
    torch.testing.assert_close(decoder.step(int(ids[2])), model(ids[None]).logits[0, -1], rtol=0, atol=1e-9)


def test_other_architectures_are_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"architecture 'gpt2'.*decode knows llama"):
        decode(gpt2, None, token_ids(PROMPT), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "fast"}, "kernel='fast'; allowed are"),
        ({"head": "fp8"}, "head='fp8'; allowed are"),
        ({"kernel": "skip"}, "sparse=None"),
        ({"head": "sparse"}, "sparse=None"),
        ({"threads": 0}, "threads=0; allowed are 1"),
        ({"n": 0}, "n=0"),
        ({"n": 60}, "65 positions; this model attends to 32"),
        ({"prompt_ids": torch.tensor([], dtype=torch.long)}, r"prompt_ids has shape \(0,\)"),
        ({"prompt_ids": torch.zeros(2, 3, dtype=torch.long)}, r"prompt_ids has shape \(2, 3\)"),
        ({"prompt_ids": torch.tensor([0, VOCABULARY])}, "prompt_ids holds ids 0 … 97; allowed are 0 … 96"),
        ({"forced_ids": torch.tensor([1, 2])}, "forced_ids has 2 tokens; allowed is n=3"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {"prompt_ids": token_ids(PROMPT), "n": 3} | changes
    with pytest.raises(ValueError, match=message):
        decode(tiny_model(), None, **arguments)


def test_a_sparse_model_that_the_kernel_cannot_follow_is_refused():
    model, other = tiny_model(), tiny_model()
    with wrap(model, 0.5) as sparse, pytest.raises(ValueError, match="another model"):
        decode(other, sparse, token_ids(PROMPT), 1, kernel="skip")
    calibration = calibrate(model, token_ids()[None], wina=True)
    for options, message in (({"score": "wina"}, "score='wina'"), ({"mode": "topk"}, "mode='topk'")):
        with (
            SparseModel(model, calibration, 0.5, **options) as sparse,
            pytest.raises(ValueError, match=message),
        ):
            decode(model, sparse, token_ids(PROMPT), 1, kernel="skip")


def test_half_precision_models_are_refused():
    with pytest.raises(ValueError, match=r"dtype torch\.bfloat16; allowed is float32"):
        decode(tiny_model(dtype=torch.bfloat16), None, token_ids(PROMPT), 1)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingDependency, match=r"numba is not installed: pip install \"labkit\[llm\]\""):
        decode(tiny_model(), None, token_ids(PROMPT), 1)

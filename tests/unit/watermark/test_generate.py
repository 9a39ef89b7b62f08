import numpy as np
import pytest
import torch

from labkit.watermark.generate import decode, encode, generate, load_tokenizer, split_prompt
from labkit.watermark.prose import passages
from labkit.watermark.scheme import GreenBits, Watermark
from labkit.watermark.theory import uniform_green_rate
from tests.unit.watermark.models import uniform_model

PROMPTS = ["one two three four five six", "seven eight nine ten eleven twelve"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def uniform(tokenizer):
    return uniform_model(tokenizer)


@pytest.fixture(scope="module")
def green():
    return GreenBits(Watermark(49152))


def write(model, tokenizer, watermark, seed=0, n_tokens=20, **options):
    return generate(model, tokenizer, PROMPTS, watermark, n_tokens, seed, n_prompt=4, **options)


def test_draws_follow_the_seed_and_leave_torch_alone(uniform, tokenizer):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    ids = write(uniform, tokenizer, None)
    assert torch.rand(1) == expected
    assert ids.shape == (2, 20)
    np.testing.assert_array_equal(ids, write(uniform, tokenizer, None))
    assert (ids != write(uniform, tokenizer, None, seed=1)).any()


def test_a_watermark_without_bias_changes_nothing(uniform, tokenizer):
    np.testing.assert_array_equal(write(uniform, tokenizer, Watermark(49152, delta=0.0)), write(uniform, tokenizer, None))


def test_a_huge_bias_makes_every_token_green(uniform, tokenizer, green):
    ids = write(uniform, tokenizer, Watermark(49152, delta=60.0))
    last = [row[3] for row in tokenizer(PROMPTS)["input_ids"]]
    assert all(green([first, *row]).all() for first, row in zip(last, ids, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_uniform_logits_give_the_closed_form_at_any_temperature(uniform, tokenizer, green, temperature):
    """The bias is added after the temperature: P(green) = γ e^δ / (1 + (e^δ − 1) γ), within four standard errors."""
    ids = write(uniform, tokenizer, Watermark(49152, delta=2.0), n_tokens=150, temperature=temperature)
    rate, draws = np.mean([green(row) for row in ids]), 2 * 149
    expected = uniform_green_rate(0.25, 2.0)
    assert abs(rate - expected) < 4 * np.sqrt(expected * (1 - expected) / draws)


def test_special_tokens_are_never_drawn(tokenizer):
    """Even by a model that likes nothing else."""
    model = uniform_model(tokenizer)
    special = sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    model.lm_head = torch.nn.Linear(16, len(tokenizer))
    model.lm_head.weight.data.zero_()
    model.lm_head.bias.data.zero_()
    model.lm_head.bias.data[special] = 50.0
    ids = write(model, tokenizer, None, n_tokens=50)
    assert ids.shape == (2, 50)
    assert not np.isin(ids, special).any()


def test_prompt_and_continuation_are_neighbours_in_the_document(tokenizer):
    document = passages("learned", 1)[0]
    prompt, rest = split_prompt(tokenizer, document, 24, 100)
    assert document.text.startswith(prompt.text + rest.text)
    assert prompt.span == (0, rest.span[0])
    assert document.text[slice(*rest.span)] == rest.text
    assert len(encode(tokenizer, prompt.text)) == 24
    with pytest.raises(ValueError, match=rf"document {document.doc} has \d+ tokens, n_prompt \+ n_tokens = 100024"):
        split_prompt(tokenizer, document, 24, 100_000)


def test_received_text_is_encoded_without_special_tokens(tokenizer):
    ids = encode(tokenizer, "The jury said so.")
    assert ids.dtype == np.int64
    assert decode(tokenizer, ids[None]) == ["The jury said so."]
    assert not np.isin(ids, tokenizer.all_special_ids).any()


def test_decoding_and_encoding_may_change_ids(tokenizer):
    """So bits belong to the received text: two tokens that the tokenizer would write as one."""
    (one,) = tokenizer(" house", add_special_tokens=False)["input_ids"]
    two = tokenizer(" h", add_special_tokens=False)["input_ids"] + tokenizer("ouse", add_special_tokens=False)["input_ids"]
    text = decode(tokenizer, np.array([[*tokenizer("The")["input_ids"], *two]]))[0]
    assert encode(tokenizer, text).tolist() == [*tokenizer("The")["input_ids"], one]


@pytest.mark.parametrize("text", ["", "  \n", "a"])
def test_nothing_to_score(tokenizer, text):
    with pytest.raises(ValueError, match="need at least 2 tokens"):
        encode(tokenizer, text)


def test_bad_requests_are_named(uniform, tokenizer, tmp_path):
    with pytest.raises(TypeError, match="text of type bytes: expected a str"):
        encode(tokenizer, b"text")
    with pytest.raises(ValueError, match="prompts is empty"):
        generate(uniform, tokenizer, [], None, 5, 0)
    with pytest.raises(ValueError, match="n_prompt=24: a prompt has only"):
        generate(uniform, tokenizer, PROMPTS, None, 5, 0)
    with pytest.raises(ValueError, match="n_tokens=0: expected an int >= 1"):
        generate(uniform, tokenizer, PROMPTS, None, 0, 0, n_prompt=4)
    with pytest.raises(FileNotFoundError, match="no tokenizer there"):
        load_tokenizer(tmp_path / "missing")

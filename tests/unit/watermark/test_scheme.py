from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import PretrainedConfig, WatermarkDetector

from labkit.watermark import GreenBits, SynthID, Watermark, fresh, synthid_bits, z_score, z_unique
from labkit.watermark._lists import GreenLists
from tests.unit.watermark.zipf import zipf_texts

SMOLLM2_VOCABULARY = 49152


def reference(wm, ids, **kwargs):
    """transformers' own detector on texts (n, L)."""
    config = PretrainedConfig(vocab_size=wm.vocab_size, bos_token_id=1)
    return WatermarkDetector(config, "cpu", wm.to_hf(), **kwargs)(torch.as_tensor(ids), return_dict=True)


@pytest.fixture
def draws(monkeypatch):
    """Tokens whose list was drawn, in order."""
    drawn, after = [], GreenLists.after

    def counted(self, token):
        drawn.append(token)
        return after(self, token)

    monkeypatch.setattr(GreenLists, "after", counted)
    return drawn


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_z_equals_that_of_transformers(gamma):
    wm = Watermark(SMOLLM2_VOCABULARY, gamma)
    ids = zipf_texts(4, 61, wm.vocab_size, exponent=1.5)
    bits = np.stack([GreenBits(wm)(text) for text in ids])
    every, distinct = reference(wm, ids), reference(wm, ids, ignore_repeated_ngrams=True)
    assert np.array_equal(bits.sum(1), every.num_green_tokens)
    assert np.array_equal(z_score(bits, gamma), every.z_score)
    assert (distinct.num_tokens_scored < 60).all()
    assert np.array_equal([z_unique(text, b, gamma) for text, b in zip(ids, bits, strict=True)], distinct.z_score)


def test_each_bit_equals_that_of_transformers():
    wm = Watermark(SMOLLM2_VOCABULARY)
    text = zipf_texts(1, 301, wm.vocab_size, exponent=0)[0]
    pairs = np.stack([text[:-1], text[1:]], axis=1)
    assert np.array_equal(GreenBits(wm)(text), reference(wm, pairs).num_green_tokens)


@pytest.mark.parametrize("key", [1, 2**63 - 1])
@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_any_key_and_scheme_equal_those_of_transformers(scheme, key):
    wm = Watermark(1000, 0.3, key=key, scheme=scheme)
    ids = zipf_texts(20, 8, wm.vocab_size)
    assert [GreenBits(wm)(text).sum() for text in ids] == reference(wm, ids).num_green_tokens.tolist()


def test_bits_of_generated_text_equal_those_of_transformers(smollm2):
    model, tokenizer = smollm2
    wm = Watermark(model.config.vocab_size, delta=4)
    assert wm.vocab_size == SMOLLM2_VOCABULARY
    prompt = tokenizer("The committee said on Friday that", return_tensors="pt")
    torch.manual_seed(0)
    out = model.generate(**prompt, watermarking_config=wm.to_hf(), do_sample=True, min_new_tokens=30, max_new_tokens=30)
    ids = out[:, prompt["input_ids"].shape[1] :]
    z = z_score(GreenBits(wm)(ids[0]), wm.gamma)
    assert z == reference(wm, ids).z_score[0]
    assert z > 4


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash", "unigram"])
def test_generation_under_a_large_bias_is_all_green(tiny_llama, scheme):
    wm = Watermark(tiny_llama.config.vocab_size, delta=100, scheme=scheme)
    prompt = torch.tensor([[7, 5]])
    torch.manual_seed(0)
    out = tiny_llama.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        pad_token_id=0,
        watermarking_config=wm.to_hf(),
        do_sample=True,
        max_new_tokens=40,
    )
    assert GreenBits(wm)(out[0])[1:].tolist() == [1] * 40
    wrong = Watermark(wm.vocab_size, key=7919, scheme=scheme)
    assert GreenBits(wrong)(out[0]).mean() < 0.7


def test_synthid_raises_the_mean_of_its_bits(tiny_llama):
    wm = SynthID()
    prompt = torch.tensor([[7, 5]])
    torch.manual_seed(0)
    settings = dict(attention_mask=torch.ones_like(prompt), pad_token_id=0, do_sample=True, max_new_tokens=60)
    marked = tiny_llama.generate(prompt, watermarking_config=wm.to_hf(), **settings)[0, 2:]
    plain = tiny_llama.generate(prompt, **settings)[0, 2:]
    bits = synthid_bits(wm, marked)
    assert bits.shape == (60 - 4, 30)
    assert set(np.unique(bits)) == {0, 1}
    assert z_score(bits.ravel(), 0.5) > 8
    assert abs(z_score(synthid_bits(wm, plain).ravel(), 0.5)) < 3
    assert abs(z_score(synthid_bits(SynthID(key=7919), marked).ravel(), 0.5)) < 3


def test_synthid_skips_a_repeated_context():
    assert len(synthid_bits(SynthID(ngram_len=2), [3, 4, 3, 4, 3])) == 2


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_every_green_list_has_the_same_size(gamma):
    wm = Watermark(259, gamma)
    green = GreenBits(wm)
    rows = np.stack([green.green_row(token) for token in range(wm.vocab_size)])
    assert rows.shape == (259, 259)
    assert (rows.sum(1) == np.floor(gamma * 259)).all()
    assert len(np.unique(rows, axis=0)) == 259


def test_a_bit_is_read_off_the_green_list_of_the_token_before():
    green, text = GreenBits(Watermark(259)), zipf_texts(1, 80, 259)[0]
    expected = [green.green_row(previous)[token] for previous, token in pairwise(text)]
    assert green(text).tolist() == expected


def test_unigram_has_one_list():
    green = GreenBits(Watermark(259, scheme="unigram"))
    assert np.array_equal(green.green_row(3), green.green_row(200))
    assert green.green_row(3).sum() == 64


@pytest.mark.parametrize("max_rows", [1, 3, 40])
def test_a_small_cache_gives_the_same_bits(max_rows):
    wm = Watermark(100)
    small, large = GreenBits(wm, max_rows), GreenBits(wm)
    for text in zipf_texts(10, 90, 100, exponent=0.5):
        assert np.array_equal(small(text), large(text))


def test_a_list_is_drawn_once(draws):
    green, text = GreenBits(Watermark(100)), zipf_texts(1, 50, 100)[0]
    green(text)
    assert sorted(draws) == np.unique(text[:-1]).tolist()
    green(text)
    assert len(draws) == len(np.unique(text[:-1]))


def test_the_least_recently_used_list_goes_first(draws):
    green = GreenBits(Watermark(100), max_rows=2)
    for token in (5, 6, 5, 7, 5, 6):
        green([token, 0])
    assert draws == [5, 6, 7, 6]


def test_an_interrupted_draw_leaves_no_wrong_list(monkeypatch):
    wm, text, after = Watermark(100), [1, 2, 3, 4, 5], GreenLists.after
    green = GreenBits(wm, max_rows=2)
    green([8, 9, 0])  # the rows are taken, and must be given up

    def interrupted(self, token):
        if token == 2:
            raise KeyboardInterrupt
        return after(self, token)

    monkeypatch.setattr(GreenLists, "after", interrupted)
    with pytest.raises(KeyboardInterrupt):
        green(text)
    monkeypatch.undo()
    assert np.array_equal(green(text), GreenBits(wm)(text))
    assert np.array_equal(green([8, 9, 0]), GreenBits(wm)([8, 9, 0]))


def test_threads_may_share_a_detector():
    wm, texts = Watermark(200), zipf_texts(60, 40, 200, exponent=0.5)
    shared = GreenBits(wm, max_rows=20)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(shared, texts))
    assert np.array_equal(together, [GreenBits(wm)(text) for text in texts])


def test_without_a_watermark_z_is_standard_normal_over_keys():
    texts = np.random.default_rng(0).permuted(np.tile(np.arange(512), (5, 1)), axis=1)[:, :101]  # no bigram twice
    z = np.array([[z_score(GreenBits(wm)(text), wm.gamma) for text in texts] for wm in keys(50)])
    assert abs(z.mean()) < 0.15
    assert z.std(0).mean() == pytest.approx(1, abs=0.15)


def test_repeated_bigrams_widen_z_but_not_z_unique():
    text = np.tile(np.random.default_rng(0).permutation(512)[:50], 5)
    bits = np.array([GreenBits(wm)(text) for wm in keys(300)])
    assert fresh(text).sum() == 50
    assert z_score(bits, 0.25).std() == pytest.approx(np.sqrt(5), rel=0.15)  # each bigram stands five times
    assert z_score(bits, 0.25, where=np.tile(fresh(text), (300, 1))).std() == pytest.approx(1, abs=0.15)


def keys(n):
    """Watermarks of n keys."""
    return [Watermark(512, key=1_000_003 + 2 * k) for k in range(n)]


def test_a_new_key_leaves_the_law_of_z_alone():
    texts = zipf_texts(500, 61, 4096, exponent=0.8)
    one, other = (GreenBits(Watermark(4096, key=key)) for key in (15485863, 7919))
    scores = [[z_unique(text, green(text), 0.25) for text in texts] for green in (one, other)]
    assert scores[0] != scores[1]
    assert stats.ks_2samp(*scores).pvalue > 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(vocab_size=3), "vocab_size=3: expected an int >= 4"),
        (dict(vocab_size=100.0), "vocab_size=100.0"),
        (dict(gamma=0), r"gamma=0: expected a number in \(0, 1\)"),
        (dict(gamma=1.0), "gamma=1.0"),
        (dict(gamma=float("nan")), "gamma=nan"),
        (dict(gamma=0.005), "gamma=0.005: the green list of vocab_size=100 tokens would be empty"),
        (dict(delta=-1), "delta=-1: expected a finite number >= 0"),
        (dict(delta=float("inf")), "delta=inf"),
        (dict(delta=float("nan")), "delta=nan"),
        (dict(key=0), "key=0"),
        (dict(key=2**63), "key=9223372036854775808"),
        (dict(scheme="minhash"), "scheme='minhash': expected one of"),
    ],
)
def test_a_watermark_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Watermark(**{"vocab_size": 100} | settings)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], ValueError, "need at least 2 tokens"),
        ([4], ValueError, "need at least 2 tokens"),
        ([[4, 5]], ValueError, "ids of shape"),
        ([4, -1], ValueError, "token id -1: expected 0 ... 99"),
        ([100, 4], ValueError, "token id 100: expected 0 ... 99"),
        ([4.0, 5.0], TypeError, "ids of dtype float64: expected integers"),
        ([True, False], TypeError, "ids of dtype bool"),
        (["a", "b"], TypeError, "expected integers"),
    ],
)
@pytest.mark.parametrize("scheme", ["lefthash", "selfhash", "unigram"])
def test_bad_ids_are_named(scheme, ids, error, message):
    with pytest.raises(error, match=message):
        GreenBits(Watermark(100, scheme=scheme))(ids)


def test_a_detector_refuses_an_empty_cache_and_lists_that_do_not_exist():
    with pytest.raises(ValueError, match="max_rows=0"):
        GreenBits(Watermark(100), max_rows=0)
    with pytest.raises(ValueError, match="token id 100"):
        GreenBits(Watermark(100)).green_row(100)
    with pytest.raises(ValueError, match="previous token alone"):
        GreenBits(Watermark(100, scheme="selfhash")).green_row(3)


def test_synthid_refuses():
    with pytest.raises(ValueError, match="layers=0"):
        SynthID(layers=0)
    with pytest.raises(ValueError, match="ngram_len=1"):
        SynthID(ngram_len=1)
    with pytest.raises(ValueError, match="at least ngram_len=5 tokens to score one, got 4"):
        synthid_bits(SynthID(), [1, 2, 3, 4])

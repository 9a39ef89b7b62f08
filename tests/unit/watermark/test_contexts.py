"""Next tokens that are watermarked by hand."""

import numpy as np
import pytest

from labkit.watermark import contexts, theory
from labkit.watermark.contexts import PROMPTS, TOP, green_probability, load_contexts, next_token, save_contexts


@pytest.fixture(scope="module")
def stored():
    return load_contexts()


def test_stored_contexts_hold_the_likeliest_tokens_first(stored):
    assert tuple(stored.prompts) == PROMPTS
    assert stored.ids.shape == stored.logits.shape == stored.tokens.shape == (len(PROMPTS), TOP)
    assert (np.diff(stored.logits, axis=1) <= 0).all()
    assert np.exp(stored.logits).sum(1).max() <= 1 + 1e-3
    assert stored.ids.max() < stored.vocab_size


def test_equally_likely_tokens_are_green_at_the_uniform_rate():
    green = np.arange(200) < 50  # γ = 0.25
    for delta in (0.0, 1.5, 2.0):
        rate = green_probability(np.zeros(200), green, delta, 0.7)
        assert rate == pytest.approx(theory.uniform_green_rate(0.25, delta), rel=1e-12)


def test_without_a_bias_only_the_temperature_acts(stored):
    nothing = np.zeros(TOP, dtype=bool)
    probabilities = next_token(stored.logits[0], nothing, 2.0, 0.5)
    expected = np.exp(2 * stored.logits[0].astype(float))
    np.testing.assert_allclose(probabilities, expected / expected.sum(), rtol=1e-6)


def test_a_bias_on_all_tokens_changes_nothing(stored):
    everything = np.ones(TOP, dtype=bool)
    both = [next_token(stored.logits[3], everything, delta, 1.0) for delta in (0.0, 3.0)]
    np.testing.assert_allclose(*both, rtol=1e-6)


def test_the_mean_over_lists_by_lot_respects_the_bound(stored):
    lots = np.random.default_rng(0).random((2000, 1, TOP)) < 0.25
    rates = green_probability(stored.logits, lots, 2.0, 0.7)  # (2000, C)
    before = next_token(stored.logits, np.zeros(TOP), 0.0, 0.7)
    bound = theory.green_rate_bound(theory.spike_entropy(before, 0.25, 2.0), 0.25, 2.0)
    standard_error = rates.std(0) / len(lots) ** 0.5
    assert (rates.mean(0) > bound - 4 * standard_error).all()
    assert (rates.mean(0) < theory.uniform_green_rate(0.25, 2.0) + 4 * standard_error).all()


def test_what_is_saved_is_what_is_loaded(stored, tmp_path):
    save_contexts(stored, tmp_path / "contexts.npz")
    again = load_contexts(tmp_path / "contexts.npz")
    for name, value in vars(stored).items():
        np.testing.assert_array_equal(getattr(again, name), value)


def test_contexts_of_a_model_are_its_own_next_tokens(smollm2, monkeypatch, stored):
    monkeypatch.setattr(contexts, "PROMPTS", PROMPTS[:2])
    built = contexts.build_contexts(*smollm2, top=5)
    assert built.logits.shape == (2, 5)
    np.testing.assert_array_equal(built.ids[:, 0], stored.ids[:2, 0])
    np.testing.assert_allclose(built.logits, stored.logits[:2, :5], atol=0.01)

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Categorical
from torch.distributions import kl_divergence as reference_kl

from labkit.sparsity.calibration import calibrate
from labkit.sparsity.metrics import (
    Eval,
    always_on_fraction,
    evaluate,
    gap_closed,
    kl_divergence,
    layer_error,
    linear_cka,
    log_probs,
    paired,
)
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.theory import energy_lost


@pytest.fixture
def sparse(model, calib):
    with SparseModel(model, calib, 0.5) as sparse:
        yield sparse


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.9])
def test_kl_is_that_of_the_two_distributions(sparse, ids, p):
    sparse.set_sparsity(p)
    with torch.no_grad(), sparse.dense():
        dense = sparse(ids).logits
    logits = sparse(ids).logits
    expected = reference_kl(Categorical(logits=dense), Categorical(logits=logits))
    torch.testing.assert_close(evaluate(sparse, ids).kl, expected.mean(1), rtol=0, atol=1e-5)
    assert (expected > 0.01).any() == (p > 0)


def test_kl_is_zero_exactly_where_nothing_is_masked(sparse, ids):
    kl = {}
    for p in (0.0, 0.05, 0.5):
        sparse.set_sparsity(p)
        kl[p] = evaluate(sparse, ids).kl
    assert kl[0.0].abs().max() <= 1e-6
    assert 1e-6 < kl[0.05].min() < kl[0.5].min()


def test_total_variation_obeys_pinsker(sparse, ids):
    with torch.no_grad(), sparse.dense():
        log_p = sparse(ids).logits.log_softmax(-1)
    log_q = sparse(ids).logits.log_softmax(-1)
    total_variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    kl = kl_divergence(log_p, log_q)
    assert (total_variation <= (kl / 2).sqrt() + 1e-12).all()
    assert total_variation.mean() > 0.05


def test_kl_is_locally_the_fisher_form(generator):
    z = 2 * torch.randn(30, generator=generator, dtype=torch.float64)
    probability = z.softmax(-1)
    fisher = probability.diag() - probability.outer(probability)
    torch.testing.assert_close(fisher @ torch.ones_like(z), torch.zeros_like(z), rtol=0, atol=1e-15)
    assert torch.linalg.eigvalsh(fisher).min() > -1e-15
    for _ in range(5):
        delta = torch.randn(30, generator=generator, dtype=torch.float64)
        step = 1e-2 * delta / delta.norm()
        kl = kl_divergence(z.log_softmax(-1), (z + step).log_softmax(-1))
        assert float(kl / (step @ fisher @ step / 2)) == pytest.approx(1, abs=1e-2)
        shifted = kl_divergence((z + 5).log_softmax(-1), (z + step - 3).log_softmax(-1))
        assert float(shifted) == pytest.approx(float(kl), abs=1e-12)


def test_cka_of_a_representation_with_itself_is_one_up_to_rotation_scale_and_shift(generator):
    x = torch.randn(50, 12, generator=generator)
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator))
    for y in (x, x @ rotation, -3.7 * x, x + torch.randn(12, generator=generator)):
        assert linear_cka(x, y) == pytest.approx(1, abs=1e-6)
    other = torch.randn(50, 8, generator=generator)
    cka = linear_cka(x, other)
    assert 0 < cka < 0.6
    assert linear_cka(x @ rotation, 2 * other + 1) == pytest.approx(cka, abs=1e-6)
    assert linear_cka(other, x) == pytest.approx(cka, abs=1e-12)


def test_cka_compares_the_gram_matrices_of_the_centred_rows(generator):
    x, y = (torch.randn(20, d, generator=generator, dtype=torch.float64) for d in (5, 7))
    centre = torch.eye(20, dtype=torch.float64) - 1 / 20
    k, l = (centre @ z @ z.T @ centre for z in (x, y))  # (n, n)
    assert linear_cka(x, y) == pytest.approx(float((k * l).sum() / (k.norm() * l.norm())), abs=1e-12)


def test_a_constant_shift_is_seen_by_cosine_but_not_by_cka(generator):
    x = torch.randn(50, 12, generator=generator)
    shifted = x + 2 * torch.randn(12, generator=generator)
    assert linear_cka(x, shifted) == pytest.approx(1, abs=1e-6)
    assert torch.cosine_similarity(x, shifted, dim=-1).mean() < 0.9


@pytest.mark.parametrize("shapes", [((3, 2), (4, 2)), ((1, 2), (1, 2))])
def test_cka_needs_the_same_rows_twice(shapes):
    with pytest.raises(ValueError, match=r"expected the same n >= 2 rows"):
        linear_cka(*map(torch.ones, shapes))


def test_always_on_fraction_never_grows_and_starts_with_one_tokens_share(generator):
    acts = torch.randn(40, 300, generator=generator)
    fraction = always_on_fraction(acts, 0.3)
    assert fraction.shape == (40,)
    assert (fraction.diff() <= 0).all()
    expected = [float((acts[: t + 1].abs() > 0.3).all(0).float().mean()) for t in range(40)]
    assert fraction.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
def test_independent_channels_stay_on_with_a_geometric_share(generator, p):
    length, channels = 12, 200_000
    acts = torch.rand(length, channels, generator=generator)
    expected = (1 - p) ** torch.arange(1, length + 1)
    stderr = (expected * (1 - expected) / channels).sqrt()
    assert ((always_on_fraction(acts, p) - expected).abs() <= 4.5 * stderr).all()


def test_unequal_channels_stay_on_longer_by_jensen(generator):
    acts = torch.linspace(0.05, 3, 20_000) * torch.randn(10, 20_000, generator=generator)
    tau = float(acts[:, ::100].abs().median())
    fraction = always_on_fraction(acts, tau)
    assert float(fraction[0]) == pytest.approx(0.5, abs=0.02)
    assert (fraction[1:] > 1.2 * 0.5 ** torch.arange(2, 11)).all()


def test_always_on_fraction_wants_tokens_by_channels():
    with pytest.raises(ValueError, match=r"acts of shape \(1, 2, 3\): expected \(T, d\)"):
        always_on_fraction(torch.ones(1, 2, 3), 0.5)


def test_nll_is_the_models_own_loss_on_real_prose(smollm2, wiki_windows):
    model, _ = smollm2
    windows = wiki_windows["test"][:2]
    scored = evaluate(model, windows)
    with torch.no_grad():
        losses = [float(model(input_ids=w, labels=w).loss) for w in windows.split(1)]
    np.testing.assert_allclose(np.exp(scored.nll.numpy()), np.exp(losses), rtol=1e-5)
    assert scored.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert 10 < scored.perplexity < 60


def test_a_dense_model_agrees_with_itself(model, ids):
    scored = evaluate(model, ids)
    assert scored.kl.tolist() == [0] * 4
    assert scored.agree.tolist() == [1] * 4
    assert scored.drift is None


def test_agreement_is_the_share_of_equal_first_choices(sparse, ids):
    with torch.no_grad(), sparse.dense():
        dense = sparse(ids).logits.argmax(-1)
    expected = (sparse(ids).logits.argmax(-1) == dense).double().mean(1)
    assert 0 < expected.mean() < 1
    assert evaluate(sparse, ids).agree.tolist() == expected.tolist()


def test_a_given_teacher_saves_the_dense_pass(sparse, ids):
    with sparse.dense() as dense:
        teacher = log_probs(dense, ids, batch_size=3)
    given, recomputed = evaluate(sparse, ids, teacher=teacher), evaluate(sparse, ids)
    torch.testing.assert_close(given.kl, recomputed.kl, rtol=0, atol=1e-12)
    assert given.agree.tolist() == recomputed.agree.tolist()


def test_batches_do_not_change_a_windows_score(sparse, ids):
    one, all_at_once = evaluate(sparse, ids, batch_size=1, hidden=True), evaluate(sparse, ids, batch_size=4, hidden=True)
    torch.testing.assert_close(one.nll, all_at_once.nll, rtol=0, atol=1e-9)
    torch.testing.assert_close(one.kl, all_at_once.kl, rtol=0, atol=1e-9)
    np.testing.assert_allclose(one.drift, all_at_once.drift, atol=1e-9)


def test_drift_compares_the_residual_streams_layer_by_layer_without_the_first_token(sparse, ids):
    with torch.no_grad(), sparse.dense():
        dense = sparse(ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        states = sparse(ids, output_hidden_states=True).hidden_states
    drift = evaluate(sparse, ids, hidden=True).drift
    assert drift["layer"].tolist() == [0, 1]
    for row, h, s in zip(drift.itertuples(), dense[1:], states[1:], strict=True):
        h, s = h[:, 1:].reshape(-1, 32).numpy(), s[:, 1:].reshape(-1, 32).numpy()
        norms = np.linalg.norm(h, axis=1), np.linalg.norm(s, axis=1)
        assert row.cosine == pytest.approx(np.mean((h * s).sum(1) / (norms[0] * norms[1])))
        assert row.relative_l2 == pytest.approx(np.mean(np.linalg.norm(s - h, axis=1) / norms[0]))
        assert row.cka == pytest.approx(linear_cka(torch.tensor(h), torch.tensor(s)))
        unit = [torch.tensor(z / n[:, None]) for z, n in zip((h, s), norms, strict=True)]
        assert row.cka_rms == pytest.approx(linear_cka(*unit))
    assert (drift["cosine"] < 0.999).all()


def test_gap_closed_is_counted_in_nats():
    def scored(*nll):
        return Eval(torch.tensor(nll), torch.zeros(2), torch.ones(2))

    dense, teal = scored(2.0, 4.0), scored(3.0, 7.0)
    assert gap_closed(dense, teal, teal) == 0
    assert gap_closed(dense, teal, dense) == 1
    assert gap_closed(dense, teal, scored(2.5, 6.5)) == pytest.approx(0.25)
    assert gap_closed(dense, teal, scored(4.0, 7.0)) == pytest.approx(-0.25)


def test_paired_difference_has_the_standard_error_of_the_paired_t_test(generator):
    a, b = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    mean, stderr = paired(a, b)
    assert mean / stderr == pytest.approx(stats.ttest_rel(a, b).statistic)
    assert mean == pytest.approx(float(a.mean() - b.mean()))


def test_scores_read_in_one_line(sparse, ids):
    assert repr(evaluate(sparse, ids)).startswith("Eval(perplexity=")
    assert repr(evaluate(sparse, ids)).endswith("B=4)")


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (torch.zeros(2, 1, dtype=torch.long), r"shape \(2, 1\): a window needs at least 2 tokens"),
        (torch.zeros(0, 9, dtype=torch.long), r"shape \(0, 9\)"),
        (torch.zeros(9, dtype=torch.long), r"shape \(9,\): token ids must be \(B, T\)"),
        (torch.tensor([[1, 61]]), r"tokens 1 … 61: ids must lie in 0 … 60"),
        (torch.tensor([[-1, 5]]), r"tokens -1 … 5: ids must lie in 0 … 60"),
        (torch.zeros(1, 65, dtype=torch.long), "T=65 tokens, but the model has positions for 64"),
    ],
)
def test_bad_windows_are_refused(sparse, windows, message):
    with pytest.raises(ValueError, match=message):
        evaluate(sparse, windows)


def test_a_teacher_of_other_windows_is_refused(sparse, ids):
    with pytest.raises(ValueError, match=r"teacher of shape \(4, 19, 61\) does not fit input_ids \(4, 20\)"):
        evaluate(sparse, ids, teacher=torch.zeros(4, 19, 61))


@pytest.mark.parametrize("score", ["magnitude", "wina"])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.6])
def test_layer_error_is_what_the_sparse_layer_does(one_linear, generator, score, p):
    weight = torch.randn(17, 24, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 40, 24, generator=generator, dtype=torch.float64)
    layer = one_linear(weight)
    calib = calibrate(layer, x, wina=True, resolution=10**6)
    dense = layer(x).logits
    with SparseModel(layer, calib, p, score=score, dense_prefix=0) as sparse:
        lost = dense - sparse(inputs_embeds=x).logits
    assert layer_error(weight, x[0], p, score) == pytest.approx(float(lost.norm() / dense.norm()), rel=1e-9)


def test_a_random_masks_layer_error_is_the_root_of_p(generator):
    weight, x = (torch.randn(200, 200, generator=generator) for _ in range(2))
    assert layer_error(weight, x, 0.5, "random") == pytest.approx(math.sqrt(0.5), rel=0.02)
    assert layer_error(weight, x, 0.5) == pytest.approx(math.sqrt(energy_lost(0.5)), rel=0.02)


@pytest.mark.parametrize(
    ("p", "score", "message"), [(1.0, "wina", r"p=1\.0"), (math.nan, "wina", "p=nan"), (0.5, "size", "score='size'")]
)
def test_a_layer_error_of_an_unknown_mask_is_refused(p, score, message):
    with pytest.raises(ValueError, match=message):
        layer_error(torch.ones(2, 3), torch.ones(4, 3), p, score)

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from labkit.sparsity.calibration import calibrate
from labkit.sparsity.metrics import evaluate, kl_divergence
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.spon import (
    fit_spon,
    interpolate_alpha,
    load_alpha,
    save_alpha,
    spon_steps,
    tail_inputs,
    tail_model,
)


@pytest.fixture
def sparse(model, calib):
    with SparseModel(model, calib, 0.6) as sparse:
        yield sparse


@pytest.fixture
def last_layer(one_linear):
    """A model that is its last projection, 8 -> 20, half sparse; its inputs x (3, 25, 8); S(x), W and dense probabilities."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 25, 8, generator=generator, dtype=torch.float64) + 0.7  # a mean residual to recover
    model = one_linear(weight)
    calib = calibrate(model, x, levels=(0.6,), resolution=10**6)
    with SparseModel(model, calib, 0.6, dense_prefix=0) as sparse:
        (site,) = sparse.sites
        masked = x * (x.abs() > sparse.thresholds()[site])
        yield sparse, site, x, masked, weight, (x @ weight.T).softmax(-1)


def last_layer_loss(sparse, site, x, alpha):
    """Mean KL(dense || sparse) as the model computes it."""
    with torch.no_grad(), sparse.dense():
        log_p = sparse(inputs_embeds=x).logits.log_softmax(-1)
    sparse.set_alpha({site: alpha})
    return kl_divergence(log_p, sparse(inputs_embeds=x).logits.log_softmax(-1)).mean()


def test_gradient_of_the_last_layer_is_w_transposed_times_the_mean_difference(last_layer):
    sparse, site, x, masked, weight, probability = last_layer
    for scale in (0.0, 0.3, 2.0):
        alpha = scale * torch.linspace(-1, 1, 8, dtype=torch.float64)
        alpha.requires_grad_(True)
        (gradient,) = torch.autograd.grad(last_layer_loss(sparse, site, x, alpha), alpha)
        sparse_probability = ((masked + alpha.detach()) @ weight.T).softmax(-1)
        formula = weight.T @ (sparse_probability - probability).mean((0, 1))
        torch.testing.assert_close(gradient, formula, rtol=0, atol=1e-8)


def test_the_last_layers_problem_is_convex_and_matches_mean_outputs(last_layer):
    sparse, site, x, masked, weight, probability = last_layer

    def objective(values):
        alpha = torch.tensor(values, requires_grad=True)
        loss = last_layer_loss(sparse, site, x, alpha)
        (gradient,) = torch.autograd.grad(loss, alpha)
        return loss.item(), gradient.numpy()

    options = {"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-9}
    starts = np.zeros(8), np.random.default_rng(0).normal(scale=3, size=8)
    first, second = (minimize(objective, s, jac=True, method="L-BFGS-B", options=options) for s in starts)
    assert first.fun == pytest.approx(second.fun, abs=1e-6)
    np.testing.assert_allclose(first.x, second.x, atol=1e-4)
    best = ((masked + torch.tensor(first.x)) @ weight.T).softmax(-1)
    residual = weight.T @ (best - probability).mean((0, 1))
    assert residual.abs().max() <= 1e-6

    result = fit_spon(sparse, [x], steps=400, lr=0.1)
    assert float(last_layer_loss(sparse, site, x, result.alpha[site])) == pytest.approx(first.fun, abs=1e-6)
    assert result.loss_trace[0] > 1.05 * first.fun


def test_gradients_with_respect_to_the_neurons_are_right(model, ids, calib):
    windows = ids[:1, :6]
    with torch.no_grad():
        log_p = model(windows).logits.log_softmax(-1)
    with SparseModel(model, calib, 0.5, dense_prefix=1) as sparse:
        sites = [site for site in sparse.sites if str(site) in ("0.q", "0.o", "0.down", "1.up")]

        def loss(*alphas):
            sparse.set_alpha(dict(zip(sites, alphas, strict=True)))
            return kl_divergence(log_p, sparse(windows).logits.log_softmax(-1)).mean()

        generator = torch.Generator().manual_seed(0)
        alphas = [0.1 * torch.randn(s.width, generator=generator, dtype=torch.float64) for s in sites]
        assert torch.autograd.gradcheck(loss, [a.requires_grad_(True) for a in alphas], eps=1e-7, atol=1e-6)


def test_the_loss_is_the_forward_kl_over_every_position(sparse, ids):
    expected = float(evaluate(sparse, ids[:2]).kl.mean())
    step = next(spon_steps(sparse, [ids[:2]], steps=1))
    assert step.step == 1
    assert step.loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_lowers_the_kl_of_its_windows(sparse, ids, seed):
    before = evaluate(sparse, ids).kl
    result = fit_spon(sparse, ids.split(2), steps=30, lr=0.05, seed=seed)
    after = evaluate(sparse, ids).kl
    assert (after < before).all()
    assert after.mean() < 0.9 * before.mean()
    assert len(result.loss_trace) == 30


@pytest.mark.parametrize("loss", ["reverse-kl", "hidden-mse"])
def test_other_losses_lower_themselves(sparse, ids, loss):
    def measured():
        with torch.no_grad():
            with sparse.dense() as dense:
                p = dense(ids, output_hidden_states=True)
            q = sparse(ids, output_hidden_states=True)
        if loss == "reverse-kl":
            return float(kl_divergence(q.logits.log_softmax(-1), p.logits.log_softmax(-1)).mean())
        h, s = p.hidden_states[-1], q.hidden_states[-1]
        return float((s - h).square().sum() / h.square().sum())

    before = measured()
    result = fit_spon(sparse, [ids], steps=30, lr=0.05, loss=loss)
    assert result.loss_trace[0] == pytest.approx(before, rel=1e-9)
    assert measured() < 0.95 * before


def test_one_learning_rate_moves_every_site_by_its_rms(sparse, ids, calib):
    step = next(spon_steps(sparse, [ids], steps=1, lr=0.01))
    for site, alpha in step.alpha.items():
        moved = alpha[alpha != 0].abs()
        assert moved.max() == pytest.approx(0.01 * calib.rms(site), rel=1e-2)  # Adam's first step is lr itself


def test_the_learning_rate_falls_as_a_cosine_to_zero(sparse, ids):
    moves = {}
    for steps in (2, 10**6):
        sparse.set_alpha(None)
        run = spon_steps(sparse, [ids], steps=steps, lr=0.01)
        first, second = next(run).alpha, next(run).alpha
        moves[steps] = torch.cat([second[site] - first[site] for site in sparse.sites])
    torch.testing.assert_close(moves[2], moves[10**6] / 2, rtol=1e-6, atol=0)  # cos(pi / 2) = 0, half way


def test_large_gradients_are_clipped(sparse, ids, monkeypatch):
    norms = []
    clip = torch.nn.utils.clip_grad_norm_

    def record(parameters, limit):
        parameters = list(parameters)
        clip(parameters, limit)
        norms.append(float(torch.cat([p.grad for p in parameters]).norm()))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    for loss in ("kl", "reverse-kl"):
        fit_spon(sparse, [ids], steps=3, lr=0.05, loss=loss)
    assert max(norms) <= 1 + 1e-6
    assert len(norms) == 6


def test_free_output_biases_are_trained_in_place_of_neurons(sparse, ids):
    before = evaluate(sparse, ids).kl.mean()
    result = fit_spon(sparse, [ids], steps=30, lr=0.05, output_bias=True)
    assert {site: v.shape for site, v in result.alpha.items()} == {s: s.weight[:, 0].shape for s in sparse.sites}
    assert sparse.alpha == {}
    assert evaluate(sparse, ids).kl.mean() < 0.9 * before


@pytest.mark.parametrize("output_bias", [False, True])
def test_training_may_start_from_the_mean_residual(sparse, ids, calib, output_bias):
    def mean(site):
        residual = calib.mean_residual(site, 0.6)
        return site.weight @ residual if output_bias else residual

    install = sparse.set_output_bias if output_bias else sparse.set_alpha
    install({site: mean(site) for site in sparse.sites})
    expected = float(evaluate(sparse, ids).kl.mean())
    install(None)
    step = next(spon_steps(sparse, [ids], steps=1, lr=1e-9, init="mean", output_bias=output_bias))
    assert step.loss == pytest.approx(expected, rel=1e-9)
    for site, vector in step.alpha.items():
        torch.testing.assert_close(vector, mean(site), rtol=0, atol=1e-7)


def test_neurons_are_put_where_asked(sparse, ids):
    result = fit_spon(sparse, [ids], steps=2, sites="o+down", layers=[1])
    assert [str(site) for site in result.alpha] == ["1.o", "1.down"]
    assert repr(result).startswith("SponResult(2 sites, 2 steps, loss ")


def test_every_step_leaves_its_neurons_in_the_model(sparse, ids):
    losses = []
    for state in spon_steps(sparse, [ids], steps=10, lr=0.05):
        assert all(sparse.alpha[site] is vector for site, vector in state.alpha.items())
        assert not any(vector.requires_grad for vector in state.alpha.values())
        losses.append(state.loss)
        if state.step == 4:
            break
    assert len(losses) == 4
    assert evaluate(sparse, ids).kl.mean() < losses[0]


def test_the_seed_orders_the_batches_and_every_epoch_sees_all(sparse, ids):
    seen = {0: [], 1: []}
    record = sparse.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen[seed].append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    traces = {}
    for seed in (0, 1):
        sparse.set_alpha(None)
        traces[seed] = fit_spon(sparse, ids.split(1), steps=8, seed=seed).loss_trace
    record.remove()
    windows = sorted(ids.tolist())
    for order in seen.values():
        student = order[::2]  # teacher and student by turns
        assert student == order[1::2]
        assert sorted(student[:4]) == sorted(student[4:]) == windows
    assert seen[0] != seen[1]
    sparse.set_alpha(None)
    assert fit_spon(sparse, ids.split(1), steps=8, seed=0).loss_trace == traces[0]


def test_a_callback_hears_of_every_step(sparse, ids):
    heard = []
    result = fit_spon(sparse, [ids], steps=3, on_step=heard.append)
    assert [state.step for state in heard] == [1, 2, 3]
    assert [state.loss for state in heard] == result.loss_trace
    assert heard[-1].alpha is result.alpha


def test_saved_neurons_come_back_in_half_precision(sparse, ids, model, tmp_path):
    file = tmp_path / "alpha.safetensors"
    result = fit_spon(sparse, [ids], steps=2, lr=0.05, sites="o+down", layers=[1])
    save_alpha(file, result.alpha, {"run": "test"})
    loaded = load_alpha(file, model)
    assert [str(site) for site in loaded] == ["0.o", "0.down", "1.o", "1.down"]
    for site, vector in loaded.items():
        assert vector.dtype == torch.float64
        expected = result.alpha.get(site, torch.zeros(site.width, dtype=torch.float64))
        torch.testing.assert_close(vector, expected, rtol=1e-3, atol=1e-6)
    sparse.set_alpha(loaded)
    assert list(tmp_path.iterdir()) == [file]


def test_neurons_of_another_size_are_refused(sparse, model, ids, tiny, tmp_path):
    file = tmp_path / "alpha.safetensors"
    save_alpha(file, {site: torch.ones(site.width) for site in find_sites(model, layers=[0])})
    with pytest.raises(ValueError, match=r"holds \(1, 32\) for 'q', but site 1\.q of this model reads 32 channels"):
        load_alpha(file, model)
    save_alpha(file, {site: torch.ones(site.width + 1) for site in find_sites(model, "down")})
    with pytest.raises(ValueError, match=r"holds \(2, 49\) for 'down', but site 0\.down of this model reads 48 channels"):
        load_alpha(file, model)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("layout", ["llama", "phi3", "gemma3"])
def test_the_tail_of_a_model_continues_its_hidden_states(tiny, ids, layout, blocks):
    model = tiny(layout)
    tail = tail_model(model, blocks)
    states = tail_inputs(model, ids, blocks)
    assert states.shape == (4, 20, 32)
    torch.testing.assert_close(tail(inputs_embeds=states).logits, model(ids).logits, rtol=0, atol=1e-6)
    assert len(find_sites(tail)) == blocks * len(find_sites(model)) // 2
    assert {id(p) for p in tail.parameters()} <= {id(p) for p in model.parameters()}  # shared weights
    assert model.config.num_hidden_layers == len(model.model.layers) == 2


def test_the_tail_is_trained_while_the_model_is_in_other_use(model, calib, ids):
    dense = model(ids).logits
    tail, states = tail_model(model, 1), tail_inputs(model, ids, 1)
    with SparseModel(tail, calibrate(tail, states), 0.6) as part:
        trace = fit_spon(part, [states], steps=20, lr=0.05).loss_trace
        assert trace[-1] < 0.9 * trace[0]
        part.absorb()
        assert torch.equal(model(ids).logits, dense)
        with SparseModel(model, calib, 0.5) as whole:
            assert not torch.equal(whole(ids).logits, dense)
            alone = part(inputs_embeds=states).logits
        assert torch.equal(part(inputs_embeds=states).logits, alone)
    assert torch.equal(model(ids).logits, dense)


def test_between_trained_sparsities_neurons_are_interpolated(model, random_vectors):
    low, high = (random_vectors(find_sites(model), seed=seed) for seed in (0, 1))
    trained = {0.6: high, 0.3: low}
    for p, weights in {0.0: (0, 0), 0.15: (0.5, 0), 0.3: (1, 0), 0.4: (2 / 3, 1 / 3), 0.6: (0, 1), 0.9: (0, 1)}.items():
        mixed = interpolate_alpha(trained, p)
        for site in find_sites(model):
            torch.testing.assert_close(mixed[site], weights[0] * low[site] + weights[1] * high[site])
    with pytest.raises(ValueError, match="trained is empty"):
        interpolate_alpha({}, 0.5)


@pytest.mark.parametrize("blocks", [0, 3])
def test_a_tail_has_some_of_the_models_blocks(model, blocks):
    with pytest.raises(ValueError, match=f"blocks={blocks}: expected 1 … 2"):
        tail_model(model, blocks)


def test_the_tail_of_an_unlike_model_is_refused(tiny):
    with pytest.raises(ValueError, match="model=GPT2LMHeadModel keeps its blocks elsewhere"):
        tail_model(tiny("gpt2"), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0, lr=0.005: both must be positive"),
        ({"steps": -3}, "steps=-3"),
        ({"lr": 0.0}, "steps=1, lr=0.0"),
        ({"sites": []}, r"which=\[\]"),
        ({"sites": "head"}, "which='head'"),
        ({"layers": []}, r"layers=\[\]"),
        ({"init": "ones"}, "init='ones'.*expected init 'zero' or 'mean'"),
        ({"loss": "l2"}, "loss='l2'.*loss one of"),
        ({"batches": []}, "batches is empty"),
        ({"batches": [torch.zeros(2, 1, dtype=torch.long)]}, "a window needs at least 2 tokens"),
        ({"batches": [torch.full((1, 4), 61)]}, r"tokens 61 … 61: ids must lie in 0 … 60"),
    ],
)
def test_bad_options_are_refused(sparse, ids, options, message):
    arguments = {"batches": [ids], "steps": 1} | options
    with pytest.raises(ValueError, match=message):
        fit_spon(sparse, **arguments)


def test_a_mean_start_needs_the_mean_residual_of_that_sparsity(sparse, ids):
    sparse.set_sparsity(0.3)
    with pytest.raises(ValueError, match=r"p=0\.3: mean residuals were calibrated at \[0\.5, 0\.6\]"):
        fit_spon(sparse, [ids], steps=1, init="mean")


def test_a_loss_that_is_not_finite_stops_the_training_and_names_the_step(sparse, ids, model):
    states = model.get_input_embeddings()(ids).clone()
    steps = spon_steps(sparse, [states], steps=5)
    next(steps)
    states.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 2 of 5: lower lr=0\.005"):
        next(steps)
    assert sparse.alpha == {}

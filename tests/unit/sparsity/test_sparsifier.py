import itertools
import math
from dataclasses import replace

import pytest
import torch

from labkit.sparsity.calibration import calibrate
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.spon import fit_spon


@pytest.fixture
def sparse(model, calib):
    """The tiny Llama, every token half sparse."""
    with SparseModel(model, calib, 0.5, dense_prefix=0) as sparse:
        yield sparse


@pytest.fixture
def layer(one_linear):
    """One linear layer 24 -> 17 with a bias, its calibration, and inputs (5, 40, 24) for it."""
    generator = torch.Generator().manual_seed(4)
    weight, bias, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(17, 24), (17,), (5, 40, 24)])
    model = one_linear(weight, bias)
    return model, calibrate(model, x, wina=True, resolution=10**6), x


def observed(model, ids):
    """What each linear layer of the wrapped model reads and returns."""
    seen = {}
    handles = [
        site.linear.register_forward_hook(lambda _, args, y, site=site: seen.update({site: (args[0], y)}))
        for site in find_sites(model)
    ]
    logits = model(ids).logits
    for handle in handles:
        handle.remove()
    return seen, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["llama", "llama with biases", "gpt2", "phi3", "opt", "gemma3"])
def test_at_sparsity_zero_the_model_is_the_dense_one(tiny, ids, layout, dtype):
    model = tiny(layout, dtype)
    dense = model(ids).logits
    calib = calibrate(model, ids)
    with SparseModel(model, calib, 0.0, dense_prefix=0) as sparse:
        assert (sparse(ids).logits - dense).abs().max() <= 1e-6
        sparse.set_sparsity(0.5)
        assert (sparse(ids).logits - dense).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["llama with biases", "gpt2", "phi3", "opt", "gemma3"])
def test_every_site_reads_its_input_without_the_small_entries(tiny, ids, layout):
    model = tiny(layout)
    calib = calibrate(model, ids)
    seen = {}

    def record(site, x):
        seen[site] = x.clone()

    sites = find_sites(model)
    handles = [s.linear.register_forward_pre_hook(lambda _, args, s=s: record(s, args[0])) for s in sites]
    with SparseModel(model, calib, 0.5, dense_prefix=0) as sparse:  # its hooks come after
        masked, _ = observed(model, ids)
        taus, shares = sparse.thresholds(), sparse.actual_sparsity()
    for handle in handles:
        handle.remove()
    for site in sites:
        x, (read, _) = seen[site], masked[site]
        assert torch.equal(read, torch.where(x.abs() > taus[site], x, 0))
        assert shares[site] == pytest.approx(float((read == 0).double().mean()), abs=1e-6)


def test_an_entry_at_the_threshold_is_zeroed(layer):
    model, calib, x = layer
    with SparseModel(model, calib, 0.5, dense_prefix=0) as sparse:
        tau = sparse.thresholds()[sparse.sites[0]]
        assert (x.abs() == tau).sum() == 1
        sparse(inputs_embeds=x)
        assert sparse.actual_sparsity()[sparse.sites[0]] == pytest.approx(float((x.abs() <= tau).double().mean()), abs=1e-12)


def test_when_everything_is_masked_each_layer_returns_its_bias_plus_w_alpha(tiny, ids, random_vectors):
    model = tiny("llama with biases")
    calib = calibrate(model, ids)
    infinite = {key: torch.full_like(table, math.inf) for key, table in calib.tables.items()}
    with SparseModel(model, replace(calib, tables=infinite), 1 - 1e-12, dense_prefix=0) as sparse:
        assert set(sparse.thresholds().values()) == {math.inf}
        sparse.set_alpha(alpha := random_vectors(sparse.sites))
        seen, logits = observed(model, ids)
        assert set(sparse.actual_sparsity().values()) == {1.0}
    for site, (_, y) in seen.items():
        expected = site.linear.bias + site.weight @ alpha[site]
        torch.testing.assert_close(y, expected.expand_as(y), rtol=0, atol=1e-12)
        assert (y == y[:1, :1]).all()  # the same for every token
    assert logits.std() > 0.1


@pytest.mark.parametrize("score", ["magnitude", "wina"])
@pytest.mark.parametrize("mode", ["threshold", "topk"])
def test_masks_are_nested(layer, score, mode):
    model, calib, x = layer
    (site,) = find_sites(model)
    supports = []
    with SparseModel(model, calib, 0.0, score=score, mode=mode, dense_prefix=0) as sparse:
        for p in (0.0, 0.1, 0.3, 0.5, 0.6, 0.9):
            sparse.set_sparsity(p)
            reads = []
            handle = site.linear.register_forward_pre_hook(lambda _, args, reads=reads: reads.append(args[0] != 0))
            sparse(inputs_embeds=x)
            handle.remove()
            supports += reads
    for denser, sparser in itertools.pairwise(supports):
        assert (denser | ~sparser).all()
        assert sparser.sum() < denser.sum()


@pytest.mark.parametrize("layout", ["llama", "llama with biases", "gpt2", "phi3"])
@pytest.mark.parametrize("dense_prefix", [0, 3, 0.01])
def test_absorbed_neurons_give_the_same_logits(tiny, ids, random_vectors, layout, dense_prefix):
    model = tiny(layout)
    calib = calibrate(model, ids)
    with SparseModel(model, calib, 0.6, dense_prefix=dense_prefix) as sparse:
        without = sparse(ids).logits
        sparse.set_alpha(alpha := random_vectors(sparse.sites))
        before = sparse(ids).logits
        biases = sparse.absorb()
        assert set(biases) == set(sparse.sites)
        for site in sparse.sites:
            assert site.linear.bias.data_ptr() == biases[site].data_ptr()
            assert biases[site].shape == (site.weight.shape[0],)
        assert (sparse(ids).logits - before).abs().max() <= 1e-9
        sparse.absorb()
        assert (sparse(ids).logits - before).abs().max() <= 1e-9  # once more changes nothing
        sparse.set_alpha(alpha)
        assert (sparse(ids).logits - before).abs().max() == 0
        sparse.set_alpha(None)
        assert (sparse(ids).logits - without).abs().max() == 0
    assert (before - without).abs().max() > 0.1


def test_absorbed_neurons_decode_the_same_tokens_greedily(model, calib, ids, random_vectors):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with SparseModel(model, calib, 0.6) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites))
        before = model.generate(ids[:1, :6], **options)
        sparse.absorb()
        assert torch.equal(model.generate(ids[:1, :6], **options), before)
    assert not torch.equal(model.generate(ids[:1, :6], **options), before)


def test_several_neurons_are_one_their_sum(sparse, ids, random_vectors):
    neurons = [random_vectors(sparse.sites, seed=k) for k in range(4)]
    handles = [
        site.linear.register_forward_hook(lambda _, _args, y, shift=site.weight @ alpha[site]: y + shift)
        for alpha in neurons
        for site in sparse.sites
    ]
    several = sparse(ids).logits
    for handle in handles:
        handle.remove()
    sparse.set_alpha({site: sum(alpha[site] for alpha in neurons) for site in sparse.sites})
    assert (sparse(ids).logits - several).abs().max() <= 1e-6


def test_a_free_output_bias_of_w_alpha_is_the_neuron(sparse, ids, random_vectors):
    alpha = random_vectors(sparse.sites)
    sparse.set_alpha(alpha)
    neuron = sparse(ids).logits
    sparse.set_alpha(None)
    without = sparse(ids).logits
    sparse.set_output_bias({site: site.weight @ alpha[site] for site in sparse.sites})
    assert (sparse(ids).logits - neuron).abs().max() <= 1e-9
    sparse.set_output_bias(None)
    assert (sparse(ids).logits - without).abs().max() == 0


@pytest.mark.parametrize("dense_prefix", [0, 3])
def test_free_output_biases_are_absorbed_beside_the_neurons(tiny, ids, random_vectors, dense_prefix):
    model = tiny("llama with biases")
    with SparseModel(model, calibrate(model, ids), 0.6, dense_prefix=dense_prefix) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites[:8]))
        sparse.set_output_bias({site: torch.ones_like(site.weight[:, 0]) for site in sparse.sites[5:]})
        before = sparse(ids).logits
        biases = sparse.absorb()
        for site in sparse.sites:
            assert torch.equal(site.linear.bias, biases[site])
        assert (sparse(ids).logits - before).abs().max() <= 1e-9
        sparse.set_output_bias(None)
        assert (sparse(ids).logits - before).abs().max() > 0.1


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_random_masks_lose_share_p_and_thresholds_lose_less(layer, p):
    model, calib, _ = layer
    x = torch.randn(20, 50, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    dense = model(x).logits
    lost = {}
    for score in ("magnitude", "random", "random-rescaled"):
        with SparseModel(model, calib, p, score=score, dense_prefix=0) as sparse:
            lost[score] = float(
                (sparse(inputs_embeds=x).logits - dense).square().sum() / (dense - model.q_proj.bias).square().sum()
            )
            assert sparse.actual_sparsity()[sparse.sites[0]] == pytest.approx(p, abs=0.02)
    assert lost["random"] == pytest.approx(p, rel=0.05)
    assert lost["random-rescaled"] == pytest.approx(p / (1 - p), rel=0.05)  # unbiased, and noisier
    assert lost["magnitude"] < 0.65 * p


def test_random_masks_follow_the_seed(model, calib, ids):
    logits = []
    for seed in (0, 0, 1):
        with SparseModel(model, calib, 0.5, score="random", seed=seed) as sparse:
            logits.append(sparse(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def wina_and_teal_masks(model, calib, x, k):
    masks = {}
    for score in ("wina", "magnitude"):
        with SparseModel(model, calib, 1 - k / x.shape[-1], score=score, mode="topk", dense_prefix=0) as sparse:
            seen = []
            handle = sparse.sites[0].linear.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0] != 0))
            sparse(inputs_embeds=x)
            handle.remove()
            masks[score] = seen[0].reshape(-1, x.shape[-1])
    return masks


@pytest.fixture
def orthogonal_columns():
    """W (12, 10) with orthonormal columns."""
    q, _ = torch.linalg.qr(torch.randn(12, 10, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    return q


def test_with_equal_column_norms_wina_is_teal(one_linear, orthogonal_columns):
    x = torch.randn(2, 20, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    model = one_linear(2 * orthogonal_columns)
    calib = calibrate(model, x, wina=True)
    masks = wina_and_teal_masks(model, calib, x, 4)
    assert torch.equal(masks["wina"], masks["magnitude"])
    for p in (0.3, 0.6):
        logits = []
        for score in ("wina", "magnitude"):
            with SparseModel(model, calib, p, score=score) as sparse:
                logits.append(sparse(inputs_embeds=x).logits)
        assert torch.equal(*logits)


def test_with_orthogonal_columns_wina_is_the_best_of_all_masks(one_linear, orthogonal_columns):
    x = torch.randn(1, 20, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    weight = orthogonal_columns * torch.linspace(0.2, 3, 10, dtype=torch.float64)
    model = one_linear(weight)
    masks = wina_and_teal_masks(model, calibrate(model, x, wina=True), x, 4)
    candidates = torch.tensor([[j in kept for j in range(10)] for kept in itertools.combinations(range(10), 4)])  # (210, 10)
    for token, wina, teal in zip(x[0], masks["wina"], masks["magnitude"], strict=True):
        errors = ((token * ~candidates) @ weight.T).norm(dim=1)
        assert (weight @ (token * ~wina)).norm() <= errors.min() + 1e-12
        assert wina.sum() == teal.sum() == 4
    assert not torch.equal(masks["wina"], masks["magnitude"])


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9])
def test_topk_keeps_the_largest_entries_of_each_token(sparse, model, calib, ids, p):
    sparse.unwrap()
    with SparseModel(model, calib, p, mode="topk", dense_prefix=0):
        seen, _ = observed(model, ids)
    for site, (read, _) in seen.items():
        assert (read.count_nonzero(dim=-1) == math.floor((1 - p) * site.width + 1e-9)).all()


def test_the_dense_prefix_is_the_original_model(model, calib, ids, random_vectors):
    dense = model(ids).logits
    with SparseModel(model, calib, 0.6, dense_prefix=5) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites))
        sparse.set_output_bias({site: torch.ones_like(site.weight[:, 0]) for site in sparse.sites})
        logits = sparse(ids).logits
    torch.testing.assert_close(logits[:, :5], dense[:, :5], rtol=0, atol=1e-12)
    assert (logits[:, 5] - dense[:, 5]).abs().min() > 0


@pytest.mark.parametrize(("share", "tokens"), [(0.0, 0), (0.01, 1), (0.1, 2), (0.5, 10), (0, 0), (3, 3)])
def test_a_share_of_the_sequence_stays_dense_but_at_least_one_token(model, calib, ids, share, tokens):
    dense = model(ids).logits
    with SparseModel(model, calib, 0.6, dense_prefix=share) as sparse:
        changed = (sparse(ids).logits != dense).any(-1).any(0)
    assert changed.tolist() == [False] * tokens + [True] * (20 - tokens)


@pytest.mark.parametrize("dense_prefix", [0, 4, 0.25])
def test_a_cached_continuation_is_the_full_forward_pass(model, calib, ids, random_vectors, dense_prefix):
    with SparseModel(model, calib, 0.6, dense_prefix=dense_prefix) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites))
        full = sparse(ids).logits
        sparse.dense_prefix = 5 if dense_prefix == 0.25 else dense_prefix  # a share refers to the first pass
        expected = sparse(ids).logits
        assert torch.equal(expected, full)
        first = sparse(ids[:, :12], use_cache=True)
        rest = sparse(ids[:, 12:], cache=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, rest.logits), 1), full, rtol=0, atol=1e-9)


def test_generation_never_returns_to_the_dense_prefix(model, calib, ids):
    with SparseModel(model, calib, 0.6, dense_prefix=0.25) as sparse:
        prompt = sparse(ids[:1, :8], use_cache=True)  # two dense tokens
        step = sparse(ids[:1, 8:9], cache=prompt.past_key_values, use_cache=True)
        sparse.dense_prefix = 2
        torch.testing.assert_close(step.logits, sparse(ids[:1, :9]).logits[:, 8:], rtol=0, atol=1e-9)


def test_within_dense_the_model_is_the_teacher(model, calib, ids, random_vectors):
    dense = model(ids).logits
    with SparseModel(model, calib, 0.6) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites))
        for absorbed in (False, True):
            if absorbed:
                sparse.absorb()
            expected, shares = sparse(ids).logits, sparse.actual_sparsity()
            with sparse.dense() as teacher:
                assert torch.equal(teacher(ids).logits, dense)
            assert sparse.actual_sparsity() == shares
            assert torch.equal(sparse(ids).logits, expected)


def test_pretrained_weights_stay_frozen_and_unwrap_restores_the_model(tiny, ids):
    model = tiny("llama with biases")
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    modules = list(model.modules())
    dense = model(ids).logits
    calib = calibrate(model, ids)
    sparse = SparseModel(model, calib, 0.5)
    fit_spon(sparse, [ids], steps=3, lr=0.05)
    sparse.absorb()
    assert sparse.unwrap() is model
    assert [a is b for a, b in zip(model.modules(), modules, strict=True)] == [True] * len(modules)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
        assert parameter.grad is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.equal(model(ids).logits, dense)


def test_layers_without_a_bias_get_one_only_while_absorbed(model, calib, ids, random_vectors):
    with SparseModel(model, calib, 0.5) as sparse:
        sparse.set_alpha(random_vectors(sparse.sites[:3]))
        assert set(sparse.absorb()) == set(sparse.sites[:3])
        assert [site.linear.bias is None for site in sparse.sites] == [False] * 3 + [True] * 11
    assert all(site.linear.bias is None for site in sparse.sites)


def test_each_site_may_have_its_own_sparsity(model, calib, ids):
    levels = {site: 0.1 + 0.05 * i for i, site in enumerate(find_sites(model))}
    with SparseModel(model, calib, levels, dense_prefix=0) as sparse:
        assert sparse.thresholds() == {site: calib.quantile(site, p) for site, p in levels.items()}
        sparse(ids)
        assert sparse.actual_sparsity()[sparse.sites[0]] == pytest.approx(0.1, abs=0.01)
        assert "42% sparse by magnitude" in repr(sparse)


@pytest.mark.parametrize("p", [-0.1, 1, 1.0, math.nan, math.inf, "0.5"])
def test_sparsity_outside_zero_to_one_is_refused(model, calib, p):
    with pytest.raises(ValueError, match=rf"sparsity={p!r} at site 0\.q: expected a share in \[0, 1\)"):
        SparseModel(model, calib, p)
    with SparseModel(model, calib, 0.5) as sparse, pytest.raises(ValueError, match="sparsity="):
        sparse.set_sparsity(dict.fromkeys(sparse.sites, p))


def test_a_dictionary_must_name_the_models_sites(model, calib, tiny):
    sites = find_sites(model)
    with pytest.raises(ValueError, match=r"sparsity: 0 unknown sites \[\], 1 missing \['1.down'\]"):
        SparseModel(model, calib, dict.fromkeys(sites[:-1], 0.5))
    foreign = find_sites(tiny("gpt2"))[0]
    with pytest.raises(ValueError, match=r"1 unknown sites \['0.qkv'\], 0 missing"):
        SparseModel(model, calib, dict.fromkeys([*sites, foreign], 0.5))


def test_a_model_is_wrapped_once(model, calib):
    first = SparseModel(model, calib, 0.5)
    with pytest.raises(ValueError, match=r"already wrapped by a SparseModel: call its unwrap\(\) first"):
        SparseModel(model, calib, 0.5)
    first.unwrap()
    with SparseModel(model, calib, 0.5):
        first.unwrap()  # says nothing about the second
        with pytest.raises(ValueError, match="already wrapped"):
            SparseModel(model, calib, 0.5)


def test_a_calibration_of_another_model_is_refused(tiny, calib):
    with pytest.raises(ValueError, match=f"calib was made for another model .fingerprint {calib.fingerprint}"):
        SparseModel(tiny("llama with biases"), calib, 0.5)


@pytest.mark.parametrize("attribute", ["alpha", "bias"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v: v[:-1], r"at site 0.up: expected \(N,\) torch.float64 on cpu, got \(M,\)"),
        (lambda v: v[None], r"at site 0.up: expected \(N,\)"),
        (lambda v: v.float(), "torch.float64 on cpu, got .* torch.float32"),
        (lambda v: v.to("meta"), "on cpu, got .* on meta"),
        (lambda v: torch.full_like(v, math.nan), "at site 0.up has a non-finite entry"),
        (lambda v: torch.full_like(v, math.inf), "at site 0.up has a non-finite entry"),
    ],
)
def test_a_vector_that_does_not_fit_its_site_is_refused(sparse, attribute, spoil, message):
    (site,) = (s for s in sparse.sites if str(s) == "0.up")
    size = 32 if attribute == "alpha" else 48
    install = sparse.set_alpha if attribute == "alpha" else sparse.set_output_bias
    message = message.replace("N", str(size)).replace("M", str(size - 1))
    with pytest.raises(ValueError, match=f"{attribute} {message}" if message.startswith("at") else message):
        install({site: spoil(torch.ones(size, dtype=torch.float64))})
    assert sparse.alpha == {}


def test_vectors_for_unknown_sites_are_refused(sparse, tiny):
    foreign = find_sites(tiny("gpt2"))[0]
    for install, name in ((sparse.set_alpha, "alpha"), (sparse.set_output_bias, "bias")):
        with pytest.raises(ValueError, match=rf"{name}: unknown sites \['0.qkv'\]"):
            install({foreign: torch.ones(32, dtype=torch.float64)})


@pytest.mark.parametrize("dense_prefix", [20, 21])
def test_a_dense_prefix_of_the_whole_sequence_is_refused(model, calib, ids, dense_prefix):
    with (
        SparseModel(model, calib, 0.5, dense_prefix=dense_prefix) as sparse,
        pytest.raises(ValueError, match=f"dense_prefix={dense_prefix} keeps all 20 tokens dense"),
    ):
        sparse(ids)


@pytest.mark.parametrize("dense_prefix", [-1, -0.1, 1.0, 1.5, math.nan])
def test_a_dense_prefix_is_a_count_or_a_share(model, calib, dense_prefix):
    with pytest.raises(ValueError, match=f"dense_prefix={dense_prefix}: expected a number of tokens, or a share"):
        SparseModel(model, calib, 0.5, dense_prefix=dense_prefix)


def test_topk_must_keep_something(model, calib):
    with pytest.raises(ValueError, match=r"sparsity=0\.99 at site 0\.q keeps floor\(\(1 - p\) 32\) = 0 entries"):
        SparseModel(model, calib, 0.99, mode="topk")


def test_topk_has_no_thresholds(model, calib):
    with (
        SparseModel(model, calib, 0.5, mode="topk") as sparse,
        pytest.raises(ValueError, match="mode='topk' has no thresholds"),
    ):
        sparse.thresholds()


@pytest.mark.parametrize(
    ("option", "message"),
    [({"score": "size"}, "score='size': expected one of"), ({"mode": "top"}, "mode='top': expected one of")],
)
def test_unknown_options_are_refused(model, calib, option, message):
    with pytest.raises(ValueError, match=message):
        SparseModel(model, calib, 0.5, **option)


def test_wina_needs_its_own_tables(model, ids):
    with pytest.raises(ValueError, match="has no 'wina' table here: calibrate it, with wina=True"):
        SparseModel(model, calibrate(model, ids), 0.5, score="wina")

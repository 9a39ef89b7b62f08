import math

import numpy as np
import pytest
import torch
from scipy import stats

from labkit.sparsity.calibration import Calibration, calibrate
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel

LEVELS = (0.001, 0.1, 0.25, 0.3, 0.5, 0.6, 0.7, 0.9, 0.999)


def dense_inputs(model, ids, sites):
    """Input (N / d, d) of each site in a dense forward pass."""
    inputs = {}

    def record(site, x):
        inputs[site] = x.reshape(-1, site.width).clone()

    handles = [s.linear.register_forward_pre_hook(lambda _, args, s=s: record(s, args[0])) for s in sites]
    with torch.no_grad():
        model.base_model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs


@pytest.mark.parametrize("p", LEVELS)
def test_threshold_is_the_smallest_score_with_a_share_p_at_or_below_it(model, ids, calib, p):
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        scores = x.abs().numpy()
        tau = calib.quantile(site, p)
        assert tau == np.quantile(scores, p, method="inverted_cdf")
        higher = np.quantile(scores, p, method="higher")  # its rank is at most one above
        assert ((scores > tau) & (scores < higher)).sum() == 0


@pytest.mark.parametrize("p", LEVELS)
def test_weighted_threshold_is_the_same_order_statistic_of_the_weighted_score(model, ids, calib, p):
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        scores = (x.abs() * site.weight.square().sum(0).sqrt()).numpy()
        assert calib.quantile(site, p, "wina") == pytest.approx(np.quantile(scores, p, method="inverted_cdf"), rel=1e-12)


@pytest.mark.parametrize("p", LEVELS)
def test_calibration_sparsity_is_p_rounded_up_to_the_next_entry(model, ids, calib, p):
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        tau = calib.quantile(site, p)
        masked, ties = int((x.abs() <= tau).sum()), int((x.abs() == tau).sum())
        assert masked - ties < math.ceil(p * x.numel() - 1e-9) <= masked
        if site.input_group == "mlp_mid":  # elsewhere repeated tokens and heads with one value repeat their scores
            assert ties == 1
            assert 0 <= masked / x.numel() - p < 1 / x.numel()


@pytest.mark.parametrize("p", LEVELS)
def test_a_coarse_table_misses_p_by_at_most_its_spacing(model, ids, p):
    resolution = 64
    coarse = calibrate(model, ids, resolution=resolution)
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        masked = float((x.abs() <= coarse.quantile(site, p)).double().mean())
        assert abs(masked - p) <= 1 / (resolution - 1) + 1 / x.numel()


def test_nothing_nonzero_is_masked_at_p_zero(model, calib):
    assert {calib.quantile(site, 0.0) for site in find_sites(model)} == {0.0}


def test_rms_and_mean_residual_are_those_of_the_dense_input(model, ids, calib):
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        assert calib.rms(site) == pytest.approx(float(x.square().mean().sqrt()))
        masked = x * (x.abs() <= calib.quantile(site, 0.6))
        torch.testing.assert_close(calib.mean_residual(site, 0.6), masked.mean(0))


def gaussian(generator, scale, shape):
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def laplace(generator, scale, shape):
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return -scale * u.sign() * (1 - 2 * u.abs()).log()


def masked_energy(x, tau):
    return float((x * (x.abs() <= tau)).square().sum() / x.square().sum())


@pytest.fixture
def random_layer(one_linear):
    """W with independent entries, 256 -> 256."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return one_linear(weight)


@pytest.mark.parametrize(("p", "share"), [(0.25, 0.008347), (0.5, 0.071326), (0.6, 0.12876), (0.9, 0.56071)])
def test_gaussian_inputs_lose_the_energy_that_theory_says(random_layer, p, share):
    sigma = 1.7
    t = stats.norm.ppf((1 + p) / 2)
    assert p - 2 * t * stats.norm.pdf(t) == pytest.approx(share, rel=1e-4)
    x = gaussian(torch.Generator().manual_seed(0), sigma, (8, 128, 256))
    calib = calibrate(random_layer, x, resolution=10**6)
    (site,) = find_sites(random_layer)
    assert calib.quantile(site, p) == pytest.approx(sigma * t, rel=0.02)
    assert masked_energy(x, calib.quantile(site, p)) == pytest.approx(share, rel=0.03)
    dense = random_layer(x).logits
    with SparseModel(random_layer, calib, p, dense_prefix=0) as sparse:
        lost = dense - sparse(x).logits
    assert float(lost.norm() / dense.norm()) == pytest.approx(math.sqrt(share), rel=0.02)


@pytest.mark.parametrize(("p", "share"), [(0.5, 0.033313), (0.6, 0.065566)])
def test_laplace_inputs_lose_less_energy_than_gaussian_ones(random_layer, p, share):
    beta = 0.6
    u = -math.log(1 - p)
    assert 1 - (1 - p) * (1 + u + u**2 / 2) == pytest.approx(share, rel=1e-4)
    assert stats.laplace(scale=beta).ppf((1 + p) / 2) == pytest.approx(beta * u)
    x = laplace(torch.Generator().manual_seed(0), beta, (8, 128, 256))
    calib = calibrate(random_layer, x, resolution=10**6)
    (site,) = find_sites(random_layer)
    assert calib.quantile(site, p) == pytest.approx(beta * u, rel=0.02)
    assert masked_energy(x, calib.quantile(site, p)) == pytest.approx(share, rel=0.05)
    t = stats.norm.ppf((1 + p) / 2)
    assert masked_energy(x, calib.quantile(site, p)) < 0.6 * (p - 2 * t * stats.norm.pdf(t))


def local_errors(site, x, tau, mean_residual):
    """E||e||^2 without and with the constant W m, and ||W m||^2; e = W (x - S(x))."""
    weight = site.weight.double()
    error = (x * (x.abs() <= tau)).double() @ weight.T  # (N / d, m)
    shift = weight @ mean_residual.double()
    return [float(v) for v in (error.square().sum(1).mean(), (error - shift).square().sum(1).mean(), shift.square().sum())]


def test_mean_residual_lowers_the_layers_own_error_by_its_norm(model, ids, calib):
    for site, x in dense_inputs(model, ids, find_sites(model)).items():
        before, after, gain = local_errors(site, x, calib.quantile(site, 0.6), calib.mean_residual(site, 0.6))
        assert after == pytest.approx(before - gain, rel=1e-12)
        assert gain > 0


@pytest.fixture(scope="module")
def smollm2_calib(smollm2, wiki_windows):
    return calibrate(smollm2[0], wiki_windows["train"], levels=(0.6,), resolution=10**6)


@pytest.fixture(scope="module")
def smollm2_inputs(smollm2, wiki_windows):
    """Dense inputs of one site per input group, on held-out prose."""
    model, _ = smollm2
    sites = {site.group: site for site in find_sites(model)}
    return dense_inputs(model, wiki_windows["test"], sites.values())


@pytest.mark.parametrize("p", [0.3, 0.5, 0.6])
def test_held_out_prose_is_as_sparse_as_the_calibration(smollm2_calib, smollm2_inputs, p):
    shares = {}
    for site, x in smollm2_inputs.items():
        masked = float((x.abs() <= smollm2_calib.quantile(site, p)).float().mean())
        shares.setdefault(site.input_group, []).append(masked)
    for group, values in shares.items():
        assert np.mean(values) == pytest.approx(p, abs=0.02), group


def test_mean_residual_lowers_the_errors_of_a_real_models_layers(smollm2, wiki_windows, smollm2_calib):
    model, _ = smollm2
    sites = find_sites(model, layers=[0, 1])
    inputs = {split: dense_inputs(model, wiki_windows[split], sites) for split in ("train", "test")}
    for site in sites:
        tau, mean_residual = smollm2_calib.quantile(site, 0.6), smollm2_calib.mean_residual(site, 0.6)
        before, after, gain = local_errors(site, inputs["train"][site], tau, mean_residual)
        assert after == pytest.approx(before - gain, rel=1e-4)
        held_out_before, held_out_after, _ = local_errors(site, inputs["test"][site], tau, mean_residual)
        assert held_out_after < held_out_before, site


def test_a_saved_calibration_is_the_same_one(model, calib, tmp_path):
    calib.save(tmp_path / "calibration.safetensors")
    loaded = Calibration.load(tmp_path / "calibration.safetensors")
    for site in find_sites(model):
        for score in ("magnitude", "wina"):
            assert [loaded.quantile(site, p, score) for p in LEVELS] == [calib.quantile(site, p, score) for p in LEVELS]
        assert loaded.rms(site) == calib.rms(site)
        torch.testing.assert_close(
            loaded.mean_residual(site, 0.5).double(), calib.mean_residual(site, 0.5), rtol=1e-3, atol=1e-6
        )
    with SparseModel(model, loaded, 0.5):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.safetensors"]


def test_embeddings_calibrate_like_the_tokens_they_stand_for(model, ids, calib):
    embedded = calibrate(model, model.get_input_embeddings()(ids), resolution=10**6)
    for site in find_sites(model):
        assert embedded.quantile(site, 0.5) == calib.quantile(site, 0.5)


def test_half_precision_models_can_be_calibrated(tiny, ids):
    model = tiny(dtype=torch.bfloat16)
    calib = calibrate(model, ids, resolution=10**6)
    (site, x), *_ = dense_inputs(model, ids, find_sites(model)).items()
    assert calib.quantile(site, 0.5) == np.quantile(x.abs().float().numpy(), 0.5, method="inverted_cdf")


@pytest.mark.parametrize("p", [-0.1, 1, 1.5, math.nan])
def test_sparsity_outside_zero_to_one_is_refused(model, calib, p):
    with pytest.raises(ValueError, match=rf"p={p}: sparsity must lie in \[0, 1\)"):
        calib.quantile(find_sites(model)[0], p)


def test_what_was_not_calibrated_is_named(model, ids):
    first, second, *_ = find_sites(model, "o+down")
    partial = calibrate(model, ids, sites=[first], levels=(0.5, 0.6))
    with pytest.raises(ValueError, match=r"site 0\.down has no 'magnitude' table"):
        partial.quantile(second, 0.5)
    with pytest.raises(ValueError, match=r"site 0\.o has no 'wina' table here: calibrate it, with wina=True"):
        partial.quantile(first, 0.5, "wina")
    with pytest.raises(ValueError, match=r"p=0\.3: mean residuals were calibrated at \[0\.5, 0\.6\]; pass levels=\(0\.3,\)"):
        partial.mean_residual(first, 0.3)


def test_a_failed_calibration_leaves_no_hook_behind(model, ids):
    with pytest.raises(ValueError, match=r"p=1\.5"):
        calibrate(model, ids, levels=(1.5,))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (torch.zeros(2, 1, dtype=torch.long), r"shape \(2, 1\): a window needs at least 2 tokens"),
        (torch.zeros(0, 9, dtype=torch.long), r"shape \(0, 9\)"),
        (torch.tensor([[1, 61]]), r"tokens 1 … 61: ids must lie in 0 … 60"),
        (torch.zeros(1, 65, dtype=torch.long), "T=65 tokens, but the model has positions for 64"),
    ],
)
def test_bad_windows_are_refused(model, windows, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, windows)

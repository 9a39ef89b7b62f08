import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from labkit.sparsity import kernels
from labkit.sparsity.kernels import sparse_gemv


def random_linear(d, m, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(d, generator=generator, dtype=dtype)
    weight = torch.randn(m, d, generator=generator, dtype=dtype)
    return x, weight, torch.randn(m, generator=generator, dtype=dtype)


def thresholded(x, tau):
    return torch.where(x.abs() > tau, x, 0)


@pytest.fixture(params=["numba", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels, "numba", None)
    return request.param


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 33), (576, 960)])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.9])
def test_equals_dense_product_of_thresholded_input(backend, shape, p):
    x, weight, bias = random_linear(*shape)
    tau = float(x.abs().quantile(p)) if p else -1.0
    expected = torch.mv(weight, thresholded(x, tau)) + bias
    y = sparse_gemv(x, weight.T.contiguous(), tau, bias)
    assert torch.linalg.norm(y - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_float64_is_exact_to_rounding(backend):
    x, weight, bias = random_linear(100, 40, torch.float64)
    expected = weight @ thresholded(x, 0.7) + bias
    torch.testing.assert_close(sparse_gemv(x, weight.T.contiguous(), 0.7, bias), expected, rtol=0, atol=1e-12)


def test_columns_of_small_inputs_are_never_read(backend):
    x, weight, _ = random_linear(50, 20)
    expected = weight @ thresholded(x, 0.5)
    weight[:, x.abs() <= 0.5] = torch.nan  # reading one of them would spoil the sum
    torch.testing.assert_close(sparse_gemv(x, weight.T.contiguous(), 0.5), expected)


def test_counts_the_weights_it_reads():
    x, weight, bias = (a.numpy() for a in random_linear(50, 20))
    active = int((np.abs(x) > 0.5).sum())
    y = np.empty(20, np.float32)
    read = kernels.gemv(x, np.ascontiguousarray(weight.T), np.array([0.5], np.float32), np.array([0, 20]), bias, y)
    assert 0 < active < 50
    assert read == active * 20


def test_threshold_is_strict(backend):
    x = torch.tensor([0.5, -0.5, 0.75])
    assert sparse_gemv(x, torch.ones(3, 1), 0.5).tolist() == [0.75]
    assert sparse_gemv(x, torch.ones(3, 1), -1.0).tolist() == [0.75]


def test_nothing_active_leaves_the_bias(backend):
    x, weight, bias = random_linear(9, 4)
    Wt = weight.T.contiguous()
    assert torch.equal(sparse_gemv(x, Wt, torch.inf, bias), bias)
    assert torch.equal(sparse_gemv(x, Wt, torch.inf), torch.zeros(4))


def test_nan_in_the_input_shows_in_the_output(backend):
    x, weight, _ = random_linear(9, 4)
    x[3] = torch.nan
    assert sparse_gemv(x, weight.T.contiguous(), 0.5).isnan().all()


def test_numpy_in_numpy_out_and_strided_input(backend):
    x, weight, bias = random_linear(30, 12)
    doubled = np.repeat(x.numpy(), 2)
    y = sparse_gemv(doubled[::2], np.ascontiguousarray(weight.numpy().T), 0.4, bias.numpy())
    assert isinstance(y, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(y), sparse_gemv(x, weight.T.contiguous(), 0.4, bias))


def test_writes_into_out_even_when_it_is_the_input(backend):
    x, weight, _ = random_linear(16, 16)
    Wt, expected = weight.T.contiguous(), weight @ thresholded(x, 0.4)
    assert sparse_gemv(x, Wt, 0.4, out=x) is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("kernel", [kernels.gemv, kernels.gemv_parallel])
def test_segments_have_their_own_thresholds(kernel):
    x, weight, bias = random_linear(40, 30)
    taus, bounds = [0.2, 1.1, -1.0], [0, 7, 20, 30]
    y = np.empty(30, np.float32)
    read = kernel(
        x.numpy(),
        weight.T.contiguous().numpy(),
        np.array(taus, np.float32),
        np.array(bounds),
        bias.numpy(),
        y,
    )
    expected = bias.clone()
    for tau, lo, hi in zip(taus, bounds, bounds[1:], strict=False):
        expected[lo:hi] += weight[lo:hi] @ thresholded(x, tau)
    torch.testing.assert_close(torch.from_numpy(y), expected)
    assert read == sum(int((x.abs() > tau).sum()) * (hi - lo) for tau, lo, hi in zip(taus, bounds, bounds[1:], strict=False))


X, WT = torch.ones(3), torch.ones(3, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, torch.ones(5, 3)), r"Wt has shape \(5, 3\).*row-major"),
        ((X, torch.ones(5, 3).T), "Wt has strides.*C-contiguous"),
        ((X, torch.ones(4, 5)), r"Wt has shape \(4, 5\); allowed is \(3, m\)"),
        ((torch.ones(1, 3), WT), r"x has shape \(1, 3\)"),
        ((X, torch.ones(3)), r"Wt has shape \(3,\)"),
        ((X.int(), WT.int()), "x has dtype int32"),
        ((X.half(), WT.half()), "x has dtype float16"),
        ((X.bfloat16(), WT.bfloat16()), "x is a torch.bfloat16 tensor"),
        ((X, WT.double()), "Wt has dtype float64; allowed is float32"),
        ((X, WT, float("nan")), "tau is NaN"),
        ((X, WT, 0.0, torch.ones(3)), r"bias has shape \(3,\)"),
        ((X, WT, 0.0, torch.ones(5).double()), "bias has shape .* dtype float64"),
        ((X, WT, 0.0, None, torch.ones(4)), r"out has shape \(4,\)"),
        ((X, WT, 0.0, None, torch.ones(10)[::2]), "out has strides"),
        ((X.to("meta"), WT), "x is a torch.float32 tensor on meta"),
    ],
)
def test_bad_input_is_named(arguments, message):
    tau = () if len(arguments) > 2 else (0.5,)
    with pytest.raises(ValueError, match=message):
        sparse_gemv(*arguments, *tau)


def test_compiles_where_no_cache_folder_can_be_written():
    scope = {}
    exec("def double(a):\n    return 2 * a", scope)  # a function without a source file has no cache location either
    assert kernels._compile(scope["double"])(21) == 42


def test_bf16_product_widens_the_stored_bits():
    x, weight, _ = random_linear(70, 30)
    stored = weight.bfloat16()
    y = torch.empty(30)
    kernels.bf16_mv(stored.view(torch.uint16).numpy(), x.numpy(), y.numpy())
    torch.testing.assert_close(y, stored.float() @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residual_and_norm(dtype):
    h, _, y = random_linear(48, 48, dtype)
    weight, eps = torch.linspace(0.5, 2, 48, dtype=dtype), 1e-5
    total, out = h + y, torch.empty_like(h)
    kernels.add_rms_norm(h.numpy(), y.numpy(), weight.numpy(), eps, out.numpy())
    torch.testing.assert_close(h, total)
    torch.testing.assert_close(out, F.rms_norm(total, (48,), weight, eps))


def test_swiglu():
    gate_up = torch.linspace(-90, 90, 62)
    out = torch.empty(31)
    kernels.swiglu(gate_up.numpy(), out.numpy())
    torch.testing.assert_close(out, F.silu(gate_up[:31]) * gate_up[31:])


def test_attention_of_successive_tokens_is_causal_attention():
    heads, groups, width, length = 6, 2, 8, 9
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(length, heads + 2 * groups, width, generator=generator, dtype=torch.float64)
    angles = torch.rand(length, width // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    q, k, v = qkv.transpose(0, 1).split([heads, groups, groups])  # (heads, T, D)
    q, k = (a[0] for a in apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None]))
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]

    keys, values = np.zeros((2, groups, length, width))
    scores, out = np.empty(length), np.empty(heads * width)
    for t in range(length):
        token = qkv[t].flatten().numpy().copy()
        kernels.rope_attention(token, cos.numpy(), sin.numpy(), t, keys, values, scores, out)
        np.testing.assert_allclose(out, expected[:, t].flatten().numpy(), atol=1e-12)

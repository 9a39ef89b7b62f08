"""Matrix-vector products that do not read the columns of zeroed inputs, and the other arithmetic of one decoded token.

Decoding with batch 1 is bound by memory: every weight is read once per token. If the sparsifier zeroes input j of a
linear layer, column j of its weight need not be read at all. Skipping pays only when that column is contiguous, so the
weight is stored transposed, ``Wt = W.T.contiguous()`` of shape (d, m) for d inputs and m outputs: one row per input.
Gathering the active rows into a copy first would cost more than the dense product.

Everything here but the ``_parallel`` variant runs on one thread. numba compiles it on first use and keeps that on disk. The
arrays of one call share one dtype, float32 or, for exact tests, float64. The idea of decoding this way is TEAL's; the kernels
are ours.
"""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

try:
    import numba
    from numba import prange
except ImportError:  # sparse_gemv then falls back to torch, decode says what to install
    numba, prange = None, range

# Everything "fast" except assuming that NaN and infinity never occur: a broken model must show up as NaN.
_FASTMATH = {"contract", "reassoc", "nsz", "arcp"}

Array = np.ndarray | torch.Tensor


def _compile(function, **options):
    """numba.njit with an on-disk cache; without the cache where no folder can be written, as is without numba."""
    if numba is None:
        return function
    options = {"fastmath": _FASTMATH, "error_model": "numpy", "nogil": True, **options}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither __pycache__ nor the user's cache folder is writable
        return numba.njit(function, **options)


def sparse_gemv(x: Array, Wt: Array, tau: float, bias: Array | None = None, out: Array | None = None) -> Array:
    """y = W S_τ(x) + b, reading only the columns of W whose input exceeds the threshold.

    Args:
        x: input (d,), float32 (or float64), NumPy or torch on the CPU.
        Wt: transposed weight (d, m), C-contiguous, dtype of `x`: `linear.weight.T.contiguous()`. A square weight handed
            over untransposed cannot be told from a transposed one.
        tau: threshold; input j counts where |x_j| > tau. A negative value keeps all inputs.
        bias: start value of the sum (m,), for instance b + Wα with spontaneous neurons absorbed.
        out: contiguous array (m,) that receives the result; a new one by default.

    Returns:
        (m,), `out` if given, else torch if `x` is torch, else NumPy.

    Raises:
        ValueError: a shape, dtype, device or memory layout is not as above, or `tau` is NaN.
    """
    x_, Wt_ = _as_numpy(x, "x", 1), _as_numpy(Wt, "Wt", 2)
    d, m = Wt_.shape
    if x_.dtype not in (np.float32, np.float64):
        raise ValueError(f"x has dtype {x_.dtype}; allowed are float32 and float64 (convert with x.float())")
    if Wt_.dtype != x_.dtype:
        raise ValueError(f"Wt has dtype {Wt_.dtype}; allowed is {x_.dtype}, the dtype of x")
    if x_.size != d:
        hint = ": it looks row-major (m, d), give W.T.contiguous()" if x_.size == m else ""
        raise ValueError(f"Wt has shape {Wt_.shape}; allowed is ({x_.size}, m) for x of shape ({x_.size},){hint}")
    if not Wt_.flags.c_contiguous:
        raise ValueError(f"Wt has strides {Wt_.strides}; allowed is C-contiguous (d, m), give W.T.contiguous()")
    if math.isnan(tau):
        raise ValueError("tau is NaN; allowed is any number, negative keeps all inputs")
    bias_ = x_[:0] if bias is None else _matching(bias, "bias", m, x_.dtype)
    y = np.empty(m, x_.dtype) if out is None else _matching(out, "out", m, x_.dtype)
    if not y.flags.c_contiguous:
        raise ValueError(f"out has strides {y.strides}; allowed is a contiguous array")
    if numba is None:
        _torch_gemv(x_, Wt_, tau, bias_, y)
    else:
        x_, bias_ = np.ascontiguousarray(x_), np.ascontiguousarray(bias_)
        _segment(x_, Wt_, x_.dtype.type(tau), 0, m, bias_, y)
    if out is not None:
        return out
    return torch.from_numpy(y) if isinstance(x, torch.Tensor) else y


def _torch_gemv(x: np.ndarray, Wt: np.ndarray, tau: float, bias: np.ndarray, y: np.ndarray) -> None:
    """The same sum by `embedding_bag`, which adds weighted rows without gathering them."""
    x, y_ = torch.from_numpy(x), torch.from_numpy(y)
    active = (x.abs() <= tau).logical_not_().nonzero().flatten()  # (k,)
    one_bag = torch.zeros(1, dtype=torch.long)
    weights = torch.from_numpy(Wt)
    total = F.embedding_bag(active, weights, one_bag, mode="sum", per_sample_weights=x[active])[0]
    y_.copy_(total + torch.from_numpy(bias) if bias.size else total)


def _as_numpy(a: Array, name: str, ndim: int) -> np.ndarray:
    if isinstance(a, torch.Tensor):
        try:
            a = (a.detach() if a.requires_grad else a).numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, another device, a sparse layout
            raise ValueError(f"{name} is a {a.dtype} tensor on {a.device}; allowed is dense float32 on the CPU") from error
    a = np.asarray(a)
    if a.ndim != ndim:
        raise ValueError(f"{name} has shape {a.shape}; allowed are {ndim} dimension(s)")
    return a


def _matching(a: Array, name: str, m: int, dtype: np.dtype) -> np.ndarray:
    a = _as_numpy(a, name, 1)
    if a.size != m or a.dtype != dtype:
        raise ValueError(f"{name} has shape {a.shape} and dtype {a.dtype}; allowed are ({m},) and {dtype}")
    return a


@_compile
def _accumulate(Wt, index, value, k, lo, y):
    """y += Σ_{s<k} value[s] · Wt[index[s], lo:lo+len(y)], eight rows per pass so that y is loaded and stored rarely."""
    hi = lo + y.size
    s = 0
    while s + 8 <= k:
        r0, r1, r2, r3 = (
            Wt[index[s], lo:hi],
            Wt[index[s + 1], lo:hi],
            Wt[index[s + 2], lo:hi],
            Wt[index[s + 3], lo:hi],
        )
        r4, r5, r6, r7 = (
            Wt[index[s + 4], lo:hi],
            Wt[index[s + 5], lo:hi],
            Wt[index[s + 6], lo:hi],
            Wt[index[s + 7], lo:hi],
        )
        v0, v1, v2, v3 = value[s], value[s + 1], value[s + 2], value[s + 3]
        v4, v5, v6, v7 = value[s + 4], value[s + 5], value[s + 6], value[s + 7]
        for j in range(y.size):
            y[j] += (v0 * r0[j] + v1 * r1[j] + v2 * r2[j] + v3 * r3[j]) + (v4 * r4[j] + v5 * r5[j] + v6 * r6[j] + v7 * r7[j])
        s += 8
    while s < k:
        r0, v0 = Wt[index[s], lo:hi], value[s]
        for j in range(y.size):
            y[j] += v0 * r0[j]
        s += 1


@_compile
def _segment(x, Wt, tau, lo, hi, bias, y):
    """Outputs lo:hi of y = W S_τ(x) + bias; returns the number of weights read."""
    index, value, k = np.empty(x.size, np.int64), np.empty(x.size, x.dtype), 0
    for i in range(x.size):
        if not abs(x[i]) <= tau:  # keeps NaN
            index[k], value[k] = i, x[i]
            k += 1
    part = y[lo:hi]
    if bias.size > 0:
        part[:] = bias[lo:hi]
    else:
        part[:] = 0
    _accumulate(Wt, index, value, k, lo, part)
    return k * (hi - lo)


@_compile
def gemv(x, Wt, tau, bounds, bias, y):
    """y = W S_τ(x) + bias with one threshold per segment of outputs; returns the number of weights read.

    x (d,), Wt (d, m), tau (S,), bounds (S + 1,) from 0 to m, bias (m,) or (0,) for none, y (m,). Outputs
    bounds[s]:bounds[s+1] use tau[s]: several linears that share their input are one call on their joined weight.
    """
    read = 0
    for s in range(tau.size):
        read += _segment(x, Wt, tau[s], bounds[s], bounds[s + 1], bias, y)
    return read


@partial(_compile, parallel=True)
def gemv_parallel(x, Wt, tau, bounds, bias, y):
    """`gemv` with the segments shared among `numba.set_num_threads` threads."""
    read = 0
    for s in prange(tau.size):
        read += _segment(x, Wt, tau[s], bounds[s], bounds[s + 1], bias, y)
    return read


@_compile
def bf16_mv(W, x, y):
    """y = W x with W (m, d) the bits of bfloat16 numbers as uint16; x (d,), y (m,) float32."""
    for i in range(W.shape[0]):
        row = W[i]
        total = np.float32(0)
        for j in range(x.size):
            total += np.uint32(np.uint32(row[j]) << 16).view(np.float32) * x[j]
        y[i] = total


@_compile
def add_rms_norm(h, y, weight, eps, out):
    """h += y, then out = weight · h / √(mean h² + eps); all (d,). Adds a block's output and norms for the next."""
    total = h.dtype.type(0)
    for i in range(h.size):
        h[i] += y[i]
        total += h[i] * h[i]
    scale = h.dtype.type(1 / np.sqrt(total / h.size + eps))
    for i in range(h.size):
        out[i] = weight[i] * (h[i] * scale)


@_compile
def rope_attention(qkv, cos, sin, t, keys, values, scores, out):
    """One token's causal attention: rotate q and k, append k and v to the cache, attend to positions 0…t.

    qkv (H·D + 2·G·D,) with H query and G key-value heads of D channels, rotated in place; cos, sin (T, D); keys,
    values (G, T, D); scores (T,) scratch; out (H·D,). Rotary embedding pairs channel i with i + D/2 (Llama's layout).
    """
    groups, _, width = keys.shape
    heads = out.size // width
    half = width // 2
    for n in range(heads + groups):
        head = qkv[n * width : (n + 1) * width]
        for i in range(half):
            a, b = head[i], head[i + half]
            head[i] = a * cos[t, i] - b * sin[t, i]
            head[i + half] = b * cos[t, i + half] + a * sin[t, i + half]
    for g in range(groups):
        keys[g, t] = qkv[(heads + g) * width : (heads + g + 1) * width]
        values[g, t] = qkv[(heads + groups + g) * width : (heads + groups + g + 1) * width]
    scale = out.dtype.type(1 / np.sqrt(width))
    for n in range(heads):
        query, result = qkv[n * width : (n + 1) * width], out[n * width : (n + 1) * width]
        g = n * groups // heads
        top = -np.inf
        for s in range(t + 1):
            key = keys[g, s]
            dot = query.dtype.type(0)
            for i in range(width):
                dot += query[i] * key[i]
            scores[s] = dot * scale
            top = max(top, scores[s])
        total = 0.0
        for s in range(t + 1):
            scores[s] = np.exp(scores[s] - top)
            total += scores[s]
        result[:] = 0
        for s in range(t + 1):
            weight, value = out.dtype.type(scores[s] / total), values[g, s]
            for i in range(width):
                result[i] += weight * value[i]


@_compile
def swiglu(gate_up, out):
    """out = silu(gate) · up for gate_up (2f,) = [gate, up] and out (f,)."""
    f = out.size
    for i in range(f):
        out[i] = gate_up[i] / (1 + np.exp(-gate_up[i])) * gate_up[f + i]

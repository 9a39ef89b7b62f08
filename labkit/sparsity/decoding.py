"""Greedy decoding of Llama-like models, one token at a time, in a loop so lean that its linears decide the speed.

All builds run the same `Decoder.step`; only what computes a linear differs:

* ``dense``      `torch.mv` on the row-major weight, the ordinary peer;
* ``dense-own``  our kernel on the transposed weight, reading everything;
* ``skip``       our kernel reading only the columns of active inputs, spontaneous neurons absorbed in the bias.

So ``skip`` against ``dense-own`` is what sparsity is worth, and ``dense-own`` against ``dense`` what the layout is worth.
Linears with a common input are joined (q|k|v and gate|up): four products per block, one list of active inputs each.
A prompt is processed densely, for sparsity saves nothing where many tokens share each weight that is read.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from labkit.errors import require
from labkit.sparsity import kernels
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel

Kernel = Literal["dense", "dense-own", "skip"]
Head = Literal["fp32", "bf16", "sparse"]

GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # the four joined linears of a block
_ARCHITECTURES = ("llama", "mistral", "qwen2")  # RMS norm, rotary embedding, SwiGLU, grouped-query attention


@dataclass(frozen=True)
class Decode:
    """What `decode` did in n steps, with V tokens in the vocabulary and L blocks.

    Attributes:
        tokens: (n,) the most probable next token at each step.
        logits: (n, V) next-token logits.
        seconds: (n,) wall time of each step.
        cpu_seconds: (n,) processor time of each step, of the calling thread (of the process with several threads).
        kept: (n, L, 4) fraction of the weights that was read in each joined linear q|k|v, o, gate|up, down.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    seconds: np.ndarray
    cpu_seconds: np.ndarray
    kept: np.ndarray


def decode(
    model: PreTrainedModel,
    sparse: SparseModel | None,
    prompt_ids: torch.Tensor,
    n: int,
    *,
    kernel: Kernel = "dense",
    head: Head = "fp32",
    threads: int = 1,
    forced_ids: torch.Tensor | None = None,
) -> Decode:
    """Run n decoding steps after a prompt.

    All prompt tokens but the last are processed densely in one pass. Step 0 reads the last one; step i reads the token
    that step i − 1 found most probable, or ``forced_ids[i - 1]``.

    Args:
        model: float32 (or float64) causal language model of the Llama family, on the CPU.
        sparse: the SparseModel that wraps `model`, if one does: source of thresholds and spontaneous neurons for
            ``kernel="skip"`` (magnitude thresholds only). The prompt takes the place of its `dense_prefix`.
        prompt_ids: (P,) or (1, P) token ids, P ≥ 1.
        n: number of steps, ≥ 1.
        kernel: how the linears of the blocks are computed, see the module's text.
        head: "fp32" is `torch.mv` in the model's dtype, "bf16" our kernel on a bfloat16 copy, "sparse" our kernel
            on the largest entries of the final norm's output, as many as the blocks' mean sparsity leaves.
        threads: more than one splits each product's outputs; worth it only on idle cores.
        forced_ids: (n,) tokens to read instead of the model's own choices, to put several builds on the same path.

    Raises:
        ValueError: an argument is outside the above, or the model is not of the Llama family.
        MissingDependency: numba is not installed.
    """
    prompt_ids = _token_ids(prompt_ids, "prompt_ids", model)
    if n < 1:
        raise ValueError(f"n={n}; allowed are integers ≥ 1")
    if forced_ids is not None:
        forced_ids = _token_ids(forced_ids, "forced_ids", model)
        if len(forced_ids) != n:
            raise ValueError(f"forced_ids has {len(forced_ids)} tokens; allowed is n={n}")
    token, tokens, logits, kept = int(prompt_ids[-1]), [], [], []
    seconds, cpu_seconds = np.empty(n), np.empty(n)
    cpu_clock = time.thread_time if threads == 1 else time.process_time
    with thread_count(threads):
        decoder = Decoder(model, sparse, len(prompt_ids) - 1 + n, kernel=kernel, head=head, threads=threads)
        decoder.prefill(prompt_ids[:-1])
        for i in range(n):
            wall, cpu = time.perf_counter(), cpu_clock()
            step = decoder.step(token)
            seconds[i], cpu_seconds[i] = time.perf_counter() - wall, cpu_clock() - cpu
            logits.append(step.clone())
            kept.append(decoder.kept.copy())
            tokens.append(step.argmax())
            token = int(tokens[-1] if forced_ids is None else forced_ids[i])
    return Decode(torch.stack(tokens), torch.stack(logits), seconds, cpu_seconds, np.stack(kept))


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Limit torch and numba to a number of threads, restoring both afterwards."""
    numba = require("numba", "llm")
    available = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= available:
        raise ValueError(f"threads={threads}; allowed are 1 … {available} on this machine")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if threads > 1:  # any call here starts numba's thread pool
        numba.set_num_threads(threads)
    try:
        yield
    finally:
        if threads > 1:
            numba.set_num_threads(available)
        torch.set_num_threads(before)  # last: numba's call above changes OpenMP's count, which is also torch's


@dataclass(frozen=True)
class Weights:
    """A model's weights as the loop reads them; several builds may share one.

    Attributes:
        transposed: whether the joined linears are (in, out), for our kernel, or (out, in), for `torch.mv`.
        joined: [L][4] joined weights.
        parts: [L][4] the linear modules that each of them joins.
        norms: (2L + 1, C) scales of the norms in the order of the forward pass.
        embedding, head: (V, C) weights of the two ends.
    """

    transposed: bool
    joined: list[list[torch.Tensor]]
    parts: list[list[list[torch.nn.Linear]]]
    norms: torch.Tensor
    embedding: torch.Tensor
    head: torch.Tensor


def lay_out(model: PreTrainedModel, *, transposed: bool) -> Weights:
    """Arrange a Llama-family model's weights for decoding; joined and transposed ones are copies.

    Raises:
        ValueError: another architecture, activation or dtype.
    """
    config = model.config
    activation = getattr(config, "hidden_act", None)
    if config.model_type not in _ARCHITECTURES or activation != "silu":
        raise ValueError(
            f"model has architecture {config.model_type!r} with activation {activation!r}; decode knows "
            f"{', '.join(_ARCHITECTURES)} with 'silu', use model.generate for others"
        )
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"model has dtype {model.dtype}; allowed is float32: load_lm(..., dtype=torch.float32)")
    sites = {(site.layer, site.name): site.linear for site in find_sites(model)}
    layers = range(config.num_hidden_layers)
    parts = [[[sites[layer, name] for name in group] for group in GROUPS] for layer in layers]
    norms = [n for b in model.model.layers for n in (b.input_layernorm, b.post_attention_layernorm)]
    return Weights(
        transposed=transposed,
        joined=[[_join(part, transposed) for part in block] for block in parts],
        parts=parts,
        norms=torch.stack([norm.weight.detach() for norm in (*norms, model.model.norm)]),
        embedding=model.get_input_embeddings().weight.detach(),
        head=model.get_output_embeddings().weight.detach().contiguous(),
    )


def _join(linears: list[torch.nn.Linear], transposed: bool) -> torch.Tensor:
    weights = [linear.weight.detach() for linear in linears]
    if transposed:
        return torch.cat([w.T for w in weights], dim=1).contiguous()  # (in, out)
    return weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)


class Decoder:
    """One build of the loop: weights, key-value cache and preallocated buffers, advanced token by token by `step`.

    Args:
        model, sparse, kernel, head, threads: as for `decode`. Thresholds and spontaneous neurons are read once, here.
        capacity: number T of positions that the key-value cache holds.
        weights: what `lay_out` made for another build with the same layout; laid out anew by default.

    Attributes:
        weights: the weights it reads.
        position: number of tokens read so far.
        kept: (L, 4) fraction of each joined linear's weights that the last step read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sparse: SparseModel | None,
        capacity: int,
        *,
        kernel: Kernel = "dense",
        head: Head = "fp32",
        threads: int = 1,
        weights: Weights | None = None,
    ):
        require("numba", "llm")
        if kernel not in get_args(Kernel):
            raise ValueError(f"kernel={kernel!r}; allowed are {get_args(Kernel)}")
        if head not in get_args(Head):
            raise ValueError(f"head={head!r}; allowed are {get_args(Head)}")
        if sparse is None and (kernel == "skip" or head == "sparse"):
            raise ValueError(f"sparse=None; kernel={kernel!r} with head={head!r} needs a SparseModel")
        if sparse is not None and sparse.model is not model:
            raise ValueError("sparse wraps another model; allowed is SparseModel(model, ...) of this one")
        if kernel == "skip" and sparse.score != "magnitude":
            raise ValueError(f"sparse has score={sparse.score!r}; the kernel skips by 'magnitude' alone")
        config = model.config
        limit = min(config.max_position_embeddings, getattr(config, "sliding_window", None) or capacity)
        if capacity > limit:
            raise ValueError(f"prompt and steps take {capacity} positions; this model attends to {limit} at most")
        weights = weights or lay_out(model, transposed=kernel != "dense")
        if weights.transposed == (kernel == "dense"):
            raise ValueError(f"weights have transposed={weights.transposed}; kernel={kernel!r} needs the opposite")
        self.weights = weights
        self.position = 0
        self.kept = np.ones((len(weights.joined), len(GROUPS)))
        self._model, self._eps = model, config.rms_norm_eps
        self._without_hooks = nullcontext if sparse is None else sparse.dense
        self._norms, self._embedding = weights.norms.numpy(), weights.embedding.numpy()

        # Every product is bound once to the buffers it reads and writes, so the loop allocates and converts nothing.
        dtype = self._norms.dtype
        cos, sin = model.model.rotary_emb(weights.norms, torch.arange(capacity)[None])  # (1, T, D)
        self._cos, self._sin = cos[0].numpy(), sin[0].numpy()
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, cos.shape[-1]
        self._keys = np.zeros((len(weights.joined), groups, capacity, width), dtype)
        self._values = np.zeros_like(self._keys)
        self._scores = np.empty(capacity, dtype)
        # residual stream, its norm, the output of the latest attention or MLP
        self._h, self._x, self._y = np.empty((3, config.hidden_size), dtype)
        self._qkv = np.empty((heads + 2 * groups) * width, dtype)
        self._attended = np.empty(heads * width, dtype)
        self._gate_up = np.empty(2 * config.intermediate_size, dtype)
        self._mid = np.empty(config.intermediate_size, dtype)
        self._logits = np.empty(len(weights.head), dtype)
        with self._without_hooks():
            self._products = self._bind_blocks(weights, sparse if kernel == "skip" else None, kernel, threads)
        self._head = self._bind_head(weights.head, sparse, head)
        self.step(0)  # compiles or loads the kernels before anything is timed
        self.position = 0

    def prefill(self, ids: torch.Tensor) -> None:
        """Read tokens (P,) densely in one pass of the model itself; their keys and values enter the cache."""
        if len(ids) == 0:
            return
        with torch.no_grad(), self._without_hooks():
            cache = self._model.model(ids[None], use_cache=True, return_dict=False)[1]
        for keys, values, layer in zip(self._keys, self._values, cache.layers, strict=True):
            keys[:, : len(ids)] = layer.keys[0].numpy()  # (G, P, D)
            values[:, : len(ids)] = layer.values[0].numpy()
        self.position = len(ids)

    def step(self, token: int) -> torch.Tensor:
        """Read one token; returns the logits (V,) of the next, a view that the next step overwrites."""
        if self.position == len(self._scores):
            raise ValueError(f"all {self.position} positions of the cache are taken; give a larger capacity")
        h, x, y, norms, eps = self._h, self._x, self._y, self._norms, self._eps
        place = self._cos, self._sin, self.position
        h[:], y[:] = self._embedding[token], 0
        for i, (qkv, o, gate_up, down) in enumerate(self._products):
            kernels.add_rms_norm(h, y, norms[2 * i], eps, x)
            self.kept[i, 0] = qkv()
            cache = self._keys[i], self._values[i], self._scores
            kernels.rope_attention(self._qkv, *place, *cache, self._attended)
            self.kept[i, 1] = o()
            kernels.add_rms_norm(h, y, norms[2 * i + 1], eps, x)
            self.kept[i, 2] = gate_up()
            kernels.swiglu(self._gate_up, self._mid)
            self.kept[i, 3] = down()
        kernels.add_rms_norm(h, y, norms[-1], eps, x)
        self._head()
        self.position += 1
        return torch.from_numpy(self._logits)

    def profile(self, token: int) -> dict[str, float]:
        """Read one token like `step`; returns its seconds of thread CPU time in "linears", "head" and "rest"."""
        spent = {"linears": 0.0, "head": 0.0}

        def timed(part: str, product: Callable[[], float]) -> Callable[[], float]:
            def call() -> float:
                start = time.thread_time()
                result = product()
                spent[part] += time.thread_time() - start
                return result

            return call

        products, head = self._products, self._head
        self._products = [[timed("linears", product) for product in block] for block in products]
        self._head = timed("head", head)
        try:
            start = time.thread_time()
            self.step(token)
            total = time.thread_time() - start
        finally:
            self._products, self._head = products, head
        return spent | {"rest": total - sum(spent.values())}

    def _bind_blocks(
        self, weights: Weights, sparse: SparseModel | None, kernel: Kernel, threads: int
    ) -> list[list[Callable[[], float]]]:
        """[L][4] products without arguments, each returning the fraction of weights that it read."""
        taus = {(s.layer, s.name): tau for s, tau in sparse.thresholds().items()} if sparse else {}
        absorbed = {(s.layer, s.name): bias for s, bias in sparse.bias().items()} if sparse else {}
        sources = self._x, self._attended, self._x, self._mid
        targets = self._qkv, self._y, self._gate_up, self._y
        gemv = kernels.gemv if threads == 1 else kernels.gemv_parallel

        def bind(layer: int, group: int) -> Callable[[], float]:
            weight, parts = weights.joined[layer][group], weights.parts[layer][group]
            x, y = sources[group], targets[group]
            keys = [(layer, name) for name in GROUPS[group]]
            bias = _join_biases([absorbed.get(key, part.bias) for key, part in zip(keys, parts, strict=True)], parts)
            if kernel == "dense":
                return partial(_dense, weight, torch.from_numpy(x), bias, torch.from_numpy(y))
            tau, bounds = _segments([taus.get(key, -1.0) for key in keys], [part.out_features for part in parts], threads)
            return partial(_own, gemv, x, weight.numpy(), tau.astype(x.dtype), bounds, bias.numpy(), y)

        return [[bind(layer, group) for group in range(len(GROUPS))] for layer in range(len(weights.joined))]

    def _bind_head(self, weight: torch.Tensor, sparse: SparseModel | None, head: Head) -> Callable[[], None]:
        x, y = self._x, self._logits
        if head == "fp32":
            return partial(torch.mv, weight, torch.from_numpy(x), out=torch.from_numpy(y))
        if head == "bf16":
            return partial(kernels.bf16_mv, weight.bfloat16().view(torch.uint16).numpy(), x, y)
        size = {site: site.weight.numel() for site in sparse.sites}
        share = sum(p * size[site] for site, p in sparse.sparsity.items()) / sum(size.values())
        dropped = round(share * x.size)
        return partial(_sparse_head, x, weight.T.contiguous().numpy(), dropped, np.array([0, y.size]), y)


def _dense(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> float:
    if len(bias):
        torch.addmv(bias, weight, x, out=y)
    else:
        torch.mv(weight, x, out=y)
    return 1.0


def _own(gemv, x, Wt, tau, bounds, bias, y) -> float:
    return gemv(x, Wt, tau, bounds, bias, y) / Wt.size


def _sparse_head(x: np.ndarray, Wt: np.ndarray, dropped: int, bounds: np.ndarray, y: np.ndarray) -> None:
    """Logits from all but the `dropped` smallest entries of the final norm's output."""
    tau = np.partition(np.abs(x), dropped - 1)[dropped - 1 : dropped] if dropped else np.full(1, -1, x.dtype)
    kernels.gemv(x, Wt, tau, bounds, x[:0], y)


def _segments(taus: list[float], widths: list[int], threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds (S,) and output bounds (S + 1,): one segment where all parts share a threshold, else one per part."""
    if len(set(taus)) == 1:
        taus, widths = taus[:1], [sum(widths)]
    bounds = [0]
    for width in widths:
        start = bounds[-1]
        bounds += [start + width * (i + 1) // threads for i in range(threads)]
    return np.repeat(taus, threads), np.array(bounds)


def _join_biases(biases: list[torch.Tensor | None], linears: list[torch.nn.Linear]) -> torch.Tensor:
    """One bias (out,) for joined linears, zero for those without; empty where none has any."""
    like = linears[0].weight.detach()
    if all(bias is None for bias in biases):
        return like.new_empty(0)
    pairs = zip(biases, linears, strict=True)
    return torch.cat([like.new_zeros(w.out_features) if b is None else b.detach().to(like) for b, w in pairs])


def _token_ids(ids: torch.Tensor, name: str, model: PreTrainedModel) -> torch.Tensor:
    ids = torch.as_tensor(ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    vocabulary = model.config.vocab_size
    if ids.ndim != 1 or len(ids) == 0 or ids.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}; allowed is a LongTensor (P,) with P ≥ 1")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"{name} holds ids {int(ids.min())} … {int(ids.max())}; allowed are 0 … {vocabulary - 1}")
    return ids

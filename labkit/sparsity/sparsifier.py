"""Activation sparsity with spontaneous neurons, simulated exactly on any transformers model.

    y = W (S_tau(x) + alpha) + b        S_tau(x)_j = x_j 1{|x_j| > tau}

[TEAL] thresholds the input x of every linear layer; [paper] SPON adds an input-independent activation alpha, which after
training folds into the bias, b' = b + W alpha, so that a sparse kernel still skips every masked column. Sparsity is
token-local: a forward pass over a whole sequence and a cached one-token step mask the same entries.

`SparseModel` does this with forward pre-hooks on the pretrained modules, which stay where they are with the weights they had.
Simulation costs an elementwise pass; the speed-up of really skipping columns is in `kernels` and `decoding`.
"""

import contextlib
import math
import numbers
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from labkit.llm import fingerprint
from labkit.sparsity.calibration import Calibration
from labkit.sparsity.sites import Site, find_sites

SCORES = ("magnitude", "wina", "random", "random-rescaled")
MODES = ("threshold", "topk")

_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class SparseModel:
    """A model whose linear layers see sparsified inputs until `unwrap()`; also a context manager.

    Args:
        model: a transformers causal language model; wrapped in place.
        calib: thresholds of the same model.
        sparsity: share p in [0, 1) of the inputs to zero: one number, or a number for each `Site`.
        score: "magnitude" |x_j| [TEAL]; "wina" |x_j| ||W[:, j]||; "random", a sanity floor that ignores x;
            "random-rescaled", the same with survivors divided by 1 - p.
        mode: "threshold" compares with the calibrated quantile; "topk" keeps exactly floor((1 - p) d) entries of each token.
        dense_prefix: leading tokens that see the original model, neither masked nor shifted: a number of tokens (int) or a
            share of the sequence (float, at least one token unless 0). The first tokens carry the attention sink and are
            fragile. Positions count from the start of the KV cache; a share refers to the first (prefill) pass.
        seed: of the random scores.

    Raises:
        ValueError: p outside [0, 1), a site missing from or unknown to the dictionary, a calibration of another model, a model
            wrapped twice, `topk` keeping nothing, or (in the forward pass) a dense prefix that covers the whole sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calib: Calibration,
        sparsity: float | Mapping[Site, float],
        *,
        score: str = "magnitude",
        mode: str = "threshold",
        dense_prefix: int | float = 0.01,
        seed: int = 0,
    ):
        if score not in SCORES:
            raise ValueError(f"score={score!r}: expected one of {SCORES}")
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {MODES}")
        if dense_prefix < 0 or (isinstance(dense_prefix, float) and not dense_prefix < 1):
            raise ValueError(f"dense_prefix={dense_prefix}: expected a number of tokens, or a share in [0, 1)")
        if fingerprint(model) != calib.fingerprint:
            raise ValueError(f"calib was made for another model (fingerprint {calib.fingerprint}, not {fingerprint(model)})")
        self.model, self.calib = model, calib
        self.sites = find_sites(model)
        self.score, self.mode, self.dense_prefix, self.seed = score, mode, dense_prefix, seed
        if any(site.linear in _wrapped for site in self.sites):
            raise ValueError("model is already wrapped by a SparseModel: call its unwrap() first")
        self._column_norm = {s: s.weight.norm(dim=0) for s in self.sites} if score == "wina" else {}
        self._alpha: dict[Site, torch.Tensor] = {}
        self._output_bias: dict[Site, torch.Tensor] = {}
        self._original_bias: dict[Site, nn.Parameter | None] = {}
        self._kept: dict[Site, tuple[torch.Tensor, int]] = {}
        self._shrunk: tuple = (None, None)
        self._active = True
        self._batch, self._length, self._prefix = 1, 1, 0
        self.set_sparsity(sparsity)
        entrances = (model, model.base_model)  # OPT's own forward goes past its base model
        self._handles = [entrance.register_forward_pre_hook(self._enter_forward, with_kwargs=True) for entrance in entrances]
        for site in self.sites:
            self._handles += [
                site.linear.register_forward_pre_hook(lambda _, args, site=site: self._sparsify(site, args[0])),
                site.linear.register_forward_hook(lambda _, args, y, site=site: self._shift(site, y)),
            ]
        _wrapped.update(site.linear for site in self.sites)

    def set_sparsity(self, sparsity: float | Mapping[Site, float]) -> None:
        """Set the target sparsity p in [0, 1) of every site, and the thresholds that go with it."""
        if isinstance(sparsity, Mapping):
            unknown, missing = set(sparsity) - set(self.sites), set(self.sites) - set(sparsity)
            if unknown or missing:
                raise ValueError(
                    f"sparsity: {len(unknown)} unknown sites {sorted(map(str, unknown))[:4]}, "
                    f"{len(missing)} missing {sorted(map(str, missing))[:4]}"
                )
            levels = {site: sparsity[site] for site in self.sites}
        else:
            levels = dict.fromkeys(self.sites, sparsity)
        for site, p in levels.items():
            if not isinstance(p, numbers.Real) or not 0 <= p < 1:  # also false for NaN
                raise ValueError(f"sparsity={p!r} at site {site}: expected a share in [0, 1)")
            if self.mode == "topk" and _kept_per_token(p, site) == 0:
                raise ValueError(f"sparsity={p} at site {site} keeps floor((1 - p) {site.width}) = 0 entries of a token")
        self.sparsity = levels
        if self.mode == "threshold" and self.score in ("magnitude", "wina"):
            self._tau = {site: self.calib.quantile(site, p, self.score) for site, p in levels.items()}
        else:
            self._tau = dict(levels)  # random scores are uniform, so p is their own threshold
        self._random = torch.Generator(device=self.model.device).manual_seed(self.seed)
        self._kept.clear()

    def set_alpha(self, alpha: Mapping[Site, torch.Tensor] | None) -> None:
        """Set the spontaneous activations (d,) of some or all sites; None removes them. Undoes `absorb`.

        Raises:
            ValueError: an unknown site, or a vector of the wrong length, dtype or device, or with a non-finite entry.
        """
        alpha = dict(alpha or {})
        self._check_vectors("alpha", alpha, lambda site: site.width)
        self._restore_bias()
        self._alpha = alpha

    def set_output_bias(self, bias: Mapping[Site, torch.Tensor] | None) -> None:
        """Add a free vector (m,) to the output of some sites, in place of W alpha: the "BitFit" ablation. None removes it.

        Undoes `absorb`.
        """
        bias = dict(bias or {})
        self._check_vectors("bias", bias, lambda site: site.weight.shape[0])
        self._restore_bias()
        self._output_bias = bias

    def absorb(self) -> dict[Site, torch.Tensor]:
        """Fold the spontaneous neurons into the layers' biases and return them: b' = b + W alpha (m,), exact algebra.

        Layers without a bias get one. `set_alpha` and `unwrap` restore the original.
        """
        biases = self.bias()
        for site, bias in biases.items():
            self._original_bias.setdefault(site, site.linear.bias)
            site.linear.bias = nn.Parameter(bias, requires_grad=False)
        return biases

    def unwrap(self) -> PreTrainedModel:
        """Remove every hook and absorbed bias; return the model as it was."""
        self._restore_bias()
        if self._handles:  # a second call must not touch another SparseModel's registration
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for site in self.sites:
                _wrapped.discard(site.linear)
        return self.model

    @contextlib.contextmanager
    def dense(self) -> Iterator[PreTrainedModel]:
        """Within the block the model is the original one: the teacher."""
        absorbed = {site: site.linear.bias for site in self._original_bias}
        for site in absorbed:
            site.linear.bias = self._original_bias[site]
        self._active = False
        try:
            yield self.model
        finally:
            self._active = True
            for site, bias in absorbed.items():
                site.linear.bias = bias

    @property
    def alpha(self) -> dict[Site, torch.Tensor]:
        """The spontaneous activations in use, (d,) per site."""
        return dict(self._alpha)

    def bias(self) -> dict[Site, torch.Tensor]:
        """b + W alpha (m,) for each site with a bias, a spontaneous activation or a free output bias (which is added)."""
        biases = {}
        for site in self.sites:
            bias, shift = self._original_bias.get(site, site.linear.bias), self._shift_of(site)
            if bias is not None or shift is not None:
                biases[site] = sum(part.detach() for part in (bias, shift) if part is not None)
        return biases

    def thresholds(self) -> dict[Site, float]:
        """Threshold of the score at each site (of |x| for "magnitude")."""
        if self.mode != "threshold":
            raise ValueError(f"mode={self.mode!r} has no thresholds: it ranks the entries of each token")
        return dict(self._tau)

    def actual_sparsity(self) -> dict[Site, float]:
        """Share of the inputs zeroed in the latest sparse forward pass, dense prefix excluded."""
        return {site: 1 - float(kept) / total for site, (kept, total) in self._kept.items()}

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def __enter__(self) -> "SparseModel":
        return self

    def __exit__(self, *_exception) -> None:
        self.unwrap()

    def __repr__(self) -> str:
        mean = sum(self.sparsity.values()) / len(self.sparsity)
        return f"SparseModel({type(self.model).__name__}, {mean:.0%} sparse by {self.score}, dense_prefix={self.dense_prefix})"

    def _enter_forward(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Find out which of the coming tokens belong to the dense prefix."""
        inputs = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        inputs = args[0] if inputs is None else inputs
        self._batch, self._length = inputs.shape[:2]
        past = kwargs.get("cache", kwargs.get("past_key_values"))  # the name differs between transformers versions
        start = past.get_seq_length() if past is not None else 0
        if isinstance(self.dense_prefix, int):
            self._prefix = max(0, self.dense_prefix - start)
        else:
            share = math.floor(self.dense_prefix * self._length)
            self._prefix = max(1, share) if self.dense_prefix and not start else 0
        if self._active and not start and self._prefix >= self._length:
            raise ValueError(
                f"dense_prefix={self.dense_prefix} keeps all {self._length} tokens dense: nothing would be sparsified"
            )
        if self._active:
            self._kept.clear()
        self._shrunk = (None, None)

    def _sparsify(self, site: Site, x: torch.Tensor) -> torch.Tensor | None:
        if not self._active or self._prefix >= self._length:
            return None
        shape = x.shape
        x = x.reshape(self._batch, self._length, site.width)
        prefix, x = x[:, : self._prefix], x[:, self._prefix :]
        if self.score == "magnitude" and self.mode == "threshold":
            x, kept = self._shrink(site, x)
        else:
            x = x * self._mask(site, x)
            kept = _count_nonzero(x)
        self._kept[site] = kept, x.numel()
        if self.score == "random-rescaled":
            x = x / (1 - self.sparsity[site])
        if site in self._alpha and site not in self._original_bias:
            x = x + self._alpha[site]
        if self._prefix:
            x = torch.cat((prefix, x), dim=1)
        return x.reshape(shape)

    def _shrink(self, site: Site, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """S_tau(x) and the number of entries kept, computed once for the linears that read the same tensor (q, k and v)."""
        key = (site.group, self._tau[site])
        if self._shrunk[0] != key:
            sparse = functional.hardshrink(x, self._tau[site])  # x_j where |x_j| > tau, else 0
            self._shrunk = key, (sparse, _count_nonzero(sparse))
        return self._shrunk[1]

    def _mask(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        if self.score == "magnitude":
            scores = x.abs()
        elif self.score == "wina":
            scores = x.abs() * self._column_norm[site]
        else:
            scores = torch.rand(x.shape, generator=self._random, device=x.device)
        if self.mode == "threshold":
            return scores > self._tau[site]
        chosen = scores.topk(_kept_per_token(self.sparsity[site], site), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)

    def _shift(self, site: Site, y: torch.Tensor) -> torch.Tensor | None:
        """Add a free output bias; keep an absorbed one away from the dense prefix."""
        absorbed = site in self._original_bias
        if not self._active or not (self._prefix if absorbed else site in self._output_bias):
            return None
        shape = y.shape
        y = y.reshape(self._batch, self._length, -1)
        prefix, y = y[:, : self._prefix], y[:, self._prefix :]
        if not absorbed:
            y = y + self._output_bias[site]
        elif (shift := self._shift_of(site)) is not None:
            prefix = prefix - shift
        return torch.cat((prefix, y), dim=1).reshape(shape)

    def _shift_of(self, site: Site) -> torch.Tensor | None:
        """W alpha plus a free output bias (m,), or None."""
        shift = self._output_bias.get(site)
        if site in self._alpha:
            neurons = site.weight @ self._alpha[site]
            shift = neurons if shift is None else neurons + shift
        return shift

    def _restore_bias(self) -> None:
        for site, bias in self._original_bias.items():
            site.linear.bias = bias
        self._original_bias.clear()

    def _check_vectors(self, name: str, vectors: Mapping[Site, torch.Tensor], width) -> None:
        unknown = set(vectors) - set(self.sites)
        if unknown:
            raise ValueError(f"{name}: unknown sites {sorted(map(str, unknown))[:4]}")
        for site, vector in vectors.items():
            weight = site.weight
            if not isinstance(vector, torch.Tensor):
                raise ValueError(f"{name} at site {site}: expected a tensor ({width(site)},), got {type(vector).__name__}")
            if vector.shape != (width(site),) or vector.dtype != weight.dtype or vector.device != weight.device:
                raise ValueError(
                    f"{name} at site {site}: expected ({width(site)},) {weight.dtype} on {weight.device}, got "
                    f"{tuple(vector.shape)} {vector.dtype} on {vector.device}"
                )
            if not vector.isfinite().all():
                raise ValueError(f"{name} at site {site} has a non-finite entry")


def _count_nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sign().abs().sum()  # an order of magnitude faster than count_nonzero


def _kept_per_token(p: float, site: Site) -> int:
    return math.floor((1 - p) * site.width + 1e-9)

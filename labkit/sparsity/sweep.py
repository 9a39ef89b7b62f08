"""The next token at many sparsities at once, fast enough to sit behind a slider.

The prompt up to its last token is read densely and cached. The last token then runs once as a batch whose rows differ only in
threshold and spontaneous neurons: two rows, without and with neurons, for every sparsity. Sparsity is token-local, so each
row is what a one-token step at that sparsity would give.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from labkit.llm import check_inputs
from labkit.sparsity.calibration import Calibration
from labkit.sparsity.sites import Site, find_sites

_CHUNK = 3  # sparsities at a time, so that the repeated cache stays small


@dataclass(frozen=True)
class Sweep:
    """Next-token log-probabilities after one prompt: `dense` (V,), `teal` and `spon` (L, V) at the sparsities `levels` (L,)."""

    levels: tuple[float, ...]
    dense: torch.Tensor
    teal: torch.Tensor
    spon: torch.Tensor


@torch.inference_mode()
def next_token_sweep(
    model: PreTrainedModel,
    calib: Calibration,
    input_ids: torch.Tensor,
    levels: Sequence[float],
    alpha_at: Callable[[float], Mapping[Site, torch.Tensor]],
) -> Sweep:
    """Sparsify the last token of a prompt at every level, without and with spontaneous neurons.

    Args:
        model: the dense model, not wrapped.
        input_ids: one prompt (1, T), at least two tokens.
        levels: sparsities in [0, 1), L of them.
        alpha_at: spontaneous neurons (d,) per site for a sparsity.
    """
    check_inputs(model, input_ids)
    if len(input_ids) != 1:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: expected one prompt (1, T)")
    cache = model(input_ids=input_ids[:, :-1], use_cache=True).cache
    chunks = [levels[i : i + _CHUNK] for i in range(0, len(levels), _CHUNK)]
    parts = [_sweep_chunk(model, calib, input_ids[:, -1:], copy.deepcopy(cache), chunk, alpha_at) for chunk in chunks]
    dense, teal, spon = zip(*parts, strict=True)
    return Sweep(tuple(levels), dense[0], torch.cat(teal), torch.cat(spon))


def _sweep_chunk(
    model: PreTrainedModel,
    calib: Calibration,
    token: torch.Tensor,
    cache: Cache,
    levels: Sequence[float],
    alpha_at: Callable[[float], Mapping[Site, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (V,), (L, V), (L, V): dense, and sparse without and with neurons."""
    cache.batch_repeat_interleave(2 * len(levels) + 1)
    neurons = [alpha_at(p) for p in levels]

    def hook(site: Site):
        tau = [calib.quantile(site, p) for p in levels]
        tau = torch.tensor([-1.0, *tau, *tau], dtype=site.weight.dtype)[:, None, None]  # row 0 keeps everything
        alpha = torch.stack([alpha[site] if site in alpha else torch.zeros_like(site.weight[0]) for alpha in neurons])
        shift = torch.cat((torch.zeros_like(alpha[:1]).expand(len(levels) + 1, -1), alpha))[:, None]  # (2 L + 1, 1, d)
        return site.linear.register_forward_pre_hook(lambda _, args: args[0] * (args[0].abs() > tau) + shift)

    handles = [hook(site) for site in find_sites(model)]
    try:
        logits = model(input_ids=token.expand(2 * len(levels) + 1, 1), cache=cache, use_cache=True).logits[:, -1]
    finally:
        for handle in handles:
            handle.remove()
    dense, teal, spon = logits.log_softmax(-1).split([1, len(levels), len(levels)])
    return dense[0], teal, spon

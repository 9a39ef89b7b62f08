"""Where a transformer can be sparsified: the linear layers of its blocks, and the four activations that feed them.

In a Llama-like block seven projections read four tensors: q, k and v share the attention input, o reads the attention output,
gate and up share the MLP input, down reads the MLP's middle. Zeroing entry j of such a tensor spares column j of every
weight matrix that reads it, so the *input group*, not the projection, is what a magnitude threshold belongs to.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from labkit.llm import check_inputs

INPUT_GROUPS = ("attn_in", "attn_out", "mlp_in", "mlp_mid")

# (end of the module path) -> (short name, input group); longer endings are looked up first
_KNOWN = {
    "q_proj": ("q", "attn_in"),
    "k_proj": ("k", "attn_in"),
    "v_proj": ("v", "attn_in"),
    "qkv_proj": ("qkv", "attn_in"),  # Phi-3
    "o_proj": ("o", "attn_out"),
    "gate_proj": ("gate", "mlp_in"),
    "up_proj": ("up", "mlp_in"),
    "gate_up_proj": ("gate_up", "mlp_in"),  # Phi-3
    "down_proj": ("down", "mlp_mid"),
    "attn.c_attn": ("qkv", "attn_in"),  # GPT-2, whose Conv1D stores the transposed weight
    "attn.c_proj": ("o", "attn_out"),
    "mlp.c_fc": ("up", "mlp_in"),
    "mlp.c_proj": ("down", "mlp_mid"),
    "self_attn.out_proj": ("o", "attn_out"),  # OPT
    "fc1": ("up", "mlp_in"),
    "fc2": ("down", "mlp_mid"),
    "query_key_value": ("qkv", "attn_in"),  # GPT-NeoX
    "attention.dense": ("o", "attn_out"),
    "dense_h_to_4h": ("up", "mlp_in"),
    "dense_4h_to_h": ("down", "mlp_mid"),
}


@dataclass(frozen=True)
class Site:
    """One linear layer whose input may be sparsified; equal and hashable by (layer, name).

    Attributes:
        layer: index of the transformer block, from 0.
        name: short name of the projection, e.g. "q" or "down".
        linear: the module itself (`nn.Linear`, or GPT-2's `Conv1D`).
        input_group: the tensor it reads, one of `INPUT_GROUPS`; for unknown architectures, "other:" and the module's path.
    """

    layer: int
    name: str
    linear: nn.Module = field(compare=False, repr=False)
    input_group: str = field(compare=False)

    @property
    def weight(self) -> torch.Tensor:
        """Weight as (out, in), whatever the module's own layout."""
        return self.linear.weight.T if isinstance(self.linear, Conv1D) else self.linear.weight

    @property
    def width(self) -> int:
        """Number d of input channels."""
        return self.weight.shape[1]

    @property
    def group(self) -> tuple[int, str]:
        """Key of the activation that this site reads."""
        return self.layer, self.input_group

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}"


def find_sites(model: PreTrainedModel, which: str | Iterable[str] = "all", layers: Iterable[int] | None = None) -> list[Site]:
    """List the sparsifiable linear layers of a causal language model, in the order of the forward pass.

    Args:
        model: any transformers causal language model.
        which: "all", one short name ("down"), several joined by "+" ("o+down"), or a list of names.
        layers: block indices to keep; None keeps all.

    Raises:
        ValueError: no linear layer is found (the module names are listed), `which` or `layers` names something the model
            does not have, or the linears are quantised (bitsandbytes and kin), which hides their weights.

    An architecture that the table does not cover falls back to every `nn.Linear` but the output embedding, with a warning.
    """
    sites = _known_sites(model) or _fallback_sites(model)
    names = list(dict.fromkeys(site.name for site in sites))
    if which != "all":
        wanted = which.split("+") if isinstance(which, str) else list(which)
        if not wanted or set(wanted) - set(names):
            raise ValueError(f"which={which!r}: this model's sites are 'all' or any of {names}")
        sites = [site for site in sites if site.name in wanted]
    if layers is not None:
        layers = list(layers)
        depth = 1 + max(site.layer for site in sites)
        if not layers or not set(layers) <= set(range(depth)):
            raise ValueError(f"layers={layers}: expected some of 0 … {depth - 1}")
        sites = [site for site in sites if site.layer in layers]
    return sites


def watch_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, sites: Sequence[Site], callback: Callable[[Site, torch.Tensor], None]
) -> None:
    """Run one forward pass and call `callback(site, x)` with the input x (tokens, d) of every site as it comes by.

    Args:
        input_ids: token ids (B, T), or input embeddings (B, T, d).
    """

    def hook(site: Site) -> RemovableHandle:
        def watch(_module: nn.Module, args: tuple) -> None:  # returning anything would replace the input
            callback(site, args[0].reshape(-1, site.width))

        return site.linear.register_forward_pre_hook(watch)

    handles = [hook(site) for site in sites]
    try:
        model.base_model(**check_inputs(model, input_ids), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def site_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, dtype: torch.dtype = torch.float16
) -> dict[tuple[int, str], torch.Tensor]:
    """Inputs (B T, d) of a model's linear layers, keyed by (layer, input group); half precision keeps 256 tokens at 50 MB."""
    inputs: dict[tuple[int, str], torch.Tensor] = {}
    watch_inputs(model, input_ids, find_sites(model), lambda site, x: inputs.setdefault(site.group, x.to(dtype)))
    return inputs


def _known_sites(model: PreTrainedModel) -> list[Site]:
    """Sites by the table, block by block from input to output; none if it misses a linear layer of a block."""
    sites = []
    for path, module in model.named_modules():
        for ending in sorted(_KNOWN, key=len, reverse=True):
            if path == ending or path.endswith("." + ending):
                name, group = _KNOWN[ending]
                sites.append(Site(_layer_index(path), name, _checked(path, module), group))
                break
        else:
            if isinstance(module, nn.Linear | Conv1D) and _BLOCK.search(path):
                return []
    return sorted(sites, key=lambda site: (site.layer, INPUT_GROUPS.index(site.input_group)))


def _fallback_sites(model: PreTrainedModel) -> list[Site]:
    head = model.get_output_embeddings()
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not linears:
        modules = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(f"model={type(model).__name__} has no linear layer to sparsify; its modules are {modules}")
    warnings.warn(
        f"{type(model).__name__} is not in the table of known architectures: every nn.Linear but the output embedding is "
        "sparsified",
        stacklevel=3,
    )
    return [Site(_layer_index(path), path, _checked(path, module), f"other:{path}") for path, module in linears]


_BLOCK = re.compile(r"\.(\d+)\.")


def _layer_index(path: str) -> int:
    number = _BLOCK.search(path)
    return int(number[1]) if number else 0


def _checked(path: str, module: nn.Module) -> nn.Module:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or weight is None or not weight.is_floating_point():
        raise ValueError(
            f"model has {path} as {type(module).__name__}: quantised or adapted linears are not supported, load the model in "
            "float32, float16 or bfloat16"
        )
    return module

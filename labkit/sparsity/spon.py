"""Spontaneous neurons: one learnable constant activation per linear layer, distilled from the dense model.

[paper] All pretrained weights stay frozen; the alphas alone minimise the forward KL to the dense model's outputs,

    L(A) = E_u (1/T) sum_t KL( softmax z_t(u) || softmax z~_t(u; A) ),

teacher first, temperature 1, every position. The mask's own derivative is taken as zero, exact almost everywhere.

[ours] alpha = r a with r the rms of the site's dense input, and Adam on a: one learning rate then suits every layer, and tens
of steps suffice where a rate of 1e-5 on alpha itself needs thousands.

    for step in spon_steps(sparse, batches, steps=30): ...     an iterator, for whoever wants to watch or stop
    result = fit_spon(sparse, batches, steps=30)               the same, run to the end
"""

import copy
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.atomic import replacing
from labkit.llm import check_inputs
from labkit.sparsity.metrics import kl_divergence
from labkit.sparsity.sites import Site, find_sites
from labkit.sparsity.sparsifier import SparseModel

LOSSES = ("kl", "reverse-kl", "hidden-mse")


@dataclass(frozen=True)
class SponStep:
    """State after one optimiser step: its number from 1, the loss it was taken on, and the vectors that result."""

    step: int
    loss: float
    alpha: dict[Site, torch.Tensor]


@dataclass(frozen=True)
class SponResult:
    """Outcome of a fit: alpha (d,) per site (output biases (m,) if so parametrised), loss per step, seconds taken."""

    alpha: dict[Site, torch.Tensor]
    loss_trace: list[float]
    seconds: float

    def __repr__(self) -> str:
        return f"SponResult({len(self.alpha)} sites, {len(self.loss_trace)} steps, loss {self.loss_trace[-1]:.3g})"


def spon_steps(
    sparse: SparseModel,
    batches: Sequence[torch.Tensor],
    *,
    steps: int,
    lr: float = 5e-3,
    init: str = "zero",
    sites: str | Iterable[str] = "all",
    layers: Iterable[int] | None = None,
    loss: str = "kl",
    output_bias: bool = False,
    seed: int = 0,
) -> Iterator[SponStep]:
    """Train spontaneous neurons, one optimiser step per iteration; `sparse` carries the current ones all along.

    Args:
        sparse: the sparse model, at the sparsity to train for.
        batches: windows of token ids (b, T), or of input embeddings (b, T, d), visited in a new random order each epoch.
        steps: optimiser steps, at least 1. Adam, cosine from `lr` to 0, gradients clipped at norm 1.
        lr: step size in units of each input's rms.
        init: "zero" as in the paper, or "mean", the mean residual.
        sites, layers: where to put neurons, as for `find_sites`.
        loss: "kl" [paper]; ablations "reverse-kl" and "hidden-mse" (relative squared error of the final hidden state).
        output_bias: train a free output bias (m,) at each site in place of W alpha, the "BitFit" ablation.
        seed: of the order of the batches.

    Raises:
        ValueError: no sites, no steps, an unknown option.
        FloatingPointError: the loss is not finite; the message has the step.
    """
    if steps < 1 or lr <= 0:
        raise ValueError(f"steps={steps}, lr={lr}: both must be positive")
    if init not in ("zero", "mean") or loss not in LOSSES:
        raise ValueError(f"init={init!r}, loss={loss!r}: expected init 'zero' or 'mean' and loss one of {LOSSES}")
    if not len(batches):
        raise ValueError("batches is empty: give at least one batch of windows")
    batches = [check_inputs(sparse.model, batch) for batch in batches]
    chosen = find_sites(sparse.model, sites, layers)
    install = sparse.set_output_bias if output_bias else sparse.set_alpha
    units = {site: _unit(sparse, site, output_bias) for site in chosen}
    parameters = {site: _initial(sparse, site, init, output_bias) / units[site] for site in chosen}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters.values(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = _epochs(len(batches), seed)
    for step in range(1, steps + 1):
        inputs = batches[next(order)]
        with torch.enable_grad():
            install({site: units[site] * parameters[site] for site in chosen})
            value = _loss(sparse, inputs, loss)
            if not value.isfinite():
                install({})
                raise FloatingPointError(f"the loss is {value.item()} at step {step} of {steps}: lower lr={lr}")
            optimizer.zero_grad()
            value.backward()
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        schedule.step()
        current = {site: (units[site] * parameters[site]).detach() for site in chosen}
        install(current)
        yield SponStep(step, value.item(), current)


def fit_spon(
    sparse: SparseModel,
    batches: Sequence[torch.Tensor],
    *,
    steps: int,
    on_step: Callable[[SponStep], None] | None = None,
    progress: bool = False,
    **options,
) -> SponResult:
    """Run `spon_steps` to the end (same options) and leave the trained neurons in `sparse`.

    Args:
        on_step: called with every `SponStep`.
        progress: show a bar with the loss.
    """
    started, trace = time.perf_counter(), []
    with tqdm(total=steps, desc="SPON", unit="step", disable=not progress) as bar:
        for state in spon_steps(sparse, batches, steps=steps, **options):
            trace.append(state.loss)
            bar.set_postfix(loss=f"{state.loss:.3f}", refresh=False)
            bar.update()
            if on_step:
                on_step(state)
    return SponResult(state.alpha, trace, time.perf_counter() - started)


def save_alpha(path: str | os.PathLike, alpha: Mapping[Site, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write spontaneous neurons as float16, one (layers, d) tensor per projection; layers without one hold zeros."""
    depth = 1 + max(site.layer for site in alpha)
    stacks: dict[str, torch.Tensor] = {}
    for site, vector in alpha.items():
        stack = stacks.setdefault(site.name, torch.zeros(depth, len(vector), dtype=torch.float16))
        stack[site.layer] = vector
    with replacing(path) as partial:
        save_file(stacks, partial, metadata=dict(metadata or {}))


def load_alpha(path: str | os.PathLike, model: PreTrainedModel) -> dict[Site, torch.Tensor]:
    """Read spontaneous neurons for a model, in its own dtype and on its device.

    Raises:
        ValueError: the file was made for a model of other sizes.
    """
    stacks = load_file(path)
    alpha = {}
    for site in find_sites(model):
        if site.name in stacks:
            stack = stacks[site.name]
            if site.layer >= len(stack) or stack.shape[1] != site.width:
                raise ValueError(
                    f"{os.fspath(path)} holds {tuple(stack.shape)} for {site.name!r}, but site {site} of this model reads "
                    f"{site.width} channels"
                )
            alpha[site] = stack[site.layer].to(site.weight)
    return alpha


def interpolate_alpha(trained: Mapping[float, Mapping[Site, torch.Tensor]], p: float) -> dict[Site, torch.Tensor]:
    """Spontaneous neurons between the trained sparsities [ours]: linear in p, from none at 0, constant beyond the last.

    Args:
        trained: neurons (d,) per site, keyed by the sparsity that they were trained at.
        p: sparsity in [0, 1).
    """
    if not trained:
        raise ValueError("trained is empty: give the neurons of at least one sparsity")
    levels = sorted(trained)
    upper = min((level for level in levels if level >= p), default=levels[-1])
    lower = max((level for level in levels if level < upper), default=0.0)
    share = min(1.0, (p - lower) / (upper - lower))
    low = trained.get(lower, {})
    return {site: share * high + (1 - share) * low.get(site, 0) for site, high in trained[upper].items()}


def tail_model(model: PreTrainedModel, blocks: int) -> PreTrainedModel:
    """The last `blocks` transformer blocks with the final norm and head, as a model of its own.

    It takes the hidden states from `tail_inputs` as `inputs_embeds`, so a training step costs a fraction of the whole model's.
    Weights are shared, the blocks' modules are not: it may be wrapped while the model is in other use.
    """
    body = model.base_model
    if not hasattr(body, "layers"):
        raise ValueError(f"model={type(model).__name__} keeps its blocks elsewhere than in `layers`, as Llama-like models do")
    depth = len(body.layers)
    if not 1 <= blocks <= depth:
        raise ValueError(f"blocks={blocks}: expected 1 … {depth}")
    tail, tail_body = _shell(model), _shell(body)
    tail_body._modules["layers"] = _twin(body.layers[depth - blocks :])
    tail_body.config = tail.config = copy.deepcopy(model.config)
    tail.config.num_hidden_layers = blocks
    tail.config.use_cache = False  # the blocks would look for the places of their old numbers in it
    if getattr(tail.config, "layer_types", None):  # Gemma's blocks differ in attention span
        tail.config.layer_types = tail.config.layer_types[depth - blocks :]
    tail._modules[model.base_model_prefix] = tail_body
    return tail


@torch.no_grad()
def tail_inputs(model: PreTrainedModel, input_ids: torch.Tensor, blocks: int) -> torch.Tensor:
    """Dense hidden states (B, T, d) as they enter the last `blocks` blocks."""
    states = []
    first = model.base_model.layers[-blocks]
    handle = first.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    try:
        model.base_model(**check_inputs(model, input_ids), use_cache=False)
    finally:
        handle.remove()
    return states[0]


def _shell(module: nn.Module) -> nn.Module:
    """Shallow copy with its own table of children and its own hooks."""
    shell = copy.copy(module)
    shell._modules = module._modules.copy()
    shell._forward_pre_hooks = OrderedDict()
    shell._forward_pre_hooks_with_kwargs = OrderedDict()
    return shell


def _twin(module: nn.Module) -> nn.Module:
    """A module and all its children anew, with hooks and bias slots of their own, over the same weights."""
    twin = _shell(module)
    twin._parameters = module._parameters.copy()
    twin._forward_hooks = OrderedDict()
    twin._modules = {name: child and _twin(child) for name, child in module._modules.items()}
    return twin


def _loss(sparse: SparseModel, inputs: dict[str, torch.Tensor], loss: str) -> torch.Tensor:
    if loss == "hidden-mse":
        with torch.no_grad(), sparse.dense() as dense:
            target = dense.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = sparse.model.base_model(**inputs, use_cache=False).last_hidden_state
        return (hidden - target).square().mean() / target.square().mean()
    with torch.no_grad(), sparse.dense() as dense:
        log_p = dense(**inputs, use_cache=False).logits.log_softmax(-1)
    log_q = sparse(**inputs, use_cache=False).logits.log_softmax(-1)
    return (kl_divergence(log_p, log_q) if loss == "kl" else kl_divergence(log_q, log_p)).mean()


def _unit(sparse: SparseModel, site: Site, output_bias: bool) -> float:
    """Scale of one parameter: the input's rms, or the rms output that such an input would give through white weights."""
    scale = sparse.calib.rms(site)
    return scale * float(site.weight.norm()) / math.sqrt(site.weight.shape[0]) if output_bias else scale


def _initial(sparse: SparseModel, site: Site, init: str, output_bias: bool) -> torch.Tensor:
    weight = site.weight
    if init == "zero":
        return weight.new_zeros(weight.shape[0] if output_bias else weight.shape[1])
    residual = sparse.calib.mean_residual(site, sparse.sparsity[site]).to(weight)
    return weight @ residual if output_bias else residual


def _epochs(count: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()

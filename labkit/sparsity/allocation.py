"""Which projections can afford how much sparsity? Greedy allocation within each block [TEAL].

Start a block dense. At each step try raising each projection's sparsity by the same number of weights, a small share `step` of
q's, and keep the one that moves the block's output least; stop when the parameter-weighted sparsity of the block reaches the
target. The path is nested: one run to 70 % holds the allocation for every lower target.
"""

from collections.abc import Iterator

import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.llm import check_inputs
from labkit.sparsity.calibration import Calibration
from labkit.sparsity.sites import Site, find_sites


def greedy_allocation(
    model: PreTrainedModel, calib: Calibration, input_ids: torch.Tensor, target: float, *, progress: bool = False
) -> dict[Site, float]:
    """Sparsity of every site such that each block's parameter-weighted sparsity reaches `target` in (0, 1).

    Args:
        input_ids: token ids (B, T) on which block outputs are compared; a few hundred tokens are enough.
    """
    depth = 1 + max(site.layer for site in find_sites(model))
    layers = tqdm(range(depth), desc="greedy", unit="block", disable=not progress)
    paths = pd.concat([greedy_path(model, calib, input_ids, layer, stop=target) for layer in layers])
    return read_allocation(model, paths, target)


def greedy_path(
    model: PreTrainedModel, calib: Calibration, input_ids: torch.Tensor, layer: int, *, stop: float = 0.7, step: float = 0.05
) -> pd.DataFrame:
    """The greedy path of one block, from dense to a sparsity of at least `stop`.

    Returns:
        One row per step: `layer`, the block's `sparsity`, the output `error` (mean over the last quarter of positions of the L2
        distance) and one column of sparsity per projection.
    """
    return pd.DataFrame(_steps(model, calib, input_ids, layer, stop, step))


def read_allocation(model: PreTrainedModel, paths: pd.DataFrame, target: float) -> dict[Site, float]:
    """Read the allocation at one target off the paths of all blocks: in each, the first row that reaches it.

    Raises:
        ValueError: a block's path ends below the target.
    """
    allocation = {}
    for site in find_sites(model):
        path = paths[(paths["layer"] == site.layer) & (paths["sparsity"] >= target - 1e-9)]
        if path.empty:
            raise ValueError(f"target={target}: the path of block {site.layer} does not reach it")
        allocation[site] = float(path.iloc[0][site.name])
    return allocation


@torch.inference_mode()
def _steps(
    model: PreTrainedModel, calib: Calibration, input_ids: torch.Tensor, layer: int, stop: float, step: float
) -> Iterator[dict[str, float]]:
    if not 0 < stop < 1 or not 0 < step < 1:
        raise ValueError(f"stop={stop}, step={step}: both must lie in (0, 1)")
    sites = find_sites(model, layers=[layer])
    block, args, kwargs = _block_call(model, input_ids, layer)
    tail = -(-input_ids.shape[1] // 4)
    size = {site: site.weight.numel() for site in sites}
    weight = {site: size[site] / sum(size.values()) for site in sites}
    raise_by = {site: step * size[sites[0]] / size[site] for site in sites}  # equal numbers of weights
    level = dict.fromkeys(sites, 0.0)
    tau = dict.fromkeys(sites, 0.0)

    def output() -> torch.Tensor:
        y = block(*args, **kwargs)
        return (y[0] if isinstance(y, tuple) else y)[:, -tail:]

    def mask(site: Site, x: torch.Tensor) -> torch.Tensor:
        return x * (x.abs() > tau[site])

    dense = output()
    handles = [s.linear.register_forward_pre_hook(lambda _, a, site=s: mask(site, a[0])) for s in sites]
    try:
        sparsity = 0.0
        while sparsity < stop - 1e-9:
            errors = {}
            for site in sites:
                raised = level[site] + raise_by[site]
                if raised >= 1:
                    continue
                current, tau[site] = tau[site], calib.quantile(site, raised)
                errors[site] = float((output() - dense).norm(dim=-1).mean())
                tau[site] = current
            if not errors:
                raise ValueError(f"stop={stop}: steps of {step} cannot get beyond {sparsity:.3f} in block {layer}")
            best = min(errors, key=errors.get)
            level[best] += raise_by[best]
            tau[best] = calib.quantile(best, level[best])
            sparsity = sum(weight[site] * level[site] for site in sites)
            yield {"layer": layer, "sparsity": sparsity, "error": errors[best]} | {s.name: level[s] for s in sites}
    finally:
        for handle in handles:
            handle.remove()


def _block_call(model: PreTrainedModel, input_ids: torch.Tensor, layer: int) -> tuple[nn.Module, tuple, dict]:
    """The block that holds a layer's sites, and the arguments the dense model calls it with."""
    member = find_sites(model, layers=[layer])[0].linear
    block = next(
        module
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList)
        for module in stack
        if any(part is member for part in module.modules())
    )
    calls = []
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        model.base_model(**check_inputs(model, input_ids), use_cache=False)
    finally:
        handle.remove()
    return block, *calls[0]

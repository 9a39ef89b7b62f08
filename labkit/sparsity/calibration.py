"""Thresholds from a dense forward pass: how large must an activation be to survive at sparsity p?

A site's threshold is the p-quantile of its score, pooled over the tokens and channels of a calibration set [TEAL]:

    tau_p = the k-th smallest score, k = ceil(p N)            magnitude score |x_j|                     (TEAL)
                                                               weighted score |x_j| * ||W[:, j]||_2     (WINA)

One dense pass collects every order statistic the tables need, the rms of each input (the unit in which spontaneous neurons
are trained) and, at a few levels p, the mean residual E[x - S_tau(x)].
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from labkit.atomic import replacing
from labkit.llm import fingerprint
from labkit.sparsity.sites import Site, find_sites, watch_inputs


@dataclass(frozen=True)
class Calibration:
    """What one dense pass says about the inputs of a model's linear layers. Made by `calibrate`.

    Attributes:
        fingerprint: hash of the model's architecture; a calibration fits no other model.
        samples: N per input group, tokens times channels.
        tables: sorted order statistics (R,) of the score, keyed by `_key(site, score)`.
        scale: root mean square of the input, keyed by input group.
        residuals: E[x - S_tau(x)] (d,), keyed by input group and sparsity level.
    """

    fingerprint: str
    samples: dict[str, int]
    tables: dict[str, torch.Tensor]
    scale: dict[str, float]
    residuals: dict[str, torch.Tensor]

    def quantile(self, site: Site, p: float, score: str = "magnitude") -> float:
        """Threshold tau that zeroes a share p in [0, 1) of the calibration scores: the ceil(p N)-th smallest.

        Exact where the table holds all N order statistics, otherwise interpolated between its two nearest ranks.
        """
        if not 0 <= p < 1:
            raise ValueError(f"p={p}: sparsity must lie in [0, 1)")
        table = self.tables.get(_key(site, score))
        if table is None:
            raise ValueError(f"site {site} has no {score!r} table here: calibrate it, with wina=True for the weighted score")
        samples = self.samples[_group(site)]
        rank = math.ceil(p * samples - 1e-9)  # the tolerance keeps 0.6 * 5 at 3
        if rank == 0:
            return 0.0
        return float(np.interp(rank, _ranks(samples, len(table)), table.numpy()))

    def rms(self, site: Site) -> float:
        """Root mean square of the site's dense input over tokens and channels."""
        return self.scale[_group(site)]

    def mean_residual(self, site: Site, p: float) -> torch.Tensor:
        """E[x - S_tau(x)] (d,) on the calibration tokens, exact, for one of the levels given to `calibrate`."""
        key = f"{_group(site)}@{p:g}"
        if key not in self.residuals:
            levels = sorted({float(name.split("@")[1]) for name in self.residuals})
            raise ValueError(f"p={p}: mean residuals were calibrated at {levels}; pass levels=({p},) to calibrate")
        return self.residuals[key]

    def save(self, path: str | os.PathLike) -> None:
        """Write to one safetensors file, atomically."""
        tensors = {f"table:{k}": v for k, v in self.tables.items()} | {
            f"residual:{k}": v.half() for k, v in self.residuals.items()
        }
        header = {"fingerprint": self.fingerprint, "samples": json.dumps(self.samples), "scale": json.dumps(self.scale)}
        with replacing(path) as partial:
            save_file(tensors, partial, metadata=header)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """Read what `save` wrote (mean residuals come back from float16)."""
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        tensors = load_file(path)
        return cls(
            fingerprint=header["fingerprint"],
            samples=json.loads(header["samples"]),
            tables={k.removeprefix("table:"): v for k, v in tensors.items() if k.startswith("table:")},
            scale=json.loads(header["scale"]),
            residuals={k.removeprefix("residual:"): v.float() for k, v in tensors.items() if k.startswith("residual:")},
        )


@torch.inference_mode()
def calibrate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    sites: Sequence[Site] | None = None,
    wina: bool = False,
    levels: Iterable[float] = (0.5,),
    resolution: int = 512,
) -> Calibration:
    """Run one dense pass and tabulate the scores of every site.

    Args:
        model: the dense model.
        input_ids: LongTensor (B, T) of token ids, or input embeddings (B, T, d). All of it goes through in one batch, so that
            each table is exact; 3 000 tokens of a 135M model take about 0.5 GB.
        sites: sites to calibrate; None takes all.
        wina: also tabulate the weighted score, one table per linear layer.
        levels: sparsities at which to keep the mean residual.
        resolution: order statistics kept per table; all of them when N is not larger.

    Source: thresholds [TEAL]; weighted score [WINA]; mean residual [ours].
    """
    sites = find_sites(model) if sites is None else list(sites)
    levels = tuple(levels)
    found = Calibration(fingerprint(model), {}, {}, {}, {})

    def record(site: Site, x: torch.Tensor) -> None:  # x: (N / d, d)
        group = _group(site)
        if wina:
            found.tables[_key(site, "wina")] = _order_statistics(x.abs() * site.weight.norm(dim=0), resolution)
        if group in found.samples:  # q, k and v read the same tensor
            return
        found.tables[_key(site, "magnitude")] = _order_statistics(x.abs(), resolution)
        found.samples[group] = x.numel()
        found.scale[group] = float(x.square().mean().sqrt())
        for p in levels:
            found.residuals[f"{group}@{p:g}"] = torch.where(x.abs() > found.quantile(site, p), 0, x).mean(0)

    watch_inputs(model, input_ids, sites, record)
    return found


def _order_statistics(scores: torch.Tensor, resolution: int) -> torch.Tensor:
    if scores.dtype == torch.bfloat16:  # which numpy does not know
        scores = scores.float()
    ordered = np.sort(scores.cpu().numpy(), axis=None)  # several times faster than torch's on long arrays
    return torch.from_numpy(ordered[_ranks(len(ordered), resolution) - 1])


def _ranks(samples: int, resolution: int) -> np.ndarray:
    """Ranks (1-based) of the order statistics that a table of this resolution holds."""
    return np.linspace(1, samples, min(samples, resolution)).round().astype(np.int64)


def _group(site: Site) -> str:
    return f"{site.layer}.{site.input_group}"


def _key(site: Site, score: str) -> str:
    return f"{_group(site)}|magnitude" if score == "magnitude" else f"{site}|{score}"

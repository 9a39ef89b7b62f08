"""What the networks of this lab share: units of their inputs, a training loop that can be interrupted, and files.

A file holds the weights in float16 and the configuration (kind of network, its sizes, the experiment it was trained on) with
a hash; whoever loads it says which experiment it is for, and gets an error if the file is for another one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from labkit.atomic import replacing
from labkit.design.models import DesignModel
from labkit.errors import check_number, check_size

PREDICTIVE_DRAWS = 4096


class Units(nn.Module):
    """Brings designs, outcomes and unconstrained parameters v to unit scale, by the prior predictive at random designs.

    Attributes:
        theta_shift, theta_scale: mean and standard deviation of v (q,).
        outcome_features: how many numbers describe an outcome. A censored one (`model.limit`) spans many orders of magnitude
            and has two, on a linear and on a logarithmic scale [ours].
    """

    def __init__(self, model: DesignModel):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        theta = model.sample_prior((PREDICTIVE_DRAWS,), generator)
        design = model.sample_designs((PREDICTIVE_DRAWS,), generator)
        y = model.simulate(theta, design, generator=generator)
        v = model.to_unconstrained(theta)
        low, high = model.bounds
        bounded = (high - low).isfinite()
        self.limit, self.outcome_features = model.limit, 1 if model.limit is None else 2
        stored = {
            "theta_shift": v.mean(0),
            "theta_scale": v.std(0),
            "design_shift": torch.where(bounded, (low + high) / 2, 0),
            "design_scale": torch.where(bounded, (high - low) / 2, 1),
            "outcome_shift": y.mean(),
            "outcome_scale": y.std(),
        }
        for name, value in stored.items():
            self.register_buffer(name, value.float())

    def design(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d), the box to [−1, 1]."""
        return (x.to(self.design_shift) - self.design_shift) / self.design_scale

    def outcome(self, y: Tensor) -> Tensor:
        """(...) -> (..., outcome_features)."""
        y = y.to(self.outcome_shift)
        if self.limit is None:
            return ((y - self.outcome_shift) / self.outcome_scale)[..., None]
        resolution = 1e3
        return torch.stack([y / self.limit, torch.asinh(resolution * y) / np.arcsinh(resolution * self.limit)], -1)


def check_history(design_dim: int, X: Tensor, Y: Tensor) -> None:
    """Refuse a history that is not X (..., t, d), Y (..., t)."""
    if X.shape[-1:] != (design_dim,) or X.shape[:-1] != Y.shape:
        got = f"got X {tuple(X.shape)}, Y {tuple(Y.shape)}"
        raise ValueError(f"X, Y: {got}; the network expects designs (..., t, {design_dim}) and outcomes (..., t)")


def describe(model: DesignModel) -> dict[str, Any]:
    """An experiment as plain data: its class and every number, text or tensor that it was made with."""
    entries = {"class": type(model).__name__}
    for name, value in sorted(vars(model).items()):
        if isinstance(value, Tensor):
            entries[name] = [f"{number:.6g}" for number in value.flatten().tolist()]
        elif isinstance(value, str | Real) or value is None:
            entries[name] = value
    return entries


def digest(config: Mapping[str, Any]) -> str:
    """Hash of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def save(network: nn.Module, path: Path) -> None:
    """Write a network: weights in float16, units in float32, `network.config` and its hash.

    Args:
        network: an `AmortizedPosterior` or a `DADNetwork`.
        path: a `.safetensors` file.
    """
    weights = {name for name, _ in network.named_parameters()}
    tensors = {
        name: value.detach().to(torch.float16 if name in weights else value.dtype).contiguous()
        for name, value in network.state_dict().items()
    }
    header = json.dumps({"config": network.config, "hash": digest(network.config)}, sort_keys=True)
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"labkit": header})  # one entry: the order of several is random


def read(path: Path, kind: str, model: DesignModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the weights, in float32, of a file that `save` wrote.

    Args:
        kind: "posterior" or "policy".
        model: the experiment that the network is wanted for.

    Raises:
        ValueError: no such file, its configuration does not have its hash, or it is for another kind of network or experiment.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path: there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("labkit", "null"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"path={path.name}: damaged, or no file of labkit's networks ({error})") from error
    if not isinstance(header, dict) or "kind" not in header.get("config", {}):
        raise ValueError(f"path={path.name}: no configuration in the file; expected one that labkit.design.networks.save wrote")
    config = header["config"]
    if header.get("hash") != digest(config):
        raise ValueError(f"path={path.name}: the configuration in the file does not have the hash that the file states")
    if config["kind"] != kind:
        raise ValueError(f"path={path.name} holds a {config['kind']}; expected a {kind}")
    trained, wanted = config["model"], describe(model)
    differing = sorted(name for name in trained.keys() | wanted.keys() if trained.get(name) != wanted.get(name))
    if differing:
        listing = ", ".join(f"{name}={trained.get(name)!r} instead of {wanted.get(name)!r}" for name in differing)
        raise ValueError(f"path={path.name} was trained for another experiment: {listing}")
    return config, tensors


def restore(network: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put the weights of a file into a network, without gradients.

    Raises:
        ValueError: they are not the network's, or not finite.
    """
    own = {name: value.shape for name, value in network.state_dict().items()}
    wrong = sorted(name for name in own.keys() | tensors.keys() if name not in tensors or own.get(name) != tensors[name].shape)
    wrong = wrong or sorted(name for name, value in tensors.items() if not value.isfinite().all())
    if wrong:
        raise ValueError(f"path={Path(path).name}: weights missing, of another shape or not finite: {', '.join(wrong[:5])}")
    network.load_state_dict(tensors)
    network.requires_grad_(False).eval()


def descend(
    network: nn.Module,
    losses: Callable[[torch.Generator], Mapping[str, Tensor]],
    *,
    steps: int,
    lr: float,
    seed: int,
    betas: tuple[float, float] = (0.9, 0.999),
    every: int = 100,
    checkpoint: Path | None = None,
    progress: bool = False,
    name: str = "training",
) -> pd.DataFrame:
    """Adam on a sum of losses: 100 steps of warm-up, then a cosine from `lr` to 0; gradients clipped at norm 1.

    The random numbers of a step follow from the seed and the step's number, so that an interrupted training that goes on from
    its checkpoint ends with the weights, to the last bit, of one that was not interrupted.

    Args:
        network: trained in place.
        losses: one minibatch drawn from the generator, as named scalars; their sum is minimised.
        steps: at least 1.
        lr: highest learning rate.
        every: steps per row of the trace and per checkpoint.
        checkpoint: file to go on from if it exists, and to write; it is removed in the end.
        progress: show a bar.

    Returns:
        The trace: `step`, and the mean of each loss over the `every` steps before.

    Raises:
        ValueError: `steps`, `lr` or `seed` is out of range, or the checkpoint is damaged or of another training.
        FloatingPointError: a loss is not finite.
    """
    check_size("steps", steps, 1)
    check_size("seed", seed, 0)
    check_number("lr", lr)
    optimizer = torch.optim.Adam(network.parameters(), lr, betas)
    settings = torch.tensor([steps, lr, seed], dtype=torch.float64)
    done, history = _resume(network, optimizer, settings, checkpoint)
    bar = tqdm(total=steps, initial=done, desc=name, unit="step", disable=not progress)
    for step in range(done + 1, steps + 1):
        warmup, cosine = min(1.0, step / 100), 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * warmup * cosine
        values = losses(torch.Generator().manual_seed(seed * 1_000_003 + step))
        total = sum(values.values())
        if not total.isfinite():
            raise FloatingPointError(f"the loss is {total.item()} at step {step} of {steps}: lower lr={lr}")
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        history.append([value.item() for value in values.values()])
        bar.set_postfix({key: f"{value.item():.2f}" for key, value in values.items()}, refresh=False)
        bar.update()
        if checkpoint and step % every == 0 and step < steps:
            _store(network, optimizer, settings, history, checkpoint)
    bar.close()
    if checkpoint:
        Path(checkpoint).unlink(missing_ok=True)
    table = pd.DataFrame(history, columns=list(values))
    rows = np.minimum(np.arange(len(table)) // every * every + every, steps)
    return table.groupby(rows).mean().rename_axis("step").reset_index()


def _store(network: nn.Module, optimizer: torch.optim.Adam, settings: Tensor, history: list, path: Path) -> None:
    tensors = {"history": torch.tensor(history, dtype=torch.float64), "settings": settings}
    for name, parameter in network.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {
            f"{name}/value": parameter.detach(),
            f"{name}/mean": state["exp_avg"],
            f"{name}/square": state["exp_avg_sq"],
        }
    with replacing(path) as partial:
        save_file(tensors, partial)


def _resume(network: nn.Module, optimizer: torch.optim.Adam, settings: Tensor, path: Path | None) -> tuple[int, list]:
    """Steps done so far and their losses; weights and the optimiser's moments are put back."""
    if path is None or not Path(path).is_file():
        return 0, []
    try:
        with safe_open(path, "pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"checkpoint={str(path)!r}: damaged ({error}); remove it to start anew") from error
    parts = {f"{name}/{part}": p.shape for name, p in network.named_parameters() for part in ("value", "mean", "square")}
    names = parts.keys() | {"history", "settings"}
    if stored.keys() != names or any(stored[name].shape != shape for name, shape in parts.items()):
        raise ValueError(f"checkpoint={str(path)!r}: of another network; remove it to start anew")
    if not torch.equal(stored["settings"], settings):
        got, wanted = stored["settings"].tolist(), settings.tolist()
        raise ValueError(f"checkpoint={str(path)!r}: of a training with (steps, lr, seed) {got} instead of {wanted}; remove it")
    history = stored["history"].tolist()
    for name, parameter in network.named_parameters():
        parameter.data.copy_(stored[f"{name}/value"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(len(history))),
            "exp_avg": stored[f"{name}/mean"],
            "exp_avg_sq": stored[f"{name}/square"],
        }
    return len(history), history

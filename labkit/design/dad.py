"""Deep adaptive design: a network that proposes the next design from the history, at once [predecessor: Foster et al. 2021].

    r_t = Σ_{s≤t} enc(x_s, y_s),   u = emit(r_t, t / T),   x_{t+1} = lo + (hi − lo) sigmoid(u)

trained by pathwise gradients on the sequential prior contrastive bound, with ℓ_l = log p(y_{1:T} | x_{1:T}, θ_l) and θ_{0:L}
from the prior:

    I(θ; D_T) ≥ E[ ℓ_0 − log (1/(L+1)) Σ_{l=0}^L e^{ℓ_l} ].

The sum makes r_t blind to the order of the history. A network trained *within* a constraint [ours] also sees the last design,
because what is allowed next depends on it, and says where to go: u = 5 (emit(r_t / √T, t / T, x_t) − x_t), in units of the box,
x_{t+1} = `constraint.decode(state, u)`. It never proposes a forbidden design, and has to be trained anew for every other
constraint. One trained without is projected, or starts a planner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from labkit.design.bounds import prior_contrastive
from labkit.design.constraints import Constraint, State, Unconstrained
from labkit.design.models import DesignModel
from labkit.design.networks import Units, check_history, descend, describe, read, restore
from labkit.errors import check_size
from labkit.randomness import frozen

PULL = 5.0  # a limit of a tenth of the box is taken in full from a target a fifth of the box away


class DADNetwork(nn.Module):
    """History (..., t, d), (..., t) -> next design (..., d).

    Args:
        model: the experiment.
        horizon: T, the number of experiments of a run.
        constraint: what the network is trained within; None for the box alone.
        encoding: size of r_t.
        hidden: units of the encoder and of the emitter, which is linear in the predecessor, with an encoding of 16.
        seed: of the initial weights.

    Raises:
        ValueError: a size that is out of range.
    """

    def __init__(
        self,
        model: DesignModel,
        horizon: int,
        constraint: Constraint | None = None,
        *,
        encoding: int = 32,
        hidden: tuple[int, int] = (256, 128),
        seed: int = 0,
    ):
        super().__init__()
        if not isinstance(hidden, Sequence) or len(hidden) != 2:
            raise ValueError(f"hidden={hidden!r}: expected two numbers of units, of the encoder and of the emitter")
        for name, size in (("horizon", horizon), ("encoding", encoding), ("hidden", hidden[0]), ("hidden", hidden[1])):
            check_size(name, size, 1)
        self.model, self.horizon, self.constraint = model, horizon, constraint
        self.box = Unconstrained(model.bounds)
        sizes = {"horizon": horizon, "encoding": encoding, "hidden": list(hidden)}
        self.config = {"kind": "policy", "model": describe(model), "sizes": sizes, "constraint": _text(constraint)}
        self.units = Units(model)
        inputs = encoding + 1 + (0 if constraint is None else model.design_dim)
        with frozen(seed):
            self.encode = nn.Sequential(
                nn.Linear(model.design_dim + self.units.outcome_features, hidden[0]),
                nn.ReLU(),
                nn.Linear(hidden[0], encoding),
            )
            self.emit = nn.Sequential(nn.Linear(inputs, hidden[1]), nn.ReLU(), nn.Linear(hidden[1], model.design_dim))

    def representation(self, designs: Tensor, outcomes: Tensor) -> Tensor:
        """r_t (..., encoding), the sum over a history in any order."""
        check_history(self.model.design_dim, designs, outcomes)
        return self._encode(designs, outcomes).sum(-2)

    def propose(self, representation: Tensor, time: int, last: Tensor | None = None) -> Tensor:
        """Free coordinates u (..., d).

        Args:
            representation: r_t (..., encoding).
            time: t, how many experiments are done.
            last: x_t (..., d), for a network with a constraint.
        """
        clock = representation.new_full((*representation.shape[:-1], 1), time / self.horizon)
        if self.constraint is None:
            return self.emit(torch.cat([representation, clock], -1))
        position = self.units.design(last)
        return PULL * (self.emit(torch.cat([representation / self.horizon**0.5, clock, position], -1)) - position)

    def forward(self, designs: Tensor, outcomes: Tensor, state: State | None = None) -> Tensor:
        """The next design.

        Args:
            designs: (..., t, d), t ≥ 0.
            outcomes: (..., t).
            state: of the constraint that the network was trained within, if any.

        Raises:
            ValueError: shapes that are not those of the experiment; no `state` where there is a constraint.
        """
        representation, time = self.representation(designs, outcomes), outcomes.shape[-1]
        if self.constraint is None:
            return self.box.decode(None, self.propose(representation, time))
        if state is None:
            raise ValueError(f"state=None: this network was trained within {self.constraint!r} and needs its state")
        return self.constraint.decode(state, self.propose(representation, time, state.x))

    def _encode(self, designs: Tensor, outcomes: Tensor) -> Tensor:
        return self.encode(torch.cat([self.units.design(designs), self.units.outcome(outcomes)], -1))


@dataclass(frozen=True, eq=False)
class DADPolicy:
    """A `DADNetwork` as a policy (belief, state, remaining, generator) -> designs (R, d); it reads the history alone."""

    network: DADNetwork
    name: str = "dad"

    def __call__(self, belief: Any, state: State | None, remaining: int, generator: torch.Generator | None = None) -> Tensor:
        """The next designs (R, d)."""
        with torch.no_grad():
            return self.network(belief.designs, belief.outcomes, None if self.network.constraint is None else state)


def fit_dad(
    model: DesignModel,
    horizon: int,
    constraint: Constraint | None = None,
    *,
    steps: int = 1000,
    num_rollouts: int = 64,
    num_contrastive: int = 1000,
    lr: float = 1e-3,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: bool = False,
    **sizes,
) -> tuple[DADNetwork, pd.DataFrame]:
    """Train a design network; the first design is drawn at random and counts, as in every run of this lab.

    Args:
        model: the experiment; its outcomes must not be finitely many, since the gradient goes through them.
        horizon: T ≥ 2.
        constraint: train within it, or None.
        steps: Adam steps, learning rate `lr` on a cosine. The defaults take minutes on one core; the predecessor took 50 000
            steps of 2000 × 2000 samples.
        num_rollouts: runs per step.
        num_contrastive: L, shared by the runs of a step; the bound cannot exceed log(L + 1).
        seed: of everything random.
        checkpoint: file that an interrupted training goes on from.
        progress: show a bar.
        **sizes: `encoding` and `hidden` of the network.

    Returns:
        The network, and a table with `step` and the mean `loss`, the bound's negative in nats, over the 100 steps before.

    Raises:
        ValueError: finitely many outcomes; a number out of its range.
    """
    if model.outcomes is not None:
        raise ValueError(f"model: the outcomes of {type(model).__name__} are finitely many; pathwise gradients need a density")
    check_size("horizon", horizon, 2)
    check_size("num_rollouts", num_rollouts, 1)
    check_size("num_contrastive", num_contrastive, 1)
    network = DADNetwork(model, horizon, constraint, seed=seed, **sizes)

    def losses(generator: torch.Generator) -> dict[str, Tensor]:
        return {"loss": -contrastive_bound(network, num_rollouts, num_contrastive, generator).mean()}

    name = "DAD" if constraint is None else f"DAD in {constraint!r}"
    options = {"lr": lr, "seed": seed, "checkpoint": checkpoint, "progress": progress, "name": name}
    table = descend(network, losses, steps=steps, betas=(0.8, 0.998), **options)
    return network.eval(), table


def contrastive_bound(network: DADNetwork, num_rollouts: int, num_contrastive: int, generator: torch.Generator) -> Tensor:
    """sPCE of fresh runs of the network (R,), differentiable in its weights."""
    model, horizon = network.model, network.horizon
    theta = model.sample_prior((num_rollouts,), generator)
    contrastive = model.sample_prior((num_contrastive,), generator)
    noise = model.noise((horizon, num_rollouts), generator)
    design = model.sample_designs((num_rollouts,), generator)
    constraint = network.constraint or network.box
    state = constraint.init(design, horizon - 1)
    representation, true, others = 0.0, 0.0, 0.0
    for t in range(horizon):
        y = model.simulate(theta, design, noise[t])
        true = true + model.log_prob(y, theta, design)  # (R,)
        others = others + model.log_prob(y[:, None], contrastive, design[:, None])  # (R, L)
        if t + 1 < horizon:
            representation = representation + network._encode(design, y)
            design = constraint.decode(state, network.propose(representation, t + 1, design))
            state = constraint.step(state, design)
    return prior_contrastive(true, others)


def load_policy(path: Path, model: DesignModel, constraint: Constraint | None = None) -> DADNetwork:
    """Read a `DADNetwork` that `labkit.design.networks.save` wrote, without gradients.

    Args:
        path: the file.
        model: the experiment that it is wanted for.
        constraint: the constraint that it was trained within, or None.

    Raises:
        ValueError: the file is for another experiment, constraint or kind of network.
    """
    config, tensors = read(path, "policy", model)
    if config["constraint"] != _text(constraint):
        got = config["constraint"] or "no constraint"
        raise ValueError(f"path={Path(path).name} was trained within {got}; got constraint={constraint!r}")
    sizes = config["sizes"]
    network = DADNetwork(model, sizes["horizon"], constraint, encoding=sizes["encoding"], hidden=tuple(sizes["hidden"]))
    restore(network, tensors, path)
    return network


def _text(constraint: Constraint | None) -> str | None:
    return None if constraint is None else repr(constraint)

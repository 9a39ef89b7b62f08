"""Lab 05: what a step of the nested filter, an expected information gain and a whole decision cost.

Peers: the filter as a NumPy loop over the parameters; SMC² of the package `particles`, whose steps cost more the longer the
experiment is; the gradient of the gain by autograd, through the law's `log_prob` and through the kernel's own matrix product.
Where the peer is a limit in seconds, the ratio says how often ours would fit into it. All on one thread.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks._runner import Row, compare, interleave, one_thread, ratio_row
from labkit.design.online import peers
from labkit.design.online.eig import debias, draw, eig, features, half_of, observe, predict, statistics
from labkit.design.online.gradient import eig_grad, eig_grad_autograd
from labkit.design.online.policies import AdamPolicy, GridPolicy
from labkit.filtering import Clouds, NestedParticleFilter, TwoGroupSIR, simulate, truth_generator

MODEL = TwoGroupSIR()
HALF = torch.zeros(1)  # the design that gives half of the tests to each group
NUM_OBS = 200  # L
ROUNDS = 15


def benchmarks() -> Iterator[Row]:
    """All comparisons of the lab: about two minutes of processor time."""
    with one_thread():
        _, ys = simulate(MODEL, MODEL.truth, HALF.expand(130, 1), truth_generator(1))
        yield from filter_step(ys)
        yield from growth(ys)
        yield from smc2(ys)
        yield from gradient(ys)
        yield from decisions(ys)


def filter_step(ys: torch.Tensor, num_params: int = 300, num_states: int = 100) -> Iterator[Row]:
    """One step of the filter, and the same step as a loop over the parameters."""
    ours, loop = filtered(ys[:30], num_params, num_states), ParameterLoop(filtered(ys[:30], num_params, num_states))

    def ten(step: Callable, ys: torch.Tensor | np.ndarray) -> None:
        """Several steps in a row, so that neither pays for what the other leaves in the caches."""
        for y in ys[30:40]:
            step(y)

    calls = {"ours": partial(ten, partial(ours.step, HALF), ys), "loop": partial(ten, loop.step, ys.numpy())}
    seconds = interleave(calls, ROUNDS, progress="filter")
    yield compare(
        "05",
        "filter steps",
        seconds["ours"],
        "a NumPy loop over the parameters",
        seconds["loop"],
        target="≥ 8",
        sizes=f"SIR, M = {num_params}, N = {num_states}, ten steps",
    )


def growth(ys: torch.Tensor, sizes: tuple[tuple[int, int], ...] = ((300, 100), (600, 100)), late: int = 100) -> Iterator[Row]:
    """How the time of a filter step grows with the number of particles, and with the length of the experiment."""
    small, large = sizes
    filters = {
        "small": (10, filtered(ys[:10], *small)),
        "large": (10, filtered(ys[:10], *large)),
        "late": (late, filtered(ys[:late], *small)),
    }
    calls = {name: on(ys[t:], partial(belief.step, HALF)) for name, (t, belief) in filters.items()}
    seconds = interleave(calls, ROUNDS, progress="growth")
    for name, peer, bounds in (("large", f"M, N = {small}", ("≥ 1.4", "≤ 2.8")), ("late", "t ≈ 10", ("≥ 0.7", "≤ 1.3"))):
        what = f"filter step at M, N = {large}, times that" if name == "large" else f"filter step at t ≈ {late}, times that"
        for target in bounds:
            yield ratio_row("05", what, seconds[name] / seconds["small"], f"at {peer}", target=target, sizes="SIR")


def smc2(ys: torch.Tensor, size: int = 50, steps: int = 80) -> Iterator[Row]:
    """SMC² with as many particles as ours: whenever its parameters degenerate, it moves them by re-running the whole past."""
    peer = peers.smc2(MODEL, ys[:steps].numpy(), size)
    theirs = seconds_per_call(peer.__next__, steps)
    ours = seconds_per_call(on(ys, partial(NestedParticleFilter(MODEL, size, size).step, HALF)), steps)
    text = f"SIR, {size} parameters with {size} states each, {steps} steps"
    yield compare("05", "filter, mean step", ours.mean(keepdims=True), "SMC²", theirs.mean(keepdims=True), sizes=text)
    moves = np.flatnonzero(peer.summaries.rs_flags)
    first, last = moves[[0, -1]]
    name, against = f"SMC², move at step {last + 1}, times that", f"at step {first + 1}"
    yield ratio_row("05", name, theirs[last] / theirs[first], against, target="≥ 2", sizes=text)


def gradient(ys: torch.Tensor, num_params: int = 300, num_states: int = 100) -> Iterator[Row]:
    """Expected information gain with its gradient, from the same samples."""
    belief = filtered(ys[:30], num_params, num_states).snapshot()
    calls = {
        "kernel": partial(eig_grad, belief, HALF, num_obs=NUM_OBS),
        "log_prob": partial(eig_grad_autograd, belief, HALF, num_obs=NUM_OBS),
        "product": partial(product_autograd, belief, HALF, NUM_OBS),
    }
    seconds = interleave(calls, ROUNDS, progress="gradient")
    row = partial(compare, "05", sizes=f"SIR, M = {num_params}, N = {num_states}, L = {NUM_OBS}")
    ours, pairs = seconds["kernel"], NUM_OBS * num_params * num_states
    yield row("gain and gradient", ours, "autograd through log_prob", seconds["log_prob"], target="≥ 3")
    yield row("gain and gradient", ours, "autograd through the matrix product", seconds["product"])
    yield row("gain and gradient, all pairs", ours, "8 ns per pair", np.full_like(ours, 8e-9 * pairs), target="≥ 1")


def decisions(ys: torch.Tensor) -> Iterator[Row]:
    """Whole decisions, against their limits."""
    shares = MODEL.design_of_share(torch.linspace(0, 1, 41))[:, None]
    generator = torch.Generator().manual_seed(0)
    small, large = (filtered(ys[:30], num_params, 50).snapshot() for num_params in (100, 300))
    cases = (
        (
            "70 gradients of the paper's schedule",
            1.0,
            small,
            partial(AdamPolicy.sir(num_obs=NUM_OBS), small, None, 1, generator),
        ),
        ("enumerated gain of 41 designs", 0.25, large, partial(eig, large, shares, method="enumerate")),
        ("decision on a grid of 41 designs", 0.3, large, partial(GridPolicy(), large, None, 1, generator)),
    )
    for name, limit, belief, call in cases:
        ours = interleave({"ours": call}, 5, progress=name)["ours"]
        sizes = "SIR, M = {}, N = {}".format(*belief.x.shape[:2])
        yield compare("05", name, ours, f"{limit:g} s", np.full_like(ours, limit), target="≥ 1", sizes=sizes)


def filtered(ys: torch.Tensor, num_params: int, num_states: int) -> NestedParticleFilter:
    """A filter that has seen some observations."""
    belief = NestedParticleFilter(MODEL, num_params, num_states)
    for y in ys:
        belief.step(HALF, y)
    return belief


def on(ys: torch.Tensor | np.ndarray, step: Callable) -> Callable[[], object]:
    """A function of no arguments that feeds the next observation to a step."""
    following = iter(ys)
    return lambda: step(next(following))


def seconds_per_call(call: Callable[[], object], times: int) -> np.ndarray:
    """Processor time of each call (times,)."""
    seconds = np.empty(times)
    for i in range(times):
        start = time.thread_time()
        call()
        seconds[i] = time.thread_time() - start
    return seconds


def product_autograd(belief: Clouds, design: torch.Tensor, num_obs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gain and score gradient by autograd through the matrix product that the kernel uses, the densities in one piece."""
    model, at = belief.model, design.clone().requires_grad_()
    ahead = predict(belief, design, 0, 1)
    m, n = observe(ahead, num_obs, 0)
    own, inner = (features(model, x, at) for x in (ahead.outer, ahead.inner))
    S = statistics(model, draw(model, ahead.outer[m, n], design, 0))
    log_own = (own[m] @ S[:, :, None])[..., 0].logsumexp(1) - math.log(own.shape[1])
    log_all = (S @ inner.flatten(0, 1).mT).logsumexp(1) - math.log(inner[..., 0].numel())
    d = debias(log_own[:, None], log_all[:, None], half_of(ahead, n))
    (slope,) = torch.autograd.grad((d + d.detach() * (S * own[m, n]).sum(1)).mean(), at)
    return d.detach().mean(), slope


class ParameterLoop:
    """The nested filter at half of the tests per group, a loop over parameters in NumPy; each step is summarised alike."""

    def __init__(self, nested: NestedParticleFilter):
        self.jitter, self.theta, self.x = nested.jitter, nested.theta, nested.x.numpy().copy()
        self.rng, self.generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def step(self, y: np.ndarray) -> list[np.ndarray]:
        """Learn from y (2,): moments and quantiles of parameters and states, before resampling."""
        self.theta = self.jitter(self.theta, self.generator)
        fit, moved, weights = np.empty(len(self.theta)), np.empty_like(self.x), np.empty(self.x.shape[:2])
        for m, (beta, gamma) in enumerate(self.theta.numpy()):
            moved[m] = peers.move(MODEL, self.x[m], beta, gamma, self.rng)
            fit[m], weights[m], ancestors = self.weigh(peers.log_density(MODEL, moved[m], y))
            self.x[m] = moved[m, ancestors]
        _, outer, parents = self.weigh(fit)
        summary = [*moments(self.theta.numpy(), outer), *moments(moved.reshape(-1, 4), (outer[:, None] * weights).ravel())]
        self.theta, self.x = self.theta[parents], self.x[parents]
        return summary

    def weigh(self, log_weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Logarithm of the mean of weights (n,), the weights as shares, and ancestors (n,) by systematic resampling."""
        top, count = log_weights.max(), len(log_weights)
        weights = np.exp(log_weights - top)
        cumulated = weights.cumsum()
        points = (np.arange(count) + self.rng.random()) * (cumulated[-1] / count)
        ancestors = np.minimum(np.searchsorted(cumulated, points), count - 1)
        return top + np.log(cumulated[-1] / count), weights / cumulated[-1], ancestors


def moments(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation (d,) and quantiles (3, d) of weighted values (n, d)."""
    mean = weights @ values
    order = values.argsort(0)
    quantiles = [
        column[rank[np.searchsorted(weights[rank].cumsum(), (0.05, 0.5, 0.95)).clip(max=len(rank) - 1)]]
        for column, rank in zip(values.T, order.T, strict=True)
    ]
    return mean, np.sqrt(weights @ (values - mean) ** 2), np.array(quantiles).T

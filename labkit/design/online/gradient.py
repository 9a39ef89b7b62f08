"""The gradient of the expected information gain with respect to the design, from the samples that estimate the gain itself.

With L̂, Ẑ and the observations y_b of `labkit.design.online.eig`, and x'_b the state that y_b was drawn from,

    score [paper]:    ∇Î = mean_b { ∇L̂_b/L̂_b − ∇Ẑ_b/Ẑ_b + (log L̂_b − log Ẑ_b) ∇ log g(y_b | x'_b, ξ) },  y_b held fixed;
    pathwise [ours]:  ∇Î = mean_b d/dξ [log L̂_b(y_b(ξ)) − log Ẑ_b(y_b(ξ))],   y_b(ξ) = μ(x'_b, ξ) + σ ε_b for Gaussian y.

In the score form the third term carries the signal; the first two have mean zero at exact marginals. It needs no derivative in
y, so counts may be observed.

∇L̂/L̂ = Σ_n w_n ∇ log g with w = softmax_n log g, and log g = s·η − A + b. So a second matrix product per block of observations
collects, for every state, how η and A count: Σ_b w_b [s_b, −1]. One backward pass through η and A then gives ∇Î [ours].

If the design also moves the states [ours], the model offers

    transition_log_prob(x_t (M, N, dx), x_{t-1} (M, N, dx), θ (M, dθ), ξ (dξ,)) -> log f (M, N),

and log f + log g takes the place of log g in every derivative, x_t held fixed.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Normal

from labkit.design.estimates import EIGEstimate
from labkit.design.online.eig import (
    Ahead,
    all_densities,
    block_rows,
    by_half,
    check,
    debias,
    density_means,
    draw,
    features,
    half_of,
    moves_states,
    observe,
    own_densities,
    predict,
    statistics,
)
from labkit.filtering.nested import Clouds
from labkit.filtering.state_space import StateSpaceModel, check_design
from labkit.randomness import base_law, seeded_generator

ESTIMATORS = ("score", "pathwise")


def eig_grad(
    belief: Clouds,
    design: Tensor,
    *,
    estimator: str = "score",
    num_obs: int = 200,
    jackknife: bool = False,
    seed: int = 0,
) -> tuple[EIGEstimate, Tensor]:
    """Expected information gain at one design, and its gradient.

    The value is that of `eig(belief, design[None], method="nested", ...)` with the same seed. Models with `natural` and
    `statistic` take the kernel, all others `eig_grad_autograd`.

    Args:
        belief: nested particle filter or its `Clouds`: `model`, `theta` (M, dθ), `x` (M, N, dx), `jitter`.
        design: (dξ,).
        estimator: "score" for any observations, "pathwise" for Gaussian ones.
        num_obs: L in [1, M N].
        jackknife: of the debiased gain; N must be even.
        seed: of the step ahead and of the observations, ≥ 0.

    Returns:
        `value` (1,) and `stderr` (1,) in nats, and the gradient (dξ,). A gradient that is not finite becomes 0, and then all L
        observations count as `num_nonfinite`.

    Raises:
        ValueError: an argument is not as above, or the design moves the states and the model has no `transition_log_prob`.
    """
    model = belief.model
    if not hasattr(model, "natural"):
        return eig_grad_autograd(belief, design, estimator=estimator, num_obs=num_obs, jackknife=jackknife, seed=seed)
    design, ahead, moving = _prepare(belief, design, estimator, num_obs, jackknife, seed)
    m, n = observe(ahead, num_obs, seed)
    half, pathwise = half_of(ahead, n), estimator == "pathwise"
    with torch.enable_grad():
        at = design.clone().requires_grad_()
        own, inner = (features(model, x, at) for x in (ahead.outer, ahead.inner))
        y = draw(model, ahead.outer[m, n], at, seed)
        S = statistics(model, y if pathwise else y.detach())
        outputs = [own, inner, *([S] if pathwise else []), *(_log_moves(model, ahead, at) if moving else [])]
    with torch.no_grad():
        # from here on Σ_b of ∂Î/∂(...), beginning with the densities in Ẑ
        columns = by_half(inner, ahead.halves)
        for_columns, for_S, log_all = torch.zeros_like(columns), torch.zeros_like(S), S.new_empty(num_obs, ahead.halves)
        for rows, g, total, log_z in all_densities(S, columns):
            share = -_shares(log_z, half[rows]) / total  # (c, H), times g
            for_columns.baddbmm_((share.T[..., None] * S[rows]).mT, g)
            if pathwise:
                for_S[rows] = torch.einsum("ch,hcf->cf", share, g @ columns.mT)
            log_all[rows] = log_z
        for_inner = for_columns.unflatten(2, (len(own), -1)).permute(2, 0, 3, 1).flatten(1, 2)  # (M, N, F)

        logs, log_own = own_densities(S, m, own, ahead.halves)
        terms = debias(log_own, log_all, half)
        share = (_shares(log_own, half)[..., None] * logs.softmax(2)).flatten(1)  # (L, N), of log g and of log f
        scored = share.scatter_add(1, n[:, None], terms[:, None])
        for_own = torch.zeros_like(own).index_add_(0, m, (share if pathwise else scored)[..., None] * S[:, None])
        weights = [for_own, for_inner]
        if pathwise:
            weights.append(for_S + torch.einsum("ln,lnf->lf", share, own[m]))
        if moving:  # log f stands where −A does
            weights += [torch.zeros_like(own[..., 0]).index_add_(0, m, scored), -for_inner[..., -1]]
    return _estimate(terms, _pull_back(outputs, weights, at))


def eig_grad_autograd(
    belief: Clouds,
    design: Tensor,
    *,
    estimator: str = "score",
    num_obs: int = 200,
    jackknife: bool = False,
    seed: int = 0,
) -> tuple[EIGEstimate, Tensor]:
    """`eig_grad` from the same samples by reverse-mode differentiation, for models that are no exponential family.

    With d = log L̂ − log Ẑ it differentiates the surrogate mean(d + d̄ log g(y | x', ξ)), d̄ being d held fixed.
    """
    model = belief.model
    design, ahead, moving = _prepare(belief, design, estimator, num_obs, jackknife, seed)
    m, n = observe(ahead, num_obs, seed)
    half, drawn = half_of(ahead, n), ahead.outer[m, n]
    terms, gradient = design.new_empty(num_obs), torch.zeros_like(design)
    for rows in torch.arange(num_obs).split(block_rows(ahead)):
        with torch.enable_grad():
            at = design.clone().requires_grad_()
            y = draw(model, drawn, at, seed)[rows]
            score, shifts = 0, None
            if estimator == "score":
                y = y.detach()
                score = model.observation(drawn[rows], at).log_prob(y)
            if moving:
                shifts = [log_f - log_f.detach() for log_f in _log_moves(model, ahead, at)]  # 0, with the gradient of log f
                score = score + shifts[0][m[rows], n[rows]]
            d = debias(*density_means(model, ahead, y, m[rows], at, shifts), half[rows])
            surrogate = (d + d.detach() * score).sum()
        terms[rows] = d.detach()
        gradient += _pull_back([surrogate], [torch.ones_like(surrogate)], at)
    return _estimate(terms, gradient)


def _pull_back(outputs: list[Tensor], weights: list[Tensor], design: Tensor) -> Tensor:
    """Σ weights · ∂outputs/∂ξ (dξ,), of those outputs that depend on the design."""
    kept = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output.requires_grad]
    if not kept:
        return torch.zeros_like(design)
    outputs, weights = zip(*kept, strict=True)
    return torch.autograd.grad(outputs, design, weights)[0]


def _estimate(terms: Tensor, gradient: Tensor) -> tuple[EIGEstimate, Tensor]:
    """Mean of the terms (L,), and of the gradient (dξ,) summed over them."""
    estimate = EIGEstimate.from_terms(terms[None])
    if gradient.isfinite().all():
        return estimate, gradient / len(terms)
    return replace(estimate, num_nonfinite=len(terms)), torch.zeros_like(gradient)


def _shares(logs: Tensor, half: Tensor) -> Tensor:
    """Derivative (c, H) of `debias` by log L̂ of the parts, and minus that by log Ẑ."""
    shares = logs.softmax(1)
    return shares if logs.shape[1] == 1 else 2 * shares - torch.nn.functional.one_hot(half, 2)


def _prepare(
    belief: Clouds, design: Tensor, estimator: str, num_obs: int, jackknife: bool, seed: int
) -> tuple[Tensor, Ahead, bool]:
    """Check the arguments; the design, the belief one step ahead, and whether f depends on the design."""
    model = belief.model
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(ESTIMATORS)}")
    design = check_design(model, design, belief.x.dtype).detach()
    _, halves = check(belief, design[None], jackknife, num_obs)
    law = base_law(model.observation(belief.x[0], design))
    if estimator == "pathwise" and not isinstance(law, Normal):
        raise ValueError(f"estimator='pathwise': expected Gaussian observations, got {type(law).__name__}; take 'score'")
    others = model.sample_designs(2, seeded_generator(0, "other designs")).to(design.dtype)
    moving = moves_states(belief, torch.cat([design[None], others]))
    if moving and not hasattr(model, "transition_log_prob"):
        raise ValueError(
            f"model: {type(model).__name__}.transition depends on the design; the gradient then needs "
            f"transition_log_prob(x_t, x_before, theta, design) -> (M, N)"
        )
    return design, predict(belief, design, seed, halves), moving


def _log_moves(model: StateSpaceModel, ahead: Ahead, design: Tensor) -> list[Tensor]:
    """log f of x' under θ and of x̃ under θ̃ (M, N)."""
    logs = []
    for theta, x in ((ahead.theta, ahead.outer), (ahead.jittered, ahead.inner)):
        log_f = model.transition_log_prob(x, ahead.before, theta, design)
        if log_f.shape != x.shape[:2]:
            raise ValueError(
                f"transition_log_prob: {type(model).__name__} gave shape {tuple(log_f.shape)}; expected {tuple(x.shape[:2])}"
            )
        logs.append(log_f)
    return logs

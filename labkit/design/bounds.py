"""How much a whole run of experiments told about θ, judged afterwards with the true θ_0 at hand, in nats.

With ℓ_l = Σ_t log p(y_t | x_t, θ_l) and L draws θ_l of the prior,

    sPCE = ℓ_0 − log 1/(L+1) Σ_{l=0}^L e^{ℓ_l}  ≤  I  ≤  sNMC = ℓ_0 − log 1/L Σ_{l=1}^L e^{ℓ_l}    in mean over runs     (1)

[predecessor: Foster 2021]. sPCE cannot exceed log(L+1), and where it comes near, sNMC is useless: a run worth 16 nats leaves
one draw in 10⁷. Importance sampling [ours] has no such ceiling. S draws v_s, in coordinates without bounds, of

    r(v) = 0.35 t₄(mean, (1.3 Σ^½)²) + 0.5 mean_k t₄(v_k, (0.35 Σ^½)²) + 0.15 p(v)

(a Student law fitted to posterior particles, one around each of K of them, the prior) give p̂ = mean_s p(v_s) e^{ℓ_s} / r(v_s)
and normalised weights w_s. Then IS = ℓ_0 − log p̂ and KL = Σ_s w_s ℓ_s − log p̂ have the mean I both, and KL does not have the
noise of θ_0. Shapes: θ_0 (R, p), designs (R, T, d), outcomes (R, T); everything is float64 per run (R,).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.design.belief import check_likelihood
from labkit.design.information import Posterior
from labkit.design.models import DesignModel, as_numbers, check_designs, check_outcomes
from labkit.errors import check_number, check_size
from labkit.randomness import seeded_generator

_BLOCK = 2**17  # likelihoods at once: they stay in the processor's cache
_SHARES = (0.35, 0.5, 0.15)  # of the fitted law, the kernels and the prior
_WIDE, _NARROW = 1.3, 0.35  # times the posterior's spread
_KERNELS = 150
_DEGREES = 4.0


@dataclass(frozen=True, eq=False)
class InformationEstimate:
    """What importance sampling says about R runs, float64 (R,), nats.

    Attributes:
        information: IS = ℓ_0 − log p̂(y | x).
        kl: Σ w ℓ − log p̂(y | x), that is KL(posterior ‖ prior).
        log_evidence: log p̂(y | x); p̂ itself is unbiased.
        ess: effective number of draws; below 100 take four times as many.
    """

    information: Tensor
    kl: Tensor
    log_evidence: Tensor
    ess: Tensor


def spce(
    model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor, num_contrastive: int = 100_000, seed: int = 0
) -> Tensor:
    """Sequential prior contrastive estimate of each run's information (R,), in mean a lower bound.

    Args:
        model: an experiment with a likelihood.
        theta: θ_0 (R, p), under which the outcomes arose.
        designs: (R, T, d).
        outcomes: (R, T).
        num_contrastive: L ≥ 1 draws of the prior for each run; the estimate is at most log(L + 1).
        seed: of the draws, ≥ 0.

    Raises:
        ValueError: an argument is not as above.
    """
    own, others = _contrast(model, theta, designs, outcomes, num_contrastive, seed)
    return own - torch.logaddexp(own, others) + math.log(num_contrastive + 1)


def prior_contrastive(own: Tensor, others: Tensor) -> Tensor:
    """ℓ_0 − log mean of e^ℓ over the own θ and L others: (B,), (B, L) -> (B,)."""
    return own - torch.cat([own[:, None], others], 1).logsumexp(1) + math.log(1 + others.shape[1])


def snmc(
    model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor, num_contrastive: int = 100_000, seed: int = 0
) -> Tensor:
    """Sequential nested Monte Carlo estimate (R,), in mean an upper bound; the draws of equal seed are those of `spce`.

    Arguments and errors are those of `spce`. A run that no draw explains is worth ∞.
    """
    own, others = _contrast(model, theta, designs, outcomes, num_contrastive, seed)
    return own - others + math.log(num_contrastive)


@torch.no_grad()
def barber_agakov(model: DesignModel, posterior: Posterior, theta: Tensor, designs: Tensor, outcomes: Tensor) -> Tensor:
    """log q(θ_0 | D_T) − log p(θ_0) of each run (R,): in mean below the information by E KL(p(θ | D_T) ‖ q).

    It needs no likelihood. [predecessor: Barber & Agakov 2003; with −log p(θ_0) for the entropy H[p], which has the same mean]

    Args:
        model: the experiment, for its prior.
        posterior: q, `log_prob(theta (R, 1, p), designs, outcomes) -> (R, 1)`.
        theta: θ_0 (R, p).
        designs: (R, T, d).
        outcomes: (R, T).

    Raises:
        ValueError: an argument is not as above.
    """
    theta, designs, outcomes = _checked(model, theta, designs, outcomes)
    log_q = posterior.log_prob(theta[:, None], designs, outcomes)
    if log_q.shape != (len(theta), 1) or not (log_q < math.inf).all():
        got = f"shape {tuple(log_q.shape)}, {log_q.flatten()[:4].tolist()} …"
        raise ValueError(f"posterior: its log_prob gave {got}; expected ({len(theta)}, 1) log-densities")
    log_q = log_q[:, 0]
    return log_q.double() - model.prior().log_prob(theta).double()


@torch.no_grad()
def information_is(
    model: DesignModel,
    theta: Tensor,
    designs: Tensor,
    outcomes: Tensor,
    particles: Tensor,
    num_draws: int = 5000,
    seed: int = 0,
) -> InformationEstimate:
    """Importance sampling of each run's evidence, guided by particles of its posterior.

    Args:
        model: an experiment with a likelihood.
        theta: θ_0 (R, p).
        designs: (R, T, d).
        outcomes: (R, T).
        particles: of the posteriors, equally weighted and in random order (R, N, p), N ≥ 2, as `belief.sample(1000)` gives.
        num_draws: S ≥ 20; 5 000 to 10 000 for CES.
        seed: of the draws, ≥ 0.

    Raises:
        ValueError: an argument is not as above.
    """
    check_likelihood(model)
    theta, designs, outcomes = _checked(model, theta, designs, outcomes)
    particles = as_numbers("particles", particles)
    check_size("num_draws", num_draws, 20)
    if particles.dim() != 3 or particles.shape[::2] != theta.shape or particles.shape[1] < 2:
        raise ValueError(
            f"particles: got shape {tuple(particles.shape)}; expected ({len(theta)}, N, {theta.shape[1]}) with N >= 2"
        )
    if not particles.isfinite().all():
        raise ValueError(f"particles: expected finite numbers, got {int((~particles.isfinite()).sum())} that are not")
    theta, designs, outcomes, particles = (value.double() for value in (theta, designs, outcomes, particles))
    generator = seeded_generator(seed, "importance sampling")
    own = _own(model, theta, designs, outcomes)
    rows = []
    for run in range(len(theta)):
        v, log_r = _proposal(model, model.to_unconstrained(particles[run]), num_draws, generator)
        fit = _log_likelihood(model, model.from_unconstrained(v)[None], designs[run : run + 1], outcomes[run : run + 1])[0]
        log_w = (model.log_prior_unconstrained(v).double() + fit - log_r).nan_to_num(-math.inf, math.inf, -math.inf)
        log_evidence = log_w.logsumexp(0) - math.log(num_draws)
        weights = log_w.softmax(0)
        mean_fit = (weights * torch.where(weights > 0, fit, 0)).sum()
        rows.append(torch.stack([own[run] - log_evidence, mean_fit - log_evidence, log_evidence, 1 / weights.square().sum()]))
    return InformationEstimate(*torch.stack(rows, 1))


def plug_in_spce(information: Tensor, num_contrastive: float) -> Tensor:
    """What sPCE would give at L draws, IS − log(1 + e^IS / L) [ours]: comparable with published figures at any L.

    Args:
        information: IS (R,).
        num_contrastive: L ≥ 1.
    """
    check_number("num_contrastive", num_contrastive, "a number >= 1", lambda x: x >= 1)
    information = as_numbers("information", information)
    return information - torch.nn.functional.softplus(information - math.log(num_contrastive))


@torch.no_grad()
def _contrast(
    model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor, num_contrastive: int, seed: int
) -> tuple[Tensor, Tensor]:
    """ℓ_0 and log Σ_{l=1}^L e^{ℓ_l} of each run (R,), float64."""
    check_likelihood(model)
    theta, designs, outcomes = _checked(model, theta, designs, outcomes)
    check_size("num_contrastive", num_contrastive, 1)
    generator = seeded_generator(seed, "contrastive")
    own = _own(model, theta, designs, outcomes)
    step = min(max(_BLOCK // designs.shape[1], 1), num_contrastive)
    others = torch.full_like(own, -math.inf)
    for rows in torch.arange(len(theta)).split(max(_BLOCK // (designs.shape[1] * step), 1)):
        for start in range(0, num_contrastive, step):
            draws = model.sample_prior((len(rows), min(step, num_contrastive - start)), generator).to(theta)
            fit = _log_likelihood(model, draws, designs[rows], outcomes[rows])
            others[rows] = torch.logaddexp(others[rows], fit.logsumexp(1))
    return own, others


def _log_likelihood(model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor) -> Tensor:
    """Σ_t log p(y_t | x_t, θ) (R, L), float64, of θ (R, L, p)."""
    each = model.log_prob(outcomes[..., None], theta[:, None], designs[:, :, None])  # (R, T, L)
    return each.sum(1).double().nan_to_num(-math.inf, math.inf, -math.inf)


def _proposal(model: DesignModel, v: Tensor, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws (S, q) of the mixture r around particles v (N, q), a fixed number of each component, and log r of them (S,)."""
    mean, q = v.mean(0), v.shape[1]
    centred = v - mean
    cov = centred.T @ centred / len(v)
    root = torch.linalg.cholesky(cov + torch.diag(1e-6 * cov.diagonal() + 1e-12))
    kernels = v[:_KERNELS]
    fitted, local = (round(share * num_draws) for share in _SHARES[:2])
    prior = num_draws - fitted - local
    noise = torch.randn(fitted + local, q, generator=generator, dtype=v.dtype)
    chi = torch.randn(fitted + local, int(_DEGREES), generator=generator, dtype=v.dtype).square().mean(-1, keepdim=True)
    noise = (noise / chi.sqrt()) @ root.T
    at = kernels[torch.arange(local) % len(kernels)]
    draws = torch.cat(
        [
            mean + _WIDE * noise[:fitted],
            at + _NARROW * noise[fitted:],
            model.to_unconstrained(model.sample_prior((prior,), generator).to(v)),
        ]
    )
    logs = torch.stack(
        [
            _student(draws, mean[None], _WIDE * root)[:, 0],
            _student(draws, kernels, _NARROW * root).logsumexp(1) - math.log(len(kernels)),
            model.log_prior_unconstrained(draws).double(),
        ]
    )
    counts = torch.tensor([fitted, local, prior], dtype=v.dtype)
    return draws, ((counts / num_draws).log()[:, None] + logs).logsumexp(0)


def _student(v: Tensor, centres: Tensor, root: Tensor) -> Tensor:
    """Log-densities (S, K) of multivariate Student laws t₄(centre, root rootᵀ) at v (S, q)."""
    q = v.shape[1]
    whitened, centres = (torch.linalg.solve_triangular(root, value.T, upper=False).T for value in (v, centres))
    squared = torch.cdist(whitened, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    constant = math.lgamma((_DEGREES + q) / 2) - math.lgamma(_DEGREES / 2) - q / 2 * math.log(_DEGREES * math.pi)
    return constant - root.diagonal().log().sum() - (_DEGREES + q) / 2 * (squared / _DEGREES).log1p()


def _own(model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor) -> Tensor:
    """ℓ_0 (R,) of the parameters under which the outcomes arose."""
    own = _log_likelihood(model, theta[:, None], designs, outcomes)[:, 0]
    lost = (own == -math.inf).nonzero()[:, 0].tolist()
    if lost:
        raise ValueError(f"outcomes: those of run {lost[0]} are impossible under its own theta={theta[lost[0]].tolist()}")
    return own


def _checked(model: DesignModel, theta: Tensor, designs: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """θ_0, designs and outcomes as tensors of one dtype; refuses runs of another shape, without a step, or impossible."""
    theta = as_numbers("theta", theta)
    designs, outcomes = as_numbers("designs", designs, theta.dtype), as_numbers("outcomes", outcomes, theta.dtype)
    if theta.dim() != 2 or theta.shape[1] != model.theta_dim or not len(theta):
        raise ValueError(f"theta: got shape {tuple(theta.shape)}; expected (R, {model.theta_dim}) with R >= 1")
    if outcomes.dim() != 2 or len(outcomes) != len(theta) or not outcomes.shape[1]:
        raise ValueError(f"outcomes: got shape {tuple(outcomes.shape)}; expected ({len(theta)}, T) with T >= 1")
    if designs.shape != (*outcomes.shape, model.design_dim):
        raise ValueError(f"designs: got shape {tuple(designs.shape)}; expected {(*outcomes.shape, model.design_dim)}")
    for name, value in (("theta", theta), ("designs", designs), ("outcomes", outcomes)):
        if not value.isfinite().all():
            raise ValueError(f"{name}: expected finite numbers, got {value.numel() - int(value.isfinite().sum())} that are not")
    inside = model.prior().support.check(theta)
    if not inside.all():
        raise ValueError(f"theta={theta[~inside.reshape(len(theta), -1).all(1)][0].tolist()}: impossible under the prior")
    check_designs(model, designs, "designs")
    check_outcomes(model, outcomes, "outcomes")
    return theta, designs, outcomes

"""How far is the sparse model from the dense one? At the output, and inside.

Output, per window: negative log-likelihood, KL(dense || sparse) of the next-token distribution, top-1 agreement.
Inside, per block: cosine, relative L2 distance and linear CKA of the residual stream, and the share of channels that stay on.
KL given the windows is exact; every mean over windows is a Monte Carlo estimate, so results come one number per window and
comparisons are paired: `paired(a, b)`.
"""

import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.llm import check_inputs
from labkit.sparsity.sparsifier import SparseModel


@dataclass(frozen=True)
class Eval:
    """Quality of one model on B windows.

    Attributes:
        nll: mean negative log-likelihood per predicted token, nats, (B,).
        kl: mean KL(dense || this model) per token, nats, (B,); zero for a dense model.
        agree: share of tokens whose most likely successor is the dense model's, (B,).
        drift: one row per layer with `cosine`, `relative_l2`, `cka`, `cka_rms`; None unless asked for.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    drift: pd.DataFrame | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return math.exp(self.nll.mean())

    def __repr__(self) -> str:
        scores = f"perplexity={self.perplexity:.3g}, kl={self.kl.mean():.3g}, agree={self.agree.mean():.3g}"
        return f"Eval({scores}, B={len(self.nll)})"


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel | SparseModel,
    input_ids: torch.Tensor,
    *,
    teacher: torch.Tensor | None = None,
    hidden: bool = False,
    batch_size: int = 1,
    progress: bool = False,
) -> Eval:
    """Score a model on windows of token ids (B, T), each on its own, with the dense model as the reference.

    Args:
        model: a dense model or a `SparseModel`.
        input_ids: LongTensor (B, T).
        teacher: the dense model's log-probabilities (B, T, V) where they are at hand (`log_probs`); None recomputes them.
        hidden: also measure the drift of the residual stream (keeps both models' hidden states: 9 kB per token and layer for
            d = 576).
        batch_size: windows per forward pass.
        progress: show a bar.
    """
    sparse = model if isinstance(model, SparseModel) else None
    dense = model.model if sparse else model
    check_inputs(dense, input_ids)
    if teacher is not None and teacher.shape[:2] != input_ids.shape:
        raise ValueError(f"teacher of shape {tuple(teacher.shape)} does not fit input_ids {tuple(input_ids.shape)}")
    rows, states = [], []
    starts = range(0, len(input_ids), batch_size)
    for start in tqdm(starts, desc="windows", unit="batch", disable=not progress):
        ids = input_ids[start : start + batch_size]
        out = model(ids, output_hidden_states=hidden, use_cache=False)
        logits = out.logits  # (b, T, V)
        # window by window: no copy, and unlike over a transposed vocabulary float32 sums stay exact to 1e-6
        nll = torch.stack([functional.cross_entropy(z[:-1], window[1:]) for z, window in zip(logits, ids, strict=True)])
        if sparse is None:
            rows.append((nll, torch.zeros_like(nll), torch.ones_like(nll)))
            continue
        if teacher is None or hidden:
            with sparse.dense():
                reference = dense(ids, output_hidden_states=hidden, use_cache=False)
            target = reference.logits
        else:
            target = teacher[start : start + batch_size]
        agree = (target.argmax(-1) == logits.argmax(-1)).to(nll.dtype).mean(1)
        rows.append((nll, token_kl(target, logits).mean(1), agree))
        if hidden:
            states.append((reference.hidden_states, out.hidden_states))
    nll, kl, agree = (torch.cat(column) for column in zip(*rows, strict=True))
    return Eval(nll, kl, agree, _drift(states) if states else None)


@torch.inference_mode()
def log_probs(model: PreTrainedModel, input_ids: torch.Tensor, *, batch_size: int = 1, progress: bool = False) -> torch.Tensor:
    """The dense model's next-token log-probabilities (B, T, V); 4 V bytes per token in float32 (0.2 MB for SmolLM2)."""
    starts = tqdm(range(0, len(input_ids), batch_size), desc="teacher", unit="batch", disable=not progress)
    parts = [model(input_ids[i : i + batch_size], use_cache=False).logits.log_softmax(-1) for i in starts]
    return torch.cat(parts)


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last axis: log-probabilities (..., V) in, (...) out."""
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def token_kl(teacher: torch.Tensor, student: torch.Tensor, chunk: int = 8) -> torch.Tensor:
    """KL(teacher || student) in nats at each token (B, T), of logits or log-probabilities (B, T, V).

    A few tokens at a time: over a vocabulary of 49 152 the intermediate results would outweigh the model.
    """
    pairs = zip(teacher.split(chunk, dim=1), student.split(chunk, dim=1), strict=True)
    return torch.cat([kl_divergence(p.to(q).log_softmax(-1), q.log_softmax(-1)) for p, q in pairs], dim=1)


def gap_closed(dense: Eval, teal: Eval, spon: Eval) -> float:
    """Share of TEAL's extra negative log-likelihood that SPON removes, in nats: 0 is none, 1 is all, below 0 is harm."""
    return float((teal.nll.mean() - spon.nll.mean()) / (teal.nll.mean() - dense.nll.mean()))


def paired(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Mean of a - b over the same windows or items (N,), and its standard error."""
    difference = (a - b).double()
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    """Linear centred kernel alignment of two representations (n, d1) and (n, d2) of the same n tokens, in [0, 1].

    Invariant to rotation and scaling, and blind to a constant shift of every token, because it centres each channel.
    """
    if x.shape[0] != y.shape[0] or x.shape[0] < 2:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)}: expected the same n >= 2 rows")
    x, y = (z.double() - z.double().mean(0) for z in (x, y))
    return float((y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))


def always_on_fraction(acts: torch.Tensor, tau: float) -> torch.Tensor:
    """f(T): share of channels with |x_tj| > tau for every t <= T, of activations (T, d); returns (T,), never increasing.

    Source: the paper's Figure 1. For independent channels and tokens it is (1 - p)^T in expectation.
    """
    if acts.dim() != 2:
        raise ValueError(f"acts of shape {tuple(acts.shape)}: expected (T, d)")
    on = (acts.abs() > tau).to(torch.get_default_dtype())
    return on.cumprod(0).mean(1)


def _drift(states: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]) -> pd.DataFrame:
    """Compare residual streams layer by layer; the first token, whose activations are massive, is left out.

    The last row is the state after the final norm, which is where transformers reports the last block.
    """
    rows = []
    for layer in range(1, len(states[0][0])):
        h, s = (torch.cat([pair[side][layer][:, 1:].flatten(0, 1) for pair in states]) for side in (0, 1))  # (n, d)
        unit_h, unit_s = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (h, s))
        rows.append(
            {
                "layer": layer - 1,
                "cosine": float(torch.cosine_similarity(h, s, dim=-1).mean()),
                "relative_l2": float(((s - h).norm(dim=-1) / h.norm(dim=-1)).mean()),
                "cka": linear_cka(h, s),
                "cka_rms": linear_cka(unit_h, unit_s),
            }
        )
    return pd.DataFrame(rows)


@torch.inference_mode()
def layer_error(weight: torch.Tensor, x: torch.Tensor, p: float, score: str = "magnitude", seed: int = 0) -> float:
    """Relative output error ||W x - W S(x)|| / ||W x|| over all tokens when a share p of the entries of x is zeroed.

    Args:
        weight: (m, d).
        x: inputs (n, d); the threshold is their own p-quantile of the score.
        score: "magnitude", "wina" or "random".
        seed: of the random score.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p={p}: sparsity must lie in [0, 1)")
    if score not in ("magnitude", "wina", "random"):
        raise ValueError(f"score={score!r}: expected 'magnitude', 'wina' or 'random'")
    if score == "random":
        ranking = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    else:
        ranking = x.abs() if score == "magnitude" else x.abs() * weight.norm(dim=0)
    rank = math.ceil(p * x.numel() - 1e-9)
    if rank == 0:
        return 0.0
    lost = torch.where(ranking > ranking.flatten().kthvalue(rank).values, 0, x)
    return float((lost @ weight.T).norm() / (x @ weight.T).norm())

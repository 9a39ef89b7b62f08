"""Expected information gain at K designs, in nats: what `labkit.design.online.eig` and its relatives return."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EIGEstimate:
    """Expected information gain at K designs.

    Attributes:
        value: nats (K,).
        stderr: standard error of the mean over the estimator's terms (K,), nats. Error that all terms share is not in it.
        num_nonfinite: how many terms, over all designs, were NaN or infinite and counted as 0; 0 in a healthy run.
    """

    value: Tensor
    stderr: Tensor
    num_nonfinite: int

    @classmethod
    def from_terms(cls, terms: Tensor) -> "EIGEstimate":
        """Average terms (K, L), L ≥ 1, of one design each."""
        finite = terms.isfinite()
        terms = terms.where(finite, 0)
        spread = terms.detach().std(1, correction=0) / max(terms.shape[1] - 1, 1) ** 0.5
        return cls(terms.mean(1), spread, int((~finite).sum()))

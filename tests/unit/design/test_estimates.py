import dataclasses

import pytest
import torch

from labkit.design import EIGEstimate


def test_value_is_the_mean_and_stderr_its_standard_error():
    terms = torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]])
    estimate = EIGEstimate.from_terms(terms)
    assert estimate.value.tolist() == [3, 5]
    torch.testing.assert_close(estimate.stderr, terms.std(1) / 3**0.5)
    assert estimate.num_nonfinite == 0


def test_one_term_has_no_spread():
    estimate = EIGEstimate.from_terms(torch.tensor([[2.0]]))
    assert (estimate.value.item(), estimate.stderr.item()) == (2, 0)


def test_terms_that_are_not_finite_count_as_zero_and_are_reported():
    estimate = EIGEstimate.from_terms(torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, -torch.inf, 3.0]]))
    assert estimate.value.tolist() == [1, 1]
    assert estimate.num_nonfinite == 3
    assert estimate.stderr.isfinite().all()


def test_the_value_is_differentiable_and_the_stderr_is_not():
    terms = torch.tensor([[1.0, 3.0]], requires_grad=True)
    estimate = EIGEstimate.from_terms(terms)
    (gradient,) = torch.autograd.grad(estimate.value.sum(), terms)
    assert gradient.tolist() == [[0.5, 0.5]]
    assert not estimate.stderr.requires_grad


def test_an_estimate_is_immutable():
    estimate = EIGEstimate.from_terms(torch.zeros(1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.value = torch.ones(1)

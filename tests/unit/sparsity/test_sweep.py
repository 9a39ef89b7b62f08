import pytest
import torch

from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.sweep import next_token_sweep

LEVELS = [0.05 * i for i in range(18)]  # more than one chunk


def test_each_row_is_a_one_token_step_of_the_sparse_model_after_a_dense_prompt(model, calib, ids, random_vectors):
    prompt = ids[:1]
    alpha = random_vectors(find_sites(model, "o+down"))
    sweep = next_token_sweep(model, calib, prompt, LEVELS, lambda p: {site: p * vector for site, vector in alpha.items()})
    torch.testing.assert_close(sweep.dense, model(prompt).logits[0, -1].log_softmax(-1), rtol=0, atol=1e-9)
    assert sweep.levels == tuple(LEVELS)
    assert sweep.teal.shape == sweep.spon.shape == (18, 61)
    with SparseModel(model, calib, 0.0, dense_prefix=prompt.shape[1] - 1) as sparse:
        for p, teal, spon in zip(LEVELS, sweep.teal, sweep.spon, strict=True):
            sparse.set_sparsity(p)
            for row, neurons in ((teal, None), (spon, {site: p * vector for site, vector in alpha.items()})):
                sparse.set_alpha(neurons)
                expected = sparse(prompt).logits[0, -1].log_softmax(-1)
                torch.testing.assert_close(row, expected, rtol=0, atol=1e-9)
    assert (sweep.spon[-1] - sweep.teal[-1]).abs().max() > 0.1
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), r"shape \(2, 3\): expected one prompt \(1, T\)"),
        (torch.zeros(1, 1, dtype=torch.long), r"shape \(1, 1\): a window needs at least 2 tokens"),
    ],
)
def test_a_sweep_is_of_one_prompt(model, calib, prompt, message):
    with pytest.raises(ValueError, match=message):
        next_token_sweep(model, calib, prompt, [0.5], lambda p: {})

import pandas as pd
import pytest
import torch

from labkit.sparsity.allocation import greedy_allocation, greedy_path, read_allocation
from labkit.sparsity.calibration import calibrate
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel


def block_sparsity(sites, allocation):
    size = {site: site.weight.numel() for site in sites}
    return sum(size[site] * allocation[site] for site in sites) / sum(size.values())


def block_output(model, ids, layer):
    outputs = []
    handle = model.model.layers[layer].register_forward_hook(lambda _, _args, y: outputs.append(y))
    model(ids)
    handle.remove()
    return outputs[0]


@pytest.fixture(params=[0, 1])
def layer(request):
    return request.param


@pytest.fixture
def path(model, calib, ids, layer):
    return greedy_path(model, calib, ids, layer, stop=0.6)


def block_error(model, calib, ids, layer, allocation):
    """L2 distance of a block's output in the whole model, the other blocks dense; mean over the last quarter of positions."""
    levels = dict.fromkeys(find_sites(model), 0.0) | allocation
    dense = block_output(model, ids, layer)
    with SparseModel(model, calib, levels, dense_prefix=0):
        sparse = block_output(model, ids, layer)
    return float((sparse - dense)[:, -5:].norm(dim=-1).mean())


def test_each_step_is_the_best_of_all_single_raises(model, calib, ids, layer, path):
    sites = find_sites(model, layers=[layer])
    q = sites[0].weight.numel()
    level = dict.fromkeys(sites, 0.0)
    for _, row in path.head(6).iterrows():
        errors = {}
        for site in sites:
            raised = level | {site: level[site] + 0.05 * q / site.weight.numel()}
            errors[site] = block_error(model, calib, ids, layer, raised)
        best = min(errors, key=errors.get)
        level[best] += 0.05 * q / best.weight.numel()
        assert row["error"] == pytest.approx(errors[best], rel=1e-9)
        assert {site.name: row[site.name] for site in sites} == pytest.approx({s.name: p for s, p in level.items()})


def test_the_path_is_nested_and_each_step_drops_the_same_number_of_weights(model, layer, path):
    sites = find_sites(model, layers=[layer])
    size = pd.Series({site.name: site.weight.numel() for site in sites})
    steps = path[size.index].diff().fillna(path[size.index].iloc[:1])  # from dense
    assert (steps >= 0).all(axis=None)
    assert ((steps > 0).sum(axis=1) == 1).all()
    assert (steps * size).sum(axis=1).to_numpy() == pytest.approx(0.05 * size["q"])
    assert (path["layer"] == layer).all()


def test_the_path_ends_where_the_weighted_sparsity_reaches_its_target(path):
    reached = path["sparsity"].to_numpy()
    assert (reached[:-1] < 0.6).all()
    assert reached[-1] >= 0.6 - 1e-9
    size = pd.Series({"q": 1024, "k": 512, "v": 512, "o": 1024, "gate": 1536, "up": 1536, "down": 1536})
    weighted = (path[size.index] * size).sum(axis=1) / size.sum()
    assert reached == pytest.approx(weighted.to_numpy())


@pytest.mark.parametrize("target", [0.3, 0.6])
def test_every_block_reaches_the_target(model, calib, ids, target):
    allocation = greedy_allocation(model, calib, ids, target)
    sites = find_sites(model)
    assert list(allocation) == sites
    for layer in (0, 1):
        reached = block_sparsity(find_sites(model, layers=[layer]), allocation)
        assert target - 1e-9 <= reached < target + 0.05 * 1024 / 7680
    assert len(set(allocation.values())) > 4
    with SparseModel(model, calib, allocation) as sparse:
        assert sparse.sparsity == allocation


def test_one_path_holds_the_allocation_of_every_lower_target(model, calib, ids):
    paths = pd.concat([greedy_path(model, calib, ids, layer, stop=0.6) for layer in (0, 1)])
    assert read_allocation(model, paths, 0.3) == greedy_allocation(model, calib, ids, 0.3)
    with pytest.raises(ValueError, match=r"target=0\.9: the path of block 0 does not reach it"):
        read_allocation(model, paths, 0.9)


def test_greedy_beats_the_same_sparsity_everywhere(model, calib, ids, layer):
    sites = find_sites(model, layers=[layer])
    greedy = {site: p for site, p in greedy_allocation(model, calib, ids, 0.5).items() if site in sites}
    uniform = dict.fromkeys(sites, block_sparsity(sites, greedy))
    errors = [block_error(model, calib, ids, layer, levels) for levels in (greedy, uniform)]
    assert errors[0] < errors[1]


def test_the_search_leaves_the_model_as_it_was(model, calib, ids):
    dense = model(ids).logits
    greedy_path(model, calib, ids, 0, stop=0.2)
    assert torch.equal(model(ids).logits, dense)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("layout", ["gpt2", "phi3", "opt", "gemma3"])
def test_blocks_of_other_architectures_are_found(tiny, ids, layout):
    model = tiny(layout)
    calib = calibrate(model, ids)
    names = [site.name for site in find_sites(model, layers=[1])]
    assert list(greedy_path(model, calib, ids, 1, stop=0.2).columns) == ["layer", "sparsity", "error", *names]


@pytest.mark.parametrize(("stop", "step"), [(0.0, 0.05), (1.0, 0.05), (-0.1, 0.05), (0.5, 0.0), (0.5, 1.0)])
def test_target_and_step_are_shares(model, calib, ids, stop, step):
    with pytest.raises(ValueError, match=rf"stop={stop}, step={step}: both must lie in \(0, 1\)"):
        greedy_path(model, calib, ids, 0, stop=stop, step=step)


def test_a_target_out_of_the_steps_reach_is_refused(model, calib, ids):
    with pytest.raises(ValueError, match=r"stop=0\.99: steps of 0\.3 cannot get beyond 0\.\d+ in block 0"):
        greedy_path(model, calib, ids, 0, stop=0.99, step=0.3)

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from labkit.sparsity.sites import INPUT_GROUPS, Site, find_sites, site_inputs

LLAMA = {
    "q": "attn_in",
    "k": "attn_in",
    "v": "attn_in",
    "o": "attn_out",
    "gate": "mlp_in",
    "up": "mlp_in",
    "down": "mlp_mid",
}
TABLE = {
    "llama": LLAMA,
    "gemma3": LLAMA,
    "phi3": {"qkv": "attn_in", "o": "attn_out", "gate_up": "mlp_in", "down": "mlp_mid"},
    "gpt2": {"qkv": "attn_in", "o": "attn_out", "up": "mlp_in", "down": "mlp_mid"},
    "opt": {"k": "attn_in", "v": "attn_in", "q": "attn_in", "o": "attn_out", "up": "mlp_in", "down": "mlp_mid"},
}


def record_inputs(model, sites, ids):
    """What each site reads in one forward pass, in the order of the calls."""
    inputs = {}
    handles = [s.linear.register_forward_pre_hook(lambda _, args, s=s: inputs.update({s: args[0]})) for s in sites]
    model(ids)
    for handle in handles:
        handle.remove()
    return inputs


@pytest.mark.parametrize("layout", TABLE)
def test_every_linear_of_a_known_architecture_is_a_site(tiny, layout):
    sites = find_sites(tiny(layout))
    assert [(site.layer, site.name, site.input_group) for site in sites] == [
        (layer, name, group) for layer in range(2) for name, group in TABLE[layout].items()
    ]


@pytest.mark.parametrize("layout", TABLE)
def test_sites_come_in_the_order_of_the_forward_pass(tiny, ids, layout):
    model = tiny(layout)
    sites = find_sites(model)
    called = list(record_inputs(model, sites, ids))
    assert [site.group for site in called] == [site.group for site in sites]


@pytest.mark.parametrize("layout", TABLE)
def test_sites_of_one_input_group_read_the_same_tensor(tiny, ids, layout):
    model = tiny(layout)
    inputs = record_inputs(model, find_sites(model), ids)
    for first in inputs:
        for second in inputs:
            same = first.width == second.width and torch.equal(inputs[first], inputs[second])
            assert same == (first.group == second.group), (first, second)


@pytest.mark.parametrize("layout", TABLE)
def test_weight_is_out_by_in_whatever_the_layout(tiny, layout):
    for site in find_sites(tiny(layout)):
        x = torch.randn(3, site.width, dtype=site.weight.dtype)
        bias = 0 if site.linear.bias is None else site.linear.bias
        torch.testing.assert_close(site.linear(x), x @ site.weight.T + bias, rtol=0, atol=1e-12)


def test_a_site_is_known_by_layer_and_name(tiny):
    first, second = find_sites(tiny(seed=0)), find_sites(tiny(seed=1))
    assert first == second
    assert len({*first, *second}) == 14
    assert str(first[-1]) == "1.down"
    assert set(INPUT_GROUPS) == {site.input_group for site in first}


def test_sites_by_name_and_layer(model):
    assert [str(s) for s in find_sites(model, "o+down", layers=[1])] == ["1.o", "1.down"]
    assert find_sites(model, ["o", "down"]) == find_sites(model, "o+down")
    assert [str(s) for s in find_sites(model, "down")] == ["0.down", "1.down"]


@pytest.mark.parametrize(
    ("which", "layers", "message"),
    [
        ("middle", None, r"which='middle': this model's sites are 'all' or any of \['q', 'k'"),
        ("o+middle", None, "which='o.middle'"),
        ([], None, r"which=\[\]"),
        ("all", [2], r"layers=\[2\]: expected some of 0 … 1"),
        ("all", [-1], r"layers=\[-1\]"),
        ("all", [], r"layers=\[\]"),
    ],
)
def test_a_selection_the_model_does_not_have_is_named(model, which, layers, message):
    with pytest.raises(ValueError, match=message):
        find_sites(model, which, layers)


@pytest.mark.parametrize("layout", ["bert", "bloom"])  # nothing known, all but one known
def test_an_unknown_architecture_falls_back_to_every_linear_but_the_head(tiny, ids, layout):
    model = tiny(layout)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} is not in the table"):
        sites = find_sites(model)
    head = model.get_output_embeddings()
    linears = {module for module in model.modules() if isinstance(module, nn.Linear)} - {head}
    assert {site.linear for site in sites} == linears
    assert len({site.group for site in sites}) == len(sites)  # which of them share an input is unknown


class NoLinear(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self):
        super().__init__(PretrainedConfig())
        self.embedding = nn.Embedding(5, 3)


def test_a_model_without_linears_is_refused_with_its_modules():
    with pytest.raises(ValueError, match=r"NoLinear has no linear layer.*modules are \['Embedding', 'NoLinear'\]"):
        find_sites(NoLinear())


class Int8Linear(nn.Linear):
    """Holds its weight as bitsandbytes does."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)


class Adapter(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear


@pytest.mark.parametrize("wrapper", [Int8Linear, Adapter])
def test_quantised_and_adapted_linears_are_refused(model, wrapper):
    attention = model.model.layers[1].self_attn
    attention.k_proj = wrapper(attention.k_proj)
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.self_attn\.k_proj as {wrapper.__name__}.*not supported"):
        find_sites(model)


def test_quantised_linears_of_an_unknown_architecture_are_refused(tiny):
    model = tiny("bert")
    output = model.bert.encoder.layer[0].output
    output.dense = Int8Linear(output.dense)
    with pytest.warns(UserWarning, match="not in the table"), pytest.raises(ValueError, match="dense as Int8Linear"):
        find_sites(model)


def test_site_width_is_the_number_of_input_channels():
    assert Site(0, "down", nn.Linear(7, 3), "mlp_mid").width == 7


@pytest.mark.parametrize("layout", ["llama", "opt"])
def test_inputs_are_kept_once_per_group_as_rows_of_tokens(tiny, ids, layout):
    model = tiny(layout)
    sites = find_sites(model)
    expected = record_inputs(model, sites, ids)
    kept = site_inputs(model, ids, dtype=torch.float64)
    assert set(kept) == {site.group for site in sites}
    for site in sites:
        assert torch.equal(kept[site.group], expected[site].reshape(80, site.width))
    assert {x.dtype for x in site_inputs(model, ids).values()} == {torch.float16}
    assert not any(module._forward_pre_hooks for module in model.modules())

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from labkit.design.constraints import StepLimit
from labkit.design.dad import DADNetwork, fit_dad, load_policy
from labkit.design.models import LocationFinding, Pharmacokinetics
from labkit.design.networks import Units, descend, digest, save
from labkit.design.posterior import AmortizedPosterior, load_posterior
from labkit.design.training import DATA, RECIPES, train, training_designs

SMALL = {"width": 16, "layers": 1, "hidden": 16, "components": 3}


@pytest.fixture
def location():
    return LocationFinding()


@pytest.fixture
def history(location):
    """θ (4, 2), X (4, 6, 2) and Y (4, 6)."""
    generator = torch.Generator().manual_seed(0)
    theta = location.sample_prior((4,), generator)
    X = location.sample_designs((4, 6), generator)
    return theta, X, location.simulate(theta[:, None], X, generator=generator)


def test_units_bring_the_prior_predictive_to_unit_scale(location):
    units, generator = Units(location), torch.Generator().manual_seed(7)
    theta, x = location.sample_prior((20_000,), generator), location.sample_designs((20_000,), generator)
    y = units.outcome(location.simulate(theta, x, generator=generator))
    assert y.shape == (20_000, 1)
    assert abs(y.mean()) < 0.05
    assert y.std() == pytest.approx(1, abs=0.05)
    assert units.design(location.bounds).tolist() == [[-1, -1], [1, 1]]


def test_a_stored_posterior_returns_as_it_was_but_for_half_precision(location, history, tmp_path):
    theta, X, Y = history
    network = AmortizedPosterior(location, seed=3, **SMALL).eval()
    save(network, tmp_path / "q.safetensors")
    loaded = load_posterior(tmp_path / "q.safetensors", LocationFinding())
    for head in ("product", "joint"):
        before, after = (q.using(head).log_prob(theta[:, None], X, Y) for q in (network, loaded))
        torch.testing.assert_close(after, before.detach(), rtol=0, atol=0.02)
    save(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "q.safetensors").read_bytes()


def test_a_stored_policy_returns_as_it_was_but_for_half_precision(location, history, tmp_path):
    _, X, Y = history
    within = StepLimit(0.1, bounds=location.bounds)
    for constraint in (None, within):
        network = DADNetwork(location, 8, constraint, seed=3)
        save(network, tmp_path / "p.safetensors")
        loaded = load_policy(tmp_path / "p.safetensors", location, constraint)
        state = None if constraint is None else constraint.init(X[:, -1], 2)
        torch.testing.assert_close(loaded(X, Y, state), network(X, Y, state).detach(), rtol=0, atol=2e-3)


def test_a_file_for_another_experiment_is_refused(location, tmp_path):
    path = tmp_path / "q.safetensors"
    save(AmortizedPosterior(location, **SMALL), path)
    with pytest.raises(ValueError, match=r"q\.safetensors was trained for another experiment: noise_sd=0.5 instead of 0.3"):
        load_posterior(path, LocationFinding(noise_sd=0.3))
    with pytest.raises(ValueError, match=r"class='LocationFinding' instead of 'Pharmacokinetics'"):
        load_posterior(path, Pharmacokinetics())
    with pytest.raises(ValueError, match="holds a posterior; expected a policy"):
        load_policy(path, location)
    with pytest.raises(ValueError, match="there is no file"):
        load_posterior(tmp_path / "r.safetensors", location)


def test_a_policy_of_another_constraint_is_refused(location, tmp_path):
    path = tmp_path / "p.safetensors"
    save(DADNetwork(location, 8, StepLimit(0.1, bounds=location.bounds)), path)
    for other in (None, StepLimit(0.2, bounds=location.bounds)):
        with pytest.raises(ValueError, match=r"was trained within StepLimit\(0\.1.*got constraint="):
            load_policy(path, location, other)


def test_a_configuration_that_was_changed_is_refused(location, tmp_path):
    path = tmp_path / "q.safetensors"
    save(AmortizedPosterior(location, **SMALL), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["labkit"] = metadata["labkit"].replace('"noise_sd": 0.5', '"noise_sd": 0.3')
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(ValueError, match="does not have the hash"):
        load_posterior(path, LocationFinding(noise_sd=0.3))


def fit_line(checkpoint=None, steps=30, stop=None, seed=0):
    """Weights of a regression on y = 3 x + 1, trained for so many steps; interrupted in step `stop` if that is given."""
    line, calls = nn.Linear(1, 1), []
    with torch.no_grad():
        line.weight.fill_(0.0)
        line.bias.fill_(0.0)

    def losses(generator):
        calls.append(None)
        if len(calls) == stop:
            raise KeyboardInterrupt
        x = torch.randn(8, 1, generator=generator)
        return {"loss": (line(x) - 3 * x - 1).square().mean()}

    table = descend(line, losses, steps=steps, lr=0.1, seed=seed, every=10, checkpoint=checkpoint)
    return torch.cat([line.weight.detach()[0], line.bias.detach()]), table


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path):
    checkpoint = tmp_path / "parts.safetensors"
    expected, trace = fit_line()
    with pytest.raises(KeyboardInterrupt):
        fit_line(checkpoint, stop=25)
    assert checkpoint.is_file()
    resumed, resumed_trace = fit_line(checkpoint)
    assert torch.equal(resumed, expected)
    assert resumed_trace.equals(trace)
    assert not checkpoint.exists()
    assert trace.step.tolist() == [10, 20, 30]
    assert not torch.equal(fit_line(seed=1)[0], expected)


def test_a_loss_that_is_not_finite_stops_the_training():
    line = nn.Linear(1, 1)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1 of 5"):
        descend(line, lambda generator: {"loss": line.weight.sum() * math.nan}, steps=5, lr=0.1, seed=0)
    with pytest.raises(ValueError, match="steps=0: expected an int"):
        descend(line, lambda generator: {}, steps=0, lr=0.1, seed=0)


def test_equal_seeds_train_equal_networks(location):
    def weights(seed):
        posterior = AmortizedPosterior(location, seed=seed, **SMALL)
        posterior.fit(training_designs(location), horizon=5, steps=3, batch=4, seed=seed)
        policy, _ = fit_dad(location, 4, steps=3, num_rollouts=4, num_contrastive=8, seed=seed)
        return [torch.cat([p.detach().flatten() for p in network.parameters()]) for network in (posterior, policy)]

    first, second, other = weights(0), weights(0), weights(1)
    for a, b, c in zip(first, second, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_training_writes_weights_and_a_log_and_keeps_a_finished_one(tmp_path):
    path = train("location-policy", tmp_path, fast=True, progress=False)
    written = path.read_bytes()
    log = tmp_path / "location-policy.csv.gz"
    assert log.is_file()
    log.unlink()
    assert train("location-policy", tmp_path, fast=True, progress=False).read_bytes() == written
    assert not log.is_file()
    with pytest.raises(ValueError, match="name='unknown': expected one of location-posterior"):
        train("unknown", tmp_path)


@pytest.mark.parametrize("name", list(RECIPES))
def test_stored_networks_are_small_and_fit_their_experiment(name):
    recipe, path = RECIPES[name], DATA / f"{name}.safetensors"
    assert path.stat().st_size < 300_000
    model = recipe.model()
    generator = torch.Generator().manual_seed(0)
    X = model.sample_designs((3, 4), generator)
    Y = model.simulate(model.sample_prior((3, 1), generator), X, generator=generator)
    if recipe.kind == "posterior":
        theta = load_posterior(path, model).sample(X, Y, 5, generator)
        assert torch.isfinite(model.prior().log_prob(theta)).all()
    else:
        constraint = recipe.constraint(model) if recipe.constraint else None
        state = constraint.init(X[:, -1], 5) if constraint else None
        x = load_policy(path, model, constraint)(X, Y, state)
        assert ((x >= model.bounds[0]) & (x <= model.bounds[1])).all()
        assert constraint is None or constraint.is_feasible(state, x).all()


@pytest.mark.parametrize("content", [b"", b"hello world" * 100])
def test_damaged_files_are_named(tmp_path, location, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    for load in (load_posterior, load_policy):
        with pytest.raises(ValueError, match=r"path=weights.safetensors: damaged"):
            load(path, location)
    posterior = AmortizedPosterior(location, **SMALL)
    with pytest.raises(ValueError, match=r"checkpoint=.*damaged.*remove it"):
        posterior.fit(horizon=3, steps=2, batch=2, checkpoint=path)


@pytest.mark.parametrize("header", ["{", "[]", '{"config": {}, "hash": ""}'])
def test_files_of_others_are_named(tmp_path, location, header):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(2)}, path, metadata={"labkit": header})
    with pytest.raises(ValueError, match=r"path=weights.safetensors: (damaged|no configuration)"):
        load_policy(path, location)


def test_a_file_with_missing_or_infinite_weights_is_refused(tmp_path, location):
    path, network = tmp_path / "weights.safetensors", DADNetwork(location, 3)
    header = json.dumps({"config": network.config, "hash": digest(network.config)})
    save_file({"a": torch.zeros(2)}, path, metadata={"labkit": header})
    with pytest.raises(ValueError, match=r"weights missing, of another shape"):
        load_policy(path, location)
    network.emit[0].weight.data.fill_(math.inf)
    save(network, path)
    with pytest.raises(ValueError, match=r"not finite: emit.0.weight"):
        load_policy(path, location)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    path = tmp_path / "line.safetensors"
    save_file({"history": torch.zeros(3, 1), "weight/value": torch.zeros(1, 1)}, path)
    with pytest.raises(ValueError, match=r"checkpoint=.*of another network"):
        descend(torch.nn.Linear(1, 1), lambda generator: {}, steps=9, lr=0.1, seed=0, checkpoint=path)
    shapes = {"weight": (1, 1), "bias": (1,)}
    parts = {f"{name}/{part}": torch.zeros(shape) for name, shape in shapes.items() for part in ("value", "mean", "square")}
    save_file({"history": torch.zeros(3, 1), "settings": torch.tensor([9, 0.1, 0])} | parts, path)
    with pytest.raises(ValueError, match=r"checkpoint=.*\(steps, lr, seed\)"):
        descend(torch.nn.Linear(1, 1), lambda generator: {}, steps=2, lr=0.1, seed=0, checkpoint=path)


@pytest.mark.parametrize(
    "sizes", [{"width": 0}, {"layers": 0}, {"components": 0}, {"hidden": "a"}, {"width": 7, "attention_heads": 2}]
)
def test_bad_sizes_of_a_network_are_named(location, sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}="):
        AmortizedPosterior(location, **sizes)
    for options in ({"horizon": 1.5}, {"encoding": 0, "horizon": 2}, {"hidden": 5, "horizon": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            DADNetwork(location, **options)

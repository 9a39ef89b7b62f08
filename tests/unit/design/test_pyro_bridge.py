import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.oed.eig import nmc_eig

from labkit.design.ces import CES
from labkit.design.models import HyperbolicDiscounting, LinearGaussian, LocationFinding, Pharmacokinetics, is_gaussian
from labkit.design.priors import Joint
from labkit.design.pyro_bridge import from_pyro

BOX = [[-1.0], [2.0]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def program_of(law, *, plate=True):
    """A program with two latent sites, whose outcome follows `law(slope (...), offsets (..., 2), design (...))`."""

    def program(design):
        with pyro.plate_stack("designs", design.shape[:-1]):
            slope = pyro.sample("slope", dist.HalfNormal(torch.tensor(2.0)))
            offsets = pyro.sample("offsets", dist.Normal(torch.zeros(2), torch.tensor([1.0, 0.5])).to_event(1))
            return pyro.sample("y", law(slope, offsets, design[..., 0]))

    return program


LAWS = {
    "normal": lambda slope, offsets, x: dist.Normal(slope * x + offsets.sum(-1), 0.5 + 0.1 * x.abs()),
    "binary": lambda slope, offsets, x: dist.Bernoulli(logits=slope * x + offsets.sum(-1)),
    "three values": lambda slope, offsets, x: dist.Categorical(
        logits=torch.stack(torch.broadcast_tensors(x * slope, *offsets.unbind(-1)), -1)
    ),
    "quantiles": lambda slope, offsets, x: dist.Laplace(slope * x + offsets.sum(-1), 0.3),
}


@pytest.fixture(params=LAWS)
def foreign(request):
    return from_pyro(program_of(LAWS[request.param]), bounds=BOX, latents=("slope", "offsets")), LAWS[request.param]


def test_a_pyro_program_is_an_experiment(foreign):
    model, law = foreign
    theta, design = model.sample_prior((40, 1), seeded()), model.sample_designs((7,), seeded(1))
    assert model.theta_dim == 3
    y = model.simulate(theta, design, generator=seeded(2))
    own = law(theta[..., 0], theta[..., 1:], design[..., 0])
    torch.testing.assert_close(model.log_prob(y, theta, design), own.log_prob(y))
    expected = dist.HalfNormal(2.0).log_prob(theta[..., 0]) + dist.Normal(0.0, torch.tensor([1.0, 0.5])).log_prob(
        theta[..., 1:]
    ).sum(-1)
    torch.testing.assert_close(model.prior().log_prob(theta), expected)
    torch.testing.assert_close(model.from_unconstrained(model.to_unconstrained(theta)), theta)
    # at the unconstrained coordinate log(slope) the density gains a factor slope
    v = model.to_unconstrained(theta)
    torch.testing.assert_close(model.log_prior_unconstrained(v), expected + theta[..., 0].log())


def test_its_simulated_outcomes_follow_its_law(foreign):
    model, law = foreign
    theta, design = model.sample_prior((6,), seeded()), model.sample_designs((6,), seeded(1))
    y = model.simulate(theta, design, model.noise((20_000, 6), seeded(2)))
    own = law(theta[..., 0], theta[..., 1:], design[..., 0])
    if model.outcomes is not None:
        for value in model.outcomes:
            probs = own.log_prob(value.expand(6)).exp()
            torch.testing.assert_close((y == value).float().mean(0), probs, rtol=0, atol=4.5 * 0.5 / 141)
    else:
        torch.testing.assert_close(own.cdf(y).mean(0), torch.full((6,), 0.5), rtol=0, atol=4 * 0.29 / 141)
        torch.testing.assert_close(own.cdf(y).std(0), torch.full((6,), 12**-0.5), rtol=0, atol=0.01)


def test_a_normal_outcome_makes_it_gaussian():
    models = {name: from_pyro(program_of(law), bounds=BOX, latents=("slope", "offsets")) for name, law in LAWS.items()}
    assert [name for name, model in models.items() if is_gaussian(model)] == ["normal"]
    assert [model.outcomes is not None for model in models.values()] == [False, True, True, False]


def test_the_global_generator_stays_as_it_is():
    model = from_pyro(program_of(LAWS["normal"]), bounds=BOX, latents=("slope", "offsets"))
    before = torch.get_rng_state()
    theta, design = model.sample_prior((4,), seeded()), model.sample_designs((4,), seeded())
    model.log_prob(model.simulate(theta, design, generator=seeded()), theta, design)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "model",
    [LocationFinding(), LocationFinding(2, prior="normal"), Pharmacokinetics(), HyperbolicDiscounting(), CES()],
    ids=lambda model: type(model).__name__,
)
def test_an_experiment_is_a_pyro_program_with_the_same_densities(model):
    designs = model.sample_designs((5, 3), seeded())
    pyro.set_rng_seed(0)
    trace = poutine.trace(model.pyro_model()).get_trace(designs)
    trace.compute_log_prob()
    theta, y = trace.nodes["theta"]["value"], trace.nodes["y"]["value"]
    assert y.shape == (5, 3)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], model.log_prob(y, theta, designs))
    torch.testing.assert_close(trace.nodes["theta"]["log_prob"], model.prior().log_prob(theta))


def test_pyros_own_estimator_finds_the_closed_form():
    model = LinearGaussian(lambda x: torch.cat([torch.ones_like(x), x], -1), torch.eye(2), bounds=[[-2.0], [2.0]])
    designs = torch.tensor([[0.0], [1.0], [2.0]])
    pyro.set_rng_seed(0)
    estimate = nmc_eig(model.pyro_model(), designs, ["y"], ["theta"], N=4000, M=4000)
    torch.testing.assert_close(estimate.detach(), model.expected_information(designs), rtol=0, atol=0.05)


def test_a_joint_law_is_the_product_of_its_parts():
    laws = [dist.Normal(0.0, 2.0), dist.Dirichlet(torch.tensor([1.0, 2.0])), dist.HalfNormal(1.0)]
    joint = Joint(laws)
    draws = joint.expand((3,)).sample((5,))
    assert draws.shape == (5, 3, 4)
    parts = draws[..., 0], draws[..., 1:3], draws[..., 3]
    torch.testing.assert_close(joint.log_prob(draws), sum(law.log_prob(x) for law, x in zip(laws, parts, strict=True)))
    assert joint.support.check(draws).all()
    assert joint.has_rsample


def hierarchical(design):
    with pyro.plate_stack("designs", design.shape[:-1]):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        offset = pyro.sample("offsets", dist.Normal(slope, 1.0))
        return pyro.sample("y", dist.Normal(offset, 1.0))


def on_the_simplex(design):
    with pyro.plate_stack("designs", design.shape[:-1]):
        share = pyro.sample("slope", dist.Dirichlet(torch.ones(3)))
        return pyro.sample("y", dist.Normal(share[..., 0], 1.0))


@pytest.mark.parametrize(
    ("program", "latents", "message"),
    [
        (program_of(LAWS["normal"]), ("theta",), "has no site 'theta'"),
        (hierarchical, ("slope", "offsets"), "the law of 'offsets' changes"),
        (on_the_simplex, ("slope",), "free coordinates"),
        (program_of(lambda slope, offsets, x: dist.Poisson(slope)), ("slope", "offsets"), "has the law Poisson"),
        (program_of(lambda s, o, x: dist.Normal(o, 1.0).to_event(1)), ("slope", "offsets"), "expected a scalar"),
    ],
)  # fmt: skip
def test_programs_that_are_no_such_experiment_are_refused(program, latents, message):
    with pytest.raises(ValueError, match=message):
        from_pyro(program, bounds=BOX, latents=latents)


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError, match="below its highest"):
        from_pyro(program_of(LAWS["normal"]), bounds=[[1.0], [1.0]], latents=("slope", "offsets"))


def test_a_program_whose_latent_law_follows_the_design_is_refused():
    def program(design):
        with pyro.plate_stack("designs", design.shape[:-1]):
            theta = pyro.sample("theta", dist.Normal(design[..., 0], 1.0))
            return pyro.sample("y", dist.Normal(theta, 1.0))

    with pytest.raises(ValueError, match="the law of 'theta' changes"):
        from_pyro(program, bounds=[[0.0], [math.pi]])


def with_sites(law):
    def program(design):
        with pyro.plate_stack("designs", design.shape[:-1]):
            return pyro.sample("y", law(design))

    return program


def hidden(design):
    theta, other = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("theta", "hidden"))
    return dist.Normal(theta + other, 1.0)


def discrete(design):
    return dist.Normal(pyro.sample("theta", dist.Bernoulli(0.5)) * design[..., 0], 1.0)


def mixed(design):
    return dist.Normal(pyro.sample("theta", dist.Normal(0.0, 1.0)) * design.sum(), 1.0)


@pytest.mark.parametrize(
    ("law", "message"),
    [(hidden, r"the sites \['hidden'\] are random too"), (discrete, "discrete law"), (mixed, "one law per design")],
)
def test_hidden_and_discrete_latents_and_mixed_designs_are_refused(law, message):
    with pytest.raises(ValueError, match=message):
        from_pyro(with_sites(law), bounds=[[0.5], [1.0]])


@pytest.mark.parametrize("latents", [(), "slope", None, ("slope", "slope"), ("slope", "y")])
def test_bad_names_of_latents_are_refused(latents):
    with pytest.raises(ValueError, match="latents="):
        from_pyro(program_of(LAWS["normal"]), bounds=BOX, latents=latents)
    with pytest.raises(ValueError, match="program=None"):
        from_pyro(None, bounds=BOX)

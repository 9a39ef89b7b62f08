import dataclasses
import math
from types import SimpleNamespace

import pyro.distributions as pyro_dist
import pytest
import torch
from torch.distributions import Binomial, Gamma, Independent, Normal, Poisson, Uniform

from labkit.filtering import (
    LinearGaussianSSM,
    MovingSource,
    NestedParticleFilter,
    StateSpaceModel,
    TwoGroupSIR,
    check_design,
    check_designs,
    check_model,
    check_observation,
    check_truth,
    log_likelihood,
    parameter_box,
    reveal,
    simulate,
    truth_generator,
)
from labkit.randomness import sample


class RandomWalk:
    """A user's model, which inherits from nothing: a random walk of unknown step width, counted by a Poisson law of pyro's."""

    param_names, state_names, obs_names, design_names = ("width",), ("level",), ("count",), ("gain",)
    state_dim = obs_dim = design_dim = 1
    jitter_scale = 0.1

    def prior(self):
        return pyro_dist.Uniform(torch.zeros(1), torch.ones(1)).to_event(1)

    def initial(self, theta, n, generator):
        return torch.ones(len(theta), n, 1)

    def transition(self, x, theta, design, generator):
        return x + theta[:, None] * torch.randn(x.shape, generator=generator)

    def observation(self, x, design):
        return pyro_dist.Poisson((design + x).exp()).to_event(1)

    def sample_designs(self, n, generator):
        return torch.rand((n, 1), generator=generator)


def test_the_models_and_a_users_own_satisfy_the_protocol(model):
    assert isinstance(model, StateSpaceModel)
    assert isinstance(RandomWalk(), StateSpaceModel)
    check_model(model)
    check_model(RandomWalk())


def test_a_users_model_runs_from_simulation_to_filter():
    model, generator = RandomWalk(), truth_generator(3)
    designs = model.sample_designs(15, generator)
    _, ys = simulate(model, torch.tensor([0.3]), designs, generator)
    nested = NestedParticleFilter(model, 60, 40)
    for design, y in zip(designs, ys, strict=True):
        step = nested.step(design, y)
    assert 0 < float(step.theta_mean) < 1
    assert math.isfinite(step.log_evidence)


# what a model must get right


@pytest.mark.parametrize("name", ["prior", "obs_names", "design_dim", "sample_designs"])
def test_what_a_model_lacks_is_named(name):
    parts = {key: getattr(RandomWalk(), key) for key in dir(RandomWalk) if not key.startswith("_") and key != name}
    with pytest.raises(ValueError, match=rf"model: SimpleNamespace lacks {name}; see labkit\.filtering\.StateSpaceModel"):
        check_model(SimpleNamespace(**parts))


@pytest.mark.parametrize(
    ("names", "dimension"), [("state_names", "state_dim"), ("obs_names", "obs_dim"), ("design_names", "design_dim")]
)
def test_a_model_has_one_name_per_dimension(names, dimension):
    model = RandomWalk()
    setattr(model, names, ("a", "b"))
    with pytest.raises(ValueError, match=f"{names}: RandomWalk names 2 of them, but {dimension}=1"):
        check_model(model)


def test_a_model_has_one_parameter_name_per_coordinate_of_its_prior():
    model = RandomWalk()
    model.prior = lambda: Uniform(torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"prior: RandomWalk\.prior has event shape \(\); expected \(1,\)"):
        check_model(model)


def test_a_transition_of_the_wrong_shape_is_named():
    model = RandomWalk()
    model.transition = lambda x, theta, design, generator: x[..., 0]
    message = r"RandomWalk\.transition gave torch\.float32 states of shape \(60, 40\); expected .*float32 and \(60, 40, 1\)"
    with pytest.raises(ValueError, match=message):
        NestedParticleFilter(model, 60, 40).step([1.0], [2])
    with pytest.raises(ValueError, match=message):
        NestedParticleFilter(model, 60, 40).predict()
    model.transition = lambda x, theta, design, generator: x.double()
    with pytest.raises(ValueError, match=r"gave torch\.float64 states of shape \(60, 40, 1\); expected torch\.float32"):
        NestedParticleFilter(model, 60, 40).predict()


def test_a_class_is_no_model():
    with pytest.raises(ValueError, match=r"model: RandomWalk is a class; expected an instance of it, such as RandomWalk\(\)"):
        check_model(RandomWalk)


def test_an_observation_law_of_the_wrong_shape_is_named():
    model = RandomWalk()
    model.observation = lambda x, design: Poisson(x.exp())
    with pytest.raises(
        ValueError, match=r"observation: RandomWalk\.observation has batch shape \(60, 40, 1\), event shape \(\) at states"
    ):
        NestedParticleFilter(model, 60, 40).step([1.0], [2])


@pytest.mark.parametrize(
    "states",
    [torch.ones(60, 40), torch.ones(60, 40, 2), torch.ones(60, 40, 1, dtype=torch.float64), torch.ones(60, 40, 1).half()],
)
def test_first_states_of_the_wrong_shape_or_precision_are_named(states):
    model = RandomWalk()
    model.initial = lambda theta, n, generator: states
    with pytest.raises(ValueError, match=r"initial: RandomWalk\.initial gave torch\.\w+ states of shape .* \(60, 40, 1\)"):
        NestedParticleFilter(model, 60, 40)


# randomness


def test_every_design_meets_the_same_epidemic():
    model, states, counts = TwoGroupSIR(), [], []
    for share in (0.02, 0.5, 0.98):
        designs = model.design_of_share(share).expand(40, 1)
        xs, ys = simulate(model, model.truth, designs, truth_generator(4))
        states.append(xs.tolist())
        counts.append(ys.sum(0).tolist())
    assert states[0] == states[1] == states[2]
    assert counts[0][0] < counts[1][0] < counts[2][0]
    assert counts[0][1] > counts[1][1] > counts[2][1]


def test_a_simulation_is_its_steps_one_by_one(model):
    designs = model.sample_designs(6, truth_generator(0))
    xs, ys = simulate(model, model.truth, designs, truth_generator(1))
    assert xs.shape == (7, model.state_dim)
    assert ys.shape == (6, model.obs_dim)
    generator = truth_generator(1)
    x = model.initial(model.truth[None], 1, generator)[0, 0]
    for t, design in enumerate(designs):
        x, y = reveal(model, model.truth, x, design, generator)
        assert x.tolist() == xs[t + 1].tolist()
        assert y.tolist() == ys[t].tolist()


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 6), (5, 6)])
def test_a_transition_leaves_the_states_it_starts_from_alone(model, shape, generator):
    theta = sample(model.prior(), generator, shape[:1])
    x = model.initial(theta, shape[1], generator)
    before = x.clone()
    moved = model.transition(x, theta, None, generator)
    assert x.tolist() == before.tolist()
    assert moved.is_contiguous()
    assert moved.tolist() != before.tolist()


def test_another_seed_gives_another_truth(model):
    designs = model.sample_designs(6, truth_generator(0))
    first, second = (simulate(model, model.truth, designs, truth_generator(seed))[1] for seed in (0, 1))
    assert first.tolist() != second.tolist()


# densities


def random_states(model, run, shape):
    """States near a real run, in float64."""
    _, xs, _ = run(model, 30)
    index = torch.randint(1, 31, shape, generator=torch.Generator().manual_seed(2))
    return xs.double()[index]


def test_the_likelihood_is_the_observation_laws_density(model, run):
    designs, _, ys = run(model, 5)
    x = random_states(model, run, (7, 4))
    for design, y in zip(designs.double(), ys.double(), strict=True):
        expected = model.observation(x, design).log_prob(y)
        assert expected.shape == (7, 4)
        torch.testing.assert_close(log_likelihood(model, y, x, design), expected, rtol=1e-9, atol=1e-9)
        single = log_likelihood(model, y.float(), x.float(), design.float()).double()
        torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)


def test_the_natural_form_is_the_same_density(model, run):
    designs, _, ys = run(model, 5)
    x = random_states(model, run, (7, 4))
    for design, y in zip(designs.double(), ys.double(), strict=True):
        eta, log_normaliser = model.natural(x, design)
        statistic, base = model.statistic(y)
        density = (statistic * eta).sum(-1) - log_normaliser + base
        torch.testing.assert_close(density, model.observation(x, design).log_prob(y), rtol=1e-9, atol=1e-9)


def test_a_batch_of_designs_equals_a_loop_over_them(model, run):
    designs, _, _ = run(model, 5)
    x, designs = random_states(model, run, (7, 4)), designs.double()
    together = model.natural(x, designs[:, None, None])
    y = torch.ones(model.obs_dim, dtype=torch.float64)
    densities = model.observation(x, designs[:, None, None]).log_prob(y)
    for k, design in enumerate(designs):
        for batch, one in zip(together, model.natural(x, design), strict=True):
            torch.testing.assert_close(batch[k], one, rtol=0, atol=1e-12)
        torch.testing.assert_close(densities[k], model.observation(x, design).log_prob(y), rtol=0, atol=1e-9)
    one_state = model.natural(x[0, 0], designs)
    torch.testing.assert_close(one_state[0], together[0][:, 0, 0], rtol=0, atol=1e-12)


def test_the_natural_form_is_differentiable_in_the_design(model, run):
    x = random_states(model, run, (3,))
    designs = model.sample_designs(1, truth_generator(0)).double()[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda design: model.natural(x, design), (designs,))


def test_a_density_that_is_not_finite_becomes_the_floor():
    model = LinearGaussianSSM()
    x = torch.tensor([[0.0], [math.nan], [math.inf]])
    value = log_likelihood(model, torch.tensor([0.3]), x, torch.ones(1))
    assert value[1:].tolist() == pytest.approx([-1e12, -1e12])
    assert value[0] > -2


def test_a_law_that_torch_validates_is_not_asked_about_states_that_blew_up():
    model = RandomWalk()
    model.observation = lambda x, design: Independent(Normal(x, 1.0, validate_args=True), 1)
    x = torch.tensor([[0.3], [math.nan], [-math.inf]])
    value = log_likelihood(model, torch.tensor([0.3]), x, torch.ones(1))
    assert value.tolist() == pytest.approx([-math.log(2 * math.pi) / 2, -1e12, -1e12])
    assert log_likelihood(model, torch.tensor([0.3]), x[1:], torch.ones(1)).tolist() == pytest.approx([-1e12, -1e12])


@pytest.mark.parametrize(
    ("law", "y", "expected"),
    [
        (lambda x, design: Uniform(x - 1, x + 1), 0.3, [math.log(0.5), -1e12, -1e12]),
        (lambda x, design: Binomial(x.abs(), torch.full_like(x, 0.5)), 3.0, [-1e12, math.log(1 / 8), math.log(4 / 16)]),
    ],
)
def test_a_state_whose_law_excludes_the_observation_gets_the_floor(law, y, expected):
    model = RandomWalk()
    model.observation = lambda x, design: Independent(law(x, design), 1)
    value = log_likelihood(model, torch.tensor([y]), torch.tensor([[0.0], [3.0], [4.0]]), torch.ones(1))
    assert value.tolist() == pytest.approx(expected)


def test_an_observation_that_every_state_excludes_explains_nothing():
    model = RandomWalk()
    model.observation = lambda x, design: Independent(Uniform(x - 1, x + 1), 1)
    with pytest.raises(ValueError, match="no particle explains y_t at step 1"):
        NestedParticleFilter(model, 20, 10).step([1.0], [1e3])


def test_a_law_in_double_precision_does_not_spread_it():
    model = RandomWalk()
    model.observation = lambda x, design: Independent(Normal(x.double(), 1.0), 1)
    assert NestedParticleFilter(model, 20, 10).step([1.0], [1.0]).state_mean.dtype == torch.float32


@pytest.mark.parametrize("count", [-1.0, 2.5])
def test_a_count_is_a_whole_number(count):
    model = TwoGroupSIR()
    with pytest.raises(ValueError, match=rf"y=\[{count}, 1\.0\]: expected whole numbers >= 0"):
        log_likelihood(model, torch.tensor([count, 1.0]), model.start.float(), torch.zeros(1))


def test_an_observation_outside_another_laws_support_is_refused():
    model = RandomWalk()
    model.observation = lambda x, design: Independent(Gamma(x.exp(), 1.0), 1)
    with pytest.raises(ValueError, match=r"y=\[-1\.0\]: expected values in GreaterThanEq\(lower_bound=0.0\)"):
        log_likelihood(model, torch.tensor([-1.0]), torch.ones(4, 1), torch.zeros(1))


# arguments

FIELDS = [(kind, item.name) for kind in (TwoGroupSIR, MovingSource, LinearGaussianSSM) for item in dataclasses.fields(kind)]
NO_NUMBERS = ["100", ("1", "2"), [[1, 2], [3]], {}, True, None, 1j]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_of_a_model_that_is_no_number_is_named(kind, name):
    for value in NO_NUMBERS:
        with pytest.raises(ValueError, match=rf"^{name}=.*: expected "):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ([0.1, 0.2, 0.3], r"design of shape \(3,\): expected \(2,\), that is angle 1/angle 2"),
        (0.1, r"design of shape \(\): expected \(2,\)"),
        ([[0.1, 0.2]], r"design of shape \(1, 2\): expected \(2,\)"),
        ([0.1, math.nan], r"design=\[0\.1\d*, nan\]: expected finite numbers"),
        ([math.inf, 0.1], r"expected finite numbers"),
        (torch.zeros(2, dtype=torch.float16), r"design is torch\.float16: .* give design\.float\(\)"),
        (torch.zeros(2, dtype=torch.complex64), r"design is torch\.complex64: expected real numbers"),
        (None, r"design=None: expected numbers"),
        ("east", r"design='east': expected numbers"),
    ],
)
def test_a_bad_design_is_refused(design, message):
    with pytest.raises(ValueError, match=message):
        check_design(MovingSource(), design)


@pytest.mark.parametrize(
    ("designs", "message"),
    [
        (torch.zeros(3), r"designs of shape \(3,\): expected \(K, 2\) with K >= 1"),
        (torch.zeros(0, 2), r"designs of shape \(0, 2\)"),
        (torch.zeros(4, 1), r"designs of shape \(4, 1\)"),
        (torch.full((1, 2), math.nan), r"designs=\[\[nan, nan\]\]: expected finite numbers"),
        (torch.zeros(4, 2).bfloat16(), r"designs is torch\.bfloat16"),
    ],
)
def test_bad_designs_are_refused(designs, message):
    with pytest.raises(ValueError, match=message):
        check_designs(MovingSource(), designs)
    with pytest.raises(ValueError, match=message):
        simulate(MovingSource(), torch.ones(2), designs, truth_generator(0))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1.0], r"y of shape \(1,\): expected \(2,\), that is positives 1/positives 2"),
        (3, r"y of shape \(\): expected \(2,\)"),
        ([1.0, math.nan], r"y=\[1\.0, nan\] has NaN; a missing observation is step\(design, None\)"),
        ([1.0, math.inf], r"y=\[1\.0, inf\]: expected finite numbers"),
        (torch.ones(2).half(), r"y is torch\.float16"),
    ],
)
def test_a_bad_observation_is_refused(y, message):
    with pytest.raises(ValueError, match=message):
        check_observation(TwoGroupSIR(), y)


def test_whole_numbers_and_double_precision_become_single():
    model = TwoGroupSIR()
    assert check_observation(model, [3, 0]).dtype == torch.float32
    assert check_design(model, torch.tensor([0.25], dtype=torch.float64)).dtype == torch.float32
    assert check_design(model, [0.25], torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        ([0.65, 1.3], r"lies outside the prior's support beta1 in \[0\.1, 1\], gamma1 in \[0\.1, 1\]"),
        ([0.65], r"theta of shape \(1,\): expected \(2,\), that is beta1/gamma1"),
        ([0.65, math.nan], r"expected finite numbers"),
    ],
)
def test_a_truth_the_prior_excludes_is_refused(theta, message):
    with pytest.raises(ValueError, match=message):
        check_truth(TwoGroupSIR(), theta)


def test_a_truth_the_prior_allows_is_kept(model):
    assert check_truth(model, model.truth).tolist() == model.truth.tolist()


def test_the_box_of_a_prior_is_its_support():
    low, high = parameter_box(dataclasses.replace(MovingSource(), prior_box=(-1, 2)).prior())
    assert (low.tolist(), high.tolist()) == ([-1, -1], [2, 2])
    low, high = parameter_box(LinearGaussianSSM().prior())
    assert (low.tolist(), high.tolist()) == ([-math.inf], [math.inf])
    low, high = parameter_box(Independent(Gamma(torch.ones(2), 1.0), 1))
    assert (low.tolist(), high.tolist()) == ([0, 0], [math.inf] * 2)

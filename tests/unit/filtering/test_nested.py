import dataclasses
import itertools
import math
import re

import numpy as np
import particles
import pytest
import torch
from filterpy.kalman import KalmanFilter
from particles import distributions as dists
from particles import smc_samplers, state_space_models

from labkit.design.online.eig import eig
from labkit.filtering import Clouds, LinearGaussianSSM, NestedParticleFilter, TwoGroupSIR, weighted_quantiles
from labkit.randomness import sample

CHANCELESS = LinearGaussianSSM(q=0.0, initial_sd=0.0)  # the state is a function of θ: x_t = θ (1 + a + … + a^{t-1})


def filtered(model, designs, ys, *args, **kwargs):
    """A filter after all observations, and its steps."""
    nested = NestedParticleFilter(model, *args, **kwargs)
    return nested, [nested.step(design, y) for design, y in zip(designs, ys, strict=True)]


def kalman(model, designs, ys):
    """Exact posterior mean and standard deviation of θ, of x_T, and log p(y), by filterpy on the state (x, θ)."""
    reference = KalmanFilter(dim_x=2, dim_z=1)
    reference.F, reference.Q, mean, reference.P = (part.numpy() for part in model.augmented())
    reference.x, reference.R = mean[:, None], np.array([[model.r**2]])
    log_evidence = 0.0
    for design, y in zip(designs.numpy(), ys.numpy(), strict=True):
        reference.predict()
        reference.update(y, H=np.array([[design[0], 0.0]]))
        log_evidence += reference.log_likelihood
    (x, theta), (x_sd, theta_sd) = reference.x[:, 0], np.sqrt(np.diag(reference.P))
    return theta, theta_sd, x, x_sd, log_evidence


# against exact answers


def test_without_jitter_the_filter_agrees_with_kalman(run):
    model, ratios, state_ratios, errors = LinearGaussianSSM(), [], [], []
    for seed in range(5):
        designs, _, ys = run(model, 30, seed)
        theta, theta_sd, x, x_sd, log_evidence = kalman(model, designs, ys)
        _, steps = filtered(model, designs, ys, 200, 100, jitter=None, seed=seed)
        last = steps[-1]
        assert abs(float(last.theta_mean) - theta) < 0.8 * theta_sd
        assert abs(float(last.state_mean) - x) < 0.5 * x_sd
        ratios.append(float(last.theta_std) / theta_sd)
        state_ratios.append(float(last.state_std) / x_sd)
        errors.append(last.log_evidence - log_evidence)
    assert 0.8 < np.mean(ratios) < 1.25
    assert 0.9 < np.mean(state_ratios) < 1.1
    assert -0.8 < np.mean(errors) < 0.4


@pytest.mark.parametrize(("resampler", "ess_threshold"), [("systematic", None), ("multinomial", 0.6)])
def test_without_jitter_the_evidence_is_unbiased(run, resampler, ess_threshold):
    model = LinearGaussianSSM()
    designs, _, ys = run(model, 5, seed=1)
    exact = kalman(model, designs, ys)[-1]
    options = {"jitter": None, "resampler": resampler, "ess_threshold": ess_threshold}
    ratios = [math.exp(filtered(model, designs, ys, 20, 20, seed=s, **options)[0].log_evidence - exact) for s in range(400)]
    assert abs(np.mean(ratios) - 1) < 3 * np.std(ratios) / math.sqrt(400)
    assert 0.01 < np.std(ratios) < 2


def test_one_step_is_bayes_rule_on_the_particles(run):
    """Everything that a step reports, from densities written out by hand; q = 0 leaves no chance before the resampling."""
    designs, _, ys = run(CHANCELESS, 3)
    nested, _ = filtered(CHANCELESS, designs[:2], ys[:2], 50, 4, jitter=None)
    theta = nested.theta[:, 0].double().numpy()
    before = nested.log_evidence
    step = nested.step(designs[2], ys[2])
    x = theta * (1 + 0.9 + 0.81)
    density = np.exp(-((ys[2].item() - designs[2].item() * x) ** 2) / (2 * 0.25)) / math.sqrt(2 * math.pi * 0.25)
    weights = density / density.sum()
    assert step.t == nested.t == 3
    assert step.log_evidence_increment == pytest.approx(math.log(density.mean()), abs=1e-5)
    assert step.log_evidence == nested.log_evidence == pytest.approx(before + math.log(density.mean()), abs=1e-5)
    assert step.ess == nested.ess == pytest.approx(1 / (weights**2).sum(), rel=1e-4)
    for mean, std, value in ((step.theta_mean, step.theta_std, theta), (step.state_mean, step.state_std, x)):
        assert float(mean) == pytest.approx((weights * value).sum(), abs=1e-5)
        assert float(std) == pytest.approx(math.sqrt((weights * value**2).sum() - (weights * value).sum() ** 2), abs=1e-4)
    for quantiles, value in ((step.theta_quantiles, theta), (step.state_quantiles, x)):
        order = np.argsort(value)
        cumulated = weights[order].cumsum()
        exact = [value[order][np.searchsorted(cumulated, level)] for level in (0.05, 0.5, 0.95)]
        np.testing.assert_allclose(quantiles[:, 0], exact, atol=1.1 * np.ptp(value) / 1024)


def test_the_inner_average_is_the_parameters_likelihood(run):
    """u_m = log mean_n g: one step from known clouds of several states each."""
    model = LinearGaussianSSM(q=0.0)
    nested = NestedParticleFilter(model, 30, 8, jitter=None)
    theta, x = nested.theta.double().numpy(), nested.x.double().numpy()
    moved = (0.9 * x + theta[:, None])[..., 0]  # (M, N)
    density = np.exp(-((0.7 - moved) ** 2) / 0.5) / math.sqrt(math.pi / 2)
    step = nested.step([1.0], [0.7])
    weights = density.mean(1) / density.mean(1).sum()
    assert step.log_evidence == pytest.approx(math.log(density.mean()), abs=1e-5)
    assert step.ess == pytest.approx(1 / (weights**2).sum(), rel=1e-4)
    assert float(step.theta_mean) == pytest.approx((weights * theta[:, 0]).sum(), abs=1e-5)
    assert float(step.state_mean) == pytest.approx((density * moved).sum() / density.sum(), abs=1e-5)


def test_a_cloud_travels_with_its_parameter(run):
    designs, _, ys = run(CHANCELESS, 6)
    nested, _ = filtered(CHANCELESS, designs, ys, 80, 5, jitter=None)
    assert len(nested.theta.unique()) < 60
    expected = nested.theta[:, None] * sum(0.9**k for k in range(6))
    torch.testing.assert_close(nested.x, expected.expand(80, 5, 1))


@pytest.mark.parametrize("jitter", ["paper", "liu_west"])
def test_states_move_under_the_jittered_parameter(jitter):
    nested = NestedParticleFilter(CHANCELESS, 40, 3, jitter=jitter)
    before = nested.theta.clone()
    nested.step([0.0], [0.1])  # a blind observation: every particle survives, in its place
    assert not torch.isin(nested.theta, before).any()
    torch.testing.assert_close(nested.x, nested.theta[:, None].expand(40, 3, 1))


def test_without_jitter_no_parameter_is_new(run):
    model = TwoGroupSIR()
    designs, _, ys = run(model, 10)
    nested = NestedParticleFilter(model, 50, 20, jitter=None)
    prior = set(map(tuple, nested.theta.tolist()))
    for design, y in zip(designs, ys, strict=True):
        nested.step(design, y)
    assert set(map(tuple, nested.theta.tolist())) < prior


# against a published implementation


def test_the_posterior_agrees_with_smc2(run):
    model = LinearGaussianSSM()
    designs, _, ys = run(model, 12, seed=1)
    gains = designs[:, 0].tolist()

    class Peer(state_space_models.StateSpaceModel):
        def PX0(self):
            return dists.Normal(self.theta, math.hypot(0.9 * 0.2, 0.3))  # its time 0 is our first observation

        def PX(self, t, xp):
            return dists.Normal(0.9 * xp + self.theta, 0.3)

        def PY(self, t, xp, x):
            return dists.Normal(gains[t] * x, 0.5)

    np.random.seed(0)  # noqa: NPY002  particles knows no other
    prior = dists.StructDist({"theta": dists.Normal(0, 0.5)})
    peer = smc_samplers.SMC2(ssm_cls=Peer, prior=prior, data=ys[:, 0].tolist(), init_Nx=60, len_chain=5)
    smc = particles.SMC(fk=peer, N=100)
    smc.run()
    mean = smc.W @ smc.X.theta["theta"]
    std = math.sqrt(smc.W @ (smc.X.theta["theta"] - mean) ** 2)
    last = filtered(model, designs, ys, 1000, 60)[1][-1]
    assert float(last.theta_mean) == pytest.approx(mean, abs=0.25 * std)
    assert float(last.theta_std) == pytest.approx(std, rel=0.2)
    assert last.log_evidence == pytest.approx(smc.logLt, abs=0.5)


# invariants


def test_the_effective_size_lies_between_one_and_all(model, run):
    designs, _, ys = run(model, 15)
    _, steps = filtered(model, designs, ys, 60, 20)
    ess = [step.ess for step in steps]
    assert all(1 <= e <= 60 for e in ess)
    assert min(ess) < 59


def test_equal_likelihoods_give_the_full_effective_size():
    nested = NestedParticleFilter(LinearGaussianSSM(), 70, 10)
    step = nested.step([0.0], [0.4])
    assert step.ess == pytest.approx(70, abs=1e-3)
    assert step.log_evidence == pytest.approx(-(0.4**2) / 0.5 - math.log(math.pi / 2) / 2, abs=1e-5)


def test_one_surviving_parameter_is_an_effective_size_of_one():
    nested = NestedParticleFilter(dataclasses.replace(CHANCELESS, r=1e-4), 30, 2, jitter=None)
    step = nested.step([1.0], nested.theta[7])
    assert step.ess == pytest.approx(1, abs=1e-3)
    assert (nested.theta == step.theta_mean).all()


def test_particles_have_no_order(run):
    designs, _, ys = run(CHANCELESS, 1)
    first, second = (NestedParticleFilter(CHANCELESS, 40, 3, jitter=None) for _ in range(2))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    second.theta, second.x = second.theta[order], second.x[order]
    one, other = first.step(designs[0], ys[0]), second.step(designs[0], ys[0])
    for name in ("theta_mean", "theta_std", "theta_quantiles", "state_mean", "state_std", "state_quantiles"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-5)
    assert one.ess == pytest.approx(other.ess, rel=1e-6)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"resampler": "multinomial", "jitter": "bernoulli"}, {"ess_threshold": 0.9}])
def test_a_seed_determines_a_run_bit_by_bit(model, run, options):
    designs, _, ys = run(model, 6)
    runs = [filtered(model, designs, ys, 30, 10, seed=seed, **options) for seed in (3, 3, 4)]
    (one, steps), (same, again), (other, _) = runs
    assert one.theta.tolist() == same.theta.tolist()
    assert one.x.tolist() == same.x.tolist()
    assert [s.log_evidence for s in steps] == [s.log_evidence for s in again]
    assert one.theta.tolist() != other.theta.tolist()


def test_looking_ahead_does_not_change_the_filter(model, run):
    designs, _, ys = run(model, 4)
    plain, watched = (NestedParticleFilter(model, 30, 10, ess_threshold=0.9) for _ in range(2))
    for design, y in zip(designs, ys, strict=True):
        watched.predict(design)
        watched.snapshot()
        plain.step(design, y)
        watched.step(design, y)
    assert plain.theta.tolist() == watched.theta.tolist()
    assert plain.x.tolist() == watched.x.tolist()


def test_prediction_is_the_step_without_an_observation(model, run):
    designs, _, ys = run(model, 4)
    nested, _ = filtered(model, designs, ys, 30, 10)
    predicted = nested.predict(designs[0])
    assert predicted.shape == nested.x.shape
    nested.step(designs[0], None)
    assert nested.x.tolist() == predicted.tolist()


def test_a_missing_observation_moves_the_states_alone(run):
    model = TwoGroupSIR()
    designs, _, ys = run(model, 20)
    nested, steps = filtered(model, designs, ys, 40, 30)
    theta, x = nested.theta.clone(), nested.x.clone()
    step = nested.step(designs[0], None)
    assert nested.theta.tolist() == theta.tolist()
    assert (nested.x != x).any(-1).float().mean() > 0.9
    assert step.t == 21
    assert step.log_evidence_increment == 0
    assert step.log_evidence == steps[-1].log_evidence
    assert step.ess == pytest.approx(40)
    torch.testing.assert_close(step.theta_mean, theta.mean(0))
    torch.testing.assert_close(step.state_mean, nested.x.mean((0, 1)))


# weights that are carried


def test_without_outer_resampling_the_weights_are_the_whole_likelihood(run):
    designs, _, ys = run(CHANCELESS, 4)
    nested = NestedParticleFilter(CHANCELESS, 25, 2, jitter=None, ess_threshold=1e-9)
    theta = nested.theta.clone()
    increments = [nested.step(design, y).log_evidence_increment for design, y in zip(designs, ys, strict=True)]
    assert nested.theta.tolist() == theta.tolist()
    states = torch.stack([theta * sum(0.9**k for k in range(t + 1)) for t in range(4)]).double()  # (T, M, 1)
    errors = ys[:, None].double() - designs[:, None].double() * states
    log_likelihoods = (-(errors**2) / 0.5 - math.log(math.pi / 2) / 2).sum((0, 2))  # (M,)
    total = float(log_likelihoods.logsumexp(0)) - math.log(25)
    assert sum(increments) == pytest.approx(total, abs=1e-4)
    torch.testing.assert_close(nested.log_weights, log_likelihoods - total, rtol=0, atol=1e-4)
    assert float(nested.log_weights.exp().mean()) == pytest.approx(1)


def test_parameters_are_resampled_below_the_threshold_only(run):
    model = LinearGaussianSSM()
    designs, _, ys = run(model, 25)
    nested = NestedParticleFilter(model, 50, 20, ess_threshold=0.5)
    carried = []
    for design, y in zip(designs, ys, strict=True):
        step = nested.step(design, y)
        carried.append(bool(nested.log_weights.any()))
        assert carried[-1] == (step.ess >= 25)
    assert {True, False} == set(carried)


def test_by_default_no_weights_are_carried(model, run):
    designs, _, ys = run(model, 3)
    nested, _ = filtered(model, designs, ys, 30, 10)
    assert nested.log_weights.tolist() == [0] * 30


def test_carried_weights_survive_a_missing_observation(run):
    designs, _, ys = run(CHANCELESS, 2)
    nested, steps = filtered(CHANCELESS, designs, ys, 25, 2, jitter=None, ess_threshold=1e-9)
    weights = nested.log_weights.clone()
    step = nested.step(designs[0], None)
    assert nested.log_weights.tolist() == weights.tolist()
    torch.testing.assert_close(step.theta_mean, steps[-1].theta_mean)
    assert step.ess == pytest.approx(steps[-1].ess, rel=1e-6)


# the belief that designs are chosen on


def test_a_snapshot_is_the_filters_belief_and_stays(model, run):
    designs, _, ys = run(model, 3)
    nested, _ = filtered(model, designs, ys, 30, 10)
    belief = nested.snapshot()
    assert isinstance(belief, Clouds)
    assert belief.model is model
    assert belief.jitter is nested.jitter
    theta, x = belief.theta.tolist(), belief.x.tolist()
    assert (theta, x) == (nested.theta.tolist(), nested.x.tolist())
    nested.step(designs[0], ys[0])
    assert (belief.theta.tolist(), belief.x.tolist()) == (theta, x)
    with pytest.raises(dataclasses.FrozenInstanceError):
        belief.theta = nested.theta


def test_a_snapshot_of_carried_weights_is_resampled(run):
    designs, _, ys = run(CHANCELESS, 3)
    nested, steps = filtered(CHANCELESS, designs, ys, 400, 2, jitter=None, ess_threshold=1e-9)
    belief = nested.snapshot()
    assert belief.x.shape == (400, 2, 1)
    assert len(belief.theta.unique()) < 300
    torch.testing.assert_close(belief.x, belief.theta[:, None].expand(400, 2, 1) * (1 + 0.9 + 0.81))
    assert float(belief.theta.mean()) == pytest.approx(float(steps[-1].theta_mean), abs=0.1 * float(steps[-1].theta_std))


def test_a_state_that_blew_up_weighs_nothing():
    class Bomb:
        def __getattr__(self, name):
            return getattr(LinearGaussianSSM(), name)

        def transition(self, x, theta, design, generator):
            moved = LinearGaussianSSM().transition(x, theta, design, generator)
            moved[:, 0] = math.nan
            moved[3] = math.inf
            return moved

    nested = NestedParticleFilter(Bomb(), 20, 10, jitter=None)
    step = nested.step([1.0], [0.2])
    assert nested.x.isfinite().all()
    assert nested.theta.isfinite().all()
    for value in (step.state_mean, step.state_std, step.state_quantiles, torch.tensor(step.log_evidence)):
        assert value.isfinite().all()
    assert float(step.state_mean) == pytest.approx(0.1, abs=0.3)


# quantiles


def test_quantiles_are_those_of_the_sorted_weights(generator):
    values = torch.randn((3, 5000), generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [100.0], [1e-4]])
    weights = torch.rand(5000, generator=generator, dtype=torch.float64)
    weights /= weights.sum()
    levels = (0.05, 0.31, 0.5, 0.95)
    found = weighted_quantiles(values, weights, levels)
    assert found.shape == (4, 3)
    for i, (level, j) in itertools.product(range(3), zip(levels, range(4), strict=True)):
        ascending, order = values[i].sort()
        exact = ascending[torch.searchsorted(weights[order].cumsum(0), level)]
        assert abs(float(found[j, i] - exact)) < 1.1 * float(ascending[-1] - ascending[0]) / 1024


def test_quantiles_of_a_constant_are_that_constant():
    quantiles = weighted_quantiles(torch.full((1, 50), 7.0), torch.full((50,), 0.02))
    assert quantiles.tolist() == [[7.0]] * 3


def test_quantiles_are_in_order(model, run):
    designs, _, ys = run(model, 5)
    for step in filtered(model, designs, ys, 60, 20)[1]:
        for quantiles in (step.theta_quantiles, step.state_quantiles):
            assert (quantiles.diff(dim=0) >= 0).all()


# arguments


def test_an_observation_that_nothing_explains_is_refused_and_changes_nothing():
    nested = NestedParticleFilter(TwoGroupSIR(), 20, 10)
    nested.step([0.0], [3, 2])
    theta, x, evidence = nested.theta.tolist(), nested.x.tolist(), nested.log_evidence
    with pytest.raises(ValueError, match=r"no particle explains y_t at step 2; widen the prior or raise num_states \(N\)"):
        nested.step([0.0], [1e30, 2])
    assert (nested.theta.tolist(), nested.x.tolist(), nested.log_evidence, nested.t) == (theta, x, evidence, 1)
    assert nested.step([0.0], [3, 2]).t == 2


@pytest.mark.parametrize(
    ("design", "y", "message"),
    [
        ([0.0, 1.0], [3, 2], r"design of shape \(2,\): expected \(1,\)"),
        ([math.nan], [3, 2], r"design=\[nan\]: expected finite numbers"),
        ([0.0], [3, -2], r"y=\[3\.0, -2\.0\]: expected whole numbers >= 0"),
        ([0.0], [3, 2.5], r"y=\[3\.0, 2\.5\]: expected whole numbers >= 0"),
        ([0.0], [3], r"y of shape \(1,\): expected \(2,\)"),
        ([0.0], [3, math.nan], r"y=\[3\.0, nan\] has NaN; a missing observation is step\(design, None\)"),
        (torch.zeros(1).half(), [3, 2], r"design is torch\.float16"),
        ([0.0], torch.ones(2).bfloat16(), r"y is torch\.bfloat16"),
    ],
)
def test_a_bad_step_is_refused_and_changes_nothing(design, y, message):
    nested = NestedParticleFilter(TwoGroupSIR(), 20, 10)
    theta, x = nested.theta.tolist(), nested.x.tolist()
    with pytest.raises(ValueError, match=message):
        nested.step(design, y)
    assert (nested.theta.tolist(), nested.x.tolist(), nested.t) == (theta, x, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_params": 1}, "num_params=1: expected an int >= 2"),
        ({"num_params": 50.0}, r"num_params=50\.0: expected an int >= 2"),
        ({"num_states": 0}, "num_states=0: expected an int >= 1"),
        ({"jitter": "gauss"}, "jitter='gauss': expected one of paper, bernoulli, liu_west, a kernel, or None"),
        ({"jitter_scale": 0}, r"jitter_scale=0: the constant c of the variance"),
        ({"jitter_scale": "small"}, r"jitter_scale='small': the constant c of the variance"),
        ({"jitter": "liu_west", "jitter_scale": 2.0}, r"jitter_scale=2\.0: the shrinkage of 'liu_west'"),
        ({"resampler": "stratified"}, "resampler='stratified': expected one of multinomial, systematic"),
        ({"ess_threshold": 0}, r"ess_threshold=0: expected a share of M in \(0, 1\], or None"),
        ({"ess_threshold": 30}, "ess_threshold=30"),
        ({"seed": 0.5}, r"seed=0\.5: expected an int >= 0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NestedParticleFilter(TwoGroupSIR(), **options)


@pytest.mark.parametrize("name", ["num_params", "num_states", "jitter", "jitter_scale", "resampler", "ess_threshold", "seed"])
def test_an_option_that_is_text_or_a_list_is_named(name):
    for value in ("3", ["3"], {}):
        with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))}: "):
            NestedParticleFilter(TwoGroupSIR(), **{name: value})


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="model: str lacks param_names, state_names"):
        NestedParticleFilter("sir")


def test_a_model_without_a_jitter_scale_asks_for_one():
    class Bare:
        def __getattr__(self, name):
            if name == "jitter_scale":
                raise AttributeError(name)
            return getattr(LinearGaussianSSM(), name)

    with pytest.raises(ValueError, match="jitter_scale: Bare brings none, so give one, in squared units of θ"):
        NestedParticleFilter(Bare(), 20, 10)
    assert NestedParticleFilter(Bare(), 20, 10, jitter_scale=0.1).jitter is not None
    assert NestedParticleFilter(Bare(), 20, 10, jitter="liu_west").jitter is not None


def test_a_kernel_of_ones_own_is_used():
    nested = NestedParticleFilter(CHANCELESS, 20, 3, jitter=lambda theta, generator: theta + 1)
    before = nested.theta.clone()
    nested.step([0.0], [0.1])
    assert nested.theta.tolist() == (before + 1).tolist()


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (lambda theta, generator: theta[:3], r"torch\.float32 parameters of shape \(3, 1\)"),
        (lambda theta, generator: theta.double(), r"torch\.float64 parameters of shape \(20, 1\)"),
    ],
)
def test_a_kernel_keeps_shape_and_precision(kernel, given):
    nested = NestedParticleFilter(CHANCELESS, 20, 4, jitter=kernel)
    message = rf"jitter: the kernel gave {given}; expected torch\.float32 and \(20, 1\)"
    with pytest.raises(ValueError, match=message):
        nested.step([0.0], [0.1])
    with pytest.raises(ValueError, match=message):
        eig(nested, torch.ones(1, 1), num_obs=10)


def test_a_prediction_of_carried_weights_is_that_of_the_snapshot(run):
    model = LinearGaussianSSM(q=0.0, initial_sd=0.0)
    designs, _, ys = run(model, 3)
    nested, _ = filtered(model, designs, ys, 400, 2, jitter=None, ess_threshold=1e-9)
    assert nested.log_weights.std() > 0.5
    now = nested.snapshot()
    torch.testing.assert_close(nested.predict(), model.a * now.x + now.theta[:, None])


def test_the_first_clouds_are_the_prior():
    model = TwoGroupSIR()
    nested = NestedParticleFilter(model, 4000, 1)
    uniform = sample(model.prior(), torch.Generator().manual_seed(1), (4000,))
    for moment in (torch.mean, torch.var):
        torch.testing.assert_close(moment(nested.theta), moment(uniform), rtol=0.05, atol=0)
    assert nested.x.unique(dim=1).shape == (4000, 1, 4)
    assert nested.log_weights.tolist() == [0] * 4000
    assert (nested.t, nested.ess, nested.log_evidence) == (0, 4000, 0)

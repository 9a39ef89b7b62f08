from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.distributions import Gamma, Independent, Normal, StudentT

from labkit.design.online.loop import OnlineTrace, online_steps, run_online
from labkit.design.online.policies import FixedPolicy, GridPolicy, RandomPolicy
from labkit.filtering import LinearGaussianSSM, MovingSource, NestedParticleFilter, TwoGroupSIR

SIZES = {"num_params": 24, "num_states": 10}


class Untold:
    """An epidemic without a truth."""

    def __getattr__(self, name):
        if name == "truth":
            raise AttributeError(name)
        return getattr(TwoGroupSIR(), name)


@pytest.fixture(scope="module")
def sir():
    return TwoGroupSIR.two_parameter()


@pytest.fixture(scope="module")
def trace(sir):
    return run_online(sir, RandomPolicy(), steps=6, seed=1, curve=5, **SIZES)


def test_a_trace_holds_what_its_docstring_says(trace):
    shapes = {
        "theta": (2,),
        "designs": (6, 1),
        "observations": (6, 2),
        "states": (7, 4),
        "theta_cloud": (7, 24, 2),
        "position_cloud": (7, 150, 4),
        "theta_mean": (6, 2),
        "theta_std": (6, 2),
        "theta_quantiles": (6, 3, 2),
        "state_mean": (6, 4),
        "state_quantiles": (6, 3, 4),
        "predicted": (6, 3, 2),
        "ess": (6,),
        "log_evidence": (6,),
        "eig": (6,),
        "eig_jackknife": (6,),
        "curve_designs": (5, 1),
        "curve": (6, 5),
        "seconds": (6,),
    }
    assert {name: getattr(trace, name).shape for name in shapes} == shapes
    assert {item.name for item in fields(trace)} == {*shapes, "policy", "seed", "num_nonfinite"}
    assert (trace.policy, trace.seed, trace.num_nonfinite, len(trace)) == ("random", 1, 0, 6)
    assert all(np.isfinite(getattr(trace, name)).all() for name in shapes)
    assert ((trace.ess >= 1) & (trace.ess <= 24)).all()
    for quantiles in (trace.theta_quantiles, trace.state_quantiles, trace.predicted):
        assert (np.diff(quantiles, axis=1) >= 0).all()


def test_row_zero_is_the_prior_and_the_known_start(trace, sir):
    assert ((trace.theta_cloud[0] > 0.1) & (trace.theta_cloud[0] < 1)).all()
    np.testing.assert_array_equal(trace.states[0], sir.start)
    np.testing.assert_array_equal(trace.position_cloud[0], np.broadcast_to(sir.start, (150, 4)))
    assert (np.diff(trace.states, axis=0) != 0).any(axis=1).all()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(trace, sir):
    again = run_online(sir, RandomPolicy(), steps=6, seed=1, curve=5, **SIZES)
    for item in fields(trace):
        if item.name != "seconds":
            np.testing.assert_array_equal(getattr(trace, item.name), getattr(again, item.name))
    other = run_online(sir, RandomPolicy(), steps=6, seed=2, **SIZES)
    assert (other.states[1:] != trace.states[1:]).any()
    assert (other.designs != trace.designs).any()


def test_looking_at_a_curve_changes_nothing_else(trace, sir):
    without = run_online(sir, RandomPolicy(), steps=6, seed=1, **SIZES)
    assert without.curve.shape == (6, 0)
    for name in ("designs", "observations", "theta_mean", "eig_jackknife", "predicted"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(without, name))


def test_policies_meet_the_same_epidemic_at_the_same_seed(trace, sir):
    fixed = run_online(sir, FixedPolicy(torch.zeros(1)), steps=6, seed=1, **SIZES)
    np.testing.assert_array_equal(fixed.states, trace.states)
    assert (fixed.designs != trace.designs).all()


def test_the_steps_are_the_beginnings_of_the_whole_run(trace, sir):
    for length, part in enumerate(online_steps(sir, RandomPolicy(), steps=6, seed=1, curve=5, **SIZES), start=1):
        assert len(part) == length
        np.testing.assert_array_equal(part.log_evidence, trace.log_evidence[:length])
        np.testing.assert_array_equal(part.theta_cloud, trace.theta_cloud[: length + 1])


def test_the_belief_is_the_nested_filter_on_the_same_data(trace, sir):
    belief = NestedParticleFilter(sir, 24, 10, seed=1)
    steps = [
        belief.step(torch.as_tensor(d), torch.as_tensor(y)) for d, y in zip(trace.designs, trace.observations, strict=True)
    ]
    assert trace.log_evidence == pytest.approx([step.log_evidence for step in steps])
    np.testing.assert_array_equal(trace.theta_mean[-1], steps[-1].theta_mean)
    np.testing.assert_array_equal(trace.state_quantiles[-1], steps[-1].state_quantiles)


def test_options_reach_the_filter(sir):
    frozen = run_online(sir, RandomPolicy(), steps=3, seed=1, filter_kwargs={"jitter": None}, **SIZES)
    start = set(map(tuple, frozen.theta_cloud[0]))
    assert set(map(tuple, frozen.theta_cloud[-1])) <= start


def test_the_gain_is_judged_by_a_fresh_key(sir):
    """A policy that reuses the run's keys could pick designs by their noise; the policy's stream is another one."""
    seen = []

    def spy(belief, state, remaining, generator):
        seen.append((remaining, generator.initial_seed()))
        return torch.zeros(1)

    run_online(sir, spy, steps=3, seed=1, **SIZES)
    assert [remaining for remaining, _ in seen] == [3, 2, 1]
    one, two = (run_online(sir, policy, steps=3, seed=1, **SIZES) for policy in (_Thirsty(0), _Thirsty(7)))
    np.testing.assert_array_equal(one.eig, two.eig)


class _Thirsty:
    """Half of the tests for each group, after drawing some numbers."""

    def __init__(self, draws):
        self.draws = draws

    def __call__(self, belief, state, remaining, generator):
        torch.rand(self.draws, generator=generator)
        return torch.zeros(1)


def test_predictions_cover_the_observations():
    """Over 60 Gaussian observations the 90 % interval should hold 54 ± 2.3 of them."""
    source = MovingSource("low_noise")
    trace = run_online(source, FixedPolicy(torch.tensor([2.4, -0.8])), steps=30, seed=3, num_params=100, num_states=40)
    inside = (trace.observations > trace.predicted[:, 0]) & (trace.observations < trace.predicted[:, 2])
    assert 46 <= inside.sum() <= 60


def test_a_true_parameter_can_come_from_the_prior(sir):
    truths = [run_online(sir, RandomPolicy(), theta="prior", steps=1, seed=seed, **SIZES).theta for seed in range(8)]
    assert np.ptp(truths, axis=0).min() > 0.2
    given = run_online(sir, RandomPolicy(), theta=torch.tensor([0.3, 0.4]), steps=1, seed=0, **SIZES)
    assert given.theta == pytest.approx([0.3, 0.4])
    assert run_online(sir, RandomPolicy(), steps=1, seed=0, **SIZES).theta == pytest.approx([0.65, 0.15])


def test_a_trace_survives_its_file(trace, tmp_path):
    path = tmp_path / "trace.npz"
    trace.save(path)
    loaded = OnlineTrace.load(path)
    for item in fields(trace):
        value, kept = getattr(trace, item.name), getattr(loaded, item.name)
        if isinstance(value, np.ndarray):
            assert kept.shape == value.shape
            np.testing.assert_allclose(kept, value, rtol=1e-3 if item.name.endswith("_cloud") else 1e-6)
        else:
            assert kept == value
    again = tmp_path / "again.npz"
    trace.save(again)
    assert path.read_bytes() == again.read_bytes()


def test_particles_beyond_half_precision_are_kept_in_single(trace, tmp_path):
    many = replace(trace, position_cloud=1e5 + trace.position_cloud)
    many.save(tmp_path / "many.npz")
    np.testing.assert_allclose(OnlineTrace.load(tmp_path / "many.npz").position_cloud, many.position_cloud, rtol=1e-6)


def test_a_trace_is_saved_under_the_name_it_is_given(trace, tmp_path):
    trace.save(tmp_path / "plain")
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]
    assert len(OnlineTrace.load(tmp_path / "plain")) == len(trace)


def test_predictions_heed_weights_that_are_carried():
    """Without noise in the states the prediction's median is that of the weighted parameters."""
    model, options = LinearGaussianSSM(q=0.0, initial_sd=0.0, r=0.05), {"jitter": None, "ess_threshold": 1e-9}
    size = dict(theta=torch.tensor([0.6]), steps=5, seed=0, num_params=2000, num_states=2, filter_kwargs=options)
    trace = run_online(model, FixedPolicy(torch.ones(1)), **size)
    grown = 1 + model.a + model.a**2 + model.a**3 + model.a**4  # x_5 = θ (1 + a + … + a⁴)
    assert trace.predicted[4, 1, 0] == pytest.approx(grown * trace.theta_quantiles[3, 1, 0], abs=0.1)


@pytest.mark.parametrize("law", [lambda mean: StudentT(3.0, mean, 0.5), lambda mean: Gamma(mean.exp(), 1.0)])
def test_observations_without_an_exact_sum_are_sampled(law):
    class Unusual(LinearGaussianSSM):
        natural = statistic = property()

        def observation(self, x, design):
            return Independent(law(x * design), 1)

    trace = run_online(Unusual(), GridPolicy(3), theta=torch.zeros(1), steps=2, seed=0, num_params=12, num_states=6)
    assert np.isfinite(trace.eig).all()
    assert trace.num_nonfinite == 0


def test_a_design_that_must_be_positive_is_never_zero():
    class Scale(LinearGaussianSSM):
        natural = statistic = property()

        def observation(self, x, design):
            return Independent(Normal(x, design), 1)

        def sample_designs(self, n, generator):
            return 0.1 + torch.rand(n, 1, generator=generator)

    assert len(run_online(Scale(), RandomPolicy(), theta=torch.zeros(1), steps=2, seed=0, **SIZES)) == 2


def test_a_file_that_is_no_trace_is_named(trace, tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, designs=trace.designs)
    with pytest.raises(ValueError, match=r"other\.npz.* is not a stored trace: .*theta.* missing"):
        OnlineTrace.load(path)
    path.write_text("no archive")
    with pytest.raises(ValueError, match=r"other\.npz.* is not a stored trace"):
        OnlineTrace.load(path)


def test_a_trace_tells_its_gain(trace):
    doubled = replace(trace, eig_jackknife=np.array([0.5, 0.25]))
    assert repr(doubled) == "OnlineTrace(policy='random', seed=1, T=6, tEIG=0.75 nats)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"theta": "posterior"}, "theta='posterior'"),
        ({"theta": torch.tensor([2.0, 0.5])}, "outside the prior"),
        ({"theta": torch.zeros(3)}, "theta of shape"),
        ({"curve": 1}, "curve=1: expected an int >= 2"),
        ({"curve": "all"}, "curve='all': expected an int >= 2"),
        ({"num_params": 1}, "num_params=1"),
        ({"num_states": 7}, "num_states=7: the jackknife halves every cloud, expected an even number"),
        ({"policy": "random"}, r"policy='random': expected a policy, such as RandomPolicy\(\)"),
        ({"policy": RandomPolicy}, r"policy=<class .*RandomPolicy'>: expected a policy"),
        ({"model": TwoGroupSIR}, "model: TwoGroupSIR is a class"),
        ({"model": Untold()}, "theta=None: Untold has no `truth`; give a tensor, or 'prior' to draw it"),
    ],
)
def test_bad_arguments_are_named(sir, arguments, message):
    options = {"model": sir, "policy": RandomPolicy(), "steps": 1, "seed": 0} | SIZES | arguments
    with pytest.raises(ValueError, match=message):
        run_online(**options)


def test_a_policy_that_names_no_design_is_refused():
    with pytest.raises(ValueError, match="design of shape"):
        run_online(LinearGaussianSSM(), FixedPolicy(torch.zeros(3)), theta=torch.zeros(1), steps=1, seed=0, **SIZES)
    with pytest.raises(ValueError, match="finite"):
        run_online(LinearGaussianSSM(), FixedPolicy(torch.tensor([torch.nan])), steps=1, seed=0, **SIZES)

import math

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.design.online.loop import run_online
from labkit.design.online.metrics import (
    bearing,
    importance_posterior,
    information,
    mean_stderr,
    paired,
    reference_noise,
)
from labkit.design.online.policies import AimPolicy, FixedPolicy, RandomPolicy
from labkit.filtering import LinearGaussianSSM, MovingSource, TwoGroupSIR, grid_posterior, simulate, truth_generator

SIZES = {"num_params": 30, "num_states": 10}
QUICK = {"grid": 9, "grid_states": 60, "truth_states": 300}


def kalman(model, theta_mean, theta_var, designs, ys):
    """Exact log-evidence and posterior of θ: (x, θ) as one Gaussian state of mean (2,) and covariance (2, 2)."""
    mean, cov = np.array([0.0, theta_mean]), np.diag([model.initial_sd**2, theta_var])
    move, total = np.array([[model.a, 1.0], [0.0, 1.0]]), 0.0
    for design, y in zip(np.asarray(designs, float)[:, 0], np.asarray(ys, float)[:, 0], strict=True):
        mean, cov = move @ mean, move @ cov @ move.T + np.diag([model.q**2, 0.0])
        look = np.array([design, 0.0])
        spread, surprise = look @ cov @ look + model.r**2, y - look @ mean
        total -= 0.5 * (math.log(2 * math.pi * spread) + surprise**2 / spread)
        gain = cov @ look / spread
        mean, cov = mean + gain * surprise, cov - np.outer(gain, look @ cov)
    return total, mean[1], cov[1, 1]


def test_information_on_a_linear_gaussian_run_is_the_kalman_filters():
    model, s2 = LinearGaussianSSM(), 0.25
    trace = run_online(model, FixedPolicy(torch.ones(1)), theta=torch.tensor([0.6]), steps=20, seed=0, **SIZES)
    found = information(trace, model, grid=[torch.linspace(-1.5, 1.5, 61)], grid_states=2000)
    marginal, mean, var = kalman(model, 0.0, s2, trace.designs, trace.observations)
    known, _, _ = kalman(model, 0.6, 0.0, trace.designs, trace.observations)
    # on a grid of spacing h the prior is a list of weights h p(θ), and KL between the two lists is that of the densities
    kl = 0.5 * (var / s2 + mean**2 / s2 - 1 - math.log(var / s2))
    assert found["kl"] == pytest.approx(kl, abs=0.1)
    assert found["gain"] == pytest.approx(known - marginal, abs=0.15)
    assert found["reference_rmse"] == pytest.approx(abs(mean - 0.6), abs=0.02)


def test_mean_divergence_and_mean_realised_gain_are_both_the_information():
    """With truths from the prior E KL(posterior || prior) = E log p(y | θ*) / p(y)."""
    model = LinearGaussianSSM()
    gaps = []
    for seed in range(40):
        trace = run_online(model, FixedPolicy(torch.ones(1)), theta="prior", steps=8, seed=seed, num_params=4, num_states=2)
        found = information(trace, model, grid=[torch.linspace(-2, 2, 41)], grid_states=200, truth_states=2000, seed=seed)
        gaps.append(found["kl"] - found["gain"])
    mean, stderr = mean_stderr(gaps)
    assert abs(mean) < 3 * stderr
    assert stderr < 0.2


def test_half_the_noise_of_the_reference_is_the_excess_of_its_divergence():
    model, s2 = LinearGaussianSSM(), 0.25
    trace = run_online(model, FixedPolicy(torch.ones(1)), theta=torch.tensor([0.6]), steps=20, seed=0, **SIZES)
    _, mean, var = kalman(model, 0.0, s2, trace.designs, trace.observations)
    kl = 0.5 * (var / s2 + mean**2 / s2 - 1 - math.log(var / s2))
    options = {"grid": [torch.linspace(-1.5, 1.5, 121)], "grid_states": 60}
    found = pd.DataFrame([reference_noise(trace, model, seed=seed, **options) for seed in range(20)])
    corrected, stderr = mean_stderr(found["corrected"])
    assert found["noise"].mean() > 10 * stderr
    assert found["plain"].mean() - kl > 3 * stderr
    assert abs(corrected - kl) < 3 * stderr
    np.testing.assert_allclose(found["plain"] - found["corrected"], found["noise"] / 2)


def test_sums_and_errors_are_those_of_the_trace():
    model = TwoGroupSIR.two_parameter()
    trace = run_online(model, RandomPolicy(), steps=5, seed=0, **SIZES)
    found = information(trace, model, **QUICK)
    assert found["teig"] == pytest.approx(trace.eig.sum())
    assert found["teig_jackknife"] == pytest.approx(trace.eig_jackknife.sum())
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((trace.theta_mean[-1] - [0.65, 0.15]) ** 2)), rel=1e-5)
    assert found["state_rmse"] == pytest.approx(np.sqrt(np.mean((trace.state_mean - trace.states[1:]) ** 2)), rel=1e-5)
    assert found["ess"] == pytest.approx(trace.ess.mean())
    assert found["num_nonfinite"] == 0
    assert not {"position_l2", "aim_cosine"} & set(found)


def test_importance_draws_agree_with_the_grid():
    model, designs = TwoGroupSIR.two_parameter(), torch.zeros(50, 1)
    _, ys = simulate(model, model.truth, designs, truth_generator(2))
    grid = grid_posterior(model, designs, ys, 15, num_states=400)
    draws = importance_posterior(model, designs, ys, draws=300, num_states=400)
    assert draws.kl_to_prior == pytest.approx(grid.kl_to_prior, abs=0.1)
    assert draws.log_evidence_total == pytest.approx(grid.log_evidence_total, abs=0.15)
    assert ((draws.mean - grid.mean).abs() < 0.2 * grid.std).all()
    assert float(draws.weights.sum()) == pytest.approx(1)
    assert ((draws.theta >= 0.1) & (draws.theta <= 1)).all()
    assert 1 / float(draws.weights.square().sum()) > 0.3 * len(draws.theta)  # most draws count


def test_a_posterior_of_a_few_draws_is_refused():
    model = TwoGroupSIR.four_parameter()
    with pytest.raises(ValueError, match="draws=2: expected an int >= 20"):
        importance_posterior(model, torch.zeros(2, 1), torch.zeros(2, 2), draws=2)


def test_four_parameters_are_measured_by_importance_draws():
    model = TwoGroupSIR.seeded_outbreak()
    trace = run_online(model, RandomPolicy(), steps=5, seed=0, **SIZES)
    found = information(trace, model, truth_states=300, draws=60, grid_states=60)
    expected = importance_posterior(model, *map(torch.as_tensor, (trace.designs, trace.observations)), draws=60, num_states=60)
    assert found["kl"] == expected.kl_to_prior
    assert found["reference_rmse"] == pytest.approx(np.sqrt(np.mean((expected.mean.numpy() - trace.theta) ** 2)))
    assert math.isfinite(found["gain"])


def test_a_source_is_tracked_and_looked_at():
    model = MovingSource("low_noise")
    trace = run_online(model, AimPolicy(), steps=12, seed=0, num_params=60, num_states=20)
    found = information(trace, model, **QUICK)
    distance = np.hypot(*(trace.state_mean - trace.states[1:])[:, :2].T)
    assert found["position_l2"] == pytest.approx(distance.mean(), rel=1e-5)
    assert found["state_rmse"] == pytest.approx(np.sqrt(np.mean(distance**2) / 2), rel=1e-5)
    assert 0.97 < found["aim_cosine"] <= 1
    away = run_online(model, FixedPolicy(torch.zeros(2)), steps=12, seed=0, num_params=60, num_states=20)
    assert information(away, model, **QUICK)["aim_cosine"] < 0.2


def test_bearings_are_angles_from_the_sensor_to_the_source():
    sensors = np.array([[3.0, 0.0], [0.0, 3.0]])
    angles = bearing(np.array([[0.0, 0.0], [3.0, 3.0]]), sensors)
    np.testing.assert_allclose(angles, [[np.pi, -np.pi / 2], [np.pi / 2, 0]], atol=1e-12)


def test_pairs_share_their_seeds():
    rng = np.random.default_rng(0)
    level = rng.normal(5, 3, 30)  # what a seed does to both policies
    a = pd.DataFrame({"policy": "a", "seed": range(30), "kl": level + 1 + rng.normal(0, 0.1, 30)})
    b = pd.DataFrame({"policy": "b", "seed": range(29, -1, -1), "kl": level[::-1]})
    row = paired(pd.concat([a, b[b["seed"] < 25]]), ["kl"], "a", "b")
    gaps = (a["kl"] - level)[:25]
    assert row == {
        "seeds": 25,
        "kl": pytest.approx(gaps.mean()),
        "kl_stderr": pytest.approx(gaps.std() / 5),
    }
    assert row["kl_stderr"] < 0.05 < level.std() / 5
    with pytest.raises(ValueError, match="no seed that both have run"):
        paired(a, ["kl"], "a", "b")


def test_one_value_has_no_standard_error():
    assert mean_stderr([2.0, 4.0]) == (3.0, 1.0)
    mean, stderr = mean_stderr([2.0])
    assert mean == 2
    assert math.isnan(stderr)

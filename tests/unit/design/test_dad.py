import math
from types import SimpleNamespace

import pytest
import torch

from labkit.design.constraints import Budget, StepLimit
from labkit.design.dad import DADNetwork, DADPolicy, contrastive_bound, fit_dad
from labkit.design.models import HyperbolicDiscounting, LinearGaussian, LocationFinding


@pytest.fixture
def location():
    return LocationFinding()


@pytest.fixture
def history(location):
    generator = torch.Generator().manual_seed(0)
    X = location.sample_designs((4, 9), generator)
    return X, location.simulate(location.sample_prior((4, 1), generator), X, generator=generator)


def test_the_order_of_a_history_does_not_matter(location, history):
    X, Y = history
    network = DADNetwork(location, 12)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    permuted = network.representation(X[:, order], Y[:, order])
    torch.testing.assert_close(permuted, network.representation(X, Y), rtol=0, atol=1e-5)
    torch.testing.assert_close(network(X[:, order], Y[:, order]), network(X, Y), rtol=0, atol=1e-5)
    assert (network(X, Y) - network(X[:, :8], Y[:, :8])).abs().max() > 1e-4


def test_designs_lie_in_the_box_from_the_first_on(location, history):
    X, Y = history
    network = DADNetwork(location, 12)
    for t in (0, 1, 9):
        x = network(X[:, :t], Y[:, :t])
        assert x.shape == (4, 2)
        assert ((x >= 0) & (x <= 1)).all()


def test_the_bound_is_the_sum_over_its_run(location):
    """The running sums of a run equal sPCE computed from the finished history, which the network reproduces."""
    network, L, T = DADNetwork(location, 4), 50, 4
    bound = contrastive_bound(network, 6, L, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    theta, contrastive = location.sample_prior((6,), generator), location.sample_prior((L,), generator)
    noise = location.noise((T, 6), generator)
    X = location.sample_designs((6,), generator)[:, None]
    Y = torch.empty(6, 0)
    for t in range(T):
        Y = torch.cat([Y, location.simulate(theta, X[:, -1], noise[t])[:, None]], 1)
        if t + 1 < T:
            X = torch.cat([X, network(X, Y)[:, None]], 1)
    candidates = torch.cat([theta[:, None], contrastive.expand(6, -1, -1)], 1)[:, None]  # (6, 1, L + 1, 2)
    log_like = location.log_prob(Y[..., None], candidates, X[:, :, None]).sum(1)
    expected = log_like[:, 0] - log_like.logsumexp(-1) + math.log(L + 1)
    torch.testing.assert_close(bound, expected, rtol=0, atol=1e-4)
    assert (bound <= math.log(L + 1)).all()


def test_training_finds_the_most_informative_design():
    """y ~ N(x θ, 1) on [0, 3]: the information grows with |x|, so that every design should go to 3."""
    model = LinearGaussian(lambda x: x, torch.eye(1), 1.0, bounds=[[0.0], [3.0]])
    network, trace = fit_dad(model, 3, steps=150, num_rollouts=32, num_contrastive=50, lr=1e-2)
    assert trace.step.tolist() == [100, 150]
    assert trace.loss.iloc[-1] < trace.loss.iloc[0]
    X = torch.linspace(0, 3, 5)[:, None, None]
    assert (network(X, torch.zeros(5, 1)) > 2.8).all()


def test_a_network_trained_within_a_constraint_never_leaves_it():
    model = LocationFinding()
    constraint = Budget(0.5, bounds=model.bounds)
    network, _ = fit_dad(model, 4, constraint, steps=5, num_rollouts=8, num_contrastive=8)
    generator = torch.Generator().manual_seed(0)
    theta, x = model.sample_prior((50,), generator), model.sample_designs((50,), generator)
    state, X, Y = constraint.init(x, 3), x[:, None], model.simulate(theta, x, generator=generator)[:, None]
    policy = DADPolicy(network)
    for t in range(3):
        x = policy(SimpleNamespace(designs=X, outcomes=Y), state, 3 - t)
        assert constraint.is_feasible(state, x).all()
        state = constraint.step(state, x)
        X, Y = torch.cat([X, x[:, None]], 1), torch.cat([Y, model.simulate(theta, x, generator=generator)[:, None]], 1)


def test_a_constrained_network_sees_where_it_stands(location, history):
    X, Y = history
    constraint = StepLimit(0.1, bounds=location.bounds)
    network = DADNetwork(location, 12, constraint)
    order = [*range(1, 9), 0]  # the same set of experiments, another one last
    moves = [network(X[:, o], Y[:, o], constraint.init(X[:, o[-1]], 2)) - X[:, o[-1]] for o in (list(range(9)), order)]
    assert all((move.abs() <= 0.1 + 1e-6).all() for move in moves)
    assert (moves[0] - moves[1]).abs().max() > 1e-4
    with pytest.raises(ValueError, match="state=None: this network was trained within StepLimit"):
        network(X, Y)


def test_the_policy_reads_the_history_alone(location, history):
    X, Y = history
    network = DADNetwork(location, 12)
    x = DADPolicy(network)(SimpleNamespace(designs=X, outcomes=Y), None, 3)
    assert torch.equal(x, network(X, Y).detach())
    assert not x.requires_grad


def test_bad_arguments_are_named(location):
    with pytest.raises(ValueError, match="outcomes of HyperbolicDiscounting are finitely many"):
        fit_dad(HyperbolicDiscounting(), 5)
    with pytest.raises(ValueError, match="horizon=1: expected an int"):
        fit_dad(location, 1)
    with pytest.raises(ValueError, match="horizon=0"):
        DADNetwork(location, 0)
    with pytest.raises(ValueError, match=r"X, Y: got X \(4, 3, 3\)"):
        DADNetwork(location, 5)(torch.zeros(4, 3, 3), torch.zeros(4, 3))

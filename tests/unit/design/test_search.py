import itertools
import math
from dataclasses import replace

import pytest
import torch

from labkit.design import search
from labkit.design.belief import ParticleBelief
from labkit.design.ces import CES
from labkit.design.constraints import Budget, StepLimit, Unconstrained
from labkit.design.models import LocationFinding
from labkit.design.nodes import ParticleNodes
from labkit.design.search import Ball, BallSearch, propose, to_surface
from labkit.design.tree import TreePlanner

MODEL = CES()
BUDGET = Budget(100.0, pacing="half", bounds=MODEL.bounds)
SMALL = BallSearch(candidates=24, rounds=1, keep=3, moves=4, inner_candidates=12, fantasy_particles=60, fantasy_sweeps=1)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def belief():
    """Two rollouts that have seen one outcome."""
    theta = torch.tensor([[0.4, 0.5, 0.3, 0.2, 1.0], [0.8, 0.2, 0.2, 0.6, -0.5]])
    design = torch.tensor([[40.0, 50, 60, 45, 50, 55], [30.0, 30, 30, 35, 25, 30]])
    outcome = MODEL.simulate(theta, design, torch.tensor([0.3, -0.5]))
    return ParticleBelief.prior(MODEL, 2, 250, rng(), sweeps=2).update(design, outcome)


@pytest.fixture(scope="module")
def state(belief):
    return BUDGET.init(belief.designs[:, -1], 9)


@pytest.fixture(scope="module")
def nodes(belief):
    return ParticleNodes.root(belief, 100, "atoms", num_obs=16)


def lengths(designs, state):
    return torch.linalg.vector_norm(designs - state.x[:, None, None], dim=-1)


class TestCandidates:
    def test_all_lie_in_the_ball_and_in_the_box(self, nodes, state):
        ball = Ball.around(state, BUDGET, (0.25, 1.0))
        designs = propose(nodes, ball, 60, rng())
        assert designs.shape == (2, 2, 60, 6)
        assert BUDGET.is_feasible(ball.state, designs).all()
        assert (lengths(designs, state) <= torch.tensor([12.5, 50.0])[None, :, None] * (1 + 1e-5)).all()

    def test_to_stay_is_the_first(self, nodes, state):
        designs = propose(nodes, Ball.around(state, BUDGET, (1.0,)), 6, rng())
        torch.testing.assert_close(designs[:, 0, 0], state.x)

    def test_newton_steps_end_where_the_outcome_is_not_censored(self, nodes, state):
        """u (U(z) − U(z′)) ~ N(0, 3²) of the particle that was aimed at, unless its u is small."""
        ball = Ball.around(state, BUDGET, (1.0,))
        start = ball.centre + 10 * torch.randn((2, 1, 400, 6), generator=rng(1))
        designs = to_surface(nodes, start.clamp(0, 100), rng(2))
        index = torch.randint(100, (2, 400, 1), generator=rng(2))  # the particles that `to_surface` draws
        theta = nodes.theta[:, 0, 0].take_along_dim(index, 1)
        keen = theta[..., -1] > -math.log(5)
        eta = MODEL.mean(theta, designs[:, 0])[keen]
        before = MODEL.mean(theta, start.clamp(0, 100)[:, 0])[keen]
        assert 2 < float(eta.abs().quantile(0.683)) < 4.5
        assert (eta.abs() > MODEL.limit).float().mean() < 0.05 < (before.abs() > MODEL.limit).float().mean()

    def test_other_models_get_random_steps(self):
        model = LocationFinding()
        step = StepLimit(0.2, "l2", bounds=model.bounds)
        start = step.init(torch.tensor([[0.5, 0.5]]), 4)
        nodes = ParticleNodes.root(ParticleBelief.prior(model, 1, 50, rng()), 50, "quadrature")
        designs = propose(nodes, Ball.around(start, step, (1.0,)), 300, rng())
        assert step.is_feasible(start.map(lambda x: x[:, None, None]), designs).all()
        assert lengths(designs, start).max() > 0.19

    def test_unbounded_reach(self):
        free = Unconstrained([[-math.inf], [math.inf]])
        with pytest.raises(ValueError, match="finite reach"):
            Ball.around(free.init(torch.zeros(1, 1), 2), free, (1.0,))


class TestSearch:
    def test_gain_is_that_of_the_design_and_the_best_of_what_was_seen(self, nodes, state):
        designs, gains = BallSearch(candidates=40).best(nodes, state, BUDGET, rng())
        torch.testing.assert_close(nodes.gain(designs[:, None])[:, 0], gains, rtol=1e-4, atol=1e-4)
        ball = Ball.around(state, BUDGET, (1.0,))
        assert (gains[:, 0] >= nodes.gain(propose(nodes, ball, 40, rng())).amax((1, 2)) - 1e-5).all()

    def test_more_rounds_never_lower_the_gain(self, nodes, state):
        gains = [BallSearch(candidates=20, rounds=rounds).best(nodes, state, BUDGET, rng())[1] for rounds in range(4)]
        assert all((b >= a - 1e-5).all() for a, b in itertools.pairwise(gains))
        assert (gains[-1] > gains[0] + 0.02).all()

    def test_shares_confine_the_roots(self, nodes, state):
        designs, _ = SMALL.best(nodes, state, BUDGET, rng(), shares=(0.25, 0.5, 1.0))
        assert (lengths(designs[:, :, None], state)[..., 0] <= torch.tensor([12.5, 25.0, 50.0]) * (1 + 1e-5)).all()

    def test_finds_the_optimum_of_a_plane(self):
        """Against a grid, on location finding."""
        model = LocationFinding()
        step = StepLimit(0.2, "l2", bounds=model.bounds)
        start = step.init(torch.tensor([[0.5, 0.5]]), 4)
        nodes = ParticleNodes.root(ParticleBelief.prior(model, 1, 80, rng()), 80, "quadrature")
        axis = torch.linspace(0.3, 0.7, 61)
        grid = torch.cartesian_prod(axis, axis)
        grid = grid[torch.linalg.vector_norm(grid - 0.5, dim=-1) <= 0.2]
        best = nodes.gain(grid[None, None]).max()
        _, gain = BallSearch(candidates=100, rounds=3).best(nodes, start, step, rng())
        assert float(gain) >= float(best) - 5e-3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"candidates": 0}, "candidates=0"),
            ({"rounds": -1}, "rounds=-1"),
            ({"fantasy_particles": 1}, "fantasy_particles=1"),
            ({"shares": (0.5, 1.5)}, "shares="),
            ({"shares": ()}, "shares="),
        ],
    )
    def test_settings_out_of_range(self, options, message):
        with pytest.raises(ValueError, match=message):
            BallSearch(**options)


class TestNestedTree:
    def plan(self, belief, state, remaining=9, **options):
        settings = {"num_particles": 50, "num_obs": 12, "search": SMALL} | options
        return TreePlanner(MODEL, BUDGET, **settings).plan(belief, state, remaining)

    def test_ces_takes_the_search_by_default(self):
        planner = TreePlanner(MODEL, BUDGET)
        assert (planner.optimizer, planner.estimator, planner.leaf_value) == ("nested", "atoms", 0.02)

    def test_depth_two(self, belief, state):
        plan = self.plan(belief, state)
        shown = plan.tree
        assert shown.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
        assert BUDGET.is_feasible(state, plan.design).all()
        cost = torch.linalg.vector_norm(shown.design[:, 1:] - shown.design[:, shown.parents[1:]], dim=-1)
        torch.testing.assert_close(shown.budget[:, 1:], shown.budget[:, shown.parents[1:]] - cost, rtol=0, atol=1e-3)
        assert (shown.budget >= 0).all()
        leaves = shown.budget[:, 3:].mean(1)
        total = shown.eig[:, 0] + shown.eig[:, 1:3].mean(1) + shown.eig[:, 3:].mean(1) + 0.02 * leaves
        torch.testing.assert_close(plan.value, total, rtol=1e-4, atol=1e-4)

    def test_fantasised_beliefs_are_rejuvenated(self, belief, state):
        """Each child has distinct particles that fit its outcome better than the parent's."""
        shown = self.plan(belief, state, depth=1, search=replace(SMALL, fantasy_sweeps=3)).tree
        parent, child = shown.theta[:, :1], shown.theta[:, 1:]
        fit = [
            MODEL.log_prob(shown.outcome[:, 1:, None], theta, shown.design[:, :1, None]).clamp(min=-50).mean(-1)
            for theta in (parent, child)
        ]
        assert (fit[1] > fit[0] + 1).all()
        distinct = [len(cloud.unique(dim=0)) for cloud in child.flatten(0, 1)]
        assert min(distinct) > 10, distinct

    def test_the_last_experiment_has_no_leaf_value(self, belief, state):
        plan = self.plan(belief, state.map(lambda x: x), remaining=1)
        assert len(plan.tree.parents) == 1

    def test_equal_seeds_give_equal_designs_and_blocks_do_not_leak(self, belief, state, monkeypatch):
        first, second = (self.plan(belief, state, depth=1) for _ in range(2))
        assert torch.equal(first.design, second.design)
        monkeypatch.setattr(search, "_ROWS", 1)
        assert BUDGET.is_feasible(state, self.plan(belief, state, depth=1).design).all()

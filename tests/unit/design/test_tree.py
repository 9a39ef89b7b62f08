import itertools
import math
import warnings

import pytest
import torch

from labkit.design import tree
from labkit.design.belief import ParticleBelief
from labkit.design.ces import CES
from labkit.design.checker import violations
from labkit.design.constraints import Budget, InfeasibleError, Intersection, Monotone, State, StepLimit, Unconstrained
from labkit.design.information import eig, node_eig
from labkit.design.models import DesignModel, HyperbolicDiscounting, LinearGaussian, LocationFinding, Pharmacokinetics
from labkit.design.nodes import GaussianNodes, ParticleNodes
from labkit.design.posterior import AmortizedPosterior
from labkit.design.tree import (
    BaseNoise,
    TreePlanner,
    ascend,
    level_sizes,
    paced,
    tree_value,
    tree_value_recursive,
    unroll,
)
from tests.unit.design.histories import seeded


def prior(model, rollouts=2, particles=200, seed=0):
    return ParticleBelief.prior(model, rollouts, particles, seeded(seed))


def start_at(constraint, x, rollouts=2, steps=5):
    return constraint.init(torch.tensor(x).expand(rollouts, -1), steps)


def draw_moves(branching, shape, seed=0, dtype=torch.float32):
    """Random moves of R × S trees with designs in R^d: shape (R, S, d)."""
    decisions, starts, d = shape
    generator = seeded(seed)
    return [torch.randn(decisions, starts, n, d, generator=generator, dtype=dtype) for n in level_sizes(branching)]


LOCATION = LocationFinding()
STEP = StepLimit(0.2, bounds=LOCATION.bounds)
CURVE = LinearGaussian(  # one design (d = 1), two parameters
    lambda x: torch.cat([torch.sin(3 * x), torch.cos(2 * x)], -1),
    torch.tensor([[1.0, 0.3], [0.3, 0.5]]),
    0.5,
    bounds=[[0.0], [2.0]],
)


@pytest.fixture(scope="module")
def problem():
    """R = 2 decisions on location finding, S = 3 random trees each, H = 2, m = (3, 2)."""
    branching = (3, 2)
    root = ParticleNodes.root(prior(LOCATION), 60, "quadrature")
    noise = BaseNoise.draw(LOCATION, 2, branching, seeded(1))
    return root, start_at(STEP, [0.3, 0.6]), draw_moves(branching, (2, 3, 2)), noise


def doubled(root, state, moves, noise):
    """The same problem in float64."""
    root = ParticleNodes(root.model, root.theta.double(), root.log_weights.double())
    noise = BaseNoise(tuple(u.double() for u in noise.uniform), tuple(e.double() for e in noise.noise))
    return root, state.map(torch.Tensor.double), [move.double() for move in moves], noise


class TestValue:
    def test_batched_value_is_the_explicit_recursion_over_nodes(self, problem):
        for discount in (1.0, 0.6):
            batched = tree_value(*problem, STEP, discount=discount)
            recursive = tree_value_recursive(*problem, STEP, discount=discount)
            torch.testing.assert_close(batched, recursive, rtol=1e-5, atol=0)

    def test_recursion_of_other_beliefs(self):
        belief = prior(CURVE)
        noise = BaseNoise.draw(CURVE, 2, (2, 2), seeded())
        step = StepLimit(0.3, bounds=CURVE.bounds)
        problem = (GaussianNodes.root(belief), start_at(step, [1.0]), draw_moves((2, 2), (2, 2, 1)), noise, step)
        torch.testing.assert_close(tree_value(*problem), tree_value_recursive(*problem), rtol=1e-5, atol=1e-6)

    def test_value_is_the_discounted_mean_gain_of_each_level(self, problem):
        levels = unroll(*problem, STEP)
        gains = [level.nodes.gain(level.design) for level in levels]
        expected = gains[0][..., 0] + 0.6 * gains[1].mean(-1) + 0.36 * gains[2].mean(-1)
        torch.testing.assert_close(tree_value(*problem, STEP, discount=0.6), expected)

    def test_permuting_branches_leaves_the_value_unchanged(self, problem):
        root, state, moves, noise = problem
        order = torch.tensor([2, 0, 1])
        leaves = (2 * order[:, None] + torch.arange(2)).flatten()
        permuted = BaseNoise(
            (noise.uniform[0][..., order], noise.uniform[1][:, :, order]),
            (noise.noise[0][..., order], noise.noise[1][:, :, order]),
        )
        moved = [moves[0], moves[1][:, :, order], moves[2][:, :, leaves]]
        torch.testing.assert_close(
            tree_value(root, state, moved, permuted, STEP), tree_value(root, state, moves, noise, STEP), rtol=1e-5, atol=0
        )

    def test_gradient_is_that_of_central_differences(self, problem):
        root, state, moves, noise = doubled(*problem)
        moves = [move.clone().requires_grad_() for move in moves]
        grads = torch.autograd.grad(tree_value(root, state, moves, noise, STEP).sum(), moves)
        generator, h = seeded(3), 1e-5
        for depth, grad in enumerate(grads):
            direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)

            def value(step, depth=depth, direction=direction):
                moved = [move.detach() + (step * direction if d == depth else 0) for d, move in enumerate(moves)]
                return tree_value(root, state, moved, noise, STEP).sum()

            slope = (value(h) - value(-h)) / (2 * h)
            assert float((grad * direction).sum()) == pytest.approx(float(slope), rel=1e-4)

    def test_a_decision_does_not_depend_on_the_others_in_the_batch(self, problem):
        root, state, moves, noise = problem
        both = ascend(lambda moves: tree_value(root, state, moves, noise, STEP), moves, iterations=4)
        row, start = slice(1, 2), slice(2, 3)
        alone = ascend(
            lambda moves: tree_value(root.part(row), state.map(lambda x: x[row]), moves, noise.part(row), STEP),
            [move[row, start] for move in moves],
            iterations=4,
        )
        torch.testing.assert_close(alone[0], both[0][row, start], rtol=1e-5, atol=1e-5)

    def test_branches_cover_the_outcomes_evenly(self, problem):
        """Without noise, one of four outcomes lies in each quarter of the expected ones."""
        root, state = problem[:2]
        noise = BaseNoise.draw(LOCATION, 2, (4,), seeded(2))
        silent = BaseNoise(noise.uniform, (torch.zeros_like(noise.noise[0]),))
        levels = unroll(root, state, draw_moves((4,), (2, 3, 2)), silent, STEP)
        expected = LOCATION.mean(root.theta, levels[0].design[..., None, :])[:, :, 0]  # (R, S, N)
        rank = (expected[..., None, :] < levels[1].outcome[..., None]).float().mean(-1)
        assert torch.equal((4 * rank + 1e-4).floor().sort(-1).values, torch.arange(4.0).expand(2, 3, 4))

    def test_leaf_value_counts_the_budget_left_while_experiments_remain(self, problem):
        root, _, moves, noise = problem
        budget = Budget(2.0, bounds=LOCATION.bounds)
        for steps, counted in ((5, 1.0), (3, 0.0)):
            state = start_at(budget, [0.3, 0.6], steps=steps)
            plain = tree_value(root, state, moves, noise, budget)
            left = unroll(root, state, moves, noise, budget)[-1].after.budget.mean(-1)
            with_leaf = tree_value(root, state, moves, noise, budget, discount=1.0, leaf_value=0.5)
            torch.testing.assert_close(with_leaf, plain + counted * 0.5 * left)

    def test_outcomes_after_finitely_many_kinds_of_answer(self):
        model = HyperbolicDiscounting()
        root = ParticleNodes.root(prior(model), 100, "enumerate")
        free = Unconstrained(model.bounds)
        noise = BaseNoise.draw(model, 2, (4,), seeded())
        levels = unroll(root, start_at(free, [50.0, 100.0]), draw_moves((4,), (2, 1, 2)), noise, free)
        assert set(levels[1].outcome.unique().tolist()) <= {0.0, 1.0}
        gains = levels[1].nodes.gain(levels[1].design)
        assert ((gains >= 0) & (gains <= math.log(2))).all()


class TestFeasibility:
    CONSTRAINTS = (
        STEP,
        StepLimit(0.15, "l2", bounds=LOCATION.bounds),
        Budget(0.5, bounds=LOCATION.bounds),
        Budget(0.5, "l1", "half", bounds=LOCATION.bounds),
        Monotone(0.1, bounds=LOCATION.bounds),
        Intersection(STEP, Budget(0.4, pacing="even", bounds=LOCATION.bounds)),
    )

    @pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
    def test_random_moves_give_feasible_trees(self, constraint):
        start = torch.tensor([0.2, 0.1])
        trees = 1500  # of 7 nodes: more than 10⁴ designs
        moves = [4 * move for move in draw_moves((2, 2), (1, trees, 2))]
        root = ParticleNodes.root(prior(LOCATION, 1), 4, "quadrature")
        levels = unroll(
            root, start_at(constraint, start.tolist(), 1), moves, BaseNoise.draw(LOCATION, 1, (2, 2), seeded()), constraint
        )
        for leaf in range(4):
            path = torch.stack([level.design[0, :, leaf // 2 ** (2 - depth)] for depth, level in enumerate(levels)], -2)
            assert violations(constraint, start.expand(trees, 2), path).max() <= 1e-6

    def test_budget_after_each_node_is_what_was_left_less_the_cost(self):
        budget = Budget(0.5, bounds=LOCATION.bounds)
        plan = TreePlanner(LOCATION, budget, iterations=2).plan(prior(LOCATION), start_at(budget, [0.5, 0.5]), 5)
        x = torch.cat([torch.full((2, 1, 2), 0.5), plan.tree.design], 1)
        b = torch.cat([torch.full((2, 1), 0.5), plan.tree.budget], 1)
        cost = torch.linalg.vector_norm(x[:, 1:] - x[:, plan.tree.parents + 1], dim=-1)
        assert torch.equal(plan.tree.budget, b[:, plan.tree.parents + 1] - cost)

    def test_no_step_freezes_the_design(self):
        frozen = StepLimit(0.0, bounds=LOCATION.bounds)
        plan = TreePlanner(LOCATION, frozen, iterations=2).plan(prior(LOCATION), start_at(frozen, [0.5, 0.25]), 3)
        torch.testing.assert_close(plan.design, torch.tensor([0.5, 0.25]).expand(2, 2))

    def test_an_unlimited_step_finds_the_unconstrained_optimum(self):
        wide, free = StepLimit(math.inf, bounds=CURVE.bounds), Unconstrained(CURVE.bounds)
        belief = prior(CURVE)
        designs = torch.linspace(0, 2, 2001)[:, None]
        best = CURVE.expected_information(designs).max()
        for constraint in (wide, free):
            planner = TreePlanner(CURVE, constraint, depth=0, estimator="gaussian", iterations=60)
            value = planner.plan(belief, start_at(constraint, [0.4]), 3).value
            torch.testing.assert_close(value, best.expand(2), rtol=0, atol=1e-4)

    @pytest.mark.parametrize("family", ["step", "budget"])
    def test_more_freedom_never_lowers_the_optimal_value(self, family):
        values = []
        for size in (0.1, 0.2, 0.4):
            constraint = StepLimit(size, bounds=CURVE.bounds) if family == "step" else Budget(2 * size, bounds=CURVE.bounds)
            planner = TreePlanner(CURVE, constraint, depth=1, iterations=30, starts=3, num_particles=40)
            values.append(planner.plan(prior(CURVE), start_at(constraint, [1.0]), 4, generator=seeded(5)).value)
        assert all((wide >= tight - 1e-3).all() for tight, wide in itertools.pairwise(values))
        assert (values[-1] > values[0]).all()

    def test_the_executed_design_is_checked_by_the_constraint(self, monkeypatch):
        constraint = StepLimit(0.1, bounds=LOCATION.bounds)
        monkeypatch.setattr(constraint, "decode", lambda state, u: state.x + 0.3 + 0 * u)
        monkeypatch.setattr(constraint, "project", lambda state, x: x)
        with pytest.raises(InfeasibleError, match="experiment 1"):
            TreePlanner(LOCATION, constraint, iterations=0).plan(prior(LOCATION), start_at(constraint, [0.5, 0.5]), 3)


class TestOptimum:
    def test_depth_zero_is_the_best_design_of_a_grid(self):
        belief = prior(LOCATION, 1)
        state = start_at(STEP, [0.5, 0.5], 1)
        planner = TreePlanner(LOCATION, STEP, depth=0, iterations=40, starts=6)
        plan = planner.plan(belief, state, 5)
        axis = torch.linspace(0.3, 0.7, 41)
        grid = torch.cartesian_prod(axis, axis)
        particles = belief.subset(planner.num_particles)
        best = eig(particles, grid).value.max()
        assert float(plan.value) >= float(best) - 1e-3
        assert float(node_eig(LOCATION, particles.theta, particles.log_weights, plan.design)) == pytest.approx(
            float(plan.value), abs=1e-5
        )

    @pytest.mark.parametrize("branching", [1, 2])
    def test_full_depth_on_a_linear_model_is_the_exact_optimum(self, branching):
        step = StepLimit(0.5, bounds=CURVE.bounds)
        planner = TreePlanner(
            CURVE, step, depth=2, branching=branching, estimator="gaussian", iterations=60, starts=6, num_random=40
        )
        value = planner.plan(prior(CURVE, 1), start_at(step, [1.0], 1, 3), 3).value
        axis = torch.linspace(-0.5, 0.5, 41)
        paths = torch.cartesian_prod(axis, axis, axis).cumsum(1) + 1
        paths = paths[((paths >= 0) & (paths <= 2)).all(1), :, None]
        best = CURVE.total_information(paths).max()
        assert float(value) == pytest.approx(float(best), abs=2e-3)

    def test_slsqp_finds_what_adam_finds(self):
        values, state = {}, start_at(STEP, [0.5, 0.5])
        for optimizer in ("adam", "slsqp"):
            planner = TreePlanner(LOCATION, STEP, depth=1, optimizer=optimizer, iterations=30, num_particles=60)
            plan = planner.plan(prior(LOCATION), state, 4, generator=seeded(2))
            assert STEP.is_feasible(state, plan.design).all()
            values[optimizer] = plan.value
        torch.testing.assert_close(values["slsqp"], values["adam"], rtol=0.05, atol=0)  # they may climb different hills

    def test_best_of_starts_never_falls_with_more_iterations_or_starts(self):
        belief, state = prior(LOCATION), start_at(STEP, [0.5, 0.5])

        def value(iterations, starts):
            planner = TreePlanner(LOCATION, STEP, depth=1, iterations=iterations, starts=starts, num_particles=60)
            return planner.plan(belief, state, 4, generator=seeded(4)).value

        by_iterations = [value(iterations, 3) for iterations in (0, 1, 3, 8, 16)]
        by_starts = [value(4, starts) for starts in (1, 2, 4, 8)]
        for series in (by_iterations, by_starts):
            assert all((later >= earlier - 1e-6).all() for earlier, later in itertools.pairwise(series))
        assert (by_iterations[-1] > by_iterations[0]).all()

    def test_equal_seeds_give_bitwise_equal_designs(self):
        belief, state = prior(LOCATION), start_at(STEP, [0.5, 0.5])
        first, second, other = (
            TreePlanner(LOCATION, STEP, iterations=3, seed=seed).plan(belief, state, 4).design for seed in (1, 1, 2)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)

    def test_blocks_of_decisions_give_what_one_block_gives(self, monkeypatch):
        belief, state = prior(LOCATION, 5), start_at(STEP, [0.5, 0.5], 5)
        planner = TreePlanner(LOCATION, STEP, depth=1, iterations=3)
        whole = planner.plan(belief, state, 4)
        monkeypatch.setattr(tree, "_BLOCK", 1)
        torch.testing.assert_close(planner.plan(belief, state, 4).design, whole.design, rtol=0, atol=1e-5)

    def test_the_horizon_ends_with_the_experiments(self):
        planner = TreePlanner(LOCATION, STEP, depth=2, iterations=1)
        sizes = [len(planner.plan(prior(LOCATION), start_at(STEP, [0.5, 0.5]), left).tree.depth) for left in (4, 3, 2, 1)]
        assert sizes == [7, 7, 3, 1]

    def test_lookahead_keeps_early_times_of_blood_samples(self):
        """A greedy draw of blood forecloses the earlier ones; a tree does not."""
        model = Pharmacokinetics()
        monotone = Monotone(0.25, bounds=model.bounds)
        first = {
            depth: TreePlanner(model, monotone, depth=depth, starts=4).plan(prior(model, 4), monotone.init(None, 5), 5).design
            for depth in (0, 1)
        }
        assert first[0].median() > 10 > 3 > first[1].median()


class TestWarmStart:
    def test_a_feasible_policy_is_rolled_down_the_tree(self):
        """With no iteration and no other tree, the plan is the policy's."""

        def policy(designs, outcomes):
            return (0.5 + 0.05 * designs.shape[1] + 0 * outcomes.sum(1, keepdim=True)).expand(-1, 2)

        planner = TreePlanner(LOCATION, STEP, warm_start=policy, num_random=0, starts=1, iterations=0)
        plan = planner.plan(prior(LOCATION), start_at(STEP, [0.45, 0.45]), 5)
        expected = 0.5 + 0.05 * plan.tree.depth
        torch.testing.assert_close(plan.tree.design, expected[None, :, None].expand(2, -1, 2), rtol=0, atol=1e-4)
        assert plan.num_projected == 0

    def test_inner_nodes_see_their_fantasised_outcomes(self):
        seen = []

        def policy(designs, outcomes):
            seen.append(outcomes)
            return torch.full((len(designs), 2), 0.5)

        planner = TreePlanner(LOCATION, STEP, depth=1, warm_start=policy, num_random=0, starts=1, iterations=0)
        plan = planner.plan(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 5)
        torch.testing.assert_close(seen[1].flatten(), plan.tree.outcome[:, 1:].flatten(), rtol=0, atol=1e-3)

    def test_forbidden_designs_are_projected_counted_and_told_once(self):
        planner = TreePlanner(LOCATION, STEP, warm_start=lambda X, Y: torch.ones(len(X), 2), num_random=0, starts=1, depth=1)
        belief, state = prior(LOCATION), start_at(STEP, [0.1, 0.1])
        with pytest.warns(UserWarning, match="6 designs were not allowed"):
            plan = planner.plan(belief, state, 4)
        assert plan.num_projected == 6
        assert STEP.is_feasible(state, plan.design).all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert planner.plan(belief, state, 4).num_projected == 6

    def test_the_next_plan_starts_from_the_executed_ones_nearest_subtree(self):
        belief, state = prior(LOCATION), start_at(STEP, [0.5, 0.5])
        planner = TreePlanner(LOCATION, STEP, iterations=3)
        plan = planner.plan(belief, state, 5)
        branch = torch.tensor([1, 0])
        shapes = [(2, 1, n, 2) for n in (1, 2, 4)]
        moves = tree.shifted(plan, plan.tree.outcome[torch.arange(2), 1 + branch] + 1e-3, shapes)
        assert [tuple(move.shape) for move in moves] == shapes
        rows = torch.arange(2)
        assert torch.equal(moves[0][:, 0, 0], plan.moves[1][rows, branch])
        assert torch.equal(moves[1][:, 0], plan.moves[2].unflatten(1, (2, 2))[rows, branch])
        assert torch.equal(moves[2][:, 0], moves[1][:, 0].repeat_interleave(2, 1))
        root_only = TreePlanner(LOCATION, STEP, depth=0).plan(belief, state, 5)
        assert torch.equal(tree.shifted(root_only, torch.zeros(2), [(2, 1, 1, 2)])[0][:, 0], root_only.moves[0])


class ExactPosterior:
    """q(θ | D) = p(θ | D) of the linear model."""

    def law(self, X, Y):
        mean, cov = CURVE.posterior(X, Y)
        return torch.distributions.MultivariateNormal(mean[:, None], cov[:, None])

    def sample(self, X, Y, num_samples):
        law = self.law(X, Y)
        return law.rsample()[:, 0][:, None] * 0 + torch.stack([law.rsample()[:, 0] for _ in range(num_samples)], 1)

    def log_prob(self, theta, X, Y):
        return self.law(X, Y).log_prob(theta)


class TestPaperPreset:
    def test_published_settings(self):
        planner = TreePlanner(LOCATION, STEP, preset="paper", posterior=AmortizedPosterior)
        assert (planner.optimizer, planner.estimator, planner.discount) == ("slsqp", "ace", 0.6)
        assert (planner.depth, planner.branching, planner.num_obs, planner.starts) == (2, (3, 3), 20, 1)
        model = CES()
        planner = TreePlanner(model, Budget(100, bounds=model.bounds), preset="paper", posterior=AmortizedPosterior)
        assert (planner.branching, planner.num_obs, planner.num_random, planner.starts) == ((1, 1), 40, 25, 2)

    def test_plans_with_any_posterior_and_finds_the_exact_optimum_of_a_greedy_step(self):
        step = StepLimit(0.5, bounds=CURVE.bounds)
        planner = TreePlanner(
            CURVE,
            step,
            preset="paper",
            posterior=ExactPosterior(),
            warm_start=lambda X, Y: torch.full((len(X), 1), 1.1),
            num_contrastive=8,
        )
        belief, state = prior(CURVE), start_at(step, [1.0], 2, 1)
        plan = planner.plan(belief, state, 1)
        designs = torch.linspace(0.5, 1.5, 1001)[:, None]
        best = CURVE.expected_information(designs).max()
        assert CURVE.expected_information(plan.design) == pytest.approx(best.expand(2), abs=0.03)

    def test_a_whole_tree_with_histories_at_its_nodes(self):
        step = StepLimit(0.5, bounds=CURVE.bounds)
        planner = TreePlanner(
            CURVE,
            step,
            depth=1,
            estimator="ace",
            posterior=ExactPosterior(),
            num_obs=4,
            num_contrastive=4,
            iterations=2,
            starts=2,
        )
        belief = prior(CURVE).update(torch.tensor([[0.4], [1.0]]), torch.tensor([0.1, -0.2]))
        plan = planner.plan(belief, start_at(step, [1.0]), 3)
        assert plan.tree.theta.shape == (2, 3, 200, 2)
        assert plan.tree.eig.isfinite().all()


class TestRecords:
    def test_tree_of_three_levels(self):
        plan = TreePlanner(LOCATION, STEP, branching=(3, 2), iterations=1).plan(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 5)
        shown = plan.tree
        assert shown.parents.tolist() == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3]
        assert shown.depth.tolist() == [0, 1, 1, 1, *[2] * 6]
        assert shown.path(7) == [0, 2, 7]
        assert shown.probability.tolist() == pytest.approx([1, *[1 / 3] * 3, *[1 / 6] * 6])
        assert shown.outcome[:, 0].isnan().all()
        assert (shown.budget == math.inf).all()
        torch.testing.assert_close(shown.log_weights.logsumexp(-1), torch.zeros(2, 10), rtol=0, atol=1e-5)
        total = shown.eig[:, 0] + shown.eig[:, 1:4].mean(1) + shown.eig[:, 4:].mean(1)
        torch.testing.assert_close(plan.value, total, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plan.design, shown.design[:, 0])
        rows = shown.to_records(1)
        assert len(rows) == 10
        assert rows[7]["parent"] == 2
        assert rows[7]["eig"] == float(shown.eig[1, 7])
        assert rows[4]["design"] == shown.design[1, 4].tolist()

    def test_outcomes_and_weights_follow_bayes_rule_down_the_tree(self):
        plan = TreePlanner(LOCATION, STEP, depth=1, iterations=1).plan(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 5)
        shown = plan.tree
        fit = LOCATION.log_prob(shown.outcome[:, 1:, None], shown.theta[:, 1:], shown.design[:, :1, None])
        expected = (shown.log_weights[:, :1] + fit).log_softmax(-1)
        torch.testing.assert_close(shown.log_weights[:, 1:], expected, rtol=0, atol=1e-4)


class Simulator(DesignModel):
    theta_dim, design_dim = 2, 2
    bounds = LOCATION.bounds

    def prior(self):
        return LOCATION.prior()

    def simulate(self, theta, design, noise=None, *, generator=None):
        return LOCATION.simulate(theta, design, noise, generator=generator)


class TestBadInputs:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"depth": -1}, "depth=-1"),
            ({"branching": 0}, "branching=0"),
            ({"branching": (2,)}, r"branching=\(2,\): expected one number for each of depth=2"),
            ({"depth": 12}, "8191 nodes, about .* GiB"),
            ({"discount": 0.0}, "discount=0.0"),
            ({"discount": 1.1}, "discount=1.1"),
            ({"starts": 0}, "starts=0"),
            ({"iterations": -1}, "iterations=-1"),
            ({"num_contrastive": 0}, "num_contrastive=0"),
            ({"num_particles": 1}, "num_particles=1"),
            ({"optimizer": "sgd"}, "optimizer='sgd'"),
            ({"optimizer": "nested", "root_candidates": 5}, "root_candidates=5"),
            ({"estimator": "exact"}, "estimator='exact'"),
            ({"estimator": "ace"}, "needs posterior="),
            ({"estimator": "enumerate"}, "finitely many outcomes"),
            ({"estimator": "atoms"}, "censored"),
            ({"estimator": "gaussian"}, "LinearGaussian"),
            ({"preset": "code"}, "preset='code'"),
            ({"pacing": "half"}, "no budget to pace"),
        ],
    )
    def test_planner(self, options, message):
        with pytest.raises(ValueError, match=message):
            TreePlanner(LOCATION, STEP, **options)

    def test_quadrature_of_answers_that_are_not_gaussian(self):
        model = HyperbolicDiscounting()
        with pytest.raises(ValueError, match="one Gaussian number"):
            TreePlanner(model, Unconstrained(model.bounds), estimator="quadrature")

    def test_simulators_without_a_likelihood(self):
        with pytest.raises(ValueError, match="barber_agakov"):
            TreePlanner(Simulator(), STEP)

    def test_nothing_left_to_plan(self):
        with pytest.raises(ValueError, match="remaining=0"):
            TreePlanner(LOCATION, STEP).plan(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 0)

    def test_an_exhausted_budget(self):
        budget = Budget(1.0, lambda before, x: 0.6 + 0 * x[..., 0], bounds=LOCATION.bounds)
        state = start_at(budget, [0.5, 0.5])
        state = budget.step(state, state.x)
        with pytest.raises(InfeasibleError, match="experiment 2"):
            TreePlanner(LOCATION, budget, iterations=1).plan(prior(LOCATION), state, 4)

    def test_pacing_replaces_that_of_the_budgets(self):
        budget = Budget(3.0, "l1", bounds=LOCATION.bounds)
        assert paced(budget, "even").pacing == "even"
        assert [getattr(m, "pacing", None) for m in paced(Intersection(STEP, budget), "half").members] == [None, "half"]
        assert paced(STEP, None) is STEP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 10**7, "branching": 2}, "more than 8191 nodes, about 0.4 GiB"),
        ({"branching": 1.5}, "branching=1.5"),
        ({"branching": None}, "branching=None"),
        ({"branching": True}, "branching=True"),
        ({"discount": "a"}, "discount='a'"),
        ({"leaf_value": math.nan}, "leaf_value=nan"),
        ({"lr": 0}, "lr=0"),
        ({"num_particles": 0}, "num_particles=0"),
        ({"num_obs": 0}, "num_obs=0"),
        ({"search": 3}, "search=3"),
        ({"seed": -1}, "seed=-1"),
        ({"warm_start": 3}, "warm_start=3"),
        ({"estimator": "ace", "posterior": 3}, "posterior="),
        ({"estimator": "ace", "posterior": AmortizedPosterior, "optimizer": "nested"}, "optimizer='nested'"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named_before_anything_is_allocated(options, message):
    model = LocationFinding()
    with pytest.raises(ValueError, match=message):
        TreePlanner(model, StepLimit(0.1, bounds=model.bounds), **options)


def test_a_planner_wants_a_model_and_a_constraint_of_its_coordinates():
    model = LocationFinding()
    for constraint in (None, StepLimit(0.1, bounds=[[0.0], [1.0]])):
        with pytest.raises(ValueError, match="constraint: got"):
            TreePlanner(model, constraint)
    with pytest.raises(ValueError, match="model=None"):
        TreePlanner(None, StepLimit(0.1, bounds=model.bounds))


def test_states_of_other_rollouts_or_not_finite_are_refused_and_double_ones_are_not():
    model = LocationFinding()
    constraint = StepLimit(0.1, bounds=model.bounds)
    planner = TreePlanner(model, constraint, depth=1, iterations=1, num_random=1, starts=1, num_particles=10)
    belief = ParticleBelief.prior(model, 2, 20, torch.Generator().manual_seed(0))
    start = torch.full((2, 2), 0.5)
    single, double = (planner.plan(belief, constraint.init(x, 2), 2).design for x in (start, start.double()))
    assert torch.equal(single, double)
    for state, message in ((None, "state=None"), (State(start[:1], 2), "x of shape"), (State(start * math.nan, 2), "no NaN")):
        with pytest.raises(ValueError, match=message):
            planner.plan(belief, state, 2)
    with pytest.raises(ValueError, match="generator: got 3"):
        planner.plan(belief, constraint.init(start, 2), 2, generator=3)


@pytest.mark.parametrize("answer", [None, torch.zeros(1, 2), torch.zeros(2, 3), torch.full((2, 2), math.nan)])
def test_a_warm_start_that_returns_nonsense_is_refused(answer):
    model = LocationFinding()
    constraint = StepLimit(0.1, bounds=model.bounds)
    planner = TreePlanner(model, constraint, depth=0, warm_start=lambda X, Y: answer, num_particles=10)
    belief = ParticleBelief.prior(model, 2, 20, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="warm_start"):
        planner.plan(belief, constraint.init(torch.full((2, 2), 0.5), 1), 1)

import math

import pytest
import torch
from torch import nn

from labkit.design.belief import ParticleBelief
from labkit.design.constraints import Budget, Monotone, StepLimit, Unconstrained
from labkit.design.models import HyperbolicDiscounting, LinearGaussian, LocationFinding, Pharmacokinetics
from labkit.design.policies import (
    GreedyPolicy,
    GreedyVIPolicy,
    ProjectedPolicy,
    RandomPolicy,
    StaticPolicy,
    StepDADPolicy,
    TreePolicy,
)
from labkit.design.tree import TreePlanner

LOCATION = LocationFinding()
STEP = StepLimit(0.1, bounds=LOCATION.bounds)
LINE = LinearGaussian(lambda x: x, torch.eye(1), 1.0, bounds=[[0.0], [2.0]])  # EIG = ½ log(1 + x²): go right


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def prior(model, rollouts=3, particles=200):
    return ParticleBelief.prior(model, rollouts, particles, rng())


def start_at(constraint, x, rollouts=3, steps=5):
    return constraint.init(torch.tensor(x).expand(rollouts, -1), steps)


class Constant(nn.Module):
    """A network that always proposes its weight."""

    def __init__(self, *design):
        super().__init__()
        self.design = nn.Parameter(torch.tensor(design))

    def forward(self, designs, outcomes):
        return self.design.expand(len(designs), -1)


class TestRandom:
    def test_uniform_in_the_box_of_a_step(self):
        belief = prior(LOCATION, 2000, 2)
        designs = RandomPolicy(STEP)(belief, start_at(STEP, [0.5, 0.98], 2000), 3, rng())
        counts = torch.histc(designs[:, 0], 4, 0.4, 0.6)
        assert counts.sum() == 2000
        assert ((counts - 500).abs() < 4 * math.sqrt(2000 * 0.25 * 0.75)).all()
        assert designs[:, 1].max() <= 1

    def test_times_are_those_of_sorted_uniform_ones(self):
        """The mean of the i-th of T sorted uniforms on [0, 24] is 24 i / (T + 1), for a small gap."""
        model = Pharmacokinetics()
        monotone = Monotone(1e-4, bounds=model.bounds)
        belief, state, times = prior(model, 2000, 2), monotone.init(None, 3), []
        generator = rng()
        for remaining in (3, 2, 1):
            times.append(RandomPolicy(monotone)(belief, state, remaining, generator))
            state = monotone.step(state, times[-1])
        means = torch.cat(times, 1).mean(0)
        torch.testing.assert_close(means, torch.tensor([6.0, 12.0, 18.0]), rtol=0, atol=4 * 24 * 0.194 / 2000**0.5)

    def test_an_evenly_paced_walk_spends_its_budget_in_equal_steps(self):
        model = LocationFinding(prior="normal")
        budget = Budget(10.0, pacing="even", bounds=model.bounds)
        state = start_at(budget, [0.0, 0.0], steps=5)
        for remaining in range(5, 0, -1):
            after = budget.step(state, RandomPolicy(budget)(prior(model), state, remaining, rng(remaining)))
            torch.testing.assert_close(state.budget - after.budget, torch.full((3,), 2.0), rtol=1e-4, atol=0)
            state = after

    def test_without_bounds_it_follows_the_models_law(self):
        model = LocationFinding(prior="normal")
        free = Unconstrained(model.bounds)
        designs = RandomPolicy(free)(prior(model, 2000, 2), start_at(free, [0.0, 0.0], 2000), 1, rng())
        assert designs.std(0) == pytest.approx([1, 1], abs=0.1)


class TestGreedy:
    def test_goes_where_the_gain_grows(self):
        step = StepLimit(0.3, bounds=LINE.bounds)
        design = GreedyPolicy(LINE, step)(prior(LINE), start_at(step, [1.0]), 4, rng())
        assert design.flatten().tolist() == pytest.approx([1.3] * 3, abs=5e-3)

    def test_is_the_tree_of_depth_zero(self):
        belief, state = prior(LOCATION), start_at(STEP, [0.4, 0.4])
        greedy = GreedyPolicy(LOCATION, STEP)(belief, state, 4, rng(1))
        tree = TreePolicy(TreePlanner(LOCATION, STEP, depth=0))(belief, state, 4, rng(1))
        last = TreePolicy(TreePlanner(LOCATION, STEP, depth=3))(belief, state, 1, rng(1))
        assert torch.equal(greedy, tree)
        assert torch.equal(greedy, last)


class TestTreePolicy:
    def test_the_next_plan_knows_the_executed_one_and_no_other(self):
        policy = TreePolicy(TreePlanner(LOCATION, STEP, depth=1, iterations=2))
        belief, state = prior(LOCATION), start_at(STEP, [0.4, 0.4])
        design = policy(belief, state, 4, rng())
        outcome = LOCATION.simulate(torch.full((3, 2), 0.7), design, torch.zeros(3))
        assert policy._executed(belief.update(design, outcome)) is policy._last
        assert policy._executed(belief.update(state.x, outcome)) is None
        assert policy._executed(belief) is None


class TestStatic:
    def test_plays_its_rows_in_turn(self):
        designs = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]])
        policy = StaticPolicy(designs, Unconstrained(LOCATION.bounds))
        state = start_at(policy.constraint, [0.0, 0.0])
        played = [policy(prior(LOCATION), state, remaining, rng())[0] for remaining in (3, 2, 1)]
        assert torch.equal(torch.stack(played), designs)
        with pytest.raises(ValueError, match="remaining=4: designs has 3 rows"):
            policy(prior(LOCATION), state, 4, rng())

    def test_rows_out_of_reach_are_projected(self):
        policy = StaticPolicy(torch.tensor([[0.9, 0.5]]), STEP)
        design = policy(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 1, rng())
        torch.testing.assert_close(design, torch.tensor([0.6, 0.5]).expand(3, 2))

    def test_optimised_designs_find_the_largest_information(self):
        """½ log(1 + Σ x²) is largest with every x at its bound, which two steps of 0.6 from 1 reach."""
        step = StepLimit(0.6, bounds=LINE.bounds)
        policy = StaticPolicy.optimise(LINE, step, steps=3, start=torch.tensor([1.0]), iterations=80, num_contrastive=100)
        assert policy.designs.flatten().tolist() == pytest.approx([1.6, 2.0, 2.0], abs=0.05)

    def test_optimised_times_are_feasible(self):
        model = Pharmacokinetics()
        monotone = Monotone(2.0, bounds=model.bounds)
        times = StaticPolicy.optimise(model, monotone, steps=4, iterations=5, num_contrastive=20).designs[:, 0]
        assert (times.diff() >= 2 - 1e-5).all()
        assert times[-1] <= 24


class TestProjected:
    def test_networks_see_the_history_and_obey_the_constraint(self):
        policy = ProjectedPolicy(Constant(0.9, 0.45), STEP)
        design = policy(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 3, rng())
        torch.testing.assert_close(design, torch.tensor([0.6, 0.45]).expand(3, 2))

    def test_planners_may_plan_under_another_constraint(self):
        free, step = Unconstrained(LINE.bounds), StepLimit(0.3, bounds=LINE.bounds)
        policy = ProjectedPolicy(GreedyPolicy(LINE, free), step, free)
        design = policy(prior(LINE), start_at(step, [1.0]), 4, rng())
        assert design.flatten().tolist() == pytest.approx([1.3] * 3)

    def test_designs_that_are_no_numbers(self):
        with pytest.raises(ValueError, match="policy='projected': its designs are not finite"):
            ProjectedPolicy(Constant(math.nan, 0.5), STEP)(prior(LOCATION), start_at(STEP, [0.5, 0.5]), 3, rng())


class TestGreedyVI:
    def test_fits_the_exact_posterior_of_a_linear_model(self):
        belief = prior(LINE, 2)
        for x, y in ((1.0, 0.5), (2.0, 1.4)):
            belief = belief.update(torch.full((2, 1), x), torch.tensor([y, -y]))
        mean, scale = GreedyVIPolicy(LINE, Unconstrained(LINE.bounds), iterations=200, num_elbo=32).fit(belief, rng())
        exact, cov = LINE.posterior(belief.designs, belief.outcomes)
        torch.testing.assert_close(mean, exact, rtol=0, atol=0.1)
        torch.testing.assert_close(scale, cov[..., 0].sqrt(), rtol=0.3, atol=0)

    def test_chooses_a_feasible_design_without_touching_pyros_parameters(self):
        import pyro

        pyro.clear_param_store()
        step = StepLimit(0.3, bounds=LINE.bounds)
        policy = GreedyVIPolicy(LINE, step, iterations=20, num_particles=60, num_obs=40)
        design = policy(prior(LINE), start_at(step, [1.0]), 4, rng())
        assert design.flatten().tolist() == pytest.approx([1.3] * 3, abs=0.05)
        assert not list(pyro.get_param_store().keys())

    def test_iterations_out_of_range(self):
        with pytest.raises(ValueError, match="iterations=0"):
            GreedyVIPolicy(LINE, Unconstrained(LINE.bounds), iterations=0)


class TestStepDAD:
    def test_tuning_moves_each_rollouts_copy_toward_more_information(self):
        step = Unconstrained(LINE.bounds)
        network = Constant(1.0)
        policy = StepDADPolicy(network, step, steps=6, fractions=(1 / 3,), iterations=15, lr=0.05, num_contrastive=50)
        belief, state = prior(LINE, 2), start_at(step, [1.0], 2)
        assert policy(belief, state, 6, rng()).flatten().tolist() == [1.0, 1.0]
        belief = belief.update(torch.ones(2, 1), torch.zeros(2))
        assert policy(belief, state, 5, rng()).flatten().tolist() == [1.0, 1.0]
        belief = belief.update(torch.ones(2, 1), torch.zeros(2))
        tuned = policy(belief, state, 4, rng()).flatten()
        assert (tuned > 1.3).all()
        assert torch.equal(policy(belief, state, 3, rng()).flatten(), tuned)
        assert network.design.item() == 1.0
        assert policy(prior(LINE, 2), state, 6, rng()).flatten().tolist() == [1.0, 1.0]

    def test_the_projection_is_in_the_loop(self):
        """Out of reach, the design's gradient is zero and so is the change."""
        step = StepLimit(0.1, bounds=LINE.bounds)
        policy = StepDADPolicy(Constant(0.2), step, steps=3, fractions=(0,), iterations=3, lr=0.05, num_contrastive=20)
        state = start_at(step, [1.5], 2, 3)
        design = policy(prior(LINE, 2), state, 3, rng())
        assert design.flatten().tolist() == pytest.approx([1.4, 1.4])
        assert policy._copies[0].design.item() == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"steps": 0}, "steps=0"), ({"fractions": (1.0,)}, "fractions="), ({"num_contrastive": 0}, "num_contrastive=0")],
    )
    def test_settings_out_of_range(self, options, message):
        with pytest.raises(ValueError, match=message):
            StepDADPolicy(Constant(1.0), STEP, **{"steps": 3} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"iterations": "a"}, "iterations='a'"),
        ({"num_contrastive": 0}, "num_contrastive=0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"start": torch.rand(2, 2)}, r"start: got shape \(2, 2\)"),
        ({"model": HyperbolicDiscounting()}, "model: .*finitely many"),
    ],
)
def test_bad_arguments_of_a_static_search_are_named(options, message):
    location = LocationFinding()
    limit = StepLimit(0.1, bounds=location.bounds)
    arguments = {"model": location, "constraint": limit, "steps": 2, "iterations": 1} | options
    with pytest.raises(ValueError, match=message):
        StaticPolicy.optimise(**arguments)


def test_bad_static_designs_networks_and_fractions_are_named():
    location = LocationFinding()
    free = Unconstrained(location.bounds)
    belief = ParticleBelief.prior(location, 1, 5, torch.Generator().manual_seed(0))
    for designs in (torch.rand(2, 3), torch.full((2, 2), math.nan), "ab"):
        with pytest.raises(ValueError, match="designs"):
            StaticPolicy(designs, free)(belief, free.init(None, 1), 1, None)
    with pytest.raises(ValueError, match="network=None"):
        StepDADPolicy(None, free, steps=2)
    for fractions in (("a",), 0.3, (1.0,)):
        with pytest.raises(ValueError, match="fractions="):
            StepDADPolicy(torch.nn.Linear(1, 1), free, steps=2, fractions=fractions)

import math

import pandas as pd
import pytest
import torch

from labkit.design.belief import ParticleBelief
from labkit.design.ces import CES
from labkit.design.constraints import Budget, InfeasibleError, Monotone, StepLimit, Unconstrained
from labkit.design.loop import compare, draw_truth, experiment, rollout, score, summarise
from labkit.design.models import LinearGaussian, LocationFinding, Pharmacokinetics
from labkit.design.policies import GreedyPolicy, RandomPolicy, TreePolicy
from labkit.design.tree import TreePlanner

LOCATION = LocationFinding()
STEP = StepLimit(0.2, bounds=LOCATION.bounds)
LINE = LinearGaussian(lambda x: x, torch.eye(1), 1.0, bounds=[[0.0], [2.0]])


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def quick_tree():
    return TreePolicy(TreePlanner(LOCATION, STEP, depth=1, iterations=2, num_particles=40))


@pytest.fixture(scope="module")
def trace():
    return rollout(LOCATION, quick_tree(), STEP, steps=4, num_rollouts=3, seed=5, num_particles=100)


class TestRollout:
    def test_shapes(self, trace):
        assert trace.designs.shape == (3, 4, 2)
        assert trace.outcomes.shape == trace.budget.shape == trace.ess.shape == trace.violation.shape == (3, 4)
        assert trace.mean.shape == (3, 4, 2)
        assert trace.planned.tolist() == [False, True, True, True]
        assert torch.equal(trace.belief.designs, trace.designs)
        assert repr(trace) == "RolloutTrace(policy='tree', seed=5, R=3, T=4)"
        assert trace.plan_ms > 0 < trace.belief_ms

    def test_the_start_is_the_first_design_and_counts(self, trace):
        assert torch.equal(trace.designs[:, 0], trace.start)
        assert ((trace.start >= 0) & (trace.start <= 1)).all()

    def test_no_design_breaks_the_constraint(self, trace):
        assert trace.violation.max() <= 1e-6

    def test_equal_seeds_give_bitwise_equal_designs(self, trace):
        again = rollout(LOCATION, quick_tree(), STEP, steps=4, num_rollouts=3, seed=5, num_particles=100)
        assert torch.equal(again.designs, trace.designs)
        assert torch.equal(again.outcomes, trace.outcomes)
        other = rollout(LOCATION, quick_tree(), STEP, steps=4, num_rollouts=3, seed=6, num_particles=100)
        assert not torch.equal(other.theta, trace.theta)

    def test_policies_meet_the_same_parameters_starts_and_noise(self, trace):
        random = rollout(LOCATION, RandomPolicy(STEP), STEP, steps=4, num_rollouts=3, seed=5, num_particles=100)
        assert torch.equal(random.theta, trace.theta)
        assert torch.equal(random.start, trace.start)
        residuals = [run.outcomes - LOCATION.mean(run.theta[:, None], run.designs) for run in (random, trace)]
        torch.testing.assert_close(*residuals, rtol=0, atol=1e-5)

    def test_the_true_parameters_do_not_leak(self, trace):
        """Played back with the same outcomes, the policy decides the same: θ reaches it through the outcomes alone."""
        belief = ParticleBelief.prior(LOCATION, 3, 100, trace_generator("belief"))
        run = experiment(
            belief,
            quick_tree(),
            STEP,
            lambda t, design: trace.outcomes[:, t],
            steps=4,
            generator=trace_generator("policy"),
            start=trace.start,
        )
        assert torch.equal(torch.stack([step.design for step in run], 1), trace.designs)

    def test_a_free_first_design(self):
        model = Pharmacokinetics()
        monotone = Monotone(0.25, bounds=model.bounds)
        run = rollout(
            model, RandomPolicy(monotone), monotone, steps=3, num_rollouts=50, seed=0, num_particles=20, measure_start=False
        )
        assert run.start is None
        assert run.planned.all()
        assert (run.designs[..., 0].diff() >= 0.25 - 1e-5).all()
        assert run.designs.max() <= 24
        assert run.violation.max() <= 24e-6

    def test_a_start_that_is_not_measured(self):
        run = rollout(
            LOCATION, RandomPolicy(STEP), STEP, steps=2, num_rollouts=4, seed=0, num_particles=20,
            start=torch.tensor([0.5, 0.5]), measure_start=False,
        )  # fmt: skip
        assert (run.designs[:, 0] - 0.5).abs().max() <= 0.2 + 1e-6
        assert not torch.equal(run.designs[:, 0], run.start)

    def test_a_budget_is_never_overspent(self):
        budget = Budget(0.6, pacing="half", bounds=LOCATION.bounds)
        run = rollout(LOCATION, RandomPolicy(budget), budget, steps=6, num_rollouts=20, seed=0, num_particles=20)
        spent = torch.linalg.vector_norm(run.designs.diff(dim=1), dim=-1)
        assert (spent.sum(1) <= 0.6 + 1e-6).all()
        torch.testing.assert_close(run.budget, 0.6 - torch.cat([torch.zeros(20, 1), spent], 1).cumsum(1), rtol=0, atol=1e-5)

    def test_one_measurement_at_the_start(self):
        run = rollout(LOCATION, RandomPolicy(STEP), STEP, steps=1, num_rollouts=2, seed=0, num_particles=20)
        assert torch.equal(run.designs[:, 0], run.start)

    def test_preferences_of_ces_are_stratified(self):
        theta = draw_truth(CES(), 20, 3)
        level = torch.special.ndtr((theta[:, 4] - 1) / 3)
        assert sorted((20 * level).int().tolist()) == list(range(20))


def trace_generator(stream):
    """The generators that `rollout` makes of seed 5."""
    from labkit.randomness import seeded_generator

    return seeded_generator(5, stream)


class TestScore:
    def test_information_of_a_linear_model_is_its_closed_form(self):
        step = StepLimit(0.5, bounds=LINE.bounds)
        run = rollout(LINE, GreedyPolicy(LINE, step, iterations=3), step, steps=3, num_rollouts=60, seed=1, num_particles=200)
        table = score(run, num_draws=2000, num_contrastive=2000)
        exact = LINE.total_information(run.designs).double()
        for name in ("kl", "information", "spce"):
            gap = torch.tensor(table[name].to_numpy()) - exact
            assert abs(gap.mean()) < 4 * gap.std() / 60**0.5 + 0.01
        assert (table["spce"] <= math.log(2001)).all()
        assert list(table["rollout"]) == list(range(60))

    def test_paired_summary(self):
        rows = [
            {"policy": name, "seed": 0, "rollout": i, "kl": base + i, "information": base + i, "spce": 0.0, "violation": v}
            for name, base, v in (("a", 0.0, 0.0), ("b", 2.0, 1.0))
            for i in range(20)
        ]
        table = summarise(pd.DataFrame(rows), "a")
        assert table.loc["b", "kl"] == pytest.approx(11.5)
        assert table.loc["b", "kl_se"] == pytest.approx(math.sqrt(35 / 20))
        assert (table.loc["b", "gain"], table.loc["b", "gain_se"]) == pytest.approx((2, 0))
        assert table.loc["a", "gain"] == 0
        assert table.loc["b", "worst_decile"] == pytest.approx(2.5)
        assert list(table["violations"]) == [0, 20]

    def test_compare_runs_all_policies_on_the_same_experiments(self):
        table = compare(
            {"random": RandomPolicy(STEP), "greedy": GreedyPolicy(LOCATION, STEP, iterations=4)},
            LOCATION,
            STEP,
            steps=12,
            num_rollouts=6,
            seed=0,
            num_particles=300,
            score_options={"num_draws": 1000, "num_contrastive": 2000},
        )
        assert list(table.index) == ["random", "greedy"]
        assert table.loc["greedy", "gain"] > 1
        assert (table["violations"] == 0).all()
        assert table.loc["greedy", "plan_ms"] > table.loc["random", "plan_ms"]


class TestBadInputs:
    def run(self, **options):
        settings = {"steps": 2, "num_rollouts": 2, "seed": 0, "num_particles": 10} | options
        return rollout(LOCATION, RandomPolicy(STEP), STEP, **settings)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps=0"),
            ({"num_rollouts": 0}, "num_rollouts=0"),
            ({"num_particles": 1}, "num_particles=1"),
            ({"start": [0.5, 1.5]}, "start="),
            ({"start": [math.nan, 0.5]}, "start="),
        ],
    )
    def test_rollout(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.run(**options)

    def test_a_start_to_measure_is_needed(self):
        belief = ParticleBelief.prior(LOCATION, 1, 10, rng())
        with pytest.raises(ValueError, match="start=None"):
            next(experiment(belief, RandomPolicy(STEP), STEP, None, steps=2, generator=rng()))

    def test_a_policy_that_breaks_the_constraint(self):
        with pytest.raises(InfeasibleError, match="experiment 1"):
            rollout(
                LOCATION, lambda *_: torch.ones(2, 2), STEP, steps=2, num_rollouts=2, seed=0, num_particles=10,
                start=torch.zeros(2),
            )  # fmt: skip

    def test_a_policy_whose_designs_are_no_numbers(self):
        with pytest.raises(ValueError, match="finite"):
            rollout(LOCATION, lambda *_: torch.full((2, 2), math.nan), STEP, steps=2, num_rollouts=2, seed=0, num_particles=10)

    def test_an_unknown_reference(self):
        table = pd.DataFrame({"policy": ["a"], "seed": 0, "rollout": 0})
        with pytest.raises(ValueError, match="reference='b'"):
            summarise(table, "b")
        with pytest.raises(ValueError, match="policies"):
            compare({}, LOCATION, STEP, steps=2, num_rollouts=1, seed=0)


@pytest.mark.parametrize(
    "answer", [None, [[0.5, 0.5]], torch.rand(3, 2), torch.full((2, 2), math.nan), torch.rand(2, 3), "here"]
)
def test_a_policy_that_returns_nonsense_is_named(answer):
    model = LocationFinding()
    free = Unconstrained(model.bounds)
    with pytest.raises(ValueError, match=r"policy|design="):
        rollout(model, lambda *a: answer, free, steps=2, num_rollouts=2, seed=0, num_particles=20)


def test_a_policy_that_breaks_the_constraint_is_stopped():
    model = LocationFinding()
    limit = StepLimit(0.1, bounds=model.bounds)
    with pytest.raises(InfeasibleError, match="experiment 1: the design"):
        rollout(model, lambda b, *a: 1 - b.designs[:, -1].round(), limit, steps=2, num_rollouts=2, seed=0, num_particles=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": None}, "policy=None"),
        ({"constraint": None}, "constraint=None"),
        ({"constraint": StepLimit(0.1, bounds=[[0.0], [1.0]])}, "constraint=.*2 coordinates"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"start": torch.rand(3, 2)}, r"start: got shape \(3, 2\)"),
        ({"start": "here"}, "start='here'"),
        ({"start": [5.0, 0.5], "steps": 1}, "start=.*in the box"),
    ],
)
def test_bad_arguments_of_a_rollout_are_named(options, message):
    model = LocationFinding()
    limit = StepLimit(0.1, bounds=model.bounds)
    arguments = {"policy": RandomPolicy(limit), "constraint": limit, "steps": 2} | options
    with pytest.raises(ValueError, match=message):
        rollout(model, **arguments, num_rollouts=2, seed=0, num_particles=20)


def test_an_unknown_reference_is_refused_before_anything_runs():
    model = LocationFinding()
    limit = StepLimit(0.1, bounds=model.bounds)
    with pytest.raises(ValueError, match="reference='b': expected one of a"):
        compare({"a": None}, model, limit, steps=2, num_rollouts=2, seed=0, reference="b")
    with pytest.raises(ValueError, match=r"policies=\[\]: expected a mapping"):
        compare([], model, limit, steps=2, num_rollouts=2, seed=0)

import itertools
import math

import pytest
import torch

from labkit.design.online import policies
from labkit.design.online.eig import eig
from labkit.design.online.policies import (
    AdamPolicy,
    AimPolicy,
    BestStaticPolicy,
    FixedPolicy,
    GridPolicy,
    OpenLoopPolicy,
    PlugInPolicy,
    RandomPolicy,
    adam_ascent,
    best_static,
    candidate_designs,
    exact_method,
)
from labkit.filtering import (
    Clouds,
    LinearGaussianSSM,
    MovingSource,
    NestedParticleFilter,
    TwoGroupSIR,
    simulate,
    truth_generator,
)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def learnt(model, steps, num_params=40, num_states=20, design=0.0):
    """A belief after some steps at one design."""
    designs = torch.full((steps, model.design_dim), design)
    _, ys = simulate(model, model.truth, designs, truth_generator(1))
    belief = NestedParticleFilter(model, num_params, num_states)
    for design, y in zip(designs, ys, strict=True):
        belief.step(design, y)
    return belief.snapshot()


@pytest.fixture(scope="module")
def sir():
    return learnt(TwoGroupSIR.two_parameter(), 30, num_params=60, num_states=40)


@pytest.fixture(scope="module")
def source():
    return learnt(MovingSource("low_noise"), 15)


@pytest.fixture(scope="module")
def linear():
    """I(ξ) of this model grows with |ξ|."""
    return learnt(LinearGaussianSSM(), 3, num_params=100, design=1.0)


class TestSimple:
    def test_random_designs_follow_the_models_law(self, sir):
        shares = torch.stack([RandomPolicy()(sir, None, 1, generator) for generator in map(rng, range(200))]).sigmoid()
        quarters = torch.histc(shares, 4, 0, 1)
        assert quarters.sum() == 200
        assert ((quarters - 50).abs() < 4 * math.sqrt(200 * 0.25 * 0.75)).all()
        expected = sir.model.sample_designs(1, rng(5))[0]
        assert torch.equal(RandomPolicy()(sir, None, 1, rng(5)), expected)

    def test_fixed_and_best_static_never_move(self, sir):
        design = torch.tensor([0.7])
        for policy in (FixedPolicy(design), BestStaticPolicy(design, None)):
            assert {float(policy(sir, None, remaining, rng(remaining))) for remaining in (3, 2, 1)} == {float(design)}

    def test_aim_points_every_sensor_at_the_mean_position(self, source):
        angles = AimPolicy()(source, None, 1, rng())
        mean = source.x[..., :2].mean((0, 1))
        for angle, sensor in zip(angles, source.model.sensors, strict=True):
            away = mean - torch.tensor(sensor)
            assert torch.allclose(away / away.norm(), torch.tensor([angle.cos(), angle.sin()]), atol=1e-5)
        x = source.x.clone()
        x[..., :2] = torch.tensor([3.0, 3.0])  # north of the sensor at (3, 0), east of the one at (0, 3)
        angles = AimPolicy()(Clouds(source.model, source.theta, x), None, 1, rng())
        assert angles.tolist() == pytest.approx([math.pi / 2, 0], abs=1e-5)

    def test_aim_needs_sensors(self, sir):
        with pytest.raises(ValueError, match="TwoGroupSIR: AimPolicy needs a model with `sensors`"):
            AimPolicy()(sir, None, 1, rng())


class TestGrid:
    def test_candidates_of_an_sir_model_are_evenly_spaced_shares(self, sir):
        shares = sir.model.share(candidate_designs(sir.model, 5))[:, 0]
        assert shares.tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=3e-3)

    def test_other_models_choose_among_the_same_random_designs_each_time(self):
        for model in (MovingSource(), LinearGaussianSSM()):
            designs = candidate_designs(model, 9)
            assert designs.shape == (9, model.design_dim)
            assert torch.equal(designs, candidate_designs(model, 9))
        assert (designs.diff(dim=0) > 0).all()
        with pytest.raises(ValueError, match="size=1"):
            candidate_designs(model, 1)
        with pytest.raises(ValueError, match=r"size=5\.5"):
            GridPolicy(5.5)

    def test_the_estimator_fits_the_observations(self, sir, source):
        sensors = MovingSource(sensors=((3, 0), (0, 3), (3, 3)))
        three = NestedParticleFilter(sensors, 4, 4).snapshot()
        assert [exact_method(belief) for belief in (sir, source, three)] == ["enumerate", "quadrature", "nested"]
        assert GridPolicy(3)(three, None, 1, rng()).shape == (3,)  # with fewer states than observations by default

    @pytest.mark.parametrize("jackknife", [False, True])
    def test_it_plays_the_argmax_of_the_expected_gain(self, sir, jackknife):
        chosen = GridPolicy(9, jackknife=jackknife)(sir, None, 1, rng(3))
        key = int(torch.randint(2**31, (), generator=rng(3)))
        designs = candidate_designs(sir.model, 9)
        gains = eig(sir, designs, method="enumerate", jackknife=jackknife, seed=key).value
        assert torch.equal(chosen, designs[gains.argmax()])

    def test_it_takes_designs_of_ones_own(self, source):
        designs = torch.tensor([[0.0, 0.0], [2.36, -0.79]])
        assert GridPolicy(designs=designs)(source, None, 1, rng()).tolist() == pytest.approx([2.36, -0.79])


class TestAdam:
    def test_the_first_step_has_length_lr_along_the_gradients_sign(self, linear):
        (step,) = adam_ascent(linear, torch.tensor([0.5]), [0], lr=0.03)
        assert step.design == pytest.approx(0.5)
        assert float(step.after - step.design) == pytest.approx(0.03 * float(step.grad.sign()), rel=1e-3)

    def test_it_climbs(self, linear):
        steps = list(adam_ascent(linear, torch.tensor([0.5]), range(25), lr=0.05))
        assert len(steps) == 25
        assert all(torch.equal(a.after, b.design) for a, b in itertools.pairwise(steps))
        start, end = eig(linear, torch.stack([steps[0].design, steps[-1].after]), num_obs=1000).value
        assert end > start + 0.05

    def test_a_step_is_clipped_and_stays_inside_the_bound(self, linear):
        (step,) = adam_ascent(linear, torch.tensor([0.5]), [0], lr=0.5, clip=0.1)
        assert abs(float(step.after - step.design)) == pytest.approx(0.1, rel=1e-4)
        *_, last = adam_ascent(linear, torch.tensor([0.5]), range(5), lr=0.2, bound=0.6)
        assert last.after == pytest.approx(0.6)

    def test_the_start_is_left_alone(self, linear):
        start = torch.tensor([0.5])
        list(adam_ascent(linear, start, range(3)))
        assert start == torch.tensor([0.5])

    def test_the_papers_schedules(self, sir, source, monkeypatch):
        """20 × 1 + 50 estimates for the SIR model, 20 × 5 + 50 for the source; warm starts share a key, the climb does not."""
        for policy, belief, calls, lr in ((AdamPolicy.sir(), sir, 70, 0.03), (AdamPolicy.source(), source, 150, 0.01)):
            seeds = []

            def spy(belief, design, *, seed, num_obs, seeds=seeds, **options):
                seeds.append(seed)
                gain = eig(belief, design[None], num_obs=20, seed=seed)
                return gain, torch.ones_like(design)

            monkeypatch.setattr(policies, "eig_grad", spy)
            policy(belief, None, 1, rng())
            assert policy.lr == lr
            assert len(seeds) == calls
            assert len(set(seeds[: calls - 50])) == 1
            assert len(set(seeds[calls - 50 :])) == 50

    def test_the_climb_starts_from_the_best_warm_start(self, sir, monkeypatch):
        starts = sir.model.sample_designs(4, _skipped_key())
        visited = []

        def peak(belief, design, *, seed, **options):
            visited.append(float(design))
            value = -(design - starts[2]).abs()
            return type("Gain", (), {"value": value})(), torch.zeros(1)

        monkeypatch.setattr(policies, "eig_grad", peak)
        played = AdamPolicy.sir(warm_starts=4, steps=2)(sir, None, 1, rng())
        assert visited == pytest.approx([*starts[:, 0].tolist(), float(starts[2]), float(starts[2])])
        assert played == pytest.approx(float(starts[2]))

    def test_exact_ascent_finds_what_the_grid_finds(self, sir):
        """The gain of the SIR model with two parameters grows with group 1's share, up to the boundary."""
        share = float(sir.model.share(AdamPolicy.sir(warm_starts=8, steps=20, estimator="exact")(sir, None, 1, rng())))
        best = float(sir.model.share(GridPolicy(11)(sir, None, 1, rng())))
        gains = eig(sir, sir.model.design_of_share(torch.tensor([[share], [best], [0.5]])), method="enumerate").value
        assert best > 0.9
        assert gains[0] > 0.95 * gains[1] > gains[2]

    @pytest.mark.parametrize("jackknife", [False, True])
    def test_the_exact_gradient_is_that_of_the_exact_gain(self, source, jackknife):
        design, h = torch.tensor([2.0, -0.5]), 0.02
        (step,) = adam_ascent(source, design, [3], estimator="exact", jackknife=jackknife)
        around = design + h * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        values = eig(source, around, method="quadrature", jackknife=jackknife, seed=3).value
        slopes = (values[0::2] - values[1::2]) / (2 * h)
        assert step.grad.tolist() == pytest.approx(slopes.tolist(), abs=2e-3)
        assert float(slopes.abs().max()) > 0.01
        assert step.value == pytest.approx(float(values.mean()), abs=2e-3)

    @pytest.mark.parametrize("name", ["warm_starts", "warm_steps", "steps"])
    def test_an_empty_schedule_is_refused(self, name):
        with pytest.raises(ValueError, match=f"{name}=0"):
            AdamPolicy(**{name: 0})

    def test_an_unknown_estimator_is_refused_with_all_that_there_are(self, linear):
        message = "estimator='x': expected one of score, pathwise, exact"
        with pytest.raises(ValueError, match=message):
            AdamPolicy(estimator="x")
        with pytest.raises(ValueError, match=message):
            next(adam_ascent(linear, torch.tensor([0.5]), [0], estimator="x"))

    def test_the_exact_gradient_needs_an_exact_sum(self):
        three = NestedParticleFilter(MovingSource(sensors=((3, 0), (0, 3), (3, 3))), 4, 4).snapshot()
        with pytest.raises(ValueError, match="estimator='exact': expected counts or one or two Gaussian observations"):
            next(adam_ascent(three, torch.zeros(3), [0], estimator="exact"))


def _skipped_key():
    generator = rng()
    torch.randint(2**31, (), generator=generator)
    return generator


class TestAblations:
    def test_plug_in_hides_the_uncertainty_of_the_state(self, sir):
        seen = []

        def inner(belief, state, remaining, generator):
            seen.append(belief)
            return torch.zeros(1)

        PlugInPolicy(inner)(sir, None, 1, rng())
        assert torch.equal(seen[0].theta, sir.theta)
        assert seen[0].x.shape == sir.x.shape
        assert torch.allclose(seen[0].x[:, 0], sir.x.mean(1))
        assert float(seen[0].x.std(1).max()) < 1e-4
        assert seen[0].jitter is sir.jitter

    def test_open_loop_plans_without_data_and_plays_in_order(self, sir):
        plan = OpenLoopPolicy.plan(sir.model, GridPolicy(5), steps=4, num_params=20, num_states=10)
        assert plan.designs.shape == (4, 1)
        played = [plan(sir, None, remaining, rng()) for remaining in (4, 3, 2, 1)]
        assert torch.equal(torch.stack(played), plan.designs)
        again = OpenLoopPolicy.plan(sir.model, GridPolicy(5), steps=4, num_params=20, num_states=10)
        assert torch.equal(plan.designs, again.designs)
        with pytest.raises(ValueError, match="remaining=5: this plan has 4 steps"):
            plan(sir, None, 5, rng())

    def test_open_loop_looks_ahead_along_the_prior_predictive(self):
        """The clouds that the inner policy sees move on, and their parameters stay the prior's draws."""
        seen = []

        def inner(belief, state, remaining, generator):
            seen.append(belief)
            return torch.zeros(1)

        OpenLoopPolicy.plan(TwoGroupSIR.two_parameter(), inner, steps=3, num_params=20, num_states=4)
        assert all(torch.equal(belief.theta, seen[0].theta) for belief in seen)
        assert not torch.equal(seen[1].x, seen[2].x)


class TestBestStatic:
    def test_it_tests_the_group_whose_rates_are_unknown(self):
        model = TwoGroupSIR.two_parameter()
        designs = model.design_of_share(torch.tensor([[0.02], [0.98]]))
        policy = best_static(model, designs, steps=40, runs=3, grid=7, num_states=100)
        assert torch.equal(policy(None, None, 1, rng()), designs[1])
        assert policy.search.groupby("candidate").size().tolist() == [3, 3]
        mean = policy.search.groupby("candidate")["kl"].mean()
        assert mean[1] > mean[0] + 0.3
        assert policy.search["design0"].unique().tolist() == pytest.approx(designs[:, 0].tolist())

    def test_bad_arguments_are_named(self):
        model = TwoGroupSIR.two_parameter()
        with pytest.raises(ValueError, match="designs of shape"):
            best_static(model, torch.zeros(3), steps=5)
        for name in ("runs", "steps"):
            with pytest.raises(ValueError, match=f"{name}=0: expected an int >= 1"):
                best_static(model, torch.zeros(3, 1), **{"steps": 5, name: 0})

import math

import pytest
import torch

from labkit.design.checker import violations
from labkit.design.constraints import (
    Budget,
    Constraint,
    InfeasibleError,
    Intersection,
    Monotone,
    State,
    StepLimit,
    Unconstrained,
    position_cost,
    require_feasible,
    switching_cost,
)
from labkit.design.obstacles import Availability, Forbidden
from tests.unit.design.histories import walk

SQUARE = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
GOODS = torch.tensor([[0.0], [100.0]]).expand(2, 6)
HOURS = torch.tensor([[0.0], [24.0]])
PLANE = torch.tensor([[-math.inf], [math.inf]]).expand(2, 2)


def hazard(x):
    return 0.05 + 2 * torch.exp(-(x - 0.5).square().sum(-1) / 0.1)


# name → constraint, designs to choose, whether the run starts somewhere
CASES = {
    "box": (Unconstrained(SQUARE), 5, True),
    "step linf": (StepLimit(0.1, bounds=SQUARE), 20, True),
    "step linf per coordinate": (StepLimit(torch.tensor([0.1, math.inf]), bounds=SQUARE), 20, True),
    "step l2": (StepLimit(0.1, "l2", bounds=SQUARE), 20, True),
    "frozen": (StepLimit(0.0, bounds=SQUARE), 5, True),
    "travel": (Budget(100.0, bounds=GOODS), 9, True),
    "travel half": (Budget(100.0, pacing="half", bounds=GOODS), 9, True),
    "travel even": (Budget(150.0, "l1", "even", bounds=GOODS), 9, True),
    "travel in the plane": (Budget(10.0, pacing="even", bounds=PLANE), 9, True),
    "no budget": (Budget(0.0, bounds=SQUARE), 5, True),
    "hazard": (Budget(2.0, position_cost(hazard), "even", cheapest=[0.0, 0.0], bounds=SQUARE), 9, True),
    "switching": (Budget(2.5, switching_cost(1.0, lambda x: x[..., 0] > 0.5), bounds=SQUARE), 9, True),
    "times": (Monotone(0.25, bounds=HOURS), 10, False),
    "times after one": (Monotone(0.25, bounds=HOURS), 10, True),
    "tight times": (Monotone(2.4, bounds=HOURS), 11, False),
    "step and travel": (Intersection(StepLimit(0.2, bounds=SQUARE), Budget(1.0, pacing="half", bounds=SQUARE)), 9, True),
    "both steps": (Intersection(StepLimit(0.1, "l2", bounds=SQUARE), StepLimit(0.08, bounds=SQUARE)), 9, True),
    "slow times": (Intersection(Monotone(0.25, bounds=HOURS), StepLimit(2.0, bounds=HOURS)), 8, True),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def start_of(constraint, moves, batch):
    """Starts (batch, d) in the box; in the first tenth of it where a run only goes up."""
    if not moves:
        return None
    low, high = constraint.bounds
    bounded = low.isfinite()
    u = torch.rand((batch, len(low)), generator=torch.Generator().manual_seed(0))
    u = u * 0.04 if "Monotone" in repr(constraint) else u
    return torch.where(bounded, torch.where(bounded, low, 0) + torch.where(bounded, high - low, 1) * u, u)


def moves(steps, batch, d, seed=1):
    """Free coordinates (steps, batch, d) from small to far out."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (2.5 * torch.rand((steps, batch, 1), generator=generator) - 1.5)
    return size * torch.randn((steps, batch, d), generator=generator)


def unit_of(constraint):
    width = constraint.bounds[1] - constraint.bounds[0]
    return float(width.max()) if width.isfinite().all() else 1.0


def test_ten_thousand_random_moves_give_feasible_paths(case):
    constraint, steps, starts = case
    batch = math.ceil(10_000 / steps)
    x0 = start_of(constraint, starts, batch)
    path, states = walk(constraint, x0, moves(steps, batch, constraint.bounds.shape[1]))
    assert path.isfinite().all()
    assert violations(constraint, x0, path).max() <= 1e-6 * unit_of(constraint)
    for state, x in zip(states, path.unbind(-2), strict=False):
        assert constraint.is_feasible(state, x).all()
        assert constraint.nonempty(state).all()
    assert (states[-1].remaining, states[-1].time) == (0, steps + 1)


@pytest.mark.parametrize("name", [name for name, (c, *_) in CASES.items() if "Budget" in repr(c)])
def test_no_run_spends_more_than_its_budget_and_the_ledger_is_exact(name):
    constraint, steps, starts = CASES[name]
    x0 = start_of(constraint, starts, 1000)
    path, states = walk(constraint, x0, moves(steps, 1000, constraint.bounds.shape[1], seed=2))
    budget = next(c for c in (constraint, *getattr(constraint, "members", ())) if isinstance(c, Budget))
    for x, before, after in zip(path.unbind(-2), states, states[1:], strict=False):
        if callable(budget.cost):
            cost = budget.cost(before.x, x)
        else:
            cost = torch.linalg.vector_norm(x - before.x, ord=1 if budget.cost == "l1" else 2, dim=-1)
        assert torch.equal(after.budget, before.budget - cost)
    assert (states[-1].budget >= 0).all()
    assert (states[-1].budget <= budget.total).all()


@pytest.mark.parametrize("name", ["travel", "travel half", "travel even"])
def test_a_far_out_move_spends_the_paced_budget_and_the_last_one_all(name):
    constraint, x0 = CASES[name][0], torch.full((1, 6), 50.0)
    small = Budget(30.0, constraint.cost, constraint.pacing, bounds=GOODS)  # never meets the box
    us = torch.randn((4, 1, 6), generator=torch.Generator().manual_seed(0)) * 100
    _, states = walk(small, x0, us)
    left = [state.budget.item() for state in states]
    shares = {None: [0, 0, 0, 0], "half": [15, 7.5, 3.75, 0], "even": [22.5, 15, 7.5, 0]}[constraint.pacing]
    assert left == pytest.approx([30, *shares], abs=2e-3)


def test_no_step_freezes_the_design():
    path, _ = walk(StepLimit(0.0, bounds=SQUARE), x0 := torch.tensor([[0.3, 0.7]]), moves(6, 1, 2))
    assert torch.equal(path, x0[:, None].expand(1, 6, 2))


def test_an_endless_step_reaches_the_whole_box():
    x0 = torch.tensor([0.9, 0.1])
    for norm in ("linf", "l2"):
        constraint = StepLimit(math.inf, norm, bounds=SQUARE)
        state = constraint.init(x0, 1)
        corner = torch.tensor([0.0, 1.0])
        assert constraint.is_feasible(state, corner)
        assert torch.equal(constraint.project(state, corner), corner)
        torch.testing.assert_close(constraint.decode(state, constraint.encode(state, corner)), corner, rtol=0, atol=5e-3)


def test_times_grow_by_the_gap_and_leave_room_for_the_last():
    path, _ = walk(Monotone(0.25, bounds=HOURS), None, moves(10, 500, 1))
    times = path[..., 0].double()
    assert (torch.diff(times, dim=-1) >= 0.25 - 24e-6).all()
    assert (torch.diff(times, dim=-1) > 0).all()
    assert times.min() >= 0
    assert times.max() <= 24
    late, _ = walk(Monotone(0.25, bounds=HOURS), None, torch.full((10, 1, 1), 50.0))
    torch.testing.assert_close(late.flatten(), 24 - 0.25 * torch.arange(9, -1, -1.0))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("switching", "hazard", "frozen", "no budget")])
def test_gradients_of_decode_are_exact(name):
    constraint, _, starts = CASES[name]
    d = constraint.bounds.shape[1]
    x0 = start_of(constraint, starts, 6)
    x0 = None if x0 is None else x0.double()
    state = constraint.init(x0, 3)
    u = 0.2 * torch.randn((6, d), generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.05
    assert torch.autograd.gradcheck(lambda u: constraint.decode(state, u), u.requires_grad_(), atol=1e-4, rtol=1e-3, eps=1e-6)


def test_gradients_follow_a_cost_to_the_edge_of_the_budget():
    constraint = Budget(1.0, position_cost(lambda x: x.square().sum(-1)), cheapest=[0.0, 0.0], bounds=2 * SQUARE)
    state = constraint.init(torch.zeros(1, 2, dtype=torch.float64), 1)
    u = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)  # out of the affordable quarter disc
    x = constraint.decode(state, u)
    assert x.square().sum().item() == pytest.approx(1, abs=1e-6)
    (along,) = torch.autograd.grad(x.square().sum(), u, retain_graph=True)
    assert along.abs().max() < 1e-2  # the length cannot change
    (first,) = torch.autograd.grad(x[0, 0], u)
    step = torch.tensor([[1e-3, 0.0]], dtype=torch.float64)
    slope = (constraint.decode(state, u + step) - constraint.decode(state, u - step))[0, 0] / 2e-3
    assert first[0, 0].item() == pytest.approx(slope.item(), rel=1e-2)


def test_gradients_flow_from_late_designs_to_early_moves():
    constraint = Budget(3.0, bounds=PLANE)
    us = moves(3, 1, 2).double().clamp(-1, 1).requires_grad_()
    path, _ = walk(constraint, torch.zeros(1, 2, dtype=torch.float64), us)
    (gradient,) = torch.autograd.grad(path[0, -1].sum(), us)
    assert (gradient.abs().sum(-1) > 0).all()


def test_projection_is_feasible_idempotent_and_the_identity_where_nothing_is_wrong(case):
    constraint, steps, starts = case
    d, x0 = constraint.bounds.shape[1], start_of(constraint, starts, 500)
    state = constraint.init(x0, steps)
    low, high = constraint.bounds.clamp(-5, 100)
    anywhere = low + (high - low) * (1.4 * torch.rand((500, d), generator=torch.Generator().manual_seed(5)) - 0.2)
    projected = constraint.project(state, anywhere)
    assert constraint.is_feasible(state, projected).all()
    torch.testing.assert_close(constraint.project(state, projected), projected, rtol=0, atol=1e-6 * float((high - low).max()))


@pytest.mark.parametrize(
    "name", ["box", "step linf", "step l2", "travel", "travel even", "times", "times after one", "step and travel"]
)
def test_encode_inverts_decode_inside(name):
    constraint, _, starts = CASES[name]
    x0 = start_of(constraint, starts, 200)
    state = constraint.init(None if x0 is None else x0 * 0.5 + 0.25 * constraint.bounds[1], 3)
    u = 0.3 * torch.randn((200, constraint.bounds.shape[1]), generator=torch.Generator().manual_seed(6))
    if name == "step and travel":
        state = constraint.init(torch.full((200, 2), 0.5), 3)
    x = constraint.decode(state, u)
    torch.testing.assert_close(constraint.decode(state, constraint.encode(state, x)), x, rtol=1e-4, atol=1e-4)


def test_slack_is_nonnegative_exactly_where_a_design_is_feasible(case):
    constraint, steps, starts = case
    d, x0 = constraint.bounds.shape[1], start_of(constraint, starts, 500)
    state = constraint.init(x0, steps)
    low, high = constraint.bounds.clamp(-5, 100)
    x = low + (high - low) * torch.rand((500, d), generator=torch.Generator().manual_seed(7))
    inside = (constraint.slack(state, x) >= 0).all(-1)
    assert torch.equal(constraint.is_feasible(state, x, tol=0.0), inside)


def test_the_reachable_region_holds_what_can_be_reached():
    x0 = start_of(CASES["box"][0], True, 300)
    for name in ("step linf", "step l2", "step and travel", "both steps", "box"):
        constraint = CASES[name][0]
        path, states = walk(constraint, x0, moves(9, 300, 2))
        for n in (1, 3):
            region, x = constraint.reachable(states[0], n), path[:, n - 1]
            assert ((x >= region.low - 1e-6) & (x <= region.high + 1e-6)).all()
            for norm, radius in region.balls:
                length = torch.linalg.vector_norm(x - region.center, ord=1 if norm == "l1" else 2, dim=-1)
                assert (length <= radius + 1e-5).all()
    times = CASES["times"][0]
    region = times.reachable(times.init(None, 5), 2)
    assert (region.low.item(), region.high.item()) == (0.25, 23.25)


def test_the_checker_measures_what_is_wrong():
    x0, inside = torch.tensor([0.5, 0.5]), torch.tensor([[0.55, 0.5], [0.9, 0.8], [0.9, 0.8]])
    assert violations(StepLimit(0.1, bounds=SQUARE), x0, inside).tolist() == pytest.approx([0, 0.25, 0], abs=1e-7)
    assert violations(StepLimit(0.1, "l2", bounds=SQUARE), x0, inside)[1].item() == pytest.approx(math.hypot(0.35, 0.3) - 0.1)
    assert violations(Budget(0.3, "l1", bounds=SQUARE), x0, inside).tolist() == pytest.approx([0, 0.4, 0.4], abs=1e-7)
    assert violations(Unconstrained(SQUARE), x0, inside + 0.2).tolist() == pytest.approx([0, 0.1, 0.1], abs=1e-7)
    late = torch.tensor([[1.0], [1.1], [25.0]])
    assert violations(Monotone(0.25, bounds=HOURS), None, late).tolist() == pytest.approx([0, 0.15, 1.0], abs=1e-6)
    both = Intersection(StepLimit(0.1, bounds=SQUARE), Budget(0.3, "l1", bounds=SQUARE))
    assert violations(both, x0, inside).tolist() == pytest.approx([0, 0.65, 0.4], abs=1e-6)
    hazardous = Budget(2.0, position_cost(hazard), cheapest=[0.0, 0.0], bounds=SQUARE)
    assert violations(hazardous, x0, x0.expand(2, 2)).tolist() == pytest.approx([0.05, 2.1], abs=1e-6)


def test_states_can_be_expanded_and_indexed():
    constraint = Intersection(StepLimit(0.2, bounds=SQUARE), Budget(1.0, bounds=SQUARE))
    state = constraint.init(torch.rand((4, 2), generator=torch.Generator().manual_seed(0)), 3)
    wide = state.map(lambda tensor: tensor.repeat_interleave(3, 0))
    u = torch.randn((12, 2), generator=torch.Generator().manual_seed(1))
    x = constraint.decode(wide, u)
    torch.testing.assert_close(x[::3], constraint.decode(state, u[::3]))
    assert constraint.step(wide, x).budget.shape == (12,)
    free = Monotone(0.25, bounds=HOURS).init(None, 3)
    assert free.map(lambda tensor: tensor[0]) == free


class Diagonal(Constraint):
    """A user's own: the second coordinate may not exceed the first."""

    bounds = SQUARE

    def slack(self, state, x):
        return x[..., :1] - x[..., 1:]

    def decode(self, state, u):
        x = torch.sigmoid(u)
        return torch.stack([x[..., 0], x[..., 0] * x[..., 1]], -1)

    def project(self, state, x):
        x = super().project(state, x)
        return torch.stack([x[..., 0], torch.minimum(x[..., 0], x[..., 1])], -1)


def test_a_users_own_constraint_needs_a_slack_and_a_decoder():
    own, x0 = Diagonal(), torch.tensor([[0.5, 0.2]]).expand(100, 2)
    path, _ = walk(own, x0, moves(5, 100, 2))
    assert (path[..., 1] <= path[..., 0]).all()
    both = Intersection(StepLimit(0.1, bounds=SQUARE), own)
    path, states = walk(both, x0, moves(5, 100, 2))
    assert (path[..., 1] <= path[..., 0] + 1e-6).all()
    assert all(both.is_feasible(state, x).all() for state, x in zip(states, path.unbind(-2), strict=False))
    with pytest.raises(TypeError, match="register a checker"):
        violations(own, x0, path)


# --- what is refused


def test_an_exhausted_budget_names_experiment_place_and_constraint():
    constraint = Budget(0.4, position_cost(lambda x: 0.1 + x.sum(-1)), cheapest=[0.0, 0.0], bounds=SQUARE)
    state = constraint.init(torch.zeros(3, 2), 5)
    require_feasible(constraint, state)
    state = constraint.step(state, torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 0.0]]))
    with pytest.raises(InfeasibleError, match=r"experiment 2: no design is allowed by Budget\(0.4.*budget left 0\)") as error:
        require_feasible(constraint, state)
    assert (error.value.time, error.value.constraint, error.value.state) == (2, constraint, state)


def test_of_an_intersection_the_failing_member_is_named():
    limit = StepLimit(0.1, bounds=SQUARE)
    constraint = Intersection(Budget(5.0, bounds=SQUARE), limit)
    state = constraint.init(torch.tensor([[0.5, 0.5]]), 5)
    with pytest.raises(InfeasibleError, match=r"experiment 1: the design \[0.7.*not allowed by StepLimit\(0.1") as error:
        require_feasible(constraint, state, torch.tensor([[0.7, 0.5]]))
    assert error.value.constraint is limit
    require_feasible(constraint, state, torch.tensor([[0.6, 0.5]]))


def test_boxes_that_share_nothing_leave_no_design():
    constraint = Intersection(Monotone(1.0, bounds=HOURS), StepLimit(0.5, bounds=HOURS))
    with pytest.raises(InfeasibleError, match="no design is allowed by Intersection"):
        require_feasible(constraint, constraint.init(torch.tensor([[3.0]]), 2))


def test_a_design_that_is_not_finite_is_refused():
    constraint = Unconstrained(SQUARE)
    with pytest.raises(ValueError, match="expected finite"):
        require_feasible(constraint, constraint.init(torch.rand(2), 1), torch.tensor([math.nan, 0.0]))


@pytest.mark.parametrize(
    ("x0", "steps", "message"),
    [
        ([0.5, 1.2], 3, "x0=.*in the box"),
        ([0.5, math.nan], 3, "x0=.*finite"),
        ([0.5], 3, r"x0: got shape \(1,\)"),
        ([0.5, 0.5], 0, "steps=0"),
    ],
)
def test_bad_starts_are_refused(x0, steps, message):
    for constraint in (Unconstrained(SQUARE), StepLimit(0.1, bounds=SQUARE), Intersection(Budget(1.0, bounds=SQUARE))):
        with pytest.raises(ValueError, match=message):
            constraint.init(torch.tensor(x0), steps)


@pytest.mark.parametrize(
    "constraint",
    [
        StepLimit(0.1, bounds=SQUARE),
        Budget(1.0, bounds=SQUARE),
        Forbidden([[0.5, 0.5, 0.1]], segments=True, bounds=SQUARE),
        Intersection(StepLimit(0.1, bounds=SQUARE)),
    ],
    ids=repr,
)
def test_a_constraint_on_moves_needs_a_start(constraint):
    with pytest.raises(ValueError, match="x0=None"):
        constraint.init(None, 3)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda before, x: x.sum(-1) - 9, "cost: got -8"),
        (lambda before, x: x.sum(-1) * math.nan, "cost: got nan"),
        (lambda before, x: x, r"cost: got shape \(3, 2\)"),
    ],
)
def test_bad_cost_functions_are_refused(cost, message):
    with pytest.raises(ValueError, match=message):
        Budget(1.0, cost, bounds=SQUARE).init(torch.full((3, 2), 0.5), 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepLimit(-0.1, bounds=SQUARE), "delta=-0.1"),
        (lambda: StepLimit(math.nan, bounds=SQUARE), "delta=nan"),
        (lambda: StepLimit(torch.ones(3), bounds=SQUARE), "delta="),
        (lambda: StepLimit(torch.ones(2), "l2", bounds=SQUARE), "delta="),
        (lambda: StepLimit(math.inf, bounds=PLANE), "expected a finite step"),
        (lambda: StepLimit(0.1, "l1", bounds=SQUARE), "norm='l1'"),
        (lambda: StepLimit(0.1, bounds=[[1.0], [0.0]]), "bounds="),
        (lambda: Budget(-1.0, bounds=SQUARE), "total=-1.0"),
        (lambda: Budget(math.inf, bounds=SQUARE), "total=inf"),
        (lambda: Budget(1.0, "l3", bounds=SQUARE), "cost='l3'"),
        (lambda: Budget(1.0, pacing="third", bounds=SQUARE), "pacing='third'"),
        (lambda: Budget(1.0, cheapest=[2.0, 0.0], bounds=SQUARE), "cheapest="),
        (lambda: Budget(1.0, cheapest=[0.0], bounds=SQUARE), "cheapest="),
        (lambda: Monotone(0.0, bounds=HOURS), "gap=0.0"),
        (lambda: Monotone(math.inf, bounds=HOURS), "gap=inf"),
        (lambda: Monotone(2.5, bounds=HOURS).init(None, 11), "gap=2.5, steps=11"),
        (lambda: Monotone(2.5, bounds=HOURS).init(torch.tensor([22.0]), 1), "do not fit"),
        (lambda: Intersection(), "members"),
        (lambda: Intersection(Monotone(1.0, bounds=HOURS), Budget(1.0, bounds=SQUARE)), "members: got boxes"),
        (lambda: Intersection(Unconstrained(SQUARE), Unconstrained(SQUARE + 1)), "bounds="),
        (lambda: Availability([[[0.0, 0.0], [1.0, 1.0]]], [[3, 2]], bounds=SQUARE), "windows="),
        (lambda: Unconstrained("box"), "bounds='box': expected real numbers"),
        (lambda: Unconstrained([[0.0, 0.0], [1.0]]), "bounds=.*rows of equal length"),
        (lambda: Unconstrained(torch.ones(2, 1, device="meta")), "bounds=.*on the CPU"),
        (lambda: StepLimit("0.1", bounds=SQUARE), "delta='0.1'"),
        (lambda: Budget("3", bounds=SQUARE), "total='3': expected a finite budget"),
        (lambda: Budget(torch.ones(2), bounds=SQUARE), "total="),
        (lambda: Monotone(None, bounds=HOURS), "gap=None"),
        (lambda: Intersection([Unconstrained(SQUARE)]), "members=.*one argument each"),
        (lambda: Unconstrained(SQUARE).init("x", 3), "x0='x'"),
        (lambda: Unconstrained(SQUARE).init(None, 1.5), "steps=1.5"),
        (lambda: Budget(1.0, lambda a, b: None, bounds=SQUARE).init(torch.zeros(2), 3), "cost=None"),
        (lambda: require_feasible(Unconstrained(SQUARE), State(None, 1), torch.ones(1, 3)), r"design: got shape \(1, 3\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_start_may_be_a_plain_list_of_numbers():
    state = Budget(2, bounds=SQUARE).init([1, 0], 3)
    assert state.x.tolist() == [1.0, 0.0]
    assert state.budget.item() == 2


class Careless(Unconstrained):
    """A user's constraint whose slack lacks its last dimension, or is NaN."""

    def __init__(self, answer):
        super().__init__(SQUARE)
        self.answer = answer

    def slack(self, state, x):
        return self.answer


def test_a_slack_of_another_shape_is_refused_and_one_that_is_nan_allows_nothing():
    x = torch.full((4, 2), 0.5)
    with pytest.raises(ValueError, match=r"slack: Careless\(\) gave shape \(4,\)"):
        Careless(torch.ones(4)).is_feasible(State(None, 1), x)
    assert not Careless(torch.full((4, 1), math.nan)).is_feasible(State(None, 1), x).any()

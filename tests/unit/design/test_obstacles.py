import math

import pytest
import torch

from labkit.design.checker import violations
from labkit.design.constraints import Budget, InfeasibleError, Intersection, State, StepLimit, require_feasible
from labkit.design.obstacles import Availability, Forbidden
from tests.unit.design.histories import walk

SQUARE = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
DISCS = [[0.3, 0.3, 0.15], [0.45, 0.4, 0.1], [0.0, 1.0, 0.2], [0.8, 0.2, 0.1]]
BOXES = [[[0.6, 0.6], [1.0, 0.8]], [[0.5, 0.7], [0.7, 0.9]]]
WINDOWS = [[2, 4], [5, 9]]
START = torch.tensor([0.05, 0.05])

CASES = {
    "discs": Forbidden(DISCS, bounds=SQUARE),
    "boxes": Forbidden(boxes=BOXES, bounds=SQUARE),
    "discs and boxes": Forbidden(DISCS, BOXES, bounds=SQUARE),
    "ways": Forbidden(DISCS, segments=True, bounds=SQUARE),
    "windows": Availability(BOXES, WINDOWS, bounds=SQUARE),
    "step around discs": Intersection(StepLimit(0.2, bounds=SQUARE), Forbidden(DISCS, bounds=SQUARE)),
    "step on free ways": Intersection(StepLimit(0.2, "l2", bounds=SQUARE), Forbidden(DISCS, segments=True, bounds=SQUARE)),
    "budget around all": Intersection(Budget(2.0, bounds=SQUARE), Forbidden(DISCS, BOXES, bounds=SQUARE)),
}


@pytest.fixture(params=CASES)
def constraint(request):
    return CASES[request.param]


def random_moves(steps, batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn((steps, batch, 2), generator=generator)


def test_ten_thousand_random_moves_give_feasible_paths(constraint):
    path, states = walk(constraint, START.expand(1000, 2), random_moves(10, 1000))
    assert violations(constraint, START.expand(1000, 2), path).max() <= 1e-6
    for state, x in zip(states, path.unbind(-2), strict=False):
        assert constraint.is_feasible(state, x).all()
    assert path[:, -1].std(0).min() > 0.05  # the walks get somewhere


def test_projection_leaves_allowed_designs_alone_and_moves_the_others_out(constraint):
    state = constraint.init(START.expand(2000, 2), 10)
    anywhere = torch.rand((2000, 2), generator=torch.Generator().manual_seed(2))
    feasible = constraint.is_feasible(state, anywhere, tol=-1e-5)
    projected = constraint.project(state, anywhere)
    assert feasible.any()
    assert not feasible.all()
    torch.testing.assert_close(projected[feasible], anywhere[feasible])
    assert constraint.is_feasible(state, projected).all()


def test_a_design_leaves_a_disc_by_its_radius():
    constraint = Forbidden([[0.5, 0.5, 0.2]], bounds=SQUARE)
    state = constraint.init(None, 1)
    out = constraint.project(state, torch.tensor([[0.5, 0.6], [0.53, 0.54], [0.5, 0.5]]))
    torch.testing.assert_close(out[0], torch.tensor([0.5, 0.7]))
    torch.testing.assert_close(out[1], torch.tensor([0.5 + 0.12, 0.5 + 0.16]))
    torch.testing.assert_close((out - 0.5).norm(dim=-1), torch.full((3,), 0.2))


def test_a_design_leaves_a_box_by_the_nearest_face_inside_the_bounds():
    constraint = Forbidden(boxes=[[[0.6, 0.2], [1.0, 0.8]]], bounds=SQUARE)
    out = constraint.project(constraint.init(None, 1), torch.tensor([[0.95, 0.5], [0.9, 0.75], [0.5, 0.5]]))
    torch.testing.assert_close(out, torch.tensor([[0.95, 0.2], [0.9, 0.8], [0.5, 0.5]]), rtol=0, atol=1e-6)


def test_a_way_ends_where_it_would_enter_a_disc():
    constraint = Forbidden([[0.5, 0.5, 0.2]], segments=True, bounds=SQUARE)
    state = constraint.init(torch.tensor([[0.1, 0.5], [0.1, 0.1], [0.1, 0.9]]), 1)
    out = constraint.project(state, torch.tensor([[0.9, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    torch.testing.assert_close(out, torch.tensor([[0.3, 0.5], [0.9, 0.1], [0.2, 0.8]]), rtol=0, atol=1e-5)
    blocked = constraint.is_feasible(state, torch.tensor([[0.9, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    assert blocked.tolist() == [False, True, True]


def test_gradients_of_decode_are_exact(constraint):
    state = constraint.init(START.expand(40, 2).double(), 10)
    u = random_moves(1, 40, seed=3)[0].double().requires_grad_()
    steps = torch.eye(2, dtype=torch.float64) * 1e-6
    jacobian = torch.autograd.functional.jacobian(lambda u: constraint.decode(state, u).sum(0), u).movedim(1, 0)
    numeric = torch.stack([(constraint.decode(state, u + e) - constraint.decode(state, u - e)) / 2e-6 for e in steps], -1)
    wrong = (jacobian - numeric).abs().amax((-1, -2)) > 1e-3
    assert wrong.float().mean() <= 0.1  # a few lie at an edge, or are shortened by whole shares


def test_a_region_can_be_used_in_its_window_only():
    constraint, inside = CASES["windows"], torch.tensor([0.9, 0.65])
    state = constraint.init(START, 6)
    for time in range(1, 7):
        assert state.time == time
        assert constraint.is_feasible(state, inside).item() == (2 <= time <= 4)
        closed = constraint.reachable(state).boxes
        assert (0 if closed is None else len(closed)) == [2, 1, 1, 1, 1, 1][time - 1]
        assert len(constraint.reachable(state, 20).boxes) == 2
        state = constraint.step(state, START)
    path = inside.expand(6, 2)
    assert (violations(constraint, START, path) > 0).tolist() == [True, False, False, False, True, True]


def test_the_reachable_region_shows_the_obstacles():
    constraint = CASES["budget around all"]
    region = constraint.reachable(constraint.init(START, 3))
    assert region.discs.shape == (4, 3)
    assert region.boxes.shape == (2, 2, 2)
    assert region.balls[0][1].item() == 2.0


def test_the_checker_measures_what_is_wrong():
    path = torch.tensor([[0.1, 0.5], [0.5, 0.55], [0.9, 0.5], [0.1, 0.5]])
    disc = [[0.5, 0.5, 0.2]]
    assert violations(Forbidden(disc, bounds=SQUARE), START, path).tolist() == pytest.approx([0, 0.15, 0, 0], abs=1e-6)
    ways = violations(Forbidden(disc, segments=True, bounds=SQUARE), START, path)
    assert ways.tolist() == pytest.approx([0, 0.15, 0.15, 0.2], abs=5e-3)
    boxes = Forbidden(boxes=[[[0.4, 0.4], [0.6, 1.0]]], bounds=SQUARE)
    assert violations(boxes, START, path).tolist() == pytest.approx([0, 0.1, 0, 0], abs=1e-6)


def test_a_design_in_an_obstacle_is_named():
    constraint = CASES["step around discs"]
    state = constraint.init(START[None], 3)
    with pytest.raises(InfeasibleError, match=r"the design \[0.2, 0.25\] is not allowed by Forbidden"):
        require_feasible(constraint, state, torch.tensor([[0.2, 0.25]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Forbidden(bounds=SQUARE), "expected at least one"),
        (lambda: Forbidden(DISCS, BOXES, segments=True, bounds=SQUARE), "discs alone"),
        (lambda: Forbidden([[0.5, 0.5, 0.0]], bounds=SQUARE), "radius > 0"),
        (lambda: Forbidden([[0.5, 0.5, 2.0]], bounds=SQUARE), "leave some design"),
        (lambda: Forbidden([[0.5, 0.1]], bounds=SQUARE), "discs: got shape"),
        (lambda: Forbidden(DISCS, bounds=[[-math.inf, 0.0], [1.0, 1.0]]), "finite box"),
        (lambda: Forbidden(boxes=[[[0.5, 0.5], [0.4, 0.6]]], bounds=SQUARE), "boxes: got shape"),
        (lambda: Forbidden(boxes=[[[0.5], [0.6]]], bounds=SQUARE), "boxes: got shape"),
        (lambda: CASES["discs"].init(torch.tensor([0.3, 0.3]), 3), "x0=.*outside Forbidden"),
        (lambda: Availability(BOXES, [[1, 2]], bounds=SQUARE), "windows: got shape"),
        (lambda: Availability([], [], bounds=SQUARE), "windows: got shape"),
        (lambda: Availability(BOXES, [[3, 2], [1, 1]], bounds=SQUARE), "end before it starts"),
        (lambda: Availability(BOXES[:1], [[1.5, 2.5]], bounds=SQUARE), "windows=.*whole numbers"),
        (lambda: Availability(BOXES, "always", bounds=SQUARE), "windows='always'"),
        (lambda: Forbidden([[math.nan, 0.5, 0.1]], bounds=SQUARE), "discs: got .*expected finite rows"),
        (lambda: Forbidden("disc", bounds=SQUARE), "discs='disc'"),
        (lambda: Forbidden(boxes=3.0, bounds=SQUARE), "boxes: got shape"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_window_may_be_a_billion_experiments_long_or_open_ended():
    box = [[[0.0, 0.0], [0.5, 0.5]]]
    for last in (10**9, math.inf):
        constraint = Availability(box, [[3, last]], bounds=SQUARE)
        allowed = [bool(constraint.is_feasible(State(None, 1, time), torch.tensor([0.2, 0.2]))) for time in (2, 3, 10**6)]
        assert allowed == [False, True, True]
        assert constraint.project(State(None, 1, 2), torch.tensor([0.2, 0.2])).max() >= 0.5
        assert constraint.project(State(None, 1, 3), torch.tensor([0.2, 0.2])).tolist() == pytest.approx([0.2, 0.2])

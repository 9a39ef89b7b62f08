"""The lab's panels without a front end, small enough to answer at once."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.design import experiment, figures, widgets
from labkit.design.belief import ParticleBelief
from labkit.design.corridor import Corridor, planned_path
from labkit.design.dad import DADNetwork
from labkit.design.information import eig
from labkit.design.models import LocationFinding
from labkit.design.posterior import AmortizedPosterior
from labkit.panel import Panel


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Errors of callbacks reach the test, and planners are small."""
    monkeypatch.setattr(Panel, "raise_errors", True)
    monkeypatch.setattr(widgets, "LIVE", dict(iterations=3, num_random=3, starts=2, num_particles=40))


def words(panel):
    return re.sub("<[^>]*>", "", panel.readout.value)


def keyed(panel):
    return figures.keyed(panel.figure)


def after(panel, change):
    change()
    panel.wait()
    return panel.result


@pytest.fixture
def explorer():
    return widgets.explorer()


def test_the_explorer_opens_on_a_tree_with_a_node_selected(explorer):
    tree = explorer.result.tree
    assert len(tree.parents) == 13
    assert len(keyed(explorer)["nodes"].x) == 13
    assert explorer.node.value == 2
    assert "At node 2, reached by outcome" in words(explorer)


def test_selecting_a_node_plans_nothing_and_shows_what_the_tree_has_stored(explorer):
    scene = explorer.result
    for node in (0, 3, 12):
        explorer.node.value = node
        traces, path = keyed(explorer), scene.tree.path(node)
        assert explorer.result is scene
        np.testing.assert_allclose(traces["path"].y, scene.tree.eig[0, path])
        np.testing.assert_allclose(np.column_stack([traces["plan"].x, traces["plan"].y])[1:], scene.tree.design[0, path])
        np.testing.assert_allclose(traces["particles"].x, scene.tree.theta[0, node, :, 0])


def test_a_click_selects_like_the_menu(explorer):
    nodes = keyed(explorer)["nodes"]
    nodes._dispatch_on_click(type("Points", (), {"point_inds": [7], "trace_index": 0})(), None)
    assert explorer.node.value == 7


def test_the_belief_at_a_node_is_bayes_rule_with_the_imagined_outcomes(explorer):
    scene = explorer.result
    path = scene.tree.path(5)
    _, log_posterior = scene.whole.posterior(scene.tree, path)
    X = torch.cat([torch.tensor(scene.designs), scene.tree.design[0, path[:-1]]])
    Y = torch.cat([torch.tensor(scene.outcomes), scene.tree.outcome[0, path[1:]]])
    fit = scene.whole.model.log_prob(Y[:, None, None], scene.whole.sources[None], X[:, None, None]).sum(0)
    np.testing.assert_allclose(log_posterior, fit, atol=1e-3)


def test_gains_below_a_node_are_means_over_its_descendants(explorer):
    scene = explorer.result
    below = scene.expected_below(1)
    assert below == pytest.approx([float(scene.tree.eig[0, 4:7].mean())], rel=1e-5)
    assert len(scene.expected_below(12)) == 0
    assert len(scene.expected_below(0)) == 2


def test_executing_measures_at_the_root_and_undo_takes_it_back(explorer):
    before = explorer.result
    root = before.tree.design[0, 0].numpy()
    later = after(explorer, explorer.execute.click)
    np.testing.assert_allclose(later.designs[-1], root)
    assert len(later.outcomes) == len(before.outcomes) + 1
    assert later.left == pytest.approx(before.left - float(np.linalg.norm(root - before.position)), abs=1e-5)
    again = after(explorer, explorer.undo.click)
    np.testing.assert_array_equal(again.designs, before.designs)
    torch.testing.assert_close(again.tree.design, before.tree.design)
    assert len(after(explorer, explorer.reset.click).outcomes) == 1
    assert words(explorer).startswith("1 measurement taught")
    assert len(after(explorer, explorer.undo.click).outcomes) == 1  # the first measurement stays


def test_the_real_outcome_does_not_depend_on_the_plan_that_led_there():
    world = widgets.World(LocationFinding(), 3, (0.5, 0.5), 50)
    first = world.begin()
    there = torch.tensor([[0.4, 0.4]])
    assert torch.equal(world.measure(first, there).outcomes, world.measure(world.begin(), there).outcomes)


def test_every_path_of_every_tree_keeps_the_limits(explorer):
    for name, value in (("delta", 0.05), ("budget", 0.3), ("depth", 3), ("branching", 1), ("discount", 0.5)):
        scene = after(explorer, lambda name=name, value=value: setattr(getattr(explorer, name), "value", value))
        tree, position = scene.tree, torch.tensor(scene.position)
        for node, parent in enumerate(tree.parents.tolist()):
            before = position if parent < 0 else tree.design[0, parent]
            assert (tree.design[0, node] - before).abs().max() <= scene.delta + 1e-5
        assert float(tree.budget.min()) >= -1e-5
    assert explorer.status.value == ""


def test_a_spent_budget_leaves_the_robot_where_it_is(explorer):
    after(explorer, explorer.execute.click)
    scene = after(explorer, lambda: setattr(explorer.budget, "value", 0.2))
    assert scene.left == 0
    np.testing.assert_allclose(scene.tree.design[0], np.broadcast_to(scene.position, scene.tree.design[0].shape), atol=1e-5)


def test_the_menu_of_nodes_follows_the_size_of_the_tree(explorer):
    after(explorer, lambda: setattr(explorer.depth, "value", 0))
    assert [node for _, node in explorer.node.options] == [0]
    after(explorer, lambda: setattr(explorer.depth, "value", 4))
    after(explorer, lambda: setattr(explorer.branching, "value", 2))
    assert len(explorer.node.options) == len(explorer.result.tree.parents) == 31


def test_a_large_tree_deepens_level_by_level(explorer, monkeypatch):
    depths = []
    planner = widgets.TreePlanner
    monkeypatch.setattr(widgets, "TreePlanner", lambda *a, **k: depths.append(k["depth"]) or planner(*a, **k))
    after(explorer, lambda: setattr(explorer.depth, "value", 3))
    assert depths == [0, 1, 2, 3]


def test_other_fantasies_change_the_tree_and_not_what_was_measured(explorer):
    before = explorer.result
    later = after(explorer, explorer.replan.click)
    np.testing.assert_array_equal(later.outcomes, before.outcomes)
    assert not torch.equal(later.tree.outcome[0, 1:], before.tree.outcome[0, 1:])


def test_the_source_is_hidden_until_it_is_asked_for(explorer):
    assert keyed(explorer)["source"].visible is False
    explorer.source.value = True
    assert keyed(explorer)["source"].visible is True
    assert keyed(explorer)["source"].x[0] == pytest.approx(explorer.result.source[0])


def test_the_robot_measures_where_it_is_sent_as_far_as_it_can_go():
    panel = widgets.robot(steps=3, size=5)
    panel.x1.value, panel.x2.value = 0.56, 0.5
    panel.move.click()
    np.testing.assert_allclose(panel.result.designs[-1], (0.56, 0.5), atol=1e-6)
    panel.x1.value = 1.0
    panel.move.click()
    np.testing.assert_allclose(panel.result.designs[-1], (0.71, 0.5), atol=1e-6)  # δ = 0.15 further
    assert panel.result.over
    assert words(panel).startswith("All 3 measurements are made")
    assert keyed(panel)["source"].visible is True
    panel.move.click()
    assert len(panel.result.outcomes) == 3
    panel.undo.click()
    assert len(panel.result.outcomes) == 2


def test_the_map_of_the_robot_shows_expected_gains():
    panel = widgets.robot(steps=2, size=5)
    stand = panel.result
    corner = torch.tensor([[stand.axes[0][0], stand.axes[1][0]]], dtype=torch.float32)
    value = float(eig(stand.belief.subset(panel.particles.value), corner).value)
    assert keyed(panel)["gain"].z[0][0] == pytest.approx(value, rel=1e-4)
    np.testing.assert_allclose(stand.axes[0][[0, -1]], (0.35, 0.65), atol=1e-6)


def test_another_source_starts_again_and_a_click_names_the_next_place():
    panel = widgets.robot(steps=2, size=5)
    first = panel.result.source
    panel.again.click()
    assert len(panel.result.outcomes) == 1
    assert not np.allclose(panel.result.source, first)
    places = keyed(panel)["places"]
    places._dispatch_on_click(type("Points", (), {"point_inds": [0], "trace_index": 0})(), None)
    assert (panel.x1.value, panel.x2.value) == pytest.approx((0.35, 0.35), abs=0.01)


def test_what_was_learned_is_nothing_before_the_first_measurement_and_grows():
    model = LocationFinding()
    prior = ParticleBelief.prior(model, 2, 500, torch.Generator().manual_seed(0))
    torch.testing.assert_close(widgets.learned(prior), torch.zeros(2))
    near = prior.update(torch.tensor([[0.5, 0.5], [0.2, 0.2]]), torch.tensor([5.0, 6.0]))
    assert (widgets.learned(near) > 1).all()


def test_the_bounds_enclose_the_exact_value_and_meet_it_as_draws_grow():
    panel = widgets.bounds(runs=20)
    exact, found = panel.result
    spce, snmc = (found[name][1] for name in ("spce", "snmc"))
    assert (spce <= np.log(np.array(found["spce"][0]) + 1) + 1e-6).all()
    assert (snmc >= spce).all()
    assert snmc[-1] - spce[-1] < snmc[4] - spce[4]
    _, mean, stderr = found["is"]
    assert (abs(mean - exact) < 4 * stderr + 0.01).all()


@pytest.mark.parametrize(("depth", "discount"), [(0, 1.0), (6, 1.0), (8, 0.6)])
def test_the_corridor_panel_walks_what_the_planner_walks(depth, discount):
    panel = widgets.corridor()
    panel.depth.value, panel.discount.value = depth, discount
    expected = planned_path(Corridor(), 12, depth, discount)
    np.testing.assert_allclose(keyed(panel)["planner3"].y[1:], expected.information)
    assert f"place {expected.places[-1]} with" in words(panel)


def test_the_corridor_panel_opens_one_level_before_the_crossing():
    panel = widgets.corridor()
    assert "1.2825 nats, 71" in words(panel)
    panel.depth.value += 1
    assert "1.7951 nats, 100" in words(panel)


def test_the_posterior_panel_compares_the_head_it_names_with_bayes_rule():
    network = AmortizedPosterior(LocationFinding(), width=8, layers=1, attention_heads=2, hidden=8, components=2)
    panel = widgets.posterior(network.requires_grad_(False).eval(), size=16)
    gaps = {}
    for head in ("product", "joint"):
        panel.head.value = head
        assert f"{head} head" in panel.figure.layout.annotations[1].text
        gaps[head] = panel.result[-1]
        assert gaps[head] > 0
    assert gaps["product"] != gaps["joint"]
    panel.length.value = 5
    assert len(panel.result[5 - 1]) == 5
    first = panel.result[5]
    panel.again.click()
    assert not np.allclose(panel.result[5], first)


def test_projected_designs_keep_the_step_limit_that_the_network_does_not_know():
    panel = widgets.projection(DADNetwork(LocationFinding(), 30), steps=4, rollouts=2)
    for limit in (0.05, np.inf, 0.1):
        after(panel, lambda limit=limit: setattr(panel.delta, "value", limit))
        for run in panel.result.values():
            assert np.abs(np.diff(run.designs, axis=1)).max() <= limit + 1e-6
    policy, greedy = panel.result.values()
    np.testing.assert_array_equal(policy.theta, greedy.theta)
    np.testing.assert_array_equal(policy.designs[:, 0], greedy.designs[:, 0])


def test_runs_of_the_projection_panel_are_kept(monkeypatch):
    panel = widgets.projection(DADNetwork(LocationFinding(), 30), steps=3, rollouts=2)
    first = panel.result
    after(panel, lambda: setattr(panel.delta, "value", 0.2))
    monkeypatch.setattr(widgets, "follow", None)
    again = after(panel, lambda: setattr(panel.delta, "value", 0.1))
    assert all(again[name] is run for name, run in first.items())
    panel.rollout.value = 0
    np.testing.assert_allclose(keyed(panel)["way1"].x, next(iter(first.values())).designs[0, :, 0])


def test_no_pacing_overspends_and_even_pacing_walks_even_steps():
    panel = widgets.pacing(steps=4, rollouts=2)
    budget = panel.budget.value
    for run in panel.result.values():
        assert run.travelled.max() <= budget + 1e-5
    steps = np.diff(panel.result["evenly"].travelled, axis=1)
    assert (steps[:, 0] <= budget / 3 + 1e-5).all()


@pytest.fixture(scope="module")
def runs():
    """Six paired rollouts of the main policies in three settings."""
    rng, rows = np.random.default_rng(0), []
    levels = {"random": 2.0, "static": 3.0, "greedy": 1.5, "tree-1": 3.1, "tree-2": 3.3}
    for setting in ("pk", "pk-wide", "ces-100"):
        base = rng.normal(0, 0.1, 6)
        for policy, level in levels.items():
            kl = base + level
            table = {"setting": setting, "policy": policy, "seed": 0, "rollout": range(6), "kl": kl, "information": kl}
            table |= {"spce": kl, "ess": 500.0, "violation": 0.0, "plan_ms": 1.0, "belief_ms": 1.0}
            if setting != "ces-100":
                table |= {f"time{t}": 4.0 * t for t in range(1, 6)}
            rows.append(pd.DataFrame(table))
    return pd.concat(rows, ignore_index=True)


def test_the_schedules_show_medians_and_means_of_the_stored_runs(runs):
    panel = widgets.schedules(runs, patients=20)
    for setting in ("pk-wide", "pk"):
        panel.setting.value = setting
        traces = keyed(panel)
        np.testing.assert_allclose(traces["greedy/medians"].x, [4, 8, 12, 16, 20])
        own = runs[(runs["setting"] == setting) & (runs["policy"] == "greedy")]["kl"]
        assert traces["greedy/value"].x[0] == pytest.approx(own.mean())
    assert "planned two experiments ahead" in words(panel)


def test_the_race_opens_where_there_are_published_values_and_compares_in_pairs(runs):
    panel = widgets.race(runs)
    assert panel.setting.value == "ces-100"
    assert "tree, H = 2 learns most" in words(panel)
    assert "tree, H = 2 − greedy, exact belief: 1.8 ± " in words(panel)
    panel.reference.value = "greedy"
    assert "greedy, exact belief − random: −0.50" in words(panel)
    for setting in ("pk", "pk-wide"):
        panel.setting.value = setting
        assert len(keyed(panel)["published"].y) == 0
    for _, metric in panel.metric.options:
        panel.metric.value = metric
    assert panel.status.value == ""


def test_settings_of_the_race_are_those_of_the_experiment(runs):
    panel = widgets.race(runs)
    assert [name for _, name in panel.setting.options] == [name for name in experiment.SETTINGS if name in set(runs["setting"])]

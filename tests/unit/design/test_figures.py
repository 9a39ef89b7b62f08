"""Figures of lab 03 on made-up trees and tables, whose numbers are known."""

import numpy as np
import pandas as pd
import pytest

from labkit.design import experiment, figures


def test_half_of_a_gaussian_lies_in_its_fifty_percent_region():
    axis = np.linspace(-5, 5, 201)
    x, y = np.meshgrid(axis, axis)
    mass = figures.credible_mass(-(x**2 + y**2) / 2)
    assert (mass <= 0.5).mean() * 100 == pytest.approx(2 * np.pi * np.log(2), rel=0.02)  # area of the disc that holds half
    assert mass.max() == pytest.approx(1)


def test_credible_mass_does_not_depend_on_the_constant_of_the_density():
    log_density = np.random.default_rng(0).normal(size=(7, 5))
    np.testing.assert_allclose(figures.credible_mass(log_density), figures.credible_mass(log_density + 800))


def test_children_share_their_parents_room_in_the_order_of_their_outcomes():
    parents = [-1, 0, 0, 1, 1, 2, 2]
    outcomes = [np.nan, 2.0, 1.0, 5.0, 4.0, 0.0, 9.0]
    height = figures.tree_layout(parents, outcomes)
    np.testing.assert_allclose(height, [0.5, 0.75, 0.25, 0.875, 0.625, 0.125, 0.375])


def test_a_tree_without_branches_is_a_line():
    np.testing.assert_allclose(figures.tree_layout([-1, 0, 1], [np.nan, 3.0, 1.0]), 0.5)


def test_what_can_be_reached_is_the_ball_where_it_is_small_and_the_box_where_it_is_large():
    centre, box = np.array([0.5, 0.9]), (np.zeros(2), np.ones(2))
    ball = figures.reach_outline(centre, *box, 0.05)
    np.testing.assert_allclose(np.linalg.norm(ball - centre, axis=1), 0.05)
    all_of_it = figures.reach_outline(centre, *box, np.inf)
    on_the_wall = np.isclose(all_of_it, 0) | np.isclose(all_of_it, 1)
    assert on_the_wall.any(1).all()
    both = figures.reach_outline(centre, *box, 0.3)
    assert both[:, 1].max() == pytest.approx(1)
    assert np.linalg.norm(both - centre, axis=1).max() == pytest.approx(0.3)
    assert np.linalg.norm(both - centre, axis=1).min() == pytest.approx(0.1)


def test_nothing_can_be_reached_with_nothing_left():
    at = np.array([0.2, 0.3])
    np.testing.assert_allclose(figures.reach_outline(at, np.zeros(2), np.ones(2), 0.0), np.broadcast_to(at, (97, 2)))


def test_the_corridor_draws_each_walk_from_its_start():
    figure = figures.corridor([1.0, 2.0, 3.0])
    walk = (np.array([1, 2]), np.array([0.5, 0.8]))
    figures.draw_corridor(figure, dict.fromkeys(("optimum", "greedy", "planner"), walk), start=0)
    traces = figures.keyed(figure)
    np.testing.assert_allclose(traces["planner1"].x, [0, 1, 2])
    np.testing.assert_allclose(traces["planner3"].y, [0, 0.5, 0.8])
    assert figure.layout.yaxis.range == (2.5, -0.5)  # time runs down
    assert figure.layout.yaxis.dtick == figure.layout.xaxis3.dtick == 1  # a short walk names every experiment


@pytest.fixture(scope="module")
def runs():
    """Eight paired rollouts of four policies in two settings; the tree is one nat above greedy, greedy two above the rest."""
    rng, rows = np.random.default_rng(0), []
    base = rng.normal(0, 0.5, 8)
    for setting in ("location-0.1", "ces-100"):
        for policy, better, plan in (("random", 0, 0.0), ("greedy", 2, 5.0), ("tree-2", 3, 40.0), ("tree-1", 3, 15.0)):
            kl = 5 + base + better
            table = {"setting": setting, "policy": policy, "seed": 0, "rollout": range(8), "kl": kl, "information": kl}
            rows.append(
                pd.DataFrame(table | {"spce": kl - 1, "ess": 500.0, "violation": 0.0, "plan_ms": plan, "belief_ms": 1.0})
            )
    return pd.concat(rows, ignore_index=True)


def drawn_race(runs, setting, metric="kl"):
    figure = figures.race()
    summary, pairs = experiment.summarise(runs), experiment.differences(runs)
    published = experiment.PUBLISHED[experiment.PUBLISHED["setting"] == setting]
    own = pairs[(pairs["setting"] == setting) & (pairs["first"] == "tree-2")]
    figures.draw_race(figure, summary[summary["setting"] == setting], own, metric, published)
    return figure, figures.keyed(figure)


def test_the_race_puts_each_policy_at_its_time_and_information(runs):
    _, traces = drawn_race(runs, "ces-100")
    at = dict(zip(traces["policies"].customdata, zip(traces["policies"].x, traces["policies"].y, strict=True), strict=True))
    mean = runs[(runs["setting"] == "ces-100") & (runs["policy"] == "tree-2")]["kl"].mean()
    assert at[figures.NAMES["tree-2"]] == pytest.approx((41.0, mean))


def test_differences_of_the_race_are_paired(runs):
    _, traces = drawn_race(runs, "location-0.1")
    gaps = dict(zip(traces["differences"].y, traces["differences"].x, strict=True))
    assert gaps[f"{figures.NAMES['greedy']} (8)"] == pytest.approx(1)
    np.testing.assert_allclose(traces["differences"].error_x.array, 0, atol=1e-12)  # the luck is common to both


def test_published_values_are_lines_that_say_whose_model_they_belong_to(runs):
    _, traces = drawn_race(runs, "ces-100", "spce")
    assert 7.03 in traces["published"].y
    assert all(text.endswith(", published") for text in traces["published/names"].text)
    _, traces = drawn_race(runs, "location-0.1")
    assert len(traces["published"].y) == 0


def test_a_policy_alone_in_its_setting_can_be_drawn(runs):
    alone = runs[runs["policy"] == "greedy"]
    figure = figures.race()
    summary = experiment.summarise(alone[alone["setting"] == "ces-100"])
    none = experiment.differences(runs).iloc[:0]
    figures.draw_race(figure, summary, none, "kl", experiment.PUBLISHED.iloc[:0])
    assert len(figures.keyed(figure)["policies"].x) == 1


def test_the_ablation_shows_the_variant_minus_the_default(runs):
    figure = figures.ablation(experiment.differences(runs), experiment.summarise(runs))
    gain = dict(zip(figure.data[0].y, figure.data[0].x, strict=True))
    assert gain[f"{figures.NAMES['greedy']} (8)"] == pytest.approx(-1)
    cost = dict(zip(figure.data[1].y, figure.data[1].x, strict=True))
    assert cost[f"{figures.NAMES['tree-1']} (8)"] == pytest.approx(15 / 40)


def test_step_limits_are_in_the_order_of_their_size(runs):
    wide = runs[runs["setting"] == "location-0.1"]
    both = pd.concat([wide, wide.assign(setting="location-0.05", kl=wide["kl"] - 1)])
    figure = figures.step_limits(experiment.summarise(both))
    tree = next(trace for trace in figure.data if trace.name == figures.NAMES["tree-2"])
    np.testing.assert_allclose(tree.x, [0.05, 0.1])
    assert tree.y[1] - tree.y[0] == pytest.approx(1)


def test_every_policy_of_the_plan_has_a_name_and_a_role():
    planned = {policy for study in experiment.PLAN for policy in study.policies}
    assert planned <= set(figures.NAMES)
    assert planned <= set(figures.ROLES)

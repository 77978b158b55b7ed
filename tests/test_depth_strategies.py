"""Strategies of shape against closed forms: Pareto frontiers, scaling paths, the recommended shape and its valley."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.depth_benefit.estimands import by_shape
from scalinglab.depth_benefit.strategies import (
    KAPLAN_WIDE,
    LEVINE,
    compare_paths,
    pareto_frontier,
    recommend_shape,
    scaling_paths,
)
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.simulation import grid_design, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.02, "gamma2": 0.016, "B": 410.7, "beta": 0.28}
R_STAR = R0 * math.exp(-0.02 / 0.032)


def runs_of(sigma, rng=0):
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(6, 20, 60, 180))
    return by_shape(simulate("shape", TRUTH, design, sigma=sigma, rng=rng))


@pytest.fixture(scope="module")
def exact():
    return fit("shape", runs_of(1e-9))


@pytest.fixture(scope="module")
def noisy():
    return fit("shape", runs_of(0.002, rng=1))


# ---- Pareto ---------------------------------------------------------------------------------------------------------------
def points(values):
    return pd.DataFrame(values, columns=["params", "seconds", "loss"]).assign(
        run_id=[f"r{i}" for i in range(len(values))]
    )


def test_frontier_by_hand():
    table = points([(1, 9, 3.0), (2, 5, 2.8), (3, 7, 2.9), (4, 1, 2.7), (4, 1, 2.7), (5, 1, 2.7)])
    made = pareto_frontier(table)
    assert made["on_frontier"].tolist() == [True, True, False, True, True, False]
    assert made["dominated_by"].tolist() == ["", "", "r1", "", "", "equal loss at lower cost"]
    assert made["behind"].tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0])
    both = pareto_frontier(table, ["params", "seconds"])
    assert both["on_frontier"].tolist() == [True, True, False, True, True, False]
    grouped = pareto_frontier(table.assign(architecture=list("aaabbb")), by=["architecture"])
    assert grouped["on_frontier"].tolist() == [True, True, False, True, True, False]


def test_frontier_carries_the_error_of_the_gap():
    table = points([(1, 1, 3.0), (2, 1, 3.01)]).assign(loss_se=[0.003, 0.004])
    made = pareto_frontier(table)
    assert made["behind_se"].tolist() == pytest.approx([0.0, 0.005])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.floats(1, 5)), min_size=1, max_size=12))
def test_no_point_of_the_frontier_is_beaten(values):
    table = points(values)
    made = pareto_frontier(table, ["params", "seconds"])
    assert made["on_frontier"].any()
    for _, p in made[made["on_frontier"]].iterrows():
        cheaper = table[(table["params"] <= p["params"]) & (table["seconds"] <= p["seconds"])]
        assert not (cheaper["loss"] < p["loss"]).any()


def test_frontier_guesses_no_cost():
    with pytest.raises(SchemaError, match="needs the column 'memory_bytes'"):
        pareto_frontier(points([(1, 1, 3.0)]), "memory_bytes")
    with pytest.raises(SchemaError, match="must be finite"):
        pareto_frontier(points([(1, 1, math.nan)]))


# ---- paths ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("params", [5e7, 3e8, 1e10])
def test_paths_are_what_they_say(params):
    paths = scaling_paths(base_depth=12, base_width=768)
    depth = {name: path(params) for name, path in paths.items()}
    width = {name: math.sqrt(params / (12 * v)) for name, v in depth.items()}
    assert depth["width_first"] == 12
    assert width["constant_aspect"] / depth["constant_aspect"] == pytest.approx(64)
    assert width["kaplan"] / depth["kaplan"] == pytest.approx(KAPLAN_WIDE)
    assert math.log(width["levine"]) == pytest.approx(LEVINE[0] + LEVINE[1] * depth["levine"], abs=1e-9)
    if depth["depth_first"] < 32:
        assert width["depth_first"] == pytest.approx(768)
    else:
        assert depth["depth_first"] == 32
    with pytest.raises(ConfigError, match="must be positive"):
        scaling_paths(base_depth=0)


def test_levine_recommends_its_published_trillion_parameter_shape():
    """The paper's rule at 1e12 parameters is near 95 layers and width 30,000 (within 5 %)."""
    depth = scaling_paths()["levine"](1e12)
    assert depth == pytest.approx(95, rel=0.05)
    assert math.sqrt(1e12 / (12 * depth)) == pytest.approx(30_000, rel=0.05)


def a_term(params, aspect):
    u = math.log(aspect / R0)
    return 406.4 * params**-0.34 * math.exp(0.02 * u + 0.016 * u * u)


def test_paths_at_equal_params_are_the_law(exact):
    table = compare_paths(exact, [2e8], tokens=4e9, kappa=12.0).set_index("path")
    best = a_term(2e8, R_STAR)
    for name, row in table.iterrows():
        assert row["loss"] == pytest.approx(1.69 + a_term(2e8, row["aspect"]) + 410.7 * 4e9**-0.28, abs=2e-6), name
        assert row["given_up"] == pytest.approx(a_term(2e8, row["aspect"]) - best, abs=2e-5)
        assert row["difference"] == pytest.approx(row["loss"] - table.loc["constant_aspect", "loss"], abs=1e-12)
    assert table.loc["kaplan", "beyond"]
    assert not table.loc["constant_aspect", "beyond"]
    assert table.loc["constant_aspect", ["difference", "difference_low", "difference_high"]].tolist() == [0, 0, 0]


def test_paths_at_equal_flops_are_compute_optimal(exact):
    """On a path of constant aspect the best N has the closed form of Chinchilla with A times its shape factor."""
    table = compare_paths(exact, [1e19], by="flops").set_index("path").loc["constant_aspect"]
    amplitude = 406.4 * math.exp(0.02 * math.log(64 / R0) + 0.016 * math.log(64 / R0) ** 2)
    g = (0.34 * amplitude / (0.28 * 410.7)) ** (1 / 0.62)
    assert table["params"] == pytest.approx(g * (1e19 / 6) ** (0.28 / 0.62), rel=1e-3)
    assert 6 * table["params"] * table["tokens"] == pytest.approx(1e19, rel=1e-9)


def test_intervals_of_paths_hold_the_truth(noisy):
    table = compare_paths(noisy, [2e8], tokens=4e9, kappa=12.0).set_index("path")
    base = a_term(2e8, 64.0)
    for name in ("depth_first", "width_first", "levine"):
        row = table.loc[name]
        truth = a_term(2e8, row["aspect"]) - base
        wide = row["difference_high"] - row["difference_low"]
        assert abs(row["difference"] - truth) < wide  # twice the half-width: a gross error
        assert wide > 0


def test_paths_refuse(noisy):
    with pytest.raises(ConfigError, match="is no path"):
        compare_paths(noisy, [2e8], reference="zigzag")
    with pytest.raises(ConfigError, match="must be positive numbers"):
        compare_paths(noisy, [-1.0])
    with pytest.raises(ConfigError, match="budgets are 'params' or 'flops'"):
        compare_paths(noisy, [1e8], by="dollars")
    with pytest.raises(ConfigError, match="no shape in it"):
        compare_paths(fit("chinchilla", runs_of(0.002)), [1e8])


# ---- recommendation -----------------------------------------------------------------------------------------------------
def test_recommendation_is_the_closed_form(exact):
    made = recommend_shape(exact, budget=2e8, tokens=4e9, tolerance=0.003, kappa=12.0)
    assert made.aspect == pytest.approx(R_STAR, rel=1e-3)
    assert made.loss == pytest.approx(1.69 + a_term(2e8, R_STAR) + 410.7 * 4e9**-0.28, abs=1e-6)
    # the valley: A N^-alpha (e^q - e^q*) = tolerance, q - q* = gamma2 (u - u*)^2
    half = math.sqrt(math.log1p(0.003 / a_term(2e8, R_STAR)) / 0.016)
    assert made.valley == pytest.approx((R_STAR * math.exp(-half), R_STAR * math.exp(half)), rel=2e-3)
    assert made.safe == pytest.approx(made.valley, rel=1e-2)  # no noise
    assert made.located
    assert not made.extrapolated
    # the whole shape: near the optimum, and what rounding costs is the law's own difference
    assert made.width % 64 == 0
    assert made.rounding == pytest.approx(a_term(2e8, made.width / made.depth) - a_term(2e8, R_STAR), abs=1e-6)
    assert 12 * made.depth * made.width**2 == pytest.approx(2e8, rel=0.15)


def test_recommendation_at_a_flop_budget_is_compute_optimal(exact):
    made = recommend_shape(exact, budget=1e19, by="flops", kappa=12.0)
    amplitude = 406.4 * math.exp(-(0.02**2) / (4 * 0.016))
    g = (0.34 * amplitude / (0.28 * 410.7)) ** (1 / 0.62)
    assert made.params == pytest.approx(g * (1e19 / 6) ** (0.28 / 0.62), rel=1e-4)
    assert made.aspect == pytest.approx(R_STAR, rel=1e-3)


def test_recommendation_states_its_uncertainty(noisy):
    made = recommend_shape(noisy, budget=2e8, tokens=4e9)
    assert made.aspect_low < R_STAR < made.aspect_high
    assert made.loss_low < made.loss < made.loss_high
    assert (made.curve["upper"] >= made.curve["given_up"]).all()
    assert made.safe is None or (made.valley[0] <= made.safe[0] and made.safe[1] <= made.valley[1])
    assert "blocks x width" in made.summary()
    outside = recommend_shape(noisy, budget=1e12)
    assert outside.extrapolated
    assert "extrapolated" in outside.summary()


def test_an_optimum_at_the_edge_is_not_an_optimum():
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(60, 100, 180, 300))
    monotone = {**TRUTH, "gamma1": 0.05, "gamma2": 0.001}
    made = recommend_shape(fit("shape", by_shape(simulate("shape", monotone, design, sigma=0.001))), budget=2e8)
    assert made.extrapolated
    assert not made.located
    assert (made.aspect_low, made.aspect_high) == (0.0, math.inf)
    assert any("edge" in n for n in made.notes)


def test_width_depth_law_recommends_too():
    truth = {"E": 1.7, "A": 40.0, "a": 0.7, "B": 3.0, "b": 0.9, "C": 410.7, "c": 0.28}
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(6, 20, 60, 180))
    made = fit("width_depth", by_shape(simulate("width_depth", truth, design, sigma=1e-9)))
    got = recommend_shape(made, budget=2e8, kappa=12.0)
    # closed form at fixed N: L* = [2 b B / (a A)]^(1 / (b + a/2)) (N / kappa)^(a / (a + 2 b))
    depth = (2 * 0.9 * 3.0 / (0.7 * 40.0)) ** (1 / (0.9 + 0.35)) * (2e8 / 12) ** (0.7 / (0.7 + 1.8))
    assert got.aspect == pytest.approx(math.sqrt(2e8 / (12 * depth)) / depth, rel=2e-3)
    assert got.located


def test_recommendation_refuses(noisy):
    with pytest.raises(ConfigError, match="must be positive"):
        recommend_shape(noisy, budget=0)
    with pytest.raises(ConfigError, match="'params' or 'flops'"):
        recommend_shape(noisy, budget=1e8, by="tokens")
    assert np.isfinite(recommend_shape(noisy, budget=1e8).loss)

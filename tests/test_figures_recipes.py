"""Figures that only recipes of a paper draw: what is drawn where."""

from __future__ import annotations

import matplotlib
import pandas as pd
import pytest

from scalinglab.report import style
from scalinglab.report.paper.recipes.benchmarks import PowerOptions, coverage_figure, verdict_power_figure
from scalinglab.report.paper.recipes.floors import FloorOptions, floor_figure
from scalinglab.report.paper.registry import Options

NAN = float("nan")


def words(made):
    return " ".join(t.get_text() for t in made.findobj(matplotlib.text.Text))


def floors():
    """A floor that agrees, one that is off, and one at its bound, without limits."""
    return pd.DataFrame({
        "corpus": ["a", "b", "c"], "entropy": [1.40, 0.10, 0.70], "E": [1.39, 0.01, 0.0], "se": [0.01, 0.02, NAN],
        "low": [1.37, 0.0, NAN], "high": [1.41, 0.06, NAN], "lowest": [1.41, 0.11, 0.76],
    })  # fmt: skip


def test_floors_are_drawn_less_the_entropy_and_told_as_they_are():
    made = floor_figure(floors(), FloorOptions())
    (ax,) = made.axes
    dots = next(line for line in ax.lines if str(line.get_label()).startswith("fitted floor"))
    assert list(dots.get_xdata()) == pytest.approx([-0.01, -0.09])
    low, high = ax.get_xlim()
    assert -0.2 < low < -0.1 < 0.06 < high < 0.1  # the floor at its bound doesn't squeeze the others
    (arrow,) = [line for line in ax.lines if line.get_marker() == "<"]
    assert list(arrow.get_ydata()) == [2]
    told = words(made)
    assert "\N{MINUS SIGN}0.70" in told
    assert "1.390 [1.370, 1.410], entropy 1.400" in told
    assert "at its bound 0, entropy 0.700" in told


def test_floors_without_any_interval_are_all_on_the_axis():
    made = floor_figure(floors().assign(low=NAN, high=NAN), FloorOptions())
    assert made.axes[0].get_xlim()[0] < -0.7
    assert not [line for line in made.axes[0].lines if line.get_marker() == "<"]


def test_no_two_targets_look_alike():
    names = [f"t{k}" for k in range(8)]
    table = pd.DataFrame({"scenario": "A", "runs": 10, "target": names, "coverage": 0.95, "mc_se": 0.005})
    made = coverage_figure(table, Options())
    looks = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor())
        for line in made.axes[0].lines
        if line.get_marker() != "None"
    }
    assert len(looks) == 8
    assert len({colour for colour, *_ in looks}) == 8 > len(style.PALETTE)
    assert "A: independent rows" in words(made)
    other = coverage_figure(table.assign(scenario="own"), Options())
    assert "Scenario own" in words(other)


def test_the_base_plan_is_said_in_words():
    table = pd.DataFrame({
        "plan": ["gate", "one seed"], "truth": "both", "depths": 4, "rates": 7, "seeds": [2, 1], "sigma": 0.005, "tau": 0.003,
        "runs": [224, 112], "trials": 400, "right": [0.9, 0.7],
    })  # fmt: skip
    told = words(verdict_power_figure(table, PowerOptions()))
    assert "gate" not in told
    assert "base plan (224 runs)" in told
    assert "4 depths, 7 learning rates, 2 seeds" in told
    bare = words(verdict_power_figure(table[["plan", "truth", "runs", "trials", "right"]], PowerOptions()))
    assert "learning rates" not in bare

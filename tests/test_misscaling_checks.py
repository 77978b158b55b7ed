"""Coordinate checks find their arms, and only those; arms that must not be compared are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from learning_rate_runs import study

from scalinglab.coordinates import Axis, CoordinateCheck, limits_for
from scalinglab.misscaling import Method, misscaling, take_in
from scalinglab.misscaling.checking import arm_name, match_checks

QUICK = Method(draws=99)
MOVED = "completep; matrix.branch.lr depth 0 -> 0.5"  # as the trainer writes it in a run table


def check(architecture: str, named: str, slope: float, axis: Axis = "depth", sizes: tuple[int, ...] = (2, 4, 8, 16)) -> CoordinateCheck:  # fmt: skip
    values = {("z.change" if axis == "depth" else "h.change", 1): np.array([np.array(sizes, float) ** slope] * 2)}
    return CoordinateCheck(architecture, named, axis, sizes, (0, 1), 0.01, "all", values, limits_for(axis, "all"))


def rows(*arms: tuple[str, str], widths: tuple[int, ...] = (64,)) -> pd.DataFrame:
    return pd.DataFrame(
        [{"architecture": a, "parametrization": p, "depth": d, "width": w} for a, p in arms for d in (2, 4, 16) for w in widths]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("completep", "completep"),
        ("native(lns)", "native"),
        ("completep: matrix.branch.lr depth 0 -> 0.5", MOVED),
        ("native(lns): vector.trunk.lr depth -1 -> -0.5", "native; vector.trunk.lr depth -1 -> -0.5"),
    ],
)
def test_names_of_checks_are_those_of_run_tables(told: str, expected: str) -> None:
    assert arm_name(check("lns", told, 0.0)) == expected


def test_names_agree_with_those_the_planner_writes() -> None:
    from scalinglab.planning import expand, row
    from scalinglab.sweeps import load_sweep

    for run in {
        r.parametrization + str(r.perturb): r for r in expand(load_sweep("embedded:misscaling_entries")).runs
    }.values():
        assert arm_name(check(run.architecture, run.scaling().description, 0.0)) == row(run)["parametrization"]


def test_a_check_speaks_about_its_own_arm_alone() -> None:
    table = rows(("pre_ln", "completep"), ("lns", "completep"), ("pre_ln", "depth_mup"))
    made = match_checks(table, [check("pre_ln", "completep", 0.9)], naive="sp")
    assert set(made.refused) == {("pre_ln", "completep")}
    made = match_checks(
        table, [check("hc", "completep", 0.9), check("pre_ln", "completep: x lr 0 -> 1", 0.9)], naive="sp"
    )
    assert not made.refused
    assert sum("is of no arm of these runs" in f for f in made.findings) == 2


def test_an_axis_along_which_the_runs_do_not_differ_decides_nothing() -> None:
    wide = check("pre_ln", "completep", 0.9, "width", (64, 128, 256, 512))
    assert not match_checks(rows(("pre_ln", "completep")), [wide], naive="sp").refused
    both = rows(("pre_ln", "completep"), widths=(32, 64))
    assert "over width failed" in match_checks(both, [wide], naive="sp").refused["pre_ln", "completep"]
    deep = check("pre_ln", "completep", 0.0)
    assert any("no coordinate check over width" in f for f in match_checks(both, [deep], naive="sp").findings)


def test_the_control_should_fail_and_a_check_should_reach_as_far_as_the_runs() -> None:
    made = match_checks(rows(("pre_ln", "sp")), [check("pre_ln", "sp", 0.9)], naive="sp")
    assert not made.refused
    assert not made.findings
    assert any(
        "should have failed" in f
        for f in match_checks(rows(("pre_ln", "sp")), [check("pre_ln", "sp", 0.0)], naive="sp").findings
    )
    near = check("pre_ln", "completep", 0.0, sizes=(2, 4, 8))
    assert any(
        "spans depth x4, its runs x8" in f
        for f in match_checks(rows(("pre_ln", "completep")), [near], naive="sp").findings
    )


def test_an_arm_that_is_mis_scaled_on_purpose_stays_unless_it_is_asked_for_as_scaled() -> None:
    failed = check("pre_ln", "completep: matrix.branch.lr depth 0 -> 0.5", 0.9)
    table = rows(("pre_ln", "completep"), ("pre_ln", MOVED))
    made = match_checks(table, [failed], naive="sp", scaled=["completep"])
    assert not made.refused
    assert made.verdicts["pre_ln", MOVED] == "fail"
    assert set(match_checks(table, [failed], naive="sp", scaled=[MOVED]).refused) == {("pre_ln", MOVED)}


def test_a_check_with_other_options_is_not_of_these_runs() -> None:
    table = rows(("hyper_connections", "native")).assign(options='{"streams":2}')
    bad = check("hyper_connections", "native(hyper_connections)", 0.9)
    assert match_checks(table, [replace(bad, setting={"options": {"streams": 2}})], naive="sp").refused
    assert not match_checks(table, [replace(bad, setting={"options": {"streams": 4}})], naive="sp").refused
    default = table.assign(options="")
    assert match_checks(default, [replace(bad, setting={"options": {}})], naive="sp").refused


def test_data_in_another_order_is_no_pair() -> None:
    runs = study("both")
    assert take_in(runs.assign(data_seed=runs["seed"])).paired is True
    other = runs.assign(data_seed=np.where(runs["architecture"] == "A0", runs["seed"] + 5, runs["seed"]))
    report = misscaling(other, method=QUICK, hierarchical=False)
    assert report.grids.paired is False
    assert report.verdict == "inconclusive"
    assert any("differ in data_seed" in r for r in report.reasons)


def test_recipes_that_differ_between_arms_are_told() -> None:
    runs = study("both")
    mixed = runs.assign(schedule=np.where(runs["architecture"] == "A0", "wsd", "cosine"))
    assert any("arms differ in schedule" in r for r in misscaling(mixed, method=QUICK, hierarchical=False).reasons)
    assert not any("arms differ" in r for r in misscaling(runs, method=QUICK, hierarchical=False).reasons)

"""Several recipes in one table, slopes and their margin, what counts as a re-analysis, words for both ways of asking."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scalinglab.depth_benefit import depth_benefit, validate
from scalinglab.depth_benefit.cells import brown_forsythe, cell_table, fit_cells
from scalinglab.depth_benefit.effects import Effect
from scalinglab.depth_benefit.intake import take_in
from scalinglab.depth_benefit.labels import Evidence, decide
from scalinglab.depth_benefit.phrasing import both
from scalinglab.depth_benefit.recipes import COMMON_RATE, at_one_rate, separate
from scalinglab.depth_benefit.robustness import with_stability
from scalinglab.errors import ConfigError
from scalinglab.report.html import html_report
from scalinglab.simulation import grid_design, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}


def small(aspects=(8, 16, 32, 64, 128), seeds=2, sigma=0.0015, rng=0):
    design = grid_design((1e8,), (2e9,), aspects=aspects, architectures=("pre_ln", "hc"))
    return simulate("shape", TRUTH, design, sigma=sigma, seeds=seeds, rng=rng)


def two_recipes(harm=0.06, level=0.02, rng=5, **options):
    """CompleteP as simulated; SP worse everywhere, and for pre_ln by `harm` more per ln depth."""
    good, bad = small(**options), small(rng=rng, **options)
    x = np.log(bad["depth"])
    bad["loss"] += level + harm * (x - x.min()) * (bad["architecture"] == "pre_ln")
    parts = [good.assign(parametrization="completep"), bad.assign(parametrization="sp")]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(run_id=table["parametrization"] + "/" + table["run_id"])


@pytest.fixture(scope="module")
def limited():
    return depth_benefit(two_recipes(), draws=99)


# ---- E8 and RECIPE_LIMITED -----------------------------------------------------------------------------------------------
def test_labels_rest_on_the_better_recipe_and_e8_stands_beside(limited):
    alone = depth_benefit(two_recipes().query("parametrization == 'completep'"), draws=99, reanalyse=False)
    assert limited.label == alone.label == {"pre_ln": "DEPTH_BENEFIT_MATERIAL", "hc": "DEPTH_BENEFIT_MATERIAL"}
    ours, theirs = (r.outcome.effects.pick("E1", "pre_ln") for r in (limited, alone))
    assert ours.estimate == theirs.estimate
    assert "RECIPE_LIMITED" in limited.verdicts["pre_ln"].modifiers
    assert "RECIPE_LIMITED" not in limited.verdicts["hc"].modifiers
    e = limited.outcome.effects.pick("E8", "pre_ln")
    span = math.log(e.contrast["depth_deep"] / e.contrast["depth_shallow"])
    assert abs(e.estimate - 0.06 * span) < 4 * e.se
    assert e.variant == "completep less sp"
    assert "SEVERAL_RECIPES" in {w.code for w in limited.warnings}
    assert limited.rivals["misscaling/pre_ln/sp"].startswith("supported")
    assert limited.rivals["misscaling/hc/sp"].startswith("open")
    t6 = limited.tables["T6"].set_index(["analysis", "architecture"])
    assert t6.loc[("recipe: sp", "pre_ln"), "label"] == "DEPTH_HARM_MATERIAL"
    rows = limited.tables["T3"].query("estimand == 'E8'")
    assert set(rows["architecture"]) == {"pre_ln", "hc"}
    assert rows["p_holm"].notna().all()
    assert validate(limited.result).labels.modifiers["pre_ln"][-1] == "RECIPE_LIMITED"
    page = html_report(limited)
    assert "Depends on the recipe" in page
    assert "merely mis-scaled, pre_ln" in page


def test_e8_is_the_paired_regression_of_cell_differences():
    runs = take_in(two_recipes())
    made = depth_benefit(two_recipes(), draws=99, reanalyse=False)
    parts = {r: cell_table(runs.runs[runs.runs["parametrization"] == r]) for r in ("completep", "sp")}
    keys = ["architecture", "depth", "width"]
    gap = parts["completep"].set_index(keys)["loss"] - parts["sp"].set_index(keys)["loss"]
    table = parts["completep"].assign(loss=[gap[tuple(r)] for r in parts["completep"][keys].to_numpy()])
    model = fit_cells(table)
    e = made.outcome.effects.pick("E8", "hc")
    assert e.estimate == pytest.approx(float(model.weights("hc") @ model.loss), rel=1e-9)
    assert e.se == pytest.approx(math.sqrt(model.variance(model.weights("hc"))[0]), rel=1e-9)


def test_the_recipe_can_be_asked_for():
    made = depth_benefit(two_recipes(), recipe="sp", draws=99, reanalyse=False)
    assert made.label["pre_ln"] == "DEPTH_HARM_MATERIAL"
    assert made.outcome.effects.pick("E8", "pre_ln").estimate < 0
    with pytest.raises(ConfigError, match="there are completep, sp"):
        depth_benefit(two_recipes(), recipe="mup")
    with pytest.raises(ConfigError, match="they name no parametrization"):
        depth_benefit(small().drop(columns="parametrization"), recipe="mup")


def test_recipes_that_agree_limit_nothing():
    """Two recipes of one truth: the modifier at the rate of the test's size, here in 12 of them."""
    hits = 0
    for k in range(6):
        made = depth_benefit(two_recipes(harm=0.0, level=0.01, rng=100 + k), draws=99, reanalyse=False)
        hits += sum("RECIPE_LIMITED" in v.modifiers for v in made.verdicts.values())
    assert hits <= 2


def test_pairs_and_laws_have_an_e8_as_well():
    runs = two_recipes(aspects=(16, 64), seeds=6)
    made = depth_benefit(runs, method="pairs", draws=99, reanalyse=False)
    assert "recipes as independent" in made.outcome.effects.pick("E8", "pre_ln").method
    assert "RECIPE_LIMITED" in made.verdicts["pre_ln"].modifiers


def test_architectures_of_different_recipes_are_told_apart_in_words():
    runs = small()
    runs["parametrization"] = np.where(runs["architecture"] == "hc", "completep", "sp")
    made = depth_benefit(runs, draws=99, reanalyse=False)
    assert "RECIPES_DIFFER" in {w.code for w in made.warnings}
    assert not [e for e in made.outcome.effects if e.estimand == "E8"]


def test_shapes_of_different_recipes_are_not_one_ladder():
    """Shallow shapes by SP and deep ones by CompleteP: no shared shape, so one recipe's shapes alone are analysed."""
    runs = small()
    runs["parametrization"] = np.where(runs["depth"] > 15, "completep", "sp")
    made = separate(take_in(runs))
    assert set(made.chosen.values()) == {"completep"}
    assert (made.main.runs["depth"] > 15).all()
    assert set(made.others) == {"sp"}


def test_one_rate_for_all_shapes_is_a_recipe():
    runs = small()
    x = np.log(runs["depth"]) - np.log(runs["depth"]).mean()
    grid = []
    for lr in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3):
        off = np.log(lr / 1e-3) + 0.6 * x  # the optimum falls with depth
        grid.append(runs.assign(lr=lr, run_id=runs["run_id"] + f"/{lr}", loss=runs["loss"] + 0.06 * off**2))
    table = pd.concat(grid, ignore_index=True)
    single = at_one_rate(take_in(table))
    assert set(single.runs["lr"]) == {1e-3}
    made = depth_benefit(table, draws=99)
    assert made.outcome.effects.pick("E8", "hc").variant == f"own learning rates less {COMMON_RATE}"
    assert at_one_rate(take_in(runs.assign(lr=1e-3))) is None  # nothing was tuned
    assert at_one_rate(take_in(runs)) is None


# ---- E1s and its margin ----------------------------------------------------------------------------------------------------
def test_a_slope_is_held_against_the_margin_per_ln_depth():
    made = depth_benefit(small(), estimand="E1s", draws=99)
    c = made.outcome.effects.pick("E1s", "hc").contrast
    per = made.outcome.margin / math.log(c["depth_deep"] / c["depth_shallow"])
    assert made.outcome.evidence["hc"].margin == pytest.approx(per)
    rows = [e for e in made.result["effects"] if e["estimand"] == "E1s"]
    assert all(e["margin"]["nats_per_lnL"] == pytest.approx(per) for e in rows)
    assert "nats_per_lnL" not in next(e for e in made.result["effects"] if e["estimand"] == "E1")["margin"]
    assert made.tables["T3"].query("estimand == 'E1s'")["margin"].to_numpy() == pytest.approx(per)
    assert f"one of {per:.2g} nats per ln L" in made.sentences["slope/hc"]
    assert "nats per ln L" in made.verdicts["hc"].reason
    assert f"margin of ±{per:.2g} nats per e-fold of depth" in html_report(made)
    validate(made.result)


def test_a_straight_profile_has_one_label_by_gap_and_by_slope():
    """Of a line the gap is the slope times ln(deep / shallow), so both must be judged alike."""
    for sigma in (0.001, 0.004, 0.012):
        runs = small(sigma=sigma)
        gap, slope = (depth_benefit(runs, estimand=e, degree=1, draws=99, reanalyse=False) for e in ("E1", "E1s"))
        for a in gap.verdicts:
            assert gap.verdicts[a].reading == slope.verdicts[a].reading


def test_lost_runs_move_a_slope_by_their_gap_per_ln_depth():
    runs = small(seeds=3)
    gone = (runs["architecture"] == "hc") & (runs["depth"] == runs["depth"].max()) & (runs["seed"] < 2)
    runs = runs.assign(status=np.where(gone, "diverged", "finished"), loss=runs["loss"].where(~gone))
    gap, slope = (depth_benefit(runs, estimand=e, draws=99) for e in ("E1", "E1s"))
    assert gap.label["hc"] == slope.label["hc"] == "SELECTION_SENSITIVE"
    c = gap.outcome.effects.pick("E1", "hc").contrast
    span = math.log(c["depth_deep"] / c["depth_shallow"])
    width = [np.ptp(r.outcome.evidence["hc"].bounds) for r in (gap, slope)]
    assert width[1] == pytest.approx(width[0] / span)
    shift = []
    for r in (gap, slope):
        row = r.tables["T6"].set_index(["analysis", "architecture"]).loc[("divergence counts as worst", "hc")]
        shift.append(row["estimate"] - r.outcome.evidence["hc"].estimate)
    assert shift[1] == pytest.approx(shift[0] / span)


def test_a_gap_in_other_units():
    base = Effect("E1s", "a", 0.1, 0.01, 9.0, "nats/lnL", "t", contrast={"depth_shallow": 16.0, "depth_deep": 32.0})
    assert base.of_gap(0.02) == pytest.approx(0.02 / math.log(2))
    assert replace(base, unit="nats").of_gap(0.02) == 0.02
    assert math.isnan(replace(base, unit="ln ratio").of_gap(0.02))
    assert math.isnan(replace(base, contrast={}).of_gap(0.02))


# ---- what counts -----------------------------------------------------------------------------------------------------------
def test_analyses_that_cannot_move_b_are_not_counted(limited):
    t6 = limited.tables["T6"]
    for a, v in limited.verdicts.items():
        own = t6[(t6["architecture"] == a) & (t6["label"] != "")]
        e = limited.outcome.evidence[a]
        idle = np.isclose(own["estimate"], e.estimate, rtol=1e-9) & np.isclose(own["se"], e.se, rtol=1e-9)
        idle &= own["label"] == v.label
        barred = (own["label"] == "NOT_IDENTIFIED").to_numpy()  # its own error leaves too few degrees of freedom
        assert (own["counts"] == ~idle & ~barred).all()
        assert v.impossible == barred.sum() >= 1
        assert v.analyses == (~idle & ~barred).sum()
        assert v.identical == idle.sum() >= 1
        assert f"{v.identical} more left the estimate as it is" in v.robustness


def test_stability_counts_by_hand():
    verdict = decide(Evidence(0.02, 0.002, 20, (0.015, 0.025), (0.016, 0.024), 1e-6, 0.009))
    rows = [
        {"architecture": "a", "label": verdict.label, "counts": True},
        {"architecture": "a", "label": "FRAGILE", "counts": True},
        {"architecture": "a", "label": verdict.label, "counts": False},
        {"architecture": "", "label": "", "counts": False},
    ]
    made = with_stability({"a": verdict}, rows)["a"]
    assert (made.stable, made.analyses, made.identical) == (1, 2, 1)
    assert with_stability({"a": verdict}, rows[2:])["a"].robustness.startswith("no re-analysis that counts")


# ---- words -----------------------------------------------------------------------------------------------------------------
def test_options_are_named_for_python_and_the_command_line():
    assert both("rates", "published") == "rates='published' (--rates published)"
    assert both("charge_extras", True) == "charge_extras=True (--charge-extras)"
    assert both("where", "split == 'a'") == "where=\"split == 'a'\" (--where \"split == 'a'\")"
    assert both("shallow", ...) == "shallow= (--shallow)"
    runs = small()
    runs["tokens"] = np.where(runs["depth"] > 20, 2e9, 2.1e9)
    made = depth_benefit(runs, draws=99, reanalyse=False)
    assert set(made.label.values()) == {"CONFOUNDED_N"}
    assert "rates='published' (--rates published)" in made.advice[0]


@pytest.mark.parametrize("sizes", [(4, 5, 6), (7, 7), (5, 9, 4, 12)])
def test_brown_forsythe_is_scipys(sizes):
    rng = np.random.default_rng(sum(sizes))
    parts = [rng.normal(scale=1 + k, size=n) for k, n in enumerate(sizes)]
    assert brown_forsythe(parts) == pytest.approx(stats.levene(*parts, center="median").pvalue, rel=1e-10)

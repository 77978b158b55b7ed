"""The verdict on mis-scaling: planted truths, identities, refusals, and reports that say what they cannot answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from learning_rate_runs import study
from run_folders import write_run

from scalinglab.config import Base, Sweep
from scalinglab.coordinates import CoordinateCheck, limits_for
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.hypotheses import adjust
from scalinglab.misscaling import (
    TABLE,
    TRUTHS,
    Margins,
    Method,
    MisscalingReport,
    Plan,
    Truth,
    alternatives,
    fit_hierarchy,
    misscaling,
    sensitivity,
    take_in,
    validate,
    verdict_power,
    with_alternatives,
)
from scalinglab.misscaling.contrasts import Estimate, apart, slopes, spread
from scalinglab.misscaling.rules import READINGS, decide, drift_states, gain_states, holm, overall
from scalinglab.parametrization import parametrization
from scalinglab.planning import expand, plan
from scalinglab.readers import read_runs
from scalinglab.sweeps import load_sweep

QUICK = Method(draws=299)


def judged(truth: str, **options: object) -> MisscalingReport:
    return misscaling(study(truth), method=QUICK, hierarchical=False, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def both() -> MisscalingReport:
    return misscaling(study("both"), method=QUICK)


# ---- verdicts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("truth", list(TRUTHS))
def test_planted_truths_are_found(truth: str) -> None:
    report = judged(truth)
    assert report.verdict == TRUTHS[truth].verdict
    gains = report.decomposition.set_index("name")["estimate"]
    assert gains["W:A0"] == pytest.approx(TRUTHS[truth].architecture, abs=0.010)  # three standard errors
    assert gains["V"] == pytest.approx(TRUTHS[truth].parametrization, abs=0.010)
    drift = report.drift.set_index(["architecture", "parametrization"])["slope"]
    assert drift["pre_ln", "sp"] == pytest.approx(TRUTHS[truth].drift, abs=0.12)


def test_the_same_table_in_any_order_gives_the_same_report() -> None:
    runs = study("mis-scaling")
    mixed = runs.sample(frac=1.0, random_state=3)
    one, other = (misscaling(t, method=QUICK, hierarchical=False) for t in (runs, mixed))
    pd.testing.assert_frame_equal(one.drift.sort_values(["architecture", "parametrization"], ignore_index=True),
                                  other.drift.sort_values(["architecture", "parametrization"], ignore_index=True), rtol=0.2)  # fmt: skip
    points = [
        r.envelopes.sort_values(["architecture", "parametrization", "depth"])["ln_optimum"].to_numpy()
        for r in (one, other)
    ]
    np.testing.assert_allclose(points[0], points[1], atol=1e-9)  # the fits; draws follow the order of the arms
    assert one.verdict == other.verdict


def test_the_decomposition_telescopes(both: MisscalingReport) -> None:
    v = both.decomposition.set_index("name")["estimate"]
    gain = lambda arm, which: v[f"gain {arm}, {which}"]  # noqa: E731
    assert v["M"] == pytest.approx(v["U"] + v["V"], abs=1e-12)
    whole = gain("A0 / completep", "tuned") - gain("pre_ln / sp", "fixed")
    assert v["U"] + v["V"] + v["W:A0"] == pytest.approx(whole, abs=1e-12)
    assert v["gap:A0"] == pytest.approx(v["U"] + v["V"] + v["W:A0"] - v["M_own:A0"], abs=1e-12)
    assert v["three_way:A0"] == pytest.approx(v["W:A0"] - v["gap:A0"], abs=1e-12)
    assert v["three_way:A0"] == pytest.approx(v["M_own:A0"] - v["M"], abs=1e-12)
    assert f"A0: M / (M + W) = {v['M'] / (v['M'] + v['W:A0']):.2f}" in both.reasons


def test_a_depth_gain_is_the_slope_of_the_minima(both: MisscalingReport) -> None:
    own = both.envelopes[(both.envelopes["architecture"] == "A0") & (both.envelopes["parametrization"] == "sp")]
    slope = np.polyfit(np.log(own["depth"].astype(float)), own["minimum"].astype(float), 1)[0]
    assert both.decomposition.set_index("name")["estimate"]["gain A0 / sp, tuned"] == pytest.approx(-slope, abs=1e-10)


def test_the_hierarchical_model_agrees_and_recovers_the_truth(both: MisscalingReport) -> None:
    made = both.hierarchy
    assert made is not None
    assert made.converged
    assert made.sigma == pytest.approx(0.005, rel=0.15)
    assert made.kappa == pytest.approx(0.008, abs=0.004)
    w, se = made.difference({"gain[A0/completep]": 1.0, "gain[pre_ln/completep]": -1.0})
    assert abs(w - 0.03) < 3 * se
    assert w == pytest.approx(both.decomposition.set_index("name")["estimate"]["W:A0"], abs=0.004)
    table = made.table.set_index(["architecture", "parametrization"])
    assert abs(table.loc[("pre_ln", "sp"), "drift"] + 0.75) < 3 * table.loc[("pre_ln", "sp"), "drift_se"]
    held = fit_hierarchy(both.grids, both.analysis.curves, tau=0.006)  # type: ignore[union-attr]
    assert held.tau == pytest.approx(0.006, rel=0.02)
    assert held.difference({"gain[A0/completep]": 1.0, "gain[pre_ln/completep]": -1.0})[1] > se


def test_a_gain_that_hangs_on_the_recipe_is_said_to() -> None:
    assert any(
        r.startswith("pre_ln: ") and "RECIPE_LIMITED" in r for r in judged("mis-scaling").reasons
    )  # .01 at one rate, .08 tuned
    assert not any("RECIPE_LIMITED" in r for r in judged("architecture").reasons)


def test_two_candidates_share_one_holm_family() -> None:
    report = misscaling(study("architecture", Plan(candidates=2)), method=QUICK, hierarchical=False)
    table = report.decomposition.set_index("name")
    family = ["M", "W:A0", "W:A1"]
    expected = adjust({n: float(table["p"][n]) for n in family})
    np.testing.assert_allclose(table["p_adj"][family].astype(float), expected[family], rtol=1e-10)
    assert set(report.verdicts) == {"A0", "A1"}
    assert report.verdict == "H_arch"


def test_reference_arms_alone_say_what_they_decide() -> None:
    runs = study("mis-scaling")
    report = misscaling(runs[runs["architecture"] == "pre_ln"], method=QUICK, hierarchical=False)
    assert report.verdict == "inconclusive"
    assert any("it is mis-scaled" in r for r in report.reasons)
    assert any("no candidate" in r for r in report.reasons)


def test_an_architecture_gain_is_provisional_until_a_mechanism_is_shown() -> None:
    assert any("provisional" in r for r in judged("architecture").reasons)
    assert not any("provisional" in r for r in judged("architecture", mechanism={"A0": True}).reasons)
    assert any("in doubt" in r for r in judged("architecture", mechanism={"A0": False}).reasons)


def test_the_reference_can_be_chosen_on_seeds_that_are_then_left_out() -> None:
    plan = Plan(seeds=3)
    runs = study("mis-scaling", plan)
    report = misscaling(runs, method=QUICK, hierarchical=False, choose_on=[0], scaled=["sp", "completep"], naive="none")
    assert report.roles.scaled == ("pre_ln", "completep")  # .03 per e-fold better
    assert report.grids.seeds == ("1", "2")
    assert any("best on seeds 0" in r for r in report.reasons)
    with pytest.raises(ConfigError, match="not all of them"):
        misscaling(runs, choose_on=[0, 1, 2])


# ---- what must be refused ------------------------------------------------------------------------------------------------
def check(architecture: str, named: str, slope: float) -> CoordinateCheck:
    values = {("z.change", 1): np.array([[1.0, 2.0**slope, 4.0**slope]] * 2)}
    return CoordinateCheck(
        architecture, named, "depth", (2, 4, 8), (0, 1), 0.01, "all", values, limits_for("depth", "all")
    )


def test_an_arm_whose_coordinate_check_fails_is_refused() -> None:
    report = judged(
        "both", checks=[check("A0", "completep", 0.9), check("pre_ln", "completep", 0.0), check("pre_ln", "sp", 0.9)]
    )
    assert report.grids.refused == {("A0", "completep"): "its coordinate check over depth failed (all tensors)"}
    assert report.verdict == "inconclusive"
    assert ("pre_ln", "sp") in report.grids.arms  # the naive arm is meant to fail
    assert "A0 / completep" in report.summary()


def test_arms_on_other_data_or_seeds_are_not_compared() -> None:
    runs = study("both")
    other = runs.assign(corpus_fingerprint=np.where(runs["architecture"] == "A0", "ff", "0f"))
    report = misscaling(other, method=QUICK, hierarchical=False)
    assert report.grids.paired is False
    assert report.verdict == "inconclusive"
    assert "corpus_fingerprint" in " ".join(report.reasons)
    shifted = runs.assign(seed=np.where(runs["architecture"] == "A0", runs["seed"] + 7, runs["seed"]))
    assert misscaling(shifted, method=QUICK, hierarchical=False).verdict == "inconclusive"
    assert take_in(runs).paired is True
    assert take_in(runs.drop(columns="corpus_fingerprint")).paired is None


def test_a_boundary_optimum_drops_its_depth_from_all_arms() -> None:
    runs = study("architecture", Plan(depths=5))
    deep = (
        (runs["depth"] == runs["depth"].max())
        & (runs["architecture"] == "A0")
        & (runs["parametrization"] == "completep")
    )
    rates = np.sort(runs.loc[deep, "lr"].unique())
    cut = runs[~(deep & (runs["lr"] > rates[2]))]
    report = misscaling(cut, method=QUICK, hierarchical=False)
    status = report.envelopes.set_index(["architecture", "parametrization", "depth"])["status"]
    assert status["A0", "completep", runs["depth"].max()] == "boundary"
    assert any("extend the grid" in r for r in report.reasons)
    assert report.verdict == "H_arch"
    w = report.analysis.made.weights[("pre_ln", "completep")]  # type: ignore[union-attr]
    assert np.count_nonzero(w) == 4


def test_diverged_runs_are_counted_and_bracket() -> None:
    runs = study("architecture")
    top = runs.groupby(["architecture", "parametrization", "depth"])["lr"].transform("max")
    runs["loss"] = np.where(runs["lr"] == top, np.nan, runs["loss"])
    runs["status"] = np.where(runs["lr"] == top, "diverged", "finished")
    report = misscaling(runs, method=QUICK, hierarchical=False)
    assert (report.envelopes["diverged"] == 2).all()
    assert any("32 of 224 runs diverged" in r for r in report.reasons)
    assert report.verdict == "H_arch"


def test_a_fixed_rate_that_diverges_or_was_not_tried_is_said_to() -> None:
    """Naive optima fall by 1.56 in ln lr: at the largest depth the base optimum lies two to three places above the best."""
    runs = study("mis-scaling")
    deep = (runs["depth"] == 32) & (runs["parametrization"] == "sp") & (runs["architecture"] == "pre_ln")
    high = deep & (runs["lr"] > 0.0065)
    lost = misscaling(runs.assign(loss=runs["loss"].mask(high, np.nan)), method=QUICK, hierarchical=False)
    assert any("at depth 32 the optimum of the smallest depth diverges" in r for r in lost.reasons)
    assert lost.verdict == "H_misscale"
    absent = misscaling(runs[~high], method=QUICK, hierarchical=False)
    assert any("at depth 32 the optimum of the smallest depth was not tried" in r for r in absent.reasons)
    assert absent.verdict == "inconclusive"


def test_tables_without_learning_rates_say_what_cannot_be_answered() -> None:
    kaplan = study("both").groupby(["depth", "architecture"], as_index=False)["loss"].min().assign(width=64)
    report = misscaling(kaplan)
    assert report.verdict == "inconclusive"
    assert report.analysis is None
    assert "no learning rates" in report.summary()
    assert "0.017 or 0.067 nats" in report.summary()  # .0155 (drift ln 8)^2
    with pytest.raises(SchemaError, match="'depth'"):
        misscaling(kaplan.drop(columns="depth"))
    with pytest.raises(SchemaError, match="at least one row"):
        misscaling(kaplan.iloc[:0])


def test_two_depths_leave_no_error() -> None:
    runs = study("both")
    report = misscaling(runs[runs["depth"].isin(sorted(runs["depth"].unique())[::3])], method=QUICK, hierarchical=False)
    assert report.verdict == "inconclusive"
    assert any("three or more" in r for r in report.reasons)


# ---- rules ---------------------------------------------------------------------------------------------------------------
def test_every_verdict_follows_from_its_pattern_and_nothing_else_decides() -> None:
    for rule in TABLE:
        states = {name: np.array(allowed[0]) for name, allowed in rule.pattern.items()}
        assert decide(states) == rule.verdict
        for name in rule.pattern:  # an open piece of evidence never lets this verdict stand
            assert decide({**states, name: np.array("open")}) != rule.verdict
    assert decide({"M": np.array("superior"), "W": np.array("equivalent"), "drift naive": np.array("equivalent"),
                   "drift scaled": np.array("equivalent")}) == "inconclusive"  # fmt: skip
    assert {r.verdict for r in READINGS} <= {"H_misscale", "H_arch", "inconclusive"}


def test_states_are_those_of_the_intervals() -> None:
    margins = Margins()
    made = Estimate(
        np.array([0.03, 0.013, 0.005, 0.0, -0.03]), np.array([0.004, 0.010, 0.003, 0.01, 0.004]), np.full(5, 8.0)
    )
    assert list(gain_states({"M": made}, margins, family=("M",))["M"]) == [
        "superior",
        "open",
        "equivalent",
        "open",
        "inferior",
    ]
    drift = Estimate(np.array([-0.7, 0.02, -0.22, 0.5]), np.array([0.05, 0.05, 0.05, 0.05]), np.full(4, 8.0))
    assert list(drift_states({"a": drift}, margins)["a"]) == ["beyond", "equivalent", "open", "beyond"]
    with pytest.raises(ConfigError, match="positive"):
        Margins(gain=0.0)


def test_holm_is_that_of_the_package() -> None:
    p = np.random.default_rng(0).uniform(size=(4, 30)) ** 3
    for t in range(30):
        np.testing.assert_allclose(holm(p)[:, t], adjust(list(p[:, t])), rtol=1e-12)


def test_candidates_must_agree_unless_one_matters() -> None:
    assert overall({"a": "H_misscale", "b": "both"}) == "both"
    assert overall({"a": "neither", "b": "H_arch"}) == "H_arch"
    assert overall({"a": "neither", "b": "inconclusive"}) == "inconclusive"


# ---- sensitivity ---------------------------------------------------------------------------------------------------------
def test_drift_makes_absolute_sensitivity_grow_and_leaves_the_relative_one() -> None:
    """One absolute grid of 9 rates for all shapes; noise-free, so that only the drift differs."""
    z = np.log(0.0005) + np.log(2) * np.arange(9)
    rows = []
    for k, depth in enumerate((4, 8, 16)):
        o = z[5] - 0.5 * np.log(2) * k
        rows += [{"depth": depth, "width": 64, "lr": np.exp(v), "loss": 3 + 0.02 * (v - o) ** 2, "seed": 0} for v in z]
    grids = take_in(pd.DataFrame(rows))
    report = misscaling(pd.DataFrame(rows), hierarchical=False, method=Method(model="quadratic", window=0.2, draws=9))
    made = sensitivity(grids, report.analysis.curves)  # type: ignore[union-attr]
    assert made["absolute"].is_monotonic_decreasing  # the optimum moves into the middle of the grid
    assert made["relative"].to_numpy() == pytest.approx(
        0.02 * np.mean(np.linspace(-np.log(4), np.log(4), 17) ** 2), abs=1e-6
    )
    assert set(made["cap"]) == {"worst finite loss"}


# ---- mis-scaled alternatives ---------------------------------------------------------------------------------------------
def test_each_alternative_moves_one_exponent() -> None:
    plain = parametrization("completep")
    made = alternatives("completep", by=0.5)
    assert len(made) == 14
    for one in made:
        (entry, to), = one.perturb.items()  # fmt: skip
        moved = plain.perturb(entry, to=to)
        assert [k for k in plain.table if plain.table[k] != moved.table[k]] == [entry]
        assert to["depth"] - plain.table[entry].depth == pytest.approx(0.5)
        forward = {k for k in plain.table if k.endswith(".forward") and plain.table[k] != moved.table[k]}
        assert forward <= {
            "input.outside.forward",
            "readout.outside.forward",
        }  # the model has no others, and refuses them
    assert not any("branch_multiplier" in a.perturb for a in alternatives("sp_gpt2"))  # depth would count twice
    with pytest.raises(ConfigError, match="other than 0"):
        alternatives("completep", by=0.0)


def test_a_sweep_takes_alternatives_as_arms() -> None:
    sweep = load_sweep("embedded:misscaling_depth")
    made = with_alternatives(sweep, "completep", entries=["matrix.branch.lr"])
    assert len(made.parametrizations) == 3
    assert "completep; matrix.branch.lr depth 0 -> 0.5" in set(plan(made)["parametrization"])
    with pytest.raises(ConfigError, match="no alternative"):
        with_alternatives(sweep, "completep", entries=["nothing"])
    with pytest.raises(ConfigError, match="base shape"):
        with_alternatives(
            Sweep(name="x", lrs=[1.0], run={"corpus": "c", "tokens": 1}, shapes=sweep.shapes), "completep"
        )


def test_the_entry_that_explains_the_naive_arm_is_ranked_first() -> None:
    """Naive: drift -.75 and .03 nats per e-fold. One arm moves in that direction by half, another only in the loss."""
    runs = [study("mis-scaling")]
    for k, (entry, truth) in enumerate({
        "matrix.branch.lr depth 0 -> 0.5": Truth("-", parametrization=-0.015, drift=-0.375),
        "matrix.branch.init_std depth 0 -> 0.5": Truth("-", parametrization=-0.03, drift=0.3),
    }.items()):  # fmt: skip
        own = study(Truth("-", drift=truth.drift, parametrization=0.0), seed=10 + k)
        own = own[(own["architecture"] == "pre_ln") & (own["parametrization"] == "sp")].copy()
        x = np.log(own["depth"] / own["depth"].min())
        own["loss"] -= x * (0.03 + truth.parametrization)  # from the naive level to that of the alternative
        runs.append(own.assign(parametrization=f"completep; {entry}", run_id=own["run_id"] + f"p{k}"))
    failed = check("pre_ln", "completep: matrix.branch.lr depth 0 -> 0.5", 0.9)
    report = misscaling(pd.concat(runs, ignore_index=True), method=QUICK, hierarchical=False, checks=[failed])
    ranked = report.suspects
    assert list(ranked["entry"]) == ["matrix.branch.lr", "matrix.branch.init_std", "every learning rate"]
    assert list(ranked["check"]) == ["fail", "", ""]
    assert ranked["needed"].iloc[0] == pytest.approx(1.0, abs=0.25)  # twice the arm's 0.5
    assert ranked["misfit"].iloc[1] > 10 * ranked["misfit"].iloc[0]
    assert ranked["needed"].iloc[2] == pytest.approx(-0.75, abs=0.12)


# ---- power ---------------------------------------------------------------------------------------------------------------
def test_power_counts_every_study_once() -> None:
    made = verdict_power(TRUTHS["both"], trials=40, method=Method(draws=99))
    assert made["right"] >= 0.9
    assert made["wrongly_positive"] == 0
    assert made["right"] + made["wrongly_positive"] + made["wrong"] + made["inconclusive"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="at least one"):
        verdict_power(TRUTHS["both"], trials=0)
    with pytest.raises(ConfigError, match="three depths"):
        Plan(depths=2)


def test_the_committed_table_meets_the_gate() -> None:
    """sigma .005, two seeds: at least 80 % right and at most 2 % wrongly positive for each truth, over 400 trials."""
    table = pd.read_csv(Path(__file__).parents[1] / "benchmarks" / "misscaling_power.csv")
    gate = table[table["plan"] == "gate"]
    assert set(gate["truth"]) == set(TRUTHS)
    assert (gate["trials"] >= 400).all()
    assert ((gate["sigma"] == 0.005) & (gate["seeds"] == 2) & (gate["tau"] == 0.003)).all()
    assert (gate["right"] >= 0.80).all()
    assert (gate["wrongly_positive"] <= 0.02).all()


@pytest.mark.slow
@pytest.mark.parametrize("truth", list(TRUTHS))
def test_verdict_rates_at_the_gate(truth: str) -> None:
    made = verdict_power(TRUTHS[truth], trials=400, rng=11)
    assert made["right"] >= 0.80
    assert made["wrongly_positive"] <= 0.02


@pytest.mark.slow
def test_intervals_cover_and_equivalence_has_its_size() -> None:
    """W at the margin itself: a 95 % interval covers in 93-97 % (1,200 trials: SE .6 %), and equivalence is said in at most 6 %."""
    from scalinglab.misscaling.engine import analyse
    from scalinglab.misscaling.power import simulate_study

    truth = Truth("-", architecture=0.012, drift=-0.75)
    rng = np.random.default_rng(12)
    hits, drift_hits, equivalent = [], [], []
    for _ in range(24):
        cells, z, loss, roles = simulate_study(truth, Plan(), trials=50, rng=rng)
        made = analyse(cells, z, loss, roles, method=Method(draws=199), margins=Margins(), rng=rng, parametric=True)
        low, high = made.gains["W:A0"].interval(0.95)
        hits.append((low < 0.012) & (high > 0.012))
        low, high = made.drifts["pre_ln", "sp"].interval(0.95)
        drift_hits.append((low < -0.75) & (high > -0.75))
        equivalent.append(made.states["A0"]["W"] == "equivalent")
    assert 0.93 <= np.mean(hits) <= 0.985
    assert 0.93 <= np.mean(drift_hits) <= 0.99
    assert np.mean(equivalent) <= 0.06


# ---- files, figures, command line ----------------------------------------------------------------------------------------
def test_a_saved_report_is_complete_and_plain(both: MisscalingReport, tmp_path: Path) -> None:
    folder = both.save(tmp_path / "report")
    result = json.loads((folder / "result.json").read_text())
    assert validate(result).verdict == "both"
    assert {p.stem for p in (folder / "tables").iterdir()} == {
        "envelopes", "drift", "decomposition", "sensitivity", "suspects", "by_tau", "by_curve", "hierarchy",
    }  # fmt: skip
    assert (folder / "summary.txt").read_text().startswith("Mis-scaling: both")
    pd.testing.assert_frame_equal(both.to_frame(), both.decomposition)
    again = pd.read_csv(folder / "tables" / "envelopes.csv")
    np.testing.assert_allclose(again["minimum"], both.envelopes["minimum"], rtol=1e-12)


def test_figures_show_each_depth_the_optimum_and_the_margin(both: MisscalingReport) -> None:
    from scalinglab.report.figures import decomposition, lr_drift, lr_envelope

    made = lr_envelope(both)
    panels = [ax for ax in made.axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in panels] == [f"Depth {d:g}" for d in (4, 8, 16, 32)]
    marks = [line for line in panels[0].lines if line.get_marker() == "|"]
    own = both.envelopes[both.envelopes["depth"] == both.envelopes["depth"].min()]
    np.testing.assert_allclose(sorted(float(np.ravel(m.get_xdata())[0]) for m in marks), sorted(own["optimum_lr"]))
    texts = " ".join(t.get_text() for t in lr_drift(both).legends[0].get_texts())
    assert "pre_ln / sp: \u22120.7" in texts
    forest = decomposition(both).axes[0]
    assert [t.get_text() for t in forest.get_yticklabels()] == [
        "U: learning rate",
        "V: parametrization",
        "M = U + V",
        "W: A0",
    ]
    with pytest.raises(ConfigError, match="no learning rates"):
        lr_envelope(replace(both, analysis=None))
    with pytest.raises(ConfigError, match="mis-scaling report"):
        decomposition("report")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not in the report"):
        lr_envelope(both, arms=[("none", "sp")])


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from scalinglab.cli import main

    study("mis-scaling").to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(SystemExit) as stopped:
        main(["misscaling", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "report"), "--draws", "199"])
    assert stopped.value.code == 0
    assert "Mis-scaling: H_misscale" in capsys.readouterr().out
    assert (tmp_path / "report" / "result.json").is_file()
    with pytest.raises(SystemExit) as stopped:
        main(["misscaling", str(tmp_path / "runs.csv"), "--model", "spline"])
    assert stopped.value.code == 2
    assert "shared, cubic or quadratic" in capsys.readouterr().err
    figures = ("lr_envelope", "lr_drift", "decomposition")
    written = {p.name for p in (tmp_path / "report" / "figures").iterdir()}
    assert written == {f"{name}.{kind}" for name in figures for kind in ("png", "svg")}
    assert (tmp_path / "report" / "report.html").is_file()
    for kind in ("csv", "md", "tex"):
        assert (tmp_path / "report" / "tables" / f"drift.{kind}").is_file()


def test_folders_of_the_trainer_are_read_arm_by_arm(tmp_path: Path) -> None:
    """Both shipped stages with planted losses: naive optima fall as depth^-.5, LNS gains nothing. Seeds share their noise."""
    archs = msgspec.structs.replace(load_sweep("embedded:misscaling_depth_archs"), architectures=["lns"])
    rng = np.random.default_rng(0)
    for run in [*expand(load_sweep("embedded:misscaling_depth")).runs, *expand(archs).runs]:
        x, naive = np.log(run.shape.depth / 2), run.parametrization == "sp"
        d = np.log(run.lr) - np.log(0.008) + (0.5 * x if naive else 0.0)
        loss = (
            1.0
            - 0.1 * x
            + (0.03 * x if naive else 0.0)
            + 0.02 * d**2
            + 0.003 * run.seed
            + 0.003 * rng.standard_normal()
        )
        write_run(tmp_path / "runs", run, float(loss))
    runs = read_runs(tmp_path / "runs")
    report = misscaling(runs, method=QUICK, hierarchical=False)
    assert report.roles.scaled_of == {"lns": ("lns", "native")}
    assert report.roles.scaled == ("pre_ln", "completep")
    assert report.verdict == "H_misscale"
    assert set(report.sensitivity["cap"]) == {"before training"}
    assert any("same seeds in all arms" in r for r in report.reasons)  # these folders have no fingerprint


def test_the_shipped_alternatives_are_those_of_the_ladder() -> None:
    """Equal to what one call makes of the ladder's own sweep, so that both can be trained into one folder."""
    ladder, shipped = (load_sweep(f"embedded:{name}") for name in ("misscaling_depth", "misscaling_entries"))
    entries = [next(iter(p.perturb)) for p in shipped.parametrizations if not isinstance(p, str)]
    made = with_alternatives(ladder, "completep", entries=entries)
    ids = [{run.run_id for run in expand(one).runs} for one in (made, ladder, shipped)]
    assert ids[0] - ids[1] == ids[2]


@pytest.mark.parametrize("name", ["misscaling_depth", "misscaling_iso", "misscaling_depth_archs", "misscaling_entries"])
def test_shipped_sweeps_are_ladders_of_a_factor_eight(name: str) -> None:
    table = plan(load_sweep(f"embedded:{name}"))
    assert table["depth"].max() == 8 * table["depth"].min()
    assert len(table["lr"].unique()) == 7
    assert table.groupby(["architecture", "parametrization"])["run_id"].count().eq(7 * 4 * 3).all()
    assert ((len(table["width"].unique()) == 1) and name != "misscaling_iso") or table["mismatch"].abs().max() < 0.01
    assert (table["batch_tokens"] * table["steps"] == 524_288).all()


# ---- public logs ---------------------------------------------------------------------------------------------------------
@pytest.mark.shared
def test_gemstones_preflight_shows_the_drift_and_no_verdict(shared: Path) -> None:
    """Four shapes, six coarse rates, one seed. Two optima can be located; lr* width sqrt(depth) is then 8.3 and 8.6 by a
    published reading of the same points; the wide shapes have three rates near their best, and are refused."""
    runs = read_runs(shared / "gemstones_lr_preflight.csv")
    report = misscaling(runs, method=Method(model="quadratic", window=0.6, sides=1, draws=99))
    assert report.verdict == "inconclusive"
    assert any("no naive arm" in r for r in report.reasons)
    made = report.envelopes.set_index(["depth", "width"])
    found = made[made["status"] == "interior"]
    assert list(found.index) == [(3, 768), (80, 256)]
    scaled = [r.optimum_lr * w * np.sqrt(d) for (d, w), r in found.iterrows()]
    np.testing.assert_allclose(scaled, [8.6, 8.3], atol=0.3)
    assert set(made.loc[[(12, 3072), (50, 1536)], "status"]) == {"too few"}


@pytest.mark.shared
def test_step_law_gets_envelopes_and_is_told_what_it_lacks(shared: Path) -> None:
    runs = read_runs(shared / "steplaw_dense.csv")
    report = misscaling(runs, method=Method(model="cubic", draws=99), hierarchical=False)
    assert (report.envelopes["status"] == "interior").sum() > 120
    assert {"boundary", "one-sided"} <= set(report.envelopes["status"])
    slopes = report.drift.set_index("axis")["slope"]
    assert slopes["width"] < 0
    assert report.verdict == "inconclusive"
    assert any("no candidate" in r for r in report.reasons)


def test_base_shapes_of_the_shipped_sweeps_are_their_smallest() -> None:
    for name in ("misscaling_depth", "misscaling_iso"):
        base = load_sweep(f"embedded:{name}").run["base"]
        assert Base(**base).depth == 2


def test_an_arm_with_two_weight_decays_is_not_one_arm() -> None:
    runs = study("neither")
    runs["weight_decay"] = np.where(runs["seed"] == 0, 0.0, 2e-4)
    report = misscaling(runs)
    assert report.verdict == "inconclusive"
    assert "runs of one arm differ in weight_decay" in report.summary()


# ---- what shapes miss alike ------------------------------------------------------------------------------------------------
def test_what_all_arms_miss_alike_is_no_error_of_their_difference() -> None:
    """Losses that bend in ln depth, equally in all arms: far off a line, and nothing off each other; then with arms' own."""
    depth = np.array([2.0, 4, 8, 16])
    arms = (("pre_ln", "sp"), ("pre_ln", "completep"), ("lns", "native"))
    cells = pd.DataFrame(
        [{"architecture": a, "parametrization": p, "ladder": "", "depth": d, "x": np.log(d)} for a, p in arms for d in depth[::-1]]
    )  # fmt: skip
    lines = slopes(cells, arms, np.ones(len(cells), bool))
    own = apart(lines, cells)
    assert (lines.df, own.df) == (6, 4)
    assert np.allclose(own.residual @ own.residual, own.residual)
    assert np.trace(own.residual) == pytest.approx(4)
    bend = 1.7 - 0.04 * cells["x"].to_numpy() + 0.02 * (cells["x"].to_numpy() - 1.4) ** 2
    none = np.zeros((len(cells), len(cells)))
    assert np.sqrt(spread(bend, none, lines)[0]) > 0.01
    assert np.sqrt(spread(bend, none, own)[0]) == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(0)
    drawn = bend + 0.003 * rng.standard_normal((4_000, len(cells)))
    assert np.sqrt(spread(drawn, np.broadcast_to(none, (4_000, *none.shape)), own)[0].mean()) == pytest.approx(
        0.003, rel=0.02
    )
    assert apart(slopes(cells, arms[:1], np.ones(len(cells), bool)), cells).df == 2  # one arm: nothing to share


def test_a_number_of_rates_on_either_side_that_no_grid_has() -> None:
    for sides in (0, 10**18):
        with pytest.raises(ConfigError, match="sides=.* must be 1 to 50"):
            Method(sides=sides)

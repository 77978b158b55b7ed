"""depth_benefit(): the whole report on published numbers, simulated truth and bad input."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from scalinglab.depth_benefit import DepthReport, depth_benefit, json_schema, published_rates, validate
from scalinglab.depth_benefit.prereg import Prereg, deviations, read_prereg
from scalinglab.depth_benefit.schema import finite, shipped_schema
from scalinglab.depth_benefit.tables import T1, T3, T4, T6, T7
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.published import depthbench
from scalinglab.simulation import grid_design, shape_study, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}


def small(aspects=(8, 16, 32, 64, 128), architectures=("pre_ln", "hc"), seeds=2, sigma=0.0015, rng=0, truth=TRUTH):
    design = grid_design((1e8,), (2e9,), aspects=aspects, architectures=architectures)
    return simulate("shape", truth, design, sigma=sigma, seeds=seeds, rng=rng)


@pytest.fixture(scope="module")
def bench():
    return depth_benefit(depthbench(), draws=499)


@pytest.fixture(scope="module")
def simulated():
    return depth_benefit(shape_study(), draws=199, reanalyse=False)


# ---- DepthBench ------------------------------------------------------------------------------------------------------------
def test_depthbench_labels_say_what_the_design_can_bear(bench):
    """One seed, five shapes, equal total parameters: nothing is decided at face value."""
    assert set(bench.label.values()) == {"CONFOUNDED_N"}
    assert len(bench.label) == 10
    assert bench.outcome.model.contrast["depth_shallow"] == 16
    assert bench.outcome.model.contrast["depth_deep"] == 32
    codes = {w.code for w in bench.warnings}
    assert {"SINGLE_SEED", "MIXED_MATCH_RULES", "EXTRA_PARAMS_UNCOUNTED", "LR_UNKNOWN", "RATES_BORROWED"} <= codes
    assert "alone predicts" in bench.sentences["effect/hc"]
    assert bench.study == "ARCH_DEPENDENT"  # a common mismatch can't make architectures differ
    assert "FRAGILE" in bench.verdicts["hc"].also


def test_the_fixed_backbone_table_is_analysed_beside_it(bench):
    own = bench.tables["T6"]
    beside = own[own["analysis"] == "group 300M"].set_index("architecture")
    assert set(beside.index) == {"pre_ln", "attnres_full", "hc"}
    assert "CONFOUNDED_N" not in set(beside["label"])  # matched in the backbone: nothing to correct
    assert beside.loc["hc", "label"] == "INCONCLUSIVE"  # one seed, six shapes


def test_shrunken_differences_are_smaller_and_tau_is_between_zero_and_their_spread(bench):
    own = bench.tables["T4"].set_index("architecture")
    assert (own["shrunken"].abs() <= own["difference"].abs() + 1e-12).all()
    e = [v.estimate for v in bench.outcome.effects if v.estimand == "E1"]
    assert 0 < own["tau"].iloc[0] < np.std(e, ddof=1)


def test_correction_and_charging_are_shown_with_and_without(bench):
    own = bench.tables["T6"].set_index(["analysis", "architecture"])
    fixed = own.loc[("corrected at published rates", "hc")]
    raw = bench.outcome.evidence["hc"].estimate
    assert fixed["estimate"] < raw  # deeper models have the larger backbone
    assert fixed["label"] == "CONFOUNDED_N"  # the correction is larger than what it leaves
    assert not own.loc[("architecture's parameters charged", "moda")].isna()["estimate"]
    assert bench.verdicts["hc"].analyses == 7
    assert bench.verdicts["hc"].stable <= 7


def test_published_rates_correct_when_asked():
    made = depth_benefit(depthbench(), rates="published", group="400M", reanalyse=False, draws=199)
    e = made.outcome.effects.pick("E1", "pre_ln")
    assert e.correction.applied
    assert e.correction.nats == pytest.approx(
        -published_rates(params=3.03e8, tokens=8e9).params * e.correction.dln_params, rel=0.02
    )
    assert {v.variant for v in made.outcome.effects if v.estimand == "E2"} == {"6n", "causal", "full"}
    assert made.label["pre_ln"] in ("DEPTH_HARM_MATERIAL", "DEPTH_HARM", "FRAGILE")
    assert "changed B by" in made.sentences["effect/pre_ln"]


def test_report_is_complete_and_saved(bench, tmp_path):
    folder = bench.save(tmp_path / "report")
    names = {p.name for p in (folder / "tables").iterdir()}
    assert names == {f"T{k}.{e}" for k in range(1, 8) for e in ("csv", "md", "tex")}
    for name, columns in (("T1", T1), ("T3", T3), ("T4", T4), ("T6", T6), ("T7", T7)):
        assert list(bench.tables[name].columns) == list(columns)
    table = pd.read_csv(folder / "tables" / "T1.csv")
    assert len(table) == len(bench.intake.runs)
    read = json.loads((folder / "result.json").read_text())
    assert read == json.loads(json.dumps(bench.result))
    assert validate(read).labels.per_arch == bench.label
    assert read["prereg_hash"] is None
    assert len(read["data_hash"]) == 64
    assert (folder / "summary.txt").read_text().startswith("Depth benefit")
    assert not [p for p in folder.rglob("*") if p.name.startswith(".")]
    with_method = [e for e in read["effects"] if e["p"] is not None]
    assert all(e["method"] and e["ci_method"] for e in with_method)


def test_checklist_fills_itself_in(bench):
    assert set(bench.checklist) == {"hypothesis", "training", "data collection", "fitting"}
    assert bench.checklist["training"]["learning rate"] == "not stated"
    assert bench.checklist["training"]["tokenizer (vocabulary)"] == "50280"
    assert bench.checklist["hypothesis"]["preregistration"] == "none"
    assert "closed form" in bench.checklist["fitting"]["optimiser"]


def test_words_never_claim_absence(bench, simulated):
    for report in (bench, simulated):
        text = report.summary().lower()
        assert "no effect" not in text
        assert "no difference" not in text


# ---- the result's schema -----------------------------------------------------------------------------------------------
def test_shipped_schema_is_the_one_of_the_types():
    assert shipped_schema() == json.loads(json.dumps(json_schema()))
    assert shipped_schema()["$id"] == "scalinglab/result-1.0"


def test_result_passes_an_independent_validator(bench):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(dict(bench.result), shipped_schema())


@pytest.mark.parametrize(
    ("change", "match"),
    [({"schema_version": "2.0"}, "schema_version"), ({"data_hash": "abc"}, "data_hash"), ({"labels": {}}, "labels"),
     ({"effects": [{"estimand": "E99"}]}, "effects")],
)  # fmt: skip
def test_a_damaged_result_is_refused(bench, change, match):
    with pytest.raises(SchemaError, match=match):
        validate({**bench.result, **change})


def test_numbers_that_json_lacks_become_null():
    lost: list[str] = []
    assert finite({"a": [1.0, math.nan], "b": np.float64(np.inf)}, lost=lost) == {"a": [1.0, None], "b": None}
    assert lost == ["a[1]", "b"]


# ---- simulated truth ------------------------------------------------------------------------------------------------------
def test_simulated_study_is_decided(simulated):
    assert simulated.study == "ARCH_DEPENDENT"
    assert simulated.verdicts["hyper_connections"].label == "DEPTH_BENEFIT_MATERIAL"
    assert simulated.verdicts["hyper_connections"].modifiers == ("INTERIOR_OPTIMUM",)
    assert simulated.rivals["kaplan/pre_ln"].startswith("refuted")
    estimands = {e.estimand for e in simulated.outcome.effects}
    assert estimands == {"E1", "E1s", "E2", "E4", "E5", "E6", "E7"}
    told = {w.code: w.message for w in simulated.warnings}
    assert set(told) == {"FEW_SHAPES", "LR_UNKNOWN", "PARABOLA_ALONE"}
    assert "two lines, which assume no parabola, don't show it (p = " in told["PARABOLA_ALONE"]
    table = simulated.effects
    assert table.loc[table["estimand"] == "E1", "p_adj"].notna().all()
    assert simulated.tables["T5"].iloc[0]["law"] == "shape"
    assert len(simulated.result["fits"]) == 1
    assert simulated.result["fits"][0]["law"] == "S2"


def test_report_does_not_depend_on_names_or_order():
    runs = small(seeds=3)
    one = depth_benefit(runs, reanalyse=False, draws=199)
    order = np.random.default_rng(0).permutation(len(runs))
    two = depth_benefit(runs.iloc[order], reanalyse=False, draws=199)
    assert one.label == two.label
    a, b = one.outcome.effects.pick("E1", "hc"), two.outcome.effects.pick("E1", "hc")
    assert a.estimate == pytest.approx(b.estimate, rel=1e-9)
    assert one.result["data_hash"] == two.result["data_hash"]
    renamed = runs.assign(architecture=runs["architecture"].map({"pre_ln": "x", "hc": "y"}))
    three = depth_benefit(renamed, reference="x", reanalyse=False, draws=199)
    assert three.label == {"x": one.label["pre_ln"], "y": one.label["hc"]}
    assert one.result["data_hash"] != three.result["data_hash"]


def test_negative_control_shuffled_depths_quick():
    """M11: depth labels shuffled within the size class: at most 5 % are not inconclusive. Here 12 of them."""
    named = 0
    for k in range(6):
        runs = small(seeds=1, sigma=0.003, rng=k)
        rng = np.random.default_rng(k)
        for rows in runs.groupby("architecture").groups.values():
            runs.loc[rows, "loss"] = rng.permutation(runs.loc[rows, "loss"].to_numpy())
        made = depth_benefit(runs, reanalyse=False, draws=99)
        named += sum(v.startswith("DEPTH") for v in made.label.values())
    assert named <= 2  # P(> 2 of 12 at .05) = 2 %


def test_diverged_runs_reach_the_report():
    runs = small(seeds=3)
    hit = runs["run_id"].str.startswith("hc") & (runs["depth"] == runs["depth"].max()) & (runs["seed"] < 2)
    runs["status"] = runs["status"].where(~hit, "diverged")
    runs["loss"] = runs["loss"].where(~hit)
    made = depth_benefit(runs, draws=199, reanalyse=False)
    assert made.label["hc"] == "SELECTION_SENSITIVE"
    assert made.label["pre_ln"] != "SELECTION_SENSITIVE"
    t7 = made.tables["T7"].query("architecture == 'hc'")
    assert t7["diverged"].sum() == 2
    assert t7["worst_rank_p"].notna().all()
    assert (t7["B_low"] < t7["B_complete"]).all()
    assert made.outcome.effects.pick("E9", "hc").estimate == pytest.approx(2 / 3)
    assert "LOST_RUNS" in {w.code for w in made.warnings}
    assert any("rerun the lost cells" in a for a in made.advice)


def test_common_learning_rate_and_edges_are_confounded():
    runs = small(seeds=2, truth={**TRUTH, "gamma1": 0.004})
    common = depth_benefit(runs.assign(lr=1e-3), draws=99, reanalyse=False)
    assert set(common.label.values()) <= {"CONFOUNDED_LR"}
    safe = depth_benefit(runs.assign(lr=1e-3, parametrization="completep"), draws=99, reanalyse=False)
    assert "CONFOUNDED_LR" not in set(safe.label.values())
    grid = pd.concat(
        [
            runs.assign(lr=lr, run_id=runs["run_id"] + f"/{lr}", loss=runs["loss"] + c)
            for lr, c in ((1e-3, 0), (2e-3, 0.1))
        ]
    )
    edge = depth_benefit(grid, draws=99, reanalyse=False)
    assert set(edge.label.values()) == {"CONFOUNDED_LR"}
    assert "BEST_OF_LR" in {w.code for w in edge.warnings}


def test_sign_flips_say_when_they_cannot_decide():
    runs = small(aspects=(16, 64), seeds=5, sigma=1e-4)
    depths = sorted(runs["depth"].unique())
    few = depth_benefit(
        runs, method="pairs", shallow=depths[0], deep=depths[1], test="sign_flip", draws=99, reanalyse=False
    )
    assert set(few.label.values()) == {"UNTESTABLE_N"}  # five pairs: no p below .0625
    assert "0.0625" in few.verdicts["hc"].reason
    many = small(aspects=(16, 64), seeds=8, sigma=1e-4)
    made = depth_benefit(
        many, method="pairs", shallow=depths[0], deep=depths[1], test="sign_flip", draws=99, reanalyse=False
    )
    e = made.outcome.effects.pick("E1", "hc")
    assert e.p == 2 / 2**8
    assert made.result["effects"][0]["p_min"] == 2 / 2**8
    assert "UNTESTABLE_N" not in set(made.label.values())
    with pytest.raises(ConfigError, match="need pairs of runs"):
        depth_benefit(small(), test="sign_flip")


def test_one_group_borrows_rates_from_the_law_on_all():
    runs = shape_study()
    name = runs["match_group"].iloc[0]
    made = depth_benefit(runs, group=name, reanalyse=False, draws=99)
    assert not made.outcome.rates.borrowed
    assert "RATES_BORROWED" not in {w.code for w in made.warnings}
    assert made.outcome.effects.pick("E1", "pre_ln").correction.applied


# ---- preregistration --------------------------------------------------------------------------------------------------
def test_preregistration_is_hashed_and_departures_listed(tmp_path):
    path = tmp_path / "prereg.toml"
    path.write_text(
        'estimand = "E1"\nmargin = 0.1\nreference = "pre_ln"\narchitectures = ["pre_ln", "hc", "mhc"]\nseeds = 3\n'
        'degree = 2\nlr_rule = "swept"\n'
    )
    made = depth_benefit(small(seeds=2), prereg=path, draws=99, reanalyse=False)
    plan, digest = read_prereg(path)
    assert made.result["prereg_hash"] == digest
    assert made.options.margin == 0.1
    told = " ".join(made.deviations)
    assert "not in the runs: mhc" in told
    assert "registered 3 per cell" in told
    assert {"DEVIATION"} <= {w.code for w in made.warnings}
    other = depth_benefit(small(seeds=3), prereg=path, degree=1, draws=99, reanalyse=False)
    assert any(d.startswith("degree: registered 2, used 1") for d in other.deviations)
    assert deviations(plan, small(seeds=3).assign(group="g"), pd.DataFrame(), used={"degree": 2}) == [
        "architectures: registered but not in the runs: mhc"
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [('estimand = "E1"\nmargn = 0.1', "margn"), ('estimand = "E5"', "estimand"), ('estimand = "E1"\nmargin = -1', "margin"),
     ('estimand = "E1"\ncontrast = [42, 16]', "contrast"), ("estimand = ", "not TOML")],
)  # fmt: skip
def test_preregistration_refuses(tmp_path, text, match):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_prereg(path)
    assert Prereg(estimand="E1").margin is None


# ---- bad input ------------------------------------------------------------------------------------------------------------
def test_bad_input_is_a_sentence_or_a_labelled_report():
    runs = small()
    one_depth = depth_benefit(runs[runs["depth"] == runs["depth"].min()], draws=99)
    assert set(one_depth.label.values()) == {"NOT_IDENTIFIED"}
    assert one_depth.effects.empty
    assert len(one_depth.tables["T1"]) == 2
    validate(one_depth.result)
    alone = depth_benefit(runs[runs["architecture"] == "hc"], draws=99, reanalyse=False)
    assert "ONE_ARCHITECTURE" in {w.code for w in alone.warnings}
    assert alone.study == "ARCH_UNRESOLVED"
    nobody = depth_benefit(
        runs.assign(architecture=runs["architecture"].replace("pre_ln", "other")), draws=99, reanalyse=False
    )
    assert "NO_REFERENCE" in {w.code for w in nobody.warnings}
    mixed = depth_benefit(runs.assign(eval_dataset=["a", "b"] * (len(runs) // 2)), draws=99, reanalyse=False)
    assert set(mixed.label.values()) == {"INVALID_DATA"}
    no_seed = depth_benefit(runs.drop(columns=["seed"]), draws=99, reanalyse=False)
    assert no_seed.label.keys() == {"pre_ln", "hc"}
    all_lost = depth_benefit(runs.assign(status="diverged"), draws=99)
    assert set(all_lost.label.values()) == {"NOT_IDENTIFIED"}
    assert isinstance(all_lost, DepthReport)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"reference": "prenorm"}, "architectures are pre_ln, hc"), ({"group": "9B"}, "group='9B' is not in the runs"),
     ({"margin": 0}, "margin=0"), ({"alpha": 2}, "alpha=2"), ({"estimand": "E5"}, "choose E1, E1s or E2"),
     ({"flops": "7n"}, "flops='7n'"), ({"shallow": 3}, "no matched group has the depths 3"), ({"draws": 5}, "at least 99"),
     ({"rates": "guessed"}, "rates='guessed'"), ({"params": "active"}, "params='active'"),
     ({"method": "magic"}, "method='magic'")],
)  # fmt: skip
def test_unknown_options_list_what_there_is(options, match):
    with pytest.raises(ConfigError, match=match):
        depth_benefit(small(), **options)


@pytest.mark.shared
def test_gemstones_by_its_law(shared):
    from scalinglab.readers import read_runs

    runs = read_runs(shared / "gemstones_checkpoints.csv", where="fit_hot_100b == 1")
    runs = runs.assign(run_id=runs["depth"].astype(str) + "x" + runs["width"].astype(str))
    made = depth_benefit(runs, checkpoints="wsd", reanalyse=False, draws=99)
    assert made.outcome.method == "law"
    star = made.outcome.effects.pick("E4", variant="r_star")
    assert math.exp(star.estimate) == pytest.approx(
        48.7, abs=0.1
    )  # backbone N; the design note's 17.5 leaves one matrix in
    assert made.verdicts["gemstone_gemma_like"].modifiers == ("INTERIOR_OPTIMUM",)
    assert made.rivals["kaplan/all"].startswith(
        "refuted"
    )  # at 5 % compute, although a range of 40 costs 1-3 % of the loss
    t5 = made.tables["T5"].set_index("law")
    assert t5.loc["shape", "loro_rmse"] < t5.loc["chinchilla", "loro_rmse"]

"""Replications and the pooled cost of shape: nothing is dropped, nothing is invented, and known truths come out."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from statsmodels.stats.meta_analysis import combine_effects

from scalinglab.cli.replicate import replicate
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.meta_analysis import widened
from scalinglab.objectives import Gaussian
from scalinglab.published import depthbench, published_numbers, published_params
from scalinglab.readers import read_runs
from scalinglab.replications import (
    REPLICATIONS,
    Ours,
    Replication,
    Target,
    counted,
    pooled_shape,
    replications,
    save,
)
from scalinglab.replications.effects import Context, of_law, of_parabola, parabola
from scalinglab.replications.kaplan import compute_equivalent, loss_equivalent
from scalinglab.replications.levine import transition_depth, transition_width
from scalinglab.replications.own import own_effects
from scalinglab.replications.pooled import PRIMARY, chinchilla_equivalent
from scalinglab.replications.sources import (
    convention_shift,
    decisive_run,
    depthbench_effects,
    drift,
    snimu_effects,
)
from scalinglab.report.figures.replications import pooled_forest
from scalinglab.simulation import gemstones_design, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28, "gamma1": 0.02, "gamma2": 0.016}
ABOUT = Context("a study", "pre_ln", "backbone", "one rule", "yes", "a source")
quiet = pytest.mark.filterwarnings("ignore::scalinglab.errors.ScalinglabWarning")


# ---- published numbers beside ours -------------------------------------------------------------------------------------
def test_without_data_every_row_is_there_and_says_what_it_needs():
    made = replications()
    assert len(made) == sum(len(r.targets) for r in REPLICATIONS)
    assert not made.duplicated(["study", "quantity"]).any()
    by = made.groupby("study")["status"].unique().map(list)
    assert by["depthbench"] == ["done"]
    assert by["levine2020"] == ["done"]
    assert by["gemstones2025"] == ["skipped: needs gemstones_checkpoints.csv"]
    skipped = made[made["status"] != "done"]
    assert skipped["ours"].isna().all()
    assert (skipped["agrees"] == "").all()
    assert made["published"].notna().all()
    assert (made["source"].str.len() > 5).all()


def test_what_does_not_agree_says_why():
    made = replications()
    no = made[made["agrees"] == "no"]
    assert set(no["quantity"]) == {
        "best d/L of attnres_full at fixed backbone", "best depth of Pre-LN, 400M grid of DepthBench",
    }  # fmt: skip
    assert (no["why"].str.len() > 20).all()


@pytest.mark.shared
def test_with_data_all_is_computed(shared):
    made = replications(shared)
    assert (made["status"] == "done").all()
    assert set(made["agrees"]) <= {"yes", "no", "open", "holds"}
    no = made[~made["agrees"].isin(["yes", "holds"])].set_index(["study", "quantity"])
    assert (no["why"].str.len() > 20).all()
    assert (made.groupby("study")["agrees"].apply(lambda a: a.isin(["yes", "holds"]).mean()) >= 0.5).all()
    # the sentence holds, the equivalence does not
    kaplan = made[made["study"] == "kaplan2020"].set_index("quantity")
    assert kaplan.loc["equivalence at 3 % of loss", "agrees"] == "yes"
    assert kaplan.loc["equivalence at 5 % of compute, Kaplan's rate", "agrees"] == "no"
    assert kaplan.loc["largest cost of shape", "high"] < 3
    # what only bounds from above is kept, not met
    assert (
        kaplan.loc[["largest cost of shape", "compute that shape can cost, Kaplan's rate"], "agrees"] == "holds"
    ).all()
    # two methods, two intervals: each says which it is
    star = made[made["quantity"].str.startswith("r_star")]
    assert (star["interval"] == "Fieller set").all()
    assert (made["low"].isna() == (made["interval"] == "")).all()
    assert counted(made)[:2] == [  # as docs/replications.md has it
        "of 41 printed numbers: 36 agree, 1 hold as a bound, 4 differ", "of 36 earlier refits: 35 agree, 1 differ",
    ]  # fmt: skip
    # the printed 86.75 is the old fit on the new points; the optimum of all points is above it
    assert "86.75" in no.loc[("besiroglu2024", "likelihood ratio, 245 points"), "why"]
    assert no.loc[("besiroglu2024", "likelihood ratio, 245 points"), "ours"] > 100
    porian = made[made["study"] == "porian2024"]
    assert ((porian["low"] <= porian["published"]) & (porian["published"] <= porian["high"])).all()


def test_only_what_a_source_prints_counts_as_printed():
    made = replications()
    kinds = made.set_index(["study", "quantity"])["kind"]
    assert (made["printed"] == (made["kind"] == "printed")).all()
    ours = kinds[kinds == "implied"]
    assert {"equivalence at 3 % of loss", "equivalence at 5 % of compute, Kaplan's rate",
            "compute that shape can cost, Kaplan's rate"} <= set(ours.xs("kaplan2020").index)  # fmt: skip
    assert kinds["depthbench", "slope pre_ln"] == "earlier refit"
    assert kinds["levine2020", "depth for 1e12 parameters"] == "second hand"
    assert kinds["kaplan2020", "largest cost of shape"] == "printed"


def test_counts_keep_kinds_apart():
    rows = [("printed", "yes", "done"), ("printed", "no", "done"), ("printed", "holds", "done"), ("printed", "", "skipped: needs x"),
            ("earlier refit", "yes", "done"), ("implied", "open", "done")]  # fmt: skip
    assert counted(pd.DataFrame(rows, columns=["kind", "agrees", "status"])) == [
        "of 4 printed numbers: 1 agree, 1 hold as a bound, 1 differ, 1 skipped",
        "of 1 earlier refits: 1 agree",
        "of 1 implications: 1 open",
    ]


def test_a_row_agrees_by_its_tolerance_only():
    told = {"published": 2.0, "unit": "", "source": "here"}
    study = Replication(
        "kaplan2020",
        (Target("near", 0.01, relative=True, **told), Target("far", 0.01, why="because", **told)),
        lambda _: {"near": Ours(2.019), "far": Ours(2.019)},
    )
    near, far = study.rows(None)
    assert (near["agrees"], near["why"]) == ("yes", "")
    assert (far["agrees"], far["why"]) == ("no", "because")


@pytest.mark.parametrize(
    ("targets", "made", "match"),
    [
        ((Target("largest cost of shape"),), {"largest cost of shape": Ours(1.0)}, "neither a tolerance nor a verdict"),
        ((Target("largest cost of shape"),), {}, "was not computed"),
        ((Target("largest cost of shape"),), {"other": Ours(1.0)}, "'other' is computed but is no target"),
        ((Target("unheard of"),), {"unheard of": Ours(1.0)}, "no published number 'unheard of'"),
    ],
)
def test_a_target_that_means_nothing_is_refused(targets, made, match):
    with pytest.raises(ConfigError, match=match):
        Replication("kaplan2020", targets, lambda _: made).rows(None)


def test_wrong_folders_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        replications(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is no folder"):
        pooled_shape(tmp_path / "nowhere")
    (tmp_path / "gemstones_checkpoints.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SchemaError, match="lacks the column 'params'"):
        replications(tmp_path)


def test_published_numbers_are_tidy():
    table = published_numbers()
    assert not table.duplicated(["study", "quantity"]).any()
    assert np.isfinite(table["value"]).all()
    assert ((table["low"] <= table["value"]) | table["low"].isna()).all()
    assert ((table["value"] <= table["high"]) | table["high"].isna()).all()
    assert set(published_numbers("levine2020")["study"]) == {"levine2020"}
    with pytest.raises(ConfigError, match="no published numbers of 'levin'; known: attnres2026"):
        published_numbers("levin")


def test_levines_rule_and_the_rates_of_exchange():
    assert transition_width(32) == pytest.approx(math.exp(5.039 + 0.0555 * 32))
    depth = transition_depth(12 * 32 * transition_width(32) ** 2)
    assert depth == pytest.approx(32, rel=1e-9)
    assert compute_equivalent(1.0) == pytest.approx(22)
    assert loss_equivalent(compute_equivalent(0.7)) == pytest.approx(0.7)
    # on Besiroglu's frontier at 3e8 and 8e9: the loss falls with compute^-gamma about E
    p = published_params("besiroglu2024")
    excess = p["A"] * 3e8 ** -p["alpha"] + p["B"] * 8e9 ** -p["beta"]
    gamma = p["alpha"] * p["beta"] / (p["alpha"] + p["beta"])
    share = chinchilla_equivalent(1.0) / 100
    assert excess * gamma * math.log1p(share) == pytest.approx(0.01 * (p["E"] + excess), rel=1e-9)


# ---- what one study says -----------------------------------------------------------------------------------------------
def by_quantity(effects, architecture=None):
    return {e.quantity: e for e in effects if architecture in (None, e.architecture)}


@quiet
def test_a_law_nearly_without_noise_gives_the_closed_forms():
    design = gemstones_design(checkpoints=4, tokens=(2e10, 2e11))
    runs = simulate("shape", TRUTH, design, sigma=1e-5, rng=0)
    made = fit("shape", runs, objective=Gaussian(variance="constant"))
    got = by_quantity(of_law(made, ABOUT))
    t, e = TRUTH, got["penalty"]

    def parts(aspect):
        u = np.log(aspect / R0)
        capacity = t["A"] * e.params ** -t["alpha"] * np.exp(t["gamma1"] * u + t["gamma2"] * u * u)
        return capacity, t["E"] + capacity + t["B"] * e.tokens ** -t["beta"]

    shapes = runs.drop_duplicates("run_id")
    capacity, loss = parts(np.exp(np.log(shapes["width"] / shapes["depth"]).mean()))
    assert e.loss == pytest.approx(loss, rel=1e-4)
    assert e.estimate == pytest.approx(100 * t["gamma2"] * capacity / loss * np.log(4) ** 2, rel=5e-3)
    assert got["contrast"].estimate == pytest.approx(100 * np.log(parts(76)[1] / parts(40)[1]), rel=5e-3)
    assert got["optimum"].estimate == pytest.approx(np.log(R0) - t["gamma1"] / (2 * t["gamma2"]), rel=5e-3)
    assert all(v.enters for v in got.values())


def test_the_parabola_is_least_squares():
    rng = np.random.default_rng(3)
    u, group = rng.normal(0, 0.8, 14), np.repeat([0.0, 1.0], 7)
    others = np.column_stack([1 - group, group])
    y = 1 + 0.2 * group - 0.01 * u + 0.02 * u**2 + rng.normal(0, 0.003, 14)
    made = parabola(y, u, others)
    ols = sm.OLS(y, np.column_stack([u, u * u, others])).fit()
    assert made.c == pytest.approx(ols.params[:2], rel=1e-9)
    assert made.unit * made.variance == pytest.approx(ols.cov_params()[:2, :2], rel=1e-9)
    runs = pd.DataFrame({"depth": 10.0, "width": 10 * R0 * np.exp(u), "params": 1e8, "tokens": 1e9, "loss": np.exp(y)})
    got = by_quantity(of_parabola(made, ABOUT, runs))
    a, b = np.log(76 / R0), np.log(40 / R0)
    test = ols.t_test(100 * np.array([[a - b, a * a - b * b, 0, 0], [0, np.log(4) ** 2, 0, 0]]))
    assert [got["contrast"].estimate, got["penalty"].estimate] == pytest.approx(test.effect, rel=1e-9)
    assert [got["contrast"].se, got["penalty"].se] == pytest.approx(test.sd, rel=1e-9)
    assert [got["contrast"].low, got["penalty"].low] == pytest.approx(test.conf_int()[:, 0], rel=1e-9)


def test_what_is_not_identified_does_not_enter():
    u = np.linspace(-0.8, 0.8, 6)
    runs = pd.DataFrame({"depth": 10.0, "width": 10 * R0 * np.exp(u), "params": 1e8, "tokens": 1e9, "loss": 3.0})
    noise = np.array([1, -1, 1, -1, 1, -1]) * 2e-3
    falling = by_quantity(of_parabola(parabola(1 - 0.02 * u + noise, u, np.ones((6, 1))), ABOUT, runs))
    assert falling["contrast"].enters
    assert not falling["optimum"].enters
    assert math.isnan(falling["optimum"].estimate)
    assert "Fieller set" in falling["optimum"].note
    few = of_parabola(parabola((1 + noise)[:4], u[:4], np.ones((4, 1))), ABOUT, runs[:4])
    assert not any(e.enters for e in few)
    assert "1 degrees of freedom" in few[0].note
    narrow = runs.assign(width=10 * R0 * np.exp(u / 10))
    contrast = by_quantity(of_parabola(parabola(1 + u**2 + noise, u / 10, np.ones((6, 1))), ABOUT, narrow))["contrast"]
    assert not contrast.enters
    assert "no shapes from 40 to 76" in contrast.note


def test_depthbench_optima_are_told_as_far_as_they_are_known():
    effects = depthbench_effects(None)
    pre, hc = (by_quantity(effects, a) for a in ("pre_ln", "hc"))
    assert not pre["optimum"].enters
    assert 50 < math.exp(pre["optimum"].low) < 78  # at least this; the upper end leaves the shapes that were run
    assert math.isinf(pre["optimum"].high)
    assert hc["optimum"].enters
    assert 9 < math.exp(hc["optimum"].low) < math.exp(hc["optimum"].high) < 40
    assert pre["contrast"].estimate < 0 < hc["contrast"].estimate
    assert [e.architecture for e in effects if e.baseline] == ["pre_ln"] * 3


def test_depthbench_at_equal_totals_is_a_plain_parabola():
    own = depthbench().query("match_group == '400M' and architecture == 'keel'")
    u = np.log(own["width"] / own["depth"] / R0)
    c2, c1, _ = np.polyfit(u, np.log(own["loss"]), 2)
    got = by_quantity(depthbench_effects(None, "total"), "keel")
    assert got["penalty"].estimate == pytest.approx(100 * c2 * np.log(4) ** 2, rel=1e-6)
    a, b = np.log(76 / R0), np.log(40 / R0)
    assert got["contrast"].estimate == pytest.approx(100 * (c1 * (a - b) + c2 * (a * a - b * b)), rel=1e-6)
    assert got["penalty"].df == 24  # 54 cells less three for each of ten architectures


def test_the_correction_carries_its_own_error():
    raw, corrected = (
        by_quantity(depthbench_effects(None, corrected=c, grids=("400M",)), "keel") for c in (False, True)
    )
    assert raw["contrast"].estimate > corrected["contrast"].estimate  # deeper shapes had more backbone
    assert corrected["contrast"].se > 0
    assert decisive_run() == "300M/pre_ln/42x768"  # 2.817 nats, .05 above the neighbouring depth


@quiet
def test_own_runs_by_law_or_by_parabola():
    table = read_runs("embedded:simulated_shapes")
    law = own_effects(table)
    assert {e.quantity for e in law} == {"penalty", "contrast", "optimum"}
    rng = np.random.default_rng(0)
    r = np.geomspace(8, 200, 7)
    depth = np.cbrt(3e8 / 12 / r**2)
    loss = 2.8 * np.exp(0.004 * np.log(r / 40) ** 2 + rng.normal(0, 2e-4, 7))
    few = pd.DataFrame(
        {"depth": depth, "width": depth * r, "params": 3e8, "tokens": 8e9, "loss": loss, "run_id": range(7)}
    )
    got = by_quantity(own_effects(few))
    assert got["penalty"].estimate == pytest.approx(100 * 0.004 * np.log(4) ** 2, abs=4 * got["penalty"].se)
    assert got["optimum"].estimate == pytest.approx(np.log(40), abs=4 * got["optimum"].se)
    assert got["optimum"].enters
    two = pd.concat([few.assign(architecture="hc"), few.assign(architecture="pre_ln")])
    assert {(e.architecture, e.baseline) for e in own_effects(two)} == {("hc", False), ("pre_ln", True)}
    with pytest.raises(SchemaError, match="lack the column 'tokens'"):
        own_effects(few.drop(columns="tokens"))


def test_intervals_of_a_parabola_cover():
    """400 draws of nine shapes: contrast and penalty inside their intervals in .95 +- 3 binomial standard errors."""
    rng = np.random.default_rng(5)
    u = np.linspace(-1.3, 1.0, 9)
    runs = pd.DataFrame({"depth": 10.0, "width": 10 * R0 * np.exp(u), "params": 1e8, "tokens": 1e9, "loss": 3.0})
    a, b = np.log(76 / R0), np.log(40 / R0)
    truth = {"penalty": 100 * 0.004 * np.log(4) ** 2, "contrast": 100 * (0.001 * (a - b) + 0.004 * (a * a - b * b))}
    hit = dict.fromkeys(truth, 0)
    for _ in range(400):
        y = 1 + 0.001 * u + 0.004 * u**2 + rng.normal(0, 0.002, 9)
        got = by_quantity(of_parabola(parabola(y, u, np.ones((9, 1))), ABOUT, runs))
        for q, value in truth.items():
            hit[q] += got[q].low <= value <= got[q].high
    for q in truth:
        assert hit[q] / 400 == pytest.approx(0.95, abs=3 * math.sqrt(0.05 * 0.95 / 400)), q


# ---- together ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def with_own():
    return pooled_shape(own=read_runs("embedded:simulated_shapes"))


def test_one_study_is_not_pooled():
    made = pooled_shape()
    assert made.primary == {}
    first = made.pooled[made.pooled["analysis"] == PRIMARY].set_index("quantity")
    told = "one study: its own estimate, not pooled; interval by least squares, t"
    assert (first.loc[["penalty", "contrast"], "note"] == told).all()
    assert first.loc["optimum", "note"] == "no study identifies it"
    absent = made.effects[made.effects["study"] == "Gemstones"]
    assert (absent["note"] == "skipped: needs gemstones_checkpoints.csv").all()
    assert not absent["enters"].any()
    assert "not pooled" in made.summary()


def test_own_runs_are_one_more_study(with_own):
    first = with_own.pooled[with_own.pooled["analysis"] == PRIMARY].set_index("quantity")
    assert first.loc["penalty", "studies"] == "DepthBench, own runs"
    weights = with_own.effects.groupby("quantity")["weight"].sum()
    assert weights["penalty"] == pytest.approx(1)
    rows = with_own.effects.query("quantity == 'penalty' and weight > 0")
    made = combine_effects(
        rows["estimate"].to_numpy(), np.array([widened(s, d) ** 2 for s, d in zip(rows["se"], rows["df"], strict=True)]),
        method_re="chi2",
    )  # fmt: skip
    again = with_own.pooled.query("quantity == 'penalty' and analysis == 'primary by DerSimonian-Laird'").iloc[0]
    assert again["estimate"] == pytest.approx(made.mean_effect_re, rel=1e-9)
    assert again["tau"] ** 2 == pytest.approx(max(0.0, made.tau2), abs=1e-9)


@pytest.mark.shared
def test_all_public_studies(shared):
    made = pooled_shape(shared)
    first = made.pooled[made.pooled["analysis"] == PRIMARY].set_index("quantity")
    assert first.loc["penalty", "studies"] == "Gemstones, DepthBench, snimu"
    assert first.loc["contrast", "studies"] == "Gemstones, DepthBench, Chinchilla, snimu"
    assert first.loc["optimum", "note"] == (
        "one study: its own estimate, not pooled; interval by jackknife over shapes on ln(d/L), t (beside it: Fieller set 34 to 120)"
    )
    assert first.loc["optimum", "aspect"] == pytest.approx(48.72, abs=0.1)  # the law's r* on backbone parameters
    for _, r in first.loc[["penalty", "contrast"]].iterrows():
        assert r["new_low"] < r["low"] < r["estimate"] < r["high"] < r["new_high"]
    penalty = made.pooled[made.pooled["quantity"] == "penalty"].set_index("analysis")
    # the numbers that docs/replications.md prints
    printed = {PRIMARY: (1.05, -1.32, 3.43), "DepthBench without one run": (0.66, 0.20, 1.12),
               "all architectures, studies left out": (0.67, 0.06, 1.28)}  # fmt: skip
    for name, values in printed.items():
        assert penalty.loc[name, ["estimate", "low", "high"]].tolist() == pytest.approx(values, abs=0.006), name
    assert first.loc["contrast", ["estimate", "low", "high"]].tolist() == pytest.approx((-0.14, -0.75, 0.47), abs=0.006)
    between = made.pooled.query("quantity == 'contrast' and analysis == 'DepthBench, architectures as rows'").iloc[0]
    assert [between["tau"], between["tau_low"], between["tau_high"]] == pytest.approx((0.38, 0.19, 0.72), abs=0.006)
    assert between["p_Q"] < 0.001
    # one run of DepthBench makes the heterogeneity
    assert penalty.loc[PRIMARY, "tau"] > 0.3
    assert penalty.loc["DepthBench without one run", "tau"] == 0
    assert penalty.loc["all architectures, studies left out", "low"] > 0
    never = made.effects[made.effects["study"].isin(["Gadre", "Clark", "Misfitting", "Porian", "step-law"])]
    assert not never["enters"].any()
    assert never["note"].str.contains("one or two per size").all()


@pytest.mark.shared
def test_what_n_counts_moves_the_optimum_and_its_drift(shared):
    shift = convention_shift(shared)
    assert shift.loc["optimum", "estimate"] == pytest.approx(math.log(9.2994 / 48.7234), abs=2e-3)
    assert shift.loc["optimum", "high"] < -1
    assert shift.loc["contrast", "low"] > 0
    assert drift(shared, "backbone")["estimate"] < 0 < drift(shared, "total")["low"]


@pytest.mark.shared
def test_parameters_of_small_models_are_checked(shared, tmp_path):
    got = by_quantity(snimu_effects(shared))
    assert got["contrast"].shapes == 11
    table = pd.read_csv(shared / "snimu_wikitext_shapes.csv.gz", low_memory=False)
    table["params"] = table["params"] * np.where(table["d_model"] == 512, 1.2, 1.0)
    table.to_csv(tmp_path / "snimu_wikitext_shapes.csv.gz", index=False)
    with pytest.raises(SchemaError, match="not those of one block"):
        snimu_effects(tmp_path)


# ---- told --------------------------------------------------------------------------------------------------------------
def test_what_is_written_is_whole(tmp_path, with_own):
    table = replications()
    folder = save(table, with_own, tmp_path / "out")
    names = {f"{n}.{k}" for n in ("replications", "pooled", "effects") for k in ("csv", "md")} | {"result.json"}
    assert {p.name for p in folder.iterdir()} == names
    document = json.loads((folder / "result.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
    assert document["schema"] == "scalinglab/replications-1"
    assert len(document["replications"]) == len(table)
    back = pd.read_csv(folder / "pooled.csv")
    assert back["estimate"].to_numpy() == pytest.approx(with_own.pooled["estimate"].to_numpy(float), nan_ok=True)
    text = (folder / "replications.md").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("Of ")
    assert all(count in lines[0] for count in counted(table)[1:])
    assert sum(line.startswith("|") for line in lines) == len(table) + 2
    sources = list(dict.fromkeys(table["source"]))
    assert [line for line in lines if line.startswith("- [")] == [f"- [{k}] {s}" for k, s in enumerate(sources, 1)]
    head = [cell.strip() for cell in next(line for line in lines if line.startswith("|")).strip("|").split("|")]
    assert {"kind", "rule", "source"} <= set(head)
    assert document["counts"] == counted(table)
    assert "skipped: needs chinchilla" in text


@pytest.mark.parametrize("quantity", ["penalty", "contrast", "optimum"])
@pytest.mark.parametrize("width", ["column", "page"])
def test_forests_keep_their_text_inside(with_own, quantity, width):
    drawn = pooled_forest(with_own, quantity=quantity, width=width)
    box = drawn.bbox
    texts = [t for t in drawn.axes[0].texts if t.get_text().strip()]
    assert any("DepthBench" in t.get_text() for t in [*texts, *drawn.axes[0].get_yticklabels()])
    for t in texts:
        extent = t.get_window_extent()
        assert extent.x1 <= box.x1 + 1, t.get_text()
        assert extent.x0 >= box.x0 - 1, t.get_text()
    diamonds = len(drawn.axes[0].patches)
    expected = {"penalty": 2, "contrast": 2, "optimum": with_own.primary.get("optimum") is not None}[quantity]
    assert diamonds == expected


def test_a_forest_of_nothing_is_refused(with_own):
    with pytest.raises(ConfigError, match="give penalty, contrast or optimum"):
        pooled_forest(with_own, quantity="cost")
    empty = dataclasses.replace(with_own, effects=with_own.effects.iloc[:0], pooled=with_own.pooled.iloc[:0])
    with pytest.raises(ConfigError, match="no study identifies the penalty"):
        pooled_forest(empty, quantity="penalty")


def test_the_command(tmp_path, capsys):
    assert replicate(out=tmp_path / "r", own="embedded:simulated_shapes") == 0
    said = capsys.readouterr()
    assert "Four times away from the best d/L" in said.out
    assert "skipped: needs steplaw_dense.csv" in said.err
    assert "printed numbers: " in said.err
    assert "earlier refits: " in said.err
    assert (tmp_path / "r" / "figures" / "penalty_page.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="is no folder"):
        replicate(out=tmp_path / "s", data=tmp_path / "none", figures=False)

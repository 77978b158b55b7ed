"""Results, cell means and their tests; DepthBench's published table as regression test."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.hypotheses import (
    HypothesisTest,
    cell_means,
    depth_slopes,
    gap_test,
    interaction_f,
    lack_of_fit,
    slope_differences,
    t_test,
)
from scalinglab.published import depthbench

DEPTHS = (16, 24, 32, 42, 70)


def study(rng, *, architectures=("a", "b", "c"), seeds=3, sigma=0.003, tau=0.002, slopes=(0.0, 0.0, 0.0)):
    """Run table: architectures x depths x seeds."""
    rows = []
    for name, slope in zip(architectures, slopes, strict=True):
        for depth in DEPTHS:
            shape = tau * rng.normal()
            rows += [
                (f"{name}/{depth}/{s}", name, depth, 2.7 + slope * np.log(depth) + shape + sigma * rng.normal())
                for s in range(seeds)
            ]
    return pd.DataFrame(rows, columns=["run_id", "architecture", "depth", "loss"])


# ---- results -------------------------------------------------------------------------------------------------------------
def test_a_result_tells_what_it_stands_on_and_survives_json():
    made = t_test("gap", 0.01, 0.003, 8, null="no gap", found="deeper is better", n_runs=10, assumptions=("normal",))
    assert made.p_value == pytest.approx(2 * stats.t.sf(0.01 / 0.003, 8), rel=1e-12)
    assert made.interval == pytest.approx(stats.t.interval(0.95, 8, 0.01, 0.003), rel=1e-10)
    assert made.rejected
    assert made.decision == "deeper is better"
    text = made.summary()
    assert "assumes: normal" in text
    assert "t, two-sided; 10 runs" in text
    back = json.loads(made.to_json())
    assert back["estimate"] == 0.01
    assert back["warnings"] == []


def test_what_json_lacks_becomes_null_and_is_named():
    made = HypothesisTest("x", "y", math.nan, "unresolved", interval=(-math.inf, 1.0))
    out = json.loads(made.to_json())
    assert out["p_value"] is None
    assert out["interval"] == [None, 1.0]
    assert {"code": "NOT_FINITE", "field": "interval[0]", "value": "-inf"} in out["warnings"]
    assert made.rejected is None


def test_a_null_result_names_the_smallest_visible_effect():
    made = t_test("gap", 0.001, 0.003, 8, null="no gap", found="deeper is better")
    assert made.decision.startswith("unresolved at 0.05: effects below 0.0096 nats")
    assert "no effect" not in made.decision
    assert "no difference" not in made.decision
    t = stats.t.ppf(0.975, 8)
    power = stats.nct.sf(t, 8, made.diagnostics["mde80"] / 0.003)
    assert power == pytest.approx(0.8, abs=1e-6)


def test_a_t_test_needs_an_error():
    with pytest.raises(ConfigError, match="make no t test"):
        t_test("gap", 0.01, 0.0, 8, null="", found="")
    with pytest.raises(ConfigError, match="alternative 'upward' is not known"):
        t_test("gap", 0.01, 0.1, 8, null="", found="", alternative="upward")


# ---- DepthBench ----------------------------------------------------------------------------------------------------------
# OLS of loss on ln(depth / width), five shapes of 400 M total parameters (depths 16-32), computed outside this package:
# slope, standard error, p, difference to Pre-LN, its standard error, t.
PUBLISHED = {
    "pre_ln": (0.0237, 0.0052, 0.020, None, None, None),
    "attnres_full": (-0.0298, 0.0077, 0.030, -0.0536, 0.0093, -5.78),
    "hc": (-0.0248, 0.0095, 0.079, -0.0486, 0.0108, -4.48),
    "lns": (-0.0074, 0.0053, 0.26, -0.0311, 0.0074, -4.19),
    "keel": (-0.0048, 0.0079, 0.59, -0.0285, 0.0095, -3.01),
    "attnres_block": (-0.0007, 0.0109, 0.95, -0.0244, 0.0121, -2.02),
    "sandwich_ln": (0.0009, 0.0078, 0.91, -0.0228, 0.0094, -2.43),
    "mhc": (0.0030, 0.0088, 0.76, -0.0207, 0.0102, -2.03),
    "deepnorm": (0.0112, 0.0087, 0.29, -0.0125, 0.0101, -1.23),
    "moda": (0.0267, 0.0107, 0.088, 0.0030, 0.0119, 0.25),
}


@pytest.fixture(scope="module")
def published():
    table = depthbench()
    table = table[table["match_group"] == "400M"]
    return table.assign(inverse_aspect=table["depth"] / table["width"])


def test_depthbench_slopes_to_the_printed_digits(published):
    made = depth_slopes(cell_means(published[published["depth"] <= 32], x="inverse_aspect"))
    for name, (slope, se, p, *_) in PUBLISHED.items():
        line = made.loc[name]
        assert line["slope"] == pytest.approx(slope, abs=5.1e-5), name
        assert line["se"] == pytest.approx(se, abs=5.1e-5), name
        assert line["p"] == pytest.approx(p, abs=0.0051 if p > 0.1 else 5.1e-4), name
        assert line["df"] == 3


def test_depthbench_differences_to_the_printed_digits(published):
    cells = cell_means(published[published["depth"] <= 32], x="inverse_aspect")
    made, _ = slope_differences(cells, reference="pre_ln", error="separate")
    for name, (_, _, _, gap, se, t) in PUBLISHED.items():
        if gap is None:
            continue
        line = made.loc[name]
        assert line["difference"] == pytest.approx(gap, abs=5.1e-5), name
        assert line["se"] == pytest.approx(se, abs=5.1e-5), name
        assert line["t"] == pytest.approx(t, abs=0.0051), name
        assert line["df"] == 6
    assert made["p"].sort_values().iloc[:4].to_list() == pytest.approx([0.0012, 0.0042, 0.0058, 0.024], rel=0.03)


def test_depthbench_with_all_seven_depths(published):
    made = depth_slopes(cell_means(published, x="inverse_aspect"))
    assert made.loc["hc", ["slope", "se"]].to_list() == pytest.approx([-0.0211, 0.0036], abs=5.1e-5)
    assert made.loc["attnres_full", ["slope", "se"]].to_list() == pytest.approx([-0.0208, 0.0037], abs=5.1e-5)
    pooled = interaction_f(cell_means(published[published["depth"] <= 32], x="inverse_aspect"), degree=1)
    assert pooled.diagnostics["residual sd"] == pytest.approx(0.0067, abs=5e-5)


# ---- cells ---------------------------------------------------------------------------------------------------------------
def test_cell_means_average_seeds_and_keep_their_spread():
    runs = study(np.random.default_rng(0))
    cells = cell_means(runs)
    by_hand = runs.groupby(["architecture", "depth"])["loss"].agg(["mean", "var"])
    assert cells.mean == pytest.approx(by_hand["mean"].to_numpy())
    assert cells.within == pytest.approx(2 * by_hand["var"].to_numpy())
    assert cells.pure_error == (pytest.approx(by_hand["var"].mean()), 30)
    assert cells.balanced
    assert cells.n_runs == 45


def test_duplicated_checkpoints_change_nothing():
    runs = study(np.random.default_rng(1), slopes=(0.0, 0.01, 0.02))
    many = pd.concat([runs.assign(step=s, loss=runs["loss"] + (0 if s == 9 else 0.1)) for s in range(10)])
    copies = pd.concat([runs] * 10)
    one = interaction_f(cell_means(runs), degree=1)
    for other in (many, copies):
        assert interaction_f(cell_means(other), degree=1).p_value == pytest.approx(one.p_value, rel=1e-12)
        pd.testing.assert_frame_equal(depth_slopes(cell_means(other)), depth_slopes(cell_means(runs)))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 100), st.floats(-5, 5), st.randoms(use_true_random=False))
def test_units_names_and_order_do_not_matter(factor, shift, random):
    runs = study(np.random.default_rng(2), slopes=(0.0, 0.004, -0.003))
    one = interaction_f(cell_means(runs), degree=2)
    order = list(range(len(runs)))
    random.shuffle(order)
    other = runs.iloc[order].assign(
        loss=lambda t: shift + factor * t["loss"],
        architecture=lambda t: t["architecture"].map({"a": "z", "b": "y", "c": "x"}),
    )
    assert interaction_f(cell_means(other), degree=2).p_value == pytest.approx(one.p_value, rel=1e-6)


def test_bad_tables_are_named():
    runs = study(np.random.default_rng(0))
    with pytest.raises(SchemaError, match="need the column 'recipe'"):
        cell_means(runs, by="recipe")
    with pytest.raises(
        SchemaError, match="column 'loss', row 3 is nan: cell means need finite values; treat diverged runs"
    ):
        cell_means(runs.assign(loss=runs["loss"].where(np.arange(len(runs)) != 2)))
    with pytest.raises(SchemaError, match="column 'depth', row 1 is 0: cell means need finite values above 0"):
        cell_means(runs.assign(depth=0))
    with pytest.raises(ConfigError, match="needs at least 3 depths"):
        depth_slopes(cell_means(runs[runs["depth"] < 30]))
    with pytest.raises(ConfigError, match="there is no group 'pre_ln'; the cells have a, b, c"):
        slope_differences(cell_means(runs), reference="pre_ln")


# ---- F tests against statsmodels -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("degree", [1, 2])
def test_interaction_f_is_that_of_statsmodels(degree):
    runs = study(np.random.default_rng(3), slopes=(0.0, 0.004, -0.003))
    mean = runs.groupby(["architecture", "depth"], as_index=False)["loss"].mean().assign(x=lambda t: np.log(t["depth"]))
    power = "x" if degree == 1 else "(x + I(x**2))"
    small = ols(f"loss ~ C(architecture) + {power}", mean).fit()
    large = ols(f"loss ~ C(architecture) * {power}", mean).fit()
    want = anova_lm(small, large).iloc[1]
    made = interaction_f(cell_means(runs), degree=degree)
    assert made.statistic == pytest.approx(want["F"], rel=1e-8)
    assert made.p_value == pytest.approx(want["Pr(>F)"], rel=1e-8)
    assert made.df == (2 * degree, 15 - 3 * (degree + 1))


def test_effects_that_all_architectures_share_at_a_shape_are_no_error():
    runs = study(np.random.default_rng(4), slopes=(0.0, 0.006, 0.012), tau=0.0, sigma=0.002)
    bump = dict(zip(DEPTHS, (0.02, -0.03, 0.01, 0.04, -0.02), strict=True))
    rough = runs.assign(loss=runs["loss"] + runs["depth"].map(bump))
    smooth = interaction_f(cell_means(runs), degree=1, shared="shapes")
    made = interaction_f(cell_means(rough), degree=1, shared="shapes")
    assert made.p_value == pytest.approx(smooth.p_value, rel=1e-6)
    assert interaction_f(cell_means(rough), degree=1).p_value > 0.5
    mean = (
        rough.groupby(["architecture", "depth"], as_index=False)["loss"].mean().assign(x=lambda t: np.log(t["depth"]))
    )
    two_way = pd.get_dummies(mean[["architecture", "depth"]].astype(str)).to_numpy(float)  # rank 3 + 5 - 1
    slopes = pd.get_dummies(mean["architecture"]).to_numpy(float)[:, 1:] * mean[["x"]].to_numpy()
    y = mean["loss"].to_numpy()
    rss = [((y - X @ np.linalg.pinv(X) @ y) ** 2).sum() for X in (two_way, np.hstack([two_way, slopes]))]
    assert made.statistic == pytest.approx((rss[0] - rss[1]) / 2 / (rss[1] / 6), rel=1e-7)
    assert made.df == (2, 6)
    with pytest.raises(ConfigError, match="the same shapes in every group"):
        interaction_f(cell_means(runs[(runs["depth"] < 70) | (runs["architecture"] != "a")]), degree=1, shared="shapes")


def test_interaction_needs_cells():
    runs = study(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="at least two groups"):
        interaction_f(cell_means(runs, by=None))
    with pytest.raises(ConfigError, match="can't carry profiles of degree 4"):
        interaction_f(cell_means(runs), degree=4)
    flat = runs.assign(loss=2.7)
    with pytest.raises(ConfigError, match="fit the cell means exactly"):
        interaction_f(cell_means(flat))


def test_unequal_spread_is_flagged():
    rng = np.random.default_rng(5)
    parts = [
        study(rng, architectures=(name,), slopes=(0.0,), tau=tau, sigma=1e-5)
        for name, tau in (("a", 0.0001), ("b", 0.0001), ("c", 0.02), ("d", 0.02))
    ]
    made = interaction_f(cell_means(pd.concat(parts)), degree=1)
    assert "HETEROSCEDASTIC" in made.codes


def test_lack_of_fit_is_that_of_an_analysis_of_variance():
    runs = study(np.random.default_rng(6), architectures=("a",), slopes=(0.0,), seeds=4).assign(
        x=lambda t: np.log(t["depth"])
    )
    want = anova_lm(ols("loss ~ x", runs).fit(), ols("loss ~ C(depth)", runs).fit()).iloc[1]
    made = lack_of_fit(cell_means(runs), degree=1)
    assert made.statistic == pytest.approx(want["F"], rel=1e-8)
    assert made.df == (3, 15)
    with pytest.raises(ConfigError, match="at least two seeds"):
        lack_of_fit(cell_means(runs.drop_duplicates("depth")))


# ---- gaps ----------------------------------------------------------------------------------------------------------------
def test_gap_tests_are_those_of_scipy():
    rng = np.random.default_rng(7)
    common = rng.normal(0, 0.01, 6)
    a, b = 2.71 + common + rng.normal(0, 0.002, 6), 2.70 + common + rng.normal(0, 0.002, 6)
    paired, welch = gap_test(a, b, paired=True), gap_test(a, b)
    assert paired.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    assert welch.p_value == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-9)
    assert welch.interval == pytest.approx(
        tuple(stats.ttest_ind(a, b, equal_var=False).confidence_interval()), rel=1e-8
    )
    assert paired.estimate > 0  # positive when deeper is better
    assert paired.p_value < welch.p_value
    low, high = paired.diagnostics["pair correlation, 90 % interval"]
    assert low < paired.diagnostics["pair correlation"] < high


def test_gaps_need_seeds_that_differ():
    with pytest.raises(ConfigError, match="deep has 1 values; at least 2"):
        gap_test([2.7, 2.8], [2.7])
    with pytest.raises(ConfigError, match="are no pairs"):
        gap_test([2.7, 2.8, 2.9], [2.7, 2.6], paired=True)
    with pytest.raises(ConfigError, match="copies of one run"):
        gap_test([2.7, 2.7], [2.6, 2.6])
    with pytest.raises(ConfigError, match="diverged runs need their own analysis"):
        gap_test([2.7, math.nan], [2.6, 2.7])

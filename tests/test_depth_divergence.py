"""Lost runs: rates, worst ranks, bounds and tipping points, under the mechanisms of the design note (9.5)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalinglab.depth_benefit.analysis import Options, analyse
from scalinglab.depth_benefit.cell_effects import cell_effects
from scalinglab.depth_benefit.cells import cell_table, fit_cells
from scalinglab.depth_benefit.divergence import (
    bounds,
    divergence_effect,
    divergence_table,
    divergence_trend,
    restricted_mean_tokens,
    worst_rank,
)
from scalinglab.depth_benefit.intake import take_in
from scalinglab.errors import ConfigError

DEPTHS = (16, 20, 24, 28, 32, 42, 70)  # the design note doesn't list its seven depths: these give its power
SIGMA = 0.012


def latent(beta, reps, seeds=5, seed=0):
    """Latent losses [reps, 7 depths x seeds] with slope -beta per ln depth, and x."""
    rng = np.random.default_rng(seed)
    x = np.repeat(np.log(DEPTHS), seeds)
    return 2.75 - beta * (x - x.mean()) + rng.normal(0, SIGMA, (reps, len(x))), x, rng


def lost_by(mechanism, y, x, rng):
    """Which runs diverge [reps, n]: a threshold on the latent loss, or a chance that rises with depth alone."""
    if mechanism == "latent":
        return y > np.quantile(y, 0.84)
    deep = (x - x.min()) / (x.max() - x.min())
    return rng.random(y.shape) < 0.41 * deep**2


def table(y, x, lost, tokens=8e9):
    depth = np.round(np.exp(x)).astype(int)
    width = np.sqrt(3e8 / (12 * depth)).round()
    return pd.DataFrame({
        "run_id": [f"r{i}" for i in range(len(x))], "architecture": "pre_ln", "match_group": "g", "depth": depth,
        "width": width, "params_backbone": 3e8, "tokens": tokens, "seed": np.arange(len(x)) % 5, "vocab": 50280,
        "loss": np.where(lost, np.nan, y), "status": np.where(lost, "diverged", "finished"),
    })  # fmt: skip


def complete_case(y, x, lost):
    """p of the OLS slope among living runs."""
    keep = ~lost
    return stats.linregress(x[keep], y[keep]).pvalue


# ---- mechanisms (9.5, fast) ------------------------------------------------------------------------------------------
def test_complete_case_is_biased_only_where_loss_decides_who_lives():
    reps = 200
    slopes = {}
    for mechanism in ("latent", "depth"):
        y, x, rng = latent(0.012, reps, seed=1)
        lost = lost_by(mechanism, y, x, rng)
        slopes[mechanism] = np.mean([-np.polyfit(x[~g], v[~g], 1)[0] for v, g in zip(y, lost, strict=True)])
    assert slopes["latent"] == pytest.approx(0.008, abs=0.0015)  # published: .008 of .012
    assert slopes["depth"] == pytest.approx(0.012, abs=0.001)


def test_worst_rank_is_calibrated_when_loss_alone_decides_and_sees_depth_when_it_does():
    """Published (200 repetitions): .03 under a latent threshold without slope, .20 when depth causes divergence, .69 with slope."""
    share = {}
    for name, mechanism, beta in (("null", "latent", 0.0), ("depth", "depth", 0.0), ("slope", "latent", 0.012)):
        y, x, rng = latent(beta, 120, seed=2)
        lost = lost_by(mechanism, y, x, rng)
        share[name] = np.mean([worst_rank(x, v, g, draws=299, rng=3)[1] < 0.05 for v, g in zip(y, lost, strict=True)])
    assert share["null"] <= 0.12  # binomial: P(> 14 of 120 at .05) = .1 %
    assert share["depth"] > share["null"]
    assert share["slope"] == pytest.approx(0.69, abs=0.2)


def test_label_is_selection_sensitive_where_complete_case_and_composite_disagree():
    """M8, fast: of the studies in which the two analyses disagree, at least 95 % are labelled so (or by an earlier rule)."""
    y, x, rng = latent(0.012, 12, seed=4)
    lost = lost_by("depth", y, x, rng)
    seen, caught = 0, 0
    for v, g in zip(y, lost, strict=True):
        if not g.any():
            continue
        outcome = analyse(take_in(table(v, x, g)), Options(degree=1))
        e = outcome.evidence["pre_ln"]
        if e.composite_label != outcome.verdicts["pre_ln"].reading:
            seen += 1
            caught += outcome.verdicts["pre_ln"].label in ("SELECTION_SENSITIVE", "CONFOUNDED_N")
    assert seen >= 5
    assert caught == seen


# ---- rates -------------------------------------------------------------------------------------------------------------
def test_rates_and_clopper_pearson():
    y, x, _ = latent(0.0, 1)
    lost = np.zeros(35, bool)
    lost[-3:] = True  # three of five at depth 70
    intake = take_in(table(y[0], x, lost))
    made = divergence_table(intake.runs, intake.lost).set_index("depth")
    assert made.loc[70, ["n", "diverged"]].tolist() == [5, 3]
    exact = stats.binomtest(3, 5).proportion_ci(method="exact")
    assert (made.loc[70, "low"], made.loc[70, "high"]) == pytest.approx((exact.low, exact.high), rel=1e-9)
    none = stats.binomtest(0, 5).proportion_ci(method="exact")
    assert (made.loc[16, "low"], made.loc[16, "high"]) == pytest.approx((0.0, none.high), rel=1e-9)
    e = divergence_effect(intake.runs, intake.lost, "pre_ln")
    assert e.estimate == pytest.approx(0.6)
    low, high = e.interval()
    assert low < 0.6 < high
    from statsmodels.stats.proportion import confint_proportions_2indep

    assert (low, high) == pytest.approx(confint_proportions_2indep(3, 5, 0, 5, method="newcomb"), rel=1e-9)
    statistic, p = divergence_trend(
        np.r_[intake.runs["x"], intake.lost["x"]], np.r_[np.zeros(32), np.ones(3)] > 0, draws=999
    )
    assert statistic > 0
    assert p < 0.05
    assert divergence_trend(x, np.zeros(35, bool)) == (0.0, 1.0)
    with pytest.raises(ConfigError, match="needs two"):
        divergence_effect(intake.runs[intake.runs["depth"] == 16], intake.lost.iloc[:0], "pre_ln")
    with pytest.raises(ConfigError, match="one value per run"):
        divergence_trend(x, [True])


def test_tokens_until_divergence():
    y, x, _ = latent(0.0, 1)
    lost = np.zeros(35, bool)
    lost[-2:] = True
    tokens = np.full(35, 8e9)
    tokens[-2:] = (2e9, 4e9)
    intake = take_in(table(y[0], x, lost, tokens=tokens))
    made = restricted_mean_tokens(intake.runs, intake.lost).set_index("depth")
    assert made.loc[70, "mean_share"] == pytest.approx((3 + 0.25 + 0.5) / 5)
    assert made.loc[16, "mean_share"] == 1.0


# ---- worst rank ---------------------------------------------------------------------------------------------------------
def test_worst_rank_without_losses_is_a_rank_trend():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(12), rng.standard_normal(12)
    statistic, p = worst_rank(x, y, np.zeros(12, bool), draws=4999)
    r = stats.rankdata(y)
    assert statistic == pytest.approx(float((r - r.mean()) @ (x - x.mean())))
    # exact in the limit: correlation of ranks with x
    exact = stats.permutation_test((r,), lambda v: float((v - v.mean()) @ (x - x.mean())), permutation_type="pairings",
                                   n_resamples=4999, rng=np.random.default_rng(1))  # fmt: skip
    assert p == pytest.approx(exact.pvalue, abs=0.03)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 99))
def test_worst_rank_does_not_care_how_bad_lost_runs_were(lost, seed):
    rng = np.random.default_rng(seed)
    x, y = np.arange(8.0), rng.standard_normal(8)
    gone = np.array(lost)
    one = worst_rank(x, np.where(gone, np.nan, y), gone, draws=99)
    two = worst_rank(x, np.where(gone, 1e6, y), gone, draws=99)
    assert one == two


def test_worst_rank_refuses():
    with pytest.raises(ConfigError, match="one value per run"):
        worst_rank([1, 2], [1.0], [False, False])
    with pytest.raises(ConfigError, match="a loss is missing"):
        worst_rank([1, 2], [1.0, np.nan], [False, False])
    with pytest.raises(ConfigError, match="no trend to test"):
        worst_rank([1, 1], [1.0, 2.0], [False, False])


# ---- bounds -------------------------------------------------------------------------------------------------------------
def studied(lost_at=(), beta=0.03, seed=7):
    y, x, _ = latent(beta, 1, seed=seed)
    lost = np.zeros(35, bool)
    lost[list(lost_at)] = True
    intake = take_in(table(y[0], x, lost))
    model = fit_cells(cell_table(intake.runs), degree=1)
    return intake, model, y[0]


def test_bounds_are_what_imputation_gives():
    """Both ends and the composite by refitting with the lost losses filled in; the tipping point makes B exactly 0."""
    intake, model, _ = studied((30, 31, 2))
    made = bounds(model, intake.runs, intake.lost, "pre_ln", cap=2.9, floor=2.7)

    def refitted(values):
        filled = pd.concat([intake.runs, intake.lost.assign(loss=[values[r] for r in intake.lost["run_id"]])])
        again = fit_cells(cell_table(filled), degree=1)
        return cell_effects(again).pick("E1").estimate

    w = model.weights("pre_ln")
    assert made.complete == pytest.approx(cell_effects(model).pick("E1").estimate)
    sign = {
        r: np.sign(w[(model.table["depth"] == d).to_numpy()][0])
        for r, d in zip(intake.lost["run_id"], intake.lost["depth"], strict=True)
    }
    highest = refitted({r: 2.9 if s > 0 else 2.7 for r, s in sign.items()})
    lowest = refitted({r: 2.7 if s > 0 else 2.9 for r, s in sign.items()})
    assert made.manski == pytest.approx((lowest, highest), rel=1e-9)
    assert made.composite == pytest.approx(refitted(dict.fromkeys(sign, 2.9)), rel=1e-9)
    means = model.table.set_index("depth")["loss"]
    shifted = {r: means[d] + made.tipping for r, d in zip(intake.lost["run_id"], intake.lost["depth"], strict=True)}
    assert refitted(shifted) == pytest.approx(0.0, abs=1e-12)
    assert made.lost == 3


def test_bounds_without_losses_are_a_point():
    intake, model, _ = studied()
    made = bounds(model, intake.runs, intake.lost, "pre_ln")
    assert made.manski == (made.complete, made.complete)
    assert made.tipping == math.inf
    assert made.sign_is_safe


def test_lee_bounds_by_hand():
    """Deep arm lost 2 of 5: the shallow arm is trimmed to 3 of 5 from either end."""
    intake, model, _ = studied((33, 34))
    made = bounds(model, intake.runs, intake.lost, "pre_ln")
    shallow = np.sort(intake.runs.loc[intake.runs["depth"] == 16, "loss"])
    deep = intake.runs.loc[intake.runs["depth"] == 70, "loss"].mean()
    assert made.lee == pytest.approx((shallow[:3].mean() - deep, shallow[-3:].mean() - deep))


def test_default_cap_is_the_loss_of_knowing_nothing_and_seeing_more_narrows_it():
    intake, model, _ = studied((33, 34))
    wide = bounds(model, intake.runs, intake.lost, "pre_ln")
    assert wide.cap == pytest.approx(math.log(50280))
    seen = intake.lost.assign(last_finite_loss=[3.1, 3.4])
    narrow = bounds(model, intake.runs, seen, "pre_ln")
    assert narrow.cap == 3.4
    assert np.ptp(narrow.manski) < np.ptp(wide.manski)
    assert not wide.sign_is_safe
    with pytest.raises(ConfigError, match="below the worst observed loss"):
        bounds(model, intake.runs, intake.lost, "pre_ln", cap=2.0)

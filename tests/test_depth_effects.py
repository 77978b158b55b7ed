"""Estimands of the depth benefit against published numbers, closed forms and simulations with known truth."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scalinglab.depth_benefit.analysis import Options, analyse
from scalinglab.depth_benefit.architectures import law_bootstrap
from scalinglab.depth_benefit.cell_effects import cell_effects, corrected, flops_gap
from scalinglab.depth_benefit.cells import cell_table, fit_cells, profile_hat
from scalinglab.depth_benefit.effects import Effect, EffectSet, joined, satterthwaite
from scalinglab.depth_benefit.estimands import (
    aspect_of,
    by_shape,
    depth_of,
    drift,
    exponent_difference,
    law_effects,
)
from scalinglab.depth_benefit.intake import depth_coordinate, known_architecture, take_in
from scalinglab.depth_benefit.judging import adjusted, cell_deletions, shape_spread, tuned
from scalinglab.depth_benefit.matching import match_runs
from scalinglab.depth_benefit.rates import Rates, published_rates, rates_from_fit
from scalinglab.depth_benefit.study import joint_gate, pairs_equivalent
from scalinglab.errors import ConfigError, FitError, SchemaError
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.hypotheses.cells import cell_means, depth_slopes, interaction_f, slope_differences
from scalinglab.hypotheses.multiplicity import adjust
from scalinglab.laws import law_from
from scalinglab.published import depthbench
from scalinglab.simulation import grid_design, simulate

ARCHS = ("pre_ln", "hc")
TRUTH = {
    "E": 1.69, "A[pre_ln]": 406.4, "A[hc]": 394.2, "alpha": 0.34, "gamma1[pre_ln]": 0.02, "gamma1[hc]": 0.035,
    "gamma2[pre_ln]": 0.016, "gamma2[hc]": 0.016, "B": 410.7, "beta": 0.28,
}  # fmt: skip
LAW = law_from("shape").crossed("architecture", ARCHS, "H2")


def true_loss(params, tokens, aspect, arch):
    u = np.log(np.asarray(aspect) / R0)
    a_term = TRUTH[f"A[{arch}]"] * np.asarray(params) ** -TRUTH["alpha"]
    a_term = a_term * np.exp(TRUTH[f"gamma1[{arch}]"] * u + TRUTH[f"gamma2[{arch}]"] * u**2)
    return TRUTH["E"] + a_term + TRUTH["B"] * np.asarray(tokens) ** -TRUTH["beta"]


def true_rates(params, tokens, relative_se=0.0):
    a = 406.4 * params**-0.34
    b = TRUTH["B"] * tokens ** -TRUTH["beta"]
    r = np.array([0.34 * a, 0.28 * b, 0.34 * 0.28 / 0.62 * (a + b)])
    return Rates(*r, np.diag((relative_se * r) ** 2), np.inf, "truth", True, {"params": params, "tokens": tokens})


@pytest.fixture(scope="module")
def bench():
    return take_in(depthbench())


def model_of(bench, group, depths=None, **options):
    runs = bench.runs[bench.runs["group"] == group]
    runs = runs if depths is None else runs[runs["depth"].between(*depths)]
    return fit_cells(cell_table(runs), **options)


# ---- DepthBench's published table ------------------------------------------------------------------------------------------
PUBLISHED = {  # design note (architectures 0.4, item 5): OLS of loss on ln(depth / width), five shapes, 400M
    "pre_ln": (0.0237, 0.0052, 0.020), "attnres_full": (-0.0298, 0.0077, 0.030), "hc": (-0.0248, 0.0095, 0.079),
    "lns": (-0.0074, 0.0053, 0.26), "keel": (-0.0048, 0.0079, 0.59), "attnres_block": (-0.0007, 0.0109, 0.95),
    "sandwich_ln": (0.0009, 0.0078, 0.91), "mhc": (0.0030, 0.0088, 0.76), "deepnorm": (0.0112, 0.0087, 0.29),
    "moda": (0.0267, 0.0107, 0.088),
}  # fmt: skip
CONTRASTS = {  # slope minus Pre-LN, standard error, t on 6 df
    "attnres_full": (-0.0536, 0.0093, -5.78), "hc": (-0.0486, 0.0108, -4.48), "lns": (-0.0311, 0.0074, -4.19),
    "keel": (-0.0285, 0.0095, -3.01), "attnres_block": (-0.0244, 0.0121, -2.02), "sandwich_ln": (-0.0228, 0.0094, -2.43),
    "mhc": (-0.0207, 0.0102, -2.03), "deepnorm": (-0.0125, 0.0101, -1.23), "moda": (0.0030, 0.0119, 0.25),
}  # fmt: skip


def test_depthbench_slopes_are_reproduced_to_the_printed_digits(bench):
    model = model_of(bench, "400M", (16, 32), degree=1, error="own")
    effects = cell_effects(model, reference="pre_ln")
    for a, (slope, se, p) in PUBLISHED.items():
        e = effects.pick("E1s", a)
        # per ln(depth / width) a slope is 2/3 of that per ln depth; loss falls where the benefit is positive
        assert -e.estimate * 2 / 3 == pytest.approx(slope, abs=5.1e-5)
        assert e.se * 2 / 3 == pytest.approx(se, abs=5.1e-5)
        assert e.p == pytest.approx(p, abs=0.0051)
        assert e.df == 3


def test_depthbench_contrasts_are_reproduced_and_holm_rejects_three(bench):
    model = model_of(bench, "400M", (16, 32), degree=1, error="own")
    effects = cell_effects(model, reference="pre_ln")
    span = 1.5 * (model.x_deep - model.x_shallow)
    p = {}
    for a, (gap, se, t) in CONTRASTS.items():
        e = effects.pick("E7", a)
        assert -e.estimate / span == pytest.approx(gap, abs=5.1e-5)
        assert e.se / span == pytest.approx(se, abs=5.1e-5)
        assert -e.estimate / e.se == pytest.approx(t, abs=0.0051)
        p[a] = float(2 * stats.t.sf(abs(e.estimate / e.se), 6))
    holm = adjust(p)
    assert set(holm.index[holm < 0.05]) == {"attnres_full", "hc", "lns"}


def test_depthbench_seven_point_slopes_and_pooled_residual(bench):
    model = model_of(bench, "400M", degree=1, error="own")
    effects = cell_effects(model)
    for a, slope, se in (("hc", -0.0211, 0.0036), ("attnres_full", -0.0208, 0.0037)):
        e = effects.pick("E1s", a)
        assert -e.estimate * 2 / 3 == pytest.approx(slope, abs=5.1e-5)
        assert e.se * 2 / 3 == pytest.approx(se, abs=5.1e-5)
    five = model_of(bench, "400M", (16, 32), degree=1, error="pooled")
    assert math.sqrt(five.s2["pre_ln"]) == pytest.approx(0.0067, abs=5.1e-5)
    assert all(model_of(bench, "400M", (16, 32), degree=2).coefficients(a)[1] > 0 for a in PUBLISHED)


def test_slopes_agree_with_the_hypotheses_module(bench):
    """A second implementation: OLS per group and its differences, on the same runs."""
    runs = bench.runs[(bench.runs["group"] == "400M") & (bench.runs["depth"] <= 32)]
    cells = cell_means(runs, x="x", log=False)
    slopes = depth_slopes(cells)
    own = cell_effects(model_of(bench, "400M", (16, 32), degree=1, error="own"))
    for a, row in slopes.iterrows():
        assert -own.pick("E1s", a).estimate == pytest.approx(row["slope"], rel=1e-9, abs=1e-12)
        assert own.pick("E1s", a).se == pytest.approx(row["se"], rel=1e-9)
    pooled = model_of(bench, "400M", (16, 32), degree=1, error="pooled")
    table, R = slope_differences(cells, reference="pre_ln")
    seven = cell_effects(pooled, reference="pre_ln").subset("E7")
    span = pooled.x_deep - pooled.x_shallow
    order = [table.index.get_loc(e.architecture) for e in seven]
    assert [-e.estimate / span for e in seven] == pytest.approx(table["difference"].iloc[order].tolist(), rel=1e-9)
    V = seven.cov
    correlation = V / np.sqrt(np.outer(np.diag(V), np.diag(V)))
    assert correlation == pytest.approx(R[np.ix_(order, order)], abs=1e-9)


def test_depthbench_flops_rise_with_depth(bench):
    """+7.2 % and +21.7 % training FLOPs per token at 32 and 70 layers, at equal total parameters (causal scores)."""
    table = cell_table(bench.runs[bench.runs["group"] == "400M"])
    own = table[table["architecture"] == "hc"].set_index("depth")["ln_flops_causal"]
    assert math.expm1(own[32] - own[16]) == pytest.approx(0.072, abs=5e-4)
    assert math.expm1(own[70] - own[16]) == pytest.approx(0.217, abs=5e-4)


def test_the_gate_is_the_interaction_f_of_cell_means(bench):
    runs = bench.runs[(bench.runs["group"] == "400M") & (bench.runs["depth"] <= 32)]
    model = fit_cells(cell_table(runs), degree=2)
    effects = cell_effects(model, reference="pre_ln")
    gate = joint_gate(model, effects, reference="pre_ln", margin=0.009, draws=499)
    test = interaction_f(cell_means(runs, x="x", log=False), degree=2)
    assert gate.statistic == pytest.approx(test.statistic, rel=1e-9)
    assert gate.df == test.df
    assert gate.p == pytest.approx(test.p_value, rel=1e-6)
    assert gate.p_bootstrap < 0.05
    assert not gate.equivalent
    # simultaneous limits are wider than single ones and nest around the same estimate
    for e in effects.subset("E7"):
        low, high = e.interval()
        row = gate.contrasts.loc[e.architecture]
        assert row["low"] < low < e.estimate < high < row["high"]


# ---- linear estimators -----------------------------------------------------------------------------------------------------
def test_profile_hat_is_least_squares():
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal(9), rng.standard_normal(9)
    block = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1])
    hat, smooth = profile_hat(z, block, 2)
    X = np.column_stack([block == 0, block == 1, z, z**2]).astype(float)
    b = np.linalg.lstsq(X, y, rcond=None)[0]
    assert hat @ y == pytest.approx(b[2:], abs=1e-10)
    assert smooth @ y == pytest.approx(X @ b, abs=1e-10)
    assert profile_hat(z[:2], block[:2], 2) is None


def test_x_is_ln_depth_at_equal_size():
    depth = pd.Series([8.0, 16.0, 64.0])
    width = np.sqrt(3e8 / (12 * depth))
    assert np.diff(depth_coordinate(depth, width)) == pytest.approx(np.diff(np.log(depth)), rel=1e-12)
    assert depth_of(3e8, aspect_of(3e8, 24)) == pytest.approx(24)
    assert aspect_of(3e8, 24) == pytest.approx(math.sqrt(3e8 / 12 / 24) / 24)


def test_covariance_belongs_to_the_effects(bench):
    rates = published_rates(params=3e8, tokens=8e9)
    effects = cell_effects(model_of(bench, "400M"), rates=rates, reference="pre_ln")
    assert np.sqrt(np.diag(effects.cov)) == pytest.approx([e.se for e in effects], rel=1e-6)
    one, two = effects.pick("E1", "hc"), effects.pick("E1", "pre_ln")
    seven = effects.pick("E7", "hc")
    names = [(e.estimand, e.variant, e.architecture) for e in effects]
    i, j = names.index(("E1", "", "hc")), names.index(("E1", "", "pre_ln"))
    V = effects.cov
    assert seven.estimate == pytest.approx(one.estimate - two.estimate)
    assert seven.se**2 == pytest.approx(V[i, i] + V[j, j] - 2 * V[i, j], rel=1e-9)


def test_losing_a_run_is_the_refit_without_it():
    runs = simulate(LAW, TRUTH, grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=ARCHS), sigma=0.002,
                    seeds=2, rng=3)  # fmt: skip
    intake = take_in(runs)
    model = fit_cells(cell_table(intake.runs), degree=2, error="pooled")
    effects = cell_effects(model, reference="pre_ln")
    left_out = cell_deletions(model, effects.pick("E1", "hc"), intake.runs, None)
    victim = intake.runs[intake.runs["architecture"] == "hc"].iloc[3]
    fewer = intake.runs[intake.runs["run_id"] != victim["run_id"]]
    again = fit_cells(cell_table(fewer), degree=2, error="pooled")
    direct = cell_effects(again).pick("E1", "hc")
    got = left_out[f"run {victim['run_id']}"]
    assert got.estimate == pytest.approx(direct.estimate, rel=1e-9)
    assert got.se == pytest.approx(direct.se, rel=1e-9)
    shape = intake.runs[(intake.runs["depth"] != victim["depth"]) | (intake.runs["architecture"] != "hc")]
    middle = fit_cells(
        cell_table(shape),
        degree=2,
        error="pooled",
        shallow=model.contrast["depth_shallow"],
        deep=model.contrast["depth_deep"],
    )
    if middle.x_shallow == pytest.approx(model.x_shallow) and middle.x_deep == pytest.approx(model.x_deep):
        gone = left_out[f"shape {victim['depth']:g}x{victim['width']:g}"]
        assert gone.estimate == pytest.approx(cell_effects(middle).pick("E1", "hc").estimate, rel=1e-9)


def test_holm_equals_statsmodels(bench):
    effects = cell_effects(model_of(bench, "400M"), reference="pre_ln")
    mine = adjusted(effects)
    for estimand in ("E1", "E1s", "E7"):
        rows = [i for i, e in enumerate(effects) if e.estimand == estimand]
        expected = adjust([effects.effects[i].p for i in rows])
        assert [mine[i] for i in rows] == pytest.approx(expected.tolist(), rel=1e-12)


def test_budgets_of_one_size_are_one_block_not_more_evidence():
    """The same runs at three budgets with one shape effect: cells are averaged, degrees of freedom don't triple."""
    design = grid_design((1e8,), (1e9, 2e9, 4e9), aspects=(8, 16, 32, 64, 128))
    runs = simulate("shape", {k.replace("[pre_ln]", ""): v for k, v in TRUTH.items() if "[hc]" not in k}, design,
                    sigma=1e-6, cell_sd=0.002, rng=1)  # fmt: skip
    table = cell_table(take_in(runs).runs)
    assert len(table) == 5
    assert table["block"].unique().size == 1
    assert fit_cells(table, degree=1).df["pre_ln"] == 3


@pytest.mark.parametrize(
    ("options", "match"),
    [({"shallow": 17}, "no matched group has the depths 17"), ({"shallow": 32, "deep": 16}, "must be the shallower shape"),
     ({"degree": 3}, "a line"), ({"degree": 2, "error": "own"}, "no degrees of freedom")],
)  # fmt: skip
def test_cell_models_refuse_what_they_cannot_fit(bench, options, match):
    depths = (16, 24) if options.get("error") == "own" else (16, 32)
    with pytest.raises((ConfigError, FitError), match=match):
        model_of(bench, "400M", depths, **options)
    with pytest.raises(FitError, match="no architecture has two shapes"):
        fit_cells(cell_table(bench.runs[bench.runs["depth"] == 16]).query("block == '400M'"))


# ---- residual mismatch (design note 9.3) --------------------------------------------------------------------------------
def no_depth_effect(bench, reps, seed=0):
    """Losses of the 400M fixed-total shapes when only the backbone size matters (Besiroglu's law), mean of 3 seeds [R, 7]."""
    own = bench.runs[(bench.runs["group"] == "400M") & (bench.runs["architecture"] == "hc")]
    table = cell_table(own)
    n = np.exp(table["ln_params"].to_numpy())
    mean = 1.8172 + 477.84 * n**-0.34731 + 2143.86 * 8e9**-0.36718
    rng = np.random.default_rng(seed)
    return table, mean + rng.normal(0, math.sqrt(0.003**2 / 3 + 0.002**2), (reps, len(table)))


def test_fixed_total_parameters_fake_a_depth_benefit(bench):
    table, _ = no_depth_effect(bench, 1)
    mean = 477.84 * np.exp(table["ln_params"].to_numpy()) ** -0.34731
    slope = np.polyfit(np.log(table["depth"]), mean, 1)[0]
    assert slope == pytest.approx(-0.0229, abs=5e-4)  # published: -.0229 nats per ln depth, no depth effect at all
    predicted = mean - (477.84 * 302.9e6**-0.34731)  # at the size where the published residuals are centred
    assert predicted == pytest.approx([0.0114, 0.0003, -0.0003, -0.0047, -0.0045, -0.0131, -0.0250], abs=1.5e-3)


def test_mismatch_correction_needs_the_variance_of_its_rate(bench):
    reps = 3000
    table, y = no_depth_effect(bench, reps)
    model = fit_cells(table.assign(loss=y[0]), degree=1)
    w = model.weights("hc")
    _, smooth = profile_hat(table["x"].to_numpy(), np.zeros(len(table), int), 1)
    ln_n = table["ln_params"].to_numpy()
    eps = published_rates(params=302e6, tokens=8e9).params
    q = stats.t.ppf(0.975, model.df["hc"])

    def gap_and_variance(loss):
        e = loss - loss @ smooth.T
        return loss @ w, (e**2).sum(-1) / model.df["hc"] * (w @ w)

    def rejected(loss, more=0.0):
        gap, v = gap_and_variance(loss)
        return float((np.abs(gap) / np.sqrt(v + more) > q).mean())

    raw, _ = gap_and_variance(y)
    assert raw[0] == pytest.approx(cell_effects(model).pick("E1").estimate, rel=1e-9)
    dn = -float(w @ ln_n)
    drawn = eps * (1 + 0.15 * np.random.default_rng(1).standard_normal(reps))
    corrected_losses = y + drawn[:, None] * (ln_n - ln_n.mean())
    assert rejected(y) > 0.99  # published: 1.00
    assert rejected(y + eps * (ln_n - ln_n.mean())) == pytest.approx(0.05, abs=0.013)  # .051; binomial SE .004
    assert rejected(corrected_losses) == pytest.approx(0.219, abs=0.03)  # plugged in without its variance: too often
    gap, variance = gap_and_variance(corrected_losses)
    # the package does the same: residuals of the corrected losses, and the variance of the rate
    rates = Rates(drawn[0], 0.18, 0.18, np.diag([(0.15 * drawn[0]) ** 2, 0, 0]), np.inf, "drawn", True)
    own = cell_effects(model, rates=rates).pick("E1")
    assert own.estimate == pytest.approx(gap[0], rel=1e-9)
    assert own.se**2 == pytest.approx(variance[0] + (0.15 * drawn[0] * dn) ** 2, rel=1e-9)
    more = (0.15 * drawn * dn) ** 2
    assert rejected(corrected_losses, more) <= 0.05  # .012: conservative with t on the design's degrees of freedom
    # fixed-backbone shapes need no correction: their slope without any depth effect is -.0013 at most
    other = cell_table(bench.runs[(bench.runs["group"] == "300M") & (bench.runs["architecture"] == "hc")])
    bias = np.polyfit(np.log(other["depth"]), 477.84 * np.exp(other["ln_params"]) ** -0.34731, 1)[0]
    assert bias == pytest.approx(-0.0013, abs=2e-4)


def test_correction_formula():
    rates = Rates(0.2, 0.15, 0.17, np.array([[4e-4, 1e-4, 0], [1e-4, 9e-4, 0], [0, 0, 0]]), np.inf, "given", True)
    estimate, se, made = corrected(0.01, 1e-6, 0.03, -0.02, rates)
    assert estimate == pytest.approx(0.01 - 0.2 * 0.03 + 0.15 * 0.02)
    assert se**2 == pytest.approx(1e-6 + 0.03**2 * 4e-4 + 0.02**2 * 9e-4 + 2 * 0.03 * -0.02 * 1e-4)
    assert made.spurious == pytest.approx(0.2 * 0.03 + 0.15 * 0.02)
    assert made.needed
    with pytest.raises(ConfigError, match="must not be negative"):
        corrected(0.01, -1.0, 0, 0, rates)


# ---- rates -----------------------------------------------------------------------------------------------------------------
def test_published_rates_are_the_elasticities_of_the_design_note():
    rates = published_rates(params=302e6, tokens=8e9)
    assert rates.params == pytest.approx(0.188, abs=1e-3)
    assert rates.tokens == pytest.approx(0.182, abs=1e-3)
    assert rates.compute == pytest.approx(0.1785 * 1.04, abs=1e-3)
    assert [rates.margin(c) for c in (0.02, 0.05, 0.10, 0.22)] == pytest.approx(
        [0.0037, 0.0090, 0.0176, 0.0368], abs=1e-4
    )
    with pytest.raises(ConfigError, match="positive"):
        rates.margin(0.0)
    with pytest.raises(ConfigError, match="no published fit"):
        published_rates("nobody", params=1e8, tokens=1e9)
    with pytest.raises(ConfigError, match="positive number of params"):
        published_rates(params=-1, tokens=1e9)


@pytest.fixture(scope="module")
def study():
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160), architectures=ARCHS)
    return simulate(LAW, TRUTH, design, sigma=0.0015, cell_sd=0.001, rng=5)


@pytest.fixture(scope="module")
def law(study):
    return fit("shape", by_shape(study), by="architecture", share="H2")


def test_rates_of_a_fit_are_its_derivatives(law):
    rates = rates_from_fit(law, params=2e8, tokens=5e9, aspect=R0, group="pre_ln")
    p = law.params
    a = p["A[pre_ln]"] * 2e8 ** -p["alpha"]
    b = p["B"] * 5e9 ** -p["beta"]
    expected = [p["alpha"] * a, p["beta"] * b, p["alpha"] * p["beta"] / (p["alpha"] + p["beta"]) * (a + b)]
    assert [rates.params, rates.tokens, rates.compute] == pytest.approx(expected, rel=1e-6)
    assert np.linalg.eigvalsh(rates.cov)[0] > -1e-12
    assert not rates.borrowed
    with pytest.raises(ConfigError, match="give group="):
        rates_from_fit(law, params=2e8, tokens=5e9)


# ---- estimands of a law ----------------------------------------------------------------------------------------------------
N, D, WIDE, DEEP = 1.4e8, 3e9, 76.0, 28.0
VOCAB, CONTEXT, KAPPA = 50304, 2048, 12.0


def truths():
    """E1, E2, E5, E7 in closed form, from the planted law."""
    out = {}
    r = np.array([WIDE, DEEP])
    depth = np.cbrt(N / (KAPPA * r**2))
    cost = {
        "6n": np.full(2, 6 * N), "causal": 6 * N + 6 * VOCAB * r * depth + 6 * depth**2 * r * CONTEXT,
        "full": 6 * N + 6 * VOCAB * r * depth + 12 * depth**2 * r * CONTEXT,
    }  # fmt: skip
    gap = {}
    for a in ARCHS:
        loss = true_loss(N, D, r, a)
        gap[a] = loss[0] - loss[1]
        out["E1", "", a] = gap[a]
        for c, v in cost.items():
            dear = true_loss(N, D * v.min() / v, r, a)
            out["E2", c, a] = dear[0] - dear[1]
        u = np.log(r / R0)
        q = TRUTH[f"gamma1[{a}]"] * u + TRUTH[f"gamma2[{a}]"] * u**2
        out["E5", "params", a] = (q[0] - q[1]) / TRUTH["alpha"]
        gamma = TRUTH["alpha"] * TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
        out["E5", "compute", a] = math.log((loss[0] - TRUTH["E"]) / (loss[1] - TRUTH["E"])) / gamma
        out["E5", "tokens", a] = gap[a] / (TRUTH["beta"] * TRUTH["B"] * D ** -TRUTH["beta"])
        out["E4", "r_star", a] = math.log(R0) - TRUTH[f"gamma1[{a}]"] / (2 * TRUTH[f"gamma2[{a}]"])
    out["E7", "", "hc"] = gap["hc"] - gap["pre_ln"]
    out["E7", "gamma1", "hc"] = TRUTH["gamma1[hc]"] - TRUTH["gamma1[pre_ln]"]
    return out


def effects_of(runs):
    made = fit("shape", by_shape(runs), by="architecture", share="H2")
    return law_effects(
        made, params=N, tokens=D, aspects=(WIDE, DEEP), kappa=KAPPA, reference="pre_ln", vocab=VOCAB, context=CONTEXT
    )


def test_law_estimands_are_exact_without_noise():
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160), architectures=ARCHS)
    effects = effects_of(simulate(LAW, TRUTH, design, sigma=1e-9, rng=0))
    for (estimand, variant, a), value in truths().items():
        assert effects.pick(estimand, a, variant).estimate == pytest.approx(value, rel=1e-4, abs=1e-7)
    # slope: closed form -(3/2) (gamma1 + 2 gamma2 u) A-term, with the sign of a benefit
    e = effects.pick("E1s", "pre_ln")
    u = 0.0
    a_term = TRUTH["A[pre_ln]"] * N ** -TRUTH["alpha"]
    assert e.estimate == pytest.approx(
        1.5 * a_term * (TRUTH["gamma1[pre_ln]"] + 2 * TRUTH["gamma2[pre_ln]"] * u), rel=1e-4
    )


def coverage(reps):
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160), architectures=ARCHS)
    truth = truths()
    hits = dict.fromkeys(truth, 0)
    z = {k: [] for k in truth}
    for k in range(reps):
        effects = effects_of(simulate(LAW, TRUTH, design, sigma=0.0015, cell_sd=0.001, rng=1000 + k))
        for key, value in truth.items():
            e = effects.pick(key[0], key[2], key[1])
            low, high = e.interval()
            hits[key] += low <= value <= high
            z[key].append((e.estimate - value) / e.se)
    return {k: v / reps for k, v in hits.items()}, {k: float(np.mean(v)) for k, v in z.items()}


def test_law_intervals_cover_quick():
    """25 studies: 20 of 25 or fewer covered has probability .4 % at .95; the full count is the gate M3 of benchmarks/gates."""
    share, z = coverage(12)
    assert min(share.values()) >= 0.66
    assert max(map(abs, z.values())) < 1.2  # mean of 12 standardised errors


def cell_coverage(reps):
    design = grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=ARCHS)
    hits, z = {}, {}
    for k in range(reps):
        runs = take_in(simulate(LAW, TRUTH, design, sigma=0.001, cell_sd=0.0007, seeds=2, rng=2000 + k)).runs
        model = fit_cells(cell_table(runs), error="pooled")
        n, d = model.contrast["params"], model.contrast["tokens"]
        effects = cell_effects(model, rates=true_rates(n, d, 0.1), reference="pre_ln")
        r = np.array([model.contrast["aspect_shallow"], model.contrast["aspect_deep"]])
        gap = {a: float(np.subtract(*true_loss(n, d, r, a))) for a in ARCHS}
        truth = {("E1", "", a): gap[a] for a in ARCHS} | {("E7", "", "hc"): gap["hc"] - gap["pre_ln"]}
        for c in ("causal", "full"):
            step = flops_gap(model, "pre_ln", f"ln_flops_{c}")
            tokens = d * np.exp([min(0.0, -step), min(0.0, step)])  # the dearer shape gets fewer
            truth["E2", c, "pre_ln"] = float(np.subtract(*true_loss(n, tokens, r, "pre_ln")))
        for key, value in truth.items():
            e = effects.pick(key[0], key[2], key[1])
            low, high = e.interval()
            hits.setdefault(key, []).append(low <= value <= high)
            z.setdefault(key, []).append((e.estimate - value) / e.se)
    return {k: float(np.mean(v)) for k, v in hits.items()}, {k: float(np.mean(v)) for k, v in z.items()}


def test_cell_intervals_cover_quick():
    """15 studies: fewer than 10 covered has probability 1e-5 at .95."""
    share, z = cell_coverage(15)
    assert min(share.values()) >= 0.66
    assert max(map(abs, z.values())) < 1.2


def gate_p_values(reps, draws):
    """Bootstrap p of the law's gate when no difference between architectures is planted."""
    same = {**TRUTH, "gamma1[hc]": 0.02}
    design = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160), architectures=ARCHS)
    out = []
    for k in range(reps):
        runs = by_shape(simulate(LAW, same, design, sigma=0.0015, cell_sd=0.001, rng=300 + k))
        out.append(law_bootstrap(fit("shape", runs, by="architecture", share="H2"), draws=draws))
    return np.array(out)


def test_law_gate_by_parametric_bootstrap(law):
    """A planted difference is found; without one at most 2 of 5 studies fall below .05 (P of more: .1 %)."""
    assert law_bootstrap(law, draws=199) < 0.05
    assert (gate_p_values(5, 99) < 0.05).sum() <= 2


def test_growth_estimands(study):
    own = take_in(study).runs
    e = exponent_difference(own, architecture="pre_ln")
    assert abs(e.estimate) < 4 * e.se  # no difference was planted
    q = drift(own, architecture="pre_ln")
    assert abs(q.estimate) < 4 * q.se
    with pytest.raises(FitError, match="needs at least 4"):
        exponent_difference(own[own["params"] < 1.5e8], architecture="pre_ln")


def test_law_estimands_refuse(law, study):
    with pytest.raises(ConfigError, match="no shape in it"):
        law_effects(fit("chinchilla", study), params=N, tokens=D, aspects=(WIDE, DEEP))
    with pytest.raises(ConfigError, match="larger width / depth"):
        law_effects(law, params=N, tokens=D, aspects=(DEEP, WIDE))
    with pytest.raises(ConfigError, match="not in the fit"):
        law_effects(law, params=N, tokens=D, aspects=(WIDE, DEEP), reference="nobody")


# ---- pairs ----------------------------------------------------------------------------------------------------------------
def pair_table(rho=0.0, seeds=8, gap=0.02, dn=0.0, seed=0):
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(seeds)
    rows = []
    for depth, width, base in ((16, 1248, 2.75), (42, 768, 2.75 - gap)):
        noise = math.sqrt(rho) * common + math.sqrt(1 - rho) * rng.standard_normal(seeds)
        rows += [
            {
                "run_id": f"{depth}/{s}", "architecture": "pre_ln", "depth": depth, "width": width, "seed": s,
                "params_backbone": 3e8 * (math.exp(dn) if depth == 42 else 1.0), "tokens": 8e9, "match_group": "g",
                "loss": base + 0.003 * noise[s], "status": "finished",
            }
            for s in range(seeds)
        ]  # fmt: skip
    return pd.DataFrame(rows)


def test_pairs_are_paired_only_where_pairing_is_seen():
    tight = match_runs(pair_table(rho=0.95, seeds=10), shallow=16, deep=42)
    loose = match_runs(pair_table(rho=0.0, seeds=10, seed=4), shallow=16, deep=42)
    assert len(tight.pairs) == 10
    a, b = tight.contrast().pick("E1"), loose.contrast().pick("E1")
    assert "paired t" in a.method
    assert "Welch" in b.method
    d = tight.pairs["gap"]
    assert (a.estimate, a.se, a.df) == pytest.approx((d.mean(), d.std(ddof=1) / math.sqrt(10), 9))
    expected = stats.ttest_ind(loose.pairs["loss_shallow"], loose.pairs["loss_deep"], equal_var=False)
    assert b.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert b.df == pytest.approx(expected.df, rel=1e-9)
    forced = loose.contrast(pairing="paired").pick("E1")
    assert forced.df == 9


def test_pairs_are_audited_and_corrected():
    made = match_runs(pair_table(dn=0.02, gap=0.0, seeds=6), shallow=16, deep=42)
    rates = published_rates(params=3e8, tokens=8e9, relative_se=0.15)
    audit = made.audit(rates).iloc[0]
    assert audit["dln_params"] == pytest.approx(0.02, rel=1e-9)
    assert audit["level"] == "warn"  # beyond the target of 1 %, inside the limit of 3 %
    assert audit["spurious"] == pytest.approx(rates.params * 0.02, rel=1e-9)
    assert audit["needs_correction"]
    raw, fixed = made.contrast().pick("E1"), made.contrast(rates=rates).pick("E1")
    assert fixed.estimate == pytest.approx(raw.estimate - rates.params * 0.02)
    assert fixed.se**2 == pytest.approx(raw.se**2 + 0.02**2 * rates.cov[0, 0])


def test_match_runs_refuses():
    runs = pair_table(dn=0.08)
    with pytest.raises(FitError, match="differs by 0.080"):
        match_runs(runs, shallow=16, deep=42)
    assert len(match_runs(runs, shallow=16, deep=42, tolerance=0.1).pairs) == 8
    with pytest.raises(ConfigError, match="no run has depth 20"):
        match_runs(runs, shallow=20, deep=42)
    with pytest.raises(ConfigError, match="must be less than"):
        match_runs(runs, shallow=42, deep=16)
    with pytest.raises(ConfigError, match="needs 'flops_causal'"):
        match_runs(runs, shallow=16, deep=42, on="flops")
    with pytest.raises(ConfigError, match="has no pairs"):
        match_runs(pair_table(), shallow=16, deep=42).contrast(reference="hc")


def test_pairs_of_equal_flops():
    runs = pair_table(dn=0.05).assign(vocab=1000, context=128)
    with pytest.raises(FitError, match="matches in flops within 0.01"):
        match_runs(runs, shallow=16, deep=42, on="flops")
    per_token = runs["params_backbone"] * 6 + 6 * 1000 * runs["width"] + 6 * runs["depth"] * runs["width"] * 128
    made = match_runs(runs.assign(tokens=5e19 / per_token), shallow=16, deep=42, on="flops")
    assert made.pairs["dln_flops"].abs().max() < 1e-9
    assert made.pairs["dln_tokens"].iloc[0] != 0


def test_unmatched_seeds_are_listed_not_dropped():
    runs = pair_table(seeds=4)
    made = match_runs(runs[runs["run_id"] != "42/3"], shallow=16, deep=42)
    assert len(made.pairs) == 3
    assert made.unmatched["run_id"].tolist() == ["16/3"]


# ---- intake ---------------------------------------------------------------------------------------------------------------
def test_intake_says_what_a_published_table_lacks(bench):
    codes = {f.code for f in bench.findings}
    assert codes == {"EXTRA_PARAMS_UNCOUNTED", "SINGLE_SEED", "LR_UNKNOWN", "MIXED_MATCH_RULES"}
    text = next(f.message for f in bench.findings if f.code == "EXTRA_PARAMS_UNCOUNTED")
    assert "moda +16 %" in text  # 15.6-16.4 % of the backbone (design note)
    charged = take_in(depthbench(), charge_extras=True)
    moda = charged.runs["architecture"] == "moda"
    share = charged.runs.loc[moda, "params"].to_numpy() / bench.runs.loc[moda, "params"].to_numpy() - 1
    assert share.min() == pytest.approx(0.156, abs=1e-3)
    assert share.max() == pytest.approx(0.161, abs=1e-3)  # at 32 layers; .164 at 70, which MoDA has no run of
    assert known_architecture("attnres_full") == "attn_res"
    assert known_architecture("something") is None


def test_lost_runs_are_kept_apart_and_mixed_sets_are_invalid():
    runs = pair_table(seeds=3)
    runs["loss"] = runs["loss"].where(runs["run_id"] != "42/1")
    runs["status"] = runs["status"].where(runs["run_id"] != "42/1", "diverged")
    intake = take_in(runs)
    assert intake.lost["run_id"].tolist() == ["42/1"]
    assert len(intake.runs) == 5
    mixed = take_in(pair_table().assign(eval_dataset=["a", "b"] * 8))
    assert "eval_dataset" in mixed.invalid[0]
    with pytest.raises(SchemaError, match="needs the column 'depth'"):
        take_in(pair_table().drop(columns="depth"))
    with pytest.raises(SchemaError, match="no rows"):
        take_in(pair_table().iloc[:0])
    with pytest.raises(SchemaError, match="DataFrame"):
        take_in([1, 2])
    with pytest.raises(SchemaError, match="must be a positive number"):
        take_in(pair_table().assign(loss=-1.0))


def test_duplicated_checkpoints_change_no_p_value():
    """Negative control: every row ten times, as checkpoints of the same run."""
    runs = pair_table(seeds=4)
    many = pd.concat([runs.assign(step=k) for k in range(10)], ignore_index=True)
    once = match_runs(runs, shallow=16, deep=42).contrast().pick("E1")
    ten = match_runs(many, shallow=16, deep=42).contrast().pick("E1")
    assert ten.p == once.p


def test_tuned_keeps_the_best_rate_and_sees_edges():
    base = pair_table(seeds=2).drop(columns="seed")
    grid = pd.concat(
        [
            base.assign(lr=lr, run_id=base["run_id"] + f"/{lr}", loss=base["loss"] + cost)
            for lr, cost in ((1e-3, 0.01), (2e-3, 0.0), (4e-3, 0.02))
        ]
    )
    intake = take_in(grid)
    kept, edge = tuned(intake.runs)
    assert set(kept["lr"]) == {2e-3}
    assert edge == {}
    _, edge = tuned(intake.runs[intake.runs["lr"] < 3e-3])
    assert list(edge) == ["pre_ln"]
    assert len(edge["pre_ln"]) == 2


def test_a_sweep_that_blows_up_at_its_largest_rate_lost_nothing():
    base = pair_table(seeds=6)
    sweep = pd.concat(
        [
            base.assign(lr=lr, run_id=base["run_id"] + f"/{lr}", loss=base["loss"] + c)
            for lr, c in ((1e-3, 0.01), (2e-3, 0.0), (4e-3, 0.0))
        ]
    )
    hot = sweep["lr"] == 4e-3
    sweep["status"] = sweep["status"].where(~hot, "diverged")
    sweep["loss"] = sweep["loss"].where(~hot)
    outcome = analyse(take_in(sweep), Options())
    assert not len(outcome.intake.lost)
    assert {f.code for f in outcome.findings} >= {"BEST_OF_LR", "LOST_AT_OTHER_LR"}
    assert outcome.verdicts["pre_ln"].label == "CONFOUNDED_LR"  # the best rate is the largest that lived
    hit = (sweep["lr"] == 2e-3) & (sweep["depth"] == 42) & (sweep["seed"] == 0)
    sweep["status"] = sweep["status"].where(~hit, "diverged")
    sweep["loss"] = sweep["loss"].where(~hit)
    assert len(analyse(take_in(sweep), Options()).intake.lost) == 1


def test_effects_are_nouns():
    e = Effect("E1", "a", 0.02, 0.005, 10, "nats", "given")
    low, high = e.interval()
    assert (low + high) / 2 == pytest.approx(0.02)
    assert e.p == pytest.approx(2 * stats.t.sf(4, 10))
    assert e.mde > 2 * e.se
    both = joined([EffectSet((e,), np.array([[2.5e-5]])), EffectSet((e,), np.array([[2.5e-5]]))])
    assert len(both) == 2
    assert np.isnan(both.cov[0, 1])
    with pytest.raises(ConfigError, match="square covariance"):
        EffectSet((e,), np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="there is no effect E9"):
        both.pick("E9")
    assert satterthwaite([1.0, 1.0], [5.0, 5.0]) == pytest.approx(10.0)
    assert not pairs_equivalent(both.subset("E1"), margin=1e-6)


def test_analyse_by_each_method(study):
    intake = take_in(study)
    cells = analyse(intake, Options(reference="pre_ln", method="cells"))
    assert cells.method == "cells"
    assert set(cells.verdicts) == set(ARCHS)
    pairs = analyse(take_in(pair_table()), Options())
    assert pairs.method == "pairs"
    assert pairs.verdicts["pre_ln"].reading.startswith("DEPTH_BENEFIT")
    with pytest.raises(ConfigError, match="method='guess'"):
        analyse(intake, Options(method="guess"))
    with pytest.raises(FitError, match="neither matched shapes nor a law"):
        analyse(intake, Options(method="law"))
    assert shape_spread(intake.runs, "hc") == pytest.approx(1.27, abs=0.1)

"""IsoFLOP approaches 1 and 2 with their known biases, and the compute-optimal frontier of a fit."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import binom

from scalinglab import algebra, isoflop
from scalinglab.errors import ConfigError, FitError, SchemaError
from scalinglab.frontier import QUANTITIES, optimal
from scalinglab.laws import LAWS, Law
from scalinglab.parabola import vertex

CHINCHILLA = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}  # arXiv 2203.15556, approach 3
BUDGETS = np.logspace(17, 21, 5)


def loss_of(p: dict[str, float], params, tokens):
    return p["E"] + p["A"] * params ** -p["alpha"] + p["B"] * tokens ** -p["beta"]


def isoflop_runs(p, *, width=8.0, points=15, offset=1.0, budgets=BUDGETS, sigma=0.0, seed=0) -> pd.DataFrame:
    """Runs around offset * D*, from D*/width to D* width, as in arXiv 2603.22339."""
    rng = np.random.default_rng(seed)
    rows = []
    for c in budgets:
        best = algebra.chinchilla_optimum(c, **p)
        tokens = float(best.tokens) * offset * np.geomspace(1 / width, width, points)
        params = c / 6 / tokens
        loss = loss_of(p, params, tokens) + sigma * rng.standard_normal(points)
        rows.append(pd.DataFrame({"params": params, "tokens": tokens, "loss": loss, "flops": c}))
    table = pd.concat(rows, ignore_index=True)
    return table.assign(run_id=[f"r{i}" for i in range(len(table))])


# --- the bias of the parabola -------------------------------------------------------------------------------------

WIDTHS = (2, 4, 8, 16)


@pytest.mark.parametrize(
    ("alpha", "beta", "offset", "percent"),
    [
        (0.34, 0.28, 1.0, (-0.33, -1.30, -2.90, -5.10)),
        (0.465, 0.155, 1.0, (-1.67, -6.50, -13.91, -23.12)),
        (0.31, 0.31, 3.0, (3.97, 3.47, 2.65, 1.51)),
    ],
)
def test_published_bias_of_approach_2(alpha, beta, offset, percent):
    """Error of D* extrapolated to 1e24 FLOPs: arXiv 2603.22339, its table of extrapolation errors; to 0.02 points."""
    got = [100 * isoflop.approach2_bias(alpha, beta, w, tokens_offset=offset).tokens for w in WIDTHS]
    np.testing.assert_allclose(got, percent, atol=0.02)


def test_published_bias_with_a_drifting_centre():
    """Centre moving from 1x at 1e17 to 3x at 1e21: same source, "Drift to 3x", symmetric and Chinchilla surfaces."""
    got = [isoflop.approach2_bias(0.31, 0.31, w, tokens_offset_last=3.0).tokens for w in WIDTHS]
    np.testing.assert_allclose(100 * np.array(got), (6.07097, 5.17117, 3.69790, 1.68907), atol=1e-4)
    bent = isoflop.approach2_bias(0.34, 0.28, 2, tokens_offset_last=3.0)
    assert 100 * bent.tokens == pytest.approx(11.61425, abs=1e-4)
    assert bent.exponent < 0  # tokens too high at scale: the exponent of N is too low


@pytest.mark.parametrize(
    ("a", "b", "percent"),
    [(1, 1, (3.4458, 14.2984)), (0.945, 1.325, (5.8856, 24.4959)), (0.22, 0.476, (2.5154, 10.3569))],
)
def test_depth_parabola_bias(a, b, percent):
    """Error of L* from a parabola in ln L, 5 points at +-2x and +-4x; and by a fit in ln L of the losses themselves."""
    A, B, N = 30.0, 5.0, 3e8
    best = algebra.width_depth_optimum(N, A=A, a=a, B=B, b=b)
    for width, want in zip((2, 4), percent, strict=True):
        assert 100 * isoflop.depth_parabola_bias(a, b, width) == pytest.approx(want, abs=1e-3)
        depth = float(best.depth) * np.geomspace(1 / width, width, 5)
        excess = A * (N / algebra.KAPPA / depth) ** (-a / 2) + B * depth**-b
        c2, c1, _ = np.polyfit(np.log(depth), excess, 2)
        assert np.exp(-c1 / (2 * c2)) / best.depth - 1 == pytest.approx(want / 100, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0.1, 1.5), beta=st.floats(0.1, 1.5), width=st.floats(1.05, 20), points=st.integers(3, 30))
def test_bias_properties(alpha, beta, width, points):
    """None for equal exponents on a centred grid; swapping N and D inverts it; the flatter side pulls the vertex."""
    assert isoflop.parabola_bias(alpha, alpha, width, points=points) == pytest.approx(0, abs=1e-8)
    one = isoflop.parabola_bias(alpha, beta, width, points=points)
    other = isoflop.parabola_bias(beta, alpha, width, points=points)
    assert (1 + one) * (1 + other) == pytest.approx(1, abs=1e-7)
    if abs(alpha - beta) > 0.05 and width > 1.5:
        assert np.sign(one) == np.sign(alpha - beta)


@pytest.mark.parametrize("offset", [1.0, 3.0])
def test_predicted_bias_is_that_of_the_estimator(offset):
    """approach2_bias (exponents only) equals approach 2 run on a table with amplitudes and a floor, and extrapolated."""
    runs = isoflop_runs(CHINCHILLA, width=8, offset=offset)
    got = isoflop.approach2(runs).predict(1e24)
    truth = algebra.chinchilla_optimum(1e24, **CHINCHILLA)
    expected = isoflop.approach2_bias(0.34, 0.28, 8, tokens_offset=offset)
    assert got["params"][0] / float(truth.params) - 1 == pytest.approx(expected.params, abs=1e-6)
    assert got["tokens"][0] / float(truth.tokens) - 1 == pytest.approx(expected.tokens, abs=1e-6)
    assert expected.to_frame()["tokens_bias"].iloc[0] == pytest.approx(expected.tokens, abs=1e-9)
    assert expected.exponent == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.3, 0.3, 1.0), "grid_width must be above 1"),
        ((-0.3, 0.3, 4.0), "alpha must be positive"),
        ((0.3, 0.0, 4.0), "beta must be positive"),
    ],
)
def test_bias_refuses_nonsense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        isoflop.parabola_bias(*arguments)
    with pytest.raises(ConfigError, match=message):
        isoflop.approach2_bias(*arguments)


def test_bias_needs_points_and_budgets():
    with pytest.raises(ConfigError, match="at least 3 points"):
        isoflop.parabola_bias(0.3, 0.3, 4, points=2)
    with pytest.raises(ConfigError, match="two distinct budgets"):
        isoflop.approach2_bias(0.3, 0.3, 4, budgets=(1e20, 1e20))


# --- approach 2 ---------------------------------------------------------------------------------------------------


def test_approach_2_is_exact_where_its_assumption_holds():
    """A symmetric surface, centred grid, no noise: sizes and exponents to rounding."""
    p = CHINCHILLA | {"alpha": 0.31, "beta": 0.31}
    got = isoflop.approach2(isoflop_runs(p))
    truth = algebra.chinchilla_optimum(BUDGETS, **p)
    np.testing.assert_allclose(got.to_frame()["params"], truth.params, rtol=1e-7)
    np.testing.assert_allclose(got.to_frame()["tokens"], truth.tokens, rtol=1e-7)
    assert got.laws.loc["params", "exponent"] == pytest.approx(0.5, abs=1e-8)
    assert got.laws["exponent"].sum() == pytest.approx(1)
    np.testing.assert_allclose(got.predict([1e24])["params"], algebra.chinchilla_optimum(1e24, **p).params, rtol=1e-6)
    assert "biased unless" in got.summary()


@settings(max_examples=20, deadline=None)
@given(width=st.floats(2, 16), offset=st.floats(0.6, 1.6), alpha=st.floats(0.2, 0.5), beta=st.floats(0.2, 0.5))
def test_known_exponents_take_the_bias_out(width, offset, alpha, beta):
    """On noise-free runs the corrected vertex is the optimum, wherever the grid stands."""
    p = CHINCHILLA | {"alpha": alpha, "beta": beta}
    got = isoflop.approach2(isoflop_runs(p, width=width, offset=offset), exponents=(alpha, beta))
    truth = algebra.chinchilla_optimum(BUDGETS, **p)
    frame = got.to_frame()
    assert frame["valid"].all()
    np.testing.assert_allclose(frame["params_corrected"], truth.params, rtol=1e-4)
    np.testing.assert_allclose(frame["params"] / truth.params - 1, frame["predicted_bias"], rtol=1e-3, atol=1e-5)


def test_budgets_are_found_or_named_and_order_does_not_matter():
    runs = isoflop_runs(CHINCHILLA).sample(frac=1, random_state=1)
    wobbly = runs.assign(flops=runs["flops"] * np.random.default_rng(0).uniform(0.99, 1.01, len(runs)))
    plan = pd.Series(np.round(np.log10(runs["flops"])).astype(int), index=runs.index)
    one = isoflop.approach2(wobbly)
    two = isoflop.approach2(wobbly.assign(plan=plan), budget="plan")
    assert len(one.budgets) == 5
    pd.testing.assert_frame_equal(one.budgets, two.budgets)
    bare = isoflop.approach2(runs.drop(columns=["flops", "run_id"]))  # flops from 6 N D
    np.testing.assert_allclose(bare.budgets["flops"], BUDGETS, rtol=1e-9)


def test_standard_error_of_a_vertex_is_its_spread():
    """The delta-method error of ln N* against 2,000 noisy repetitions, within 6 % (a 3.8 sigma band of a spread).

    On a grid narrow enough for the parabola to fit: beyond it the misfit counts as noise and the error is too large.
    """
    rng = np.random.default_rng(0)
    x = np.linspace(-1, 1, 15)
    truth = 1.8 + 0.03 * (x - 0.2) ** 2
    found = np.array([vertex(x, truth + 0.001 * rng.standard_normal(15)) for _ in range(2000)])
    assert found[:, 0].mean() == pytest.approx(0.2, abs=4 * found[:, 0].std() / 2000**0.5 + 0.005)
    assert np.sqrt(np.mean(found[:, 2] ** 2)) == pytest.approx(found[:, 0].std(ddof=1), rel=0.06)


def test_bootstrap_vertices_are_those_of_the_resampled_tables():
    """The batched moments against the parabola of each resample: weights are counts of rows."""
    runs = isoflop_runs(CHINCHILLA, sigma=0.003, budgets=[1e19], points=9)
    group = runs.assign(run=runs["run_id"])
    at, ok = isoflop._resampled_vertices(group, 50, np.random.default_rng(4))
    counts = np.random.default_rng(4).multinomial(9, np.full(9, 1 / 9), size=50)
    assert ok.any()
    for i in range(50):
        again = group.loc[group.index.repeat(counts[i])]
        if again["params"].nunique() < 3:
            assert not ok[i]
            continue
        c2, c1, _ = np.polyfit(np.log(again["params"]) - 18, again["loss"], 2)
        want = 18 - c1 / (2 * c2)
        inside = np.log(again["params"].min()) <= want <= np.log(again["params"].max())
        assert ok[i] == (c2 > 0 and inside)
        if ok[i]:
            assert at[i] == pytest.approx(want, abs=1e-6)


@pytest.mark.slow
def test_ols_interval_covers_at_its_level():
    """Size of the second stage: 95 % intervals of the exponent over 600 noisy tables, within binomial bounds."""
    p = CHINCHILLA | {"alpha": 0.31, "beta": 0.31}
    reps, hits = 600, 0
    for seed in range(reps):
        row = isoflop.approach2(isoflop_runs(p, sigma=0.004, seed=seed)).laws.loc["params"]
        hits += row["low"] <= 0.5 <= row["high"]
    low, high = binom.ppf([0.001, 0.999], reps, 0.95)
    assert low <= hits <= high


def test_bootstrap_by_run_is_reproducible_and_leaves_the_global_generator_alone():
    runs = isoflop_runs(CHINCHILLA, sigma=0.003)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    one = isoflop.approach2(runs, uncertainty="bootstrap", draws=150, rng=3)
    two = isoflop.approach2(runs, uncertainty="bootstrap", draws=150, rng=3)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    pd.testing.assert_frame_equal(one.laws, two.laws)
    row, plain = one.laws.loc["params"], isoflop.approach2(runs).laws.loc["params"]
    assert len(one.draws) == 150
    assert row["low"] < row["exponent"] < row["high"]
    assert 0.2 < row["exponent_se"] / plain["exponent_se"] < 5
    assert one.uncertainty == "bootstrap by run"


def test_budgets_without_a_minimum_are_said_not_used():
    runs = isoflop_runs(CHINCHILLA)
    high = runs["flops"] > 5e20
    low = np.isclose(runs["flops"], 1e17)
    best = algebra.chinchilla_optimum(1e21, **CHINCHILLA)
    keep = (~high | (runs["params"] < float(best.params) / 3)) & (~low | (runs.groupby("flops").cumcount() < 2))
    got = isoflop.approach2(runs[keep])
    reasons = got.budgets.set_index("flops")["reason"]
    assert "outside the sampled sizes" in reasons.iloc[-1]
    assert "2 distinct sizes" in reasons.iloc[0]
    assert got.budgets["valid"].sum() == 3
    assert any("2 of 5 budgets" in n for n in got.notes)
    upside_down = runs.assign(loss=5 - runs["loss"])
    with pytest.raises(FitError, match="opens downwards"):
        isoflop.approach2(upside_down)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="tokens"), "needs the column.s. tokens"),
        (lambda t: t.assign(loss=t["loss"].where(t.index != 4)), "column loss, row 4: nan"),
        (lambda t: t.assign(params=-1.0), "column params, row 0: -1.0"),
        (lambda t: t.iloc[:0], "empty run table"),
    ],
)
def test_approach_2_names_the_bad_cell(change, message):
    with pytest.raises(SchemaError, match=message):
        isoflop.approach2(change(isoflop_runs(CHINCHILLA)))


def test_approach_2_options_are_checked():
    runs = isoflop_runs(CHINCHILLA)
    with pytest.raises(SchemaError, match="no column 'plan'"):
        isoflop.approach2(runs, budget="plan")
    with pytest.raises(ConfigError, match="alpha must be positive"):
        isoflop.approach2(runs, exponents=(-1.0, 0.3))
    with pytest.raises(ConfigError, match="budgets must be positive"):
        isoflop.approach2(runs).predict(-1.0)
    with pytest.raises(FitError, match="a power law with an error needs 3"):
        isoflop.approach2(runs[runs["flops"] < 5e18])


# --- approach 1 ---------------------------------------------------------------------------------------------------


def curves(p=CHINCHILLA, *, sizes=60, points=60, sigma=0.0) -> pd.DataFrame:
    """Checkpoints of models from 1e6 to 1e10 parameters, each from 0.2 to 2,000 tokens per parameter."""
    rng = np.random.default_rng(5)
    rows = []
    for i, n in enumerate(np.geomspace(1e6, 1e10, sizes)):
        tokens = n * np.geomspace(0.2, 2000, points)
        shift = sigma * rng.standard_normal()
        frame = pd.DataFrame(
            {"run_id": f"r{i:02d}", "params": n, "tokens": tokens, "loss": loss_of(p, n, tokens) + shift}
        )
        rows.append(frame)
    return pd.concat(rows, ignore_index=True)


def test_approach_1_finds_the_frontier_to_the_grid_of_sizes():
    budgets = np.geomspace(1e17, 1e20, 25)
    got = isoflop.approach1(curves(), budgets=budgets, draws=100)
    truth = algebra.chinchilla_optimum(budgets, **CHINCHILLA)
    spacing = np.log(1e4) / 59
    assert got.budgets["valid"].all()
    assert np.abs(np.log(got.budgets["params"] / truth.params)).max() < spacing
    np.testing.assert_allclose(got.budgets["loss"], truth.loss, rtol=2e-3)
    a = 0.28 / 0.62
    assert got.laws.loc["params", "exponent"] == pytest.approx(a, abs=0.02)
    assert got.laws.loc["params", "low"] < a < got.laws.loc["params", "high"]
    assert "too narrow" in isoflop.approach1(curves(), budgets=budgets, uncertainty="ols").summary()


def test_approach_1_does_not_use_the_edge_of_the_sizes():
    """With only models far below the optimum the best is always the largest: nothing is fitted."""
    small = curves()[lambda t: t["params"] < 3e6]
    with pytest.raises(FitError, match="best at the largest size"):
        isoflop.approach1(small, budgets=np.geomspace(3e16, 3e17, 5))
    mixed = isoflop.approach1(curves(), budgets=[1e13, 1e17, 1e18, 1e19], draws=60)
    assert mixed.budgets["reason"].iloc[0] == "best at the smallest size"
    assert not mixed.budgets["valid"].iloc[0]
    assert any("1 of 4" in n for n in mixed.notes)


def test_approach_1_never_extrapolates_a_curve_and_picks_common_budgets():
    got = isoflop.approach1(curves(sizes=12), draws=60, rng=1)
    table = curves(sizes=12)
    flops = 6 * table["params"] * table["tokens"]
    assert got.budgets["flops"].between(flops.min(), flops.max()).all()
    ends = flops.groupby(table["run_id"]).agg(["min", "max"])
    for _, row in got.budgets.iterrows():
        inside = (ends["min"] <= row["flops"] * (1 + 1e-9)) & (ends["max"] >= row["flops"] * (1 - 1e-9))
        assert row["n_runs"] == inside.sum()


def test_approach_1_needs_run_ids_and_overlap():
    with pytest.raises(SchemaError, match="run_id"):
        isoflop.approach1(curves().drop(columns="run_id"))
    single = curves().groupby("run_id").head(1)
    with pytest.raises(FitError, match="never overlap"):
        isoflop.approach1(single)


# --- the frontier of a fit ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StandIn:
    """What a Fit promises to `optimal`: a law, parameters, the runs, predictions."""

    law: Law
    params: pd.Series
    runs: pd.DataFrame

    def predict(self, runs, params=None):
        return self.law.loss(dict(self.params) if params is None else params, runs)


@dataclass(frozen=True)
class Jackknife:
    """Delete-one replicates with t intervals, as the real Resampling makes them."""

    fit: StandIn
    params: pd.DataFrame
    kind: str = "jackknife"

    def interval(self, fn, level=0.95, *, log=False):
        from scipy.stats import t

        point, values = np.asarray(fn(self.fit.params.to_frame().T))[0], np.asarray(fn(self.params))
        point, values = (np.log(point), np.log(values)) if log else (point, values)
        n = len(values)
        half = t.ppf(0.5 + level / 2, n - 1) * np.sqrt((n - 1) / n * ((values - point) ** 2).sum(0))
        back = np.exp if log else np.asarray
        return SimpleNamespace(low=back(point - half), high=back(point + half))


SHAPES = pd.DataFrame({"depth": [6, 12, 24, 48, 96, 12, 24], "width": [2048, 1448, 1024, 724, 512, 512, 2048]})
RUNS = SHAPES.assign(
    params=12.0 * SHAPES["depth"] * SHAPES["width"] ** 2, tokens=np.geomspace(1e9, 1e11, 7), run_id=list("abcdefg")
)
SHAPE = {"E": 1.8, "A": 470.0, "alpha": 0.34, "B": 2000.0, "beta": 0.36, "gamma1": 0.05, "gamma2": 0.03}
WIDTH = {"E": 1.8, "A": 40.0, "a": 0.5, "B": 1.5, "b": 0.7, "C": 2000.0, "c": 0.36}
TRUTHS = {
    "chinchilla": CHINCHILLA,
    "ces": CHINCHILLA | {"delta": 0.6},
    "kaplan": {"A": 6.4e13**0.076, "alpha": 0.076, "B": 1.8e13**0.103, "delta": 0.103},
    "shape": SHAPE,
    "shape_drift": SHAPE | {"gamma3": 0.01},
    "shape_data": SHAPE | {"zeta1": 0.03},
    "width_depth": WIDTH,
    "width_depth_params": WIDTH | {"P": 300.0, "p": 0.4},
}
BUDGET = np.array([1e19, 1e21, 1e23])


def stand_in(key: str, **change: float) -> StandIn:
    return StandIn(LAWS[key], pd.Series(TRUTHS[key] | change), RUNS)


def replicates(fit: StandIn, *, spread=0.01, n=12, seed=0) -> Jackknife:
    rng = np.random.default_rng(seed)
    factor = np.exp(spread / np.sqrt(n) * rng.standard_normal((n, len(fit.params))))
    return Jackknife(fit, pd.DataFrame(fit.params.to_numpy() * factor, columns=fit.params.index))


@pytest.mark.parametrize("key", ["chinchilla", "ces", "kaplan", "shape", "width_depth"])
def test_closed_form_equals_the_numerical_minimum(key):
    """Two independent routes: the algebra, and a search on the text of the law; with replicates and intervals."""
    fit = stand_in(key)
    about = replicates(fit)
    closed = optimal(fit, flops=BUDGET, uncertainty=about)
    search = optimal(fit, flops=BUDGET, uncertainty=about, method="numerical")
    assert (closed.method, search.method) == ("closed form", "numerical")
    numbers = [f"{q}{end}" for q in QUANTITIES for end in ("", "_low", "_high")]
    # shape only enters through u or d, L; elsewhere depth stays empty on both routes
    pd.testing.assert_frame_equal(closed.table[numbers], search.table[numbers], rtol=2e-5)
    assert closed.table["valid"].all()
    assert closed.table["interval_valid"].all()
    assert closed.table["depth"].notna().all() == (key in ("shape", "width_depth"))
    for q in ("params", "tokens", "loss"):
        assert (closed.table[f"{q}_low"] < closed.table[q]).all()
        assert (closed.table[q] < closed.table[f"{q}_high"]).all()
    np.testing.assert_allclose(6 * closed.table["params"] * closed.table["tokens"], BUDGET, rtol=1e-12)


@pytest.mark.parametrize("key", ["chinchilla", "ces", "kaplan", "shape", "shape_drift"])
def test_holding_a_shape(key):
    closed = optimal(stand_in(key), flops=BUDGET, shape=100.0)
    search = optimal(stand_in(key), flops=BUDGET, shape=100.0, method="numerical")
    columns = list(QUANTITIES)
    pd.testing.assert_frame_equal(closed.table[columns], search.table[columns], rtol=2e-5)
    np.testing.assert_allclose(closed.table["aspect"], 100.0)
    np.testing.assert_allclose(closed.table["width"] / closed.table["depth"], 100.0)
    np.testing.assert_allclose(12 * closed.table["depth"] * closed.table["width"] ** 2, closed.table["params"])


def _by_hand(key: str, N: float, D: float, r: float) -> float:
    """The three laws written out again."""
    p = TRUTHS[key]
    depth = np.cbrt(N / 12 / r**2)
    if key == "width_depth_params":
        terms = p["A"] * (r * depth) ** -p["a"] + p["B"] * depth ** -p["b"] + p["P"] * N ** -p["p"]
        return p["E"] + terms + p["C"] * D ** -p["c"]
    u = np.log(r / 42.67)
    q = p["gamma1"] * u + p["gamma2"] * u**2 + p.get("gamma3", 0) * u * np.log(N / 3e8)
    return p["E"] + p["A"] * N ** -p["alpha"] * np.exp(q) + p["B"] * D ** -p["beta"] * np.exp(p.get("zeta1", 0) * u)


@pytest.mark.parametrize("key", ["shape_drift", "shape_data", "width_depth_params"])
def test_laws_without_closed_form_against_scipy(key):
    got = optimal(stand_in(key), flops=BUDGET).table
    assert got["valid"].all()
    for c, (_, row) in zip(BUDGET, got.iterrows(), strict=True):
        found = minimize(
            lambda x, c=c: _by_hand(key, np.exp(x[0]), c / 6 / np.exp(x[0]), np.exp(x[1])),
            np.log([row["params"] * 1.4, row["aspect"] * 0.7]),
            method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-15, "maxiter": 2000},
        )
        assert np.log(row["params"]) == pytest.approx(found.x[0], abs=2e-5)
        assert np.log(row["aspect"]) == pytest.approx(found.x[1], abs=2e-5)
        assert row["loss"] == pytest.approx(found.fun, abs=1e-10)


def test_width_depth_held_shape_against_scipy():
    got = optimal(stand_in("width_depth"), flops=1e21, shape=64.0).table.iloc[0]
    p = WIDTH

    def loss(x):
        depth = np.cbrt(np.exp(x) / 12 / 64.0**2)
        return p["A"] * (64 * depth) ** -p["a"] + p["B"] * depth ** -p["b"] + p["C"] * (1e21 / 6 / np.exp(x)) ** -p["c"]

    found = minimize_scalar(loss, bounds=(15, 30), method="bounded", options={"xatol": 1e-9})
    assert np.log(got["params"]) == pytest.approx(found.x, abs=1e-5)
    assert got["loss"] == pytest.approx(p["E"] + found.fun, abs=1e-10)


def test_drift_moves_the_best_shape_as_its_parameters_say():
    fit = stand_in("shape_drift")
    got = optimal(fit, flops=BUDGET).table
    p = TRUTHS["shape_drift"]
    n = np.log(got["params"] / LAWS["shape_drift"].constants["N0"])
    u = -(p["gamma1"] + p["gamma3"] * n) / (2 * p["gamma2"])
    np.testing.assert_allclose(np.log(got["aspect"] / LAWS["shape_drift"].constants["r0"]), u, atol=1e-5)
    with pytest.raises(ConfigError, match="no closed form"):
        optimal(fit, flops=BUDGET, method="closed form")


def test_python_function_law_goes_through_predict():
    """No formula to evaluate: the blocked path over `predict`, replicates included, equals the closed form."""

    def law(data, E, A, alpha, B, beta):
        return E + A * data["params"] ** -alpha + B * data["tokens"] ** -beta

    fit = StandIn(Law("mine", "", function=law), pd.Series(CHINCHILLA), RUNS)
    about = replicates(fit, n=21)
    got = optimal(fit, flops=BUDGET, uncertainty=about, shape=50.0).table
    want = optimal(stand_in("chinchilla"), flops=BUDGET, uncertainty=about, shape=50.0).table
    columns = [c for c in want.columns if c not in ("reason", "beyond", "extrapolated")]
    pd.testing.assert_frame_equal(got[columns], want[columns], rtol=2e-5)
    bare = optimal(fit, flops=BUDGET).table  # shape is not in it: nothing is said about depth and width
    np.testing.assert_allclose(bare["params"], want["params"], rtol=2e-5)
    assert bare["depth"].isna().all()


def test_python_function_law_of_shape():
    def law(data, E, A, alpha, B, beta, g):
        u = np.log(data["width"] / data["depth"] / 40)
        return E + A * data["params"] ** -alpha * np.exp(g * u * u) + B * data["tokens"] ** -beta

    fit = StandIn(Law("mine", "", function=law), pd.Series(CHINCHILLA | {"g": 0.02}), RUNS)
    got, want = optimal(fit, flops=BUDGET).table, optimal(stand_in("chinchilla"), flops=BUDGET).table
    np.testing.assert_allclose(got["aspect"], 40.0, rtol=1e-5)
    np.testing.assert_allclose(got["params"], want["params"], rtol=1e-5)

    def flat(data, E, A, alpha, B, beta):
        return E + A * data["params"] ** -alpha

    with pytest.raises(ConfigError, match="has no tokens in it"):
        optimal(StandIn(Law("flat", "", function=flat), pd.Series(CHINCHILLA), RUNS), flops=BUDGET)


def test_user_formula_law():
    law = Law("formula", "E + A*params**-alpha + B*tokens**-beta + g*log(aspect/40)**2", source="user formula")
    fit = StandIn(law, pd.Series(CHINCHILLA | {"g": 0.01}), RUNS)
    got = optimal(fit, flops=BUDGET).table
    want = optimal(stand_in("chinchilla"), flops=BUDGET).table
    np.testing.assert_allclose(got["aspect"], 40.0, rtol=1e-5)
    np.testing.assert_allclose(got["params"], want["params"], rtol=1e-5)


def test_groups_of_a_crossed_fit():
    names = LAWS["shape"].crossed("architecture", ["mhc", "pre_ln"], share=("alpha", "B", "beta"))
    params = pd.Series(
        {
            n: SHAPE[n.split("[")[0]] * (1.2 if n == "A[mhc]" else 3.0 if n == "gamma1[mhc]" else 1.0)
            for n in names.param_names
        }
    )
    fit = StandIn(names, params, RUNS.assign(architecture="mhc"))
    for group, change in (("pre_ln", {}), ("mhc", {"A": 1.2 * SHAPE["A"], "gamma1": 3 * SHAPE["gamma1"]})):
        alone = optimal(stand_in("shape", **change), flops=BUDGET).table
        for method in ("auto", "numerical"):
            got = optimal(fit, flops=BUDGET, group=group, method=method).table
            pd.testing.assert_frame_equal(got[list(QUANTITIES)], alone[list(QUANTITIES)], rtol=2e-5)
    with pytest.raises(ConfigError, match="give group=, one of mhc, pre_ln, not None"):
        optimal(fit, flops=1e20)
    with pytest.raises(ConfigError, match="isn't by a column"):
        optimal(stand_in("shape"), flops=1e20, group="mhc")


def test_exponents_have_intervals_and_match_the_table():
    fit = stand_in("width_depth")
    got = optimal(fit, flops=BUDGET, uncertainty=replicates(fit))
    slope = np.diff(np.log(got.table["params"])) / np.diff(np.log(BUDGET))
    np.testing.assert_allclose(slope, got.exponents.loc["params", "estimate"], rtol=1e-10)
    excess = np.diff(np.log(got.table["loss"] - WIDTH["E"])) / np.diff(np.log(BUDGET))
    np.testing.assert_allclose(excess, got.exponents.loc["excess", "estimate"], rtol=1e-10)
    assert (got.exponents["low"] < got.exponents["estimate"]).all()
    assert (got.exponents["estimate"] < got.exponents["high"]).all()
    assert optimal(stand_in("shape_drift"), flops=BUDGET).exponents.empty


def test_no_interior_shape_is_empty_with_a_reason():
    for method in ("auto", "numerical"):
        got = optimal(stand_in("shape", gamma2=-0.01), flops=BUDGET, method=method)
        assert not got.table["valid"].any()
        assert got.table["params"].isna().all()
        assert "no interior optimum" in got.table["reason"].iloc[0]
        assert "no interior optimum" in got.summary()
        held = optimal(stand_in("shape", gamma2=-0.01), flops=BUDGET, shape=42.67, method=method)
        assert held.table["valid"].all()


def test_one_bad_replicate_takes_the_interval_not_the_estimate():
    fit = stand_in("shape")
    about = replicates(fit)
    about.params.loc[3, "gamma2"] = -0.01
    got = optimal(fit, flops=BUDGET, uncertainty=about).table
    assert got["valid"].all()
    assert not got["interval_valid"].any()
    assert got["params_low"].isna().all()
    assert "1 of 12 replicates" in got["reason"].iloc[0]


def test_extrapolation_is_flagged_by_quantity():
    fit = stand_in("shape", gamma1=-0.5)  # best aspect far wider than the runs
    seen = 6 * RUNS["params"] * RUNS["tokens"]
    got = optimal(fit, flops=[seen.median(), 1e27]).table
    assert "aspect" in got["beyond"].iloc[0]
    assert set(got["beyond"].iloc[1].split(", ")) == {"params", "tokens", "flops", "aspect"}
    inside = optimal(stand_in("chinchilla"), flops=seen.median()).table
    assert inside["beyond"].iloc[0] == ""
    assert not inside["extrapolated"].iloc[0]
    assert "aspect" not in optimal(stand_in("chinchilla"), flops=1e27, shape=1e4).table["beyond"].iloc[0]


@pytest.mark.parametrize(("convention", "m"), [("causal", 6), ("full", 12)])
def test_flops_with_attention_and_logits_move_the_best_shape(convention, m):
    """Against a direct scipy minimisation; every optimum spends exactly its budget."""
    vocab, context = 50_280, 2048
    fit = stand_in("shape")
    got = optimal(fit, flops=1e21, flops_convention=convention, vocab=vocab, context=context).table.iloc[0]

    def sizes(x):
        n, r = np.exp(x)
        depth = np.cbrt(n / 12 / r**2)
        per_token = 6 * n + 6 * vocab * depth * r + m * depth * depth * r * context
        return n, 1e21 / per_token, depth, r

    def loss(x):
        n, tokens, _, r = sizes(x)
        u = np.log(r / 42.67)
        return 470 * n**-0.34 * np.exp(0.05 * u + 0.03 * u * u) + 2000 * tokens**-0.36

    found = minimize(loss, np.log([got["params"] * 1.2, got["aspect"] * 1.3]), method="Nelder-Mead",
                     options={"xatol": 1e-9, "fatol": 1e-15, "maxiter": 2000})  # fmt: skip
    n, tokens, depth, r = sizes(found.x)
    np.testing.assert_allclose(
        got[["params", "tokens", "depth", "aspect"]].astype(float), [n, tokens, depth, r], rtol=5e-5
    )
    plain = optimal(fit, flops=1e21).table.iloc[0]
    assert got["aspect"] != pytest.approx(plain["aspect"], rel=1e-3)
    assert got["loss"] > plain["loss"]


def test_full_flops_need_their_numbers_and_a_shape():
    with pytest.raises(ConfigError, match="full FLOPs need positive vocab= and context="):
        optimal(stand_in("shape"), flops=1e20, flops_convention="full")
    with pytest.raises(ConfigError, match="give shape= an aspect ratio"):
        optimal(stand_in("chinchilla"), flops=1e20, flops_convention="causal", vocab=5, context=5)
    with pytest.raises(ConfigError, match="'7n' is not known"):
        optimal(stand_in("chinchilla"), flops=1e20, flops_convention="7n")  # type: ignore[arg-type]
    held = optimal(stand_in("chinchilla"), flops=1e20, flops_convention="full", vocab=5000, context=512, shape=40.0)
    assert held.table["valid"].all()


def test_kappa_comes_from_the_runs():
    fit = stand_in("shape")
    other = StandIn(fit.law, fit.params, RUNS.assign(params=10 * RUNS["depth"] * RUNS["width"] ** 2))
    got = optimal(other, flops=1e20)
    assert got.kappa == pytest.approx(10)
    row = got.table.iloc[0]
    assert 10 * row["depth"] * row["width"] ** 2 == pytest.approx(row["params"])
    assert optimal(other, flops=1e20, kappa=12.5).kappa == 12.5
    bare = optimal(StandIn(LAWS["chinchilla"], fit.params, RUNS[["params", "tokens"]]), flops=1e20)
    assert bare.kappa == 12
    assert any("12 is assumed" in n for n in bare.notes)
    mixed = RUNS.assign(params=RUNS["params"] * np.linspace(1, 1.5, 7))
    assert any("varies by" in n for n in optimal(StandIn(fit.law, fit.params, mixed), flops=1e20).notes)


@pytest.mark.parametrize("key", ["kaplan_n", "kaplan_d", "ray"])
def test_laws_without_a_trade_off_are_refused(key):
    params = pd.Series({n: CHINCHILLA[n] for n in LAWS[key].names})
    with pytest.raises(ConfigError, match=r"has no (tokens|params) in it"):
        optimal(StandIn(LAWS[key], params, RUNS), flops=1e20)


def test_columns_that_a_budget_does_not_determine_must_be_given():
    law = LAWS["data_constrained"]
    fit = StandIn(law, pd.Series(CHINCHILLA | {"Rd": 15.0}), RUNS)
    with pytest.raises(ConfigError, match=r"reads 'unique_tokens'.*give at="):
        optimal(fit, flops=1e22)
    plenty = optimal(fit, flops=1e21, at={"unique_tokens": 1e9}).table.iloc[0]
    free = optimal(stand_in("chinchilla"), flops=1e21).table.iloc[0]
    assert plenty["params"] > free["params"]  # repeating 1e9 tokens is worth less than a larger model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops": 0.0}, "flops must be positive"),
        ({"flops": [[1e20]]}, "flops must be positive"),
        ({"flops": 1e20, "level": 95}, "level must lie between"),
        ({"flops": 1e20, "shape": -2.0}, "shape must be a positive aspect ratio"),
        ({"flops": 1e20, "shape": "best"}, "shape must be a positive aspect ratio"),
        ({"flops": 1e20, "kappa": 0.0}, "kappa must be positive"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        optimal(stand_in("shape"), **options)


def test_uncertainty_of_another_fit_is_refused():
    with pytest.raises(ConfigError, match="belongs to another fit"):
        optimal(stand_in("shape"), flops=1e20, uncertainty=replicates(stand_in("chinchilla")))


def test_a_budget_too_small_for_any_model_is_empty():
    got = optimal(stand_in("width_depth_params"), flops=[1e6, 1e20]).table
    assert got["valid"].tolist() == [False, True]


@settings(max_examples=15, deadline=None)
@given(alpha=st.floats(0.2, 0.6), beta=st.floats(0.2, 0.6), g1=st.floats(-0.1, 0.1), g2=st.floats(0.01, 0.2))
def test_nothing_on_the_budget_beats_the_optimum(alpha, beta, g1, g2):
    """Property: no neighbour that spends the same FLOPs has a lower loss."""
    change = {"alpha": alpha, "beta": beta, "gamma1": g1, "gamma2": g2}
    fit = stand_in("shape", **change)
    best = optimal(fit, flops=1e21).table.iloc[0]
    rng = np.random.default_rng(0)
    n = best["params"] * np.exp(rng.normal(0, 0.5, 200))
    r = best["aspect"] * np.exp(rng.normal(0, 0.5, 200))
    depth = np.cbrt(n / 12 / r**2)
    around = pd.DataFrame({"params": n, "tokens": 1e21 / 6 / n, "depth": depth, "width": depth * r})
    assert (fit.predict(around) >= best["loss"] - 1e-12).all()


def test_inputs_are_not_changed():
    fit, runs = stand_in("shape"), isoflop_runs(CHINCHILLA)
    about = replicates(fit)
    before = (fit.params.copy(), fit.runs.copy(), about.params.copy(), runs.copy())
    optimal(fit, flops=BUDGET, uncertainty=about)
    isoflop.approach2(runs, uncertainty="bootstrap", draws=30)
    pd.testing.assert_series_equal(fit.params, before[0])
    pd.testing.assert_frame_equal(fit.runs, before[1])
    pd.testing.assert_frame_equal(about.params, before[2])
    pd.testing.assert_frame_equal(runs, before[3])


# --- with a real fit ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_fits():
    """`shape` and `chinchilla` fitted to 40 noisy runs of a known shape law, with their jackknives."""
    from scalinglab.fitting import fit
    from scalinglab.uncertainty import jackknife

    rng = np.random.default_rng(11)
    n, tokens, r = np.geomspace(2e7, 2e9, 8), np.geomspace(1e9, 5e10, 5), np.array([12.0, 25, 50, 100, 200])
    grid = pd.DataFrame([(a, b, r[(i + 2 * j) % 5]) for i, a in enumerate(n) for j, b in enumerate(tokens)])
    runs = pd.DataFrame({"params": grid[0], "tokens": grid[1]})
    runs["depth"] = np.cbrt(runs["params"] / 12 / grid[2] ** 2)
    runs["width"] = runs["depth"] * grid[2]
    runs["run_id"] = [f"r{i}" for i in range(len(runs))]
    truth = pd.Series(SHAPE | {"gamma2": 0.08})
    runs["loss"] = LAWS["shape"].loss(dict(truth), runs) * np.exp(0.001 * rng.standard_normal(len(runs)))
    made = {law: fit(law, runs) for law in ("shape", "chinchilla")}
    return truth, {law: (f, jackknife(f)) for law, f in made.items()}


def test_real_fit_recovers_the_frontier_of_the_truth(real_fits):
    truth, fits = real_fits
    fitted, about = fits["shape"]
    got = optimal(fitted, flops=[1e19, 1e20, 1e21], uncertainty=about)
    true = optimal(StandIn(LAWS["shape"], truth, fitted.runs), flops=[1e19, 1e20, 1e21]).table
    table = got.table
    assert table["interval_valid"].all()
    assert not table["extrapolated"].iloc[1]
    assert got.kappa == pytest.approx(12)
    for q in QUANTITIES:  # 99.9 % intervals of a seed fixed once: the truth has to be inside
        wide = optimal(fitted, flops=[1e19, 1e20, 1e21], uncertainty=about, level=0.999).table
        assert (wide[f"{q}_low"] <= true[q]).all(), q
        assert (true[q] <= wide[f"{q}_high"]).all(), q
        assert (wide[f"{q}_low"] < table[f"{q}_low"]).all()
    numerical = optimal(fitted, flops=[1e19, 1e20, 1e21], uncertainty=about, method="numerical").table
    columns = [f"{q}{end}" for q in QUANTITIES for end in ("", "_low", "_high")]
    pd.testing.assert_frame_equal(table[columns], numerical[columns], rtol=1e-4)
    assert float(fitted.derived["r_star"]) == pytest.approx(table["aspect"].iloc[0], rel=1e-12)


def test_real_fit_exponents_agree_with_its_derived_parameter(real_fits):
    fitted, about = real_fits[1]["chinchilla"]
    got = optimal(fitted, flops=1e20, uncertainty=about)
    assert got.exponents.loc["params", "estimate"] == pytest.approx(float(fitted.derived["a_opt"]), rel=1e-12)
    low, high = got.exponents.loc["params", ["low", "high"]]
    assert low < got.exponents.loc["params", "estimate"] < high
    assert "jackknife" in got.uncertainty

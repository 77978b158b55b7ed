"""Published numbers, with source, and how far ours may be from them.

The data are public run logs in an optional folder (see conftest.py); published parameters come from the repositories and
papers named in each test. Objectives are compared first: where a published optimiser stopped early, ours must be lower.
"""

import functools
import json

import numpy as np
import pandas as pd
import pytest

from scalinglab.fitting import fit
from scalinglab.laws import LAWS
from scalinglab.objectives import Gaussian, Huber
from scalinglab.solver import solve
from scalinglab.uncertainty import bootstrap

pytestmark = pytest.mark.filterwarnings(
    "ignore::scalinglab.errors.IdentifiabilityWarning", "ignore::scalinglab.errors.ConvergenceWarning"
)
PLAIN = Gaussian(variance="constant")


@functools.cache
def logs(folder, name):
    return pd.read_csv(folder / f"{name}.csv", low_memory=False).rename(
        columns={"n_layers": "depth", "d_model": "width"}
    )


def besiroglu(shared, drop=5):
    """The points that Besiroglu et al. read from Hoffmann et al.'s figure 4; `drop` of the highest losses are left out."""
    table = logs(shared, "chinchilla_besiroglu")
    table = table.assign(params=table["params_raw"])
    return table[table["in_fit_240"] == 1] if drop == 5 else table


def gemstones(shared, subset, n="total"):
    table = logs(shared, "gemstones_checkpoints")
    table = table[table[subset] == 1]
    if n == "total":
        return table
    removed = {"backbone": 2, "one matrix": 1}[n]  # the published "no_embeds" fits subtract one vocabulary matrix only
    return table.assign(params=table["params"] - removed * 50304 * table["width"])


# ---- exact checks, without data ------------------------------------------------------------------------------------------
D1 = {"E": 1.69, "A": 406.4, "alpha": 0.465, "B": 410.7, "beta": 0.155}


def isoflop_grid():
    """5 budgets 1e17..1e21 x 15 sizes, log-spaced around the optimum of each budget (Open-Athena/scaling-law-analysis)."""
    rows = []
    a = D1["beta"] / (D1["alpha"] + D1["beta"])
    G = (D1["alpha"] * D1["A"] / (D1["beta"] * D1["B"])) ** (1 / (D1["alpha"] + D1["beta"]))
    for C in np.geomspace(1e17, 1e21, 5):
        sizes = G * (C / 6) ** a * np.geomspace(1 / 16, 16, 15)
        rows += [{"run_id": f"{C:.0e}/{N:.3e}", "params": N, "tokens": C / 6 / N} for N in sizes]
    table = pd.DataFrame(rows)
    return table.assign(loss=LAWS["chinchilla"].loss(D1, table))


def test_d1_noise_free_chinchilla_is_recovered_to_1e8():
    """Design note D1: relative error of alpha and beta below 1e-8 (published variable projection: 5e-11 / 2e-10)."""
    made = fit("chinchilla", isoflop_grid(), objective=PLAIN)
    for name in ("alpha", "beta"):
        assert made.params[name] == pytest.approx(D1[name], rel=1e-8)
    assert dict(made.params) == pytest.approx(D1, rel=1e-7)


def test_d2_projection_takes_the_conditioning_away():
    """D2: the Hessian of the raw problem has condition number ~1e11 or more, the projected one ~10 or so.

    The source's 3.48e11 and 10.6 belong to its own design and scaling, which the note doesn't give: orders of magnitude only.
    """
    table = isoflop_grid()
    n, d = table["params"].to_numpy(), table["tokens"].to_numpy()
    f = np.column_stack([np.ones_like(n), n ** -D1["alpha"], d ** -D1["beta"]])
    J = np.column_stack([f, -D1["A"] * f[:, 1] * np.log(n), -D1["B"] * f[:, 2] * np.log(d)])
    raw = np.linalg.cond(J.T @ J)
    Q, _ = np.linalg.qr(f)
    P = J[:, 3:] - Q @ (Q.T @ J[:, 3:])
    assert 1e10 < raw < 1e13
    assert np.linalg.cond(P.T @ P) < 30
    made = fit("chinchilla", table, objective=PLAIN)
    inside = made.encoding.problem.jacobian(made.theta)  # what our solver works on: centred, logarithmic amplitudes
    assert np.linalg.cond(inside.T @ inside) < 1e-4 * raw


def test_d8_the_generalised_law_holds_kaplans():
    """D8: alpha_N .076, alpha_D .103, N_c 6.4e13, D_c 1.8e13 at (3e8, 8e9): 2.6028867739, to 1e-9."""
    at = pd.DataFrame({"params": [3e8], "tokens": [8e9]})
    A, B = 6.4e13**0.076, 1.8e13**0.103
    kaplan = LAWS["kaplan"].loss({"A": A, "alpha": 0.076, "B": B, "delta": 0.103}, at)[0]
    ces = LAWS["ces"].loss({"E": 0.0, "A": A, "alpha": 0.076, "B": B, "beta": 0.103, "delta": 0.103}, at)[0]
    by_hand = ((6.4e13 / 3e8) ** (0.076 / 0.103) + 1.8e13 / 8e9) ** 0.103
    assert kaplan == pytest.approx(2.6028867739, abs=1e-9)
    assert ces == pytest.approx(kaplan, rel=1e-12)
    assert by_hand == pytest.approx(kaplan, rel=1e-12)


@pytest.mark.parametrize(("a", "b", "want"), [(1.0, 1.0, 0.11111), (0.945, 1.325, 0.13913), (0.22, 0.476, 0.011636)])
def test_d10_the_shape_law_fitted_to_width_and_depth(a, b, want):
    """D10: gamma2 = a b / 9 within .5 %, from noise-free width_depth data within 10 % of the best aspect ratio."""
    # depth and width at fixed N = 12 L d^2; the reference aspect ratio is the optimal one, as a local expansion needs
    N, A, B = 3e8, 10.0, 3.0
    best = (2 * b * B / (a * A)) ** (1 / (b + a / 2)) * (N / 12) ** (a / (a + 2 * b))
    r0 = (N / 12) ** 0.5 * best**-1.5
    aspect = r0 * np.exp(np.linspace(-0.1, 0.1, 21))
    depth = (N / (12 * aspect**2)) ** (1 / 3)
    table = pd.DataFrame({"run_id": [f"r{i}" for i in range(21)], "params": N, "depth": depth, "width": aspect * depth})
    table["loss"] = A * table["width"] ** -a + B * table["depth"] ** -b
    law = LAWS["shape"].with_(fixed={"E": 0.0, "B": 0.0, "alpha": 0.0, "beta": 0.0}, constants={"r0": r0})
    made = fit(law, table.assign(tokens=1e10), objective=PLAIN)
    assert made.params["gamma2"] == pytest.approx(want, rel=0.005)
    assert made.params["gamma2"] == pytest.approx(a * b / 9, rel=0.005)


# ---- Besiroglu et al. 2024, arXiv:2404.10102 ---------------------------------------------------------------------------
@pytest.mark.shared
def test_p1_besiroglu(shared):
    """Notebook grid fit: objective 1.0182740346e-3; ours to 1e-9 of it and not above; alpha, beta to 2e-4."""
    made = fit("chinchilla", besiroglu(shared), objective=Huber(1e-3))
    assert len(made.runs) == 240
    assert made.status == "converged"
    assert made.objective == pytest.approx(0.0010182740346154362, abs=1e-9)
    assert made.objective <= 0.0010182740346154362
    assert made.params["alpha"] == pytest.approx(0.34731, abs=2e-4)
    assert made.params["beta"] == pytest.approx(0.36718, abs=2e-4)
    assert made.params["E"] == pytest.approx(1.8172, abs=2e-4)
    assert made.params["A"] == pytest.approx(477.84, rel=1e-3)
    assert made.params["B"] == pytest.approx(2143.86, rel=1e-3)
    # the values quoted in the paper are a stop short of the optimum: 1.0186447e-3
    quoted = {
        "E": np.exp(0.59711196), "A": np.exp(6.17795598), "B": np.exp(7.64273236), "alpha": 0.34781303, "beta": 0.36585412,
    }  # fmt: skip
    e = np.abs(made.log_loss - np.log(made.predict(made.runs, quoted)))
    huber = np.where(e < 1e-3, e * e / 2, 1e-3 * (e - 5e-4)).sum()
    assert huber == pytest.approx(0.0010186447051978957, rel=1e-6)


@pytest.mark.shared
def test_p1_all_245_points(shared):
    """Own refit of 4,500 starts recorded with the data: objective 1.8260105230526e-3."""
    made = fit("chinchilla", besiroglu(shared, drop=0), objective=Huber(1e-3))
    assert made.objective <= 0.0018260105230526085 * (1 + 1e-9)
    assert made.params["beta"] == pytest.approx(0.45305, abs=1e-4)


@pytest.mark.shared
def test_p2_besiroglus_bootstrap(shared):
    """4,000 row resamples (rows as independent runs, as in the source): printed standard errors to 7 %, limits to .003.

    Also the limits recorded with the data from our own earlier bootstrap: alpha .3179-.3720, beta .3385-.4132.
    """
    made = fit("chinchilla", besiroglu(shared), objective=Huber(1e-3))
    got = bootstrap(made, draws=4000, unit="row", rng=1)
    assert got.converged.all()
    for name, want in {"A": 124.5, "B": 1293.0, "E": 0.0257, "alpha": 0.0154, "beta": 0.0206}.items():
        assert got.se[name] == pytest.approx(want, rel=0.07), name
    limits = got.conf_int()
    assert limits.loc["alpha"].tolist() == pytest.approx([0.317, 0.373], abs=0.003)
    assert limits.loc["beta"].tolist() == pytest.approx([0.331, 0.415], abs=0.0035)
    assert limits.loc["alpha"].tolist() == pytest.approx([0.31786, 0.37199], abs=0.003)
    assert limits.loc["beta"].tolist() == pytest.approx([0.33846, 0.41323], abs=0.006)


@pytest.mark.shared
def test_p4_least_squares_on_log_loss(shared):
    """E 1.8646, A 593, B 4876, alpha .3603, beta .4059, sigma .00698 (= sqrt(SSE / (n - p))); printed digits."""
    made = fit("chinchilla", besiroglu(shared), objective=PLAIN)
    assert made.params["E"] == pytest.approx(1.8646, abs=1e-4)
    assert made.params["A"] == pytest.approx(593, abs=0.7)
    assert made.params["B"] == pytest.approx(4876, abs=1)
    assert made.params["alpha"] == pytest.approx(0.3603, abs=1e-4)
    assert made.params["beta"] == pytest.approx(0.4059, abs=1e-4)
    assert np.sqrt(2 * made.objective / 235) == pytest.approx(0.00698, abs=1e-5)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("objective", "want"),
    [
        (Gaussian(on="loss", variance="constant"), (1.9051, 4.0005, 1.0509, 0.3511, 0.4587)),
        (PLAIN, (1.8926, 4.0146, 1.0571, 0.3522, 0.4430)),
    ],
    ids=lambda v: v.label if hasattr(v, "label") else "",
)
def test_p5_small_budgets_in_millions_and_billions(shared, objective, want):
    """ml-scalefit's Chinchilla file below 1e21 FLOPs: those are the 217 of the 240 Besiroglu points; N/1e6, D/1e9.

    E, A, B, alpha, beta as Open-Athena/scaling-law-analysis prints them, to one unit of the last digit.
    """
    table = besiroglu(shared)
    table = table[table["flops"] < 1e21]
    assert len(table) == 217
    made = fit(
        "chinchilla", table.assign(params=table["params"] / 1e6, tokens=table["tokens"] / 1e9), objective=objective
    )
    assert made.params[["E", "A", "B", "alpha", "beta"]].tolist() == pytest.approx(want, abs=1.01e-4)


@pytest.mark.shared
@pytest.mark.parametrize("on", ["loss", "log_loss"])
def test_p5_the_printed_huber_fit_is_short_of_the_optimum(shared, on):
    """Printed Huber values 1.8267, 3.7066, 1.0386, .3240, .4080: the optimum neither on loss nor on log loss at delta 1e-3.

    Ours is lower on both scales, by less than half a percent: the printed optimiser stopped early in a flat valley.
    """
    table = besiroglu(shared)
    table = table[table["flops"] < 1e21]
    table = table.assign(params=table["params"] / 1e6, tokens=table["tokens"] / 1e9)
    made = fit("chinchilla", table, objective=Huber(1e-3, on=on))
    printed = made.predict(made.runs, {"E": 1.8267, "A": 3.7066, "B": 1.0386, "alpha": 0.3240, "beta": 0.4080})
    loss = made.runs["loss"].to_numpy()
    e = np.abs(loss - printed if on == "loss" else np.log(loss / printed))
    there = np.where(e < 1e-3, e * e / 2, 1e-3 * (e - 5e-4)).sum()
    assert made.objective < there < 1.005 * made.objective
    assert made.params["alpha"] == pytest.approx(0.3240, abs=0.004)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("rows", "depth_law", "aic", "exponents"),
    [("203", 0.00302737, 10.3, (0.945, 1.325, 0.299)), ("240", 0.00508428, 19.0, None), ("245", 0.02950525, 8.4, None)],
)
def test_p8_width_and_depth_on_chinchilla_shapes(shared, rows, depth_law, aic, exponents):
    """Liu et al. 2026, arXiv:2602.05970 use 203 points: those are the 203 lowest losses (loss <= 2.98523).

    Mean square of log residuals x 100: .003027 at exponents .945 / 1.325 / .299, below their printed .0030681; chinchilla
    beats width_depth by AIC.
    """
    table = besiroglu(shared, drop=5 if rows == "240" else 0).assign(params=lambda t: t["table_params_M"] * 1e6)
    table = table.nsmallest(203, "loss") if rows == "203" else table
    assert len(table) == int(rows)
    shape, plain = fit("width_depth", table, objective=PLAIN), fit("chinchilla", table, objective=PLAIN)
    n = len(table)
    assert 2 * shape.objective / n * 100 == pytest.approx(depth_law, rel=1e-4)
    if exponents:
        assert shape.params[["a", "b", "c"]].tolist() == pytest.approx(exponents, abs=6e-4)
        assert 2 * shape.objective / n * 100 < 0.0030681
    gap = n * np.log(shape.objective / plain.objective) + 2 * (7 - 5)
    assert gap == pytest.approx(aic, abs=0.25)


# ---- Gemstones: McLeish et al. 2025, arXiv:2502.06857 -------------------------------------------------------------------
def published_gemstones():
    """(id, law, subset, N, delta) of the fits in the repository; the numbers are read from the data folder."""
    both, one = ("0.001", "0.0001"), ("0.001",)
    for subset, deltas in {"fit_hot": both, "fit_hot_100b": both, "fit_hot_120b_only": one, "fit_cool_end": both, "fit_lr_ablation_hot": both}.items():  # fmt: skip
        for delta in deltas:
            yield f"gemstones_{subset}_with_embeds_delta{delta}_N_D", "chinchilla", subset, "total", float(delta)
    yield "gemstones_fit_hot_100b_no_embeds_delta0.001_N_D", "chinchilla", "fit_hot_100b", "one matrix", 1e-3
    for subset, deltas in {"fit_hot_100b": both, "fit_hot": ("0.0001",), "fit_cool_end": both, "fit_lr_ablation_hot": both, "fit_hot_120b_only": ("0.0001",)}.items():  # fmt: skip
        for delta in deltas:
            yield (
                f"gemstones_{subset}_delta{delta}_width_depth_N_D",
                "width_depth_params",
                subset,
                "total",
                float(delta),
            )
    for delta in both:
        yield f"gemstones_fit_hot_100b_delta{delta}_width_depth_D", "width_depth", "fit_hot_100b", "total", float(delta)


@pytest.mark.shared
@pytest.mark.parametrize("case", list(published_gemstones()), ids=lambda c: c[0].removeprefix("gemstones_"))
def test_p6_gemstones(shared, case):
    """Our objective is not above the published parameters' (recomputed), nor above the best known, to 1e-9 relative."""
    key, law, subset, n, delta = case
    entry = next(f for f in json.loads((shared / "reference_fits.json").read_text())["fits"] if f["id"] == key)
    known = entry["verification"]
    made = fit(law, gemstones(shared, subset, n), objective=Huber(delta))
    assert len(made.runs) == known["n"]
    assert made.objective <= known["objective_recomputed_at_published"]
    assert made.objective <= known["our_objective"] * (1 + 1e-9)
    if delta == 1e-3 and law == "chinchilla":
        # exponents to a permille; cool_end's and 120b_only's valleys are flatter, and their published stops farther off
        want = known["our_exponents"]
        assert made.params[["alpha", "beta"]].tolist() == pytest.approx(want, rel=2e-3)
    if law == "width_depth":
        assert made.params["E"] == 0.0
        assert made.status == "at_bound"
        assert "E_COLLAPSE" in made.codes


@pytest.mark.shared
def test_p6_printed_targets(shared):
    """Design note P6 at delta 1e-4: 6.9233e-4 (.2576, .5909), 4.19946e-4 (.2608, .1418, .5421), 2.94971e-4."""
    made = fit("chinchilla", gemstones(shared, "fit_hot_100b"), objective=Huber(1e-4))
    assert made.objective <= 6.9233e-4 + 5e-9
    assert made.params[["alpha", "beta"]].tolist() == pytest.approx([0.2576, 0.5909], abs=0.0025)
    made = fit("width_depth", gemstones(shared, "fit_hot_100b"), objective=Huber(1e-4))
    assert made.objective <= 4.19946e-4 + 1e-9
    assert made.params[["a", "b", "c"]].tolist() == pytest.approx([0.2608, 0.1418, 0.5421], abs=2e-4)
    made = fit("width_depth_params", gemstones(shared, "fit_hot_100b"), objective=Huber(1e-4))
    assert made.objective <= 2.94971e-4


@pytest.mark.shared
@pytest.mark.parametrize(
    ("n", "r_star", "gamma2", "alpha"),
    [("one matrix", 17.5, 0.0137, 0.266), ("total", 9.3, 0.01566, 0.33366), ("backbone", 48.72, 0.00883, 0.16377)],
)
def test_p7_the_optimal_aspect_depends_on_what_n_counts(shared, n, r_star, gamma2, alpha):
    """Design note P7 (r* 17.5, gamma2 .0137, alpha .266, beta .5375) is N less ONE vocabulary matrix, not the backbone.

    With the true backbone (both matrices removed) r* is 48.7: the convention moves the answer fivefold.
    """
    made = fit("shape", gemstones(shared, "fit_hot_100b", n), objective=PLAIN)
    assert made.derived["r_star"] == pytest.approx(r_star, abs=0.05 if r_star < 40 else 0.1)
    assert made.params["gamma2"] == pytest.approx(gamma2, abs=5e-5)
    assert made.params["alpha"] == pytest.approx(alpha, abs=5e-4)
    assert made.params["beta"] == pytest.approx(0.5375, abs=2e-4)


LORO = [
    ("chinchilla", "total", 0.01413, 0.01553),
    ("chinchilla", "one matrix", 0.01051, 0.01156),
    ("shape", "one matrix", 0.00524, 0.00640),
    ("shape", "total", 0.00587, 0.00804),
    ("width_depth", "total", 0.00655, 0.007876),
    ("width_depth_params", "total", 0.00482, 0.00520),
]


@pytest.mark.shared
@pytest.mark.parametrize(("law", "n", "inside", "outside"), LORO, ids=[f"{r[0]}-{r[1]}" for r in LORO])
def test_p10_leave_one_run_out(shared, law, n, inside, outside):
    """Design note 4.7: RMSE of log loss in sample and left out, every 40 B tokens (176 rows, 22 runs); to 1 % (asked: 3 %).

    The note's N is params less one vocabulary matrix. Its .00746 for width_depth is not reached: 22 separate searches of the
    global optimum give .007876 (in sample .00655 agrees), so that entry came from refits short of their optimum.
    """
    table = gemstones(shared, "fit_hot_100b", n)
    table = table[(table["tokens"] / 1e10).round().astype(int) % 4 == 0]
    assert len(table) == 176
    made = fit(law, table, objective=PLAIN)
    code, runs = pd.factorize(made.runs["run_id"])
    refits = made.refit(weights=1.0 - (code[None] == np.arange(len(runs))[:, None]))
    assert refits.converged.all()
    left_out = np.log(made.predict(made.runs, refits.params))[code, np.arange(len(code))]
    assert np.sqrt((made.residuals**2).mean()) == pytest.approx(inside, rel=0.01)
    assert np.sqrt(((made.log_loss - left_out) ** 2).mean()) == pytest.approx(outside, rel=0.01)


@pytest.mark.shared
def test_p10_refits_of_a_collapsed_law_are_the_global_ones(shared):
    """The run whose deletion reopens the floor (768 x 45): the warm refit reaches what a new search finds."""
    table = gemstones(shared, "fit_hot_100b")
    table = table[(table["tokens"] / 1e10).round().astype(int) % 4 == 0]
    made = fit("width_depth", table, objective=PLAIN)
    keep = ~made.runs["run_id"].str.contains("768x45").to_numpy()
    warm = made.refit(weights=keep[None].astype(float))
    anew = fit("width_depth", made.runs[keep], objective=PLAIN)
    assert warm.converged[0]
    # the fit's weights are scaled to sum to the number of rows; all are 1 here
    assert warm.objective[0] == pytest.approx(anew.objective, rel=1e-7)


# ---- is the reported optimum the global one? ----------------------------------------------------------------------------
def classic_starts(encoding):
    """The 4,500 starts of Hoffmann et al.: exponents {0, .5, .. 2}^2 x log coefficients {0, 5, .. 25}^2 x e {-1, -.5, .. 1}."""
    grid = np.meshgrid(
        np.arange(0, 2.1, 0.5),
        np.arange(0, 2.1, 0.5),
        np.arange(0, 26, 5),
        np.arange(0, 26, 5),
        np.arange(-1, 1.1, 0.5),
    )
    frame = pd.DataFrame(np.stack([g.ravel() for g in grid], 1), columns=["alpha", "beta", "A", "B", "E"])
    frame[["A", "B", "E"]] = np.exp(frame[["A", "B", "E"]])
    return np.stack([encoding.internal(row) for row in frame.to_dict("records")])


DATA_SETS = {
    "besiroglu 240": lambda s: besiroglu(s),
    "besiroglu 245": lambda s: besiroglu(s, drop=0),
    "kyotakano": lambda s: logs(s, "chinchilla_kyotakano"),
    "gemstones cool_end": lambda s: gemstones(s, "fit_cool_end"),
    "gemstones hot": lambda s: gemstones(s, "fit_hot"),
    "gadre c4": lambda s: logs(s, "gadre_overtraining").query("eval_dataset == 'c4_val'").query("loss > 0"),
    "misfitting final": lambda s: logs(s, "misfitting_dense").query("is_final == 1 and loss > 0"),
}


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("objective", [PLAIN, Huber(1e-3)], ids=lambda o: o.label)
@pytest.mark.parametrize("name", DATA_SETS)
def test_global_certificate(shared, name, objective):
    """fit() is within 1e-9 of the best of 4,500 classic starts, on every data set with shapes of N and D.

    All starts take 25 Gaussian Newton steps; the best 500 are then polished on the objective itself.
    """
    table = DATA_SETS[name](shared).drop(columns="status", errors="ignore")
    assert len(table) > 20
    made = fit("chinchilla", table, objective=objective)
    starts = classic_starts(made.encoding)
    problem, y, w = made.encoding.problem, made.log_loss, made.weights
    near = solve(problem, starts, y, w, PLAIN, max_iter=25)
    best = np.argsort(np.where(np.isfinite(near.objective), near.objective, np.inf))[:500]
    found = solve(problem, near.theta[best], y, w, objective, max_iter=100)
    assert len(starts) == 4500
    assert made.objective <= np.nanmin(found.objective) * (1 + 1e-9)

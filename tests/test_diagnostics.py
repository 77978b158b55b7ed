"""Checks of a fit against their definitions and against simulation with known answers."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, f

from scalinglab.diagnostics import condition_number, lack_of_fit, seed_variance, size_tiers, within_run_correlation
from scalinglab.errors import IdentifiabilityWarning
from scalinglab.fitting import fit
from scalinglab.objectives import Gaussian
from scalinglab.simulation import gemstones_design, grid_design, ladder_design, simulate

PLAIN = Gaussian(variance="constant")
C1 = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
S2 = {**C1, "gamma1": 0.02, "gamma2": 0.016}


def check(made, start):
    return next(c for c in made.checks if c.name.startswith(start))


def runs_of(count, rows):
    return pd.DataFrame(
        {"run_id": np.repeat([f"r{i}" for i in range(count)], rows), "tokens": np.tile(np.arange(1.0, rows + 1), count)}
    )


@pytest.mark.parametrize(("tau", "sigma"), [(0.0, 1.0), (1.0, 1.0), (3.0, 1.0)])
def test_icc_of_known_variance_components(tau, sigma):
    runs, rng = runs_of(1500, 6), np.random.default_rng(1)
    e = tau * np.repeat(rng.standard_normal(1500), 6) + sigma * rng.standard_normal(9000)
    icc, _ = within_run_correlation(runs, e)
    assert icc == pytest.approx(tau**2 / (tau**2 + sigma**2), abs=0.03)


def test_icc_is_the_anova_estimator():
    import statsmodels.formula.api as smf
    from statsmodels.stats.anova import anova_lm

    runs, rng = runs_of(12, 5), np.random.default_rng(2)
    runs["e"] = np.repeat(rng.standard_normal(12), 5) + rng.standard_normal(60)
    between, within = anova_lm(smf.ols("e ~ C(run_id)", runs).fit())["mean_sq"]
    icc, _ = within_run_correlation(runs, runs["e"].to_numpy())
    assert icc == pytest.approx((between - within) / (between + 4 * within), rel=1e-9)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_lag_one_correlation_of_ar1(rho):
    design = gemstones_design(checkpoints=200)
    table = simulate("chinchilla", C1, design, sigma=0.01, rho=rho, rng=3)
    e = np.log(table["loss"]) - np.log(1.69 + 406.4 / table["params"] ** 0.34 + 410.7 / table["tokens"] ** 0.28)
    _, acf = within_run_correlation(table, e.to_numpy())
    assert acf == pytest.approx(rho, abs=0.04)
    shuffled = table.sample(frac=1, random_state=1)
    assert within_run_correlation(shuffled, e.loc[shuffled.index].to_numpy())[1] == pytest.approx(acf, rel=1e-9)


def test_lack_of_fit_has_its_size_and_sees_lack_of_fit():
    """F against seeds at the true law: 5 % of 400 tables (binomial bounds at 1e-3); with shape effects nearly always."""
    design = grid_design((1e8, 3e8, 1e9), (1e9, 1e10), aspects=(16, 64))
    table = simulate("chinchilla", C1, design, sigma=0, seeds=3)
    predicted, rng = np.log(table["loss"].to_numpy()), np.random.default_rng(1)
    cell = np.tile(np.arange(12), 3)
    wrong = {0.0: 0, 0.01: 0}
    for cell_sd in wrong:
        for _ in range(400 if cell_sd == 0 else 40):
            y = predicted + 0.004 * rng.standard_normal(36) + cell_sd * rng.standard_normal(12)[cell]
            F, d1, d2 = lack_of_fit(table, y, predicted)
            assert (d1, d2) == (12, 24)
            wrong[cell_sd] += f.sf(F, d1, d2) < 0.05
    assert binom.ppf(0.0005, 400, 0.05) <= wrong[0.0] <= binom.ppf(0.9995, 400, 0.05)
    assert wrong[0.01] >= 39


def test_lack_of_fit_needs_replicates_and_single_rows():
    design = grid_design((1e8, 3e8), (1e9, 1e10))
    table = simulate("chinchilla", C1, design, sigma=0.004)
    assert lack_of_fit(table, np.zeros(4), np.zeros(4)) is None
    many = simulate("chinchilla", C1, gemstones_design(), sigma=0.004, seeds=2)
    assert lack_of_fit(many, np.zeros(len(many)), np.zeros(len(many))) is None


def test_cooks_distance_is_that_of_the_deletion():
    """One-step Cook's distance of whole runs against refits without them, for a law linear in logs: exact."""
    design = gemstones_design(checkpoints=3, shapes=10)
    made = fit(
        "kaplan_n",
        simulate("kaplan_n", {"A": 12.0, "alpha": 0.08}, design, sigma=0.01, tau=0.02, rng=1),
        objective=PLAIN,
    )
    X = np.column_stack([np.ones(30), np.log(made.runs["params"])])
    s2 = 2 * made.objective / (30 - 2)
    full = np.array([np.log(made.params["A"]), -made.params["alpha"]])
    want = []
    for run in made.runs["run_id"].unique():
        alone = fit("kaplan_n", made.runs[made.runs["run_id"] != run], objective=PLAIN)
        step = np.array([np.log(alone.params["A"]), -alone.params["alpha"]]) - full
        want.append(step @ X.T @ X @ step / (2 * s2))
    assert check(made, "largest Cook's").value == pytest.approx(max(want), rel=1e-6)
    H = X @ np.linalg.inv(X.T @ X) @ X.T
    leverage = [np.trace(H[np.ix_(i, i)]) for i in made.runs.groupby("run_id").indices.values()]
    assert check(made, "largest leverage").value == pytest.approx(max(leverage), rel=1e-9)


def test_cooks_distance_is_close_for_a_curved_law():
    design = gemstones_design(checkpoints=4)
    made = fit("shape", simulate("shape", S2, design, sigma=0.004, tau=0.003, rng=1), objective=PLAIN)
    J = made.encoding.problem.jacobian(made.theta)
    s2 = 2 * made.objective / (len(J) - 7)
    runs = made.runs["run_id"].unique()
    got = check(made, "largest Cook's")
    want = {}
    for run, row in zip(runs, made.jackknife.params.to_dict("records"), strict=True):
        step = made.encoding.internal(row) - made.theta
        want[run] = step @ J.T @ J @ step / (7 * s2)
    worst = max(want, key=want.get)
    assert got.value == pytest.approx(want[worst], rel=0.35)
    assert repr(worst) in got.action


def test_condition_numbers():
    assert condition_number(np.eye(5) * [1, 10, 100, 1e3, 1e4]) == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    J = rng.standard_normal((50, 4))
    scaled = J / np.linalg.norm(J, axis=0)
    assert condition_number(J * [1, 1e5, 1e-5, 3]) == pytest.approx(np.linalg.cond(scaled), rel=1e-9)
    assert condition_number(np.zeros((5, 2))) == np.inf
    assert condition_number(np.zeros((5, 0))) == 1.0


def test_a_ray_design_is_not_identified():
    table = simulate("chinchilla", C1, ladder_design(), sigma=0.001, rng=1)
    with pytest.warns(IdentifiabilityWarning):
        made = fit("chinchilla", table)
    assert made.status == "not_identified"
    assert "RAY_DESIGN" in made.codes
    spread = check(made, "tokens-per-parameter").value
    assert spread == pytest.approx(np.log(table["tokens"] / table["params"]).std(ddof=0), rel=1e-12)
    assert fit("ray", table).status == "converged"


def test_one_aspect_ratio_gives_no_claim_about_shape():
    design = grid_design((3e7, 1e8, 3e8, 1e9), (1e9, 1e10, 1e11), aspects=(40, 45))
    with pytest.warns(IdentifiabilityWarning):
        made = fit("shape", simulate("shape", S2, design, sigma=0.002, rng=1))
    assert "LOW_SHAPE_DIVERSITY" in made.codes
    good = grid_design((3e7, 1e8, 3e8, 1e9), (1e9, 1e10, 1e11), aspects=(10, 40, 160))
    assert "LOW_SHAPE_DIVERSITY" not in fit("shape", simulate("shape", S2, good, sigma=0.002, rng=1)).codes


def test_size_tiers():
    assert size_tiers(np.array([1e9, 1e8, 1.05e8, 1.02e9, 4e8])).tolist() == [2, 0, 0, 2, 1]


def test_seed_variance_recovers_its_power():
    """SD of log loss = .002 (loss / 3)^3: power from 600 replicate degrees of freedom, within .4."""
    design = grid_design((1e7, 3e7, 1e8, 1e9), (3e8, 1e9, 1e10))
    clean = simulate("chinchilla", C1, design, sigma=0, seeds=50)
    rng = np.random.default_rng(1)
    m = np.log(clean["loss"].to_numpy())
    y = m + 0.002 * (np.exp(m) / 3) ** 3 * rng.standard_normal(len(m))
    got = seed_variance(clean, y, m)
    assert got.df == 12 * 49
    assert got.power == pytest.approx(3.0, abs=0.4)
    assert np.sqrt(got.sigma2) == pytest.approx(0.002 * (np.exp(m.mean()) / 3) ** 3, rel=0.1)
    assert got.tau2 < 1e-6
    assert seed_variance(simulate("chinchilla", C1, design, sigma=0.01), m[:12], m[:12]) is None


def test_few_runs_and_correlation_are_said():
    design = gemstones_design(checkpoints=10, shapes=9)
    made = fit("chinchilla", simulate("chinchilla", C1, design, sigma=0.004, tau=0.01, rho=0.7, rng=1), objective=PLAIN)
    assert {"FEW_RUNS", "WITHIN_RUN_CORRELATION"} <= set(made.codes)
    assert set(made.diagnostics["level"]) <= {"ok", "warn", "block"}
    assert made.diagnostics["action"].str.len().gt(0).all()

"""Standard errors and intervals against loops of refits, closed forms, statsmodels and lmfit."""

import functools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, FitError
from scalinglab.fitting import fit
from scalinglab.objectives import Gaussian, Huber
from scalinglab.profiles import delta, fieller, optimal_aspect, profile
from scalinglab.simulation import gemstones_design, grid_design, simulate
from scalinglab.uncertainty import bootstrap, jackknife, variance_components

PLAIN = Gaussian(variance="constant")
C1 = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
S2 = {**C1, "gamma1": 0.02, "gamma2": 0.016}


@functools.cache
def power_fit():
    """Kaplan's law on 12 runs x 3 checkpoints: linear in logs."""
    design = gemstones_design(checkpoints=3, shapes=12)
    return fit(
        "kaplan_n",
        simulate("kaplan_n", {"A": 12.0, "alpha": 0.08}, design, sigma=0.01, tau=0.02, rng=1),
        objective=PLAIN,
    )


@functools.cache
def chinchilla_fit(sigma=0.003):
    design = grid_design((3e7, 1e8, 3e8, 1e9), (1e9, 4e9, 2e10, 1e11))
    return fit("chinchilla", simulate("chinchilla", C1, design, sigma=sigma, rng=1), objective=PLAIN)


@functools.cache
def shape_fit():
    design = gemstones_design(checkpoints=4)
    return fit("shape", simulate("shape", S2, design, sigma=0.004, tau=0.003, rng=1), objective=PLAIN)


def ols(frame):
    import statsmodels.api as sm

    return sm.OLS(np.log(frame["loss"]), sm.add_constant(np.log(frame["params"]))).fit()


def test_kaplan_is_ols_in_logs_with_cr3_errors():
    """Coefficients and delete-one-run errors against statsmodels OLS and a hand-written CR3, to 1e-8."""
    made = power_fit()
    frame = made.runs
    whole = ols(frame)
    assert np.log(made.params["A"]) == pytest.approx(whole.params["const"], rel=1e-9)
    assert -made.params["alpha"] == pytest.approx(whole.params["params"], rel=1e-9)
    assert 2 * made.objective == pytest.approx(whole.ssr, rel=1e-10)
    # CR3 in closed form: (X'X)^-1 sum_g X_g'(I - H_gg)^-1 e_g e_g'(I - H_gg)^-1 X_g (X'X)^-1, times (G - 1) / G
    X = np.column_stack([np.ones(len(frame)), np.log(frame["params"])])
    e, inv = whole.resid.to_numpy(), np.linalg.inv(X.T @ X)
    moves = []
    for rows in frame.groupby("run_id").indices.values():
        Xg = X[rows]
        moves.append(inv @ Xg.T @ np.linalg.solve(np.eye(len(rows)) - Xg @ inv @ Xg.T, e[rows]))
    moves = np.array(moves)
    G = len(moves)
    V = (G - 1) / G * moves.T @ moves
    got = jackknife(made)
    assert got.df == G - 1
    assert got.se["alpha"] == pytest.approx(np.sqrt(V[1, 1]), rel=1e-7)
    interval = got.interval(lambda p: np.log(p["A"].to_numpy()))
    assert float(interval.se) == pytest.approx(np.sqrt(V[0, 0]), rel=1e-7)
    from scipy.stats import t

    low, high = got.conf_int().loc["alpha"]
    assert (high - low) / 2 == pytest.approx(t.ppf(0.975, G - 1) * np.sqrt(V[1, 1]), rel=1e-7)
    # the interval of A is made on the log scale
    low, high = np.log(got.conf_int().loc["A"])
    assert (low + high) / 2 == pytest.approx(np.log(made.params["A"]), rel=1e-9)


@pytest.mark.parametrize("which", [chinchilla_fit, shape_fit])
def test_jackknife_is_a_loop_of_fits(which):
    """Each deletion against a new fit() of the table without that run."""
    made = which()
    got = jackknife(made)
    assert got.converged.all()
    runs = pd.unique(made.runs["run_id"])
    for g in (0, 5, len(runs) - 1):
        alone = fit(made.law, made.runs[made.runs["run_id"] != runs[g]], objective=PLAIN)
        np.testing.assert_allclose(got.params.iloc[g], alone.params, rtol=2e-4)
    by_hand = got.params - made.params
    V = (len(runs) - 1) / len(runs) * by_hand.T @ by_hand
    np.testing.assert_allclose(got.cov, V, rtol=1e-12)


def test_jackknife_of_a_mean_is_the_standard_error_of_the_mean():
    """A law with a floor only is the geometric mean of the loss."""
    rng = np.random.default_rng(0)
    runs = pd.DataFrame({"run_id": [f"r{i}" for i in range(15)], "params": 1e8, "loss": np.exp(rng.normal(1, 0.1, 15))})
    made = fit("E*params**0", runs, objective=PLAIN)
    y = np.log(runs["loss"])
    assert np.log(made.params["E"]) == pytest.approx(y.mean(), rel=1e-12)
    got = jackknife(made).interval(lambda p: np.log(p["E"].to_numpy()))
    assert float(got.se) == pytest.approx(y.std(ddof=1) / np.sqrt(15), rel=1e-6)  # refits stop at 3e-7 SE


def test_bootstrap_is_determined_by_its_seed():
    made = power_fit()
    for kind in ("pairs", "wild", "parametric", "residual"):
        one, two = (bootstrap(made, draws=20, kind=kind, rng=7) for _ in range(2))
        pd.testing.assert_frame_equal(one.params, two.params)
        other = bootstrap(made, draws=20, kind=kind, rng=8)
        assert not np.allclose(one.params, other.params)
        assert kind in one.method
        assert "20 draws" in one.method


def test_a_pairs_bootstrap_draw_is_a_fit_of_the_drawn_runs():
    made = power_fit()
    runs = pd.unique(made.runs["run_id"])
    picked = np.random.default_rng(3).integers(0, len(runs), size=(4, len(runs)))
    counts = np.stack([np.bincount(row, minlength=len(runs)) for row in picked])
    got = bootstrap(made, draws=4, rng=3)
    for k in range(4):
        drawn = pd.concat(
            [made.runs[made.runs["run_id"] == r] for r, c in zip(runs, counts[k], strict=True) for _ in range(c)]
        )
        np.testing.assert_allclose(
            got.params.iloc[k], [np.exp(ols(drawn).params["const"]), -ols(drawn).params["params"]], rtol=1e-6
        )


def test_strata_keep_their_number_of_runs():
    made = chinchilla_fit()
    got = bootstrap(made, draws=50, strata="params", rng=1)
    assert got.converged.all()
    with pytest.raises(ConfigError, match="strata: 'nothing'"):
        bootstrap(made, draws=5, strata="nothing")


def test_bootstraps_agree_with_the_linear_theory_where_rows_are_independent():
    """16 independent rows: parametric and residual bootstrap SEs are those of least squares; 600 draws, 12 % tolerance."""
    made = chinchilla_fit()
    J = made.encoding.problem.jacobian(made.theta)
    s2 = 2 * made.objective / (len(made.runs) - 5)
    V = s2 * np.linalg.inv(J.T @ J)
    want = {n: np.sqrt(V[k, k]) for k, n in enumerate(made.encoding.coordinates) if n in ("alpha", "beta")}
    for kind in ("parametric", "residual"):
        se = bootstrap(made, draws=600, kind=kind, rng=2).se
        for name, value in want.items():
            assert se[name] == pytest.approx(value, rel=0.12)


def test_the_row_bootstrap_is_spelled_out_and_too_narrow_for_checkpoints():
    made = power_fit()
    by_run, by_row = (bootstrap(made, draws=400, unit=u, rng=1) for u in ("run", "row"))
    assert by_row.se["alpha"] < 0.85 * by_run.se["alpha"]
    assert "by row" in by_row.method


def test_profile_is_lmfits_conf_interval():
    """Curved law, independent rows: limits of alpha, beta and E against lmfit's own profiling by F tests.

    lmfit compares (chi2 / chi2_min - 1)(n - p) with F; the profile compares n ln(chi2 / chi2_min) with n ln(1 + F / (n - p)),
    which is the same threshold. Tolerance 1 % of the half width (ours interpolates a grid of 41 points).
    """
    import lmfit

    made = chinchilla_fit()
    size, budget, y = (made.runs[c].to_numpy() for c in ("params", "tokens", "loss"))

    def residual(p):
        v = p.valuesdict()
        capacity = np.exp(v["a"]) * (size / 1e8) ** -v["alpha"]
        return np.log(y) - np.log(np.exp(v["e"]) + capacity + np.exp(v["b"]) * (budget / 1e10) ** -v["beta"])

    p = lmfit.Parameters()
    for name, value in (
        ("e", np.log(made.params["E"])),
        ("a", np.log(made.params["A"] * 1e8 ** -made.params["alpha"])),
        ("alpha", made.params["alpha"]),
        ("b", np.log(made.params["B"] * 1e10 ** -made.params["beta"])),
        ("beta", made.params["beta"]),
    ):
        p.add(name, value=value)
    minimiser = lmfit.Minimizer(residual, p)
    result = minimiser.minimize(method="leastsq")
    theirs = lmfit.conf_interval(minimiser, result, p_names=["alpha", "beta", "e"], sigmas=[0.95])
    for name, their in (("alpha", "alpha"), ("beta", "beta"), ("E", "e")):
        ours = profile(made, name)
        limits = [v for level, v in theirs[their] if level > 0.9]
        if name == "E":
            limits = list(np.exp(limits))
        width = limits[1] - limits[0]
        assert ours.bounded
        assert ours.low == pytest.approx(limits[0], abs=0.005 * width)
        assert ours.high == pytest.approx(limits[1], abs=0.005 * width)
        assert ours.statistic.min() < 1e-6


def test_an_unidentified_parameter_has_an_open_profile():
    """A floor far below the losses: the interval of E reaches 0 and its profile is open there."""
    design = grid_design((1e8, 2e8, 4e8), (1e9, 2e9, 4e9))
    made = fit("chinchilla", simulate("chinchilla", {**C1, "E": 0.05}, design, sigma=0.02, rng=2), objective=PLAIN)
    got = profile(made, "E")
    assert got.low == 0.0
    assert jackknife(made).conf_int().loc["E", "low"] == 0.0


def test_profile_refusals():
    with pytest.raises(ConfigError, match="no free parameter"):
        profile(chinchilla_fit(), "gamma1")
    made = fit("kaplan_n", power_fit().runs, objective=Huber(0.01))
    with pytest.raises(ConfigError, match="no likelihood"):
        profile(made, "alpha")


# ---- Fieller -------------------------------------------------------------------------------------------------------------
def inside(s, x):
    return s.kind == "everything" or (s.low <= x <= s.high if s.kind == "interval" else not s.low < x < s.high)


def test_fieller_bounded_exclusive_everything():
    """Normal quantiles (df infinite in effect) and the three textbook cases."""
    s = fieller(2.0, 1.0, 0.01, 0.01, 0.0, df=1e9)
    assert s.kind == "interval"
    q2 = 1.959963984540054**2
    for end in (s.low, s.high):  # ends solve (a - x b)^2 = q^2 (va - 2 x cov + x^2 vb)
        assert (2 - end) ** 2 == pytest.approx(q2 * 0.01 * (1 + end**2), rel=1e-6)
    s = fieller(2.0, 0.1, 0.01, 0.01, 0.0, df=1e9)
    assert s.kind == "exclusive"
    assert s.low < s.high
    assert inside(s, 20.0)
    assert inside(s, -1e9)
    assert not inside(s, (s.low + s.high) / 2)
    assert fieller(0.1, 0.1, 0.01, 0.01, 0.0, df=1e9).kind == "everything"


@settings(max_examples=300)
@given(
    st.floats(-3, 3), st.floats(-3, 3), st.floats(0.01, 1), st.floats(0.01, 1), st.floats(-0.95, 0.95), st.floats(2, 50),
    st.floats(-20, 20),
)  # fmt: skip
def test_fieller_is_the_inverted_t_test(a, b, sa, sb, r, df, x):
    from scipy.stats import t

    s = fieller(a, b, sa**2, sb**2, r * sa * sb, df=df)
    gap = abs(a - x * b) - t.ppf(0.975, df) * np.sqrt(sa**2 - 2 * x * r * sa * sb + x * x * sb**2)
    if abs(gap) > 1e-6:
        assert inside(s, x) == (gap < 0)


def test_optimal_aspect_is_fieller_of_the_vertex():
    made = shape_fit()
    s = optimal_aspect(made)
    V = made.jackknife.cov
    from scipy.stats import t

    q2 = t.ppf(0.975, made.n_runs - 1) ** 2
    assert s.kind == "interval"
    assert s.estimate == pytest.approx(42.67 * np.exp(-made.params["gamma1"] / (2 * made.params["gamma2"])))
    for end in (s.low, s.high):
        x = -2 * np.log(end / 42.67)  # the ratio gamma1 / gamma2
        left = (made.params["gamma1"] - x * made.params["gamma2"]) ** 2
        right = q2 * (V.loc["gamma1", "gamma1"] - 2 * x * V.loc["gamma1", "gamma2"] + x * x * V.loc["gamma2", "gamma2"])
        assert left == pytest.approx(right, rel=1e-6)
    with pytest.raises(ConfigError, match="optimal aspect ratio is a parameter of the shape laws"):
        optimal_aspect(chinchilla_fit())


def test_delta_is_the_jackknife_for_linear_functions_and_close_for_smooth_ones():
    made = shape_fit()

    def linear(p):
        return (3 * p["gamma1"] - 2 * p["alpha"]).to_numpy()

    assert float(delta(made, linear).se) == pytest.approx(float(made.jackknife.interval(linear).se), rel=1e-6)

    def predicted(p):
        return made.predict(made.runs.iloc[:3], p)

    one, two = delta(made, predicted), made.jackknife.interval(predicted)
    assert one.estimate.shape == (3,)
    np.testing.assert_allclose(one.estimate, made.predict(made.runs.iloc[:3]), rtol=1e-12)
    np.testing.assert_allclose(one.se, two.se, rtol=0.25)
    assert "delta" in one.method


def test_intervals_of_functions():
    made = chinchilla_fit()
    got = made.jackknife.interval(lambda p: p[["alpha", "beta"]].to_numpy(), 0.9)
    assert got.estimate.shape == (2,)
    assert got.valid.all()
    log = made.jackknife.interval(lambda p: p["alpha"].to_numpy(), log=True)
    assert np.log(log.low * log.high) / 2 == pytest.approx(np.log(made.params["alpha"]))
    with pytest.raises(ConfigError, match="returned shape"):
        made.jackknife.interval(lambda p: np.ones(3))
    bad = made.jackknife.interval(lambda p: np.where(np.arange(len(p)) == 2, np.nan, 1.0))
    assert not bad.valid


def test_variance_components_are_recovered():
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(2000), 5)
    e = 0.02 * rng.standard_normal(2000)[codes] + 0.01 * rng.standard_normal(10000)
    within, between = variance_components(codes, e)
    assert within == pytest.approx(1e-4, rel=0.05)
    assert between == pytest.approx(4e-4, rel=0.1)
    assert variance_components(np.arange(10000), e)[1] == 0.0


def test_refusals():
    made = power_fit()
    with pytest.raises(ConfigError, match="at least 2"):
        bootstrap(made, draws=1)
    with pytest.raises(ConfigError, match="kind 'bayes'"):
        bootstrap(made, draws=5, kind="bayes")
    with pytest.raises(ConfigError, match="unit 'cell'"):
        jackknife(made, unit="cell")
    two = fit("E*params**0", made.runs[made.runs["run_id"].isin(made.runs["run_id"].unique()[:2])], objective=PLAIN)
    with pytest.raises(FitError, match="at least 3 runs"):
        jackknife(two)

"""Laws compared by held-out runs: against refits by hand, statsmodels, scipy, and a published-data table."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab import holdout
from scalinglab.comparison import compare, log_likelihood, nested_f, sign_flip_p
from scalinglab.errors import ConfigError
from scalinglab.fitting import fit
from scalinglab.laws import LAWS
from scalinglab.objectives import Gaussian, Huber, StudentT

SHARED = Path(os.environ.get("SCALINGLAB_SHARED", Path(__file__).resolve().parents[2] / "shared"))
GEMSTONES = SHARED / "data" / "gemstones_checkpoints.csv"
TRUTH = {"E": 1.8, "A": 480.0, "alpha": 0.35, "B": 2100.0, "beta": 0.37, "gamma1": 0.05, "gamma2": 0.04}


def made_runs(*, rows: int = 1, seed: int = 0, noise: float = 0.003, run_noise: float = 0.0) -> pd.DataFrame:
    """24 runs (4 sizes, 6 shapes) with `rows` token budgets each, drawn from the shape law."""
    rng = np.random.default_rng(seed)
    out = []
    for i, (size, depth) in enumerate(itertools.product((5e7, 2e8, 8e8, 2e9), (6, 10, 16, 24, 40, 64))):
        width = np.sqrt(size / (12 * depth))
        effect = run_noise * rng.standard_normal()
        first = 10 ** rng.uniform(9.5, 11)
        exact = size * rng.uniform(0.99, 1.01)
        out += [(f"r{i:02d}", exact, first * 2**k, depth, width, effect) for k in range(rows)]
    runs = pd.DataFrame(out, columns=["run_id", "params", "tokens", "depth", "width", "effect"])
    loss = LAWS["shape"].loss(TRUTH, runs)
    runs["loss"] = loss * np.exp(runs.pop("effect").to_numpy() + noise * rng.standard_normal(len(runs)))
    return runs


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return made_runs()


@pytest.fixture(scope="module")
def fits(runs):
    return {"plain": fit("chinchilla", runs), "shape": fit("shape", runs)}


# ---- compare -------------------------------------------------------------------------------------------------------------
def test_the_true_law_wins_and_says_how_surely(fits):
    made = compare(fits)
    assert made.best == "shape"
    line = made.table.loc["plain"]
    assert line["run_rmse"] > 2 * made.table.loc["shape", "run_rmse"]
    assert line["p"] < 0.001
    assert line["difference"] == pytest.approx(line["run_rmse"] - made.table.loc["shape", "run_rmse"])
    assert made.table.loc["shape", "elpd"] > line["elpd"]
    assert made.table.loc["shape", "aicc"] < line["aicc"]
    text = made.summary()
    assert "best of 2 laws" in text
    assert "largest size tier" in text
    assert made.to_frame().equals(made.table)
    assert set(made.pointwise.columns) == {"mse", "bias", "log_score"}
    assert len(made.pointwise) == 48


def test_left_out_errors_are_those_of_separate_fits(runs, fits):
    made = compare(fits, folds=("run", "largest"))
    for name in ("r03", "r17"):
        alone = fit("shape", runs[runs["run_id"] != name])
        own = runs[runs["run_id"] == name]
        error = np.log(own["loss"].to_numpy()) - np.log(alone.predict(own))
        assert made.pointwise.loc[("shape", name), "mse"] == pytest.approx(float(error[0]) ** 2, rel=1e-5)
    held = runs["params"] > 1.9e9
    alone = fit("shape", runs[~held])
    error = np.log(runs.loc[held, "loss"].to_numpy()) - np.log(alone.predict(runs[held]))
    assert made.table.loc["shape", "largest_rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert made.table.loc["shape", "largest_bias"] == pytest.approx(error.mean(), rel=1e-4)


def test_copied_checkpoints_change_nothing_but_the_density(recwarn):
    once = made_runs(rows=2, run_noise=0.004, seed=3)
    thrice = pd.concat([once] * 3, ignore_index=True)
    laws = ("chinchilla", "shape")
    a = compare({law: fit(law, once) for law in laws}, folds=("run", "deepest"))
    b = compare({law: fit(law, thrice) for law in laws}, folds=("run", "deepest"))
    columns = ["rmse", "run_rmse", "deepest_rmse", "difference", "difference_se", "better_runs", "p"]
    pd.testing.assert_frame_equal(a.table[columns], b.table[columns], rtol=1e-5)
    assert b.table["aicc"].isna().all()
    assert b.table["ic_reason"].str.startswith("ROWS_NOT_INDEPENDENT").all()


def test_information_criteria_need_one_likelihood(runs, fits):
    huber = compare({"plain": fits["plain"], "huber": fit("shape", runs, objective=Huber(1e-3))}, folds=("run",))
    assert huber.table["ic_reason"].str.len().min() > 0
    assert huber.table.loc["huber", "ic_reason"].startswith("NO_LIKELIHOOD")
    assert huber.table[["aicc", "bic"]].isna().all(axis=None)
    assert np.isnan(huber.table.loc["huber", "elpd"])
    mixed = compare({"plain": fits["plain"], "t": fit("shape", runs, objective=StudentT())}, folds=("run",))
    assert mixed.table["ic_reason"].str.startswith("DIFFERENT_LIKELIHOODS").all()
    assert np.isfinite(mixed.table["elpd"]).all()


def test_crossed_laws_cannot_predict_an_architecture_they_have_not_seen(runs):
    both = pd.concat([runs.assign(architecture=a, run_id=runs["run_id"] + a) for a in ("a", "b")], ignore_index=True)
    both["loss"] *= np.exp(0.002 * np.random.default_rng(5).standard_normal(len(both)))
    made = compare(
        {"one": fit("shape", both), "each": fit("shape", both, by="architecture", share="H1")},
        folds=("run", "architecture"),
    )
    assert np.isfinite(made.table.loc["one", "architecture_rmse"])
    assert np.isnan(made.table.loc["each", "architecture_rmse"])
    assert any("each" in n and "leave a parameter open" in n for n in made.notes)


def test_folds_that_cannot_be_made_are_named(runs):
    flat = runs.assign(depth=12).drop(columns=["width"])
    made = compare({"n": fit("chinchilla", flat), "d": fit("kaplan_n", flat)}, folds=("run", "deepest", "architecture"))
    assert "deepest_rmse" not in made.table
    assert any("deepest" in n and "value 12" in n for n in made.notes)
    assert any("architecture" in n for n in made.notes)


def test_without_the_run_fold_the_first_one_decides(fits):
    made = compare(fits, folds=("tokens",))
    assert made.table["tokens_rmse"].is_monotonic_increasing
    assert "p" not in made.table


def test_compare_refuses_what_is_not_comparable(runs, fits):
    with pytest.raises(ConfigError, match="at least two"):
        compare({"one": fits["plain"]})
    with pytest.raises(ConfigError, match="choose from"):
        compare(fits, folds=("biggest",))
    with pytest.raises(ConfigError, match=r"24 and 23 rows; runs in one only: r00"):
        compare({"a": fits["plain"], "b": fit("shape", runs.iloc[1:])})
    other = runs.copy()
    other.loc[4, "loss"] *= 1.01
    with pytest.raises(ConfigError, match="the loss of run 'r04'"):
        compare({"a": fits["plain"], "b": fit("shape", other)})
    with pytest.raises(ConfigError, match="row 1 is run"):
        compare({"a": fits["plain"], "b": fit("shape", runs.iloc[::-1])})


def test_log_score_of_correlated_rows_is_the_joint_density():
    from scipy.stats import multivariate_normal

    rng = np.random.default_rng(0)
    e, v = rng.standard_normal(6), rng.uniform(0.5, 2, 6)
    joint = multivariate_normal(cov=np.diag(v) + 0.7).logpdf(e)
    assert holdout._equicorrelated(e, v, 0.7) == pytest.approx(joint)


# ---- sign flips ------------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_sign_flip_is_the_share_of_patterns_as_extreme(values):
    d = np.array(values)
    totals = [
        abs(sum(s * x for s, x in zip(p, values, strict=True))) for p in itertools.product((1, -1), repeat=len(d))
    ]
    tolerance = 1e-12 * np.abs(d).sum()
    expected = np.mean([t >= abs(d.sum()) - tolerance for t in totals])
    p, smallest = sign_flip_p(d)
    assert p == pytest.approx(expected)
    assert smallest == 2 / 2 ** len(d)
    assert p >= min(smallest, 1.0)


def test_random_flips_agree_with_exact_ones():
    d = np.random.default_rng(1).standard_normal(14) + 0.4
    exact, _ = sign_flip_p(d)
    # two more pairs that are zero leave the distribution as it is, but are drawn at random
    drawn, smallest = sign_flip_p(np.concatenate([d, [0.0, 0.0]]), rng=3)
    assert drawn == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 9999) + 1e-4)
    assert smallest == pytest.approx(1e-4)


def test_sign_flip_refuses_gaps():
    with pytest.raises(ConfigError, match="finite"):
        sign_flip_p(np.array([0.1, np.nan]))


# ---- likelihoods and nested laws -------------------------------------------------------------------------------------------
def _linear(runs: pd.DataFrame):
    import statsmodels.api as sm

    y = np.log(runs["loss"])
    small = sm.OLS(y, sm.add_constant(np.log(runs[["params"]]))).fit()
    large = sm.OLS(y, sm.add_constant(np.log(runs[["params", "tokens", "depth"]]))).fit()
    return small, large


def test_nested_f_is_the_anova_of_a_linear_law(runs):
    from statsmodels.stats.anova import anova_lm

    small, large = fit("kaplan_n", runs), fit("A*params**-alpha*tokens**-beta*depth**delta", runs)
    test = nested_f(small, large)
    table = anova_lm(*_linear(runs))
    assert test.statistic == pytest.approx(table["F"].iloc[1], rel=1e-7)
    assert test.p == pytest.approx(table["Pr(>F)"].iloc[1], rel=1e-6)
    assert (test.df1, test.df2) == (2, 20)


def test_likelihood_and_bic_are_those_of_ols(runs):
    ours = fit("kaplan_n", runs)
    theirs, _ = _linear(runs)
    assert log_likelihood(ours) == pytest.approx(theirs.llf)
    made = compare({"n": ours, "d": fit("kaplan_d", runs)}, folds=("run",))
    k = 3  # two coefficients and the variance
    assert made.table.loc["n", "bic"] == pytest.approx(-2 * theirs.llf + k * np.log(24))
    assert made.table.loc["n", "aicc"] == pytest.approx(-2 * theirs.llf + 2 * k + 2 * k * (k + 1) / (24 - k - 1))


def test_student_and_raw_loss_likelihoods(runs):
    from scipy.stats import norm, t

    heavy = fit("shape", runs, objective=StudentT(5))
    assert log_likelihood(heavy) == pytest.approx(t(5, scale=heavy.scale).logpdf(heavy.residuals).sum())
    raw = fit("shape", runs, objective=Gaussian(on="loss"))
    e = np.exp(raw.log_loss) - raw.predict(raw.runs)
    density = norm(scale=np.sqrt((e**2).mean())).logpdf(e).sum() + raw.log_loss.sum()
    assert log_likelihood(raw) == pytest.approx(density)
    with pytest.raises(ConfigError, match="no likelihood"):
        log_likelihood(fit("shape", runs, objective=Huber()))


def test_nested_f_accepts_shape_and_has_uniform_p_under_the_null():
    """Fifty data sets without a shape effect: p must not crowd near 0."""
    base = made_runs(seed=9)
    truth = {**TRUTH, "gamma1": 0.0, "gamma2": 0.0}
    clean = np.log(LAWS["shape"].loss(truth, base))
    rng = np.random.default_rng(2)
    draws = clean + 0.003 * rng.standard_normal((200, len(base)))
    small, large = (
        fit("chinchilla", base.assign(loss=np.exp(draws[0]))),
        fit("shape", base.assign(loss=np.exp(draws[0]))),
    )
    test = nested_f(small, large)
    assert (test.df1, test.df2) == (2, 17)
    rss0, rss1 = 2 * small.refit(log_loss=draws).objective, 2 * large.refit(log_loss=draws).objective
    from scipy.stats import f

    p = f(2, 17).sf(((rss0 - rss1) / 2) / (rss1 / 17))
    assert test.p == pytest.approx(p[0], rel=1e-4)
    assert 0.01 <= (p < 0.05).mean() <= 0.10  # binomial(200, .05): 2 to 20


def test_nested_f_refuses(runs, fits):
    several = made_runs(rows=3, run_noise=0.003)
    with pytest.raises(ConfigError, match="rows of a run are not independent"):
        nested_f(fit("chinchilla", several), fit("shape", several))
    with pytest.raises(ConfigError, match="Gaussian"):
        nested_f(fits["plain"], fit("shape", runs, objective=Huber()))
    with pytest.raises(ConfigError, match="more of them"):
        nested_f(fits["shape"], fits["plain"])
    with pytest.raises(ConfigError, match="not nested"):
        nested_f(fits["plain"], fit("width_depth", runs))
    with pytest.raises(ConfigError, match="vanishes"):
        nested_f(fit("ray", runs), fits["plain"])


@settings(max_examples=5, deadline=None)
@given(st.floats(0.5, 2.0))
def test_errors_do_not_depend_on_the_unit_of_loss(factor):
    """Log-loss errors are ratios: a constant factor on all losses (bits for nats) leaves them alone."""
    runs = made_runs(seed=4)
    scaled = runs.assign(loss=runs["loss"] * factor)
    laws = ("kaplan_n", "kaplan_d")
    a = compare({law: fit(law, runs) for law in laws}, folds=("run",)).table
    b = compare({law: fit(law, scaled) for law in laws}, folds=("run",)).table
    np.testing.assert_allclose(a["run_rmse"], b["run_rmse"], rtol=1e-6)


# ---- public data -----------------------------------------------------------------------------------------------------------
@pytest.mark.shared
@pytest.mark.skipif(not GEMSTONES.is_file(), reason="the public run logs (../shared/data) are not here")
def test_gemstones_table(recwarn):
    """Gemstones (McLeish et al. 2025), every 40 B tokens: 176 rows of 22 runs, errors of log loss.

    Values computed independently of this package. N is params less ONE vocabulary matrix ("no_embeds" of that paper) in
    C1(N) and S2(N), and total params in WDN. The held-out values of width_depth differ from that table (.00746, .0082):
    its floor collapses, and searches from many starts put the optima without each run at .00788 and .0133.
    """
    d = pd.read_csv(GEMSTONES)
    d = d[(d["phase"] == "hot") & (d["fit_hot_100b"] == 1)]
    budget = (d["tokens"] / 1e10).round()
    d = d[budget % 4 == 0].rename(columns={"n_layers": "depth", "d_model": "width"})
    assert (len(d), d["run_id"].nunique()) == (176, 22)
    one = d.assign(params=d["params"] - d["vocab_size"] * d["width"])
    made = compare(
        {
            "C1(total)": fit("chinchilla", d),
            "C1(N)": fit("chinchilla", one),
            "S2(N)": fit("shape", one),
            "S2(total)": fit("shape", d),
            "WD": fit("width_depth", one),
            "WDN": fit("width_depth_params", d),
        },
        folds=("run", "largest", "deepest"),
    )
    published = {
        "C1(total)": (0.01413, 0.01553, 0.0106, 0.0041, 0.0108),
        "C1(N)": (0.01051, 0.01156, 0.0095, 0.0020, 0.0073),
        "S2(N)": (0.00524, 0.00640, 0.0091, 0.0014, 0.0063),
        "S2(total)": (0.00587, 0.00804, 0.0098, 0.0009, 0.0095),
        "WD": (0.00655, 0.00788, 0.0155, 0.0118, 0.0133),  # held-out values: this package's, see the docstring
        "WDN": (0.00482, 0.00520, 0.0095, 0.0044, 0.0070),
    }
    for name, (rmse, run, largest, bias, deepest) in published.items():
        line = made.table.loc[name]
        assert line["rmse"] == pytest.approx(rmse, rel=0.03), name
        assert line["run_rmse"] == pytest.approx(run, rel=0.03), name
        assert line["largest_rmse"] == pytest.approx(largest, rel=0.03), name
        assert line["largest_bias"] == pytest.approx(bias, abs=0.0001), name
        assert line["deepest_rmse"] == pytest.approx(deepest, rel=0.03), name
    mse = {law: made.pointwise["mse"].loc[law] for law in made.table.index}
    assert (mse["S2(N)"] < mse["C1(N)"]).sum() == 21
    assert sign_flip_p((mse["C1(N)"] - mse["S2(N)"]).to_numpy())[0] < 0.001
    assert (mse["WDN"] < mse["S2(N)"]).sum() == 14
    assert made.table.loc["S2(N)", "p"] == pytest.approx(0.05, abs=0.01)
    assert "E_COLLAPSE" in made.table.loc["WD", "codes"]

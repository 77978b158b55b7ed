"""Tests between fitted laws: nested by bootstrap, Cox, J, Vuong."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scalinglab.errors import ConfigError
from scalinglab.fitting import fit
from scalinglab.hypotheses import cox, j_test, nested_bootstrap, vuong
from scalinglab.hypotheses.law_tests import _distinguishable_p, _encompassing, _scores
from scalinglab.nested import log_likelihood, nested_f
from scalinglab.objectives import Gaussian, Huber
from scalinglab.simulation import gemstones_design, simulate

PLAIN = Gaussian(variance="constant")
C1 = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
S2 = {**C1, "gamma1": 0.02, "gamma2": 0.016}
WD = {"E": 1.7, "A": 30.0, "a": 0.6, "B": 2.0, "b": 0.7, "C": 400.0, "c": 0.28}


def design(budgets=3):
    """One run per shape and budget."""
    d = gemstones_design(checkpoints=budgets, tokens=(2e10, 1e11))
    d["run_id"] += d["tokens"].map("/{:.3g}".format)
    return d


def few():
    """22 runs, one per shape, budgets in turn."""
    return design().iloc[[3 * i + i % 3 for i in range(22)]].reset_index(drop=True)


def fits(truth, params, *laws, sigma=0.003, rng=1, **noise):
    runs = simulate(truth, params, design(), sigma=sigma, rng=rng, **noise)
    return [fit(law, runs, objective=PLAIN) for law in laws]


@pytest.fixture(scope="module")
def shape_truth():
    return fits("shape", S2, "chinchilla", "shape", "width_depth", sigma=0.002)


# ---- nested --------------------------------------------------------------------------------------------------------------
def test_the_bootstrap_agrees_with_f_where_f_holds():
    small, large = fits("chinchilla", C1, "chinchilla", "shape", rng=2)
    table, made = nested_f(small, large), nested_bootstrap(small, large, draws=499, rng=1)
    assert made.statistic == pytest.approx(table.statistic, rel=1e-4)
    assert made.df == (table.df1, table.df2)
    assert made.p_value == pytest.approx(table.p, abs=0.06)
    assert made.diagnostics["95 % quantile of F under the null"] == pytest.approx(stats.f.ppf(0.95, 2, 59), rel=0.2)


def test_shape_is_found(shape_truth):
    small, large, _ = shape_truth
    made = nested_bootstrap(small, large, draws=99)
    assert made.p_value == made.p_min == 0.01
    assert "'chinchilla' is rejected in favour of 'shape'" in made.decision
    assert not made.codes


def test_a_parameter_that_vanishes_under_the_null_needs_the_bootstrap():
    """A penalty G (u - c)^2 whose centre c vanishes at G = 0: nested_f refuses, and its table would reject too often."""
    small = fit(
        "E + A*params**-alpha + B*tokens**-beta",
        simulate("chinchilla", C1, few(), sigma=0.003, rng=3),
        objective=PLAIN,
    )
    large = fit("E + A*params**-alpha + B*tokens**-beta + P*depth**-p", small.runs, objective=PLAIN)
    with pytest.raises(ConfigError, match="use a parametric bootstrap"):
        nested_f(small, large)
    made = nested_bootstrap(small, large, draws=199, rng=1)
    assert 0 < made.p_value <= 1


def test_checkpoints_of_a_run_are_not_taken_for_runs():
    """Under the null, with run effects, F by table on rows rejects; the bootstrap does not (p over 5 draws of data)."""
    by_table, by_bootstrap = [], []
    for seed in range(5):
        d = gemstones_design(checkpoints=4, tokens=(2e10, 1e11))
        runs = simulate("chinchilla", C1, d, sigma=0.001, tau=0.005, rng=seed)
        small, large = (fit(law, runs, objective=PLAIN) for law in ("chinchilla", "shape"))
        F = (small.objective - large.objective) / 2 / (large.objective / (88 - 7))
        by_table.append(stats.f.sf(F, 2, 81))
        by_bootstrap.append(nested_bootstrap(small, large, draws=99, rng=seed).p_value)
    assert np.mean(np.array(by_table) < 0.05) >= 0.4
    assert np.mean(np.array(by_bootstrap) < 0.05) <= 0.2


def test_what_is_not_nested_is_refused(shape_truth):
    small, large, other = shape_truth
    with pytest.raises(ConfigError, match="needs more of them"):
        nested_bootstrap(large, small)
    with pytest.raises(ConfigError, match=r"not nested in 'width_depth'.*use cox\(\)"):
        nested_bootstrap(small, other)
    robust = fit("shape", small.runs, objective=Huber(1e-3))
    with pytest.raises(ConfigError, match="need Gaussian fits of log loss"):
        nested_bootstrap(small, robust)
    with pytest.raises(ConfigError, match="at least 19"):
        nested_bootstrap(small, large, draws=5)


# ---- Cox and J -----------------------------------------------------------------------------------------------------------
def test_cox_rejects_the_wrong_law_only(shape_truth):
    _, shape, wide = shape_truth
    made = cox(shape, wide, draws=99, rng=1)
    assert not made.first.rejected
    assert made.second.rejected
    assert made.outcome == "'width_depth' is rejected, 'shape' is not"
    turned = cox(wide, shape, draws=99, rng=2)
    assert turned.outcome == made.outcome
    assert made.first.statistic == pytest.approx(log_likelihood(shape) - log_likelihood(wide), rel=1e-9)


def test_both_laws_can_be_rejected():
    """Loss with a kink at one shape ratio: neither the quadratic in ln(width / depth) nor width and depth describe it."""
    d = design()
    runs = simulate("shape", {**S2, "gamma1": 0.0, "gamma2": 0.0}, d, sigma=0.001, rng=4)
    u = np.log(runs["width"] / runs["depth"] / 40)
    runs["loss"] = runs["loss"] * (1 + 0.03 * np.sin(4 * u))
    a, b = (
        fit(law, runs, objective=PLAIN) for law in ("E + A*params**-alpha*exp(g*u) + B*tokens**-beta", "width_depth")
    )
    made = j_test(a, b, draws=99, rng=1)
    assert made.outcome.split(":")[0] in ("both laws are rejected", "unresolved") or "is rejected" in made.outcome
    assert made.summary().count("null: the law") == 2


def test_few_noisy_runs_tell_nothing_apart():
    a, b = fits("chinchilla", C1, "E + A*params**-alpha*exp(g*u) + B*tokens**-beta", "E + A*params**-alpha + B*tokens**-beta*exp(g*u)", sigma=0.02, rng=5)  # fmt: skip
    made = cox(a, b, draws=99, rng=1)
    assert made.outcome.startswith("unresolved: neither law is rejected")


def test_j_agrees_with_cox_and_with_its_linear_form(shape_truth):
    _, shape, wide = shape_truth
    made = j_test(shape, wide, draws=99, rng=1)
    assert made.outcome == "'width_depth' is rejected, 'shape' is not"
    # the statistic is the t of an ordinary regression
    import statsmodels.api as sm

    J = shape.encoding.problem.jacobian(shape.theta)
    z = np.log(wide.predict(wide.runs)) - np.log(shape.predict(shape.runs))
    want = sm.OLS(shape.residuals, np.column_stack([J, z])).fit().tvalues[-1]
    own = _encompassing(shape, shape.log_loss, dict(shape.params), dict(wide.params), wide)
    assert own == pytest.approx(want, rel=1e-4)


def test_nested_laws_belong_elsewhere(shape_truth):
    small, large, _ = shape_truth
    for test in (cox, j_test, vuong):
        with pytest.raises(ConfigError, match="'chinchilla' lies within 'shape' on these runs: use nested_bootstrap"):
            test(small, large)


# ---- Vuong ---------------------------------------------------------------------------------------------------------------
def test_vuong_is_the_z_of_log_likelihoods_by_run(shape_truth):
    _, shape, wide = shape_truth
    made = vuong(shape, wide)
    a, b = _scores(shape), _scores(wide)
    d = a.likelihood - b.likelihood
    assert a.likelihood.sum() == pytest.approx(log_likelihood(shape), rel=1e-9)
    assert made.statistic == pytest.approx(np.sqrt(len(d)) * d.mean() / d.std(), rel=1e-9)
    assert made.p_value == pytest.approx(2 * stats.norm.sf(abs(made.statistic)), rel=1e-9)
    assert "'shape' is closer to the truth" in made.decision
    assert np.abs(a.score.sum(0) / np.sqrt((a.score**2).sum(0))).max() < 1e-3  # scores sum to 0 at the maximum


def test_vuong_is_refused_where_it_is_not_legal():
    runs = simulate("shape", S2, few(), sigma=0.002, rng=1)
    a, b = (fit(law, runs, objective=PLAIN) for law in ("shape", "width_depth"))
    with pytest.raises(ConfigError, match=r"needs 40 runs, these fits have 22; use cox\(\)"):
        vuong(a, b)


def test_laws_that_agree_have_no_p():
    """Both laws hold the truth as a special case: their log-likelihood ratio has no normal limit."""
    a, b = fits("chinchilla", C1, "E + A*params**-alpha*exp(g*u) + B*tokens**-beta", "E + A*params**-alpha*exp(g*u**2) + B*tokens**-beta", rng=6)  # fmt: skip
    made = vuong(a, b)
    assert made.codes == ("INDISTINGUISHABLE",)
    assert np.isnan(made.p_value)
    assert made.rejected is None
    assert "no p-value" in made.decision


def test_the_pre_test_has_the_null_distribution_of_linear_models():
    """Two regressions, each with a column that does not matter, correlated by r beyond the other parameters.

    With normal errors the weights are +-sqrt(1 - r^2), so G times the variance of the ratio is (1 - r^2) chi-square(2) in the
    limit; 1,056 runs here. With few runs the pre-test is conservative: it errs towards giving no p-value.
    """
    laws = "E + A*params**-alpha*exp(g*u) + B*tokens**-beta", "E + A*params**-alpha*exp(g*u**2) + B*tokens**-beta"
    a, b = fits("chinchilla", C1, *laws, rng=7, seeds=16)
    extra = []
    for one in (a, b):
        J = one.encoding.problem.jacobian(one.theta)
        k = one.encoding.slots["g"].position
        rest = np.delete(J, k, 1)
        extra.append(J[:, k] - rest @ np.linalg.lstsq(rest, J[:, k], rcond=None)[0])
    r = np.corrcoef(extra)[0, 1]
    for seen in (1.0, 3.0, 6.0):
        p = _distinguishable_p(_scores(a), _scores(b), a.n_runs, seen, np.random.default_rng(0))
        assert p == pytest.approx(stats.chi2.sf(seen / (1 - r * r), 2), abs=0.05)


def test_other_rows_are_refused(shape_truth):
    small, large, _ = shape_truth
    other = fit("chinchilla", pd.DataFrame(small.runs).iloc[:-1], objective=PLAIN)
    with pytest.raises(ConfigError, match="not on the same rows"):
        nested_bootstrap(other, large)

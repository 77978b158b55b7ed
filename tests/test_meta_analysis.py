"""Random-effects pooling against closed forms, statsmodels and simulations with known truth."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects

from scalinglab.errors import ConfigError
from scalinglab.meta_analysis import between, leave_one_out, pool, tau_interval, widened

Y = np.array([0.61, 0.35, 1.10, 0.05, 0.42, 0.95])
S = np.array([0.12, 0.20, 0.35, 0.15, 0.08, 0.30])


def test_equal_precision_has_a_closed_form():
    """With one se all estimators give tau^2 = max(0, s^2 - se^2), and Hartung-Knapp is the t interval of a mean."""
    y = np.array([1.0, 2.0, 4.0, 7.0])
    for how in ("reml", "paule-mandel", "dersimonian-laird"):
        made = pool(y, np.full(4, 0.5), heterogeneity=how, width="hartung-knapp, untruncated")
        assert made.tau == pytest.approx(math.sqrt(y.var(ddof=1) - 0.25), rel=1e-7)
        assert made.estimate == pytest.approx(y.mean(), rel=1e-12)
        assert made.se == pytest.approx(stats.sem(y), rel=1e-9)
        assert (made.low, made.high) == pytest.approx(stats.t.interval(0.95, 3, y.mean(), stats.sem(y)), rel=1e-9)


@pytest.mark.parametrize(("ours", "theirs"), [("paule-mandel", "iterated"), ("dersimonian-laird", "chi2")])
def test_statsmodels_agrees(ours, theirs):
    made = pool(Y, S, heterogeneity=ours, width="hartung-knapp, untruncated")
    # its iteration stops at 1e-5 of the estimating equation; asked for more, it overshoots and returns 0
    got = combine_effects(Y, S**2, method_re=theirs)
    assert made.tau**2 == pytest.approx(got.tau2, rel=1e-5)
    assert made.estimate == pytest.approx(got.mean_effect_re, rel=1e-6)
    assert made.se == pytest.approx(got.sd_eff_w_re_hksj, rel=1e-5)
    assert pool(Y, S, heterogeneity=ours, width="normal").se == pytest.approx(got.sd_eff_w_re, rel=1e-5)
    assert pytest.approx(got.q) == made.Q
    common = pool(Y, S, heterogeneity="common", width="normal")
    assert math.isnan(common.prediction[0])  # without heterogeneity there is no population of studies
    assert (common.estimate, common.se) == pytest.approx((got.mean_effect_fe, got.sd_eff_w_fe), rel=1e-9)


def test_reml_solves_its_score_equation():
    """tau^2 = [sum w^2 ((y - mu)^2 - v) + 1 / sum w * sum w^2] / sum w^2 at the restricted maximum (Viechtbauer 2005, eq. 7)."""
    v, tau2 = S**2, between(Y, S**2)
    w = 1 / (v + tau2)
    mu = w @ Y / w.sum()
    assert tau2 > 0
    assert tau2 == pytest.approx((w**2 @ ((Y - mu) ** 2 - v) + (w @ w) / w.sum()) / (w @ w), rel=1e-5)


def test_reml_is_the_likelihood_of_a_mixed_model():
    """The restricted likelihood from the normal density of the contrasts K y, K any basis orthogonal to the constant."""
    from scipy.linalg import null_space
    from scipy.optimize import minimize_scalar

    K = null_space(np.ones((1, len(Y)))).T

    def cost(tau2):
        return -stats.multivariate_normal(np.zeros(len(Y) - 1), K @ np.diag(S**2 + tau2) @ K.T).logpdf(K @ Y)

    best = minimize_scalar(cost, bounds=(0, 2), method="bounded", options={"xatol": 1e-10}).x
    assert between(Y, S**2) == pytest.approx(best, rel=1e-5)


def test_the_prediction_tends_to_the_normal_one_with_many_studies():
    """With 400 studies tau and mu are known: 1.96 times tau about mu, to 5 % (chance in tau and 8,000 quadrature points)."""
    rng = np.random.default_rng(0)
    s = rng.uniform(0.1, 0.3, 400)
    made = pool(2 + rng.normal(0, 1.0, 400) + rng.normal(0, s), s)
    low, high = made.prediction
    assert (high - low) / 2 == pytest.approx(1.96 * made.tau, rel=0.05)
    assert (high + low) / 2 == pytest.approx(made.estimate, abs=0.05)
    assert pool(Y[:2], S[:2]).prediction == pytest.approx((math.nan, math.nan), nan_ok=True)


def test_the_q_profile_ends_where_q_is_the_quantile():
    low, high = tau_interval(Y, S**2)
    for tau, q in ((low, 0.975), (high, 0.025)):
        w = 1 / (S**2 + tau**2)
        assert (w * (Y - w @ Y / w.sum()) ** 2).sum() == pytest.approx(stats.chi2.ppf(q, len(Y) - 1), rel=1e-6)


def test_without_heterogeneity_all_is_the_common_mean():
    made = pool([1.0, 1.01, 0.99], [0.5, 0.3, 0.4])
    assert made.tau == 0
    assert made.I2 == 0
    assert made.se == pytest.approx(math.sqrt(1 / (4 + 1 / 0.09 + 1 / 0.16)))  # truncated: not narrower than this
    narrow = pool([1.0, 1.01, 0.99], [0.5, 0.3, 0.4], width="hartung-knapp, untruncated")
    assert narrow.se < 0.1 * made.se
    assert made.shrunken == pytest.approx(np.full(3, made.estimate))


def test_shrinkage_follows_precision():
    made = pool(Y, S)
    pulled = (made.shrunken - Y) / (made.estimate - Y)
    assert pulled == pytest.approx(S**2 / (S**2 + made.tau**2))
    assert made.weights.sum() == pytest.approx(1)
    assert (np.argsort(made.weights) == np.argsort(-S)).all()
    assert (made.shrunken_se < np.hypot(S, 1e-9)).all()


@given(st.floats(-5, 5), st.floats(0.1, 10), st.permutations(range(6)))
@settings(max_examples=25, deadline=None)
def test_shift_scale_and_order_do_what_they_should(shift, scale, order):
    made, moved = pool(Y, S), pool(shift + scale * Y[list(order)], scale * S[list(order)])
    assert moved.estimate == pytest.approx(shift + scale * made.estimate, rel=1e-6, abs=1e-6)
    assert moved.tau == pytest.approx(scale * made.tau, rel=1e-4)
    assert pytest.approx(made.I2, rel=1e-3) == moved.I2


def test_rows_of_one_study_count_as_one():
    """Ten copies of a study do not make it more certain when studies are left out; they do when rows are taken for studies."""
    y, s = np.concatenate([Y, np.full(9, Y[0])]), np.concatenate([S, np.full(9, S[0])])
    names = [*range(6), *[0] * 9]
    made = pool(y, s, studies=names, width="studies left out")
    assert (made.k, made.studies, made.df) == (15, 6, 5)
    assert made.se > 1.5 * pool(y, s).se
    assert made.weights[[0, *range(6, 15)]].sum() < 0.25
    one = pool(Y, S, width="studies left out")
    kept = [pool(np.delete(Y, i), np.delete(S, i)).estimate for i in range(6)]
    assert one.se == pytest.approx(math.sqrt(5 / 6 * sum((m - one.estimate) ** 2 for m in kept)))


def test_widened_gives_the_t_interval_back():
    assert widened(0.3, 4) * stats.norm.ppf(0.975) == pytest.approx(0.3 * stats.t.ppf(0.975, 4))
    assert widened(0.3, math.inf) == pytest.approx(0.3)


def test_leaving_one_out_is_pooling_the_others():
    effects, ses = pd.Series(Y, list("abcdef")), pd.Series(S, list("abcdef"))
    made = leave_one_out(effects, ses)
    assert made.loc["c", "estimate"] == pytest.approx(pool(np.delete(Y, 2), np.delete(S, 2)).estimate)
    assert list(made.index) == list("abcdef")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pool([1.0], [1.0]), "at least two"),
        (lambda: pool([1.0, 2.0], [1.0, 0.0]), "row 1 has estimate 2 and se 0"),
        (lambda: pool([1.0, np.inf], [1.0, 1.0]), "leave out what a study does not identify"),
        (lambda: pool([1.0, 2.0], [1.0]), "of one length"),
        (lambda: pool(Y, S, heterogeneity="bayes"), "'bayes' is not known: use reml"),
        (lambda: pool(Y, S, width="wald"), "'wald' is not known"),
        (lambda: pool(Y, S, level=95), "between 0 and 1"),
        (lambda: pool(Y, S, studies=[1]), "1 study names for 6"),
        (lambda: pool(Y, S, studies=[1, 1, 2, 3, 4, 5]), "several rows"),
        (lambda: pool([1.0, 2.0], [1.0, 1.0], width="studies left out"), "needs at least three"),
        (lambda: widened(-1.0, 3), "makes no interval"),
        (lambda: leave_one_out(pd.Series([1.0, 2.0]), pd.Series([1.0, 1.0])), "at least three"),
    ],
)
def test_what_can_not_be_pooled_is_refused(call, match):
    with pytest.raises(ConfigError, match=match):
        call()


def coverage(k, tau, draws, rng, *, width="hartung-knapp"):
    """Shares of intervals that hold mu, and of prediction intervals that hold a new study's effect."""
    mean = new = 0
    for _ in range(draws):
        s = rng.uniform(0.3, 1.5, k)
        made = pool(rng.normal(0, tau, k) + rng.normal(0, s), s, width=width)
        mean += made.low <= 0 <= made.high
        new += made.prediction[0] <= rng.normal(0, tau) <= made.prediction[1]
    return mean / draws, new / draws


def test_coverage_of_a_small_simulation():
    """200 draws with four studies: at least the nominal .95 less three binomial standard errors; Wald's interval fails there."""
    least = 0.95 - 3 * math.sqrt(0.05 * 0.95 / 200)
    mean, new = coverage(4, 1.5, 200, np.random.default_rng(1))
    assert mean >= least
    assert new >= least
    assert coverage(4, 1.5, 200, np.random.default_rng(1), width="normal")[0] < mean - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 5, 10])
@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0])
def test_coverage(k, tau):
    """600 draws: means and predictions at .95 less three binomial standard errors (.923); conservative where k is 3."""
    mean, new = coverage(k, tau, 600, np.random.default_rng(k))
    assert mean >= 0.923
    assert new >= 0.923

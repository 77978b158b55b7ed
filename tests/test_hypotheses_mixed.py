"""The mixed model: our profile likelihood against closed forms and statsmodels, its bootstrap, its estimates."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.hypotheses import cell_means, depth_slopes, interaction_f, mixed_estimates, mixed_interaction
from scalinglab.hypotheses.mixed import _profiled

DEPTHS = (16, 24, 32, 42, 70)


def study(rng, *, seeds=3, sigma=0.003, tau=0.003, slopes=(0.0, 0.0, 0.0)):
    rows = []
    for name, slope in zip("abc", slopes, strict=True):
        for depth in DEPTHS:
            shape = tau * rng.normal()
            count = seeds if isinstance(seeds, int) else int(rng.choice(seeds))
            rows += [(name, depth, 2.7 + slope * np.log(depth) + shape + sigma * rng.normal()) for _ in range(count)]
    table = pd.DataFrame(rows, columns=["architecture", "depth", "loss"])
    return table.assign(run_id=[f"r{i}" for i in range(len(table))])


@pytest.mark.parametrize("tau", [0.003, 0.0])
def test_balanced_designs_have_the_closed_form(tau):
    """sigma^2 = SSW / (n - m), sigma^2 + s tau^2 = s RSS / m, or one variance where that makes tau^2 negative."""
    rng = np.random.default_rng(0)
    m, s = 15, 3
    X = np.column_stack([np.ones(m), np.linspace(-1, 1, m)])
    mean = tau * rng.normal(size=(40, m)) + 0.003 / np.sqrt(s) * rng.normal(size=(40, m))
    within = 0.003**2 * rng.chisquare(m * (s - 1), 40)
    value, ratio, sigma2 = _profiled(X, np.full(m, float(s)), mean, within, m * s)
    e = mean - mean @ X @ np.linalg.inv(X.T @ X) @ X.T
    rss = s * (e * e).sum(1)
    n = m * s
    inside = rss / m > within / (n - m)
    free = (n - m) * np.log(within / (n - m)) + m * np.log(rss / m)
    bound = n * np.log((within + rss) / n)
    assert value == pytest.approx(np.where(inside, free, bound), abs=1e-7)
    assert (ratio[~inside] == 0).all()
    assert sigma2[inside] == pytest.approx((within / (n - m))[inside], rel=1e-4)
    assert inside.any()
    assert tau > 0 or (~inside).any()


def test_unequal_seeds_agree_with_statsmodels():
    runs = study(np.random.default_rng(1), seeds=(1, 2, 3, 5), slopes=(0.0, 0.004, -0.002))
    made = mixed_interaction(runs, degree=1, draws=19)
    y = (runs["loss"] - 2.7) * 1000
    x = np.log(runs["depth"]) - np.log(runs["depth"]).mean()
    own = pd.get_dummies(runs["architecture"]).astype(float)
    cell = runs.groupby(["architecture", "depth"]).ngroup()
    small, large = pd.concat([own, x.rename("x")], axis=1), pd.concat([own, own.mul(x, axis=0).add_suffix("x")], axis=1)
    fits = [MixedLM(y, X, groups=cell).fit(reml=False, method="powell") for X in (small, large)]
    assert made.statistic == pytest.approx(2 * (fits[1].llf - fits[0].llf), abs=1e-4)
    restricted = MixedLM(y, small, groups=cell).fit(reml=True, method="powell")  # what the bootstrap draws from
    assert made.diagnostics["cell sd"] == pytest.approx(np.sqrt(restricted.cov_re.iloc[0, 0]) / 1000, rel=2e-3)
    assert made.diagnostics["seed sd"] == pytest.approx(np.sqrt(restricted.scale) / 1000, rel=1e-3)


def test_the_bootstrap_agrees_with_the_cell_mean_f_where_both_hold():
    runs = study(np.random.default_rng(2), slopes=(0.0, 0.004, 0.008))
    mixed, f = mixed_interaction(runs, degree=1, draws=999, rng=3), interaction_f(cell_means(runs), degree=1)
    assert mixed.p_value == pytest.approx(f.p_value, abs=0.04)
    assert mixed.diagnostics["p by chi-square (too small)"] < mixed.p_value
    assert mixed.method.startswith("likelihood ratio, parametric bootstrap")


def test_reml_slopes_of_a_balanced_design_are_those_of_cell_means():
    runs = study(np.random.default_rng(4), slopes=(0.002, 0.006, -0.004))
    made = mixed_estimates(runs)
    slopes = depth_slopes(cell_means(runs))["slope"]
    assert made.loc["x^1", "estimate"] == pytest.approx(slopes["a"], rel=1e-5)
    assert made.loc["b:x^1", "estimate"] == pytest.approx(slopes["b"] - slopes["a"], rel=1e-5)
    cells = cell_means(runs)
    within = cells.pure_error[0]
    rss = interaction_f(cells, degree=1).diagnostics["residual sd"] ** 2
    assert made.attrs["seed_sd"] == pytest.approx(np.sqrt(within), rel=1e-3)
    assert made.attrs["cell_sd"] == pytest.approx(np.sqrt(rss - within / 3), rel=1e-3)
    turned = mixed_estimates(runs, reference="b")
    assert turned.loc["a:x^1", "estimate"] == pytest.approx(-made.loc["b:x^1", "estimate"], rel=1e-5)


def test_covariates_take_up_what_they_explain():
    rng = np.random.default_rng(5)
    runs = study(rng, tau=0.0)
    params = {(a, d): 3e8 * np.exp(0.2 * rng.normal()) for a in "abc" for d in DEPTHS}
    runs["params"] = [params[k] for k in zip(runs["architecture"], runs["depth"], strict=True)]
    runs["loss"] = runs["loss"] - 0.19 * np.log(runs["params"])
    made = mixed_interaction(runs, degree=1, covariates=["params"], draws=19)
    assert made.diagnostics["cell sd"] < 0.25 * mixed_interaction(runs, degree=1, draws=19).diagnostics["cell sd"]


def test_duplicated_checkpoints_and_bad_tables():
    runs = study(np.random.default_rng(6))
    many = pd.concat([runs] * 10)
    assert mixed_interaction(many, degree=1, draws=99).p_value == mixed_interaction(runs, degree=1, draws=99).p_value
    with pytest.raises(ConfigError, match="every cell has one run"):
        mixed_interaction(runs.drop_duplicates(["architecture", "depth"]))
    with pytest.raises(ConfigError, match="copies of one run"):
        mixed_interaction(runs.assign(loss=2.7))
    with pytest.raises(ConfigError, match="at least two groups"):
        mixed_interaction(runs[runs["architecture"] == "a"])
    with pytest.raises(SchemaError, match="needs the column 'params'"):
        mixed_interaction(runs, covariates=["params"])
    with pytest.raises(ConfigError, match="degree 4 in 3 groups"):
        mixed_interaction(runs, degree=4)


@pytest.mark.parametrize("tau", [0.0, 0.003])
def test_size_is_kept(tau):
    """Binomial band of 40 tests at .05 (p = 1e-3 in the upper tail); the long version is in test_gates."""
    rng = np.random.default_rng(7)
    rejected = sum(
        mixed_interaction(study(rng, tau=tau), degree=1, draws=99, rng=rng).p_value <= 0.05 for _ in range(40)
    )
    assert rejected <= stats.binom.ppf(0.999, 40, 0.05)

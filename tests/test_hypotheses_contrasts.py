"""Max-t contrasts against published tables and scipy; the gate of architecture x depth."""

import numpy as np
import pytest
from scipy import stats

from scalinglab.errors import ConfigError
from scalinglab.hypotheses import (
    adjust,
    architecture_by_depth,
    cell_means,
    dunnett,
    heteroscedastic_bootstrap,
    max_t_p,
    max_t_quantile,
)
from scalinglab.hypotheses.cells import Cells
from scalinglab.published import depthbench

X = np.log([16.0, 24, 32, 42, 70])


def random_cells(rng, *, tau=0.003, sd=0.0, slopes=(0.0,) * 6, x=X, groups=6):
    """Cell means of groups with SD tau per cell (sd: one per group or 0)."""
    group = np.repeat(np.arange(groups), len(x))
    xx = np.tile(x, groups)
    spread = np.hypot(tau, np.broadcast_to(sd, groups)[group])
    mean = 2.7 + np.asarray(slopes)[group] * (xx - x.mean()) + spread * rng.normal(size=len(group))
    return Cells(tuple("abcdefghij"[:groups]), group, xx, mean, np.ones(len(group), int), np.zeros(len(group)))


def equicorrelated(k, r=0.5):
    return np.full((k, k), r) + (1 - r) * np.eye(k)


# Dunnett 1964 (Biometrics 20), two-sided 5 %: comparisons with one control, equal group sizes (correlation 1/2).
DUNNETT = {
    5: {1: 2.57, 2: 3.03, 3: 3.29, 5: 3.62, 9: 3.97},
    10: {1: 2.23, 2: 2.57, 3: 2.76, 5: 2.99, 9: 3.24},
    20: {1: 2.09, 2: 2.38, 3: 2.54, 5: 2.73, 9: 2.95},
    np.inf: {1: 1.96, 2: 2.21, 3: 2.35, 5: 2.51, 9: 2.69},
}


@pytest.mark.parametrize("df", list(DUNNETT))
def test_critical_values_are_those_of_dunnetts_table(df):
    for k, want in DUNNETT[df].items():
        assert max_t_quantile(equicorrelated(k), df) == pytest.approx(want, abs=0.0051), k


def test_independent_normals_and_one_contrast_have_closed_forms():
    assert max_t_quantile(np.eye(4), np.inf) == pytest.approx(stats.norm.ppf((1 + 0.95**0.25) / 2), abs=1e-6)
    assert max_t_p(np.array([2.3]), np.eye(1), 7)[0] == pytest.approx(2 * stats.t.sf(2.3, 7), rel=1e-12)


def test_quadrature_agrees_with_scipys_multivariate_t():
    loading = np.array([0.9, 0.3, -0.5, 0.7])
    R = np.outer(loading, loading)
    np.fill_diagonal(R, 1)
    c = max_t_quantile(R, 6.0)
    box = stats.multivariate_t(shape=R, df=6, seed=1).cdf(np.full(4, c), lower_limit=np.full(4, -c))
    assert box == pytest.approx(0.95, abs=5e-4)  # scipy integrates by quasi-random points


def test_other_correlations_are_simulated():
    R = np.array(
        [[1, 0.5, -0.5], [0.5, 1, 0.5], [-0.5, 0.5, 1]]
    )  # all differences of three means: no product structure
    c = max_t_quantile(R, 12.0, rng=3)
    assert c == pytest.approx(stats.studentized_range.ppf(0.95, 3, 12) / np.sqrt(2), abs=0.015)  # Tukey
    assert max_t_p(np.array([c, c, c]), R, 12.0, rng=4) == pytest.approx(0.05, abs=0.003)


def test_dunnetts_test_is_that_of_scipy():
    rng = np.random.default_rng(0)
    samples = {k: rng.normal(m, 1, n) for k, m, n in (("ref", 0, 6), ("a", 0.5, 4), ("b", 2, 7), ("c", -1, 5))}
    made = dunnett(samples, reference="ref")
    want = stats.dunnett(*(samples[k] for k in "abc"), control=samples["ref"], rng=np.random.default_rng(1))
    assert made["p_max_t"].to_numpy() == pytest.approx(want.pvalue, abs=1e-3)
    limits = want.confidence_interval(0.95)
    assert made["low"].to_numpy() == pytest.approx(limits.low, abs=0.01)
    assert made["high"].to_numpy() == pytest.approx(limits.high, abs=0.01)


def test_max_t_p_lies_between_the_single_and_the_bonferroni_p():
    t = np.array([0.5, 1.7, 2.4, 3.9])
    single = 2 * stats.t.sf(t, 15)
    made = max_t_p(t, equicorrelated(4), 15.0)
    assert (made >= single - 1e-9).all()
    assert (made <= np.minimum(1, 4 * single) + 1e-9).all()
    assert (np.diff(made) < 0).all()


def test_no_correlation_matrix_is_named():
    with pytest.raises(ConfigError, match="must be a correlation matrix of 2 x 2"):
        max_t_p(np.array([1.0, 2.0]), np.array([[1, 2], [2, 1]]), 5)
    with pytest.raises(ConfigError, match="reference 'z' and another group"):
        dunnett({"a": [1.0, 2.0]}, reference="z")


# ---- the gate ------------------------------------------------------------------------------------------------------------
def test_depthbench_needs_a_joint_error_to_single_out_two_architectures():
    """Contrasts with own variances and 6 df call three slopes different after Holm; the simultaneous ones, two.

    The joint test passes, so depth profiles do differ; LayerNorm scaling is no longer told apart from Pre-LN.
    """
    table = depthbench()
    table = table[(table["match_group"] == "400M") & (table["depth"] <= 32)]
    cells = cell_means(table.assign(r=table["depth"] / table["width"]), x="r")
    made = architecture_by_depth(cells, reference="pre_ln", degree=1, draws=1_999, rng=1)
    assert made.passed
    assert made.gate.statistic == pytest.approx(4.662, abs=5e-4)  # F(9, 30), statsmodels
    off = made.contrasts.index[(made.contrasts["low"] > 0) | (made.contrasts["high"] < 0)]
    assert set(off) == {"hc", "attnres_full"}
    assert "told apart from pre_ln: hc, attnres_full" in made.decision
    assert set(made.contrasts.index[made.contrasts["p_max_t"] < 0.05]) == set(off)
    assert "attnres_full" in made.summary()
    welch = architecture_by_depth(cells, reference="pre_ln", degree=1, error="welch", draws=1_999, rng=1)
    assert welch.contrasts.loc["lns", "p_max_t"] > 0.05
    bonferroni = adjust(made.contrasts["p"], method="bonferroni")
    assert made.contrasts["p_max_t"].between(made.contrasts["p"], bonferroni).all()


def test_one_significant_slope_and_one_that_is_not_are_no_difference():
    made = architecture_by_depth(
        random_cells(np.random.default_rng(7), slopes=(0.006, 0.003), tau=0.0015, groups=2),
        reference="a", degree=1, draws=499,
    )  # fmt: skip
    assert made.slopes["p"].min() < 0.05 < made.slopes["p"].max()
    assert not made.passed
    assert made.decision.startswith("unresolved")


def test_bootstrap_with_a_variance_per_group_ignores_units_and_intercepts():
    cells = random_cells(np.random.default_rng(3), sd=(0.001, 0.001, 0.003, 0.003, 0.006, 0.006))
    one = heteroscedastic_bootstrap(cells, degree=1, draws=999, rng=5)
    moved = Cells(cells.levels, cells.group, cells.x + 3, 7 * cells.mean + cells.group, cells.count, cells.within)
    assert heteroscedastic_bootstrap(moved, degree=1, draws=999, rng=5).p_value == pytest.approx(one.p_value, abs=0.002)


def test_the_bootstrap_needs_depths_and_error():
    cells = random_cells(np.random.default_rng(4))
    with pytest.raises(ConfigError, match="needs at least 6 depths"):
        heteroscedastic_bootstrap(cells, degree=4)
    exact = Cells(cells.levels, cells.group, cells.x, cells.x * 1.0, cells.count, cells.within)
    with pytest.raises(ConfigError, match=r"no error|make no|exactly"):
        architecture_by_depth(exact, reference="a", degree=1)

"""Sign flips, Freedman-Lane, adjustment, e-values, sequential looks."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq
from statsmodels.stats.multitest import multipletests
from test_hypotheses_contrasts import random_cells

from scalinglab.errors import ConfigError
from scalinglab.hypotheses import (
    HypothesisTest,
    adjust,
    e_value,
    freedman_lane,
    interaction_f,
    looks,
    pairs_needed,
    sequential,
    sign_flip,
)


# ---- sign flips ----------------------------------------------------------------------------------------------------------
def test_sign_flips_agree_with_scipys_permutation_test():
    d = np.random.default_rng(0).normal(0.4, 1, 9)
    want = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
    assert sign_flip(d).p_value == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("pairs", "least"), [(5, 0.0625), (6, 0.03125), (8, 0.0078125), (9, 0.00390625)])
def test_the_smallest_p_of_n_pairs(pairs, least):
    made = sign_flip(np.linspace(1, 2, pairs))
    assert made.p_min == least
    assert made.p_value == least
    assert made.testable == (pairs >= 6)


def test_five_pairs_refuse_instead_of_failing_to_reject():
    made = sign_flip([0.01, 0.02, 0.03, 0.01, 0.015])
    assert made.codes == ("UNTESTABLE_N",)
    assert made.rejected is None
    assert made.decision.startswith("untestable: the smallest p that this design can give is 0.0625")
    assert made.interval == (-math.inf, math.inf)


def test_pairs_for_holms_first_step():
    assert pairs_needed(0.05) == 6
    assert pairs_needed(0.05, tests=6) == 8  # the published planning rule for six architectures
    made = sign_flip(np.linspace(1, 2, 7), adjusted_alpha=0.05 / 6)
    assert made.codes == ("UNTESTABLE_N",)
    assert sign_flip(np.linspace(1, 2, 8), adjusted_alpha=0.05 / 6).rejected
    with pytest.raises(ConfigError, match="alpha lies between 0 and 1"):
        pairs_needed(0.0)


def test_the_interval_holds_what_is_not_rejected():
    d = np.random.default_rng(1).normal(0.5, 1, 10)
    low, high = sign_flip(d).interval
    for edge, out in ((low, -1e-6), (high, 1e-6)):
        assert sign_flip(d - (edge + out)).p_value <= 0.05
        assert sign_flip(d - (edge - 20 * out)).p_value > 0.05


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10).filter(lambda v: abs(v) > 1e-3), min_size=6, max_size=9), st.floats(0.01, 100))
def test_sign_flips_know_neither_units_nor_order(values, factor):
    d = np.array(values)
    one = sign_flip(d).p_value
    assert sign_flip(factor * d[::-1]).p_value == pytest.approx(one, abs=1e-12)
    assert sign_flip(-d).p_value == pytest.approx(one, abs=1e-12)


# ---- Freedman-Lane -------------------------------------------------------------------------------------------------------
def test_freedman_lane_agrees_with_f_for_normal_errors():
    for seed, slopes in ((0, (0.0,) * 6), (1, (0, 0, 0, 0, 0.003, 0.006))):
        cells = random_cells(np.random.default_rng(seed), slopes=slopes)
        f, permuted = interaction_f(cells, degree=1), freedman_lane(cells, degree=1, draws=4_999, rng=2)
        assert permuted.statistic == pytest.approx(f.statistic, rel=1e-9)
        assert permuted.p_value == pytest.approx(f.p_value, abs=0.035)


def test_two_groups_of_three_against_all_permutations():
    """With 6 cells every one of the 720 orders can be tried by hand."""
    cells = random_cells(np.random.default_rng(5), groups=2, slopes=(0.0, 0.004), x=np.log([16.0, 32, 70]))
    X0 = np.column_stack([cells.group == 0, cells.group == 1, cells.x]).astype(float)
    X1 = np.column_stack([X0, cells.x * (cells.group == 1)])

    def statistic(y):
        rss = [((y - X @ np.linalg.lstsq(X, y, rcond=None)[0]) ** 2).sum() for X in (X0, X1)]
        return (rss[0] - rss[1]) / (rss[1] / 2)

    fit = X0 @ np.linalg.lstsq(X0, cells.mean, rcond=None)[0]
    e = cells.mean - fit
    seen = statistic(cells.mean)
    everything = [statistic(fit + e[list(order)]) >= seen * (1 - 1e-9) for order in itertools.permutations(range(6))]
    made = freedman_lane(cells, degree=1, draws=9_999, rng=1)
    assert made.statistic == pytest.approx(seen, rel=1e-8)
    assert made.p_value == pytest.approx(np.mean(everything), abs=0.02)


def test_permuting_within_groups_keeps_groups_apart():
    cells = random_cells(np.random.default_rng(6), sd=(0, 0, 0, 0, 0.05, 0.05))
    made = freedman_lane(cells, degree=1, within=True, draws=999, rng=1)
    assert "within groups" in made.method
    assert 0 < made.p_value <= 1
    tiny = random_cells(np.random.default_rng(6), groups=2, slopes=(0, 0), x=np.log([16.0, 32, 70]))
    # 3! x 3! orders: .0278
    assert freedman_lane(tiny, degree=1, within=True, draws=999).p_min == pytest.approx(1 / 36)
    with pytest.raises(ConfigError, match="at least 19"):
        freedman_lane(cells, draws=10)


# ---- adjustment ----------------------------------------------------------------------------------------------------------
def test_holm_and_benjamini_hochberg_by_hand():
    p = {"a": 0.01, "b": 0.04, "c": 0.03}
    assert adjust(p).to_dict() == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert adjust(p, method="bh").to_dict() == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert adjust(p, method="bh").to_numpy() == pytest.approx(stats.false_discovery_control(list(p.values())))
    assert adjust([0.01, 0.04, 0.03], method="bonferroni").to_list() == pytest.approx([0.03, 0.12, 0.09])
    assert adjust([0.01, 0.2, 0.03], method="sequence").to_list() == [0.01, 0.2, 0.2]


def test_depthbench_after_holm():
    """Nine contrasts with own variances: .0012, .0042, .0058 and, next, .024; Holm rejects three."""
    p = [0.0012, 0.0042, 0.0058, 0.024, 0.09, 0.05, 0.09, 0.26, 0.81]
    assert (adjust(p) <= 0.05).to_list() == [True] * 3 + [False] * 6


def test_tests_that_are_not_listed_count():
    tests = {k: HypothesisTest(k, "", p, "") for k, p in (("a", 0.01), ("b", 0.02))}
    assert adjust(tests).to_list() == pytest.approx([0.02, 0.02])
    assert adjust(tests, tried=10).to_list() == pytest.approx([0.1, 0.18])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_adjusted_p_only_grow_and_keep_the_order(values):
    p = pd.Series(values)
    for method in ("holm", "bonferroni", "hochberg", "bh", "by"):
        made = adjust(p, method=method)
        assert (made >= p - 1e-12).all()
        assert (made.iloc[np.argsort(values, kind="stable")].diff().dropna() >= -1e-12).all()
    assert (adjust(p, method="hochberg") <= adjust(p) + 1e-12).all()


def test_holm_is_that_of_statsmodels():
    rng = np.random.default_rng(0)
    for p in (rng.random(12) ** 3, np.array([0.02, 0.02, 0.5]), np.array([0.3])):
        assert adjust(p).to_numpy() == pytest.approx(multipletests(p, method="holm")[1], rel=1e-12)


def test_what_cant_be_adjusted():
    with pytest.raises(ConfigError, match="no tests"):
        adjust([])
    with pytest.raises(ConfigError, match="test 'b' has p = nan"):
        adjust({"a": 0.1, "b": math.nan})
    with pytest.raises(ConfigError, match="tried=1 but 2"):
        adjust([0.1, 0.2], tried=1)
    with pytest.raises(ConfigError, match="method 'tukey' is not known"):
        adjust([0.1], method="tukey")


# ---- e-values ------------------------------------------------------------------------------------------------------------
def test_wealth_is_a_martingale_over_all_signs():
    size = np.array([0.3, 1.0, 0.2, 2.0, 0.7])
    wealth = [e_value(size * signs, scale=1.0).statistic for signs in itertools.product((-1, 1), repeat=5)]
    assert np.mean(wealth) == pytest.approx(1.0, rel=1e-12)


def test_looking_after_every_pair_keeps_the_size():
    rng = np.random.default_rng(8)
    rejected = sum(e_value(rng.normal(size=40), scale=1.0).p_value <= 0.05 for _ in range(400))
    assert rejected <= stats.binom.ppf(0.9999, 400, 0.05)
    strong = e_value(rng.normal(1, 1, 40), scale=1.0)
    assert strong.rejected
    assert "EXPLORATORY" in strong.codes
    with pytest.raises(ConfigError, match="scale is 0"):
        e_value([1.0], scale=0.0)


# ---- looks ---------------------------------------------------------------------------------------------------------------
# Two-sided 5 %. Constants: O'Brien & Fleming 1979, Pocock 1977 (Jennison & Turnbull 2000, tables 2.1 and 2.3); spending
# functions: Lan & DeMets 1983 (Proschan, Lan & Wittes 2006 print the five O'Brien-Fleming looks to four decimals).
CONSTANTS = {2: (1.977, 2.178), 3: (2.004, 2.289), 4: (2.024, 2.361), 5: (2.040, 2.413)}
SPENT = {
    "obrien_fleming": {
        2: (2.963, 1.969), 3: (3.710, 2.511, 1.993), 4: (4.333, 2.963, 2.359, 2.014),
        5: (4.8769, 3.3569, 2.6803, 2.2898, 2.0310),
    },
    "pocock": {
        2: (2.157, 2.201), 3: (2.279, 2.295, 2.296), 4: (2.368, 2.368, 2.358, 2.350),
        5: (2.438, 2.427, 2.410, 2.397, 2.386),
    },
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_boundaries_are_the_published_ones(count):
    fleming, pocock = CONSTANTS[count]
    made = looks(count, spending="obrien_fleming_fixed")
    assert made.z == pytest.approx(fleming * np.sqrt(count / np.arange(1, count + 1)), abs=0.002)
    assert looks(count, spending="pocock_fixed").z == pytest.approx(np.full(count, pocock), abs=6e-4)
    for spending, table in SPENT.items():
        plan = looks(count, spending=spending)
        assert plan.z == pytest.approx(table[count], abs=6e-4)
        assert plan.spent[-1] == pytest.approx(0.05, abs=1e-9)
        assert plan.power(0.0) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("spending", "power", "inflation"),
    [("obrien_fleming_fixed", 0.8, 1.028), ("obrien_fleming_fixed", 0.9, 1.026), ("pocock_fixed", 0.8, 1.228), ("pocock_fixed", 0.9, 1.206)],
)  # fmt: skip
def test_inflation_factors_are_the_published_ones(spending, power, inflation):
    """Largest sample over that of one look, five looks (Jennison & Turnbull 2000, tables 2.2 and 2.4: 1.228, 1.206)."""
    plan = looks(5, spending=spending)
    drift = brentq(lambda d: plan.power(d) - power, 1, 6)
    single = stats.norm.ppf(0.975) + stats.norm.ppf(power)
    assert (drift / single) ** 2 == pytest.approx(inflation, abs=0.0011)


def test_unequal_looks_keep_the_size_in_simulated_paths():
    fraction = np.array([0.3, 0.45, 1.0])
    plan = looks(fraction, spending="pocock", alpha=0.1)
    rng = np.random.default_rng(9)
    steps = rng.normal(size=(40_000, 3)) * np.sqrt(np.diff(fraction, prepend=0))
    z = np.cumsum(steps, 1) / np.sqrt(fraction)
    crossed = (np.abs(z) >= plan.z).any(1).mean()
    assert crossed == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 40_000))


def test_decisions_at_a_look():
    plan = looks([0.5, 1.0])
    assert plan.to_frame().loc[1, "nominal_p"] == pytest.approx(0.00305, abs=1e-5)
    assert sequential(plan, [0.02]).decision.startswith("go on: p = 0.02 at look 1")
    assert not sequential(plan, [0.02]).rejected
    assert sequential(plan, [0.02, 0.03]).rejected
    early = sequential(plan, [0.001, 0.5])
    assert early.rejected
    assert early.decision.startswith("found at look 1")
    assert sequential(plan, [0.02, 0.06]).decision.startswith("unresolved after all 2 looks")
    with pytest.raises(ConfigError, match="looks can't be added"):
        sequential(plan, [0.1, 0.1, 0.1])


def test_bad_plans():
    with pytest.raises(ConfigError, match="rise to 1"):
        looks([0.5, 0.9])
    with pytest.raises(ConfigError, match="equally spaced"):
        looks([0.3, 1.0], spending="pocock_fixed")
    with pytest.raises(ConfigError, match="spending 'haybittle' is not known"):
        looks(2, spending="haybittle")

"""Power, smallest visible effects, seeds needed; which runs to train next."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from scalinglab.detection import detectable
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.fitting import fit
from scalinglab.hypotheses import (
    depth_gap,
    equivalence_power,
    gap_power,
    gap_se,
    next_runs,
    seeds_needed,
    sigma_upper,
    slope_se,
    t_power,
)
from scalinglab.information import information
from scalinglab.objectives import Gaussian
from scalinglab.simulation import gemstones_design, grid_design, simulate

SETS = {3: [16, 24, 32], 5: [16, 24, 32, 42, 70], 6: [16, 24, 32, 42, 70, 84]}


# ---- power ---------------------------------------------------------------------------------------------------------------
def test_power_is_that_of_statsmodels():
    for effect, seeds in ((0.5, 5), (1.2, 8), (2.0, 3)):
        want = TTestIndPower().power(effect, seeds, 0.05, alternative="two-sided")
        assert t_power(effect, gap_se(1.0, seeds), 2 * (seeds - 1)) == pytest.approx(want, abs=1e-6)


# Smallest visible gaps (two-sided .05, power .8) for seeds 2, 3, 5, 8, 10 with 2 (s - 1) df, then pooled 40 df, s 1, 2, 3, 5.
GAPS = {
    0.002: (0.0113, 0.0061, 0.0040, 0.0030, 0.0027, 0.0081, 0.0057, 0.0047, 0.0036),
    0.003: (0.0170, 0.0092, 0.0061, 0.0045, 0.0040, 0.0122, 0.0086, 0.0070, 0.0054),
    0.005: (0.0283, 0.0154, 0.0101, 0.0075, 0.0066, 0.0203, 0.0144, 0.0117, 0.0091),
    0.010: (0.0566, 0.0307, 0.0202, 0.0151, 0.0133, 0.0406, 0.0287, 0.0235, 0.0182),
}


@pytest.mark.parametrize("sigma", list(GAPS))
def test_smallest_visible_gaps(sigma):
    made = [detectable(gap_se(sigma, s), 2 * (s - 1)) for s in (2, 3, 5, 8, 10)]
    made += [detectable(gap_se(sigma, s), 40) for s in (1, 2, 3, 5)]
    assert made == pytest.approx(GAPS[sigma], abs=1.6e-4 if sigma == 0.01 else 1.1e-4)


@pytest.mark.parametrize(("count", "tau", "want"), [(3, 0, 0.057), (3, 0.002, 0.088), (5, 0, 0.0066), (5, 0.002, 0.0101), (6, 0, 0.0046), (6, 0.002, 0.0070)])  # fmt: skip
def test_smallest_visible_slopes(count, tau, want):
    """Three seeds, sigma .003: three depths are useless (one degree of freedom), depths at the ends are worth most."""
    se = slope_se(np.log(SETS[count]), 0.003, 3, tau=tau)
    assert detectable(se, count - 2) == pytest.approx(want, rel=0.01)


def test_power_of_equivalence():
    """Two arms at true zero, margins .01 and .005 nats (published table: rounded to two digits)."""
    cases = (
        [(0.003, 0.01, s) for s in (2, 3, 4)]
        + [(0.003, 0.005, s) for s in (3, 5, 8)]
        + [(0.005, 0.01, s) for s in (3, 5, 8)]
    )
    made = [equivalence_power(m, gap_se(sigma, s), 2 * (s - 1)) for sigma, m, s in cases]
    assert made == pytest.approx([0.53, 0.90, 0.99, 0.22, 0.56, 0.87, 0.38, 0.78, 0.97], abs=0.011)


def test_equivalence_power_at_the_margin_is_the_size():
    assert equivalence_power(0.01, 0.001, 20, effect=0.01) == pytest.approx(0.05, abs=1e-6)
    rng = np.random.default_rng(0)
    estimate, se = 0.004 * rng.standard_normal(40_000), 0.004 * np.sqrt(rng.chisquare(6, 40_000) / 6)
    inside = np.abs(estimate) + stats.t.ppf(0.95, 6) * se < 0.012
    assert equivalence_power(0.012, 0.004, 6) == pytest.approx(inside.mean(), abs=0.01)


def test_an_estimated_sd_may_be_too_small():
    assert [sigma_upper(df) for df in (4, 8, 20, 40)] == pytest.approx([2.4, 1.7, 1.36, 1.23], abs=0.03)


def test_seeds_for_an_interaction():
    """A difference of .006 nats at sigma .003 needs about 8 seeds at two depths, about 3 at six."""
    assert seeds_needed(0.006, 0.003, arms=2).seeds == pytest.approx(8, abs=1)
    assert seeds_needed(0.006, 0.003, x=np.log(SETS[6]), arms=2).seeds == 3
    want = np.ceil(TTestIndPower().solve_power(2.0, power=0.8, alpha=0.05))
    assert seeds_needed(0.006, 0.003).seeds == want
    assert seeds_needed(0.006, 0.003, tests=6).seeds > seeds_needed(0.006, 0.003).seeds
    assert seeds_needed(0.006, 0.003, sigma_df=8).sigma == pytest.approx(0.003 * sigma_upper(8))


def test_no_number_of_seeds_beats_the_misfit_of_shapes():
    made = seeds_needed(0.001, 0.003, x=np.log(SETS[6]), tau=0.002)
    assert made.seeds is None
    assert "more depths, spread further, are needed" in made.decision
    with pytest.raises(ConfigError, match="tau can't be told from the gap"):
        seeds_needed(0.006, 0.003, tau=0.002)
    with pytest.raises(ConfigError, match="sigma above 0"):
        seeds_needed(0.006, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.002, 0.05), st.floats(0.001, 0.01))
def test_the_seeds_are_the_fewest(effect, sigma):
    plan = seeds_needed(effect, sigma)
    s = plan.seeds
    assert t_power(effect, gap_se(sigma, s), 2 * (s - 1)) >= 0.8 - 1e-6
    if s > 2:
        assert t_power(effect, gap_se(sigma, s - 1), 2 * (s - 2)) < 0.8


# ---- next runs -----------------------------------------------------------------------------------------------------------
TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28, "gamma1": 0.02, "gamma2": 0.016}


@pytest.fixture(scope="module")
def fitted():
    d = gemstones_design(checkpoints=3, tokens=(2e10, 1e11))
    d["run_id"] += d["tokens"].map("/{:.3g}".format)
    return fit("shape", simulate("shape", TRUTH, d, sigma=0.002, rng=1), objective=Gaussian(variance="constant"))


@pytest.fixture(scope="module")
def candidates():
    d = grid_design((1e8, 3e8), (2e9, 8e9), aspects=(4, 32, 256))
    return d.assign(flops=6 * d["params"] * d["tokens"])


def gap_of(made, candidates):
    own = candidates[(candidates["params"] > 2e8) & (candidates["tokens"] > 5e9)]
    return depth_gap(made.law, own[own["depth"] == own["depth"].min()], own[own["depth"] == own["depth"].max()])


def predicted(made, candidates, counts, *, sigma, tau, weights):
    """Standard error by `information` on the joined table: an independent route."""
    more = candidates.iloc[np.repeat(np.arange(len(candidates)), counts)]
    columns = [c for c in made.runs if c in candidates and c != "run_id"]
    both = pd.concat([made.runs[columns], more[columns]], ignore_index=True)
    return information(made.law, made.params, both, sigma=sigma, tau=tau).contrast(weights)


@pytest.mark.parametrize("tau", [0.0, 0.003])
def test_standard_errors_are_those_of_the_information_module(fitted, candidates, tau):
    weights = {"gamma1": 1.0, "gamma2": -2.0}
    made = next_runs(fitted, candidates, estimand=weights, budget=4e19, repeats=2, sigma=0.002, tau=tau)
    counts = np.zeros(len(candidates), int)
    counts[candidates.index.get_indexer(made.table.index)] = made.table["repeats"]
    none = np.zeros_like(counts)
    assert made.se_before == pytest.approx(
        predicted(fitted, candidates, none, sigma=0.002, tau=tau, weights=weights), rel=1e-4
    )
    assert made.se_after == pytest.approx(
        predicted(fitted, candidates, counts, sigma=0.002, tau=tau, weights=weights), rel=1e-4
    )
    assert made.table["se_after"].iloc[-1] == pytest.approx(made.se_after)
    assert made.flops == pytest.approx(candidates["flops"] @ counts)
    assert made.flops <= 4e19


@pytest.mark.parametrize("budget", [3e18, 1e19, 2.2e19, 4e19])
@pytest.mark.parametrize("what", ["gamma1", "gap"])
def test_greedy_with_exchange_finds_what_exhaustive_search_finds(fitted, candidates, budget, what):
    estimand = "gamma1" if what == "gamma1" else gap_of(fitted, candidates)
    made = next_runs(fitted, candidates, estimand=estimand, budget=budget)
    from scalinglab.encoding import encode
    from scalinglab.hypotheses.further_runs import _gradient

    columns = [c for c in fitted.runs if c in candidates]
    both = pd.concat([fitted.runs[columns], candidates[columns]], ignore_index=True)
    encoding = encode(fitted.law, both)
    theta = encoding.internal(fitted.params)
    loss = np.exp(encoding.problem.log_loss(theta)[0])
    J = encoding.problem.jacobian(theta) * loss[:, None]
    n = len(fitted.runs)
    e = np.exp(fitted.log_loss) - loss[:n]
    sigma = np.sqrt(e @ e / (n - J.shape[1]))
    c = _gradient(encoding, theta, estimand)
    F0, cost = J[:n].T @ J[:n] / sigma**2, candidates["flops"].to_numpy()
    best = np.inf
    for picked in itertools.product((0, 1), repeat=len(cost)):
        if np.dot(picked, cost) <= budget:
            X = J[n:][np.array(picked, bool)]
            best = min(best, float(c @ np.linalg.solve(F0 + X.T @ X / sigma**2, c)))
    assert made.se_after == pytest.approx(np.sqrt(best), rel=1e-6)


def test_more_budget_never_hurts_and_the_order_is_best_first(fitted, candidates):
    made = [next_runs(fitted, candidates, estimand="gamma2", budget=b) for b in (3e18, 6e18, 1.2e19, 2.4e19)]
    assert (np.diff([m.se_after for m in made]) < 0).all()
    assert all((m.table["se_after"].diff().dropna() <= 0).all() for m in made)
    assert all(m.half_width_after < m.half_width_before for m in made)
    assert "FLOPs: half width of the 95 % interval" in made[0].summary()


def test_seeds_of_one_cell_stop_helping_where_shapes_misfit(fitted, candidates):
    many = next_runs(fitted, candidates, estimand="gamma1", budget=4e19, repeats=8, sigma=0.002)
    spread = next_runs(fitted, candidates, estimand="gamma1", budget=4e19, repeats=8, sigma=0.002, tau=0.01)
    assert len(spread.table) > len(many.table)
    assert spread.table["repeats"].max() < many.table["repeats"].max()


def test_a_fit_that_leaves_the_estimand_open_is_helped(candidates):
    """All runs at one aspect ratio say nothing about shape; candidates at others do."""
    d = grid_design((5e7, 1e8, 2e8, 4e8), (2e9, 8e9, 3.2e10), aspects=(32,))
    runs = simulate("chinchilla", {k: TRUTH[k] for k in ("E", "A", "alpha", "B", "beta")}, d, sigma=0.002, rng=2)
    plain = fit("chinchilla", runs, objective=Gaussian(variance="constant"))
    import dataclasses

    from scalinglab.laws import law_from

    shape = dataclasses.replace(
        plain, law=law_from("shape", runs.columns), params=pd.Series({**plain.params, "gamma1": 0.02, "gamma2": 0.016}),
        runs=runs,
    )  # fmt: skip
    made = next_runs(shape, candidates, estimand="gamma1", budget=4e19, sigma=0.002)
    assert made.open_before
    assert np.isinf(made.se_before)
    assert np.isfinite(made.se_after)
    assert made.se_after < 1
    assert "undetermined ->" in made.summary()


def test_bad_candidates_are_named(fitted, candidates):
    with pytest.raises(ConfigError, match="the cheapest candidate costs"):
        next_runs(fitted, candidates, estimand="gamma1", budget=1e10)
    with pytest.raises(SchemaError, match="the column 'flops'"):
        next_runs(fitted, candidates.drop(columns="flops"), estimand="gamma1", budget=1e20)
    with pytest.raises(SchemaError, match="positive and finite"):
        next_runs(fitted, candidates.assign(flops=0.0), estimand="gamma1", budget=1e20)
    with pytest.raises(SchemaError, match="lack the column 'tokens'"):
        next_runs(fitted, candidates.drop(columns="tokens"), estimand="gamma1", budget=1e20)
    with pytest.raises(ConfigError, match="'gamma9' is no parameter of the law"):
        next_runs(fitted, candidates, estimand="gamma9", budget=1e20)
    with pytest.raises(ConfigError, match="depend on some parameter"):
        next_runs(fitted, candidates, estimand=lambda p: np.zeros(len(p)), budget=1e20)
    with pytest.raises(ConfigError, match="a gap is between two shapes"):
        depth_gap(fitted.law, candidates, candidates.iloc[[0]])


@pytest.mark.parametrize("seeds", [2, 3, 5, 12])
def test_power_of_welchs_test(seeds):
    """40,000 simulated studies against the quadrature (binomial SE .0025), and the size where there is no effect."""
    rng = np.random.default_rng(seeds)
    a, b = 0.003 * rng.standard_normal((2, 40_000, seeds))
    for effect in (0.0, 0.006):
        found = stats.ttest_ind(a + effect, b, axis=1, equal_var=False).pvalue <= 0.05
        assert gap_power(effect, 0.003, seeds) == pytest.approx(found.mean(), abs=0.0085)
    assert gap_power(0.006, 0.003, seeds) < t_power(0.006, gap_se(0.003, seeds), 2 * (seeds - 1))
    assert gap_power(1.0, 0.003, 5) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="needs two seeds"):
        gap_power(0.006, 0.003, 1)

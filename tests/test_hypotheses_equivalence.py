"""Equivalence of gaps and of whole ranges, interior optima."""

import numpy as np
import pandas as pd
import pytest
from conftest import shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from scalinglab.errors import ConfigError
from scalinglab.fitting import fit
from scalinglab.hypotheses import (
    compute_margin,
    interior_optimum,
    quadratic,
    shape_equivalence,
    sup_equivalence,
    tost,
    two_lines,
    u_shape,
)
from scalinglab.hypotheses.cells import Cells
from scalinglab.objectives import Gaussian
from scalinglab.simulation import gemstones_design, simulate


# ---- one gap -------------------------------------------------------------------------------------------------------------
def test_tost_is_that_of_statsmodels():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 12), rng.normal(0.1, 1, 12)
    d = a - b
    made = tost(d.mean(), d.std(ddof=1) / np.sqrt(12), 11, margin=0.9)
    p, lower, upper = ttost_paired(a, b, -0.9, 0.9)
    assert made.p_value == pytest.approx(p, rel=1e-9)
    assert made.diagnostics["p lower"] == pytest.approx(lower[1], rel=1e-9)
    assert made.diagnostics["p upper"] == pytest.approx(upper[1], rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(-0.05, 0.05), st.floats(1e-4, 0.02), st.integers(2, 60), st.floats(0.001, 0.05))
def test_the_90_percent_interval_lies_inside_exactly_when_tost_rejects(estimate, se, df, margin):
    made = tost(estimate, se, df, margin=margin)
    inside = -margin < made.interval[0] and made.interval[1] < margin
    assert made.rejected == inside or made.p_value == pytest.approx(0.05, abs=1e-9)
    assert made.level == pytest.approx(0.9)
    wider = tost(estimate, se, df, margin=2 * margin)
    assert wider.p_value <= made.p_value + 1e-12


def test_the_four_joint_outcomes():
    assert tost(0.004, 0.001, 30, margin=0.01).decision.startswith("real but immaterial")
    assert tost(0.0005, 0.001, 30, margin=0.01).decision.startswith("equivalent")
    assert tost(0.03, 0.001, 30, margin=0.01).decision.startswith("material")
    assert tost(0.008, 0.004, 30, margin=0.01).decision.startswith("unresolved")
    with pytest.raises(ConfigError, match="register a positive margin"):
        tost(0.0, 0.1, 10, margin=0.0)


def test_margins_in_compute():
    """gamma .1785 and 1.04 nats of excess loss (302M parameters, 8B tokens): 2, 5, 10 and 22 % of compute."""
    made = [compute_margin(s, exponent=0.1785, excess=1.04) for s in (0.02, 0.05, 0.10, 0.22)]
    assert made == pytest.approx([0.0037, 0.0090, 0.0176, 0.0368], abs=2e-4)
    with pytest.raises(ConfigError, match="positive values"):
        compute_margin(0.05, exponent=0.18, excess=0.0)


# ---- a range -------------------------------------------------------------------------------------------------------------
def line_replicates(rng, *, slope, se, g=9, draws=400):
    """A curve that is a line over [0, 1] with a normal slope: its range is |slope|."""
    x = np.linspace(0, 1, g)
    return slope * x, (slope + se * rng.standard_normal(draws))[:, None] * x


def test_the_range_of_a_line_is_a_t_test_of_its_slope():
    rng = np.random.default_rng(1)
    curve, many = line_replicates(rng, slope=0.004, se=0.001, draws=4_000)
    se = many[:, -1].std(ddof=1)
    made = sup_equivalence(curve, many, margin=0.009, kind="bootstrap", df=21)
    assert made.estimate == pytest.approx(0.004)
    assert made.p_value == pytest.approx(stats.t.cdf((0.004 - 0.009) / se, 21), rel=1e-6)
    assert made.interval[1] == pytest.approx(0.004 + stats.t.ppf(0.95, 21) * se, rel=1e-6)
    # all pairs are one contrast in two directions: the joint quantile is the two-sided one
    assert made.interval[0] == pytest.approx(0.004 - stats.t.ppf(0.975, 21) * se, abs=5e-5)
    assert made.codes == ("EQUIVALENT",)
    assert sup_equivalence(curve, many, margin=0.001, kind="bootstrap", df=21).codes == ("REFUTED",)
    assert sup_equivalence(curve, many, margin=0.004, kind="bootstrap", df=21).codes == ("OPEN",)


def test_size_of_the_simultaneous_test_at_the_margin():
    """Truth at the margin, in one pair of five shapes: equivalence is found in at most 5 % of cases."""
    rng = np.random.default_rng(2)
    truth = np.array([0.0, 0.002, 0.009, 0.004, 0.0])
    found = np.zeros(2)
    for _ in range(200):
        y = truth + 0.003 * rng.standard_normal((12, 5))
        leave_out = (12 * y.mean(0) - y) / 11
        made = sup_equivalence(y.mean(0), leave_out, margin=0.009, df=11, rng=3)
        found += [made.rejected, made.interval[0] > 0.009]
    assert (found <= stats.binom.ppf(0.9999, 200, 0.05)).all()


def shapes(low=5.0, high=200.0, count=25, N=3e8, D=8e9):
    r = np.geomspace(low, high, count)
    depth = np.cbrt(N / 12 / r**2)
    return pd.DataFrame({"depth": depth, "width": depth * r, "params": N, "tokens": D})


@pytest.fixture(scope="module")
def shape_fit():
    truth = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28, "gamma1": 0.02, "gamma2": 0.016}
    design = gemstones_design(checkpoints=3, tokens=(2e10, 1e11))
    design["run_id"] += design["tokens"].map("/{:.3g}".format)
    return fit("shape", simulate("shape", truth, design, sigma=0.002, rng=1), objective=Gaussian(variance="constant"))


def test_kaplans_claim_on_a_law(shape_fit):
    grid = shapes()
    loss = shape_fit.predict(grid)
    made = shape_equivalence(shape_fit, grid, margin=0.1)
    assert made.codes == ("EQUIVALENT",)
    assert made.estimate == pytest.approx(np.ptp(loss))
    assert made.diagnostics["range of aspect ratios"] == pytest.approx(40)
    assert shape_equivalence(shape_fit, grid, margin=0.009).codes == ("REFUTED",)
    assert "NARROW_RANGE" in shape_equivalence(shape_fit, shapes(10, 40), margin=0.1).codes
    boot = shape_equivalence(shape_fit, grid, margin=0.1, kind="bootstrap", draws=199, rng=1)
    assert boot.interval == pytest.approx(made.interval, abs=0.004)
    with pytest.raises(ConfigError, match="the shapes differ in 'tokens'"):
        shape_equivalence(shape_fit, grid.assign(tokens=np.linspace(1e9, 2e9, len(grid))), margin=0.1)


@pytest.mark.shared
@pytest.mark.skipif(shared_folder() is None, reason="the public run logs (../shared/data) are not here")
def test_kaplans_claim_on_gemstones():
    """80-fold range of shapes: a few percent of loss (3 % of about 2.8 nats), far more than 5 % of compute (.009 nats)."""
    d = pd.read_csv(shared_folder() / "gemstones_checkpoints.csv")
    d = d[(d["phase"] == "hot") & (d["fit_hot_100b"] == 1)].rename(columns={"n_layers": "depth", "d_model": "width"})
    d["params"] -= d["vocab_size"] * d["width"]
    d = d[(d["tokens"] / 1e10).round() % 4 == 0]
    made = fit("shape", d, objective=Gaussian(variance="constant"))
    N, D = np.exp(np.log(d[["params", "tokens"]]).mean())
    grid = shapes(3.2, 256, N=N, D=D)
    loss = made.predict(grid)
    few_percent = shape_equivalence(made, grid, margin=0.05 * float(loss.min()))
    assert few_percent.codes == ("EQUIVALENT",)
    assert few_percent.estimate == pytest.approx(0.085, abs=0.01)
    five_percent = shape_equivalence(made, grid, margin=0.009)
    assert five_percent.codes == ("REFUTED",)
    assert five_percent.estimate / 0.009 == pytest.approx(9, abs=1.2)


def test_bad_ranges_are_named():
    with pytest.raises(ConfigError, match=r"give \[g\] and \[R, g\]"):
        sup_equivalence(np.zeros(3), np.zeros((5, 4)), margin=1, df=5)
    with pytest.raises(ConfigError, match="not finite at every shape"):
        sup_equivalence(np.array([0, np.nan]), np.zeros((5, 2)), margin=1, df=5)
    with pytest.raises(ConfigError, match="kind 'wild' is not known"):
        sup_equivalence(np.zeros(2), np.zeros((5, 2)), margin=1, df=5, kind="wild")


# ---- optima --------------------------------------------------------------------------------------------------------------
def cells_of(x, y):
    return Cells(("all",), np.zeros(len(x), int), x, y, np.ones(len(x), int), np.zeros(len(x)))


def test_the_quadratic_is_that_of_polyfit():
    rng = np.random.default_rng(3)
    x = np.log(np.repeat([8.0, 16, 24, 32, 42, 70, 84], 3))
    y = 2.7 + 0.02 * (x - 3.3) ** 2 + 0.003 * rng.normal(size=len(x))
    made = quadratic(cells_of(x, y))
    p, V = np.polyfit(x, y, 2, cov=True)
    assert (made.b1, made.b2) == pytest.approx((p[1], p[0]), rel=1e-6)
    assert made.cov == pytest.approx(V[1::-1, 1::-1], rel=1e-5)


def test_an_optimum_inside_is_found_and_located():
    rng = np.random.default_rng(4)
    x = np.log(np.repeat([8.0, 16, 24, 32, 42, 70, 84], 3))
    y = 2.7 + 0.02 * (x - 3.3) ** 2 + 0.002 * rng.normal(size=len(x))
    curve = quadratic(cells_of(x, y))
    made = interior_optimum(curve, x.min(), x.max())
    assert made.label == "INTERIOR_OPTIMUM"
    assert made.location.low < 3.3 < made.location.high
    assert made.u_shape.p_value == max(made.u_shape.diagnostics["p low"], made.u_shape.diagnostics["p high"])
    assert two_lines(x, y).rejected


def test_a_monotone_and_a_flat_curve_have_none():
    rng = np.random.default_rng(5)
    x = np.log(np.repeat([8.0, 16, 24, 32, 42, 70, 84], 3))
    noise = 0.002 * rng.normal(size=len(x))
    falling = interior_optimum(quadratic(cells_of(x, -0.02 * x + noise)), x.min(), x.max())
    assert falling.label == "MONOTONE_IN_RANGE"
    assert falling.decision == "the loss falls with x over the whole range"
    flat = interior_optimum(quadratic(cells_of(x, noise)), x.min(), x.max())
    assert flat.label == "OPTIMUM_UNRESOLVED"
    assert flat.decision.startswith("unresolved: not shown:")
    hill = interior_optimum(quadratic(cells_of(x, -0.02 * (x - 3.3) ** 2 + noise)), x.min(), x.max())
    assert not hill.conditions["convex"]


@settings(max_examples=25, deadline=None)
@given(st.floats(-3, 3), st.floats(0.1, 10), st.floats(0.1, 10))
def test_labels_know_no_units(shift, stretch, factor):
    rng = np.random.default_rng(6)
    x = np.linspace(0, 1, 12)
    y = 0.5 * (x - 0.5) ** 2 + 0.03 * rng.normal(size=12)
    one = interior_optimum(quadratic(cells_of(x, y)), 0, 1)
    z = shift + stretch * x
    other = interior_optimum(quadratic(cells_of(z, 1 + factor * y)), shift, shift + stretch)
    assert other.label == one.label
    assert other.u_shape.p_value == pytest.approx(one.u_shape.p_value, rel=1e-5)
    assert other.location.estimate == pytest.approx(shift + stretch * one.location.estimate, rel=1e-5, abs=1e-6)
    assert two_lines(z, 1 + factor * y).p_value == pytest.approx(two_lines(x, y).p_value, rel=1e-5)


def test_a_quadratic_manufactures_optima_and_two_lines_do_not():
    """A loss that falls steeply, then levels off: all three conditions hold in a fifth of cases, two lines in 5 % or fewer."""
    rng = np.random.default_rng(7)
    x = np.repeat(np.linspace(0, 1, 7), 3)
    y = -np.log(x + 0.05)
    labels, lines = 0, 0
    for _ in range(300):
        seen = y + 0.05 * np.ptp(y) * rng.standard_normal(len(x))
        labels += interior_optimum(quadratic(cells_of(x, seen)), 0, 1).label == "INTERIOR_OPTIMUM"
        lines += two_lines(x, seen).p_value <= 0.05
    assert labels > 30
    assert lines <= stats.binom.ppf(0.9999, 300, 0.05)


def test_size_of_both_tests_on_a_flat_and_a_rising_line():
    rng = np.random.default_rng(8)
    x = np.linspace(0, 1, 12)
    for slope in (0.0, 1.0):
        found = np.zeros(2)
        for _ in range(250):
            y = slope * x + 0.3 * rng.standard_normal(12)
            found += [u_shape(quadratic(cells_of(x, y)), 0, 1).p_value <= 0.05, two_lines(x, y).p_value <= 0.05]
        assert (found <= stats.binom.ppf(0.9999, 250, 0.05)).all()


def test_optima_need_points():
    x = np.linspace(0, 1, 5)
    with pytest.raises(ConfigError, match="x has 5 values; at least 6"):
        two_lines(x, x)
    with pytest.raises(ConfigError, match="at least 6 different x"):
        two_lines(np.repeat(x, 2), np.repeat(x, 2))
    with pytest.raises(ConfigError, match="leave no error for a quadratic"):
        quadratic(cells_of(x[:3], x[:3]))
    with pytest.raises(ConfigError, match="low must lie below high"):
        u_shape(quadratic(cells_of(x, x**3)), 1, 0)

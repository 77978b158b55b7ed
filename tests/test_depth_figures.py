"""Figures of depth reports are tested on their arrays and artists: what is drawn where, and what is said, never on pixels."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex

from scalinglab.depth_benefit import depth_benefit
from scalinglab.errors import ConfigError
from scalinglab.published import depthbench
from scalinglab.report import depth_curves
from scalinglab.report.depth_curves import ShapeCurve, shape_curves
from scalinglab.report.figures import FIGURES, depth_equivalence, depth_forest, depth_interaction, save_figure
from scalinglab.report.figures import depth_power as draw_power
from scalinglab.report.figures import depth_specifications as draw_specifications
from scalinglab.report.figures.power import power_of
from scalinglab.report.figures.specification import REPORTED, specifications
from scalinglab.report.html.graphics import file_of
from scalinglab.simulation import grid_design, shape_study, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}
SOME = ("pre_ln", "lns", "hc", "attnres_full", "moda")  # five of ten keep the tests fast
DEPTH = ("depth_forest", "depth_interaction", "depth_equivalence", "depth_power", "depth_specifications")


def runs(aspects=(8, 16, 32, 64, 128), architectures=("pre_ln", "hc"), seeds=3, rng=0):
    design = grid_design((1e8,), (2e9,), aspects=aspects, architectures=architectures)
    return simulate("shape", TRUTH, design, sigma=0.0015, seeds=seeds, rng=rng)


@pytest.fixture(scope="module")
def bench():
    table = depthbench()
    return depth_benefit(table[table["architecture"].isin(SOME)], draws=99)


@pytest.fixture(scope="module")
def seeded():
    return depth_benefit(runs(), draws=99)


@pytest.fixture(scope="module")
def corrected():
    return depth_benefit(runs(), rates="published", draws=99, reanalyse=False)


@pytest.fixture(scope="module")
def by_law():
    return depth_benefit(shape_study(), method="law", draws=99, reanalyse=False)


def words(made):
    return " ".join(t.get_text() for t in made.findobj(matplotlib.text.Text))


def axes(made):
    return [ax for ax in made.axes if ax.get_visible()]


def scatters(ax):
    return [np.asarray(c.get_offsets()) for c in ax.collections if isinstance(c, PathCollection)]


# ---- curves ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["bench", "seeded", "corrected"])
def test_ends_of_a_curve_give_the_effect_and_its_error(which, request):
    """B = loss(shallow) - loss(deep) and its variance, by the curve's covariance, are E1 of the report (also corrected: with rates)."""
    report = request.getfixturevalue(which)
    for c in shape_curves(report):
        depths = c.cells["depth"]
        e = report.outcome.effects.pick("E1", c.architecture)
        if depths.max() != e.contrast["depth_deep"]:
            continue  # deeper runs lengthen the curve
        gap = c.loss[0] - c.loss[-1]
        variance = c.cov[0, 0] + c.cov[-1, -1] - 2 * c.cov[0, -1]
        assert gap == pytest.approx(e.estimate, abs=1e-12)
        assert math.sqrt(variance) == pytest.approx(e.se, rel=1e-8)


def test_band_is_the_ols_prediction_interval(seeded):
    """Against textbook least squares with the pooled residual variance."""
    model = seeded.outcome.model
    c = shape_curves(seeded)[0]
    x = np.log(c.cells["aspect"].to_numpy())
    X = np.stack([np.ones_like(x), x, x * x], 1)
    at = np.log(c.aspect)
    P = np.stack([np.ones_like(at), at, at * at], 1)
    fitted = P @ np.linalg.lstsq(X, c.cells["loss"].to_numpy(), rcond=None)[0]
    se = np.sqrt(model.s2["pre_ln"] * np.einsum("gi,ij,gj->g", P, np.linalg.inv(X.T @ X), P))
    assert c.loss == pytest.approx(fitted, abs=1e-9)
    assert np.sqrt(np.diag(c.cov)) == pytest.approx(se, rel=1e-6)
    low, high = c.band(0.95)
    assert (low < c.loss).all()
    assert (high > c.loss).all()


def test_seeds_average_to_their_cell(seeded):
    for c in shape_curves(seeded):
        assert len(c.seeds) == 15
        mean = c.seeds.groupby("depth")["loss"].mean()
        cells = c.cells.set_index("depth")["loss"]
        assert mean.sort_index().to_numpy() == pytest.approx(cells.sort_index().to_numpy(), abs=1e-12)


def test_one_run_per_cell_has_no_seeds(bench):
    assert all(len(c.seeds) == 0 for c in shape_curves(bench))


def test_curve_of_a_law_is_the_law(by_law):
    fit = by_law.outcome.fit
    made = {c.architecture: c for c in shape_curves(by_law)}
    assert set(made) == set(fit.law.levels)
    for a, c in made.items():
        e = by_law.outcome.effects.pick("E1", a)
        k = [int(np.abs(np.log(c.aspect / e.contrast[f"aspect_{arm}"])).argmin()) for arm in ("shallow", "deep")]
        # the grid's nearest shapes are within 2.5 % of the arms'
        assert c.loss[k[0]] - c.loss[k[1]] == pytest.approx(e.estimate, rel=0.1)
        assert c.df == fit.n_runs - 1


def test_two_shapes_have_points_but_no_curve():
    report = depth_benefit(runs(aspects=(16, 64)), method="pairs", draws=99, reanalyse=False)
    for c in shape_curves(report):
        assert len(c.loss) == 0
        assert len(c.cells) == 2
    assert len(axes(depth_interaction(report))) == 2
    with pytest.raises(ConfigError, match="three or more shapes"):
        depth_equivalence(report)
    with pytest.raises(ConfigError, match="cell means"):
        draw_power(report)


def curve(loss, sd, df=20.0):
    loss = np.asarray(loss, dtype=float)
    rng = np.random.default_rng(0)
    A = rng.standard_normal((len(loss), 3))
    cov = sd**2 * (A @ A.T) / 3
    aspect = np.geomspace(100, 10, len(loss))
    return ShapeCurve("a", aspect, aspect, loss, cov, df, pd.DataFrame(), pd.DataFrame())


def test_range_test_has_exactly_the_curves_covariance():
    """p of the intersection-union by hand at the same seven shapes."""
    from scipy.stats import t

    c = curve(0.01 * np.linspace(-1, 1, depth_curves.POINTS) ** 2, 0.002)
    made = c.range_test(0.02)
    some = np.arange(0, 61, 10)
    f, C = c.loss[some], c.cov[np.ix_(some, some)]
    p = 0.0
    for i in range(7):
        for j in range(7):
            if i != j:
                se = math.sqrt(C[i, i] + C[j, j] - 2 * C[i, j])
                p = max(p, t.cdf((f[i] - f[j] - 0.02) / se, c.df))
    assert made.p_value == pytest.approx(p, rel=1e-9)
    assert made.estimate == pytest.approx(np.ptp(f))


@pytest.mark.parametrize(("margin", "code"), [(1.0, "EQUIVALENT"), (1e-4, "REFUTED"), (0.0101, "OPEN")])
def test_range_test_decides(margin, code):
    assert code in curve(0.01 * np.linspace(-1, 1, depth_curves.POINTS) ** 2, 0.0004).range_test(margin).codes


def test_gap_above_the_best_is_zero_there_and_positive_elsewhere(seeded):
    for c in shape_curves(seeded):
        gap, low, high = c.above_best()
        k = int(gap.argmin())
        assert gap[k] == low[k] == high[k] == 0
        assert (gap >= 0).all()
        assert (low <= gap).all()
        assert (gap <= high).all()


# ---- figures -----------------------------------------------------------------------------------------------------------
def test_forest_draws_estimates_margin_and_labels(bench):
    ax = depth_forest(bench).axes[0]
    seen = [line for line in ax.lines if line.get_marker() in ("o", "s")]
    drawn = [float(line.get_xdata()[0]) for line in seen]
    assert drawn == [bench.outcome.effects.pick("E1", a).estimate for a in bench.verdicts]
    assert all(to_hex(line.get_markerfacecolor()) == "#ffffff" for line in seen)  # no label there is a claim
    text = words(ax.figure)
    assert text.count("CONFOUNDED_N") == 5
    assert "margin of equivalence" in text
    band = next(p for p in ax.patches if p.get_width() > 0)
    assert band.get_width() == pytest.approx(2 * bench.outcome.margin)


def test_forest_fills_what_the_design_bears(seeded):
    ax = depth_forest(seeded, width="column").axes[0]
    faces = [to_hex(line.get_markerfacecolor()) for line in ax.lines if line.get_marker() in ("o", "s")]
    assert [f != "#ffffff" for f in faces] == [v.label == v.reading for v in seeded.verdicts.values()]


def test_interaction_shows_cells_seeds_and_the_reference(seeded):
    made = depth_interaction(seeded)
    first, second = axes(made)
    assert first.get_title(loc="left") == "pre_ln"
    seeds, cells = scatters(second)
    assert len(seeds) == 15
    hc = next(c for c in shape_curves(seeded) if c.architecture == "hc")
    assert cells == pytest.approx(hc.cells[["depth", "loss"]].to_numpy())
    dashed = [line for line in second.lines if line.get_label() == "_pre_ln"]
    assert len(dashed) == 1
    assert not [line for line in first.lines if line.get_label() == "_pre_ln"]
    assert "single seeds" in words(made)


def test_bands_lie_inside_the_axes(bench):
    low, high = axes(depth_interaction(bench))[0].get_ylim()
    for c in shape_curves(bench):
        below, above = c.band(0.95)
        assert low < below.min() <= above.max() < high


def test_depth_is_the_axis_of_one_size_and_aspect_of_several(bench, by_law):
    assert "Depth (blocks)" in words(depth_interaction(bench))
    made = depth_interaction(by_law)
    assert "Aspect ratio" in words(made)
    low, high = axes(made)[0].get_xlim()
    assert low > high  # deeper to the right


def test_equivalence_titles_are_the_simultaneous_test(seeded):
    made = depth_equivalence(seeded)
    for ax, c in zip(axes(made), shape_curves(seeded), strict=True):
        code = c.range_test(seeded.outcome.margin).codes[0]
        told = {"EQUIVALENT": "within margin", "REFUTED": "beyond margin", "OPEN": "open"}[code]
        assert ax.get_title(loc="left") == f"{c.architecture}: {told}"
        upper = next(line for line in ax.lines if line.get_label() == "_upper")
        assert upper.get_ydata() == pytest.approx(c.above_best()[2])


def test_specifications_are_sorted_and_count_what_is_stable(bench):
    table = specifications(bench)
    base = {a: bench.outcome.evidence[a].estimate for a in bench.verdicts}
    shift = (table["estimate"] - table["architecture"].map(base)).groupby(table["analysis"], observed=True).mean()
    assert shift.is_monotonic_increasing
    for a, v in bench.verdicts.items():
        rows = table[(table["architecture"] == a) & (table["analysis"] != REPORTED)]
        assert rows["same"].sum() == v.stable
        assert len(rows) == v.analyses
    made = draw_specifications(bench)
    for ax, (a, v) in zip(axes(made), bench.verdicts.items(), strict=True):
        assert ax.get_title(loc="left") == f"{a}: {v.stable} of {v.analyses}"
        assert sum(len(line.get_xdata()) for line in ax.lines if line.get_label() == "_same") == v.stable + 1


def test_worst_outcomes_of_lost_runs_do_not_stretch_the_axis():
    table = runs(seeds=2)
    gone = (table["architecture"] == "hc") & (table["depth"] == table["depth"].max())
    table.loc[gone, "loss"] = np.nan
    report = depth_benefit(table.assign(status=np.where(gone, "diverged", "finished")), draws=99)
    rows = specifications(report)
    assert rows["estimate"].min() < -1  # a lost run at the loss of a coin toss
    low, high = axes(draw_specifications(report))[0].get_xlim()
    assert -0.2 < low < high < 0.2
    assert any(line.get_marker() == "<" for line in axes(draw_specifications(report))[1].lines)


def test_specifications_need_reanalyses(corrected):
    with pytest.raises(ConfigError, match="reanalyse=True"):
        draw_specifications(corrected)


def test_power_passes_through_the_design_and_falls(bench, seeded):
    for report in (bench, seeded):
        made = power_of(report)
        at = float(np.interp(made.seeds_now, made.seeds, made.by_seeds))
        assert at == pytest.approx(made.now, rel=1e-9)
        assert float(np.interp(made.shapes_now, made.shapes, made.by_shapes)) == pytest.approx(made.now, rel=1e-9)
        assert (np.diff(made.by_seeds) < 0).all()
        assert (np.diff(made.by_shapes) < 0).all()
    assert math.isnan(power_of(bench).share)
    assert power_of(bench).flat == power_of(bench).now


def test_every_estimate_is_named_beside_the_power_curve_and_one_seed_has_a_tick(bench):
    made = draw_power(bench)
    told = [t.get_text() for t in axes(made)[1].texts]
    assert set(bench.verdicts) <= set(told)
    assert axes(made)[0].get_xticks()[0] == 1
    heights = sorted(t.xyann[1] for t in axes(made)[1].texts if t.arrow_patch is not None)
    assert min(np.diff(heights)) > 0.05 * axes(made)[1].get_ylim()[1]


def test_power_at_known_noise_is_the_closed_form(seeded):
    """Only seeds scatter here, so se falls as 1 / sqrt(seeds)."""
    made = power_of(seeded)
    assert made.share > 0.5
    full = replace(made, share=1.0)
    assert full.by_seeds[0] / full.by_seeds[-1] == pytest.approx(
        math.sqrt((1 - made.share + made.share * 3) / (1 - made.share + made.share * 3 / 12)), rel=1e-9
    )


def test_lost_runs_are_marked():
    table = runs()
    gone = (table["architecture"] == "hc") & (table["depth"] == table["depth"].max())
    table.loc[gone, "loss"] = np.nan
    table = table.assign(status=np.where(gone, "diverged", "finished"))
    made = depth_interaction(depth_benefit(table, draws=99, reanalyse=False))
    crosses = [line for ax in axes(made) for line in ax.lines if line.get_marker() == "x"]
    assert len(crosses) == 1
    assert crosses[0].get_xdata()[0] == table["depth"].max()
    assert "lost runs" in words(made)


# ---- what goes wrong ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DEPTH)
@pytest.mark.parametrize("given", ["report", None, 3.0])
def test_anything_else_is_refused(name, given):
    with pytest.raises(ConfigError, match="depth report"):
        FIGURES[name](given)


def test_a_report_without_contrast_is_refused():
    report = depth_benefit(runs(aspects=(32,)), reanalyse=False)
    for name in DEPTH:
        with pytest.raises(ConfigError, match="no depth contrast"):
            FIGURES[name](report)


@pytest.fixture(scope="module")
def hostile():
    table = runs(seeds=1)
    bad = {"pre_ln": "$\\frac{$", "hc": "<b>\n$x$ " + "w" * 80}
    table["architecture"] = table["architecture"].map(bad)
    return depth_benefit(table, reference="$\\frac{$", draws=99)


@pytest.mark.parametrize("name", DEPTH)
def test_hostile_names_are_drawn_as_text(name, hostile, tmp_path):
    save_figure(FIGURES[name](hostile, width="column"), tmp_path / "x.svg")


def test_figures_are_the_same_file_twice(seeded, tmp_path):
    one = save_figure(depth_forest(seeded), tmp_path / "a.svg").read_bytes()
    two = save_figure(depth_forest(seeded), tmp_path / "b.svg").read_bytes()
    assert one == two


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_drawn_once_is_the_saved_file(kind, seeded, tmp_path):
    """The report draws a figure once where savefig draws it twice: the bytes must not tell."""
    made = depth_forest(seeded)
    assert file_of(made, kind) == save_figure(made, tmp_path / f"f.{kind}").read_bytes()
    assert file_of(made, kind) == file_of(made, kind)

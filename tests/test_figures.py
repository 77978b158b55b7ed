"""Figures are tested on their artists: what is drawn where, and what is said, never on pixels."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit, fit
from scalinglab.profiles import optimal_aspect, profile
from scalinglab.report import FIGURES, figure, save_figure, style
from scalinglab.report import figures as figs
from scalinglab.report.figures import grids
from scalinglab.uncertainty import jackknife

E, A, ALPHA, B, BETA = 1.7, 320.0, 0.34, 400.0, 0.29
GAMMA = {"pre_ln": (-0.03, 0.02), "mhc": (0.03, 0.03)}


def simulated(architectures: tuple[str, ...] = ("pre_ln",), seed: int = 0, noise: float = 0.003) -> pd.DataFrame:
    """Runs of the law `shape` with known truth: 3 sizes x 4 shapes x 2 token budgets per architecture."""
    rng = np.random.default_rng(seed)
    rows = []
    for name in architectures:
        g1, g2 = GAMMA[name]
        for N in (3e7, 2e8, 1e9):
            for r in (12.0, 40.0, 90.0, 300.0):
                for ratio in (6.0, 60.0):
                    depth, u = np.cbrt(N / (12 * r * r)), np.log(r / 42.67)
                    D = N * ratio
                    loss = E + A * N**-ALPHA * np.exp(g1 * u + g2 * u * u) + B * D**-BETA
                    loss *= np.exp(noise * rng.standard_normal())
                    rows.append((f"{name}/{N:.0e}/{r:g}/{ratio:g}", name, N, D, depth, depth * r, loss))
    return pd.DataFrame(rows, columns=["run_id", "architecture", "params", "tokens", "depth", "width", "loss"])


@pytest.fixture(scope="module")
def shaped() -> Fit:
    return fit("shape", simulated())


@pytest.fixture(scope="module")
def plain() -> Fit:
    return fit("chinchilla", simulated())


@pytest.fixture(scope="module")
def crossed() -> Fit:
    return fit("shape", simulated(("pre_ln", "mhc")), by="architecture")


def words(made: Figure) -> str:
    return " ".join(t.get_text() for t in made.findobj(matplotlib.text.Text))


def points(ax: matplotlib.axes.Axes) -> list[PathCollection]:
    return [c for c in ax.collections if isinstance(c, PathCollection)]


def line(ax: matplotlib.axes.Axes, label: str) -> matplotlib.lines.Line2D:
    return next(one for one in ax.lines if one.get_label() == label)


def overlapping_ticks(ax: matplotlib.axes.Axes) -> bool:
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        boxes = [t.get_window_extent() for t in labels if t.get_text() and t.get_visible()]
        if any(a.overlaps(b) for a, b in pairwise(boxes)):
            return True
    return False


# ---- style -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "text"),
    [(7e7, "70M"), (1.5e9, "1.5B"), (2e13, "20T"), (3e5, "300k"), (999_999_999, "1B"), (12.0, "12"), (np.nan, "")],
)
def test_counts_are_said_as_people_say_them(value: float, text: str) -> None:
    assert style.count_label(value) == text


def test_powers_and_numbers() -> None:
    assert style.power_label(1e20) == "$10^{20}$"
    assert style.power_label(3e19) == r"$3{\times}10^{19}$"
    assert style.power_label(999.99e18) == style.power_label(1e21)
    assert style.number(0.3471) == "$0.347$"
    assert style.number(-0.00234) == "$-0.00234$"
    assert style.number(9.996) == style.number(10.0)
    assert style.number(1.01e5) == r"$1.01{\times}10^{5}$"
    assert style.number(np.inf) == r"$\infty$"


@given(st.floats(-12, 25), st.floats(0.003, 20), st.integers(2, 7))
def test_log_ticks_are_few_inside_and_increasing(start: float, decades: float, most: int) -> None:
    low, high = 10.0**start, 10.0 ** (start + decades)
    ticks = style.log_ticks(low, high, most)
    assert 2 <= len(ticks) <= most
    assert all(a < b for a, b in pairwise(ticks))
    assert low * (1 - 1e-6) <= ticks[0]
    assert ticks[-1] <= high * (1 + 1e-6)


def test_style_errors() -> None:
    with pytest.raises(ConfigError, match="0 < low < high"):
        style.log_ticks(0.0, 1.0)
    with pytest.raises(ConfigError, match="'column'"):
        style.inches("huge")  # type: ignore[arg-type]


def test_ordered_colours_darken_steadily() -> None:
    rgb = style.ordered_map()(np.linspace(0, 1, 20))[:, :3]
    grey = rgb @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(grey) < 0).all()


# ---- registry ----------------------------------------------------------------------------------------------------------
def test_registry_holds_every_figure_and_no_global_state_changes(plain: Fit) -> None:
    of_fits = {"loss_vs_scale", "isoflop", "shape_valley", "residuals", "profile", "frontier", "forest"}
    of_depth = {f"depth_{name}" for name in ("forest", "interaction", "equivalence", "power", "specifications")}
    of_learning_rates = {"decomposition", "lr_drift", "lr_envelope"}
    assert set(FIGURES) == of_fits | of_depth | of_learning_rates | {
        "depth_profile", "layer_removal", "coords", "pooled_forest",
    }  # fmt: skip
    matplotlib.rcParams["font.size"] = 21.0  # a user's setting neither leaks in nor is lost
    try:
        before = dict(matplotlib.rcParams)
        made = FIGURES["loss_vs_scale"](plain)
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]
    assert made.axes[0].xaxis.label.get_fontsize() == 8.0
    assert "matplotlib.pyplot" not in sys.modules or not __import__("matplotlib.pyplot").pyplot.get_fignums()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        figure("isoflop")(lambda: Figure())


def test_tables_do_not_import_matplotlib() -> None:
    code = "import sys, scalinglab.report as r; r.to_markdown; assert not [m for m in sys.modules if m.startswith('matplotlib')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saved_files_are_the_same_twice_and_leave_nothing_behind(tmp_path, plain: Fit) -> None:
    made = figs.loss_vs_scale(plain, uncertainty="none")
    for kind in ("pdf", "png", "svg"):
        one = save_figure(made, tmp_path / f"one.{kind}").read_bytes()
        assert save_figure(made, tmp_path / f"two.{kind}").read_bytes() == one
        assert b"20" + b"26-" not in one[:400]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{n}.{k}" for n in ("one", "two") for k in ("pdf", "png", "svg")
    )
    assert b"CreationDate" not in (tmp_path / "one.pdf").read_bytes()
    with pytest.raises(ConfigError, match=r"\.pdf, \.png, \.svg"):
        save_figure(made, tmp_path / "one.gif")
    with pytest.raises(ConfigError, match="does not exist"):
        save_figure(made, tmp_path / "nowhere" / "one.pdf")


# ---- loss against scale ------------------------------------------------------------------------------------------------
def test_loss_vs_scale_draws_the_runs_the_law_and_its_band(plain: Fit) -> None:
    made = figs.loss_vs_scale(plain, "params", levels=[1e9, 1e10])
    ax = made.axes[0]
    np.testing.assert_allclose(
        np.asarray(points(ax)[0].get_offsets()), plain.runs[["params", "loss"]].to_numpy(), rtol=1e-12
    )
    drawn = line(ax, "1B")
    x = np.asarray(drawn.get_xdata())
    p = plain.params
    np.testing.assert_allclose(
        drawn.get_ydata(), p["E"] + p["A"] * x ** -p["alpha"] + p["B"] * 1e9 ** -p["beta"], rtol=1e-12
    )
    made_ = plain.jackknife.interval(lambda q: plain.predict(pd.DataFrame({"params": x, "tokens": 1e9}), q), log=True)
    band = next(c for c in ax.collections if not isinstance(c, PathCollection)).get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), made_.high.max(), rtol=1e-9)
    assert "jackknife" in words(made)
    assert ax.get_xlabel() == "Parameters $N$"
    assert "nats/token" in ax.get_ylabel()
    assert made.get_figwidth() == style.COLUMN
    assert not overlapping_ticks(ax)
    assert all(re.fullmatch(r"[\d.]+[MB]", t.get_text()) for t in ax.get_xticklabels())


def test_loss_vs_flops_and_absent_uncertainty(plain: Fit) -> None:
    made = figs.loss_vs_scale(plain, "flops", levels=[2e8], uncertainty="none")
    ax = made.axes[0]
    drawn = line(ax, "200M")
    C = np.asarray(drawn.get_xdata())
    want = plain.predict(pd.DataFrame({"params": 2e8, "tokens": C / (6 * 2e8)}))
    np.testing.assert_allclose(drawn.get_ydata(), want, rtol=1e-12)
    assert "No uncertainty drawn" in words(made)
    assert not [c for c in ax.collections if not isinstance(c, PathCollection)]


def test_final_rows_are_the_last_of_each_run() -> None:
    runs = simulated()
    early = runs.assign(tokens=runs["tokens"] / 3, loss=runs["loss"] + 0.05)
    both = fit("chinchilla", pd.concat([runs, early], ignore_index=True))
    made = figs.loss_vs_scale(both, "tokens", rows="final", uncertainty="none")
    shown = np.asarray(points(made.axes[0])[0].get_offsets())
    np.testing.assert_allclose(np.sort(shown[:, 0]), np.sort(runs["tokens"]))


def test_crossed_loss_vs_scale_moves_runs_along_the_law(crossed: Fit) -> None:
    made = figs.loss_vs_scale(crossed, "params", levels=[5e9])
    ax = made.axes[0]
    scatter = points(ax)
    assert len(scatter) == 2
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["pre_ln", "mhc"]  # the reference first
    own = crossed.runs["architecture"].to_numpy() == "mhc"
    shown = np.asarray(scatter[1].get_offsets())
    curve = line(ax, "mhc")
    at = np.interp(np.log(shown[:, 0]), np.log(np.asarray(curve.get_xdata())), np.log(np.asarray(curve.get_ydata())))
    np.testing.assert_allclose(np.log(shown[:, 1]) - at, crossed.residuals[own], atol=1e-4)


def test_floor_is_a_line_where_it_fits_and_words_where_not(plain: Fit) -> None:
    near = figs.loss_vs_scale(plain, "flops", uncertainty="none")
    floor = [one for one in near.axes[0].lines if one.get_label() == "_floor"]
    if floor:
        np.testing.assert_allclose(floor[0].get_ydata(), plain.params["E"])
    far = fit("chinchilla", simulated().assign(loss=lambda d: d["loss"] + 20))
    made = figs.loss_vs_scale(far, "params", uncertainty="none")
    assert floor or "Irreducible loss" in words(near)
    assert ("Irreducible loss" in words(made)) or any(one.get_label() == "_floor" for one in made.axes[0].lines)


def test_loss_vs_scale_refuses_what_the_law_does_not_read(plain: Fit) -> None:
    ray = fit("ray", simulated())
    with pytest.raises(ConfigError, match="does not depend on tokens"):
        figs.loss_vs_scale(ray, "tokens")
    with pytest.raises(ConfigError, match="both params and tokens"):
        figs.loss_vs_scale(ray, "flops")
    with pytest.raises(ConfigError, match="positive"):
        figs.loss_vs_scale(plain, levels=[-1.0])
    with pytest.raises(ConfigError, match="'jackknife', 'none'"):
        figs.loss_vs_scale(plain, uncertainty="bars")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another fit"):
        figs.loss_vs_scale(plain, uncertainty=jackknife(ray))


def test_groups_of_like_size_are_found_and_checkpoints_are_cut_into_narrow_ones() -> None:
    sizes = [5.1e7, 4.9e7, 5e7, 2e8, 8e8]
    assert [len(group) for group in grids.clusters(sizes)] == [3, 1, 1]
    assert grids.own_levels(sizes, 5) == [5e7, 2e8, 8e8]
    checkpoints = np.linspace(1e9, 1e11, 1000)
    found = grids.clusters(checkpoints)
    assert np.concatenate(found) == pytest.approx(checkpoints)
    assert max(np.log(group[-1] / group[0]) for group in found) <= 0.3
    assert len(grids.own_levels(checkpoints, 5)) == 5
    assert len(grids.own_levels(np.geomspace(1e8, 1e10, 7), 5, every=8)) == 7


def test_default_curves_are_at_sizes_that_were_run(plain: Fit) -> None:
    ran = sorted(set(plain.runs["params"]))
    made = figs.loss_vs_scale(plain, "tokens", uncertainty="none")
    assert [one.get_label() for one in made.axes[0].lines if one.get_label() != "_floor"] == ["30M", "200M", "1B"]
    assert [t.get_text() for t in made.axes[1].get_yticklabels()] == ["30M", "200M", "1B"]
    upright = figs.loss_vs_scale(plain, "params", uncertainty="none").axes[0]
    assert upright.get_xticks() == pytest.approx(ran)  # the largest has a label too


# ---- isoFLOP -----------------------------------------------------------------------------------------------------------
def test_isoflop_marks_the_optimum_of_the_law(plain: Fit) -> None:
    budgets = [1e18, 1e19]
    made = figs.isoflop(plain, budgets=budgets)
    ax = made.axes[0]
    marks = [one for one in ax.lines if one.get_label() == "_optimum"]
    bars = [one for one in ax.lines if one.get_label() == "_interval"]
    assert len(marks) == len(bars) == 2
    p = plain.params
    G = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / (p["alpha"] + p["beta"]))
    best = [G * (C / 6) ** (p["beta"] / (p["alpha"] + p["beta"])) for C in budgets]
    np.testing.assert_allclose([m.get_xdata()[0] for m in marks], best, rtol=1e-9)
    for bar, at in zip(bars, best, strict=True):
        assert bar.get_xdata()[0] < at < bar.get_xdata()[1]
    curve = line(ax, "_beyond")
    N = np.asarray(curve.get_xdata())
    np.testing.assert_allclose(curve.get_ydata(), plain.predict(pd.DataFrame({"params": N, "tokens": 1e18 / (6 * N)})))
    labels = [t for t in ax.texts if "10^" in t.get_text()]
    assert not labels[0].get_window_extent().overlaps(labels[1].get_window_extent())


def test_default_budgets_have_runs_and_curves_end_near_them() -> None:
    """Budgets a factor of two apart are told apart, each has its runs, and no curve goes far beyond them."""
    rng = np.random.default_rng(0)
    planned = (1e18, 2e18, 4e18, 6.4e19)
    N = np.array([n for C in planned for n in np.geomspace(0.25, 4, 5) * np.sqrt(C / 120)])
    D = np.repeat(planned, 5) / (6 * N)
    loss = (E + A * N**-ALPHA + B * D**-BETA) * np.exp(0.003 * rng.standard_normal(len(N)))
    names = [f"r{k}" for k in range(len(N))]
    law = fit("chinchilla", pd.DataFrame({"run_id": names, "params": N, "tokens": D, "loss": loss}))
    ax = figs.isoflop(law, uncertainty="none").axes[0]
    assert [len(p.get_offsets()) for p in points(ax)] == [5, 5, 5, 5]
    solid = [float(one.get_label()) for one in ax.lines if not str(one.get_label()).startswith("_")]
    assert solid == pytest.approx(planned, rel=0.01)
    for curve, own in zip([one for one in ax.lines if one.get_label() == "_beyond"], points(ax), strict=True):
        x, ran = np.asarray(curve.get_xdata()), np.asarray(own.get_offsets())[:, 0]
        assert ran.min() / 1.2 < x.min() < ran.min() < ran.max() < x.max() < ran.max() * 1.2


def test_an_optimum_far_beyond_the_runs_is_not_drawn(plain: Fit) -> None:
    made = figs.isoflop(plain, budgets=[1e24], uncertainty="none")
    ax = made.axes[0]
    assert not [one for one in ax.lines if one.get_label() == "_optimum"]
    assert "1 of them too far beyond the runs" in " ".join(words(made).split())
    assert line(ax, "_beyond").get_xdata().max() < 1.2e9


def test_isoflop_of_runs_draws_parabolas() -> None:
    rows = [
        (f"{C:.0e}-{N:.3g}", N, C / (6 * N), E + A * N**-ALPHA + B * (C / (6 * N)) ** -BETA)
        for C in (1e18, 1e19, 1e20)
        for N in np.geomspace(0.2, 5, 6) * np.sqrt(C / 120)
    ]
    runs = pd.DataFrame(rows, columns=["run_id", "params", "tokens", "loss"])
    made = figs.isoflop(runs)
    assert len(points(made.axes[0])) == 3
    assert "Approach 2" in words(made)
    assert "No bands" in words(made)


def test_isoflop_of_a_crossed_fit_has_a_panel_per_group(crossed: Fit) -> None:
    made = figs.isoflop(crossed, budgets=[1e18], uncertainty="none", width="page")
    assert [ax.get_title(loc="left") for ax in made.axes] == ["pre_ln", "mhc"]
    with pytest.raises(ConfigError, match="it has mhc, pre_ln"):
        figs.isoflop(crossed, group="gated")
    with pytest.raises(ConfigError, match="positive FLOPs"):
        figs.isoflop(crossed, group="mhc", budgets=[0.0])


# ---- the valley --------------------------------------------------------------------------------------------------------
def test_valley_has_its_bottom_at_the_optimum_and_shades_its_set(shaped: Fit) -> None:
    made = figs.shape_valley(shaped)
    panels = [ax for ax in made.axes if ax.get_visible()]
    assert len(panels) == 3  # sizes
    want = optimal_aspect(shaped)
    ax = panels[0]
    curve = ax.lines[0]
    x, y = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    assert abs(np.log(x[y.argmin()] / want.estimate)) < 0.03
    assert abs(y.min()) < 1e-3  # percent above the optimum
    (span,) = list(ax.patches)
    ends = span.get_extents().transformed(ax.transData.inverted())
    if want.kind == "interval":
        np.testing.assert_allclose([ends.x0, ends.x1], [max(want.low, x[0]), min(want.high, x[-1])], rtol=1e-6)
        assert style.number(want.estimate) in words(made)
    assert len(np.asarray(points(ax)[0].get_offsets())) == 8  # runs of that size
    assert "nats" in ax.get_title(loc="left")


def test_valley_of_a_crossed_fit_has_a_panel_per_group_and_says_when_nothing_is_located(crossed: Fit) -> None:
    made = figs.shape_valley(crossed, y="nats", uncertainty="none")
    assert [ax.get_title(loc="left").split(",")[0] for ax in made.axes if ax.get_visible()] == ["pre_ln", "mhc"]
    assert "No uncertainty drawn" in words(made)


@pytest.mark.parametrize(("low", "high", "side"), [(20.0, 30.0, "left"), (70.0, 90.0, "right")])
def test_words_about_an_optimum_stand_beside_its_band(low: float, high: float, side: str) -> None:
    from scalinglab.report.figures.valley import _beside

    made = style.new_figure("column", 2.0)
    ax = made.add_subplot()
    ax.set_xscale("log")
    ax.set_xlim(10, 100)
    _beside(ax, "r", np.array([10.0, 100.0]), low, high)
    (text,) = ax.texts
    assert text.get_ha() == side
    place = 10 ** (1 + text.get_position()[0])
    assert place > high if side == "left" else place < low


def test_valley_without_a_bottom_says_so() -> None:
    runs = simulated(noise=0.0)
    ridge = fit("shape", runs, fixed={"gamma2": -0.01})
    assert "no interior optimum" in words(figs.shape_valley(ridge, uncertainty="none"))
    with pytest.raises(ConfigError, match="does not depend on shape"):
        figs.shape_valley(fit("chinchilla", runs))


# ---- residuals, profile, frontier, forest ------------------------------------------------------------------------------
def test_residuals_show_every_row_and_ring_the_outlier() -> None:
    runs = simulated()
    runs.loc[5, "loss"] *= 1.05
    spoiled = fit("chinchilla", runs)
    made = figs.residuals(spoiled)
    ax = made.axes[0]
    shown = np.asarray(points(ax)[0].get_offsets())
    np.testing.assert_allclose(shown[:, 1], 100 * np.expm1(spoiled.residuals))
    assert [a.get_xlabel() for a in made.axes if a.get_visible()][-1] == "Normal quantile"
    assert runs["run_id"][5] in words(made)
    assert len(np.asarray(points(made.axes[-1])[0].get_offsets())) == spoiled.n_runs


def test_profile_draws_the_interval_and_its_threshold(plain: Fit) -> None:
    made = figs.profile(plain, names=["alpha"], points=21, width="column")
    ax = made.axes[0]
    want = profile(plain, "alpha", points=21)
    curve = line(ax, "alpha")
    x, y = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    assert (np.diff(y) > 0).all()
    np.testing.assert_allclose(
        np.interp([want.low, want.high], x, y), [-np.sqrt(want.threshold), np.sqrt(want.threshold)]
    )
    assert "open" not in words(made)
    with pytest.raises(ConfigError, match="no free parameter"):
        figs.profile(plain, names=["omega"])
    with pytest.raises(ConfigError, match="no likelihood"):
        figs.profile(fit("chinchilla", simulated(), objective="robust"), names=["alpha"])


def test_profile_marks_an_open_side() -> None:
    collapsed = fit("chinchilla", simulated().assign(loss=lambda d: d["loss"] - E + 1e-3))
    made = figs.profile(collapsed, names=["E"], points=11, width="column")
    assert "open" in words(made)


def test_frontier_is_dashed_beyond_the_runs(plain: Fit) -> None:
    made = figs.frontier(plain, flops=[1e17, 1e18, 1e19, 1e22], width="page")
    ax = made.axes[0]
    solid = np.asarray(line(ax, "_inside").get_ydata(), dtype=float)
    dashed = np.asarray(line(ax, "_beyond").get_ydata(), dtype=float)
    assert np.isnan(solid[-1])
    assert np.isfinite(dashed[-1])
    p = plain.params
    G = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / (p["alpha"] + p["beta"]))
    np.testing.assert_allclose(dashed[-1], G * (1e22 / 6) ** (p["beta"] / (p["alpha"] + p["beta"])))
    assert made.axes[0].get_ylabel() == "Parameters $N$"
    with pytest.raises(ConfigError, match="two or more"):
        figs.frontier(plain, flops=[1e18])


def test_forest_compares_estimators(plain: Fit) -> None:
    made = figs.forest(plain)
    ax = made.axes[0]
    other = line(ax, "robust, by run")
    np.testing.assert_allclose(other.get_xdata(), (plain.robust_shift / plain.jackknife.se).to_numpy(), atol=1e-6)
    np.testing.assert_allclose(line(ax, "gaussian, by run").get_xdata(), 0)


# ---- what they share ---------------------------------------------------------------------------------------------------
def test_many_groups_keep_their_marks_apart_and_their_legend_outside() -> None:
    pairs = {(style.colour_of(k), style.marker_of(k)) for k in range(21)}
    assert len(pairs) == 21
    made = style.new_figure("page", 2.0)
    ax = made.add_subplot()
    for k in range(6):
        ax.plot([0, 1], [k, k], label=f"group {k}")
    style.group_legend(made, ax, "architecture")
    assert ax.get_legend() is None
    assert [t.get_text() for t in made.legends[0].get_texts()] == [f"group {k}" for k in range(6)]


def test_rows_at_gives_shape_of_the_wanted_size(shaped: Fit) -> None:
    rows = grids.rows_at(shaped, {"params": [1e8, 1e9], "tokens": 1e10, "aspect": 50.0})
    np.testing.assert_allclose(rows["width"] / rows["depth"], 50.0)
    np.testing.assert_allclose(12 * rows["depth"] * rows["width"] ** 2, [1e8, 1e9])


def test_inputs_are_left_alone(shaped: Fit) -> None:
    before = shaped.runs.copy(deep=True)
    figs.shape_valley(shaped, width="column", uncertainty="none")
    pd.testing.assert_frame_equal(shaped.runs, before)


# ---- the pooled estimate -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quantity", ["penalty", "contrast", "optimum"])
def test_a_study_whose_log_was_not_given_is_not_called_unidentified(quantity: str) -> None:
    from scalinglab import pooled_shape

    told = " ".join(words(figs.pooled_forest(pooled_shape(), quantity=quantity)).split())  # type: ignore[arg-type]
    assert "logs are not at hand: Gemstones, Chinchilla" in told
    assert "Not identified" not in told
    assert "nothing is pooled" in told
    assert "weight" not in told
    assert ("Intervals: least squares" in told) == (quantity == "optimum")


@pytest.mark.parametrize(
    ("values", "texts"),
    [([-0.09, -0.18, -0.0016], ["\u22120.090", "\u22120.180", "\u22120.002"]), ([0.2, -0.00004, 0.0], ["+0.200", "0.000", "0.000"]),
     ([0.22, 0.08, 0.36], ["+0.22", "+0.08", "+0.36"])],
)  # fmt: skip
def test_a_slope_keeps_its_side_of_zero_and_zero_has_no_sign(values: list[float], texts: list[str]) -> None:
    from scalinglab.report.figures.rates import _digits, _signed

    assert _signed(values, _digits(values, 2)) == texts

"""IsoFLOP curves: loss against size along budgets, the optimum of each and its interval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.figures import grids
from scalinglab.report.figures.curves import AXIS_LABEL
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.uncertainty import Resampling

Array = NDArray[np.float64]
_NEAR = 1.5  # runs whose compute is within this factor of a budget are shown with it
_BUDGETS = 5  # by default, at most
_BEYOND = 0.7  # how far a curve goes on beyond its runs to reach the optimum, in ln N: a factor of two
_POINTS = 121


@figure("isoflop")
def isoflop(
    source: Fit | pd.DataFrame,
    *,
    budgets: Sequence[float] | None = None,
    uncertainty: Resampling | grids.Spread = "jackknife",
    level: float = 0.95,
    group: str | None = None,
    width: style.Width = "column",
) -> Figure:
    """Loss against params along FLOP budgets, with fitted curves and the optimum of each budget.

    A Fit draws its law along 6 N D = C with jackknife bands, optima of `frontier.optimal` with intervals, and the runs
    near each budget moved to it along the law (partial residuals). A run table draws approach 2 instead: the parabola of
    each budget and its vertex with the t interval of the vertex.

    Parameters
    ----------
    budgets : FLOPs; by default up to five at which there are runs of several sizes (with a run table: all that it has).
    group : one level of a crossed fit; by default one panel per level.

    Raises
    ------
    ConfigError
        A law without a trade-off between params and tokens, an unknown group, or a budget <= 0.
    """
    if isinstance(source, pd.DataFrame):
        panels = {"": _parabolas(source, budgets, level)}
    else:
        spreads = grids.Spreads.of(source, uncertainty, level)
        if group is None and source.law.by is not None:
            panels = {str(g): _law(source, budgets, spreads, g) for g, _ in grids.groups(source)}
        else:
            panels = {group or "": _law(source, budgets, spreads, group)}
    across = len(panels) if len(panels) < 3 else 3 if style.inches(width) > 5 else 2
    lines = -(-len(panels) // across)
    made = style.new_figure(width, 2.7 if len(panels) == 1 else 0.5 + 1.9 * lines)
    axes = made.subplots(lines, across, squeeze=False, sharex=True, sharey=True)
    everything = [c for curves, _ in panels.values() for c in curves]
    for k, (ax, (name, (curves, _))) in enumerate(zip(axes.ravel(), panels.items(), strict=False)):
        shades = style.ordered_map()(np.linspace(0, 1, max(2, len(curves))))
        for c, colour, marker in zip(curves, shades, itertools.cycle(style.MARKERS[:5]), strict=False):
            ax.scatter(c["x"], c["y"], s=8, color=colour, alpha=0.65, lw=0, marker=marker)
            if np.isfinite(c["low"]).any():
                ax.fill_between(c["grid"], c["low"], c["high"], color=colour, alpha=style.BAND, lw=0)
            _curve(ax, c, colour)
            _optimum(ax, c)
        ax.set_title(name, fontsize=style.SMALL)
        _frame(ax, everything)
        ax.set_ylabel(AXIS_LABEL["loss"] if k % across == 0 else "")
        if k + across >= len(panels):
            ax.set_xlabel(AXIS_LABEL["params"])
            ax.tick_params(labelbottom=True)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    style.footnote(made, next(iter(panels.values()))[1])
    for ax, (curves, _) in zip(axes.ravel(), panels.values(), strict=False):  # last: places depend on the layout
        _curve_labels(ax, curves, list(style.ordered_map()(np.linspace(0, 1, max(2, len(curves))))))
    return made


def _optimum(ax: Axes, c: dict[str, Any]) -> None:
    at, low, high, loss = c["optimum"]
    if not np.isfinite(at):
        return
    if np.isfinite([low, high]).all():
        ax.plot([low, high], [loss, loss], color=style.INK, lw=1.1, solid_capstyle="butt", zorder=5, label="_interval")
    ax.plot([at], [loss], marker="D", ms=3.8, mfc="white", mec=style.INK, mew=0.9, ls="", zorder=6, label="_optimum")


def _frame(ax: Axes, curves: list[dict[str, Any]]) -> None:
    style.set_log_limits(ax, "x", np.concatenate([np.concatenate([c["grid"], c["x"]]) for c in curves]))
    seen = np.concatenate([np.concatenate([c["y"], [c["optimum"][3]], c["low"], c["curve"]]) for c in curves])
    style.set_log_limits(ax, "y", seen)
    style.log_axis(ax, "x", "count")
    grids.label_own_sizes(ax, np.concatenate([c["x"] for c in curves]), "count")
    style.log_axis(ax, "y", "plain", most=6)


def _curve(ax: Axes, c: dict[str, Any], colour: Any) -> None:
    """Solid over the sizes of the runs shown, dashed beyond."""
    inside = np.zeros(len(c["grid"]), bool)
    if len(c["x"]):
        inside = (c["grid"] >= c["x"].min() * 0.97) & (c["grid"] <= c["x"].max() * 1.03)
    ax.plot(c["grid"], c["curve"], color=colour, ls=(0, (3, 1.5)), lw=0.9, label="_beyond")
    ax.plot(c["grid"], np.where(inside, c["curve"], np.nan), color=colour, label=f"{c['flops']:.3g}")


def _curve_labels(ax: Axes, curves: list[dict[str, Any]], colours: list[Any]) -> None:
    """The budget at the right end of each curve, moved up where two would meet."""
    texts = []
    for c, colour in zip(curves, colours, strict=False):
        texts.append(style.haloed(ax.annotate(
            style.power_label(c["flops"]), (c["grid"][-1], c["curve"][-1]), xytext=(2.5, 0), textcoords="offset points",
            color=colour, fontsize=style.SMALL, va="center", annotation_clip=False, zorder=7)))  # fmt: skip
    style.separate(ax, texts)


# ---- from a law --------------------------------------------------------------------------------------------------------
def _law(
    fit: Fit, budgets: Sequence[float] | None, spreads: grids.Spreads, group: str | None
) -> tuple[list[dict[str, Any]], str]:
    from scalinglab.frontier import optimal

    if group is not None and group not in fit.law.levels:
        raise ConfigError(f"group={group!r} is no level of this fit; it has {', '.join(fit.law.levels) or 'no groups'}")
    own = np.ones(len(fit.runs), bool) if fit.law.by is None else fit.runs[fit.law.by].astype(str).to_numpy() == group
    N, D = grids.sizes(fit)[own], grids.tokens(fit)[own]
    flops = 6 * N * D
    chosen = _own_budgets(N, flops) if budgets is None else _budgets(budgets)
    kept = grids.aspects(fit)
    shape: Any = grids.middle(kept) if grids.has_shape(fit) and kept is not None else "optimal"
    best = optimal(
        fit,
        flops=chosen,
        uncertainty=spreads.resampling,
        level=spreads.level,
        group=group,
        shape=shape,
        kappa=grids.kappa(fit),
    ).table
    aspect = {"aspect": shape} if not isinstance(shape, str) else {}
    residual = np.exp(fit.residuals[own])
    out, beyond = [], 0
    for row, budget in enumerate(chosen):
        near = np.abs(np.log(flops / budget)) < np.log(_NEAR)
        near &= np.abs(np.log(flops[:, None] / chosen[None])).argmin(1) == row
        x = N[near]
        moved = (
            fit.predict(grids.rows_at(fit, {"params": x, "tokens": budget / (6 * x), **aspect}, group=group))
            if near.any()
            else x
        )
        at = float(best["params"].iloc[row])
        low, high = _span(x if near.any() and len(grids.clusters(x)) > 1 else N, at)  # one size alone has no curve
        if not low <= at <= high:
            at, beyond = np.nan, beyond + 1
        grid = np.geomspace(low, high, _POINTS)
        band = spreads.band(
            fit, grids.rows_at(fit, {"params": grid, "tokens": budget / (6 * grid), **aspect}, group=group)
        )
        out.append({
            "flops": budget, "x": x, "y": moved * residual[near], "grid": grid, "curve": band.estimate, "low": band.low,
            "high": band.high,
            "optimum": (at, best["params_low"].iloc[row], best["params_high"].iloc[row], best["loss"].iloc[row]),
        })  # fmt: skip
    held = f" at aspect ratio {shape:.3g}" if aspect else ""
    note = f"Runs within {_NEAR:g}x of a budget (6ND), moved to it{held} along the law; dashed: beyond their sizes; diamonds: optima"
    note += f", {beyond} of them too far beyond the runs to be drawn. " if beyond else ". "
    return out, note + spreads.note


def _span(x: Array, optimum: float) -> tuple[float, float]:
    """Sizes over which a budget's curve is drawn: those of its runs, a little more, and on to an optimum that is near."""
    low, high = np.log(x.min()), np.log(x.max())
    reach = [low - 0.1, high + 0.1]
    if np.isfinite(optimum) and low - _BEYOND <= np.log(optimum) <= high + _BEYOND:
        reach += [np.log(optimum) - 0.1, np.log(optimum) + 0.1]
    return float(np.exp(min(reach))), float(np.exp(max(reach)))


def _own_budgets(N: Array, flops: Array) -> Array:
    """Budgets at which several sizes were run: planned ones where there are such, else windows that the runs fall into."""
    planned = [g for g in grids.clusters(flops) if _sizes(N, flops, g) >= 3]
    if len(planned) < 2:
        windows = grids.clusters(flops, gap=np.inf, widest=1.8 * np.log(_NEAR))
        planned = [g for g in windows if _sizes(N, flops, g) >= 2] or windows
    middles = [float(f"{np.sqrt(g[0] * g[-1]):.2g}") for g in planned]
    return np.asarray(grids.own_levels(middles, _BUDGETS))


def _sizes(N: Array, flops: Array, group: Array) -> int:
    """How many sizes were run with compute in the range of a group."""
    return len(grids.clusters(N[(flops >= group[0]) & (flops <= group[-1])]))


def _budgets(budgets: Sequence[float]) -> Array:
    chosen = np.sort(np.asarray(budgets, dtype=np.float64).ravel())
    if not len(chosen) or not (np.isfinite(chosen) & (chosen > 0)).all():
        raise ConfigError(f"budgets must be positive FLOPs, not {list(budgets)}")
    return chosen


# ---- from runs ---------------------------------------------------------------------------------------------------------
def _parabolas(runs: pd.DataFrame, budgets: Sequence[float] | None, level: float) -> tuple[list[dict[str, Any]], str]:
    from scalinglab.isoflop import approach2
    from scalinglab.uncertainty import t_quantile

    found = approach2(runs, level=level)
    table = found.budgets
    flops = (runs["flops"] if "flops" in runs else 6 * runs["params"] * runs["tokens"]).to_numpy(np.float64)
    nearest = np.abs(np.log(flops[:, None] / table["flops"].to_numpy()[None])).argmin(1)
    rows = np.arange(len(table))
    if budgets is not None:
        asked = _budgets(budgets)
        rows = np.unique(np.abs(np.log(asked[:, None] / table["flops"].to_numpy()[None])).argmin(1))
    out = []
    for row in rows:
        b, mask = table.iloc[row], nearest == row
        x, y = runs["params"].to_numpy(np.float64)[mask], runs["loss"].to_numpy(np.float64)[mask]
        if not b["valid"]:
            continue
        grid = np.geomspace(x.min(), x.max(), _POINTS)
        curve = b["loss"] + 0.5 * b["curvature"] * np.log(grid / b["params"]) ** 2
        half = t_quantile(0.5 + level / 2, len(x) - 3) * b["params_se"] / b["params"] if len(x) > 3 else np.nan
        nothing = np.full_like(grid, np.nan)
        out.append({
            "flops": float(b["flops"]), "x": x, "y": y, "grid": grid, "curve": curve, "low": nothing, "high": nothing,
            "optimum": (b["params"], b["params"] * np.exp(-half), b["params"] * np.exp(half), b["loss"]),
        })  # fmt: skip
    left = len(rows) - len(out)
    note = f"Approach 2: a parabola in ln N per budget; diamonds: vertices; bars: {100 * level:g}\u00a0% t intervals of the vertex. No bands: curves are not a law."
    return out, note + (f" {left} budgets without a usable vertex are not drawn." if left else "")

"""The valley of shape: loss against aspect ratio at fixed size and tokens, and where its bottom is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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
_POINTS = 161
_MOST_PANELS = 6
_ROOM = 0.5  # of a panel's width, for the words about its optimum


@dataclass(frozen=True)
class _Bottom:
    """Best aspect ratio, and its confidence set: `located` only where that is an interval."""

    aspect: float
    low: float
    high: float
    located: bool
    method: str


@figure("shape_valley")
def shape_valley(
    fit: Fit,
    *,
    y: Literal["percent", "nats"] = "percent",
    tokens: float | None = None,
    uncertainty: Resampling | grids.Spread = "jackknife",
    level: float = 0.95,
    width: style.Width = "page",
) -> Figure:
    """Loss above the optimum against width / depth, one panel per size (or per group of a crossed fit).

    The curve is the law at the panel's size and `tokens`, minus its value at the best aspect ratio r*; the vertical band
    is the confidence set of r* (Fieller for the law `shape`, jackknife of ln r* for others). Points are runs: the mean of
    a run's residuals on top of the curve (partial residuals), so that size and tokens are those of the panel.

    Parameters
    ----------
    y : "percent" of the loss at r*, or "nats" per token; each panel says what 1 % is in nats.
    tokens : tokens at which the law is drawn; by default the runs' geometric median, two digits.

    Raises
    ------
    ConfigError
        The law reads no shape, or the runs have no width and depth.
    """
    seen = grids.aspects(fit)
    if seen is None or not grids.has_shape(fit):
        raise ConfigError(
            f"law {fit.law.key!r} does not depend on shape: a valley needs a law of aspect, or of width and depth"
        )
    if y not in ("percent", "nats"):
        raise ConfigError(f"y is {y!r}: give 'percent' or 'nats'")
    spreads = grids.Spreads.of(fit, uncertainty, level)
    panels, left = _panels(fit)
    columns = min(3, len(panels)) if style.inches(width) > 5 else min(2, len(panels))
    lines = -(-len(panels) // columns)
    made = style.new_figure(width, 0.55 + 1.55 * lines)
    axes = made.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    grid = np.geomspace(seen.min() / 1.15, seen.max() * 1.15, _POINTS)
    methods = set()
    for k, (ax, panel) in enumerate(zip(axes.ravel(), panels, strict=False)):
        at = {"params": panel.params, **_tokens(fit, tokens)}
        methods.add(
            _panel(
                ax,
                fit,
                panel,
                at,
                grid,
                seen,
                spreads,
                y,
                colour=style.colour_of(k if panel.group else 0),
                first=k == 0,
            )
        )
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    _frame(axes, len(panels), columns, grid, y)
    held = ", ".join(f"{style.count_label(v)} {n}" for n, v in _tokens(fit, tokens).items())
    style.footnote(made, f"{left}Law at {held + ' and ' if held else ''}the size of the panel; points: means of runs, moved there along the law. "
                         f"Shaded: set of the best aspect ratio ({', '.join(sorted(m for m in methods if m)) or 'none'}). {spreads.note}")  # fmt: skip
    return made


@dataclass(frozen=True)
class _Panel:
    title: str
    params: float
    group: str | None
    mask: NDArray[np.bool_]


def _panels(fit: Fit) -> tuple[list[_Panel], str]:
    """A panel per group, or per size; and in words which sizes are left out."""
    from scalinglab.diagnostics import size_tiers

    N = grids.sizes(fit)
    if fit.law.by is not None:
        size = float(f"{grids.middle(N):.2g}")
        told = style.count_label(size)
        return [_Panel(f"{g}, {told}", size, g, mask) for g, mask in grids.groups(fit) if mask.any()], ""
    tiers = size_tiers(N)
    out = []
    for tier in range(tiers.max() + 1):
        mask = tiers == tier
        size = float(f"{grids.middle(N[mask]):.3g}")
        out.append(_Panel(f"$N$ = {style.count_label(size)}", size, None, mask))
    if len(out) <= _MOST_PANELS:
        return out, ""
    # too many sizes: those with the most shapes tell most, in order of size
    seen = grids.aspects(fit)
    shapes = np.array([0 if seen is None else len(np.unique(np.round(seen[p.mask], 6))) for p in out])
    keep = np.sort(np.argsort(-shapes, kind="stable")[:_MOST_PANELS])
    return [out[i] for i in keep], f"The {_MOST_PANELS} of {len(out)} sizes with the most shapes. "


def _tokens(fit: Fit, tokens: float | None) -> dict[str, float]:
    if "tokens" not in fit.law.reads:
        return {}
    return {"tokens": float(f"{grids.middle(grids.tokens(fit)):.2g}") if tokens is None else float(tokens)}


def _panel(
    ax: Axes, fit: Fit, panel: _Panel, at: dict[str, float], grid: Array, seen: Array, spreads: grids.Spreads, y: str, *,
    colour: str, first: bool,
) -> str:  # fmt: skip
    bottom = _bottom(fit, at, grid, spreads, panel.group)
    known = bool(np.isfinite(bottom.aspect)) and grid[0] <= bottom.aspect <= grid[-1]
    reference = bottom.aspect if known else grids.middle(seen)
    base = grids.rows_at(fit, {**at, "aspect": [reference]}, group=panel.group)
    floor = float(fit.predict(base)[0])
    unit = 100.0 if y == "percent" else floor

    def above(rows: pd.DataFrame) -> Any:
        def excess(params: pd.DataFrame) -> Array:
            return unit * (fit.predict(rows, params) / fit.predict(base, params) - 1)

        return excess

    rows = grids.rows_at(fit, {**at, "aspect": grid}, group=panel.group)
    curve = unit * (fit.predict(rows) / floor - 1)
    if spreads.resampling is not None:
        made = spreads.resampling.interval(above(rows), spreads.level)
        ok = made.valid
        ax.fill_between(
            grid, np.where(ok, made.low, np.nan), np.where(ok, made.high, np.nan), color=colour, alpha=style.BAND, lw=0
        )
    ax.plot(grid, curve, color=colour)
    means = grids.run_means(fit, fit.residuals)
    means = means[panel.mask[means["first"].to_numpy()]]
    r = seen[means["first"].to_numpy()]
    points = fit.predict(grids.rows_at(fit, {**at, "aspect": r}, group=panel.group)) * np.exp(means["value"].to_numpy())
    ax.scatter(r, unit * (points / floor - 1), s=12, color=colour, edgecolor="white", lw=0.4, zorder=4)
    ax.axhline(0, color=style.GREY, lw=0.5, zorder=0)
    title = panel.title + (
        rf": 1 % = {floor / 100:.3f} nats" if y == "percent" else rf": loss {floor:.2f} nats at $r^*$"
    )
    ax.set_title(title.replace(" %", "\u00a0%"), fontsize=style.SMALL)
    _mark(ax, bottom, grid, first or panel.group is not None or bottom.method.startswith("jackknife"), reference)
    return bottom.method


def _mark(ax: Axes, bottom: _Bottom, grid: Array, labelled: bool, reference: float) -> None:
    low, high = max(bottom.low, grid[0]), min(bottom.high, grid[-1])
    beyond = np.isfinite(bottom.aspect) and not grid[0] <= bottom.aspect <= grid[-1]
    if not bottom.located or beyond:
        told = rf"$r^*$ = {style.number(bottom.aspect)}, but not located"
        if not np.isfinite(bottom.aspect) or beyond:
            what = "best shape beyond the runs" if beyond else "no interior optimum"
            told = f"{what}\ndrawn against $r$ = {reference:.3g}"
        style.haloed(ax.text(0.5, 0.96, told, transform=ax.transAxes, ha="center", va="top", fontsize=style.SMALL,
                             color=style.GREY, linespacing=1.1))  # fmt: skip
        if np.isfinite(bottom.aspect) and not beyond:
            ax.axvline(bottom.aspect, color=style.GREY, lw=0.7, ls=(0, (1, 1.5)), zorder=1)
        return
    if np.isfinite([low, high]).all():
        ax.axvspan(low, high, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
    ax.axvline(bottom.aspect, color=style.INK, lw=0.7, zorder=1)
    if labelled:
        limits = (
            f" [{style.number(bottom.low)}, {style.number(bottom.high)}]"
            if np.isfinite([bottom.low, bottom.high]).all()
            else ""
        )
        _beside(
            ax,
            rf"$r^*$ = {style.number(bottom.aspect)}{limits}",
            grid,
            *(v if np.isfinite(v) else bottom.aspect for v in (low, high)),
        )


def _beside(ax: Axes, text: str, grid: Array, low: float, high: float) -> None:
    """A text at the top of the panel, on the side of the band [low, high] that has more room, so that it doesn't cover it."""
    left, right = (float(np.log(v / grid[0]) / np.log(grid[-1] / grid[0])) for v in (low, high))  # in the axes, 0 to 1
    on_right = 1 - right >= left
    place = right + 0.02 if on_right else left - 0.02
    if max(1 - right, left) < _ROOM:  # no room: over the band
        place, on_right = (0.98, False) if on_right else (0.02, True)
    style.haloed(ax.text(place, 0.97, text, transform=ax.transAxes, ha="left" if on_right else "right", va="top",
                         fontsize=style.SMALL))  # fmt: skip


def _bottom(fit: Fit, at: dict[str, float], grid: Array, spreads: grids.Spreads, group: str | None) -> _Bottom:
    """Best aspect ratio at a size: from the parameters where the law is log-quadratic in it, else by search on a grid."""
    suffix = f"[{group}]" if group is not None and f"gamma2[{group}]" in fit.params else ""
    if fit.law.key == "shape" and f"gamma2{suffix}" in fit.params and f"gamma1{suffix}" in fit.params:
        if not fit.params[f"gamma2{suffix}"] > 0:
            return _Bottom(np.nan, np.nan, np.nan, False, "")
        if (
            spreads.resampling is not None
            and spreads.resampling.kind == "jackknife"
            and spreads.resampling.unit == "run"
        ):
            from scalinglab.profiles import optimal_aspect

            made = optimal_aspect(fit, level=spreads.level, group=group)
            return _Bottom(made.estimate, made.low, made.high, made.kind == "interval", "Fieller")
    fine = np.geomspace(grid[0] / 10, grid[-1] * 10, 801)
    rows = grids.rows_at(fit, {**at, "aspect": fine}, group=group)

    def best(params: pd.DataFrame) -> Array:
        loss = np.atleast_2d(fit.predict(rows, params))
        k = loss.argmin(1)
        inside = (k > 0) & (k < len(fine) - 1)
        k = np.clip(k, 1, len(fine) - 2)
        a, b, c = (loss[np.arange(len(loss)), k + d] for d in (-1, 0, 1))
        bend = a - 2 * b + c
        shift = np.where(bend > 0, 0.5 * (a - c) / np.where(bend > 0, bend, 1.0), 0.0)
        return np.where(inside, np.exp(np.log(fine[k]) + shift * np.log(fine[1] / fine[0])), np.nan)

    estimate = float(best(fit.params.to_frame().T)[0])
    if not np.isfinite(estimate):
        return _Bottom(np.nan, np.nan, np.nan, False, "")
    if spreads.resampling is None:
        return _Bottom(estimate, np.nan, np.nan, True, "")
    made_ = spreads.resampling.interval(best, spreads.level, log=True)
    ok = bool(made_.valid)
    return _Bottom(
        estimate, float(made_.low), float(made_.high), ok, f"{spreads.resampling.kind} of ln r*" if ok else ""
    )


def _frame(axes: Any, panels: int, columns: int, grid: Array, y: str) -> None:
    flat = axes.ravel()[:panels]
    for ax in flat:
        style.set_log_limits(ax, "x", grid, pad=0.0)
        style.log_axis(ax, "x", "plain", most=5)
    # limits from points and curves: bands far outside the runs may run off the panel
    values = [line.get_ydata() for ax in flat for line in ax.lines if len(line.get_ydata()) > 2]
    scatters = [c for ax in flat for c in ax.collections if isinstance(c, PathCollection)]
    values += [np.asarray(c.get_offsets(), dtype=np.float64)[:, 1] for c in scatters]
    every = np.concatenate([np.asarray(v, dtype=np.float64) for v in values])
    low, high = float(np.nanmin(every)), float(np.nanmax(every))
    for ax in flat:
        ax.set_ylim(low - 0.08 * (high - low), high + 0.22 * (high - low))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    for k, ax in enumerate(flat):
        if k + columns >= panels:  # the lowest panel of its column
            ax.set_xlabel(AXIS_LABEL["aspect"])
            ax.tick_params(labelbottom=True)
        if k % columns == 0:
            ax.set_ylabel("Loss above optimum (%)" if y == "percent" else "Loss above optimum\n(nats/token)")

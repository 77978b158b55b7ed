"""Loss against size, tokens or compute, with the fitted law and its band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PathCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.figures import grids
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.uncertainty import Resampling

Array = NDArray[np.float64]
Scale = Literal["params", "tokens", "flops"]

AXIS_LABEL = {
    "params": r"Parameters $N$",
    "tokens": r"Training tokens $D$",
    "flops": r"Training compute $6ND$ (FLOPs)",
    "loss": "Loss (nats/token)",
    "aspect": r"Aspect ratio $r$ = width/depth",
}
KIND: dict[str, style.Kind] = {
    "params": "count",
    "tokens": "count",
    "flops": "power",
    "aspect": "plain",
    "loss": "plain",
}
_SYMBOL = {"params": "N", "tokens": "D"}
_POINTS = 121
_LEVELS, _EVERY = 5, 8  # curves by default: one for each of up to eight sizes, five for more
_RASTER = 3000  # points from which on a scatter is an image inside the vector file


@figure("loss_vs_scale")
def loss_vs_scale(
    fit: Fit,
    x: Scale = "params",
    *,
    levels: Sequence[float] | None = None,
    rows: Literal["all", "final"] = "all",
    uncertainty: Resampling | grids.Spread = "jackknife",
    level: float = 0.95,
    width: style.Width = "column",
) -> Figure:
    """Runs and the fitted law against params, tokens or FLOPs, at several levels of the other variable.

    One law: points and curves are coloured by the other variable. A fit by a column: one colour per group, each curve at
    the geometric median of the other variable, and runs moved to that value along the law (partial residuals).

    Parameters
    ----------
    levels : values of the other variable (params or tokens) at which curves are drawn; by default those that were run,
        or five of them where they are more than eight.
    rows : "final" shows the last row of each run only; the law is the same.
    uncertainty : "jackknife" (by run), a Resampling of this fit, or "none", which the figure then says.

    Raises
    ------
    ConfigError
        The law does not depend on x, or a level is not positive.
    """
    spreads = grids.Spreads.of(fit, uncertainty, level)
    if x not in ("params", "tokens", "flops"):
        raise ConfigError(f"x is {x!r}: loss is drawn against 'params', 'tokens' or 'flops'")
    other = _other(fit, x)
    data = _data(fit, x, other)
    shown = grids.last_rows(fit) if rows == "final" else np.ones(len(fit.runs), bool)
    made = style.new_figure(width, 2.55)
    ax = made.add_subplot()
    style.set_log_limits(ax, "x", data[x])
    if fit.law.by is None:
        notes = _one_law(made, ax, fit, x, other, data, shown, levels, spreads)
    else:
        notes = _by_group(made, ax, fit, x, other, data, shown, levels, spreads)
    notes.append(_floor(ax, fit, spreads))
    style.set_log_limits(ax, "y", _drawn(ax))
    style.log_axis(ax, "x", KIND[x])
    if x != "flops":
        grids.label_own_sizes(ax, data[x], KIND[x])
    style.log_axis(ax, "y", "plain", most=6)
    ax.set_xlabel(AXIS_LABEL[x])
    ax.set_ylabel(AXIS_LABEL["loss"])
    style.footnote(made, " ".join(n for n in [*notes, spreads.note] if n))
    return made


def _other(fit: Fit, x: Scale) -> str | None:
    reads = fit.law.reads
    has = {"params": bool(reads & {"params", "depth", "width"}), "tokens": "tokens" in reads}
    if fit.law.function is not None:
        has = {name: name in fit.runs for name in has}
    if x == "flops" and not all(has.values()):
        raise ConfigError(f"law {fit.law.key!r} does not read both params and tokens: no loss against FLOPs")
    if x != "flops" and not has[x]:
        raise ConfigError(f"law {fit.law.key!r} does not depend on {x}; it reads {', '.join(sorted(reads))}")
    if x == "params":
        return "tokens" if has["tokens"] else None
    return "params" if has["params"] else None


def _data(fit: Fit, x: Scale, other: str | None) -> dict[str, Array]:
    out: dict[str, Array] = {}
    if "params" in (x, other) or x == "flops":
        out["params"] = grids.sizes(fit)
    if "tokens" in (x, other) or x == "flops":
        out["tokens"] = grids.tokens(fit)
    if x == "flops":
        out["flops"] = 6 * out["params"] * out["tokens"]
    return out


def _levels(data: Array, levels: Sequence[float] | None) -> list[float]:
    if levels is None:
        return grids.own_levels(data, _LEVELS, every=_EVERY)
    if not len(levels) or not all(np.isfinite(v) and v > 0 for v in levels):
        raise ConfigError(f"levels must be positive numbers, not {list(levels)}")
    return sorted(float(v) for v in levels)


def _columns(x: Scale, at: Array, other: str | None, value: float) -> dict[str, Any]:
    if x == "flops":
        return {"params": value, "tokens": at / (6 * value)}
    return {x: at} | ({other: value} if other else {})


def _one_law(
    made: Figure, ax: Axes, fit: Fit, x: Scale, other: str | None, data: dict[str, Array], shown: NDArray[np.bool_],
    levels: Sequence[float] | None, spreads: grids.Spreads,
) -> list[str]:  # fmt: skip
    loss = fit.runs["loss"].to_numpy(np.float64)
    raster = int(shown.sum()) > _RASTER
    grid = np.geomspace(data[x].min(), data[x].max(), _POINTS)
    given = frozenset({x, other or x, "params", "tokens"})
    if other is None:
        ax.scatter(data[x][shown], loss[shown], s=7, color=style.GREY, alpha=0.6, lw=0, rasterized=raster, label="runs")
        _curve(ax, grid, spreads.band(fit, grids.rows_at(fit, {x: grid})), style.colour_of(0), "-", "law")
        return [grids.held(fit, given)]
    values = _levels(data[other], levels)
    norm = LogNorm(min(data[other].min(), values[0]), max(data[other].max(), values[-1]) * (1 + 1e-9))
    colours = style.ordered_map()
    ax.scatter(
        data[x][shown],
        loss[shown],
        c=data[other][shown],
        cmap=colours,
        norm=norm,
        s=6,
        alpha=0.55,
        lw=0,
        rasterized=raster,
    )
    for value in values:
        near = grid
        if x == "flops":  # a size is drawn over the tokens that runs have, not beyond
            near = np.geomspace(6 * value * data["tokens"].min(), 6 * value * data["tokens"].max(), _POINTS)
        band = spreads.band(fit, grids.rows_at(fit, _columns(x, near, other, value)))
        _curve(ax, near, band, colours(norm(value)), "-", style.count_label(value))
    bar = made.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.015, aspect=28)
    bar.ax.yaxis.set_major_locator(FixedLocator(_labelled(values, norm)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.count_label(v)))
    bar.ax.tick_params(length=2.5, pad=2)
    bar.outline.set_linewidth(0.4)
    bar.set_label(AXIS_LABEL[other])
    return [grids.held(fit, given)]


def _labelled(values: list[float], norm: LogNorm) -> list[float]:
    """Levels whose labels beside a colour bar leave room for each other, from the largest down."""
    kept: list[float] = []
    for value in values[::-1]:
        if not kept or norm(kept[-1]) - norm(value) >= 0.05:
            kept.append(value)
    return kept[::-1]


def _by_group(
    made: Figure, ax: Axes, fit: Fit, x: Scale, other: str | None, data: dict[str, Array], shown: NDArray[np.bool_],
    levels: Sequence[float] | None, spreads: grids.Spreads,
) -> list[str]:  # fmt: skip
    value = 0.0
    if other is not None:
        value = _levels(data[other], levels)[0] if levels is not None else float(f"{grids.middle(data[other]):.2g}")
    for k, (group, mask) in enumerate(grids.groups(fit)):
        own = mask & shown
        if not own.any():
            continue
        colour, dash = style.colour_of(k), style.dash_of(k)
        at = data[x][own]
        moved = grids.rows_at(fit, _columns(x, at, other, value), group=group)
        points = fit.predict(moved) * np.exp(fit.residuals[own])
        ax.scatter(at, points, s=9, color=colour, marker=style.marker_of(k), alpha=0.6, lw=0,
                   rasterized=len(at) > _RASTER)  # fmt: skip
        grid = np.geomspace(at.min(), at.max(), _POINTS)
        band = spreads.band(fit, grids.rows_at(fit, _columns(x, grid, other, value), group=group))
        _curve(ax, grid, band, colour, dash, str(group))
    style.group_legend(made, ax, str(fit.law.by))
    where = f"${_SYMBOL[other]}$ = {style.count_label(value)}" if other else ""
    told = f"Curves at {where}; runs moved there along the law." if other else ""
    return [told, grids.held(fit, frozenset({"params", "tokens", "flops"})).replace("Curves at", "Shape held at")]


def _curve(ax: Axes, x: Array, band: grids.Band, colour: Any, dash: Any, label: str) -> None:
    if np.isfinite(band.low).any():
        ax.fill_between(x, band.low, band.high, color=colour, alpha=style.BAND, lw=0, zorder=2)
    ax.plot(x, band.estimate, color=colour, ls=dash, label=label, zorder=3)


def _floor(ax: Axes, fit: Fit, spreads: grids.Spreads) -> str:
    """The irreducible loss as a line with its interval; in words where it lies so far below that it would squeeze the rest."""
    name = fit.law.floor
    keys = [n for n in fit.params.index if name is not None and n.split("[")[0] == name]
    drawn = np.log(_drawn(ax))
    low, high = np.nanmin(drawn), np.nanmax(drawn)
    reach = float(np.exp(low - 0.7 * (high - low)))  # how far down a line may still lie
    below = []
    for k, key in enumerate(keys):
        value = float(fit.params[key])
        limits, ends = "", (np.nan, np.nan)
        if spreads.resampling is not None and key in spreads.resampling.params:
            table = spreads.resampling.conf_int(spreads.level)
            ends = float(table.loc[key, "low"]), float(table.loc[key, "high"])
            limits = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends[0] < ends[1] else " (fixed)"
        if value < reach:
            below.append(f"{key} = {value:.3g}{limits}")
            continue
        colour = style.GREY if key == name else style.colour_of(k)
        if np.isfinite(ends).all():
            ax.axhspan(max(ends[0], reach), ends[1], color=colour, alpha=0.13, lw=0, zorder=0)
        ax.axhline(value, color=colour, lw=0.8, ls=(0, (4, 2)), zorder=1, label="_floor")
        ax.annotate(f"irreducible loss ${_plain(key)}$ = {value:.3g}{limits}", (0.02, value),
                    xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points", color=colour,
                    fontsize=style.SMALL)  # fmt: skip
    return f"Irreducible loss, below the axis: {', '.join(below)}." if below else ""


def _plain(key: str) -> str:
    name, _, group = key.partition("[")
    return name + (rf"_{{\mathrm{{{group.rstrip(']')}}}}}".replace("_ln", r"\_ln") if group else "")


def _drawn(ax: Axes) -> Array:
    """Heights of all that is drawn in data coordinates: points, curves, bands, the floor."""
    values = [np.asarray(line.get_ydata(), dtype=np.float64).ravel() for line in ax.lines]
    for collection in ax.collections:
        if isinstance(collection, PathCollection):  # a scatter
            values.append(np.asarray(collection.get_offsets(), dtype=np.float64)[:, 1])
        else:
            values += [np.asarray(path.vertices, dtype=np.float64)[:, 1] for path in collection.get_paths()]
    return np.concatenate(values)

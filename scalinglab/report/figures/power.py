"""What a depth study can see: the smallest detectable gap against seeds per shape and against shapes per architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, ScalarFormatter
from numpy.typing import NDArray

from scalinglab.detection import detectable
from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.figures.benefit import checked, few_ticks, primary, shorten
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    import pandas as pd

    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.cells import CellModel

Array = NDArray[np.float64]
_ROOM = 0.052  # of the axis, for one name beside it


@dataclass(frozen=True)
class Power:
    """Smallest effects found with power .8 at two-sided .05, of the gap between the two depths of the report (nats).

    seeds [k] : per shape. by_seeds : if all of the error is seed noise; flat : if none is (seeds don't help), NaN where the
    share of seeds was estimated, and then by_seeds is at that share. shapes [j], by_shapes : at today's seeds, for that many
    shapes per architecture and size spread evenly between the two depths. now : of today's design, at `seeds_now`, `shapes_now`.
    share : part of the variance of a cell mean that is seed noise, NaN where every shape has one run.
    """

    seeds: Array
    by_seeds: Array
    flat: float
    shapes: Array
    by_shapes: Array
    now: float
    seeds_now: float
    shapes_now: int
    share: float


def power_of(report: DepthReport, *, most: int = 12) -> Power:
    """The curves of `depth_power`, for the design and error of a report on cell means.

    Raises
    ------
    ConfigError
        A report by another method than cell means.
    """
    outcome = checked(report)
    model = outcome.model
    if model is None:
        raise ConfigError("power curves need the cell means of matched shapes: this report is by " + outcome.method)
    effects = [e for e in outcome.effects.subset("E1") if e.usable]
    if not effects:
        raise ConfigError("power curves need an estimate with an error")
    typical = sorted(effects, key=lambda e: e.se)[len(effects) // 2]
    groups = outcome.intake.runs.groupby(["architecture", "group", "depth", "width"])["loss"]
    left = float((groups.size() - 1).sum())
    variance = float(np.mean(list(model.s2.values())))
    share = math.nan
    if left > 0 and variance > 0:
        noise = float(((groups.size() - 1) * groups.var().fillna(0.0)).sum()) / left
        share = min(1.0, noise / float(model.table["runs"].mean()) / variance)
    seeds, seeds_now = np.arange(1, most + 1, dtype=np.float64), float(groups.size().mean())
    part = 1.0 if math.isnan(share) else share
    scale = np.sqrt(1 - part + part * seeds_now / seeds)
    by_seeds = np.array([detectable(typical.se * s, typical.df) for s in scale])
    per_block = model.table.groupby(["architecture", "block"])["x"].nunique()
    shapes_now = int(per_block.median())
    shapes = np.arange(model.degree + 2, max(12, shapes_now + 3))
    made = np.array([_of_shapes(model, variance, int(m), per_block) for m in shapes])
    # anchored at today's value: today's shapes aren't spread exactly evenly
    made = made * typical.mde / float(np.interp(shapes_now, shapes, made))
    return Power(
        seeds, by_seeds, typical.mde if math.isnan(share) else math.nan, shapes.astype(np.float64), made, typical.mde,
        seeds_now, shapes_now, share,
    )  # fmt: skip


def _of_shapes(model: CellModel, variance: float, shapes: int, per_block: pd.Series) -> float:
    """Smallest effect with that many shapes per block, evenly spread in x between the two depths."""
    blocks = max(1, round(len(per_block) / len(model.architectures)))
    arms = len(model.architectures) if model.error == "pooled" else 1
    z = np.linspace(model.x_shallow, model.x_deep, shapes) - 0.5 * (model.x_shallow + model.x_deep)
    X = np.stack([z**k for k in range(model.degree + 1)], 1)
    p = np.concatenate([[0.0], model.powers("gap")])
    se = math.sqrt(variance * float(p @ np.linalg.pinv(X.T @ X) @ p) / blocks)
    return detectable(se, arms * (blocks * (shapes - 1) - model.degree))


@figure("depth_power")
def depth_power(report: DepthReport, *, width: style.Width = "page") -> Figure:
    """The smallest depth benefit found with power .8, against seeds per shape and against shapes per architecture.

    Where every shape has one run, what share of the error is seed noise isn't known: the band spans from all of it (lower
    edge) to none (upper edge: seeds don't help). Ticks at the right are the sizes of the estimates of this report.

    Raises
    ------
    ConfigError
        Not a depth report, or one by another method than cell means.
    """
    made_of = power_of(report)
    outcome = checked(report)
    page = style.inches(width) > 5
    made = style.new_figure(width, 2.5 if page else 4.4)
    left, right = made.subplots(1, 2, sharey=True) if page else made.subplots(2, 1, sharey=True)
    colour = style.colour_of(0)
    sizes = [abs(e.estimate) for e in primary(report) if e.unit == "nats" and abs(e.estimate) < 2 * made_of.now]
    seen = np.concatenate([made_of.by_seeds, [made_of.now], sizes, made_of.by_shapes[made_of.shapes >= 5]])
    top = min(1.1 * float(np.nanmax(seen)), 3 * made_of.now)
    if math.isfinite(made_of.flat):
        more = made_of.seeds >= made_of.seeds_now
        left.fill_between(
            made_of.seeds[more], made_of.by_seeds[more], made_of.flat, color=colour, alpha=style.BAND, lw=0
        )
        left.plot(
            made_of.seeds[more], np.full(more.sum(), made_of.flat), color=colour, ls=style.DASHES[1], label="_flat"
        )
        left.plot(made_of.seeds[more], made_of.by_seeds[more], color=colour, label="_seeds")
    else:
        left.plot(made_of.seeds, made_of.by_seeds, color=colour, label="_seeds")
    left.set_xlabel("Seeds per shape")
    right.plot(made_of.shapes, made_of.by_shapes, color=colour, label="_shapes")
    right.set_xlabel("Shapes per architecture and size")
    for ax, at in ((left, made_of.seeds_now), (right, made_of.shapes_now)):
        ax.plot([at], [made_of.now], marker="o", ms=5, mfc="white", mec=style.INK, ls="", zorder=5, label="_now")
        ax.annotate("these runs", (at, made_of.now), xytext=(5, 5), textcoords="offset points", fontsize=style.SMALL)
        ax.axhspan(0, outcome.margin, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
        ax.set_ylim(0, top)
        if ax is left:
            ax.xaxis.set_major_locator(FixedLocator([1, *made_of.seeds[1::2]]))
        else:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        ax.xaxis.set_major_formatter(ScalarFormatter(useMathText=False))
        few_ticks(ax.yaxis, 7)
    left.set_ylabel("Smallest gap found\n(nats/token)")
    if not page:
        right.set_ylabel("Smallest gap found\n(nats/token)")
    _estimates(right, report, top)
    how = (
        "share of seed noise unknown (one run per shape): solid if all, dashed if none of the error is"
        if math.isnan(made_of.share)
        else f"{100 * made_of.share:.0f}\u00a0% of the error is seed noise"
    )
    style.footnote(
        made,
        f"Power .8 at two-sided .05; {how}. Grey: margin. Right ticks: sizes of the estimates, as far as they fit.",
    )
    return made


def _estimates(ax: Axes, report: DepthReport, top: float) -> None:
    """Sizes of the estimates as ticks on the right edge; the largest are named."""
    found = sorted((abs(e.estimate), e.architecture) for e in primary(report) if e.unit == "nats")[::-1]
    inside = [(v, a) for v, a in found if v <= top]
    for value, _ in inside:
        ax.plot(
            [0.985, 1.0], [value, value], transform=ax.get_yaxis_transform(), color=style.INK, lw=0.9, label="_size"
        )
    named = inside[: int(1 / _ROOM)]
    for (value, name), place in zip(named, _apart([v for v, _ in named], top), strict=True):
        ax.annotate("", (1.0, value), xycoords=("axes fraction", "data"), xytext=(1.025, place), textcoords=("axes fraction", "data"),
                    annotation_clip=False, arrowprops={"arrowstyle": "-", "lw": 0.4, "color": style.GREY, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
        ax.annotate(shorten(name, 16), (1.03, place), xycoords=("axes fraction", "data"), fontsize=6.2, color=style.GREY,
                    va="center", annotation_clip=False)  # fmt: skip


def _apart(values: list[float], top: float) -> list[float]:
    """Heights of names for descending values, at least one line apart, as near to their values as that leaves."""
    room, places = _ROOM * top, list(values)
    for k in range(len(places) - 2, -1, -1):  # the lowest keeps its place
        places[k] = max(places[k], places[k + 1] + room)
    for k in range(len(places)):  # and none leaves the axis
        places[k] = min(places[k], top if k == 0 else places[k - 1] - room)
    return places

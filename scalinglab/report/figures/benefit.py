"""Depth effects of a report: forest with margin, loss against shape per architecture, equivalence over shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.depth_curves import ShapeCurve, shape_curves
from scalinglab.report.figures.curves import AXIS_LABEL
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.analysis import Outcome
    from scalinglab.depth_benefit.effects import Effect

Array = NDArray[np.float64]

_OUTCOMES = {"EQUIVALENT": ("within margin", 2), "REFUTED": ("beyond margin", 1), "OPEN": ("open", 0)}
_COLOURS = ("blue", "orange", "green")  # of the palette, in words
UNITS = {"E1": "nats/token", "E2": "nats/token", "E1s": "nats/token per e-fold of depth"}
TITLES = {
    "E1": "Depth benefit $B$, loss(shallow) \N{MINUS SIGN} loss(deep)",
    "E2": "Depth benefit at equal FLOPs",
    "E1s": "Slope \N{MINUS SIGN}d loss / d ln depth",
}


@figure("depth_forest")
def depth_forest(report: DepthReport, *, width: style.Width = "page") -> Figure:
    """The primary effect of each architecture with its 95 % (thin) and 90 % (thick) interval, over the margin of equivalence.

    Right of 0 deeper is better. An architecture is equivalent where its thick bar lies inside the grey band. Filled markers:
    the label is read off the intervals; hollow: the design doesn't bear a claim, and the label says why.

    Raises
    ------
    ConfigError
        Not a depth report, or one without effects.
    """
    effects = primary(report)
    outcome = checked(report)
    page = style.inches(width) > 5
    made = style.new_figure(width, 0.85 + (0.24 if page else 0.31) * len(effects))
    ax = made.add_subplot()
    margin = effects[0].of_gap(outcome.margin)
    if math.isfinite(margin):
        ax.axvspan(-margin, margin, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
    ax.axvline(0, color=style.GREY, lw=0.6, zorder=0)
    for k, e in enumerate(effects):
        verdict = report.verdicts[e.architecture]
        claims = verdict.label == verdict.reading
        colour = style.colour_of(0) if e.estimate >= 0 else style.colour_of(1)
        ax.hlines(k, *e.interval(0.95), color=colour, lw=0.9)
        ax.hlines(k, *e.interval(0.90), color=colour, lw=2.2)
        ax.plot([e.estimate], [k], marker="o" if e.estimate >= 0 else "s", ms=4.6, mfc=colour if claims else "white",
                mec=colour, mew=1.0, ls="", zorder=4)  # fmt: skip
    ax.set_ylim(len(effects) - (0.4 if page else 0.6), -0.6 if page else -0.75)
    ax.set_yticks(range(len(effects)), [shorten(e.architecture) for e in effects] if page else [""] * len(effects))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"{TITLES[report.options.estimand]} ({UNITS[report.options.estimand]})")
    few_ticks(ax.xaxis, 7 if page else 5)
    digits = decimals([x.se for x in effects])
    for k, e in enumerate(effects):
        label = report.verdicts[e.architecture].label
        if page:
            low, high = e.interval(0.95)
            value = f"{e.estimate:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "\N{MINUS SIGN}")
            _write(ax, (1, k), (6, 0), value)
            _write(ax, (1, k), (102, 0), label + "\u00a0")
        else:  # no room beside the bars: a line above each
            _write(ax, (0, k), (0, 8), shorten(e.architecture))
            _write(ax, (1, k), (0, 8), label, colour=style.GREY, ha="right", fontsize=6.0)
    ax.text(
        0.01,
        1.01,
        "\N{LEFTWARDS ARROW} shallower is better",
        transform=ax.transAxes,
        fontsize=style.SMALL,
        color=style.GREY,
        va="bottom",
    )
    ax.text(0.99, 1.01, "deeper is better \N{RIGHTWARDS ARROW}", transform=ax.transAxes, fontsize=style.SMALL, color=style.GREY, ha="right", va="bottom")  # fmt: skip
    unit = "nats per e-fold of depth" if report.options.estimand == "E1s" else "nats"
    band = f"Grey: margin of equivalence, ±{margin:.2g} {unit} ({100 * report.options.margin:g}\u00a0% compute). " if math.isfinite(margin) else ""  # fmt: skip
    style.footnote(
        made,
        f"{band}Thin bars 95\u00a0%, thick 90\u00a0% intervals ({effects[0].method}). Circles, blue: estimate above zero; squares, orange: "
        "below. Hollow: the design doesn't bear a claim.",
    )
    return made


def _write(ax: Axes, at: tuple[float, float], off: tuple[float, float], text: str, *, colour: str = style.INK,
           ha: str = "left", fontsize: float = style.SMALL) -> None:  # fmt: skip
    ax.annotate(text, at, xycoords=("axes fraction", "data"), xytext=off, textcoords="offset points", color=colour, ha=ha,
                fontsize=fontsize, va="center", annotation_clip=False)  # fmt: skip


def decimals(errors: list[float]) -> int:
    """Decimals at which the smallest of these errors has two digits."""
    known = [s for s in errors if math.isfinite(s) and s > 0]
    return int(min(6, max(2, 1 - math.floor(math.log10(min(known)))))) if known else 4


@figure("depth_interaction")
def depth_interaction(
    report: DepthReport,
    *,
    width: style.Width = "page",
    level: float = 0.95,
    curves: Sequence[ShapeCurve] | None = None,
) -> Figure:
    """Loss against shape, a panel per architecture: cell means, single seeds, fitted curve with band, and the reference's curve.

    The axis is depth where one size was trained, else the aspect ratio width/depth, deeper to the right.
    curves : those of `shape_curves(report)`, where they are at hand.

    Raises
    ------
    ConfigError
        Not a depth report, or one without a depth contrast.
    """
    outcome = checked(report)
    curves = shape_curves(report) if curves is None else curves
    by_depth = _one_size(curves)
    reference = next((c for c in curves if c.architecture == report.options.reference and len(c.loss)), None)
    made, axes = panels(width, len(curves), report)
    shown = [np.concatenate([c.loss, c.cells["loss"], c.seeds["loss"]]) for c in curves]
    least, most = float(np.nanmin(np.concatenate(shown))), float(np.nanmax(np.concatenate(shown)))
    bounds = 2 * least - most, 2 * most - least  # once the range of the losses, on both sides
    limits, cut = list(shown), False
    for ax, c in zip(axes, curves, strict=False):
        at, x = _abscissa(c, by_depth)
        if reference is not None and c is not reference:
            ax.plot(_abscissa(reference, by_depth)[0], reference.loss, color=style.GREY, lw=0.9, ls=style.DASHES[1],
                    label=f"_{reference.architecture}")  # fmt: skip
        colour = style.colour_of(0)
        if len(c.loss):
            low, high = c.band(level)
            ax.fill_between(at, low, high, color=colour, alpha=style.BAND, lw=0)
            ax.plot(at, c.loss, color=colour, label="_curve")
            # all of the bands are shown, unless they would squeeze the losses
            cut |= bool((low < bounds[0]).any() or (high > bounds[1]).any())
            limits += [np.clip(low, *bounds), np.clip(high, *bounds)]
        elif len(c.cells) > 1:
            mean = c.cells.groupby("depth" if by_depth else "aspect")["loss"].mean()
            ax.plot(mean.index, mean.to_numpy(), color=colour, lw=0.8, ls=style.DASHES[2], label="_mean")
        if len(c.seeds):
            ax.scatter(
                c.seeds["depth" if by_depth else "aspect"], c.seeds["loss"], s=3.5, color=colour, alpha=0.6, lw=0
            )
        ax.scatter(x, c.cells["loss"], s=13, color=colour, edgecolor="white", lw=0.4, zorder=4)
        ax.set_title(shorten(c.architecture), fontsize=style.SMALL)
        for depth in lost_depths(report, c.architecture) if by_depth else ():
            ax.plot(
                [depth],
                [0.97],
                marker="x",
                ms=4,
                color=style.colour_of(1),
                transform=ax.get_xaxis_transform(),
                clip_on=False,
            )
    _frame(axes, curves, by_depth, limits)
    sides(axes, len(curves), _label(by_depth), "Loss (nats/token)")
    against = f" Dashed: {shorten(reference.architecture)}." if reference is not None and len(curves) > 1 else ""
    lost = " Crosses: lost runs." if len(outcome.intake.lost) and by_depth else ""
    band = (
        f" Bands: {100 * level:g}\u00a0% pointwise{', cut at the axes' if cut else ''}." if len(curves[0].loss) else ""
    )
    seeds = "; small: single seeds" if any(len(c.seeds) for c in curves) else ""
    style.footnote(made, f"Points: {_points(outcome, by_depth)}{seeds}.{band}{against}{lost}")
    return made


def _points(outcome: Outcome, by_depth: bool) -> str:
    """What the points of the interaction are."""
    if outcome.fit is not None:
        return "means of runs, moved to one size and budget along the law"
    if outcome.model is not None and outcome.model.corrected:
        return "cell means, moved to equal N and D at the rates of the law"
    return "cell means, as logged" if by_depth else "cell means, sizes moved onto one another along the fit"


@figure("depth_equivalence")
def depth_equivalence(
    report: DepthReport,
    *,
    width: style.Width = "page",
    level: float = 0.95,
    curves: Sequence[ShapeCurve] | None = None,
) -> Figure:
    """Loss above the best shape, with its one-sided upper limit, against the margin of equivalence.

    Titles say what the simultaneous test over all pairs of shapes says ("shape hardly matters" is `within margin`); see
    `hypotheses.sup_equivalence`. curves : those of `shape_curves(report)`, where they are at hand.

    Raises
    ------
    ConfigError
        Not a depth report, or a design without a fitted curve.
    """
    outcome = checked(report)
    every = shape_curves(report) if curves is None else curves
    curves = [c for c in every if len(c.loss) and np.isfinite(c.cov).all()]
    if not curves:
        raise ConfigError("equivalence over shapes needs a fitted curve: three or more shapes per architecture")
    by_depth = _one_size(curves)
    margin = outcome.margin
    made, axes = panels(width, len(curves), report)
    tops = []
    seen: dict[str, str] = {}
    for ax, c in zip(axes, curves, strict=False):
        at = _abscissa(c, by_depth)[0]
        gap, low, high = c.above_best(level)
        codes = c.range_test(margin, level=level).codes
        word, shade = next(v for k, v in _OUTCOMES.items() if k in codes)
        colour = style.colour_of(shade)
        seen[word] = _COLOURS[shade]
        ax.axhspan(0, margin, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
        ax.axhline(margin, color=style.GREY, lw=0.6, ls=style.DASHES[1], label="_margin")
        ax.fill_between(at, np.maximum(low, 0), high, color=colour, alpha=style.BAND, lw=0)
        ax.plot(at, gap, color=colour, label="_gap")
        ax.plot(at, high, color=colour, lw=0.6, label="_upper")
        ax.set_title(f"{shorten(c.architecture)}: {word}", fontsize=style.SMALL)
        tops.append(np.concatenate([gap, [margin], high]))
    _frame(axes, curves, by_depth, tops, zero=True)
    sides(axes, len(curves), _label(by_depth), "Loss above best\n(nats/token)")
    style.footnote(made, f"Grey: within {100 * report.options.margin:g}\u00a0% compute ({margin:.2g} nats) of the best shape. "
                         f"Line: fitted loss above the best shape; bands: one-sided {100 * level:g}\u00a0% limits. Colour as the title says: "
                         + ", ".join(f"{colour} {word}" for word, colour in sorted(seen.items())) + ".")  # fmt: skip
    return made


# ---- what the figures of a depth report share ----------------------------------------------------------------------------
def checked(report: Any) -> Outcome:
    """The outcome of a depth report.

    Raises
    ------
    ConfigError
        Something else than a depth report, or one without a depth contrast.
    """
    from scalinglab.depth_benefit.result import DepthReport

    if not isinstance(report, DepthReport):
        raise ConfigError("this figure draws a depth report: make one with `scalinglab depth` or depth_benefit")
    if report.outcome is None:
        raise ConfigError("this depth report has no depth contrast: there is nothing to draw")
    return report.outcome


def primary(report: DepthReport) -> list[Effect]:
    """The effects that the labels are about, one per architecture and group.

    Raises
    ------
    ConfigError
        There is none.
    """
    from scalinglab.depth_benefit.analysis import is_primary

    outcome = checked(report)
    found = [e for e in outcome.effects if is_primary(e, report.options) and e.architecture in report.verdicts]
    if not found:
        raise ConfigError("this depth report has no effect to draw: its design gives no estimate")
    return found


def lost_depths(report: DepthReport, architecture: str) -> list[float]:
    """Depths at which runs of an architecture were lost."""
    assert report.outcome is not None
    lost = report.outcome.intake.lost
    return sorted({float(d) for d in lost.loc[lost["architecture"] == architecture, "depth"]}) if len(lost) else []


def shorten(name: str, most: int = 22) -> str:
    """A name that fits a panel; dollars are no mathtext here."""
    text = name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return " ".join(text.split()).replace("$", r"\$")


def panels(width: style.Width, count: int, report: DepthReport) -> tuple[Figure, list[Axes]]:
    """A grid of panels with shared axes; those not needed are hidden."""
    wide = style.inches(width)
    across = min(count, 2 if wide <= 5 else {6: 3, 7: 4, 8: 4}.get(count, 5))
    lines = -(-count // across)
    made = style.new_figure(width, 0.6 + 1.3 * lines if count > 1 else 2.6)
    grid = made.subplots(lines, across, squeeze=False, sharex=True, sharey=True)
    flat = list(grid.ravel())
    for ax in flat[count:]:
        ax.set_visible(False)
    return made, flat[:count]


def few_ticks(axis: Axis, most: int, *, steps: Sequence[float] = (1, 2, 2.5, 5, 10)) -> None:
    """Round linear ticks, written as text: as mathtext, the default of the style, each label would be parsed."""
    axis.set_major_locator(MaxNLocator(nbins=most, steps=list(steps)))
    axis.set_major_formatter(ScalarFormatter(useMathText=False))


def sides(axes: list[Axes], count: int, x: str, y: str) -> None:
    """Axis labels at the left and at the lowest panel of each column only."""
    grid = axes[0].get_subplotspec()
    across = 1 if grid is None else grid.get_gridspec().ncols
    for k, ax in enumerate(axes):
        if k % across == 0:
            ax.set_ylabel(y)
        if k + across >= count:
            ax.set_xlabel(x)
            ax.tick_params(labelbottom=True)


def _one_size(curves: Sequence[ShapeCurve]) -> bool:
    """Whether each depth stands for one shape: then depth is the axis that people think in."""
    every = {
        (d, round(math.log(r), 6)) for c in curves for d, r in zip(c.cells["depth"], c.cells["aspect"], strict=True)
    }
    return len({d for d, _ in every}) == len(every) and all(float(d).is_integer() for d, _ in every)


def _abscissa(c: ShapeCurve, by_depth: bool) -> tuple[Array, Array]:
    name = "depth" if by_depth else "aspect"
    return (c.depth if by_depth else c.aspect), c.cells[name].to_numpy(np.float64)


def _label(by_depth: bool) -> str:
    return "Depth (blocks)" if by_depth else AXIS_LABEL["aspect"] + " (deeper \N{RIGHTWARDS ARROW})"


def _frame(
    axes: list[Axes], curves: Sequence[ShapeCurve], by_depth: bool, seen: list[Array], *, zero: bool = False
) -> None:
    every = np.concatenate([_abscissa(c, by_depth)[1] for c in curves])
    values = np.concatenate(seen)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    pad = 0.06 * (high - low or 1e-3)
    for ax in axes:
        style.set_log_limits(ax, "x", every, pad=0.06)
        if by_depth:
            ticks = _apart(sorted(set(every)), ax)
            ax.xaxis.set_major_locator(FixedLocator(ticks))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            style.log_axis(ax, "x", "plain", most=4)
            ax.set_xlim(*sorted(ax.get_xlim(), reverse=True))
        ax.set_ylim(0 if zero else low - pad, high + pad)
        few_ticks(ax.yaxis, 5)


def _apart(depths: list[float], ax: Axes) -> list[float]:
    """Depths whose labels leave room for each other on a log axis."""
    span = math.log(depths[-1] / depths[0]) if len(depths) > 1 else 1.0
    room = span * 11 / max(30.0, ax.get_window_extent().width * 72 / 100)
    kept = [depths[0]]
    for d in depths[1:-1]:
        if math.log(d / kept[-1]) >= room and math.log(depths[-1] / d) >= room:
            kept.append(d)
    return kept + ([depths[-1]] if len(depths) > 1 else [])

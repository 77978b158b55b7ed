"""Learning-rate sweeps of a mis-scaling report: envelopes at each depth, drift of the optimum, and what the gap is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.misscaling.contrasts import Estimate
from scalinglab.misscaling.curves import evaluate
from scalinglab.misscaling.report import MisscalingReport
from scalinglab.report import style
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.misscaling.intake import Arm

Array = NDArray[np.float64]

_HEADROOM = 2.2  # windows above the lowest loss that are shown
_PANELS = 12


@figure("lr_envelope")
def lr_envelope(
    report: MisscalingReport,
    *,
    arms: Sequence[tuple[str, str]] | None = None,
    ladder: str | None = None,
    width: style.Width = "page",
) -> Figure:
    """Loss against learning rate, one panel per depth: seed means, fitted curves, and the optimum with its 95 % interval.

    Parameters
    ----------
    arms : (architecture, parametrization); those of the decomposition by default, else all.
    ladder : which set of shapes; the one with most depths by default.

    Raises
    ------
    ConfigError
        Not a mis-scaling report, or no such arm or ladder.
    """
    _check(report, "lr_envelope")
    shown = _arms(report, arms)
    chosen = _ladder(report, ladder, shown)
    cells = report.grids.cells
    depths = sorted(cells["depth"][cells["ladder"] == chosen].unique())[:_PANELS]
    across = min(4 if style.inches(width) > 5 else 2, len(depths))
    down = -(-len(depths) // across)
    made = style.new_figure(width, 0.55 + 1.65 * down)
    axes = np.atleast_1d(np.array(made.subplots(down, across, sharex=True, sharey=len(depths) > 1))).ravel()
    own = (cells["ladder"] == chosen).to_numpy() & np.isin(
        report.grids.arm, [report.grids.arms.index(a) for a in shown]
    )
    top = _limits(report, own)
    crosses, ceiling = _crosses(report, own, shown, top)
    for ax, depth in zip(axes, depths, strict=False):
        rows = np.flatnonzero(own & (cells["depth"] == depth).to_numpy())
        for i in rows:
            _panel(ax, report, int(i), shown.index(report.grids.arms[report.grids.arm[i]]), top, crosses)
        ax.set_title(f"Depth {depth:g}")
    rates = np.exp(report.grids.z[own])
    for k, ax in enumerate(axes):
        ax.set_visible(k < len(depths))
        style.set_log_limits(ax, "x", rates[np.isfinite(rates)])
        style.log_axis(ax, "x", "plain" if np.nanmin(rates) > 1e-3 else "power", most=3)
        if k + across >= len(depths):
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("Learning rate (peak)")
        if k % across == 0:
            ax.set_ylabel("Loss (nats/token)")
    axes[0].set_ylim(top[0], ceiling)
    for ax in axes:
        if crosses:
            ax.axhline(top[1], color=style.PALE, lw=0.6, zorder=0)
        # no ticks among the crosses, whose height is no loss
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(*top)
        ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if top[0] <= t <= top[1]]))
    _legend(made, report, shown)
    seeds = len(report.grids.seeds)
    note = (
        f"Points: mean of {seeds} seed{'s' if seeds > 1 else ''}"
        + (", bars through them: range over seeds" if seeds > 1 else ", no error shown")
        + "; lines: fits, with points outside their window hollow; bars under the curves: optimum and its 95\u00a0% interval, none where it isn't inside what was tried"
        + ("; crosses above the line: diverged or off the axis." if crosses else ".")
    )  # fmt: skip
    floor = report.grids.cells["floor"][own].min() if "floor" in report.grids.cells else np.nan
    if np.isfinite(floor) and floor > top[0]:
        for ax in axes[: len(depths)]:
            ax.axhline(floor, color=style.GREY, lw=0.7, ls=(0, (1, 2)), zorder=1)
        note += " Dotted grey line: floor of the corpus."
    style.footnote(made, note)
    return made


@figure("lr_drift")
def lr_drift(
    report: MisscalingReport,
    *,
    arms: Sequence[tuple[str, str]] | None = None,
    ladder: str | None = None,
    width: style.Width = "column",
) -> Figure:
    """Optimal learning rate against depth, with 95 % intervals and the fitted power of depth.

    Raises
    ------
    ConfigError
        Not a mis-scaling report, or no optimum inside what was tried.
    """
    _check(report, "lr_drift")
    shown = _arms(report, arms)
    chosen = _ladder(report, ladder, shown)
    table = report.envelopes
    made = style.new_figure(width, 2.1 + 0.14 * sum(2 if ";" in p else 1 for _, p in shown))
    ax = made.add_subplot()
    handles = []
    values: list[float] = []
    slopes = [e for arm in shown if (e := _slope(report, arm)) is not None]
    digits = _digits([v for e in slopes for v in _numbers(e)], 2)
    for k, arm in enumerate(shown):
        own = table[
            (table["architecture"] == arm[0]) & (table["parametrization"] == arm[1]) & (table["ladder"] == chosen)
            & np.isfinite(table["ln_optimum"])
        ]  # fmt: skip
        if not len(own):
            continue
        depth = own["depth"].to_numpy(np.float64) * (1 + 0.045 * (k - (len(shown) - 1) / 2))  # side by side
        low, high = own["low"].to_numpy(np.float64), own["high"].to_numpy(np.float64)
        colour = style.colour_of(k)
        ax.vlines(depth, low, high, color=colour, lw=1.0, zorder=2)
        ax.plot(depth, own["optimum_lr"], ls="", marker=style.marker_of(k), ms=4, color=colour, zorder=3)
        values += [*low, *high, *own["optimum_lr"]]
        label = _name(report, arm)
        slope = _slope(report, arm)
        if slope is not None:
            e = slope
            x = own["depth"].to_numpy(np.float64)
            line = np.log(x) * float(e.estimate)
            line += float(np.mean(own["ln_optimum"].to_numpy(np.float64) - line))
            ax.plot(x, np.exp(line), color=colour, ls=style.dash_of(k), lw=1.0, zorder=1)
            value, lo, hi = _signed(_numbers(e), digits)
            label = _wrapped(made, label, f": {value} [{lo}, {hi}]")
        handles.append(
            Line2D([], [], color=colour, marker=style.marker_of(k), ms=4, ls=style.dash_of(k), lw=1.0, label=label)
        )
    if not values:
        raise ConfigError("no shape of these arms has its optimum inside what was tried: there is no drift to draw")
    located = table[(table["ladder"] == chosen) & np.isfinite(table["ln_optimum"])]
    if located["depth"].nunique() < 2:
        raise ConfigError(
            f"one depth alone ({located['depth'].iloc[0]:g}) has its optimum inside what was tried: there is no drift to draw"
        )
    finite = np.array([v for v in values if np.isfinite(v)])
    style.set_log_limits(ax, "x", table["depth"].to_numpy(np.float64), pad=0.08)
    style.set_log_limits(ax, "y", finite, pad=0.08)
    _depth_axis(ax, table[table["ladder"] == chosen]["depth"])
    style.log_axis(ax, "y", "plain" if finite.min() > 1e-3 else "power")
    ax.set_xlabel("Depth (blocks)")
    ax.set_ylabel("Optimal learning rate")
    made.legend(handles=handles, loc="outside upper left", ncols=1, handlelength=2.6)
    note = "Slopes of ln optimal rate on ln depth with 95\u00a0% intervals; bars: 95\u00a0% bootstrap intervals."
    style.footnote(made, f"{note} Equivalent to no drift: within \u00b1{report.margins.drift:g}.")
    return made


@figure("decomposition")
def decomposition(report: MisscalingReport, *, width: style.Width = "column") -> Figure:
    """What the gap in depth gain is made of: U, V, their sum M, and W of each candidate, against the margin.

    Thick bars are 90 % intervals (equivalent if inside the margin), thin ones 95 %.

    Raises
    ------
    ConfigError
        Not a mis-scaling report, or one without contrasts.
    """
    _check(report, "decomposition")
    gains = report.analysis.gains if report.analysis is not None else {}
    names = [n for n in gains if n in ("U", "V", "M") or n.startswith("W:")]
    names = [n for n in names if np.isfinite(gains[n].estimate) and np.isfinite(gains[n].se)]
    if not names:
        raise ConfigError("this report has no contrasts to draw: it lacks arms (see its reasons)")
    states = report.decomposition.set_index("name")["state"]
    made = style.new_figure(width, 0.75 + 0.3 * len(names))
    ax = made.add_subplot()
    margin = report.margins.gain
    ax.axvspan(-margin, margin, color=style.GREY, alpha=0.15, lw=0, zorder=0)
    ax.axvline(0.0, color=style.GREY, lw=0.7, zorder=1)
    reach = [-margin, margin]
    for y, name in enumerate(names):
        e = gains[name]
        value = float(e.estimate)
        colour = style.colour_of(0 if name in ("U", "V") else 1 if name == "M" else 2)
        for level, lw in ((0.95, 1.0), (0.90, 2.6)):
            low, high = (float(v) for v in e.interval(level))
            ax.hlines(y, low, high, color=colour, lw=lw, zorder=2)
            reach += [low, high]
        ax.plot(value, y, marker="o", ms=4.5, color=colour, mec="white", mew=0.6, zorder=3)
    span = max(reach) - min(reach)
    ax.set_xlim(min(reach) - 0.04 * span, max(reach) + 0.5 * span)
    for y, name in enumerate(names):
        e = gains[name]
        (told,) = _signed([float(e.estimate)], 3)
        ax.annotate(f"{told}  {states.get(name, '')}", (0.985, y), xycoords=("axes fraction", "data"),
                    ha="right", va="center", fontsize=style.SMALL)  # fmt: skip
    ax.set_yticks(range(len(names)), [_label(n) for n in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
    ax.set_xlabel("Difference of depth gains (nats/token per e-fold)")
    style.footnote(
        made,
        f"Verdict: {report.verdict}. Grey: margin of equivalence \u00b1{margin:g}. Thick 90\u00a0%, thin 95\u00a0% intervals.",
    )
    return made


def _digits(values: Sequence[float], digits: int) -> int:
    """One more digit where a number would be rounded to zero: limits just beside zero keep their side."""
    return digits + any(v != 0 and float(f"{v:.{digits}f}") == 0 for v in values)


def _signed(values: Sequence[float], digits: int) -> list[str]:
    """Numbers with their signs; a zero has none."""
    texts = [f"{v:+.{digits}f}" for v in values]
    return [t[1:] if float(t) == 0 else t.replace("-", "\u2212") for t in texts]


def _crosses(
    report: MisscalingReport, own: NDArray[np.bool_], shown: Sequence[Arm], top: tuple[float, float]
) -> tuple[dict[int, float], float]:
    """Heights, by index of the arm, for the marks of runs above `top`, one line per arm that has any; and the top of the axis."""
    lost = [
        k for k, arm in enumerate(shown)
        if (report.grids.mean[own & (np.asarray(report.grids.arm) == report.grids.arms.index(arm))] > top[1]).any()
    ]  # fmt: skip
    step = 0.055 * (top[1] - top[0])
    return {k: top[1] + step * (line + 0.8) for line, k in enumerate(lost)}, top[1] + step * (len(lost) + 0.6)


def _panel(
    ax: Axes, report: MisscalingReport, i: int, k: int, top: tuple[float, float], crosses: dict[int, float]
) -> None:
    grids, made = report.grids, report.analysis
    assert made is not None
    colour, z = style.colour_of(k), grids.z[i]
    y = grids.mean[i]
    off = (y > top[1]) | np.isposinf(y)
    there = np.isfinite(y) & ~off & np.isfinite(z)
    used = made.curves.used[i]
    fill: dict[str, Any] = {"ls": "", "marker": style.marker_of(k), "ms": 3.0, "color": colour, "zorder": 3}
    if len(grids.seeds) > 1 and there.any():
        runs = grids.loss[i][there]
        highest = np.minimum(np.nanmax(runs, -1), top[1])
        ax.vlines(np.exp(z[there]), np.nanmin(runs, -1), highest, color=colour, lw=0.7, zorder=2)
    ax.plot(np.exp(z[there & used]), y[there & used], **fill)
    ax.plot(np.exp(z[there & ~used]), y[there & ~used], **(fill | {"mfc": "white", "mew": 0.7}))
    if off.any():
        ax.plot(
            np.exp(z[off]), np.full(off.sum(), crosses[k]), ls="", marker="x", ms=3, color=colour, mew=0.8, zorder=2
        )
    if not made.curves.usable[i]:
        return
    x = np.linspace(made.curves.low[i], made.curves.high[i], 61)
    ax.plot(np.exp(x), evaluate(made.curves.coefficients[i][None], x - made.curves.centre[i]), color=colour, lw=1.0,
            ls=style.dash_of(k), zorder=2)  # fmt: skip
    row = report.envelopes.iloc[i]
    foot = top[0] + (0.05 + 0.045 * k) * (top[1] - top[0])
    ax.hlines(foot, row["low"], row["high"], color=colour, lw=1.6, zorder=4)
    ax.plot(row["optimum_lr"], foot, marker="|", ms=6, mew=1.4, color=colour, zorder=5)


def _limits(report: MisscalingReport, own: NDArray[np.bool_]) -> tuple[float, float]:
    """Loss axis shared by the panels: below the lowest, up to where the highest envelope has risen by some windows."""
    mean = report.grids.mean[own]
    best = np.where(np.isfinite(mean), mean, np.inf).min(-1)
    best = best[np.isfinite(best)]
    worst = float(mean[np.isfinite(mean)].max())
    low, high = (
        float(best.min()),
        min(float(best.max()) + _HEADROOM * report.method.window, worst + 0.05 * (worst - float(best.min()))),
    )
    high = max(high, low + 1e-6)
    room = 0.28 * (high - low)  # for the bars of the optima
    return low - room, high


def _arms(report: MisscalingReport, arms: Sequence[tuple[str, str]] | None) -> list[Arm]:
    there = list(report.grids.arms)
    if arms is None:
        compared = [a for a in report.roles.compared if a in there]
        return compared or there[:8]
    unknown = [a for a in arms if tuple(a) not in there]
    if unknown:
        raise ConfigError(f"arm {unknown[0]!r} is not in the report; there are {', '.join(map(str, there))}")
    return [(a[0], a[1]) for a in arms]


def _ladder(report: MisscalingReport, ladder: str | None, shown: Sequence[Arm]) -> str:
    cells: pd.DataFrame = report.grids.cells
    own = cells[np.isin(report.grids.arm, [report.grids.arms.index(a) for a in shown])]
    counts = own.groupby("ladder", sort=False)["depth"].nunique()
    if ladder is None:
        return str(counts.idxmax())
    if ladder not in counts.index:
        raise ConfigError(f"ladder {ladder!r} is not in the report; there are {', '.join(map(repr, counts.index))}")
    return ladder


def _slope(report: MisscalingReport, arm: Arm) -> Estimate | None:
    assert report.analysis is not None
    if arm not in report.analysis.drifts:
        return None
    e = report.analysis.drifts[arm]
    return e if np.isfinite(e.se) else None


def _numbers(e: Estimate) -> list[float]:
    """Estimate and its 95 % limits."""
    return [float(e.estimate), *(float(v) for v in e.interval(0.95))]


def _depth_axis(ax: Axes, depths: pd.Series) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    values = sorted(set(depths.astype(float)))
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(values if len(values) <= 8 else values[:: -(-len(values) // 8)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def _legend(made: Figure, report: MisscalingReport, shown: Sequence[Arm]) -> None:
    handles = [
        Line2D([], [], color=style.colour_of(k), ls=style.dash_of(k), marker=style.marker_of(k), ms=3, lw=1.0, label=_name(report, a))
        for k, a in enumerate(shown)
    ]  # fmt: skip
    longest = max(len(_name(report, a)) for a in shown)
    columns = max(1, min(len(shown), int(made.get_figwidth() / (0.4 + 0.058 * longest))))
    made.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=2.4)


def _name(report: MisscalingReport, arm: Arm) -> str:
    """An arm in as few words as tell it apart; a changed exponent with an arrow."""
    architectures, parametrizations = ({a[k] for a in report.grids.arms} for k in (0, 1))
    if len(parametrizations) == 1:
        return arm[0]
    named, changed, what = arm[1].partition("; ")
    change = what.replace("-> ", "\u2192 ").replace("-", "\u2212")
    told = f"{named}, {change}" if changed else named
    return told if len(architectures) == 1 else f"{arm[0]} / {told}"


def _wrapped(made: Figure, name: str, numbers: str) -> str:
    """The two on one line, or the numbers on a second one where the figure is too narrow."""
    fits = int((made.get_figwidth() - 0.6) / 0.052)
    return name + numbers if len(name + numbers) <= fits else f"{name}\n  {numbers.removeprefix(': ')}"


def _label(name: str) -> str:
    kind, _, who = name.partition(":")
    words = {"U": "U: learning rate", "V": "V: parametrization", "M": "M = U + V", "W": f"W: {who}"}
    return words[kind]


def _check(report: MisscalingReport, name: str) -> None:
    if not isinstance(report, MisscalingReport):
        raise ConfigError(f"{name} draws a mis-scaling report (misscaling(runs)), not {type(report).__name__}")
    if report.analysis is None:
        raise ConfigError(f"{name}: the runs have no learning rates, so there is nothing to draw")

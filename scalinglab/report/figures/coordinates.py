"""Coordinate check: statistics against width or depth on log axes, with fitted exponents and what would have passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scalinglab.coordinates import CoordinateCheck
from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.registry import figure

_LEAST_RANGE = 2.0  # of the ordinate, as a factor
_SIZE = {"width": "Width", "depth": "Depth (blocks)"}
_SYMBOL = {"h": r"h", "z": r"z", "logits": r"f"}
_NAME = {"h": "Stream", "z": "Normalised stream", "logits": "Logits", "attention": "Attention", "ffn": "Feed-forward",
         "scores": "Attention logits", "branches": "All branches", "weights": "Weights"}  # fmt: skip


@figure("coords")
def coords(
    checks: CoordinateCheck | Sequence[CoordinateCheck],
    *,
    statistics: Sequence[str] | None = None,
    step: int | None = None,
    width: style.Width = "page",
) -> Figure:
    """One panel per statistic, one colour per check: the mean over seeds at each size, every seed as a small point.

    The line is the mean fitted power law; its exponent with interval and verdict stand in the panel. The grey fan is every
    power law that passes, through the fitted value at the base size of the first check.

    Parameters
    ----------
    checks : one check or several along the same axis.
    statistics : names as in `CoordinateCheck.table`; by default those that are judged, three at most.
    step : updates after which changes are shown, the first unless given: later the final norm saturates where updates
        explode. Initial statistics are shown at step 0.

    Raises
    ------
    ConfigError
        Something else than checks, checks along different axes, or a statistic that none has.
    """
    shown = (
        [checks] if isinstance(checks, CoordinateCheck) else list(checks) if isinstance(checks, list | tuple) else []
    )
    if not shown or not all(isinstance(c, CoordinateCheck) for c in shown):
        raise ConfigError(
            "the figure coords draws coordinate checks: make one with `scalinglab coords` or coordinate_check"
        )
    if len({c.axis for c in shown}) > 1:
        raise ConfigError("the figure coords takes checks along one axis: draw width and depth apart")
    names = list(statistics) if statistics is not None else _judged(shown[0])
    across = len(names) if style.inches(width) > 5 else 1
    lines = -(-len(names) // across)
    made = style.new_figure(width, 0.55 + 2.15 * lines + 0.12 * len(shown))
    axes = made.subplots(lines, across, squeeze=False)
    for k, (ax, name) in enumerate(zip(axes.ravel(), names, strict=False)):
        for i, check in enumerate(shown):
            _draw(ax, check, name, _step(check, name, step), i, fan=i == 0)
        _frame(ax, shown, name, step)
        _exponents(ax, shown, name, step)
        ax.set_ylabel("Root mean square" if k % across == 0 and not name.startswith("weights") else "")
    made.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside upper left",
        ncols=1 if across == 1 else min(3, len(shown)),
    )
    level = f"{100 * shown[0].level:g}\u00a0%"
    style.footnote(made, f"Numbers: exponent in {shown[0].axis}, mean over {_seeds(shown)} ± half its {level} t interval, and "
                         "verdict (? more seeds; no sign: not judged). Grey fan: exponents that pass, through the first check at its "
                         "base size. Small points: seeds.")  # fmt: skip
    return made


def _judged(check: CoordinateCheck) -> list[str]:
    rows = check.table[check.table["verdict"] != ""]
    found = list(dict.fromkeys(rows["statistic"]))
    first = [n for n in ("h.change", "z.change", "logits.change", "branches", "logits") if n in found]
    return (first or found)[:3]


def _step(check: CoordinateCheck, name: str, step: int | None) -> int:
    """The step of a row: 0 where it was only measured then."""
    steps = sorted(s for n, s in check.values if n == name)
    if not steps:
        known = ", ".join(dict.fromkeys(n for n, _ in check.values))
        raise ConfigError(f"no statistic {name!r} in the check of {check.name}; measured were {known}")
    if step is None:
        return steps[0]
    if step not in steps and steps != [0]:
        raise ConfigError(f"{name!r} was measured at steps {steps[0]} to {steps[-1]}, not at {step}")
    return step if step in steps else 0


def _draw(ax: Axes, check: CoordinateCheck, name: str, step: int, index: int, *, fan: bool) -> None:
    values, sizes = check.values[name, step], np.asarray(check.sizes, np.float64)
    colour, marker = style.colour_of(index), style.marker_of(index)
    row = _row(check, name, step)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(values)
    mean = logs.mean(0)
    if fan and row is not None and row["verdict"]:
        centre = mean.mean() - float(row["slope"]) * np.log2(check.ratios).mean()
        low, high = (float(np.clip(row[end], -3, 3)) for end in ("pass_low", "pass_high"))
        grid = np.geomspace(sizes.min(), sizes.max(), 50)
        ax.fill_between(grid, 2**centre * (grid / sizes[0]) ** low, 2**centre * (grid / sizes[0]) ** high, color=style.PALE,
                        alpha=0.6, lw=0, zorder=0, label="_passes")  # fmt: skip
    ax.plot(
        sizes,
        2**mean,
        marker=marker,
        ls="",
        color=colour,
        label=_label(check),
        zorder=3,
    )
    for one in values:
        ax.plot(sizes, one, ls="", marker=".", ms=2.2, color=colour, alpha=0.6, label="_seeds", zorder=2)
    if row is not None and np.isfinite(row["slope"]):
        x = np.log2(check.ratios)
        line = mean.mean() + float(row["slope"]) * (x - x.mean())
        ax.plot(sizes, 2**line, color=colour, ls=style.dash_of(index), lw=1.0, label="_fit", zorder=2)


def _frame(ax: Axes, checks: Sequence[CoordinateCheck], name: str, step: int | None) -> None:
    seen = np.concatenate([c.values[name, _step(c, name, step)].ravel() for c in checks])
    sizes = sorted({s for c in checks for s in c.sizes})
    style.set_log_limits(ax, "x", np.asarray(sizes, np.float64), pad=0.06)
    style.set_log_limits(ax, "y", seen, pad=0.08)
    low, high = ax.get_ylim()
    wider = max(1.0, (_LEAST_RANGE * low / high) ** 0.5)  # what is flat looks flat
    low, high = low / wider, high * wider
    ax.set_ylim(low, high * (high / low) ** (0.13 * len(checks)))  # room for the exponents
    style.log_axis(ax, "y", "plain")
    ax.set_xticks(sizes, [f"{s:g}" for s in sizes])
    ax.set_xticks([], minor=True)
    ax.set_xlabel(_SIZE[checks[0].axis])
    at = _step(checks[0], name, step)
    kind, *rest = name.split(".")
    inner = [part for part in rest if part != "change"]
    told = _NAME.get(kind, kind) + (f" ({'.'.join(inner)})" if inner else "")
    when = "at init" if at == 0 else f"after {at} update{'s' if at > 1 else ''}"
    symbol = (
        f" $\\Delta {_SYMBOL[kind]}$"
        if kind in _SYMBOL and "change" in rest
        else f" ${_SYMBOL[kind]}$"
        if kind in _SYMBOL
        else ""
    )
    ax.set_title(f"{told}{', change' if 'change' in rest else ''}{symbol} {when}")


def _exponents(ax: Axes, checks: Sequence[CoordinateCheck], name: str, step: int | None) -> None:
    """The exponents, one line per check in its colour, from the top left corner down."""
    sign = {"pass": " passes", "fail": " fails", "more seeds": " ?", "": ""}
    for i, check in enumerate(checks):
        row = _row(check, name, _step(check, name, step))
        if row is None:
            continue
        if not np.isfinite(row["slope"]):
            told = "diverged"
        else:
            half = (row["high"] - row["low"]) / 2
            told = (
                f"${row['slope']:+.2f}$" + (f" ± {half:.2f}" if np.isfinite(half) else "") + sign[str(row["verdict"])]
            )
        text = ax.annotate(told, (0.03, 0.98), xycoords="axes fraction", xytext=(0, -8.5 * i), textcoords="offset points",
                           ha="left", va="top", fontsize=style.SMALL, color=style.colour_of(i))  # fmt: skip
        style.haloed(text)


def _seeds(checks: Sequence[CoordinateCheck]) -> str:
    numbers = sorted({len(check.seeds) for check in checks})
    return f"{'/'.join(map(str, numbers))} seed{'s' if numbers != [1] else ''}"


def _label(check: CoordinateCheck) -> str:
    usual = "branch" if check.axis == "depth" else "all"
    moving = "" if check.trainable == usual else f", {check.trainable} tensors"
    return f"{check.architecture}, {check.parametrization}{moving} ({check.verdict})"


def _row(check: CoordinateCheck, name: str, step: int) -> dict[str, Any] | None:
    rows = check.table[(check.table["statistic"] == name) & (check.table["step"] == step)]
    return None if rows.empty else {str(k): v for k, v in rows.iloc[0].items()}

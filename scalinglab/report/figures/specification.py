"""Specification curve: the same question under every other defensible choice, sorted, and whether the label holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.figures.benefit import UNITS, checked, few_ticks, panels, primary, shorten
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport

REPORTED = "as reported"


def specifications(report: DepthReport) -> pd.DataFrame:
    """Rows of table T6 that count and have an estimate, with the reported analysis: analysis, architecture, estimate, se, label, same.

    Analyses are in the order of their mean distance from the reported estimate, so that what lowers B stands first.

    Raises
    ------
    ConfigError
        Not a depth report, or one without effects.
    """
    base = {e.architecture: e for e in reversed(primary(report))}
    own = [
        {"analysis": REPORTED, "architecture": a, "estimate": e.estimate, "se": e.se, "label": report.verdicts[a].label}
        for a, e in base.items()
    ]  # fmt: skip
    table = report.tables["T6"]
    rows = table[table["architecture"].isin(base) & table["estimate"].notna() & table["counts"].astype(bool)]
    if report.options.estimand == "E1s":  # gaps at equal FLOPs are in another unit
        rows = rows[~rows["analysis"].str.startswith("equal FLOPs")]
    out = pd.concat(
        [pd.DataFrame(own), rows[["analysis", "architecture", "estimate", "se", "label"]]], ignore_index=True
    )
    out["same"] = [
        label == report.verdicts[a].label for label, a in zip(out["label"], out["architecture"], strict=True)
    ]
    off = out["estimate"].astype(float) - out["architecture"].map({a: e.estimate for a, e in base.items()})
    order = off.groupby(out["analysis"]).mean().sort_values(kind="stable").index
    return out.assign(analysis=pd.Categorical(out["analysis"], order, ordered=True)).sort_values(
        "analysis", kind="stable"
    )


@figure("depth_specifications")
def depth_specifications(report: DepthReport, *, width: style.Width = "page") -> Figure:
    """Estimates of all re-analyses, a panel per architecture; filled where the label is the reported one, hollow where it changes.

    Raises
    ------
    ConfigError
        Not a depth report, or one made without re-analyses.
    """
    outcome = checked(report)
    table = specifications(report)
    names = list(table["analysis"].cat.categories)
    margin = primary(report)[0].of_gap(outcome.margin)
    if len(names) < 2:
        raise ConfigError("this report was made without re-analyses: make it with reanalyse=True")
    own = [a for a in report.verdicts if (table["architecture"] == a).any()]
    left, right = _limits(table)
    far = ~table["estimate"].between(left, right)
    room = (0.15 if far.any() else 0.04) * (right - left)
    page = style.inches(width) > 5
    made, axes = panels(width, len(own), report)
    lines = -(-len(own) // axes[0].get_subplotspec().get_gridspec().ncols)  # type: ignore[union-attr]
    made.set_figheight(0.7 + lines * (0.32 + (0.135 if page else 0.125) * len(names)))
    for ax, a in zip(axes, own, strict=False):
        rows = table[table["architecture"] == a]
        verdict = report.verdicts[a]
        ax.axvline(0, color=style.GREY, lw=0.5, zorder=0)
        if math.isfinite(margin):
            ax.axvspan(-margin, margin, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
        _draw(ax, rows, names, left, right, room)
        ax.set_xlim(left - room, right + room)
        told = f"{verdict.stable} of {verdict.analyses}" if verdict.analyses else "no re-analysis"
        ax.set_title(f"{shorten(a, 14 if len(own) > 6 else 22)}: {told}", fontsize=style.SMALL)
        ax.set_yticks(range(len(names)), [shorten(n, 34 if page else 24) for n in names], fontsize=6.0)
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.tick_params(axis="y", length=0)
        few_ticks(ax.xaxis, 4, steps=(1, 2, 5, 10))
    across = axes[0].get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
    for k, ax in enumerate(axes):
        if k + across >= len(own):
            ax.tick_params(labelbottom=True)
    unit = UNITS[report.options.estimand]
    for k, ax in enumerate(axes):
        if k + across >= len(own):
            ax.set_xlabel("$B$ (nats)" if unit == "nats/token" else "Slope")
    style.footnote(made, f"Title: re-analyses with the label of the report. Bars: ±2 standard errors ({unit}); grey: margin. "
                         "Filled: same label; hollow: another label; diamond: as reported. Empty row: the analysis changes nothing there, or "
                         "the design doesn't bear it.")  # fmt: skip
    return made


def _draw(ax: Axes, rows: pd.DataFrame, names: list[str], left: float, right: float, room: float) -> None:
    """Estimates of one architecture with their bars; one artist per look, which is what makes many panels quick."""
    x, se = rows["estimate"].to_numpy(np.float64), rows["se"].to_numpy(np.float64)
    k = np.array([names.index(n) for n in rows["analysis"]])
    same, reported = rows["same"].to_numpy(bool), (rows["analysis"] == REPORTED).to_numpy()
    side = np.where(x < left, -1, np.where(x > right, 1, 0))
    at = np.select([side < 0, side > 0], [left - room, right + room], x)
    barred = np.isfinite(se) & (side == 0)
    looks = (
        (reported, style.INK), (~reported & same, style.colour_of(0)), (~reported & ~same, style.colour_of(1)),
    )  # fmt: skip
    for own, colour in looks:
        if (bars := own & barred).any():
            ax.hlines(k[bars], (x - 2 * se)[bars], (x + 2 * se)[bars], color=colour, lw=0.8)
        for where, marker in ((0, "D" if own is reported else "o"), (-1, "<"), (1, ">")):
            if (points := own & (side == where)).any():
                ax.plot(at[points], k[points], marker=marker, ms=3.6, mfc=colour if same[points].all() else "white",
                        mec=colour, mew=0.8, ls="", label="_same" if same[points].all() else "_changed", clip_on=False)  # fmt: skip
    for value, place, row, off in zip(x, at, k, side, strict=True):
        if off:
            ax.annotate(f"{value:.2g}".replace("-", "\N{MINUS SIGN}"), (place, row), xytext=(-4 * off, 0),
                        textcoords="offset points", fontsize=6.0, color=style.GREY, va="center",
                        ha="left" if off < 0 else "right")  # fmt: skip


def _limits(table: pd.DataFrame) -> tuple[float, float]:
    """Abscissa of all estimates but those where lost runs count as worst, which can lie far off: those get an arrow."""
    near = table[table["analysis"] != "divergence counts as worst"]
    x, half = near["estimate"].to_numpy(np.float64), 2 * near["se"].fillna(0.0).to_numpy(np.float64)
    return float(min(0.0, (x - half).min())), float(max(0.0, (x + half).max()))

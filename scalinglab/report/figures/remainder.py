"""Residuals: what the law leaves, against everything that it should have explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from scalinglab.report import style
from scalinglab.report.figures import grids
from scalinglab.report.figures.curves import AXIS_LABEL, KIND
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
_RASTER = 3000
_LABEL = {**AXIS_LABEL, "predicted": "Predicted loss (nats/token)", "depth": "Depth (layers)"}


@figure("residuals")
def residuals(fit: Fit, *, level: float = 0.95, width: style.Width = "page") -> Figure:
    """Residuals in percent of the loss against predicted loss, params, tokens, aspect and depth, and a normal QQ panel of runs.

    Rows are coloured by run (in order of size), or by group for a crossed fit; horizontal lines at 0 and +-2 SD of the
    residuals. The QQ panel has one point per run, with the pointwise band of a normal sample of that many. The run that
    moves the fitted losses most when left out is named.
    """
    e = 100 * np.expm1(fit.residuals)
    columns = _columns(fit)
    panels = len(columns) + 1
    across = min(3, panels) if style.inches(width) > 5 else min(2, panels)
    lines = -(-panels // across)
    made = style.new_figure(width, 0.45 + 1.6 * lines)
    axes = made.subplots(lines, across, squeeze=False)
    flat = list(axes.ravel())
    colours, markers = _colours(fit)
    sd = float(np.sqrt(np.mean(e**2)))
    top = 1.12 * max(float(np.abs(e).max()), 2 * sd)
    influential, moved = _influential(fit)
    own = fit.runs["run_id"].astype(str).to_numpy() == influential
    for k, (ax, (name, x)) in enumerate(zip(flat, columns.items(), strict=False)):
        for group, mask in grids.groups(fit):
            ax.scatter(x[mask], e[mask], c=colours[mask], s=7, alpha=0.6, lw=0, marker=markers[group],
                       rasterized=mask.sum() > _RASTER, label=str(group) if group else "_runs")  # fmt: skip
        ax.scatter(x[own], e[own], s=13, facecolor="none", edgecolor=style.INK, lw=0.7, zorder=4, label="_influential")
        _lines(ax, sd, label=k == 0)
        style.set_log_limits(ax, "x", x)
        style.log_axis(ax, "x", KIND.get(name, "plain"), most=5)
        if name in ("params", "tokens"):
            grids.label_own_sizes(ax, x, KIND[name])
        ax.set_ylim(-top, top)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        ax.set_xlabel(_LABEL[name])
        ax.set_ylabel("Residual (% of loss)" if k % across == 0 else "")
    _normal_panel(flat[len(columns)], fit, colours, influential, level, separate=len(columns) % across == 0)
    for ax in flat[panels:]:
        ax.set_visible(False)
    if fit.law.by is not None:
        made.legend(*flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, handletextpad=0.1)
    ringed = (
        f"Ringed: run {influential!r}, whose removal moves the fitted losses most ({moved:.2f}\u00a0% root mean square). "
        if influential
        else ""
    )
    by = "group" if fit.law.by is not None else "run, light to dark with size"
    style.footnote(made, f"Colour: {by}. {ringed}Dashed: ±2 SD of the residuals ({sd:.2f}\u00a0%). "
                         f"QQ band: pointwise {100 * level:g}\u00a0% of a normal sample of {fit.n_runs} runs.")  # fmt: skip
    return made


def _columns(fit: Fit) -> dict[str, Array]:
    """What residuals are drawn against: predicted loss, and each of params, tokens, aspect, depth that is there and varies."""
    out = {"predicted": fit.predict(fit.runs)}
    found: dict[str, Any] = {
        name: fit.runs[name].to_numpy(np.float64) for name in ("params", "tokens") if name in fit.runs
    }
    found["aspect"] = grids.aspects(fit)
    found["depth"] = fit.runs["depth"].to_numpy(np.float64) if "depth" in fit.runs else None
    return out | {
        name: x
        for name, x in found.items()
        if x is not None and np.isfinite(x).all() and (x > 0).all() and x.max() > 1.02 * x.min()
    }


def _colours(fit: Fit) -> tuple[Array, dict[str | None, str]]:
    """RGBA per row [n, 4] and a marker per group."""
    out = np.zeros((len(fit.runs), 4))
    if fit.law.by is not None:
        from matplotlib.colors import to_rgba

        markers: dict[str | None, str] = {}
        for k, (group, mask) in enumerate(grids.groups(fit)):
            out[mask] = to_rgba(style.colour_of(k))
            markers[group] = style.marker_of(k)
        return out, markers
    key = fit.runs["params"].to_numpy(np.float64) if "params" in fit.runs else fit.predict(fit.runs)
    means = grids.run_means(fit, key)
    rank = np.empty(len(means))
    rank[np.argsort(means["value"].to_numpy(), kind="stable")] = np.arange(len(means)) / max(1, len(means) - 1)
    code = np.searchsorted(means["run_id"].to_numpy(), fit.runs["run_id"].astype(str).to_numpy())
    return np.asarray(style.ordered_map()(rank[code])), {None: "o"}


def _lines(ax: Axes, sd: float, *, label: bool) -> None:
    ax.axhline(0, color=style.INK, lw=0.6, zorder=0)
    for sign in (-1, 1):
        ax.axhline(sign * 2 * sd, color=style.GREY, lw=0.6, ls=(0, (4, 2)), zorder=0)
    if label:
        ax.annotate("+2 SD", (1, 2 * sd), xycoords=("axes fraction", "data"), xytext=(0, 1.5), textcoords="offset points",
                    ha="right", fontsize=6, color=style.GREY)  # fmt: skip


def _influential(fit: Fit) -> tuple[str, float]:
    """Run whose removal moves the fitted log losses most, and by how many percent (root mean square)."""
    from scalinglab.errors import FitError

    try:
        made = fit.jackknife
    except FitError:
        return "", 0.0
    names = fit.runs["run_id"].drop_duplicates().astype(str).to_numpy()  # the jackknife's order
    base = np.log(fit.predict(fit.runs))
    best, at = -1.0, 0
    for start in range(0, len(names), 64):  # [64, n] at a time
        with np.errstate(all="ignore"):
            shift = np.sqrt(((np.log(fit.predict(fit.runs, made.params.iloc[start : start + 64])) - base) ** 2).mean(1))
        shift = np.where(np.isfinite(shift), shift, -1.0)
        if shift.max() > best:
            best, at = float(shift.max()), start + int(shift.argmax())
    return str(names[at]), 100 * best


def _normal_panel(ax: Axes, fit: Fit, colours: Array, influential: str, level: float, *, separate: bool) -> None:
    from scipy.special import betaincinv, ndtri

    means = grids.run_means(fit, 100 * fit.residuals)
    value = means["value"].to_numpy()
    order = np.argsort(value, kind="stable")
    n = len(value)
    rank = np.arange(1, n + 1)
    q = ndtri((rank - 0.375) / (n + 0.25))
    centre, sd = float(value.mean()), float(value.std(ddof=1)) if n > 1 else 0.0
    low, high = (ndtri(betaincinv(rank, n + 1 - rank, p)) for p in ((1 - level) / 2, (1 + level) / 2))
    ax.fill_between(q, centre + sd * low, centre + sd * high, color=style.PALE, alpha=0.6, lw=0)
    ax.plot(q, centre + sd * q, color=style.INK, lw=0.6)
    shade = colours[means["first"].to_numpy()][order]
    ax.scatter(q, value[order], c=shade, s=10, lw=0, zorder=3)
    names = means["run_id"].to_numpy()[order]
    for k in np.flatnonzero(names == influential):
        ax.scatter(q[k], value[order][k], s=18, facecolor="none", edgecolor=style.INK, lw=0.7, zorder=4)
        side = 1 if q[k] < 0 else -1  # the free corners of a QQ panel: lower right, upper left
        short = influential if len(influential) <= 26 else "…" + influential[-25:]
        ax.annotate(short, (q[k], value[order][k]), xytext=(5 * side, -3 * side), textcoords="offset points",
                    fontsize=6.2, ha="left" if side > 0 else "right", va="top" if side > 0 else "bottom", zorder=5)  # fmt: skip
    ax.set_xlabel("Normal quantile")
    ax.set_ylabel("Residual of run means (%)")
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))

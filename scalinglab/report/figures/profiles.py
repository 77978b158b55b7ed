"""Profiles of the objective: how sharply the runs determine each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.profiles import Profile

_MOST = 12


@figure("profile")
def profile(
    fit: Fit, *, names: Sequence[str] | None = None, level: float = 0.95, points: int = 41, width: style.Width = "page"
) -> Figure:
    """Signed root of the profile statistic of each parameter, with its threshold and interval.

    A straight line is a parameter for which a symmetric interval is honest; a bend is curvature; a side that never
    reaches the dashed threshold is open, and marked so: the runs do not bound the parameter there.

    Parameters
    ----------
    names : parameters; by default all free ones (the first twelve).

    Raises
    ------
    ConfigError
        The estimator is no likelihood, or a name is no free parameter.
    """
    from scalinglab import profiles

    left = ""
    if names is None:
        free = [n for n in fit.params.index if fit.law.in_algebra and fit.encoding.slots[n].position is not None]
        names, left = free[:_MOST], (f" Not drawn: {', '.join(free[_MOST:])}." if len(free) > _MOST else "")
    if not len(names):
        raise ConfigError("names is empty: give at least one free parameter of the fit")
    made = [profiles.profile(fit, name, level=level, points=points) for name in names]
    widest = (3 if fit.law.levels else 4) if style.inches(width) > 5 else 2  # names of groups make long titles
    across = min(widest, len(made))
    lines = -(-len(made) // across)
    fig = style.new_figure(width, 0.4 + 1.6 * lines)
    axes = fig.subplots(lines, across, squeeze=False, sharey=True)
    for k, (ax, one) in enumerate(zip(axes.ravel(), made, strict=False)):
        _panel(ax, fit, one, first=k % across == 0)
    for ax in axes.ravel()[len(made) :]:
        ax.set_visible(False)
    open_sides = any(not _closed(fit, p, side) for p in made for side in ("low", "high"))
    style.footnote(fig, f"Dashed: {100 * level:g}\u00a0% threshold (F-calibrated; with several rows per run scaled to the by-run precision); shaded: profile interval; "
                        "dot: estimate." + (" Arrow: side left open by the runs." if open_sides else "") + left)  # fmt: skip
    return fig


def _closed(fit: Fit, one: Profile, side: str) -> bool:
    value = one.low if side == "low" else one.high
    # on the log scale an open lower side is reported as 0
    return bool(np.isfinite(value)) and not (side == "low" and value == 0.0 and _positive(fit, one.name))


def _positive(fit: Fit, name: str) -> bool:
    return fit.law.in_algebra and fit.encoding.slots[name].kind in ("amplitude", "exponent")


def _panel(ax: Axes, fit: Fit, one: Profile, *, first: bool) -> None:
    estimate = float(fit.params[one.name])
    root = np.sqrt(one.threshold)
    signed = np.sign(one.values - estimate) * np.sqrt(one.statistic)
    reach = 1.9 * root
    # the interval's ends are known better than the steps of the search: they are on the curve
    ends = [(v, s * root) for side, v, s in (("low", one.low, -1), ("high", one.high, 1)) if _closed(fit, one, side)]
    off = ~np.isclose(one.values, estimate, rtol=1e-9, atol=0)  # the estimate is on the curve once
    x = np.concatenate([one.values[off], [v for v, _ in ends], [estimate]])
    y = np.concatenate([signed[off], [v for _, v in ends], [0.0]])
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    shown = np.abs(y) <= reach * 1.3
    if not _closed(fit, one, "low") and _positive(fit, one.name) and x[0] < estimate * 1e-2:
        # an amplitude that may vanish: its flat side is not drawn down to 1e-50
        least = max(estimate, 1e-12) * 1e-2
        y = np.concatenate([[np.interp(np.log(least), np.log(np.maximum(x, 1e-300)), y)], y])
        x = np.concatenate([[least], x])
        shown = np.concatenate([[True], shown]) & (x >= least)
    x, y = x[shown], y[shown]
    low, high = (one.low if _closed(fit, one, "low") else x[0]), (one.high if _closed(fit, one, "high") else x[-1])
    ax.axvspan(low, high, color=style.PALE, alpha=0.55, lw=0, zorder=-1)
    for sign in (-1, 1):
        ax.axhline(sign * root, color=style.GREY, lw=0.7, ls=(0, (4, 2)), zorder=0)
    ax.axhline(0, color=style.GREY, lw=0.4, zorder=0)
    ax.plot(x, y, color=style.colour_of(0), label=one.name)
    ax.plot([estimate], [0], "o", color=style.INK, ms=3, zorder=4, label="_estimate")
    for side, at, end in (("low", x[0], -root), ("high", x[-1], root)):
        if not _closed(fit, one, side):
            ax.annotate("open", (at, end), xytext=(18 if side == "low" else -18, 0), textcoords="offset points", va="center",
                        ha="left" if side == "low" else "right", fontsize=style.SMALL, color=style.PALETTE[1],
                        arrowprops={"arrowstyle": "->", "color": style.PALETTE[1], "lw": 0.8, "shrinkA": 1, "shrinkB": 0})  # fmt: skip
    ax.set_ylim(-reach, reach)
    wide = _positive(fit, one.name) and (x > 0).all() and x[-1] > 2.5 * x[0]
    if wide:
        style.set_log_limits(ax, "x", x)
        kind: style.Kind = "power" if x[-1] >= 1e5 else "plain"
        style.log_axis(ax, "x", kind, most=4)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    low_, high_ = style.number(one.low), style.number(one.high)
    ax.set_title(f"{style.symbol(one.name)} = {style.number(estimate)}\n[{low_}, {high_}]", fontsize=style.SMALL)
    if first:
        ax.set_ylabel("Signed root of\nprofile statistic")

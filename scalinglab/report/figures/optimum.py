"""The compute-optimal frontier: how large, on how many tokens, in what shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.figures import grids
from scalinglab.report.figures.curves import AXIS_LABEL, KIND
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.uncertainty import Resampling

_LABELS = {**AXIS_LABEL, "depth": r"Depth (layers)", "width": r"Width $d$", "flops": r"Compute $6ND$ (FLOPs)"}
_KINDS: dict[str, style.Kind] = {**KIND, "depth": "plain", "width": "plain"}
_DECADES = 1.5  # how far beyond the runs the frontier is drawn by default
_POINTS = 33
_REACH = 10.0  # optima this many times beyond the runs' aspect ratios are told, not drawn


@figure("frontier")
def frontier(
    fit: Fit,
    *,
    flops: Sequence[float] | None = None,
    uncertainty: Resampling | grids.Spread = "jackknife",
    level: float = 0.95,
    width: style.Width = "page",
) -> Figure:
    """Compute-optimal params, tokens, loss, and aspect, depth, width where the law has shape, against FLOPs (6 N D).

    Solid inside the runs, dashed where params, tokens, FLOPs or aspect of the optimum lie beyond them. A budget where a
    replicate has no interior optimum has no band (dropping replicates would make it too narrow).

    Parameters
    ----------
    flops : (low, high) or more budgets; by default from the runs' smallest compute to 1.5 decades past their largest.

    Raises
    ------
    ConfigError
        The law has no trade-off between params and tokens, or no budget has an optimum.
    """
    from scalinglab.frontier import optimal

    spreads = grids.Spreads.of(fit, uncertainty, level)
    budgets = _budgets(fit, flops)
    tables: list[tuple[str | None, pd.DataFrame]] = []
    strange: list[str] = []
    for group, _ in grids.groups(fit):
        made = optimal(fit, flops=budgets, uncertainty=spreads.resampling, level=level, group=group)
        table, lost = _inside_reach(fit, made.table)
        tables.append((group, table))
        if lost:
            strange.append(f"{group}: " * (group is not None) + f"best aspect ratio {lost:.3g}")
    if strange and not any(table["params"].notna().any() for _, table in tables):
        raise ConfigError(
            f"the best shape lies far beyond the runs ({'; '.join(strange)}): no frontier to draw; fix the shape"
        )
    if not any(table["valid"].any() for _, table in tables):
        raise ConfigError(
            f"law {fit.law.key!r} has no compute-optimal size at any of these budgets: {tables[0][1]['reason'].iloc[0]}"
        )
    names = [
        n
        for n in ("params", "tokens", "loss", "aspect", "depth", "width")
        if any(t[n].notna().any() for _, t in tables)
    ]
    across = min(3, len(names)) if style.inches(width) > 5 else min(2, len(names))
    lines = -(-len(names) // across)
    fig = style.new_figure(width, 0.5 + 1.6 * lines)
    axes = fig.subplots(lines, across, squeeze=False, sharex=True)
    for k, (ax, name) in enumerate(zip(axes.ravel(), names, strict=False)):
        for g, (group, table) in enumerate(tables):
            _line(ax, table, name, style.colour_of(g), group, marker=style.marker_of(g) if group else "")
        _frame(ax, name, budgets, [t for _, t in tables])
        if k + across >= len(names):
            ax.set_xlabel(_LABELS["flops"])
            ax.tick_params(labelbottom=True)
    for ax in axes.ravel()[len(names) :]:
        ax.set_visible(False)
    if fit.law.by is not None:
        style.group_legend(fig, axes[0, 0], str(fit.law.by), "upper left")
    missing = (
        sum(int((t["valid"] & ~t["interval_valid"]).sum()) for _, t in tables) if spreads.resampling is not None else 0
    )
    note = f" {missing} budgets without a band: some replicate has no interior optimum there." if missing else ""
    beyond = (
        f" Not drawn, more than {_REACH:g}x beyond the shapes of the runs: {'; '.join(strange)}." if strange else ""
    )
    style.footnote(
        fig, f"Dashed: optimum beyond the runs in size, tokens, compute or shape. {spreads.note}{note}{beyond}"
    )
    return fig


def _inside_reach(fit: Fit, table: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """The table without budgets whose best shape is absurdly far from the runs', and such a shape (0 if there is none)."""
    seen = grids.aspects(fit)
    best = table["aspect"].to_numpy(np.float64)
    if seen is None or not np.isfinite(best).any():
        return table, 0.0
    far = (best < seen.min() / _REACH) | (best > seen.max() * _REACH)
    sizes = [c for c in table.columns if c.split("_")[0] in ("params", "tokens", "loss", "aspect", "depth", "width")]
    return table.assign(**{c: table[c].where(~far) for c in sizes}), float(best[far][-1]) if far.any() else 0.0


def _budgets(fit: Fit, flops: Sequence[float] | None) -> NDArray[np.float64]:
    if flops is None:
        C = 6 * grids.sizes(fit) * grids.tokens(fit)
        return np.geomspace(C.min(), C.max() * 10**_DECADES, _POINTS)
    given = np.sort(np.asarray(flops, dtype=np.float64).ravel())
    if len(given) < 2 or not (np.isfinite(given) & (given > 0)).all() or given[0] == given[-1]:
        raise ConfigError(f"flops needs two or more different positive budgets, not {list(flops)}")
    return np.geomspace(given[0], given[-1], _POINTS) if len(given) == 2 else given


def _line(ax: Axes, table: pd.DataFrame, name: str, colour: str, group: str | None, *, marker: str) -> None:
    x, y = table["flops"].to_numpy(), table[name].to_numpy(np.float64)
    beyond = table["extrapolated"].to_numpy(bool)
    low, high = table[f"{name}_low"].to_numpy(np.float64), table[f"{name}_high"].to_numpy(np.float64)
    if np.isfinite(low).any():
        ax.fill_between(x, low, high, color=colour, alpha=style.BAND, lw=0)
    ax.plot(x, np.where(beyond, np.nan, y), color=colour, ls="-", label=str(group) if group else "_inside",
            marker=marker, ms=3, markevery=6)  # fmt: skip
    # the dashed part starts at the last solid point, so that the line has no gap
    bridge = beyond.copy()
    bridge[1:] |= beyond[:-1]
    bridge[:-1] |= beyond[1:]
    ax.plot(x, np.where(bridge, y, np.nan), color=colour, ls=(0, (2.5, 1.5)), lw=1.0, label="_beyond", marker=marker, ms=3,
            markevery=6, mfc="white")  # fmt: skip


def _frame(ax: Axes, name: str, budgets: NDArray[np.float64], tables: list[pd.DataFrame]) -> None:
    style.set_log_limits(ax, "x", budgets, pad=0.02)
    style.log_axis(ax, "x", "power", most=5)
    values = np.concatenate([t[[name, f"{name}_low", f"{name}_high"]].to_numpy(np.float64).ravel() for t in tables])
    centre = np.concatenate([t[name].to_numpy(np.float64) for t in tables])
    # a band may be wide without limit; the frame follows the estimates, and shows at most a decade beyond them
    values = np.clip(values, np.nanmin(centre) / 10, np.nanmax(centre) * 10)
    if name == "aspect":
        values = np.concatenate([values, [np.nanmin(centre) / 1.5, np.nanmax(centre) * 1.5]])
    style.set_log_limits(ax, "y", values)
    style.log_axis(ax, "y", _KINDS[name], most=5)
    ax.set_ylabel(_LABELS[name])

"""Depth probes of one or several models: profiles by depth, and what leaving blocks out costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.probe_report import Measure, ProbeReport
from scalinglab.report import style
from scalinglab.report.registry import figure

Array = NDArray[np.float64]

# ids of trained runs: architecture-L4-d16-sp-lr0.003-s0-1b28ea1765
_RUN_ID = re.compile(
    r"(?P<architecture>.+)-L(?P<depth>\d+)-d(?P<width>\d+)-(?P<rule>.+)-lr(?P<rate>.+)-s(?P<seed>\d+)-[0-9a-f]{10}"
)
_DETAILS = {"width": "d =", "rule": "", "rate": "lr", "seed": "seed"}  # in the order in which they are added
_STEEP = 15.0  # largest over median value from which on an axis is logarithmic
_DECADES = 4.0  # of a logarithmic axis, at most: what is lower is drawn on its floor


@dataclass(frozen=True)
class Panel:
    """A panel of `depth_profile`: a measure, its label, and its axis ("auto" is logarithmic for steep profiles)."""

    measure: str
    label: str
    scale: Literal["linear", "auto", "log"] = "linear"


PANELS: dict[str, Panel] = {
    "rms": Panel("rms", "RMS of the state", "log"),
    "influence": Panel("block_influence", "Block influence", "auto"),
    "angle": Panel("angular_distance", r"Angle to next state ($\pi$)", "auto"),
    "contribution": Panel("block_contribution", "Written / read (norms)", "auto"),
    "lens": Panel("lens_kl", "KL(final || lens) (nats)", "auto"),
    "removal": Panel("removal_loss", "Removal loss (nats/token)", "auto"),
    "lens_loss": Panel("lens_loss", "Lens loss (nats/token)", "auto"),
    "cosine": Panel("block_cosine", "Cosine written, read"),
    "rank": Panel("effective_rank", "Effective rank of the state", "auto"),
    "sources": Panel("sources_entropy", "Effective sources read"),
    "usefulness": Panel("affine_ratio", "Loss ratio, affine block"),
    "jacobian": Panel("jacobian_deviation", r"$\|\bar J - I\|_F/\sqrt{D}$", "auto"),
    "gradient": Panel("state_gradient", "RMS gradient of the state", "log"),
}
SIX = ("rms", "influence", "angle", "contribution", "lens", "removal")


@figure("depth_profile")
def depth_profile(
    reports: ProbeReport | Sequence[ProbeReport],
    *,
    panels: Sequence[str] = SIX,
    labels: Sequence[str] | None = None,
    width: style.Width = "page",
) -> Figure:
    """Diagnostics by depth, one panel each, one colour per model, with the report's intervals as bands.

    The horizontal axis is the block where all models have one depth, and the depth over L otherwise. What is not finite is
    left out, and the figure says so.

    Parameters
    ----------
    reports : ProbeReport or sequence
    panels : names
        Of `PANELS`; one that no report has is left out, and the figure says so.
    labels : names of the models, in order; by default those in the reports, shortened to what tells runs apart.

    Raises
    ------
    ConfigError
        Not a probe report, an unknown panel, or no panel left.
    """
    given, names = _given(reports, labels, "depth_profile")
    unknown = [p for p in panels if p not in PANELS]
    if unknown:
        raise ConfigError(f"panel {unknown[0]!r} is unknown; choose from {', '.join(PANELS)}")
    shown = [PANELS[p] for p in panels if any(PANELS[p].measure in report for report in given)]
    if not shown:
        raise ConfigError(f"no report has a measure for {', '.join(panels)}; run those probes first")
    across = 3 if style.inches(width) > 5 else 2 if len(shown) > 1 else 1
    across = min(across, len(shown))
    down = -(-len(shown) // across)
    made = style.new_figure(width, 0.45 + 1.55 * down)
    same = len({report.depth for report in given}) == 1
    grid = np.atleast_1d(np.array(made.subplots(down, across, sharex=True))).ravel()
    notes: list[str] = []
    for ax, panel in zip(grid, shown, strict=False):
        _panel(ax, panel, given, names, same, notes)
    for k, ax in enumerate(grid):
        if k >= len(shown):
            ax.set_visible(False)
        if k + across >= len(shown):
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("Depth (blocks)" if same else "Depth / number of blocks")
    _legend(made, grid[0], names)
    absent = [PANELS[p].label for p in panels if PANELS[p] not in shown]
    if PANELS["rms"] in shown:
        notes.append(
            "State: the residual stream; attention residuals have none, and theirs is the mix read next, which differs in kind."
        )
    _caption(made, [_bands(given), *notes, f"Not measured: {', '.join(absent)}." if absent else ""])
    return made


@figure("layer_removal")
def layer_removal(
    reports: ProbeReport | Sequence[ProbeReport],
    *,
    labels: Sequence[str] | None = None,
    width: style.Width = "column",
) -> Figure:
    """What it costs to leave out each block, and the pruning curve: n adjacent blocks between the most alike states.

    For one model the pruning curve names the blocks that were left out, counted from 0. What is not finite is left out, and
    the figure says so.

    Raises
    ------
    ConfigError
        Not a probe report, or no report with removals.
    """
    given, names = _given(reports, labels, "layer_removal")
    whole = [name for name in ("removal_loss", "pruning_loss") if any(name in report for report in given)]
    if not whole:
        raise ConfigError("no report has a removal or pruning probe; run probe(..., which=['removal', 'pruning'])")
    wide = style.inches(width) > 5
    down, across = (1, len(whole)) if wide else (len(whole), 1)
    made = style.new_figure(width, 2.5 if wide else 0.55 + 1.75 * len(whole))
    axes = np.atleast_1d(np.array(made.subplots(down, across)))
    same = len({report.depth for report in given}) == 1
    notes: list[str] = []
    for ax, name in zip(axes, whole, strict=True):
        many = len(given)
        found = _finite([(k, report, report.measure(name)) for k, report in enumerate(given) if name in report])
        steep = _is_steep([m.value for _, _, m in found])
        floor = _floor([m for _, _, m in found], notes) if steep else None
        for k, report, m in found:
            x = m.at.astype(float) if same else m.at / report.depth
            if name == "removal_loss":
                step = 1.0 if same else 1.0 / report.depth
                _bars(ax, x + step * 0.22 * (k - (many - 1) / 2) * min(1, 3 / many), m, k, floor)
            else:
                _curve(ax, x, m, k, floor)
                if many == 1:
                    _name_blocks(ax, report, m, floor)
        _finish(ax, floor, same)
        _missing(ax, name, name.replace("_", " ").capitalize(), given, names, notes)
        if floor is None and found:
            ax.axhline(0, color=style.GREY, lw=0.5, zorder=0)
        ax.set_ylabel("Loss increase (nats/token)")
        what = "Block left out" if name == "removal_loss" else "Adjacent blocks left out, n"
        ax.set_xlabel(what + ("" if same else " / number of blocks"))
    if "pruning_loss" in whole:
        notes.append(
            "Of all groups of n adjacent blocks, the one between whose states the angle is smallest is left out."
        )
    _legend(made, axes[0], names)
    _caption(made, [_bands(given), *notes])
    return made


_Found = list[tuple[int, ProbeReport, Measure]]


def _finite(found: _Found) -> _Found:
    """Measures with NaN for infinity, less those without a finite value: a diverged model has such."""
    return [(k, report, _without_infinity(m)) for k, report, m in found if np.isfinite(m.value).any()]


def _without_infinity(m: Measure) -> Measure:
    value, low, high = (np.where(np.isfinite(v), v, np.nan) for v in (m.value, m.low, m.high))
    return replace(m, value=value, low=low, high=high)


def _missing(ax: Axes, measure: str, label: str, given: list[ProbeReport], names: list[str], notes: list[str]) -> None:
    """Say which models a panel doesn't show; in the panel where it shows none."""
    absent = [name for name, report in zip(names, given, strict=True) if measure not in report]
    broken = [
        name
        for name, report in zip(names, given, strict=True)
        if measure in report and not np.isfinite(report.measure(measure).value).all()
    ]
    if absent:
        notes.append(f"{label}: not defined for {', '.join(absent)}.")
    if broken and not ax.lines:
        ax.text(0.5, 0.5, "not finite", transform=ax.transAxes, ha="center", va="center", color=style.GREY)
        ax.set_yticks([])
    elif broken:
        notes.append(f"{label}: not finite, or not everywhere, for {', '.join(broken)}.")


def _name_blocks(ax: Axes, report: ProbeReport, m: Measure, floor: float | None) -> None:
    """The first and last block of each group that was left out, over its point."""
    if "pruning_start" not in report or len(m.at) > 12:
        return
    starts = dict(zip(report.measure("pruning_start").at, report.measure("pruning_start").value, strict=True))
    for n, y in zip(m.at, _raised(m, floor)[0], strict=True):
        if n in starts and np.isfinite(y):
            first = int(starts[n])
            told = f"{first}" if n == 1 else f"{first}\u2013{first + n - 1}"
            text = ax.annotate(told, (float(n), float(y)), xytext=(0, 4), textcoords="offset points", ha="center",
                               va="bottom", fontsize=style.SMALL, color=style.GREY)  # fmt: skip
            style.haloed(text)


def _caption(made: Figure, notes: Sequence[str]) -> None:
    """The notes under the figure, which grows by what they need: a long caption must not cover the axes."""
    text = " ".join(dict.fromkeys(note for note in notes if note))
    lines = -(-len(text) // int(made.get_figwidth() * 25))
    made.set_figheight(made.get_figheight() + 0.1 * max(0, lines - 2))
    style.footnote(made, text)


def _given(
    reports: ProbeReport | Sequence[ProbeReport], labels: Sequence[str] | None, name: str
) -> tuple[list[ProbeReport], list[str]]:
    given = (
        [reports] if isinstance(reports, ProbeReport) else list(reports) if isinstance(reports, list | tuple) else []
    )
    if not given or not all(isinstance(report, ProbeReport) for report in given):
        raise ConfigError(f"{name} draws probe reports (ProbeReport.load(folder)), not {type(reports).__name__}")
    names = short_names(given) if labels is None else list(labels)
    if len(names) != len(given):
        raise ConfigError(f"{len(names)} labels for {len(given)} reports: give one each")
    return given, names


def short_names(reports: Sequence[ProbeReport]) -> list[str]:
    """What tells models apart: of the ids of runs the architecture and depth, and whatever else differs; other labels as they are."""
    given = [report.label or f"model {k + 1}" for k, report in enumerate(reports)]
    found = [_RUN_ID.fullmatch(name) for name in given]
    names = [f"{m['architecture']}, L = {m['depth']}" if m else name for m, name in zip(found, given, strict=True)]
    for field, told in _DETAILS.items():
        for name in {n for n in names if names.count(n) > 1}:
            alike = [k for k, n in enumerate(names) if n == name and found[k]]
            values = {k: m[field] for k in alike if (m := found[k])}
            if len(set(values.values())) > 1:
                for k, value in values.items():
                    names[k] = f"{name}, {told} {value}".replace("  ", " ")
    return [name if names.count(name) == 1 else whole for name, whole in zip(names, given, strict=True)]


def _panel(ax: Axes, panel: Panel, given: list[ProbeReport], names: list[str], same: bool, notes: list[str]) -> None:
    found = _finite(
        [
            (k, report, _along(report.measure(panel.measure)))
            for k, report in enumerate(given)
            if panel.measure in report
        ]
    )
    steep = bool(found) and (
        panel.scale == "log" or (panel.scale == "auto" and _is_steep([m.value for _, _, m in found]))
    )
    floor = _floor([m for _, _, m in found], notes) if steep else None
    for k, report, m in found:
        # A block lies between two states; a sublayer's reader is half a block.
        at = m.at / 2 if m.by == "reader" else m.at + (0.5 if m.by in ("block", "pair") else 0.0)
        x: Array = np.asarray(at, dtype=np.float64) / (1.0 if same else report.depth)
        _curve(ax, x, m, k, floor)
    _finish(ax, floor, same)
    _missing(ax, panel.measure, panel.label, given, names, notes)
    ax.set_title(panel.label)


def _along(m: Measure) -> Measure:
    """A measure of pairs of neighbours along the depth; others as they are."""
    if m.by != "pair":
        return m
    near = m.other - m.at == 1
    parts = {name: getattr(m, name)[near] for name in ("value", "low", "high", "at", "other")}
    return Measure(m.probe, m.name, "pair", m.definition, **parts, interval=m.interval)


def _curve(ax: Axes, x: Array, m: Measure, k: int, floor: float | None) -> None:
    value, low, high = _raised(m, floor)
    colour = style.colour_of(k)
    if np.isfinite(low).any():
        ax.fill_between(x, low, high, color=colour, alpha=style.BAND, lw=0, zorder=2)
    ax.plot(x, value, color=colour, ls=style.dash_of(k), lw=1.0, zorder=3)
    _points(ax, x, m, k, floor, 2.4)


def _bars(ax: Axes, x: Array, m: Measure, k: int, floor: float | None) -> None:
    _, low, high = _raised(m, floor)
    if np.isfinite(low).any():
        ax.vlines(x, low, high, color=style.colour_of(k), lw=0.9, alpha=0.8, zorder=2)
    _points(ax, x, m, k, floor, 2.8)


def _points(ax: Axes, x: Array, m: Measure, k: int, floor: float | None, size: float) -> None:
    """Markers, hollow where the value is off the axis."""
    low = np.zeros(len(x), bool) if floor is None else m.value < floor
    value, colour = _raised(m, floor)[0], style.colour_of(k)
    shared: dict[str, Any] = {"ls": "", "marker": style.marker_of(k), "ms": size, "color": colour, "clip_on": False}
    high = np.isfinite(m.value) & ~low
    if high.any():  # unclipped points that are nowhere would have no end, and no layout
        ax.plot(x[high], value[high], zorder=3, **shared)
    if low.any():
        ax.plot(x[low], value[low], zorder=4, mfc="white", mew=0.7, **shared)


def _raised(m: Measure, floor: float | None) -> tuple[Array, Array, Array]:
    value, low, high = (np.asarray(v, dtype=np.float64) for v in (m.value, m.low, m.high))
    if floor is None:
        return value, low, high
    return np.maximum(value, floor), np.maximum(low, floor), np.maximum(high, floor)


def _is_steep(values: list[Array]) -> bool:
    known = np.concatenate([*values, np.zeros(0)])
    known = known[np.isfinite(known)]
    middle = float(np.median(known)) if len(known) else 0.0
    return bool(len(known) and known.max() > 0 and known.max() > _STEEP * max(middle, known.max() * 1e-12))


def _floor(measures: list[Measure], notes: list[str]) -> float:
    """Lowest value of a logarithmic axis: a round number below the positive values, not too many decades down."""
    value = np.concatenate([m.value for m in measures])
    value = value[np.isfinite(value)]
    positive = value[value > 0]
    if not len(positive):
        return 1e-12
    least = max(float(positive.min()) / 1.6, float(positive.max()) * 10**-_DECADES)
    cut = bool((value < least).any() or any((m.low < least).any() for m in measures))
    if cut:
        notes.append("On logarithmic axes, values below the axis (or negative) are hollow, on its floor.")
    return least


def _finish(ax: Axes, floor: float | None, same: bool) -> None:
    if floor is not None:
        drawn = [np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.lines]
        tops = [float(y[np.isfinite(y)].max()) for y in drawn if np.isfinite(y).any()]
        style.set_log_limits(ax, "y", [floor, max(tops)], pad=0.06)
        ax.set_ylim(bottom=floor)
        style.log_axis(ax, "y", "power" if floor < 1e-3 or max(tops) >= 1e4 else "plain", most=4)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=same, steps=[1, 2, 4, 5, 10]))


def _legend(made: Figure, ax: Axes, names: list[str]) -> None:
    if len(names) < 2:
        return
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=style.colour_of(k), ls=style.dash_of(k), marker=style.marker_of(k), ms=3, lw=1.0, label=name
        )
        for k, name in enumerate(names)
    ]
    columns = max(1, min(len(names), int(made.get_figwidth() / (0.35 + 0.055 * max(map(len, names))))))
    made.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=2.4)


def _bands(given: list[ProbeReport]) -> str:
    levels = sorted({float(report.settings["level"]) for report in given if "level" in report.settings})
    if not levels or any(report.settings.get("sequences") == 1 for report in given):
        return "No intervals: one sequence."
    level = "/".join(f"{100 * v:g}" for v in levels)
    sequences = "/".join(sorted({str(report.settings.get("sequences", "?")) for report in given}))
    return f"Bands: {level}\u00a0% bootstrap over {sequences} sequences; they don't cover the variation between seeds."

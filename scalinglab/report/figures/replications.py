"""Forests of the pooled estimate: what each study says about shape, with its weight, and what they say together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.replications import PooledShape

Quantity = Literal["penalty", "contrast", "optimum"]
Kind = Literal["study", "other", "pooled", "point", "new"]

_AXIS = {
    "penalty": "Loss lost four times away from the best $d/L$ (%)",
    "contrast": "Loss at $d/L$ = 76 over that at 40 (%)",
    "optimum": "Best aspect ratio $d/L$",
}
_LIMITS = {"penalty": (-2.6, 6.2), "contrast": (-1.9, 2.3), "optimum": (4.5, 260.0)}
_TICKS = (5, 10, 20, 50, 100, 200)
_NAMES = {
    "pre_ln": "Pre-LN", "attnres_full": "Full AttnRes", "attnres_block": "Block AttnRes", "attnres": "AttnRes", "hc": "HC",
    "mhc": "mHC", "lns": "LNS", "keel": "KEEL", "deepnorm": "DeepNorm", "moda": "MoDA", "sandwich_ln": "Sandwich-LN",
}  # fmt: skip
_COLOURS = {
    "study": style.colour_of(0), "other": style.colour_of(1), "point": style.GREY, "pooled": style.INK, "new": style.GREY,
}  # fmt: skip
_SKIPPED = "skipped: needs"  # the note of a study whose run logs were not given
_PRIMARY = "primary: backbone N, pre-norm decoders"
_DIAMONDS = {  # analyses drawn as diamonds
    "penalty": ((_PRIMARY, "Pooled, pre-norm decoders", "backbone"), ("total N, pre-norm decoders", "Pooled, N total", "total"),
                ("all architectures, studies left out", "Pooled, all architectures", "backbone")),
    "contrast": ((_PRIMARY, "Pooled, pre-norm decoders", "backbone"), ("total N, pre-norm decoders", "Pooled, N total", "total"),
                 ("all architectures, studies left out", "Pooled, all architectures", "backbone")),
    "optimum": ((_PRIMARY, "Pooled, pre-norm decoders", "backbone"),),
}  # fmt: skip


@dataclass(frozen=True)
class _Row:
    kind: Kind
    label: str
    convention: str
    estimate: float
    low: float
    high: float
    weight: float = 0.0
    gap: float = 0.0  # room above


@figure("pooled_forest")
def pooled_forest(result: PooledShape, *, quantity: Quantity = "penalty", width: style.Width = "page") -> Figure:
    """What each study says about the cost of shape or the best shape, and the pooled estimate.

    Filled squares: studies of the primary analysis, their area the weight; hollow circles: other architectures; diamonds: pooled
    estimates with their 95 % interval, and under the first one where a new study's true effect is expected. Arrows: intervals
    that go on, or optima known from one side only.

    Raises
    ------
    ConfigError
        An unknown quantity, or no study that says anything about it.
    """
    if quantity not in _AXIS:
        raise ConfigError(f"quantity is {quantity!r}: give penalty, contrast or optimum")
    rows = _rows(result, quantity)
    if not rows:
        raise ConfigError(f"pooled_forest: no study identifies the {quantity}")
    page = style.inches(width) > 5
    step = 0.165 if page else 0.25
    places = np.cumsum([1 + r.gap for r in rows]) - 1
    made = style.new_figure(width, 0.95 + step * (places[-1] + 1))
    ax = made.add_subplot()
    scale = np.exp if quantity == "optimum" else np.asarray
    low, high = _limits(rows, quantity)
    if quantity == "optimum":
        ax.set_xscale("log")
    else:
        ax.axvline(0, color=style.GREY, lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.set_ylim(places[-1] + 0.8, -0.9)
    for at, row in zip(places, rows, strict=True):
        values = [float(scale(v)) for v in (row.estimate, row.low, row.high)]
        _draw(ax, row, at, values, (low, high))
    first = next((a for a, r in zip(places, rows, strict=True) if r.kind == "pooled"), None)
    if first is not None:
        ax.axhline(
            first - 0.5 - rows[[r.kind for r in rows].index("pooled")].gap / 2, color=style.PALE, lw=0.6, zorder=0
        )
    _label(ax, rows, places, quantity, page)
    _axis(ax, quantity)
    style.footnote(made, _note(result, quantity, rows))
    return made


# ---- rows --------------------------------------------------------------------------------------------------------------
def _rows(result: PooledShape, quantity: Quantity) -> list[_Row]:
    table = result.effects[result.effects["quantity"] == quantity]
    several = table.groupby("study")["architecture"].nunique()
    studies: list[_Row] = []
    others: list[_Row] = []
    for _, e in table.iterrows():
        known = e["enters"] or (quantity == "optimum" and _sided(e))
        if not known:
            continue
        name = _NAMES.get(e["architecture"], e["architecture"])
        label = f"{e['study']}, {name}" if several[e["study"]] > 1 else str(e["study"])
        kind: Kind = (
            "point" if not e["enters"] and math.isfinite(e["estimate"]) else "study" if e["baseline"] else "other"
        )
        (studies if e["baseline"] else others).append(
            _Row(kind, label, e["convention"], e["estimate"], e["low"], e["high"], float(e["weight"]))
        )
    studies.sort(key=lambda r: (-r.weight, r.kind == "point"))
    others.sort(key=lambda r: (r.kind == "point", r.high - r.low if math.isfinite(r.high - r.low) else 1e9))
    pooled = []
    for analysis, label, convention in _DIAMONDS[quantity]:
        found = result.pooled[(result.pooled["quantity"] == quantity) & (result.pooled["analysis"] == analysis)]
        for _, p in found.iterrows():
            if p["rows"] < 2 or not math.isfinite(p["estimate"]):
                continue
            pooled.append(_Row("pooled", label, convention, p["estimate"], p["low"], p["high"]))
            if analysis == _PRIMARY and math.isfinite(p["new_low"]):
                pooled.append(_Row("new", "A new study", convention, math.nan, p["new_low"], p["new_high"]))
    if quantity == "optimum":
        total = result.pooled[
            (result.pooled["quantity"] == quantity) & (result.pooled["analysis"] == "total N, pre-norm decoders")
        ].iloc[0]
        if total["rows"] == 1:  # the same runs, counted otherwise
            others.insert(
                0,
                _Row("other", f"{total['studies']}, N total", "total", total["estimate"], total["low"], total["high"]),
            )
    return [*studies, *_spaced(others, 0.5), *_spaced(pooled, 0.9)]


def _sided(e: pd.Series) -> bool:
    """Whether an optimum that isn't located is known from one side, or printed without an interval."""
    return bool(math.isfinite(e["low"]) or math.isfinite(e["high"]) or math.isfinite(e["estimate"]))


def _spaced(rows: list[_Row], gap: float) -> list[_Row]:
    from dataclasses import replace

    return [replace(r, gap=gap if i == 0 else 0.0) for i, r in enumerate(rows)]


def _limits(rows: list[_Row], quantity: Quantity) -> tuple[float, float]:
    """The fixed range of the axis, widened where an estimate would lie outside."""
    low, high = _LIMITS[quantity]
    values = np.array([r.estimate for r in rows if math.isfinite(r.estimate)])
    values = np.exp(values) if quantity == "optimum" else values
    if not len(values):
        return low, high
    return (min(low, 0.8 * values.min()), max(high, 1.25 * values.max())) if quantity == "optimum" else (
        min(low, float(values.min()) - 0.5), max(high, float(values.max()) + 0.5)
    )  # fmt: skip


# ---- drawing -----------------------------------------------------------------------------------------------------------
def _draw(ax: Axes, row: _Row, at: float, values: list[float], limits: tuple[float, float]) -> None:
    estimate, low, high = values
    colour = _COLOURS[row.kind]
    if row.kind == "pooled":
        a, b = (float(np.clip(v, *limits)) for v in (low, high))
        ax.fill([a, estimate, b, estimate], [at, at - 0.3, at, at + 0.3], fc=colour, ec=colour, lw=0.5, zorder=4)
        for end, outside in ((a, low < limits[0]), (b, high > limits[1])):
            if outside:
                _arrow(ax, at, end, limits, colour)
        return
    if row.kind == "point":
        ax.plot([estimate], [at], ls="", marker="x", ms=4, mew=1.0, color=colour, zorder=4)
        return
    if math.isfinite(low) or math.isfinite(high):
        _bar(ax, at, low, high, limits, colour, 1.1)
    if math.isfinite(estimate):
        size = 3.4 + 3.6 * math.sqrt(row.weight) if row.kind == "study" else 3.8
        fill = colour if row.kind == "study" else "white"
        ax.plot([estimate], [at], ls="", marker="s" if row.kind == "study" else "o", ms=size, mfc=fill, mec=colour, mew=0.9,
                zorder=4)  # fmt: skip


def _bar(ax: Axes, at: float, low: float, high: float, limits: tuple[float, float], colour: str, lw: float) -> None:
    a, b = max(low, limits[0]), min(high, limits[1])
    ax.hlines(at, a, b, color=colour, lw=lw)
    if low < limits[0]:
        _arrow(ax, at, a, limits, colour)
    if high > limits[1]:
        _arrow(ax, at, b, limits, colour)


def _arrow(ax: Axes, at: float, end: float, limits: tuple[float, float], colour: str) -> None:
    ax.plot([end], [at], ls="", marker="<" if end <= limits[0] else ">", ms=3.2, color=colour, clip_on=False, zorder=5)


def _label(ax: Axes, rows: list[_Row], places: np.ndarray, quantity: Quantity, page: bool) -> None:
    ax.set_yticks(places, [r.label if page else "" for r in rows])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    optimum = quantity == "optimum"
    weighted = not optimum and any(r.weight for r in rows)  # weights are of pooled studies
    beside = 84 if weighted else 50  # points right of the axes
    if page:
        _write(ax, (1, -0.95), (6, 0), "$N$", style.GREY)
        _write(ax, (1, -0.95), (74, 0), "weight" if weighted else "", style.GREY, "right")
        _write(ax, (1, -0.95), (beside, 0), "estimate [95\u00a0%]", style.GREY)
    for at, row in zip(places, rows, strict=True):
        weight = f"{100 * row.weight:.0f}\u00a0%" if row.weight else ""
        text = _value(row, optimum)
        if page:
            _write(ax, (1, at), (6, 0), row.convention, style.GREY)
            _write(ax, (1, at), (74, 0), weight, style.GREY, "right")
            _write(ax, (1, at), (beside, 0), text, style.INK)
        else:  # no room beside the bars: a line above each
            other = f", {row.convention} N" if row.convention != "backbone" and "N total" not in row.label else ""
            style.haloed(
                _write(
                    ax, (0, at), (0, 7.5), f"{row.label}{other}{', ' + weight if weight else ''}", style.INK, size=6.4
                )
            )
            style.haloed(_write(ax, (1, at), (0, 7.5), text, style.GREY, "right", size=6.2))


def _value(row: _Row, optimum: bool) -> str:
    if row.kind == "point":
        return f"{math.exp(row.estimate):.3g}, no interval" if optimum else _number(row.estimate, optimum)
    if row.kind == "new":
        low, high = (math.exp(v) if optimum else v for v in (row.low, row.high))
        return _span(low, high, optimum)
    if not math.isfinite(row.estimate):  # known from one side
        return f"at least {math.exp(row.low):.3g}" if math.isfinite(row.low) else f"at most {math.exp(row.high):.3g}"
    values = [math.exp(v) if optimum else v for v in (row.estimate, row.low, row.high)]
    return f"{_number(values[0], optimum)} {_span(values[1], values[2], optimum)}"


def _span(low: float, high: float, optimum: bool) -> str:
    return f"[{_number(low, optimum)}, {_number(high, optimum)}]"


def _number(value: float, optimum: bool) -> str:
    text = f"{value:.3g}" if optimum else f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def _write(ax: Axes, at: tuple[float, float], off: tuple[float, float], text: str, colour: str, ha: str = "left",
           size: float = style.SMALL) -> Text:  # fmt: skip
    return ax.annotate(text, at, xycoords=("axes fraction", "data"), xytext=off, textcoords="offset points", color=colour, ha=ha,
                       fontsize=size, va="center", annotation_clip=False, zorder=6)  # fmt: skip


def _axis(ax: Axes, quantity: Quantity) -> None:
    ax.set_xlabel(_AXIS[quantity])
    if quantity == "optimum":
        low, high = ax.get_xlim()
        ax.xaxis.set_major_locator(FixedLocator([t for t in _TICKS if low <= t <= high]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    sides = {"contrast": ("wide is better", "deep is better")}.get(quantity)
    if sides:
        for x, ha, text in (
            (0.0, "left", f"\N{LEFTWARDS ARROW} {sides[0]}"),
            (1.0, "right", f"{sides[1]} \N{RIGHTWARDS ARROW}"),
        ):
            ax.text(x, 1.01, text, transform=ax.transAxes, fontsize=6.4, color=style.GREY, ha=ha, va="bottom")


def _note(result: PooledShape, quantity: Quantity, rows: list[_Row]) -> str:
    kinds = {r.kind for r in rows}
    weighted = any(r.weight for r in rows)
    parts = ["Squares: pre-norm decoders" + (", area by weight" if weighted and quantity != "optimum" else "") + "."]
    if "other" in kinds:
        parts.append("Circles: other architectures" + (" or another count of N." if quantity == "optimum" else "."))
    if "point" in kinds:
        parts.append("Crosses: printed without an interval.")
    table = result.effects[result.effects["quantity"] == quantity]
    if quantity == "optimum":
        parts.append(_methods(table))
    if "pooled" in kinds:
        parts.append("Diamonds: pooled; grey line: where a new study's true effect lies (95\u00a0%).")
    scale = math.exp if quantity == "optimum" else float
    low, high = _limits(rows, quantity)
    if any(scale(r.low) < low or scale(r.high) > high for r in rows):
        parts.append("Arrows: the interval goes on.")
    if "pooled" not in kinds:
        entering = sum(r.kind == "study" and math.isfinite(r.estimate) for r in rows)
        told = "locates its optimum" if quantity == "optimum" else "has an estimate"
        parts.append(f"{('No', 'One')[entering > 0]} pre-norm study {told}: nothing is pooled.")
    return " ".join([*(p for p in parts if p), *_absent(table[table["baseline"]], rows)])


def _methods(table: pd.DataFrame) -> str:
    """How the intervals of the optima were made, and for which studies where not in one way."""
    own = table[np.isfinite(table["low"].astype(float)) | np.isfinite(table["high"].astype(float))]
    by = {
        str(m): list(dict.fromkeys(g["study"])) for m, g in own[own["interval"] != ""].groupby("interval", sort=False)
    }
    several = len(set(own["study"])) > 1
    told = [m + (f" ({', '.join(studies)})" if several else "") for m, studies in by.items()]
    return f"Intervals: {'; '.join(told)}." if told else ""


def _absent(table: pd.DataFrame, rows: list[_Row]) -> list[str]:
    """Studies without a row, by why: their logs are not at hand, or they don't identify the quantity."""
    shown = {r.label.split(",")[0] for r in rows}
    skipped = table["note"].str.startswith(_SKIPPED)
    groups = (("Not identified", table[~skipped]), ("Not computed, their logs are not at hand", table[skipped]))
    out = []
    for told, part in groups:
        names = [s for s in dict.fromkeys(part["study"]) if s not in shown]
        out += [f"{told}: {', '.join(names)}."] if names else []
    return out

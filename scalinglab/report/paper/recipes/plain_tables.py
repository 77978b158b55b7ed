"""Recipes for any table: `csv_table` prints columns, `csv_numbers` takes cells into the text, `csv_forest` draws estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Inputs, Options, recipe
from scalinglab.report.tables import rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TableOptions(Options, kw_only=True):
    """columns: column -> its heading, in this order (all by default). errors: column -> column of its standard error, which
    sets its digits. digits: significant digits of other numbers. where: condition on rows. sort: columns. most: rows at most."""

    columns: dict[str, str] = msgspec.field(default_factory=dict)
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    digits: int = 3
    where: str | None = None
    sort: list[str] = msgspec.field(default_factory=list)
    most: int | None = None


class Cell(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One number: a column's value in the rows that meet `where`, taken together by `take`."""

    column: str
    where: str | None = None
    take: Literal["only", "min", "max", "mean", "sum", "count"] = "only"
    error: str | None = None  # column of its standard error
    form: Literal["plain", "percent", "size", "p", "words"] = "plain"
    digits: int = 3


class NumbersOptions(Options, kw_only=True):
    """numbers: name -> where its value stands."""

    numbers: dict[str, Cell]


class ForestOptions(Options, kw_only=True):
    """Columns of the labels, estimates, limits, and optionally of a known or published value."""

    label: str
    estimate: str
    low: str
    high: str
    reference: str | None = None
    reference_label: str = "published"
    xlabel: str = "Estimate"
    where: str | None = None
    width: Literal["column", "page"] = "column"


@recipe("csv_table", "table", options=TableOptions, most=1)
def csv_table(inputs: Inputs, options: TableOptions) -> Table:
    """Columns of any table under their headings, numbers rounded by their standard errors."""
    frame = inputs.table(where=options.where)
    _need(frame, [*options.columns, *options.errors, *options.errors.values(), *options.sort], inputs.names[0])
    if options.sort:
        frame = frame.sort_values(options.sort, kind="stable")
    frame = frame.head(options.most).reset_index(drop=True)
    shown = pd.DataFrame({
        heading: _shown(frame, column, options) for column, heading in (options.columns or {c: c for c in frame.columns}).items()
    })  # fmt: skip
    return Table(shown, frame)


@recipe("csv_numbers", "numbers", options=NumbersOptions, most=1)
def csv_numbers(inputs: Inputs, options: NumbersOptions) -> list[Number]:
    """Cells of any table as numbers of the text."""
    return [_number(name, cell, inputs) for name, cell in options.numbers.items()]


@recipe("csv_forest", "figure", options=ForestOptions, most=1)
def csv_forest(inputs: Inputs, options: ForestOptions) -> Figure:
    """Estimates with their limits, one row each, beside known or published values."""
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    frame = inputs.table(where=options.where)
    wanted = [
        options.label,
        options.estimate,
        options.low,
        options.high,
        *([options.reference] if options.reference else []),
    ]
    _need(frame, wanted, inputs.names[0])
    if not len(frame):
        raise ConfigError(f"{inputs.names[0]}: no row is left to draw")
    with canvas(options.width, 0.75 + 0.19 * len(frame)) as figure:
        ax = figure.add_subplot()
        y = np.arange(len(frame))
        ax.hlines(y, frame[options.low], frame[options.high], color=style.colour_of(0), lw=1.3)
        ax.plot(frame[options.estimate], y, ls="", marker="o", color=style.colour_of(0), label="estimate, limits")
        if options.reference:
            ax.plot(
                frame[options.reference], y, ls="", marker="x", color=style.colour_of(1), label=options.reference_label
            )
            figure.legend(loc="outside upper left", ncols=2)
        ax.set_yticks(y, [str(v) for v in frame[options.label]])
        ax.set_ylim(len(frame) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel(options.xlabel)
        left, right = ax.get_xlim()
        if left < 0 < right:
            ax.axvline(0, color=style.GREY, lw=0.6, zorder=0)
            ax.set_xlim(left, right)
        figure.set_layout_engine("constrained", w_pad=0.08)  # long labels keep off the edge
    return figure


def _shown(frame: pd.DataFrame, column: str, options: TableOptions) -> list[Any]:
    values = frame[column]
    if column in options.errors:
        return [rounded(float(v), float(s))[0] for v, s in zip(values, frame[options.errors[column]], strict=True)]
    if not pd.api.types.is_float_dtype(values):
        return values.tolist()
    return [products.tables.plain(float(v), options.digits) for v in values]


def _number(name: str, cell: Cell, inputs: Inputs) -> Number:
    frame = inputs.table(where=cell.where)
    _need(frame, [cell.column, *([cell.error] if cell.error else [])], inputs.names[0])
    where = f" where {cell.where}" if cell.where else ""
    if cell.take == "count":
        return products.plain(name, float(len(frame)))
    if not len(frame) or (cell.take == "only" and len(frame) > 1):
        raise ConfigError(
            f"{inputs.names[0]}: number {name!r} asks for one row{where}, and there are {len(frame)}; narrow where, or set take"
        )
    if cell.form == "words":
        return products.words(name, str(frame[cell.column].iloc[0]))
    column = pd.to_numeric(frame[cell.column])
    value = float(column.iloc[0] if cell.take == "only" else getattr(column, cell.take)())
    if cell.error and cell.take == "only":
        return products.measured(name, value, float(frame[cell.error].iloc[0]))
    if cell.form == "p":
        return products.p_value(name, value)
    if cell.form == "size":
        return products.size(name, value)
    return (
        products.percent(name, value, cell.digits)
        if cell.form == "percent"
        else products.plain(name, value, cell.digits)
    )


def _need(frame: pd.DataFrame, columns: list[str], name: str) -> None:
    missing = [c for c in columns if c not in frame]
    if missing:
        raise ConfigError(f"{name}: has no column {missing[0]!r}; there are {', '.join(map(str, frame.columns))}")

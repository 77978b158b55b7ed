"""A run table against its schema: each breach is one sentence with place, column and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.schema import KEY, SCHEMA, STOPPED, Column, Place, stopped_rows


def validate(
    df: pd.DataFrame,
    *,
    source: str | Place = "run table",
    key: Sequence[str] = (),
    require: Sequence[str] = ("loss",),
) -> pd.DataFrame:
    """Check a run table against `SCHEMA` and return it with canonical types.

    Rows whose `status` says diverged, killed, failed or nan may lack a loss; all others need a finite positive one.

    Parameters
    ----------
    df
        Run table; other columns than those of `SCHEMA` pass unchanged.
    source
        Name for messages, or a function from row position (0-based) to a place such as "runs.csv, row 17".
    key
        Further columns that, with run_id and those of step, tokens, eval_dataset and split that exist, make a row
        unique.
    require
        Columns that must be there.

    Raises
    ------
    SchemaError
        Empty table, missing column, a cell that isn't a number or out of range, a missing value in a column that must
        be complete, a duplicated key. Names place and column.
    """
    place = (lambda i: f"{source}, row {i + 1}") if isinstance(source, str) else source
    name = source if isinstance(source, str) else "run table"
    if not len(df):
        raise SchemaError(f"{name} has no rows")
    for column in require:
        if column not in df or df[column].isna().all():
            raise SchemaError(f"{name} has no column {column!r}; its columns are {_listed(df.columns)}")
    out = df.copy(deep=False)
    stopped = stopped_rows(df)
    for column, spec in SCHEMA.items():
        if column in df:
            if spec.dtype == "str":
                _check_complete(out, column, out[column], spec, place, None)
                continue
            values = _numeric(out, column, place)
            if values.isna().all():
                out[column] = values
                continue
            _check_range(out, column, values, spec, place, stopped)
            _check_complete(out, column, values, spec, place, stopped)
            out[column] = _whole(out, column, values, place) if spec.dtype == "int" else values.astype(float)
    _check_duplicates(out, key, place)
    return out


def _numeric(df: pd.DataFrame, column: str, place: Place) -> pd.Series:
    values = df[column]
    if values.dtype.kind in "iuf":
        return values
    if values.dtype.kind == "b":
        return values.astype(float)
    numbers = pd.to_numeric(values, errors="coerce")
    bad = np.flatnonzero((numbers.isna() & values.notna()).to_numpy())
    if bad.size:
        i = int(bad[0])
        more = f" (and {bad.size - 1:,} more rows)" if bad.size > 1 else ""
        cell = str(values.iloc[i])
        raise SchemaError(
            f"{place(i)}, {_label(df, column)}: {cell[:60]!r} is not a number{more}; correct it, or leave such rows "
            "out with where=..."
        )
    return numbers.astype(float)


def _check_range(
    df: pd.DataFrame, column: str, values: pd.Series, spec: Column, place: Place, stopped: np.ndarray
) -> None:
    array = values.to_numpy(dtype=float, na_value=np.nan)
    bad = np.isinf(array)
    if spec.low is not None:
        bad |= (array <= spec.low) if spec.open else (array < spec.low)
    if column == "loss":
        bad &= ~stopped
    if not bad.any():
        return
    i = int(np.flatnonzero(bad)[0])
    bound = "finite" if spec.low is None else "finite and above 0" if spec.open else f"at least {spec.low:g}"
    more = f" (and {int(bad.sum()) - 1:,} more rows)" if bad.sum() > 1 else ""
    sign = (
        "infinite" if np.isinf(array[i]) else "zero" if array[i] == 0 else "negative" if array[i] < 0 else "too small"
    )
    raise SchemaError(
        f"{place(i)}, {_label(df, column)}: {array[i]:g} is {sign}, {column} must be {bound}{more}; correct it, or "
        f"leave such rows out with where='{_filter(column, spec)}'"
    )


def _filter(column: str, spec: Column) -> str:
    if spec.low is None or column == "loss":
        return f"{column} > 0 and {column} < 1e300"
    return f"{column} {'>' if spec.open else '>='} {spec.low:g}"


def _check_complete(
    df: pd.DataFrame, column: str, values: pd.Series, spec: Column, place: Place, stopped: np.ndarray | None
) -> None:
    must = spec.complete or column == "loss"
    if not must:
        return
    missing = values.isna().to_numpy()
    if column != "loss" and missing.all():
        return
    if stopped is not None:
        missing = missing & ~stopped
    rows = np.flatnonzero(missing)
    if not rows.size:
        return
    where = [place(int(i)) for i in rows[:5]]
    file = where[0].rpartition(", ")[0] + ", "  # named once
    shown = ", ".join([where[0], *(w.removeprefix(file) for w in where[1:])])
    shown += f", ... ({rows.size:,} rows in all)" if rows.size > 5 else ""
    why = "is missing (empty or NaN)" if column == "loss" else "is missing (empty or NaN) though other rows have it"
    status = (
        f" (a row without a loss is kept only where status is one of {', '.join(STOPPED)})" if column == "loss" else ""
    )
    raise SchemaError(
        f"{shown}, {_label(df, column)}: {column} {why}{status}; correct it, or leave such rows out with "
        f"where='{column} == {column}'"
    )


def _whole(df: pd.DataFrame, column: str, values: pd.Series, place: Place) -> pd.Series:
    if values.dtype.kind in "iu":
        return values
    array = values.to_numpy(dtype=float)
    bad = np.flatnonzero(np.isfinite(array) & (array % 1 != 0))
    if bad.size:
        i = int(bad[0])
        hint = "; if it is the loss, write columns={'loss': 'L'}" if _source(df, column) == "L" else ""
        raise SchemaError(f"{place(i)}, {_label(df, column)}: {array[i]:g} is not a whole number{hint}")
    return values.astype("int64") if np.isfinite(array).all() else values


def _check_duplicates(df: pd.DataFrame, key: Sequence[str], place: Place) -> None:
    unknown = [c for c in key if c not in df]
    if unknown:
        raise ConfigError(f"key column {unknown[0]!r} is not in the table; its columns are {_listed(df.columns)}")
    if "run_id" not in df:
        return
    columns = [c for c in KEY if c in df and df[c].notna().any()] + [c for c in key if c not in KEY]
    if not df.duplicated(columns[:2]).any():  # unique already: spares the other columns
        return
    again = df.duplicated(columns, keep="first").to_numpy()
    if not again.any():
        return
    second = int(np.flatnonzero(again)[0])
    wanted = df[columns].iloc[second]
    same = np.ones(len(df), dtype=bool)
    for column in columns:
        values = df[column]
        same &= (values.isna() if pd.isna(wanted[column]) else values == wanted[column]).to_numpy(dtype=bool)
    first = int(np.flatnonzero(same)[0])
    shown = ", ".join(f"{c}={wanted[c]}" for c in columns if not pd.isna(wanted[c]))
    raise SchemaError(
        f"{place(second)} repeats the key of {place(first)}: {shown} ({int(again.sum()):,} repeated rows); remove "
        "them, or name the column that tells them apart, e.g. key=('config',)"
    )


def _source(df: pd.DataFrame, column: str) -> str:
    return str(df.attrs.get("mapping", {}).get(column, column))


def _label(df: pd.DataFrame, column: str) -> str:
    source = _source(df, column)
    return f"column {column!r}" if source == column else f"column {source!r} (read as {column})"


def _listed(columns: Any, most: int = 20) -> str:
    names = [str(c) for c in columns]
    return ", ".join(names[:most]) + (f", ... ({len(names):,} in all)" if len(names) > most else "")

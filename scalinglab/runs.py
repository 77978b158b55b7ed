"""Run tables: one row per run, or per run and checkpoint, in columns that every later stage knows.

A run table is a pandas DataFrame with the columns of `SCHEMA` (those that are known) and whatever the user adds.
`attrs` carry where it comes from: `source`, `mapping`, `notes`, `params` (which N is meant) and `key`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.expressions import evaluate
from scalinglab.schema import SCHEMA, ColumnsByName, ParamsConvention, ordered
from scalinglab.shapes import FFN, FlopConvention, flops_per_token, parameter_counts
from scalinglab.validation import validate

__all__ = ["SCHEMA", "ParamsConvention", "complete", "condition", "declare_params", "final_rows", "select", "validate"]


_COUNT_TOLERANCE = 0.01  # a closed-form count this far from a given one describes another architecture


def complete(df: pd.DataFrame, *, ffn: FFN = "swiglu", tied: bool = False) -> pd.DataFrame:
    """Add what follows from the columns there: aspect, parameter counts by component, FLOPs in three conventions.

    A given value is never overwritten; what was computed is written to attrs["mapping"] and attrs["notes"]. Counts use
    the closed form of `scalinglab.shapes` with `ffn` and `tied` as said here. Where that misses a given
    params_backbone or params_total by more than 1 % the shape is another architecture's, and the components of that row
    stay empty.
    """
    out = df.copy(deep=False)
    mapping, notes = dict(df.attrs.get("mapping", {})), list(df.attrs.get("notes", []))

    def fill(column: str, values: Any, how: str) -> None:
        values = pd.Series(np.asarray(values, dtype=float), index=out.index)
        old = _floats(out, column)
        missing = old.isna() & values.notna()
        if missing.any():
            merged = old.where(~missing, values)
            whole = SCHEMA[column].dtype == "int" and bool((merged % 1 == 0).all())
            out[column] = merged.astype("int64") if whole else merged
            mapping[column] = (
                f"computed: {how}" if old.isna().all() else f"{mapping.get(column, column)}; computed: {how}"
            )

    depth, width = _floats(out, "depth"), _floats(out, "width")
    fill("aspect", width / depth, "width / depth")
    _fill_counts(out, fill, notes, ffn, tied)
    heads = _floats(out, "heads")
    if "heads" in out:
        fill("head_dim", (width / heads).where(width % heads == 0), "width / heads")

    tokens, backbone = _floats(out, "tokens"), _floats(out, "params_backbone")
    name, size = "params_backbone", backbone
    for other in ("params_total", "params"):
        if size.isna().all():
            name, size = other, _floats(out, other)
    fill("flops_6n", flops_per_token(size, convention="6n") * tokens, f"6 * {name} * tokens")
    if "flops_6n" in mapping and name != "params_backbone" and mapping["flops_6n"].startswith("computed"):
        notes.append(f"flops_6n uses {name}: the table has no params_backbone")
    conventions: tuple[tuple[FlopConvention, int], ...] = (("causal", 6), ("full", 12))
    for convention, factor in conventions if {"vocab", "context", "params_backbone"} <= set(out.columns) else ():
        per_token = flops_per_token(
            backbone,
            convention=convention,
            depth=depth,
            width=width,
            vocab=_floats(out, "vocab"),
            context=_floats(out, "context"),
            attention_width=(heads * _floats(out, "head_dim")).fillna(width),
        )
        how = f"tokens * (6 * (params_backbone + vocab * width) + {factor} * depth * width * context)"
        fill(f"flops_{convention}", per_token * tokens, how)
    out.attrs = {**df.attrs, "mapping": mapping, "notes": notes}
    return out[ordered(out.columns)]


def declare_params(df: pd.DataFrame, convention: ParamsConvention) -> pd.DataFrame:
    """Set the column `params` to the N that the analysis means, and say so in attrs["params"].

    Raises
    ------
    SchemaError
        The counts of that convention are not in the table (or not in every row).
    """
    columns = {"backbone": "params_backbone", "total": "params_total", "as given": "params"}
    if convention not in columns:
        raise ConfigError(f"params={convention!r} is unknown; choose one of {', '.join(map(repr, columns))}")
    column = columns[convention]
    missing = _floats(df, column).isna()
    if missing.all():
        have = [c for c in ("params_backbone", "params_total", "params") if _floats(df, c).notna().any()]
        raise SchemaError(
            f"params={convention!r} needs the column {column!r}, which is not in the table; "
            f"it has {', '.join(have) or 'no parameter counts'} (computable from a full shape with ffn_dim and vocab)"
        )
    if missing.any():
        first = int(np.flatnonzero(missing.to_numpy())[0]) + 1
        raise SchemaError(f"column {column!r} is missing in {int(missing.sum())} rows (first: row {first})")
    out = df.copy(deep=False)
    out["params"] = df[column]
    mapping = dict(df.attrs.get("mapping", {}))
    mapping["params"] = mapping.get(column, column) if convention == "as given" else column
    out.attrs = {**df.attrs, "params": convention, "mapping": mapping}
    return out[ordered(out.columns)]


def final_rows(df: pd.DataFrame) -> pd.DataFrame:
    """Last row of each run (and evaluation set): the highest step, else the most tokens, else the last in order."""
    if "run_id" not in df:
        raise SchemaError("final_rows needs the column 'run_id'")
    groups = [c for c in ("run_id", "eval_dataset", "split", *df.attrs.get("key", ())) if c in df]
    order = next((c for c in ("step", "tokens") if c in df and df[c].notna().any()), None)
    at = np.arange(len(df))
    if order is not None:
        at = np.argsort(_floats(df, order).fillna(-np.inf).to_numpy(), kind="stable")
    run = df.groupby(groups, dropna=False, sort=False).ngroup().to_numpy()
    last = pd.Series(at).groupby(run[at]).last().to_numpy()
    return _with_attrs(df.iloc[np.sort(last)], df)


def select(df: pd.DataFrame, where: str) -> pd.DataFrame:
    """Rows for which the condition `where` holds, e.g. "depth > 3 and architecture == 'pre_ln'".

    Columns whose names aren't identifiers are known with `_` for the odd characters. Missing values fail comparisons.

    Raises
    ------
    ConfigError
        An unknown column, or an expression that isn't a condition.
    SchemaError
        No row is left.
    """
    kept = df.loc[condition(df, where)]
    if not len(kept):
        raise SchemaError(f"where={where!r} keeps none of the {len(df):,} rows")
    out = _with_attrs(kept, df)
    out.attrs["notes"] = [*df.attrs.get("notes", []), f"where {where}: {len(kept):,} of {len(df):,} rows kept"]
    return out


def condition(df: pd.DataFrame, where: str) -> np.ndarray:
    """Boolean mask [n] of the condition `where` over the columns of `df`."""
    mask = np.asarray(evaluate(where, ColumnsByName(df), what="where"))
    if mask.dtype == object:
        mask = np.array([bool(v) and isinstance(v, (bool, np.bool_)) for v in np.broadcast_to(mask, len(df))])
    if mask.dtype != bool:
        raise ConfigError(f"where {where!r} is not a condition: compare something, e.g. {where!r} + ' > 0'")
    return np.broadcast_to(mask, len(df))


def _fill_counts(
    out: pd.DataFrame, fill: Callable[[str, Any, str], None], notes: list[str], ffn: FFN, tied: bool
) -> None:
    if not {"depth", "width", "ffn_dim"} <= set(out.columns):
        return
    if all(_floats(out, c).notna().all() for c in SCHEMA if c.startswith("params_")):
        return  # nothing is missing
    depth, width, ffn_dim = (_floats(out, c) for c in ("depth", "width", "ffn_dim"))
    heads, head_dim, kv_heads = (_floats(out, c) for c in ("heads", "head_dim", "kv_heads"))
    head_dim = head_dim.fillna(width / heads)
    q = (heads * head_dim).fillna(width)
    kv = (kv_heads * head_dim).fillna(q)
    counts = parameter_counts(
        depth, width, ffn_dim, attention_width=q, kv_width=kv, vocab=_floats(out, "vocab"), ffn=ffn, tied=tied
    )
    assumed = f"{ffn} feed-forward, {'tied' if tied else 'untied'} readout"
    fits = pd.Series(True, index=out.index)
    given = []
    for column in ("params_backbone", "params_total"):
        off = (counts[column] / _floats(out, column) - 1).abs()
        misses = off > _COUNT_TOLERANCE
        fits &= ~misses
        if misses.any():
            notes.append(
                f"components left empty in {int(misses.sum()):,} of {len(out):,} rows: the closed form ({assumed}) "
                f"misses the given {column} by up to {off.max():.2g} (relative)"
            )
        elif off.notna().any():
            given.append(f"{column} by at most {off.max():.1g}")
    before = set(out.columns)
    for column, values in counts.items():
        fill(column, values.where(fits), f"shape ({assumed})")
    if set(out.columns) > before and fits.any():
        said = f"; differs from the given {' and '.join(given)} (relative)" if given else ""
        notes.append(f"parameter counts by component computed from the shape: {assumed}{said}")


def _floats(df: pd.DataFrame, column: str) -> pd.Series:
    if column not in df:
        return pd.Series(np.nan, index=df.index)
    return pd.to_numeric(df[column], errors="coerce").astype(float)


def _with_attrs(df: pd.DataFrame, source: pd.DataFrame) -> pd.DataFrame:
    out = df.copy()
    out.attrs = dict(source.attrs)
    return out

"""Columns of a file -> canonical columns, with a record of what was taken for what.

What the user maps comes first and is trusted; then names are recognised (`scalinglab.aliases`); the rest is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from scalinglab import aliases
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.expressions import evaluate, names
from scalinglab.schema import SCHEMA, ColumnsByName, ParamsConvention, identifier, ordered
from scalinglab.units import OTHER_UNITS, suggestion

SIZES = ("params", "params_total", "params_backbone")


class NoLossError(SchemaError):
    """A file without a loss: skipped in a folder, an error by itself."""


def map_columns(
    raw: pd.DataFrame, columns: Mapping[str, str], params: ParamsConvention, shown: str, notes: list[str]
) -> pd.DataFrame:
    """Columns of the file -> canonical columns and the user's own; attrs["mapping"] says which is which."""
    known = ColumnsByName(raw)
    out: dict[str, object] = {}
    mapping: dict[str, str] = {}
    used: set[str] = set()
    read_for_size: set[str] = set()
    for canonical, text in columns.items():
        out[canonical], read = _explicit(canonical, text, known, raw, shown)
        mapping[canonical] = text
        if text in known:
            used.add(known.source(text))
        elif canonical in SIZES:
            read_for_size |= read
    empty = {c for c in raw.columns if raw[c].isna().all()}
    candidates = aliases.recognise([c for c in raw.columns if c not in used and c not in empty], mapped=columns)
    for canonical in SIZES:
        left = [c for c in candidates.get(canonical, []) if c not in read_for_size]
        candidates[canonical] = left
    for canonical, found in candidates.items():
        if found:
            chosen = _choose(canonical, found, raw, shown, notes)
            out[canonical], mapping[canonical] = raw[chosen], chosen
            used.add(chosen)
    _settle_params(out, mapping, params, notes)
    if "loss" not in out:
        raise no_loss(shown, list(raw.columns), empty)
    taken = {*out, *mapping.values()}
    for column in raw.columns:
        if column not in used:
            out[column if column not in taken and column not in SCHEMA else _free(f"file_{column}", out)] = raw[column]
    frame = pd.DataFrame(out, index=raw.index)
    frame = frame[ordered(frame.columns)]
    frame.attrs["mapping"] = mapping
    return frame


def _explicit(
    canonical: str, text: str, known: ColumnsByName, raw: pd.DataFrame, shown: str
) -> tuple[object, set[str]]:
    written = f"columns={{{canonical!r}: {text!r}}}"
    if text in known:
        return raw[known.source(text)], {known.source(text)}
    try:
        read = names(text)
    except ConfigError as error:
        raise SchemaError(f"{shown}: {written} is neither a column nor an expression ({error})") from None
    for name in sorted(read):
        if name not in known:
            raise SchemaError(
                f"{shown}: {written} reads {name!r}, which is not a column{aliases.near(name, raw.columns)}; "
                f"the file has {_shown(raw.columns)}"
            )
    sources = {known.source(name) for name in read}
    try:
        value = evaluate(text, known, what=written)
    except ConfigError as error:
        raise SchemaError(f"{shown}: {error}") from None
    if isinstance(value, str) or np.ndim(value) == 0:
        return np.full(len(raw), value), sources
    return pd.Series(np.asarray(value), index=raw.index), sources


def _choose(canonical: str, found: Sequence[str], raw: pd.DataFrame, shown: str, notes: list[str]) -> str:
    """One of several columns: by the stated order, the canonical name, or because they are equal; else an error."""
    first, others = found[0], list(found[1:])
    if canonical == "loss":
        plain = "_".join(aliases.spellings(first)).lower()
        if "train" in plain:
            notes.append(f"{shown}: loss is {first!r}, a training loss: the file has no validation loss")
        elif others:
            kind = "validation before training" if set(others) & set(raw.columns) else ""
            notes.append(f"{shown}: loss is {first!r} ({kind}); also there: {', '.join(map(repr, others))}")
        return first
    if not others:
        return first
    if aliases.decides_by_order(canonical) or canonical in found:
        chosen = first if aliases.decides_by_order(canonical) else canonical
        rest = ", ".join(repr(c) for c in found if c != chosen)
        notes.append(f"{shown}: {canonical} is {chosen!r}; also there: {rest}")
        return chosen
    if all(_same(raw[first], raw[other]) for other in others):
        notes.append(f"{shown}: {canonical} is {first!r}, equal to {', '.join(map(repr, others))}")
        return first
    raise SchemaError(
        f"{shown}: {' and '.join(map(repr, found))} could each be {canonical} and differ; say which, e.g. "
        f"columns={{{canonical!r}: {first!r}}}"
    )


def _settle_params(out: dict[str, object], mapping: dict[str, str], params: str, notes: list[str]) -> None:
    """A column called `params` is the total where a non-embedding count stands beside it or the user says so."""
    if "params" not in out or "params_total" in out:
        return
    if "params_backbone" in out or params == "total":
        out["params_total"] = out["params"]
        mapping["params_total"] = mapping["params"]
        if params != "as given":
            del out["params"], mapping["params"]
        if "params_backbone" in out:
            notes.append(
                f"{mapping['params_total']!r} is read as params_total, {mapping['params_backbone']!r} is the backbone"
            )


def no_loss(shown: str, columns: list[str], empty: set[str]) -> SchemaError:
    """The error for a file without a loss; `NoLossError` only where nothing in it hints at one."""
    for column in columns:
        unit = next((OTHER_UNITS[s] for s in aliases.spellings(column) if s in OTHER_UNITS), None)
        if unit is not None:
            what, expression = unit
            return SchemaError(
                f"{shown}: column {column!r} is {what}, a loss is in nats per token; write "
                f"{suggestion('loss', expression.format(identifier(column)))}"
            )
    blank = [c for c in columns if c in empty and "loss" in c.lower()]
    if blank:
        return SchemaError(f"{shown}, column {blank[0]!r}: loss is missing in every row")
    letter = "; if 'L' is the loss write columns={'loss': 'L'}" if "L" in columns else ""
    return NoLossError(
        f"{shown}: no column is a loss; the file has {_shown(columns)}; name one, e.g. columns={{'loss': 'NAME'}}{letter}"
    )


def _same(a: pd.Series, b: pd.Series) -> bool:
    return bool(((a == b) | (a.isna() & b.isna())).all())


def _free(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name


def _shown(columns: Sequence[str] | pd.Index, most: int = 25) -> str:
    listed = [repr(str(c)) for c in columns]
    return "the columns " + ", ".join(listed[:most]) + (f", ... ({len(listed):,} in all)" if len(listed) > most else "")

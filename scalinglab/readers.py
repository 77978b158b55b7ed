"""Other people's logs -> run tables.

`read_runs` tells the format from the file, the meaning of a column from its name or from `columns=`, and says in
attrs["mapping"] and attrs["notes"] what it took for what. It never converts a unit or drops a row on its own account.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from scalinglab import aliases, trackers
from scalinglab.collecting import collect, digest
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.expressions import names
from scalinglab.folders import LogFile, PathLike, find_logs
from scalinglab.formats import Keep, read_table, sha256
from scalinglab.json_tables import RawTable, Torn
from scalinglab.mapping import SIZES, NoLossError, map_columns, no_loss
from scalinglab.runs import ParamsConvention, complete, condition, declare_params, validate
from scalinglab.schema import SCHEMA, Place, identifier, ordered, stopped_rows
from scalinglab.shapes import FFN
from scalinglab.units import check_units

MAX_USER_COLUMNS = 200
_SETTINGS = ("architecture", "parametrization", "match_group", "depth", "width", "lr", "seed", *SIZES)


def read_runs(
    path: PathLike | Sequence[PathLike],
    *,
    columns: Mapping[str, str] | None = None,
    where: str | None = None,
    params: ParamsConvention = "backbone",
    key: Sequence[str] = (),
    encoding: str = "utf-8",
    torn: Torn = "error",
    ffn: FFN = "swiglu",
    tied: bool = False,
) -> pd.DataFrame:
    """Read run logs into one run table.

    Parameters
    ----------
    path
        A file, a folder, "embedded:NAME" or a list of them. CSV, TSV, Parquet, JSON lines, W&B exports, Hugging Face
        trainer_state.json, TensorBoard events, nanoGPT-style CSV.
    columns
        canonical column -> column of the file, or an expression of its columns: {"params": "size_M * 1e6"}. A column
        mapped here is trusted: no check of its unit. Odd characters are `_` in expressions (val/loss is val_loss).
    where
        Condition on rows, over columns of the file and canonical ones: "phase == 'hot' and depth > 3".
    params
        Which N the column `params` is to be. Where the file has no such count the total, else the count as given is
        taken, with a note.
    key
        Columns that tell rows of one run, step, data size and evaluation set apart.
    encoding
        Of text files.
    torn
        "drop" leaves out a last JSON line that was cut off; by default it is an error.
    ffn, tied
        The shape's feed-forward and readout, for counts by component (see `scalinglab.runs.complete`).

    Returns
    -------
    DataFrame
        Validated run table with canonical columns first. attrs: source (path, sha256), mapping, notes, params, key.

    Raises
    ------
    SchemaError
        A file is missing, empty, damaged or not a table; no loss; a bad cell; a repeated key; a suspected unit. One
        sentence with file, row and column, and what to write.
    ConfigError
        An option or expression isn't usable, or a format needs an extra.
    """
    if params not in get_args(ParamsConvention):
        raise ConfigError(
            f"params={params!r} is unknown; choose one of {', '.join(map(repr, get_args(ParamsConvention)))}"
        )
    columns = dict(columns or {})
    aliases.check_targets(columns)
    given = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not given:
        raise SchemaError("no path was given")
    frames: list[pd.DataFrame] = []
    places: list[Place] = []
    sources: list[dict[str, str]] = []
    notes: list[str] = []
    for one in given:
        files = find_logs(one, notes=notes)
        for source in files:
            try:
                frame, place = _read_one(source, columns, where, params, key, encoding, torn)
            except NoLossError as error:
                if len(files) == 1:
                    raise SchemaError(str(error)) from None
                notes.append(f"left out: {error}")
                continue
            frames.append(frame)
            places.append(place)
            content = digest(source.path) if source.path.is_dir() else sha256(source.path)
            sources.append({"path": source.shown, "sha256": content})
    if not frames:
        raise SchemaError(f"no file in {given[0]} has a loss; " + "; ".join(notes[:3]))
    out, place = _join(frames, places, notes)
    if len(frames) > 1:
        out = validate(out, source=place, key=key)
    out.attrs["source"] = sources
    out.attrs["key"] = list(key)
    return _declare(complete(out, ffn=ffn, tied=tied), params)


def describe_mapping(df: pd.DataFrame) -> str:
    """What the reader took for what: columns under their own name in one line, each other one in its own; then notes."""
    mapping = df.attrs.get("mapping", {})
    lines = [f"{len(df):,} rows" + (f", {df['run_id'].nunique():,} runs" if "run_id" in df else "")]
    lines += [f"file     {s['path']}  sha256 {s['sha256'][:12]}" for s in df.attrs.get("source", [])[:10]]
    same = [c for c in ordered(list(mapping)) if mapping[c] == c]
    if same:
        lines.append(f"as named {', '.join(same)}")
    renamed = [c for c in ordered(list(mapping)) if mapping[c] != c]
    wide = max((len(c) for c in renamed), default=0)
    for column in renamed:
        unit = SCHEMA[column].unit if column in SCHEMA else "-"
        lines.append(f"{column:<{wide}} <- {mapping[column]}" + (f"  [{unit}]" if unit not in ("-", "1") else ""))
    if "params" in df.attrs:
        lines.append(f"params are {df.attrs['params']}")
    lines += [f"note: {note}" for note in df.attrs.get("notes", [])]
    return "\n".join(lines)


def _read_one(
    source: LogFile,
    columns: Mapping[str, str],
    where: str | None,
    params: ParamsConvention,
    key: Sequence[str],
    encoding: str,
    torn: Torn,
) -> tuple[pd.DataFrame, Place]:
    notes: list[str] = []
    raw = _read_raw(source, _keeper(columns, where, key, notes), encoding, torn)
    notes += raw.notes

    frame = map_columns(raw.frame, columns, params, source.shown, notes)
    _name_runs(frame, source, raw.curve, notes)
    kept = _kept_rows(frame, raw, where, source.shown, notes)

    def place(i: int) -> str:
        return f"{source.shown}, {raw.unit} {raw.line(int(kept[i]))}"

    attrs = frame.attrs
    if len(kept) < len(frame):
        frame = frame.iloc[kept].reset_index(drop=True)
    frame.attrs = attrs
    stopped = stopped_rows(frame)
    if stopped.any():
        loss = pd.to_numeric(frame["loss"], errors="coerce").astype(float)
        gone = stopped & ~np.isfinite(loss.to_numpy())
        if gone.any():
            frame["loss"] = frame["loss"].where(~gone, np.nan)
            notes.append(f"{source.shown}: {int(gone.sum()):,} rows without a loss kept, since status says why")
    frame = validate(frame, source=place, key=key)
    if not source.path.is_dir():  # the trainer's own units are known
        check_units(frame, source=source.shown, place=place, trusted=columns)
    frame.attrs = {**attrs, "notes": notes}
    return frame, place


def _read_raw(source: LogFile, keep: Keep, encoding: str, torn: Torn) -> RawTable:
    path = source.path
    if path.is_dir():
        table = collect(path)
        notes = [f"{source.shown}: {note}" for note in table.attrs["notes"]]
        raw = RawTable(table.drop(columns="params"), lambda i: i + 1, "run", notes)
    elif "tfevents" in path.name:
        raw = trackers.read_tensorboard(path)
    elif path.name == "trainer_state.json":
        raw = trackers.read_trainer_state(path)
    else:
        raw = read_table(path, keep=keep, encoding=encoding, torn=torn)
        if "log_history" in raw.frame or (path.suffix == ".json" and _has_history(path)):
            raw = trackers.read_trainer_state(path)
    if trackers.is_wide(list(map(str, raw.frame.columns))):
        raw = trackers.unstack_wide(raw)
    if raw.curve:
        beside = {k: v for k, v in trackers.config_beside(path).items() if k not in raw.frame}
        if beside:
            extra = pd.DataFrame(beside, index=raw.frame.index)
            note = f"{source.shown}: settings read from config.json beside it"
            raw = replace(raw, frame=pd.concat([raw.frame, extra], axis=1), notes=[*raw.notes, note])
    raw.frame.columns = raw.frame.columns.map(str)
    return raw


def _has_history(path: Path) -> bool:
    with path.open("rb") as handle:
        return b'"log_history"' in handle.read(1 << 20)


def _keeper(columns: Mapping[str, str], where: str | None, key: Sequence[str], notes: list[str]) -> Keep:
    def keep(there: list[str]) -> list[str]:
        if len(there) <= MAX_USER_COLUMNS or trackers.is_wide(there):
            return there
        needed = set(key)
        for text in [*columns.values(), *([where] if where else [])]:
            needed |= {text} if text in there else names(text)
        for candidates in aliases.recognise(there).values():
            needed |= set(candidates)
        kept = [c for c in there if c in needed or identifier(c) in needed]
        if not kept:
            kept = there[:MAX_USER_COLUMNS]
        notes.append(f"{len(there):,} columns in the file; read {len(kept)}: {', '.join(kept[:20])}")
        return kept

    return keep


def _kept_rows(frame: pd.DataFrame, raw: RawTable, where: str | None, shown: str, notes: list[str]) -> np.ndarray:
    """Positions [m] of the rows that stay: where= holds, and in a curve those that have a loss."""
    keep = np.ones(len(frame), dtype=bool)
    if where is not None:
        others = raw.frame[[c for c in raw.frame.columns if c not in frame.columns]]
        keep &= condition(pd.concat([frame, others], axis=1), where)
        if not keep.any():
            raise SchemaError(f"{shown}: where={where!r} keeps none of the {len(frame):,} rows")
        notes.append(f"{shown}: where {where}: {int(keep.sum()):,} of {len(frame):,} rows kept")
    missing = frame["loss"].isna().to_numpy() & ~stopped_rows(frame)
    event = missing & keep
    if not raw.curve:
        training = [
            c for c in frame.columns if c in raw.frame and set(aliases.spellings(c)) & set(aliases.TRAINING_LOSSES)
        ]
        training += [c for c in frame.columns if c.startswith("file_") and "loss" in c]
        other = frame[training].notna().any(axis=1).to_numpy() if training and "step" in frame else False
        event = event & other
    source = frame.attrs["mapping"]["loss"]
    if event.any() and source in raw.frame:
        event[raw.written_nan(source)] = False  # a loss of NaN is a run gone wrong, and stays to be refused
    if event.any():
        keep &= ~event
        if not keep.any():
            raise no_loss(shown, list(raw.frame.columns), set())
        notes.append(
            f"{shown}: {int(event.sum()):,} rows without {frame.attrs['mapping']['loss']!r} are other events, left out"
        )
    return np.flatnonzero(keep)


def _name_runs(frame: pd.DataFrame, source: LogFile, curve: bool, notes: list[str]) -> None:
    """Give the rows a run_id where the file has none: one run for a curve, else one per row."""
    if "run_id" in frame:
        if frame["run_id"].dtype.kind in "iufb":
            frame["run_id"] = frame["run_id"].astype("string").astype(object)
        return
    settings = [c for c in _SETTINGS if c in frame and c != "lr"]
    steps = frame["step"] if "step" in frame else pd.Series(np.nan, index=frame.index)
    checkpoints = len(steps.dropna().unique()) > 1
    again = frame.duplicated(settings) if settings else pd.Series(True, index=frame.index)
    one_setting = int(again.sum()) >= len(frame) - 1
    if curve or (checkpoints and steps.is_unique and one_setting):
        frame.insert(0, "run_id", source.run)
        frame.attrs["mapping"]["run_id"] = "computed: file name"
        return
    if checkpoints and again.any():
        raise SchemaError(
            f"{source.shown} has steps but no run_id, so checkpoints can't be told from runs; name a column or build "
            "one, e.g. columns={'run_id': 'model'}"
        )
    width = len(str(len(frame)))
    frame.insert(0, "run_id", [f"{source.run}/{i + 1:0{width}d}" for i in range(len(frame))])
    frame.attrs["mapping"]["run_id"] = "computed: file name and row"
    notes.append(f"{source.shown}: no run_id in the file, each row is taken as a run of its own")


def _join(frames: list[pd.DataFrame], places: list[Place], notes: list[str]) -> tuple[pd.DataFrame, Place]:
    mapping: dict[str, str] = {}
    for frame in frames:
        for canonical, text in frame.attrs["mapping"].items():
            old = mapping.get(canonical)
            mapping[canonical] = (
                text if old in (None, text) else f"{old} | {text}" if text not in old.split(" | ") else old
            )
        notes += frame.attrs["notes"]
    if len(frames) == 1:
        out = frames[0].copy(deep=False)
    else:
        out = pd.concat([f.dropna(axis=1, how="all") for f in frames], ignore_index=True)
        out = out[ordered(out.columns)]
    out.attrs = {"mapping": mapping, "notes": notes}
    starts = np.cumsum([0, *map(len, frames)])

    def place(i: int) -> str:
        f = int(np.searchsorted(starts, i, side="right")) - 1
        return places[f](i - int(starts[f]))

    return out, place


def _declare(df: pd.DataFrame, wanted: ParamsConvention) -> pd.DataFrame:
    order: list[tuple[ParamsConvention, str]] = [
        ("backbone", "params_backbone"),
        ("total", "params_total"),
        ("as given", "params"),
    ]
    order = [o for o in order if o[0] == wanted] + [o for o in order if o[0] != wanted]
    for convention, column in order:
        if column in df and df[column].notna().all():
            out = declare_params(df, convention)
            if convention != wanted:
                what = {"total": "total counts", "backbone": "backbone counts", "as given": "the counts as given"}[
                    convention
                ]
                hint = (
                    f"; if they are non-embedding write columns={{'params_backbone': {df.attrs['mapping'][column]!r}}}"
                    if wanted == "backbone" and convention == "as given"
                    else ""
                )
                out.attrs["notes"] = [*df.attrs["notes"], f"params are {what}: the table has no {wanted} counts{hint}"]
            return out
    out = df.copy()
    out.attrs = {
        **df.attrs,
        "notes": [
            *df.attrs["notes"],
            "no parameter counts in the table: name a column, e.g. columns={'params': 'size_M * 1e6'}",
        ],
    }
    return out

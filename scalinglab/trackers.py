"""Logs of experiment trackers -> plain tables: W&B wide exports, Hugging Face trainer_state, TensorBoard events.

Each function takes what a tracker writes and returns columns that `scalinglab.aliases` knows.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.json_tables import RawTable, flatten, parse_json, records_table

_WIDE = re.compile(r"^(?:run: ?)?(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?$")
_MANY_CELLS, _SPARSE = 5_000_000, 50  # a table this large must have one of so many cells filled, else it is a bomb
_STEP_NAMES = {"step", "_step", "global_step", "train/global_step", "trainer/global_step", "relative time (process)"}


def is_wide(columns: list[str]) -> bool:
    """Whether a CSV is W&B's chart export: a step column, then "RUN - METRIC" for every run."""
    return (
        len(columns) > 1
        and columns[0].strip().lower() in _STEP_NAMES
        and sum(bool(_WIDE.match(c)) for c in columns[1:]) >= 0.9 * (len(columns) - 1)
    )


def unstack_wide(raw: RawTable) -> RawTable:
    """W&B's chart export, one column per run and metric -> one row per run and step."""
    frame = raw.frame
    step = str(frame.columns[0])
    runs: dict[str, dict[str, str]] = {}
    bounds: dict[str, dict[str, str]] = {}
    for column in map(str, frame.columns[1:]):
        if match := _WIDE.match(column):
            kind = bounds if match["bound"] else runs
            kind.setdefault(match["run"], {}).setdefault(match["metric"], column)
    notes = list(raw.notes)
    for run, metrics in bounds.items():  # MIN and MAX repeat the value, unless the export holds nothing else
        for metric, column in metrics.items():
            if metric not in runs.get(run, {}):
                runs.setdefault(run, {})[metric] = column
                notes.append(f"W&B export: {metric} of {run} is read from {column!r}, there is no plain column")
    names = list(dict.fromkeys(m for metrics in runs.values() for m in metrics))
    columns: dict[str, list[np.ndarray]] = {m: [] for m in names}
    says_nan: dict[str, list[np.ndarray]] = {m: [] for m in names}  # the file says NaN, which is a measurement
    places: list[np.ndarray] = []
    rows = filled = 0
    for metrics in runs.values():  # arrays and no data frames: an export may have thousands of runs
        values = {m: frame[column].to_numpy() for m, column in metrics.items()}
        said = {m: np.isin(np.arange(len(frame)), raw.written_nan(column)) for m, column in metrics.items()}
        kept = np.flatnonzero(np.any([pd.notna(v) for v in values.values()] + list(said.values()), axis=0))
        places.append(kept)
        rows, filled = rows + len(kept), filled + len(kept) * len(metrics)
        if rows * len(names) > _MANY_CELLS and rows * len(names) > _SPARSE * filled:
            raise SchemaError(
                f"the W&B export has {len(names):,} metrics, hardly two runs share one; export those you need"
            )
        for m in names:
            columns[m].append(values[m][kept] if m in values else np.full(len(kept), np.nan))
            says_nan[m].append(said[m][kept] if m in said else np.zeros(len(kept), dtype=bool))
    if not rows:
        raise SchemaError(f"the W&B export has no values in its columns {', '.join(map(str, frame.columns[1:6]))}")
    at = np.concatenate(places)
    table = pd.DataFrame(
        {
            **{m: np.concatenate(columns[m]) for m in names},
            "step": frame[step].to_numpy()[at],
            "run_id": [run for run, kept in zip(runs, places, strict=True) for _ in range(len(kept))],
        }
    )
    nan = {m: np.concatenate(s) for m, s in says_nan.items()}
    return RawTable(
        table,
        lambda i: raw.line(int(at[i])),
        raw.unit,
        notes,
        curve=True,
        written_nan=lambda column: np.flatnonzero(nan[column]) if column in nan else np.zeros(0, dtype=int),
    )


def read_trainer_state(path: Path) -> RawTable:
    """Hugging Face trainer_state.json: the entries of log_history, those of one step put together.

    The closing entry (train_runtime, an average train_loss) is no measurement at a step and is left out.
    """
    document = parse_json(path.read_bytes(), str(path))
    history = document.get("log_history") if isinstance(document, dict) else None
    if not isinstance(history, list) or not history:
        raise SchemaError(f"{path} has no log_history entries")
    rows: dict[Any, dict[str, Any]] = {}
    first: dict[Any, int] = {}
    for number, entry in enumerate(history, 1):
        if not isinstance(entry, dict) or "step" not in entry:
            raise SchemaError(f"{path}, entry {number} of log_history has no step")
        if "train_runtime" in entry:
            continue
        step = entry["step"]
        if isinstance(step, bool) or not isinstance(step, (int, float)):
            raise SchemaError(f"{path}, entry {number} of log_history: the step {str(step)[:60]!r} is not a number")
        first.setdefault(step, number)
        row = rows.setdefault(step, {})
        row.update({k: v for k, v in flatten(entry).items() if k not in row})
    if not rows:
        raise SchemaError(f"{path} has no log_history entries with a loss")
    numbers = list(first.values())
    notes = []
    if len(rows) < len(history):
        notes.append(f"{path.name}: {len(history)} entries of log_history make {len(rows)} steps")
    table = records_table(list(rows.values()), numbers, path, unit="entry", notes=notes)
    return replace(table, curve=True)


def read_tensorboard(path: Path) -> RawTable:
    """Scalars of a TensorBoard event file, one row per step and one column per tag.

    Raises
    ------
    ConfigError
        The package tensorboard isn't installed.
    SchemaError
        No scalars in the file.
    """
    try:
        from tensorboard.backend.event_processing import event_accumulator
        from tensorboard.util import tensor_util
    except ImportError:
        raise ConfigError(
            f"{path} is a TensorBoard log: install the extra, pip install 'scalinglab[tensorboard]'"
        ) from None
    events = event_accumulator.EventAccumulator(
        str(path), size_guidance={event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    )
    series: dict[str, pd.Series] = {}
    try:
        events.Reload()
        _collect_scalars(events, tensor_util, series)
    except Exception as error:  # protobuf, numpy and tensorboard each raise their own for a damaged record
        raise SchemaError(
            f"{path} is a damaged TensorBoard log ({type(error).__name__}: {' '.join(str(error).split())[:120]}); copy it again"
        ) from None
    if not series:
        raise SchemaError(f"{path} has no scalars")
    kept = {tag: s[~s.index.duplicated(keep="last")] for tag, s in series.items()}  # a restart writes a step again
    notes = (
        [f"{path.name}: a step written twice keeps its last value"]
        if any(len(kept[t]) < len(series[t]) for t in series)
        else []
    )
    frame = pd.DataFrame(kept).rename_axis("step").reset_index()
    nan = {tag: frame["step"].isin(values.index[values.isna()]).to_numpy() for tag, values in kept.items()}
    return RawTable(
        frame,
        lambda i: int(frame["step"].iloc[i]),
        "step",
        notes,
        curve=True,
        written_nan=lambda column: np.flatnonzero(nan.get(column, np.zeros(0, dtype=bool))),
    )


def _collect_scalars(events: Any, tensor_util: Any, series: dict[str, pd.Series]) -> None:
    """Tag -> values by step, of scalars and of tensors that are scalars (TensorFlow 2 writes those)."""
    tags = events.Tags()
    for tag in tags["scalars"]:
        points = events.Scalars(tag)
        series[tag] = pd.Series([p.value for p in points], index=[p.step for p in points], dtype=float)
    for tag in tags["tensors"]:
        points = [(p.step, tensor_util.make_ndarray(p.tensor_proto)) for p in events.Tensors(tag)]
        points = [
            (step, value) for step, value in points if np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiu"
        ]
        if points:
            series[tag] = pd.Series([float(v) for _, v in points], index=[s for s, _ in points], dtype=float)


def config_beside(path: Path) -> dict[str, Any]:
    """Scalars of a `config.json` in the log's folder, as columns `config.NAME`; empty where there is none."""
    config = path.parent / "config.json"
    if not config.is_file() or config == path or config.stat().st_size > 1 << 20:
        return {}
    document = parse_json(config.read_bytes(), str(config))
    return flatten({"config": document}) if isinstance(document, dict) else {}

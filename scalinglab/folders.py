"""Paths -> the log files behind them, and a run's name from its path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalinglab.aliases import near
from scalinglab.collecting import CONFIG, has_finished_runs
from scalinglab.errors import SchemaError
from scalinglab.tables import table_path

PathLike = str | os.PathLike[str]

_MAX_FILES = 20_000
_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".jsonl", ".jsonl.gz", ".ndjson")
_PLAIN_STEMS = {"log", "logs", "metrics", "history", "results", "train", "progress", "trainer_state", "wandb-history"}


@dataclass(frozen=True)
class LogFile:
    """One file (or folder of the trainer) to read, how to name it in messages, and the run_id that its place implies."""

    path: Path
    shown: str  # as the user named it
    run: str  # run_id where the file has none


def find_logs(path: PathLike, *, notes: list[str]) -> list[LogFile]:
    """The log files behind a path: itself, an embedded table, or all logs below a folder; what is passed over goes to `notes`.

    Raises SchemaError where there is no such path, or no readable log below it.
    """
    try:
        return _found(os.fspath(path), notes)
    except OSError as error:  # a name that is too long, a folder that may not be looked into, a loop of links
        raise SchemaError(
            f"{_printable(str(error.filename or path)[:200])}: can't be read ({error.strerror}); give the log files one by one"
        ) from None


def _found(text: str, notes: list[str]) -> list[LogFile]:
    if text.startswith("embedded:"):
        name = text.removeprefix("embedded:")
        return [LogFile(table_path(name), text, name)]
    where = Path(text)
    if not where.exists():
        siblings = [p.name for p in where.parent.iterdir()] if where.parent.is_dir() else []
        raise SchemaError(f"{text} does not exist{near(where.name, siblings)}")
    if where.is_dir() and (trained := _trained(where, notes)):
        return [trained]
    if not where.is_dir():
        if not where.is_file():
            raise SchemaError(f"{text} is not a regular file")
        run = _stem(where) if _stem(where) not in _PLAIN_STEMS else where.resolve().parent.name
        return [LogFile(where, _printable(text), _printable(run))]
    files = _newest_states([p for p in sorted(where.rglob("*")) if _is_log(p, where)])
    if not files:
        raise SchemaError(
            f"{text} has no logs: looked for {', '.join(_SUFFIXES)}, trainer_state.json and TensorBoard events"
        )
    if len(files) > _MAX_FILES:
        raise SchemaError(f"{text} has {len(files):,} logs; at most {_MAX_FILES:,} are read at once")
    notes.append(f"{text}: {len(files):,} files read")
    runs = [_run_name(p, where) for p in files]
    return [
        LogFile(p, _printable(str(p)), _printable(r if runs.count(r) == 1 else str(p.relative_to(where))))
        for p, r in zip(files, runs, strict=True)
    ]


def _trained(where: Path, notes: list[str]) -> LogFile | None:
    """A folder of the trainer as one log (see `scalinglab.collecting`); other files in it are named in `notes`."""
    if not has_finished_runs(where):
        return None
    others = [p.name for p in sorted(where.iterdir()) if _is_log(p, where)] if not (where / CONFIG).is_file() else []
    if others:
        notes.append(f"{where}: the trainer's runs are read; passed over: {', '.join(others[:5])}")
    return LogFile(where, _printable(str(where)), _printable(where.resolve().name))


def _printable(text: str) -> str:
    """A path as text that can be written: bytes of a file name that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_log(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    return path.name.endswith(_SUFFIXES) or path.name == "trainer_state.json" or "tfevents" in path.name


def _newest_states(files: list[Path]) -> list[Path]:
    """Of a Hugging Face run's checkpoint-N folders only the last: each repeats the history before it."""
    best: dict[Path, tuple[float, Path]] = {}
    others = []
    for path in files:
        if path.name != "trainer_state.json":
            others.append(path)
            continue
        head, _, number = path.parent.name.rpartition("-")
        checkpoint = head == "checkpoint" and number.isdigit()
        run = path.parent.parent if checkpoint else path.parent
        rank = float(number) if checkpoint else np.inf
        if run not in best or rank > best[run][0]:
            best[run] = (rank, path)
    return sorted([*others, *(path for _, path in best.values())])


def _run_name(path: Path, root: Path) -> str:
    parent = path.parent
    if parent.name.startswith("checkpoint-") and path.name == "trainer_state.json":
        parent = parent.parent
    plain = _stem(path) in _PLAIN_STEMS or "tfevents" in path.name
    inner = parent.relative_to(root) if plain else (parent.relative_to(root) / _stem(path))
    return str(inner) if str(inner) != "." else root.resolve().name


def _stem(path: Path) -> str:
    name = path.name
    for suffix in sorted([*_SUFFIXES, ".json"], key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name

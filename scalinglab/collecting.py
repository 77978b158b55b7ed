"""Run directories of the trainer -> one run table, ready for `fit`, `audit` and `compare`.

    out/<run_id>/config.toml    what the run is
    out/<run_id>/log.jsonl      a line per measurement
    out/<run_id>/summary.json   how it ended; written last, so a directory without it is unfinished

Nothing here needs torch. Directories are read one after the other, each file once; only the columns of the table stay in
memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from scalinglab import tomlfile
from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.planning import Arms, row
from scalinglab.runs import declare_params
from scalinglab.schema import ordered

CONFIG, LOG, SUMMARY = "config.toml", "log.jsonl", "summary.json"
SUMMARY_SCHEMA = "scalinglab/summary-1"
_STATUSES = ("finished", "diverged")
_MEASURED = ("loss", "loss_se", "excess", "excess_se")
_COSTS = ("seconds", "tokens_per_second", "stack_size")
_SHOWN = 5  # troubles named one by one for each file or kind


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json of a run, as far as a run table reads it."""

    schema: str
    run_id: str
    status: str
    step: int
    tokens: float
    loss: float | None = None
    loss_se: float | None = None
    excess: float | None = None
    excess_se: float | None = None
    floor: float | None = None
    loss_initial: float | None = None
    last_finite_loss: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    stack_size: int | None = None
    device: str | None = None
    backend: str | None = None
    torch: str | None = None
    corpus_fingerprint: str | None = None
    weights_sha256: str | None = None
    by_difficulty: dict[str, dict[str, float | None]] | None = None
    held_out_by_difficulty: dict[str, dict[str, float | None]] | None = None


@dataclass
class _Notes:
    """What is said about the folder: every file and line that was not taken, with the reason."""

    unfinished: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    data: dict[str, dict[str, str]] = field(default_factory=dict)  # corpus -> fingerprint -> the first run with it

    def told(self) -> list[str]:
        notes = list(self.trouble)
        if self.unfinished:
            more = len(self.unfinished) - _SHOWN
            shown = ", ".join(self.unfinished[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
            runs = "run" if len(self.unfinished) == 1 else "runs"
            notes.append(f"{len(self.unfinished):,} unfinished {runs} (no {SUMMARY}) left out: {shown}")
        for corpus, found in self.data.items():
            if len(found) > 1:
                shown = ", ".join(f"{fingerprint[:8]} in {run}" for fingerprint, run in [*found.items()][:_SHOWN])
                notes.append(
                    f"corpus {corpus} was not the same data in all runs: {len(found):,} values of corpus_fingerprint "
                    f"({shown}); their losses can't be compared"
                )
        return notes

    def seen(self, config: RunConfig, run_id: str, fingerprint: str | None) -> None:
        """Note which data a run was trained on."""
        if fingerprint is None:
            return
        # A synthetic corpus is fingerprinted on sequences as long as the context, a text as a whole.
        context = {} if config.corpus == "text" else {"context": config.shape.context}
        options = {name: str(value) for name, value in {**config.corpus_options, **context}.items()}
        told = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
        self.data.setdefault(f"{config.corpus!r} ({told})", {}).setdefault(fingerprint, run_id)


def collect(folder: str | Path, *, checkpoints: bool = False, unfinished: bool = False) -> pd.DataFrame:
    """Run table of the trainer's run directories.

    Parameters
    ----------
    folder : path
        The trainer's output folder, or one run directory in it.
    checkpoints : bool
        One row per evaluation of the log instead of one per run; the evaluation before training is left out.
    unfinished : bool
        Take in the last evaluation of runs that have not ended, with status "unfinished".

    Returns
    -------
    DataFrame
        Columns of a run table with sizes, counts by component and FLOPs (of the tokens seen, in three conventions), loss
        (nats per token) with its standard error, status, and what else the summary measured (excess over the floor,
        seconds, ...). A diverged run has no loss, no excess and no results by difficulty; `last_finite_loss` says where
        it was. Rows in the order of run ids. Columns in which every value is missing are left out.
        attrs: params ("backbone"), key, source (path, sha256 of configs and summaries) and notes: unfinished runs, every
        directory or line that was not accepted, and a corpus that was not the same data in all runs.

    Raises
    ------
    SchemaError
        The folder is not there, or holds no run that can be taken.
    """
    where = Path(folder)
    if not where.is_dir():
        raise SchemaError(f"{where} is not a folder; give the folder that `scalinglab train --out` wrote")
    notes, rows, arms, total = _Notes(), _Columns(), Arms(), hashlib.sha256()
    notes.trouble += [f"{name} not accepted: {CONFIG} is missing" for name in _without_config(where)]
    for directory in run_directories(where):
        files = {name: _content(directory / name) for name in (CONFIG, SUMMARY)}
        _add(total, directory, files)
        for line in _rows(directory, files, notes, arms, checkpoints=checkpoints, unfinished=unfinished):
            rows.add(line)
    if not rows.count:
        told = "; ".join(notes.told()) or f"no folder in it has a {CONFIG}"
        raise SchemaError(f"{where} has no finished run: {told}")
    table = pd.DataFrame(rows.values)
    table = table[[c for c in ordered(table.columns) if not (table[c].isna() | (table[c] == "")).all() or c == "loss"]]
    table.attrs = {
        "source": [{"path": str(where), "sha256": total.hexdigest()}], "notes": notes.told(),
        "mapping": {c: c for c in table.columns}, "key": [],
    }  # fmt: skip
    return declare_params(table, "backbone")


def is_run_directory(path: str | Path) -> bool:
    """Whether the trainer wrote this folder: it has config.toml, and summary.json or log.jsonl."""
    there = Path(path)
    return (there / CONFIG).is_file() and ((there / SUMMARY).is_file() or (there / LOG).is_file())


def has_finished_runs(folder: str | Path) -> bool:
    """Whether a folder is the trainer's: it is, or one right below it is, a directory with config.toml and summary.json."""
    return any((directory / SUMMARY).is_file() for directory in run_directories(folder))


def run_directories(folder: str | Path) -> Iterator[Path]:
    """The run directories of a folder in the order of their names; itself if it is one."""
    where = Path(folder)
    if is_run_directory(where):
        yield where
        return
    with os.scandir(where) as entries:
        names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    for name in names:
        if (where / name / CONFIG).is_file():
            yield where / name


def is_finished(directory: str | Path) -> bool:
    """Whether a run directory has the config and the summary of its own run: whether `collect` would take it."""
    if not (Path(directory) / SUMMARY).is_file():
        return False
    config = read_config(directory)
    return config is not None and has_summary(directory, config)


def has_summary(directory: str | Path, config: RunConfig) -> bool:
    """Whether a directory has a whole summary of this run, whatever its config.toml is like."""
    return read_summary(directory, config) is not None


def read_summary(directory: str | Path, config: RunConfig) -> Summary | None:
    """The summary of a run directory; None where it is missing, damaged or not of this run."""
    found = _summary(_content(Path(directory) / SUMMARY), config, config.run_id)
    return found if isinstance(found, Summary) else None


def read_config(directory: str | Path) -> RunConfig | None:
    """The config of a run directory; None where it is missing, damaged or of another run than the folder's name says."""
    found = _config(Path(directory), _content(Path(directory) / CONFIG), Arms())
    return None if isinstance(found, str) else found


def digest(folder: str | Path) -> str:
    """SHA-256 over configs and summaries of all run directories, hex."""
    total = hashlib.sha256()
    for directory in run_directories(folder):
        _add(total, directory, {name: _content(directory / name) for name in (CONFIG, SUMMARY)})
    return total.hexdigest()


def _add(total: Any, directory: Path, files: Mapping[str, bytes | OSError]) -> None:
    """Put a run directory into the digest."""
    for name, data in files.items():
        content = "-" if isinstance(data, OSError) else hashlib.sha256(data).hexdigest()
        total.update(f"{directory.name}/{name} {content}\n".encode())


def _content(path: Path) -> bytes | OSError:
    """The bytes of a file, or why there are none."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error


class _Columns:
    """Rows kept by column: what runs share is one object, and no row costs a dict of its own."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.count = 0

    def add(self, line: dict[str, Any]) -> None:
        """One more row; what it has not is missing, as is a new column in the rows before."""
        for name in line:
            if name not in self.values:
                self.values[name] = [math.nan] * self.count
        for name, column in self.values.items():
            column.append(line.get(name, math.nan))
        self.count += 1


# ---- one directory ---------------------------------------------------------------------------------------------------------
def _rows(
    directory: Path,
    files: Mapping[str, bytes | OSError],
    notes: _Notes,
    arms: Arms,
    *,
    checkpoints: bool,
    unfinished: bool,
) -> list[dict[str, Any]]:
    config = _config(directory, files[CONFIG], arms)
    if isinstance(config, str):
        notes.trouble.append(f"{directory.name} not accepted: {config}")
        return []
    name = arms.name(config)
    summary = _summary(files[SUMMARY], config, name)
    if isinstance(summary, str):
        notes.trouble.append(f"{directory.name} not accepted: {summary}")
        return []
    if summary is None and not unfinished:
        notes.unfinished.append(name)
        return []
    if summary is not None:
        notes.seen(config, name, summary.corpus_fingerprint)
    planned = row(config, arms=arms)
    if summary is not None and not checkpoints:
        tables = {"": summary.by_difficulty, "held_out_": summary.held_out_by_difficulty}
        measured = {
            k: v
            for k, v in msgspec.structs.asdict(summary).items()
            if k != "schema" and not k.endswith("by_difficulty")
        }
        if summary.status != "finished":
            measured |= dict.fromkeys(_MEASURED)
            tables = {}
        for split, table in tables.items():
            for level, found in (table or {}).items():
                measured |= {f"{split}{name}_difficulty_{level}": found.get(name) for name in ("loss", "accuracy")}
        return [_seen(planned, summary.step, summary.tokens) | measured]
    lines = [line for line in evaluations(directory / LOG, config, trouble=notes.trouble) if line["step"] > 0]
    if summary is None:
        lines = lines if checkpoints else lines[-1:]
    status = "unfinished" if summary is None else summary.status
    return [
        _seen(planned, line["step"], line["tokens"]) | {"status": status} | {k: line[k] for k in _MEASURED if k in line}
        for line in lines
    ]


def evaluations(path: Path, config: RunConfig, *, trouble: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Evaluation lines of a log, one at a time; what is torn or foreign is named in `trouble` and passed over.

    A line counts if it is a JSON object of kind "train" or "eval" with a finite loss, whose step comes after that of the
    line of its kind before it and whose tokens are step times tokens per step.
    """
    named: list[str] = [] if trouble is None else trouble
    last = {"train": -1, "eval": -1}
    refused = 0
    if not path.is_file():
        named.append(f"{path.parent.name}/{path.name} is missing")
        return
    with path.open("rb") as handle:
        for number, text in enumerate(handle, 1):
            line, why = _line(text, config, last)
            if why:
                refused += 1
                if refused <= _SHOWN:
                    named.append(f"{path.parent.name}/{path.name}, line {number} not accepted: {why}")
                continue
            last[line["kind"]] = line["step"]
            if line["kind"] == "eval":
                yield line
    if refused > _SHOWN:
        named.append(f"{path.parent.name}/{path.name}: {refused - _SHOWN:,} more lines not accepted")


def _line(text: bytes, config: RunConfig, last: dict[str, int]) -> tuple[dict[str, Any], str]:
    """A line of the log, or why it isn't one."""
    if not text.endswith(b"\n"):
        return {}, "it was cut off"
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}, "not JSON"
    if not isinstance(line, dict) or line.get("kind") not in list(last):  # a list: the kind may be no text at all
        return {}, 'no record of kind "train" or "eval"'
    step, loss = line.get("step"), line.get("loss")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= config.steps:
        return {}, f"step {step!r} is none of this run's {config.steps:,}"
    if step <= last[line["kind"]]:
        return {}, f"step {step:,} comes after step {last[line['kind']]:,}"
    if line.get("tokens") != step * config.batch_tokens:
        return {}, f"tokens are {line.get('tokens')!r}, not step x {config.batch_tokens:,}"
    if line["kind"] == "eval" and not (isinstance(loss, (int, float)) and abs(loss) < 1e300):
        return {}, f"loss {loss!r} is not a finite number"
    return line, ""


def _seen(planned: dict[str, Any], step: int, tokens: float) -> dict[str, Any]:
    """The planned row with what was trained in place of what was planned."""
    share = tokens / planned["tokens"]
    flops = {name: value * share for name, value in planned.items() if name.startswith("flops_")}
    return {k: v for k, v in planned.items() if k not in ("steps", "mismatch")} | flops | {
        "tokens": float(tokens), "step": step,
    }  # fmt: skip


def _without_config(where: Path) -> list[str]:
    """Folders with a summary or a log that say nowhere what the run is."""
    with os.scandir(where) as entries:
        below = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    places = {where.resolve().name: where, **{name: where / name for name in below}}
    return [
        name
        for name, place in places.items()
        if not (place / CONFIG).is_file() and ((place / SUMMARY).is_file() or (place / LOG).is_file())
    ]


def _config(directory: Path, data: bytes | OSError, arms: Arms) -> RunConfig | str:
    """The config of a run directory, or why it isn't one."""
    try:
        if isinstance(data, OSError):
            raise ConfigError(f"{directory / CONFIG}: can't be read ({data.strerror})")
        config = tomlfile.parse(data, RunConfig, where=f"{directory / CONFIG}: ")
        run_id = arms.name(config)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{CONFIG} can't be read ({error.strerror})"
    return config if run_id == directory.resolve().name else f"its {CONFIG} is of run {run_id}"


def _summary(data: bytes | OSError, config: RunConfig, run_id: str) -> Summary | str | None:
    """The summary, None where there is none yet, or why it isn't one of this run."""
    if isinstance(data, FileNotFoundError):
        return None
    if isinstance(data, OSError):
        return f"{SUMMARY} can't be read ({data.strerror})"
    try:
        found = msgspec.json.decode(data, type=Summary)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"{SUMMARY} is torn or foreign ({error})"
    if found.schema != SUMMARY_SCHEMA:
        return f"{SUMMARY} has schema {found.schema!r}, not {SUMMARY_SCHEMA!r}"
    if found.run_id != run_id:
        return f"its {SUMMARY} is of run {found.run_id}"
    if found.status not in _STATUSES:
        return f"{SUMMARY} has status {found.status!r}, none of {', '.join(_STATUSES)}"
    why = _unfit(found, config)
    return f"{SUMMARY} {why}" if why else found


def _unfit(summary: Summary, config: RunConfig) -> str:
    """What is wrong with the numbers of a summary; the same is asked of them as of the lines of a log."""
    if not 0 <= summary.step <= config.steps:
        return f"has step {summary.step:,}, none of this run's {config.steps:,}"
    if summary.tokens != summary.step * config.batch_tokens:
        return f"has {summary.tokens:,.0f} tokens, not step x {config.batch_tokens:,}"
    if summary.status == "finished" and summary.step != config.steps:
        return f"is finished at step {summary.step:,} of {config.steps:,}"
    if summary.status == "finished" and (summary.loss is None or not math.isfinite(summary.loss)):
        return f"is finished with the loss {summary.loss!r}"
    numbers = {
        name: getattr(summary, name) for name in (*_MEASURED, "floor", "loss_initial", "last_finite_loss", *_COSTS)
    }
    for tables in (summary.by_difficulty, summary.held_out_by_difficulty):
        for level, found in (tables or {}).items():
            numbers |= {f"{name} of difficulty {level}": value for name, value in found.items()}
    for name, value in numbers.items():
        least = 0.0 if name in ("loss_se", "excess_se", *_COSTS) else -math.inf
        if value is not None and not (math.isfinite(value) and value >= least):
            return f"has the {name} {value!r}"
    return ""

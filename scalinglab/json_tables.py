"""JSON and JSON lines -> the table in them, nested records flattened to columns. Also what a table of a file is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from scalinglab.errors import SchemaError

Torn = Literal["error", "drop"]

_MANY_CELLS, _SPARSE = 1_000_000, 50  # a table this large must have one of so many cells filled, else it is a bomb
_MANY_NAMES = 20_000
_MAX_NESTING = 8  # levels of dicts in one JSON record; deeper ones are left out


def _nowhere(column: str) -> np.ndarray:
    return np.zeros(0, dtype=int)


@dataclass(frozen=True)
class RawTable:
    """A table as it stands in a file.

    Attributes
    ----------
    frame
        Columns under their names in the file, RangeIndex.
    line
        Row position (0-based) -> number for a message.
    unit
        What that number counts: "row" (line of a text file, or row of a Parquet file), "line", "entry", "step".
    notes
        What was left out or assumed.
    curve
        A tracker's log, in which rows without a loss are other events and not missing values.
    written_nan
        Column -> positions of rows where the file says NaN. That is a measurement (a run that diverged), not an absence.
    """

    frame: pd.DataFrame
    line: Callable[[int], int]
    unit: str = "row"
    notes: list[str] = field(default_factory=list)
    curve: bool = False
    written_nan: Callable[[str], np.ndarray] = _nowhere


def read_json(path: Path, data: bytes, name: str, encoding: str, torn: Torn) -> RawTable:
    """Table of a JSON document (records, or columns as lists) or of JSON lines.

    Raises
    ------
    SchemaError
        Not JSON, a line that isn't a record, a last line that was cut off (unless `torn="drop"`).
    """
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        try:
            data = data.decode(encoding).encode()
        except (UnicodeError, LookupError) as error:
            raise SchemaError(f"{path} can't be decoded: {error}") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not name.endswith((".jsonl", ".ndjson")) and _is_document(data):
        records = _document_records(parse_json(data, str(path)))
        odd = next((i for i, r in enumerate(records) if not isinstance(r, dict)), None)
        if odd is not None:
            raise SchemaError(
                f"{path}, entry {odd + 1}: expected a record {{...}}, found {type(records[odd]).__name__}"
            )
        return records_table(records, list(range(1, len(records) + 1)), path, unit="entry")
    records, numbers, notes = [], [], []
    last = data.rstrip().count(b"\n") + 1
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, f"{path}, line {number}")
        except SchemaError as error:
            if number != last:
                raise
            if torn == "drop":
                notes.append(f"{path.name}: the last line ({number}) was cut off and left out")
                continue
            raise SchemaError(
                f"{error}; it is the last line, so the log was probably cut off while it was written: pass torn='drop' "
                "to leave that line out"
            ) from None
        if not isinstance(record, dict):
            raise SchemaError(f"{path}, line {number}: expected a record {{...}}, found {type(record).__name__}")
        records.append(record)
        numbers.append(number)
    return records_table(records, numbers, path, unit="line", notes=notes)


def records_table(
    records: Sequence[dict[str, Any]], numbers: Sequence[int], path: Path, *, unit: str, notes: Sequence[str] = ()
) -> RawTable:
    """Records -> table. A first record that only carries the config becomes constant columns."""
    said = list(notes)
    constants: dict[str, Any] = {}
    if len(records) > 1 and isinstance(records[0].get("config"), dict) and "config" not in records[1]:
        constants = flatten({"config": records[0]["config"]})
        rest = {k: v for k, v in records[0].items() if k != "config"}
        if not any("loss" in str(k) for k in rest):
            records, numbers = records[1:], numbers[1:]
        said.append(f"{path.name}: the config of the first record holds for all rows")
    if not records:
        raise SchemaError(f"{path} has no records")
    flat = [flatten(r) for r in records]
    names, filled = len({name for r in flat for name in r}), sum(map(len, flat))
    if names > _MANY_NAMES:
        raise SchemaError(
            f"{path} has {names:,} different names in its records; at most {_MANY_NAMES:,} columns are read"
        )
    if names * len(flat) > _MANY_CELLS and names * len(flat) > _SPARSE * filled:
        raise SchemaError(
            f"{path}: {len(flat):,} records with {names:,} different names, hardly two alike: no table; are the names data?"
        )
    frame = pd.DataFrame(flat)
    if not frame.shape[1]:
        raise SchemaError(f"{path} has no numbers or texts in its records")
    for column, value in constants.items():
        if column not in frame:
            frame[column] = value
    for column in [
        c for c, kind in frame.dtypes.items() if pd.api.types.is_object_dtype(kind) or isinstance(kind, pd.StringDtype)
    ]:
        try:
            frame[column] = [_number(value) for value in frame[column]]  # W&B writes "NaN" as text
        except (ValueError, TypeError):
            continue
    steps = {"_step", "_runtime", "step", "iter", "global_step"} & set(frame.columns)
    return RawTable(
        frame,
        lambda i: numbers[i],
        unit,
        said,
        curve=bool(steps) and len(frame) > 1,
        written_nan=lambda column: np.array([i for i, r in enumerate(flat) if _says_nan(r.get(column))], dtype=int),
    )


def flatten(record: dict[str, Any], *, prefix: str = "", level: int = 0) -> dict[str, Any]:
    """Scalars of a nested record under dotted names; lists and what is nested deeper than 8 levels are left out."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            if set(value) == {"value"} or set(value) == {"value", "desc"}:  # W&B's config.yaml style
                value = value["value"]
            elif level < _MAX_NESTING:
                flat.update(flatten(value, prefix=f"{prefix}{name}.", level=level + 1))
                continue
        if value is None or isinstance(value, (str, int, float, bool)):
            if isinstance(value, int) and abs(value) >= 1 << 63:
                value = as_float(value)
            flat[f"{prefix}{name}"] = value
    return flat


def parse_json(text: bytes | str, where: str) -> Any:
    """Decode JSON (NaN and Infinity allowed, as Python writes them).

    Raises
    ------
    SchemaError
        Not JSON, or nested too deeply.
    """
    try:
        document = json.loads(text)
        # JSON can spell half a surrogate pair (\ud800), a text that no file, table or page can hold
        if ("\\u" in text or not text.isascii()) if isinstance(text, str) else (b"\\u" in text or not text.isascii()):
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except UnicodeEncodeError:
        raise SchemaError(f"{where}: a text holds half a surrogate pair (\\ud800 to \\udfff); replace it") from None
    except RecursionError:
        raise SchemaError(f"{where}: JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise SchemaError(
            f"{where}: byte {error.start} is not valid UTF-8; pass encoding='latin-1' if it is that"
        ) from None
    except ValueError as error:
        raise SchemaError(f"{where}: not valid JSON ({error})") from None


def _document_records(document: Any) -> list[Any]:
    if isinstance(document, list):
        return document
    columns = list(document.values()) if isinstance(document, dict) else []
    if columns and all(isinstance(c, list) and len(c) == len(columns[0]) for c in columns):
        return [dict(zip(document, row, strict=True)) for row in zip(*columns, strict=True)]
    return [document]


def _is_document(data: bytes) -> bool:
    """Whether the bytes are one JSON value and not one per line."""
    first = data.lstrip().split(b"\n", 1)
    if len(first) == 1 or not first[1].strip():
        return True
    try:
        json.loads(first[0])
    except (ValueError, RecursionError):
        return True
    return False


def _says_nan(value: Any) -> bool:
    return (isinstance(value, float) and value != value) or (isinstance(value, str) and value.strip().lower() == "nan")


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("a truth value stays one")
    return np.nan if value is None else float(value)


def as_float(value: int) -> float:
    """An integer of any size as a number; infinite beyond the largest float."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")

"""Tables on disk: those that travel with the package, and writing new ones safely.

A table is `NAME.csv` (or `.parquet`) with `NAME.meta.json` beside it. An installed package carries them in its folder
`embedded`; a checkout has them in `data/tables`.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from scalinglab.errors import ConfigError

_SIGNS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are the wide forms, which run too
_FORMULA_STARTS = (*_SIGNS, "\t", "\r", "\n")
_UNSEEN = (
    "\ufeff\u200b\u2060"  # a spreadsheet may pass over them: the first is a byte order mark at the start of a file
)
_SUFFIXES = (".csv", ".csv.gz", ".parquet")


def table_path(name: str) -> Path:
    """File of the embedded table `name`.

    Raises
    ------
    ConfigError
        No such table; lists those there are.
    """
    known = _tables()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        raise ConfigError(f"there is no embedded table {name!r}{hint}; known: {', '.join(sorted(known)) or 'none'}")
    return known[name]


def table_names() -> list[str]:
    """Names of the embedded tables, sorted."""
    return sorted(_tables())


def table_meta(name: str) -> dict[str, Any]:
    """Source, conventions and caveats of the embedded table `name`; empty where no meta file stands beside it."""
    path = table_path(name)
    meta = path.with_name(f"{name}.meta.json")
    return json.loads(meta.read_text(encoding="utf-8")) if meta.is_file() else {}


def write_table(table: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as CSV (.csv, .csv.gz) or Parquet, whole or not at all.

    Text cells of a CSV that a spreadsheet would run as a formula get a leading apostrophe, which `read_runs` takes off.

    Raises
    ------
    ConfigError
        Another ending, or Parquet without pyarrow.
    """
    path = Path(path)
    if path.name.endswith(".parquet"):
        try:
            data = table.to_parquet(None, index=False)
        except ImportError:
            raise ConfigError(
                f"{path}: Parquet needs pyarrow: pip install 'scalinglab[parquet]', or write .csv"
            ) from None
        return write_atomically(path, data)
    if not path.name.endswith((".csv", ".csv.gz")):
        raise ConfigError(f"{path}: write a table as .csv, .csv.gz or .parquet")
    text = csv_text(neutralised(table)).encode()
    return write_atomically(path, gzip.compress(text, mtime=0) if path.name.endswith(".gz") else text)


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV. Where a text holds a carriage return all texts are quoted: Python before 3.13 leaves that one bare, and
    what follows it would begin a row of its own."""
    texts = (table.iloc[:, i] for i in range(table.shape[1]) if not pd.api.types.is_numeric_dtype(table.dtypes.iloc[i]))
    bare = any("\r" in str(c) for c in table) or any("\r" in v for text in texts for v in text if isinstance(v, str))
    return table.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC if bare else csv.QUOTE_MINIMAL)


def neutralised(table: pd.DataFrame) -> pd.DataFrame:
    """The table with text cells (and names) that start like a spreadsheet formula made plain text."""
    out = table.copy()
    for column in out.columns:
        if not pd.api.types.is_numeric_dtype(out[column]) and not pd.api.types.is_bool_dtype(out[column]):
            out[column] = out[column].map(plain_text)
    return out.rename(columns=lambda name: plain_text(str(name)))


def plain_text(value: Any) -> Any:
    """The value, with an apostrophe before text that a spreadsheet would run as a formula; numbers as text are left alone.

    Such text that begins with apostrophes of its own gets one more, so that `as_written` gives every text back.
    """
    return "'" + value if isinstance(value, str) and _runs(value.lstrip("'")) else value


def as_written(value: Any) -> Any:
    """The value that `plain_text` was given: one apostrophe less before text that a spreadsheet would run as a formula."""
    return value[1:] if isinstance(value, str) and value.startswith("'") and _runs(value.lstrip("'")) else value


def _runs(text: str) -> bool:
    """Whether a spreadsheet would take the text for a formula (or begin a cell anew with what follows)."""
    seen = text.lstrip(_UNSEEN)
    begun = seen
    while (shorter := begun.lstrip().lstrip(_UNSEEN)) != begun:  # both may alternate
        begun = shorter
    if not (seen.startswith(_FORMULA_STARTS) or begun.startswith(_SIGNS)):
        return False
    try:
        float(text)  # "-3" as text is a number, not a formula
    except ValueError:
        return True
    return False


def write_atomically(path: Path, data: bytes) -> Path:
    """Write bytes to a temporary name in the same folder, flush them to disk, and rename: the file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _tables() -> dict[str, Path]:
    package = Path(__file__).resolve().parent
    found: dict[str, Path] = {}
    for folder in (package / "embedded", package.parent / "data" / "tables"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            for suffix in _SUFFIXES:
                if path.name.endswith(suffix):
                    found.setdefault(path.name.removesuffix(suffix), path)
    return found

"""One file -> the table in it, with the line that each row came from. Knows file formats, not scaling laws.

CSV and TSV (also gzipped), Parquet, JSON lines (also gzipped), JSON records. The format is told from the content first
and the extension second. Nothing is executed or unpickled.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.json_tables import RawTable, Torn, read_json

Keep = Callable[[list[str]], list[str]]  # names in the file -> those to read, in order

_MAX_BYTES = 8 << 30  # of a decompressed file
_MAGIC = {
    b"PK\x03\x04": "a zip archive (perhaps Excel or numpy); export it as CSV or Parquet",
    b"\x80\x04": "a Python pickle, which can run code and is never read; export it as CSV or Parquet",
    b"\x80\x05": "a Python pickle, which can run code and is never read; export it as CSV or Parquet",
    b"\x93NUMPY": "a numpy array; export it as CSV with a header",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; decompress it first",
    b"\xfd7zXZ": "xz-compressed; decompress it first",
    b"BZh": "bzip2-compressed; decompress it first",
    b"\x89HDF": "an HDF5 file; export it as CSV or Parquet",
    b"SQLite": "an SQLite data base; export it as CSV or Parquet",
    b"\xff\xfe": "UTF-16 text; pass encoding='utf-16' or save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; pass encoding='utf-16' or save it as UTF-8",
}


def read_table(path: Path, *, keep: Keep, encoding: str = "utf-8", torn: Torn = "error") -> RawTable:
    """Read one file.

    Parameters
    ----------
    keep
        Chooses the columns to read from those in the file.
    encoding
        Of text files.
    torn
        What to do with a last JSON line that was cut off: "error", or "drop" it with a note.

    Raises
    ------
    SchemaError
        Missing, empty, truncated, binary or malformed file; names the row (line) or byte.
    ConfigError
        The format needs an extra that isn't installed.
    """
    if torn not in ("error", "drop"):
        raise ConfigError(f"torn={torn!r} is unknown; choose 'error' or 'drop'")
    head = _head(path)
    if not head:
        raise SchemaError(f"{path} is empty")
    if head[:4] == b"PAR1" or path.suffix == ".parquet":
        return _read_parquet(path, head, keep)
    data: bytes | None = None
    name = path.name.lower()
    if head[:2] == b"\x1f\x8b":
        data = _gunzip(path)
        head, name = data[: 1 << 16], name.removesuffix(".gz")
        if not head:
            raise SchemaError(f"{path} is empty")
    if not (encoding.lower().replace("-", "").startswith("utf16")):
        _refuse_binary(path, head)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise SchemaError(f"{path} is empty (blank lines only)")
    if start[:1] in (b"{", b"[") or name.endswith((".jsonl", ".ndjson", ".json")):
        return read_json(path, path.read_bytes() if data is None else data, name, encoding, torn)
    opener: Callable[[], BinaryIO] = (lambda: path.open("rb")) if data is None else (lambda: io.BytesIO(data))
    return _read_csv(path, opener, head, keep, encoding, tabs=name.endswith((".tsv", ".tab")))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            return handle.read(1 << 16)
    except FileNotFoundError:
        raise SchemaError(f"{path} does not exist") from None
    except OSError as error:
        raise SchemaError(f"{path} can't be read: {error.strerror or error}") from None


def _gunzip(path: Path) -> bytes:
    parts, size = [], 0
    try:
        with gzip.open(path, "rb") as handle:
            while part := handle.read(1 << 22):
                size += len(part)
                if size > _MAX_BYTES:
                    raise SchemaError(f"{path} decompresses to more than {_MAX_BYTES >> 30} GiB; split it")
                parts.append(part)
    except EOFError:
        raise SchemaError(
            f"{path} is a truncated gzip file (it ends after {size:,} decompressed bytes); copy it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SchemaError(f"{path} is a damaged gzip file ({error}); copy it again") from None
    return b"".join(parts)


def _refuse_binary(path: Path, head: bytes) -> None:
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise SchemaError(f"{path} is {what}")
    odd = next((i for i, b in enumerate(head) if b < 9 or 13 < b < 27), None)
    if odd is not None:
        raise SchemaError(
            f"{path} is not a text table: byte {odd} is {head[odd]:#04x}; export it as CSV, JSON lines or Parquet"
        )


def _read_parquet(path: Path, head: bytes, keep: Keep) -> RawTable:
    if head[:4] != b"PAR1":
        raise SchemaError(f"{path} is not a Parquet file: it does not begin with PAR1")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{path} is a Parquet file: install the extra, pip install 'scalinglab[parquet]'") from None
    try:
        file = pq.ParquetFile(path)
        nested = [f.name for f in file.schema_arrow if pa.types.is_nested(f.type)]
        names = [f.name for f in file.schema_arrow if f.name not in nested and not f.name.startswith("__index_level")]
        if len(set(names)) < len(names):
            raise SchemaError(f"{path} has two columns {_twice(names)!r}; rename one")
        frame = file.read(columns=keep(names)).to_pandas(ignore_metadata=True)
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(
            f"{path} is a truncated or damaged Parquet file ({str(error)[:120]}); copy it again"
        ) from None
    notes = [f"{path.name}: nested columns left out: {', '.join(nested[:10])}"] if nested else []
    return RawTable(frame, lambda i: i + 1, "row", notes)


def _read_csv(
    path: Path, opener: Callable[[], BinaryIO], head: bytes, keep: Keep, encoding: str, *, tabs: bool
) -> RawTable:
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ConfigError(f"encoding {encoding!r} is unknown") from None
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    skip, delimiter, header, first = _csv_header(path, opener, codec, tabs)
    if all(_is_number(cell) for cell in header):
        raise SchemaError(
            f"{path}, row {skip + 1}: the header holds numbers ({', '.join(header[:4])}); add a line of names"
        )
    if len(first) > len(header):
        raise SchemaError(f"{path}, row {skip + 2}: {len(first)} cells, but the header names {len(header)} columns")
    names = [name.strip() or f"unnamed_{i + 1}" for i, name in enumerate(header)]
    wanted = keep(names)
    if len(set(names)) < len(names):
        again = [n for n in set(names) if names.count(n) > 1]
        clash = next((n for n in again if n in wanted), None)
        if clash is not None:
            raise SchemaError(f"{path}, row {skip + 1}: the header names the column {clash!r} twice; rename one")
    chosen = set(wanted)
    positions = [i for i, name in enumerate(names) if name in chosen]
    try:
        with opener() as handle:
            frame = pd.read_csv(
                handle,
                sep=delimiter,
                skiprows=skip,
                header=0,
                index_col=False,
                usecols=positions if len(positions) < len(names) else None,
                encoding="utf-8" if codec == "utf-8-sig" else codec,
                low_memory=False,
            )
    except UnicodeDecodeError:
        raise _not_text(path, opener, encoding) from None
    except pd.errors.EmptyDataError:
        raise SchemaError(f"{path} is empty") from None
    except pd.errors.ParserError as error:
        text = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise SchemaError(f"{path} is not a regular table: {_ragged(text)}") from None
    if not len(frame):
        raise SchemaError(f"{path} has a header and no rows")
    frame.columns = pd.Index([names[i] for i in positions])

    def written_nan(column: str) -> np.ndarray:
        with opener() as handle:
            text = pd.read_csv(
                handle,
                sep=delimiter,
                skiprows=skip,
                header=0,
                index_col=False,
                usecols=[names.index(column)],
                encoding="utf-8" if codec == "utf-8-sig" else codec,
                dtype=str,
                keep_default_na=False,
            )
        return np.flatnonzero(text.iloc[:, 0].str.strip().str.lower().eq("nan").to_numpy(dtype=bool, na_value=False))

    return RawTable(frame, lambda i: _csv_line(opener, codec, skip, delimiter, i), written_nan=written_nan)


def _csv_header(
    path: Path, opener: Callable[[], BinaryIO], codec: str, tabs: bool
) -> tuple[int, str, list[str], list[str]]:
    """Lines before the header, the delimiter, the header's cells, the first data row's cells."""
    try:
        with io.TextIOWrapper(opener(), encoding=codec, newline="") as text:
            skip = 0
            while (line := text.readline()) and (not line.strip() or line.startswith("#")):
                skip += 1
            if not line:
                raise SchemaError(f"{path} is empty (no header)")
            delimiter = "\t" if tabs else max(",\t;", key=line.count)
            rows = csv.reader(_chain(line, text), delimiter=delimiter)
            header = next(rows)
            first = next((row for row in rows if any(cell.strip() for cell in row)), [])
    except UnicodeDecodeError:
        raise _not_text(path, opener, codec) from None
    except csv.Error as error:
        raise SchemaError(f"{path}: the header can't be parsed ({error})") from None
    return skip, delimiter, header, first


def _csv_line(opener: Callable[[], BinaryIO], codec: str, skip: int, delimiter: str, row: int) -> int:
    """Line on which data row `row` (0-based) begins; only looked up for a message."""
    with io.TextIOWrapper(opener(), encoding=codec, errors="replace", newline="") as text:
        for _ in range(skip):
            text.readline()
        reader = csv.reader(text, delimiter=delimiter)
        next(reader, None)
        before = reader.line_num
        for cells in reader:
            blank = not cells or (len(cells) == 1 and not cells[0].strip())
            if not blank:
                if row == 0:
                    return skip + before + 1
                row -= 1
            before = reader.line_num
    return skip + before


def _chain(line: str, text: io.TextIOWrapper) -> Iterator[str]:
    yield line
    yield from text


def _not_text(path: Path, opener: Callable[[], BinaryIO], encoding: str) -> SchemaError:
    offset = 0
    with opener() as handle:
        line = 0
        for line, raw in enumerate(handle, 1):  # noqa: B007
            try:
                raw.decode(encoding)
            except UnicodeDecodeError as error:
                offset += error.start
                break
            offset += len(raw)
    name = "UTF-8" if encoding.startswith("utf-8") else encoding
    return SchemaError(
        f"{path}, row {line}: byte {offset} is not valid {name}; save the file as UTF-8 or pass its encoding, "
        "e.g. encoding='latin-1'"
    )


def _ragged(text: str) -> str:
    words = text.replace(",", "").split()
    if text.startswith("Expected") and len(words) >= 7:
        return f"row {words[5]} has {words[7]} cells, the header names {words[1]} columns"
    return text


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _twice(names: Sequence[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""

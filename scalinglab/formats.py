"""One file -> the table in it, with the line that each row came from. Knows file formats, not scaling laws.

CSV and TSV (also gzipped), Parquet, JSON lines (also gzipped), JSON records. The format is told from the content first
and the extension second. Nothing is executed or unpickled.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, ScalinglabError, SchemaError
from scalinglab.json_tables import RawTable, Torn, as_float, read_json
from scalinglab.tables import as_written

Keep = Callable[[list[str]], list[str]]  # names in the file -> those to read, in order

_MAX_BYTES = 8 << 30  # of a decompressed file
_REPEATS = 1_000  # repeated names that pandas can number in reasonable time, where none of them is read
_MANY_COLUMNS = 50  # from which all cells are looked through at once for a written NaN, not column by column
_LARGE, _RATIO = 200 << 20, 200  # bytes unpacked, and times the file's size, beyond both of which a file is a bomb
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
    _check_encoding(encoding)
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


def _check_encoding(encoding: str) -> None:
    """Refuse what is no encoding of text; Python also calls hex, zlib and the like encodings."""
    try:
        "a".encode(encoding, "replace")
        b"a".decode(encoding, "replace")
        if "punycode" in encoding.lower():  # of host names; it knows no replacement, which messages need
            raise ValueError
    except (LookupError, ValueError):  # ValueError: a NUL in the name, "undefined", or those of host names
        raise ConfigError(
            f"encoding {encoding!r} is unknown; write one of text, such as 'utf-8' or 'latin-1'"
        ) from None


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
                _refuse_bomb(path, size)
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
        # texts as they are stored, each once: a megabyte that ten thousand rows share must not become ten gigabytes
        schema = pq.read_schema(path)
        file = pq.ParquetFile(path, read_dictionary=[f.name for f in schema if pa.types.is_string(f.type)])
        nested = [f.name for f in file.schema_arrow if pa.types.is_nested(f.type)]
        names = [f.name for f in file.schema_arrow if f.name not in nested and not f.name.startswith("__index_level")]
        if len(set(names)) < len(names):
            raise SchemaError(f"{path} has two columns {_twice(names)!r}; rename one")
        wanted = keep(names)
        _refuse_bomb(path, max(8 * file.metadata.num_rows * len(wanted), _stored(file.metadata)))
        table, left_out = _texts(file.read(columns=wanted), path)
        frame = table.to_pandas(ignore_metadata=True)
    except ScalinglabError:
        raise
    except Exception as error:  # Arrow, the system and the JSON inside the footer each raise their own
        raise SchemaError(
            f"{path} is a truncated or damaged Parquet file ({str(error)[:120]}); copy it again"
        ) from None
    notes = [f"{path.name}: nested columns left out: {', '.join(nested[:10])}"] if nested else []
    if left_out:
        notes.append(f"{path.name}: columns of bytes left out: {', '.join(left_out[:10])}")
    return RawTable(frame, lambda i: i + 1, "row", notes)


def _stored(metadata: Any) -> int:
    """Bytes of a Parquet file's pages before they were compressed."""
    groups = (metadata.row_group(g) for g in range(metadata.num_row_groups))
    return sum(max(0, group.column(c).total_uncompressed_size) for group in groups for c in range(group.num_columns))


def _texts(table: Any, path: Path) -> tuple[Any, list[str]]:
    """An Arrow table with columns of texts and bytes as plain text, and the names of those that aren't text and were taken out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    left_out, size = [], 0
    for name in table.column_names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            if pa.types.is_string(column.type.value_type):
                for chunk in column.chunks:
                    size += pc.sum(pc.take(pc.binary_length(chunk.dictionary), chunk.indices)).as_py() or 0
                _refuse_bomb(path, size)
        elif not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
            continue
        at = table.column_names.index(name)
        try:
            plain = column.type.value_type if pa.types.is_dictionary(column.type) else pa.string()
            table = table.set_column(at, name, column.cast(plain))
        except pa.ArrowInvalid:
            table = table.remove_column(at)
            left_out.append(name)
    return table, left_out


def _refuse_bomb(path: Path, size: int) -> None:
    """Refuse a file that says or shows that it unpacks to far more than run logs do."""
    if size > _LARGE and size > _RATIO * path.stat().st_size:
        raise SchemaError(
            f"{path} would unpack to {size >> 20:,} MiB or more, over {_RATIO} times its size: too much for a run log; "
            "write it again uncompressed if it is one"
        )


def _read_csv(
    path: Path, opener: Callable[[], BinaryIO], head: bytes, keep: Keep, encoding: str, *, tabs: bool
) -> RawTable:
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    skip, delimiter, header, first = _csv_header(path, opener, codec, tabs)
    if all(_is_number(cell) for cell in header):
        raise SchemaError(
            f"{path}, row {skip + 1}: the header holds numbers ({', '.join(header[:4])}); add a line of names"
        )
    if len(first) > len(header):
        raise SchemaError(f"{path}, row {skip + 2}: {len(first)} cells, but the header names {len(header)} columns")
    names = [as_written(name.strip()) or f"unnamed_{i + 1}" for i, name in enumerate(header)]
    wanted = keep(names)
    if len(set(names)) < len(names):
        again = [name for name, count in Counter(names).items() if count > 1]
        clash = next((n for n in again if n in wanted), None)
        if clash is None and len(names) - len(set(names)) > _REPEATS:
            clash = again[0]
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
    except UnicodeError:
        raise _not_text(path, opener, encoding) from None
    except pd.errors.EmptyDataError:
        raise SchemaError(f"{path} is empty") from None
    except pd.errors.ParserError as error:
        text = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise SchemaError(f"{path} is not a regular table: {_ragged(text)}") from None
    if not len(frame):
        raise SchemaError(f"{path} has a header and no rows")
    frame.columns = pd.Index([names[i] for i in positions])
    for column in [
        c for c, kind in frame.dtypes.items() if pd.api.types.is_object_dtype(kind) or isinstance(kind, pd.StringDtype)
    ]:
        if any((isinstance(c, str) and c.startswith("'")) or type(c) is int for c in frame[column].unique()):
            frame[column] = frame[column].map(_cell)

    @cache
    def cells_saying_nan(of: tuple[int, ...]) -> dict[str, np.ndarray]:
        with opener() as handle:
            text = pd.read_csv(
                handle,
                sep=delimiter,
                skiprows=skip,
                header=0,
                index_col=False,
                usecols=list(of),
                encoding="utf-8" if codec == "utf-8-sig" else codec,
                dtype=str,
                keep_default_na=False,
            )
        said = (text.iloc[:, i].str.strip().str.lower().eq("nan") for i in range(len(of)))
        return {
            names[at]: np.flatnonzero(s.to_numpy(dtype=bool, na_value=False))
            for at, s in zip(sorted(of), said, strict=True)
        }

    def written_nan(column: str) -> np.ndarray:
        of = positions if len(positions) > _MANY_COLUMNS else [names.index(column)]
        return cells_saying_nan(tuple(of))[column]

    return RawTable(frame, lambda i: _csv_line(opener, codec, skip, delimiter, i), written_nan=written_nan)


def _cell(value: Any) -> Any:
    """A cell as it was meant: without the apostrophe of `write_table`, and integers beyond 64 bits as numbers."""
    return as_float(value) if type(value) is int else as_written(value)


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
    except UnicodeError:
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
            except UnicodeError as error:
                offset += getattr(error, "start", 0)
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

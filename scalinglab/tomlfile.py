"""Configs as TOML: strict in (an unknown key is refused with its path), plain out (what is read back is equal)."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from scalinglab.errors import ConfigError
from scalinglab.tables import write_atomically

T = TypeVar("T")
_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`")
_CHOICE = re.compile(r"Invalid enum value ")
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def read(path: str | Path, kind: type[T]) -> T:
    """Read a TOML file as a msgspec Struct.

    Raises
    ------
    ConfigError
        The file is missing or isn't TOML, or a key is unknown or of the wrong type: names the file and the key.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from None
    return parse(data, kind, where=f"{path}: ")


def parse(data: bytes, kind: type[T], *, where: str = "") -> T:
    """The bytes of a TOML file as a msgspec Struct; errors as `read`, with `where` before them."""
    try:
        found = msgspec.toml.decode(data)
        large = _beyond(found)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{where}not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}not TOML that can be read: it is nested too deeply") from None
    if large is not None:
        raise ConfigError(
            f"{where}{large}: an integer beyond 64 bits; write it as a number with a point or an exponent"
        )
    return convert(found, kind, where=where)


def write(path: str | Path, data: Mapping[str, Any]) -> Path:
    """Write a mapping as TOML, atomically; returns the path. Keys with value None are left out."""
    return write_atomically(Path(path), dumps(data).encode())


def convert(data: Any, kind: type[T], *, where: str = "", within: str = "") -> T:
    """Plain data as a msgspec Struct; errors carry the path of the key, after `within`.

    Raises
    ------
    ConfigError
        An unknown key, a missing key, a value of the wrong type, or one that the Struct itself refuses.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(where + _explained(str(error), kind, within)) from None


def plain(value: Any) -> Any:
    """Structs, tuples and numpy numbers as dicts, lists and Python numbers.

    Raises
    ------
    ConfigError
        A value that no config can hold.
    """
    try:
        return msgspec.to_builtins(value, enc_hook=_number)
    except TypeError as error:
        raise ConfigError(f"a config can't hold this value: {error}") from None


def dumps(data: Mapping[str, Any]) -> str:
    """A mapping as TOML text; floats round-trip exactly.

    Raises
    ------
    ConfigError
        A value that TOML can't hold.
    """
    lines: list[str] = []
    _table(data, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _beyond(data: Any, path: str = "") -> str | None:
    """Path of an integer that 64 bits can't hold: Python's have no largest, but their quotients and roots overflow."""
    if isinstance(data, dict):
        return next((p for k, v in data.items() if (p := _beyond(v, f"{path}.{k}".lstrip("."))) is not None), None)
    if isinstance(data, list):
        return next((p for i, v in enumerate(data) if (p := _beyond(v, f"{path}[{i}]")) is not None), None)
    return path if isinstance(data, int) and not -(1 << 63) <= data < 1 << 63 else None


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} ({type(value).__name__})")


def _explained(message: str, kind: Any, within: str) -> str:
    found = _PATH.search(message)
    path = found["path"].lstrip("$").lstrip(".") if found else ""
    full = ".".join(part for part in (within, path) if part).replace(".[", "[")
    message = _PATH.sub("", message)
    if unknown := _UNKNOWN.search(message):
        key, known = unknown["key"], _keys_at(kind, path)
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"unknown key {f'{full}.{key}' if full else key}{hint}; keys there are {', '.join(known)}"
    if _CHOICE.match(message) and (choices := _choices_at(kind, path)):
        message += f"; choose one of {', '.join(map(str, choices))}"
    return f"{full}: {message}" if full else message


def _keys_at(kind: Any, path: str) -> list[str]:
    """Field names of the Struct that stands at a path like `optimizer` or `shapes[0].x`."""
    structs = _structs(_type_at(kind, path))
    return list(dict.fromkeys(name for struct in structs for name in struct.__struct_fields__))


def _choices_at(kind: Any, path: str) -> list[Any]:
    """Values of the Literal that stands at a path."""
    at = _type_at(kind, path)
    return [value for part in (at, *get_args(at)) if get_origin(part) is Literal for value in get_args(part)]


def _type_at(kind: Any, path: str) -> Any:
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^\]]*\]", "", path)):
        hints = [hint[name] for s in _structs(kind) if name in (hint := get_type_hints(s))]
        if not hints:
            return None
        kind = hints[0]
    return kind


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in _structs(part)]


def _table(data: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    data = {key: value for key, value in data.items() if value is not None}
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    if path and (len(tables) < len(data) or not data):
        lines.extend(["", f"[{'.'.join(map(_key, path))}]"])
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in data.items() if key not in tables)
    for key, value in tables.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.match(key) else _text(key)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON escapes, but for DEL


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        text = repr(float(value))
        if not math.isfinite(value):
            return text
        return text if "." in text or "e" in text else f"{text}.0"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise ConfigError(f"TOML can't hold {value!r} ({type(value).__name__})")

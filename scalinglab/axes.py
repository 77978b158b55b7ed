"""Fields of a config by dotted path, such as `optimizer.weight_decay`: the further axes of a sweep."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import msgspec

from scalinglab import tomlfile
from scalinglab.errors import ConfigError

struct_fields = functools.cache(msgspec.structs.fields)  # it evaluates annotations at every call


def placed(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with values put in by dotted path; what was there is left as it was.

    Examples
    --------
    >>> placed({"optimizer": {"eps": 1e-8}}, {"optimizer.beta1": 0.8, "batch": 4})
    {'optimizer': {'eps': 1e-08, 'beta1': 0.8}, 'batch': 4}
    """
    out = dict(data)
    for path, value in values.items():
        section, dot, field = path.partition(".")
        out[section] = placed(dict(tomlfile.plain(out.get(section) or {})), {field: value}) if dot else value
    return out


def by_path(axes: Mapping[str, Any], kind: type[msgspec.Struct], *, taken: Mapping[str, str]) -> dict[str, list[Any]]:
    """Values by dotted path, paths in alphabetical order, however they were nested; each has the type of its field.

    Parameters
    ----------
    axes : mapping
        Lists of values by path. An unquoted `optimizer.eps = [...]` of TOML is a table in a table, and does as well.
    kind : Struct
        Whose fields the paths lead to.
    taken : mapping
        Fields that are no further axis -> the axis that they have, "" for none.

    Raises
    ------
    ConfigError
        A path that leads to no field or to a section, a field that is taken, no list of values, or a value of a wrong type.
    """
    out: dict[str, list[Any]] = {}
    for path, values in sorted(_leaves(axes)):
        top = path.partition(".")[0]
        if taken.get(top):
            raise ConfigError(f"axes: {path} has an axis of its own; give {taken[top]}")
        known = {p: t for p, t in scalar_fields(kind).items() if p.partition(".")[0] not in taken}
        if path not in known:
            inside = [p for p in known if p.startswith(f"{path}.")]
            if inside:
                raise ConfigError(f"axes: {path} is a section; name one of its fields, e.g. {inside[0]}")
            raise ConfigError(f"axes: unknown field {path} of a run; choose from {', '.join(known)}")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"axes: {path} must be a list of at least one value, not {values!r}")
        within = f'axes."{path}"'
        out[path] = [tomlfile.convert(v, known[path], within=f"{within}[{i}]") for i, v in enumerate(values)]
    return out


def scalar_fields(kind: type[msgspec.Struct], within: str = "") -> dict[str, Any]:
    """Dotted paths of all fields that hold one value, with their types."""
    out: dict[str, Any] = {}
    for field in struct_fields(kind):
        inner = sections(field.type)
        if inner:
            out |= scalar_fields(inner[0], f"{within}{field.name}.")
        elif get_origin(field.type) is not dict:
            out[f"{within}{field.name}"] = field.type
    return out


def sections(kind: Any) -> list[type[msgspec.Struct]]:
    """Structs that a field of this type may hold."""
    return [k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, msgspec.Struct)]


def _leaves(axes: Mapping[str, Any], within: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in axes.items():
        out += _leaves(value, f"{within}{key}.") if isinstance(value, Mapping) else [(f"{within}{key}", value)]
    return out

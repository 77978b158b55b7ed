"""What every parameter is for: tags that a parametrization reads, so that no rule depends on parameter names.

role      input: a table looked up by token or position · matrix: a sum over width (`fan_in` terms) · readout: from width
          to the vocabulary · vector: elementwise or a fixed number of terms (gains, stream weights, scalars)
location  branch: inside a residual branch, behind its multiplier · trunk: acts on the residual stream itself, so the
          multiplier doesn't reach it · outside: embedding, final norm and readout
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from torch import nn

from scalinglab.errors import ConfigError

Role: TypeAlias = Literal["input", "matrix", "readout", "vector"]
Location: TypeAlias = Literal["branch", "trunk", "outside"]

ROLES: tuple[str, ...] = get_args(Role)
LOCATIONS: tuple[str, ...] = get_args(Location)


@dataclass(frozen=True)
class Tag:
    """Role, location and fan-in of a parameter, and whether weight decay is usual for it."""

    role: Role
    location: Location
    fan_in: int
    decay: bool = True


def tag(param: nn.Parameter, role: Role, location: Location, fan_in: int, *, decay: bool = True) -> nn.Parameter:
    """Write a tag onto a parameter and return the parameter.

    Parameters
    ----------
    param : nn.Parameter
        Gets the attributes `role`, `location`, `fan_in` and `decay`.
    role, location
        See the module's text.
    fan_in : int
        Number of terms that each output of a matrix or readout sums over, the width for most; rows of an input table;
        1 for vectors.
    decay : bool
        False for parameters whose published recipe exempts them from weight decay.

    Raises
    ------
    ConfigError
        Unknown role or location, or a fan-in below 1.
    """
    if role not in ROLES or location not in LOCATIONS:
        raise ConfigError(
            f"role={role!r}, location={location!r} is no tag; choose one of {', '.join(ROLES)} "
            f"and one of {', '.join(LOCATIONS)}"
        )
    if fan_in < 1:
        raise ConfigError(f"fan_in={fan_in} of a parameter must be 1 or more")
    for name, value in (("role", role), ("location", location), ("fan_in", fan_in), ("decay", decay)):
        setattr(param, name, value)
    return param


def tag_of(param: nn.Parameter, name: str = "a parameter") -> Tag:
    """The tag of a parameter.

    Raises
    ------
    ConfigError
        The parameter has none: it was made without `tag`, or its module was rebuilt without its model.
    """
    if not hasattr(param, "role"):
        raise ConfigError(f"{name} has no role: wrap it in roles.tag(...) where it is made")
    values = (getattr(param, field) for field in ("role", "location", "fan_in", "decay"))
    return Tag(*cast(tuple[Role, Location, int, bool], tuple(values)))


def tags(module: nn.Module) -> dict[str, Tag]:
    """Tags of all parameters of a module by name; an untagged one raises `ConfigError`."""
    return {name: tag_of(param, name) for name, param in module.named_parameters()}


def retag(module: nn.Module, known: dict[str, Tag]) -> None:
    """Write tags back after torch has replaced parameter objects (`to_empty`, `deepcopy`, unpickling)."""
    for name, param in module.named_parameters():
        if name in known:
            old = known[name]
            tag(param, old.role, old.location, old.fan_in, decay=old.decay)

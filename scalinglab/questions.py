"""Questions on disk: fits/<question>.toml says what is asked, fits/<question>.json what was answered.

runs = "data/tables/simulated_shapes.csv"   # or a list; relative to the TOML file
law = "shape"
by = "architecture"
share = ["E", "B", "beta"]
where = "tokens > 1e9"
[columns]
loss = "val_bits * log(2)"
[fixed]
alpha = 0.34
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from scalinglab.errors import ConfigError


class Question(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One fit, written down. Keys are the arguments of `read_runs` and `fit`; unknown keys are refused."""

    runs: str | list[str]
    law: str
    question: str = ""
    objective: str = "gaussian"
    by: str | None = None
    share: list[str] | str | None = msgspec.field(default_factory=list)
    fixed: dict[str, float] = msgspec.field(default_factory=dict)
    weights: str | None = None
    seed: int = 0
    where: str | None = None
    columns: dict[str, str] = msgspec.field(default_factory=dict)
    params: str = "backbone"
    key: list[str] = msgspec.field(default_factory=list)
    level: float = 0.95
    out: str | None = None


def read_question(path: str | Path) -> Question:
    """Read a question; paths in it are relative to its own folder.

    Raises
    ------
    ConfigError
        The file is missing, not TOML, or has an unknown key or a value of the wrong type; the message names it.
    """
    path = Path(path)
    try:
        asked = msgspec.toml.decode(path.read_bytes(), type=Question)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from None
    except (msgspec.DecodeError, ValueError) as error:
        known = ", ".join(Question.__struct_fields__)
        raise ConfigError(f"{path}: {error}; keys are {known}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be read") from None
    here = path.parent

    def place(p: str) -> str:
        return p if p.startswith("embedded:") or Path(p).is_absolute() else str(here / p)

    runs = place(asked.runs) if isinstance(asked.runs, str) else [place(p) for p in asked.runs]
    out = place(asked.out) if asked.out else str(path.with_suffix(".json"))
    return msgspec.structs.replace(asked, runs=runs, out=out)

"""The preregistration: what was promised before the runs, hashed, and where the analysis departs from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec
import pandas as pd

from scalinglab import tomlfile
from scalinglab.errors import ConfigError


class Prereg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A preregistration file (TOML); every key but `estimand` may be left out, and then promises nothing.

    margin : equivalence margin as relative compute (0.05 is 5 %). params : which N is held equal. contrast : shallow and deep
    depth. seeds : runs per cell. lr_rule, exclusions, stopping_rule : in words.
    """

    estimand: Literal["E1", "E1s", "E2", "E7"]
    title: str = ""
    margin: float | None = None
    alpha: float | None = None
    params: Literal["backbone", "total"] | None = None
    flops: Literal["6n", "causal", "full"] | None = None
    reference: str | None = None
    architectures: list[str] = msgspec.field(default_factory=list)
    group: str | None = None
    contrast: list[float] = msgspec.field(default_factory=list)
    depths: list[float] = msgspec.field(default_factory=list)
    degree: int | None = None
    seeds: int | None = None
    tokens: float | None = None
    lr_rule: str = ""
    exclusions: str = ""
    stopping_rule: str = ""

    def __post_init__(self) -> None:
        if self.margin is not None and not self.margin > 0:
            raise ValueError("margin is relative compute and must be positive, e.g. 0.05")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError("alpha must lie between 0 and 1")
        if self.contrast and (len(self.contrast) != 2 or not self.contrast[0] < self.contrast[1]):
            raise ValueError("contrast holds two depths, the shallow one first")


def read_prereg(path: str | Path) -> tuple[Prereg, str]:
    """Read a preregistration and hash its bytes (SHA-256).

    Raises
    ------
    ConfigError
        The file is missing, isn't TOML, or has an unknown key or a wrong value; names the key.
    """
    path = Path(path)
    made = tomlfile.read(path, Prereg)
    return made, hashlib.sha256(path.read_bytes()).hexdigest()


def deviations(
    plan: Prereg,
    runs: pd.DataFrame,
    lost: pd.DataFrame,
    *,
    used: dict[str, object],
) -> list[str]:
    """Where the analysis or the data depart from the plan, one sentence each.

    used : what the analysis did, by the plan's own keys.
    """
    out: list[str] = []
    for key, value in used.items():
        if key not in Prereg.__struct_fields__:
            raise ConfigError(f"{key!r} is no key of a preregistration; it has {', '.join(Prereg.__struct_fields__)}")
        said = getattr(plan, key)
        if said in (None, "", []) or value is None:
            continue
        if isinstance(said, list):
            said, value = list(said), list(value)  # type: ignore[call-overload]
        if said != value:
            out.append(f"{key}: registered {said!r}, used {value!r}")
    both = pd.concat([runs, lost], ignore_index=True)
    absent = [a for a in plan.architectures if a not in set(both["architecture"])]
    extra = [a for a in dict.fromkeys(both["architecture"]) if plan.architectures and a not in plan.architectures]
    if absent:
        out.append(f"architectures: registered but not in the runs: {', '.join(absent)}")
    if extra:
        out.append(f"architectures: in the runs but not registered: {', '.join(extra)}")
    gone = [f"{d:g}" for d in plan.depths if not (both["depth"] == d).any()]
    new = [f"{d:g}" for d in sorted(both["depth"].unique()) if plan.depths and d not in plan.depths]
    if gone:
        out.append(f"depths: registered but not in the runs: {', '.join(gone)}")
    if new:
        out.append(f"depths: in the runs but not registered: {', '.join(new)}")
    if plan.seeds is not None and len(both):
        count = both.groupby(["architecture", "group", "depth", "width"]).size()
        off = count[count != plan.seeds]
        if len(off):
            out.append(
                f"seeds: registered {plan.seeds} per cell, {len(off)} of {len(count)} cells have {off.min()} to {off.max()}"
            )
    if plan.tokens is not None and len(both) and (abs(both["tokens"].dropna() / plan.tokens - 1) > 0.01).any():
        out.append(
            f"tokens: registered {plan.tokens:.4g}, the runs have {both['tokens'].min():.4g} to {both['tokens'].max():.4g}"
        )
    return out

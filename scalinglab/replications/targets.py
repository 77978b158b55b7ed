"""What a replication is: published targets, the files it needs, a function that computes ours, and rows that tell both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.published import KINDS, Kind, published_numbers

COLUMNS = (
    "study", "quantity", "kind", "published", "ours", "low", "high", "interval", "unit", "agrees", "rule", "why", "source", "printed",
    "needs", "status",
)  # fmt: skip


_WORDS = {"yes": "agree", "holds": "hold as a bound", "no": "differ", "open": "open"}


@dataclass(frozen=True)
class Ours:
    """What we get: the value, its 95 % interval where there is one, and what the computation itself shows about a difference.

    agrees : "yes", "no" or "open" where a rule of the target's kind can't judge; None leaves it to the target's tolerance. "holds"
    is the "yes" of an inequality: ours lies on the side that it allows, which is no agreement with its number.
    interval : how low and high were found, as two methods give two intervals for one number; a range of values says "range".
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    why: str = ""
    agrees: str | None = None
    interval: str = ""


@dataclass(frozen=True)
class Target:
    """One number to reproduce.

    quantity : name within its study; where `published` is NaN the value, unit and source are those of `published_numbers`.
    tolerance : largest distance that counts as agreement (absolute; relative with `relative`), and `rule`, its reason.
    why : why they differ, where that is known beforehand. kind : of a `published` that stands here, see `published.KINDS`.
    """

    quantity: str
    tolerance: float = math.nan
    rule: str = ""
    why: str = ""
    relative: bool = False
    published: float = math.nan
    unit: str = ""
    source: str = ""
    kind: Kind = "printed"


@dataclass(frozen=True)
class Replication:
    """Targets of one study, computed together; `needs` are the data files without which all of them are skipped."""

    study: str
    targets: tuple[Target, ...]
    compute: Callable[[Path], Mapping[str, Ours]]
    needs: tuple[str, ...] = ()

    def rows(self, data: Path | None) -> list[dict[str, object]]:
        """One row per target, skipped ones too."""
        absent = [name for name in self.needs if data is None or not (data / name).is_file()]
        made = {} if absent else self.compute(data or Path())
        unknown = sorted(set(made) - {t.quantity for t in self.targets})
        if unknown:
            raise ConfigError(f"replication {self.study}: {unknown[0]!r} is computed but is no target")
        return [self._row(target, made.get(target.quantity), absent) for target in self.targets]

    def _row(self, target: Target, ours: Ours | None, absent: list[str]) -> dict[str, object]:
        told = self._published(target)
        row: dict[str, object] = dict.fromkeys(COLUMNS, "")
        row |= {
            "study": self.study, "quantity": target.quantity, "published": told["value"], "unit": told["unit"],
            "source": told["source"], "kind": told["kind"], "printed": told["kind"] == "printed", "rule": target.rule, "needs": ", ".join(self.needs),
            "ours": math.nan, "low": math.nan, "high": math.nan,
        }  # fmt: skip
        if absent:
            return {**row, "status": f"skipped: needs {', '.join(absent)}"}
        if ours is None:
            raise ConfigError(f"replication {self.study}: {target.quantity!r} was not computed")
        agrees = ours.agrees or _judge(ours.value, float(str(told["value"])), target)
        why = ours.why or (target.why if agrees != "yes" else "")
        return {
            **row, "ours": ours.value, "low": ours.low, "high": ours.high, "interval": ours.interval, "agrees": agrees,
            "why": why, "status": "done",
        }  # fmt: skip

    def _published(self, target: Target) -> dict[str, object]:
        if math.isfinite(target.published):
            return {"value": target.published, "unit": target.unit, "source": target.source, "kind": target.kind}
        table = published_numbers(self.study)
        found = table[table["quantity"] == target.quantity]
        if not len(found):
            raise ConfigError(f"replication {self.study}: there is no published number {target.quantity!r}")
        return found.iloc[0].to_dict()


def counted(table: pd.DataFrame) -> list[str]:
    """How many numbers of `replications` came out again, a sentence per kind: only a printed number can be replicated."""
    out = []
    for kind, name in KINDS.items():
        own = table[table["kind"] == kind]
        done = own[own["status"] == "done"]
        if len(own):
            told = [f"{n} {word}" for verdict, word in _WORDS.items() if (n := int((done["agrees"] == verdict).sum()))]
            told += [f"{len(own) - len(done)} skipped"] if len(done) < len(own) else []
            out.append(f"of {len(own)} {name}: {', '.join(told)}")
    return out


def data_folder(data: str | Path | None) -> Path | None:
    """The folder, or None; ConfigError where there is none of that name."""
    if data is not None and not Path(data).is_dir():
        raise ConfigError(f"data={str(data)!r} is no folder: give the folder of public run logs, or leave it out")
    return None if data is None else Path(data)


def run_log(data: Path, name: str, columns: tuple[str, ...] = (), where: str | None = None) -> pd.DataFrame:
    """A CSV of public runs with `depth` and `width` named as ours are; `where` selects rows.

    Raises
    ------
    SchemaError
        The file lacks a column that the replication reads, or no row is left.
    """
    table = pd.read_csv(data / name, low_memory=False).rename(columns={"n_layers": "depth", "d_model": "width"})
    missing = [c for c in columns if c not in table]
    if missing:
        raise SchemaError(f"{data / name} lacks the column {missing[0]!r}: it is not the table that is meant")
    table = table.query(where) if where else table
    if not len(table):
        raise SchemaError(f"{data / name} has no rows with {where}")
    return table


def _judge(ours: float, published: float, target: Target) -> str:
    if math.isnan(target.tolerance):
        raise ConfigError(f"target {target.quantity!r} has neither a tolerance nor a verdict")
    allowed = target.tolerance * (abs(published) if target.relative else 1.0)
    return "yes" if abs(ours - published) <= allowed else "no"

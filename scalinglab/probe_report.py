"""What depth probes of one model measured, as plain data: nothing here needs torch.

A report is a tuple of `Measure`s. Each is indexed one way (`by`):

    state   0 .. L       the residual state before block l (L: before the final norm)
    block   0 .. L - 1   a block
    reader  0 .. 2L      a sublayer (2L: the final norm)
    size    1 .. L - 1   a number of adjacent blocks
    pair                 two of these; the definition says which
    scalar               one number
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.tables import write_atomically

SCHEMA = "scalinglab/probes-1"
FILE = "probes.json"
WIDTH = 96  # characters of the summary

By: TypeAlias = Literal["state", "block", "reader", "size", "pair", "scalar"]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Measure:
    """One diagnostic over its index.

    Parameters
    ----------
    probe, name : str
        The probe that made it, and its own name, unique in a report.
    by : {"state", "block", "reader", "size", "pair", "scalar"}
        What `at` counts.
    definition : str
        Formula and conventions in words; it is saved with the numbers.
    value : float [n]
        NaN where it is not defined.
    low, high : float [n]
        Ends of the interval, NaN where there is none.
    at, other : int [n]
        Index, and the second index of a pair.
    interval : str
        How the interval was made; empty if there is none.

    Raises
    ------
    ConfigError
        Arrays of different lengths, or an unknown `by`.
    """

    probe: str
    name: str
    by: By
    definition: str
    value: Floats
    low: Floats
    high: Floats
    at: Ints
    other: Ints
    interval: str = ""

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise ConfigError(f"measure {self.name!r} is by {self.by!r}; choose one of {', '.join(get_args(By))}")
        for name in ("value", "low", "high", "at", "other"):
            array = np.asarray(getattr(self, name), dtype=np.int64 if name in ("at", "other") else np.float64)
            if array.shape != (len(self.value),):
                raise ConfigError(
                    f"measure {self.name!r}: {name} has shape {array.shape}, its values are {len(self.value)}"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def to_frame(self) -> pd.DataFrame:
        """Columns value, low, high behind `at` (named as `by`), and `other` for pairs."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        if self.by == "scalar":
            return pd.DataFrame(numbers)
        if self.by == "pair":
            return pd.DataFrame({"at": self.at, "other": self.other, **numbers})
        return pd.DataFrame({self.by: self.at, **numbers})


@dataclass(frozen=True)
class ProbeReport:
    """Depth probes of one model on one set of sequences.

    Attributes
    ----------
    label : str
        Name of the run or model.
    depth : int
        Blocks L.
    loss : float
        Of the whole model on these sequences, nats per token.
    measures : tuple of Measure
    skipped : mapping
        Probe -> why it doesn't apply to this model.
    settings : mapping
        Sequences, context, seed, level, thresholds, forward passes: what fixes the numbers.
    """

    label: str
    depth: int
    loss: float
    measures: tuple[Measure, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [m.name for m in self.measures]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ConfigError(f"measure {twice[0]!r} stands twice in a report; give the second one another name")

    def __contains__(self, name: object) -> bool:
        return any(m.name == name for m in self.measures)

    def measure(self, name: str) -> Measure:
        """A measure by name.

        Raises
        ------
        ConfigError
            It isn't in the report; the message says why its probe was skipped, or lists what there is.
        """
        for measure in self.measures:
            if measure.name == name:
                return measure
        why = "; ".join(f"{probe} was skipped: {reason}" for probe, reason in self.skipped.items())
        raise ConfigError(
            f"{self.label or 'this report'} has no measure {name!r}; it has {', '.join(m.name for m in self.measures)}"
            + (f" ({why})" if why else "")
        )

    def scalar(self, name: str) -> float:
        """Value of a measure by scalar; raises ConfigError where `measure` does, or if it is not one number."""
        measure = self.measure(name)
        if measure.by != "scalar":
            raise ConfigError(f"measure {name!r} is by {measure.by}, not one number; take measure({name!r}).value")
        return float(measure.value[0])

    def to_frame(self) -> pd.DataFrame:
        """All measures, tidy: probe, measure, by, at, other, value, low, high. `at` and `other` are missing where unused."""
        parts = [
            pd.DataFrame(
                {
                    "probe": m.probe,
                    "measure": m.name,
                    "by": m.by,
                    "at": pd.array(m.at if m.by != "scalar" else [None] * len(m.value), dtype="Int64"),
                    "other": pd.array(m.other if m.by == "pair" else [None] * len(m.value), dtype="Int64"),
                    "value": m.value,
                    "low": m.low,
                    "high": m.high,
                }
            )
            for m in self.measures
        ]
        columns = ["probe", "measure", "by", "at", "other", "value", "low", "high"]
        return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)

    @property
    def blocks(self) -> pd.DataFrame:
        """Measures along the depth (by state, block, reader or size)."""
        frame = self.to_frame()
        return frame[~frame["by"].isin(["pair", "scalar"])].drop(columns="other").reset_index(drop=True)

    @property
    def pairs(self) -> pd.DataFrame:
        """Measures of pairs."""
        frame = self.to_frame()
        return frame[frame["by"] == "pair"].drop(columns="by").reset_index(drop=True)

    @property
    def scalars(self) -> pd.DataFrame:
        """Single numbers, with their intervals, by name."""
        frame = self.to_frame()
        frame = frame[frame["by"] == "scalar"].drop(columns=["by", "at", "other"])
        return frame.set_index("measure")

    def summary(self) -> str:
        """Header, single numbers, means along the depth, and what was skipped; at most 96 characters wide."""
        import textwrap

        s = self.settings
        lines = ["=" * WIDTH, f"Depth probes: {self.label or 'a model'}"[:WIDTH].center(WIDTH), "=" * WIDTH]
        lines.append(
            f"blocks: {self.depth}   loss: {self.loss:.5g} nats/token   sequences: {s.get('sequences', '?')}   "
            f"context: {s.get('context', '?')}   forward passes: {s.get('passes', '?')}"
        )
        level = f"{100 * float(s['level']):g} %" if "level" in s else "interval"
        lines += ["-" * WIDTH, f"{'one number':<34}{'value':>12}{level:>28}"]
        for m in self.measures:
            if m.by == "scalar":
                ends = f"[{m.low[0]:.4g}, {m.high[0]:.4g}]" if np.isfinite([m.low[0], m.high[0]]).all() else ""
                lines.append(f"{m.name:<34}{_short(m.value[0]):>12}{ends:>28}")
        lines += [
            "-" * WIDTH,
            f"{'along the depth':<34}{'by':>8}{'first':>13}{'lowest':>13}{'highest':>13}{'last':>13}",
        ]
        for m in self.measures:
            known = m.value[np.isfinite(m.value)]
            if m.by not in ("scalar", "pair") and len(known):
                cells = [m.value[0], known.min(), known.max(), m.value[-1]]
                lines.append(f"{m.name:<34}{m.by:>8}" + "".join(f"{_short(v):>13}" for v in cells))
        lines.append("=" * WIDTH)
        for probe, reason in self.skipped.items():
            lines += textwrap.wrap(f"skipped  {probe}: {reason}.", WIDTH, subsequent_indent="         ")
        return "\n".join(lines)

    def save(self, where: str | Path) -> Path:
        """Write `probes.json` into a run's folder, or a file that ends in .json; it appears whole or not at all."""
        where = Path(where)
        return write_atomically(where if where.suffix == ".json" else where / FILE, dumps(self).encode())

    @classmethod
    def load(cls, where: str | Path) -> ProbeReport:
        """Read a report back from a folder or a file.

        Raises
        ------
        SchemaError
            The file is missing, no JSON, or no report of this version.
        """
        return load(Path(where))


def dumps(report: ProbeReport) -> str:
    """The report as JSON text, one measure a line; numbers that are not finite are null."""
    head = {
        "schema": SCHEMA, "label": report.label, "depth": report.depth, "loss": report.loss,
        "settings": dict(report.settings), "skipped": dict(report.skipped),
    }  # fmt: skip
    lines = [f" {json.dumps(key)}: {_text(value)}" for key, value in head.items()]
    measures = ",\n".join(f"  {_text(_record(m))}" for m in report.measures)
    return "{\n" + ",\n".join(lines) + f',\n "measures": [\n{measures}\n ]\n}}\n'


def load(path: Path) -> ProbeReport:
    """`ProbeReport.load`."""
    import msgspec

    path = path if path.suffix == ".json" else path / FILE
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SchemaError(f"{path}: can't be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{path}: no probe report ({error}); write one with report.save(folder)") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise SchemaError(f"{path}: schema is {found!r}, this version reads {SCHEMA!r}")
    try:
        loss = float("nan") if raw["loss"] is None else float(raw["loss"])
        measures = tuple(_measure(m) for m in raw["measures"])
        for key in ("settings", "skipped"):
            if not isinstance(raw[key], dict):
                raise ValueError(f"{key} is no table")
        float(raw["settings"].get("level", 0))
        return ProbeReport(str(raw["label"]), int(raw["depth"]), loss, measures, raw["skipped"], raw["settings"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SchemaError(f"{path}: the probe report is damaged ({type(error).__name__}: {error})") from None


def _record(m: Measure) -> dict[str, Any]:
    record: dict[str, Any] = {"name": m.name, "probe": m.probe, "by": m.by, "definition": m.definition}
    if m.interval:
        record["interval"] = m.interval
    if m.by != "scalar":
        record["at"] = m.at.tolist()
    if m.by == "pair":
        record["other"] = m.other.tolist()
    record["value"] = m.value.tolist()
    if m.interval:
        record |= {"low": m.low.tolist(), "high": m.high.tolist()}
    return record


def _measure(raw: dict[str, Any]) -> Measure:
    value = np.array(raw["value"], dtype=np.float64)  # null becomes NaN
    absent, nowhere = np.full(len(value), np.nan), np.zeros(len(value), dtype=np.int64)
    return Measure(
        raw["probe"], raw["name"], raw["by"], raw["definition"], value,
        np.array(raw.get("low", absent), dtype=np.float64), np.array(raw.get("high", absent), dtype=np.float64),
        np.array(raw.get("at", nowhere), dtype=np.int64), np.array(raw.get("other", nowhere), dtype=np.int64),
        raw.get("interval", ""),
    )  # fmt: skip


def _text(value: Any) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()  # NaN and infinity become null


def _short(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "-"

"""The machine-readable report: its structure as types, its JSON Schema, and the check of a report against it.

The types are the one source: `result.schema.json`, which ships with the package, is made from them. Numbers that are not finite
are null. The tables are lists of rows, whose columns are those of the CSV files beside the report.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal

import msgspec

from scalinglab.errors import SchemaError

SCHEMA = "scalinglab/misscaling-2"
Number = float | None
Verdict = Literal["H_arch", "H_misscale", "both", "neither", "inconclusive"]
State = Literal["", "superior", "inferior", "equivalent", "beyond", "open", "absent"]


class MarginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """gain : nats per e-fold of depth. drift : ln optimal lr per ln depth. alpha : size of the tests."""

    gain: float
    drift: float
    alpha: float


class MethodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How curves were fitted and redrawn; see `Method`."""

    model: Literal["shared", "cubic", "quadratic"]
    window: float
    sides: int
    draws: int
    resample: Literal["auto", "seeds", "residuals"]
    tau: Number
    pool: bool


class NoiseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """SDs. sigma : of a run, seed_by_shape : of what a seed moves all runs of a shape by, tau : of shapes about a line, arm_tau : the
    part that arms don't share (nats); drift_tau : of optima about a line (ln lr)."""

    sigma: Number
    seed_by_shape: Number
    tau: Number
    arm_tau: Number
    drift_tau: Number


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Optimum and best loss of one arm and shape; null where no optimum lies inside what was tried."""

    architecture: str
    parametrization: str
    ladder: str
    depth: float
    width: float
    tokens: Number = None
    batch_tokens: Number = None
    status: Literal["interior", "boundary", "one-sided", "too few", "no optimum", "diverged"]
    optimum_lr: Number
    low: Number
    high: Number
    ln_optimum: Number
    ln_se: Number
    fieller_low: Number
    fieller_high: Number
    minimum: Number
    minimum_se: Number
    curvature: Number
    cubic: Number
    fixed: Number
    rates: int
    runs: int
    diverged: int
    advice: str


class DriftRow(msgspec.Struct, frozen=True, kw_only=True):
    """Slope of ln optimal lr on ln depth or ln width of one arm."""

    architecture: str
    parametrization: str
    axis: Literal["depth", "width"]
    slope: float
    se: float
    df: float
    low: float
    high: float
    p: float
    p_equivalent: float
    decision: str
    shapes: int
    held: str


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """A depth gain or a difference of two, nats per e-fold of depth."""

    name: str
    meaning: str
    estimate: Number
    se: Number
    df: Number
    low: Number
    high: Number
    p: Number
    p_adj: Number
    p_equivalent: Number
    state: State


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A table entry that would have to be wrong by `needed` to explain the naive arm; see `rank_suspects`."""

    entry: str
    exponent: str
    tried: Number
    needed: Number
    needed_se: Number
    misfit: Number
    df: int
    p: Number
    check: Literal["", "pass", "fail", "more seeds"]
    how: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report on mis-scaling."""

    schema: Literal["scalinglab/misscaling-2"]
    verdict: Verdict
    verdicts: dict[str, Verdict]
    reasons: list[str]
    margins: MarginRecord
    method: MethodRecord
    bootstrap: str
    paired: bool | None
    refused: dict[str, str]
    checked: dict[str, Literal["pass", "fail", "more seeds"]]
    noise: NoiseRecord | None
    envelopes: list[Envelope]
    drift: list[DriftRow]
    decomposition: list[Contrast]
    sensitivity: list[dict[str, Any]]
    suspects: list[Suspect]
    by_tau: list[dict[str, Any]]
    by_curve: list[dict[str, Any]]
    hierarchy: list[dict[str, Any]]


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `Result`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **msgspec.json.schema(Result)}


def shipped_schema() -> dict[str, Any]:
    """The schema file that ships with the package."""
    text = resources.files("scalinglab.misscaling").joinpath("result.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def validate(result: Any) -> Result:
    """Check a result (plain data, as read from JSON) and return it as `Result`.

    Raises
    ------
    SchemaError
        It breaks the schema: the message names the path and what was expected.
    """
    try:
        return msgspec.convert(result, Result, strict=True)
    except msgspec.ValidationError as error:
        raise SchemaError(f"the result breaks the schema {SCHEMA}: {error}") from None


def schema_text() -> str:
    """The text of the shipped file."""
    return json.dumps(json_schema(), indent=1) + "\n"

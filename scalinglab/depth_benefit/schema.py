"""The machine-readable result: its structure as types, its JSON Schema, and the check of a result against it.

The types are the one source: `result.schema.json`, which ships with the package, is made from them (`json_schema`), and
`validate` decodes a result into them, so that neither needs a library beyond msgspec. Numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec

from scalinglab.depth_benefit.labels import Label
from scalinglab.errors import SchemaError

SCHEMA_ID = "scalinglab/result-1.0"
Number = float | None
Limits = Annotated[list[float | None], msgspec.Meta(min_length=2, max_length=2)]
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
LawCode = Literal["K1", "K2", "C1", "G1", "R1", "DC", "S1", "S2", "S2d", "S3", "WD", "WDN", "SV", "LV", "CD", "EL"]
EstimandId = Literal["E1", "E1s", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9"]


class Conventions(msgspec.Struct, frozen=True, kw_only=True):
    """What N, FLOPs, loss and tokens mean here."""

    N: Literal["backbone", "total"]
    flops: Literal["full", "causal", "6N"]
    loss_unit: Literal["nats/token"]
    tokens: Literal["seen", "unique"]
    r0: float
    E_shared: bool


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a fit."""

    name: str
    arch: str | None = None
    value: Number
    scale: Literal["natural", "log"]
    se: Number
    df: Number
    ci: Limits | None
    ci_method: str
    identified: bool


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """How the optimum was searched."""

    n: int
    n_best: int
    valley_width: dict[str, Any] = {}


class Convergence(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the optimum is certified."""

    ok: bool
    relative_offset: Number = None


class Identifiability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the runs determine the law."""

    kappa_c: Number = None
    kappa_u: Number = None
    tpp_sd: Number = None
    shape_sd: Number = None
    sloppy: list[str] = []


class FitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fitted law."""

    id: str
    law: LawCode
    sharing: Literal["H0", "H1", "H2", "H3", "H4"]
    estimator: str
    unit: Literal["run", "checkpoint"]
    n_rows: int
    n_runs: int
    params: list[Param]
    objective: float
    starts: Starts
    convergence: Convergence
    identifiability: Identifiability


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """The two shapes compared, and where."""

    L_shallow: Number = None
    L_deep: Number = None
    N: Number = None
    D: Number = None
    C: Number = None


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """Equivalence margin."""

    nats: float
    compute: float
    nats_per_lnL: Number = None  # noqa: N815


class CorrectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Correction for residual mismatch."""

    dn: float = msgspec.field(name="dN")
    dd: float = msgspec.field(name="dD")
    nats: float
    se: float
    applied: bool
    needed: bool
    spurious: Number = None


class EffectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One estimate."""

    estimand: EstimandId
    arch: str
    ref: str | None = None
    variant: str = ""
    group: str = ""
    contrast: Contrast
    estimate: Number
    unit: Literal["nats", "nats/lnL", "ln ratio", "probability", "1"]
    se: Number
    df: Number
    ci95: Limits
    ci_method: str
    p: Number
    p_adj: Number
    method: str
    p_min: Number = None
    mde80: Number = None
    margin: Margin
    ci90: Limits
    compute_equiv: dict[str, Any]
    correction: CorrectionRecord
    label: Label | None


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions."""

    study: Label
    per_arch: dict[str, Label]
    modifiers: dict[str, list[Label | Literal["E_COLLAPSE"]]] = {}
    reasons: dict[str, str] = {}
    stable: dict[str, str] = {}
    rivals: dict[str, str] = {}


class WarningRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Something a reader must know."""

    code: str
    severity: Literal["info", "warn", "block"]
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result of a depth study."""

    schema_version: Literal["1.0"]
    created: str
    code_version: str
    data_hash: Hash
    prereg_hash: Hash | None
    conventions: Conventions
    fits: list[FitRecord]
    effects: list[EffectRecord]
    comparisons: list[dict[str, Any]]
    divergence: list[dict[str, Any]]
    robustness: list[dict[str, Any]] = []
    labels: Labels
    warnings: list[WarningRecord]
    deviations: list[str] = []
    sentences: dict[str, str] = {}
    checklist: dict[str, dict[str, str]] = {}
    n_runs: int = 0
    n_lost: int = 0


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `Result`."""
    made = msgspec.json.schema(Result)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **made}


def shipped_schema() -> dict[str, Any]:
    """The schema file that ships with the package."""
    text = resources.files("scalinglab.depth_benefit").joinpath("result.schema.json").read_text(encoding="utf-8")
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
        raise SchemaError(f"the result breaks the schema {SCHEMA_ID}: {error}") from None


def finite(value: Any, *, where: str = "", lost: list[str] | None = None) -> Any:
    """Plain data with null for numbers that JSON can't hold; their paths are appended to `lost`."""
    if isinstance(value, dict):
        return {str(k): finite(v, where=f"{where}.{k}" if where else str(k), lost=lost) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v, where=f"{where}[{i}]", lost=lost) for i, v in enumerate(value)]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        if lost is not None:
            lost.append(where)
        return None
    return value

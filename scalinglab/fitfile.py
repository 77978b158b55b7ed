"""Fits as JSON files: self-contained, atomic, never a pickle.

A record holds the law (its text), the parameters at full precision with their intervals, the checks, and the rows that
were fitted, so that any later question (another interval, a figure) needs no other file. Numbers that are not finite are
null.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scalinglab import expressions
from scalinglab.errors import ConfigError, ConvergenceWarning, SchemaError
from scalinglab.tables import write_atomically

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

SCHEMA = "scalinglab/fit-1"


def to_dict(fit: Fit, level: float = 0.95) -> dict[str, Any]:
    """The fit as plain data. Intervals are the jackknife's; `null` where a number is not finite."""
    law = fit.law
    if law.function is not None:
        raise ConfigError(
            f"law {law.key!r} is a Python function, which JSON can't hold; save fit.params, or write the law as a formula"
        )
    try:
        table = fit.to_frame(level)
        rows = [{"name": str(name), **row} for name, row in zip(table.index, table.to_dict("records"), strict=True)]
        method = fit.jackknife.method
    except Exception as error:  # the fit itself must be saved even where its error bars can't be made
        warnings.warn(f"no intervals are saved: {error}", ConvergenceWarning, stacklevel=3)
        rows, method = [{"name": str(n), "estimate": v} for n, v in fit.params.items()], f"none: {error}"
    return {
        "schema": SCHEMA,
        "law": {
            "key": law.key, "alias": law.alias, "formula": law.formula, "source": law.source, "note": law.note,
            "constants": dict(law.constants), "derived": dict(law.derived), "fixed": dict(law.fixed), "ties": dict(law.ties),
            "bounds": {k: list(v) for k, v in law.bounds.items()}, "starts": {k: list(v) for k, v in law.starts.items()},
            "by": law.by, "levels": list(law.levels), "shared": sorted(law.shared),
            "columns": sorted(law.columns & (law.reads | {"u"})),
        },
        "objective": {"name": fit.estimator.label, "value": fit.objective, "scale": fit.scale, "variance_power": fit.variance_power},
        "status": fit.status,
        "codes": fit.codes,
        "params": dict(fit.params),
        "parameters": rows,
        "interval": {"level": level, "method": method},
        "n_rows": len(fit.runs),
        "n_runs": fit.n_runs,
        "search": {
            "starts": fit.search.starts, "agreeing": fit.search.agreeing, "distinct_minima": fit.search.distinct_minima,
            "valley": fit.search.valley,
        },
        "checks": [c.row() | {"identifies": c.identifies} for c in fit.checks],
        "notes": list(fit.notes),
        "provenance": dict(fit.provenance),
        "theta": fit.theta.tolist(),
        "others": fit.others.tolist(),
        "weights": None if (fit.weights == 1).all() else fit.weights.tolist(),
        "runs": {str(c): _column(fit.runs[c]) for c in fit.runs.columns},
    }  # fmt: skip


def save(fit: Fit, path: str | Path) -> Path:
    """Write the fit's record; the file appears whole or not at all."""
    import msgspec

    data = msgspec.json.format(msgspec.json.encode(_finite(to_dict(fit))), indent=1)
    return write_atomically(Path(path), _compact_arrays(data))


def load(path: str | Path) -> Fit:
    """Read a record back.

    Raises
    ------
    SchemaError
        The file is missing, no JSON, or no fit record of this version.
    """
    import msgspec

    from scalinglab.fitting import Fit
    from scalinglab.search import Search

    path = Path(path)
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SchemaError(f"{path}: can't be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(
            f"{path}: not a fit record ({error}); write one with fit.save(path) or `scalinglab fit`"
        ) from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise SchemaError(f"{path}: schema is {found!r}, this version reads {SCHEMA!r}")
    try:
        runs = pd.DataFrame({c: _values(v) for c, v in raw["runs"].items()})
        runs.attrs = {
            "source": raw["provenance"].get("source", []),
            "params": raw["provenance"].get("params", "as given"),
        }
        params = pd.Series({k: _number(v) for k, v in raw["params"].items()}, dtype=np.float64)
        weights = np.ones(len(runs)) if raw["weights"] is None else np.asarray(raw["weights"], dtype=np.float64)
        theta = np.array([_number(v) for v in raw["theta"]], dtype=np.float64)
        others = np.array(raw["others"], dtype=np.float64).reshape(-1, len(theta))
        s = raw["search"]
        made = Fit(
            _law(raw["law"]), params, _number(raw["objective"]["value"]), _estimator(raw["objective"]["name"]), raw["status"],
            Search(s["starts"], s["agreeing"], s["distinct_minima"], s["valley"]), runs, weights, theta,
            _number(raw["objective"]["scale"]), raw["objective"]["variance_power"], tuple(_check(c) for c in raw["checks"]),
            tuple(raw["notes"]), raw["provenance"], others,
        )  # fmt: skip
        _check_whole(made)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SchemaError(f"{path}: the fit record is damaged ({type(error).__name__}: {str(error)[:300]})") from None
    return made


def _check_whole(made: Fit) -> None:
    """Raise ValueError where parts of a record don't fit together; a later question would fail in the middle."""
    from scalinglab.diagnostics import STATUS_MEANING

    law, runs = made.law, made.runs
    if made.status not in STATUS_MEANING:
        raise ValueError(f"status {made.status!r} is unknown")
    if list(made.params.index) != list(law.param_names):
        raise ValueError(f"the law has the parameters {', '.join(law.param_names)}, the record others")
    lengths = {"weights": len(made.weights), "runs": len(runs)}
    if len(set(lengths.values())) > 1 or not len(runs):
        raise ValueError(f"it has {lengths['runs']} rows and {lengths['weights']} weights")
    loss = runs["loss"].to_numpy(np.float64)
    if not ((loss > 0) & np.isfinite(loss)).all() or runs["run_id"].isna().any():
        raise ValueError("a row has no run_id, or no finite positive loss")
    size = made.encoding.problem.size if law.in_algebra else len(law.names)
    if made.theta.shape != (size,):
        raise ValueError(f"theta has {made.theta.size} numbers, the law needs {size}")
    for check in made.checks:
        texts = (check.name, check.level, check.code, check.action)
        if check.level not in ("ok", "warn", "block") or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"the check {check.name!r} is none")
    if not all(isinstance(n, str) for n in (law.key, law.source, law.note, law.alias, *made.notes)):
        raise ValueError("a name or note of the law isn't text")
    if not isinstance(made.provenance, dict):
        raise ValueError("provenance is no table")
    for text in law.derived.values():
        expressions.names(text)
    made.predict(runs)


def _law(raw: dict[str, Any]) -> Any:
    from scalinglab.features import COLUMNS
    from scalinglab.laws import Law

    return Law(
        raw["key"], raw["formula"], raw["source"], raw["note"], constants=raw["constants"], derived=raw["derived"],
        bounds={k: (_open(v[0], -np.inf), _open(v[1], np.inf)) for k, v in raw["bounds"].items()}, ties=raw["ties"], fixed=raw["fixed"],
        starts={k: tuple(v) for k, v in raw["starts"].items()}, columns=COLUMNS | set(raw["columns"]), by=raw["by"],
        alias=raw["alias"], levels=tuple(raw["levels"]), shared=frozenset(raw["shared"]),
    )  # fmt: skip


def _estimator(name: str) -> Any:
    from scalinglab.objectives import parse_objective

    return parse_objective(name)


def _check(raw: dict[str, Any]) -> Any:
    from scalinglab.diagnostics import Check

    names = [f.name for f in fields(Check)]
    values = {**raw, "name": raw["check"], "value": _number(raw["value"])}
    return Check(**{n: values[n] for n in names})


def _column(series: pd.Series) -> list[Any]:
    if pd.api.types.is_bool_dtype(series) or not pd.api.types.is_numeric_dtype(series):
        return [None if pd.isna(v) else str(v) for v in series]
    return series.tolist()


def _values(values: list[Any]) -> Any:
    if any(isinstance(v, str) for v in values):
        return pd.array(values, dtype="str")
    return np.array([np.nan if v is None else v for v in values])


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _open(value: Any, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _finite(value: Any) -> Any:
    """Plain data with null for numbers that JSON can't write."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _compact_arrays(data: bytes) -> bytes:
    """Put arrays of numbers on one line: records stay readable and diffs short."""
    import re

    return re.sub(rb"\[\s+((?:[-+0-9.eE]+|null),?\s*)+\]", lambda m: re.sub(rb"\s+", b" ", m.group()), data) + b"\n"

"""The columns that laws read: their names, the ones derived from others, and their values on given runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import expressions
from scalinglab.errors import SchemaError

if TYPE_CHECKING:
    from scalinglab.laws import Law

R0 = 42.67  # reference aspect ratio width/depth: DepthBench's base shape; fixed a priori, so r* is a derived parameter
DERIVED_COLUMNS = {"u": "log(aspect / r0)", "aspect": "width / depth"}
COLUMNS = frozenset(  # names that a formula may read as data
    [
        "params",
        "params_backbone",
        "params_total",
        "params_embedding",
        "params_attention",
        "params_ffn",
        "params_readout",
        "tokens",
        "unique_tokens",
        "flops",
        "flops_6n",
        "flops_causal",
        "flops_full",
        "depth",
        "width",
        "aspect",
        "u",
        "head_dim",
        "ffn_dim",
        "vocab",
        "context",
        "lr",
        "batch_tokens",
        "step",
    ]
)


def feature_values(law: Law, runs: pd.DataFrame) -> dict[str, Any]:
    """Columns that a law reads as float arrays, with its constants and the derived columns (aspect, u).

    Raises
    ------
    SchemaError
        A column that the law needs is missing or has empty or non-finite cells.
    """
    out: dict[str, Any] = dict(law.constants)
    wanted = law.reads if law.function is None else frozenset(str(c) for c in runs.columns)
    for name in sorted(wanted):
        if name in runs.columns and (name != "u"):
            column = runs[name]
            if not pd.api.types.is_numeric_dtype(column):
                if law.function is not None:
                    out[name] = column.to_numpy()
                    continue
                raise SchemaError(f"column {name!r}, which law {law.key!r} reads, is not numeric")
            out[name] = column.to_numpy(dtype=np.float64)
        elif name in DERIVED_COLUMNS:
            parts = expressions.names(DERIVED_COLUMNS[name])
            missing = [p for p in parts if p in COLUMNS and p not in runs.columns and p not in DERIVED_COLUMNS]
            if missing:
                raise SchemaError(
                    f"law {law.key!r} reads {name!r}, which needs the column {missing[0]!r}; it is not in the run table"
                )
            inner = {p: runs[p].to_numpy(dtype=np.float64) for p in parts if p in runs.columns}
            if "aspect" in parts and "aspect" not in inner:
                if not {"width", "depth"} <= set(runs.columns):
                    raise SchemaError(
                        f"law {law.key!r} reads {name!r}, which needs width and depth; the run table lacks them"
                    )
                inner["aspect"] = runs["width"].to_numpy(np.float64) / runs["depth"].to_numpy(np.float64)
            out[name] = np.asarray(expressions.evaluate(DERIVED_COLUMNS[name], {"r0": R0, **law.constants, **inner}))
        else:
            near = ", ".join(str(c) for c in runs.columns[:30])
            raise SchemaError(f"law {law.key!r} reads the column {name!r}, which the run table lacks; it has {near}")
        bad = ~np.isfinite(out[name]) if np.asarray(out[name]).dtype.kind == "f" else np.zeros(1, bool)
        if law.function is None and bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise SchemaError(
                f"column {name!r}, which law {law.key!r} reads, is empty or not finite in {int(bad.sum())} rows "
                f"(first: row index {runs.index[at]}); fill it, drop those rows with where=, or choose a law without it"
            )
    return out


def level_codes(law: Law, runs: pd.DataFrame) -> NDArray[np.intp]:
    """Position of each run's level in law.levels; a run of an unknown level is an error."""
    if law.by not in runs.columns:
        raise SchemaError(f"the fit is by {law.by!r}, a column that these runs lack")
    codes = pd.Index(list(law.levels)).get_indexer(runs[law.by].astype(str))
    if (codes < 0).any():
        strange = sorted(set(runs[law.by].astype(str)) - set(law.levels))
        raise SchemaError(
            f"column {law.by!r} has {strange[0]!r}, which was not in the fit; it knows {', '.join(law.levels)}"
        )
    return np.asarray(codes, dtype=np.intp)

"""One's own runs as one more study of the pooled estimate."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scalinglab.errors import FitError, SchemaError
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.objectives import Gaussian
from scalinglab.replications.effects import Context, ShapeEffect, nothing, of_law, of_parabola, parabola

_PLAIN = Gaussian(variance="constant")


def own_effects(
    runs: pd.DataFrame, *, study: str = "own runs", n: str = "backbone", reference: str = "pre_ln"
) -> list[ShapeEffect]:
    """One's own runs, per architecture: the shape law where sizes and token budgets allow it, else a parabola in u.

    Runs that did not finish are left out. With several architectures `reference` is the one for the primary analysis; a single
    architecture is it by itself.

    Raises
    ------
    SchemaError
        A column is missing.
    """
    for column in ("depth", "width", "params", "tokens", "loss"):
        if column not in runs:
            raise SchemaError(f"own runs lack the column {column!r}; they need depth, width, params, tokens and loss")
    table = runs[np.isfinite(runs["loss"]) & (runs["loss"] > 0)]
    if "status" in table:
        table = table[table["status"].fillna("finished").isin(["finished", ""])]
    table = table.assign(architecture=table["architecture"].fillna("pre_ln") if "architecture" in table else "pre_ln")
    counted = f"params_{n}"
    known = counted in table and bool(table[counted].notna().all())
    if known:
        table = table.assign(params=table[counted])
    alone = len(table["architecture"].unique()) == 1
    out = []
    for name, own in table.groupby("architecture"):
        about = Context(
            study, str(name), n if known else "as given", "as given", "as given", "own runs", alone or name == reference
        )
        out += _of_runs(own, about)
    return out


def _of_runs(own: pd.DataFrame, about: Context) -> list[ShapeEffect]:
    shape = own["depth"].astype(int).astype(str) + "x" + own["width"].astype(int).astype(str)
    try:
        made = fit("shape", own.assign(run_id=shape), objective=_PLAIN)
        if made.status in ("converged", "at_bound"):
            return of_law(made, about)
    except FitError:
        pass  # too few shapes, or one size or one token budget: the parabola says what can be said
    own = own.assign(log_loss=np.log(own["loss"]), budget=_groups(own["tokens"]), size=_groups(own["params"], 0.1))
    cells = own.groupby(["depth", "width", "budget", "size"])[["log_loss", "params", "tokens"]].mean().reset_index()
    cells["loss"] = np.exp(cells["log_loss"])
    levels = pd.get_dummies(cells[["budget", "size"]].astype(str).agg("/".join, axis=1)).to_numpy(np.float64)
    u = np.log(cells["width"] / cells["depth"] / R0).to_numpy(np.float64)
    made_ = parabola(cells["log_loss"].to_numpy(np.float64), u, levels)
    if not np.isfinite(made_.unit).all() or made_.df < 1:
        return nothing(
            about, own, f"{len(cells)} cells at {levels.shape[1]} sizes and budgets leave no error for a parabola"
        )
    return of_parabola(made_, about, cells)


def _groups(values: pd.Series, width: float = 0.03) -> pd.Series:
    """Numbers of the groups of values that lie within `width` of their neighbour on a log scale."""
    ordered = np.sort(values.unique())
    group = np.concatenate([[0], np.cumsum(np.diff(np.log(ordered)) > width)])
    return values.map(dict(zip(ordered, group, strict=True)))

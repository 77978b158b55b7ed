"""The learning rate of every arm at every shape, from a sweep over learning rates: what the next sweep is tuned with."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd

from scalinglab.errors import SchemaError
from scalinglab.misscaling.curves import STATUS, WINDOW, fit_curves

ARM = ("corpus", "architecture", "parametrization", "depth", "width")
_LOST = ("diverged", "failed")
_MUST = ("architecture", "depth", "width", "lr", "loss")
_SAME = ("options", "corpus_options", "tokens", "weight_decay", "batch_tokens")  # of one arm at one shape


def best_rates(runs: pd.DataFrame, *, window: float = WINDOW) -> pd.DataFrame:
    """Learning rate at the vertex of a parabola in ln lr through the mean losses near the best one, by arm and shape.

    Parameters
    ----------
    runs : run table with architecture, depth, width, lr, loss (nats per token) and where known corpus, parametrization,
        seed, status. Lost runs count as an infinite loss of their learning rate.
    window : nats above the best within which losses are fitted; widened where it holds too few.

    Returns
    -------
    DataFrame
        By corpus, architecture, parametrization, depth, width: lr, loss (mean over seeds of the best learning rate tried),
        best (that rate), tried (how many), seeds (least number), status. "interior": lr is the vertex. Anything else: lr is
        the best tried; "boundary" says that it lies on the edge of the grid, which should be extended.

    Raises
    ------
    SchemaError
        A column is missing, no run has a learning rate, or rows of one arm and shape differ in tokens, options or the like; there
        is no column parametrization and several runs share shape, lr and seed, so that arms would be pooled.

    Notes
    -----
    A parabola puts the optimum .11 to .14 too low in ln lr (`curves`), which costs 2e-4 nats at the curvature of language models.
    """
    if missing := [c for c in _MUST if c not in runs]:
        raise SchemaError(f"the run table lacks {', '.join(missing)}; tuning needs a sweep over the learning rate")
    table = runs.copy()
    for name, default in (("corpus", ""), ("parametrization", "sp")):
        table[name] = table[name].fillna(default) if name in table else default
    table = table[pd.to_numeric(table["lr"], errors="coerce") > 0]
    if table.empty:
        raise SchemaError("no run has a learning rate (column lr)")
    _refuse_mixtures(table)
    if "parametrization" not in runs:
        _refuse_pooled(table)
    lost = table["loss"].isna() | (table["status"].isin(_LOST) if "status" in table else False)
    table["loss"] = table["loss"].astype(float).mask(lost, np.inf)
    by = table.groupby([*ARM, "lr"], sort=True)["loss"].agg(["mean", "size"]).reset_index()
    cells = [(key, cell) for key, cell in by.groupby(list(ARM), sort=False)]
    most = max(len(cell) for _, cell in cells)
    z, y, n = (np.full((len(cells), most), fill) for fill in (np.nan, np.inf, 0.0))
    for i, (_, cell) in enumerate(cells):
        z[i, : len(cell)], y[i, : len(cell)], n[i, : len(cell)] = np.log(cell["lr"]), cell["mean"], cell["size"]
    curves = fit_curves(z, y, n, model="quadratic", window=window, sides=1)
    rows = []
    for i, (key, cell) in enumerate(cells):
        least = cell.loc[cell["mean"].idxmin()]
        inside = STATUS[curves.status[i]] == "interior"
        lr = float(np.exp(curves.optimum[i])) if inside else float(least["lr"])
        rows.append(
            {**dict(zip(ARM, key, strict=True)), "lr": lr, "loss": float(least["mean"]), "best": float(least["lr"]),
             "tried": len(cell), "seeds": int(cell["size"].min()), "status": STATUS[curves.status[i]]}
        )  # fmt: skip
    return pd.DataFrame(rows)


def tuned_toml(rates: pd.DataFrame, source: Sequence[str] = ()) -> str:
    """`[[tuned]]` entries of a sweep file, a line of comment where the optimum isn't bracketed."""
    several = len(set(rates["corpus"])) > 1
    lines = [f"# learning rates from {', '.join(source)}"] if source else []
    for r in rates.itertuples():
        note = "" if r.status == "interior" else f"  # {r.status}: the best of {r.tried} tried"
        lines += [
            "", "[[tuned]]", f"architecture = {json.dumps(r.architecture)}", f"parametrization = {json.dumps(r.parametrization)}",
            f"depth = {int(r.depth)}", f"width = {int(r.width)}", f"lr = {float(f'{r.lr:.4g}')!r}{note}",
            *([f"corpus = {json.dumps(r.corpus)}"] if several else []),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _refuse_pooled(table: pd.DataFrame) -> None:
    """Without named parametrizations all runs count as one: a seed that has two losses at one rate shows that they are not."""
    if "seed" not in table:
        return
    cells = table.groupby([*ARM, "lr", "seed"], sort=False)
    count = cells["run_id"].nunique() if "run_id" in table else cells["loss"].size()
    if (count > 1).any():
        at = dict(zip((*ARM, "lr", "seed"), count.idxmax(), strict=True))
        raise SchemaError(
            f"{at['architecture']} at depth {at['depth']:g}, width {at['width']:g} has {count.max()} runs of lr {at['lr']:g} and seed "
            f"{at['seed']}, and the table has no column parametrization: add it, or choose one arm (--where)"
        )


def _refuse_mixtures(table: pd.DataFrame) -> None:
    for column in (c for c in _SAME if c in table):
        kinds = table.groupby(list(ARM))[column].nunique(dropna=False)
        if (kinds > 1).any():
            arm = ", ".join(f"{k} {v}" for k, v in zip(ARM, kinds.idxmax(), strict=True) if v != "")
            raise SchemaError(f"{arm} has runs of several {column}: tune on one of them (--where)")

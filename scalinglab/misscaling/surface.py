"""How sharply losses rise about the best learning rate: curvatures of whole learning-rate by batch grids.

    loss = c0 + c1 z + c2 s + c z^2 + c4 z s + c5 s^2,   z = ln lr, s = ln batch,   near the best run of a setting

c (nats per (ln lr)^2) is the coefficient c_eta of the learning-rate nuisance: a factor 2 costs c (ln 2)^2.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, FitError, SchemaError

WINDOW = 0.06
STEP_LAW = 0.0155  # median curvature on public grids, see `lr_curvature`
_TERMS = 6


def lr_curvature(runs: pd.DataFrame, *, window: float = WINDOW) -> pd.DataFrame:
    """Curvature of loss in ln lr for each shape and token budget, batch sizes taken together.

    Parameters
    ----------
    runs : run table with depth, width, lr, loss; where it has tokens and batch_tokens, settings are told apart by tokens (to
        2 %: whole steps of another batch end elsewhere) and batch enters the surface.
    window : nats above the best loss of a setting.

    Returns
    -------
    DataFrame
        Per setting: depth, width, tokens, curvature, optimum_lr and optimum_batch (where the surface has a minimum, else
        NaN), runs in the window. Settings with fewer than 8 runs there are left out.

    Raises
    ------
    SchemaError
        A column is missing.
    FitError
        No setting has runs enough.
    """
    for column in ("depth", "width", "lr", "loss"):
        if column not in runs:
            raise SchemaError(f"curvatures need the column {column!r}")
    if not window > 0:
        raise ConfigError(f"window={window} must be positive (nats)")
    table = runs[np.isfinite(runs["loss"]) & (runs["lr"] > 0)].copy()
    sized = "batch_tokens" in table and table["batch_tokens"].notna().all() and len(table["batch_tokens"].unique()) > 1
    keys = ["depth", "width"] + (["ffn_dim"] if "ffn_dim" in table else [])
    if "tokens" in table and table["tokens"].notna().all():
        ordered = np.sort(table["tokens"].unique())
        group = np.concatenate([[0], np.cumsum(np.diff(np.log(ordered)) > 0.02)])
        table["budget"] = table["tokens"].map(dict(zip(ordered, group, strict=True)))
        keys.append("budget")
    rows = []
    for _, own in table.groupby(keys, sort=True):
        near = own[own["loss"] <= own["loss"].min() + window]
        z = np.log(near["lr"].to_numpy(np.float64))
        s = np.log(near["batch_tokens"].to_numpy(np.float64)) if sized else np.zeros(len(near))
        z0, s0 = z.mean(), s.mean()
        z, s = z - z0, s - s0
        X = np.column_stack(
            [np.ones_like(z), z, z * z, s, z * s, s * s] if np.ptp(s) > 0 else [np.ones_like(z), z, z * z]
        )
        if len(near) < 8 or np.linalg.matrix_rank(X) < X.shape[1]:
            continue
        b = np.linalg.lstsq(X, near["loss"].to_numpy(np.float64), rcond=None)[0]
        lr, batch = _minimum(b)
        rows.append({
            "depth": own["depth"].iloc[0], "width": own["width"].iloc[0],
            "tokens": float(own["tokens"].median()) if "tokens" in own else np.nan, "curvature": float(b[2]),
            "optimum_lr": float(np.exp(lr + z0)), "optimum_batch": float(np.exp(batch + s0)) if sized else np.nan,
            "runs": len(near),
        })  # fmt: skip
    if not rows:
        raise FitError(f"no setting has 8 runs within {window} nats of its best: there is no curvature to fit")
    return pd.DataFrame(rows)


def drift_cost(drift: float, span: float, *, curvature: float = STEP_LAW) -> float:
    """Nats that one learning rate costs at the far end of a ladder whose optimum drifts: curvature (drift ln span)^2.

    drift : of ln optimal lr per ln depth. span : largest over smallest depth. curvature : nats per (ln lr)^2; by default the
    median over the grids of Li et al. 2025 (arXiv:2503.04715).

    Raises
    ------
    ConfigError
        A span below 1 or a curvature that is not positive.

    Examples
    --------
    >>> round(drift_cost(-0.5, 70 / 16), 4)
    0.0084
    """
    if not (span >= 1 and curvature > 0):
        raise ConfigError(f"span={span} must be at least 1 and curvature={curvature} positive")
    return float(curvature * (drift * np.log(span)) ** 2)


def _minimum(b: np.ndarray) -> tuple[float, float]:
    if len(b) < _TERMS:
        return (float(-b[1] / (2 * b[2])), 0.0) if b[2] > 0 else (np.nan, np.nan)
    H = np.array([[2 * b[2], b[4]], [b[4], 2 * b[5]]])
    if (np.linalg.eigvalsh(H) <= 0).any():
        return np.nan, np.nan
    at = np.linalg.solve(H, -np.array([b[1], b[3]]))
    return float(at[0]), float(at[1])

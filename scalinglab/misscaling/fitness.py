"""Whether the curves fit: seeds that scatter more far from the best, minima below a known floor, verdicts under other curves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from scalinglab.misscaling.contrasts import Roles
from scalinglab.misscaling.curves import Curves
from scalinglab.misscaling.engine import Analysis, Method, analyse
from scalinglab.misscaling.identical import repeated
from scalinglab.misscaling.intake import Grids
from scalinglab.misscaling.rules import Margins, overall

_ALPHA = 0.01
_INNER = 1 / 3  # of the window: what counts as near the best
_DRAWS = 199


def cautions(grids: Grids, curves: Curves, window: float) -> list[str]:
    """What a reader must know about the fits."""
    return [*_scatter(grids, curves, window), *_floor(grids, curves)]


def other_curves(
    grids: Grids, roles: Roles, method: Method, margins: Margins, rng: np.random.Generator
) -> pd.DataFrame:
    """The analysis under other curves and windows.

    Returns
    -------
    DataFrame
        model, window, envelopes (shapes with an optimum inside their grid), U, V, M and the naive drift (NaN where there is
        none), verdict, verdict:ARCHITECTURE.
    """
    rows = []
    for model, window in (("quadratic", 1.0), ("cubic", 1.0), ("shared", 1.0), ("shared", 0.5), ("shared", 1.5)):
        other = replace(method, model=model, window=window * method.window, draws=min(method.draws, _DRAWS))  # type: ignore[arg-type]
        if (other.model, other.window) == (method.model, method.window):
            continue
        made = analyse(grids.cells, grids.z, grids.loss, roles, method=other, margins=margins, rng=rng)
        verdicts = {a: str(v) for a, v in made.verdicts.items()}
        drift = made.drifts.get(roles.naive) if roles.naive else None
        rows.append({
            "model": other.model, "window": other.window, "envelopes": int(made.curves.usable.sum()), **_gains(made),
            "drift naive": float(drift.estimate) if drift is not None else np.nan, "verdict": overall(verdicts),
            **{f"verdict:{a}": v for a, v in verdicts.items() if a},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _gains(made: Analysis) -> dict[str, float]:
    return {n: float(made.gains[n].estimate) if n in made.gains else np.nan for n in ("U", "V", "M")}


def _scatter(grids: Grids, curves: Curves, window: float) -> list[str]:
    """Curves weigh all runs alike; where seeds scatter more far from the best, far runs should not decide the fit."""
    from scipy.special import fdtrc

    use = curves.used & (curves.usable & ~repeated(grids.cells))[:, None] & (grids.count >= 2)
    mean = np.where(use, grids.mean, np.inf)
    near = mean <= mean.min(-1, keepdims=True) + _INNER * window
    finite = np.where(np.isfinite(grids.loss), grids.loss - np.where(use, grids.mean, 0.0)[..., None], 0.0)
    squares, df = (finite**2).sum(-1), np.maximum(grids.count - 1, 0)
    inner, outer = (use & near), (use & ~near)
    n, m = df[inner].sum(), df[outer].sum()
    if n < 2 or m < 2 or not squares[inner].sum() > 0:
        return []
    sd = [float(np.sqrt(squares[k].sum() / df[k].sum())) for k in (inner, outer)]
    if fdtrc(m, n, (sd[1] / sd[0]) ** 2) > _ALPHA:
        return []
    return [
        f"seeds scatter by {sd[0]:.2g} nats within {_INNER * window:.2g} of the best and by {sd[1]:.2g} in the rest of the window: "
        f"the noisiest runs shape the curves; narrow the window, e.g. to {window / 2:.2g}"
    ]


def _floor(grids: Grids, curves: Curves) -> list[str]:
    floor = grids.cells["floor"].to_numpy(np.float64) if "floor" in grids.cells else np.full(len(grids.cells), np.nan)
    below = curves.usable & (curves.minimum < floor)
    if not below.any():
        return []
    depths = ", ".join(sorted({f"{d:g}" for d in grids.cells["depth"][below]}, key=float))
    return [
        f"{int(below.sum())} fitted minima (depth {depths}) lie below the floor of the corpus, which no model can: losses flatten "
        "out there and no polynomial does; narrow the window, or take a harder task"
    ]

"""Tables of a mis-scaling report: envelopes, contrasts, the hierarchical model."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from scalinglab.hypotheses import tost
from scalinglab.misscaling.advice import advice
from scalinglab.misscaling.contrasts import Estimate, Roles
from scalinglab.misscaling.curves import STATUS, Array
from scalinglab.misscaling.engine import Analysis, Method
from scalinglab.misscaling.hierarchy import Hierarchy
from scalinglab.misscaling.intake import Grids
from scalinglab.misscaling.rules import Margins, holm
from scalinglab.profiles import fieller

_MEANING = {
    "U": "learning rate not set again at each depth", "V": "parametrization beyond the learning rate",
    "M": "mis-scaling in all, U + V (recipe by depth)",
}  # fmt: skip


def envelope_table(grids: Grids, made: Analysis, method: Method, *, level: float = 0.95) -> pd.DataFrame:
    """Optimum and best loss of each arm and shape.

    Columns: those of the cells; status; optimum_lr with low and high (percentiles of the bootstrap) and ln_optimum, ln_se;
    fieller_low, fieller_high (of the parabola at the optimum; infinite where the optimum is not located); minimum,
    minimum_se (with what seeds move the whole shape by), curvature, cubic; fixed (loss at the optimum of the smallest
    depth), rates, runs, diverged, advice (what to train where there is no optimum). What a refused shape has is NaN.
    """
    C, c = len(grids.cells), made.curves
    ok = c.usable
    draws = made.draws if made.draws is not None else np.zeros((0, 4 * C))
    ends = (0.5 - level / 2, 0.5 + level / 2)
    low, high = _percentiles(draws[:, :C], ends)
    se = np.sqrt(np.diag(made.cov))
    row = 0.0 if made.how.whole_seeds else made.noise.row**2 / len(grids.seeds)
    f_low, f_high = _fieller(grids, made, method, level)

    def shown(values: Array) -> Array:
        return np.where(ok, values, np.nan)

    kept = [
        k
        for k in ("architecture", "parametrization", "ladder", "depth", "width", "tokens", "batch_tokens")
        if k in grids.cells
    ]
    return grids.cells[kept].assign(
        status=[STATUS[k] for k in c.status], optimum_lr=shown(np.exp(c.optimum)), low=shown(np.exp(low)), high=shown(np.exp(high)),
        ln_optimum=shown(c.optimum), ln_se=shown(se[:C]), fieller_low=shown(np.exp(f_low)), fieller_high=shown(np.exp(f_high)),
        minimum=shown(c.minimum), minimum_se=shown(np.sqrt(se[C : 2 * C] ** 2 + row)), curvature=shown(c.curvature),
        cubic=shown(c.coefficients[..., 3]), fixed=made.point.fixed, rates=np.isfinite(grids.z).sum(-1),
        runs=grids.count.sum(-1).astype(int), diverged=np.isposinf(grids.loss).sum((-2, -1)),
        advice=[advice(grids, c, i, sides=method.sides, window=method.window) for i in range(C)],
    )  # fmt: skip


def decomposition_table(made: Analysis, roles: Roles, margins: Margins) -> pd.DataFrame:
    """One row per contrast and per arm's depth gain.

    Columns: name, meaning, estimate, se, df, low, high (95 %), p, p_adj (Holm over M and all W), p_equivalent, state.
    """
    names = list(made.gains)
    family = [n for n in names if n == "M" or n.startswith("W:")]
    adjusted = (
        dict(zip(family, holm(np.array([float(made.gains[n].p()) for n in family])), strict=True)) if family else {}
    )
    rows = []
    for name in names:
        kind, _, who = name.partition(":")
        states = made.states.get(who or next(iter(made.states), ""), {})
        meaning = _MEANING.get(kind) or {
            "W": f"architecture: {who} over the reference, each scaled and tuned", "gap": f"naive gap of {who} at fixed rates",
            "M_own": f"mis-scaling of {who} itself: as M, with {who} for the reference",
            "three_way": f"how far the gap of {who} hangs on the recipe: W less the naive gap, M_own less M",
            "W_same": f"as W, but {who} read at the scaled reference's optimal learning rates, not its own",
        }[kind]  # fmt: skip
        rows.append({"name": name, "meaning": meaning, **_row(made.gains[name], margins), "p_adj": adjusted.get(name, math.nan),
                     "state": str(states.get(kind, ""))})  # fmt: skip
    for (arm, which), e in made.depth_gains.items():
        rows.append({"name": f"gain {' / '.join(arm)}, {which}", "meaning": "depth gain", **_row(e, margins), "p_adj": math.nan,
                     "state": ""})  # fmt: skip
    columns = ["name", "meaning", "estimate", "se", "df", "low", "high", "p", "p_adj", "p_equivalent", "state"]
    return pd.DataFrame(rows, columns=columns)


def hierarchy_table(made: Hierarchy | None) -> pd.DataFrame:
    """Drift and depth gain of each arm from the hierarchical model, and its SDs as rows of their own."""
    if made is None:
        return pd.DataFrame()
    sds = {"sigma": made.sigma, "tau": made.tau, "drift_tau": made.drift_tau, "seed": made.seed, "kappa": made.kappa}
    return made.table.assign(**sds)


def _row(e: Estimate, margins: Margins) -> dict[str, float]:
    estimate, se, df = float(e.estimate), float(e.se), float(e.df)
    low, high = (float(v) for v in e.interval(1 - margins.alpha))
    known = math.isfinite(estimate) and math.isfinite(se) and se > 0
    equivalent = (
        tost(estimate, se, min(df, 1e6), margin=margins.gain, alpha=margins.alpha).p_value if known else math.nan
    )
    return {
        "estimate": estimate, "se": se, "df": df, "low": low, "high": high, "p": float(e.p()) if known else math.nan,
        "p_equivalent": equivalent,
    }  # fmt: skip


def _percentiles(draws: Array, ends: tuple[float, float]) -> tuple[Array, Array]:
    """Percentiles over draws of each column; NaN where fewer than nine in ten draws have a value."""
    known = np.isfinite(draws)
    out = np.full((2, draws.shape[1]), np.nan)
    enough = known.mean(0) >= 0.9 if len(draws) else np.zeros(draws.shape[1], bool)
    if enough.any():
        out[:, enough] = np.nanquantile(np.where(known, draws, np.nan)[:, enough], ends, axis=0)
    return out[0], out[1]


def _fieller(grids: Grids, made: Analysis, method: Method, level: float) -> tuple[Array, Array]:
    """Fieller limits of ln optimum: of -slope / (2 curvature) of the parabola about the optimum; infinite where unbounded."""
    C, c = len(grids.cells), made.curves
    low, high = np.full(C, -np.inf), np.full(C, np.inf)
    sigma, df = float(made.noise.sigma), float(np.max(made.noise.df))
    if not math.isfinite(sigma) or df < 1:
        return low, high
    p = 4 if method.model == "cubic" else 3
    for i in np.flatnonzero(c.usable):
        x = grids.z[i][c.used[i]] - c.optimum[i]
        Q = x[:, None] ** np.arange(p)
        cov = sigma**2 * np.linalg.pinv(Q.T @ (grids.count[i][c.used[i]][:, None] * Q))
        a = c.curvature[i]
        made_set = fieller(
            0.0, 2 * a, float(cov[1, 1]), float(4 * cov[2, 2]), float(-2 * cov[1, 2]), df=df, level=level
        )
        if made_set.kind == "interval":
            low[i], high[i] = c.optimum[i] + made_set.low, c.optimum[i] + made_set.high
    return low, high

"""Strategies of shape: Pareto frontiers over measured costs, and scaling paths compared at equal budget.

`recommend_shape` (module `recommending`) turns the same law into one shape for a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.estimands import depth_of
from scalinglab.depth_benefit.recommending import ShapeRecommendation, recommend_shape
from scalinglab.depth_benefit.valley import POINTS, kappa_of, loss_over_aspect, sampled_aspects, shaped_surface
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.optimum import Budget, Surface
from scalinglab.shapes import FlopConvention
from scalinglab.uncertainty import t_quantile

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]

__all__ = ["ShapeRecommendation", "compare_paths", "pareto_frontier", "recommend_shape", "scaling_paths"]

LEVINE = (5.039, 0.0555)  # ln width = a + b depth: Levine et al. 2020, arXiv:2006.12467 (quoted from memory)
DEEP_NARROW_DEPTH = 32  # Tay et al. 2021, arXiv:2109.10686: add depth first, up to 32 blocks or so
KAPLAN_WIDE = 4288 / 6  # Kaplan et al. 2020, section 3.1: 6 x 4288 is within 3 % of 48 x 1600


# ---- measured costs --------------------------------------------------------------------------------------------------------
def pareto_frontier(
    runs: pd.DataFrame, cost: str | Sequence[str] = "params", *, by: Sequence[str] = (), loss: str = "loss"
) -> pd.DataFrame:
    """Runs that no other run beats in loss at equal or lower cost.

    Parameters
    ----------
    runs : run table; each row a final loss. Average seeds first, or luck decides.
    cost : column or columns to be paid: params, flops_causal, seconds, memory_bytes, ...; with several a run is dominated only
        by one that is at least as good in all of them.
    by : columns whose values get their own frontier (architecture, say).

    Returns
    -------
    DataFrame
        The rows with `on_frontier`, `dominated_by` (run_id of the best run that dominates, or "") and `behind` = loss above
        the best at that cost (nats). With `loss_se`, `behind_se` is its standard error, seeds taken as independent; a run
        less than two of them behind isn't shown to be worse.

    Raises
    ------
    SchemaError
        A column is missing or not finite: a cost that wasn't measured isn't guessed.
    """
    costs = [cost] if isinstance(cost, str) else list(cost)
    for column in (*costs, loss, *by):
        if column not in runs:
            known = ", ".join(map(str, runs.columns[:30]))
            raise SchemaError(f"a frontier needs the column {column!r}, which isn't in the table; it has {known}")
    values = runs[[*costs, loss]].to_numpy(np.float64)
    if not np.isfinite(values).all():
        raise SchemaError(f"{', '.join(costs)} and {loss} must be finite in every row: leave out runs that diverged")
    out = runs.reset_index(drop=True).copy()
    names = out["run_id"].astype(str) if "run_id" in out else pd.Series([f"row{i}" for i in range(len(out))])
    se = out["loss_se"].to_numpy(np.float64) if "loss_se" in out else np.full(len(out), math.nan)
    groups = out.groupby(list(by), sort=False, dropna=False).ngroup().to_numpy() if by else np.zeros(len(out), np.intp)
    behind, behind_se = np.zeros(len(out)), np.zeros(len(out))
    best = np.arange(len(out))
    for g in np.unique(groups):
        rows = np.flatnonzero(groups == g)
        c, y = values[rows, :-1], values[rows, -1]
        payable = (c[None] <= c[:, None]).all(2)  # [i, j]: j costs no more than i
        allowed = np.where(payable, y[None], np.inf)
        j = allowed.argmin(1)
        better = allowed[np.arange(len(rows)), j] < y
        equal = (payable & (y[None] == y[:, None]) & (c[None] < c[:, None]).any(2)).any(1)
        best[rows] = np.where(better, rows[j], rows)
        behind[rows] = np.where(better, y - y[j], 0.0)
        behind_se[rows] = np.where(better, np.hypot(se[rows], se[rows][j]), 0.0)
        best[rows[equal & ~better]] = -1
    out["on_frontier"] = best == np.arange(len(out))
    out["dominated_by"] = [
        "" if k == i else "equal loss at lower cost" if k < 0 else names[k] for i, k in enumerate(best)
    ]
    out["behind"] = behind
    if "loss_se" in out:
        out["behind_se"] = behind_se
    out.attrs = dict(runs.attrs)
    return out


# ---- scaling paths -------------------------------------------------------------------------------------------------------
Path = Callable[[float], float]


def scaling_paths(
    *,
    base_depth: float = 12,
    base_width: float = 768,
    kappa: float = 12.0,
    deep_narrow_depth: float = DEEP_NARROW_DEPTH,
) -> dict[str, Path]:
    """Ways to grow a model, as depth of N parameters; the width follows from N = kappa depth width^2.

    depth_first : DeepNarrow (Tay et al. 2021): the base width until `deep_narrow_depth` blocks, then width.
    width_first : the base depth, all growth in width. constant_aspect : the base's width / depth.
    kaplan : the widest shape that Kaplan et al. call within 3 % of the best. levine : ln width = 5.039 + .0555 depth.

    Raises
    ------
    ConfigError
        A base that isn't positive.
    """
    if not (base_depth > 0 and base_width > 0 and kappa > 0 and deep_narrow_depth > 0):
        raise ConfigError("base_depth, base_width, kappa and deep_narrow_depth must be positive")
    aspect = base_width / base_depth

    def depth_first(params: float) -> float:
        return min(params / (kappa * base_width**2), max(deep_narrow_depth, base_depth))

    def levine(params: float) -> float:
        from scipy.optimize import brentq

        a, b = LEVINE
        return float(brentq(lambda x: math.log(kappa) + x + 2 * (a + b * math.exp(x)) - math.log(params), -60.0, 10.0))

    return {
        "depth_first": depth_first,
        "width_first": lambda params: float(base_depth),
        "constant_aspect": lambda params: depth_of(params, aspect, kappa),
        "kaplan": lambda params: depth_of(params, KAPLAN_WIDE, kappa),
        "levine": lambda params: math.exp(levine(params)),
    }


def compare_paths(
    fit: Fit,
    budgets: Sequence[float],
    *,
    by: Literal["params", "flops"] = "params",
    tokens: float | None = None,
    tokens_per_param: float = 20.0,
    paths: Mapping[str, Path] | None = None,
    reference: str = "constant_aspect",
    group: str | None = None,
    kappa: float | None = None,
    convention: FlopConvention = "6n",
    vocab: int | None = None,
    context: int | None = None,
    level: float = 0.95,
) -> pd.DataFrame:
    """Scaling paths at equal budget under a fitted law, with intervals.

    Parameters
    ----------
    fit : of a law that reads shape.
    budgets, by : parameters N, or training FLOPs of `convention`. At equal FLOPs each path takes the N that is best on it.
    tokens, tokens_per_param : D at equal N; the former holds for every budget.
    paths : name -> depth as a function of N; `scaling_paths()` by default.
    reference : path that `difference` is taken from.
    group : level of a crossed fit.

    Returns
    -------
    DataFrame
        path, budget, params, tokens, depth, width, aspect, loss; `difference` of loss to the reference path and `given_up`
        against the best aspect ratio at that N and D, each with low and high (jackknife, t); `beyond` where the aspect ratio
        lies outside the runs: there the law is extrapolated.

    Raises
    ------
    ConfigError
        An unknown reference or budget kind, a budget that isn't positive, or a law without shape.
    """
    kappa = kappa_of(fit) if kappa is None else kappa
    made = paths or scaling_paths(kappa=kappa)
    if reference not in made:
        raise ConfigError(f"reference={reference!r} is no path; known: {', '.join(made)}")
    if by not in ("params", "flops"):
        raise ConfigError(f"by={by!r} is not known: budgets are 'params' or 'flops'")
    if not len(budgets) or not all(math.isfinite(b) and b > 0 for b in budgets):
        raise ConfigError(f"budgets={list(budgets)} must be positive numbers")
    surface = shaped_surface(fit, group)
    cost = Budget.of(convention, kappa=kappa, vocab=vocab, context=context)
    low_r, high_r = sampled_aspects(fit)
    replicates = fit.jackknife.params
    rows = []
    for budget in budgets:
        curves: dict[str, tuple[Array, Array]] = {}
        lines: dict[str, dict[str, float | str | bool]] = {}
        for name, path in made.items():
            n, d = (
                (float(budget), tokens or tokens_per_param * float(budget))
                if by == "params"
                else _best_on_path(surface, fit, path, float(budget), cost, kappa)
            )
            depth = path(n)
            aspect = math.sqrt(n / (kappa * depth**3))
            grid = np.exp(np.linspace(math.log(low_r), math.log(high_r), POINTS))
            both = np.append(grid, aspect)
            at = loss_over_aspect(surface, fit.params.to_frame().T.astype(float), n, d, both, kappa)[0]
            moved = loss_over_aspect(surface, replicates, n, d, both, kappa)
            curves[name] = (
                np.append(at[-1], at[-1] - at[:-1].min()),
                np.stack([moved[:, -1], moved[:, -1] - moved[:, :-1].min(1)], 1),
            )
            lines[name] = {
                "path": name, "budget": float(budget), "params": n, "tokens": d, "depth": depth, "width": aspect * depth,
                "aspect": aspect, "loss": float(at[-1]), "beyond": not low_r * 0.999 <= aspect <= high_r * 1.001,
            }  # fmt: skip
        for name, line in lines.items():
            point, moved = curves[name]
            ref_point, ref_moved = curves[reference]
            line |= _interval(
                "difference", point[0] - ref_point[0], moved[:, 0] - ref_moved[:, 0], fit.jackknife.df, level
            )
            line |= _interval("given_up", point[1], moved[:, 1], fit.jackknife.df, level)
            rows.append(line)
    return pd.DataFrame(rows)


def _best_on_path(
    surface: Surface, fit: Fit, path: Path, flops: float, cost: Budget, kappa: float
) -> tuple[float, float]:
    """N and D on a path with the lowest loss at a FLOP budget."""
    from scipy.optimize import minimize_scalar

    params = fit.params.to_frame().T.astype(float)

    def place(ln_n: float) -> tuple[float, float, float]:
        n = math.exp(ln_n)
        depth = path(n)
        width = math.sqrt(n / (kappa * depth))
        per_token = float(np.asarray(cost.per_token(np.asarray(n), np.asarray(depth), np.asarray(width))))
        return n, flops / per_token, width / depth

    def loss(ln_n: float) -> float:
        n, d, aspect = place(ln_n)
        return float(loss_over_aspect(surface, params, n, d, np.array([aspect]), kappa)[0, 0])

    top = math.log(flops / 6e3)
    grid = np.linspace(math.log(1e4), top, 161)
    values = np.array([loss(float(v)) for v in grid])
    k = int(np.nanargmin(values))
    if k in (0, len(grid) - 1):
        raise ConfigError(f"a path has no best size at {flops:.3g} FLOPs under this law: compare at equal params")
    found = minimize_scalar(loss, bounds=(grid[k - 1], grid[k + 1]), method="bounded", options={"xatol": 1e-7})
    n, d, _ = place(float(found.x))
    return n, d


def _interval(name: str, value: float, moved: Array, df: float, level: float) -> dict[str, float]:
    g = len(moved)
    half = t_quantile(0.5 + level / 2, df) * math.sqrt((g - 1) / g * float(((moved - value) ** 2).sum()))
    return {name: float(value), f"{name}_low": float(value - half), f"{name}_high": float(value + half)}

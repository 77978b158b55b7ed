"""The isoFLOP approaches: compute-optimal sizes read off run tables without a law of the loss.

Approach 1 takes the lower envelope of the training curves, approach 2 the vertex of a parabola through the runs of one
budget; both then fit a power law in the FLOPs. They are shipped because the field reports them. The parabola has a
systematic error that no noise-free data removes (`parabola_bias`, `approach2_bias`): prefer approach 3, which is
`scalinglab.fitting.fit("chinchilla", runs)` followed by `scalinglab.frontier.optimal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalinglab.errors import FitError, SchemaError
from scalinglab.parabola import (
    Approach2Bias,
    approach2_bias,
    as_budgets,
    depth_parabola_bias,
    line,
    parabola_bias,
    require_positive,
    vertex,
    vertex_shift,
)
from scalinglab.uncertainty import t_quantile

__all__ = [
    "Approach2Bias",
    "IsoFlop",
    "approach1",
    "approach2",
    "approach2_bias",
    "depth_parabola_bias",
    "parabola_bias",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class IsoFlop:
    """Optimal sizes by budget and the power laws through them.

    Attributes
    ----------
    approach : int
        1 (envelope of training curves) or 2 (parabola per budget).
    budgets : DataFrame
        One row per budget: `flops params tokens loss n_runs valid reason`; approach 2 adds `curvature params_se
        grid_low grid_high predicted_bias params_corrected`. Rows that aren't `valid` are not used below.
    laws : DataFrame
        Index `params`, `tokens`: `coefficient exponent` of coefficient * flops**exponent, `exponent_se`, `low`, `high`.
    level : float
        Confidence level of `low` and `high` of the exponents.
    uncertainty : str
        "ols" (t with budgets - 2 degrees of freedom) or "bootstrap by run" (percentiles).
    draws : DataFrame
        Bootstrap draws of `params_log_coefficient` and `params_exponent`; empty for "ols".
    flops_per_param_token : float
        k of C = k N D.
    notes : tuple of str
        What a reader must know: exclusions, edges, biases.
    """

    approach: int
    budgets: pd.DataFrame
    laws: pd.DataFrame
    level: float
    uncertainty: str
    draws: pd.DataFrame
    flops_per_param_token: float
    notes: tuple[str, ...]

    def predict(self, flops: ArrayLike) -> pd.DataFrame:
        """Optimal params and tokens at budgets, from the power laws; columns `flops params tokens`."""
        budgets = as_budgets(flops)
        sizes = {
            name: self.laws.loc[name, "coefficient"] * budgets ** self.laws.loc[name, "exponent"]
            for name in self.laws.index
        }
        return pd.DataFrame({"flops": budgets, **sizes})

    def to_frame(self) -> pd.DataFrame:
        """The budgets, one row each (a copy)."""
        return self.budgets.copy()

    def summary(self) -> str:
        """The exponents in a few lines of text, and the notes."""
        lines = [
            f"isoFLOP approach {self.approach}: {int(self.budgets['valid'].sum())} of {len(self.budgets)} budgets used"
        ]
        for name, row in self.laws.iterrows():
            lines.append(
                f"  {name} = {row['coefficient']:.4g} * flops**{row['exponent']:.4f}"
                f"   {100 * self.level:.0f} % interval [{row['low']:.4f}, {row['high']:.4f}] ({self.uncertainty})"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def approach1(
    runs: pd.DataFrame,
    *,
    budgets: ArrayLike | None = None,
    loss: str = "loss",
    flops_per_param_token: float = 6.0,
    uncertainty: Literal["ols", "bootstrap"] = "bootstrap",
    draws: int = 999,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
) -> IsoFlop:
    """Approach 1: at each FLOP budget the lowest loss among all training curves, then power laws in the FLOPs.

    Each run's curve is interpolated linearly in (ln flops, loss) between its checkpoints and never extrapolated; a run
    with one row counts at that budget only. A budget whose best run is the smallest or the largest model on offer
    brackets no optimum: it is reported, not used.

    Parameters
    ----------
    runs : DataFrame
        `run_id params tokens <loss>` and `flops` (k N D where absent), one row per run x checkpoint.
    budgets : array_like, optional
        FLOPs. By default 30 log-spaced budgets over the range that at least three model sizes cover.
    uncertainty : {"bootstrap", "ols"}
        "bootstrap" resamples runs; "ols" treats the budgets as independent, which neighbouring points of the same
        curves are not, so that its intervals are too narrow: it is there to compare with other people's numbers.
    rng : int or Generator
        Seed of the bootstrap.

    Raises
    ------
    SchemaError
        A column is missing or a value isn't positive.
    FitError
        Fewer than three budgets have an interior optimum.

    Notes
    -----
    Assumes that each checkpoint is as good as a run that ends there. Under a cosine schedule it isn't: intermediate
    checkpoints are too high, which pulls N* down; Hoffmann et al. 2022 (arXiv 2203.15556, section 3.1) train one curve
    per schedule length.
    """
    k = require_positive(flops_per_param_token, "flops_per_param_token")
    table = _table(runs, loss, k)
    if "run_id" not in runs.columns:
        raise SchemaError("approach 1 needs a run_id column: without it checkpoints can't be joined to curves")
    curves = [g.sort_values("flops") for _, g in table.groupby("run_id", sort=True)]
    sizes = np.array([c["params"].iloc[0] for c in curves])
    at = _common_budgets(curves) if budgets is None else as_budgets(budgets)
    x = np.log(at)
    grid = np.stack([_interpolate(x, np.log(c["flops"].to_numpy()), c["loss"].to_numpy()) for c in curves])  # [runs, C]
    everyone = np.arange(len(curves))
    params, lowest, why = _envelope(grid, sizes, everyone)
    frame = pd.DataFrame(
        {
            "flops": at,
            "params": params,
            "tokens": at / k / params,
            "loss": lowest,
            "n_runs": np.isfinite(grid).sum(axis=0),
            "valid": why == 0,
            "reason": np.array(_NO_OPTIMUM)[why],
        }
    )
    notes = ["checkpoints before the end of a schedule overstate the loss; use runs of a constant or finished schedule"]
    rejected = int((~frame["valid"]).sum())
    if rejected:
        notes.append(
            f"{rejected} of {len(frame)} budgets have their best loss at the edge of the sizes on offer: not used"
        )
    coefficients = _power_law(frame)
    if uncertainty == "ols":
        notes.append("ols intervals ignore that neighbouring budgets share curves: too narrow")
        laws, sample = _laws_ols(frame, coefficients, k, level), _no_draws()
    else:
        generator = np.random.default_rng(rng)
        log_sizes, usable = np.empty((draws, len(at))), np.empty((draws, len(at)), dtype=bool)
        for i in range(draws):
            params, _, why = _envelope(grid, sizes, generator.choice(everyone, len(everyone)))
            log_sizes[i], usable[i] = np.log(params), why == 0
        laws, sample = _laws_bootstrap(_lines(x, log_sizes, usable), coefficients, k, level, notes)
    return IsoFlop(1, frame, laws, level, _label(uncertainty), sample, k, tuple(notes))


def approach2(
    runs: pd.DataFrame,
    *,
    budget: str | None = None,
    budget_tolerance: float = 0.1,
    loss: str = "loss",
    flops_per_param_token: float = 6.0,
    exponents: tuple[float, float] | None = None,
    uncertainty: Literal["ols", "bootstrap"] = "ols",
    draws: int = 999,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
) -> IsoFlop:
    """Approach 2: a parabola of the loss in ln N at each FLOP budget, its vertex, and power laws through the vertices.

    Parameters
    ----------
    runs : DataFrame
        `params tokens <loss>` and `flops` (k N D where absent), one row per run; `run_id` for the bootstrap (without it
        each row is a run).
    budget : str, optional
        Column that says which budget a run belongs to. By default rows whose FLOPs follow each other within
        `budget_tolerance` (relative) are one budget, and their geometric mean is its value.
    exponents : (alpha, beta), optional
        Exponents of the loss in N and D, from approach 3 say. With them each budget carries `predicted_bias`, the
        relative error of its vertex on its own grid without noise, and `params_corrected`, the vertex with the error
        taken out. Without them both are empty and a note says so.
    uncertainty : {"ols", "bootstrap"}
        "ols": t interval of the second-stage line, on budgets - 2 degrees of freedom. "bootstrap": runs are resampled
        within their budget, percentiles.

    Raises
    ------
    SchemaError
        A column is missing or a value isn't positive.
    FitError
        Fewer than three budgets have a minimum inside their grid (two leave no residual for an interval).

    Notes
    -----
    Assumes a loss that is quadratic in ln N. A sum of two powers isn't unless alpha = beta and the grid is centred; see
    `parabola_bias`. Sources: Hoffmann et al. 2022, arXiv 2203.15556, section 3.2; Czech et al. 2026, arXiv 2603.22339 (bias).
    """
    k = require_positive(flops_per_param_token, "flops_per_param_token")
    table = _table(runs, loss, k)
    labels = _group(table["flops"].to_numpy(), budget_tolerance) if budget is None else _labels(runs, budget)
    if exponents is not None:
        require_positive(exponents[0], "alpha"), require_positive(exponents[1], "beta")
    groups = [table[labels == value] for value in np.unique(labels)]
    frame = pd.DataFrame([_parabola_row(g, k, exponents) for g in groups])
    notes = []
    if rejected := int((~frame["valid"]).sum()):
        notes.append(f"{rejected} of {len(frame)} budgets have no usable vertex: not used (see `reason`)")
    if exponents is None:
        notes.append(
            "the vertex of a parabola is biased unless the exponents of N and D are equal and the grid is centred; "
            "pass exponents=(alpha, beta) to have the error of each budget predicted"
        )
    else:
        used = frame.loc[frame["valid"], "predicted_bias"]
        if len(used):
            notes.append(
                f"predicted bias of the vertex in N: {100 * used.min():+.2f} to {100 * used.max():+.2f} % by budget; "
                "the power laws use the uncorrected vertices"
            )
    coefficients = _power_law(frame)
    if uncertainty == "ols":
        laws, sample = _laws_ols(frame, coefficients, k, level), _no_draws()
    else:
        generator = np.random.default_rng(rng)
        vertices = [_resampled_vertices(g, draws, generator) for g in groups]
        log_sizes, usable = (np.stack(part, axis=1) for part in zip(*vertices, strict=True))  # [draws, budgets]
        found = _lines(np.log(frame["flops"].to_numpy()), log_sizes, usable)
        laws, sample = _laws_bootstrap(found, coefficients, k, level, notes)
    return IsoFlop(2, frame, laws, level, _label(uncertainty), sample, k, tuple(notes))


# --- parabolas ----------------------------------------------------------------------------------------------------


def _parabola_row(group: pd.DataFrame, k: float, exponents: tuple[float, float] | None) -> dict[str, object]:
    x, y = np.log(group["params"].to_numpy()), group["loss"].to_numpy()
    flops = float(np.exp(np.log(group["flops"].to_numpy()).mean()))
    at, low, error, curvature = vertex(x, y) if len(x) >= 3 else (np.nan,) * 4
    reason = _why_not(x, at, curvature)
    params = float(np.exp(at)) if not reason else np.nan
    bias, corrected = np.nan, np.nan
    if exponents is not None and not reason:
        truth = _undo_bias(x, at, *exponents)
        bias, corrected = float(np.expm1(at - truth)), float(np.exp(truth))
    return {
        "flops": flops,
        "params": params,
        "tokens": flops / k / params,
        "loss": low if not reason else np.nan,
        "n_runs": len(x),
        "valid": not reason,
        "reason": reason,
        "curvature": curvature,
        "params_se": params * error,
        "grid_low": float(np.exp(x.min())),
        "grid_high": float(np.exp(x.max())),
        "predicted_bias": bias,
        "params_corrected": corrected,
    }


def _why_not(x: Array, at: float, curvature: float) -> str:
    if len(np.unique(x)) < 3:
        return f"{len(np.unique(x))} distinct sizes: a parabola needs 3"
    if not curvature > 0:
        return "the parabola opens downwards: no minimum"
    if not x.min() <= at <= x.max():
        return "the vertex is outside the sampled sizes"
    return ""


def _undo_bias(x: Array, at: float, alpha: float, beta: float) -> float:
    """The ln X* for which noise-free losses at x would put the vertex where it was found; NaN where there is none."""
    from scipy.optimize import brentq

    def gap(truth: float) -> float:
        return truth + vertex_shift(x - truth, alpha, beta) - at

    width = float(np.ptp(x))
    try:
        return float(brentq(gap, at - width, at + width, xtol=1e-12))
    except ValueError:  # no change of sign: the grid is too lopsided for these exponents
        return np.nan


def _resampled_vertices(
    group: pd.DataFrame, draws: int, generator: np.random.Generator
) -> tuple[Array, NDArray[np.bool_]]:
    """ln N* of `draws` resamples of the runs of one budget, and whether each has a minimum inside its own sizes."""
    x, y = np.log(group["params"].to_numpy()), group["loss"].to_numpy()
    runs, member = np.unique(group["run"].to_numpy(), return_inverse=True)
    counts = generator.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size=draws)
    w = counts[:, member].astype(float)  # [draws, rows]
    centre, scale = x.mean(), max(float(np.ptp(x)) / 2, 1e-300)
    z = (x - centre) / scale
    design = np.stack([np.ones_like(z), z, z * z], axis=1)
    levels, size = np.unique(x, return_inverse=True)
    present = w @ np.eye(len(levels))[size] > 0  # [draws, sizes]
    enough = present.sum(axis=1) >= 3
    moments = np.einsum("rn,ni,nj->rij", w, design, design)
    moments[~enough] = np.eye(3)
    c = np.linalg.solve(moments, np.einsum("rn,ni,n->ri", w, design, y)[..., None])[..., 0]
    with np.errstate(all="ignore"):
        at = centre - scale * c[:, 1] / (2 * c[:, 2])
    low = levels[present.argmax(axis=1)]
    high = levels[len(levels) - 1 - present[:, ::-1].argmax(axis=1)]
    return at, enough & (c[:, 2] > 0) & (low <= at) & (at <= high)


# --- envelopes ----------------------------------------------------------------------------------------------------


def _common_budgets(curves: list[pd.DataFrame]) -> Array:
    low, high = (np.array([f(c["flops"]) for c in curves]) for f in (np.min, np.max))
    sizes = np.array([c["params"].iloc[0] for c in curves])
    ends = np.unique(np.concatenate([low, high]))
    enough = [c for c in ends if len(np.unique(sizes[(low <= c) & (c <= high)])) >= 3]
    if len(enough) < 2 or min(enough) == max(enough):
        raise FitError(
            "the training curves of three sizes never overlap in FLOPs: give budgets=, or log more checkpoints"
        )
    return np.geomspace(min(enough), max(enough), 30)


def _interpolate(x: Array, at: Array, y: Array) -> Array:
    near = 1e-9  # a budget that is a run's own end point up to rounding
    inside = (x >= at[0] - near) & (x <= at[-1] + near)
    return np.where(inside, np.interp(x, at, y), np.nan)


_NO_OPTIMUM = ("", "fewer than 3 sizes at this budget", "best at the smallest size", "best at the largest size")


def _envelope(grid: Array, sizes: Array, drawn: NDArray[np.intp]) -> tuple[Array, Array, NDArray[np.intp]]:
    """Size and loss of the best run per budget among those drawn, and why it is no optimum (index of _NO_OPTIMUM).

    `grid` is [runs, budgets] with NaN where a run has no point.
    """
    runs = np.unique(drawn)  # a run drawn twice changes no minimum
    filled = np.where(np.isfinite(grid[runs]), grid[runs], np.inf)
    there, size = np.isfinite(filled), sizes[runs]
    levels = np.unique(size)
    offered = np.stack([there[size == level].any(axis=0) for level in levels])  # [sizes, budgets]
    smallest = levels[offered.argmax(axis=0)]
    largest = levels[len(levels) - 1 - offered[::-1].argmax(axis=0)]
    params, lowest = size[filled.argmin(axis=0)], filled.min(axis=0)
    why = np.where(params == smallest, 2, np.where(params == largest, 3, 0))
    why = np.where(offered.sum(axis=0) < 3, 1, why)
    nothing = ~there.any(axis=0)
    return np.where(nothing, np.nan, params), np.where(nothing, np.nan, lowest), why


# --- the second stage ---------------------------------------------------------------------------------------------


def _power_law(frame: pd.DataFrame) -> tuple[float, float]:
    used = frame[frame["valid"]]
    if len(used) < 3 or used["flops"].nunique() < 3:
        reasons = sorted({str(r) for r in frame.get("reason", pd.Series(dtype=str)) if r})
        raise FitError(
            f"{len(used)} of {len(frame)} budgets have a usable optimum; a power law with an error needs 3"
            + (f" ({'; '.join(reasons)})" if reasons else "")
        )
    return line(np.log(used["flops"].to_numpy()), np.log(used["params"].to_numpy()))


def _lines(x: Array, y: Array, usable: NDArray[np.bool_]) -> Array:
    """Slope and value at 0 of the line of each row of y [draws, budgets]: [draws, 2], NaN below three usable points."""
    w = usable / np.maximum(usable.sum(axis=1, keepdims=True), 1)
    safe = np.where(usable, y, 0.0)
    x_mean, y_mean = (w * x).sum(axis=1), (w * safe).sum(axis=1)
    centred = np.where(usable, x - x_mean[:, None], 0.0)
    with np.errstate(all="ignore"):
        slope = (centred * safe).sum(axis=1) / (centred**2).sum(axis=1)
    enough = usable.sum(axis=1) >= 3
    return np.where(enough[:, None], np.stack([slope, y_mean - slope * x_mean], axis=1), np.nan)


def _laws_ols(frame: pd.DataFrame, fitted: tuple[float, float], k: float, level: float) -> pd.DataFrame:
    used = frame[frame["valid"]]
    x, y = np.log(used["flops"].to_numpy()), np.log(used["params"].to_numpy())
    slope, start = fitted
    df = len(x) - 2
    se = float(np.sqrt(np.sum((y - start - slope * x) ** 2) / df / np.sum((x - x.mean()) ** 2)))
    half = t_quantile(0.5 + level / 2, df) * se
    return _laws(slope, start, k, se, slope - half, slope + half)


def _laws_bootstrap(
    found: Array, fitted: tuple[float, float], k: float, level: float, notes: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    draws = pd.DataFrame(found, columns=["params_exponent", "params_log_coefficient"])
    good = draws["params_exponent"].dropna()
    if lost := len(draws) - len(good):
        notes.append(f"{lost} of {len(draws)} bootstrap draws have fewer than 3 usable budgets and are left out")
    if len(good) < max(20, len(draws) // 2):
        raise FitError(f"only {len(good)} of {len(draws)} bootstrap draws give a power law: too few runs per budget")
    low, high = np.quantile(good, [0.5 - level / 2, 0.5 + level / 2])
    return _laws(*fitted, k, float(good.std(ddof=1)), float(low), float(high)), draws


def _laws(slope: float, start: float, k: float, se: float, low: float, high: float) -> pd.DataFrame:
    # D* = C / (k N*): its line is fixed by that of N*
    return pd.DataFrame(
        {
            "coefficient": [np.exp(start), np.exp(-start) / k],
            "exponent": [slope, 1 - slope],
            "exponent_se": [se, se],
            "low": [low, 1 - high],
            "high": [high, 1 - low],
        },
        index=["params", "tokens"],
    )


def _no_draws() -> pd.DataFrame:
    return pd.DataFrame(columns=["params_exponent", "params_log_coefficient"], dtype=float)


def _label(uncertainty: str) -> str:
    return "bootstrap by run" if uncertainty == "bootstrap" else "ols"


# --- checks -------------------------------------------------------------------------------------------------------


def _table(runs: pd.DataFrame, loss: str, k: float) -> pd.DataFrame:
    """run, params, tokens, flops, loss as positive floats; rows without a loss (diverged) are refused by name."""
    missing = [c for c in ("params", "tokens", loss) if c not in runs.columns]
    if missing:
        raise SchemaError(
            f"isoFLOP analysis needs the column(s) {', '.join(missing)}; there are {', '.join(runs.columns)}"
        )
    table = pd.DataFrame({"params": runs["params"], "tokens": runs["tokens"], "loss": runs[loss]}).astype(float)
    table["flops"] = runs["flops"].astype(float) if "flops" in runs.columns else k * table["params"] * table["tokens"]
    run = runs["run_id"].astype(str) if "run_id" in runs.columns else pd.Series(map(str, range(len(runs))), runs.index)
    for column in table.columns:
        bad = ~(np.isfinite(table[column]) & (table[column] > 0))
        if bad.any():
            where = table.index[bad][0]
            raise SchemaError(
                f"column {loss if column == 'loss' else column}, row {where}: {table.loc[bad, column].iloc[0]} is not "
                f"positive and finite ({int(bad.sum())} such rows): select the rows to use first, for example by status"
            )
    if table.empty:
        raise SchemaError("isoFLOP analysis got an empty run table")
    return table.assign(run=run.to_numpy(), run_id=run.to_numpy()).reset_index(drop=True)


def _group(flops: Array, tolerance: float) -> NDArray[np.intp]:
    require_positive(tolerance, "budget_tolerance")
    order = np.argsort(flops, kind="stable")
    jumps = np.diff(np.log(flops[order])) > np.log1p(tolerance)
    labels = np.empty(len(flops), dtype=np.intp)
    labels[order] = np.concatenate([[0], np.cumsum(jumps)])
    return labels


def _labels(runs: pd.DataFrame, budget: str) -> NDArray[np.intp]:
    if budget not in runs.columns:
        raise SchemaError(f"there is no column {budget!r} for the budget; there are {', '.join(runs.columns)}")
    if runs[budget].isna().any():
        raise SchemaError(f"column {budget}, row {runs.index[runs[budget].isna()][0]}: the budget is empty")
    return np.unique(runs[budget].to_numpy(), return_inverse=True)[1]

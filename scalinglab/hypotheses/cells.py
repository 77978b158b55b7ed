"""Cell means: seeds of one shape averaged first, so that what a shape has of its own is in the error of a depth effect.

Seeds are the wrong error term for a slope across shapes: they do not average away what the line misses at a shape. With a
misfit of .003 nats and three seeds a run-level F test rejects a true null 27 % of the time, the cell-mean F 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide
from scalinglab.runs import final_rows
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]
Error = Literal["pooled", "welch", "separate"]
Shared = Literal["polynomial", "shapes"]

_CELL_ASSUMES = (
    "cell means are independent and normal around their lines: shape misfit and seed noise together are the error",
    "one final loss per run, equal data and evaluation in all runs",
)
_FEW_DF = 5


@dataclass(frozen=True)
class Cells:
    """Mean loss of the seeds of each cell (group x shape).

    levels : names of the groups. group [m] : number of the group of each cell. x [m] : depth coordinate.
    mean [m] : mean loss (nats). count [m] : seeds. within [m] : sum of squares of the seeds around their mean.
    """

    levels: tuple[str, ...]
    group: NDArray[np.intp]
    x: Array
    mean: Array
    count: NDArray[np.intp]
    within: Array

    @property
    def n_runs(self) -> int:
        return int(self.count.sum())

    @property
    def balanced(self) -> bool:
        """Whether every cell has as many seeds and every group the same x."""
        own = [np.sort(self.x[self.group == g]) for g in range(len(self.levels))]
        same = all(len(o) == len(own[0]) and np.allclose(o, own[0]) for o in own)
        return same and len(set(self.count.tolist())) == 1

    @property
    def pure_error(self) -> tuple[float, int]:
        """Variance between seeds of a cell and its degrees of freedom (NaN, 0 without replicates)."""
        df = int((self.count - 1).sum())
        return (float(self.within.sum() / df), df) if df else (math.nan, 0)

    def number(self, level: str) -> int:
        """Number of a group.

        Raises
        ------
        ConfigError
            There is no such group; lists those there are.
        """
        if level not in self.levels:
            raise ConfigError(f"there is no group {level!r}; the cells have {', '.join(self.levels)}")
        return self.levels.index(level)


def cell_means(
    runs: pd.DataFrame,
    *,
    x: str = "depth",
    by: str | None = "architecture",
    loss: str = "loss",
    log: bool = True,
    cell: Sequence[str] = (),
) -> Cells:
    """Average the final losses of the runs of each cell.

    Parameters
    ----------
    runs
        Run table. With a column `run_id` only the last row of each run enters: checkpoints are no replicates.
    x
        Column of the depth coordinate; its logarithm is taken unless `log=False`.
    by
        Column of the groups; None puts all runs into one.
    loss
        Column of the response (nats per token).
    cell
        Columns that tell cells apart besides `by` and `x` (e.g. "width").

    Raises
    ------
    SchemaError
        A column is missing, or a value in it is missing or not finite (logarithms need positive values).
    """
    columns = [x, loss, *([by] if by else []), *cell]
    missing = [c for c in columns if c not in runs]
    if missing:
        raise SchemaError(
            f"cell means need the column {missing[0]!r}; the table has {', '.join(map(str, runs.columns))}"
        )
    own = final_rows(runs) if "run_id" in runs else runs
    value = own[x].to_numpy(np.float64)
    y = own[loss].to_numpy(np.float64)
    for name, array, fine in ((x, value, value > 0 if log else np.isfinite(value)), (loss, y, np.isfinite(y))):
        bad = np.flatnonzero(~(np.isfinite(array) & fine))
        if len(bad):
            raise SchemaError(
                f"column {name!r}, row {int(bad[0]) + 1} is {array[bad[0]]:g}: cell means need finite values"
                f"{' above 0' if log and name == x else ''}; treat diverged runs as an outcome of their own"
            )
    label = own[by].astype(str).to_numpy() if by else np.full(len(own), "all")
    levels = tuple(dict.fromkeys(label.tolist()))
    key = pd.DataFrame({"g": [levels.index(v) for v in label], "x": np.log(value) if log else value})
    for name in cell:
        key[f"c {name}"] = own[name].to_numpy()
    code = key.groupby(list(key), sort=False, dropna=False).ngroup().to_numpy()
    count = np.bincount(code)
    mean = (np.bincount(code, y) / count).astype(np.float64)
    first = np.array([np.flatnonzero(code == c)[0] for c in range(len(count))])
    return Cells(
        levels, key["g"].to_numpy(np.intp)[first], key["x"].to_numpy(np.float64)[first], mean, count.astype(np.intp),
        np.bincount(code, (y - mean[code]) ** 2).astype(np.float64),
    )  # fmt: skip


def depth_slopes(cells: Cells, *, level: float = 0.95) -> pd.DataFrame:
    """Slope of the cell means on x in each group: OLS per group, cells - 2 degrees of freedom.

    Returns a frame by group: slope, se, df, t, p, low, high, cells. Slopes are of the loss: negative means that a larger x
    lowers it.

    Raises
    ------
    ConfigError
        A group with fewer than 3 cells or without variation of x.
    """
    from scipy.special import stdtr

    check_level(level)
    rows = {}
    for g, name in enumerate(cells.levels):
        slope, se, df = _line(cells, g)
        half = t_quantile(0.5 + level / 2, df) * se
        t = slope / se if se > 0 else math.copysign(math.inf, slope)
        rows[name] = {
            "slope": slope, "se": se, "df": df, "t": t, "p": float(2 * stdtr(df, -abs(t))), "low": slope - half,
            "high": slope + half, "cells": int((cells.group == g).sum()),
        }  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "group"
    return table


def slope_differences(
    cells: Cells, *, reference: str, error: Error = "pooled", level: float = 0.95
) -> tuple[pd.DataFrame, Array]:
    """Slope of each other group less that of the reference, and the correlation of these contrasts.

    Parameters
    ----------
    error
        "pooled": one residual variance, all residual degrees of freedom (more power). "welch": a variance per group,
        Welch-Satterthwaite degrees of freedom. "separate": a variance per group, degrees of freedom added up (only where
        equal variances are plausible; reproduces simple tables).

    Returns
    -------
    table, correlation
        Frame by group (difference, se, df, t, p, low, high; p not adjusted) and [k, k].
    """
    from scipy.special import stdtr

    check_level(level)
    ref = cells.number(reference)
    others = [g for g in range(len(cells.levels)) if g != ref]
    if not others:
        raise ConfigError(f"{reference!r} is the only group: a difference needs another")
    b, se, df = (
        np.array(v, dtype=np.float64) for v in zip(*(_line(cells, g) for g in range(len(cells.levels))), strict=True)
    )
    if error == "pooled":
        sxx = np.array([_sxx(cells, g) for g in range(len(b))])
        s2 = float((se**2 * sxx * df).sum() / df.sum())
        se, dfs = np.sqrt(s2 / sxx), np.full(len(b), df.sum())
    elif error == "welch":
        v = se**2
        dfs = (v + v[ref]) ** 2 / (v**2 / df + v[ref] ** 2 / df[ref])
    elif error == "separate":
        dfs = df + df[ref]
    else:
        raise ConfigError(f"error {error!r} is not known: use pooled, welch or separate")
    gap, wide = (b - b[ref])[others], np.sqrt(se**2 + se[ref] ** 2)[others]
    used = dfs[others]
    t = gap / wide
    half = np.array([t_quantile(0.5 + level / 2, v) for v in used]) * wide
    table = pd.DataFrame(
        {"difference": gap, "se": wide, "df": used, "t": t, "p": 2 * stdtr(used, -np.abs(t)), "low": gap - half,
         "high": gap + half},
        index=pd.Index([cells.levels[g] for g in others], name="group"),
    )  # fmt: skip
    R = se[ref] ** 2 / np.outer(wide, wide)
    np.fill_diagonal(R, 1.0)
    return table, R


def interaction_f(
    cells: Cells, *, degree: int = 2, shared: Shared = "polynomial", level: float = 0.95
) -> HypothesisTest:
    """F test on cell means that the depth profile is the same in all groups.

    The large model has an intercept and a polynomial in x per group. Under the null the polynomial is common
    (`shared="polynomial"`); with `shared="shapes"` both models also have one effect per x common to all groups, so that what
    all groups share at a shape (a parameter mismatch) is no error. That needs the same x in all groups.

    Raises
    ------
    ConfigError
        One group, too few cells, or `shared="shapes"` where groups differ in x.
    """
    from scipy.special import fdtrc

    check_level(level)
    small, large = interaction_designs(cells, degree=degree, shared=shared)
    m, q = len(cells.mean), large.shape[1] - small.shape[1]
    df2 = m - large.shape[1]
    rss0, rss1 = residual_ss(small, cells.mean), residual_ss(large, cells.mean)
    if not rss1 > 1e-24 * float(cells.mean @ cells.mean):
        raise ConfigError(
            "the profiles fit the cell means exactly: there is no error to test against; check the losses"
        )
    F = max(0.0, (rss0 - rss1) / q) / (rss1 / df2)
    p = float(fdtrc(q, df2, F))
    codes: tuple[str, ...] = () if df2 >= _FEW_DF else ("FEW_DF",)
    spread = levene(cells, degree=degree)
    if spread["p"] < 0.05:
        codes += ("HETEROSCEDASTIC",)
    return HypothesisTest(
        "group x depth (cell-mean F)", "the depth profiles of all groups are parallel", p,
        decide(p, 1 - level, found=f"depth profiles differ between groups (p = {p:.2g})",
               unresolved="the profiles may or may not be parallel; see the contrasts and their smallest visible effects"),
        1 - level, F, (float(q), float(df2)), level=level, unit="", method=f"F on {m} cell means, degree {degree}",
        n_runs=cells.n_runs, codes=codes,
        assumptions=(*_CELL_ASSUMES, "equal error variance in all groups", f"profiles are polynomials of degree {degree}"),
        diagnostics={"residual sd": math.sqrt(rss1 / df2), "levene p": spread["p"], "balanced": cells.balanced,
                     "pure error sd": math.sqrt(cells.pure_error[0])},
    )  # fmt: skip


def lack_of_fit(cells: Cells, *, degree: int = 1, level: float = 0.95) -> HypothesisTest:
    """F test that polynomials per group describe the cell means up to seed noise; it needs replicated seeds.

    Raises
    ------
    ConfigError
        No replicates, unequal seeds, or no cells beyond the parameters.
    """
    from scipy.special import fdtrc

    check_level(level)
    s2, df_pure = cells.pure_error
    if not df_pure or not s2 > 1e-24 * float(cells.mean @ cells.mean):
        raise ConfigError("lack of fit needs cells with at least two seeds that differ; these have one run each")
    X = np.hstack([_profile(cells, degree, g) for g in range(len(cells.levels))])
    root = np.sqrt(cells.count.astype(np.float64))
    df1 = len(cells.mean) - X.shape[1]
    if df1 < 1:
        raise ConfigError(f"{len(cells.mean)} cells and {X.shape[1]} parameters leave nothing to test lack of fit with")
    ss = residual_ss(X * root[:, None], cells.mean * root)
    F = ss / df1 / s2
    p = float(fdtrc(df1, df_pure, F))
    return HypothesisTest(
        "lack of fit", f"cell means follow polynomials of degree {degree} up to seed noise", p,
        decide(p, 1 - level, found="shapes deviate from the profile by more than seed noise: cells are the error stratum",
               unresolved="cells stay the error stratum; pooling with seed noise is a sensitivity analysis at most"),
        1 - level, F, (float(df1), float(df_pure)), level=level, method="F, lack of fit over pure error",
        n_runs=cells.n_runs, assumptions=("independent normal seeds of equal variance",),
        diagnostics={"seed sd": math.sqrt(s2), "tau": math.sqrt(max(0.0, (ss / df1 - s2) / float(np.mean(cells.count))))},
    )  # fmt: skip


def levene(cells: Cells, *, degree: int = 1) -> dict[str, float]:
    """Brown-Forsythe test of equal spread of cell residuals between groups: statistic and p (NaN with one group)."""
    from scipy import stats

    parts = []
    for g in range(len(cells.levels)):
        own = cells.group == g
        X = _profile(cells, degree, g)[own]
        if own.sum() > X.shape[1] + 1:
            H = X @ np.linalg.pinv(X)
            e = cells.mean[own] - H @ cells.mean[own]
            parts.append(e / np.sqrt(np.maximum(1 - np.diag(H), 1e-9)))  # leverage hides error
    if len(parts) < 2 or any(np.ptp(p) == 0 for p in parts):
        return {"statistic": math.nan, "p": math.nan}
    made = stats.levene(*parts)
    return {"statistic": float(made.statistic), "p": float(made.pvalue)}


def interaction_designs(cells: Cells, *, degree: int, shared: Shared) -> tuple[Array, Array]:
    """Design matrices [m, .] of the parallel and of the free profiles, each of full column rank.

    Raises
    ------
    ConfigError
        See `interaction_f`.
    """
    A = len(cells.levels)
    if A < 2:
        raise ConfigError("an interaction needs at least two groups; the cells have one")
    if degree < 1:
        raise ConfigError(f"degree is {degree}: a depth profile needs at least a slope")
    free = np.hstack([_profile(cells, degree, g) for g in range(A)])
    level = np.hstack([_profile(cells, 0, g) for g in range(A)])
    z = _scaled(cells.x)
    if shared == "shapes":
        shapes = np.unique(np.round(cells.x, 9))
        own = [set(np.round(cells.x[cells.group == g], 9)) for g in range(A)]
        if any(o != own[0] for o in own):
            raise ConfigError('shared="shapes" needs the same shapes in every group; use shared="polynomial"')
        common = (np.round(cells.x, 9)[:, None] == shapes).astype(np.float64)
    elif shared == "polynomial":
        common = np.stack([z**k for k in range(1, degree + 1)], 1)
    else:
        raise ConfigError(f"shared {shared!r} is not known: use polynomial or shapes")
    small, large = _full_rank(np.hstack([level, common])), _full_rank(np.hstack([level, common, free]))
    if len(cells.mean) - large.shape[1] < 1 or large.shape[1] == small.shape[1]:
        raise ConfigError(
            f"{len(cells.mean)} cells can't carry profiles of degree {degree} in {A} groups with an error left; "
            "train more depths or lower the degree"
        )
    return small, large


def residual_ss(X: Array, y: Array) -> float:
    """Residual sum of squares of y [m] on X [m, p]."""
    e = y - X @ np.linalg.lstsq(X, y, rcond=None)[0]
    return float(e @ e)


def _profile(cells: Cells, degree: int, g: int) -> Array:
    """Columns 1, x, ..., x^degree in the rows of group g, 0 elsewhere."""
    z = _scaled(cells.x)
    return (cells.group == g)[:, None] * np.stack([z**k for k in range(degree + 1)], 1)


def _scaled(x: Array) -> Array:
    return (x - x.mean()) / max(float(np.ptp(x)), 1e-300)


def _full_rank(X: Array) -> Array:
    """Orthonormal basis of the column space of X."""
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    return np.asarray(U[:, s > 1e-9 * s[0]])


def _sxx(cells: Cells, g: int) -> float:
    x = cells.x[cells.group == g]
    return float(((x - x.mean()) ** 2).sum())


def _line(cells: Cells, g: int) -> tuple[float, float, int]:
    """Slope, its standard error and residual degrees of freedom of one group."""
    own = cells.group == g
    x, y = cells.x[own], cells.mean[own]
    sxx = _sxx(cells, g)
    if len(x) < 3 or not sxx > 0:
        raise ConfigError(
            f"group {cells.levels[g]!r} has {len(x)} cells: a slope with an error needs at least 3 depths"
        )
    slope = float((x - x.mean()) @ y) / sxx
    e = y - y.mean() - slope * (x - x.mean())
    return slope, math.sqrt(float(e @ e) / (len(x) - 2) / sxx), len(x) - 2

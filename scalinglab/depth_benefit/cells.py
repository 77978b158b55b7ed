"""Depth effects straight from matched cells, free of any law: linear estimators of cell means, so every correction is exact.

Seeds of a shape are averaged first; a polynomial in depth per architecture (with an intercept per architecture and
matched block) is fitted to the cell means; what it leaves is the error. Every estimand is then a known weight on every
cell, est = w'loss, and anything linear (a mismatch in N, tokens given up for FLOPs, a lost run's missing loss) acts through
the same weights:

    B = w'(loss + eps_N ln N + eps_D ln D),      Var = w'Sw + (w'ln N)^2 Var eps_N + ... + 2 (w'ln N)(w'ln D) Cov.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.effects import satterthwaite
from scalinglab.depth_benefit.intake import CONVENTIONS
from scalinglab.depth_benefit.rates import Rates
from scalinglab.errors import ConfigError, FitError
from scalinglab.features import R0

Array = NDArray[np.float64]
ErrorModel = Literal["auto", "pooled", "own"]


@dataclass(frozen=True)
class CellModel:
    """Polynomials in depth fitted to cell means.

    table : one row per cell: architecture, block, depth, width, x, loss, runs, ln_params, ln_tokens, ln_flops_* (per token).
    architectures : those with an effect. degree : of the polynomials. coefficients : hat [a -> (k, m)] with b = hat @ loss.
    s2, df : residual variance and degrees of freedom per architecture (equal where pooled). error : "pooled" or "own".
    x_shallow, x_deep, contrast : the two shapes compared. smooths : maps from cell means to fitted values, per architecture.
    raw : cell means as they were; `corrected` says whether table's losses have the mismatch in N and D taken out.
    """

    table: pd.DataFrame
    architectures: tuple[str, ...]
    degree: int
    hats: Mapping[str, Array]
    s2: Mapping[str, float]
    df: Mapping[str, float]
    error: str
    x_shallow: float
    x_deep: float
    contrast: Mapping[str, float]
    residuals: Array
    smooths: Mapping[str, Array]
    raw: Array
    corrected: bool = False

    @property
    def loss(self) -> Array:
        """Mean loss of each cell [m]."""
        return self.table["loss"].to_numpy(np.float64)

    def coefficients(self, architecture: str) -> Array:
        """Polynomial coefficients of an architecture in x - x_mid, from the slope up."""
        return self.hats[architecture] @ self.loss

    @property
    def reference_x(self) -> float | None:
        """x of the reference aspect ratio where it lies between the two shapes, else None (the middle)."""
        x0 = -2.0 / 3.0 * math.log(R0)
        return x0 if self.x_shallow <= x0 <= self.x_deep else None

    def powers(self, kind: Literal["gap", "slope"], at: float | None = None) -> Array:
        """What multiplies the coefficients in B = loss(shallow) - loss(deep), or in -dloss/dx at x = `at` (default: middle)."""
        middle = 0.5 * (self.x_shallow + self.x_deep)
        if kind == "gap":
            a, b = self.x_shallow - middle, self.x_deep - middle
            return np.array([a**k - b**k for k in range(1, self.degree + 1)])
        z = 0.0 if at is None else at - middle
        return np.array([-k * z ** (k - 1) for k in range(1, self.degree + 1)])

    def weights(self, architecture: str, kind: Literal["gap", "slope"] = "gap", at: float | None = None) -> Array:
        """Weights [m] of the cells in B or in the slope; see `powers`."""
        return np.asarray(self.powers(kind, at) @ self.hats[architecture])

    def variance(self, w: Array) -> tuple[float, float]:
        """Variance of w'loss and its degrees of freedom."""
        if self.error == "pooled":
            a = self.architectures[0]
            return self.s2[a] * float(w @ w), self.df[a]
        arch = self.table["architecture"].to_numpy()
        parts = {a: self.s2[a] * float((w[arch == a] ** 2).sum()) for a in self.architectures}
        used = [a for a in parts if parts[a] > 0]
        if not used:
            return 0.0, min(self.df.values())
        return sum(parts.values()), satterthwaite([parts[a] for a in used], [self.df[a] for a in used])

    def covariance(self, W: Array) -> Array:
        """Covariance [k, k] of W @ loss for weights W [k, m]."""
        arch = self.table["architecture"].to_numpy()
        s2 = np.array([self.s2.get(a, math.nan) for a in arch])
        return np.asarray((W * s2) @ W.T)


def cell_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Cell means of a prepared run table (see `intake.take_in`): one row per architecture, block and shape.

    Groups of one architecture set that hold the same shapes (token budgets of one size class) are averaged into one block
    first, so that what a shape has of its own isn't counted once per budget.
    """
    flops = [c for c in CONVENTIONS if f"flops_{c}" in runs and runs[f"flops_{c}"].notna().all()]
    own = runs.assign(
        ln_params=np.log(runs["params"].astype(float)), ln_tokens=np.log(runs["tokens"].astype(float)),
        **{f"ln_flops_{c}": np.log(runs[f"flops_{c}"].astype(float) / runs["tokens"].astype(float)) for c in flops},
    )  # fmt: skip
    values = ["loss", "ln_params", "ln_tokens", *(f"ln_flops_{c}" for c in flops)]
    keys = ["architecture", "group", "depth", "width", "x"]
    cells = own.groupby(keys, sort=False)[values].mean()
    cells["runs"] = own.groupby(keys, sort=False).size()
    cells = cells.reset_index()
    blocks = _blocks(cells)
    cells["block"] = cells["group"].map(blocks)
    keys[1] = "block"
    merged = cells.groupby(keys, sort=False)[values].mean()
    merged["runs"] = cells.groupby(keys, sort=False)["runs"].sum()
    return merged.reset_index()


def fit_cells(
    cells: pd.DataFrame,
    *,
    shallow: float | None = None,
    deep: float | None = None,
    degree: int | None = None,
    error: ErrorModel = "auto",
) -> CellModel:
    """Fit a polynomial in depth per architecture to cell means.

    Parameters
    ----------
    cells : from `cell_table`.
    shallow, deep : depths to compare, present in the largest block; by default the shallowest and the deepest shape that all
        architectures have there.
    degree : 1 or 2; by default 2 where every architecture has at least 4 shapes and 3 degrees of freedom are left, else 1.
        Chosen by the design alone, never by the losses.
    error : "pooled" residual variance of all architectures, "own" of each; "auto" pools unless Brown-Forsythe rejects
        equal spread at .05 and each architecture has 3 degrees of freedom.

    Raises
    ------
    FitError
        Fewer than two shapes, or no degrees of freedom left.
    ConfigError
        A depth that isn't there, or shallow not shallower than deep.
    """
    shapes = cells.groupby(["architecture", "block"])["x"].nunique()
    enough = shapes[shapes >= 2].index
    keep = pd.MultiIndex.from_frame(cells[["architecture", "block"]]).isin(enough)
    table = cells[keep].reset_index(drop=True)
    if not len(table):
        raise FitError("no architecture has two shapes in one matched group: there is no depth contrast in these runs")
    architectures = tuple(dict.fromkeys(table["architecture"]))
    low, high, contrast = _arms(table, shallow, deep)
    middle = 0.5 * (low + high)
    chosen = _degree(table, architectures) if degree is None else degree
    if chosen not in (1, 2):
        raise ConfigError(f"degree={degree} is not known: a depth profile is a line (1) or a parabola (2)")
    y = table["loss"].to_numpy(np.float64)
    z = table["x"].to_numpy(np.float64) - middle
    hats: dict[str, Array] = {}
    rss: dict[str, float] = {}
    dfs: dict[str, float] = {}
    smooths: dict[str, Array] = {}
    residuals = np.zeros(len(table))
    for a in architectures:
        rows = np.flatnonzero((table["architecture"] == a).to_numpy())
        found = profile_hat(z[rows], pd.factorize(table["block"].iloc[rows])[0], chosen)
        if found is None:
            raise FitError(
                f"architecture {a!r} has {len(np.unique(z[rows]))} shapes: too few for a depth profile of degree {chosen}"
            )
        own, smooth = found
        hat = np.zeros((chosen, len(table)))
        hat[:, rows] = own
        residuals[rows] = y[rows] - smooth @ y[rows]
        smooths[a] = smooth
        hats[a], rss[a] = hat, float(residuals[rows] @ residuals[rows])
        dfs[a] = float(len(rows) - round(float(np.trace(smooth))))
    how = _error(table, residuals, dfs) if error == "auto" else error
    if how == "own" and min(dfs.values()) < 1:
        bad = min(dfs, key=lambda a: dfs[a])
        raise FitError(f"architecture {bad!r} has no degrees of freedom left for its own error; use error='pooled'")
    s2, df = _variances(rss, dfs, how)
    return CellModel(table, architectures, chosen, hats, s2, df, how, low, high, contrast, residuals, smooths, y)


def correct_cells(model: CellModel, rates: Rates) -> CellModel:
    """The model with the mismatch in N and D taken out of every cell mean, and the error that is left then.

    Each loss is moved to the mean ln N and ln D of its block. Estimates are the corrected ones; the error no longer contains
    what the mismatch did to single shapes. The uncertainty of the rates is not in it: `cell_effects` adds that.
    """
    table = model.table
    loss = model.raw.copy()
    for column, rate in (("ln_params", rates.params), ("ln_tokens", rates.tokens)):
        off = table[column] - table.groupby("block")[column].transform("mean")
        loss = loss + rate * off.to_numpy(np.float64)
    arch = table["architecture"].to_numpy()
    residuals = np.zeros(len(table))
    rss, dfs = {}, {}
    for a in model.architectures:
        rows = arch == a
        e = loss[rows] - model.smooths[a] @ loss[rows]
        residuals[rows] = e
        rss[a] = float(e @ e)
        dfs[a] = float(rows.sum() - round(float(np.trace(model.smooths[a]))))
    s2, df = _variances(rss, dfs, model.error)
    return replace(model, table=table.assign(loss=loss), residuals=residuals, s2=s2, df=df, corrected=True)


def _variances(
    rss: Mapping[str, float], dfs: Mapping[str, float], how: str
) -> tuple[dict[str, float], dict[str, float]]:
    if how == "own":
        return {a: rss[a] / dfs[a] for a in rss}, dict(dfs)
    total = sum(dfs.values())
    pooled = sum(rss.values()) / total if total > 0 else math.nan
    return dict.fromkeys(rss, pooled), dict.fromkeys(rss, total)


def profile_hat(z: Array, block: NDArray[np.intp], degree: int) -> tuple[Array, Array] | None:
    """Maps from cell means [m] to the polynomial's coefficients [degree, m] and to fitted values [m, m].

    The design has an intercept per block and powers 1..degree of z. None where it isn't of full rank.
    """
    names, block = np.unique(block, return_inverse=True)
    X = np.concatenate([np.eye(len(names))[block], np.stack([z**k for k in range(1, degree + 1)], 1)], axis=1)
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    if len(X) < X.shape[1] or s[-1] <= 1e-10 * s[0]:
        return None
    pinv = (Vt.T / s) @ U.T
    return pinv[len(names) :], X @ pinv


def _blocks(cells: pd.DataFrame) -> dict[str, str]:
    """Block of each group: groups of one set of (architecture, shape) are one block."""
    sets = {
        g: frozenset(zip(own["architecture"], own["depth"], own["width"], strict=True))
        for g, own in cells.groupby("group")
    }
    names: dict[frozenset[tuple[str, float, float]], str] = {}
    for g, s in sets.items():
        names[s] = f"{names[s]}+{g}" if s in names else str(g)
    return {str(g): names[s] for g, s in sets.items()}


def _arms(table: pd.DataFrame, shallow: float | None, deep: float | None) -> tuple[float, float, dict[str, float]]:
    """x and description of the two shapes compared."""
    counts = table.groupby("block").agg(shapes=("depth", "nunique"), n=("ln_params", "mean"))
    # the block that has the depths asked for, else the one with most shapes, else the largest models
    order = counts.sort_values(["shapes", "n"], ascending=False).index
    wanted = [v for v in (shallow, deep) if v is not None]
    fits = [b for b in order if all((table.loc[table["block"] == b, "depth"] == v).any() for v in wanted)]
    if not fits:
        depths = ", ".join(f"{v:g}" for v in sorted(table["depth"].unique()))
        raise ConfigError(f"no matched group has the depths {', '.join(f'{v:g}' for v in wanted)}; there are {depths}")
    own = table[table["block"] == fits[0]]
    everyone = own.groupby(["depth", "width"])["architecture"].nunique() == own["architecture"].nunique()
    common = own.set_index(["depth", "width"]).loc[everyone[everyone].index].reset_index()
    if common["depth"].nunique() < 2:
        common = own
    ends = common.sort_values("x")
    first = ends.iloc[0] if shallow is None else own[own["depth"] == shallow].iloc[0]
    last = ends.iloc[-1] if deep is None else own[own["depth"] == deep].iloc[0]
    if not first["x"] < last["x"]:
        raise ConfigError(
            f"shallow ({first['depth']:g} blocks) must be the shallower shape, deep ({last['depth']:g} blocks) the deeper one"
        )
    several = len(counts) > 1
    contrast = {
        "depth_shallow": float(first["depth"]), "depth_deep": float(last["depth"]),
        "aspect_shallow": float(first["width"] / first["depth"]), "aspect_deep": float(last["width"] / last["depth"]),
        # an effect pooled over blocks is their average, so it stands for the middle of all of them
        "params": float(np.exp(table["ln_params"].mean())), "tokens": float(np.exp(table["ln_tokens"].mean())),
    }  # fmt: skip
    if several:  # of the shapes with these aspect ratios at that N
        for arm, row in (("shallow", first), ("deep", last)):
            kappa = math.exp(row["ln_params"]) / (float(row["depth"]) * float(row["width"]) ** 2)
            contrast[f"depth_{arm}"] = float(np.cbrt(contrast["params"] / (kappa * contrast[f"aspect_{arm}"] ** 2)))
    return float(first["x"]), float(last["x"]), contrast


def _degree(table: pd.DataFrame, architectures: tuple[str, ...]) -> int:
    shapes = table.groupby("architecture")["x"].nunique()
    levels = len(table.drop_duplicates(["architecture", "block"]))
    left = len(table) - levels - 2 * len(architectures)
    return 2 if shapes.min() >= 4 and left >= 3 else 1


def _error(table: pd.DataFrame, residuals: Array, dfs: Mapping[str, float]) -> str:
    if len(dfs) < 2 or min(dfs.values()) < 3:
        return "pooled"
    arch = table["architecture"].to_numpy()
    parts = [residuals[arch == a] / math.sqrt(dfs[a] / (arch == a).sum()) for a in dfs]
    if any(np.ptp(p) == 0 for p in parts):
        return "pooled"
    return "own" if brown_forsythe(parts) < 0.05 else "pooled"


def brown_forsythe(parts: Sequence[Array]) -> float:
    """p of equal spread in k samples: F of the distances from each sample's median (Brown and Forsythe 1974)."""
    from scipy.special import fdtrc  # scipy.stats.levene is the same test, and loads for a second

    away = [np.abs(p - np.median(p)) for p in parts]
    k, n = len(away), sum(len(z) for z in away)
    centre = np.concatenate(away).mean()
    between = sum(len(z) * (z.mean() - centre) ** 2 for z in away) / (k - 1)
    within = sum(float(((z - z.mean()) ** 2).sum()) for z in away) / (n - k)
    return float(fdtrc(k - 1, n - k, between / within)) if within > 0 else 0.0

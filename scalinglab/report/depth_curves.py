"""Loss against shape of a depth report, per architecture: the fitted curve with its covariance, cell means, seeds.

What the figures of interaction and equivalence draw, as arrays; no plotting here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, FitError
from scalinglab.hypotheses.equivalence import sup_equivalence
from scalinglab.uncertainty import t_quantile

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.cells import CellModel
    from scalinglab.depth_benefit.rates import Rates
    from scalinglab.fitting import Fit
    from scalinglab.hypotheses.result import HypothesisTest

Array = NDArray[np.float64]
POINTS = 61
_X_TO_LN_ASPECT = -1.5  # x = ln depth at equal size is -2/3 ln(width / depth)


@dataclass(frozen=True)
class ShapeCurve:
    """Loss of one architecture over aspect ratio at equal size and data.

    aspect, depth, loss [g] : the fitted curve, empty where the design bears none; cov [g, g] of it, df its degrees of freedom.
    cells : aspect, depth, loss (moved to the curve's size and data), runs. seeds : aspect, depth, loss of single runs in cells
    with more than one.
    """

    architecture: str
    aspect: Array
    depth: Array
    loss: Array
    cov: Array
    df: float
    cells: pd.DataFrame
    seeds: pd.DataFrame

    def band(self, level: float = 0.95) -> tuple[Array, Array]:
        """Pointwise t limits of the curve."""
        half = t_quantile(0.5 + level / 2, min(self.df, 1e9)) * np.sqrt(np.maximum(np.diag(self.cov), 0.0))
        return self.loss - half, self.loss + half

    def above_best(self, level: float = 0.95) -> tuple[Array, Array, Array]:
        """Loss above the best shape of the curve [g], and one-sided lower and upper limits of that gap at each shape."""
        k = int(self.loss.argmin())
        gap = self.loss - self.loss[k]
        variance = np.diag(self.cov) + self.cov[k, k] - 2 * self.cov[k]
        half = t_quantile(level, min(self.df, 1e9)) * np.sqrt(np.maximum(variance, 0.0))
        return gap, gap - half, gap + half

    def range_test(self, margin: float, *, level: float = 0.95, rng: int = 0) -> HypothesisTest:
        """Simultaneous equivalence over all shapes of the curve: `hypotheses.sup_equivalence` at seven shapes.

        Codes say EQUIVALENT (no two shapes differ by the margin), REFUTED (some do) or OPEN.
        """
        some = slice(None, None, (POINTS - 1) // 6)
        loss, cov = self.loss[some], self.cov[some, some]
        values, Q = np.linalg.eigh(cov)
        root = Q * np.sqrt(np.maximum(values, 0.0))
        g = len(loss)
        # g + 1 points whose sample covariance is the identity: refits with exactly this covariance
        basis = np.linalg.qr(np.concatenate([np.ones((g + 1, 1)), np.eye(g + 1, g)], axis=1))[0][:, 1:] * math.sqrt(g)
        return sup_equivalence(
            loss, loss + basis @ root.T, margin=margin, kind="bootstrap", df=min(self.df, 1e9), alpha=1 - level, rng=rng
        )


def shape_curves(report: DepthReport) -> list[ShapeCurve]:
    """One curve per architecture of the report, in its order.

    Raises
    ------
    ConfigError
        The report has no depth contrast.
    """
    outcome = report.outcome
    if outcome is None:
        raise ConfigError("this depth report has no depth contrast: there is nothing to draw")
    if outcome.model is not None:
        return [_of_cells(report, outcome.model, a) for a in outcome.model.architectures]
    if outcome.fit is not None:
        levels = outcome.fit.law.levels or ("",)
        return [_of_law(report, outcome.fit, a) for a in levels]
    return [_of_runs(report, a) for a in report.verdicts if (outcome.intake.runs["architecture"] == a).any()]


# ---- cell means --------------------------------------------------------------------------------------------------------
def _of_cells(report: DepthReport, model: CellModel, architecture: str) -> ShapeCurve:
    """The polynomial of cell means, with blocks moved to the mean of their intercepts."""
    assert report.outcome is not None
    table = model.table
    rows = np.flatnonzero((table["architecture"] == architecture).to_numpy())
    middle = 0.5 * (model.x_shallow + model.x_deep)
    x = table["x"].to_numpy(np.float64)
    hat = model.hats[architecture]

    def powers(at: Array) -> Array:
        return np.stack([(at - middle) ** k for k in range(1, model.degree + 1)], 1)

    blocks = table["block"].iloc[rows].to_numpy()
    level = np.zeros((len(rows), len(table)))  # weights of the intercept of each cell's own block
    for b in dict.fromkeys(blocks):
        own = rows[blocks == b]
        w = np.zeros(len(table))
        w[own] = 1 / len(own)
        level[blocks == b] = w - powers(x[own]).mean(0) @ hat
    names = list(dict.fromkeys(blocks))
    mean = np.mean([level[int(np.flatnonzero(blocks == b)[0])] for b in names], axis=0)
    grid = np.linspace(x[rows].min(), x[rows].max(), POINTS)
    W = mean + powers(grid) @ hat
    cov = model.covariance(W)
    if model.corrected and report.outcome.rates is not None:
        cov = cov + _of_rates(model, W, report.outcome.rates)
    _, df = model.variance(W[0])
    shift = mean @ model.loss - level @ model.loss
    cells = pd.DataFrame({
        "aspect": np.exp(_X_TO_LN_ASPECT * x[rows]), "depth": table["depth"].to_numpy(np.float64)[rows],
        "loss": model.loss[rows] + shift, "runs": table["runs"].to_numpy()[rows], "block": blocks,
    })  # fmt: skip
    order = np.argsort(x[rows], kind="stable")
    ln_depth = np.interp(grid, x[rows][order], np.log(cells["depth"].to_numpy()[order]))
    seeds = _seeds(report.outcome.intake.runs, architecture, cells)
    return ShapeCurve(
        architecture, np.exp(_X_TO_LN_ASPECT * grid), np.exp(ln_depth), W @ model.loss, cov, df, cells, seeds
    )


def _of_rates(model: CellModel, W: Array, rates: Rates) -> Array:
    """Covariance that uncertain exchange rates add to corrected losses."""
    table = model.table
    off = np.stack([table[c] - table.groupby("block")[c].transform("mean") for c in ("ln_params", "ln_tokens")], axis=1)
    G = W @ off
    return np.asarray(G @ rates.cov[:2, :2] @ G.T)


def _seeds(runs: pd.DataFrame, architecture: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Single runs around their cell, where a cell has more than one."""
    own = runs[runs["architecture"] == architecture]
    keys = ["group", "depth", "width"]
    off = own["loss"] - own.groupby(keys)["loss"].transform("mean")
    several = own.groupby(keys)["loss"].transform("size") > 1
    rows = []
    for (group, depth, width), away in off[several].groupby([own["group"], own["depth"], own["width"]]):
        here = cells[(cells["depth"] == depth) & np.isclose(cells["aspect"], width / depth, rtol=1e-6)]
        if "block" in here and len(here) > 1:
            here = here[[group == b or str(group) in str(b).split("+") for b in here["block"]]]
        if len(here) == 1:
            cell = here.iloc[0]
            rows += [(cell["aspect"], cell["depth"], cell["loss"] + v) for v in away]
    return pd.DataFrame(rows, columns=["aspect", "depth", "loss"])


# ---- a law, or runs alone ----------------------------------------------------------------------------------------------
def _of_law(report: DepthReport, fit: Fit, level: str) -> ShapeCurve:
    """The law at the size and data of the contrast; points are means of runs, moved there along the law."""
    from scalinglab.report.figures import grids

    assert report.outcome is not None
    place = next(iter(report.outcome.effects)).contrast
    at = {"params": place["params"], "tokens": place["tokens"]}
    seen = grids.aspects(fit)
    if seen is None:
        raise ConfigError(f"law {fit.law.key!r} was fitted without depth and width: there is no shape to draw")
    group = level or None
    mask = np.ones(len(fit.runs), bool) if not level else (fit.runs[str(fit.law.by)].astype(str) == level).to_numpy()
    aspect = np.geomspace(seen[mask].max(), seen[mask].min(), POINTS)
    rows = grids.rows_at(fit, {**at, "aspect": aspect}, group=group)
    loss = fit.predict(rows)
    try:
        made = fit.jackknife.params
        d = fit.predict(rows, made) - loss
        cov = (len(d) - 1) / len(d) * d.T @ d
    except FitError:
        cov = np.full((POINTS, POINTS), math.nan)
    means = grids.run_means(fit, fit.residuals)
    means = means[mask[means["first"].to_numpy()]]
    r = seen[means["first"].to_numpy()]
    moved = grids.rows_at(fit, {**at, "aspect": r}, group=group)
    cells = pd.DataFrame({
        "aspect": r, "depth": moved["depth"], "loss": fit.predict(moved) * np.exp(means["value"].to_numpy()), "runs": 1,
    })  # fmt: skip
    name = level or next(iter(report.verdicts))
    return ShapeCurve(
        name, aspect, rows["depth"].to_numpy(np.float64), loss, cov, float(fit.n_runs - 1), cells, _no_seeds()
    )


def _of_runs(report: DepthReport, architecture: str) -> ShapeCurve:
    """Cell means and seeds without a curve: a design of two shapes bears none."""
    assert report.outcome is not None
    runs = report.outcome.intake.runs
    own = runs[runs["architecture"] == architecture]
    made = own.groupby(["group", "depth", "width"])["loss"].agg(["mean", "size"]).reset_index()
    cells = pd.DataFrame({
        "aspect": made["width"] / made["depth"], "depth": made["depth"].astype(float), "loss": made["mean"],
        "runs": made["size"], "block": made["group"],
    })  # fmt: skip
    nothing = np.empty(0)
    return ShapeCurve(
        architecture, nothing, nothing, nothing, np.empty((0, 0)), math.nan, cells, _seeds(runs, architecture, cells)
    )


def _no_seeds() -> pd.DataFrame:
    return pd.DataFrame({"aspect": [], "depth": [], "loss": []})

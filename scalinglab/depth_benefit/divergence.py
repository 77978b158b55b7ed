"""Runs that diverged are outcomes, not gaps: how often, and what they may do to the answer.

Three estimands (Frangakis & Rubin's principal strata, Lachin's worst rank): the loss had the run not diverged, which no
data can give; the composite in which divergence is the worst outcome; and the effect among runs that live in both arms.
Printed together: the complete case, the worst-rank permutation, the probability of divergence by depth, bounds (Manski's and
Lee's), and the tipping point. There is no Tobit: it is calibrated only if divergence is a threshold on the latent loss, and
rejects a true null in 37 % of studies when divergence depends on depth alone.

References: Lachin 1999 (worst-rank score analysis); Lee 2009 (trimming bounds); Manski 1990 (worst-case bounds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalinglab.depth_benefit.cells import CellModel
from scalinglab.depth_benefit.effects import Effect
from scalinglab.errors import ConfigError

Array = NDArray[np.float64]

_COVERAGE = 0.95


@dataclass(frozen=True)
class Bounds:
    """Range of B that the lost runs leave open (nats). Empty limits where nothing was lost or a bound doesn't apply.

    complete : B of the runs that lived. manski : lost losses anywhere between `floor` and `cap`. lee : trimming bounds under
    monotone selection (two depths). composite : lost losses at the cap. tipping : nats by which lost runs would have to be
    worse than predicted for B to change its sign (negative: better); infinite if no amount does.
    """

    architecture: str
    complete: float
    manski: tuple[float, float]
    lee: tuple[float, float]
    composite: float
    tipping: float
    floor: float
    cap: float
    lost: int

    @property
    def sign_is_safe(self) -> bool:
        """Whether every value between the bounds has the sign of the complete case."""
        if not self.lost:
            return True
        ends = [v for v in (*self.manski, self.composite) if math.isfinite(v)]
        return bool(ends) and all(v * self.complete > 0 for v in ends)


def divergence_table(runs: pd.DataFrame, lost: pd.DataFrame) -> pd.DataFrame:
    """Per architecture and depth: runs, diverged, rate and its Clopper-Pearson interval."""
    from scipy.special import betaincinv

    both = pd.concat([runs.assign(_lost=False), lost.assign(_lost=True)], ignore_index=True)
    rows = []
    for (a, depth), own in both.groupby(["architecture", "depth"], sort=True):
        n, k = len(own), int(own["_lost"].sum())
        tail = (1 - _COVERAGE) / 2
        rows.append({
            "architecture": a, "depth": depth, "n": n, "diverged": k, "rate": k / n,
            "low": float(betaincinv(k, n - k + 1, tail)) if k else 0.0,
            "high": float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=["architecture", "depth", "n", "diverged", "rate", "low", "high"])


def divergence_effect(runs: pd.DataFrame, lost: pd.DataFrame, architecture: str) -> Effect:
    """E9: rate of divergence at the deepest shape less that at the shallowest, with Newcombe's interval.

    The interval combines Wilson's limits of both rates (Newcombe 1998, method 10), which stay sensible at rates of 0.
    """
    table = divergence_table(runs, lost)
    own = table[table["architecture"] == architecture].sort_values("depth")
    if len(own) < 2:
        raise ConfigError(f"architecture {architecture!r} has {len(own)} depths: a difference of rates needs two")
    first, last = own.iloc[0], own.iloc[-1]
    p1, p2 = float(first["rate"]), float(last["rate"])
    (l1, u1), (l2, u2) = (_wilson(int(r["diverged"]), int(r["n"])) for r in (first, last))
    low = p2 - p1 - math.hypot(p2 - l2, u1 - p1)
    high = p2 - p1 + math.hypot(u2 - p2, p1 - l1)
    q = 1.959963984540054
    contrast = {"depth_shallow": float(first["depth"]), "depth_deep": float(last["depth"])}
    return Effect(
        "E9", architecture, p2 - p1, (high - low) / (2 * q), math.inf, "probability", "Newcombe interval of two rates",
        contrast=contrast, low=low, high=high, note="rate at the deepest less at the shallowest shape",
    )  # fmt: skip


def restricted_mean_tokens(runs: pd.DataFrame, lost: pd.DataFrame, *, planned: float | None = None) -> pd.DataFrame:
    """Mean tokens until divergence, cut at the plan, per architecture and depth: the companion of E9 that uses when.

    planned : tokens that every run was to see; by default the largest of its group. Lost runs without tokens count 0.
    """
    both = pd.concat([runs.assign(_lost=False), lost.assign(_lost=True)], ignore_index=True)
    plan = both.groupby("group")["tokens"].transform("max") if planned is None else planned
    seen = both["tokens"].where(both["_lost"], plan).fillna(0.0).clip(upper=plan)
    table = both.assign(share=seen / plan).groupby(["architecture", "depth"])["share"].agg(["mean", "sem", "size"])
    return table.rename(columns={"mean": "mean_share", "sem": "se", "size": "n"}).reset_index()


def worst_rank(
    x: ArrayLike,
    loss: ArrayLike,
    lost: ArrayLike,
    *,
    strata: ArrayLike | None = None,
    draws: int = 9999,
    rng: int | np.random.Generator = 0,
) -> tuple[float, float]:
    """Worst-rank permutation test of a trend of the outcome with depth; lost runs are tied at the worst rank.

    Parameters
    ----------
    x [n] : depth coordinate. loss [n] : final loss (ignored where lost). lost [n] : whether the run was lost.
    strata [n] : labels are permuted within these (size tiers); ranks are taken within them too.

    Returns
    -------
    (statistic, p)
        Sum over runs of centred rank times centred x (negative: deeper is better) and the two-sided p. With few runs p can't
        be small: at least 1 / (draws + 1).

    Raises
    ------
    ConfigError
        Arrays of different lengths, or x without variation.
    """
    from scipy.stats import rankdata

    depth, value, gone = np.asarray(x, np.float64), np.asarray(loss, np.float64), np.asarray(lost, bool)
    if not depth.shape == value.shape == gone.shape or depth.ndim != 1:
        raise ConfigError(
            f"x, loss and lost have shapes {depth.shape}, {value.shape}, {gone.shape}: give one value per run"
        )
    if not (np.isfinite(value) | gone).all():
        raise ConfigError("a loss is missing for a run that isn't lost: say that it diverged, or leave it out")
    stratum = np.zeros(len(depth), np.intp) if strata is None else np.unique(np.asarray(strata), return_inverse=True)[1]
    top = float(value[~gone].max()) + 1.0 if (~gone).any() else 1.0
    filled = np.where(gone, top, value)
    ranks, centred = np.empty(len(depth)), np.empty(len(depth))
    for s in np.unique(stratum):
        own = stratum == s
        r = rankdata(filled[own])
        ranks[own] = r - r.mean()
        centred[own] = depth[own] - depth[own].mean()
    if not (centred**2).sum() > 0:
        raise ConfigError("x does not vary within any stratum: there is no trend to test")
    generator = np.random.default_rng(rng)
    statistic = float(ranks @ centred)
    shuffled = np.tile(ranks, (draws, 1))
    for s in np.unique(stratum):
        own = np.flatnonzero(stratum == s)
        order = np.argsort(generator.random((draws, len(own))), axis=1)
        shuffled[:, own] = ranks[own][order]
    null = shuffled @ centred
    beyond = int((np.abs(null) >= abs(statistic) * (1 - 1e-12)).sum())
    return statistic, (1 + beyond) / (draws + 1)


def divergence_trend(
    x: ArrayLike, lost: ArrayLike, *, draws: int = 9999, rng: int | np.random.Generator = 0
) -> tuple[float, float]:
    """Permutation trend of divergence with depth: mean x of lost less that of living runs, two-sided p.

    Raises
    ------
    ConfigError
        Arrays of different lengths.
    """
    depth, gone = np.asarray(x, np.float64), np.asarray(lost, bool)
    if depth.shape != gone.shape:
        raise ConfigError(f"x and lost have shapes {depth.shape} and {gone.shape}: give one value per run")
    if gone.all() or not gone.any():
        return 0.0, 1.0
    generator = np.random.default_rng(rng)
    centred = depth - depth.mean()
    weight = gone / gone.sum() - ~gone / (~gone).sum()
    order = np.argsort(generator.random((draws, len(depth))), axis=1)
    null = weight[order] @ centred
    statistic = float(weight @ centred)
    beyond = int((np.abs(null) >= abs(statistic) * (1 - 1e-12)).sum())
    return statistic, (1 + beyond) / (draws + 1)


def bounds(
    model: CellModel,
    runs: pd.DataFrame,
    lost: pd.DataFrame,
    architecture: str,
    *,
    cap: float | None = None,
    floor: float | None = None,
) -> Bounds:
    """Bounds of B for one architecture of a cell model.

    Parameters
    ----------
    model : fitted to the runs that lived. runs, lost : prepared runs (see `intake.take_in`).
    cap : worst loss that a lost run can have had. By default the largest `last_finite_loss` of the lost runs where the
        table has it, else ln(vocabulary), the loss of knowing nothing, else three times the spread of the losses above
        the worst one.
    floor : best loss that it can have had; by default the smallest loss of the architecture.

    Raises
    ------
    ConfigError
        cap below the worst observed loss.
    """
    own = runs[runs["architecture"] == architecture]
    gone = lost[lost["architecture"] == architecture]
    w = model.weights(architecture)
    complete = float(w @ model.loss)
    if not len(gone):
        return Bounds(
            architecture,
            complete,
            (complete, complete),
            (complete, complete),
            complete,
            math.inf,
            math.nan,
            math.nan,
            0,
        )
    low = float(own["loss"].min()) if floor is None else floor
    high = _cap(own, gone) if cap is None else cap
    if high < float(own["loss"].max()):
        raise ConfigError(
            f"cap={high:g} is below the worst observed loss {own['loss'].max():g}: a lost run is no better"
        )
    share, direct = _lost_weights(model, own, gone, architecture, w)
    # the fitted profile stands for what a lost run is predicted to have had
    manski = _range(complete, share, model, direct, low, high)
    composite = complete + float(sum(s * (high - direct[c]) for c, s in share.items()))
    slope = float(sum(share.values()))
    tipping = -complete / slope if slope != 0 else math.inf
    return Bounds(architecture, complete, manski, _lee(own, gone), composite, tipping, low, high, len(gone))


def _range(
    complete: float,
    share: Mapping[str, float],
    model: CellModel,
    predicted: Mapping[str, float],
    low: float,
    high: float,
) -> tuple[float, float]:
    worst = best = complete
    for cell, s in share.items():
        a, b = s * (low - predicted[cell]), s * (high - predicted[cell])
        worst, best = worst + min(a, b), best + max(a, b)
    return worst, best


def _lost_weights(
    model: CellModel, own: pd.DataFrame, gone: pd.DataFrame, architecture: str, w: Array
) -> tuple[dict[str, float], dict[str, float]]:
    """Weight in B of each lost run's loss, and the mean loss of the living runs that it would join, by run.

    With k of n runs of a cell lost, each lost loss moves the cell mean by (loss - mean of the living) / n. A cell that
    lost all its runs has no weight in the fit; it gets that of a new cell at its depth, to first order.
    """
    table = model.table
    mine = (table["architecture"] == architecture).to_numpy()
    share: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for _, run in gone.iterrows():
        cell = np.flatnonzero(
            mine & (table["depth"] == run["depth"]).to_numpy() & (table["width"] == run["width"]).to_numpy()
        )
        name = str(run["run_id"])
        dead = int(((gone["depth"] == run["depth"]) & (gone["width"] == run["width"])).sum())
        if len(cell):
            c = int(cell[0])
            n = int(table["runs"].iloc[c]) + dead
            share[name] = float(w[c]) / n
            predicted[name] = float(table["loss"].iloc[c])
        else:  # nearest living shape stands in
            near = np.flatnonzero(mine)[int(np.abs(table.loc[mine, "x"].to_numpy() - run["x"]).argmin())]
            share[name] = float(w[near]) / (1 + dead)
            predicted[name] = float(table["loss"].iloc[near])
    return share, predicted


def _lee(own: pd.DataFrame, gone: pd.DataFrame) -> tuple[float, float]:
    """Trimming bounds of the gap between the shallowest and the deepest shape, under monotone selection.

    The arm that lost fewer runs is trimmed from either end to the survival rate of the other one.
    """
    depths = sorted({*own["depth"], *gone["depth"]})
    arms = []
    for depth in (depths[0], depths[-1]):
        loss = np.sort(own.loc[own["depth"] == depth, "loss"].to_numpy(np.float64))
        arms.append((loss, int((gone["depth"] == depth).sum())))
    if any(len(loss) == 0 for loss, _ in arms):
        return math.nan, math.nan
    (a, lost_a), (b, lost_b) = arms
    rate_a, rate_b = len(a) / (len(a) + lost_a), len(b) / (len(b) + lost_b)
    ends = []
    for side in ("low", "high"):
        left, right = a, b
        if rate_a > rate_b:
            left = _trimmed(a, rate_b / rate_a, side)
        elif rate_b > rate_a:
            right = _trimmed(b, rate_a / rate_b, side)
        ends.append(float(left.mean() - right.mean()))
    return min(ends), max(ends)


def _trimmed(values: Array, keep: float, side: str) -> Array:
    count = max(1, math.ceil(keep * len(values) - 1e-9))
    return values[:count] if side == "low" else values[len(values) - count :]


def _cap(own: pd.DataFrame, gone: pd.DataFrame) -> float:
    worst = float(own["loss"].max())
    if "last_finite_loss" in gone and gone["last_finite_loss"].notna().any():
        return max(worst, float(gone["last_finite_loss"].max()))
    if "vocab" in own and own["vocab"].notna().any():
        return max(worst, float(np.log(own["vocab"].astype(float).max())))
    return worst + 3.0 * float(np.ptp(own["loss"]))


def _wilson(k: int, n: int) -> tuple[float, float]:
    q = 1.959963984540054
    p = k / n
    middle = (p + q * q / (2 * n)) / (1 + q * q / n)
    half = q / (1 + q * q / n) * math.sqrt(p * (1 - p) / n + q * q / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)

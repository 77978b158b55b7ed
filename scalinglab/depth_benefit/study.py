"""Does the depth effect depend on the architecture? The joint gate on cell means and the simultaneous contrasts behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.cells import CellModel
from scalinglab.depth_benefit.effects import EffectSet
from scalinglab.errors import ConfigError, FitError
from scalinglab.hypotheses.contrasts import max_t_p, max_t_quantile

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Gate:
    """Joint test that all architectures have one depth profile.

    statistic, df, p : F on cell means (equal to `hypotheses.interaction_f` for one block). p_bootstrap : parametric bootstrap
    of the same F with a variance per architecture. contrasts : E7 per architecture with simultaneous limits and max-t p.
    equivalent : every pair's simultaneous 90 % interval lies inside the margin.
    """

    statistic: float
    df: tuple[float, float]
    p: float
    p_bootstrap: float
    contrasts: pd.DataFrame
    equivalent: bool
    reference: str
    second: str = "parametric bootstrap"  # what p_bootstrap is from


def joint_gate(
    model: CellModel,
    effects: EffectSet,
    *,
    reference: str,
    margin: float,
    alpha: float = 0.05,
    draws: int = 1999,
    rng: int | np.random.Generator = 0,
) -> Gate:
    """Gate, contrasts and pairwise equivalence from a cell model and its effects (`cell_effects` with that reference).

    Raises
    ------
    FitError
        Fewer than two architectures, or no degrees of freedom.
    ConfigError
        The effects hold no E7.
    """
    from scipy.special import fdtrc

    if len(model.architectures) < 2:
        raise FitError("a comparison of architectures needs at least two with a depth contrast")
    statistic, q, rest = _f(model)
    if not rest > 0:
        raise FitError("no degrees of freedom are left for the error: add shapes")
    p = float(fdtrc(q, rest, statistic))
    generator = np.random.default_rng(rng)
    p_boot = _bootstrap(model, statistic, draws, generator)
    seven = effects.subset("E7", "")
    if not len(seven):
        raise ConfigError("the effects have no E7: make them with cell_effects(model, reference=...)")
    return Gate(
        statistic, (float(q), float(rest)), p, p_boot, simultaneous(seven, level=1 - alpha, rng=generator),
        pairs_equivalent(effects.subset("E1"), margin=margin, rng=generator), reference,
    )  # fmt: skip


def simultaneous(effects: EffectSet, *, level: float = 0.95, rng: int | np.random.Generator = 0) -> pd.DataFrame:
    """Simultaneous (max-t) limits and p of several effects with a joint covariance: a frame by architecture."""
    usable = [i for i, e in enumerate(effects) if e.usable and e.df >= 1]
    rows = [e.row() for e in effects]
    out = pd.DataFrame(rows, index=pd.Index([e.architecture for e in effects], name="architecture"))
    out = out[["reference", "estimate", "se", "df", "p"]].copy()
    out["p_max_t"], out["low"], out["high"] = math.nan, math.nan, math.nan
    if not usable:
        return out
    V = effects.cov[np.ix_(usable, usable)]
    se = np.sqrt(np.diag(V))
    R = V / np.outer(se, se)
    np.fill_diagonal(R, 1.0)
    df = min(effects.effects[i].df for i in usable)
    t = np.array([effects.effects[i].estimate for i in usable]) / se
    names = [effects.effects[i].architecture for i in usable]
    half = max_t_quantile(R, df, level=level, rng=rng) * se
    out.loc[names, "p_max_t"] = max_t_p(t, R, df, rng=rng)
    out.loc[names, "low"] = t * se - half
    out.loc[names, "high"] = t * se + half
    return out


def pairs_equivalent(effects: EffectSet, *, margin: float, rng: int | np.random.Generator = 0) -> bool:
    """Whether all pairwise differences of the effects lie inside the margin by simultaneous 90 % intervals."""
    k = len(effects)
    if k < 2 or not all(e.usable and e.df >= 1 for e in effects):
        return False
    i, j = np.triu_indices(k, 1)
    T = np.zeros((len(i), k))
    T[np.arange(len(i)), i], T[np.arange(len(i)), j] = 1.0, -1.0
    gap = T @ np.array([e.estimate for e in effects])
    V = T @ effects.cov @ T.T
    se = np.sqrt(np.maximum(np.diag(V), 0.0))
    if not (se > 0).all() or (np.abs(gap) >= margin).any():
        return False
    R = V / np.outer(se, se)
    np.fill_diagonal(R, 1.0)
    half = max_t_quantile(R, min(e.df for e in effects), level=0.90, rng=rng) * se
    return bool((np.abs(gap) + half < margin).all())


def _f(model: CellModel) -> tuple[float, int, float]:
    """F of equal polynomial coefficients in all architectures, its degrees of freedom."""
    fit = _Designs.of(model)
    values = fit.f(model.loss[None])
    return float(values[0]), fit.q, fit.rest


def _bootstrap(model: CellModel, seen: float, draws: int, rng: np.random.Generator) -> float:
    """p of F when cell means are drawn around the common profile with a residual variance per architecture."""
    fit = _Designs.of(model)
    arch = model.table["architecture"].to_numpy()
    sd = np.zeros(len(arch))
    pooled = math.sqrt(float(model.residuals @ model.residuals) / fit.rest)
    for a in model.architectures:
        own = arch == a
        left = fit.left[a]
        # fewer than two degrees of freedom say nothing about a variance of its own
        sd[own] = math.sqrt(float(model.residuals[own] @ model.residuals[own]) / left) if left >= 2 else pooled
    common = model.loss - fit.small_residual @ model.loss
    null = fit.f(common + sd * rng.standard_normal((draws, len(arch))))
    return float((1 + (null >= seen * (1 - 1e-12)).sum()) / (1 + draws))


@dataclass(frozen=True)
class _Designs:
    """Residual makers of the common and of the free profiles."""

    small_residual: Array
    large_residual: Array
    q: int
    rest: float
    left: Mapping[str, float]

    @classmethod
    def of(cls, model: CellModel) -> _Designs:
        table = model.table
        level = pd.factorize(table["architecture"].astype(str) + "\0" + table["block"].astype(str))[0]
        arch = pd.factorize(table["architecture"])[0]
        z = table["x"].to_numpy(np.float64) - 0.5 * (model.x_shallow + model.x_deep)
        powers = np.stack([z**k for k in range(1, model.degree + 1)], 1)
        intercepts = np.eye(level.max() + 1)[level]
        free = np.concatenate([(arch == a)[:, None] * powers for a in range(arch.max() + 1)], axis=1)
        small, large = np.concatenate([intercepts, powers], 1), np.concatenate([intercepts, free], 1)
        q = np.linalg.matrix_rank(large) - np.linalg.matrix_rank(small)
        left = {}
        for k, a in enumerate(dict.fromkeys(table["architecture"])):
            own = arch == k
            left[str(a)] = float(own.sum() - len(np.unique(level[own])) - model.degree)
        rest = float(len(table) - np.linalg.matrix_rank(large))
        return cls(_residual(small), _residual(large), int(q), rest, left)

    def f(self, y: Array) -> Array:
        """F statistics of losses [R, m]."""
        e0, e1 = y @ self.small_residual, y @ self.large_residual
        rss0, rss1 = (e0 * e0).sum(1), (e1 * e1).sum(1)
        with np.errstate(all="ignore"):
            return np.asarray(np.maximum(rss0 - rss1, 0.0) / max(1, self.q) / (rss1 / self.rest))


def _residual(X: Array) -> Array:
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    U = U[:, s > 1e-10 * s[0]]
    return np.eye(len(X)) - U @ U.T

"""The estimands of the depth benefit from a fitted law, each with its interval and all with a joint covariance.

    E1   B_N = loss(shallow) - loss(deep) at equal N and D; positive when deeper is better (nats)
    E1s  -dloss / d ln depth at fixed N and D (nats per e-fold of depth)
    E2   B_C: the same at equal training FLOPs, the dearer shape getting fewer tokens; one per FLOP convention
    E4   the optimal aspect ratio r* and its drift with size
    E5   what B is worth: the factor of parameters, of compute on the frontier, of tokens (as logarithms)
    E6   difference of the size exponent between deep and shallow families
    E7   B of an architecture less B of the reference, and the differences of the shape coefficients
    E9   probability of divergence (see `divergence`)

E3 (equal wall-clock) is an engineering question and lives in `strategies`; E8 (recipe) is in `recipes`. The
covariance is the delete-one jackknife of the fit, so give a fit whose `run_id` is the unit that errors share: by
`by_shape` that is the shape, since more seeds don't average out what a law misses at a shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.cell_effects import cell_effects, corrected
from scalinglab.depth_benefit.cells import CellModel, cell_table, fit_cells
from scalinglab.depth_benefit.effects import Effect, EffectSet, Unit, satterthwaite
from scalinglab.errors import ConfigError, FitError
from scalinglab.features import R0
from scalinglab.fitting import fit as fit_law
from scalinglab.profiles import optimal_aspect
from scalinglab.shapes import FlopConvention, flops_per_token

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

__all__ = [
    "CellModel", "aspect_of", "by_shape", "cell_effects", "cell_table", "corrected", "depth_of", "drift",
    "exponent_difference", "fit_cells", "law_effects", "satterthwaite",
]  # fmt: skip

Array = NDArray[np.float64]
_STEP = 1e-3  # of ln depth, for slopes


def law_effects(
    fit: Fit,
    *,
    params: float,
    tokens: float,
    aspects: tuple[float, float],
    kappa: float = 12.0,
    reference: str | None = None,
    vocab: float | None = None,
    context: float | None = None,
) -> EffectSet:
    """E1, E1s, E2, E4, E5 and E7 of a fitted law at one size.

    Parameters
    ----------
    fit : of a law that reads shape; crossed with a column for several architectures.
    params, tokens : N and D at which the shapes are compared.
    aspects : width / depth of the shallow and of the deep shape.
    kappa : N / (depth width^2).
    reference : level that E7 compares with.
    vocab, context : for the "causal" and "full" FLOP conventions; without them E2 has "6n" alone.

    Raises
    ------
    ConfigError
        The law reads no shape, the aspects are not in order, or an unknown reference.
    """
    reads = fit.law.reads
    if not reads & {"u", "aspect", "depth", "width"}:
        raise ConfigError(f"law {fit.law.key!r} has no shape in it: fit 'shape' or 'width_depth'")
    shallow, deep = aspects
    if not (shallow > deep > 0 and params > 0 and tokens > 0 and kappa > 0):
        raise ConfigError(
            f"aspects={aspects}: the shallow shape has the larger width / depth; params, tokens and kappa are positive"
        )
    groups: list[str | None] = list(fit.law.levels) or [None]
    if reference is not None and reference not in groups:
        raise ConfigError(f"reference={reference!r} is not in the fit; it knows {', '.join(map(str, groups))}")
    by = _Loss(fit, kappa, vocab, context)
    at = R0 if deep <= R0 <= shallow else math.sqrt(shallow * deep)
    contrast = {
        "aspect_shallow": shallow, "aspect_deep": deep, "depth_shallow": depth_of(params, shallow, kappa),
        "depth_deep": depth_of(params, deep, kappa), "params": params, "tokens": tokens,
    }  # fmt: skip
    plan: list[tuple[str, str | None, str, Unit, str]] = []
    conventions: list[FlopConvention] = ["6n"] if vocab is None or context is None else ["6n", "causal", "full"]
    shape = fit.law.key == "shape"
    for g in groups:
        plan += [("E1", g, "", "nats", ""), ("E1s", g, "", "nats/lnL", f"at aspect {at:.4g}")]
        plan += [("E2", g, c, "nats", "") for c in conventions]
        plan += [("E5", g, name, "ln ratio", "") for name in ("params", "tokens", "compute")]
        if shape:
            plan += [("E4", g, "gamma1", "1", ""), ("E4", g, "gamma2", "1", "")]
    if reference is not None:
        for g in groups:
            if g != reference:
                plan.append(("E7", g, "", "nats", ""))
                plan += [("E7", g, name, "1", "") for name in ("gamma1", "gamma2")] if shape else []

    def values(frame: pd.DataFrame) -> Array:
        out: dict[tuple[str, str | None, str], Array] = {}
        for g in groups:
            one = by(frame, g, params, np.array([shallow, deep]), np.array([tokens, tokens]))
            gap = one[:, 0] - one[:, 1]
            out["E1", g, ""] = gap
            h = np.exp(-1.5 * np.array([_STEP, -_STEP]))  # ln aspect falls 3/2 as fast as ln depth rises
            near = by(frame, g, params, at * h, np.array([tokens, tokens]))
            out["E1s", g, ""] = -(near[:, 0] - near[:, 1]) / (2 * _STEP)
            for c in conventions:
                cost = by.flops(params, np.array([shallow, deep]), c)
                equal = tokens * cost.min() / cost
                dear = by(frame, g, params, np.array([shallow, deep]), equal)
                out["E2", g, c] = dear[:, 0] - dear[:, 1]
            out |= _equivalents(by, frame, g, params, tokens, (shallow, deep), one)
            if shape:
                out["E4", g, "gamma1"], out["E4", g, "gamma2"] = (_own(frame, n, g) for n in ("gamma1", "gamma2"))
        for g in groups:
            if reference is not None and g != reference:
                out["E7", g, ""] = out["E1", g, ""] - out["E1", reference, ""]
                for name in ("gamma1", "gamma2") if shape else ():
                    out["E7", g, name] = out["E4", g, name] - out["E4", reference, name]
        return np.stack([out[e, g, v] for e, g, v, _, _ in plan], axis=-1)

    made = fit.jackknife
    point = values(fit.params.to_frame().T.astype(float))[0]
    moved = values(made.params) - point
    cov = (len(moved) - 1) / len(moved) * moved.T @ moved
    effects = [
        Effect(
            e, str(g) if g is not None else "all", float(point[i]), math.sqrt(max(0.0, float(cov[i, i]))), made.df, unit,
            f"law {fit.law.key}, {made.method}", reference=reference if e == "E7" else None, variant=v, contrast=contrast,
            note=note,
        )
        for i, (e, g, v, unit, note) in enumerate(plan)
    ]  # fmt: skip
    full = EffectSet(tuple(effects), cov)
    return _with_optimum(fit, full, contrast) if shape else full


def exponent_difference(runs: pd.DataFrame, *, family: str | None = None, architecture: str | None = None) -> Effect:
    """E6: size exponent of the deep family less that of the shallow one, under Chinchilla with common E and data term.

    Parameters
    ----------
    runs : prepared run table (`params`, `tokens`, `depth`, `width`, `loss`).
    family : column whose values "deep" and "shallow" tell the families apart; by default runs are split at the median
        aspect ratio of their size class, the median itself left out.
    architecture : keep these runs only.

    Raises
    ------
    FitError
        Fewer than four sizes in a family.
    """
    own = runs if architecture is None else runs[runs["architecture"] == architecture]
    table = own.assign(_family=_families(own) if family is None else own[family].astype(str))
    table = table[table["_family"].isin(["deep", "shallow"])]
    for name in ("deep", "shallow"):
        mine = table[table["_family"] == name]
        sizes = len(_tiers(mine["params"].to_numpy(np.float64))) if len(mine) else 0
        if sizes < 4:
            raise FitError(f"the {name} family has {sizes} sizes: an exponent of its own (E6) needs at least 4")
    made = fit_law("chinchilla", by_shape(table), by="_family", share=("E", "B", "beta"))
    step = made.jackknife.interval(lambda p: p["alpha[deep]"].to_numpy() - p["alpha[shallow]"].to_numpy())
    return Effect(
        "E6", architecture or "all", float(step.estimate), float(step.se), step.df, "1",
        f"law chinchilla by family, {made.jackknife.method}", variant="alpha", note="deep minus shallow",
    )  # fmt: skip


def drift(runs: pd.DataFrame, *, architecture: str | None = None) -> Effect:
    """E4, drift: d ln r* / d ln N from the law `shape_drift`, with a jackknife over shapes.

    Raises
    ------
    FitError
        The runs can't carry the law (it needs two sizes with three shapes each).
    """
    own = runs if architecture is None else runs[runs["architecture"] == architecture]
    made = fit_law("shape_drift", by_shape(own))
    found = made.jackknife.interval(lambda p: made.derive(p)["q"].to_numpy())
    return Effect(
        "E4", architecture or "all", float(found.estimate), float(found.se), found.df, "1",
        f"law shape_drift, {made.jackknife.method}", variant="drift", note="d ln r* / d ln N",
    )  # fmt: skip


def by_shape(runs: pd.DataFrame) -> pd.DataFrame:
    """The table with one `run_id` per trained shape (architecture, depth, width): what leaving one out deletes.

    Seeds and budgets of a shape share what the law misses at it, so they are one cluster.
    """
    columns = [c for c in ("architecture", "depth", "width") if c in runs]
    name = runs[columns].astype(str).agg("/".join, axis=1)
    out = runs.assign(run_id=name)
    out.attrs = dict(runs.attrs)
    return out


def depth_of(params: float, aspect: float, kappa: float = 12.0) -> float:
    """Depth of the shape of N parameters with an aspect ratio: (N / (kappa r^2))^(1/3)."""
    return float(np.cbrt(params / (kappa * aspect * aspect)))


def aspect_of(params: float, depth: float, kappa: float = 12.0) -> float:
    """Aspect ratio of the shape of N parameters with a depth: sqrt(N / (kappa L^3))."""
    return float(np.sqrt(params / (kappa * depth**3)))


class _Loss:
    """A fitted law as a function of N, aspect ratio and tokens for each of R parameter sets."""

    def __init__(self, fit: Fit, kappa: float, vocab: float | None, context: float | None) -> None:
        self.fit, self.kappa, self.vocab, self.context = fit, kappa, vocab, context

    def __call__(self, frame: pd.DataFrame, group: str | None, params: float, aspect: Array, tokens: Array) -> Array:
        depth = np.cbrt(params / (self.kappa * aspect * aspect))
        rows = pd.DataFrame(
            {"params": params, "tokens": tokens, "aspect": aspect, "depth": depth, "width": aspect * depth}
        )
        if self.fit.law.levels:
            rows[str(self.fit.law.by)] = group
        return self.fit.predict(rows, frame)

    def flops(self, params: float, aspect: Array, convention: FlopConvention) -> Array:
        depth = np.cbrt(params / (self.kappa * aspect * aspect))
        made = flops_per_token(
            params, convention=convention, depth=depth, width=aspect * depth, vocab=self.vocab, context=self.context
        )
        return np.broadcast_to(np.asarray(made, dtype=np.float64), aspect.shape)


def _equivalents(
    by: _Loss,
    frame: pd.DataFrame,
    g: str | None,
    params: float,
    tokens: float,
    aspects: tuple[float, float],
    loss: Array,
) -> dict[tuple[str, str | None, str], Array]:
    """E5: ln of the factor of N (exact where h(u) is known), of D and of C that B is worth."""
    gap = loss[:, 0] - loss[:, 1]
    middle = np.array([math.sqrt(aspects[0] * aspects[1])])
    h = _STEP
    eps_n = -(by(frame, g, params * math.exp(h), middle, np.array([tokens]))[:, 0]
              - by(frame, g, params * math.exp(-h), middle, np.array([tokens]))[:, 0]) / (2 * h)  # fmt: skip
    two = by(frame, g, params, np.repeat(middle, 2), tokens * np.exp([h, -h]))
    eps_d = -(two[:, 0] - two[:, 1]) / (2 * h)
    out = {("E5", g, "params"): gap / eps_n, ("E5", g, "tokens"): gap / eps_d}
    alpha, beta, floor = (_maybe(frame, n, g) for n in ("alpha", "beta", "E"))
    if by.fit.law.key == "shape" and alpha is not None:
        g1, g2 = _own(frame, "gamma1", g), _own(frame, "gamma2", g)
        u = [math.log(r / R0) for r in aspects]
        out["E5", g, "params"] = (g1 * u[0] + g2 * u[0] ** 2 - g1 * u[1] - g2 * u[1] ** 2) / alpha
    if alpha is not None and beta is not None and floor is not None:
        gamma = alpha * beta / (alpha + beta)
        with np.errstate(all="ignore"):
            out["E5", g, "compute"] = np.log((loss[:, 0] - floor) / (loss[:, 1] - floor)) / gamma
    else:
        out["E5", g, "compute"] = 2 * gap / (eps_n + eps_d)
    return out


def _with_optimum(fit: Fit, made: EffectSet, contrast: dict[str, float]) -> EffectSet:
    """Append ln r* per group with its Fieller set; its covariance with the rest is not given."""
    rows = list(made.effects)
    groups: list[str | None] = list(fit.law.levels) or [None]
    for g in groups:
        found = optimal_aspect(fit, group=g)
        name = f"r_star[{g}]" if g is not None else "r_star"
        inside = found.kind == "interval"
        with np.errstate(all="ignore"):
            moved = np.log(fit.derive(fit.jackknife.params)[name].to_numpy())
            estimate = math.log(found.estimate) if 0 < found.estimate < math.inf else math.nan
            se = float(np.sqrt((len(moved) - 1) / len(moved) * ((moved - estimate) ** 2).sum()))
        low, high = (math.log(found.low), math.log(found.high)) if inside and found.low > 0 else (-math.inf, math.inf)
        rows.append(Effect(
            "E4", str(g) if g is not None else "all", estimate, se, fit.jackknife.df, "ln ratio",
            f"law {fit.law.key}, Fieller set, jackknife covariance", variant="r_star", contrast=contrast, low=low, high=high,
            note="" if inside else f"the Fieller set is {found.kind}: the optimum is not located",
        ))  # fmt: skip
    k = len(rows)
    cov = np.full((k, k), np.nan)
    cov[: len(made), : len(made)] = made.cov
    for i in range(len(made), k):
        cov[i, i] = rows[i].se ** 2
    return EffectSet(tuple(rows), cov)


def _own(frame: pd.DataFrame, name: str, group: str | None) -> Array:
    found = _maybe(frame, name, group)
    if found is None:
        raise ConfigError(f"the fit has no parameter {name!r}; it has {', '.join(map(str, frame.columns))}")
    return found


def _maybe(frame: pd.DataFrame, name: str, group: str | None) -> Array | None:
    for key in (name, f"{name}[{group}]"):
        if key in frame:
            return frame[key].to_numpy(np.float64)
    return None


def _tiers(params: Array) -> list[list[int]]:
    """Positions of runs by size class (gaps of more than 15 % in N)."""
    order = np.argsort(params, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(params[order])) > 0.15) + 1
    return [part.tolist() for part in np.split(order, cuts)]


def _families(runs: pd.DataFrame) -> Sequence[str]:
    aspect = (runs["width"] / runs["depth"]).to_numpy(np.float64)
    out = np.full(len(runs), "", dtype=object)
    for rows in _tiers(runs["params"].to_numpy(np.float64)):
        middle = float(np.median(np.unique(aspect[rows])))
        for i in rows:
            out[i] = "deep" if aspect[i] < middle * (1 - 1e-9) else "shallow" if aspect[i] > middle * (1 + 1e-9) else ""
    return list(out)

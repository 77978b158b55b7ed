"""What one study says about shape, in common units: the cost of a wrong aspect ratio r = d/L, and the best one.

    ln loss = ... + c1 u + c2 u^2,   u = ln(r / r0), at fixed N and D

penalty : 100 c2 (ln 4)^2, % of the loss lost four times away from the optimum. Only the curvature c2 is needed, not where
the optimum lies; where no shape is four times away, it is the parabola carried on. contrast : 100 [ln loss(76) - ln loss(40)],
% of the loss that d/L = 76 costs over 40 (the range that all studies share); positive when deeper is better there.
optimum : ln r*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.features import R0
from scalinglab.fitting import Fit
from scalinglab.profiles import FiellerSet, fieller, optimal_aspect
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]

AWAY = 4.0
WIDE, NARROW = 76.0, 40.0
QUANTITIES = ("penalty", "contrast", "optimum")
UNITS = {"penalty": "% of loss", "contrast": "% of loss", "optimum": "ln(d/L)"}
_SPREAD = math.log(AWAY) ** 2
_LOWEST, _HIGHEST = NARROW * (1 + 1e-9), WIDE * (1 - 1e-9)


@dataclass(frozen=True)
class Context:
    """What is the same for all effects of one set of runs.

    convention : which N is held fixed. rates : how learning rates were chosen. cooled : whether learning rates were decayed.
    """

    study: str
    architecture: str
    convention: str
    rates: str
    cooled: str
    source: str
    baseline: bool = True  # the pre-norm decoder that every study has; primary analyses take it


@dataclass(frozen=True)
class ShapeEffect:
    """One estimate. `enters` says whether it can be pooled; `note` why not, or what to know.

    estimate, se, df, low, high : with a 95 % interval, by the method in `interval`. loss : the loss it is relative to (nats per token).
    params, tokens : geometric means of the runs. narrowest, widest : aspect ratios run; shapes : how many.
    """

    study: str
    architecture: str
    quantity: str
    estimate: float
    se: float
    df: float
    low: float
    high: float
    unit: str
    loss: float
    convention: str
    rates: str
    cooled: str
    params: float
    tokens: float
    narrowest: float
    widest: float
    shapes: int
    baseline: bool
    enters: bool
    note: str
    source: str
    interval: str = ""


def of_law(made: Fit, about: Context) -> list[ShapeEffect]:
    """Effects of a fitted shape law, errors by leaving out one `run_id` (one shape) at a time.

    A law whose curvature the diagnostics call a guess (LOW_SHAPE_DIVERSITY) gives its contrast only.
    """
    runs = made.runs
    aspect = (runs["width"] / runs["depth"]).to_numpy(np.float64)
    n, d, at = _place(made)
    found = made.jackknife.interval(law_values(made))
    blocked = "LOW_SHAPE_DIVERSITY" in made.codes
    return _effects(
        about, found.estimate, found.se, found.df, optimal_aspect(made), aspect, n, d, float(made.predict(at)[2]),
        int(runs["run_id"].nunique()), blocked="shapes hardly vary at a given size" if blocked else "",
        warnings=tuple(made.codes), interval="jackknife over shapes",
    )  # fmt: skip


def law_values(made: Fit) -> Callable[[pd.DataFrame], Array]:
    """Penalty, contrast and optimum [R, 3] of a shape law as a function of its parameters."""
    n, _, at = _place(made)
    u, r0 = float(at["u"].iloc[2]), made.law.constants["r0"]

    def values(p: pd.DataFrame) -> Array:
        loss = made.predict(at, p)
        capacity = (p["A"] * n ** -p["alpha"] * np.exp(p["gamma1"] * u + p["gamma2"] * u * u)).to_numpy(np.float64)
        penalty = p["gamma2"].to_numpy(np.float64) * capacity / loss[:, 2] * _SPREAD
        with np.errstate(all="ignore"):
            best = math.log(r0) - (p["gamma1"] / (2 * p["gamma2"])).to_numpy(np.float64)
        return np.column_stack([100 * penalty, 100 * np.log(loss[:, 0] / loss[:, 1]), best])

    return values


def _place(made: Fit) -> tuple[float, float, pd.DataFrame]:
    """Geometric means of N and D over shapes, and rows at the two aspect ratios of the contrast and at the typical one."""
    runs = made.runs
    shape = runs["run_id"]

    def typical(v: pd.Series) -> float:
        return float(np.exp(np.log(v).groupby(shape).mean().mean()))

    n, d = typical(runs["params"]), typical(runs["tokens"])
    at = pd.DataFrame({"aspect": [WIDE, NARROW, typical(runs["width"] / runs["depth"])], "params": n, "tokens": d})
    at["depth"] = np.cbrt(n / 12 / at["aspect"] ** 2)
    at["width"], at["u"] = at["depth"] * at["aspect"], np.log(at["aspect"] / made.law.constants["r0"])
    return n, d, at


@dataclass(frozen=True)
class Parabola:
    """Least squares of ln loss on u, u^2 and other columns: coefficients (c1, c2), covariance [2, 2], error variance, df."""

    c: Array
    unit: Array  # covariance per unit of error variance
    variance: float
    df: float


def parabola(log_loss: Array, u: Array, others: Array) -> Parabola:
    """Fit of ln loss [n] on u, u^2 and others [n, p] (an intercept per group among them)."""
    X = np.column_stack([u, u * u, others])
    b, _, rank, _ = np.linalg.lstsq(X, log_loss, rcond=None)
    e, df = log_loss - X @ b, len(u) - int(rank)
    unit = np.linalg.pinv(X.T @ X)[:2, :2] if rank == X.shape[1] else np.full((2, 2), np.nan)
    return Parabola(
        np.asarray(b[:2], dtype=np.float64),
        np.asarray(unit, dtype=np.float64),
        float(e @ e) / df if df else math.nan,
        float(df),
    )


def of_parabola(
    made: Parabola, about: Context, runs: pd.DataFrame, *, shift: Array | None = None, least_df: float = 2.0
) -> list[ShapeEffect]:
    """Effects of a parabola in u.

    shift : standard deviation-sized change [2] of (c1, c2) from an uncertain correction, added to the covariance.
    Below `least_df` degrees of freedom nothing enters.
    """
    aspect = (runs["width"] / runs["depth"]).to_numpy(np.float64)
    V = made.unit * made.variance
    if shift is not None:
        V = V + np.outer(shift, shift)
    wide, narrow = math.log(WIDE / R0), math.log(NARROW / R0)
    G = 100 * np.array([[0.0, _SPREAD], [wide - narrow, wide**2 - narrow**2]])
    c1, c2 = made.c
    with np.errstate(all="ignore"):  # a flat profile has no vertex
        gradient = np.array([-1 / (2 * c2), c1 / (2 * c2**2)])
        vertex = math.log(R0) - c1 / (2 * c2)
        se = np.sqrt(np.array([*np.diag(G @ V @ G.T), gradient @ V @ gradient]))
    estimate = np.array([*(G @ made.c), vertex])
    blocked = "" if made.df >= least_df else f"{made.df:g} degrees of freedom are left"
    star = FiellerSet(vertex, "everything", 0.0, math.inf, 0.95)
    if not blocked:
        s = fieller(c1, c2, V[0, 0], V[1, 1], V[0, 1], df=made.df)
        low, high = (R0 * math.exp(-v / 2) if math.isfinite(v) else math.nan for v in (s.high, s.low))
        star = FiellerSet(vertex, s.kind, low, high, s.level)
    n, d = (float(np.exp(np.log(runs[c]).mean())) for c in ("params", "tokens"))
    loss = float(np.exp(np.log(runs["loss"]).mean()))
    made_ = _effects(
        about, estimate, se, made.df, star, aspect, n, d, loss, len(runs), blocked=blocked, interval="least squares"
    )
    return [replace(e, enters=False, note=blocked) for e in made_] if blocked else made_


def nothing(about: Context, runs: pd.DataFrame, why: str) -> list[ShapeEffect]:
    """Rows of a study that identifies none of the quantities, so that it is seen and not pooled."""
    aspect = (runs["width"] / runs["depth"]).to_numpy(np.float64)
    n, d = (float(np.exp(np.log(runs[c]).mean())) if runs[c].notna().all() else math.nan for c in ("params", "tokens"))
    shapes = len(runs[["depth", "width"]].drop_duplicates())
    return [
        _effect(about, q, math.nan, math.nan, math.nan, aspect, n, d, math.nan, shapes, False, why) for q in QUANTITIES
    ]


def _effects(
    about: Context,
    estimate: Sequence[float] | Array,
    se: Sequence[float] | Array,
    df: float,
    star: FiellerSet,
    aspect: Array,
    n: float,
    d: float,
    loss: float,
    shapes: int,
    *,
    blocked: str,
    interval: str,
    warnings: Sequence[str] = (),
) -> list[ShapeEffect]:
    low, high = float(aspect.min()), float(aspect.max())
    notes = {"penalty": blocked, "contrast": "", "optimum": blocked}
    sides = 0.0, math.inf  # what is known of an optimum that is not located
    if low > _LOWEST or high < _HIGHEST:
        notes["contrast"] = f"no shapes from {NARROW:g} to {WIDE:g} (it has {low:.3g} to {high:.3g})"
    if not notes["optimum"] and not (star.kind == "interval" and estimate[0] > 0):
        notes["optimum"] = "no optimum is located: the Fieller set is open"
    elif not notes["optimum"] and not (low <= star.low and star.high <= high):
        notes["optimum"] = (
            f"the Fieller set {star.low:.3g} to {star.high:.3g} leaves the shapes run ({low:.3g} to {high:.3g})"
        )
        sides = star.low if star.low >= low else 0.0, star.high if star.high <= high else math.inf
    out = []
    for i, quantity in enumerate(QUANTITIES):
        enters, note = not notes[quantity], notes[quantity]
        if enters and quantity == "penalty" and high / low < AWAY:
            note = "no two shapes are four times apart: the parabola is carried on"
        if enters and quantity == "optimum":
            note = f"Fieller set {star.low:.3g} to {star.high:.3g}"
        if enters and warnings:
            note = f"{note + '; ' if note else ''}warnings of the fit: {', '.join(warnings)}"
        made = _effect(about, quantity, float(estimate[i]), float(se[i]), df, aspect, n, d, loss, shapes, enters, note)
        made = replace(made, interval=f"{interval} on ln(d/L), t" if quantity == "optimum" else f"{interval}, t")
        if quantity == "optimum" and not enters:
            ends = math.log(sides[0]) if sides[0] else -math.inf, math.log(sides[1])
            made = replace(made, low=ends[0], high=ends[1], interval="Fieller set")
        out.append(made)
    return out


def _effect(
    about: Context,
    quantity: str,
    estimate: float,
    se: float,
    df: float,
    aspect: Array,
    n: float,
    d: float,
    loss: float,
    shapes: int,
    enters: bool,
    note: str,
) -> ShapeEffect:
    if enters and not (math.isfinite(estimate) and math.isfinite(se) and se > 0):
        enters, note = False, "the estimate has no standard error"
    if not enters and quantity == "optimum":
        estimate = se = math.nan  # a vertex that is not located is no number
    half = t_quantile(0.975, df) * se if df >= 1 else math.nan
    return ShapeEffect(
        about.study, about.architecture, quantity, estimate, se, df, estimate - half, estimate + half, UNITS[quantity], loss,
        about.convention, about.rates, about.cooled, n, d, float(aspect.min()), float(aspect.max()), shapes, about.baseline,
        enters, note, about.source,
    )  # fmt: skip

"""Equivalence: is an effect small enough not to matter? Two one-sided tests, of one gap and of a whole range of shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.result import HypothesisTest
from scalinglab.uncertainty import bootstrap, t_quantile

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
Replicates = Literal["jackknife", "bootstrap"]

KAPLAN_RATIO = 40.0  # range of aspect ratios over which Kaplan et al. 2020, fig. 5, call the dependence slight
_DRAWS = 20_000
_PAIRS_PER_BATCH = 2_000_000


def compute_margin(share: float, *, exponent: float, excess: float) -> float:
    """Loss (nats) that a share of compute buys on the frontier: exponent x excess x ln(1 + share).

    exponent : gamma of excess loss = const x compute^-gamma; excess : loss above the floor (nats).

    Raises
    ------
    ConfigError
        Values that are not positive.
    """
    if not (share > 0 and exponent > 0 and excess > 0):
        raise ConfigError(f"share {share}, exponent {exponent}, excess {excess}: a margin needs positive values")
    return exponent * excess * math.log1p(share)


def tost(
    estimate: float, se: float, df: float, *, margin: float, alpha: float = 0.05, unit: str = "nats", n_runs: int = 0
) -> HypothesisTest:
    """Two one-sided tests that an effect lies within (-margin, margin) (Schuirmann 1987).

    The interval has level 1 - 2 alpha and lies inside the margins exactly when the test rejects. The decision also says
    whether the effect differs from 0 at `alpha`: "real but immaterial" is both.

    Raises
    ------
    ConfigError
        A margin or se that is not positive, df below 1, alpha outside (0, .5).
    """
    from scipy.special import stdtr

    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(f"margin is {margin!r}: register a positive margin before looking, e.g. 0.009 nats")
    if not (math.isfinite(estimate) and math.isfinite(se) and se > 0 and df >= 1 and 0 < alpha < 0.5):
        raise ConfigError(f"estimate {estimate}, se {se}, df {df}, alpha {alpha} make no equivalence test")
    lower, upper = (estimate + margin) / se, (estimate - margin) / se
    p = float(max(stdtr(df, -lower), stdtr(df, upper)))
    q = t_quantile(1 - alpha, df)
    interval = (estimate - q * se, estimate + q * se)
    zero = float(2 * stdtr(df, -abs(estimate / se)))
    if p <= alpha and zero <= alpha:
        decision = f"real but immaterial: differs from 0 (p = {zero:.2g}) and lies within {margin:.3g} {unit}"
    elif p <= alpha:
        decision = f"equivalent: within {margin:.3g} {unit}"
    elif interval[0] > margin or interval[1] < -margin:
        decision = f"material: beyond {margin:.3g} {unit}"
    else:
        decision = f"unresolved: the interval reaches beyond {margin:.3g} {unit}; equivalence is not shown"
    return HypothesisTest(
        "equivalence (TOST)", f"the effect is {margin:.3g} {unit} or more in size", p, decision, alpha,
        min(lower, -upper), (float(df),), estimate, interval, 1 - 2 * alpha, unit, "two one-sided t", n_runs,
        assumptions=("estimate / se follows t", "the margin was fixed before looking"),
        diagnostics={"margin": margin, "se": se, "p against 0": zero, "p lower": float(stdtr(df, -lower)),
                     "p upper": float(stdtr(df, upper))},
    )  # fmt: skip


def sup_equivalence(
    curve: Array,
    replicates: Array,
    *,
    margin: float,
    kind: Replicates = "jackknife",
    df: float,
    alpha: float = 0.05,
    n_runs: int = 0,
    labels: tuple[str, ...] = (),
    rng: int | np.random.Generator = 0,
) -> HypothesisTest:
    """Simultaneous equivalence over a range: is max(curve) - min(curve) below the margin?

    Every pair of points is tested one-sidedly at `alpha`; all must pass, so no adjustment is due (intersection-union). The
    upper limit, max over pairs of gap + t se, is a valid 1 - alpha bound of the range. The lower limit, max over pairs of
    gap - c se, has c from the joint distribution of all pairs: where it exceeds the margin, equivalence is refuted.

    Parameters
    ----------
    curve
        Predicted losses at g shapes [g] (nats).
    replicates
        The same from refits [R, g].
    kind
        How the refits were made: "jackknife" (variance (R-1)/R sum of squares around `curve`) or "bootstrap".
    df
        Degrees of freedom of the standard errors (runs - 1).

    Raises
    ------
    ConfigError
        Shapes that don't match, too few refits, values that are not finite, or a margin that is not positive.
    """
    from scipy.special import stdtr

    f, V = np.asarray(curve, dtype=np.float64), np.asarray(replicates, dtype=np.float64)
    if f.ndim != 1 or len(f) < 2 or V.ndim != 2 or V.shape[1] != len(f) or len(V) < 3:
        raise ConfigError(f"curve {f.shape} and replicates {V.shape}: give [g] and [R, g] with g >= 2 and R >= 3")
    if not (np.isfinite(f).all() and np.isfinite(V).all()):
        raise ConfigError("the curve or its refits are not finite at every shape: narrow the range")
    if not (math.isfinite(margin) and margin > 0 and 0 < alpha < 0.5 and df >= 1):
        raise ConfigError(
            f"margin {margin!r}, alpha {alpha}, df {df}: a positive margin, alpha below .5 and df >= 1 are needed"
        )
    if kind == "jackknife":
        d = V - f
        C = (len(V) - 1) / len(V) * d.T @ d
    elif kind == "bootstrap":
        C = np.cov(V, rowvar=False)
    else:
        raise ConfigError(f"kind {kind!r} is not known: use jackknife or bootstrap")
    i, j = np.nonzero(~np.eye(len(f), dtype=bool))
    gap = f[i] - f[j]
    variance = C[i, i] + C[j, j] - 2 * C[i, j]
    se = np.sqrt(np.maximum(variance, 1e-12 * max(float(np.abs(C).max()), 1e-300)))
    bound = gap + t_quantile(1 - alpha, df) * se
    p = float(stdtr(df, (gap - margin) / se).max())
    sup = float(np.ptp(f))
    c = _joint_quantile(C, i, j, se, df, 1 - alpha, np.random.default_rng(rng))
    lower, upper = max(0.0, float((gap - c * se).max())), float(bound.max())
    if p <= alpha:
        decision, codes = f"equivalent: no two shapes of the range differ by {margin:.3g} nats or more", ("EQUIVALENT",)
    elif lower > margin:
        decision, codes = f"refuted: some shapes of the range differ by more than {margin:.3g} nats", ("REFUTED",)
    else:
        decision, codes = f"open: the range is between {lower:.3g} and {upper:.3g} nats", ("OPEN",)
    worst = int(bound.argmax())
    name = (lambda k: labels[k]) if labels else str
    return HypothesisTest(
        "equivalence over a range of shapes", f"two shapes of the range differ by {margin:.3g} nats or more", p, decision, alpha,
        float(((margin - gap) / se).min()), (float(df),), sup, (lower, upper), 1 - alpha, "nats",
        f"intersection-union of one-sided t over {len(gap)} pairs, {kind} covariance", n_runs, codes=codes,
        assumptions=("predicted losses are nearly normal over refits", "the law holds between the shapes that were run",
                     "either limit holds with its own level; together they have 1 - 2 alpha",
                     "the margin was fixed before looking"),
        diagnostics={"margin": margin, "worst pair": (name(int(i[worst])), name(int(j[worst]))),
                     "largest gap at": (name(int(f.argmax())), name(int(f.argmin())))},
    )  # fmt: skip


def shape_equivalence(
    fit: Fit,
    shapes: pd.DataFrame,
    *,
    margin: float,
    kind: Replicates = "jackknife",
    draws: int = 1_999,
    alpha: float = 0.05,
    rng: int | np.random.Generator = 0,
) -> HypothesisTest:
    """Kaplan's claim on a fitted law: over these shapes, at equal size and data, loss varies by less than the margin.

    shapes : one row per shape with the columns that the law reads, equal in params and tokens; 20-40 rows over a 40-fold range
    of aspect ratios serve well. kind : delete-one-run jackknife, or parametric bootstrap with `draws` refits.

    Raises
    ------
    ConfigError
        Shapes that differ in params or tokens, or fewer than two; see `sup_equivalence`.
    """
    for column in ("params", "tokens"):
        if column in shapes and shapes[column].max() > 1.001 * shapes[column].min():
            raise ConfigError(f"the shapes differ in {column!r}: the claim is about shape at equal size and data")
    if len(shapes) < 2:
        raise ConfigError("give at least two shapes")
    generator = np.random.default_rng(rng)
    made = fit.jackknife if kind == "jackknife" else bootstrap(fit, draws=draws, kind="parametric", rng=generator)
    ratio = math.nan
    labels: tuple[str, ...] = ()
    if {"depth", "width"} <= set(shapes):
        r = (shapes["width"] / shapes["depth"]).to_numpy(np.float64)
        ratio, labels = float(r.max() / r.min()), tuple(f"d/L {v:.3g}" for v in r)
    test = sup_equivalence(
        fit.predict(shapes), fit.predict(shapes, made.params), margin=margin, kind=kind, df=fit.n_runs - 1, alpha=alpha,
        n_runs=fit.n_runs, labels=labels, rng=generator,
    )  # fmt: skip
    narrow = math.isfinite(ratio) and ratio < KAPLAN_RATIO * (1 - 1e-6)
    codes = (*test.codes, *(("NARROW_RANGE",) if narrow else ()))
    return replace(
        test, codes=codes, diagnostics={**test.diagnostics, "range of aspect ratios": ratio, "law": fit.law.key}
    )


def _joint_quantile(
    C: Array, i: NDArray[np.intp], j: NDArray[np.intp], se: Array, df: float, level: float, rng: np.random.Generator
) -> float:
    """Quantile of the largest studentised pair difference over all pairs (one-sided; pairs come in both directions)."""
    values, Q = np.linalg.eigh(C)
    root = Q * np.sqrt(np.maximum(values, 0.0))
    step = max(1, _PAIRS_PER_BATCH // len(se))
    top = []
    for start in range(0, _DRAWS, step):
        z = rng.standard_normal((min(step, _DRAWS - start), len(C))) @ root.T
        top.append(((z[:, i] - z[:, j]) / se).max(1))
    s = np.sqrt(rng.chisquare(df, _DRAWS) / df) if math.isfinite(df) else 1.0
    return float(np.quantile(np.concatenate(top) / s, level))

"""An effect: an estimate in a unit, with its uncertainty, its contrast and what was corrected; several with a joint covariance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]
Unit = Literal["nats", "nats/lnL", "ln ratio", "probability", "1"]

UNITS: tuple[str, ...] = ("nats", "nats/lnL", "ln ratio", "probability", "1")


@dataclass(frozen=True)
class Correction:
    """What was added for the residual mismatch of a contrast: `nats` with its standard error.

    dln_params, dln_tokens : deep minus shallow, weighted as the contrast weighs the cells.
    spurious : predicted gap that the mismatch alone would make (nats, absolute); NaN without any rate to predict it with.
    applied : whether the estimate contains it. needed : whether `spurious` is above half the standard error.
    """

    dln_params: float = 0.0
    dln_tokens: float = 0.0
    nats: float = 0.0
    se: float = 0.0
    spurious: float = math.nan
    applied: bool = False
    needed: bool = False


@dataclass(frozen=True)
class Effect:
    """One estimate.

    estimand : E1, E1s, E2, E4, E5, E6, E7, E8 or E9 (E1: loss gap at equal N and D; see `scalinglab.depth_benefit.estimands`).
    architecture, reference : whose effect, and against which (E7).
    estimate, se, df : on the scale of `unit`; "ln ratio" is a logarithm, so exp(estimate) is the factor.
    variant : what distinguishes effects of one estimand (a FLOP convention, an equivalent, a parameter).
    contrast : depth and aspect of both arms, N, D, C where known. method : how the error was made.
    low, high : limits that replace estimate -+ t se (Fieller sets, profiles); NaN where the t interval holds.
    group : matched group (or groups) that the effect was estimated in, empty for a law over all runs.
    exact_p, p_min : p of a permutation test where that is the test, and the smallest that it can give.
    """

    estimand: str
    architecture: str
    estimate: float
    se: float
    df: float
    unit: Unit
    method: str
    reference: str | None = None
    variant: str = ""
    contrast: Mapping[str, float] = field(default_factory=dict)
    correction: Correction = field(default_factory=Correction)
    low: float = math.nan
    high: float = math.nan
    note: str = ""
    group: str = ""
    exact_p: float = math.nan
    p_min: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether there is an estimate with an error."""
        return bool(np.isfinite([self.estimate, self.se, self.df]).all() or self.df == math.inf) and self.se > 0

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Two-sided t interval; the own limits of the effect at .95 where it has some."""
        if level == 0.95 and math.isfinite(self.low) and math.isfinite(self.high):
            return self.low, self.high
        if not self.usable:
            return math.nan, math.nan
        half = t_quantile(0.5 + level / 2, min(self.df, 1e9)) * self.se
        return self.estimate - half, self.estimate + half

    def of_gap(self, nats: float) -> float:
        """What a gap of so many nats over the contrast is in the unit of this effect; NaN where it has no counterpart.

        A slope that makes that gap between the two depths is the gap divided by ln(deep / shallow).
        """
        if self.unit == "nats":
            return nats
        shallow, deep = (self.contrast.get(f"depth_{arm}", math.nan) for arm in ("shallow", "deep"))
        if self.unit != "nats/lnL" or not deep > shallow > 0:
            return math.nan
        return nats / math.log(deep / shallow)

    @property
    def p(self) -> float:
        """Two-sided p-value of estimate = 0."""
        from scipy.special import stdtr

        if math.isfinite(self.exact_p):
            return self.exact_p
        if not self.usable:
            return math.nan
        return float(2 * stdtr(min(self.df, 1e9), -abs(self.estimate / self.se)))

    @property
    def mde(self) -> float:
        """Smallest effect found with power .8 at two-sided .05."""
        from scalinglab.detection import detectable

        return detectable(self.se, self.df) if self.usable and self.df >= 1 else math.nan

    def row(self) -> dict[str, Any]:
        """The effect as a table row, full precision."""
        low, high = self.interval(0.95)
        low90, high90 = self.interval(0.90)
        c = self.contrast
        return {
            "estimand": self.estimand, "variant": self.variant, "architecture": self.architecture,
            "group": self.group, "reference": self.reference, "estimate": self.estimate, "unit": self.unit, "se": self.se, "df": self.df,
            "low": low, "high": high, "low90": low90, "high90": high90, "p": self.p, "mde80": self.mde,
            "depth_shallow": c.get("depth_shallow", math.nan), "depth_deep": c.get("depth_deep", math.nan),
            "params": c.get("params", math.nan), "tokens": c.get("tokens", math.nan),
            "correction": self.correction.nats if self.correction.applied else 0.0, "method": self.method,
            "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True)
class EffectSet:
    """Effects with their joint covariance [k, k], in order."""

    effects: tuple[Effect, ...]
    cov: Array

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)

    def __len__(self) -> int:
        return len(self.effects)

    def __post_init__(self) -> None:
        if self.cov.shape != (len(self.effects), len(self.effects)):
            raise ConfigError(
                f"{len(self.effects)} effects need a square covariance, not one of shape {self.cov.shape}"
            )

    def pick(self, estimand: str, architecture: str | None = None, variant: str | None = None) -> Effect:
        """The first effect of that estimand (and architecture, and variant).

        Raises
        ------
        ConfigError
            There is none; lists what there is.
        """
        for e in self.effects:
            if e.estimand == estimand and architecture in (None, e.architecture) and variant in (None, e.variant):
                return e
        known = sorted({f"{e.estimand}/{e.architecture}" for e in self.effects})
        raise ConfigError(f"there is no effect {estimand} of {architecture!r}; there are {', '.join(known)}")

    def subset(self, estimand: str, variant: str | None = None) -> EffectSet:
        """The effects of one estimand (and variant)."""
        keep = [i for i, e in enumerate(self.effects) if e.estimand == estimand and variant in (None, e.variant)]
        return EffectSet(tuple(self.effects[i] for i in keep), self.cov[np.ix_(keep, keep)])

    def to_frame(self) -> pd.DataFrame:
        """One row per effect, full precision."""
        return pd.DataFrame([e.row() for e in self.effects])


def joined(parts: Sequence[EffectSet]) -> EffectSet:
    """Several sets as one; between sets the covariance is unknown (NaN)."""
    total = sum(len(p) for p in parts)
    cov = np.full((total, total), np.nan)
    at = 0
    for p in parts:
        cov[at : at + len(p), at : at + len(p)] = p.cov
        at += len(p)
    return EffectSet(tuple(e for p in parts for e in p.effects), cov)


def satterthwaite(variances: Sequence[float], dfs: Sequence[float]) -> float:
    """Degrees of freedom of a sum of independent variance estimates."""
    v, d = np.asarray(variances, dtype=np.float64), np.asarray(dfs, dtype=np.float64)
    total = v.sum()
    if not total > 0:
        return float(d.min())
    with np.errstate(divide="ignore"):
        below = float((v * v / d).sum())
    return float(total * total / below) if below > 0 else math.inf


def scaled(effect: Effect, factor: float, **changes: Any) -> Effect:
    """The effect in another unit: estimate and error times a known factor; other fields as given."""
    return replace(
        effect, estimate=effect.estimate * factor, se=effect.se * abs(factor), low=math.nan, high=math.nan, **changes
    )

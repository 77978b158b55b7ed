"""What a planned test can find: power, smallest visible effect, seeds and depths needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalinglab.detection import detectable
from scalinglab.errors import ConfigError
from scalinglab.hypotheses.quadrature import legendre
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]

_MOST_SEEDS = 10_000


def t_power(effect: float, se: float, df: float, *, alpha: float = 0.05) -> float:
    """Power of a two-sided t test against an effect, by the noncentral t.

    Raises
    ------
    ConfigError
        se not positive, df below 1, alpha outside (0, 1).
    """
    from scipy.special import nctdtr

    if not (se > 0 and df >= 1 and 0 < alpha < 1):
        raise ConfigError(f"se {se}, df {df}, alpha {alpha}: a t test needs se > 0, df >= 1 and alpha between 0 and 1")
    q, shift = t_quantile(1 - alpha / 2, df), abs(effect) / se
    # Far from the null both tails underflow to NaN, which stands for 0: the power is 1.
    below, far = np.nan_to_num(nctdtr(df, shift, q)), np.nan_to_num(nctdtr(df, shift, -q))
    return float(1 - below + far)


def gap_power(effect: float, sigma: float, seeds: int, *, alpha: float = 0.05) -> float:
    """Power of Welch's test (`gap_test`) on two shapes with `seeds` runs each of equal SD.

    Exact: given the share r of one arm's variance, the statistic is noncentral t with 2 (seeds - 1) degrees of freedom and is
    held against the quantile at Welch's (seeds - 1) / (r^2 + (1 - r)^2); r is Beta((seeds - 1) / 2, (seeds - 1) / 2). With three
    seeds this is .70 where the pooled t, which tables of the smallest visible effect assume, has .80.

    Raises
    ------
    ConfigError
        sigma not positive, fewer than two seeds, alpha outside (0, 1).
    """
    from scipy.special import betaincinv, nctdtr, stdtrit

    _check_noise(sigma, 0.0)
    if not (seeds >= 2 and 0 < alpha < 1):
        raise ConfigError(f"seeds {seeds}, alpha {alpha}: Welch's test needs two seeds and alpha between 0 and 1")
    u, w = legendre(200)
    r = betaincinv((seeds - 1) / 2, (seeds - 1) / 2, (u + 1) / 2)  # equal shares of probability
    q = stdtrit((seeds - 1) / (r**2 + (1 - r) ** 2), 1 - alpha / 2)
    df, shift = 2 * (seeds - 1), abs(effect) / gap_se(sigma, seeds)
    found = 1 - np.nan_to_num(nctdtr(df, shift, q)) + np.nan_to_num(nctdtr(df, shift, -q))
    return float(w @ found / 2)


def equivalence_power(margin: float, se: float, df: float, *, effect: float = 0.0, alpha: float = 0.05) -> float:
    """Probability that TOST with this margin rejects when the true effect is `effect`.

    Exact: averages the normal probability of the acceptance region over the distribution of the standard error.

    Raises
    ------
    ConfigError
        See `t_power`; a margin that is not positive.
    """
    from scipy.special import chdtri, ndtr

    if not (se > 0 and df >= 1 and 0 < alpha < 0.5 and margin > 0):
        raise ConfigError(f"margin {margin}, se {se}, df {df}, alpha {alpha} make no equivalence test")
    u, w = legendre(400)
    s = np.sqrt(chdtri(df, 1 - (u + 1) / 2) / df)
    room = margin / se - t_quantile(1 - alpha, df) * s
    inside = np.where(room > 0, ndtr(room - effect / se) - ndtr(-room - effect / se), 0.0)
    return float(w @ inside / 2)


def gap_se(sigma: float, seeds: int, *, tau: float = 0.0) -> float:
    """Standard error of the difference of two cell means: sqrt(2 (tau^2 + sigma^2 / seeds))."""
    _check_noise(sigma, tau)
    return math.sqrt(2 * (tau**2 + sigma**2 / seeds))


def slope_se(x: Sequence[float] | Array, sigma: float, seeds: int, *, tau: float = 0.0) -> float:
    """Standard error of the slope of cell means on x: sqrt((tau^2 + sigma^2 / seeds) / sum (x - mean)^2)."""
    _check_noise(sigma, tau)
    z = np.asarray(x, dtype=np.float64)
    sxx = float(((z - z.mean()) ** 2).sum())
    if not sxx > 0:
        raise ConfigError("x does not vary: a slope needs at least two depths")
    return math.sqrt((tau**2 + sigma**2 / seeds) / sxx)


def sigma_upper(df: int, *, level: float = 0.95) -> float:
    """Factor by which an SD estimated on df degrees of freedom may be too small: sqrt(df / chi2 quantile(1 - level))."""
    from scipy.special import chdtri

    if df < 1 or not 0 < level < 1:
        raise ConfigError(
            f"df {df} and level {level}: at least 1 degree of freedom and a level between 0 and 1 are needed"
        )
    return float(math.sqrt(df / chdtri(df, level)))


@dataclass(frozen=True)
class SeedPlan:
    """seeds : per cell, or None where no number is enough. mde : smallest effect seen with them. decision : in words."""

    seeds: int | None
    mde: float
    sigma: float
    decision: str


def seeds_needed(
    effect: float,
    sigma: float,
    *,
    x: Sequence[float] | Array | None = None,
    tau: float = 0.0,
    arms: int = 1,
    tests: int = 1,
    sigma_df: int | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
) -> SeedPlan:
    """Fewest seeds per cell with which the effect is found.

    Parameters
    ----------
    effect
        In nats (gap of two depths) or nats per unit of x (slope, when `x` is given).
    sigma
        SD between seeds (nats). With `sigma_df` its upper 95 % limit is planned with.
    x
        Depth coordinates of the cells: plan a slope of cell means, with depths - 2 degrees of freedom per arm. None: a gap of
        two shapes with 2 (seeds - 1) degrees of freedom per arm (pooled t; see `gap_power` for Welch's test with few seeds).
    tau
        SD of what a line misses at a shape; seeds don't average it away. It needs `x`.
    arms
        2: difference between two architectures of that gap or slope (sqrt(2) wider, twice the degrees of freedom).
    tests
        Number of tests of the family; the size is alpha / tests (Holm's first step).

    Raises
    ------
    ConfigError
        Values out of range.
    """
    _check_noise(sigma, tau)
    if not (effect > 0 and arms in (1, 2) and tests >= 1 and 0 < alpha < 1 and 0 < power < 1):
        raise ConfigError(f"effect {effect}, arms {arms}, tests {tests}, alpha {alpha}, power {power}: out of range")
    if tau > 0 and x is None:
        raise ConfigError(
            "with two shapes the misfit tau can't be told from the gap: give x= of several depths, or tau=0"
        )
    used = sigma * (sigma_upper(sigma_df) if sigma_df else 1.0)
    wide = math.sqrt(arms)

    def mde(s: int) -> float:
        se = gap_se(used, s) if x is None else slope_se(x, used, s, tau=tau)
        df = arms * (2 * (s - 1) if x is None else len(x) - 2)
        return detectable(se * wide, df, level=alpha / tests, power=power)

    first = 2 if x is None else 1
    best = mde(_MOST_SEEDS)
    if not best <= effect:
        why = "more depths, spread further, are needed" if x is not None else "the effect is too small"
        return SeedPlan(None, best, used, f"no number of seeds finds {effect:.3g}: the best is {best:.3g}; {why}")
    low, high = first - 1, _MOST_SEEDS
    while high - low > 1:  # the smallest visible effect falls with seeds
        middle = (low + high) // 2
        low, high = (low, middle) if mde(middle) <= effect else (middle, high)
    return SeedPlan(
        high, mde(high), used, f"{high} seeds per cell find effects of {mde(high):.3g} and more with power {power:g}"
    )


def _check_noise(sigma: float, tau: float) -> None:
    if not (math.isfinite(sigma) and sigma > 0 and math.isfinite(tau) and tau >= 0):
        raise ConfigError(f"sigma {sigma!r} and tau {tau!r}: give SDs in nats, sigma above 0")

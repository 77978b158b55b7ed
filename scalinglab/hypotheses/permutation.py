"""Permutation tests: sign flips of pairs, Freedman-Lane for the interaction. Both say when no p of theirs can be small enough."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scalinglab.comparison import sign_flip_p
from scalinglab.errors import ConfigError
from scalinglab.hypotheses.cells import Cells, Shared, interaction_designs
from scalinglab.hypotheses.result import UNTESTABLE, HypothesisTest, check_level, decide, numbers

Array = NDArray[np.float64]


def sign_flip(
    differences: Array, *, level: float = 0.95, adjusted_alpha: float | None = None, rng: int | np.random.Generator = 0
) -> HypothesisTest:
    """Sign-flip test that paired differences are symmetric about 0.

    Exact up to 14 pairs, beyond that 9,999 random flips. The interval holds all shifts that the test does not reject; it is
    unbounded where the design can't reject anything. n pairs give no p below 2 / 2^n: five pairs never reach .05.

    Parameters
    ----------
    differences
        Loss of the shallow less that of the deep run of each pair (nats) [n].
    adjusted_alpha
        Size that p is held against after adjustment for several tests (Holm's first step: .05 / tests); default 1 - level.

    Raises
    ------
    ConfigError
        No differences, or values that are not finite.
    """
    check_level(level)
    d = numbers(differences, "differences")
    alpha = 1 - level if adjusted_alpha is None else adjusted_alpha
    generator_seed = np.random.default_rng(rng).integers(2**63)  # one set of flips for the p-value and all shifts
    p, least = sign_flip_p(d, rng=int(generator_seed))
    mean = float(d.mean())
    interval = (-math.inf, math.inf)
    if least <= 1 - level:
        ends = [_edge(d, mean, side, 1 - level, int(generator_seed)) for side in (-1.0, 1.0)]
        interval = (ends[0], ends[1])
    return HypothesisTest(
        "paired sign flips", "paired differences are symmetric about 0", p,
        decide(p, alpha, found=f"the {'deeper' if mean > 0 else 'shallower'} run of a pair tends to have the lower loss",
               unresolved=f"mean difference {mean:.3g} nats", p_min=least),
        alpha, float(d.sum()), (), mean, interval, level, "nats",
        "sign flips, " + ("exact" if len(d) <= 14 else "9,999 random"), 2 * len(d), least,
        () if least <= alpha else (UNTESTABLE,), ("pairs are independent; differences are symmetric about 0 under the null",),
        {"pairs": len(d), "positive": int((d > 0).sum()), "median": float(np.median(d))},
    )  # fmt: skip


def pairs_needed(alpha: float, *, tests: int = 1) -> int:
    """Smallest number of pairs whose sign-flip test can reach alpha / tests: 2 / 2^n <= alpha / tests."""
    if not 0 < alpha < 1 or tests < 1:
        raise ConfigError(f"alpha = {alpha} and tests = {tests}: alpha lies between 0 and 1, tests is at least 1")
    return max(1, math.ceil(1 - math.log2(alpha / tests) - 1e-12))


def freedman_lane(
    cells: Cells,
    *,
    degree: int = 2,
    shared: Shared = "polynomial",
    within: bool = False,
    level: float = 0.95,
    draws: int = 9_999,
    rng: int | np.random.Generator = 0,
) -> HypothesisTest:
    """Permutation F test that depth profiles are parallel (Freedman & Lane 1983), on cell means.

    Residuals of the parallel model are permuted, added back to its fit, and the interaction F computed again. within : permute
    within groups only, so that groups may differ in variance. Not exact: residuals are only nearly exchangeable.

    Raises
    ------
    ConfigError
        Cells that can't carry the profiles, or fewer than 19 draws.
    """
    check_level(level)
    if draws < 19:
        raise ConfigError(f"draws is {draws}: at least 19 are needed for a p of .05")
    small, large = interaction_designs(cells, degree=degree, shared=shared)
    y = cells.mean
    e = y - small @ (small.T @ y)
    generator = np.random.default_rng(rng)
    m = len(y)
    if within:
        key = generator.random((draws, m)) + cells.group[None]  # sorting keeps each group in its own places
        home = np.argsort(cells.group, kind="stable")
        order = np.empty((draws, m), dtype=np.intp)
        order[:, home] = np.argsort(key, axis=1)
        many = sum(math.lgamma(int((cells.group == g).sum()) + 1) for g in range(len(cells.levels)))
    else:
        order = np.argsort(generator.random((draws, m)), axis=1)
        many = math.lgamma(m + 1)
    moved = e[order]  # the fit of the parallel model that is added back drops out of both sums of squares
    q, df2 = large.shape[1] - small.shape[1], m - large.shape[1]

    def statistic(r: Array) -> Array:
        total = (r * r).sum(1)
        rss0, rss1 = total - ((r @ small) ** 2).sum(1), total - ((r @ large) ** 2).sum(1)
        return np.asarray(np.maximum(rss0 - rss1, 0.0) / q / (np.maximum(rss1, 1e-300) / df2))

    seen = float(statistic(e[None])[0])
    p = float((1 + (statistic(moved) >= seen * (1 - 1e-9)).sum()) / (1 + draws))
    least = max(1 / (1 + draws), math.exp(-min(many, 700.0)))
    return HypothesisTest(
        "group x depth (Freedman-Lane)", "the depth profiles of all groups are parallel", p,
        decide(p, 1 - level, found=f"depth profiles differ between groups (p = {p:.2g})", p_min=least,
               unresolved="the profiles may or may not be parallel"),
        1 - level, seen, (float(q), float(df2)), level=level, p_min=least, n_runs=cells.n_runs,
        method=f"Freedman-Lane, {draws} permutations{' within groups' if within else ''}",
        codes=() if least <= 1 - level else (UNTESTABLE,),
        assumptions=("residuals of the parallel model are exchangeable" + (" within groups" if within else ""),),
    )  # fmt: skip


def _edge(d: Array, mean: float, side: float, alpha: float, seed: int) -> float:
    """The shift furthest from the mean on one side that sign flips do not reject."""
    inner, outer = 0.0, float(np.abs(d - mean).max()) + 1e-300
    while sign_flip_p(d - (mean + side * outer), rng=seed)[0] > alpha:
        outer *= 2
    for _ in range(40):
        middle = (inner + outer) / 2
        if sign_flip_p(d - (mean + side * middle), rng=seed)[0] > alpha:
            inner = middle
        else:
            outer = middle
    return mean + side * inner

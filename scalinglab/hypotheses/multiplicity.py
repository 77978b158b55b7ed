"""More than one test in a claim: adjusted p-values that say how many were tried, and a test for looking as runs come in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide, numbers

Array = NDArray[np.float64]
Adjustment = Literal["holm", "bonferroni", "hochberg", "bh", "by", "sequence"]

_STATSMODELS = {"bonferroni": "bonferroni", "hochberg": "simes-hochberg", "bh": "fdr_bh", "by": "fdr_by"}


def adjust(
    tests: Mapping[str, HypothesisTest] | Mapping[str, float] | pd.Series | Sequence[float] | Array,
    *,
    method: Adjustment = "holm",
    tried: int | None = None,
) -> pd.Series:
    """Adjusted p-values, in the order given.

    Parameters
    ----------
    tests
        Tests by name, or p-values.
    method
        "holm" (a claim), "bonferroni", "hochberg" (independent tests), "bh" or "by" (false discovery rate, for exploration),
        "sequence" (gatekeeping: each is tested only if all before it were rejected).
    tried
        How many tests were made in all, those not listed included; they enter with p = 1.

    Raises
    ------
    ConfigError
        No tests, a p-value outside [0, 1] or missing, an unknown method, or `tried` below the number listed.
    """
    values = dict(tests) if isinstance(tests, Mapping | pd.Series) else dict(enumerate(tests))
    p = pd.Series({k: v.p_value if isinstance(v, HypothesisTest) else float(v) for k, v in values.items()}, dtype=float)
    if not len(p):
        raise ConfigError("there are no tests to adjust")
    bad = p.index[~p.between(0, 1)]
    if len(bad):
        raise ConfigError(
            f"test {bad[0]!r} has p = {p[bad[0]]}: a p-value between 0 and 1 is needed; leave out what has none"
        )
    count = len(p) if tried is None else tried
    if count < len(p):
        raise ConfigError(f"tried={tried} but {len(p)} tests are listed: count all that were made")
    if method == "sequence":
        return p.cummax().rename("p_adj")
    if method == "holm":  # that of statsmodels collects garbage, 50 ms at every call
        order = np.argsort(p.to_numpy(), kind="stable")
        stepped = np.minimum(1.0, np.maximum.accumulate(p.to_numpy()[order] * (count - np.arange(len(p)))))
        return pd.Series(stepped[np.argsort(order, kind="stable")], index=p.index, name="p_adj")
    if method not in _STATSMODELS:
        raise ConfigError(f"method {method!r} is not known: use holm, {', '.join([*_STATSMODELS, 'sequence'])}")
    from statsmodels.stats.multitest import multipletests

    padded = np.concatenate([p.to_numpy(), np.ones(count - len(p))])
    return pd.Series(multipletests(padded, method=_STATSMODELS[method])[1][: len(p)], index=p.index, name="p_adj")


def e_value(
    differences: Array, *, scale: float, level: float = 0.95, bets: Sequence[float] = (0.25, 0.5, 1.0, 2.0)
) -> HypothesisTest:
    """Always-valid sign-flip test of paired differences in the order in which they came: may be looked at after each pair.

    The wealth of a bettor on the sign, mean over bets b of prod_i (1 + tanh(b d_i / scale)) and over both directions, is a
    martingale while differences are symmetric about 0; by Ville's inequality 1 / (its largest value) is a p-value at any
    stopping time. Less power than a planned test: exploratory.

    Parameters
    ----------
    scale
        SD of a difference expected *before* looking (nats).

    Raises
    ------
    ConfigError
        A scale that is not positive, or values that are not finite.
    """
    check_level(level)
    d = numbers(differences, "differences")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale is {scale!r}: give the SD of a difference that was expected, in nats")
    b = np.array([*bets, *(-v for v in bets)])
    log_wealth = np.cumsum(np.log1p(np.tanh(b[:, None] * d[None] / scale)), axis=1)  # [bets, n]
    peak = log_wealth.max(0)
    wealth = np.exp(peak) * np.exp(log_wealth - peak).mean(0)
    best = float(max(1.0, wealth.max()))
    mean = float(d.mean())
    p = min(1.0, 1 / best)
    return HypothesisTest(
        "paired e-value (exploratory)", "paired differences are symmetric about 0", p,
        decide(p, 1 - level, found="differences lean to one side, at any time of looking",
               unresolved=f"wealth {wealth[-1]:.3g} against the null so far"),
        1 - level, float(wealth[-1]), (), mean, level=level, unit="nats", method="1 / largest e-value (Ville)",
        n_runs=2 * len(d), codes=("EXPLORATORY",),
        assumptions=("pairs come in an order that does not depend on their outcome", "symmetric about 0 under the null",
                     "scale and bets were fixed before looking"),
        diagnostics={"e-value": float(wealth[-1]), "largest e-value": best},
    )  # fmt: skip

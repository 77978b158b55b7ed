"""The table of a fit: parameters and derived parameters with their standard errors, intervals and flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.profiles import optimal_aspect
from scalinglab.uncertainty import Interval

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]


def parameter_table(fit: Fit, level: float = 0.95) -> pd.DataFrame:
    """Parameters, then derived ones: estimate, se, low, high, df, method, identified, robust shift in standard errors."""
    made = fit.jackknife
    limits = made.conf_int(level)
    shift = fit.robust_shift
    rows = []
    for name, value in fit.params.items():
        se = float(made.se[name])
        low, high = limits.loc[name]
        free = not fit.law.in_algebra or fit.encoding.slots[name].position is not None
        stuck = free and value == 0.0 and not high > 0.0  # collapsed in the fit and in every replicate
        rows.append(
            {
                "parameter": name,
                "estimate": value,
                "se": se if free and not stuck else np.nan,
                "low": low if free and not stuck else np.nan,
                "high": high if free and not stuck else np.nan,
                "df": made.df if free else np.nan,
                "identified": bool(
                    free and not stuck and np.isfinite([low, high]).all() and fit.status != "not_identified"
                ),
                "robust_shift_se": float(shift[name] / se) if free and se > 0 else np.nan,
                "kind": "fixed" if not free else "at bound" if stuck else "parameter",
            }
        )
    for name, value in fit.derived.items():
        found = _derived_interval(fit, str(name), float(value), level)
        rows.append(
            {
                "parameter": name, "estimate": value, "se": float(found.se), "low": float(found.low), "high": float(found.high),
                "df": made.df, "identified": bool(found.valid), "robust_shift_se": np.nan, "kind": "derived",
            }
        )  # fmt: skip
    return pd.DataFrame(rows).set_index("parameter")


def _derived_interval(fit: Fit, name: str, value: float, level: float) -> Interval:
    """Jackknife interval of a derived parameter; the optimal aspect ratio, a ratio, gets its Fieller set instead.

    Where that set is not an interval the optimum is not located: the limits are 0 and infinity and it counts as not
    identified.
    """
    made = fit.jackknife.interval(_derived_of(fit, name), level, log=bool(value > 0))
    if name.split("[")[0] != "r_star":
        return made
    found = optimal_aspect(fit, level=level, group=name[len("r_star[") : -1] or None)
    located = found.kind == "interval"
    low, high = (found.low, found.high) if located else (0.0, np.inf)
    return replace(
        made, low=np.array(low), high=np.array(high), valid=np.array(located), method="Fieller, jackknife covariance"
    )


def _derived_of(fit: Fit, name: str) -> Callable[[pd.DataFrame], Array]:
    return lambda params: fit.derive(params)[name].to_numpy(np.float64)

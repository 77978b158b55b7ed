"""Drift of the optimal learning rate with depth and with width, with a test against none and a test of equivalence to none."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.hypotheses import HypothesisTest, t_test, tost
from scalinglab.misscaling.contrasts import Slopes, contrast, spread
from scalinglab.misscaling.curves import Array
from scalinglab.misscaling.identical import overlap
from scalinglab.misscaling.intake import Arm

COLUMNS = (
    "architecture", "parametrization", "axis", "slope", "se", "df", "low", "high", "p", "p_equivalent", "decision", "shapes",
    "held",
)  # fmt: skip


def drift_table(
    cells: pd.DataFrame,
    optimum: Array,
    cov: Array,
    usable: NDArray[np.bool_],
    *,
    margin: float = 0.2,
    level: float = 0.95,
    noise_df: float = 1e6,
) -> pd.DataFrame:
    """Slope of ln optimal lr per ln depth and per ln width, for each arm.

    Both enter one regression with an intercept per token budget and batch, where the shapes tell them apart; where width is
    a function of depth (a ladder of equal size) the slope on depth is along that ladder, and `held` says so.

    Parameters
    ----------
    cells : of `Grids`. optimum [C], cov [C, C] : ln optimal lr and its covariance. usable [C].
    margin : of equivalence, ln lr per ln depth. noise_df : degrees of freedom of cov.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`; p against no drift, p_equivalent of the two one-sided tests.
    """
    rows: list[dict[str, object]] = []
    for made, axes in _designs(cells, usable):
        tau2, scale, df = spread(optimum, cov, made, overlap=overlap(cells))
        for (arm, axis), w in made.weights.items():
            if df < 1:
                continue
            e = contrast(optimum, cov, w, w, tau2, scale, df, noise_df)
            if not e.se > 0:  # losses without any noise
                continue
            tests = drift_tests(float(e.estimate), float(e.se), float(e.df), margin=margin, level=level, axis=axis)
            rows.append({
                "architecture": arm[0], "parametrization": arm[1], "axis": axis, "slope": float(e.estimate), "se": float(e.se),
                "df": float(e.df), "low": tests[0].interval[0], "high": tests[0].interval[1], "p": tests[0].p_value,
                "p_equivalent": tests[1].p_value, "decision": f"{tests[0].decision}; {tests[1].decision}",
                "shapes": int(np.count_nonzero(w)), "held": axes[arm],
            })  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def drift_tests(
    slope: float, se: float, df: float, *, margin: float, level: float = 0.95, axis: str = "depth"
) -> tuple[HypothesisTest, HypothesisTest]:
    """Test that an optimum does not drift, and test that it drifts by less than a margin.

    Raises
    ------
    ConfigError
        No positive standard error or margin.
    """
    df = min(df, 1e6)
    zero = t_test(
        f"drift of ln optimal lr per ln {axis}", slope, se, df, null="the optimum does not drift", found="the optimum drifts",
        level=level, unit=f"per ln {axis}",
    )  # fmt: skip
    return zero, tost(slope, se, df, margin=margin, alpha=1 - level, unit=f"per ln {axis}")


def _designs(cells: pd.DataFrame, usable: NDArray[np.bool_]) -> list[tuple[Slopes, dict[Arm, str]]]:
    """One design over all arms, with the columns that each arm's shapes can bear."""
    names = list(zip(cells["architecture"], cells["parametrization"], strict=True))
    setting = cells["setting"].to_numpy() if "setting" in cells else np.zeros(len(cells), int)
    logs = {"depth": np.log(cells["depth"].to_numpy(np.float64)), "width": np.log(cells["width"].to_numpy(np.float64))}
    C = len(cells)
    residual, df, held = np.zeros((C, C)), 0, {}
    weights: dict[tuple[Arm, str], Array] = {}
    for arm in dict.fromkeys(names):
        rows = np.flatnonzero([n == arm for n in names] & usable)
        if len(rows) < 3:
            continue
        X: Array = (setting[rows][:, None] == np.unique(setting[rows])[None]).astype(np.float64)
        used: list[str] = []
        left: list[str] = []
        for axis, values in logs.items():
            wider = np.column_stack([X, values[rows] - values[rows].mean()])
            if np.linalg.svd(wider, compute_uv=False)[-1] > 1e-2 * np.sqrt(len(rows)) and len(rows) > wider.shape[1]:
                X, used = wider, [*used, axis]
            elif np.ptp(values[rows]) > 1e-9:
                left.append(axis)
        if not used:
            continue
        H = np.linalg.pinv(X)
        for k, axis in enumerate(used):
            w = np.zeros(C)
            w[rows] = H[X.shape[1] - len(used) + k]
            weights[arm, axis] = w
        residual[np.ix_(rows, rows)] = np.eye(len(rows)) - X @ H
        df += len(rows) - X.shape[1]
        other = [a for a in used if len(used) == 2]
        held[arm] = f"{left[0]} moves along" if left else "the other held" if other else ""
    return [(Slopes(weights, residual, df), held)] if weights else []

"""Exchange rates: how many nats one unit of ln params, ln tokens and ln compute is worth, with their covariance.

They turn a gap in nats into parameters, tokens or FLOPs, correct what is left unmatched, and set the margin of
equivalence. A rate is a derivative of a law, so it is uncertain: every use propagates its covariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.features import R0
from scalinglab.laws import LAWS
from scalinglab.published import published_fits, published_params

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
_STEP = 1e-3  # of ln N and ln D; central differences then err by about 1e-7 of the rate


@dataclass(frozen=True)
class Rates:
    """Nats gained per unit of ln N, ln D and ln C at one size, all positive where more is better.

    params : -dloss / dln N at fixed D and aspect ratio. tokens : -dloss / dln D. compute : gamma (loss - E) with
    gamma = alpha beta / (alpha + beta), the slope of the compute-optimal frontier at this loss.
    cov [3, 3] : in that order. df : degrees of freedom of cov (infinite for borrowed rates).
    borrowed : the rates come from other data than the runs.
    """

    params: float
    tokens: float
    compute: float
    cov: Array
    df: float
    source: str
    borrowed: bool
    at: Mapping[str, float] = field(default_factory=dict)

    def margin(self, compute: float) -> float:
        """Nats that a relative change of compute is worth: rate ln(1 + compute)."""
        if not compute > 0:
            raise ConfigError(f"a margin of {compute} in compute must be positive, e.g. 0.05 for 5 %")
        return float(self.compute * np.log1p(compute))


def rates_from_fit(
    fit: Fit, *, params: float, tokens: float, aspect: float = R0, kappa: float = 12.0, group: str | None = None
) -> Rates:
    """Rates of a fitted law, with the covariance of its delete-one jackknife.

    params, tokens, aspect : where; group : level of a crossed fit.

    Raises
    ------
    ConfigError
        A size that isn't positive, or a crossed fit without its group.
    """
    _check_place(params, tokens)
    if fit.law.levels and group not in fit.law.levels:
        raise ConfigError(f"the fit has one law per {fit.law.by}: give group=, one of {', '.join(fit.law.levels)}")

    def values(frame: pd.DataFrame) -> Array:
        n, d = _STEP, _STEP
        rows = pd.DataFrame({
            "params": params * np.exp([n, -n, 0, 0, 0]), "tokens": tokens * np.exp([0, 0, d, -d, 0]),
        })  # fmt: skip
        rows["aspect"] = aspect
        rows["depth"] = np.cbrt(rows["params"] / (kappa * aspect * aspect))
        rows["width"] = aspect * rows["depth"]
        rows["u"] = np.log(aspect / R0)
        if fit.law.levels:
            rows[str(fit.law.by)] = group
        loss = fit.predict(rows, frame)
        eps_n = -(loss[:, 0] - loss[:, 1]) / (2 * n)
        eps_d = -(loss[:, 2] - loss[:, 3]) / (2 * d)
        alpha, beta = (_exponent(fit, frame, name, group) for name in ("alpha", "beta"))
        if alpha is None or beta is None:
            eps_c = 0.5 * (eps_n + eps_d)  # equal at the optimum, where the frontier's slope is either
        else:
            eps_c = (beta * eps_n + alpha * eps_d) / (alpha + beta)  # gamma (A-term + B-term)
        return np.stack([eps_n, eps_d, eps_c], axis=-1)

    point = values(fit.params.to_frame().T.astype(float))[0]
    moved = values(fit.jackknife.params) - point
    g = len(moved)
    cov = (g - 1) / g * moved.T @ moved
    return Rates(
        float(point[0]), float(point[1]), float(point[2]), cov, fit.jackknife.df, f"law {fit.law.key} on these runs", False,
        {"params": params, "tokens": tokens},
    )  # fmt: skip


def published_rates(key: str = "besiroglu2024", *, params: float, tokens: float, relative_se: float = 0.25) -> Rates:
    """Rates of a published Chinchilla fit: other data, another tokenizer, so a generous standard error is assumed.

    relative_se : of each rate, independent of each other.

    Raises
    ------
    ConfigError
        An unknown fit, one without params and tokens, or a size that isn't positive.
    """
    _check_place(params, tokens)
    p = published_params(key)
    if not {"A", "alpha", "B", "beta"} <= set(p.index):
        known = published_fits("chinchilla")["key"].unique()
        raise ConfigError(f"published fit {key!r} has no A, alpha, B, beta; choose one of {', '.join(known)}")
    if not relative_se >= 0:
        raise ConfigError(f"relative_se={relative_se} must not be negative")
    a_term = p["A"] * params ** -p["alpha"]
    b_term = p["B"] * tokens ** -p["beta"]
    gamma = p["alpha"] * p["beta"] / (p["alpha"] + p["beta"])
    rates = np.array([p["alpha"] * a_term, p["beta"] * b_term, gamma * (a_term + b_term)])
    law = LAWS["chinchilla"].key
    source = f"published {law} fit {key}, assumed standard error {100 * relative_se:g} %"
    return Rates(
        float(rates[0]), float(rates[1]), float(rates[2]), np.diag((relative_se * rates) ** 2), np.inf, source, True,
        {"params": params, "tokens": tokens},
    )  # fmt: skip


def _exponent(fit: Fit, frame: pd.DataFrame, name: str, group: str | None) -> Array | None:
    for key in (name, f"{name}[{group}]"):
        if key in frame:
            return frame[key].to_numpy(np.float64)
    return None


def _check_place(params: float, tokens: float) -> None:
    if not (np.isfinite(params) and params > 0 and np.isfinite(tokens) and tokens > 0):
        raise ConfigError(f"rates need a positive number of params and tokens, not {params} and {tokens}")

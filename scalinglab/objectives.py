"""What a fit minimises: the sum over rows of w * rho(residual), on log loss by default.

The choice is part of the estimand, so it is a value with a name, never a flag: `Gaussian()` is the default, `Robust()`
guards against heavy tails, `Huber(1e-3)` and `Huber(1e-4)` reproduce published fits, `StudentT()` is the likelihood with
heavy tails. All are sums, never means: an averaged loss stops optimisers early (Besiroglu et al. 2024, arXiv:2404.10102).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError

Array = NDArray[np.float64]
On = Literal["log_loss", "loss"]
Take = Callable[[tuple[int, ...]], Array]  # where temporaries come from: np.empty, or a reused buffer (blocks.Scratch)
MAD_TO_SD = 1.4826022185056018  # 1 / Phi^-1(3/4): the MAD of a normal sample times this estimates its SD


@dataclass(frozen=True)
class Gaussian:
    """Half the weighted sum of squares: maximum likelihood under normal errors on log loss (or on loss).

    `variance` chooses the weights: "auto" estimates how the seed variance changes with the loss where the runs hold at
    least 12 replicate degrees of freedom (statistics: feasible generalised least squares) and is constant otherwise;
    "constant" never weights; a number p weights by loss**(-2 p).
    """

    on: On = "log_loss"
    variance: Literal["auto", "constant"] | float = "auto"
    likelihood: ClassVar[bool] = True
    needs_scale: ClassVar[bool] = False

    # `terms` returns rho, its derivative psi and its second derivative (None: 1) at residuals r [R, n]; `scale` [R, 1].

    @property
    def label(self) -> str:
        return "gaussian" if self.on == "log_loss" else "gaussian:loss"

    def terms(self, r: Array, scale: Array, take: Take = np.empty) -> tuple[Array, Array, Array | None]:
        value = np.multiply(r, r, out=take(r.shape))
        value *= 0.5
        return value, r, None

    def scale(self, r: Array, w: Array) -> Array:
        return np.ones((len(r), 1))


@dataclass(frozen=True)
class Huber:
    """Huber's loss with a fixed threshold `delta`, summed: quadratic inside, linear outside.

    delta = 1e-3 on log loss is Hoffmann et al. 2022 and Besiroglu et al. 2024, 1e-4 is Gemstones. With seed noise of
    .005 on log loss this is close to least absolute deviations: a convention for reproducing papers, not a likelihood.
    """

    delta: float = 1e-3
    on: On = "log_loss"
    likelihood: ClassVar[bool] = False
    needs_scale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (np.isfinite(self.delta) and self.delta > 0):
            raise ConfigError(f"Huber's delta is {self.delta!r}; give a positive number such as 1e-3")

    @property
    def label(self) -> str:
        return f"huber:{self.delta:g}" + ("" if self.on == "log_loss" else ":loss")

    def terms(self, r: Array, scale: Array, take: Take = np.empty) -> tuple[Array, Array, Array | None]:
        return _huber(r, self.delta, take)

    def scale(self, r: Array, w: Array) -> Array:
        return np.ones((len(r), 1))


@dataclass(frozen=True)
class Robust:
    """Huber's loss on residuals standardised by their MAD; `tuning` 1.345 keeps 95 % efficiency under normal errors."""

    tuning: float = 1.345
    on: On = "log_loss"
    likelihood: ClassVar[bool] = False
    needs_scale: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "robust" if self.on == "log_loss" else "robust:loss"

    def terms(self, r: Array, scale: Array, take: Take = np.empty) -> tuple[Array, Array, Array | None]:
        return _huber(r, self.tuning * scale, take)

    def scale(self, r: Array, w: Array) -> Array:
        return MAD_TO_SD * _weighted_median(np.abs(r), w)


@dataclass(frozen=True)
class StudentT:
    """Negative log-likelihood (up to a constant) of Student-t errors with `df` degrees of freedom and a fitted scale."""

    df: float = 4.0
    on: On = "log_loss"
    likelihood: ClassVar[bool] = True
    needs_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (np.isfinite(self.df) and self.df > 0):
            raise ConfigError(f"StudentT's df is {self.df!r}; give a positive number such as 4")

    @property
    def label(self) -> str:
        return "student" if self.df == 4 and self.on == "log_loss" else f"student:{self.df:g}"

    def terms(self, r: Array, scale: Array, take: Take = np.empty) -> tuple[Array, Array, Array | None]:
        nu = self.df
        c = nu * scale * scale
        q = c + r * r
        return 0.5 * (nu + 1) * np.log1p(r * r / c) + np.log(scale), (nu + 1) * r / q, (nu + 1) * (c - r * r) / (q * q)

    def scale(self, r: Array, w: Array) -> Array:
        s2 = (MAD_TO_SD * _weighted_median(np.abs(r), w)) ** 2 + 1e-300
        total = w.sum(-1, keepdims=True)
        for _ in range(50):  # EM for the scale at fixed residuals; it contracts by about 1 / (1 + df) a step
            s2 = (w * (self.df + 1) * r * r / (self.df + r * r / s2)).sum(-1, keepdims=True) / total + 1e-300
        return np.sqrt(s2)


Objective = Gaussian | Huber | Robust | StudentT


def parse_objective(text: str) -> Objective:
    """Objective from its CLI name: gaussian, robust, huber:1e-3, student, student:3, each also with ':loss'.

    Raises
    ------
    ConfigError
        Any other text; the message lists the names.
    """
    name, *rest = text.strip().lower().split(":")
    on: On = "log_loss"
    if rest and rest[-1] in ("loss", "log_loss"):
        on = "loss" if rest.pop() == "loss" else "log_loss"
    try:
        match name, rest:
            case "gaussian", []:
                return Gaussian(on=on)
            case "gaussian", [p]:
                return Gaussian(on=on, variance="constant" if p == "constant" else float(p))
            case "robust", []:
                return Robust(on=on)
            case "huber", []:
                return Huber(on=on)
            case "huber", [d]:
                return Huber(float(d), on=on)
            case "student", []:
                return StudentT(on=on)
            case "student", [d]:
                return StudentT(float(d), on=on)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
    raise ConfigError(
        f"objective {text!r} is not known: use gaussian, robust, huber:1e-3 or student (add ':loss' for raw loss)"
    )


def _huber(r: Array, delta: float | Array, take: Take) -> tuple[Array, Array, Array]:
    psi = np.clip(r, -delta, delta, out=take(r.shape))
    curvature = np.equal(psi, r, out=take(r.shape))  # 0.0 or 1.0
    value = np.multiply(psi, -0.5, out=take(r.shape))
    value += r
    value *= psi
    return value, psi, curvature


def _weighted_median(a: Array, w: Array) -> Array:
    """Row-wise weighted median of a [R, n] with weights [R, n] or [n] -> [R, 1]."""
    order = np.argsort(a, axis=-1)
    ws = np.take_along_axis(np.broadcast_to(w, a.shape), order, -1)
    cum = np.cumsum(ws, -1)
    k = (cum >= 0.5 * cum[:, -1:]).argmax(-1)[:, None]
    return np.take_along_axis(np.take_along_axis(a, order, -1), k, -1)

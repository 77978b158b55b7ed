"""Looking more than once: group-sequential boundaries by spending alpha, from a recursion over the looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.quadrature import legendre
from scalinglab.hypotheses.result import HypothesisTest

Array = NDArray[np.float64]
Spending = Literal["obrien_fleming", "pocock", "obrien_fleming_fixed", "pocock_fixed"]

_NODES = 160  # Gauss-Legendre nodes per look; boundaries to 1e-6
_FURTHEST = 9.0  # a |z| beyond which nothing is spent


@dataclass(frozen=True)
class Looks:
    """A plan of looks. fraction [k] : share of the information at each look. z [k] : two-sided boundary.

    nominal [k] : the two-sided p that a look must reach. spent [k] : alpha used up to it.
    """

    fraction: Array
    z: Array
    nominal: Array
    spent: Array
    alpha: float
    spending: str

    def to_frame(self) -> pd.DataFrame:
        """One row per look."""
        return pd.DataFrame(
            {"fraction": self.fraction, "z": self.z, "nominal_p": self.nominal, "alpha_spent": self.spent},
            index=pd.RangeIndex(1, len(self.z) + 1, name="look"),
        )

    def power(self, drift: float) -> float:
        """Probability of rejecting at some look when the final z has this mean (either side counts)."""
        return float(_crossing(self.fraction, self.z, drift).sum())


def looks(fraction: Sequence[float] | int, *, spending: Spending = "obrien_fleming", alpha: float = 0.05) -> Looks:
    """Boundaries of planned looks that keep the two-sided size at alpha.

    Parameters
    ----------
    fraction
        Shares of the information (runs so far / runs planned), rising to 1; a number means equally spaced looks.
    spending
        "obrien_fleming", "pocock": spending functions of Lan & DeMets (1983), per side, good for unequal looks.
        "obrien_fleming_fixed", "pocock_fixed": the constants of the classical tables (equally spaced looks).

    Raises
    ------
    ConfigError
        Fractions that don't rise to 1, alpha outside (0, 1), an unknown rule.
    """
    t = np.arange(1, fraction + 1) / fraction if isinstance(fraction, int) and fraction > 0 else np.atleast_1d(fraction)
    t = np.asarray(t, dtype=np.float64)
    if t.ndim != 1 or not (t > 0).all() or (np.diff(t) <= 0).any() or abs(t[-1] - 1) > 1e-12:
        raise ConfigError(
            f"fraction={fraction!r}: give shares of the information that rise to 1, e.g. [0.5, 1], or a number"
        )
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha is {alpha!r}: give a size between 0 and 1")
    from scipy.special import ndtr, ndtri

    if spending in ("obrien_fleming_fixed", "pocock_fixed"):
        if not np.allclose(np.diff(t, prepend=0), t[0]):
            raise ConfigError(f"{spending!r} is for equally spaced looks: use the spending function for others")
        z = _constant_boundary(t, alpha, 0.5 if spending.startswith("o") else 0.0)
        spent = np.cumsum(_crossing(t, z, 0.0))
    elif spending in ("obrien_fleming", "pocock"):
        if spending == "obrien_fleming":
            spent = 4 * ndtr(ndtri(alpha / 4) / np.sqrt(t))
        else:
            spent = alpha * np.log1p((math.e - 1) * t)
        z = _spending_boundary(t, spent)
    else:
        raise ConfigError(f"spending {spending!r} is not known: use obrien_fleming, pocock or either with _fixed")
    return Looks(t, z, 2 * ndtr(-z), spent, alpha, spending)


def sequential(plan: Looks, p_values: Sequence[float], *, n_runs: int = 0) -> HypothesisTest:
    """Decision after the looks taken so far, from their two-sided p-values (each by the test of the final analysis).

    The p of a t test stands in for that of a z (significance-level approach): looks at fewer than about 10 degrees of freedom
    are approximate. The decision refers to the first look that crosses; what comes later is not used.

    Raises
    ------
    ConfigError
        More p-values than looks, none, or a p outside [0, 1].
    """
    p = np.asarray(p_values, dtype=np.float64)
    if not 1 <= len(p) <= len(plan.z):
        raise ConfigError(f"{len(p)} p-values for a plan of {len(plan.z)} looks: looks can't be added; make a new plan")
    if not ((p >= 0) & (p <= 1)).all():
        raise ConfigError("p-values lie between 0 and 1")
    hit = np.flatnonzero(p <= plan.nominal[: len(p)])
    k = int(hit[0]) if len(hit) else len(p) - 1
    last = len(p) == len(plan.z)
    if len(hit):
        decision = f"found at look {k + 1}: p = {p[k]:.3g} is at most {plan.nominal[k]:.3g}"
    elif last:
        decision = f"unresolved after all {len(p)} looks: p = {p[k]:.3g} is above {plan.nominal[k]:.3g}"
    else:
        decision = f"go on: p = {p[k]:.3g} at look {k + 1} is above {plan.nominal[k]:.3g}; the next bar is {plan.nominal[k + 1]:.3g}"
    return HypothesisTest(
        f"look {k + 1} of {len(plan.z)}", "no effect in the primary estimand", float(p[k]), decision, float(plan.nominal[k]),
        method=f"alpha spending, {plan.spending}, overall {plan.alpha:g}", n_runs=n_runs,
        assumptions=("looks and their number were planned", "p-values of a look behave as those of a z statistic"),
        diagnostics={"alpha spent": float(plan.spent[k]), "information": float(plan.fraction[k])},
    )  # fmt: skip


def _crossing(t: Array, z: Array, drift: float) -> Array:
    """Probability of first crossing |Z_k| >= z_k at each look, Z of a Brownian motion with drift (Armitage et al. 1969)."""
    from scipy.special import ndtr

    out = np.empty(len(t))
    path = None  # nodes of B at the last look, and density x weight there
    for k in range(len(t)):
        edge = z[k] * math.sqrt(t[k])
        dt = t[k] - (t[k - 1] if k else 0.0)
        s, m = math.sqrt(dt), drift * dt
        b, mass = path if path is not None else (np.zeros(1), np.ones(1))
        out[k] = float(mass @ (ndtr((-edge - b - m) / s) + ndtr(-(edge - b - m) / s)))
        path = _stay(b, mass, edge, s, m)
    return out


def _stay(b: Array, mass: Array, edge: float, s: float, m: float) -> tuple[Array, Array]:
    """Nodes inside (-edge, edge) and the probability mass of paths that stayed there."""
    u, w = legendre(_NODES)
    node = edge * u
    density = np.exp(-0.5 * ((node[:, None] - b[None] - m) / s) ** 2) / (s * math.sqrt(2 * math.pi)) @ mass
    return node, density * w * edge


def _spending_boundary(t: Array, spent: Array) -> Array:
    from scipy.optimize import brentq
    from scipy.special import ndtr

    z = np.empty(len(t))
    b, mass = np.zeros(1), np.ones(1)
    for k in range(len(t)):
        dt = t[k] - (t[k - 1] if k else 0.0)
        s, root = math.sqrt(dt), math.sqrt(t[k])
        wanted = spent[k] - (spent[k - 1] if k else 0.0)

        def excess(
            c: float, b: Array = b, mass: Array = mass, s: float = s, root: float = root, wanted: float = wanted
        ) -> float:
            edge = c * root
            return float(mass @ (ndtr((-edge - b) / s) + ndtr(-(edge - b) / s))) - wanted

        z[k] = _FURTHEST if excess(_FURTHEST) > 0 else brentq(excess, 0.0, _FURTHEST, xtol=1e-12)
        b, mass = _stay(b, mass, z[k] * root, s, 0.0)
    return z


def _constant_boundary(t: Array, alpha: float, power: float) -> Array:
    from scipy.optimize import brentq

    shape = t**-power
    return np.asarray(shape * brentq(lambda c: _crossing(t, c * shape, 0.0).sum() - alpha, 0.1, _FURTHEST, xtol=1e-10))

"""Depth gains and their differences as linear contrasts of shapes, with an error that counts what shapes miss a line by.

With G = -d loss / d ln depth (nats per e-fold of depth), by least squares over the shapes that all arms of a contrast share:

    U = G(ref, naive, tuned)  - G(ref, naive, fixed)      learning rate not set again at each depth
    V = G(ref, scaled, tuned) - G(ref, naive, tuned)      parametrization beyond the learning rate
    W = G(arch, scaled, tuned) - G(ref, scaled, tuned)    architecture, each at its best
    M = U + V

so that G(arch, scaled, tuned) - G(ref, naive, fixed) = U + V + W. The variance of a contrast w is w' S w + tau^2 w'w: S from
the bootstrap of the curves, tau^2 (shapes that lie off the line) from what lines through the tuned losses leave, pooled over
arms, with its degrees of freedom. What a shape misses its line by in all arms alike cancels in a contrast of two arms, so that
for these only what arms miss apart from each other counts (`apart`): losses bend in ln depth, and bend alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.misscaling.intake import Arm

Array: TypeAlias = NDArray[np.float64]

_KNOWN = 1e6  # degrees of freedom of a variance that is given


@dataclass(frozen=True)
class Roles:
    """Which arms play which part; None where the runs have none. scaled_of : scaled arm of each candidate."""

    naive: Arm | None
    scaled: Arm | None
    candidates: tuple[str, ...]
    scaled_of: Mapping[str, Arm]
    naive_of: Mapping[str, Arm]

    @property
    def compared(self) -> tuple[Arm, ...]:
        """Arms of any contrast."""
        own = [self.naive, self.scaled, *self.scaled_of.values(), *self.naive_of.values()]
        return tuple(dict.fromkeys(a for a in own if a is not None))


@dataclass(frozen=True)
class Slopes:
    """Weights of depth slopes. weights[arm] [C]; residual [C, C] : projects on what lines leave; df : its rank."""

    weights: Mapping[Any, Array]
    residual: Array
    df: int


@dataclass(frozen=True)
class Estimate:
    """One contrast for every trial: arrays of one shape []. p : two-sided, against 0."""

    estimate: Array
    se: Array
    df: Array

    def p(self) -> Array:
        """Two-sided p against 0; 1 where there is no error."""
        from scipy.special import stdtr

        with np.errstate(invalid="ignore", divide="ignore"):
            p = 2 * stdtr(self.df, -np.abs(self.estimate / self.se))
        return np.where(np.isfinite(p), p, 1.0)

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Limits of a two-sided interval."""
        from scipy.special import stdtrit

        half = stdtrit(np.maximum(self.df, 1e-3), 0.5 + level / 2) * self.se
        return self.estimate - half, self.estimate + half


def slopes(cells: pd.DataFrame, arms: tuple[Arm, ...], usable: NDArray[np.bool_], *, together: bool = True) -> Slopes:
    """Least-squares slopes on ln depth with an intercept per ladder, for each arm.

    Parameters
    ----------
    cells : of `Grids`. arms : those that get a slope. usable [C].
    together : only shapes (ladder and depth) that all arms have, so that contrasts are between equal designs.
    """
    C = len(cells)
    names = list(zip(cells["architecture"], cells["parametrization"], strict=True))
    spot = list(zip(cells["ladder"], cells["depth"], strict=True))
    own = {a: [i for i in range(C) if names[i] == a and usable[i]] for a in arms}
    if together and arms:
        shared = set.intersection(*({spot[i] for i in rows} for rows in own.values()))
        own = {a: [i for i in rows if spot[i] in shared] for a, rows in own.items()}
    x = cells["x"].to_numpy(np.float64)
    weights: dict[Arm, Array] = {}
    residual, df = np.zeros((C, C)), 0
    for a, rows in own.items():
        ladders = sorted({spot[i][0] for i in rows})
        X = (
            np.column_stack([*([[float(spot[i][0] == name) for i in rows] for name in ladders]), x[rows]])
            if rows
            else np.zeros((0, 0))
        )
        w = np.zeros(C)
        if len(rows) and np.linalg.matrix_rank(X) == X.shape[1] and X.shape[1] == len(ladders) + 1:
            H = np.linalg.pinv(X)
            w[rows] = H[-1]
            residual[np.ix_(rows, rows)] = np.eye(len(rows)) - X @ H
            df += len(rows) - X.shape[1]
            weights[a] = w
    return Slopes(weights, residual, df)


def apart(made: Slopes, cells: pd.DataFrame) -> Slopes:
    """The same weights with the residual of contrasts between arms: shape effects that all arms share are taken out.

    The arms of `slopes` have the same shapes, so that this is the projector (I - 1/A) x (I - H) on A arms. One arm alone is
    left as it is.
    """
    spot = cells["ladder"].astype(str).to_numpy(), cells["depth"].to_numpy(np.float64)
    rows = []
    for w in made.weights.values():
        own = np.flatnonzero((made.residual[w != 0] != 0).any(0) | (w != 0))
        rows.append(own[np.lexsort((spot[1][own], spot[0][own]))])
    A = len(rows)
    if A < 2:
        return made
    residual = np.zeros_like(made.residual)
    line = made.residual[np.ix_(rows[0], rows[0])]
    for i, r in enumerate(rows):
        for j, c in enumerate(rows):
            residual[np.ix_(r, c)] = ((i == j) - 1 / A) * line
    return Slopes(made.weights, residual, made.df * (A - 1) // A)


def spread(
    values: Array,
    cov: Array,
    made: Slopes,
    *,
    floor: Array | float = 0.0,
    fixed: float | None = None,
    overlap: Array | None = None,
) -> tuple[Array, Array, float]:
    """Variance of shapes about their lines beyond the bootstrap's [...], its scale for degrees of freedom, and those.

    values [..., C], cov [..., C, C]. floor : smallest variance (what seeds move whole shapes by). fixed : a SD that is given.
    overlap [C, C] : 1 where two shapes are the same runs; what they miss their lines by is then no second piece of evidence.
    """
    shape = values.shape[:-1]
    if fixed is not None:
        return np.maximum(np.full(shape, fixed**2), floor), np.zeros(shape), _KNOWN
    if made.df < 1:
        return np.full(shape, np.nan), np.full(shape, np.nan), 0.0
    rows = np.flatnonzero(np.diag(made.residual) > 0)  # shapes that are in no line may be NaN
    M, v, S = made.residual[np.ix_(rows, rows)], values[..., rows], cov[..., rows[:, None], rows]
    found = np.einsum("...c,cd,...d->...", v, M, v) / made.df
    known = np.einsum("cd,...dc->...", M, S) / made.df
    tau2 = np.maximum(found - known, floor)
    if overlap is None:
        return tau2, np.maximum(found, known + tau2), float(made.df)
    own = M @ overlap[np.ix_(rows, rows)]
    squares = float(np.trace(own @ own))  # 0 where all arms are the same runs
    return tau2, np.maximum(found, known + tau2), float(np.trace(own)) ** 2 / squares if squares > 1e-12 else 0.0


def contrast(
    values: Array,
    cov: Array,
    weights: Array,
    cell_weights: Array,
    tau2: Array,
    scale: Array,
    df: float,
    noise_df: float = _KNOWN,
) -> Estimate:
    """A linear contrast of readings [..., K] with its error.

    weights [K]; cell_weights [C] : the same summed over readings of a shape, on which tau^2 acts. tau2, scale, df : of
    `spread`. noise_df : degrees of freedom of cov.
    """
    rows = np.flatnonzero(weights)
    w = weights[rows]
    estimate = values[..., rows] @ w
    own = np.einsum("k,...kl,l->...", w, cov[..., rows[:, None], rows], w)
    B = float(cell_weights @ cell_weights)
    variance = own + (tau2 * B if B > 1e-18 else 0.0)
    # Two independent parts of the variance, each known to its own degrees of freedom (Satterthwaite).
    pooled = np.minimum(B * scale, variance) if 1 <= df < _KNOWN else np.zeros_like(variance)
    extra = np.maximum(variance - pooled, 0.0)
    doubt = extra**2 / max(noise_df, 1.0) + pooled**2 / max(df, 1.0)
    freedom = np.minimum(variance**2 / np.maximum(doubt, 1e-300), _KNOWN)
    if df < 1 and B > 1e-18:
        variance = np.full(variance.shape, np.nan)
    return Estimate(estimate, np.sqrt(np.maximum(variance, 0.0)), freedom)


def terms(made: Slopes, roles: Roles) -> dict[str, tuple[Array, Array]]:
    """Contrasts by name: weights on tuned and on fixed losses [C] each.

    Names: U, V, M, and for candidate a W:a, gap:a (naive, at fixed rates), M_own:a (U + V of the candidate), and three_way:a,
    the architecture by recipe by depth contrast W - gap = M_own - M, up to sign.
    """
    out: dict[str, tuple[Array, Array]] = {}
    w = made.weights
    zero = np.zeros(made.residual.shape[0])
    naive = w.get(roles.naive) if roles.naive else None
    scaled = w.get(roles.scaled) if roles.scaled else None
    if naive is not None:
        out["U"] = (-naive, naive)
    if naive is not None and scaled is not None:
        out["V"] = (naive - scaled, zero)
        out["M"] = (-scaled, naive)
    for a in roles.candidates:
        own, plain = w.get(roles.scaled_of.get(a, ("", ""))), w.get(roles.naive_of.get(a, ("", "")))
        if own is not None and scaled is not None:
            out[f"W:{a}"] = (scaled - own, zero)
        if plain is not None and naive is not None:
            out[f"gap:{a}"] = (zero, naive - plain)
        if own is not None and plain is not None:
            out[f"M_own:{a}"] = (-own, plain)
            if scaled is not None and naive is not None:
                out[f"three_way:{a}"] = (scaled - own, plain - naive)
    return out

"""How far optima and losses move when the runs are drawn again: noise of the runs, and a bootstrap of the whole fit.

The noise of a run is what its loss differs from the fitted curve by, less what all learning rates of one seed and shape have in
common (that moves no optimum; it is part of what shapes miss the line by). With ten seeds or more whole seeds are redrawn, for
all arms and learning rates at once. With few, a bootstrap of seeds has few distinct draws (three with two seeds) and tells
a variance on S - 1 degrees of freedom, so that the residuals of all runs are redrawn instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.misscaling.curves import Curves, Model, fit_curves, interpolate

Array: TypeAlias = NDArray[np.float64]
Resample: TypeAlias = Literal["auto", "seeds", "residuals"]

ENOUGH_SEEDS = 10  # fewer tell a variance worse than the residuals of all runs together
_PARAMETERS = {"shared": 3, "cubic": 4, "quadratic": 3}


@dataclass(frozen=True)
class Noise:
    """sigma [...] : SD of a run (nats), on `df` degrees of freedom. row [...] : SD of what a seed moves a whole shape by.

    residuals [..., C, J, S] : what `sigma` was computed from; NaN where there is no run in the window.
    """

    sigma: Array
    df: int | NDArray[np.intp]
    row: Array
    residuals: Array


def run_noise(loss: Array, z: Array, curves: Curves, *, model: Model, groups: int) -> Noise:
    """Noise of runs about fitted curves.

    loss [..., C, J, S], z [C, J]. groups : number of shared cubic terms.
    """
    x = np.where(np.isfinite(z), z - curves.centre[:, None], 0.0)
    b = curves.coefficients[..., None, :]
    line = b[..., 0] + x * (b[..., 1] + x * (b[..., 2] + x * b[..., 3]))
    keep = curves.used[..., None] & np.isfinite(loss) & curves.usable[..., None, None]
    e = np.where(keep, np.where(keep, loss, 0.0) - line[..., None], 0.0)
    runs = keep.sum((-2, -1))  # [..., C]
    per_row = keep.sum(-2)  # [..., C, S]
    rows = (per_row > 0).sum(-1)
    row = e.sum(-2) / np.maximum(per_row, 1)
    e = np.where(keep, e - row[..., None, :], np.nan)
    df = np.where(runs > 0, runs - _PARAMETERS[model] - np.maximum(rows - 1, 0), 0).sum(-1)
    df = df - (groups if model == "shared" else 0)
    sigma2 = np.nansum(e * e, (-3, -2, -1)) / np.maximum(df, 1)
    sigma = np.where(df > 0, np.sqrt(sigma2), np.nan)
    return Noise(sigma, df, _row_sd(row, per_row, sigma2), e)


@dataclass(frozen=True)
class Draws:
    """mean [B, C, J] : mean losses. count [B, C, J] or [C, J] : seeds. how : in words. df : of a variance over draws.
    inflate : factor on it, S / (S - 1) where S seeds are redrawn."""

    mean: Array
    count: Array
    how: str
    df: float
    inflate: float

    @property
    def whole_seeds(self) -> bool:
        """Whether whole seeds were redrawn, so that what a seed moves a shape by is in the draws."""
        return self.inflate > 1


def draw_means(
    loss: Array, z: Array, curves: Curves, noise: Noise, *, draws: int, rng: np.random.Generator, how: Resample = "auto"
) -> Draws:
    """Bootstrap draws of the mean losses.

    Raises
    ------
    ConfigError
        Seeds are to be redrawn and there is one only.
    """
    S = loss.shape[-1]
    finite = np.isfinite(loss)
    n = finite.sum(-1).astype(np.float64)
    complete = bool((finite.any(1).sum(-1) == S).all()) if len(loss) else False
    if how == "seeds" and S < 2:
        raise ConfigError("resample='seeds' needs two seeds or more; use 'residuals'")
    if how == "seeds" or (how == "auto" and S >= ENOUGH_SEEDS and complete):
        weights = rng.multinomial(S, np.full(S, 1 / S), size=draws).astype(np.float64)
        filled = np.where(finite, loss, 0.0)
        count = np.einsum("bs,cjs->bcj", weights, finite.astype(np.float64))
        total = np.einsum("bs,cjs->bcj", weights, filled)
        lost = np.einsum("bs,cjs->bcj", weights, np.isposinf(loss).astype(np.float64)) > 0
        mean = np.where(count > 0, total / np.maximum(count, 1e-300), np.inf)
        told = f"bootstrap of {S} seeds, {draws} draws"
        return Draws(np.where(lost, np.inf, mean), count, told, S - 1.0, S / (S - 1.0))
    pool = noise.residuals[np.isfinite(noise.residuals)]
    pool = pool * np.sqrt(len(pool) / max(int(np.max(noise.df)), 1)) if len(pool) else np.zeros(1)
    base = expected(loss, z, curves)
    e = np.zeros((draws, *n.shape))
    for s in range(S):  # one seed at a time: the sum over seeds needs no axis of its own
        e += np.where(finite[..., s], rng.choice(pool, size=e.shape), 0.0)
    told = f"bootstrap of pooled residuals ({S} seed{'s' if S > 1 else ''}), {draws} draws"
    return Draws(base + e / np.maximum(n, 1), n, told, float(np.max(noise.df)), 1.0)


def expected(loss: Array, z: Array, curves: Curves) -> Array:
    """Mean losses with the noise taken out where a curve was fitted [..., C, J]; +inf where a run diverged."""
    tried = ~np.isnan(loss)
    count = np.maximum(tried.sum(-1), 1)
    mean = np.where(tried.any(-1), np.nansum(loss, -1) / count, np.inf)
    x = np.where(np.isfinite(z), z - curves.centre[:, None], 0.0)
    b = curves.coefficients[..., None, :]
    line = b[..., 0] + x * (b[..., 1] + x * (b[..., 2] + x * b[..., 3]))
    return np.where(curves.used & curves.usable[..., None], line, mean)


@dataclass(frozen=True)
class Readings:
    """What is read off the curves, [..., C] each: ln optimal lr, loss there, loss at the optimum of the smallest depth
    (`fixed`), and loss at the optimum of the reference arm at the same depth (`shared`)."""

    optimum: Array
    tuned: Array
    fixed: Array
    shared: Array

    def stacked(self) -> Array:
        """[..., 4 C] in that order."""
        return np.concatenate([self.optimum, self.tuned, self.fixed, self.shared], -1)


def read_curves(
    curves: Curves,
    z: Array,
    y: Array,
    base: NDArray[np.intp],
    reference: NDArray[np.intp],
    cap: Array,
    *,
    point: Curves,
) -> Readings:
    """Readings of fitted curves.

    base, reference [C] : the cell of the smallest depth of the arm's ladder, and the reference arm's cell; -1 for none.
    cap [C] : loss that stands for one that diverged (the worst finite loss of the shape): a lower bound.
    point : the curves of the data, which decide where a curve is read and where its grid is interpolated.
    """

    def at(index: NDArray[np.intp]) -> Array:
        known = index >= 0
        place = np.where(known, curves.optimum[..., index], np.nan)
        centre = np.where(known, point.optimum[..., index], np.nan)
        inside = (centre >= point.low) & (centre <= point.high)
        somewhere = np.isfinite(place)  # a parabola without a minimum has it nowhere
        read = np.where(somewhere, curves.at(np.where(somewhere, place, 0.0)), np.nan)
        outside = interpolate(z, y, np.where(np.isfinite(place), place, -1e9))
        out = np.where(inside, read, np.where(np.isposinf(outside), cap, outside))
        return np.where(known, out, np.nan)

    return Readings(curves.optimum, curves.minimum, at(base), at(reference))


def refit(y: Array, n: Array, z: Array, point: Curves, *, model: Model, groups: NDArray[np.intp]) -> Curves:
    """Curves of bootstrap draws, in the window of the data."""
    used = point.used & (n > 0) & np.isfinite(y)
    return fit_curves(z, np.where(np.isfinite(y), y, np.inf), n, model=model, groups=groups, used=used)


def _row_sd(row: Array, per_row: NDArray[np.intp], sigma2: Array) -> Array:
    """SD of shape-by-seed effects: what seeds differ by within a shape, less what they differ by everywhere."""
    there = per_row > 0
    complete = there.all((-2, -1))
    S, C = row.shape[-1], row.shape[-2]
    if S < 2:
        return np.zeros(row.shape[:-2])
    within = row - row.mean(-1, keepdims=True)
    apart = within - within.mean(-2, keepdims=True)
    full = (apart**2).sum((-2, -1)) / max(1, (C - 1) * (S - 1))
    n = np.maximum(there.sum(-1, keepdims=True), 1)
    own = np.where(there, row - np.where(there, row, 0.0).sum(-1, keepdims=True) / n, 0.0)
    some = (own**2).sum((-2, -1)) / np.maximum((there.sum(-1) - 1).clip(0).sum(-1), 1)
    found = np.where(complete, full, some) - sigma2 / np.maximum(per_row.mean((-2, -1)), 1)
    return np.asarray(np.sqrt(np.maximum(found, 0.0)))

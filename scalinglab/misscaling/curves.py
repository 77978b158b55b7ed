"""Loss against ln learning rate, fitted in closed form for all shapes and all bootstrap draws at once.

    loss = b0 + b1 z + b2 z^2 + b3 z^3,   z = ln lr - centre of the shape,   over a window of losses near the best

`cubic` gives every shape its own b3, `shared` one b3 to all shapes of an arm (it does not depend on the centre), `quadratic`
none. A plain quadratic puts the optimum too low, since losses rise faster above it than below: by .11 to .14 in ln lr on
the grids of Li et al. 2025 (arXiv:2503.04715).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Model: TypeAlias = Literal["shared", "cubic", "quadratic"]

WINDOW = 0.07  # nats above the best: wide enough for five learning rates a factor 2 apart, narrow enough for a cubic
SIDES = 2  # learning rates tried on each side of the best one
STATUS = ("interior", "boundary", "one-sided", "too few", "no optimum", "diverged")
_WIDEST = 2.0  # windows
_LEAST = {"shared": 4, "cubic": 5, "quadratic": 4}  # learning rates in the window


@dataclass(frozen=True)
class Curves:
    """Fitted curves of C shapes, with any leading axes for draws or trials.

    coefficients [..., C, 4] : b0 to b3. centre [C]. used [..., C, J] : points in the window.
    optimum, minimum, curvature [..., C] : ln lr, nats, nats per (ln lr)^2 (half the second derivative) at the vertex.
    status [..., C] : position in `STATUS`. low, high [..., C] : ends of the window in ln lr.
    """

    coefficients: Array
    centre: Array
    used: Mask
    optimum: Array
    minimum: Array
    curvature: Array
    status: NDArray[np.intp]
    low: Array
    high: Array

    @property
    def usable(self) -> Mask:
        """Whether the optimum lies inside what was tried [..., C]."""
        return self.status == 0

    def at(self, z: Array) -> Array:
        """Loss at ln learning rates z [..., C]."""
        return evaluate(self.coefficients, z - self.centre)

    def take(self, cells: NDArray[np.intp]) -> Curves:
        """The curves of these shapes, in this order and as often as they are named."""
        c = cells
        return Curves(
            self.coefficients[..., c, :], self.centre[c], self.used[..., c, :], self.optimum[..., c], self.minimum[..., c],
            self.curvature[..., c], self.status[..., c], self.low[..., c], self.high[..., c],
        )  # fmt: skip


def fit_curves(
    z: Array,
    y: Array,
    n: Array,
    *,
    model: Model = "shared",
    window: float = WINDOW,
    sides: int = SIDES,
    groups: NDArray[np.intp] | None = None,
    used: Mask | None = None,
) -> Curves:
    """Fit all curves.

    Parameters
    ----------
    z [C, J] : ln learning rates, increasing; NaN where a shape has fewer.
    y [..., C, J] : mean loss over seeds (nats per token); +inf where a run diverged.
    n [C, J] or [..., C, J] : weights, the number of seeds; 0 where there is none.
    window : nats above the best mean loss within which a point is fitted; a steep curve's is widened, at most twice, to hold
        the learning rates that the model needs.
    sides : how many learning rates must have been tried on each side of the best (diverged ones count: they bracket).
    groups [C] : shapes that share b3 under `shared`; all of them by default.
    used : points to fit, where the window was chosen before (bootstrap draws).

    Raises
    ------
    ConfigError
        Another model, or a window that is not positive.
    """
    if model not in _LEAST:
        raise ConfigError(f"model={model!r} of the learning-rate curve is unknown; choose one of {', '.join(_LEAST)}")
    if not window > 0 or sides < 0:
        raise ConfigError(f"window={window} must be positive (nats, e.g. {WINDOW}) and sides={sides} not negative")
    tried = np.isfinite(z) & (n > 0)
    filled = np.where(tried, y, np.inf)
    best = filled.min(-1)
    lost = ~np.isfinite(best)
    if used is None:
        least = min(_LEAST[model], z.shape[-1]) - 1
        with np.errstate(invalid="ignore"):
            reach = np.nan_to_num(np.partition(filled, least, -1)[..., least] - best, nan=0.0, posinf=0.0)
            reach = np.clip(np.where(reach <= _WIDEST * window, reach, 0.0), window, None)
        used = tried & np.isfinite(filled) & (filled <= np.where(lost, 0.0, best + reach)[..., None] + 1e-12)
    weight = np.where(used, n, 0.0)
    centre = np.nanmean(np.where(np.isfinite(z), z, np.nan), -1)
    x = np.where(np.isfinite(z), z - centre[:, None], 0.0)
    few = used.sum(-1) < _LEAST[model]
    b = _least_squares(x, np.where(used, y, 0.0), weight, model, groups, few)
    optimum, curvature = vertex(b)
    low = np.where(used, x, np.inf).min(-1)
    high = np.where(used, x, -np.inf).max(-1)
    below, above = _bracket(filled, tried)
    inside = (optimum >= low) & (optimum <= high) & (curvature > 0)
    status = np.select(
        [lost, (below == 0) | (above == 0), (below < sides) | (above < sides), few, ~inside], [5, 1, 2, 3, 4], 0
    )
    minimum = evaluate(b, np.where(np.isfinite(optimum), optimum, 0.0))
    bad = ~np.isfinite(optimum)
    return Curves(
        b,
        centre,
        used,
        optimum + centre,
        np.where(bad, np.nan, minimum),
        curvature,
        status,
        low + centre,
        high + centre,
    )


def within_window(curves: Curves) -> Curves:
    """The same curves with every optimum held inside its window.

    For draws: one in which the curve has its minimum far off, or none, would otherwise decide the variance alone.
    """
    ends = np.stack([curves.at(curves.low), curves.at(curves.high)])
    better = np.where(ends[0] <= ends[1], curves.low, curves.high)
    sound = np.isfinite(curves.optimum) & (curves.curvature > 0)
    optimum = np.where(sound, np.clip(curves.optimum, curves.low, curves.high), better)
    usable = np.isfinite(curves.low)
    with np.errstate(invalid="ignore"):
        minimum = np.where(usable, curves.at(np.where(usable, optimum, 0.0)), np.nan)
    return replace(curves, optimum=np.where(usable, optimum, np.nan), minimum=minimum)


def evaluate(coefficients: Array, x: Array) -> Array:
    """The polynomial [..., 4] at x [...]."""
    b0, b1, b2, b3 = np.moveaxis(coefficients, -1, 0)
    return np.asarray(b0 + x * (b1 + x * (b2 + x * b3)))


def vertex(coefficients: Array) -> tuple[Array, Array]:
    """Minimum of the polynomial, and half its second derivative there; NaN where it has none."""
    _, b1, b2, b3 = np.moveaxis(coefficients, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        root = np.sqrt(b2 * b2 - 3 * b3 * b1)
        at = -b1 / (b2 + root)  # the form that is -b1 / (2 b2) without a cubic term
        return np.asarray(at), np.asarray(b2 + 3 * b3 * at)


def interpolate(z: Array, y: Array, at: Array) -> Array:
    """Loss at ln learning rates `at` [..., C] by the parabola or cubic through the four finite points nearest to it.

    For places outside the window, where the fitted curve would be extrapolated. +inf where a neighbour diverged, NaN
    outside what was tried.
    """
    tried = np.isfinite(z)
    place = np.where(tried, z, np.inf)
    right = np.clip((place < at[..., None]).sum(-1), 1, np.maximum(tried.sum(-1) - 1, 1))
    start = np.clip(right - 2, 0, np.maximum(tried.sum(-1) - 4, 0))
    index = start[..., None] + np.arange(4)
    index = np.minimum(index, z.shape[-1] - 1)
    zk = np.take_along_axis(np.broadcast_to(place, y.shape), index, -1)
    yk = np.take_along_axis(y, index, -1)
    good = np.isfinite(zk) & np.isfinite(yk)
    good[..., 1:] &= np.diff(index, axis=-1) > 0
    out = np.zeros(at.shape)
    for i in range(4):  # Lagrange over the good ones
        term = np.where(good[..., i], yk[..., i], 0.0)
        for j in range(4):
            if j != i:
                both = good[..., i] & good[..., j]
                gap = np.where(both, zk[..., i] - zk[..., j], 1.0)
                term = term * np.where(both, (at - np.where(good[..., j], zk[..., j], 0.0)) / gap, 1.0)
        out = out + term
    right = np.minimum(right, z.shape[-1] - 1)  # one learning rate has no neighbour
    near = [
        np.take_along_axis(y, np.broadcast_to((right + k)[..., None], (*y.shape[:-1], 1)), -1)[..., 0] for k in (-1, 0)
    ]
    lost = np.isposinf(near[0]) | np.isposinf(near[1])
    outside = (at < np.nanmin(z, -1) - 1e-9) | (at > np.nanmax(z, -1) + 1e-9) | (good.sum(-1) < 2)
    return np.where(outside, np.nan, np.where(lost, np.inf, out))


def _least_squares(
    x: Array, y: Array, w: Array, model: Model, groups: NDArray[np.intp] | None, few: Mask
) -> Array:  # fmt: skip
    degree = 3 if model == "cubic" else 2
    Q = x[..., None] ** np.arange(degree + 1)  # [C, J, p]
    A = _gram(Q, w, few)
    wy = w * y
    right = np.einsum("cja,...cj->...ca", Q, wy)
    b = np.linalg.solve(A, right[..., None])[..., 0]
    if model != "shared":
        return np.asarray(np.concatenate([b, np.zeros((*b.shape[:-1], 3 - degree))], -1))
    cube = x**3
    b_cube = np.linalg.solve(A, np.einsum("cja,...cj->...ca", Q, w * cube)[..., None])[..., 0]
    left = w * (cube - np.einsum("cja,...ca->...cj", Q, b_cube))  # what the parabola leaves of z^3
    top, bottom = (
        np.where(few, 0.0, np.einsum("...cj,...cj->...c", left, v)) for v in (y, np.broadcast_to(cube, y.shape))
    )
    group = np.zeros(x.shape[0], np.intp) if groups is None else groups
    member = (group[:, None] == np.unique(group)[None]).astype(np.float64)  # [C, G]
    total = bottom @ member
    b3 = ((top @ member) / np.where(total > 1e-12, total, 1.0)) @ member.T
    return np.asarray(np.concatenate([b - b3[..., None] * b_cube, b3[..., None]], -1))


def _gram(Q: Array, w: Array, few: Mask) -> Array:
    """Normal matrices [..., C, p, p]; the identity where there are too few points, so that a batch can be solved."""
    p = Q.shape[-1]
    A = np.einsum("cja,...cj,cjb->...cab", Q, w, Q)
    singular = (few | (np.count_nonzero(w, -1) < p))[..., None, None]
    return np.where(singular, np.eye(p), A)


def _bracket(y: Array, tried: Mask) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Learning rates tried below and above the best one."""
    at = y.argmin(-1)[..., None]
    j = np.arange(y.shape[-1])
    return ((j < at) & tried).sum(-1), ((j > at) & tried).sum(-1)

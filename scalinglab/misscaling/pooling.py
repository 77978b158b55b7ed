"""Curvatures of learning-rate curves borrow strength: each is drawn towards the mean of its arm.

A curvature from five learning rates is noisy, and its noise is most of the noise of the fitted minimum. Shapes of one arm have
similar curvatures; how similar is estimated from the data (DerSimonian & Laird 1986), so that curvatures which do differ are
left alone. The step is one of generalised least squares and needs no iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scalinglab.misscaling.curves import Array, Curves, Model, evaluate, vertex


@dataclass(frozen=True)
class Pool:
    """How far each curvature is drawn [..., C] (0: not at all), and its weight in the mean of its arm [..., C]."""

    share: Array
    weight: Array


def pool_curvature(
    curves: Curves,
    z: Array,
    n: Array,
    groups: NDArray[np.intp],
    *,
    model: Model,
    sigma: Array | float,
    pool: Pool | None = None,
) -> tuple[Curves, Pool]:
    """Curves with pooled curvatures, and the pooling, which bootstrap draws take over.

    z, n [..., C, J] as in `fit_curves`. groups [C] : arms. sigma [...] : SD of a run.
    """
    p = 4 if model == "cubic" else 3
    x = np.where(np.isfinite(z), z - curves.centre[:, None], 0.0)
    Q = x[..., None] ** np.arange(p)
    ok = curves.usable & (curves.used.sum(-1) > p)
    A = np.einsum("cja,...cj,cjb->...cab", Q, np.where(curves.used, n, 0.0), Q)
    A = np.where(ok[..., None, None], A, np.eye(p))
    at = np.where(ok, curves.optimum - curves.centre, 0.0)
    a = np.where(ok, curves.curvature, 1.0)
    member = (groups[:, None] == np.unique(groups)[None]).astype(np.float64)
    typical = ((np.where(ok, a, 0.0) @ member) / np.maximum(ok @ member, 1)) @ member.T
    # A draw with hardly any curvature would have its vertex fly off: the derivative is taken at no less than half the usual one.
    g = _gradient(curves.coefficients, at, np.maximum(a, 0.5 * typical), p)
    Ag = np.linalg.solve(A, g[..., None])[..., 0]
    unit = np.einsum("...p,...p->...", g, Ag)  # variance of the curvature / sigma^2
    if pool is None:
        pool = _pooling(a, ok, np.asarray(sigma)[..., None] ** 2 * unit, member)
    weight = np.where(ok, pool.weight, 0.0)
    top, bottom = (weight * a) @ member, weight @ member
    mean = (top / np.where(bottom > 0, bottom, 1.0)) @ member.T
    step = np.where(ok, pool.share * (a - mean) / np.maximum(unit, 1e-300), 0.0)
    b = curves.coefficients.copy()
    b[..., :p] -= Ag * step[..., None]
    optimum, curvature = vertex(b)
    optimum = np.where(ok, optimum + curves.centre, curves.optimum)
    curvature = np.where(ok, curvature, curves.curvature)
    minimum = np.where(ok, evaluate(b, np.where(ok, optimum - curves.centre, 0.0)), curves.minimum)
    return replace(curves, coefficients=b, optimum=optimum, minimum=minimum, curvature=curvature), pool


def _gradient(b: Array, at: Array, a: Array, p: int) -> Array:
    """Derivative of the curvature at the vertex in the coefficients [..., C, p]."""
    b3 = b[..., 3]
    shift = 3 * b3 / (2 * a)  # the vertex moves, and with it the curvature
    g = [np.zeros_like(at), -shift, 1 - 2 * at * shift]
    if p == 4:
        g.append(3 * at - 3 * at**2 * shift)
    return np.stack(g, -1)


def _pooling(a: Array, ok: NDArray[np.bool_], variance: Array, M: Array) -> Pool:
    w = np.where(ok & (variance > 0), 1 / np.maximum(variance, 1e-300), 0.0)

    def mean(weight: Array) -> Array:
        bottom = weight @ M
        return ((weight * a) @ M / np.where(bottom > 0, bottom, 1.0)) @ M.T

    arms = ok.astype(np.float64) @ M  # shapes per arm
    q = (w * (a - mean(w)) ** 2).sum(-1)
    df = np.maximum(arms - 1, 0).sum(-1)
    first, second = w @ M, (w * w) @ M
    scale = (first - second / np.where(first > 0, first, 1.0)).sum(-1)
    between = np.maximum(0.0, (q - df) / np.where(scale > 0, scale, 1.0))[..., None]
    enough = (arms >= 3) @ M.T > 0
    total = np.where(w > 0, variance + between, np.inf)
    return Pool(np.where(enough & (w > 0), variance / np.where(w > 0, total, 1.0), 0.0), 1 / total)

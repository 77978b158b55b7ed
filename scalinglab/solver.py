"""The batched solver: exact damped Newton for many fits of one law at once.

Bootstrap replicates, jackknife deletions, profile points and starts are rows of one batch: they share the features and
differ in weights, in log loss or in frozen parameters only. Each row has its own damping and leaves the batch when done.

Amplitudes live on the log scale and may collapse (E -> 0 is a legitimate optimum, seen in published laws): a collapsed
amplitude is moved to exp(COLLAPSED) = 0 for all purposes, frozen, and the sign of its gradient there is the
Karush-Kuhn-Tucker certificate that it should stay at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalinglab.blocks import Array, Problem, Scratch, derivatives
from scalinglab.objectives import Objective

COLLAPSED = -60.0  # log amplitude that stands for zero: exp(-60) = 9e-27 nats
_COLLAPSE_BELOW = -14.0  # below exp(-14) = 8e-7 nats an amplitude that still shrinks is taken to zero
_REOPEN_AT = -9.0  # where an amplitude restarts that was taken to zero too soon
_NEGLIGIBLE = -8.0  # log amplitude below which a term is too small to matter for the step of the others
BATCH_DOUBLES = 200_000  # replicates x rows of one batch: large enough to spread the cost of a NumPy call
_MAX_STEP = 2.0  # longest move of a log amplitude or exponent in one iteration
_NOISE = 1e-30  # mean squared residual (log loss) that is rounding, not misfit


@dataclass(frozen=True)
class Solution:
    """Where the batch ended, one row per replicate or start.

    theta [R, P]; objective [R] (sum over rows); converged [R]: Newton decrement below tolerance with a positive definite
    Hessian, or a Karush-Kuhn-Tucker point at a bound; decrement [R]; iterations [R]; scale [R, 1] of the objective.
    """

    theta: Array
    objective: Array
    converged: NDArray[np.bool_]
    decrement: Array
    iterations: NDArray[np.intp]
    scale: Array


def solve(
    problem: Problem,
    theta: Array,
    y: Array,
    w: Array,
    objective: Objective,
    *,
    frozen: NDArray[np.bool_] | None = None,
    scale: Array | None = None,
    max_iter: int = 200,
    tol: float = 1e-13,
) -> Solution:
    """Minimise sum_i w_i rho(residual_i) from each row of theta.

    Parameters
    ----------
    theta : starts [R, P]; rows with a non-finite objective end as not converged.
    y : log loss [n] or [R, n].
    w : weights [n] or [R, n]; a replicate that leaves a run out gives its rows weight 0.
    frozen : parameters [P] that stay where they start (profiles).
    scale : [R, 1], for objectives with a scale; by default it is found by alternating with the fit.
    tol : stop when the Newton decrement is below tol times the objective.
    """
    theta = np.array(np.atleast_2d(theta), dtype=np.float64)
    rows = len(theta)
    block = max(1, min(rows, BATCH_DOUBLES // max(1, problem.n)))
    parts = []
    for start in range(0, rows, block):
        part = slice(start, min(rows, start + block))
        parts.append(
            _solve_scaled(
                problem,
                theta[part],
                y if y.ndim == 1 else y[part],
                w if w.ndim == 1 else w[part],
                objective,
                frozen,
                None if scale is None else scale[part],
                max_iter,
                tol,
            )
        )
    if len(parts) == 1:
        return parts[0]
    return Solution(*(np.concatenate([getattr(p, name) for p in parts]) for name in Solution.__dataclass_fields__))


def _solve_scaled(
    problem: Problem,
    theta: Array,
    y: Array,
    w: Array,
    objective: Objective,
    frozen: NDArray[np.bool_] | None,
    scale: Array | None,
    max_iter: int,
    tol: float,
) -> Solution:
    """Alternate between the scale of the residuals and the fit; one pass when the scale is given or not needed."""
    if scale is not None or not objective.needs_scale:
        known = np.ones((len(theta), 1)) if scale is None else scale
        return _newton(problem, theta, y, w, objective, frozen, known, max_iter, tol)
    scale = objective.scale(_residual(problem, theta, y, objective), w)
    for _ in range(25):
        found = _newton(problem, theta, y, w, objective, frozen, scale, max_iter, tol)
        theta = found.theta
        new = objective.scale(_residual(problem, theta, y, objective), w)
        change = np.abs(new / np.maximum(scale, 1e-300) - 1)
        if (change < 1e-7).all():
            break
        scale = new
    return found


def _residual(problem: Problem, theta: Array, y: Array, objective: Objective) -> Array:
    m = problem.log_loss(theta)
    return y - m if objective.on == "log_loss" else np.exp(y) - np.exp(m)


def _newton(
    problem: Problem,
    theta: Array,
    y: Array,
    w: Array,
    objective: Objective,
    frozen: NDArray[np.bool_] | None,
    scale: Array,
    max_iter: int,
    tol: float,
) -> Solution:
    """Damped Newton on each row until its Newton decrement is below tolerance; rows that are done leave the batch."""
    R, P = theta.shape
    fixed = np.zeros(P, bool) if frozen is None else frozen
    cur = np.where(fixed, theta, np.clip(theta, problem.lower, problem.upper))
    out = Solution(
        cur.copy(), np.full(R, np.inf), np.zeros(R, bool), np.full(R, np.inf), np.zeros(R, np.intp), scale.copy()
    )
    live = np.arange(R)
    lam = np.full(R, 1e-4)
    yl, wl, sl = y, w, scale
    scratch = Scratch()
    gathered = np.empty_like(w) if w.ndim == 2 else w
    small = _NOISE * (w.sum(-1) if w.ndim == 2 else np.full(R, w.sum()))
    with np.errstate(all="ignore"):
        f, g, H = derivatives(problem, cur, yl, wl, objective, sl, scratch)
        for iteration in range(max_iter + 1):
            if _collapse(problem, cur, g, fixed):
                f, g, H = derivatives(problem, cur, yl, wl, objective, sl, scratch)
            held = _held(problem, cur, g, fixed)
            step, positive = _newton_step(problem, g, H, lam, held)
            decrement = -0.5 * np.einsum("pr,rp->r", np.where(held.T, 0.0, g), step)
            still = (decrement <= tol * np.abs(f) + small[live]) & positive
            # the decrement of a heavily damped step says nothing: ask again with the damping lifted
            done = still & (lam <= 1e-3)
            lam[still & ~done] *= 1e-3
            stop = done | (lam > 1e10) | ~np.isfinite(f)
            if iteration == max_iter:
                stop[:] = True
            if stop.any():
                rows = live[stop]
                out.theta[rows], out.objective[rows], out.converged[rows] = cur[stop], f[stop], done[stop]
                out.decrement[rows], out.iterations[rows] = decrement[stop], iteration
                keep = ~stop
                if not keep.any():
                    break
                live, cur, lam, step, decrement = live[keep], cur[keep], lam[keep], step[keep], decrement[keep]
                f, g, H = f[keep], g[:, keep], H[:, :, keep]
                yl = y if y.ndim == 1 else y[live]
                wl = w if w.ndim == 1 else np.take(w, live, 0, out=gathered[: len(live)])
                sl = scale[live]
            trial, shrink = _move(problem, cur, step, fixed)
            fn, gn, Hn = derivatives(problem, trial, yl, wl, objective, sl, scratch)
            good = fn <= f  # NaN compares False
            # Nielsen's rule: trust grows with the ratio of the achieved to the predicted decrease
            gain = (f - fn) / np.maximum((2 * shrink - shrink * shrink) * decrement, 1e-300)
            lam = np.where(
                good, lam * np.where(gain > 0.75, 0.1, np.where(gain > 0.2, 1.0, 4.0)), np.maximum(lam, 1e-4) * 8
            )
            lam = np.clip(lam, 1e-12, 1e12)
            if good.all():
                cur, f, g, H = trial, fn, gn, Hn
            else:
                cur = np.where(good[:, None], trial, cur)
                f, g, H = np.where(good, fn, f), np.where(good, gn, g), np.where(good, Hn, H)
    return out


def _move(problem: Problem, cur: Array, step: Array, fixed: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The point after a step, and the factor [R] by which an overlong step was shortened.

    The step of an amplitude is relative to its size (see _newton_step): A (1 + step), so its logarithm moves by log1p(step).
    A step to zero or below shrinks it 50-fold; what keeps shrinking collapses.
    """
    k = problem.amplitudes
    size = np.abs(step)
    # an amplitude near zero may ask for any multiple of itself: that must not hold back the other parameters
    size[:, k] = np.where(cur[:, k] > _NEGLIGIBLE, size[:, k], 0.0)
    shrink = np.minimum(1.0, _MAX_STEP / np.maximum(size.max(1), 1e-300))
    step = step * shrink[:, None]
    step[:, k] = np.log1p(np.clip(step[:, k], -0.98, 50.0))
    return np.where(fixed, cur, np.clip(cur + step, problem.lower, problem.upper)), shrink


def _collapse(problem: Problem, cur: Array, g: Array, fixed: NDArray[np.bool_]) -> bool:
    """Take vanishing amplitudes to zero and reopen those that should grow; in place, True if anything moved."""
    moved = False
    if not (cur[:, problem.amplitudes] < _COLLAPSE_BELOW).any():
        return False
    for k in problem.amplitudes:
        if fixed[k]:
            continue
        sinks = (cur[:, k] < _COLLAPSE_BELOW) & (cur[:, k] > COLLAPSED) & (g[k] > 0)
        rises = (cur[:, k] <= COLLAPSED) & (g[k] < 0)
        if sinks.any() or rises.any():
            cur[sinks, k], cur[rises, k] = COLLAPSED, _REOPEN_AT
            moved = True
    return moved


def _held(problem: Problem, cur: Array, g: Array, fixed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Parameters [R, P] that don't move: frozen by the caller, collapsed, or pushed against a bound."""
    held = np.repeat(fixed[None], len(cur), 0)
    held[:, problem.amplitudes] |= cur[:, problem.amplitudes] <= COLLAPSED
    if problem.bounded:
        held |= (cur <= problem.lower) & (g.T >= 0)
        held |= (cur >= problem.upper) & (g.T <= 0)
    return held


def _newton_step(
    problem: Problem, g: Array, H: Array, lam: Array, held: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.bool_]]:
    """-(H + lam |diag H|)^-1 g for each row [R, P], held parameters at 0, and whether H was positive definite.

    Loss is linear in amplitudes, so the step is taken in amplitudes relative to their size, not in their logarithms: the
    Hessian in A / A_now is that in log A less the gradient on the diagonal. It straightens the valleys along which an
    amplitude trades off with another (E with the slowest power law).
    """
    P = len(g)
    ii = np.arange(P)
    A = H.copy()
    A[problem.amplitudes, problem.amplitudes] -= g[problem.amplitudes]
    A[ii, ii] += lam * (np.abs(H[ii, ii]) + 1e-300)
    b = g
    if held.any():
        mask = held.T
        A[np.broadcast_to(mask[:, None], A.shape) | np.broadcast_to(mask[None], A.shape)] = 0.0
        A[ii, ii] = np.where(mask, 1.0, A[ii, ii])
        b = np.where(mask, 0.0, g)
    x, positive = _ldl_solve(A, b)
    if not positive.all():
        x[:, ~positive] = _eigen_solve(A[:, :, ~positive], b[:, ~positive])
    return -x.T, positive


def _eigen_solve(A: Array, b: Array) -> Array:
    """|A|^-1 b with the eigenvalues of the scaled systems replaced by their absolute values: a descent direction."""
    P = len(A)
    diagonal = np.abs(A[np.arange(P), np.arange(P)])
    size = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    S = np.moveaxis(A / size[:, None] / size[None], 2, 0)
    S = np.where(np.isfinite(S), S, 0.0)
    values, Q = np.linalg.eigh(S)
    y = np.einsum("rij,ir->rj", Q, b / size) / np.maximum(np.abs(values), 1e-10)
    return np.einsum("rij,rj->ir", Q, y) / size


def _ldl_solve(A: Array, b: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Solve A x = b for a batch of small symmetric systems, A [P, P, R], b [P, R] -> x [P, R].

    LDL^T written across the batch, so there is no call per replicate. Returns also whether all pivots were positive; where
    one was not, its absolute value stands in and x means little.
    """
    P, _, R = A.shape
    diagonal = np.abs(np.einsum("iir->ir", A))
    size = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    M = np.empty((P, P + 1, R))  # A and b side by side: one elimination for both
    np.divide(A, size[:, None], out=M[:, :P])
    M[:, :P] /= size
    np.divide(b, size, out=M[:, P])
    for j in range(P - 1):
        low = M[j + 1 :, j] / np.maximum(np.abs(M[j, j]), 1e-12)
        M[j + 1 :, j + 1 :] -= low[:, None] * M[j, j + 1 :]
        M[j + 1 :, j] = low
    pivots = np.einsum("iir->ir", M[:, :P])
    x = M[:, P] / np.maximum(np.abs(pivots), 1e-12)
    for j in range(P - 1, 0, -1):
        x[:j] -= M[j, :j] * x[j]
    return x / size, (pivots > 1e-15).all(0)

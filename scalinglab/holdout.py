"""Held-out predictions: refit without some rows, predict them, score them by run.

Folds are codes, one per row, so that no mask of folds x rows is kept beyond the batch at hand. Refits run in the batched
solver from the optimum of the whole data; those that do not converge there, and the few folds that extrapolate, get fresh
starts of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.diagnostics import condition_number
from scalinglab.fitting import Fit
from scalinglab.objectives import Gaussian, StudentT
from scalinglab.solver import COLLAPSED, solve
from scalinglab.starts import projected_starts
from scalinglab.uncertainty import variance_components

Array = NDArray[np.float64]

_BATCH_DOUBLES = 4_000_000  # folds x rows of one batch of weights
_FEW_FOLDS = 3  # so few folds are searched from more starts whether or not they converged
_POLISHED = 3  # starts that are carried on after 30 steps: the lowest
_AROUND, _JITTER = 6, 0.3  # starts around the optimum of all runs, and their SD in log amplitudes and exponents
_LOST = 1e8  # condition number of the training Jacobian beyond which a fold leaves a parameter open
_LOG_2PI = float(np.log(2 * np.pi))


@dataclass(frozen=True)
class Fold:
    """Rows left out together: code [n] is the fold of each row, -1 for rows that are never left out."""

    code: NDArray[np.intp]
    count: int


@dataclass(frozen=True)
class HeldOut:
    """error [n]: observed minus predicted log loss of left-out rows, NaN elsewhere or where a refit failed.

    log_score [folds]: log density of the left-out log losses of each fold (NaN where the estimator is no likelihood).
    """

    error: Array
    log_score: Array
    notes: tuple[str, ...]


def held_out(fit: Fit, fold: Fold, *, scores: bool = False) -> HeldOut:
    """Refit without each fold and predict it.

    scores : also the Gaussian (or Student-t) log density of each fold, with variances from its training rows.
    """
    n = len(fit.runs)
    error, log_score = np.full(n, np.nan), np.full(fold.count, np.nan)
    notes: list[str] = []
    step = max(1, _BATCH_DOUBLES // max(1, n))
    stuck, open_ = [], []
    run = np.asarray(pd.factorize(fit.runs["run_id"])[0], dtype=np.intp)
    for start in range(0, fold.count, step):
        numbers = np.arange(start, min(fold.count, start + step))
        weights = (fold.code[None] != numbers[:, None]).astype(np.float64)
        params, converged = _refits(fit, weights, search=fold.count <= _FEW_FOLDS)
        predicted = np.log(fit.predict(fit.runs, params))
        for i, number in enumerate(numbers):
            out = fold.code == number
            if not converged[i]:
                stuck.append(number)
            if fit.law.in_algebra and _is_open(fit, params.iloc[i], ~out):
                open_.append(number)
                continue
            error[out] = fit.log_loss[out] - predicted[i, out]
            if scores:
                log_score[number] = _log_score(fit, predicted[i], out, run)
    if stuck:
        notes.append(f"{len(stuck)} of {fold.count} refits did not converge; their best point is used")
    if open_:
        notes.append(f"without the rows left out {len(open_)} of {fold.count} refits leave a parameter open: no score")
    return HeldOut(error, log_score, tuple(notes))


def _refits(fit: Fit, weights: Array, *, search: bool) -> tuple[pd.DataFrame, NDArray[np.bool_]]:
    """Parameters of each refit. Beyond the warm start, few folds (`search`) also start from around it, since a law may have
    another optimum without the largest runs; refits that did not converge start from the projected grid.
    """
    made = fit.refit(weights=weights)
    converged = made.converged.copy()
    if not fit.law.in_algebra:
        return made.params, converged
    params, objective = made.params.copy(), made.objective.copy()
    rng = np.random.default_rng(0)
    for i in range(len(weights)):
        w = weights[i] * fit.weights
        if search:
            jitter = _JITTER * rng.standard_normal((_AROUND, len(fit.theta)))
            _improve(fit, w, fit.theta + jitter * (fit.theta > COLLAPSED), i, params, objective, converged)
        if not converged[i]:
            starts = projected_starts(fit.encoding, fit.log_loss, w, best=6, more=6, rng=rng)
            _improve(fit, w, starts, i, params, objective, converged)
    return params, converged


def _improve(
    fit: Fit, w: Array, starts: Array, i: int, params: pd.DataFrame, objective: Array, converged: NDArray[np.bool_]
) -> None:
    """Solve from more starts and keep the best point of fold i, a converged one where it is as good (in place)."""
    problem, y = fit.encoding.problem, fit.log_loss
    near = solve(problem, starts, y, w, Gaussian(on=fit.estimator.on, variance="constant"), max_iter=30)
    order = np.argsort(np.where(np.isfinite(near.objective), near.objective, np.inf), kind="stable")
    theta = near.theta[order[np.isfinite(near.objective[order])][:_POLISHED]]
    if not len(theta):
        return
    found = solve(problem, theta, y, w, fit.estimator)
    value = np.where(np.isfinite(found.objective), found.objective, np.inf)
    as_good = value <= value.min() * (1 + 1e-8)
    k = int(np.flatnonzero(as_good & found.converged)[0]) if (as_good & found.converged).any() else int(value.argmin())
    lower = not np.isfinite(objective[i]) or value[k] < objective[i] * (1 - 1e-8)
    settles = bool(found.converged[k]) and not converged[i] and value[k] <= objective[i] * (1 + 1e-8)
    if lower or settles:
        params.iloc[i] = fit.encoding.natural(found.theta[[k]])[0]
        objective[i], converged[i] = value[k], found.converged[k]


def _is_open(fit: Fit, params: pd.Series, train: NDArray[np.bool_]) -> bool:
    """Whether the training rows leave a parameter open at this refit (collapsed amplitudes and their exponents apart)."""
    encoding = fit.encoding
    theta = encoding.internal(params)
    whole = encoding.problem.jacobian(theta)
    J = whole[train] * np.sqrt(fit.weights[train])[:, None]
    size = np.sqrt((J * J).sum(0))
    matters = np.sqrt((whole * whole).sum(0)) > 1e-9  # a collapsed term moves nothing, in training or outside
    if not (size[matters] > 1e-9 * max(1e-300, size.max(initial=0.0))).all():
        return True
    return condition_number(J[:, matters & (size > 0)]) > _LOST


def _log_score(fit: Fit, predicted: Array, out: NDArray[np.bool_], run: NDArray[np.intp]) -> float:
    """Log density of the left-out log losses given the refit: normal with run and row variance, or Student-t.

    run [n] : number of the run of each row.

    Variances are those of the training residuals with n - k degrees of freedom. Rows of a run share its effect, so their
    joint density is used: a run of many rows counts as what it is. Student-t with several rows per run has no score here.
    """
    estimator, y = fit.estimator, fit.log_loss
    if not estimator.likelihood:
        return float("nan")
    e, jacobian = y - predicted, 0.0
    if estimator.on == "loss":
        e, jacobian = np.exp(y) - np.exp(predicted), float(y[out].sum())
    train = ~out & (fit.weights > 0)
    n, k = int(train.sum()), len(fit.encoding.coordinates) if fit.law.in_algebra else len(fit.params)
    if n <= k + 1 or (fit.weights[out] <= 0).any():
        return float("nan")
    w = fit.weights
    several = len(fit.runs) > fit.n_runs
    if isinstance(estimator, StudentT):
        if several:
            return float("nan")
        from scipy.special import gammaln

        s = float(estimator.scale(e[train][None], w[train])[0, 0]) * np.sqrt(n / (n - k))
        nu = estimator.df
        constant = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi) - np.log(s)
        return float((constant - 0.5 * (nu + 1) * np.log1p(e[out] ** 2 / (nu * s * s))).sum()) + jacobian
    inflate = n / (n - k)
    if not several:
        v = float((w[train] * e[train] ** 2).sum() / (n - k)) / w[out]
        return float(-0.5 * (_LOG_2PI + np.log(v) + e[out] ** 2 / v).sum()) + jacobian
    codes = pd.factorize(run[train])[0]
    G = int(codes.max()) + 1
    within, between = variance_components(codes.astype(np.intp), e[train])
    within, between = within * inflate, between * G / max(1.0, G - k * G / n)
    v = within / w[out]
    total = 0.0
    for number in pd.unique(run[out]):
        own = run[out] == number
        total += _equicorrelated(e[out][own], v[own], between)
    return total + jacobian


def _equicorrelated(e: Array, v: Array, between: float) -> float:
    """Log density of N(0, diag(v) + between 1 1')."""
    precision = float((1 / v).sum())
    pulled = float((e / v).sum())
    quadratic = float((e * e / v).sum()) - between * pulled**2 / (1 + between * precision)
    return -0.5 * (len(e) * _LOG_2PI + float(np.log(v).sum()) + float(np.log1p(between * precision)) + quadratic)

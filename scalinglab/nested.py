"""Tests between a law and a larger one on run-level data, and the likelihood that they stand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit
from scalinglab.objectives import Gaussian, StudentT

_SAME_LOSS = 1e-12  # relative; losses closer than this are the same number read twice


@dataclass(frozen=True)
class NestedF:
    """F test of a law within a larger one: statistic, degrees of freedom, p; `assumptions` in words."""

    statistic: float
    df1: int
    df2: int
    p: float
    small: str
    large: str
    assumptions: str = (
        "independent normal errors of equal variance in log loss, one row per run, a regular null (no parameter vanishes or "
        "sits on a bound under the small law); the F distribution is approximate for laws that are not linear in logs"
    )


def nested_f(small: Fit, large: Fit) -> NestedF:
    """F test that the extra parameters of `large` are not needed.

    F = ((RSS_small - RSS_large) / (p_large - p_small)) / (RSS_large / (n - p_large)).

    Raises
    ------
    ConfigError
        Not the same rows; not Gaussian with equal constant weights; several rows per run; the laws are not nested; or a
        parameter of the large law vanishes under the small one (then F is not calibrated: use a parametric bootstrap).
    """
    check_same_rows({"small": small, "large": large})
    for name, fit in (("small", small), ("large", large)):
        if not isinstance(fit.estimator, Gaussian) or not fit.law.in_algebra:
            raise ConfigError(
                f"the {name} fit is {fit.estimator.label} of law {fit.law.key!r}: F needs Gaussian fits in the algebra"
            )
        if len(fit.runs) > fit.n_runs:
            raise ConfigError(
                f"the {name} fit has {len(fit.runs)} rows of {fit.n_runs} runs: rows of a run are not independent and F would "
                "reject far too often; fit final_rows(runs), or use compare()"
            )
        if fit.status in ("failed", "max_iter"):
            raise ConfigError(f"the {name} fit has status {fit.status}: its residual sum is no minimum")
    if small.estimator.on != large.estimator.on or not np.allclose(small.weights, large.weights, rtol=1e-9):
        raise ConfigError("the fits differ in residual scale or weights: refit both with Gaussian(variance='constant')")
    p0, p1, n = small.encoding.problem.size, large.encoding.problem.size, len(small.runs)
    if p1 <= p0 or n <= p1:
        raise ConfigError(
            f"{p0} and {p1} free parameters on {n} runs: the large law needs more of them, and fewer than runs"
        )
    _check_nested(small, large)
    rss0, rss1 = 2 * small.objective, 2 * large.objective
    from scipy.special import fdtrc

    statistic = max(0.0, (rss0 - rss1) / (p1 - p0)) / (rss1 / (n - p1))
    p = float(fdtrc(p1 - p0, n - p1, statistic))
    return NestedF(float(statistic), p1 - p0, n - p1, p, small.law.key, large.law.key)


def _check_nested(small: Fit, large: Fit) -> None:
    """The large law must reproduce the small one's predictions exactly, at a point where it is regular."""
    predicted = small.log_loss - small.residuals
    made = large.refit(log_loss=predicted[None])
    if made.objective[0] > 1e-6 * small.objective + 1e-20 * len(predicted):
        raise ConfigError(
            f"law {small.law.key!r} is not nested in {large.law.key!r}: the larger one can't reproduce its predictions; use compare()"
        )
    amplitudes = made.params[[n for n in made.params if n.split("[")[0] in large.law.amplitudes]].iloc[0]
    theta = large.encoding.internal(made.params.iloc[0])
    J = large.encoding.problem.jacobian(theta)
    size = np.sqrt((J * J).sum(0))
    dead = (size <= 1e-9 * size.max()) | (amplitudes.min() < 1e-9)
    s = np.linalg.svd(J / np.where(size > 0, size, 1.0), compute_uv=False)
    if dead.any() or s[-1] < 1e-7 * s[0]:
        raise ConfigError(
            f"under {small.law.key!r} a term of {large.law.key!r} vanishes and its other parameters are undefined: F is not "
            "calibrated there; use a parametric bootstrap of the likelihood ratio"
        )


def log_likelihood(fit: Fit) -> float:
    """Maximised log-likelihood of the log losses, rows taken as independent; Gaussian or Student-t.

    Raises
    ------
    ConfigError
        The estimator is no likelihood.
    """
    e, y = fit.residuals, fit.log_loss
    if not fit.estimator.likelihood:
        raise ConfigError(f"{fit.estimator.label} is no likelihood: compare by held-out error instead")
    raw = 0.0
    if fit.estimator.on == "loss":  # density of log loss = density of loss times loss
        e, raw = np.exp(y) - fit.predict(fit.runs), float(y.sum())
    n = len(e)
    if isinstance(fit.estimator, StudentT):
        from scipy.special import gammaln

        nu, s = fit.estimator.df, fit.scale
        constant = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi) - np.log(s)
        return float(n * constant - 0.5 * (nu + 1) * np.log1p(e * e / (nu * s * s)).sum()) + raw
    w = fit.weights
    own = w > 0
    n = int(own.sum())
    variance = float((w * e * e).sum() / n)
    return -0.5 * n * (np.log(2 * np.pi * variance) + 1) + 0.5 * float(np.log(w[own]).sum()) + raw


def check_same_rows(fits: Mapping[str, Fit]) -> None:
    """Raise ConfigError, which says what differs, unless all fits have the same run_id and loss in every row."""
    (name0, first), *others = fits.items()
    ids, loss = first.runs["run_id"].astype(str).to_numpy(), first.runs["loss"].to_numpy(np.float64)
    for name, fit in others:
        own = fit.runs["run_id"].astype(str).to_numpy()
        where = f"fits {name0!r} and {name!r} are not on the same rows"
        if len(own) != len(ids):
            only = sorted(set(ids) ^ set(own))[:3]
            which = f"; runs in one only: {', '.join(only)}" if only else ""
            raise ConfigError(f"{where}: {len(ids)} and {len(own)} rows{which}; fit both to the same table")
        if (own != ids).any():
            at = int(np.flatnonzero(own != ids)[0])
            raise ConfigError(f"{where}: row {at + 1} is run {ids[at]!r} and {own[at]!r}; fit both to the same table")
        off = np.abs(np.log(fit.runs["loss"].to_numpy(np.float64) / loss)) > _SAME_LOSS
        if off.any():
            at = int(np.flatnonzero(off)[0])
            raise ConfigError(
                f"{where}: the loss of run {ids[at]!r} (row {at + 1}) is {loss[at]:g} and {fit.runs['loss'].iloc[at]:g}; "
                "fit both to the same losses"
            )

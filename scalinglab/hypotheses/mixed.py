"""Mixed model for unequal numbers of seeds: profiles per group, a random effect per cell, likelihood ratio by bootstrap.

The chi-square of the likelihood ratio rejects a true null 9-25 % of the time at these sizes, and statsmodels has no
small-sample degrees of freedom; a parametric bootstrap is calibrated (2-5 %). Estimates come from statsmodels' MixedLM; the
bootstrap refits with a profile likelihood of our own, all draws at once, since 2,000 MixedLM fits take minutes and fail where
the variance of cells is 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, ConvergenceWarning, FitError, SchemaError
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide
from scalinglab.runs import final_rows

Array = NDArray[np.float64]

_RATIOS = np.concatenate([[0.0], np.logspace(-3, 5, 41)])  # tau^2 / sigma^2 of the coarse search
_GOLDEN = (math.sqrt(5) - 1) / 2


def mixed_interaction(
    runs: pd.DataFrame,
    *,
    by: str = "architecture",
    x: str = "depth",
    covariates: Sequence[str] = (),
    degree: int = 2,
    level: float = 0.95,
    draws: int = 1_999,
    rng: int | np.random.Generator = 0,
) -> HypothesisTest:
    """Likelihood-ratio test that depth profiles are parallel, calibrated by parametric bootstrap.

        loss = group + profile(ln x) [x group] + covariates + cell effect + seed noise,   both effects normal

    Parameters
    ----------
    runs
        Run table; with `run_id` only the last row of a run enters. Cells may have unequal numbers of seeds, but some cell
        needs two.
    x
        Column of the depth coordinate, positive; its logarithm is used.
    covariates
        Positive columns that enter by their logarithm with one slope (params, tokens).
    draws
        Of the bootstrap.

    Raises
    ------
    ConfigError
        One group, no replicated cell, too few cells for the profiles.
    SchemaError
        A column is missing or not finite.
    """
    check_level(level)
    if draws < 19:
        raise ConfigError(f"draws is {draws}: at least 19 are needed for a p of .05")
    d = _design(runs, by, x, tuple(covariates), degree)
    seen = _ratio_statistic(d, d.mean[None], np.array([d.within]))
    # drawn from restricted estimates: those of the likelihood put the variance of cells too low, and rejected 7 %
    _, ratio, sigma2 = _profiled(d.small, d.count, d.mean[None], np.array([d.within]), d.n, restricted=True)
    generator = np.random.default_rng(rng)
    s2, tau2 = float(sigma2[0]), float(ratio[0] * sigma2[0])
    m, n = len(d.count), d.n
    mean = generator.standard_normal((draws, m)) * np.sqrt(tau2 + s2 / d.count)  # the fixed part drops out of the ratio
    within = s2 * generator.chisquare(n - m, draws)
    null = _ratio_statistic(d, mean, within)
    p = float((1 + (null >= seen[0] - 1e-9).sum()) / (1 + draws))
    q = d.large.shape[1] - d.small.shape[1]
    from scipy.special import chdtrc

    return HypothesisTest(
        "group x depth (mixed model)", "the depth profiles of all groups are parallel", p,
        decide(p, 1 - level, found=f"depth profiles differ between groups (p = {p:.2g})", p_min=1 / (1 + draws),
               unresolved="the profiles may or may not be parallel"),
        1 - level, float(seen[0]), (float(q),), level=level, p_min=1 / (1 + draws), n_runs=n,
        method=f"likelihood ratio, parametric bootstrap, {draws} draws",
        assumptions=("normal cell effects and normal seed noise, each of one variance",
                     "seeds are independent within a cell"),
        diagnostics={"seed sd": math.sqrt(s2), "cell sd": math.sqrt(tau2), "cells": m,
                     "p by chi-square (too small)": float(chdtrc(q, max(seen[0], 0.0)))},
    )  # fmt: skip


def mixed_estimates(
    runs: pd.DataFrame,
    *,
    by: str = "architecture",
    x: str = "depth",
    covariates: Sequence[str] = (),
    degree: int = 1,
    reference: str | None = None,
) -> pd.DataFrame:
    """REML estimates of the mixed model by statsmodels: one row per fixed effect, and the SDs in `attrs`.

    Terms: "intercept", "x^k" (profile of the reference), "GROUP", "GROUP:x^k" (difference to the reference), covariates.
    x is ln x less its mean. Standard errors are large-sample: for a p-value use `mixed_interaction`.

    Raises
    ------
    FitError
        No optimiser of statsmodels converges.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM

    d = _design(runs, by, x, tuple(covariates), degree)
    ref = reference or d.levels[0]
    if ref not in d.levels:
        raise ConfigError(f"there is no group {ref!r}; the runs have {', '.join(d.levels)}")
    columns: dict[str, Array] = {"intercept": np.ones(d.n)}
    powers = {f"x^{k}": d.x_run**k for k in range(1, degree + 1)}
    columns |= powers
    for name in d.levels:
        if name != ref:
            own = (d.group_run == name).astype(np.float64)
            columns[name] = own
            columns |= {f"{name}:{term}": own * z for term, z in powers.items()}
    columns |= {c: d.extra[:, i] for i, c in enumerate(covariates)}
    X = pd.DataFrame(columns)
    scale = float(d.y.std())
    made = None
    for method in ("bfgs", "powell", "cg"):  # lbfgs alone raises LinAlgError on balanced data (statsmodels 0.15)
        with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
            warnings.simplefilter("always")
            try:
                made = MixedLM((d.y - d.y.mean()) / scale, X, groups=d.cell).fit(reml=True, method=method)
            except np.linalg.LinAlgError:
                continue
        if made.converged:
            break
    if made is None or not made.converged:
        raise FitError("statsmodels' MixedLM did not converge with bfgs, powell or cg: use the cell-mean tests")
    if any("boundary" in str(w.message).lower() for w in caught):
        warnings.warn("the variance between cells is at its bound of 0: standard errors are those of independent runs",
                      ConvergenceWarning, stacklevel=2)  # fmt: skip
    table = pd.DataFrame({"estimate": made.fe_params * scale, "se": made.bse_fe * scale})
    table.loc["intercept", "estimate"] += float(d.y.mean())
    table.index.name = "term"
    table.attrs = {
        "seed_sd": math.sqrt(float(made.scale)) * scale,
        "cell_sd": math.sqrt(max(0.0, float(made.cov_re.iloc[0, 0]))) * scale,
        "method": "REML, statsmodels MixedLM",
    }
    return table


@dataclass(frozen=True)
class _Design:
    levels: tuple[str, ...]
    group_run: NDArray[np.object_]
    x_run: Array
    extra: Array  # [n, covariates]
    y: Array
    cell: NDArray[np.intp]
    count: Array
    mean: Array
    within: float
    small: Array  # [m, p0]
    large: Array  # [m, p1]

    @property
    def n(self) -> int:
        return len(self.y)


def _design(runs: pd.DataFrame, by: str, x: str, covariates: tuple[str, ...], degree: int) -> _Design:
    missing = [c for c in (by, x, "loss", *covariates) if c not in runs]
    if missing:
        raise SchemaError(
            f"the mixed model needs the column {missing[0]!r}; the table has {', '.join(map(str, runs.columns))}"
        )
    if degree < 1:
        raise ConfigError(f"degree is {degree}: a depth profile needs at least a slope")
    own = final_rows(runs) if "run_id" in runs else runs
    for name in (x, "loss", *covariates):
        value = own[name].to_numpy(np.float64)
        bad = np.flatnonzero(~(np.isfinite(value) & ((value > 0) | (name == "loss"))))
        if len(bad):
            raise SchemaError(
                f"column {name!r}, row {int(bad[0]) + 1} is {value[bad[0]]:g}: a finite value{'' if name == 'loss' else ' above 0'} is needed"
            )
    group = own[by].astype(str).to_numpy(dtype=object)
    levels = tuple(dict.fromkeys(group.tolist()))
    if len(levels) < 2:
        raise ConfigError("an interaction needs at least two groups; the runs have one")
    z = np.log(own[x].to_numpy(np.float64))
    z = z - z.mean()
    extra = (
        np.log(own[list(covariates)].to_numpy(np.float64).reshape(len(own), -1))
        if covariates
        else np.zeros((len(own), 0))
    )
    extra = extra - extra.mean(0)
    key = pd.DataFrame({"g": group, "z": z, **{f"e{i}": extra[:, i] for i in range(extra.shape[1])}})
    cell = key.groupby(list(key), sort=False).ngroup().to_numpy(np.intp)
    count = np.bincount(cell).astype(np.float64)
    if len(count) == len(own):
        raise ConfigError(
            "every cell has one run: seed noise and cell effect can't be told apart; use the cell-mean tests"
        )
    y = own["loss"].to_numpy(np.float64)
    mean = np.bincount(cell, y) / count
    within = float(((y - mean[cell]) ** 2).sum())
    if not within > 1e-24 * float(y @ y):
        raise ConfigError("the seeds of every cell have the same loss: are these copies of one run?")
    first = np.array([np.flatnonzero(cell == c)[0] for c in range(len(count))])
    own_level = (group[first][:, None] == np.array(levels, dtype=object)).astype(np.float64)
    powers = np.stack([z[first] ** k for k in range(1, degree + 1)], 1)
    crossed = (own_level[:, :, None] * powers[:, None]).reshape(len(first), -1)
    small = _basis(np.hstack([own_level, powers, extra[first]]))
    large = _basis(np.hstack([own_level, crossed, powers, extra[first]]))
    if large.shape[1] >= len(first) or large.shape[1] == small.shape[1]:
        raise ConfigError(
            f"{len(first)} cells can't carry profiles of degree {degree} in {len(levels)} groups; lower the degree"
        )
    return _Design(levels, group, z, extra, y, cell, count, mean, within, small, large)


def _basis(X: Array) -> Array:
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    return np.asarray(U[:, s > 1e-9 * s[0]])


def _ratio_statistic(d: _Design, mean: Array, within: Array) -> Array:
    """Likelihood ratio [R] for cell means [R, m]."""
    small, large = (_profiled(X, d.count, mean, within, d.n)[0] for X in (d.small, d.large))
    return np.maximum(small - large, 0.0)


def _profiled(
    X: Array, count: Array, mean: Array, within: Array, n: int, *, restricted: bool = False
) -> tuple[Array, Array, Array]:
    """-2 log-likelihood at its minimum (constants dropped), tau^2 / sigma^2 there, and sigma^2: [R] each.

    restricted : the likelihood of contrasts that are free of the fixed part (REML), whose variances are unbiased.
    """
    left_over = n - X.shape[1] if restricted else n

    def deviance(ratio: Array) -> tuple[Array, Array]:  # ratio [R]
        w = count / (1 + ratio[:, None] * count)
        m, p = X.shape
        XX = (X[:, :, None] * X[:, None, :]).reshape(m, p * p)
        G = (w @ XX).reshape(-1, p, p)
        b = (w * mean) @ X
        beta = np.linalg.solve(G, b[..., None])[..., 0]
        rss = within + (w * (mean - beta @ X.T) ** 2).sum(1)
        value = left_over * np.log(rss / left_over) + np.log1p(ratio[:, None] * count).sum(1)
        return value + (np.linalg.slogdet(G)[1] if restricted else 0.0), rss / left_over

    R = len(mean)
    coarse = np.stack([deviance(np.full(R, r))[0] for r in _RATIOS], 1)
    k = coarse.argmin(1)
    low, high = _RATIOS[np.maximum(k - 1, 0)], _RATIOS[np.minimum(k + 1, len(_RATIOS) - 1)]
    a, b = low.copy(), high.copy()
    c, e = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    fc, fe = deviance(c)[0], deviance(e)[0]
    for _ in range(32):
        left = fc < fe
        b, a = np.where(left, e, b), np.where(left, a, c)
        c_new, e_new = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
        probe = np.where(left, c_new, e_new)
        f = deviance(probe)[0]
        fc, fe = np.where(left, f, fe), np.where(left, fc, f)
        c, e = c_new, e_new
    ratio = (a + b) / 2
    ratio = np.where(deviance(np.zeros(R))[0] <= deviance(ratio)[0], 0.0, ratio)
    value, sigma2 = deviance(ratio)
    return value, ratio, sigma2

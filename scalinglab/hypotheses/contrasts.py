"""Many contrasts at once: max-t (Dunnett) p-values and limits, and the gate that comes before contrasts of architectures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.cells import (
    Cells,
    Error,
    Shared,
    depth_slopes,
    interaction_f,
    residual_ss,
    slope_differences,
)
from scalinglab.hypotheses.permutation import freedman_lane
from scalinglab.hypotheses.quadrature import legendre
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide

Array = NDArray[np.float64]

_NODES = 128  # of either quadrature
_FAR = 8.5  # SDs of the common normal that are integrated over
_NORMAL_DF = 1e7  # beyond it S is 1 to the last digit that matters
_DRAWS = 200_000  # of the multivariate t where no product structure helps


def max_t_p(t: Array, correlation: Array, df: float, *, rng: int | np.random.Generator = 0) -> Array:
    """Adjusted two-sided p of each of k contrasts: ``P(max |T| >= |t_i|)`` under the joint null.

    T is multivariate t with this correlation [k, k] and df. Contrasts with one reference have the correlation
    l_i l_j, for which the probability is a double integral done by quadrature (Dunnett 1955); any other is simulated with
    200,000 draws.

    Raises
    ------
    ConfigError
        Shapes that don't match, or no correlation matrix.
    """
    t = np.atleast_1d(np.abs(np.asarray(t, dtype=np.float64)))
    _check_correlation(correlation, len(t), df)
    loading = _product_structure(correlation)
    if loading is not None:
        different, place = np.unique(t, return_inverse=True)
        return np.array([_tail(float(c), loading, df) for c in different])[place]
    top = _max_draws(correlation, df, _DRAWS, np.random.default_rng(rng))
    return np.asarray((1 + (top[None] >= t[:, None]).sum(1)) / (1 + len(top)), dtype=np.float64)


def max_t_quantile(correlation: Array, df: float, *, level: float = 0.95, rng: int | np.random.Generator = 0) -> float:
    """Two-sided critical value c with ``P(max |T| < c) = level``; see `max_t_p`."""
    from scipy.optimize import brentq

    check_level(level)
    correlation = np.asarray(correlation, dtype=np.float64)
    _check_correlation(correlation, len(correlation), df)
    loading = _product_structure(correlation)
    if loading is None:
        return float(np.quantile(_max_draws(correlation, df, _DRAWS, np.random.default_rng(rng)), level))
    upper = 3.0
    while _tail(upper, loading, df) > 1 - level:
        upper *= 2
    return float(brentq(lambda c: _tail(c, loading, df) - (1 - level), 0.0, upper, xtol=1e-10))


@dataclass(frozen=True)
class ArchitectureByDepth:
    """The gate tests of group x depth, then the contrasts with the reference.

    It has passed if both `gate` and `bootstrap` reject and a simultaneous interval excludes 0. That one group's slope is
    significant and another's is not is never evidence of a difference.

    Attributes
    ----------
    gate : HypothesisTest
        Cell-mean F.
    bootstrap : HypothesisTest
        Parametric bootstrap with a variance per group.
    permutation : HypothesisTest
        Freedman-Lane.
    slopes : DataFrame
        Slope of each group, with its own error.
    contrasts : DataFrame
        By group: difference of slopes to the reference, se, df, t, p (single), p_max_t, low, high (simultaneous).
    reference : str
        The group that the others are held against.
    level : float
        Confidence level of the simultaneous intervals.
    """

    gate: HypothesisTest
    bootstrap: HypothesisTest
    permutation: HypothesisTest
    slopes: pd.DataFrame
    contrasts: pd.DataFrame
    reference: str
    level: float

    @property
    def passed(self) -> bool:
        off = ((self.contrasts["low"] > 0) | (self.contrasts["high"] < 0)).any()
        return bool(self.gate.rejected and self.bootstrap.rejected and off)

    @property
    def decision(self) -> str:
        """The outcome in words."""
        if not self.passed:
            return "unresolved: depth profiles of the groups are not shown to differ"
        own = self.contrasts.index[(self.contrasts["low"] > 0) | (self.contrasts["high"] < 0)]
        return f"depth profiles differ; slopes told apart from {self.reference}: {', '.join(own)}"

    def summary(self) -> str:
        """All tests as text."""
        parts = [self.gate.summary(), self.bootstrap.summary(), self.permutation.summary()]
        table = self.contrasts.to_string(float_format=lambda v: f"{v:.4g}")
        return "\n".join([*parts, f"slope less that of {self.reference}:", table, self.decision])


def architecture_by_depth(
    cells: Cells,
    *,
    reference: str,
    degree: int = 2,
    shared: Shared = "polynomial",
    error: Error = "pooled",
    level: float = 0.95,
    draws: int = 9_999,
    rng: int | np.random.Generator = 0,
) -> ArchitectureByDepth:
    """Do depth profiles differ between groups, and which slopes differ from the reference?

    Parameters
    ----------
    cells
        `cell_means` of the runs.
    reference
        Group that the others are compared with (Pre-LN).
    degree, shared
        Of the profiles in the gate; see `interaction_f`. The contrasts are of straight-line slopes.
    error
        Error of the contrasts. With "pooled" they are calibrated by the exact max-t; otherwise by a parametric bootstrap of
        the largest studentised difference with a variance per group, and residuals are permuted within groups.
    draws
        Of the bootstrap and of the permutations.

    Raises
    ------
    ConfigError
        No such reference, or cells that can't carry the profiles.
    """
    generator = np.random.default_rng(rng)
    gate = interaction_f(cells, degree=degree, shared=shared, level=level)
    boot = heteroscedastic_bootstrap(cells, degree=degree, level=level, draws=draws, rng=generator)
    flips = freedman_lane(
        cells, degree=degree, shared=shared, within=error != "pooled", level=level, draws=draws, rng=generator
    )
    table, R = slope_differences(cells, reference=reference, error=error, level=level)
    table = table.copy()
    if error == "pooled":
        df = float(table["df"].iloc[0])
        table["p_max_t"] = max_t_p(table["t"].to_numpy(), R, df, rng=generator)
        c = max_t_quantile(R, df, level=level, rng=generator)
    else:
        top = _slope_max_draws(cells, reference, draws, generator)
        t = np.abs(table["t"].to_numpy())
        table["p_max_t"] = (1 + (top[None] >= t[:, None]).sum(1)) / (1 + draws)
        c = float(np.quantile(top, level))
    table["low"], table["high"] = table["difference"] - c * table["se"], table["difference"] + c * table["se"]
    slopes = depth_slopes(cells, level=level)
    return ArchitectureByDepth(gate, boot, flips, slopes, table, reference, level)


def heteroscedastic_bootstrap(
    cells: Cells, *, degree: int = 2, level: float = 0.95, draws: int = 9_999, rng: int | np.random.Generator = 0
) -> HypothesisTest:
    """Parametric-bootstrap test that the profiles of all groups are parallel, with a variance per group.

    Each group's polynomial coefficients b_g (without the intercept) have covariance s_g^2 M_g. Statistic: sum of
    (b_g - b)' (s_g^2 M_g)^-1 (b_g - b) around the weighted mean b; its null distribution is drawn with b_g* normal and s_g*^2
    scaled chi-square around what was seen (Krishnamoorthy, Lu & Mathew 2007, for regressions). Conservative with few degrees of
    freedom per group: size .02-.04 at 3, where variances are equal.

    Raises
    ------
    ConfigError
        One group, or a group with fewer than degree + 2 cells.
    """
    check_level(level)
    A = len(cells.levels)
    if A < 2:
        raise ConfigError("an interaction needs at least two groups; the cells have one")
    b, M, s2, df = (list(v) for v in zip(*(_coefficients(cells, g, degree) for g in range(A)), strict=True))
    generator = np.random.default_rng(rng)
    B, S2 = np.stack(b)[None], np.array(s2)[None]  # [1, A, k], [1, A]
    inverse = np.stack([np.linalg.inv(m) for m in M])
    seen = float(_spread(B, S2, inverse)[0])
    roots = np.stack([np.linalg.cholesky(m) for m in M])
    z = generator.standard_normal((draws, A, degree))
    chi = np.stack([generator.chisquare(d, draws) / d for d in df], 1)
    drawn = np.einsum("akl,ral->rak", roots, z) * np.sqrt(S2)[:, :, None]
    null = _spread(drawn, S2 * chi, inverse)
    p = float((1 + (null >= seen).sum()) / (1 + draws))
    least = int(min(df))
    return HypothesisTest(
        "group x depth (parametric bootstrap)", "the depth profiles of all groups are parallel", p,
        decide(p, 1 - level, found=f"depth profiles differ between groups (p = {p:.2g})", p_min=1 / (1 + draws),
               unresolved="the profiles may or may not be parallel"),
        1 - level, seen, (float(degree * (A - 1)),), level=level, p_min=1 / (1 + draws),
        method=f"parametric bootstrap, {draws} draws, a variance per group", n_runs=cells.n_runs,
        codes=() if least >= 3 else ("FEW_DF",),
        assumptions=("normal cell means around polynomials", "each group has an error variance of its own"),
        diagnostics={"error sd": {n: math.sqrt(v) for n, v in zip(cells.levels, s2, strict=True)}, "least df": least},
    )  # fmt: skip


def dunnett(samples: dict[str, Array], *, reference: str, level: float = 0.95) -> pd.DataFrame:
    """Means of groups against the mean of a reference group: pooled variance, max-t p and simultaneous limits.

    samples : name -> losses. scipy.stats.dunnett gives the p-values; this adds limits that do not depend on a random seed.

    Raises
    ------
    ConfigError
        No such reference, or no degrees of freedom.
    """
    if reference not in samples or len(samples) < 2:
        raise ConfigError(f"reference {reference!r} and another group are needed; there are {', '.join(samples)}")
    data = {k: np.asarray(v, dtype=np.float64) for k, v in samples.items()}
    df = sum(len(v) - 1 for v in data.values())
    if df < 1:
        raise ConfigError("Dunnett's test needs a group with at least two runs")
    s2 = sum(float(((v - v.mean()) ** 2).sum()) for v in data.values()) / df
    names = [n for n in data if n != reference]
    ref = data[reference]
    gap = np.array([data[n].mean() - ref.mean() for n in names])
    se = np.array([math.sqrt(s2 * (1 / len(data[n]) + 1 / len(ref))) for n in names])
    R = s2 / len(ref) / np.outer(se, se)
    np.fill_diagonal(R, 1.0)
    c = max_t_quantile(R, df, level=level)
    return pd.DataFrame(
        {"difference": gap, "se": se, "df": float(df), "t": gap / se, "p_max_t": max_t_p(gap / se, R, df),
         "low": gap - c * se, "high": gap + c * se},
        index=pd.Index(names, name="group"),
    )  # fmt: skip


# ---- the distribution of the largest t -----------------------------------------------------------------------------------
def _tail(c: float, loading: Array, df: float) -> float:
    """P(max |T_i| >= c), T_i = (l_i Z + sqrt(1 - l_i^2) Z_i) / S with S^2 = chi2(df) / df."""
    from scipy.special import chdtri, gammaln, ndtr

    if c <= 0:
        return 1.0
    u, w = legendre(_NODES)
    z, wz = _FAR * u, _FAR * w * np.exp(-0.5 * (_FAR * u) ** 2) / math.sqrt(2 * math.pi)
    s, ws = np.ones(1), np.ones(1)
    if math.isfinite(df) and df < _NORMAL_DF:
        low, high = (math.sqrt(chdtri(df, q) / df) for q in (1 - 1e-15, 1e-15))
        s = low + (high - low) * (u + 1) / 2
        log_density = math.log(2 * df) + np.log(s) + (df / 2 - 1) * np.log(df * s * s) - df * s * s / 2
        ws = (high - low) / 2 * w * np.exp(log_density - df / 2 * math.log(2) - gammaln(df / 2))
    rest = np.sqrt(1 - loading**2)
    a, b = z[:, None, None] * loading, c * s[None, :, None]
    inside = ndtr((b - a) / rest) - ndtr((-b - a) / rest)  # [z, s, k]
    return float(wz @ (1 - inside.prod(2)) @ ws)


def _check_correlation(R: Array, k: int, df: float) -> None:
    R = np.asarray(R, dtype=np.float64)
    if (
        R.shape != (k, k)
        or not np.allclose(R, R.T)
        or not np.allclose(np.diag(R), 1)
        or np.linalg.eigvalsh(R)[0] < -1e-8
    ):
        raise ConfigError(f"correlation must be a correlation matrix of {k} x {k} contrasts; got shape {R.shape}")
    if not df >= 1:
        raise ConfigError(f"df is {df!r}: at least one degree of freedom is needed")


def _product_structure(R: Array) -> Array | None:
    """Loadings l with R_ij = l_i l_j off the diagonal, or None."""
    R = np.asarray(R, dtype=np.float64)
    k = len(R)
    if k == 1:
        return np.zeros(1)
    off = R - np.diag(np.diag(R))
    if np.abs(off).max() < 1e-12:
        return np.zeros(k)
    if k == 2:
        r = abs(off[0, 1])
        loading = np.array([math.sqrt(r), math.copysign(math.sqrt(r), off[0, 1])])
    else:
        if np.abs(off[~np.eye(k, dtype=bool)]).min() < 1e-12:
            return None
        square = np.array([off[i, (i + 1) % k] * off[i, (i + 2) % k] / off[(i + 1) % k, (i + 2) % k] for i in range(k)])
        if (square < 0).any():
            return None
        loading = np.sqrt(square) * np.where(off[0] < 0, -1.0, 1.0)
        loading[0] = math.sqrt(square[0])
    fits = np.abs(np.outer(loading, loading) - off)[~np.eye(k, dtype=bool)].max() < 1e-9
    return loading if fits and np.abs(loading).max() < 1 - 1e-9 else None


def _max_draws(R: Array, df: float, draws: int, rng: np.random.Generator) -> Array:
    values, Q = np.linalg.eigh(np.asarray(R, dtype=np.float64))
    root = Q * np.sqrt(np.maximum(values, 0.0))
    top = np.abs(rng.standard_normal((draws, len(R))) @ root.T).max(1)
    return top / np.sqrt(rng.chisquare(df, draws) / df) if math.isfinite(df) else top


def _slope_max_draws(cells: Cells, reference: str, draws: int, rng: np.random.Generator) -> Array:
    """Draws of the largest |difference of slopes| / se under equal slopes, with a variance per group [draws]."""
    own = depth_slopes(cells)
    se, df = own["se"].to_numpy(np.float64), own["df"].to_numpy(np.float64)
    b = rng.standard_normal((draws, len(se))) * se
    s = se * np.sqrt(rng.chisquare(df, (draws, len(se))) / df)
    ref = cells.number(reference)
    others = [g for g in range(len(se)) if g != ref]
    t = (b[:, others] - b[:, [ref]]) / np.sqrt(s[:, others] ** 2 + s[:, [ref]] ** 2)
    return np.asarray(np.abs(t).max(1), dtype=np.float64)


def _coefficients(cells: Cells, g: int, degree: int) -> tuple[Array, Array, float, int]:
    """Polynomial coefficients of a group without the intercept, their unscaled covariance, error variance, df."""
    own = cells.group == g
    x = (cells.x[own] - cells.x.mean()) / np.ptp(cells.x)
    X = np.stack([x**k for k in range(degree + 1)], 1)
    df = int(own.sum()) - degree - 1
    if df < 1 or np.linalg.matrix_rank(X) <= degree:
        raise ConfigError(
            f"group {cells.levels[g]!r} has {int(own.sum())} cells: a variance of its own for degree {degree} needs at least "
            f"{degree + 2} depths; lower the degree"
        )
    b = np.linalg.lstsq(X, cells.mean[own], rcond=None)[0]
    s2 = residual_ss(X, cells.mean[own]) / df
    if not s2 > 0:
        raise ConfigError(f"group {cells.levels[g]!r} fits its polynomial exactly: there is no error; check the losses")
    return b[1:], np.linalg.inv(X.T @ X)[1:, 1:], s2, df


def _spread(b: Array, s2: Array, inverse: Array) -> Array:
    """Weighted sum of squares of coefficients [R, A, k] around their weighted mean [R]."""
    W = inverse[None] / s2[:, :, None, None]
    total = W.sum(1)
    pulled = np.einsum("rakl,ral->rk", W, b)
    mean = np.linalg.solve(total, pulled[..., None])[..., 0]
    d = b - mean[:, None]
    return np.einsum("rak,rakl,ral->r", d, W, d)

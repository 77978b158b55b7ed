"""How sure: refits under resampling, all replicates in one batch, and intervals that may be invalid one by one.

The unit is the run. The default is the delete-one-run jackknife (CR3) with t(G - 1): of nine methods the only one that
covered 93-97 % for four targets in three scenarios with correlated checkpoints. Row-wise resampling exists to reproduce
papers and has to be spelled out.

Functions take a Fit by its public face only (params, refit, runs, predict, encoding), so they stand below `fitting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, FitError

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
Kind = Literal["pairs", "wild", "parametric", "residual"]


@dataclass(frozen=True)
class Interval:
    """Estimate with standard error and limits, arrays of one shape. `valid` is False where the interval means nothing."""

    estimate: Array
    se: Array
    low: Array
    high: Array
    df: float
    level: float
    method: str
    valid: NDArray[np.bool_]


@dataclass(frozen=True)
class Resampling:
    """Refits of one fit. `params` has one row per replicate; `kind` and `unit` say what was resampled."""

    fit: Fit
    kind: str
    unit: str
    params: pd.DataFrame
    converged: NDArray[np.bool_]
    df: float
    seed: str = ""

    @property
    def method(self) -> str:
        """Name of the method for tables: what was resampled and how intervals are made."""
        if self.kind == "jackknife":
            return f"delete-one-{self.unit} jackknife (CR3), t({self.df:g})"
        return f"{self.kind} bootstrap by {self.unit}, percentile, {len(self.params)} draws"

    @property
    def cov(self) -> pd.DataFrame:
        """Covariance of the parameters on their natural scales."""
        d = self.params - (self.fit.params if self.kind == "jackknife" else self.params.mean())
        factor = (len(d) - 1) / len(d) if self.kind == "jackknife" else 1 / max(1, len(d) - 1)
        return d.T @ d * factor

    @property
    def se(self) -> pd.Series:
        """Standard errors of the parameters."""
        return pd.Series(np.sqrt(np.diag(self.cov)), index=self.params.columns)

    def interval(self, fn: Callable[[pd.DataFrame], Array], level: float = 0.95, *, log: bool = False) -> Interval:
        """Interval of any function of the parameters.

        fn maps a parameter frame of R rows to an array [R, ...]; it is called on the estimate and on the replicates.
        log : make the interval symmetric on the log scale (positive quantities).
        """
        point = np.asarray(fn(self.fit.params.to_frame().T), dtype=np.float64)[0]
        values = np.asarray(fn(self.params), dtype=np.float64)
        if values.shape[1:] != point.shape or len(values) != len(self.params):
            raise ConfigError(
                f"fn returned shape {values.shape} for {len(self.params)} parameter rows; return one value per row"
            )
        with np.errstate(all="ignore"):
            t, v = (np.log(point), np.log(values)) if log else (point, values)
            if self.kind == "jackknife":
                se = np.sqrt((len(v) - 1) / len(v) * ((v - t) ** 2).sum(0))
                q = t_quantile(0.5 + level / 2, self.df)
                low, high = t - q * se, t + q * se
            else:
                se = v.std(0, ddof=1)
                low, high = np.nanquantile(v, [(1 - level) / 2, (1 + level) / 2], axis=0)
            valid = np.isfinite(low) & np.isfinite(high) & np.isfinite(point) & np.isfinite(v).all(0)
            if log:
                low, high, se = np.exp(low), np.exp(high), point * se
        return Interval(point, se, low, high, self.df, level, self.method, valid)

    def conf_int(self, level: float = 0.95) -> pd.DataFrame:
        """Intervals of the parameters: columns low, high. Amplitudes are treated on the log scale, the floor at >= 0."""
        table = {}
        for name in self.params.columns:
            log = self._on_log_scale(name)
            made = self.interval(_value_of(name), level, log=log)
            low = float(made.low)
            table[name] = (max(0.0, low) if self._positive(name) else low, float(made.high))
        return pd.DataFrame.from_dict(table, orient="index", columns=["low", "high"])

    def _positive(self, name: str) -> bool:
        return self.fit.law.in_algebra and name.split("[")[0] in self.fit.law.amplitudes

    def _on_log_scale(self, name: str) -> bool:
        law = self.fit.law
        plain = name.split("[")[0]
        return (
            self._positive(name)
            and plain != law.floor
            and bool((self.params[name] > 0).all() and self.fit.params[name] > 0)
        )


def jackknife(fit: Fit, *, unit: Literal["run", "row"] = "run") -> Resampling:
    """Delete one run at a time and refit: V = (G-1)/G sum (theta_(g) - theta)(...)', with t(G - 1).

    Raises
    ------
    FitError
        Fewer than three runs.

    References
    ----------
    MacKinnon, Nielsen & Webb 2023, arXiv:2301.04527 (cluster jackknife, CV3).
    """
    codes = _units(fit, unit)
    G = int(codes.max()) + 1
    if G < 3:
        raise FitError(f"a jackknife needs at least 3 {unit}s; this fit has {G}")
    weights = 1.0 - (codes[None, :] == np.arange(G)[:, None])
    made = fit.refit(weights=weights)
    return Resampling(fit, "jackknife", unit, made.params, made.converged, float(G - 1))


def bootstrap(
    fit: Fit,
    *,
    draws: int = 1999,
    unit: Literal["run", "row"] = "run",
    kind: Kind = "pairs",
    strata: str | Sequence[str] | None = None,
    rng: int | np.random.Generator = 0,
) -> Resampling:
    """Bootstrap refits.

    kind "pairs" draws runs with replacement (within `strata`, columns whose values keep their number of runs); "wild"
    flips the sign of all residuals of a run (Rademacher); "parametric" draws run effects and row noise from a normal model
    with the fit's own variance components; "residual" permutes row residuals (only where they are exchangeable).
    unit : "run", or "row" spelled out, which treats every row as its own run (reproduces papers; wrong for checkpoints).

    Raises
    ------
    ConfigError
        draws < 2, an unknown kind, or a stratum column that is not there.
    """
    if draws < 2:
        raise ConfigError(f"draws is {draws}; a bootstrap needs at least 2")
    generator = np.random.default_rng(rng)
    seed = str(rng) if isinstance(rng, int) else "generator"
    codes = _units(fit, unit)
    G = int(codes.max()) + 1
    if kind == "pairs":
        counts = _multiplicities(fit, codes, G, draws, strata, generator)
        made = fit.refit(weights=counts[:, codes])
    else:
        made = fit.refit(log_loss=_new_losses(fit, codes, G, kind, draws, generator))
    return Resampling(fit, kind, unit, made.params, made.converged, float(G - 1), seed)


def _units(fit: Fit, unit: str) -> NDArray[np.intp]:
    if unit == "row":
        return np.arange(len(fit.runs))
    if unit != "run":
        raise ConfigError(f"unit {unit!r} is not known: use 'run', or 'row' for rows taken as runs")
    return np.asarray(pd.factorize(fit.runs["run_id"])[0], dtype=np.intp)


def _multiplicities(
    fit: Fit, codes: NDArray[np.intp], G: int, draws: int, strata: str | Sequence[str] | None, rng: np.random.Generator
) -> Array:
    """How often each unit is drawn [draws, G]; within strata the number of units is kept."""
    if strata is None:
        return rng.multinomial(G, np.full(G, 1 / G), size=draws).astype(np.float64)
    columns = [strata] if isinstance(strata, str) else list(strata)
    missing = [c for c in columns if c not in fit.runs]
    if missing:
        raise ConfigError(f"strata: {missing[0]!r} is no column of the fitted runs")
    first = np.array([np.flatnonzero(codes == g)[0] for g in range(G)])
    stratum = fit.runs.iloc[first].groupby(columns, dropna=False, sort=False).ngroup().to_numpy()
    out = np.zeros((draws, G))
    for s in np.unique(stratum):
        own = np.flatnonzero(stratum == s)
        out[:, own] = rng.multinomial(len(own), np.full(len(own), 1 / len(own)), size=draws)
    return out


def _new_losses(fit: Fit, codes: NDArray[np.intp], G: int, kind: str, draws: int, rng: np.random.Generator) -> Array:
    """Log losses [draws, n] under the fitted law with resampled errors."""
    predicted = fit.log_loss - fit.residuals
    e = fit.residuals
    n, p = len(e), len(fit.params)
    e = e * np.sqrt(n / max(1, n - p))  # residuals are shorter than errors by the fitted degrees of freedom
    if kind == "wild":
        return predicted + e * rng.choice(np.array([-1.0, 1.0]), size=(draws, G))[:, codes]
    if kind == "residual":
        return predicted + (e - e.mean())[rng.integers(0, n, size=(draws, n))]
    if kind == "parametric":
        within, between = variance_components(codes, e)
        noise = rng.standard_normal((draws, n)) / np.sqrt(fit.weights)
        return predicted + np.sqrt(within) * noise + np.sqrt(between) * rng.standard_normal((draws, G))[:, codes]
    raise ConfigError(f"bootstrap kind {kind!r} is not known: use pairs, wild, parametric or residual")


def variance_components(codes: NDArray[np.intp], e: Array) -> tuple[float, float]:
    """Within-run and between-run variance of residuals, by one-way ANOVA; all is within when each run has one row."""
    count = np.bincount(codes).astype(np.float64)
    G, n = len(count), len(e)
    if n == G:
        return float(e @ e / n), 0.0
    mean = np.bincount(codes, e) / count
    within = float(((e - mean[codes]) ** 2).sum() / (n - G))
    between = float((count * mean**2).sum() / G)
    size = (n - (count**2).sum() / n) / max(1, G - 1)
    return within, max(0.0, (between - within) / size)


# ---- one parameter at a time ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Profile:
    """Profile of the objective in one parameter: `values`, `statistic` (0 at the optimum), threshold and interval.

    A side that never crosses the threshold inside the searched range is open: low or high is then infinite.
    """

    name: str
    values: Array
    statistic: Array
    threshold: float
    low: float
    high: float
    level: float

    @property
    def bounded(self) -> bool:
        """Whether the interval is closed on both sides: the parameter is identified by profile."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))


def profile(fit: Fit, name: str, *, level: float = 0.95, points: int = 41) -> Profile:
    """Profile likelihood interval: where n_eff ln(RSS(theta) / RSS_min) crosses the F-calibrated threshold.

    Rows of one run count by their effective number, n / (1 + (m - 1) ICC). Amplitudes are searched on the log scale.

    Raises
    ------
    ConfigError
        The name is no free parameter, or the estimator is no likelihood (Huber, Robust).
    """
    from scipy.special import fdtri

    from scalinglab.encoding import encode
    from scalinglab.solver import COLLAPSED, solve

    if not fit.law.in_algebra:
        raise ConfigError(f"profile: law {fit.law.key!r} is outside the algebra; use bootstrap")
    if not fit.estimator.likelihood:
        raise ConfigError(
            f"profile: {fit.estimator.label} is no likelihood; use jackknife or bootstrap, or fit with Gaussian()"
        )
    encoding = encode(fit.law, fit.runs, centred=False)
    slot = encoding.slots.get(name)
    if slot is None or slot.position is None:
        raise ConfigError(f"profile: {name!r} is no free parameter; the fit has {', '.join(encoding.names)}")
    theta = encoding.internal(dict(fit.params))
    at = slot.position
    y, w = fit.log_loss, fit.weights
    se = max(float(fit.jackknife.se[name]), 1e-6)
    if slot.kind == "amplitude":
        se = min(2.0, se / max(float(fit.params[name]), 1e-12)) if fit.params[name] > 0 else 1.0
    centre = theta[at] if theta[at] > COLLAPSED else -8.0
    frozen = np.zeros(encoding.problem.size, bool)
    frozen[at] = True
    G, n, p = fit.n_runs, len(y), encoding.problem.size
    icc = max(0.0, next((c.value for c in fit.checks if c.code == "WITHIN_RUN_CORRELATION"), 0.0))
    n_eff = n / (1 + (n / G - 1) * icc)
    threshold = n_eff * np.log1p(float(fdtri(1, max(1.0, n_eff - p), level)) / max(1.0, n_eff - p))
    reach = 4.0
    for _ in range(4):  # widen until both sides cross
        grid = centre + se * reach * np.linspace(-1, 1, points | 1)
        starts = np.repeat(theta[None], len(grid), 0)
        starts[:, at] = grid
        found = solve(
            encoding.problem, starts, y, w, fit.estimator, frozen=frozen, scale=np.full((len(grid), 1), fit.scale)
        )
        objective = found.objective
        if fit.estimator.needs_scale:
            statistic = 2 * (objective - fit.objective) * n_eff / n
        else:
            statistic = n_eff * np.log(np.maximum(objective, 1e-300) / max(fit.objective, 1e-300))
        if statistic[0] > threshold and statistic[-1] > threshold:
            break
        reach *= 2.5
    values = np.exp(grid) if slot.kind in ("amplitude", "exponent") else grid
    mid = len(grid) // 2
    low = _crossing(grid[: mid + 1][::-1], statistic[: mid + 1][::-1], threshold)
    high = _crossing(grid[mid:], statistic[mid:], threshold)
    if slot.kind in ("amplitude", "exponent"):
        low, high = (
            (0.0 if not np.isfinite(low) else float(np.exp(low))),
            (float(np.exp(high)) if np.isfinite(high) else np.inf),
        )
    else:
        low, high = (-np.inf if not np.isfinite(low) else low), high
    return Profile(name, values, np.maximum(statistic, 0.0), float(threshold), low, high, level)


def _crossing(x: Array, s: Array, threshold: float) -> float:
    """First x (moving outwards) where s passes the threshold, linear between points; inf when it never does."""
    above = np.flatnonzero(s > threshold)
    if not len(above) or above[0] == 0:
        return np.inf
    k = above[0]
    root = np.sqrt(np.maximum(s[[k - 1, k]], 0.0))  # nearly linear in x around the optimum, as s is nearly quadratic
    t = (np.sqrt(threshold) - root[0]) / max(root[1] - root[0], 1e-300)
    return float(x[k - 1] + t * (x[k] - x[k - 1]))


@dataclass(frozen=True)
class FiellerSet:
    """Confidence set of a ratio: an interval, the outside of an interval, or everything. `kind` says which."""

    estimate: float
    kind: Literal["interval", "exclusive", "everything"]
    low: float
    high: float
    level: float


def fieller(
    a: float, b: float, var_a: float, var_b: float, cov: float, *, df: float, level: float = 0.95
) -> FiellerSet:
    """Confidence set of a / b (Fieller 1954): exact for normal a, b, and unbounded where b may be 0.

    "exclusive": the set is everything outside (low, high).
    """
    q2 = t_quantile(0.5 + level / 2, df) ** 2
    A, B, C = b * b - q2 * var_b, a * b - q2 * cov, a * a - q2 * var_a
    disc = B * B - A * C
    estimate = a / b if b != 0 else np.inf
    if disc < 0:
        return FiellerSet(estimate, "everything", -np.inf, np.inf, level)
    r1, r2 = sorted(((B - np.sqrt(disc)) / A, (B + np.sqrt(disc)) / A)) if A != 0 else (-np.inf, np.inf)
    return FiellerSet(estimate, "interval" if A > 0 else "exclusive", float(r1), float(r2), level)


def optimal_aspect(fit: Fit, *, level: float = 0.95, suffix: str = "") -> FiellerSet:
    """Fieller set of r* = r0 exp(-gamma1 / (2 gamma2)) from the jackknife covariance.

    kind "interval" means low < r* < high; "exclusive" or "everything" mean that the optimum is not located.
    """
    g1, g2 = f"gamma1{suffix}", f"gamma2{suffix}"
    if g1 not in fit.params or g2 not in fit.params:
        raise ConfigError(
            f"law {fit.law.key!r} has no {g1}, {g2}: the optimal aspect ratio is a parameter of the shape laws"
        )
    made = fit.jackknife
    V = made.cov
    s = fieller(fit.params[g1], fit.params[g2], V.loc[g1, g1], V.loc[g2, g2], V.loc[g1, g2], df=made.df, level=level)
    r0 = fit.law.constants["r0"]
    ends = sorted((float(r0 * np.exp(-s.low / 2)), float(r0 * np.exp(-s.high / 2))))
    return FiellerSet(float(r0 * np.exp(-s.estimate / 2)), s.kind, ends[0], ends[1], level)


def delta(fit: Fit, fn: Callable[[pd.DataFrame], Array], *, level: float = 0.95) -> Interval:
    """Delta-method interval of a smooth function of the parameters, with the jackknife covariance."""
    replicates, back = _coordinates(fit)
    p = replicates(fit.params.to_frame().T)[0]
    h = np.maximum(np.abs(p), 1e-2) * 1e-6
    up, down = back(p + np.diag(h)), back(p - np.diag(h))
    gradient = ((np.asarray(fn(up)) - np.asarray(fn(down))).T / (2 * h)).T
    point = np.asarray(fn(fit.params.to_frame().T), dtype=np.float64)[0]
    moves = replicates(fit.jackknife.params) - p
    V = (len(moves) - 1) / len(moves) * moves.T @ moves
    se = np.sqrt(np.einsum("p...,pq,q...->...", gradient, V, gradient))
    q = t_quantile(0.5 + level / 2, fit.jackknife.df)
    return Interval(
        point,
        se,
        point - q * se,
        point + q * se,
        fit.jackknife.df,
        level,
        "delta method, jackknife covariance",
        np.isfinite(se),
    )


def _coordinates(fit: Fit) -> tuple[Callable[[pd.DataFrame], Array], Callable[[Array], pd.DataFrame]]:
    """Parameter frames to coordinates in which a law is nearly linear, and back.

    Amplitudes count by the logarithm of their term at the centre of the data: A and alpha trade off along a curve, which no
    covariance on natural scales can describe. The floor stays in nats, since it may be 0.
    """
    names = list(fit.params.index)
    if not fit.law.in_algebra:
        return (lambda p: p[names].to_numpy(np.float64)), (lambda z: pd.DataFrame(z, columns=names))
    encoding = fit.encoding
    floors = [i for i, c in enumerate(encoding.coordinates) if c.split("[")[0] == fit.law.floor]

    def forth(params: pd.DataFrame) -> Array:
        z = np.stack([encoding.internal(row) for row in params.to_dict("records")])
        z[:, floors] = params[[encoding.coordinates[i] for i in floors]].to_numpy(np.float64)
        return z

    def back(z: Array) -> pd.DataFrame:
        theta = z.copy()
        theta[:, floors] = 0.0
        made = encoding.frame(theta)
        for i in floors:
            made[encoding.coordinates[i]] = z[:, i]
        return made

    return forth, back


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def parameter_table(fit: Fit, level: float = 0.95) -> pd.DataFrame:
    """Parameters, then derived ones: estimate, se, low, high, df, method, identified, robust shift in standard errors."""
    made = fit.jackknife
    limits = made.conf_int(level)
    shift = fit.robust_shift
    rows = []
    for name, value in fit.params.items():
        se = float(made.se[name])
        low, high = limits.loc[name]
        free = not fit.law.in_algebra or fit.encoding.slots[name].position is not None
        rows.append(
            {
                "parameter": name,
                "estimate": value,
                "se": se if free else np.nan,
                "low": low if free else np.nan,
                "high": high if free else np.nan,
                "df": made.df if free else np.nan,
                "identified": bool(free and np.isfinite([low, high]).all() and fit.status != "not_identified"),
                "robust_shift_se": float(shift[name] / se) if free and se > 0 else np.nan,
                "kind": "parameter" if free else "fixed",
            }
        )
    for name, value in fit.derived.items():
        found = made.interval(_derived_of(fit, str(name)), level, log=bool(value > 0))
        rows.append(
            {
                "parameter": name, "estimate": value, "se": float(found.se), "low": float(found.low), "high": float(found.high),
                "df": made.df, "identified": bool(found.valid), "robust_shift_se": np.nan, "kind": "derived",
            }
        )  # fmt: skip
    return pd.DataFrame(rows).set_index("parameter")


def _value_of(name: str) -> Callable[[pd.DataFrame], Array]:
    return lambda params: params[name].to_numpy(np.float64)


def _derived_of(fit: Fit, name: str) -> Callable[[pd.DataFrame], Array]:
    return lambda params: fit.derive(params)[name].to_numpy(np.float64)

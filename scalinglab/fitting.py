"""fit(): from a law and a run table to a Fit that says what is and what is not identified."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import diagnostics as dx
from scalinglab import estimates, expressions, uncertainty
from scalinglab.encoding import Encoding, encode
from scalinglab.errors import (
    ConfigError,
    ConvergenceWarning,
    DroppedRunsWarning,
    FitError,
    IdentifiabilityWarning,
    SchemaError,
)
from scalinglab.features import COLUMNS, DERIVED_COLUMNS
from scalinglab.laws import Law, Level, law_from
from scalinglab.objectives import Gaussian, Objective, Robust, parse_objective
from scalinglab.search import Search, better_of, find_optimum, second_try
from scalinglab.solver import COLLAPSED, Solution, solve

if TYPE_CHECKING:
    from pathlib import Path

Array = NDArray[np.float64]
Status = Literal["converged", "max_iter", "at_bound", "not_identified", "failed"]

_NOT_A_RUN = frozenset({"diverged", "failed", "killed", "crashed", "nan", "restarted"})


@dataclass(frozen=True)
class Replicates:
    """Refits of one law: `params` one row per replicate, `objective` [R], `converged` [R]."""

    params: pd.DataFrame
    objective: Array
    converged: NDArray[np.bool_]


@dataclass(frozen=True)
class Fit:
    """A fitted law. Immutable; every method is a pure function of it.

    params : natural parameters at full precision (E in nats per token, A, alpha, ...).
    objective : value of the minimised sum; `estimator` says which.
    status : "converged" only at a certified optimum; else at_bound, not_identified, max_iter or failed.
    runs : the rows and columns that entered; weights [n] as used; log_loss [n] observed.
    notes : what was dropped, computed or assumed, in words.
    """

    law: Law
    params: pd.Series
    objective: float
    estimator: Objective
    status: Status
    search: Search
    runs: pd.DataFrame
    weights: Array
    theta: Array
    scale: float
    variance_power: float
    checks: tuple[dx.Check, ...]
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    others: Array = field(default_factory=lambda: np.zeros((0, 0)))

    # ---- what was seen -----------------------------------------------------------------------------------------------
    @cached_property
    def encoding(self) -> Encoding:
        return encode(self.law, self.runs)

    @property
    def log_loss(self) -> Array:
        """Observed log loss [n]."""
        return np.log(self.runs["loss"].to_numpy(np.float64))

    @property
    def residuals(self) -> Array:
        """Observed minus predicted log loss [n]."""
        return self.log_loss - np.log(self.predict(self.runs))

    @property
    def n_runs(self) -> int:
        return int(self.runs["run_id"].nunique())

    @property
    def codes(self) -> list[str]:
        """Codes of all checks that are not fine, worst first."""
        return [c.code for c in sorted(self.checks, key=lambda c: c.level != "block") if c.level != "ok" and c.code]

    @property
    def diagnostics(self) -> pd.DataFrame:
        """Every check with its value, level (ok, warn, block), code and what to do about it."""
        return pd.DataFrame([c.row() for c in self.checks])

    @property
    def derived(self) -> pd.Series:
        """Derived parameters of the law, such as r_star."""
        return self.derive(self.params.to_frame().T).iloc[0]

    def derive(self, params: pd.DataFrame) -> pd.DataFrame:
        """Derived parameters for each row of a parameter frame; crossed laws give one per level."""
        out: dict[str, Any] = {}
        for name, text in self.law.derived.items():
            free = [p for p in expressions.names(text) if p in self.law.names and p not in self.law.shared]
            for level in self.law.levels if self.law.levels and free else ("",):
                suffix = f"[{level}]" if level else ""
                values: dict[str, Any] = dict(self.law.constants)
                for p in self.law.names:
                    key = p + suffix if p + suffix in params else p
                    if key in params:
                        values[p] = params[key].to_numpy(np.float64)
                out[name + suffix] = expressions.evaluate(text, values, what=f"derived parameter {name}")
        return pd.DataFrame(out, index=params.index)

    # ---- what it predicts --------------------------------------------------------------------------------------------
    def predict(
        self, runs: pd.DataFrame | Mapping[str, Any], params: pd.DataFrame | Mapping[str, float] | None = None
    ) -> Array:
        """Loss in nats per token of each row [n]; with a frame of R parameter rows [R, n].

        Raises SchemaError when the rows lack a column that the law reads.
        """
        if not isinstance(runs, pd.DataFrame):
            runs = pd.DataFrame({k: np.atleast_1d(v) for k, v in dict(runs).items()})
        return self.law.loss(dict(self.params) if params is None else params, runs)

    # ---- how sure it is ----------------------------------------------------------------------------------------------
    @cached_property
    def jackknife(self) -> uncertainty.Resampling:
        """Delete-one-run jackknife (CR3), the default uncertainty; computed on first use."""
        return uncertainty.jackknife(self)

    def conf_int(self, level: float = 0.95) -> pd.DataFrame:
        """Intervals of all parameters by the delete-one-run jackknife with t(G - 1): columns low, high."""
        return self.jackknife.conf_int(level)

    def refit(
        self,
        *,
        weights: Array | None = None,
        log_loss: Array | None = None,
        estimator: Objective | None = None,
        start: Array | None = None,
    ) -> Replicates:
        """Fit the same law again to reweighted rows or to other losses, all replicates in one batch.

        weights : multiplies the fit's own weights, [R, n]; log_loss : [R, n] replaces the observed one.
        """
        count = len(weights) if weights is not None else len(log_loss) if log_loss is not None else 1
        y = self.log_loss if log_loss is None else np.asarray(log_loss, dtype=np.float64)
        w = self.weights if weights is None else np.asarray(weights, dtype=np.float64) * self.weights
        estimator = estimator or self.estimator
        if not self.law.in_algebra:
            from scalinglab import freeform

            return Replicates(*freeform.refit(self, w, y, estimator, count))
        starts = [self.theta if start is None else start, *self.others]
        best: Solution | None = None
        for theta in starts:  # other minima of the full data may be the best of a replicate
            theta = np.where(theta <= COLLAPSED, COLLAPSED, theta)
            found = solve(self.encoding.problem, np.repeat(theta[None], count, 0), y, w, estimator)
            best = found if best is None else better_of(best, found)
        assert best is not None
        if not best.converged.all():
            best = second_try(self.encoding.problem, best, y, w, estimator)
        return Replicates(self.encoding.frame(best.theta), best.objective, best.converged)

    @cached_property
    def robust_shift(self) -> pd.Series:
        """Robust minus this fit, per parameter: how much heavy tails move the answer."""
        if isinstance(self.estimator, Robust):
            other = self.refit(estimator=Gaussian())
            return self.params - other.params.iloc[0]
        return self.refit(estimator=Robust()).params.iloc[0] - self.params

    # ---- how it is told ----------------------------------------------------------------------------------------------
    def to_frame(self, level: float = 0.95) -> pd.DataFrame:
        """Parameters and derived parameters with standard error, interval, df and flags: one row each."""
        return estimates.parameter_table(self, level)

    def summary(self, level: float = 0.95) -> str:
        """A text table in the manner of statsmodels."""
        from scalinglab import summaries

        return summaries.text(self, level)

    def save(self, path: str | Path) -> Path:
        """Write the fit as JSON (atomically): parameters, intervals, checks, data used, provenance."""
        from scalinglab import fitfile

        return fitfile.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Fit:
        """Read a fit that `save` wrote. Raises SchemaError on a file of another kind or version."""
        from scalinglab import fitfile

        return fitfile.load(path)

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={v:.4g}" for k, v in self.params.items())
        return f"<Fit {self.law.key}: {values}; {self.status}, {len(self.runs)} rows of {self.n_runs} runs>"


def fit(
    law: str | Law | Callable[..., Any],
    runs: pd.DataFrame,
    *,
    objective: Objective | str = Gaussian(),  # noqa: B008 - frozen
    by: str | None = None,
    share: Iterable[str] | Level | None = (),
    fixed: Mapping[str, float] = {},
    weights: str | Array | None = None,
    rng: int | np.random.Generator = 0,
) -> Fit:
    """Fit a scaling law to a run table.

    Parameters
    ----------
    law : key of `LAWS`, a code of the literature ("C1"), a formula such as "E + A*params**-alpha", a Law, or a Python
        function ``(columns, *parameters) -> loss`` with default values as starts.
    runs : run table with `loss` (nats per token), `run_id` and the columns that the law reads. Rows of one run are one
        cluster: intervals come from leaving out whole runs.
    objective : Gaussian() on log loss by default; Robust(), Huber(1e-3), StudentT(), or its name ("huber:1e-3").
    by, share : a column whose values get their own parameters, and the names that stay common (or "H0".."H4").
    fixed : parameters held at a value, on their natural scale; an amplitude fixed at 0 removes its term.
    weights : column name or [n] array of non-negative weights; "loss_se" weighs by the inverse square of loss_se / loss.
    rng : seed of the search's random starts; the optimum does not depend on it once certified.

    Returns
    -------
    Fit

    Raises
    ------
    FitError
        Fewer runs than parameters, a feature without variation, or no finite start.
    SchemaError, ConfigError
        The table or the request is not usable; the message says where and what to do.
    """
    if isinstance(objective, str):
        objective = parse_objective(objective)
    if isinstance(objective, type) or not hasattr(objective, "terms"):
        raise ConfigError(
            f"objective is {objective!r}; give an instance such as Huber(1e-3), or a name such as 'huber:1e-3'"
        )
    if isinstance(rng, int) and rng < 0:
        raise ConfigError(f"rng={rng}: a seed is 0 or larger")
    if by is None and share not in ((), None, []):
        raise ConfigError(f"share={share!r} needs by=: the column whose values get their own parameters")
    chosen = law_from(law, getattr(runs, "columns", ())).with_(fixed=dict(fixed))
    table, notes = _usable(chosen, runs, by, weights)
    if by is not None:
        if by not in table:
            raise ConfigError(
                f"by={by!r} is no column of the runs; they have {', '.join(map(str, table.columns[:30]))}"
            )
        levels = sorted(table[by].astype(str).unique())
        chosen = chosen.crossed(by, levels, share)
    w = _weights(table, weights)
    _check_floor(chosen, table)
    if not chosen.in_algebra:
        from scalinglab import freeform

        return freeform.fit(chosen, table, objective, w, tuple(notes), np.random.default_rng(rng))
    encoding = encode(chosen, table)
    _check_design(encoding, table)
    y = np.log(table["loss"].to_numpy(np.float64))
    generator = np.random.default_rng(rng)
    best, search, others = find_optimum(encoding, table, y, w, objective, generator)
    power = 0.0
    if isinstance(objective, Gaussian) and objective.variance != "constant":
        w2, power, note = _variance_weights(encoding, table, best, y, w, objective)
        if power:
            notes.append(note)
            w = w2
            best = solve(encoding.problem, best.theta, y, w, objective)
    return _finish(chosen, table, encoding, best, search, others, objective, w, power, notes)


def _check_floor(law: Law, table: pd.DataFrame) -> None:
    """A floor that is fixed above the losses is a slip: no other term can be negative."""
    lowest = float(table["loss"].min())
    for name, value in law.fixed.items():
        if name.split("[")[0] == law.floor and value >= lowest:
            raise FitError(
                f"{name} is fixed at {value:g}, not below the smallest loss {lowest:.4g}: no law of this form fits"
            )


def _finish(
    law: Law,
    table: pd.DataFrame,
    encoding: Encoding,
    best: Solution,
    search: Search,
    others: Array,
    objective: Objective,
    w: Array,
    power: float,
    notes: list[str],
) -> Fit:
    theta = best.theta[0]
    params = encoding.frame(theta).iloc[0].rename(None)
    checks = dx.check_fit(law, table, encoding, theta, w, search, params)
    status = _status(best, search, checks, encoding, theta)
    made = Fit(
        law, params, float(best.objective[0]), objective, status, search, table, w, theta, float(best.scale[0, 0]),
        power, tuple(checks), tuple(notes), provenance(table), others,
    )  # fmt: skip
    if status in ("max_iter", "failed"):
        warnings.warn(f"law {law.key!r}: {dx.STATUS_MEANING[status]}", ConvergenceWarning, stacklevel=3)
    elif status == "not_identified":
        blocked = [c for c in checks if c.level == "block"]
        why = blocked[0].action if blocked else dx.STATUS_MEANING[status]
        warnings.warn(f"law {law.key!r}: {why}", IdentifiabilityWarning, stacklevel=3)
    return made


def _usable(law: Law, runs: pd.DataFrame, by: str | None, weights: Any) -> tuple[pd.DataFrame, list[str]]:
    """The rows and columns that enter a fit; what was left out is said."""
    if not isinstance(runs, pd.DataFrame):
        raise SchemaError(
            f"runs is a {type(runs).__name__}; give a run table (pandas DataFrame), e.g. from read_runs(path)"
        )
    if "loss" not in runs.columns:
        raise SchemaError(f"the run table has no column 'loss'; it has {', '.join(map(str, runs.columns[:30]))}")
    if not len(runs):
        raise FitError("the run table has no rows")
    made = {"depth", "width"} if law.reads & set(DERIVED_COLUMNS) and "aspect" not in runs else set()
    lacks = sorted((law.reads - set(DERIVED_COLUMNS) | made) - set(map(str, runs.columns)))
    if lacks and not (law.reads <= set(map(str, runs.columns))):
        raise SchemaError(
            f"law {law.key!r} reads {', '.join(lacks)}, which the run table lacks; it has "
            f"{', '.join(map(str, runs.columns[:20]))}; rename columns, or read the file with read_runs(path, columns={{...}})"
        )
    notes: list[str] = []
    keep = np.ones(len(runs), bool)
    if "status" in runs.columns:
        lost = runs["status"].astype("string").str.lower().isin(_NOT_A_RUN).to_numpy(bool, na_value=False)
        if lost.any():
            keep &= ~lost
            names = runs.loc[lost, "run_id"].astype(str).unique()[:5] if "run_id" in runs else []
            message = f"{int(lost.sum())} rows with status diverged, failed or killed are left out ({', '.join(names)})"
            warnings.warn(message, DroppedRunsWarning, stacklevel=4)
            notes.append(message)
    loss = pd.to_numeric(runs["loss"], errors="coerce").to_numpy(np.float64)
    bad = keep & ~(np.isfinite(loss) & (loss > 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise SchemaError(
            f"loss is {runs['loss'].iloc[at]!r} at row index {runs.index[at]} ({int(bad.sum())} such rows): losses must be "
            "positive numbers in nats per token; mark lost runs with status 'diverged' or drop the rows"
        )
    wanted = {
        "run_id",
        "loss",
        "loss_se",
        "params",
        "tokens",
        "depth",
        "width",
        "flops",
        "architecture",
        "seed",
        "step",
        "match_group",
        *dx.MIXING,
    }
    wanted |= set(law.reads) | {p for d in law.reads & set(DERIVED_COLUMNS) for p in ("depth", "width", "aspect")}
    wanted |= {by} if by else set()
    wanted |= {weights} if isinstance(weights, str) else set()
    wanted |= set(map(str, runs.columns)) if law.function is not None else set()
    table = runs.loc[keep, [c for c in runs.columns if c in wanted]].reset_index(drop=True)
    table["loss"] = loss[keep]
    if not len(table):
        raise FitError("no row is left to fit: all runs have status diverged, failed or killed")
    if "run_id" not in table:
        table["run_id"] = [f"row{i}" for i in range(len(table))]
        notes.append("no run_id: each row is taken as its own run")
    count = table["run_id"].value_counts()
    several = int((count > 1).sum())
    if several:
        varying = [c for c in ("eval_dataset", "split") if c in table and len(table[c].unique()) > 1]
        why = (
            f"they differ in {', '.join(varying)}"
            if varying
            else "checkpoints of a decaying schedule are not final losses"
        )
        notes.append(f"{several} of {len(count)} runs have several rows: intervals leave out whole runs; {why}")
    table.attrs = dict(runs.attrs)
    return table, notes


def _weights(table: pd.DataFrame, weights: str | Array | None) -> Array:
    n = len(table)
    if weights is None:
        return np.ones(n)
    if isinstance(weights, str):
        if weights not in table:
            raise ConfigError(f"weights={weights!r} is no column of the runs")
        w = pd.to_numeric(table[weights], errors="coerce").to_numpy(np.float64)
        if weights == "loss_se":
            w = (table["loss"].to_numpy(np.float64) / w) ** 2
    else:
        w = np.asarray(weights, dtype=np.float64)
        if w.shape != (n,):
            raise ConfigError(f"weights have shape {w.shape}; the fit has {n} rows")
    if not (np.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
        raise ConfigError("weights must be finite and not negative, with at least one positive")
    return w * (n / w.sum())


def _check_design(encoding: Encoding, table: pd.DataFrame) -> None:
    """Refuse what no optimiser can answer, in words about runs and columns."""
    law, p = encoding.law, encoding.problem.size
    runs = table["run_id"].nunique()
    if runs <= p:
        raise FitError(
            f"law {law.key!r} has {p} free parameters and the table only {runs} runs, which leaves nothing to judge the fit "
            "by: fix or share parameters, or take a smaller law"
        )
    for k, block in enumerate(encoding.problem.blocks):
        if not block.X.shape[1] or len(block.X) > 20_000:
            continue
        rank = np.linalg.matrix_rank(block.X)
        if rank < block.X.shape[1]:
            names = [encoding.coordinates[i] for i in block.index]
            features = {c for t in law.terms for c in _columns_behind(t, names)}
            seen = {c: table[c].nunique() for c in sorted(features) if c in table}
            told = ", ".join(f"{c} takes {v} value{'s' * (v != 1)}" for c, v in seen.items()) or f"term {k + 1}"
            raise FitError(
                f"law {law.key!r} can't tell {', '.join(names)} apart on these runs ({told}): "
                "add runs that vary it, or take a law without it"
            )


def _columns_behind(term: Any, names: list[str]) -> set[str]:
    """Columns behind the coefficients of a term that are among the (possibly crossed) parameter names."""
    plain = {n.split("[")[0] for n in names}
    out: set[str] = set()
    for c in term.coefficients:
        if c.name in plain:
            for column in expressions.names(c.feature) & COLUMNS:
                out |= {"depth", "width"} if column in DERIVED_COLUMNS else {column}
    return out


def _variance_weights(
    encoding: Encoding, table: pd.DataFrame, best: Solution, y: Array, w: Array, objective: Gaussian
) -> tuple[Array, float, str]:
    """Weights 1 / (tau^2 + v(loss)), v = sigma^2 loss^(2 p), where seed replicates let p be estimated."""
    predicted = encoding.problem.log_loss(best.theta)[0]
    if isinstance(objective.variance, float | int):
        power = float(objective.variance)
        v = np.exp(2 * power * (predicted - predicted.mean()))
        return _scaled(w / v), power, f"weights from a given variance power {power:g}"
    estimate = dx.seed_variance(table, y, predicted)
    if estimate is None or estimate.df < 12:
        return w, 0.0, ""
    v = estimate.sigma2 * np.exp(2 * estimate.power * (predicted - predicted.mean()))
    note = (
        f"weighted by seed variance: SD of log loss grows as loss^{estimate.power:.2f} "
        f"({estimate.df} replicate degrees of freedom, tau {estimate.tau2**0.5:.2g})"
    )
    return _scaled(w / (estimate.tau2 + v)), estimate.power, note


def _scaled(w: Array) -> Array:
    return w * (len(w) / w.sum())


def _status(best: Solution, search: Search, checks: list[dx.Check], encoding: Encoding, theta: Array) -> Status:
    if not np.isfinite(best.objective[0]):
        return "failed"
    if not best.converged[0] or not search.certified:
        return "max_iter"
    if any(c.level == "block" and c.identifies for c in checks):
        return "not_identified"
    problem = encoding.problem
    collapsed = (theta[problem.amplitudes] <= COLLAPSED).any()
    bounded = ((theta <= problem.lower) | (theta >= problem.upper)) & (problem.lower < problem.upper)
    return "at_bound" if collapsed or bounded.any() else "converged"


def provenance(table: pd.DataFrame) -> dict[str, Any]:
    """Where the runs came from and which versions made the fit."""
    return {
        "source": table.attrs.get("source", []),
        "params": table.attrs.get("params", "as given"),
        "mapping": table.attrs.get("mapping", {}),
        "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    from scalinglab import __version__

    return {"scalinglab": __version__, "numpy": np.__version__, "pandas": pd.__version__}

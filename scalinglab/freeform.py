"""Laws outside the algebra, through lmfit: Python functions, and formulas with nonlinear features (hinges, repeats).

They yield the same Fit as the batched solver's laws, one refit at a time: expect milliseconds to seconds per replicate.
Starts: the function's default values or the law's `starts`, combined with the optimum of the nearest law of the algebra for
the parameters that carry its names.
"""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import diagnostics as dx
from scalinglab.errors import ConfigError, FitError
from scalinglab.features import feature_values
from scalinglab.laws import Law
from scalinglab.objectives import Objective, StudentT

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]

_MOST_STARTS, _FEWEST_STARTS = 12, 5
_LOG_ABOVE = 10.0  # parameters that start above this are searched on the log scale: amplitudes span decades
_OPEN = (0.1, 1.0, 3.0)  # tried for a parameter without a start of its own


def fit(
    law: Law,
    table: pd.DataFrame,
    objective: Objective,
    weights: Array,
    notes: tuple[str, ...],
    rng: np.random.Generator,
) -> Fit:
    """Fit a law outside the algebra from several starts; certified like any other when three of them agree.

    Raises
    ------
    ConfigError
        A function parameter without a default, or more than four parameters without a start.
    FitError
        Fewer runs than free parameters, or no start with a finite objective.
    """
    from scalinglab.fitting import Fit, provenance  # a cycle only at call time: Fit dispatches here
    from scalinglab.search import Search

    if law.levels:
        raise ConfigError(
            f"by={law.by!r}: law {law.key!r} is outside the algebra and can't be crossed; fit each group apart"
        )
    model = _Model(law, table, objective)
    if table["run_id"].nunique() < len(model.free):
        raise FitError(
            f"law {law.key!r} has {len(model.free)} free parameters and the table only {table['run_id'].nunique()} runs: "
            "fix parameters (fixed=) or take a smaller law"
        )
    y = np.log(table["loss"].to_numpy(np.float64))
    starts = model.starts(table, rng)
    found: list[tuple[dict[str, float], float, bool, float]] = []
    for start in starts:  # stop as soon as the optimum is certified
        found.append(model.minimise(start, y, weights))
        if len(found) >= _FEWEST_STARTS and _agreeing(found) >= 3:
            break
    objectives = np.array([f[1] for f in found])
    if not np.isfinite(objectives).any():
        raise FitError(
            f"law {law.key!r}: no start gives a finite loss; check its starts and the units of the columns it reads"
        )
    k = int(np.nanargmin(np.where(np.isfinite(objectives), objectives, np.nan)))
    params, value, converged, scale = found[k]
    agreeing = _agreeing(found)
    near = [f[0] for f in found if np.isfinite(f[1]) and f[1] <= value + 0.01 * abs(value)]
    minima = len({round(float(np.log(max(f[1], 1e-300))), 4) for f in found if f[2]})
    valley = {n: float(np.ptp([p[n] for p in near])) for n in law.names}
    search = Search(len(found), agreeing, max(1, minima), valley)
    checks = _checks(model, law, table, params, y, weights, search)
    series = pd.Series({n: params[n] for n in law.names}, dtype=np.float64)
    bounded = [n for n in model.free if series[n] in law.bounds.get(n, ())]
    if not (converged and search.certified):
        status = "max_iter"
    elif any(c.level == "block" and c.identifies for c in checks):
        status = "not_identified"
    else:
        status = "at_bound" if bounded else "converged"
    return Fit(
        law, series, value, objective, status, search, table, weights, series.to_numpy(), scale, 0.0,  # type: ignore[arg-type]
        tuple(checks), (*notes, "fitted by lmfit: the law is outside the log-linear algebra"), provenance(table),
    )  # fmt: skip


def refit(
    made: Fit, weights: Array, log_loss: Array, objective: Objective, count: int
) -> tuple[pd.DataFrame, Array, NDArray[np.bool_]]:
    """Replicates of a free-form fit, each from the fit's optimum."""
    model = _Model(made.law, made.runs, objective)
    rows = []
    for r in range(count):
        w = weights if weights.ndim == 1 else weights[r]
        y = log_loss if log_loss.ndim == 1 else log_loss[r]
        rows.append(model.minimise(dict(made.params), y, w))
    frame = pd.DataFrame([r[0] for r in rows], columns=list(made.law.names))
    return frame, np.array([r[1] for r in rows]), np.array([r[2] for r in rows])


def _agreeing(found: list[tuple[dict[str, float], float, bool, float]]) -> int:
    best = min(f[1] for f in found)
    return int(sum(f[2] and f[1] <= best + 1e-8 * abs(best) + 1e-18 for f in found))


class _Model:
    """A law as a residual function for lmfit; positive amplitudes and bounds are handed to it as limits."""

    def __init__(self, law: Law, table: pd.DataFrame, objective: Objective) -> None:
        self.law, self.table, self.objective = law, table, objective
        self.columns = feature_values(law, table)
        self.free = [n for n in law.names if n not in law.fixed and n not in law.ties]

    def predict(self, params: dict[str, float]) -> Array:
        full = {**params, **self.law.fixed}
        full |= {name: full[target] for name, target in self.law.ties.items()}
        with np.errstate(all="ignore"):
            return np.asarray(self.law.loss(full, self.table), dtype=np.float64)

    def starts(self, table: pd.DataFrame, rng: np.random.Generator) -> list[dict[str, float]]:
        base = self._from_algebra(table)
        if self.law.function is not None:
            for name, p in list(inspect.signature(self.law.function).parameters.items())[1:]:
                if p.default is not inspect.Parameter.empty:
                    base[name] = float(p.default)
        choices = {n: v for n, v in self.law.starts.items() if n in self.free}
        missing = [n for n in self.free if n not in base and n not in choices]
        if (missing and self.law.function is not None) or len(missing) > 4:
            raise ConfigError(
                f"law {self.law.key!r}: no start for {', '.join(missing)}; give the function's parameters default values "
                "(def law(runs, E=1.7, ...)) or the Law starts={'name': (value, ...)}"
            )
        choices |= dict.fromkeys(missing, _OPEN)
        out = [{**base, **dict(zip(choices, v, strict=True))} for v in itertools.product(*choices.values())]
        scales = (0.1, 0.3)
        for k in range(_MOST_STARTS - len(out)):
            seed = out[k % len(out)]
            factor = np.exp(scales[k % 2] * rng.standard_normal(len(seed)))
            out.append({n: v * float(f) for (n, v), f in zip(seed.items(), factor, strict=True)})
        return out[:_MOST_STARTS]

    def _from_algebra(self, table: pd.DataFrame) -> dict[str, float]:
        """Optimum of chinchilla for the parameters E, A, alpha, B, beta, where the law has them and the runs allow it."""
        from scalinglab.fitting import fit as algebra_fit

        names = {"E", "A", "alpha", "B", "beta"} & set(self.law.names)
        if (
            self.law.function is not None
            or not {"params", "tokens"} <= set(table.columns)
            or table["run_id"].nunique() < 5
        ):
            return {}
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = algebra_fit("chinchilla", table)
            except FitError:  # one size or one budget only: no help from there
                return {}
        return {n: max(float(found.params[n]), 1e-6) for n in names}

    def minimise(self, start: dict[str, float], y: Array, w: Array) -> tuple[dict[str, float], float, bool, float]:
        """Parameters, objective, convergence and scale from one start."""
        import lmfit

        parameters = lmfit.Parameters()
        logs = {n for n in self.free if start[n] > _LOG_ABOVE}
        for name in self.free:
            low, high = self.law.bounds.get(name, (-np.inf, np.inf))
            value = float(np.clip(start[name], low, high))
            if name in logs:
                value, low, high = np.log(value), np.log(low) if low > 0 else -np.inf, np.log(high)
            parameters.add(name, value=value, min=low, max=high)

        def natural(p: Any) -> dict[str, float]:
            return {n: float(np.exp(min(v, 700.0))) if n in logs else float(v) for n, v in p.valuesdict().items()}

        root = np.sqrt(w)
        scale = np.ones((1, 1))

        def raw(values: dict[str, float]) -> Array:
            f = self.predict(values)
            with np.errstate(all="ignore"):
                e = (y - np.log(f)) if self.objective.on == "log_loss" else np.exp(y) - f
            return np.where(np.isfinite(e), e, 1e3)

        def residual(p: Any) -> Array:
            # half the sum of squares of this is the objective: any rho is written as 2 rho = z^2 with the residual's sign
            e = raw(natural(p))
            value = self.objective.terms(e[None], scale)[0][0]
            if isinstance(self.objective, StudentT):
                value = value - np.log(scale[0, 0])
            return root * np.sign(e) * np.sqrt(2 * np.maximum(value, 0.0))

        # the smooth surface of least squares first: Huber with a small delta is nearly piecewise linear
        with np.errstate(all="ignore"):  # lmfit takes square roots of its own covariance, which we don't use
            parameters = lmfit.minimize(
                lambda p: root * raw(natural(p)), parameters, method="least_squares", x_scale="jac", max_nfev=200
            ).params
        result: Any = None
        for _ in range(8 if self.objective.needs_scale else 1):
            if self.objective.needs_scale:
                old = float(scale[0, 0])
                scale = self.objective.scale(raw(natural(parameters))[None], w)
                if result is not None and abs(float(scale[0, 0]) / old - 1) < 1e-7:
                    break
            with np.errstate(all="ignore"):
                result = lmfit.minimize(
                    residual,
                    parameters,
                    method="least_squares",
                    x_scale="jac",
                    ftol=1e-13,
                    xtol=1e-13,
                    gtol=1e-13,
                    max_nfev=400,
                )
            parameters = result.params
        values = natural(parameters)
        objective = float((w * self.objective.terms(raw(values)[None], scale)[0][0]).sum())
        full = {**values, **self.law.fixed}
        full |= {name: full[target] for name, target in self.law.ties.items()}
        return {n: float(full[n]) for n in self.law.names}, objective, bool(result.success), float(scale[0, 0])


def _checks(
    model: _Model, law: Law, table: pd.DataFrame, params: dict[str, float], y: Array, w: Array, search: Any
) -> list[dx.Check]:
    predicted = np.log(model.predict(params))
    J = np.empty((len(y), len(model.free)))
    for k, name in enumerate(model.free):  # central differences of the log prediction, relative steps
        h = 1e-5 * max(abs(params[name]), 1e-3)
        up, down = {**params, name: params[name] + h}, {**params, name: params[name] - h}
        J[:, k] = (np.log(model.predict(up)) - np.log(model.predict(down))) / (2 * h)
    J = np.where(np.isfinite(J), J, 0.0) * np.sqrt(w)[:, None]
    kappa = dx.condition_number(J)
    return [
        *dx.search_checks(search),
        dx.Check(
            "conditioning, uncentred", kappa, dx.graded(kappa, 1e3, 1e5), "NOT_IDENTIFIED" if kappa > 1e5 else "ILL_CONDITIONED",
            f"the runs hardly separate the parameters (condition number {kappa:.3g})", identifies=True,
        ),
        *dx.design_checks(law, table),
        *dx.residual_checks(table, y, predicted),
    ]  # fmt: skip

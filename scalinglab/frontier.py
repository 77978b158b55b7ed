"""The compute-optimal frontier of a fit: parameters, tokens, depth and width per FLOP budget, with intervals.

Laws with a closed form (`scalinglab.algebra`) use it; every other law is minimised numerically on its own formula, all
replicates at once. An optimum that doesn't exist (no interior minimum) comes back empty with a reason, never as the
edge of a search box. Approach 3 of the isoFLOP literature is `fit("chinchilla", runs)` followed by `optimal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalinglab import algebra
from scalinglab.errors import ConfigError
from scalinglab.optimum import Budget, Surface, minimise
from scalinglab.profiles import optimal_aspect

Array = NDArray[np.float64]
Convention = Literal["6n", "causal", "full"]
Method = Literal["auto", "closed form", "numerical"]

QUANTITIES = ("params", "tokens", "depth", "width", "aspect", "loss")
_ON_LOG_SCALE = QUANTITIES[:-1]


@dataclass(frozen=True)
class Frontier:
    """Compute-optimal sizes per budget.

    Attributes
    ----------
    table : DataFrame
        One row per budget: `flops`, each of params, tokens, depth, width, aspect, loss (nats/token) with `_low` and
        `_high`; `valid` (there is an interior optimum), `interval_valid`, `reason`, `extrapolated` and `beyond` (which
        of params, tokens, flops, aspect lie outside the runs). depth, width and aspect are empty where neither the law
        nor `shape` says anything about shape.
    exponents : DataFrame
        Index params, tokens, excess: exponents in the FLOPs with `low`, `high`; empty where they aren't constants.
    law, method, flops_convention, shape, level, uncertainty, group : what was asked and how it was done.
    kappa : float
        N / (L d^2), the link between size and shape.
    notes : tuple of str
        Assumptions and soft trouble.
    """

    table: pd.DataFrame
    exponents: pd.DataFrame
    law: str
    method: str
    flops_convention: str
    shape: float | str
    level: float
    uncertainty: str
    group: str | None
    kappa: float
    notes: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """The table, one row per budget (a copy)."""
        return self.table.copy()

    def summary(self) -> str:
        """The frontier as text: one line per budget, then the notes."""
        lines = [f"compute-optimal sizes under {self.law} ({self.method}, {self.flops_convention} FLOPs)"]
        if self.table["interval_valid"].any():
            lines.append(f"  {100 * self.level:g} % intervals: {self.uncertainty}")
        for _, row in self.table.iterrows():
            sizes = ", ".join(f"{name} {_text(row, name)}" for name in QUANTITIES if np.isfinite(row[name]))
            flag = f" [beyond the runs in {row['beyond']}]" if row["extrapolated"] else ""
            lines.append(f"  {row['flops']:.3g} FLOPs: {sizes or row['reason']}{flag}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def optimal(
    fit: Any,
    *,
    flops: ArrayLike,
    flops_convention: Convention = "6n",
    shape: float | Literal["optimal"] = "optimal",
    level: float = 0.95,
    uncertainty: Any = "jackknife",
    group: str | None = None,
    at: Mapping[str, float] | None = None,
    kappa: float | None = None,
    vocab: int | None = None,
    context: int | None = None,
    method: Method = "auto",
) -> Frontier:
    """Compute-optimal params, tokens and shape of a fitted law at FLOP budgets.

    Parameters
    ----------
    fit : Fit
        A fit of a law of params (or width and depth) and tokens.
    flops : array_like
        Budgets, training FLOPs forward and backward.
    flops_convention : {"6n", "causal", "full"}
        FLOPs per token: 6 N, or 6 N + 6 vocab width + m depth width context with m = 6 (causal) or 12 (full scores).
        The last two need `vocab` and `context` and are minimised numerically.
    shape : float or "optimal"
        An aspect ratio width / depth to hold, or the best one where the law has shape in it.
    uncertainty : Resampling, "jackknife" or None
        A `jackknife` or `bootstrap` of the same fit; by default the fit's own jackknife. None gives no intervals.
    group : str, optional
        Level of the column that the fit is crossed with; required for such fits.
    at : mapping, optional
        Values of further columns that the law reads, such as {"unique_tokens": 1e10}.
    kappa : float, optional
        N / (depth width^2). By default the median over the runs where they have params, depth and width, else 12.
    method : {"auto", "closed form", "numerical"}
        "numerical" checks the closed form; "closed form" refuses laws without one.

    Returns
    -------
    Frontier

    Raises
    ------
    ConfigError
        A budget isn't positive, the law has no trade-off between params and tokens, a column or a group is missing, or
        the uncertainty belongs to another law.

    Notes
    -----
    Assumes that the law holds at the optimum; rows beyond the runs are flagged `extrapolated`. Sizes get intervals on
    the log scale, the loss on its own. A budget where some replicate has no interior optimum gets no interval: dropping
    such replicates would make it too narrow.
    """
    budgets = np.atleast_1d(np.asarray(flops, dtype=np.float64))
    if budgets.ndim != 1 or not budgets.size or not np.all(np.isfinite(budgets) & (budgets > 0)):
        raise ConfigError(f"flops must be positive budgets, not {flops!r}")
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, not {level}")
    if not isinstance(shape, str) and not (np.isfinite(shape) and shape > 0):
        raise ConfigError(f"shape must be a positive aspect ratio (width / depth) or 'optimal', not {shape}")
    if isinstance(shape, str) and shape != "optimal":
        raise ConfigError(f"shape must be a positive aspect ratio (width / depth) or 'optimal', not {shape!r}")
    notes: list[str] = []
    if isinstance(uncertainty, str):
        if uncertainty != "jackknife":
            raise ConfigError(f"uncertainty must be a Resampling, 'jackknife' or None, not {uncertainty!r}")
        uncertainty = getattr(fit, "jackknife", None)
    if getattr(fit, "status", "converged") not in ("converged", "at_bound"):
        notes.append(f"the fit's status is {fit.status}: these optima are not to be used")
    kappa = _kappa(fit, notes) if kappa is None else _positive("kappa", kappa)
    budget = Budget.of(flops_convention, kappa=kappa, vocab=vocab, context=context)
    surface = Surface.of(fit, group=group, at=at or {})
    closed = _CLOSED.get(fit.law.key)
    can_close = closed is not None and flops_convention == "6n" and (fit.law.key, shape == "optimal") not in _NOT_CLOSED
    if method == "closed form" and not can_close:
        raise ConfigError(f"law {fit.law.key!r} with shape={shape!r} and {flops_convention} FLOPs has no closed form")
    use_closed = can_close and method != "numerical"
    if not use_closed:
        _check_trade_off(surface, budget, shape, budgets)

    def solve(params: pd.DataFrame) -> Array:  # [R, budgets, quantities]
        if use_closed and closed is not None:
            return closed(_Values(surface.values(params)), budgets, shape, kappa)
        return minimise(surface, params, budgets, budget=budget, shape=None if isinstance(shape, str) else float(shape))

    point_params = fit.params.to_frame().T.astype(float)
    point = solve(point_params)[0]
    table = _table(budgets, point)
    if uncertainty is not None:
        _check_same(fit, uncertainty)
        _add_intervals(table, solve, point, uncertainty, level)
        if (
            fit.law.key == "shape"
            and shape == "optimal"
            and use_closed
            and uncertainty is getattr(fit, "jackknife", None)
        ):
            _locate_aspect(table, fit, group, level)
    _flag_extrapolation(table, fit, surface, budget, budgets)
    exponents = _exponents(fit, surface, point_params, uncertainty, level) if use_closed else _no_exponents()
    if (bad := int((~table["valid"]).sum())) > 0:
        notes.append(f"{bad} of {len(table)} budgets have no interior optimum (see `reason`)")
    if uncertainty is None:
        notes.append("no uncertainty was given: there are no intervals")
    return Frontier(
        table=table,
        exponents=exponents,
        law=fit.law.key,
        method="closed form" if use_closed else "numerical",
        flops_convention=flops_convention,
        shape=shape,
        level=level,
        uncertainty="none" if uncertainty is None else str(getattr(uncertainty, "method", uncertainty.kind)),
        group=group,
        kappa=kappa,
        notes=tuple(notes),
    )


# --- closed forms: parameters [R] and budgets [K] to [R, K, quantities] ---------------------------------------------


class _Values:
    """Parameters of one group by name, as columns [R, 1] that broadcast with budgets."""

    def __init__(self, values: Mapping[str, Array]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Array:
        return self._values[name][:, None]


def _chinchilla(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    found = algebra.chinchilla_optimum(C, A=p["A"], alpha=p["alpha"], B=p["B"], beta=p["beta"], E=p["E"])
    return _with_aspect(found, shape, kappa)


def _ces(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    found = algebra.ces_optimum(C, A=p["A"], alpha=p["alpha"], B=p["B"], beta=p["beta"], delta=p["delta"], E=p["E"])
    return _with_aspect(found, shape, kappa)


def _kaplan(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    found = algebra.kaplan_optimum(C, A=p["A"], alpha=p["alpha"], B=p["B"], delta=p["delta"])
    return _with_aspect(found, shape, kappa)


def _shape(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    g1, g2, r0 = p["gamma1"], p["gamma2"], p["r0"]
    if isinstance(shape, str):
        factor = algebra.shape_at_optimum(gamma1=g1, gamma2=g2)
        aspect = algebra.shape_optimum(gamma1=g1, gamma2=g2, r0=1.0) * r0
    else:
        u = np.log(shape / r0)
        factor, aspect = np.exp(g1 * u + g2 * u * u), np.full_like(g1, shape)
    found = algebra.chinchilla_optimum(C, A=p["A"] * factor, alpha=p["alpha"], B=p["B"], beta=p["beta"], E=p["E"])
    return _stack(found, aspect, kappa)


def _shape_drift(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    # at a held shape the interaction gamma3 u ln(N/N0) is one more power of N
    u = np.log(float(shape) / p["r0"])
    alpha = p["alpha"] - p["gamma3"] * u
    amplitude = p["A"] * np.exp(p["gamma1"] * u + p["gamma2"] * u * u - p["gamma3"] * u * np.log(p["N0"]))
    found = algebra.chinchilla_optimum(C, A=amplitude, alpha=alpha, B=p["B"], beta=p["beta"], E=p["E"])
    return _with_aspect(found, shape, kappa)


def _width_depth(p: _Values, C: Array, shape: float | str, kappa: float) -> Array:
    best = algebra.width_depth_optimum(1.0, A=p["A"], a=p["a"], B=p["B"], b=p["b"], kappa=kappa)
    found = algebra.chinchilla_optimum(C, A=best.amplitude, alpha=best.exponent, B=p["C"], beta=p["c"], E=p["E"])
    with np.errstate(all="ignore"):
        usable = np.where(np.isfinite(found.params), found.params, 1.0)
    shaped = algebra.width_depth_optimum(usable, A=p["A"], a=p["a"], B=p["B"], b=p["b"], kappa=kappa)
    return _stack(found, shaped.aspect, kappa)


_CLOSED = {
    "chinchilla": _chinchilla,
    "ces": _ces,
    "kaplan": _kaplan,
    "shape": _shape,
    "shape_drift": _shape_drift,
    "width_depth": _width_depth,
}
_NOT_CLOSED = {("shape_drift", True), ("width_depth", False)}  # (law, shape is optimised)


def _with_aspect(found: algebra.Allocation, shape: float | str, kappa: float) -> Array:
    return _stack(found, np.nan if isinstance(shape, str) else shape, kappa)


def _stack(found: algebra.Allocation, aspect: ArrayLike, kappa: float) -> Array:
    N, D, loss, r = np.broadcast_arrays(found.params, found.tokens, found.loss, aspect)
    with np.errstate(all="ignore"):
        depth = np.cbrt(N / (kappa * r * r))
    r = np.where(np.isfinite(N), r, np.nan)
    out = np.stack([N, D, depth, depth * r, r, loss], axis=-1)
    return np.asarray(out, dtype=np.float64)


# --- the table ----------------------------------------------------------------------------------------------------


def _table(budgets: Array, point: Array) -> pd.DataFrame:
    table = pd.DataFrame({"flops": budgets})
    for i, name in enumerate(QUANTITIES):
        table[name] = point[:, i]
        table[f"{name}_low"] = np.nan
        table[f"{name}_high"] = np.nan
    table["valid"] = np.isfinite(table["params"]) & np.isfinite(table["loss"])
    table["interval_valid"] = False
    table["reason"] = np.where(table["valid"], "", "no interior optimum of params, tokens and shape at this budget")
    return table


def _add_intervals(table: pd.DataFrame, solve: Any, point: Array, uncertainty: Any, level: float) -> None:
    """Fill the `_low` and `_high` columns of a table that this module has just made."""
    replicates = solve(uncertainty.params)
    known = np.isfinite(point)  # [K, Q]; aspect is NaN everywhere for laws without shape
    failed = (~np.isfinite(replicates) & known).any(axis=2).sum(axis=0)  # [K]
    ready = known & (failed == 0)[:, None] & table["valid"].to_numpy()[:, None]
    total = len(replicates)
    table["interval_valid"] = ready.any(axis=1)
    for row in np.flatnonzero((failed > 0) & table["valid"].to_numpy()):
        table.loc[row, "reason"] = f"{failed[row]} of {total} replicates have no interior optimum: no interval"
    memory: dict[bytes, Array] = {uncertainty.params.to_numpy().tobytes(): replicates}

    def cached(params: pd.DataFrame) -> Array:
        key = params.to_numpy().tobytes()
        if key not in memory:
            memory[key] = solve(params)
        return memory[key]

    for names, log in ((_ON_LOG_SCALE, True), (("loss",), False)):
        columns = [QUANTITIES.index(n) for n in names]
        rows, picked = np.nonzero(ready[:, columns])
        if not len(rows):
            continue
        where = np.asarray(columns)[picked]

        def quantity(params: pd.DataFrame, rows: Any = rows, where: Any = where) -> Array:
            return cached(params)[:, rows, where]

        interval = uncertainty.interval(quantity, level=level, log=log)
        low, high = np.atleast_1d(interval.low), np.atleast_1d(interval.high)
        for i, (row, column) in enumerate(zip(rows, where, strict=True)):
            table.loc[row, f"{QUANTITIES[column]}_low"] = float(low[i])
            table.loc[row, f"{QUANTITIES[column]}_high"] = float(high[i])


def _locate_aspect(table: pd.DataFrame, fit: Any, group: str | None, level: float) -> None:
    """Give the aspect ratio its Fieller set, as the parameter table does; where that is open, shape has no interval."""
    found = optimal_aspect(fit, level=level, group=group)
    if found.kind == "interval":
        table["aspect_low"], table["aspect_high"] = found.low, found.high
        return
    for name in ("aspect", "depth", "width"):
        table[f"{name}_low"] = table[f"{name}_high"] = np.nan
    table["reason"] = "the best aspect ratio is not located: its Fieller set is no interval"


def _flag_extrapolation(table: pd.DataFrame, fit: Any, surface: Surface, budget: Budget, budgets: Array) -> None:
    runs = fit.runs
    seen: dict[str, Array] = {}
    for name in ("params", "tokens"):
        if name in runs.columns:
            seen[name] = runs[name].to_numpy(dtype=np.float64)
    if "depth" in runs.columns and "width" in runs.columns:
        depth, width = (runs[n].to_numpy(dtype=np.float64) for n in ("depth", "width"))
        seen.setdefault("params", budget.kappa * depth * width**2)
        if surface.has_shape:
            seen["aspect"] = width / depth
    elif surface.has_shape and "aspect" in runs.columns:
        seen["aspect"] = runs["aspect"].to_numpy(dtype=np.float64)
    column = {"6n": "flops_6n", "causal": "flops_causal", "full": "flops_full"}[budget.convention]
    if column in runs.columns and np.isfinite(runs[column].to_numpy(dtype=np.float64)).any():
        seen["flops"] = runs[column].to_numpy(dtype=np.float64)
    elif budget.convention == "6n" and {"params", "tokens"} <= set(seen):
        seen["flops"] = 6 * seen["params"] * seen["tokens"]
    tolerance = 1e-9
    beyond: list[list[str]] = [[] for _ in budgets]
    for name, values in seen.items():
        low, high = np.nanmin(values) * (1 - tolerance), np.nanmax(values) * (1 + tolerance)
        at = table[name].to_numpy()
        for i in np.flatnonzero(np.isfinite(at) & ((at < low) | (at > high))):
            beyond[i].append(name)
    table["extrapolated"] = [bool(b) for b in beyond]
    table["beyond"] = [", ".join(b) for b in beyond]


def _exponents(fit: Any, surface: Surface, point: pd.DataFrame, uncertainty: Any, level: float) -> pd.DataFrame:
    key = fit.law.key
    if key == "shape_drift":
        return _no_exponents()  # they depend on the shape held
    data = {"kaplan": "delta", "width_depth": "c"}.get(key, "beta")

    def rates(params: pd.DataFrame) -> Array:  # [R, 3]
        p = surface.values(params)
        alpha = p["a"] * p["b"] / (p["a"] + 2 * p["b"]) if key == "width_depth" else p["alpha"]
        beta = p[data]
        a = algebra.params_exponent(alpha, beta)
        return np.stack([a, 1 - a, -algebra.frontier_exponent(alpha, beta)], axis=-1)

    estimate = rates(point)[0]
    low = high = np.full(3, np.nan)
    if uncertainty is not None:
        interval = uncertainty.interval(rates, level=level, log=False)
        low, high = np.asarray(interval.low), np.asarray(interval.high)
    return pd.DataFrame({"estimate": estimate, "low": low, "high": high}, index=["params", "tokens", "excess"])


def _no_exponents() -> pd.DataFrame:
    return pd.DataFrame(columns=["estimate", "low", "high"], dtype=float)


# --- checks -------------------------------------------------------------------------------------------------------


def _kappa(fit: Any, notes: list[str]) -> float:
    runs = fit.runs
    if {"params", "depth", "width"} <= set(runs.columns):
        values = runs["params"] / (runs["depth"] * runs["width"] ** 2)
        median = float(np.nanmedian(values.to_numpy(dtype=np.float64)))
        if np.isfinite(median) and median > 0:
            spread = float(np.nanmax(values) / np.nanmin(values) - 1)
            if spread > 0.1:
                notes.append(f"params / (depth width^2) varies by {100 * spread:.0f} % over the runs; median used")
            return median
    notes.append(f"the runs don't say params / (depth width^2): {algebra.KAPPA:.0f} is assumed")
    return algebra.KAPPA


def _check_trade_off(surface: Surface, budget: Budget, shape: float | str, budgets: Array) -> None:
    if "tokens" not in surface.reads and "flops" not in surface.reads:
        raise ConfigError(f"law {surface.key!r} has no tokens in it: a budget has no best split under it")
    if not surface.reads & {"params", "width", "depth", "flops"}:
        raise ConfigError(f"law {surface.key!r} has no params in it: a budget has no best split under it")
    if budget.convention != "6n" and not surface.has_shape and isinstance(shape, str):
        raise ConfigError(
            f"{budget.convention} FLOPs depend on width and depth, and law {surface.key!r} has no best shape: "
            "give shape= an aspect ratio"
        )


def _check_same(fit: Any, uncertainty: Any) -> None:
    missing = [n for n in fit.params.index if n not in uncertainty.params.columns]
    if missing:
        raise ConfigError(f"the uncertainty has no parameter {missing[0]!r}: it belongs to another fit")


def _positive(name: str, value: float) -> float:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be positive and finite, not {value}")
    return float(value)


def _text(row: pd.Series, name: str) -> str:
    interval = f" [{row[name + '_low']:.4g}, {row[name + '_high']:.4g}]" if np.isfinite(row[f"{name}_low"]) else ""
    return f"{row[name]:.4g}{interval}"

"""Which runs to train next: those that shrink the interval of one estimand most for their FLOPs.

A c-optimal design on the fitted law: with J the gradient of the loss of a run, the information of all runs is J' V^-1 J and
the variance of the estimand c' theta is c' (J' V^-1 J)^-1 c. Runs are chosen greedily, most variance removed per FLOP first,
then exchanged while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.encoding import Encoding, encode
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.information import cell_numbers
from scalinglab.laws import Law
from scalinglab.uncertainty import t_quantile

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
Estimand = str | Mapping[str, float] | Callable[[pd.DataFrame], Array]

_OPEN = 1e-10  # share of the largest information that stands in for none: an open direction, not an infinite one
_MOST_EXCHANGES = 200


@dataclass(frozen=True)
class NextRuns:
    """Runs to train, best first.

    Attributes
    ----------
    table : DataFrame
        The chosen candidates: their columns, `repeats` (seeds of it), and `se_after`, the standard error when the table is
        trained down to this row.
    se_before, se_after : float
        Standard error of the estimand now and with all of them.
    half_width_before, half_width_after : float
        Of the interval at `level`, with t of runs - parameters degrees of freedom.
    flops, budget : float
        Cost of all, and what could be spent.
    open_before : bool
        The present runs leave the estimand undetermined.
    level : float
        Confidence level.
    """

    table: pd.DataFrame
    se_before: float
    se_after: float
    half_width_before: float
    half_width_after: float
    flops: float
    budget: float
    open_before: bool
    level: float

    def summary(self) -> str:
        """The choice as text."""
        before = "undetermined" if self.open_before else f"{self.half_width_before:.3g}"
        shown = [
            c
            for c in ("architecture", "depth", "width", "params", "tokens", "flops", "repeats", "se_after")
            if c in self.table
        ]
        count = int(self.table["repeats"].sum()) if len(self.table) else 0
        return "\n".join(
            [
                f"{count} runs, {self.flops:.3g} of {self.budget:.3g} FLOPs: half width of the {100 * self.level:g} % interval "
                f"{before} -> {self.half_width_after:.3g}",
                self.table[shown].to_string(index=False, float_format=lambda v: f"{v:.4g}"),
            ]
        )


def next_runs(
    fit: Fit,
    candidates: pd.DataFrame,
    *,
    estimand: Estimand,
    budget: float,
    repeats: int = 1,
    sigma: float | None = None,
    tau: float = 0.0,
    level: float = 0.95,
) -> NextRuns:
    """Choose further runs for an estimand under a budget of FLOPs.

    Parameters
    ----------
    fit
        Fit of a law in the algebra; its parameters are taken as the truth, its runs as done.
    candidates
        One row per run that could be trained: the columns that the law reads and `flops`.
    estimand
        Name of a parameter, weights of several, or a function of a frame of parameters (`depth_gap` makes one).
    budget
        FLOPs that may be spent.
    repeats
        How often a candidate may be chosen (seeds).
    sigma
        SD of a run's loss between seeds (nats). Default: residual SD of the fit.
    tau
        SD of what the law misses at a cell; seeds of one cell share it.

    Raises
    ------
    ConfigError
        No candidate within the budget, an unknown parameter, sigma or tau out of range, a law outside the algebra.
    SchemaError
        The candidates lack a column, or have no positive `flops`.

    Notes
    -----
    Greedy with exchange is not certain to find the best set, but agrees with exhaustive search on small ones (tested).
    Standard errors are those of Fisher information at the fitted parameters: for choosing, not for reporting.
    """
    law = fit.law
    if not law.in_algebra:
        raise ConfigError(f"law {law.key!r} is outside the algebra: the information of further runs can't be predicted")
    cost = _costs(candidates)
    if not (math.isfinite(budget) and budget > 0) or not (cost <= budget).any():
        raise ConfigError(f"budget={budget!r}: the cheapest candidate costs {cost.min():.3g} FLOPs")
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: a candidate can be chosen at least once")
    if not (math.isfinite(tau) and tau >= 0) or (sigma is not None and not (math.isfinite(sigma) and sigma > 0)):
        raise ConfigError(f"sigma {sigma!r} and tau {tau!r}: give SDs in nats, sigma above 0")
    columns = [c for c in fit.runs if c in candidates]
    both = pd.concat([fit.runs[columns], candidates[columns]], ignore_index=True)
    missing = [c for c in fit.runs if c not in candidates and c in law.reads]
    if missing:
        raise SchemaError(f"the candidates lack the column {missing[0]!r}, which the law {law.key!r} reads")
    encoding = encode(law, both)
    theta = encoding.internal(fit.params)
    loss = np.exp(encoding.problem.log_loss(theta)[0])
    J = encoding.problem.jacobian(theta) * loss[:, None]
    if not np.isfinite(J).all():
        raise ConfigError("the law has no finite loss at some candidate: check its columns and units")
    n, p = len(fit.runs), encoding.problem.size
    if sigma is None:
        e = np.exp(fit.log_loss) - loss[:n]
        sigma = math.sqrt(float(e @ e) / max(1, n - p))
        if not sigma > 0:
            raise ConfigError("the law fits exactly: give sigma=, the SD between seeds in nats")
    keys = both.drop(columns=[c for c in ("run_id", "seed", "loss") if c in both])
    cell = cell_numbers(keys) if tau > 0 else np.arange(len(both))
    run = pd.factorize(fit.runs["run_id"])[0]
    state = _State(
        J, cell, n, 1.0 / np.bincount(run)[run] / sigma**2, 1 / sigma**2, tau, _gradient(encoding, theta, estimand)
    )
    before, open_ = state.variance(np.zeros(len(candidates), dtype=np.intp)), state.open
    chosen = _search(state, cost, budget, repeats)
    order = _by_worth(state, cost, chosen)
    done, after, kept = np.zeros(len(candidates), dtype=np.intp), [], []
    for k in order:
        done[k] = chosen[k]
        after.append(math.sqrt(state.variance(done)))
        kept.append(k)
    table = candidates.iloc[kept].copy()
    table["repeats"], table["se_after"] = chosen[kept], after
    se0, se1 = math.sqrt(before), math.sqrt(state.variance(chosen))
    df0 = fit.n_runs - p
    wide = [t_quantile(0.5 + level / 2, max(1, df)) for df in (df0, df0 + int(chosen.sum()))]
    spent = float(cost @ chosen)
    return NextRuns(
        table, math.inf if open_ else se0, se1, math.inf if open_ else wide[0] * se0, wide[1] * se1, spent, float(budget), open_,
        level,
    )  # fmt: skip


def depth_gap(law: Law, shallow: pd.DataFrame, deep: pd.DataFrame) -> Callable[[pd.DataFrame], Array]:
    """The estimand loss(shallow) - loss(deep), a function of a frame of parameters; one row per shape."""
    if len(shallow) != 1 or len(deep) != 1:
        raise ConfigError(f"a gap is between two shapes: {len(shallow)} shallow and {len(deep)} deep rows were given")

    def gap(params: pd.DataFrame) -> Array:
        return np.asarray(law.loss(params, shallow)[:, 0] - law.loss(params, deep)[:, 0])

    return gap


@dataclass
class _State:
    """Information of the runs so far, and variance of the estimand with more of them."""

    J: Array  # [existing + candidates, P]
    cell: NDArray[np.intp]
    n: int
    precision: Array  # [existing]
    unit: float  # precision of a new run
    tau: float
    c: Array  # gradient of the estimand [P]
    open: bool = False

    def __post_init__(self) -> None:
        weight = np.concatenate([self.precision, np.zeros(len(self.J) - self.n)])
        have = np.bincount(self.cell, weight).astype(np.float64)
        self._have = have
        first = np.array([np.flatnonzero(self.cell == k)[0] for k in range(len(have))])
        self._rows = self.J[first]  # rows of a cell have one gradient
        self._size = np.sqrt((self._rows**2).sum(0) * self.unit)
        F = self._information(have)
        values, Q = np.linalg.eigh(F)
        lost = values < 1e-9 * values[-1]
        self.open = bool(
            (np.abs(Q[:, lost].T @ (self.c / self._size)) > 1e-6 * np.linalg.norm(self.c / self._size)).any()
        )

    def _information(self, total: Array) -> Array:
        X = self._rows / self._size
        return np.asarray((X * (total / (1 + self.tau**2 * total))[:, None]).T @ X)

    def variance(self, chosen: NDArray[np.intp]) -> float:
        """Variance of the estimand with `chosen` [candidates] more runs; an open direction counts as very wide."""
        return float(self.variances(chosen[None])[0])

    def variances(self, chosen: NDArray[np.intp]) -> Array:
        """The same for many sets [S, candidates]."""
        X = self._rows / self._size
        add = np.zeros((len(chosen), len(self._have)))
        np.add.at(add.T, self.cell[self.n :], chosen.T * self.unit)
        total = self._have + add
        w = total / (1 + self.tau**2 * total)
        P = X.shape[1]
        F = (w @ (X[:, :, None] * X[:, None, :]).reshape(len(X), P * P)).reshape(-1, P, P)
        F = F + _OPEN * np.eye(P)
        c = self.c / self._size
        return np.asarray(np.linalg.solve(F, np.broadcast_to(c[:, None], (len(F), P, 1)))[..., 0] @ c)


def _search(state: _State, cost: Array, budget: float, repeats: int) -> NDArray[np.intp]:
    """Two greedy starts (per FLOP, and by size of the gain), each improved by exchange; the better one."""
    best: NDArray[np.intp] | None = None
    for power in (1.0, 0.0):
        found = _exchange(state, cost, budget, repeats, _greedy(state, cost, budget, repeats, power))
        if best is None or state.variance(found) < state.variance(best):
            best = found
    assert best is not None
    return best


def _greedy(state: _State, cost: Array, budget: float, repeats: int, power: float) -> NDArray[np.intp]:
    chosen = np.zeros(len(cost), dtype=np.intp)
    left, eye = budget, np.eye(len(cost), dtype=np.intp)
    now = state.variance(chosen)
    while True:
        can = np.flatnonzero((cost <= left * (1 + 1e-12)) & (chosen < repeats))
        if not len(can):
            return chosen
        value = state.variances(chosen + eye[can])
        # logarithms, since the first run may take a variance from huge to small
        k = int(((np.log(now) - np.log(value)) / cost[can] ** power).argmax())
        if not value[k] < now * (1 - 1e-12):
            return chosen
        chosen = chosen + eye[can[k]]
        left, now = left - cost[can[k]], float(value[k])


def _exchange(state: _State, cost: Array, budget: float, repeats: int, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """Add a run, or swap one or two chosen runs for one or two others, while the variance falls."""
    eye = np.eye(len(cost), dtype=np.intp)
    for _ in range(_MOST_EXCHANGES):
        have = np.flatnonzero(chosen)
        moves = [eye]
        moves += [eye - eye[k] for k in have]
        if len(have) <= 12 and len(cost) <= 40:
            pairs = (eye[:, None] + eye[None]).reshape(-1, len(cost))
            moves += [pairs - eye[k] for k in have]
            moves += [eye - eye[k] - eye[j] for i, k in enumerate(have) for j in have[i:]]
        trial = chosen + np.concatenate(moves)
        fine = (trial >= 0).all(1) & (trial <= repeats).all(1) & (trial @ cost <= budget * (1 + 1e-12))
        trial = np.unique(trial[fine], axis=0)
        if not len(trial):
            return chosen
        value = state.variances(trial)
        k = int(value.argmin())
        if not value[k] < state.variance(chosen) * (1 - 1e-9):
            return chosen
        chosen = trial[k]
    return chosen


def _by_worth(state: _State, cost: Array, chosen: NDArray[np.intp]) -> list[int]:
    """Chosen candidates in the order in which they are worth most per FLOP."""
    left = [int(k) for k in np.flatnonzero(chosen)]
    done = np.zeros(len(chosen), dtype=np.intp)
    order = []
    while left:
        trial = np.repeat(done[None], len(left), 0)
        for i, k in enumerate(left):
            trial[i, k] = chosen[k]
        gain = math.log(state.variance(done)) - np.log(state.variances(trial))
        k = left.pop(int((gain / (cost * chosen)[left]).argmax()))
        done[k] = chosen[k]
        order.append(k)
    return order


def _costs(candidates: pd.DataFrame) -> Array:
    if "flops" not in candidates or not len(candidates):
        raise SchemaError("candidates need rows and the column 'flops': the training FLOPs of each run")
    cost = candidates["flops"].to_numpy(np.float64)
    if not (np.isfinite(cost) & (cost > 0)).all():
        raise SchemaError("column 'flops' of the candidates must be positive and finite in every row")
    return cost


def _gradient(encoding: Encoding, theta: Array, estimand: Estimand) -> Array:
    """Derivative of the estimand in theta, by central differences."""
    names = encoding.names
    if isinstance(estimand, str):
        estimand = {estimand: 1.0}
    if isinstance(estimand, Mapping):
        unknown = [n for n in estimand if n not in names]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no parameter of the law; it has {', '.join(names)}")
    value = _weighted(estimand) if isinstance(estimand, Mapping) else estimand
    h = 1e-5
    step = np.eye(len(theta)) * h
    up, down = (np.asarray(value(encoding.frame(theta + s)), dtype=np.float64) for s in (step, -step))
    c = (up - down) / (2 * h)
    if c.shape != theta.shape or not np.isfinite(c).all() or not np.abs(c).max() > 0:
        raise ConfigError("the estimand must be one finite number per row of parameters, and depend on some parameter")
    return np.asarray(c)


def _weighted(weights: Mapping[str, float]) -> Callable[[pd.DataFrame], Array]:
    return lambda params: np.asarray(sum(w * params[n].to_numpy(np.float64) for n, w in weights.items()))

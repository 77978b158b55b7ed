"""The search for the best optimum of a law: projected starts, a polish, and a certificate that three starts agree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.blocks import Problem
from scalinglab.encoding import Encoding, encode
from scalinglab.errors import FitError
from scalinglab.objectives import Gaussian, Huber, Objective
from scalinglab.solver import Solution, solve
from scalinglab.starts import projected_starts

Array = NDArray[np.float64]

_SAME_OPTIMUM = 1e-8  # relative difference in objective between starts that found the same optimum
_SEARCH_ROWS, _SAMPLE_ROWS = 20_000, 5_000  # above this many rows the search looks at a sample
_LADDER = (1e-2, 3e-3, 1e-3, 3e-4)  # Huber thresholds on the way to a small one
_AGREEING = 3  # starts that must reach the best optimum before it is certified


@dataclass(frozen=True)
class Search:
    """How the optimum was looked for: starts tried, how many reached the best one, and what else was found.

    `valley` is, per parameter, the spread over solutions within 1 % of the best objective.
    """

    starts: int
    agreeing: int
    distinct_minima: int
    valley: dict[str, float]

    @property
    def certified(self) -> bool:
        """Whether at least three starts ended in the best optimum."""
        return self.agreeing >= min(_AGREEING, self.starts)


def find_optimum(
    encoding: Encoding, table: pd.DataFrame, y: Array, w: Array, objective: Objective, rng: np.random.Generator
) -> tuple[Solution, Search, Array]:
    """Best optimum over projected starts; more starts until three agree, at most three rounds.

    Returns the optimum (a batch of one), how it was found, and rival minima [k, P] worth a look in replicates.
    """
    if len(y) > _SEARCH_ROWS:
        return _search_on_a_sample(encoding, table, y, w, objective, rng)
    problem = encoding.problem
    found: Solution | None = None
    total = 0
    for attempt in range(3):
        starts = _starts(encoding, table, y, w, rng, 8 if attempt == 0 else 4, 8 if attempt == 0 else 40)
        total += len(starts)
        # a few Gaussian steps first: its surface is smooth where Huber's with a small delta is nearly piecewise linear
        near = solve(problem, starts, y, w, Gaussian(on=objective.on, variance="constant"), max_iter=12)
        ok = np.isfinite(near.objective)
        if not ok.any():
            continue
        part = solve(problem, near.theta[ok], y, w, objective, max_iter=12 if attempt == 0 else 200)
        # unless enough agree already, starts that ran out of steps near the best go on; hopeless ones don't
        level = np.nanmin(np.where(np.isfinite(part.objective), part.objective, np.inf))
        close = ~part.converged & (part.objective <= level + 0.1 * abs(level))
        if close.any() and _agreeing(part, objective)[0] < _AGREEING:
            more = solve(problem, part.theta[close], y, w, objective, max_iter=400)
            part = _replace(part, np.flatnonzero(close), more)
        found = part if found is None else _joined(found, part)
        agreeing, best, tolerance = _agreeing(found, objective)
        if agreeing >= min(_AGREEING, total):
            break
    if found is None or not np.isfinite(found.objective).any():
        raise FitError(
            f"law {encoding.law.key!r}: no start gives a finite objective; check units and ranges of the columns it reads"
        )
    value = np.where(np.isfinite(found.objective), found.objective, np.inf)
    order = np.argsort(value, kind="stable")
    certain = [i for i in order if found.converged[i] and value[i] <= best + tolerance]
    k = int(certain[0] if certain else order[0])  # the best one, a converged one among equals
    minima = [k]
    for i in order:
        if found.converged[i] and all(
            abs(found.objective[i] - found.objective[j]) > 1e-6 * abs(best) + 1e-22 for j in minima
        ):
            minima.append(int(i))
    near_best = (found.converged & (found.objective <= best + 0.01 * abs(best))) | (
        np.arange(len(found.objective)) == k
    )
    spread = np.ptp(encoding.natural(found.theta[near_best]), axis=0)
    rivals = [i for i in minima[1:] if found.objective[i] <= best + 0.25 * abs(best)][:2]
    one = Solution(*(getattr(found, f)[[k]] for f in Solution.__dataclass_fields__))
    search = Search(total, agreeing, len(minima), dict(zip(encoding.names, spread.tolist(), strict=True)))
    return one, search, found.theta[rivals]


def _agreeing(found: Solution, objective: Objective) -> tuple[int, float, float]:
    """How many rows of a batch converged to its best objective, that objective, and the tolerance of "the same"."""
    best = float(np.nanmin(np.where(np.isfinite(found.objective), found.objective, np.inf)))
    tolerance = (1e-6 if objective.needs_scale else _SAME_OPTIMUM) * abs(best) + 1e-22
    return int((found.converged & (found.objective <= best + tolerance)).sum()), best, tolerance


def _search_on_a_sample(
    encoding: Encoding, table: pd.DataFrame, y: Array, w: Array, objective: Objective, rng: np.random.Generator
) -> tuple[Solution, Search, Array]:
    """The search on a random sample of rows; its optimum and two shaken copies are then polished on all rows."""
    seen = np.flatnonzero(w > 0)
    rows = np.sort(rng.choice(seen, min(_SAMPLE_ROWS, len(seen)), replace=False))
    part = table.iloc[rows].reset_index(drop=True)
    small = encode(encoding.law, part)
    found, search, _ = find_optimum(small, part, y[rows], w[rows], objective, rng)
    theta = encoding.internal(dict(zip(small.names, small.natural(found.theta)[0], strict=True)))
    shaken = theta + 0.05 * rng.standard_normal((_AGREEING - 1, len(theta)))
    full = solve(encoding.problem, np.concatenate([theta[None], shaken]), y, w, objective)
    k = int(np.nanargmin(np.where(np.isfinite(full.objective), full.objective, np.inf)))
    agreeing = _agreeing(full, objective)[0]
    if not search.certified:
        agreeing = min(agreeing, search.agreeing)
    one = Solution(*(getattr(full, f)[[k]] for f in Solution.__dataclass_fields__))
    return one, replace(search, agreeing=agreeing), np.zeros((0, len(theta)))


def second_try(problem: Problem, found: Solution, y: Array, w: Array, objective: Objective) -> Solution:
    """Refit the rows of a batch that did not converge, by way of smoother objectives; better rows replace the old ones."""
    rows = np.flatnonzero(~found.converged)
    y, w = y if y.ndim == 1 else y[rows], w if w.ndim == 1 else w[rows]
    theta = found.theta[rows]
    if isinstance(objective, Huber):
        ladder: list[Objective] = [Huber(d, on=objective.on) for d in _LADDER if d > objective.delta]
    else:
        ladder = [Gaussian(on=objective.on, variance="constant")]
    for easier in ladder:
        theta = solve(problem, theta, y, w, easier, max_iter=40).theta
    again = solve(problem, theta, y, w, objective, max_iter=400)
    old = found.objective[rows]
    better = (again.objective < old) | (again.converged & (again.objective <= old + _SAME_OPTIMUM * np.abs(old)))
    kept = Solution(*(getattr(again, f)[better] for f in Solution.__dataclass_fields__))
    return _replace(found, rows[better], kept)


def _starts(
    encoding: Encoding, table: pd.DataFrame, y: Array, w: Array, rng: np.random.Generator, best: int, more: int
) -> Array:
    """Projected starts; a crossed law starts from the common one, with the per-level parameters jittered."""
    law = encoding.law
    if not law.levels:
        return projected_starts(encoding, y, w, best=best, more=more, rng=rng)
    common = replace(
        law, by=None, levels=(), shared=frozenset(), fixed={k: v for k, v in law.fixed.items() if "[" not in k}
    )
    pooled = encode(common, table)
    starts = projected_starts(pooled, y, w, best=4, more=0, rng=rng)
    solved = solve(pooled.problem, starts, y, w, Gaussian(variance="constant"), max_iter=60)
    values = pooled.frame(solved.theta)
    out = []
    for k in range(min(best + more, 16)):
        row = values.iloc[k % len(values)]
        full = {name: row[name.split("[")[0]] for name in encoding.names}
        theta = encoding.internal(full)
        jitter = 0.0 if k < len(values) else 0.15
        out.append(theta + jitter * rng.standard_normal(len(theta)) * (np.abs(theta) > 0))
    return np.stack(out)


def better_of(a: Solution, b: Solution) -> Solution:
    """Row by row the solution with the smaller objective."""
    take = (b.objective < a.objective) | (~np.isfinite(a.objective) & np.isfinite(b.objective))
    return _replace(a, np.flatnonzero(take), Solution(*(getattr(b, f)[take] for f in Solution.__dataclass_fields__)))


def _replace(a: Solution, rows: NDArray[np.intp], part: Solution) -> Solution:
    fields = {}
    for name in Solution.__dataclass_fields__:
        values = getattr(a, name).copy()
        values[rows] = getattr(part, name)
        fields[name] = values
    return Solution(**fields)


def _joined(a: Solution, b: Solution) -> Solution:
    return Solution(*(np.concatenate([getattr(a, f), getattr(b, f)]) for f in Solution.__dataclass_fields__))

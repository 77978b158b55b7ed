"""Numerical minimum of a law on a FLOP budget, for all replicates at once.

The unknowns are ln N and, where shape matters, ln r; tokens follow from the budget. A coarse grid finds the basin (and
says so when it lies on the edge); then each replicate moves to the vertex of a quadratic through a shrinking stencil.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import expressions
from scalinglab.errors import ConfigError

Array = NDArray[np.float64]

_SUPPLIED = ("params", "tokens", "depth", "width", "aspect", "u", "flops")
_SHAPE = frozenset({"depth", "width", "aspect", "u"})
_SIZES, _ASPECTS = 49, 25  # coarse grid
_LEAST = 1e3  # parameters and tokens: below it nothing is a language model
_ASPECT_RANGE = (1e-2, 1e5)
_FINEST = 2e-3  # last stencil, in log units: bias of the vertex about (f'''/f'') h^2 / 6, under 1e-6
_SETTLED = 1e-6  # last move, in log units
_CHUNK = 256  # replicates on the coarse grid at once: some 3 MB per array
_BLOCK = 32  # replicates per call where only `predict` is there


@dataclass(frozen=True)
class Budget:
    """FLOPs per token: 6 N + 6 vocab width + m depth width context, with N = kappa depth width^2."""

    convention: str
    kappa: float
    vocab: float = 0.0
    score: float = 0.0  # m * context

    @classmethod
    def of(cls, convention: str, *, kappa: float, vocab: int | None, context: int | None) -> Budget:
        """Checked budget; `causal` (m = 6) and `full` (m = 12) need vocab and context."""
        if convention == "6n":
            return cls(convention, kappa)
        if convention not in ("causal", "full"):
            raise ConfigError(f"flops_convention {convention!r} is not known: use '6n', 'causal' or 'full'")
        if vocab is None or context is None or not (vocab > 0 and context > 0):
            raise ConfigError(f"{convention} FLOPs need positive vocab= and context=, not {vocab} and {context}")
        return cls(convention, kappa, float(vocab), (6.0 if convention == "causal" else 12.0) * context)

    def per_token(self, params: Array, depth: Array, width: Array) -> Array:
        """FLOPs per token, forward and backward."""
        if self.convention == "6n":
            return 6 * params
        return 6 * params + 6 * self.vocab * width + self.score * depth * width


@dataclass(frozen=True)
class Surface:
    """A fitted law as a function of the columns that a budget determines, for one group of a crossed fit."""

    key: str
    fit: Any
    group: str | None
    at: Mapping[str, float]
    reads: frozenset[str]

    @classmethod
    def of(cls, fit: Any, *, group: str | None, at: Mapping[str, float]) -> Surface:
        """Checked surface.

        Raises
        ------
        ConfigError
            A crossed fit without its group, an unknown group, or a column that neither the budget nor `at` gives.
        """
        levels = tuple(getattr(fit.law, "levels", ()))
        if levels and group not in levels:
            known = ", ".join(levels)
            raise ConfigError(f"the fit has one law per {fit.law.by}: give group=, one of {known}, not {group!r}")
        if group is not None and not levels:
            raise ConfigError(f"group={group!r} was given, but the fit isn't by a column")
        reads = frozenset(getattr(fit.law, "reads", ())) or _probe(fit, group, at)
        unknown = sorted(reads - set(_SUPPLIED) - set(at))
        if unknown:
            raise ConfigError(
                f"law {fit.law.key!r} reads {unknown[0]!r}, which a budget doesn't determine: "
                f"give at={{{unknown[0]!r}: ...}}"
            )
        return cls(fit.law.key, fit, group, dict(at), reads)

    @property
    def has_shape(self) -> bool:
        """Whether the law reads depth, width or aspect."""
        return bool(self.reads & _SHAPE)

    def values(self, params: pd.DataFrame) -> dict[str, Array]:
        """Parameters of this group under their plain names, [R] each, and the constants of the law."""
        law, rows = self.fit.law, len(params)
        out = {str(k): np.full(rows, float(v)) for k, v in dict(getattr(law, "constants", {})).items()}
        out |= {str(k): np.full(rows, float(v)) for k, v in dict(getattr(law, "fixed", {})).items()}
        for name in params.columns:
            plain, bracket, level = str(name).partition("[")
            if not bracket or level.removesuffix("]") == self.group:
                out[plain] = params[name].to_numpy(dtype=np.float64)
        for name, target in dict(getattr(law, "ties", {})).items():
            if name not in out and target in out:
                out[name] = out[target]
        return out

    def loss(self, params: pd.DataFrame, columns: Mapping[str, Array]) -> Array:
        """Loss [R, m] with its own columns [R, m] (or [1, m], shared) for each of R parameter sets."""
        law = self.fit.law
        rows = len(params)
        formula = getattr(law, "formula", "")
        if formula and getattr(law, "function", None) is None:
            values: dict[str, Any] = {k: v[:, None] for k, v in self.values(params).items()}
            values |= {k: float(v) for k, v in self.at.items()} | dict(columns)
            shape = np.broadcast_shapes((rows, 1), *(np.shape(c) for c in columns.values()))
            return np.broadcast_to(np.asarray(expressions.evaluate(formula, values), dtype=np.float64), shape)
        if all(len(c) == 1 for c in columns.values()):
            return self._predict(params, {k: c[0] for k, c in columns.items()})
        shape = np.broadcast_shapes((rows, 1), *(np.shape(c) for c in columns.values()))
        full = {k: np.broadcast_to(c, shape) for k, c in columns.items()}
        out = np.empty(shape)
        for start in range(0, rows, _BLOCK):  # predict gives every row of params at every run: keep the diagonal blocks
            block = slice(start, min(start + _BLOCK, rows))
            size = block.stop - start
            everything = self._predict(params.iloc[block], {k: c[block].ravel() for k, c in full.items()})
            out[block] = everything.reshape(size, size, -1)[np.arange(size), np.arange(size)]
        return out

    def _predict(self, params: pd.DataFrame, columns: Mapping[str, Array]) -> Array:
        runs = pd.DataFrame({**{k: np.asarray(v) for k, v in columns.items()}})
        for name, value in self.at.items():
            runs[name] = value
        if self.group is not None:
            runs[self.fit.law.by] = self.group
        return np.asarray(self.fit.predict(runs, params), dtype=np.float64)


def _probe(fit: Any, group: str | None, at: Mapping[str, float]) -> frozenset[str]:
    """What a law without a formula depends on, seen by moving N, D and the shape one at a time."""
    sizes = {"params": (1e9, 2e9, 1e9, 1e9), "tokens": (1e10, 1e10, 2e10, 1e10), "aspect": (40.0, 40.0, 40.0, 80.0)}
    runs = pd.DataFrame(sizes).assign(**at)
    runs["depth"] = np.cbrt(1e9 / (12 * runs["aspect"] ** 2))
    runs["width"] = runs["depth"] * runs["aspect"]
    if group is not None:
        runs[fit.law.by] = group
    loss = np.asarray(fit.predict(runs), dtype=np.float64)
    moved = (loss[1:] != loss[0]).tolist()
    names: tuple[frozenset[str], ...] = (frozenset({"params"}), frozenset({"tokens"}), _SHAPE)
    return frozenset[str]().union(*(n for n, m in zip(names, moved, strict=True) if m))


def minimise(surface: Surface, params: pd.DataFrame, budgets: Array, *, budget: Budget, shape: float | None) -> Array:
    """params, tokens, depth, width, aspect, loss at the optimum: [R, budgets, 6], NaN where there is no interior one.

    `shape` is an aspect ratio to hold; None optimises it where the law reads shape.
    """
    out = np.full((len(params), len(budgets), 6), np.nan)
    for start in range(0, len(params), _CHUNK):
        some = params.iloc[start : start + _CHUNK]
        for k, flops in enumerate(budgets):
            out[start : start + _CHUNK, k] = _one_budget(surface, some, float(flops), budget, shape)
    return out


def _one_budget(surface: Surface, params: pd.DataFrame, flops: float, budget: Budget, shape: float | None) -> Array:
    free_shape = shape is None and surface.has_shape

    def columns(x: Array) -> dict[str, Array]:  # x [.., m, dims] of ln N (and ln r)
        N = np.exp(x[..., 0])
        r = np.exp(x[..., 1]) if free_shape else np.full_like(N, np.nan if shape is None else shape)
        depth = np.cbrt(N / (budget.kappa * r * r))
        width = depth * r
        out = {"params": N, "tokens": flops / budget.per_token(N, depth, width)}
        if free_shape or shape is not None:
            out |= {"depth": depth, "width": width, "aspect": r}
            if (r0 := dict(getattr(surface.fit.law, "constants", {})).get("r0")) is not None:
                out["u"] = np.log(r / float(r0))
        out["flops"] = np.full_like(N, flops)
        return out

    def value(x: Array, rows: NDArray[np.intp]) -> Array:
        # +inf wherever the law isn't a number: such points are never the best
        found = surface.loss(params.iloc[rows], columns(x))
        return np.where(np.isfinite(found), found, np.inf)

    top = flops / (6 * _LEAST)
    if not top > 10 * _LEAST:
        return np.full((len(params), 6), np.nan)
    axes = [np.linspace(np.log(_LEAST), np.log(top), _SIZES)]
    if free_shape:
        axes.append(np.linspace(np.log(_ASPECT_RANGE[0]), np.log(_ASPECT_RANGE[1]), _ASPECTS))
    steps = np.array([a[1] - a[0] for a in axes])
    grid = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=-1)  # [m, dims]
    everyone = np.arange(len(params))
    coarse = value(grid[None], everyone)
    best = coarse.argmin(axis=1)
    x = grid[best]
    index = np.stack(np.unravel_index(best, [len(a) for a in axes]), axis=-1)
    inside = ((index > 0) & (index < np.array([len(a) for a in axes]) - 1)).all(axis=1)
    # a flat surface (no trade-off) has its argmin wherever rounding puts it
    lowest = coarse.min(axis=1)
    inside &= np.where(np.isfinite(coarse), coarse, -np.inf).max(axis=1) - lowest > 1e-12
    limits = np.stack([[a[0], a[-1]] for a in axes])
    x, converged = _descend(value, x, steps, limits, inside)
    at = {name: v[:, 0] for name, v in columns(x[:, None]).items()}
    loss = value(x[:, None], everyone)[:, 0]
    empty = np.full(len(params), np.nan)
    out = np.stack([at.get(n, empty) for n in ("params", "tokens", "depth", "width", "aspect")] + [loss], axis=-1)
    out[~converged] = np.nan
    return out


def _descend(
    value: Any, x: Array, steps: Array, limits: Array, start: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.bool_]]:
    """Quadratic-stencil descent of the rows of x [R, dims] marked `start`; which of them settled off the limits."""
    dims = x.shape[1]
    offsets = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=dims)))  # [3^dims, dims]
    inverse = np.linalg.pinv(_quadratic(offsets))
    x = x.copy()
    h = np.broadcast_to(steps, x.shape).copy()
    rows = np.flatnonzero(start)  # still moving
    settled = np.zeros(len(x), dtype=bool)
    for _ in range(80):
        if not len(rows):
            break
        at, step = x[rows], h[rows]
        y = value(at[:, None] + step[:, None] * offsets, rows)  # [rows, 3^dims]
        with np.errstate(all="ignore"):
            move = _vertex((y - y[:, len(offsets) // 2, None]) @ inverse.T, dims)
        convex = np.asarray(np.isfinite(move).all(axis=1))
        move = np.where(convex[:, None], move, offsets[y.argmin(axis=1)])  # not convex here: walk downhill
        near = np.asarray(np.abs(move).max(axis=1) <= 1)
        move = np.clip(move, -1, 1)
        x[rows] = np.clip(at + step * move, limits[:, 0], limits[:, 1])
        shrink: NDArray[np.bool_] = near & (convex | ~np.any(move, axis=1))
        h[rows] = np.where(shrink[:, None], np.maximum(step / 2, _FINEST), step)
        fine = step.max(axis=1) <= _FINEST * (1 + 1e-9)
        done = fine & near & convex & (np.abs(step * move).max(axis=1) < _SETTLED)
        settled[rows[done]] = True
        rows = rows[~done]
    inside = (x > limits[:, 0] + steps / 2).all(axis=1) & (x < limits[:, 1] - steps / 2).all(axis=1)
    return x, settled & inside


def _quadratic(offsets: Array) -> Array:
    columns = [np.ones(len(offsets)), *offsets.T, *(offsets.T**2)]
    if offsets.shape[1] == 2:
        columns.append(offsets[:, 0] * offsets[:, 1])
    return np.stack(columns, axis=1)


def _vertex(c: Array, dims: int) -> Array:
    """Minimum of the quadratic with coefficients c [R, terms] in units of the stencil; NaN where it isn't convex."""
    if dims == 1:
        return np.where(c[:, 2] > 0, -c[:, 1] / (2 * c[:, 2]), np.nan)[:, None]
    gx, gy, xx, yy, xy = c[:, 1], c[:, 2], 2 * c[:, 3], 2 * c[:, 4], c[:, 5]
    det = xx * yy - xy * xy
    move = np.stack([(-gx * yy + gy * xy) / det, (-gy * xx + gx * xy) / det], axis=1)
    return np.where(((xx > 0) & (det > 0))[:, None], move, np.nan)

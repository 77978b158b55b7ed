"""A law on given runs as the solver's problem, and the map between its parameters and the solver's.

Inside, amplitudes are logarithms at the geometric mean of their features (centred), so the problem is well conditioned;
coefficients stay as they are. Outside, parameters carry the field's names and natural scales (E in nats, A, alpha, ...).
Terms whose amplitude is shared, tied, fixed or bounded while its exponents vary are left uncentred, since only then is the
amplitude itself a coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import expressions
from scalinglab.blocks import Block, Problem
from scalinglab.errors import ConfigError
from scalinglab.features import feature_values, level_codes
from scalinglab.formulas import Group, Term
from scalinglab.laws import Law
from scalinglab.solver import COLLAPSED

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Slot:
    """Where a reported parameter lives: theta position (None: a constant), and how it is read from theta.

    kind "coefficient": theta; "amplitude": exp(theta + sum weight * theta[other]); "exponent": exp(theta).
    """

    kind: str
    position: int | None
    constant: float = np.nan
    shifts: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Encoding:
    """`problem` for the solver; `slots` say how each reported parameter is read from theta [P]."""

    law: Law
    problem: Problem
    slots: dict[str, Slot]
    coordinates: tuple[str, ...]  # reported parameter behind each theta position
    features: dict[int, Array] = field(default_factory=dict)  # coefficient position -> its feature [n], for grids

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slots)

    def natural(self, theta: Array) -> Array:
        """Reported parameters [R, p] of theta [R, P]; a collapsed amplitude is exactly 0."""
        theta = np.atleast_2d(theta)
        out = np.empty((len(theta), len(self.slots)))
        for c, slot in enumerate(self.slots.values()):
            if slot.position is None:
                out[:, c] = slot.constant
                continue
            value = theta[:, slot.position].copy()
            for other, weight in slot.shifts:
                value += weight * theta[:, other]
            if slot.kind in ("amplitude", "exponent"):
                with np.errstate(over="ignore"):
                    value = np.exp(value)
                if slot.kind == "amplitude":
                    value[theta[:, slot.position] <= COLLAPSED] = 0.0
            out[:, c] = value
        return out

    def internal(self, params: Mapping[str, Any]) -> Array:
        """theta [P] of reported parameters; the inverse of `natural`."""
        theta = np.zeros(self.problem.size)
        filled = np.zeros(self.problem.size, bool)
        for kind in (
            "exponent",
            "coefficient",
            "amplitude",
        ):  # amplitudes need the coefficients, all need the exponents
            for name, slot in self.slots.items():
                if slot.kind != kind or slot.position is None or filled[slot.position]:
                    continue
                value = float(params[name])
                if kind != "coefficient":
                    value = np.log(value) if value > 0 else COLLAPSED
                if value > COLLAPSED:
                    value -= sum(weight * theta[other] for other, weight in slot.shifts)
                theta[slot.position], filled[slot.position] = value, True
        return theta

    def frame(self, theta: Array) -> pd.DataFrame:
        """`natural` with the parameters' names as columns."""
        return pd.DataFrame(self.natural(theta), columns=list(self.slots))


def encode(law: Law, runs: pd.DataFrame, *, centred: bool = True) -> Encoding:
    """Compile a law for the rows of a run table.

    Raises
    ------
    SchemaError
        A column that the law reads is missing or not finite.
    ConfigError
        A bound, tie or fixed value that this law can't carry.
    OutsideAlgebra
        The law isn't a sum of log-linear terms.
    """
    return _Compiler(law, runs, centred).compile()


class _Compiler:
    def __init__(self, law: Law, runs: pd.DataFrame, centred: bool) -> None:
        self.law, self.centred, self.n = law, centred, len(runs)
        self.data = feature_values(law, runs)
        self.codes = level_codes(law, runs) if law.levels else None
        self.coordinates: list[str] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.slots: dict[str, Slot] = {}
        self.amplitudes: list[int] = []
        self.features: dict[int, Array] = {}
        self.unfit = {*law.ties, *law.ties.values()}

    def compile(self) -> Encoding:
        terms, groups = self.law.structure
        exponents = {g.exponent: self.exponent(g.exponent) for g in groups}
        blocks: list[Block] = []
        for term in terms:
            blocks += self.term(term, None)
        compiled_groups = []
        for g in groups:
            first = len(blocks)
            for term in g.terms:
                blocks += self.term(term, g)
            compiled_groups.append((exponents[g.exponent], tuple(range(first, len(blocks)))))
        if not blocks:
            raise ConfigError(f"law {self.law.key!r} has no term left to fit: all its amplitudes are fixed to 0")
        problem = Problem(
            tuple(blocks),
            len(self.coordinates),
            np.array(self.amplitudes, dtype=np.intp),
            np.array(self.lower),
            np.array(self.upper),
            tuple(compiled_groups),
        )
        slots = {name: self.slots[name] for name in self.law.param_names}
        return Encoding(self.law, problem, slots, tuple(self.coordinates), self.features)

    def place(self, name: str, low: float, high: float) -> int:
        self.coordinates.append(name)
        self.lower.append(low)
        self.upper.append(high)
        return len(self.coordinates) - 1

    def fixed(self, name: str) -> float | None:
        value = self.law.fixed.get(name, self.law.fixed.get(name.split("[")[0]))
        return None if value is None else float(value)

    def bounds(self, name: str) -> tuple[float, float]:
        low, high = self.law.bounds.get(name, self.law.bounds.get(name.split("[")[0], (-np.inf, np.inf)))
        return float(low), float(high)

    def exponent(self, name: str) -> int:
        value = self.fixed(name)
        low, high = self.bounds(name)
        if value is not None:
            if not value > 0:
                raise ConfigError(f"fixed: the outer exponent {name!r} must be positive, not {value}")
            low = high = value
        position = self.place(name, np.log(max(low, 1e-3)), np.log(min(high, 1e3)))
        self.slots[name] = Slot("exponent", position)
        return position

    def term(self, term: Term, group: Group | None) -> list[Block]:
        """One block per term; with free parameters per level its columns are indicators times features."""
        levels = self.law.levels
        free_amplitude = bool(levels) and term.amplitude not in self.law.shared
        free = {c.name for c in term.coefficients if levels and c.name not in self.law.shared}
        raw = [self.feature(c.feature) for c in term.coefficients]
        offset = None if term.offset is None else self.feature(term.offset)
        names = self.expand(term.amplitude, free_amplitude)
        values = [self.fixed(n) for n in names]
        limits = [self.bounds(n) for n in names]
        pinned = any(v is not None for v in values) or any(np.isfinite(b) and b > 0 for lim in limits for b in lim)
        shared_above_free = bool(levels) and not free_amplitude and bool(free)
        centre = self.centred and not pinned and not shared_above_free and term.amplitude not in self.unfit
        means = [float(f.mean()) if centre else 0.0 for f in raw]
        columns: list[Array] = []
        index: list[int] = []
        offset = np.zeros(self.n) if offset is None else offset.copy()
        inner = np.zeros(self.n)
        touched = term.offset is not None
        # coefficients first: the amplitudes refer to them
        where: dict[tuple[int, str], int] = {}
        for c, f, mean in zip(term.coefficients, raw, means, strict=True):
            if group is not None and c.name == group.exponent:
                inner = inner + c.sign * f  # its natural coefficient is the outer exponent: inside, the number 1
                continue
            target = self.law.ties.get(c.name, c.name)
            for name in self.expand(target, c.name in free):
                mask = self.mask(name)
                position = self.coefficient(name)
                where[(id(c), name)] = -1 if position is None else position
                if position is None:
                    offset += mask * c.sign * (self.fixed(name) or 0.0) * f
                    touched = True
                    continue
                column = mask * c.sign * (f - mean)
                self.features.setdefault(position, c.sign * f)
                if position in index:
                    columns[index.index(position)] = columns[index.index(position)] + column
                else:
                    columns.append(column)
                    index.append(position)
            if target != c.name:
                for mine, other in zip(
                    self.expand(c.name, c.name in free), self.expand(target, c.name in free), strict=True
                ):
                    self.slots[mine] = self.slots[other]
        dropped = np.zeros(self.n, bool)
        target = self.law.ties.get(term.amplitude, term.amplitude)
        for name, value, (low, high) in zip(names, values, limits, strict=True):
            mask = self.mask(name)
            if value is not None:
                self.slots[name] = Slot("amplitude", None, value)
                if value == 0:
                    dropped |= mask > 0
                else:
                    if value < 0:
                        raise ConfigError(f"fixed: the amplitude {name!r} must not be negative (got {value})")
                    offset += mask * np.log(value)
                    touched = True
                continue
            anchor = name if target == term.amplitude else self.expand(target, free_amplitude)[names.index(name)]
            if anchor in self.slots:
                position = self.slots[anchor].position
                assert position is not None
            else:
                position = self.place(
                    anchor, np.log(low) if low > 0 else -np.inf, np.log(high) if high > 0 else -np.inf
                )
                self.amplitudes.append(position)
            shifts = []
            for c, mean in zip(term.coefficients, means, strict=True):
                level = name[name.index("[") :] if "[" in name else ""
                base = self.law.ties.get(c.name, c.name)
                at = where.get((id(c), base + level if c.name in free else base), -1)
                if at >= 0 and mean != 0.0:
                    shifts.append((at, -c.sign * mean))
            slot = Slot("amplitude", position, shifts=tuple(shifts))
            self.slots.setdefault(anchor, slot)
            self.slots[name] = slot
            columns.append(np.ones(self.n) * mask)
            index.append(position)
        if dropped.all():
            for c in term.coefficients:
                for name in self.expand(c.name, c.name in free):
                    self.slots.setdefault(name, Slot("coefficient", None, np.nan))
            return []
        # a constant inside a tied term can't be told from a scale: inner stays as it is, the amplitude is uncentred there
        if dropped.any():
            offset = np.where(dropped, -1e4, offset)
            touched = True
        X = np.ascontiguousarray(np.stack(columns, 1)) if columns else np.zeros((self.n, 0))
        return [Block(X, np.array(index, dtype=np.intp), offset if touched else None, inner if inner.any() else None)]

    def coefficient(self, name: str) -> int | None:
        if name in self.slots:
            return self.slots[name].position
        value = self.fixed(name)
        low, high = self.bounds(name)
        if value is not None:
            self.slots[name] = Slot("coefficient", None, value)
            return None
        position = self.place(name, low, high)
        self.slots[name] = Slot("coefficient", position)
        return position

    def feature(self, text: str) -> Array:
        value = np.asarray(expressions.evaluate(text, self.data, what="feature"), dtype=np.float64)
        return np.broadcast_to(value, (self.n,)).astype(np.float64)

    def expand(self, name: str, free: bool) -> list[str]:
        return [f"{name}[{level}]" for level in self.law.levels] if free else [name]

    def mask(self, name: str) -> Array:
        if "[" not in name or self.codes is None:
            return np.ones(self.n)
        return (self.codes == self.law.levels.index(name[name.index("[") + 1 : -1])).astype(np.float64)

"""Bool: nested formulas whose sub-values are revealed now and then.

    ((0&1)=0|(1^(0|1)))=...      an inner value is revealed with probability r, the outer one always

A value is determined by the text, but costs an evaluation down to the last revealed level. What the next symbol may be
depends on the parentheses alone, so the true distribution is known at each token, and the floor follows exactly by
carrying the distribution over parenthesis states forward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from scalinglab.train.corpora.base import (
    NO_DIFFICULTY,
    Floats,
    Ints,
    Split,
    Synthetic,
    inner_edges,
    negative_log,
    real,
    whole,
)

OPEN, CLOSE, AND, OR, XOR, EQUALS = range(2, 8)  # 0 and 1 are the bits
_TOKENS = 8
# What is due next: a formula, an operand, what follows an operand, what follows ")", "=" after the outermost, a value.
_FORMULA, _OPERAND, _AFTER, _CLOSED, _FINAL, _VALUE = range(6)
# Kinds of next-token distributions, the rows of `Boolean._table`.
_START, _INNER, _LEAF, _OP, _END, _REVEAL_OP, _REVEAL_END, _EQUAL, _ZERO, _ONE = range(10)


@dataclass(frozen=True)
class Boolean(Synthetic):
    """Nested Boolean formulas over and, or, exclusive or, one after the other.

    Parameters
    ----------
    leaf_rate : float
        Probability that an operand is a bit and not a formula, within (0, 1); at `max_depth` it is always a bit.
    reveal_rate : float
        r, the probability that an inner formula shows its value, within (0, 1).
    max_depth : int
        Most open parentheses, 1..12.
    context : int
        Targets per sequence that `entropy` and `fingerprint` refer to, tokens; the last formula may be cut.

    Notes
    -----
    Difficulty is on the values after "=": the nesting depth that must be evaluated, down to bits or revealed values.

    Raises
    ------
    ConfigError
        A parameter is out of range.

    Examples
    --------
    >>> round(Boolean(max_depth=1).floor(7) * 7, 4)  # (a&b)=v: two bits and an operator, 2 log 2 + log 3
    2.4849
    """

    leaf_rate: float = 0.35
    reveal_rate: float = 0.3
    max_depth: int = 6
    context: int = 128

    name: ClassVar[str] = "boolean"

    def __post_init__(self) -> None:
        real(self.leaf_rate, "leaf_rate", low=0, high=1, open_ends=True)
        real(self.reveal_rate, "reveal_rate", low=0, high=1, open_ends=True)
        whole(self.max_depth, "max_depth", low=1, high=12)
        whole(self.context, "context", low=1)

    @property
    def symbols(self) -> int:
        """Bits, parentheses, three operators, "=" and begin-of-sequence."""
        return _TOKENS + 1

    def position_entropies(self, context: int) -> Floats:
        """H(target t | targets before it) for each position [T], nats.

        The state is what is due next and, for each open parenthesis, whether its second operand has begun.
        """
        whole(context, "context", low=1)
        h = np.empty(context)
        states: dict[tuple[int, tuple[int, ...]], float] = {(_FORMULA, ()): 1.0}
        for t in range(context):
            h[t] = sum(p * self._surprise[self._kind_of(due, sides)] for (due, sides), p in states.items())
            after: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
            for (due, sides), p in states.items():
                for state, q in self._followers(due, sides):
                    after[state] += p * q
            states = after
        return h

    def floor(self, context: int) -> float:
        """Mean of `position_entropies`, nats/token."""
        return float(self.position_entropies(context).mean())

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T]."""
        return self._read(targets)[0]

    def difficulty(self, targets: Ints) -> Ints:
        """Nesting depth to evaluate, on the values [B, T]."""
        return self._read(targets)[1]

    @cached_property
    def _table(self) -> Floats:
        """Distribution of the next token by kind [10, 8]."""
        p = np.zeros((10, _TOKENS))
        operators = [AND, OR, XOR]
        p[_START, OPEN] = 1.0
        p[_INNER, :2] = 0.5 * self.leaf_rate
        p[_INNER, OPEN] = 1.0 - self.leaf_rate
        p[_LEAF, :2] = 0.5
        p[_OP, operators] = 1.0 / 3.0
        p[_END, CLOSE] = 1.0
        p[_REVEAL_OP, operators] = (1.0 - self.reveal_rate) / 3.0
        p[_REVEAL_END, CLOSE] = 1.0 - self.reveal_rate
        p[[_REVEAL_OP, _REVEAL_END], EQUALS] = self.reveal_rate
        p[_EQUAL, EQUALS] = 1.0
        p[_ZERO, 0] = p[_ONE, 1] = 1.0
        return p

    @cached_property
    def _surprise(self) -> Floats:
        """Entropy of each kind, nats [10]."""
        logs = np.where(self._table > 0, -np.log(np.where(self._table > 0, self._table, 1.0)), 0.0)
        return np.asarray((self._table * logs).sum(1))

    def _kind_of(self, due: int, sides: tuple[int, ...]) -> int:
        second = bool(sides) and sides[-1] == 1
        if due == _OPERAND:
            return _LEAF if len(sides) >= self.max_depth else _INNER
        if due == _AFTER:
            return _END if second else _OP
        if due == _CLOSED:
            return _REVEAL_END if second else _REVEAL_OP
        return {_FORMULA: _START, _FINAL: _EQUAL, _VALUE: _ZERO}[due]

    def _followers(self, due: int, sides: tuple[int, ...]) -> list[tuple[tuple[int, tuple[int, ...]], float]]:
        """States after one token with their probabilities; bits and operators are not told apart."""
        after_close = (_CLOSED if len(sides) > 1 else _FINAL, sides[:-1])
        moved_on = after_close if sides and sides[-1] else (_OPERAND, (*sides[:-1], 1))
        if due == _FORMULA:
            return [((_OPERAND, (0,)), 1.0)]
        if due == _OPERAND:
            leaf = 1.0 if len(sides) >= self.max_depth else self.leaf_rate
            return [((_AFTER, sides), leaf)] + ([((_OPERAND, (*sides, 0)), 1.0 - leaf)] if leaf < 1 else [])
        if due == _AFTER:
            return [(moved_on, 1.0)]
        if due == _CLOSED:
            return [((_VALUE, sides), self.reveal_rate), (moved_on, 1.0 - self.reveal_rate)]
        if due == _FINAL:
            return [((_VALUE, sides), 1.0)]
        return [((_AFTER if sides else _FORMULA, sides), 1.0)]

    def _uniforms(self, context: int) -> int:
        return context

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        machine = _Machine(len(uniforms), self.max_depth)
        edges = inner_edges(self._table)
        out = np.empty((len(uniforms), context), dtype=np.int64)
        for t in range(context):
            token = (edges[machine.kind()] <= uniforms[:, t, None]).sum(1)
            machine.advance(token)
            out[:, t] = token
        return out

    def _read(self, targets: Ints) -> tuple[Floats, Ints]:
        """Oracle and difficulty. After an impossible token a sequence costs infinitely many nats throughout."""
        machine = _Machine(len(targets), self.max_depth)
        table = negative_log(self._table)
        nats = np.empty(targets.shape)
        labels = np.full(targets.shape, NO_DIFFICULTY, dtype=np.int64)
        lost = np.zeros(len(targets), dtype=bool)
        for t in range(targets.shape[1]):
            kind = machine.kind()
            inside = (targets[:, t] >= 0) & (targets[:, t] < _TOKENS)
            nats[:, t] = np.where(inside, table[kind, np.where(inside, targets[:, t], 0)], np.inf)
            lost |= np.isinf(nats[:, t])
            nats[lost, t] = np.inf
            valued = (machine.due == _VALUE) & ~lost
            labels[valued, t] = machine.need[valued]
            # A lost sequence goes on with tokens that are legal, so that the machine stays sound.
            machine.advance(np.where(lost, self._table[kind].argmax(1), targets[:, t]))
        return nats, labels


class _Machine:
    """Stack machines that read one token each per step: B formulas side by side."""

    def __init__(self, count: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self.due = np.full(count, _FORMULA)
        self.depth = np.zeros(count, dtype=np.int64)
        self.value = np.zeros(count, dtype=np.int64)  # of the operand that was read last
        self.need = np.zeros(count, dtype=np.int64)  # depth of what it takes to know it
        shape = (count, max_depth + 1)  # frame 0 stays empty
        self.second = np.zeros(shape, dtype=np.int64)
        self.left = np.zeros(shape, dtype=np.int64)
        self.left_need = np.zeros(shape, dtype=np.int64)
        self.operator = np.zeros(shape, dtype=np.int64)
        self._row = np.arange(count)

    def kind(self) -> Ints:
        """Row of the next-token table [B]."""
        second = self.second[self._row, self.depth]
        full = self.depth >= self.max_depth
        options = [
            np.full_like(second, _START),
            _INNER + full,
            _OP + second,
            _REVEAL_OP + second,
            np.full_like(second, _EQUAL),
            _ZERO + self.value,
        ]
        return np.choose(self.due, options)

    def advance(self, token: Ints) -> None:
        """Read one legal token per formula [B]."""
        bit = np.flatnonzero(token < OPEN)
        self.need[bit] = 0
        self.value[bit] = token[bit]
        self.due[bit] = np.where(self.depth[bit] > 0, _AFTER, _FORMULA)

        opened = np.flatnonzero(token == OPEN)
        self.depth[opened] += 1
        self.second[opened, self.depth[opened]] = 0
        self.due[opened] = _OPERAND

        op = np.flatnonzero((token >= AND) & (token <= XOR))
        frame = self.depth[op]
        self.left[op, frame] = self.value[op]
        self.left_need[op, frame] = self.need[op]
        self.operator[op, frame] = token[op]
        self.second[op, frame] = 1
        self.due[op] = _OPERAND

        closed = np.flatnonzero(token == CLOSE)
        frame = self.depth[closed]
        a, b = self.left[closed, frame], self.value[closed]
        self.value[closed] = np.choose(self.operator[closed, frame] - AND, [a & b, a | b, a ^ b])
        self.need[closed] = np.maximum(self.left_need[closed, frame], self.need[closed]) + 1
        self.depth[closed] -= 1
        self.due[closed] = np.where(self.depth[closed] > 0, _CLOSED, _FINAL)

        self.due[token == EQUALS] = _VALUE

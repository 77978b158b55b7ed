"""Perm: word problems of permutation groups, with questions about the state in between.

    state = identity;  event: a generator (probability 1 - q, uniform), or a question "who is in slot i?" and its answer

Tracking the state of a non-solvable group (S5, A5) is complete for NC1: with a word of length n, the known shallow
solutions need depth growing with log n, whereas cyclic groups need constant depth. See Merrill, Petty and Sabharwal
(2024), "The illusion of state in state-space models", and Liu et al. (2023), "Transformers learn shortcuts to automata".

    floor = H_0 · mean_t e_t,   H_0 = h(q) + (1-q) log G + q log n,   e_1 = 1,  e_(t+1) = 1 - q e_t

with e_t the probability that an event starts at target t, and G generators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from scalinglab.train.corpora.base import NO_DIFFICULTY, Floats, Ints, Split, Synthetic, real, require, whole

Group: TypeAlias = Literal["symmetric", "alternating", "cyclic"]
_LARGEST = {"symmetric": 7, "alternating": 7, "cyclic": 1000}


@dataclass(frozen=True)
class WordProblem(Synthetic):
    """Words over the generators of a permutation group, and questions about the product so far.

    Parameters
    ----------
    group : {"symmetric", "alternating", "cyclic"}
        S_n from a swap and an n-cycle (two symbols even where these coincide); A_n from a 3-cycle and an odd long cycle;
        C_n from a rotation by one either way.
    points : int
        n, the points permuted: 2..7 (S_n), 3..7 (A_n), 2..1000 (C_n).
    question_rate : float
        q, the probability that an event is a question, within (0, 1).
    context : int
        Targets per sequence that `entropy` and `fingerprint` refer to, tokens.

    Notes
    -----
    Difficulty is the word length: the number of generators before an answer, from the start of the sequence. Earlier
    answers reveal part of the state, so it is an upper bound of what must be composed.

    Raises
    ------
    ConfigError
        A parameter is out of range.

    Examples
    --------
    >>> round(WordProblem(points=5).entropy, 4), round(WordProblem(points=3).entropy, 4)
    (1.2404, 1.0941)
    """

    group: Group = "symmetric"
    points: int = 5
    question_rate: float = 0.4
    context: int = 128

    name: ClassVar[str] = "wordproblem"

    def __post_init__(self) -> None:
        require(self.group in get_args(Group), f"group = {self.group!r}: take one of {', '.join(get_args(Group))}")
        whole(self.points, "points", low=3 if self.group == "alternating" else 2, high=_LARGEST[self.group])
        real(self.question_rate, "question_rate", low=0, high=1, open_ends=True)
        whole(self.context, "context", low=1)

    @property
    def symbols(self) -> int:
        """Generators, then questions by slot, then answers by item, then begin-of-sequence."""
        return len(self.generators) + 2 * self.points + 1

    @cached_property
    def generators(self) -> tuple[tuple[int, ...], ...]:
        """Each as the slots that the items come from: new[i] = old[g[i]]."""
        n = self.points
        rotate = (*range(1, n), 0)
        if self.group == "cyclic":
            return rotate, (n - 1, *range(n - 1))
        if self.group == "symmetric":
            return (1, 0, *range(2, n)), rotate
        three = (1, 2, 0, *range(3, n))
        return three, rotate if n % 2 else (0, *range(2, n), 1)

    @cached_property
    def elements(self) -> Ints:
        """All arrangements that the generators reach, the identity first [order of the group, n]."""
        start = tuple(range(self.points))
        found = {start: 0}
        queue = [start]
        for state in queue:  # the list grows while it is read: breadth first
            for g in self.generators:
                after = tuple(state[i] for i in g)
                if after not in found:
                    found[after] = len(found)
                    queue.append(after)
        return np.array(queue, dtype=np.int64)

    def position_entropies(self, context: int) -> Floats:
        """H(target t | targets before it) for each position [T], nats."""
        whole(context, "context", low=1)
        q = self.question_rate
        start = 1.0
        starts = []
        for _ in range(context):
            starts.append(start)
            start = 1.0 - q * start
        kind = -(q * math.log(q) + (1 - q) * math.log1p(-q))
        event = kind + (1 - q) * math.log(len(self.generators)) + q * math.log(self.points)
        return event * np.array(starts)

    def floor(self, context: int) -> float:
        """H_0 · mean_t e_t, nats/token."""
        return float(self.position_entropies(context).mean())

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T]; answers cost nothing."""
        g, n, q = len(self.generators), self.points, self.question_rate
        answer = _after_question((targets >= g) & (targets < g + n))
        is_op = ~answer & (targets >= 0) & (targets < g)
        is_question = ~answer & (targets >= g) & (targets < g + n)
        nats = np.full(targets.shape, np.inf)
        nats[is_op] = -math.log((1 - q) / g)
        nats[is_question] = -math.log(q / n)
        slot = np.zeros_like(targets)
        slot[:, 1:] = np.clip(targets[:, :-1] - g, 0, n - 1)
        states = self._states(np.where(is_op, targets, g))
        nats[answer & (targets == g + n + self.elements[states, slot])] = 0.0
        return nats

    def difficulty(self, targets: Ints) -> Ints:
        """Generators before an answer [B, T]."""
        length = np.cumsum(targets < len(self.generators), axis=1)
        return np.where(targets >= len(self.generators) + self.points, length, NO_DIFFICULTY)

    @cached_property
    def _steps(self) -> Ints:
        """State after a generator, or after none (the last column) [order, G + 1]."""
        index = {tuple(state): i for i, state in enumerate(self.elements.tolist())}
        rows = [[index[tuple(s[i] for i in g)] for g in self.generators] for s in self.elements.tolist()]
        return np.column_stack([np.array(rows, dtype=np.int64), np.arange(len(self.elements))])

    def _states(self, moves: Ints) -> Ints:
        """State after each move, by number [B, T]; move G leaves it."""
        steps, columns = self._steps.ravel(), self._steps.shape[1]
        moved = np.ascontiguousarray(moves.T)
        states = np.empty_like(moved)
        state = np.zeros(len(moves), dtype=np.int64)
        for t in range(len(moved)):
            state = steps.take(state * columns + moved[t])
            states[t] = state
        return states.T

    def _uniforms(self, context: int) -> int:
        return context

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        g, n, q = len(self.generators), self.points, self.question_rate
        op = np.minimum(uniforms / (1 - q) * g, g - 1).astype(np.int64)
        slot = np.minimum(np.maximum(uniforms - (1 - q), 0) / q * n, n - 1).astype(np.int64)
        event = np.where(uniforms < 1 - q, op, g + slot)
        answer = _after_question(event >= g)
        states = self._states(np.where(answer, g, np.minimum(event, g)))
        asked = np.zeros_like(slot)
        asked[:, 1:] = slot[:, :-1]
        return np.where(answer, g + n + self.elements[states, asked], event)


def _after_question(question: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where answers stand: after a question that is not itself in the place of an answer [B, T]."""
    answer = np.zeros_like(question)
    for t in range(1, question.shape[1]):
        answer[:, t] = question[:, t - 1] & ~answer[:, t - 1]
    return answer

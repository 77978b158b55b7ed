"""RHM: the random hierarchy model, a random grammar with a known floor.

    root uniform over v symbols; each symbol has m productions into b symbols; L levels; T = b^L

No right-hand side is shared within a level, so string and derivation determine each other and

    floor = [log v + (b^L - 1)/(b - 1) · H(p)] / b^L,        p the probabilities of the m productions.

Source: Cagnetta, Petrini, Tomasini, Favero and Wyart, "How deep neural networks learn compositional data: the random
hierarchy model", Physical Review X 14, 031001 (2024); Zipf-distributed productions: Cagnetta, Kang and Wyart (2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.base import (
    NO_DIFFICULTY,
    Floats,
    Ints,
    Split,
    Synthetic,
    entropy_nats,
    negative_log,
    pick,
    real,
    require,
    whole,
    zipf,
)


@dataclass(frozen=True)
class Hierarchy(Synthetic):
    """Sentences of a random hierarchy model; a context of several sentences holds independent ones in a row.

    Parameters
    ----------
    symbols_per_level : int
        v, the same at all levels; the terminal symbols are the alphabet.
    productions : int
        m per symbol, with v m <= v^b.
    branching, levels : int
        b children per symbol and L levels.
    zipf_exponent : float
        Production r has probability proportional to r^-zipf_exponent; 0 is uniform. Zipf's law smooths the staircase by
        which the levels are learned.
    seed : int
        Of the grammar, not of the sentences.

    Notes
    -----
    Difficulty is the tree level: the height of the lowest node that holds a token and the one before it. Predicting it
    better than its frequency needs that many levels of the hierarchy (1..L). The first token of a sentence has none.

    Raises
    ------
    ConfigError
        A parameter is out of range, the grammar would be ambiguous, or the context isn't a multiple of b^L.

    Examples
    --------
    >>> round(Hierarchy().entropy, 4)
    0.704
    """

    symbols_per_level: int = 8
    productions: int = 2
    branching: int = 2
    levels: int = 7
    zipf_exponent: float = 0.0
    seed: int = 0

    name: ClassVar[str] = "hierarchy"

    def __post_init__(self) -> None:
        whole(self.symbols_per_level, "symbols_per_level", low=2)
        whole(self.productions, "productions", low=1)
        whole(self.branching, "branching", low=2, high=16)
        whole(self.levels, "levels", low=1, high=30)
        real(self.zipf_exponent, "zipf_exponent", low=0, high=16)
        whole(self.seed, "seed", low=0)
        require(
            self.branching**self.levels <= 2**20,
            f"sentences of {self.branching}^{self.levels} tokens: take fewer levels",
        )
        strings = self.symbols_per_level**self.branching
        require(
            strings <= 2**22, f"{self.symbols_per_level}^{self.branching} right-hand sides are too many for a table"
        )
        require(
            self.symbols_per_level * self.productions <= strings,
            f"productions = {self.productions}: {self.symbols_per_level} symbols of that many need more than the {strings} "
            f"right-hand sides there are, so some would be shared and the floor unknown; take at most "
            f"{strings // self.symbols_per_level}",
        )

    @property
    def context(self) -> int:  # type: ignore[override]
        """Length b^L of a sentence, tokens."""
        return int(self.branching**self.levels)

    @property
    def symbols(self) -> int:
        """Terminal symbols and begin-of-sequence."""
        return self.symbols_per_level + 1

    def floor(self, context: int) -> float:
        """[log v + (b^L - 1)/(b - 1) H(p)] / b^L, nats/token."""
        self._check_context(context)
        inner = (self.context - 1) // (self.branching - 1)
        return (math.log(self.symbols_per_level) + inner * entropy_nats(self._p)) / self.context

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T].

        From left to right, along the path from the root to the next token: finished constituents are known for sure,
        and each node of the path has a posterior over its symbols. With uniform productions the sum over a sentence is
        the same for all of them; the single terms are not.
        """
        self._check_context(targets.shape[1])
        return self._score(targets.reshape(-1, self.context)).reshape(targets.shape)

    def difficulty(self, targets: Ints) -> Ints:
        """Height of the lowest node over a token and the one before it, 1..L [B, T]."""
        place = np.arange(targets.shape[1]) % self.context
        height = np.ones_like(place)
        for level in range(1, self.levels):
            height[place % self.branching**level == 0] = level + 1
        height[place == 0] = NO_DIFFICULTY
        return np.broadcast_to(height, targets.shape).astype(np.int64)

    @cached_property
    def _p(self) -> Floats:
        return zipf(self.productions, self.zipf_exponent)

    @cached_property
    def _rules(self) -> list[Ints]:
        """Right-hand sides of each level [v, m, b], the root's first."""
        v, b = self.symbols_per_level, self.branching
        rng = np.random.default_rng(self.seed)
        place = v ** np.arange(b - 1, -1, -1)
        tables = []
        for _ in range(self.levels):
            codes = np.argsort(rng.random(v**b), kind="stable")[: v * self.productions]
            tables.append((codes[:, None] // place % v).reshape(v, self.productions, b).astype(np.int64))
        return tables

    @cached_property
    def _parents(self) -> list[Ints]:
        """Symbol that a right-hand side belongs to, by its code; -1 where it is none [levels][v^b]."""
        v, b = self.symbols_per_level, self.branching
        tables = []
        for rules in self._rules:
            parents = np.full(v**b, -1, dtype=np.int64)
            parents[rules @ v ** np.arange(b - 1, -1, -1)] = np.arange(v)[:, None]
            tables.append(parents)
        return tables

    def _check_context(self, context: int) -> None:
        whole(context, "context", low=1)
        if context % self.context:
            raise ConfigError(
                f"context = {context}: a sentence has {self.branching}^{self.levels} = {self.context} tokens; take a "
                f"multiple of it, or other levels"
            )

    def _uniforms(self, context: int) -> int:
        inner = (self.context - 1) // (self.branching - 1)
        return context // self.context * (1 + inner)

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        v, m, b = self.symbols_per_level, self.productions, self.branching
        inner = (self.context - 1) // (b - 1)
        u = uniforms.reshape(-1, 1 + inner)
        row = (u[:, :1] * v).astype(np.int64)
        choice = (u[:, 1:] * m).astype(np.int64) if self.zipf_exponent == 0 else pick(u[:, 1:], self._p)
        at = 0
        for rules in self._rules:
            nodes = row.shape[1]
            row = rules.reshape(v * m, b).take(row * m + choice[:, at : at + nodes], axis=0).reshape(len(u), nodes * b)
            at += nodes
        return row.reshape(len(uniforms), context)

    def _score(self, sentences: Ints) -> Floats:
        """Oracle of single sentences [S, b^L]."""
        v, b, levels = self.symbols_per_level, self.branching, self.levels
        count = len(sentences)
        inside = (sentences >= 0) & (sentences < v)
        nats = np.empty(sentences.shape)
        # known[l]: symbols of all constituents l levels below the root [S, b^l], -1 where they don't parse.
        known = [np.where(inside, sentences, -1)]
        for parents in reversed(self._parents):
            children = known[0].reshape(count, -1, b)
            code = np.where(children.min(2) < 0, 0, children @ v ** np.arange(b - 1, -1, -1))
            known.insert(0, np.where(children.min(2) < 0, -1, parents[code]))
        belief = [np.full((count, v), 1.0 / v)] + [np.empty((count, v))] * levels  # over the path's symbols, per level
        for t in range(self.context):
            # Levels whose node on the path is another than a token ago; at the start, all below the root.
            fresh = next((l for l in range(1, levels + 1) if t % b ** (levels - l) == 0), levels) if t else 1
            for level in range(fresh, levels + 1):
                node = t // b ** (levels - level)
                first = node - node % b
                rules = self._rules[level - 1]
                weight = belief[level - 1][:, :, None] * self._p
                for sibling in range(first, node):
                    weight = weight * (rules[:, :, sibling - first] == known[level][:, sibling, None, None])
                child = rules[:, :, node - first].ravel()
                belief[level] = np.stack([weight.reshape(count, -1)[:, child == s].sum(1) for s in range(v)], axis=1)
                total = belief[level].sum(1, keepdims=True)
                belief[level] = np.divide(belief[level], total, out=np.zeros_like(belief[level]), where=total > 0)
            chosen = np.take_along_axis(belief[levels], np.where(inside[:, t], sentences[:, t], 0)[:, None], axis=1)[
                :, 0
            ]
            nats[:, t] = negative_log(np.where(inside[:, t], chosen, 0.0))
        return nats

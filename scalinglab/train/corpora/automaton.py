"""CA: roll-outs of a cellular automaton, k steps at a time. The default corpus of depth studies.

    [rule] k  row_1  row_2  ...        row_1 uniform bits, row_(i+1) = rule applied k times to row_i (cyclic)

Everything after row 1 is determined, and one row needs k applications in series (or a table of 2^(2k+1) neighbourhoods),
so a model pays for a lack of depth at large k. The floor of one rule is (H(p_k) + w log 2)/T.

Elementary automata have the rule numbers of Wolfram (1983); rule 110 is universal (Cook 2004).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.base import NO_DIFFICULTY, Floats, Ints, Split, Synthetic, real, require, whole, zipf
from scalinglab.train.corpora.joint import Joint, split_joint

_WORD = 32  # bits taken from one uniform, which has 53


@dataclass(frozen=True)
class Automaton(Synthetic):
    """k-step roll-outs of elementary cellular automata.

    Parameters
    ----------
    rules : tuple of int
        Wolfram numbers, 0..255. With more than one, a sequence begins with a symbol for its rule, drawn uniformly.
    width : int
        Cells w of a row, at least 3. There are 2^w first rows: at w = 16 a long training run meets some evaluation
        sequences; widen the row where that matters.
    max_steps : int
        Largest k; k is drawn with probability proportional to k^-steps_exponent.
    steps_exponent : float
        0 for uniform k.
    held_out : tuple of (rule, k)
        Combinations that training never shows; `evaluation(split="held_out")` shows nothing else. Each rule and each k
        must stay in training in some other combination.
    context : int
        Targets per sequence that `entropy` and `fingerprint` refer to, tokens.

    Notes
    -----
    Difficulty is k, on all targets after the first row. On the held-out side the symbols for rule and k are drawn from
    the held-out combinations, so compare losses and accuracies on labelled positions only.

    Raises
    ------
    ConfigError
        A parameter is out of range, or the context does not reach the second row.

    Examples
    --------
    >>> corpus = Automaton()
    >>> round(corpus.entropy, 4)
    0.0972
    >>> Automaton.compositional().held_out
    ((110, 1), (30, 2), (54, 3), (150, 4))
    """

    rules: tuple[int, ...] = (110,)
    width: int = 16
    max_steps: int = 4
    steps_exponent: float = 0.5
    held_out: tuple[tuple[int, int], ...] = ()
    context: int = 128

    name: ClassVar[str] = "automaton"

    def __post_init__(self) -> None:
        require(isinstance(self.rules, tuple) and len(self.rules) > 0, "rules: give at least one rule number")
        for rule in self.rules:
            whole(rule, "rule", low=0, high=255)
        require(len(set(self.rules)) == len(self.rules), f"rules = {self.rules}: a rule is listed twice")
        whole(self.width, "width", low=3)
        whole(self.max_steps, "max_steps", low=1)
        real(self.steps_exponent, "steps_exponent", low=-16, high=16)
        self._check_context(self.context)
        self._joint  # noqa: B018  # raises what is wrong with held_out

    @classmethod
    def compositional(cls, *, width: int = 16, context: int = 128) -> Automaton:
        """Four rules, k up to 4, and one k held out for each rule: a balanced split.

        Each rule is seen with three values of k, each k with three rules. The rules are 110 (complex), 30 (chaotic), 54
        (complex) and 150 (additive).
        """
        rules = (110, 30, 54, 150)
        held_out = tuple((rule, k) for k, rule in enumerate(rules, start=1))
        return cls(rules=rules, width=width, max_steps=4, held_out=held_out, context=context)

    @property
    def symbols(self) -> int:
        """Bits 0 and 1, then k, then rules (where there are several), then begin-of-sequence."""
        return 2 + self.max_steps + (len(self.rules) if self._header == 2 else 0) + 1

    def position_entropies(self, context: int) -> Floats:
        """H(target t | targets before it) for each position [T], nats."""
        self._check_context(context)
        h = np.zeros(context)
        rule, k = self._joint["seen"].entropies
        h[: self._header] = [rule, k][-self._header :]
        h[self._header : self._header + self.width] = math.log(2.0)
        return h

    def floor(self, context: int) -> float:
        """(H(rule) + H(k | rule) + w log 2)/T, nats/token."""
        return float(self.position_entropies(context).sum() / context)

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T]; constant over sequences up to the symbols for rule and k."""
        context = targets.shape[1]
        start = self._header + self.width
        rule, k, fits = self._read_header(targets)  # fits [B, header]: junk costs where it stands, not before
        bits = targets[:, self._header : start]
        determined = self._roll_out(rule, k, np.clip(bits, 0, 1).astype(np.uint8), context)
        nats = np.where(targets == determined, 0.0, np.inf)
        nats[:, self._header : start] = np.where((bits == 0) | (bits == 1), math.log(2.0), np.inf)
        of_rule, of_k = self._joint[split].nats(rule, k)
        nats[:, : self._header] = np.stack([of_rule, of_k], axis=1)[:, -self._header :]
        nats[:, : self._header][~fits] = np.inf
        return nats

    def difficulty(self, targets: Ints) -> Ints:
        """k on all targets after the first row [B, T]."""
        labels = np.full(targets.shape, NO_DIFFICULTY, dtype=np.int64)
        _, k, _ = self._read_header(targets)
        labels[:, self._header + self.width :] = k[:, None] + 1
        return labels

    @property
    def _header(self) -> int:
        return 1 if len(self.rules) == 1 else 2

    @cached_property
    def _joint(self) -> dict[Split, Joint]:
        places = []
        for pair in self.held_out:
            if len(pair) != 2 or pair[0] not in self.rules or pair[1] not in range(1, self.max_steps + 1):
                raise ConfigError(
                    f"held_out: {pair!r} is no combination (rule, k) of rules {self.rules} and k = 1..{self.max_steps}"
                )
            places.append((self.rules.index(pair[0]), pair[1] - 1))
        uniform = np.full(len(self.rules), 1.0 / len(self.rules))
        return split_joint(uniform, zipf(self.max_steps, self.steps_exponent), tuple(places), ("rule", "k"))

    @cached_property
    def _tables(self) -> NDArray[np.uint8]:
        """Next cell for rule and neighbourhood 4·left + 2·centre + right [rules, 8]."""
        return np.array([[rule >> i & 1 for i in range(8)] for rule in self.rules], dtype=np.uint8)

    def _check_context(self, context: int) -> None:
        whole(context, "context", low=1)
        need = self._header + self.width + 1
        require(
            context >= need,
            f"context = {context}: an automaton {self.width} cells wide reaches its second row at {need} tokens; "
            f"take a longer context or a smaller width",
        )

    def _check_held_out(self) -> None:
        require(bool(self.held_out), "automaton holds nothing out: give held_out, or take Automaton.compositional()")

    def _uniforms(self, context: int) -> int:
        return 1 + -(-self.width // _WORD)

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        rule, k = self._joint[split].draw(uniforms[:, 0])
        words = (uniforms[:, 1:] * 2.0**_WORD).astype(np.uint32)
        bits = (words[:, :, None] >> np.arange(_WORD, dtype=np.uint32)) & np.uint32(1)
        row = bits.reshape(len(bits), -1)[:, : self.width].astype(np.uint8)
        return self._roll_out(rule, k, row, context)

    def _roll_out(self, rule: Ints, k: Ints, row: NDArray[np.uint8], context: int) -> Ints:
        """The sequence that rule, k (from 0) and first row determine [B, T]."""
        rows = -(-(context - self._header) // self.width)
        out = np.empty((len(row), self._header + rows * self.width), dtype=np.int64)
        out[:, self._header - 1] = 2 + k
        if self._header == 2:
            out[:, 0] = 2 + self.max_steps + rule
        tables = self._tables.ravel()
        base = (8 * rule).astype(np.intp)[:, None]
        active = [None if not step else (k >= step)[:, None] for step in range(int(k.max()) + 1)]
        framed = np.empty((len(row), self.width + 2), dtype=np.uint8)  # a copy of the far cell on either side
        for i in range(rows):
            at = self._header + i * self.width
            out[:, at : at + self.width] = row
            if i + 1 == rows:
                break
            for mask in active:
                framed[:, 1:-1] = row
                framed[:, 0] = row[:, -1]
                framed[:, -1] = row[:, 0]
                code = 4 * framed[:, :-2] + 2 * row + framed[:, 2:]
                stepped = tables.take(base + code) if self._header == 2 else tables.take(code)
                row = stepped if mask is None else np.where(mask, stepped, row)
        return out[:, :context]

    def _read_header(self, targets: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Rule and k (positions from 0), [B], and whether each symbol of the header is one [B, header]."""
        k = targets[:, self._header - 1] - 2
        rule = targets[:, 0] - 2 - self.max_steps if self._header == 2 else np.zeros_like(k)
        fits = np.stack([(rule >= 0) & (rule < len(self.rules)), (k >= 0) & (k < self.max_steps)], axis=1)
        fits = fits[:, -self._header :]
        return np.clip(rule, 0, len(self.rules) - 1), np.clip(k, 0, self.max_steps - 1), fits

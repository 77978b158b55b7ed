"""Markov: a random chain of order k, the control that needs no depth.

    floor = [H(x_1..x_k) + (T - k) · sum_c pi(c) H(P_c)] / T

with rows P_c from a Dirichlet distribution and pi the stationary distribution over contexts of k symbols, from which the
first k symbols are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.base import (
    Floats,
    Ints,
    Split,
    Synthetic,
    entropy_nats,
    inner_edges,
    negative_log,
    pick,
    real,
    require,
    whole,
)

_TOLERANCE = 1e-14  # total variation per step at which the stationary distribution is taken as reached
_MOST_STEPS = 200_000


@dataclass(frozen=True)
class Markov(Synthetic):
    """A stationary Markov chain of order k.

    Parameters
    ----------
    alphabet : int
        v symbols.
    order : int
        k, at least 1.
    concentration : float
        Of the symmetric Dirichlet distribution of the rows; small is sparse.
    seed : int
        Of the table, not of the sequences.
    context : int
        Targets per sequence that `entropy` and `fingerprint` refer to, tokens.

    Notes
    -----
    Difficulty is the number of symbols that the true distribution of a target looks back at: 0, 1, ..., k.

    Raises
    ------
    ConfigError
        A parameter is out of range, the table too large, or the chain too close to reducible.

    Examples
    --------
    >>> corpus = Markov(alphabet=4, order=1, context=8)
    >>> corpus.vocab, len(corpus.stationary)
    (8, 4)
    """

    alphabet: int = 16
    order: int = 2
    concentration: float = 0.15
    seed: int = 0
    context: int = 128

    name: ClassVar[str] = "markov"

    def __post_init__(self) -> None:
        whole(self.alphabet, "alphabet", low=2)
        whole(self.order, "order", low=1)
        real(self.concentration, "concentration", low=0.01, high=1e6)
        whole(self.seed, "seed", low=0)
        size = self.alphabet ** (self.order + 1)
        require(
            size <= 2**22,
            f"{self.alphabet}^{self.order + 1} transitions are too many for a table; lower alphabet or order",
        )
        whole(self.context, "context", low=1)

    @property
    def symbols(self) -> int:
        """The alphabet and begin-of-sequence."""
        return self.alphabet + 1

    @cached_property
    def transitions(self) -> Floats:
        """P(next symbol | context) [v^k, v]; a context is read as a number of k digits, oldest first."""
        from scipy.special import gammaincinv

        u = np.random.default_rng(self.seed).random((self.alphabet**self.order, self.alphabet))
        gamma = np.maximum(
            gammaincinv(self.concentration, u), 1e-30
        )  # every row stays positive, so the chain can't stick
        return np.asarray(gamma / gamma.sum(1, keepdims=True))

    @cached_property
    def stationary(self) -> Floats:
        """Stationary distribution over contexts [v^k], by damped power iteration."""
        v, k = self.alphabet, self.order
        pi = np.full(v**k, float(v) ** -k)
        for _ in range(_MOST_STEPS):
            after = (pi[:, None] * self.transitions).reshape(v, -1).sum(0)
            change = float(np.abs(after - pi).sum())
            pi = 0.5 * (pi + after)  # damped: a nearly periodic chain converges as well
            if change < _TOLERANCE:
                return np.asarray(pi / pi.sum())
        raise ConfigError(
            f"markov: the chain mixes too slowly for its stationary distribution (concentration = {self.concentration}); "
            f"take a larger concentration or another seed"
        )

    @cached_property
    def entropy_rate(self) -> float:
        """sum_c pi(c) H(P_c), nats/token."""
        return float(sum(p * entropy_nats(row) for p, row in zip(self.stationary, self.transitions, strict=True)))

    def position_entropies(self, context: int) -> Floats:
        """H(target t | targets before it) for each position [T], nats."""
        whole(context, "context", low=1)
        blocks = [0.0] + [entropy_nats(marginal) for marginal in self._marginals]
        h = np.full(context, self.entropy_rate)
        h[: self.order] = np.diff(blocks)[:context]
        return h

    def floor(self, context: int) -> float:
        """[H(x_1..x_k) + (T - k) · entropy rate] / T, nats/token; a little above the entropy rate."""
        return float(self.position_entropies(context).mean())

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T]."""
        v, k = self.alphabet, self.order
        inside = (targets >= 0) & (targets < v)
        x = np.where(inside, targets, 0)
        nats = np.empty(x.shape)
        code = np.zeros(len(x), dtype=np.int64)
        for t in range(min(k, x.shape[1])):
            before = self._marginals[t - 1][code] if t else 1.0
            code = code * v + x[:, t]
            nats[:, t] = negative_log(self._marginals[t][code] / before)
        table = negative_log(self.transitions)
        for t in range(k, x.shape[1]):
            nats[:, t] = table[code, x[:, t]]
            code = code % v ** (k - 1) * v + x[:, t]
        return np.where(inside, nats, np.inf)

    def difficulty(self, targets: Ints) -> Ints:
        """Symbols that the true distribution looks back at, 0..k [B, T]."""
        depth = np.minimum(np.arange(targets.shape[1]), self.order)
        return np.broadcast_to(depth, targets.shape).astype(np.int64)

    @cached_property
    def _marginals(self) -> list[Floats]:
        """Distributions of the first 1, 2, ..., k symbols, each flat."""
        return [self.stationary.reshape(self.alphabet**j, -1).sum(1) for j in range(1, self.order + 1)]

    @cached_property
    def _edges(self) -> Floats:
        """Inner edges of each row's distribution function [v^k, v - 1]."""
        return inner_edges(self.transitions)

    def _uniforms(self, context: int) -> int:
        return 1 + max(context - self.order, 0)

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        v, k = self.alphabet, self.order
        out = np.empty((len(uniforms), max(context, k)), dtype=np.int64)
        code = pick(uniforms[:, 0], self.stationary)
        for j in range(k):
            out[:, j] = code // v ** (k - 1 - j) % v
        columns = np.ascontiguousarray(uniforms.T)  # one contiguous column a step
        past = v ** (k - 1)
        for t in range(k, context):
            x = (self._edges.take(code, axis=0) <= columns[t - k + 1][:, None]).sum(1)
            out[:, t] = x
            code = code % past * v + x
        return out[:, :context]

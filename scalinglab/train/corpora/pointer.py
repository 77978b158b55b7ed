"""Hop: pointer chasing. A random map is written out, then followed k steps at a time.

    key value  key value ...   (n pairs, a random permutation f in random order)    k x f^k(x)   k x f^k(x) ...

The answers are determined by the pairs; the floor is [2 log n! + Q (H(p_k) + log n)]/T with Q queries in T = 2n + 3Q.
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


@dataclass(frozen=True)
class Pointer(Synthetic):
    """k-hop pointer chasing through a random permutation.

    Parameters
    ----------
    items : int
        n items, so 2n tokens of pairs.
    max_hops : int
        Largest k; k is drawn with probability proportional to k^-hops_exponent.
    hops_exponent : float
        0 for uniform k.
    held_out : tuple of (k, start)
        Combinations of hop count and start item (0..n-1) that training never asks for; `evaluation(split="held_out")`
        asks for nothing else. Each k and each start must stay in training in some other combination.
    context : int
        Targets per sequence that `entropy` and `fingerprint` refer to, tokens; the last query may be cut.

    Notes
    -----
    Difficulty is k, on the answers. Where the start lies on a cycle of f shorter than k there is a shorter way in
    principle; the label stays k.

    Raises
    ------
    ConfigError
        A parameter is out of range, or the context does not reach the first answer.

    Examples
    --------
    >>> round(Pointer(items=16, max_hops=8).entropy, 4)
    1.6264
    """

    items: int = 16
    max_hops: int = 8
    hops_exponent: float = 1.0
    held_out: tuple[tuple[int, int], ...] = ()
    context: int = 128

    name: ClassVar[str] = "pointer"

    def __post_init__(self) -> None:
        whole(self.items, "items", low=2)
        whole(self.max_hops, "max_hops", low=1)
        real(self.hops_exponent, "hops_exponent", low=-16, high=16)
        self._check_context(self.context)
        self._joint  # noqa: B018  # raises what is wrong with held_out

    @property
    def symbols(self) -> int:
        """Items, then k, then begin-of-sequence."""
        return self.items + self.max_hops + 1

    def position_entropies(self, context: int) -> Floats:
        """H(target t | targets before it) for each position [T], nats."""
        self._check_context(context)
        h = np.empty(context)
        h[: 2 * self.items] = np.repeat(np.log(np.arange(self.items, 0, -1)), 2)
        hops, start = self._joint["seen"].entropies
        asked = np.tile([hops, start, 0.0], -(-(context - 2 * self.items) // 3))
        h[2 * self.items :] = asked[: context - 2 * self.items]
        return h

    def floor(self, context: int) -> float:
        """[2 log n! + Q (H(k) + H(start | k))]/T, and the part of a query that the context cuts, nats/token."""
        return float(self.position_entropies(context).sum() / context)

    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it), nats [B, T]; only the symbols for k differ between sequences."""
        n, context = self.items, targets.shape[1]
        nats = np.full(targets.shape, np.inf)
        for offset in (0, 1):
            used = np.zeros((len(targets), n), dtype=bool)
            for j in range(n):
                item = targets[:, 2 * j + offset]
                fits = (item >= 0) & (item < n)
                fits &= ~used[np.arange(len(used)), np.where(fits, item, 0)]
                nats[fits, 2 * j + offset] = math.log(n - j)
                used[fits, item[fits]] = True
        hops, start, answer, _ = self._queries(targets)
        fits_k = (hops >= 0) & (hops < self.max_hops)
        fits_x = (start >= 0) & (start < n)
        k, x = np.where(fits_k, hops, 0), np.where(fits_x, start, 0)
        of_k, of_x = self._joint[split].nats(k, x)
        right = answer == self._follow(self._map(targets), k, x)
        parts = [np.where(fits_k, of_k, np.inf), np.where(fits_x, of_x, np.inf), np.where(right, 0.0, np.inf)]
        nats[:, 2 * n :] = np.stack(parts, axis=2).reshape(len(targets), -1)[:, : context - 2 * n]
        return nats

    def difficulty(self, targets: Ints) -> Ints:
        """k on the answers [B, T]."""
        labels = np.full(targets.shape, NO_DIFFICULTY, dtype=np.int64)
        hops, _, _, whole_queries = self._queries(targets)
        labels[:, 2 * self.items + 2 :: 3] = hops[:, :whole_queries] + 1
        return labels

    @cached_property
    def _joint(self) -> dict[Split, Joint]:
        places = []
        for pair in self.held_out:
            if len(pair) != 2 or pair[0] not in range(1, self.max_hops + 1) or pair[1] not in range(self.items):
                raise ConfigError(
                    f"held_out: {pair!r} is no combination (k, start) of k = 1..{self.max_hops} and start = "
                    f"0..{self.items - 1}"
                )
            places.append((pair[0] - 1, pair[1]))
        uniform = np.full(self.items, 1.0 / self.items)
        return split_joint(zipf(self.max_hops, self.hops_exponent), uniform, tuple(places), ("k", "start"))

    def _check_context(self, context: int) -> None:
        whole(context, "context", low=1)
        need = 2 * self.items + 3
        require(
            context >= need,
            f"context = {context}: {self.items} pairs and one query are {need} tokens; take a longer context or fewer items",
        )

    def _check_held_out(self) -> None:
        require(bool(self.held_out), "pointer holds nothing out: give held_out")

    def _uniforms(self, context: int) -> int:
        return 2 * self.items + -(-(context - 2 * self.items) // 3)

    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        n = self.items
        f = np.argsort(uniforms[:, :n], axis=1, kind="stable")
        keys = np.argsort(uniforms[:, n : 2 * n], axis=1, kind="stable")
        pairs = np.stack([keys, np.take_along_axis(f, keys, axis=1)], axis=2).reshape(len(f), 2 * n)
        k, x = self._joint[split].draw(uniforms[:, 2 * n :])
        asked = np.stack([n + k, x, self._follow(f, k, x)], axis=2).reshape(len(f), -1)
        return np.concatenate([pairs, asked], axis=1)[:, :context].astype(np.int64, copy=False)

    def _follow(self, f: NDArray[np.int_], k: Ints, x: Ints) -> Ints:
        """f applied k + 1 times to x [B, Q]."""
        y = x
        for step in range(int(k.max()) + 1):
            stepped = np.take_along_axis(f, y, axis=1)
            y = np.where(k >= step, stepped, y)
        return np.asarray(y, dtype=np.int64)

    def _map(self, targets: Ints) -> Ints:
        """f as the pairs state it [B, n]; 0 where they don't."""
        n = self.items
        f = np.zeros((len(targets), n), dtype=np.int64)
        pairs = np.clip(targets[:, : 2 * n], 0, n - 1)
        np.put_along_axis(f, pairs[:, 0::2], pairs[:, 1::2], axis=1)
        return f

    def _queries(self, targets: Ints) -> tuple[Ints, Ints, Ints, int]:
        """k (from 0), start and answer [B, Q], a cut query filled with -1, and the number of whole queries."""
        asked = targets[:, 2 * self.items :]
        full = np.full((len(targets), -(-asked.shape[1] // 3) * 3), -1, dtype=np.int64)
        full[:, : asked.shape[1]] = asked
        return full[:, 0::3] - self.items, full[:, 1::3], full[:, 2::3], asked.shape[1] // 3

"""What every probe gets: the model, the sequences, and how to count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from scalinglab.errors import ConfigError
from scalinglab.train.probes.intervals import Resamples
from scalinglab.train.probes.tap import Probed


@dataclass(frozen=True)
class Thresholds:
    """When a block or a state counts: none of these is standard, so they are stored with the numbers.

    Parameters
    ----------
    removal : float
        Loss that removing a block must cost, nats per token.
    influence : float
        Block influence.
    lens : float
        KL(final || lens) below which a state has settled, nats.
    causal, permutation, affine : float
        DepthBench's: causal score of a pair, relative loss of an exchange, loss ratio of an affine replacement.
    """

    removal: float = 0.01
    influence: float = 0.02
    lens: float = 0.1
    causal: float = 0.45
    permutation: float = 0.15
    affine: float = 1.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"threshold {name}={value} must be positive")


@dataclass(frozen=True)
class Setup:
    """One probing of a model.

    Attributes
    ----------
    model : Probed
    tokens_bt, targets_bt : Tensor
        B sequences; position t predicts `targets[t]`.
    depth : int
        Blocks L.
    resamples : Resamples
    thresholds : Thresholds
    seed : int
        Of the random directions of the Jacobian.
    chunk : int
        Sequences per forward pass.
    directions : int
        Random directions of the Jacobian.
    rank_tokens : int
        At most so many tokens, evenly spaced, enter a singular value decomposition.
    max_distance : int or None
        Largest distance of two exchanged blocks.
    tick : callable
        To be called after each forward pass of a chunk.
    """

    model: Probed
    tokens_bt: Tensor
    targets_bt: Tensor
    depth: int
    resamples: Resamples
    thresholds: Thresholds
    seed: int
    chunk: int
    directions: int
    rank_tokens: int
    max_distance: int | None
    tick: Callable[[], None]

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, tokens and targets of each chunk."""
        for start in range(0, len(self.tokens_bt), self.chunk):
            rows = slice(start, min(start + self.chunk, len(self.tokens_bt)))
            yield rows, self.tokens_bt[rows], self.targets_bt[rows]

    def empty(self, *shape: int) -> np.ndarray:
        """Float64 array [B, *shape] to fill by chunks."""
        return np.full((len(self.tokens_bt), *shape), np.nan)


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (first < second) of all pairs of `count` things, by rows."""
    first, second = np.triu_indices(count, k=1)
    return first.astype(np.int64), second.astype(np.int64)


def late(first: np.ndarray, depth: int) -> np.ndarray:
    """Whether a pair (first < second) of blocks lies in the last three quarters of the depth."""
    return first >= depth / 4

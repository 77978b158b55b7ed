"""What every corpus answers to, and what the synthetic ones share.

A synthetic sequence is a pure function of one row of uniform numbers whose length depends on the context alone. So the
n-th sequence that a generator yields is the same however the draws are cut into batches, and a replica sees the same
data whatever stack it is trained in. Each sequence starts with a begin-of-sequence symbol that is never a target; the
entropy floor is over targets, in nats per token.

Arrays: B sequences, T = context targets each; a uniform row has W numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Split: TypeAlias = Literal["seen", "held_out"]

NO_DIFFICULTY = -1  # label of positions that no difficulty is defined for
_TRAINING = 0x7261696E  # keeps training streams apart from the evaluation streams, which are keyed by a 256-bit digest
_SAMPLE = 8  # sequences of the evaluation stream that go into a fingerprint


@runtime_checkable
class Corpus(Protocol):
    """A source of token sequences with a fixed evaluation set."""

    @property
    def vocab(self) -> int:
        """Size of the alphabet, padded to a multiple of 8."""

    @property
    def entropy(self) -> float | None:
        """Entropy floor at the corpus's own context, nats/token; None where unknown."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what determines the data, 64 hex digits."""

    def floor(self, context: int) -> float | None:
        """Entropy floor over the first `context` targets, nats/token; None where unknown."""

    def batch(self, rng: np.random.Generator, batch: int, context: int) -> tuple[Ints, Ints]:
        """Tokens and targets [B, T] for training; advances `rng`."""

    def batches(
        self, rng: np.random.Generator, batch: int, context: int, *, start: int = 0
    ) -> Iterator[tuple[Ints, Ints]]:
        """Successive batches without end, after `start` sequences."""

    def eval_set(self, n_sequences: int, context: int) -> tuple[Ints, Ints, Floats | None]:
        """Tokens, targets and oracle log-loss [B, T]; the same at every call."""


@dataclass(frozen=True)
class Evaluation:
    """A fixed set of sequences, with what the best possible model pays and how hard each answer is.

    Attributes
    ----------
    tokens, targets : int64 [B, T]
    nats : float64 [B, T] or None
        -log P(target | the targets before it) under the true distribution, nats.
    difficulty : int64 [B, T] or None
        Difficulty of a position, `NO_DIFFICULTY` where none is defined. The corpus says what it counts.
    """

    tokens: Ints
    targets: Ints
    nats: Floats | None = None
    difficulty: Ints | None = None


def training_stream(seed: int, *, replica: int = 0) -> np.random.Generator:
    """A generator for training batches that can't coincide with an evaluation stream.

    Parameters
    ----------
    seed, replica : int
        Non-negative; different pairs give independent streams.

    Examples
    --------
    >>> float(training_stream(1).random()) == float(training_stream(1, replica=1).random())
    False
    """
    require(isinstance(seed, int) and seed >= 0, f"seed = {seed!r}: give a whole number from 0 up")
    require(isinstance(replica, int) and replica >= 0, f"replica = {replica!r}: give a whole number from 0 up")
    return np.random.default_rng(np.random.SeedSequence([_TRAINING, seed, replica]))


def by_difficulty(
    evaluation: Evaluation, loss: Floats, *, correct: NDArray[np.bool_] | None = None
) -> dict[int, dict[str, float]]:
    """Mean loss, excess over the oracle and accuracy, for each difficulty.

    Parameters
    ----------
    evaluation : Evaluation
        With difficulty labels; with `nats` for the excess.
    loss : float [B, T]
        The model's loss on each target, nats.
    correct : bool [B, T], optional
        Whether the model's most probable token is the target.

    Returns
    -------
    dict
        Difficulty -> {"tokens", "sequences", "loss", "excess", "accuracy"}, easiest first; the last two only where they
        can be computed. Tokens of one sequence are not independent: take errors over sequences.

    Raises
    ------
    ConfigError
        No labels, or arrays of another shape.
    """
    if evaluation.difficulty is None:
        raise ConfigError("this evaluation set has no difficulty labels: use a synthetic corpus")
    for name, array in (("loss", loss), ("correct", correct)):
        if array is not None and np.shape(array) != evaluation.targets.shape:
            raise ConfigError(f"{name} has shape {np.shape(array)}, the targets have {evaluation.targets.shape}")
    report: dict[int, dict[str, float]] = {}
    for level in np.unique(evaluation.difficulty[evaluation.difficulty != NO_DIFFICULTY]):
        here = evaluation.difficulty == level
        row = {"tokens": float(here.sum()), "sequences": float(here.any(1).sum()), "loss": float(loss[here].mean())}
        if evaluation.nats is not None:
            row["excess"] = float((loss - evaluation.nats)[here].mean())
        if correct is not None:
            row["accuracy"] = float(correct[here].mean())
        report[int(level)] = row
    return report


class Synthetic(ABC):
    """Base of the synthetic corpora, which are frozen dataclasses of their parameters.

    A subclass says how many symbols it uses, how many uniforms a sequence takes, how these become targets, and what its
    floor, oracle and difficulty labels are. `oracle` and `difficulty` are functions of the targets alone, so any
    sequence can be scored: one that the corpus can't produce costs infinitely many nats.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1  # raise it when the same parameters give other data
    context: int

    @property
    @abstractmethod
    def symbols(self) -> int:
        """Symbols in use, the begin-of-sequence symbol (the last one) included."""

    @abstractmethod
    def floor(self, context: int) -> float:
        """Exact entropy of the first `context` targets over their number, nats/token."""

    @abstractmethod
    def oracle(self, targets: Ints, *, split: Split = "seen") -> Floats:
        """-log P(target | targets before it) under the true distribution, nats [B, T]."""

    @abstractmethod
    def difficulty(self, targets: Ints) -> Ints:
        """Difficulty of each position [B, T], `NO_DIFFICULTY` where none is defined."""

    @abstractmethod
    def _uniforms(self, context: int) -> int:
        """Number W of uniforms that a sequence takes."""

    @abstractmethod
    def _targets(self, uniforms: Floats, context: int, split: Split) -> Ints:
        """Targets [B, T] from uniforms [B, W]."""

    @property
    def vocab(self) -> int:
        """Size of the alphabet, padded to a multiple of 8."""
        return padded(self.symbols)

    @property
    def bos(self) -> int:
        """The begin-of-sequence symbol."""
        return self.symbols - 1

    @property
    def entropy(self) -> float:
        """`floor` at the corpus's own context, nats/token."""
        return self.floor(self.context)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of name, version, parameters and a sample of the data, 64 hex digits."""
        sample = self.evaluation(_SAMPLE, self.context).targets
        return hashlib.sha256(self._key.encode() + sample.astype("<i8").tobytes()).hexdigest()

    def batch(self, rng: np.random.Generator, batch: int, context: int) -> tuple[Ints, Ints]:
        """Draw training sequences.

        Parameters
        ----------
        rng : numpy.random.Generator
            Advanced by `batch` sequences; see `training_stream`.
        batch, context : int
            B sequences of T targets.

        Returns
        -------
        tokens, targets : int64 [B, T]

        Raises
        ------
        ConfigError
            Not a positive batch, or a context that the corpus can't fill.
        """
        return self._with_inputs(self._draw(rng, batch, context, "seen"))

    def batches(
        self, rng: np.random.Generator, batch: int, context: int, *, start: int = 0, ahead: int = 256
    ) -> Iterator[tuple[Ints, Ints]]:
        """What successive calls of `batch` give, drawn many sequences at a time: several times faster for small batches.

        Parameters
        ----------
        rng : numpy.random.Generator
            At its beginning. It runs ahead of what has been handed out, so leave it to the iterator.
        batch, context : int
            B sequences of T targets.
        start : int
            Sequences to pass over, for a run that goes on where another stopped.
        ahead : int
            Least number of sequences drawn at once; no influence on the result.

        Raises
        ------
        ConfigError
            As `batch`, at the call and not at the first item.
        """
        whole(batch, "number of sequences", low=1)
        whole(start, "start", low=0)
        whole(ahead, "ahead", low=1)
        self._check_context(context)
        return self._serve(rng, batch, context, start, ahead)

    def eval_set(self, n_sequences: int, context: int) -> tuple[Ints, Ints, Floats]:
        """Tokens, targets and oracle nats [B, T] of a fixed set; a larger one begins with the smaller."""
        fixed = self.evaluation(n_sequences, context)
        assert fixed.nats is not None
        return fixed.tokens, fixed.targets, fixed.nats

    def evaluation(self, n_sequences: int, context: int, *, split: Split = "seen") -> Evaluation:
        """`eval_set` with difficulty labels, for either side of a compositional split.

        The stream is keyed by a digest of the parameters and the split, so no training stream coincides with it. The
        *sequences* may: a corpus of few possible sequences will show some of them in both.
        """
        require(split in get_args(Split), f'split = {split!r}: take "seen" or "held_out"')
        key = hashlib.sha256(f"{self._key}\n{split}".encode()).digest()
        rng = np.random.default_rng(np.random.SeedSequence(list(np.frombuffer(key, "<u4").astype(int))))
        targets = self._draw(rng, n_sequences, context, split)
        tokens, _ = self._with_inputs(targets)
        return Evaluation(tokens, targets, self.oracle(targets, split=split), self.difficulty(targets))

    def _serve(
        self, rng: np.random.Generator, batch: int, context: int, start: int, ahead: int
    ) -> Iterator[tuple[Ints, Ints]]:
        for at in range(0, start, ahead):
            rng.random((min(ahead, start - at), self._uniforms(context)))
        steps = -(-ahead // batch)
        while True:
            tokens, targets = self.batch(rng, steps * batch, context)
            for i in range(0, steps * batch, batch):
                yield tokens[i : i + batch], targets[i : i + batch]

    @property
    def _key(self) -> str:
        parameters: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        return json.dumps({"corpus": self.name, "version": self.version, "parameters": parameters}, sort_keys=True)

    def _draw(self, rng: np.random.Generator, batch: int, context: int, split: Split) -> Ints:
        whole(batch, "number of sequences", low=1)
        self._check_context(context)
        if split == "held_out":
            self._check_held_out()
        return self._targets(rng.random((batch, self._uniforms(context))), context, split)

    def _check_context(self, context: int) -> None:
        whole(context, "context", low=1)

    def _check_held_out(self) -> None:
        raise ConfigError(f"{self.name} holds nothing out: set held_out of automaton or pointer")

    def _with_inputs(self, targets: Ints) -> tuple[Ints, Ints]:
        tokens = np.empty_like(targets)
        tokens[:, 0] = self.bos
        tokens[:, 1:] = targets[:, :-1]
        return tokens, targets


def padded(symbols: int) -> int:
    """The next multiple of 8: matrix kernels want it, and the spare symbols never occur."""
    return -(-symbols // 8) * 8


def zipf(size: int, exponent: float) -> Floats:
    """Probabilities proportional to rank^-exponent, ranks 1..size."""
    weights = np.arange(1, size + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())


def entropy_nats(probabilities: Floats) -> float:
    """-sum p log p, nats."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def negative_log(probabilities: Floats) -> Floats:
    """-log p, infinite at zero and without a warning."""
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(probabilities))


def inner_edges(probabilities: Floats) -> Floats:
    """Edges between categories on (0, 1) along the last axis, without 0 and 1 [..., n - 1].

    Divided by the full sum: rounding can't open a gap below 1 into which a category of probability zero would fall.
    """
    total = np.cumsum(probabilities, axis=-1)
    return np.asarray(total[..., :-1] / total[..., -1:])


def pick(uniforms: Floats, probabilities: Floats) -> Ints:
    """Categories for uniforms of any shape, by inverting the distribution function."""
    return np.searchsorted(inner_edges(probabilities), uniforms, side="right").astype(np.int64)


def require(condition: bool, message: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def whole(value: int, name: str, *, low: int, high: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a whole number within the limits."""
    top = "up" if high == math.inf else f"to {high:.0f}"
    good = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= value <= high
    require(good, f"{name} = {value!r}: give a whole number from {low} {top}")


def real(value: float, name: str, *, low: float, high: float = math.inf, open_ends: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number within the limits."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (low < value < high if open_ends else low <= value <= high)
    limits = f"above {low:g}" if open_ends else f"from {low:g}"
    limits += "" if high == math.inf else f" and below {high:g}" if open_ends else f" to {high:g}"
    require(good, f"{name} = {value!r}: give a finite number {limits}")

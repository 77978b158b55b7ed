"""Intervals over sequences: every estimate is a function of means over sequences, and the same resamples serve all.

Tokens of one sequence are not independent, so sequences are what is drawn. An effect of an intervention is a difference
within the sequence, and the resamples keep the pairs together.

Axes: b sequence, r resample, k a flat index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.probe_report import By, Measure

Floats: TypeAlias = NDArray[np.float64]
Function: TypeAlias = Callable[[Floats], Floats]  # means [r, k] -> estimates [r, m]


@dataclass(frozen=True)
class Resamples:
    """Bootstrap draws of sequences.

    Attributes
    ----------
    shares_rb : float [r, b]
        Weight of each sequence in each draw; rows sum to one.
    level : float
        Of the percentile intervals.
    """

    shares_rb: Floats
    level: float

    @classmethod
    def draw(cls, sequences: int, *, seed: int, replicates: int = 1000, level: float = 0.95) -> Resamples:
        """Draw with replacement.

        Raises
        ------
        ConfigError
            No sequence, no replicate, or a level outside (0, 1).
        """
        if sequences < 1 or replicates < 1 or not 0 < level < 1:
            raise ConfigError(
                f"resamples need sequences and replicates of 1 or more and a level inside (0, 1), "
                f"not {sequences}, {replicates} and {level}"
            )
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(sequences, np.full(sequences, 1 / sequences), size=replicates)
        return cls(counts / sequences, level)

    @property
    def how(self) -> str:
        """The interval in words."""
        return f"{100 * self.level:g} % percentile bootstrap over sequences, {len(self.shares_rb)} resamples"

    def estimate(self, values: Floats, function: Function | None = None) -> tuple[Floats, Floats, Floats]:
        """Estimate and its interval.

        Parameters
        ----------
        values : float [b, ...]
            One value per sequence; flattened to [b, k].
        function : callable, optional
            Means over sequences [r, k] -> estimates [r, m]. Without it the means themselves.

        Returns
        -------
        value, low, high : float [m]
            The ends are NaN for a single sequence.
        """
        values_bk = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
        apply = function if function is not None else _same
        value = apply(values_bk.mean(0, keepdims=True))[0]
        if len(values_bk) < 2:
            return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
        drawn = apply(self.shares_rb @ values_bk)
        tail = 50 * (1 - self.level)
        # Columns that are undefined in some draws (NaN) have no interval; the percentile carries the NaN on.
        low, high = np.percentile(drawn, [tail, 100 - tail], axis=0)
        return value, low, high

    def measure(
        self,
        probe: str,
        name: str,
        by: By,
        definition: str,
        values: Floats,
        *,
        at: NDArray[np.int64] | None = None,
        other: NDArray[np.int64] | None = None,
        function: Function | None = None,
    ) -> Measure:
        """`estimate` as a Measure; `at` counts from 0 unless given."""
        value, low, high = self.estimate(values, function)
        return measured(probe, name, by, definition, value, low=low, high=high, at=at, other=other, interval=self.how)


def measured(
    probe: str,
    name: str,
    by: By,
    definition: str,
    value: Floats,
    *,
    low: Floats | None = None,
    high: Floats | None = None,
    at: NDArray[np.int64] | None = None,
    other: NDArray[np.int64] | None = None,
    interval: str = "",
) -> Measure:
    """A Measure with what is absent filled in: no interval, `at` from 0."""
    value = np.atleast_1d(np.asarray(value, dtype=np.float64))
    absent = np.full(len(value), np.nan)
    return Measure(
        probe, name, by, definition, value,
        absent if low is None else low, absent if high is None else high,
        np.arange(len(value)) if at is None else at,
        np.zeros(len(value), dtype=np.int64) if other is None else other,
        interval,
    )  # fmt: skip


def _same(means_rk: Floats) -> Floats:
    return means_rk

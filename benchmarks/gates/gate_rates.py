"""A measured rate beside the band that was asked of it: one row of the committed table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Z = 2.6  # binomial standard errors that a rate may lie outside its band: 1 % of true rates on the edge do


@dataclass(frozen=True)
class Rate:
    """`hits` of `of` simulations of `test` under `setting`; the true rate is asked to lie in [low, high]."""

    test: str
    setting: str
    hits: int
    of: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.hits / self.of if self.of else math.nan

    def slack(self, edge: float, z: float) -> float:
        """Binomial error of a rate that lies on an edge of its band; at least one simulation."""
        return max(z * math.sqrt(edge * (1 - edge) / self.of), 1 / self.of)

    def verdict(self, z: float = Z) -> str:
        """within, below or above the band, beyond `z` binomial standard errors of its edge."""
        if not self.of:
            return "no case"
        if self.rate > self.high + self.slack(self.high, z):
            return "above"
        return "below" if self.rate < self.low - self.slack(self.low, z) else "within"

    def row(self) -> dict[str, object]:
        return {
            "test": self.test, "setting": self.setting, "rate": self.rate, "hits": self.hits, "of": self.of,
            "low": self.low, "high": self.high, "verdict": self.verdict(),
        }  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """A simulation gate: `run(count, seed)` gives its rates; `full` and `small` are the counts of the table and of CI."""

    key: str
    title: str
    run: Callable[[int, int], list[Rate]]
    full: int
    small: int

"""Runs that stand under two names: at the base shape all parametrizations are the same model, trained to the same loss.

Two cells of one shape with equal losses at every learning rate and seed are one cell: it is fitted and redrawn once, so that
contrasts of its arms cancel there to the last bit, and it counts as one piece of evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_EQUAL = 1e-9  # relative; decimal text of a double is closer, runs of two seeds never are
_LEAST = 3  # finite losses that must be equal


@dataclass(frozen=True)
class Distinct:
    """rows [U] : the first cell of each set of runs. of [C] : its position in rows. groups [U] : arms, those that have runs in
    common taken as one (they share the cubic term and the pool of curvatures, or equal runs would get unequal curves)."""

    rows: Index
    of: Index
    groups: Index


def same_runs(cells: pd.DataFrame, z: Array, loss: Array) -> Index:
    """For each cell the first one with the same shape and the same runs, itself if there is none [C]."""
    out = np.arange(len(cells))
    spots = cells.groupby(["ladder", "depth", "width", "setting"], sort=False).indices
    for rows in spots.values():
        for k, i in enumerate(rows):
            for j in rows[:k]:
                if np.isfinite(loss[j]).sum() >= _LEAST and _equal(z[i], z[j]) and _equal(loss[i], loss[j]):
                    out[i] = out[j]
                    break
    return out


def distinct(cells: pd.DataFrame) -> Distinct:
    """The cells without those whose runs are another's (column same_as, where the cells have one)."""
    same = _same_as(cells)
    arm = cells["arm"].to_numpy(np.intp)
    group = np.arange(int(arm.max()) + 1)
    for i in np.flatnonzero(same != np.arange(len(cells))):
        one, other = group[arm[i]], group[arm[same[i]]]
        group[group == max(one, other)] = min(one, other)
    rows, of = np.unique(same, return_inverse=True)
    return Distinct(rows, of, group[arm[rows]])


def repeated(cells: pd.DataFrame) -> NDArray[np.bool_]:
    """Whether the runs of a cell stand under another one before it [C]."""
    return np.asarray(_same_as(cells) != np.arange(len(cells)))


def together(cells: pd.DataFrame, weights: Array) -> Array:
    """Weights of cells summed over equal runs: what a shape's own deviation enters a contrast with [C]."""
    return np.bincount(_same_as(cells), weights=weights, minlength=len(cells)).astype(np.float64)


def overlap(cells: pd.DataFrame) -> Array:
    """1 where two cells are the same runs, else 0 [C, C]."""
    same = _same_as(cells)
    return (same[:, None] == same[None]).astype(np.float64)


def told(cells: pd.DataFrame, arms: tuple[tuple[str, str], ...]) -> list[str]:
    """A sentence for each pair of arms with runs in common."""
    pairs: dict[tuple[int, int], list[str]] = {}
    same = _same_as(cells)
    for i in np.flatnonzero(repeated(cells)):
        key = (int(cells["arm"].iloc[same[i]]), int(cells["arm"].iloc[i]))
        pairs.setdefault(key, []).append(f"depth {cells['depth'].iloc[i]:g}, width {cells['width'].iloc[i]:g}")
    return [
        f"{' / '.join(arms[a])} and {' / '.join(arms[b])} are the same runs at {'; '.join(spots)}: counted once"
        for (a, b), spots in pairs.items()
    ]


def _same_as(cells: pd.DataFrame) -> Index:
    return cells["same_as"].to_numpy(np.intp) if "same_as" in cells else np.arange(len(cells))


def _equal(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=_EQUAL, atol=0.0, equal_nan=True))

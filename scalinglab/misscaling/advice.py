"""What to train next where a sweep doesn't locate the optimum: which learning rates to add, in numbers.

Rates go on by the step of the grid. Beyond an edge there must be `sides` rates past the best one, or past the one that would be
the best if losses keep falling by one more step; a curve too steep for its window needs rates between those tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scalinglab.misscaling.curves import SIDES, STATUS, Curves
from scalinglab.misscaling.intake import Grids

Array = NDArray[np.float64]

_WHY = {
    "too few": "too few learning rates lie within {window:g} nats of the best",
    "no optimum": "the fitted curve has no minimum among the rates it was fitted to",
    "diverged": "every run diverged",
}


def rates_to_add(z: Array, mean: Array, status: str, *, sides: int = SIDES) -> list[float]:
    """Learning rates that a shape lacks, ascending.

    Parameters
    ----------
    z [J] : ln learning rates, NaN-padded. mean [J] : mean losses, +inf where a run diverged, NaN without runs.
    status : of `STATUS`; nothing is missing where it is "interior".
    """
    tried = np.isfinite(z) & ~np.isnan(mean)
    z, mean = z[tried], mean[tried]
    if status == "interior" or not len(z):
        return []
    step = float(np.median(np.diff(z))) if len(z) > 1 else float(np.log(2))
    if status == "diverged":
        return _rates(z[0] - step * np.arange(sides + 1, 0, -1))
    best = int(mean.argmin())
    if status in ("boundary", "one-sided"):
        edge = status == "boundary"  # the optimum itself may lie one step beyond
        below = max(0, sides - best + (edge and best == 0))
        above = max(0, sides - (len(z) - 1 - best) + (edge and best == len(z) - 1))
        return _rates([*(z[0] - step * np.arange(below, 0, -1)), *(z[-1] + step * np.arange(1, above + 1))])
    near = z[max(0, best - 2) : best + 3]
    return _rates((near[1:] + near[:-1]) / 2)


def advice(grids: Grids, curves: Curves, i: int, *, sides: int, window: float) -> str:
    """Why shape i has no envelope and what to train; empty where it has one."""
    status = STATUS[int(curves.status[i])]
    if status == "interior":
        return ""
    z, mean = grids.z[i], grids.mean[i]
    add = ", ".join(f"{r:.3g}" for r in rates_to_add(z, mean, status, sides=sides))
    known = np.isfinite(mean)
    if status in ("boundary", "one-sided"):
        best = np.exp(z[known][mean[known].argmin()])
        place = np.flatnonzero(known)[mean[known].argmin()]
        tried = np.isfinite(z) & ~np.isnan(mean)
        lower = int(tried[:place].sum()) < sides
        upper = int(tried[place + 1 :].sum()) < sides
        end = " and ".join([w for w, here in (("smallest", lower), ("largest", upper)) if here])
        where = f"the {end} tried" if status == "boundary" else f"fewer than {sides} places from the {end} tried"
        return f"the best learning rate, {best:.3g}, is {where}; extend the grid: train {add} too"
    more = {
        "diverged": "train smaller ones",
        "too few": "train between those tried",
        "no optimum": "add seeds, or train between those tried",
    }
    return f"{_WHY[status].format(window=window)}; {more[status]}: {add}"


def _rates(z: Array | list[float]) -> list[float]:
    return [float(f"{r:.6g}") for r in np.exp(np.asarray(z, np.float64))]

"""One thread, CPU seconds, best of N: how every benchmark here measures. Import it before NumPy."""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[_name] = "1"

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """CPU seconds of repeated calls (children included), and what the last call returned."""

    seconds: tuple[float, ...]
    result: Any

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def pin() -> str:
    """Keep the process (and its children) on one core where the system allows it; says what was done."""
    if not hasattr(os, "sched_setaffinity"):
        return "1 thread; core not pinned (this system has no sched_setaffinity)"
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return "1 thread, pinned to one core"


def measure(work: Callable[[], Any], repeats: int = 1) -> Timing:
    """Call `work` repeatedly. os.times ticks at 10 ms, so single-process work is timed by process_time instead."""
    import time

    seconds = []
    for _ in range(repeats):
        children = os.times()
        start = time.process_time()
        result = work()
        end = os.times()
        own = time.process_time() - start
        seconds.append(
            own + end.children_user + end.children_system - children.children_user - children.children_system
        )
    return Timing(tuple(seconds), result)

"""How long a sweep will take on this machine, from a few timed steps.

Stacks that differ most are timed, on all workers at once as in the sweep itself (cores share caches and memory). The others
follow by FLOPs: within an architecture the rate in FLOPs per second is interpolated in log FLOPs per step, and held beyond
the ends. The time of the sweep is that of the longest-first schedule that `launch` uses.
"""

from __future__ import annotations

import functools
import heapq
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from scalinglab.config import ANY_TOKENS, Evaluation, RunConfig, Schedule, Sweep
from scalinglab.errors import ConfigError
from scalinglab.matching import charge
from scalinglab.planning import expand
from scalinglab.train import engines
from scalinglab.train.jobs import ASSUMED_PEAK, Job, Stack, efficiency, lineup, stack_key, stacks
from scalinglab.train.launch import Backend

_STEPS = 30  # at most; the loop reports each of the first 32
_WARM = 2  # steps before the clock counts
_SLOT = 1.0  # seconds of stepping per timed stack
_EVALUATION = 0.34  # cost of a token that is only evaluated, in training tokens
_START = 4.0  # seconds until a worker trains: it imports torch
_SETUP = 0.3  # seconds to build a stack and its data


@dataclass(frozen=True)
class _Kind:
    """Stacks that cost the same per step."""

    stack: Stack
    flops: float  # per step of the whole stack

    @property
    def arm(self) -> str:
        first = self.stack[0]
        return f"{first.architecture} {first.options}"


@dataclass(frozen=True)
class _Timed:
    seconds: float  # per step
    peak: float  # FLOPs per second of a large fp32 matrix product on the same core


def predict(
    runs: Sweep | Sequence[RunConfig],
    *,
    seconds: float = 20.0,
    workers: int | None = None,
    device: str = "cpu",
    backend: Backend = "auto",
    max_replicas: int | None = None,
) -> pd.DataFrame:
    """Predicted wall time of every run and of the sweep.

    Parameters
    ----------
    runs : Sweep or sequence of RunConfig
    seconds : float
        Wall time that may be spent on timing; 0 times nothing and assumes rates measured elsewhere.
    workers, device, backend, max_replicas
        As in `scalinglab.train.launch.launch`.

    Returns
    -------
    DataFrame
        One row per run: run_id, architecture, depth, width, stack_size, step_seconds (of the whole stack), seconds (the
        run's share of its stack, less the trunk that the budget before it has trained), peak_share (FLOPs per second over those of a 512 x 512 x 512 fp32 product on one core;
        NaN without a timing), basis ("timed", or where the rate comes from). attrs: wall_seconds of the sweep, workers,
        basis (a sentence).

    Raises
    ------
    ConfigError
        seconds is negative, workers is below 1, or a timed stack can't be trained.
    """
    if not seconds >= 0:
        raise ConfigError(f"seconds={seconds} of timing must be 0 or more")
    configs = list(expand(runs).runs) if isinstance(runs, Sweep) else list(runs)
    workers = engines.count_workers(workers, device)
    jobs = stacks(configs, max_replicas=max_replicas)
    kinds: dict[str, _Kind] = {}
    for job in jobs:
        for stack in job.stacks:
            kinds.setdefault(_kind_key(stack), _Kind(stack, len(stack) * _step_flops(stack[0])))
    timed = _time(kinds, seconds, workers, device, backend)
    rates = {key: _rate(kinds, key, timed) for key in kinds}
    peak = max((t.peak for t in timed.values()), default=math.nan)
    table = pd.DataFrame(
        [
            row
            for job in jobs
            for stack, before in zip(job.stacks, job.trunks, strict=True)
            for row in _rows(stack, before, kinds, rates, peak)
        ]
    )
    per_run = dict(zip(table["run_id"], table["seconds"], strict=True))
    table.attrs = {
        "wall_seconds": _makespan(jobs, per_run, workers), "workers": workers,
        "basis": f"{len(timed)} of {len(kinds)} kinds of stacks timed on this machine, the others by FLOPs; "
        f"{workers} worker{'s' if workers > 1 else ''}",
    }  # fmt: skip
    return table


def _rows(
    stack: Stack, before: int, kinds: dict[str, _Kind], rates: dict[str, tuple[float, str]], peak: float
) -> list[dict[str, Any]]:
    """One row per run of a stack whose first `before` steps another one has trained."""
    key, first = _kind_key(stack), stack[0]
    rate, basis = rates[key]
    step = kinds[key].flops / rate
    every = first.evaluation.every
    times = 1 + (before == 0) + ((first.steps - 1) // every - before // every if every else 0)
    evaluated = _EVALUATION * times * first.evaluation.sequences * first.shape.context * len(stack)
    total = step * (first.steps - before + evaluated / (first.batch_tokens * len(stack))) + _SETUP
    return [
        {
            "run_id": run.run_id, "architecture": run.architecture, "depth": run.shape.depth, "width": run.shape.width,
            "stack_size": len(stack), "step_seconds": step, "seconds": total / len(stack), "peak_share": rate / peak,
            "basis": basis,
        }
        for run in stack
    ]  # fmt: skip


def _rate(kinds: dict[str, _Kind], key: str, timed: dict[str, _Timed]) -> tuple[float, str]:
    """FLOPs per second of a kind of stack, and where the number comes from."""
    kind = kinds[key]
    if key in timed:
        return kind.flops / timed[key].seconds, "timed"
    own = {k: t for k, t in timed.items() if kinds[k].arm == kind.arm}
    source = f"{len(own)} timed in {kind.stack[0].architecture}" if own else "other architectures"
    points = sorted((math.log(kinds[k].flops), math.log(kinds[k].flops / t.seconds)) for k, t in (own or timed).items())
    if not points:
        return ASSUMED_PEAK * float(efficiency(kind.stack[0].shape.width)), "assumed"
    x, y = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(kind.flops), x, y))), source


def _makespan(jobs: Sequence[Job], seconds: dict[str, float], workers: int) -> float:
    """Wall time of the jobs, longest first, each to the worker that is free next."""
    free = [_START] * workers
    for job in lineup(jobs):
        heapq.heapreplace(free, free[0] + sum(seconds[run_id] for run_id in job.run_ids))
    return max(free)


# ---- timing ------------------------------------------------------------------------------------------------------------------
def _time(kinds: dict[str, _Kind], seconds: float, workers: int, device: str, backend: Backend) -> dict[str, _Timed]:
    most = int(max(0.0, seconds) * workers / (_SLOT + _SETUP))
    chosen = [key for key in _by_distance(kinds) if _affordable(kinds[key], seconds)][:most]
    if not chosen:
        return {}
    call = functools.partial(_time_one, slot=_SLOT, device=device, backend=backend)
    found: dict[str, _Timed] = {}
    with engines.start("loky", workers):
        for key, timed in engines.run(call, [(key, kinds[key].stack) for key in chosen], workers):
            if isinstance(timed, str):
                raise ConfigError(f"{kinds[key].stack[0].run_id} can't be timed: {timed}")
            found[key] = timed
    return found


def _by_distance(kinds: dict[str, _Kind]) -> list[str]:
    """The costliest of every architecture, then the cheapest of each, then whatever lies farthest from those before it."""
    arms: dict[str, list[str]] = {}
    for key, kind in kinds.items():
        arms.setdefault(kind.arm, []).append(key)
    queues = []
    for keys in arms.values():
        left = sorted(keys, key=lambda k: -kinds[k].flops)
        queue = [left.pop(0)]
        while left:
            logs = [math.log(kinds[k].flops) for k in queue]
            far = max(left, key=lambda k: min(abs(math.log(kinds[k].flops) - x) for x in logs))
            left.remove(far)
            queue.append(far)
        queues.append(queue)
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def _affordable(kind: _Kind, seconds: float) -> bool:
    return (_WARM + 2) * kind.flops / (ASSUMED_PEAK * float(efficiency(kind.stack[0].shape.width))) < seconds


class _Enough(Exception):  # no error: it ends a training that was only to be timed
    pass


def _time_one(key: str, stack: Stack, *, slot: float, device: str, backend: Backend) -> tuple[str, _Timed | str]:
    """Median seconds of a step of this stack, in whatever process; or why it can't be trained."""
    from scalinglab.train.loop import train

    short = [
        msgspec.structs.replace(
            run,
            tokens=_STEPS * run.batch_tokens,
            evaluation=Evaluation(sequences=1),
            schedule=Schedule(),  # its own warmup may be longer than this
        )
        for run in stack
    ]
    ticks: list[float] = []

    def report(_: Any) -> None:
        ticks.append(time.perf_counter())
        if len(ticks) > _WARM + 2 and ticks[-1] - ticks[_WARM - 1] > slot:
            raise _Enough

    with engines.one_thread(), tempfile.TemporaryDirectory() as folder:
        try:
            train(short, Path(folder), device=device, backend=backend, report=report)
        except _Enough:
            pass
        except ConfigError as error:
            return key, str(error)
        steps = [b - a for a, b in zip(ticks[_WARM:], ticks[_WARM + 1 :], strict=False)]
        if not steps:
            return key, "it diverged within a few steps"
        return key, _Timed(statistics.median(steps), _matrix_rate(device))


def _matrix_rate(device: str, size: int = 512, tries: int = 5) -> float:
    """FLOPs per second of a square fp32 matrix product, the best of a few."""
    import torch

    a = b = torch.ones(size, size, device=device)
    best = math.inf
    for _ in range(tries):
        began = time.perf_counter()
        (a @ b).sum().item()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _kind_key(stack: Stack) -> str:
    return f"{len(stack)} {stack_key(msgspec.structs.replace(stack[0], tokens=ANY_TOKENS))}"


def _step_flops(run: RunConfig) -> float:
    return charge(run.shape.build(), architecture=run.architecture, options=run.options).flops * run.batch_tokens

"""The learning rate over a run, as a share of its peak."""

from __future__ import annotations

import math

from scalinglab.config import RunConfig


def share(step: int, config: RunConfig) -> float:
    """Share of the peak learning rate at a step, in [0, 1].

    Warmup is linear and never 0; the last step has `schedule.final` exactly (1 for "constant").

    Parameters
    ----------
    step : int
        Counted from 0.
    config : RunConfig
        Its `schedule`, `steps` and `batch_tokens`.
    """
    schedule, steps, warmup = config.schedule, config.steps, warmup_steps(config)
    done = step + 1
    if done < warmup:
        return done / warmup
    if schedule.kind == "constant":
        return 1.0
    start = branch_step(config) if schedule.kind == "wsd" else min(warmup, steps)
    progress = (done - start) / (steps - start) if done > start else 0.0
    fall = (1 - math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else progress
    return 1 - (1 - schedule.final) * fall


def warmup_steps(config: RunConfig) -> int:
    """Steps until the peak."""
    tokens, schedule = config.schedule.warmup_tokens, config.schedule
    return round(schedule.warmup * config.steps) if tokens is None else -(-tokens // config.batch_tokens)


def branch_step(config: RunConfig) -> int:
    """Steps before the decay of a "wsd" schedule begins; until then nothing depends on how long the run is."""
    return max(warmup_steps(config), config.steps - round(config.schedule.decay * config.steps))

"""From runs to jobs: which runs are trained as one stack, which stacks follow each other, and what each costs.

The grouping depends on the list of runs alone, never on workers or on what is finished: a run has the same companions
wherever and whenever it is trained, so its numbers are the same to the last bit. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import msgspec
import numpy as np

from scalinglab import tomlfile
from scalinglab.config import ANY_TOKENS, RunConfig
from scalinglab.errors import ConfigError
from scalinglab.matching import charge
from scalinglab.train.schedule import branch_step

STACK_TOKENS = 4096  # per step, of all replicas together: beyond it a CPU core gains nothing from stacking
MOST_REPLICAS = 12

Stack = tuple[RunConfig, ...]


@dataclass(frozen=True)
class Job:
    """Stacks that one worker trains one after the other: one stack, or a ladder of token budgets from the smallest up.

    Attributes
    ----------
    stacks : tuple of tuples of RunConfig
        The runs of a stack differ in seed, lr, optimizer.weight_decay, optimizer.grad_clip and labels only.
    """

    stacks: tuple[Stack, ...]

    @property
    def runs(self) -> Stack:
        """All runs, in the order of training."""
        return tuple(run for stack in self.stacks for run in stack)

    @cached_property
    def run_ids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(run.run_id for run in self.runs)

    @cached_property
    def name(self) -> str:
        """Short and the same for the same runs; safe as a file name."""
        return stack_id(self.runs)

    @cached_property
    def flops(self) -> float:
        """Training FLOPs (forward + backward, causal) of all runs; the trunk of a ladder counts once."""
        return sum(
            _flops(run) * (1 - before / run.steps)
            for stack, before in zip(self.stacks, self.trunks, strict=True)
            for run in stack
        )

    @cached_property
    def trunks(self) -> tuple[int, ...]:
        """Per stack, the first steps that the stack before it has trained already: its trunk; 0 where none is shared."""
        pairs = zip(self.stacks, self.stacks[1:], strict=False)
        return (0, *(branch_step(one[0]) if _same_trunk(one, other) else 0 for one, other in pairs))

    @cached_property
    def cost(self) -> float:
        """Seconds on one core, roughly: FLOPs by the rate that matrices of this width reach (see `efficiency`)."""
        return self.flops / (ASSUMED_PEAK * float(efficiency(self.runs[0].shape.width)))

    def without(self, finished: Iterable[str]) -> Job | None:
        """The job less its finished runs; None if nothing is left."""
        gone = set(finished)
        left = tuple(tuple(run for run in stack if run.run_id not in gone) for stack in self.stacks)
        left = tuple(stack for stack in left if stack)
        return Job(left) if left else None


# Share of a core's fp32 peak that a training step reaches by residual width, measured on one AVX2 machine: width decides,
# depth hardly matters. It only orders the jobs and extrapolates timings; predicted times rest on steps timed here and now.
ASSUMED_PEAK = 88e9
_WIDTHS = (16, 24, 32, 48, 64, 96, 144)
_SHARES = (0.29, 0.35, 0.40, 0.46, 0.53, 0.57, 0.65)


def efficiency(width: float | np.ndarray) -> np.ndarray:
    """Share of a core's peak that a step reaches, by residual width."""
    return np.interp(np.log(width), np.log(_WIDTHS), _SHARES)


def stacks(runs: Sequence[RunConfig], *, max_replicas: int | None = None) -> list[Job]:
    """Runs grouped into jobs, in the order in which they come up.

    Runs that differ in nothing but seed, lr, weight decay and clipping are trained as one stack, up to about 4,096 tokens
    per step and 12 runs; more are split into stacks of nearly equal size. Runs of a "wsd" schedule with `warmup_tokens`
    that also differ in tokens follow one another in one job, so that the trunk they share is trained once.

    Parameters
    ----------
    runs : sequence of RunConfig
    max_replicas : int, optional
        Most runs in a stack, instead of that rule. It changes the last bits of the results.

    Raises
    ------
    ConfigError
        max_replicas is below 1.
    """
    if max_replicas is not None and max_replicas < 1:
        raise ConfigError(f"max_replicas={max_replicas} must be at least 1")
    families: dict[str, list[RunConfig]] = {}
    for run in runs:
        families.setdefault(_family(run), []).append(run)
    return [Job(ladder) for family in families.values() for ladder in _ladders(family, max_replicas)]


def lineup(jobs: Iterable[Job]) -> list[Job]:
    """Longest first, ties in the order given: the last worker then ends soon after the others."""
    return sorted(jobs, key=lambda job: -job.cost)


def shard(jobs: Sequence[Job], index: int, count: int) -> list[Job]:
    """Part `index` (from 1) of `count` of the jobs, of nearly equal cost, in `lineup` order.

    Raises
    ------
    ConfigError
        The index is not in 1..count.
    """
    if not 1 <= index <= count:
        raise ConfigError(f"shard {index}/{count}: write I/N with I from 1 to N, e.g. 1/4")
    loads, parts = [0.0] * count, [[] for _ in range(count)]  # type: tuple[list[float], list[list[Job]]]
    for job in lineup(jobs):
        lightest = loads.index(min(loads))
        loads[lightest] += job.cost
        parts[lightest].append(job)
    return parts[index - 1]


def pending(jobs: Sequence[Job], finished: Iterable[str], begun: Iterable[Stack] = ()) -> list[Job]:
    """What is left to train.

    Parameters
    ----------
    jobs : sequence of Job
    finished : iterable of str
        Run ids that need no training.
    begun : iterable of stacks
        Stacks with a checkpoint. Such a stack goes on as it was begun, whatever group its runs would be in now.
    """
    gone = set(finished)
    asked = {run_id for job in jobs for run_id in job.run_ids} - gone
    resumed: dict[str, Stack] = {}
    for stack in begun:
        ids = {run.run_id for run in stack}
        if asked & ids and not resumed.keys() & ids:
            resumed |= dict.fromkeys(ids, stack)
    left = [rest for job in jobs if (rest := job.without(gone)) is not None]
    placed: set[str] = set()  # a stack that was begun takes the place of the first of its runs
    out = []
    for job in left:
        steps: list[Stack] = []
        for stack in job.stacks:
            new = []
            for run in stack:
                if run.run_id not in resumed:
                    new.append(run)
                elif run.run_id not in placed:
                    steps.append(resumed[run.run_id])
                    placed |= {member.run_id for member in resumed[run.run_id]}
            steps += [tuple(new)] if new else []
        if steps and len(job.stacks) > 1:
            out.append(Job(tuple(steps)))
        else:
            out += [Job((step,)) for step in steps]
    return out


def shared(run: RunConfig) -> RunConfig:
    """What runs must share to be trained as one stack: everything but seed, lr, weight decay, clipping and labels."""
    optimizer = msgspec.structs.replace(run.optimizer, weight_decay=0.0, grad_clip=1.0)
    return msgspec.structs.replace(run, seed=0, lr=1.0, optimizer=optimizer, sweep="", match_group="")


def stack_key(run: RunConfig) -> str:
    """`shared` as text."""
    return json.dumps(tomlfile.plain(shared(run)), sort_keys=True)


def _family(run: RunConfig) -> str:
    return stack_key(msgspec.structs.replace(run, tokens=ANY_TOKENS) if has_trunk(run) else run)


def stack_id(runs: Sequence[RunConfig]) -> str:
    """Name of a stack, of which its checkpoint folder is made: a digest of its runs in their order."""
    return hashlib.sha256("\n".join(run.run_id for run in runs).encode()).hexdigest()[:16]


def trunk_of(runs: Sequence[RunConfig]) -> list[RunConfig] | None:
    """What runs that differ in tokens and labels alone have in common; None where they share no trunk."""
    if not has_trunk(runs[0]):
        return None
    return [msgspec.structs.replace(run, tokens=ANY_TOKENS, sweep="", match_group="") for run in runs]


def has_trunk(run: RunConfig) -> bool:
    """Whether runs that differ from this one in tokens alone share its trunk."""
    return run.schedule.kind == "wsd" and run.schedule.warmup_tokens is not None


def _ladders(family: Sequence[RunConfig], max_replicas: int | None) -> Iterator[tuple[Stack, ...]]:
    """A family as ladders: the same replicas at every budget, a part of the replicas for each ladder."""
    replicas: dict[str, list[RunConfig]] = {}
    for run in family:
        replicas.setdefault(_replica(run), []).append(run)
    most = max_replicas or max(1, min(MOST_REPLICAS, STACK_TOKENS // family[0].batch_tokens))
    columns = list(replicas.values())
    parts = -(-len(columns) // most)
    size, larger = divmod(len(columns), parts)
    at = 0
    for part in range(parts):
        width = size + (part < larger)
        runs = sorted((run for column in columns[at : at + width] for run in column), key=lambda run: run.tokens)
        yield tuple(tuple(rung) for _, rung in groupby(runs, key=lambda run: run.tokens))
        at += width


def _replica(run: RunConfig) -> str:
    return json.dumps([run.seed, run.lr, run.optimizer.weight_decay, run.optimizer.grad_clip, run.sweep])


def _flops(run: RunConfig) -> float:
    cost = charge(run.shape.build(), architecture=run.architecture, options=run.options)
    return cost.flops * run.steps * run.batch_tokens


def _same_trunk(one: Stack, other: Stack) -> bool:
    """Whether the second stack goes on from where the decay of the first began: the same runs, for more tokens."""
    trunk = trunk_of(one)
    return trunk is not None and trunk == trunk_of(other)

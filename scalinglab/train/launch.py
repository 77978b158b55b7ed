"""Train all runs of a sweep that are not finished: one process per core, one thread each, here or on a cluster.

Files are the only memory. A run with a summary is finished, a stack with a checkpoint goes on, everything else starts; so the
same call after a Ctrl-C, a kill or a power cut goes on where the last one was, and several launchers can share a folder.

    out/.claims/    who is training what (see `scalinglab.train.claims`)
    out/.progress/  how far each job is, for the display of whoever launched it
    out/.failures/  a record with the traceback for each job that raised
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from scalinglab.collecting import CONFIG, SUMMARY, is_finished
from scalinglab.config import RunConfig, Sweep
from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.planning import expand
from scalinglab.tables import write_atomically
from scalinglab.train import claims, engines
from scalinglab.train.display import Display
from scalinglab.train.jobs import Job, Stack, lineup, pending, stacks
from scalinglab.train.jobs import shard as part_of
from scalinglab.train.worker import (
    MEMBERS,
    STACKS,
    Backend,
    Order,
    Outcome,
    has_checkpoint,
    sentence,
    work,
    work_together,
)

if TYPE_CHECKING:
    from scalinglab.train.team import Team

__all__ = ["Failure", "LaunchReport", "launch", "stacks"]

_TRIES = 3  # times that a job may lose its worker, alone, before it is given up
_POLL_SECONDS = 1.0
_PATIENCE = 20.0  # seconds that workers get to save their state after a stop


@dataclass(frozen=True)
class Failure:
    """Runs that could not be trained, and why in one sentence."""

    run_ids: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.run_ids) - 1} more" if len(self.run_ids) > 1 else ""
        return f"{self.run_ids[0]}{more}: {self.reason}"


@dataclass(frozen=True)
class LaunchReport:
    """What a launch did.

    Attributes
    ----------
    finished, diverged : tuple of str
        Runs that ended while this launch ran, here or in another launcher that shares the folder.
    skipped : tuple of str
        Runs that were finished before.
    failed : tuple of Failure
    seconds : float
        Wall time.
    """

    finished: tuple[str, ...]
    diverged: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[Failure, ...]
    seconds: float

    def summary(self) -> str:
        """The report as text: one line of counts, one sentence per failure."""
        runs = "run" if len(self.finished) == 1 else "runs"
        parts = [f"{len(self.finished):,} {runs} trained in {self.seconds:,.0f} s"]
        were = "was" if len(self.skipped) == 1 else "were"
        parts += [f"{len(self.skipped):,} {were} finished before"] if self.skipped else []
        parts += [f"{len(self.diverged):,} diverged: {', '.join(self.diverged[:3])}"] if self.diverged else []
        parts += [f"{sum(len(f.run_ids) for f in self.failed):,} failed"] if self.failed else []
        return "\n".join(["; ".join(parts), *(f"failed: {failure}" for failure in self.failed)])


def launch(
    sweep: Sweep | Sequence[RunConfig],
    out: str | Path,
    *,
    workers: int | None = None,
    device: str = "cpu",
    backend: Backend = "auto",
    engine: engines.Engine = "loky",
    address: str | None = None,
    shard: tuple[int, int] = (1, 1),
    max_replicas: int | None = None,
    checkpoint_seconds: float = 60.0,
    progress: bool | None = None,
    have: Collection[str] = (),
    fsdp: bool = False,
) -> LaunchReport:
    """Train what is missing in `out`, longest first.

    Parameters
    ----------
    sweep : Sweep or sequence of RunConfig
    out : path
        Folder of the run directories; shared by all workers.
    workers : int, optional
        Processes, one thread each. All cores on a CPU, one on an accelerator. With 1 everything runs in this process.
    device, backend, checkpoint_seconds
        As in `scalinglab.train.loop.train`.
    engine : {"loky", "dask", "ray"}
        Where the processes are: on this machine, or on a cluster through joblib.
    address : str, optional
        Of the Dask scheduler or the Ray head; without it a local cluster of `workers` is made.
    shard : (I, N)
        Train part I of N of the jobs, e.g. in one task of a batch system.
    max_replicas : int, optional
        See `stacks`.
    progress : bool, optional
        Show progress on stderr: a live line in a terminal, else a line per finished job. Default: yes.
    have : collection of str
        Ids of runs that are known already, e.g. from the table of an earlier sitting: they are skipped as finished ones are.

    fsdp : bool
        Share out one run at a time over the processes of torchrun; see `scalinglab.train.loop.train`.

    Returns
    -------
    LaunchReport
        A job that raises is recorded and reported; the others go on. Jobs that another launcher is training are waited for.

    Raises
    ------
    ConfigError
        Before anything is trained: no run, the folder can't be written, a corpus doesn't fit its shape, a model that
        can't be made, no such device, an engine that isn't installed, an address that the engine has no use for.
    KeyboardInterrupt
        After SIGINT or SIGTERM, once the workers have saved their state.

    Notes
    -----
    Under torchrun all processes call this and train one job after the other together: without `fsdp` they share its batches.
    """
    began = time.monotonic()
    team = _team(workers, engine, fsdp)
    if team is not None:
        workers, max_replicas = 1, 1 if fsdp else max_replicas
    runs = list(expand(sweep).runs) if isinstance(sweep, Sweep) else list(sweep)
    folder = Path(out)
    jobs = part_of(stacks(runs, max_replicas=max_replicas), *shard)
    workers = engines.count_workers(workers, device)
    engines.check_address(engine, address)
    check(runs, folder, device=device)
    known = frozenset(have)
    asked = {run_id: run for job in jobs for run_id, run in zip(job.run_ids, job.runs, strict=True)}
    skipped = {run_id for run_id in asked if run_id in known or is_finished(folder / run_id)}
    todo = lineup(pending(jobs, skipped, _begun(folder, asked)))
    here = engine == "loky" and workers == 1
    order = Order(
        folder, device, backend, checkpoint_seconds, uuid.uuid4().hex, "here" if here else engine, os.getpid(), fsdp
    )  # fmt: skip
    if team is not None:
        todo = team.tell(todo)  # one list, whatever changes in the folder
    with Display(folder, todo, shown=progress is not False and (team is None or team.leads)) as display:
        if team is not None:
            done = [_together(job, order, team, display) for job in todo]
        else:
            done = _Foreman(order, engine, workers, address, display).through(todo) if todo else []
    ended = [run_id for run_id in asked if run_id not in skipped and is_finished(folder / run_id)]
    bad = tuple(run_id for run_id in ended if _status(folder / run_id) == "diverged")
    missing = asked.keys() - {*ended, *skipped}
    failed = [
        Failure(tuple(run_id for run_id in outcome.job.run_ids if run_id in missing), outcome.reason)
        for outcome in done
        if outcome.kind == "failed" and not missing.isdisjoint(outcome.job.run_ids)
    ]
    good = tuple(run_id for run_id in ended if run_id not in bad)
    return LaunchReport(good, bad, tuple(sorted(skipped)), tuple(failed), time.monotonic() - began)


def check(runs: Sequence[RunConfig], out: Path, *, device: str = "cpu") -> None:
    """Refuse what can't be trained before anything is; see `launch` for what is looked at."""
    check_data(runs)  # not the models: that takes torch, seconds, and a job that can't be built says so in a sentence
    if device != "cpu":  # the CPU is always there, and asking takes torch
        from scalinglab.train.backends import open_device

        open_device(device)
    _check_folder(out)


def check_data(runs: Sequence[RunConfig]) -> None:
    """Open every corpus and see that it fits the shapes; without torch.

    Raises
    ------
    ConfigError
        No run; a corpus or an option of it that isn't known, a text that is missing or shorter than the context, more
        symbols than the vocabulary has.
    """
    from scalinglab.train.corpora import open_corpus

    if not runs:
        raise ConfigError("there is nothing to train: the sweep has no runs")
    seen = set()
    for run in runs:
        shape, evaluation = run.shape, run.evaluation
        corpus_key = (run.corpus, repr(run.corpus_options), shape.context, shape.vocab, evaluation.sequences)
        if corpus_key in seen:
            continue
        seen.add(corpus_key)
        corpus = open_corpus(run.corpus, run.corpus_options, context=shape.context)
        if corpus.vocab > shape.vocab:
            raise ConfigError(
                f"corpus {run.corpus!r} has {corpus.vocab} symbols, more than vocab={shape.vocab} of run {run.run_id}: "
                f"set vocab to {corpus.vocab}"
            )
        corpus.eval_set(evaluation.sequences, shape.context)
        corpus.batch(np.random.default_rng(0), 1, shape.context)


def check_models(runs: Sequence[RunConfig]) -> None:
    """Make the shallowest model of every kind of run, without memory for its weights.

    Raises
    ------
    ConfigError
        A head or base size that the model can't have, or a parametrization that doesn't reach one of its tensors.
    """
    from scalinglab.train.scaling import build

    kinds: dict[str, RunConfig] = {}
    for run in runs:
        # What can be wrong doesn't depend on the depth, and a deep model takes a while even without weights.
        shape = {**msgspec.structs.asdict(run.shape), "depth": None}
        key = repr((run.architecture, run.options, run.parametrization, run.perturb, run.base, run.positions, shape))
        if key not in kinds or run.shape.depth < kinds[key].shape.depth:
            kinds[key] = run
    for run in kinds.values():
        try:
            build(run, device="meta")
        except ConfigError as error:
            raise ConfigError(f"run {run.run_id} can't be trained: {error}") from None


# ---- a team: all processes of torchrun train the same job ---------------------------------------------------------------
def _team(workers: int | None, engine: str, fsdp: bool) -> Team | None:
    """The processes that torchrun has started; None without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if fsdp:
            raise ConfigError(
                "fsdp shares a run out over the processes of torchrun, and there is one: start it with "
                "torchrun --nproc-per-node 2, or more"
            )
        return None
    if engine != "loky" or workers not in (None, 1):
        raise ConfigError("under torchrun its processes train one run together: leave engine and workers out")
    from scalinglab.train.team import join

    return join()


def _together(job: Job, order: Order, team: Team, display: Display) -> Outcome:
    outcome = work_together(job, order, team)
    display.ended(outcome.job, outcome.reason)
    return outcome


# ---- the foreman: hands out jobs until none is left --------------------------------------------------------------------
@dataclass
class _Foreman:
    order: Order
    engine: engines.Engine
    workers: int
    address: str | None
    display: Display
    done: list[Outcome] = field(default_factory=list)

    def through(self, todo: Sequence[Job]) -> list[Outcome]:
        """All jobs to their end."""
        waiting, suspects, elsewhere = list(todo), [], []  # type: tuple[list[Job], list[Job], list[Job]]
        deaths: Counter[str] = Counter()
        with engines.start(self.engine, self.workers, self.address), _stopping(self.order):
            while waiting or suspects or elsewhere:
                if waiting:
                    batch, waiting, alone = waiting, [], False
                elif suspects:
                    batch, suspects, alone = suspects[:1], suspects[1:], True
                else:
                    time.sleep(_POLL_SECONDS)
                    waiting, elsewhere = self._freed(elsewhere)
                    continue
                left, trouble = self._batch(batch, elsewhere, alone)
                for job in left:
                    if not _was_begun(self.order, job):
                        waiting.append(job)
                        continue
                    deaths[job.name] += alone
                    if deaths[job.name] < _TRIES:
                        suspects.append(job)  # alone from now on, so that it takes no other job with it
                    else:
                        reason = f"its worker died {_TRIES} times ({trouble}); was it killed, or out of memory?"
                        self._record(Outcome(job, "failed", reason))
                if len(left) == len(batch) and not any(_was_begun(self.order, job) for job in left):
                    raise ConfigError(f"engine {self.engine!r} can't run jobs: {trouble}")
        return self.done

    def _batch(self, batch: list[Job], elsewhere: list[Job], alone: bool) -> tuple[list[Job], str]:
        """Run the jobs; what was not heard of again, and what the engine said."""
        heard, trouble = set(), ""
        try:
            for outcome in engines.run(work, [(job, self.order) for job in batch], self.workers, alone=alone):
                heard.add(outcome.job.name)
                if outcome.kind == "elsewhere":
                    elsewhere.append(outcome.job)
                else:
                    self._record(outcome)
        except Exception as error:  # a worker that died takes the pool with it, whatever the engine calls that
            trouble = sentence(error)
        return [job for job in batch if job.name not in heard], trouble

    def _freed(self, elsewhere: list[Job]) -> tuple[list[Job], list[Job]]:
        """Jobs that others were training: those to take up now, and those still with them."""
        free, held = [], []
        for job in elsewhere:
            if all(is_finished(self.order.out / run_id) for run_id in job.run_ids):
                self._record(Outcome(job, "elsewhere"))
            elif any(claims.holder(self.order.out, run_id) for run_id in job.run_ids):
                held.append(job)
            else:
                free.append(job)
        return free, held

    def _record(self, outcome: Outcome) -> None:
        self.done.append(outcome)
        self.display.ended(outcome.job, outcome.reason)


@contextlib.contextmanager
def _stopping(order: Order) -> Iterator[None]:
    """SIGINT and SIGTERM: let the workers of this machine save their state, then raise KeyboardInterrupt."""
    if order.engine != "loky" or threading.current_thread() is not threading.main_thread():
        yield  # in this process the loop sees to it
        return
    caught: list[int] = []

    def stop(number: int, frame: Any) -> None:
        caught.append(number)
        if len(caught) == 1:
            _say("stopping: the workers save their state")
            _stop_workers(order)
        raise KeyboardInterrupt

    old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _stop_workers(order: Order) -> None:
    """SIGTERM to the own workers, and wait until they have given back their claims."""
    deadline = time.monotonic() + _PATIENCE
    told: set[int] = set()
    while time.monotonic() < deadline:
        pids = {owner.pid for owner in claims.owners(order.out) if owner.launcher == order.launcher}
        for pid in pids - told:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        told |= pids
        if not pids:
            return
        time.sleep(0.1)


# ---- what is on disk ------------------------------------------------------------------------------------------------------
def _status(directory: Path) -> str:
    return str(json.loads((directory / SUMMARY).read_bytes())["status"])


def _begun(out: Path, known: Mapping[str, RunConfig]) -> list[Stack]:
    """Stacks with a checkpoint, in the order of their names; runs that the sweep doesn't have come from their config."""
    found = []
    for place in sorted((out / STACKS).glob("*")) if (out / STACKS).is_dir() else ():
        if not has_checkpoint(place):
            continue
        try:
            ids = json.loads((place / MEMBERS).read_bytes())
            members = [known[i] if i in known else RunConfig.load(out / i / CONFIG) for i in ids]
        except (OSError, ValueError, ScalinglabError):
            continue
        if all(is_finished(out / i) for i in ids):  # the process died between the last summary and the clean-up
            shutil.rmtree(place, ignore_errors=True)
        elif known.keys() & set(ids) and [m.run_id for m in members] == ids:
            found.append(tuple(members))
    return found


def _was_begun(order: Order, job: Job) -> bool:
    """Whether a worker took the job up: it left a claim or its members behind."""
    return any((order.out / STACKS / Job((stack,)).name / MEMBERS).is_file() for stack in job.stacks)


# ---- checks ----------------------------------------------------------------------------------------------------------------
def _check_folder(out: Path) -> None:
    """Make the folder and write into it, before hours of work find out that it can't be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = write_atomically(out / ".writable", b"")
        probe.unlink(missing_ok=True)  # another launcher probes too
    except OSError as error:
        raise ConfigError(f"the folder {out} can't be written: {error.strerror or error}") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

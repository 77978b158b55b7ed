"""What a worker does with one job, in whatever process it is: claim its runs, train them, say how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from scalinglab.collecting import CONFIG, LOG, SUMMARY, has_summary, is_finished, read_config
from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.tables import write_atomically
from scalinglab.train import claims, engines
from scalinglab.train.display import FOLDER as PROGRESS
from scalinglab.train.jobs import Job, Stack

if TYPE_CHECKING:
    from scalinglab.train.team import Team

Backend: TypeAlias = Literal["auto", "torch", "native"]

FAILURES, STACKS, MEMBERS = ".failures", ".stacks", "runs.json"
_NOTE_SECONDS = 1.0


@dataclass(frozen=True)
class Order:
    """What every worker must know."""

    out: Path
    device: str
    backend: Backend
    checkpoint_seconds: float
    launcher: str
    engine: str
    pid: int  # of the launcher
    fsdp: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a job ended: done, failed, or elsewhere (another launcher has it)."""

    job: Job
    kind: Literal["done", "failed", "elsewhere"]
    reason: str = ""


def work(job: Job, order: Order) -> Outcome:
    """One job, in whatever process; its outcome is a value, so that no exception stops the others."""
    parent = None
    if order.engine == "loky":
        parent = order.pid
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)  # the launcher died with jobs in the queue
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the launcher, which tells the workers in its own time
    held = None
    try:
        held = claims.acquire(order.out, job.run_ids, launcher=order.launcher, parent=parent)
        if isinstance(held, claims.Owner):
            return Outcome(job, "elsewhere")
        with held, engines.one_thread():
            _train(job, order, held)
    except (KeyboardInterrupt, SystemExit):
        if order.engine == "loky":
            os._exit(128 + signal.SIGTERM)  # or this process would take the next job
        raise
    except _LostClaimError:
        return Outcome(job, "elsewhere")
    except Exception as error:
        if isinstance(held, claims.Claims) and held.lost:
            return Outcome(job, "elsewhere")
        return _failed(job, order, error)
    (order.out / FAILURES / f"{job.name}.json").unlink(missing_ok=True)
    return Outcome(job, "done")


def work_together(job: Job, order: Order, team: Team) -> Outcome:
    """One job in all processes of a team, for which the first one claims and writes; the outcome is the same in all.

    An error that need not come up in all of them is raised: torchrun then ends the others, which would wait forever.
    """
    held = claims.acquire(order.out, job.run_ids, launcher=order.launcher) if team.leads else None
    if team.tell(isinstance(held, claims.Owner)):
        return Outcome(job, "failed", "another launcher is training it; launch again when that has ended")
    mine = held if isinstance(held, claims.Claims) else None
    try:
        with mine or contextlib.nullcontext(), engines.one_thread():
            _train(job, order, mine, team)
    except ConfigError as error:
        return _failed(job, order, error) if team.leads else Outcome(job, "failed", sentence(error))
    if team.leads:
        (order.out / FAILURES / f"{job.name}.json").unlink(missing_ok=True)
    return Outcome(job, "done")


def _failed(job: Job, order: Order, error: Exception) -> Outcome:
    """The outcome of a job that raised, and a record of it."""
    reason = sentence(error)
    with contextlib.suppress(OSError):
        record = {"run_ids": job.run_ids, "reason": reason, "traceback": traceback.format_exc()}
        write_atomically(order.out / FAILURES / f"{job.name}.json", json.dumps(record, indent=1).encode())
    return Outcome(job, "failed", reason)


class _LostClaimError(Exception):
    """Another launcher took the job over: this process was silent for too long (a suspended machine)."""


def _train(job: Job, order: Order, held: claims.Claims | None, team: Team | None = None) -> None:
    """Train the job's stacks; of a team, the first process alone holds the claims and writes."""
    from scalinglab.train.loop import Progress, train

    note = _Note(order.out / PROGRESS / f"{job.name}.json", len(job.stacks))
    for number, stack in enumerate(job.stacks):
        if all(is_finished(order.out / run.run_id) for run in stack):
            continue
        if held is not None:
            _prepare(order.out, stack)
        if team is not None:
            team.wait()

        def report(at: Progress, number: int = number, stack: Stack = stack) -> None:
            if held is None:
                return
            if held.lost:
                raise _LostClaimError
            note.write(number, at.step, at.steps, at.tokens_per_second)

        train(
            stack, order.out, device=order.device, backend=order.backend, checkpoint_seconds=order.checkpoint_seconds,
            fsdp=order.fsdp, report=report,
        )  # fmt: skip
    note.path.unlink(missing_ok=True)


def _prepare(out: Path, stack: Stack) -> None:
    """Write down who is in the stack, so that it can be found again, and put aside what nothing goes on from."""
    place = out / STACKS / Job((stack,)).name
    if not (place / MEMBERS).is_file():
        write_atomically(place / MEMBERS, json.dumps([run.run_id for run in stack]).encode())
    for run in stack:
        folder = out / run.run_id
        if folder.is_dir() and read_config(folder) is None:
            run.save(folder / CONFIG)  # missing or damaged; the folder's name is a digest of what was in it
        if has_summary(folder, run):
            continue
        if (folder / SUMMARY).exists():  # damaged or of another run: the loop would stop at it
            os.replace(folder / SUMMARY, folder / f"damaged-{SUMMARY}")
        if not has_checkpoint(place):  # lines of an earlier try, perhaps in other company
            (folder / LOG).unlink(missing_ok=True)


@dataclass
class _Note:
    """The file that says how far a job is. Best effort: a full disk must not stop a run that could still end."""

    path: Path
    stacks: int
    last: float = -1.0

    def write(self, number: int, step: int, steps: int, rate: float) -> None:
        now = time.monotonic()
        if now - self.last < _NOTE_SECONDS:
            return
        self.last = now
        text = json.dumps({"share": (number + step / steps) / self.stacks, "tokens_per_second": rate})
        draft = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            os.replace(draft, self.path)


def has_checkpoint(place: Path) -> bool:
    """Whether a stack's folder holds something to resume from; without torch."""
    return any(place.glob("checkpoint*.pt"))


def sentence(error: BaseException) -> str:
    """An exception as one sentence for the user."""
    if isinstance(error, OSError):
        full = "; make room and launch again, nothing is lost" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}{full}"
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, ScalinglabError) else f"{type(error).__name__}: {text[:300]}"

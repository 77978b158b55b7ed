"""Fault injection: the trainer is killed, starved and lied to, and must end in the bytes of an undisturbed sweep.

    python benchmarks/faults.py                      # all faults; an hour of one core
    python benchmarks/faults.py --only torn_log --times 5

A small sweep is trained once undisturbed. Each fault then disturbs the same sweep again and again, until it is finished; at the end
every log and every weight is compared. Launchers are forked from this process, which has imported torch, so that faults hit
the training and not the start. Full and read-only disks need to mount a tmpfs (root on Linux) and are skipped elsewhere.
"""

from __future__ import annotations

import clock  # noqa: F401  (one thread, before NumPy)

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.collecting import collect
from scalinglab.config import Evaluation, RunConfig, ShapeSpec
from scalinglab.tables import write_atomically
from scalinglab.train import claims
from scalinglab.train.launch import launch

HERE = Path(__file__).resolve().parent
STEPS = 3_000


def sweep(steps: int = STEPS) -> list[RunConfig]:
    """Six runs in three stacks."""
    return [
        RunConfig(
            shape=ShapeSpec(depth=depth, width=8, heads=1, ffn_dim=16, vocab=8, context=32), lr=0.01, tokens=64 * steps,
            corpus="automaton", corpus_options={"width": 4}, batch=2, seed=seed, evaluation=Evaluation(sequences=4),
        )
        for depth in (1, 2, 3)
        for seed in (0, 1)
    ]  # fmt: skip


RUNS = sweep()


@dataclass(frozen=True)
class Result:
    """What a fault left: runs without a summary, steps or runs that stand twice, runs whose bytes differ."""

    fault: str
    injected: int
    lost: int
    duplicates: int
    corrupt: int
    seconds: float
    note: str = ""


def bytes_of(out: Path, run: RunConfig) -> tuple[bytes, str] | None:
    """A run's log and the digest of its weights; None where it is not finished."""
    try:
        summary = json.loads((out / run.run_id / "summary.json").read_text())
        return (out / run.run_id / "log.jsonl").read_bytes(), summary["weights_sha256"]
    except (OSError, ValueError, KeyError):
        return None


def judged(fault: str, injected: int, out: Path, whole: Path, began: float, note: str = "") -> Result:
    """Compare a disturbed sweep with the undisturbed one."""
    found = {run.run_id: bytes_of(out, run) for run in RUNS}
    lost = sum(bytes_ is None for bytes_ in found.values())
    if lost == len(RUNS):
        return Result(fault, injected, lost, 0, 0, time.monotonic() - began, note)
    table = collect(out, checkpoints=True)
    duplicates = int(table.duplicated(["run_id", "step"]).sum()) + len(collect(out)) - len(RUNS) + lost
    corrupt = sum(found[run.run_id] not in (None, bytes_of(whole, run)) for run in RUNS)
    left = list((out / claims.FOLDER).glob("*.*"))
    trouble = out.parent / f"{out.name}.trouble"
    last = trouble.read_text().strip().splitlines()[-1] if trouble.exists() else ""
    note = "; ".join(filter(None, [note, f"{len(left)} claims left" if left else "", last, *table.attrs["notes"]]))
    return Result(fault, injected, lost, duplicates, corrupt, time.monotonic() - began, note)


# ---- launchers ------------------------------------------------------------------------------------------------------------
def fork(out: Path, *, every: float = 0.02, workers: int = 1) -> int:
    """A launcher in a process of its own; exit code 0 if all is trained, 1 if a job failed, 2 if it was interrupted."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        with open(os.devnull, "w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
            warnings.simplefilter("ignore")
            code = int(bool(launch(RUNS, out, workers=workers, checkpoint_seconds=every, progress=False).failed))
    except KeyboardInterrupt:
        code = 2
    except BaseException:
        with (out.parent / f"{out.name}.trouble").open("a") as trouble:  # what no launcher should end with
            traceback.print_exc(file=trouble)
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """Exit code of a child, negative for a signal; None while it lives."""
    there, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if there else None


def disturbed(out: Path, rng: np.random.Generator, pause: float) -> bool:
    """Let a launcher train for a random while and kill it; True if it had finished before."""
    pid = fork(out)
    deadline = time.monotonic() + float(rng.exponential(pause)) + 0.2
    while time.monotonic() < deadline:
        if ended(pid) is not None:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def finish(out: Path) -> int:
    """Train what is left; the exit code."""
    pid = fork(out, every=60)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def again(out: Path) -> None:
    """Begin the sweep anew."""
    shutil.rmtree(out, ignore_errors=True)


# ---- faults ---------------------------------------------------------------------------------------------------------------
def launchers_killed(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """Two launchers share the folder; one after the other is killed -9 and started anew."""
    kills, children = 0, {fork(out), fork(out)}
    while children:
        time.sleep(float(rng.exponential(0.25)))
        for pid in sorted(children):
            if (code := ended(pid)) is not None:
                children.remove(pid)
                if code == 0 and kills < times and not children:
                    again(out)  # the sweep was finished before all kills were given
                    children = {fork(out), fork(out)}
                    break
        if children and kills < times:
            victim = int(rng.choice(sorted(children)))
            os.kill(victim, signal.SIGKILL)
            children.remove(victim)
            os.waitpid(victim, 0)
            kills += 1
            children.add(fork(out))
    return kills, ""


def workers_killed(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """A launcher with two worker processes, of which one is killed -9 now and then."""
    kills, code = 0, None
    pid = fork(out, workers=2)
    while True:
        time.sleep(float(rng.exponential(2.0)) + 0.5)
        if (code := ended(pid)) is not None:
            if kills >= times:
                break
            if code == 0:
                again(out)
            pid = fork(out, workers=2)
            continue
        workers = sorted({owner.pid for owner in claims.owners(out)} - {pid})
        if workers and kills < times:
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
            kills += 1
    finish(out)  # a launcher whose workers die again and again gives a job up, and says so
    return kills, f"the last of these launchers ended with {code}" if code else ""


def preempted(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """SIGTERM, as a scheduler sends it; no checkpoint is due, so that only the farewell saves the state."""
    given = unsaved = 0
    while given < times:
        pid = fork(out, every=1e9)
        time.sleep(float(rng.exponential(0.5)) + 0.3)
        if ended(pid) is not None:
            again(out)
            continue
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        given, unsaved = given + 1, unsaved + (code not in (0, 2, -signal.SIGTERM))
    finish(out)
    return given, f"{unsaved} ended otherwise than by saving" if unsaved else ""


def hurt_when_killed(
    out: Path, times: int, rng: np.random.Generator, hurt: Callable[[Path, np.random.Generator], int]
) -> tuple[int, str]:
    """Kill a launcher in the middle and hurt what it left, again and again; `hurt` says how many files it took."""
    given = 0
    while given < times:
        if disturbed(out, rng, 0.5):
            again(out)
        else:
            given += hurt(out, rng)
    finish(out)
    return given, ""


def torn_log(out: Path, rng: np.random.Generator) -> int:
    """A log loses its end at a random byte, or gets half a line."""
    logs = [path for path in sorted(out.glob("*/log.jsonl")) if not (path.parent / "summary.json").exists()]
    if not logs:
        return 0
    log = logs[int(rng.integers(len(logs)))]
    if rng.random() < 0.5:
        os.truncate(log, int(rng.integers(log.stat().st_size + 1)))
    else:
        with log.open("ab") as handle:
            handle.write(b'{"kind":"train","step":1')
    return 1


def damaged_checkpoint(out: Path, rng: np.random.Generator) -> int:
    """Bytes of a checkpoint are flipped, or its end is cut off; now and then the one before it, too."""
    given = 0
    for path in sorted(out.glob(".stacks/*/checkpoint.pt")):
        also = [path.with_name("checkpoint.previous.pt")] if rng.random() < 0.25 else []
        for file in [path, *(p for p in also if p.exists())]:
            data = bytearray(file.read_bytes())
            if rng.random() < 0.3:
                data = data[: int(rng.integers(len(data)))]
            else:
                for at in rng.integers(len(data), size=max(1, len(data) // 500)):
                    data[at] ^= int(rng.integers(1, 256))
            file.write_bytes(bytes(data))
            given += 1
    return given


def one_flipped_bit(out: Path, rng: np.random.Generator) -> int:
    """A single bit of a checkpoint is flipped: nothing but a checksum can see that."""
    paths = sorted(out.glob(".stacks/*/checkpoint.pt"))
    for path in paths:
        data = bytearray(path.read_bytes())
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(data))
    return len(paths)


def skewed_clock(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """Claims look hours old or from the future while a second launcher looks for work."""
    given = 0
    while given < times:
        first = fork(out)
        time.sleep(0.4 + float(rng.exponential(0.3)))
        second = fork(out)
        for _ in range(3):
            by = float(rng.choice([-1, 1])) * float(rng.uniform(1_000, 100_000))
            for claim in (out / claims.FOLDER).glob("*.*"):
                try:
                    os.utime(claim, (time.time() + by,) * 2)
                except OSError:
                    continue
                given += 1
            time.sleep(0.3)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)]
        if given < times and codes:
            again(out)
    finish(out)
    return given, ""


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of its own; PermissionError where none can be mounted."""
    place = Path(tempfile.mkdtemp())
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        raise PermissionError(f"a tmpfs can't be mounted here ({done.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)
        place.rmdir()


def remount(place: Path, option: str) -> bool:
    """Whether the file system took the option; a busy one may refuse to become read-only."""
    return subprocess.run(["mount", "-o", f"remount,{option}", place], capture_output=True).returncode == 0


def full_disk(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """The disk is full at some point of the training; with more room the same command goes on."""
    given, wrong = 0, 0
    with small_disk("64k") as place:
        while given < times:
            inside = place / "runs"
            again(inside)
            remount(place, f"size={int(rng.integers(40, 400))}k")
            code = finish(inside)
            given += code != 0
            wrong += code not in (0, 1, 3)
            remount(place, "size=64m")
            wrong += finish(inside) != 0
            if given >= times or wrong:
                break
        again(out)
        shutil.copytree(inside, out)
    return given, f"{wrong} launches ended otherwise than in a sentence" if wrong else ""


def read_only_disk(out: Path, times: int, rng: np.random.Generator) -> tuple[int, str]:
    """The disk becomes read-only under the training; writable again, the same command goes on."""
    given = refused = 0
    with small_disk("64m") as place:
        inside = place / "runs"
        while given < times:
            pid = fork(inside)
            time.sleep(0.3 + float(rng.exponential(0.4)))
            if not remount(place, "ro"):  # a file is open for writing: the kernel refuses while it is
                refused += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                remount(place, "ro")
                finish(inside)  # a launch on a disk that can't be written
            else:
                os.waitpid(pid, 0)
            given += 1
            remount(place, "rw")
            if all(bytes_of(inside, run) for run in RUNS) and given < times:
                again(inside)
        finish(inside)
        again(out)
        shutil.copytree(inside, out)
    return given, f"in {refused} the disk was busy, and the launcher was killed first" if refused else ""


FAULTS: dict[str, tuple[Callable[[Path, int, np.random.Generator], tuple[int, str]], int]] = {
    "launchers_killed": (launchers_killed, 200),
    "workers_killed": (workers_killed, 40),
    "preempted": (preempted, 40),
    "torn_log": (partial(hurt_when_killed, hurt=torn_log), 60),
    "damaged_checkpoint": (partial(hurt_when_killed, hurt=damaged_checkpoint), 60),
    "one_flipped_bit": (partial(hurt_when_killed, hurt=one_flipped_bit), 60),
    "skewed_clock": (skewed_clock, 60),
    "full_disk": (full_disk, 20),
    "read_only_disk": (read_only_disk, 20),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--times", type=int, help="how often each fault is given")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run; more on a faster machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "faults.csv")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    RUNS[:] = sweep(given.steps)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        finish(whole)
        for name in given.only:
            fault, times = FAULTS[name]
            out, began = Path(scratch) / name, time.monotonic()
            try:
                injected, note = fault(out, given.times or times, np.random.default_rng(given.seed))
            except PermissionError as error:
                print(f"skipped {name}: {error}", flush=True)
                continue
            rows.append(judged(name, injected, out, whole, began, note))
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    write_atomically(given.out, table.round({"seconds": 0}).to_csv(index=False).encode())
    return int(bool(table[["lost", "duplicates", "corrupt"]].to_numpy().any()))


if __name__ == "__main__":
    sys.exit(main())

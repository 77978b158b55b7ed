"""Fuzzing of everything that scalinglab reads: hostile files, formulas and command lines, made from valid ones.

A case is made from (seed, target, number) alone, so any case can be run again, on any machine, and a long run can be cut into
shares. A finding is an exception that isn't a ScalinglabError (or an exit code other than 0, 1, 2), more than 5 s of CPU, a
peak that grows by more than 500 MB, a file written outside the case's own folder, a program started, an object unpickled, or code run.

    python benchmarks/fuzz --cases 1000                            a quick look: cases over all targets by their weights
    python benchmarks/fuzz --cases 5000 --only csv json --jobs 2   these targets, two processes
    python benchmarks/fuzz --only csv --first 1234 --cases 1 -v    one case again, with its traceback
    python benchmarks/fuzz --cases 1000000 --resume --minutes 60   an hour of a long run; the same command goes on

Writes fuzz.csv (a row per target: cases, refusals, findings, CPU seconds, peak) and fuzz.json (the findings) to --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("MPLCONFIGDIR", tempfile.mkdtemp(prefix="fuzz-matplotlib-"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fuzz_seeds
import pandas as pd
from fuzz_fence import Fence, Verdict, limit_memory
from fuzz_targets import TARGETS

from scalinglab.tables import write_atomically

CHUNK = 400  # cases of one process; a fresh one after that, so that no leak hides a growth
PATIENCE = 120.0  # seconds without a sign of life (wall time): the case is a hang
COLUMNS = ("target", "seed", "cases", "read", "refused", "findings", "kinds", "cpu_seconds", "cases_per_cpu_second", "peak_mib",
           "slowest_s", "slowest_case")  # fmt: skip


def one_case(fence: Fence, target: str, seed: int, number: int, room: Path, *, verbose: bool = False) -> Verdict:
    """Run one case in a fresh folder below `room`, which is removed again."""
    box = room / f"{target}-{number}"
    box.mkdir()
    rng = Random(f"{seed}:{target}:{number}")

    def case() -> None:
        try:
            TARGETS[target].case(rng, box)
        except BaseException:
            if verbose:
                traceback.print_exc()
            raise

    try:
        return fence.judge(case, box)
    finally:
        shutil.rmtree(box, ignore_errors=True)


def work(target: str, seed: int, first: int, count: int, room: str, pipe: Connection, at: Any) -> None:
    """A process: some cases of one target, told one by one."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - tracebacks of hostile input are not for the terminal
    limit_memory()
    fence, place = Fence(), Path(tempfile.mkdtemp(dir=room))
    for number in range(first, first + count):
        at.value = number
        pipe.send((number, one_case(fence, target, seed, number, place)))
    shutil.rmtree(place, ignore_errors=True)
    pipe.send(None)


class Tally:
    """Counts of one target."""

    def __init__(self, target: str, seed: int, old: dict[str, Any] | None = None) -> None:
        self.row: dict[str, Any] = old or {
            "target": target, "seed": seed, "cases": 0, "read": 0, "refused": 0, "findings": 0, "cpu_seconds": 0.0, "peak_mib": 0,
            "slowest_s": 0.0, "slowest_case": -1,
        }  # fmt: skip
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, number: int, v: Verdict) -> None:
        row = self.row
        row["cases"] += 1
        row["cpu_seconds"] += v.seconds
        row["peak_mib"] = max(row["peak_mib"], v.peak >> 20)
        if v.seconds > row["slowest_s"]:
            row["slowest_s"], row["slowest_case"] = round(v.seconds, 3), number
        row["findings" if v.outcome == "finding" else v.outcome] += 1
        if v.outcome == "finding":
            key = f"{v.kind} {v.place}" if v.place else f"{v.kind} {v.message[:60]}"
            known = self.found.setdefault(key, {**asdict(v), "target": row["target"], "first_case": number, "count": 0})
            known["count"] += 1

    def told(self) -> dict[str, Any]:
        row = {**self.row, "kinds": len(self.found), "cpu_seconds": round(self.row["cpu_seconds"], 1)}
        row["cases_per_cpu_second"] = round(row["cases"] / max(self.row["cpu_seconds"], 1e-9), 1)
        return {c: row[c] for c in COLUMNS}


def fuzz(plan: list[tuple[str, int, int]], seed: int, jobs: int, tallies: dict[str, Tally], until: float) -> None:
    """Run the chunks (target, first, count) on so many processes; a process that hangs or dies is a finding."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    waiting, live = list(reversed(plan)), {}
    room = tempfile.mkdtemp(prefix="fuzz-")
    try:
        while waiting or live:
            while waiting and len(live) < jobs and time.monotonic() < until:
                target, first, count = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                at = context.Value("q", first)
                process = context.Process(target=work, args=(target, seed, first, count, room, theirs, at))
                process.start()
                theirs.close()
                live[mine] = (process, target, first + count, at, [time.monotonic()])
            if not live:
                return
            for pipe in wait(list(live), timeout=1.0):
                process, target, end, at, seen = live[pipe]  # type: ignore[index]
                try:
                    said = pipe.recv()  # type: ignore[union-attr]
                except EOFError:  # it died: out of memory, or a crash of compiled code
                    said = None
                    process.join()
                    if process.exitcode:
                        tallies[target].add(
                            at.value, Verdict("finding", "crash", "", f"the process ended with {process.exitcode}")
                        )
                        if at.value + 1 < end:
                            waiting.append((target, at.value + 1, end - at.value - 1))
                if said is None:
                    process.join()
                    pipe.close()  # type: ignore[union-attr]
                    del live[pipe]  # type: ignore[arg-type]
                else:
                    seen[0] = time.monotonic()
                    tallies[target].add(*said)
            for pipe, (process, target, end, at, seen) in list(live.items()):
                if time.monotonic() - seen[0] > PATIENCE:
                    process.kill()
                    process.join()
                    tallies[target].add(at.value, Verdict("finding", "hang", "", f"no sign of life for {PATIENCE:g} s"))
                    if at.value + 1 < end:
                        waiting.append((target, at.value + 1, end - at.value - 1))
                    del live[pipe]
    finally:
        shutil.rmtree(room, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=int, default=1000, help="over all chosen targets, by weight; of each with --each"
    )
    parser.add_argument("--each", action="store_true", help="--cases is per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target: for shares")
    parser.add_argument("--only", nargs="*", default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new process after so long")
    parser.add_argument(
        "--resume", action="store_true", help="go on after the cases that --out/fuzz.csv has for this seed"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for fuzz.csv and fuzz.json; nothing is written without it"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="run here, and show tracebacks")
    options = parser.parse_args(arguments)
    unknown = [t for t in options.only if t not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    chosen, total = options.only, sum(TARGETS[t].weight for t in options.only)
    wanted = {
        t: options.cases if options.each else max(1, round(options.cases * TARGETS[t].weight / total)) for t in chosen
    }
    fuzz_seeds.warm()  # once, before the processes part
    if {"cli", "html", "figure"} & set(chosen):
        import scalinglab.report.html  # noqa: F401 - and with it matplotlib, which looks for fonts by a program of the system
    if options.verbose:
        fence, room = Fence(), Path(tempfile.mkdtemp(prefix="fuzz-"))
        for target in chosen:
            for number in range(options.first, options.first + wanted[target]):
                print(target, number, one_case(fence, target, options.seed, number, room, verbose=True))
        shutil.rmtree(room, ignore_errors=True)
        return 0
    tallies = {t: Tally(t, options.seed) for t in chosen}
    if options.resume and options.out is not None:
        _recall(options.out, options.seed, tallies)
    plan = []
    for target in chosen:
        done = tallies[target].row["cases"]
        firsts = range(done, wanted[target], CHUNK)
        plan += [(target, options.first + first, min(CHUNK, wanted[target] - first)) for first in firsts]
    plan.sort(key=lambda chunk: (chunk[1] - options.first) / wanted[chunk[0]])  # all targets get on alike
    fuzz(plan, options.seed, options.jobs, tallies, time.monotonic() + 60 * options.minutes)
    table = pd.DataFrame([t.told() for t in tallies.values()])
    print(table.drop(columns="seed").to_string(index=False))
    print(
        f"{int(table['cases'].sum()):,} cases, {int(table['findings'].sum()):,} findings of {int(table['kinds'].sum())} kinds"
    )
    found = [f for t in tallies.values() for f in t.found.values()]
    for one in found:
        print(
            f"{one['target']} case {one['first_case']} ({one['count']}x): {one['kind']} at {one['place'] or '-'}: {one['message'][:160]}"
        )
    if options.out is not None:
        write_atomically(options.out / "fuzz.csv", table.to_csv(index=False, lineterminator="\n").encode())
        write_atomically(
            options.out / "fuzz.json",
            (json.dumps({"seed": options.seed, "first": options.first, "findings": found}, indent=1) + "\n").encode(),
        )
    return 1 if found else 0


def _recall(out: Path, seed: int, tallies: dict[str, Tally]) -> None:
    """Counts of an earlier sitting with the same seed."""
    if not (out / "fuzz.csv").is_file():
        return
    for row in pd.read_csv(out / "fuzz.csv").to_dict("records"):
        if row["target"] in tallies and row["seed"] == seed:
            tallies[row["target"]].row = {k: v for k, v in row.items() if k not in ("kinds", "cases_per_cpu_second")}
    for one in json.loads((out / "fuzz.json").read_text())["findings"]:
        tally = tallies.get(one["target"])
        if tally is not None:
            tally.found[f"{one['kind']} {one['place']}" if one["place"] else f"{one['kind']} {one['message'][:60]}"] = (
                one
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

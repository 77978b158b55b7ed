"""How far a launch is, on stderr: a live line in a terminal, else a line for every job that ends."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalinglab.train.jobs import Job

FOLDER = ".progress"
_SECONDS = 1.0


class Display:
    """Watches the progress files of some jobs. A context; silent where `shown` is False.

    Parameters
    ----------
    out : Path
        The trainer's folder.
    jobs : sequence of Job
    shown : bool
    """

    def __init__(self, out: Path, jobs: Sequence[Job], *, shown: bool = True) -> None:
        self._out, self._shown = out, shown and bool(jobs)
        self._left = {job.name: job for job in jobs}
        self._cost = {job.name: job.cost for job in jobs}
        self._runs, self._done, self._rate = sum(len(job.run_ids) for job in jobs), 0, 0.0
        self._began = time.monotonic()
        self._first: float | None = None  # what was done when this launch began
        self._stop = threading.Event()
        self._bar: Any = None

    def __enter__(self) -> Display:
        if self._shown and sys.stderr.isatty():
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._stop.set()
            self._thread.join()
            self._bar.stop()

    def ended(self, job: Job, failure: str = "") -> None:
        """A job has ended."""
        if self._left.pop(job.name, None) is None:
            return
        self._done += len(job.run_ids)
        if not self._shown or self._bar is not None:
            return
        first = job.runs[0]
        what = f"{first.architecture} L{first.shape.depth} d{first.shape.width}, {len(job.run_ids)} runs"
        state = f"failed: {failure}" if failure else "done"
        print(
            f"[{self._done}/{self._runs} runs, {time.monotonic() - self._began:,.0f} s] {what}: {state}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
            TextColumn("{task.fields[more]}"), console=Console(stderr=True), transient=False,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=1.0, more="")
        self._bar.start()
        self._thread = threading.Thread(target=self._watch, name="display", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_SECONDS):
            self._draw()
        self._draw()

    def _draw(self) -> None:
        share, rate = self._look()
        self._first = share if self._first is None else self._first
        elapsed = time.monotonic() - self._began
        gained = share - self._first
        rest = f", about {_span(elapsed * (1 - share) / gained)} left" if gained > 0.01 and share < 1 else ""
        self._bar.update(
            self._task, completed=share, description=f"{self._done}/{self._runs} runs",
            more=f"{rate / 1e3:,.1f}k tokens/s{rest}",
        )  # fmt: skip

    def _look(self) -> tuple[float, float]:
        """Share of the cost that is done, and tokens per second of all jobs under way."""
        total, left, rate = sum(self._cost.values()), 0.0, 0.0
        for name in list(self._left):
            done = 0.0
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads((self._out / FOLDER / f"{name}.json").read_bytes())
                done, rate = float(said["share"]), rate + float(said["tokens_per_second"])
            left += self._cost[name] * (1 - done)
        return 1 - left / total if total else 1.0, rate


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

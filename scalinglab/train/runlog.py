"""The log of a run: JSON lines that are only ever appended.

Training is deterministic, so a run that resumes from an older checkpoint writes the lines since then a second time. They are
counted and passed over: an interrupted and an undisturbed run leave the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RunLog:
    """`log.jsonl` of one run.

    Parameters
    ----------
    path : Path
        Made where it doesn't exist. A last line without its end (the process died in it) is cut off; it was never a line.

    Attributes
    ----------
    lines : list of str
        All lines emitted so far, in order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        path.touch(exist_ok=True)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        self.written = data.count(b"\n")

    def rewind(self, lines: Sequence[str]) -> bool:
        """Go on behind these lines, which a checkpoint remembers; False if fewer are on disk (some were lost)."""
        if len(lines) > self.written:
            return False
        self.lines = list(lines)
        return True

    def restore(self, lines: Sequence[str]) -> None:
        """Begin with these lines, written unless they are on disk."""
        self.lines = list(lines)
        self._append()

    def write(self, **fields: Any) -> None:
        """Emit a line; it goes to disk unless it is there already."""
        self.lines.append(json.dumps(fields, allow_nan=False, separators=(",", ":")))
        self._append()

    def sync(self) -> None:
        """Force everything written to disk."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())

    def _append(self) -> None:
        missing = self.lines[self.written :]
        if missing:
            with self.path.open("ab") as file:
                file.write("".join(f"{line}\n" for line in missing).encode())
            self.written = len(self.lines)


def is_logged(step: int) -> bool:
    """Whether a step (counted from 1) has a line: all of the first 32, then about 32 for each doubling.

    It depends on nothing but the step, so that branches of one trunk have the lines of the trunk.
    """
    return step % max(1, 1 << max(0, step.bit_length() - 6)) == 0

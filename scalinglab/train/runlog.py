"""The log of a run: JSON lines that are only ever appended.

Training is deterministic, so a run that resumes from an older checkpoint makes the lines since then a second time. Those on disk
are compared and passed over: an interrupted and an undisturbed run leave the same bytes.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalinglab.errors import ScalinglabWarning


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
        self._on_disk = data[:whole].decode(errors="replace").splitlines()

    def restore(self, lines: Sequence[str]) -> None:
        """Begin with these lines, which a checkpoint remembers."""
        self.lines = list(lines)
        self._settle(0)

    def write(self, **fields: Any) -> None:
        """Emit a line; it goes to disk unless it is there already."""
        self.lines.append(json.dumps(fields, allow_nan=False, separators=(",", ":")))
        self._settle(len(self.lines) - 1)

    def sync(self) -> None:
        """Force everything written to disk."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())

    def _settle(self, first: int) -> None:
        """Bring the file up to the lines, of which those from `first` on are new.

        Warns
        -----
        ScalinglabWarning
            The file has other lines: another machine or version, or someone's hand. It is kept under another name.
        """
        if self.lines[first : len(self._on_disk)] != self._on_disk[first : len(self.lines)]:
            kept = self.path.with_suffix(".jsonl.replaced")
            os.replace(self.path, kept)
            warnings.warn(
                f"{self.path} has other lines than this training gives; it is kept as {kept.name}",
                ScalinglabWarning,
                stacklevel=3,
            )
            self._on_disk = []
        missing = self.lines[len(self._on_disk) :]
        if missing:
            with self.path.open("ab") as file:
                file.write("".join(f"{line}\n" for line in missing).encode())
            self._on_disk += missing


def is_logged(step: int) -> bool:
    """Whether a step (counted from 1) has a line: all of the first 32, then about 32 for each doubling.

    It depends on nothing but the step, so that branches of one trunk have the lines of the trunk.
    """
    return step % max(1, 1 << max(0, step.bit_length() - 6)) == 0

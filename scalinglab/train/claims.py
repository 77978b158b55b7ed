"""Claims: who is training which run of a folder, so that two launchers never train one run twice.

    out/.claims/<run_id>.<generation>      {"machine", "pid", "born", "started", "token", "launcher"}

The claim of the highest generation counts. It is made by a hard link (or O_CREAT | O_EXCL where there are
none), which is atomic on local disks and on NFS, and kept alive by touching it. A claim is stale if its process is dead (seen from the same machine), or if it was not touched for
`STALE_SECONDS` (seen from anywhere). Generation n is only ever replaced by n + 1, which again one process alone can create;
no file is taken away from under a live owner, and no lock is needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = ".claims"
STALE_SECONDS = 600.0
_BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Owner:
    """A process: its machine (as far as process ids mean the same), id, and start as the kernel counts it."""

    machine: str
    pid: int
    born: str
    token: str
    launcher: str = ""

    @classmethod
    def this(cls, launcher: str = "") -> Owner:
        """The process that asks, under a new token."""
        return cls(_machine(), os.getpid(), _born(os.getpid()), uuid.uuid4().hex, launcher)

    @property
    def dead(self) -> bool:
        """Whether the process is known to have ended; False also where it can't be known from here."""
        if self.machine != _machine() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return bool(self.born) and _born(self.pid) != self.born  # the number was given to another process

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.split(' ')[0]}" if self.pid > 0 else "another process"


_SOMEBODY = Owner("", 0, "", "")


class Claims:
    """The runs that this process holds. Made by `acquire`; a context that keeps them alive and gives them back."""

    def __init__(self, folder: Path, held: dict[str, Path], owner: Owner, parent: int | None) -> None:
        self._folder, self._held, self._owner, self._parent = folder, held, owner, parent
        self._stop = threading.Event()
        self.lost = False

    def __enter__(self) -> Claims:
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for run_id, path in self._held.items():
            for generation, older in _generations(self._folder, run_id):  # the highest last: the claim holds until then
                if generation <= int(path.suffix[1:]):
                    older.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            for run_id, path in self._held.items():
                with contextlib.suppress(OSError):
                    os.utime(path)
                newest = _newest(self._folder, run_id)
                self.lost |= newest is None or newest[1] != path
            if self._parent is not None and os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGTERM)  # the training saves its state and ends
                return


def acquire(out: Path, run_ids: Sequence[str], *, launcher: str = "", parent: int | None = None) -> Claims | Owner:
    """Claim all of the runs, or none: then the owner of one that is held.

    Parameters
    ----------
    out : Path
        The trainer's folder.
    run_ids : sequence of str
    launcher : str
        Written into the claim, so that a launcher knows its own workers.
    parent : int, optional
        Process id of the launcher: once it is no longer the parent of this process, this process gets a SIGTERM.
    """
    folder, owner = out / FOLDER, Owner.this(launcher)
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, Path] = {}
    for run_id in sorted(run_ids):
        path = _claim(folder, run_id, owner)
        if isinstance(path, Owner):
            for mine in held.values():
                mine.unlink(missing_ok=True)
            return path
        held[run_id] = path
    return Claims(folder, held, owner, parent)


def holder(out: Path, run_id: str) -> Owner | None:
    """Who is training a run now; None where nobody is, or the claim is stale."""
    newest = _newest(out / FOLDER, run_id)
    if newest is None:
        return None
    owner = _read(newest[1])
    return None if owner is None or _stale(newest[1], owner) else owner


def owners(out: Path) -> Iterator[Owner]:
    """Owners of all claims in the folder that are not stale."""
    names = {path.name.rpartition(".")[0] for path in (out / FOLDER).glob("*.*")}
    for name in sorted(names):
        owner = holder(out, name)
        if owner is not None:
            yield owner


def _claim(folder: Path, run_id: str, owner: Owner) -> Path | Owner:
    newest = _newest(folder, run_id)
    generation, current = 0, None
    if newest is not None:
        current = _read(newest[1])
        if current is not None and not _stale(newest[1], current):
            return current
        generation = newest[0] + 1
    path = folder / f"{run_id}.{generation}"
    if not _create(path, json.dumps({**asdict(owner), "started": time.time()})):
        return _read(path) or _SOMEBODY
    # Whoever is slow between looking and claiming may claim beside a chain that has moved on, and steps back.
    chain = _generations(folder, run_id)
    moved = newest is not None and _read(newest[1]) != current
    if moved or not chain or chain[-1][1] != path or (newest is None and len(chain) > 1):
        path.unlink(missing_ok=True)
        return _SOMEBODY
    return path


def _create(path: Path, text: str) -> bool:
    """Make the file with its content, if nobody else has: by a link, so that no claim is ever half written."""
    draft = path.with_name(f"-{uuid.uuid4().hex}")
    try:
        draft.write_text(text)
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except PermissionError as error:  # also what file systems without hard links say
        if not os.access(path.parent, os.W_OK):
            raise error
        return _create_plainly(path, text)
    finally:
        draft.unlink(missing_ok=True)


def _create_plainly(path: Path, text: str) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as f:
        f.write(text)
    return True


def _read(path: Path) -> Owner | None:
    """Owner in a claim; one without a name where the claim is being written or its writer died; None where it is gone."""
    try:
        data = json.loads(path.read_text())
        return Owner(**{name: data[name] for name in ("machine", "pid", "born", "token", "launcher")})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError):
        return _SOMEBODY


def _stale(path: Path, owner: Owner) -> bool:
    if owner.dead:
        return True
    try:
        return _now(path.parent) - path.stat().st_mtime > STALE_SECONDS
    except OSError:
        return True  # given back between looking and looking closer


def _now(folder: Path) -> float:
    """Time as the file system counts it: clocks of machines differ."""
    probe = folder / f"now-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _generations(folder: Path, run_id: str) -> list[tuple[int, Path]]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            head, _, number = name.rpartition(".")
            if head == run_id and number.isdigit():
                found.append((int(number), folder / name))
    return sorted(found)


def _newest(folder: Path, run_id: str) -> tuple[int, Path] | None:
    found = _generations(folder, run_id)
    return found[-1] if found else None


@functools.cache
def _machine() -> str:
    """Host name, boot and process namespace: where these agree, process ids mean the same."""
    parts = [socket.gethostname() or "unknown"]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _born(pid: int) -> str:
    """Start time of a process in kernel ticks; empty where the system has no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""

"""The fence around a case: what it may raise, how long it may take, how much memory, where it may write, what it may start.

Python's audit events tell of writing, deleting, starting programs, connecting, unpickling and running code while it happens,
so a breach is seen even where the case then ends well.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from scalinglab.errors import ScalinglabError

SECONDS = 5.0  # CPU of one case
GROWTH = 500 << 20  # bytes that the peak may grow by in one case
_ADDRESS_SPACE = 6 << 30  # above what was mapped at the start; beyond it a MemoryError is raised, which is a finding
_STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.startfile",
    "socket.connect",
    "pty.spawn",
)
_CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)
_PACKAGE = f"{os.sep}scalinglab{os.sep}"


class TooSlow(BaseException):
    """The case used up its CPU time; not an Exception, so that no handler swallows it."""


@dataclass(frozen=True)
class Verdict:
    """How a case ended: "read", "refused" or "finding"; for a finding its kind, its place in the package and the message."""

    outcome: str
    kind: str = ""
    place: str = ""
    message: str = ""
    seconds: float = 0.0
    peak: int = 0  # bytes, of the process so far


class Fence:
    """Watches one box (a folder) at a time; install once per process."""

    def __init__(self) -> None:
        self.box: str | None = None
        self.breaches: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self.box is None:
            return
        if event in _STARTS:
            self.breaches.append(f"{event} {args[0]!r}"[:200])
        elif event == "pickle.find_class":
            self.breaches.append(f"unpickles {args!r}"[:200])
        elif event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            mode, flags = args[1], args[2]
            writes = any(c in mode for c in "wax+") if isinstance(mode, str) else False
            writes |= isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes:
                self._written(event, args[0])
        elif event in _CHANGES:
            for path in (
                args[1:2] if event in ("os.symlink", "os.link") else args[:2] if event == "os.rename" else args[:1]
            ):
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._written(event, path)
        elif event == "exec" and _called_by_package():
            self.breaches.append(f"runs code: {args[0]!r}"[:200])

    def _written(self, event: str, path: str | bytes | os.PathLike[str]) -> None:
        place = os.path.realpath(os.fsdecode(path))
        if self.box is None or place.startswith((self.box + os.sep, os.devnull)) or place == self.box:
            return
        if f"{os.sep}__pycache__{os.sep}" in place:
            return
        self.breaches.append(f"{event} outside the box: {place}"[:300])

    def judge(self, case: Callable[[], None], box: Path) -> Verdict:
        """Run one case and say how it ended."""
        before = peak_bytes()
        self.breaches.clear()
        self.box = os.path.realpath(box)
        start = time.process_time()
        try:
            with _limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case()
            made = Verdict("read")
        except ScalinglabError as error:
            made = Verdict("refused") if len(str(error)) < 1_000_000 else _finding("endless message", error)
        except TooSlow as error:
            made = _finding(f"over {SECONDS:g} s", error)
        except (Exception, SystemExit, RecursionError, KeyboardInterrupt) as error:
            made = _finding(type(error).__name__, error)
        finally:
            self.box = None
        seconds, peak = time.process_time() - start, peak_bytes()
        if made.outcome != "finding" and self.breaches:
            made = Verdict("finding", "breach", "", "; ".join(self.breaches[:3]))
        if made.outcome != "finding" and peak - before > GROWTH:
            made = Verdict("finding", "memory", "", f"grew by {(peak - before) >> 20} MiB")
        return Verdict(made.outcome, made.kind, made.place, made.message, seconds, peak)


def limit_memory() -> None:
    """Let a runaway allocation raise MemoryError instead of taking the machine down."""
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))


def peak_bytes() -> int:
    """Peak resident memory of this process, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _finding(kind: str, error: BaseException) -> Verdict:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _PACKAGE in f.filename]
    place = f"{frames[-1].filename.rpartition(_PACKAGE)[2]}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    try:
        message = str(error)
    except Exception as worse:
        message = f"(no message: {type(worse).__name__})"
    return Verdict("finding", kind, place, message.encode("utf-8", "backslashreplace").decode()[:300])


def _called_by_package() -> bool:
    """Whether the code that is about to run was handed over by the package itself (imports and dataclasses aren't)."""
    frame: FrameType | None = sys._getframe(2)
    return frame is not None and _PACKAGE in frame.f_code.co_filename


@contextmanager
def _limited() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {SECONDS:g} s of CPU")

    old = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)

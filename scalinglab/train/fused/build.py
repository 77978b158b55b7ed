"""Compile the kernels on first use, into a cache folder of the user, and load them.

The file's name holds a digest of source, compiler, flags and kind of processor: another version of the package or
another compiler on the same home directory builds its own. The code is for AVX2 and FMA whatever else the machine has:
measured, -march=native gains nothing, and so one home directory serves different processors. Several processes may
build at once; each writes under a name of its own and renames.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from scalinglab.errors import ConfigError
from scalinglab.tables import write_atomically

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-mavx2", "-mfma", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_NEEDED = ("avx2", "fma")


class FusedUnavailable(ConfigError):
    """The native kernels can't be used here; the message says why. The torch backend does the same, slower."""


def library() -> ctypes.CDLL:
    """The compiled kernels, built if the cache has none.

    The cache is `$SCALINGLAB_CACHE`, else `$XDG_CACHE_HOME/scalinglab`, else `~/.cache/scalinglab`.

    Raises
    ------
    FusedUnavailable
        The processor lacks AVX2 or FMA, there is no C++ compiler, the compiler fails, or the cache can't be written.
    """
    features = processor_features()
    if missing := [name for name in _NEEDED if name not in features]:
        raise FusedUnavailable(
            f"the native kernels need a processor with {' and '.join(missing)}; use the torch backend"
        )
    compiler = _compiler()
    path = cache_folder() / f"kernels-{_digest(compiler)}.so"
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # left damaged by a full disk or a lost machine: build it again
    _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise FusedUnavailable(
            f"{path}: can't be loaded ({error}); set SCALINGLAB_CACHE to a folder from which programs may run"
        ) from None


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    if named := os.environ.get("SCALINGLAB_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalinglab"
    except RuntimeError:
        raise FusedUnavailable(
            "there is no home directory to cache the native kernels in; set SCALINGLAB_CACHE"
        ) from None


def processor_features() -> frozenset[str]:
    """Instruction sets of this processor, in the names of /proc/cpuinfo; empty where they can't be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _compiler() -> tuple[str, ...]:
    chosen = os.environ.get("CXX", "").split()
    if chosen:
        if not shutil.which(chosen[0]):
            raise FusedUnavailable(f"CXX names {chosen[0]!r}, which isn't on PATH; name a C++ compiler or unset CXX")
        return tuple(chosen)
    for name in _COMPILERS:
        if path := shutil.which(name):
            return (path,)
    raise FusedUnavailable(
        f"the native kernels need a C++ compiler ({', '.join(_COMPILERS)}, or one named by CXX) and there is none on "
        "PATH; install one or use the torch backend"
    )


def _digest(compiler: tuple[str, ...]) -> str:
    version = _run([*compiler, "--version"]).stdout.splitlines()[:1]
    parts = [*compiler, *version, *FLAGS, platform.system(), platform.machine()]
    parts += [path.read_text(encoding="utf-8") for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _build(compiler: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.so"
        done = _run([*compiler, *FLAGS, str(SOURCE), "-o", str(made)])
        if done.returncode or not made.is_file():
            last = " ".join(done.stderr.split())[-300:] or f"exit status {done.returncode}"
            raise FusedUnavailable(f"{compiler[0]} can't compile the native kernels: {last}; use the torch backend")
        try:
            write_atomically(path, made.read_bytes())
        except OSError as error:
            raise FusedUnavailable(
                f"{path.parent}: can't be written ({error.strerror}); set SCALINGLAB_CACHE to a folder that can"
            ) from None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise FusedUnavailable(f"{command[0]}: can't be run ({error.strerror}); use the torch backend") from None

"""Checkpoints: whole or absent, with the one before kept until the next is safe. Never a pickle.

    checkpoint.pt    b"scalinglab state 1\\n", SHA-256 of the rest (32 bytes), what torch.save writes

The digest is ours because torch doesn't check those of its zip records: a flipped bit would be trained on.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scalinglab.errors import ScalinglabWarning
from scalinglab.tables import write_atomically

_CURRENT, _PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
_SEAL = b"scalinglab state 1\n"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `checkpoint.pt` into the folder; the one there becomes `checkpoint.previous.pt`."""
    data = seal(encode(state))
    if (folder / _CURRENT).exists():
        os.replace(folder / _CURRENT, folder / _PREVIOUS)
    write_atomically(folder / _CURRENT, data)


def load(folder: Path, *, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """The newest checkpoint that can be read and that `fits`, on the CPU; None if there is none.

    Warns
    -----
    ScalinglabWarning
        The newest is damaged; says what is used instead.
    """
    for name, instead in ((_CURRENT, "the one before it"), (_PREVIOUS, "none: training starts over")):
        path = folder / name
        if path.exists() and (state := read(path)) is not None and fits(state):
            return state
        if path.exists():
            warnings.warn(f"{path} is damaged or of other runs; using {instead}", ScalinglabWarning, stacklevel=2)
    return None


def remove(folder: Path) -> None:
    """Delete a folder of checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)


def encode(state: dict[str, Any]) -> bytes:
    """Tensors, numbers, strings and lists as bytes that `read` takes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def seal(data: bytes) -> bytes:
    """The same with a digest in front, which `read` checks."""
    return _SEAL + hashlib.sha256(data).digest() + data


def read(path: Path) -> dict[str, Any] | None:
    """What `encode` made, sealed or not, on the CPU; None if the file is damaged or has code in it, which is never run."""
    try:
        data = memoryview(path.read_bytes())
        if data[: len(_SEAL)] == _SEAL:
            begin = len(_SEAL) + hashlib.sha256().digest_size
            if hashlib.sha256(data[begin:]).digest() != data[len(_SEAL) : begin]:
                return None
            data = data[begin:]
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # torch raises RuntimeError, EOFError, UnpicklingError, KeyError, ... for a damaged file
        return None
    return state if isinstance(state, dict) else None


def digest(weights: dict[str, Any]) -> str:
    """SHA-256 of a state dict: names, shapes, dtypes and values, 64 hex digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()

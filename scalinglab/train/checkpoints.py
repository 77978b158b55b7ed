"""Checkpoints: whole or absent, with the one before kept until the next is safe. Never a pickle."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from scalinglab.errors import ScalinglabWarning
from scalinglab.tables import write_atomically

_CURRENT, _PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `checkpoint.pt` into the folder; the one there becomes `checkpoint.previous.pt`."""
    data = encode(state)
    if (folder / _CURRENT).exists():
        os.replace(folder / _CURRENT, folder / _PREVIOUS)
    write_atomically(folder / _CURRENT, data)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, on the CPU; None if there is none.

    Warns
    -----
    ScalinglabWarning
        The newest is damaged; says what is used instead.
    """
    for name, instead in ((_CURRENT, "the one before it"), (_PREVIOUS, "none: training starts over")):
        path = folder / name
        if not path.exists():
            continue
        try:
            state: dict[str, Any] = read(path)
        except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, ... for a damaged file
            warnings.warn(
                f"{path} is damaged ({type(error).__name__}); using {instead}", ScalinglabWarning, stacklevel=2
            )
            continue
        return state
    return None


def exists(folder: Path) -> bool:
    """Whether there is anything to resume from."""
    return (folder / _CURRENT).exists() or (folder / _PREVIOUS).exists()


def remove(folder: Path) -> None:
    """Delete a folder of checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)


def encode(state: dict[str, Any]) -> bytes:
    """Tensors, numbers, strings and lists as bytes that `read` takes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(path: Path) -> dict[str, Any]:
    """What `encode` made, on the CPU; code in the file is refused."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

"""What runs a stack: a device that exists, and fused kernels where they fit."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

import torch

from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError, ScalinglabWarning
from scalinglab.train import fused
from scalinglab.train.stack import Stack

Backend: TypeAlias = Literal["auto", "torch", "native"]


def choose_kernels(stack: Stack, config: RunConfig, backend: Backend) -> str:
    """Switch a stack to the native kernels where that is asked for and possible; returns what runs it.

    Warns
    -----
    ScalinglabWarning
        With "auto", where only the machine stands in the way.
    """
    if backend == "torch":
        return "torch"
    if backend not in ("auto", "native"):
        raise ConfigError(f"backend={backend!r} is unknown; choose auto, torch or native")
    unfit = _unfit(stack, config)
    reason = unfit or fused.available()
    if reason is None:
        stack.model.use(fused.load())
        return "native"
    if backend == "native":
        raise ConfigError(f"backend='native' can't run here: {reason}")
    if not unfit:
        warnings.warn(
            f"training with torch instead of the faster native kernels: {reason}", ScalinglabWarning, stacklevel=2
        )
    return "torch"


def _unfit(stack: Stack, config: RunConfig) -> str | None:
    """Why these runs are not for the native kernels on any machine."""
    if config.precision != "fp32":
        return f"the native kernels compute in fp32, not in {config.precision}"
    device = stack.params.device
    return f"the native kernels run on the CPU, not on {device}" if device.type != "cpu" else None


def open_device(name: str) -> torch.device:
    """The device of that name, as torch writes it: "cpu", "cuda", "cuda:1", "mps".

    Raises
    ------
    ConfigError
        There is no such device here, or it holds no data; lists those there are.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        reason = str(error).split("\n")[0]
        raise ConfigError(f"device={name!r} can't be used here ({reason}); there is {', '.join(there)}") from None
    if device.type == "meta":
        raise ConfigError("device='meta' has no data to train on; take cpu, cuda or mps")
    return device

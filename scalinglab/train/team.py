"""Several processes that share each batch of one run: data parallelism under torchrun.

All gradients of a stack lie in one buffer, so it takes one all-reduce a step; a run that is too large for one device is shared out too
(`scalinglab.train.sharded`). Alone, every operation is a no-op.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

from scalinglab.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Rank of this process and number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def slice(self, batch: int) -> slice:
        """This process's sequences of a batch."""
        share = batch // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def average(self, *tensors: Tensor) -> None:
        """Replace tensors by their mean over all processes."""
        if self.size > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)
                tensor.div_(self.size)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set in any process: what only some of them know, and all must do together."""
        if self.size == 1:
            return flags
        told = torch.tensor(flags, dtype=torch.float32)
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return tuple(bool(flag) for flag in told)

    def tell(self, value: T) -> T:
        """What the first process says, in all of them; small, since it travels as a pickle."""
        if self.size == 1:
            return value
        told = [value]
        distributed.broadcast_object_list(told, src=0)
        return told[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()


def join(batch: int = 0) -> Team:
    """The team that torchrun has started, or a team of one.

    Parameters
    ----------
    batch : int, optional
        Sequences that it shares, if that is to be checked.

    Raises
    ------
    ConfigError
        The batch can't be cut into equal parts.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team()
    if batch % size:
        raise ConfigError(f"batch={batch} can't be shared by {size} processes; take a multiple of {size}")
    if torch.cuda.is_available():  # "cuda" is a GPU for each process
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Team(distributed.get_rank(), size)

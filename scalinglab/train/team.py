"""Several processes that share each batch of one run: data parallelism under torchrun.

All gradients lie in one buffer, so it takes one all-reduce a step. Alone, every operation is a no-op.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from scalinglab.errors import ConfigError


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

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        told = torch.tensor(float(flag))
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return bool(told)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()


def join(batch: int) -> Team:
    """The team that torchrun has started, or a team of one.

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
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Team(distributed.get_rank(), size)

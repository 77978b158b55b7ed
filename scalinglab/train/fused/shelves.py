"""What later sublayers read of earlier ones, as one buffer per forward pass instead of a copy per reader.

A topology that reads all earlier sublayers would otherwise stack them anew each time, O(depth²) memory. Here every sublayer
puts its channels into a slot once, and every reader's backward pass adds to one buffer of gradients. Autograd sees a chain
of empty tokens: a reader depends on the token of the last slot filled before it, so the gradient of a slot is complete when
the backward pass of its `put` runs. The layout is in shelf.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scalinglab.errors import ConfigError

LANES = 8
FIRST_ONLY = "the native kernels have first derivatives only; use the torch backend for higher ones"


class Buffers:
    """Values and gradients of the slots. The graph holds these and never the `Shelf`, whose token holds the graph: a cycle through
    autograd's nodes is one that Python's collector can't see, and every step would stay in memory."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.data = torch.empty(sizes, dtype=torch.float32, device="cpu")
        self._grads: Tensor | None = None

    @property
    def grads(self) -> Tensor:
        """Gradients of the slots; `put` takes what is there and leaves zeros, so a graph can be run twice."""
        if self._grads is None:
            self._grads = torch.zeros(self.sizes, dtype=torch.float32, device="cpu")
        return self._grads


class Shelf:
    """Slots of one forward pass.

    Parameters
    ----------
    library : ctypes.CDLL
        The compiled kernels.
    like_kbtd : Tensor
        Activations that fix replicas, sequences and positions.
    capacity : int
        Most slots.
    width : int
        Channels of a slot.

    Attributes
    ----------
    count : int
        Slots filled so far.

    Raises
    ------
    ConfigError
        The activations are not float32 [k, b, t, d] on the CPU.
    """

    def __init__(self, library: Any, like_kbtd: Tensor, capacity: int, width: int) -> None:
        if like_kbtd.dim() != 4 or like_kbtd.dtype != torch.float32 or not like_kbtd.is_cpu:
            raise ConfigError(
                f"activations {tuple(like_kbtd.shape)} of {like_kbtd.dtype} on {like_kbtd.device} must be float32 "
                "[replica, sequence, position, channel] on the CPU"
            )
        self.library, self.capacity, self.width, self.count = library, capacity, width, 0
        self.lead = tuple(like_kbtd.shape[:3])
        replicas, sequences, length = self.lead
        self.buffers = Buffers((replicas * sequences, -(-length // LANES), capacity, width, LANES))
        self.token = torch.empty(0)

    def next(self) -> int:
        """Number of the slot that is filled now.

        Raises
        ------
        ConfigError
            The shelf is full.
        """
        if self.count == self.capacity:
            raise ConfigError(f"the shelf has {self.capacity} slots and all are filled")
        self.count += 1
        return self.count - 1

    def put(self, x_kbtw: Tensor) -> int:
        """Fill the next slot and return its number.

        Raises
        ------
        ConfigError
            The shelf is full, or x has other axes.
        """
        if x_kbtw.shape != (*self.lead, self.width) or x_kbtw.dtype != torch.float32:
            raise ConfigError(
                f"a slot takes float32 {(*self.lead, self.width)}, not {x_kbtw.dtype} {tuple(x_kbtw.shape)}"
            )
        slot = self.next()
        self.token = _Put.apply(self, slot, x_kbtw, self.token)
        return slot

    def read(self, slots: Sequence[int], query_kd: Tensor, eps: float) -> Tensor:
        """Softmax mix [k, b, t, d] of slots, with logits query . v / rms(v).

        Raises
        ------
        ConfigError
            A slot isn't filled, none is named, or the query has other axes.
        """
        if not slots or not all(0 <= slot < self.count for slot in slots):
            raise ConfigError(f"slots {list(slots)} must be one or more of the {self.count} that are filled")
        if query_kd.shape != (self.lead[0], self.width) or query_kd.dtype != torch.float32:
            raise ConfigError(f"the query is {tuple(query_kd.shape)}; it needs {(self.lead[0], self.width)}")
        y: Tensor = _Read.apply(self, torch.tensor(list(slots), dtype=torch.int64), query_kd, eps, self.token)
        return y


class _Put(Function):
    @staticmethod
    def forward(ctx: Any, shelf: Shelf, slot: int, x: Tensor, token: Tensor) -> Tensor:
        x = x.contiguous()  # held by name: a copy must outlive the call
        rows, _, capacity, width, _ = shelf.buffers.sizes
        ctx.library, ctx.buffers, ctx.lead = shelf.library, shelf.buffers, shelf.lead
        ctx.sizes = (rows, shelf.lead[2], width, capacity, slot)
        shelf.library.scalinglab_put_forward(*ctx.sizes, x.data_ptr(), shelf.buffers.data.data_ptr())
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, dtoken: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ONLY)
        dx = torch.empty((*ctx.lead, ctx.sizes[2]), dtype=torch.float32, device="cpu")
        ctx.library.scalinglab_put_backward(*ctx.sizes, ctx.buffers.grads.data_ptr(), dx.data_ptr())
        return None, None, dx, torch.empty(0)


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, shelf: Shelf, slots: Tensor, query: Tensor, eps: float, token: Tensor) -> Tensor:
        query = query.contiguous()
        rows, blocks, capacity, width, lanes = shelf.buffers.sizes
        ctx.library, ctx.buffers = shelf.library, shelf.buffers
        ctx.sizes, ctx.eps = (*shelf.lead, width, capacity, len(slots)), eps
        y = torch.empty((*shelf.lead, width), dtype=torch.float32, device="cpu")
        kept = torch.empty((rows, blocks, 2, lanes), dtype=torch.float32, device="cpu")
        shelf.library.scalinglab_read_forward(
            *ctx.sizes,
            eps,
            slots.data_ptr(),
            query.data_ptr(),
            shelf.buffers.data.data_ptr(),
            y.data_ptr(),
            kept.data_ptr(),
        )
        ctx.save_for_backward(slots, query, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ONLY)
        slots, query, kept = ctx.saved_tensors
        dy, dquery = dy.contiguous(), torch.empty_like(query)
        ctx.library.scalinglab_read_backward(
            *ctx.sizes, ctx.eps, slots.data_ptr(), query.data_ptr(), ctx.buffers.data.data_ptr(), kept.data_ptr(),
            dy.data_ptr(), ctx.buffers.grads.data_ptr(), dquery.data_ptr(),
        )  # fmt: skip
        return None, None, dquery, None, torch.empty(0)

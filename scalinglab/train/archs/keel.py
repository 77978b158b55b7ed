"""KEEL, a highway-like Post-LN: norm_post(alpha h + F(norm_pre(h))) with alpha = 2L.

The first sublayer is plain Pre-LN and has no post norm, the second has alpha = 1. So there are 2L - 1 post norms. At
init each later sublayer moves h by about 1 / (2L), and gradients of the first block are orders of magnitude above the
others'; that is the design, Adam rescales it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from scalinglab.arch_options import Keel
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import RMSNorm


class KeelConnector(Connector):
    """Post norms of sublayers 1 .. 2L - 1."""

    def __init__(self, shape: Shape, options: Keel, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.alpha = 2.0 * shape.depth if options.alpha is None else options.alpha
        self.post_norms = nn.ModuleList(RMSNorm(shape.width, norm_eps, "trunk") for _ in range(2 * shape.depth - 1))

    def start(self, embedding: Tensor) -> Stream:
        return KeelStream(self, embedding)

    def travelling(self, block: int) -> dict[str, nn.Parameter]:
        norms = {f"{i % 2}": self.post_norms[i - 1] for i in (2 * block, 2 * block + 1) if i > 0}
        return {f"{inside}.{name}": p for inside, norm in norms.items() for name, p in norm.named_parameters()}


class KeelStream(Stream):
    """A stream of rms one (at unit gain) from the second sublayer on."""

    def __init__(self, connector: KeelConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector

    def write(self, i: int, y: Tensor) -> None:
        if i == 0:
            self.h = self.h + y
        else:
            alpha = self.connector.alpha if i > 1 else 1.0
            self.h = self.connector.post_norms[i - 1](alpha * self.h + y)

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError("a norm stands on the stream, so what a sublayer reads is no weighted sum of outputs")


KEEL = Architecture("keel", KeelConnector)

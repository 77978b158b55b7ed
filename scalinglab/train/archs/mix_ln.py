"""Mix-LN: Post-LN in the first ceil(fraction L) blocks, Pre-LN above. Each sublayer has one norm either way."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from scalinglab.arch_options import MixLN
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import RMSNorm


class MixLNConnector(Connector):
    """Post norms for the lower blocks."""

    def __init__(self, shape: Shape, options: MixLN, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        # The small step down keeps 0.3 * 10 = 3.0000000000000004 from rounding up to 4.
        self.post_blocks = math.ceil(options.fraction * shape.depth - 1e-9)
        self.post_norms = nn.ModuleList(RMSNorm(shape.width, norm_eps, "trunk") for _ in range(2 * self.post_blocks))

    def has_input_norm(self, i: int) -> bool:
        return i // 2 >= self.post_blocks

    def start(self, embedding: Tensor) -> Stream:
        return MixLNStream(self, embedding)

    def travelling(self, block: int) -> dict[str, nn.Parameter]:
        norms = self.post_norms[2 * block : 2 * block + 2]  # none above the Post-LN blocks
        return {f"{inside}.{name}": p for inside, norm in enumerate(norms) for name, p in norm.named_parameters()}


class MixLNStream(Stream):
    """Normalised behind lower sublayers, a plain sum above."""

    def __init__(self, connector: MixLNConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.post_norms = connector.post_norms

    def write(self, i: int, y: Tensor) -> None:
        self.h = self.h + y
        if i < len(self.post_norms):
            self.h = self.post_norms[i](self.h)

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError("a norm stands on the stream, so what a sublayer reads is no weighted sum of outputs")


MIX_LN = Architecture("mix_ln", MixLNConnector)

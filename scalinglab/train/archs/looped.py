"""Shared blocks: recurrent depth (0 1 2 0 1 2) or immediate repeats (0 0 1 1 2 2, MobileLLM-LS), wired as Pre-LN.

Everything of a block is shared, its norms too. `Shape.depth` counts the unrolled blocks, which is what compute sees.
"""

from __future__ import annotations

from scalinglab.arch_options import Looped
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector


class LoopedConnector(Connector):
    """Pre-LN over fewer distinct blocks."""

    def __init__(self, shape: Shape, options: Looped, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        options.distinct(shape.depth)  # says so now where the repeats don't divide the depth

    def owner(self, block: int) -> int:
        return int(self.options.owner(block, self.depth))


LOOPED = Architecture("looped", LoopedConnector)

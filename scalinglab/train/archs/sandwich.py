"""Sandwich-LN / Peri-LN: h + norm_out(F(norm_in(h))), with gains of their own.

At unit gains every sublayer adds a vector of rms one, so rms(h) grows as the square root of the sublayers passed. The
outer norm belongs to the branch: a branch multiplier acts behind it, or the norm would cancel it.
"""

from __future__ import annotations

from torch import Tensor, nn

from scalinglab.arch_options import Sandwich
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Branch, Connector, Stream
from scalinglab.train.layers import RMSNorm


class SandwichConnector(Connector):
    """One output norm per sublayer; optionally a norm of the embedding, or no inner norms."""

    def __init__(self, shape: Shape, options: Sandwich, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.input_norm = options.input_norm
        self.output_norms = nn.ModuleList(RMSNorm(shape.width, norm_eps, "branch") for _ in range(2 * shape.depth))
        self.embedding_norm = RMSNorm(shape.width, norm_eps, "outside") if options.embedding_norm else None

    def has_input_norm(self, i: int) -> bool:
        return self.input_norm

    def start(self, embedding: Tensor) -> Stream:
        return SandwichStream(self, embedding if self.embedding_norm is None else self.embedding_norm(embedding))


class SandwichStream(Stream):
    """Plain sum of normalised outputs."""

    def __init__(self, connector: SandwichConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        normed: Tensor = self.connector.output_norms[i](branch(x))
        return normed


SANDWICH = Architecture("sandwich", SandwichConnector)

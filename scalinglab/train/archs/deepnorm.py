"""DeepNorm, decoder form: norm(alpha h + F(h)) with alpha = (2L)^(1/4), no inner norm.

The initial std of value, attention output and all feed-forward matrices is multiplied by beta = (8L)^(-1/4); query and
key keep theirs. Norm gains act on the stream itself, so they are tagged trunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from scalinglab.arch_options import DeepNorm
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import RMSNorm

SHRUNK = ("value", "output", "gate", "up", "down")


class PostNormConnector(Connector):
    """norm(alpha h + F(h)) in every sublayer, initial gain beta."""

    def __init__(self, shape: Shape, options: object, norm_eps: float, *, alpha: float, beta: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.alpha, self.beta = alpha, beta
        self.post_norms = nn.ModuleList(RMSNorm(shape.width, norm_eps, "trunk") for _ in range(2 * shape.depth))

    def has_input_norm(self, i: int) -> bool:
        return False

    def init_gain(self, matrix: str) -> float:
        return self.beta if matrix in SHRUNK else 1.0

    def start(self, embedding: Tensor) -> Stream:
        return PostNormStream(self, embedding)


class PostNormStream(Stream):
    """A stream of rms one (at unit gain) behind every sublayer."""

    def __init__(self, connector: PostNormConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector

    def write(self, i: int, y: Tensor) -> None:
        self.h = self.connector.post_norms[i](self.connector.alpha * self.h + y)

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError("a norm stands on the stream, so what a sublayer reads is no weighted sum of outputs")


def deepnorm(shape: Shape, options: DeepNorm, norm_eps: float) -> Connector:
    """DeepNorm with the constants of its depth, unless the options name others."""
    alpha = (2 * shape.depth) ** 0.25 if options.alpha is None else options.alpha
    beta = (8 * shape.depth) ** -0.25 if options.beta is None else options.beta
    return PostNormConnector(shape, options, norm_eps, alpha=alpha, beta=beta)


DEEPNORM = Architecture("deepnorm", deepnorm)

"""LayerScale: h + gamma F(norm(h)), gamma small at first; a scalar gamma = 0 is SkipInit / ReZero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalinglab.arch_options import LayerScale
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Branch, Connector, Stream
from scalinglab.train.layers import Draw, spread
from scalinglab.train.roles import tag


class LayerScaleConnector(Connector):
    """One gamma per sublayer."""

    def __init__(self, shape: Shape, options: LayerScale, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.initial = options.initial
        size = shape.width if options.per == "channel" else 1
        self.gammas = nn.ParameterList(
            tag(nn.Parameter(torch.empty(size)), "vector", "branch", 1) for _ in range(2 * shape.depth)
        )

    def init_weights(self, draw: Draw, std: float) -> None:
        for gamma in self.gammas:
            nn.init.constant_(gamma, self.initial)

    def start(self, embedding: Tensor) -> Stream:
        return LayerScaleStream(self, embedding)


class LayerScaleStream(Stream):
    """Plain sum of scaled outputs."""

    def __init__(self, connector: LayerScaleConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        return branch(x) * spread(self.connector.gammas[i], 1)


LAYERSCALE = Architecture("layerscale", LayerScaleConnector)

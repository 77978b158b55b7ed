"""Mixture-of-depths attention on a Pre-LN stream: heads also attend to the same token in earlier sublayers.

One softmax runs over the causal sequence and over the depth cache of the token: the keys and values of each earlier
attention, and a key and a value that each earlier feed-forward projects from its normalised input. The last block
caches nothing, and so has no projection.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from scalinglab.arch_options import MoDA
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Branch, Connector, Stream
from scalinglab.train.layers import DepthCache, Draw, linear
from scalinglab.train.roles import tag


class CacheProjection(nn.Module):
    """Key and value of a feed-forward sublayer."""

    def __init__(self, width: int, kv_width: int) -> None:
        super().__init__()
        self.key_kd = tag(nn.Parameter(torch.empty(kv_width, width)), "matrix", "branch", width)
        self.value_kd = tag(nn.Parameter(torch.empty(kv_width, width)), "matrix", "branch", width)

    def init_weights(self, draw: Draw, std: float) -> None:
        """Truncated normals."""
        draw(self.key_kd, std)
        draw(self.value_kd, std)

    def forward(self, x_btd: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Key and value [b, k, t, c] of the cache's slot."""
        key = linear(x_btd, self.key_kd).unflatten(-1, (-1, head_dim))
        value = linear(x_btd, self.value_kd).unflatten(-1, (-1, head_dim))
        return key.transpose(-3, -2), value.transpose(-3, -2)


class MoDAConnector(Connector):
    """Projections of blocks 0 .. L - 2."""

    def __init__(self, shape: Shape, options: MoDA, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.head_dim = shape.head_dim
        kv_width = self.kv_width = (shape.kv_heads or shape.heads) * shape.head_dim
        count = shape.depth - 1 if options.ffn_cache else 0
        self.projections = nn.ModuleList(CacheProjection(shape.width, kv_width) for _ in range(count))

    def init_weights(self, draw: Draw, std: float) -> None:
        for projection in self.projections:
            cast(CacheProjection, projection).init_weights(draw, std)

    def start(self, embedding: Tensor) -> Stream:
        return MoDAStream(self, embedding)

    def travelling(self, block: int) -> dict[str, nn.Parameter]:
        return dict(self.projections[block].named_parameters()) if block < len(self.projections) else {}


class MoDAStream(Stream):
    """Plain sum, and the depth cache; a skipped sublayer leaves no slot."""

    def __init__(self, connector: MoDAConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector
        self.cache = DepthCache(rotate_keys=connector.options.depth_key_rope)
        if connector.kernels is not None and not self.cache.rotate_keys:
            slots = connector.depth - 1 + len(connector.projections)
            self.cache.shelf = connector.kernels.shelf(embedding, slots, 2 * connector.kv_width)

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        block, feed_forward = divmod(i, 2)
        self.cache.writable = block < self.connector.depth - 1
        if not feed_forward:
            return branch(x, self.cache)
        if block < len(self.connector.projections):
            self.cache.add(*self.connector.projections[block](x, self.connector.head_dim))
        return branch(x)


MODA = Architecture("moda", MoDAConnector)

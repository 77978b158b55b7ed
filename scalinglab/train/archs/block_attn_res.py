"""Block attention residuals: `attn_res` over sums of consecutive sublayers."""

from __future__ import annotations

from scalinglab.arch_options import BlockAttnRes
from scalinglab.shapes import Shape
from scalinglab.train.archs.attn_res import AttnResConnector
from scalinglab.train.archs.connector import Architecture, Connector


def block_attn_res(shape: Shape, options: BlockAttnRes, norm_eps: float) -> Connector:
    """Blocks of the size that the options give at this depth; the last may be short."""
    return AttnResConnector(shape, options, norm_eps, size=options.block_size(shape.depth))


BLOCK_ATTN_RES = Architecture("block_attn_res", block_attn_res)

"""The registry of residual topologies: one file per architecture, one entry here."""

from __future__ import annotations

from scalinglab.arch_options import Options, resolve_options
from scalinglab.shapes import Shape
from scalinglab.train.archs.attn_res import ATTN_RES
from scalinglab.train.archs.block_attn_res import BLOCK_ATTN_RES
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.archs.deepnorm import DEEPNORM
from scalinglab.train.archs.denseformer import DENSEFORMER
from scalinglab.train.archs.hyper_connections import HYPER_CONNECTIONS
from scalinglab.train.archs.hyper_connections_static import HYPER_CONNECTIONS_STATIC
from scalinglab.train.archs.keel import KEEL
from scalinglab.train.archs.layerscale import LAYERSCALE
from scalinglab.train.archs.lns import LNS
from scalinglab.train.archs.looped import LOOPED
from scalinglab.train.archs.mhc import MHC
from scalinglab.train.archs.mix_ln import MIX_LN
from scalinglab.train.archs.moda import MODA
from scalinglab.train.archs.post_ln import POST_LN
from scalinglab.train.archs.pre_ln import PRE_LN
from scalinglab.train.archs.sandwich import SANDWICH

__all__ = ["ARCHS", "Architecture", "Connector", "Stream", "connect"]

ARCHS: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        PRE_LN,
        SANDWICH,
        LNS,
        DEEPNORM,
        KEEL,
        HYPER_CONNECTIONS,
        HYPER_CONNECTIONS_STATIC,
        MHC,
        ATTN_RES,
        BLOCK_ATTN_RES,
        MODA,
        DENSEFORMER,
        POST_LN,
        MIX_LN,
        LAYERSCALE,
        LOOPED,
    )
}


def connect(architecture: str, shape: Shape, options: Options = None, *, norm_eps: float = 1e-6) -> Connector:
    """The connector of an architecture for a shape.

    Raises
    ------
    ConfigError
        Unknown architecture, or options that don't fit it or the shape.
    """
    options = resolve_options(architecture, options)
    return ARCHS[architecture].build(shape, options, norm_eps)

"""Post-LN: norm(h + F(h)), which is DeepNorm with alpha = beta = 1."""

from __future__ import annotations

from scalinglab.arch_options import PostLN
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector
from scalinglab.train.archs.deepnorm import PostNormConnector


def post_ln(shape: Shape, options: PostLN, norm_eps: float) -> Connector:
    """The classic arrangement; the common final norm stays, idempotent up to its gain."""
    return PostNormConnector(shape, options, norm_eps, alpha=1.0, beta=1.0)


POST_LN = Architecture("post_ln", post_ln)

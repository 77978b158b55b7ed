"""LayerNorm Scaling: h + F(norm(h) / sqrt(l)), l the block counted from 1, the same factor for both its sublayers.

The factor is a Python number derived from the index, never a buffer: meta-initialisation would wipe a buffer.
"""

from __future__ import annotations

from torch import Tensor

from scalinglab.train.archs.connector import Architecture, Branch, Connector, Stream


def factor(i: int) -> float:
    """1 / sqrt(l) of sublayer i."""
    return float((i // 2 + 1) ** -0.5)


class LNSConnector(Connector):
    """No parameters."""

    def start(self, embedding: Tensor) -> Stream:
        return LNSStream(embedding)


class LNSStream(Stream):
    """Plain sum; inputs of sublayers are scaled behind their norm."""

    factors_travel = True  # when probes exchange blocks, the factor goes with the weights that were trained behind it

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        return branch(x * factor(i))


LNS = Architecture("lns", LNSConnector)

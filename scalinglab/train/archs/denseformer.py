"""DenseFormer: behind each block the stream becomes a learned weighted average of all block outputs and the embedding.

Weights are scalars, the same for all tokens, one-hot on the newest state at init: exactly Pre-LN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scalinglab.arch_options import DenseFormer
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import Draw, at_least_float32, full_precision
from scalinglab.train.roles import tag


class DenseFormerConnector(Connector):
    """Averaging weights by block, newest state first; none behind a block that the period leaves out."""

    def __init__(self, shape: Shape, options: DenseFormer, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.sources = [options.sources(block) for block in range(shape.depth)]
        self.weights = nn.ParameterDict(
            {
                str(block): tag(nn.Parameter(torch.empty(len(sources))), "vector", "trunk", 1)
                for block, sources in enumerate(self.sources)
                if sources
            }
        )

    def init_weights(self, draw: Draw, std: float) -> None:
        for weights in self.weights.values():
            nn.init.zeros_(weights)
            weights[0] = 1.0

    def start(self, embedding: Tensor) -> Stream:
        return DenseFormerStream(self, embedding)


class DenseFormerStream(Stream):
    """The stream and the block outputs so far; averages do not enter the history, blocks do."""

    def __init__(self, connector: DenseFormerConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector
        self.history = [embedding]

    def write(self, i: int, y: Tensor) -> None:
        self.h = self.h + y
        self._close(i)

    def skip(self, i: int) -> None:
        self._close(i)

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        # Coefficients of the embedding and of the block outputs so far, and behind them those of the stream itself.
        *past, latest = memory or [self.h.new_ones(1)]
        if i:
            latest = torch.cat([latest, latest.new_ones(1)])  # sublayer i - 1 has been added
        block, inside = divmod(i, 2)
        if not inside:
            past.append(latest)
            sources = self.connector.sources[block - 1] if i else []
            if sources:
                weights = self.connector.weights[str(block - 1)]
                padded = [functional.pad(past[j], (0, 1 + i - len(past[j]))) for j in sources]
                latest = torch.tensordot(weights.to(latest.dtype), torch.stack(padded), dims=1)
        return latest, [*past, latest]

    def _close(self, i: int) -> None:
        block, inside = divmod(i, 2)
        if not inside:
            return
        self.history.append(self.h)
        sources = self.connector.sources[block]
        if sources:
            with full_precision(self.h):
                states = at_least_float32(torch.stack([self.history[j] for j in sources]))
                weights = self.connector.weights[str(block)].to(states.dtype)
                self.h = _average(weights, states).to(self.h.dtype)


def _average(weights_s: Tensor, states_sbtd: Tensor) -> Tensor:
    if weights_s.ndim == 1:
        return torch.tensordot(weights_s, states_sbtd, dims=1)
    return torch.einsum("ks,skbtd->kbtd", weights_s, states_sbtd)


DENSEFORMER = Architecture("denseformer", DenseFormerConnector)

"""Hyper-connections: n streams H, read by a weight vector, mixed by an n x n matrix, written by a vector.

For each sublayer, with Hbar = norm(H) per stream (no gain),

    a = A_m + s_a tanh(Hbar W_m)    A = A_r + s_a tanh(Hbar W_r)    b = B + s_b tanh(Hbar W_b)
    y = F(norm(a^T H))              H <- A^T H + b y^T

Row s of A belongs to source stream s. Init: W = 0, A_r = identity, A_m one-hot on stream i mod n, B = 1, s = 0.01. All
streams are then equal and the model is Pre-LN, unless output projections are divided by sqrt(n). Coefficients and the
mixing are computed in float32 or better.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from scalinglab.arch_options import HyperConnections
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import Draw, Sublayer, at_least_float32, full_precision, linear, mix, normalize, spread
from scalinglab.train.roles import tag


class HyperWeights(Sublayer):
    """Static and dynamic weights of one sublayer: A_m `read_n`, A_r `mix_nn`, B `write_n`; W, s with the same names."""

    def __init__(self, width: int, options: HyperConnections) -> None:
        super().__init__()
        n, self.options = options.streams, options
        self.read_n = tag(nn.Parameter(torch.empty(n)), "vector", "branch", 1, decay=False)
        self.mix_nn = tag(nn.Parameter(torch.empty(n, n)), "vector", "trunk", 1, decay=False)
        self.write_n = tag(nn.Parameter(torch.empty(n)), "vector", "branch", 1, decay=False)
        if options.dynamic:
            self.read_weight_1d = tag(nn.Parameter(torch.empty(1, width)), "matrix", "branch", width)
            self.mix_weight_nd = tag(nn.Parameter(torch.empty(n, width)), "matrix", "trunk", width)
            self.write_weight_1d = tag(nn.Parameter(torch.empty(1, width)), "matrix", "branch", width)
            self.mix_scale = tag(nn.Parameter(torch.empty(1)), "vector", "trunk", 1)
            self.write_scale = tag(nn.Parameter(torch.empty(1)), "vector", "branch", 1)

    def init_weights(self, stream: int) -> None:
        """Read `stream`, keep every stream, write to all."""
        nn.init.zeros_(self.read_n)
        self.read_n[stream] = 1.0
        nn.init.eye_(self.mix_nn)
        nn.init.ones_(self.write_n)
        if self.options.dynamic:
            for weight in (self.read_weight_1d, self.mix_weight_nd, self.write_weight_1d):
                nn.init.zeros_(weight)
            for scale in (self.mix_scale, self.write_scale):
                nn.init.constant_(scale, self.options.dynamic_scale)

    def forward(self, H_btnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights to read [.., n], mix [.., target, source] and write [.., n] the streams, in the dtype of the streams."""
        dtype = H_btnd.dtype
        read, write = (spread(p.to(dtype), 1) for p in (self.read_n, self.write_n))
        mixing = spread(self.mix_nn.to(dtype), 2)
        if not self.options.dynamic:
            return read, mixing.transpose(-2, -1), write
        weights = torch.cat([self.read_weight_1d, self.write_weight_1d, self.mix_weight_nd], dim=-2).to(dtype)
        dynamic = linear(normalize(H_btnd, self.options.norm_eps, self.kernels), weights)
        if self.options.tanh:
            dynamic = dynamic.tanh()
        mix_scale, write_scale = (spread(p.to(dtype), 1) for p in (self.mix_scale, self.write_scale))
        return (
            read + mix_scale * dynamic[..., 0],
            (mixing + mix_scale.unsqueeze(-1) * dynamic[..., 2:]).transpose(-2, -1),
            write + write_scale * dynamic[..., 1],
        )


class HyperConnector(Connector):
    """Weights of all sublayers."""

    def __init__(self, shape: Shape, options: HyperConnections, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.sublayers = nn.ModuleList(HyperWeights(shape.width, options) for _ in range(2 * shape.depth))

    def init_gain(self, matrix: str) -> float:
        return output_gain(matrix, self.options.streams, scaled=self.options.scale_outputs)

    def init_weights(self, draw: Draw, std: float) -> None:
        for i, weights in enumerate(self.sublayers):
            cast(HyperWeights, weights).init_weights(i % self.options.streams)

    def start(self, embedding: Tensor) -> Stream:
        return HyperStream(self, embedding)


class HyperStream(Stream):
    """n streams [.., n, d] that start as copies of the embedding."""

    def __init__(self, connector: Any, embedding: Tensor) -> None:
        options = connector.options
        super().__init__(embedding.unsqueeze(-2).expand(*embedding.shape[:-1], options.streams, -1))
        self.connector, self.sublayers, self.readout = connector, connector.sublayers, options.readout
        self.pending: tuple[Tensor, Tensor] | None = (
            None  # mixed streams and write weights of the sublayer that was read
        )

    def read(self, i: int) -> Tensor:
        with full_precision(self.h):
            H = at_least_float32(self.h)
            read, mixing, write = self.sublayers[i](H)
            # One product for both: its first row is what the sublayer reads, the others are the streams without its output.
            rows = torch.cat([read.unsqueeze(-2), mixing], dim=-2)
            x, mixed = mix(rows, H, self.connector.kernels).split([1, H.shape[-2]], dim=-2)
            self.pending = mixed, write
            return x.squeeze(-2).to(self.h.dtype)

    def write(self, i: int, y: Tensor) -> None:
        if self.pending is None:
            raise RuntimeError(f"sublayer {i} is written before it is read")
        mixed, write = self.pending
        with full_precision(self.h):
            new = mixed + write.unsqueeze(-1) * at_least_float32(y).unsqueeze(-2)
        self.h, self.pending = new.to(self.h.dtype), None

    def finish(self) -> Tensor:
        return merge_streams(self.h, self.readout)

    def restore(self, i: int, state: Tensor) -> None:
        self.h = state.unflatten(-1, self.h.shape[-2:])

    def weigh(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights with which sublayer i reads [.., n], mixes [.., target, source] and writes [.., n], for probes."""
        with full_precision(self.h):
            read, mixing, write = self.sublayers[i](at_least_float32(self.h))
            return read, mixing, write

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        n = self.h.shape[-2]
        if memory is None:
            memory = at_least_float32(self.h).new_ones(1, 1, n, 1)  # [b, t, n, source]: every stream is the embedding
        if i == len(self.sublayers):
            return memory.sum(-2) / (1 if self.readout == "sum" else n), memory
        read, mixing, write = self.weigh(i)
        kept, new = mixing @ memory, write.unsqueeze(-1)
        lead = torch.broadcast_shapes(kept.shape[:-1], new.shape[:-1])
        unfolded = torch.cat([kept.expand(*lead, -1), new.expand(*lead, -1)], dim=-1)
        return (read.unsqueeze(-2) @ memory).squeeze(-2), unfolded

    def state(self, i: int) -> Tensor:
        return self.h.flatten(-2)


def merge_streams(H: Tensor, readout: str) -> Tensor:
    """Sum or mean over streams."""
    merged = at_least_float32(H).sum(-2) if readout == "sum" else at_least_float32(H).mean(-2)
    return merged.to(H.dtype)


def output_gain(matrix: str, streams: int, *, scaled: bool) -> float:
    """1 / sqrt(n) for the projections back to the streams, so that the merged state starts at the usual scale."""
    return 1 / math.sqrt(streams) if scaled and matrix in ("output", "down") else 1.0


HYPER_CONNECTIONS = Architecture("hyper_connections", HyperConnector)

"""Manifold-constrained hyper-connections: the mixing matrix is doubly stochastic, reading and writing are positive.

With z = norm(vec(H)) over all n d entries (no gain),

    read = sigmoid(g_pre z phi_pre + b_pre)     write = 2 sigmoid(g_post z phi_post + b_post)
    mix = sinkhorn(g_res z phi_res + b_res)     H <- mix H + write^T F(norm(read H))

mix is [target, source]. Init: phi = 0, b_pre = +gap on stream i mod n and -gap elsewhere, b_post = 0 (write = 1), b_res
= 0 on and -gap off the diagonal. Equal streams stay equal as long as rows of mix sum to one, so the model equals Pre-LN
at init; that alone does not show that mix is near the identity.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from scalinglab import arch_options
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.archs.hyper_connections import HyperStream, output_gain
from scalinglab.train.layers import Draw, Sublayer, linear, normalize, spread
from scalinglab.train.roles import tag


def sinkhorn(logits: Tensor, iterations: int, kernels: Any = None) -> Tensor:
    """Nearly doubly stochastic matrices from logits [.., target, source].

    Each iteration normalises columns, then rows. So row sums (what a target stream receives) are one to rounding, and
    column sums (the gain of the backward pass) carry all of the truncation error.
    """
    if kernels is not None:
        return cast(Tensor, kernels.sinkhorn(logits, iterations))
    # Matrix axes first: sums over four neighbours are slow, sums of four long rows are not.
    weights = logits.movedim((-2, -1), (0, 1)).contiguous()
    weights = (weights - weights.amax((0, 1))).exp()
    for _ in range(iterations):
        weights = weights / weights.sum(0)
        weights = weights / weights.sum(1, keepdim=True)
    return weights.movedim((0, 1), (-2, -1))


class ConstrainedWeights(Sublayer):
    """Weights of one sublayer."""

    def __init__(self, width: int, options: arch_options.MHC, norm_eps: float) -> None:
        super().__init__()
        n, self.options, self.norm_eps = options.streams, options, norm_eps
        wide = n * width
        self.read_weight = tag(nn.Parameter(torch.empty(n, wide)), "matrix", "branch", wide)
        self.write_weight = tag(nn.Parameter(torch.empty(n, wide)), "matrix", "branch", wide)
        self.mix_weight = tag(nn.Parameter(torch.empty(n * n, wide)), "matrix", "trunk", wide)
        self.read_n = tag(nn.Parameter(torch.empty(n)), "vector", "branch", 1, decay=False)
        self.write_n = tag(nn.Parameter(torch.empty(n)), "vector", "branch", 1, decay=False)
        self.mix_nn = tag(nn.Parameter(torch.empty(n, n)), "vector", "trunk", 1, decay=False)
        self.read_gate = tag(nn.Parameter(torch.empty(1)), "vector", "branch", 1, decay=False)
        self.write_gate = tag(nn.Parameter(torch.empty(1)), "vector", "branch", 1, decay=False)
        self.mix_gate = tag(nn.Parameter(torch.empty(1)), "vector", "trunk", 1, decay=False)

    def init_weights(self, stream: int) -> None:
        """Read (almost only) `stream`, keep (almost) every stream, write one to all."""
        for weight in (self.read_weight, self.write_weight, self.mix_weight, self.write_n):
            nn.init.zeros_(weight)
        for gate in (self.read_gate, self.write_gate, self.mix_gate):
            nn.init.constant_(gate, self.options.gate)
        nn.init.constant_(self.read_n, -self.options.gap)
        self.read_n[stream] = self.options.gap
        nn.init.constant_(self.mix_nn, -self.options.gap)
        self.mix_nn.fill_diagonal_(0.0)

    def forward(self, H_btnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights to read [.., n], mix [.., target, source] and write [.., n] the streams, in the dtype of the streams."""
        n, dtype = self.options.streams, H_btnd.dtype
        weights = torch.cat([self.read_weight, self.write_weight, self.mix_weight], dim=-2).to(dtype)
        projected = linear(normalize(H_btnd.flatten(-2), self.norm_eps, self.kernels), weights)
        read, write, mix = projected.split([n, n, n * n], dim=-1)
        read_gate, write_gate, mix_gate, read_n, write_n = (
            spread(p.to(dtype), 1) for p in (self.read_gate, self.write_gate, self.mix_gate, self.read_n, self.write_n)
        )
        read = read_gate * read + read_n
        write = write_gate * write + write_n
        mix = mix_gate.unsqueeze(-1) * mix.unflatten(-1, (n, n)) + spread(self.mix_nn.to(dtype), 2)
        return read.sigmoid(), sinkhorn(mix, self.options.iterations, self.kernels), 2 * write.sigmoid()


class MHCConnector(Connector):
    """Weights of all sublayers."""

    def __init__(self, shape: Shape, options: arch_options.MHC, norm_eps: float) -> None:
        super().__init__(shape, options, norm_eps)
        self.sublayers = nn.ModuleList(
            ConstrainedWeights(shape.width, options, norm_eps) for _ in range(2 * shape.depth)
        )

    def init_gain(self, matrix: str) -> float:
        return output_gain(matrix, self.options.streams, scaled=self.options.scale_outputs)

    def init_weights(self, draw: Draw, std: float) -> None:
        for i, weights in enumerate(self.sublayers):
            cast(ConstrainedWeights, weights).init_weights(i % self.options.streams)

    def start(self, embedding: Tensor) -> Stream:
        return HyperStream(self, embedding)


MHC = Architecture("mhc", MHCConnector)

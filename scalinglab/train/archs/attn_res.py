"""Attention residuals: each sublayer reads a softmax mix, over depth, of the embedding and earlier sublayer outputs.

With sources v_j, a static query w_i and a key gain g_i per sublayer,

    x_i = sum_j softmax_j( w_i . (g_i * norm(v_j)) ) v_j        y_i = F(norm(x_i))

There is no residual addition anywhere. Keys are normalised, values are not; logits have no 1 / sqrt(d) and are float32
or better. The first sublayer reads the embedding itself, and one more mix feeds the final norm. Queries start at zero,
so every mix is a mean, a positive multiple of the Pre-LN stream: the model equals Pre-LN at init up to the norms' eps.

Full: every output is a source. Block: finished blocks of `size` sublayers are summed, and the running sum of the
current block is one more source; size = 1 is Full, by the same code.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from scalinglab.arch_options import Options
from scalinglab.shapes import Shape
from scalinglab.train.archs.connector import Architecture, Connector, Stream
from scalinglab.train.layers import Draw, at_least_float32, full_precision, inverse_rms, linear, mix
from scalinglab.train.roles import tag


class DepthMixer(nn.Module):
    """Query and key gain of one reader."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The query is a sum over width without a partner that shrinks with it: its learning rate needs the 1 / width of
        # a matrix. It has no depth factor beyond the branch's.
        self.query_d = tag(nn.Parameter(torch.empty(width)), "matrix", "branch", width)
        self.key_gain_d = tag(nn.Parameter(torch.empty(width)), "vector", "branch", 1)

    def init_weights(self) -> None:
        """Uniform mix."""
        nn.init.zeros_(self.query_d)
        nn.init.ones_(self.key_gain_d)

    def weights(self, sources_btsd: Tensor, inverse_bts: Tensor) -> Tensor:
        """Softmax over sources [b, t, s]; `inverse_bts` holds 1 / rms of each source."""
        query_1d = (at_least_float32(self.query_d) * at_least_float32(self.key_gain_d)).unsqueeze(-2)
        logits = linear(sources_btsd, query_1d.to(sources_btsd.dtype)).squeeze(-1) * inverse_bts
        return logits.softmax(-1)


class AttnResConnector(Connector):
    """Mixers of sublayers 1 .. 2L - 1 and of the final norm."""

    def __init__(self, shape: Shape, options: Options, norm_eps: float, *, size: int = 1) -> None:
        super().__init__(shape, options, norm_eps)
        self.size = size
        self.mixers = nn.ModuleList(DepthMixer(shape.width) for _ in range(2 * shape.depth))

    def init_weights(self, draw: Draw, std: float) -> None:
        for mixer in self.mixers:
            cast(DepthMixer, mixer).init_weights()

    def start(self, embedding: Tensor) -> Stream:
        return AttnResStream(self, embedding)


class AttnResStream(Stream):
    """Sources: the embedding, sums of finished blocks, and the running sum last.

    On fused kernels they also stand in a shelf, so that a reader copies none of them.
    """

    def __init__(self, connector: AttnResConnector, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.connector = connector
        kernels = connector.kernels
        self.shelf = None if kernels is None else kernels.shelf(embedding, 2 * connector.depth + 1, connector.width)
        self.sources: list[Tensor] = []
        self.slots: list[int] = []  # of the sources in the shelf
        self.open_block = -1
        self._add(embedding)

    def read(self, i: int) -> Tensor:
        return self._mix(i) if i else self.sources[0]

    def write(self, i: int, y: Tensor) -> None:
        # A block's sum is a source while it runs and when it is finished, so closing it is merely not adding to it.
        block = i // self.connector.size
        if block == self.open_block:
            y = self.sources.pop() + y
            del self.slots[-1:]
        self.open_block = block
        self._add(y)

    def finish(self) -> Tensor:
        return self._mix(2 * self.connector.depth)

    def state(self, i: int) -> Tensor:
        return self.read(i)

    def lens(self, i: int) -> Tensor:
        return self.read(i)

    def restore(self, i: int, state: Tensor) -> None:
        raise NotImplementedError(
            "what a sublayer reads is a mix of earlier outputs, which the next one doesn't build on"
        )

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        source_of = [0] + [1 + j // self.connector.size for j in range(i)]  # outputs of one block share its weight
        weights_bts = self.mixing_weights(i) if i else at_least_float32(self.sources[0]).new_ones(1, 1, 1)
        return weights_bts[..., source_of], None

    def mixing_weights(self, i: int) -> Tensor:
        """Softmax weights [b, t, s] with which sublayer i (2L: the final norm) reads the sources, for probes."""
        weights, _ = self._weigh(i)
        return weights

    def _add(self, source: Tensor) -> None:
        self.sources.append(source)
        if self.shelf is not None:
            self.slots.append(self.shelf.put(source))

    def _weigh(self, i: int) -> tuple[Tensor, Tensor]:
        sources_btsd = at_least_float32(torch.stack(self.sources, dim=-2))
        inverse_bts = inverse_rms(sources_btsd, self.connector.norm_eps)
        with full_precision(sources_btsd):
            mixer = cast(DepthMixer, self.connector.mixers[i - 1])
            return mixer.weights(sources_btsd, inverse_bts), sources_btsd

    def _mix(self, i: int) -> Tensor:
        if self.shelf is not None:
            mixer = cast(DepthMixer, self.connector.mixers[i - 1])
            mixed: Tensor = self.shelf.read(self.slots, mixer.query_d * mixer.key_gain_d, self.connector.norm_eps)
            return mixed
        weights_bts, sources_btsd = self._weigh(i)
        with full_precision(sources_btsd):
            mixed = mix(weights_bts.unsqueeze(-2), sources_btsd).squeeze(-2)
        return mixed.to(self.sources[0].dtype)


def attn_res(shape: Shape, options: Options, norm_eps: float) -> Connector:
    """Full attention residuals."""
    return AttnResConnector(shape, options, norm_eps, size=1)


ATTN_RES = Architecture("attn_res", attn_res)

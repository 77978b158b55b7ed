"""The four operations by which a residual topology differs from another, with Pre-LN as the plain case.

A `Connector` owns the parameters of a topology, a `Stream` the state of one forward pass (so a model is re-entrant).
Sublayers are counted i = 0 .. 2L - 1, even attention and odd feed-forward. The model runs, for every topology,

    stream = connector.start(embedding)
    for i: y = branch_multiplier * stream.apply(i, branch, input_norm(stream.read(i))); stream.write(i, y)
    hidden = stream.finish()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scalinglab.arch_options import Options
from scalinglab.shapes import Shape
from scalinglab.train.layers import DepthCache, Draw, Sublayer


class Branch(Protocol):
    """A sublayer as the stream sees it; a feed-forward takes no depth cache."""

    def __call__(self, x: Tensor, depth: DepthCache | None = None) -> Tensor: ...


class Stream:
    """The plain residual stream h + y."""

    factors_travel = False  # whether fixed factors of `apply` go with a block's weights when probes exchange blocks

    def __init__(self, embedding: Tensor) -> None:
        self.h = embedding

    def read(self, i: int) -> Tensor:
        """Input of sublayer i before its norm; reading twice changes nothing."""
        return self.h

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        """Run sublayer i on its normalised input."""
        return branch(x)

    def write(self, i: int, y: Tensor) -> None:
        """Take in the output of sublayer i."""
        self.h = self.h + y

    def skip(self, i: int) -> None:
        """Pass sublayer i by: the stream stays as it is."""

    def finish(self) -> Tensor:
        """State before the final norm."""
        return self.h

    def state(self, i: int) -> Tensor:
        """Depth state before sublayer i (2L: the last), as depth probes define it for this topology."""
        return self.h

    def lens(self, i: int) -> Tensor:
        """The depth state before sublayer i as the readout would see it, [.., d]."""
        return self.finish()

    def restore(self, i: int, state: Tensor) -> None:
        """Put a depth state in place of `state(i)`, for probes that differentiate by it.

        A topology whose state isn't a function of it alone raises NotImplementedError with the reason.
        """
        self.h = state

    def unfold(self, i: int, memory: Any) -> tuple[Tensor, Any]:
        """Coefficients [.., 1 + i] of the embedding and of outputs 0 .. i - 1 in `read(i)` (2L: in `finish`).

        Called in order before each sublayer. `memory` is what the previous call returned beside them, None at first. A
        topology with norms on the stream has no such coefficients and raises NotImplementedError with the reason.
        """
        return torch.ones(1 + i, dtype=self.h.dtype, device=self.h.device), None


class Connector(Sublayer):
    """Pre-LN: no parameters, a norm in front of each sublayer."""

    def __init__(self, shape: Shape, options: Options, norm_eps: float) -> None:
        super().__init__()
        self.depth, self.width, self.options, self.norm_eps = shape.depth, shape.width, options, norm_eps

    def start(self, embedding: Tensor) -> Stream:
        """State of a new forward pass."""
        return Stream(embedding)

    def has_input_norm(self, i: int) -> bool:
        """Whether the model puts a norm in front of sublayer i."""
        return True

    def owner(self, block: int) -> int:
        """Which distinct block serves as `block`: itself unless weights are shared."""
        return block

    def travelling(self, block: int) -> dict[str, nn.Parameter]:
        """Own parameters that go along when probes exchange two blocks, under names that match between blocks.

        They are the two entries of the block in every list with one entry per sublayer; what belongs to a place stays.
        """
        lists = [(n, c) for n, c in self.named_children() if isinstance(c, (nn.ModuleList, nn.ParameterList))]
        return {
            f"{name}.{inside}.{rest}": param
            for name, entries in lists
            if len(entries) == 2 * self.depth
            for inside in range(2)
            for rest, param in named(entries[2 * block + inside])
        }

    def init_gain(self, matrix: str) -> float:
        """Factor on the initial std of query, key, value, output, gate, up or down."""
        return 1.0

    def init_weights(self, draw: Draw, std: float) -> None:
        """Initialise the connector's own parameters; gains of norms are already one.

        It runs after the backbone has drawn, so that one seed gives the same backbone to every topology.
        """


def named(entry: nn.Module | nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a list's entry with their names."""
    return [("", entry)] if isinstance(entry, nn.Parameter) else list(entry.named_parameters())


@dataclass(frozen=True)
class Architecture:
    """An entry of the registry: how to build the connector of a topology.

    Parameters
    ----------
    name : str
        Key in `ARCHS`, `arch_options.OPTIONS` and the `architecture` column of a run table.
    build : callable
        (shape, options, norm_eps) -> Connector.
    """

    name: str
    build: Callable[[Shape, Options, float], Connector]

"""Standing between a model and its stream: the one way in which probes look at a forward pass and change it.

A model can be probed if it runs its sublayers over a stream that its connector starts (`Probed`). For one pass the
connector hands out a `Tap`, which passes every call on to the real stream. So the model's own loop stays untouched, and
any nn.Module that has such a loop can be probed, whatever its sublayers are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from scalinglab.errors import ConfigError
from scalinglab.train.archs.connector import Branch, Stream
from scalinglab.train.layers import at_least_float32

Arrive: TypeAlias = Callable[[int, Stream], None]
Wrote: TypeAlias = Callable[[int, Tensor, Tensor], None]


class Starts(Protocol):
    """What probes need of a connector."""

    def start(self, embedding: Tensor) -> Stream:
        """State of a new forward pass. Derive it from `Stream`, which has defaults for all that probes ask."""


class Probed(Protocol):
    """What probes need of a model: an nn.Module with a `connector`, `hidden` and `logits`.

    `hidden` starts a stream with `connector.start` and, for sublayers i = 0 .. 2L - 1 in order (block l is sublayers 2l
    and 2l + 1), calls `stream.read(i)`, `stream.apply(i, branch, x)`, `stream.write(i, y)`, and `stream.finish()` at the
    end. Two more attributes are used where they exist: `blocks`, an nn.ModuleList with one module per block (exchange,
    gradients), and `connector.travelling(block)`.
    """

    connector: Any

    def hidden(self, tokens_bt: Tensor) -> Tensor:
        """State [b, t, d] before the final norm."""

    def logits(self, hidden_btd: Tensor) -> Tensor:
        """Final norm and readout [b, t, v] of a state."""


def forward(
    model: Probed,
    tokens_bt: Tensor,
    *,
    skip: Collection[int] = (),
    arrive: Arrive | None = None,
    wrote: Wrote | None = None,
    replace: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    weights_of: Mapping[int, int] | None = None,
) -> Tensor:
    """`model.hidden` with a tap in the stream.

    Parameters
    ----------
    model : Probed
    tokens_bt : Tensor
    skip : collection of int
        Sublayers to leave out: their branch doesn't run, the stream's `skip` says what stays.
    arrive : callable, optional
        arrive(i, stream) before sublayer i is read or skipped, and once more with i = 2L before `finish`.
    wrote : callable, optional
        wrote(i, x, y) for each sublayer that runs: its input before the norm, and its output as it is written.
    replace : mapping, optional
        Sublayer -> function of its input (before the norm) that gives what is written in place of the branch's output.
    weights_of : mapping, optional
        Sublayer -> the sublayer whose factors its weights bring along (exchanged blocks).

    Returns
    -------
    Tensor
        State [b, t, d] before the final norm.
    """
    connector = model.connector
    start, own = connector.start, vars(connector).get("start")

    def tapped(embedding: Tensor) -> Tap:
        return Tap(start(embedding), frozenset(skip), arrive, wrote, replace or {}, weights_of or {})

    connector.start = tapped
    try:
        return model.hidden(tokens_bt)
    finally:
        del connector.start  # the class's own method shows again
        if own is not None:
            connector.start = own


class Tap:
    """A stream that reports and intervenes; whatever it doesn't define is the real stream's."""

    def __init__(
        self,
        stream: Stream,
        skip: frozenset[int],
        arrive: Arrive | None,
        wrote: Wrote | None,
        replace: Mapping[int, Callable[[Tensor], Tensor]],
        weights_of: Mapping[int, int],
    ) -> None:
        self.stream, self._skip, self._arrive, self._wrote = stream, skip, arrive, wrote
        self._replace, self._weights_of = replace, weights_of
        self._x: Tensor | None = None
        self._passed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def read(self, i: int) -> Tensor:
        self._come_to(i)
        if i not in self._skip or self._x is None:
            self._x = self.stream.read(i)
        return self._x  # of a skipped sublayer nothing is used: any tensor of the right shape will do

    def apply(self, i: int, branch: Branch, x: Tensor) -> Tensor:
        if i in self._skip or i in self._replace:
            return x
        return self.stream.apply(self._weights_of.get(i, i), branch, x)

    def write(self, i: int, y: Tensor) -> None:
        x = self._x
        if x is None:
            raise ConfigError(f"the model writes sublayer {i} before it reads it; read, apply and write in order")
        if i in self._skip:
            self.stream.skip(i)
            return
        if i in self._replace:
            y = self._replace[i](x)
        self.stream.write(i, y)
        if self._wrote is not None:
            self._wrote(i, x, y)

    def skip(self, i: int) -> None:
        self._come_to(i)
        self.stream.skip(i)

    def finish(self) -> Tensor:
        self._come_to(self._passed)
        return self.stream.finish()

    def _come_to(self, i: int) -> None:
        if i != self._passed:
            raise ConfigError(
                f"the model came to sublayer {i} where {self._passed} is next; count 0 .. 2L - 1 in order"
            )
        if self._arrive is not None:
            self._arrive(i, self.stream)
        self._passed = i + 1


def blocks_of(model: Probed, tokens_bt: Tensor) -> int:
    """Number of blocks L, found by running one sequence.

    Raises
    ------
    ConfigError
        The model has no connector, or an odd number of sublayers.
    """
    if not callable(getattr(getattr(model, "connector", None), "start", None)):
        raise ConfigError(
            f"{type(model).__name__} has no connector.start(embedding): probes need the connector interface (see docs/probes.md)"
        )
    seen: list[int] = []
    with torch.no_grad():
        forward(model, tokens_bt[:1], arrive=lambda i, _: seen.append(i))
    sublayers = len(seen) - 1
    if sublayers < 2 or sublayers % 2:
        raise ConfigError(
            f"the model runs {sublayers} sublayers; blocks are two each, so the number must be even and 2 or more"
        )
    return sublayers // 2


def states(model: Probed, tokens_bt: Tensor, *, skip: Collection[int] = ()) -> tuple[list[Tensor], Tensor]:
    """Depth states z_0 .. z_L [b, t, D] in float32 or better, and the state before the final norm.

    D is the width, or n times the width for n streams. z_l is `stream.state(2l)`.
    """
    found: list[Tensor] = []

    def arrive(i: int, stream: Stream) -> None:
        if i % 2 == 0:
            found.append(at_least_float32(stream.state(i)))

    hidden = forward(model, tokens_bt, skip=skip, arrive=arrive)
    return found, hidden


def both(blocks: Collection[int]) -> frozenset[int]:
    """The sublayers of these blocks."""
    return frozenset(i for block in blocks for i in (2 * block, 2 * block + 1))


def sequence_losses(model: Probed, hidden_btd: Tensor, targets_bt: Tensor) -> Tensor:
    """Cross-entropy of each sequence [b], nats per token, float64."""
    return token_losses(model.logits(hidden_btd), targets_bt).double().mean(-1)


def token_losses(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Cross-entropy [b, t] in float32 or better, nats."""
    logits_btv = at_least_float32(logits_btv)
    flat = functional.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), reduction="none")
    return flat.view(targets_bt.shape)


def parts(module: nn.Module | None) -> dict[str, nn.Parameter]:
    """Parameters of a module by name; none of None."""
    return {} if module is None else dict(module.named_parameters())

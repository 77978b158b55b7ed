"""Two blocks exchanged: what moves is learned, what stays is the place.

Moving: parameters of the two entries of `model.blocks` with the same name and shape, and what the connector says
(`travelling`): norms and stream weights of the block's sublayers, the mixers that read behind a block (attention
residuals: inside it and at its right boundary), LayerScale's gammas. The factor of LNS goes along. Staying: the constants
of KEEL and its first sublayer, DenseFormer's averages, norms that only one of the two blocks has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.probes.intervals import Floats
from scalinglab.train.probes.setup import Setup, late, pairs
from scalinglab.train.probes.tap import Probed, forward, sequence_losses


def permutation(setup: Setup) -> list[Measure]:
    """Permutation score |loss after the exchange - loss| / loss of pairs of blocks: L(L - 1)/2 passes.

    Raises
    ------
    NotImplementedError
        The model has no `blocks`, or shares them.
    """
    check_blocks(setup)
    first, second = pairs(setup.depth)
    near = second - first <= (setup.max_distance or setup.depth)
    first, second = first[near], second[near]
    travels = _factors_travel(setup)
    losses = setup.empty(1 + len(first))
    for rows, tokens_bt, targets_bt in setup.chunks():
        losses[rows, 0] = sequence_losses(setup.model, forward(setup.model, tokens_bt), targets_bt).cpu()
        setup.tick()
        for k, (i, j) in enumerate(zip(first.tolist(), second.tolist(), strict=True), 1):
            with exchanged(setup.model, i, j):
                hidden = forward(setup.model, tokens_bt, weights_of=_places(i, j) if travels else None)
            setup.tick()
            losses[rows, k] = sequence_losses(setup.model, hidden, targets_bt).cpu()
    r, is_late, threshold = setup.resamples, late(first, setup.depth), setup.thresholds.permutation

    def score(m: Floats) -> Floats:
        return np.abs(m[:, 1:] - m[:, :1]) / m[:, :1]

    def share(m: Floats, which: np.ndarray) -> Floats:
        hit = score(m)[:, which] > threshold
        return hit.mean(1, keepdims=True) if hit.shape[1] else np.full((len(m), 1), np.nan)

    return [
        r.measure("permutation", "permutation", "pair", "|loss with blocks at and other exchanged - loss| / loss", losses,
                  at=first, other=second, function=score),
        r.measure("permutation", "permutation_fraction", "scalar", f"share of pairs with a score above {threshold:g}", losses,
                  function=lambda m: share(m, np.ones_like(is_late))),
        r.measure("permutation", "permutation_late_fraction", "scalar",
                  f"share of pairs in the last three quarters with a score above {threshold:g}", losses,
                  function=lambda m: share(m, is_late)),
    ]  # fmt: skip


def check_blocks(setup: Setup) -> list[nn.Module]:
    """The model's blocks.

    Raises
    ------
    NotImplementedError
        There are none, or some serve several times.
    """
    blocks = getattr(setup.model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise NotImplementedError("the model has no `blocks` (an nn.ModuleList with one module per block)")
    if len(blocks) != setup.depth:
        raise NotImplementedError(f"{len(blocks)} distinct blocks serve as {setup.depth}: weights are shared")
    return list(blocks)


@contextmanager
def exchanged(model: Probed, i: int, j: int) -> Iterator[None]:
    """The learned weights of blocks i and j in each other's place; the same bits are put back at the end."""
    swaps = _matching(model, i, j)
    _swap(swaps)
    try:
        yield
    finally:
        _swap(swaps)


def _matching(model: Probed, i: int, j: int) -> list[tuple[nn.Parameter, nn.Parameter]]:
    blocks = model.blocks  # type: ignore[attr-defined]
    sides = [dict(blocks[k].named_parameters(prefix="block")) for k in (i, j)]
    travelling = getattr(model.connector, "travelling", None)
    if travelling is not None:
        sides = [side | travelling(k) for side, k in zip(sides, (i, j), strict=True)]
    one, two = sides
    return [(p, two[name]) for name, p in one.items() if name in two and two[name].shape == p.shape]


@torch.no_grad()
def _swap(swaps: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    for a, b in swaps:
        held = a.detach().clone()
        a.copy_(b)
        b.copy_(held)


def _places(i: int, j: int) -> dict[int, int]:
    return {2 * a + inside: 2 * b + inside for a, b in ((i, j), (j, i)) for inside in (0, 1)}


def _factors_travel(setup: Setup) -> bool:
    found: list[bool] = []

    def arrive(i: int, stream: Stream) -> None:
        found.append(bool(getattr(stream, "factors_travel", False)))

    forward(setup.model, setup.tokens_bt[:1], arrive=arrive)
    return any(found)

"""Usefulness: how much worse is the best affine map in place of a block?

What a block writes, the outputs of both its sublayers, is replaced by least-squares affine maps of what it reads (the
input of its attention before the norm), token by token. On a plain residual stream this is the best affine map from z_l
to z_(l+1), since the sum of two least-squares fits is the fit of the sum; so defined it also applies where outputs are not
added to what is read (streams, attention residuals, post norms). Maps are fitted on one half of the sequences and judged
on the other, both ways round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.layers import at_least_float32
from scalinglab.train.probes.setup import Setup
from scalinglab.train.probes.tap import forward, sequence_losses

_PER_INPUT = 2  # tokens to fit on, per input of the map


def usefulness(setup: Setup) -> list[Measure]:
    """Loss with block l replaced by its affine map, over the loss: two passes and one per block.

    Raises
    ------
    NotImplementedError
        Too few tokens to fit the maps.
    """
    maps = _fit(setup)
    base, replaced = setup.empty(1), setup.empty(setup.depth)
    for rows, tokens_bt, targets_bt in setup.chunks():
        base[rows, 0] = sequence_losses(setup.model, forward(setup.model, tokens_bt), targets_bt).cpu()
        setup.tick()
        parity_b = torch.arange(rows.start, rows.stop, device=tokens_bt.device) % 2
        for block, weights in enumerate(maps):
            hidden = forward(setup.model, tokens_bt, replace=_replacement(block, weights, parity_b))
            setup.tick()
            replaced[rows, block] = sequence_losses(setup.model, hidden, targets_bt).cpu()
    both, threshold = np.concatenate([base, replaced], axis=1), setup.thresholds.affine
    what = (
        "loss with block l replaced by its least-squares affine map (fitted on the other half of the sequences) / loss"
    )
    r = setup.resamples
    return [
        r.measure("usefulness", "affine_ratio", "block", what, both, function=lambda m: m[:, 1:] / m[:, :1]),
        r.measure("usefulness", "useful_fraction", "scalar", f"share of blocks with an affine ratio above {threshold:g}", both,
                  function=lambda m: (m[:, 1:] / m[:, :1] > threshold).mean(1, keepdims=True)),
    ]  # fmt: skip


def _fit(setup: Setup) -> list[Tensor]:
    """Per block the maps [half, 1 + d, 2 d]; half p is fitted on the sequences of the other parity."""
    products: dict[int, list[Tensor]] = {}
    for rows, tokens_bt, _ in setup.chunks():
        parity_b = torch.arange(rows.start, rows.stop, device=tokens_bt.device) % 2
        forward(setup.model, tokens_bt, wrote=_gather(products, parity_b))
        setup.tick()
    maps = []
    for block in range(setup.depth):
        gram, cross = products[block]
        inputs = gram.shape[-1]
        least = int(gram[:, 0, 0].min())  # the constant's square: the number of tokens
        if least < _PER_INPUT * inputs:
            raise NotImplementedError(
                f"affine maps of {inputs} inputs need {_PER_INPUT * inputs} tokens in each half of the sequences, not {least}"
            )
        # On the CPU, where the minimum-norm solver is: inputs may be collinear.
        fitted = torch.linalg.lstsq(gram.cpu(), cross.cpu(), driver="gelsd").solution
        maps.append(fitted.flip(0).to(gram.device))
    return maps


def _gather(products: dict[int, list[Tensor]], parity_b: Tensor) -> Callable[[int, Tensor, Tensor], None]:
    held: dict[str, Tensor] = {}

    def wrote(i: int, x_btd: Tensor, y_btd: Tensor) -> None:
        if i % 2 == 0:
            held["x"] = _with_one(x_btd)
            held["y"] = y_btd
            return
        outputs = torch.cat([held["y"], y_btd], dim=-1).double()
        for p in (0, 1):
            x, y = (part[parity_b == p].flatten(0, 1) for part in (held["x"], outputs))
            if i // 2 not in products:
                sizes = ((2, x.shape[-1], x.shape[-1]), (2, x.shape[-1], y.shape[-1]))
                products[i // 2] = [x.new_zeros(size) for size in sizes]
            products[i // 2][0][p] += x.mT @ x
            products[i // 2][1][p] += x.mT @ y

    return wrote


def _replacement(block: int, maps: Tensor, parity_b: Tensor) -> dict[int, Callable[[Tensor], Tensor]]:
    predicted: list[Tensor] = []

    def attention(x_btd: Tensor) -> Tensor:
        both_bte = _with_one(x_btd) @ maps[parity_b]
        first, second = both_bte.to(at_least_float32(x_btd).dtype).to(x_btd.dtype).chunk(2, dim=-1)
        predicted.append(second)
        return first

    return {2 * block: attention, 2 * block + 1: lambda x_btd: predicted[0]}


def _with_one(x_btd: Tensor) -> Tensor:
    x_btd = x_btd.double()
    return torch.cat([torch.ones_like(x_btd[..., :1]), x_btd], dim=-1)

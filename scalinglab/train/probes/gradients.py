"""Gradients over depth: of the blocks' weights, and of the states.

KEEL's first block has a gradient hundreds of times that of the others at init. That is its design, not a fault.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.probes.exchange import check_blocks
from scalinglab.train.probes.intervals import measured
from scalinglab.train.probes.setup import Setup
from scalinglab.train.probes.tap import forward, token_losses


def gradients(setup: Setup) -> list[Measure]:
    """Norm of the gradient of the mean loss by each block's weights, its first-to-last and max-to-min ratios.

    One forward and backward pass. No interval: these are norms of one mean, not means over sequences.

    Raises
    ------
    NotImplementedError
        The model has no `blocks`, or shares them.
    """
    blocks = check_blocks(setup)
    params = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
    total = [[torch.zeros_like(p, dtype=torch.float64) for p in group] for group in params]
    for _, tokens_bt, targets_bt in setup.chunks():
        with torch.enable_grad():
            losses = token_losses(setup.model.logits(forward(setup.model, tokens_bt)), targets_bt)
            loss = losses.sum() / setup.tokens_bt.numel()
        setup.tick()
        flat = [p for group in params for p in group]
        found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        for group in total:
            for held in group:
                gradient = next(found)
                if gradient is not None:
                    held += gradient
    norms = np.array([float(torch.stack([g.square().sum() for g in group]).sum().sqrt()) for group in total])
    least = norms.min()
    return [
        measured("gradients", "block_gradient", "block", "norm of the gradient of the mean loss by the block's weights", norms),
        measured("gradients", "gradient_ratio", "scalar", "first block's gradient norm over the last's",
                 np.array([norms[0] / norms[-1] if norms[-1] > 0 else np.inf])),
        measured("gradients", "gradient_spread", "scalar", "largest of the blocks' gradient norms over the smallest",
                 np.array([norms.max() / least if least > 0 else np.inf])),
    ]  # fmt: skip


def backward(setup: Setup) -> list[Measure]:
    """RMS of the gradient of the summed token losses by each state z_l, from one forward and backward pass.

    For attention residuals, whose states are mixes, it is the gradient by the mix that is read.
    """
    square = setup.empty(setup.depth + 1)
    for rows, tokens_bt, targets_bt in setup.chunks():
        found: dict[int, Tensor] = {}

        def arrive(i: int, stream: Stream, found: dict[int, Tensor] = found) -> None:
            _hold(i, stream, found)

        def wrote(i: int, x: Tensor, y: Tensor, found: dict[int, Tensor] = found) -> None:
            if i % 2 == 0:
                found.setdefault(i, x)

        with torch.enable_grad():
            hidden = forward(setup.model, tokens_bt, arrive=arrive, wrote=wrote)
            found.setdefault(2 * setup.depth, hidden)
            loss = token_losses(setup.model.logits(hidden), targets_bt).sum()
        setup.tick()
        wanted = [found[2 * l] for l in range(setup.depth + 1)]
        pulled = torch.autograd.grad(loss, wanted, allow_unused=True)
        for l, gradient in enumerate(pulled):
            square[rows, l] = 0.0 if gradient is None else gradient.double().square().mean((-2, -1)).cpu()
    what = "rms over tokens and entries of the gradient of the summed token losses by z_l"
    return [setup.resamples.measure("backward", "state_gradient", "state", what, square, function=np.sqrt)]


def _hold(i: int, stream: Stream, found: dict[int, Tensor]) -> None:
    """Put the state itself into the graph, where the topology can take one."""
    if i % 2:
        return
    state = stream.state(i)
    if not state.requires_grad:
        state = state.detach().requires_grad_()
    try:
        stream.restore(i, state)
    except NotImplementedError:
        return
    found[i] = state

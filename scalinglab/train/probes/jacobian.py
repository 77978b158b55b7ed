"""How far the Jacobian of a block is from the identity, averaged over tokens, by Hutchinson's estimator.

The averaged Jacobian of block l is J = (1/N) sum over tokens t, t' of dz_(l+1, t) / dz_(l, t'), effects on later tokens
included: what d backward passes of the token mean give (DepthBench). It is |mean J - I|, not the mean of |J - I|. What a
stream holds beside the state (a depth cache, earlier block outputs) is held fixed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.probes.intervals import measured
from scalinglab.train.probes.setup import Setup
from scalinglab.train.probes.tap import Probed, forward


def jacobian(setup: Setup) -> list[Measure]:
    """Deviation |J_l - I|_F / sqrt(D) of each block: one forward pass and `directions` backward passes through each block.

    With signs w, E |(J - I)^T w|^2 = |J - I|_F^2. The interval is the normal one over directions; the sequences are given.

    Raises
    ------
    NotImplementedError
        The stream has no state that the next block builds on.
    """
    generator = torch.Generator().manual_seed(setup.seed)
    signs: Tensor | None = None
    total: list[Tensor] = []
    for _, tokens_bt, _ in setup.chunks():
        if signs is None:
            size = _width(setup.model, tokens_bt[:1])
            signs = torch.randint(0, 2, (setup.directions, size), generator=generator).double() * 2 - 1
        products = transposed_products(setup.model, tokens_bt, signs)
        setup.tick()
        total = [a + b for a, b in zip(total, products, strict=True)] if total else products
    assert signs is not None
    count, w_kd = setup.tokens_bt.numel(), signs
    squares = np.array([((p.cpu() / count - w_kd).square().sum(-1) / w_kd.shape[1]).numpy() for p in total])  # [l, k]
    mean = squares.mean(1)
    ends: tuple[np.ndarray, np.ndarray] = (np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    if setup.directions > 1:
        from scipy.special import ndtri

        half = ndtri(0.5 + setup.resamples.level / 2) * squares.std(1, ddof=1) / np.sqrt(setup.directions)
        ends = np.sqrt(np.maximum(mean - half, 0)), np.sqrt(mean + half)
    what = "|J - I|_F / sqrt(D), J the Jacobian of z_l -> z_(l+1) averaged over tokens first, effects on later tokens included"
    how = f"{100 * setup.resamples.level:g} % normal interval over {setup.directions} random sign vectors"
    interval = how if setup.directions > 1 else ""
    return [
        measured(
            "jacobian", "jacobian_deviation", "block", what, np.sqrt(mean), low=ends[0], high=ends[1], interval=interval
        )
    ]


def transposed_products(model: Probed, tokens_bt: Tensor, w_kd: Tensor) -> list[Tensor]:
    """Sum over tokens of J_l^T w [k, D] in float64, for each block l.

    Parameters
    ----------
    model : Probed
    tokens_bt : Tensor
    w_kd : Tensor
        Vectors in the space of states. The D unit vectors give the Jacobian itself.

    Raises
    ------
    NotImplementedError
        See `Stream.restore`.
    """
    found: list[Tensor] = []
    start: list[Tensor] = []

    def arrive(i: int, stream: Stream) -> None:
        if i % 2:
            return
        z_btd = stream.state(i)
        if start:
            found.append(_pull(start.pop(), z_btd, w_kd))
        leaf = z_btd.detach().requires_grad_()
        stream.restore(i, leaf)
        start.append(leaf)

    with torch.enable_grad():
        forward(model, tokens_bt, arrive=arrive)
    return found


def _pull(leaf_btd: Tensor, out_btd: Tensor, w_kd: Tensor) -> Tensor:
    flat = out_btd.reshape(-1, out_btd.shape[-1])
    rows = []
    for w_d in w_kd.to(out_btd):
        weights = w_d.expand(flat.shape).view(out_btd.shape)
        (pulled,) = torch.autograd.grad(out_btd, leaf_btd, weights, retain_graph=True)
        rows.append(pulled.double().flatten(0, -2).sum(0))
    return torch.stack(rows)


def _width(model: Probed, tokens_bt: Tensor) -> int:
    sizes: list[int] = []

    def arrive(i: int, stream: Stream) -> None:
        if i == 0:
            sizes.append(stream.state(0).shape[-1])

    with torch.no_grad():
        forward(model, tokens_bt, arrive=arrive)
    return sizes[0]

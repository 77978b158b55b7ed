"""Depth states of one pass: growth, block influence, angular distance, rank.

Axes: b sequence, t position, l state, d its D entries (n times the width for n streams).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.layers import at_least_float32
from scalinglab.train.probes.intervals import Floats, measured
from scalinglab.train.probes.setup import Setup, pairs
from scalinglab.train.probes.tap import forward, states

_TINY = 1e-30


def growth(setup: Setup) -> list[Measure]:
    """RMS of the states, its power law in depth, block influence and angular distances of all pairs of states.

    Angles are taken from chords: 1 - cos = |u - v|^2 / 2 for unit vectors loses no digits for states that hardly differ.
    Sources: ShortGPT (arXiv 2403.03853) for the influence, Gromov et al. (arXiv 2403.17887) for the distance.
    """
    L = setup.depth
    square, influence, angle = setup.empty(L + 1), setup.empty(L), setup.empty(L * (L + 1) // 2)
    first, second = pairs(L + 1)
    for rows, tokens_bt, _ in setup.chunks():
        found, _ = states(setup.model, tokens_bt)
        setup.tick()
        square[rows] = torch.stack([z.square().mean((-2, -1)) for z in found], dim=-1).double().cpu()
        unit = [z / z.norm(dim=-1, keepdim=True).clamp_min(_TINY) for z in found]
        for k, (a, b) in enumerate(zip(first, second, strict=True)):
            chord_bt = (unit[a] - unit[b]).norm(dim=-1)
            angle[rows, k] = (2 * (chord_bt / 2).clamp_max(1).asin() / np.pi).double().mean(-1).cpu()
            if b == a + 1:
                influence[rows, a] = (chord_bt.square() / 2).double().mean(-1).cpu()
    r, tau = setup.resamples, setup.thresholds.influence
    return [
        r.measure("growth", "rms", "state", "sqrt of the mean square of z_l over tokens and entries", square, function=np.sqrt),
        r.measure("growth", "rms_slope", "scalar", "least-squares slope of log rms(z_l)^2 on log l, l = 1 .. L", square,
                  function=_slope),
        r.measure("growth", "rms_ratio", "scalar", "rms(z_L) / rms(z_0)", square,
                  function=lambda m: np.sqrt(m[:, -1:] / m[:, :1])),
        r.measure("growth", "block_influence", "block", "mean over tokens of 1 - cos(z_l, z_(l+1))", influence),
        r.measure("growth", "influential_blocks", "scalar", f"effective depth (c): blocks with influence above {tau:g}",
                  influence, function=lambda m: (m > tau).sum(1, keepdims=True).astype(float)),
        r.measure("growth", "angular_distance", "pair",
                  "mean over all tokens of arccos cos(z_at, z_other) / pi; at, other are states", angle, at=first, other=second),
    ]  # fmt: skip


def _slope(square_rl: Floats) -> Floats:
    x = np.log(np.arange(1, square_rl.shape[1]))
    if len(x) < 2:
        return np.full((len(square_rl), 1), np.nan)
    x = x - x.mean()
    y = np.log(np.maximum(square_rl[:, 1:], _TINY))
    return (y @ x / (x @ x))[:, None]


def rank(setup: Setup) -> list[Measure]:
    """Ranks of the matrix tokens x entries of each state (not centred), and of the transport over all streams.

    Singular values s, p = s^2 / sum s^2: stable rank sum s^2 / max s^2, effective rank exp(-sum p log p), nuclear rank
    sum s / sqrt(sum s^2). For streams (hyper-connections) also the effective rank of the product of all mixing matrices,
    per token, then averaged.
    """
    L, wanted = setup.depth, _spaced(setup)
    kept: list[list[Tensor]] = [[] for _ in range(L + 1)]
    transport, offset = setup.empty(), 0
    for rows, tokens_bt, _ in setup.chunks():
        size = tokens_bt.numel()
        here = torch.as_tensor(wanted[(wanted >= offset) & (wanted < offset + size)] - offset, device=tokens_bt.device)
        offset += size
        product: list[Tensor] = []

        def arrive(i: int, stream: Stream, here: Tensor = here, product: list[Tensor] = product) -> None:
            if i % 2 == 0:
                kept[i // 2].append(at_least_float32(stream.state(i)).flatten(0, 1)[here])
            weigh = getattr(stream, "weigh", None)
            if weigh is not None and i < 2 * L:
                mix = weigh(i)[1]
                product[:] = [mix @ product[0] if product else mix]

        forward(setup.model, tokens_bt, arrive=arrive)
        setup.tick()
        if product:
            per_token = torch.as_tensor(_effective(torch.linalg.svdvals(product[0])))
            transport[rows] = per_token.double().expand(tokens_bt.shape).mean(-1).cpu()
    values = [torch.linalg.svdvals(torch.cat(parts).double()).cpu() for parts in kept]
    how = f"of the {len(wanted)} tokens x entries matrix of z_l, not centred"
    made = [
        measured("rank", "stable_rank", "state", f"sum s^2 / max s^2 {how}", np.array([_stable(s) for s in values])),
        measured("rank", "effective_rank", "state", f"exp entropy of s^2 / sum s^2 {how}",
                 np.array([float(_effective(s)) for s in values])),
        measured("rank", "nuclear_rank", "state", f"sum s / sqrt(sum s^2) {how}",
                 np.array([float(s.sum() / s.square().sum().sqrt().clamp_min(_TINY)) for s in values])),
    ]  # fmt: skip
    if np.isfinite(transport).all():
        made.append(
            setup.resamples.measure(
                "rank",
                "transport_rank",
                "scalar",
                "effective rank of the product of the mixing matrices of all sublayers, mean over tokens",
                transport,
            )
        )
    return made


def _spaced(setup: Setup) -> np.ndarray:
    total = setup.tokens_bt.numel()
    return np.unique(np.linspace(0, total - 1, min(total, setup.rank_tokens)).round().astype(np.int64))


def _stable(s: Tensor) -> float:
    return float(s.square().sum() / s.max().square().clamp_min(_TINY))


def _effective(s: Tensor) -> Tensor:
    p = s.square() / s.square().sum(-1, keepdim=True).clamp_min(_TINY)
    return torch.special.entr(p).sum(-1).exp()

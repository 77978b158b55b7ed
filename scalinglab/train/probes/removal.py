"""Blocks left out: loss of removal, effective depth, causal and depth scores, the pruning curve.

To remove a block is to pass both its sublayers by (`Stream.skip`). The stream stays as it is: identity on a residual
stream and on hyper-connection streams, no slot in a depth cache, no source for attention residuals, whose later mixes
are softmaxes over the sources that are left. In front of the first post norm (DeepNorm, KEEL) an embedding then stays
without its norm, so block 0 of these shows the scale of the embedding as well.

Axes: b sequence, t position, s skipped block, l later block.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.layers import at_least_float32
from scalinglab.train.probes.intervals import Floats, Function
from scalinglab.train.probes.setup import Setup, late, pairs
from scalinglab.train.probes.states import growth
from scalinglab.train.probes.tap import both, forward, sequence_losses, states, token_losses

_CLAMP = 1e-6  # least norm of an update in a ratio, as Csordas et al. have it


def removal(setup: Setup) -> list[Measure]:
    """Remove each block in turn: the loss, and what later blocks do differently.

    Causal score C(s, l) of a pair s < l, with updates u_l = z_(l+1) - z_l: relative change of u_l when s is skipped.
    Three versions: mean over tokens of |du| / |u| (DepthBench's README); mean of |du| over mean of |u| (an earlier
    revision of it); and the largest ratio over positions but the first (Csordas et al., arXiv 2505.13898).
    """
    L = setup.depth
    count = L * (L - 1) // 2
    base, without = setup.empty(1), setup.empty(L)
    ratio, change, size, most = (setup.empty(count) for _ in range(4))
    output_mean, output_max = setup.empty(L), setup.empty(L)
    for rows, tokens_bt, targets_bt in setup.chunks():
        z, hidden = states(setup.model, tokens_bt)
        setup.tick()
        u = [after - before for before, after in pairwise(z)]
        norms = [x.norm(dim=-1) for x in u]
        logits = at_least_float32(setup.model.logits(hidden))
        p = logits.softmax(-1)
        base[rows, 0] = _means(token_losses(logits, targets_bt))
        k = 0
        for s in range(L):
            z_s, hidden = states(setup.model, tokens_bt, skip=both([s]))
            setup.tick()
            logits = at_least_float32(setup.model.logits(hidden))
            without[rows, s] = _means(token_losses(logits, targets_bt))
            effect_bt = (logits.softmax(-1) - p).norm(dim=-1)
            output_mean[rows, s], output_max[rows, s] = _means(effect_bt), _most(effect_bt)
            for l in range(s + 1, L):
                du_bt = (z_s[l + 1] - z_s[l] - u[l]).norm(dim=-1)
                ratio_bt = du_bt / norms[l].clamp_min(_CLAMP)
                ratio[rows, k], most[rows, k] = _means(ratio_bt), _most(ratio_bt)
                change[rows, k], size[rows, k] = _means(du_bt), _means(norms[l])
                k += 1
    return [
        *_losses(setup, base, without),
        *_causal(setup, ratio, change, size, most),
        *_output(setup, output_mean, output_max),
    ]


def _losses(setup: Setup, base: Floats, without: Floats) -> list[Measure]:
    L, r, tau = setup.depth, setup.resamples, setup.thresholds.removal
    delta = without - base
    share = "q_l = positive part of the removal loss over its sum"

    def scalar(name: str, definition: str, function: Function) -> Measure:
        return r.measure("removal", name, "scalar", definition, delta, function=function)

    return [
        r.measure("removal", "removal_loss", "block", "loss without block l minus loss, nats per token, within sequences", delta),
        scalar("effective_depth", f"effective depth (a): exp entropy of q, {share}", effective_depth),
        scalar("effective_depth_share", f"effective depth (a) over L: {share}", lambda m: effective_depth(m) / L),
        scalar("effective_depth_participation", "effective depth (b): (sum d)^2 / sum d^2, d the positive removal losses",
               participation),
        scalar("costly_blocks", f"effective depth (c): blocks whose removal costs more than {tau:g} nats",
               lambda m: (m > tau).sum(1, keepdims=True).astype(float)),
    ]  # fmt: skip


def effective_depth(delta_rl: Floats) -> Floats:
    """exp entropy of the positive parts [r, l] -> [r, 1]; 0 where no removal costs anything."""
    positive = np.maximum(delta_rl, 0)
    total = positive.sum(1, keepdims=True)
    q = positive / np.where(total > 0, total, 1)
    entropy = -(q * np.log(np.where(q > 0, q, 1))).sum(1, keepdims=True)
    return np.where(total > 0, np.exp(entropy), 0.0)


def participation(delta_rl: Floats) -> Floats:
    """(sum of positive parts)^2 / sum of their squares [r, l] -> [r, 1]; 0 where no removal costs anything."""
    positive = np.maximum(delta_rl, 0)
    square = (positive**2).sum(1, keepdims=True)
    return np.where(square > 0, positive.sum(1, keepdims=True) ** 2 / np.where(square > 0, square, 1), 0.0)


def _causal(setup: Setup, ratio: Floats, change: Floats, size: Floats, most: Floats) -> list[Measure]:
    L, r, threshold = setup.depth, setup.resamples, setup.thresholds.causal
    if L < 2:
        return []
    first, second = pairs(L)
    is_late = late(first, L)
    order = "; at is skipped, other is the later block"

    def over_means(m: Floats) -> Floats:
        return m[:, : len(first)] / np.maximum(m[:, len(first) :], _CLAMP)

    return [
        r.measure("removal", "causal", "pair", f"mean over tokens of |u_l^skip - u_l| / |u_l|{order}", ratio, at=first, other=second),
        r.measure("removal", "causal_ratio_of_means", "pair", f"mean |u_l^skip - u_l| / mean |u_l|{order}",
                  np.concatenate([change, size], axis=1), function=over_means, at=first, other=second),
        r.measure("removal", "causal_max", "pair",
                  f"largest ratio over positions but the first, mean over sequences{order}", most, at=first, other=second),
        r.measure("removal", "causal_global", "scalar", "L^(-1/2) (1/L) sum over s of the mean of C(s, l) over l > s", ratio,
                  function=lambda m: _effects(m, L).sum(1, keepdims=True) / L**1.5),
        r.measure("removal", "causal_late_fraction", "scalar",
                  f"share of pairs in the last three quarters with C above {threshold:g}", ratio,
                  function=lambda m: _share(m[:, is_late] > threshold)),
        r.measure("removal", "depth_score", "scalar",
                  "sum l m_l / sum m_l, m_l = mean of C(l, .) over later blocks, l = 0 .. L - 2", ratio,
                  function=lambda m: _depth_score(_effects(m, L))),
        r.measure("removal", "depth_score_max", "scalar", "depth score of causal_max", most,
                  function=lambda m: _depth_score(_effects(m, L))),
    ]  # fmt: skip


def _effects(pairs_rk: Floats, depth: int) -> Floats:
    """Mean over later blocks [r, L - 1] of a quantity of pairs."""
    first, _ = pairs(depth)
    return np.stack([pairs_rk[:, first == s].mean(1) for s in range(depth - 1)], axis=1)


def _depth_score(effect_rl: Floats) -> Floats:
    total = effect_rl.sum(1, keepdims=True)
    weighted = effect_rl @ np.arange(effect_rl.shape[1])[:, None]
    return np.where(total > 0, weighted / np.where(total > 0, total, 1), np.nan)


def _share(hit_rk: np.ndarray) -> Floats:
    return hit_rk.mean(1, keepdims=True) if hit_rk.shape[1] else np.full((len(hit_rk), 1), np.nan)


def _output(setup: Setup, mean: Floats, most: Floats) -> list[Measure]:
    r = setup.resamples
    return [
        r.measure("removal", "output_effect", "block", "mean over tokens of |softmax without block l - softmax|_2", mean),
        r.measure("removal", "output_effect_max", "block", "largest of it over positions but the first, mean over sequences",
                  most),
    ]  # fmt: skip


def pruning(setup: Setup) -> list[Measure]:
    """The pruning curve of Gromov et al.: for each n drop the n adjacent blocks between the two most alike states.

    The start l*(n) minimises the angular distance of z_l and z_(l+n) over all tokens; one pass per n, L - 1 in all.
    """
    L = setup.depth
    angles = next(m for m in growth(setup) if m.name == "angular_distance")
    starts = np.array([_closest(angles, n) for n in range(1, L)], dtype=np.int64)
    delta = _group_losses(setup, [(int(start), n) for n, start in enumerate(starts, 1)])
    what = "loss without the n adjacent blocks whose states are closest, minus loss"
    return [
        setup.resamples.measure("pruning", "pruning_loss", "size", what, delta, at=np.arange(1, L)),
        setup.resamples.measure(
            "pruning", "pruning_start", "size", "first of these blocks",
            np.broadcast_to(starts.astype(float), delta.shape), at=np.arange(1, L),
        ),
    ]  # fmt: skip


def _closest(angles: Measure, n: int) -> int:
    apart = angles.other - angles.at == n
    return int(angles.at[apart][np.argmin(angles.value[apart])])


def groups(setup: Setup) -> list[Measure]:
    """Remove every group of adjacent blocks but the whole model: (L - 1)(L + 2) / 2 passes, and the best of each size."""
    L = setup.depth
    where = [(start, n) for n in range(1, L) for start in range(L - n + 1)]
    delta = _group_losses(setup, where)
    start, size = (np.array(column, dtype=np.int64) for column in zip(*where, strict=True))
    sizes = [size == n for n in range(1, L)]
    return [
        setup.resamples.measure("groups", "group_loss", "pair", "loss without blocks at .. at + other - 1, minus loss", delta,
                                at=start, other=size),
        setup.resamples.measure("groups", "best_group_loss", "size", "least loss over groups of n adjacent blocks, minus loss",
                                delta, at=np.arange(1, L),
                                function=lambda m: np.stack([m[:, s].min(1) for s in sizes], axis=1)),
    ]  # fmt: skip


def _group_losses(setup: Setup, where: list[tuple[int, int]]) -> Floats:
    delta = setup.empty(len(where))
    for rows, tokens_bt, targets_bt in setup.chunks():
        base = sequence_losses(setup.model, forward(setup.model, tokens_bt), targets_bt)
        setup.tick()
        for k, (start, n) in enumerate(where):
            hidden = forward(setup.model, tokens_bt, skip=both(range(start, start + n)))
            setup.tick()
            delta[rows, k] = (sequence_losses(setup.model, hidden, targets_bt) - base).cpu()
    return delta


def _means(x_bt: Tensor) -> Floats:
    return np.asarray(x_bt.double().mean(-1).cpu())


def _most(x_bt: Tensor) -> Floats:
    later = x_bt[:, 1:] if x_bt.shape[1] > 1 else x_bt
    return np.asarray(torch.amax(later, dim=-1).double().cpu())

"""Logit lens: what each state would predict if the model ended there.

The readout of a state is the topology's own (`Stream.lens`): the stream, the merged streams, or the mix that the next
sublayer reads; then the model's final norm and head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.layers import at_least_float32
from scalinglab.train.probes.intervals import Floats
from scalinglab.train.probes.setup import Setup
from scalinglab.train.probes.tap import forward, token_losses

_TOP = 5


def lens(setup: Setup) -> list[Measure]:
    """Loss, both KL divergences and top-5 overlap with the final prediction, per state: one pass and L + 1 readouts.

    KL(final || lens) is DepthBench's direction, KL(lens || final) that of Csordas et al.
    """
    L = setup.depth
    loss, forth, back, overlap = (setup.empty(L + 1) for _ in range(4))
    for rows, tokens_bt, targets_bt in setup.chunks():
        found: list[Tensor] = []

        def arrive(i: int, stream: Stream, found: list[Tensor] = found) -> None:
            if i % 2 == 0:
                found.append(stream.lens(i))

        final = at_least_float32(setup.model.logits(forward(setup.model, tokens_bt, arrive=arrive)))
        setup.tick()
        log_p, top = final.log_softmax(-1), _top(final)
        for l, z_btd in enumerate(found):
            logits = at_least_float32(setup.model.logits(z_btd))
            log_q = logits.log_softmax(-1)
            loss[rows, l] = token_losses(logits, targets_bt).double().mean(-1).cpu()
            forth[rows, l] = _kl(log_p, log_q)
            back[rows, l] = _kl(log_q, log_p)
            shared = (top.unsqueeze(-1) == _top(logits).unsqueeze(-2)).any(-1)
            overlap[rows, l] = shared.double().mean((-2, -1)).cpu()
    r, tau = setup.resamples, setup.thresholds.lens
    top_k = min(_TOP, final.shape[-1])
    return [
        r.measure("lens", "lens_loss", "state", "cross-entropy of the readout of z_l, nats per token", loss),
        r.measure("lens", "lens_kl", "state", "KL(final || lens of z_l), nats per token", forth),
        r.measure("lens", "lens_kl_reverse", "state", "KL(lens of z_l || final), nats per token", back),
        r.measure("lens", "lens_overlap", "state", f"share of the final top {top_k} tokens in the lens's top {top_k}", overlap),
        r.measure("lens", "settled_depth", "scalar", f"effective depth (d): first state l with KL(final || lens) below {tau:g}",
                  forth, function=lambda m: first_below(m, tau)),
    ]  # fmt: skip


def first_below(values_rl: Floats, threshold: float) -> Floats:
    """Index of the first value below the threshold [r, l] -> [r, 1]; NaN where there is none."""
    below = values_rl < threshold
    first = below.argmax(1).astype(float)
    return np.where(below.any(1), first, np.nan)[:, None]


def _kl(log_p: Tensor, log_q: Tensor) -> np.ndarray:
    return np.asarray((log_p.exp() * (log_p - log_q)).sum(-1).double().mean(-1).cpu())


def _top(logits: Tensor) -> Tensor:
    return torch.topk(logits, min(_TOP, logits.shape[-1]), dim=-1).indices

"""What a sublayer reads: unfolded path weights, effective number of sources, and sizes of what is written.

Axes: b sequence, t position, s source (0 the embedding, 1 + j the output of sublayer j).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalinglab.probe_report import Measure
from scalinglab.train.archs.connector import Stream
from scalinglab.train.layers import at_least_float32
from scalinglab.train.probes.setup import Setup
from scalinglab.train.probes.tap import forward

_TINY = 1e-30


def paths(setup: Setup) -> list[Measure]:
    """Coefficients of the embedding and of every earlier output in what each sublayer reads, from one pass.

    Pre-LN: ones. Hyper-connections: read_k mix_(k-1) .. mix_(j+1) write_j. Attention residuals: softmax weights. A factor
    behind the norm (LNS) is no coefficient: it scales all sources alike.

    Raises
    ------
    NotImplementedError
        Norms on the stream: the sources are not added up.
    """
    readers = 2 * setup.depth + 1
    weight = setup.empty(readers * (readers + 1) // 2)
    entropy, spread = setup.empty(readers), setup.empty(readers)
    for rows, tokens_bt, _ in setup.chunks():
        memory: list[Any] = [None]

        def arrive(
            i: int, stream: Stream, rows: slice = rows, shape: torch.Size = tokens_bt.shape, memory: list[Any] = memory
        ) -> None:
            c_s, memory[0] = stream.unfold(i, memory[0])
            c_bts = at_least_float32(c_s).expand(*shape, 1 + i).double()
            weight[rows, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2] = c_bts.mean(1).cpu()
            share = c_bts.abs() / c_bts.abs().sum(-1, keepdim=True).clamp_min(_TINY)
            entropy[rows, i] = torch.special.entr(share).sum(-1).exp().mean(-1).cpu()
            spread[rows, i] = (1 / share.square().sum(-1).clamp_min(_TINY)).mean(-1).cpu()

        forward(setup.model, tokens_bt, arrive=arrive)
        setup.tick()
    at, source = np.tril_indices(readers)
    r = setup.resamples
    return [
        r.measure("paths", "path_weight", "pair",
                  "mean over tokens of the coefficient of sublayer other's output (-1: the embedding) in what sublayer at reads "
                  "(2L: the final norm)", weight, at=at.astype(np.int64), other=source.astype(np.int64) - 1),
        r.measure("paths", "sources_entropy", "reader", "exp entropy of |c| / sum |c|, mean over tokens", entropy),
        r.measure("paths", "sources_participation", "reader", "(sum |c|)^2 / sum c^2, mean over tokens", spread),
    ]  # fmt: skip


def contributions(setup: Setup) -> list[Measure]:
    """Size and direction of what a block writes against what it reads (Csordas et al., arXiv 2505.13898), from one pass.

    x is what a sublayer reads before its norm: the residual on a plain stream, the mix of streams or of sources
    elsewhere. A negative cosine means erasure.
    """
    L = setup.depth
    sizes, cosines = setup.empty(3, L), setup.empty(3, L)
    for rows, tokens_bt, _ in setup.chunks():
        held: dict[str, Tensor] = {}

        def wrote(i: int, x: Tensor, y: Tensor, rows: slice = rows, held: dict[str, Tensor] = held) -> None:
            x, y = at_least_float32(x), at_least_float32(y)
            block, kind = divmod(i, 2)
            sizes[rows, kind, block], cosines[rows, kind, block] = _against(y, x)
            if kind == 0:
                held["x"], held["a"] = x, y
            else:
                sizes[rows, 2, block], cosines[rows, 2, block] = _against(held["a"] + y, held["x"])

        forward(setup.model, tokens_bt, wrote=wrote)
        setup.tick()
    r, made = setup.resamples, []
    for kind, name in enumerate(("attention", "ffn", "block")):
        what = (
            "of both outputs together and what the attention reads"
            if name == "block"
            else f"of the {name}'s output and input"
        )
        made += [
            r.measure("contributions", f"{name}_contribution", "block", f"mean over tokens of the ratio of norms {what}",
                      sizes[:, kind]),
            r.measure("contributions", f"{name}_cosine", "block", f"mean over tokens of the cosine {what}", cosines[:, kind]),
        ]  # fmt: skip
    return made


def _against(y_btd: Tensor, x_btd: Tensor) -> tuple[np.ndarray, np.ndarray]:
    written, read = y_btd.norm(dim=-1), x_btd.norm(dim=-1).clamp_min(_TINY)
    cosine = (y_btd * x_btd).sum(-1) / (written.clamp_min(_TINY) * read)
    return np.asarray((written / read).double().mean(-1).cpu()), np.asarray(cosine.double().mean(-1).cpu())

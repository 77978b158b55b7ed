"""The loss of a stack on a fixed set of sequences, with a standard error by sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalinglab.train.corpora import Evaluation, by_difficulty
from scalinglab.train.layers import at_least_float32

_CHUNK = 1 << 14  # tokens of all replicas in one forward pass


class Scored(Protocol):
    """A model that turns tokens [K, b, t] into logits [K, b, t, v]."""

    def __call__(self, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Score:
    """Losses of one run.

    Attributes
    ----------
    nats : float64 [B, T]
        Loss of every target.
    correct : bool [B, T]
        Whether the most probable token is the target.
    evaluation : Evaluation
    """

    nats: NDArray[np.float64]
    correct: NDArray[np.bool_]
    evaluation: Evaluation

    def fields(self) -> dict[str, float]:
        """Loss and, where the oracle is known, excess over it, nats/token, with standard errors over sequences.

        The excess subtracts the oracle's loss token by token, which removes the noise of the evaluation set.
        """
        found = dict(zip(("loss", "loss_se"), _mean(self.nats), strict=True))
        if self.evaluation.nats is not None:
            found |= dict(zip(("excess", "excess_se"), _mean(self.nats - self.evaluation.nats), strict=True))
        return found

    def by_difficulty(self) -> dict[str, dict[str, float]] | None:
        """Loss, excess and accuracy by difficulty; None for a corpus without."""
        if self.evaluation.difficulty is None:
            return None
        table = by_difficulty(self.evaluation, self.nats, correct=self.correct)
        return {str(level): row for level, row in table.items()}


@torch.no_grad()
def evaluate(model: Scored, evaluation: Evaluation, *, replicas: int, device: Any, autocast: Any) -> list[Score]:
    """Scores of all runs of a stack on the same sequences.

    Parameters
    ----------
    model : callable
        Stacked: tokens [K, b, t] -> logits [K, b, t, v].
    evaluation : Evaluation
    replicas : int
        K.
    device
        Of the model.
    autocast : callable
        Makes the context that forward passes run in.
    """
    tokens, targets = (torch.from_numpy(x) for x in (evaluation.tokens, evaluation.targets))
    size = max(1, _CHUNK // (replicas * tokens.shape[1]))
    nats, correct = [], []
    for part, aim in zip(tokens.split(size), targets.split(size), strict=True):
        part_kbt, aim_kbt = (x.to(device).expand(replicas, *x.shape) for x in (part, aim))
        with autocast():
            logits_kbtv = at_least_float32(model(part_kbt))
        # Double precision for the mean: float32 noise would show in differences between runs.
        normaliser_kbt = torch.logsumexp(logits_kbtv, -1)
        picked_kbt = logits_kbtv.gather(-1, aim_kbt.unsqueeze(-1)).squeeze(-1)
        nats.append((normaliser_kbt - picked_kbt).double().cpu())
        correct.append((logits_kbtv.argmax(-1) == aim_kbt).cpu())
    all_nats, all_correct = torch.cat(nats, 1).numpy(), torch.cat(correct, 1).numpy()
    return [Score(n, c, evaluation) for n, c in zip(all_nats, all_correct, strict=True)]


def _mean(values_bt: NDArray[np.float64]) -> tuple[float, float]:
    by_sequence = values_bt.mean(1)
    spread = by_sequence.std(ddof=1) / len(by_sequence) ** 0.5 if len(by_sequence) > 1 else float("nan")
    return float(by_sequence.mean()), float(spread)

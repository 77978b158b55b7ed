"""Kaplan et al. 2020 (arXiv:2001.08361): is the cost of shape "slight" over a 40-fold range, on Gemstones' runs?

Judged by their own exchange rate, 22 % of compute for 1 % of loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.fitting import fit
from scalinglab.hypotheses import shape_equivalence
from scalinglab.objectives import Gaussian
from scalinglab.replications.gemstones import FILE, gemstones
from scalinglab.replications.targets import Ours, Replication, Target

RATE = 22.0  # % of compute that 1 % of loss is worth, fig. 5
RANGE = (5.0, 200.0)  # 40-fold, inside Gemstones' 3.2 to 320
_SLIGHT, _SHARE = 0.03, 0.05  # of the loss; of compute

_SENTENCE = "the sentence on fig. 5 of Kaplan et al. 2020"
_INTERVAL = "90 %, two one-sided t"

_TARGETS = (
    Target("largest cost of shape", rule="an upper bound: over any 40-fold range below 3 % of the loss with its upper 95 % limit"),
    Target("equivalence at 3 % of loss", rule="all pairs of shapes inside the margin, one-sided .05", published=1.0,
           unit="1 holds, 0 refuted", kind="implied", source=f"{_SENTENCE}, read by us as 3 % of the loss"),
    Target("equivalence at 5 % of compute, Kaplan's rate", rule="all pairs of shapes inside the margin, one-sided .05",
           published=1.0, unit="1 holds, 0 refuted", kind="implied",
           source=f"{_SENTENCE}, read by us as 5 % of compute at 22 % per 1 % of loss"),
    Target("compute that shape can cost, Kaplan's rate", published=100 * (1.22**3 - 1), unit="% of compute",
           kind="implied", rule="an upper bound: at most what 3 % of the loss is worth",
           source="our arithmetic: 3 % of the loss at 22 % of compute per 1 % of loss"),
)  # fmt: skip


def compute_equivalent(percent_of_loss: float) -> float:
    """Compute (%) that a share of the loss (%) is worth at Kaplan's rate: 100 (1.22^x - 1)."""
    return 100 * ((1 + RATE / 100) ** percent_of_loss - 1)


def loss_equivalent(percent_of_compute: float) -> float:
    """Share of the loss (%) that compute (%) is worth at Kaplan's rate."""
    return math.log1p(percent_of_compute / 100) / math.log1p(RATE / 100)


def compute(data: Path) -> Mapping[str, Ours]:
    """Ours for every target, by the shape law on backbone parameters."""
    table = gemstones(data, "fit_hot_100b", "backbone")
    made = fit("shape", table, objective=Gaussian(variance="constant"))
    n, d = np.exp(np.log(table[["params", "tokens"]]).mean())
    aspect = np.geomspace(*RANGE, 25)
    depth = np.cbrt(n / 12 / aspect**2)
    grid = pd.DataFrame({"depth": depth, "width": depth * aspect, "params": n, "tokens": d})
    least = float(made.predict(grid).min())
    slight = shape_equivalence(made, grid, margin=_SLIGHT * least)
    margin = loss_equivalent(100 * _SHARE) / 100 * least
    compute_ = shape_equivalence(made, grid, margin=margin)
    cost, low, high = (100 * v / least for v in (slight.estimate, *slight.interval))
    where = slight.diagnostics["largest gap at"]
    return {
        "largest cost of shape": Ours(
            cost, low, high, interval=_INTERVAL, agrees="holds" if high < 100 * _SLIGHT else "open" if low < 100 * _SLIGHT else "no",
            why=f"between {where[0]} and {where[1]} at {n:.2g} backbone parameters and {d:.2g} tokens",
        ),
        "equivalence at 3 % of loss": Ours(
            float(slight.rejected or False), agrees=_verdict(slight.codes), why=slight.decision
        ),
        "equivalence at 5 % of compute, Kaplan's rate": Ours(
            float(compute_.rejected or False), agrees=_verdict(compute_.codes),
            why=f"{compute_.decision}: the range costs {slight.estimate / margin:.1f} times the margin",
        ),
        "compute that shape can cost, Kaplan's rate": Ours(
            compute_equivalent(cost), compute_equivalent(low), compute_equivalent(high), interval=_INTERVAL, agrees="holds" if cost <= 100 * _SLIGHT else "no",
            why="a loss that looks slight is worth this much compute",
        ),
    }  # fmt: skip


def _verdict(codes: tuple[str, ...]) -> str:
    return "yes" if "EQUIVALENT" in codes else "no" if "REFUTED" in codes else "open"


REPLICATION = Replication("kaplan2020", _TARGETS, compute, (FILE,))

"""Simulated learning-rate sweeps as run tables, for the tests of mis-scaling."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scalinglab.misscaling import TRUTHS, Plan, Truth, simulate_study


def study(truth: str | Truth, plan: Plan | None = None, *, seed: int = 1) -> pd.DataFrame:
    """One simulated study as a run table, with all that the trainer would log."""
    planted = TRUTHS[truth] if isinstance(truth, str) else truth
    cells, z, loss, _ = simulate_study(planted, plan or Plan(), trials=1, rng=np.random.default_rng(seed))
    rows = [
        {
            "run_id": f"r{c}-{j}-{s}", "architecture": cells["architecture"][c], "parametrization": cells["parametrization"][c],
            "depth": cells["depth"][c], "width": 64, "lr": np.exp(z[c, j]), "seed": s, "loss": loss[0, c, j, s],
            "loss_initial": 5.0, "tokens": 1e6, "batch_tokens": 512, "corpus_fingerprint": "0f", "status": "finished",
        }
        for c in range(len(cells)) for j in range(z.shape[1]) for s in range(loss.shape[-1])
    ]  # fmt: skip
    return pd.DataFrame(rows)

"""The two run tables of the benchmarks: public logs where they are present, else simulated ones of the same size."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent


def folder(given: str | None) -> Path:
    """--data, else $SCALINGLAB_SHARED, else ../shared/data beside the repository."""
    if given:
        return Path(given)
    shared = os.environ.get("SCALINGLAB_SHARED")
    if shared:
        root = Path(shared)
        return root / "data" if (root / "data").is_dir() else root
    return HERE.parents[1] / "shared" / "data"


def chinchilla(data: Path) -> tuple[pd.DataFrame, str]:
    """The 240 points of Besiroglu et al. 2024 (one run each)."""
    path = data / "chinchilla_besiroglu.csv"
    if path.is_file():
        d = pd.read_csv(path)
        d = d[d["in_fit_240"] == 1]
        table, told = pd.DataFrame({"params": d["params_raw"], "tokens": d["tokens"], "loss": d["loss"]}), "public log"
    else:
        rng = np.random.default_rng(0)
        n = np.exp(rng.uniform(np.log(4e7), np.log(1.6e10), 240))
        t = np.exp(rng.uniform(np.log(2e8), np.log(4e11), 240))
        loss = (1.8172 + 477.8 * n**-0.3473 + 2143.0 * t**-0.3672) * np.exp(0.005 * rng.standard_t(3, 240))
        table, told = pd.DataFrame({"params": n, "tokens": t, "loss": loss}), "SIMULATED (no public log found)"
    table = table.reset_index(drop=True)
    table.insert(0, "run_id", [f"run{i}" for i in range(len(table))])
    return table, told


def gemstones(data: Path) -> tuple[pd.DataFrame, str]:
    """22 shapes x 35 checkpoints of the Gemstones (the 'hot, 100 billion tokens and more' rows); run_id is the shape."""
    path = data / "gemstones_checkpoints.csv"
    if path.is_file():
        g = pd.read_csv(path)
        g = g[g["fit_hot_100b"] == 1].rename(columns={"n_layers": "depth", "d_model": "width"})
        return g[["run_id", "params", "tokens", "width", "depth", "loss"]].reset_index(drop=True), "public log"
    from scalinglab.simulation import gemstones_design, simulate

    design = gemstones_design(shapes=22, checkpoints=35)
    law = {"E": 1.2, "A": 40.0, "a": 0.5, "B": 0.8, "b": 0.4, "C": 250.0, "c": 0.3}
    runs = simulate("width_depth", law, design, sigma=0.005, tau=0.003, rng=0)
    return runs[["run_id", "params", "tokens", "width", "depth", "loss"]], "SIMULATED (no public log found)"

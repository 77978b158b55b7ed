"""Learning-rate grids of Li et al. 2025 (arXiv:2503.04715): curvature, the parabola's bias, and how the optimum moves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.misscaling.curves import fit_curves
from scalinglab.misscaling.intake import take_in
from scalinglab.misscaling.surface import lr_curvature
from scalinglab.published import published_numbers
from scalinglab.readers import read_runs
from scalinglab.replications.targets import Ours, Replication, Target
from scalinglab.uncertainty import t_quantile

FILE = "steplaw_dense.csv"
_WINDOW = 0.07

_TARGETS = (
    Target("median curvature", 1e-3, "printed digits"),
    Target("vertex bias of the parabola", rule="inside the recorded range"),
    Target("lr exponent of N", rule="our 95 % interval overlaps the published one"),
    Target("lr exponent of D", rule="our 95 % interval overlaps the published one"),
)  # fmt: skip


def compute(data: Path) -> Mapping[str, Ours]:
    """Ours for every target."""
    runs = read_runs(data / FILE)
    made = lr_curvature(runs)
    order = np.sort(made["curvature"])
    grids = take_in(runs)
    square, cubic = (
        fit_curves(grids.z, grids.mean, grids.count, model=m, window=_WINDOW) for m in ("quadratic", "cubic")
    )
    both = square.usable & cubic.usable
    bias = float(np.median((square.optimum - cubic.optimum)[both]))
    told = published_numbers("steplaw2025").set_index("quantity")
    low, high = told.loc["vertex bias of the parabola", ["low", "high"]]
    out = {
        "median curvature": Ours(
            float(np.median(order)), float(order[0]), float(order[-1]), interval=f"range over {len(order)} settings"
        ),
        "vertex bias of the parabola": Ours(bias, agrees="yes" if low <= bias <= high else "no"),
    }  # fmt: skip
    size = runs.groupby(["depth", "width"])["params"].first().rename("params").reset_index()
    surfaces = _drift(made.merge(size, on=["depth", "width"]).dropna(subset=["optimum_lr"]), "optimum_lr")
    settings = [*("depth", "width"), "tokens_nominal"]
    cells = _drift(runs.loc[runs.groupby(settings)["loss"].idxmin()], "lr")
    for name, (slope, se, df) in surfaces.items():
        half = t_quantile(0.975, df) * se
        a, b = told.loc[f"lr exponent of {name}", ["low", "high"]]
        overlap = slope - half <= b and a <= slope + half
        out[f"lr exponent of {name}"] = Ours(
            slope, slope - half, slope + half, interval="t", agrees="yes" if overlap else "no",
            why=f"minima of surfaces through each grid; its best cells give {cells[name][0]:.3f} with se {cells[name][1]:.3f}. The "
            "source's choice of cells is not documented",
        )  # fmt: skip
    return out


def _drift(table: pd.DataFrame, column: str) -> dict[str, tuple[float, float, float]]:
    """Exponents of N and D in a learning rate: least squares of its logarithm, with se and degrees of freedom."""
    X = np.column_stack([np.ones(len(table)), np.log(table["params"]), np.log(table["tokens"])])
    y = np.log(table[column].to_numpy(np.float64))
    b = np.linalg.lstsq(X, y, rcond=None)[0]
    e, df = y - X @ b, len(y) - 3.0
    se = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * (e @ e) / df)
    return {"N": (float(b[1]), float(se[1]), df), "D": (float(b[2]), float(se[2]), df)}


REPLICATION = Replication("steplaw2025", _TARGETS, compute, (FILE,))

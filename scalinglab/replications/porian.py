"""Kaplan's exponent against Chinchilla's, one correction at a time (Porian et al. 2024, arXiv:2406.19146)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalinglab.errors import SchemaError
from scalinglab.published import published_numbers
from scalinglab.replications.targets import Ours, Replication, Target
from scalinglab.uncertainty import t_quantile

FILE = "reference_fits.json"
_STEPS = {
    "as Kaplan": "base/long/kaplan/kaplan/train", "last layer counted": "base/long/kaplan/standard/val",
    "warm-up corrected": "base/short/kaplan/standard/val", "cosine to the budget": "base/short/chinchilla/standard/val",
    "tuned": "tuned/short/const/standard/val",
}  # fmt: skip
_DATA = {"RefinedWeb": "rw", "OpenWebText2": "owt2"}

_TARGETS = tuple(Target(f"{data}: {step}", rule="inside the published interval") for data in _DATA for step in _STEPS)


def compute(data: Path) -> Mapping[str, Ours]:
    """Slopes of ln N* on ln C by plain least squares over the published optimal pairs."""
    fits = _fits(data / FILE)
    told = published_numbers("porian2024").set_index("quantity")
    out = {}
    for name, short in _DATA.items():
        for step, config in _STEPS.items():
            quantity = f"{name}: {step}"
            pairs = fits[f"{short}/{config}"]["optimal_pairs"]
            slope, se, df = _slope(np.array([p[:2] for p in pairs if None not in p[:2]], dtype=np.float64))
            half = t_quantile(0.975, df) * se
            low, high = told.loc[quantity, ["low", "high"]]
            inside = low <= slope <= high
            out[quantity] = Ours(
                slope, slope - half, slope + half, interval="t", agrees="yes" if inside else "no",
                why="" if inside else "plain least squares of the same pairs; the source weighs budgets by their bootstrap spread",
            )  # fmt: skip
    return out


def _fits(path: Path) -> Mapping[str, Any]:
    entry = next((f for f in json.loads(path.read_text()).get("fits", []) if f.get("id") == "porian2024"), None)
    if entry is None or "fits" not in entry:
        raise SchemaError(f"{path} has no entry 'porian2024' with its fits: it is not the file that is meant")
    found: Mapping[str, Any] = entry["fits"]
    return found


def _slope(pairs: np.ndarray) -> tuple[float, float, float]:
    x, y = np.log(pairs).T
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    e = y - y.mean() - slope * x
    df = len(x) - 2.0
    return slope, float(np.sqrt(e @ e / df / (x @ x))), df


REPLICATION = Replication("porian2024", _TARGETS, compute, (FILE,))

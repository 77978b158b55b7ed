"""Rival explanations and laws: does shape matter at all, and does the law with shape predict runs left out."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd

from scalinglab.comparison import compare
from scalinglab.depth_benefit.analysis import Outcome
from scalinglab.depth_benefit.estimands import by_shape
from scalinglab.depth_benefit.labels import kaplan_verdict
from scalinglab.errors import ScalinglabError, ScalinglabWarning
from scalinglab.fitting import Fit
from scalinglab.fitting import fit as fit_law
from scalinglab.hypotheses.equivalence import shape_equivalence


def kaplan(outcome: Outcome, fit: Fit | None, alpha: float, rng: int) -> dict[str, str]:
    """Verdict on "shape hardly matters" over the sampled aspect ratios, at most a 40-fold range around their middle."""
    if fit is None:
        return {}
    runs = fit.runs
    r = np.log((runs["width"] / runs["depth"]).to_numpy(np.float64))
    middle, half = 0.5 * (r.min() + r.max()), min(0.5 * np.ptp(r), 0.5 * math.log(40.0))
    aspect = np.exp(np.linspace(middle - half, middle + half, 31))
    place = next(iter(outcome.effects)).contrast
    n, d = place["params"], place["tokens"]
    kappa = float((runs["params"] / (runs["depth"] * runs["width"].astype(float) ** 2)).median())
    shapes = pd.DataFrame({"params": n, "tokens": d, "aspect": aspect, "depth": np.cbrt(n / (kappa * aspect**2))})
    shapes["width"] = shapes["aspect"] * shapes["depth"]
    out: dict[str, str] = {}
    for level in fit.law.levels or ("",):
        rows = shapes.assign(**{str(fit.law.by): level}) if level else shapes
        try:
            test = shape_equivalence(fit, rows, margin=outcome.margin, alpha=alpha, rng=rng)
        except ScalinglabError as error:
            out[f"kaplan/{level or 'all'}"] = f"open: {error}"
            continue
        verdict, why = kaplan_verdict(test.codes, decision=test.decision)
        out[f"kaplan/{level or 'all'}"] = f"{verdict}: {why}"
    return out


def compared(fit: Fit | None, rng: int) -> pd.DataFrame:
    """T5: the law against the same one without shape, by leaving out one shape at a time."""
    columns = ["law", "k", "runs", "loro_rmse", "difference", "difference_se", "sign_flip_p", "status"]
    if fit is None or fit.law.key == "chinchilla":
        return pd.DataFrame(columns=columns)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalinglabWarning)
            by = fit.law.by
            plain = (
                fit_law("chinchilla", fit.runs, by=by, share="H1") if by else fit_law("chinchilla", by_shape(fit.runs))
            )
            made = compare({fit.law.key: fit, "chinchilla": plain}, folds=("run",), rng=rng).to_frame()
    except (ScalinglabError, np.linalg.LinAlgError):
        return pd.DataFrame(columns=columns)
    frame = made.reset_index().rename(columns={"run_rmse": "loro_rmse", "p": "sign_flip_p"})
    frame["runs"] = fit.n_runs
    return frame.reindex(columns=columns)

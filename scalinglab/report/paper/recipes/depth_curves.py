"""Recipes on one depth ladder at equal size: loss and what is solved, by depth, each depth at its best learning rate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number
from scalinglab.report.paper.registry import Analysis, Inputs, Options, recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = re.compile(r"accuracy_difficulty_(\d+)\Z")


class CurveOptions(Options, kw_only=True):
    """where: condition on the rows, such as one architecture."""

    where: str | None = None


def ladder(inputs: Inputs, asked: CurveOptions) -> pd.DataFrame:
    """Finished runs of a ladder, each depth at the learning rate with the lowest mean loss; column `gap`: loss above the floor.

    Raises
    ------
    ConfigError
        No depths, or several sizes or architectures, which one curve can't show.
    """
    runs = inputs.runs(where=asked.where)
    for column in ("depth", "loss"):
        if column not in runs:
            raise ConfigError(f"{inputs.names[0]}: a depth curve needs a column {column}")
    if "architecture" in runs and len(runs["architecture"].unique()) > 1:
        raise ConfigError(
            f"{inputs.names[0]}: several architectures; choose one with where = \"architecture == 'pre_ln'\""
        )
    runs = runs.assign(gap=runs["loss"] - runs.get("floor", 0.0))
    if "lr" not in runs or runs["lr"].isna().all():
        return runs
    means = runs.groupby(["depth", "lr"])["gap"].mean()
    best = {depth: means[depth].idxmin() for depth in runs["depth"].unique()}
    return runs[runs["lr"] == runs["depth"].map(best)].reset_index(drop=True)


LADDER = Analysis("depth_curve", ladder, CurveOptions)


@recipe("depth_curve_figure", "figure", options=CurveOptions, analysis=LADDER)
def depth_curve_figure(runs: pd.DataFrame, options: CurveOptions) -> Figure:
    """Loss above the floor against depth, seeds as points; accuracy by difficulty beside it where the table has it."""
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    levels = _levels(runs)
    depths = np.sort(runs["depth"].unique())
    with canvas("page" if levels else "column", 2.1) as figure:
        axes = figure.subplots(1, 2 if levels else 1, squeeze=False)[0]
        mean, se = _moments(runs, "gap")
        axes[0].plot(runs["depth"], runs["gap"], ls="", marker="o", ms=3, mfc="white", color=style.GREY, label="run")
        axes[0].errorbar(
            depths, mean, yerr=se, marker="o", color=style.colour_of(0), label="mean and its standard error", capsize=2
        )
        axes[0].set_ylabel("Loss above the floor (nats)" if "floor" in runs else "Loss (nats per token)")
        axes[0].set_ylim(bottom=0 if "floor" in runs else None)
        axes[0].legend()
        for k, level in enumerate(levels):
            mean, se = _moments(runs, f"accuracy_difficulty_{level}")
            axes[1].errorbar(
                depths,
                mean,
                yerr=se,
                marker=style.marker_of(k),
                ls=style.dash_of(k),
                color=style.colour_of(k),
                label=f"{level}",
                capsize=2,
            )
        if levels:
            axes[1].set_ylabel("Accuracy")
            axes[1].legend(title="difficulty", ncols=2)
        for ax in axes:
            ax.set_xscale("log", base=2)
            ax.set_xticks(depths, [f"{d:g}" for d in depths])
            ax.set_xlabel("Depth (blocks)")
            ax.minorticks_off()
    return figure


@recipe("depth_curve_numbers", "numbers", options=CurveOptions, analysis=LADDER)
def depth_curve_numbers(runs: pd.DataFrame, options: CurveOptions) -> list[Number]:
    """Mean loss above the floor at each depth, seeds, accuracies at the shallowest and the deepest."""
    mean, se = _moments(runs, "gap")
    depths = np.sort(runs["depth"].unique())
    out: list[Number] = []
    for depth, m, s in zip(depths, mean, se, strict=True):
        out.append(products.measured(f"depth_{depth:g}", m, s, f"loss above the floor at {depth:g} blocks, nats"))
    last, before = len(depths) - 1, len(depths) - 2
    gain, error = float(mean[before] - mean[last]), float(np.hypot(se[before], se[last]))
    out += [
        products.measured("shallowest", mean[0], se[0]), products.measured("deepest", mean[last], se[last]),
        products.measured("last_step", gain, error, "what the deepest gains over the next, nats"), products.measured("last_step_se", error, error),
        *products.counted("depths", len(depths)), *products.counted("seeds", int(runs.groupby("depth").size().min())),
        *products.counted("least", int(depths[0])), *products.counted("most", int(depths[last])), *products.counted("next", int(depths[before])),
        *products.counted("rates", int(runs["lr"].nunique()) if "lr" in runs else 0), products.size("params", float(runs["params"].median())),
        products.size("tokens", float(runs["tokens"].max())),
    ]  # fmt: skip
    levels = _levels(runs)
    for level in {min(levels), max(levels)} if levels else ():
        m, s = _moments(runs, f"accuracy_difficulty_{level}")
        word = "easiest" if level == min(levels) else "hardest"
        out += [products.percent(f"{word}_{end}", float(m[i])) for end, i in (("shallowest", 0), ("deepest", last))]
        out += products.counted(f"{word}_level", level)
    return out


def _levels(runs: pd.DataFrame) -> list[int]:
    found = (_ACCURACY.match(str(c)) for c in runs.columns if runs[c].notna().any())
    return sorted(int(m[1]) for m in found if m)


def _moments(runs: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds and its standard error, by depth; NaN errors where there is one seed."""
    by = runs.groupby("depth")[column]
    return by.mean().to_numpy(), (by.std(ddof=1) / np.sqrt(by.size())).to_numpy()

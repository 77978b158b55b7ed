"""Recipes from learning-rate sweeps over depth: `misscaling_figure`, `misscaling_table`, `misscaling_numbers`.

Inputs are run tables, and coordinate checks as the JSON files of `scalinglab coords`: an arm that failed is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pandas as pd

from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Analysis, Inputs, Options, recipe
from scalinglab.report.tables import p_value, rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalinglab.misscaling import MisscalingReport


_VERDICTS = {"H_arch": "architecture", "H_misscale": "mis-scaling"}  # others stand for themselves


class MisscalingOptions(Options, kw_only=True):
    """Those of `misscaling`; see there."""

    reference: str = "pre_ln"
    naive: str = "sp"
    scaled: list[str] = msgspec.field(default_factory=lambda: ["native", "completep"])
    diverged_above: float | None = None
    margin: float = 0.012
    drift_margin: float = 0.2
    window: float = 0.07
    draws: int = 999
    seed: int = 0
    where: str | None = None


class MisscalingFigureOptions(MisscalingOptions, kw_only=True):
    """Which figure of a mis-scaling report."""

    figure: Literal["lr_envelope", "lr_drift", "decomposition"]


class MisscalingTableOptions(MisscalingOptions, kw_only=True):
    """Which table of a mis-scaling report."""

    table: Literal["decomposition", "drift"]


def misscaling_report(inputs: Inputs, asked: MisscalingOptions) -> MisscalingReport:
    """The decision between architecture and mis-scaling on a table of sweeps."""
    from scalinglab.coordinates import CoordinateCheck
    from scalinglab.misscaling import Margins, Method
    from scalinglab.misscaling.report import misscaling

    checks = [name for name in inputs.names if name.endswith(".json")]
    tables = replace(inputs, names=tuple(name for name in inputs.names if name not in checks))
    return misscaling(
        tables.runs(where=asked.where), checks=[CoordinateCheck.load(Path(check)) for check in checks], reference=asked.reference, naive=asked.naive, scaled=tuple(asked.scaled),
        diverged_above=asked.diverged_above, margins=Margins(gain=asked.margin, drift=asked.drift_margin),
        method=Method(window=asked.window, draws=asked.draws), rng=asked.seed,
    )  # fmt: skip


REPORT = Analysis("misscaling", misscaling_report, MisscalingOptions)


@recipe("misscaling_figure", "figure", options=MisscalingFigureOptions, analysis=REPORT)
def misscaling_figure(report: MisscalingReport, options: MisscalingFigureOptions) -> Figure:
    """A figure of the mis-scaling report: envelopes, drift, decomposition."""
    from scalinglab.report.figures import rates

    draw: Any = {"lr_envelope": rates.lr_envelope, "lr_drift": rates.lr_drift, "decomposition": rates.decomposition}
    figure: Figure = draw[options.figure](report)
    return figure


@recipe("misscaling_table", "table", options=MisscalingTableOptions, analysis=REPORT)
def misscaling_table(report: MisscalingReport, options: MisscalingTableOptions) -> Table:
    """decomposition: U, V, M, W and depth gains; drift: of the optimal learning rate with depth."""
    data = report.decomposition if options.table == "decomposition" else report.drift
    if options.table == "decomposition":  # the contrasts; the gains of each arm are in the CSV of the report
        data = data[~data["name"].str.startswith("gain ")].reset_index(drop=True)
    value = "estimate" if options.table == "decomposition" else "slope"
    keep = ["name", "meaning"] if options.table == "decomposition" else ["architecture", "parametrization", "axis"]
    shown = data[[c for c in keep if c in data]].copy()
    shown[value] = [rounded(v, s)[0] for v, s in zip(data[value], data["se"], strict=True)]
    shown["95 % interval"] = [
        f"[{rounded(a, s)[0]}, {rounded(b, s)[0]}]"
        for a, b, s in zip(data["low"], data["high"], data["se"], strict=True)
    ]
    if "p_adj" in data:
        shown["p (Holm)"] = [p_value(v) for v in data["p_adj"]]
        shown["state"] = data["state"]
    return Table(shown, data)


@recipe("misscaling_numbers", "numbers", options=MisscalingOptions, analysis=REPORT)
def misscaling_numbers(report: MisscalingReport, options: MisscalingOptions) -> list[Number]:
    """The verdict, each gain and contrast with its limits, the best rates at both ends of depth, margins and runs."""
    out = [
        products.words("verdict", _VERDICTS.get(report.verdict, report.verdict)), products.plain("margin", report.margins.gain),
        products.plain("drift_margin", report.margins.drift), *products.counted("envelopes", len(report.envelopes)),
        *products.counted("runs", int(report.envelopes["runs"].sum()) if len(report.envelopes) else 0),
    ]  # fmt: skip
    for name, verdict in report.verdicts.items():
        if name:
            out.append(products.words(f"{name}_verdict", _VERDICTS.get(verdict, verdict)))
    for r in report.decomposition.to_dict("records"):
        if pd.isna(r["estimate"]):
            continue
        name = _identifier(str(r["name"]))
        out += products.with_interval(name, r["estimate"], r["se"], r["low"], r["high"], str(r["meaning"]))
        if pd.notna(r["p_adj"]):
            out.append(products.p_value(f"{name}_p", r["p_adj"]))
    inside = report.envelopes[report.envelopes["status"] == "interior"] if len(report.envelopes) else report.envelopes
    for arm, rows in inside.groupby(["architecture", "parametrization"]) if len(inside) else ():
        ends = rows.sort_values("depth").iloc[[0, -1]].to_dict("records")
        for end, r in zip(("shallow", "deep"), ends, strict=True):
            told = f"best learning rate of {' / '.join(arm)} at depth {r['depth']:g}"
            se = r["optimum_lr"] * r["ln_se"]
            out += products.with_interval(
                _identifier(f"rate {' '.join(arm)} {end}"), r["optimum_lr"], se, r["low"], r["high"], told
            )
    return out


def _identifier(name: str) -> str:
    """A name of letters, digits and single underscores."""
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")

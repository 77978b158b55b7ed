"""Recipes from a depth report: `depth_figure`, `depth_table`, `depth_numbers`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Analysis, Inputs, Options, recipe
from scalinglab.report.tables import p_value, rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalinglab.depth_benefit import DepthReport

Width = Literal["column", "page"]
DepthFigure = Literal["depth_forest", "depth_interaction", "depth_equivalence", "depth_specifications", "depth_power"]
# architectures as their papers write them; others stand for themselves
NAMES: Mapping[str, str] = {
    "pre_ln": "Pre-LN", "post_ln": "Post-LN", "sandwich_ln": "Sandwich-LN", "sandwich": "Sandwich-LN", "lns": "LNS",
    "deepnorm": "DeepNorm", "keel": "KEEL", "hc": "HC", "hyper_connections": "HC", "mhc": "mHC", "attnres_full": "AttnRes",
    "attn_res": "AttnRes", "attnres_block": "Block AttnRes", "block_attn_res": "Block AttnRes", "moda": "MoDA",
    "mix_ln": "Mix-LN", "layerscale": "LayerScale", "denseformer": "DenseFormer", "looped": "Looped",
}  # fmt: skip


class DepthOptions(Options, kw_only=True):
    """Those of `depth_benefit`; see there."""

    reference: str | None = None
    group: str | None = None
    where: str | None = None
    estimand: Literal["E1", "E1s", "E2"] | None = None
    shallow: float | None = None
    deep: float | None = None
    hold: Literal["backbone", "total"] | None = None
    method: Literal["auto", "cells", "pairs", "law"] = "auto"
    rates: Literal["own", "published"] = "own"
    margin: float | None = None
    charge_extras: bool = False
    reanalyse: bool = True
    draws: int = 1999
    seed: int = 0
    columns: dict[str, str] = msgspec.field(default_factory=dict)
    params: Literal["backbone", "total", "as given"] = "backbone"


class DepthFigureOptions(DepthOptions, kw_only=True):
    """Which figure of a depth report, for which width."""

    figure: DepthFigure
    width: Width = "page"


class DepthTableOptions(DepthOptions, kw_only=True):
    """Which table of a depth report."""

    table: Literal["effects", "interaction"]


def depth_report(inputs: Inputs, asked: DepthOptions) -> DepthReport:
    """The depth report of a run table."""
    from scalinglab.depth_benefit.asking import depth_benefit

    return depth_benefit(
        inputs.runs(columns=asked.columns, params=asked.params), reference=asked.reference, group=asked.group, where=asked.where,
        estimand=asked.estimand, shallow=asked.shallow, deep=asked.deep, params=asked.hold, method=asked.method, rates=asked.rates,
        margin=asked.margin, charge_extras=asked.charge_extras, reanalyse=asked.reanalyse, draws=asked.draws, rng=asked.seed,
    )  # fmt: skip


REPORT = Analysis("depth", depth_report, DepthOptions)


@recipe("depth_figure", "figure", options=DepthFigureOptions, analysis=REPORT)
def depth_figure(report: DepthReport, options: DepthFigureOptions) -> Figure:
    """A figure of the depth report: forest, interaction, equivalence, specification curve, power."""
    from scalinglab.report.figures import benefit, power, specification

    draw = {
        "depth_forest": benefit.depth_forest, "depth_interaction": benefit.depth_interaction,
        "depth_equivalence": benefit.depth_equivalence, "depth_specifications": specification.depth_specifications,
        "depth_power": power.depth_power,
    }[options.figure]  # fmt: skip
    return draw(report, width=options.width)


@recipe("depth_table", "table", options=DepthTableOptions, analysis=REPORT)
def depth_table(report: DepthReport, options: DepthTableOptions) -> Table:
    """effects: the depth benefit of each architecture with interval, p and label; interaction: the differences from the reference."""
    return _effects(report) if options.table == "effects" else _interaction(report)


@recipe("depth_numbers", "numbers", options=DepthOptions, analysis=REPORT)
def depth_numbers(report: DepthReport, options: DepthOptions) -> list[Number]:
    """Gaps, differences, the joint test, margins, what the arms differ in, labels: all that a text says of a depth study."""
    rows = _primary(report)
    outcome = report.outcome
    assert outcome is not None
    out: list[Number] = []
    for r in rows.to_dict("records"):
        name = r["architecture"]
        out += products.with_interval(
            f"{name}_gap", r["estimate"], r["se"], r["low"], r["high"], f"depth benefit of {name}, nats"
        )
        out += [
            products.p_value(f"{name}_p", r["p_holm"], "Holm-adjusted"),
            products.words(f"{name}_label", _label(r["label"])),
        ]
    better, worse = rows[rows["low"] > 0], rows[rows["high"] < 0]
    out += _named("better", better["architecture"]) + _named("worse", worse["architecture"])
    out += _named("open", rows.loc[(rows["low"] <= 0) & (rows["high"] >= 0), "architecture"])
    first = rows.iloc[0]
    c = next(iter(outcome.effects)).contrast
    out += [
        *products.counted("architectures", len(rows)), *products.counted("labels", rows["label"].nunique()),
        *products.counted("runs", len(outcome.intake.runs)), products.words("study", _label(report.study)),
        products.plain("shallow", c.get("depth_shallow", math.nan)), products.plain("deep", c.get("depth_deep", math.nan)),
        products.size("params", float(first["params"])), products.size("tokens", float(first["tokens"])),
        products.plain("margin", outcome.margin, 2, "of equivalence, nats"),
        products.percent("margin_compute", report.options.margin), products.percent("level", 0.95),
        products.words("reference", _pretty(report.gate.reference) if report.gate else ""),
    ]  # fmt: skip
    return out + _joint(report) + _held(report)


def _primary(report: DepthReport) -> pd.DataFrame:
    """Table T3, one row per architecture: the estimand that the labels are about."""
    table = report.tables["T3"]
    rows = table[(table["estimand"] == report.options.estimand) & (table["label"] != "")]
    if not len(rows):
        raise ConfigError("the depth report has no estimate: see `scalinglab depth` on the same table")
    return rows.drop_duplicates("architecture").reset_index(drop=True)


def _effects(report: DepthReport) -> Table:
    rows = _primary(report)
    shown = pd.DataFrame({
        "architecture": [_pretty(a) for a in rows["architecture"]], "depths": rows["contrast"].str.replace("->", "to"),
        "gap, nats": [rounded(v, s)[0] for v, s in zip(rows["estimate"], rows["se"], strict=True)],
        "95 % interval": _intervals(rows), "p (Holm)": [p_value(v) for v in rows["p_holm"]],
        "compute, %": [rounded(v, abs(h - w) / 4)[0] for v, w, h in zip(rows["compute_percent"], rows["compute_percent_low"], rows["compute_percent_high"], strict=True)],
        "label": [_label(v) for v in rows["label"]],
    })  # fmt: skip
    return Table(shown, rows)


def _interaction(report: DepthReport) -> Table:
    rows = report.tables["T4"]
    if not len(rows):
        raise ConfigError("the depth report compares no architectures: it has no reference or only one of them")
    se = (rows["high"] - rows["low"]) / 4  # of the simultaneous interval: its digits
    shown = pd.DataFrame({
        "architecture": [_pretty(a) for a in rows["architecture"]],
        "difference, nats": [rounded(v, s)[0] for v, s in zip(rows["difference"], se, strict=True)],
        "simultaneous 95 % interval": _intervals(rows.assign(se=se)), "p (max-t)": [p_value(v) for v in rows["p_max_t"]],
        "shrunken": [rounded(v, s)[0] for v, s in zip(rows["shrunken"], se, strict=True)],
    })  # fmt: skip
    return Table(shown, rows)


def _intervals(rows: pd.DataFrame) -> list[str]:
    return [
        f"[{rounded(a, s)[0]}, {rounded(b, s)[0]}]"
        for a, b, s in zip(rows["low"], rows["high"], rows["se"], strict=True)
    ]


def _joint(report: DepthReport) -> list[Number]:
    """The test that all architectures have one depth profile, and the differences from the reference."""
    gate = report.gate
    if gate is None:
        return []
    out = [
        products.plain("f", gate.statistic, 3), products.plain("f_df", gate.df[0]), products.plain("f_error_df", gate.df[1]),
        products.p_value("f_p", gate.p), products.p_value("f_bootstrap_p", gate.p_bootstrap),
    ]  # fmt: skip
    for name, r in gate.contrasts.iterrows():
        se = (r["high"] - r["low"]) / 4
        out += products.with_interval(
            f"{name}_difference",
            r["estimate"],
            se,
            r["low"],
            r["high"],
            f"gap of {name} less that of {gate.reference}, nats",
        )
        out.append(products.p_value(f"{name}_difference_p", r["p_max_t"]))
    apart = [a for a, r in gate.contrasts.iterrows() if r["low"] > 0 or r["high"] < 0]
    return out + _named("apart", apart)


def _held(report: DepthReport) -> list[Number]:
    """What the two shapes differ in besides depth, what that alone predicts, and the smallest gap that is found."""
    from scalinglab.report.figures.power import power_of
    from scalinglab.report.html.arms import arms

    names = {
        "Backbone parameters": "backbone_growth", "Total parameters": "total_growth", "FLOPs (causal attention)": "flops_growth",
    }  # fmt: skip
    out = [
        products.percent(names[h.name], h.change, 2, f"{h.name}, deep over shallow")
        for h in arms(report)
        if h.name in names
    ]
    assert report.outcome is not None
    predicted = [
        e.correction.spurious for e in report.outcome.effects
        if e.estimand == "E1" and not e.variant and e.correction.needed and math.isfinite(e.correction.spurious)
    ]  # fmt: skip
    if predicted:
        out.append(products.plain("confound", max(predicted), 2, "gap that unequal sizes alone predict, nats"))
    with contextlib.suppress(ConfigError):  # a study that bears no power analysis
        out.append(products.plain("detectable", power_of(report).now, 2, "gap found with power .8, nats"))
    return out


def _named(name: str, architectures: Any) -> list[Number]:
    """How many, and which."""
    from scalinglab.report.html.wording import and_list

    names = [_pretty(str(a)) for a in architectures]
    return [*products.counted(name, len(names)), products.words(f"{name}_names", and_list(names) if names else "none")]


def _label(code: str) -> str:
    """A label in words, as within a sentence."""
    from scalinglab.report.html.wording import wording

    short = wording(code).short
    return short[:1].lower() + short[1:]


def _pretty(name: str) -> str:
    return NAMES.get(name, name)

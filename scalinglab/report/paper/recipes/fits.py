"""Recipes from a fitted law: `fit_figure`, `fit_table`, `fit_numbers`. The input is a run table or a question (fits/*.toml)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit, fit
from scalinglab.questions import read_question
from scalinglab.readers import read_runs
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Analysis, Inputs, Options, in_tree, recipe
from scalinglab.report.tables import parameter_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FitFigure = Literal["shape_valley", "isoflop", "loss_vs_scale", "residuals", "frontier", "profile", "forest"]


class FitOptions(Options, kw_only=True):
    """Those of `fit` and `read_runs`; of a question they come from its file."""

    law: str | None = None
    objective: str = "gaussian"
    by: str | None = None
    share: list[str] | str | None = None
    fixed: dict[str, float] = msgspec.field(default_factory=dict)
    where: str | None = None
    columns: dict[str, str] = msgspec.field(default_factory=dict)
    params: Literal["backbone", "total", "as given"] = "backbone"


class FitFigureOptions(FitOptions, kw_only=True):
    """Which figure of a fit, for which width."""

    figure: FitFigure
    width: Literal["column", "page"] | None = None


class FitTableOptions(FitOptions, kw_only=True):
    """The level of the table's intervals."""

    level: float = 0.95


@dataclass(frozen=True)
class Fitted:
    """A fit, and the true parameters where the runs were simulated from known ones."""

    fit: Fit
    truth: dict[str, float] = field(default_factory=dict)


def fitted(inputs: Inputs, asked: FitOptions) -> Fitted:
    """Fit a law to a run table, or answer a question."""
    name = inputs.names[0]
    if name.endswith(".toml"):
        if asked != FitOptions():
            raise ConfigError(
                f"{name} says how to fit; leave law, by, share, ... out of the options here, or name the runs themselves"
            )
        q = read_question(name)
        sources = tuple(in_tree(run, Path(name)) for run in ([q.runs] if isinstance(q.runs, str) else q.runs))
        runs = read_runs(list(sources), columns=q.columns, where=q.where, params=q.params, key=q.key)  # type: ignore[arg-type]
        made = fit(
            q.law, runs, objective=q.objective, by=q.by, share=q.share, fixed=q.fixed, weights=q.weights, rng=q.seed
        )
    else:
        if asked.law is None:
            raise ConfigError(f"{name} is a table: say which law = ... in the options")
        runs = inputs.runs(where=asked.where, columns=asked.columns, params=asked.params)
        share = () if asked.share is None else asked.share
        made = fit(asked.law, runs, objective=asked.objective, by=asked.by, share=share, fixed=asked.fixed)
        sources = inputs.names
    return Fitted(made, _truth(sources) if len(sources) == 1 else {})


FIT = Analysis("fit", fitted, FitOptions)


@recipe("fit_figure", "figure", options=FitFigureOptions, analysis=FIT, most=1)
def fit_figure(made: Fitted, options: FitFigureOptions) -> Figure:
    """A figure of a fit: shape valley, isoflop, loss against scale, residuals, frontier, profile, forest."""
    from scalinglab.report.figures import budgets, curves, estimates, optimum, profiles, remainder, valley

    draw: Any = {
        "shape_valley": valley.shape_valley, "isoflop": budgets.isoflop, "loss_vs_scale": curves.loss_vs_scale,
        "residuals": remainder.residuals, "frontier": optimum.frontier, "profile": profiles.profile, "forest": estimates.forest,
    }[options.figure]  # fmt: skip
    figure: Figure = draw(made.fit) if options.width is None else draw(made.fit, width=options.width)
    return figure


@recipe("fit_table", "table", options=FitTableOptions, analysis=FIT, most=1)
def fit_table(made: Fitted, options: FitTableOptions) -> Table:
    """Parameters and derived parameters of a fit with their intervals, and the truth where it is known."""
    shown = parameter_table(made.fit, style="compact", level=options.level)
    data = made.fit.to_frame(options.level).reset_index(names="parameter")
    if made.truth:
        true = [made.truth.get(str(name), math.nan) for name in data["parameter"]]
        data["truth"] = true
        shown.insert(1, "truth", ["–" if math.isnan(t) else products.tables.plain(t, 4) for t in true])
    if bool((shown["identified"] != "no").all()):
        shown = shown.drop(columns="identified")
    return Table(shown, data)


@recipe("fit_numbers", "numbers", options=FitTableOptions, analysis=FIT, most=1)
def fit_numbers(made: Fitted, options: FitTableOptions) -> list[Number]:
    """Each parameter with its limits (and truth), how many intervals hold the truth, runs and rows."""
    table = made.fit.to_frame(options.level)
    out: list[Number] = []
    held = known = 0
    for key, r in table.iterrows():
        name = str(key).replace("[", "_").removesuffix("]")
        if r["kind"] == "fixed":
            out.append(products.plain(name, r["estimate"]))
            continue
        out += products.with_interval(name, r["estimate"], r["se"], r["low"], r["high"], str(key))
        if str(key) in made.truth:
            true = made.truth[str(key)]
            out.append(products.plain(f"{name}_true", true, 3, f"true {key}"))
            known, held = known + 1, held + bool(r["low"] <= true <= r["high"])
    if known:
        out += [*products.counted("known", known), *products.counted("held", held, "intervals that hold the truth")]
    out += [
        *products.counted("runs", made.fit.n_runs), *products.counted("rows", len(made.fit.runs)),
        products.words("status", made.fit.status.replace("_", " ")), products.percent("level", options.level),
        *products.counted("starts", made.fit.search.starts), *products.counted("agreeing", made.fit.search.agreeing),
    ]  # fmt: skip
    return out


def _truth(sources: tuple[str, ...]) -> dict[str, float]:
    """True parameters, also derived ones, that the meta file of a simulated table states."""
    meta = Inputs(sources).meta()
    params = meta.get("truth", {}).get("params", {}) if isinstance(meta.get("truth"), dict) else {}
    derived = {f"r_star[{level}]": value for level, value in meta.get("r_star", {}).items()}
    return {**{str(k): float(v) for k, v in params.items()}, **derived}

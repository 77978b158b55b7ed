"""Recipes from simulation studies with known truth: coverage of intervals, power of the mis-scaling verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Analysis, Inputs, Options, recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOMINAL = 0.95
_SHOWN = {
    "gamma1": r"$\gamma_1$", "gamma2": r"$\gamma_2$", "ln_r_star": r"$\ln r^*$", "alpha": r"$\alpha$", "beta": r"$\beta$",
    "ln_E": r"$\ln E$", "loss_1B_100B": "loss at 1B, 100B", "r_star": r"$r^*$ (Fieller)",
}  # fmt: skip
_SCENARIOS = {  # of benchmarks/coverage.py: errors of log loss
    "A": "A: independent rows (0.5 %)",
    "B": "B: runs 0.3 %, rows AR(1) 0.4 %",
    "C": "C: runs 1.0 %, rows AR(1) 0.6 %",
}
_BASE = "gate"  # of benchmarks/misscaling_power.py: the plan that the others change


class PowerOptions(Options, kw_only=True):
    """plans: rows to show, in this order; all by default. names: what to call them."""

    plans: list[str] | None = None
    names: dict[str, str] = msgspec.field(default_factory=dict)


def _columns(frame: pd.DataFrame, needed: tuple[str, ...], name: str) -> pd.DataFrame:
    missing = [c for c in needed if c not in frame]
    if missing:
        raise ConfigError(f"{name}: needs a column {missing[0]}; there are {', '.join(map(str, frame.columns))}")
    return frame


def coverage(inputs: Inputs, asked: Options) -> pd.DataFrame:
    """The table of benchmarks/coverage.py."""
    return _columns(
        inputs.table(), ("scenario", "runs", "target", "replicates", "coverage", "mc_se", "gate"), inputs.names[0]
    )


def power(inputs: Inputs, asked: Options) -> pd.DataFrame:
    """The table of benchmarks/misscaling_power.py."""
    needed = ("plan", "truth", "runs", "trials", "right", "wrongly_positive", "wrong", "inconclusive")
    return _columns(inputs.table(), needed, inputs.names[0])


COVERAGE = Analysis("coverage", coverage, Options)
POWER = Analysis("power", power, Options)


@recipe("coverage_figure", "figure", analysis=COVERAGE, most=1)
def coverage_figure(table: pd.DataFrame, options: Options) -> Figure:
    """Coverage of nominal 95 % intervals by number of runs, a panel per noise scenario, with Monte-Carlo errors."""
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    scenarios, targets = list(dict.fromkeys(table["scenario"])), list(dict.fromkeys(table["target"]))
    sizes = sorted(table["runs"].unique())
    with canvas("page", 2.5) as figure:
        axes = figure.subplots(1, len(scenarios), sharey=True, squeeze=False)[0]
        for ax, scenario in zip(axes, scenarios, strict=True):
            ax.axhspan(0.93, 0.97, color=style.PALE, alpha=0.5, lw=0)
            ax.axhline(_NOMINAL, color=style.GREY, lw=0.6)
            for k, target in enumerate(targets):
                rows = table[(table["scenario"] == scenario) & (table["target"] == target)].sort_values("runs")
                x = np.array([sizes.index(v) for v in rows["runs"]]) + (k - (len(targets) - 1) / 2) * 0.09
                known = k < len(style.PALETTE)  # then grey and hollow: no colour stands twice
                ax.errorbar(
                    x,
                    rows["coverage"],
                    yerr=1.96 * rows["mc_se"],
                    ls="",
                    marker=style.marker_of(k),
                    ms=3,
                    lw=0.7,
                    color=style.colour_of(k) if known else style.GREY,
                    mfc=style.colour_of(k) if known else "white",
                    label=_SHOWN.get(target, target),
                )
            ax.set_xticks(range(len(sizes)), [str(s) for s in sizes])
            ax.set_xlabel("Runs")
            ax.set_title(_SCENARIOS.get(scenario, f"Scenario {scenario}").replace(" %", "\u00a0%"))
        axes[0].set_ylabel("Coverage")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=len(targets), handletextpad=0.1, columnspacing=0.9
        )
        style.footnote(
            figure,
            "Titles: standard deviations of the errors of log loss, between runs and between the checkpoints of a run. Grey: nominal "
            "95\u00a0% intervals pass from .93 to .97. Bars: 95\u00a0% Monte-Carlo intervals.",
        )
    return figure


@recipe("coverage_table", "table", analysis=COVERAGE, most=1)
def coverage_table(table: pd.DataFrame, options: Options) -> Table:
    """Coverage, a row per target and a column per scenario and number of runs."""
    table = table.assign(text=[f"{v:.3f}".lstrip("0") for v in table["coverage"]])
    targets = dict.fromkeys(table["target"])
    columns = {
        f"{scenario} {runs}": rows.set_index("target")["text"].reindex(targets, fill_value="–")
        for (scenario, runs), rows in table.groupby(["scenario", "runs"], sort=False)
    }
    shown = pd.DataFrame({"target": list(targets), **{name: list(texts) for name, texts in columns.items()}})
    return Table(shown, table.drop(columns="text"))


@recipe("coverage_numbers", "numbers", analysis=COVERAGE, most=1)
def coverage_numbers(table: pd.DataFrame, options: Options) -> list[Number]:
    """How many intervals pass, are conservative, fail; the least and the greatest coverage and where; simulations."""
    out: list[Number] = []
    for gate in ("pass", "conservative", "over", "fail"):
        out += products.counted(gate, int((table["gate"] == gate).sum()))
    least, most = table.loc[table["coverage"].idxmin()], table.loc[table["coverage"].idxmax()]
    failing = table[table["gate"] == "fail"]
    out += [
        *products.counted("settings", len(table)), *products.counted("replicates", int(table["replicates"].min())),
        products.percent("least", float(least["coverage"]), 3), products.percent("most", float(most["coverage"]), 3),
        products.plain("most_runs", float(most["runs"])), products.words("most_scenario", str(most["scenario"])),
        products.percent("error", float(table["mc_se"].max()), 2, "largest Monte-Carlo standard error"),
        *products.counted("fewest_runs", int(table["runs"].min())), *products.counted("greatest_runs", int(table["runs"].max())),
        *products.counted("scenarios", int(table["scenario"].nunique())), products.percent("nominal", _NOMINAL),
        products.words("fail_scenarios", " and ".join(sorted(set(failing["scenario"]))) or "none"),
        products.words("fail_runs", " and ".join(str(v) for v in sorted(set(failing["runs"]))) or "none"),
    ]  # fmt: skip
    return out


@recipe("verdict_power_figure", "figure", options=PowerOptions, analysis=POWER, most=1)
def verdict_power_figure(table: pd.DataFrame, options: PowerOptions) -> Figure:
    """Share of right verdicts by plan, a marker per truth."""
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    table = _chosen(table, options)
    plans, truths = list(dict.fromkeys(table["plan"])), list(dict.fromkeys(table["truth"]))
    with canvas("page", 0.8 + 0.21 * len(plans)) as figure:
        ax = figure.add_subplot()
        for k, truth in enumerate(truths):
            rows = table[table["truth"] == truth].set_index("plan").loc[plans]
            y = np.arange(len(plans)) + (k - (len(truths) - 1) / 2) * 0.16
            p, low, high = _wilson(rows["right"], rows["trials"])
            ax.errorbar(
                p,
                y,
                xerr=[p - low, high - p],
                ls="",
                marker=style.marker_of(k),
                ms=3.4,
                lw=0.8,
                color=style.colour_of(k),
                label=truth,
            )
        runs = table.drop_duplicates("plan").set_index("plan")["runs"]
        names = {_BASE: "base plan", **options.names}
        ax.set_yticks(range(len(plans)), [f"{names.get(p, p)} ({runs[p]} runs)" for p in plans])
        ax.set_ylim(len(plans) - 0.4, -0.6)
        ax.set_xlim(-0.02, 1.02)
        ax.axvline(0.8, color=style.GREY, lw=0.6, ls=style.DASHES[1])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel("Share of simulated studies with the right verdict")
        figure.legend(loc="outside upper left", ncols=len(truths))
        style.footnote(
            figure,
            "Colours: what is true of the simulated studies. Bars: 95\u00a0% Wilson intervals over studies. Dashed: power .8."
            + _base_plan(table, names[_BASE]),
        )
    return figure


def _base_plan(table: pd.DataFrame, name: str) -> str:
    """What the plan is that the others change, where the table has it and says so."""
    own = table[table["plan"] == _BASE]
    if not len(own) or not {"depths", "rates", "seeds", "sigma", "tau"} <= set(table):
        return ""
    r = own.iloc[0]
    return (
        f" {name[:1].upper()}{name[1:]}: {r['depths']} depths, {r['rates']} learning rates, {r['seeds']} seeds, noise of a run sigma "
        f"{r['sigma']:g} and of a shape tau {r['tau']:g} nats; the others change what they name."
    )


@recipe("verdict_power_table", "table", options=PowerOptions, analysis=POWER, most=1)
def verdict_power_table(table: pd.DataFrame, options: PowerOptions) -> Table:
    """Right, wrongly positive and open verdicts by plan and truth."""
    table = _chosen(table, options)
    shown = table[["plan", "truth", "runs"]].assign(
        **{
            name: [f"{v:.3f}" for v in table[column].clip(lower=0)]
            for name, column in (("right", "right"), ("wrongly positive", "wrongly_positive"), ("open", "inconclusive"))
        }
    )
    return Table(shown, table)


@recipe("verdict_power_numbers", "numbers", options=PowerOptions, analysis=POWER, most=1)
def verdict_power_numbers(table: pd.DataFrame, options: PowerOptions) -> list[Number]:
    """Of every plan the least power over the truths; the greatest share of wrong positives; trials."""
    table = _chosen(table, options)
    out: list[Number] = []
    for plan, rows in table.groupby("plan", sort=False):
        name = "plan_" + "_".join(str(plan).replace(".", " point ").replace("%", " percent ").replace(",", " ").split())
        out += [
            products.percent(f"{name}_least", float(rows["right"].min()), 3, f"least power of plan {plan}"),
            products.plain(f"{name}_runs", float(rows["runs"].iloc[0])),
        ]
    out += [
        products.percent("wrongly_positive_most", float(table["wrongly_positive"].max()), 2),
        *products.counted("trials", int(table["trials"].min())), *products.counted("truths", int(table["truth"].nunique())),
        *products.counted("plans", int(table["plan"].nunique())),
    ]  # fmt: skip
    return out


def _wilson(share: pd.Series, trials: pd.Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares with their 95 % Wilson limits, which keep a width at 0 and 1."""
    p, n, z = share.to_numpy(float), trials.to_numpy(float), 1.96
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return p, np.minimum(p, middle - half), np.maximum(p, middle + half)


def _chosen(table: pd.DataFrame, options: PowerOptions) -> pd.DataFrame:
    if options.plans is None:
        return table
    for plan in options.plans:
        if plan not in set(table["plan"]):
            raise ConfigError(f"plans: there is no plan {plan!r}; there are {', '.join(dict.fromkeys(table['plan']))}")
    order = {plan: k for k, plan in enumerate(options.plans)}
    return (
        table[table["plan"].isin(order)]
        .sort_values("plan", key=lambda s: s.map(order), kind="stable")
        .reset_index(drop=True)
    )

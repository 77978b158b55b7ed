"""Recipes on irreducible losses: does a fitted floor agree with an entropy that is known? One run table per corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.fitting import fit
from scalinglab.report.paper import products
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import Analysis, Inputs, Options, recipe
from scalinglab.report.tables import rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FloorOptions(Options, kw_only=True):
    """The law whose floor is held against the entropy."""

    law: str = "chinchilla"


def floors(inputs: Inputs, asked: FloorOptions) -> pd.DataFrame:
    """One row per table: corpus, its entropy (column floor), fitted E with limits, whether they hold it, what the checks say."""
    rows = []
    for name in inputs.names:
        runs = Inputs((name,)).runs()
        if "floor" not in runs or len(runs["floor"].unique()) != 1:
            raise ConfigError(f"{name}: needs a column floor with one value, the entropy of its corpus")
        entropy = float(runs["floor"].iloc[0])
        law = fit(asked.law, runs)
        r = law.to_frame().loc["E"]
        low, high = float(r["low"]), float(r["high"])
        corpus = str(runs["corpus"].iloc[0]) if "corpus" in runs else name.rpartition("/")[2].partition(".")[0]
        codes = list(dict.fromkeys(c.code for c in law.checks if c.level in ("warn", "block") and c.code))
        rows.append({
            "corpus": corpus, "sizes": int(runs["params"].nunique()), "budgets": int(runs["tokens"].nunique()), "runs": law.n_runs,
            "entropy": entropy, "E": float(law.params["E"]), "se": float(r["se"]), "low": low, "high": high,
            "agrees": low <= entropy <= high, "checks": " ".join(codes), "lowest": float(runs["loss"].min()),
        })  # fmt: skip
    return pd.DataFrame(rows)


FLOORS = Analysis("floors", floors, FloorOptions)


@recipe("floor_table", "table", options=FloorOptions, analysis=FLOORS)
def floor_table(made: pd.DataFrame, options: FloorOptions) -> Table:
    """Entropy of each corpus beside the fitted floor."""
    shown = pd.DataFrame({
        "corpus": made["corpus"], "sizes": made["sizes"], "budgets": made["budgets"], "runs": made["runs"],
        "entropy": [f"{v:.4f}" for v in made["entropy"]],
        "fitted E": [_rounded(r["E"], r) for r in made.to_dict("records")],
        "95 % interval": [_interval(r) for r in made.to_dict("records")],
        "holds it": ["yes" if v else "no" for v in made["agrees"]],
        "collapse reported": ["yes" if "E_COLLAPSE" in v else "no" for v in made["checks"]],
    })  # fmt: skip
    return Table(shown, made)


@recipe("floor_numbers", "numbers", options=FloorOptions, analysis=FLOORS)
def floor_numbers(made: pd.DataFrame, options: FloorOptions) -> list[Number]:
    """Entropy, fitted floor and limits per corpus; how many agree."""
    out: list[Number] = []
    for r in made.to_dict("records"):
        out.append(products.plain(f"{r['corpus']}_entropy", r["entropy"], 4))
        out += [
            Number(
                f"{r['corpus']}_{name}", r[key], _rounded(r[key], r).replace("−", "-"), "fitted floor, nats", r["se"]
            )
            for name, key in (("floor", "E"), ("floor_low", "low"), ("floor_high", "high"))
            if np.isfinite(r[key])  # a floor at its bound has no interval
        ]
    agree = made[made["agrees"]]
    out += [
        *products.counted("corpora", len(made)), *products.counted("agreeing", len(agree)),
        products.words("agreeing_names", ", ".join(agree["corpus"]) or "none"),
        products.words("other_names", " and ".join(made.loc[~made["agrees"], "corpus"]) or "none"),
        *products.counted("disagreeing", int((~made["agrees"]).sum())),
        *products.counted("flagged", int(made.loc[~made["agrees"], "checks"].str.contains("E_COLLAPSE").sum()), "disagreeing fits that report a collapse"),
    ]  # fmt: skip
    return out


@recipe("floor_figure", "figure", options=FloorOptions, analysis=FLOORS)
def floor_figure(made: pd.DataFrame, options: FloorOptions) -> Figure:
    """Fitted floors with intervals against the entropies, and the lowest loss that was reached."""
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    with canvas("column", 0.75 + 0.36 * len(made)) as figure:
        ax = figure.add_subplot()
        y = np.arange(len(made))
        ax.hlines(y, made["low"], made["high"], color=style.colour_of(0), lw=1.4)
        ax.plot(made["E"], y, ls="", marker="o", color=style.colour_of(0), label="fitted floor, 95 % interval")
        ax.plot(made["entropy"], y, ls="", marker="|", ms=13, mew=1.6, color=style.INK, label="entropy")
        ax.plot(made["lowest"], y, ls="", marker="v", ms=4, mfc="white", color=style.GREY, label="lowest loss reached")
        ax.set_yticks(y, made["corpus"])
        ax.set_ylim(len(made) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel("Loss (nats per token)")
        figure.legend(loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=0.8)
    return figure


def _interval(row: dict[str, float]) -> str:
    if not np.isfinite(row["low"]):
        return "at its bound" if row["E"] == 0 else "not available"
    return f"[{_rounded(row['low'], row)}, {_rounded(row['high'], row)}]"


def _rounded(value: float, row: dict[str, float]) -> str:
    """By the standard error; where a bound takes it away, by the width of the interval."""
    se = row["se"] if np.isfinite(row["se"]) and row["se"] > 0 else (row["high"] - row["low"]) / 4
    return rounded(value, se)[0]

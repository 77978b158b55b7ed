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
    """Fitted floor and lowest loss less the entropy, with intervals; the floors and entropies themselves in words.

    The axis holds the intervals; a floor beyond it is an arrow with its distance.
    """
    from scalinglab.report import style
    from scalinglab.report.paper.canvas import canvas

    off = {name: (made[name] - made["entropy"]).to_numpy(float) for name in ("E", "low", "high", "lowest")}
    left, right = _span(off)
    with canvas("column", 0.85 + 0.4 * len(made)) as figure:
        ax = figure.add_subplot()
        y = np.arange(len(made))
        ax.vlines(np.zeros(len(y)), y - 0.15, y + 0.25, color=style.INK, lw=1.4, zorder=3, label="entropy")
        ax.hlines(y, off["low"], off["high"], color=style.colour_of(0), lw=1.4)
        inside = off["E"] >= left
        ax.plot(
            off["E"][inside],
            y[inside],
            ls="",
            marker="o",
            color=style.colour_of(0),
            label="fitted floor, 95\u00a0% interval",
        )
        ax.plot(off["lowest"], y, ls="", marker="v", ms=4, mfc="white", color=style.GREY, label="lowest loss reached")
        ax.set_xlim(left, right)
        for k, r in enumerate(made.to_dict("records")):
            if not inside[k]:
                ax.plot([left], [k], ls="", marker="<", color=style.colour_of(0), clip_on=False)
                told = f"{off['E'][k]:.2f}".replace("-", "\N{MINUS SIGN}")
                ax.annotate(
                    told, (left, k), xytext=(5, 0), textcoords="offset points", fontsize=style.SMALL, va="center"
                )
            for x, ha, text in ((0.0, "left", r["corpus"]), (1.0, "right", _in_words(r))):
                style.haloed(ax.annotate(text, (x, k), xycoords=("axes fraction", "data"), xytext=(0, 9), textcoords="offset points",
                             fontsize=style.SMALL, ha=ha, va="center", color=style.INK if ha == "left" else style.GREY))  # fmt: skip
        ax.set_yticks([])
        ax.set_ylim(len(made) - 0.6, -0.75)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel("Loss less the entropy (nats/token)")
        figure.legend(loc="outside upper left", ncols=3, handletextpad=0.3, handlelength=1.0, columnspacing=0.8)
    return figure


def _span(off: dict[str, np.ndarray]) -> tuple[float, float]:
    """Axis of the differences: intervals, lowest losses, zero; a floor without an interval where none has one."""
    known = np.isfinite(off["low"]) & np.isfinite(off["high"])
    seen = [off["low"][known], off["high"][known], off["E"][known] if known.any() else off["E"], off["lowest"], [0.0]]
    values = np.concatenate(seen)
    room = 0.06 * (float(np.ptp(values)) or 1.0)
    return float(values.min()) - room, float(values.max()) + room


def _in_words(r: dict[str, float]) -> str:
    """Floor, its interval and the entropy as numbers."""
    return (
        f"$E$ {_rounded(r['E'], r)} {_interval(r)}, entropy {r['entropy']:.3f}"
        if r["E"]
        else f"$E$ at its bound 0, entropy {r['entropy']:.3f}"
    )


def _interval(row: dict[str, float]) -> str:
    if not np.isfinite(row["low"]):
        return "at its bound" if row["E"] == 0 else "not available"
    return f"[{_rounded(row['low'], row)}, {_rounded(row['high'], row)}]"


def _rounded(value: float, row: dict[str, float]) -> str:
    """By the standard error; where a bound takes it away, by the width of the interval."""
    se = row["se"] if np.isfinite(row["se"]) and row["se"] > 0 else (row["high"] - row["low"]) / 4
    return rounded(value, se)[0]

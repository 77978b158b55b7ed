"""Every public study with runs of more than one shape, and what it identifies.

Errors are by shape everywhere: runs and checkpoints of one shape share its misfit, so they are one cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.depth_benefit.rates import published_rates
from scalinglab.errors import SchemaError
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.objectives import Gaussian
from scalinglab.published import depthbench, published_numbers
from scalinglab.replications.effects import (
    QUANTITIES,
    Context,
    ShapeEffect,
    law_values,
    nothing,
    of_law,
    of_parabola,
    parabola,
)
from scalinglab.replications.gemstones import FILE as GEMSTONES
from scalinglab.replications.gemstones import VOCAB, gemstones
from scalinglab.replications.targets import run_log
from scalinglab.uncertainty import t_quantile

_PLAIN = Gaussian(variance="constant")
_STABLE = 0.1  # nats: SD over seeds up to which a configuration counts as one
_OTHER = "gemstones_other_val.csv"


@dataclass(frozen=True)
class Source:
    """A study: the file it needs, and its effects with N counted as "backbone" or "total"."""

    study: str
    needs: str
    effects: Callable[[Path, str], list[ShapeEffect]]


def gemstones_effects(
    data: Path, n: str = "backbone", *, subset: str = "fit_hot_100b", evaluated: str = ""
) -> list[ShapeEffect]:
    """Gemstones by the shape law. subset : a published one; evaluated : another validation set (dclm, fineweb_edu)."""
    cooled = "yes" if subset == "fit_cool_end" else "no"
    rates = "one rule, halved" if "lr_ablation" in subset else "one rule"
    about = Context(
        "Gemstones", "pre_ln", n, rates, cooled, f"McLeish et al. 2025, arXiv:2502.06857{', ' + evaluated if evaluated else ''}"
    )  # fmt: skip
    table = gemstones(data, subset, n) if not evaluated else _other_validation(data, n, evaluated)
    return of_law(fit("shape", table, objective=_PLAIN), about)


def _other_validation(data: Path, n: str, evaluated: str) -> pd.DataFrame:
    table = run_log(
        data,
        _OTHER,
        ("params", "tokens", "loss", "depth", "width"),
        f"eval_dataset == '{evaluated}' and tokens >= 1e10",
    )
    removed = {"total": 0, "backbone": 2}[n]
    return table.assign(
        params=table["params"] - removed * VOCAB * table["width"],
        run_id=table["depth"].astype(str) + "x" + table["width"].astype(str),
    )


def chinchilla_effects(data: Path, n: str = "backbone") -> list[ShapeEffect]:
    """The shapes behind Chinchilla's figure 4, by the shape law."""
    about = Context(
        "Chinchilla", "pre_ln", n, "unknown", "yes", "Hoffmann et al. 2022, points read by Besiroglu et al. 2024"
    )
    table = run_log(
        data, "chinchilla_besiroglu.csv", ("params_non_embedding", "table_params_M", "in_fit_240"), "in_fit_240 == 1"
    )
    size = table["params_non_embedding"] if n == "backbone" else table["table_params_M"] * 1e6
    shape = table["depth"].astype(str) + "x" + table["width"].astype(str)
    return of_law(fit("shape", table.assign(params=size, run_id=shape), objective=_PLAIN), about)


def depthbench_effects(
    _: Path,
    n: str = "backbone",
    *,
    corrected: bool = True,
    grids: tuple[str, ...] = ("400M", "300M"),
    without: tuple[str, ...] = (),
) -> list[ShapeEffect]:
    """DepthBench's ten architectures, a parabola in u each.

    backbone : both grids, each with its level; what differs in backbone parameters is taken out at the published rate of
    `besiroglu2024` (25 % standard error, carried on) unless `corrected` is False. total : the 400M grid as it is. The variance
    about the parabolas is common to the architectures: with two degrees of freedom each, their own would be a guess.
    """
    table = depthbench()
    table["params"] = table["params_backbone" if n == "backbone" else "params_total"]
    kept = table["match_group"].isin(grids if n == "backbone" else ("400M",)) & ~table["run_id"].isin(without)
    table = table[kept].reset_index(drop=True)
    mean = np.log(table["params"]).groupby(table["match_group"]).transform("mean")
    more = (np.log(table["params"]) - mean).to_numpy(np.float64)
    rates = published_rates(params=float(np.exp(mean.mean())), tokens=float(table["tokens"].median()))
    slope = rates.params / table["loss"].to_numpy(np.float64) if n == "backbone" and corrected else np.zeros(len(table))
    relative = math.sqrt(float(rates.cov[0, 0])) / rates.params
    found = {}
    for name, rows in table.groupby("architecture").indices.items():
        own = table.iloc[rows]
        u = np.log(own["width"] / own["depth"] / R0).to_numpy(np.float64)
        level = pd.get_dummies(own["match_group"]).to_numpy(np.float64)
        y = np.log(own["loss"].to_numpy(np.float64))
        shift = parabola(relative * (slope * more)[rows], u, level).c
        found[str(name)] = own, parabola(y + (slope * more)[rows], u, level), shift
    df = sum(made.df for _, made, _ in found.values())
    variance = sum(made.variance * made.df for _, made, _ in found.values()) / df
    out = []
    for name, (own, made, shift) in found.items():
        about = Context(
            "DepthBench", name, n, "per shape", "yes", "Wang et al. 2026, arXiv:2609.32534", name == "pre_ln"
        )
        pooled = type(made)(made.c, made.unit, variance, df)
        out += of_parabola(pooled, about, own, shift=shift if n == "backbone" and corrected else None)
    return out


def convention_shift(data: Path) -> pd.DataFrame:
    """Gemstones with total less with backbone parameters: the same runs, so the error of the difference is paired.

    Columns estimate, se, df, low, high; index penalty, contrast, optimum.
    """
    fits = [fit("shape", gemstones(data, "fit_hot_100b", n), objective=_PLAIN) for n in ("total", "backbone")]
    point = [law_values(m)(m.params.to_frame().T)[0] for m in fits]
    moved = [law_values(m)(m.jackknife.params) - p for m, p in zip(fits, point, strict=True)]
    g = len(moved[0])
    se = np.sqrt((g - 1) / g * ((moved[0] - moved[1]) ** 2).sum(0))
    out = pd.DataFrame({"estimate": point[0] - point[1], "se": se, "df": g - 1.0}, index=list(QUANTITIES))
    half = t_quantile(0.975, g - 1) * se
    return out.assign(low=out["estimate"] - half, high=out["estimate"] + half)


def drift(data: Path, n: str = "backbone") -> pd.Series:
    """How Gemstones' best aspect ratio moves with size: d ln r* / d ln N of the law shape_drift, with its jackknife interval."""
    made = fit("shape_drift", gemstones(data, "fit_hot_100b", n), objective=_PLAIN)
    found = made.jackknife.interval(lambda p: (-p["gamma3"] / (2 * p["gamma2"])).to_numpy(np.float64))
    return pd.Series({"estimate": float(found.estimate), "low": float(found.low), "high": float(found.high)})


def attnres_effects(_: Path, __: str = "backbone") -> list[ShapeEffect]:
    """Best shapes of a published sweep at fixed compute, printed without intervals: to be seen, not to be pooled."""
    told = published_numbers("attnres2026").set_index("quantity")
    out = []
    for name, quantity, baseline in (
        ("pre_ln", "best d/L of the baseline", True),
        ("attnres", "best d/L of AttnRes", False),
    ):
        about = Context(
            "AttnRes paper", name, "active", "unknown", "unknown", str(told.loc[quantity, "source"]), baseline
        )
        empty = pd.DataFrame({"depth": [1.0], "width": [math.nan], "params": [2.3e8], "tokens": [math.nan]})
        made = nothing(about, empty, "printed without an interval, at fixed compute")[2]
        out.append(replace(made, estimate=math.log(float(told.loc[quantity, "value"])), shapes=25))
    return out


def decisive_run(architecture: str = "pre_ln") -> str:
    """The run of DepthBench that moves the penalty of an architecture most when it is left out."""
    table = depthbench()
    runs = table.loc[table["architecture"] == architecture, "run_id"]

    def penalty(without: tuple[str, ...]) -> float:
        made = depthbench_effects(Path(), without=without)
        return next(e.estimate for e in made if e.architecture == architecture and e.quantity == "penalty")

    whole = penalty(())
    return str(max(runs, key=lambda run: abs(penalty((run,)) - whole)))


def snimu_effects(data: Path, n: str = "backbone") -> list[ShapeEffect]:
    """Small models on WikiText-103: two grids, each with its level; size enters with a slope of its own.

    A shape's value is the mean of ln loss over seeds and over the variants that every shape of the grid has and whose seeds
    agree to .1 nats everywhere.
    """
    name = "snimu_wikitext_shapes.csv.gz"
    table = run_log(data, name, ("study", "architecture", "params", "tokens", "loss", "is_final"), "is_final == 1")
    cells = []
    for grid, pattern, matrices in (("v040", "all_norm", 2), ("v030", "v030_scaling", 1)):
        own = table[table["study"].str.contains(pattern)].copy()
        own["params_backbone"] = own["params"] - matrices * VOCAB * own["width"]
        block = own["params_backbone"] / (own["depth"] * own["width"] ** 2)
        if not len(own) or np.ptp(np.log(block)) > 0.01:
            raise SchemaError(f"{data / name}: parameters of {grid} are not those of one block: is this another table?")
        own["log_loss"] = np.log(own["loss"])
        spread = own.groupby(["architecture", "depth", "width"])["loss"].agg(["std", "size"])
        shapes = len(own[["depth", "width"]].drop_duplicates())
        by = spread["std"].fillna(0.0).groupby("architecture")
        kept = by.size().index[(by.size() == shapes) & (by.max() <= _STABLE)]
        own = own[own["architecture"].isin(kept)]
        cells.append(
            own.groupby(["depth", "width"])[["log_loss", "params", "params_backbone", "tokens"]].mean().reset_index()
        )
        cells[-1]["grid"] = grid
    made = pd.concat(cells, ignore_index=True)
    made["params"] = made["params_backbone"] if n == "backbone" else made["params"]
    made["loss"] = np.exp(made["log_loss"])
    about = Context(
        "snimu", "pre_ln", n, "a function of N", "yes", "snimu/attention-experiments, WikiText-103, 2-3 epochs"
    )
    others = np.column_stack([pd.get_dummies(made["grid"]), np.log(made["params"])]).astype(np.float64)
    u = np.log(made["width"] / made["depth"] / R0).to_numpy(np.float64)
    return of_parabola(parabola(made["log_loss"].to_numpy(np.float64), u, others), about, made)


def _line(study: str, name: str, source: str, where: str | None = None, size: str = "params_non_embedding") -> Source:
    """A study whose shapes follow its sizes: it is listed, with how little its aspect ratios vary at a given size."""

    def effects(data: Path, n: str) -> list[ShapeEffect]:
        table = run_log(data, name, ("depth", "width", size), where)
        table = table.assign(params=table[size])
        shapes = table.drop_duplicates(["depth", "width"])
        x = np.log(shapes["params"].to_numpy(np.float64))
        r = np.log(shapes["width"] / shapes["depth"]).to_numpy(np.float64)
        X = np.column_stack([np.ones_like(x), x - x.mean(), (x - x.mean()) ** 2])
        e = r - X @ np.linalg.lstsq(X, r, rcond=None)[0]
        df = len(r) - 3
        why = (
            f"{len(r)} shapes, one or two per size: apart from size ln(d/L) varies by {math.sqrt(e @ e / max(df, 1)):.2f} (SD) on "
            f"{df} degrees of freedom, and the law needs two of them for shape"
        )
        return nothing(Context(study, "pre_ln", n, "unknown", "yes", source), table, why)

    return Source(study, name, effects)


SOURCES: tuple[Source, ...] = (
    Source("Gemstones", GEMSTONES, gemstones_effects),
    Source("DepthBench", "", depthbench_effects),
    Source("Chinchilla", "chinchilla_besiroglu.csv", chinchilla_effects),
    Source("AttnRes paper", "", attnres_effects),
    Source("snimu", "snimu_wikitext_shapes.csv.gz", snimu_effects),
    _line("Gadre", "gadre_overtraining.csv", "Gadre et al. 2024, arXiv:2403.08540"),
    _line("Clark", "routed_lm_curves.csv", "Clark et al. 2022, arXiv:2202.01169", "architecture == 'routed_dense'",
          "params_active"),
    _line("Misfitting", "misfitting_dense.csv", "Li et al. 2025, arXiv:2502.18969"),
    _line("Porian", "porian_isoflop_points.csv", "Porian et al. 2024, arXiv:2406.19146"),
    _line("step-law", "steplaw_dense.csv", "Li et al. 2025, arXiv:2503.04715"),
)  # fmt: skip

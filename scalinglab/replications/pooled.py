"""One estimate from all public studies: what a wrong shape costs, and which shape is best, with what moves the answer.

Primary analysis: one row per study, its pre-norm decoder, N counted as backbone. Ten architectures of one study share its data,
shapes and recipe; as ten rows they would count as ten studies. They are rows of a second analysis, whose interval comes from
leaving out whole studies.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.errors import ScalinglabWarning
from scalinglab.meta_analysis import Heterogeneity, Pooled, Width, pool, widened
from scalinglab.published import published_params
from scalinglab.replications import sources
from scalinglab.replications.effects import QUANTITIES, UNITS, Context, ShapeEffect, nothing
from scalinglab.replications.kaplan import compute_equivalent
from scalinglab.replications.own import own_effects
from scalinglab.replications.sources import SOURCES
from scalinglab.replications.targets import data_folder

COLUMNS = (
    "quantity", "analysis", "studies", "rows", "estimate", "low", "high", "new_low", "new_high", "unit", "tau", "tau_low", "tau_high",
    "I2", "p_Q", "aspect", "aspect_low", "aspect_high", "nats", "compute_kaplan", "compute_kaplan_low", "compute_kaplan_high",
    "compute_chinchilla", "compute_chinchilla_low", "compute_chinchilla_high", "note",
)  # fmt: skip
PRIMARY = "primary: backbone N, pre-norm decoders"
REFERENCE = (3e8, 8e9)  # parameters and tokens at which a share of the loss is turned into nats and compute
_NESTED = "all architectures, studies left out"


@dataclass(frozen=True)
class PooledShape:
    """The pooled estimate.

    effects : one row per study, architecture and quantity, those that can't be pooled too (`enters`, `note`), with `weight`, the
    share in the primary analysis, and `shrunken`, `shrunken_se`, the study's own effect drawn towards the mean. pooled : one row per quantity and analysis. primary : the primary result per quantity; missing
    where fewer than two studies enter.
    """

    effects: pd.DataFrame
    pooled: pd.DataFrame
    primary: Mapping[str, Pooled]

    def summary(self) -> str:
        """The primary results in words."""
        lines = []
        for quantity in QUANTITIES:
            row = self.pooled[(self.pooled["quantity"] == quantity) & (self.pooled["analysis"] == PRIMARY)].iloc[0]
            lines.append(_sentence(quantity, row))
        return "\n".join(lines)


def pooled_shape(
    data: str | Path | None = None, *, own: pd.DataFrame | None = None, reference: str = "pre_ln"
) -> PooledShape:
    """Pool the cost of shape and the best shape over studies.

    Parameters
    ----------
    data
        Folder of public run logs; studies whose file is not there are listed as skipped.
    own
        Runs of one's own (depth, width, params, tokens, loss; architecture): one more study.
    reference
        The architecture of `own` that enters the primary analysis.

    Raises
    ------
    ConfigError, SchemaError
        `data` is no folder; a table lacks a column.
    """
    folder = data_folder(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalinglabWarning)  # what a study does not identify is in its rows
        by_n = {n: _all(folder, n, own, reference) for n in ("backbone", "total")}
        base = by_n["backbone"]
        sets: list[tuple[str, list[ShapeEffect], str]] = [
            (PRIMARY, base, "one row per study; Hartung-Knapp, REML"),
            (
                "total N, pre-norm decoders",
                by_n["total"],
                "N with both vocabulary matrices; DepthBench's 400M grid as it is",
            ),
        ]
        sets += _variants(folder, base)
        shift, drifts = None, []
        if folder is not None and _has(folder, sources.GEMSTONES):
            shift = sources.convention_shift(folder)
            drifts = [_drift_row(n, sources.drift(folder, n)) for n in ("backbone", "total")]
    rows: list[dict[str, object]] = []
    primary: dict[str, Pooled] = {}
    told: dict[tuple[str, str], list[float]] = {}  # weight, shrunken, its se
    for quantity in QUANTITIES:
        for name, effects, note in sets:
            row, made = _pooled(quantity, name, _entering(effects, quantity), note)
            rows.append(row)
            if name == PRIMARY and made is not None:
                primary[quantity] = made
                kept = _entering(effects, quantity)
                for e, *values in zip(kept, made.weights, made.shrunken, made.shrunken_se, strict=True):
                    told[quantity, e.study] = values
        rows += _methods(quantity, base) + _left_out(quantity, base) + _nested(quantity, base)
        if shift is not None:
            rows.append(_shift_row(quantity, shift.loc[quantity]))
    rows += drifts
    table = pd.DataFrame([dataclasses.asdict(e) for e in base])
    alone = [0.0, math.nan, math.nan]
    table[["weight", "shrunken", "shrunken_se"]] = [
        told.get((e.quantity, e.study), alone) if e.enters and e.baseline else alone for e in base
    ]
    return PooledShape(table, pd.DataFrame(rows, columns=list(COLUMNS)), primary)


# ---- which studies -----------------------------------------------------------------------------------------------------
def _has(folder: Path | None, name: str) -> bool:
    return not name or (folder is not None and (folder / name).is_file())


def _all(folder: Path | None, n: str, own: pd.DataFrame | None, reference: str) -> list[ShapeEffect]:
    out: list[ShapeEffect] = []
    for source in SOURCES:
        if _has(folder, source.needs):
            out += source.effects(folder or Path(), n)
        else:
            empty = pd.DataFrame({c: [math.nan] for c in ("depth", "width", "params", "tokens")})
            made = nothing(Context(source.study, "", n, "", "", ""), empty, f"skipped: needs {source.needs}")
            out += [dataclasses.replace(e, shapes=0) for e in made]
    return out if own is None else out + own_effects(own, n=n, reference=reference)


def _variants(folder: Path | None, base: list[ShapeEffect]) -> list[tuple[str, list[ShapeEffect], str]]:
    """Primary analyses in which one study is evaluated another way, or studies of one kind only."""

    def with_(study: str, effects: Sequence[ShapeEffect]) -> list[ShapeEffect]:
        return [*effects, *(e for e in base if e.study != study)]

    here, decisive = Path(), sources.decisive_run()
    bench = sources.depthbench_effects
    out = [
        ("DepthBench without the correction to equal backbone", with_("DepthBench", bench(here, corrected=False)),
         "its 400M grid differs by up to 21 % in backbone parameters"),
        ("DepthBench, 400M grid only", with_("DepthBench", bench(here, grids=("400M",))), "five Pre-LN shapes"),
        ("DepthBench, 300M grid only", with_("DepthBench", bench(here, grids=("300M",))), "four Pre-LN shapes"),
        ("DepthBench without one run", with_("DepthBench", bench(here, without=(decisive,))), f"{decisive}, whose deletion moves it most"),
    ]  # fmt: skip
    if folder is not None and _has(folder, sources.GEMSTONES):
        gem = sources.gemstones_effects
        options: dict[str, Callable[[], list[ShapeEffect]]] = {
            "Gemstones cooled down": lambda: gem(folder, subset="fit_cool_end"),
            "Gemstones with halved learning rates": lambda: gem(folder, subset="fit_lr_ablation_hot"),
            "Gemstones to 100 B tokens": lambda: gem(folder, subset="fit_hot"),
        }
        if _has(folder, "gemstones_other_val.csv"):
            options["Gemstones evaluated on FineWeb-Edu"] = lambda: gem(folder, evaluated="fineweb_edu")
            options["Gemstones evaluated on DCLM"] = lambda: gem(folder, evaluated="dclm")
        out += [(name, with_("Gemstones", made()), "") for name, made in options.items()]
    tuned = [e for e in base if e.rates == "per shape"]
    out.append(("learning rates tuned per shape only", tuned, "DepthBench, and own runs that say so"))
    out.append(("learning rates by rule or unknown only", [e for e in base if e.rates != "per shape"], ""))
    return out


def _entering(effects: Sequence[ShapeEffect], quantity: str) -> list[ShapeEffect]:
    return [e for e in effects if e.quantity == quantity and e.enters and e.baseline]


# ---- rows --------------------------------------------------------------------------------------------------------------
def _pooled(
    quantity: str,
    name: str,
    effects: Sequence[ShapeEffect],
    note: str,
    *,
    heterogeneity: Heterogeneity = "reml",
    width: Width = "hartung-knapp",
) -> tuple[dict[str, object], Pooled | None]:
    """One row: pooled over two rows or more; one study's own estimate where it is alone; empty where none enters."""
    row = _empty(quantity, name, effects)
    if not effects:
        return {**row, "note": "no study identifies it"}, None
    if len(effects) == 1:
        e = effects[0]
        return {
            **row,
            **_told(quantity, e.estimate, e.low, e.high),
            "note": f"one study: its own estimate, not pooled; interval by {e.interval}{_beside(e)}",
        }, None
    y = np.array([e.estimate for e in effects])
    s = np.array([widened(e.se, e.df) for e in effects])
    names = [e.study for e in effects]
    made = pool(y, s, heterogeneity=heterogeneity, width=width, studies=names if width == "studies left out" else None)
    return {
        **row, **_told(quantity, made.estimate, made.low, made.high), "new_low": made.prediction[0], "new_high": made.prediction[1],
        "tau": made.tau, "tau_low": made.tau_low, "tau_high": made.tau_high, "I2": made.I2, "p_Q": made.p_homogeneous, "note": note,
    }, made  # fmt: skip


def _beside(e: ShapeEffect) -> str:
    """The other interval of an optimum, so that two for one number don't look like a mistake."""
    told = next((part for part in e.note.split("; ") if part.startswith("Fieller")), "")
    return f" (beside it: {told})" if e.quantity == "optimum" and told else ""


def _methods(quantity: str, base: Sequence[ShapeEffect]) -> list[dict[str, object]]:
    """The primary analysis by other estimators of tau and other intervals."""
    kept = _entering(base, quantity)
    if len(kept) < 2:
        return []
    options: tuple[tuple[str, Heterogeneity, Width], ...] = (
        ("Paule-Mandel", "paule-mandel", "hartung-knapp"), ("DerSimonian-Laird", "dersimonian-laird", "hartung-knapp"),
        ("common effect, normal", "common", "normal"), ("untruncated Hartung-Knapp", "reml", "hartung-knapp, untruncated"),
    )  # fmt: skip
    return [_pooled(quantity, f"primary by {n}", kept, "", heterogeneity=h, width=w)[0] for n, h, w in options]


def _left_out(quantity: str, base: Sequence[ShapeEffect]) -> list[dict[str, object]]:
    kept = _entering(base, quantity)
    if len(kept) < 3:
        return []
    return [
        _pooled(quantity, f"without {gone}", [e for e in kept if e.study != gone], "")[0]
        for gone in sorted({e.study for e in kept})
    ]


def _nested(quantity: str, base: Sequence[ShapeEffect]) -> list[dict[str, object]]:
    """All architectures as rows; and the architectures of DepthBench alone, for a new architecture of its kind."""
    rows = [e for e in base if e.quantity == quantity and e.enters]
    out = []
    if len({e.study for e in rows}) >= 3:
        note = "rows of a study share its weight; delete-one-study jackknife"
        out.append(_pooled(quantity, _NESTED, rows, note, width="studies left out")[0])
    bench = [e for e in rows if e.study == "DepthBench"]
    if len(bench) >= 2:
        note = "rows are architectures on common shapes, so their errors are not quite independent"
        out.append(_pooled(quantity, "DepthBench, architectures as rows", bench, note)[0])
    if quantity == "optimum" and len(rows) >= 2 and len(rows) > len(bench):
        note = "rows are architectures, not studies: a description, not an estimate for new studies"
        out.append(_pooled(quantity, "all located optima as rows", rows, note)[0])
    return out


def _shift_row(quantity: str, shift: pd.Series) -> dict[str, object]:
    row = dict.fromkeys(COLUMNS, math.nan) | {
        "quantity": quantity, "analysis": "Gemstones, total less backbone N", "studies": "Gemstones", "rows": 1,
        "unit": UNITS[quantity], "estimate": shift["estimate"], "low": shift["low"], "high": shift["high"],
        "note": "the same runs: a paired difference",
    }  # fmt: skip
    return row


def _drift_row(n: str, found: pd.Series) -> dict[str, object]:
    row = dict.fromkeys(COLUMNS, math.nan) | {
        "quantity": "drift", "analysis": f"Gemstones, {n} N", "studies": "Gemstones", "rows": 1, "unit": "d ln(d/L) / d ln N",
        "estimate": found["estimate"], "low": found["low"], "high": found["high"],
        "note": "how the best aspect ratio moves with size, within one study",
    }  # fmt: skip
    return row


def _empty(quantity: str, name: str, effects: Sequence[ShapeEffect]) -> dict[str, object]:
    studies = list(dict.fromkeys(e.study for e in effects))
    return dict.fromkeys(COLUMNS, math.nan) | {
        "quantity": quantity, "analysis": name, "studies": ", ".join(studies), "rows": len(effects), "unit": UNITS[quantity],
        "note": "",
    }  # fmt: skip


def _told(quantity: str, estimate: float, low: float, high: float) -> dict[str, object]:
    """The estimate and what it is in aspect ratios, or in nats and compute."""
    out: dict[str, object] = {"estimate": estimate, "low": low, "high": high}
    if quantity == "optimum":
        names = ("aspect", "aspect_low", "aspect_high")
        return out | {n: math.exp(v) for n, v in zip(names, (estimate, low, high), strict=True)}
    out["nats"] = estimate / 100 * _reference_loss()
    for end, value in (("", estimate), ("_low", low), ("_high", high)):
        out[f"compute_kaplan{end}"] = compute_equivalent(value)
        out[f"compute_chinchilla{end}"] = chinchilla_equivalent(value)
    return out


def chinchilla_equivalent(percent_of_loss: float) -> float:
    """Compute (%) that a share of the loss (%) buys on the frontier of `besiroglu2024`, at 3e8 parameters and 8e9 tokens."""
    p = published_params("besiroglu2024")
    gamma = p["alpha"] * p["beta"] / (p["alpha"] + p["beta"])
    loss = _reference_loss()
    return float(100 * math.expm1(percent_of_loss / 100 * loss / (gamma * (loss - p["E"]))))


def _reference_loss() -> float:
    p, (n, d) = published_params("besiroglu2024"), REFERENCE
    return float(p["E"] + p["A"] * n ** -p["alpha"] + p["B"] * d ** -p["beta"])


def _sentence(quantity: str, row: pd.Series) -> str:
    what = {"penalty": "Four times away from the best d/L", "contrast": "d/L 76 against 40", "optimum": "The best d/L"}[
        quantity
    ]
    if not math.isfinite(row["estimate"]):
        return f"{what}: {row['note']}."
    if quantity == "optimum":
        body = f"{row['aspect']:.3g} [{row['aspect_low']:.3g}, {row['aspect_high']:.3g}]"
    else:
        body = (
            f"{row['estimate']:.2f} % of the loss [{row['low']:.2f}, {row['high']:.2f}], worth "
            f"{row['compute_kaplan']:.0f} % of compute at Kaplan's rate [{row['compute_kaplan_low']:.0f}, {row['compute_kaplan_high']:.0f}]"
        )
    if math.isfinite(row["new_low"]):
        body += f"; a new study: [{row['new_low']:.2f}, {row['new_high']:.2f}]"
    return f"{what}: {body} ({row['studies']}; {row['note']})."

"""What the comparison holds equal: size, data, FLOPs, seeds of the shallow and the deep shapes, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scalinglab.report.html.wording import and_list

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport

EQUAL = 0.01  # relative; the tolerance that matched pairs aim at
_COUNTS = {
    "params_backbone": "Backbone parameters", "params_total": "Total parameters", "tokens": "Training tokens",
    "flops_6n": "FLOPs (6N per token)", "flops_causal": "FLOPs (causal attention)", "flops_full": "FLOPs (full attention)",
}  # fmt: skip
_RULES = {"params_total": "total parameters", "params_backbone": "backbone parameters", "params": "parameters",
          "flops_causal": "FLOPs", "flops_full": "FLOPs", "flops_6n": "FLOPs"}  # fmt: skip


@dataclass(frozen=True)
class Held:
    """One quantity of both arms: geometric means over the architectures; change is deep / shallow - 1."""

    name: str
    shallow: float
    deep: float

    @property
    def change(self) -> float:
        return self.deep / self.shallow - 1

    @property
    def equal(self) -> bool:
        return abs(self.change) <= EQUAL


def arms(report: DepthReport) -> list[Held]:
    """Quantities of the two shapes that are compared; empty where an arm isn't a shape that was run."""
    outcome = report.outcome
    if outcome is None or not len(outcome.effects):
        return []
    c = next(iter(outcome.effects)).contrast
    runs = outcome.intake.runs
    aspect = (runs["width"] / runs["depth"]).astype(float)
    shallow, deep = (
        runs[np.isclose(aspect, c.get(f"aspect_{arm}", math.nan), rtol=1e-6)] for arm in ("shallow", "deep")
    )
    both = sorted(set(shallow["architecture"]) & set(deep["architecture"]))
    shallow, deep = (part[part["architecture"].isin(both)] for part in (shallow, deep))
    if not both:
        return []
    out = []
    columns = _COUNTS if {"params_backbone", "params_total"} & set(runs) else {"params": "Parameters", **_COUNTS}
    for column, name in columns.items():
        if column in runs and shallow[column].notna().all() and deep[column].notna().all():
            out.append(Held(name, _mean(shallow[column]), _mean(deep[column])))
    return out


def design_notes(report: DepthReport) -> list[str]:
    """What a reader must know of the design, in sentences: what is equal, shapes, depths that only some have."""
    outcome = report.outcome
    if outcome is None:
        return []
    runs = outcome.intake.runs
    notes = []
    rules = [_RULES.get(r, str(r)) for r in dict.fromkeys(runs["match_rule"].dropna())] if "match_rule" in runs else []
    held = {h.name: h for h in arms(report)}
    backbone, total = held.get("Backbone parameters"), held.get("Total parameters")
    if len(rules) == 1 and rules[0] == "total parameters" and backbone is not None:
        notes.append(
            f"Shapes are matched in total parameters, not in backbone parameters: embeddings shrink as models get narrower, so the "
            f"deep shape has {_more(backbone.change)} backbone. A gap at equal totals isn't one at equal backbones."
        )  # fmt: skip
    elif len(rules) == 1 and rules[0] == "backbone parameters" and total is not None and not total.equal:
        notes.append(
            f"Shapes are matched in backbone parameters; with embeddings the deep shape has {_more(total.change)} in total."
        )
    others = sorted(
        {str(n).removeprefix("group ") for n in report.tables["T6"]["analysis"] if str(n).startswith("group ")}
    )
    if others:
        notes.append(
            f"Runs matched by another rule ({', '.join(others)}) are not pooled: they stand among the re-analyses."
        )
    flops = held.get("FLOPs (causal attention)")
    if flops is not None and not flops.equal:
        notes.append(
            f"Equal size isn't equal compute: the deep shape takes {_more(flops.change)} FLOPs (causal attention)."
        )
    shapes = runs.groupby("architecture")["x"].nunique()
    few, most = int(shapes.min()), int(shapes.max())
    span = f"{few}" if few == most else f"{few} to {most}"
    if few < 6:
        notes.append(
            f"Few shapes: {span} per architecture. The error of the effect rests on how well a smooth curve fits them."
        )
    return notes + _beyond(runs)


def _beyond(runs: pd.DataFrame) -> list[str]:
    """Depths that only some architectures have, in one sentence per set of architectures."""
    if len(set(runs["group"])) > 1:
        return []
    depths = {str(a): set(own["depth"]) for a, own in runs.groupby("architecture", sort=False)}
    whose: dict[tuple[str, ...], list[float]] = {}
    for depth in sorted(set.union(*depths.values())):
        own = tuple(a for a in depths if depth in depths[a])
        if len(own) < len(depths):
            whose.setdefault(own, []).append(float(depth))
    return [
        f"Only {and_list(list(own))} {'were' if len(own) > 1 else 'was'} run at {and_list([f'{d:g}' for d in found])} blocks: the "
        "comparison is between depths that all share."
        for own, found in whose.items()
    ]  # fmt: skip


def _more(change: float) -> str:
    return f"{100 * abs(change):.2g} % {'more' if change > 0 else 'less'}"


def _mean(values: pd.Series) -> float:
    return float(np.exp(np.log(values.astype(float)).mean()))

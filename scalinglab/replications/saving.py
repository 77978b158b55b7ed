"""Replications on disk: tables as CSV and Markdown and result.json, each file whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from scalinglab.replications.pooled import PooledShape
from scalinglab.replications.targets import counted
from scalinglab.report.tables import plain, rounded, to_markdown
from scalinglab.tables import write_atomically, write_table

SCHEMA = "scalinglab/replications-1"
_SHORT = (
    "study",
    "quantity",
    "kind",
    "published",
    "ours",
    "95 % interval",
    "unit",
    "agrees",
    "rule",
    "why",
    "source",
    "status",
)
_POOLED = ("quantity", "analysis", "studies", "estimate", "95 % interval", "new study", "unit", "tau", "compute at Kaplan's rate, %", "note")  # fmt: skip


def save(table: pd.DataFrame, pooled: PooledShape, folder: str | Path) -> Path:
    """Write replications.csv/.md, pooled.csv/.md, effects.csv/.md and result.json to a folder, made where needed; returns it."""
    folder = Path(folder)
    full = {"replications": table, "pooled": pooled.pooled, "effects": pooled.effects}
    short = {
        "replications": shown(table),
        "pooled": shown_pooled(pooled.pooled),
        "effects": shown_effects(pooled.effects),
    }
    for name, frame in full.items():
        write_table(frame, folder / f"{name}.csv")
        text = to_markdown(short[name])
        if name == "replications":
            text = "\n".join([_capital("; ".join(counted(table))), "", text.rstrip("\n"), "", *_footnotes(table), ""])
        write_atomically(folder / f"{name}.md", text.encode())
    document = {
        "schema": SCHEMA,
        "counts": counted(table),
        "summary": pooled.summary().splitlines(),
        **{name: _records(frame) for name, frame in full.items()},
    }
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    write_atomically(folder / "result.json", data + b"\n")  # last: a folder with it is complete
    return folder


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Replications for reading: the columns that tell the comparison, numbers rounded, sources as numbers (`_footnotes`)."""
    limits = zip(table["low"], table["high"], table["interval"], strict=True)
    told = [", ".join(part for part in (_interval(a, b), method) if part) for a, b, method in limits]
    number = {source: f"[{k}]" for k, source in enumerate(_sources(table), 1)}
    out = table.assign(**{"95 % interval": told, "source": [number[s] for s in table["source"]]})
    for column in ("published", "ours"):
        out[column] = [plain(v, 4) for v in out[column]]
    return out[list(_SHORT)]


def _sources(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["source"]))


def _footnotes(table: pd.DataFrame) -> list[str]:
    """What stands behind the numbers in the column source, and the kinds of published values."""
    return [
        "Kinds: printed, in the source itself; earlier refit, ours of the source's data; implied, our reading or arithmetic; second "
        'hand, not checked in the source. "holds": an inequality that is kept, which is no agreement with its number.',
        "",
        *(f"- [{k}] {source}" for k, source in enumerate(_sources(table), 1)),
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def shown_pooled(table: pd.DataFrame) -> pd.DataFrame:
    """Pooled estimates for reading; optima as aspect ratios."""
    rows = []
    for _, r in table.iterrows():
        ratio = np.exp if r["quantity"] == "optimum" else float
        values = [float(ratio(r[c])) for c in ("estimate", "low", "high", "new_low", "new_high")]
        worth = ""
        if np.isfinite(r["compute_kaplan"]):
            worth = f"{plain(r['compute_kaplan'], 2)} {_interval(r['compute_kaplan_low'], r['compute_kaplan_high'], 2)}"
        rows.append((
            r["quantity"], r["analysis"], r["studies"], plain(values[0]), _interval(values[1], values[2]), _interval(values[3], values[4]),
            "d/L" if r["quantity"] == "optimum" else r["unit"], plain(r["tau"], 2), worth, r["note"],
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(_POOLED))


def shown_effects(table: pd.DataFrame) -> pd.DataFrame:
    """What each study says, for reading."""
    rows = []
    for _, r in table.iterrows():
        estimate, se = rounded(r["estimate"], r["se"])
        rows.append((
            r["study"], r["architecture"], r["quantity"], estimate, se, r["unit"], plain(r["shapes"]),
            _interval(r["narrowest"], r["widest"]), "yes" if r["enters"] else "no", plain(100 * r["weight"], 2), r["note"],
        ))  # fmt: skip
    names = (
        "study",
        "architecture",
        "quantity",
        "estimate",
        "se",
        "unit",
        "shapes",
        "d/L run",
        "enters",
        "weight, %",
        "note",
    )
    return pd.DataFrame(rows, columns=list(names))


def _interval(low: float, high: float, digits: int = 3) -> str:
    return "" if np.isnan(low) and np.isnan(high) else f"[{plain(float(low), digits)}, {plain(float(high), digits)}]"


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: null for what is not finite."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value

"""A mis-scaling report on disk: result.json, summary.txt and the tables as CSV, each file whole or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from scalinglab.misscaling.tables import hierarchy_table
from scalinglab.tables import write_atomically, write_table

if TYPE_CHECKING:
    from scalinglab.misscaling.report import MisscalingReport

SCHEMA = "scalinglab/misscaling-1"


def save(report: MisscalingReport, folder: str | Path) -> Path:
    """Write the report's files to a folder, which is made where needed; returns it."""
    folder = Path(folder)
    tables = {
        "envelopes": report.envelopes, "drift": report.drift, "decomposition": report.decomposition,
        "sensitivity": report.sensitivity, "suspects": report.suspects, "by_tau": report.by_tau,
        "hierarchy": hierarchy_table(report.hierarchy),
    }  # fmt: skip
    for name, table in tables.items():
        if len(table.columns):
            write_table(table, folder / "tables" / f"{name}.csv")
    write_atomically(folder / "summary.txt", (report.summary() + "\n").encode())
    made = report.analysis
    document = {
        "schema": SCHEMA, "verdict": report.verdict, "verdicts": dict(report.verdicts), "reasons": list(report.reasons),
        "margins": dataclasses.asdict(report.margins), "method": dataclasses.asdict(report.method),
        "bootstrap": made.how.told if made is not None else "", "paired": report.grids.paired,
        "refused": {" / ".join(a): why for a, why in report.grids.refused.items()},
        "noise": None if made is None else {"sigma": _plain(made.noise.sigma), "seed_by_shape": _plain(made.noise.row),
                                            "tau": _plain(made.tau), "drift_tau": _plain(made.drift_tau)},
        **{name: _records(table) for name, table in tables.items()},
    }  # fmt: skip
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    write_atomically(folder / "result.json", data + b"\n")  # last: a folder with it is complete
    return folder


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: null for what is not finite."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value

"""A mis-scaling report on disk: result.json, summary.txt and the tables as CSV, each file whole or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from scalinglab.misscaling.schema import SCHEMA
from scalinglab.misscaling.tables import hierarchy_table
from scalinglab.tables import write_atomically, write_table

if TYPE_CHECKING:
    from scalinglab.misscaling.report import MisscalingReport

CAPTIONS = {
    "envelopes": "Optimal learning rate and loss there, by arm and shape",
    "drift": "Drift of the optimal learning rate",
    "decomposition": "Depth gains and their differences, nats per e-fold of depth",
    "sensitivity": "Sensitivity to the learning rate, nats",
    "suspects": "Which entry would have to be wrong",
    "by_tau": "The verdict if shapes lie off a line by so much",
    "by_curve": "The verdict under other curves and windows",
    "hierarchy": "One model of all runs",
}


def report_tables(report: MisscalingReport) -> dict[str, pd.DataFrame]:
    """The tables of a report by name; those without columns (nothing was analysed) are left out."""
    tables = {
        "envelopes": report.envelopes, "drift": report.drift, "decomposition": report.decomposition,
        "sensitivity": report.sensitivity, "suspects": report.suspects, "by_tau": report.by_tau, "by_curve": report.by_curve,
        "hierarchy": hierarchy_table(report.hierarchy),
    }  # fmt: skip
    return {name: table for name, table in tables.items() if len(table.columns)}


def document(report: MisscalingReport) -> dict[str, Any]:
    """The report as plain data, see `schema.Result`."""
    made, tables = report.analysis, report_tables(report)
    return {
        "schema": SCHEMA, "verdict": report.verdict, "verdicts": dict(report.verdicts), "reasons": list(report.reasons),
        "margins": dataclasses.asdict(report.margins), "method": dataclasses.asdict(report.method),
        "bootstrap": made.how.told if made is not None else "", "paired": report.grids.paired,
        "refused": {" / ".join(a): why for a, why in report.grids.refused.items()},
        "checked": {" / ".join(a): verdict for a, verdict in report.grids.checked.items()},
        "noise": None if made is None else {"sigma": _plain(made.noise.sigma), "seed_by_shape": _plain(made.noise.row),
                                            "tau": _plain(made.tau), "arm_tau": _plain(made.arm_tau), "drift_tau": _plain(made.drift_tau)},
        **{name: _records(tables[name]) if name in tables else [] for name in CAPTIONS},
    }  # fmt: skip


def save(report: MisscalingReport, folder: str | Path) -> Path:
    """Write the report's files to a folder, which is made where needed; returns it."""
    folder = Path(folder)
    for name, table in report_tables(report).items():
        write_table(table, folder / "tables" / f"{name}.csv")
    write_atomically(folder / "summary.txt", (report.summary() + "\n").encode())
    data = msgspec.json.format(msgspec.json.encode(document(report)), indent=1)
    write_atomically(folder / "result.json", data + b"\n")  # last: a folder with it is complete
    return folder


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: null for what is not finite."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value

"""A depth report on disk: result.json and the tables as CSV, Markdown and LaTeX, each file whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from scalinglab.report.tables import to_csv, to_latex, to_markdown
from scalinglab.tables import write_atomically

if TYPE_CHECKING:
    from scalinglab.depth_benefit.result import DepthReport

_CAPTIONS = {
    "T1": "Data audit", "T2": "Law parameters", "T3": "Depth effects", "T4": "Architecture by depth",
    "T5": "Model comparison", "T6": "Re-analyses", "T7": "Divergence",
}  # fmt: skip


def save(report: DepthReport, folder: str | Path) -> Path:
    """Write the report's files to a folder, which is made where needed; returns it."""
    folder = Path(folder)
    for name, table in report.tables.items():
        base = folder / "tables" / name
        write_atomically(base.with_suffix(".csv"), to_csv(table).encode())
        write_atomically(base.with_suffix(".md"), to_markdown(table).encode())
        text = to_latex(table, caption=_CAPTIONS[name], label=f"tab:{name}")
        write_atomically(base.with_suffix(".tex"), text.encode())
    write_atomically(folder / "summary.txt", (report.summary() + "\n").encode())
    data = msgspec.json.format(msgspec.json.encode(dict(report.result)), indent=1)
    write_atomically(folder / "result.json", data + b"\n")  # last: a folder with it is complete
    return folder

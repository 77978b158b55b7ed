"""Published numbers computed again, and one estimate of what shape costs from all public studies.

`replications()` compares published numbers with ours; `pooled_shape()` pools the cost of a wrong shape and the optimal
shape over studies. Both run on what travels with the package; a folder of public run logs adds more.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd

from scalinglab.errors import ScalinglabWarning
from scalinglab.replications import besiroglu, depthbench, gemstones, kaplan, levine, porian, steplaw
from scalinglab.replications.pooled import PooledShape, pooled_shape
from scalinglab.replications.saving import save
from scalinglab.replications.targets import COLUMNS, Ours, Replication, Target, counted, data_folder

__all__ = [
    "REPLICATIONS",
    "Ours",
    "PooledShape",
    "Replication",
    "Target",
    "counted",
    "pooled_shape",
    "replications",
    "save",
]

REPLICATIONS: tuple[Replication, ...] = (
    depthbench.REPLICATION, levine.REPLICATION, gemstones.REPLICATION, kaplan.REPLICATION, besiroglu.REPLICATION,
    porian.REPLICATION, steplaw.REPLICATION,
)  # fmt: skip


def replications(data: str | Path | None = None) -> pd.DataFrame:
    """Published numbers beside ours, one row each.

    Parameters
    ----------
    data
        Folder of public run logs. Rows whose files are not in it say "skipped: needs FILE"; without a folder only what the
        package carries is computed.

    Returns
    -------
    DataFrame
        Columns study, quantity, kind (printed, or what stands in: `published.KINDS`), published, ours, low, high (95 %), interval (by
        which method), unit, agrees (yes, no, open; holds for a bound), rule (what counts as agreement), why (they differ, or what
        else the computation shows), source, printed (by the source itself), needs, status.

    Raises
    ------
    ConfigError
        `data` is no folder.
    SchemaError
        A file of that name is not the table that is meant.
    """
    folder = data_folder(data)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ScalinglabWarning
        )  # collapsed floors and flat valleys are what these rows are about
        rows = [row for study in REPLICATIONS for row in study.rows(folder)]
    return pd.DataFrame(rows, columns=list(COLUMNS))

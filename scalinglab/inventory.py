"""What a run table holds, counted: sizes, budgets, shapes, seeds, matches, and rows that should not be there.

Facts only; `design.audit` turns them into advice. Each function works on the columns that are there and returns None (or an
empty table) where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.diagnostics import Check, Grade, size_tiers
from scalinglab.errors import SchemaError
from scalinglab.features import R0
from scalinglab.information import cell_numbers
from scalinglab.schema import stopped_rows
from scalinglab.units import check_units

Array = NDArray[np.float64]

MATCH_TARGET, MATCH_LIMIT = 0.01, 0.03  # |difference of ln N| or ln D that a matched pair should and must not exceed
_TIER_WIDTH = 0.15  # a tier whose ln N spreads further is a range of sizes, not a matched set
_COUNTS = ("params", "params_backbone", "params_total")
_DONE = frozenset({"finished", "done", "completed", "complete", "ok", "success"})
_ENDED = ("schedule_finished", "is_final", "finished")  # columns of truth values
_PLANNED = (
    ("tokens", "tokens_planned"), ("tokens", "planned_tokens"), ("tokens", "max_tokens"), ("step", "steps_planned"),
    ("step", "total_steps"), ("step", "max_steps"),
)  # fmt: skip


@dataclass(frozen=True)
class Inventory:
    """Counts of a run table. `rows` are the usable rows, `finals` the last row of each run (with `tier` and `cell`)."""

    rows: pd.DataFrame
    finals: pd.DataFrame
    stopped: int
    size: str | None  # the column that stands for N
    impossible: tuple[str, ...] = ()  # columns with values of 0 or below, which are read as empty

    @property
    def seeds(self) -> Array:
        """Runs per cell [cells]."""
        return np.bincount(self.finals["cell"]).astype(np.float64) if len(self.finals) else np.zeros(0)

    @property
    def replicate_df(self) -> int:
        """Degrees of freedom of seeds within cells; 0 where cells can't be told."""
        return int((self.seeds - 1).sum()) if self.size or self.has("depth") else 0

    def has(self, *columns: str) -> bool:
        """Whether all these columns are there with a value in every run."""
        return all(c in self.finals and self.finals[c].notna().all() for c in columns)

    def distinct(self, column: str) -> int | None:
        """Number of different values over all rows (to 1e-9 relative), None without the column."""
        if column not in self.rows or self.rows[column].isna().all():
            return None
        values = self.rows[column].dropna()
        if values.dtype.kind in "fiu":
            return len(np.unique(np.round(np.log(np.maximum(values.to_numpy(np.float64), 1e-300)), 9)))
        return int(values.nunique())


def take_inventory(runs: pd.DataFrame) -> Inventory:
    """Usable rows, one final row per run, tiers of size and cells of seeds.

    Raises
    ------
    SchemaError
        Not a DataFrame, or no usable row.
    """
    if not isinstance(runs, pd.DataFrame):
        raise SchemaError(
            f"runs is a {type(runs).__name__}; give a run table (pandas DataFrame), e.g. from read_runs(path)"
        )
    stopped = stopped_rows(runs)
    rows = runs.loc[~stopped].reset_index(drop=True)
    if not len(rows):
        raise SchemaError("the run table has no rows to audit: it is empty, or all runs have a status such as diverged")
    for c in (*_COUNTS, "tokens", "depth", "width", "loss", "lr", "step"):
        if c in rows and rows[c].dtype.kind not in "fiu":
            rows[c] = pd.to_numeric(rows[c], errors="coerce")
    impossible = []
    for c in (*_COUNTS, "tokens", "depth", "width", "loss"):
        if c in rows and (rows[c] <= 0).any():
            impossible.append(c)
            rows[c] = rows[c].astype(float).where(rows[c] > 0)
    if "run_id" not in rows or rows["run_id"].isna().any():
        rows["run_id"] = [f"row{i}" for i in range(len(rows))]
    rows["run_id"] = rows["run_id"].astype(str)
    order = next((c for c in ("step", "tokens") if c in rows and rows[c].notna().any()), None)
    ordered = rows.sort_values(order, kind="stable", na_position="first") if order else rows
    finals = ordered.drop_duplicates("run_id", keep="last").sort_index().reset_index(drop=True)
    size = next((c for c in _COUNTS if c in finals and (finals[c] > 0).all()), None)
    finals["tier"] = size_tiers(finals[size].to_numpy(np.float64)) if size else 0
    finals["cell"] = cell_numbers(finals.drop(columns=["tier"]))
    if {"depth", "width"} <= set(finals):
        finals["u"] = np.log(finals["width"].to_numpy(np.float64) / finals["depth"].to_numpy(np.float64) / R0)
    return Inventory(rows, finals, int(stopped.sum()), size, tuple(impossible))


def tier_table(seen: Inventory) -> pd.DataFrame:
    """One row per size tier: runs, N from/to, budgets, tokens per parameter, shapes, depth and aspect from/to, seeds."""
    out = []
    rows = seen.rows.merge(seen.finals[["run_id", "tier"]], on="run_id", how="left")
    by_rows = dict(tuple(rows.groupby("tier")))
    for tier, own in seen.finals.groupby("tier"):
        all_rows = by_rows[tier]
        line: dict[str, float | int] = {"tier": int(str(tier)) + 1, "runs": len(own)}
        if seen.size:
            line |= {"N_low": own[seen.size].min(), "N_high": own[seen.size].max()}
        if "tokens" in own:
            line["budgets"] = int(all_rows["tokens"].nunique())
            if seen.size:
                ratio = all_rows["tokens"] / all_rows[seen.size]
                line |= {"tpp_low": ratio.min(), "tpp_high": ratio.max()}
        if "u" in own:
            shapes = own.drop_duplicates(["depth", "width"])
            aspect = R0 * np.exp(own["u"])
            line |= {
                "shapes": len(shapes), "depth_low": own["depth"].min(), "depth_high": own["depth"].max(),
                "aspect_low": aspect.min(), "aspect_high": aspect.max(),
                "sd_ln_aspect": float(shapes["u"].std(ddof=1)) if len(shapes) > 1 else 0.0,
            }  # fmt: skip
        count = np.unique(own["cell"], return_counts=True)[1]
        line |= {"cells": len(count), "seeds_low": int(count.min()), "seeds_high": int(count.max())}
        out.append(line)
    return pd.DataFrame(out).set_index("tier")


def matching(seen: Inventory) -> pd.DataFrame:
    """Residual mismatch of groups that are to be compared: widest difference of ln N (by each count) and of ln D.

    Groups are `match_group` where given, else size tiers with several shapes. `level` grades the declared N and D against the
    target of 0.01 and the limit of 0.03; a tier wider than 0.15 is no matched set and isn't graded.
    """
    finals = seen.finals
    declared = "match_group" in finals and finals["match_group"].notna().any()
    keys: list[str] = ["match_group"] if declared else ["tier"]
    counts = [c for c in _COUNTS if c in finals and (finals[c] > 0).all()]
    counts = [c for i, c in enumerate(counts) if not any(finals[c].equals(finals[d]) for d in counts[:i])]
    if not counts or (not declared and "u" not in finals):
        return pd.DataFrame(columns=["group", "runs", "level"])
    out = []
    for name, own in finals.groupby(keys[0]):
        if "u" in own and len(own.drop_duplicates(["depth", "width"])) < 2:
            continue
        line: dict[str, object] = {"group": str(name) if declared else f"tier {int(str(name)) + 1}", "runs": len(own)}
        line |= {f"dln_{c}": _spread(own[c]) for c in counts}
        if "tokens" in own and declared:
            line["dln_tokens"] = _spread(own["tokens"])
        graded = [float(line[f"dln_{seen.size}"]), float(line.get("dln_tokens", 0.0))]  # type: ignore[arg-type]
        graded = [v for v in graded if np.isfinite(v)]  # a gap in the tokens leaves D ungraded
        apart = not declared and max(graded, default=0.0) > _TIER_WIDTH
        line["level"] = "not matched" if apart else grade(max(graded, default=0.0), MATCH_TARGET, MATCH_LIMIT)
        out.append(line)
    return pd.DataFrame(out) if out else pd.DataFrame(columns=["group", "runs", "level"])


def grade(value: float, warn: float, block: float) -> Grade:
    """ok up to `warn`, block above `block` (with room for rounding)."""
    return "block" if value > block * (1 + 1e-9) else "warn" if value > warn * (1 + 1e-9) else "ok"


def _spread(values: pd.Series) -> float:
    return float(np.log(values.max() / values.min())) if (values > 0).all() else float("nan")


@dataclass(frozen=True)
class SeedNoise:
    """Pooled SD of loss between seeds of a cell, nats, with its degrees of freedom and the factor to its 95 % upper limit."""

    sigma: float
    df: int
    upper: float


def seed_noise(seen: Inventory) -> SeedNoise | None:
    """SD of the final loss between runs of one cell; None with fewer than 4 degrees of freedom."""
    if "loss" not in seen.finals or not seen.replicate_df:
        return None
    own = seen.finals[np.isfinite(seen.finals["loss"])]
    dev = own["loss"] - own.groupby("cell")["loss"].transform("mean")
    df = len(own) - own["cell"].nunique()
    if df < 4 or not (dev**2).sum() > 0:
        return None
    from scipy.special import chdtri

    return SeedNoise(float(np.sqrt((dev**2).sum() / df)), int(df), float(np.sqrt(df / chdtri(df, 0.95))))


# ---- rows that should not be there -------------------------------------------------------------------------------------
def row_checks(seen: Inventory) -> list[Check]:
    """Checks on rows: stopped, unfinished, duplicated, suspicious units, several rows per run."""
    rows, finals = seen.rows, seen.finals
    out = [
        Check("stopped runs", float(seen.stopped), "warn" if seen.stopped else "ok", "STOPPED_RUNS",
              f"{seen.stopped} rows have a status such as diverged and no final loss: report how many per depth"),
    ]  # fmt: skip
    if seen.impossible:
        told = (
            f"values of 0 or below in {', '.join(seen.impossible)}: read as empty here; correct or leave out those rows"
        )
        out.append(Check("impossible values", float(len(seen.impossible)), "block", "NOT_POSITIVE", told))
    late = _unfinished(seen)
    if late is not None:
        out.append(Check("unfinished schedules", float(len(late)), "block" if late else "ok", "UNFINISHED_SCHEDULE",
                         f"{_some(late)}: a loss in mid-schedule is no final loss; finish them or leave them out"))  # fmt: skip
    twin = _duplicates(seen)
    out.append(Check("duplicate runs", float(len(twin)), "block" if twin else "ok", "DUPLICATE_RUNS",
                     f"{_some(twin)}: equal to another run in every setting and in the loss; keep one of each"))  # fmt: skip
    try:
        check_units(rows, source="run table", place=lambda i: f"row {i + 1}")
        message = ""
    except SchemaError as error:
        message = str(error)
    out.append(
        Check("units", float(bool(message)), "block" if message else "ok", "UNIT_SUSPICION", message or "plausible")
    )
    per_run = len(rows) / max(1, len(finals))
    out.append(Check("rows per run", per_run, "warn" if per_run > 1 else "ok", "CHECKPOINTS",
                     f"{per_run:.1f} rows per run: a run counts as one observation; rows in mid-schedule are no final losses"))  # fmt: skip
    return out


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"


def _unfinished(seen: Inventory) -> list[str] | None:
    """Runs whose table says that they didn't end their schedule; None where no column tells."""
    finals = seen.finals
    late = np.zeros(len(finals), bool)
    told = False
    if "status" in finals and finals["status"].notna().any():
        told = True
        status = finals["status"].astype("string").str.strip().str.lower()
        late |= ~(status.isin(_DONE) | status.isna()).to_numpy(bool)
    for column in _ENDED:
        if column in seen.rows and seen.rows[column].notna().any():
            told = True
            ended = seen.rows[column].astype("string").str.lower().isin(["1", "1.0", "true", "yes", "y"])
            late |= ~finals["run_id"].isin(seen.rows.loc[ended.to_numpy(bool, na_value=False), "run_id"]).to_numpy()
            break
    for have, want in _PLANNED:
        if {have, want} <= set(finals.columns):
            told = True
            late |= finals[have].to_numpy(np.float64) < 0.99 * pd.to_numeric(finals[want], errors="coerce").to_numpy(
                np.float64
            )
    return finals.loc[late, "run_id"].tolist() if told else None


def _duplicates(seen: Inventory) -> list[str]:
    """Runs that equal another one in everything but the name (a loss alike to the last digit is no second seed)."""
    if "loss" not in seen.finals or seen.finals["loss"].isna().all():
        return []
    rest = seen.finals.drop(columns=["run_id", "tier"])
    rest = rest.loc[:, [c for c in rest if c in ("cell", "loss", "seed", "step", "eval_dataset", "split")]]
    again = rest.duplicated(keep="first").to_numpy() & np.isfinite(seen.finals["loss"].to_numpy(np.float64))
    repeated = [c for c in ("run_id", "step", "tokens", "eval_dataset", "split") if c in seen.rows]
    twice = (
        seen.rows.loc[seen.rows.duplicated(repeated, keep="first"), "run_id"].unique().tolist()
        if len(repeated) > 1
        else []
    )
    return list(dict.fromkeys([*seen.finals.loc[again, "run_id"].tolist(), *twice]))

"""A run table as learning-rate sweeps: one grid of losses per arm and shape, and whether the arms can be compared at all.

An arm is an architecture under a parametrization. Shapes of a ladder are what depth is compared over: equal width, or a
matched group (equal parameters or FLOPs), at equal tokens and batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.coordinates import CoordinateCheck
from scalinglab.errors import SchemaError
from scalinglab.information import ARM
from scalinglab.misscaling.checking import UNNAMED, Arm, Checked, match_checks
from scalinglab.misscaling.identical import same_runs, told
from scalinglab.misscaling.surface import drift_cost
from scalinglab.runs import final_rows
from scalinglab.schema import stopped_rows

Array = NDArray[np.float64]

_SETTING = ("tokens", "batch_tokens", "match_group")
_ONE_VALUE = ("corpus_fingerprint", "corpus", "eval_dataset", "split", "vocab", "context")
_DATA_ORDER = ("data_seed", "data_order")  # logs that have one of these tell the order apart from the initialisation
_RECIPE = ("weight_decay", "decay", "schedule", "init_std", "precision", "batch_tokens", "tokens")


@dataclass(frozen=True)
class Grids:
    """Losses of all learning-rate sweeps.

    arms : (architecture, parametrization). cells : one row per arm and shape: arm, architecture, parametrization, depth,
    width, tokens, batch_tokens, ladder, x (ln depth over the smallest of the ladder), initial (loss before training, NaN if
    unknown), same_as (the first cell with the same runs, see `identical`). z [C, J] : ln learning rates, NaN-padded. loss [C, J, S] : NaN where there is no run, +inf where it diverged.
    seeds : labels of the last axis. paired : whether all arms have the same seeds on the same data; None if unknown.
    refused : arms left out, with the reason. checked : verdict of each arm's coordinate checks. findings : what a reader must know. missing : what these runs cannot answer.
    """

    arms: tuple[Arm, ...]
    cells: pd.DataFrame
    z: Array
    loss: Array
    seeds: tuple[str, ...]
    paired: bool | None = None
    refused: dict[Arm, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    checked: dict[Arm, str] = field(default_factory=dict)

    @property
    def count(self) -> Array:
        """Finished runs [C, J]."""
        return np.isfinite(self.loss).sum(-1).astype(np.float64)

    @property
    def tried(self) -> Array:
        """Runs, diverged ones included [C, J]."""
        return (~np.isnan(self.loss)).sum(-1).astype(np.float64)

    @property
    def mean(self) -> Array:
        """Mean loss over seeds [C, J]; +inf where one diverged."""
        n = np.maximum(self.tried, 1)
        return np.where(self.tried > 0, np.nansum(self.loss, -1) / n, np.nan)

    @property
    def arm(self) -> NDArray[np.intp]:
        """Arm of each cell [C]."""
        return self.cells["arm"].to_numpy(np.intp)

    def without_seeds(self, labels: Sequence[str]) -> Grids:
        """The same sweeps less some seeds."""
        keep = [i for i, s in enumerate(self.seeds) if s not in set(labels)]
        return replace(self, loss=self.loss[..., keep], seeds=tuple(self.seeds[i] for i in keep))


def take_in(
    runs: pd.DataFrame,
    *,
    checks: Sequence[CoordinateCheck] = (),
    naive: str = "sp",
    scaled: Sequence[str] = (),
    diverged_above: float | None = None,
) -> Grids:
    """Arrange a run table by arm, shape, learning rate and seed.

    Parameters
    ----------
    runs : run table; the last row of each run counts.
    checks : coordinate checks; a scaled arm whose check failed is refused (see `checking`).
    naive : name of the parametrization that does not scale. scaled : names of those that should.
    diverged_above : loss from which a finished run counts as diverged (nats per token); the loss before training where the
        table has it.

    Raises
    ------
    SchemaError
        No table, or no losses or shapes in it.
    """
    if not isinstance(runs, pd.DataFrame) or not len(runs):
        raise SchemaError("misscaling reads a run table with at least one row, e.g. from read_runs(path)")
    for column in ("depth", "width", "loss"):
        if column not in runs:
            raise SchemaError(
                f"learning-rate sweeps need the column {column!r}; the table has {', '.join(map(str, runs))}"
            )
    table = final_rows(runs) if "run_id" in runs and runs["run_id"].notna().all() else runs
    table = pd.DataFrame(table.reset_index(drop=True))
    table.attrs = {}
    for column, empty in (("architecture", "all"), ("parametrization", UNNAMED)):
        table[column] = (
            table[column].astype(object) if column in table else pd.Series(np.nan, table.index, dtype=object)
        )
        table[column] = table[column].where(table[column].notna(), empty).astype(str)
    if "lr" not in table or pd.to_numeric(table["lr"], errors="coerce").isna().all():
        return _without_rates(table)
    findings = _unfinished(runs)
    rate = pd.to_numeric(table["lr"], errors="coerce").astype(float)
    bad = ~(rate > 0)
    if bad.any():
        findings.append(f"{int(bad.sum())} of {len(table)} runs have no learning rate and are left out")
        table, rate = table[~bad].reset_index(drop=True), rate[~bad].reset_index(drop=True)
    table["ln_lr"] = np.log(rate)
    table["y"] = _losses(table, diverged_above, findings)
    checked = match_checks(table, checks, naive=naive, scaled=scaled)
    findings += checked.findings
    refused = checked.refused
    own = pd.Series(list(zip(table["architecture"], table["parametrization"], strict=True)), index=table.index)
    table = table[~own.isin(list(refused))].reset_index(drop=True)
    if not len(table):
        told = "; ".join(f"{' / '.join(a)}: {why}" for a, why in refused.items())
        raise SchemaError(f"no arm is left to compare: {told}")
    table["ladder"] = _ladders(table)
    return _arrange(table, checked, findings)


def _arrange(table: pd.DataFrame, checked: Checked, findings: list[str]) -> Grids:
    table["setting"] = table.groupby([c for c in _SETTING if c in table], dropna=False, sort=True).ngroup() if any(
        c in table for c in _SETTING) else 0  # fmt: skip
    arms = tuple(dict.fromkeys(zip(table["architecture"], table["parametrization"], strict=True)))
    keys = ["architecture", "parametrization", "ladder", "depth", "width", "setting"]
    grouped = table.groupby(keys, sort=True)
    table["cell"] = grouped.ngroup()
    first = table.groupby("cell", sort=True)
    columns = [c for c in (*keys, "tokens", "batch_tokens", "params") if c in table]
    cells = first[columns].first().reset_index(drop=True)
    cells["arm"] = [arms.index((a, p)) for a, p in zip(cells["architecture"], cells["parametrization"], strict=True)]
    cells["initial"] = first["loss_initial"].mean().to_numpy() if "loss_initial" in table else np.nan
    if "floor" in table:
        cells["floor"] = first["floor"].mean().to_numpy()
    base = cells.groupby("ladder")["depth"].transform("min")
    cells["x"] = np.log(cells["depth"].astype(float) / base.astype(float))
    # Learning rates that differ by less than a part in 10^6 are one.
    table["rate"] = table["ln_lr"].round(6)
    table["j"] = table.groupby("cell")["rate"].rank(method="dense").astype(int) - 1
    known = "seed" in table and table["seed"].notna().all()
    points = table.groupby(["cell", "j"])
    table["label"] = table["seed"].map("{:g}".format) if known else points.cumcount().astype(str)
    repeats = table.duplicated(["cell", "j", "label"])
    if repeats.any():
        findings.append(
            f"{int(repeats.sum())} runs repeat a seed of the same setting: each counts as a seed of its own"
        )
        table["label"] = table["label"].where(
            ~repeats, table["label"] + "+" + table.groupby(["cell", "j", "label"]).cumcount().astype(str)
        )
    seeds = tuple(sorted(table["label"].unique(), key=lambda s: (len(s), s)))
    index = {s: i for i, s in enumerate(seeds)}
    C, J = len(cells), int(table["j"].max()) + 1
    z = np.full((C, J), np.nan)
    loss = np.full((C, J, len(seeds)), np.nan)
    c, j = table["cell"].to_numpy(), table["j"].to_numpy()
    z[c, j] = table["ln_lr"]
    loss[c, j, table["label"].map(index).to_numpy()] = table["y"]
    cells["same_as"] = same_runs(cells, z, loss)
    findings += told(cells, arms)
    paired = _paired(table, cells, loss, known, findings)
    return Grids(arms, cells, z, loss, seeds, paired, checked.refused, tuple(findings), (), checked.verdicts)


def _unfinished(runs: pd.DataFrame) -> list[str]:
    """What the reader of a training folder said about runs that have not ended: an edge of the grid may only be late."""
    said = (re.search(r"([\d,]+) unfinished runs?\b", note) for note in runs.attrs.get("notes", ()))
    return [f"{m[1]} unfinished runs are left out: let them end before extending a grid" for m in said if m]


def _losses(table: pd.DataFrame, above: float | None, findings: list[str]) -> pd.Series:
    """Final losses; +inf for runs that diverged, by status, by a missing loss, or by a loss above the threshold."""
    y = pd.to_numeric(table["loss"], errors="coerce").astype(float)
    lost = pd.Series(stopped_rows(table), index=table.index) | ~np.isfinite(y)
    if above is not None:
        lost |= y > above
    elif "loss_initial" in table:
        lost |= y > table["loss_initial"].astype(float)
    if lost.any():
        findings.append(f"{int(lost.sum())} of {len(table)} runs diverged: their loss is +inf")
    return y.where(~lost, np.inf)


def _ladders(table: pd.DataFrame) -> pd.Series:
    """Name of the set of shapes over which depth is compared, tokens and batch included."""
    names = pd.Series("", index=table.index)
    if "match_group" in table and (table["match_group"].fillna("") != "").any():
        names = table["match_group"].fillna("").astype(str)
    else:
        depths = table.groupby("width")["depth"].nunique()
        widths = table.groupby("depth")["width"].nunique()
        if (depths > 1).any() and (len(depths) == 1 or (widths > 1).any()):
            names = "width " + table["width"].map("{:g}".format)
    for column, unit in (("tokens", "tokens"), ("batch_tokens", "tokens per step")):
        if column in table and len(table[column].dropna().unique()) > 1:
            names = names.str.cat(table[column].map(lambda v, u=unit: f"{v:.4g} {u}" if pd.notna(v) else "?"), sep=", ")
    return names.str.strip(", ").where(lambda s: s != "", "all")


def _paired(
    table: pd.DataFrame, cells: pd.DataFrame, loss: Array, known: bool, findings: list[str]
) -> bool | None:  # fmt: skip
    """Whether what was logged says that all arms saw the same data with the same seeds."""
    mixed = [c for c in _ONE_VALUE if c in table and len(table[c].dropna().astype(str).unique()) > 1]
    for column in mixed:
        values = ", ".join(sorted(table[column].dropna().astype(str).unique())[:3])
        findings.append(f"not paired: runs differ in {column} ({values})")
    arms = [c for c in ("architecture", "parametrization") if c in table]
    for column in (
        c for c in ARM if arms and c in table
    ):  # an arm is one treatment: its cells average over seeds alone
        if table[column].astype(str).groupby([table[a] for a in arms], dropna=False).nunique().max() > 1:
            findings.append(f"not paired: runs of one arm differ in {column}; take one value, e.g. --where")
            mixed.append(column)
    if mixed:
        return False
    if not known:
        findings.append("pairing unknown: the table has no seeds")
        return None
    for column in (c for c in _DATA_ORDER if c in table):
        orders = table[column].astype(str).groupby(table["seed"]).nunique()
        if orders.max() > 1:
            findings.append(
                f"not paired: runs of seed {orders.idxmax():g} differ in {column}: they read their data in another order"
            )
            return False
    for column in (c for c in _RECIPE if c in table):
        own = table.groupby(["architecture", "parametrization"])[column].agg(
            lambda v: ", ".join(sorted(set(v.astype(str))))
        )
        if len(own.unique()) > 1:
            findings.append(f"arms differ in {column}: the contrasts between them hold what that does too")
    there: NDArray[np.bool_] = np.any(~np.isnan(loss), axis=1)  # [C, S]
    for (ladder, depth), rows in cells.groupby(["ladder", "depth"]).groups.items():
        had = there[np.asarray(rows, dtype=int)]
        if (had != had[0]).any():
            findings.append(f"not paired: at depth {depth:g} ({ladder}) the arms have different seeds")
            return False
    if "corpus_fingerprint" not in table or table["corpus_fingerprint"].isna().any():
        findings.append("same seeds in all arms; whether the data are the same is not logged (no corpus_fingerprint)")
        return None
    return True


def _without_rates(table: pd.DataFrame) -> Grids:
    shapes = table.groupby(["depth", "width"]).ngroups
    depth = table["depth"].astype(float)
    span = float(depth.max() / depth.min())
    cost = [drift_cost(d, span) for d in (-0.5, -1.0)]
    why = (
        f"no learning rates in these {len(table)} runs of {shapes} shapes: neither the optimum, its drift, nor the loss at "
        "the best learning rate of a shape can be told; whether depth is mis-scaled cannot be answered. An optimum that "
        f"falls as depth^-1/2 or depth^-1 would cost {cost[0]:.2g} or {cost[1]:.2g} nats at the deepest shape"
    )
    cells = pd.DataFrame(columns=["arm", "architecture", "parametrization", "depth", "width", "ladder", "x", "initial"])
    return Grids((), cells, np.zeros((0, 0)), np.zeros((0, 0, 0)), (), None, {}, (), (why,))

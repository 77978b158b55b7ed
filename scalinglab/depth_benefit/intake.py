"""What enters a depth analysis: one final row per run, lost runs apart, and what is wrong with the table, in words.

A run that diverged is an outcome of its treatment: it leaves the losses but never the count of runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.arch_counts import extra_params
from scalinglab.arch_options import OPTIONS
from scalinglab.depth_benefit.comparable import one_setting_per_run, other_units, refusals
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.phrasing import both
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.runs import complete, declare_params
from scalinglab.schema import stopped_rows
from scalinglab.shapes import FlopConvention, Shape

Array = NDArray[np.float64]
ParamsChoice = Literal["backbone", "total"]

CONVENTIONS: tuple[FlopConvention, ...] = ("6n", "causal", "full")
ALL = "all"  # the architecture of a table that names none
_ALIASES = {  # names in published tables -> keys of arch_options.OPTIONS
    "sandwich_ln": "sandwich", "hc": "hyper_connections", "attnres_full": "attn_res", "attnres_block": "block_attn_res",
}  # fmt: skip


@dataclass(frozen=True)
class Intake:
    """The runs of a depth analysis.

    runs : one row per run that has a final loss, with `architecture`, `group`, `block`, `seed`, `params` (as declared),
        `x` (depth coordinate), `cell`.
    lost : runs that diverged or were stopped, with the same columns; their loss is empty.
    params : which N is meant. findings : what is wrong or worth knowing. invalid : reasons to refuse a decision.
    """

    runs: pd.DataFrame
    lost: pd.DataFrame
    rows: pd.DataFrame
    params: str
    findings: tuple[Finding, ...]
    invalid: tuple[str, ...]

    @property
    def architectures(self) -> list[str]:
        """Architectures in order of appearance."""
        return list(dict.fromkeys([*self.runs["architecture"], *self.lost["architecture"]]))

    def only(self, keep: NDArray[np.bool_], lost: NDArray[np.bool_] | None = None) -> Intake:
        """The same intake with some of its runs and their rows; findings stay."""
        gone = self.lost if lost is None else self.lost[lost]
        runs = self.runs[keep]
        rows = self.rows[self.rows["run_id"].isin({*runs["run_id"], *gone["run_id"]})]
        return Intake(runs, gone, rows, self.params, self.findings, self.invalid)


def take_in(
    runs: pd.DataFrame,
    *,
    params: ParamsChoice = "backbone",
    checkpoints: Literal["final", "wsd"] = "final",
    charge_extras: bool = False,
    diverged_above: float | None = None,
) -> Intake:
    """Check a run table and make it ready for the estimands.

    Parameters
    ----------
    runs : run table with `depth`, `width`, `loss`, `tokens` and parameter counts (or full shapes to compute them from).
        Without `architecture` all runs count as one; without `run_id` every row is a run.
    params : which N is held equal.
    checkpoints : "final" takes the last row of each run and refuses unfinished schedules; "wsd" declares that all rows are
        at a constant or annealed learning rate, so that checkpoints are usable losses (laws only).
    charge_extras : add the parameters of each known architecture to the counts of tables that hold Pre-LN counts only.
    diverged_above : final loss (nats per token) above which a run counts as diverged, whatever its status says.

    Raises
    ------
    SchemaError
        Not a table, or a column that depth needs is missing or not positive.
    """
    if not isinstance(runs, pd.DataFrame):
        raise SchemaError(
            f"runs is a {type(runs).__name__}; give a run table (pandas DataFrame), e.g. from read_runs(path)"
        )
    said = runs.attrs.get("params")
    table = pd.DataFrame(runs.reset_index(drop=True))
    table.attrs = {} if said is None else {"params": said}  # pandas copies attrs, deeply, at every step
    if not len(table):
        raise SchemaError("the run table has no rows")
    again = table.astype(str).duplicated().to_numpy()
    if again.any():
        table = table[~again].reset_index(drop=True)
    for column in ("depth", "width", "loss", "tokens"):
        if column not in table:
            raise SchemaError(
                f"a depth analysis needs the column {column!r}; the table has {', '.join(map(str, table.columns[:20]))}"
            )
    findings: list[Finding] = []
    if again.any():
        text = f"{int(again.sum())} rows repeat another row in every column and are dropped: they are no further runs"
        findings.append(Finding("DUPLICATES_DROPPED", "warn", text))
    if "architecture" not in table or table["architecture"].isna().all():
        table["architecture"] = ALL
    table["architecture"] = table["architecture"].astype(object).where(table["architecture"].notna(), "unknown")
    table["architecture"] = table["architecture"].astype(str)
    if "run_id" not in table or table["run_id"].isna().any():
        table["run_id"] = [f"row{i}" for i in range(len(table))]
    table["run_id"] = table["run_id"].astype(str)
    one_setting_per_run(table)
    lost_rows = stopped_rows(table)
    for column in ("depth", "width", "tokens"):
        _positive(table, column, ~lost_rows if column == "tokens" else np.ones(len(table), bool))
    table = _counted(table, params)
    table.attrs = {"params": params}
    extras = _uncounted(table)
    if extras is not None:
        share, findings_text = extras
        if charge_extras:
            table = _charged(table, share, params)
            findings.append(Finding("EXTRA_PARAMS_CHARGED", "info", findings_text + "; they are charged here"))
        elif float(share.max()) > 0.005:
            findings.append(
                Finding(
                    "EXTRA_PARAMS_UNCOUNTED", "warn", findings_text + f"; {both('charge_extras', True)} charges them"
                )
            )
    table["x"] = depth_coordinate(table["depth"], table["width"])
    table["group"] = _groups(table)
    if "seed" not in table:
        table["seed"] = np.nan
    live, dead = table[~lost_rows], table[lost_rows]
    dead = dead[~dead["run_id"].isin(live["run_id"])].drop_duplicates("run_id", keep="last")
    dead = pd.concat([dead, _last_if_lost(table, lost_rows)]).drop_duplicates("run_id", keep="last")
    if len(live):
        _positive(live, "loss", np.ones(len(live), bool))
    invalid = refusals(live, checkpoints)
    finals = _finals(live[~live["run_id"].isin(dead["run_id"])])
    if diverged_above is not None:
        over = finals["loss"].astype(float) > _threshold(diverged_above)
        dead = pd.concat([dead, finals[over]]) if over.any() else dead
        live = live[~live["run_id"].isin(finals.loc[over, "run_id"])]
        finals = finals[~over].copy()
        if over.any():
            text = f"{int(over.sum())} runs with a final loss above {diverged_above:g} count as lost"
            findings.append(Finding("DIVERGED_ABOVE", "info", text))
    invalid += other_units(finals)
    findings += _remarks(finals, dead, table)
    for frame in (finals, dead):
        frame["cell"] = frame["architecture"] + "/" + frame["group"] + "/" + _shape_name(frame)
    dead["loss"] = np.nan
    return Intake(
        finals.reset_index(drop=True), dead.reset_index(drop=True), live.reset_index(drop=True), params, tuple(findings),
        tuple(invalid),
    )  # fmt: skip


def depth_coordinate(depth: pd.Series, width: pd.Series) -> pd.Series:
    """x = (2/3) ln(depth / width): at a fixed N = kappa depth width^2 it is ln depth up to a constant.

    At equal N and kappa, d ln(width) = -1/2 d ln(depth), so ln(depth / width) moves 3/2 as fast as ln depth. Unlike ln
    depth, x means the same shape in every size class and isn't moved by what is left unmatched in N.
    """
    return 2.0 / 3.0 * np.log(depth.astype(float) / width.astype(float))


def known_architecture(name: str) -> str | None:
    """Key of `arch_options.OPTIONS` that a name of a table stands for, or None."""
    key = _ALIASES.get(name, name)
    return key if key in OPTIONS else None


def _threshold(diverged_above: float) -> float:
    if not diverged_above > 0:
        raise ConfigError(f"diverged_above={diverged_above!r} is a loss in nats per token and must be positive")
    return diverged_above


def _positive(table: pd.DataFrame, column: str, rows: NDArray[np.bool_]) -> None:
    values = pd.to_numeric(table[column], errors="coerce").to_numpy(np.float64)
    bad = rows & ~(np.isfinite(values) & (values > 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise SchemaError(
            f"column {column!r} is {table[column].iloc[at]} for run {table['run_id'].iloc[at]!r} ({int(bad.sum())} such "
            "rows): it must be a positive number; mark lost runs with status 'diverged', or leave those rows out"
        )
    if table[column].dtype.kind not in "fiu":
        table[column] = values


def _counted(table: pd.DataFrame, params: ParamsChoice) -> pd.DataFrame:
    if params not in ("backbone", "total"):
        raise ConfigError(f"params={params!r} is unknown; choose 'backbone' or 'total'")
    full = complete(table)
    wanted = {"backbone": "params_backbone", "total": "params_total"}[params]
    if wanted in full and full[wanted].notna().all():
        return declare_params(full, params)
    if "params" in full and full["params"].notna().all() and full.attrs.get("params", params) in (params, "as given"):
        return full
    return declare_params(full, params)  # raises, and says what is missing


def _groups(table: pd.DataFrame) -> pd.Series:
    """match_group where the table has it; else runs whose N agree within 3 % of a neighbour's and whose D are equal."""
    if "match_group" in table and table["match_group"].notna().all():
        return table["match_group"].astype(str)
    ln_n = np.log(table["params"].to_numpy(np.float64))
    order = np.argsort(ln_n, kind="stable")
    tier = np.empty(len(table), dtype=np.intp)
    tier[order] = np.concatenate([[0], np.cumsum(np.diff(ln_n[order]) > 0.03)])
    tokens = np.log(table["tokens"].to_numpy(np.float64))
    ladder = np.round(np.where(np.isfinite(tokens), tokens, -1.0), 3)
    names: list[str] = []
    for t, d in zip(tier, ladder, strict=True):
        n = float(np.exp(np.mean(ln_n[tier == t])))
        names.append(f"N{n:.3g}/D{np.exp(d):.3g}")
    return pd.Series(names, index=table.index)


def _finals(live: pd.DataFrame) -> pd.DataFrame:
    if not len(live):
        return live.copy()
    order = next((c for c in ("step", "tokens") if c in live and live[c].notna().any()), "tokens")
    ordered = live.sort_values(order, kind="stable", na_position="first")
    return ordered.drop_duplicates("run_id", keep="last").sort_index().copy()


def _last_if_lost(table: pd.DataFrame, lost: NDArray[np.bool_]) -> pd.DataFrame:
    """Runs with good checkpoints whose last row says that they were lost: lost."""
    order = next((c for c in ("step", "tokens") if c in table and table[c].notna().any()), "tokens")
    last = table.assign(_lost=lost).sort_values(order, kind="stable", na_position="last")
    last = last.drop_duplicates("run_id", keep="last")
    return last[last["_lost"]].drop(columns="_lost")


def _remarks(finals: pd.DataFrame, dead: pd.DataFrame, table: pd.DataFrame) -> list[Finding]:
    out: list[Finding] = []
    if len(finals):
        seeds = finals.groupby(["architecture", "group", "depth", "width"]).size()
        if (seeds == 1).all():
            text = "every cell has one run: seed noise can't be seen, and the error is what shapes leave unexplained"
            out.append(Finding("SINGLE_SEED", "warn", text))
        elif seeds.min() < seeds.max():
            text = f"cells have {seeds.min()} to {seeds.max()} runs: cell means count alike"
            out.append(Finding("UNEQUAL_SEEDS", "info", text))
        shapes = finals.drop_duplicates(["depth", "width"])
        per_group = finals.groupby(["architecture", "group"])["x"].nunique()
        if per_group.max() <= 5:
            text = f"at most {int(per_group.max())} shapes per architecture and group ({len(shapes)} in all)"
            out.append(Finding("FEW_SHAPES", "warn", text))
    if len(dead):
        who = ", ".join(f"{a} {n}" for a, n in dead["architecture"].value_counts().items())
        out.append(Finding("LOST_RUNS", "warn", f"{len(dead)} runs diverged or were stopped ({who}); see table T7"))
    if "lr" not in table or table["lr"].isna().all():
        text = "no learning rates in the table: whether each shape ran at its own best one can't be checked"
        out.append(Finding("LR_UNKNOWN", "warn", text))
    if "match_rule" in finals and len(finals["match_rule"].unique()) > 1:
        rules = ", ".join(f"{g}: {r}" for g, r in finals.groupby("group")["match_rule"].first().items())
        out.append(Finding("MIXED_MATCH_RULES", "warn", f"groups are matched by different rules ({rules}): not pooled"))
    return out


# ---- parameters that an architecture adds -------------------------------------------------------------------------------
def _uncounted(table: pd.DataFrame) -> tuple[pd.Series, str] | None:
    """Relative parameters that known architectures add where the table's counts are those of the Pre-LN shape."""
    need = {"params_backbone", "depth", "width", "ffn_dim", "heads", "vocab", "context"}
    if not need <= set(table) or table[list(need)].isna().any(axis=None):
        return None
    share = pd.Series(0.0, index=table.index)
    for (name, depth, width, f, heads, vocab, context), own in table.groupby(
        ["architecture", "depth", "width", "ffn_dim", "heads", "vocab", "context"], sort=False
    ):
        key = known_architecture(str(name))
        if key is None or int(width) % int(heads):
            continue
        shape = Shape(int(depth), int(width), ffn_dim=int(f), heads=int(heads), vocab=int(vocab), context=int(context))
        given = own["params_backbone"].to_numpy(np.float64)
        if np.abs(given / shape.params_backbone - 1).max() < 1e-4:  # a count with or without the final norm
            try:
                share[own.index] = extra_params(key, shape) / given
            except ConfigError:
                continue
    share = share.where(share > 1e-4, 0.0)
    if not (share > 0).any():
        return None
    worst = share.groupby(table["architecture"]).max()
    told = ", ".join(f"{a} +{100 * v:.2g} %" for a, v in worst[worst > 0].sort_values(ascending=False).items())
    return (
        share,
        f"the counts are those of the Pre-LN shape; with default options architectures add to the backbone: {told}",
    )


def _charged(table: pd.DataFrame, share: pd.Series, params: ParamsChoice) -> pd.DataFrame:
    out = table.copy()
    extra = share * table["params_backbone"].astype(float)
    for column in ("params_backbone", "params_total"):
        if column in out:
            out[column] = out[column].astype(float) + extra
    for convention in CONVENTIONS:  # six FLOPs per parameter and token
        if f"flops_{convention}" in out:
            out[f"flops_{convention}"] = out[f"flops_{convention}"].astype(float) + 6.0 * extra * out["tokens"]
    return declare_params(out, params)


def _shape_name(frame: pd.DataFrame) -> pd.Series:
    return frame["depth"].map("{:g}".format).astype(str) + "x" + frame["width"].map("{:g}".format).astype(str)

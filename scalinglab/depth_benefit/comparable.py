"""Whether losses of a table may be compared at all: one evaluation, one treatment per cell, one unit, one run per name."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.phrasing import both
from scalinglab.errors import SchemaError
from scalinglab.information import ARM
from scalinglab.inventory import row_checks, take_inventory

# losses are comparable within one value only
_MIXING = (
    "eval_dataset", "split", "eval_tokens", "eval_sequences", "tokenizer", "vocab", "context", "corpus", "corpus_options",
)  # fmt: skip
_ONE_RUN = ("architecture", "parametrization", "match_group", "depth", "width", "seed")  # one value per run
_FAR = 1.5  # times the lower quartile of its matched group: no shape of equal size and data is that much worse
_NAMED = 4
_BITS = (1.41, 1.475)  # losses in bits over losses in nats, with room for architectures that differ


def refusals(live: pd.DataFrame, checkpoints: str) -> list[str]:
    """Reasons to refuse a decision: mixed evaluations, cells of several treatments, unfinished runs, other units, copies."""
    out: list[str] = []
    for column in _MIXING:
        if column in live and len(live[column].dropna().unique()) > 1:
            found = list(map(str, sorted(live[column].dropna().unique())))[:4]
            one = both(
                "where", f"{column} == {found[0]!r}" if live[column].dtype.kind == "O" else f"{column} == {found[0]}"
            )
            out.append(f"losses of different {column} ({', '.join(found)}) are mixed: select one, e.g. {one}")
    if not len(live):
        return out
    cell = [live[c] for c in ("architecture", "group", "depth", "width")]
    for column in ARM:  # a cell's mean is over seeds, never over treatments; `recipes` tells parametrizations apart
        if column in live and column not in _MIXING and _varies(live[column], cell):
            values = ", ".join(repr(v) for v in list(dict.fromkeys(live[column]))[:4])
            out.append(
                f"runs of one cell differ in {column} ({values}) and are no seeds of each other: select one with {both('where', ...)}, or "
                "name the arms in the column architecture"
            )
    wrong = {"UNIT_SUSPICION", "DUPLICATE_RUNS"} | ({"UNFINISHED_SCHEDULE"} if checkpoints == "final" else set())
    checks = row_checks(take_inventory(live))
    return out + [f"{c.name}: {c.action}" for c in checks if c.level == "block" and c.code in wrong]


def one_setting_per_run(table: pd.DataFrame) -> None:
    """Refuse one name for several runs: the last of them would stand for all."""
    for column in _ONE_RUN:
        if column not in table:
            continue
        several = table.groupby("run_id", sort=False)[column].nunique()
        if (several > 1).any():
            name = several.idxmax()
            values = ", ".join(map(str, list(dict.fromkeys(table.loc[table["run_id"] == name, column]))[:4]))
            raise SchemaError(
                f"run_id {name!r} stands for runs that differ in {column} ({values}; {int((several > 1).sum())} such run_ids): "
                "give every run a name of its own, or leave the column run_id out if each row is a run"
            )


def other_units(finals: pd.DataFrame) -> list[str]:
    """Architectures whose losses are those of another at the same shapes, in bits or as a perplexity.

    No two residual designs that learn differ by 44 % in loss at equal shape and data, let alone as exp(loss) does.
    """
    if not len(finals) or finals["architecture"].nunique() < 2:
        return []
    wide = finals.pivot_table(index=["group", "depth", "width"], columns="architecture", values="loss", aggfunc="mean")
    values = wide.to_numpy(np.float64)
    out: list[str] = []
    for i, j in itertools.permutations(range(values.shape[1]), 2):
        low, high = values[:, i], values[:, j]
        there = np.isfinite(low) & np.isfinite(high)
        ratio = high[there] / low[there]
        if not len(ratio) or not (ratio > 1.3).all():
            continue
        bits = ((ratio >= _BITS[0]) & (ratio <= _BITS[1])).all()
        if bits or (np.abs(np.log(high[there]) / low[there] - 1) < 0.05).all():
            what, how = ("bits", "loss*log(2)") if bits else ("a perplexity", "log(loss)")
            told = f"{np.median(ratio):.3g} times those of {wide.columns[i]} at the same shapes, as {what} would be"
            out.append(f"losses of {wide.columns[j]} are {told}; all losses must be in nats: convert those ({how})")
    return out


def unusual_losses(runs: pd.DataFrame) -> list[Finding]:
    """Runs that carry a loss and no word of divergence, and yet a loss far above those of their matched group."""
    usual = runs.groupby("group")["loss"].transform(lambda v: v.quantile(0.25)).astype(float)
    loss = runs["loss"].astype(float)
    far = runs[(loss > _FAR * usual).to_numpy()]
    if not len(far):
        return []
    told = [
        f"{r['run_id']} (loss {r['loss']:.3g}, {r['architecture']} {r['depth']:g}x{r['width']:g})"
        for _, r in far.head(_NAMED).iterrows()
    ]
    more = f" and {len(far) - _NAMED} more" if len(far) > _NAMED else ""
    around = float(usual[far.index].median())
    text = (
        f"{', '.join(told)}{more}: far above the {around:.3g} of their group, as after a divergence; they count as finished. "
        f"{both('diverged_above', float(f'{_FAR * around:.2g}'))} counts them as lost, or mark them in the column status"
    )
    return [Finding("LOSS_OUTLIER", "warn", text)]


def dropped_runs(runs: pd.DataFrame, cells: pd.DataFrame) -> list[Finding]:
    """Runs that no cell of the analysis holds, by depth, and what keeps them apart.

    cells : the cells analysed (`cells.CellModel.table`), whose blocks are groups joined by "+".
    """
    keys = ["architecture", "group", "depth", "width"]
    held = cells.assign(group=cells["block"].str.split("+", regex=False)).explode("group")
    known = set(held[keys].itertuples(index=False, name=None))
    # a group's own name may hold a "+"
    known |= set(cells.assign(group=cells["block"])[keys].itertuples(index=False, name=None))
    out = np.array([row not in known for row in runs[keys].itertuples(index=False, name=None)], bool)
    if not out.any():
        return []
    gone, kept = runs[out], runs[~out]
    depths = ", ".join(f"{d:g}" for d in sorted(gone["depth"].unique()))
    why = [
        f"{name} {_span(gone[column])} where the others have {_span(kept[column])}"
        for column, name in (("tokens", "tokens"), ("params", "parameters"))
        if len(kept) and not _overlap(gone[column], kept[column])
    ]
    reason = ", ".join(why) or "their architecture has no second shape in their matched group"
    text = (
        f"{len(gone)} runs at depth {depths} are left out, as no matched group holds them and another depth: {reason}"
    )
    return [Finding("RUNS_LEFT_OUT", "warn", text)]


def _overlap(a: pd.Series, b: pd.Series) -> bool:
    """Whether the ranges of two columns come within 1 % of each other."""
    return bool(a.min() <= 1.01 * b.max() and b.min() <= 1.01 * a.max())


def _span(values: pd.Series) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if high <= 1.01 * low else f"{low:.3g} to {high:.3g}"


def _varies(values: pd.Series, cell: list[pd.Series]) -> bool:
    """Whether some cell has more than one value."""
    return bool((values.groupby(cell).nunique(dropna=False).to_numpy() > 1).any())

"""audit(): what can and can't be learned from a set of runs, before (or after) their losses are in.

The single most useful thing to do before training: it counts sizes, budgets, shapes and seeds, predicts how well every law
of `LAWS` would be determined, says the smallest effects that the design can see, and what to add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import diagnostics as dx
from scalinglab.detection import LEVEL, POWER, minimal_effects
from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.features import COLUMNS
from scalinglab.information import Information, information, plausible, predicted_se
from scalinglab.inventory import (
    MATCH_LIMIT,
    MATCH_TARGET,
    Inventory,
    SeedNoise,
    grade,
    matching,
    row_checks,
    seed_noise,
    take_inventory,
    tier_table,
)
from scalinglab.laws import LAWS, Law, law_from

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

__all__ = ["DEFAULT_SIGMA", "Audit", "audit", "predicted_se"]

DEFAULT_SIGMA = 0.003  # nats; 80 repeats of a 124M run have SD .0019, published curves .002-.005 at losses near 3
_PREFERRED = ("shape", "chinchilla", "ray", "kaplan_n", "kaplan_d")  # the first that is estimable is recommended
_NO_LAW = "none of the usual ones is determined by these runs; compare shapes within matched groups"
_FEW_REPLICATES = 12  # degrees of freedom that the variance model needs


@dataclass(frozen=True)
class Audit:
    """What a run table can answer. Immutable; tables are DataFrames, codes are stable strings.

    counts : rows, runs, distinct N, D, shapes, architectures, cells, seeds; NaN where a column is missing.
    checks : graded facts (ok, warn, block), each with what to do. tiers : one row per size tier.
    laws : one row per law: estimable, condition numbers, parameters the runs leave open, recommended.
    se : predicted standard errors [law -> Series]. mde : minimal detectable effects (two-sided .05, power .8).
    matching : residual mismatch of the groups to compare. add : what to train next, in words.
    unknown : what can't be said because a column is missing. sigma_source : where the seed SD (nats) comes from.
    """

    counts: pd.Series
    checks: tuple[dx.Check, ...]
    tiers: pd.DataFrame
    laws: pd.DataFrame
    se: Mapping[str, pd.Series]
    mde: pd.DataFrame
    matching: pd.DataFrame
    add: tuple[str, ...]
    unknown: tuple[str, ...]
    recommended: str | None
    sigma: float
    sigma_source: str
    tau: float
    information: Mapping[str, Information] = field(default_factory=dict, repr=False)

    @property
    def codes(self) -> list[str]:
        """Codes of all checks that are not fine, worst first."""
        return [c.code for c in sorted(self.checks, key=lambda c: c.level != "block") if c.level != "ok"]

    def to_frame(self) -> pd.DataFrame:
        """Every check with value, level, code and what to do: one row each."""
        return pd.DataFrame([c.row() for c in self.checks])

    def summary(self) -> str:
        """The audit as text: counts, tiers, trouble, laws, smallest visible effects, what to add."""
        return _text(self)

    def __repr__(self) -> str:
        trouble = ", ".join(self.codes) or "no trouble"
        return f"<Audit: {self.counts['runs']:.0f} runs; recommended law {self.recommended}; {trouble}>"


def audit(
    runs: pd.DataFrame,
    *,
    law: str | Law | Fit | None = None,
    sigma: float | None = None,
    tau: float = 0.0,
    params: Mapping[str, float] | None = None,
) -> Audit:
    """Audit a run table (or a plan of one: losses are not needed).

    Parameters
    ----------
    runs : run table; columns that are missing are named in `unknown`, nothing is made up for them.
    law : a law to look at besides those of LAWS; a Fit brings its own parameters as truth.
    sigma : SD of the final loss between seeds, nats. Default: pooled from replicates with 4 or more degrees of freedom,
        else 0.003, which is said.
    tau : SD in nats of what the law misses at a shape (not averaged away by seeds); published refits suggest .002-.004.
    params : truth for `law`; default the fit's own, else values of the literature.

    Raises
    ------
    SchemaError
        Not a table, or no usable row.
    ConfigError
        sigma or tau out of range, params without law, a law without known truth.

    Notes
    -----
    Predicted standard errors are asymptotic (Fisher information, Gaussian errors) at an assumed truth: good for comparing
    designs, no substitute for the jackknife of a fit.
    """
    if sigma is not None and not (np.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"sigma is {sigma!r}: give the SD of the loss between seeds in nats, e.g. 0.003")
    if not (np.isfinite(tau) and tau >= 0):
        raise ConfigError(f"tau is {tau!r}: give the SD of the law's misfit between shapes in nats, 0 or more")
    if params is not None and law is None:
        raise ConfigError("params= is the truth of a law: name it with law=")
    seen = take_inventory(runs)
    noise = seed_noise(seen)
    used, source = _sigma(sigma, noise, seen)
    table = seen.rows[[c for c in seen.rows if c in COLUMNS or c in ("run_id", "architecture") or law is not None]]
    if seen.size not in (None, "params"):
        table = table.assign(params=table[seen.size])
    cells = seen.finals.set_index("run_id")["cell"].reindex(table["run_id"]).to_numpy(np.intp)
    known = _informations(table, law, params, used, tau, cells)
    matched = matching(seen)
    checks = [*row_checks(seen), *_design(seen, table), *_match_checks(matched, seen)]
    laws, recommended = _laws(known, checks)
    tiers = tier_table(seen)
    return Audit(
        _counts(seen), tuple(checks), tiers, laws, {k: i.se for k, i in known.items() if isinstance(i, Information)},
        minimal_effects(seen, table, known, used, tau, noise, cells), matched, tuple(_additions(seen, tiers, checks, laws)),
        tuple(_unknown(seen)), recommended, used, source, tau,
        {k: i for k, i in known.items() if isinstance(i, Information)},
    )  # fmt: skip


def _sigma(sigma: float | None, noise: SeedNoise | None, seen: Inventory) -> tuple[float, str]:
    if sigma is not None:
        return float(sigma), "given"
    if noise is not None:
        return (
            noise.sigma,
            f"pooled over seeds, {noise.df} degrees of freedom; its 95 % upper limit is {noise.upper:.2f} times that",
        )
    return DEFAULT_SIGMA, f"assumed: {seen.replicate_df} replicate degrees of freedom here, 4 are needed to estimate it"


def _counts(seen: Inventory) -> pd.Series:
    shapes = len(seen.finals.drop_duplicates(["depth", "width"])) if seen.has("depth", "width") else np.nan
    tiers = seen.finals["tier"].nunique() if seen.size else np.nan
    value = {
        "rows": len(seen.rows), "runs": len(seen.finals), "stopped rows": seen.stopped,
        "distinct N": seen.distinct(seen.size) if seen.size else np.nan, "distinct D": seen.distinct("tokens"),
        "shapes": shapes, "architectures": seen.distinct("architecture"), "size tiers": tiers,
        "cells": len(seen.seeds), "seeds per cell (median)": float(np.median(seen.seeds)), "replicate df": seen.replicate_df,
    }  # fmt: skip
    return pd.Series({k: np.nan if v is None else float(v) for k, v in value.items()})


# ---- checks --------------------------------------------------------------------------------------------------------------
def _design(seen: Inventory, table: pd.DataFrame) -> list[dx.Check]:
    """Diversity and collinearity; the thresholds are those of a fit's own checks."""
    out: list[dx.Check] = []
    for column, code, what in ((seen.size, "FEW_SIZES", "sizes N"), ("tokens", "FEW_BUDGETS", "token budgets D")):
        count = seen.distinct(column) if column else None
        if count is not None:
            out.append(dx.Check(f"distinct {what}", float(count), "ok" if count >= 3 else "block" if count == 1 else "warn", code,
                                f"{count} distinct {what}: an exponent and a floor need at least three"))  # fmt: skip
    for column, code, what in ((seen.size, "NARROW_SIZES", "N"), ("tokens", "NARROW_BUDGETS", "D")):
        if column and column in seen.rows and (seen.rows[column] > 0).all():
            wide = float(seen.rows[column].max() / seen.rows[column].min())
            level: dx.Grade = "ok" if wide >= 4 else "warn" if wide >= 2 else "block"
            why = f"{what} varies by a factor of {wide:.3g}: an exponent of {what} would be an extrapolation"
            out.append(dx.Check(f"range of {what} (largest / smallest)", wide, level, code, why))
    usable = [c for c in ("params", "tokens", "depth", "width") if c in table and table[c].notna().all()]
    own = table[["run_id", *(c for c in usable if (table[c] > 0).all())]]
    if len(seen.finals) > 1:
        with np.errstate(all="ignore"):
            out += dx.design_checks(LAWS["shape"], own)
    if {"params", "tokens"} <= set(own) and np.ptp(own["params"]) > 0 and np.ptp(own["tokens"]) > 0:
        r = np.corrcoef(np.log(own["params"].to_numpy(np.float64)), np.log(own["tokens"].to_numpy(np.float64)))[0, 1]
        vif = float(1 / max(1e-12, 1 - r * r))
        out.append(dx.Check("collinearity of ln params and ln tokens (VIF)", vif, "warn" if vif > 5 else "ok", "SIZE_DATA_COLLINEAR",
                            "larger runs are longer runs: alpha and beta trade off; vary tokens at fixed size"))  # fmt: skip
    df = seen.replicate_df
    few = df < _FEW_REPLICATES
    out.append(dx.Check("replicate degrees of freedom", float(df), "warn" if few else "ok", "FEW_REPLICATES",
                        f"{df} degrees of freedom between seeds: too few to estimate the seed noise or test lack of fit"))  # fmt: skip
    crossing = _crossing(seen)
    if crossing is not None:
        out.append(dx.Check("share of shapes run in every architecture", crossing, "ok" if crossing > 0.8 else "warn", "UNCROSSED",
                            "architectures ran at different shapes: their difference is mixed with shape; train the missing cells"))  # fmt: skip
    return out


def _crossing(seen: Inventory) -> float | None:
    keys = [c for c in (seen.size, "tokens", "depth", "width") if c and c in seen.finals]
    levels = seen.distinct("architecture")
    if levels is None or levels < 2 or not keys:
        return None
    keys = ["depth", "width"] if {"depth", "width"} <= set(keys) else keys
    per_shape = seen.finals.groupby(keys)["architecture"].nunique()
    return float((per_shape == levels).mean())


def _match_checks(matched: pd.DataFrame, seen: Inventory) -> list[dx.Check]:
    out = []
    graded = matched[matched["level"] != "not matched"] if len(matched) else matched
    for column, code, name in ((f"dln_{seen.size}", "MISMATCH_N", "ln N"), ("dln_tokens", "MISMATCH_D", "ln D")):
        known = graded.dropna(subset=[column]) if column in graded else graded.iloc[:0]
        if not len(known):
            continue
        worst = known.loc[known[column].idxmax()]
        value = float(worst[column])
        level = grade(value, MATCH_TARGET, MATCH_LIMIT)
        if level == "block" and "match_group" not in seen.finals:
            level = "warn"  # nobody said that these runs are matched
        out.append(dx.Check(
            f"widest mismatch of {name} in a matched group", value, level, code,
            f"{worst['group']} differs by {value:.3f} in {name} (target 0.01, limit 0.03): correct with the law's elasticity "
            "and its variance, or resize the runs"))  # fmt: skip
    return out


# ---- laws ----------------------------------------------------------------------------------------------------------------
def _informations(
    table: pd.DataFrame,
    law: str | Law | Fit | None,
    params: Mapping[str, float] | None,
    sigma: float,
    tau: float,
    cells: NDArray[np.intp],
) -> dict[str, Information | str]:
    """Information of every law, or the sentence that says why there is none."""
    out: dict[str, Information | str] = {}
    for key, entry in LAWS.items():
        if not entry.in_algebra:
            out[key] = "a free-form law: fitted by lmfit, not predicted here"
            continue
        try:
            out[key] = information(entry, plausible(entry, table), table, sigma=sigma, tau=tau, cells=cells)
        except ScalinglabError as error:
            out[key] = str(error)
    if law is None:
        return out
    if hasattr(law, "params") and hasattr(law, "law"):
        chosen, truth = law.law, dict(law.params) if params is None else dict(params)
    else:
        chosen = law_from(law, table.columns)
        truth = dict(params) if params is not None else plausible(chosen, table)
    out[chosen.key] = information(chosen, truth, table, sigma=sigma, tau=tau, cells=cells)
    return out


def _laws(known: Mapping[str, Information | str], checks: list[dx.Check]) -> tuple[pd.DataFrame, str | None]:
    blocked = {c.code for c in checks if c.level == "block"}
    rows = []
    for key, info in known.items():
        if isinstance(info, str):
            rows.append({"law": key, "estimable": "unknown", "condition": np.nan, "condition_raw": np.nan, "df": np.nan,
                         "not_estimable": "", "why": info})  # fmt: skip
            continue
        why = []
        reads = info.law.reads
        if info.open:
            why.append(f"open: {', '.join(info.open)}")
        if info.condition > 1000:
            why.append(f"condition number {info.condition:.3g}")
        if set(info.weak) - set(info.open):
            why.append(f"standard error above half the value: {', '.join(n for n in info.weak if n not in info.open)}")
        if info.df < 1:
            why.append(f"{info.df + len(info.params)} observations for {len(info.params)} parameters")
        if "RAY_DESIGN" in blocked and {"params", "tokens"} <= reads:
            why.append("one ratio of tokens to parameters")
        if "LOW_SHAPE_DIVERSITY" in blocked and reads & {"u", "aspect", "depth", "width"}:
            why.append("shapes of one size are alike")
        if "NARROW_SIZES" in blocked and reads & {"params", "width"}:
            why.append("sizes are alike")
        if "NARROW_BUDGETS" in blocked and "tokens" in reads:
            why.append("token budgets are alike")
        verdict = "no" if why else "yes" if info.condition < 100 else "weakly"
        rows.append({"law": key, "estimable": verdict, "condition": info.condition, "condition_raw": info.condition_raw,
                     "df": info.df, "not_estimable": ", ".join(info.weak), "why": "; ".join(why)})  # fmt: skip
    table = pd.DataFrame(rows).set_index("law")
    fine = table.index[table["estimable"].isin(["yes", "weakly"])]
    # laws of one variable describe runs in which the other one does not vary by itself
    bad = {c.code for c in checks if c.level != "ok"}
    lone = {
        "ray": bad & {"RAY_DESIGN", "NARROW_BUDGETS"},
        "kaplan_n": bad & {"RAY_DESIGN", "NARROW_BUDGETS"},
        "kaplan_d": bad & {"NARROW_SIZES"},
    }
    if any(isinstance(known[k], str) for k in ("kaplan_n", "kaplan_d")):  # the other variable is not known to vary
        lone = {}
    recommended = next((k for k in _PREFERRED if k in fine and lone.get(k, True)), None)
    table["recommended"] = table.index == recommended
    return table, recommended


# ---- advice ----------------------------------------------------------------------------------------------------------------
def _additions(seen: Inventory, tiers: pd.DataFrame, checks: list[dx.Check], laws: pd.DataFrame) -> list[str]:
    level = {c.code: c.level for c in checks}
    out = []
    if "FEW_SIZES" in level and {level["FEW_SIZES"], level.get("NARROW_SIZES", "ok")} & {"warn", "block"}:
        out.append("runs at 0.25x and 4x the size N: an exponent needs at least three sizes")
    if level.get("RAY_DESIGN", "ok") != "ok" or level.get("FEW_BUDGETS", "ok") != "ok":
        small = (
            seen.finals.nsmallest(min(9, len(seen.finals)), seen.size)["run_id"].head(3).tolist() if seen.size else []
        )
        named = f" (such as {', '.join(small)})" if small else ""
        out.append(f"0.25x and 4x token budgets for the smaller runs{named}: they separate alpha from beta")
    if "sd_ln_aspect" in tiers:
        for tier, line in tiers.iterrows():
            if line["sd_ln_aspect"] < 0.4 and len(tiers) <= 8 and line["shapes"] >= 1:
                own = seen.finals[seen.finals["tier"] == int(str(tier)) - 1]
                where = f" (N about {own[seen.size].median():.3g})" if seen.size else ""
                out.append(f"wider and deeper runs at size tier {tier}{where}: e.g. {_stretched(own)}")
    if level.get("FEW_REPLICATES", "ok") != "ok":
        need = _FEW_REPLICATES - seen.replicate_df
        out.append(f"{need} more seeds, at the shallowest and the deepest shape of one size: they give the seed noise")
    if level.get("UNCROSSED", "ok") != "ok":
        out.append("the missing cells of architecture x shape")
    if level.get("MISMATCH_N", "ok") == "block":
        out.append("runs resized to within 1 % in N of their group (change the feed-forward width)")
    return out


def _stretched(own: pd.DataFrame) -> str:
    """Depth x2 and /2 at equal 12 L d^2, widths rounded to 64."""
    own = own.dropna(subset=["depth", "width"])
    if not len(own):
        return "shapes of twice and of half the depth"
    middle = own.iloc[(own["depth"] - own["depth"].median()).abs().argmin()]
    made = []
    for factor in (0.5, 2.0):
        depth = max(1, round(float(middle["depth"]) * factor))
        width = max(64, 64 * round(float(middle["width"]) * np.sqrt(float(middle["depth"]) / depth) / 64))
        made.append(f"{depth} x {width}")
    return " and ".join(made) + f" beside {int(middle['depth'])} x {int(middle['width'])} (depth x width)"


def _unknown(seen: Inventory) -> list[str]:
    out = []
    if seen.size is None:
        out.append(
            "no parameter count (params, params_backbone or params_total): sizes, tokens per parameter and most laws"
        )
    if not seen.has("tokens"):
        out.append("no complete column tokens: budgets and data laws")
    if not seen.has("depth", "width"):
        out.append("no complete columns depth and width: anything about shape")
    if seen.distinct("architecture") is None:
        out.append("no column architecture: differences between architectures")
    if seen.distinct("seed") is None:
        out.append("no column seed: runs of equal settings are taken as seeds")
    if "loss" not in seen.finals or seen.finals["loss"].isna().all():
        out.append("no losses: the seed noise is assumed, duplicates can't be found")
    if seen.distinct("lr") is None:
        out.append("no column lr: whether shapes ran at their own best learning rate")
    if not {"status", "schedule_finished", "is_final"} & set(seen.rows.columns):
        out.append("no column status, schedule_finished or is_final: whether schedules ended")
    return out


# ---- text ------------------------------------------------------------------------------------------------------------------
def _text(a: Audit) -> str:
    def count(name: str) -> str:
        return "?" if np.isnan(a.counts[name]) else f"{a.counts[name]:g}"

    lines = [
        "Design audit",
        "  "
        + ", ".join(f"{name} {count(name)}" for name in a.counts.index if name != "stopped rows" or a.counts[name]),
        f"  sigma {a.sigma:.3g} nats ({a.sigma_source}); tau {a.tau:g} nats",
        "",
        "Size tiers",
        _indented(a.tiers.to_string(float_format=lambda v: f"{v:.4g}")),
        "",
    ]
    trouble = sorted((c for c in a.checks if c.level != "ok"), key=lambda c: c.level != "block")
    lines.append("Trouble" if trouble else "Trouble: none found")
    lines += [f"  {c.level:5s} {c.code}: {c.name} = {c.value:.3g}; {c.action}" for c in trouble]
    if len(a.matching):
        lines += [
            "",
            "Matching (widest difference within a group)",
            _indented(a.matching.to_string(index=False, float_format=lambda v: f"{v:.4f}")),
        ]
    lines += ["", "Laws on these runs (predicted)"]
    for key, row in a.laws.iterrows():
        if row["estimable"] == "unknown":
            lines.append(f"  {key:20s} ?       {row['why'].split(';')[0]}")
            continue
        se = a.se[str(key)]
        told = ", ".join(f"{n} +-{v:.2g}" for n, v in se.items() if np.isfinite(v) and v > 0)
        verdict = f"{row['estimable']:7s}"
        lines.append(f"  {key:20s} {verdict} condition {row['condition']:.3g}; {row['why'] or 'SE: ' + told}")
    lines += ["", f"Recommended law: {a.recommended or _NO_LAW}", ""]
    lines.append(f"Smallest visible effects (two-sided {LEVEL:g}, power {POWER:g})")
    lines += [
        f"  {name}: {row['mde']:.3g} {row['unit'] if row['unit'] != '1' else ''}".rstrip() + f"  ({row['how']})"
        for name, row in a.mde.iterrows()
    ]
    if a.add:
        lines += ["", "Add", *(f"  - {text}" for text in a.add)]
    if a.unknown:
        lines += ["", "Can't be said", *(f"  - {text}" for text in a.unknown)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())

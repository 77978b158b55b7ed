"""Tables T1 to T7 of a depth study, full precision: rounding is the business of who prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from scalinglab.depth_benefit.analysis import Options, Outcome, is_primary
from scalinglab.depth_benefit.divergence import divergence_table, worst_rank
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.study import Gate
from scalinglab.fitting import Fit

T1 = (
    "architecture", "tier", "depth", "width", "ffn_dim", "heads", "params", "params_total", "kappa", "tokens",
    "tokens_per_param", "flops_full", "flops_causal", "lr_grid", "lr_interior", "seeds_planned", "seeds_finished",
    "seeds_diverged", "loss", "loss_sd", "schedule_finished",
)  # fmt: skip
T2 = (
    "law", "architecture", "parameter", "estimate", "se", "df", "low", "high", "interval_method", "kappa_c", "identified",
    "robust_shift_se", "drop_worst_run",
)  # fmt: skip
T3 = (
    "architecture", "estimand", "variant", "contrast", "params", "tokens", "estimate", "unit", "se", "df", "low", "high",
    "p", "p_holm", "low90", "high90", "margin", "compute_percent", "compute_percent_low", "compute_percent_high",
    "correction", "method", "label",
)  # fmt: skip
T4 = (
    "architecture", "reference", "difference", "low", "high", "p_max_t", "dgamma1", "dgamma2", "shrunken", "tau", "label",
)  # fmt: skip
T6 = ("analysis", "architecture", "estimate", "se", "label", "counts", "note")
T7 = (
    "architecture", "depth", "n", "diverged", "rate", "low", "high", "worst_rank_p", "B_complete", "B_low", "B_high",
    "B_composite", "tipping",
)  # fmt: skip


def data_audit(intake: Intake) -> pd.DataFrame:
    """T1: one row per architecture, group and shape."""
    rows = []
    runs, lost = intake.runs, intake.lost
    both = pd.concat([runs.assign(_lost=False), lost.assign(_lost=True)], ignore_index=True)
    both["_done"] = _done(both)
    for (a, group, depth, width), own in both.groupby(["architecture", "group", "depth", "width"], sort=False):
        alive = own[~own["_lost"]]
        first = own.iloc[0]
        n, d = float(first["params"]), float(own["tokens"].max())
        grid = sorted(own["lr"].dropna().unique()) if "lr" in own else []
        rows.append({
            "architecture": a, "tier": group, "depth": depth, "width": width, "ffn_dim": first.get("ffn_dim", math.nan),
            "heads": first.get("heads", math.nan), "params": n, "params_total": first.get("params_total", math.nan),
            "kappa": n / (float(depth) * float(width) ** 2), "tokens": d, "tokens_per_param": d / n,
            "flops_full": first.get("flops_full", math.nan), "flops_causal": first.get("flops_causal", math.nan),
            "lr_grid": ", ".join(f"{v:g}" for v in grid), "lr_interior": _interior(alive, grid),
            "seeds_planned": len(own), "seeds_finished": len(alive), "seeds_diverged": int(own["_lost"].sum()),
            "loss": float(alive["loss"].mean()) if len(alive) else math.nan,
            "loss_sd": float(alive["loss"].std(ddof=1)) if len(alive) > 1 else math.nan,
            "schedule_finished": "unknown" if alive["_done"].isna().any() else "yes" if alive["_done"].all() else "no",
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(T1))


def law_parameters(fit: Fit | None) -> pd.DataFrame:
    """T2: parameters of the law with their jackknife intervals (over shapes) and what moves them."""
    if fit is None:
        return pd.DataFrame(columns=list(T2))
    table = fit.to_frame()
    made = fit.jackknife
    dropped = pd.concat([made.params, fit.derive(made.params)], axis=1)
    kappa = next((c.value for c in fit.checks if c.name == "conditioning, centred"), math.nan)
    rows = []
    for name, r in table[table["kind"] != "fixed"].iterrows():
        plain, _, level = str(name).partition("[")
        away = dropped[name].to_numpy(np.float64) if name in dropped else np.array([math.nan])
        far = np.abs(away - r["estimate"])
        rows.append({
            "law": fit.law.key, "architecture": level.removesuffix("]"), "parameter": plain, "estimate": r["estimate"],
            "se": r["se"], "df": r["df"], "low": r["low"], "high": r["high"], "interval_method": made.method,
            "kappa_c": kappa, "identified": bool(r["identified"]), "robust_shift_se": r["robust_shift_se"],
            "drop_worst_run": float(away[int(np.nanargmax(far))]) if np.isfinite(far).any() else math.nan,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(T2))


def depth_effects(outcome: Outcome, options: Options) -> pd.DataFrame:
    """T3: every effect with interval, p, margin, what it is worth in compute, and the label of its architecture."""
    rows = []
    for e, p in zip(outcome.effects, outcome.p_adj, strict=True):
        row = e.row()
        low, high = e.interval(0.95)
        share = [math.nan] * 3
        if e.unit == "nats" and outcome.screen.compute > 0:
            share = [100 * math.expm1(v / outcome.screen.compute) for v in (e.estimate, low, high)]
        primary = is_primary(e, options) and e.architecture in outcome.verdicts
        rows.append({
            **{k: row[k] for k in ("architecture", "estimand", "variant", "params", "tokens", "estimate", "unit", "se", "df")},
            **{k: row[k] for k in ("low", "high", "p", "low90", "high90", "correction", "method")},
            "contrast": contrast_text(e.contrast), "p_holm": p,
            "margin": e.of_gap(outcome.margin),
            "compute_percent": share[0], "compute_percent_low": share[1], "compute_percent_high": share[2],
            "label": outcome.verdicts[e.architecture].label if primary else "",
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(T3))


def interaction(outcome: Outcome, gate: Gate | None, labels: Mapping[str, str]) -> pd.DataFrame:
    """T4: each architecture's effect less the reference's, simultaneous limits, shape coefficients, shrunken estimate.

    Shrunken (Paule-Mandel, at least five architectures): the difference of effects that are pulled towards their mean by how
    much of their spread is noise; tau is the SD between architectures that is left.
    """
    own = outcome.effects.subset("E7", "")
    if not len(own):
        return pd.DataFrame(columns=list(T4))
    gammas = {(e.architecture, e.variant): e.estimate for e in outcome.effects if e.estimand == "E7" and e.variant}
    shrunk, tau = _shrunken(outcome)
    rows = []
    for e in own:
        low, high, p = math.nan, math.nan, math.nan
        if gate is not None and e.architecture in gate.contrasts.index:
            low, high, p = (float(gate.contrasts.loc[e.architecture, c]) for c in ("low", "high", "p_max_t"))
        rows.append({
            "architecture": e.architecture, "reference": e.reference, "difference": e.estimate, "low": low, "high": high,
            "p_max_t": p, "dgamma1": gammas.get((e.architecture, "gamma1"), math.nan),
            "dgamma2": gammas.get((e.architecture, "gamma2"), math.nan),
            "shrunken": shrunk.get(e.architecture, math.nan) - shrunk.get(str(e.reference), math.nan), "tau": tau, "label": labels.get(e.architecture, ""),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(T4))


def robustness(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """T6: every re-analysis with its estimate and label."""
    return pd.DataFrame(list(rows), columns=list(T6))


def divergence(intake: Intake, outcome: Outcome, *, draws: int = 1999, rng: int = 0) -> pd.DataFrame:
    """T7: divergence per architecture and depth, the worst-rank p of the architecture and its bounds."""
    table = divergence_table(intake.runs, intake.lost)
    out = table.reindex(columns=list(T7))
    for column in T7[7:]:
        out[column] = math.nan
    for a in dict.fromkeys(intake.lost["architecture"]):
        here = out["architecture"] == a
        both = pd.concat([intake.runs.assign(_lost=False), intake.lost.assign(_lost=True)], ignore_index=True)
        own = both[both["architecture"] == a]
        if own.groupby("group")["x"].nunique().max() > 1:
            _, p = worst_rank(own["x"], own["loss"], own["_lost"], strata=own["group"], draws=draws, rng=rng)
            out.loc[here, "worst_rank_p"] = p
        b = outcome.bounds.get(str(a))
        if b is not None:
            for column, value in (
                ("B_complete", b.complete), ("B_low", b.manski[0]), ("B_high", b.manski[1]),
                ("B_composite", b.composite), ("tipping", b.tipping),
            ):  # fmt: skip
                out.loc[here, column] = value
    return out


def contrast_text(contrast: Mapping[str, float]) -> str:
    """ "16 -> 42" blocks, or aspect ratios where depths aren't whole."""
    a, b = contrast.get("depth_shallow", math.nan), contrast.get("depth_deep", math.nan)
    return f"{a:.3g} -> {b:.3g}" if math.isfinite(a) and math.isfinite(b) else ""


def _shrunken(outcome: Outcome) -> tuple[dict[str, float], float]:
    e = [x for x in outcome.effects.subset("E1") if x.usable]
    if len(e) < 5:
        return {}, math.nan
    from scipy.optimize import brentq

    y, v = np.array([x.estimate for x in e]), np.array([x.se**2 for x in e])

    def excess(t2: float) -> float:
        w = 1 / (v + t2)
        mean = float((w * y).sum() / w.sum())
        return float((w * (y - mean) ** 2).sum()) - (len(y) - 1)

    top = float(y.var(ddof=1)) * 10 + 1e-12
    tau2 = 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, top)) if excess(top) < 0 else top
    w = 1 / (v + tau2)
    mean = float((w * y).sum() / w.sum())
    pulled = (y * tau2 + mean * v) / (tau2 + v)
    return {x.architecture: float(p) for x, p in zip(e, pulled, strict=True)}, math.sqrt(tau2)


def _interior(alive: pd.DataFrame, grid: list[float]) -> str:
    if len(grid) < 2 or not len(alive):
        return "unknown" if not grid else "one rate"
    best = float(alive.groupby("lr")["loss"].mean().idxmin())
    return "no" if best in (grid[0], grid[-1]) else "yes"


def _done(runs: pd.DataFrame) -> pd.Series:
    """Whether the status of each run says that its schedule ended; empty where nothing is said."""
    if "status" not in runs or runs["status"].isna().all():
        return pd.Series(pd.NA, index=runs.index, dtype="boolean")
    status = runs["status"].astype("string").str.strip().str.lower()
    return (
        status.isin(["finished", "done", "completed", "complete", "ok", "success"])
        .astype("boolean")
        .where(status.notna())
    )

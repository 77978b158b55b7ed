"""Matched pairs: a shallow and a deep run of one architecture, group and seed, with the audit of what is left unmatched.

A pair is only as good as its match. Equal N within 3 % still leaves .0056 nats at 300M parameters, two or three seed
standard deviations; so the mismatch is shown, its predicted spurious gap is held against the standard error, and the
correction carries the variance of its own rate. Plugging a rate in without it rejects a true null in 15-22 % of studies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.cell_effects import corrected
from scalinglab.depth_benefit.effects import Correction, Effect, EffectSet, satterthwaite
from scalinglab.depth_benefit.intake import ParamsChoice, take_in
from scalinglab.depth_benefit.rates import Rates
from scalinglab.errors import ConfigError, FitError
from scalinglab.inventory import MATCH_LIMIT, MATCH_TARGET, grade
from scalinglab.shapes import FlopConvention

Array = NDArray[np.float64]
On = Literal["params", "flops"]

_MIN_PAIRS_FOR_CORRELATION = 5  # Fisher's interval needs more than three pairs; with five it can still hardly exclude 0


@dataclass(frozen=True)
class MatchedRuns:
    """Pairs of runs and how well they match.

    pairs : one row per pair: architecture, group, seed, run_shallow, run_deep, depth_*, gap = loss(shallow) - loss(deep)
        (nats), dln_params, dln_params_total, dln_tokens, dln_flops (deep minus shallow, empty where not known), level.
    unmatched : runs of the two depths without a partner, with the reason.
    on : what the pairs are matched on. shallow, deep : the depths.
    runs : all prepared runs of the two depths, which an unpaired analysis uses.
    """

    pairs: pd.DataFrame
    unmatched: pd.DataFrame
    runs: pd.DataFrame
    on: str
    shallow: float
    deep: float

    def audit(self, rates: Rates | None = None) -> pd.DataFrame:
        """Per architecture: pairs, widest mismatch of N, D and FLOPs, its grade, and the gap that it alone would make.

        `spurious` = eps_N |dlnN| + eps_D |dlnD| of the mean mismatch (nats); `needs_correction` where it is above half the
        standard error of B. Both are empty without rates.
        """
        rows = []
        for a, own in self.pairs.groupby("architecture", sort=False):
            dn, dd = float(own["dln_params"].mean()), float(own["dln_tokens"].mean())
            b = _gap(self, str(a), "auto")
            spurious = math.nan if rates is None else abs(rates.params * dn) + abs(rates.tokens * dd)
            worst = max(float(own["dln_params"].abs().max()), float(own["dln_tokens"].abs().max()))
            rows.append({
                "architecture": a, "pairs": len(own), "dln_params": dn, "dln_params_total": own["dln_params_total"].mean(),
                "dln_tokens": dd, "dln_flops": own["dln_flops"].mean(), "level": grade(worst, MATCH_TARGET, MATCH_LIMIT),
                "se": b.se, "spurious": spurious, "needs_correction": spurious > 0.5 * b.se if rates is not None else None,
            })  # fmt: skip
        return pd.DataFrame(rows)

    def contrast(
        self,
        *,
        rates: Rates | None = None,
        pairing: Literal["auto", "paired", "unpaired"] = "auto",
        reference: str | None = None,
    ) -> EffectSet:
        """E1 of each architecture from its pairs, corrected for the mismatch where rates are given, and E7.

        pairing : "auto" pairs by seed only where the correlation of the pairs has a 90 % interval above 0.

        The error is the seeds'. It speaks about these two shapes: what a shape has of its own isn't in it. For a claim about
        depth use several shapes and `cell_effects`.

        Raises
        ------
        ConfigError
            An unknown reference or pairing.
        """
        if pairing not in ("auto", "paired", "unpaired"):
            raise ConfigError(f"pairing={pairing!r} is not known: use 'auto', 'paired' or 'unpaired'")
        names = list(dict.fromkeys(self.pairs["architecture"]))
        if reference is not None and reference not in names:
            raise ConfigError(f"reference={reference!r} has no pairs; known: {', '.join(names)}")
        effects: list[Effect] = []
        gradients: list[Array] = []
        raws: list[float] = []
        for a in names:
            e = _gap(self, a, pairing)
            g = np.array([-e.correction.dln_params, -e.correction.dln_tokens])
            raws.append(e.se**2)
            if rates is not None:
                estimate, se, fixed = corrected(
                    e.estimate, e.se**2, e.correction.dln_params, e.correction.dln_tokens, rates
                )
                df = satterthwaite([e.se**2, fixed.se**2], [e.df, rates.df])
                e = Effect(
                    "E1", a, estimate, se, df, "nats", e.method, contrast=e.contrast, correction=fixed, note=e.note
                )
            gradients.append(g)
            effects.append(e)
        G = np.array(gradients)
        cov = np.diag(raws)
        if rates is not None:
            cov = cov + G @ rates.cov[:2, :2] @ G.T
        if reference is None:
            return EffectSet(tuple(effects), cov)
        ref = names.index(reference)
        T = [np.eye(len(names))]
        for i, a in enumerate(names):
            if i == ref:
                continue
            line = np.zeros(len(names))
            line[i], line[ref] = 1.0, -1.0
            T.append(line[None])
            e, r = effects[i], effects[ref]
            df = satterthwaite([e.se**2, r.se**2], [e.df, r.df])
            effects.append(Effect(
                "E7", a, e.estimate - r.estimate, float(math.sqrt(line @ cov @ line)), df, "nats", e.method,
                reference=reference, contrast=e.contrast,
            ))  # fmt: skip
        M = np.concatenate(T)
        return EffectSet(tuple(effects), M @ cov @ M.T)


def match_runs(
    runs: pd.DataFrame,
    *,
    shallow: float,
    deep: float,
    on: On = "params",
    params: ParamsChoice = "backbone",
    tolerance: float | None = None,
    convention: FlopConvention = "causal",
) -> MatchedRuns:
    """Pair the runs of two depths within architecture, matched group and seed.

    Parameters
    ----------
    runs : run table; see `intake.take_in` for what it needs.
    shallow, deep : depths L.
    on : "params" matches N and D (the default estimand E1), "flops" matches training FLOPs of `convention` instead.
    tolerance : largest |difference| of ln N and ln D (.03 by default), or of ln FLOPs (.01). Pairs beyond it are listed as
        unmatched.

    Raises
    ------
    ConfigError
        The depths are not in order or not in the table, or the FLOPs are not known.
    FitError
        No pair is within the tolerance: the message says how far off the nearest is.
    """
    table = take_in(runs, params=params).runs
    limit = (MATCH_TARGET if on == "flops" else MATCH_LIMIT) if tolerance is None else tolerance
    return match_prepared(table, shallow=shallow, deep=deep, on=on, tolerance=limit, convention=convention)


def match_prepared(
    table: pd.DataFrame,
    *,
    shallow: float,
    deep: float,
    on: On = "params",
    tolerance: float = MATCH_LIMIT,
    convention: FlopConvention = "causal",
) -> MatchedRuns:
    """`match_runs` on runs that `intake.take_in` has prepared."""
    if not 0 < shallow < deep:
        raise ConfigError(f"shallow={shallow:g} must be less than deep={deep:g}, both positive")
    if on not in ("params", "flops"):
        raise ConfigError(f"on={on!r} is not known: match on 'params' or 'flops'")
    for depth in (shallow, deep):
        if not (table["depth"] == depth).any():
            known = ", ".join(f"{v:g}" for v in sorted(table["depth"].unique()))
            raise ConfigError(f"no run has depth {depth:g}; there are {known}")
    column = f"flops_{convention}"
    if on == "flops" and (column not in table or table[column].isna().any()):
        raise ConfigError(f"matching on flops needs {column!r}: give vocab and context, or that column")
    found: list[dict[str, object]] = []
    alone: list[dict[str, object]] = []
    for (a, group), own in table.groupby(["architecture", "group"], sort=False):
        arms = {d: own[own["depth"] == d] for d in (shallow, deep)}
        for s, d, seed in _partners(arms[shallow], arms[deep]):
            if s is None or d is None:
                one = d if s is None else s
                assert one is not None
                alone.append({"run_id": one["run_id"], "architecture": a, "reason": "no partner of that seed"})
                continue
            row = {
                "architecture": a, "group": group, "seed": seed, "run_shallow": s["run_id"], "run_deep": d["run_id"],
                "depth_shallow": shallow, "depth_deep": deep, "gap": s["loss"] - d["loss"],
                "loss_shallow": s["loss"], "loss_deep": d["loss"],
                "dln_params": _dln(s, d, "params"), "dln_params_total": _dln(s, d, "params_total"),
                "dln_tokens": _dln(s, d, "tokens"), "dln_flops": _dln(s, d, column),
                "aspect_shallow": s["width"] / s["depth"], "aspect_deep": d["width"] / d["depth"],
                "params": math.sqrt(s["params"] * d["params"]), "tokens": math.sqrt(s["tokens"] * d["tokens"]),
            }  # fmt: skip
            off = abs(row["dln_flops"]) if on == "flops" else max(abs(row["dln_params"]), abs(row["dln_tokens"]))
            row["level"] = grade(off, MATCH_TARGET, MATCH_LIMIT)
            if off > tolerance * (1 + 1e-9):
                alone.append({
                    "run_id": f"{s['run_id']} and {d['run_id']}", "architecture": a,
                    "reason": f"{on} differ by {off:.3f} in ln, beyond {tolerance:g}", "off": off,
                })  # fmt: skip
                continue
            found.append(row)
    unmatched = pd.DataFrame(alone, columns=["run_id", "architecture", "reason", "off"])
    if not found:
        near = unmatched["off"].min()
        told = (
            f"the nearest differs by {near:.3f}"
            if np.isfinite(near)
            else "no architecture has both depths in one group"
        )
        raise FitError(f"no pair of depths {shallow:g} and {deep:g} matches in {on} within {tolerance:g}: {told}")
    both = table[table["depth"].isin([shallow, deep])].reset_index(drop=True)
    return MatchedRuns(pd.DataFrame(found), unmatched, both, on, float(shallow), float(deep))


def _partners(shallow: pd.DataFrame, deep: pd.DataFrame) -> list[tuple[pd.Series | None, pd.Series | None, object]]:
    """Pairs by seed; without seeds in order of appearance."""
    if not len(shallow) or not len(deep):
        return []
    if shallow["seed"].notna().all() and deep["seed"].notna().all():
        a = {r["seed"]: r for _, r in shallow.iterrows()}
        b = {r["seed"]: r for _, r in deep.iterrows()}
        if len(a) == len(shallow) and len(b) == len(deep):
            return [(a.get(s), b.get(s), s) for s in dict.fromkeys([*a, *b])]
    left, right = [r for _, r in shallow.iterrows()], [r for _, r in deep.iterrows()]
    n = max(len(left), len(right))
    return [(left[i] if i < len(left) else None, right[i] if i < len(right) else None, i) for i in range(n)]


def _gap(matched: MatchedRuns, architecture: str, pairing: str) -> Effect:
    """Uncorrected E1 of one architecture."""
    own = matched.pairs[matched.pairs["architecture"] == architecture]
    n = len(own)
    gap = own["gap"].to_numpy(np.float64)
    contrast = {
        "depth_shallow": matched.shallow, "depth_deep": matched.deep,
        "aspect_shallow": float(own["aspect_shallow"].mean()), "aspect_deep": float(own["aspect_deep"].mean()),
        "params": float(np.exp(np.log(own["params"]).mean())), "tokens": float(np.exp(np.log(own["tokens"]).mean())),
    }  # fmt: skip
    left = Correction(float(own["dln_params"].mean()), float(own["dln_tokens"].mean()))
    rho, low = _pair_correlation(own)
    paired = pairing == "paired" or (pairing == "auto" and low > 0)
    note = "two shapes: what a shape has of its own is not in the error"
    if n < 2:
        return Effect("E1", architecture, float(gap.mean()), math.nan, 0.0, "nats", "one pair", contrast=contrast,
                      correction=left, note="one pair has no error")  # fmt: skip
    if paired:
        se, df, how = float(gap.std(ddof=1) / math.sqrt(n)), float(n - 1), f"{n} pairs, paired t"
        return Effect("E1", architecture, float(gap.mean()), se, df, "nats", how, contrast=contrast, correction=left,
                      note=f"{note}; pair correlation {rho:.2f}")  # fmt: skip
    # groups are blocks: deviations are taken within them, so sizes don't add to the error
    parts = [own[c] - own.groupby("group")[c].transform("mean") for c in ("loss_shallow", "loss_deep")]
    lost = own["group"].nunique()
    variances = [float((p**2).sum()) / max(1, n - lost) / n for p in parts]
    df = satterthwaite(variances, [max(0, n - lost)] * 2) if n > lost else 0.0
    se = math.sqrt(sum(variances)) if n > lost else math.nan
    return Effect("E1", architecture, float(gap.mean()), se, df, "nats", f"{n} + {n} runs, Welch t", contrast=contrast,
                  correction=left, note=note)  # fmt: skip


def _pair_correlation(own: pd.DataFrame) -> tuple[float, float]:
    """Correlation of the two losses over the seeds of a group, and the lower end of its 90 % interval (Fisher's z)."""
    a = (own["loss_shallow"] - own.groupby("group")["loss_shallow"].transform("mean")).to_numpy(np.float64)
    b = (own["loss_deep"] - own.groupby("group")["loss_deep"].transform("mean")).to_numpy(np.float64)
    n = len(a) - own["group"].nunique() + 1
    if n < _MIN_PAIRS_FOR_CORRELATION or a.std() == 0 or b.std() == 0:
        return math.nan, -math.inf
    r = float(np.corrcoef(a, b)[0, 1])
    z = math.atanh(min(max(r, -1 + 1e-12), 1 - 1e-12))
    return r, math.tanh(z - 1.6448536269514722 / math.sqrt(n - 3))


def _dln(shallow: pd.Series, deep: pd.Series, column: str) -> float:
    if column not in shallow or not (shallow[column] > 0 and deep[column] > 0):
        return math.nan
    return float(math.log(deep[column] / shallow[column]))

"""DepthReport: the answer of a depth study as labels, effects, tables, sentences and one validated JSON document."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from scalinglab.depth_benefit import schema
from scalinglab.depth_benefit.analysis import Options, Outcome, is_primary
from scalinglab.depth_benefit.effects import Effect
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.labels import Verdict
from scalinglab.depth_benefit.phrasing import both
from scalinglab.depth_benefit.study import Gate
from scalinglab.features import R0
from scalinglab.fitting import Fit
from scalinglab.uncertainty import t_quantile

_FLOPS = {"6n": "6N", "causal": "causal", "full": "full"}
_CODES = {"kaplan_n": "K1", "kaplan_d": "K1", "kaplan": "K2"}  # codes of the schema where a law's alias is longer


@dataclass(frozen=True)
class DepthReport:
    """The answer of a depth study. Immutable; tables and numbers at full precision.

    outcome : the analysis behind it (effects with covariance, model or law, evidence). verdicts : label with its reason per
    architecture. study, study_reason : whether depth depends on the architecture. gate : joint test, None without a
    reference or a second architecture. tables : T1 to T7. sentences, checklist, deviations, warnings : the report in words.
    rivals : verdicts on rival explanations. result : plain data of the JSON document.
    """

    outcome: Outcome | None
    intake: Intake
    options: Options
    verdicts: Mapping[str, Verdict]
    study: str
    study_reason: str
    gate: Gate | None
    tables: Mapping[str, pd.DataFrame]
    sentences: Mapping[str, str]
    checklist: Mapping[str, Mapping[str, str]]
    deviations: tuple[str, ...]
    warnings: tuple[Finding, ...]
    rivals: Mapping[str, str]
    advice: tuple[str, ...]
    result: Mapping[str, Any]

    @property
    def label(self) -> dict[str, str]:
        """Label per architecture."""
        return {a: v.label for a, v in self.verdicts.items()}

    @property
    def effects(self) -> pd.DataFrame:
        """All effects, one row each, full precision; empty where the design has none."""
        if self.outcome is None:
            return pd.DataFrame()
        frame = self.outcome.effects.to_frame()
        return frame.assign(p_adj=list(self.outcome.p_adj))

    def summary(self) -> str:
        """The report as text: labels with reasons, sentences, warnings, deviations."""
        lines = ["Depth benefit", f"  study: {self.study} ({self.study_reason})"]
        for a, v in self.verdicts.items():
            lines.append(f"  {a}: {v}; {v.robustness}")
        lines += ["", *(f"  {t}" for k, t in self.sentences.items() if not k.startswith("label/"))]
        if self.rivals:
            lines += ["", "Rivals", *(f"  {k}: {v}" for k, v in self.rivals.items())]
        if self.warnings:
            lines += ["", "Warnings", *(f"  {w.severity:5s} {w.code}: {w.message}" for w in self.warnings)]
        if self.deviations:
            lines += ["", "Deviations from the preregistration", *(f"  {d}" for d in self.deviations)]
        if self.advice:
            lines += ["", "What would change the verdict", *(f"  {d}" for d in self.advice)]
        return "\n".join(lines)

    def save(self, folder: str | Path) -> Path:
        """Write result.json and tables/T*.csv, .md, .tex to a folder, each file whole or not at all; returns the folder."""
        from scalinglab.depth_benefit.saving import save

        return save(self, folder)

    def __repr__(self) -> str:
        told = ", ".join(f"{a}: {v.label}" for a, v in self.verdicts.items())
        return f"<DepthReport {self.study}; {told}>"


def to_result(
    outcome: Outcome | None,
    intake: Intake,
    options: Options,
    *,
    params: str,
    verdicts: Mapping[str, Verdict],
    study: str,
    tables: Mapping[str, pd.DataFrame],
    warnings: tuple[Finding, ...],
    prereg_hash: str | None,
    deviations: tuple[str, ...],
    sentences: Mapping[str, str],
    checklist: Mapping[str, Mapping[str, str]],
    rivals: Mapping[str, str],
    laws: Mapping[str, Fit],
    created: str | None = None,
) -> dict[str, Any]:
    """The JSON document as plain data, checked against the schema.

    Raises
    ------
    SchemaError
        It doesn't fit the schema (a mistake in this package).
    """
    from scalinglab import __version__

    effects = [] if outcome is None else [
        _effect(e, p, outcome, options, verdicts) for e, p in zip(outcome.effects, outcome.p_adj, strict=True)
    ]  # fmt: skip
    said = [{"code": w.code, "severity": w.severity, "message": w.message} for w in warnings]
    document = {
        "schema_version": "1.0", "created": created or datetime.now(UTC).isoformat(timespec="seconds"),
        "code_version": __version__, "data_hash": data_hash(intake), "prereg_hash": prereg_hash,
        "conventions": {
            "N": params, "flops": _FLOPS[options.flops], "loss_unit": "nats/token", "tokens": "seen", "r0": R0,
            "E_shared": True,
        },
        "fits": [record for name, fit in laws.items() if (record := _fit(name, fit)) is not None],
        "effects": effects, "comparisons": _records(tables["T5"]), "divergence": _records(tables["T7"]),
        "robustness": _records(tables["T6"]),
        "labels": {
            "study": study, "per_arch": {a: v.label for a, v in verdicts.items()},
            "modifiers": {a: list(v.modifiers) for a, v in verdicts.items()},
            "reasons": {a: v.reason for a, v in verdicts.items()},
            "stable": {a: v.robustness for a, v in verdicts.items()}, "rivals": dict(rivals),
        },
        "warnings": said, "deviations": list(deviations), "sentences": dict(sentences),
        "checklist": {k: dict(v) for k, v in checklist.items()}, "n_runs": len(intake.runs), "n_lost": len(intake.lost),
    }  # fmt: skip
    lost: list[str] = []
    document = schema.finite(document, lost=lost)
    if lost:
        some = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        document["warnings"].append(
            {"code": "NOT_FINITE", "severity": "info", "message": f"numbers that are not finite are null: {some}"}
        )
    schema.validate(document)
    return dict(document)


def data_hash(intake: Intake) -> str:
    """SHA-256 of the runs that entered, whatever their order: their names, sizes and losses as text."""
    columns = [
        c for c in ("run_id", "architecture", "group", "seed", "depth", "width", "params", "tokens", "loss", "status")
        if c in intake.runs
    ]  # fmt: skip
    both = pd.concat([intake.runs[columns], intake.lost.reindex(columns=columns)], ignore_index=True)
    lines = sorted("\t".join(map(str, row)) for row in both.itertuples(index=False))
    return hashlib.sha256("\n".join(["\t".join(columns), *lines]).encode()).hexdigest()


def _effect(
    e: Effect, p_adj: float, outcome: Outcome, options: Options, verdicts: Mapping[str, Verdict]
) -> dict[str, Any]:
    low, high = e.interval(0.95)
    c, k = e.contrast, e.correction
    own = is_primary(e, options) and e.architecture in verdicts
    flops = None
    worth: dict[str, Any] = {}
    if e.unit == "nats" and outcome.screen.compute > 0:
        share = [math.expm1(v / outcome.screen.compute) for v in (e.estimate, low, high)]
        worth = {
            "value": share[0], "ci95": share[1:], "source": outcome.screen.source, "borrowed": outcome.screen.borrowed,
        }  # fmt: skip
    known = math.isfinite(e.low) and math.isfinite(e.high)
    return {
        "estimand": e.estimand, "arch": e.architecture, "ref": e.reference, "variant": e.variant, "group": e.group,
        "contrast": {
            "L_shallow": c.get("depth_shallow"), "L_deep": c.get("depth_deep"), "N": c.get("params"), "D": c.get("tokens"),
            "C": flops,
        },
        "estimate": e.estimate, "unit": e.unit, "se": e.se, "df": e.df, "ci95": [low, high],
        "ci_method": e.method if known else f"t({min(e.df, 1e9):.4g})", "p": e.p, "p_adj": p_adj, "method": e.method,
        "p_min": e.p_min, "mde80": e.mde, "margin": {
            "nats": outcome.margin, "compute": options.margin,
            **({"nats_per_lnL": e.of_gap(outcome.margin)} if e.unit == "nats/lnL" else {}),
        },
        "ci90": list(e.interval(0.90)), "compute_equiv": worth,
        "correction": {
            "dN": k.dln_params, "dD": k.dln_tokens, "nats": k.nats, "se": k.se, "applied": k.applied, "needed": k.needed,
            "spurious": k.spurious,
        },
        "label": verdicts[e.architecture].label if own else None,
    }  # fmt: skip


def _fit(name: str, fit: Fit) -> dict[str, Any] | None:
    code = _CODES.get(fit.law.key, fit.law.alias.split(" ")[0] if fit.law.alias else "")
    if code not in schema.LawCode.__args__:  # type: ignore[attr-defined]
        return None
    made = fit.jackknife
    table = fit.to_frame()
    checks = {c.name: c.value for c in fit.checks}
    params = []
    for key, r in table.iterrows():
        plain, _, level = str(key).partition("[")
        params.append({
            "name": plain, "arch": level.removesuffix("]") or None, "value": float(r["estimate"]), "scale": "natural",
            "se": float(r["se"]), "df": float(r["df"]), "ci": [float(r["low"]), float(r["high"])], "ci_method": made.method,
            "identified": bool(r["identified"]),
        })  # fmt: skip
    return {
        "id": name, "law": code, "sharing": "H2" if fit.law.levels else "H0", "estimator": fit.estimator.label,
        "unit": "checkpoint" if _checkpoints(fit) else "run", "n_rows": len(fit.runs), "n_runs": fit.n_runs, "params": params,
        "objective": float(fit.objective),
        "starts": {"n": fit.search.starts, "n_best": fit.search.agreeing, "valley_width": dict(fit.search.valley)},
        "convergence": {"ok": fit.status in ("converged", "at_bound")},
        "identifiability": {
            "kappa_c": checks.get("conditioning, centred"), "kappa_u": checks.get("conditioning, uncentred"),
            "tpp_sd": checks.get("tokens-per-parameter diversity (SD of ln D/N)"),
            "shape_sd": checks.get("shape diversity (SD of ln aspect within size)"), "sloppy": [],
        },
    }  # fmt: skip


def _checkpoints(fit: Fit) -> bool:
    keys = [c for c in ("architecture", "depth", "width", "tokens", "seed") if c in fit.runs]
    return bool(fit.runs.duplicated([k for k in keys if k != "tokens"]).any()) and "seed" not in keys


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]


def advice(outcome: Outcome, verdicts: Mapping[str, Verdict], options: Options) -> tuple[str, ...]:
    """What would change the verdict, one sentence per architecture: how much smaller the error must be, and by what."""
    out = []
    what, unit = ("a slope", "nats per ln L") if options.estimand == "E1s" else ("B", "nats")
    for e in outcome.effects:
        if not is_primary(e, options) or e.architecture not in verdicts or not e.usable:
            continue
        v = verdicts[e.architecture]
        if v.reading == "INCONCLUSIVE" and e.df >= 1 and not math.isfinite(e.exact_p):
            # half-width of the 90 % interval that equivalence at B = 0 needs, against what there is
            need = e.of_gap(outcome.margin) / (2 * t_quantile(0.95, min(e.df, 1e9)))
            times = (e.se / need) ** 2
            out.append(
                f"{e.architecture}: {what} below {e.mde:.2g} {unit} can be missed; an error {math.sqrt(times):.2g} times smaller "
                f"would settle it against the margin of {e.of_gap(outcome.margin):.2g}: more depths further apart first, seeds second"
            )
        if v.carries("UNTESTABLE_N") and math.isfinite(e.exact_p):
            asked = outcome.evidence[e.architecture].alpha_adj or options.alpha
            pairs = 1 + math.ceil(math.log2(1 / asked))
            out.append(f"{e.architecture}: sign flips need {pairs} pairs of runs for a p that can be below {asked:.3g}")
        if v.carries("CONFOUNDED_LR"):
            out.append(
                f"{e.architecture}: sweep the learning rate at every depth, three rates or more with the best one inside; only "
                "then can architectures be compared over depth"
            )
        if v.label == "CONFOUNDED_N":
            out.append(
                f"{e.architecture}: match the shapes in N (within 1 %), or give rates for the correction ({both('rates', 'published')} borrows them)"
            )
        if v.label == "FRAGILE":
            out.append(f"{e.architecture}: {v.reason}; replicate that shape with more seeds and add shapes beside it")
        if v.label == "SELECTION_SENSITIVE":
            out.append(f"{e.architecture}: rerun the lost cells at a stable setting that both arms share")
        if "RECIPE_LIMITED" in v.modifiers:
            out.append(
                f"{e.architecture}: the depth benefit hangs on the recipe; train all shapes by the better one and tune it"
            )
    return tuple(out)

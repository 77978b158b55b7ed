"""Re-analyses: the same question under every other defensible choice, so that a label says how much it owes to them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from scalinglab.depth_benefit.analysis import Options, Outcome, analyse, own_law, usable
from scalinglab.depth_benefit.intake import CONVENTIONS, Intake, ParamsChoice, take_in
from scalinglab.depth_benefit.labels import Verdict, same_in_practice
from scalinglab.depth_benefit.rates import published_rates
from scalinglab.errors import FitError, ScalinglabError, ScalinglabWarning
from scalinglab.fitting import Fit
from scalinglab.objectives import Gaussian, Robust


@dataclass(frozen=True)
class Study:
    """What re-analyses start from: the table as given, the prepared runs, the options, the law on the runs."""

    raw: pd.DataFrame
    intake: Intake
    options: Options
    fit: Fit | None
    params: ParamsChoice
    charge_extras: bool
    others: Mapping[str, Intake]  # groups matched by another rule
    recipes: Mapping[str, Outcome] = field(default_factory=dict)  # analyses of other recipes, made already


def reanalyses(study: Study, base: Outcome) -> list[dict[str, object]]:
    """Rows of T6: analysis, architecture, estimate, se, label, whether it counts, note.

    An analysis that can't be made is noted, without label.
    """
    rows: list[dict[str, object]] = []
    for name, make in _plans(study, base):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScalinglabWarning)
                outcome = make()
        except (ScalinglabError, np.linalg.LinAlgError) as error:
            rows.append({"analysis": name, "architecture": "", "label": "", "note": f"not possible: {error}"})
            continue
        if outcome is None:
            continue
        for a, verdict in outcome.verdicts.items():
            if a in base.verdicts:
                e = outcome.evidence[a]
                rows.append({
                    "analysis": name, "architecture": a, "estimate": e.estimate, "se": e.se, "label": verdict.label,
                    "note": verdict.reason,
                })  # fmt: skip
    rows += _deletion_rows(base)
    rows += _composite_rows(base)
    return _with_counts(rows, base)


def with_stability(verdicts: Mapping[str, Verdict], rows: Sequence[Mapping[str, object]]) -> dict[str, Verdict]:
    """Verdicts that say in how many re-analyses the label is the same, of those that count."""
    out = {}
    for a, verdict in verdicts.items():
        own = [r for r in rows if r.get("architecture") == a and r.get("label")]
        barred = sum(_barred(str(r["label"]), verdict) for r in own)
        counted = [r["label"] for r in own if r["counts"]]
        out[a] = replace(
            verdict, stable=sum(1 for v in counted if v == verdict.label), analyses=len(counted),
            identical=len(own) - len(counted) - barred, impossible=barred,
        )  # fmt: skip
    return out


def _with_counts(rows: Sequence[dict[str, object]], base: Outcome) -> list[dict[str, object]]:
    """Rows that say whether they count: not where label, estimate and error are those reported, nor where the design can't
    bear the analysis.

    The same data by the same estimator can't move B, so that its label agrees is no evidence. Where such a row changes the
    label all the same (another count of parameters lifts a confound), it counts: leaving it out would hide the change.
    """
    out = []
    for r in rows:
        e = base.evidence.get(str(r["architecture"]))
        same = e is not None and r["label"] == base.verdicts[str(r["architecture"])].label
        for key, value in (("estimate", e.estimate), ("se", e.se)) if same and e is not None else ():
            given = float(r.get(key, math.nan))  # type: ignore[arg-type]
            same = same and (
                math.isclose(given, value, rel_tol=1e-9, abs_tol=1e-15) or (math.isnan(given) and math.isnan(value))
            )
        barred = e is not None and _barred(str(r["label"]), base.verdicts[str(r["architecture"])])
        out.append({**r, "counts": bool(r["label"]) and not same and not barred})
    return out


def _barred(label: str, verdict: Verdict) -> bool:
    """Whether a re-analysis gives no answer where the analysis reported does: that is no instability of the label."""
    return label == "NOT_IDENTIFIED" != verdict.label


Plan = tuple[str, Callable[[], Outcome | None]]


def _plans(study: Study, base: Outcome) -> Iterator[Plan]:
    o, intake = study.options, study.intake
    place = next(iter(base.effects)).contrast
    other: ParamsChoice = "total" if study.params == "backbone" else "backbone"
    yield f"N is {other} parameters", lambda: _counted(study, other)
    borrowed = published_rates(params=place["params"], tokens=place["tokens"])
    if base.rates is not None and base.method != "law":
        yield "mismatch not corrected", lambda: analyse(intake, replace(o, correct=False), fit=study.fit)
    if (base.rates is None or not base.rates.borrowed) and base.method != "law":
        yield "corrected at published rates", lambda: analyse(intake, replace(o, rates=borrowed), fit=None)
    if base.model is not None:
        degree = 1 if base.model.degree == 2 else 2
        yield f"profile of degree {degree}", lambda: analyse(intake, replace(o, degree=degree), fit=study.fit)
        error: Literal["own", "pooled"] = "own" if base.model.error == "pooled" else "pooled"
        if len(base.model.architectures) > 1:
            yield f"{error} error", lambda: analyse(intake, replace(o, error=error), fit=study.fit)
    for convention in CONVENTIONS:
        if convention == "6n" and base.method != "law" and base.rates is None:
            continue
        with_rates = replace(
            o, estimand="E2", flops=convention, rates=o.rates or (None if usable(study.fit) else borrowed)
        )
        if o.estimand != "E2" or convention != o.flops:
            name = f"equal FLOPs ({convention})"
            yield name, lambda with_rates=with_rates: _if_any(intake, with_rates, study.fit)  # type: ignore[misc]
    if base.method != "law" and usable(study.fit):
        yield f"law {o.law}", lambda: analyse(intake, replace(o, method="law"), fit=study.fit)
    if base.method == "law":
        yield "law, robust objective", lambda: _refitted(study, Robust())
        yield "law, squared error of the loss", lambda: _refitted(study, Gaussian(on="loss"))
        if intake.runs.groupby(["architecture", "group"])["x"].nunique().max() >= 3:
            yield "cell means", lambda: analyse(intake, replace(o, method="cells"), fit=study.fit)
    if any(f.code == "EXTRA_PARAMS_UNCOUNTED" for f in intake.findings) and not study.charge_extras:
        yield "architecture's parameters charged", lambda: _charged(study)
    for name, made in study.recipes.items():
        yield f"recipe: {name}", lambda made=made: made  # type: ignore[misc]
    for name, others in study.others.items():
        yield f"group {name}", lambda others=others: _other(others, o)  # type: ignore[misc]


def _taken(study: Study, params: ParamsChoice, charge_extras: bool) -> Intake:
    o = study.options
    return take_in(
        study.raw,
        params=params,
        checkpoints=o.checkpoints,
        charge_extras=charge_extras,
        diverged_above=o.diverged_above,
    )


def _counted(study: Study, params: ParamsChoice) -> Outcome:
    fresh = _taken(study, params, study.charge_extras)
    intake = _same_runs(fresh, study.intake)
    fit, _ = own_law(intake, study.options)
    return analyse(intake, study.options, fit=fit)


def _charged(study: Study) -> Outcome:
    fresh = _taken(study, study.params, True)
    intake = _same_runs(fresh, study.intake)
    fit, _ = own_law(intake, study.options)
    return analyse(intake, study.options, fit=fit)


def _refitted(study: Study, objective: Robust | Gaussian) -> Outcome:
    options = replace(study.options, method="law", objective=objective)
    fit, why = own_law(study.intake, options)
    if not usable(fit):
        raise FitError(why)
    return analyse(study.intake, options, fit=fit)


def _other(intake: Intake, options: Options) -> Outcome:
    fit, _ = own_law(intake, options)
    return analyse(intake, replace(options, shallow=None, deep=None, degree=None), fit=fit)


def _if_any(intake: Intake, options: Options, fit: Fit | None) -> Outcome | None:
    made = analyse(intake, options, fit=fit)
    return made if any(e.estimand == "E2" and e.variant == options.flops for e in made.effects) else None


def _same_runs(fresh: Intake, old: Intake) -> Intake:
    keep = fresh.runs["run_id"].isin(old.runs["run_id"]).to_numpy()
    return fresh.only(keep, fresh.lost["run_id"].isin(old.lost["run_id"]).to_numpy())


def _deletion_rows(base: Outcome) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for a, e in base.evidence.items():
        if not e.deletions:
            continue
        changed = {k: v for k, v in e.deletions.items() if not same_in_practice(v, base.verdicts[a].reading)}
        label = base.verdicts[a].label
        note = f"reading changes in {len(changed)} of {len(e.deletions)} deletions"
        rows.append({"analysis": "leave one run or shape out", "architecture": a, "estimate": e.estimate, "se": e.se,
                     "label": label, "note": note})  # fmt: skip
    return rows


def _composite_rows(base: Outcome) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for a, b in base.bounds.items():
        e = base.evidence[a]
        if b.lost and e.composite_label is not None:
            early = base.verdicts[a].label if base.verdicts[a].label in _BEFORE_SELECTION else e.composite_label
            rows.append({"analysis": "divergence counts as worst", "architecture": a, "se": e.se, "label": early,
                         "estimate": e.estimate + (b.composite - b.complete) * e.margin / base.margin, "note": f"{b.lost} lost runs at {b.cap:.3g} nats"})  # fmt: skip
    return rows


_BEFORE_SELECTION = frozenset({"INVALID_DATA", "NOT_IDENTIFIED", "UNTESTABLE_N", "CONFOUNDED_LR", "CONFOUNDED_N"})

"""The study in sentences, and the reporting checklist that fills itself in. Absence is not in the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from scalinglab.depth_benefit.analysis import Options, Outcome, is_primary
from scalinglab.depth_benefit.effects import Effect
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.labels import Verdict
from scalinglab.depth_benefit.phrasing import REFUSALS, UNDERSTATED, compute_worth
from scalinglab.depth_benefit.study import Gate

_LOSS_DIGITS = 4
NOT_STATED = "not stated"


def effect_sentence(outcome: Outcome, effect: Effect, p_adj: float) -> str:
    """One architecture's effect, APA-like: sizes, B, interval, test, what it is worth, what the correction changed."""
    c = effect.contrast
    low, high = effect.interval(0.95)
    if not effect.usable:
        return f"{effect.architecture}: the design gives B = {_n(effect.estimate)} nats without an error."
    deep, shallow = (f"{c.get(f'depth_{arm}', math.nan):.3g}" for arm in ("deep", "shallow"))
    at = f"At N = {_count(c.get('params'))} parameters and D = {_count(c.get('tokens'))} tokens"
    if low > 0 or high < 0:
        better = "lower" if low > 0 else "higher"
        head = (
            f"{at}, {effect.architecture} models with {deep} layers reached {better} loss than {shallow}-layer models"
        )
    else:
        head = f"{at} it is open whether {effect.architecture} models with {deep} layers reach lower or higher loss than {shallow}-layer models"
    text = f"{head}, B = {_n(effect.estimate)} nats, 95 % CI [{_n(low)}, {_n(high)}], {_test(effect)}p_Holm {_p(p_adj)} ({effect.method})"
    if outcome.screen.compute > 0:
        worth = [v / outcome.screen.compute for v in (effect.estimate, low, high)]
        by = " at borrowed rates" if outcome.screen.borrowed else ""
        text += f", equivalent to {compute_worth(worth)} training compute{by}"
    k = effect.correction
    if k.applied:
        text += f"; correcting a {100 * math.expm1(k.dln_params):+.2g} % parameter mismatch changed B by {k.nats:+.{_LOSS_DIGITS}f}"
    elif k.needed:
        text += f"; an uncorrected {100 * math.expm1(k.dln_params):+.2g} % parameter mismatch alone predicts {k.spurious:.2g} nats"
    return text + "."


def slope_sentence(outcome: Outcome, effect: Effect, p_adj: float) -> str:
    """One architecture's slope, with the margin that a slope is held against: that of the gap per ln(deep / shallow)."""
    c = effect.contrast
    low, high = effect.interval(0.95)
    if not effect.usable:
        return (
            f"{effect.architecture}: the design gives a slope of {_n(effect.estimate)} nats per ln L without an error."
        )
    at = f"At N = {_count(c.get('params'))} parameters and D = {_count(c.get('tokens'))} tokens"
    if low > 0 or high < 0:
        falls = "fell" if low > 0 else "rose"
        head = f"{at} the loss of {effect.architecture} {falls} by {_n(abs(effect.estimate))} nats per e-fold of depth"
    else:
        head = (
            f"{at} it is open whether the loss of {effect.architecture} falls or rises with depth: it fell by "
            f"{_n(effect.estimate)} nats per e-fold"
        )
    return (
        f"{head} ({effect.note}), 95 % CI of "
        f"the fall [{_n(low)}, {_n(high)}], t({effect.df:.3g}) = {effect.estimate / effect.se:.2g}, p_Holm {_p(p_adj)} "
        f"({effect.method}); the margin of {outcome.margin:.2g} nats between {c.get('depth_shallow', math.nan):.3g} and "
        f"{c.get('depth_deep', math.nan):.3g} layers is one of {effect.of_gap(outcome.margin):.2g} nats per ln L."
    )


def verdict_sentence(outcome: Outcome, effect: Effect, verdict: Verdict, alpha: float = 0.05) -> str:
    """Equivalence or lack of resolution in words; empty where the effect sentence says it all.

    alpha : what the smallest p of the test is held against.
    """
    low, high = effect.interval(0.90)
    unit = "nats per ln L" if effect.unit == "nats/lnL" else "nats"
    if verdict.reading == "EQUIVALENT":
        c = effect.contrast
        return (
            f"{effect.architecture}: d/L {c.get('aspect_deep', math.nan):.3g} and "
            f"{c.get('aspect_shallow', math.nan):.3g} were equivalent to within the margin (δ = {effect.of_gap(outcome.margin):.2g} {unit}; "
            f"90 % CI [{_n(low)}, {_n(high)}])."
        )
    if effect.p_min > alpha:
        return (
            f"{effect.architecture}: the smallest p that this test can give with so few runs is {effect.p_min:.3g}, above "
            f"{alpha:.3g}: no result could have been significant."
        )
    if verdict.reading == "INCONCLUSIVE" and math.isfinite(effect.exact_p):
        return f"{effect.architecture}: inconclusive."
    if verdict.reading == "INCONCLUSIVE":
        return f"{effect.architecture}: inconclusive (MDE = {effect.mde:.2g} {unit} at 80 % power)."
    return ""


def recipe_sentence(effect: Effect, p_adj: float) -> str:
    """E8: by how much the depth benefit differs between two recipes."""
    low, high = effect.interval(0.95)
    return (
        f"{effect.architecture}: the recipe changed the depth benefit ({effect.variant}) by {_n(effect.estimate)} nats, 95 % CI "
        f"[{_n(low)}, {_n(high)}], t({effect.df:.3g}) = {effect.estimate / effect.se:.2g}, p_Holm {_p(p_adj)} ({effect.method})."
    )


def refusal(verdict: Verdict, why: bool = False) -> str:
    """What must stand behind a sentence on an architecture whose label bears no claim (and why); empty where it does."""
    if verdict.label == verdict.reading:
        return ""
    words = UNDERSTATED if verdict.understated and verdict.label == "CONFOUNDED_N" else REFUSALS[verdict.label]
    return f" Not a claim: {words}{f' ({verdict.reason})' if why else ''}."


def interaction_sentence(
    gate: Gate | None,
    study: tuple[str, str],
    verdicts: Mapping[str, Verdict],
    *,
    margin: float,
    contrast: Mapping[str, float],
) -> str:
    """The joint test, which asks whether curves of loss over depth are parallel, and the contrasts that it admits.

    margin : nats. contrast : depths that the contrasts are about.
    """
    if gate is None or study[0] == "INVALID_DATA":
        return ""
    label = study[0]
    head = f"F({gate.df[0]:g}, {gate.df[1]:g}) = {gate.statistic:.2f}, p {_p(gate.p)} ({gate.second} p {_p(gate.p_bootstrap)})"
    table = gate.contrasts
    apart = table[(table["low"] > 0) | (table["high"] < 0)]
    if label == "ARCH_INDEPENDENT":
        return (
            f"All pairwise differences of the depth gap lie inside the margin (δ = {margin:.2g} nats, simultaneous 90 % intervals); "
            f"test that the curves of loss over depth are parallel: {head}."
        )
    confounded = [a for a, v in verdicts.items() if v.carries("CONFOUNDED_LR")]
    if label != "ARCH_DEPENDENT":
        text = (
            "Whether the depth gap differs between architectures is unresolved; test that the curves of loss over depth are "
            f"parallel: {head}."
        )
        return f"{text} Not a claim: {study[1]}." if confounded and len(apart) else text
    told = "; ".join(
        f"{'larger' if r['estimate'] > 0 else 'smaller'} for {a} by {_n(abs(r['estimate']))} nats "
        f"[{_n(min(abs(r['low']), abs(r['high'])))}, {_n(max(abs(r['low']), abs(r['high'])))}], max-t p {_p(r['p_max_t'])}"
        for a, r in apart.iterrows()
    )
    rest = len(table) - len(apart)
    other = f"; {rest} other contrasts were unresolved" if rest else ""
    doubt = [str(a) for a in apart.index if a in confounded]
    caveat = f" Not a claim for {', '.join(doubt)}: {REFUSALS['CONFOUNDED_LR']}." if doubt else ""
    depths = " and ".join(f"{contrast.get(f'depth_{arm}', math.nan):.3g}" for arm in ("shallow", "deep"))
    return (
        f"The architectures' curves of loss over depth are not parallel, {head}. Relative to {gate.reference}, the gap between "
        f"{depths} layers was {told}{other}.{caveat}"
    )


def sentences(
    outcome: Outcome, gate: Gate | None, verdicts: Mapping[str, Verdict], study: tuple[str, str], options: Options
) -> dict[str, str]:
    """All sentences by name: one effect per architecture, slope and recipe where asked, equivalence or null, interaction.

    Data that can't be used gives no sentence but its label; other labels that bear no claim say so behind each sentence.
    """
    out: dict[str, str] = {}
    primary = {e.architecture: e for e in reversed(outcome.effects.effects) if is_primary(e, options)}
    for e, p in zip(outcome.effects, outcome.p_adj, strict=True):
        verdict = verdicts.get(e.architecture)
        if verdict is not None and verdict.label == "INVALID_DATA":
            continue
        no, long = ("", "") if verdict is None else (refusal(verdict), refusal(verdict, why=True))
        if e.estimand == "E1" and not e.variant:
            out[f"effect/{e.architecture}"] = effect_sentence(outcome, e, p) + long
        elif e.estimand == "E1s" and options.estimand == "E1s":
            out[f"slope/{e.architecture}"] = slope_sentence(outcome, e, p) + long
        elif e.estimand == "E8":
            out[f"recipe/{e.architecture}/{e.variant}"] = recipe_sentence(e, p) + no
    for a, verdict in verdicts.items():
        if a in primary and verdict.label != "INVALID_DATA":
            asked = outcome.evidence[a].alpha_adj if a in outcome.evidence else None
            text = verdict_sentence(outcome, primary[a], verdict, options.alpha if asked is None else asked)
            if text:
                out[f"reading/{a}"] = text + refusal(verdict)
        out[f"label/{a}"] = f"{a}: {verdict}; {verdict.robustness}."
    place = next((e.contrast for e in outcome.effects), {})
    told = interaction_sentence(gate, study, verdicts, margin=outcome.margin, contrast=place)
    if told:
        out["interaction"] = told
    return out


def checklist(
    intake: Intake,
    outcome: Outcome,
    options: Options,
    *,
    params: str,
    prereg_hash: str | None,
    findings: Sequence[Finding],
    version: str,
) -> dict[str, dict[str, str]]:
    """Reporting checklist in four groups, filled in from what was done; what the table doesn't say is "not stated"."""
    runs, fit = intake.runs, outcome.fit
    law = "no law: cell means" if fit is None else f"{fit.law.key}: {fit.law.formula}"
    dropped = sum(1 for f in findings if f.code == "BEST_OF_LR")
    return {
        "hypothesis": {
            "law": law,
            "estimand": f"{options.estimand}: loss(shallow) - loss(deep) at equal N and D; positive when deeper is better",
            "N": f"{params} parameters", "FLOPs": options.flops,
            "constraints": "none" if fit is None or not fit.law.fixed else ", ".join(fit.law.fixed),
            "margin": f"{100 * options.margin:g} % compute = {outcome.margin:.3g} nats ({outcome.screen.source})",
            "preregistration": prereg_hash or "none",
        },
        "training": {
            "architectures": ", ".join(intake.architectures),
            "shapes": str(len(runs.drop_duplicates(["depth", "width"]))),
            "sizes (N)": _span(runs, "params"), "tokens (D)": _span(runs, "tokens"),
            "runs": f"{len(runs)} with a final loss, {len(intake.lost)} lost",
            "data": _values(runs, ("train_dataset", "eval_dataset", "corpus")), "repetition": _span(runs, "unique_tokens"),
            "tokenizer (vocabulary)": _values(runs, ("vocab",)), "context": _values(runs, ("context",)),
            "schedule": _values(runs, ("schedule",)), "learning rate": _values(runs, ("lr",)),
            "batch": _values(runs, ("batch_tokens",)), "precision": _values(runs, ("precision", "dtype")),
            "parametrization": _values(runs, ("parametrization",)),
        },
        "data collection": {
            "rows per run": f"{len(intake.rows) / max(1, len(runs)):.3g}", "checkpoints": options.checkpoints,
            "exclusions": "runs at other learning rates than the best" if dropped else "none",
            "divergences": str(len(intake.lost)), "evaluation set": _values(runs, ("eval_dataset", "split")),
            "smoothing": "none here",
        },
        "fitting": {
            "objective": "least squares on cell means" if fit is None else fit.estimator.label,
            "weights": "equal per cell" if fit is None else "as fitted",
            "optimiser": "closed form" if fit is None else f"multistart, {fit.search.starts} starts, {fit.search.agreeing} agree",
            "degree": "law" if outcome.model is None else f"{outcome.model.degree}, set by the design",
            "error": outcome.method if outcome.model is None else f"{outcome.model.error} residual of cell means",
            "interval": next((e.method for e in outcome.effects if e.estimand == "E1"), NOT_STATED),
            "multiplicity": "Holm within estimand; max-t for differences", "version": version,
        },
    }  # fmt: skip


def _span(runs: pd.DataFrame, column: str) -> str:
    if column not in runs or runs[column].isna().all():
        return NOT_STATED
    low, high = float(runs[column].min()), float(runs[column].max())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _values(runs: pd.DataFrame, columns: Sequence[str]) -> str:
    for column in columns:
        if column in runs and runs[column].notna().any():
            values = list(dict.fromkeys(runs[column].dropna()))
            told = ", ".join(f"{v:g}" if isinstance(v, int | float) else str(v) for v in values[:6])
            return told + (f" and {len(values) - 6} more" if len(values) > 6 else "")
    return NOT_STATED


def _test(effect: Effect) -> str:
    """The t statistic; nothing where the p is that of an exact test."""
    return "" if math.isfinite(effect.exact_p) else f"t({effect.df:.3g}) = {effect.estimate / effect.se:.2g}, "


def _n(value: float) -> str:
    return f"{value:.{_LOSS_DIGITS}f}"


def _p(value: float) -> str:
    if not math.isfinite(value):
        return "not available"
    return "< .001" if value < 0.001 else f"= {value:.3f}".replace("0.", ".", 1)


def _count(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "?"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"

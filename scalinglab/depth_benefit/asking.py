"""depth_benefit(): from a run table to the report that decides whether depth helps, for which architecture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from scalinglab.depth_benefit import tables as tb
from scalinglab.depth_benefit.analysis import Estimand, Method, Options, Outcome, analyse, own_law, usable
from scalinglab.depth_benefit.architectures import architecture_study
from scalinglab.depth_benefit.cells import ErrorModel
from scalinglab.depth_benefit.effects import Effect, EffectSet
from scalinglab.depth_benefit.estimands import drift, exponent_difference
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.intake import Intake, ParamsChoice, take_in
from scalinglab.depth_benefit.labels import Evidence, Verdict, decide
from scalinglab.depth_benefit.phrasing import both
from scalinglab.depth_benefit.prereg import deviations as departures
from scalinglab.depth_benefit.prereg import read_prereg
from scalinglab.depth_benefit.rates import Rates, published_rates, rates_from_fit
from scalinglab.depth_benefit.recipes import RecipeEffect, alternatives, mis_scaling, recipe_effects, separate
from scalinglab.depth_benefit.result import DepthReport, advice, to_result
from scalinglab.depth_benefit.rivals import compared, kaplan
from scalinglab.depth_benefit.robustness import Study, reanalyses, with_stability
from scalinglab.depth_benefit.words import checklist, sentences
from scalinglab.errors import ConfigError, FitError, ScalinglabError, ScalinglabWarning
from scalinglab.fitting import Fit
from scalinglab.runs import select
from scalinglab.shapes import FlopConvention

BASELINE = "pre_ln"


def depth_benefit(
    runs: pd.DataFrame,
    *,
    reference: str | None = None,
    group: str | None = None,
    where: str | None = None,
    estimand: Estimand | None = None,
    shallow: float | None = None,
    deep: float | None = None,
    params: ParamsChoice | None = None,
    method: Method = "auto",
    degree: int | None = None,
    error: ErrorModel = "auto",
    rates: Rates | Literal["own", "published"] = "own",
    margin: float | None = None,
    alpha: float | None = None,
    flops: FlopConvention | None = None,
    test: Literal["t", "sign_flip"] = "t",
    law: str = "shape",
    checkpoints: Literal["final", "wsd"] = "final",
    charge_extras: bool = False,
    recipe: str | None = None,
    cap: float | None = None,
    diverged_above: float | None = None,
    reanalyse: bool = True,
    draws: int = 1999,
    rng: int = 0,
    prereg: str | Path | None = None,
) -> DepthReport:
    """Does depth help at equal size and data, for which architecture, and what can the design bear?

    Parameters
    ----------
    runs : run table with depth, width, loss, tokens, parameter counts (or full shapes), and where known architecture,
        match_group, seed, lr, status. Lost runs belong into it, with status "diverged".
    reference : architecture that others are compared with; "pre_ln" where it is there.
    group : value of match_group to analyse. By default all groups that are matched by one rule; those of another rule are
        analysed beside them (table T6).
    where : condition on the rows, e.g. "eval_dataset == 'c4'".
    estimand : what the label is about: E1, the default (gap at equal N and D), E1s (slope), E2 (gap at equal FLOPs of convention `flops`).
    shallow, deep : depths to compare; by default the shallowest and the deepest that all architectures share.
    params : which N is equal: "backbone" (default) or "total".
    method : "cells" (cell means of matched shapes), "pairs" (two shapes with seeds), "law" (a fitted law, jackknife over
        shapes), or "auto": cells with three shapes or more in a group, else a law if it is determined, else pairs.
    degree, error : of the depth profile in cell means; see `cells.fit_cells`.
    rates : "own" takes the exchange rates of the law on these runs where it is determined, and corrects nothing otherwise;
        "published" borrows those of a published fit with a generous error; or `Rates` of your own.
    margin : of equivalence, as relative compute; 0.05 (5 %) unless preregistered otherwise.
    alpha : size of the tests after adjustment (Holm); 0.05.
    test : "sign_flip" replaces the t test of pairs by exact sign flips, which say when no p of theirs can be small enough.
    law : the law fitted for rates and effects; "shape" has the optimum in closed form.
    checkpoints : "wsd" takes all rows, declared to be at constant or annealed learning rates; "final" the last row per run.
    charge_extras : charge architectures with their extra parameters where the table holds Pre-LN counts.
    recipe : value of `parametrization` that labels rest on, for architectures that have several; by default the one with the
        lowest mean loss over shared shapes. E8 says what the recipe does to the depth benefit.
    cap : worst loss of a lost run, for bounds.
    diverged_above : final loss (nats per token) above which a run counts as diverged, whatever its status says.
    reanalyse : make the re-analyses of table T6.
    draws, rng : of the parametric bootstrap and permutations.
    prereg : preregistration file (TOML): its keys become the options that aren't given, it is hashed into the result, and
        deviations are listed.

    Returns
    -------
    DepthReport

    Raises
    ------
    SchemaError
        The table lacks what any depth analysis needs.
    ConfigError
        An option that isn't known, an architecture or depth that isn't in the runs.

    Notes
    -----
    A design that can't bear a claim gives a label that says why, not an error. The error of cell means contains what a
    shape has of its own; seeds alone are the error of two-shape designs only, which says so.
    """
    plan, plan_hash = (None, None) if prereg is None else read_prereg(prereg)
    if plan is not None:
        reference, group, degree = reference or plan.reference, group or plan.group, degree or plan.degree
        if shallow is None and deep is None and plan.contrast:
            shallow, deep = plan.contrast
        margin = plan.margin if margin is None else margin
        alpha = plan.alpha if alpha is None else alpha
        params, flops = params or plan.params, flops or plan.flops
        if estimand is None and plan.estimand != "E7":
            estimand = plan.estimand
    margin, alpha = 0.05 if margin is None else margin, 0.05 if alpha is None else alpha
    params, flops, estimand = params or "backbone", flops or "causal", estimand or "E1"
    _check(margin=margin, alpha=alpha, estimand=estimand, flops=flops, draws=draws)
    table = runs if where is None else select(runs, where)
    full = take_in(
        table, params=params, checkpoints=checkpoints, charge_extras=charge_extras, diverged_above=diverged_above
    )
    intake, others = _chosen(full, group, params)
    recipes = separate(intake, recipe)
    intake = recipes.main
    findings = [*intake.findings, *recipes.findings]
    known = intake.architectures
    if reference is not None and reference not in known:
        raise ConfigError(f"reference={reference!r} is not in the runs; the architectures are {', '.join(known)}")
    if reference is None:
        reference = BASELINE if BASELINE in known else None
    if reference is None and len(known) > 1:
        text = f"no reference architecture: {BASELINE!r} is not in the runs; give {both('reference', known[0])} or another of {', '.join(known)}"
        findings.append(Finding("NO_REFERENCE", "warn", text))
    if len(known) == 1:
        findings.append(Finding("ONE_ARCHITECTURE", "info", "one architecture: nothing is said about differences"))
    options = Options(
        reference=reference, method=method, estimand=estimand, shallow=shallow, deep=deep, degree=degree, error=error,
        rates=rates if isinstance(rates, Rates) else None, margin=margin, alpha=alpha, flops=flops, law=law,
        checkpoints=checkpoints, cap=cap, test=test, diverged_above=diverged_above,
    )  # fmt: skip
    if rates == "published":
        options = replace(options, rates=_published(intake))
    elif not isinstance(rates, Rates) and rates != "own":
        raise ConfigError(f"rates={rates!r} is not known: use 'own', 'published' or Rates")
    fit, why = own_law(intake, options)
    if not usable(fit) and options.rates is None and len(full.runs) > len(intake.runs):
        options = _rates_of_all(full, intake, options)
    if not usable(fit):
        findings.append(Finding("LAW_NOT_IDENTIFIED", "info", f"no law of these runs is used: {why}"))
    outcome, refused = _analysed(intake, options, fit)
    if refused:
        findings.append(Finding("NO_DEPTH_CONTRAST", "block", refused))
    if plan is not None:
        used: dict[str, object] = {
            "estimand": estimand, "margin": margin, "alpha": alpha, "params": params, "flops": flops,
            "reference": reference, "group": group, "degree": degree,
            "contrast": [shallow, deep] if shallow is not None and deep is not None else None,
        }  # fmt: skip
        off = tuple(departures(plan, intake.runs, intake.lost, used=used))
    else:
        off = ()
    if outcome is None:
        return _empty(intake, options, params, findings, refused, plan_hash, off)
    findings += outcome.findings
    others_at = alternatives(recipes, options)
    by_recipe = recipe_effects(outcome, recipes, others_at, options)
    outcome = _with_recipes(outcome, by_recipe, alpha)
    findings += [Finding("DEVIATION", "warn", text) for text in off]
    gate, study = architecture_study(outcome, reference, alpha, draws, rng)
    if intake.invalid:
        study = ("INVALID_DATA", "; ".join(intake.invalid))
    outcome = _with_growth(outcome, intake, fit if usable(fit) else None)
    rows = (
        reanalyses(Study(table, intake, options, fit, params, charge_extras, others, others_at), outcome)
        if reanalyse
        else []
    )
    verdicts = with_stability(outcome.verdicts, rows)
    rivals = kaplan(outcome, fit if usable(fit) else None, alpha, rng) | mis_scaling(
        by_recipe, outcome, others_at, alpha
    )
    labels = {a: v.label for a, v in verdicts.items()}
    laws = {f"{law}/H2" if fit.law.levels else law: fit} if fit is not None else {}
    made = {
        "T1": tb.data_audit(intake), "T2": tb.law_parameters(fit if usable(fit) else None),
        "T3": tb.depth_effects(outcome, options), "T4": tb.interaction(outcome, gate, labels),
        "T5": compared(fit if usable(fit) else None, rng), "T6": tb.robustness(rows),
        "T7": tb.divergence(outcome.intake, outcome, draws=draws, rng=rng),
    }  # fmt: skip
    from scalinglab import __version__

    said = sentences(outcome, gate, verdicts, study, options)
    checks = checklist(
        intake, outcome, options, params=params, prereg_hash=plan_hash, findings=findings, version=__version__
    )
    warned = tuple(findings)
    result = to_result(
        outcome, intake, options, params=params, verdicts=verdicts, study=study[0], tables=made, warnings=warned,
        prereg_hash=plan_hash, deviations=off, sentences=said, checklist=checks, rivals=rivals, laws=laws,
    )  # fmt: skip
    return DepthReport(
        outcome, intake, options, verdicts, study[0], study[1], gate, made, said, checks, off, warned, rivals,
        advice(outcome, verdicts, options), result,
    )  # fmt: skip


def _check(*, margin: float, alpha: float, estimand: str, flops: str, draws: int) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(f"margin={margin!r} is relative compute and must be positive, e.g. 0.05 for 5 %")
    if not 0 < alpha < 0.5:
        raise ConfigError(f"alpha={alpha!r} must lie between 0 and 0.5")
    if estimand not in ("E1", "E1s", "E2"):
        raise ConfigError(f"estimand={estimand!r} can't carry the label: choose E1, E1s or E2")
    if flops not in ("6n", "causal", "full"):
        raise ConfigError(f"flops={flops!r} is unknown: choose '6n', 'causal' or 'full'")
    if draws < 99:
        raise ConfigError(f"draws={draws}: a bootstrap p-value needs at least 99")


def _chosen(full: Intake, group: str | None, params: str) -> tuple[Intake, dict[str, Intake]]:
    """The runs to analyse and, by group, those matched by another rule."""
    groups = list(dict.fromkeys([*full.runs["group"], *full.lost["group"]]))
    if group is not None:
        if group not in groups:
            raise ConfigError(f"group={group!r} is not in the runs; there are {', '.join(map(str, groups[:20]))}")
        return _groups_only(full, [group]), {
            g: _groups_only(full, [g]) for g in groups if g != group and len(groups) <= 6
        }
    if "match_rule" not in full.runs or full.runs["match_rule"].nunique() < 2:
        return full, {}
    rule = full.runs.groupby("group")["match_rule"].first()
    # the rule with most architectures; among equals the one that holds the declared N equal
    score = full.runs.groupby("match_rule")["architecture"].nunique()
    best = max(score.index, key=lambda r: (score[r], r == f"params_{params}"))
    mine = [g for g in rule.index if rule[g] == best]
    return _groups_only(full, mine), {str(g): _groups_only(full, [g]) for g in rule.index if g not in mine}


def _groups_only(full: Intake, groups: list[str]) -> Intake:
    return full.only(full.runs["group"].isin(groups).to_numpy(), full.lost["group"].isin(groups).to_numpy())


def _published(intake: Intake) -> Rates:
    n = float(np.exp(np.log(intake.runs["params"].astype(float)).mean()))
    d = float(np.exp(np.log(intake.runs["tokens"].astype(float)).mean()))
    return published_rates(params=n, tokens=d)


def _rates_of_all(full: Intake, intake: Intake, options: Options) -> Options:
    """Options with rates from the law on all groups, where it is determined there and not on the chosen ones."""
    fit, _ = own_law(full, options)
    if fit is None or not usable(fit):
        return options
    levels = fit.law.levels
    group = (options.reference if options.reference in levels else levels[0]) if levels else None
    n = float(np.exp(np.log(intake.runs["params"].astype(float)).mean()))
    d = float(np.exp(np.log(intake.runs["tokens"].astype(float)).mean()))
    made = rates_from_fit(fit, params=n, tokens=d, group=group)
    return replace(options, rates=made) if made.params > 0 and made.tokens > 0 else options


def _analysed(intake: Intake, options: Options, fit: Fit | None) -> tuple[Outcome | None, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalinglabWarning)
            return analyse(intake, options, fit=fit), ""
    except FitError as error:
        return None, str(error)


def _with_recipes(outcome: Outcome, rows: list[RecipeEffect], alpha: float) -> Outcome:
    """Append E8, and RECIPE_LIMITED to the label of each architecture whose depth benefit hangs on its recipe."""
    limited = {r.effect.architecture for r in rows if r.limits(alpha)}
    verdicts = {
        a: replace(v, modifiers=(*v.modifiers, "RECIPE_LIMITED")) if a in limited else v
        for a, v in outcome.verdicts.items()
    }
    made = _appended(outcome, [r.effect for r in rows], [r.p_adj for r in rows])
    return replace(made, verdicts=verdicts)


def _appended(outcome: Outcome, rows: list[Effect], p_adj: list[float]) -> Outcome:
    """The outcome with further effects, whose covariance with the others isn't known."""
    if not rows:
        return outcome
    k = len(outcome.effects)
    cov = np.full((k + len(rows), k + len(rows)), math.nan)
    cov[:k, :k] = outcome.effects.cov
    for i, e in enumerate(rows):
        cov[k + i, k + i] = e.se**2
    return replace(outcome, effects=EffectSet((*outcome.effects.effects, *rows), cov), p_adj=(*outcome.p_adj, *p_adj))


def _with_growth(outcome: Outcome, intake: Intake, fit: Fit | None) -> Outcome:
    """Append what needs several sizes: the drift of the optimum (E4) and the exponent difference (E6), where determined."""
    if fit is None or fit.runs["params"].max() < 2 * fit.runs["params"].min():
        return outcome
    rows: list[Effect] = []
    for a in intake.architectures:
        for make in (drift, exponent_difference):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ScalinglabWarning)
                    rows.append(make(fit.runs if "architecture" in fit.runs else intake.runs, architecture=a))
            except ScalinglabError:
                continue
    return _appended(outcome, rows, [math.nan] * len(rows))


def _empty(
    intake: Intake,
    options: Options,
    params: str,
    findings: list[Finding],
    refused: str,
    plan_hash: str | None,
    off: tuple[str, ...],
) -> DepthReport:
    """A report of runs without any depth contrast: labelled, with its audit, and no number."""
    nothing = (math.nan, math.nan)
    verdicts: dict[str, Verdict] = {}
    for a in intake.architectures:
        evidence = Evidence(math.nan, math.nan, 0.0, nothing, nothing, 1.0, 1.0, options.alpha, intake.invalid)
        verdicts[a] = replace(decide(evidence), reason="; ".join(intake.invalid) or refused)
    made: Mapping[str, pd.DataFrame] = {
        "T1": tb.data_audit(intake), "T2": tb.law_parameters(None), "T3": pd.DataFrame(columns=list(tb.T3)),
        "T4": pd.DataFrame(columns=list(tb.T4)), "T5": pd.DataFrame(), "T6": pd.DataFrame(columns=list(tb.T6)),
        "T7": tb.divergence_table(intake.runs, intake.lost),
    }  # fmt: skip
    said = {f"label/{a}": f"{a}: {v}." for a, v in verdicts.items()}
    study, reason = (
        ("INVALID_DATA", "; ".join(intake.invalid)) if intake.invalid else ("ARCH_UNRESOLVED", "no depth contrast")
    )
    result = to_result(
        None, intake, options, params=params, verdicts=verdicts, study=study, tables=made,
        warnings=tuple(findings), prereg_hash=plan_hash, deviations=off, sentences=said, checklist={}, rivals={}, laws={},
    )  # fmt: skip
    return DepthReport(
        None, intake, options, verdicts, study, reason, None, made, said, {}, off, tuple(findings), {},
        (f"add shapes: {refused}",), result,
    )  # fmt: skip

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

from scalinglab.comparison import compare
from scalinglab.depth_benefit import tables as tb
from scalinglab.depth_benefit.analysis import Estimand, Method, Options, Outcome, analyse, own_law, usable
from scalinglab.depth_benefit.architectures import architecture_study
from scalinglab.depth_benefit.cells import ErrorModel
from scalinglab.depth_benefit.effects import Effect, EffectSet
from scalinglab.depth_benefit.estimands import by_shape, drift, exponent_difference
from scalinglab.depth_benefit.intake import Finding, Intake, ParamsChoice, take_in
from scalinglab.depth_benefit.labels import Evidence, Verdict, decide, kaplan_verdict
from scalinglab.depth_benefit.prereg import deviations as departures
from scalinglab.depth_benefit.prereg import read_prereg
from scalinglab.depth_benefit.rates import Rates, published_rates, rates_from_fit
from scalinglab.depth_benefit.result import DepthReport, advice, to_result
from scalinglab.depth_benefit.robustness import Study, reanalyses, with_stability
from scalinglab.depth_benefit.words import checklist, sentences
from scalinglab.errors import ConfigError, FitError, ScalinglabError, ScalinglabWarning
from scalinglab.fitting import Fit
from scalinglab.fitting import fit as fit_law
from scalinglab.hypotheses.equivalence import shape_equivalence
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
    cap: float | None = None,
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
    cap : worst loss of a lost run, for bounds.
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
    full = take_in(table, params=params, checkpoints=checkpoints, charge_extras=charge_extras)
    intake, others = _chosen(full, group, params)
    findings = list(intake.findings)
    known = intake.architectures
    if reference is not None and reference not in known:
        raise ConfigError(f"reference={reference!r} is not in the runs; the architectures are {', '.join(known)}")
    if reference is None:
        reference = BASELINE if BASELINE in known else None
    if reference is None and len(known) > 1:
        text = f"no reference architecture: {BASELINE!r} is not in the runs; give reference=, one of {', '.join(known)}"
        findings.append(Finding("NO_REFERENCE", "warn", text))
    if len(known) == 1:
        findings.append(Finding("ONE_ARCHITECTURE", "info", "one architecture: nothing is said about differences"))
    options = Options(
        reference=reference, method=method, estimand=estimand, shallow=shallow, deep=deep, degree=degree, error=error,
        rates=rates if isinstance(rates, Rates) else None, margin=margin, alpha=alpha, flops=flops, law=law,
        checkpoints=checkpoints, cap=cap, test=test,
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
    findings += [Finding("DEVIATION", "warn", text) for text in off]
    gate, study = architecture_study(outcome, reference, alpha, draws, rng)
    outcome = _with_growth(outcome, intake, fit if usable(fit) else None)
    rows = reanalyses(Study(table, intake, options, fit, params, charge_extras, others), outcome) if reanalyse else []
    verdicts = with_stability(outcome.verdicts, rows)
    rivals = _rivals(outcome, fit if usable(fit) else None, alpha, rng)
    labels = {a: v.label for a, v in verdicts.items()}
    laws = {f"{law}/H2" if fit.law.levels else law: fit} if fit is not None else {}
    made = {
        "T1": tb.data_audit(intake), "T2": tb.law_parameters(fit if usable(fit) else None),
        "T3": tb.depth_effects(outcome, options), "T4": tb.interaction(outcome, gate, labels),
        "T5": _compared(fit if usable(fit) else None, rng), "T6": tb.robustness(rows),
        "T7": tb.divergence(outcome.intake, outcome, draws=draws, rng=rng),
    }  # fmt: skip
    from scalinglab import __version__

    said = sentences(outcome, gate, verdicts, study)
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
        advice(outcome, verdicts), result,
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
    if not rows:
        return outcome
    k = len(outcome.effects)
    cov = np.full((k + len(rows), k + len(rows)), math.nan)
    cov[:k, :k] = outcome.effects.cov
    for i, e in enumerate(rows):
        cov[k + i, k + i] = e.se**2
    return replace(
        outcome, effects=EffectSet((*outcome.effects.effects, *rows), cov),
        p_adj=(*outcome.p_adj, *(math.nan for _ in rows)),
    )  # fmt: skip


def _rivals(outcome: Outcome, fit: Fit | None, alpha: float, rng: int) -> dict[str, str]:
    """Verdict on "shape hardly matters" over the sampled aspect ratios, at most a 40-fold range around their middle."""
    if fit is None:
        return {}
    runs = fit.runs
    r = np.log((runs["width"] / runs["depth"]).to_numpy(np.float64))
    middle, half = 0.5 * (r.min() + r.max()), min(0.5 * np.ptp(r), 0.5 * math.log(40.0))
    aspect = np.exp(np.linspace(middle - half, middle + half, 31))
    place = next(iter(outcome.effects)).contrast
    n, d = place["params"], place["tokens"]
    kappa = float((runs["params"] / (runs["depth"] * runs["width"].astype(float) ** 2)).median())
    shapes = pd.DataFrame({"params": n, "tokens": d, "aspect": aspect, "depth": np.cbrt(n / (kappa * aspect**2))})
    shapes["width"] = shapes["aspect"] * shapes["depth"]
    out: dict[str, str] = {}
    for level in fit.law.levels or ("",):
        rows = shapes.assign(**{str(fit.law.by): level}) if level else shapes
        try:
            test = shape_equivalence(fit, rows, margin=outcome.margin, alpha=alpha, rng=rng)
        except ScalinglabError as error:
            out[f"kaplan/{level or 'all'}"] = f"open: {error}"
            continue
        verdict, why = kaplan_verdict(test.codes, decision=test.decision)
        out[f"kaplan/{level or 'all'}"] = f"{verdict}: {why}"
    return out


def _compared(fit: Fit | None, rng: int) -> pd.DataFrame:
    """T5: the law against the same one without shape, by leaving out one shape at a time."""
    columns = ["law", "k", "runs", "loro_rmse", "difference", "difference_se", "sign_flip_p", "status"]
    if fit is None or fit.law.key == "chinchilla":
        return pd.DataFrame(columns=columns)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalinglabWarning)
            by = fit.law.by
            plain = (
                fit_law("chinchilla", fit.runs, by=by, share="H1") if by else fit_law("chinchilla", by_shape(fit.runs))
            )
            made = compare({fit.law.key: fit, "chinchilla": plain}, folds=("run",), rng=rng).to_frame()
    except (ScalinglabError, np.linalg.LinAlgError):
        return pd.DataFrame(columns=columns)
    frame = made.reset_index().rename(columns={"run_rmse": "loro_rmse", "p": "sign_flip_p"})
    frame["runs"] = fit.n_runs
    return frame.reindex(columns=columns)


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
    reason = "no depth contrast"
    result = to_result(
        None, intake, options, params=params, verdicts=verdicts, study="ARCH_UNRESOLVED", tables=made,
        warnings=tuple(findings), prereg_hash=plan_hash, deviations=off, sentences=said, checklist={}, rivals={}, laws={},
    )  # fmt: skip
    return DepthReport(
        None, intake, options, verdicts, "ARCH_UNRESOLVED", reason, None, made, said, {}, off, tuple(findings), {},
        (f"add shapes: {refused}",), result,
    )  # fmt: skip

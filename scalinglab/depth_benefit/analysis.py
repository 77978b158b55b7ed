"""One depth analysis of prepared runs: which method the design bears, its effects, and the evidence per architecture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from scalinglab.depth_benefit import judging
from scalinglab.depth_benefit.cell_effects import cell_effects
from scalinglab.depth_benefit.cells import CellModel, ErrorModel, cell_table, correct_cells, fit_cells
from scalinglab.depth_benefit.comparable import dropped_runs, unusual_losses
from scalinglab.depth_benefit.divergence import Bounds, bounds, divergence_effect
from scalinglab.depth_benefit.effects import Effect, EffectSet
from scalinglab.depth_benefit.estimands import aspect_of, by_shape, law_effects
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.labels import Evidence, Verdict, decide
from scalinglab.depth_benefit.matching import match_prepared
from scalinglab.depth_benefit.phrasing import both
from scalinglab.depth_benefit.rates import Rates, published_rates, rates_from_fit
from scalinglab.errors import ConfigError, FitError, ScalinglabWarning, SchemaError
from scalinglab.fitting import Fit
from scalinglab.fitting import fit as fit_law
from scalinglab.hypotheses.permutation import sign_flip
from scalinglab.objectives import Gaussian, Objective

Method = Literal["auto", "cells", "pairs", "law"]
Estimand = Literal["E1", "E1s", "E2"]


@dataclass(frozen=True)
class Options:
    """How runs are analysed; see `depth_benefit` for the meaning of each."""

    reference: str | None = None
    method: Method = "auto"
    estimand: Estimand = "E1"
    shallow: float | None = None
    deep: float | None = None
    degree: int | None = None
    error: ErrorModel = "auto"
    rates: Rates | None = None
    correct: bool = True
    margin: float = 0.05
    alpha: float = 0.05
    flops: str = "causal"
    law: str = "shape"
    objective: Objective = field(default_factory=Gaussian)
    checkpoints: Literal["final", "wsd"] = "final"
    cap: float | None = None
    test: Literal["t", "sign_flip"] = "t"
    diverged_above: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one analysis found.

    effects with p_adj (Holm within estimand, variant and group); verdicts and evidence per architecture; model (cells) or
    fit (law), whichever was used; rates used for corrections and screen for margins; margin (nats); intake : the runs as
    analysed, at the best learning rate of their cell.
    """

    method: str
    effects: EffectSet
    p_adj: tuple[float, ...]
    verdicts: Mapping[str, Verdict]
    evidence: Mapping[str, Evidence]
    model: CellModel | None
    fit: Fit | None
    rates: Rates | None
    screen: Rates
    margin: float
    bounds: Mapping[str, Bounds]
    lr: judging.LearningRates
    findings: tuple[Finding, ...]
    intake: Intake
    optimum: Mapping[str, tuple[str, tuple[float, float], float]]


def analyse(intake: Intake, options: Options, *, fit: Fit | None = None) -> Outcome:
    """Analyse prepared runs. `fit` is a law on the same runs (see `own_law`), used for rates and by method "law".

    Raises
    ------
    ConfigError
        An option that doesn't fit the runs.
    FitError
        The runs hold no depth contrast that the method can use.
    """
    tried = intake.runs
    runs, edge = judging.tuned(tried)
    if not len(runs):
        raise FitError("no run has a final loss: all diverged or were stopped")
    findings: list[Finding] = []
    if len(runs) < len(intake.runs):
        text = f"{len(intake.runs) - len(runs)} runs at other learning rates than the best of their cell are left out"
        findings.append(Finding("BEST_OF_LR", "info", text + ": the best of a grid looks better than it is"))
    lost = judging.lost_at_best(intake.lost, runs)
    if len(lost) < len(intake.lost):
        text = f"{len(intake.lost) - len(lost)} runs were lost at other learning rates than the best of their cell"
        findings.append(Finding("LOST_AT_OTHER_LR", "info", text))
    intake = replace(intake, runs=runs, lost=lost)
    method = _method(runs, options, fit)
    if options.test not in ("t", "sign_flip"):
        raise ConfigError(f"test={options.test!r} is not known: use 't' or 'sign_flip'")
    if options.test == "sign_flip" and method != "pairs":
        raise ConfigError(
            f"sign flips need pairs of runs: give {both('method', 'pairs')} with {both('shallow', ...)} and {both('deep', ...)}"
        )
    if method == "cells":
        made = _by_cells(runs, options, fit)
    elif method == "pairs":
        made = _by_pairs(runs, options, fit)
    else:
        if fit is None:
            raise FitError(_no_contrast(runs))
        made = _by_law(runs, options, fit)
    effects, model, rates, screen = made
    findings += unusual_losses(runs)
    if model is not None:
        findings += dropped_runs(runs, model.table)
    if screen.borrowed:
        text = f"the margin and the compute-equivalents use borrowed rates ({screen.source})"
        findings.append(Finding("RATES_BORROWED", "warn", text))
    margin = screen.margin(options.margin)
    p_adj = judging.adjusted(effects)
    place = next(iter(effects)).contrast
    lr = judging.learning_rates(intake, edge, place, tried)
    primary = [(i, e) for i, e in enumerate(effects) if is_primary(e, options)]
    condition, identified = _condition(fit) if method == "law" else (None, True)
    verdicts: dict[str, Verdict] = {}
    evidence: dict[str, Evidence] = {}
    ranges: dict[str, Bounds] = {}
    optimum: dict[str, tuple[str, tuple[float, float], float]] = {}
    left_out = _law_deletions(effects, fit, options, place) if method == "law" and fit is not None else {}
    for i, e in primary:
        a = e.architecture
        deletions: Mapping[str, Effect] = left_out.get(a, {})
        if model is not None:
            optimum[a] = judging.cell_optimum(model, a)
            if optimum[a][0] == "INTERIOR_OPTIMUM" and (why := judging.parabola_alone(model, a)):
                findings.append(
                    Finding("PARABOLA_ALONE", "info", f"{a}: the optimum inside the range rests on a parabola; {why}")
                )
            deletions = judging.cell_deletions(model, e, runs, rates)
            if len(intake.lost):
                ranges[a] = bounds(model, runs, intake.lost, a, cap=options.cap)
        elif method == "law" and fit is not None:
            sampled = (runs["width"] / runs["depth"]).astype(float)
            label = judging.law_optimum(effects, a, (float(sampled.min()), float(sampled.max())))
            star = next((s for s in effects if s.architecture == a and s.variant == "r_star"), None)
            limits = (math.nan, math.nan) if star is None else tuple(np.exp([star.low, star.high]).tolist())
            at = math.nan if star is None else math.exp(star.estimate)
            optimum[a] = (label, (limits[0], limits[1]), at)
        tags = [optimum[a][0]] if a in optimum else []
        if method == "law" and fit is not None and "E_COLLAPSE" in fit.codes:
            tags.append("E_COLLAPSE")
        evidence[a], verdicts[a] = judging.judge(
            e, p_adj=p_adj[i], tests=len(primary), margin=margin, alpha=options.alpha, intake=intake,
            rates_known=rates is not None, lr=lr, condition=condition, identified=identified,
            shape_sd=judging.shape_spread(runs, a) if method == "cells" else None,
            found_bounds=ranges.get(a), deletions=deletions, modifiers=tuple(tags),
        )  # fmt: skip
    for a in intake.architectures:
        if a not in verdicts:
            empty = Evidence(
                math.nan, math.nan, 0.0, (math.nan,) * 2, (math.nan,) * 2, 1.0, margin, options.alpha, intake.invalid
            )
            evidence[a], verdicts[a] = empty, decide(empty)
    effects, p_adj = _with_divergence(effects, p_adj, intake)
    return Outcome(
        method, effects, tuple(p_adj), verdicts, evidence, model, fit if method == "law" else None, rates, screen, margin,
        ranges, lr, tuple(findings), intake,
        optimum,
    )  # fmt: skip


def own_law(intake: Intake, options: Options) -> tuple[Fit | None, str]:
    """The law on these runs, clustered by shape and crossed with architecture; None with the reason where there is none."""
    table = intake.rows if options.checkpoints == "wsd" else judging.tuned(intake.runs)[0]
    levels = table["architecture"].nunique() if len(table) else 0
    if len(table) < 8:
        return None, f"{len(table)} runs are too few for law {options.law!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalinglabWarning)
            if levels > 1:
                made = fit_law(options.law, by_shape(table), by="architecture", share="H2", objective=options.objective)
            else:
                made = fit_law(options.law, by_shape(table), objective=options.objective)
            _ = made.jackknife
    except (FitError, ConfigError, SchemaError) as error:
        return None, str(error)
    return made, "" if usable(made) else f"law {options.law!r} is {made.status}: {', '.join(made.codes)}"


def usable(fit: Fit | None) -> bool:
    """Whether a law is determined well enough to take rates or effects from."""
    return fit is not None and fit.status in ("converged", "at_bound") and bool(np.isfinite(fit.params).all())


def _no_contrast(runs: pd.DataFrame) -> str:
    """Why nothing can be estimated, in words."""
    depths = sorted(runs["depth"].unique())
    if len(depths) == 1:
        return f"all runs have depth {depths[0]:g}: there is no depth contrast; train the same size at other depths"
    return (
        "these runs carry neither matched shapes nor a law that they determine: no depth effect can be estimated; train several "
        "shapes of one size and budget"
    )


def _method(runs: pd.DataFrame, options: Options, fit: Fit | None) -> str:
    if options.method != "auto":
        if options.method not in ("cells", "pairs", "law"):
            raise ConfigError(f"method={options.method!r} is not known: use 'auto', 'cells', 'pairs' or 'law'")
        return options.method
    shapes = runs.groupby(["architecture", "group"])["x"].nunique()
    if shapes.max() >= 3:
        return "cells"
    if shapes.max() == 2 and not usable(fit):
        return "pairs"
    return "law"


def _rates(
    runs: pd.DataFrame, options: Options, fit: Fit | None, place: Mapping[str, float]
) -> tuple[Rates | None, Rates]:
    """Rates for corrections (None if there are none) and rates for margins."""
    n, d = place["params"], place["tokens"]
    rates = options.rates
    if rates is None and fit is not None and usable(fit):
        group = None
        if fit.law.levels:
            group = options.reference if options.reference in fit.law.levels else fit.law.levels[0]
        rates = rates_from_fit(fit, params=n, tokens=d, group=group, kappa=_kappa(runs))
        if not (rates.params > 0 and rates.tokens > 0):
            rates = None
    return rates, rates or published_rates(params=n, tokens=d)


Made = tuple[EffectSet, CellModel | None, Rates | None, Rates]


def _by_cells(runs: pd.DataFrame, options: Options, fit: Fit | None) -> Made:
    table = cell_table(runs)
    model = fit_cells(table, shallow=options.shallow, deep=options.deep, degree=options.degree, error=options.error)
    rates, screen = _rates(runs, options, fit, model.contrast)
    if rates is not None and options.correct:
        model = correct_cells(model, rates)
    reference = options.reference if options.reference in model.architectures else None
    effects = cell_effects(model, rates=rates, screen=screen, reference=reference, correct=options.correct)
    return _in_group(effects, runs), model, rates, screen


def _by_pairs(runs: pd.DataFrame, options: Options, fit: Fit | None) -> Made:
    depths = sorted(runs["depth"].unique())
    if len(depths) < 2:
        raise FitError(f"all runs have depth {depths[0]:g}: there is no depth contrast")
    shallow = depths[0] if options.shallow is None else options.shallow
    deep = depths[-1] if options.deep is None else options.deep
    matched = match_prepared(runs, shallow=shallow, deep=deep, tolerance=0.25)
    place = {"params": float(matched.pairs["params"].mean()), "tokens": float(matched.pairs["tokens"].mean())}
    rates, screen = _rates(runs, options, fit, place)
    names = set(matched.pairs["architecture"])
    reference = options.reference if options.reference in names else None
    pairing: Literal["auto", "paired"] = "paired" if options.test == "sign_flip" else "auto"  # signs are those of pairs
    made = matched.contrast(rates=rates if options.correct else None, reference=reference, pairing=pairing)
    checked: list[Effect] = []
    for e in made:
        c = e.correction
        if options.test == "sign_flip" and e.estimand == "E1":
            e = _flipped(e, matched.pairs.loc[matched.pairs["architecture"] == e.architecture, "gap"], c.nats)
        if not c.applied and e.estimand == "E1":
            spurious = abs(screen.params * c.dln_params) + abs(screen.tokens * c.dln_tokens)
            e = replace(e, correction=replace(c, spurious=spurious, needed=not spurious <= 0.5 * e.se))
        checked.append(e)
    return _in_group(EffectSet(tuple(checked), made.cov), runs), None, rates, screen


def _flipped(effect: Effect, gaps: pd.Series, correction: float) -> Effect:
    """The effect with the p of sign flips of its pair differences (shifted by the correction) in place of t's."""
    test = sign_flip(gaps.to_numpy(np.float64) + correction)
    return replace(effect, exact_p=test.p_value, p_min=test.p_min, method=f"{effect.method}; p by {test.method}")


def _by_law(runs: pd.DataFrame, options: Options, fit: Fit) -> Made:
    place = law_place(fit.runs, options)
    rates, screen = _rates(fit.runs, options, fit, place)
    reference = options.reference if options.reference in fit.law.levels else None
    with np.errstate(all="ignore"):
        effects = law_effects(
            fit, params=place["params"], tokens=place["tokens"],
            aspects=(place["aspect_shallow"], place["aspect_deep"]), kappa=place["kappa"], reference=reference,
            vocab=_one(runs, "vocab"), context=_one(runs, "context"),
        )  # fmt: skip
    if not fit.law.levels:
        only = str(runs["architecture"].iloc[0])
        effects = EffectSet(tuple(replace(e, architecture=only) for e in effects), effects.cov)
    return effects, None, rates, screen


def law_place(runs: pd.DataFrame, options: Options) -> dict[str, float]:
    """Where a law is read: the geometric mean of N and D, and the shapes compared.

    Shapes are those of the depths asked for at that N, else the 10 % and 90 % quantiles of the aspect ratios that were run.
    """
    params = float(np.exp(np.log(runs["params"].astype(float)).mean()))
    tokens = float(np.exp(np.log(runs["tokens"].astype(float)).mean()))
    kappa = _kappa(runs)
    shapes = runs.drop_duplicates(["depth", "width"])
    r = np.log((shapes["width"] / shapes["depth"]).to_numpy(np.float64))
    deep, shallow = (float(v) for v in np.exp(np.quantile(r, [0.1, 0.9])))
    if options.shallow is not None:
        shallow = aspect_of(params, options.shallow, kappa)
    if options.deep is not None:
        deep = aspect_of(params, options.deep, kappa)
    return {"params": params, "tokens": tokens, "kappa": kappa, "aspect_shallow": shallow, "aspect_deep": deep}


def _law_deletions(
    effects: EffectSet, fit: Fit, options: Options, place: Mapping[str, float]
) -> dict[str, dict[str, Effect]]:
    kappa = _kappa(fit.runs)
    n, d = place["params"], place["tokens"]
    aspect = np.array([place["aspect_shallow"], place["aspect_deep"]])
    rows = pd.DataFrame({"params": n, "tokens": d, "aspect": aspect})
    rows["depth"] = np.cbrt(n / (kappa * aspect**2))
    rows["width"] = aspect * rows["depth"]
    names = [str(v) for v in dict.fromkeys(fit.runs["run_id"])]
    out: dict[str, Any] = {}
    for e in effects.subset("E1"):
        if fit.law.levels:
            rows[str(fit.law.by)] = e.architecture
        loss = fit.predict(rows, fit.jackknife.params)
        out[e.architecture] = loss[:, 0] - loss[:, 1]
    return judging.law_deletions(effects, out, names)


def _with_divergence(effects: EffectSet, p_adj: list[float], intake: Intake) -> tuple[EffectSet, list[float]]:
    """Append E9 of every architecture that lost a run."""
    rows: list[Effect] = []
    for a in dict.fromkeys(intake.lost["architecture"]):
        try:
            rows.append(divergence_effect(intake.runs, intake.lost, str(a)))
        except ConfigError:
            continue
    if not rows:
        return effects, p_adj
    k = len(effects) + len(rows)
    cov = np.full((k, k), math.nan)
    cov[: len(effects), : len(effects)] = effects.cov
    for i, e in enumerate(rows):
        cov[len(effects) + i, len(effects) + i] = e.se**2
    return EffectSet((*effects.effects, *rows), cov), [*p_adj, *(math.nan for _ in rows)]


def is_primary(effect: Effect, options: Options) -> bool:
    """Whether the label of its architecture is about this effect."""
    if effect.estimand != options.estimand:
        return False
    return effect.variant in ("", options.flops) if options.estimand == "E2" else effect.variant == ""


def _condition(fit: Fit | None) -> tuple[float | None, bool]:
    if fit is None:
        return None, False
    kappa = next((c.value for c in fit.checks if c.name == "conditioning, centred"), None)
    return kappa, usable(fit)


def _in_group(effects: EffectSet, runs: pd.DataFrame) -> EffectSet:
    name = "+".join(dict.fromkeys(runs["group"].astype(str)))
    name = name if len(name) <= 60 else f"{runs['group'].nunique()} groups"
    return EffectSet(tuple(replace(e, group=name) for e in effects), effects.cov)


def _kappa(runs: pd.DataFrame) -> float:
    made = runs["params"].astype(float) / (runs["depth"].astype(float) * runs["width"].astype(float) ** 2)
    return float(made.median())


def _one(runs: pd.DataFrame, column: str) -> float | None:
    if column not in runs or runs[column].isna().all():
        return None
    return float(runs[column].astype(float).median())

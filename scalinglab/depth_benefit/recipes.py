"""Recipes: an architecture that was trained by several parametrizations, or over a grid of learning rates.

Runs of two recipes are no seeds of each other. Each architecture's label rests on one recipe, the better one (or the one
asked for), and what the choice of the recipe does to its depth benefit is an estimand of its own, paired by shape:

    E8 = B(recipe of the label) - B(other recipe) = w'(loss_1 - loss_2) over the shapes that both trained

What a shape has of its own is in both losses and cancels, and so does a mismatch in N and D. "Mis-scaled training" as a
rival of depth is supported where E8 is significant and the label is another one at the other recipe.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.analysis import Options, Outcome, analyse, own_law
from scalinglab.depth_benefit.cells import cell_table, fit_cells
from scalinglab.depth_benefit.effects import Effect, satterthwaite
from scalinglab.depth_benefit.findings import Finding
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.judging import tuned
from scalinglab.errors import ConfigError, ScalinglabError, ScalinglabWarning
from scalinglab.hypotheses.multiplicity import adjust

OWN_RATE, COMMON_RATE = "own learning rates", "one learning rate"
NOT_STATED = "not stated"
_CHANGE = 0.5  # of B: a recipe that changes it by more, significantly, limits what the label says
_CELL = ["architecture", "group", "depth", "width"]


@dataclass(frozen=True)
class Recipes:
    """Runs by recipe.

    main : the runs that labels rest on. chosen : recipe of each architecture that has several. others : by recipe, the runs
    of architectures whose label rests on another one. findings : what was decided, in words.
    """

    main: Intake
    chosen: Mapping[str, str]
    others: Mapping[str, Intake]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class RecipeEffect:
    """E8 of one architecture against one other recipe, with B at both and the p adjusted over all E8 (Holm)."""

    effect: Effect
    chosen: str
    other: str
    at_chosen: float
    at_other: float
    p_adj: float

    def limits(self, alpha: float) -> bool:
        """Whether B changes by more than half or in sign, significantly."""
        return self.p_adj < alpha and abs(self.at_chosen - self.at_other) > _CHANGE * abs(self.at_chosen)


def separate(intake: Intake, recipe: str | None = None) -> Recipes:
    """Split runs by the column `parametrization` where an architecture has several, and choose one for each architecture.

    recipe : the one that labels rest on; by default, for each architecture, the one with the lowest mean loss over the shapes
    that all of its recipes trained, each at its best learning rate. That is a choice by level, not by depth benefit.

    Raises
    ------
    ConfigError
        The recipe asked for isn't in the runs.
    """
    names = _names(intake.runs)
    known = sorted({*names, *_names(intake.lost)})
    if recipe is not None and recipe not in known:
        there = f"there are {', '.join(known)}" if known and known != [NOT_STATED] else "they name no parametrization"
        raise ConfigError(f"recipe {recipe!r} is not in the runs; {there}")
    lost = _names(intake.lost)
    chosen: dict[str, str] = {}
    findings: list[Finding] = []
    for a in intake.architectures:
        own = (intake.runs["architecture"] == a).to_numpy()
        found = sorted(set(names[own]))
        if len(found) < 2:
            continue
        chosen[a] = recipe if recipe is not None and recipe in found else _better(intake.runs[own], names[own])
    if not chosen:
        if len(set(names)) > 1:
            text = f"architectures were trained by different recipes ({', '.join(known)}): their differences are also those of recipes"
            return Recipes(intake, {}, {}, (Finding("RECIPES_DIFFER", "warn", text),))
        return Recipes(intake, {}, {})
    told = ", ".join(f"{a} {r}" for a, r in chosen.items())
    why = "asked for" if recipe is not None else "lowest mean loss over the shapes that all recipes trained"
    text = f"several recipes; labels rest on {told} ({why}), and E8 says what the recipe does to the depth benefit"
    findings.append(Finding("SEVERAL_RECIPES", "info", text))

    def of(frame: pd.DataFrame, given: NDArray[np.object_], r: str | None) -> NDArray[np.bool_]:
        label = frame["architecture"].map(chosen)
        if r is None:
            return (label.isna() | (label == given)).to_numpy(bool)
        return (label.notna() & (label != r) & (given == r)).to_numpy(bool)

    main = intake.only(of(intake.runs, names, None), of(intake.lost, lost, None))
    others = {r: intake.only(of(intake.runs, names, r), of(intake.lost, lost, r)) for r in known}
    return Recipes(main, chosen, {r: v for r, v in others.items() if len(v.runs)}, tuple(findings))


def at_one_rate(intake: Intake) -> Intake | None:
    """Runs of each architecture at the one learning rate that all its shapes have and that is best over them; None without.

    Only architectures whose shapes were tuned over a grid count, and of those only where some shape prefers another rate.
    """
    runs = intake.runs
    if "lr" not in runs or not len(runs) or runs["lr"].isna().any():
        return None
    keep = np.zeros(len(runs), bool)
    best = tuned(runs)[0].groupby(_CELL)["lr"].first()
    for a, own in runs.groupby("architecture", sort=False):
        means = own.pivot_table(index=_CELL, columns="lr", values="loss", aggfunc="mean")
        shared = means.dropna(axis=1)
        if not shared.shape[1] or (means.notna().sum(axis=1) < 2).all():
            continue
        rate = float(shared.mean().idxmin())
        if (best.loc[[a]] != rate).any():
            keep |= ((runs["architecture"] == a) & (runs["lr"] == rate)).to_numpy()
    return intake.only(keep, np.zeros(len(intake.lost), bool)) if keep.any() else None


def alternatives(recipes: Recipes, options: Options) -> dict[str, Outcome]:
    """The analysis of every other recipe, and of one learning rate for all shapes; those that can't be made are left out."""
    candidates = dict(recipes.others)
    single = at_one_rate(recipes.main)
    if single is not None:
        candidates[COMMON_RATE] = single
    out: dict[str, Outcome] = {}
    for name, intake in candidates.items():
        reference = options.reference if options.reference in intake.architectures else None
        asked = replace(options, reference=reference)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScalinglabWarning)
                out[name] = analyse(intake, asked, fit=own_law(intake, asked)[0])
        except (ScalinglabError, np.linalg.LinAlgError):
            continue
    return out


def recipe_effects(
    outcome: Outcome, recipes: Recipes, others: Mapping[str, Outcome], options: Options
) -> list[RecipeEffect]:
    """E8 of every architecture against every other recipe, by cell means paired by shape, else as independent analyses."""
    rows: list[RecipeEffect] = []
    for name, other in others.items():
        made = _paired(outcome, other, options) if outcome.model is not None else {}
        for a in other.intake.architectures:
            if a not in outcome.verdicts:
                continue
            chosen = OWN_RATE if name == COMMON_RATE else recipes.chosen.get(a, NOT_STATED)
            found = made.get(a) or (None if outcome.model is not None else _independent(outcome, other, a))
            if found is not None and found[0].usable:
                effect = replace(found[0], variant=f"{chosen} less {name}")
                rows.append(RecipeEffect(effect, chosen, name, found[1], found[2], math.nan))
    if not rows:
        return []
    p = adjust([r.effect.p for r in rows], method="holm")
    return [replace(r, p_adj=float(v)) for r, v in zip(rows, np.asarray(p), strict=True)]


def mis_scaling(
    rows: list[RecipeEffect], outcome: Outcome, others: Mapping[str, Outcome], alpha: float
) -> dict[str, str]:
    """Verdict on the rival "the deep models are merely mis-scaled" per architecture and other recipe.

    Supported iff E8 is significant and both the label and what the intervals alone say are others at the other recipe: a
    label can change for reasons of design alone, as one learning rate for all shapes is a confound by rule.
    """
    out: dict[str, str] = {}
    for r in rows:
        a = r.effect.architecture
        here, there = outcome.verdicts[a], others[r.other].verdicts[a]
        told = f"E8 = {r.effect.estimate:.4f} nats, p_Holm = {r.p_adj:.3g}; {here.label} at {r.chosen}, {there.label} at {r.other}"
        moved = here.label != there.label and here.reading != there.reading
        out[f"misscaling/{a}/{r.other}"] = f"{'supported' if moved and r.p_adj < alpha else 'open'}: {told}"
    return out


def _names(runs: pd.DataFrame) -> NDArray[np.object_]:
    if "parametrization" not in runs:
        return np.full(len(runs), NOT_STATED, dtype=object)
    return (
        runs["parametrization"].astype(object).where(runs["parametrization"].notna(), NOT_STATED).astype(str).to_numpy()
    )


def _better(own: pd.DataFrame, names: NDArray[np.object_]) -> str:
    """The recipe with the lowest mean loss over shared cells; without any, the one with most shapes."""
    parts = {r: tuned(own[names == r])[0].groupby(_CELL)["loss"].mean() for r in sorted(set(names))}
    table = pd.concat(parts, axis=1)
    shared = table.dropna()
    return str(shared.mean().idxmin()) if len(shared) else str(table.notna().sum().idxmax())


def _paired(outcome: Outcome, other: Outcome, options: Options) -> dict[str, tuple[Effect, float, float]]:
    """E8 and B at both recipes from the differences of cell means over shared shapes."""
    first, second = outcome.intake.runs, other.intake.runs
    shared = set(first[_CELL].itertuples(index=False, name=None)) & set(
        second[_CELL].itertuples(index=False, name=None)
    )
    if not shared:
        return {}
    here, there = (
        cell_table(f[[t in shared for t in f[_CELL].itertuples(index=False, name=None)]]) for f in (first, second)
    )
    keys = ["architecture", "block", "depth", "width"]
    both = here.merge(there[[*keys, "loss"]], on=keys, suffixes=("", "_other"))
    both["loss_here"] = both["loss"]
    both["loss"] = both["loss_here"] - both["loss_other"]
    try:
        model = fit_cells(both, shallow=options.shallow, deep=options.deep)
    except ScalinglabError:
        return {}
    out = {}
    for a in model.architectures:
        w = model.weights(a)
        variance, df = model.variance(w)
        at = [float(w @ model.table[c].to_numpy(np.float64)) for c in ("loss_here", "loss_other")]
        se = math.sqrt(variance) if variance > 0 else math.nan
        how = f"differences of cell means paired by shape, degree {model.degree}, {model.error} error"
        out[a] = (Effect("E8", a, at[0] - at[1], se, df, "nats", how, contrast=model.contrast), at[0], at[1])
    return out


def _independent(outcome: Outcome, other: Outcome, architecture: str) -> tuple[Effect, float, float] | None:
    """E8 from two analyses with independent errors (pairs of shapes, laws)."""
    found = [
        next((e for e in o.effects if e.estimand == "E1" and e.architecture == architecture and not e.variant), None)
        for o in (outcome, other)
    ]
    if found[0] is None or found[1] is None or not (found[0].usable and found[1].usable):
        return None
    e, r = found[0], found[1]
    df = satterthwaite([e.se**2, r.se**2], [e.df, r.df])
    made = Effect(
        "E8", architecture, e.estimate - r.estimate, math.hypot(e.se, r.se), df, "nats",
        f"{e.method}; recipes as independent", contrast=e.contrast,
    )  # fmt: skip
    return made, e.estimate, r.estimate

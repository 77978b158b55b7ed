"""Are deep models of the reference merely mis-scaled? `misscaling` answers from learning-rate sweeps of its arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from scalinglab.coordinates import CoordinateCheck
from scalinglab.errors import ConfigError, FitError
from scalinglab.misscaling.contrasts import Roles
from scalinglab.misscaling.drift import drift_table
from scalinglab.misscaling.engine import Analysis, Method, analyse, decide_again
from scalinglab.misscaling.fitness import cautions, other_curves
from scalinglab.misscaling.hierarchy import Hierarchy, fit_hierarchy
from scalinglab.misscaling.identical import repeated
from scalinglab.misscaling.intake import Arm, Grids, take_in
from scalinglab.misscaling.reasons import (
    fixed_losses,
    lost_envelopes,
    missing_arms,
    pattern,
    precision,
    recipes,
    shares,
)
from scalinglab.misscaling.rules import MEANING, Margins, Verdict, overall
from scalinglab.misscaling.sensitivity import sensitivity
from scalinglab.misscaling.suspects import rank_suspects
from scalinglab.misscaling.tables import decomposition_table, envelope_table

TAUS = (0.0, 0.003, 0.006)  # SDs of shapes about a line under which the verdict is told again


@dataclass(frozen=True)
class MisscalingReport:
    """The rival explanation, judged. Immutable; tables at full precision.

    verdict : over all candidates. verdicts : per candidate architecture ("" where there is none). reasons : why, and what is
    missing. envelopes : optimum and best loss of each arm and shape. drift : of the optimum with depth and width.
    decomposition : U, V, M, W and the depth gains. sensitivity : to the learning rate. suspects : table entries that would
    have to be wrong. by_tau, by_curve : the verdict under given SDs of shapes, and other curves. hierarchy : one model of all runs; None if it can't be fit.
    roles, grids, analysis, margins, method : what was compared and how.
    """

    verdict: Verdict
    verdicts: Mapping[str, str]
    reasons: tuple[str, ...]
    envelopes: pd.DataFrame
    drift: pd.DataFrame
    decomposition: pd.DataFrame
    sensitivity: pd.DataFrame
    suspects: pd.DataFrame
    by_tau: pd.DataFrame
    by_curve: pd.DataFrame
    hierarchy: Hierarchy | None
    roles: Roles
    grids: Grids
    analysis: Analysis | None
    margins: Margins
    method: Method

    def summary(self) -> str:
        """The report as text."""
        lines = [f"Mis-scaling: {self.verdict}: {MEANING[self.verdict]}"]
        lines += [f"  {a}: {v}" for a, v in self.verdicts.items() if a]
        lines += ["", self.basis] if self.basis else []
        lines += _envelope_lines(self.envelopes)
        for title, table, columns in (
            ("Depth gains and their differences, nats per e-fold of depth", self.decomposition, ["name", "estimate", "se", "low", "high", "p_adj", "state"]),
            ("Drift of ln optimal learning rate", self.drift, ["architecture", "parametrization", "axis", "slope", "se", "low", "high", "held"]),
            ("Which entry would have to be wrong", self.suspects, ["entry", "exponent", "tried", "needed", "needed_se", "misfit", "p", "check"]),
        ):  # fmt: skip
            if len(table):
                lines += [
                    "",
                    title,
                    table[columns].to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-"),
                ]
        lines += ["", "Reasons", *(f"  {r}" for r in self.reasons)]
        return "\n".join(lines)

    @property
    def basis(self) -> str:
        """Runs and their noise in a sentence; empty where nothing was analysed."""
        if self.analysis is None:
            return ""
        made, count = self.analysis, int(self.grids.tried[~repeated(self.grids.cells)].sum())
        if not np.isfinite(made.noise.sigma):
            return f"{count} runs, too few to tell their noise"
        line = f"; SD of shapes about their arm's line {float(made.tau):.2g} nats" if np.isfinite(made.tau) else ""
        if line and np.isfinite(made.arm_tau):  # estimated by itself, so either may come out larger
            line += f"; SD of what arms do not have in common {float(made.arm_tau):.2g} nats"
        df = int(np.max(made.noise.df))
        return f"{count} runs, which scatter about their curves by {float(made.noise.sigma):.2g} nats (SD, {df} degrees of freedom){line}; {made.how.told}"

    def to_frame(self) -> pd.DataFrame:
        """The decomposition: one row per contrast."""
        return self.decomposition.copy()

    def save(self, folder: str | Path) -> Path:
        """Write result.json, summary.txt and the tables as CSV to a folder, each file whole or not at all; returns the folder."""
        from scalinglab.misscaling.saving import save

        return save(self, folder)

    def __repr__(self) -> str:
        return f"<MisscalingReport {self.verdict}; {len(self.envelopes)} envelopes>"


def misscaling(
    runs: pd.DataFrame,
    *,
    reference: str = "pre_ln",
    naive: str = "sp",
    scaled: str | Sequence[str] = ("native", "completep"),
    checks: Sequence[CoordinateCheck] = (),
    mechanism: Mapping[str, bool] | None = None,
    choose_on: Sequence[int] = (),
    diverged_above: float | None = None,
    margins: Margins | None = None,
    method: Method | None = None,
    hierarchical: bool = True,
    rng: int | np.random.Generator = 0,
) -> MisscalingReport:
    """Judge whether deep models of the reference are mis-scaled, or the architecture matters, or both, or neither.

    Parameters
    ----------
    runs : run table with depth, width, lr, loss; architecture, parametrization and seed as far as there are arms and seeds.
        Tables without learning rates get a report that says what they cannot answer.
    reference : architecture whose scaling is in question.
    naive : parametrization that does not scale with depth.
    scaled : parametrizations that do, in order of preference; for each architecture the first that it has.
    checks : coordinate checks; a scaled arm whose check failed is refused.
    mechanism : per candidate, whether a measure of depth use (layer removal, linearised blocks) moved with it. Without it
        H_arch is told as provisional.
    choose_on : seeds on which the reference's best among `scaled` is chosen (lowest tuned loss); they are then left out, so
        that the choice does not favour the reference.
    diverged_above : loss from which a run counts as diverged.
    margins, method : see there. hierarchical : fit the model of all runs too. rng : seed of the bootstrap.

    Returns
    -------
    MisscalingReport

    Raises
    ------
    SchemaError
        No losses or shapes in the table, or no arm is left.
    ConfigError
        `choose_on` leaves no seeds.
    """
    margins, method = margins or Margins(), method or Method()
    generator = np.random.default_rng(rng)
    wanted = [scaled] if isinstance(scaled, str) else list(scaled)
    grids = take_in(runs, checks=checks, naive=naive, scaled=wanted, diverged_above=diverged_above)
    if not len(grids.cells):
        return _unanswered(grids, margins, method)
    notes: list[str] = []
    reference = _reference(grids, reference, notes)
    if choose_on:
        wanted, grids = _chosen(grids, reference, wanted, choose_on, method, generator, notes)
    roles = assign_roles(grids.arms, reference=reference, naive=naive, scaled=wanted)
    made = analyse(grids.cells, grids.z, grids.loss, roles, method=method, margins=margins, rng=generator)
    C = len(grids.cells)
    verdicts = {a: str(v) for a, v in made.verdicts.items()}
    verdict = overall(verdicts)
    by_tau = _by_tau(grids, made, roles, method, margins)
    by_curve = other_curves(grids, roles, method, margins, generator)
    hierarchy = _hierarchy(grids, made, notes) if hierarchical else None
    reasons = [
        *notes,
        *missing_arms(grids, roles, made),
        *pattern(made, roles, verdicts, mechanism),
        *fixed_losses(grids, roles, made),
        *shares(made, roles),
        *recipes(made, roles, margins),
        *precision(made, margins),
        *cautions(grids, made.curves, method.window),
        *lost_envelopes(grids, made, method),
    ]
    if grids.paired is False and verdict != "inconclusive":
        reasons.insert(
            0, f"the runs alone would say {verdict}, but the arms are not paired (see below): nothing is decided"
        )
        verdict, verdicts = "inconclusive", dict.fromkeys(verdicts, "inconclusive")
    changed = [f"{r.tau:g}: {r.verdict}" for r in by_tau.itertuples() if r.verdict != verdict]
    if changed:
        reasons.append("the verdict depends on how far shapes lie off a line (tau): " + ", ".join(changed))
    changed = [f"{r.model} within {r.window:g}: {r.verdict}" for r in by_curve.itertuples() if r.verdict != verdict]
    if changed:
        reasons.append("the verdict depends on the curve (model, window in nats): " + ", ".join(changed))
    usable = made.curves.usable
    return MisscalingReport(
        verdict, verdicts, (*reasons, *grids.findings), envelope_table(grids, made, method),
        drift_table(grids.cells, made.point.optimum, made.cov[:C, :C], usable, margin=margins.drift,
                    noise_df=made.how.df),
        decomposition_table(made, roles, margins), sensitivity(grids, made.curves), rank_suspects(made, roles, grids.cells, grids.checked), by_tau, by_curve,
        hierarchy, roles, grids, made, margins, method,
    )  # fmt: skip


def assign_roles(arms: Sequence[Arm], *, reference: str, naive: str, scaled: Sequence[str]) -> Roles:
    """Which arm is the naive one, which the scaled one, and which architectures are candidates."""
    there = set(arms)

    def first(architecture: str) -> Arm | None:
        return next(((architecture, p) for p in scaled if (architecture, p) in there), None)

    others = [a for a in dict.fromkeys(a for a, _ in arms) if a != reference and first(a) is not None]
    plain = {a: (a, naive) for a in others if (a, naive) in there}
    return Roles(
        (reference, naive) if (reference, naive) in there else None, first(reference), tuple(others),
        {a: found for a in others if (found := first(a)) is not None}, plain,
    )  # fmt: skip


def _reference(grids: Grids, reference: str, notes: list[str]) -> str:
    there = list(dict.fromkeys(a for a, _ in grids.arms))
    if reference not in there and len(there) == 1:
        notes.append(f"no runs of {reference}: the only architecture, {there[0]}, is taken as the reference")
        return there[0]
    return reference


def _chosen(
    grids: Grids, reference: str, wanted: list[str], seeds: Sequence[int], method: Method, rng: np.random.Generator, notes: list[str]
) -> tuple[list[str], Grids]:  # fmt: skip
    labels = [f"{s:g}" for s in seeds]
    rest = grids.without_seeds(labels)
    if not rest.seeds or rest.seeds == grids.seeds:
        raise ConfigError(
            f"choose_on={list(seeds)} must be some of the seeds {', '.join(grids.seeds)}, not all of them"
        )
    held = grids.without_seeds(rest.seeds)
    roles = assign_roles(held.arms, reference=reference, naive="", scaled=wanted)
    made = analyse(held.cells, held.z, held.loss, roles, method=replace(method, draws=50), margins=Margins(), rng=rng)
    best = {}
    for p in wanted:
        rows = [i for i, a in enumerate(held.arm) if held.arms[a] == (reference, p)]
        if rows and made.curves.usable[rows].all():
            best[p] = float(made.point.tuned[rows].mean())
    if not best:
        return wanted, rest
    chosen = min(best, key=lambda p: best[p])
    notes.append(f"{reference} is scaled by {chosen}, the best on seeds {', '.join(labels)}, which are left out below")
    # candidates keep their own order of preference
    return [chosen, *(p for p in wanted if p != chosen)], rest


def _by_tau(grids: Grids, made: Analysis, roles: Roles, method: Method, margins: Margins) -> pd.DataFrame:
    rows = []
    for tau in TAUS:
        again = decide_again(grids.cells, made, roles, replace(method, tau=tau), margins, seeds=len(grids.seeds))
        verdicts = {a: str(v) for a, v in again.verdicts.items()}
        rows.append({"tau": tau, "verdict": overall(verdicts), **{f"verdict:{a}": v for a, v in verdicts.items() if a}})
    return pd.DataFrame(rows)


def _hierarchy(grids: Grids, made: Analysis, notes: list[str]) -> Hierarchy | None:
    try:
        found = fit_hierarchy(grids, made.curves)
    except (FitError, np.linalg.LinAlgError) as error:
        notes.append(f"no hierarchical model: {error}")
        return None
    if not found.converged:
        notes.append("the hierarchical model did not settle: its numbers are a rough check only")
    return found


def _envelope_lines(table: pd.DataFrame) -> list[str]:
    """Optima as text; the reasons say more about those that weren't located."""
    if not len(table):
        return []
    keys = ["architecture", "parametrization", "depth", "width"]
    shown = table[[*keys, "status", "optimum_lr", "low", "high", "minimum", "minimum_se", "diverged"]]
    return [
        "",
        "Optimal learning rate and loss there",
        shown.to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-"),
    ]


def _unanswered(grids: Grids, margins: Margins, method: Method) -> MisscalingReport:
    empty = pd.DataFrame()
    return MisscalingReport("inconclusive", {}, grids.missing, empty, empty, empty, empty, empty, empty, empty, None,
                            Roles(None, None, (), {}, {}), grids, None, margins, method)  # fmt: skip

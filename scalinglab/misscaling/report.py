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
from scalinglab.misscaling.curves import STATUS, interpolate
from scalinglab.misscaling.drift import drift_table
from scalinglab.misscaling.engine import Analysis, Method, analyse, decide_again
from scalinglab.misscaling.hierarchy import Hierarchy, fit_hierarchy
from scalinglab.misscaling.intake import Arm, Grids, take_in
from scalinglab.misscaling.rules import Margins, Verdict, overall, readings
from scalinglab.misscaling.sensitivity import sensitivity
from scalinglab.misscaling.suspects import rank_suspects
from scalinglab.misscaling.tables import decomposition_table, envelope_table

_ADVICE = {
    "boundary": "the best learning rate is the smallest or largest tried; extend the grid",
    "one-sided": "too few learning rates on one side of the best; extend the grid",
    "too few": "too few learning rates within {window:g} nats of the best; sweep more finely, or widen the window",
    "no optimum": "the curve has no minimum inside its window; extend the grid or add seeds",
    "diverged": "every run diverged; sweep smaller learning rates",
}
TAUS = (0.0, 0.003, 0.006)  # SDs of shapes about a line under which the verdict is told again


@dataclass(frozen=True)
class MisscalingReport:
    """The rival explanation, judged. Immutable; tables at full precision.

    verdict : over all candidates. verdicts : per candidate architecture ("" where there is none). reasons : why, and what is
    missing. envelopes : optimum and best loss of each arm and shape. drift : of the optimum with depth and width.
    decomposition : U, V, M, W and the depth gains. sensitivity : to the learning rate. suspects : table entries that would
    have to be wrong. by_tau : the verdict under given SDs of shapes. hierarchy : one model of all runs; None if it can't be fit.
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
    hierarchy: Hierarchy | None
    roles: Roles
    grids: Grids
    analysis: Analysis | None
    margins: Margins
    method: Method

    def summary(self) -> str:
        """The report as text."""
        lines = [f"Mis-scaling: {self.verdict}"]
        lines += [f"  {a}: {v}" for a, v in self.verdicts.items() if a]
        for title, table, columns in (
            ("Depth gains and their differences, nats per e-fold of depth", self.decomposition, ["name", "estimate", "se", "low", "high", "p_adj", "state"]),
            ("Drift of ln optimal learning rate", self.drift, ["architecture", "parametrization", "axis", "slope", "se", "low", "high", "held"]),
            ("Which entry would have to be wrong", self.suspects, ["entry", "exponent", "needed", "needed_se", "misfit", "p"]),
        ):  # fmt: skip
            if len(table):
                lines += [
                    "",
                    title,
                    table[columns].to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-"),
                ]
        lines += ["", "Reasons", *(f"  {r}" for r in self.reasons)]
        return "\n".join(lines)

    def to_frame(self) -> pd.DataFrame:
        """The decomposition: one row per contrast."""
        return self.decomposition.copy()

    def save(self, folder: str | Path) -> Path:
        """Write result.json, summary.txt and tables/*.csv to a folder, each file whole or not at all; returns the folder."""
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
    grids = take_in(runs, checks=checks, naive=naive, diverged_above=diverged_above)
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
    hierarchy = _hierarchy(grids, made, notes) if hierarchical else None
    reasons = [
        *notes,
        *_missing(grids, roles, made),
        *_why(made, roles, verdicts, mechanism),
        *_fixed(grids, roles, made),
        *_shares(made, roles),
        *_recipes(made, roles, margins),
        *_boundaries(grids, made, method.window),
    ]
    if grids.paired is False and verdict != "inconclusive":
        reasons.insert(
            0, f"the runs alone would say {verdict}, but the arms are not paired (see below): nothing is decided"
        )
        verdict, verdicts = "inconclusive", dict.fromkeys(verdicts, "inconclusive")
    changed = [f"{r.tau:g}: {r.verdict}" for r in by_tau.itertuples() if r.verdict != verdict]
    if changed:
        reasons.append("the verdict depends on how far shapes lie off a line (tau): " + ", ".join(changed))
    usable = made.curves.usable
    return MisscalingReport(
        verdict, verdicts, (*reasons, *grids.findings), envelope_table(grids, made, method),
        drift_table(grids.cells, made.point.optimum, made.cov[:C, :C], usable, margin=margins.drift,
                    noise_df=made.how.df),
        decomposition_table(made, roles, margins), sensitivity(grids, made.curves), rank_suspects(made, roles, grids.arms), by_tau,
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


def _missing(grids: Grids, roles: Roles, made: Analysis) -> list[str]:
    out = list(grids.missing)
    if roles.naive is None:
        out.append("no naive arm of the reference: U, V and M (mis-scaling) cannot be told")
    if roles.scaled is None:
        out.append("no scaled arm of the reference: V, M and W cannot be told")
    if not roles.candidates:
        out.append(
            "no candidate architecture with a scaled arm: W cannot be told, so that no verdict on the architecture is possible"
        )
        states = made.states.get("", {})
        if str(states.get("M")) == "superior" and str(states.get("drift naive")) == "beyond":
            out.append("what the reference's own arms decide: it is mis-scaled (M superior, the naive optimum drifts)")
        elif str(states.get("M")) == "equivalent":
            out.append(
                "what the reference's own arms decide: mis-scaling is worth less than the margin (M equivalent to 0)"
            )
    if made.made.df < 1 and roles.compared:
        out.append("two depths leave nothing to tell how far shapes lie off a line: three or more are needed")
    if roles.compared and len(made.made.weights) < len(roles.compared):
        lost = [" / ".join(a) for a in roles.compared if a not in made.made.weights]
        out.append(
            f"no depth gain for {', '.join(lost)}: too few depths, shared by all arms, have their optimum inside the grid"
        )
    return out


def _why(made: Analysis, roles: Roles, verdicts: Mapping[str, str], mechanism: Mapping[str, bool] | None) -> list[str]:
    out = []
    for name, states in made.states.items():
        who = f"{name}: " if name else ""
        if states:
            out.append(who + ", ".join(f"{k} {v}" for k, v in states.items()))
        out += [f"{who}{text}" for text in readings(states)]
        if verdicts.get(name) in ("H_arch", "both"):
            known = None if mechanism is None else mechanism.get(name)
            if known is None:
                out.append(
                    f"{who}provisional: that a measure of depth use moves too (layer removal, linearised blocks) is not shown"
                )
            elif not known:
                out.append(f"{who}in doubt: no measure of depth use moves with the gain")
    return out


def _recipes(made: Analysis, roles: Roles, margins: Margins) -> list[str]:
    """Architectures whose depth gain hangs on the recipe: it changes by more than half, or its sign, and significantly."""
    out = []
    own = {"M": (roles.naive, roles.scaled)} | {
        f"M_own:{a}": (roles.naive_of.get(a), roles.scaled_of.get(a)) for a in roles.candidates
    }
    for name, (naive, scaled) in own.items():
        if name not in made.gains or naive is None or scaled is None or (naive, "fixed") not in made.depth_gains:
            continue
        one, other = (float(made.depth_gains[k].estimate) for k in ((naive, "fixed"), (scaled, "tuned")))
        if float(made.gains[name].p()) <= margins.alpha and (one * other < 0 or abs(other - one) > 0.5 * abs(other)):
            out.append(
                f"{scaled[0]}: RECIPE_LIMITED: its depth gain is {one:.3g} naive at one rate and {other:.3g} scaled and tuned"
            )
    return out


def _boundaries(grids: Grids, made: Analysis, window: float) -> list[str]:
    out = []
    for i in np.flatnonzero(~made.curves.usable)[:20]:
        cell = grids.cells.iloc[i]
        out.append(
            f"no envelope: {cell['architecture']} / {cell['parametrization']} at depth {cell['depth']:g}, width {cell['width']:g}: "
            f"{_ADVICE[STATUS[int(made.curves.status[i])]].format(window=window)}"
        )
    more = int((~made.curves.usable).sum()) - len(out)
    return [*out, f"and {more} more such shapes"] if more > 0 else out


def _unanswered(grids: Grids, margins: Margins, method: Method) -> MisscalingReport:
    empty = pd.DataFrame()
    return MisscalingReport("inconclusive", {}, grids.missing, empty, empty, empty, empty, empty, empty, None,
                            Roles(None, None, (), {}, {}), grids, None, margins, method)  # fmt: skip


def _fixed(grids: Grids, roles: Roles, made: Analysis) -> list[str]:
    """Where the loss of the naive arm at one fixed rate is unknown or a bound."""
    out = []
    rows = [i for i, a in enumerate(grids.arm) if grids.arms[a] == roles.naive and made.curves.usable[i]]
    base = made.curves.optimum[made.base]
    there = interpolate(
        grids.z, np.where(np.isnan(grids.mean), np.inf, grids.mean), np.where(np.isfinite(base), base, -1e9)
    )
    for i in rows:
        depth = f"depth {grids.cells['depth'].iloc[i]:g}"
        if np.isnan(made.point.fixed[i]):
            out.append(
                f"at {depth} the optimum of the smallest depth was not tried: U and M are unknown; extend its learning rates"
            )
        elif np.isposinf(there[i]) and not made.curves.low[i] <= base[i] <= made.curves.high[i]:
            out.append(
                f"at {depth} the optimum of the smallest depth diverges: the worst finite loss stands for it, U and M are lower bounds"
            )
    return out


def _shares(made: Analysis, roles: Roles) -> list[str]:
    """M / (M + W), how much of the gap is mis-scaling, where both are positive: otherwise it is no share."""
    out = []
    for a in roles.candidates:
        if "M" in made.gains and f"W:{a}" in made.gains:
            m, w = float(made.gains["M"].estimate), float(made.gains[f"W:{a}"].estimate)
            if m > 0 and w > 0:
                out.append(f"{a}: M / (M + W) = {m / (m + w):.2f}")
    return out

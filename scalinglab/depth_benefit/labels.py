"""The label of a depth claim: a fixed order of rules, the first that holds decides, and the reason is kept.

Rules 1-7 ask whether the design can bear a claim at all; 8-10 read it off the intervals. Each rule is one function from the
evidence to a reason (or None), so that the order is the table `RULES` and nothing else. Labels say nothing about absence:
what is not resolved is INCONCLUSIVE, with the effect that could have been missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from scalinglab.errors import ConfigError

Label = Literal[
    "INVALID_DATA", "NOT_IDENTIFIED", "UNTESTABLE_N", "CONFOUNDED_LR", "CONFOUNDED_N", "SELECTION_SENSITIVE", "FRAGILE",
    "DEPTH_BENEFIT_MATERIAL", "DEPTH_BENEFIT", "DEPTH_BENEFIT_TRIVIAL", "DEPTH_HARM_MATERIAL", "DEPTH_HARM",
    "DEPTH_HARM_TRIVIAL", "EQUIVALENT", "INTERIOR_OPTIMUM", "MONOTONE_IN_RANGE", "OPTIMUM_UNRESOLVED", "RECIPE_LIMITED",
    "ARCH_DEPENDENT", "ARCH_INDEPENDENT", "ARCH_UNRESOLVED", "INCONCLUSIVE",
]  # fmt: skip
Interval = tuple[float, float]

MAX_CONDITION = 1000.0
MIN_ERROR_DF = 3.0
_INSIDE = frozenset({"EQUIVALENT", "DEPTH_BENEFIT_TRIVIAL", "DEPTH_HARM_TRIVIAL"})
MIN_SHAPE_SD = 0.2  # of ln aspect within a size class


@dataclass(frozen=True)
class Evidence:
    """What a label is decided on, for one architecture. B is positive where deeper is better (nats).

    Parameters
    ----------
    estimate, se, df, ci95, ci90 : B after correction.
    p_adj : p after adjustment for the family; alpha : its size; margin : half-width of equivalence (nats).
    invalid : reasons to refuse the data. condition : centred condition number of the law, None without a law.
    profile_open : a parameter's profile doesn't close. shape_sd : SD of ln aspect within sizes.
    p_min, alpha_adj : smallest attainable p of the test used, and what it is held against.
    lr_edge : arms whose best learning rate lies on the edge of their grid. lr_common, drift_cost : one learning rate for all
        arms, and what the drift of the optimum would then cost (nats).
    mismatch_needed, correction_available : whether the audit asks for a correction, and whether there is a rate.
    correction : nats that were corrected. dln_params, dln_tokens : what is left unmatched, deep minus shallow, in ln.
    bounds : B at both ends of the divergence bounds, None without lost runs. bound_labels : labels there.
    composite_label : label of the analysis in which divergence is the worst outcome, None without lost runs.
    deletions : label (rules 8-10) with one run or shape left out, by its name.
    modifiers : appended to the label: optimum, RECIPE_LIMITED, E_COLLAPSE.
    unit : of estimate, intervals, margin, costs and bounds: nats, or nats/lnL where the label is about a slope.
    """

    estimate: float
    se: float
    df: float
    ci95: Interval
    ci90: Interval
    p_adj: float
    margin: float
    alpha: float = 0.05
    invalid: tuple[str, ...] = ()
    condition: float | None = None
    profile_open: bool = False
    shape_sd: float | None = None
    p_min: float = 0.0
    alpha_adj: float | None = None
    lr_edge: tuple[str, ...] = ()
    lr_common: bool = False
    drift_cost: float = 0.0
    mismatch_needed: bool = False
    correction_available: bool = True
    correction: float = 0.0
    bounds: Interval | None = None
    bound_labels: tuple[str, ...] = ()
    composite_label: str | None = None
    deletions: Mapping[str, str] = field(default_factory=dict)
    modifiers: tuple[str, ...] = ()
    mde: float = math.nan
    unit: str = "nats"
    dln_params: float = 0.0
    dln_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise ConfigError(f"the margin of equivalence is {self.margin}: it must be a positive number of nats")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}: it must lie between 0 and 1")


@dataclass(frozen=True)
class Verdict:
    """A label with its reason.

    label : the first rule that holds. reason : why, in words. reading : the label that rules 8-10 alone would give.
    also : later rules among 2-7 that hold as well, with their reasons. modifiers : appended, never substituted.
    stable, analyses : in how many of how many re-analyses the label is the same (0 of 0 without any).
    identical : re-analyses beside those that leave label, estimate and error as they are: the same data by the same
        estimator, which prove nothing and are not counted. impossible : those that this design can't bear, which prove nothing
        either. understated : the larger shapes are the worse ones, so that unequal sizes can't explain the effect.
    """

    label: Label
    reason: str
    reading: Label
    also: Mapping[str, str]
    modifiers: tuple[str, ...]
    stable: int = 0
    analyses: int = 0
    identical: int = 0
    impossible: int = 0
    understated: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        """Label and modifiers."""
        return (self.label, *self.modifiers)

    @property
    def robustness(self) -> str:
        """ "label stable in k of K re-analyses", and how many more are left out of the count as identical."""
        said = [f"{self.identical} more left the estimate as it is and don't count"] if self.identical else []
        if self.impossible:
            said.append(f"{self.impossible} more can't be made with this design")
        more = f" ({'; '.join(said)})" if said else ""
        if not self.analyses:
            return "no re-analysis that counts" + more if more else "no re-analysis"
        return f"label stable in {self.stable} of {self.analyses} re-analyses{more}"

    def carries(self, label: str) -> bool:
        """Whether a rule holds, as the label or behind it."""
        return label == self.label or label in self.also

    def __str__(self) -> str:
        return " + ".join(self.codes) + f" ({self.reason})"


def decide(evidence: Evidence) -> Verdict:
    """The label of the evidence: the first rule of `RULES` that holds."""
    reading, why = reading_of(evidence)
    held = {label: reason for label, rule in RULES if (reason := rule(evidence)) is not None}
    if not held:
        return Verdict(reading, why, reading, {}, evidence.modifiers)
    hidden = "CONFOUNDED_N" in held and evidence.mismatch_needed and mismatch_hides(evidence)
    first = next(iter(held))
    rest: dict[str, str] = {k: v for k, v in held.items() if k != first}
    return Verdict(first, held[first], reading, rest, evidence.modifiers, understated=hidden)


def reading_of(evidence: Evidence) -> tuple[Label, str]:
    """Rules 8-10: what the intervals alone say.

    8. the 95 % interval excludes 0 and p_adj < alpha: MATERIAL if all of it lies beyond the margin, TRIVIAL if the 90 %
       interval lies inside the margin, plain otherwise. 9. EQUIVALENT if the 90 % interval lies inside the margin.
    10. INCONCLUSIVE.
    """
    low, high = evidence.ci95
    inside = -evidence.margin < evidence.ci90[0] and evidence.ci90[1] < evidence.margin
    if (low > 0 or high < 0) and evidence.p_adj < evidence.alpha:
        benefit = low > 0
        end = low if benefit else -high
        told = f"{_name(evidence)} = {evidence.estimate:.4g} {_unit(evidence)}, 95 % interval [{low:.4g}, {high:.4g}], p = {evidence.p_adj:.3g}"
        if end > evidence.margin:
            return (
                "DEPTH_BENEFIT_MATERIAL" if benefit else "DEPTH_HARM_MATERIAL",
                f"{told}: all of it beyond the margin of {evidence.margin:.3g}",
            )
        if inside:
            return (
                "DEPTH_BENEFIT_TRIVIAL" if benefit else "DEPTH_HARM_TRIVIAL",
                f"{told}: real, but inside the margin of {evidence.margin:.3g}",
            )
        return "DEPTH_BENEFIT" if benefit else "DEPTH_HARM", told
    if inside:
        a, b = evidence.ci90
        return (
            "EQUIVALENT",
            f"90 % interval [{a:.4g}, {b:.4g}] inside the margin of {evidence.margin:.3g} {_unit(evidence)}",
        )
    missed = (
        f" (effects below {evidence.mde:.3g} {_unit(evidence)} can be missed at power .8)"
        if math.isfinite(evidence.mde)
        else ""
    )
    return "INCONCLUSIVE", f"neither an effect nor equivalence is shown{missed}"


def _name(evidence: Evidence) -> str:
    return "slope" if evidence.unit == "nats/lnL" else "B"


def _unit(evidence: Evidence) -> str:
    return "nats per ln L" if evidence.unit == "nats/lnL" else evidence.unit


# ---- rules 1 to 7 --------------------------------------------------------------------------------------------------------
def _invalid(e: Evidence) -> str | None:
    return "; ".join(e.invalid) or None


def _not_identified(e: Evidence) -> str | None:
    if not (math.isfinite(e.estimate) and math.isfinite(e.se)):
        return "the design gives no estimate with an error"
    if e.condition is not None and e.condition > MAX_CONDITION:
        return f"condition number {e.condition:.3g} above {MAX_CONDITION:g}"
    if e.profile_open:
        return "the profile of a parameter is open"
    if e.df < MIN_ERROR_DF:
        return f"{e.df:.3g} degrees of freedom for the error, fewer than {MIN_ERROR_DF:g}"
    if e.shape_sd is not None and e.shape_sd < MIN_SHAPE_SD:
        return f"shapes of one size are alike (SD of ln aspect {e.shape_sd:.2g}, below {MIN_SHAPE_SD:g})"
    return None


def _untestable(e: Evidence) -> str | None:
    alpha = e.alpha if e.alpha_adj is None else e.alpha_adj
    if e.p_min > alpha:
        return f"the smallest p that this design can give is {e.p_min:.3g}, above {alpha:.3g}"
    return None


def _confounded_lr(e: Evidence) -> str | None:
    if e.lr_edge:
        return f"the best learning rate lies on the edge of its grid: {', '.join(e.lr_edge)}"
    if e.lr_common and e.drift_cost > 0.5 * abs(e.estimate):
        return f"one learning rate for all shapes: the drift of its optimum may cost {e.drift_cost:.3g} {_unit(e)}"
    return None


def _confounded_n(e: Evidence) -> str | None:
    if e.mismatch_needed and not e.correction_available:
        if mismatch_hides(e):
            more, worse = ("more", "worse") if e.estimate < 0 else ("fewer", "better")
            off, what = (e.dln_params, "parameters") if abs(e.dln_params) > 1e-9 else (e.dln_tokens, "tokens")
            return (
                f"the deeper models have {more} {what} ({100 * math.expm1(off):+.2g} %) and are still {worse} "
                f"({_name(e)} = {e.estimate:.3g} {_unit(e)}): unequal sizes can't explain that, and correcting them makes it "
                "larger; no rate is known that says by how much"
            )
        return "sizes differ between the shapes by more than the error allows, and no rate to correct them is known"
    if abs(e.correction) > abs(e.estimate):
        return f"the correction for unequal sizes ({abs(e.correction):.3g} {_unit(e)}) is larger than what it leaves"
    return None


def mismatch_hides(e: Evidence) -> bool:
    """Whether what is unmatched works against an effect: the larger (or longer trained) shapes are shown to be worse."""
    shown = e.ci95[0] > 0 or e.ci95[1] < 0
    off = [v for v in (e.dln_params, e.dln_tokens) if abs(v) > 1e-9]
    return shown and bool(off) and all(v * e.estimate < 0 for v in off)


def _selection(e: Evidence) -> str | None:
    if e.bounds is None:
        return None
    low, high = e.bounds
    if low * e.estimate <= 0 or high * e.estimate <= 0:
        return f"lost runs leave {_name(e)} anywhere in [{low:.3g}, {high:.3g}] {_unit(e)}: its sign is open"
    own = reading_of(e)[0]
    changed = sorted({v for v in (*e.bound_labels, e.composite_label) if v is not None and v != own})
    return f"the label would be {' or '.join(changed)} had the lost runs lived or counted as worst" if changed else None


def same_in_practice(label: str, other: str) -> bool:
    """Whether two readings mean the same in practice: an effect inside the margin, of either sign, is equivalence."""
    return label == other or {label, other} <= _INSIDE


def _fragile(e: Evidence) -> str | None:
    own = reading_of(e)[0]
    changed = {name: label for name, label in e.deletions.items() if not same_in_practice(label, own)}
    if not changed:
        return None
    name = next(iter(changed))
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"without {name} the label is {changed[name]} instead of {own}{more}"


RULES: tuple[tuple[Label, Callable[[Evidence], str | None]], ...] = (
    ("INVALID_DATA", _invalid),
    ("NOT_IDENTIFIED", _not_identified),
    ("UNTESTABLE_N", _untestable),
    ("CONFOUNDED_LR", _confounded_lr),
    ("CONFOUNDED_N", _confounded_n),
    ("SELECTION_SENSITIVE", _selection),
    ("FRAGILE", _fragile),
)
"""Rules 1-7 in order; what none of them catches is read off the intervals (`reading_of`)."""


# ---- the study and its rivals -----------------------------------------------------------------------------------------------
def study_label(
    *,
    p_gate: float,
    p_bootstrap: float,
    contrasts: Mapping[str, Interval],
    equivalent: bool,
    alpha: float = 0.05,
    second: str = "bootstrap",
) -> tuple[Label, str]:
    """Whether the depth effect depends on the architecture.

    ARCH_DEPENDENT iff the joint test rejects by the cell-mean F and by the parametric bootstrap, and at least one
    simultaneous interval of a difference excludes 0. ARCH_INDEPENDENT iff all pairwise differences are equivalent
    (`second` names the test behind p_bootstrap; `equivalent`: simultaneous 90 % intervals inside the margin). Else ARCH_UNRESOLVED: that one architecture's effect is
    significant and another's isn't is never evidence of a difference.
    """
    apart = [a for a, (low, high) in contrasts.items() if low > 0 or high < 0]
    if p_gate < alpha and p_bootstrap < alpha and apart:
        return "ARCH_DEPENDENT", f"gate p = {p_gate:.2g}, {second} p = {p_bootstrap:.2g}; apart: {', '.join(apart)}"
    if equivalent:
        return "ARCH_INDEPENDENT", "all pairwise differences lie inside the margin (simultaneous 90 % intervals)"
    return (
        "ARCH_UNRESOLVED",
        f"gate p = {p_gate:.2g}, {second} p = {p_bootstrap:.2g}; neither dependence nor equivalence",
    )


def confounded_study(
    study: tuple[str, str], verdicts: Mapping[str, Verdict], contrasts: Mapping[str, Interval], reference: str
) -> tuple[str, str]:
    """The study's label where learning rates can make it: ARCH_UNRESOLVED, with that reason.

    A mismatch in size is common to all architectures and can't make them differ; an optimal learning rate moves with depth in
    each architecture on its own. Dependence is open where the reference, or every architecture apart from it, carries
    CONFOUNDED_LR; equivalence, a claim about all pairs, where any does.
    """
    label, why = study
    hit = [a for a, v in verdicts.items() if v.carries("CONFOUNDED_LR") or v.carries("INVALID_DATA")]
    apart = [a for a, (low, high) in contrasts.items() if low > 0 or high < 0]
    if label == "ARCH_DEPENDENT":
        doubtful = reference in hit or all(a in hit for a in apart)
    else:
        doubtful = label == "ARCH_INDEPENDENT" and bool(hit)
    if not doubtful:
        return study
    what = "a difference" if label == "ARCH_DEPENDENT" else "equivalence"
    return (
        "ARCH_UNRESOLVED",
        f"learning rates may explain {what}: {', '.join(hit)} {'is' if len(hit) == 1 else 'are'} CONFOUNDED_LR, and the best rate "
        f"may move with depth in one architecture and not in another ({why})",
    )


def kaplan_verdict(codes: tuple[str, ...], *, decision: str) -> tuple[str, str]:
    """Verdict on "shape hardly matters" from the codes of `hypotheses.shape_equivalence`.

    "supported" iff equivalence holds over at least a 40-fold range of aspect ratios, "refuted" iff some shapes of the range
    differ by more than the margin (a narrow range is enough for that), else "open".
    """
    decision = decision.split(": ", 1)[-1]
    if "REFUTED" in codes:
        return "refuted", decision
    if "NARROW_RANGE" in codes:
        return "open", f"{decision}; the sampled aspect ratios span less than the 40-fold range of the claim"
    return ("supported" if "EQUIVALENT" in codes else "open"), decision

"""The decision as data: what counts as superior or equivalent, and which pattern of evidence gives which verdict.

Superior: the two-sided interval, Holm-adjusted over M and all candidates' W, excludes 0 and the estimate exceeds the margin.
Equivalent: the 90 % interval lies within the margins (TOST at 5 %). Everything else is open, and said to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.misscaling.contrasts import Estimate

Array: TypeAlias = NDArray[np.float64]
State: TypeAlias = Literal["superior", "inferior", "equivalent", "beyond", "open", "absent"]
Verdict: TypeAlias = Literal["H_arch", "H_misscale", "both", "neither", "inconclusive"]

VERDICTS: tuple[Verdict, ...] = ("H_arch", "H_misscale", "both", "neither", "inconclusive")


@dataclass(frozen=True)
class Margins:
    """Margins and sizes, fixed before looking.

    gain : nats per e-fold of depth (.012 is .025 over a factor 8, less than effects worth claiming). drift : of ln optimal lr
    per ln depth (.2 is a factor 1.5 over a factor 8, which costs about .0035 nats). alpha : size after adjustment.
    """

    gain: float = 0.012
    drift: float = 0.2
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not (self.gain > 0 and self.drift > 0 and 0 < self.alpha < 0.5):
            raise ConfigError(
                f"margins must be positive and alpha in (0, .5), not {self.gain}, {self.drift}, {self.alpha}"
            )


@dataclass(frozen=True)
class Rule:
    """A pattern of states (any of those listed) and what it means."""

    verdict: Verdict
    pattern: Mapping[str, tuple[State, ...]]
    meaning: str


TABLE: tuple[Rule, ...] = (  # the first that matches decides
    Rule(
        "H_misscale",
        {"M": ("superior",), "W": ("equivalent",), "drift naive": ("beyond",), "drift scaled": ("equivalent",)},
        "deep reference models looked bad because they were mis-scaled",
    ),
    Rule(
        "H_arch",
        {"W": ("superior",), "M": ("equivalent",)},
        "the architecture uses depth better; scaling doesn't explain it",
    ),
    Rule("both", {"W": ("superior",), "M": ("superior",)}, "architecture and mis-scaling each matter; see their sizes"),
    Rule(
        "neither",
        {"W": ("equivalent",), "M": ("equivalent",)},
        "no difference in depth gain is left to explain at this scale",
    ),
)

MEANING: Mapping[Verdict, str] = {rule.verdict: rule.meaning for rule in TABLE} | {
    "inconclusive": "these runs decide neither way; the reasons say what they lack"
}

READINGS: tuple[Rule, ...] = (  # all that match are told; the verdict says with which they can come
    Rule("H_misscale", {"U": ("superior",), "V": ("equivalent",)}, "mis-scaling is of the learning rate only: to tune it again at each depth suffices"),
    Rule("H_misscale", {"V": ("superior",), "U": ("equivalent",)},
         "mis-scaling is of the parametrization (lazy blocks): tuning the learning rate does not mend it"),
    Rule("inconclusive", {"M": ("superior",), "drift naive": ("equivalent",)},
         "mis-scaling (M) is above the margin but the optimum does not drift: look for another cause (embedding rate, decay, epsilon, warmup)"),
    Rule("H_arch", {"W": ("superior",), "W_same": ("equivalent",)},
         "the gain vanishes at the reference's learning rate: a stability benefit, not use of depth"),
    Rule("inconclusive", {"drift own": ("open", "beyond")},
         "the candidate's optimum is not shown to stay with depth: its losses at one learning rate are inadmissible, the tuned envelope alone counts"),
    Rule("inconclusive", {"W": ("inferior",)}, "the candidate gains less from depth than the reference"),
    Rule("inconclusive", {"M": ("inferior",)}, "the scaled parametrization gains less from depth than the naive one"),
)  # fmt: skip

_SUBJECTS = {
    "U": "tuning the learning rate at each depth (U)", "V": "the scaled parametrization beyond that (V)",
    "M": "both together, mis-scaling (M),", "W": "the architecture (W)",
    "W_same": "the architecture at the reference's learning rates (W_same)",
    "drift naive": "the naive reference's optimal learning rate", "drift scaled": "the scaled reference's optimal learning rate",
    "drift own": "the candidate's own optimal learning rate",
}  # fmt: skip
_GAINS = {
    "superior": "adds more than the margin to the depth gain", "inferior": "takes more than the margin from the depth gain",
    "equivalent": "changes the depth gain by less than the margin", "open": "is open",
}  # fmt: skip
_DRIFTS = {
    "beyond": "moves with depth by more than the margin", "equivalent": "stays within the margin over depth",
    "open": "is not shown to move or to stay",
}  # fmt: skip


def gain_states(
    tests: Mapping[str, Estimate], margins: Margins, *, family: tuple[str, ...]
) -> dict[str, NDArray[np.str_]]:
    """State of each contrast for every trial. family : names whose p-values are adjusted together (Holm)."""
    named = [n for n in family if n in tests]
    adjusted = dict(zip(named, holm(np.stack([tests[n].p() for n in named])), strict=True)) if named else {}
    out = {}
    for name, t in tests.items():
        p = adjusted.get(name, t.p())
        found = p <= margins.alpha
        low, high = t.interval(1 - 2 * margins.alpha)
        inside = (low > -margins.gain) & (high < margins.gain)
        out[name] = np.select(
            [found & (t.estimate > margins.gain), found & (t.estimate < -margins.gain), inside],
            ["superior", "inferior", "equivalent"], "open",
        )  # fmt: skip
    return out


def drift_states(tests: Mapping[str, Estimate], margins: Margins) -> dict[str, NDArray[np.str_]]:
    """State of each drift: beyond the margin (the whole 95 % interval), equivalent to none, or open."""
    out = {}
    for name, t in tests.items():
        low, high = t.interval(1 - margins.alpha)
        narrow = t.interval(1 - 2 * margins.alpha)
        out[name] = np.select(
            [(high < -margins.drift) | (low > margins.drift), (narrow[0] > -margins.drift) & (narrow[1] < margins.drift)],
            ["beyond", "equivalent"], "open",
        )  # fmt: skip
    return out


def holm(p: Array) -> Array:
    """Holm-adjusted p-values [tests, ...] along the first axis."""
    order = np.argsort(p, axis=0, kind="stable")
    sorted_ = np.take_along_axis(p, order, 0)
    steps = (len(p) - np.arange(len(p))).reshape(-1, *([1] * (p.ndim - 1)))
    stepped = np.minimum(1.0, np.maximum.accumulate(sorted_ * steps, axis=0))
    out = np.empty_like(stepped)
    np.put_along_axis(out, order, stepped, 0)
    return out


def decide(states: Mapping[str, NDArray[np.str_]]) -> NDArray[np.str_]:
    """Verdict of every trial by `TABLE`. States that are missing count as absent, which no verdict allows."""
    shape = next(iter(states.values())).shape if states else ()
    made = np.full(shape, "inconclusive", dtype="U12")
    for rule in reversed(TABLE):
        made = np.where(matches(rule, states, shape), rule.verdict, made)
    return made


def matches(rule: Rule, states: Mapping[str, NDArray[np.str_]], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Where a rule's pattern holds."""
    hit = np.ones(shape, bool)
    for name, allowed in rule.pattern.items():
        hit &= np.isin(states[name], allowed) if name in states else "absent" in allowed
    return hit


def in_words(states: Mapping[str, object]) -> str:
    """The state of each contrast and drift of one trial, in words."""
    return "; ".join(
        f"{_SUBJECTS[k]} {(_DRIFTS if k.startswith('drift') else _GAINS)[str(v)]}" for k, v in states.items()
    )


def readings(states: Mapping[str, NDArray[np.str_]]) -> list[str]:
    """What else the pattern of one trial says, in words."""
    return [rule.meaning for rule in READINGS if bool(np.all(matches(rule, states, ())))]


def overall(verdicts: Mapping[str, str]) -> Verdict:
    """One verdict over candidates: an architecture that matters decides; else they must agree."""
    found = set(verdicts.values())
    for one in ("both", "H_arch"):
        if one in found:
            return one
    if len(found) == 1:
        return found.pop()  # type: ignore[return-value]
    return "inconclusive"

"""Labels in plain words, with a tone (what colour and sign they get) and what a reader should take from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from scalinglab.depth_benefit.labels import Verdict

Tone = Literal["better", "worse", "equal", "open", "refused"]
SIGNS: dict[Tone, str] = {"better": "▲", "worse": "▼", "equal": "=", "open": "?", "refused": "!"}


@dataclass(frozen=True)
class Wording:
    """A label in words: `short` for a badge, `tells` for the sentence behind it."""

    short: str
    tone: Tone
    tells: str


WORDS: dict[str, Wording] = {
    "INVALID_DATA": Wording("Data can't be used", "refused", "The runs can't be compared as they are."),
    "NOT_IDENTIFIED": Wording("Not identified", "refused", "The design can't tell an effect of depth from its error."),
    "UNTESTABLE_N": Wording("Too few runs to test", "refused", "No outcome of so few runs could have been significant."),
    "CONFOUNDED_LR": Wording("Learning rate may explain it", "refused", "Shapes may differ in how well they were tuned."),
    "CONFOUNDED_N": Wording("Unequal sizes may explain it", "refused", "Deep and shallow shapes don't have the same size."),
    "SELECTION_SENSITIVE": Wording("Hangs on lost runs", "refused", "What the lost runs would have reached can change the label."),
    "FRAGILE": Wording("Hangs on one run or shape", "refused", "Leaving out a single run or shape changes the label."),
    "DEPTH_BENEFIT_MATERIAL": Wording("Deeper is better, materially", "better", "All of the interval lies beyond the margin."),
    "DEPTH_BENEFIT": Wording("Deeper is better", "better", "Deeper is better; whether by more than the margin is open."),
    "DEPTH_BENEFIT_TRIVIAL": Wording("Deeper is better, by a trifle", "better", "Real, but inside the margin."),
    "DEPTH_HARM_MATERIAL": Wording("Deeper is worse, materially", "worse", "All of the interval lies beyond the margin."),
    "DEPTH_HARM": Wording("Deeper is worse", "worse", "Deeper is worse; whether by more than the margin is open."),
    "DEPTH_HARM_TRIVIAL": Wording("Deeper is worse, by a trifle", "worse", "Real, but inside the margin."),
    "EQUIVALENT": Wording("Equivalent", "equal", "The 90 % interval lies inside the margin."),
    "INCONCLUSIVE": Wording("Inconclusive", "open", "Neither an effect nor equivalence is shown."),
    "INTERIOR_OPTIMUM": Wording("Best shape inside the range", "open", "The loss has its minimum between the shapes that were run."),
    "MONOTONE_IN_RANGE": Wording("Monotone in the range", "open", "The best shape lies at an end of the shapes that were run."),
    "OPTIMUM_UNRESOLVED": Wording("Best shape not located", "open", "The runs don't say where the best shape is."),
    "RECIPE_LIMITED": Wording("Depends on the recipe", "refused", "The effect of depth changes with the training recipe."),
    "E_COLLAPSE": Wording("Loss floor not determined", "refused", "The fitted irreducible loss went to zero."),
    "ARCH_DEPENDENT": Wording("The depth gap depends on the architecture", "open", ""),
    "ARCH_INDEPENDENT": Wording("One depth gap for all architectures, within the margin", "equal", ""),
    "ARCH_UNRESOLVED": Wording("Whether the depth gap depends on the architecture is open", "open", ""),
}  # fmt: skip

SEVERITIES = {"block": "Blocks a claim", "warn": "Caution", "info": "Note"}


UNDERSTATED = Wording(
    "Unequal sizes can't explain it", "refused", "The larger shapes are the worse ones: at equal size the gap is larger still; by how much is open."
)  # fmt: skip


def worded(label: str, verdict: Verdict) -> Wording:
    """The words of a label of a verdict: CONFOUNDED_N says which way the sizes work."""
    return UNDERSTATED if label == "CONFOUNDED_N" and verdict.understated else wording(label)


def wording(label: str) -> Wording:
    """The words of a label; an unknown one stands for itself."""
    return WORDS.get(label, Wording(label, "open", ""))


def and_list(names: list[str], most: int = 12) -> str:
    """Names as people list them: a, b and c."""
    shown = names if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1] if shown else ""

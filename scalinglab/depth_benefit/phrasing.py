"""How the report names options, labels that bear no claim, and what a gap is worth in compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

REFUSALS = {  # labels that bear no claim, in words
    "INVALID_DATA": "data can't be used", "NOT_IDENTIFIED": "not identified", "UNTESTABLE_N": "too few runs to test",
    "CONFOUNDED_LR": "learning rate may explain it", "CONFOUNDED_N": "unequal sizes may explain it",
    "SELECTION_SENSITIVE": "hangs on lost runs", "FRAGILE": "hangs on one run or shape",
}  # fmt: skip
UNDERSTATED = "unequal sizes, though they can't explain it"  # CONFOUNDED_N against the effect
_FOLD = 10.0  # beyond this factor of compute a number says more than is known


def both(option: str, value: object) -> str:
    """An option as it is written in Python and on the command line: rates='published' (--rates published)."""
    name = "--" + option.replace("_", "-")
    if value is ...:
        return f"{option}= ({name})"
    text = str(value)
    word = "" if value is True else f' "{text}"' if " " in text else f" {text}"
    return f"{option}={value!r} ({name}{word})"


def compute_worth(logs: Sequence[float]) -> str:
    """Estimate and limits of ln(compute) as relative compute: "15 % [13, 17]", factors beyond ten in words."""
    if all(abs(v) <= math.log(_FOLD) for v in logs):
        told = [_digits(100 * math.expm1(v)) for v in logs]
        return f"{told[0]} % [{told[1]}, {told[2]}]"
    named = [beyond(v) or f"{_digits(100 * math.expm1(v))} %" for v in logs]
    return f"{named[0]} [{named[1]}, {named[2]}]"


def beyond(log: float) -> str:
    """A factor of compute that is too large for a number, in words; empty where a percentage will do."""
    if not abs(log) > math.log(_FOLD):
        return ""
    return f"more than {_FOLD:g}-fold" if log > 0 else f"over {100 * (1 - 1 / _FOLD):g} % less"


def _digits(percent: float) -> str:
    return f"{percent:.0f}" if abs(percent) >= 10 else f"{percent:.2g}"

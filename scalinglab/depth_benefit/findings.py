"""What a reader must know of the runs or of the analysis, one sentence each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warn", "block"]


@dataclass(frozen=True)
class Finding:
    """Something that a reader must know: a stable code, how bad it is, and one sentence."""

    code: str
    severity: Severity
    message: str

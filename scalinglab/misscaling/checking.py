"""Which coordinate check is about which arm of a run table, and which arms it forbids.

A check is of one architecture, one parametrization (with what was changed in it) and one axis. It speaks about an arm that has
all of these, over an axis along which that arm's shapes differ. A scaled arm whose check failed is refused. The naive arm is the
control, which should fail; arms with a changed exponent are mis-scaled on purpose, and stay, unless they are asked for as scaled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from scalinglab.arch_options import resolve_options
from scalinglab.coordinates import CoordinateCheck
from scalinglab.errors import ConfigError

Arm = tuple[str, str]

UNNAMED = "as given"  # parametrization of tables that name none
_AXES = ("depth", "width")
_WORST = ("fail", "more seeds", "pass")


@dataclass
class Checked:
    """refused : arms left out, with the reason. verdicts : the worst of each arm's checks. findings : what a reader must know."""

    refused: dict[Arm, str] = field(default_factory=dict)
    verdicts: dict[Arm, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def match_checks(
    table: pd.DataFrame, checks: Sequence[CoordinateCheck], *, naive: str, scaled: Sequence[str] = ()
) -> Checked:
    """Match checks to arms and judge.

    Parameters
    ----------
    table : rows with architecture, parametrization, depth and width (and options, as the trainer writes them).
    naive : parametrization that is meant to fail. scaled : parametrizations that are taken as scaled.
    """
    out = Checked()
    arms = table.groupby(["architecture", "parametrization"], sort=False)
    if not checks:
        if any(p.split(";")[0] not in (naive, UNNAMED) for _, p in arms.groups):
            out.findings.append("no coordinate checks were given: that the scaled arms do scale is not shown")
        return out
    used: set[int] = set()
    for arm, rows in arms:
        axes = [a for a in _AXES if rows[a].min() < rows[a].max()]
        own = [(k, c) for k, c in enumerate(checks) if (c.architecture, arm_name(c)) == arm and _options(c, rows)]
        used |= {k for k, _ in own}
        _judge((str(arm[0]), str(arm[1])), rows, axes, [c for _, c in own if c.axis in axes], out, naive, scaled)
    for k, c in enumerate(checks):
        if k not in used:
            out.findings.append(f"the coordinate check of {c.name} is of no arm of these runs")
    return out


def arm_name(check: CoordinateCheck) -> str:
    """Name that a run table gives to the parametrization of a check: native(lns) is `native`, changes come after `;`."""
    name, _, changes = check.parametrization.partition(": ")
    name = "native" if name.startswith("native(") else name
    return "; ".join([name, changes]) if changes else name


def _judge(
    arm: Arm, rows: pd.DataFrame, axes: list[str], own: list[CoordinateCheck], out: Checked, naive: str, scaled: Sequence[str]
) -> None:  # fmt: skip
    who = " / ".join(arm)
    verdicts = {c.verdict for c in own}
    if verdicts:
        out.verdicts[arm] = next(v for v in _WORST if v in verdicts)
    if arm[1] == naive:
        if out.verdicts.get(arm) == "pass":
            out.findings.append(f"{who} passed its coordinate check: as a control it should have failed")
        return
    if arm[1] == UNNAMED or (";" in arm[1] and arm[1] not in scaled):
        return
    bad = [c for c in own if c.verdict == "fail"]
    if bad:
        out.refused[arm] = f"its coordinate check over {bad[0].axis} failed ({bad[0].trainable} tensors)"
        out.findings.append(f"refused {who}: {out.refused[arm]}")
        return
    for axis in axes:
        here = [c for c in own if c.axis == axis]
        if not here:
            out.findings.append(f"{who}: no coordinate check over {axis} was given, though its shapes differ in it")
        elif any(c.verdict == "more seeds" for c in here):
            out.findings.append(f"{who}: its coordinate check over {axis} is open (more seeds)")
        elif (reach := max(max(c.sizes) / min(c.sizes) for c in here)) < (span := rows[axis].max() / rows[axis].min()):
            out.findings.append(f"{who}: its coordinate check spans {axis} x{reach:g}, its runs x{span:g}")


def _options(check: CoordinateCheck, rows: pd.DataFrame) -> bool:
    """Whether a check was made with the options of the architecture that the runs have, as far as both say."""
    if "options" not in rows or "options" not in check.setting:
        return True
    own = _resolved(check.architecture, check.setting["options"])
    texts = rows["options"].fillna("").astype(str).unique()
    return all(_resolved(check.architecture, json.loads(t) if t else {}) == own for t in texts)


def _resolved(architecture: str, options: Mapping[str, Any]) -> Any:
    """Options with the defaults filled in; as they are for an architecture that isn't ours."""
    try:
        return resolve_options(architecture, dict(options))
    except ConfigError:
        return dict(options)

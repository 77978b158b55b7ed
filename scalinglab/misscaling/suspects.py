"""Mis-scaled alternatives as arms of a sweep, and which table entry would have to be wrong to explain the data.

Each arm is a parametrization with one exponent moved. Trained beside the plain ones they show what a mistake in that entry
does to the drift of the optimum and to the tuned depth gain; the entry whose mistake looks most like the naive arm is the suspect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import pandas as pd

from scalinglab.config import Scaling, Sweep
from scalinglab.errors import ConfigError
from scalinglab.misscaling.contrasts import Roles
from scalinglab.misscaling.engine import Analysis
from scalinglab.misscaling.identical import together
from scalinglab.misscaling.intake import Arm
from scalinglab.parametrization import ATTENTION, BRANCH, Parametrization, parametrization

Axis = Literal["depth", "width", "fan_in"]

QUANTITIES = ("lr", "init_std", "forward")
COLUMNS = ("entry", "exponent", "tried", "needed", "needed_se", "misfit", "df", "p", "check", "how")
_CHANGE = re.compile(r"^(?P<entry>\S+) (?P<name>\w+) (?P<old>\S+) -> (?P<new>\S+)$")


def alternatives(
    name: str,
    *,
    by: float = 0.5,
    axis: Axis = "depth",
    quantities: Sequence[str] = QUANTITIES,
    locations: Sequence[str] = ("branch", "outside"),
) -> list[Scaling]:
    """A parametrization with each single exponent moved by `by`, one arm each.

    Parameters
    ----------
    name : key of `PARAMETRIZATIONS`. by : added to the exponent. axis : which one.
    quantities : of the entries; "eps" and "weight_decay" can be added. locations : "trunk" too for architectures that have
        tensors there.

    Raises
    ------
    ConfigError
        Unknown parametrization or axis, or `by` is 0.

    Examples
    --------
    >>> [a.perturb for a in alternatives("completep", by=0.5)][0]
    {'branch_multiplier': {'depth': -0.5}}
    """
    if axis not in ("depth", "width", "fan_in") or not (math.isfinite(by) and by != 0):
        raise ConfigError(f"axis={axis!r} must be depth, width or fan_in, and by={by} a number other than 0")
    plain = parametrization(name)
    made = []
    for entry in _entries(plain, quantities, locations):
        exponents = plain.table[entry]
        to: dict[str, float] = {axis: getattr(exponents, axis) + by}
        try:
            plain.perturb(entry, to=to)
        except ConfigError:  # a table that forbids it (depth counted twice) has no such arm
            continue
        made.append(Scaling(name=name, perturb={entry: to}))
    return made


def with_alternatives(
    sweep: Sweep, name: str, *, by: float = 0.5, axis: Axis = "depth", entries: Sequence[str] = ()
) -> Sweep:
    """A sweep with the mis-scaled alternatives of a parametrization as further arms.

    entries : only these; all of `alternatives` by default.

    Raises
    ------
    ConfigError
        An entry that has no alternative, or the sweep has no base shape.
    """
    if "base" not in sweep.run:
        raise ConfigError(f"sweep {sweep.name!r} needs [run.base]: a changed exponent acts relative to a base shape")
    made = alternatives(name, by=by, axis=axis)
    known = [next(iter(a.perturb)) for a in made]
    if unknown := [e for e in entries if e not in known]:
        raise ConfigError(f"there is no alternative of {name!r} for {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [a for a, e in zip(made, known, strict=True) if not entries or e in entries]
    there = list(sweep.parametrizations) or [name]
    return msgspec.structs.replace(sweep, parametrizations=[*there, *chosen])


def rank_suspects(
    analysis: Analysis, roles: Roles, cells: pd.DataFrame, checked: Mapping[Arm, str] | None = None
) -> pd.DataFrame:
    """Entries ranked by how well a mistake in them explains the naive arm of the reference.

    For an arm with one exponent moved by e, (drift, tuned depth gain) moved by r; a mistake of size k would give k r / e. `needed` is
    the k that fits the difference between naive and scaled arm best (generalised least squares), `misfit` what is left
    (chi-square on df), `tried` the e of the arm, `check` the verdict of its coordinate check (one that passed can't see this
    mistake). An arm in which nothing moved has no `needed`. Noise in r itself is left out of the misfit: a hint, no test.

    The first row needs no arm: if every learning rate were off by one power of depth, that power would be the drift.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`, best first; empty without a naive arm.
    """
    rows: list[dict[str, object]] = []
    if roles.naive is None or roles.naive not in analysis.drifts:
        return pd.DataFrame(columns=list(COLUMNS))
    drift = analysis.drifts[roles.naive]
    rows.append({
        "entry": "every learning rate", "exponent": "depth", "tried": math.nan, "needed": float(drift.estimate),
        "needed_se": float(drift.se), "misfit": math.nan, "df": 0, "p": math.nan, "check": "",
        "how": "the base optimum moves against a common factor, by algebra",
    })  # fmt: skip
    if roles.scaled is None or roles.scaled not in analysis.drifts:
        return pd.DataFrame(rows, columns=list(COLUMNS))
    from scipy.special import chdtrc

    apart, omega = _signature(analysis, roles.naive, roles.scaled, cells)
    inverse = np.linalg.inv(omega)
    found = []
    for arm in analysis.drifts:
        change = _CHANGE.match(arm[1].removeprefix(f"{roles.scaled[1]}; "))
        if arm[0] != roles.scaled[0] or not arm[1].startswith(f"{roles.scaled[1]}; ") or change is None:
            continue
        size = float(change["new"]) - float(change["old"])
        response = _signature(analysis, arm, roles.scaled, cells)[0] / size
        strength = float(response @ inverse @ response)
        needed = float(response @ inverse @ apart) / strength if strength > 0 else math.nan
        left = apart - needed * response if strength > 0 else apart
        misfit, df = float(left @ inverse @ left), len(apart) - (strength > 0)
        found.append({
            "entry": change["entry"], "exponent": change["name"], "tried": size, "needed": needed,
            "needed_se": strength**-0.5 if strength > 0 else math.nan, "misfit": misfit, "df": df,
            "p": float(chdtrc(df, misfit)), "check": (checked or {}).get(arm, ""), "how": "arm trained with it",
        })  # fmt: skip
    return pd.DataFrame([*sorted(found, key=lambda r: r["misfit"]), *rows], columns=list(COLUMNS))


def _signature(
    analysis: Analysis, arm: Arm, scaled: Arm, cells: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(drift, tuned gain) of an arm less those of the scaled one, and the covariance. Losses at fixed rates are quadratic in
    the drift."""
    C = len(analysis.curves.centre)
    w = analysis.drift_made.weights[arm] - analysis.drift_made.weights[scaled]
    zero = np.zeros(C)
    values = analysis.point.stacked()
    rows = [np.concatenate([w, zero, zero, zero]), np.concatenate([zero, -w, zero, zero])]
    W = np.stack(rows)
    used = np.flatnonzero(W.any(0))
    cov = W[:, used] @ analysis.cov[np.ix_(used, used)] @ W[:, used].T
    shapes = float(np.sum(together(cells, w) ** 2))
    cov[0, 0] += float(analysis.drift_tau) ** 2 * shapes
    cov[1:, 1:] += float(np.nan_to_num(analysis.tau)) ** 2 * shapes
    return W[:, used] @ values[used], cov + 1e-12 * np.eye(len(rows))


def _entries(plain: Parametrization, quantities: Sequence[str], locations: Sequence[str]) -> list[str]:
    """Entries that act on something: forward multipliers are those of the input, the branches and the readout alone."""
    out = [BRANCH, ATTENTION] if "forward" in quantities else []
    for key, exponents in plain.table.items():
        role, _, rest = key.partition(".")
        location, _, quantity = rest.partition(".")
        if quantity not in quantities or location not in locations or exponents.factor == 0:
            continue
        if quantity != "forward" or role in ("input", "readout"):
            out.append(key)
    return out

"""Why a report says what it says, in sentences: what is missing, which pattern held, what would have to be better."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scalinglab.misscaling.advice import advice
from scalinglab.misscaling.contrasts import Roles
from scalinglab.misscaling.curves import interpolate
from scalinglab.misscaling.engine import Analysis, Method
from scalinglab.misscaling.identical import repeated
from scalinglab.misscaling.intake import Grids
from scalinglab.misscaling.rules import Margins, in_words, readings

_NAMED = 8  # shapes named one by one
_TOST = 2.9  # margins over standard errors at which equivalence is found 9 times in 10


def missing_arms(grids: Grids, roles: Roles, made: Analysis) -> list[str]:
    """Arms, depths and optima that these runs lack, and what cannot be told without them."""
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
            out.append(
                "what the reference's own arms decide: it is mis-scaled (M is above the margin, and the naive optimum drifts)"
            )
        elif str(states.get("M")) == "equivalent":
            out.append("what the reference's own arms decide: mis-scaling (M) is worth less than the margin")
    if made.made.df < 1 and roles.compared:
        out.append("two depths leave nothing to tell how far shapes lie off a line: three or more are needed")
    if roles.compared and len(made.made.weights) < len(roles.compared):
        lost = [" / ".join(a) for a in roles.compared if a not in made.made.weights]
        out.append(
            f"no depth gain for {', '.join(lost)}: too few depths, shared by all arms, have their optimum inside the grid"
        )
    return out


def pattern(
    made: Analysis, roles: Roles, verdicts: Mapping[str, str], mechanism: Mapping[str, bool] | None
) -> list[str]:
    """The state of each contrast in words, what else the pattern says, and whether a gain of the architecture is provisional."""
    out = []
    for name, states in made.states.items():
        who = f"{name}: " if name else ""
        if states:
            out.append(who + in_words(states))
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


def recipes(made: Analysis, roles: Roles, margins: Margins) -> list[str]:
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
                f"{scaled[0]}: its depth gain hangs on the recipe (RECIPE_LIMITED): {one:.3g} naive at one rate, {other:.3g} scaled and tuned"
            )
    return out


def lost_envelopes(grids: Grids, made: Analysis, method: Method) -> list[str]:
    """Shapes without an optimum, each with the learning rates to add."""
    out = []
    lost = np.flatnonzero(~made.curves.usable & ~repeated(grids.cells))
    for i in lost[:_NAMED]:
        cell = grids.cells.iloc[i]
        told = advice(grids, made.curves, int(i), sides=method.sides, window=method.window)
        ladder = "" if cell["ladder"] == "all" or cell["ladder"].startswith("width ") else f" ({cell['ladder']})"
        who = f"{cell['architecture']} / {cell['parametrization']} at depth {cell['depth']:g}, width {cell['width']:g}{ladder}"
        out.append(f"no envelope: {who}: {told}")
    more = len(lost) - len(out)
    return [*out, f"and {more} more such shapes (see the column advice of the envelopes)"] if more > 0 else out


def precision(made: Analysis, margins: Margins) -> list[str]:
    """Contrasts that decide and are open: how far from an equivalence claim their error is, and what makes it."""
    out = []
    least = margins.gain / _TOST
    for name, e in made.gains.items():
        states = made.states.get(name.partition(":")[2] or next(iter(made.states), ""), {})
        if not (name == "M" or name.startswith("W:")) or str(states.get(name.partition(":")[0])) != "open":
            continue
        se = float(e.se)
        if np.isfinite(se) and se > least:
            out.append(
                f"{name} is open: its standard error, {se:.2g}, is above {least:.2g}, which equivalence within {margins.gain:g} takes "
                f"(runs scatter by {float(made.noise.sigma):.2g}, the arms' shapes apart from each other by {float(made.arm_tau):.2g} nats): more seeds help "
                "against the first, more depths against both"
            )
    return out


def fixed_losses(grids: Grids, roles: Roles, made: Analysis) -> list[str]:
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


def shares(made: Analysis, roles: Roles) -> list[str]:
    """M / (M + W), how much of the gap is mis-scaling, where both are positive: otherwise it is no share."""
    out = []
    for a in roles.candidates:
        if "M" in made.gains and f"W:{a}" in made.gains:
            m, w = float(made.gains["M"].estimate), float(made.gains[f"W:{a}"].estimate)
            if m > 0 and w > 0:
                out.append(f"{a}: M / (M + W) = {m / (m + w):.2f}")
    return out

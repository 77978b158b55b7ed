"""A fit as text, in the manner of statsmodels: what was fitted, what came out, and what not to trust."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from scalinglab.diagnostics import STATUS_MEANING
from scalinglab.errors import ScalinglabError

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

WIDTH = 96


def text(fit: Fit, level: float = 0.95) -> str:
    """Header, parameter table, derived parameters, checks that are not fine and notes; at most 96 characters wide."""
    lines = ["=" * WIDTH, f"Scaling law: {fit.law.key}".center(WIDTH), "=" * WIDTH]
    lines += textwrap.wrap(f"loss = {fit.law.formula}", WIDTH, subsequent_indent="       ")
    convention = fit.provenance.get("params", "as given")
    left = [
        ("objective", f"{fit.estimator.label} on {fit.estimator.on.replace('_', ' ')}"),
        ("value", f"{fit.objective:.10g}"),
        ("status", fit.status),
        ("params (N)", str(convention)),
    ]
    right = [
        ("rows", f"{len(fit.runs):,}"),
        ("runs", f"{fit.n_runs:,}"),
        ("starts at the optimum", f"{fit.search.agreeing} of {fit.search.starts}"),
        ("RMS log residual", f"{float(np.sqrt(np.mean(fit.residuals**2))):.5f}"),
    ]
    for (name, value), (name2, value2) in zip(left, right, strict=True):
        lines.append(f"{name + ':':<13}{value:<43.43}{name2 + ':':<26}{value2}")
    lines.append("-" * WIDTH)
    lines += _table(fit, level)
    lines.append("=" * WIDTH)
    if fit.status != "converged":
        lines += textwrap.wrap(f"Status {fit.status}: {STATUS_MEANING[fit.status]}.", WIDTH)
    bad = [c for c in fit.checks if c.level != "ok"]
    for c in sorted(bad, key=lambda c: c.level != "block"):
        mark = "BLOCK" if c.level == "block" else "warn "
        lines += textwrap.wrap(f"{mark} {c.code}: {c.action}.", WIDTH, subsequent_indent="      ")
    if not bad:
        lines.append("All checks are fine.")
    moved = _moved_by_outliers(fit)
    if moved:
        lines += textwrap.wrap(
            f"warn  ROBUST_SHIFT: {moved} under a robust objective: outliers, or a misfit that all runs share (early "
            "checkpoints, say), which leaving out runs can't see.", WIDTH, subsequent_indent="      ",
        )  # fmt: skip
    for note in fit.notes:
        lines += textwrap.wrap(f"note  {note}.", WIDTH, subsequent_indent="      ")
    return "\n".join(lines)


def _moved_by_outliers(fit: Fit) -> str:
    """Parameters that a robust objective moves by more than two standard errors, in words; empty if none."""
    try:
        shift = fit.to_frame()["robust_shift_se"]
    except ScalinglabError:
        return ""
    far = shift[shift.abs() > 2]
    return ", ".join(f"{name} moves by {value:+.1f} standard errors" for name, value in far.items())


def _table(fit: Fit, level: float) -> list[str]:
    limits = f"[{(1 - level) / 2:g}", f"{1 - (1 - level) / 2:g}]"
    try:
        table = fit.to_frame(level)
    except ScalinglabError as error:
        rows = [f"{name:<24}{value:>14.6g}" for name, value in fit.params.items()]
        return [f"{'':<24}{'estimate':>14}", *rows, *textwrap.wrap(f"No intervals: {error}.", WIDTH)]
    width = max(18, *(len(str(n)) + 1 for n in table.index))
    head = f"{'':<{width}}{'estimate':>13}{'std err':>12}{limits[0]:>13}{limits[1]:>13}  {'robust shift':>12}"
    rows = [head, "-" * WIDTH]
    derived = False
    for name, r in table.iterrows():
        if r["kind"] == "derived" and not derived:
            derived = True
            rows.append("-" * WIDTH)
        shift = "" if not np.isfinite(r["robust_shift_se"]) else f"{r['robust_shift_se']:+.2f} se"
        flag = "" if r["identified"] or r["kind"] in ("fixed", "at bound") else " (not identified)"
        if r["kind"] in ("fixed", "at bound"):
            rows.append(f"{name!s:<{width}}{r['estimate']:>13.6g}{r['kind']:>12}")
        else:
            rows.append(
                f"{name!s:<{width}}{r['estimate']:>13.6g}{r['se']:>12.3g}{r['low']:>13.5g}{r['high']:>13.5g}  {shift:>12}{flag}"
            )
    fieller = "; r_star: Fieller set" if any(str(n).startswith("r_star") for n in table.index) else ""
    rows += textwrap.wrap(
        f"Intervals: {fit.jackknife.method}{fieller}. Robust shift: how far a Huber fit (MAD-standardised) moves the estimate.",
        WIDTH,
    )
    return rows

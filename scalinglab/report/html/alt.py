"""Text alternatives: what each figure shows, with its numbers, for readers who don't see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalinglab.errors import ConfigError
from scalinglab.report.figures.power import power_of
from scalinglab.report.html.wording import wording

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.effects import Effect
    from scalinglab.report.depth_curves import ShapeCurve


def forest(report: DepthReport, effects: list[Effect]) -> str:
    """Each architecture's estimate, interval and label."""
    rows = []
    for e in effects:
        low, high = e.interval(0.95)
        label = wording(report.verdicts[e.architecture].label).short.lower()
        rows.append(f"{e.architecture} {e.estimate:+.3g}, 95 % interval {low:+.3g} to {high:+.3g} nats ({label})")
    return "Forest plot of the depth benefit, positive where deeper is better: " + "; ".join(rows) + "."


def interaction(curves: Sequence[ShapeCurve]) -> str:
    """Each architecture's lowest and highest fitted loss, and where."""
    rows = []
    for c in curves:
        if len(c.loss):
            k = int(c.loss.argmin())
            ends = f"from {c.loss[0]:.3f} at {c.depth[0]:.3g} blocks to {c.loss[-1]:.3f} at {c.depth[-1]:.3g}"
            rows.append(f"{c.architecture} goes {ends}, lowest {c.loss[k]:.3f} at {c.depth[k]:.3g}")
        else:
            rows.append(f"{c.architecture} has {len(c.cells)} shapes and no fitted curve")
    return "Loss against shape, a panel per architecture: " + "; ".join(rows) + "."


def equivalence(curves: Sequence[ShapeCurve], margin: float) -> str:
    """Each architecture's largest fitted gap over the range, against the margin."""
    rows = [f"{c.architecture} {float(c.loss.max() - c.loss.min()):.3g}" for c in curves if len(c.loss)]
    return (
        f"Loss above the best shape; the largest fitted gap in nats (margin {margin:.2g} nats): "
        + "; ".join(rows)
        + "."
    )


def specifications(report: DepthReport) -> str:
    """In how many re-analyses each label is the same."""
    rows = [f"{a} {v.stable} of {v.analyses}" for a, v in report.verdicts.items()]
    return "Estimates of all re-analyses, sorted; the label is the reported one in: " + "; ".join(rows) + "."


def power(report: DepthReport) -> str:
    """The smallest gap that is found now, and with more shapes."""
    try:
        found = power_of(report)
    except ConfigError as error:
        return str(error)
    return (
        f"Smallest gap found with power .8: {found.now:.2g} nats with these runs; {found.by_seeds[-1]:.2g} with "
        f"{found.seeds[-1]:g} seeds per shape at best; {found.by_shapes[-1]:.2g} with {found.shapes[-1]:g} shapes."
    )

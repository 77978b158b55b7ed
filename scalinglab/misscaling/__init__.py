"""Are deep models merely mis-scaled? Learning-rate envelopes, the drift of the optimum, and a decision.

    from scalinglab.misscaling import misscaling
    report = misscaling(runs)
    print(report.summary())

The rival of "this architecture uses depth" is "the reference was badly tuned at depth". Sweeps over the learning rate at every
depth, in a naive and in a scaled parametrization, tell the two apart: the depth gain that tuning and scaling give the reference
(M = U + V) and what the architecture adds when each is at its best (W). Margins and rules are data (`rules`), fixed before
looking; `verdict_power` says what a planned study can decide.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from scalinglab.misscaling.curves import Curves, fit_curves
from scalinglab.misscaling.engine import Analysis, Method
from scalinglab.misscaling.hierarchy import Hierarchy, fit_hierarchy
from scalinglab.misscaling.intake import Grids, take_in
from scalinglab.misscaling.power import TRUTHS, Plan, Truth, power_table, simulate_study, verdict_power
from scalinglab.misscaling.report import MisscalingReport, misscaling
from scalinglab.misscaling.rules import TABLE, Margins, Rule
from scalinglab.misscaling.schema import json_schema, validate
from scalinglab.misscaling.sensitivity import sensitivity
from scalinglab.misscaling.surface import lr_curvature
from scalinglab.misscaling.suspects import alternatives, with_alternatives

__all__ = [
    "TABLE",
    "TRUTHS",
    "Analysis",
    "Curves",
    "Grids",
    "Hierarchy",
    "Margins",
    "Method",
    "MisscalingReport",
    "Plan",
    "Rule",
    "Truth",
    "alternatives",
    "fit_curves",
    "fit_hierarchy",
    "json_schema",
    "lr_curvature",
    "misscaling",
    "power_table",
    "sensitivity",
    "simulate_study",
    "take_in",
    "validate",
    "verdict_power",
    "with_alternatives",
]


class _Callable(ModuleType):
    """This package, which is also its main function: `from scalinglab import misscaling` gives one name for both."""

    __call__ = staticmethod(misscaling)


# whoever imports the package or a module of it first, scalinglab.misscaling is this module: it must do as the function
sys.modules[__name__].__class__ = _Callable
__signature__ = inspect.signature(misscaling)

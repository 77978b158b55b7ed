"""Does depth help, for which architecture, and what can the runs bear?

    from scalinglab.depth_benefit import depth_benefit
    report = depth_benefit(runs)
    print(report.summary())

Estimands and their errors (`estimands`, `cells`, `rates`), matched pairs (`matching`), lost runs (`divergence`), strategies
of shape (`strategies`), the label engine (`labels`) and the report (`result`).
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from scalinglab.depth_benefit.asking import depth_benefit
from scalinglab.depth_benefit.effects import Correction, Effect, EffectSet
from scalinglab.depth_benefit.labels import Evidence, Verdict, decide
from scalinglab.depth_benefit.matching import MatchedRuns, match_runs
from scalinglab.depth_benefit.rates import Rates, published_rates, rates_from_fit
from scalinglab.depth_benefit.result import DepthReport
from scalinglab.depth_benefit.schema import json_schema, validate

__all__ = [
    "Correction",
    "DepthReport",
    "Effect",
    "EffectSet",
    "Evidence",
    "MatchedRuns",
    "Rates",
    "Verdict",
    "decide",
    "depth_benefit",
    "json_schema",
    "match_runs",
    "published_rates",
    "rates_from_fit",
    "validate",
]


class _Callable(ModuleType):
    """This package, which is also its main function: `from scalinglab import depth_benefit` gives one name for both."""

    __call__ = staticmethod(depth_benefit)


# whoever imports the package or a module of it first, scalinglab.depth_benefit is this module: it must do as the function
sys.modules[__name__].__class__ = _Callable
__signature__ = inspect.signature(depth_benefit)

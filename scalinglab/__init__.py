"""scalinglab: shape-aware scaling laws with honest error bars.

Does depth help, for which residual and normalisation architecture, and is that real or an artefact of mis-scaled training?

    from scalinglab import fit, read_runs
    print(fit("shape", read_runs("runs.csv")).summary())

Names are loaded on first use, so that importing the package costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from scalinglab.comparison import Comparison, compare
    from scalinglab.depth_benefit import DepthReport, depth_benefit
    from scalinglab.design import Audit, audit
    from scalinglab.errors import (
        ConfigError,
        ConvergenceWarning,
        DroppedRunsWarning,
        FitError,
        IdentifiabilityWarning,
        ScalinglabError,
        ScalinglabWarning,
        SchemaError,
    )
    from scalinglab.fitting import Fit, fit
    from scalinglab.frontier import Frontier, optimal
    from scalinglab.laws import LAWS, Law
    from scalinglab.meta_analysis import pool
    from scalinglab.misscaling import MisscalingReport, misscaling
    from scalinglab.objectives import Gaussian, Huber, Robust, StudentT
    from scalinglab.profiles import delta, fieller, optimal_aspect, profile
    from scalinglab.published import published_fits
    from scalinglab.readers import read_runs
    from scalinglab.replications import pooled_shape
    from scalinglab.shapes import Shape
    from scalinglab.simulation import simulate
    from scalinglab.uncertainty import Interval, Resampling, bootstrap, jackknife

_HOME = {
    "comparison": ("Comparison", "compare"),
    "depth_benefit": ("DepthReport",),
    "design": ("Audit", "audit"),
    "errors": (
        "ConfigError", "ConvergenceWarning", "DroppedRunsWarning", "FitError", "IdentifiabilityWarning", "ScalinglabError",
        "ScalinglabWarning", "SchemaError",
    ),
    "fitting": ("Fit", "fit"),
    "frontier": ("Frontier", "optimal"),
    "laws": ("LAWS", "Law"),
    "meta_analysis": ("pool",),
    "misscaling": ("MisscalingReport",),
    "objectives": ("Gaussian", "Huber", "Robust", "StudentT"),
    "published": ("published_fits",),
    "readers": ("read_runs",),
    "replications": ("pooled_shape",),
    "shapes": ("Shape",),
    "simulation": ("simulate",),
    "profiles": ("delta", "fieller", "optimal_aspect", "profile"),
    "uncertainty": ("Interval", "Resampling", "bootstrap", "jackknife"),
}  # fmt: skip
_CALLABLE = ("depth_benefit", "misscaling")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "LAWS",
    "Audit",
    "Comparison",
    "ConfigError",
    "ConvergenceWarning",
    "DepthReport",
    "DroppedRunsWarning",
    "Fit",
    "FitError",
    "Frontier",
    "Gaussian",
    "Huber",
    "IdentifiabilityWarning",
    "Interval",
    "Law",
    "MisscalingReport",
    "Resampling",
    "Robust",
    "ScalinglabError",
    "ScalinglabWarning",
    "SchemaError",
    "Shape",
    "StudentT",
    "__version__",
    "audit",
    "bootstrap",
    "compare",
    "delta",
    "depth_benefit",
    "fieller",
    "fit",
    "jackknife",
    "misscaling",
    "optimal",
    "optimal_aspect",
    "pool",
    "pooled_shape",
    "profile",
    "published_fits",
    "read_runs",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:  # packages that can be called: one object under this name, however it is imported
        return import_module(f"scalinglab.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'scalinglab' has no attribute {name!r}")
    value = getattr(import_module(f"scalinglab.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The report: figures and tables of results. The only folder that imports matplotlib, and only when a figure is asked for.

`FIGURES`, `save_figure` and the figures (`loss_vs_scale`, `shape_valley`, ...) need `pip install scalinglab[plot]`; tables
(`scalinglab.report.tables`) need nothing beyond the core.
"""

from __future__ import annotations

from typing import Any

from scalinglab.errors import ConfigError

_FIGURES = (
    *("loss_vs_scale", "isoflop", "shape_valley", "residuals", "profile", "frontier", "forest", "coords"),
    *("depth_forest", "depth_interaction", "depth_equivalence", "depth_power", "depth_specifications"),
    *("lr_envelope", "lr_drift", "decomposition"),
    "pooled_forest",
    *("depth_profile", "layer_removal", "FIGURES", "figure", "save_figure"),
)
_TABLES = ("parameter_table", "law_table", "comparison_table", "to_markdown", "to_latex", "to_csv", "to_html")
__all__ = [*_FIGURES, *_TABLES]


def __getattr__(name: str) -> Any:
    if name in _TABLES:
        from scalinglab.report import tables

        return getattr(tables, name)
    if name in _FIGURES:
        try:
            from scalinglab.report import figures
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "matplotlib":
                raise
            raise ConfigError("figures need matplotlib: pip install 'scalinglab[plot]'") from error
        return getattr(figures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""The recipes that come with the package, one module per source of numbers; importing this registers them all."""

from scalinglab.report.paper.recipes import benchmarks, depth, depth_curves, fits, floors, misscaling, plain_tables

__all__ = ["benchmarks", "depth", "depth_curves", "fits", "floors", "misscaling", "plain_tables"]

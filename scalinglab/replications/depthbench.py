"""DepthBench (Wang et al. 2026, arXiv:2609.32534): slopes over depth of ten architectures, and where each is best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scalinglab.hypotheses.cells import cell_means, depth_slopes, slope_differences
from scalinglab.published import depthbench
from scalinglab.replications.targets import Ours, Replication, Target

_NAMES = (
    "pre_ln", "attnres_full", "hc", "lns", "keel", "attnres_block", "sandwich_ln", "mhc", "deepnorm", "moda",
)  # fmt: skip
_DEEP = ("hc", "attnres_full")  # the two that the source says keep gaining
_DEEPEST_COMMON = 32  # the five depths that all ten architectures have
_DIGITS = 5.1e-5

_TARGETS = (
    *(Target(f"slope {name}", _DIGITS, "printed digits") for name in _NAMES),
    *(Target(f"contrast {name}", 1.01e-4, "printed digits, a difference of two") for name in _NAMES[1:]),
    Target("best d/L of Pre-LN-type architectures", rule="every best shape inside the published range"),
    Target("best d/L of hc and attnres_full, 400M", 0.1, "printed digits"),
    Target("best d/L of attnres_full at fixed backbone", 0.1, "printed digits", published=9.1, unit="d/L", kind="implied",
           source="the statement above, taken at a fixed backbone (300M grid)"),
    Target("best d/L of hc at fixed backbone", 0.1, "printed digits", published=9.1, unit="d/L", kind="implied",
           source="the statement above, taken at a fixed backbone (300M grid)"),
)  # fmt: skip


def compute(_: Path) -> Mapping[str, Ours]:
    """Ours for every target; the losses travel with the package."""
    table = depthbench()
    table["inverse_aspect"] = table["depth"] / table["width"]
    total = table[table["match_group"] == "400M"]
    cells = cell_means(total[total["depth"] <= _DEEPEST_COMMON], x="inverse_aspect")
    out: dict[str, Ours] = {}
    for name, row in depth_slopes(cells).iterrows():
        out[f"slope {name}"] = Ours(row["slope"], row["low"], row["high"], interval="t")
    contrasts, _R = slope_differences(cells, reference="pre_ln", error="welch")
    for name, row in contrasts.iterrows():
        out[f"contrast {name}"] = Ours(row["difference"], row["low"], row["high"], interval="t, Welch")
    best = total.loc[total.groupby("architecture")["loss"].idxmin()].set_index("architecture")
    aspect = best["width"] / best["depth"]
    others = aspect.drop(list(_DEEP))
    inside = others.between(42.6, 76.1).all()
    out["best d/L of Pre-LN-type architectures"] = Ours(
        float(others.median()),
        float(others.min()),
        float(others.max()),
        interval="range",
        agrees="yes" if inside else "no",
    )
    gain = total.groupby("depth")["params_backbone"].first()
    more = 100 * (gain.loc[70] / gain.loc[16] - 1)
    out["best d/L of hc and attnres_full, 400M"] = Ours(
        float(aspect[list(_DEEP)].mean()), float(aspect[list(_DEEP)].min()), float(aspect[list(_DEEP)].max()), interval="range",
        why=f"the deepest shape of the grid, so no optimum is located; at fixed total parameters it has {more:.0f} % more backbone",
    )  # fmt: skip
    fixed = table[table["match_group"] == "300M"]
    for name in ("attnres_full", "hc"):
        own = fixed[fixed["architecture"] == name].set_index("depth")
        at = int(own["loss"].idxmin())
        rise = own["loss"].loc[70] - own["loss"].min()
        out[f"best d/L of {name} at fixed backbone"] = Ours(
            float(own["width"].loc[at] / at),
            why=f"best at L = {at} of {', '.join(map(str, own.index))}; L = 70 is {rise:.3f} nats worse"
            if at != 70
            else f"best at L = {at}; only L = {own.index.max()} is deeper, and worse",
            agrees="yes" if at == 70 else "no",
        )
    return out


REPLICATION = Replication("depthbench", _TARGETS, compute)

"""The smallest effects that a design can see: of cell means, which need no law, and of the parameters of laws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.information import Information, crossed_truth, information
from scalinglab.inventory import Inventory, SeedNoise
from scalinglab.uncertainty import t_quantile

POWER, LEVEL = 0.80, 0.05


def detectable(se: float, df: float, *, level: float = LEVEL, power: float = POWER) -> float:
    """Smallest effect that a two-sided t test at `level` finds with `power`: se times the noncentrality that gives it."""
    from scipy.special import nctdtrinc

    if not (df >= 1 and np.isfinite(se)):
        return float("inf")
    df = min(df, 1e6)
    return float(nctdtrinc(df, 1 - power, t_quantile(1 - level / 2, df))) * se


def minimal_effects(
    seen: Inventory,
    table: pd.DataFrame,
    known: Mapping[str, Information | str],
    sigma: float,
    tau: float,
    noise: SeedNoise | None,
    cells: NDArray[np.intp],
) -> pd.DataFrame:
    """Minimal detectable effects: of cell means (no law needed), then of the laws' parameters."""
    rows = []

    def add(estimand: str, unit: str, se: float, df: float, how: str) -> None:
        rows.append({"estimand": estimand, "unit": unit, "se": se, "df": df, "mde": detectable(se, df), "how": how})

    seeds = max(1.0, float(np.median(seen.seeds)))
    df = float(noise.df) if noise is not None else 2 * (seeds - 1) if seeds > 1 else 1e6
    known_sigma = ", sigma taken as known" if df == 1e6 else ""
    add(
        "loss gap between two cells",
        "nats",
        float(np.sqrt(2 * (tau**2 + sigma**2 / seeds))),
        df,
        f"{seeds:g} seeds a cell{known_sigma}",
    )
    slope = _slope(seen, sigma, tau)
    if slope is not None:
        one, both, df = slope
        add("slope of loss per ln depth at fixed size", "nats", one, df, "cell means of the best covered architecture")
        add(
            "difference of that slope between architectures",
            "nats",
            both,
            df,
            "cell means; pool the error of more architectures to do better",
        )
    shape, plain = known.get("shape"), known.get("chinchilla")
    if isinstance(shape, Information):
        add("gamma1", "1", float(shape.se["gamma1"]), shape.df, "law shape")
    if isinstance(plain, Information):
        for name in ("alpha", "beta"):
            add(name, "1", float(plain.se[name]), plain.df, "law chinchilla")
    for base, name, share in ((shape, "gamma1", "H2"), (plain, "alpha", "H3"), (plain, "beta", "H4")):
        if isinstance(base, Information):
            add(
                f"difference of {name} between architectures",
                "1",
                *_difference(base, name, share, table, sigma, tau, cells),
            )
    return pd.DataFrame(rows).set_index("estimand")


def _slope(seen: Inventory, sigma: float, tau: float) -> tuple[float, float, float] | None:
    """Standard error of the slope of cell means on ln depth within groups of one size, of a difference of two, and df.

    Var = (tau^2 + sigma^2 / seeds) / sum (x - mean x)^2, for the architecture whose cells cover depth best.
    """
    if not seen.has("depth"):
        return None
    groups = [c for c in ("match_group",) if seen.has(c)] or (["tier", "tokens"] if seen.has("tokens") else ["tier"])
    arch = ["architecture"] if seen.has("architecture") else []
    own = seen.finals.groupby([*arch, *groups, "cell"], as_index=False).agg(
        depth=("depth", "first"), seeds=("run_id", "size")
    )
    x = np.log(own["depth"].to_numpy(np.float64))
    w = 1 / (tau**2 + sigma**2 / own["seeds"].to_numpy(np.float64))
    block = own.groupby([*arch, *groups], sort=False).ngroup().to_numpy()
    x = x - (np.bincount(block, w * x) / np.bincount(block, w))[block]
    code, _ = pd.factorize(own["architecture"]) if arch else (np.zeros(len(own), np.intp), None)
    information_ = np.bincount(code, w * x * x)
    blocks = pd.Series(block).groupby(code).nunique().to_numpy()
    df = np.bincount(code) - blocks - 1
    if not (information_ > 0).any():
        return None
    order = np.argsort(-information_)
    best = int(order[0])
    rival = int(order[1]) if len(order) > 1 and information_[order[1]] > 0 else best
    both = 1 / information_[best] + 1 / information_[rival]
    return float(information_[best] ** -0.5), float(both**0.5), float(df[best])


def _difference(
    base: Information, name: str, share: str, table: pd.DataFrame, sigma: float, tau: float, cells: NDArray[np.intp]
) -> tuple[float, int, str]:
    """Standard error, df and method of the difference of a parameter between two architectures (worst pair with the first)."""
    levels = sorted(table["architecture"].dropna().astype(str).unique()) if "architecture" in table else []
    if name in base.open:
        return np.inf, base.df, f"{name} is not determined"
    if len(levels) < 2 or table["architecture"].isna().any():
        return float(np.sqrt(2) * base.se[name]), base.df, "two sets of runs like these, fitted apart"
    made, truth = crossed_truth(base.law, dict(base.params), "architecture", levels, share)
    info = information(made, truth, table, sigma=sigma, tau=tau, cells=cells)
    at = [f"{name}[{v}]" for v in levels]
    if set(at) & set(info.open):
        return np.inf, info.df, f"{len(levels)} architectures, sharing {share}: not determined"
    worst = max(info.contrast({at[0]: -1.0, other: 1.0}) for other in at[1:])
    return worst, info.df, f"{len(levels)} architectures, sharing {share}, worst pair with {levels[0]}"

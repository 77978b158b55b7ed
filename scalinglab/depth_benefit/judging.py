"""From effects to evidence: everything that the label engine wants to know about one architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.cell_effects import flops_gap
from scalinglab.depth_benefit.cells import CellModel, profile_hat
from scalinglab.depth_benefit.divergence import Bounds
from scalinglab.depth_benefit.effects import Effect, EffectSet
from scalinglab.depth_benefit.intake import Intake
from scalinglab.depth_benefit.labels import Evidence, Verdict, decide, reading_of
from scalinglab.depth_benefit.rates import Rates
from scalinglab.errors import ConfigError
from scalinglab.features import R0
from scalinglab.hypotheses.interior import Quadratic, interior_optimum, two_lines
from scalinglab.inventory import MATCH_LIMIT

Array = NDArray[np.float64]

LR_CURVATURE = 0.0155  # nats per (ln lr)^2 around the optimum: median of 17 settings of the step-law grid (.010-.026)
_GRID = 3  # learning rates that bracket an optimum
_LR_DRIFT = 0.5  # the optimum falls like depth^-1/2 under an uncorrected parametrization
_DEPTH_SAFE = frozenset({"completep", "depth_mup", "depth-mup"})  # parametrizations that keep the optimum over depth


@dataclass(frozen=True)
class LearningRates:
    """What the table says about learning rates: arms at the edge of their grid, one rate for all, cost of drift (nats)."""

    edge: Mapping[str, tuple[str, ...]]
    common: Mapping[str, bool]
    drift_cost: float


def tuned(runs: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, tuple[str, ...]]]:
    """Runs at the best learning rate of their cell, and the arms whose best one is at the edge of its grid.

    The best rate has the smallest mean loss over seeds. A cell with one rate has no grid and no edge.
    """
    if "lr" not in runs or runs["lr"].isna().any():
        return runs, {}
    keys = ["architecture", "group", "depth", "width"]
    means = runs.groupby([*keys, "lr"], sort=False)["loss"].mean().reset_index()
    best = means.loc[means.groupby(keys, sort=False)["loss"].idxmin()]
    span = means.groupby(keys)["lr"].agg(["min", "max", "nunique"])
    joined = best.merge(span, left_on=keys, right_index=True)
    at_edge = joined[(joined["nunique"] > 1) & ((joined["lr"] == joined["min"]) | (joined["lr"] == joined["max"]))]
    edge = {
        str(a): tuple(f"depth {d:g} at lr {lr:g}" for d, lr in zip(own["depth"], own["lr"], strict=True))
        for a, own in at_edge.groupby("architecture", sort=False)
    }
    kept = runs.merge(best[[*keys, "lr"]], on=[*keys, "lr"], how="inner")
    kept.attrs = dict(runs.attrs)
    return kept, edge


def lost_at_best(lost: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
    """Lost runs that count: those at the learning rate of their cell, and all of cells where none lived.

    That a sweep blows up at its largest rates says nothing about the arm at its own best rate.
    """
    if "lr" not in lost or not len(lost) or "lr" not in kept or kept["lr"].isna().any():
        return lost
    keys = ["architecture", "group", "depth", "width"]
    best = kept.drop_duplicates(keys)[[*keys, "lr"]].rename(columns={"lr": "_best"})
    joined = lost.merge(best, on=keys, how="left")
    same = (
        joined["_best"].isna()
        | joined["lr"].isna()
        | np.isclose(joined["lr"].astype(float), joined["_best"].astype(float))
    )
    return lost[same.to_numpy(bool)].reset_index(drop=True)


def learning_rates(
    intake: Intake, edge: Mapping[str, tuple[str, ...]], contrast: Mapping[str, float], tried: pd.DataFrame
) -> LearningRates:
    """Edge hits, whether all shapes of an architecture share one learning rate, and what its drift would cost.

    tried : all runs, also those at other rates than the best of their cell. Cells that tried three rates or more and found
    the best one inside are tuned, though it be the same one at all depths.
    """
    runs = intake.runs
    common: dict[str, bool] = {}
    for a in intake.architectures:
        own = runs[runs["architecture"] == a]
        one = "lr" in own and own["lr"].notna().all() and len(own["lr"].unique()) == 1 and len(own) > 1
        safe = "parametrization" in own and own["parametrization"].astype(str).str.lower().isin(_DEPTH_SAFE).all()
        common[a] = bool(one and not safe and (a in edge or _rates_per_cell(tried, a) < _GRID))
    ratio = contrast.get("depth_deep", math.nan) / contrast.get("depth_shallow", math.nan)
    cost = LR_CURVATURE * (_LR_DRIFT * math.log(ratio)) ** 2 if ratio > 0 else 0.0
    return LearningRates(edge, common, cost)


def _rates_per_cell(tried: pd.DataFrame, architecture: str) -> int:
    """Fewest learning rates that a cell of an architecture tried; 0 where they aren't known."""
    own = tried[tried["architecture"] == architecture]
    if "lr" not in own or not len(own):
        return 0
    return int(own.groupby(["group", "depth", "width"])["lr"].nunique().min())


def adjusted(effects: EffectSet) -> list[float]:
    """Holm-adjusted p of every effect within its family (estimand, variant, group); NaN where there is no p."""
    frame = effects.to_frame()
    out = [math.nan] * len(effects)
    if not len(frame):
        return out
    for _, own in frame.groupby(["estimand", "variant", "group"], sort=False):
        known = own["p"].dropna().sort_values(kind="stable")
        steps = known.to_numpy() * np.arange(len(known), 0, -1)
        for i, v in zip(known.index, np.minimum(np.maximum.accumulate(steps), 1.0), strict=True):
            out[int(i)] = float(v)
    return out


def judge(
    effect: Effect,
    *,
    p_adj: float,
    tests: int,
    margin: float,
    alpha: float,
    intake: Intake,
    rates_known: bool,
    lr: LearningRates,
    condition: float | None = None,
    identified: bool = True,
    shape_sd: float | None = None,
    found_bounds: Bounds | None = None,
    deletions: Mapping[str, Effect] | None = None,
    modifiers: tuple[str, ...] = (),
) -> tuple[Evidence, Verdict]:
    """Evidence and verdict of one architecture's effect.

    margin : in nats of the gap; a slope is held against what makes that gap over its contrast (`Effect.of_gap`), and so are
    costs and bounds. tests : number of effects in the family, for the smallest attainable p. deletions : the effect with one run or shape left
    out, by its name; their p is adjusted by the same factor as the effect's.
    """
    factor = p_adj / effect.p if effect.p > 0 and math.isfinite(p_adj) else 1.0
    correction = effect.correction
    needed = correction.needed or abs(correction.dln_params) > MATCH_LIMIT * (1 + 1e-9)
    invalid = list(intake.invalid)
    base = Evidence(
        effect.estimate, effect.se, effect.df, effect.interval(0.95), effect.interval(0.90),
        p_adj if math.isfinite(p_adj) else 1.0, _or(effect.of_gap(margin), margin), alpha, tuple(invalid), condition, not identified, shape_sd,
        p_min=effect.p_min, alpha_adj=alpha / max(1, tests), lr_edge=lr.edge.get(effect.architecture, ()),
        lr_common=lr.common.get(effect.architecture, False), drift_cost=_or(effect.of_gap(lr.drift_cost), lr.drift_cost), mismatch_needed=needed,
        correction_available=correction.applied or rates_known,
        correction=correction.nats if correction.applied else 0.0, modifiers=modifiers, mde=effect.mde,
        unit=effect.unit, dln_params=_or(correction.dln_params, 0.0), dln_tokens=_or(correction.dln_tokens, 0.0),
    )  # fmt: skip
    moved: dict[str, str] = {}
    for name, other in (deletions or {}).items():
        if other.usable:
            moved[name] = reading_of(_reread(base, other.estimate, other.se, other, factor))[0]
    if found_bounds is not None and found_bounds.lost:
        ends = [effect.estimate + effect.of_gap(v - found_bounds.complete) for v in found_bounds.manski]
        labels = tuple(reading_of(_shifted(base, effect, end - effect.estimate))[0] for end in ends)
        composite = effect.of_gap(found_bounds.composite - found_bounds.complete)
        base = replace(
            base, bounds=(ends[0], ends[1]), bound_labels=labels,
            composite_label=reading_of(_shifted(base, effect, composite))[0],
        )  # fmt: skip
    evidence = replace(base, deletions=moved)
    return evidence, decide(evidence)


def cell_deletions(model: CellModel, effect: Effect, runs: pd.DataFrame, rates: Rates | None) -> dict[str, Effect]:
    """E1, E1s or E2 of an architecture with one run, or one shape, left out; the error is re-estimated with it.

    Only the architecture's own runs and shapes are left out: others reach its estimate through the pooled error alone.
    """
    a = effect.architecture
    table = model.table
    rows = np.flatnonzero((table["architecture"] == a).to_numpy())
    y, z = table["loss"].to_numpy(np.float64)[rows], table["x"].to_numpy(np.float64)[rows]
    middle = 0.5 * (model.x_shallow + model.x_deep)
    z = z - middle
    block = pd.factorize(table["block"].iloc[rows])[0]
    sizes = table[["ln_params", "ln_tokens"]].to_numpy(np.float64)[rows]
    count = table["runs"].to_numpy(np.float64)[rows]
    powers = model.powers("slope", model.reference_x) if effect.estimand == "E1s" else model.powers("gap")
    column = f"ln_flops_{effect.variant}"
    dear = effect.estimand == "E2" and rates is not None and column in table
    more = flops_gap(model, a, column) if dear else 0.0
    # residual sum of the others, and their degrees of freedom
    mine = float(model.residuals[rows] @ model.residuals[rows])
    total = float(model.residuals @ model.residuals)
    own_left = float(len(rows) - len(np.unique(block)) - model.degree)
    rest_rss = total - mine if model.error == "pooled" else 0.0
    rest_df = model.df[a] - own_left if model.error == "pooled" else 0.0
    out: dict[str, Effect] = {}

    def redo(keep: NDArray[np.bool_], loss: Array, name: str) -> None:
        found = profile_hat(z[keep], block[keep], model.degree)
        if found is None:
            return
        hat, smooth = found
        w = powers @ hat
        e = loss[keep] - smooth @ loss[keep]
        df = rest_df + keep.sum() - round(float(np.trace(smooth)))
        if df < 1:
            return
        variance = (rest_rss + float(e @ e)) / df * float(w @ w)
        # the losses are corrected where the effect is: the rates add their own error
        estimate, dn, dd = float(w @ loss[keep]), *(-float(w @ sizes[keep, k]) for k in (0, 1))
        if effect.correction.applied and rates is not None:
            estimate += rates.tokens * more
            g = np.array([dn, dd - more])
            variance += float(g @ rates.cov[:2, :2] @ g)
        out[name] = replace(effect, estimate=estimate, se=math.sqrt(variance), df=float(df))

    everything = np.ones(len(rows), bool)
    shapes = list(zip(table["depth"].to_numpy()[rows], table["width"].to_numpy()[rows], strict=True))
    for i, (depth, width) in enumerate(shapes):
        keep = everything.copy()
        keep[i] = False
        redo(keep, y, f"shape {depth:g}x{width:g}")
    if (count > 1).any():
        where = {
            (b, *shape): i for i, (b, shape) in enumerate(zip(table["block"].to_numpy()[rows], shapes, strict=True))
        }
        own = runs[runs["architecture"] == a]
        for run_id, group, depth, width, loss in zip(
            own["run_id"], own["group"], own["depth"], own["width"], own["loss"], strict=True
        ):
            at = [k for (b, d, w), k in where.items() if d == depth and w == width and group in b.split("+")]
            if not at or count[at[0]] < 2:
                continue
            k = at[0]
            moved = y.copy()
            moved[k] = y[k] + (model.raw[rows[k]] - loss) / (count[k] - 1)
            redo(everything, moved, f"run {run_id}")
    return out


def law_deletions(
    effects: EffectSet, replicates: Mapping[str, Array], names: list[str]
) -> dict[str, dict[str, Effect]]:
    """E1 per architecture at every delete-one refit of a law, with the standard error of all runs."""
    out: dict[str, dict[str, Effect]] = {}
    for e in effects.subset("E1"):
        values = replicates[e.architecture]
        out[e.architecture] = {f"shape {n}": replace(e, estimate=float(v)) for n, v in zip(names, values, strict=True)}
    return out


def cell_optimum(model: CellModel, architecture: str) -> tuple[str, tuple[float, float], float]:
    """Modifier of the optimum from a quadratic profile; its Fieller limits and estimate as aspect ratios."""
    if model.degree != 2:
        return "OPTIMUM_UNRESOLVED", (math.nan, math.nan), math.nan
    hat = model.hats[architecture]
    b = hat @ model.loss
    own = model.table.loc[model.table["architecture"] == architecture, "x"] - 0.5 * (model.x_shallow + model.x_deep)
    df = model.df[architecture]
    if not df >= 1 or not model.s2[architecture] > 0:
        return "OPTIMUM_UNRESOLVED", (math.nan, math.nan), math.nan
    curve = Quadratic(float(b[0]), float(b[1]), model.covariance(hat), df)
    try:
        found = interior_optimum(curve, float(own.min()), float(own.max()))
    except ConfigError:
        return "OPTIMUM_UNRESOLVED", (math.nan, math.nan), math.nan
    middle = 0.5 * (model.x_shallow + model.x_deep)

    def aspect(x: float) -> float:
        return math.exp(-1.5 * (x + middle)) if math.isfinite(x) and abs(x) < 200 else math.nan

    limits = sorted((aspect(found.location.low), aspect(found.location.high)))
    return found.label, (limits[0], limits[1]), aspect(found.location.estimate)


def parabola_alone(model: CellModel, architecture: str) -> str:
    """Why an interior optimum of this architecture rests on its parabola; empty where two lines (Simonsohn 2018) see it too.

    On a curve that merely saturates a parabola finds an optimum in up to a fifth of all studies.
    """
    own = model.table[model.table["architecture"] == architecture]
    if len(set(own["x"])) < 6:
        return "two lines, which assume no parabola, need six depths"
    loss = own["loss"] - own.groupby("block")["loss"].transform("mean")
    p = two_lines(own["x"].to_numpy(np.float64), loss.to_numpy(np.float64)).p_value
    return f"two lines, which assume no parabola, don't show it (p = {p:.2g})" if p > 0.05 else ""


def law_optimum(effects: EffectSet, architecture: str, sampled: tuple[float, float]) -> str:
    """Modifier of the optimum from gamma1 and gamma2 of the law `shape`."""
    wanted = [i for i, e in enumerate(effects) if e.architecture == architecture and e.variant in ("gamma1", "gamma2")]
    wanted = [i for i in wanted if effects.effects[i].estimand == "E4"]
    if len(wanted) != 2:
        return "OPTIMUM_UNRESOLVED"
    g1, g2 = (effects.effects[i] for i in wanted)
    curve = Quadratic(g1.estimate, g2.estimate, effects.cov[np.ix_(wanted, wanted)], g1.df)
    low, high = (math.log(r / R0) for r in sampled)
    try:
        return interior_optimum(curve, low, high).label
    except ConfigError:
        return "OPTIMUM_UNRESOLVED"


def shape_spread(runs: pd.DataFrame, architecture: str) -> float:
    """SD of ln aspect of an architecture's shapes within its groups (pooled)."""
    own = (runs["architecture"] == architecture).to_numpy()
    depth, width = (runs[c].to_numpy(np.float64)[own] for c in ("depth", "width"))
    group = pd.factorize(runs["group"].to_numpy()[own])[0]
    shapes = np.unique(np.stack([group.astype(np.float64), depth, width], 1), axis=0)
    u, at = np.log(shapes[:, 2] / shapes[:, 1]), shapes[:, 0].astype(np.intp)
    left = len(u) - len(np.unique(at))
    if left <= 0:
        return 0.0
    mean = np.bincount(at, u) / np.bincount(at)
    return float(np.sqrt(((u - mean[at]) ** 2).sum() / left))


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _reread(base: Evidence, estimate: float, se: float, effect: Effect, factor: float) -> Evidence:
    return replace(
        base, estimate=estimate, se=se, df=effect.df, ci95=effect.interval(0.95), ci90=effect.interval(0.90),
        p_adj=min(1.0, effect.p * factor) if effect.p == effect.p else 1.0,
    )  # fmt: skip


def _shifted(base: Evidence, effect: Effect, by: float) -> Evidence:
    moved = replace(effect, estimate=effect.estimate + by)
    factor = base.p_adj / effect.p if effect.p > 0 else 1.0
    return _reread(base, moved.estimate, moved.se, moved, factor)

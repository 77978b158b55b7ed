"""Gates of the label engine: mismatched sizes, lost runs, 10,000 scenarios, shuffled depths, duplicated checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pandas as pd
from gate_rates import Gate, Rate

from scalinglab.depth_benefit import Rates, depth_benefit
from scalinglab.depth_benefit.analysis import Options, analyse
from scalinglab.depth_benefit.cell_effects import cell_effects
from scalinglab.depth_benefit.cells import cell_table, fit_cells
from scalinglab.depth_benefit.intake import take_in
from scalinglab.depth_benefit.labels import RULES, Evidence, Label, decide, reading_of
from scalinglab.published import depthbench
from scalinglab.simulation import grid_design, simulate

ALPHA, SIZE = 0.05, (0.04, 0.06)
TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}
FLAT = {**TRUTH, "gamma1": 0.0, "gamma2": 0.0}
LETTERS = ("pre_ln", "b", "c", "d", "e", "f")


# ---- the default analysis, from table to p ------------------------------------------------------------------------------
def size_of_the_report(count: int, seed: int) -> list[Rate]:
    """E1, E1s and Holm's E7 of the default analysis when shape does nothing: six architectures, five shapes, three seeds."""
    design = grid_design((3e8,), (8e9,), aspects=(12, 20, 35, 60, 100), architectures=LETTERS)
    hits = {"gap E1": 0, "slope E1s": 0, "any difference E7, Holm": 0}
    for k in range(count):
        runs = simulate(
            "shape", FLAT, design, sigma=0.001, cell_sd=0.0007, seeds=3, rng=np.random.default_rng([seed, 47, k])
        )
        outcome = analyse(take_in(runs), Options(reference="pre_ln"))
        own = {e.estimand: e.p for e in outcome.effects if e.architecture == "pre_ln" and not e.variant}
        hits["gap E1"] += own["E1"] <= ALPHA
        hits["slope E1s"] += own["E1s"] <= ALPHA
        differences = [
            p for e, p in zip(outcome.effects, outcome.p_adj, strict=True) if e.estimand == "E7" and not e.variant
        ]
        hits["any difference E7, Holm"] += min(differences) <= ALPHA
    bands = {"any difference E7, Holm": (0.0, 0.06)}
    return [Rate(f"report: {k}", "shape does nothing", n, count, *bands.get(k, SIZE)) for k, n in hits.items()]


# ---- M7 ---------------------------------------------------------------------------------------------------------------------
def mismatch(count: int, seed: int) -> list[Rate]:
    """DepthBench's fixed-total shapes when only backbone size matters (Besiroglu's law), corrected with an estimated rate."""
    bench = take_in(depthbench())
    own = bench.runs[(bench.runs["group"] == "400M") & (bench.runs["architecture"] == "hc")]
    table = cell_table(own)
    n = np.exp(table["ln_params"].to_numpy())
    mean = 1.8172 + 477.84 * n**-0.34731 + 2143.86 * 8e9**-0.36718
    true = 0.34731 * 477.84 * 302e6**-0.34731
    rng = np.random.default_rng([seed, 7])
    hits = {"not corrected": 0, "corrected, rate known": 0, "corrected, rate with an error of 15 %": 0}
    for _ in range(count):
        model = fit_cells(
            table.assign(loss=mean + math.sqrt(0.003**2 / 3 + 0.002**2) * rng.standard_normal(len(n))), degree=1
        )
        drawn = true * (1 + 0.15 * rng.standard_normal())
        known = Rates(true, 0.18, 0.18, np.zeros((3, 3)), np.inf, "known", True)
        estimated = Rates(drawn, 0.18, 0.18, np.diag([(0.15 * drawn) ** 2, 0, 0]), np.inf, "drawn", True)
        for name, rates in zip(hits, (None, known, estimated), strict=True):
            hits[name] += cell_effects(model, rates=rates).pick("E1").p <= ALPHA
    bands = {
        "not corrected": (0.9, 1.0),
        "corrected, rate known": SIZE,
        "corrected, rate with an error of 15 %": (0.0, ALPHA),
    }
    return [Rate("no depth effect, unequal backbones", k, v, count, *bands[k]) for k, v in hits.items()]


# ---- M8 ---------------------------------------------------------------------------------------------------------------------
DEPTHS = (16, 20, 24, 28, 32, 42, 70)


def lost_runs(count: int, seed: int) -> list[Rate]:
    """Where analyses without and with the lost runs disagree, the label says so (or an earlier rule stops it)."""
    rates = []
    x = np.repeat(np.log(DEPTHS), 5)
    for mechanism in ("losses above a threshold diverge", "deep runs diverge"):
        rng = np.random.default_rng([seed, 8, len(rates)])
        y = 2.75 - 0.012 * (x - x.mean()) + 0.012 * rng.standard_normal((count, len(x)))
        deep = (x - x.min()) / np.ptp(x)
        lost = y > np.quantile(y, 0.84) if mechanism.startswith("losses") else rng.random(y.shape) < 0.41 * deep**2
        seen = caught = 0
        for v, gone in zip(y, lost, strict=True):
            if not gone.any():
                continue
            outcome = analyse(take_in(_runs(v, x, gone)), Options(degree=1))
            verdict = outcome.verdicts["pre_ln"]
            if outcome.evidence["pre_ln"].composite_label != verdict.reading:
                seen += 1
                caught += verdict.label in ("SELECTION_SENSITIVE", "CONFOUNDED_N")
        rates.append(Rate("label when lost runs decide", mechanism, caught, seen, 0.95, 1.0))
    return rates


def _runs(y: np.ndarray, x: np.ndarray, lost: np.ndarray) -> pd.DataFrame:
    depth = np.round(np.exp(x)).astype(int)
    return pd.DataFrame({
        "run_id": [f"r{i}" for i in range(len(x))], "architecture": "pre_ln", "match_group": "g", "depth": depth,
        "width": np.sqrt(3e8 / (12 * depth)).round(), "params_backbone": 3e8, "tokens": 8e9, "seed": np.arange(len(x)) % 5,
        "vocab": 50_280, "loss": np.where(lost, np.nan, y), "status": np.where(lost, "diverged", "finished"),
    })  # fmt: skip


# ---- M9 ---------------------------------------------------------------------------------------------------------------------
def random_evidence(rng: np.random.Generator) -> Evidence:
    """A scenario: anything that the fields of `Evidence` may hold together."""
    b, se = rng.uniform(-0.1, 0.1), math.exp(rng.uniform(math.log(1e-4), math.log(0.05)))
    half95, half90 = rng.uniform(1.9, 4) * se, rng.uniform(1.6, 1.9) * se
    maybe = rng.random(8) < 0.3
    low, high = sorted(rng.uniform(-0.1, 0.1, 2))
    return Evidence(
        estimate=b, se=se, df=rng.uniform(1, 60), ci95=(b - half95, b + half95), ci90=(b - half90, b + half90),
        p_adj=rng.random() ** 3, margin=rng.uniform(1e-3, 0.05), p_min=rng.uniform(0, 0.1) if maybe[0] else 0.0,
        invalid=("x",) if rng.random() < 0.02 else (), condition=math.exp(rng.uniform(0, 9)) if maybe[1] else None,
        profile_open=bool(rng.random() < 0.05), shape_sd=rng.uniform(0, 2) if maybe[2] else None,
        lr_edge=("a",) if rng.random() < 0.05 else (), lr_common=bool(maybe[3]), drift_cost=rng.uniform(0, 0.05),
        mismatch_needed=bool(maybe[4]), correction_available=bool(rng.random() < 0.7),
        correction=rng.uniform(-0.1, 0.1) if maybe[5] else 0.0, bounds=(low, high) if maybe[6] else None,
        deletions={"r": "INCONCLUSIVE"} if rng.random() < 0.1 else {},
    )  # fmt: skip


def rank(label: str) -> int:
    """0 beyond the margin, 1 not judged, 2 inside it."""
    return 0 if label.endswith("_MATERIAL") else 2 if label.endswith("_TRIVIAL") or label == "EQUIVALENT" else 1


def properties(e: Evidence, rng: np.random.Generator) -> dict[str, bool]:
    """The promises of the engine on one scenario."""
    verdict = decide(e)
    held = [name for name, rule in RULES if rule(e) is not None]
    wider = reading_of(replace(e, margin=e.margin * rng.uniform(1, 20)))[0]
    k = 2.0 ** rng.integers(-6, 7)  # a power of two: a change of unit that rounds nothing
    bounds = None if e.bounds is None else (e.bounds[0] * k, e.bounds[1] * k)
    other = replace(
        e, estimate=e.estimate * k, se=e.se * k, ci95=(e.ci95[0] * k, e.ci95[1] * k), ci90=(e.ci90[0] * k, e.ci90[1] * k),
        margin=e.margin * k, drift_cost=e.drift_cost * k, correction=e.correction * k, bounds=bounds,
    )  # fmt: skip
    mirrored = replace(
        e, estimate=-e.estimate, ci95=(-e.ci95[1], -e.ci95[0]), ci90=(-e.ci90[1], -e.ci90[0]), correction=-e.correction,
        bounds=None if e.bounds is None else (-e.bounds[1], -e.bounds[0]),
    )  # fmt: skip
    turned = verdict.label.replace("HARM", "x").replace("BENEFIT", "HARM").replace("x", "BENEFIT")
    return {
        "one label of the list, by the first rule that holds": verdict.label in get_args(Label)
        and verdict.label == (held[0] if held else reading_of(e)[0]),
        "a wider margin never makes an effect more material": rank(wider) >= rank(reading_of(e)[0]),
        "unit of the loss": decide(other).label == verdict.label,
        "benefit and harm are mirror images": decide(mirrored).label == turned,
    }


def engine(count: int, seed: int) -> list[Rate]:
    rng = np.random.default_rng([seed, 9])
    made = pd.DataFrame([properties(random_evidence(rng), rng) for _ in range(count)]).sum()
    return [Rate(f"label engine: {k}", "random scenarios", int(v), count, 1.0, 1.0) for k, v in made.items()]


def invariances(count: int, seed: int) -> list[Rate]:
    """From table to label: rows in another order, seeds renumbered, architectures renamed."""
    design = grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=("pre_ln", "hc", "lns"))
    hits = dict.fromkeys(("rows and seeds in another order", "architectures renamed"), 0)
    for k in range(count):
        rng = np.random.default_rng([seed, 91, k])
        truth = {**TRUTH, "gamma1": rng.uniform(-0.05, 0.05), "gamma2": rng.uniform(0, 0.03)}
        runs = simulate("shape", truth, design, sigma=math.exp(rng.uniform(-8, -5)), cell_sd=0.0005, seeds=2, rng=rng)
        base = _labels(runs)
        order = rng.permutation(len(runs))
        moved = runs.iloc[order].assign(seed=(1 - runs["seed"].iloc[order]) + 7).reset_index(drop=True)
        names = {"hc": "z", "lns": "a"}
        renamed = _labels(runs.assign(architecture=runs["architecture"].replace(names)))
        hits["rows and seeds in another order"] += _labels(moved) == base
        hits["architectures renamed"] += renamed == {names.get(a, a): v for a, v in base.items()}
    return [Rate(f"labels of a table: {k}", "random studies", v, count, 1.0, 1.0) for k, v in hits.items()]


def _labels(runs: pd.DataFrame, **options: float) -> dict[str, str]:
    outcome = analyse(take_in(runs), Options(reference="pre_ln", **options))
    return {a: v.label for a, v in outcome.verdicts.items()}


# ---- M11, M12 ----------------------------------------------------------------------------------------------------------------
def shuffled(count: int, seed: int) -> list[Rate]:
    """Losses dealt to the depths of their architecture at random: at most 5 % of the labels claim depth."""
    named = total = 0
    design = grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=("pre_ln", "hc"))
    for k in range(count):
        rng = np.random.default_rng([seed, 11, k])
        runs = simulate("shape", TRUTH, design, sigma=0.003, rng=rng)
        for rows in runs.groupby("architecture").groups.values():
            runs.loc[rows, "loss"] = rng.permutation(runs.loc[rows, "loss"].to_numpy())
        made = depth_benefit(runs, reanalyse=False, draws=99).label
        named += sum(v.startswith("DEPTH") for v in made.values())
        total += len(made)
    return [Rate("labels that claim depth", "shuffled depths", named, total, 0.0, ALPHA)]


def duplicated(count: int, seed: int) -> list[Rate]:
    """Every row ten times: estimates, intervals and p-values of all effects stay to 1e-6 (the label may refuse such a table)."""
    hits = dict.fromkeys(("cells", "pairs", "law"), 0)
    grid = grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=("pre_ln", "hc"))
    two = grid_design((1e8,), (2e9,), aspects=(16, 64), architectures=("pre_ln", "hc"))
    sizes = grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160))
    for k in range(count):
        for method, design in (("cells", grid), ("pairs", two), ("law", sizes)):
            rng = np.random.default_rng([seed, 12, k])
            runs = simulate("shape", TRUTH, design, sigma=0.001, seeds=1 if method == "law" else 3, rng=rng)
            ten = runs.loc[np.repeat(runs.index, 10)].reset_index(drop=True)
            one, many = (depth_benefit(t, method=method, reanalyse=False, draws=99) for t in (runs, ten))
            hits[method] += _same(one.effects, many.effects)
    return [Rate("every checkpoint ten times changes nothing", k, v, count, 1.0, 1.0) for k, v in hits.items()]


def _same(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    numbers = a.select_dtypes("number").columns
    return len(a) == len(b) and bool(np.allclose(a[numbers], b[numbers], rtol=1e-6, atol=1e-9, equal_nan=True))


GATES = [
    Gate("M4 report", "size of the default analysis", size_of_the_report, 1_000, 8),
    Gate("M7", "mismatched sizes", mismatch, 3_000, 60),
    Gate("M8", "lost runs", lost_runs, 300, 6),
    Gate("M9", "the label engine", engine, 10_000, 500),
    Gate("M9 tables", "labels of tables", invariances, 100, 3),
    Gate("M11", "shuffled depths", shuffled, 500, 8),
    Gate("M12", "duplicated checkpoints", duplicated, 10, 1),
]

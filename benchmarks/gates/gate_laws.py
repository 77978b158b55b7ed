"""Gates of what a fitted law says: nested and non-nested tests, intervals of the estimands, the law's own gate, rivals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
from gate_rates import Gate, Rate

from scalinglab.comparison import compare
from scalinglab.depth_benefit import Rates, depth_benefit
from scalinglab.depth_benefit.architectures import law_bootstrap
from scalinglab.depth_benefit.cell_effects import cell_effects, flops_gap
from scalinglab.depth_benefit.cells import cell_table, fit_cells
from scalinglab.depth_benefit.effects import EffectSet
from scalinglab.depth_benefit.estimands import by_shape, law_effects
from scalinglab.depth_benefit.intake import take_in
from scalinglab.features import R0
from scalinglab.fitting import fit
from scalinglab.hypotheses import cox, j_test, nested_bootstrap
from scalinglab.laws import law_from
from scalinglab.objectives import Gaussian
from scalinglab.simulation import gemstones_design, grid_design, simulate

ALPHA, SIZE = 0.05, (0.04, 0.06)
COVERED = (0.93, 0.985)  # of a nominal 95 % interval; above .97 it is conservative
PLAIN = Gaussian(variance="constant")
ARCHS = ("pre_ln", "hc")
TRUTH = {
    "E": 1.69, "A[pre_ln]": 406.4, "A[hc]": 394.2, "alpha": 0.34, "gamma1[pre_ln]": 0.02, "gamma1[hc]": 0.035,
    "gamma2[pre_ln]": 0.016, "gamma2[hc]": 0.016, "B": 410.7, "beta": 0.28,
}  # fmt: skip
LAW = law_from("shape").crossed("architecture", ARCHS, "H2")
N, D, WIDE, DEEP, KAPPA, VOCAB, CONTEXT = 2e8, 4e9, 76.0, 28.0, 12.0, 50_000.0, 2_048.0


# ---- tests between laws --------------------------------------------------------------------------------------------------
def one_row_per_run() -> pd.DataFrame:
    design = gemstones_design(checkpoints=3, tokens=(2e10, 1e11))
    design["run_id"] += design["tokens"].map("/{:.3g}".format)
    return design


def size_of_nested(count: int, seed: int) -> list[Rate]:
    """chinchilla is the truth; `shape` has two parameters more. One row per run, and checkpoints with run effects."""
    truth = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
    settings = {
        "a row per run": (one_row_per_run(), {"sigma": 0.003}),
        "4 checkpoints per run, run effects": (gemstones_design(checkpoints=4, tokens=(2e10, 1e11)), {"sigma": 0.002, "tau": 0.003}),
    }  # fmt: skip
    rates = []
    for setting, (design, noise) in settings.items():
        rng = np.random.default_rng([seed, 70, len(rates)])
        found = 0
        for _ in range(count):
            runs = simulate("chinchilla", truth, design, rng=rng, **noise)
            small, large = (fit(law, runs, objective=PLAIN) for law in ("chinchilla", "shape"))
            found += nested_bootstrap(small, large, draws=99, rng=rng).p_value <= ALPHA
        rates.append(Rate("nested laws, bootstrap F", setting, found, count, *SIZE))
    return rates


def size_of_non_nested(count: int, seed: int) -> list[Rate]:
    """width_depth is the truth: how often it is rejected (size) and how often `shape` is (power, whatever it is)."""
    truth = {"E": 1.7, "A": 30.0, "a": 0.6, "B": 2.0, "b": 0.7, "C": 400.0, "c": 0.28}
    rng = np.random.default_rng([seed, 71])
    hits = {"cox": [0, 0], "j": [0, 0]}
    design = one_row_per_run()
    for _ in range(count):
        runs = simulate("width_depth", truth, design, sigma=0.01, rng=rng)
        wide, shape = (fit(law, runs, objective=PLAIN) for law in ("width_depth", "shape"))
        for name, test in (("cox", cox), ("j", j_test)):
            made = test(wide, shape, draws=99, rng=rng)
            hits[name][0] += made.first.p_value <= ALPHA
            hits[name][1] += made.second.p_value <= ALPHA
    named = {"cox": "non-nested laws, Cox", "j": "non-nested laws, J"}
    return [
        *(Rate(named[k], "the true law", v[0], count, 0.0, 0.06) for k, v in hits.items()),
        *(Rate(named[k], "the other law (power)", v[1], count, 0.25, 1.0) for k, v in hits.items()),
    ]


# ---- intervals of the estimands --------------------------------------------------------------------------------------------
def true_loss(params, tokens, aspect, arch):
    u = np.log(np.asarray(aspect) / R0)
    a_term = TRUTH[f"A[{arch}]"] * np.asarray(params) ** -TRUTH["alpha"]
    a_term = a_term * np.exp(TRUTH[f"gamma1[{arch}]"] * u + TRUTH[f"gamma2[{arch}]"] * u**2)
    return TRUTH["E"] + a_term + TRUTH["B"] * np.asarray(tokens) ** -TRUTH["beta"]


def law_truths() -> dict[tuple[str, str, str], float]:
    """True values of what `law_effects` estimates: from losses of the law, not from the formulas of the package."""
    out: dict[tuple[str, str, str], float] = {}
    r = np.array([WIDE, DEEP])
    gap = {}
    for a in ARCHS:
        loss = true_loss(N, D, r, a)
        gap[a] = float(loss[0] - loss[1])
        out["E1", "", a] = gap[a]
        u = np.log(r / R0)
        q = TRUTH[f"gamma1[{a}]"] * u + TRUTH[f"gamma2[{a}]"] * u**2
        out["E5", "params", a] = float(q[0] - q[1]) / TRUTH["alpha"]
        gamma = TRUTH["alpha"] * TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
        out["E5", "compute", a] = math.log((loss[0] - TRUTH["E"]) / (loss[1] - TRUTH["E"])) / gamma
        out["E5", "tokens", a] = gap[a] / (TRUTH["beta"] * TRUTH["B"] * D ** -TRUTH["beta"])
        out["E4", "r_star", a] = math.log(R0) - TRUTH[f"gamma1[{a}]"] / (2 * TRUTH[f"gamma2[{a}]"])
    out["E7", "", "hc"] = gap["hc"] - gap["pre_ln"]
    out["E7", "gamma1", "hc"] = TRUTH["gamma1[hc]"] - TRUTH["gamma1[pre_ln]"]
    return out


def law_design() -> pd.DataFrame:
    return grid_design((5e7, 1e8, 2e8, 4e8), (10, 40), per_param=True, aspects=(8, 24, 64, 160), architectures=ARCHS)


def counted(
    hits: dict[tuple[str, str, str], int], effects: EffectSet, truth: dict[tuple[str, str, str], float]
) -> None:
    for key, value in truth.items():
        low, high = effects.pick(key[0], key[2], key[1]).interval()
        hits[key] = hits.get(key, 0) + (low <= value <= high)


def coverage_of_laws(count: int, seed: int) -> list[Rate]:
    """Delete-one-shape jackknife of a law on 32 shapes per architecture, with shape effects."""
    truth, hits = law_truths(), {}
    design = law_design()
    for k in range(count):
        runs = simulate(LAW, TRUTH, design, sigma=0.0015, cell_sd=0.001, rng=np.random.default_rng([seed, 30, k]))
        made = fit("shape", by_shape(runs), by="architecture", share="H2")
        counted(
            hits,
            law_effects(made, params=N, tokens=D, aspects=(WIDE, DEEP), kappa=KAPPA, reference="pre_ln", vocab=VOCAB, context=CONTEXT),
            truth,
        )  # fmt: skip
    return [Rate(f"law: {e} {v}".strip(), a, n, count, *COVERED) for (e, v, a), n in hits.items()]


def coverage_of_cells(count: int, seed: int) -> list[Rate]:
    """Cell means of five shapes, two seeds, shape effects: gaps at equal tokens and at equal FLOPs, and their difference."""
    design = grid_design((1e8,), (2e9,), aspects=(8, 16, 32, 64, 128), architectures=ARCHS)
    hits: dict[tuple[str, str, str], int] = {}
    for k in range(count):
        runs = take_in(
            simulate(LAW, TRUTH, design, sigma=0.001, cell_sd=0.0007, seeds=2, rng=np.random.default_rng([seed, 31, k]))
        ).runs
        model = fit_cells(cell_table(runs), error="pooled")
        n, d = model.contrast["params"], model.contrast["tokens"]
        a_term, b_term = 406.4 * n**-0.34, TRUTH["B"] * d ** -TRUTH["beta"]
        r = np.array([0.34 * a_term, 0.28 * b_term, 0.34 * 0.28 / 0.62 * (a_term + b_term)])
        rates = Rates(*r, np.diag((0.1 * r) ** 2), np.inf, "truth", True, {"params": n, "tokens": d})
        effects = cell_effects(model, rates=rates, reference="pre_ln")
        aspects = np.array([model.contrast["aspect_shallow"], model.contrast["aspect_deep"]])
        gap = {a: float(np.subtract(*true_loss(n, d, aspects, a))) for a in ARCHS}
        truth = {("E1", "", a): gap[a] for a in ARCHS} | {("E7", "", "hc"): gap["hc"] - gap["pre_ln"]}
        for c in ("causal", "full"):
            step = flops_gap(model, "pre_ln", f"ln_flops_{c}")
            tokens = d * np.exp([min(0.0, -step), min(0.0, step)])  # the dearer shape gets fewer
            truth["E2", c, "pre_ln"] = float(np.subtract(*true_loss(n, tokens, aspects, "pre_ln")))
        counted(hits, effects, truth)
    return [Rate(f"cells: {e} {v}".strip(), a, n, count, *COVERED) for (e, v, a), n in hits.items()]


def size_of_the_law_gate(count: int, seed: int) -> list[Rate]:
    """Bootstrap p of the law's architecture x depth gate when no difference is planted."""
    same = {**TRUTH, "gamma1[hc]": TRUTH["gamma1[pre_ln]"]}
    design = law_design()
    found = 0
    for k in range(count):
        runs = by_shape(
            simulate(LAW, same, design, sigma=0.0015, cell_sd=0.001, rng=np.random.default_rng([seed, 46, k]))
        )
        found += law_bootstrap(fit("shape", runs, by="architecture", share="H2"), draws=199) < ALPHA
    return [Rate("architecture x depth in a law, bootstrap", "32 shapes per architecture", found, count, *SIZE)]


# ---- M10: rivals -----------------------------------------------------------------------------------------------------------
_BASE = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
RIVALS: dict[str, tuple[str, dict[str, float]]] = {
    "shape doesn't matter (Kaplan)": ("chinchilla", _BASE),
    "aspect ratio": ("shape", {**_BASE, "gamma1": 0.03, "gamma2": 0.016}),
    # exponents of Gemstones' law; .35 nats at 300M parameters, lowest at 30 blocks
    "width and depth apart": (
        "width_depth",
        {"E": 1.69, "A": 1.07, "a": 0.22, "B": 0.56, "b": 0.476, "C": 410.7, "c": 0.28},
    ),
    "depth wasted beyond a threshold (Levine)": ("levine", {**_BASE, "eta1": 0.03, "eta2": 0.03}),
}
LAWS = ("chinchilla", "shape", "width_depth", "levine")


def named_by_label(count: int, seed: int) -> list[Rate]:
    """What the engine calls data of each rival: one size, five shapes of equal backbone, three seeds (SD .003, shapes .002)."""
    design = grid_design((3e8,), (8e9,), aspects=(12, 20, 35, 60, 100))
    rates = []
    for name, (law, truth) in RIVALS.items():
        labels: list[str] = []
        for k in range(count):
            rng = np.random.default_rng([seed, 10, len(rates), k])
            runs = simulate(law, truth, design, sigma=0.001, cell_sd=0.0007, seeds=3, rng=rng)
            labels.append(depth_benefit(runs, reanalyse=False, draws=99).label["pre_ln"])
        called = sum(v.startswith("DEPTH_") for v in labels)
        rates.append(Rate("called DEPTH_*", name, called, count, 0.0, ALPHA if law == "chinchilla" else 1.0))
        rates += [Rate(f"label {v}", name, labels.count(v), count, 0.0, 1.0) for v in sorted(set(labels))]
    return rates


def told_by_prediction(count: int, seed: int) -> list[Rate]:
    """Which law predicts left-out shapes best: three sizes at 20 tokens per parameter, five shapes each, three seeds."""
    design = grid_design((1e8, 3e8, 9e8), (20,), per_param=True, aspects=(12, 20, 35, 60, 100))
    rates = []
    for name, (law, truth) in RIVALS.items():
        best: list[str] = []
        for k in range(count):
            rng = np.random.default_rng([seed, 101, len(rates), k])
            runs = by_shape(simulate(law, truth, design, sigma=0.001, cell_sd=0.0007, seeds=3, rng=rng))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fits = {one: fit(one, runs, objective=PLAIN) for one in LAWS}
                best.append(str(compare(fits, folds=("run",)).table["run_rmse"].idxmin()))
        rates += [Rate(f"best prediction of shapes left out: {v}", name, best.count(v), count, 0.0, 1.0) for v in LAWS]
    return rates


GATES = [
    Gate("M3 laws", "coverage of estimands from a law", coverage_of_laws, 500, 10),
    Gate("M3 cells", "coverage of estimands from cell means", coverage_of_cells, 1_000, 15),
    Gate("M4 law gate", "size of the law's gate", size_of_the_law_gate, 300, 4),
    Gate("M4 nested", "size of the test between nested laws", size_of_nested, 400, 4),
    Gate("M4 non-nested", "size of the tests between laws that aren't nested", size_of_non_nested, 200, 3),
    Gate("M10", "what rivals are called", named_by_label, 100, 4),
    Gate("M10 laws", "rivals told apart by prediction", told_by_prediction, 8, 1),
]

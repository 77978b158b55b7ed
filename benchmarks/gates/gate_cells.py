"""Gates of tests on cell means, permutations, the mixed model, equivalence, looks and interior optima."""

from __future__ import annotations


import numpy as np
import pandas as pd
from gate_rates import Gate, Rate
from scipy import stats

from scalinglab.hypotheses import (
    Quadratic,
    depth_slopes,
    equivalence_power,
    freedman_lane,
    gap_power,
    gap_se,
    gap_test,
    heteroscedastic_bootstrap,
    interaction_f,
    interior_optimum,
    looks,
    max_t_p,
    mixed_interaction,
    sign_flip,
    slope_differences,
    slope_se,
    sup_equivalence,
    t_power,
    tost,
    two_lines,
)
from scalinglab.hypotheses.cells import Cells

DEPTHS = np.array([16.0, 24, 32, 42, 70])
X = np.log(DEPTHS)
GROUPS, SEEDS, ALPHA = 6, 3, 0.05
SIZE = (0.04, 0.06)  # asked of the size of every default test
UNEQUAL = (0.002, 0.002, 0.003, 0.003, 0.006, 0.006)  # seed SDs of six architectures
SPREADS: dict[str, tuple[float, float | tuple[float, ...]]] = {
    "tau 0": (0.0, 0.003), "tau .0015": (0.0015, 0.003), "tau .003": (0.003, 0.003),
    "tau 0, seeds .002-.006": (0.0, UNEQUAL), "tau .003, seeds .002-.006": (0.003, UNEQUAL),
}  # fmt: skip


def draw(
    rng: np.random.Generator,
    *,
    tau: float,
    sigma: float | tuple[float, ...],
    slopes: tuple[float, ...] = (0.0,) * GROUPS,
) -> tuple[Cells, pd.DataFrame]:
    """Six architectures at five depths with three seeds: cells and the run table behind them. tau: SD of a shape of its own."""
    group, x = np.repeat(np.arange(GROUPS), len(X)), np.tile(X, GROUPS)
    line = np.asarray(slopes)[group] * (x - X.mean()) + tau * rng.standard_normal(len(x))
    y = 2.7 + line[:, None] + np.broadcast_to(sigma, GROUPS)[group][:, None] * rng.standard_normal((len(x), SEEDS))
    mean = y.mean(1)
    cells = Cells(tuple("abcdef"), group, x, mean, np.full(len(x), SEEDS), ((y - mean[:, None]) ** 2).sum(1))
    table = pd.DataFrame(
        {"architecture": np.repeat(np.array(list("abcdef"))[group], SEEDS), "depth": np.repeat(np.exp(x), SEEDS),
         "loss": y.ravel()}
    )  # fmt: skip
    return cells, table


def run_level_p(table: pd.DataFrame) -> float:
    """The tempting test: seeds as the error of the interaction."""
    x = np.log(table["depth"].to_numpy())
    own = pd.get_dummies(table["architecture"]).to_numpy(float)
    small, large = np.column_stack([own, x]), np.hstack([own, own * x[:, None]])
    y = table["loss"].to_numpy()
    rss = [((y - M @ np.linalg.lstsq(M, y, rcond=None)[0]) ** 2).sum() for M in (small, large)]
    df = len(y) - 2 * GROUPS
    return float(stats.f.sf((rss[0] - rss[1]) / (GROUPS - 1) / (rss[1] / df), GROUPS - 1, df))


def interaction_p(
    rng: np.random.Generator, tau: float, sigma: float | tuple[float, ...], draws: int
) -> dict[str, float]:
    """p of every test of architecture x depth on one study without an interaction."""
    cells, table = draw(rng, tau=tau, sigma=sigma)
    contrasts, R = slope_differences(cells, reference="a")
    top = float(np.abs(contrasts["t"]).max())
    made = {
        "cell-mean F": interaction_f(cells, degree=1).p_value,
        "bootstrap, a variance per architecture": heteroscedastic_bootstrap(
            cells, degree=1, draws=draws, rng=rng
        ).p_value,
        "Freedman-Lane": freedman_lane(cells, degree=1, draws=draws, rng=rng).p_value,
        "Freedman-Lane within architectures": freedman_lane(cells, degree=1, draws=draws, within=True, rng=rng).p_value,
        "max-t of contrasts": float(max_t_p(np.full(len(R), top), R, float(contrasts["df"].iloc[0]))[0]),
        "one slope, t on cells": float(depth_slopes(cells)["p"].iloc[0]),
        "seeds as error (not offered)": run_level_p(table),
    }
    made["gate of the study label"] = max(
        made["cell-mean F"], made["bootstrap, a variance per architecture"], made["max-t of contrasts"]
    )
    return made


def size_of_interactions(count: int, seed: int) -> list[Rate]:
    rates = []
    for setting, (tau, sigma) in SPREADS.items():
        rng = np.random.default_rng([seed, 4, len(rates)])
        made = pd.DataFrame([interaction_p(rng, tau, sigma, 199) for _ in range(count)]) <= ALPHA
        for test, hits in made.sum().items():
            low, high = SIZE
            if test == "gate of the study label":
                low = 0.0  # three tests must agree, so it can only be smaller
            if test == "seeds as error (not offered)":
                low, high = 0.0, 1.0  # shown for what it costs
            rates.append(Rate(str(test), setting, int(hits), count, low, high))
    return rates


def size_of_the_mixed_model(count: int, seed: int) -> list[Rate]:
    rates = []
    for setting in ("tau 0", "tau .0015", "tau .003"):
        tau, sigma = SPREADS[setting]
        rng = np.random.default_rng([seed, 41, len(rates)])
        p = [
            mixed_interaction(draw(rng, tau=tau, sigma=sigma)[1], degree=1, draws=199, rng=rng).p_value
            for _ in range(count)
        ]
        rates.append(
            Rate("mixed model, parametric bootstrap", setting, int((np.array(p) <= ALPHA).sum()), count, *SIZE)
        )
    return rates


def size_of_two_shapes(count: int, seed: int) -> list[Rate]:
    """Two shapes with seeds: t, paired t, exact sign flips (8 pairs: the largest size below .05 is 12 / 256)."""
    rng = np.random.default_rng([seed, 42])
    a, b = 0.003 * rng.standard_normal((2, count, 8))
    common = 0.003 * rng.standard_normal((count, 8))
    t = sum(gap_test(x[:5], y[:5]).p_value <= ALPHA for x, y in zip(a, b, strict=True))
    paired = sum(gap_test(x, y, paired=True).p_value <= ALPHA for x, y in zip(a + common, b + common, strict=True))
    flips = sum(sign_flip(x - y).p_value <= ALPHA for x, y in zip(a, b, strict=True))
    return [
        Rate("gap of two shapes, t", "5 seeds", t, count, *SIZE),
        Rate("gap of two shapes, paired t", "8 pairs, correlation .5", paired, count, *SIZE),
        Rate("exact sign flips", "8 pairs", flips, count, *SIZE),
    ]


def size_of_looks(count: int, seed: int) -> list[Rate]:
    """Boundaries are of a z; the p of paired t tests on few pairs stands in for it."""
    rates = []
    for pairs in ((3, 5, 8), (2, 4, 6), (4, 8)):
        d = np.random.default_rng([seed, 43, len(rates)]).standard_normal((count, pairs[-1]))
        for spending in ("obrien_fleming", "pocock"):
            plan = looks([n / pairs[-1] for n in pairs], spending=spending)
            hit = np.zeros(count, bool)
            for k, n in enumerate(pairs):
                t = d[:, :n].mean(1) / (d[:, :n].std(1, ddof=1) / np.sqrt(n))
                hit |= 2 * stats.t.sf(np.abs(t), n - 1) <= plan.nominal[k]
            rates.append(
                Rate(f"looks, {spending}", f"after {', '.join(map(str, pairs))} pairs", int(hit.sum()), count, *SIZE)
            )
    return rates


def size_of_interior(count: int, seed: int) -> list[Rate]:
    """On a saturating curve there is no interior optimum. The three conditions of a parabola find one all the same."""
    x = np.linspace(0, 1, 8)
    X3 = np.stack([np.ones_like(x), x, x * x], 1)
    inverse, df = np.linalg.inv(X3.T @ X3), len(x) - 3
    rates = []
    for setting, curve in (("saturating curve", np.exp(-4 * x)), ("flat curve", 0 * x)):
        rng = np.random.default_rng([seed, 44, len(rates)])
        lines = three = 0
        for _ in range(count):
            y = curve + 0.03 * rng.standard_normal(len(x))
            lines += two_lines(x, y).p_value <= ALPHA
            b = inverse @ X3.T @ y
            s2 = ((y - X3 @ b) ** 2).sum() / df
            own = Quadratic(float(b[1]), float(b[2]), s2 * inverse[1:, 1:], df)
            three += interior_optimum(own, 0.0, 1.0).label == "INTERIOR_OPTIMUM"
        rates.append(Rate("interior optimum, two lines", setting, lines, count, 0.0, 0.06))
        rates.append(Rate("interior optimum, a parabola's conditions alone", setting, three, count, 0.0, 1.0))
    return rates


def power_of_plans(count: int, seed: int) -> list[Rate]:
    """M5: simulated power against the planning formula, +-.03."""
    rates = []
    for slope, tau in ((0.008, 0.002), (0.005, 0.0), (0.012, 0.002)):
        rng = np.random.default_rng([seed, 5, len(rates)])
        p: list[float] = []
        while len(p) < count:
            p += depth_slopes(draw(rng, tau=tau, sigma=0.003, slopes=(slope,) * GROUPS)[0])["p"].to_list()
        want = t_power(slope, slope_se(X, 0.003, SEEDS, tau=tau), len(X) - 2)
        hits = int((np.array(p[:count]) <= ALPHA).sum())
        rates.append(
            Rate("slope, planned power", f"slope {slope:g}, tau {tau:g}", hits, count, want - 0.03, want + 0.03)
        )
    for seeds, gap in ((3, 0.0092), (5, 0.0061), (8, 0.0045)):
        a, b = 0.003 * np.random.default_rng([seed, 51, seeds]).standard_normal((2, count, seeds))
        hits = sum(gap_test(x + gap, y).p_value <= ALPHA for x, y in zip(a, b, strict=True))
        want = gap_power(gap, 0.003, seeds)
        rates.append(Rate("gap, planned power", f"{seeds} seeds, gap {gap:g}", hits, count, want - 0.03, want + 0.03))
    return rates


def equivalence_of_gaps(count: int, seed: int) -> list[Rate]:
    """M6: size at the margin, planned power at 0, and the size of the simultaneous version."""
    rates = []
    for sigma, s, margin in ((0.003, 3, 0.01), (0.003, 5, 0.005), (0.005, 5, 0.01)):
        for effect in (margin, 0.0):
            rng = np.random.default_rng([seed, 6, s, round(1e4 * effect)])
            a, b = (sigma * rng.standard_normal((count, s)) for _ in range(2))
            gap = effect + a.mean(1) - b.mean(1)
            se = np.sqrt((a.var(1, ddof=1) + b.var(1, ddof=1)) / s)
            hits = sum(tost(g, e, 2 * (s - 1), margin=margin).rejected for g, e in zip(gap, se, strict=True))
            plan = equivalence_power(margin, gap_se(sigma, s), 2 * (s - 1))
            low, high = (0.0, ALPHA) if effect else (plan - 0.03, plan + 0.03)
            where = "at the margin" if effect else "no effect, planned power"
            rates.append(
                Rate(
                    "equivalence (TOST)", f"{where}: SD {sigma:g}, {s} seeds, margin {margin:g}", hits, count, low, high
                )
            )
    rates.append(
        Rate("equivalence of all shapes (sup)", "worst shape at the margin", _sup(count, seed), count, 0.0, ALPHA)
    )
    return rates


def _sup(count: int, seed: int, *, shapes: int = 5, runs: int = 20, margin: float = 0.01, sigma: float = 0.006) -> int:
    """Means of `shapes` groups whose worst lies at the margin; leave-one-run-out replicates of all means at once."""
    rng = np.random.default_rng([seed, 61])
    truth = np.linspace(0, margin, shapes)
    y = truth[:, None] + sigma * rng.standard_normal((count, shapes, runs))
    hits = 0
    for v in y:
        curve = v.mean(1)
        replicates = ((v.sum(1)[:, None] - v) / (runs - 1)).T  # run r left out of every shape
        hits += sup_equivalence(curve, replicates, margin=margin, df=runs - 1, n_runs=runs, rng=1).rejected
    return hits


def worth(count: int, seed: int) -> list[Rate]:
    """Lost runs: worst ranks and the trend of divergence when depth does nothing."""
    from scalinglab.depth_benefit.divergence import divergence_trend, worst_rank

    rng = np.random.default_rng([seed, 45])
    x = np.repeat(np.log([16.0, 20, 24, 28, 32, 42, 70]), 5)
    ranks = trend = 0
    for k in range(count):
        y = 2.75 + 0.012 * rng.standard_normal(len(x))
        lost = y > 2.75 + 0.012 * stats.norm.ppf(0.84)
        ranks += worst_rank(x, y, lost, draws=299, rng=k)[1] <= ALPHA
        trend += divergence_trend(x, rng.random(len(x)) < 0.16, draws=299, rng=k)[1] <= ALPHA
    return [
        Rate("worst rank", "losses decide who diverges", ranks, count, *SIZE),
        Rate("trend of divergence", "a sixth diverge at random", trend, count, 0.0, 0.06),
    ]


GATES = [
    Gate("M4", "size of the tests of architecture x depth", size_of_interactions, 4_000, 50),
    Gate("M4 mixed", "size of the mixed model", size_of_the_mixed_model, 600, 3),
    Gate("M4 shapes", "size of tests on two shapes", size_of_two_shapes, 4_000, 150),
    Gate("M4 looks", "size with interim looks", size_of_looks, 40_000, 20_000),
    Gate("M4 interior", "interior optima that aren't there", size_of_interior, 2_000, 100),
    Gate("M4 lost runs", "size of the tests about lost runs", worth, 2_000, 60),
    Gate("M5", "power is that of the plan", power_of_plans, 4_000, 300),
    Gate("M6", "equivalence", equivalence_of_gaps, 4_000, 300),
]

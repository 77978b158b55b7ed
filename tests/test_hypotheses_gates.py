"""Size and power by simulation with known truth: small counts every time, the gates themselves marked slow.

Architecture x depth: 6 architectures, 5 depths (16-70), true interaction 0, seeds of SD .003, shapes that deviate from the line
by 0, .0015 or .003 nats; or seeds whose SD differs threefold between architectures.
"""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scalinglab.fitting import fit
from scalinglab.hypotheses import (
    cox,
    depth_slopes,
    equivalence_power,
    freedman_lane,
    gap_se,
    heteroscedastic_bootstrap,
    interaction_f,
    j_test,
    looks,
    max_t_p,
    mixed_interaction,
    nested_bootstrap,
    slope_differences,
    slope_se,
    t_power,
    tost,
)
from scalinglab.hypotheses.cells import Cells
from scalinglab.objectives import Gaussian
from scalinglab.simulation import gemstones_design, simulate

X = np.log([16.0, 24, 32, 42, 70])
GROUPS, SEEDS = 6, 3
UNEQUAL = (0.002, 0.002, 0.003, 0.003, 0.006, 0.006)
PLAIN = Gaussian(variance="constant")


def draw(rng, *, tau, sigma, slopes=(0.0,) * GROUPS):
    """Cells and the run table behind them."""
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


def run_level_p(table):
    """The tempting test: seeds as the error of the interaction."""
    x = np.log(table["depth"].to_numpy())
    own = pd.get_dummies(table["architecture"]).to_numpy(float)
    small, large = np.column_stack([own, x]), np.hstack([own, own * x[:, None]])
    y = table["loss"].to_numpy()
    rss = [((y - M @ np.linalg.lstsq(M, y, rcond=None)[0]) ** 2).sum() for M in (small, large)]
    df = len(y) - 2 * GROUPS
    return stats.f.sf((rss[0] - rss[1]) / (GROUPS - 1) / (rss[1] / df), GROUPS - 1, df)


def p_values(rng, tau, sigma, draws):
    cells, table = draw(rng, tau=tau, sigma=sigma)
    contrasts, R = slope_differences(cells, reference="a")
    top = np.abs(contrasts["t"]).max()
    return {
        "F": interaction_f(cells, degree=1).p_value,
        "bootstrap": heteroscedastic_bootstrap(cells, degree=1, draws=draws, rng=rng).p_value,
        "Freedman-Lane": freedman_lane(cells, degree=1, draws=draws, rng=rng).p_value,
        "Freedman-Lane within": freedman_lane(cells, degree=1, draws=draws, within=True, rng=rng).p_value,
        "max t": float(max_t_p(np.full(len(R), top), R, 18.0)[0]),
        "seeds": run_level_p(table),
    }


def rates(count, tau, sigma, *, seed, draws=199):
    rng = np.random.default_rng(seed)
    return (pd.DataFrame([p_values(rng, tau, sigma, draws) for _ in range(count)]) <= 0.05).mean()


def test_cells_are_the_error_and_seeds_are_not():
    """tau .003: seeds as error reject a true null about 27 % of the time (published: .265), cell means 5 %."""
    count = 120
    made = rates(count, 0.003, 0.003, seed=1, draws=99)
    assert made["seeds"] > 0.18
    limit = stats.binom.ppf(0.9999, count, 0.05) / count
    assert (made.drop("seeds") <= limit).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tau", "sigma"), [(0.0, 0.003), (0.0015, 0.003), (0.003, 0.003), (0.0, UNEQUAL), (0.003, UNEQUAL)]
)
def test_size_of_the_interaction_tests(tau, sigma):
    """2,000 simulations; the band is .04-.06 and four standard errors (.0195) around .05 at most.

    With seeds of unequal SD and nothing else the plain F rejects 7-9 % (published .075) and permutation over groups likewise;
    the bootstrap with a variance per group and permutation within groups hold. The bootstrap is conservative (.02-.04) where
    variances are equal: 3 degrees of freedom per group.
    """
    made = rates(2_000, tau, sigma, seed=2)
    band = 0.0195
    fine = ["Freedman-Lane within"]
    if sigma == 0.003:
        fine += ["F", "Freedman-Lane", "max t"]
    assert (made[fine] - 0.05).abs().max() < band, made.to_dict()
    assert made["bootstrap"] < 0.05 + band, made.to_dict()
    if sigma == UNEQUAL and tau == 0.0:
        assert 0.06 < made["F"] < 0.10


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.0, 0.0015, 0.003])
def test_size_of_the_mixed_model(tau):
    """600 simulations: bootstrap within four standard errors of .05 from above (published .025-.053)."""
    rng = np.random.default_rng(3)
    made = np.mean([
        mixed_interaction(draw(rng, tau=tau, sigma=0.003)[1], degree=1, draws=199, rng=rng).p_value <= 0.05
        for _ in range(600)
    ])  # fmt: skip
    assert made < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 600)


def test_power_of_a_slope_is_that_of_the_formula():
    """M5: within .03 plus the error of 800 simulations."""
    rng = np.random.default_rng(4)
    slope, tau = 0.008, 0.002
    found = []
    for _ in range(800 // GROUPS):
        cells, _ = draw(rng, tau=tau, sigma=0.003, slopes=(slope,) * GROUPS)
        found += (depth_slopes(cells)["p"] <= 0.05).to_list()
    want = t_power(slope, slope_se(X, 0.003, SEEDS, tau=tau), len(X) - 2)
    assert np.mean(found) == pytest.approx(want, abs=0.03 + 2 * np.sqrt(0.25 / 800))


def test_size_and_power_of_equivalence():
    """M6: at most .05 at the margin, the planned power at 0."""
    rng = np.random.default_rng(5)
    s, sigma, margin = 3, 0.003, 0.01
    for effect, want in ((margin, 0.05), (0.0, equivalence_power(margin, gap_se(sigma, s), 2 * (s - 1)))):
        a, b = (sigma * rng.standard_normal((1_500, s)) for _ in range(2))
        gap = effect + a.mean(1) - b.mean(1)
        se = np.sqrt((a.var(1, ddof=1) + b.var(1, ddof=1)) / s)
        found = np.mean([tost(g, e, 2 * (s - 1), margin=margin).rejected for g, e in zip(gap, se, strict=True)])
        assert found == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize("count", [(3, 5, 8), (2, 4, 6), (4, 8)])
def test_looks_with_t_tests_keep_the_size(count):
    """Boundaries are of a z; the p of paired t tests on few pairs stands in for it. 20,000 paths: .05 to .06."""
    rng = np.random.default_rng(6)
    d = rng.standard_normal((20_000, count[-1]))
    for spending in ("obrien_fleming", "pocock"):
        plan = looks([n / count[-1] for n in count], spending=spending)
        hit = np.zeros(len(d), bool)
        for k, n in enumerate(count):
            t = d[:, :n].mean(1) / (d[:, :n].std(1, ddof=1) / np.sqrt(n))
            hit |= 2 * stats.t.sf(np.abs(t), n - 1) <= plan.nominal[k]
        assert 0.045 < hit.mean() < 0.0625


def design():
    d = gemstones_design(checkpoints=3, tokens=(2e10, 1e11))
    d["run_id"] += d["tokens"].map("/{:.3g}".format)
    return d


@pytest.mark.slow
def test_size_of_the_nested_bootstrap():
    """One row per run, and four checkpoints per run with run effects; 400 simulations each."""
    truth = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
    rng = np.random.default_rng(7)
    rows = gemstones_design(checkpoints=4, tokens=(2e10, 1e11))
    for table, noise in ((design(), {"sigma": 0.003}), (rows, {"sigma": 0.002, "tau": 0.003})):
        found = 0
        for _ in range(400):
            runs = simulate("chinchilla", truth, table, rng=rng, **noise)
            small, large = (fit(law, runs, objective=PLAIN) for law in ("chinchilla", "shape"))
            found += nested_bootstrap(small, large, draws=99, rng=rng).p_value <= 0.05
        assert found <= stats.binom.ppf(0.9999, 400, 0.05)


@pytest.mark.slow
def test_size_of_cox_and_j():
    """width_depth is the truth: rejected in at most 5 % of 200 simulations (measured .03 and .015), shape in nearly half."""
    truth = {"E": 1.7, "A": 30.0, "a": 0.6, "B": 2.0, "b": 0.7, "C": 400.0, "c": 0.28}
    rng = np.random.default_rng(8)
    found = np.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some draws leave the floor at its bound
        for _ in range(200):
            runs = simulate("width_depth", truth, design(), sigma=0.01, rng=rng)
            wide, shape = (fit(law, runs, objective=PLAIN) for law in ("width_depth", "shape"))
            for k, test in enumerate((cox, j_test)):
                made = test(wide, shape, draws=99, rng=rng)
                found[2 * k : 2 * k + 2] += [made.first.p_value <= 0.05, made.second.p_value <= 0.05]
    assert (found[[0, 2]] <= stats.binom.ppf(0.9999, 200, 0.05)).all(), found
    assert (found[[1, 3]] > 50).all(), found  # measured 95 and 85

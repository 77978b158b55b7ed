"""Monte-Carlo gates (size, power, coverage, negative controls): small counts every time, in full marked slow, and the table.

The simulations are benchmarks/gates, whose full table is committed as benchmarks/gates.csv.
"""

import sys

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

FOLDER = ROOT / "benchmarks" / "gates"
if not FOLDER.is_dir():
    pytest.skip("benchmarks/gates is not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))
try:
    import gate_cells
    import gate_labels
    import gate_laws
finally:
    sys.path.remove(str(FOLDER))

GATES = {g.key: g for m in (gate_cells, gate_laws, gate_labels) for g in m.GATES}
SLOW_IN_SMALL = {"M10 laws"}  # its rival laws take seconds per data set

# Tests whose size lies below the band: they are conservative, never wrong, and the documentation says so.
CONSERVATIVE = {
    "bootstrap, a variance per architecture",  # 3 degrees of freedom per architecture
    "mixed model, parametric bootstrap",
}
# Tests that the table shows to fail where their assumption does; the default analysis replaces them there.
ASSUMES_EQUAL_SEEDS = {"cell-mean F", "Freedman-Lane", "max-t of contrasts"}


def judged(rates, z):
    """Rates above their band and, of the tests that aren't known to be conservative, below it."""
    bad = []
    for r in rates:
        verdict = r.verdict(z)
        if verdict == "within" or (verdict == "below" and r.test in CONSERVATIVE):
            continue
        if r.test in ASSUMES_EQUAL_SEEDS and "seeds .002" in r.setting:
            continue
        bad.append(f"{r.test} ({r.setting}): {r.rate:.4f} of {r.of} {verdict} [{r.low:.3f}, {r.high:.3f}]")
    return bad


@pytest.mark.filterwarnings("ignore::scalinglab.errors.ScalinglabWarning")
@pytest.mark.parametrize("key", [k for k in GATES if k not in SLOW_IN_SMALL])
def test_gate_in_small(key):
    """Beyond four binomial standard errors of the band: one false alarm in some thousand runs, and the seed is fixed."""
    gate = GATES[key]
    assert not judged(gate.run(gate.small, 3), z=4.0)


def test_seeds_are_not_the_error_of_a_slope():
    """Shapes deviate by .003, seeds by .002 to .006: seeds as error reject a true null in about 27 % (published .265)."""
    rng = np.random.default_rng(5)
    p = [gate_cells.run_level_p(gate_cells.draw(rng, tau=0.003, sigma=gate_cells.UNEQUAL)[1]) for _ in range(300)]
    assert 0.18 < np.mean(np.array(p) <= 0.05) < 0.40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scalinglab.errors.ScalinglabWarning")
@pytest.mark.parametrize("key", list(GATES))
def test_gate_in_full(key):
    gate = GATES[key]
    assert not judged(gate.run(gate.full, 1), z=2.6)


def test_committed_table():
    """Every gate is in the table with its full count, and nothing lies outside its band but what is said above."""
    path = FOLDER.parent / "gates.csv"
    table = pd.read_csv(path)
    assert set(table["gate"]) == set(GATES)
    for key, rows in table.groupby("gate"):
        if key not in ("M8", "M11"):  # counted in labels and in studies where analyses disagree
            assert (rows["of"] == GATES[key].full).all(), key
    assert not judged(
        [gate_cells.Rate(r.test, r.setting, r.hits, r.of, r.low, r.high) for r in table.itertuples()], z=2.6
    )


def test_a_rate_outside_its_band_is_seen():
    rate = gate_cells.Rate("x", "y", 150, 1000, 0.04, 0.06)
    assert rate.verdict() == "above"
    assert judged([rate], 2.6)
    assert gate_cells.Rate("x", "y", 10, 1000, 0.04, 0.06).verdict() == "below"
    assert gate_cells.Rate("x", "y", 50, 1000, 0.04, 0.06).verdict() == "within"
    assert gate_cells.Rate("x", "y", 0, 0, 0.04, 0.06).verdict() == "no case"

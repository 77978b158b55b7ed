"""At the base shape arms are the same runs: counted once, cancelling exactly, and with intervals that still cover."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from learning_rate_runs import study

from scalinglab.misscaling import Margins, Method, Plan, Truth, misscaling, simulate_study, take_in
from scalinglab.misscaling.engine import analyse
from scalinglab.misscaling.identical import distinct, same_runs
from scalinglab.sweeps import load_sweep

QUICK = Method(draws=299)
BASE = 4


def shared_base(truth: str) -> pd.DataFrame:
    """A study whose scaled arms have the naive arms' runs at the smallest depth, under ids of their own."""
    runs = study(truth)
    at_base = runs["depth"] == BASE
    naive = runs[at_base & (runs["parametrization"] == "sp")]
    copies = naive.assign(parametrization="completep", run_id=naive["run_id"] + "c")
    return pd.concat([runs[~(at_base & (runs["parametrization"] == "completep"))], copies], ignore_index=True)


def test_equal_runs_are_found_and_told() -> None:
    grids = take_in(shared_base("mis-scaling"))
    cells = grids.cells
    twice = cells["same_as"] != np.arange(len(cells))
    assert set(cells["depth"][twice]) == {BASE}
    assert twice.sum() == 2  # one per architecture
    assert sum("are the same runs at depth 4, width 64: counted once" in f for f in grids.findings) == 2
    assert (take_in(study("mis-scaling")).cells["same_as"] == np.arange(16)).all()
    found = distinct(cells)
    assert len(found.rows) == 14
    assert len(np.unique(found.groups)) == 2  # the arms of each architecture are linked


def test_a_last_bit_or_another_seed_tells_runs_apart_or_not() -> None:
    cells = pd.DataFrame({"ladder": "all", "depth": [4, 4, 4], "width": 8, "setting": 0})
    z = np.tile(np.log([0.1, 0.2, 0.4]), (3, 1))
    loss = np.random.default_rng(0).normal(3.0, 0.01, (1, 3, 2)).repeat(3, 0)
    loss[1] *= 1 + 1e-14  # text and back
    loss[2, 0, 0] += 1e-4
    assert list(same_runs(cells, z, loss)) == [0, 0, 2]
    assert list(same_runs(cells.assign(depth=[4, 8, 16]), z, loss)) == [0, 1, 2]  # equal losses of two shapes: no twins


def test_readings_at_the_base_are_equal_to_the_last_bit_and_cancel() -> None:
    report = misscaling(shared_base("mis-scaling"), method=QUICK)
    made, cells = report.analysis, report.grids.cells
    assert made is not None
    i, j = (
        int(np.flatnonzero((cells["architecture"] == "pre_ln") & (cells["parametrization"] == p) & (cells["depth"] == BASE))[0])
        for p in ("sp", "completep")
    )  # fmt: skip
    C = len(cells)
    for block in range(4):
        a, b = block * C + i, block * C + j
        assert made.point.stacked()[a] == made.point.stacked()[b]
        if block != 3:  # the loss at the reference's optimum
            assert made.cov[a, a] + made.cov[b, b] - 2 * made.cov[a, b] == pytest.approx(0.0, abs=1e-18)
    assert report.verdict == "H_misscale"
    # M at the base is the loss of the naive arm at its own optimum less that of the same runs
    assert made.point.fixed[i] - made.point.tuned[j] == 0.0
    names = [n for n in report.hierarchy.cov.index if n.startswith("level")]  # type: ignore[union-attr]
    assert len(names) == 2  # sp and completep of an architecture start from one level
    assert report.hierarchy.n_runs < int(report.grids.count[made.curves.used].sum())  # type: ignore[union-attr]


def test_runs_that_are_the_same_at_every_depth_are_equivalent_without_error() -> None:
    """muP at one width is plain training under another name."""
    runs = study("neither")
    runs = runs[runs["architecture"] == "pre_ln"]
    plain = runs[runs["parametrization"] == "sp"]
    other = plain.assign(parametrization="completep", run_id=plain["run_id"] + "m")
    report = misscaling(pd.concat([plain, other], ignore_index=True), method=QUICK)
    table = report.decomposition.set_index("name")
    assert table.loc["V", "estimate"] == 0.0
    assert table.loc["V", "se"] == pytest.approx(0.0, abs=1e-12)
    assert table.loc["V", "state"] == "equivalent"
    assert report.hierarchy is not None
    assert len(report.hierarchy.table) == 1


@pytest.mark.slow
def test_intervals_cover_when_the_base_is_shared() -> None:
    """V and M of 600 studies with one base for both arms: a 95 % interval covers in 93-98.5 % (Monte-Carlo error .9 %)."""
    truth, rng = Truth("-", parametrization=0.03, drift=-0.75), np.random.default_rng(5)
    hits: dict[str, list[np.ndarray]] = {"V": [], "drift": []}
    for _ in range(12):
        cells, z, loss, roles = simulate_study(truth, Plan(), trials=50, rng=rng)
        base = np.flatnonzero(cells["depth"] == cells["depth"].min())
        same = np.arange(len(cells))
        for own in (cells["architecture"] == a for a in ("pre_ln", "A0")):
            first, second = (int(i) for i in base if own[i])
            z[second], same[second] = z[first], first
            loss[:, second] = loss[:, first]
        cells["same_as"] = same
        made = analyse(cells, z, loss, roles, method=Method(draws=199), margins=Margins(), rng=rng, parametric=True)
        for name, e, value in (("V", made.gains["V"], 0.03), ("drift", made.drifts["pre_ln", "completep"], 0.0)):
            low, high = e.interval(0.95)
            hits[name].append((low < value) & (high > value))
    for name, found in hits.items():
        assert 0.93 <= np.mean(found) <= 0.985, name


def test_the_trainer_gives_all_parametrizations_the_same_runs_at_the_base(tmp_path: Path) -> None:
    """Sixteen steps of the shipped ladder at its base and at twice its depth, on a corpus that needs no text."""
    pytest.importorskip("torch")
    from scalinglab.collecting import collect
    from scalinglab.misscaling import with_alternatives
    from scalinglab.train.launch import launch

    sweep = load_sweep("embedded:misscaling_depth")
    run = {**sweep.run, "tokens": 8192, "corpus": "automaton"}
    small = msgspec.structs.replace(sweep, shapes=sweep.shapes[:2], lrs=[0.004, 0.008, 0.016], seeds=[0], run=run)
    launch(
        with_alternatives(small, "completep", entries=["branch_multiplier"]),
        tmp_path,
        workers=1,
        progress=False,
    )
    grids = take_in(collect(tmp_path))
    twice = grids.cells[grids.cells["same_as"] != np.arange(len(grids.cells))]
    assert list(twice["depth"]) == [2, 2]  # two of three arms, at the base alone

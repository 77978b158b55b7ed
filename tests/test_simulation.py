"""Simulated run tables: the noise is the one that was asked for, the designs are realisable, the study is reproducible."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.features import R0
from scalinglab.laws import LAWS
from scalinglab.runs import validate
from scalinglab.schema import SCHEMA
from scalinglab.simulation import (
    GEMSTONES_SHAPES,
    STUDY_TRUTH,
    gemstones_design,
    grid_design,
    ladder_design,
    shape_study,
    simulate,
    write_study,
)

CHINCHILLA = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}

# published total parameters in the order of GEMSTONES_SHAPES (McLeish et al. 2025, arXiv:2502.06857, repository logs)
GEMSTONES_TOTALS = [
    48377600, 52311808, 95588096, 104440064, 66758784, 116518272, 94776832, 98710016, 102643200, 106576384, 114442752,
    103814400, 475468032, 543482880, 497457920, 1013607680, 1924161024, 517499136, 1047397120, 1904850944, 1044032000,
    2007837696,
]  # fmt: skip


def test_a_table_without_noise_is_the_law():
    design = grid_design((1e8, 1e9), (1e9, 1e10), aspects=(16, 64))
    table = simulate("chinchilla", CHINCHILLA, design, sigma=0)
    want = 1.69 + 406.4 / table["params"] ** 0.34 + 410.7 / table["tokens"] ** 0.28
    np.testing.assert_allclose(table["loss"], want, rtol=1e-14)
    assert table.attrs["simulated"]["params"] == CHINCHILLA
    assert table.attrs["source"] == [{"path": "simulated", "sha256": ""}]
    assert (table["sweep"] == "simulated").all()


def test_noise_has_the_variance_components_that_were_asked_for():
    """Moments of 400 runs x 20 checkpoints x 3 seeds: standard errors of the components are below 5 %."""
    design = pd.concat(
        [
            pd.DataFrame(
                {"run_id": f"r{k}", "depth": k + 1, "width": 64, "params": 1e8, "tokens": 1e9 * np.arange(1, 21)}
            )
            for k in range(400)
        ],
        ignore_index=True,
    )
    table = simulate("chinchilla", CHINCHILLA, design, sigma=0.01, tau=0.02, rho=0.6, cell_sd=0.03, seeds=3, rng=5)
    e = np.log(table["loss"]) - np.log(1.69 + 406.4 / table["params"] ** 0.34 + 410.7 / table["tokens"] ** 0.28)
    e = e.to_numpy().reshape(3, 400, 20)
    # the shape effect is common to seeds: covariance of run means between seeds
    mean = e.mean(-1)
    between_seeds = np.mean([np.cov(mean[a], mean[b])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))])
    assert between_seeds == pytest.approx(0.03**2, rel=0.2)
    run = (mean - mean.mean(0)).var(0, ddof=1).mean()
    ar = np.array([[0.6 ** abs(i - j) for i in range(20)] for j in range(20)]).mean() * 0.01**2
    assert run == pytest.approx(0.02**2 + ar, rel=0.12)
    # differences of neighbours hold the row noise only: variance 2 sigma^2 (1 - rho)
    assert np.diff(e, axis=-1).var() == pytest.approx(2 * 0.01**2 * 0.4, rel=0.03)
    steps = np.diff(e, axis=-1)
    lag = (steps[..., 1:] * steps[..., :-1]).mean() / (steps**2).mean()
    assert lag == pytest.approx(-(1 - 0.6) / 2, abs=0.02)  # AR(1) differences: (2 rho - 1 - rho^2) / (2 (1 - rho))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 0.1), st.floats(-0.9, 0.9))
def test_the_same_seed_gives_the_same_table_and_scales_with_sigma(seed, sigma, rho):
    design = gemstones_design(checkpoints=3, shapes=3)
    one = simulate("chinchilla", CHINCHILLA, design, sigma=sigma, rho=rho, rng=seed)
    pd.testing.assert_frame_equal(one, simulate("chinchilla", CHINCHILLA, design, sigma=sigma, rho=rho, rng=seed))
    clean = np.log(simulate("chinchilla", CHINCHILLA, design, sigma=0, rng=seed)["loss"])
    unit = np.log(simulate("chinchilla", CHINCHILLA, design, sigma=1, rho=rho, rng=seed)["loss"]) - clean
    np.testing.assert_allclose(np.log(one["loss"]) - clean, sigma * unit, atol=1e-12)
    assert "loss" not in design


def test_the_order_of_rows_does_not_matter_for_checkpoints():
    design = gemstones_design(checkpoints=6, shapes=4)
    table = simulate("chinchilla", CHINCHILLA, design, sigma=1.0, rho=0.999999, rng=1)
    e = np.log(table["loss"]) - np.log(1.69 + 406.4 / table["params"] ** 0.34 + 410.7 / table["tokens"] ** 0.28)
    assert (e.groupby(table["run_id"]).std() < 0.01).all()  # nearly perfect correlation along each run
    mixed = simulate("chinchilla", CHINCHILLA, design.sample(frac=1, random_state=1), sigma=1.0, rho=0.999999, rng=1)
    e = np.log(mixed["loss"]) - np.log(1.69 + 406.4 / mixed["params"] ** 0.34 + 410.7 / mixed["tokens"] ** 0.28)
    assert (e.groupby(mixed["run_id"]).std() < 0.01).all()


def test_gemstones_counts_are_the_published_ones():
    table = gemstones_design(checkpoints=1)
    assert table["params_total"].astype(int).tolist() == GEMSTONES_TOTALS
    assert len(GEMSTONES_SHAPES) == 22
    assert (table["params"] == table["params_total"] - 2 * 50304 * table["width"]).all()


def test_shapes_of_one_size_are_of_one_size():
    table = grid_design((5e7, 2e8, 1e9), (20,), aspects=(8, 16, 32, 64, 128), per_param=True)
    size = table.groupby("match_group")["params"].agg(["min", "max", "size"])
    assert (size["max"] / size["min"] < 1.02).all()
    assert (size["size"] == 5).all()
    assert (np.abs(np.log(table["aspect"] / np.tile([8, 16, 32, 64, 128], 3))) < 0.15).all()


@pytest.mark.parametrize("design", [grid_design((1e8,), (1e9,)), gemstones_design(), ladder_design()])
def test_designs_have_the_canonical_columns(design):
    wanted = {c for c in SCHEMA if c.startswith(("params", "flops_"))} | {"depth", "width", "aspect", "tokens", "step"}
    assert wanted <= set(design.columns)
    assert design[sorted(wanted)].notna().all().all()
    assert design.attrs["params"] == "backbone"
    validate(simulate("chinchilla", CHINCHILLA, design, sigma=0.01))


def test_the_ladder_lies_on_a_ray_of_tokens_per_parameter():
    table = ladder_design()
    assert np.log(table["tokens"] / table["params_total"]).std() < 0.02
    assert (table.groupby("match_group")["params_total"].agg(np.ptp) < 0.05 * table["params_total"].max()).all()
    deep = table[table["match_group"] == "400M"].sort_values("depth")["params"]
    assert deep.is_monotonic_increasing  # at fixed total parameters the backbone grows with depth


def test_the_embedded_study_is_what_the_script_writes(tmp_path):
    path = write_study(tmp_path)
    meta = json.loads((tmp_path / "simulated_shapes.meta.json").read_text())
    assert meta["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert meta["source"] == "simulated"
    assert meta["truth"]["params"] == STUDY_TRUTH
    assert meta["rows"] == 2 * 4 * 5 * 3 * 2
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    table = pd.read_csv(path)
    assert (table["sweep"] == "simulated").all()
    np.testing.assert_allclose(table["loss"], shape_study()["loss"], rtol=1e-9)
    from conftest import ROOT

    committed = ROOT / "data" / "tables" / "simulated_shapes.csv"
    if committed.exists():
        assert committed.read_bytes() == path.read_bytes()


def test_a_crossed_truth_differs_by_architecture():
    law = LAWS["shape"].crossed("architecture", ("pre_ln", "hyper_connections"), "H2")
    design = grid_design((1e8,), (1e9,), aspects=(R0 / 2,), architectures=("pre_ln", "hyper_connections"))
    table = simulate(law, STUDY_TRUTH, design, sigma=0)
    u = np.log(table["aspect"] / R0)
    a = np.where(table["architecture"] == "pre_ln", 406.4, 394.2)
    g = np.where(table["architecture"] == "pre_ln", 0.020, 0.035)
    want = 1.69 + a * table["params"] ** -0.34 * np.exp(g * u + 0.016 * u**2) + 410.7 * table["tokens"] ** -0.28
    np.testing.assert_allclose(table["loss"], want, rtol=1e-13)


def test_refusals():
    design = grid_design((1e8,), (1e9,))
    for bad in ({"sigma": -1}, {"sigma": 0.1, "tau": np.nan}, {"sigma": 0.1, "cell_sd": -0.1}):
        with pytest.raises(ConfigError, match="standard deviation"):
            simulate("chinchilla", CHINCHILLA, design, **bad)
    with pytest.raises(ConfigError, match="rho=1"):
        simulate("chinchilla", CHINCHILLA, design, sigma=0.1, rho=1)
    with pytest.raises(ConfigError, match="seeds=0"):
        simulate("chinchilla", CHINCHILLA, design, sigma=0.1, seeds=0)
    with pytest.raises(ConfigError, match="no value for 'beta'"):
        simulate("chinchilla", {k: v for k, v in CHINCHILLA.items() if k != "beta"}, design, sigma=0.1)
    with pytest.raises(ConfigError, match="a value for 'gamma9'"):
        simulate("chinchilla", {**CHINCHILLA, "gamma9": 1}, design, sigma=0.1)
    with pytest.raises(SchemaError, match="run_id"):
        simulate("chinchilla", CHINCHILLA, design.drop(columns="run_id"), sigma=0.1)
    with pytest.raises(ConfigError, match="sizes"):
        grid_design((), (1e9,))
    with pytest.raises(ConfigError, match="too few"):
        grid_design((1e3,), (1e9,))
    with pytest.raises(ConfigError, match="22 shapes"):
        gemstones_design(shapes=(22,))
    with pytest.raises(ConfigError, match="leaves no width"):
        ladder_design((1e5,))

"""fit(): recovers what was planted, says what it can't know, agrees with other fitters."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import (
    ConfigError,
    DroppedRunsWarning,
    FitError,
    IdentifiabilityWarning,
    SchemaError,
)
from scalinglab.fitting import fit
from scalinglab.laws import LAWS
from scalinglab.objectives import Gaussian, Huber, Robust, StudentT
from scalinglab.simulation import gemstones_design, grid_design, shape_study, simulate

PLAIN = Gaussian(variance="constant")
C1 = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
S2 = {**C1, "gamma1": 0.02, "gamma2": 0.016}
GRID = grid_design((3e7, 1e8, 3e8, 1e9), (1e9, 4e9, 2e10, 1e11), aspects=(16, 64))


@pytest.mark.parametrize("objective", [PLAIN, Gaussian(on="loss"), Huber(1e-3), Robust()], ids=lambda o: o.label)
def test_noise_free_recovery(objective):
    made = fit("chinchilla", simulate("chinchilla", C1, GRID, sigma=0), objective=objective)
    assert made.status == "converged"
    assert dict(made.params) == pytest.approx(C1, rel=1e-6)
    assert np.abs(made.residuals).max() < 1e-9


@pytest.mark.parametrize("objective", [Gaussian(), Huber(1e-3), Robust(), StudentT()], ids=lambda o: o.label)
def test_every_objective_is_close_to_the_truth_with_noise(objective):
    """32 runs with 1 permille noise: exponents within .02, some four standard errors."""
    made = fit("chinchilla", simulate("chinchilla", C1, GRID, sigma=0.001, rng=8), objective=objective)
    assert made.status == "converged"
    assert made.params["alpha"] == pytest.approx(0.34, abs=0.02)
    assert made.params["beta"] == pytest.approx(0.28, abs=0.02)


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.5, 2.5), st.floats(0.15, 0.6), st.floats(0.15, 0.6), st.floats(0.2, 1.5), st.floats(0.2, 1.5)
)  # fmt: skip
def test_any_truth_is_recovered(E, alpha, beta, a, b):
    """Terms of .2 to 1.5 nats at the centre of the design, without noise."""
    truth = {"E": E, "A": a * 2e8**alpha, "alpha": alpha, "B": b * 1e10**beta, "beta": beta}
    made = fit("chinchilla", simulate("chinchilla", truth, GRID, sigma=0), objective=PLAIN)
    assert dict(made.params) == pytest.approx(truth, rel=1e-5)


def test_the_result_does_not_depend_on_units_of_rows_order_or_seed():
    table = simulate("shape", S2, GRID, sigma=0.004, rng=1)
    made = fit("shape", table, objective=PLAIN)
    mixed = fit("shape", table.sample(frac=1, random_state=2), objective=PLAIN, rng=5)
    assert made.objective == pytest.approx(mixed.objective, rel=1e-10)
    np.testing.assert_allclose(made.params, mixed.params, rtol=1e-4)
    millions = fit("shape", table.assign(params=table["params"] / 1e6, tokens=table["tokens"] / 1e9), objective=PLAIN)
    assert made.objective == pytest.approx(millions.objective, rel=1e-10)
    assert millions.params["alpha"] == pytest.approx(made.params["alpha"], rel=1e-4)
    assert millions.params["A"] * 1e6 ** millions.params["alpha"] == pytest.approx(made.params["A"], rel=1e-3)


def test_inputs_are_not_touched():
    table = simulate("chinchilla", C1, GRID, sigma=0.01)
    before, attrs = table.copy(), dict(table.attrs)
    fit("chinchilla", table, objective=PLAIN)
    pd.testing.assert_frame_equal(table, before)
    assert table.attrs == attrs


def test_against_lmfit_on_the_same_model():
    import lmfit

    table = simulate("chinchilla", C1, GRID, sigma=0.01, rng=3)
    made = fit("chinchilla", table, objective=PLAIN)

    def model(n, d, E, A, alpha, B, beta):
        return np.log(E + A * (n / 1e8) ** -alpha + B * (d / 1e10) ** -beta)

    result = lmfit.Model(model, independent_vars=["n", "d"]).fit(
        np.log(table["loss"].to_numpy()),
        n=table["params"].to_numpy(),
        d=table["tokens"].to_numpy(),
        E=1.5,
        A=0.7,
        alpha=0.3,
        B=0.6,
        beta=0.3,
    )
    theirs = result.best_values
    assert 2 * made.objective <= result.chisqr * (1 + 1e-8)
    assert made.params["alpha"] == pytest.approx(theirs["alpha"], rel=1e-3)
    assert made.params["beta"] == pytest.approx(theirs["beta"], rel=1e-3)
    assert made.params["E"] == pytest.approx(theirs["E"], rel=1e-3)


def test_by_architecture_recovers_each_truth():
    law = LAWS["shape"].crossed("architecture", ("a", "b"), "H2")
    truth = {"E": 1.69, "A[a]": 406.4, "A[b]": 390.0, "alpha": 0.34, "gamma1[a]": 0.02, "gamma1[b]": -0.02,
             "gamma2[a]": 0.016, "gamma2[b]": 0.03, "B": 410.7, "beta": 0.28}  # fmt: skip
    design = grid_design((3e7, 1e8, 3e8), (1e9, 4e9, 2e10), aspects=(8, 32, 128), architectures=("a", "b"))
    made = fit("shape", simulate(law, truth, design, sigma=0), by="architecture", share="H2", objective=PLAIN)
    assert dict(made.params) == pytest.approx(truth, rel=1e-5)
    assert made.derived["r_star[b]"] == pytest.approx(42.67 * np.exp(0.02 / 0.06), rel=1e-5)


def test_everything_free_is_two_separate_fits():
    table = shape_study()
    both = fit("chinchilla", table, by="architecture", share=None, objective=PLAIN)
    alone = {a: fit("chinchilla", g, objective=PLAIN) for a, g in table.groupby("architecture")}
    assert both.objective == pytest.approx(sum(m.objective for m in alone.values()), rel=1e-9)
    for a, m in alone.items():
        assert both.params[f"alpha[{a}]"] == pytest.approx(m.params["alpha"], rel=1e-3)


def test_sharing_levels_nest():
    table = shape_study()
    objective = [
        fit("shape", table, by="architecture", share=level, objective=PLAIN).objective
        for level in ("H0", "H1", "H2", "H3", "H4")
    ]
    assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(objective))
    assert objective[0] == pytest.approx(fit("shape", table, objective=PLAIN).objective, rel=1e-9)


def test_weights():
    table = simulate("chinchilla", C1, GRID, sigma=0.01, rng=4)
    w = np.random.default_rng(0).integers(1, 4, len(table)).astype(float)
    by_array = fit("chinchilla", table, weights=w, objective=PLAIN)
    by_column = fit("chinchilla", table.assign(w=w), weights="w", objective=PLAIN)
    np.testing.assert_allclose(by_array.params, by_column.params, rtol=1e-9)
    repeated = table.loc[np.repeat(table.index, w.astype(int))].reset_index(drop=True)
    again = fit("chinchilla", repeated, objective=PLAIN)
    np.testing.assert_allclose(by_array.params, again.params, rtol=1e-3)
    assert by_array.objective / len(table) == pytest.approx(again.objective / len(repeated), rel=1e-8)
    assert by_array.weights.sum() == pytest.approx(len(table))
    se = fit("chinchilla", table.assign(loss_se=table["loss"] / np.sqrt(w)), weights="loss_se", objective=PLAIN)
    np.testing.assert_allclose(se.params, by_array.params, rtol=1e-3)
    for bad, why in ((-w, "not negative"), (w[:3], "shape"), ("nothing", "no column")):
        with pytest.raises(ConfigError, match=why):
            fit("chinchilla", table, weights=bad)


def test_a_variance_power_weighs_by_the_predicted_loss():
    table = simulate("chinchilla", C1, GRID, sigma=0.01, rng=4)
    flat = fit("chinchilla", table, objective=PLAIN)
    made = fit("chinchilla", table, objective=Gaussian(variance=3.5))
    want = flat.predict(table) ** -7.0
    np.testing.assert_allclose(made.weights / made.weights.sum(), want / want.sum(), rtol=1e-6)
    assert made.variance_power == 3.5


def test_seed_replicates_switch_the_weights_on():
    table = simulate("chinchilla", C1, GRID, sigma=0.004, seeds=3, rng=1)
    made = fit("chinchilla", table)
    assert np.ptp(made.weights) > 0
    assert any("replicate degrees of freedom" in n for n in made.notes)
    assert np.ptp(fit("chinchilla", table, objective=PLAIN).weights) == 0


def test_fixed_values():
    table = simulate("chinchilla", C1, GRID, sigma=0.003, rng=1)
    made = fit("chinchilla", table, fixed={"alpha": 0.34, "E": 1.69}, objective=PLAIN)
    assert made.params["alpha"] == 0.34
    assert made.params["E"] == 1.69
    free = fit("chinchilla", table, objective=PLAIN)
    assert made.objective >= free.objective
    bare = fit("chinchilla", table, fixed={"E": 0.0}, objective=PLAIN)
    direct = fit("A*params**-alpha + B*tokens**-beta", table, objective=PLAIN)
    assert bare.objective == pytest.approx(direct.objective, rel=1e-9)
    frame = made.to_frame()
    assert frame.loc["alpha", "kind"] == "fixed"
    assert np.isnan(frame.loc["alpha", "se"])


def test_at_bound_when_the_floor_collapses():
    """A truth below any floor (width and depth only, as published Gemstones fits): E is exactly 0 and it is said."""
    truth = {"E": 0.0, "A": 8.3, "a": 0.26, "B": 2.08, "b": 0.14, "C": 8e4, "c": 0.53}
    design = gemstones_design(checkpoints=5)
    table = simulate("width_depth", truth, design, sigma=0.0005, rng=3)
    table["loss"] -= 0.15  # the best floor is now negative
    made = fit("width_depth", table, objective=PLAIN)
    assert made.status == "at_bound"
    assert made.params["E"] == 0.0
    assert "E_COLLAPSE" in made.codes
    bare = fit("width_depth", table, fixed={"E": 0.0}, objective=PLAIN)
    assert made.objective == pytest.approx(bare.objective, rel=1e-8)


def test_at_bound_on_a_bound():
    law = LAWS["chinchilla"].with_(bounds={"alpha": (0.4, 1.0)})
    made = fit(law, simulate("chinchilla", C1, GRID, sigma=0.003, rng=1), objective=PLAIN)
    assert made.params["alpha"] == pytest.approx(0.4)
    assert made.status == "at_bound"


def test_not_identified_is_a_status_with_a_warning():
    one_ratio = grid_design((3e7, 1e8, 3e8, 1e9, 3e9), (20,), per_param=True, aspects=(16, 64))
    with pytest.warns(IdentifiabilityWarning, match="tokens/params"):
        made = fit("chinchilla", simulate("chinchilla", C1, one_ratio, sigma=0.002, rng=1))
    assert made.status == "not_identified"


def test_too_few_runs_and_no_variation_are_refused():
    table = simulate("chinchilla", C1, GRID, sigma=0.003)
    with pytest.raises(FitError, match="5 free parameters and the table only 4 runs"):
        fit("chinchilla", table.iloc[:4])
    with pytest.raises(FitError, match=r"tokens takes 1 value\b"):
        fit("chinchilla", table[table["tokens"] == 1e9])
    one_shape = simulate("shape", S2, grid_design((1e8,), tuple(np.geomspace(1e9, 1e11, 12))), sigma=0.003)
    with pytest.raises(FitError, match="can't tell"):
        fit("shape", one_shape)


def test_lost_runs_are_left_out_and_said():
    table = simulate("chinchilla", C1, GRID, sigma=0.003, rng=1)
    lost = table.assign(status=np.where(table.index == 3, "diverged", "finished"))
    lost.loc[3, "loss"] = np.nan
    with pytest.warns(DroppedRunsWarning, match="1 rows with status diverged"):
        made = fit("chinchilla", lost, objective=PLAIN)
    assert len(made.runs) == len(table) - 1
    assert any("left out" in n for n in made.notes)
    np.testing.assert_allclose(made.params, fit("chinchilla", table.drop(index=3), objective=PLAIN).params, rtol=1e-6)


def test_bad_losses_and_columns_are_named():
    table = simulate("chinchilla", C1, GRID, sigma=0.003)
    for value in (np.nan, -1.0, np.inf, 0.0):
        with pytest.raises(SchemaError, match="row index 7"):
            fit("chinchilla", table.assign(loss=table["loss"].where(table.index != 7, value)))
    with pytest.raises(SchemaError, match="no column 'loss'"):
        fit("chinchilla", table.drop(columns="loss"))
    with pytest.raises(SchemaError, match="is a list"):
        fit("chinchilla", [1, 2])
    with pytest.raises(FitError, match="no rows"):
        fit("chinchilla", table.iloc[:0])
    with pytest.raises(ConfigError, match="'nothing' is no column"):
        fit("chinchilla", table, by="nothing")
    with pytest.raises(ConfigError, match="no parameter of law"):
        fit("chinchilla", table, fixed={"gamma": 1.0})


def test_prediction_and_derived():
    made = fit("shape", simulate("shape", S2, GRID, sigma=0), objective=PLAIN)
    assert made.derived["r_star"] == pytest.approx(42.67 * np.exp(-0.02 / 0.032), rel=1e-4)
    assert made.derived["a_opt"] == pytest.approx(0.28 / 0.62, rel=1e-5)
    new = pd.DataFrame({"params": [7e9], "tokens": [2e12], "depth": [32], "width": [4096]})
    u = np.log(128 / 42.67)
    want = 1.69 + 406.4 * 7e9**-0.34 * np.exp(0.02 * u + 0.016 * u * u) + 410.7 * 2e12**-0.28
    assert made.predict(new)[0] == pytest.approx(want, rel=1e-6)
    assert made.predict(new, pd.DataFrame([dict(made.params)] * 3)).shape == (3, 1)
    with pytest.raises(SchemaError, match="lacks"):
        made.predict(new.drop(columns="tokens"))


def test_refit_with_weights_is_a_fit_of_the_kept_rows():
    table = simulate("chinchilla", C1, GRID, sigma=0.003, rng=1)
    made = fit("chinchilla", table, objective=PLAIN)
    keep = np.random.default_rng(1).random(len(table)) < 0.8
    got = made.refit(weights=keep[None].astype(float))
    alone = fit("chinchilla", table[keep], objective=PLAIN)
    np.testing.assert_allclose(got.params.iloc[0], alone.params, rtol=1e-4)
    new = made.log_loss + 0.001
    moved = made.refit(log_loss=new[None])
    again = fit("chinchilla", table.assign(loss=np.exp(new)), objective=PLAIN)
    np.testing.assert_allclose(moved.params.iloc[0], again.params, rtol=1e-4)


def test_a_formula_is_a_law():
    table = simulate("chinchilla", C1, GRID, sigma=0.003, rng=1)
    one = fit("E + A*params**-alpha + B*tokens**-beta", table, objective=PLAIN)
    assert one.objective == pytest.approx(fit("chinchilla", table, objective=PLAIN).objective, rel=1e-10)

"""Learning-rate curves: exact against closed forms and second implementations, and honest about what they can't locate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, FitError, SchemaError
from scalinglab.misscaling import fit_curves, lr_curvature, take_in
from scalinglab.misscaling.curves import STATUS, evaluate, interpolate, vertex
from scalinglab.misscaling.noise import draw_means, run_noise
from scalinglab.misscaling.pooling import pool_curvature
from scalinglab.misscaling.surface import drift_cost
from scalinglab.readers import read_runs

LN2 = np.log(2.0)


def grid(shapes: int = 3, rates: int = 7) -> np.ndarray:
    return np.log(0.001) + LN2 * np.arange(rates)[None] + 0.2 * np.arange(shapes)[:, None]


def asymmetric(
    z: np.ndarray, optimum: np.ndarray, *, best: float = 3.0, a: float = 0.02, b3: float = 0.003
) -> np.ndarray:
    d = z - optimum[:, None]
    return best + a * d**2 + b3 * d**3


@pytest.mark.parametrize("model", ["shared", "cubic"])
def test_a_cubic_without_noise_is_found_exactly(model: str) -> None:
    z = grid()
    optimum = z.mean(-1) + np.array([-0.3, 0.0, 0.4])
    made = fit_curves(z, asymmetric(z, optimum), np.full(z.shape, 2.0), model=model)
    assert made.usable.all()
    np.testing.assert_allclose(made.optimum, optimum, atol=1e-9)  # linear algebra: rounding only
    np.testing.assert_allclose(made.minimum, 3.0, atol=1e-10)
    np.testing.assert_allclose(made.curvature, 0.02, atol=1e-9)
    np.testing.assert_allclose(made.coefficients[:, 3], 0.003, atol=1e-9)


def test_a_quadratic_is_that_of_polyfit_on_the_window() -> None:
    rng = np.random.default_rng(1)
    z = grid(4)
    y = asymmetric(z, z.mean(-1)) + 0.004 * rng.standard_normal(z.shape)
    made = fit_curves(z, y, np.ones(z.shape), model="quadratic", window=0.06)
    for c in range(4):
        keep = y[c] <= y[c].min() + 0.06
        b2, b1, b0 = np.polyfit(z[c][keep], y[c][keep], 2)
        assert made.optimum[c] == pytest.approx(-b1 / (2 * b2), abs=1e-8)
        assert made.minimum[c] == pytest.approx(b0 - b1**2 / (4 * b2), abs=1e-8)


def test_the_shared_cubic_is_that_of_one_joint_regression() -> None:
    rng = np.random.default_rng(2)
    z = grid(3)
    y = asymmetric(z, z.mean(-1) + 0.1) + 0.004 * rng.standard_normal(z.shape)
    n = rng.integers(1, 4, z.shape).astype(float)
    groups = np.array([0, 0, 1])
    made = fit_curves(z, y, n, groups=groups, window=0.2)
    for group, members in ((0, [0, 1]), (1, [2])):
        columns, target, weight = [], [], []
        for k, c in enumerate(members):
            x = z[c] - made.centre[c]
            own = np.zeros((len(x), 3 * len(members) + 1))
            own[:, 3 * k : 3 * k + 3] = x[:, None] ** np.arange(3)
            own[:, -1] = x**3
            keep = made.used[c]
            columns.append(own[keep])
            target.append(y[c][keep])
            weight.append(np.sqrt(n[c][keep]))
        w = np.concatenate(weight)
        b = np.linalg.lstsq(np.concatenate(columns) * w[:, None], np.concatenate(target) * w, rcond=None)[0]
        assert made.coefficients[members[0], 3] == pytest.approx(b[-1], abs=1e-9), group
        np.testing.assert_allclose(made.coefficients[members][:, :3].ravel(), b[:-1], atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.floats(-4, 4), st.floats(-2, 2), st.sampled_from(["shared", "cubic", "quadratic"]))
def test_moving_the_grid_moves_the_optimum_and_nothing_else(shift: float, lift: float, model: str) -> None:
    rng = np.random.default_rng(3)
    z = grid()
    y = asymmetric(z, z.mean(-1) + 0.1) + 0.002 * rng.standard_normal(z.shape)
    one = fit_curves(z, y, np.ones(z.shape), model=model)
    other = fit_curves(z + shift, y + lift, np.ones(z.shape), model=model)
    np.testing.assert_allclose(other.optimum, one.optimum + shift, atol=1e-7)
    np.testing.assert_allclose(other.minimum, one.minimum + lift, atol=1e-7)
    np.testing.assert_allclose(other.curvature, one.curvature, atol=1e-8)


def test_leading_axes_are_fitted_one_by_one() -> None:
    rng = np.random.default_rng(4)
    z = grid()
    y = asymmetric(z, z.mean(-1)) + 0.004 * rng.standard_normal((5, *z.shape))
    made = fit_curves(z, y, np.ones(z.shape), window=0.06)
    for t in range(5):
        np.testing.assert_allclose(
            made.optimum[t], fit_curves(z, y[t], np.ones(z.shape), window=0.06).optimum, atol=1e-10
        )


def test_what_cannot_be_located_is_refused_with_its_reason() -> None:
    z = np.tile(grid(1), (6, 1))
    z[5, 5:] = np.nan
    middle = z[0].mean()
    y = asymmetric(z, np.array([middle, -99.0, z[0, 1], middle, middle, z[0, 4] - 0.1]))
    y[1] = 3.0 + 0.02 * np.arange(7)  # best at the smallest rate
    y[3] = np.inf  # all diverged
    y[4] = np.where(np.arange(7) == 3, 3.0, 3.5)  # nothing near the best
    made = fit_curves(z, y, np.where(np.isfinite(z), 1.0, 0.0), model="cubic")
    assert [STATUS[k] for k in made.status] == ["interior", "boundary", "one-sided", "diverged", "too few", "boundary"]


def test_divergence_above_the_optimum_brackets_it() -> None:
    z = grid(1)
    y = asymmetric(z, z.mean(-1) + 0.3)
    y[0, 5:] = np.inf
    made = fit_curves(z, y, np.ones(z.shape), model="quadratic", window=0.2)
    assert made.usable.all()
    assert not made.used[0, 5:].any()


def test_a_parabola_puts_an_asymmetric_optimum_too_low() -> None:
    """As on the public grids: losses rise faster above the optimum."""
    z = grid(1)
    d = z - z.mean()
    y = 3 + 0.016 * d**2 + 0.01 * np.maximum(d, 0) ** 3  # the one-sided form, which neither model has
    bias = [
        fit_curves(z, y, np.ones(z.shape), model=m, window=0.1).optimum[0] - z.mean() for m in ("quadratic", "cubic")
    ]
    assert bias[0] < -0.1
    assert abs(bias[1]) < 0.5 * abs(bias[0])


def test_wrong_options_are_refused() -> None:
    z = grid()
    with pytest.raises(ConfigError, match="choose one of shared"):
        fit_curves(z, z, z, model="spline")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window"):
        fit_curves(z, z, z, window=0.0)


def test_vertex_of_a_parabola_needs_no_cubic_term() -> None:
    at, a = vertex(np.array([1.0, -0.4, 0.2, 0.0]))
    assert at == pytest.approx(1.0)
    assert a == pytest.approx(0.2)
    assert evaluate(np.array([1.0, -0.4, 0.2, 0.0]), np.array(1.0)) == pytest.approx(0.8)


def test_interpolation_is_exact_for_cubics_and_knows_its_ends() -> None:
    z = np.array([[0.0, 1.0, 2.5, 3.0, 4.0, np.nan]])
    f = lambda x: 1 + x - 0.5 * x**2 + 0.1 * x**3  # noqa: E731
    y = np.where(np.isfinite(z), f(z), np.inf)
    for at in (0.3, 1.7, 3.9, 4.0):
        assert interpolate(z, y, np.array([at]))[0] == pytest.approx(f(at), abs=1e-10)
    assert np.isnan(interpolate(z, y, np.array([-0.5]))[0])
    y[0, 4] = np.inf
    assert np.isposinf(interpolate(z, y, np.array([3.5]))[0])
    assert np.isfinite(interpolate(z, y, np.array([2.9]))[0])


# ---- noise ---------------------------------------------------------------------------------------------------------------
def test_noise_of_runs_and_of_seeds_is_told_apart() -> None:
    """Planted SDs .005 (run) and .004 (seed by shape) over 200 shapes x 4 seeds: 4 % and 12 % are three Monte-Carlo errors."""
    rng = np.random.default_rng(5)
    z = np.tile(grid(1), (200, 1))
    loss = asymmetric(z, z.mean(-1))[..., None] + 0.005 * rng.standard_normal((200, 7, 4))
    loss = loss + 0.004 * rng.standard_normal((200, 1, 4)) + 0.02 * rng.standard_normal((1, 1, 4))
    curves = fit_curves(z, loss.mean(-1), np.full(z.shape, 4.0))
    made = run_noise(loss, z, curves, model="shared", groups=1)
    assert made.sigma == pytest.approx(0.005, rel=0.04)
    assert made.row == pytest.approx(0.004, rel=0.12)


@pytest.mark.parametrize("how", ["residuals", "seeds"])
def test_bootstrap_draws_have_the_spread_of_fresh_data(how: str) -> None:
    """SD of the optimum over draws, averaged over shapes, against its SD over fresh data sets; 12 % is the Monte-Carlo error."""
    rng = np.random.default_rng(6)
    z = np.tile(grid(1), (30, 1))
    S = 12
    truth = asymmetric(z, z.mean(-1), b3=0.0)[..., None]  # what a parabola leaves would count as noise
    fresh = []
    for _ in range(40):
        loss = truth + 0.006 * rng.standard_normal((30, 7, S))
        fresh.append(fit_curves(z, loss.mean(-1), np.full(z.shape, float(S)), model="quadratic").optimum)
    curves = fit_curves(z, loss.mean(-1), np.full(z.shape, float(S)), model="quadratic")
    noise = run_noise(loss, z, curves, model="quadratic", groups=0)
    d = draw_means(loss, z, curves, noise, draws=400, rng=rng, how=how)  # type: ignore[arg-type]
    again = fit_curves(z, d.mean, d.count, model="quadratic", used=curves.used & (d.count > 0))
    found = np.sqrt(d.inflate * again.optimum.var(0).mean())
    assert found == pytest.approx(np.sqrt(np.stack(fresh).var(0).mean()), rel=0.12)
    assert d.whole_seeds == (how == "seeds")


def test_redrawing_one_seed_is_refused() -> None:
    z = grid(1)
    loss = asymmetric(z, z.mean(-1))[..., None]
    curves = fit_curves(z, loss[..., 0], np.ones(z.shape))
    noise = run_noise(loss, z, curves, model="shared", groups=1)
    with pytest.raises(ConfigError, match="two seeds"):
        draw_means(loss, z, curves, noise, draws=9, rng=np.random.default_rng(0), how="seeds")


# ---- pooling -------------------------------------------------------------------------------------------------------------
def pooled(a: np.ndarray, *, noise: float = 0.004, seed: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = np.tile(grid(1), (len(a), 1))
    y = 3 + a[:, None] * (z - z.mean()) ** 2 + noise * rng.standard_normal(z.shape)
    plain = fit_curves(z, y, np.ones(z.shape), model="quadratic", window=0.15)
    made, pool = pool_curvature(plain, z, np.ones(z.shape), np.zeros(len(a), int), model="quadratic", sigma=noise)
    return plain.curvature, made.curvature, pool.share


def test_equal_curvatures_are_drawn_together_and_different_ones_left() -> None:
    plain, made, share = pooled(np.full(12, 0.02))
    assert made.std() < 0.6 * plain.std()
    assert np.abs(made - 0.02).mean() < np.abs(plain - 0.02).mean()
    plain, made, share = pooled(np.linspace(0.01, 0.06, 12), noise=1e-4)
    assert share.max() < 0.01
    np.testing.assert_allclose(made, plain, rtol=0.01)


def test_full_pooling_is_least_squares_with_one_curvature() -> None:
    """Second implementation: a joint regression with a common quadratic term."""
    rng = np.random.default_rng(8)
    z = np.tile(grid(1), (5, 1))
    y = 3 + 0.02 * (z - z.mean()) ** 2 + 0.003 * rng.standard_normal(z.shape)
    plain = fit_curves(z, y, np.ones(z.shape), model="quadratic", window=1.0)
    _, pool = pool_curvature(plain, z, np.ones(z.shape), np.zeros(5, int), model="quadratic", sigma=0.003)
    from dataclasses import replace

    whole = replace(pool, share=np.ones(5), weight=np.ones(5))
    made, _ = pool_curvature(plain, z, np.ones(z.shape), np.zeros(5, int), model="quadratic", sigma=0.003, pool=whole)
    x = z[0] - made.centre[0]
    X = np.zeros((35, 11))
    for c in range(5):
        X[7 * c : 7 * c + 7, 2 * c], X[7 * c : 7 * c + 7, 2 * c + 1] = 1, x
        X[7 * c : 7 * c + 7, 10] = x**2
    b = np.linalg.lstsq(X, y.ravel(), rcond=None)[0]
    np.testing.assert_allclose(made.curvature, b[10], atol=1e-10)
    np.testing.assert_allclose(made.minimum, b[0:10:2] - b[1:10:2] ** 2 / (4 * b[10]), atol=1e-10)


# ---- public grids --------------------------------------------------------------------------------------------------------
def test_curvature_of_simulated_surfaces() -> None:
    import pandas as pd

    z, s = np.meshgrid(np.log(0.001) + LN2 * np.arange(6), np.log(1e5) + LN2 * np.arange(5))
    loss = 2.5 + 0.0155 * (z - z.mean()) ** 2 + 0.01 * (s - s.mean()) ** 2 - 0.004 * (z - z.mean()) * (s - s.mean())
    runs = pd.DataFrame(
        {"depth": 8, "width": 512, "lr": np.exp(z.ravel()), "batch_tokens": np.exp(s.ravel()), "loss": loss.ravel()}
    )
    made = lr_curvature(runs)
    assert made["curvature"].to_numpy() == pytest.approx([0.0155], abs=1e-9)
    assert made["optimum_lr"].iloc[0] == pytest.approx(np.exp(z.mean()), rel=1e-6)
    with pytest.raises(SchemaError, match="'lr'"):
        lr_curvature(runs.drop(columns="lr"))
    with pytest.raises(FitError, match="8 runs"):
        lr_curvature(runs.iloc[:5])


def test_the_cost_of_a_drift_is_that_of_the_parabola() -> None:
    """From 16 to 70 blocks an optimum that falls as depth^-1/2 costs .0085 nats, as depth^-1 .034, at curvature .0155."""
    assert drift_cost(-0.5, 70 / 16) == pytest.approx(0.0085, abs=1e-4)
    assert drift_cost(-1.0, 70 / 16) == pytest.approx(0.034, abs=3e-4)
    with pytest.raises(ConfigError, match="span"):
        drift_cost(-0.5, 0.5)


@pytest.mark.shared
def test_step_law_grids_have_the_published_curvature_and_parabola_bias(shared: Path) -> None:
    """Li et al. 2025: median curvature .0155 over 17 settings, range .010-.026; the parabola's vertex lies .11 to .14 below."""
    runs = read_runs(shared / "steplaw_dense.csv")
    made = lr_curvature(runs)
    assert len(made) == 17
    assert made["curvature"].median() == pytest.approx(0.0155, abs=0.001)
    assert made["curvature"].min() == pytest.approx(0.010, abs=0.001)
    assert made["curvature"].max() == pytest.approx(0.026, abs=0.001)
    grids = take_in(runs)
    for window in (0.06, 0.07):
        q, c = (fit_curves(grids.z, grids.mean, grids.count, model=m, window=window) for m in ("quadratic", "cubic"))
        both = q.usable & c.usable
        assert both.sum() > 100
        assert -0.14 <= float(np.median((q.optimum - c.optimum)[both])) <= -0.11

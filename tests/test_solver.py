"""Derivatives against complex step and differences, optima against scipy, batches against single solves."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares, minimize
from test_laws import ALGEBRA, draw, table

from scalinglab.blocks import Scratch, derivatives
from scalinglab.encoding import encode
from scalinglab.errors import ConfigError
from scalinglab.laws import LAWS
from scalinglab.objectives import Gaussian, Huber, Robust, StudentT, parse_objective
from scalinglab.solver import COLLAPSED, solve

OBJECTIVES = [
    Gaussian(variance="constant"), Gaussian(on="loss", variance="constant"), Huber(0.02), Huber(0.02, on="loss"), Robust(),
    Robust(on="loss"), StudentT(), StudentT(3.0, on="loss"),
]  # fmt: skip


def complex_log_loss(problem, theta):
    """The law of a Problem once more, in complex arithmetic and without its softmax: log of a plain sum."""
    z = []
    for b in problem.blocks:
        eta = b.X @ theta[b.index]
        z.append(eta + (0 if b.offset is None else b.offset))
    grouped = {k for _, members in problem.groups for k in members}
    total = sum(np.exp(z[k]) for k in range(len(z)) if k not in grouped)
    for position, members in problem.groups:
        d = np.exp(theta[position])
        inside = sum(
            np.exp(z[k] / d + (0 if problem.blocks[k].inner is None else problem.blocks[k].inner)) for k in members
        )
        total = total + inside**d
    return np.log(total)


def smooth_value(objective, y, m, w, scale):
    """The objective in complex arithmetic; the branches of Huber are chosen by the real part."""
    r = y - m if objective.on == "log_loss" else np.exp(y) - np.exp(m)
    if isinstance(objective, Gaussian):
        rho = r * r / 2
    elif isinstance(objective, StudentT):
        rho = (objective.df + 1) / 2 * np.log(1 + r * r / (objective.df * scale**2)) + np.log(scale)
    else:
        delta = objective.delta if isinstance(objective, Huber) else objective.tuning * scale
        sign = np.where(r.real >= 0, 1, -1)
        rho = np.where(np.abs(r.real) <= delta, r * r / 2, delta * (sign * r - delta / 2))
    return (w * rho).sum()


def case(key, seed=0, noise=0.03):
    """A law at a point where each of its terms is some .3 to 1 nats, with noisy losses and uneven weights."""
    runs, rng = table(n=30, seed=seed), np.random.default_rng(seed)
    encoding = encode(LAWS[key], runs)
    problem = encoding.problem
    theta = encoding.internal(draw(LAWS[key].names, rng))
    outer = {k: np.exp(theta[position]) for position, members in problem.groups for k in members}
    for k, b in enumerate(problem.blocks):
        d = outer.get(k, 1.0)
        z = b.X @ theta[b.index] + (0 if b.offset is None else b.offset) + d * (0 if b.inner is None else b.inner)
        own = [p for p in b.index if p in problem.amplitudes]
        theta[own] += np.log(rng.uniform(0.3, 1.0)) - z.mean()
    y = problem.log_loss(theta)[0] + noise * rng.standard_normal(len(runs))
    return encoding, theta + 0.01 * rng.standard_normal(len(theta)), y, rng.uniform(0.5, 2, len(runs)), rng


@pytest.mark.parametrize("key", ALGEBRA)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.label)
def test_gradient_is_the_complex_step_and_hessian_its_difference(key, objective):
    encoding, theta, y, w, rng = case(key)
    problem = encoding.problem
    scale = np.full((3, 1), 0.025)
    batch = theta + 0.01 * rng.standard_normal((3, len(theta)))
    # Huber has no second derivative where a residual sits on the threshold: such rows get no weight
    h = np.exp(y) if objective.on == "loss" else 1.0
    for threshold in (getattr(objective, "delta", None), getattr(objective, "tuning", np.nan) * 0.025):
        if threshold is not None:
            m = problem.log_loss(batch)
            r = np.exp(y) - np.exp(m) if objective.on == "loss" else y - m
            w = np.where((np.abs(np.abs(r) - threshold) < 1e-4 * h).any(0), 0.0, w)
    assert (w > 0).sum() > 20
    value, g, H = derivatives(problem, batch, y, w, objective, scale)
    _, g2, H2 = derivatives(
        problem, batch, np.repeat(y[None], 3, 0), np.repeat(w[None], 3, 0), objective, scale, Scratch()
    )
    np.testing.assert_allclose(g2, g, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(H2, H, rtol=1e-12, atol=1e-13)

    def gradient(t):
        out = np.empty(len(t))
        for k in range(len(t)):
            z = t.astype(complex)
            z[k] += 1e-30j
            out[k] = smooth_value(objective, y, complex_log_loss(problem, z), w, 0.025).imag / 1e-30
        return out

    for r, t in enumerate(batch):
        plain = smooth_value(objective, y, complex_log_loss(problem, t.astype(complex)), w, 0.025).real
        assert value[r] == pytest.approx(plain, rel=1e-11)
        size = np.abs(g[:, r]).max()
        np.testing.assert_allclose(g[:, r], gradient(t), rtol=1e-9, atol=1e-12 * size)
        h = 1e-5  # differences of fourth order of the complex-step gradient
        rows = [
            (8 * (gradient(t + h * e) - gradient(t - h * e)) - gradient(t + 2 * h * e) + gradient(t - 2 * h * e))
            / (12 * h)
            for e in np.eye(len(t))
        ]
        np.testing.assert_allclose(H[:, :, r], np.array(rows), rtol=1e-6, atol=1e-8 * (np.abs(H[:, :, r]).max() + size))
        np.testing.assert_array_equal(H[:, :, r], H[:, :, r].T)


@pytest.mark.parametrize("key", ALGEBRA)
def test_jacobian_is_the_complex_step(key):
    encoding, theta, *_ = case(key)
    J = encoding.problem.jacobian(theta)
    for k in range(len(theta)):
        z = theta.astype(complex)
        z[k] += 1e-30j
        np.testing.assert_allclose(J[:, k], complex_log_loss(encoding.problem, z).imag / 1e-30, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("key", ["kaplan_n", "kaplan", "chinchilla", "shape", "shape_data", "width_depth"])
def test_newton_ends_where_scipy_does(key):
    """Same objective, same start: least_squares for squares, BFGS for the others, to 1e-10 of the objective."""
    encoding, theta, y, w, _ = case(key, seed=3, noise=0.005)
    problem = encoding.problem
    ours = solve(problem, theta, y, w, Gaussian(variance="constant"))
    assert ours.converged.all()
    theirs = least_squares(
        lambda t: np.sqrt(w) * (y - complex_log_loss(problem, t)), theta, xtol=1e-15, ftol=1e-15, gtol=1e-15, x_scale="jac",
        max_nfev=5000,
    )  # fmt: skip
    assert ours.objective[0] <= theirs.cost * (1 + 1e-10)
    if theirs.cost <= ours.objective[0] * (1 + 1e-9):
        np.testing.assert_allclose(
            np.exp(complex_log_loss(problem, ours.theta[0])), np.exp(complex_log_loss(problem, theirs.x)), rtol=1e-6
        )


@pytest.mark.parametrize(
    "objective", [Gaussian(on="loss", variance="constant"), Huber(0.003), Robust(), StudentT()], ids=lambda o: o.label
)
def test_other_objectives_end_where_scipy_does(objective):
    encoding, theta, y, w, _ = case("chinchilla", seed=3, noise=0.005)
    problem = encoding.problem
    ours = solve(problem, theta, y, w, objective)
    scale = ours.scale

    def both(t):
        value, g, _ = derivatives(problem, t[None], y, w, objective, scale)
        return 1e4 * value[0], 1e4 * g[:, 0]

    theirs = minimize(both, theta, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000})
    theirs = minimize(both, theirs.x, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000})
    assert ours.converged.all()
    assert 1e4 * ours.objective[0] <= theirs.fun + 1e-9 * abs(theirs.fun)
    np.testing.assert_allclose(ours.theta[0], theirs.x, atol=2e-4)


def test_scale_of_student_maximises_its_likelihood():
    rng = np.random.default_rng(0)
    r, w = rng.standard_t(4, (1, 400)) * 0.01, rng.uniform(0.5, 2, 400)
    objective = StudentT()
    s = objective.scale(r, w)
    value = [(w * objective.terms(r, s * f)[0]).sum() for f in (0.99, 1.0, 1.01)]
    assert value[1] < value[0]
    assert value[1] < value[2]
    grid = np.geomspace(0.5, 2, 2001)
    best = grid[np.argmin([(w * objective.terms(r, s * f)[0]).sum() for f in grid])]
    assert best == pytest.approx(1, abs=2e-3)


def test_scale_of_robust_is_the_mad():
    rng = np.random.default_rng(0)
    r = rng.standard_normal((2, 4001))
    got = Robust().scale(r, np.ones(4001))
    np.testing.assert_allclose(got[:, 0], 1.4826022185056018 * np.median(np.abs(r), axis=1), rtol=1e-12)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["chinchilla", "shape", "kaplan"]), st.sampled_from(OBJECTIVES[:3]))
def test_rows_of_a_batch_do_not_know_each_other(seed, key, objective):
    """Each row of a batch equals its own single solve; BLAS may sum in another order, so to 1e-10, not bit for bit."""
    encoding, theta, y, w, rng = case(key, seed=seed % 11, noise=0.01)
    R = 7
    starts = theta + 0.02 * rng.standard_normal((R, len(theta)))
    Y = y + 0.003 * rng.standard_normal((R, len(y)))
    W = rng.integers(0, 4, (R, len(y))) * w
    together = solve(encoding.problem, starts, Y, W, objective, max_iter=60)
    for r in range(R):
        alone = solve(encoding.problem, starts[[r]], Y[[r]], W[[r]], objective, max_iter=60)
        assert alone.converged[0] == together.converged[r]
        if together.converged[r]:
            assert together.objective[r] == pytest.approx(alone.objective[0], rel=1e-10, abs=1e-25)
    subset = solve(encoding.problem, starts[::-1], Y[::-1], W[::-1], objective, max_iter=60)
    np.testing.assert_allclose(subset.objective[::-1], together.objective, rtol=1e-10)


def test_batches_larger_than_a_block_are_the_same():
    encoding, theta, y, _, rng = case("chinchilla", noise=0.01)
    R = 7000  # more than 200,000 / 30 rows
    W = 0.5 + rng.exponential(1, (R, len(y)))
    starts = np.repeat(theta[None], R, 0)
    big = solve(encoding.problem, starts, y, W, Gaussian(variance="constant"))
    assert big.objective.shape == (R,)
    some = [0, 1, 6665, 6666, 6667, 6999]
    small = solve(encoding.problem, starts[some], y, W[some], Gaussian(variance="constant"))
    np.testing.assert_allclose(big.objective[some], small.objective, rtol=1e-11)


@pytest.mark.parametrize("objective", [Gaussian(variance="constant"), Huber(1e-3), StudentT()], ids=lambda o: o.label)
def test_a_weight_of_two_is_a_duplicate_row(objective):
    runs = pd.concat([table(n=30, seed=4)], ignore_index=True)
    rng = np.random.default_rng(4)
    count = rng.integers(0, 3, 30)
    twice = runs.loc[np.repeat(np.arange(30), count)].reset_index(drop=True)
    p = {"E": 1.7, "A": 300.0, "alpha": 0.3, "B": 500.0, "beta": 0.32}
    noise = 0.01 * rng.standard_normal(30)
    y = np.log(LAWS["chinchilla"].loss(p, runs)) + noise
    first, second = encode(LAWS["chinchilla"], runs), encode(LAWS["chinchilla"], twice)
    a = solve(first.problem, first.internal(p), y, count.astype(float), objective)
    b = solve(second.problem, second.internal(p), np.repeat(y, count), np.ones(len(twice)), objective)
    assert a.objective[0] == pytest.approx(b.objective[0], rel=1e-7 if objective.needs_scale else 1e-10)
    np.testing.assert_allclose(first.natural(a.theta), second.natural(b.theta), rtol=1e-4)


def test_the_floor_collapses_to_zero_with_a_certificate():
    """Data whose best floor is negative: E ends at exactly 0 and the gradient says it should stay there."""
    runs = table(n=40, seed=5)
    y = np.log(HAND_NEGATIVE(runs).to_numpy())
    encoding = encode(LAWS["chinchilla"], runs)
    theta = encoding.internal({"E": 0.5, "A": 20.0, "alpha": 0.12, "B": 20.0, "beta": 0.12})
    objective = Gaussian(variance="constant")
    found = solve(encoding.problem, theta, y, np.ones(40), objective)
    assert found.converged[0]
    params = encoding.frame(found.theta).iloc[0]
    assert params["E"] == 0.0
    # KKT: the derivative of the objective in E itself (not ln E) is not negative at 0
    eps = 1e-6
    at = dict(params)
    up = 0.5 * ((y - np.log(LAWS["chinchilla"].loss({**at, "E": eps}, runs))) ** 2).sum()
    assert (up - found.objective[0]) / eps > 0
    # and the law without a floor has the same optimum
    bare = encode(LAWS["chinchilla"].with_(fixed={"E": 0.0}), runs)
    same = solve(bare.problem, bare.internal(at), y, np.ones(40), objective)
    assert same.objective[0] == pytest.approx(found.objective[0], rel=1e-9)


def HAND_NEGATIVE(runs):  # noqa: N802 - a constant-like truth
    return -0.3 + 20 / runs["params"] ** 0.1 + 20 / runs["tokens"] ** 0.1


def test_a_floor_that_starts_at_zero_reopens():
    encoding, _, _, _, _ = case("chinchilla", seed=3)
    runs = table(n=30, seed=3)
    p = {"E": 1.7, "A": 300.0, "alpha": 0.3, "B": 500.0, "beta": 0.32}
    y = np.log(LAWS["chinchilla"].loss(p, runs))
    start = encoding.internal({**p, "E": 0.0})
    found = solve(encoding.problem, start, y, np.ones(30), Gaussian(variance="constant"), max_iter=500)
    assert found.converged[0]
    assert encoding.frame(found.theta).iloc[0]["E"] == pytest.approx(1.7, rel=1e-5)


def test_a_vanishing_floor_does_not_hold_back_the_others():
    """Leaving out a run can reopen a collapsed floor for a moment; its huge relative step must not freeze the rest."""
    runs = table(n=40, seed=5)
    y = np.log(HAND_NEGATIVE(runs).to_numpy())
    encoding = encode(LAWS["chinchilla"], runs)
    # starts below the data ask for a floor at first, though the best one is 0
    starts = np.stack(
        [encoding.internal({"E": 0.0, "A": A, "alpha": 0.12, "B": 20.0, "beta": 0.12}) for A in (16, 19, 19.5)]
    )
    best = solve(encoding.problem, starts, y, np.ones(40), OBJECTIVES[0], max_iter=500)
    found = solve(encoding.problem, starts, y, np.ones(40), OBJECTIVES[0], max_iter=25)
    assert found.converged.all()
    assert (encoding.frame(found.theta)["E"] == 0).all()
    np.testing.assert_allclose(found.objective, best.objective.min(), rtol=1e-9)


def test_frozen_parameters_stay_and_the_others_are_optimal():
    encoding, theta, y, w, _ = case("chinchilla", noise=0.01)
    at = encoding.coordinates.index("alpha")
    frozen = np.zeros(len(theta), bool)
    frozen[at] = True
    starts = np.repeat(theta[None], 3, 0)
    starts[:, at] = [0.2, 0.3, 0.4]
    objective = Gaussian(variance="constant")
    found = solve(encoding.problem, starts, y, w, objective, frozen=frozen)
    np.testing.assert_array_equal(found.theta[:, at], [0.2, 0.3, 0.4])
    _, g, _ = derivatives(encoding.problem, found.theta, y, w, objective, found.scale)
    live = found.theta[:, :] > COLLAPSED
    assert np.abs(np.where(live.T, g, 0)[~frozen]).max() < 1e-6
    free = solve(encoding.problem, theta, y, w, objective)
    assert (found.objective >= free.objective[0] * (1 - 1e-12)).all()


def test_bounds_are_kept_with_a_certificate():
    runs = table(n=30, seed=3)
    p = {"E": 1.7, "A": 300.0, "alpha": 0.3, "B": 500.0, "beta": 0.32}
    y = np.log(LAWS["chinchilla"].loss(p, runs))
    encoding = encode(LAWS["chinchilla"].with_(bounds={"alpha": (0.35, 0.9), "E": (0.1, 1.5)}), runs)
    found = solve(
        encoding.problem,
        encoding.internal({**p, "alpha": 0.4, "E": 1.2}),
        y,
        np.ones(30),
        Gaussian(variance="constant"),
    )
    got = encoding.frame(found.theta).iloc[0]
    assert found.converged[0]
    assert got["alpha"] == 0.35
    assert got["E"] <= 1.5 + 1e-12
    theirs = minimize(
        lambda t: 1e4 * derivatives(encoding.problem, t[None], y, np.ones(30), OBJECTIVES[0], np.ones((1, 1)))[0][0],
        found.theta[0], bounds=list(zip(encoding.problem.lower, encoding.problem.upper, strict=True)), method="L-BFGS-B",
    )  # fmt: skip
    assert found.objective[0] <= theirs.fun / 1e4 * (1 + 1e-9)


def test_what_did_not_converge_says_so():
    encoding, theta, y, w, _ = case("shape", noise=0.01)
    short = solve(encoding.problem, theta + 0.5, y, w, Gaussian(variance="constant"), max_iter=1)
    assert not short.converged[0]
    lost = solve(encoding.problem, np.full((2, len(theta)), [[np.nan], [1e300]]), y, w, Gaussian(variance="constant"))
    assert not lost.converged.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far = solve(encoding.problem, theta * 40, y, w, Gaussian(variance="constant"), max_iter=3)
    assert not far.converged[0]


def test_converged_means_a_vanishing_gradient():
    encoding, theta, y, w, rng = case("shape", noise=0.01)
    starts = theta + 0.2 * rng.standard_normal((20, len(theta)))
    objective = Gaussian(variance="constant")
    found = solve(encoding.problem, starts, y, w, objective)
    assert found.converged.any()
    _, g, H = derivatives(encoding.problem, found.theta[found.converged], y, w, objective, np.ones((1, 1)))
    for r in range(g.shape[1]):
        live = found.theta[found.converged][r] > COLLAPSED
        # distance to the optimum in standard errors: sqrt(g' H^-1 g / s2)
        s2 = 2 * found.objective[found.converged][r] / (30 - 7)
        assert np.sqrt(g[live, r] @ np.linalg.solve(H[np.ix_(live, live)][:, :, r], g[live, r]) / s2) < 1e-4


def test_objectives_by_name():
    for objective in (*OBJECTIVES[:2], Huber(1e-3), Huber(1e-4, on="loss"), Robust(), StudentT(3.0)):
        again = parse_objective(objective.label)
        assert again == (replace(objective, variance="auto") if isinstance(objective, Gaussian) else objective)
    with pytest.raises(ConfigError, match="use gaussian"):
        parse_objective("cauchy")
    with pytest.raises(ConfigError, match="positive number"):
        Huber(0.0)
    with pytest.raises(ConfigError, match="positive number"):
        StudentT(-1)

"""Laws through lmfit: the same Fit, the same optimum where both paths apply."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scalinglab import LAWS, ConfigError, FitError, Gaussian, fit
from scalinglab.laws import Law


def table(rng: np.random.Generator, sigma: float = 0.002, kink: float = 0.0) -> pd.DataFrame:
    rows = [
        {"run_id": f"r{n:.0f}-{d:.0f}-{k}", "params": n, "tokens": d, "depth": depth, "width": (n / 12 / depth) ** 0.5}
        for n in (2e7, 6e7, 2e8, 6e8)
        for d in (1e9, 4e9, 2e10)
        for k, depth in enumerate((4, 8, 16, 32, 64))
    ]
    runs = pd.DataFrame(rows)
    x = (np.log(runs["depth"]) - 0.3 - 0.44 * np.log(runs["width"])) / 0.1
    loss = 1.7 + 406 * runs["params"] ** -0.34 + 410 * runs["tokens"] ** -0.28 + kink * 0.1 * np.logaddexp(0, x)
    return runs.assign(loss=loss * np.exp(sigma * rng.standard_normal(len(runs))))


def chinchilla(
    runs: dict[str, np.ndarray],
    E: float = 1.5,
    A: float = 300.0,
    alpha: float = 0.3,
    B: float = 300.0,
    beta: float = 0.3,
) -> np.ndarray:
    return E + A * runs["params"] ** -alpha + B * runs["tokens"] ** -beta


def test_a_function_reaches_the_batched_solvers_optimum() -> None:
    runs = table(np.random.default_rng(0))
    free, exact = fit(chinchilla, runs), fit("chinchilla", runs)
    assert free.status == exact.status == "converged"
    assert free.objective == pytest.approx(exact.objective, rel=1e-9)
    np.testing.assert_allclose(free.params, exact.params, rtol=1e-4)
    w = np.ones((2, len(runs)))
    w[0, :15] = 0
    np.testing.assert_allclose(free.refit(weights=w).params, exact.refit(weights=w).params, rtol=1e-3)


def test_critical_depth_finds_a_planted_hinge() -> None:
    made = fit("critical_depth", table(np.random.default_rng(1), kink=0.5), objective=Gaussian(variance="constant"))
    assert made.status == "converged"
    assert made.params["chi"] == 0.44
    assert made.params["k"] == pytest.approx(0.3, abs=0.1)  # hinge scale .1
    assert made.params["eta"] == pytest.approx(0.5, rel=0.1)


def test_data_constrained_with_unique_tokens_is_chinchilla() -> None:
    # R = tokens / unique_tokens - 1 = 0: Rd drops out, which makes the law a Chinchilla with an idle parameter
    runs = table(np.random.default_rng(2))
    runs["unique_tokens"] = runs["tokens"]
    made = fit(LAWS["data_constrained"], runs, fixed={"Rd": 15.4})
    exact = fit("chinchilla", runs)
    assert made.objective == pytest.approx(exact.objective, rel=1e-8)


def test_data_constrained_recovers_the_decay_of_repeats() -> None:
    design = [(n, u, r) for n in (2e7, 1e8, 5e8) for u in (5e8, 2e9, 1e10) for r in (1, 2, 6, 20)]
    runs = pd.DataFrame(design, columns=["params", "unique_tokens", "repeats"])
    runs["tokens"] = runs["unique_tokens"] * runs["repeats"]
    runs["run_id"] = [f"r{i}" for i in range(len(runs))]
    law = LAWS["data_constrained"]
    truth = {"E": 1.7, "A": 406.0, "alpha": 0.34, "B": 410.0, "beta": 0.28, "Rd": 8.0}
    runs["loss"] = law.loss(truth, runs)
    made = fit(law, runs)
    assert made.params["Rd"] == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize(
    ("law", "kwargs", "error", "told"),
    [
        (lambda runs, E, A: E + A * runs["params"] ** -0.3, {}, ConfigError, "no start for E, A"),
        (LAWS["critical_depth"], {"by": "depth"}, ConfigError, "can't be crossed"),
    ],
)
def test_what_it_refuses(law: object, kwargs: dict[str, str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        fit(law, table(np.random.default_rng(4)), **kwargs)  # type: ignore[arg-type]


def test_fewer_runs_than_parameters() -> None:
    with pytest.raises(FitError, match="only 3 runs"):
        fit(chinchilla, table(np.random.default_rng(5)).head(3))


def test_a_formula_outside_the_algebra_goes_through_lmfit() -> None:
    runs = table(np.random.default_rng(6))
    law = Law("tilted", "E + A*params**-alpha + B*(tokens + k*1e8)**-beta", starts={"k": (0.5, 2.0)})
    assert not law.in_algebra
    made = fit(law, runs)
    assert made.objective <= fit("chinchilla", runs).objective * (1 + 1e-9)

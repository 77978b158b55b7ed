"""Power of the verdict: data sets with a known answer go through the code that judges real ones.

    loss = L(arm, x) + u + a d^2 + kappa max(d, 0)^3 + seed effect + noise,   d = ln lr - o(arm, x),   x = ln(depth / smallest)

Depths span a factor 8, learning rates are a factor 2 apart on one grid for all, and each shape's grid is centred by a pilot
that is off by up to one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.misscaling.contrasts import Roles
from scalinglab.misscaling.curves import Array
from scalinglab.misscaling.engine import Method, analyse
from scalinglab.misscaling.rules import VERDICTS, Margins, overall

LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Truth:
    """A planted answer, in nats (or ln lr) per e-fold of depth.

    architecture : W of every candidate. parametrization : V. drift : of the naive optimum (0: no mis-set learning rate).
    """

    verdict: str
    architecture: float = 0.0
    parametrization: float = 0.0
    drift: float = 0.0


TRUTHS: Mapping[str, Truth] = {
    "architecture": Truth("H_arch", architecture=0.03),
    "mis-scaling": Truth("H_misscale", parametrization=0.03, drift=-0.75),
    "both": Truth("both", architecture=0.03, parametrization=0.03, drift=-0.75),
    "neither": Truth("neither"),
}


@dataclass(frozen=True)
class Plan:
    """Size of a study and its noise.

    depths : number on the ladder. span : largest over smallest depth. rates : learning rates per shape. seeds : per rate.
    candidates : architectures beside the reference. sigma : SD of a run (nats). tau : SD of a shape about the line (nats).
    curvature, asymmetry : a and kappa of the learning-rate curve. row : SD of what a seed moves all runs of a shape by.
    curvature_spread : SD of ln a between shapes.
    """

    depths: int = 4
    span: float = 8.0
    rates: int = 7
    seeds: int = 2
    candidates: int = 1
    sigma: float = 0.005
    tau: float = 0.003
    curvature: float = 0.022
    asymmetry: float = 0.008
    row: float = 0.0
    curvature_spread: float = 0.0

    def __post_init__(self) -> None:
        if self.depths < 3 or self.rates < 5 or self.seeds < 1 or self.candidates < 1 or not self.span > 1:
            raise ConfigError(
                f"{self}: three depths, five rates, one seed and one candidate are the least that can decide"
            )

    @property
    def runs(self) -> int:
        """Runs of the whole study: reference and candidates, each naive and scaled."""
        return 2 * (1 + self.candidates) * self.depths * self.rates * self.seeds


def verdict_power(
    truth: Truth,
    plan: Plan | None = None,
    *,
    trials: int = 400,
    margins: Margins | None = None,
    method: Method | None = None,
    rng: int | np.random.Generator = 0,
    batch: int = 50,
) -> dict[str, float]:
    """Shares of verdicts over simulated studies.

    Returns
    -------
    dict
        right, wrongly_positive (a verdict that claims an effect that isn't there), wrong (any other wrong decision),
        inconclusive; a share for each verdict; and the mean standard errors se_W, se_M, se_drift.

    Raises
    ------
    ConfigError
        No trials.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials}: at least one simulated study is needed")
    plan, margins = plan or Plan(), margins or Margins()
    method = method or Method(draws=199)
    generator = np.random.default_rng(rng)
    found: list[str] = []
    errors: list[Array] = []
    for start in range(0, trials, batch):
        cells, z, loss, roles = simulate_study(truth, plan, trials=min(batch, trials - start), rng=generator)
        made = analyse(cells, z, loss, roles, method=method, margins=margins, rng=generator, parametric=True)
        found += [overall({a: str(v[t]) for a, v in made.verdicts.items()}) for t in range(len(loss))]
        errors.append(np.stack([made.gains["W:A0"].se, made.gains["M"].se, made.drifts[roles.naive or ("", "")].se]))
    counts = pd.Series(found).value_counts()
    share: dict[str, float] = {v: float(counts.get(v, 0)) / trials for v in VERDICTS}
    claims = {"H_arch": (True, False), "H_misscale": (False, True), "both": (True, True), "neither": (False, False)}
    real = claims[truth.verdict]
    false = float(sum(share[v] for v, c in claims.items() if any(a and not b for a, b in zip(c, real, strict=True))))
    right = share[truth.verdict]
    se = np.concatenate(errors, -1).mean(-1)
    return {
        "right": right, "wrongly_positive": false, "wrong": 1 - right - false - share["inconclusive"], **share,
        "se_W": float(se[0]), "se_M": float(se[1]), "se_drift": float(se[2]),
    }  # fmt: skip


def power_table(
    plans: Mapping[str, Plan], *, trials: int = 400, margins: Margins | None = None, draws: int = 199, seed: int = 0
) -> pd.DataFrame:
    """`verdict_power` of each plan at each of `TRUTHS`: one row each, with the number of runs."""
    rows = []
    for name, plan in plans.items():
        for key, truth in TRUTHS.items():
            made = verdict_power(truth, plan, trials=trials, margins=margins, method=Method(draws=draws), rng=seed)
            rows.append({
                "plan": name, "truth": key, "depths": plan.depths, "rates": plan.rates, "seeds": plan.seeds,
                "candidates": plan.candidates, "sigma": plan.sigma, "tau": plan.tau, "runs": plan.runs, "trials": trials, **made,
            })  # fmt: skip
    return pd.DataFrame(rows)


def simulate_study(
    truth: Truth, plan: Plan, *, trials: int, rng: np.random.Generator
) -> tuple[pd.DataFrame, Array, Array, Roles]:
    """Cells, ln learning rates [C, J], losses [trials, C, J, S] and roles of studies with a known answer."""
    names = ["pre_ln", *(f"A{k}" for k in range(plan.candidates))]
    arms = [(a, p) for a in names for p in ("sp", "completep")]
    depths = np.rint(4 * plan.span ** np.linspace(0.0, 1.0, plan.depths))
    x = np.log(depths / depths[0])
    rows = [(k, a, p, d, v) for k, (a, p) in enumerate(arms) for d, v in zip(depths, x, strict=True)]
    cells = pd.DataFrame(rows, columns=["arm", "architecture", "parametrization", "depth", "x"])
    cells["width"], cells["ladder"], cells["initial"] = 64, "all", np.nan
    naive = (cells["parametrization"] == "sp").to_numpy()
    own = (cells["architecture"] != "pre_ln").to_numpy()
    at = cells["x"].to_numpy()
    optimum = -5.0 + np.where(naive, truth.drift, 0.0) * at
    level = (
        3.0 - 0.05 * at - np.where(own, truth.architecture, 0.0) * at - np.where(naive, 0.0, truth.parametrization) * at
    )
    pilot = np.round((optimum + rng.uniform(-0.5, 0.5, len(cells)) * LN2) / LN2)
    z = LN2 * (pilot[:, None] + np.arange(plan.rates) - plan.rates // 2)
    d = z - optimum[:, None]
    C, J, S = len(cells), plan.rates, plan.seeds
    a = plan.curvature * np.exp(plan.curvature_spread * rng.standard_normal((trials, C, 1)))
    curve = level[:, None] + a * d**2 + plan.asymmetry * np.maximum(d, 0.0) ** 3
    loss = curve[..., None] + plan.tau * rng.standard_normal((trials, C, 1, 1))
    loss = loss + plan.row * rng.standard_normal((trials, C, 1, S))
    loss = (
        loss + plan.sigma * rng.standard_normal((trials, 1, 1, S)) + plan.sigma * rng.standard_normal((trials, C, J, S))
    )
    candidates = tuple(names[1:])
    roles = Roles(("pre_ln", "sp"), ("pre_ln", "completep"), candidates,
                  {a: (a, "completep") for a in candidates}, {a: (a, "sp") for a in candidates})  # fmt: skip
    return cells, z, loss, roles

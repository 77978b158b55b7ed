"""The study level: whether the depth effect depends on the architecture, from cell means or from a law."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd

from scalinglab.depth_benefit.analysis import Outcome
from scalinglab.depth_benefit.labels import confounded_study, study_label
from scalinglab.depth_benefit.study import Gate, joint_gate, pairs_equivalent, simultaneous
from scalinglab.errors import ScalinglabError, ScalinglabWarning
from scalinglab.fitting import Fit
from scalinglab.fitting import fit as fit_law
from scalinglab.uncertainty import variance_components

_MOST_REFITS = 499  # of the law in a bootstrap: p-values are then good to .01 near .05


def architecture_study(
    outcome: Outcome, reference: str | None, alpha: float, draws: int, rng: int
) -> tuple[Gate | None, tuple[str, str]]:
    """The joint gate with its contrasts, and the study-level label with its reason; no gate without a reference."""
    seven = outcome.effects.subset("E7", "")
    if reference is None or not len(seven):
        return None, ("ARCH_UNRESOLVED", "no two architectures to compare with a reference")
    if outcome.model is not None:
        try:
            gate = joint_gate(
                outcome.model,
                outcome.effects,
                reference=reference,
                margin=outcome.margin,
                alpha=alpha,
                draws=draws,
                rng=rng,
            )
        except ScalinglabError as error:
            return None, ("ARCH_UNRESOLVED", str(error))
    else:
        contrasts = simultaneous(seven, level=1 - alpha, rng=rng)
        p, statistic, df = _wald(outcome)
        second, name = float(contrasts["p_max_t"].min()), "max-t"
        if outcome.fit is not None and outcome.fit.law.levels:
            second, name = law_bootstrap(outcome.fit, draws=min(draws, _MOST_REFITS), rng=rng), "parametric bootstrap"
        gate = Gate(
            statistic, df, p, second, contrasts,
            pairs_equivalent(outcome.effects.subset("E1"), margin=outcome.margin, rng=rng), reference, name,
        )  # fmt: skip
    limits = {str(a): (float(r["low"]), float(r["high"])) for a, r in gate.contrasts.iterrows()}
    told = study_label(
        p_gate=gate.p, p_bootstrap=gate.p_bootstrap, contrasts=limits, equivalent=gate.equivalent, alpha=alpha,
        second=gate.second,
    )  # fmt: skip
    return gate, confounded_study(told, outcome.verdicts, limits, reference)


def law_bootstrap(fit: Fit, *, draws: int = 499, rng: int | np.random.Generator = 0) -> float:
    """Parametric-bootstrap p that all levels of a crossed law share their shape coefficients (H1 within H2).

    Losses are drawn from the fit of H1 with its own variance components (clusters of `run_id`, rows within them); both laws
    are fitted to each draw and the relative drop of the objective is compared with the one seen. NaN where H1 can't be
    fitted.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalinglabWarning)
            small = fit_law(fit.law.key, fit.runs, by=fit.law.by, share="H1", objective=fit.estimator)
    except ScalinglabError:
        return math.nan
    codes = pd.factorize(fit.runs["run_id"])[0].astype(np.intp)
    n, p = len(fit.runs), len(small.params)
    within, between = variance_components(codes, small.residuals * math.sqrt(n / max(1, n - p)))
    generator = np.random.default_rng(rng)
    noise = math.sqrt(within) * generator.standard_normal((draws, n)) / np.sqrt(fit.weights)
    shared = math.sqrt(between) * generator.standard_normal((draws, int(codes.max()) + 1))
    y = small.log_loss - small.residuals + noise + shared[:, codes]
    small_again, again = small.refit(log_loss=y), fit.refit(log_loss=y)
    fine = small_again.converged & again.converged
    if fine.sum() < draws / 2:
        return math.nan
    null = (small_again.objective / again.objective)[fine]
    return float((1 + (null >= small.objective / fit.objective * (1 - 1e-12)).sum()) / (1 + fine.sum()))


def _wald(outcome: Outcome) -> tuple[float, float, tuple[float, float]]:
    """Joint F of all differences to the reference (of gamma1 and gamma2 where the law has them)."""
    from scipy.special import fdtrc

    index = [i for i, e in enumerate(outcome.effects) if e.estimand == "E7" and e.variant in ("gamma1", "gamma2")]
    index = index or [i for i, e in enumerate(outcome.effects) if e.estimand == "E7" and not e.variant]
    b = np.array([outcome.effects.effects[i].estimate for i in index])
    V = outcome.effects.cov[np.ix_(index, index)]
    df = min(outcome.effects.effects[i].df for i in index)
    if not np.isfinite(V).all() or np.linalg.matrix_rank(V) < len(index):
        return math.nan, math.nan, (float(len(index)), df)
    q = len(index)
    left = df - q + 1  # Hotelling: the covariance is estimated from df + 1 clusters
    statistic = float(b @ np.linalg.solve(V, b)) * left / (df * q)
    return float(fdtrc(q, left, statistic)) if left >= 1 else math.nan, statistic, (float(q), float(left))

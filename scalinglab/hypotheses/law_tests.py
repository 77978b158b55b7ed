"""Tests between fitted laws by refitting simulated runs: nested laws, and pairs of which neither contains the other.

Runs are simulated from one law with its own variance of runs and of rows, so that checkpoints of a run share its luck, and
both laws are refitted to them. That calibrates what no table covers: parameters that vanish under the null, few runs, curved
laws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide
from scalinglab.nested import check_same_rows
from scalinglab.objectives import Gaussian
from scalinglab.uncertainty import variance_components

Array = NDArray[np.float64]

VUONG_RUNS = 40  # below this the normal limit of Vuong's statistic is not to be trusted
_NESTED = 1e-6  # relative; a law that reproduces the other's predictions to this share of its objective contains it
_CHI_DRAWS = 50_000


@dataclass(frozen=True)
class NonNested:
    """A pair of tests, each law being the null in turn.

    first, second : tests of the first and of the second law. outcome : which of the four outcomes, in words.
    """

    first: HypothesisTest
    second: HypothesisTest
    outcome: str

    def summary(self) -> str:
        """Both tests and the outcome as text."""
        return "\n".join([self.first.summary(), self.second.summary(), self.outcome])


def nested_bootstrap(
    small: Fit, large: Fit, *, draws: int = 999, level: float = 0.95, rng: int | np.random.Generator = 0
) -> HypothesisTest:
    """Parametric-bootstrap F test that the extra parameters of `large` are not needed.

    Valid where the F table is not: a parameter of the large law vanishes under the small one (Davies' problem), a parameter
    sits at its bound, or a run has several rows.

    Raises
    ------
    ConfigError
        Not the same rows or weights, not Gaussian on log loss, the law is not nested, or fewer than 19 draws.
    """
    check_level(level)
    _check_draws(draws)
    _check_pair(small, large)
    p0, p1, n = small.encoding.problem.size, large.encoding.problem.size, len(small.runs)
    if p1 <= p0 or n <= p1:
        raise ConfigError(
            f"{p0} and {p1} free parameters on {n} rows: the large law needs more of them, and fewer than rows"
        )
    inside = _closest(large, small)
    if not _nests(large, small):
        raise ConfigError(
            f"law {small.law.key!r} is not nested in {large.law.key!r}: the larger one can't reproduce its predictions; use cox()"
        )
    rss0 = small.objective
    rss1 = min(large.objective, float(large.refit(start=inside).objective[0]))
    y = _simulated(small, draws, np.random.default_rng(rng))
    null0 = small.refit(log_loss=y).objective
    one, two = large.refit(log_loss=y), large.refit(log_loss=y, start=inside)
    null1 = np.minimum(one.objective, two.objective)
    failed = ~(np.isfinite(null0) & np.isfinite(null1))
    stuck = int((null1 > null0 * (1 + 1e-6)).sum())

    def statistic(a: Array | float, b: Array | float) -> Array:
        return np.asarray(np.maximum(np.asarray(a) - b, 0.0) / (p1 - p0) / (np.asarray(b) / (n - p1)))

    F = float(statistic(rss0, rss1))
    null = statistic(null0, null1)[~failed]
    p = float((1 + (null >= F).sum()) / (1 + len(null)))
    made = f"parametric bootstrap of F, {len(null)} draws"
    return HypothesisTest(
        f"{small.law.key} within {large.law.key}", f"the law {small.law.key!r} holds", p,
        decide(p, 1 - level, found=f"{small.law.key!r} is rejected in favour of {large.law.key!r}", p_min=1 / (1 + len(null)),
               unresolved=f"{small.law.key!r} is not shown to be too small"),
        1 - level, F, (float(p1 - p0), float(n - p1)), level=level, method=made, n_runs=small.n_runs,
        p_min=1 / (1 + len(null)), codes=("STUCK_REFITS",) if stuck > 0.01 * draws else (),
        assumptions=("normal errors: one effect per run, one error per row", "the small law is the truth under the null"),
        diagnostics={"draws whose large refit was worse than the small one": stuck, "draws without a refit": int(failed.sum()),
                     "95 % quantile of F under the null": float(np.quantile(null, 0.95))},
    )  # fmt: skip


def cox(
    first: Fit, second: Fit, *, draws: int = 999, level: float = 0.95, rng: int | np.random.Generator = 0
) -> NonNested:
    """Cox test of laws of which neither contains the other: the likelihood ratio, under each law in turn.

    With law A the truth, A should fit better than B by about as much as in data simulated from A. p of A is the share of
    such data in which A does no better than here. Four outcomes: one rejected, the other one, both (neither is adequate), none
    (these runs can't tell them apart).

    Raises
    ------
    ConfigError
        Not the same rows or weights, not Gaussian on log loss, one law contains the other, fewer than 19 draws.
    """
    check_level(level)
    _check_draws(draws)
    _check_pair(first, second)
    _check_not_nested(first, second)
    n = len(first.runs)
    seen = 0.5 * n * math.log(second.objective / first.objective)
    generator = np.random.default_rng(rng)
    tests = []
    for null, rival, sign in ((first, second, 1.0), (second, first, -1.0)):
        y = _simulated(null, draws, generator)
        own = null.refit(log_loss=y).objective
        other = np.minimum(
            rival.refit(log_loss=y).objective, rival.refit(log_loss=y, start=_closest(rival, null)).objective
        )
        ratio = 0.5 * n * np.log(other / own)  # of the null law over its rival
        ratio = ratio[np.isfinite(ratio)]
        p = float((1 + (ratio <= sign * seen).sum()) / (1 + len(ratio)))
        tests.append(_law_test("Cox", null, rival, p, level, sign * seen, len(ratio), {
            "likelihood ratio expected under the null": float(ratio.mean()), "its SD": float(ratio.std(ddof=1))}))  # fmt: skip
    return NonNested(tests[0], tests[1], _outcome(tests, first, second))


def j_test(
    first: Fit, second: Fit, *, draws: int = 499, level: float = 0.95, rng: int | np.random.Generator = 0
) -> NonNested:
    """Davidson-MacKinnon encompassing test (their P form): do the rival's predictions explain the residuals of a law?

    Residuals of the null law are regressed on its Jacobian and on the difference of predictions; ``|t|`` of the latter is held
    against data simulated from the null law, since the t table rejects too often in small samples. On the conservative side.

    Raises
    ------
    ConfigError
        See `cox`.
    """
    check_level(level)
    _check_draws(draws)
    _check_pair(first, second)
    _check_not_nested(first, second)
    generator = np.random.default_rng(rng)
    tests = []
    for null, rival in ((first, second), (second, first)):
        seen = _encompassing(null, null.log_loss, dict(null.params), dict(rival.params), rival)
        y = _simulated(null, draws, generator)
        own = null.refit(log_loss=y).params
        a, b = rival.refit(log_loss=y), rival.refit(log_loss=y, start=_closest(rival, null))
        other = a.params.where(pd.Series(a.objective <= b.objective, index=a.params.index), b.params, axis=0)
        t = np.array([
            _encompassing(null, y[i], own.iloc[i].to_dict(), other.iloc[i].to_dict(), rival) for i in range(draws)
        ])  # fmt: skip
        t = t[np.isfinite(t)]
        p = float((1 + (np.abs(t) >= abs(seen)).sum()) / (1 + len(t)))
        tests.append(_law_test("J", null, rival, p, level, seen, len(t), {
            "95 % quantile of |t| under the null": float(np.quantile(np.abs(t), 0.95))}))  # fmt: skip
    return NonNested(tests[0], tests[1], _outcome(tests, first, second))


def vuong(first: Fit, second: Fit, *, level: float = 0.95, rng: int | np.random.Generator = 0) -> HypothesisTest:
    """Vuong (1989) test that two laws are equally far from the truth, on log-likelihoods summed by run.

    Comes after its own pre-test that the laws can be told apart at all (variance of the log-likelihood ratio, weighted
    chi-squares; conservative with few runs); where they can't, there is no p-value and the code says INDISTINGUISHABLE. A positive
    statistic: the first law is closer.

    Raises
    ------
    ConfigError
        Fewer than 40 runs, nested laws, not Gaussian on log loss, other rows or weights.
    """
    from scipy.special import ndtr

    check_level(level)
    _check_pair(first, second)
    G = first.n_runs
    if G < VUONG_RUNS:
        raise ConfigError(
            f"Vuong's test is a large-sample test: it needs {VUONG_RUNS} runs, these fits have {G}; use cox()"
        )
    _check_not_nested(first, second)
    a, b = _scores(first), _scores(second)
    d = a.likelihood - b.likelihood
    variance = float(d.var())
    seen = G * variance
    p_pre = _distinguishable_p(a, b, G, seen, np.random.default_rng(rng))
    alpha = 1 - level
    z = math.sqrt(G) * float(d.mean()) / math.sqrt(variance) if variance > 0 else math.nan
    apart = p_pre <= alpha
    p = float(2 * ndtr(-abs(z))) if apart else math.nan
    better = first.law.key if z > 0 else second.law.key
    return HypothesisTest(
        f"Vuong: {first.law.key} against {second.law.key}", "both laws are equally far from the truth", p,
        decide(p, alpha, found=f"{better!r} is closer to the truth",
               unresolved="neither law is shown to be closer" if apart else "the laws can't be told apart on these runs"),
        alpha, z, (), float(d.sum()), level=level, unit="nats of log-likelihood", method="Vuong, normal limit, sums by run",
        n_runs=G, codes=() if apart else ("INDISTINGUISHABLE",),
        assumptions=("independent runs", "normal working likelihood", f"at least {VUONG_RUNS} runs", "laws are not nested"),
        diagnostics={"p of the distinguishability pre-test": p_pre, "variance of the ratio per run": variance,
                     "parameters": (first.encoding.problem.size, second.encoding.problem.size)},
    )  # fmt: skip


# ---- what a pair of fits must be -----------------------------------------------------------------------------------------
def _check_draws(draws: int) -> None:
    if draws < 19:
        raise ConfigError(f"draws is {draws}: at least 19 are needed for a p of .05")


def _check_pair(first: Fit, second: Fit) -> None:
    check_same_rows({"first": first, "second": second})
    for fit in (first, second):
        if not isinstance(fit.estimator, Gaussian) or fit.estimator.on != "log_loss" or not fit.law.in_algebra:
            raise ConfigError(
                f"the fit of {fit.law.key!r} is {fit.estimator.label}: these tests need Gaussian fits of log loss in the algebra"
            )
        if fit.status in ("failed", "max_iter"):
            raise ConfigError(f"the fit of {fit.law.key!r} has status {fit.status}: it is no maximum of the likelihood")
        if not fit.objective > 0:
            raise ConfigError(f"the law {fit.law.key!r} fits exactly: there is no error to test against")
    if not np.allclose(first.weights, second.weights, rtol=1e-9):
        raise ConfigError("the fits differ in weights: refit both with Gaussian(variance='constant')")


def _nests(large: Fit, small: Fit, *, around: bool = False) -> bool:
    """Whether the large law reproduces the small one's predictions, at its fit or also at points around it.

    At the fit alone a law that happens to be at a special case (a coefficient near 0) would look nested.
    """
    step = 0.03 * np.where(np.arange(len(small.theta)) % 2, -1.0, 1.0)
    theta = np.stack([small.theta, small.theta + step, small.theta - step] if around else [small.theta])
    predicted = small.encoding.problem.log_loss(theta)
    made = np.minimum(
        large.refit(log_loss=predicted).objective,
        large.refit(log_loss=predicted, start=_closest(large, small)).objective,
    )
    return bool((made <= _NESTED * small.objective + 1e-20 * len(small.runs)).all())


def _check_not_nested(first: Fit, second: Fit) -> None:
    for large, small in ((first, second), (second, first)):
        if _nests(large, small, around=True):
            raise ConfigError(
                f"law {small.law.key!r} lies within {large.law.key!r} on these runs: use nested_bootstrap(small, large)"
            )


def _closest(fit: Fit, other: Fit) -> Array:
    """theta of this law that comes closest to the other law's predictions: a start for refits under the other law."""
    made = fit.refit(log_loss=(other.log_loss - other.residuals)[None])
    return fit.encoding.internal(made.params.iloc[0])


def _simulated(fit: Fit, draws: int, rng: np.random.Generator) -> Array:
    """Log losses [draws, n] under the fitted law: an effect per run and an error per row, variances by ANOVA."""
    codes = np.asarray(pd.factorize(fit.runs["run_id"])[0], dtype=np.intp)
    n, p = len(fit.runs), fit.encoding.problem.size
    w = np.where(fit.weights > 0, fit.weights, 1.0)
    w = w / w.mean()
    within, between = variance_components(codes, fit.residuals * np.sqrt(w) * math.sqrt(n / max(1, n - p)))
    noise = rng.standard_normal((draws, n)) * math.sqrt(within) / np.sqrt(w)
    effect = rng.standard_normal((draws, int(codes.max()) + 1)) * math.sqrt(between)
    return np.asarray(fit.log_loss - fit.residuals + noise + effect[:, codes])


def _law_test(
    kind: str,
    null: Fit,
    rival: Fit,
    p: float,
    level: float,
    statistic: float,
    draws: int,
    diagnostics: dict[str, float],
) -> HypothesisTest:
    return HypothesisTest(
        f"{kind}: {null.law.key} against {rival.law.key}", f"the law {null.law.key!r} holds", p,
        decide(p, 1 - level, found=f"{null.law.key!r} is rejected in the direction of {rival.law.key!r}",
               p_min=1 / (1 + draws), unresolved=f"{null.law.key!r} is not rejected"),
        1 - level, statistic, level=level, method=f"parametric bootstrap, {draws} draws", n_runs=null.n_runs,
        p_min=1 / (1 + draws), assumptions=("normal errors: one effect per run, one error per row",),
        diagnostics=diagnostics,
    )  # fmt: skip


def _outcome(tests: list[HypothesisTest], first: Fit, second: Fit) -> str:
    a, b = (bool(t.rejected) for t in tests)
    one, two = first.law.key, second.law.key
    if a and b:
        return "both laws are rejected: neither is adequate on these runs"
    if a or b:
        return f"{one if a else two!r} is rejected, {two if a else one!r} is not"
    return "unresolved: neither law is rejected; these runs can't tell them apart"


def _encompassing(fit: Fit, y: Array, params: dict[str, float], other: dict[str, float], rival: Fit) -> float:
    """t of the rival's predictions in the residuals of a law, given its Jacobian (weighted)."""
    root = np.sqrt(fit.weights)
    theta = fit.encoding.internal(params)
    f = fit.encoding.problem.log_loss(theta)[0]
    z = rival.encoding.problem.log_loss(rival.encoding.internal(other))[0] - f
    J = fit.encoding.problem.jacobian(theta)
    size = np.sqrt((J * J).sum(0))
    X = np.column_stack([J / np.where(size > 0, size, 1.0), z / max(float(np.linalg.norm(z)), 1e-300)]) * root[:, None]
    e = (y - f) * root
    b = np.linalg.lstsq(X, e, rcond=1e-10)[0]
    rest = e - X @ b
    df = len(y) - X.shape[1]
    spare = X[:, -1] - X[:, :-1] @ np.linalg.lstsq(X[:, :-1], X[:, -1], rcond=1e-10)[0]
    norm = float(np.linalg.norm(spare))
    return float(b[-1] * norm / math.sqrt(float(rest @ rest) / df)) if norm > 1e-12 and df > 0 else math.nan


# ---- Vuong ---------------------------------------------------------------------------------------------------------------
class _Scores(NamedTuple):
    likelihood: Array  # [G]
    score: Array  # [G, p + 1], the residual variance last
    hessian: Array  # [p + 1, p + 1], mean over runs


def _scores(fit: Fit) -> _Scores:
    """Log-likelihood and score of each run under independent rows, and the expected Hessian."""
    codes = np.asarray(pd.factorize(fit.runs["run_id"])[0], dtype=np.intp)
    G = int(codes.max()) + 1
    w, e = fit.weights, fit.residuals
    n = len(e)
    s2 = float((w * e * e).sum() / n)
    J = fit.encoding.problem.jacobian(fit.theta)
    alive = np.sqrt((J * J).sum(0)) > 1e-9
    J = J[:, alive] / np.sqrt((J[:, alive] ** 2).sum(0))
    row = -0.5 * (math.log(2 * math.pi * s2) - np.log(w) + w * e * e / s2)
    each = np.column_stack([J * (w * e / s2)[:, None], 0.5 * (w * e * e / s2 - 1) / s2])
    summed = np.stack([np.bincount(codes, c, G) for c in each.T], 1)
    H = np.zeros((each.shape[1],) * 2)
    H[:-1, :-1] = -(J * w[:, None]).T @ J / s2 / G
    H[-1, -1] = -0.5 * n / s2**2 / G
    return _Scores(np.bincount(codes, row, G).astype(np.float64), summed.astype(np.float64), H)


def _distinguishable_p(a: _Scores, b: _Scores, G: int, seen: float, rng: np.random.Generator) -> float:
    """p of G times the variance of the log-likelihood ratio, were it 0: sum of squared eigenvalues times chi-squares."""
    Baa, Bbb, Bab = a.score.T @ a.score / G, b.score.T @ b.score / G, a.score.T @ b.score / G
    Aa, Ab = np.linalg.pinv(a.hessian), np.linalg.pinv(b.hessian)
    W = np.block([[-Baa @ Aa, -Bab @ Ab], [Bab.T @ Aa, Bbb @ Ab]])
    square = np.real(np.linalg.eigvals(W)) ** 2
    draws = rng.chisquare(1.0, (_CHI_DRAWS, len(square))) @ square
    return float((1 + (draws >= seen).sum()) / (1 + _CHI_DRAWS))

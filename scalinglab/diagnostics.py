"""Checks that every fit carries: is it identified, does one run decide it, are the error bars' assumptions met?

Thresholds and actions are those of the design note behind the package (docs: "the statistics behind the defaults"). A check
is a value with a level: ok, warn, or block (the fit must not be used for the purpose that the action names).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.encoding import Encoding
from scalinglab.features import R0
from scalinglab.laws import Law
from scalinglab.solver import COLLAPSED

if TYPE_CHECKING:
    from scalinglab.search import Search

Array = NDArray[np.float64]
Grade = Literal["ok", "warn", "block"]

STATUS_MEANING = {
    "converged": "a certified optimum",
    "at_bound": "a certified optimum with a parameter at its bound (a collapsed amplitude is 0)",
    "not_identified": "the runs do not determine all parameters",
    "max_iter": "the search ended before three starts agreed on a converged optimum; the values are not an optimum to quote",
    "failed": "no start gave a finite objective",
}


@dataclass(frozen=True)
class Check:
    """One diagnostic: `value` against its thresholds. `identifies`: a block here means the law is not identified."""

    name: str
    value: float
    level: Grade
    code: str
    action: str
    identifies: bool = False

    def row(self) -> dict[str, Any]:
        """The check as a table row."""
        return {"check": self.name, "value": self.value, "level": self.level, "code": self.code, "action": self.action}


def check_fit(
    law: Law, runs: pd.DataFrame, encoding: Encoding, theta: Array, weights: Array, search: Search, params: pd.Series
) -> list[Check]:
    """All checks of a fit in the algebra; see each function for its statistic and source."""
    problem = encoding.problem
    y = np.log(runs["loss"].to_numpy(np.float64))
    predicted = problem.log_loss(theta)[0]
    root = np.sqrt(weights)
    free = _free(encoding, theta)
    J = problem.jacobian(theta) * root[:, None]
    e = (y - predicted) * root
    checks = [
        *search_checks(search),
        *_conditioning(encoding, J, free),
        *design_checks(law, runs),
        *mixing_check(runs),
        *_parameters(law, encoding, params, y),
        *residual_checks(runs, y, predicted),
        *_influence(runs, J[:, free], e),
        _curvature(encoding, theta, free, root, e),
    ]
    return checks


def _free(encoding: Encoding, theta: Array) -> NDArray[np.intp]:
    problem = encoding.problem
    held = (theta <= problem.lower) | (theta >= problem.upper)
    held[problem.amplitudes] |= theta[problem.amplitudes] <= COLLAPSED
    return np.flatnonzero(~held)


def graded(value: float, warn: float, block: float) -> Grade:
    """Level of a statistic that should be small."""
    return "block" if value > block or not np.isfinite(value) else "warn" if value > warn else "ok"


def search_checks(search: Search) -> list[Check]:
    """Whether the optimum was reached from several starts, and whether there are others."""
    lonely = not search.certified
    return [
        Check(
            "starts at the best optimum", float(search.agreeing), "block" if lonely else "ok", "UNCERTIFIED",
            f"{search.agreeing} of {search.starts} starts reached the best optimum; three are needed to call it global",
        ),
        Check(
            "distinct minima", float(search.distinct_minima), "warn" if search.distinct_minima > 1 else "ok", "LOCAL_MINIMA",
            "other minima exist; the best one is reported, see search.valley for how far parameters differ near it",
        ),
    ]  # fmt: skip


# ---- identification ----------------------------------------------------------------------------------------------------
def condition_number(J: Array) -> float:
    """Condition number of a Jacobian [n, P] with its columns scaled to unit length."""
    if J.shape[1] == 0:
        return 1.0
    size = np.sqrt((J * J).sum(0))
    if not (size > 0).all() or not np.isfinite(size).all():
        return float("inf")
    s = np.linalg.svd(J / size, compute_uv=False)
    return float(s[0] / s[-1]) if s[-1] > 0 else float("inf")


def _conditioning(encoding: Encoding, full: Array, free: NDArray[np.intp]) -> list[Check]:
    """Conditioning of the scaled Jacobian, centred and uncentred, and the directions that the runs leave open."""
    J = full[:, free]
    centred = condition_number(J)
    uncentred = condition_number(_uncentred(encoding, full)[:, free])
    size = np.sqrt((J * J).sum(0))
    size[size == 0] = 1.0
    _, s, Vt = np.linalg.svd(J / size, full_matrices=False)
    loose = [v for v, value in zip(Vt, s, strict=True) if (value / s[0]) ** 2 < 1e-4]
    told = "; ".join(
        " and ".join(encoding.coordinates[free[i]] for i in np.argsort(-np.abs(v))[:3] if abs(v[i]) > 0.2)
        for v in loose
    )
    return [
        Check("conditioning, centred", centred, graded(centred, 100, 1000), "NOT_IDENTIFIED" if centred > 1000 else "ILL_CONDITIONED",
              f"the runs hardly separate the parameters (condition number {centred:.3g}); add runs off the line they lie on, or drop a term",
              identifies=True),
        Check("conditioning, uncentred", uncentred, graded(uncentred, 1e3, 1e4), "ILL_CONDITIONED_RAW",
              "amplitudes trade off with exponents: quote predictions and exponents, not amplitudes"),
        Check("sloppy directions", float(len(loose)), "warn" if loose else "ok", "SLOPPY",
              f"weakly determined together: {told}" if told else "no direction is sloppy"),
    ]  # fmt: skip


def _uncentred(encoding: Encoding, J: Array) -> Array:
    """The Jacobian in amplitudes as reported instead of those at the centre: coefficient columns take up the shift."""
    raw = J.copy()
    for slot in {id(s): s for s in encoding.slots.values()}.values():
        if slot.kind == "amplitude" and slot.position is not None:
            for other, weight in slot.shifts:
                raw[:, other] -= weight * J[:, slot.position]
    return raw


def size_tiers(params: Array, gap: float = 0.15) -> NDArray[np.intp]:
    """Tier number of each run: sizes sorted, a new tier where ln params jumps by more than `gap`."""
    order = np.argsort(params, kind="stable")
    jumps = np.diff(np.log(params[order])) > gap
    tiers = np.empty(len(params), dtype=np.intp)
    tiers[order] = np.concatenate([[0], np.cumsum(jumps)])
    return tiers


def design_checks(law: Law, runs: pd.DataFrame) -> list[Check]:
    """What the design can't answer, whatever the losses: token and shape diversity, collinearity of depth and size."""
    out: list[Check] = []
    reads = law.reads
    shape = bool(reads & {"u", "aspect", "depth", "width"})
    if {"params", "tokens"} <= set(runs.columns) and {"params", "tokens"} <= reads:
        spread = float(np.log(runs["tokens"] / runs["params"]).std(ddof=0))
        out.append(Check(
            "tokens-per-parameter diversity (SD of ln D/N)", spread, "ok" if spread >= 0.7 else "warn" if spread >= 0.2 else "block",
            "RAY_DESIGN", "runs lie near one tokens/params ratio: alpha and beta are not separate; fit law 'ray' or add 0.25x and 4x tokens",
            identifies=True))  # fmt: skip
    if shape and {"depth", "width"} <= set(runs.columns):
        per_run = runs.drop_duplicates(["run_id"]) if "run_id" in runs else runs
        u = np.log(per_run["width"] / per_run["depth"] / R0).to_numpy(np.float64)
        if "params" in runs:
            n = per_run["params"].to_numpy(np.float64)
            tiers = size_tiers(n)
            within = pd.Series(u).groupby(tiers).transform(lambda s: s - s.mean()).to_numpy()
            dof = max(1, len(u) - len(np.unique(tiers)))
            spread = float(np.sqrt((within**2).sum() / dof))
            out.append(Check(
                "shape diversity (SD of ln aspect within size)", spread, "ok" if spread >= 0.4 else "warn" if spread >= 0.2 else "block",
                "LOW_SHAPE_DIVERSITY", "shapes of one size are alike: no claim about shape; add wider and deeper runs of the same size",
                identifies=True))  # fmt: skip
            with np.errstate(all="ignore"):
                r = np.corrcoef(np.log(per_run["depth"].to_numpy(np.float64)), np.log(n))[0, 1]
            vif = float(1 / max(1e-12, 1 - r * r)) if np.isfinite(r) else float("inf")
            out.append(Check(
                "collinearity of ln depth and ln params (VIF)", vif, graded(vif, 5, 10), "DEPTH_SIZE_COLLINEAR",
                "deeper runs are larger runs: take the size effect from elsewhere or add runs of equal size"))  # fmt: skip
    return out


def _parameters(law: Law, encoding: Encoding, params: pd.Series, y: Array) -> list[Check]:
    out = []
    gone = [n for n in encoding.names if n.split("[")[0] in law.amplitudes and n.split("[")[0] != law.floor
            and params[n] == 0 and encoding.slots[n].position is not None]  # fmt: skip
    if gone:
        out.append(Check("amplitudes at zero", float(len(gone)), "block", "TERM_COLLAPSE",
                         f"{', '.join(gone)} ended at 0: these runs don't show that term; fit a law without it", identifies=True))  # fmt: skip
    floor = law.floor
    if floor is not None:
        for name in [n for n in encoding.names if n.split("[")[0] == floor and encoding.slots[n].position is not None]:
            low = float(params[name]) < 0.2 * float(np.exp(y.min()))
            out.append(Check(
                f"irreducible loss {name}", float(params[name]), "warn" if low else "ok", "E_COLLAPSE",
                f"{name} is {'zero' if params[name] == 0 else 'far below the smallest loss'}: the runs do not reach the floor; "
                "do not extrapolate with this law"))  # fmt: skip
    powers = {c.name for t in law.terms for c in t.coefficients if c.sign < 0}
    strange = [n for n in encoding.names if n.split("[")[0] in powers and not 0 < params[n] <= 2]
    worst = float(params[strange].iloc[0]) if strange else 0.0
    out.append(Check(
        "exponents outside (0, 2]", worst, "warn" if strange else "ok", "ODD_EXPONENT",
        f"{', '.join(strange)}: not a plausible scaling exponent; look at the residuals by that column" if strange else "none"))  # fmt: skip
    return out


# ---- residuals ---------------------------------------------------------------------------------------------------------
def residual_checks(runs: pd.DataFrame, y: Array, predicted: Array) -> list[Check]:
    """Within-run correlation, lack of fit against seeds, heteroscedasticity and normality of run means."""
    from scipy.special import chdtrc, fdtrc

    e = y - predicted
    run, sizes = _runs(runs)
    G = len(run)
    count = np.bincount(sizes)
    mean = np.bincount(sizes, e) / count
    out = [
        Check("runs", float(G), "warn" if G < 10 else "ok", "FEW_RUNS",
              "fewer than 10 runs: the jackknife is unreliable; use bootstrap(kind='parametric') and more runs"),
    ]  # fmt: skip
    if len(e) >= 1.5 * G:
        icc, acf = within_run_correlation(runs, e)
        bad = acf > 0.2 or icc > 0.05
        out.append(Check("within-run correlation (ICC)", icc, "warn" if bad else "ok", "WITHIN_RUN_CORRELATION",
                         f"rows of a run are not independent (ICC {icc:.2f}, lag-1 {acf:.2f}): row-wise standard errors are wrong; "
                         "intervals here leave out whole runs"))  # fmt: skip
    lof = lack_of_fit(runs, y, predicted)
    if lof is not None:
        f, d1, d2 = lof
        p = float(fdtrc(d1, d2, f))
        out.append(Check("lack of fit against seed noise (p)", p, "warn" if p < 0.05 else "ok", "LACK_OF_FIT",
                         f"the law misses by more than seeds differ (F {f:.2f}): shapes, not seeds, are the unit of error"))  # fmt: skip
    m = np.bincount(sizes, predicted) / count
    z = mean * mean
    if G >= 8 and np.ptp(m) > 0 and z.std() > 0:
        r = np.corrcoef(m, z)[0, 1]
        p = float(chdtrc(1, G * r * r))
        out.append(Check("constant variance (Breusch-Pagan p)", p, "warn" if p < 0.05 else "ok", "HETEROSCEDASTIC",
                         "residual variance changes with the loss: weigh by seed variance or compare with objective 'robust'"))  # fmt: skip
    if G >= 20 and mean.std() > 0:
        s = (mean - mean.mean()) / mean.std()
        jb = G / 6 * ((s**3).mean() ** 2 + 0.25 * ((s**4).mean() - 3) ** 2)
        p = float(chdtrc(2, jb))
        out.append(Check("normality of run means (Jarque-Bera p)", p, "warn" if p < 0.01 else "ok", "HEAVY_TAILS",
                         "heavy tails or outlying runs: compare with objective 'robust' and look at the residual figure"))  # fmt: skip
    return out


def within_run_correlation(runs: pd.DataFrame, e: Array) -> tuple[float, float]:
    """One-way ANOVA intra-class correlation of residuals by run, and their lag-1 autocorrelation along tokens or step."""
    order_by = next((c for c in ("step", "tokens") if c in runs and runs[c].notna().all()), None)
    frame = pd.DataFrame({"run": runs["run_id"].astype(str).to_numpy(), "e": e})
    frame["t"] = runs[order_by].to_numpy() if order_by else np.arange(len(e))
    frame = frame.sort_values(["run", "t"], kind="stable")
    groups = frame.groupby("run")["e"]
    n, mean = groups.size().to_numpy(np.float64), groups.mean().to_numpy()
    G, N = len(n), float(n.sum())
    between = (n * (mean - frame["e"].mean()) ** 2).sum() / max(1, G - 1)
    within = float(((frame["e"] - groups.transform("mean")) ** 2).sum()) / max(1.0, N - G)
    n0 = (N - (n * n).sum() / N) / max(1, G - 1)
    icc = float(np.clip((between - within) / max(between + (n0 - 1) * within, 1e-300), -1, 1))
    centred = frame["e"].to_numpy()
    same = frame["run"].to_numpy()[1:] == frame["run"].to_numpy()[:-1]
    first, second = centred[:-1][same], centred[1:][same]
    total = float(np.sqrt((first**2).sum() * (second**2).sum()))
    acf = float((first * second).sum() / total) if total > 0 else 0.0
    return icc, acf


@dataclass(frozen=True)
class SeedVariance:
    """Variance of log loss between seeds of one cell: sigma2 * (loss / mean loss)^(2 power), plus tau2 between cells."""

    sigma2: float
    power: float
    tau2: float
    df: int


MIXING = (
    "eval_dataset",
    "split",
    "train_dataset",
    "dataset",
    "config",
    "phase",
    "parametrization",
    "lr",
    "batch_tokens",
)


def mixing_check(runs: pd.DataFrame) -> list[Check]:
    """Whether rows differ in what they were trained or evaluated on: one law of size and tokens can't hold for all."""
    found = {
        c: int(runs[c].nunique())
        for c in ("eval_dataset", "split", "train_dataset", "dataset", "config", "phase")
        if c in runs
    }
    mixed = {c: n for c, n in found.items() if n > 1}
    told = ", ".join(f"{n} values of {c}" for c, n in mixed.items())
    return [] if not found else [Check(
        "rows of one kind", float(max(mixed.values(), default=1)), "warn" if mixed else "ok", "MIXED_ROWS",
        f"the rows mix {told}: pick one (where=) or give each its own parameters (by=)" if mixed else "one kind")]  # fmt: skip


def _cells(runs: pd.DataFrame) -> NDArray[np.int64] | None:
    """Cell number of each row: same design, different run. None without columns to tell."""
    keys = [c for c in ("architecture", "match_group", "params", "tokens", "depth", "width", *MIXING) if c in runs]
    if not {"params", "tokens"} & set(keys):
        return None
    code = np.zeros(len(runs), dtype=np.int64)
    for c in keys:
        one = pd.factorize(runs[c], use_na_sentinel=False)[0]
        code = np.unique(code * (int(one.max()) + 1) + one, return_inverse=True)[1]
    return code


def seed_variance(runs: pd.DataFrame, y: Array, predicted: Array) -> SeedVariance | None:
    """Power of the seed variance in the loss, by gamma regression of squared deviations from cell means.

    None without replicates. The cell is the set of runs that share architecture, params, tokens, depth and width.
    """
    cells = _cells(runs)
    if cells is None:
        return None
    count = np.bincount(cells)
    mean = np.bincount(cells, y) / count
    ss = np.bincount(cells, (y - mean[cells]) ** 2)
    use = (count > 1) & (ss > 0)  # a spread of exactly 0 is a run listed twice, not a seed
    if not use.any():
        return None
    df, level = (count[use] - 1).astype(np.float64), mean[use] - predicted.mean()
    s2 = np.maximum(ss[use] / df, 1e-16)
    X = np.stack([np.ones_like(level), 2 * level], 1) if np.ptp(level) > 0.05 else np.ones((len(level), 1))
    beta = np.zeros(X.shape[1])
    beta[0] = np.log(np.average(s2, weights=df))
    for _ in range(50):  # Fisher scoring of the gamma likelihood with log link; weights df / 2 cancel
        mu = np.exp(X @ beta)
        step = np.linalg.lstsq(X * np.sqrt(df)[:, None], np.sqrt(df) * (s2 / mu - 1), rcond=None)[0]
        beta = beta + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-10:
            break
    miss = mean - np.bincount(cells, predicted) / count
    sigma2 = float(np.exp(beta[0]))
    tau2 = max(0.0, float((miss**2).mean()) - float((np.bincount(cells) ** -1.0).mean()) * sigma2)
    return SeedVariance(sigma2, float(beta[1]) if len(beta) > 1 else 0.0, tau2, int(df.sum()))


def lack_of_fit(runs: pd.DataFrame, y: Array, predicted: Array) -> tuple[float, int, int] | None:
    """F = MS of cell means around the law / MS of seeds around their cell, with degrees of freedom; None without seeds."""
    cells = _cells(runs)
    if cells is None:
        return None
    count = np.bincount(cells)
    if count.max() < 2 or len(y) > runs["run_id"].nunique():
        return None
    mean = np.bincount(cells, y) / count
    fitted = np.bincount(cells, predicted) / count
    d1, d2 = len(count), int(len(y) - len(count))
    pure = ((y - mean[cells]) ** 2).sum() / d2
    if d2 < 3 or pure <= 0:
        return None
    return float((count * (mean - fitted) ** 2).sum() / d1 / pure), d1, d2


def _runs(runs: pd.DataFrame) -> tuple[NDArray[np.str_], NDArray[np.intp]]:
    """Names of the runs in order, and which of them each row is of (np.unique would sort a million strings)."""
    code, names = pd.factorize(runs["run_id"].astype(str), sort=True)
    return names.to_numpy(), code


# ---- influence and curvature -------------------------------------------------------------------------------------------
def _influence(runs: pd.DataFrame, J: Array, e: Array) -> list[Check]:
    """Cook's distance and leverage of whole runs, by the one-step deletion of each run (linearised)."""
    from scipy.special import fdtri

    n, P = J.shape
    if P == 0 or n <= P:
        return []
    run, code = _runs(runs)
    G = len(run)
    Q, R = np.linalg.qr(J)
    if not np.isfinite(R).all() or np.abs(np.diag(R)).min() <= 0:
        return []
    s2 = float(e @ e) / max(1, n - P)
    # per run: its block of Q'Q, whose nonzero eigenvalues are those of its block of the hat matrix
    order = np.argsort(code, kind="stable")
    edges = np.concatenate([[0], np.cumsum(np.bincount(code))[:-1]])
    q = Q[order]
    gram = np.add.reduceat(q[:, :, None] * q[:, None, :], edges)
    pull = np.add.reduceat(q * e[order, None], edges)
    share = np.trace(gram, axis1=1, axis2=2)
    top = np.linalg.eigvalsh(gram)[:, -1]
    rest = np.eye(P) - gram + 1e-12 * np.eye(P)  # a run that alone determines a parameter leaves this singular
    step = np.linalg.solve(rest, pull[:, :, None])[:, :, 0]  # R (theta - theta without the run), one step
    cook = (step * step).sum(1) / (P * s2) if s2 > 0 else np.zeros(G)
    median = float(fdtri(P, max(1, n - P), 0.5))
    k, h = int(cook.argmax()), int(top.argmax())
    return [
        Check("largest Cook's distance of a run", float(cook[k]), "warn" if cook[k] > median else "ok", "INFLUENTIAL_RUN",
              f"run {run[k]!r} moves the estimates as far as their own spread: report the fit without it too"),
        Check("largest leverage of a run", float(share.max()), "warn" if share.max() > max(3 * P / G, 0.5) else "ok", "HIGH_LEVERAGE",
              f"run {run[int(share.argmax())]!r} carries {share.max():.1f} of {P} parameters"),
        Check("run that alone determines a parameter", float(top[h]), "block" if top[h] > 0.9 and G > P else "ok", "ONE_RUN_DECIDES",
              f"without run {run[h]!r} a parameter is not determined: add runs of its kind"),
    ]  # fmt: skip


def _curvature(encoding: Encoding, theta: Array, free: NDArray[np.intp], root: Array, e: Array) -> Check:
    """Bates-Watts RMS parameter-effects curvature times sqrt(F(P, n-P; .95)), over 64 fixed directions."""
    from scipy.special import fdtri

    name, action = (
        "curvature (parameter effects x sqrt F)",
        "the law bends over the error bars: intervals are lopsided, look at the profile figure; symmetric (Wald) ones don't apply",
    )
    n, P = len(e), len(free)
    if P == 0 or n <= P:
        return Check(name, 0.0, "ok", "CURVED", action)
    J = encoding.problem.jacobian(theta)[:, free] * root[:, None]
    Q, R = np.linalg.qr(J)
    if np.abs(np.diag(R)).min() < 1e-12 * np.abs(np.diag(R)).max():
        return Check(name, float("inf"), "warn", "CURVED", action)
    s = np.sqrt(float(e @ e) / (n - P)) + 1e-300
    directions = np.random.default_rng(0).standard_normal((64, P))
    directions /= np.sqrt((directions**2).sum(1, keepdims=True))
    move = np.zeros((64, len(theta)))
    move[:, free] = np.linalg.solve(R, directions.T).T * s * np.sqrt(P)
    h = min(1.0, 0.3 / max(np.abs(move).max(), 1e-300))
    tangential = np.zeros((64, P))
    for rows, part in encoding.problem.parts:  # slice by slice of a long table: 64 x rows would be 0.5 GB for a million
        f0 = part.log_loss(theta)
        bend = (part.log_loss(theta + h * move) + part.log_loss(theta - h * move) - 2 * f0) / h**2
        tangential += (bend * root[rows]) @ Q[rows]
    value = float(np.sqrt((tangential**2).sum(1).mean()) / (s * np.sqrt(P)) * np.sqrt(fdtri(P, n - P, 0.95)))
    return Check(name, value, "warn" if value > 0.3 else "ok", "CURVED", action)

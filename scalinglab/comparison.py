"""compare(): which law predicts runs that it has not seen, and is the difference more than luck?

The score is held-out error by run. Every run is left out in turn and really refitted (zero weights, one batch); then what
users want from a law is tried: the largest, the deepest and the longest runs are predicted from the others. Information
criteria appear only where the likelihood they need exists; on checkpoint rows they overstate the evidence by orders of
magnitude (Gemstones: AICc calls a difference decisive that a test by run puts at p = .04).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.diagnostics import size_tiers
from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit
from scalinglab.holdout import Fold, held_out
from scalinglab.nested import NestedF, check_same_rows, log_likelihood, nested_f
from scalinglab.objectives import StudentT

__all__ = ["Comparison", "FoldName", "NestedF", "compare", "log_likelihood", "nested_f", "sign_flip_p"]

Array = NDArray[np.float64]
FoldName = Literal["run", "largest", "deepest", "tokens", "architecture"]

_FOLDS = ("run", "largest", "deepest", "tokens", "architecture")
_SHARE = 0.2  # an extrapolation fold holds out at most this share, but at least one level
_MOST = 0.5  # a fold that would hold out more than this share is no fold
_EXACT_UP_TO = 14  # runs: 2^14 sign patterns are enumerated, beyond that 9,999 are drawn
_FLIPS = 9_999


@dataclass(frozen=True)
class Comparison:
    """Laws on the same runs, best first.

    Attributes
    ----------
    table : DataFrame
        One row per law. `rmse` in sample, `run_rmse` leave-one-run-out, `<fold>_rmse` and `<fold>_bias` (observed minus
        predicted) when extrapolating; all on log loss, each run counting once. `difference` in run_rmse to the best law
        with its standard error, `better_runs` (runs that this law predicts better than the best), sign-flip `p` and the
        smallest p attainable. `elpd`: sum over runs of the log density of held-out log losses. `aicc`, `bic` where legal,
        else NaN and `ic_reason`.
    pointwise : DataFrame
        One row per run and law: mean squared held-out error, bias, log score.
    folds : mapping
        What each fold held out, in words.
    notes : tuple of str
        What could not be computed and why.
    caveat : str
        What "best" means here.
    """

    table: pd.DataFrame
    pointwise: pd.DataFrame
    folds: Mapping[str, str]
    notes: tuple[str, ...]
    caveat: str

    @property
    def best(self) -> str:
        """Name of the law with the smallest held-out error."""
        return str(self.table.index[0])

    def to_frame(self) -> pd.DataFrame:
        """The table, best law first."""
        return self.table.copy()

    def summary(self) -> str:
        """The comparison as text, with what each fold held out, notes and the caveat."""
        return "\n".join(
            [
                "Comparison of laws: root mean square error of log loss by run, best first",
                _told(self.table).to_string(),
                "",
                *(f"  {name}: {told}" for name, told in self.folds.items()),
                *(f"  note: {note}" for note in self.notes),
                "",
                self.caveat,
            ]
        )

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.table)} laws; best {self.best}>"


def _told(table: pd.DataFrame) -> pd.DataFrame:
    """The table as short text: errors with their bias, the paired difference with its standard error, information criteria."""
    lacking = [
        c for c in ("difference", "difference_se", "p") if c not in table
    ]  # one law, or none that could be held out
    table = table.reindex(columns=[*table.columns, *lacking])
    out = pd.DataFrame({"k": table["k"], "in sample": table["rmse"].map("{:.5f}".format)})
    for column in [c for c in table if c.endswith("_rmse")]:
        fold = column.removesuffix("_rmse")
        bias = table.get(f"{fold}_bias")
        out["left-out run" if fold == "run" else fold] = [
            f"{v:.5f}" + ("" if bias is None or not np.isfinite(bias.iloc[i]) else f" ({bias.iloc[i]:+.4f})")
            for i, v in enumerate(table[column])
        ]
    for column, told in (("aicc", "AICc"), ("bic", "BIC")):
        if table[column].notna().any():
            out[told] = table[column].map("{:.1f}".format)
    paired = table["difference"].notna()
    out["worse by"] = [
        f"{d:.5f} +- {se:.5f}" if ok else ""
        for d, se, ok in zip(table["difference"], table["difference_se"], paired, strict=True)
    ]
    out["p"] = [f"{p:.2g}" if np.isfinite(p) else "" for p in table["p"]]
    out["status"] = table["status"]
    return out


def compare(
    fits: Mapping[str, Fit],
    *,
    folds: Sequence[FoldName] = ("run", "largest", "deepest", "tokens"),
    rng: int | np.random.Generator = 0,
) -> Comparison:
    """Compare fits of different laws to the same runs.

    Parameters
    ----------
    fits : name -> Fit; at least two, on the same rows (run_id and loss), in the same order.
    folds : "run" leaves out one run at a time and decides the order (without it the first fold does); "largest", "deepest",
        "tokens" hold out the upper end of that column, "architecture" each architecture in turn.
    rng : seed of the random sign flips, which are used beyond 14 runs.

    Raises
    ------
    ConfigError
        Fewer than two fits, different rows (says what differs), an unknown fold, fewer than three runs.

    Notes
    -----
    Sign flips assume that, were two laws equally good, the per-run differences would be symmetric about 0. The standard
    error of a difference is that of a mean over runs (delta method); left-out refits share most of their data, so both are
    approximate. The winner is the best of those tried on these runs: its error is a little too low.
    """
    if len(fits) < 2:
        raise ConfigError(f"compare needs at least two fits; got {len(fits)}")
    unknown = [f for f in folds if f not in _FOLDS]
    if unknown or not folds:
        raise ConfigError(f"folds={list(folds)!r}: choose from {', '.join(_FOLDS)}")
    check_same_rows(fits)
    first = next(iter(fits.values()))
    run_names, run = np.unique(first.runs["run_id"].astype(str).to_numpy(), return_inverse=True)
    if len(run_names) < 3:
        raise ConfigError(f"compare needs at least three runs; these fits have {len(run_names)}")
    made, told, notes = _make_folds(folds, fits, run)
    rows: dict[str, dict[str, object]] = {}
    points: dict[str, pd.DataFrame] = {}
    for name, fit in fits.items():
        rows[name], points[name], more = _score(fit, run, run_names, made)
        notes += [f"{name}, {text}" for text in more]
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "law"
    key = "run_rmse" if "run" in made else next((f"{f}_rmse" for f in made), "rmse")
    table = table.sort_values(key, kind="stable", na_position="last")
    best = str(table.index[0])
    if "run" in made:
        _pair(table, points, best, np.random.default_rng(rng))
    _criteria(table, fits)
    pointwise = pd.concat(points, names=["law", "run_id"])
    return Comparison(table, pointwise, told, tuple(notes), _caveat(table, fits, key))


# ---- folds ---------------------------------------------------------------------------------------------------------------
def _make_folds(
    names: Sequence[str], fits: Mapping[str, Fit], run: NDArray[np.intp]
) -> tuple[dict[str, Fold], dict[str, str], list[str]]:
    """Folds (masks of held-out rows), what they hold out in words, and why some can't be made."""
    made: dict[str, Fold] = {}
    told: dict[str, str] = {}
    notes: list[str] = []
    for name in dict.fromkeys(names):
        if name == "run":
            made[name] = Fold(run, int(run.max()) + 1)
            told[name] = f"each of {int(run.max()) + 1} runs left out in turn"
            continue
        column = _column(fits, {"largest": "params", "deepest": "depth", "tokens": "tokens"}.get(name, name))
        if column is None:
            notes.append(f"fold {name!r}: no fit has that column")
            continue
        if name == "architecture":
            code, levels = pd.factorize(column.astype(str), sort=True)
            if len(levels) < 2:
                notes.append("fold 'architecture': there is only one")
                continue
            made[name] = Fold(np.asarray(code, dtype=np.intp), len(levels))
            told[name] = f"each of {len(levels)} architectures left out in turn"
            continue
        held, text = _upper_end(column.to_numpy(np.float64), tiers=name == "largest")
        if held is None:
            notes.append(f"fold {name!r}: {text}")
            continue
        what = {"largest": "N", "deepest": "depth", "tokens": "tokens"}[name]
        made[name] = Fold(np.where(held, 0, -1), 1)
        count = len(np.unique(run[held]))
        told[name] = f"{what} >= {text} left out ({count} runs, {int(held.sum())} of {len(run)} rows)"
    return made, told, notes


def _column(fits: Mapping[str, Fit], name: str) -> pd.Series | None:
    """The column from the first fit that has it complete (size falls back to 12 depth width^2)."""
    for fit in fits.values():
        if name in fit.runs and fit.runs[name].notna().all():
            return fit.runs[name]
    if name == "params":
        for fit in fits.values():
            if {"depth", "width"} <= set(fit.runs) and fit.runs[["depth", "width"]].notna().all(axis=None):
                return 12.0 * fit.runs["depth"].astype(float) * fit.runs["width"].astype(float) ** 2
    return None


def _upper_end(values: Array, *, tiers: bool) -> tuple[NDArray[np.bool_] | None, str]:
    """Rows at the upper end: the largest size tier where there are tiers, else the top levels up to a fifth of the rows."""
    levels, count = np.unique(values, return_counts=True)
    if len(levels) < 2:
        return None, f"all rows have the value {levels[0]:g}"
    if tiers:
        tier = size_tiers(values)
        held = tier == tier.max()
        if tier.max() >= 2 and held.mean() <= 1 / 3:
            return held, f"{values[held].min():.4g} (the largest size tier)"
    above = count[::-1].cumsum()[::-1] / len(values)  # share of the rows at each level and above, falling
    held = values >= levels[min(int((above > _SHARE).sum()), len(levels) - 1)]
    if held.mean() > _MOST:
        return None, f"the largest value {levels[-1]:g} is that of {held.mean():.0%} of the rows"
    return held, f"{values[held].min():.4g}"


# ---- scores --------------------------------------------------------------------------------------------------------------
def _score(
    fit: Fit, run: NDArray[np.intp], names: NDArray[np.str_], folds: Mapping[str, Fold]
) -> tuple[dict[str, object], pd.DataFrame, list[str]]:
    notes: list[str] = []
    k = len(fit.encoding.coordinates) if fit.law.in_algebra else len(fit.params)
    line: dict[str, object] = {
        "k": k, "runs": len(names), "rows": len(run), "rmse": _rms_by_run(fit.residuals, run, np.ones(len(run), bool))[0],
    }  # fmt: skip
    points = pd.DataFrame(index=pd.Index(names, name="run_id"))
    for name, fold in folds.items():
        found = held_out(fit, fold, scores=name == "run")
        notes += [f"fold {name!r}: {text}" for text in found.notes]
        seen = np.isfinite(found.error)
        wanted = fold.code >= 0
        complete = bool((seen == wanted).all())
        rmse, bias = _rms_by_run(found.error, run, seen) if complete else (np.nan, np.nan)
        line[f"{name}_rmse"] = rmse
        if name == "run":
            count = np.bincount(run).astype(np.float64)
            e = np.where(seen, found.error, np.nan)
            points["mse"] = np.bincount(run, e * e) / count
            points["bias"] = np.bincount(run, e) / count
            points["log_score"] = found.log_score
            line["elpd"] = float(found.log_score.sum())
        else:
            line[f"{name}_bias"] = bias
    line["status"] = fit.status
    line["codes"] = ", ".join(dict.fromkeys(fit.codes))
    return line, points, notes


def _rms_by_run(e: Array, run: NDArray[np.intp], use: NDArray[np.bool_]) -> tuple[float, float]:
    """Root mean square and mean of errors over the rows in use, each run counting once."""
    count = np.bincount(run[use], minlength=int(run.max()) + 1).astype(np.float64)
    own = count > 0
    square = np.bincount(run[use], e[use] ** 2, minlength=len(count))[own] / count[own]
    mean = np.bincount(run[use], e[use], minlength=len(count))[own] / count[own]
    return float(np.sqrt(square.mean())), float(mean.mean())


def _pair(table: pd.DataFrame, points: Mapping[str, pd.DataFrame], best: str, rng: np.random.Generator) -> None:
    """Differences to the best law by run, with standard errors and sign-flip p; adds columns to the table."""
    base = points[best]
    signs, attainable = _signs(len(base), rng)
    for name in table.index:
        own = points[str(name)]
        if name == best or not np.isfinite(own["mse"]).all():
            continue
        d = (own["mse"] - base["mse"]).to_numpy(np.float64)
        a, b = float(np.sqrt(own["mse"].mean())), float(np.sqrt(base["mse"].mean()))
        # d sqrt(mean m) = dm / (2 sqrt(mean m)): influence of each run on the difference of the two errors
        pull = own["mse"].to_numpy() / (2 * a) - base["mse"].to_numpy() / (2 * b)
        table.loc[name, "difference"] = a - b
        table.loc[name, "difference_se"] = float(pull.std(ddof=1) / np.sqrt(len(d)))
        table.loc[name, "better_runs"] = int((d < 0).sum())
        table.loc[name, "p"], table.loc[name, "p_min"] = _flip(d, signs), attainable
        score = (own["log_score"] - base["log_score"]).to_numpy(np.float64)
        table.loc[name, "elpd_difference"] = float(score.sum())
        table.loc[name, "elpd_difference_se"] = float(score.std(ddof=1) * np.sqrt(len(score)))


def sign_flip_p(differences: Array, *, rng: int | np.random.Generator = 0) -> tuple[float, float]:
    """Two-sided sign-flip p of the mean of paired differences [G], and the smallest p that G pairs can give.

    Exact over all 2^G patterns up to G = 14; beyond that 9,999 random patterns, counted with the observed one. Assumes
    that the differences are independent and symmetric about 0 when nothing differs.

    Raises
    ------
    ConfigError
        No differences, or values that are not finite.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or not len(d) or not np.isfinite(d).all():
        raise ConfigError("differences must be a one-dimensional array of finite numbers, one per run")
    signs, attainable = _signs(len(d), np.random.default_rng(rng))
    return _flip(d, signs), attainable


def _signs(count: int, rng: np.random.Generator) -> tuple[Array, float]:
    """Sign patterns [F, G] and the smallest attainable two-sided p."""
    if count <= _EXACT_UP_TO:
        bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        return (1.0 - 2.0 * bits).astype(np.float64), 2.0 / 2**count
    signs = rng.choice(np.array([-1.0, 1.0]), size=(_FLIPS, count)).astype(np.float64)
    return signs, max(2.0 / float(2**count), 1.0 / (_FLIPS + 1))


def _flip(d: Array, signs: Array) -> float:
    total = np.abs(signs @ d)
    observed = abs(d.sum())
    as_large = int((total >= observed - 1e-12 * np.abs(d).sum()).sum())
    return as_large / len(signs) if len(d) <= _EXACT_UP_TO else (as_large + 1) / (len(signs) + 1)


# ---- information criteria ------------------------------------------------------------------------------------------------
def _criteria(table: pd.DataFrame, fits: Mapping[str, Fit]) -> None:
    """AICc and BIC on runs, where they mean something; else NaN with the reason. Adds columns to the table."""
    kinds = {(f.estimator, f.variance_power) for f in fits.values()}
    table["aicc"], table["bic"], table["ic_reason"] = np.nan, np.nan, ""
    for name in table.index:
        fit = fits[str(name)]
        k = int(table.loc[name, "k"]) + 1  # the residual variance is a parameter
        n = fit.n_runs
        reason = ""
        if not fit.estimator.likelihood:
            reason = f"NO_LIKELIHOOD: {fit.estimator.label} is no likelihood"
        elif len(fit.runs) > n:
            reason = "ROWS_NOT_INDEPENDENT: several rows per run; only scores by run are legal"
        elif len(kinds) > 1:
            reason = "DIFFERENT_LIKELIHOODS: the fits differ in estimator or variance power"
        elif isinstance(fit.estimator, StudentT) and np.ptp(fit.weights) > 0:
            reason = "WEIGHTED_STUDENT: a weighted Student-t fit has no likelihood here"
        elif n - k - 1 <= 0:
            reason = f"FEW_RUNS: {n} runs for {k} parameters"
        elif fit.status in ("failed", "max_iter"):
            reason = "NOT_CONVERGED: no maximum of the likelihood"
        if reason:
            table.loc[name, "ic_reason"] = reason
            continue
        ll = log_likelihood(fit)
        table.loc[name, "aicc"] = -2 * ll + 2 * k + 2 * k * (k + 1) / (n - k - 1)
        table.loc[name, "bic"] = -2 * ll + k * np.log(n)
        if fit.status == "at_bound":
            table.loc[name, "ic_reason"] = "AT_BOUND: a parameter at its bound is counted as free"


def _caveat(table: pd.DataFrame, fits: Mapping[str, Fit], key: str) -> str:
    """What the first place means, in words."""
    best = str(table.index[0])
    fold = key.removesuffix("_rmse")
    parts = [
        f"{best} has the smallest error ({fold}: {table[key].iloc[0]:.4g}); it is the best of {len(table)} laws tried on these runs."
    ]
    if "p" in table:
        rivals = table[table["p"].notna()]
        close = [
            f"{name} (p = {row['p']:.2g}, difference {row['difference']:.2g} +- {row['difference_se']:.2g})"
            for name, row in rivals.iterrows() if row["p"] > 0.05
        ]  # fmt: skip
        if len(rivals) and rivals["p_min"].max() > 0.05:
            parts.append(f"With {int(table['runs'].iloc[0])} runs no difference can reach p = .05.")
        elif close:
            parts.append(f"Not told apart from: {', '.join(close)}.")
        elif len(rivals):
            parts.append("Each other law is worse by run at p < .05, not adjusted for the number of laws.")
    for name in ("largest", "deepest", "tokens", "architecture"):
        column = f"{name}_rmse"
        if column in table and column != key and table[column].notna().any():
            winner = str(table[column].idxmin())
            if winner != best:
                parts.append(
                    f"Held out by {name}, {winner} predicts better ({table.loc[winner, column]:.4g} against {table.loc[best, column]:.4g})."
                )
    if "E_COLLAPSE" in fits[best].codes:
        parts.append(f"The floor of {best} is near zero: do not extrapolate with it.")
    if fits[best].status in ("max_iter", "failed", "not_identified"):
        parts.append(f"The fit of {best} has status {fits[best].status}.")
    return " ".join(parts)

"""What figures have in common: rows at which a law is drawn, runs moved along the law, and bands around curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from scalinglab.errors import ConfigError, FitError
from scalinglab.features import DERIVED_COLUMNS
from scalinglab.report import style

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.uncertainty import Resampling

Array = NDArray[np.float64]
Spread = Literal["jackknife", "none"]  # or a Resampling of the same fit

_SHAPE = frozenset({"depth", "width", "aspect", "u"})
_KAPPA = 12.0  # params / (depth width^2) of a block with a 4x feed-forward, where the runs don't say
_REFERENCE = "pre_ln"  # what other architectures are compared with, where it is among them
_GAP = 0.15  # sizes further apart than this, on the log scale, are different sizes
_TIER = 0.3  # and no size is wider than this
_FEW = 6  # sizes that get ticks of their own


@dataclass(frozen=True)
class Band:
    """A curve and its interval, arrays of one shape; limits are NaN where there is none."""

    estimate: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Spreads:
    """How bands are made for one figure: the resampling (or None), the confidence level, and the sentence that says so."""

    resampling: Resampling | None
    level: float
    note: str

    @classmethod
    def of(cls, fit: Fit, uncertainty: Resampling | Spread, level: float) -> Spreads:
        """From what the caller asked for.

        Raises
        ------
        ConfigError
            A level outside (0, 1), an unknown word, or a resampling of another fit.
        """
        if not 0 < level < 1:
            raise ConfigError(f"level must lie between 0 and 1, not {level}")
        if isinstance(uncertainty, str):
            if uncertainty == "none":
                return cls(None, level, "No uncertainty drawn.")
            if uncertainty != "jackknife":
                raise ConfigError(
                    f"uncertainty is {uncertainty!r}: give 'jackknife', 'none' or a Resampling of this fit"
                )
            try:
                made = fit.jackknife
            except FitError as error:
                return cls(None, level, f"No uncertainty drawn: {error}.")
        else:
            made = uncertainty
            missing = [n for n in fit.params.index if n not in made.params.columns]
            if missing:
                raise ConfigError(f"the resampling has no parameter {missing[0]!r}: it belongs to another fit")
        return cls(made, level, f"{100 * level:g}\u00a0% intervals: {made.method}.")

    def band(self, fit: Fit, rows: pd.DataFrame) -> Band:
        """Loss of the law at rows [n] with its interval (symmetric in log loss)."""
        estimate = fit.predict(rows)
        if self.resampling is None:
            nothing = np.full_like(estimate, np.nan)
            return Band(estimate, nothing, nothing)
        made = self.resampling.interval(lambda p: fit.predict(rows, p), self.level, log=True)
        return Band(estimate, np.where(made.valid, made.low, np.nan), np.where(made.valid, made.high, np.nan))


def has_shape(fit: Fit) -> bool:
    """Whether the law reads depth, width or aspect."""
    return bool(fit.law.reads & _SHAPE)


def sizes(fit: Fit) -> Array:
    """Params of each fitted row [n]; from depth and width where the law has no need of params and the runs lack them.

    Raises
    ------
    ConfigError
        Neither is there.
    """
    runs = fit.runs
    if "params" in runs and np.isfinite(runs["params"].to_numpy(np.float64)).all():
        return runs["params"].to_numpy(np.float64)
    if {"depth", "width"} <= set(runs.columns):
        return _KAPPA * runs["depth"].to_numpy(np.float64) * runs["width"].to_numpy(np.float64) ** 2
    raise ConfigError("this figure needs params in the fitted runs; the runs have " + ", ".join(map(str, runs.columns)))


def tokens(fit: Fit) -> Array:
    """Tokens of each fitted row [n]. Raises ConfigError where the runs lack them."""
    if "tokens" not in fit.runs or not np.isfinite(fit.runs["tokens"].to_numpy(np.float64)).all():
        raise ConfigError("this figure needs tokens in the fitted runs; add the column, or fit a law of tokens")
    return fit.runs["tokens"].to_numpy(np.float64)


def aspects(fit: Fit) -> Array | None:
    """Width over depth of each fitted row [n], or None."""
    runs = fit.runs
    if {"depth", "width"} <= set(runs.columns):
        out = runs["width"].to_numpy(np.float64) / runs["depth"].to_numpy(np.float64)
    elif "aspect" in runs:
        out = runs["aspect"].to_numpy(np.float64)
    else:
        return None
    return out if np.isfinite(out).all() else None


def kappa(fit: Fit) -> float:
    """params / (depth width^2), median over the runs."""
    runs = fit.runs
    if {"params", "depth", "width"} <= set(runs.columns):
        found = float(np.nanmedian(sizes(fit) / (runs["depth"] * runs["width"] ** 2).to_numpy(np.float64)))
        if np.isfinite(found) and found > 0:
            return found
    return _KAPPA


def middle(values: ArrayLike) -> float:
    """Geometric median."""
    return float(np.exp(np.median(np.log(np.asarray(values, dtype=np.float64)))))


def clusters(values: ArrayLike, *, gap: float = _GAP, widest: float = _TIER) -> list[Array]:
    """Positive values in groups of like size, ascending: a new one where ln(value) jumps by more than `gap`.

    A group wider than `widest` (checkpoints follow one another closely) is cut, from its low end, into pieces that are not.
    """
    v = np.sort(np.asarray(values, dtype=np.float64).ravel())
    out: list[Array] = []
    for group in np.split(v, np.flatnonzero(np.diff(np.log(v)) > gap) + 1):
        rest = group
        while len(rest):
            kept = (
                np.log(rest / rest[0]) <= widest if np.log(group[-1] / group[0]) > widest else np.ones(len(rest), bool)
            )
            out.append(rest[kept])
            rest = rest[~kept]
    return out


def own_levels(values: ArrayLike, most: int, *, every: int = 0) -> list[float]:
    """Sizes that were run: the middle one of each group of like size; of many groups `most`, evenly apart on the log scale.

    every : number of groups up to which all are taken, where that is more than `most`.
    """
    found = [float(group[len(group) // 2]) for group in clusters(values)]
    if len(found) <= max(most, every):
        return found
    z = np.log(found)
    return [found[k] for k in sorted({int(np.abs(z - t).argmin()) for t in np.linspace(z[0], z[-1], most)})]


def label_own_sizes(ax: Axes, values: ArrayLike, kind: style.Kind) -> None:
    """Ticks of a log x axis at the sizes that were run, where they are few and apart: round numbers often miss the largest."""
    levels = own_levels(values, 2 * _FEW)
    low, high = np.log(ax.get_xlim())
    if 2 <= len(levels) <= _FEW and np.diff(np.log(levels)).min() >= 0.13 * (high - low):
        ax.xaxis.set_major_locator(FixedLocator(levels))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: style.label_of(v, kind)))


def rows_at(fit: Fit, columns: Mapping[str, ArrayLike], *, group: str | None = None) -> pd.DataFrame:
    """Rows that the law can read: `columns` (params, tokens, aspect as needed, broadcast), shape from them, the rest median.

    A law with shape gets depth and width of the size and aspect ratio (the runs' geometric median where not given).
    """
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in columns.values()))
    out = pd.DataFrame(dict(zip(columns, arrays, strict=True)))
    if has_shape(fit):
        if "params" not in out:
            out["params"] = middle(sizes(fit))
        if "aspect" not in out:
            seen = aspects(fit)
            out["aspect"] = middle(seen) if seen is not None else 1.0
        out["depth"] = np.cbrt(out["params"] / (kappa(fit) * out["aspect"] ** 2))
        out["width"] = out["depth"] * out["aspect"]
    if {"params", "tokens"} <= set(out.columns):
        out["flops"] = 6 * out["params"] * out["tokens"]
    for name in fit.law.reads - set(out.columns) - set(DERIVED_COLUMNS):
        out[name] = middle(fit.runs[name])
    if fit.law.by is not None:
        out[fit.law.by] = group if group is not None else fit.law.levels[0]
    return out


def held(fit: Fit, given: frozenset[str]) -> str:
    """What curves hold constant beyond the given columns, in words ("" if nothing)."""
    parts = []
    if has_shape(fit) and "aspect" not in given:
        seen = aspects(fit)
        if seen is not None:
            parts.append(f"aspect ratio {middle(seen):.3g}")
    rest = fit.law.reads - given - _SHAPE - {"params", "tokens", "flops"}
    parts += [f"{name} {middle(fit.runs[name]):.3g}" for name in sorted(rest)]
    return f"Curves at {', '.join(parts)}." if parts else ""


def groups(fit: Fit) -> list[tuple[str | None, NDArray[np.bool_]]]:
    """Levels of a crossed fit with the mask of their rows, the usual reference first; one nameless group otherwise."""
    if fit.law.by is None:
        return [(None, np.ones(len(fit.runs), bool))]
    column = fit.runs[fit.law.by].astype(str).to_numpy()
    return [(level, column == level) for level in sorted(fit.law.levels, key=lambda name: name != _REFERENCE)]


def last_rows(fit: Fit) -> NDArray[np.bool_]:
    """Mask of the last row of each run, by step or tokens."""
    runs = fit.runs
    key = next((c for c in ("step", "tokens") if c in runs and runs[c].notna().all()), None)
    order = np.arange(len(runs)) if key is None else runs[key].to_numpy(np.float64)
    frame = pd.DataFrame({"run": runs["run_id"].astype(str).to_numpy(), "at": order})
    mask = np.zeros(len(runs), bool)
    mask[frame.groupby("run")["at"].idxmax().to_numpy()] = True
    return mask


def run_means(fit: Fit, values: Array) -> pd.DataFrame:
    """Mean of `values` [n] per run: columns run_id, value, first (row index of the run's first row)."""
    run, index, code = np.unique(fit.runs["run_id"].astype(str).to_numpy(), return_index=True, return_inverse=True)
    return pd.DataFrame({"run_id": run, "value": np.bincount(code, values) / np.bincount(code), "first": index})

"""From losses to verdicts, for one data set or for many simulated ones at once: the same code is used and planned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.misscaling.contrasts import Estimate, Roles, Slopes, apart, contrast, slopes, spread, terms
from scalinglab.misscaling.curves import SIDES, WINDOW, Array, Curves, Model, fit_curves, within_window
from scalinglab.misscaling.identical import distinct, overlap, together
from scalinglab.misscaling.intake import Arm
from scalinglab.misscaling.noise import Noise, Readings, Resample, draw_means, expected, read_curves, refit, run_noise
from scalinglab.misscaling.pooling import pool_curvature
from scalinglab.misscaling.rules import Margins, decide, drift_states, gain_states

_MOST_SIDES = 50


@dataclass(frozen=True)
class Method:
    """How curves are fitted and redrawn. tau : SD of shapes about a line (nats) where it is given, else it is
    estimated. pool : draw curvatures towards the mean of their arm (see `pooling`)."""

    model: Model = "shared"
    window: float = WINDOW
    sides: int = SIDES
    draws: int = 1999
    resample: Resample = "auto"
    tau: float | None = None
    pool: bool = True

    def __post_init__(self) -> None:
        if self.draws < 9 or (self.tau is not None and not self.tau >= 0):
            raise ConfigError(f"draws={self.draws} must be at least 9, and tau={self.tau} not negative (nats) or None")
        if not 1 <= self.sides <= _MOST_SIDES:
            raise ConfigError(
                f"sides={self.sides} must be 1 to {_MOST_SIDES}: rates that must lie on either side of the best"
            )


@dataclass(frozen=True)
class Drawn:
    """How draws were made: in words, degrees of freedom of their variance, and whether whole seeds were redrawn."""

    told: str
    df: float
    whole_seeds: bool


@dataclass(frozen=True)
class Analysis:
    """What a set of learning-rate sweeps says; arrays [T] over trials, or without that axis for one data set.

    curves, noise, point : fits and readings (residuals of the noise without shapes whose runs are another's, see `identical`). cov [..., 4C, 4C], draws [B, 4C] (one data set only). made, drift_made : slopes.
    gains : contrasts by name. drifts : of ln optimal lr per ln depth by arm. tau, drift_tau : SD of shapes about lines; arm_tau :
    the part that arms don't share, which is in differences of gains.
    base [C] : the cell of the smallest depth of each ladder. states : of gains and drifts, for each candidate. verdicts : by
    candidate ("" where there is none).
    """

    curves: Curves
    base: NDArray[np.intp]
    noise: Noise
    point: Readings
    cov: Array
    draws: Array | None
    how: Drawn
    made: Slopes
    drift_made: Slopes
    gains: Mapping[str, Estimate]
    drifts: Mapping[Arm, Estimate]
    tau: Array
    arm_tau: Array
    drift_tau: Array
    states: Mapping[str, Mapping[str, NDArray[np.str_]]]
    verdicts: Mapping[str, NDArray[np.str_]]
    depth_gains: Mapping[tuple[Arm, str], Estimate] = field(default_factory=dict)


def analyse(
    cells: pd.DataFrame,
    z: Array,
    loss: Array,
    roles: Roles,
    *,
    method: Method,
    margins: Margins,
    rng: np.random.Generator,
    parametric: bool = False,
) -> Analysis:
    """Fit, redraw, contrast and decide.

    Parameters
    ----------
    cells : one row per arm and shape (see `Grids`). z [C, J]. loss [..., C, J, S].
    parametric : redraw normal noise of the estimated SD, for many trials at once.
    """
    own = distinct(cells)
    base, reference = _pointers(cells, roles)
    whole_z = z
    z, loss, groups = z[own.rows], loss[..., own.rows, :, :], own.groups
    count = np.isfinite(loss).sum(-1).astype(np.float64)
    tried = ~np.isnan(loss)
    mean = np.where(tried.any(-1), np.nansum(loss, -1) / np.maximum(tried.sum(-1), 1), np.nan)
    counted = np.where(tried.any(-1), np.maximum(count, 1e-9), 0.0)
    curves = fit_curves(z, mean, counted, model=method.model, window=method.window, sides=method.sides, groups=groups)
    noise = run_noise(loss, z, curves, model=method.model, groups=len(np.unique(groups)))
    pooled = None
    if method.pool:
        curves, pooled = pool_curvature(curves, z, counted, groups, model=method.model, sigma=noise.sigma)
    whole = curves.take(own.of)
    cap = np.where(np.isfinite(mean), mean, -np.inf).max(-1)[..., own.of]

    def read(c: Curves, y: Array) -> Readings:
        return read_curves(c.take(own.of), whole_z, y[..., own.of, :], base, reference, cap, point=whole)

    def again(y: Array, n: Array) -> Readings:
        made = refit(y, n, z, curves, model=method.model, groups=groups)
        if pooled is not None:
            made, _ = pool_curvature(made, z, n, groups, model=method.model, sigma=noise.sigma, pool=pooled)
        return read(within_window(made), y)

    smooth = expected(loss, z, curves)
    point = read(curves, smooth)
    draws, how = None, Drawn("parametric bootstrap", float(np.mean(noise.df)), False)
    inflate = 1.0
    if parametric:
        sigma = noise.sigma[..., None, None] / np.sqrt(np.maximum(count, 1))
        y = smooth + sigma * rng.standard_normal((method.draws, *mean.shape))
        values = again(y, count).stacked()
    else:
        d = draw_means(loss, z, curves, noise, draws=method.draws, rng=rng, how=method.resample)
        draws = values = again(d.mean, d.count).stacked()
        how, inflate = Drawn(d.how, d.df, d.whole_seeds), d.inflate
    cov = inflate * _covariance(values, whole_z)
    curves = whole
    usable = np.ones(len(cells), bool) if parametric else curves.usable
    return _decide(cells, curves, noise, point, cov, draws, how, roles, method, margins, usable, loss.shape[-1])


def decide_again(
    cells: pd.DataFrame, made: Analysis, roles: Roles, method: Method, margins: Margins, *, seeds: int
) -> Analysis:
    """The same curves and draws judged by other margins or another tau."""
    return _decide(cells, made.curves, made.noise, made.point, made.cov, made.draws, made.how, roles, method, margins,
                   made.curves.usable, seeds)  # fmt: skip


def _decide(
    cells: pd.DataFrame, curves: Curves, noise: Noise, point: Readings, cov: Array, draws: Array | None, how: Drawn,
    roles: Roles, method: Method, margins: Margins, usable: NDArray[np.bool_], seeds: int,
) -> Analysis:  # fmt: skip
    C = len(cells)
    arms = tuple(dict.fromkeys(zip(cells["architecture"], cells["parametrization"], strict=True)))
    own = slopes(cells, arms, usable, together=False)
    made = slopes(cells, roles.compared, usable)
    fixed = point.fixed
    values = point.stacked()
    optimum, tuned = slice(0, C), slice(C, 2 * C)
    shared_runs = overlap(cells)
    drift_tau2, drift_scale, drift_df = spread(
        values[..., optimum], cov[..., optimum, optimum], own, overlap=shared_runs
    )
    drifts = {
        a: contrast(values[..., optimum], cov[..., optimum, optimum], w, w, drift_tau2, drift_scale, drift_df, how.df)
        for a, w in own.weights.items()
    }
    floor = np.zeros(()) if how.whole_seeds else noise.row**2 / seeds
    lines, arms_alone = (
        spread(values[..., tuned], cov[..., tuned, tuned], s, floor=floor, fixed=method.tau, overlap=shared_runs)
        for s in (made, apart(made, cells))
    )
    zero = np.zeros(C)

    def gain(on_tuned: Array, on_fixed: Array, on_shared: Array = zero, *, alone: bool = False) -> Estimate:
        w = np.concatenate([zero, on_tuned, on_fixed, on_shared])
        off = lines if alone else arms_alone  # what all arms miss alike is in the gain of one, and not in a difference
        return contrast(values, cov, w, together(cells, on_tuned + on_fixed + on_shared), *off, how.df)

    gains = {name: gain(*w) for name, w in terms(made, roles).items()}
    for a in roles.candidates:
        theirs, ours = made.weights.get(roles.scaled_of.get(a, ("", ""))), made.weights.get(roles.scaled or ("", ""))
        if theirs is not None and ours is not None:
            gains[f"W_same:{a}"] = gain(ours, zero, -theirs)
    per_arm = {(a, "tuned"): gain(-w, zero, alone=True) for a, w in made.weights.items()} | {
        (a, "fixed"): gain(zero, -w, alone=True)
        for a, w in made.weights.items()
        if np.isfinite(fixed[..., np.flatnonzero(w)]).all()
    }
    family = tuple(n for n in gains if n == "M" or n.startswith("W:"))
    shared = gain_states(gains, margins, family=family)
    drift = drift_states({"/".join(a): e for a, e in drifts.items()}, margins)
    states, verdicts = {}, {}
    lost = ~curves.usable.all(-1) if curves.usable.ndim > 1 else np.asarray(False)  # a trial with a boundary optimum
    for name in roles.candidates or ("",):
        found = {n: s for n, s in shared.items() if n in ("U", "V", "M")}
        for key, arm in (
            ("drift naive", roles.naive),
            ("drift scaled", roles.scaled),
            ("drift own", roles.scaled_of.get(name)),
        ):
            if arm is not None and "/".join(arm) in drift:
                found[key] = drift["/".join(arm)]
        found |= {n.partition(":")[0]: s for n, s in shared.items() if n.endswith(f":{name}") and n.startswith("W")}
        states[name] = found
        verdicts[name] = np.where(lost, "inconclusive", decide(found))
    tau, arm_tau, drift_tau = (np.sqrt(np.maximum(v, 0)) for v in (lines[0], arms_alone[0], drift_tau2))
    return Analysis(curves, _pointers(cells, roles)[0], noise, point, cov, draws, how, made, own, gains, drifts, tau, arm_tau,
                    drift_tau, states, verdicts, per_arm)  # fmt: skip


def _pointers(cells: pd.DataFrame, roles: Roles) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For each cell: that of the smallest depth of its ladder and arm, and that of the scaled reference at its place."""
    keys = list(zip(cells["architecture"], cells["parametrization"], cells["ladder"], strict=True))
    depth = cells["depth"].to_numpy(np.float64)
    first: dict[tuple[str, str, str], int] = {}
    for i, key in enumerate(keys):
        if key not in first or depth[i] < depth[first[key]]:
            first[key] = i
    base = np.array([first[k] for k in keys], dtype=np.intp)
    at = {(k[2], d): i for i, (k, d) in enumerate(zip(keys, depth, strict=True)) if (k[0], k[1]) == roles.scaled}
    reference = np.array([at.get((k[2], d), -1) for k, d in zip(keys, depth, strict=True)], dtype=np.intp)
    return base, reference


def _covariance(values: Array, z: Array) -> Array:
    """Covariance over the first axis of [B, ..., K]; readings that a draw lacks keep its mean, and none goes beyond the grid."""
    with np.errstate(invalid="ignore"):
        known = np.isfinite(values)
        n = np.maximum(known.sum(0), 1)
        mean = np.where(known, values, 0.0).sum(0) / n
        away = np.where(known, values - mean, 0.0)
    C = z.shape[0]
    reach = np.nanmax(z, -1) - np.nanmin(z, -1)
    away[..., :C] = np.clip(away[..., :C], -reach, reach)
    return np.asarray(np.einsum("b...k,b...l->...kl", away, away, optimize=True) / max(1, len(values) - 1))

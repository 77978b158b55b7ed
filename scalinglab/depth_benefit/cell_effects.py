"""Effects from a cell model: E1, E1s, E2, E5 and E7 with the mismatch correction and their joint covariance.

B_adj = w'(loss + eps_N ln N + eps_D ln D),   Var = w'Sw + (w'ln N)^2 Var eps_N + ... + 2 (w'ln N)(w'ln D) Cov
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scalinglab.depth_benefit.cells import CellModel, correct_cells
from scalinglab.depth_benefit.effects import Correction, Effect, EffectSet, Unit, satterthwaite
from scalinglab.depth_benefit.intake import CONVENTIONS
from scalinglab.depth_benefit.rates import Rates
from scalinglab.errors import ConfigError
from scalinglab.features import R0

Array = NDArray[np.float64]


def cell_effects(
    model: CellModel,
    *,
    rates: Rates | None = None,
    screen: Rates | None = None,
    reference: str | None = None,
    correct: bool = True,
) -> EffectSet:
    """E1, E1s, E2 (each FLOP convention), first-order E5, and E7 against the reference, with their joint covariance.

    rates : exchange rates for the mismatch correction and the equivalents. Without them nothing is corrected and E2, E5 are
        left out; with correct=False E2 is left out too. screen : rates that only predict how large a spurious gap may be (default: `rates`).
    correct : False leaves the mismatch in, to report both.
    """
    screen = screen or rates
    used = rates if correct else None
    if used is not None and not model.corrected:
        model = correct_cells(model, used)
    rows: list[Effect] = []
    weights: list[Array] = []
    moves: list[tuple[float, float]] = []  # derivative by eps_N, eps_D

    def add(
        estimand: str, a: str, w: Array, unit: Unit, *, note: str = "", variant: str = "", flops: float | None = None,
        reference: str | None = None,
    ) -> None:  # fmt: skip
        effect, gradient = _linear(
            model, w, used, screen, estimand, a, unit, flops=flops, reference=reference, variant=variant, note=note
        )
        rows.append(effect)
        weights.append(w)
        moves.append(gradient)

    at = model.reference_x
    where = f"at aspect {R0:g}" if at is not None else "at the middle of the contrast"
    for a in model.architectures:
        add("E1", a, model.weights(a), "nats")
        add("E1s", a, model.weights(a, "slope", at), "nats/lnL", note=where)
        if used is not None:
            for convention in CONVENTIONS:
                column = f"ln_flops_{convention}"
                if column in model.table:
                    add("E2", a, model.weights(a), "nats", variant=convention, flops=flops_gap(model, a, column))
    if reference is not None:
        if reference not in model.architectures:
            raise ConfigError(f"reference={reference!r} has no depth contrast; known: {', '.join(model.architectures)}")
        for a in model.architectures:
            if a != reference:
                add("E7", a, model.weights(a) - model.weights(reference), "nats", reference=reference)
    W = np.stack(weights)
    G = np.array(moves)
    cov = model.covariance(W)
    if used is not None:
        cov = cov + G @ used.cov[:2, :2] @ G.T
    made = EffectSet(tuple(rows), cov)
    return _with_equivalents(made, rates) if rates is not None else made


def corrected(
    raw: float, variance: float, dln_params: float, dln_tokens: float, rates: Rates
) -> tuple[float, float, Correction]:
    """B with the residual mismatch taken out, its standard error, and the correction.

    B_adj = B_raw - eps_N dlnN - eps_D dlnD,  Var = Var(B_raw) + dlnN^2 Var eps_N + dlnD^2 Var eps_D + 2 dlnN dlnD Cov,
    with d = deep minus shallow and B_raw = loss(shallow) - loss(deep).

    Raises
    ------
    ConfigError
        A negative variance.
    """
    if not variance >= 0:
        raise ConfigError(f"the variance of the raw gap is {variance}: it must not be negative")
    g = np.array([-dln_params, -dln_tokens])
    nats = float(g @ [rates.params, rates.tokens])
    extra = float(g @ rates.cov[:2, :2] @ g)
    se = math.sqrt(variance + extra)
    spurious = abs(rates.params * dln_params) + abs(rates.tokens * dln_tokens)
    needed = spurious > 0.5 * math.sqrt(variance)
    return raw + nats, se, Correction(dln_params, dln_tokens, nats, math.sqrt(extra), spurious, True, needed)


def _linear(
    model: CellModel,
    w: Array,
    used: Rates | None,
    screen: Rates | None,
    estimand: str,
    a: str,
    unit: str,
    *,
    flops: float | None = None,
    reference: str | None = None,
    variant: str = "",
    note: str = "",
) -> tuple[Effect, tuple[float, float]]:
    raw = float(w @ model.raw)
    variance, df = model.variance(w)
    dn, dd = (-float(w @ model.table[c].to_numpy(np.float64)) for c in ("ln_params", "ln_tokens"))
    gradient = (0.0, 0.0)
    correction = Correction(dn, dd)
    if screen is not None:
        spurious = abs(screen.params * dn) + abs(screen.tokens * dd)
        correction = Correction(dn, dd, 0.0, 0.0, spurious, False, spurious > 0.5 * math.sqrt(variance))
    estimate, se = raw, math.sqrt(variance)
    if used is not None:
        estimate, se, correction = corrected(raw, variance, dn, dd, used)
        gradient = (-dn, -dd)
        if flops is not None:  # at equal FLOPs the dearer shape gets fewer tokens
            estimate += used.tokens * flops
            gradient = (-dn, -dd + flops)
        g = np.array(gradient)
        extra = float(g @ used.cov[:2, :2] @ g)
        se = math.sqrt(variance + extra)
        if np.isfinite(used.df):
            df = satterthwaite([variance, extra], [df, used.df])
        elif extra > 0:
            df = satterthwaite([variance, extra], [df, math.inf])
    return Effect(
        estimand, a, estimate, se, df, unit, f"cell means, degree {model.degree}, {model.error} error",  # type: ignore[arg-type]
        reference=reference, variant=variant, contrast=model.contrast, correction=correction, note=note,
    ), gradient  # fmt: skip


def flops_gap(model: CellModel, architecture: str, column: str) -> float:
    """ln FLOPs per token of the shallow less that of the deep shape, at the N of their block; the mean over blocks.

    Six FLOPs for each parameter that isn't matched are taken out. Between shapes of a block ln FLOPs are interpolated in x,
    so that a block without exactly these two shapes counts as well.
    """
    own = model.table[model.table["architecture"] == architecture]
    x, size = own["x"].to_numpy(np.float64), np.exp(own["ln_params"].to_numpy(np.float64))
    cost, block = np.exp(own[column].to_numpy(np.float64)), own["block"].to_numpy()
    gaps = []
    for name in dict.fromkeys(block):
        rows = np.flatnonzero(block == name)
        rows = rows[np.argsort(x[rows], kind="stable")]
        per_token = cost[rows] - 6.0 * (size[rows] - size[rows].mean())
        at = np.interp([model.x_shallow, model.x_deep], x[rows], np.log(per_token))
        gaps.append(at[0] - at[1])
    return float(np.mean(gaps))


def _with_equivalents(made: EffectSet, rates: Rates) -> EffectSet:
    """E5 to first order: ln of the factor of params, tokens and compute that is worth E1."""
    rows = list(made.effects)
    base = [i for i, e in enumerate(rows) if e.estimand == "E1"]
    kinds = (("params", rates.params, 0), ("tokens", rates.tokens, 1), ("compute", rates.compute, 2))
    T = [np.eye(len(rows))]
    extra_se: list[float] = []
    for i in base:
        for name, rate, k in kinds:
            if not rate > 0:
                continue
            e = rows[i]
            line = np.zeros(len(rows) if not T else made.cov.shape[0])
            line[i] = 1.0 / rate
            T.append(line[None])
            # the rate's own error; that it also enters the correction is second order
            own = abs(e.estimate) / rate**2 * math.sqrt(max(0.0, rates.cov[k, k]))
            extra_se.append(own)
            rows.append(Effect(
                "E5", e.architecture, e.estimate / rate, math.hypot(e.se / rate, own), e.df, "ln ratio",
                e.method + f"; first order, {rates.source}", variant=name, contrast=e.contrast, correction=e.correction,
            ))  # fmt: skip
    M = np.concatenate(T)
    cov = M @ made.cov @ M.T
    at = len(made)
    for j, own in enumerate(extra_se):
        cov[at + j, at + j] += own * own
    return EffectSet(tuple(rows), cov)

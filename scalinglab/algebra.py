"""Closed forms of the scaling laws: compute-optimal sizes, best shapes, elasticities, exchange rates.

Plain numpy arithmetic that broadcasts over replicates and budgets. The same formulas are derived from the laws with
sympy in `scalinglab.derivations` (`symbolic("chinchilla")`), and a test holds one against the other; formulas as text
become sympy or LaTeX in `scalinglab.typeset`. Both are re-exported here; neither loads sympy before it is called.

Symbols: N parameters, D tokens, C = k N D training FLOPs, L depth, d width, r = d / L aspect ratio, u = ln(r / r0),
x = ln L, N = kappa L d**2 backbone parameters. Losses are in nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalinglab.derivations import (
    DERIVATIONS,
    derive_ces_optimum,
    derive_chinchilla_optimum,
    derive_compute_equivalent,
    derive_kaplan_optimum,
    derive_shape_optimum,
    derive_width_depth,
    symbolic,
)
from scalinglab.errors import ConfigError
from scalinglab.typeset import latex, symbol, to_sympy

__all__ = [
    "DERIVATIONS",
    "Allocation",
    "Elasticities",
    "WidthDepth",
    "ces_optimum",
    "chinchilla_optimum",
    "compute_equivalent_gain",
    "derive_ces_optimum",
    "derive_chinchilla_optimum",
    "derive_compute_equivalent",
    "derive_kaplan_optimum",
    "derive_shape_optimum",
    "derive_width_depth",
    "elasticities",
    "frontier_exponent",
    "kaplan_optimum",
    "latex",
    "loss_of_compute",
    "parameter_equivalent_gain",
    "params_exponent",
    "shape_at_optimum",
    "shape_optimum",
    "shape_shift_at_fixed_flops",
    "symbol",
    "symbolic",
    "to_sympy",
    "width_depth_optimum",
]

Array = NDArray[np.float64]

KAPPA = 12.0  # N / (L d**2) of a block with attention 4 d**2 and a feed-forward of 8 d**2
FLOPS_PER_PARAMETER_TOKEN = 6.0  # forward and backward


@dataclass(frozen=True)
class Allocation:
    """Compute-optimal split of a budget: arrays of the broadcast shape of the inputs."""

    params: Array  # N*, parameters
    tokens: Array  # D*, tokens
    loss: Array  # nats/token at (N*, D*)


@dataclass(frozen=True)
class WidthDepth:
    """The best shape at a parameter count under E + A d^-a + B L^-b, and the law in N that its envelope is."""

    depth: Array
    width: Array
    aspect: Array
    excess: Array  # A d^-a + B L^-b at the optimum = amplitude * N**-exponent, nats
    exponent: Array  # alpha_eff = a b / (a + 2 b)
    amplitude: Array  # A_eff
    gamma2: Array  # a b / 9: the curvature of the `shape` law that this law implies around its optimum


@dataclass(frozen=True)
class Elasticities:
    """Falls of the loss per unit log of a resource, nats; `depth` is the *rise* d loss / d ln L at fixed N and D."""

    params: Array  # eps_N = - d loss / d ln N
    tokens: Array  # eps_D = - d loss / d ln D
    depth: Array  # eps_x = + d loss / d ln L at fixed N, D


def params_exponent(alpha: ArrayLike, beta: ArrayLike) -> Array:
    """Exponent a of N* ~ C**a, a = beta / (alpha + beta); D* ~ C**(1 - a). Needs alpha + beta != 0."""
    al, be = _floats(alpha, beta)
    return be / (al + be)


def frontier_exponent(alpha: ArrayLike, beta: ArrayLike) -> Array:
    """Exponent gamma of the compute frontier, loss* - E ~ C**-gamma, gamma = alpha beta / (alpha + beta)."""
    al, be = _floats(alpha, beta)
    return al * be / (al + be)


def chinchilla_optimum(
    flops: ArrayLike,
    *,
    A: ArrayLike,
    alpha: ArrayLike,
    B: ArrayLike,
    beta: ArrayLike,
    E: ArrayLike = 0.0,
    flops_per_param_token: float = FLOPS_PER_PARAMETER_TOKEN,
) -> Allocation:
    """N*, D* and loss of E + A N^-alpha + B D^-beta under C = k N D.

    N* = G (C/k)^(beta/(alpha+beta)), D* = (C/k)^(alpha/(alpha+beta)) / G, G = (alpha A / (beta B))^(1/(alpha+beta)).

    Parameters
    ----------
    flops : array_like
        Training FLOPs C, forward and backward.
    A, alpha, B, beta, E : array_like
        Natural parameters (nats * params**alpha and so on); they broadcast with `flops`. NaN comes back where a
        parameter that must be positive isn't: there is no interior optimum then.
    flops_per_param_token : float
        k of C = k N D.

    Source: Hoffmann et al. 2022, arXiv 2203.15556, eq. 4; derived in `derive_chinchilla_optimum`.
    """
    return ces_optimum(
        flops, A=A, alpha=alpha, B=B, beta=beta, delta=1.0, E=E, flops_per_param_token=flops_per_param_token
    )


def ces_optimum(
    flops: ArrayLike,
    *,
    A: ArrayLike,
    alpha: ArrayLike,
    B: ArrayLike,
    beta: ArrayLike,
    delta: ArrayLike = 1.0,
    E: ArrayLike = 0.0,
    flops_per_param_token: float = FLOPS_PER_PARAMETER_TOKEN,
) -> Allocation:
    """N*, D* and loss of E + ((A N^-alpha)^(1/delta) + (B D^-beta)^(1/delta))^delta under C = k N D.

    The outer power is monotone, so the minimiser is Chinchilla's with A -> A^(1/delta), alpha -> alpha/delta and the
    same for B, beta. The exponents of the frontier don't depend on delta (beta/(alpha+beta) is homogeneous of degree
    0); only G does: G = (alpha/beta)^(delta/(alpha+beta)) (A/B)^(1/(alpha+beta)).
    """
    _check_positive("flops", flops)
    _check_positive("flops_per_param_token", flops_per_param_token)
    C, a_, al, b_, be, de, floor = _floats(flops, A, alpha, B, beta, delta, E)
    with np.errstate(all="ignore"):
        usable = (a_ > 0) & (b_ > 0) & (al > 0) & (be > 0) & (de > 0)
        log_a, log_b = np.log(a_), np.log(b_)  # amplitudes can be 1e30: products of logs never overflow
        log_g = (de * np.log(al / be) + log_a - log_b) / (al + be)
        log_nd = np.log(C) - np.log(flops_per_param_token)
        log_n = np.where(usable, log_g + be / (al + be) * log_nd, np.nan)
        log_d = log_nd - log_n
        inner = np.logaddexp((log_a - al * log_n) / de, (log_b - be * log_d) / de)
        return Allocation(np.exp(log_n), np.exp(log_d), floor + np.exp(de * inner))


def kaplan_optimum(
    flops: ArrayLike,
    *,
    A: ArrayLike,
    alpha: ArrayLike,
    B: ArrayLike,
    delta: ArrayLike,
    flops_per_param_token: float = FLOPS_PER_PARAMETER_TOKEN,
) -> Allocation:
    """N*, D* and loss of Kaplan's L(N, D) = ((N_c/N)^(alpha_N/alpha_D) + D_c/D)^alpha_D under C = k N D.

    In these letters A = N_c^alpha_N, alpha = alpha_N, B = D_c^alpha_D, delta = alpha_D: the `ces` law with E = 0 and
    beta = delta. Source: Kaplan et al. 2020, arXiv 2001.08361, eq. 1.5.
    """
    return ces_optimum(
        flops, A=A, alpha=alpha, B=B, beta=delta, delta=delta, flops_per_param_token=flops_per_param_token
    )


def compute_equivalent_gain(
    loss_1: ArrayLike, loss_2: ArrayLike, *, E: ArrayLike, gamma: ArrayLike, small_gap: bool = False
) -> Array:
    """How much more compute a frontier with exponent gamma needs to go from loss_1 to loss_2.

    CEG = ((loss_1 - E) / (loss_2 - E))^(1/gamma); above 1 where loss_2 is better. With `small_gap` its first-order
    form exp((loss_1 - loss_2) / (gamma (loss_2 - E))). NaN where a loss is at or below E.
    """
    one, two, floor, g = _floats(loss_1, loss_2, E, gamma)
    with np.errstate(all="ignore"):
        above = (one > floor) & (two > floor)
        log_ratio = (one - two) / (two - floor) if small_gap else np.log(one - floor) - np.log(two - floor)
        return np.where(above, np.exp(log_ratio / g), np.nan)


def loss_of_compute(fraction: ArrayLike, *, excess: ArrayLike, gamma: ArrayLike) -> Array:
    """Nats that a fraction of compute is worth at excess = loss - E: gamma * excess * ln(1 + fraction), first order."""
    more, above, g = _floats(fraction, excess, gamma)
    return g * above * np.log1p(more)


def width_depth_optimum(
    params: ArrayLike,
    *,
    A: ArrayLike,
    a: ArrayLike,
    B: ArrayLike,
    b: ArrayLike,
    kappa: float = KAPPA,
) -> WidthDepth:
    """Best depth and width under E + A d^-a + B L^-b + ... at fixed N = kappa L d^2.

    L* = (2 b B / (a A))^(2/(a+2b)) (N/kappa)^(a/(a+2b)); the envelope is A_eff N^-alpha_eff with
    alpha_eff = a b / (a + 2 b), so this law contains Chinchilla's. NaN where a parameter isn't positive.
    """
    _check_positive("params", params)
    _check_positive("kappa", kappa)
    N, wide, p, deep, q = _floats(params, A, a, B, b)
    with np.errstate(all="ignore"):
        usable = (wide > 0) & (deep > 0) & (p > 0) & (q > 0)
        scale = p + 2 * q
        log_nk = np.log(N) - np.log(kappa)
        log_l0 = 2 / scale * (np.log(2 * q / p) + np.log(deep) - np.log(wide))
        log_l = np.where(usable, log_l0 + p / scale * log_nk, np.nan)
        log_d = (log_nk - log_l) / 2
        exponent = np.where(usable, p * q / scale, np.nan)
        # the depth term at the optimum is B L*^-b and the width term 2b/a of it
        log_amplitude = np.log(deep) - q * log_l0 + exponent * np.log(kappa) + np.log1p(2 * q / p)
        return WidthDepth(
            depth=np.exp(log_l),
            width=np.exp(log_d),
            aspect=np.exp(log_d - log_l),
            excess=np.exp(log_amplitude - exponent * np.log(N)),
            exponent=exponent,
            amplitude=np.exp(log_amplitude + 0 * exponent),
            gamma2=np.where(usable, p * q / 9, np.nan),
        )


def shape_optimum(*, gamma1: ArrayLike, gamma2: ArrayLike, r0: float) -> Array:
    """Aspect ratio r* = r0 exp(-gamma1 / (2 gamma2)) of the `shape` law at fixed N and D; NaN unless gamma2 > 0.

    The law is E + A N^-alpha exp(gamma1 u + gamma2 u^2) + B D^-beta, u = ln(r/r0); u* depends on neither N nor D.
    """
    _check_positive("r0", r0)
    g1, g2 = _floats(gamma1, gamma2)
    with np.errstate(all="ignore"):
        return np.where(g2 > 0, r0 * np.exp(-g1 / (2 * g2)), np.nan)


def shape_at_optimum(*, gamma1: ArrayLike, gamma2: ArrayLike) -> Array:
    """Factor exp(-gamma1^2 / (4 gamma2)) on the capacity term at the best shape relative to u = 0; NaN unless > 0."""
    g1, g2 = _floats(gamma1, gamma2)
    with np.errstate(all="ignore"):
        return np.where(g2 > 0, np.exp(-(g1**2) / (4 * g2)), np.nan)


def parameter_equivalent_gain(
    u_from: ArrayLike, u_to: ArrayLike, *, gamma1: ArrayLike, gamma2: ArrayLike, alpha: ArrayLike
) -> Array:
    """Factor on N that changing shape from u_from to u_to is worth, PEG = exp((q(u_from) - q(u_to)) / alpha).

    q(u) = gamma1 u + gamma2 u^2; the `shape` law is Chinchilla's with N_eff = N exp(-q(u)/alpha).
    """
    start, end, g1, g2, al = _floats(u_from, u_to, gamma1, gamma2, alpha)
    with np.errstate(all="ignore"):
        # factored: the difference of the two quadratics would cancel for close shapes
        return np.exp((start - end) * (g1 + g2 * (start + end)) / al)


def elasticities(
    params: ArrayLike,
    tokens: ArrayLike,
    *,
    A: ArrayLike,
    alpha: ArrayLike,
    B: ArrayLike,
    beta: ArrayLike,
    u: ArrayLike = 0.0,
    gamma1: ArrayLike = 0.0,
    gamma2: ArrayLike = 0.0,
) -> Elasticities:
    """Elasticities of the `shape` law (Chinchilla's at gamma1 = gamma2 = 0) at N, D and u, nats per unit log.

    eps_N = alpha A N^-alpha e^q, eps_D = beta B D^-beta, eps_x = -(3/2) A N^-alpha e^q (gamma1 + 2 gamma2 u): at fixed
    N = kappa L d^2 one more unit of ln L is 3/2 less of u.
    """
    _check_positive("params", params)
    _check_positive("tokens", tokens)
    N, D, a_, al, b_, be, v, g1, g2 = _floats(params, tokens, A, alpha, B, beta, u, gamma1, gamma2)
    capacity = a_ * np.exp(-al * np.log(N) + g1 * v + g2 * v**2)
    data = b_ * np.exp(-be * np.log(D))
    eps_n, eps_d, eps_x = np.broadcast_arrays(al * capacity, be * data, -1.5 * capacity * (g1 + 2 * g2 * v))
    return Elasticities(eps_n, eps_d, eps_x)


def shape_shift_at_fixed_flops(
    *, gamma1: float, gamma2: float, capacity: float, data: float, beta: float, phi_attention: float, phi_logit: float
) -> float:
    """The best u at fixed N and *FLOPs* minus the best u at fixed N and tokens, by root finding.

    Solves capacity e^q(u) (gamma1 + 2 gamma2 u) + beta data (phi_logit - phi_attention) / 3 = 0: a shape that costs
    fewer FLOPs per token sees more tokens. The FLOP shares and the data term are held at the values given.

    Parameters
    ----------
    capacity, data : float
        A N^-alpha (at u = 0) and B D^-beta, nats.
    phi_attention, phi_logit : float
        Shares of attention scores and of the output layer in the FLOPs per token.

    Raises
    ------
    ConfigError
        gamma2 <= 0: there is no interior best shape.
    """
    if not gamma2 > 0:
        raise ConfigError(f"gamma2 is {gamma2}: a best shape needs gamma2 > 0")
    from scipy.optimize import brentq

    centre = -gamma1 / (2 * gamma2)
    pull = beta * data * (phi_logit - phi_attention) / 3

    def slope(u: float) -> float:
        return capacity * float(np.exp(gamma1 * u + gamma2 * u * u)) * (gamma1 + 2 * gamma2 * u) + pull

    step = 1.0  # the slope rises through 0 at the centre, so the root is on one side of it
    while slope(centre - step) > 0 or slope(centre + step) < 0:
        step *= 2
    return float(brentq(slope, centre - step, centre + step, xtol=1e-14)) - centre


def _floats(*values: ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(v, dtype=np.float64) for v in values)


def _check_positive(name: str, value: ArrayLike) -> None:
    array = np.asarray(value, dtype=np.float64)
    bad = array[~(np.isfinite(array) & (array > 0))]
    if bad.size:
        raise ConfigError(f"{name} must be positive and finite, not {bad.flat[0]!s}")

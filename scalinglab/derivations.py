"""The closed forms of `scalinglab.algebra`, derived from the laws with sympy.

Nothing here is used to compute: each function starts from a law, solves its first-order condition (linear in a log) and
returns sympy expressions against which the numpy functions are tested. Sympy is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scalinglab.errors import ConfigError

if TYPE_CHECKING:
    import sympy


def symbolic(law: str) -> dict[str, sympy.Expr]:
    """The closed forms of a law (key of `DERIVATIONS`) as sympy expressions, derived on the spot.

    Raises
    ------
    ConfigError
        There is no derivation for the law; the known ones are listed.
    """
    if law not in DERIVATIONS:
        raise ConfigError(f"no closed form is derived for the law {law!r}; there is one for {', '.join(DERIVATIONS)}")
    return DERIVATIONS[law]()


def derive_chinchilla_optimum() -> dict[str, sympy.Expr]:
    """`loss(N, D)`, `params`, `tokens`, `optimum` (loss at both), `gamma`, `a`, `share` (A : B term) and more."""
    return _derive_allocation(delta=None)


def derive_ces_optimum() -> dict[str, sympy.Expr]:
    """The same for E + ((A N^-alpha)^(1/delta) + (B D^-beta)^(1/delta))^delta."""
    sp = _sympy()
    return _derive_allocation(delta=sp.Symbol("delta", positive=True))


def derive_kaplan_optimum() -> dict[str, sympy.Expr]:
    """Kaplan's L(N, D): the ces law at E = 0 and beta = delta."""
    sp = _sympy()
    delta = sp.Symbol("delta", positive=True)
    general = derive_ces_optimum()
    return {
        key: sp.simplify(value.subs({sp.Symbol("E", positive=True): 0, sp.Symbol("beta", positive=True): delta}))
        for key, value in general.items()
    }


def derive_width_depth() -> dict[str, sympy.Expr]:
    """Best shape of A d^-a + B L^-b at N = kappa L d^2, its envelope in N and its local shape.

    Keys: `excess` (in L), `depth`, `width`, `aspect`, `envelope`, `exponent`, `amplitude`, `ratio` (width term : depth
    term), `gamma2`, `curvature` and `third` (second and third derivative in ln L over the excess at the optimum).
    """
    sp = _sympy()
    A, a, B, b, N, kappa = sp.symbols("A a B b N kappa", positive=True)
    x = sp.Symbol("x", real=True)
    log_width = (sp.log(N) - sp.log(kappa) - x) / 2
    wide, deep = A * sp.exp(-a * log_width), B * sp.exp(-b * x)  # terms as functions of x = ln L at fixed N
    # d/dx: (a/2) wide - b deep = 0, linear in x once both sides are logs
    x_star = _solve_linear(sp.log(a / 2) + sp.log(A) - a * log_width, sp.log(b) + sp.log(B) - b * x, x)
    log_ratio = sp.log(A) - a * log_width - sp.log(B) + b * x
    ratio = _product(log_ratio.subs(x, x_star))
    deep_at = _product((sp.log(B) - b * x).subs(x, x_star))
    exponent = sp.simplify(-N * sp.diff(sp.log(deep_at), N))
    # in x the two terms are exponentials with rates a/2 and -b, so derivatives over the excess are moments of the rates
    wide_share = ratio / (1 + ratio)
    order2 = sp.simplify((a / 2) ** 2 * wide_share + b**2 * (1 - wide_share))
    order3 = sp.simplify((a / 2) ** 3 * wide_share - b**3 * (1 - wide_share))
    return {
        "excess": wide + deep,
        "depth": _product(x_star),
        "width": _product(log_width.subs(x, x_star)),
        "aspect": _product((log_width - x).subs(x, x_star)),
        "envelope": deep_at * (1 + ratio),
        "exponent": exponent,
        "amplitude": sp.powsimp(deep_at * N**exponent, force=True) * (1 + ratio),
        "ratio": ratio,
        "curvature": order2,
        "third": sp.factor(order3),
        # u = ln(d/L), du = -(3/2) dx at fixed N; the shape law has ln(capacity term) = const + gamma1 u + gamma2 u^2
        "gamma2": sp.simplify(sp.Rational(4, 9) * order2 / 2),
    }


def derive_shape_optimum() -> dict[str, sympy.Expr]:
    """The shape law: `loss`, best `u` and `aspect` at fixed N, D, `factor` of A, `eps_N`, `eps_D`, `eps_x`, `gain`."""
    sp = _sympy()
    E, A, alpha, B, beta, N, D, gamma2, r0 = sp.symbols("E A alpha B beta N D gamma2 r_0", positive=True)
    gamma1, u, v = sp.symbols("gamma1 u v", real=True)
    q = gamma1 * u + gamma2 * u**2
    loss = E + A * N**-alpha * sp.exp(q) + B * D**-beta
    (u_star,) = sp.solve(sp.diff(q, u), u)
    # N_eff^-alpha = N^-alpha e^q
    efficiency = sp.exp(-q / alpha)
    return {
        "loss": loss,
        "u": u_star,
        "aspect": r0 * sp.exp(u_star),
        "factor": sp.exp(sp.simplify(q.subs(u, u_star))),
        "eps_N": sp.simplify(-N * sp.diff(loss, N)),
        "eps_D": sp.simplify(-D * sp.diff(loss, D)),
        "eps_x": sp.simplify(-sp.Rational(3, 2) * sp.diff(loss, u)),  # du = -(3/2) dx at fixed N
        "gain": sp.simplify(efficiency.subs(u, v) / efficiency),  # PEG from u to v
    }


def derive_compute_equivalent() -> dict[str, sympy.Expr]:
    """`gain` of a loss gap on a frontier E + K C^-gamma; `small_gap`: gap over ln(gain) and excess, first order."""
    sp = _sympy()
    E, K, C, gamma, one, two, m = sp.symbols("E K C gamma l_1 l_2 m", positive=True)
    need = _solve_linear(sp.log(K) - gamma * sp.log(C), sp.log(one - E), sp.log(C))
    gain = sp.exp(sp.simplify(need.subs(one, two) - need))
    frontier = E + K * C**-gamma
    gap = sp.series(frontier - frontier.subs(C, C * sp.exp(m)), m, 0, 2).removeO()
    return {"gain": gain, "small_gap": sp.simplify(gap / m / (frontier - E))}


DERIVATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "chinchilla": derive_chinchilla_optimum,
    "ces": derive_ces_optimum,
    "kaplan": derive_kaplan_optimum,
    "width_depth": derive_width_depth,
    "shape": derive_shape_optimum,
}


def _derive_allocation(*, delta: Any) -> dict[str, Any]:
    sp = _sympy()
    E, A, alpha, B, beta, C, k, N, D = sp.symbols("E A alpha B beta C k N D", positive=True)
    n = sp.Symbol("n", real=True)
    power = sp.Integer(1) if delta is None else delta
    log_nd = sp.log(C) - sp.log(k)
    log_capacity, log_data = sp.log(A) - alpha * n, sp.log(B) - beta * (log_nd - n)
    # stationarity of e^(log_capacity/delta) + e^(log_data/delta) in n = ln N, each side as a log: linear in n
    n_star = _solve_linear(sp.log(alpha) + log_capacity / power, sp.log(beta) + log_data / power, n)
    capacity, data = (_product(term.subs(n, n_star)) for term in (log_capacity, log_data))
    share = _product(((log_capacity - log_data) / power).subs(n, n_star))
    base = (A * N**-alpha) ** (1 / power) + (B * D**-beta) ** (1 / power)
    return {
        "loss": E + base**power,
        "params": _product(n_star),
        "tokens": _product(log_nd - n_star),
        "optimum": E + capacity * (1 + 1 / share) ** power,
        "gamma": sp.simplify(-C * sp.diff(sp.log(capacity), C)),
        "gamma_data": sp.simplify(-C * sp.diff(sp.log(data), C)),
        "a": sp.simplify(C * sp.diff(n_star, C)),
        "share": share,
    }


def _solve_linear(left: Any, right: Any, unknown: Any) -> Any:
    """Solution of left = right, both linear in `unknown` (the logs of the two sides of a balance)."""
    sp = _sympy()
    if not unknown.is_Symbol:  # e.g. ln C as the unknown
        stand_in = sp.Symbol("_unknown", real=True)
        return _solve_linear(left.subs(unknown, stand_in), right.subs(unknown, stand_in), stand_in)
    gap = sp.expand(sp.expand_log(left - right, force=True))
    slope, constant = gap.coeff(unknown, 1), gap.coeff(unknown, 0)
    return sp.simplify(-constant / slope)


def _product(logarithm: Any) -> Any:
    """exp of a sum of c ln A as the product of A**c, with the powers of one base joined."""
    sp = _sympy()
    expanded = sp.expand(sp.expand_log(logarithm, force=True))
    out = sp.Integer(1)
    for atom in sorted(expanded.atoms(sp.log), key=str):
        coefficient = sp.simplify(expanded.coeff(atom, 1))
        out *= atom.args[0] ** coefficient
        expanded -= sp.expand(expanded.coeff(atom, 1) * atom)
    return sp.powsimp(out * sp.exp(sp.simplify(expanded)))


def _sympy() -> Any:
    import sympy

    return sympy

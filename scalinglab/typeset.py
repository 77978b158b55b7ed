"""Formulas as text turned into sympy expressions and LaTeX.

Both go through the checked syntax tree of `scalinglab.expressions`: no formula is ever evaluated or sympified as text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scalinglab import expressions
from scalinglab.errors import ConfigError

if TYPE_CHECKING:
    import sympy

_GREEK = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"),
    *("xi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega"),
    *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega"),
}
_FIELD = {"params": "N", "tokens": "D", "depth": "L", "width": "d", "aspect": "r", "flops": "C", "u": r"\ln(r/r_0)"}
_POSITIVE = {*_FIELD, "E", "A", "B", "C", "P", "r0", "N0"} - {"u"}  # everything else may be of either sign
_LATEX_FUNCTIONS = {
    "log": r"\ln",
    "exp": r"\exp",
    "log2": r"\log_2",
    "log10": r"\log_{10}",
    "minimum": r"\min",
    "maximum": r"\max",
}
_ARGUMENTS = {name: 2 if name in ("minimum", "maximum") else 1 for name in expressions.FUNCTIONS}
_EXACT = 64  # larger powers of numbers are taken in floating point: 10**10**10 must not become integer work

# what a piece of LaTeX binds like, so that brackets are set only where needed
_SUM, _PRODUCT, _POWER, _ATOM = range(4)


def to_sympy(text: str) -> sympy.Expr:
    """A law's formula as a sympy expression over real symbols named as in the text; counts and amplitudes are positive.

    The text goes through `scalinglab.expressions.parse`; it is never handed to `eval` or `sympify`. Numbers keep their
    decimal value; integers stay exact, so that 1/3 is a third.

    Raises
    ------
    ConfigError
        Not arithmetic (comparisons, and/or/not, text), or refused by the parser.
    """
    return _to_sympy(expressions.parse(text, what="formula"), text)


def latex(formula: str) -> str:
    r"""LaTeX of a law's formula in the symbols of the field, terms in the order in which they were written.

    >>> print(latex("E + A*params**-alpha + B*tokens**-beta"))
    E + A N^{-\alpha} + B D^{-\beta}

    Raises
    ------
    ConfigError
        As `to_sympy`.
    """
    return _latex(expressions.parse(formula, what="formula"), formula)[0]


def symbol(name: str) -> str:
    r"""LaTeX of one name: alpha is \alpha, gamma1 is \gamma_1, params is N, gamma1[mhc] is \gamma_{1,\mathrm{mhc}}.

    Raises
    ------
    ConfigError
        The name is empty.
    """
    if not name:
        raise ConfigError("a symbol needs a name: write for example 'gamma1'")
    base, bracket, group = name.partition("[")
    index = [rf"\mathrm{{{_escape(group.removesuffix(']'))}}}"] if bracket else []
    if base in _FIELD:
        body = _FIELD[base]
    else:
        stem = base.rstrip("0123456789") or base
        if digits := base[len(stem) :]:
            index.insert(0, digits)
        stem, _, rest = stem.partition("_") if stem.strip("_") else (stem, "", "")
        if rest:
            index.insert(0, rest if len(rest) == 1 else rf"\mathrm{{{_escape(rest)}}}")
        single = len(stem) == 1 and stem != "_"
        body = f"\\{stem}" if stem in _GREEK else stem if single else rf"\mathrm{{{_escape(stem)}}}"
    if not index:
        return body
    subscript = ",".join(index)
    return f"{body}_{subscript}" if len(subscript) == 1 else f"{body}_{{{subscript}}}"


def _to_sympy(node: ast.expr, text: str) -> Any:
    import sympy as sp

    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return sp.Integer(value) if abs(value) < 10**18 else sp.Float(value)
        case ast.Constant(value=float(value)):
            return sp.Float(value)
        case ast.Name(id=name):
            return sp.Symbol(name, positive=True) if name in _POSITIVE else sp.Symbol(name, real=True)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_to_sympy(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _to_sympy(operand, text)
        case ast.BinOp(left=left, op=op, right=right):
            one, two = _to_sympy(left, text), _to_sympy(right, text)
            match op:
                case ast.Add():
                    return one + two
                case ast.Sub():
                    return one - two
                case ast.Mult():
                    return one * two
                case ast.Div():
                    return one / two
                case _:
                    return _power(one, two, text)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _call_sympy(name, [_to_sympy(a, text) for a in args], text)
    raise _not_a_law(node, text)


def _power(base: Any, exponent: Any, text: str) -> Any:
    """base ** exponent; of numbers exactly only where the result is small, since sympy's integers and floats have no largest."""
    import sympy as sp

    if not (base.is_number and exponent.is_number):
        return base**exponent
    try:
        size = float(base) ** float(exponent)
    except ZeroDivisionError:
        return base**exponent
    except OverflowError:
        return sp.oo
    except TypeError:  # complex, or a tower whose parts are
        raise ConfigError(f"formula {text!r} has a power of numbers that is no real number") from None
    small = abs(float(exponent)) <= _EXACT and 1e-300 < abs(size) < 1e300
    return base**exponent if small or isinstance(size, complex) else sp.Float(size)


def _call_sympy(name: str, args: list[Any], text: str) -> Any:
    import sympy as sp

    _check_count(name, len(args), text)
    known: dict[str, Callable[..., Any]] = {
        "log": sp.log,
        "exp": sp.exp,
        "sqrt": sp.sqrt,
        "abs": sp.Abs,
        "log2": lambda x: sp.log(x) / sp.log(2),
        "log10": lambda x: sp.log(x) / sp.log(10),
        "softplus": lambda x: sp.log(1 + sp.exp(x)),
        "minimum": sp.Min,
        "maximum": sp.Max,
    }
    if name not in known:
        raise ConfigError(f"formula {text!r} calls {name!r}, which has no symbolic form; known: {', '.join(known)}")
    return known[name](*args)


def _latex(node: ast.expr, text: str) -> tuple[str, int]:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _number(value)
        case ast.Name(id=name):
            return symbol(name), _ATOM
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return "-" + _bracket(_latex(operand, text), _PRODUCT), _SUM
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _latex(operand, text)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, two = _latex(left, text)[0], _latex(right, text)[0]
            return (f"{one} - {two[1:]}" if two.startswith("-") else f"{one} + {two}"), _SUM
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return f"{_latex(left, text)[0]} - {_bracket(_latex(right, text), _PRODUCT)}", _SUM
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, two = _bracket(_latex(left, text), _PRODUCT), _bracket(_latex(right, text), _PRODUCT)
            return one + (r" \cdot " if two[:1].isdigit() else " ") + two, _PRODUCT
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return rf"\frac{{{_latex(left, text)[0]}}}{{{_latex(right, text)[0]}}}", _PRODUCT
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _bracket(_latex(left, text), _ATOM), _exponent(right, text)
            if isinstance(left, ast.Name) and left.id == "u":
                base = rf"\left({base}\right)"
            return f"{base}^{power}" if len(power) == 1 else f"{base}^{{{power}}}", _POWER
        case ast.Call(func=ast.Name(id=name), args=args):
            return _call_latex(name, [_latex(a, text)[0] for a in args], text)
    raise _not_a_law(node, text)


def _exponent(node: ast.expr, text: str) -> str:
    """A quotient in an exponent is set on one line, 1/delta."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return f"{_bracket(_latex(node.left, text), _PRODUCT)}/{_bracket(_latex(node.right, text), _POWER)}"
    return _latex(node, text)[0]


def _call_latex(name: str, args: list[str], text: str) -> tuple[str, int]:
    _check_count(name, len(args), text)
    inside = ", ".join(args)
    if name == "sqrt":
        return rf"\sqrt{{{inside}}}", _ATOM
    if name == "abs":
        return rf"\left|{inside}\right|", _ATOM
    if name == "softplus":
        return rf"\ln\left(1 + e^{{{inside}}}\right)", _POWER
    return rf"{_LATEX_FUNCTIONS[name]}\left({inside}\right)", _POWER


def _bracket(piece: tuple[str, int], need: int) -> str:
    body, level = piece
    return body if level >= need else rf"\left({body}\right)"


def _number(value: float) -> tuple[str, int]:
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not abs(value) < 1e300:
        return (str(value) if isinstance(value, int) else f"{value:.15g}"), _ATOM
    mantissa, exponent = f"{value:.14e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10^{{{int(exponent)}}}"
    return (power, _POWER) if mantissa == "1" else (rf"{mantissa} \cdot {power}", _PRODUCT)


def _escape(text: str) -> str:
    special = {"\\": r"\backslash ", "{": r"\{", "}": r"\}", "~": r"\sim ", "^": r"\hat{}"}
    # what neither TeX nor matplotlib sets as text: controls, quotation marks, and planes beyond the second
    known = ("?" if c in '"`' or not c.isprintable() or ord(c) > 0x1FFFF else c for c in text)
    return "".join(special.get(c, "\\" + c if c in "_%&#$" else c) for c in known)


def _check_count(name: str, count: int, text: str) -> None:
    if count != _ARGUMENTS[name]:
        raise ConfigError(f"formula {text!r}: {name} takes {_ARGUMENTS[name]} argument(s), not {count}")


def _not_a_law(node: ast.expr, text: str) -> ConfigError:
    return ConfigError(
        f"formula {text!r} has a {type(node).__name__}, which is not part of a law: use names, numbers, + - * / ** and "
        f"{', '.join(expressions.FUNCTIONS)}"
    )

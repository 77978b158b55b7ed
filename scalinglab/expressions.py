"""Arithmetic written as text, parsed and never executed.

One small grammar serves column mappings (`"size_M * 1e6"`), row filters (`"depth > 3 and phase == 'hot'"`), derived
parameters (`"r0 * exp(-gamma1 / (2 * gamma2))"`), features and whole laws. The text becomes a Python syntax tree; every
node that isn't plain arithmetic on known names is refused, so a formula from a stranger can't run code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from scalinglab.errors import ConfigError

_MAX_CHARS, _MAX_DEPTH = 2_000, 60  # a law is one line; longer or deeper input is a mistake or an attack
_LARGEST = int(np.finfo(np.float64).max)


def _softplus(x: Any) -> Any:
    return np.logaddexp(0.0, x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log": np.log,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "log2": np.log2,
    "log10": np.log10,
    "softplus": _softplus,
    "minimum": np.minimum,
    "maximum": np.maximum,
}

ARGUMENTS = {name: 2 if name in ("minimum", "maximum") else 1 for name in FUNCTIONS}  # one more would be numpy's `out`

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


@lru_cache(maxsize=1024)
def parse(text: str, *, what: str = "expression") -> ast.expr:
    """Parse `text` into a checked syntax tree.

    Raises
    ------
    ConfigError
        Not an expression, too long or deep, or with anything but arithmetic, comparisons, known functions and names.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{what} is empty: write an expression such as 'log(params)'")
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{what} has {len(text):,} characters; at most {_MAX_CHARS:,} are read")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{what} {text!r} can't be parsed: {getattr(error, 'msg', error)}") from None
    _check(tree, text, what, 0)
    return tree


def _check(node: ast.AST, text: str, what: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{what} is nested deeper than {_MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() as value) if abs(value) > _LARGEST:
            raise ConfigError(
                f"{what} has an integer of {value.bit_length():,} bits, beyond any float; write it as 1e308"
            )
        case ast.Constant(value=str() as value) if any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"{what} has half a surrogate pair in its text {ascii(value)[:60]}; replace it")
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name():
            return
        case ast.BinOp(op=op) if type(op) in _BINARY:
            children: list[ast.AST] = [node.left, node.right]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not()):
            children = [node.operand]
        case ast.BoolOp():
            children = list(node.values)
        case ast.Compare(ops=ops) if all(type(op) in _COMPARE for op in ops):
            children = [node.left, *node.comparators]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            children = list(node.args)
            if len(children) != ARGUMENTS[name]:
                raise ConfigError(f"{what} {text!r}: {name} takes {ARGUMENTS[name]} argument(s), not {len(children)}")
        case ast.Call(func=ast.Name(id=name)):
            raise ConfigError(f"{what} {text!r} calls {name!r}; known functions: {', '.join(FUNCTIONS)}")
        case _:
            raise ConfigError(
                f"{what} {text!r} has a {type(node).__name__} that isn't arithmetic: use names, numbers, "
                f"+ - * / **, comparisons, and/or/not and {', '.join(FUNCTIONS)}"
            )
    for child in children:
        _check(child, text, what, depth + 1)


@lru_cache(maxsize=1024)
def names(text: str) -> frozenset[str]:
    """Names (columns or parameters) that the expression reads; function names are not among them."""
    tree = parse(text)
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called)


def evaluate(text: str, values: Mapping[str, Any], *, what: str = "expression") -> Any:
    """Value of the expression over numbers or numpy arrays (broadcast as numpy does).

    Raises
    ------
    ConfigError
        A name is not in `values` (the known ones are listed), or the expression is refused by `parse`.
    """
    with np.errstate(all="ignore"):
        return _value(parse(text, what=what), values, text, what)


def _value(node: ast.AST, values: Mapping[str, Any], text: str, what: str) -> Any:
    match node:
        case ast.Constant(value=value):
            # integers become floats: 10**400 is inf, not minutes of big-integer work
            return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        case ast.Name(id=name):
            if name not in values:
                known = sorted(str(v) for v in values)
                shown = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
                raise ConfigError(f"{what} {text!r} reads {name!r}, which is not there; known: {shown}")
            return values[name]
    try:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](_float(_value(left, values, text, what)), _value(right, values, text, what))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(_value(operand, values, text, what))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -_value(operand, values, text, what)
            case ast.UnaryOp(operand=operand):
                return _value(operand, values, text, what)
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                out = _value(parts[0], values, text, what)
                for part in parts[1:]:
                    out = join(out, _value(part, values, text, what))
                return out
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [_value(n, values, text, what) for n in (left, *comparators)]
                held: Any = True
                for a, how, b in zip(sides, ops, sides[1:], strict=False):
                    held = np.logical_and(held, _COMPARE[type(how)](a, b))
                return held
            case ast.Call(func=ast.Name(id=name), args=args):
                return FUNCTIONS[name](*(_value(a, values, text, what) for a in args))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"{what} {text!r} can't be evaluated: {error}") from None
    raise ConfigError(f"{what} {text!r} can't be evaluated")  # pragma: no cover - parse() refuses the rest


def _float(value: Any) -> Any:
    return np.float64(value) if isinstance(value, float) else value  # 1 / 0 is inf as in arrays, not an exception

"""Laws written as a formula, turned into terms of the law algebra.

    E + A*params**-alpha * exp(gamma1*u + gamma2*u**2) + B*tokens**-beta

is a sum of terms; the logarithm of each term is linear in its parameters, with features that are arithmetic on columns.
Names that are columns (or constants of the law) are data, all other names are parameters. A sum in brackets raised to a
parameter is a group under an outer exponent: `((A*params**-alpha)**(1/delta) + B*...)**delta`.

The parser works on the checked syntax tree of `expressions.parse`: nothing is evaluated, and no computer algebra system has
to be loaded for the common case (sympy alone takes longer to import than a fit takes to run). `algebra.to_sympy` offers the
same formulas to sympy. A formula outside the algebra raises `OutsideAlgebra`; `fit` then takes it to lmfit.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

from scalinglab import expressions
from scalinglab.errors import ConfigError


class OutsideAlgebra(ConfigError):
    """The formula is valid arithmetic, but not a sum of log-linear terms."""


@dataclass(frozen=True)
class Coefficient:
    """A parameter that multiplies a feature in the logarithm of a term; `sign` -1 where the law writes it negated."""

    name: str
    feature: str
    sign: float = 1.0


@dataclass(frozen=True)
class Term:
    """exp(log amplitude + sum coefficient * feature + offset). `offset` is an expression in columns, or None."""

    amplitude: str
    coefficients: tuple[Coefficient, ...] = ()
    offset: str | None = None


@dataclass(frozen=True)
class Group:
    """(sum of terms)**exponent; inside, amplitudes and coefficients are those of the term to the power 1/exponent.

    `tied` names the coefficient that equals the outer exponent (Kaplan's alpha_D): inside it is the number 1.
    """

    exponent: str
    terms: tuple[Term, ...]


@dataclass
class _Product:
    """A term while it is read: powers of amplitudes, coefficients and factors that have no parameter."""

    amplitudes: dict[str, float] = field(default_factory=dict)
    coefficients: list[Coefficient] = field(default_factory=list)
    factors: list[str] = field(default_factory=list)


@lru_cache(maxsize=512)
def parse_law(text: str, columns: frozenset[str]) -> tuple[list[Term], list[Group]]:
    """Terms on their own and groups under an outer exponent of a law's formula.

    Raises
    ------
    ConfigError
        The text is not arithmetic, or has no parameter.
    OutsideAlgebra
        A term is not log-linear in its parameters; the message names the part.
    """
    tree = expressions.parse(text, what="law")
    reader = _Reader(text, columns)
    terms, groups = [], []
    for node, sign in _summands(tree):
        if sign < 0:
            raise OutsideAlgebra(f"law {text!r} subtracts {ast.unparse(node)!r}; terms of the algebra are positive")
        group = reader.group(node)
        if group is not None:
            groups.append(group)
        else:
            terms.append(reader.term(node))
    names = [t.amplitude for t in terms] + [t.amplitude for g in groups for t in g.terms]
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise OutsideAlgebra(f"law {text!r} uses the amplitude {doubled[0]!r} in two terms; give each term its own")
    return terms, groups


class _Reader:
    def __init__(self, text: str, columns: Collection[str]) -> None:
        self.text, self.columns = text, set(columns)

    def params(self, node: ast.AST) -> list[str]:
        called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        found = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in called]
        return [n for n in dict.fromkeys(found) if n not in self.columns]

    def refuse(self, node: ast.AST, why: str) -> OutsideAlgebra:
        return OutsideAlgebra(f"law {self.text!r}: {ast.unparse(node)!r} {why}")

    def group(self, node: ast.expr) -> Group | None:
        """(a + b)**delta with a parameter delta, else None."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Name)):
            return None
        exponent = node.right.id
        summands = _summands(node.left)
        if exponent in self.columns or len(summands) < 2:
            return None
        terms = []
        for part, sign in summands:
            if sign < 0:
                raise self.refuse(part, "is subtracted inside an outer exponent; terms of the algebra are positive")
            inner = _unpowered(part, exponent)
            if inner is None:
                raise self.refuse(
                    part, f"must be written (term)**(1/{exponent}) inside the outer exponent {exponent!r}"
                )
            terms.append(self.term(inner))
        return Group(exponent, tuple(terms))

    def term(self, node: ast.expr) -> Term:
        product = _Product()
        self.multiply(node, 1.0, product)
        plain = [name for name, power in product.amplitudes.items() if power == 1.0]
        if len(plain) != 1 or len(product.amplitudes) != 1:
            listed = ", ".join(product.amplitudes) or "none"
            raise self.refuse(node, f"needs exactly one amplitude of power 1 (found: {listed})")
        merged: dict[str, Coefficient] = {}
        for c in product.coefficients:
            if c.name in merged or c.name == plain[0]:
                raise self.refuse(node, f"uses {c.name!r} twice")
            merged[c.name] = c
        offset = " + ".join(f"log({f})" for f in product.factors) or None
        return Term(plain[0], tuple(merged.values()), offset)

    def multiply(self, node: ast.expr, power: float, out: _Product) -> None:
        """Fold node**power into the product."""
        if not self.params(node):
            if not (isinstance(node, ast.Constant) and node.value == 1):
                out.factors.append(_powered(ast.unparse(node), power))
            return
        match node:
            case ast.Name(id=name):
                out.amplitudes[name] = out.amplitudes.get(name, 0.0) + power
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                self.multiply(left, power, out)
                self.multiply(right, power, out)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                self.multiply(left, power, out)
                self.multiply(right, -power, out)
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent) if not self.params(base):
                self.exponentiate(exponent, f"log({ast.unparse(base)})", power, out)
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent) if _number(exponent) is not None:
                self.multiply(base, power * (_number(exponent) or 0.0), out)
            case ast.Call(func=ast.Name(id="exp"), args=[argument]):
                self.exponentiate(argument, "1", power, out)
            case _:
                raise self.refuse(node, "is not log-linear in its parameters")

    def exponentiate(self, node: ast.expr, feature: str, sign: float, out: _Product) -> None:
        """Fold exp(sign * node * feature) into the product; node is linear in parameters."""
        if not self.params(node):
            out.factors.append(f"exp({sign:g}*({ast.unparse(node)})*({feature}))")
            return
        match node:
            case ast.Name(id=name):
                out.coefficients.append(Coefficient(name, feature, sign))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.exponentiate(operand, feature, -sign, out)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                self.exponentiate(operand, feature, sign, out)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                self.exponentiate(left, feature, sign, out)
                self.exponentiate(right, feature, -sign if isinstance(op, ast.Sub) else sign, out)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if not self.params(left):
                self.exponentiate(right, _times(feature, ast.unparse(left)), sign, out)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if not self.params(right):
                self.exponentiate(left, _times(feature, ast.unparse(right)), sign, out)
            case ast.BinOp(left=left, op=ast.Div(), right=right) if not self.params(right):
                self.exponentiate(left, _times(feature, f"1/({ast.unparse(right)})"), sign, out)
            case _:
                raise self.refuse(node, "is not linear in its parameters inside an exponent")


def _summands(node: ast.expr, sign: int = 1) -> list[tuple[ast.expr, int]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        flip = -sign if isinstance(node.op, ast.Sub) else sign
        return _summands(node.left, sign) + _summands(node.right, flip)
    return [(node, sign)]


def _unpowered(node: ast.expr, exponent: str) -> ast.expr | None:
    """x of (x)**(1/exponent), else None."""
    match node:
        case ast.BinOp(
            left=base,
            op=ast.Pow(),
            right=ast.BinOp(left=ast.Constant(value=1 | 1.0), op=ast.Div(), right=ast.Name(id=name)),
        ) if name == exponent:
            return base
    return None


def _number(node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
    return None


def _times(a: str, b: str) -> str:
    return b if a == "1" else f"{a}*({b})"


def _powered(factor: str, power: float) -> str:
    return factor if power == 1.0 else f"({factor})**({power:g})"

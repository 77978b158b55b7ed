"""Simple LaTeX math as MathML, which browsers set by themselves: letters, numbers, Greek, scripts, fractions, roots, text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from scalinglab.errors import ConfigError
from scalinglab.report.html.elements import el

_LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
    "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ",
    "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "infty": "∞", "ell": "ℓ", "partial": "∂",
}  # fmt: skip
_SIGNS = {
    "times": "×", "cdot": "⋅", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠",
    "approx": "≈", "sim": "∼", "propto": "∝", "in": "∈", "to": "→", "rightarrow": "→", "sum": "∑", "prod": "∏", "ldots": "…",
    "dots": "…", "mid": "∣", "{": "{", "}": "}", "%": "%", "ll": "≪", "gg": "≫", "circ": "∘",
}  # fmt: skip
_NAMES = {"ln", "log", "exp", "max", "min", "Pr", "sin", "cos"}
_SPACES = {",": ".17em", ";": ".28em", " ": ".33em", "quad": "1em", "!": "-.17em"}
_ACCENTS = {"hat": "^", "bar": "¯", "tilde": "~"}
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]*\.?[0-9]+|\s+|.", re.DOTALL)


def mathml(source: str, at: str, *, display: bool = False) -> ET.Element:
    """A formula as a <math> element. at: where it stands, for messages.

    Raises
    ------
    ConfigError
        A command outside the subset, or braces that don't match.
    """
    left = [t for t in _TOKEN.findall(source) if not t.isspace()][::-1]
    row = _row(left, at, source)
    if row and row[0].tag == "mo" and row[0].text in ("−", "+", "±"):
        row[0].set("form", "prefix")  # a sign, also where it stands alone before a number of the text
    if left:
        raise ConfigError(f"{at}: ${source}$ has a closing brace that nothing opened")
    return el("math", *row, display="block" if display else "inline")


def _row(left: list[str], at: str, source: str) -> list[ET.Element]:
    out: list[ET.Element] = []
    while left and left[-1] != "}":
        token = left[-1]
        if token in ("_", "^"):
            if not out:
                raise ConfigError(f"{at}: ${source}$ has a {token} that belongs to nothing")
            out.append(_scripts(out.pop(), left, at, source))
        else:
            out.append(_atom(left, at, source))
    return out


def _scripts(base: ET.Element, left: list[str], at: str, source: str) -> ET.Element:
    low = high = None
    while left and left[-1] in ("_", "^"):
        if left.pop() == "_":
            low = _argument(left, at, source)
        else:
            high = _argument(left, at, source)
    if low is not None and high is not None:
        return el("msubsup", base, low, high)
    return el("msub", base, low) if low is not None else el("msup", base, high)


def _argument(left: list[str], at: str, source: str) -> ET.Element:
    if not left:
        raise ConfigError(f"{at}: ${source}$ ends where something must follow")
    return _atom(left, at, source)


def _atom(left: list[str], at: str, source: str) -> ET.Element:
    token = left.pop()
    if token == "{":
        row = _row(left, at, source)
        if not left:
            raise ConfigError(f"{at}: ${source}$ has a brace that is not closed")
        left.pop()
        return el("mrow", *row)
    if not token.startswith("\\"):
        if token[-1].isdigit():
            return el("mn", token)
        if token.isalpha():
            return el("mi", token)
        if token in "([":
            return el("mo", token, form="prefix", stretchy="false")
        if token in ")]":
            return el("mo", token, form="postfix", stretchy="false")
        return el("mo", {"-": "−", "*": "∗", "~": "\u00a0"}.get(token, token))
    name = token[1:]
    if name in _LETTERS:
        return el("mi", _LETTERS[name])
    if name in _SIGNS:
        return el("mo", _SIGNS[name])
    if name in _NAMES:
        return el("mrow", el("mi", name, mathvariant="normal"), el("mspace", width=".17em"))
    if name in _SPACES:
        return el("mspace", width=_SPACES[name])
    if name in ("left", "right"):
        fence = left.pop() if left else "."
        return el("mrow") if fence == "." else el("mo", fence.removeprefix("\\"))
    if name == "frac":
        return el("mfrac", _argument(left, at, source), _argument(left, at, source))
    if name == "sqrt":
        return el("msqrt", _argument(left, at, source))
    if name in _ACCENTS:
        return el("mover", _argument(left, at, source), el("mo", _ACCENTS[name]), accent="true")
    if name in ("text", "mathrm", "mathit", "textrm", "operatorname"):
        return _words(left, at, source)
    raise ConfigError(f"{at}: ${source}$: \\{name} is outside the math that the page of HTML can show")


def _words(left: list[str], at: str, source: str) -> ET.Element:
    """Text inside math. Its blanks were dropped with the others; ~ makes one."""
    if not left or left.pop() != "{":
        raise ConfigError(f"{at}: ${source}$: text in math needs braces")
    word = ""
    while left and left[-1] != "}":
        piece = left.pop()
        word += {"~": "\u00a0", "--": "–", "\\,": "\u2009", "\\_": "_", "\\ ": " "}.get(piece, piece)
    if not left:
        raise ConfigError(f"{at}: ${source}$ has a brace that is not closed")
    left.pop()
    return el("mtext", word)

r"""What recipes return, and the bytes that it becomes: figures, tables, numbers.

A number carries its text, rounded by its standard error, and becomes a macro \slNAME in numbers.tex; nobody types it.
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.report import tables
from scalinglab.report.paper.registry import Kind

_DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SIGNIFICANT = 10  # of numbers in CSV files: what another machine's arithmetic agrees on
COLUMNS = ("macro", "value", "se", "text", "meaning")


@dataclass(frozen=True)
class Number:
    """One number of the text. name: lower-case words, becomes the macro's ending; text: LaTeX as it is printed."""

    name: str
    value: float
    text: str
    meaning: str = ""
    se: float = math.nan


@dataclass(frozen=True)
class Table:
    """shown: the rows and columns that are printed, as text where rounding matters; data: the same at full precision."""

    shown: pd.DataFrame
    data: pd.DataFrame


# ---- numbers -----------------------------------------------------------------------------------------------------------
def measured(name: str, value: float, se: float, meaning: str = "") -> Number:
    """A value rounded by its standard error."""
    return Number(name, value, _math(tables.rounded(value, se)[0]), meaning, se)


def with_interval(name: str, value: float, se: float, low: float, high: float, meaning: str = "") -> list[Number]:
    """A value and its limits, all to the digits of the standard error: NAME, NAME_low, NAME_high."""
    parts = [("", value, ""), ("_low", low, "lower limit of "), ("_high", high, "upper limit of ")]
    return [measured(name + end, v, se, kind + meaning) for end, v, kind in parts]


def p_value(name: str, value: float, meaning: str = "") -> Number:
    """A p-value with its sign: p = 0.010, p < 0.001."""
    text = tables.p_value(value)
    return Number(
        name, value, rf"\ensuremath{{p {'' if text.startswith('<') else '= '}{text.replace('<', '< ')}}}", meaning
    )


def plain(name: str, value: float, digits: int = 3, meaning: str = "") -> Number:
    """A number without an error of its own, to some significant digits; whole numbers stay whole."""
    whole = float(value).is_integer() and abs(value) < 1e6
    return Number(name, value, _math(f"{int(value)}" if whole else tables.plain(value, digits)), meaning)


def percent(name: str, share: float, digits: int = 2, meaning: str = "") -> Number:
    r"""A share as per cent: 90.5\,\%."""
    return Number(name, share, _math(tables.plain(100 * share, digits)) + r"\,\%", meaning)


def counted(name: str, value: int, meaning: str = "") -> list[Number]:
    """A count as digits (NAME) and as a word up to twelve (NAME_word)."""
    word = _WORDS[value] if 0 <= value < len(_WORDS) else str(value)
    return [Number(name, value, str(value), meaning), Number(f"{name}_word", value, word, meaning)]


def size(name: str, value: float, meaning: str = "") -> Number:
    """A count of parameters or tokens as people say it: 304M, 8B."""
    from scalinglab.report.style import count_label

    return Number(name, value, count_label(value), meaning)


def words(name: str, text: str, meaning: str = "") -> Number:
    """Text that depends on the data, such as a list of names; it is escaped."""
    return Number(name, math.nan, escape(text), meaning)


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    return (
        tables.to_latex(pd.DataFrame({"x": [f"{text}\u200b"]}), symbols=False)
        .split("\\midrule\n")[1]
        .split(" \\\\\n")[0]
        .replace("\u200b", "")
    )


def _math(text: str) -> str:
    """A number as math: typographic minus, powers of ten."""
    text = text.replace("−", "-").replace("∞", r"\infty").replace("–", r"\text{--}")
    if "e" in text:
        mantissa, power = text.split("e")
        text = rf"{mantissa} \times 10^{{{int(power)}}}"
    return rf"\ensuremath{{{text}}}" if not re.fullmatch(r"[0-9.]+", text) else text


def macro(artefact: str, name: str) -> str:
    r"""Name of a number's macro: artefact depthbench, name hc_gap is \slDepthbenchHcGap; digits are spelt."""
    words_ = re.findall(r"[A-Za-z]+|[0-9]", f"{artefact}_{name}")
    return "\\sl" + "".join(_DIGITS[int(w)] if w.isdigit() else w[0].upper() + w[1:] for w in words_)


# ---- bytes -------------------------------------------------------------------------------------------------------------
def render(kind: Kind, name: str, product: Any) -> dict[str, bytes]:
    """Files of an artefact, relative to the paper's folder.

    Raises
    ------
    ConfigError
        The recipe returned something else than its kind, or two numbers of one name.
    """
    if kind == "figure":
        return _figure(name, product)
    if kind == "table":
        if not isinstance(product, Table):
            raise ConfigError(f"its recipe returned {type(product).__name__}, not a Table")
        return {
            f"tables/{name}.tex": tables.to_latex(product.shown).encode(),
            f"tables/{name}.csv": csv(product.data),
        }
    return {f"numbers/{name}.csv": csv(_numbers(name, product))}


def _figure(name: str, product: Any) -> dict[str, bytes]:
    from matplotlib.figure import Figure

    from scalinglab.report.registry import save_figure

    if not isinstance(product, Figure):
        raise ConfigError(f"its recipe returned {type(product).__name__}, not a Figure")
    with tempfile.TemporaryDirectory() as folder:  # whoever asked writes the files; here only their bytes are made
        return {
            f"figures/{name}.{kind}": save_figure(product, Path(folder) / f"{name}.{kind}").read_bytes()
            for kind in ("pdf", "png")
        }


def _numbers(artefact: str, product: Iterable[Number]) -> pd.DataFrame:
    rows: dict[str, tuple[Any, ...]] = {}
    for n in product:
        key = macro(artefact, n.name)
        if key in rows:
            raise ConfigError(f"two of its numbers have the macro {key}")
        rows[key] = (key, n.value, n.se, n.text, n.meaning)
    return pd.DataFrame(list(rows.values()), columns=list(COLUMNS))


def csv(frame: pd.DataFrame) -> bytes:
    """A table as CSV, numbers to ten significant digits, text as it is; no formula can start a cell."""

    def cell(value: Any) -> Any:
        return float(f"{value:.{_SIGNIFICANT}g}") if isinstance(value, float) and math.isfinite(value) else value

    return tables.to_csv(frame.map(cell)).encode()


# ---- numbers.tex -------------------------------------------------------------------------------------------------------
def read_macros(files: Mapping[str, Path]) -> dict[str, str]:
    r"""Macro -> its text, of the numbers artefacts whose CSV is there.

    Raises
    ------
    ConfigError
        Two artefacts have a macro of one name, or a file isn't such a CSV.
    """
    found: dict[str, str] = {}
    for name, path in files.items():
        frame = pd.read_csv(io.BytesIO(path.read_bytes()), dtype=str, keep_default_na=False)
        if tuple(frame.columns) != COLUMNS:
            raise ConfigError(f"{path} is not a table of numbers any more; rebuild it with --force --only {name}")
        for key, text in zip(frame["macro"], frame["text"], strict=True):
            if key in found:
                raise ConfigError(f"artefact {name}: macro {key} is also another artefact's; rename the artefact")
            found[key] = text
    return found


def numbers_tex(macros: Mapping[str, str], present: Sequence[str]) -> bytes:
    r"""numbers.tex: one \newcommand a number, and \slif{ARTEFACT}{text}{otherwise} for those that are there."""
    lines = [
        "% Written by `scalinglab paper`; every change here is lost.",
        r"\newcommand{\slif}[3]{\ifcsname slhas@#1\endcsname #2\else #3\fi}",
        *(rf"\expandafter\def\csname slhas@{name}\endcsname{{}}" for name in sorted(present)),
        *(rf"\newcommand{{{key}}}{{{text}}}" for key, text in sorted(macros.items())),
    ]
    return ("\n".join(lines) + "\n").encode()

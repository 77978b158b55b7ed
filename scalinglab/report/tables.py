"""Tables of results: numbers rounded to what is known, as Markdown, LaTeX, CSV and HTML. The only place that rounds.

Significant digits follow the standard error: the error keeps two digits (two is what a reader can
check), the estimate stops at the same decimal. Text is escaped for its format; in CSV, text that a
spreadsheet would run as a formula gets a leading quote.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.tables import csv_text, plain_text

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

T2 = (
    "law", "arch", "parameter", "estimate", "SE_CR3", "df", "CI_lo", "CI_hi", "CI_method", "profile_lo", "profile_hi",
    "kappa_c", "identified", "huber", "lin", "drop_worst_run",
)  # fmt: skip
T5 = (
    "law", "k", "runs", "loro_rmse", "delta_elpd", "delta_elpd_se", "sign_flip_p", "leave_largest_rmse", "leave_largest_bias",
    "leave_deepest_rmse", "leave_deepest_bias", "AICc_G", "BIC_G", "status",
)  # fmt: skip
_EMPTY = "–"
_MINUS = "−"


# ---- tables of results -------------------------------------------------------------------------------------------------
def parameter_table(fit: Fit, *, style: Literal["columns", "compact"] = "columns", level: float = 0.95) -> pd.DataFrame:
    """Parameters and derived parameters of a fit as rounded text, one row each.

    style "columns": parameter, estimate, se, low, high, df, identified. "compact": parameter, estimate as 0.347(15),
    interval as [0.32, 0.38]. Fixed parameters have no error and say "fixed".
    """
    if style not in ("columns", "compact"):
        raise ConfigError(f"style is {style!r}: give 'columns' or 'compact'")
    rows = []
    for name, r in fit.to_frame(level).iterrows():
        estimate, se = float(r["estimate"]), float(r["se"])
        fixed = r["kind"] == "fixed"
        base: dict[str, str] = {"parameter": str(name)}
        if style == "compact":
            base["estimate"] = f"{plain(estimate)} (fixed)" if fixed else with_error(estimate, se)
            base[f"{100 * level:g} % interval"] = _EMPTY if fixed else _interval(r["low"], r["high"], se)
        else:
            base["estimate"], base["se"] = ("fixed " + plain(estimate), _EMPTY) if fixed else rounded(estimate, se)
            base["low"], base["high"] = (_EMPTY if fixed else rounded(float(r[c]), se)[0] for c in ("low", "high"))
            base["df"] = _EMPTY if not np.isfinite(r["df"]) else f"{r['df']:.3g}"
        base["identified"] = _EMPTY if fixed else "yes" if r["identified"] else "no"
        rows.append(base)
    return pd.DataFrame(rows)


def law_table(fit: Fit, *, level: float = 0.95, rounding: bool = True) -> pd.DataFrame:
    """Column set T2: each free or derived parameter with its jackknife interval, its profile interval and its sensitivity.

    huber, lin and drop_worst_run are the estimates under Robust() and under squared error of the loss itself, and after
    leaving out the run that moves this parameter most. Empty where not available (profiles need a likelihood).
    """
    from scalinglab.objectives import Gaussian, Robust

    table = fit.to_frame(level)
    made = fit.jackknife
    kappa = next((c.value for c in fit.checks if c.name == "conditioning, centred"), np.nan)
    other = {"huber": _refit(fit, Robust()), "lin": _refit(fit, Gaussian(on="loss"))}
    dropped = pd.concat([made.params, fit.derive(made.params)], axis=1)
    rows: list[dict[str, Any]] = []
    for name, r in table[table["kind"] != "fixed"].iterrows():
        plain_name, _, group = str(name).partition("[")
        low, high = _profile(fit, str(name), level) if r["kind"] == "parameter" else (np.nan, np.nan)
        away = dropped[name].to_numpy() if name in dropped else np.full(1, np.nan)
        worst = float(away[int(np.nanargmax(np.abs(away - r["estimate"])))]) if np.isfinite(away).any() else np.nan
        rows.append({
            "law": fit.law.key, "arch": group.removesuffix("]"), "parameter": plain_name, "estimate": float(r["estimate"]),
            "SE_CR3": float(r["se"]), "df": float(r["df"]), "CI_lo": float(r["low"]), "CI_hi": float(r["high"]),
            "CI_method": made.method, "profile_lo": low, "profile_hi": high, "kappa_c": float(kappa),
            "identified": "yes" if r["identified"] else "no", "huber": float(other["huber"].get(name, np.nan)),
            "lin": float(other["lin"].get(name, np.nan)), "drop_worst_run": worst,
        })  # fmt: skip
    out = pd.DataFrame(rows, columns=list(T2))
    if not rounding or not len(out):
        return out
    text = pd.DataFrame({c: out[c].astype(str) for c in ("law", "arch", "parameter", "CI_method", "identified")})
    for c in ("estimate", "CI_lo", "CI_hi", "profile_lo", "profile_hi", "huber", "lin", "drop_worst_run"):
        text[c] = [rounded(v, se)[0] for v, se in zip(out[c], out["SE_CR3"], strict=True)]
    text["SE_CR3"] = [rounded(v, se)[1] for v, se in zip(out["estimate"], out["SE_CR3"], strict=True)]
    text["df"] = [plain(v) for v in out["df"]]
    text["kappa_c"] = [plain(v) for v in out["kappa_c"]]
    return text[list(T2)]


def comparison_table(comparison: pd.DataFrame) -> pd.DataFrame:
    """Column set T5 from a comparison's data frame: laws best first, rounded; columns that are not there stay empty.

    Raises
    ------
    ConfigError
        No column `law`, or none of the others.
    """
    frame = comparison.reset_index() if "law" not in comparison and comparison.index.name == "law" else comparison
    if "law" not in frame:
        raise ConfigError(
            f"a comparison needs a column 'law'; this table has {', '.join(map(str, frame.columns[:20]))}"
        )
    known = [c for c in T5 if c in frame.columns]
    if len(known) < 2:
        raise ConfigError(
            f"a comparison needs columns among {', '.join(T5[1:])}; this table has {', '.join(map(str, frame.columns[:20]))}"
        )
    out = pd.DataFrame(index=range(len(frame)))
    for c in T5:
        if c not in frame:
            out[c] = _EMPTY
        elif c == "delta_elpd" and "delta_elpd_se" in frame:
            pairs = [rounded(v, s) for v, s in zip(frame[c], frame["delta_elpd_se"], strict=True)]
            out[c] = [a for a, _ in pairs]
        elif c == "delta_elpd_se" and "delta_elpd" in frame:
            out[c] = [rounded(v, s)[1] for v, s in zip(frame["delta_elpd"], frame[c], strict=True)]
        elif c == "sign_flip_p":
            out[c] = [p_value(v) for v in frame[c]]
        elif c in ("AICc_G", "BIC_G"):
            out[c] = [_EMPTY if not _finite(v) else f"{v:.1f}".replace("-", _MINUS) for v in frame[c]]
        else:
            out[c] = [v if isinstance(v, str) else _EMPTY if not _finite(v) else plain(float(v)) for v in frame[c]]
    return out


def _refit(fit: Fit, estimator: Any) -> pd.Series:
    try:
        params = fit.refit(estimator=estimator).params
    except (ScalinglabError, NotImplementedError):
        return pd.Series(dtype=float)
    return pd.concat([params.iloc[0], fit.derive(params).iloc[0]])


def _profile(fit: Fit, name: str, level: float) -> tuple[float, float]:
    from scalinglab.profiles import profile

    try:
        made = profile(fit, name, level=level)
    except ConfigError:  # no likelihood, or not a free parameter of the algebra
        return np.nan, np.nan
    return made.low, made.high


# ---- numbers -----------------------------------------------------------------------------------------------------------
def rounded(value: float, se: float) -> tuple[str, str]:
    """A value and its standard error as text, both to the second significant digit of the error.

    >>> rounded(0.34731, 0.0153)
    ('0.347', '0.015')
    """
    if not _finite(value):
        return _special(value), _EMPTY if not _finite(se) else plain(se, 2)
    if not _finite(se) or se <= 0:
        return plain(value), _EMPTY
    exponent = _order(se)
    decimals = 1 - exponent
    if max(abs(value), se) >= 1e6 or decimals > 8:  # as powers of ten, with the same last digit
        power = max(_order(value), exponent) if value else exponent
        digits = max(0, power - exponent + 1)
        return _scientific(value, power, digits), _scientific(se, power, digits)
    return _fixed(value, decimals), _fixed(se, decimals)


def with_error(value: float, se: float) -> str:
    """The value with its error in the last digits in brackets: 0.347(15), 1240(130), 1.01(45)e5."""
    if not _finite(value) or not _finite(se) or se <= 0:
        return _special(value) if not _finite(value) else plain(value)
    power = 0
    if max(abs(value), se) >= 1e5 or max(abs(value), se) < 1e-3:
        power = max(_order(value), _order(se)) if value else _order(se)
    v, s = value / 10.0**power, se / 10.0**power
    decimals = 1 - _order(s)
    error = (
        f"{round(s * 10**decimals)}"
        if decimals > 0 and s < 1
        else _fixed(s, max(0, decimals))
        if decimals > 0
        else _fixed(s, decimals)
    )
    return f"{_fixed(v, decimals)}({error})" + (f"e{power}" if power else "")


def plain(value: float, digits: int = 3) -> str:
    """A number without an error, to so many significant digits."""
    if not _finite(value):
        return _special(value)
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value)}".replace("-", _MINUS)
    if 1e-4 <= abs(value) < 1e6:
        return _fixed(value, digits - 1 - _order(value, digits))
    return _scientific(value, _order(value, digits), digits - 1)


def p_value(value: float) -> str:
    """A p-value: three decimals, and "<0.001" below."""
    return _EMPTY if not _finite(value) else "<0.001" if value < 0.001 else f"{value:.3f}"


def _interval(low: float, high: float, se: float) -> str:
    return f"[{rounded(float(low), se)[0]}, {rounded(float(high), se)[0]}]"


def _finite(value: Any) -> bool:
    try:
        return bool(math.isfinite(value))
    except (TypeError, ValueError):
        return False


def _special(value: Any) -> str:
    return "∞" if value == math.inf else f"{_MINUS}∞" if value == -math.inf else _EMPTY


def _order(value: float, digits: int = 2) -> int:
    """Power of ten of the first digit once the value is rounded to so many digits (0.0996 at two is 0.10: -1)."""
    return int(f"{abs(value):.{digits - 1}e}".split("e")[1])


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}" if decimals >= 0 else f"{round(value, decimals):.0f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", _MINUS)


def _scientific(value: float, power: int, digits: int) -> str:
    # in two steps: 10.0**power alone is 0 for the smallest numbers
    return f"{_fixed(value / 10.0 ** (power // 2) / 10.0 ** (power - power // 2), digits)}e{power}".replace(
        "e-", f"e{_MINUS}"
    )


# ---- formats -----------------------------------------------------------------------------------------------------------
def to_markdown(df: pd.DataFrame, *, index: bool = False) -> str:
    """A pipe table, numbers right-aligned; pipes, line breaks and markup in cells are escaped."""
    header, cells, right = _cells(df, index)

    def line(values: list[str]) -> str:
        return "| " + " | ".join(values) + " |"

    rows = [line([_md(h) for h in header]), line(["---:" if r else "---" for r in right])]
    return "\n".join([*rows, *(line([_md(c) for c in row]) for row in cells)]) + "\n"


def to_latex(df: pd.DataFrame, *, index: bool = False, caption: str = "", label: str = "", symbols: bool = True) -> str:
    r"""A booktabs tabular; with a caption a table float. Text is escaped; cells of a column `parameter` become symbols.

    Needs \usepackage{booktabs}. Minus signs, infinities and powers of ten are set in math.
    """
    header, cells, right = _cells(df, index)
    where = header.index("parameter") if symbols and "parameter" in header else -1
    body = [r"\begin{tabular}{" + "".join("r" if r else "l" for r in right) + "}", r"\toprule"]
    body.append(" & ".join(_tex(h) for h in header) + r" \\")
    body.append(r"\midrule")
    body += [" & ".join(_symbol(c) if k == where else _tex(c) for k, c in enumerate(row)) + r" \\" for row in cells]
    body += [r"\bottomrule", r"\end{tabular}"]
    if caption or label:
        if label and not all(c.isalnum() or c in ":-_." for c in label):
            raise ConfigError(
                f"label {label!r} has characters that LaTeX labels can't carry: use letters, digits and : - _ ."
            )
        body = [r"\begin{table}", r"\centering", *([rf"\caption{{{_tex(caption)}}}"] if caption else []),
                *([rf"\label{{{label}}}"] if label else []), *body, r"\end{table}"]  # fmt: skip
    return "\n".join(body) + "\n"


def to_csv(df: pd.DataFrame, *, index: bool = False) -> str:
    """CSV with full-precision numbers; text that a spreadsheet would take for a formula gets a leading quote.

    Cells and headers that start with = + - @, a tab or a line break and are text, not numbers, become '=... .
    """
    frame = df.reset_index() if index else df
    safe = pd.DataFrame({i: [_guard(v) for v in frame.iloc[:, i]] for i in range(frame.shape[1])}, dtype=object)
    safe.columns = pd.Index([_guard(str(c)) for c in frame.columns])
    return csv_text(safe)


def to_html(df: pd.DataFrame, *, index: bool = False) -> str:
    """An HTML table without styles; every cell is escaped."""
    import html

    header, cells, right = _cells(df, index)

    def row(tag: str, values: list[str]) -> str:
        made = (
            f"<{tag}{' style=' + chr(34) + 'text-align:right' + chr(34) if r else ''}>{html.escape(v, quote=True)}</{tag}>"
            for v, r in zip(values, right, strict=True)
        )
        return "<tr>" + "".join(made) + "</tr>"

    return "\n".join(
        [
            "<table>",
            "<thead>",
            row("th", header),
            "</thead>",
            "<tbody>",
            *(row("td", c) for c in cells),
            "</tbody>",
            "</table>",
            "",
        ]
    )


def _cells(df: pd.DataFrame, index: bool) -> tuple[list[str], list[list[str]], list[bool]]:
    """Header, cells as text, and which columns are numbers (right-aligned)."""
    frame = df.reset_index() if index else df
    columns = [frame.iloc[:, i].tolist() for i in range(frame.shape[1])]
    text = [[_text(v) for v in column] for column in columns]
    right = [bool(column) and all(_numeric(t) for t in column) and any(t != _EMPTY for t in column) for column in text]
    return [str(c) for c in frame.columns], [list(row) for row in zip(*text, strict=True)], right


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or value is pd.NaT:
        return _EMPTY
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{int(value)}".replace("-", _MINUS)
    if isinstance(value, float | np.floating):
        return plain(float(value), 4)
    return str(value)


def _numeric(text: str) -> bool:
    first = text.replace(_MINUS, "-").removeprefix("<").split("(")[0]
    if text in (_EMPTY, "∞", f"{_MINUS}∞"):
        return True
    try:
        float(first)
    except ValueError:
        return False
    return True


def _guard(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value == _EMPTY:
        return ""
    if _MINUS in value and _numeric(value):  # a rounded number: typographic minus is for print
        return value.replace(_MINUS, "-").replace("∞", "inf")
    return plain_text(value)


_MD = str.maketrans({c: "\\" + c for c in "\\|`*_<>[]"})


def _md(text: str) -> str:
    return " ".join(text.splitlines()).translate(_MD) if text else text


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$", "|": r"$|$", _MINUS: "$-$",
    "∞": r"$\infty$", _EMPTY: "--", "±": r"$\pm$", "\u00a0": "~",
}  # fmt: skip


def _tex(text: str) -> str:
    if _numeric(text) and "e" in text:
        mantissa, power = text.replace(_MINUS, "-").split("e")
        return rf"${mantissa} \times 10^{{{int(power)}}}$"
    return "".join(_TEX.get(c, c) for c in " ".join(text.splitlines())) if text else text


def _symbol(name: str) -> str:
    from scalinglab.typeset import symbol

    return f"${symbol(name)}$" if name and name.replace("_", "").split("[")[0].isalnum() else _tex(name)

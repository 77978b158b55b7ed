"""Tables: rounding that follows the error, and text that no format takes for markup or for a formula."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit, fit
from scalinglab.report import tables


@pytest.fixture(scope="module")
def fitted() -> Fit:
    rng = np.random.default_rng(1)
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(3e7, 3e9, 5), np.geomspace(1e9, 1e11, 5)))
    loss = (1.7 + 320 * N**-0.34 + 400 * D**-0.29) * np.exp(0.002 * rng.standard_normal(N.size))
    return fit(
        "chinchilla", pd.DataFrame({"run_id": [f"r{i}" for i in range(N.size)], "params": N, "tokens": D, "loss": loss})
    )


# ---- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "se", "want"),
    [
        (0.34731, 0.0153, ("0.347", "0.015")),
        (0.34731, 0.0996, ("0.35", "0.10")),  # the error rounds up to a new digit
        (593.3, 128.0, ("590", "130")),
        (-0.0023, 0.0038, ("−0.0023", "0.0038")),
        (12.0, 0.0, ("12", "–")),
        (np.inf, 0.1, ("∞", "0.10")),
        (1.234e9, 5.6e7, ("1.234e9", "0.056e9")),
        (-0.0001, 0.02, ("0.000", "0.020")),
    ],
)
def test_rounded(value: float, se: float, want: tuple[str, str]) -> None:
    assert tables.rounded(value, se) == want


@pytest.mark.parametrize(
    ("value", "se", "want"),
    [
        (0.34731, 0.0153, "0.347(15)"),
        (1.8653, 0.0281, "1.865(28)"),
        (593.3, 128.0, "590(130)"),
        (25.24, 6.4, "25.2(6.4)"),
        (1.01e5, 1.5e4, "1.01(15)e5"),
        (0.34731, 0.0996, "0.35(10)"),
        (3.0, np.nan, "3"),
    ],
)
def test_with_error(value: float, se: float, want: str) -> None:
    assert tables.with_error(value, se) == want


@given(st.floats(-1e8, 1e8), st.floats(1e-7, 1e7))
def test_rounding_never_loses_more_than_a_tenth_of_the_error(value: float, se: float) -> None:
    text, error = tables.rounded(value, se)
    back = float(text.replace("−", "-"))
    assert abs(back - value) <= 0.0501 * se * 1.0001 + 1e-12 * abs(value)
    assert float(error.replace("−", "-")) == pytest.approx(se, rel=0.0501)


@given(st.floats(-1e12, 1e12))
def test_plain_keeps_three_digits(value: float) -> None:
    assert float(tables.plain(value).replace("−", "-")) == pytest.approx(value, rel=0.00501, abs=1e-300)


def test_p_values() -> None:
    assert [tables.p_value(p) for p in (0.0004, 0.0312, np.nan)] == ["<0.001", "0.031", "–"]


# ---- tables of results -------------------------------------------------------------------------------------------------
def test_parameter_table_rounds_by_the_jackknife_error(fitted: Fit) -> None:
    table = tables.parameter_table(fitted)
    row = table.set_index("parameter").loc["alpha"]
    se = float(fitted.jackknife.se["alpha"])
    assert (row["estimate"], row["se"]) == tables.rounded(float(fitted.params["alpha"]), se)
    low, high = fitted.conf_int().loc["alpha"]
    assert float(row["low"]) == pytest.approx(low, abs=0.06 * se)
    assert float(row["high"]) == pytest.approx(high, abs=0.06 * se)
    assert list(table["parameter"]) == [*fitted.params.index, *fitted.derived.index]
    compact = tables.parameter_table(fitted, style="compact")
    assert re.fullmatch(r"0\.\d+\(\d\d\)", compact.set_index("parameter").loc["alpha", "estimate"])
    with pytest.raises(ConfigError, match="'columns' or 'compact'"):
        tables.parameter_table(fitted, style="wide")  # type: ignore[arg-type]


def test_fixed_parameters_have_no_error(fitted: Fit) -> None:
    held = fit("chinchilla", fitted.runs, fixed={"E": 1.7})
    row = tables.parameter_table(held).set_index("parameter").loc["E"]
    assert row["estimate"] == "fixed 1.70"
    assert row["se"] == "–"
    assert row["identified"] == "–"


def test_law_table_has_the_columns_of_t2(fitted: Fit) -> None:
    table = tables.law_table(fitted)
    assert tuple(table.columns) == tables.T2
    raw = tables.law_table(fitted, rounding=False).set_index("parameter")
    assert raw.loc["alpha", "estimate"] == fitted.params["alpha"]
    assert raw.loc["alpha", "profile_lo"] < fitted.params["alpha"] < raw.loc["alpha", "profile_hi"]
    replicates = fitted.jackknife.params["alpha"]
    far = replicates[(replicates - fitted.params["alpha"]).abs().idxmax()]
    assert raw.loc["alpha", "drop_worst_run"] == far
    assert raw.loc["alpha", "huber"] == pytest.approx(fitted.params["alpha"] + fitted.robust_shift["alpha"])


def test_comparison_table_has_the_columns_of_t5() -> None:
    frame = pd.DataFrame(
        {"law": ["shape", "chinchilla"], "k": [7, 5], "loro_rmse": [0.00812, 0.01121], "delta_elpd": [0.0, -31.4],
         "delta_elpd_se": [np.nan, 8.93], "sign_flip_p": [np.nan, 0.0004], "status": ["converged", "converged"]}
    )  # fmt: skip
    table = tables.comparison_table(frame)
    assert tuple(table.columns) == tables.T5
    assert table.loc[1, ["delta_elpd", "delta_elpd_se", "sign_flip_p"]].tolist() == ["−31.4", "8.9", "<0.001"]
    assert table.loc[0, "leave_deepest_rmse"] == "–"
    with pytest.raises(ConfigError, match="needs a column 'law'"):
        tables.comparison_table(frame.drop(columns="law"))


# ---- formats -----------------------------------------------------------------------------------------------------------
NASTY = "=cmd|' /C calc'!A0"


def test_markdown_escapes_pipes_and_markup() -> None:
    text = tables.to_markdown(pd.DataFrame({"a|b": ["x|y", "<b>*z*</b>\nw"], "n": [1.5, -2.0]}))
    lines = text.splitlines()
    assert lines[0] == r"| a\|b | n |"
    assert lines[1] == "| --- | ---: |"
    assert lines[2] == r"| x\|y | 1.500 |"
    assert lines[3] == r"| \<b\>\*z\*\</b\> w | −2 |"


def test_latex_is_booktabs_and_escaped() -> None:
    frame = pd.DataFrame({"parameter": ["gamma1[pre_ln]", "50% & more"], "value": ["−0.02", "1.01(15)e5"]})
    text = tables.to_latex(frame, caption="A & B_1", label="tab:x")
    for piece in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{A \& B\_1}", r"\label{tab:x}", r"50\% \& more",
                  r"$1.01(15) \times 10^{5}$", "$-$0.02", r"\gamma_{1,\mathrm{pre\_ln}}"):  # fmt: skip
        assert piece in text
    with pytest.raises(ConfigError, match="label"):
        tables.to_latex(frame, label="a}b")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=30))
def test_latex_leaves_no_bare_special_character(cell: str) -> None:
    body = tables.to_latex(pd.DataFrame({"a": ["x", cell]})).split("\\\\\n")[2]
    bare = re.sub(
        r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\\[&%$#_{}]|\$(<|>|\||-|\\infty|\\pm)\$",
        "",
        body,
    )
    bare = re.sub(r"\$[^$]* \\times 10\^\{-?\d+\}\$", "", bare).replace("~", "")
    assert not set(bare) & set("&%$#_{}\\^"), bare


@pytest.mark.parametrize("cell", [NASTY, "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1", "-x"])
def test_csv_neutralises_formulas(cell: str) -> None:
    text = tables.to_csv(pd.DataFrame({"=a": [cell], "n": [-1.25]}))
    header, row = list(csv.reader(io.StringIO(text)))
    assert header == ["'=a", "n"]
    assert row == ["'" + cell, "-1.25"]


def test_csv_keeps_numbers_as_numbers() -> None:
    frame = pd.DataFrame({"x": [0.1 + 0.2, -1e-30], "t": ["−0.5", "–"], "s": ["-3", "+4.5e3"]})
    back = pd.read_csv(io.StringIO(tables.to_csv(frame)))
    assert back["x"].tolist() == frame["x"].tolist()
    assert back["t"].iloc[0] == -0.5
    assert np.isnan(back["t"].iloc[1])
    assert back["s"].tolist() == [-3.0, 4500.0]


@given(st.text(min_size=1, max_size=20))
def test_csv_cells_never_start_a_formula(cell: str) -> None:
    text = tables.to_csv(pd.DataFrame({"a": [cell, "end"]}))
    first = next(iter(list(csv.reader(io.StringIO(text, newline="")))[1:]))[0:1]
    shown = first[0] if first else ""
    if shown[:1] in ("=", "+", "-", "@"):
        float(shown)  # only numbers may


def test_html_is_escaped() -> None:
    text = tables.to_html(pd.DataFrame({"<script>": ['"><img src=x onerror=alert(1)>'], "n": [1]}))
    assert "<script>" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert '<td style="text-align:right">1</td>' in text

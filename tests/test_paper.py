"""A paper from its tables: what is declared, what is stale and why, what is written, and that no number is typed by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")

from scalinglab.cli import paper as verb
from scalinglab.errors import ConfigError
from scalinglab.published import depthbench
from scalinglab.report.paper import RECIPES, Built, build, check, products, read_paper
from scalinglab.report.paper.bibliography import read_references
from scalinglab.report.paper.documents import page_of
from scalinglab.report.paper.hashing import code_digest
from scalinglab.report.paper.manifest import Manifest
from scalinglab.report.paper.mathml import mathml
from scalinglab.report.paper.registry import Inputs, load_recipes
from scalinglab.report.paper.tex import read_tex
from scalinglab.tables import table_path

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "paper"
TOML = """
[paper]
text = "main.tex"
[artefact.mine]
kind = "table"
recipe = "csv_table"
inputs = ["a.csv"]
options = { columns = { name = "name", value = "value" }, errors = { value = "se" } }
[artefact.values]
kind = "numbers"
recipe = "csv_numbers"
inputs = ["artefact:mine"]
options = { numbers = { first = { column = "value", error = "se", where = "name == 'x'" }, best = { column = "value", take = "min" } } }
[artefact.forest]
kind = "figure"
recipe = "csv_forest"
inputs = ["b.csv"]
options = { label = "name", estimate = "value", low = "low", high = "high" }
[artefact.later]
kind = "table"
recipe = "csv_table"
inputs = ["later.csv"]
optional = true
"""
_LOWEST = '{ numbers = { lowest = { column = "loss", take = "min" } } }'
TEXT = r"""\documentclass{article}
\input{numbers}
\title{A paper}
\begin{document}
\maketitle
\section{Results}\label{sec:r}
The first is \slValuesFirst{} of section~\ref{sec:r}. % a comment
\begin{figure}\includegraphics{figures/forest.pdf}\caption{All}\label{fig:f}\end{figure}
\begin{table}\caption{Mine}\input{tables/mine}\end{table}
\slif{later}{\input{tables/later}}{Nothing later.}
\end{document}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pd.DataFrame({"name": ["x", "y"], "value": [1.23456, -2.0], "se": [0.05, 0.1]}).to_csv(
        tmp_path / "a.csv", index=False
    )
    pd.DataFrame({"name": ["x"], "value": [1.0], "low": [0.5], "high": [1.5]}).to_csv(tmp_path / "b.csv", index=False)
    (tmp_path / "paper.toml").write_text(TOML)
    (tmp_path / "main.tex").write_text(TEXT)
    return tmp_path


@pytest.fixture(autouse=True)
def no_latex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of HTML is tested; a PDF would take LaTeX and seconds."""
    monkeypatch.setattr("scalinglab.report.paper.documents._engine", lambda: None)


def make(folder: Path, **options: object) -> Built:
    return build(folder / "paper.toml", jobs=1, **options)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- what is built and what is stale -----------------------------------------------------------------------------------
def test_a_paper_is_built_once_and_the_same_input_gives_the_same_bytes(folder: Path) -> None:
    first = make(folder)
    assert (sorted(first.made), first.failed, list(first.missing)) == (["forest", "mine", "values"], {}, ["later"])
    before = files(folder)
    assert {
        "figures/forest.pdf",
        "figures/forest.png",
        "tables/mine.tex",
        "tables/mine.csv",
        "numbers.tex",
        "main.html",
    } <= set(before)
    assert not check(folder / "paper.toml").stale
    assert make(folder).made == ()
    assert len(make(folder, force=True).made) == 3
    assert files(folder) == before


def test_one_cell_makes_exactly_its_artefacts_stale(folder: Path) -> None:
    make(folder)
    (folder / "a.csv").write_text((folder / "a.csv").read_text().replace("1.23456", "1.24"))
    found = check(folder)
    assert set(found.stale) == {"mine", "values"}
    assert found.stale["mine"] == ["input a.csv changed"]
    assert found.stale["values"] == ["input artefact:mine is stale"]
    assert found.fresh == ("forest",)
    assert set(make(folder).made) == {"mine", "values"}
    assert not check(folder).stale
    assert r"\newcommand{\slValuesFirst}{1.240}" in (folder / "numbers.tex").read_text()


def test_a_copy_of_a_repository_uses_its_own_tables(tmp_path: Path) -> None:
    """The package comes from elsewhere, as with an editable install of another worktree."""
    tables, papers = tmp_path / "data" / "tables", tmp_path / "paper"
    tables.mkdir(parents=True)
    papers.mkdir()
    for name in ("depthbench", "simulated_shapes"):
        (tables / f"{name}.csv").write_bytes(table_path(name).read_bytes())
    asked = (
        'law = "shape"\nruns = "embedded:simulated_shapes"\nby = "architecture"\nshare = ["E", "alpha", "B", "beta"]\n'
    )
    (papers / "shape.toml").write_text(asked)
    entries = (
        ("depthbench", "embedded:depthbench", "csv_numbers", _LOWEST),
        ("fit", "shape.toml", "fit_numbers", "{}"),
    )
    (papers / "paper.toml").write_text("".join(
        f'[artefact.{name}]\nkind = "numbers"\nrecipe = "{recipe}"\ninputs = ["{given}"]\noptions = {options}\n'
        for name, given, recipe, options in entries
    ))  # fmt: skip
    make(papers)
    before = (papers / "numbers.tex").read_text()
    assert not check(papers).stale
    table = pd.read_csv(tables / "depthbench.csv")
    table.assign(loss=table["loss"] - 1).to_csv(tables / "depthbench.csv", index=False)
    table = pd.read_csv(tables / "simulated_shapes.csv")
    table.assign(loss=table["loss"] + 1).to_csv(tables / "simulated_shapes.csv", index=False)
    assert check(papers).stale == {
        "depthbench": ["input embedded:depthbench changed"],
        "fit": ["input shape.toml -> embedded:simulated_shapes changed"],
    }
    make(papers)
    assert f"{depthbench()['loss'].min() - 1:.2f}" in (papers / "numbers" / "depthbench.csv").read_text()
    floors = [float(re.search(r"FitE\}\{([\d.]+)", text)[1]) for text in (before, (papers / "numbers.tex").read_text())]  # type: ignore[index]
    assert floors[1] - floors[0] == pytest.approx(1, abs=0.3)
    (tables / "depthbench.csv").unlink()  # without one of its own the package's stands in
    assert "input embedded:depthbench changed" in check(papers).stale["depthbench"]


def test_the_help_shows_one_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of one paragraph are joined in the help: two examples in it would read as one command."""
    from scalinglab.cli import main

    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("scalinglab paper")]
    assert len(shown) == 1
    assert shown[0].count("scalinglab paper") == 1


def test_an_input_that_leaves_the_table_as_it_was_rebuilds_no_further(folder: Path) -> None:
    make(folder)
    table = pd.read_csv(folder / "a.csv")
    table["value"] = [1.2345600000001, -2.0]  # beyond the ten digits of a table on disk
    table.to_csv(folder / "a.csv", index=False)
    assert make(folder).made == ("mine",)


def test_check_says_what_was_edited(folder: Path) -> None:
    make(folder)
    (folder / "tables" / "mine.tex").write_text("other")
    assert check(folder).stale["mine"] == ["tables/mine.tex was changed by hand"]
    make(folder)
    (folder / "figures" / "forest.png").unlink()
    assert check(folder).stale["forest"] == ["figures/forest.png is not there"]
    make(folder)
    (folder / "numbers.tex").write_text("")
    assert set(check(folder).stale) >= {"numbers.tex", "main.html"}
    make(folder)
    (folder / "paper.toml").write_text(TOML.replace('value = "value" }, errors', 'value = "Value" }, errors'))
    assert check(folder).stale["mine"] == ["its entry in paper.toml changed"]
    make(folder)
    (folder / "main.tex").write_text(TEXT.replace("Results", "What came out"))
    assert set(check(folder).stale) == {"main.html"}


def test_optional_artefacts_come_and_go_with_their_input(folder: Path) -> None:
    make(folder)
    assert "Nothing later." in (folder / "main.html").read_text()
    assert check(folder).missing == {"later": ("later.csv",)}
    pd.DataFrame({"z": [3]}).to_csv(folder / "later.csv", index=False)
    assert check(folder).stale["later"] == ["never built"]
    assert make(folder).made == ("later",)
    assert "Nothing later." not in (folder / "main.html").read_text()
    (folder / "later.csv").unlink()
    assert check(folder).stale["later"] == ["input later.csv does not exist any more, but its files are there"]
    make(folder)
    assert not (folder / "tables" / "later.tex").exists()
    assert "Nothing later." in (folder / "main.html").read_text()


def test_an_artefact_that_is_declared_no_more_loses_its_files_unless_edited(folder: Path) -> None:
    make(folder)
    (folder / "tables" / "mine.csv").write_text("kept by hand\n")
    (folder / "paper.toml").write_text("[artefact.forest]" + TOML.split("[artefact.forest]")[1])
    assert {"mine", "values"} <= set(check(folder).stale)
    make(folder)
    assert (folder / "tables" / "mine.csv").exists()
    assert not (folder / "tables" / "mine.tex").exists()
    assert not (folder / "numbers" / "values.csv").exists()


def test_a_stopped_build_goes_on_from_there(folder: Path) -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(folder, tell=stop)
    assert len(Manifest.load(folder).artefacts) == 1
    assert len(make(folder).made) == 2
    assert not [p for p in folder.rglob(".*") if p.name != ".documents.json"]


def test_only_builds_what_is_asked_for_with_its_needs(folder: Path) -> None:
    built = make(folder, only=("values",))
    assert (set(built.made), built.documents) == ({"mine", "values"}, ())
    with pytest.raises(ConfigError, match="has no artefact 'valley'; there are"):
        make(folder, only=("valley",))


def test_one_artefact_that_fails_leaves_the_others_and_stops_the_text(folder: Path) -> None:
    (folder / "b.csv").write_text("name,other\nx,1\n")
    built = make(folder)
    assert set(built.made) == {"mine", "values"}
    assert "has no column 'value'" in built.failed["forest"]
    assert not (folder / "main.html").exists()
    (folder / "a.csv").write_text("name\nx\n")
    assert set(make(folder).failed) == {"mine", "values", "forest"}


@pytest.mark.slow
def test_processes_make_the_same_bytes(folder: Path) -> None:
    make(folder)
    alone = files(folder)
    build(folder / "paper.toml", jobs=2, force=True)
    assert files(folder) == alone


def test_the_verb_returns_what_a_script_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "paper.toml"
    assert verb.paper(file, check=True) == 1
    assert "stale    mine: never built" in capsys.readouterr().out
    assert verb.paper(file, jobs=1) == 0
    told = capsys.readouterr()
    assert told.out.split() == [str(folder / "main.html")]
    assert "missing later: no later.csv (optional)" in told.err
    assert verb.paper(file, check=True) == 0
    (folder / "b.csv").write_text("name\n")
    assert verb.paper(file, jobs=1) == 1
    with pytest.raises(ConfigError, match="leave --only and --force out"):
        verb.paper(file, check=True, force=True)
    assert verb.paper(file, recipes=True) == 0
    assert "depth_figure (figure)" in capsys.readouterr().out


# ---- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[paper]", "[papers]", "unknown key papers.*did you mean paper"),
        ("optional = true", "optionl = true", r"unknown key artefact.later.optionl \(did you mean optional\?\)"),
        ('recipe = "csv_forest"', 'recipe = "csv_forrest"', r"artefact.forest.recipe: there is no recipe 'csv_forrest' \(did you mean csv_forest"),
        ('kind = "figure"', 'kind = "table"', "artefact.forest.kind is 'table', but recipe 'csv_forest' makes a figure"),
        ('low = "low"', 'lo = "low"', "unknown key artefact.forest.options.lo"),
        ('take = "min"', 'take = "median"', "options.numbers.*take: .*choose one of only"),
        ("optional = true", "", "artefact.later: input later.csv does not exist; correct it, or say optional = true"),
        ('inputs = ["b.csv"]', "inputs = []", "recipe 'csv_forest' takes one, not 0"),
        ('inputs = ["b.csv"]', 'inputs = ["artefact:none"]', "there is no artefact 'none'"),
        ('inputs = ["a.csv"]', 'inputs = ["artefact:values"]', "in a circle: .*mine.*values|in a circle: .*values.*mine"),
        ('inputs = ["a.csv"]', 'inputs = ["artefact:forest"]', "artefact:forest is a figure"),
        ('inputs = ["artefact:mine"]', 'inputs = ["artefact:later"]', "artefact.values rests on later.csv|artefact.values rests on artefact:later"),
        ("[artefact.mine]", '[artefact."Mine 1"]', "a name is lower-case letters"),
        ('text = "main.tex"', 'text = "paper.tex"', "paper: paper.tex does not exist beside it"),
        ('text = "main.tex"', 'recipes = ["own.py"]', "own.py does not exist"),
    ],
)  # fmt: skip
def test_a_plan_that_is_not_usable_is_refused_with_a_sentence(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "paper.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_paper(folder)


def test_a_damaged_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="manifest.json: damaged"):
        check(folder)


# ---- own recipes -------------------------------------------------------------------------------------------------------
OWN = '''
from scalinglab.report.paper import Number, recipe

@recipe("own_count", "numbers")
def own_count(inputs, options):
    """Rows of a table."""
    return [Number("rows", len(inputs.table()), str(len(inputs.table())))]
'''


def test_own_recipes_come_from_own_files_and_their_code_counts(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    entry = '[artefact.rows]\nkind = "numbers"\nrecipe = "own_count"\ninputs = ["a.csv"]\n'
    (folder / "paper.toml").write_text(TOML.replace('text = "main.tex"', 'recipes = ["own.py"]') + entry)
    make(folder)
    assert r"\newcommand{\slRowsRows}{2}" in (folder / "numbers.tex").read_text()
    (folder / "own.py").write_text(OWN.replace('"""Rows of a table."""', '"""How many rows."""  ') + "\n# a comment\n")
    assert not check(folder).stale
    (folder / "own.py").write_text(OWN.replace("str(len", "str(1 + len"))
    assert check(folder).stale == {"rows": ["the code behind it changed"]}
    make(folder)
    assert r"\slRowsRows}{3}" in (folder / "numbers.tex").read_text()
    (folder / "own.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="own.py fails when it is run"):
        read_paper(folder)
    RECIPES.pop("own_count", None)


def test_code_of_a_recipe_is_what_it_imports() -> None:
    """A recipe of plain tables rests on nothing of the depth benefit or the trainer; a recipe of depth does on the former."""
    from scalinglab.report.paper import hashing

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        left = [module]
        while left:
            name = left.pop()
            path = hashing.module_file(name)
            if name not in found and path is not None:
                found.add(name)
                left += hashing._code(path, path.stat().st_mtime_ns)[1]
        return found

    plain = reached("scalinglab.report.paper.recipes.plain_tables")
    assert "scalinglab.report.tables" in plain
    assert not [m for m in plain if "depth_benefit" in m or ".train" in m or ".cli" in m]
    assert "scalinglab.depth_benefit.labels" in reached("scalinglab.report.paper.recipes.depth")
    assert code_digest(("scalinglab.errors",), {}) != code_digest(("scalinglab.tables",), {})


# ---- numbers -----------------------------------------------------------------------------------------------------------
def test_digits_follow_the_standard_error() -> None:
    assert products.measured("a", 0.34731, 0.0153).text == "0.347"
    assert products.measured("a", -0.34731, 0.0153).text == r"\ensuremath{-0.347}"
    assert [n.text for n in products.with_interval("a", 0.1, 0.02, 0.0612, 0.1388)] == ["0.100", "0.061", "0.139"]
    assert products.p_value("p", 0.00004).text == r"\ensuremath{p < 0.001}"
    assert products.p_value("p", 0.0123).text == r"\ensuremath{p = 0.012}"
    assert products.percent("s", 0.0879, 2).text == r"8.8\,\%"
    assert products.plain("n", 3.2e21).text == r"\ensuremath{3.20 \times 10^{21}}"
    assert [n.text for n in products.counted("n", 4)] == ["4", "four"]
    assert products.size("n", 304.2e6).text == "304M"
    assert products.words("w", "50 % of a_b & c").text == r"50 \% of a\_b \& c"


def test_macros_have_letters_only_and_one_number_each() -> None:
    assert products.macro("depth_bench", "attn_res2_gap") == r"\slDepthBenchAttnResTwoGap"
    twice = [products.plain("a_b", 1), products.plain("aB", 2)]
    with pytest.raises(ConfigError, match=r"two of its numbers have the macro \\slXAB"):
        products.render("numbers", "x", twice)


def test_two_artefacts_with_one_macro_are_refused(tmp_path: Path) -> None:
    for name, macro in (("a_b", "c"), ("a", "b_c")):
        (tmp_path / f"{name}.csv").write_bytes(
            next(iter(products.render("numbers", name, [products.plain(macro, 1)]).values()))
        )
    with pytest.raises(ConfigError, match="is also another artefact's"):
        products.read_macros({n: tmp_path / f"{n}.csv" for n in ("a_b", "a")})


def test_a_recipe_must_return_its_kind() -> None:
    with pytest.raises(ConfigError, match="returned int, not a Table"):
        products.render("table", "t", 3)
    with pytest.raises(ConfigError, match="returned int, not a Figure"):
        products.render("figure", "t", 3)


# ---- the text ----------------------------------------------------------------------------------------------------------
def tree(
    tmp_path: Path, text: str, macros: dict[str, str] | None = None, present: tuple[str, ...] = ()
) -> list[object]:
    (tmp_path / "t.tex").write_text(text)
    return list(read_tex(tmp_path / "t.tex", macros or {}, present, tmp_path / "numbers.tex"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n\n\\includgraphics{x}", r"t.tex:3: \\includgraphics is outside.*did you mean \\includegraphics"),
        ("a\n\\begin{figur}", r"t.tex:2: environment figur is outside.*did you mean figure"),
        ("a {b\n", "t.tex:1: a brace is not closed"),
        ("a\nb}", "t.tex:2: a closing brace"),
        ("\\begin{itemize}\n\\item x", "environment itemize is not closed"),
        ("\\begin{itemize}\\end{table}", r"\\end\{table\} where environment itemize is open"),
        ("a $x", "t.tex:1: math that is not closed"),
        ("\n\\slDepthGapp{}", r"t.tex:2: \\slDepthGapp is not a number.*did you mean \\slDepthGap"),
        ("$\\slOther$", r"t.tex:1: \\slOther is not a number"),
        ("\\input{gone}", r"t.tex:1: \\input\{gone\}.*does not exist"),
        ("\\input{t}", "goes round in a circle"),
        ("\\newcommand{\\x}[1]{a}", "takes arguments"),
        ("\\newcommand{\\x}{\\x}\\x", "expands to itself"),
        ("\\emph x", r"t.tex:1: a command here needs an argument in braces"),
    ],
)  # fmt: skip
def test_latex_outside_the_subset_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tree(tmp_path, text, {r"\slDepthGap": "1"})


def test_the_branch_that_is_not_taken_is_not_read(tmp_path: Path) -> None:
    text = r"\slif{a}{yes \slNone{} \% {x}}{no}"
    assert "no" in str(tree(tmp_path, text))
    assert "yes" not in str(tree(tmp_path, text))
    with pytest.raises(ConfigError, match=r"\\slNone is not a number"):
        tree(tmp_path, text, present=("a",))


def test_math_becomes_mathml() -> None:
    made = ET.tostring(mathml(r"r^* = r_0 \exp(-\gamma_1 / (2 \gamma_2)) \text{if~so}", "x"), encoding="unicode")
    assert "<msup><mi>r</mi><mo>∗</mo></msup>" in made
    assert "<msub><mi>γ</mi><mn>2</mn></msub>" in made
    assert "<mtext>if\u00a0so</mtext>" in made
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mi>x</mi></mrow></mfrac>" in ET.tostring(
        mathml(r"\frac{1}{x}", "x"), encoding="unicode"
    )
    assert mathml("-1", "x")[0].get("form") == "prefix"
    for bad, why in ((r"\foo", r"\\foo is outside the math"), ("x_", "ends where"), ("_x", "belongs to nothing"), ("{x", "not closed"), ("x}", "nothing opened")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"here:7: .*{why}"):
            mathml(bad, "here:7")


def test_the_page_numbers_cites_and_escapes(folder: Path) -> None:
    text = TEXT.replace(
        "% a comment",
        r"See~\cite{b2020} and \cite[p. 3]{a1999, b2020}: $x < \slValuesBest$, a \& b < c\footnote{Small.}" + "\n",
    )
    (folder / "main.tex").write_text(text.replace(r"\end{document}", "\\bibliography{references}\n\\end{document}"))
    (folder / "references.bib").write_text(
        "@article{a1999, author = {Last, First and others}, title = {{A} Title?}, journal = {J}, year = 1999, volume = {3}, pages = {1--9}}\n"
        '@misc{b2020, author = "Bee, B. and Cee, C.", title = {B \\& C}, year = {2020}, eprint = {2001.00001}}\n'
    )
    (folder / "paper.toml").write_text(
        TOML.replace('text = "main.tex"', 'text = "main.tex"\nreferences = "references.bib"')
    )
    make(folder)
    page = (folder / "main.html").read_text()
    assert "section\u00a01." in page.replace("</a>", "")
    assert '[<a href="#ref-b2020">1</a>]' in page
    assert '[<a href="#ref-a1999">2</a>, <a href="#ref-b2020">1</a>, p. 3]' in page
    assert "First Last et al. A Title? <em>J</em> 3:1–9, 1999." in page
    assert "B. Bee and C. Cee. B &amp; C. 2020." in page
    assert "<strong>Figure 1. </strong>All" in page
    assert 'src="data:image/png;base64,' in page
    assert '<td class="n">1.235</td>' in page  # the same table that LaTeX gets
    assert "a &amp; b &lt; c" in page
    assert "http" not in page.replace("https://arxiv.org", "").replace("http-equiv", "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"\ref{sec:r}", r"\ref{sec:x}", r"main.tex:7: \\ref\{sec:x\}: there is no such label"),
        (r"\ref{sec:r}", r"\cite{nobody}", r"main.tex:7: \\cite\{nobody\}: references.bib has no such entry"),
        ("figures/forest.pdf", "figures/other.pdf", r"main.tex:8: \\includegraphics: .*other.png does not exist"),
        (r"\label{fig:f}", r"\label{sec:r}", r"main.tex:8: \\label\{sec:r\} is given twice"),
    ],
)  # fmt: skip
def test_what_the_text_points_at_must_be_there(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "main.tex").write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        make(folder)


def test_references_without_what_a_reader_needs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.bib"
    for text, message in (
        ("@article{a, title = {T}, year = 2000}", "r.bib:1: a has no author"),
        ("\n@article{a, author = {A}, title = {T, year = 2000", "r.bib:2: a brace is not closed"),
        (
            "@misc{a, author={A}, title={T}, year=1}\n@misc{a, author={A}, title={T}, year=1}",
            "r.bib:2: the key a is taken",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_references(file)


# ---- recipes -----------------------------------------------------------------------------------------------------------
def _study(tmp_path: Path) -> str:
    """Three architectures of DepthBench: enough for every part of a depth report."""
    table = depthbench()
    table = table[(table["match_group"] == "400M") & table["architecture"].isin(["pre_ln", "hc", "lns"])]
    table.to_csv(tmp_path / "study.csv", index=False)
    return str(tmp_path / "study.csv")


def _sweep(tmp_path: Path) -> str:
    from scalinglab.misscaling import TRUTHS, Plan, simulate_study

    cells, log_lr, loss, _ = simulate_study(TRUTHS["mis-scaling"], Plan(), trials=1, rng=np.random.default_rng(1))
    rows = [
        {**cells.loc[c, ["architecture", "parametrization", "depth", "width"]], "run_id": f"r{c}-{j}-{s}", "lr": np.exp(log_lr[c, j]),
         "seed": s, "loss": loss[0, c, j, s], "loss_initial": 5.0, "tokens": 1e6, "batch_tokens": 512, "corpus_fingerprint": "00", "status": "finished"}
        for c in range(len(cells)) for j in range(log_lr.shape[1]) for s in range(loss.shape[-1])
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "sweep.csv", index=False)
    return str(tmp_path / "sweep.csv")


_SHAPE = {"law": "shape", "by": "architecture", "share": ["E", "alpha", "B", "beta"]}
_QUICK = {"draws": 99, "reanalyse": False}
EXAMPLES: dict[str, tuple[Callable[[Path], str], dict[str, object]]] = {
    "depth_figure": (_study, {"figure": "depth_forest", **_QUICK}), "depth_table": (_study, {"table": "interaction", **_QUICK}),
    "depth_numbers": (_study, _QUICK),
    "misscaling_figure": (_sweep, {"figure": "decomposition", "draws": 49}), "misscaling_table": (_sweep, {"table": "drift", "draws": 49}),
    "misscaling_numbers": (_sweep, {"draws": 49}),
    **{f"fit_{k}": (lambda _: "embedded:simulated_shapes", {**_SHAPE, **more}) for k, more in (("figure", {"figure": "residuals"}), ("table", {}), ("numbers", {}))},
    **{f"floor_{k}": (lambda _: "embedded:entropy_hierarchy", {}) for k in ("figure", "table", "numbers")},
    **{f"depth_curve_{k}": (lambda _: "embedded:pilot_automaton", {}) for k in ("figure", "numbers")},
    **{f"coverage_{k}": (lambda _: str(ROOT / "benchmarks" / "coverage.csv"), {}) for k in ("figure", "table", "numbers")},
    **{f"verdict_power_{k}": (lambda _: str(ROOT / "benchmarks" / "misscaling_power.csv"), {"plans": ["gate", "five rates"]}) for k in ("figure", "table", "numbers")},
    "csv_table": (lambda _: str(table_path("depthbench")), {"columns": {"architecture": "A", "loss": "loss"}, "most": 3}),
    "csv_numbers": (lambda _: str(table_path("depthbench")), {"numbers": {"rows": {"column": "loss", "take": "count"}}}),
    "csv_forest": (lambda _: str(table_path("depthbench")), {"label": "run_id", "estimate": "loss", "low": "loss", "high": "loss", "reference": "loss", "where": "depth == 70"}),
}  # fmt: skip


def test_every_recipe_has_an_example() -> None:
    load_recipes(())
    assert set(EXAMPLES) == {name for name, r in RECIPES.items() if r.function.__module__.startswith("scalinglab.")}
    assert all(RECIPES[name].summary for name in EXAMPLES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_recipes_make_what_they_say(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    import msgspec

    load_recipes(())
    place, options = EXAMPLES[name]
    folder = tmp_path_factory.getbasetemp() / f"recipes-{place.__name__}"
    folder.mkdir(exist_ok=True)
    recipe = RECIPES[name]
    made = recipe.make(Inputs((place(folder),)), msgspec.convert(options, recipe.options))
    written = products.render(recipe.kind, name, made)
    if recipe.kind == "figure":
        assert written[f"figures/{name}.pdf"].startswith(b"%PDF")
        assert b"CreationDate" not in written[f"figures/{name}.pdf"]
    elif recipe.kind == "table":
        tex = written[f"tables/{name}.tex"].decode()
        assert tex.count(r"\\") == len(made.shown) + 1
    else:
        rows = written[f"numbers/{name}.csv"].decode().splitlines()
        assert len(rows) > 1
        assert all(re.match(r"\\sl[A-Za-z]+,", row) for row in rows[1:])


@pytest.mark.filterwarnings("ignore")
def test_numbers_of_a_simulated_study_are_the_fits() -> None:
    import msgspec

    from scalinglab import fit, read_runs

    load_recipes(())
    recipe = RECIPES["fit_numbers"]
    made = {
        n.name: n for n in recipe.make(Inputs(("embedded:simulated_shapes",)), msgspec.convert(_SHAPE, recipe.options))
    }
    expected = fit(
        "shape", read_runs("embedded:simulated_shapes"), by="architecture", share=("E", "alpha", "B", "beta")
    )
    assert made["alpha"].value == pytest.approx(expected.params["alpha"], rel=1e-12)
    assert made["r_star_pre_ln_true"].value == pytest.approx(22.8396, abs=1e-3)
    assert made["held"].value <= made["known"].value == 12


def test_a_floor_at_its_bound_has_no_limits_and_does_not_hold_the_entropy() -> None:
    load_recipes(())
    recipe = RECIPES["floor_numbers"]
    made = {
        n.name: n
        for n in recipe.make(Inputs(("embedded:entropy_hierarchy", "embedded:entropy_markov")), recipe.options())
    }
    assert made["hierarchy_floor"].value == 0
    assert "hierarchy_floor_low" not in made
    assert (made["agreeing"].value, made["flagged"].value) == (1, 1)
    assert made["markov_floor_low"].value < made["markov_entropy"].value < made["markov_floor_high"].value


# ---- the paper of this repository --------------------------------------------------------------------------------------
here = pytest.mark.skipif(not (PAPER / "main.tex").is_file(), reason="the paper is not part of this copy")


@here
def test_no_result_is_typed_in_the_text() -> None:
    """Digits outside macros: only as a power, an index or a factor of one digit in math, and in file and label names."""
    text = re.sub(r"(?<!\\)%.*", "", (PAPER / "main.tex").read_text(encoding="utf-8"))
    text = re.sub(r"\\(documentclass|usepackage)(\[[^\]]*\])?\{[^}]*\}", "", text)
    text = re.sub(r"\\(cite|ref|label|input|includegraphics|slif|bibliography)(\[[^\]]*\])?\{[^}]*\}", "", text)
    text = re.sub(r"\\sl[A-Za-z]+", "", text)
    for math in re.findall(r"\$[^$]*\$|\\begin\{equation\}.*?\\end\{equation\}", text, re.DOTALL):
        assert not re.search(r"\d[\d.]|\.\d", math), f"a number is typed in {math}"
    text = re.sub(r"\$[^$]*\$|\\begin\{equation\}.*?\\end\{equation\}", "", text, flags=re.DOTALL)
    typed = [w for w in re.findall(r"\S*\d\S*", text) if not re.fullmatch(r"\(?(19|20)\d\d[).,;]*", w)]
    assert not typed, f"numbers are typed in the text: {typed}"


@here
def test_the_papers_text_is_shown_with_the_numbers_that_are_there() -> None:
    paper = read_paper(PAPER)
    page = page_of(paper, Manifest.load(PAPER), "0" * 64)
    assert "\\sl" not in re.sub(r"base64,[^\"]*", "", page)
    assert page.count("<figure") >= 10
    assert {"depth_study.csv", "misscaling.csv", "gates.csv", "replications.csv"} <= {
        Path(i).name for a in paper.artefacts if a.optional for i in a.inputs
    }


@here
def test_references_are_complete_and_cited() -> None:
    references = read_references(PAPER / "references.bib")
    cited = {
        k.strip()
        for group in re.findall(r"\\cite(?:\[[^\]]*\])?\{([^}]*)\}", (PAPER / "main.tex").read_text())
        for k in group.split(",")
    }
    assert cited == set(references)
    assert len(references) >= 19
    assert all({"journal", "booktitle"} & set(r.fields) for r in references.values())
    assert all(re.fullmatch(r"\d{4}\.\d{5}", r.fields["eprint"]) for r in references.values() if "eprint" in r.fields)


def test_a_failed_coordinate_check_among_the_inputs_refuses_its_arm(tmp_path):
    """The table alone decides; with the check of a scaled arm that failed beside it, nothing rests on that arm."""
    from scalinglab.coordinates import CoordinateCheck
    from scalinglab.report.paper.recipes.misscaling import MisscalingOptions, misscaling_report

    sweep, check = _sweep(tmp_path), tmp_path / "check.json"
    shipped = CoordinateCheck.load(ROOT / "data" / "checks" / "misscaling" / "pre_ln-sp-depth.json")
    assert not shipped.passed
    replace(shipped, parametrization="completep").save(check)
    asked = MisscalingOptions(draws=49)
    alone = misscaling_report(Inputs((sweep,)), asked)
    held = misscaling_report(Inputs((sweep, str(check))), asked)
    assert alone.verdict == "H_misscale"
    assert held.verdict == "inconclusive"
    assert "coordinate check over depth failed" in held.grids.refused["pre_ln", "completep"]

"""The HTML report: what it says, that data stays text, that it asks for nothing, that it can be read; and the verb `depth`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import pytest

from scalinglab import cli
from scalinglab.depth_benefit import depth_benefit
from scalinglab.errors import ConfigError
from scalinglab.published import depthbench
from scalinglab.report.html import html_report, save_report
from scalinglab.report.html.arms import arms, design_notes
from scalinglab.report.html.elements import clean, el, page
from scalinglab.report.html.sections import answers, percent, signed
from scalinglab.report.html.wording import SIGNS, WORDS, and_list, wording
from scalinglab.simulation import grid_design, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}
SOME = ("pre_ln", "lns", "hc", "attnres_full", "moda")  # five of ten keep the tests fast
VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style></title><script>x</script>", "a' onload='x",
    "&lt;b&gt; &amp; ]]> <!--", "{{7*7}} ${x} %s", "nul\x00 esc\x1b bidi\u202e end",
)  # fmt: skip


class Reader(HTMLParser):
    """Elements, attributes and text of a page; unbalanced tags are an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.text, self.style = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())

    def all(self, tag):
        return [a for t, a in self.tags if t == tag]


def runs(architectures=("pre_ln", "hc"), aspects=(8, 16, 32, 64, 128), seeds=2):
    design = grid_design((1e8,), (2e9,), aspects=aspects, architectures=architectures)
    return simulate("shape", TRUTH, design, sigma=0.0015, seeds=seeds, rng=0)


@pytest.fixture(scope="module")
def bench():
    table = depthbench()
    return depth_benefit(table[table["architecture"].isin(SOME)], draws=99)


@pytest.fixture(scope="module")
def text(bench):
    return html_report(bench)


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


@pytest.fixture(scope="module")
def hostile():
    table = runs(seeds=1)
    names = {"pre_ln": HOSTILE[0], "hc": HOSTILE[1]}
    table["architecture"] = table["architecture"].map(names)
    table["match_group"] = HOSTILE[2]
    table["run_id"] = [f"{HOSTILE[k % len(HOSTILE)]} {k}" for k in range(len(table))]
    table["eval_dataset"], table["optimizer"] = HOSTILE[4], HOSTILE[6]
    return html_report(depth_benefit(table, reference=HOSTILE[0], draws=99, reanalyse=False))


# ---- what it says --------------------------------------------------------------------------------------------------------
def test_every_label_reason_and_warning_is_there(bench, read):
    for a, v in bench.verdicts.items():
        assert a in read.words
        assert wording(v.label).short in read.words
        assert f"label stable in {v.stable} of {v.analyses} re-analyses" in read.words
        assert all(code in read.words for code in v.codes)
    for w in bench.warnings:
        assert w.code in read.words
    for said in bench.sentences.values():
        if said in (s for k, s in bench.sentences.items() if not k.startswith("label/")):
            assert " ".join(said.split()) in read.words
    for key in ("data_hash", "code_version", "created"):
        assert bench.result[key] in read.words
    for entries in bench.checklist.values():
        assert all(" ".join(v.split()) in read.words for v in entries.values())


def test_the_cautions_of_the_published_design_are_visible(bench, read):
    """Fixed total against fixed backbone, FLOPs, one seed, few shapes, deeper runs of some, extra parameters."""
    notes = " ".join(design_notes(bench))
    assert "matched in total parameters" in notes
    assert "8.8 % more backbone" in notes
    assert "7.2 % more FLOPs" in notes  # 2.31 to 2.48e9 per token, L16 to L32
    assert "Few shapes: 5 to 7" in notes
    assert "Only hc and attnres_full were run at 42 and 70 blocks" in notes
    assert "(300M) are not pooled" in notes
    assert all(note in read.words for note in design_notes(bench))
    assert "moda +16" in read.words
    held = {h.name: h for h in arms(bench)}
    assert held["Training tokens"].equal
    assert not held["Backbone parameters"].equal
    assert held["Backbone parameters"].shallow == pytest.approx(284_252_160)


def test_answers_are_sorted_claims_first_and_name_no_absence(bench):
    said = answers(bench)
    assert said[0].startswith("No claim for pre_ln and moda: unequal sizes can't explain it")  # the larger are worse
    assert said[1].startswith("No claim for lns, hc and attnres_full: unequal sizes may explain it")
    assert re.search("hc and attnres_full differ from pre_ln", said[-1])
    report = depth_benefit(runs(seeds=3), draws=99, reanalyse=False)
    assert answers(report)[0].startswith("pre_ln: deeper is better")
    every = " ".join(w.short + w.tells for w in WORDS.values()).lower()
    assert not re.search(r"no (effect|difference|benefit)|does(n't| not) (matter|help)", every)


def test_every_label_of_the_engine_has_words():
    from typing import get_args

    from scalinglab.depth_benefit.labels import Label

    assert set(get_args(Label)) <= set(WORDS)
    assert {w.tone for w in WORDS.values()} <= set(SIGNS)
    assert wording("NEW_LABEL").short == "NEW_LABEL"


def test_a_report_without_contrast_is_a_page_too():
    report = depth_benefit(runs(aspects=(32,)), reanalyse=False)
    read = Reader(html_report(report))
    assert "no depth contrast" in read.words
    assert "NO_DEPTH_CONTRAST" in read.words
    assert arms(report) == []
    assert design_notes(report) == []


def test_only_depth_reports_are_shown(tmp_path, bench):
    with pytest.raises(ConfigError, match="depth report"):
        html_report({"labels": {}})
    with pytest.raises(ConfigError, match="'gif' is not known"):
        save_report(bench, tmp_path, formats=("gif",))
    assert not list(tmp_path.iterdir())


def test_numbers_in_words():
    assert signed(0.0268) == "+0.0268"
    assert signed(-0.0002, 3) == "\N{MINUS SIGN}0.000"
    assert signed(float("nan")) == "?"
    assert percent(0.157) == "+16\u00a0%"
    assert percent(-0.0541) == "\N{MINUS SIGN}5.4\u00a0%"
    assert and_list(["a"]) == "a"
    assert and_list(["a", "b", "c"]) == "a, b and c"
    assert and_list([str(k) for k in range(20)], most=3) == "0, 1, 2 and 17 more"


# ---- data stays text -------------------------------------------------------------------------------------------------------
def test_hostile_names_are_text(hostile):
    read = Reader(hostile)
    assert not read.all("script")
    assert not read.all("img")
    assert len(read.all("style")) == 1
    assert len(read.all("title")) == 1 + sum(a.get("role") == "img" for a in read.all("svg"))
    assert not [name for _, a in read.tags for name in a if name.startswith("on")]
    for name in HOSTILE[:3]:
        assert name in read.words
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\u202a-\u202e\u2066-\u2069]", hostile)
    assert read.style == files("scalinglab.report.html").joinpath("page.css").read_text("utf-8")


def test_elements_escape_text_and_attributes():
    made = page(el("p", "<b>", el("i", "&"), "x > y", title='"><script>', class_="a"))
    # in quotes, < needs no escape
    assert made == ('<!doctype html>\n<p title="&quot;&gt;<script&gt;" class="a">&lt;b&gt;<i>&amp;</i>x &gt; y</p>\n')
    assert clean("a\x00b\u202ec") == "a\ufffdb\ufffdc"
    assert "None" not in page(el("p", None, [None, "x"], id=None))


def test_the_page_asks_for_nothing(text, hostile):
    """No scripts, no addresses but fragments and data:, nothing in styles; and a policy that would forbid it."""
    for made in (text, hostile):
        read = Reader(made)
        assert not {t for t, _ in read.tags} & {"script", "iframe", "object", "embed", "form", "base", "img", "video"}
        for _, attributes in read.tags:
            for key in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
                if key in attributes:
                    assert attributes[key].startswith(("#", "data:,"))
            for value in attributes.values():
                assert not re.search(r"url\((?!#)", value or "")
        assert "@import" not in read.style
        assert "url(" not in read.style
        policy = next(a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'")


# ---- it can be read ----------------------------------------------------------------------------------------------------------
def test_structure_for_readers_of_any_kind(read):
    assert read.all("html")[0]["lang"] == "en"
    assert any("width=device-width" in a.get("content", "") for a in read.all("meta"))
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for _, a in read.tags:
        for key in ("aria-labelledby", "href"):
            target = a.get(key, "").removeprefix("#")
            if target and not a[key].startswith("data:"):
                assert target in ids, a
        for reference in re.findall(r"url\(#([^)]+)\)", " ".join(v or "" for v in a.values())):
            assert reference in ids
    levels = [int(t[1]) for t, _ in read.tags if re.fullmatch("h[1-6]", t)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert len(read.all("main")) == len(read.all("header")) == len(read.all("nav")) == 1
    figures = [a for a in read.all("svg") if a.get("aria-hidden") != "true"]
    assert len(figures) == 10  # five, for wide and for narrow pages
    assert all(a["role"] == "img" and a["aria-labelledby"] in ids for a in figures)
    assert len(read.all("caption")) == len(read.all("table")) > 3
    assert all(a.get("scope") in ("col", "row") for a in read.all("th"))


def test_text_alternatives_hold_the_numbers(bench, read):
    e = bench.outcome.effects.pick("E1", "hc")
    assert f"hc {e.estimate:+.3g}" in read.words
    assert f"hc {bench.verdicts['hc'].stable} of {bench.verdicts['hc'].analyses}" in read.words
    assert "hc goes from" in read.words


def _rules():
    css = files("scalinglab.report.html").joinpath("page.css").read_text("utf-8")
    made = []
    for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL):
        found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", block))
        made.append({k: v if len(v) == 7 else "#" + "".join(c * 2 for c in v[1:]) for k, v in found.items()})
    return made


def _contrast(a, b):
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_meets_wcag_in_light_dark_and_print():
    """AA: text 4.5 to 1, graphics 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    assert len(_rules()) == 3
    for rule in _rules():
        for ground in ("back", "paper"):
            for ink in ("ink", "muted"):
                assert _contrast(rule[ink], rule[ground]) >= 4.5
            assert _contrast(rule["c0"], rule[ground]) >= 4.5  # links
            for k in range(6):
                assert _contrast(rule[f"c{k}"], rule[ground]) >= 3
        for tone in ("better", "worse", "equal", "open", "refused"):
            assert _contrast(rule[tone], rule[f"{tone}-back"]) >= 4.5
        for ink in ("worse",):
            assert _contrast(rule[ink], rule["paper"]) >= 4.5


def test_figures_follow_the_page(text):
    """Ink, paper and accents are variables of the page: no figure keeps a white ground in the dark."""
    for svg in re.findall(r"<svg [^>]*class=\"figure\".*?</svg>", text, re.DOTALL):
        assert "#ffffff" not in svg
        assert "#1a1a1a" not in svg
        assert "var(--paper)" in svg
        assert "<style" not in svg
        assert "<metadata" not in svg


# ---- files and the verb --------------------------------------------------------------------------------------------------------
def test_the_verb_writes_everything(tmp_path, capsys):
    table = tmp_path / "runs.csv"
    runs(seeds=2, aspects=(8, 32, 128)).to_csv(table, index=False)
    out = tmp_path / "report"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["depth", str(table), "--out", str(out), "--draws", "99", "--no-reanalyse"])
    assert stopped.value.code in (0, 1)
    said = capsys.readouterr()
    assert "Depth benefit" in said.out
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert {
        "report.html",
        "result.json",
        "summary.txt",
        "tables/T3.csv",
        "figures/depth_forest.png",
        "figures/depth_power.svg",
    } <= names
    Reader((out / "report.html").read_text())
    assert "no figure depth_specifications" in said.err  # and the page says so
    for word in ("report.html", "result.json"):
        assert word in said.err


@pytest.mark.parametrize(
    ("labels", "code"),
    [(("DEPTH_BENEFIT", "INCONCLUSIVE"), 0), (("DEPTH_BENEFIT", "FRAGILE"), 1), (("NOT_IDENTIFIED",), 1)],
)
def test_exit_code_says_whether_the_design_bears_a_claim(labels, code, monkeypatch, tmp_path):
    from types import SimpleNamespace

    import scalinglab.depth_benefit as package

    refused = {"FRAGILE", "NOT_IDENTIFIED"}
    verdicts = {
        str(k): SimpleNamespace(label=v, reading="INCONCLUSIVE" if v in refused else v) for k, v in enumerate(labels)
    }
    fake = SimpleNamespace(verdicts=verdicts, summary=lambda: "")
    monkeypatch.setattr(package, "depth_benefit", lambda *a, **k: fake)
    runs().to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["depth", str(tmp_path / "runs.csv")])
    assert stopped.value.code == code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prereg", "absent.toml"], "no such file"), (["--reference", "bert"], "pre_ln"), (["--group", "x"], "group"),
        (["--margin", "-1"], "margin"), (["--out", "runs.csv"], "is a file"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_met_are_a_sentence(options, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    runs(seeds=1).to_csv("runs.csv", index=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["depth", "runs.csv", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "first",
    ["import scalinglab.depth_benefit.cells", "from scalinglab.depth_benefit import DepthReport", "import scalinglab"],
)
def test_one_name_for_function_and_package(first):
    """Whatever is imported first, `from scalinglab import depth_benefit` can be called and holds the package's names."""
    code = f"""
{first}
from scalinglab import DepthReport, depth_benefit
import inspect, sys
import scalinglab.depth_benefit as package
from scalinglab.depth_benefit import depth_benefit as function, cells
assert depth_benefit is package and package.DepthReport is DepthReport
assert inspect.signature(depth_benefit) == inspect.signature(function)
assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules
try:
    depth_benefit(None, margin=-1.0)
except Exception as error:
    assert 'margin' in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- in a browser ----------------------------------------------------------------------------------------------------------------
BROWSER = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
_PROBE = """<!doctype html><body><pre id="out"></pre><iframe id="f" style="border:0;height:3000px"></iframe><script>
const widths = [320, 390, 1280], told = [], f = document.getElementById("f");
function next() {
  if (!widths.length) { document.getElementById("out").textContent = "told:" + told.join(";"); return; }
  const w = widths.shift();
  f.style.width = w + "px";
  setTimeout(() => {
    const d = f.contentDocument, shown = [...d.querySelectorAll("svg.figure")].filter(s => s.getBoundingClientRect().width > 0);
    told.push([w, d.documentElement.scrollWidth, shown.length].join(","));
    next();
  }, 300);
}
f.onload = next;
f.src = "report.html";
</script></body>"""


def _browse(folder, *arguments):
    with_profile = f"--user-data-dir={folder / 'profile'}"
    return subprocess.run(
        [str(BROWSER), *_QUIET, with_profile, *arguments], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_in_a_browser(text, tmp_path):
    """No console message, no sideways scrolling of the page from 320 px on, one set of figures at a time; and it prints."""
    (tmp_path / "report.html").write_text(text)
    (tmp_path / "probe.html").write_text(_PROBE)
    made = _browse(
        tmp_path, "--allow-file-access-from-files", "--virtual-time-budget=10000", "--dump-dom",
        (tmp_path / "probe.html").as_uri(),
    )  # fmt: skip
    assert "CONSOLE" not in made.stderr
    told = re.search("told:([^<]*)", made.stdout)
    assert told is not None
    for row in told.group(1).split(";"):
        width, needed, figures = map(int, row.split(","))
        assert needed <= width
        assert figures == 5
    pdf = tmp_path / "report.pdf"
    printed = _browse(tmp_path, f"--print-to-pdf={pdf}", (tmp_path / "report.html").as_uri())
    assert "CONSOLE" not in printed.stderr
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) <= 20

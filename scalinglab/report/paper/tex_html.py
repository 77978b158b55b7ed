"""The tree of a paper's text as one page of HTML: numbered as LaTeX numbers it, images inside, no scripts and no requests."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from scalinglab.errors import ConfigError
from scalinglab.report.html.elements import Child, add, el, page
from scalinglab.report.paper.bibliography import Reference, as_html
from scalinglab.report.paper.mathml import mathml
from scalinglab.report.paper.tex import Amp, Break, Command, Environment, Group, Math, Node, Text
from scalinglab.report.paper.tex_walk import LABEL, SIGNS, Numbering, every, flat, items, plain

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the page asks for nothing from anywhere
_STYLES = {"emph": "em", "textbf": "strong", "textit": "i", "texttt": "code", "textsc": "span"}
_SILENT = {
    "documentclass", "usepackage", "maketitle", "centering", "small", "footnotesize", "noindent", "sloppy", "title", "author",
    "date", "bibliographystyle", "toprule", "midrule", "bottomrule", "label", "newcommand",
}  # fmt: skip


def html_page(nodes: list[Node], folder: Path, references: Mapping[str, Reference], sources: str) -> str:
    """The page as text.

    Parameters
    ----------
    nodes : of `read_tex`.
    folder : where images stand; figures/NAME.pdf is shown as figures/NAME.png.
    references : of `read_references`.
    sources : sha256 of all that the page rests on, kept in its head.

    Raises
    ------
    ConfigError
        A reference or citation to nothing, or an image that isn't there: file and line.
    """
    return _Page(folder, references).made(nodes, sources)


class _Page:
    """State of one page: numbers, which references are cited, footnotes."""

    def __init__(self, folder: Path, references: Mapping[str, Reference]) -> None:
        self.folder, self.references = folder, references
        self.numbered = Numbering(())
        self.cited: dict[str, int] = {}
        self.notes: list[list[Child]] = []

    def made(self, nodes: list[Node], sources: str) -> str:
        head = {n.name: n for n in every(nodes) if isinstance(n, Command) and n.name in ("title", "author", "date")}
        self.numbered = Numbering(nodes)
        body = next((n.children for n in nodes if isinstance(n, Environment) and n.name == "document"), tuple(nodes))
        title = self.inline(head["title"].args[0]) if "title" in head else ["Paper"]
        main = self.blocks(body)
        masthead = el(
            "header",
            el("h1", *title),
            *(el("p", *self.inline(head[k].args[0]), class_=k) for k in ("author", "date") if k in head),
        )
        root = el(
            "html",
            el(
                "head", el("meta", charset="utf-8"), el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
                el("meta", name="viewport", content="width=device-width, initial-scale=1"), el("meta", name="sources", content=sources),
                el("title", "".join(plain(head["title"].args[0])) if "title" in head else "Paper"), el("link", rel="icon", href="data:,"), _style(),
            ),
            el("body", masthead, el("main", *main, self.footnotes())),
            lang="en",
        )  # fmt: skip
        return page(root)

    # ---- blocks ----------------------------------------------------------------------------------------------------
    def blocks(self, nodes: Iterable[Node]) -> list[ET.Element]:
        out: list[ET.Element] = []
        line: list[Child] = []

        def flush() -> None:
            if any(not isinstance(c, str) or c.strip() for c in line):
                out.append(el("p", *_glued(line)))
            line.clear()

        for n in flat(nodes):
            if isinstance(n, Break):
                flush()
            elif isinstance(n, Environment) or (isinstance(n, Math) and n.display):
                flush()
                out += self.environment(n) if isinstance(n, Environment) else [self.display(n)]
            elif isinstance(n, Command) and n.name.rstrip("*") in ("section", "subsection"):
                flush()
                number = self.numbered.of(n)
                heading = [number, "\u2003"] if number else []
                out.append(
                    el(
                        "h2" if n.name.startswith("section") else "h3",
                        *heading,
                        *self.inline(n.args[0]),
                        id=f"s{number}" if number else None,
                    )
                )
            elif isinstance(n, Command) and n.name == "paragraph":
                flush()
                line.append(el("strong", *self.inline(n.args[0]), class_="run-in"))
                line.append(" ")
            elif isinstance(n, Command) and n.name == "bibliography":
                flush()
                out += self.bibliography()
            elif isinstance(n, Command) and n.name == "resizebox":
                flush()
                out += self.blocks(n.args[0])
            else:
                line += self.one(n)
        flush()
        return out

    def environment(self, n: Environment) -> list[ET.Element]:
        kind = n.name.rstrip("*")
        if kind in ("figure", "table"):
            return [self.float(n, kind)]
        if kind in ("itemize", "enumerate"):
            return [el("ul" if kind == "itemize" else "ol", *(el("li", *self.item(part)) for part in items(n)))]
        if kind == "tabular":
            return [self.tabular(n)]
        if kind == "abstract":
            return [el("section", el("h2", "Abstract"), *self.blocks(n.children), class_="abstract")]
        return self.blocks(n.children)

    def item(self, part: list[Node]) -> list[Child]:
        made = self.blocks(part)
        return [*made] if len(made) != 1 else [made[0].text, *made[0]]

    def float(self, n: Environment, kind: str) -> ET.Element:
        captions = [c for c in every(n.children) if isinstance(c, Command) and c.name == "caption"]
        rest = [c for c in n.children if not (isinstance(c, Command) and c.name == "caption")]
        parts: list[Child] = [*self.blocks(rest)]
        number = ""
        for c in captions:
            number = self.numbered.of(c)
            text = el("figcaption", el("strong", f"{kind.capitalize()} {number}. "), *self.inline(c.args[0]))
            parts = [text, *parts] if kind == "table" else [*parts, text]
            for image in (i for p in parts if isinstance(p, ET.Element) for i in p.iter("img")):
                image.set("alt", "".join(plain(c.args[0])).strip())
        return el("figure", *parts, class_=kind, id=f"{kind}{number}" if number else None)

    def tabular(self, n: Environment) -> ET.Element:
        aligned = [
            c
            for c in re.sub(r"[@!>]\{[^{}]*\}|p\{[^{}]*\}|\|", lambda m: "l" if m.group()[0] == "p" else "", n.words[0])
            if c in "lcr"
        ]
        rows: list[list[list[Node]]] = [[[]]]
        ruled = 0  # rows above the first \midrule are headings
        for c in flat(n.children):
            if isinstance(c, Amp):
                rows[-1].append([])
            elif isinstance(c, Command) and c.name == "\\":
                rows.append([[]])
            elif isinstance(c, Command) and c.name == "midrule" and not ruled:
                ruled = len(rows) - 1
            elif not (isinstance(c, Command) and c.name in ("toprule", "midrule", "bottomrule")):
                rows[-1][-1].append(c)
        made: list[ET.Element] = []
        for row in rows:
            cells = [_stripped(self.inline(cell)) for cell in row]
            if cells == [[]]:  # after the last row
                continue
            if len(cells) > len(aligned):
                raise ConfigError(f"{n.at}: a row has {len(cells)} cells, the tabular {len(aligned)} columns")
            made.append(
                el(
                    "tr",
                    *(
                        el("th" if len(made) < ruled else "td", *cell, class_={"r": "n", "c": "c"}.get(a))
                        for cell, a in zip(cells, aligned, strict=False)
                    ),
                )
            )
        return el(
            "div",
            el("table", el("thead", *made[:ruled]) if ruled else None, el("tbody", *made[ruled:])),
            class_="scroll",
            role="region",
            tabindex="0",
            aria_label="table",
        )

    def display(self, n: Math) -> ET.Element:
        number = self.numbered.of(n)
        return el(
            "div",
            mathml(LABEL.sub("", n.source), n.at, display=True),
            el("span", f"({number})") if number else None,
            class_="equation",
            id=f"equation{number}" if number else None,
        )

    def bibliography(self) -> list[ET.Element]:
        entries = [el("li", *as_html(self.references[key]), id=f"ref-{key}") for key in self.cited]
        return [el("h2", "References"), el("ol", *entries, class_="references")] if entries else []

    def footnotes(self) -> ET.Element | None:
        return el("ol", *(el("li", *note) for note in self.notes), class_="notes") if self.notes else None

    # ---- inline ----------------------------------------------------------------------------------------------------
    def inline(self, nodes: Iterable[Node]) -> list[Child]:
        return _glued([part for n in nodes for part in self.one(n)])

    def one(self, n: Node) -> list[Child]:
        if isinstance(n, Text):
            return [n.value]
        if isinstance(n, Math):
            return [mathml(LABEL.sub("", n.source), n.at, display=n.display)]
        if isinstance(n, Group):
            return self.inline(n.children)
        if isinstance(n, Break | Amp):
            return [" "]
        if isinstance(n, Environment):
            raise ConfigError(f"{n.at}: environment {n.name} can't stand inside a line")
        return self.command(n)

    def command(self, n: Command) -> list[Child]:
        name = n.name
        if name in SIGNS:
            return [SIGNS[name]]
        if name in _SILENT:
            return []
        if name in _STYLES:
            return [el(_STYLES[name], *self.inline(n.args[0]))]
        if name == "\\":
            return [el("br")]
        if name == "ensuremath":
            return [mathml(n.words[0], n.at)]
        if name == "cite":
            return self.cite(n)
        if name == "ref":
            if n.words[0] not in self.numbered.labels:
                raise ConfigError(f"{n.at}: \\ref{{{n.words[0]}}}: there is no such label")
            return [self.numbered.labels[n.words[0]]]
        if name == "url":
            return [el("a", n.words[0], href=n.words[0])]
        if name == "href":
            return [el("a", *self.inline(n.args[0]), href=n.words[0])]
        if name == "footnote":
            self.notes.append(self.inline(n.args[0]))
            return [el("sup", str(len(self.notes)))]
        if name == "includegraphics":
            return [self.image(n)]
        raise ConfigError(f"{n.at}: \\{name} can't stand here")

    def cite(self, n: Command) -> list[Child]:
        out: list[Child] = ["["]
        for k, key in enumerate(key.strip() for key in n.words[0].split(",")):
            if key not in self.references:
                raise ConfigError(f"{n.at}: \\cite{{{key}}}: references.bib has no such entry")
            number = self.cited.setdefault(key, len(self.cited) + 1)
            out += [", "] * (k > 0) + [el("a", str(number), href=f"#ref-{key}")]
        return [*out, *([f", {n.option}"] if n.option else []), "]"]

    def image(self, n: Command) -> ET.Element:
        path = self.folder / n.words[0]
        path = path.with_suffix(".png") if path.suffix in (".pdf", "") else path
        if not path.is_file():
            raise ConfigError(f"{n.at}: \\includegraphics: {path} does not exist; is it an artefact that is there?")
        data = path.read_bytes()
        if not data.startswith(b"\x89PNG"):
            raise ConfigError(f"{n.at}: \\includegraphics: {path} is not a PNG image, which the page of HTML needs")
        inches = int.from_bytes(data[16:20], "big") / 300  # as `save_figure` draws
        return el(
            "img",
            src="data:image/png;base64," + base64.b64encode(data).decode(),
            alt="",
            class_="wide" if inches > 5 else None,
            style=f"max-width:min(100%,{inches * 1.35:.2f}in)",
        )


def _stripped(parts: list[Child]) -> list[Child]:
    """A cell without the blanks around it."""
    out = list(parts)
    while out and isinstance(out[0], str) and not out[0].strip():
        out.pop(0)
    while out and isinstance(out[-1], str) and not out[-1].strip():
        out.pop()
    if out and isinstance(first := out[0], str):
        out[0] = first.lstrip()
    if out and isinstance(last := out[-1], str):
        out[-1] = last.rstrip()
    return out


def _glued(parts: list[Child]) -> list[Child]:
    """Formulas with the brackets and stops that touch them: no line breaks in between."""
    out: list[Child] = []
    for part in parts:
        after = out[-1] if out and isinstance(out[-1], ET.Element) and out[-1].get("class") == "formula" else None
        if isinstance(part, str) and after is not None and (stop := re.match(r"[)\],.;:!?\u2009%]+", part)):
            assert isinstance(after, ET.Element)
            add(after, stop.group())
            part = part[stop.end() :]
        if isinstance(part, ET.Element) and part.tag == "math" and part.get("display") != "block":
            before = ""
            if out and isinstance(text := out[-1], str) and (opened := re.search(r"[(\[]+$", text)):
                before, out[-1] = opened.group(), text[: opened.start()]
            part = el("span", before, part, class_="formula")
        if not isinstance(part, str) or part:
            out.append(part)
    return out


def _style() -> ET.Element:
    return add(ET.Element("style"), files("scalinglab.report.paper").joinpath("page.css").read_text("utf-8"))

"""Walks through the tree of a text: its nodes in order, list items, plain text; and the numbers that LaTeX would give."""

from __future__ import annotations

import re
from collections.abc import Iterable

from scalinglab.errors import ConfigError
from scalinglab.report.paper.tex import Break, Command, Environment, Group, Math, Node, Text

LABEL = re.compile(r"\\label\s*\{([^{}]*)\}")
SIGNS = {
    ",": "\u2009", ";": "\u2004", " ": " ", "%": "%", "&": "&", "_": "_", "#": "#", "$": "$", "{": "{", "}": "}", "-": "\u00ad",
    "ldots": "…", "quad": "\u2003", "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "LaTeX": "LaTeX",
}  # fmt: skip


class Numbering:
    """Numbers of sections, figures, tables and equations in the order of the text, and what labels mean.

    Raises
    ------
    ConfigError
        A label that is given twice: file and line.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.labels: dict[str, str] = {}
        self._numbers: dict[int, str] = {}  # id of a node -> its number
        self._appendix = False
        counts = {"section": 0, "subsection": 0, "figure": 0, "table": 0, "equation": 0}
        self._walk(nodes, counts, "", [""])

    def _walk(self, nodes: Iterable[Node], counts: dict[str, int], inside: str, latest: list[str]) -> None:
        for n in nodes:
            if isinstance(n, Command):
                if n.name == "appendix":
                    self._appendix, counts["section"] = True, 0
                if n.name in ("section", "subsection"):
                    counts[n.name] += 1
                    if n.name == "section":
                        counts["subsection"] = 0
                    first = chr(64 + counts["section"]) if self._appendix else str(counts["section"])
                    latest[0] = first if n.name == "section" else f"{first}.{counts['subsection']}"
                    self._numbers[id(n)] = latest[0]
                elif n.name == "caption" and inside:
                    counts[inside] += 1
                    latest[0] = self._numbers[id(n)] = str(counts[inside])
                elif n.name == "label":
                    self._name(n.words[0], latest[0], n.at)
                for arg in n.args:
                    self._walk(arg, counts, inside, latest)
            elif isinstance(n, Math) and (found := LABEL.search(n.source)):
                counts["equation"] += 1
                self._numbers[id(n)] = str(counts["equation"])
                self._name(found[1], str(counts["equation"]), n.at)
            elif isinstance(n, Environment):
                self._walk(
                    n.children,
                    counts,
                    n.name.rstrip("*") if n.name.rstrip("*") in ("figure", "table") else inside,
                    latest,
                )
            elif isinstance(n, Group):
                self._walk(n.children, counts, inside, latest)

    def _name(self, label: str, number: str, at: str) -> None:
        if label in self.labels:
            raise ConfigError(f"{at}: \\label{{{label}}} is given twice")
        self.labels[label] = number

    def of(self, node: Node) -> str:
        """Number of a section, caption or formula; "" where it has none."""
        return self._numbers.get(id(node), "")


def flat(nodes: Iterable[Node]) -> Iterable[Node]:
    """Nodes with groups opened: a brace around paragraphs is no paragraph."""
    for n in nodes:
        if isinstance(n, Group):
            yield from flat(n.children)
        else:
            yield n


def every(nodes: Iterable[Node]) -> Iterable[Node]:
    """All nodes, each before what is in it."""
    for n in nodes:
        yield n
        if isinstance(n, Environment | Group):
            yield from every(n.children)
        elif isinstance(n, Command):
            for arg in n.args:
                yield from every(arg)


def items(n: Environment) -> list[list[Node]]:
    """The nodes of each \\item of a list."""
    parts: list[list[Node]] = []
    for c in flat(n.children):
        if isinstance(c, Command) and c.name == "item":
            parts.append([])
        elif parts:
            parts[-1].append(c)
    return parts


def plain(nodes: Iterable[Node]) -> Iterable[str]:
    """Text alone, for what can hold no markup."""
    for n in nodes:
        if isinstance(n, Text):
            yield n.value
        elif isinstance(n, Math):
            yield n.source.replace("\\", "")
        elif isinstance(n, Group):
            yield from plain(n.children)
        elif isinstance(n, Command):
            yield SIGNS.get(n.name, "") if n.name != "ensuremath" else n.words[0]
            for arg in n.args:
                yield from plain(arg)
        elif isinstance(n, Break):
            yield " "

r"""The subset of LaTeX that a paper's text may use, read into a tree; anything else is refused with file and line.

Sections, paragraphs, lists, figures, tables, citations, references, \input, simple math, the numbers \sl..., and
\slif{ARTEFACT}{text}{otherwise}. `COMMANDS` and `ENVIRONMENTS` are the whole of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from scalinglab.errors import ConfigError

# how many arguments: o an optional one, s one that is kept as it is written, t one that is text
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("title", "author", "date", "section", "section*", "subsection", "subsection*", "paragraph"), "t"),
    **dict.fromkeys(("emph", "textbf", "textit", "texttt", "textsc", "caption"), "t"),
    **dict.fromkeys(("ref", "label", "input", "url", "bibliographystyle", "bibliography", "ensuremath"), "s"),
    **dict.fromkeys(("documentclass", "usepackage", "includegraphics", "cite"), "os"),
    **dict.fromkeys(("maketitle", "centering", "small", "footnotesize", "toprule", "midrule", "bottomrule", "noindent"), ""),
    **dict.fromkeys(("\\", ",", ";", " ", "%", "&", "_", "#", "$", "{", "}", "-", "ldots", "quad", "sloppy", "appendix"), ""),
    **dict.fromkeys(("textbackslash", "textasciitilde", "textasciicircum", "LaTeX"), ""),
    "item": "o", "href": "st", "footnote": "t", "resizebox": "sst", "newcommand": "ss", "slif": "s",
}  # fmt: skip
ENVIRONMENTS: Mapping[str, str] = {
    **dict.fromkeys(("document", "abstract", "itemize", "enumerate", "center", "equation"), ""),
    **dict.fromkeys(("figure", "figure*", "table", "table*"), "o"), "tabular": "s",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z]+\*?|.", re.DOTALL)
_SPECIAL = re.compile(r"[\\${}%&]|\n[ \t]*\n\s*|~|---?|``|''|`|'")
_TYPED = {"~": "\u00a0", "--": "–", "---": "—", "``": "“", "''": "”", "`": "‘", "'": "’"}
_DEEP = 40


@dataclass(frozen=True)
class Text:
    """Characters as they are shown."""

    value: str


@dataclass(frozen=True)
class Break:
    """Between paragraphs."""


@dataclass(frozen=True)
class Amp:
    """Between cells."""


@dataclass(frozen=True)
class Math:
    """A formula, inline or displayed, as it is written; `at` is file:line."""

    source: str
    display: bool
    at: str  # file:line


@dataclass(frozen=True)
class Group:
    """What stands between braces."""

    children: tuple[Node, ...]


@dataclass(frozen=True)
class Command:
    """A command with its option and arguments; `at` is file:line."""

    name: str
    option: str
    words: tuple[str, ...]  # arguments that are kept as they are written
    args: tuple[tuple[Node, ...], ...]
    at: str


@dataclass(frozen=True)
class Environment:
    """What stands between \\begin and \\end; `at` is file:line."""

    name: str
    words: tuple[str, ...]
    children: tuple[Node, ...]
    at: str


Node = Text | Break | Amp | Math | Group | Command | Environment


def read_tex(path: Path, macros: Mapping[str, str], present: Collection[str], numbers: Path) -> list[Node]:
    r"""The tree of a .tex file and of all that it inputs.

    Parameters
    ----------
    path : main.tex.
    macros : \name -> its text; those of a \newcommand without arguments are added.
    present : artefacts that are there, for \slif.
    numbers : the file whose \input is left out, for `macros` holds what it says.

    Raises
    ------
    ConfigError
        A command or environment outside the subset, a brace that doesn't close, a number that isn't there: file and line.
    """
    return _Reader(path, dict(macros), frozenset(present), numbers.resolve(), path.parent).read(path)


@dataclass
class _Reader:
    path: Path
    macros: dict[str, str]
    present: frozenset[str]
    numbers: Path
    folder: Path
    depth: int = 0

    def read(self, path: Path) -> list[Node]:
        try:
            return self.parse(_Source(path.read_text(encoding="utf-8"), str(path)))
        except OSError as error:
            raise ConfigError(f"{path}: can't be read ({error.strerror})") from None

    def parse(self, source: _Source, until: str = "") -> list[Node]:
        r"""Nodes up to the end, to a closing brace (until "}") or to \end{until}, which is passed over."""
        out: list[Node] = []
        begun = source.at()
        while source.place < len(source.text):
            found = _SPECIAL.search(source.text, source.place)
            stop = found.start() if found else len(source.text)
            if stop > source.place:
                out.append(Text(source.text[source.place : stop]))
                source.place = stop
            if found is None:
                break
            piece = found.group()
            source.place = found.end()
            if piece == "}":
                if until == "}":
                    return out
                raise ConfigError(f"{source.at()}: a closing brace that nothing opened")
            if piece == "{":
                out.append(Group(tuple(self.parse(source, "}"))))
            elif piece == "%":
                source.comment()
            elif piece == "&":
                out.append(Amp())
            elif piece == "$":
                at = source.at()
                out.append(Math(self.expanded(source.up_to("$"), at), False, at))
            elif piece == "\\":
                if self.command(source, out, until):
                    return out
            else:
                out.append(Break() if piece.startswith("\n") else Text(_TYPED.get(piece, piece)))
        if until:
            raise ConfigError(f"{begun}: {'a brace' if until == '}' else f'environment {until}'} is not closed")
        return out

    def command(self, source: _Source, out: list[Node], until: str) -> bool:
        r"""Read one command after its backslash; True at the \end that is waited for."""
        at = source.at()
        match = _NAME.match(source.text, source.place)
        if match is None:
            raise ConfigError(f"{at}: a backslash at the end of the file")
        name = match.group()
        source.place = match.end()
        if name.endswith("*") and name not in COMMANDS:
            name, source.place = name[:-1], source.place - 1
        if name[0].isalpha():
            source.spaces()
        if name in ("[", "("):
            closing = {"[": "\\]", "(": "\\)"}[name]
            out.append(Math(self.expanded(source.up_to(closing), at), name == "[", at))
        elif name == "begin":
            out.append(self.environment(source, at))
        elif name == "end":
            ended = source.group(at)
            if ended != until:
                raise ConfigError(
                    f"{at}: \\end{{{ended}}} where {f'environment {until}' if until and until != '}' else 'nothing'} is open"
                )
            return True
        elif "\\" + name in self.macros:
            out += self.inner(self.macros["\\" + name], at)
        elif name == "slif":
            wanted = source.group(at)
            for branch in (True, False):
                source.open(at)
                mark = source.place
                if branch == (wanted in self.present):
                    out.append(Group(tuple(self.parse(source, "}"))))
                else:
                    source.place = mark
                    source.close(at)
        elif name == "input":
            self.include(source.group(at), at, out)
        elif name == "newcommand":
            self.define(source, at)
        elif name in COMMANDS:
            out.append(self.arguments(name, source, at))
        else:
            raise ConfigError(f"{at}: {self.unknown(name)}")
        return False

    def arguments(self, name: str, source: _Source, at: str) -> Command:
        option, words, args = "", [], []
        for kind in COMMANDS[name]:
            if kind == "o":
                option = source.option()
            elif kind == "s":
                words.append(source.group(at))
            else:
                source.open(at)
                args.append(tuple(self.parse(source, "}")))
        if name in ("ensuremath",):
            words = [self.expanded(words[0], at)]
        return Command(name, option, tuple(words), tuple(args), at)

    def environment(self, source: _Source, at: str) -> Environment | Math:
        name = source.group(at)
        if name not in ENVIRONMENTS:
            close = difflib.get_close_matches(name, ENVIRONMENTS, 1)
            hint = f"; did you mean {close[0]}" if close else ""
            raise ConfigError(
                f"{at}: environment {name} is outside what the page of HTML can show{hint}; there are {', '.join(ENVIRONMENTS)}"
            )
        if name == "equation":
            return Math(self.expanded(source.up_to("\\end{equation}"), at), True, at)
        words = [source.option() if kind == "o" else source.group(at) for kind in ENVIRONMENTS[name]]
        return Environment(name, tuple(words), tuple(self.parse(source, name)), at)

    def include(self, name: str, at: str, out: list[Node]) -> None:
        path = self.folder / (name if name.endswith(".tex") else f"{name}.tex")
        if path.resolve() == self.numbers:
            return
        if not path.is_file():
            raise ConfigError(f"{at}: \\input{{{name}}}: {path} does not exist")
        if self.depth >= _DEEP:
            raise ConfigError(f"{at}: \\input goes round in a circle")
        self.depth += 1
        out += self.read(path)
        self.depth -= 1

    def define(self, source: _Source, at: str) -> None:
        name, option = source.group(at), source.option()
        if option:
            raise ConfigError(
                f"{at}: \\newcommand{{{name}}} takes arguments; the page of HTML knows those without only"
            )
        self.macros[name.strip()] = source.group(at)

    def inner(self, text: str, at: str) -> list[Node]:
        if self.depth >= _DEEP:
            raise ConfigError(f"{at}: a command that expands to itself")
        self.depth += 1
        out = self.parse(_Source(text, at, whole=True))
        self.depth -= 1
        return out

    def expanded(self, math: str, at: str) -> str:
        """Math with the numbers in it written out."""

        def value(match: re.Match[str]) -> str:
            name = match.group()
            if name in self.macros:
                return re.sub(r"\\ensuremath\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"{\1}", self.macros[name])
            if name.startswith("\\sl") and name != "\\slash":
                raise ConfigError(f"{at}: {self.unknown(name[1:])}")
            return name

        return re.sub(r"\\[A-Za-z]+", value, math)

    def unknown(self, name: str) -> str:
        if name.startswith("sl"):
            close = difflib.get_close_matches("\\" + name, self.macros, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            return f"\\{name} is not a number of any artefact that is there{hint}; inside \\slif{{ARTEFACT}}{{...}}{{...}} it may be missing"
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" (did you mean \\{close[0]}?)" if close else ""
        return f"\\{name} is outside the LaTeX that the page of HTML can show{hint}; write it with the commands in scalinglab.report.paper.tex.COMMANDS"


@dataclass
class _Source:
    """Text that is being read, and where."""

    text: str
    file: str
    place: int = 0
    whole: bool = False  # the text of a command: it stands where the command does

    def at(self) -> str:
        return self.file if self.whole else f"{self.file}:{self.text.count(chr(10), 0, self.place) + 1}"

    def spaces(self) -> None:
        """Pass over what follows a command's name: blanks and one line break, not an empty line."""
        match = re.compile(r"[ \t]*(?:\n(?![ \t]*\n)[ \t]*)?").match(self.text, self.place)
        self.place = match.end() if match else self.place

    def comment(self) -> None:
        """Pass over the rest of the line and the blanks of the next."""
        end = self.text.find("\n", self.place)
        self.place = len(self.text) if end < 0 else end + 1
        while self.place < len(self.text) and self.text[self.place] in " \t":
            self.place += 1

    def up_to(self, closing: str) -> str:
        begun, end = self.at(), self.text.find(closing, self.place)
        if end < 0 or "\n\n" in self.text[self.place : end]:
            raise ConfigError(f"{begun}: math that is not closed by {closing}")
        inside = self.text[self.place : end]
        self.place = end + len(closing)
        return inside

    def open(self, at: str) -> None:
        self.spaces()
        if self.text[self.place : self.place + 1] != "{":
            raise ConfigError(f"{at}: a command here needs an argument in braces")
        self.place += 1

    def close(self, at: str) -> str:
        """Up to the brace that closes the one just opened."""
        depth, begun = 1, self.place
        for match in re.compile(r"\\.|(?<!\\)%[^\n]*|[{}]", re.DOTALL).finditer(self.text, self.place):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth == 0:
                self.place = match.end()
                return self.text[begun : match.start()]
        raise ConfigError(f"{at}: a brace is not closed")

    def group(self, at: str) -> str:
        self.open(at)
        return self.close(at)

    def option(self) -> str:
        self.spaces()
        if self.text[self.place : self.place + 1] != "[":
            return ""
        end = self.text.find("]", self.place)
        if end < 0:
            raise ConfigError(f"{self.at()}: [ is not closed")
        inside = self.text[self.place + 1 : end]
        self.place = end + 1
        return inside

"""paper.toml: what a paper is made of. Read strictly: an unknown key, recipe or input is refused with one sentence.

[paper]
text = "main.tex"            # optional, as is references = "references.bib"
root = ".."                  # inputs are relative to it, and it to this file
recipes = ["recipes.py"]     # own recipes: Python files beside this one, run when the file is read

[artefact.valley]
kind = "figure"
recipe = "fit_figure"
inputs = ["fits/shape.toml"] # tables, run logs, fits/*.toml, embedded:NAME, artefact:NAME
optional = true              # may lack its inputs: then it is reported as missing
options = { figure = "shape_valley" }
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import msgspec

from scalinglab import tomlfile
from scalinglab.errors import ConfigError
from scalinglab.questions import read_question
from scalinglab.report.paper import registry
from scalinglab.report.paper.registry import EMBEDDED, Inputs, Kind, Options, Recipe
from scalinglab.tables import table_names, table_path

ARTEFACT = "artefact:"
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
FOLDERS: dict[Kind, str] = {"figure": "figures", "table": "tables", "numbers": "numbers"}


class _Head(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    text: str | None = None
    references: str | None = None
    root: str = "."
    recipes: list[str] = msgspec.field(default_factory=list)


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    kind: Kind
    recipe: str
    inputs: list[str]
    optional: bool = False
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    paper: _Head = msgspec.field(default_factory=_Head)
    artefact: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """One file or folder that an artefact rests on, and how the reader knows it."""

    label: str
    path: Path


@dataclass(frozen=True)
class Artefact:
    """One declared artefact. needs: names of artefacts that it is made from. sources: the files behind all of its inputs."""

    name: str
    kind: Kind
    recipe: Recipe
    options: Options
    inputs: tuple[str, ...]  # as written
    names: tuple[str, ...]  # as `read_runs` takes them
    needs: tuple[str, ...]
    sources: tuple[Source, ...]
    optional: bool
    entry: Mapping[str, Any] = field(repr=False)  # as written, for its hash

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that it writes, relative to the paper's folder."""
        endings = {"figure": ("pdf", "png"), "table": ("tex", "csv"), "numbers": ("csv",)}[self.kind]
        return tuple(f"{FOLDERS[self.kind]}/{self.name}.{ending}" for ending in endings)

    @property
    def missing(self) -> tuple[str, ...]:
        """Labels of the inputs that aren't there (yet); those that other artefacts make don't count."""
        return tuple(s.label for s in self.sources if not s.label.startswith(ARTEFACT) and not s.path.exists())

    def given(self, digests: Mapping[str, str]) -> Inputs:
        """What its recipe gets."""
        return Inputs(self.names, tuple(digests.items()))


@dataclass(frozen=True)
class Paper:
    """A paper.toml, read and checked. artefacts come in an order in which each stands after what it needs."""

    file: Path
    text: Path | None
    references: Path | None
    recipes: tuple[Path, ...]
    artefacts: tuple[Artefact, ...]

    @property
    def folder(self) -> Path:
        return self.file.parent

    def lacking(self) -> dict[str, tuple[str, ...]]:
        """Optional artefacts whose inputs are not there (or rest on one whose are not), with those inputs."""
        out: dict[str, tuple[str, ...]] = {}
        for a in self.artefacts:
            absent = (*a.missing, *(f"{ARTEFACT}{n}" for n in a.needs if n in out))
            if absent:
                out[a.name] = absent
        return out


def read_paper(file: str | Path) -> Paper:
    """Read paper.toml and check all of it: names, recipes, options, inputs, cycles.

    Raises
    ------
    ConfigError
        Something isn't usable as written: the file, the key, and what to do.
    """
    file = Path(file)
    if file.is_dir():
        file = file / "paper.toml"
    raw = tomlfile.read(file, _File)
    head, at = raw.paper, f"{file}: "
    recipes = tuple(file.parent / name for name in head.recipes)
    registry.load_recipes(recipes)
    entries = {
        name: tomlfile.convert(entry, _Entry, where=at, within=f"artefact.{name}")
        for name, entry in raw.artefact.items()
    }
    root = file.parent / head.root
    made = {name: _artefact(name, entry, entries, file, root) for name, entry in entries.items()}
    ordered = _ordered(made, at)
    paper = Paper(file, _beside(file, head.text), _beside(file, head.references), recipes, ordered)
    for a in ordered:
        if a.missing and not a.optional:
            raise ConfigError(
                f"{at}artefact.{a.name}: input {a.missing[0]} does not exist; correct it, or say optional = true if it is yet to come"
            )
        lacking = paper.lacking()
        if a.name in lacking and not a.optional:
            raise ConfigError(
                f"{at}artefact.{a.name} rests on {lacking[a.name][0]}, which is optional and missing; say optional = true here too"
            )
    return paper


def _beside(file: Path, name: str | None) -> Path | None:
    if name is None:
        return None
    path = file.parent / name
    if not path.is_file():
        raise ConfigError(f"{file}: paper: {name} does not exist beside it")
    return path


def _artefact(name: str, entry: _Entry, entries: Mapping[str, _Entry], file: Path, root: Path) -> Artefact:
    at = f"{file}: artefact.{name}"
    if not _NAME.match(name):
        raise ConfigError(f"{at}: a name is lower-case letters, digits and _, and starts with a letter")
    try:
        recipe = registry.find(entry.recipe)
    except ConfigError as error:
        raise ConfigError(f"{at}.recipe: {error}") from None
    if recipe.kind != entry.kind:
        raise ConfigError(f"{at}.kind is {entry.kind!r}, but recipe {recipe.name!r} makes a {recipe.kind}")
    if not entry.inputs or (recipe.most is not None and len(entry.inputs) > recipe.most):
        most = "one or more" if recipe.most is None else f"1 to {recipe.most}" if recipe.most > 1 else "one"
        raise ConfigError(f"{at}.inputs: recipe {recipe.name!r} takes {most}, not {len(entry.inputs)}")
    options = tomlfile.convert(entry.options, recipe.options, where=f"{file}: ", within=f"artefact.{name}.options")
    names, needs, sources = [], [], []
    for text in entry.inputs:
        if text.startswith(ARTEFACT):
            needed = text.removeprefix(ARTEFACT)
            if needed not in entries:
                raise ConfigError(f"{at}.inputs: there is no artefact {needed!r}; there are {', '.join(entries)}")
            if entries[needed].kind == "figure":
                raise ConfigError(f"{at}.inputs: {text} is a figure; only tables and numbers can be read on")
            needs.append(needed)
            path = file.parent / FOLDERS[entries[needed].kind] / f"{needed}.csv"
            names.append(str(path))
            sources.append(Source(text, path))
        else:
            names.append(registry.in_tree(text, file) if text.startswith(EMBEDDED) else str(root / text))
            sources += _sources(text, root, file, at)
    return Artefact(
        name, entry.kind, recipe, options, tuple(entry.inputs), tuple(names), tuple(needs),
        tuple({s.label: s for s in sources}.values()), entry.optional, msgspec.to_builtins(entry),
    )  # fmt: skip


def _sources(text: str, root: Path, file: Path, at: str) -> list[Source]:
    """The files behind one input of `file`: itself, its meta file, and for a question the runs that it asks."""
    if text.startswith(EMBEDDED):
        found = registry.in_tree(text, file)
        if found != text:
            return _with_meta(text, Path(found))
        name = text.removeprefix(EMBEDDED)
        if name not in table_names():  # may be yet to come, as a file may
            return [Source(text, root / f".no-embedded-table-{name}")]
        return _with_meta(text, table_path(name))
    path = root / text
    if path.suffix != ".toml" or not path.is_file():
        return _with_meta(text, path)
    try:
        asked = read_question(path)
    except ConfigError as error:
        raise ConfigError(f"{at}.inputs: {error}") from None
    out = [Source(text, path)]
    for run in [asked.runs] if isinstance(asked.runs, str) else asked.runs:
        out += _sources(run, root if run.startswith(EMBEDDED) else Path(), path, at)
    return [Source(s.label if s.label == text else f"{text} -> {s.label}", s.path) for s in out]


def _with_meta(label: str, path: Path) -> list[Source]:
    beside = registry.meta_file(path)
    return [Source(label, path), *([Source(f"{label} (meta)", beside)] if beside.is_file() else [])]


def _ordered(made: Mapping[str, Artefact], at: str) -> tuple[Artefact, ...]:
    graph = TopologicalSorter({a.name: a.needs for a in made.values()})
    try:
        return tuple(made[name] for name in graph.static_order())
    except CycleError as error:
        raise ConfigError(
            f"{at}artefacts need each other in a circle: {' -> '.join(reversed(error.args[1]))}"
        ) from None

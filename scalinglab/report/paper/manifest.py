"""manifest.json: what every artefact was made from, and from it what is stale and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scalinglab.errors import ConfigError
from scalinglab.report.paper import hashing, products
from scalinglab.report.paper.plan import ARTEFACT, Artefact, Paper, read_paper
from scalinglab.report.paper.registry import own_module
from scalinglab.tables import write_atomically

SCHEMA = "scalinglab/paper-1"
NAME = "manifest.json"
_RENDERING = "scalinglab.report.paper.products"  # what turns results into files counts as their code


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one artefact was made from: sha256 of its entry, code and inputs, and of the files that came out."""

    entry: str
    code: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    made_with: dict[str, str] = {}


class Manifest(msgspec.Struct, kw_only=True):
    """manifest.json. Unknown schemas are refused."""

    schema: str = SCHEMA
    artefacts: dict[str, Record] = msgspec.field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read it; a folder without one has built nothing yet."""
        path = folder / NAME
        if not path.is_file():
            return cls()
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: damaged ({error}); delete it and rebuild") from None
        if found.schema != SCHEMA:
            raise ConfigError(
                f"{path}: schema is {found.schema!r}, this version writes {SCHEMA!r}; delete it and rebuild"
            )
        return found

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all; the same records are the same bytes."""
        ordered = Manifest(artefacts=dict(sorted(self.artefacts.items())))
        write_atomically(folder / NAME, msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


@dataclass(frozen=True)
class State:
    """What an artefact would be made from now."""

    entry: str
    code: str
    inputs: Mapping[str, str]


def state_of(artefact: Artefact, paper: Paper) -> State:
    """Hashes of an artefact's entry, code and inputs as they are now."""
    own = {own_module(file): file for file in paper.recipes}
    code = hashing.code_digest((*artefact.recipe.modules, _RENDERING), own)
    inputs = {s.label: hashing.file_digest(s.path) for s in artefact.sources}
    return State(hashing.value_digest(artefact.entry), code, inputs)


def reasons(artefact: Artefact, now: State, was: Record | None, folder: Path) -> list[str]:
    """Why an artefact is stale; empty where it is up to date."""
    if was is None:
        return ["never built"]
    out = [
        f"input {label} {'changed' if label in was.inputs else 'is new'}"
        for label, digest in now.inputs.items()
        if was.inputs.get(label) != digest
    ]
    out += [f"input {label} is no longer one" for label in was.inputs if label not in now.inputs]
    if was.entry != now.entry:
        out.append("its entry in paper.toml changed")
    if was.code != now.code:
        out.append("the code behind it changed")
    for name in artefact.outputs:
        found = hashing.file_digest(folder / name)
        if not found:
            out.append(f"{name} is not there")
        elif found != was.outputs.get(name):
            out.append(f"{name} was changed by hand")
    return out


@dataclass(frozen=True)
class Checked:
    """stale: artefact or file -> why. missing: optional artefacts without their inputs. fresh: names of the others."""

    stale: Mapping[str, list[str]]
    missing: Mapping[str, tuple[str, ...]]
    fresh: tuple[str, ...]

    def text(self) -> str:
        """One line per stale or missing artefact."""
        lines = [f"stale    {name}: {'; '.join(why)}" for name, why in self.stale.items()]
        lines += [f"missing  {name}: no {', no '.join(absent)} (optional)" for name, absent in self.missing.items()]
        count = len(self.fresh)
        return "\n".join([*lines, f"{len(self.stale)} stale, {len(self.missing)} missing, {count} up to date"])


def check(file: str | Path) -> Checked:
    """What is stale in a paper, and because of which input. Nothing is written.

    An artefact made from a stale one is stale for that reason; rebuilding the first may show that it is not.
    """
    paper = read_paper(file)
    manifest = Manifest.load(paper.folder)
    stale, missing = stale_artefacts(paper, manifest), paper.lacking()
    for name in manifest.artefacts:
        if name not in {a.name for a in paper.artefacts}:
            stale[name] = ["paper.toml has no such artefact any more, but its files are there"]
    for name in sorted(set(missing) & set(manifest.artefacts)):
        stale[name] = [f"input {missing[name][0]} does not exist any more, but its files are there"]
    if not stale and manifest.artefacts:
        numbers = paper.folder / "numbers.tex"
        if not numbers.is_file() or numbers.read_bytes() != assembled(paper, manifest):
            stale["numbers.tex"] = ["it is not what its artefacts say"]
    from scalinglab.report.paper.documents import stale_documents

    stale.update(stale_documents(paper))
    fresh = tuple(a.name for a in paper.artefacts if a.name not in stale and a.name not in missing)
    return Checked(stale, missing, fresh)


def stale_artefacts(paper: Paper, manifest: Manifest) -> dict[str, list[str]]:
    """Artefacts to rebuild, with the reasons, in the paper's order; those that lack inputs are left out."""
    lacking = paper.lacking()
    out: dict[str, list[str]] = {}
    for a in paper.artefacts:
        if a.name in lacking:
            continue
        why = reasons(a, state_of(a, paper), manifest.artefacts.get(a.name), paper.folder)
        upstream = [f"input {ARTEFACT}{n} is stale" for n in a.needs if n in out]
        why = [w for w in why if not any(w == f"input {ARTEFACT}{n} changed" for n in a.needs if n in out)]
        if upstream or why:
            out[a.name] = [*upstream, *why]
    return out


def assembled(paper: Paper, manifest: Manifest) -> bytes:
    """numbers.tex as the artefacts that are there make it."""
    return products.numbers_tex(macros(paper, manifest), present(paper, manifest))


def present(paper: Paper, manifest: Manifest) -> list[str]:
    """Artefacts that were made and whose inputs are there."""
    lacking = paper.lacking()
    return [a.name for a in paper.artefacts if a.name in manifest.artefacts and a.name not in lacking]


def macros(paper: Paper, manifest: Manifest) -> dict[str, str]:
    """Macro -> text of all numbers that are there."""
    kinds = {a.name: a.kind for a in paper.artefacts}
    files = {n: paper.folder / "numbers" / f"{n}.csv" for n in present(paper, manifest) if kinds[n] == "numbers"}
    return products.read_macros({n: path for n, path in files.items() if path.is_file()})

"""main.tex as main.html, always, and as main.pdf where tectonic or latexmk is installed.

Both are made from the same artefacts. What they were made from stands in .documents.json beside them, which git should ignore as
it ignores them: a checkout without documents has none that is stale.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from scalinglab.errors import ConfigError
from scalinglab.report.paper import hashing
from scalinglab.report.paper.bibliography import read_references
from scalinglab.report.paper.manifest import Manifest, macros, present
from scalinglab.report.paper.plan import Paper
from scalinglab.report.paper.tex import read_tex
from scalinglab.report.paper.tex_html import html_page
from scalinglab.tables import write_atomically

RECORD = ".documents.json"
_WORK = ".latex"
_EPOCH = "946684800"  # the year 2000: what LaTeX takes for now, so that the same text is the same file
_HOW = "scalinglab.report.paper.documents"
Tell = Callable[[str], None]


def write_documents(paper: Paper, manifest: Manifest, *, force: bool, tell: Tell) -> tuple[Path, ...]:
    """Write those documents that are not there or not of these sources; returns what was written.

    Raises
    ------
    ConfigError
        The text is outside the subset of LaTeX that the page can show (file and line), or LaTeX refuses it (its last lines).
    """
    assert paper.text is not None
    now = _sources(paper)
    was = _record(paper.folder)
    written = []
    page, pdf = paper.text.with_suffix(".html"), paper.text.with_suffix(".pdf")
    engine = _engine()
    for path in (page, *([pdf] if engine else [])):
        if path.is_file() and was.get(path.name) == now + hashing.file_digest(path) and not force:
            continue
        if path == page:
            data = page_of(paper, manifest, now).encode()
        else:
            tell(f"setting {pdf.name} with {engine}")
            data = _pdf(paper.text, str(engine))
        write_atomically(path, data)
        was[path.name] = now + hashing.file_digest(path)
        write_atomically(paper.folder / RECORD, msgspec.json.encode(was, order="sorted") + b"\n")
        written.append(path)
    if not engine:
        tell(f"no {pdf.name}: neither tectonic nor latexmk is installed; {page.name} holds the same")
    return tuple(written)


def page_of(paper: Paper, manifest: Manifest, sources: str) -> str:
    """The text as one page of HTML."""
    assert paper.text is not None
    nodes = read_tex(paper.text, macros(paper, manifest), present(paper, manifest), paper.folder / "numbers.tex")
    references = read_references(paper.references) if paper.references else {}
    return html_page(nodes, paper.folder, references, sources)


def stale_documents(paper: Paper) -> dict[str, list[str]]:
    """Documents that are there and were made from other sources."""
    if paper.text is None:
        return {}
    now, was = _sources(paper), _record(paper.folder)
    out = {}
    for path in (paper.text.with_suffix(".html"), paper.text.with_suffix(".pdf")):
        if path.is_file() and was.get(path.name) != now + hashing.file_digest(path):
            changed = was.get(path.name, "")[:64] != now
            out[path.name] = ["its text, references or artefacts changed" if changed else "it was changed by hand"]
    return out


def _sources(paper: Paper) -> str:
    """sha256 of all that the documents rest on: text, references, numbers, figures, tables, and the code that sets them."""
    folder = paper.folder
    tex = sorted(p for p in folder.glob("*.tex"))
    parts = [(str(p.relative_to(folder)), hashing.file_digest(p)) for p in tex]
    parts += [(name, hashing.file_digest(folder / name)) for name in ("figures", "tables")]
    parts += [("references", hashing.file_digest(paper.references) if paper.references else "")]
    style = hashing.file_digest(Path(__file__).with_name("page.css"))
    return hashing.value_digest([*parts, hashing.code_digest((_HOW,), {}), style])


def _record(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _engine() -> str | None:
    return next((name for name in ("tectonic", "latexmk") if shutil.which(name)), None)


def _pdf(text: Path, engine: str) -> bytes:
    """main.pdf as bytes: set in a folder of its own, so that nothing half done is left. Its name is always the same, for it is in the file."""
    out = text.parent / _WORK
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        command = (
            ["tectonic", "--outdir", _WORK, text.name]
            if engine == "tectonic"
            else ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", f"-outdir={_WORK}", text.name]
        )
        dated = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH, "FORCE_SOURCE_DATE": "1"}
        done = subprocess.run(
            command, cwd=text.parent, env=dated, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        made = out / text.with_suffix(".pdf").name
        if done.returncode or not made.is_file():
            said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
            told = [line for line in said if line.startswith(("!", "error", "l."))] or said[-3:]
            raise ConfigError(f"{text}: {engine} refuses it: {' '.join(told[:4])}")
        return made.read_bytes()
    finally:
        shutil.rmtree(out, ignore_errors=True)

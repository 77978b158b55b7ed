"""Sphinx extension: the figures of a page come from the page's own code, when the site is built.

The python blocks of a page in `executed_pages` run in order, in one namespace and in an empty folder. Every PNG that a block
writes is shown below that block. A block that fails fails the build; a page that needs an optional package which is not here
(`<!-- needs: torch -->`) is shown without its figures.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FIGURES = Path("_build") / "figures"  # relative to the sources; git ignores it
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # else every PDF tells of its fonts
    app.add_config_value("executed_pages", [], "env")
    app.connect("source-read", _read)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def with_figures(text: str, folder: Path, link: str) -> str:
    """The page with an image behind every block that wrote one.

    Parameters
    ----------
    text : the page, in Markdown.
    folder : where its code runs; emptied first.
    link : path of that folder in the page's links.
    """
    out, end = [], 0
    for match, made in _run(text, folder):
        out.append(text[end : match.end()])
        end = match.end()
        title = _HEADING.findall(text[:end])[-1]
        out += [
            f"\n![{title}: drawn by the code above]({link}/{name}){{width={_shown(folder / name)}px}}\n"
            for name in made
        ]
    return "".join([*out, text[end:]])


def working_folder(folder: Path) -> Path:
    """An empty folder in which a page runs as in a copy of the repository: what pages read of it is linked."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "benchmarks").symlink_to(REPOSITORY / "benchmarks", target_is_directory=True)
    return folder


def _shown(png: Path) -> int:
    """Width on the screen, pixels of 1/96 inch: one and a half times that of print at 300 per inch. Wider than a page shrinks."""
    return round(int.from_bytes(png.read_bytes()[16:20], "big") / 300 * 96 * 1.5)


def _run(text: str, folder: Path) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Run the blocks; each with the PNGs that it wrote, relative to the folder."""
    working_folder(folder)
    namespace: dict[str, object] = {"__name__": "page"}
    known: set[Path] = set()
    for match in _BLOCK.finditer(text):
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(match[1], f"code block of {folder.name}", "exec"), namespace)
        there = {Path(at) / name for at, _, names in os.walk(folder) for name in names if name.endswith(".png")}
        yield match, [p.relative_to(folder).as_posix() for p in sorted(there - known, key=os.path.getmtime)]
        known = there


def _read(app: Any, page: str, source: list[str]) -> None:
    if page not in app.config.executed_pages:
        return
    if any(importlib.util.find_spec(name) is None for name in NEEDS.findall(source[0])):
        return
    source[0] = with_figures(source[0], Path(app.srcdir) / FIGURES / page, (FIGURES / page).as_posix())
    for module in [m for name, m in sys.modules.items() if name.startswith("scalinglab")]:
        if getattr(module, "__file__", None):
            app.env.note_dependency(module.__file__)  # a page is drawn anew when the package changes

"""The verb `paper`: figures, tables and numbers of a paper from its tables, and what is stale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro

from scalinglab.cli.options import need_matplotlib, say
from scalinglab.errors import ConfigError


def paper(
    file: Annotated[Path, tyro.conf.Positional] = Path("paper/paper.toml"),
    /,
    check: bool = False,
    only: tuple[str, ...] = (),
    jobs: int | None = None,
    force: bool = False,
    recipes: bool = False,
) -> int:
    """Rebuild what is stale in a paper: figures, tables, numbers, and the text as PDF (with LaTeX) and HTML.

    scalinglab paper my/paper.toml --only valley --jobs 2

    Exit code 1: with --check something is stale; otherwise some artefact could not be made.

    Args:
        file: paper.toml, or its folder.
        check: Write nothing; list what is stale, and because of which input.
        only: Artefacts to rebuild, with what they need.
        jobs: Processes; the number of cores by default.
        force: Rebuild what is up to date too.
        recipes: List the recipes that artefacts can be made by, with their options.
    """
    need_matplotlib()
    from scalinglab.report import paper as library

    if recipes:
        if file.exists():
            library.read_paper(file)  # its own recipes too
        print(_recipes())
        return 0
    if check:
        if only or force:
            raise ConfigError("--check looks at everything and writes nothing: leave --only and --force out")
        found = library.check(file)
        print(found.text())
        return 1 if found.stale else 0
    with _progress() as tell:
        built = library.build(file, only=only, force=force, jobs=jobs, tell=tell)
    for name, absent in built.missing.items():
        say(f"missing {name}: no {', no '.join(absent)} (optional)")
    for path in built.documents:
        print(path)
    say(f"{len(built.made)} made, {len(built.failed)} failed, {len(built.missing)} missing")
    return 1 if built.failed else 0


def _recipes() -> str:
    from scalinglab.report.paper.registry import RECIPES, load_recipes

    load_recipes(())
    lines = []
    for name, r in sorted(RECIPES.items()):
        lines.append(f"{name} ({r.kind}): {r.summary}")
        if r.options.__struct_fields__:
            lines.append(f"    options: {', '.join(r.options.__struct_fields__)}")
    return "\n".join(lines)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Lines on stderr: under a spinner with the time in a terminal, plain elsewhere."""
    if not sys.stderr.isatty():
        yield say
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:  # fmt: skip
        task = bar.add_task("building the paper")

        def tell(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False)
            bar.update(task, description=f"last: {text[:60]}")

        yield tell

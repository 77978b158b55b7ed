"""Build a paper: rebuild what is stale, in parallel, and write each file whole or not at all.

Workers make bytes and touch no file; this process writes them and then the manifest, so a build that is stopped leaves whole
files and goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.report.paper import products, registry
from scalinglab.report.paper.hashing import file_digest
from scalinglab.report.paper.manifest import Manifest, Record, State, assembled, reasons, state_of
from scalinglab.report.paper.plan import Artefact, Paper, read_paper
from scalinglab.report.paper.registry import Inputs, Options
from scalinglab.tables import write_atomically

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """made: artefacts that were rebuilt. failed: those that could not be, with the error. missing: optional ones without
    their inputs. documents: main.html and main.pdf where they were written."""

    made: tuple[str, ...]
    failed: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    documents: tuple[Path, ...]


@dataclass(frozen=True)
class _Order:
    """One artefact to make, as it travels to a worker."""

    name: str
    kind: registry.Kind
    recipe: str
    options: Options
    inputs: Inputs


_Answer = tuple[str, dict[str, bytes] | str, list[str]]  # name; files, or why there are none; warnings


def build(
    file: str | Path,
    *,
    only: Sequence[str] = (),
    force: bool = False,
    jobs: int | None = None,
    tell: Tell = lambda text: None,
) -> Built:
    """Rebuild what is stale: artefacts in the order of their needs, then numbers.tex, then the documents.

    Parameters
    ----------
    file : paper.toml or its folder.
    only : artefacts to rebuild, with what they need; the documents then wait. All by default.
    force : rebuild what is up to date too.
    jobs : processes; the number of cores by default. Artefacts that share an analysis are made by one.
    tell : gets a line for every artefact and every warning.

    Raises
    ------
    ConfigError
        paper.toml, or an artefact of `only`, isn't usable; or the text isn't (see `documents`).
    """
    paper = read_paper(file)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give 1 or more")
    wanted = _wanted(paper, only)
    lacking = paper.lacking()
    manifest = Manifest.load(paper.folder)
    _drop(paper, manifest, tell)
    made: list[str] = []
    failed: dict[str, str] = {}
    left = [a for a in paper.artefacts if a.name in wanted and a.name not in lacking]
    with _pool(jobs or _cores(), paper.recipes) as run:
        while left:
            names = {a.name for a in left}
            ready = [a for a in left if not names & set(a.needs)]
            left = [a for a in left if a not in ready]
            for a in [a for a in ready if set(a.needs) & set(failed)]:
                failed[a.name] = f"it needs {', '.join(sorted(set(a.needs) & set(failed)))}, which failed"
                ready.remove(a)
            _make(paper, ready, manifest, force, run, tell, made, failed)
    numbers = assembled(paper, manifest)
    target = paper.folder / "numbers.tex"
    if not target.is_file() or target.read_bytes() != numbers:
        write_atomically(target, numbers)
    documents: tuple[Path, ...] = ()
    if not only and not failed and paper.text is not None:
        from scalinglab.report.paper.documents import write_documents

        documents = write_documents(paper, manifest, force=force, tell=tell)
    return Built(tuple(made), failed, lacking, documents)


def _cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _wanted(paper: Paper, only: Sequence[str]) -> set[str]:
    known = {a.name: a for a in paper.artefacts}
    for name in only:
        if name not in known:
            raise ConfigError(f"{paper.file} has no artefact {name!r}; there are {', '.join(known)}")
    wanted, left = set(), list(only or known)
    while left:
        name = left.pop()
        if name not in wanted:
            wanted.add(name)
            left += known[name].needs
    return wanted


def _drop(paper: Paper, manifest: Manifest, tell: Tell) -> None:
    """Remove the files of artefacts that are declared no more or whose inputs are gone: the text must not show them."""
    lacking, known = paper.lacking(), {a.name for a in paper.artefacts}
    gone = [n for n in manifest.artefacts if n not in known or n in lacking]
    for name in gone:
        for output, digest in manifest.artefacts[name].outputs.items():
            path = paper.folder / output
            if file_digest(path) == digest:
                path.unlink()
            elif path.exists():
                tell(f"{output} is left: it was changed by hand")
        del manifest.artefacts[name]
        tell(f"removed {name}: {f'no {lacking[name][0]}' if name in lacking else 'not in paper.toml'}")
    if gone:
        manifest.save(paper.folder)


def _make(
    paper: Paper,
    ready: list[Artefact],
    manifest: Manifest,
    force: bool,
    run: Callable[[list[list[_Order]]], Iterator[_Answer]],
    tell: Tell,
    made: list[str],
    failed: dict[str, str],
) -> None:
    """Make those of some artefacts that are stale; none needs another of them."""
    states: dict[str, State] = {}
    groups: dict[str, list[_Order]] = {}
    for a in ready:
        now = state_of(a, paper)
        if not force and not reasons(a, now, manifest.artefacts.get(a.name), paper.folder):
            continue
        states[a.name] = now
        inputs = a.given(now.inputs)
        key = a.recipe.analysis.key(inputs, a.options) if a.recipe.analysis else a.name
        groups.setdefault(key, []).append(_Order(a.name, a.kind, a.recipe.name, a.options, inputs))
    for name, answer, said in run(list(groups.values())):
        for text in said:
            tell(f"warning: {name}: {text}")
        if isinstance(answer, str):
            failed[name] = answer
            tell(f"failed {name}: {answer}")
            continue
        now = states[name]
        outputs = {}
        for output, data in answer.items():
            outputs[output] = file_digest(write_atomically(paper.folder / output, data))
        manifest.artefacts[name] = Record(
            entry=now.entry, code=now.code, inputs=dict(now.inputs), outputs=outputs, made_with=_versions()
        )
        manifest.save(paper.folder)
        made.append(name)
        tell(f"made {name}")


@contextmanager
def _pool(jobs: int, recipes: tuple[Path, ...]) -> Iterator[Callable[[list[list[_Order]]], Iterator[_Answer]]]:
    """A function that makes groups of artefacts, here or in processes; the processes end with the context."""
    pool: ProcessPoolExecutor | None = None

    def run(groups: list[list[_Order]]) -> Iterator[_Answer]:
        nonlocal pool
        if jobs == 1 or len(groups) <= 1:
            for group in groups:
                for order in group:
                    yield _one(order)
            return
        if pool is None:
            for name in _THREADS:
                os.environ.setdefault(name, "1")  # one thread a process: as fast, and the same sums every time
            pool = ProcessPoolExecutor(min(jobs, len(groups)), multiprocessing.get_context("spawn"), _begin, (recipes,))
        try:
            for future in as_completed([pool.submit(_group, group) for group in groups]):
                yield from future.result()
        except BrokenProcessPool:
            raise ConfigError(
                "the processes of the build ended early: out of memory, or a script without `if __name__ == '__main__':` calls "
                "build(); guard it, or give jobs=1"
            ) from None

    try:
        yield run
    except BaseException:
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.terminate()
        raise
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(recipes: tuple[Path, ...]) -> None:
    """A new process: Ctrl-C is for the one that started it."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    registry.load_recipes(recipes)


def _group(orders: list[_Order]) -> list[_Answer]:
    return [_one(order) for order in orders]


def _one(order: _Order) -> _Answer:
    """Make one artefact: its files as bytes, or the sentence that says why not."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = registry.find(order.recipe).make(order.inputs, order.options)
            answer: dict[str, bytes] | str = products.render(order.kind, order.name, made)
        except ScalinglabError as error:
            answer = str(error)
        except Exception as error:  # a recipe's mistake must not take the other artefacts with it
            answer = f"recipe {order.recipe!r} broke: {type(error).__name__}: {error}"
    said = list(dict.fromkeys(str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)))
    return order.name, answer, said


def _versions() -> dict[str, str]:
    """What it was made with: for people, not for what is stale."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from scalinglab import __version__

    out = {"scalinglab": __version__, "python": platform.python_version()}
    for name in ("numpy", "scipy", "pandas", "matplotlib"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out

"""The code of README and docs runs: every python block of a page in order, and every `$ scalinglab` line of a console block.

And the site holds together: each page in one place of the contents, each figure in the gallery, each public name in the API.
"""

from __future__ import annotations

import glob
import importlib.util
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import scalinglab
from scalinglab import cli, sweeps
from scalinglab.config import Matching, Sweep

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_REGISTRIES = (  # what a page may add to: module, dictionary, what must be here
    ("scalinglab.laws", "LAWS", ""),
    ("scalinglab.arch_options", "OPTIONS", ""),
    ("scalinglab.arch_counts", "_PARAMS", ""),
    ("scalinglab.report.figures", "FIGURES", "matplotlib"),
    ("scalinglab.report.paper.recipes", "", "matplotlib"),  # fills the next
    ("scalinglab.report.paper.registry", "RECIPES", "matplotlib"),
    ("scalinglab.train.archs", "ARCHS", "torch"),
)
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)  # a page that runs only where an optional package is
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _train_little(monkeypatch)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # pages run as in a copy of the repository
    text = page.read_text()
    for module in _NEEDS.findall(text):
        pytest.importorskip(module, reason=f"{page.name} says that it needs {module}")
    with _registries_as_they_were():
        _run(page, _BLOCK.findall(text))


def _run(page: Path, blocks: list[tuple[str, str]]) -> None:
    namespace: dict[str, object] = {}
    for kind, code in blocks:
        if kind == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, str(page), "exec"), namespace)
            continue
        for line in code.splitlines():
            if line.startswith("$ scalinglab"):
                with pytest.raises(SystemExit) as stopped:
                    cli.main(_arguments(line.removeprefix("$ scalinglab")))
                assert stopped.value.code == 0, line


@contextmanager
def _registries_as_they_were() -> Iterator[None]:
    """Laws, architectures and figures that a page adds are gone behind it."""
    kept = []
    for module, name, needed in _REGISTRIES:
        if not needed or importlib.util.find_spec(needed):
            found = import_module(module)
            kept += [(getattr(found, name), dict(getattr(found, name)))] if name else []
    try:
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def _arguments(line: str) -> list[str]:
    """The words of a command, with file patterns expanded as a shell would."""
    words = shlex.split(line)
    return [found for word in words for found in (sorted(glob.glob(word)) if word.endswith("*") else [word])]


def _train_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeps that pages train are cut down to eight steps: their runs are real, their results mean nothing."""
    real = sweeps.load_sweep

    def load(name: str) -> Sweep:
        read = real(name)
        context = read.match.context if isinstance(read.match, Matching) else 64
        run = {**read.run, "tokens": 8 * context * read.run.get("batch", 8), "evaluation": {"sequences": 8}}
        return msgspec.structs.replace(read, run=run)

    monkeypatch.setattr(sweeps, "load_sweep", load)


def test_readme_prints_the_command_that_ci_runs() -> None:
    commands = re.findall(r"^```bash\n(python3 -m venv .*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2, "README opens with exactly two set-up commands"
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


# ---- the site ----------------------------------------------------------------------------------------------------------


def test_every_page_has_one_place_in_the_contents() -> None:
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_the_gallery_draws_every_figure() -> None:
    pytest.importorskip("matplotlib")
    import_module("scalinglab.report.paper.recipes")
    figures, recipes = (
        import_module("scalinglab.report.figures").FIGURES,
        import_module("scalinglab.report.paper").RECIPES,
    )
    pages = [(DOCS / f"{name}.md").read_text() for name in ("gallery", "gallery-trained")]
    code = "".join(block for page in pages for _, block in _BLOCK.findall(page))
    own = "scalinglab."  # other tests register figures and recipes of theirs
    shown = [name for name, draw in figures.items() if draw.__module__.startswith(own)]
    drawn = [n for n, r in recipes.items() if r.kind == "figure" and r.function.__module__.startswith(own)]
    assert len(shown) > 15
    assert [name for name in shown if f"save_figure({name}(" not in code] == []
    of_figures = {"fit_figure", "depth_figure", "misscaling_figure"}  # these draw the figures above
    assert of_figures < set(drawn)
    assert [name for name in drawn if name not in of_figures and f'"{name}"' not in code] == []


@pytest.mark.parametrize("name", scalinglab.__all__)
def test_the_api_page_describes_every_public_name(name: str) -> None:
    directive = r"^\.\. (?:autofunction|autoclass|autoexception|autodata|py:data):: (?:[\w.]+\.)?"
    assert re.search(rf"{directive}{name}$", (DOCS / "api.md").read_text(), re.MULTILINE)


def _executed() -> ModuleType:
    """The Sphinx extension that draws the figures of a page."""
    spec = importlib.util.spec_from_file_location("docs_executed", DOCS / "executed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """# Two
text
```python
from pathlib import Path

head = b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR"
Path("b.png").write_bytes(head + (1000).to_bytes(4, "big"))
```
## Later
```python
assert Path("b.png").is_file() and Path("benchmarks/coverage.csv").is_file()
Path("f").mkdir()
Path("f/a.png").write_bytes(head + (2000).to_bytes(4, "big"))
print("not in the log")
```
the end
"""


def test_a_page_shows_what_its_blocks_wrote_below_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = _executed().with_figures(PAGE, tmp_path / "work", "_build/figures/two")
    lines = made.splitlines()
    first, second = (next(k for k, line in enumerate(lines) if f"{name}.png)" in line) for name in ("two/b", "two/f/a"))
    assert lines[first] == "![Two: drawn by the code above](_build/figures/two/b.png){width=480px}"
    assert first < lines.index("## Later") < second
    assert lines[second].startswith("![Later: ")
    assert lines[second].endswith("{width=960px}")
    assert [line for line in lines if line and not line.startswith("![")] == [
        line for line in PAGE.splitlines() if line
    ]
    assert capsys.readouterr().out == ""


def test_a_block_that_fails_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _executed().with_figures("# One\n```python\n1 / 0\n```\n", tmp_path / "work", "x")


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    for needed in ("sphinx", "furo", "myst_parser", "numpydoc"):
        pytest.importorskip(needed)
    bare = ["-D", "executed_pages="]  # the figures are drawn by the test of their page
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-E", *bare, str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "gallery.html").is_file()

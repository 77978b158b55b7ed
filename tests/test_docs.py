"""The code of README and docs runs: every python block of a page in order, and every `$ scalinglab` line of a console block."""

from __future__ import annotations

import glob
import re
import shlex
import warnings
from pathlib import Path

import msgspec
import pytest

from scalinglab import cli, sweeps
from scalinglab.config import Matching, Sweep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)  # a page that runs only where an optional package is
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _train_little(monkeypatch)
    namespace: dict[str, object] = {}
    text = page.read_text()
    for module in _NEEDS.findall(text):
        pytest.importorskip(module, reason=f"{page.name} says that it needs {module}")
    for kind, code in _BLOCK.findall(text):
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

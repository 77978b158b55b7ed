"""The code of README and docs runs: every python block of a page in order, and every `$ scalinglab` line of a console block."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest

from scalinglab import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for kind, code in _BLOCK.findall(page.read_text()):
        if kind == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, str(page), "exec"), namespace)
            continue
        for line in code.splitlines():
            if line.startswith("$ scalinglab"):
                with pytest.raises(SystemExit) as stopped:
                    cli.main(shlex.split(line.removeprefix("$ scalinglab")))
                assert stopped.value.code == 0, line


def test_readme_prints_the_command_that_ci_runs() -> None:
    commands = re.findall(r"^```bash\n(python3 -m venv .*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2, "README opens with exactly two set-up commands"
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()

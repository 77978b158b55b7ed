"""How far a launch is: a line per job where stderr is a file, a live line in a terminal, nothing if asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from run_folders import config

from scalinglab.train import display
from scalinglab.train.display import Display
from scalinglab.train.jobs import Job, stacks


@pytest.fixture
def jobs() -> list[Job]:
    return stacks([config(depth=d, seed=s) for d in (1, 4) for s in (0, 1)])


def said(out: Path, job: Job, share: float) -> None:
    path = out / display.FOLDER / f"{job.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"share": share, "tokens_per_second": 2000}))


def test_a_line_per_job(tmp_path: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    with Display(tmp_path, jobs) as shown:
        shown.ended(jobs[1])
        shown.ended(jobs[1])  # told twice, counted once
        shown.ended(jobs[0], "no luck")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("[2/4 runs, 0 s] pre_ln L4 d8, 2 runs: done")
    assert second.startswith("[4/4 runs, 0 s] pre_ln L1 d8, 2 runs: failed: no luck")


def test_silent_if_asked(tmp_path: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    with Display(tmp_path, jobs, shown=False) as shown:
        shown.ended(jobs[0])
    assert capsys.readouterr() == ("", "")


def test_shares_weigh_by_cost(tmp_path: Path, jobs: list[Job]) -> None:
    shown = Display(tmp_path, jobs, shown=False)
    assert shown._look() == (0.0, 0.0)
    said(tmp_path, jobs[0], 0.5)
    total = sum(job.cost for job in jobs)
    assert shown._look() == (pytest.approx(0.5 * jobs[0].cost / total), 2000)
    shown.ended(jobs[0])
    assert shown._look() == (pytest.approx(jobs[0].cost / total), 0.0)
    (tmp_path / display.FOLDER / f"{jobs[1].name}.json").write_text('{"share": 0.')  # torn: as if it weren't there
    assert shown._look()[0] == pytest.approx(jobs[0].cost / total)
    shown.ended(jobs[1])
    assert shown._look()[0] == pytest.approx(1.0)


def test_a_live_line_in_a_terminal(
    tmp_path: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said(tmp_path, jobs[0], 0.5)
    with Display(tmp_path, jobs) as shown:
        shown.ended(jobs[1])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/4 runs" in captured.err
    assert "2.0k tokens/s" in captured.err


@pytest.mark.parametrize(("seconds", "text"), [(3, "3 s"), (600, "10 min"), (9000, "2.5 h")])
def test_spans(seconds: float, text: str) -> None:
    assert display._span(seconds) == text

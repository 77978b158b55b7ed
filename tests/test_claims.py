"""Claims: one of many wins, the dead and the silent are succeeded, the living are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scalinglab.train import claims
from scalinglab.train.claims import Claims, Owner, acquire, holder, owners


def take(out: Path, *run_ids: str) -> Claims:
    got = acquire(out, run_ids)
    assert isinstance(got, Claims)
    return got


def files(out: Path) -> list[str]:
    return sorted(p.name for p in (out / claims.FOLDER).iterdir())


def write(out: Path, run_id: str, owner: Owner, *, generation: int = 0, age: float = 0.0) -> Path:
    path = out / claims.FOLDER / f"{run_id}.{generation}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**owner.__dict__, "started": 0}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def dead_owner() -> Owner:
    """A process of this machine that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return Owner(Owner.this().machine, done.pid, "1", "t")


def test_a_claim_excludes_others_until_it_is_given_back(tmp_path: Path) -> None:
    with take(tmp_path, "a", "b"):
        other = acquire(tmp_path, ["b", "c"])
        assert isinstance(other, Owner)
        assert other.pid == os.getpid()
        assert [o.pid for o in owners(tmp_path)] == [os.getpid()] * 2
        assert holder(tmp_path, "c") is None, "all or none"
    assert files(tmp_path) == []
    with take(tmp_path, "b", "c"):
        pass


def test_a_dead_process_of_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    write(tmp_path, "a", dead_owner())
    assert holder(tmp_path, "a") is None
    with take(tmp_path, "a"):
        assert files(tmp_path) == ["a.0", "a.1"]
    assert files(tmp_path) == []


def test_a_process_number_that_was_given_to_another_process_is_no_owner(tmp_path: Path) -> None:
    this = Owner.this()
    if not this.born:
        pytest.skip("this system does not tell when a process was started")
    write(tmp_path, "a", Owner(this.machine, this.pid, "1", "t"))
    assert holder(tmp_path, "a") is None


def test_another_machine_is_succeeded_only_after_a_long_silence(tmp_path: Path) -> None:
    far = Owner("elsewhere boot pid:[1]", 1, "1", "t")
    write(tmp_path, "a", far, age=claims.STALE_SECONDS / 2)
    assert acquire(tmp_path, ["a"]) == far
    write(tmp_path, "a", far, age=claims.STALE_SECONDS + 60)
    with take(tmp_path, "a"):
        pass


def test_an_empty_claim_is_respected_while_it_is_young(tmp_path: Path) -> None:
    (tmp_path / claims.FOLDER).mkdir()
    (tmp_path / claims.FOLDER / "a.0").touch()
    assert isinstance(acquire(tmp_path, ["a"]), Owner)


def test_a_living_owner_keeps_its_claim_fresh_and_notices_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.02)
    with take(tmp_path, "a") as mine:
        path = tmp_path / claims.FOLDER / "a.0"
        os.utime(path, (0, 0))
        _until(lambda: path.stat().st_mtime > 1e9)
        assert not mine.lost
        successor = write(tmp_path, "a", Owner("elsewhere", 1, "1", "t"), generation=1)
        _until(lambda: mine.lost)
    assert files(tmp_path) == [successor.name], "the successor's claim stays"


def test_a_worker_whose_parent_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.02)
    told: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        for parent, times in ((os.getppid(), 0), (-1, 1)):
            got = acquire(tmp_path, ["a"], parent=parent)
            assert isinstance(got, Claims)
            with got:
                time.sleep(0.2)
            assert len(told) == times
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_many_wins(tmp_path: Path, stale: bool) -> None:
    """Sixteen threads ask at once, again and again, also to succeed one that is dead: never two hold a run."""
    dead = dead_owner()
    wins = 0
    for trial in range(20):
        run_id = f"r{trial}"
        if stale:
            write(tmp_path, run_id, dead)
        start = threading.Barrier(16)

        def ask(run_id: str = run_id, start: threading.Barrier = start) -> bool:
            start.wait()
            return isinstance(acquire(tmp_path, [run_id]), Claims)

        with ThreadPoolExecutor(16) as pool:
            won = sum(f.result() for f in [pool.submit(ask) for _ in range(16)])
        assert won <= 1, f"{won} hold {run_id}"
        wins += won
    assert wins >= 15, "all but a few trials have a winner; in the others everybody steps back and asks again"


def test_processes_take_each_run_once(tmp_path: Path) -> None:
    """Four processes want the same 30 runs; those that find one held or done pass on. Each is 'trained' once."""
    code = """
import os, sys, time
from pathlib import Path
from scalinglab.train.claims import Claims, acquire
out = Path(sys.argv[1])
while left := [r for r in map(str, range(30)) if not (out / f"done-{r}").exists()]:
    for r in left:
        held = acquire(out, [r])
        if isinstance(held, Claims):
            with held:
                if not (out / f"done-{r}").exists():
                    with (out / "trained").open("a") as f:
                        f.write(r + "\\n")
                    (out / f"done-{r}").touch()
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [p.wait(120) for p in running] == [0] * 4
    assert sorted((tmp_path / "trained").read_text().split(), key=int) == [str(i) for i in range(30)]
    assert files(tmp_path) == []


def test_without_hard_links_claims_still_exclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    with take(tmp_path, "a"):
        assert isinstance(acquire(tmp_path, ["a"]), Owner)
    assert files(tmp_path) == []


def _until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)

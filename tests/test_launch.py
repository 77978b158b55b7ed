"""Launching: what is missing is trained once, whatever dies; nothing that can't be trained starts."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("joblib")

from run_folders import config, write_run

from scalinglab import ConfigError
from scalinglab.collecting import collect, is_finished
from scalinglab.config import Base, Evaluation, RunConfig, Schedule, ShapeSpec, Sweep
from scalinglab.train import claims, loop
from scalinglab.train import launch as launching
from scalinglab.train.jobs import stacks
from scalinglab.train.launch import launch

TESTS = Path(__file__).parent


def tiny(seed: int = 0, **fields: Any) -> RunConfig:
    """Eight steps of a model that is as small as they come: a fraction of a second."""
    return config(seed=seed, evaluation=Evaluation(sequences=4), **fields)


def bytes_of(out: Path, runs: Sequence[RunConfig]) -> dict[str, tuple[bytes, str]]:
    """Log and digest of the weights of every run."""
    return {
        run.run_id: (
            (out / run.run_id / "log.jsonl").read_bytes(),
            json.loads((out / run.run_id / "summary.json").read_text())["weights_sha256"],
        )
        for run in runs
    }


def lines_of(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


FakeTrain = Callable[..., list[dict[str, Any]]]


def fake_train(
    seen: list[tuple[str, ...]], *, fail: str = "", error: Exception | None = None, wait: float = 0
) -> FakeTrain:
    """A trainer that writes finished runs at once, or raises for an architecture."""

    def train(stack: Sequence[RunConfig], out: Path, **_: Any) -> list[dict[str, Any]]:
        seen.append(tuple(run.run_id for run in stack))
        if stack[0].architecture == fail:
            raise error or RuntimeError("no luck\nin two lines")
        time.sleep(wait)
        for run in stack:
            write_run(out, run)
        return []

    return train


def test_a_sweep_is_trained_and_the_second_launch_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tiny(0), tiny(1), tiny(0, depth=2)]
    made = launch(runs, tmp_path, workers=1)
    assert sorted(made.finished) == sorted(r.run_id for r in runs)
    assert (made.failed, made.skipped, made.diverged) == ((), (), ())
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["done", "done"]
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    again = launch(runs, tmp_path, workers=1, progress=False)
    assert (again.finished, sorted(again.skipped)) == ((), sorted(r.run_id for r in runs))
    assert times == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert len(collect(tmp_path)) == 3
    assert capsys.readouterr().err == ""
    assert "3 were finished before" in again.summary()


def test_only_what_is_missing_is_trained_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(loop, "train", fake_train(seen))
    runs = [tiny(seed, depth=depth) for depth in (1, 4, 2) for seed in (0, 1)]
    write_run(tmp_path, runs[0])
    launch(runs, tmp_path, workers=1, progress=False)
    assert seen == [
        (runs[2].run_id, runs[3].run_id), (runs[4].run_id, runs[5].run_id), (runs[1].run_id,)
    ]  # fmt: skip


def test_a_run_whose_summary_is_torn_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    folder = write_run(tmp_path, run)
    (folder / "summary.json").write_text('{"schema": "scal')
    assert not is_finished(folder)
    seen: list[tuple[str, ...]] = []

    def train(stack: Sequence[RunConfig], out: Path, **_: Any) -> list[Any]:
        seen.append(tuple(r.run_id for r in stack))
        assert not (folder / "summary.json").exists(), "the loop would refuse it"
        return []

    monkeypatch.setattr(loop, "train", train)
    launch([run], tmp_path, workers=1, progress=False)
    assert seen == [(run.run_id,)]


def test_a_failure_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(loop, "train", fake_train(seen, fail="post_ln"))
    runs = [tiny(architecture="post_ln"), tiny(1, architecture="post_ln"), tiny(), tiny(depth=2)]
    made = launch(runs, tmp_path, workers=1, progress=False)
    assert len(made.finished) == 2
    (failure,) = made.failed
    assert failure.run_ids == (runs[0].run_id, runs[1].run_id)
    assert failure.reason == "RuntimeError: no luck in two lines"
    assert made.summary().splitlines()[1] == f"failed: {runs[0].run_id} and 1 more: {failure.reason}"
    (record,) = (tmp_path / ".failures").iterdir()
    assert "Traceback" in json.loads(record.read_text())["traceback"]
    assert list((tmp_path / ".claims").iterdir()) == []
    monkeypatch.setattr(loop, "train", fake_train(seen))
    again = launch(runs, tmp_path, workers=1, progress=False)
    assert (len(again.finished), again.failed, len(again.skipped)) == (2, (), 2)
    assert list((tmp_path / ".failures").iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/x/log.jsonl")
    monkeypatch.setattr(loop, "train", fake_train([], fail="pre_ln", error=full))
    (failure,) = launch([tiny()], tmp_path, workers=1, progress=False).failed
    assert failure.reason == "No space left on device: runs/x/log.jsonl; make room and launch again, nothing is lost"


def test_two_launchers_at_once_train_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_POLL_SECONDS", 0.05)
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(loop, "train", fake_train(seen, wait=0.02))
    runs = [tiny(seed, depth=depth) for depth in range(1, 9) for seed in (0, 1)]
    reports: list[launching.LaunchReport] = []
    both = [
        threading.Thread(target=lambda: reports.append(launch(runs, tmp_path, workers=1, progress=False)))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(seen) == sorted(tuple(r.run_id for r in job.runs) for job in stacks(runs))
    assert [len(r.finished) + len(r.skipped) for r in reports] == [16, 16], "each waits for what the other has"


def test_a_job_that_another_launcher_lost_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_POLL_SECONDS", 0.05)
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(loop, "train", fake_train(seen))
    held = claims.acquire(tmp_path, [tiny().run_id])
    assert isinstance(held, claims.Claims)
    threading.Timer(0.3, lambda: held.__enter__().__exit__()).start()
    made = launch([tiny()], tmp_path, workers=1, progress=False)
    assert len(made.finished) == len(seen) == 1


def test_a_stack_with_a_checkpoint_goes_on_as_that_stack(tmp_path: Path) -> None:
    """Stopped in the middle, then launched with more seeds: the old stack is resumed, in its old company."""
    old, more = [tiny(0), tiny(1)], [tiny(2)]
    undisturbed = tmp_path / "a"
    launch(old, undisturbed, workers=1, progress=False)

    out = tmp_path / "b"
    stop_after(4, old, out)
    assert len(list((out / ".stacks").glob("*/checkpoint.pt"))) == 1
    made = launch([*old, *more], out, workers=1, progress=False)
    assert len(made.finished) == 3
    assert bytes_of(out, old) == bytes_of(undisturbed, old)
    assert list((out / ".stacks").iterdir()) == []

    out = tmp_path / "c"
    stop_after(4, old, out)
    made = launch(old[1:], out, workers=1, progress=False)  # a smaller sweep takes its companion along
    assert (out / old[0].run_id / "summary.json").is_file()
    assert bytes_of(out, old) == bytes_of(undisturbed, old)


def stop_after(steps: int, runs: Sequence[RunConfig], out: Path) -> None:
    """Train and stop with a checkpoint, as a Ctrl-C does."""
    real = loop.train

    def train(stack: Sequence[RunConfig], where: Path, **options: Any) -> list[Any]:
        inner = options.pop("report")

        def report(at: loop.Progress) -> None:
            inner(at)
            if at.step == steps:
                os.kill(os.getpid(), signal.SIGINT)

        return real(stack, where, report=report, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "train", train)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(runs, out, workers=1, progress=False)
    finally:
        patch.undo()
    assert list((out / ".claims").iterdir()) == []


def test_logs_that_nothing_goes_on_from_are_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    folder = write_run(tmp_path, run, summary=False)
    there: list[bool] = []
    monkeypatch.setattr(loop, "train", lambda stack, out, **_: there.append((folder / "log.jsonl").exists()))
    launch([run], tmp_path, workers=1, progress=False)
    assert there == [False]


def test_ladder_of_budgets_shares_its_trunk(tmp_path: Path) -> None:
    schedule = Schedule(kind="wsd", warmup_tokens=128)
    runs = [tiny(s, tokens=t, schedule=schedule) for t in (1024, 512) for s in (0, 1)]
    launch(runs, tmp_path, workers=1, progress=False)
    apart = tmp_path / "apart"
    launch(runs[:2], apart, workers=1, progress=False)  # the long ones alone, without a trunk to go on from
    assert bytes_of(tmp_path, runs[:2]) == bytes_of(apart, runs[:2])
    assert list((tmp_path / ".trunks").glob("*/step-*.pt"))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from run_folders import config
from scalinglab.config import Evaluation
from scalinglab.train.launch import launch
if __name__ == "__main__":
    runs = [config(seed=s, depth=d, tokens=64 * {steps}, evaluation=Evaluation(sequences=4)) for d in (1, 2, 3) for s in (0, 1)]
    made = launch(runs, {out!r}, workers=2, engine={engine!r}, checkpoint_seconds={every}, progress=False)
    print(made.summary())
    sys.exit(1 if made.failed else 0)
"""


def start(tmp_path: Path, out: Path, *, steps: int, every: float = 0.1, engine: str = "loky") -> subprocess.Popen[str]:
    """The launcher in a process group of its own."""
    path = tmp_path / f"{out.name}.py"
    path.write_text(SCRIPT.format(tests=str(TESTS), out=str(out), steps=steps, every=every, engine=engine))
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def script_runs(steps: int) -> list[RunConfig]:
    return [
        config(seed=s, depth=d, tokens=64 * steps, evaluation=Evaluation(sequences=4))
        for d in (1, 2, 3)
        for s in (0, 1)
    ]


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def kill_everything(process: subprocess.Popen[str], out: Path) -> None:
    """kill -9 for the launcher and for its workers, which are in groups of their own."""
    pids = {owner.pid for owner in claims.owners(out)} | {process.pid}
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def test_killed_workers_and_launchers_lose_nothing(tmp_path: Path) -> None:
    steps = 150
    runs, whole, out = script_runs(steps), tmp_path / "whole", tmp_path / "killed"
    launch(runs, whole, workers=1, progress=False)
    first = start(tmp_path, out, steps=steps)
    wait_for(lambda: list((out / ".stacks").glob("*/checkpoint.pt")))
    kill_everything(first, out)
    second = start(tmp_path, out, steps=steps)
    worker = wait_for(lambda: [o.pid for o in claims.owners(out) if o.pid != second.pid])[0]
    os.kill(worker, signal.SIGKILL)  # the pool breaks; the launcher makes a new one
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert bytes_of(out, runs) == bytes_of(whole, runs)
    assert list((out / ".claims").iterdir()) == []


def test_sigterm_lets_the_workers_save_their_state(tmp_path: Path) -> None:
    steps, out = 4000, tmp_path / "out"
    process = start(tmp_path, out, steps=steps, every=1e9)
    wait_for(lambda: list((out / ".progress").glob("*.json")))
    process.terminate()
    said, _ = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in said
    assert list((out / ".stacks").glob("*/checkpoint.pt")), "there was no checkpoint by time"
    assert not list(claims.owners(out))


KILLING = """
import os, signal, sys, time, traceback
sys.path.insert(0, {tests!r})
import numpy as np
import torch  # once, for all children
from run_folders import config
from scalinglab.config import Evaluation
from scalinglab.train.launch import launch

runs = [config(seed=s, depth=d, tokens=64 * {steps}, evaluation=Evaluation(sequences=4)) for d in (1, 2, 3) for s in (0, 1)]

def launcher():
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(1 if launch(runs, {out!r}, workers=1, checkpoint_seconds=0.02, progress=False).failed else 0)
    except BaseException:
        traceback.print_exc()
        os._exit(2)

rng, kills, children = np.random.default_rng(0), 0, {{launcher(), launcher()}}
while children:
    time.sleep(float(rng.exponential(0.3)))
    for pid in sorted(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.remove(pid)
            if status:
                sys.exit(f"a launcher ended with {{status}}")
    if children and kills < {kills}:
        victim = int(rng.choice(sorted(children)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        kills += 1
        children = (children - {{victim}}) | {{launcher()}}
print(kills)
"""


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    """Two launchers share a folder and are killed a hundred times at random; the sweep ends in the bytes of one undisturbed.

    The launchers are forked from a process that has imported torch, so that kills hit the training and not the start.
    """
    steps = int(os.environ.get("SCALINGLAB_KILL_STEPS", "20000"))
    runs, whole, out = script_runs(steps), tmp_path / "whole", tmp_path / "killed"
    assert len(launch(runs, whole, workers=1, progress=False).finished) == len(runs)
    code = KILLING.format(tests=str(TESTS), out=str(out), steps=steps, kills=100)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "100", "the sweep is too short for this machine: raise SCALINGLAB_KILL_STEPS"
    assert bytes_of(out, runs) == bytes_of(whole, runs)
    table = collect(out, checkpoints=True)
    assert table.attrs["notes"] == []
    assert not table.duplicated(["run_id", "step"]).any()
    for run in runs:
        steps_of = [json.loads(line)["step"] for line in lines_of(out / run.run_id) if '"train"' in line]
        assert steps_of == sorted(set(steps_of)), "no line twice"
    assert len(collect(out)) == len(runs)
    assert list((out / ".claims").glob("*.*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "module"), [("loky", "joblib"), ("dask", "distributed"), ("ray", "ray")])
def test_two_processes_give_the_bytes_of_one(tmp_path: Path, engine: str, module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"needs {module}: pip install 'scalinglab[{engine}]'")
    runs, out = script_runs(50), tmp_path / "two"
    process = start(tmp_path, out, steps=50, engine=engine)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    launch(runs, tmp_path / "one", workers=1, progress=False)
    assert bytes_of(out, runs) == bytes_of(tmp_path / "one", runs)


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({"corpus": "novel"}, {}, "corpus='novel' is unknown"),
        ({"corpus_options": {"colour": 1}}, {}, "corpus_options.colour is unknown"),
        ({"corpus_options": {"width": 64}}, {}, "context = 32: an automaton 64 cells wide"),
        ({"corpus_options": {"rules": list(range(9))}}, {}, "more than vocab=8"),
        ({}, {"device": "cuda:77"}, "device='cuda:77' can't be used here"),
        ({}, {"device": "abacus"}, "there is cpu"),
        ({}, {"engine": "steam"}, "engine='steam' is unknown"),
        ({}, {"address": "tcp://here:8786"}, "engine 'loky' trains on this machine"),
        ({}, {"workers": 0}, "workers=0 must be at least 1"),
        ({}, {"shard": (3, 2)}, "shard 3/2"),
        ({}, {"backend": "abacus"}, "abacus"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    if "backend" in options:
        (failure,) = launch([tiny(**change)], tmp_path, workers=1, progress=False, **options).failed
        assert told in failure.reason
        assert "\n" not in failure.reason
        return
    with pytest.raises(ConfigError) as error:
        launch([tiny(**change)], tmp_path, **{"workers": 1, "progress": False, **options})
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not any(p.is_dir() and not p.name.startswith(".") for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": ShapeSpec(depth=1, width=9, heads=3, ffn_dim=16, vocab=8, context=32)}, "head_dim=3 must be even"),
        (
            {"parametrization": "completep", "base": {"depth": 2, "width": 9, "head_dim": 8, "ffn_dim": 16}},
            r"base.width=9 must be a multiple of base.head_dim=8",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_is_refused_before_training(change: dict[str, Any], told: str) -> None:
    """Already when the run is described."""
    with pytest.raises(ConfigError, match=told):
        msgspec.structs.replace(tiny(), **{k: Base(**v) if k == "base" else v for k, v in change.items()})


def test_the_models_that_are_tried_are_the_shallowest_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalinglab.train import scaling

    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        scaling, "build", lambda run, device: seen.append((run.architecture, run.shape.depth, run.shape.width))
    )
    launching.check_models(
        [
            tiny(s, depth=d, width=w, architecture=a)
            for a in ("pre_ln", "keel")
            for w in (8, 16)
            for d in (4, 2)
            for s in (0, 1)
        ]
    )
    assert seen == [(a, 2, w) for a in ("pre_ln", "keel") for w in (8, 16)]


def test_a_damaged_config_is_written_again_and_costs_no_training(tmp_path: Path) -> None:
    runs = [tiny(0), tiny(1)]
    launch(runs, tmp_path, workers=1, progress=False)
    before = bytes_of(tmp_path, runs)
    (tmp_path / runs[0].run_id / "config.toml").write_text("colour = ")
    (tmp_path / runs[1].run_id / "config.toml").unlink()
    assert not any(is_finished(tmp_path / run.run_id) for run in runs)
    times = [(tmp_path / run.run_id / "weights.pt").stat().st_mtime_ns for run in runs]
    assert launch(runs, tmp_path, workers=1, progress=False).failed == ()
    assert all(is_finished(tmp_path / run.run_id) for run in runs)
    assert bytes_of(tmp_path, runs) == before
    assert times == [(tmp_path / run.run_id / "weights.pt").stat().st_mtime_ns for run in runs]
    assert collect(tmp_path).attrs["notes"] == []


def test_one_run_is_no_plural(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train", fake_train([]))
    assert launch([tiny()], tmp_path, workers=1, progress=False).summary().startswith("1 run trained in")
    again = launch([tiny()], tmp_path, workers=1, progress=False).summary()
    assert "0 runs trained" in again
    assert "1 was finished before" in again


def test_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("to be or not to be")
    shape = ShapeSpec(depth=1, width=8, heads=1, ffn_dim=16, vocab=16, context=64)
    run = RunConfig(shape=shape, lr=0.01, tokens=64, corpus="text", corpus_options={"path": str(text)})
    with pytest.raises(ConfigError, match="short.txt"):
        launch([run], tmp_path / "runs", workers=1)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written: Not a directory"):
        launch([tiny()], tmp_path / "file" / "runs", workers=1)

    def read_only(*_: object) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(launching, "write_atomically", read_only)
    with pytest.raises(ConfigError, match="Read-only file system"):
        launch([tiny()], tmp_path / "runs", workers=1)


def test_a_sweep_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        launch([], tmp_path, workers=1)


def test_a_sweep_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(loop, "train", fake_train(seen))
    run = tiny().to_dict()
    sweep = Sweep(name="s", run=run, seeds=[0, 1, 2])
    assert len(launch(sweep, tmp_path, workers=1, progress=False).finished) == 3
    assert len(seen) == 1
    parts = [launch(Sweep(name="s", run=run, lrs=[0.1], budgets=[], architectures=["pre_ln", "post_ln"]), tmp_path / "b", workers=1,
                    shard=(i, 2), progress=False) for i in (1, 2)]  # fmt: skip
    assert [len(p.finished) for p in parts] == [1, 1]

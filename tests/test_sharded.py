"""Runs in parts: the numbers of one process, checkpoints that go anywhere, and no process that holds a run whole."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

import msgspec
import torch

from scalinglab.arch_options import OPTIONS
from scalinglab.cli import main
from scalinglab.config import Base, Evaluation, Optimizer, RunConfig, Schedule, ShapeSpec
from scalinglab.errors import ConfigError
from scalinglab.train import checkpoints
from scalinglab.train.jobs import stack_id
from scalinglab.train.launch import launch
from scalinglab.train.loop import Stopped, train
from scalinglab.train.sharded import Sharded
from scalinglab.train.team import Team

# Odd sizes: 3 rows of a table, and 9 of width, don't fall into two equal parts.
SHAPE = ShapeSpec(depth=2, width=18, heads=3, ffn_dim=27, vocab=9, context=16)
CONFIG = RunConfig(
    shape=SHAPE, architecture="hyper_connections", parametrization="completep", base=Base(depth=1, width=12, head_dim=6, ffn_dim=18),
    lr=5e-3, tokens=20 * 64, corpus="automaton", corpus_options={"width": 4}, batch=4, precision="fp64",
    optimizer=Optimizer(grad_clip=0.7), evaluation=Evaluation(sequences=8, every=10),
)  # fmt: skip
RTOL = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}
RUNS = [msgspec.structs.replace(CONFIG, precision=precision) for precision in RTOL]
WILD = msgspec.structs.replace(CONFIG, lr=1e12, optimizer=Optimizer(grad_clip=math.inf), architecture="pre_ln")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def with_(**fields: Any) -> RunConfig:
    return msgspec.structs.replace(CONFIG, **fields)


def together(code: str, *arguments: object, size: int = 2) -> None:
    """Run a script in several processes that find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    call = [sys.executable, "-c", code, *map(str, arguments)]
    processes = [
        subprocess.Popen(call, env={**os.environ, **threads, **store, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()  # where one has failed the others wait for it


TRAIN = """
import os, shutil, signal, sys
from pathlib import Path
from scalinglab.config import RunConfig
from scalinglab.train.loop import Stopped, train

out, stages, *files = sys.argv[1:]
for stage in stages.split():  # how:step, step 0 for the end
    how, stop = stage.split(":")

    def report(progress):
        if progress.step == int(stop) and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)  # to one process: all of them stop

    try:
        for file in files:
            train([RunConfig.load(file)], Path(out), fsdp=how == "fsdp", report=report)
        assert stop == "0"
    except Stopped:
        assert stop != "0"
        if os.environ["RANK"] == "0":
            shutil.copytree(Path(out) / ".stacks", Path(out) / f"at-{stop}" / ".stacks")
"""


def train_together(out: Path, runs: Sequence[RunConfig], stages: str = "fsdp:0") -> None:
    """Train runs in two processes, stage by stage: how, and the step at which they are told to stop, 0 for none."""
    out.mkdir(exist_ok=True)
    together(TRAIN, out, stages, *(run.save(out / f"{run.run_id}.toml") for run in runs))


def stop_alone(out: Path, run: RunConfig, step: int) -> dict[str, Any]:
    """Train in this process until a step; the checkpoint."""

    def report(progress: Any) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=f"step {step} "):
        train([run], out, backend="torch", report=report)
    return checkpoint(out, run)


def checkpoint(out: Path, run: RunConfig) -> dict[str, Any]:
    state = checkpoints.read(out / ".stacks" / stack_id([run]) / "checkpoint.pt")
    assert state is not None
    return state


def weights(out: Path, run: RunConfig) -> dict[str, torch.Tensor]:
    return torch.load(out / run.run_id / "weights.pt", weights_only=True)


def summary(out: Path, run: RunConfig) -> dict[str, Any]:
    return json.loads((out / run.run_id / "summary.json").read_text())


def assert_same_run(out: Path, other: Path, run: RunConfig) -> None:
    """Logs agree within the tolerance of the run's precision; in double precision weights do, too.

    Where a gradient is all but zero, Adam makes the rounding of single precision a step of full size.
    """
    rtol = RTOL[run.precision]
    lines, others = (
        [json.loads(line) for line in (x / run.run_id / "log.jsonl").read_text().splitlines()] for x in (out, other)
    )
    assert len(lines) == len(others) > 20
    for line, expected in zip(lines, others, strict=True):
        assert line.pop("kind") == expected.pop("kind")
        assert line == pytest.approx(expected, rel=rtol, abs=rtol)
    mine, theirs = weights(out, run), weights(other, run)
    assert list(mine) == list(theirs)
    if run.precision == "fp64":
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-8, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------ the same run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every precision and one that diverges, each in two processes and in one."""
    out = tmp_path_factory.mktemp("trained")
    train_together(out / "two", [*RUNS, WILD])
    for run in (*RUNS, WILD):
        train([run], out / "one", backend="torch")
    return out


@pytest.mark.parametrize("run", RUNS, ids=list(RTOL))
def test_two_processes_give_the_log_of_one(trained: Path, run: RunConfig) -> None:
    assert_same_run(trained / "two", trained / "one", run)
    ours, theirs = (summary(trained / where, run) for where in ("two", "one"))
    assert set(ours) == set(theirs)
    assert ours["params"] == theirs["params"]
    assert ours["loss_initial"] == pytest.approx(theirs["loss_initial"], rel=RTOL[run.precision])
    assert not any((trained / "two" / ".stacks").iterdir())


def test_divergence_is_a_status(trained: Path) -> None:
    one, two = (summary(trained / where, WILD) for where in ("one", "two"))
    assert (two["status"], two["step"]) == (one["status"], one["step"])
    assert two["status"] == "diverged"
    assert all(torch.isfinite(tensor).all() for tensor in weights(trained / "two", WILD).values())


def test_a_checkpoint_goes_on_in_one_process_in_parts_and_in_a_team(tmp_path: Path) -> None:
    run, out = with_(architecture="moda"), tmp_path / "changing"
    train([run], tmp_path / "whole", backend="torch")
    stop_alone(out, run, 4)
    train_together(out, [run], "fsdp:8 team:12 fsdp:16")
    in_parts, alone = checkpoint(out / "at-8", run), stop_alone(tmp_path / "alone", run, 8)
    assert set(in_parts) == set(alone)
    for name in ("params", "moment1", "moment2", "alive"):
        assert in_parts[name].shape == alone[name].shape
        torch.testing.assert_close(in_parts[name], alone[name], rtol=1e-9, atol=1e-15)
    train([run], out, backend="torch")
    assert_same_run(out, tmp_path / "whole", run)


def test_a_launch_trains_runs_and_ladders_in_parts(tmp_path: Path) -> None:
    """Two seeds, which would be a stack, and a budget that goes on from the trunk of a smaller one."""
    schedule = Schedule(kind="wsd", warmup_tokens=4 * 64, decay=0.2)
    runs = [with_(schedule=schedule, seed=seed, tokens=n * 64) for seed in (0, 1) for n in (10, 25)]
    files = [run.save(tmp_path / f"{run.run_id}.toml") for run in runs]
    together(
        "import sys\nfrom scalinglab.config import RunConfig\nfrom scalinglab.train.launch import launch\n"
        "made = launch([RunConfig.load(x) for x in sys.argv[2:]], sys.argv[1], fsdp=True)\n"
        "assert len(made.finished) == 4 and not made.failed, made\n",
        tmp_path / "two", *files,
    )  # fmt: skip
    assert [p.name for p in sorted((tmp_path / "two" / ".trunks").glob("*/*"))] == ["step-20.pt", "step-8.pt"] * 2
    assert not any((tmp_path / "two" / ".claims").glob("*.*"))
    for run in runs[1::2]:
        train([run], tmp_path / "one", backend="torch")
        assert_same_run(tmp_path / "two", tmp_path / "one", run)


STEPS = """
import json, math, os, sys
import torch
from pathlib import Path
from scalinglab.config import RunConfig
from scalinglab.train.sharded import Sharded
from scalinglab.train.stack import Stack
from scalinglab.train.team import join

out, *cases = sys.argv[1:]
team, found = join(4), {}
for case in cases:
    broken, _, file = case.partition(":")
    config = RunConfig.load(file)
    alone, parts = Stack([config]), Sharded([config], team)
    own = {f: [getattr(p, f).to_local().numel() for p in parts._parts] for f in ("param", "moment1", "moment2")}
    own["grads"] = [grad.numel() for grad in parts.grads]
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(0, config.shape.vocab, (1, 4, config.shape.context), generator=draw) for _ in range(2))
        losses = []
        for stack, mine in ((alone, slice(None)), (parts, team.slice(4))):
            loss = stack.model.nats(tokens[:, mine], targets[:, mine]).mean((1, 2))
            stack.backward(loss)
            losses.append(loss.detach())
        if broken == "gradient" and step == 1:  # in one process and one tensor
            alone.grads[0, -1] = math.nan
            if not team.leads:
                parts.grads[-1][0, -1] = math.nan
        team.average(losses[1])
        if broken == "loss" and step == 1:
            losses = [loss * math.inf for loss in losses]
        norms = [stack.update(loss, 0.5) for stack, loss in zip((alone, parts), losses)]
    state, expected = parts.state(), alone.state()
    record = {"own": own, "alive": bool(parts.alive), "size": parts.size, "step": parts.step, "rates": parts.lr_k.tolist()}
    if team.leads:
        record["errors"] = {n: float((state[n] - expected[n]).abs().max()) for n in ("params", "moment1", "moment2")}
        record["norms"] = [float(n) for n in norms]
        record["stack_alive"] = bool(alone.alive)
        record["tensors"] = len(list(alone.model.parameters()))
        torch.testing.assert_close(parts.weights(0), alone.weights(0), rtol=1e-9, atol=1e-12)
        # a state of the stack, back into parts, and out again
        parts.load_state(expected)
    else:
        assert parts.weights(0) == {}
        parts.load_state({"alive": parts.alive, "step": parts.step})
    again = parts.state()
    if team.leads:
        assert all(torch.equal(again[n], expected[n]) for n in ("params", "moment1", "moment2", "alive"))
    found[f"{config.architecture} {broken}"] = record
Path(out, f"{team.rank}.json").write_text(json.dumps(found))
"""


def steps(out: Path, cases: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Three updates beside those of a `Stack`, by architecture and what breaks in the second; what each process found."""
    configs = {name: with_(architecture=name).save(out / f"{name}.toml") for name, _ in cases}
    together(STEPS, out, *(f"{broken}:{configs[name]}" for name, broken in cases))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = [("looped", ""), ("block_attn_res", ""), ("pre_ln", "gradient"), ("pre_ln", "loss")]
    return steps(tmp_path_factory.mktemp("updated"), cases)


def check_updates(lead: dict[str, Any]) -> None:
    assert lead["norms"][1] == pytest.approx(lead["norms"][0], rel=1e-12)
    assert max(lead["errors"].values()) < 1e-10


@pytest.mark.parametrize("name", ["looped", "block_attn_res"])
def test_parts_are_half_and_the_updates_those_of_a_stack(updated: list[dict[str, Any]], name: str) -> None:
    lead, other = (record[f"{name} "] for record in updated)
    check_updates(lead)
    for kind in ("param", "moment1", "moment2", "grads"):
        counts = lead["own"][kind], other["own"][kind]
        assert len(counts[0]) == len(counts[1]) == lead["tensors"]
        assert sum(map(sum, counts)) == lead["size"]
        assert [sum(part) / lead["size"] for part in counts] == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize("broken", ["gradient", "loss"])
def test_what_is_not_finite_freezes_the_run_in_all_processes(updated: list[dict[str, Any]], broken: str) -> None:
    lead, other = (record[f"pre_ln {broken}"] for record in updated)
    assert lead["stack_alive"] is lead["alive"] is other["alive"] is False
    assert lead["step"] == other["step"] == 3
    assert lead["rates"] == other["rates"] == [0.0]
    assert max(lead["errors"].values()) < 1e-10  # of weights that stay those before the step that broke


@pytest.mark.slow
def test_every_architecture_trains_in_parts(tmp_path: Path) -> None:
    for lead in steps(tmp_path, [(name, "") for name in OPTIONS])[0].values():
        check_updates(lead)


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("runs", "team", "device", "told"),
    [
        ([CONFIG, with_(seed=1)], Team(0, 2), "cpu", "fsdp shares out one run at a time, and these are 2"),
        ([CONFIG], Team(), "cpu", "there is one: start it with torchrun --nproc-per-node 2, or more"),
        ([CONFIG], Team(0, 2), "mps", "fsdp runs on cpu and cuda, not on device='mps'"),
    ],
)  # fmt: skip
def test_one_sentence_for_what_cannot_be_shared_out(runs: list[RunConfig], team: Team, device: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sharded(runs, team, device=device)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_one_process_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is one: start it with"):
        train([CONFIG], tmp_path, fsdp=True)
    with pytest.raises(ConfigError, match="there is one: start it with"):
        launch([CONFIG], tmp_path, fsdp=True)
    with pytest.raises(ConfigError, match="backend='native' can't train a run that fsdp shares out"):
        train([CONFIG], tmp_path, fsdp=True, backend="native")


def test_workers_of_a_team_are_those_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in ({"workers": 2}, {"engine": "dask"}):
        with pytest.raises(ConfigError, match="under torchrun its processes train one run together"):
            launch([CONFIG], tmp_path, **options)  # type: ignore[arg-type]


def test_the_command_line_refuses_a_batch_system(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "embedded:tiny", "--fsdp", "--slurm", "4"])
    assert "--fsdp and --slurm exclude each other" in capsys.readouterr().err

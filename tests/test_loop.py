"""The training loop: what it leaves on disk, exact resumption, trunks, divergence, and one-sentence refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("torch")

import msgspec
import torch

from scalinglab.collecting import collect
from scalinglab.config import Evaluation, Optimizer, RunConfig, Schedule, ShapeSpec
from scalinglab.errors import ConfigError, ScalinglabWarning
from scalinglab.train import checkpoints, fused
from scalinglab.train.jobs import stack_id
from scalinglab.train.loop import Stopped, train
from scalinglab.train.runlog import RunLog, is_logged
from scalinglab.train.scaling import build
from scalinglab.train.schedule import branch_step, share

SHAPE = ShapeSpec(depth=1, width=16, heads=2, ffn_dim=32, vocab=8, context=32)
CONFIG = RunConfig(
    shape=SHAPE, lr=5e-3, tokens=50 * 64, corpus="automaton", corpus_options={"width": 8}, batch=2,
    evaluation=Evaluation(sequences=16, every=20),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def with_(**fields):
    return msgspec.structs.replace(CONFIG, **fields)


def logged(out, config):
    return [json.loads(line) for line in (out / config.run_id / "log.jsonl").read_text().splitlines()]


def bytes_of(out, *configs):
    return [
        (
            (out / c.run_id / "log.jsonl").read_bytes(),
            json.loads((out / c.run_id / "summary.json").read_text())["weights_sha256"],
        )
        for c in configs
    ]


# --------------------------------------------------------------------------------------------------------------- a run


def test_what_a_run_leaves(tmp_path):
    pair = [CONFIG, with_(seed=1, lr=1e-3)]
    summaries = train(pair, tmp_path)
    assert [s["run_id"] for s in summaries] == [c.run_id for c in pair]
    assert not any((tmp_path / ".stacks").iterdir())
    for config, summary in zip(pair, summaries, strict=True):
        assert summary["status"] == "finished"
        assert (summary["step"], summary["tokens"]) == (50, 50 * 64)
        assert summary["floor"] < summary["loss"] < summary["loss_initial"]
        assert abs(summary["loss_initial"] - np.log(8)) < 0.1
        assert summary["excess"] == pytest.approx(summary["loss"] - summary["floor"], abs=0.05)
        assert 0 < summary["loss_se"] < 0.1
        assert set(summary["by_difficulty"]) == {"1", "2", "3", "4"}
        lines = logged(tmp_path, config)
        assert [x["step"] for x in lines if x["kind"] == "eval"] == [0, 20, 40, 50]
        assert [x["step"] for x in lines if x["kind"] == "train"] == list(range(1, 51))
        assert RunConfig.load(tmp_path / config.run_id / "config.toml").run_id == config.run_id
        model = build(config)
        model.load_state_dict(torch.load(tmp_path / config.run_id / "weights.pt", weights_only=True))
        assert sum(p.numel() for p in model.parameters()) == summary["params"]


def test_combinations_that_training_never_shows_are_evaluated_apart(tmp_path):
    options = {"rules": [110, 30], "max_steps": 2, "held_out": [[110, 1], [30, 2]], "width": 8}
    summary = train([with_(corpus_options=options)], tmp_path)[0]
    assert set(summary["held_out_by_difficulty"]) == set(summary["by_difficulty"]) == {"1", "2"}
    row = collect(tmp_path).iloc[0]
    assert row["held_out_loss_difficulty_2"] == summary["held_out_by_difficulty"]["2"]["loss"]
    assert "held_out_by_difficulty" not in train([CONFIG], tmp_path)[0]


def test_a_finished_run_is_left_alone(tmp_path):
    first = train([CONFIG], tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert train([CONFIG], tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_one_seed_reads_one_stream(tmp_path):
    # At step 1 the loss depends on the data and the initial weights only, and both on the seed only.
    runs = [CONFIG, with_(lr=1e-3), with_(seed=3)]
    train(runs, tmp_path)
    first = [logged(tmp_path, c)[1]["loss"] for c in runs]
    assert first[0] == first[1] != first[2]


def test_bfloat16_and_float64_agree_with_float32(tmp_path):
    losses = {p: train([with_(precision=p)], tmp_path)[0]["loss"] for p in ("fp32", "fp64", "bf16")}
    assert losses["fp32"] == pytest.approx(losses["fp64"], abs=1e-4)
    assert losses["bf16"] == pytest.approx(losses["fp64"], abs=1e-2)
    assert losses["bf16"] != losses["fp32"]


# -------------------------------------------------------------------------------------------------------------- resume

KILLED = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from scalinglab.config import RunConfig
from scalinglab.train.loop import train
train([RunConfig.load(p) for p in sys.argv[2:]], Path(sys.argv[1]), checkpoint_seconds=0.0,
      report=lambda p: print(p.step, flush=True))
"""


def start(out, configs):
    files = [str(c.save(out.parent / f"{c.run_id}.toml")) for c in configs]
    return subprocess.Popen([sys.executable, "-c", KILLED, str(out), *files], stdout=subprocess.PIPE, text=True)


def test_kill_9_at_random_steps_ends_in_the_same_bytes(tmp_path):
    pair = [CONFIG, with_(seed=1, lr=1e-3)]
    train(pair, tmp_path / "whole")
    rng = np.random.default_rng(0)
    for step in rng.choice(np.arange(3, 48), 2, replace=False):
        process = start(tmp_path / "cut", pair)
        for line in process.stdout:
            if int(line) >= step:
                break
        time.sleep(float(rng.random()) * 0.02)
        process.kill()
        process.wait()
        process.stdout.close()
    assert (tmp_path / "cut" / ".stacks" / stack_id(pair)).exists()
    train(pair, tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", *pair) == bytes_of(tmp_path / "whole", *pair)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(tmp_path, number):
    train([CONFIG], tmp_path / "whole")

    def interrupt(progress):
        if progress.step == 17:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped, match="stopped at step 17 of 50; the same call goes on from there"):
        train([CONFIG], tmp_path / "cut", report=interrupt)
    steps = []
    train([CONFIG], tmp_path / "cut", report=lambda p: steps.append(p.step))
    assert steps[0] == 18
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)


def stop_at(step, out, config=CONFIG):
    def interrupt(progress):
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train([config], out, report=interrupt, checkpoint_seconds=0.0)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    train([CONFIG], tmp_path / "whole")
    stop_at(23, tmp_path / "cut")
    path = tmp_path / "cut" / ".stacks" / stack_id([CONFIG]) / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.warns(ScalinglabWarning, match="is damaged or of other runs; using the one before it"):
        train([CONFIG], tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)


def test_a_flipped_bit_anywhere_is_damage(tmp_path):
    """torch itself loads most of these: it doesn't check its zip records."""
    state = {"params": torch.arange(400.0), "step": 3}
    data = checkpoints.seal(checkpoints.encode(state))
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(data)
    assert torch.equal(checkpoints.read(path)["params"], state["params"])
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        assert checkpoints.read(path) is None


def test_a_checkpoint_is_data_and_never_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch /tmp/should-not-exist",)

    torch.save({"params": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.warns(ScalinglabWarning, match="damaged"):
        assert checkpoints.load(tmp_path, fits=lambda state: True) is None


def test_a_torn_line_is_no_line(tmp_path):
    train([CONFIG], tmp_path / "whole")
    stop_at(23, tmp_path / "cut")
    log = tmp_path / "cut" / CONFIG.run_id / "log.jsonl"
    with log.open("ab") as file:
        file.write(b'{"kind":"train","st')
    train([CONFIG], tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)


def test_lost_lines_come_back_from_the_checkpoint(tmp_path):
    train([CONFIG], tmp_path / "whole")
    stop_at(23, tmp_path / "cut")
    log = tmp_path / "cut" / CONFIG.run_id / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:5]))
    train([CONFIG], tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)


def test_a_foreign_line_is_not_kept_in_the_log(tmp_path):
    train([CONFIG], tmp_path / "whole")
    stop_at(23, tmp_path / "cut")
    log = tmp_path / "cut" / CONFIG.run_id / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], b'{"kind":"train","step":4,"loss":0}\n', *lines[5:]]))
    with pytest.warns(
        ScalinglabWarning, match="has other lines than this training gives; it is kept as log.jsonl.replaced"
    ):
        train([CONFIG], tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)
    assert b'"loss":0}' in log.with_name("log.jsonl.replaced").read_bytes()


def test_run_log_passes_over_what_is_written(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    log.write(step=1)
    log.write(step=2)
    again = RunLog(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        again.write(step=step)
    assert (tmp_path / "log.jsonl").read_text() == '{"step":1}\n{"step":2}\n{"step":3}\n'


def test_a_checkpoint_of_other_runs_is_not_used(tmp_path):
    train([CONFIG], tmp_path / "whole")
    stop_at(23, tmp_path / "cut")
    folder = tmp_path / "cut" / ".stacks" / stack_id([CONFIG])
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        state = checkpoints.read(folder / name)
        (folder / name).write_bytes(checkpoints.encode({**state, "run_ids": ["another"]}))
    with pytest.warns(ScalinglabWarning, match="damaged or of other runs"):
        train([CONFIG], tmp_path / "cut")
    assert bytes_of(tmp_path / "cut", CONFIG) == bytes_of(tmp_path / "whole", CONFIG)


def test_a_damaged_config_is_written_anew(tmp_path):
    folder = tmp_path / CONFIG.run_id
    folder.mkdir()
    (folder / "config.toml").write_text("x = [")
    with pytest.warns(ScalinglabWarning, match="is not the config of its run"):
        train([CONFIG], tmp_path)
    assert RunConfig.load(folder / "config.toml").run_id == CONFIG.run_id


def test_data_that_changed_under_a_run_are_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 500)
    run = with_(corpus="text", corpus_options={"path": str(text)}, evaluation=Evaluation(sequences=2))
    stop_at(7, tmp_path / "out", run)
    text.write_text("abdc" * 500)
    with pytest.raises(ConfigError, match="the data of run .* changed since it began"):
        train([run], tmp_path / "out")


def test_a_worse_evaluation_is_not_divergence(tmp_path):
    # Training sees "abab", the held-out end of the file "aaaa": what is learnt does harm there, as in overfitting.
    text = tmp_path / "text.txt"
    text.write_text("ab" * 1000 + "a" * 105)
    run = with_(corpus="text", corpus_options={"path": str(text)}, evaluation=Evaluation(sequences=2))
    summary = train([run], tmp_path / "out")[0]
    assert summary["loss"] > summary["loss_initial"]
    assert summary["status"] == "finished"


def test_lines_thin_out():
    steps = [s for s in range(1, 100_001) if is_logged(s)]
    assert steps[:32] == list(range(1, 33))
    per_octave = np.histogram(steps, bins=2 ** np.arange(5, 17) - 0.5)[0]
    assert set(per_octave) == {32}


# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear", "constant"])
def test_schedules(kind):
    config = with_(schedule=Schedule(kind=kind, warmup=0.2, final=0.25, decay=0.4), tokens=100 * 64)
    shares = [share(step, config) for step in range(100)]
    assert shares[0] == 1 / 20
    assert shares[19] == 1.0
    assert shares[-1] == pytest.approx(1.0 if kind == "constant" else 0.25)
    assert all(0 < s <= 1 for s in shares)
    assert shares[60] == pytest.approx(
        {"cosine": 0.25 + 0.75 * 0.5 * (1 + np.cos(np.pi * 41 / 80)), "wsd": 1 - 0.75 / 40, "linear": 1 - 0.75 * 41 / 80}
        .get(kind, 1.0)
    )  # fmt: skip


def test_warmup_in_tokens():
    config = with_(schedule=Schedule(warmup_tokens=10 * 64))
    assert [share(s, config) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]


def test_a_trunk_is_trained_once_and_changes_nothing(tmp_path):
    schedule = Schedule(kind="wsd", warmup_tokens=5 * 64, decay=0.2)
    ladder = [with_(schedule=schedule, tokens=steps * 64) for steps in (25, 50, 100)]
    for rung in ladder:
        train([rung], tmp_path / "apart" / str(rung.tokens))
    seen = {}
    for rung in ladder:
        seen[rung.tokens] = []
        train([rung], tmp_path / "ladder", report=lambda p, s=seen[rung.tokens]: s.append(p.step))
    assert [s[0] for s in seen.values()] == [1, 21, 41]  # behind the branch points 20 and 40
    for rung in ladder:
        assert bytes_of(tmp_path / "ladder", rung) == bytes_of(tmp_path / "apart" / str(rung.tokens), rung)
    assert branch_step(ladder[-1]) == 80


# ---------------------------------------------------------------------------------------------------------- divergence


def test_divergence_is_a_status(tmp_path):
    wild = with_(lr=1e12, optimizer=Optimizer(grad_clip=float("inf")), precision="fp32")
    good, bad = train([CONFIG, wild], tmp_path)
    assert good["status"] == "finished"
    assert bad["status"] == "diverged"
    assert np.isfinite(bad["last_finite_loss"])
    assert bytes_of(tmp_path, CONFIG)
    alone = train([with_(lr=1e12, optimizer=Optimizer(grad_clip=float("inf")))], tmp_path / "alone")[0]
    assert (alone["status"], alone["step"]) == ("diverged", bad["step"])


# --------------------------------------------------------------------------------------------------------- several processes

TEAM = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from scalinglab.config import RunConfig
from scalinglab.train.loop import train
train([RunConfig.load(p) for p in sys.argv[2:]], Path(sys.argv[1]))
"""


def test_two_processes_share_a_run(tmp_path):
    pair = [with_(precision="fp64"), with_(precision="fp64", seed=1)]
    alone = train(pair, tmp_path / "alone")
    files = [str(c.save(tmp_path / f"{c.run_id}.toml")) for c in pair]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TEAM, str(tmp_path / "team"), *files], env={**os.environ, **store, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [p.wait(timeout=300) for p in processes] == [0, 0]
    for config, summary in zip(pair, alone, strict=True):
        team = json.loads((tmp_path / "team" / config.run_id / "summary.json").read_text())
        assert team["loss"] == pytest.approx(summary["loss"], abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"corpus": "automata"}, "corpus='automata' is unknown; choose one of automaton"),
        ({"corpus_options": {"widht": 3}}, "corpus_options.widht is unknown for corpus 'automaton'"),
        ({"corpus": "text", "corpus_options": {}}, "needs corpus_options.path"),
        ({"corpus": "hierarchy", "corpus_options": {}}, "symbols, more than shape.vocab=8"),
        ({"corpus_options": {"width": 40}}, "width"),
    ],
)
def test_one_sentence_for_a_bad_run(tmp_path, fields, match):
    with pytest.raises(ConfigError, match=match):
        train([with_(**fields)], tmp_path)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta"])
def test_a_device_that_is_not_here(tmp_path, device):
    with pytest.raises(ConfigError, match=f"device='{device}'"):
        train([CONFIG], tmp_path, device=device)


def test_a_text_shorter_than_the_context(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    run = with_(corpus="text", corpus_options={"path": str(tmp_path / "short.txt")})
    with pytest.raises(ConfigError, match="too few for a context of 32"):
        train([run], tmp_path)


# -------------------------------------------------------------------------------------------------------------- backends


def test_native_kernels_train_the_same_run(tmp_path):
    if (reason := fused.available()) is not None:
        pytest.skip(f"native kernels: {reason}")
    summaries = {b: train([CONFIG], tmp_path / b, backend=b)[0] for b in ("torch", "native")}
    assert [s["backend"] for s in summaries.values()] == ["torch", "native"]
    assert summaries["native"]["loss"] == pytest.approx(summaries["torch"]["loss"], abs=1e-4)
    assert summaries["native"]["weights_sha256"] != summaries["torch"]["weights_sha256"]


def test_native_where_it_cannot_run(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match="backend='native' can't run here: the native kernels compute in fp32, not in fp64"
    ):
        train([with_(precision="fp64")], tmp_path, backend="native")
    monkeypatch.setattr(fused, "available", lambda: "no C++ compiler")
    with pytest.warns(ScalinglabWarning, match="torch instead of the faster native kernels: no C\\+\\+ compiler"):
        assert train([CONFIG], tmp_path)[0]["backend"] == "torch"

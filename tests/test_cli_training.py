"""plan, train, collect, coords and probe on the command line: what they print, and that what can't be done is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from run_folders import config, write_grid, write_run

from scalinglab import cli
from scalinglab.config import Sweep
from scalinglab.planning import expand
from scalinglab.sweeps import load_sweep, sweep_path
from scalinglab.train.slurm import slurm_script

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("joblib") is None, reason="needs torch: pip install 'scalinglab[train]'"
)

SWEEP = """
name = "ci"
architectures = ["pre_ln", "post_ln"]
lrs = [0.01]
seeds = [0, 1]
[run]
corpus = "automaton"
corpus_options = { width = 4 }
tokens = 512
batch = 2
[run.evaluation]
sequences = 4
[match]
budget = 1300
depths = [1, 2]
heads = 1
vocab = 8
context = 32
ffn_multiple = 2
ffn_slack = 0.5
tolerance = 0.05
"""


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(args))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return path


def test_plan_prints_cells_costs_and_the_audit(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.csv"
    assert run("plan", str(sweep), "--no-timing", "--sigma", "0.02", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert said.startswith("Sweep ci: 8 runs")
    assert "wall time not predicted (--no-timing)" in said
    assert "sigma 0.02 nats (given)" in said
    assert "Smallest visible effects" in said
    assert len(pd.read_csv(out)) == 8
    runs = expand(Sweep.load(sweep)).runs
    for depth in {r.shape.depth for r in runs}:
        assert any(line.split()[:2] == ["pre_ln", str(depth)] for line in said.splitlines())


def test_plan_states_the_noise_that_it_assumes(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", str(sweep), "--no-timing") == 0
    assert "sigma 0.003 nats (assumed" in capsys.readouterr().out


@needs_torch
def test_train_collect_fit(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "runs", tmp_path / "table.csv"
    assert run("train", str(sweep), "--out", str(out), "--workers", "1", "--shard", "1/2") == 0
    assert run("train", str(sweep), "--out", str(out), "--workers", "1", "--quiet") == 0
    said = capsys.readouterr()
    assert "were finished before" in said.out
    assert "[" in said.err, "a line per job on stderr"
    assert run("collect", str(out), "--out", str(table)) == 0
    assert len(pd.read_csv(table)) == 8
    assert run("collect", str(out)) == 0
    assert "excess" in capsys.readouterr().out
    assert run("audit", str(out)) == 0
    one = next(out.glob("pre_ln-L2-*"))
    assert run("probe", str(one), "--sequences", "2", "--out", str(tmp_path / "probes")) == 0
    assert [p.name for p in (tmp_path / "probes").iterdir()] == [f"{one.name}.json"]


@needs_torch
def test_a_later_sitting_trains_what_no_table_has(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the runs, collected; then all with --have: only the rest is trained, and --add joins both tables."""
    first = tmp_path / "first.toml"
    first.write_text(SWEEP.replace("seeds = [0, 1]", "seeds = [0]"))
    one, two, table, whole = (tmp_path / name for name in ("one", "two", "one.csv", "whole.csv"))
    assert run("train", str(first), "--out", str(one), "--workers", "1", "--quiet") == 0
    assert run("collect", str(one), "--out", str(table)) == 0
    capsys.readouterr()
    assert run("train", str(sweep), "--out", str(two), "--workers", "1", "--quiet", "--have", str(table)) == 0
    assert "4 runs trained" in (told := capsys.readouterr().out)
    assert "4 were finished before" in told
    assert run("collect", str(two), "--add", str(table), "--out", str(whole)) == 0
    made, old = pd.read_csv(whole), pd.read_csv(table)
    assert set(made["run_id"]) == {r.run_id for r in expand(load_sweep(sweep)).runs}
    kept = made.set_index("run_id").loc[old["run_id"]]
    assert kept["loss"].tolist() == old["loss"].tolist()
    assert run("collect", str(one), "--add", str(table), "--out", str(whole)) == 0  # nothing comes up twice
    assert len(pd.read_csv(whole)) == 4


@pytest.mark.parametrize(
    ("text", "told"), [(None, "there is no such table"), ("run_id,loss\na,1\n", "has no column status")]
)
def test_an_earlier_table_that_is_none_is_one_sentence(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, told: str
) -> None:
    path = tmp_path / "old.csv"
    if text is not None:
        path.write_text(text)
    write_run(tmp_path / "runs", config())
    assert run("collect", str(tmp_path / "runs"), "--add", str(path)) == 2
    assert told in capsys.readouterr().err


@needs_torch
def test_plan_predicts_the_wall_time(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", str(sweep), "--seconds", "3", "--workers", "1") == 0
    said = capsys.readouterr().out
    assert "wall time about" in said
    assert "timed" in said


def test_the_folder_of_the_trainer_is_read_by_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    write_grid(out, lambda n, d: 0.2 + 20 * n**-0.5 + 30 * d**-0.4)
    assert run("fit", str(out), "--law", "chinchilla", "--quiet") == 0
    assert "alpha" in capsys.readouterr().out


def test_without_torch_one_sentence_says_what_to_install(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scalinglab.cli import training

    monkeypatch.setattr(training, "find_spec", lambda name: None)
    for verb in (("train", str(sweep), "--out", str(tmp_path / "r")), ("coords", str(sweep)), ("probe", str(tmp_path))):
        assert run(*verb) == 2
        err = capsys.readouterr().err
        assert "pip install 'scalinglab[train]'" in err
        assert len(err.strip().splitlines()) == 1
    assert run("plan", str(sweep)) == 0
    assert "not predicted: training needs torch" in capsys.readouterr().out
    assert run("train", str(sweep), "--slurm", "2") == 0
    write_run(tmp_path / "runs", config(), 1.0)
    assert run("collect", str(tmp_path / "runs")) == 0


def test_planning_imports_no_torch(sweep: Path) -> None:
    code = (
        "import sys\nfrom scalinglab import cli\n"
        f"try:\n    cli.main(['plan', {str(sweep)!r}, '--no-timing'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_the_parser_of_a_verb_imports_neither_pandas_nor_torch() -> None:
    code = (
        "import sys\nfrom scalinglab import cli\n"
        "try:\n    cli.main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'matplotlib', 'joblib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("budget = 1300", "budget = 13"), "nearest legal shape is width"),
        (("tolerance = 0.05", "tolerance = 0.0001"), "comes within 0.0001"),
        (("heads = 1", "heads = 1\nhead_dim = 8"), "fix either heads or head_dim"),
        (("tokens = 512", "token = 512"), "run.token"),
        (("sequences = 4", "sequence = 4"), "run.evaluation.sequence (did you mean sequences?)"),
        (("depths = [1, 2]", "depths = [1, 2]\ncolour = 1"), "match"),
        (('["pre_ln", "post_ln"]', '["pre_lm"]'), "pre_lm"),
        (('name = "ci"', ""), "name"),
        (("[match]", "[match"), "not TOML"),
    ],
)
def test_a_sweep_that_cannot_be_planned_is_one_sentence(
    sweep: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], told: str
) -> None:
    assert change[0] in SWEEP
    sweep.write_text(SWEEP.replace(*change))
    for verb in (("plan", str(sweep), "--no-timing"), ("train", str(sweep), "--slurm", "1")):
        assert run(*verb) == 2
        err = capsys.readouterr().err
        assert told in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("plan", "nowhere.toml"), "nowhere.toml"),
        (("plan", "embedded:tinny"), "did you mean 'tiny'"),
        (("train", "embedded:tiny", "--shard", "0/2"), "write I/N"),
        (("train", "embedded:tiny", "--shard", "half"), "write I/N"),
        (("train", "embedded:tiny", "--slurm", "0"), "stacks_per_task=0 must be positive"),
        (("train", "embedded:tiny", "--slurm", "4", "--workers", "0"), "workers=0 must be at least 1"),
        (("train", "embedded:tiny", "--slurm", "4", "--shard", "1/2"), "--shard 1/2 and --slurm 4 exclude each other"),
        (("train", "embedded:tiny", "--address", "tcp://h:1"), "--address tcp://h:1 is of a cluster"),
        (("train", "embedded:tiny", "--slurm", "4", "--address", "tcp://h:1"), "--address tcp://h:1 is of a cluster"),
        (("plan", "embedded:tiny", "--workers", "-2"), "--workers -2: give 1 or more"),
        (("plan", "embedded:tiny", "--workers", "0", "--no-timing"), "--workers 0: give 1 or more"),
        (("coords", "embedded:tiny", "--seeds", "1"), "one seed has no interval"),
        (("coords", "embedded:tiny", "--steps", "0"), "--steps 0: give 1 or more"),
        (("coords", "embedded:tiny", "--sizes", "height=1,2"), "--sizes height=1,2: write width=64,128,256"),
        (("coords", "embedded:tiny", "--sizes", "depth=1,x"), "--sizes depth=1,x: write"),
        (("collect", "nowhere"), "is not a folder"),
        (("collect", ".", "--out", "table.txt"), "must end in"),
        (("coords", "embedded:tiny", "--seeds", "0"), "--seeds 0"),
        (("probe",), "no run directory is given"),
    ],
)
def test_unusable_requests_say_why(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], told: str) -> None:
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('corpus = "automaton"', 'corpus = "novel"'), "corpus='novel' is unknown"),
        (("{ width = 4 }", "{ colour = 4 }"), "corpus_options.colour is unknown"),
        (
            (
                'corpus = "automaton"\ncorpus_options = { width = 4 }',
                'corpus = "text"\ncorpus_options = { path = "none.txt" }',
            ),
            "none.txt",
        ),
        (("{ width = 4 }", "{ width = 64 }"), "context = 32: an automaton 64 cells wide"),
        (("vocab = 8", "vocab = 4"), "more than vocab=4"),
    ],
)
def test_data_that_a_sweep_cannot_be_trained_on_is_found_by_plan(
    sweep: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], told: str
) -> None:
    assert change[0] in SWEEP
    sweep.write_text(SWEEP.replace(*change))
    assert run("plan", str(sweep), "--no-timing") == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.strip().splitlines()) == 1


ONE = """
name = "one"
lrs = [0.01]
[run]
corpus = "automaton"
corpus_options = { width = 4 }
tokens = 512
batch = 2
[run.evaluation]
sequences = 4
[run.shape]
depth = 1
width = 6
heads = 2
ffn_dim = 8
vocab = 8
context = 32
"""


@needs_torch
def test_a_model_that_cannot_be_made_is_found_by_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head of 3 entries can't be rotated."""
    path = tmp_path / "one.toml"
    path.write_text(ONE)
    assert run("plan", str(path), "--seconds", "0") == 2
    assert "head_dim=3 must be even" in capsys.readouterr().err


@needs_torch
def test_no_such_device_is_one_sentence(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, config(), 1.0)
    for args in (("probe", str(folder), "--device", "cuda:77"), ("plan", str(sweep), "--device", "cuda:77")):
        assert run(*args) == 2
        err = capsys.readouterr().err
        assert "device='cuda:77' can't be used here" in err
        assert len(err.strip().splitlines()) == 1


def test_one_is_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.toml"
    path.write_text(ONE.replace("width = 6", "width = 8"))
    assert run("plan", str(path), "--no-timing") == 0
    assert capsys.readouterr().out.startswith("Sweep one: 1 run\n")
    write_run(tmp_path / "runs", config(), 1.0)
    assert run("collect", str(tmp_path / "runs")) == 0
    assert "1 row, 1 run\n" in capsys.readouterr().err


def cells(said: str) -> list[str]:
    """The lines of the plan's table, less the header."""
    table = said.split("\n\n")[0].splitlines()
    return table[2:]


def test_lines_of_the_plan_are_told_apart_by_what_varies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        ONE.replace("width = 6", "width = 8")
        .replace('lrs = [0.01]', 'lrs = [0.01, 0.02]\nseeds = [0, 1]\n'
                 'architectures = [{name = "hyper_connections", options = {streams = 2}}, '
                 '{name = "hyper_connections", options = {streams = 4}}]\n'
                 'corpora = [{name = "automaton", options = {width = 4}}, {name = "automaton", options = {width = 5}}]')
    )  # fmt: skip
    assert run("plan", str(path), "--no-timing") == 0
    said = capsys.readouterr().out
    lines = cells(said)
    assert len(lines) == len(set(lines)) == 4
    header = said.splitlines()[1].split()
    assert {"options", "corpus_options"} <= set(header)
    assert not {"vocab", "context", "init_std", "lr", "seed"} & set(header), "what doesn't vary, or is counted"
    assert all(line.split()[header.index("runs")] == "4" or " 4 " in line for line in lines)


def test_a_shared_trunk_is_counted_once_by_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.toml"
    ladder = "lrs = [0.01]\nbudgets = [{tokens = 512}, {tokens = 1024}]"
    wsd = '[run.schedule]\nkind = "wsd"\nwarmup_tokens = 64\n[run.evaluation]'
    path.write_text(
        ONE.replace("width = 6", "width = 8").replace("tokens = 512\n", "", 1).replace("lrs = [0.01]", ladder)
        .replace("[run.evaluation]", wsd)
    )  # fmt: skip
    assert run("plan", str(path), "--no-timing") == 0
    said = capsys.readouterr().out
    assert "note: runs that differ in tokens alone share the trunk" in said
    from scalinglab.planning import plan as plan_runs

    flops = plan_runs(load_sweep(str(path)))["flops_causal"]
    # 8 and 16 steps; the longer one goes on where the shorter one's decay began, after 6
    assert f"FLOPs {flops.iloc[0] + flops.iloc[1] * 10 / 16:.3g} (causal)" in said
    assert f"in place of {flops.sum():.3g}" in said
    path.write_text(path.read_text().replace('kind = "wsd"\nwarmup_tokens = 64\n', ""))
    assert run("plan", str(path), "--no-timing") == 0
    assert "trunk" not in capsys.readouterr().out


def test_an_output_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("train", "embedded:tiny", "--out", str(tmp_path / "file" / "runs")) == 2
    assert "is a file" in capsys.readouterr().err


@needs_torch
def test_failed_runs_make_exit_code_1(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalinglab.train import loop

    def train(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(loop, "train", train)
    assert run("train", str(sweep), "--out", str(tmp_path / "r"), "--workers", "1") == 1


def test_slurm_script_covers_all_jobs_and_is_bash(sweep: Path, tmp_path: Path) -> None:
    text = slurm_script(sweep, tmp_path / "my runs", stacks_per_task=3, hours=1.5, partition="cpu")
    assert "#SBATCH --array=1-2\n" in text, "four stacks, three a task"
    assert "--shard ${SLURM_ARRAY_TASK_ID}/2 " in text
    assert "#SBATCH --time=01:30:00\n" in text
    assert "#SBATCH --partition=cpu\n" in text
    assert f"--out '{tmp_path}/my runs'" in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_embedded_sweeps_can_be_planned() -> None:
    for path in sorted(sweep_path("embedded:tiny").parent.glob("*.toml")):
        read = load_sweep(f"embedded:{path.stem}")
        assert read.name == path.stem
        expansion = expand(read)
        assert expansion.runs
        assert not [note for note in expansion.notes if "duplicate" in note]


def test_the_tiny_sweep_is_what_it_says() -> None:
    runs = expand(load_sweep("embedded:tiny")).runs
    assert len(runs) == 24
    assert {r.architecture for r in runs} == {"pre_ln", "hyper_connections", "attn_res"}
    assert {r.shape.depth for r in runs} == {1, 2, 4, 8}
    assert all(r.norm_eps == 1e-8 for r in runs)
    # sizes and heads that the fused kernels take, and a vocabulary that the corpus fits
    assert all(n % 8 == 0 for r in runs for n in (r.shape.width, r.shape.head_dim, r.shape.vocab))


def test_the_slurm_script_carries_the_options(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--device",
        "cuda",
        "--backend",
        "torch",
        "--workers",
        "3",
        "--engine",
        "dask",
        "--address",
        "tcp://h:8786",
    )
    assert run("train", str(sweep), "--slurm", "3", *asked, "--quiet") == 0
    text = capsys.readouterr().out
    (command,) = (line for line in text.splitlines() if line.startswith("scalinglab train"))
    for name, value in zip(asked[::2], asked[1::2], strict=True):
        assert f"{name} {value}" in command
    assert command.endswith("--quiet &")
    assert "#SBATCH --gres=gpu:1\n" in text
    assert "#SBATCH --cpus-per-task=3\n" in text
    assert run("train", str(sweep), "--slurm", "3") == 0
    plain = capsys.readouterr().out
    assert "--workers $SLURM_CPUS_PER_TASK &\n" in plain
    assert "gpu" not in plain


def checks_of(monkeypatch: pytest.MonkeyPatch, *checks: object, stop: bool = False) -> list[dict[str, object]]:
    """Let `coords` make these checks, then be stopped by Ctrl-C if asked; what it was called with."""
    from scalinglab.train import coordcheck

    seen: list[dict[str, object]] = []

    def made(sweep: object, *, done: object, **options: object) -> list[object]:
        seen.append(options)
        for check in checks:
            done(check)  # type: ignore[operator]
        if stop:
            raise KeyboardInterrupt
        return list(checks)

    monkeypatch.setattr(coordcheck, "coords", made)
    return seen


def check(slope: float, parametrization: str = "completep") -> object:
    """A check of a known exponent: 0 passes, 1 fails."""
    from scalinglab.coordinates import CoordinateCheck, limits_for

    values = {("z.change", 1): np.array([[1.0, 2.0**slope, 4.0**slope]] * 2)}
    return CoordinateCheck(
        architecture="pre_ln", parametrization=parametrization, axis="depth", sizes=(2, 4, 8), seeds=(0, 1), lr=1e-3,
        trainable="branch", values=values, limits=limits_for("depth", "branch"),
    )  # fmt: skip


@needs_torch
def test_coords_prints_and_saves_its_checks(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = checks_of(monkeypatch, check(0.0))
    out = tmp_path / "checks"
    asked = ("--seeds", "4", "--steps", "3", "--sizes", "depth=2,4,8", "width=32,64")
    assert run("coords", str(sweep), "--out", str(out), *asked) == 0
    assert "Coordinate check: pre_ln" in capsys.readouterr().out
    assert [p.name for p in out.iterdir()] == ["01-pre_ln-depth-branch.json"]
    assert (seen[0]["seeds"], seen[0]["steps"]) == (range(4), 3)
    assert seen[0]["sizes"] == {"depth": (2, 4, 8), "width": (32, 64)}


@needs_torch
@pytest.mark.parametrize(
    ("arms", "code"), [(["completep"], 1), (["sp"], 0), (["sp_gpt2"], 0), (["sp", "completep"], 1),
                       (["sp: matrix.branch.lr depth 0 -> -1"], 1)],
)  # fmt: skip
def test_only_arms_that_should_pass_make_exit_code_1(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arms: list[str], code: int
) -> None:
    checks_of(monkeypatch, *(check(1.0, arm) for arm in arms))
    assert run("coords", str(sweep)) == code
    said = capsys.readouterr().out
    assert ("1 check of sp or sp_gpt2 failed, as controls should" in said) == bool({"sp", "sp_gpt2"} & set(arms))
    assert [line.split(", ")[1] for line in said.splitlines() if line.startswith("failed: ")] == [
        arm for arm in arms if arm not in ("sp", "sp_gpt2")
    ]


@needs_torch
def test_coords_keeps_what_it_made_when_it_is_stopped(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks_of(monkeypatch, check(0.0), stop=True)
    out = tmp_path / "checks"
    assert run("coords", str(sweep), "--out", str(out)) == 130
    told = capsys.readouterr()
    assert "Coordinate check: pre_ln" in told.out
    assert [p.name for p in out.iterdir()] == ["01-pre_ln-depth-branch.json"]
    assert f"stopped after 1 check, 1 record written to {out}; the same command starts from the first" in told.err
    assert "goes on from there" not in told.err
    assert run("coords", str(sweep)) == 130
    assert "nothing was written (no --out)" in capsys.readouterr().err


@needs_torch
def test_probe_says_that_a_run_has_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from scalinglab.train.scaling import build

    for seed, status in enumerate(("finished", "diverged")):
        one = config(seed=seed)
        folder = write_run(tmp_path, one, 1.0, status=status)
        torch.save({k: v * (float("inf") if status == "diverged" else 1) for k, v in build(one).state_dict().items()},
                   folder / "weights.pt")  # fmt: skip
        record = json.loads((folder / "summary.json").read_text())
        del record["weights_sha256"]  # these are other weights
        (folder / "summary.json").write_text(json.dumps(record))
        assert (
            run(
                "probe",
                str(folder),
                "--sequences",
                "2",
                "--which",
                "growth",
                "removal",
                "--figures",
                str(tmp_path / "f"),
            )
            == 0
        )
        err = capsys.readouterr().err
        assert ("has diverged" in err) == (status == "diverged")
        assert "RuntimeWarning" not in err
        assert "UserWarning" not in err

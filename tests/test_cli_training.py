"""plan, train, collect, coords and probe on the command line: what they print, and that what can't be done is one sentence."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
        (("tolerance = 0.05", "tolerance = 0.0001"), "no legal shape comes within 0.0001"),
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
        (("collect", "nowhere"), "is not a folder"),
        (("collect", ".", "--out", "table.txt"), "must end in"),
        (("coords", "embedded:tiny", "--seeds", "0"), "--seeds 0"),
        (("probe",), "no run directory is given"),
    ],
)
def test_unusable_requests_say_why(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], told: str) -> None:
    assert run(*args) == 2
    assert told in capsys.readouterr().err


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


@needs_torch
def test_coords_prints_and_saves_its_checks(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scalinglab.train import coordcheck

    one = coordcheck.coordinate_check("pre_ln", "completep", axis="depth", sizes=(2, 4), seeds=(0, 1), steps=1)
    monkeypatch.setattr(coordcheck, "coords", lambda *_, **__: [one])
    out = tmp_path / "checks"
    assert run("coords", str(sweep), "--out", str(out)) == (1 if one.verdict == "fail" else 0)
    assert "Coordinate check: pre_ln" in capsys.readouterr().out
    assert [p.name for p in out.iterdir()] == [f"01-pre_ln-depth-{one.trainable}.json"]

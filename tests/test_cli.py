"""The command line: verbs, exit codes, and that bad input is one sentence and nothing written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from scalinglab import Fit, cli, read_runs

ONE = "architecture == 'pre_ln'"


def run(*args: str) -> int:
    """Exit code of a verb in this process."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(args))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    out = tmp_path / "shape.json"
    assert run("fit", "embedded:simulated_shapes", "--law", "shape", "--where", ONE, "--out", str(out)) == 0
    return out


def test_fit_prints_a_summary_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shape.json"
    assert run("fit", "embedded:simulated_shapes", "--law", "shape", "--where", ONE, "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert "Scaling law: shape" in printed.out
    assert "params           <- params_backbone" in printed.err or "params <- params_backbone" in printed.err
    record = json.loads(out.read_text())
    assert record["schema"] == "scalinglab/fit-1"
    assert record["status"] == "converged"
    assert abs(record["params"]["gamma2"] - 0.016) < 0.004  # the simulated truth, about four standard errors


def test_question_file_is_answered_beside_it(tmp_path: Path) -> None:
    asked = tmp_path / "q.toml"
    asked.write_text('runs = "embedded:simulated_shapes"\nlaw = "shape"\nby = "architecture"\nshare = "H2"\n')
    assert run("fit", str(asked)) == 0
    answer = Fit.load(tmp_path / "q.json")
    assert {"gamma1[pre_ln]", "gamma1[hyper_connections]", "alpha"} <= set(answer.params.index)


def test_unknown_key_in_a_question_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "q.toml"
    asked.write_text('runs = "embedded:simulated_shapes"\nlaws = "shape"\n')
    assert run("fit", str(asked)) == 2
    assert "q.toml" in capsys.readouterr().err
    assert not (tmp_path / "q.json").exists()


def test_compare_frontier_audit_laws_cite(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "compare.csv"
    args = (
        "compare",
        "embedded:simulated_shapes",
        "--where",
        ONE,
        "--laws",
        "chinchilla",
        "shape",
        "--out",
        str(table),
    )
    assert run(*args) == 0
    assert {"chinchilla", "shape"} <= set(pd.read_csv(table).astype(str).to_numpy().ravel())
    assert run("frontier", str(saved), "--flops", "1e20") == 0
    assert run("audit", "embedded:simulated_shapes", "--where", ONE) == 0
    assert run("laws") == 0
    assert run("cite") == 0
    out = capsys.readouterr().out
    assert "E + A*params**-alpha + B*tokens**-beta" in out
    for form, mark in (("markdown", "| "), ("latex", r"\toprule"), ("csv", "parameter,")):
        assert run("table", str(saved), "--form", form) == 0
        assert mark in capsys.readouterr().out


def test_figure_draws_named_figures(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figs"
    assert run("figure", str(saved), "shape_valley", "--out", str(out), "--formats", "png") == 0
    assert [p.name for p in out.iterdir()] == ["shape_valley.png"]
    assert run("figure", str(saved), "no_such_figure", "--out", str(out)) == 2


def test_import_writes_a_table_that_reads_back(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_text("name,n_layers,d_model,N_M,tokens,val_loss\na,4,64,5,1e9,4.0\nb,8,128,20,2e9,3.5\n")
    out = tmp_path / "table.csv"
    args = ("import", str(source), "--out", str(out), "--columns", "params=N_M*1e6", "run_id=name")
    assert run(*args) == 0
    back = read_runs(out, params="as given")
    assert back["params"].tolist() == [5e6, 20e6]
    assert back["run_id"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "empty"),
        ("params,tokens,loss\n", "no rows"),
        ("params,tokens\n1e6,1e9\n", "loss"),
        ("params,tokens,loss\n1e6,1e9,high\n", "high"),
        ("params,tokens,loss\n1e6,1e9,-3\n", "loss"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    path, out = tmp_path / "bad.csv", tmp_path / "out.json"
    path.write_text(content)
    assert run("fit", str(path), "--law", "chinchilla", "--out", str(out)) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "bad.csv" in err
    assert "Traceback" not in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("fit", "embedded:simulated_shapes"), "--law"),
        (("fit", "--law", "shape"), "no run log"),
        (("fit", "embedded:simulated_shapes", "--law", "shapes"), "did you mean 'shape'"),
        (("fit", "embedded:simulated_shapes", "--law", "__import__('os')"), "calls '__import__'"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--fixed", "alpha=x"), "not a number"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--objective", "hubris"), "objective 'hubris'"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--by", "nothing"), "by='nothing'"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--where", "depth < 0"), "row"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--where", "depth == 12"), "depth"),
        (("frontier", "missing.json"), "missing.json"),
        (("fit", ""), "--law is missing"),
        (("fit", "", "--law", "shape"), "no run log is given"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--seed", "-1"), "a seed is 0 or larger"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--level", "1.5"), "between 0 and 1"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--share", "E"), "needs by="),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--fixed", "E=10"), "not below the smallest loss"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--fixed", "E=nan"), "give a finite number"),
        (("fit", "embedded:simulated_shapes", "--law", "shape", "--out", "x.csv"), "must end in .json"),
        (("fit", "embedded:simulated_shapes", "--law", "E + A*parms**-alpha"), "did you mean 'params'"),
        (("fit", "embedded:simulated_shapes", "--law", "E + A*loss"), "what it is to predict"),
        (("fit", "embedded:simulated_shapes", "--law", "E + 1e999"), "no finite number"),
    ],
)
def test_unusable_requests_say_why(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], told: str) -> None:
    assert run(*args) == 2
    assert told in capsys.readouterr().err


def test_an_output_never_overwrites_an_input_nor_fails_after_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    text = "params,tokens,loss\n1e7,1e9,3.5\n"
    log.write_text(text)
    assert run("import", str(log), "--out", str(log)) == 2
    assert "is also the input" in capsys.readouterr().err
    assert run("fit", str(log), "--law", "chinchilla", "--out", str(log / "x.json")) == 2
    assert "is a file" in capsys.readouterr().err
    assert run("fit", str(log), "--law", "chinchilla", "--figures", str(log / "figs")) == 2
    assert log.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_frontier_of_a_fit_by_architecture_has_a_part_per_group_with_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, table = tmp_path / "f.json", tmp_path / "t.csv"
    args = ("fit", "embedded:simulated_shapes", "--law", "shape", "--by", "architecture", "--out", str(record))
    assert run(*args) == 0
    assert run("frontier", str(record), "--flops", "1e20", "--out", str(table)) == 0
    made = pd.read_csv(table)
    assert set(made["group"]) == {"pre_ln", "hyper_connections"}
    assert (made["params_low"] < made["params"]).all()
    # one interval for one quantity: the aspect ratio's is the Fieller set of the parameter table
    aspect = made.set_index("group").loc["pre_ln"]
    row = Fit.load(record).to_frame().loc["r_star[pre_ln]"]
    assert [aspect["aspect_low"], aspect["aspect_high"]] == pytest.approx([row["low"], row["high"]], rel=1e-9)


def test_exit_code_1_where_the_result_is_not_to_be_used(tmp_path: Path) -> None:
    ray = "tokens > 19 * params and tokens < 21 * params"
    path = tmp_path / "ray.csv"
    sizes = [1e7 * 1.5**k for k in range(12)]
    rows = [f"{n:.0f},{20 * n:.0f},{1.8 + 406 * n**-0.34 + 410 * (20 * n) ** -0.28:.6f}" for n in sizes]
    path.write_text("\n".join(["params,tokens,loss", *rows]))
    assert run("fit", str(path), "--law", "chinchilla", "--where", ray) == 1


def test_version_and_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "scalinglab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("scalinglab ")


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, scalinglab; "
        "print(sorted({'torch', 'matplotlib', 'scipy.stats', 'statsmodels', 'sympy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_exists() -> None:
    import scalinglab

    for name in scalinglab.__all__:
        assert getattr(scalinglab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = scalinglab.nothing

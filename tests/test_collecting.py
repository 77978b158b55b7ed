"""collect(): what is in the table, what is not accepted, and that every reader sees the same table."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import config, lines, write_grid, write_run

from scalinglab import SchemaError, audit, fit, read_runs
from scalinglab.collecting import collect, digest, evaluations, is_finished
from scalinglab.planning import row


def law(params: float, tokens: float) -> float:
    return 0.2 + 20 * params**-0.5 + 30 * tokens**-0.4


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_grid(out, law)
    return out


def test_a_row_has_the_plan_and_the_measurement(tmp_path: Path) -> None:
    run = config(depth=3, width=16, architecture="hyper_connections", sweep="s", match_group="m")
    write_run(tmp_path, run, 1.25)
    table = collect(tmp_path)
    assert len(table) == 1
    one, planned = table.iloc[0], row(run)
    for name, value in planned.items():
        if (
            name not in ("steps", "mismatch", "alpha") and value != ""
        ):  # alpha: none in "sp"; empty columns are left out
            assert one[name] == value, name
    assert one["params"] == planned["params_backbone"] > planned["params_extra"] > 0
    assert (one["loss"], one["loss_se"], one["status"], one["step"]) == (1.25, 0.01, "finished", run.steps)
    assert (one["excess"], one["accuracy_difficulty_1"]) == (1.15, 0.9)
    assert table.attrs["params"] == "backbone"


def test_fit_audit_and_read_runs_take_the_folder_as_it_is(grid: Path) -> None:
    table, read = collect(grid), read_runs(grid)
    pd.testing.assert_frame_equal(read, table, check_dtype=False)
    assert read.attrs["source"] == [{"path": str(grid), "sha256": digest(grid)}]
    assert not any("components" in note for note in read.attrs["notes"])
    found = fit("chinchilla", table)
    # the truth of the generator; seeds move the loss by 0.1 %, which moves the exponents by less than a tenth
    assert found.params["alpha"] == pytest.approx(0.5, abs=0.05)
    assert found.params["beta"] == pytest.approx(0.4, abs=0.05)
    assert fit("chinchilla", read).params.equals(found.params)
    assert audit(table).counts["runs"] == 40


def test_checkpoints_are_rows_without_the_one_before_training(tmp_path: Path) -> None:
    run = config()
    write_run(tmp_path, run, 1.0)
    table = collect(tmp_path, checkpoints=True)
    assert table["step"].tolist() == [4, 8]
    assert table["loss"].tolist() == [2.0, 1.0]
    assert table["tokens"].tolist() == [256, 512]
    assert table["flops_causal"].iloc[0] == row(run)["flops_causal"] / 2
    pd.testing.assert_frame_equal(read_runs(tmp_path), collect(tmp_path), check_dtype=False)


def test_a_diverged_run_has_a_status_and_no_loss(tmp_path: Path) -> None:
    write_run(tmp_path, config(), 1.0)
    write_run(tmp_path, config(seed=1), 7.0, status="diverged")
    table = collect(tmp_path).set_index("seed")
    assert np.isnan(table.loc[1, "loss"])
    assert (table.loc[1, "status"], table.loc[1, "last_finite_loss"]) == ("diverged", 7.0)
    judged = [c for c in table.columns if c in ("loss_se", "excess", "excess_se") or "_difficulty_" in c]
    assert {"excess", "loss_difficulty_1", "accuracy_difficulty_1"} <= set(judged)
    assert table.loc[1, judged].isna().all(), "what it measured after it blew up is no result"
    assert table.loc[0, judged].notna().all()
    assert audit(collect(tmp_path)).counts["stopped rows"] == 1
    assert read_runs(tmp_path)["loss"].isna().sum() == 1


def test_unfinished_runs_are_named_and_taken_only_if_asked(tmp_path: Path) -> None:
    write_run(tmp_path, config(), 1.0)
    open_run = config(seed=1)
    write_run(tmp_path, open_run, 1.5, summary=False)
    table = collect(tmp_path)
    assert table["seed"].tolist() == [0]
    assert open_run.run_id in table.attrs["notes"][0]
    assert "unfinished" in table.attrs["notes"][0]
    more = collect(tmp_path, unfinished=True).set_index("seed")
    assert (more.loc[1, "status"], more.loc[1, "loss"]) == ("unfinished", 1.5)


def test_what_is_torn_or_foreign_is_named_and_not_accepted(tmp_path: Path) -> None:
    write_run(tmp_path, config(), 1.0)
    torn = write_run(tmp_path, config(seed=1), 1.0)
    (torn / "summary.json").write_text((torn / "summary.json").read_text()[:40])
    foreign = write_run(tmp_path, config(seed=2), 1.0)
    (foreign / "summary.json").write_text(
        (foreign / "summary.json").read_text().replace(config(seed=2).run_id, config(seed=0).run_id)
    )
    renamed = write_run(tmp_path, config(seed=3), 1.0)
    renamed.rename(tmp_path / "pre_ln-copy")
    strange = write_run(tmp_path, config(seed=4), 1.0)
    (strange / "config.toml").write_text("colour = 1\n" + (strange / "config.toml").read_text())
    nan = write_run(tmp_path, config(seed=5), 1.0)
    record = json.loads((nan / "summary.json").read_text()) | {"loss": None}
    (nan / "summary.json").write_text(json.dumps(record))
    table = collect(tmp_path)
    assert table["seed"].tolist() == [0]
    notes = "\n".join(table.attrs["notes"])
    for folder, why in {
        torn.name: "torn or foreign", foreign.name: "is of run", "pre_ln-copy": "is of run", strange.name: "colour",
        nan.name: "finished with the loss None",
    }.items():  # fmt: skip
        assert any(folder in note and why in note for note in table.attrs["notes"]), (folder, why, notes)
    assert not is_finished(torn)
    assert not is_finished(foreign)
    assert not is_finished(tmp_path / "pre_ln-copy")
    assert not is_finished(strange)
    assert is_finished(tmp_path / config().run_id)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": 9, "tokens": 576}, "has step 9, none of this run's 8"),
        ({"step": -1, "tokens": -64}, "has step -1"),
        ({"step": 4, "tokens": 256}, "is finished at step 4 of 8"),
        ({"tokens": 511}, "has 511 tokens, not step x 64"),
        ({"loss_se": -0.1}, "has the loss_se -0.1"),
        ({"seconds": -1.0}, "has the seconds -1.0"),
        ({"loss": "NaN"}, "torn or foreign"),
        ({"step": 4, "tokens": 5, "status": "diverged"}, "has 5 tokens"),
    ],
)
def test_a_summary_with_wrong_numbers_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    write_run(tmp_path, config(), 1.0)
    bad = write_run(tmp_path, config(seed=1), 1.0)
    record = json.loads((bad / "summary.json").read_text()) | change
    (bad / "summary.json").write_text(json.dumps(record))
    (note,) = collect(tmp_path).attrs["notes"]
    assert note.startswith(f"{bad.name} not accepted: summary.json")
    assert why in note
    assert not is_finished(bad)


@pytest.mark.parametrize("file", ["summary.json", "log.jsonl"])
def test_a_folder_without_a_config_is_named(tmp_path: Path, file: str) -> None:
    write_run(tmp_path, config(), 1.0)
    bare = write_run(tmp_path, config(seed=1), 1.0)
    for name in {"config.toml", "summary.json", "log.jsonl"} - {file}:
        (bare / name).unlink()
    (tmp_path / "figures").mkdir()
    assert collect(tmp_path).attrs["notes"] == [f"{bare.name} not accepted: config.toml is missing"]
    assert not is_finished(bare)
    with pytest.raises(SchemaError, match=f"{bare.name} not accepted: config.toml is missing"):
        collect(bare)


def test_other_data_under_one_name_is_told(tmp_path: Path) -> None:
    """Two values of corpus_fingerprint for one corpus; other options or another context are another corpus."""
    runs = [config(), config(seed=1), config(corpus_options={"width": 2})]
    for run, fingerprint in zip(runs, ("a" * 64, "b" * 64, "c" * 64), strict=True):
        path = write_run(tmp_path, run, 1.0) / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus_fingerprint": fingerprint}))
    (note,) = collect(tmp_path).attrs["notes"]
    assert "corpus 'automaton' (context=32, width=4) was not the same data in all runs: 2 values" in note
    assert f"aaaaaaaa in {runs[0].run_id}" in note
    assert "cccc" not in note


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s[:-7], "cut off"),
        (lambda s: s.replace('{"kind": "eval", "step": 8', "{", 1), "not JSON"),
        (lambda s: s.replace('"kind": "eval", "step": 8', '"kind": "note", "step": 8'), "no record of kind"),
        (lambda s: s.replace('"kind": "eval", "step": 8', '"kind": "eval", "step": 3'), "comes after step 4"),
        (lambda s: s.replace('"kind": "eval", "step": 8', '"kind": "eval", "step": 800'), "is none of this run's 8"),
        (
            lambda s: s.replace('"kind": "eval", "step": 8, "tokens": 512', '"kind": "eval", "step": 8, "tokens": 5'),
            "not step x 64",
        ),
        (lambda s: s.replace('"loss": 1.0, "loss_se"', '"loss": NaN, "loss_se"'), "not a finite number"),
        (lambda s: s + s.splitlines(keepends=True)[-1], "comes after step 8"),
    ],
)
def test_bad_lines_of_a_log_are_named_by_number(tmp_path: Path, change: object, why: str) -> None:
    folder = write_run(tmp_path, config(), 1.0)
    log = folder / "log.jsonl"
    log.write_text(change(log.read_text()))  # type: ignore[operator]
    table = collect(tmp_path, checkpoints=True)
    told = [note for note in table.attrs["notes"] if "log.jsonl, line" in note]
    assert len(told) == 1
    assert why in told[0]
    assert table["step"].tolist() == ([4, 8] if change(" ") != " " and len(table) == 2 else [4])  # type: ignore[operator]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000))
def test_a_log_cut_anywhere_gives_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    run = config()
    text = lines(run, 1.0).encode()[:cut]
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes(text)
    whole = [json.loads(line) for line in text.split(b"\n")[:-1]]
    trouble: list[str] = []
    assert list(evaluations(path, run, trouble=trouble)) == [line for line in whole if line["kind"] == "eval"]
    assert len(trouble) == bool(text and not text.endswith(b"\n"))


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="is not a folder"):
        collect(tmp_path / "nothing")
    with pytest.raises(SchemaError, match="no folder in it has a config.toml"):
        collect(tmp_path)
    write_run(tmp_path, config(), summary=False)
    with pytest.raises(SchemaError, match="1 unfinished run \\(no"):
        collect(tmp_path)


def test_other_logs_in_the_folder_are_passed_over_with_a_note(tmp_path: Path) -> None:
    write_run(tmp_path, config(), 1.0)
    (tmp_path / "table.csv").write_text("params,tokens,loss\n1e6,1e9,3\n")
    read = read_runs(tmp_path)
    assert len(read) == 1
    assert any("passed over: table.csv" in note for note in read.attrs["notes"])


def test_logs_are_streamed(tmp_path: Path) -> None:
    """A log of 2 MB is read in a small part of that: the bound is one line and the rows kept."""
    run = config(tokens=64 * 80_000)
    folder = write_run(tmp_path, run, 1.0)
    line = '{"kind":"train","step":%d,"tokens":%d,"loss":1.0,"lr":0.01,"grad_norm":1.0,"pad":"%s"}\n'
    with (folder / "log.jsonl").open("w") as f:
        for step in range(1, 10_001):
            f.write(line % (step, step * 64, "x" * 120))
    tracemalloc.start()
    assert list(evaluations(folder / "log.jsonl", run)) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (folder / "log.jsonl").stat().st_size > 2e6
    assert peak < 3e5


def test_collecting_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, scalinglab.collecting; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

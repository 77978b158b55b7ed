"""Every log format that read_runs knows, written here as its tool writes it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.aliases import ALIASES, recognise, spellings
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.readers import describe_mapping, read_runs
from scalinglab.schema import SCHEMA

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SCALINGLAB_SHARED", ROOT.parent / "shared")) / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public run logs (SCALINGLAB_SHARED) are not here")

TABLE = pd.DataFrame(
    {
        "run_id": ["a", "b", "c"],
        "N": [1.0e8, 2.0e8, 4.0e8],
        "D": [2e9, 4e9, 8e9],
        "L": [12, 16, 24],
        "d": [768, 1024, 1216],
        "loss": [3.4, 3.1, 2.9],
    }
)


def notes(df: pd.DataFrame) -> str:
    return "\n".join(df.attrs["notes"])


@pytest.mark.parametrize(
    "name", ["runs.csv", "runs.csv.gz", "runs.tsv", "runs.jsonl", "runs.jsonl.gz", "runs.json", "runs.txt"]
)
def test_one_table_in_every_text_format(tmp_path, name):
    path = tmp_path / name
    if "json" in name:
        TABLE.to_json(path, orient="records", lines="jsonl" in name)
    else:
        TABLE.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["a", "b", "c"]
    assert runs.params.tolist() == TABLE.N.tolist()
    assert runs.tokens.tolist() == TABLE.D.tolist()
    assert runs.depth.tolist() == [12, 16, 24]
    assert runs.depth.dtype == np.int64
    assert runs.loss.tolist() == TABLE.loss.tolist()
    assert runs.aspect.tolist() == pytest.approx([64, 64, 1216 / 24])
    assert runs.attrs["params"] == "as given"
    assert runs.attrs["source"] == [{"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "runs.parquet"
    TABLE.assign(tags=[["x"], [], ["y"]]).to_parquet(path)
    runs = read_runs(path)
    assert runs.loss.tolist() == TABLE.loss.tolist()
    assert "nested columns left out: tags" in notes(runs)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "runs.parquet"
    path.write_bytes(b"PAR1....PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'scalinglab\[parquet\]'"):
        read_runs(path)


def test_bom_semicolons_comments_blank_lines_and_quotes(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes('\ufeff# exported today\n\n"run_id";"loss";"note"\n"a;1";3.5;"two\nlines"\n\nb;3.25;ok\n'.encode())
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["a;1", "b"]
    assert runs.loss.tolist() == [3.5, 3.25]
    path.write_bytes('\ufeff# exported today\n\n"run_id";"loss";"note"\n"a;1";3.5;"two\nlines"\n\nb;-1;ok\n'.encode())
    with pytest.raises(SchemaError, match=r"runs.csv, row 7, column 'loss': -1 is negative"):
        read_runs(path)


# ---- names


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("n_layers", "depth"), ("nLayers", "depth"), ("N-Layers", "depth"), ("num_hidden_layers", "depth"), ("L", "depth"),
        ("d_model", "width"), ("hidden.size", "width"), ("n_embd", "width"), ("Dim", "width"), ("d", "width"),
        ("config.n_layer", "depth"), ("config/model.n_layer", "depth"), ("params_non_embedding", "params_backbone"),
        ("N_nonemb", "params_backbone"), ("num_params", "params"), ("N", "params"), ("tokens seen", "tokens"),
        ("D", "tokens"), ("C", "flops"), ("val/loss", "loss"), ("Validation Loss", "loss"), ("summary.eval_loss", "loss"),
        ("vocab_size", "vocab"), ("block_size", "context"), ("intermediate_size", "ffn_dim"), ("n_inner", "ffn_dim"),
        ("learning_rate", "lr"), ("num_key_value_heads", "kv_heads"), ("_step", "step"), ("iter", "step"),
        ("State", "status"),
    ],
)  # fmt: skip
def test_aliases(name, canonical):
    assert recognise([name]) == {canonical: [name]}


def test_names_that_are_not_aliases():
    for name in (
        "model_name",
        "n",
        "c",
        "l",
        "tokens_nominal",
        "loss_pile",
        "params_M",
        "size",
        "group",
        "weight_decay",
    ):
        assert recognise([name]) == {}
    assert all(canonical in SCHEMA for canonical in ALIASES)
    assert recognise(["loss"], mapped=["loss"]) == {}


@given(
    st.sampled_from([a for names in ALIASES.values() for a in names if len(a) > 1 and a[0] != "_"]),
    st.sampled_from("-./ _"),
)
def test_case_and_separators_do_not_matter(alias, mark):
    (canonical,) = [c for c, names in ALIASES.items() if alias in names]
    written = alias.upper().replace("_", mark)
    assert canonical in recognise([written]), (written, spellings(written))


def test_validation_comes_before_training(tmp_path):
    TABLE.assign(val_loss=[4, 5, 6]).to_csv(tmp_path / "t.csv", index=False)
    runs = read_runs(tmp_path / "t.csv")
    assert runs.loss.tolist() == [4, 5, 6]
    assert runs.file_loss.tolist() == TABLE.loss.tolist()
    assert "loss is 'val_loss' (validation before training); also there: 'loss'" in notes(runs)
    TABLE.rename(columns={"loss": "train_loss"}).to_csv(tmp_path / "t.csv", index=False)
    assert "loss is 'train_loss', a training loss" in notes(read_runs(tmp_path / "t.csv"))


def test_two_columns_for_one(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.assign(n_layer=TABLE.L).to_csv(path, index=False)
    runs = read_runs(path)
    assert "depth is 'n_layer', equal to 'L'" in notes(runs)
    TABLE.assign(n_layer=[1, 2, 3]).to_csv(path, index=False)
    with pytest.raises(
        SchemaError, match=r"t.csv: 'n_layer' and 'L' could each be depth and differ; say which, e.g. columns="
    ):
        read_runs(path)
    assert read_runs(path, columns={"depth": "n_layer"}).depth.tolist() == [1, 2, 3]
    TABLE.assign(depth=[1, 2, 3]).to_csv(path, index=False)
    runs = read_runs(path)
    assert runs.depth.tolist() == [1, 2, 3]
    assert "depth is 'depth'; also there: 'L'" in notes(runs)


def test_params_and_non_embedding_params(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.rename(columns={"N": "params"}).assign(params_non_embedding=[5e7, 1e8, 2e8]).to_csv(path, index=False)
    backbone = read_runs(path)
    assert backbone.params.tolist() == backbone.params_backbone.tolist() == [5e7, 1e8, 2e8]
    assert backbone.params_total.tolist() == [1e8, 2e8, 4e8]
    assert backbone.attrs["params"] == "backbone"
    total = read_runs(path, params="total")
    assert total.params.tolist() == [1e8, 2e8, 4e8]
    assert total.attrs["params"] == "total"


def test_params_alone_are_as_given_unless_the_user_declares_them(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.to_csv(path, index=False)
    runs = read_runs(path)
    assert runs.attrs["params"] == "as given"
    assert (
        "the table has no backbone counts; if they are non-embedding write columns={'params_backbone': 'N'}"
        in notes(runs)
    )
    assert read_runs(path, params="total").attrs["params"] == "total"
    assert read_runs(path, columns={"params_backbone": "N"}).attrs["params"] == "backbone"
    with pytest.raises(ConfigError, match="params='both' is unknown"):
        read_runs(path, params="both")


def test_params_are_computed_from_a_full_shape(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.drop(columns="N").assign(d_ff=[2048, 2736, 3248], vocab_size=50280).to_csv(path, index=False)
    runs = read_runs(path)
    assert runs.attrs["params"] == "backbone"
    assert runs.params.iloc[0] == 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert runs.attrs["mapping"]["params_backbone"].startswith("computed: shape (swiglu")


# ---- columns=, where=


def test_columns_are_names_expressions_or_constants(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame(
        {"id": ["x", "y"], "size_M": [100, 200], "tok/B": [2, 4], "bits": [4.5, 4.2], "opt": ["adam", "muon"]}
    ).to_csv(path, index=False)
    mapping = {
        "params": "size_M * 1e6",
        "tokens": "tok_B * 1e9",
        "loss": "bits * log(2)",
        "vocab": "50280",
        "architecture": "'pre_' + opt",
    }
    runs = read_runs(path, columns=mapping)
    assert runs.params.tolist() == [1e8, 2e8]
    assert runs.tokens.tolist() == [2e9, 4e9]
    assert runs.loss.tolist() == pytest.approx([4.5 * np.log(2), 4.2 * np.log(2)])
    assert runs.vocab.tolist() == [50280, 50280]
    assert runs.architecture.tolist() == ["pre_adam", "pre_muon"]
    assert {k: runs.attrs["mapping"][k] for k in mapping} == mapping
    assert runs["size_M"].tolist() == [100, 200]  # the user's columns stay


def test_products_of_whole_numbers_do_not_overflow(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("loss,p,t\n3,3000000000,8000000000\n2,4000000000,9000000000\n")
    runs = read_runs(path, columns={"flops": "6*p*t", "params": "p", "tokens": "t"})
    assert runs.flops.tolist() == [6 * 3e9 * 8e9, 6 * 4e9 * 9e9]
    assert (6 * runs.params * runs.tokens).tolist() == runs.flops.tolist()


def test_mapping_errors_list_what_is_there(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.to_csv(path, index=False)
    with pytest.raises(
        SchemaError, match=r"'param' is not a canonical column \(did you mean 'params'.*canonical columns: run_id"
    ):
        read_runs(path, columns={"param": "N"})
    with pytest.raises(
        SchemaError, match=r"t.csv: .*reads 'los', which is not a column \(did you mean 'loss'.*'run_id', 'N'"
    ):
        read_runs(path, columns={"loss": "los * 2"})
    with pytest.raises(SchemaError, match=r"t.csv: .*is neither a column nor an expression"):
        read_runs(path, columns={"loss": "val loss"})
    with pytest.raises(SchemaError, match=r"t.csv: .*can't be evaluated"):
        read_runs(path, columns={"loss": "run_id * 2"})
    with pytest.raises(SchemaError, match="that isn't arithmetic"):
        read_runs(path, columns={"loss": "().__class__"})


def test_where_reads_the_columns_of_the_file_and_ours(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.assign(phase=["hot", "hot", "cool"]).to_csv(path, index=False)
    assert read_runs(path, where="phase == 'hot' and L > 12 and depth < 20").run_id.tolist() == ["b"]
    assert "where phase == 'cool': 1 of 3 rows kept" in notes(read_runs(path, where="phase == 'cool'"))
    with pytest.raises(SchemaError, match=r"t.csv: where='depth > 99' keeps none of the 3 rows"):
        read_runs(path, where="depth > 99")
    with pytest.raises(ConfigError, match=r"reads 'phse', which is not there; known: .*phase"):
        read_runs(path, where="phse == 'hot'")


def test_rows_dropped_by_where_keep_the_line_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("run_id,loss\na,3\nb,\nc,2\n\nd,-1\n")
    with pytest.raises(SchemaError, match=r"t.csv, row 6, column 'loss': -1 is negative"):
        read_runs(path, where="run_id != 'b'")


def test_describe_mapping(tmp_path):
    path = tmp_path / "t.csv"
    TABLE.to_csv(path, index=False)
    text = describe_mapping(read_runs(path, columns={"lr": "0.001"}))
    for line in (
        "3 rows, 3 runs",
        "params   <- N",
        "tokens   <- D",
        "lr       <- 0.001",
        "params are as given",
        "aspect   <- computed: width",
    ):
        assert line in text


# ---- trackers


def test_wandb_chart_export(tmp_path):
    path = tmp_path / "wandb_export.csv"
    path.write_text(
        '"Step","deep-1 - val/loss","deep-1 - val/loss__MIN","deep-1 - val/loss__MAX",'
        '"wide - 2 - val/loss","wide - 2 - tokens","deep-1 - tokens"\n'
        "0,,,,,0,0\n100,4.5,4.5,4.5,,1e9,2e9\n200,4.0,4.0,4.0,4.2,2e9,4e9\n"
    )
    runs = read_runs(path)
    assert runs[["run_id", "step", "loss"]].to_numpy().tolist() == [
        ["deep-1", 100, 4.5],
        ["deep-1", 200, 4.0],
        ["wide - 2", 200, 4.2],
    ]
    assert "3 rows without 'val/loss' are other events" in notes(runs)
    assert runs.tokens.tolist() == [2e9, 4e9, 2e9]


def test_wandb_export_with_run_prefix_and_only_bounds(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("_step,run: NAME - val/loss__MIN,run: NAME - val/loss__MAX\n10,3.5,3.6\n20,3.25,3.3\n")
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["NAME", "NAME"]
    assert runs.loss.tolist() == [3.5, 3.25]
    assert "val/loss of NAME is read from 'run: NAME - val/loss__MIN'" in notes(runs)


def test_wandb_history_lines(tmp_path):
    path = tmp_path / "history.jsonl"
    rows = [
        {"config": {"n_layer": {"value": 12}, "model": {"n_embd": 768}, "lr": 0.01}},
        {"_step": 1, "_runtime": 2.5, "train/loss": 9.0, "tokens": 1e9},
        {"_step": 2, "_runtime": 5.0, "train/loss": 5.0, "val/loss": 5.5, "tokens": 2e9},
        {"_step": 3, "_runtime": 9.0, "system": {"gpu": 0.9}},
        {"_step": 4, "_runtime": 9.5, "val/loss": 4.5, "tokens": 3e9},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    runs = read_runs(path)
    assert runs.loss.tolist() == [5.5, 4.5]
    assert runs.step.tolist() == [2, 4]
    assert runs.depth.tolist() == [12, 12]
    assert runs.width.tolist() == [768, 768]
    assert runs.run_id.tolist() == [runs.run_id[0]] * 2
    assert "2 rows without 'val/loss' are other events" in notes(runs)
    assert "config of the first record holds for all rows" in notes(runs)


def test_wandb_summary_export(tmp_path):
    path = tmp_path / "runs.jsonl"
    rows = [
        {
            "name": f"r{i}",
            "state": s,
            "config": {"n_layer": 12, "deep": {"d_model": 768}},
            "summary": {"val/loss": v, "_step": 9},
        }
        for i, (s, v) in enumerate([("finished", 3.0), ("crashed", "NaN"), ("finished", 2.5)])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["r0", "r1", "r2"]
    assert runs.loss.tolist()[::2] == [3.0, 2.5]
    assert np.isnan(runs.loss[1])
    assert runs.status[1] == "crashed"
    assert "1 rows without a loss kept, since status says why" in notes(runs)
    assert runs.depth.tolist() == [12] * 3


def trainer_state(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True)
    log = []
    for step in range(1, steps + 1):
        log.append({"step": step, "loss": 9.0 / step, "learning_rate": 1e-3, "num_input_tokens_seen": step * 10**6})
        if step % 2 == 0:
            log.append({"step": step, "eval_loss": 8.0 / step, "eval_runtime": 1.0})
    log.append({"step": steps, "train_runtime": 99.0, "train_loss": 7.77})
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps, "log_history": log}, indent=2))


def test_hugging_face_trainer_state(tmp_path):
    trainer_state(tmp_path / "run7", 4)
    (tmp_path / "run7" / "config.json").write_text(
        json.dumps({"num_hidden_layers": 6, "hidden_size": 512, "model_type": "gpt"})
    )
    runs = read_runs(tmp_path / "run7" / "trainer_state.json")
    assert runs.run_id.tolist() == ["run7", "run7"]
    assert runs.step.tolist() == [2, 4]
    assert runs.loss.tolist() == [4.0, 2.0]
    assert runs.tokens.tolist() == [2e6, 4e6]
    assert runs.depth.tolist() == [6, 6]
    assert "settings read from config.json beside it" in notes(runs)


def test_hugging_face_checkpoints_are_read_once(tmp_path):
    for run in ("x", "y"):
        for steps in (2, 10, 4):
            trainer_state(tmp_path / run / f"checkpoint-{steps}", steps)
    runs = read_runs(tmp_path)
    assert runs.groupby("run_id").step.max().to_dict() == {"x": 10, "y": 10}
    assert len(runs.attrs["source"]) == 2


def test_nanogpt_csv(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text("iter,train/loss,val/loss,lr\n0,9.1,9.2,0.1\n1,8.0,,0.1\n2,7.0,7.5,0.1\n")
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["small", "small"]
    assert runs.step.tolist() == [0, 2]
    assert runs.loss.tolist() == [9.2, 7.5]
    assert "1 rows without 'val/loss' are other events" in notes(runs)


def test_steps_without_run_id_and_several_settings_is_an_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("depth,step,loss\n1,1,5\n1,2,4\n2,1,5\n2,2,4\n")
    with pytest.raises(SchemaError, match=r"t.csv has steps but no run_id, so checkpoints can't be told from runs"):
        read_runs(path)
    path.write_text("depth,step,loss\n1,10,5\n2,20,4\n")
    assert read_runs(path).run_id.tolist() == ["t/1", "t/2"]


def test_tensorboard_missing_is_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing", None)
    with pytest.raises(
        ConfigError, match=r"tfevents.1.host is a TensorBoard log: .*pip install 'scalinglab\[tensorboard\]'"
    ):
        read_runs(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for run in ("p", "q"):
        writer = EventFileWriter(str(tmp_path / run))
        for step in (1, 2, 3):
            values = [summary_pb2.Summary.Value(tag="Loss/train", simple_value=9.0 / step)]
            if step > 1:
                values.append(summary_pb2.Summary.Value(tag="Loss/val", simple_value=8.0 / step))
            writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))
        writer.close()
    runs = read_runs(tmp_path)
    assert runs[["run_id", "step", "loss"]].to_numpy().tolist()[:2] == [["p", 2, 4.0], ["p", 3, pytest.approx(8 / 3)]]
    assert runs.run_id.unique().tolist() == ["p", "q"]


# ---- folders, lists, embedded


def test_folder_names_runs_by_path(tmp_path):
    for i, name in enumerate(["a/log.jsonl", "b/log.jsonl", "c.csv", "d/e/metrics.csv"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "jsonl" in name:
            path.write_text(
                "".join(json.dumps({"step": s, "val_loss": 5.0 - s - i / 10, "depth": 2 + i}) + "\n" for s in (1, 2))
            )
        else:
            path.write_text(f"step,val_loss,depth\n1,4.5,{i}\n2,3.5,{i}\n")
    (tmp_path / "sizes.csv").write_text("x,y\n1,2\n")
    (tmp_path / ".hidden.csv").write_text("broken")
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    runs = read_runs(tmp_path)
    assert runs.run_id.unique().tolist() == ["a", "b", "c", "d/e"]
    assert len(runs) == 8
    assert len(runs.attrs["source"]) == 4
    assert "left out: " in notes(runs)
    assert "sizes.csv: no column is a loss" in notes(runs)


def test_several_paths_with_different_names_for_one_thing(tmp_path):
    TABLE.to_csv(tmp_path / "one.csv", index=False)
    TABLE.assign(run_id=["x", "y", "z"]).rename(columns={"L": "n_layer"}).to_csv(tmp_path / "two.csv", index=False)
    runs = read_runs([tmp_path / "one.csv", str(tmp_path / "two.csv")])
    assert runs.run_id.tolist() == ["a", "b", "c", "x", "y", "z"]
    assert runs.attrs["mapping"]["depth"] == "L | n_layer"
    assert [s["path"] for s in runs.attrs["source"]] == [str(tmp_path / "one.csv"), str(tmp_path / "two.csv")]
    with pytest.raises(SchemaError, match=r"one.csv, row 2 repeats the key of .*one.csv, row 2: run_id=a"):
        read_runs([tmp_path / "one.csv", tmp_path / "one.csv"])


def test_a_column_that_only_one_file_has_must_not_have_holes(tmp_path):
    TABLE.to_csv(tmp_path / "one.csv", index=False)
    TABLE.assign(run_id=["x", "y", "z"]).drop(columns="D").to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(
        SchemaError, match=r"two.csv, row 2.*'D' \(read as tokens\): tokens is missing .* though other rows have it"
    ):
        read_runs([tmp_path / "one.csv", tmp_path / "two.csv"])


def test_embedded_names():
    assert len(read_runs("embedded:depthbench")) == 69
    with pytest.raises(ConfigError, match="no embedded table 'depthbenhc'; did you mean 'depthbench'"):
        read_runs("embedded:depthbenhc")


# ---- size


def test_ten_thousand_columns_keep_what_is_needed(tmp_path):
    path = tmp_path / "wide.csv"
    names = [f"m{i}" for i in range(10_000)]
    head = ["run_id", *names, "loss", "N"]
    path.write_text(
        ",".join(head) + "\n" + "\n".join(f"r{i}," + ",".join(["1"] * 10_000) + ",3.5,1e8" for i in range(3)) + "\n"
    )
    runs = read_runs(path, where="m7 == 1")
    assert set(runs.columns) == {"run_id", "m7", "loss", "params"}
    assert "10,003 columns in the file; read 4: run_id, m7, loss, N" in notes(runs)
    assert len(runs) == 3


def test_two_hundred_columns_of_the_user_are_kept(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame({"loss": [3.0], **{f"m{i}": [i] for i in range(150)}}).to_csv(path, index=False)
    assert read_runs(path).shape[1] == 152


def big_table(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    i = np.arange(rows)
    pd.DataFrame(
        {
            "run_id": np.char.add("run", (i // 50).astype(str)),
            "step": i % 50,
            "params": rng.integers(10**8, 10**9, rows),
            "tokens": rng.integers(10**9, 10**10, rows),
            "depth": rng.integers(4, 40, rows),
            "width": rng.integers(256, 4096, rows),
            "loss": rng.uniform(2, 4, rows),
        }
    ).to_csv(path, index=False)


def megabytes_of_reading(path: Path) -> float:
    """Peak memory of a process that reads the table (its speed is measured in benchmarks/speed.py)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("peak memory of a process is read from /proc, which this system lacks")
    code = (  # VmHWM, not ru_maxrss: the latter inherits the peak of the process that forked
        "import sys; from scalinglab.readers import read_runs; n = len(read_runs(sys.argv[1]));"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "print(n, float(peak.split()[1]) / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    rows, megabytes = done.stdout.split()
    assert int(rows) == len(path.read_bytes().splitlines()) - 1
    return float(megabytes)


def test_fifty_thousand_rows_are_read_in_bounded_memory(tmp_path):
    big_table(tmp_path / "big.csv", 50_000)
    assert megabytes_of_reading(tmp_path / "big.csv") < 400


@pytest.mark.slow
def test_a_million_rows_are_read_in_a_gigabyte(tmp_path):
    big_table(tmp_path / "big.csv", 1_000_000)
    assert megabytes_of_reading(tmp_path / "big.csv") < 1000


# ---- the public logs


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "options", "rows", "params"),
    [
        ("gemstones_checkpoints.csv", {}, 5248, "backbone"),
        ("gemstones_checkpoints.csv", {"where": "phase == 'cool_end'"}, 199, "backbone"),
        ("gemstones_other_val.csv", {}, 1628, "backbone"),
        ("gemstones_task_losses.csv", {}, 6930, "backbone"),
        ("gemstones_lr_preflight.csv", {}, 24, "backbone"),
        ("chinchilla_besiroglu.csv", {"params": "total", "where": "in_fit_240 == 1"}, 240, "total"),
        ("chinchilla_kyotakano.csv", {}, 234, "as given"),
        ("porian_isoflop_points.csv", {"key": ("config",)}, 1745, "backbone"),
        ("gadre_overtraining.csv", {"where": "eval_dataset == 'c4_val'"}, 104, "backbone"),
        ("steplaw_dense.csv", {}, 1911, "backbone"),
        ("steplaw_moe.csv", {}, 708, "backbone"),
        ("misfitting_dense.csv", {"where": "is_final == 1"}, 263, "backbone"),  # two of 261 runs have two
        ("openathena_isoflops.csv", {}, 814, "as given"),
        ("routed_lm_curves.csv", {"where": "loss == loss"}, 5791, "as given"),
        ("snimu_wikitext_shapes.csv.gz", {}, 10679, "as given"),
        ("depthbench_losses.csv", {}, 69, "backbone"),
    ],
)
def test_public_logs(name, options, rows, params):
    runs = read_runs(SHARED / name, **options)
    assert len(runs) == rows
    assert runs.attrs["params"] == params
    raw = pd.read_csv(SHARED / name)
    if "where" not in options:
        assert runs.loss.tolist() == raw.loss.tolist()


@needs_shared
@pytest.mark.shared
def test_public_log_with_missing_losses_names_the_rows():
    with pytest.raises(
        SchemaError, match=r"routed_lm_curves.csv, row 2155, row 2182, .*\(8 rows in all\).*loss is missing"
    ):
        read_runs(SHARED / "routed_lm_curves.csv")


@needs_shared
@pytest.mark.shared
def test_gemstones_counts_equal_the_closed_form():
    runs = read_runs(SHARED / "gemstones_checkpoints.csv")
    components = runs[["params_attention", "params_ffn", "params_other"]].sum(axis=1)
    assert (components == runs.params_backbone).all()
    assert (components + runs.params_embedding + runs.params_readout == runs.params_total).all()

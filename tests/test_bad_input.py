"""What is wrong with a file is said in one sentence, with file, row and column, and what to do."""

import gzip
import json
import math
import os
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, ScalinglabError, SchemaError
from scalinglab.readers import read_runs
from scalinglab.units import check_units

HEAD = "run_id,params,tokens,depth,width,loss\n"
ROWS = ["a,3.02e8,6e9,24,1024,3.1", "b,2.84e8,6e9,16,1216,3.2", "c,3.09e8,6e9,32,896,3.3"]


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding) if isinstance(text, str) else text)
    return path


def refused(path, match, **options):
    with pytest.raises(SchemaError, match=match) as caught:
        read_runs(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def assert_one_sentence(message, path):
    assert "\n" not in message
    assert path.name in message


# ---- files


@pytest.mark.parametrize("content", ["", "\n\n  \n", "\ufeff"])
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_empty_file(tmp_path, name, content):
    if name == "t.parquet" and content:
        refused(write(tmp_path / name, content), "t.parquet is not a Parquet file")
    else:
        refused(write(tmp_path / name, content), rf"{name} is empty")


def test_empty_gzip(tmp_path):
    refused(write(tmp_path / "t.csv.gz", gzip.compress(b"")), r"t.csv.gz is empty")


def test_header_only(tmp_path):
    refused(write(tmp_path / "t.csv", HEAD), r"t.csv has a header and no rows")


def test_no_header(tmp_path):
    refused(
        write(tmp_path / "t.csv", "1,2,3\n4,5,6\n"),
        r"t.csv, row 1: the header holds numbers \(1, 2, 3\); add a line of names",
    )


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    refused(tmp_path / "pipe.csv", r"pipe.csv is not a regular file")


def test_missing_path_suggests_a_neighbour(tmp_path):
    write(tmp_path / "runs.csv", HEAD)
    refused(tmp_path / "run.csv", r"run.csv does not exist \(did you mean 'runs.csv'\?\)")
    refused(tmp_path / "no" / "run.csv", r"run.csv does not exist$")
    with pytest.raises(SchemaError, match="no path was given"):
        read_runs([])


def test_directory_without_logs(tmp_path):
    refused(tmp_path, r"has no logs: looked for .csv, .*trainer_state.json and TensorBoard")
    write(tmp_path / "x.csv", "a,b\n1,2\n")
    write(tmp_path / "y.csv", "a,b\n1,2\n")
    refused(tmp_path, r"no file in .* has a loss; .*2 files read; left out: .*x.csv: no column is a loss")


def test_damaged_file_in_a_folder_is_not_passed_over(tmp_path):
    write(tmp_path / "x.csv", HEAD + ROWS[0] + "\n")
    write(tmp_path / "y.csv", HEAD + "b,1e8,6e9,16,1216,\n")
    refused(tmp_path, r"y.csv, column 'loss': loss is missing in every row")
    write(tmp_path / "y.csv", "run_id,bpb\nb,1.1\n")
    refused(tmp_path, r"y.csv: column 'bpb' is bits per byte")


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_gzip(tmp_path, keep):
    data = gzip.compress((HEAD + "\n".join(ROWS * 200)).encode())
    refused(
        write(tmp_path / "t.csv.gz", data[: int(len(data) * keep)]),
        r"t.csv.gz is a (truncated|damaged) gzip file .*copy it again",
    )


def test_damaged_gzip(tmp_path):
    data = bytearray(gzip.compress((HEAD + "\n".join(ROWS * 200)).encode()))
    data[-6] ^= 0xFF
    refused(write(tmp_path / "t.csv.gz", bytes(data)), r"t.csv.gz is a damaged gzip file")


def test_truncated_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    pd.DataFrame({"loss": np.arange(1.0, 99.0)}).to_parquet(tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    for keep in (5, len(data) // 2, len(data) - 3):
        refused(write(tmp_path / "t.parquet", data[:keep]), r"t.parquet is a truncated or damaged Parquet file")


def test_torn_last_json_line(tmp_path):
    lines = [json.dumps({"step": i, "loss": 5.0 - i / 10}) for i in range(3)]
    path = write(tmp_path / "log.jsonl", "\n".join(lines) + '\n{"step": 3, "lo')
    refused(path, r"log.jsonl, line 4: not valid JSON.*pass torn='drop' to leave that line out")
    runs = read_runs(path, torn="drop")
    assert runs.step.tolist() == [0, 1, 2]
    assert any("the last line (4) was cut off" in note for note in runs.attrs["notes"])


def test_broken_json_line_inside_is_never_dropped(tmp_path):
    path = write(tmp_path / "log.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "loss"\n{"step": 3, "loss": 2}\n')
    refused(path, r"log.jsonl, line 2: not valid JSON", torn="drop")
    refused(
        write(tmp_path / "log.jsonl", '{"step": 1, "loss": 3}\n[1, 2]\n'),
        r"log.jsonl, line 2: expected a record .*found list",
    )
    refused(write(tmp_path / "t.json", '[{"loss": 3}, 4]'), r"t.json, entry 2: expected a record .*found int")
    refused(write(tmp_path / "t.json", '{"loss": 3,\n "x":'), r"t.json: not valid JSON")


def test_deeply_nested_json(tmp_path):
    refused(
        write(tmp_path / "t.jsonl", '{"a":' * 100_000 + "1" + "}" * 100_000),
        r"t.jsonl, line 1: JSON is nested too deeply",
    )
    deep = {"loss": 3.0, "a": 1}
    record = deep
    for _ in range(30):
        record["next"] = {"leaf": 1}
        record = record["next"]
    runs = read_runs(write(tmp_path / "t.jsonl", json.dumps(deep)))
    assert max(str(c).count(".") for c in runs.columns) <= 8


def test_ragged_rows(tmp_path):
    refused(
        write(tmp_path / "t.csv", HEAD + ROWS[0] + "\n" + ROWS[1] + ",9,9\n"),
        r"t.csv is not a regular table: row 3 has 8 cells, the header names 6",
    )
    refused(
        write(tmp_path / "t.csv", HEAD + ROWS[0] + ",9\n"), r"t.csv, row 2: 7 cells, but the header names 6 columns"
    )
    refused(
        write(tmp_path / "t.csv", HEAD + ROWS[0] + "\nb,2e8,6e9\n"), r"t.csv, row 3, column 'depth': depth is missing"
    )


def test_a_name_twice_in_the_header(tmp_path):
    refused(
        write(tmp_path / "t.csv", "loss,loss,x\n1,2,3\n"), r"t.csv, row 1: the header names the column 'loss' twice"
    )


def test_not_utf8(tmp_path):
    text = HEAD + ROWS[0] + "\n" + ROWS[1].replace("b", "modèle") + "\n"
    path = write(tmp_path / "t.csv", text, "latin-1")
    offset = text.index("è")
    refused(path, rf"t.csv, row 3: byte {offset} is not valid UTF-8; .*encoding='latin-1'")
    assert read_runs(path, encoding="latin-1").run_id.tolist() == ["a", "modèle"]
    path = write(tmp_path / "h.csv", "modèle,loss\nx,3\n", "latin-1")
    refused(path, r"h.csv, row 1: byte 3 is not valid UTF-8")
    refused(write(tmp_path / "u.csv", HEAD, "utf-16"), r"u.csv is UTF-16 text; pass encoding='utf-16'")
    assert len(read_runs(write(tmp_path / "u.csv", HEAD + ROWS[0] + "\n", "utf-16"), encoding="utf-16")) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)) * 8, r"is not a text table: byte 0 is 0x0"),
        (pickle.dumps({"loss": [1.0]}), r"is a Python pickle, which can run code and is never read"),
        (b"PK\x03\x04" + b"\0" * 99, r"is a zip archive"),
        (b"\x93NUMPY\x01\x00", r"is a numpy array"),
        (b"loss\n3\n\x00\x00", r"is not a text table: byte 7 is 0x0"),
    ],
)
def test_binary_junk(tmp_path, content, message):
    refused(write(tmp_path / "t.csv", content), r"t.csv " + message)


# ---- cells


@pytest.mark.parametrize("column", ["params", "tokens", "depth", "width", "loss"])
@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("0", "is zero"),
        ("-3", "is negative"),
        ("inf", "is infinite"),
        ("-inf", "is infinite"),
        ("NaN", "is missing"),
        ("", "is missing"),
        ("3.l", "'3.l' is not a number"),
        ("2,71", "'2,71' is not a number"),
    ],
)
def test_bad_cell(tmp_path, column, cell, word):
    names = HEAD.strip().split(",")
    row = ROWS[1].split(",")
    row[names.index(column)] = f'"{cell}"' if "," in cell else cell
    path = write(tmp_path / "t.csv", HEAD + "\n".join([ROWS[0], ",".join(row), ROWS[2]]) + "\n")
    refused(path, rf"t.csv, row 3, column '{column}': .*{word}")


def test_bad_cell_of_a_renamed_column_names_both(tmp_path):
    path = write(tmp_path / "t.csv", "n_layer,val_loss\n12,3\n24,oops\n")
    refused(path, r"t.csv, row 3, column 'val_loss' \(read as loss\): 'oops' is not a number")
    refused(path, r"t.csv, row 3, column 'val_loss' \(read as loss\)", columns={"loss": "val_loss"})


def test_several_missing_losses_are_listed(tmp_path):
    path = write(tmp_path / "t.csv", "run_id,loss\n" + "".join(f"r{i},\n" if i % 2 else f"r{i},3\n" for i in range(20)))
    refused(
        path, r"t.csv, row 3, row 5, row 7, row 9, row 11, \.\.\. \(10 rows in all\), column 'loss': loss is missing"
    )


def test_missing_loss_column(tmp_path):
    path = write(tmp_path / "t.csv", "run_id,params\na,1e8\n")
    refused(path, r"t.csv: no column is a loss; the file has the columns 'run_id', 'params'; name one, e.g. columns=")
    refused(write(tmp_path / "t.csv", "run_id,loss\na,\nb,\n"), r"t.csv, column 'loss': loss is missing in every row")


def test_stopped_runs_may_lack_a_loss(tmp_path):
    path = write(tmp_path / "t.csv", "run_id,status,loss\na,finished,3\nb,diverged,\nc,killed,inf\nd,failed,nan\n")
    runs = read_runs(path)
    assert runs.run_id.tolist() == ["a", "b", "c", "d"]
    assert runs.loss.isna().tolist() == [False, True, True, True]
    path = write(tmp_path / "t.csv", "run_id,status,loss\na,finished,\nb,diverged,\n")
    refused(path, r"t.csv, column 'loss': loss is missing in every row")
    path = write(tmp_path / "t.csv", "run_id,status,loss\na,finished,\nb,diverged,\nc,finished,3\n")
    refused(path, r"t.csv, row 2, column 'loss': loss is missing")


def test_duplicated_key(tmp_path):
    path = write(tmp_path / "t.csv", "run_id,step,loss,config\na,1,3,x\na,2,2.9,x\n\na,1,3.1,y\n")
    refused(path, r"t.csv, row 5 repeats the key of .*t.csv, row 2: run_id=a, step=1 \(1 repeated rows\)")
    assert len(read_runs(path, key=("config",))) == 3


def test_a_loss_called_l_is_not_a_depth(tmp_path):
    path = write(tmp_path / "t.csv", "N,D,L,loss\n1e8,1e9,2.5,1\n")
    refused(
        path,
        r"t.csv, row 2, column 'L' \(read as depth\): 2.5 is not a whole number; if it is the loss, write columns=",
    )
    path = write(tmp_path / "t.csv", "N,D,L\n1e8,1e9,2.5\n")
    assert read_runs(path, columns={"loss": "L"}).columns.tolist() == ["run_id", "params", "tokens", "flops_6n", "loss"]


# ---- units


def units(tmp_path, text, match, fixed, **options):
    """The file is refused with `match`, and reads once the suggested mapping `fixed` is written."""
    path = write(tmp_path / "t.csv", text)
    message = refused(path, match, **options)
    for canonical, expression in fixed.items():
        assert f"columns={{'{canonical}': '{expression}'}}" in message
        assert f"--columns '{canonical}={expression.replace(' ', '')}'" in message
    return read_runs(path, columns=fixed, **options)


def test_params_in_millions_next_to_a_shape(tmp_path):
    text = "run_id,params,depth,width,loss\na,302,24,1024,3\nb,284,16,1216,3.1\n"
    runs = units(
        tmp_path,
        text,
        r"t.csv, column 'params': looks like millions of parameters "
        r"\(the shape of its first row has about 3.02e\+08, the column says 302\)",
        {"params": "params * 1e6"},
    )
    assert runs.params.tolist() == [302e6, 284e6]
    text = "run_id,N,L,d,loss\na,0.302,24,1024,3\nb,0.284,16,1216,3.1\n"
    runs = units(tmp_path, text, r"column 'N': looks like billions", {"params": "N * 1e9"})
    assert runs.params.tolist() == [302e6, 284e6]


@pytest.mark.parametrize(
    ("values", "word", "scale"), [((70, 400, 2000), "millions", "1e6"), ((0.07, 1.4, 7), "billions", "1e9")]
)
def test_params_in_millions_without_a_shape(tmp_path, values, word, scale):
    text = "run_id,params,loss\n" + "".join(f"r{i},{v},3\n" for i, v in enumerate(values))
    runs = units(
        tmp_path,
        text,
        rf"t.csv, column 'params': the largest value is .*looks like {word}",
        {"params": f"params * {scale}"},
    )
    assert runs.params.tolist() == pytest.approx([v * float(scale) for v in values])
    assert read_runs(tmp_path / "t.csv", columns={"params": "params"}).params.tolist() == list(values)  # trusted


def test_a_tiny_model_with_its_shape_is_no_suspect(tmp_path):
    runs = read_runs(write(tmp_path / "t.csv", "run_id,params,depth,width,loss\na,850,1,8,3\nb,3200,1,16,2.9\n"))
    assert runs.params.tolist() == [850, 3200]


def test_tokens_in_billions(tmp_path):
    text = "run_id,params,tokens,loss\na,3e8,6,3\nb,4e8,8,2.9\n"
    runs = units(
        tmp_path,
        text,
        r"t.csv, column 'tokens': the largest value is 8 .*looks like billions",
        {"tokens": "tokens * 1e9"},
    )
    assert runs.tokens.tolist() == [6e9, 8e9]
    text = "run_id,params,tokens,loss\na,3e8,6000,3\nb,4e8,8000,2.9\n"
    units(tmp_path, text, r"looks like millions of tokens", {"tokens": "tokens * 1e6"})


def test_loss_above_a_uniform_guess_is_bits(tmp_path):
    text = "run_id,vocab,loss\na,256,6.5\nb,256,7.1\nc,256,4.0\n"
    runs = units(
        tmp_path,
        text,
        r"t.csv, column 'loss': 2 of 3 values are above ln\(vocab\) = 5.55 nats",
        {"loss": "loss * log(2)"},
    )
    assert runs.loss.tolist() == pytest.approx([6.5 * math.log(2), 7.1 * math.log(2), 4 * math.log(2)])
    assert (
        len(read_runs(write(tmp_path / "u.csv", "run_id,vocab,loss\na,256,6.5\nb,256,3\nc,256,4.0\n"))) == 3
    )  # a minority diverged


def test_perplexity(tmp_path):
    text = "run_id,loss\na,26.7\nb,21.9\nc,19.6\nd,25.76\n"
    runs = units(
        tmp_path,
        text,
        r"t.csv, column 'loss': the median is 23.8, which looks like a perplexity",
        {"loss": "log(loss)"},
    )
    assert runs.loss.iloc[0] == pytest.approx(math.log(26.7))


@pytest.mark.parametrize(
    ("name", "what", "expression"),
    [
        ("loss_bits", "bits per token", "loss_bits * log(2)"),
        ("val/bpb", "bits per byte", "val_bpb * log(2) * BYTES_PER_TOKEN"),
        ("bits", "bits per token", "bits * log(2)"),
        ("ppl", "a perplexity", "log(ppl)"),
    ],
)
def test_a_loss_named_in_another_unit(tmp_path, name, what, expression):
    message = refused(
        write(tmp_path / "t.csv", f"run_id,{name}\na,1.2\n"),
        rf"t.csv: column '{name}' is {what}, a loss is in nats per token; write",
    )
    assert f"columns={{'loss': '{expression}'}}" in message


def test_two_units_of_params_in_one_file(tmp_path):
    text = "run_id,params,depth,width,loss\na,3.02e8,24,1024,3\nb,2.84e8,16,1216,3\nc,309,32,896,3\n"
    path = write(tmp_path / "t.csv", text)
    refused(
        path, r"t.csv, column 'params': two units in one column: .*in 1 rows .*first odd one: .*t.csv, row 4, value 309"
    )
    refused(write(tmp_path / "u.csv", "run_id,params,loss\na,3e8,3\nb,400,3\n"), r"u.csv, column 'params': two units")
    refused(
        write(tmp_path / "v.csv", "run_id,params,tokens,loss\na,3e8,6e9,3\nb,3e8,8,3\n"),
        r"v.csv, column 'tokens': two units .*row 3, value 8",
    )
    assert len(read_runs(path, columns={"params": "params"})) == 3


def test_a_wide_but_honest_range_is_no_suspect(tmp_path):
    rows = "".join(f"r{i},{10.0 ** (5 + i / 2):g},{10.0 ** (7 + i / 2):g},3\n" for i in range(12))
    assert len(read_runs(write(tmp_path / "t.csv", "run_id,params,tokens,loss\n" + rows))) == 12


def test_bits_and_nats_in_one_column(tmp_path):
    rows = "".join(f"r{i}{j},{1 + i}e8,2e9,{(3 - i / 10) * f}\n" for i in range(4) for j, f in enumerate((1, 1.4427)))
    refused(
        write(tmp_path / "t.csv", "run_id,params,tokens,loss\n" + rows),
        r"t.csv, column 'loss': .*factor of about 1.44.*4 of 4 groups.*bits and nats",
    )
    rows = "".join(f"r{i}{j},{1 + i}e8,2e9,{(3 - i / 10) * f}\n" for i in range(4) for j, f in enumerate((1, 1.02)))
    assert len(read_runs(write(tmp_path / "u.csv", "run_id,params,tokens,loss\n" + rows))) == 8
    # a sweep of learning rates spans as much by itself
    rows = "".join(
        f"r{i}{j},{1 + i}e8,2e9,{0.01 * f},{(3 - i / 10) * f}\n" for i in range(4) for j, f in enumerate((1, 1.4427))
    )
    assert len(read_runs(write(tmp_path / "v.csv", "run_id,params,tokens,lr,loss\n" + rows))) == 8


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 30), st.integers(1, 100), st.integers(4, 8192))
def test_honest_counts_pass_and_millions_do_not(spread, depth, width):
    n = 12.0 * depth * width**2
    df = pd.DataFrame({"params": [n, n * (1 + spread)], "depth": depth, "width": width, "loss": 3.0})
    check_units(df, source="t", place=str)
    with pytest.raises(SchemaError, match="looks like"):
        check_units(df.assign(params=df.params / 1e6), source="t", place=str)
    check_units(df.assign(params=df.params / 1e6), source="t", place=str, trusted=["params"])


# ---- anything at all


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    content=st.binary(max_size=400),
    name=st.sampled_from(["t.csv", "t.jsonl", "t.parquet", "t.csv.gz", "t.json", "trainer_state.json"]),
)
def test_any_bytes_are_read_or_refused_in_one_sentence(tmp_path, content, name):
    path = write(tmp_path / name, content)
    try:
        read_runs(path)
    except ScalinglabError as error:
        message = str(error)
        assert_one_sentence(message, path)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    cells=st.lists(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=4), min_size=1, max_size=5
    )
)
def test_any_cells_are_read_or_refused_in_one_sentence(tmp_path, cells):
    path = write(tmp_path / "t.csv", "loss,params,depth\n" + "\n".join(",".join(row) for row in cells))
    try:
        read_runs(path)
    except ScalinglabError as error:
        message = str(error)
        assert_one_sentence(message, path)


# ---- a NaN that a log says is a run gone wrong, not a row without a measurement


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        (
            "log.jsonl",
            '{"step": 1, "loss": 3}\n{"step": 2, "lr": 0.1}\n{"step": 3, "loss": NaN}\n',
            "log.jsonl, line 3",
        ),
        (
            "log.jsonl",
            '{"_step": 1, "val/loss": 3}\n{"_step": 2}\n{"_step": 3, "val/loss": "NaN"}\n',
            "log.jsonl, line 3",
        ),
        ("nano.csv", "iter,train_loss,val_loss\n0,9,9\n1,8,\n2,7,nan\n", "nano.csv, row 4"),
        ("wandb.csv", '"Step","x - loss","y - loss"\n1,3,\n2,,4\n3,NaN,\n', "wandb.csv, row 4"),
        (
            "trainer_state.json",
            '{"log_history": [{"step": 1, "loss": 3}, {"step": 2, "eval_loss": 3}, {"step": 3, "eval_loss": NaN}]}',
            "trainer_state.json, entry 3",
        ),
    ],
)
def test_written_nan_is_refused_and_absence_is_not(tmp_path, name, text, place):
    path = write(tmp_path / name, text)
    refused(path, rf"{place}, column '.*loss'.*: loss is missing \(empty or NaN\)")
    healthy = text.replace("NaN", "2.5").replace('"2.5"', "2.5").replace("nan", "2.5")
    assert read_runs(write(tmp_path / name, healthy)).loss.notna().all()


def test_columns_of_lists_and_records_without_scalars(tmp_path):
    assert read_runs(write(tmp_path / "t.json", '{"loss": [3, 2], "N": [1e8, 2e8]}')).loss.tolist() == [3, 2]
    refused(write(tmp_path / "t.json", '[{"loss": [3, 2]}]'), r"t.json has no numbers or texts in its records")


def test_a_table_of_n_d_l_says_how_to_name_the_loss(tmp_path):
    refused(write(tmp_path / "t.csv", "N,D,L\n1e8,2e9,3\n"), r"if 'L' is the loss write columns={'loss': 'L'}")


def test_unknown_encoding(tmp_path):
    with pytest.raises(ConfigError, match="encoding 'nope' is unknown"):
        read_runs(write(tmp_path / "t.csv", HEAD + ROWS[0]), encoding="nope")

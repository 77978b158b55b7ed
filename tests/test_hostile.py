"""Hostile input is refused in one sentence: no traceback, no hang, no memory blow-up, no code, nothing written elsewhere.

Small counts of benchmarks/fuzz every time (one seed, so a failure is a failure again), and each fault that it found as a test.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import os
import pickle
import re
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scalinglab import cli
from scalinglab.collecting import collect
from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError, ScalinglabError, SchemaError
from scalinglab.expressions import FUNCTIONS, evaluate, parse
from scalinglab.fitting import Fit, fit
from scalinglab.readers import read_runs
from scalinglab.tables import as_written, plain_text, write_table

FOLDER = ROOT / "benchmarks" / "fuzz"
QUICK = {"formula": 100, "csv": 80, "json": 80, "trainer_state": 50, "toml": 50, "fit": 10, "export": 30, "folder": 40}
FREE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def put(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# ---- the fuzzer, in small


@pytest.fixture(scope="session")
def fence():
    """The judge of benchmarks/fuzz; its audit hook stays in the process, but listens to nothing between cases."""
    if not FOLDER.is_dir():
        pytest.skip("benchmarks/fuzz is not part of this distribution")
    pytest.importorskip("resource", reason="the fence measures memory as POSIX systems do")
    sys.path.insert(0, str(FOLDER))
    try:
        import fuzz_fence
        import fuzz_seeds
        import fuzz_targets
    finally:
        sys.path.remove(str(FOLDER))
    fuzz_seeds.warm()
    return fuzz_fence.Fence(), fuzz_targets


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", QUICK)
def test_no_finding_in_small(fence, target, tmp_path):
    judge, targets = fence
    ended = {}
    for number in range(QUICK[target]):
        box = tmp_path / str(number)
        box.mkdir()
        verdict = judge.judge(lambda n=number, b=box: targets.TARGETS[target].case(Random(f"5:{target}:{n}"), b), box)
        assert verdict.outcome != "finding", f"{target} case {number} of seed 5: {verdict}"
        ended[verdict.outcome] = ended.get(verdict.outcome, 0) + 1
    assert ended.get("read", 0) > 0  # a fuzzer whose every input is refused at the door tests the door


def test_the_fence_sees_what_it_is_there_for(fence, tmp_path):
    judge, _ = fence
    inside, outside = tmp_path / "in", tmp_path / "out.txt"
    inside.mkdir()

    def judged(case):
        return judge.judge(case, inside)

    def refuse():
        raise SchemaError("no")

    assert judged(lambda: (inside / "x").write_text("x")).outcome == "read"
    assert judged(refuse).outcome == "refused"
    assert judged(lambda: 1 / 0).kind == "ZeroDivisionError"
    assert "outside the box" in judged(lambda: outside.write_text("x")).message
    assert "os.system" in judged(lambda: os.system("true")).message
    assert "unpickles" in judged(lambda: pickle.loads(pickle.dumps(Path("x")))).message
    assert judged(lambda: sys.exit(3)).kind == "SystemExit"


# ---- formulas


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9" * 400, "beyond any float"),
        ("1 + " + "9" * 1900, "beyond any float"),
        ("log(x, y)", "takes 1"),
        ("minimum(x, y, z)", "takes 2"),
        ("log()", "takes 1"),
        ("'\\ud800'", "surrogate"),
        ("(" * 900 + "1" + ")" * 900, "can't be parsed"),
        ("-" * 1900 + "1", "can't be parsed|nested deeper"),
        ("x.__class__", "Attribute"),
        ("__import__('os')", "calls '__import__'"),
        ("[c for c in x]", "ListComp"),
        ("f'{x}'", "JoinedStr"),
    ],
)
def test_formula_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        evaluate(text, {"x": np.ones(2), "y": np.ones(2), "z": np.ones(2)})


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_surplus_argument_is_no_place_to_write_to(name):
    """numpy's functions take an `out` after their arguments; log(x, loss) would have overwritten the losses."""
    loss = np.array([1.0, 2.0])
    with pytest.raises(ConfigError, match=rf"{name} takes . argument\(s\), not 3"):
        evaluate(f"{name}(x, x, loss)", {"x": np.array([3.0, 4.0]), "loss": loss})
    assert loss.tolist() == [1.0, 2.0]


@FREE
@given(st.text(max_size=80))
@example("params\x00")
@example("\ud800")
@example("ｅxp(params)")
def test_any_text_is_a_formula_or_refused(text):
    with contextlib.suppress(ConfigError):
        parse(text)


def test_a_number_of_ten_thousand_digits(tmp_path):
    digits = "9" * 10_000
    with pytest.raises(SchemaError):
        read_runs(put(tmp_path / "t.jsonl", f'{{"loss": {digits}}}\n'))
    with pytest.raises(SchemaError, match="is not a number"):
        read_runs(put(tmp_path / "t.csv", f"run_id,loss\na,{digits}\n"))
    with pytest.raises(SchemaError, match="is infinite"):
        read_runs(put(tmp_path / "u.csv", f"run_id,loss\na,{digits[:400]}\nb,3\n"))
    assert read_runs(put(tmp_path / "v.csv", "run_id,loss,x\na,3,1" + "0" * 30 + "\nb,3,2\n"))["x"].tolist() == [
        1e30,
        2.0,
    ]
    with pytest.raises(ConfigError, match="not TOML"):
        RunConfig.load(put(tmp_path / "t.toml", f"lr = {digits}\n"))


# ---- readers


def test_encodings_that_are_none(tmp_path):
    path = put(tmp_path / "t.csv", "run_id,loss\na,3\n")
    for name in ("hex", "zlib", "rot13", "undefined", "idna", "punycode", "no-such", "a\x00b"):
        with pytest.raises(ConfigError, match=re.escape(f"encoding {name!r} is unknown")):
            read_runs(path, encoding=name)
    lines = put(tmp_path / "t.jsonl", b'{"loss": 3, "note": "\xff"}\n')
    with pytest.raises(SchemaError, match="can't be decoded"):
        read_runs(lines, encoding="ascii")


def test_a_step_that_is_no_number(tmp_path):
    for step in ([1], {"a": 1}, True, None, "x"):
        state = {"log_history": [{"step": step, "eval_loss": 3.0}]}
        with pytest.raises(SchemaError, match="entry 1 of log_history: the step .* is not a number"):
            read_runs(put(tmp_path / "trainer_state.json", json.dumps(state)))


def test_half_a_surrogate_pair(tmp_path):
    with pytest.raises(SchemaError, match="line 1: a text holds half a surrogate pair"):
        read_runs(put(tmp_path / "t.jsonl", '{"loss": 3, "note": "\\ud800"}\n{"loss": 2, "note": "a"}\n'))
    table = read_runs(put(tmp_path / "u.jsonl", '{"loss": 3, "note": "\\ud83d\\ude00"}\n{"loss": 2, "note": "é"}\n'))
    assert table["note"].tolist() == ["\U0001f600", "é"]


def test_a_name_that_is_too_long_is_told(tmp_path):
    with pytest.raises(SchemaError, match="can't be read"):
        read_runs(tmp_path / ("x" * 5000))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_file_name_that_is_no_text(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.csv")
    with open(path, "wb") as f:
        f.write(b"step,loss\n1,3\n2,2\n")
    table = read_runs(os.fsdecode(path))
    assert set(table["run_id"]) == {"\\udcff"}
    assert read_runs(write_table(table, tmp_path / "t.csv"))["run_id"].tolist() == table["run_id"].tolist()


def test_a_loop_of_links_ends(tmp_path):
    put(tmp_path / "a" / "log.csv", "step,loss\n1,3\n2,2\n")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert len(read_runs(tmp_path)) == 2


def test_gzip_bomb(tmp_path):
    packed = gzip.compress(b"loss\n" + b"3\n" * (110 << 20), 1)
    with pytest.raises(SchemaError, match="would unpack to"):
        read_runs(put(tmp_path / "t.csv.gz", packed))


def test_records_that_share_no_name(tmp_path):
    lines = "\n".join(f'{{"loss": 3, "k{i}": 1}}' for i in range(3000))
    with pytest.raises(SchemaError, match="3,000 records with 3,001 different names"):
        read_runs(put(tmp_path / "t.jsonl", lines))
    one = json.dumps({f"k{i}": 1 for i in range(30_000)} | {"loss": 3})
    with pytest.raises(SchemaError, match="30,001 different names"):
        read_runs(put(tmp_path / "t.json", one))


def test_one_name_a_hundred_thousand_times(tmp_path):
    many = 100_000
    began = time.process_time()
    with pytest.raises(SchemaError, match="names the column 'a' twice"):
        read_runs(put(tmp_path / "t.csv", "loss" + ",a" * many + "\n3" + ",1" * many + "\n"))
    assert time.process_time() - began < 5  # it took two minutes


def test_a_chart_export_of_a_thousand_runs(tmp_path):
    runs = 1000
    head = "Step," + ",".join(f"run{i} - loss" for i in range(runs))
    rows = [
        f"{s},"
        + ",".join(
            "nan" if (i, s) == (7, 2) else "" if (i, s) == (8, 2) else f"{3 + i / 1e4 - s / 100:.5f}"
            for i in range(runs)
        )
        for s in (1, 2)
    ]
    began = time.process_time()
    with pytest.raises(SchemaError, match="column 'loss'.*is missing"):  # a NaN that is written is a run gone wrong
        read_runs(put(tmp_path / "t.csv", "\n".join([head, *rows, ""])))
    rows[1] = rows[1].replace("nan", "2.5")
    table = read_runs(put(tmp_path / "t.csv", "\n".join([head, *rows, ""])))
    assert time.process_time() - began < 5  # each column used to read the file again
    assert len(table) == 2 * runs - 1
    assert table.loc[(table["run_id"] == "run7") & (table["step"] == 2), "loss"].tolist() == [2.5]
    assert table.loc[table["run_id"] == "run999", "loss"].tolist() == pytest.approx([3.0899, 3.0799])


class TestParquet:
    pa = pytest.importorskip("pyarrow")

    def written(self, path, table, **options):
        import pyarrow.parquet as pq

        pq.write_table(table, path, **options)
        return path

    def test_a_constant_forty_million_times(self, tmp_path):
        table = self.pa.table({"loss": self.pa.array(np.full(40_000_000, 3.0, dtype=np.float64))})
        with pytest.raises(SchemaError, match="would unpack to 305 MiB"):
            read_runs(self.written(tmp_path / "t.parquet", table, compression="zstd"))

    def test_a_megabyte_that_rows_share(self, tmp_path):
        text = self.pa.array(["y" * 1_000_000]).dictionary_encode().take(self.pa.array([0] * 1000))
        table = self.pa.table({"loss": [3.0] * 1000, "note": text})
        with pytest.raises(SchemaError, match="would unpack to"):
            read_runs(self.written(tmp_path / "t.parquet", table, compression="zstd", store_schema=False))

    def test_bytes_are_text_or_left_out(self, tmp_path):
        table = self.pa.table(
            {"run_id": self.pa.array([b"a", b"b"]), "loss": [3.0, 2.0], "status": self.pa.array([b"\xff", b"\xfe"])}
        )
        read = read_runs(self.written(tmp_path / "t.parquet", table))
        assert read["run_id"].tolist() == ["a", "b"]
        assert "status" not in read
        assert any("columns of bytes left out: status" in note for note in read.attrs["notes"])

    def test_categories_are_text(self, tmp_path):
        arch = self.pa.array(["pre_ln", "hc", None]).dictionary_encode()
        read = read_runs(
            self.written(tmp_path / "t.parquet", self.pa.table({"loss": [3.0, 2.0, 1.0], "architecture": arch}))
        )
        assert read["architecture"].tolist()[:2] == ["pre_ln", "hc"]
        assert pd.isna(read["architecture"].iloc[2])


def test_tensorboard_damage_is_told(tmp_path):
    pytest.importorskip("tensorboard")
    if not FOLDER.is_dir():
        pytest.skip("benchmarks/fuzz is not part of this distribution")
    sys.path.insert(0, str(FOLDER))
    try:
        import fuzz_seeds
    finally:
        sys.path.remove(str(FOLDER))
    for number in range(40):
        data = bytearray(fuzz_seeds.tensorboard(Random(number)))
        data[20 + number :] = data[21 + number :]
        with contextlib.suppress(ScalinglabError):
            read_runs(put(tmp_path / f"{number}" / "events.out.tfevents.1", bytes(data)))


# ---- TOML and JSON


def test_toml_without_end(tmp_path):
    for text in ("lr = " + "[" * 5000 + "]" * 5000, "a" + ".a" * 3000 + " = 1", "a = " + "{a = " * 2000):
        with pytest.raises(ConfigError, match="not TOML|unknown key"):
            RunConfig.load(put(tmp_path / "t.toml", text))


def test_toml_integers_have_64_bits(tmp_path):
    from run_folders import config

    text = config().save(tmp_path / "c.toml").read_text().replace("tokens = 512", "tokens = " + "9" * 400)
    with pytest.raises(ConfigError, match="tokens: an integer beyond 64 bits"):
        RunConfig.load(put(tmp_path / "t.toml", text))


@pytest.mark.parametrize("odd", [{"kind": {}}, {"kind": []}, {"loss": 10**400}, {"loss": math.nan}, {"step": "4"}])
def test_an_odd_line_of_a_log_is_named(tmp_path, odd):
    from run_folders import config, write_run

    folder = write_run(tmp_path, config(), summary=False)
    lines = (folder / "log.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | odd)
    if "loss" in odd:
        lines[1] = lines[1].replace('"train"', '"eval"')
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    notes = collect(tmp_path, unfinished=True).attrs["notes"]
    assert any("line 2 not accepted" in note for note in notes)


def test_a_summary_without_end_is_named(tmp_path):
    from run_folders import config, write_run

    write_run(tmp_path, config(seed=0))
    folder = write_run(tmp_path, config(seed=1))
    record = (folder / "summary.json").read_text().rstrip("}") + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (folder / "summary.json").write_text(record)
    table = collect(tmp_path)
    assert len(table) == 1
    assert any("summary.json is torn or foreign" in note for note in table.attrs["notes"])


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    runs = read_runs("embedded:simulated_shapes")
    made = fit("chinchilla", runs[runs["architecture"] == "pre_ln"], rng=0)
    return json.loads(made.save(tmp_path_factory.mktemp("fit") / "f.json").read_bytes())


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("status", "splendid", "status 'splendid' is unknown"),
        ("params", {"E": 1.0}, "the record others"),
        ("theta", [0.0], "theta has 1 numbers"),
        ("weights", [1.0], "weights"),
        ("notes", [3], "isn't text"),
        ("provenance", [], "damaged"),
        ("search", {}, "damaged"),
        ("runs", {}, "damaged"),
    ],
)
def test_a_fit_whose_parts_do_not_fit(record, tmp_path, key, value, told):
    path = put(tmp_path / "f.json", json.dumps(record | {key: value}))
    with pytest.raises(SchemaError, match=told):
        Fit.load(path)


def test_a_fit_with_an_empty_bound_or_an_odd_check(record, tmp_path):
    bounded = record | {"law": record["law"] | {"bounds": {"alpha": []}}}
    checked = record | {"checks": [record["checks"][0] | {"level": "fine"}]}
    for odd in (bounded, checked):
        with pytest.raises(SchemaError, match="the fit record is damaged"):
            Fit.load(put(tmp_path / "f.json", json.dumps(odd)))


# ---- spreadsheets

ODD = st.text(st.sampled_from("=+-@\t\r\n' ＝\ufeff\u200b1aE.,\";|\u00a0"), max_size=6)


def starts_a_formula(cell: str) -> bool:
    """What a spreadsheet runs, told from the rule and not from the code: first character, blanks passed over."""
    seen = cell.lstrip("\ufeff\u200b\u2060")
    first = re.sub(r"^[\s\ufeff\u200b\u2060]+", "", seen)[:1]
    if seen[:1] not in ("\t", "\r", "\n") and first not in tuple("=+-@＝＋－＠"):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


@FREE
@given(ODD)
@example("-3")
@example("'=1")
@example("''=1")
@example("\ufeff=1")
@example("-1e5")
@example("-inf")
@example("it's")
def test_a_text_is_made_plain_and_comes_back(text):
    written = plain_text(text)
    assert not starts_a_formula(written)
    assert as_written(written) == text
    if not starts_a_formula(text.lstrip("'")):
        assert written == text


@FREE
@example(texts=["1", " \u200b ="])
@given(st.lists(ODD.filter(lambda t: t.strip()), min_size=2, max_size=5))
def test_tables_read_back_the_texts_they_were_written_from(tmp_path, texts):
    table = pd.DataFrame(
        {"run_id": [f"r{i}" for i in range(len(texts))], "loss": 3.0, "=note": [f"{t}x" for t in texts], "shift": -1.5}
    )
    path = write_table(table, tmp_path / "t.csv")
    with path.open(newline="", encoding="utf-8") as f:
        assert not any(starts_a_formula(cell) for row in csv.reader(f) for cell in row)
    back = read_runs(path)
    assert back["=note"].tolist() == table["=note"].tolist()
    assert back["shift"].tolist() == table["shift"].tolist()


def test_negative_numbers_are_numbers(tmp_path):
    path = write_table(pd.DataFrame({"loss": [3.0], "x": [-2.5], "y": ["-2.5"], "z": [-math.inf]}), tmp_path / "t.csv")
    assert "'" not in path.read_text()


# ---- the command line


def ended(argv, capsys):
    """Exit code and what was said on stderr."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    return leaving.value.code, capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'a,b\n1,"2', b"PAR1", b"{", b"a,b\n1,2,3\n", b"\x80\x04."])
def test_collect_refuses_a_damaged_table_of_an_earlier_sitting(tmp_path, capsys, data):
    from run_folders import config, write_run

    write_run(tmp_path / "runs", config())
    old = put(tmp_path / "old.csv", data)
    code, said = ended(["collect", str(tmp_path / "runs"), "--add", str(old)], capsys)
    assert code == 2
    assert said.splitlines()[-1].startswith("error: ")


def test_names_in_a_log_are_no_paths(tmp_path, capsys, monkeypatch):
    """Run ids and architectures that look like paths change nothing about where files go."""
    monkeypatch.chdir(tmp_path)
    rows = ["run_id,architecture,params,tokens,depth,width,loss"]
    rows += [f"../../{i},/etc/{i},{1e8 * (i + 1):g},{2e9 * (i + 1):g},{4 + i},256,{3 - i / 10}" for i in range(6)]
    put(tmp_path / "in" / "runs.csv", "\n".join(rows))
    code, _ = ended(["import", "in/runs.csv", "--out", "out/t.csv"], capsys)
    assert code == 0
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "in",
        "in/runs.csv",
        "out",
        "out/t.csv",
    ]
    assert read_runs("out/t.csv")["run_id"].tolist() == [f"../../{i}" for i in range(6)]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\x00b", "..", "é/ö", "con", ""])
def test_a_run_id_is_a_file_name_whatever_its_parts(name):
    """Labels are no part of the id; what is, is checked or stripped of all but letters, digits and _ . + -."""
    from run_folders import config

    run = config(sweep=name, match_group=name)
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", run.run_id)
    assert not run.run_id.startswith(".")
    with pytest.raises(ConfigError):
        config(architecture=name)


def test_nothing_is_unpickled(tmp_path):
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (touched,))

    for name in ("t.csv", "t.parquet", "t.jsonl", "t", "t.pkl"):
        with pytest.raises(ScalinglabError):
            read_runs(put(tmp_path / name, pickle.dumps(Evil())))
    checkpoints = pytest.importorskip("scalinglab.train.checkpoints", reason="needs torch", exc_type=ImportError)
    import torch

    out = io.BytesIO()
    torch.save({"model": Evil()}, out)
    for data in (pickle.dumps(Evil()), out.getvalue()):
        assert checkpoints.read(put(tmp_path / "checkpoint.pt", data)) is None
    assert not touched.exists()

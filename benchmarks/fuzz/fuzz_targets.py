"""What is fuzzed: each target makes a hostile input from a random number generator and hands it to one entry point.

A target returns where the input was read or was refused by a ScalinglabError; `fuzz_fence` judges everything else.
"""

from __future__ import annotations

import contextlib
import gzip
import html.parser
import io
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import fuzz_mutations as m
import fuzz_seeds as seeds
import numpy as np
import pandas as pd

from scalinglab.errors import ScalinglabError

ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8", "UTF8", "latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "ascii", "shift_jis", "utf-7",
             "hex", "zlib", "rot13", "undefined", "idna", "punycode", "unicode_escape", "no-such", "", "a\x00b", "base64")  # fmt: skip


class Broken(AssertionError):
    """The input was taken, and the result is not what it must be."""


@dataclass(frozen=True)
class Target:
    """`case(rng, box)` makes an input and runs it; `weight` is its share of the cases; `single` takes one file's bytes."""

    key: str
    case: Callable[[Random, Path], None]
    weight: float
    what: str
    single: Callable[[bytes, Path], None] | None = None


def _options(rng: Random) -> dict[str, Any]:
    """Options of read_runs, plain in most cases."""
    given: dict[str, Any] = {}
    if rng.random() < 0.25:
        given["columns"] = {
            rng.choice(("loss", "params", "tokens", "depth", "run_id", "step", "seed", "status", "width"))
            if rng.random() < 0.9
            else m.text(rng): _formula(rng)
            for _ in range(rng.choice((1, 1, 2)))
        }
    if rng.random() < 0.15:
        given["where"] = _formula(rng)
    if rng.random() < 0.1:
        given["key"] = (rng.choice((rng.choice(m.NAMES), "loss", "seed", m.text(rng))),)
    if rng.random() < 0.2:
        given["params"] = rng.choice(("total", "as given", "backbone"))
    if rng.random() < 0.1:
        given["torn"] = "drop"
    return given


def _read(path: Path, options: dict[str, Any] | None = None, *, encoding: str = "utf-8") -> pd.DataFrame:
    from scalinglab.readers import describe_mapping, read_runs

    table = read_runs(path, encoding=encoding, **(options or {}))
    describe_mapping(table)
    if not len(table) or "run_id" not in table or "loss" not in table:
        raise Broken("a table without rows, run_id or loss was returned")
    return table


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _csv_text(rng: Random, rows: list[list[str]]) -> bytes:
    import csv

    out = io.StringIO()
    if rng.random() < 0.8:
        writer = csv.writer(
            out, delimiter=rng.choice((",", ",", ",", ";", "\t")), quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)),
            lineterminator=rng.choice(("\n", "\n", "\r\n", "\r")),
        )  # fmt: skip
        writer.writerows(rows)
    else:
        out.write("\n".join(",".join(row) for row in rows))
    return out.getvalue().encode(
        rng.choice((*["utf-8"] * 17, "utf-8-sig", "utf-16", "latin-1")), rng.choice(("replace", "ignore"))
    )


def csv_case(rng: Random, box: Path) -> None:
    rows = seeds.tables()[rng.choice(("runs", "runs", "nanogpt", "sizes", "wide"))]
    data = _csv_text(rng, m.cells(rng, rows))
    if rng.random() < 0.25:
        data = m.scramble(rng, data)
    if rng.random() < 0.004:
        data = _extreme(rng)
    name = rng.choice(
        (*["t.csv"] * 12, "t.tsv", "log.csv", "log.csv", "t.csv.gz", "t.csv.gz", "t.txt", "t.parquet", "t")
    )
    if name.endswith(".gz") or rng.random() < 0.05:
        data = gzip.compress(data, 1)
        data = m.scramble(rng, data, 2) if rng.random() < 0.3 else data
    encoding = rng.choice(ENCODINGS) if rng.random() < 0.15 else "utf-8"
    _read(_put(box / name, data), _options(rng), encoding=encoding)


def _extreme(rng: Random) -> bytes:
    """Valid or nearly so, and very long in one direction."""
    kind = rng.randrange(7)
    if kind == 0:
        return (",".join(f"c{i}" for i in range(300_000)) + ",loss\n" + "1," * 300_000 + "3\n").encode()
    if kind == 1:
        return b"loss,x\n3," + b"y" * 3_000_000 + b"\n"
    if kind == 2:
        return b'loss,x\n3,"' + b"y\n" * 500_000
    if kind == 3:
        return (
            "step," + ",".join(f"r{i} - loss" for i in range(3000)) + "\n" + ("1," + "3," * 2999 + "3\n") * 3
        ).encode()
    if kind == 4:
        return b"loss\n" + b"\n" * 2_000_000 + b"3\n"
    if kind == 5:
        return b"run_id,loss\n" + b"".join(b"%s,3\n" % (b"'" * (i % 50) + b"=1") for i in range(50_000))
    return b"#\n" * 500_000 + b"loss\n3\n"


def parquet_case(rng: Random, box: Path) -> None:
    data = seeds.parquet(rng)
    if rng.random() < 0.3:
        data = m.scramble(rng, data, 3)
    elif rng.random() < 0.2:  # the footer alone: its lengths, counts and offsets
        at = rng.randrange(max(4, len(data) - 3000), len(data))
        data = data[:at] + m.scramble(rng, data[at:], 2)
    _read(_put(box / "t.parquet", data), _options(rng))


def json_case(rng: Random, box: Path) -> None:
    records = m.altered(rng, seeds.records() if rng.random() < 0.5 else seeds.runs().head(6).to_dict("records"))
    if rng.random() < 0.6 and isinstance(records, list):
        data = b"\n".join(m.json_bytes(rng, r, lines=True) for r in records) + b"\n"
    elif rng.random() < 0.3 and isinstance(records, list) and all(isinstance(r, dict) for r in records):
        names = {k for r in records for k in r}
        data = m.json_bytes(rng, {k: [r.get(k) for r in records] for k in names})
    else:
        data = m.json_bytes(rng, records)
    if rng.random() < 0.3:
        data = m.scramble(rng, data)
    if rng.random() < 0.003:
        data = b"\n".join(b'{"loss": 3, "k%d": 1}' % i for i in range(6_000))
    encoding = rng.choice(ENCODINGS) if rng.random() < 0.1 else "utf-8"
    name = rng.choice(("t.jsonl", "t.json", "t.ndjson", "history.jsonl", "t.jsonl.gz", "t.csv"))
    if rng.random() < 0.15:
        _put(
            box / "config.json",
            m.json_bytes(rng, m.altered(rng, {"n_layer": 12, "n_embd": 768, "nested": {"lr": 1.0}})),
        )
    _read(_put(box / name, gzip.compress(data, 1) if name.endswith("gz") else data), _options(rng), encoding=encoding)


def trainer_case(rng: Random, box: Path) -> None:
    data = m.json_bytes(rng, m.altered(rng, seeds.trainer_state()))
    if rng.random() < 0.2:
        data = m.scramble(rng, data)
    _read(
        _put(box / rng.choice(("trainer_state.json", "checkpoint-10/trainer_state.json", "t.json")), data),
        _options(rng),
    )


def tensorboard_case(rng: Random, box: Path) -> None:
    data = seeds.tensorboard(rng)
    if rng.random() < 0.3:
        data = m.scramble(rng, data, 3)
    _read(_put(box / "events.out.tfevents.1.host", data), _options(rng))


def folder_case(rng: Random, box: Path) -> None:
    where = box / "logs"
    if rng.random() < 0.6:
        _trained(rng, where)
    else:
        for i in range(rng.randint(1, 3)):
            name = rng.choice(
                (
                    "a.csv",
                    "b/log.csv",
                    "c/checkpoint-٣/trainer_state.json",
                    "d/t.jsonl",
                    ".hidden/x.csv",
                    "é\n.csv",
                    "e/metrics.csv",
                    "=f.csv",
                )
            )
            table = seeds.tables()[rng.choice(("runs", "nanogpt"))]
            data = (
                m.json_bytes(rng, seeds.trainer_state())
                if name.endswith(".json")
                else _csv_text(rng, m.cells(rng, table))
            )
            _put(where / f"{i}" / name, data)
        if rng.random() < 0.2:
            _put(Path(os.fsdecode(os.fsencode(where) + b"/\xff\xfe.csv")), _csv_text(rng, seeds.tables()["nanogpt"]))
        if rng.random() < 0.2:
            os.symlink(where, where / "loop")
        if rng.random() < 0.1:
            os.symlink("/nowhere", where / "gone.csv")
        if rng.random() < 0.1:
            os.mkfifo(where / "pipe.csv")
        if rng.random() < 0.1:
            (where / "trainer_state.json").mkdir()
    given = rng.choice(
        (
            where,
            where,
            where,
            where / "..",
            where / "nothing",
            Path("x" * 5000),
            str(where) + "\x00",
            "",
            "embedded:" + m.text(rng),
            ".",
        )
    )
    table = _read(given, _options(rng)) if given not in ("", ".") else _read(where)
    if rng.random() < 0.2:
        from scalinglab.tables import write_table

        write_table(table, box / "out.csv")


def _trained(rng: Random, where: Path) -> None:
    """A folder of the trainer with its files mutated."""
    from scalinglab.config import RunConfig
    from scalinglab.tomlfile import read

    where.mkdir(parents=True)
    run = read(_put(where / "run.toml", seeds.RUN.encode()), RunConfig)
    for seed in range(rng.randint(1, 3)):
        import msgspec

        one = msgspec.structs.replace(run, seed=seed)
        folder = where / (one.run_id if rng.random() < 0.95 else rng.choice(("x", "run_id", "é")))
        folder.mkdir(exist_ok=True)
        one.save(folder / "config.toml")
        if rng.random() < 0.3:
            _put(folder / "config.toml", _toml_bytes(rng, (folder / "config.toml").read_text(encoding="utf-8")))
        lines = [
            {"kind": "eval", "step": s, "tokens": s * one.batch_tokens, "loss": 3.0, "loss_se": 0.1} for s in (0, 4, 8)
        ]
        log = m.altered(rng, lines) if rng.random() < 0.5 else lines
        _put(folder / "log.jsonl", b"\n".join(m.json_bytes(rng, line, lines=True) for line in log) + b"\n")
        summary: Any = {
            "schema": "scalinglab/summary-1", "run_id": one.run_id, "status": "finished", "step": one.steps, "tokens": one.steps * one.batch_tokens,
            "loss": 2.0 + seed, "loss_se": 0.01, "seconds": 1.5, "weights_sha256": "ab", "by_difficulty": {"1": {"loss": 1.0, "accuracy": 0.9}},
        }  # fmt: skip
        if rng.random() < 0.6:
            summary = m.altered(rng, summary, rng.randint(0, 2))
        if rng.random() < 0.8:
            _put(folder / "summary.json", m.json_bytes(rng, summary))
        if rng.random() < 0.1:
            _put(folder / "summary.json", m.scramble(rng, (m.json_bytes(rng, summary))))
    if rng.random() < 0.3:
        from scalinglab.collecting import collect

        collect(where, checkpoints=rng.random() < 0.5, unfinished=rng.random() < 0.5)


def _toml_bytes(rng: Random, text: str) -> bytes:
    """TOML with values and lines changed, or bytes scrambled."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, sign, _ = lines[at].partition("=")
        kind = rng.randrange(9)
        odd = rng.choice(
            (m.number(rng), json.dumps(m.text(rng)), "9" * 4000, "-1", "0", "1e308", "inf", "nan", "[]", "{}", "true", "1979-05-27", "07:32:00", "[[1]]",
             "0x" + "f" * 3000, "1e999", '"""\n"""', "[" * 3000 + "]" * 3000, '{a = {b = {c = 1}}}', "10" * 8, "1_000_000_000_000", "[1, 'a', 2.0]")
        )  # fmt: skip
        if sign and kind <= 4:
            lines[at] = f"{key}= {odd}"
        elif kind == 5:
            del lines[at]
            lines = lines or [""]
        elif kind == 6:
            lines.insert(at, f"{rng.choice((*m.NAMES, 'x', 'a.b.c', json.dumps(m.text(rng))))} = {odd}")
        elif kind == 7:
            lines.insert(
                at,
                rng.choice(
                    (
                        "[run]",
                        "[[shapes]]",
                        "[shape]",
                        "[match]",
                        "[[match]]",
                        "[axes]",
                        "[a." + "b." * 500 + "c]",
                        "[[tuned]]",
                    )
                ),
            )
        elif sign:
            lines.insert(at, lines[at])
    data = "\n".join(lines).encode("utf-8", "replace")
    return m.scramble(rng, data, 3) if rng.random() < 0.3 else data


def toml_case(rng: Random, box: Path) -> None:
    from scalinglab.config import RunConfig
    from scalinglab.depth_benefit.prereg import Prereg, read_prereg
    from scalinglab.questions import read_question
    from scalinglab.sweeps import load_sweep

    kind = rng.choice(("sweep", "sweep", "question", "prereg", "run"))
    text = {"sweep": rng.choice(seeds.sweeps()), "question": seeds.QUESTION, "prereg": seeds.PREREG, "run": seeds.RUN}[
        kind
    ]
    path = _put(box / "t.toml", _toml_bytes(rng, text))
    if kind == "sweep":
        from scalinglab.planning import plan

        sweep = load_sweep(path)
        if _runs_of(sweep) <= 200:
            plan(sweep)
    elif kind == "question":
        read_question(path)
    elif kind == "prereg":
        read_prereg(path)
        assert Prereg
    else:
        run = RunConfig.load(path)
        if "/" in run.run_id or "\x00" in run.run_id or run.run_id in ("", ".", "..") or len(run.run_id) > 250:
            raise Broken(f"run_id {run.run_id!r} is no file name")
        run.save(box / "again.toml")
        if RunConfig.load(box / "again.toml") != run:
            raise Broken("a saved config reads back as another")


def _runs_of(sweep: Any) -> int:
    """Upper bound on the combinations of a sweep, so that planning a large one isn't taken for a hang."""
    total = 1
    for name in ("budgets", "corpora", "architectures", "parametrizations", "lrs", "seeds", "shapes"):
        total *= max(1, len(getattr(sweep, name)))
    for values in sweep.further_axes().values():
        total *= max(1, len(values))
    rules = sweep.match if isinstance(sweep.match, (list, tuple)) else [sweep.match]
    return total * max(1, sum(len(getattr(r, "depths", ()) or ()) or 1 for r in rules))


def fit_case(rng: Random, box: Path) -> None:
    record = seeds.fit_record() if rng.random() < 0.8 else seeds.crossed_record()
    data = m.json_bytes(rng, m.altered(rng, record))
    if rng.random() < 0.15:
        data = m.scramble(rng, data)
    fit_single(data, box)


def fit_single(data: bytes, box: Path) -> None:
    from scalinglab.fitting import Fit
    from scalinglab.frontier import optimal

    made = Fit.load(_put(box / "f.json", data))
    made.summary()
    made.to_frame()
    made.predict(made.runs)
    optimal(made, flops=(1e19,), group=made.law.levels[0] if made.law.levels else None).summary()
    made.save(box / "again.json")


def records_case(rng: Random, box: Path) -> None:
    from scalinglab.coordinates import CoordinateCheck
    from scalinglab.probe_report import ProbeReport

    if rng.random() < 0.5:
        data = m.json_bytes(rng, m.altered(rng, seeds.check_record()))
        check = CoordinateCheck.load(_put(box / "c.json", m.scramble(rng, data, 2) if rng.random() < 0.1 else data))
        check.summary()
    else:
        data = m.json_bytes(rng, m.altered(rng, seeds.probe_record()))
        report = ProbeReport.load(_put(box / "p.json", m.scramble(rng, data, 2) if rng.random() < 0.1 else data))
        report.summary()


ATTACKS = (
    "__import__('os').system('touch PWNED')", "open('PWNED', 'w')", "().__class__.__bases__[0].__subclasses__()", "exec('1')", "eval('1')",
    "[c for c in ()]", "lambda: 1", "f'{1}'", "params.values", "params[0]", "(x := 1)", "log(*params)", "log(**params)", "log(params, loss)",
    "minimum(params, tokens, loss)", "log(x=1)", "exp", "'a' * 1000000000", "9**9**9**9", "1e308**1e308", "10**400", "9" * 1999, "-" * 1900 + "1",
    "(" * 999 + "1" + ")" * 999, "not " * 400 + "x", "1" + "+1" * 900, "x" * 1999, "0x" + "f" * 1900, "1j", "...", "b'a'", "'\\ud800'", "True + 1", "''",
    "1 if 2 else 3", "x or y and not z", "a@b", "a//b", "a%b", "a<<b", "~a", "await x", "yield", "'%s' % 1", "'a' < 1", "None", "nan", "inf", "1_0",
    "params" + "**params" * 50, "E + A*params**-alpha" + " + B*tokens**-beta" * 30, "E+A*params**-9999999999999999999999999999", "((A)**(1/d) + (B)**(1/d))**d",
    "A*A", "params**params", "exp(exp(exp(1000)))", "log(-1)", "0/0", "1/0", "-'a'", "'a'+'b'", "'a'*True", "True**-1", "0.0**-1", "(-8.0)**(1/3)", "minimum()", "log()",
    "1 is 1", "x not in y", "params == 'a'", "run_id + run_id", "run_id * 2", "status > 3", "lr < run_id", "ｅxp(1)", "ｐarams",
)  # fmt: skip


def _formula(rng: Random) -> str:
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice(seeds.FORMULAS)
    if kind < 4:
        return rng.choice(ATTACKS)
    if kind == 4:
        return m.word(rng)
    if kind == 5:
        return _grown(rng, rng.randint(0, 6))
    base = rng.choice(seeds.FORMULAS)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(base) + 1)
        piece = rng.choice(
            (
                "(",
                ")",
                "**",
                "*",
                "+",
                "-",
                "/",
                "1",
                "params",
                "1e308",
                ",",
                " ",
                "'",
                "exp(",
                "log(",
                "<",
                "and ",
                "not ",
                ".",
                "[",
                "\x00",
                "\n",
                "#",
                m.word(rng),
            )
        )
        base = base[:at] + piece + base[at + rng.choice((0, 0, 1, 3)) :]
    return base


def _grown(rng: Random, depth: int) -> str:
    """A random expression of the grammar."""
    if depth == 0:
        return rng.choice(
            (
                "params",
                "tokens",
                "loss",
                "run_id",
                "architecture",
                "depth",
                "E",
                "A",
                "alpha",
                "u",
                "1",
                "2.5",
                "0",
                "1e308",
                "9" * 400,
                "'a'",
                "True",
            )
        )
    a, b = (_grown(rng, rng.randrange(depth)) for _ in range(2))
    return rng.choice(
        (f"({a} + {b})", f"({a} - {b})", f"{a}*{b}", f"({a})/({b})", f"({a})**({b})", f"-({a})", f"not ({a})", f"({a}) and ({b})", f"({a}) or ({b})",
         f"({a}) < ({b})", f"({a}) == ({b})", f"exp({a})", f"log({a})", f"minimum({a}, {b})", f"softplus({a})", f"abs({a})", f"sqrt({a})", f"log2({a}, {b})")
    )  # fmt: skip


def formula_case(rng: Random, box: Path) -> None:
    formula_single(_formula(rng).encode("utf-8", "surrogatepass"), box)


def formula_single(data: bytes, box: Path) -> None:
    """Every use of a formula; each may refuse it."""
    from scalinglab import expressions
    from scalinglab.algebra import latex, to_sympy
    from scalinglab.laws import law_from
    from scalinglab.runs import select

    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    table = seeds.runs()
    before = table.copy()
    for use in (
        lambda: expressions.names(text),
        lambda: expressions.evaluate(
            text,
            {
                "params": 2.0,
                "tokens": 3,
                "x": np.array([1.0, 2.0]),
                "run_id": np.array(["a", "b"], dtype=object),
                "E": 1.0,
            },
        ),
        lambda: select(table, text),
        lambda: law_from(text).loss(dict.fromkeys(law_from(text).names, 1.0), table.assign(params=1e6)),
        lambda: law_from(text).structure,
        lambda: latex(text),
        lambda: str(to_sympy(text)) if len(text) < 200 else None,
    ):
        with contextlib.suppress(ScalinglabError):
            use()
    if not table.equals(before):
        raise Broken("the expression changed the data")


def export_case(rng: Random, box: Path) -> None:
    """Texts that a spreadsheet would run leave as plain text, and come back as they were."""
    from scalinglab.readers import read_runs
    from scalinglab.tables import write_table

    texts = []
    for _ in range(rng.randint(2, 6)):
        made = "".join(
            rng.choice(
                (
                    "=",
                    "+",
                    "-",
                    "@",
                    "\t",
                    "\r",
                    "\n",
                    "'",
                    " ",
                    "＝",
                    "\ufeff",
                    "1",
                    "a",
                    "1e5",
                    ",",
                    '"',
                    ";",
                    "SUM(A1)",
                    "\u00a0",
                    "-3",
                    ".",
                )
            )
            for _ in range(rng.randint(1, 5))
        )
        texts.append(made)
    table = pd.DataFrame(
        {
            "run_id": [f"r{i}" for i in range(len(texts))],
            "params": 1e8,
            "tokens": 2e9,
            "loss": 3.0,
            "note": texts,
            "shift": -1.5 - np.arange(len(texts)),
        }
    )
    table.loc[len(texts)] = ["z", 1e8, 2e9, 3.0, "plain", -0.5]
    path = write_table(table, box / rng.choice(("t.csv", "t.csv.gz", "t.parquet")))
    back = read_runs(path)
    if back["shift"].tolist() != table["shift"].tolist():
        raise Broken("negative numbers changed")
    if back["note"].dtype.kind in "iuf":
        return
    for want, got in zip(table["note"], back["note"], strict=True):
        same = (
            want == got
            or (pd.isna(got) and not want.strip("\ufeff"))
            or (isinstance(want, str) and want.strip() == "" and pd.isna(got))
        )
        if not same:
            raise Broken(f"wrote {want!r}, read {got!r}")
    if path.suffix != ".parquet":
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        import csv

        for row in csv.reader(io.StringIO(raw.decode(), newline="")):
            for cell in row:
                if _runs_as_formula(cell):
                    raise Broken(f"the cell {cell!r} runs as a formula")


def _runs_as_formula(cell: str) -> bool:
    """An independent check: what a spreadsheet takes for a formula, numbers left out."""
    text = cell.lstrip("\ufeff")
    if text[:1] in ("\t", "\r", "\n") or text.strip()[:1] in ("=", "+", "-", "@", "＝", "＋", "－", "＠"):
        try:
            float(cell)
        except ValueError:
            return True
    return False


class _Elements(html.parser.HTMLParser):
    """Elements and attributes of a page that could run or load anything."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.bad: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "form", "base", "audio", "video"):
            self.bad.append(tag)
        for name, v in attrs:
            loads = name in ("src", "href", "xlink:href", "action", "srcdoc", "formaction") and not str(v).startswith(
                ("#", "data:image/", "data:,")
            )
            if name.startswith("on") or loads or "javascript:" in str(v).lower():
                self.bad.append(f"{tag} {name}={v}")


def html_case(rng: Random, box: Path) -> None:
    from scalinglab.depth_benefit import depth_benefit
    from scalinglab.report.html import html_report

    table = seeds.runs().assign(params=seeds.runs()["params_backbone"])

    def label() -> str:
        return m.text(rng).encode("utf-8", "replace").decode() or "x"

    a, b = label(), label()
    table["architecture"] = np.where(table["architecture"] == "pre_ln", rng.choice((a, "pre_ln")), b)
    table["match_group"] = rng.choice((label(), "m"))
    table["run_id"] = [f"{label()}{i}" for i in range(len(table))]
    table["parametrization"] = rng.choice((label(), "sp"))
    table["eval_dataset"] = label()
    table.attrs = {"source": [{"path": label(), "sha256": "0" * 64}], "notes": [label(), label()], "params": "backbone"}
    report = depth_benefit(table, reanalyse=False, draws=99, rng=0, method=rng.choice(("auto", "cells", "pairs")))
    report.summary()
    text = html_report(report)
    seen = _Elements()
    seen.feed(text)
    seen.close()
    if seen.bad:
        raise Broken(f"the page has {seen.bad[:3]}")
    text.encode()
    report.save(box / "report")


FIGURES_OF_FITS = ("residuals", "shape_valley", "forest", "loss_vs_scale", "frontier", "profile")


def figure_case(rng: Random, box: Path) -> None:
    """Figures of a fit whose levels are hostile labels."""
    from scalinglab.fitting import Fit
    from scalinglab.report.drawing import draw

    data = json.dumps(seeds.crossed_record())
    label = json.dumps(m.text(rng).encode("utf-8", "replace").decode())[1:-1]
    data = data.replace("hyper_connections", label)
    made = Fit.load(_put(box / "f.json", data.encode()))
    draw(made, box / "figures", names=(rng.choice(FIGURES_OF_FITS),), formats=("svg",))


def checkpoint_case(rng: Random, box: Path) -> None:
    import pickle

    import torch

    from scalinglab.train import checkpoints

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, ("touch PWNED",))

    kind = rng.randrange(4)
    if kind == 0:
        data = pickle.dumps({"a": Evil()})
    elif kind == 1:
        out = io.BytesIO()
        torch.save({"a": Evil()}, out)
        data = out.getvalue()
    else:
        data = m.scramble(rng, checkpoints.encode({"a": torch.zeros(3), "n": 1, "s": "x"}))
    checkpoints.read(_put(box / "checkpoint.pt", data))


VERBS = ("fit", "fit", "compare", "frontier", "audit", "table", "import", "import", "plan", "train", "collect", "collect", "tune", "coords", "misscaling",
         "depth", "replicate", "paper", "laws", "cite", "figure", "probe", "", "--version", "no-such")  # fmt: skip


def cli_case(rng: Random, box: Path) -> None:
    from scalinglab import cli

    argv = _argv(rng, box)
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8"),
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace"),
    )
    old = os.getcwd()
    os.chdir(box)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            cli.main(argv)
    except SystemExit as leaving:
        if leaving.code not in (0, 1, 2, None):
            raise Broken(f"exit code {leaving.code!r} of {argv!r}"[:2000]) from None
        err.flush()
        told = err.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
        if leaving.code == 2 and not told.strip():
            raise Broken(f"exit code 2 without a word: {argv!r}"[:2000]) from None
    finally:
        os.chdir(old)


def _argv(rng: Random, box: Path) -> list[str]:
    """A command line over small files, some of them mutated, some options at odd values."""
    rows = seeds.tables()[rng.choice(("runs", "runs", "runs", "nanogpt", "sizes"))]
    data = _csv_text(rng, m.cells(rng, rows) if rng.random() < 0.6 else rows)
    _put(box / "runs.csv", m.scramble(rng, data) if rng.random() < 0.1 else data)
    record = seeds.fit_record()
    _put(box / "fit.json", m.json_bytes(rng, m.altered(rng, record) if rng.random() < 0.5 else record))
    _put(
        box / "sweep.toml",
        _toml_bytes(rng, rng.choice(seeds.sweeps())) if rng.random() < 0.6 else rng.choice(seeds.sweeps()).encode(),
    )
    _put(box / "question.toml", _toml_bytes(rng, seeds.QUESTION) if rng.random() < 0.7 else seeds.QUESTION.encode())
    _put(box / "prereg.toml", _toml_bytes(rng, seeds.PREREG) if rng.random() < 0.6 else seeds.PREREG.encode())
    _put(box / "paper.toml", _toml_bytes(rng, 'text = "main.tex"\n[[figure]]\nname = "a"\nrecipe = "no"\n'))
    verb = rng.choice(VERBS)
    files = {"fit": ("runs.csv", "question.toml"), "frontier": ("fit.json",), "table": ("fit.json",), "figure": ("fit.json",), "plan": ("sweep.toml",),
             "train": ("sweep.toml",), "coords": ("sweep.toml",), "paper": ("paper.toml",), "compare": ("runs.csv", "fit.json"), "probe": ("trained",),
             "collect": ("trained",), "replicate": (), "laws": (), "cite": ()}.get(verb, ("runs.csv",))  # fmt: skip
    if verb in ("collect", "probe") or rng.random() < 0.05:
        with contextlib.suppress(ScalinglabError):
            _trained(rng, box / "trained")
    argv = [verb] if verb else []
    if files:
        argv.append(rng.choice(files) if rng.random() < 0.95 else m.text(rng).replace("\x00", ""))
    if verb == "figure":
        argv += ["residuals"]
    choices: dict[str, tuple[str, ...]] = {
        "fit": ("--law", "--objective", "--by", "--share", "--fixed", "--weights", "--where", "--columns", "--params", "--key", "--encoding", "--seed", "--level", "--out", "--quiet"),
        "compare": ("--laws", "--objective", "--where", "--columns", "--out"), "frontier": ("--flops", "--group", "--level", "--out"),
        "audit": ("--law", "--where", "--columns", "--sigma"), "table": ("--form", "--level"), "figure": ("--out",),
        "import": ("--where", "--columns", "--params", "--key", "--torn", "--encoding", "--out"), "plan": ("--sigma", "--law", "--workers", "--device", "--out"),
        "train": ("--shard", "--slurm", "--engine", "--address", "--have"), "collect": ("--out", "--add", "--checkpoints", "--unfinished"),
        "tune": ("--out", "--where"), "coords": ("--seeds", "--steps", "--sizes"), "probe": ("--which", "--sequences", "--out"),
        "misscaling": ("--reference", "--naive", "--scaled", "--checks", "--model", "--window", "--sides", "--where"),
        "depth": ("--prereg", "--reference", "--group", "--where", "--estimand", "--shallow", "--deep", "--hold", "--margin", "--alpha", "--law", "--method"),
        "paper": ("--check", "--only", "--recipes"),
    }  # fmt: skip
    for option in rng.sample(choices.get(verb, ()), min(len(choices.get(verb, ())), rng.randint(0, 3))):
        argv += (
            [option]
            if option in ("--quiet", "--checkpoints", "--unfinished", "--check", "--recipes")
            else [option, _given(rng, option)]
        )
    if verb == "fit" and "--law" not in argv and rng.random() < 0.9:
        argv += ["--law", rng.choice(("chinchilla", "E + A*params**-alpha", _formula(rng)))]
    if verb == "import" and "--out" not in argv:
        argv += ["--out", "out.csv"]
    if verb == "depth":
        argv += ["--no-reanalyse", "--draws", "99"]
    if verb == "misscaling":
        argv += ["--draws", "99"]
    if verb == "plan":
        argv += ["--no-timing"]
    if verb == "train" and "--slurm" not in argv:
        argv += ["--slurm", "2"]  # no training here
    if verb == "coords":
        argv += ["--sizes", _given(rng, "--sizes"), "--seeds", rng.choice(("0", "1", "-1", "x"))]
    if verb == "replicate":
        argv += ["--out", rng.choice(("runs.csv", "runs.csv/x", "fit.json"))]
    if verb == "paper":
        argv += ["--check"] if "--check" not in argv else []
    if verb == "figure":
        argv += ["--formats", "svg"]
    return [a.replace("\x00", "").encode("utf-8", "surrogateescape" if rng.random() < 0.5 else "replace").decode("utf-8", "surrogateescape")
            if not any(0xD800 <= ord(c) <= 0xDBFF for c in a) else a.encode("utf-8", "replace").decode() for a in argv]  # fmt: skip


def _given(rng: Random, option: str) -> str:
    usual = {
        "--law": (*seeds.FORMULAS[:4], "chinchilla", "kaplan_n"), "--objective": ("gaussian", "robust", "huber:1e-3", "student", "student:nan", "huber:0", "huber:-1", "gaussian:x"),
        "--by": ("architecture", "seed", "loss", "no"), "--share": ("E", "H0", "H9"), "--fixed": ("alpha=0.34", "alpha=nan", "alpha=1e309", "E=-1", "x=1", "="),
        "--weights": ("loss", "lr", "run_id", "no"), "--columns": ("loss=loss*1", "loss=9" + "9" * 400, "params=tokens", "loss=loss,"), "--level": ("0.95", "0", "1", "nan", "-1"),
        "--out": ("out.csv", "out.json", "o/../out.csv", "runs.csv/x.csv", "fit.json", "out.toml", "a/b/c.csv"), "--encoding": ENCODINGS[:-2], "--flops": ("1e20", "nan", "inf", "0", "-1", "1e308", "1e-308"),
        "--sizes": ("width=64,128", "depth=0,-1", "width=99999999999", "x=1", "width=", "width=64,64"), "--shard": ("1/2", "2/1", "0/0", "1/" + "9" * 30, "x"),
        "--slurm": ("1", "0", "-1", "99999999999999999999"), "--add": ("runs.csv", "fit.json", "sweep.toml", "nothing.csv", "."), "--have": ("runs.csv", "fit.json"),
        "--prereg": ("prereg.toml", "runs.csv", "no.toml"), "--checks": ("fit.json", "runs.csv"), "--sigma": ("0.003", "0", "-1", "nan", "inf"), "--workers": ("1", "0", "-1"),
    }.get(option, ())  # fmt: skip
    if option in ("--where", "--columns", "--law") and rng.random() < 0.4:
        return ("loss=" if option == "--columns" else "") + _formula(rng)
    return rng.choice(usual) if usual and rng.random() < 0.8 else m.word(rng)


def _single(name: str) -> Callable[[bytes, Path], None]:
    def run(data: bytes, box: Path) -> None:
        _read(_put(box / name, data))

    return run


def toml_single(data: bytes, box: Path) -> None:
    from scalinglab.config import RunConfig
    from scalinglab.depth_benefit.prereg import read_prereg
    from scalinglab.questions import read_question
    from scalinglab.sweeps import load_sweep

    path = _put(box / "t.toml", data)
    for use in (RunConfig.load, read_prereg, read_question, load_sweep):
        with contextlib.suppress(ScalinglabError):
            use(path)  # type: ignore[operator]


TARGETS: dict[str, Target] = {
    t.key: t
    for t in (
        Target("formula", formula_case, 30, "law formulas, conditions and mappings, every use of them", formula_single),
        Target("csv", csv_case, 20, "CSV, TSV, nanoGPT logs and W&B chart exports, also gzipped", _single("t.csv")),
        Target("parquet", parquet_case, 8, "Parquet", _single("t.parquet")),
        Target(
            "json", json_case, 14, "JSON lines, JSON tables, W&B histories with a config beside", _single("t.jsonl")
        ),
        Target("trainer_state", trainer_case, 5, "Hugging Face trainer_state.json", _single("trainer_state.json")),
        Target("tensorboard", tensorboard_case, 3, "TensorBoard event files", _single("events.out.tfevents.1")),
        Target("folder", folder_case, 4, "folders of logs and folders of the trainer"),
        Target("toml", toml_case, 6, "sweeps, questions, preregistrations, run configs", toml_single),
        Target("fit", fit_case, 2, "saved fits: load, summary, predict, frontier", fit_single),
        Target("records", records_case, 3, "saved coordinate checks and probe reports"),
        Target("export", export_case, 3, "tables written and read back, spreadsheet formulas"),
        Target("checkpoint", checkpoint_case, 1, "checkpoints of the trainer, with code in them"),
        Target("cli", cli_case, 2, "every verb with files and options mutated"),
        Target("html", html_case, 0.1, "depth reports of hostile labels as HTML"),
        Target("figure", figure_case, 0.05, "figures of fits with hostile labels"),
    )
}

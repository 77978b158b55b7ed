"""Valid inputs, small: what every mutation starts from."""

from __future__ import annotations

import decimal
import functools
import io
import json
import math
import struct
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def runs() -> pd.DataFrame:
    """A run table: two architectures, four shapes, three budgets."""
    rows = []
    for a, architecture in enumerate(("pre_ln", "hc")):
        for depth, width in ((4, 256), (8, 192), (16, 128), (24, 104)):
            for tokens in (1e9, 4e9, 1.6e10):
                params = 12.0 * depth * width**2
                loss = 1.7 + 406 * params**-0.34 + 410 * tokens**-0.28 + 0.01 * a + 0.002 * math.sin(depth * tokens)
                rows.append(
                    {
                        "run_id": f"r{len(rows)}", "architecture": architecture, "match_group": "m", "seed": len(rows) % 2,
                        "depth": depth, "width": width, "params_backbone": params, "tokens": tokens, "lr": 0.003,
                        "status": "finished", "loss": round(loss, 6),
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


@functools.cache
def tables() -> dict[str, list[list[str]]]:
    """Tables as rows of texts by name: run table, nanoGPT log, W&B chart export, DepthBench-like."""
    table = runs()
    plain = [list(map(str, table.columns)), *[[str(v) for v in row] for row in table.itertuples(index=False)]]
    nanogpt = [
        ["iter", "train/loss", "val/loss", "lr", "mfu"],
        *[[str(i), f"{9 / (i + 1) + 3:.3f}", f"{9 / (i + 1) + 3.1:.3f}", "6e-4", "0.3"] for i in range(0, 2000, 250)],
    ]
    metrics = ["eval/loss", "eval/loss__MIN", "eval/loss__MAX", "tokens"]
    wide = [["Step", *[f"run{r} - {m}" for r in (1, 2) for m in metrics]]]
    wide += [
        [str(s), *[f"{x:.3f}" for r in (1, 2) for x in (3 + r / (s + 1), 3, 4, 1e6 * (s + 1))]]
        for s in range(0, 500, 100)
    ]
    sizes = [
        ["N", "D", "L", "d", "val_loss"],
        *[[f"{n:g}", f"{20 * n:g}", "12", "768", f"{2 + 400 * n**-0.3:.4f}"] for n in (1e8, 2e8, 4e8, 8e8, 1.6e9, 3e9)],
    ]
    return {"runs": plain, "nanogpt": nanogpt, "wide": wide, "sizes": sizes}


@functools.cache
def records() -> list[dict[str, Any]]:
    """JSON lines of a tracker: a config record, then a line per evaluation."""
    config = {
        "config": {"n_layer": {"value": 12, "desc": None}, "n_embd": {"value": 768}, "optim": {"lr": 6e-4}},
        "_step": 0,
    }
    return [
        config,
        *[{"_step": s, "val/loss": 3 + 5 / (s + 1), "tokens": 1e6 * (s + 1), "ok": True, "tag": "a"} for s in range(8)],
    ]


@functools.cache
def trainer_state() -> dict[str, Any]:
    """Hugging Face trainer_state.json."""
    log: list[dict[str, Any]] = []
    for s in range(10, 60, 10):
        log += [
            {"step": s, "epoch": s / 50, "loss": 3.0, "learning_rate": 1e-4},
            {"step": s, "epoch": s / 50, "eval_loss": 3 + 1 / s, "eval_runtime": 1.0},
        ]
    log.append({"step": 50, "train_runtime": 9.0, "train_loss": 3.3, "total_flos": 1e15})
    return {
        "best_metric": None,
        "global_step": 50,
        "is_world_process_zero": True,
        "log_history": log,
        "trial_params": None,
    }


def tensorboard(rng: Random) -> bytes:
    """A TensorBoard event file, written by hand: version, then scalars; records carry right checksums unless told otherwise."""

    def varint(n: int) -> bytes:
        out = bytearray()
        n &= (1 << 64) - 1
        while True:
            out.append((n & 127) | (128 if n > 127 else 0))
            n >>= 7
            if not n:
                return bytes(out)

    def field(number: int, kind: int, body: bytes) -> bytes:
        return varint(number << 3 | kind) + (varint(len(body)) if kind == 2 else b"") + body

    def event(step: int, payload: bytes) -> bytes:
        return field(1, 1, struct.pack("<d", 1e9 + step)) + field(2, 0, varint(step)) + payload

    def scalar(tag: bytes, v: float) -> bytes:
        return field(5, 2, field(1, 2, field(1, 2, tag) + field(2, 5, struct.pack("<f", v))))

    def tensor(tag: bytes, dtype: int, shape: tuple[int, ...], body: bytes) -> bytes:
        dims = b"".join(field(2, 2, field(1, 0, varint(d))) for d in shape)
        proto = field(1, 0, varint(dtype)) + field(2, 2, dims) + field(4, 2, body)
        return field(5, 2, field(1, 2, field(1, 2, tag) + field(8, 2, proto)))

    def record(body: bytes) -> bytes:
        if rng.random() < 0.01 and body:
            body = bytes(b ^ (1 << rng.randrange(8)) if rng.random() < 0.05 else b for b in body)
        head = struct.pack("<Q", len(body))
        return head + struct.pack("<I", _masked(head)) + body + struct.pack("<I", _masked(body))

    tags = [
        b"val/loss",
        b"train/loss",
        b"lr"
        if rng.random() < 0.7
        else rng.choice(
            (b"tokens", b"=1+1", b"\xff\xfe", b"a\x00b", b"x" * 500, "\ud800".encode("utf-8", "surrogatepass"))
        ),
    ]
    events = [event(0, field(3, 2, b"brain.Event:2"))]
    for s in rng.choice((range(0, 50, 10), [0, 0, 5, 3], [2**63 - 1, 2**62], [-1, -5, 7])):
        for tag in tags:
            number = (
                rng.choice((3.0 + 1 / (abs(s) + 1), float("nan"), float("inf"), -1.0, 1e38))
                if rng.random() < 0.05
                else 3.0
            )
            events.append(event(s, scalar(tag, number)))
            if rng.random() < 0.02:
                shape = rng.choice(((), (1,), (2**31,), (2**40, 2**20), (0,), (-1,)))
                events.append(
                    event(
                        s,
                        tensor(
                            tag, rng.choice((0, 1, 2, 3, 7, 9, 10, 99)), shape, rng.choice((b"", b"1234", b"\x00" * 8))
                        ),
                    )
                )
    if rng.random() < 0.1:
        rng.shuffle(events)
    return b"".join(map(record, events))


@functools.cache
def fit_record() -> dict[str, Any]:
    """A saved fit as plain data."""
    from scalinglab.fitting import fit

    with tempfile.TemporaryDirectory() as folder:
        made = fit("chinchilla", runs().assign(params=runs()["params_backbone"]), rng=0)
        return dict(json.loads(made.save(Path(folder) / "f.json").read_bytes()))


@functools.cache
def crossed_record() -> dict[str, Any]:
    """The committed fit: shape by architecture, with its rows thinned out."""
    return dict(json.loads((ROOT / "fits" / "shape_by_architecture.json").read_bytes()))


@functools.cache
def check_record() -> dict[str, Any]:
    """A saved coordinate check as plain data."""
    from scalinglab import coordinates

    values = [
        {"statistic": name, "step": step, "values": [[1.0 + 0.1 * i + 0.01 * s for i in range(3)] for s in range(3)]}
        for name in ("embedding", "logits.change") for step in (0, 1)
    ]  # fmt: skip
    limit = dict.fromkeys(coordinates.Limit.__dataclass_fields__)
    return {
        "schema": coordinates.SCHEMA, "architecture": "pre_ln", "parametrization": "sp", "axis": "width", "sizes": [64, 128, 256],
        "seeds": [0, 1, 2], "lr": 0.01, "trainable": "all", "values": values, "limits": [limit] * 0, "base_identical": True,
        "eps_share": 0.0, "level": 0.9, "setting": {"steps": 1},
    }  # fmt: skip


@functools.cache
def probe_record() -> dict[str, Any]:
    """A saved probe report as plain data."""
    from scalinglab.probe_report import SCHEMA

    measures = [
        {"name": "growth", "probe": "residual", "by": "block", "definition": "norm", "at": [0, 1], "value": [1.0, 2.0]},
        {
            "name": "drop",
            "probe": "removal",
            "by": "scalar",
            "definition": "nats",
            "interval": "95 %",
            "value": [0.1],
            "low": [0.0],
            "high": [0.2],
        },
    ]
    return {
        "schema": SCHEMA,
        "label": "run",
        "depth": 2,
        "loss": 3.0,
        "settings": {"sequences": 4},
        "skipped": {},
        "measures": measures,
    }


@functools.cache
def sweeps() -> list[str]:
    """Sweep files that travel with the package."""
    return [p.read_text(encoding="utf-8") for p in sorted((ROOT / "data" / "sweeps").glob("*.toml"))]


def warm() -> None:
    """Make what is made once: it must not happen inside a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in (runs, tables, records, trainer_state, fit_record, crossed_record, sweeps):
            make()


QUESTION = """runs = "runs.csv"
law = "chinchilla"
question = "what"
objective = "gaussian"
by = "architecture"
share = ["E", "B", "beta"]
where = "tokens > 1e8"
seed = 0
level = 0.95
params = "backbone"
key = []
[columns]
loss = "loss * 1"
[fixed]
alpha = 0.34
"""

PREREG = """estimand = "E1"
title = "t"
margin = 0.05
alpha = 0.05
params = "backbone"
flops = "causal"
reference = "pre_ln"
architectures = ["pre_ln", "hc"]
contrast = [4.0, 24.0]
depths = [4.0, 8.0, 16.0, 24.0]
degree = 2
seeds = 2
tokens = 1e9
lr_rule = "tuned"
exclusions = ""
stopping_rule = "none"
"""

RUN = """lr = 0.01
tokens = 512
corpus = "automaton"
batch = 2
seed = 1
architecture = "pre_ln"
parametrization = "completep"
[corpus_options]
width = 4
[shape]
depth = 2
width = 8
heads = 1
ffn_dim = 16
vocab = 8
context = 32
[base]
depth = 2
width = 8
head_dim = 8
ffn_dim = 16
[schedule]
kind = "cosine"
warmup = 0.1
[perturb."matrix.branch.lr"]
depth = -0.75
"""

FORMULAS = (
    "E + A*params**-alpha + B*tokens**-beta",
    "E + A*params**-alpha*exp(gamma1*u + gamma2*u**2) + B*tokens**-beta",
    "((A*params**-alpha)**(1/delta) + (B*tokens**-beta)**(1/delta))**delta",
    "E + A*depth**-a + B*width**-b + C*tokens**-c",
    "log(params) * 2", "depth > 3 and architecture == 'pre_ln'", "not (tokens < 1e9) or lr >= 0.1",
    "minimum(depth, 3) + maximum(width, 2) / softplus(lr)", "val_bits*log(2)", "1 < depth <= 30", "2^3", "run_id",
    "r0*exp(-gamma1/(2*gamma2))", "abs(-params)**0.5 - sqrt(tokens) + log2(8) + log10(100)",
)  # fmt: skip


def parquet(rng: Random) -> bytes:
    """A Parquet file, most often with columns of odd types, names and encodings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(runs(), preserve_index=False)
    n = table.num_rows
    odd: list[tuple[Any, Any]] = [
        (pa.decimal128(38, 5), [decimal.Decimal(i + 1) for i in range(n)]),
        (pa.timestamp("ns"), [10**18 + i for i in range(n)]), (pa.timestamp("s", "UTC"), [10**11 * (i + 1) for i in range(n)]),
        (pa.date32(), list(range(n))), (pa.date64(), [0] * n), (pa.duration("us"), list(range(n))), (pa.time64("us"), list(range(n))),
        (pa.binary(), [b"\xff\x00" * i for i in range(n)]), (pa.bool_(), [i % 2 == 0 for i in range(n)]), (pa.null(), [None] * n),
        (pa.uint64(), [2**64 - 1 - i for i in range(n)]), (pa.int64(), [None if i % 3 else i for i in range(n)]), (pa.float16(), [np.float16(i + 1) for i in range(n)]),
        (pa.large_string(), ["=1+1", "\u202e", ""] * (n // 3)), (pa.list_(pa.int64()), [[i] for i in range(n)]),
        (pa.struct([("a", pa.int64())]), [{"a": i} for i in range(n)]), (pa.map_(pa.string(), pa.int64()), [[("k", i)] for i in range(n)]),
        (pa.string(), ["9" * 5000] * n), (pa.string(), [str(i + 1) for i in range(n)]), (pa.float64(), [float("nan"), float("inf"), 1e308] * (n // 3)),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"] * (n // 3)),
    ]  # fmt: skip
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        kind, values = rng.choice(odd)
        name = rng.choice(
            (*table.column_names, "odd", "=odd", "odd\x00", "val_loss", "params", "__index_level_0__", "step", "key")
        )
        column = pa.array(values, type=kind)
        at = table.schema.get_field_index(name)
        table = (
            table.set_column(at, name, column) if at >= 0 and rng.random() < 0.9 else table.append_column(name, column)
        )
    out = io.BytesIO()
    pq.write_table(
        table, out, compression=rng.choice(("none", "snappy", "gzip", "zstd")), use_dictionary=rng.random() < 0.5
    )
    return out.getvalue()


@functools.cache
def _crc_table() -> list[int]:
    out = []
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ (0x82F63B78 if c & 1 else 0)
        out.append(c)
    return out


def _masked(data: bytes) -> int:
    """Masked CRC-32C, as event files have it."""
    c, table = 0xFFFFFFFF, _crc_table()
    for b in data:
        c = (c >> 8) ^ table[(c ^ b) & 255]
    c ^= 0xFFFFFFFF
    return (((c >> 15) | (c << 17)) + 0xA282EAD8) & 0xFFFFFFFF

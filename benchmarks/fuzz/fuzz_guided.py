"""The same targets under a coverage-guided fuzzer (atheris, an engine in the manner of libFuzzer): it keeps inputs that reach new code.

    pip install atheris
    python benchmarks/fuzz/fuzz_guided.py formula -max_total_time=60
    python benchmarks/fuzz/fuzz_guided.py csv -max_total_time=600 CORPUS_FOLDER

Targets: those that take the bytes of one file or one formula. The first inputs are the valid ones of `fuzz_seeds`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris

with atheris.instrument_imports(include=["scalinglab"]):
    import scalinglab.collecting
    import scalinglab.expressions
    import scalinglab.fitting
    import scalinglab.formulas
    import scalinglab.readers
    import scalinglab.tomlfile  # noqa: F401 - the names of the package are all bound by the last of these

import fuzz_seeds
from fuzz_fence import Fence
from fuzz_targets import TARGETS


def inputs(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    if target == "formula":
        return [f.encode() for f in fuzz_seeds.FORMULAS]
    if target == "csv":
        out = []
        for rows in fuzz_seeds.tables().values():
            text = io.StringIO()
            csv.writer(text).writerows(rows)
            out.append(text.getvalue().encode())
        return out
    if target == "json":
        return [b"\n".join(json.dumps(r).encode() for r in fuzz_seeds.records())]
    if target == "trainer_state":
        return [json.dumps(fuzz_seeds.trainer_state()).encode()]
    if target == "fit":
        return [json.dumps(fuzz_seeds.fit_record()).encode()]
    if target == "toml":
        return [t.encode() for t in (*fuzz_seeds.sweeps(), fuzz_seeds.QUESTION, fuzz_seeds.PREREG, fuzz_seeds.RUN)]
    if target == "tensorboard":
        return [fuzz_seeds.tensorboard(Random(i)) for i in range(5)]
    return [fuzz_seeds.parquet(Random(i)) for i in range(5)]


def main() -> None:
    known = [k for k, t in TARGETS.items() if t.single is not None]
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        sys.exit(f"name a target: {', '.join(known)}")
    target = sys.argv[1]
    single = TARGETS[target].single
    assert single is not None
    room = Path(tempfile.mkdtemp(prefix="fuzz-"))
    corpus = room / "corpus"
    corpus.mkdir()
    for i, data in enumerate(inputs(target)):
        (corpus / str(i)).write_bytes(data)
    fence = Fence()

    def one(data: bytes) -> None:
        box = room / "box"
        shutil.rmtree(box, ignore_errors=True)
        box.mkdir()
        found = fence.judge(lambda: single(data, box), box)
        if found.outcome == "finding":
            raise RuntimeError(f"{found.kind} at {found.place}: {found.message}")

    atheris.Setup([sys.argv[0], *sys.argv[2:], str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

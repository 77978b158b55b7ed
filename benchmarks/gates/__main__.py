"""Monte-Carlo gates of the statistics: size, power, coverage and negative controls, by simulation with known truth.

Writes gates.csv (a row per test and setting: rate, band asked, verdict) and gates.meta.json beside this folder.

    python benchmarks/gates                       every gate in full: an hour of one core
    python benchmarks/gates --only M7 M11         these gates; their rows are replaced in the table
    python benchmarks/gates --jobs 2              the same numbers with two processes
    python benchmarks/gates --share .1 --out t    a tenth of the simulations, written to the folder t
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import gate_cells
import gate_labels
import gate_laws
import pandas as pd
from gate_rates import Z, Gate

from scalinglab.tables import write_atomically

GATES: tuple[Gate, ...] = (*gate_cells.GATES, *gate_laws.GATES, *gate_labels.GATES)
SEED = 1


def measured(key: str, share: float) -> tuple[pd.DataFrame, float]:
    """Rows of one gate and the CPU seconds it took."""
    gate = next(g for g in GATES if g.key == key)
    start = time.process_time()
    rows = [r.row() for r in gate.run(max(2, round(share * gate.full)), SEED)]
    return pd.DataFrame(rows).assign(gate=key), time.process_time() - start


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[g.key for g in GATES])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(arguments)
    unknown = [k for k in options.only if k not in {g.key for g in GATES}]
    if unknown:
        parser.error(f"no such gate: {', '.join(unknown)}; there are {', '.join(g.key for g in GATES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    path, meta_path = options.out / "gates.csv", options.out / "gates.meta.json"
    seconds: dict[str, float] = json.loads(meta_path.read_text())["cpu_seconds"] if meta_path.is_file() else {}
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {key: pool.submit(measured, key, options.share) for key in options.only}
        for key, result in waiting.items():  # written after every gate: a stopped run loses nothing
            rows, seconds[key] = result.result()
            sys.stderr.write(f"{key}: {seconds[key]:.0f} s\n{rows.drop(columns='gate').to_string(index=False)}\n")
            _write(path, rows, key)
            meta = {
                "what": "rates over simulations with a known truth, and the bands asked of them",
                "command": "python benchmarks/gates", "seed": SEED, "slack": f"{Z} binomial standard errors of the band's edge",
                "cpu_seconds": {g.key: round(seconds[g.key], 1) for g in GATES if g.key in seconds},
                "titles": {g.key: g.title for g in GATES},
                "columns": "rate = hits / of; verdict: within, below or above [low, high] beyond the slack",
            }  # fmt: skip
            write_atomically(meta_path, (json.dumps(meta, indent=1) + "\n").encode())
    return 0


def _write(path: Path, rows: pd.DataFrame, key: str) -> None:
    """Replace one gate's rows; the table keeps the order of GATES."""
    if path.is_file():
        old = pd.read_csv(path)
        rows = pd.concat([old[old["gate"] != key], rows], ignore_index=True)
    order = {g.key: i for i, g in enumerate(GATES)}
    rows = rows.sort_values("gate", key=lambda s: s.map(order), kind="stable")
    rows = rows[["gate", *[c for c in rows if c != "gate"]]]
    write_atomically(path, rows.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

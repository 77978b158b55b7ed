"""Our own speed targets: target and measured, minimum and median of N.

    python benchmarks/speed.py [--data FOLDER] [--quick]

Fits are in CPU seconds on one thread; import and CLI are wall seconds of a fresh process (warm file cache); the reader also
gets its peak memory, in a process of its own. --quick leaves out the million-row file.
"""

from __future__ import annotations

# isort: off
import clock  # before NumPy: pins the threads

# isort: on

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from tables import chinchilla, folder, gemstones

from scalinglab.fitting import fit
from scalinglab.objectives import Huber
from scalinglab.uncertainty import bootstrap

READ = (
    "import resource, sys, time; t = time.process_time(); from scalinglab.readers import read_runs;"
    "n = len(read_runs(sys.argv[1]));"
    "print(time.process_time() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, n)"
)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--data")
    a.add_argument("--quick", action="store_true")
    args = a.parse_args()
    warnings.simplefilter("ignore")
    data = folder(args.data)
    points, told = chinchilla(data)
    gems, told_gems = gemstones(data)
    print(f"{clock.pin()}; Chinchilla points {told}, Gemstones {told_gems}")
    print(f"{'':<52}{'target':>9}{'min':>9}{'median':>9}  N")
    base = fit("chinchilla", points, objective=Huber(1e-3))
    for name, target, repeats, work in (
        ("Chinchilla point fit with certificate, CPU s", 0.05, 9, lambda: fit("chinchilla", points, objective=Huber(1e-3))),
        ("1,000 by-run bootstrap fits, CPU s", 0.3, 7, lambda: bootstrap(base, draws=1000)),
        ("Gemstones width-depth point fit, CPU s", 1.0, 3, lambda: fit("width_depth", gems, objective=Huber(1e-4))),
        ("Gemstones width-depth-params fit, CPU s", 10.0, 3, lambda: fit("width_depth_params", gems, objective=Huber(1e-4))),
    ):  # fmt: skip
        show(name, target, list(clock.measure(work, repeats).seconds))
    show("import scalinglab, wall s", 0.35, processes(7, "-c", "import scalinglab"))
    with tempfile.TemporaryDirectory() as place:
        table = Path(place) / "runs.csv"
        simulated(1_000).to_csv(table, index=False)
        out = str(Path(place) / "fit.json")
        show("scalinglab fit on a 1,000-row CSV to JSON, wall s", 2.5,
             processes(3, "-m", "scalinglab", "fit", str(table), "--law", "chinchilla", "--out", out))  # fmt: skip
        if not Path(out).is_file():
            print("    the command line wrote no JSON: the line above is not a measurement of a fit")
        if args.quick:
            return
        simulated(1_000_000).to_csv(table, index=False)
        found = [reading(table) for _ in range(3)]
        show("read_runs of a 1,000,000-row CSV, CPU s", 3.0, [s for s, _ in found])
        show("    its peak memory, GiB", 1.0, [m for _, m in found])


def show(name: str, target: float, values: list[float]) -> None:
    best = min(values)
    told = "" if best <= target else "  MISSED"
    print(f"{name:<52}{target:>9.2f}{best:>9.3f}{statistics.median(values):>9.3f}  {len(values)}{told}", flush=True)


def processes(repeats: int, *arguments: str) -> list[float]:
    """Wall seconds of fresh interpreters, after one that warms the file cache. Exit code 1 is a fit with a caveat."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        made = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
        if made.returncode not in (0, 1) or "Traceback" in made.stderr:
            raise SystemExit(f"{' '.join(arguments)} failed: {made.stderr[-500:]}")
    return seconds[1:]


def reading(path: Path) -> tuple[float, float]:
    """CPU seconds and peak GiB of reading a file in a fresh process."""
    made = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"read_runs failed: {made.stderr[-500:]}")
    seconds, memory, _ = made.stdout.split()
    return float(seconds), float(memory)


def simulated(rows: int) -> pd.DataFrame:
    """A log of that many rows, 1,000 checkpoints a run (10 for small tables), under the Chinchilla law."""
    rng = np.random.default_rng(0)
    each = 10 if rows <= 10_000 else 1_000
    runs = rows // each
    params = np.repeat(np.exp(rng.uniform(np.log(5e7), np.log(5e9), runs)), each).round()
    tokens = np.tile(np.linspace(1, each, each), runs) * np.repeat(
        np.exp(rng.uniform(np.log(1e8), np.log(1e10), runs)), each
    )
    loss = (1.8 + 478 * params**-0.347 + 2143 * tokens**-0.367) * np.exp(0.003 * rng.standard_normal(rows))
    name = np.repeat([f"run{i}" for i in range(runs)], each)
    step = np.tile(np.arange(each) + 1, runs)
    return pd.DataFrame({"run_id": name, "step": step, "params": params, "tokens": tokens.round(), "loss": loss})


if __name__ == "__main__":
    main()

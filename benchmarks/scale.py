"""How cost grows with size: plan, audit, collect, fit and what is refitted, each size in a process of its own.

    python benchmarks/scale.py [--only plan,audit,collect,fit] [--largest N] [--out benchmarks/scale.csv]

A measurement is one fresh process at nice 10 on one thread. It does the task once at a tiny size (imports, first calls), then
once at its size: wall and CPU seconds of that, and the peak resident memory of the process beside what it had before. Growth
is the exponent b of CPU seconds ~ size^b, by least squares on logarithms. Rows of other tasks and sizes stay in the CSV.
"""

from __future__ import annotations

# isort: off
import clock  # noqa: F401 - before NumPy: pins the threads

# isort: on

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
KIB = 1024 if sys.platform == "darwin" else 1  # of ru_maxrss: bytes there, KiB elsewhere
_RUNS = 100  # of the tables whose rows grow: the more rows, the more checkpoints a run
_DRAWS = 200


@dataclass(frozen=True)
class Task:
    """What is measured: `make` prepares the data of a size in a folder, `work` is timed."""

    group: str
    counted: str
    sizes: tuple[int, ...]
    make: Callable[[int, Path], Any]
    work: Callable[[Any], Any]
    tiny: int = 250


def sweep(size: int, _: Path | None = None) -> Any:
    """A sweep of so many runs: 5 depths matched in size, 2 architectures and parametrizations, 5 rates, the rest seeds."""
    from scalinglab.config import Sweep

    cells = 5 * 2 * 2 * 5
    return Sweep(
        name="scale",
        run={
            "corpus": "automaton", "corpus_options": {"width": 4}, "tokens": 1_000_000,
            "base": {"depth": 4, "width": 64, "head_dim": 16, "ffn_dim": 176},
        },
        match={
            "budget": 1e6, "depths": [2, 4, 8, 12, 16], "vocab": 256, "context": 128, "heads": 4, "tolerance": 0.1,
        },
        architectures=["pre_ln", "post_ln"], parametrizations=["sp", "completep"],
        lrs=[1e-3 * 2**k for k in range(5)], seeds=list(range(max(1, size // cells))),
    )  # fmt: skip


def planned(size: int, _: Path | None = None) -> pd.DataFrame:
    """A plan of so many runs, five budgets and a loss included."""
    from scalinglab.planning import plan

    table = plan(sweep(min(size, 1_000)))
    copies = [
        table.assign(seed=table["seed"] + 100 * k, run_id=table["run_id"] + f"-{k}")
        for k in range(-(-size // len(table)))
    ]
    out = pd.concat(copies, ignore_index=True).iloc[:size].copy()
    rng = np.random.default_rng(0)
    out["tokens"] = out["tokens"] * 2.0 ** rng.integers(0, 5, len(out))
    out["loss"] = 2 + 478 * out["params_backbone"] ** -0.347 + 0.003 * rng.standard_normal(len(out))
    return out


def run_folders(size: int, folder: Path, *, evaluations: int = 10) -> Path:
    """So many run directories as the trainer leaves them: configs, logs of ten evaluations, summaries."""
    from scalinglab import tomlfile
    from scalinglab.planning import expand

    for number, run in enumerate(expand(sweep(max(size, 100))).runs[:size]):
        place = folder / run.run_id
        place.mkdir(parents=True)
        (place / "config.toml").write_text(tomlfile.dumps(run.to_dict()))  # `run.save` waits for the disk
        loss, last = 2.0 + 1e-3 * (number % 97), run.steps
        lines = []
        for k in range(evaluations + 1):
            step = last * k // evaluations
            lines.append(
                {
                    "kind": "eval",
                    "step": step,
                    "tokens": step * run.batch_tokens,
                    "loss": loss + 1 - k / evaluations,
                    "loss_se": 0.01,
                }
            )
        (place / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        summary = {
            "schema": "scalinglab/summary-1", "run_id": run.run_id, "status": "finished", "step": last,
            "tokens": last * run.batch_tokens, "loss": loss, "loss_se": 0.01, "excess": loss - 0.1, "floor": 0.1,
            "loss_initial": 5.5, "last_finite_loss": loss, "seconds": 1.0 + number % 7, "tokens_per_second": 1e4 + number,
            "stack_size": 2, "device": "cpu", "backend": "torch", "torch": "2.13.0", "weights_sha256": "ab" * 32,
        }  # fmt: skip
        (place / "summary.json").write_text(json.dumps(summary))
    return folder


def curves(size: int, _: Path | None = None, *, runs: int = _RUNS) -> pd.DataFrame:
    """A log of so many rows under the Chinchilla law with a run effect, of `runs` runs with checkpoints."""
    rng = np.random.default_rng(0)
    each = size // runs
    run = np.repeat(np.arange(runs), each)
    params = np.exp(rng.uniform(np.log(5e7), np.log(5e9), runs)).round()[run]
    tokens = np.exp(rng.uniform(np.log(1e9), np.log(1e11), runs))[run] * np.tile(np.arange(1, each + 1) / each, runs)
    noise = 0.002 * rng.standard_normal(runs)[run] + 0.003 * rng.standard_normal(len(run))
    loss = (1.8 + 478 * params**-0.347 + 2143 * tokens**-0.367) * np.exp(noise)
    names = np.array([f"run{i}" for i in range(runs)], dtype=object)[run]
    return pd.DataFrame({"run_id": names, "step": np.tile(np.arange(1, each + 1), runs), "params": params,
                         "tokens": tokens, "loss": loss})  # fmt: skip


def single_rows(size: int, _: Path | None = None) -> pd.DataFrame:
    """One row per run."""
    return curves(size, runs=size)


def fitted(make: Callable[[int, Path], pd.DataFrame], law: str = "chinchilla") -> Callable[[int, Path], Any]:
    """The fit to a table: what is prepared where only the refits are timed."""

    def made(size: int, folder: Path) -> Any:
        from scalinglab.fitting import fit

        return fit(law, make(size, folder))

    return made


def two_fits(size: int, folder: Path) -> dict[str, Any]:
    """Fits of two laws to one table."""
    return {law: fitted(curves, law)(size, folder) for law in ("chinchilla", "kaplan")}


def _plan(given: Any) -> Any:
    from scalinglab.planning import plan

    return plan(given)


def _audit(given: Any) -> Any:
    from scalinglab.design import audit

    return audit(given)


def _collect(given: Any) -> Any:
    from scalinglab.collecting import collect

    return collect(given)


def _checkpoints(given: Any) -> Any:
    from scalinglab.collecting import collect

    return collect(given, checkpoints=True)


def _fit(given: Any) -> Any:
    from scalinglab.fitting import fit

    return fit("chinchilla", given)


def _jackknife(given: Any) -> Any:
    from scalinglab.uncertainty import jackknife

    return jackknife(given)


def _bootstrap(given: Any) -> Any:
    from scalinglab.uncertainty import bootstrap

    return bootstrap(given, draws=_DRAWS)


def _compare(given: Any) -> Any:
    from scalinglab.comparison import compare

    return compare(given)


_TABLE = (1_000, 3_000, 10_000, 30_000, 100_000)
TASKS = {
    "plan": Task("plan", "runs", _TABLE, sweep, _plan),
    "audit": Task("audit", "runs", _TABLE, planned, _audit),
    "collect": Task("collect", "folders", (1_000, 2_000, 5_000, 10_000, 20_000), run_folders, _collect, 25),
    "collect, checkpoints": Task("collect", "folders", (500, 1_000, 2_000, 5_000), run_folders, _checkpoints, 25),
    "fit": Task("fit", f"rows of {_RUNS} runs", (*_TABLE, 300_000, 1_000_000), curves, _fit, 1_000),
    "jackknife": Task("fit", f"rows of {_RUNS} runs", _TABLE, fitted(curves), _jackknife, 1_000),
    "jackknife, one row a run": Task("fit", "runs", (300, 1_000, 3_000, 10_000), fitted(single_rows), _jackknife, 100),
    f"bootstrap, {_DRAWS} draws": Task("fit", f"rows of {_RUNS} runs", _TABLE, fitted(curves), _bootstrap, 1_000),
    "compare, 2 laws": Task("fit", f"rows of {_RUNS} runs", _TABLE[:4], two_fits, _compare, 1_000),
}  # fmt: skip


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--only", default="plan,audit,collect,fit", help="groups of tasks, with commas between them")
    a.add_argument(
        "--largest", type=int, help="leave out larger sizes; above those measured by default, it is one more"
    )
    a.add_argument("--out", type=Path, default=HERE / "scale.csv")
    a.add_argument(
        "--table", action="store_true", help="measure nothing: print the table of docs/scale.md from the CSV"
    )
    a.add_argument("--nice", type=int, default=10, help="how far measurements give way to other processes")
    a.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = a.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], int(args.child[1]), Path(args.child[2]), args.nice)))
        return
    if args.table:
        print(markdown(pd.read_csv(args.out)))
        return
    groups = args.only.split(",")
    if unknown := set(groups) - {task.group for task in TASKS.values()}:
        raise SystemExit(
            f"--only {min(unknown)}: choose from {', '.join(dict.fromkeys(t.group for t in TASKS.values()))}"
        )
    for name, task in TASKS.items():
        for size in sizes(task.sizes, args.largest) if task.group in groups else ():
            line = {"task": name, "counted": task.counted, **measured(name, size, args.nice)}
            print(" ".join(f"{k}={v}" for k, v in line.items()), file=sys.stderr, flush=True)
            kept(pd.DataFrame([line]), args.out).to_csv(args.out, index=False)  # at once: large sizes take long
    found = pd.read_csv(args.out)
    grown = growth(found)
    args.out.with_suffix(".meta.json").write_text(json.dumps(meta(grown), indent=1) + "\n")
    show(found, grown)


def sizes(given: tuple[int, ...], largest: int | None) -> list[int]:
    """The sizes up to the largest, and a larger one that is asked for."""
    if largest is None:
        return list(given)
    return [s for s in given if s <= largest] + ([largest] if largest > given[-1] else [])


def measured(name: str, size: int, nice: int) -> dict[str, Any]:
    """One measurement in a fresh process; the data on disk are made before it and go with it."""
    with tempfile.TemporaryDirectory() as folder:
        if TASKS[name].group == "collect":
            run_folders(size, Path(folder) / str(size))
            run_folders(TASKS[name].tiny, Path(folder) / "tiny")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--nice", str(nice), "--child", name, str(size), folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} at {size:,} failed: {done.stderr[-800:]}")
    return dict(json.loads(done.stdout))


def child(name: str, size: int, folder: Path, nice: int) -> dict[str, Any]:
    """Wall and CPU seconds and peak memory of a task at one size, in this process."""
    if hasattr(os, "nice"):
        os.nice(nice)
    warnings.simplefilter("ignore")
    task = TASKS[name]
    on_disk = task.group == "collect"
    task.work(folder / "tiny" if on_disk else task.make(task.tiny, folder))
    given = folder / str(size) if on_disk else task.make(size, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    task.work(given)
    return {
        "size": size, "wall_s": round(time.perf_counter() - wall, 4), "cpu_s": round(time.process_time() - cpu, 4),
        "before_mib": round(before / KIB / 1024, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB / 1024, 1),
    }  # fmt: skip


def kept(found: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The measurements with those of other tasks and sizes that the file has, in the order of `TASKS`."""
    if path.is_file():
        both = pd.concat([pd.read_csv(path), found], ignore_index=True)
        found = both.drop_duplicates(["task", "size"], keep="last")
    order = {name: k for k, name in enumerate(TASKS)}
    return found.sort_values(["task", "size"], key=lambda c: c.map(order) if c.name == "task" else c, ignore_index=True)


def growth(found: pd.DataFrame) -> pd.DataFrame:
    """Per task: exponent of CPU seconds in size with its standard error, that of the last step, and memory per item.

    The exponent over all sizes is too low where a fixed cost matters at the small ones; the last step shows that.
    """
    out = []
    for name, own in found.groupby("task", sort=False):
        x, y = np.log(own["size"].to_numpy(float)), np.log(np.maximum(own["cpu_s"].to_numpy(float), 1e-4))
        b, se = slope(x, y)
        last = float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else np.nan
        top = own.iloc[-1]
        per_item = (top["peak_mib"] - own["peak_mib"].iloc[0]) * 1024 / max(1, top["size"] - own["size"].iloc[0])
        out.append({
            "task": name, "largest": int(top["size"]), "cpu_s": top["cpu_s"], "exponent": b, "se": se, "last_step": last,
            "kib_per_item": per_item, "tenfold_cpu_s": top["cpu_s"] * 10 ** max(b, last if np.isfinite(last) else b),
        })  # fmt: skip
    return pd.DataFrame(out)


def markdown(found: pd.DataFrame) -> str:
    """The rows of the table in docs/scale.md."""
    peak = found.groupby("task", sort=False)["peak_mib"].last()
    return "\n".join(
        f"| {r.task} | {r.largest:,} | {r.cpu_s:.1f} | {peak[r.task]:.0f} | {r.exponent:.2f} {'' if np.isnan(r.se) else f'± {r.se:.2f} '}| {r.last_step:.2f} | "
        f"{r.tenfold_cpu_s:,.0f} s |"
        for r in growth(found).itertuples()
    )


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least-squares slope and its standard error; NaN where there are too few points."""
    if len(x) < 2:
        return float("nan"), float("nan")
    d = x - x.mean()
    b = float(d @ y / (d @ d))
    e = y - y.mean() - b * d
    return b, float(np.sqrt(e @ e / (len(x) - 2) / (d @ d))) if len(x) > 2 else float("nan")


def meta(grown: pd.DataFrame) -> dict[str, Any]:
    from scalinglab import __version__

    return {
        "what": "CPU and wall seconds and peak memory of plan, audit, collect, fit and refits as size grows",
        "command": "python benchmarks/scale.py",
        "how": "a fresh process per measurement, nice, on one thread, core not pinned; once at a tiny size, then timed once; on a shared "
        "and loaded machine: CPU seconds to +-50 %, wall seconds say little",
        "columns": {
            "cpu_s": "user and system seconds of the process",
            "before_mib": "peak resident memory before the timed call, MiB: interpreter, imports and the data given to it",
            "peak_mib": "peak resident memory after it, MiB",
        },
        "growth": {
            "exponent": "of CPU seconds in size, least squares on logarithms over all sizes, with its standard error",
            "last_step": "the same from the last two sizes",
            "kib_per_item": "growth of peak memory from the smallest to the largest size, the data included",
            "tenfold_cpu_s": "extrapolation to ten times the largest size with the larger of the two exponents",
            "rows": json.loads(grown.round(4).to_json(orient="records")),
        },
        "seed": 0,
        "versions": {
            "scalinglab": __version__, "python": platform.python_version(), "numpy": np.__version__, "pandas": pd.__version__,
        },
    }  # fmt: skip


def show(found: pd.DataFrame, grown: pd.DataFrame) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    one = Table(title="One process each, one thread, nice 10")
    for column in ("task", "counted", "size", "wall s", "CPU s", "peak MiB", "before"):
        one.add_column(column, justify="left" if column in ("task", "counted") else "right")
    for r in found.itertuples():
        one.add_row(
            r.task,
            r.counted,
            f"{r.size:,}",
            f"{r.wall_s:.2f}",
            f"{r.cpu_s:.2f}",
            f"{r.peak_mib:.0f}",
            f"{r.before_mib:.0f}",
        )
    console.print(one)
    two = Table(title="CPU seconds ~ size^b")
    for column in ("task", "largest", "CPU s", "b", "last step", "KiB an item", "CPU s at ten times"):
        two.add_column(column, justify="left" if column == "task" else "right")
    for r in grown.itertuples():
        two.add_row(r.task, f"{r.largest:,}", f"{r.cpu_s:.2f}", f"{r.exponent:.2f} +- {r.se:.2f}", f"{r.last_step:.2f}",
                    f"{r.kib_per_item:.2f}", f"{r.tenfold_cpu_s:,.0f}")  # fmt: skip
    console.print(two)


if __name__ == "__main__":
    main()

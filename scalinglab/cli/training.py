"""Verbs that train: plan, train, collect, coords, probe. A sweep is a TOML file or embedded:NAME."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from scalinglab.cli.options import (
    TABLES,
    Pairs,
    Runs,
    check_folder,
    check_out,
    draw_named,
    need_matplotlib,
    pairs,
    read,
    say,
    write_csv,
)
from scalinglab.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

SweepFile = Annotated[str, tyro.conf.Positional]
Backend = Literal["auto", "torch", "native"]


def plan(
    sweep: SweepFile,
    /,
    sigma: float | None = None,
    law: str | None = None,
    timing: bool = True,
    seconds: float = 20.0,
    workers: int | None = None,
    device: str = "cpu",
    backend: Backend = "auto",
    out: Path | None = None,
) -> int:
    """What a sweep would train, cost, take and be able to show, before a step is trained.

    scalinglab plan embedded:tiny

    Args:
        sweep: A sweep file (TOML), or embedded:NAME.
        sigma: Standard deviation of the final loss between seeds, nats, for the audit; 0.003 is assumed.
        law: A law that the runs are meant for, judged besides the usual ones.
        timing: Make each kind of model and time a few steps on this machine to predict the wall time (needs torch).
        seconds: Wall time that may be spent on timing.
        workers: Processes that will train; all cores by default, 1 on a GPU.
        device: cpu, cuda, cuda:1, mps.
        backend: Kernels: auto, torch, native.
        out: Write the planned run table, one row per run (CSV or Parquet).
    """
    check_out(out, TABLES, [sweep])
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: give 1 or more")
    from scalinglab.planning import expand
    from scalinglab.planning import plan as plan_runs
    from scalinglab.sweeps import load_sweep
    from scalinglab.train.jobs import stacks
    from scalinglab.train.launch import check_data, check_models

    read = load_sweep(sweep)
    expansion = expand(read)
    table, runs = plan_runs(expansion), expansion.runs
    check_data(runs)
    predicted, told = None, "not predicted (--no-timing)"
    if timing and find_spec("torch") is None:
        told = f"not predicted: {_TORCH}"
    elif timing:
        from scalinglab.train.backends import open_device
        from scalinglab.train.timing import predict

        open_device(device)
        check_models(runs)
        say("timing a few steps")
        predicted = predict(runs, seconds=seconds, workers=workers, device=device, backend=backend)
        told = f"about {_span(predicted.attrs['wall_seconds'])} ({predicted.attrs['basis']})"
    alone, flops = float(table["flops_causal"].sum()), sum(job.flops for job in stacks(runs))
    print(f"Sweep {read.name}: {_count(len(table), 'run')}" + (f". {read.question}" if read.question else ""))
    print(_shapes(table, predicted))
    print(f"\ntokens {table['tokens'].sum():.3g}, FLOPs {flops:.3g} (causal); wall time {told}")
    if flops < 0.999 * alone:
        print(
            f"note: runs that differ in tokens alone share the trunk of their schedule, which is trained once: FLOPs {flops:.3g} "
            f"in place of {alone:.3g}; the flops above are those of each run by itself"
        )
    for note in table.attrs["notes"]:
        print(f"note: {note}")
    print()
    from scalinglab.design import audit

    named = (table["match_group"] != "").any()
    print(audit(table if named else table.drop(columns="match_group"), sigma=sigma, law=law).summary())
    if out is not None:
        write_csv(table, out)
    return 0


def train(
    sweep: SweepFile,
    /,
    out: Path = Path("runs"),
    workers: int | None = None,
    device: str = "cpu",
    backend: Backend = "auto",
    engine: Literal["loky", "dask", "ray"] = "loky",
    address: str | None = None,
    shard: str = "1/1",
    slurm: int | None = None,
    have: tuple[Path, ...] = (),
    fsdp: bool = False,
    quiet: bool = False,
) -> int:
    """Train the runs of a sweep that are not finished. Stop it at any time: the same command goes on.

    scalinglab train embedded:tiny --out runs

    Args:
        sweep: A sweep file (TOML), or embedded:NAME.
        out: Folder of the run directories; several launchers may share it.
        workers: Processes of one thread each; all cores by default, 1 on a GPU.
        device: cpu, cuda, cuda:1, mps.
        backend: Kernels: auto, torch, native.
        engine: Where the workers are: loky (this machine), dask or ray.
        address: Of the Dask scheduler or Ray head; else a cluster on this machine is started.
        shard: Part I/N of the sweep, for one task of a batch system.
        slurm: Train nothing: print a Slurm array script with this many stacks per task. It carries the other options;
            workers is per task then, 2 by default.
        have: Run tables of earlier sittings: what has ended there isn't trained again.
        fsdp: Under torchrun, whose processes share each batch: share out the weights and moments of a run, too.
        quiet: Show no progress.
    """
    check_folder(out)
    part = _shard(shard)
    if engine == "loky" and address is not None:
        raise ConfigError(f"--address {address} is of a cluster: add --engine dask or --engine ray, or leave it out")
    if slurm is not None:
        if have:
            raise ConfigError("--have and --slurm exclude each other: train the script's runs into one folder")
        if fsdp:
            raise ConfigError("--fsdp and --slurm exclude each other: the script starts no torchrun")
        if part != (1, 1):
            raise ConfigError(
                f"--shard {shard} and --slurm {slurm} exclude each other: the script gives every task its shard"
            )
        from scalinglab.train.slurm import slurm_script

        script = slurm_script(
            sweep, out, stacks_per_task=slurm, workers=workers, device=device, backend=backend, engine=engine,
            address=address, quiet=quiet,
        )  # fmt: skip
        print(script, end="")
        return 0
    from scalinglab.sweeps import load_sweep

    read = load_sweep(sweep)
    _need_torch()
    from scalinglab.train.launch import launch

    made = launch(
        read, out, workers=workers, device=device, backend=backend, engine=engine, address=address, shard=part,
        progress=not quiet, have=_ended(have), fsdp=fsdp,
    )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":  # under torchrun, one process for all
        print(made.summary())
    return 1 if made.failed else 0


def collect(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    out: Path | None = None,
    add: tuple[Path, ...] = (),
    checkpoints: bool = False,
    unfinished: bool = False,
) -> int:
    """Run table of the trainer's folder; the other verbs also read the folder as it is.

    scalinglab collect runs --out table.csv

    Args:
        folder: What `scalinglab train --out` wrote, or one run directory.
        out: The table to write: .csv, .csv.gz or .parquet. Printed, shortened, without it.
        add: Tables of earlier sittings; their runs are kept where the folder has them not.
        checkpoints: One row per evaluation of each run instead of one per run.
        unfinished: Take in the last evaluation of runs that have not ended.
    """
    check_out(out, TABLES, [str(folder)])
    from scalinglab.collecting import collect as collect_runs

    table = collect_runs(folder, checkpoints=checkpoints, unfinished=unfinished)
    for path in add:
        table = _joined(table, _table(path))
    say(f"{_count(len(table), 'row')}, {_count(table['run_id'].nunique(), 'run')}")
    for note in table.attrs["notes"]:
        say(f"note: {note}")
    if out is not None:
        write_csv(table, out)
        return 0
    shown = ["architecture", "depth", "width", "tokens", "lr", "seed", "loss", "loss_se", "excess", "status"]
    print(table[[c for c in shown if c in table]].to_string(index=False))
    return 0


def tune(
    runs: Runs,
    /,
    out: Path | None = None,
    where: str | None = None,
) -> int:
    """Learning rates for the next sweep: the best of every architecture, parametrization and shape, as [[tuned]] entries.

    scalinglab tune runs/stage1 >> stage2.toml

    Exit code 1: some optimum isn't bracketed by the learning rates that were tried.

    Args:
        runs: Folder of the trainer, log files, or embedded:NAME: a sweep over the learning rate.
        out: Write the entries to this file; printed without it.
        where: Condition on rows: "corpus == 'automaton'".
    """
    check_out(out, (".toml",), list(runs))
    from scalinglab.misscaling.tuning import best_rates, tuned_toml
    from scalinglab.tables import write_atomically

    rates = best_rates(read(list(runs), {}, where, "backbone"))
    text = tuned_toml(rates, [str(r) for r in runs])
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text.encode())
        say(f"wrote {out}")
    open_ = rates[rates["status"] != "interior"]
    for r in open_.itertuples():
        say(
            f"warning: {r.architecture}, {r.parametrization}, depth {r.depth:g}, width {r.width:g}: {r.status}; "
            f"{r.best:g} is the best of {r.tried} learning rates tried"
        )
    say(f"{len(rates) - len(open_):,} of {len(rates):,} optima lie inside the learning rates tried")
    return 1 if len(open_) else 0


def coords(
    sweep: SweepFile,
    /,
    seeds: int = 3,
    steps: int = 2,
    sizes: Pairs = (),
    out: Path | None = None,
    figures: Path | None = None,
) -> int:
    """Coordinate checks of a sweep's architectures and parametrizations, over width and depth.

    scalinglab coords embedded:tiny

    Exit code 1 if an arm fails, unless it is sp or sp_gpt2: the standard parametrizations are controls that should fail.

    Args:
        sweep: A sweep file (TOML), or embedded:NAME.
        seeds: How many, 2 or more: the verdict rests on their spread.
        steps: Updates, each of which is judged.
        sizes: Of the networks, the first is the base: width=64,128,256 depth=2,4,8. As many as memory and time allow.
        out: Folder for a JSON record of each check, written as soon as it is made.
        figures: Folder for a figure per axis, as PNG.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds}: give 2 or more, since one seed has no interval to judge by")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: give 1 or more")
    chosen = _sizes(sizes)
    _check_folders(out, figures)
    from scalinglab.sweeps import load_sweep

    read = load_sweep(sweep)
    _need_torch()
    from scalinglab.coordinates import CoordinateCheck
    from scalinglab.train.coordcheck import coords as check_coordinates

    checks: list[CoordinateCheck] = []

    def done(check: CoordinateCheck) -> None:
        checks.append(check)
        print(check.summary(), end="\n\n", flush=True)
        if out is not None:
            name = f"{len(checks):02d}-{check.architecture}-{check.axis}-{check.trainable}.json"
            say(f"wrote {check.save(out / name)}")

    try:
        check_coordinates(read, seeds=range(seeds), steps=steps, sizes=chosen, report=say, done=done)
    except KeyboardInterrupt:
        kept = "nothing was written (no --out)" if out is None else f"{_count(len(checks), 'record')} written to {out}"
        say(f"stopped after {_count(len(checks), 'check')}, {kept}; the same command starts from the first check again")
        return 130
    if not checks:
        say("nothing to check: the shapes of this sweep don't differ from their base in width or depth")
    if figures is not None:
        for axis in sorted({check.axis for check in checks}):
            draw_named("coords", [check for check in checks if check.axis == axis], figures / axis)
    failed = [check for check in checks if check.verdict == "fail"]
    controls = [check for check in failed if check.is_control]
    bad = [check for check in failed if not check.is_control]
    if controls:
        print(
            f"{_count(len(controls), 'check')} of sp or sp_gpt2 failed, as controls should; the exit code is that of the other arms"
        )
    for check in bad:
        print(f"failed: {check.name}")
    return 1 if bad else 0


def probe(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    which: tuple[str, ...] = ("default",),
    sequences: int = 64,
    device: str = "cpu",
    out: Path | None = None,
    figures: Path | None = None,
) -> int:
    """Depth probes of trained runs: what each block does, and how many of them matter.

    scalinglab probe runs/*-L8-*

    Args:
        runs: Run directories.
        which: default, all, or names of probes.
        sequences: Sequences of the evaluation set.
        device: cpu, cuda, cuda:1, mps.
        out: Folder for the records, RUN_ID.json; by default probes.json in each run directory.
        figures: Folder for the figures depth_profile and layer_removal of these runs, as PNG.
    """
    if not runs:
        raise ConfigError("no run directory is given: scalinglab probe runs/RUN_ID")
    _check_folders(out, figures)
    _need_torch()
    from scalinglab.train.backends import open_device
    from scalinglab.train.probes import probe_run

    open_device(device)
    named = which[0] if len(which) == 1 and which[0] in ("default", "all") else which
    reports = []
    for run in runs:
        if _status(run) == "diverged":
            say(f"warning: {run} has diverged: these are probes of the weights that it was left with")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, for numbers that the report shows as not finite
            report = probe_run(run, sequences=sequences, device=device, which=named)
        reports.append(report)
        print(report.summary(), end="\n\n")
        say(f"wrote {report.save(run if out is None else out / f'{run.resolve().name}.json')}")
    if figures is not None:
        for name in ("depth_profile", "layer_removal"):
            draw_named(name, reports, figures)
    return 0


_TORCH = "training needs torch: pip install 'scalinglab[train]' (for a CPU build add --extra-index-url https://download.pytorch.org/whl/cpu)"


def _ended(tables: tuple[Path, ...]) -> set[str]:
    """Ids of the runs that have ended in these tables."""
    ended: set[str] = set()
    for path in tables:
        table = _table(path)
        ended |= set(table.loc[table["status"].isin(["finished", "diverged"]), "run_id"].astype(str))
    return ended


def _table(path: Path) -> pd.DataFrame:
    """A table that `scalinglab collect` wrote."""
    from scalinglab.formats import read_table

    if not path.is_file():
        raise ConfigError(f"{path}: there is no such table; give one that `scalinglab collect --out` wrote")
    table = read_table(path, keep=list).frame
    if lacking := {"run_id", "status"} - set(table):
        raise ConfigError(f"{path} has no column {min(lacking)}: give a table that `scalinglab collect --out` wrote")
    return table


def _joined(table: pd.DataFrame, old: pd.DataFrame) -> pd.DataFrame:
    """The table with the runs of an older one that it lacks, in the order of run ids."""
    import pandas as pd

    kept = old[~old["run_id"].astype(str).isin(table["run_id"].astype(str))]
    both = pd.concat([table, kept], ignore_index=True).sort_values("run_id", kind="stable", ignore_index=True)
    both.attrs = {
        **table.attrs,
        "notes": [*table.attrs["notes"], f"{kept['run_id'].nunique():,} runs of an earlier table"],
    }
    return both


def _check_folders(out: Path | None, figures: Path | None) -> None:
    for folder in (out, figures):
        if folder is not None:
            check_folder(folder)
    if figures is not None:
        need_matplotlib()


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise ConfigError(_TORCH)


def _status(run: Path) -> str | None:
    """The status of a run directory; None where it isn't finished."""
    from scalinglab.collecting import read_config, read_summary

    config = read_config(run)
    summary = None if config is None else read_summary(run, config)
    return None if summary is None else summary.status


def _sizes(given: Pairs) -> dict[str, tuple[int, ...]]:
    """Sizes by axis, as in width=64,128."""
    found = {}
    for axis, text in pairs(given, "--sizes").items():
        parts = text.split(",")
        if axis not in ("width", "depth") or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(f"--sizes {axis}={text}: write width=64,128,256 or depth=2,4,8")
        found[axis] = tuple(int(part) for part in parts)
    return found


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--shard {text!r}: write I/N with I from 1 to N, e.g. 1/4")
    return int(index), int(count)


def _shapes(table: pd.DataFrame, predicted: pd.DataFrame | None) -> str:
    """One line per cell (architecture x shape x budget ...): its size, cost and how many runs it has."""
    keys = [
        "match_group", "corpus", "architecture", "parametrization", "depth", "width", "heads", "ffn_dim", "params_backbone",
        "mismatch", "tokens", "steps",
    ]  # fmt: skip
    keys = [k for k in keys if table[k].notna().any() and (table[k] != "").any()]
    keys = [k for k in keys if k not in ("corpus", "match_group", "parametrization") or len(set(table[k])) > 1]
    # What else the runs differ in, so that no two lines look alike. Learning rates and seeds are counted, not listed.
    for column in map(str, table):
        costs = column.startswith(("params_", "flops_"))
        # Counts follow from the options too, but a reader wants to see the options themselves.
        by = _OWNERS.get(column, [k for k in keys if k not in ("params_backbone", "mismatch")])
        if column not in (*keys, *_COUNTED) and not costs and not _follows(table, column, by):
            keys.append(column)
    table = (
        table
        if predicted is None
        else table.merge(predicted[["run_id", "seconds", "peak_share", "basis"]], on="run_id")
    )
    sums = {"runs": ("run_id", "size"), "flops": ("flops_causal", "sum")}
    if predicted is not None:
        sums |= {"seconds": ("seconds", "sum"), "of_peak": ("peak_share", "mean"), "basis": ("basis", "first")}
    cells = table.groupby(keys, dropna=False, sort=False).agg(**sums).reset_index()
    form = {
        "mismatch": "{:+.4f}".format, "tokens": "{:,.0f}".format, "flops": "{:.3g}".format, "seconds": "{:,.0f}".format,
        "of_peak": "{:.0%}".format, "params_backbone": "{:,.0f}".format,
    }  # fmt: skip
    shown: str = cells.to_string(index=False, formatters={k: v for k, v in form.items() if k in cells})
    return shown


# of a plan's columns: labels of single runs, and what is summed up
_COUNTED = ("run_id", "sweep", "seed", "lr", "params", "mismatch", "match_group")


_OWNERS = {"options": ["architecture"], "corpus_options": ["corpus"]}


def _follows(table: pd.DataFrame, column: str, keys: list[str]) -> bool:
    """Whether a column has one value in each line that the keys make."""
    return len(table[keys].drop_duplicates()) == len(table[[*keys, column]].drop_duplicates())


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

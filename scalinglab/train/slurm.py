"""An array-job script for Slurm: every task trains its part of the sweep, and goes on where it was after a requeue."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from scalinglab.errors import ConfigError
from scalinglab.planning import expand
from scalinglab.sweeps import load_sweep
from scalinglab.train.engines import Engine, check_address, count_workers
from scalinglab.train.jobs import stacks
from scalinglab.train.worker import Backend


def slurm_script(
    sweep: str | Path,
    out: str | Path,
    *,
    stacks_per_task: int = 8,
    workers: int | None = None,
    hours: float = 4.0,
    partition: str | None = None,
    device: str = "cpu",
    backend: Backend = "auto",
    engine: Engine = "loky",
    address: str | None = None,
    quiet: bool = False,
) -> str:
    """The script as text; hand it to `sbatch`.

    Parameters
    ----------
    sweep, out : path
        As given to `scalinglab train`; every node must see both.
    stacks_per_task : int
        Jobs (stacks of runs) in an array task. A task should last some minutes at least: it imports torch.
    workers : int, optional
        Of a task, one core each: 2 on a CPU, 1 on an accelerator.
    hours : float
        Time limit. A minute before it the workers are told to save their state, and the task is queued again.
    partition : str, optional
    device, backend, engine, address, quiet
        As given to `scalinglab train`. A task on "cuda" asks for a GPU. Whether the device is there is seen on the node.

    Raises
    ------
    ConfigError
        The sweep can't be used, a number is not positive, or an address that the engine has no use for.
    """
    on_cpu = device == "cpu"
    workers = count_workers(workers if workers is not None else 2 if on_cpu else 1, device)
    check_address(engine, address)
    for name, value in {"stacks_per_task": stacks_per_task, "hours": hours}.items():
        if not value > 0:
            raise ConfigError(f"{name}={value} must be positive")
    read = load_sweep(sweep)
    tasks = math.ceil(len(stacks(expand(read).runs)) / stacks_per_task)
    minutes = math.ceil(60 * hours)
    options = {
        "device": (device, "cpu"),
        "backend": (backend, "auto"),
        "engine": (engine, "loky"),
        "address": (address, None),
    }
    told = [f"--{name} {shlex.quote(str(value))}" for name, (value, usual) in options.items() if value != usual]
    command = " ".join(
        [
            f"scalinglab train {shlex.quote(str(sweep))} --out {shlex.quote(str(out))}",
            f"--shard ${{SLURM_ARRAY_TASK_ID}}/{tasks}",
            f"--workers {'$SLURM_CPUS_PER_TASK' if on_cpu else workers}",
            *told,
            *(["--quiet"] if quiet else []),
        ]
    )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={read.name.split()[0] if read.name.split() else 'scalinglab'}",
        f"#SBATCH --array=1-{tasks}",
        f"#SBATCH --cpus-per-task={workers}",
        *(["#SBATCH --gres=gpu:1"] if device.startswith("cuda") else []),
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        *([f"#SBATCH --partition={partition}"] if partition else []),
        "#SBATCH --requeue --open-mode=append",
        "#SBATCH --signal=B:TERM@60",
        "",
        "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1",
        "trap 'kill -TERM $task; wait $task; scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}' TERM",
        f"{command} &",
        "task=$!",
        "wait $task",
    ]
    return "\n".join(lines) + "\n"

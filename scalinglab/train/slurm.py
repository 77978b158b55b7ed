"""An array-job script for Slurm: every task trains its part of the sweep, and goes on where it was after a requeue."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from scalinglab.errors import ConfigError
from scalinglab.planning import expand
from scalinglab.sweeps import load_sweep
from scalinglab.train.jobs import stacks


def slurm_script(
    sweep: str | Path,
    out: str | Path,
    *,
    stacks_per_task: int = 8,
    cpus: int = 2,
    hours: float = 4.0,
    partition: str | None = None,
    options: str = "",
) -> str:
    """The script as text; hand it to `sbatch`.

    Parameters
    ----------
    sweep, out : path
        As given to `scalinglab train`; every node must see both.
    stacks_per_task : int
        Jobs (stacks of runs) in an array task. A task should last some minutes at least: it imports torch.
    cpus : int
        Cores of a task, one worker each.
    hours : float
        Time limit. A minute before it the workers are told to save their state, and the task is queued again.
    partition : str, optional
    options : str
        More options of `scalinglab train`.

    Raises
    ------
    ConfigError
        The sweep can't be used, or a number is not positive.
    """
    for name, value in {"stacks_per_task": stacks_per_task, "cpus": cpus, "hours": hours}.items():
        if not value > 0:
            raise ConfigError(f"{name}={value} must be positive")
    read = load_sweep(sweep)
    tasks = math.ceil(len(stacks(expand(read).runs)) / stacks_per_task)
    minutes = math.ceil(60 * hours)
    command = f"scalinglab train {shlex.quote(str(sweep))} --out {shlex.quote(str(out))}"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={read.name.split()[0] if read.name.split() else 'scalinglab'}",
        f"#SBATCH --array=1-{tasks}",
        f"#SBATCH --cpus-per-task={cpus}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        *([f"#SBATCH --partition={partition}"] if partition else []),
        "#SBATCH --requeue --open-mode=append",
        "#SBATCH --signal=B:TERM@60",
        "",
        "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1",
        "trap 'kill -TERM $task; wait $task; scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}' TERM",
        f"{command} --shard ${{SLURM_ARRAY_TASK_ID}}/{tasks} --workers $SLURM_CPUS_PER_TASK{f' {options}' if options else ''} &",
        "task=$!",
        "wait $task",
    ]
    return "\n".join(lines) + "\n"

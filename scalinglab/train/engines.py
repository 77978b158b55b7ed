"""Where jobs run: the processes of this machine, a Dask cluster or a Ray cluster, all through one joblib call."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from scalinglab.errors import ConfigError

Engine: TypeAlias = Literal["loky", "dask", "ray"]

_NEEDS = {"loky": ("joblib", "train"), "dask": ("distributed", "dask"), "ray": ("ray", "ray")}
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def cores() -> int:
    """Cores that this process may use: affinity and container limits count."""
    from joblib import cpu_count

    found: int = cpu_count()
    return found


def count_workers(workers: int | None, device: str) -> int:
    """Workers that were asked for; else one per core, or one on an accelerator.

    Raises
    ------
    ConfigError
        Fewer than one.
    """
    if workers is None:
        return cores() if device == "cpu" else 1
    if workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    return workers


def check_address(engine: str, address: str | None) -> None:
    """Refuse an address where it would be ignored."""
    if engine == "loky" and address is not None:
        raise ConfigError(
            f"address={address!r} is of a cluster, and engine 'loky' trains on this machine: choose engine 'dask' or 'ray', "
            "or leave the address out"
        )


@contextlib.contextmanager
def start(engine: Engine, workers: int, address: str | None = None) -> Iterator[None]:
    """A context in which `run` runs its calls on the engine.

    Parameters
    ----------
    engine : {"loky", "dask", "ray"}
    workers : int
        With 1 and "loky" calls run in this process.
    address : str, optional
        Of the scheduler; without it "dask" and "ray" start a cluster of `workers` processes on this machine.

    Raises
    ------
    ConfigError
        The engine is unknown or not installed, its scheduler can't be reached, or "loky" is given an address.
    """
    if engine not in _NEEDS:
        raise ConfigError(f"engine={engine!r} is unknown; choose one of {', '.join(_NEEDS)}")
    check_address(engine, address)
    for module, extra in dict([_NEEDS["loky"], _NEEDS[engine]]).items():
        if find_spec(module) is None:
            raise ConfigError(f"engine {engine!r} needs {module}: pip install 'scalinglab[{extra}]'")
    from joblib import parallel_config

    with contextlib.ExitStack() as stack:
        if engine == "loky":
            # the variables are in the workers' environment before they import anything
            stack.enter_context(parallel_config("loky", n_jobs=workers, inner_max_num_threads=1))
        elif engine == "dask":
            _start_dask(stack, workers, address)
            stack.enter_context(parallel_config("dask", n_jobs=-1))
        else:
            import ray
            from ray.util.joblib import register_ray

            if not ray.is_initialized():
                ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False)
                stack.callback(ray.shutdown)
            register_ray()
            stack.enter_context(parallel_config("ray", n_jobs=-1))
        yield


def run(
    call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: int, *, alone: bool = False
) -> Iterator[Any]:
    """Results of call(*a) for each a, as they come; begun in the order given.

    alone : in a process of its own even where `workers` is 1.
    """
    from joblib import Parallel, delayed

    jobs = {"n_jobs": 2} if alone else {}
    streams = bool(getattr(Parallel()._backend, "supports_return_generator", False))
    parallel = Parallel(**jobs, batch_size=1, max_nbytes=None, return_as="generator_unordered" if streams else "list")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        yield from parallel(delayed(call)(*each) for each in arguments)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for libraries that are not loaded yet; torch's number is put back at the end."""
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start_dask(stack: contextlib.ExitStack, workers: int, address: str | None) -> None:
    from distributed import Client, LocalCluster, get_client

    if address is None:
        try:
            get_client()
            return  # the caller's own cluster
        except ValueError:
            pass
        cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
        stack.enter_context(cluster)
        stack.enter_context(Client(cluster))
        return
    try:
        stack.enter_context(Client(address, timeout="20s"))
    except (OSError, TimeoutError, ValueError) as error:
        raise ConfigError(f"no Dask scheduler answers at {address}: {str(error).splitlines()[0]}") from None

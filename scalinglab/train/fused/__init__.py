"""The native backend: the sublayers as fused float32 kernels in C++ for one CPU thread, behind four functions.

`load()` compiles them on first use, or says in one sentence why it can't; the torch backend then does the same work.

>>> import torch
>>> from scalinglab.train.fused import available, load
>>> if available() is None:
...     assert load().norm(torch.ones(1, 1, 2, 3), torch.ones(1, 3), 0.0).equal(torch.ones(1, 1, 2, 3))
"""

from __future__ import annotations

import functools

from scalinglab.train.fused.build import FusedUnavailable, library
from scalinglab.train.fused.ops import Kernels

__all__ = ["FusedUnavailable", "Kernels", "available", "load"]


@functools.cache
def load() -> Kernels:
    """The kernels of this machine, compiled on first use (seconds) and kept in the cache folder.

    Raises
    ------
    FusedUnavailable
        No compiler, no AVX2, a failed build, or a cache folder that can't be written; says which.
    """
    return Kernels(library())


def available() -> str | None:
    """None if the kernels can be used here, else the reason why not."""
    try:
        load()
    except FusedUnavailable as error:
        return str(error)
    return None

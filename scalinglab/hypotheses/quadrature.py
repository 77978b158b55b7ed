"""Gauss-Legendre nodes, computed once per size: root finders integrate the same function hundreds of times."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@cache
def legendre(count: int) -> tuple[Array, Array]:
    """Nodes on (-1, 1) and weights, read-only."""
    u, w = np.polynomial.legendre.leggauss(count)
    u.flags.writeable = w.flags.writeable = False
    return u, w

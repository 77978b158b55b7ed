"""The peers' fitting protocols for sums of power laws, expressed anew: L = E + sum_k C_k x_k^-a_k.

Coordinates are [log E, log C_1.., a_1..]. Sources of the protocols: Hoffmann et al. 2022 (start grid), Besiroglu et al. 2024
(L-BFGS-B over the grid, BFGS for the bootstrap), Gemstones 2025 (the same grid with more terms).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FLOORS = (-1.0, -0.5, 0.0, 0.5, 1.0)
AMPLITUDES = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class PowerSum:
    """Huber fit of a sum of K power laws: X [n, K] logarithms of the predictors, y [n] log losses."""

    X: Array
    y: Array
    delta: float

    @property
    def grid_size(self) -> int:
        K = self.X.shape[1]
        return len(FLOORS) * (len(AMPLITUDES) * len(EXPONENTS)) ** K

    def starts(self, count: int, rng: np.random.Generator) -> Array:
        """Random points of the published start grid, without replacement; the whole grid where count covers it."""
        K = self.X.shape[1]
        if count >= self.grid_size:
            return np.array(list(itertools.product(FLOORS, *[AMPLITUDES] * K, *[EXPONENTS] * K)))
        shape = (len(FLOORS), *[len(AMPLITUDES)] * K, *[len(EXPONENTS)] * K)
        at = np.unravel_index(rng.choice(self.grid_size, count, replace=False), shape)
        values = (FLOORS, *[AMPLITUDES] * K, *[EXPONENTS] * K)
        return np.stack([np.array(v)[i] for v, i in zip(values, at, strict=True)], 1)

    def predict(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [n] and the share of each term [n, K + 1]."""
        K = self.X.shape[1]
        z = np.empty((len(self.y), K + 1))
        z[:, 0] = theta[0]
        z[:, 1:] = theta[1 : K + 1] - self.X * theta[K + 1 :]
        top = z.max(1, keepdims=True)
        e = np.exp(z - top)
        total = e.sum(1, keepdims=True)
        return (np.log(total) + top)[:, 0], e / total

    def residual(self, theta: Array) -> Array:
        return self.y - self.predict(theta)[0]

    def jacobian(self, theta: Array) -> Array:
        """Derivative of the residual [n, 2 K + 1]."""
        p = self.predict(theta)[1]
        return np.concatenate([-p, p[:, 1:] * self.X], 1)

    def huber(self, residual: Array, w: Array | None = None) -> float:
        r = np.abs(residual)
        rho = np.where(r <= self.delta, 0.5 * r * r, self.delta * (r - 0.5 * self.delta))
        return float(rho.sum() if w is None else rho @ w)

    def objective(self, theta: Array, w: Array | None = None) -> float:
        return self.huber(self.residual(theta), w)

    def gradient(self, theta: Array, w: Array | None = None) -> Array:
        psi = np.clip(self.residual(theta), -self.delta, self.delta)
        return (psi if w is None else psi * w) @ self.jacobian(theta)

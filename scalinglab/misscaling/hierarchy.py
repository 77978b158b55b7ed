"""All runs in one hierarchical model, as a check on the curves that are fitted shape by shape.

    loss = L + a d^2 + kappa max(d, 0)^3 + b_seed + e,     d = ln lr - o
    o = o0[arm] + delta[arm] x + v_shape                   x = ln (depth / smallest depth of the ladder)
    L = L0[arm] - G[arm] x + u_shape

v, u, b and e are normal, a is each arm's own, kappa is one. Linearised at the current values (Lindstrom & Bates 1990), solved
as a linear mixed model by restricted likelihood, and repeated until nothing moves. A depth gain here is a parameter, not a
slope through fitted minima: the two should agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import FitError
from scalinglab.misscaling.curves import Array, Curves
from scalinglab.misscaling.identical import repeated
from scalinglab.misscaling.intake import Arm, Grids

_ROUNDS = 12
_TOL = 1e-6


@dataclass(frozen=True)
class Hierarchy:
    """The fitted model.

    table : per arm o0, delta, gain (nats per e-fold of depth), curvature, with standard errors. cov : of all fixed effects, by
    name. kappa, sigma, tau (of u), drift_tau (of v), seed (of b) : in nats and ln lr. converged.
    """

    table: pd.DataFrame
    values: pd.Series
    cov: pd.DataFrame
    kappa: float
    sigma: float
    tau: float
    drift_tau: float
    seed: float
    converged: bool
    n_runs: int

    def difference(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """A contrast of fixed effects by name ("gain[pre_ln/sp]") and its standard error."""
        w = pd.Series(weights)
        return float(w @ self.values[w.index]), float(np.sqrt(w @ self.cov.loc[w.index, w.index] @ w))


def fit_hierarchy(grids: Grids, curves: Curves, *, tau: float | None = None) -> Hierarchy:
    """Fit the hierarchical model to the runs in the windows of the curves.

    tau : SD of u where it is given (to see how much hangs on it), else it is estimated.

    Raises
    ------
    FitError
        No arm has two depths with an optimum inside its grid.
    """
    # At the smallest depth arms can be the same runs: these count once, and the arms have one intercept. (Elsewhere they
    # would be the same model under two names: an arm with no runs of its own is left out.)
    twice = repeated(grids.cells)
    keep = [
        a
        for a in range(len(grids.arms))
        if len(set(grids.cells["x"][(grids.arm == a) & curves.usable])) >= 2 and not twice[grids.arm == a].all()
    ]
    once = ~(twice & (grids.cells["x"] == 0).to_numpy())
    use = curves.used & (np.isin(grids.arm, keep) & curves.usable & once)[:, None]
    c, j, s = np.nonzero(use[..., None] & np.isfinite(grids.loss))
    if not len(c):
        raise FitError("no arm has two depths with an optimum inside its grid: there is no hierarchical model to fit")
    d = _Data(grids, curves, keep, c, j, s)
    theta, ratios, sigma2 = d.start(), np.full(3, 0.3), 2.5e-5
    converged = False
    for _ in range(_ROUNDS):
        mean, X, Z = d.linearised(theta)
        held = None if tau is None else tau**2 / sigma2
        found, ratios, sigma2, cov = _mixed(d.y - mean + X @ theta.fixed, X, Z, d.blocks, ratios, held)
        moved = float(np.abs(found.fixed - theta.fixed).max())
        theta = _Theta(found.fixed, found.random)
        if moved < _TOL * (1 + float(np.abs(theta.fixed).max())):
            converged = True
            break
    return d.result(theta, ratios, sigma2, cov, converged)


@dataclass(frozen=True)
class _Theta:
    fixed: Array
    random: Array


class _Data:
    """Runs as vectors, and the derivatives of the model in its fixed and random effects."""

    def __init__(
        self,
        grids: Grids,
        curves: Curves,
        keep: list[int],
        c: NDArray[np.intp],
        j: NDArray[np.intp],
        s: NDArray[np.intp],
    ) -> None:
        self.arms: list[Arm] = [grids.arms[a] for a in keep]
        self.z, self.y = grids.z[c, j], grids.loss[c, j, s]
        self.x = grids.cells["x"].to_numpy(np.float64)[c]
        self.arm = np.searchsorted(keep, grids.arm[c])
        self.level = np.unique(_levels(grids)[c], return_inverse=True)[1]  # intercepts of loss and of optimum
        _, self.cell = np.unique(c, return_inverse=True)
        self.seed = np.unique(s, return_inverse=True)[1]
        self.cells = np.unique(c)
        self.curves = curves
        A, K = len(self.arms), int(self.level.max()) + 1
        self.A, self.K = A, K
        m, S = int(self.cell.max()) + 1, int(self.seed.max()) + 1
        self.m = m
        self.blocks = (slice(0, m), slice(m, 2 * m), slice(2 * m, 2 * m + S))  # u, v, b

    def parts(self, f: Array) -> tuple[Array, Array, Array, Array, Array, float]:
        """L0 [K], G [A], o0 [K], delta [A], curvature [A], kappa."""
        K, A = self.K, self.A
        cuts = np.cumsum([K, A, K, A, A])
        L0, G, o0, delta, a, kappa = np.split(f, cuts)
        return L0, G, o0, delta, a, float(kappa[0])

    def start(self) -> _Theta:
        L0, o0 = np.zeros(self.K), np.zeros(self.K)
        G, delta, a = np.zeros(self.A), np.zeros(self.A), np.zeros(self.A)
        o, L = self.curves.optimum[self.cells][self.cell], self.curves.minimum[self.cells][self.cell]
        for k in range(self.A):
            rows = self.arm == k
            X = np.column_stack(
                [(self.level[rows][:, None] == np.unique(self.level[rows])[None]).astype(float), self.x[rows]]
            )
            for values, level, slope, sign in ((L, L0, G, -1), (o, o0, delta, 1)):
                b = np.linalg.lstsq(X, values[rows], rcond=None)[0]
                level[np.unique(self.level[rows])] = b[:-1]
                slope[k] = sign * b[-1]
            a[k] = max(1e-4, float(np.median(self.curves.curvature[self.cells][self.cell][rows])))
        return _Theta(np.concatenate([L0, G, o0, delta, a, [0.0]]), np.zeros(self.blocks[2].stop))

    def linearised(self, theta: _Theta) -> tuple[Array, Array, Array]:
        """Mean at these values with random effects out of it linearly, and the two Jacobians."""
        L0, G, o0, delta, a, kappa = self.parts(theta.fixed)
        _, v, b = (theta.random[k] for k in self.blocks)
        o = o0[self.level] + delta[self.arm] * self.x + v[self.cell]
        d = self.z - o
        up = np.maximum(d, 0.0)
        mean = L0[self.level] - G[self.arm] * self.x + a[self.arm] * d**2 + kappa * up**3
        slope = -(2 * a[self.arm] * d + 3 * kappa * up**2)  # derivative in o
        n = len(self.z)
        level = (self.level[:, None] == np.arange(self.K)[None]).astype(np.float64)
        arm = (self.arm[:, None] == np.arange(self.A)[None]).astype(np.float64)
        cell = (self.cell[:, None] == np.arange(self.m)[None]).astype(np.float64)
        seed = (self.seed[:, None] == np.arange(len(b))[None]).astype(np.float64)
        X = np.column_stack([level, -arm * self.x[:, None], level * slope[:, None], arm * (slope * self.x)[:, None],
                             arm * (d**2)[:, None], up.reshape(n, 1) ** 3])  # fmt: skip
        Z = np.column_stack([cell, cell * slope[:, None], seed])
        return mean - slope * v[self.cell], X, Z  # mean holds v; taken out to first order, as Z v is added

    def result(self, theta: _Theta, ratios: Array, sigma2: float, cov: Array, converged: bool) -> Hierarchy:
        _, G, _, delta, a, kappa = self.parts(theta.fixed)
        names = ["/".join(x) for x in self.arms]
        keys = [*(f"level{k}" for k in range(self.K)), *(f"gain[{n}]" for n in names), *(f"optimum{k}" for k in range(self.K)),
                *(f"drift[{n}]" for n in names), *(f"curvature[{n}]" for n in names), "kappa"]  # fmt: skip
        se = pd.Series(np.sqrt(np.maximum(np.diag(cov), 0)), keys)
        sd = np.sqrt(np.maximum(ratios, 0) * sigma2)
        table = pd.DataFrame({
            "architecture": [x[0] for x in self.arms], "parametrization": [x[1] for x in self.arms],
            "drift": delta, "drift_se": [se[f"drift[{n}]"] for n in names], "gain": G,
            "gain_se": [se[f"gain[{n}]"] for n in names], "curvature": a,
        })  # fmt: skip
        return Hierarchy(table, pd.Series(theta.fixed, keys), pd.DataFrame(cov, keys, keys), kappa, float(np.sqrt(sigma2)),
                         float(sd[0]), float(sd[1]), float(sd[2]), converged, len(self.z))  # fmt: skip


def _levels(grids: Grids) -> NDArray[np.intp]:
    """Arm and ladder of each cell as one number; arms that are the same runs at the smallest depth have one [C]."""
    ladder = pd.factorize(grids.cells["ladder"])[0]
    out: NDArray[np.intp] = grids.arm * (int(ladder.max()) + 1) + ladder
    first = (grids.cells["x"] == 0).to_numpy() & repeated(grids.cells)
    for i, j in zip(np.flatnonzero(first), grids.cells["same_as"].to_numpy(np.intp)[first], strict=True):
        out[out == out[i]] = out[j]
    return out


def _mixed(
    y: Array, X: Array, Z: Array, blocks: tuple[slice, ...], ratios: Array, held: float | None
) -> tuple[_Theta, Array, float, Array]:
    """Linear mixed model y = X f + Z r + e by restricted likelihood; r has one variance per block.

    held : variance of the first block over sigma^2 where it is given.

    Returns effects, variances over sigma^2, sigma^2 and the covariance of f. With Woodbury every likelihood costs a Cholesky
    factor of the number of random effects.
    """
    from scipy.optimize import minimize

    n, p = X.shape
    scale = np.maximum(np.sqrt((X**2).sum(0)), 1e-12)
    W = np.column_stack([X / scale, y])
    ZZ, ZW, WW = Z.T @ Z, Z.T @ W, W.T @ W
    size = np.array([b.stop - b.start for b in blocks])

    def solved(r: Array) -> tuple[Array, float, Array, float]:
        root = np.sqrt(np.repeat(r, size))
        inner = np.eye(len(root)) + root[:, None] * ZZ * root[None]
        C = np.linalg.cholesky(inner)
        half = np.linalg.solve(C, root[:, None] * ZW)
        V = WW - half.T @ half  # W' V^-1 W with V = I + Z R Z'
        XX = V[:p, :p] + 1e-12 * np.eye(p)
        f = np.linalg.solve(XX, V[:p, p])
        rss = float(V[p, p] - f @ V[:p, p])
        logdet = 2 * float(np.log(np.diag(C)).sum()) + float(np.linalg.slogdet(XX)[1])
        return f, max(rss, 1e-300), XX, logdet

    def criterion(q: Array) -> float:
        _, rss, _, logdet = solved(spelled(q))
        return (n - p) * float(np.log(rss)) + logdet

    def spelled(q: Array) -> Array:
        r = np.exp(np.clip(q, -30, 15))
        return r if held is None else np.concatenate([[held], r[1:]])

    options = {"xatol": 1e-4, "fatol": 1e-7, "maxiter": 400}
    best = minimize(criterion, np.log(ratios + 1e-6), method="Nelder-Mead", options=options)
    r = spelled(best.x)
    f, rss, XX, _ = solved(r)
    sigma2 = rss / (n - p)
    e = y - (X / scale) @ f
    root = np.sqrt(np.repeat(r, size))
    random = root * np.linalg.solve(np.eye(len(root)) + root[:, None] * ZZ * root[None], root * (Z.T @ e))
    cov = sigma2 * np.linalg.inv(XX) / np.outer(scale, scale)
    return _Theta(f / scale, random), r, sigma2, cov

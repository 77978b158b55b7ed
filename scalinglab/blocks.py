"""A law on given rows as a log-sum-exp of linear predictors, with every derivative.

A law is a set of blocks. Block k has the linear predictor z_k = offset_k + X_k theta[index_k], and

    log loss = logsumexp_k z_k                       (blocks on their own)
    phi_g = d_g logsumexp_{k in g} (z_k / d_g + inner_k)   (blocks under an outer exponent d_g = exp(theta))
    log loss = logsumexp over blocks on their own and groups g

so one set of derivatives serves every law. With softmax shares p_k the gradient of log loss is sum_k p_k x_k, and every
second derivative is a share times a product of two features: the Hessian of all replicates is one skinny matrix product
per pair of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scalinglab.objectives import Objective, Take

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """One term of a law on given rows: z = offset + X @ theta[index].

    X [n, d] features, `index` [d] positions in theta, `offset` [n] or None. `inner` [n] is added to z / d inside a group:
    the part whose natural coefficient is the outer exponent itself.
    """

    X: Array
    index: NDArray[np.intp]
    offset: Array | None = None
    inner: Array | None = None


@dataclass(frozen=True)
class Problem:
    """A law on given rows, ready to be fitted. `groups` are (position of log outer exponent, block numbers)."""

    blocks: tuple[Block, ...]
    size: int
    amplitudes: NDArray[np.intp]
    lower: Array
    upper: Array
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()
    _cache: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n(self) -> int:
        return len(self.blocks[0].X)

    def predictors(self, theta: Array, take: Take = np.empty) -> list[Array]:
        """z of each block: [R, n], or [R, 1] for a constant block."""
        out = []
        for b, constant in zip(self.blocks, self.constant, strict=True):
            part = theta[:, b.index]
            if constant:
                out.append(part.copy())
                continue
            eta = np.matmul(part, b.X.T, out=take((len(theta), self.n)))
            if b.offset is not None:
                eta += b.offset
            out.append(eta)
        return out

    @property
    def constant(self) -> tuple[bool, ...]:
        """Which blocks have the same eta on all rows (a plain floor): one exponential per replicate, not per row."""
        if "constant" not in self._cache:
            self._cache["constant"] = tuple(
                b.offset is None and b.X.shape[1] == 1 and bool((b.X == 1.0).all()) for b in self.blocks
            )
        return self._cache["constant"]  # type: ignore[return-value]

    def reach(self, theta: Array) -> Array:
        """An upper bound on |predictors| (z, z / d + inner, phi) over rows and blocks, for each theta [R]."""
        if "reach" not in self._cache:
            size = np.zeros((len(self.blocks), self.size))
            fixed = np.zeros(len(self.blocks))
            for k, b in enumerate(self.blocks):
                size[k, b.index] = np.abs(b.X).max(0, initial=0.0)
                for part in (b.offset, b.inner):
                    fixed[k] += 0.0 if part is None else np.abs(part).max(initial=0.0)
            self._cache["reach"] = size, fixed
        size, fixed = self._cache["reach"]  # type: ignore[misc]
        bound = (np.abs(theta) @ size.T + fixed).max(1)
        for position, members in self.groups:
            d = np.exp(theta[:, position])
            bound = np.maximum(d, 1.0) * (np.maximum(1.0, 1.0 / d) * bound + np.log(len(members)))
        return bound

    def log_loss(self, theta: Array) -> Array:
        """Predicted log loss [R, n] at theta [R, P]."""
        return Shares(self, np.atleast_2d(theta)).log_loss

    def jacobian(self, theta: Array) -> Array:
        """Derivative of the predicted log loss with respect to theta: [n, P] at one theta [P]."""
        shares = Shares(self, np.atleast_2d(theta))
        J = np.zeros((self.n, self.size))
        for atom, p in zip(self.atoms, shares.first(), strict=True):
            J[:, atom.index] += p[0][:, None] * atom.X
        return J

    @property
    def atoms(self) -> tuple[Block, ...]:
        """The blocks, then one pseudo-block per outer exponent: all that the derivatives sum over."""
        if "atoms" not in self._cache:
            one = np.ones((self.n, 1))
            extra = tuple(Block(one, np.array([position])) for position, _ in self.groups)
            self._cache["atoms"] = self.blocks + extra
        return self._cache["atoms"]  # type: ignore[return-value]

    @property
    def pairs(self) -> tuple[list[_Pair], int, NDArray[np.intp], Array | None]:
        """What the Hessian sums: pairs of atoms a <= b, the number of sums, and where each Hessian entry finds its own.

        The third is [P, P], the row of each entry among the sums. Where parameters are tied across terms several sums feed
        one entry; the fourth is then their incidence [P, P, sums], else None.
        """
        if "pairs" not in self._cache:
            self._cache["pairs"] = _pairs(self.atoms, self.size)
        return self._cache["pairs"]  # type: ignore[return-value]


_Pair = tuple[int, int, Array, slice]  # atoms a, b; products of their features [n, m]; their rows among the sums


class Scratch:
    """One reused buffer for the temporaries of a pass, so that large batches cost no allocation and no page faults."""

    def __init__(self) -> None:
        self._buffer = np.empty(0)
        self._used = self._wanted = 0

    def reset(self) -> None:
        """Start a pass: all that was taken before is free again."""
        if self._wanted > len(self._buffer):
            self._buffer = np.empty(int(1.1 * self._wanted))
        self._used = self._wanted = 0

    def take(self, shape: tuple[int, ...]) -> Array:
        """An uninitialised array of that shape, from the buffer while it lasts."""
        size = math.prod(shape)
        self._wanted += size
        if self._used + size > len(self._buffer):
            return np.empty(shape)
        self._used += size
        return self._buffer[self._used - size : self._used].reshape(shape)


class Shares:
    """Softmax shares of a law at theta [R, P], and from them every first and second derivative of log loss."""

    def __init__(self, problem: Problem, theta: Array, take: Take = np.empty) -> None:
        self.problem = problem
        z = problem.predictors(theta, take)
        safe = bool((problem.reach(theta) < 600.0).all())  # NaN compares False
        in_group = {k for _, members in problem.groups for k in members}
        alone = [k for k in range(len(z)) if k not in in_group]
        self.groups = [
            _Group(
                [problem.blocks[k] for k in members], [z[k] for k in members], np.exp(theta[:, [position]]), take, safe
            )
            for position, members in problem.groups
        ]
        self.log_loss, outer = _softmax([z[k] for k in alone] + [g.phi.copy() for g in self.groups], take, safe)
        if self.log_loss.shape[1] != problem.n:  # only constant blocks: a law without features
            self.log_loss = np.broadcast_to(self.log_loss, (len(theta), problem.n)).copy()
            outer = [np.broadcast_to(p, self.log_loss.shape).copy() for p in outer]
        self.share = dict(zip(alone, outer, strict=False))
        self.group_share = outer[len(alone) :]

    def first(self) -> list[Array]:
        """d log loss / d predictor of each atom [R, n]."""
        p: list[Array] = [np.empty(0)] * len(self.problem.atoms)
        for k, share in self.share.items():
            p[k] = share
        for g, (_, members) in enumerate(self.problem.groups):
            for k, q in zip(members, self.groups[g].share, strict=True):
                p[k] = self.group_share[g] * q
            p[len(self.problem.blocks) + g] = self.group_share[g] * self.groups[g].slope
        return p

    def second(self, a: int, b: int) -> Array | None:
        """Second derivative of log loss in the predictors of atoms a <= b, plus first_a * first_b [R, n]; None is 0."""
        if a == b and a in self.share:
            return self.share[a]
        for g, (_, members) in enumerate(self.problem.groups):
            own = len(self.problem.blocks) + g
            if {a, b} <= {*members, own}:
                i, j = (None if k == own else members.index(k) for k in (a, b))
                return self.group_share[g] * self.groups[g].second(i, j)
        return None


class _Group:
    """phi = d logsumexp_k (z_k / d + inner_k) of one outer exponent, with its derivatives in z_k and in ln d.

    With q the shares inside, eta = z / d and mean, variance under q:
    dphi/dz_k = q_k; dphi/dlnd = phi - sum q z = slope; d2phi/dz_k dz_l = (q_k [k=l] - q_k q_l) / d;
    d2phi/dz_k dlnd = q_k (mean eta - eta_k); d2phi/dlnd2 = slope + d var eta.
    """

    def __init__(self, blocks: list[Block], z: list[Array], d: Array, take: Take, safe: bool) -> None:
        self.d = d
        self.eta = [part / d for part in z]
        shifted = [e + b.inner if b.inner is not None else e.copy() for e, b in zip(self.eta, blocks, strict=True)]
        total, self.share = _softmax(shifted, take, safe)
        self.phi = d * total
        self.mean = sum((q * e for q, e in zip(self.share[1:], self.eta[1:], strict=True)), self.share[0] * self.eta[0])
        self.slope = self.phi - d * self.mean

    def second(self, i: int | None, j: int | None) -> Array:
        """Second derivative of phi plus the product of its first ones; None stands for ln d (it comes last)."""
        if i is None:
            spread = [q * (e - self.mean) ** 2 for q, e in zip(self.share, self.eta, strict=True)]
            return self.slope + self.d * sum(spread[1:], spread[0]) + self.slope * self.slope
        if j is None:
            return self.share[i] * (self.mean - self.eta[i] + self.slope)
        out = self.share[i] * self.share[j] * (1.0 - 1.0 / self.d)
        return out + self.share[i] / self.d if i == j else out


def _softmax(eta: list[Array], take: Take, safe: bool) -> tuple[Array, list[Array]]:
    """log-sum-exp [R, n] and shares of a list of predictors, each [R, n] or [R, 1]; the predictors are overwritten.

    `safe`: no predictor can overflow or underflow, so the shift by the largest one is left out.
    """
    if len(eta) == 1:
        return eta[0], [np.ones_like(eta[0])]
    wide = max(eta, key=lambda e: e.shape[1]).shape
    peak: Array | float = 0.0
    if not safe:  # shift by the largest predictor of each row; costs two passes more, so only where it is needed
        peak = eta[0]
        for e in eta[1:]:
            peak = np.maximum(peak, e)
        eta = [e - peak for e in eta]
    for e in eta:
        np.exp(e, out=e)
    total = take(wide)
    np.add(eta[0], eta[1], out=total)
    for e in eta[2:]:
        total += e
    log_total = np.log(total, out=take(wide))
    if not safe:
        log_total += peak
    np.divide(1.0, total, out=total)
    return log_total, [np.multiply(e, total, out=e if e.shape == wide else take(wide)) for e in eta]


def derivatives(
    problem: Problem,
    theta: Array,
    y: Array,
    w: Array,
    objective: Objective,
    scale: Array,
    scratch: Scratch | None = None,
) -> tuple[Array, Array, Array]:
    """Objective [R], gradient [P, R] and exact Hessian [P, P, R] of the weighted sum (batch last, as the solver wants it).

    y and w are [n] or [R, n]. With h the fitted loss on the scale of the objective (log loss m, or exp m) and
    psi = rho', the gradient is -sum w psi h' p and the Hessian sum w (rho'' h'^2 - psi h'') p p - w psi h' (second - p p).
    """
    if scratch is not None:
        scratch.reset()
    take: Take = np.empty if scratch is None else scratch.take
    shares = Shares(problem, theta, take)
    m = shares.log_loss
    P, R = problem.size, len(theta)
    h1: Array | None = None
    if objective.on == "log_loss":
        residual = np.subtract(y, m, out=take(m.shape))
    else:
        h1 = np.exp(m, out=take(m.shape))
        residual = np.subtract(np.exp(y), h1, out=take(m.shape))
    value, psi, curvature = objective.terms(residual, scale, take)
    total = value @ w if w.ndim == 1 else np.einsum("rn,rn->r", value, w)
    psi = np.multiply(psi, w, out=psi)
    if h1 is not None:
        psi *= h1
    if curvature is None:
        outer = take(m.shape)
        outer[:] = w
    else:
        outer = np.multiply(curvature, w, out=curvature)
    if h1 is not None:
        outer *= h1
        outer *= h1
    else:
        outer += psi
    first = shares.first()
    pulled = [np.multiply(psi, p, out=take(p.shape)) for p in first]
    gradient = np.zeros((P, R))
    for atom, part in zip(problem.atoms, pulled, strict=True):
        gradient[atom.index] -= (part @ atom.X).T
    pairs, count, home, tied = problem.pairs
    sums = np.zeros((count + 1, R))  # the last row stays 0: home of entries that no pair feeds
    weight, outer_a = take(m.shape), take(m.shape)
    for a, b, products, rows in pairs:
        if a == b:
            np.multiply(outer, first[a], out=outer_a)
        np.multiply(outer_a, first[b], out=weight)
        bent = shares.second(a, b)
        if bent is first[a]:
            weight -= pulled[a]
        elif bent is not None:
            weight -= psi * bent
        sums[rows] = (weight @ products).T
    H = sums[home] if tied is None else np.einsum("pqs,sr->pqr", tied, sums)
    return total, gradient, H


def _pairs(atoms: tuple[Block, ...], P: int) -> tuple[list[_Pair], int, NDArray[np.intp], Array | None]:
    pairs: list[_Pair] = []
    entries: list[tuple[int, int, int]] = []  # sum, row and column of the Hessian
    count = 0
    for a, x in enumerate(atoms):
        for b in range(a, len(atoms)):
            products, i, j = _products(x, atoms[b], a == b)
            pairs.append((a, b, products, slice(count, count + len(i))))
            for k, (p, q) in enumerate(zip(i.tolist(), j.tolist(), strict=True)):
                entries.append((count + k, p, q))
                if a != b or p != q:
                    entries.append((count + k, q, p))
            count += len(i)
    home = np.full((P, P), count, dtype=np.intp)
    tied = len({(p, q) for _, p, q in entries}) < len(entries)
    for s, p, q in entries:
        home[p, q] = s
    if not tied:
        return pairs, count, home, None
    incidence = np.zeros((P, P, count + 1))
    for s, p, q in entries:
        incidence[p, q, s] += 1.0
    return pairs, count, home, incidence


def _products(x: Block, y: Block, same: bool) -> tuple[Array, NDArray[np.intp], NDArray[np.intp]]:
    """Products of the features of two atoms that don't vanish on all rows, and where they go in the Hessian.

    For an atom with itself only one of each mirrored pair is kept.
    """
    keep: list[tuple[int, int]] = []
    columns = []
    for p in range(x.X.shape[1]):
        for q in range(p if same else 0, y.X.shape[1]):
            column = x.X[:, p] * y.X[:, q]
            if column.any():
                keep.append((p, q))
                columns.append(column)
    products = np.stack(columns, 1) if columns else np.zeros((len(x.X), 0))
    i = np.array([x.index[p] for p, _ in keep], dtype=np.intp)
    j = np.array([y.index[q] for _, q in keep], dtype=np.intp)
    return products, i, j

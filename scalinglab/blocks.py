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

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scalinglab.objectives import Objective, Take

Array = NDArray[np.float64]

_PASS_DOUBLES = 24_000  # replicates x rows of one pass: its temporaries then stay in the cache


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

    def predictors(self, theta: Array, out: Array) -> list[Array]:
        """z of each block, written to out [K, R, n]; a constant block gives [R, 1] instead."""
        z = []
        for b, transposed, constant, target in zip(self.blocks, self.transposed, self.constant, out, strict=False):
            part = theta[:, b.index]
            if constant:
                z.append(part)
                continue
            np.matmul(part, transposed, out=target)
            if b.offset is not None:
                target += b.offset
            z.append(target)
        return z

    @property
    def transposed(self) -> tuple[Array, ...]:
        """Features of each block, [d, n] contiguous: the layout in which few replicates multiply fastest."""
        if "transposed" not in self._cache:
            self._cache["transposed"] = tuple(np.ascontiguousarray(b.X.T) for b in self.blocks)
        return self._cache["transposed"]  # type: ignore[return-value]

    @property
    def bounded(self) -> bool:
        """Whether any parameter has a finite bound."""
        if "bounded" not in self._cache:
            self._cache["bounded"] = bool(np.isfinite(self.lower).any() or np.isfinite(self.upper).any())
        return self._cache["bounded"]  # type: ignore[return-value]

    @property
    def constant(self) -> tuple[bool, ...]:
        """Which blocks have the same eta on all rows (a plain floor): one exponential per replicate, not per row."""
        if "constant" not in self._cache:
            self._cache["constant"] = tuple(
                b.offset is None and b.X.shape[1] == 1 and bool((b.X == 1.0).all()) for b in self.blocks
            )
        return self._cache["constant"]  # type: ignore[return-value]

    def safe(self, theta: Array) -> bool:
        """Whether no predictor (z, z / d + inner, phi) can over- or underflow at theta [R, P], by a bound over rows."""
        if "reach" not in self._cache:
            size = np.zeros((self.size, len(self.blocks)))
            fixed = np.zeros(len(self.blocks))
            for k, b in enumerate(self.blocks):
                size[b.index, k] = np.abs(b.X).max(0, initial=0.0)
                for part in (b.offset, b.inner):
                    fixed[k] += 0.0 if part is None else np.abs(part).max(initial=0.0)
            self._cache["reach"] = size, fixed
        size, fixed = self._cache["reach"]  # type: ignore[misc]
        bound = np.abs(theta) @ size
        bound += fixed
        if self.groups:
            bound = bound.max(1)
            for position, members in self.groups:
                d = np.exp(theta[:, position])
                bound = np.maximum(d, 1.0) * (np.maximum(1.0, 1.0 / d) * bound + np.log(len(members)))
        return bool(bound.max() < 600.0)  # NaN compares False

    def log_loss(self, theta: Array) -> Array:
        """Predicted log loss [R, n] at theta [R, P]."""
        theta = np.atleast_2d(theta)
        if len(self.parts) > 1:
            return np.concatenate([part.log_loss(theta) for _, part in self.parts], 1)
        return Shares(self, theta).log_loss

    def jacobian(self, theta: Array) -> Array:
        """Derivative of the predicted log loss with respect to theta: [n, P] at one theta [P]."""
        shares = Shares(self, np.atleast_2d(theta))
        J = np.zeros((self.n, self.size))
        for atom, p in zip(self.atoms, shares.first(), strict=True):
            J[:, atom.index] += p[0][:, None] * atom.X
        return J

    @property
    def parts(self) -> tuple[tuple[slice, Problem], ...]:
        """The law on consecutive slices of the rows, each small enough for the cache; one slice for most tables."""
        if "parts" not in self._cache:
            count = max(1, self.n // (2 * _PASS_DOUBLES))
            edges = np.linspace(0, self.n, count + 1).astype(int).tolist()
            slices = [slice(i, j) for i, j in itertools.pairwise(edges)]
            self._cache["parts"] = tuple((rows, self._on(rows) if count > 1 else self) for rows in slices)
        return self._cache["parts"]  # type: ignore[return-value]

    def _on(self, rows: slice) -> Problem:
        """The same law on a slice of the rows."""
        blocks = tuple(
            Block(b.X[rows], b.index, *(None if v is None else v[rows] for v in (b.offset, b.inner)))
            for b in self.blocks
        )
        return Problem(blocks, self.size, self.amplitudes, self.lower, self.upper, self.groups)

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
        shape = (len(theta), problem.n)
        self._first = take((len(problem.atoms), *shape))  # predictors, then overwritten by what `first` returns
        z = problem.predictors(theta, self._first)
        safe = problem.safe(theta)
        in_group = {k for _, members in problem.groups for k in members}
        self.alone = [k for k in range(len(z)) if k not in in_group]
        self.groups = [
            _Group(
                [problem.blocks[k] for k in members],
                [z[k] for k in members],
                np.exp(theta[:, [position]]),
                shape,
                take,
                safe,
            )
            for position, members in problem.groups
        ]
        self.group_share = [take(shape) for _ in self.groups]
        self.log_loss = _softmax(
            [z[k] for k in self.alone] + [g.phi.copy() for g in self.groups],
            [self._first[k] for k in self.alone] + self.group_share,
            take,
            safe,
        )

    def first(self) -> Array:
        """d log loss / d predictor of each atom [atoms, R, n]; the shares of blocks on their own."""
        for g, (_, members) in enumerate(self.problem.groups):
            for k, q in zip(members, self.groups[g].share, strict=True):
                np.multiply(self.group_share[g], q, out=self._first[k])
            np.multiply(self.group_share[g], self.groups[g].slope, out=self._first[len(self.problem.blocks) + g])
        return self._first

    def second(self, a: int, b: int) -> Array | None:
        """Second derivative of log loss in the predictors of atoms of one group, plus first_a * first_b [R, n]; else None."""
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

    def __init__(
        self, blocks: list[Block], z: list[Array], d: Array, shape: tuple[int, int], take: Take, safe: bool
    ) -> None:
        self.d = d
        self.eta = [part / d for part in z]
        shifted = [e + b.inner if b.inner is not None else e.copy() for e, b in zip(self.eta, blocks, strict=True)]
        self.share = [e if e.shape == shape else take(shape) for e in shifted]
        self.phi = d * _softmax(shifted, self.share, take, safe)
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


def _softmax(eta: list[Array], out: list[Array], take: Take, safe: bool) -> Array:
    """log-sum-exp [R, n] of predictors, each [R, n] or [R, 1]; their shares go to `out`, each [R, n].

    The predictors are overwritten; `out` may be the same arrays. `safe`: no predictor can overflow or underflow, so the
    shift by the largest one is left out.
    """
    total, log_total = take(out[0].shape), take(out[0].shape)
    if len(eta) == 1:
        log_total[:] = eta[0]
        out[0][:] = 1.0
        return log_total
    peak: Array | float = 0.0
    if not safe:  # shift by the largest predictor of each row; costs two passes more, so only where it is needed
        peak = eta[0]
        for e in eta[1:]:
            peak = np.maximum(peak, e)
        eta = [e - peak for e in eta]
    for e in eta:
        np.exp(e, out=e)
    np.add(eta[0], eta[1], out=total)
    for e in eta[2:]:
        total += e
    np.log(total, out=log_total)
    if not safe:
        log_total += peak
    np.divide(1.0, total, out=total)
    for e, share in zip(eta, out, strict=True):
        np.multiply(e, total, out=share)
    return log_total


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

    Large batches are passed through in pieces whose temporaries stay in the cache: about twice as fast as one large pass.
    """
    P, R = problem.size, len(theta)
    passes = -(-R * problem.n // (len(problem.parts) * _PASS_DOUBLES))
    step = -(-R // passes) if passes else R
    if step >= R and len(problem.parts) == 1:
        return _pass(problem, theta, y, w, objective, scale, scratch)
    total, gradient, H = np.zeros(R), np.zeros((P, R)), np.zeros((P, P, R))
    for start in range(0, R, step):
        i = slice(start, start + step)
        for rows, part in problem.parts:
            y_part, w_part = (v[rows] if v.ndim == 1 else v[i, rows] for v in (y, w))
            f, g, h = _pass(part, theta[i], y_part, w_part, objective, scale[i], scratch)
            total[i] += f
            gradient[:, i] += g
            H[:, :, i] += h
    return total, gradient, H


def _pass(
    problem: Problem, theta: Array, y: Array, w: Array, objective: Objective, scale: Array, scratch: Scratch | None
) -> tuple[Array, Array, Array]:
    """`derivatives` in one piece."""
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
    if h1 is None:
        outer += psi
    else:
        outer *= h1
        outer *= h1
    first = shares.first()
    pairs, count, home, tied = problem.pairs
    gradient = np.zeros((P, R))
    sums = np.zeros((count + 1, R))  # the last row stays 0: home of entries that no pair feeds
    pressed, weight = take(m.shape), value  # the value is summed: its memory is free
    for a, b, products, rows in pairs:
        if a == b:
            atom = problem.atoms[a]
            np.multiply(psi, first[a], out=weight)
            gradient[atom.index] -= atom.X.T @ weight.T
            np.multiply(outer, first[a], out=pressed)
        if a == b and a in shares.alone:
            np.subtract(pressed, psi, out=weight)
            weight *= first[a]
        else:
            np.multiply(pressed, first[b], out=weight)
            if shares.groups and (bent := shares.second(a, b)) is not None:
                weight -= psi * bent
        np.matmul(products.T, weight.T, out=sums[rows])
    H = sums[home] if tied is None else (tied.reshape(P * P, -1) @ sums).reshape(P, P, R)
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

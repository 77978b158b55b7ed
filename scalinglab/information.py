"""What a set of runs can teach about a law before any loss is seen: Fisher information, predicted standard errors.

With J the derivative of the predicted loss (nats) in the parameters and V the covariance of the observed losses, the
information is J' V^-1 J. V has the seed variance sigma^2 on its diagonal and tau^2 between runs of one cell (what a law
misses at a shape is shared by its seeds and is not averaged away by them). Rows of one run count as one observation
together: checkpoints of a run repeat its luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.diagnostics import condition_number
from scalinglab.encoding import Encoding, encode
from scalinglab.errors import ConfigError, FitError
from scalinglab.features import feature_values
from scalinglab.laws import LAWS, Law, law_from

Array = NDArray[np.float64]

_SINGULAR = 1e-7  # a direction with a relative singular value below this is open; a Gram matrix resolves no less
ARM = (  # what sets arms apart besides architecture, parametrization, shape and learning rate (`planning.row` writes them)
    "corpus", "options", "corpus_options", "weight_decay", "decay", "positions", "tied", "ffn", "schedule", "init_std",
    "precision", "settings",
)  # fmt: skip
_CELL = frozenset(  # settings: runs that agree in all of them are seeds of one cell
    [
        "architecture",
        "parametrization",
        "match_group",
        "params",
        "params_backbone",
        "params_total",
        "depth",
        "width",
        "head_dim",
        "ffn_dim",
        "vocab",
        "context",
        "tokens",
        "unique_tokens",
        "batch_tokens",
        "lr",
        "heads",
        "kv_heads",
        *ARM,
    ]
)
DETERMINED = 0.5  # a floor or exponent counts as estimable when its standard error is below this share of it


@dataclass(frozen=True)
class Information:
    """What runs would teach about a law at given parameters.

    cov : predicted covariance of the parameters on their natural scales, [p, p]; infinite variances where the runs leave a
        parameter open.
    condition, condition_raw : condition number of the column-scaled Jacobian of log loss, with centred and with raw
        amplitudes. Below 100 is good, above 1,000 the law is not identified in practice.
    open : parameters that the runs don't determine at all, whatever the noise.
    df : independent observations (cells if tau > 0, else runs) less parameters.
    """

    law: Law
    params: pd.Series
    cov: pd.DataFrame
    condition: float
    condition_raw: float
    open: tuple[str, ...]
    df: int

    @property
    def se(self) -> pd.Series:
        """Predicted standard errors of the parameters; infinite where a parameter is open."""
        return pd.Series(np.sqrt(np.diag(self.cov.to_numpy(np.float64))), index=self.cov.index)

    @property
    def weak(self) -> tuple[str, ...]:
        """Parameters that are open, or a floor or exponent whose standard error is more than half of it.

        Amplitudes don't count (they are extrapolations to N = 1), nor do coefficients that may be zero (gamma, zeta).
        """
        lax = (self.law.amplitudes - {self.law.floor}) | {n for n in self.law.names if n.startswith(("gamma", "zeta"))}
        se = self.se
        strict = [n for n in self.cov.index if n.split("[")[0] not in lax and se[n] > DETERMINED * self.params[n]]
        return tuple(n for n in self.cov.index if n in self.open or n in strict)

    def contrast(self, weights: Mapping[str, float]) -> float:
        """Predicted standard error of a linear combination of parameters."""
        c = np.array([float(weights.get(n, 0.0)) for n in self.cov.index])
        V = self.cov.to_numpy(np.float64)
        own = np.flatnonzero(c)
        return float(np.sqrt(c[own] @ V[np.ix_(own, own)] @ c[own]))


def predicted_se(
    law: str | Law, params: Mapping[str, float] | pd.Series, runs: pd.DataFrame, *, sigma: float, tau: float = 0.0
) -> pd.Series:
    """Standard errors that a fit of `law` to these runs would have if `params` were the truth (asymptotic, Gaussian).

    sigma, tau : SD in nats of a run (seed) and of what the law misses at a cell. No losses are needed.

    Raises
    ------
    ConfigError
        sigma not positive, tau negative, a parameter without value, or a law outside the algebra.
    SchemaError
        A column that the law reads is missing.
    """
    return information(law, params, runs, sigma=sigma, tau=tau).se


def information(
    law: str | Law,
    params: Mapping[str, float] | pd.Series,
    runs: pd.DataFrame,
    *,
    sigma: float,
    tau: float = 0.0,
    cells: NDArray[np.intp] | None = None,
) -> Information:
    """Fisher information of `law` at `params` on these runs; see `predicted_se` for arguments and errors.

    cells : cell number of each row, where it is known already (default `cell_numbers(runs)`).
    """
    chosen = law_from(law, runs.columns)
    if not (np.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"sigma is {sigma!r}: give the SD of the loss between seeds in nats, e.g. 0.003")
    if not (np.isfinite(tau) and tau >= 0):
        raise ConfigError(f"tau is {tau!r}: give the SD of the law's misfit between shapes in nats, 0 or more")
    if not chosen.in_algebra:
        raise ConfigError(f"law {chosen.key!r} is outside the algebra: its information can't be predicted")
    missing = [n for n in chosen.param_names if n not in params and n not in chosen.fixed and n not in chosen.ties]
    if missing:
        raise ConfigError(f"law {chosen.key!r} needs a value of {missing[0]!r} as truth; it has {', '.join(params)}")
    with np.errstate(all="ignore"):  # a size of 0 makes infinite features, which are refused below
        encoding = encode(chosen, runs)
    values = {n: float(params.get(n, chosen.fixed.get(n, np.nan))) for n in chosen.param_names}
    theta = encoding.internal({**values, **{n: values[t] for n, t in chosen.ties.items() if t in values}})
    with np.errstate(all="ignore"):
        J = encoding.problem.jacobian(theta)
        loss = np.exp(encoding.problem.log_loss(theta)[0])
    if not (np.isfinite(J).all() and np.isfinite(loss).all()):
        raise FitError(f"law {chosen.key!r} gives no finite loss at {values} on these runs; check units and parameters")
    share = _row_share(runs)
    if cells is None:
        cells = cell_numbers(runs) if tau > 0 else np.arange(len(runs))
    root = np.sqrt(share) / sigma
    F = _information(J * loss[:, None], share / sigma**2, cells, tau)
    cov, open_ = _inverse(F, encoding)
    conditions = (
        condition_number(J * root[:, None]),
        condition_number(_uncentred(J, encoding) * root[:, None]),
    )
    return Information(
        chosen,
        pd.Series(encoding.natural(theta)[0], index=list(encoding.names)),
        _natural(cov, open_, encoding, theta),
        *(conditions if not open_ else (float("inf"), float("inf"))),
        tuple(n for n in encoding.names if encoding.slots[n].position in open_),
        (len(np.unique(cells)) if tau > 0 else round(float(share.sum()))) - encoding.problem.size,
    )


def cell_numbers(runs: pd.DataFrame) -> NDArray[np.intp]:
    """Cell of each row: rows of one cell differ in seed only (same architecture, shape, data, learning rate)."""
    keys = [c for c in runs.columns if c in _CELL and runs[c].notna().any()]
    if not keys:
        return np.arange(len(runs))
    return np.asarray(runs.groupby(keys, dropna=False, sort=False).ngroup(), dtype=np.intp)


def _row_share(runs: pd.DataFrame) -> Array:
    """1 / rows of its run, for each row: a run is one observation."""
    if "run_id" not in runs:
        return np.ones(len(runs))
    run = pd.factorize(runs["run_id"])[0]
    return 1.0 / np.bincount(run)[run]


def _information(J: Array, precision: Array, cells: NDArray[np.intp], tau: float) -> Array:
    """J' V^-1 J with V = diag(1 / precision) + tau^2 within cells, in O(n p^2).

    Split into deviations from cell means and the means themselves, whose variance is tau^2 + 1 / (summed precision): no
    difference of large numbers, so that tau may exceed sigma by any factor.
    """
    if tau == 0:
        return (J * precision[:, None]).T @ J
    total = np.bincount(cells, precision)
    mean = (
        np.stack([np.bincount(cells, precision * column) for column in J.T], 1)
        / np.where(total > 0, total, 1.0)[:, None]
    )
    off = J - mean[cells]
    return (off * precision[:, None]).T @ off + (mean * (total / (1 + tau**2 * total))[:, None]).T @ mean


def _uncentred(J: Array, encoding: Encoding) -> Array:
    """The Jacobian with log A, not the log of the term at the centre of the runs, as coordinate of each amplitude."""
    out = J.copy()
    for position, slot in {s.position: s for s in encoding.slots.values() if s.kind == "amplitude"}.items():
        for other, weight in slot.shifts:
            out[:, other] -= weight * J[:, position]
    return out


def _inverse(F: Array, encoding: Encoding) -> tuple[Array, set[int]]:
    """Pseudo-inverse of the information and the positions that it leaves open."""
    size = np.sqrt(np.diag(F))
    dead = ~(size > 0)
    size = np.where(dead, 1.0, size)
    values, Q = np.linalg.eigh(F / size[:, None] / size[None])
    lost = values < _SINGULAR**2 * max(values[-1], 1e-300)
    inverse = np.where(lost, 0.0, 1 / np.where(lost, 1.0, values))
    open_ = {int(k) for k in np.flatnonzero((Q[:, lost] ** 2).sum(1) > 1e-3)} | {int(k) for k in np.flatnonzero(dead)}
    return (Q * inverse) @ Q.T / size[:, None] / size[None], open_


def _natural(cov: Array, open_: set[int], encoding: Encoding, theta: Array) -> pd.DataFrame:
    """Covariance on the natural scales by the delta method (central differences of the map)."""
    h = 1e-6
    P = len(theta)
    step = np.eye(P) * h
    D = (encoding.natural(theta + step) - encoding.natural(theta - step)) / (2 * h)  # [P, p]
    D = np.where(np.isfinite(D), D, 0.0)
    out = D.T @ cov @ D
    for k in open_:
        touched = np.flatnonzero(D[k] != 0)
        out[touched, touched] = np.inf
    return pd.DataFrame(out, index=list(encoding.names), columns=list(encoding.names))


# ---- plausible truths --------------------------------------------------------------------------------------------------
# Exponents of published fits, for planning only. Amplitudes are set so that each term is worth, at the centre of the runs,
# what the Chinchilla fit of Besiroglu et al. 2024 (arXiv:2404.10102) says for its size and tokens.
_BESIROGLU = {"E": 1.8172, "A": 477.84, "alpha": 0.34731, "B": 2143.86, "beta": 0.36718}
_EXPONENTS: dict[str, dict[str, float]] = {
    "kaplan_n": {"alpha": 0.076},  # Kaplan et al. 2020, arXiv:2001.08361
    "kaplan_d": {"beta": 0.095},
    "kaplan": {"alpha": 0.076, "delta": 0.103},
    "ces": {"delta": 1.0},
    "shape": {
        "gamma1": 0.023,
        "gamma2": 0.016,
    },  # refit of Gemstones (McLeish et al. 2025), one vocabulary matrix taken off N
    "shape_drift": {"gamma1": 0.023, "gamma2": 0.016, "gamma3": 0.0},
    "shape_data": {"gamma1": 0.023, "gamma2": 0.016, "zeta1": 0.0},
    "width_depth": {"a": 0.945, "b": 1.325, "c": 0.299},  # refit of the Chinchilla shapes
    "width_depth_params": {"a": 0.945, "b": 1.325, "p": 0.34731, "c": 0.299},
    "effective_depth": {"a": 0.945, "b": 1.325, "c": 0.299},
    "levine": {"eta1": 0.01, "eta2": 0.01},
}


def plausible(law: Law, runs: pd.DataFrame) -> dict[str, float]:
    """Parameters of a law of LAWS that are plausible for language models, with its amplitudes fitted to these runs' centre.

    Raises
    ------
    ConfigError
        A law without literature values: give params=.
    """
    if law.key not in LAWS or not law.in_algebra:
        raise ConfigError(
            f"no literature values are known for law {law.key!r}; give params={{...}} as the truth to plan with"
        )
    x = {k: np.asarray(v, dtype=np.float64) for k, v in feature_values(law, runs).items() if k not in law.constants}
    centre = {k: float(np.exp(np.log(v).mean())) for k, v in x.items() if k not in ("u", "aspect") and (v > 0).all()}
    size = centre.get("params", 12 * centre.get("depth", 20.0) * centre.get("width", 1000.0) ** 2)
    out = {**_BESIROGLU, **_EXPONENTS.get(law.key, {})}
    capacity = out["A"] * size ** -_BESIROGLU["alpha"]
    data = out["B"] * centre.get("tokens", 20 * size) ** -_BESIROGLU["beta"]
    n, d, w, h = size, centre.get("tokens", 20 * size), centre.get("width", 1.0), centre.get("depth", 1.0)
    match law.key:
        case "kaplan_n":
            out["A"] = (out["E"] + capacity + data) * n ** out["alpha"]
        case "kaplan_d":
            out["B"] = (out["E"] + capacity + data) * d ** out["beta"]
        case "kaplan":  # at the centre both parts inside are alike
            out["A"] = (out["E"] + capacity + data) * 0.5 ** out["delta"] * n ** out["alpha"]
            out["B"] = (out["E"] + capacity + data) * 0.5 ** out["delta"] * d ** out["delta"]
        case "ray":
            out["A"] = (capacity + data) * n ** out["alpha"]
        case "width_depth" | "effective_depth" | "width_depth_params":
            rest = 0.5 if law.key == "width_depth_params" else 1.0
            out["P"] = 0.5 * capacity * n ** out.get("p", 0.0)
            wide = (
                2 * out["b"] / (2 * out["b"] + out["a"])
            )  # on the frontier the width term is 2b/a times the depth term
            out["A"] = rest * capacity * wide * w ** out["a"]
            out["B"] = rest * capacity * (1 - wide) * h ** out["b"]
            out["C"] = data * d ** out["c"]
    unknown = [name for name in law.names if name not in out]
    if unknown:  # an entry that a user has added
        raise ConfigError(
            f"no literature values are known for {', '.join(unknown)} of law {law.key!r}; give params={{...}} as the truth "
            "to plan with"
        )
    return {name: out[name] for name in law.names}


def crossed_truth(
    law: Law, params: Mapping[str, float], by: str, levels: list[str], share: Any
) -> tuple[Law, dict[str, float]]:
    """The law crossed by a column, with the same truth in every level."""
    made = law.crossed(by, levels, share)
    return made, {n: float(params[n.split("[")[0]]) for n in made.param_names}

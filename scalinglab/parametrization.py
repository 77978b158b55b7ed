"""Parametrizations as data: role x location x quantity -> exponents of width and depth.

Every multiplier is  factor * m_N**width * m_L**depth * m_f**fan_in,  relative to a base shape: m_N the ratio of residual
widths, m_L the ratio of depths in blocks (an attention and a feed-forward branch each, never sublayers), m_f the ratio of
the tensor's own fan-in (m_N only while ffn_dim / width is fixed). At the base shape all of them are 1, so that all
parametrizations coincide there (`sp_gpt2` where the base is given the same init).

Tensors are told apart by tags. *Roles*: `input` (a table looked up), `matrix` (sums over a width: projections, and queries
over depth), `readout` (the head), `vector` (gains, biases, mixing scalars). *Locations*: `branch` (behind a branch
multiplier), `trunk` (acts on the residual stream itself: stream mixing, gains after the addition, depth-wise averages),
`outside` (embedding, final norm, head).

The depth rule of the matrices has two numbers whose product is always 1/m_L: branch multiplier m_L^-alpha and Adam
learning rate m_L^(alpha - 1). alpha only splits it.

Where sources disagree
----------------------
D1  Adam's epsilon follows the gradient of its tensor: 1/m_N inside and outside the stack, m_L^-alpha in branches. That
    includes the readout while it carries the forward multiplier 1/m_N, for then its gradient shrinks as 1/m_N (DepthBench's
    script does this, Complete(d)P keeps it constant, but for the absorbed form: see `absorbed_readout`). Released code often
    gives one epsilon to all groups. Keep the base epsilon at 1e-12 or below and none of it matters.
D2  1/sqrt(2 L) init of output projections: kept by nanoGPT-mup, Megatron and Cerebras, dropped with CompleteP. It is refused
    together with a branch multiplier, which would count depth twice.
D3  Branch gains get the learning rate of their branch (CompleteP); others remove learnable gains because they break
    transfer. Train with gains on and off.
D4  Embedding learning rate: constant (muP, CompleteP) against width^-1/2 (u-muP). The standard parametrization may lose by
    this alone: sweep `input.outside.lr` (`perturb`) for it.
D5  Weight decay: lr * decay is held fixed for every decayed tensor (see 1.4 below), which is lambda * m_N in muP. Others scale
    with sqrt(width). Replicate with no decay.
D6  alpha: 1/2 (Tensor Programs VI, Bordelon 2023, u-muP) or 1 (CompleteP, Bordelon 2024). Run 0, 1/2 and 1.
D7  "depth-muP" means alpha = 1/2 here and in most papers, and alpha = 1 in Megatron. `alpha` is stored with every run.

Weight decay, coupled and independent
-------------------------------------
PyTorch's AdamW shrinks a weight by lr_t * decay ("coupled"); the independent form shrinks it by s_t * decay' with s_t in
[0, 1] the schedule. Per tensor decay' = peak lr * decay. A sweep over learning rates under coupled decay also sweeps the
regularisation: hold the independent number. The printed alpha = 1/2 table lets lr * decay drift as m_L^-1/2; here every
table holds it.

Sources: Yang et al. 2022 (arXiv:2203.03466), Dey et al. 2025 (CompleteP, arXiv:2505.01618, table 1), and for the rules of
other architectures derivations of ours (see `scalinglab.native`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias, get_args

from scalinglab.errors import ConfigError
from scalinglab.shapes import Shape

Role: TypeAlias = Literal["input", "matrix", "readout", "vector"]
Location: TypeAlias = Literal["branch", "trunk", "outside"]
Quantity: TypeAlias = Literal["init_std", "forward", "lr", "eps", "weight_decay"]

ROLES: tuple[str, ...] = get_args(Role)
LOCATIONS: tuple[str, ...] = get_args(Location)
QUANTITIES: tuple[str, ...] = get_args(Quantity)
BRANCH, ATTENTION = "branch_multiplier", "attention_scale"  # entries of the whole model
_ALIASES = {"readout_multiplier": "readout.outside.forward", "embedding_multiplier": "input.outside.forward"}


@dataclass(frozen=True)
class Exponents:
    """How one quantity scales. `factor` 0 switches the quantity off (no weight decay of gains)."""

    width: float = 0.0
    depth: float = 0.0
    fan_in: float = 0.0
    factor: float = 1.0

    def at(self, width_ratio: float, depth_ratio: float, fan_in_ratio: float) -> float:
        """The multiplier at these ratios to the base shape."""
        return self.factor * width_ratio**self.width * depth_ratio**self.depth * fan_in_ratio**self.fan_in


ONE = Exponents()
NONE = Exponents(factor=0.0)


@dataclass(frozen=True)
class Group:
    """Multipliers on the base hyper-parameters of one tensor.

    Attributes
    ----------
    lr, eps, init_std, forward : float
        On the base learning rate, Adam's epsilon, the base init standard deviation, and the tensor's output.
    weight_decay : float
        On the base decay as PyTorch's AdamW takes it (coupled: one step shrinks by lr * decay).
    """

    lr: float
    eps: float
    weight_decay: float
    init_std: float
    forward: float

    @property
    def weight_decay_independent(self) -> float:
        """On the base decay of the independent form, base lr * base decay."""
        return self.lr * self.weight_decay


@dataclass(frozen=True)
class Scales:
    """What the model itself needs: forward multipliers, the scale of attention logits, the residual init."""

    branch_multiplier: float
    embedding_multiplier: float
    readout_multiplier: float
    attention_scale: float
    init: Literal["normal", "gpt2"]


@dataclass(frozen=True)
class Parametrization:
    """One parametrization: a table, never a branch in the code.

    Attributes
    ----------
    name : str
    table : mapping of str to Exponents
        Keys "role.location.quantity", "branch_multiplier" and "attention_scale" (its `width` acts on the ratio of head
        sizes, on top of 1/sqrt(head_dim)).
    alpha : float or None
        The depth rule; None where depth is not scaled.
    init : {"normal", "gpt2"}
        "gpt2" divides the init of output projections by sqrt(2 L), L absolute.
    readout : {"multiplier", "absorbed"}
        Where the 1/m_N of the readout is.
    changes : tuple of str
        What `perturb` did.
    note : str
        Where the rules come from and how far they were checked.
    """

    name: str
    table: Mapping[str, Exponents]
    alpha: float | None = None
    init: Literal["normal", "gpt2"] = "normal"
    readout: Literal["multiplier", "absorbed"] = "multiplier"
    changes: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.init == "gpt2" and self.table[BRANCH].depth:
            raise ConfigError(
                f"parametrization {self.name!r} has a branch multiplier in depth and the 1/sqrt(2L) init of output "
                "projections: depth would count twice; take init='normal'"
            )

    @property
    def description(self) -> str:
        """The name, and what was changed in it."""
        return f"{self.name}: " + "; ".join(self.changes) if self.changes else self.name

    def resolve(
        self,
        role: Role,
        location: Location,
        *,
        width_ratio: float,
        depth_ratio: float,
        fan_in_ratio: float | None = None,
    ) -> Group:
        """Multipliers of one tensor.

        Parameters
        ----------
        role, location
            Its tags.
        width_ratio, depth_ratio : float
            Residual width and number of blocks over those of the base shape.
        fan_in_ratio : float, optional
            The tensor's fan-in over that in the base shape; `width_ratio` unless given.

        Raises
        ------
        ConfigError
            No rule for these tags, or a ratio that isn't positive.
        """
        if role not in ROLES or location not in LOCATIONS or f"{role}.{location}.lr" not in self.table:
            known = sorted({key.rpartition(".")[0] for key in self.table} - {""})
            raise ConfigError(
                f"parametrization {self.name!r} has no rule for a tensor with role {role!r} and location {location!r}; "
                f"there are rules for {', '.join(known)}"
            )
        ratios = (width_ratio, depth_ratio, width_ratio if fan_in_ratio is None else fan_in_ratio)
        if not all(math.isfinite(r) and r > 0 for r in ratios):
            raise ConfigError(f"ratios to the base shape must be positive, got width, depth, fan-in = {ratios}")
        return Group(**{q: self.table[f"{role}.{location}.{q}"].at(*ratios) for q in QUANTITIES})

    def scales(self, shape: Shape, base: Shape) -> Scales:
        """Multipliers of the model at a shape, relative to the base shape.

        Raises
        ------
        ConfigError
            The readout is tied and its multiplier is absorbed into the tensor.
        """
        if shape.tied and self.readout == "absorbed":
            raise ConfigError(
                "a tied readout needs the forward multiplier; the absorbed form would scale the embedding"
            )
        width, depth = shape.width / base.width, shape.depth / base.depth
        heads = shape.head_dim / base.head_dim
        return Scales(
            branch_multiplier=self.table[BRANCH].at(width, depth, width),
            embedding_multiplier=self.table["input.outside.forward"].at(width, depth, 1.0),
            readout_multiplier=self.table["readout.outside.forward"].at(width, depth, width),
            attention_scale=self.table[ATTENTION].at(heads, depth, heads) / math.sqrt(shape.head_dim),
            init=self.init,
        )

    def perturb(
        self, entry: str, *, to: Mapping[str, float] | None = None, by: Mapping[str, float] | None = None
    ) -> Parametrization:
        """A mis-scaled alternative: this table with one entry changed; its `description` says what.

        Parameters
        ----------
        entry : str
            "role.location.quantity", "branch_multiplier", "attention_scale", "readout_multiplier" or
            "embedding_multiplier".
        to, by : mapping
            New exponents, or what is added to them: any of width, depth, fan_in; `factor` is set or multiplied.

        Raises
        ------
        ConfigError
            Unknown entry or exponent, or a change that changes nothing (CompleteP has no depth factor on the learning
            rate: to "remove" it is no control).

        Examples
        --------
        >>> forgot = parametrization("depth_mup").perturb("matrix.branch.lr", to={"depth": 0.0})
        >>> forgot.description
        'depth_mup: matrix.branch.lr depth -0.5 -> 0'
        """
        key = _ALIASES.get(entry, entry)
        if key not in self.table:
            raise ConfigError(f"parametrization {self.name!r} has no entry {entry!r}; entries: {', '.join(self.table)}")
        if (to is None) == (by is None):
            raise ConfigError("perturb takes either `to` (new exponents) or `by` (what to add to them)")
        old = asdict(self.table[key])
        asked = to if to is not None else by or {}
        if unknown := sorted(set(asked) - set(old)):
            raise ConfigError(f"{unknown[0]!r} is no exponent of {entry}; exponents are {', '.join(old)}")
        new = {**old, **{n: float(v) if to is not None else _add(n, old[n], v) for n, v in asked.items()}}
        if new == old:
            raise ConfigError(f"this changes nothing: {entry} of {self.name!r} is {_told(old)} already")
        change = f"{entry} " + ", ".join(f"{n} {old[n]:g} -> {new[n]:g}" for n in old if new[n] != old[n])
        return replace(self, table={**self.table, key: Exponents(**new)}, changes=(*self.changes, change))

    def absorbed_readout(self) -> Parametrization:
        """The same untied readout without a forward multiplier: its 1/m_N moves into init and learning rate.

        With W' = W / m_N: init std and learning rate x 1/m_N, decay and epsilon x m_N. Adam then takes the same steps.
        """
        forward = self.table["readout.outside.forward"]
        table = dict(self.table)
        for quantity, sign in {"init_std": 1, "lr": 1, "eps": -1, "weight_decay": -1}.items():
            key = f"readout.outside.{quantity}"
            table[key] = replace(table[key], width=table[key].width + sign * forward.width)
        table["readout.outside.forward"] = ONE
        return replace(self, table=table, readout="absorbed")


def parametrization(name: str) -> Parametrization:
    """A parametrization by name: a key of `PARAMETRIZATIONS`, or "alpha=0.75" for another depth rule with muP in width.

    Raises
    ------
    ConfigError
        Unknown name; lists those there are.
    """
    if name in PARAMETRIZATIONS:
        return PARAMETRIZATIONS[name]
    if name.startswith("alpha="):
        try:
            return scaled(float(name.removeprefix("alpha=")), name=name)
        except ValueError as error:
            raise ConfigError(f"parametrization {name!r}: {error}") from None
    raise ConfigError(
        f"parametrization {name!r} is unknown; choose one of {', '.join(PARAMETRIZATIONS)}, alpha=NUMBER, or native"
    )


def scaled(alpha: float | None, *, width: bool = True, name: str | None = None, note: str = "") -> Parametrization:
    """The family of muP tables for a Pre-LN decoder under Adam.

    Parameters
    ----------
    alpha : float or None
        Branch multiplier m_L^-alpha and branch learning rate m_L^(alpha - 1); None leaves depth alone (which is not
        alpha = 0: that divides the learning rate by m_L).
    width : bool
        Whether width is scaled (muP). False with an alpha is the depth-only mode.

    Raises
    ------
    ConfigError
        alpha is not in [0, 1].
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise ConfigError(f"alpha={alpha:g} is outside [0, 1]; 1/2 and 1 are the usual ones")
    n = 1.0 if width else 0.0
    branch, lr = (0.0, 0.0) if alpha is None else (-alpha, alpha - 1.0)
    trunk = 0.0 if alpha is None else -1.0
    eps_branch = Exponents(width=-n, depth=branch)
    return Parametrization(
        name=name or f"{'alpha' if width else 'depth only, alpha'}={'none' if alpha is None else format(alpha, 'g')}",
        table={
            **_tensor("input.outside", lr=ONE, eps=Exponents(width=-n)),
            **_tensor(
                "matrix.branch", lr=Exponents(fan_in=-n, depth=lr), eps=eps_branch, init=Exponents(fan_in=-n / 2)
            ),
            **_tensor("vector.branch", lr=Exponents(depth=lr), eps=eps_branch, decay=False),
            # The branch multiplier does not reach what acts on the stream itself: L coherent changes need 1/m_L each.
            **_tensor(
                "matrix.trunk",
                lr=Exponents(fan_in=-n, depth=trunk),
                eps=Exponents(width=-n),
                init=Exponents(fan_in=-n / 2),
            ),
            **_tensor("vector.trunk", lr=Exponents(depth=trunk), eps=Exponents(width=-n), decay=False),
            **_tensor("vector.outside", lr=ONE, eps=Exponents(width=-n), decay=False),
            **_tensor("readout.outside", lr=ONE, eps=Exponents(width=-n), forward=Exponents(width=-n)),
            BRANCH: Exponents(depth=branch),
            ATTENTION: Exponents(width=-n / 2),
        },
        alpha=alpha,
        note=note,
    )


def independent_decay(coupled: float, lr: float) -> float:
    """Shrinkage per step at the peak, lr * decay, of a decay as PyTorch's AdamW takes it. `lr` is the tensor's peak."""
    _positive(lr)
    return coupled * lr


def coupled_decay(independent: float, lr: float) -> float:
    """The decay to hand to PyTorch's AdamW so that a step at the peak shrinks by `independent`. `lr` as above."""
    _positive(lr)
    return independent / lr


def _tensor(
    tag: str, *, lr: Exponents, eps: Exponents, init: Exponents = ONE, forward: Exponents = ONE, decay: bool = True
) -> dict[str, Exponents]:
    """Entries of one kind of tensor; a decayed one holds lr * decay fixed."""
    held = Exponents(width=-lr.width, depth=-lr.depth, fan_in=-lr.fan_in) if decay else NONE
    entries = {"init_std": init, "forward": forward, "lr": lr, "eps": eps, "weight_decay": held}
    return {f"{tag}.{quantity}": entries[quantity] for quantity in QUANTITIES}


def _add(name: str, old: float, change: float) -> float:
    return old * change if name == "factor" else old + change


def _told(exponents: Mapping[str, float]) -> str:
    return ", ".join(f"{n} {v:g}" for n, v in exponents.items())


def _positive(lr: float) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"lr={lr} must be positive to convert weight decay")


PARAMETRIZATIONS: Mapping[str, Parametrization] = {
    "sp": replace(
        scaled(None, width=False), name="sp", note="nothing scales; all of init, lr and decay as at the base"
    ),
    "sp_gpt2": replace(
        scaled(None, width=False), name="sp_gpt2", init="gpt2", note="sp with output projections at std/sqrt(2L)"
    ),
    "mup": replace(scaled(None), name="mup", note="width only, arXiv:2203.03466"),
    "depth_mup": replace(
        scaled(0.5), name="depth_mup", note="alpha = 1/2; decay holds lr * decay, unlike the printed table"
    ),
    "completep": replace(scaled(1.0), name="completep", note="alpha = 1, arXiv:2505.01618"),
}

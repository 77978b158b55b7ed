"""Shapes of equal budget: for each depth, the legal width whose count comes nearest, and by how much it misses.

A width is legal where hardware takes it: a whole, even head size (or a multiple of more) and a feed-forward width that is a
multiple of 16. Counts grow with width, so the nearest legal width is one of two neighbours, found by bisection. What is
left is reported, never hidden: `mismatch` = ln(count / budget).

The parameters and FLOPs that an architecture adds to the Pre-LN backbone are charged, so that a design with extra
matrices gets a narrower stream instead of a larger model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from scalinglab.errors import ConfigError
from scalinglab.shapes import FFN, FlopConvention, Shape

MatchBy: TypeAlias = Literal["params_backbone", "params_total", "flops"]
Positions: TypeAlias = Literal["rope", "learned"]
Options: TypeAlias = Any  # the options of an architecture: a mapping or the frozen object of its file

MATCH_BY: tuple[str, ...] = get_args(MatchBy)
PLAIN = "pre_ln"  # the architecture that adds nothing
_FFN_RATIO = {"swiglu": 8 / 3, "gelu": 4.0}  # both give κ ≈ 12
_MAX_WIDTH = 1 << 20
_MOST_WIDTHS = 4096  # of the feed-forward that are tried on either side of the rule's


@dataclass(frozen=True)
class Legal:
    """Which shapes are legal. One of `heads` and `head_dim` is fixed, the other follows from the width.

    Parameters
    ----------
    heads, head_dim : int, optional
        Fixed number of query heads (then widths are multiples of heads x head_multiple), or fixed size of a head (then
        widths are multiples of it).
    head_multiple : int
        The head size must be a multiple of it: 2 for rotary positions, 8 for most fused kernels.
    kv_heads : int, optional
        Key/value heads of grouped-query attention.
    ffn_ratio : float, optional
        Feed-forward width over residual width: 8/3 for SwiGLU, 4 for GELU unless given.
    ffn_multiple : int
        The feed-forward width is rounded up to a multiple of it.
    ffn_slack : float
        How far, relative to the rounded rule, the feed-forward width may move to take up the mismatch that the width
        leaves. 0 keeps to the rule.
    ffn, tied, vocab, context
        As in `Shape`.

    Raises
    ------
    ConfigError
        Both or neither of `heads` and `head_dim`, or a size out of range.
    """

    vocab: int
    context: int
    heads: int | None = None
    head_dim: int | None = None
    head_multiple: int = 2
    kv_heads: int | None = None
    ffn: FFN = "swiglu"
    ffn_ratio: float | None = None
    ffn_multiple: int = 16
    ffn_slack: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        if (self.heads is None) == (self.head_dim is None):
            raise ConfigError("fix either heads or head_dim (the other follows from the width)")
        for name in ("heads", "head_dim", "head_multiple", "ffn_multiple"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name}={size} must be a positive whole number")
        if self.head_dim is not None and self.head_dim % self.head_multiple:
            raise ConfigError(f"head_dim={self.head_dim} is not a multiple of head_multiple={self.head_multiple}")
        if self.ffn not in _FFN_RATIO:
            raise ConfigError(f"ffn={self.ffn!r} is unknown; choose one of {', '.join(_FFN_RATIO)}")
        if not 0 <= self.ffn_slack < 1 or (self.ffn_ratio is not None and self.ffn_ratio <= 0):
            raise ConfigError("ffn_slack must lie in [0, 1) and ffn_ratio above 0")

    @property
    def step(self) -> int:
        """Distance between legal widths."""
        unit = self.head_dim if self.head_dim is not None else (self.heads or 1) * self.head_multiple
        if self.head_dim is not None and self.kv_heads is not None:
            return unit * self.kv_heads  # the key/value heads must divide the heads
        return unit

    def ffn_dim(self, width: int) -> int:
        """Feed-forward width by the rule: the ratio, rounded up to the multiple."""
        ratio = _FFN_RATIO[self.ffn] if self.ffn_ratio is None else self.ffn_ratio
        exact = ratio * width
        return self.ffn_multiple * max(1, math.ceil(exact / self.ffn_multiple - 1e-9))

    def shape(self, depth: int, width: int, ffn_dim: int | None = None) -> Shape:
        """The shape of this depth and width."""
        return Shape(
            depth, width, ffn_dim=self.ffn_dim(width) if ffn_dim is None else ffn_dim, vocab=self.vocab,
            context=self.context, heads=self.heads or 0, head_dim=self.head_dim or 0, kv_heads=self.kv_heads,
            ffn=self.ffn, tied=self.tied,
        )  # fmt: skip


@dataclass(frozen=True)
class Match:
    """One shape of a matched set.

    Attributes
    ----------
    shape : Shape
    mismatch : float
        ln(count / budget), count being what was matched on.
    params : dict
        Counts by component, as `Shape.params`, of the model with its architecture. `params_extra` is what the
        architecture adds; it is contained in params_backbone and params_total.
    flops : float
        Training FLOPs (forward + backward) per token, what the architecture adds included.
    """

    shape: Shape
    mismatch: float
    params: dict[str, int]
    flops: float


def match_shapes(
    budget: float | Shape,
    *,
    by: MatchBy = "params_backbone",
    depths: Sequence[int],
    heads: int | None = None,
    head_dim: int | None = None,
    head_multiple: int = 2,
    kv_heads: int | None = None,
    ffn: FFN | None = None,
    ffn_ratio: float | None = None,
    ffn_multiple: int = 16,
    ffn_slack: float = 0.0,
    vocab: int | None = None,
    context: int | None = None,
    tied: bool | None = None,
    tolerance: float = 0.01,
    architecture: str = PLAIN,
    options: Options = None,
    convention: FlopConvention = "causal",
    positions: Positions = "rope",
    base: Shape | None = None,
) -> list[Match]:
    """Shapes of the given depths that share a budget.

    Parameters
    ----------
    budget : float or Shape
        Parameters, or training FLOPs per token with by="flops". A Shape stands for the count of its Pre-LN model and
        serves as `base`.
    by : {"params_backbone", "params_total", "flops"}
        What is matched.
    depths : sequence of int
        Numbers of blocks; the result keeps their order.
    heads, head_dim, head_multiple, kv_heads, ffn, ffn_ratio, ffn_multiple, ffn_slack, vocab, context, tied
        Which shapes are legal; see `Legal`.
    tolerance : float
        Largest |mismatch| allowed.
    architecture, options
        Whose extra parameters and FLOPs are charged.
    convention : {"6n", "causal", "full"}
        How FLOPs are counted; see `scalinglab.shapes.flops_per_token`.
    positions : {"rope", "learned"}
        Learned positions add context x width parameters to the embedding, and so to params_total.
    base : Shape, optional
        Where vocab, context, heads (unless head_dim is given), ffn and tied come from if they are not given.

    Returns
    -------
    list of Match
        One per depth.

    Raises
    ------
    ConfigError
        No legal shape meets the tolerance at some depth: the message names the nearest and its mismatch.

    Examples
    --------
    >>> found = match_shapes(405e6, by="params_total", depths=(16, 32), heads=16, vocab=50280, context=2048, tolerance=0.03)
    >>> [(m.shape.depth, m.shape.width, m.shape.ffn_dim, round(m.mismatch, 4)) for m in found]
    [(16, 1216, 3248, 0.0038), (32, 896, 2400, -0.014)]
    """
    base = budget if base is None and isinstance(budget, Shape) else base
    if by not in MATCH_BY:
        raise ConfigError(f"by={by!r} is unknown; choose one of {', '.join(MATCH_BY)}")
    if base is not None:
        vocab, context = vocab or base.vocab, context or base.context
        ffn, tied = ffn or base.ffn, base.tied if tied is None else tied
        heads = base.heads if heads is None and head_dim is None else heads
    if vocab is None or context is None:
        raise ConfigError("matching needs vocab and context (or a base shape that has them)")
    legal = Legal(
        vocab, context, heads=heads, head_dim=head_dim, head_multiple=head_multiple, kv_heads=kv_heads,
        ffn=ffn or "swiglu", ffn_ratio=ffn_ratio, ffn_multiple=ffn_multiple, ffn_slack=ffn_slack, tied=bool(tied),
    )  # fmt: skip
    target = (
        _of(charge(budget, convention=convention, positions=positions), by)
        if isinstance(budget, Shape)
        else float(budget)
    )
    if not (math.isfinite(target) and target > 0):
        raise ConfigError(f"budget={budget!r} must be a positive number")
    if not tolerance > 0:
        raise ConfigError(f"tolerance={tolerance} must be positive; it bounds |ln(count / budget)|")
    if not depths:
        raise ConfigError("matching needs at least one depth")

    def cost(shape: Shape) -> Match:
        return charge(shape, architecture=architecture, options=options, convention=convention, positions=positions)

    found = [_nearest(target, by, depth, legal, cost) for depth in depths]
    missed = [match for match in found if abs(match.mismatch) > tolerance]
    if missed:
        named = "; ".join(
            f"at depth {m.shape.depth} the nearest legal shape is width {m.shape.width}, ffn_dim {m.shape.ffn_dim} with "
            f"{by} {_of(m, by):.6g}, mismatch {m.mismatch:+.4f}"
            for m in missed
        )
        raise ConfigError(
            f"no legal shape of {architecture} comes within {tolerance:g} of {by} = {target:.6g}: {named}. Raise the tolerance, change the "
            "budget or the depth, or let the feed-forward take up the rest (ffn_slack)"
        )
    return found


def charge(
    shape: Shape,
    *,
    architecture: str = PLAIN,
    options: Options = None,
    convention: FlopConvention = "causal",
    positions: Positions = "rope",
) -> Match:
    """What a shape costs with an architecture, extra parameters and FLOPs included; mismatch is 0.

    Learned positions count as embedding; looking them up costs no FLOPs.

    Raises
    ------
    ConfigError
        The architecture or the kind of positions is unknown, or the architecture has no count of what it adds.
    """
    if positions not in get_args(Positions):
        raise ConfigError(f"positions={positions!r} is unknown; choose one of {', '.join(get_args(Positions))}")
    params, flops, extra = shape.params, shape.flops_per_token(convention), 0
    if architecture != PLAIN:
        from scalinglab.arch_counts import architecture_params, extra_flops

        plain, params = params, architecture_params(architecture, shape, options)
        extra = params["params_backbone"] - plain["params_backbone"]
        # "6n" is six FLOPs per parameter whatever the architecture does with it; the others count the operations.
        flops += 6.0 * extra if convention == "6n" else extra_flops(architecture, shape, options)
    table = shape.context * shape.width if positions == "learned" else 0
    params = {name: n + table if name in ("params_embedding", "params_total") else n for name, n in params.items()}
    return Match(shape, 0.0, {**params, "params_extra": extra}, flops)


def grid(name: str) -> list[Match]:
    """A published grid of matched shapes, rebuilt from its rule (see `GRIDS`).

    Raises
    ------
    ConfigError
        Unknown name; lists those there are.
    """
    if name not in GRIDS:
        raise ConfigError(f"there is no published grid {name!r}; known: {', '.join(GRIDS)}")
    return match_shapes(**GRIDS[name])


_DEPTHBENCH: dict[str, Any] = {"heads": 16, "vocab": 50280, "context": 2048, "tolerance": 0.03}

GRIDS: Mapping[str, Mapping[str, Any]] = {
    "400M": {"budget": 405e6, "by": "params_total", "depths": (16, 20, 24, 28, 32, 42, 70), **_DEPTHBENCH},
    "300M_backbone": {"budget": 304e6, "by": "params_backbone", "depths": (16, 24, 32, 42, 70, 84), **_DEPTHBENCH},
    "ladder_200M": {"budget": 203e6, "by": "params_total", "depths": (24, 18, 12), **_DEPTHBENCH},
    "ladder_300M": {"budget": 295e6, "by": "params_total", "depths": (28, 21, 14), **_DEPTHBENCH},
    "ladder_400M": {"budget": 405e6, "by": "params_total", "depths": (32, 24, 16), **_DEPTHBENCH},
    "ladder_500M": {"budget": 504e6, "by": "params_total", "depths": (34, 26, 17), **_DEPTHBENCH},
    "ladder_1.6B": {
        "budget": 1.61e9, "by": "params_total", "depths": (28, 40, 54), **_DEPTHBENCH, "kv_heads": 8, "ffn_ratio": 3.0,
    },
    "small": {
        "budget": 3.05e6, "by": "params_backbone", "depths": (3, 6, 12, 24, 48), "heads": 4, "vocab": 256, "context": 128,
        "tolerance": 0.05,
    },
}  # fmt: skip
"""DepthBench's grids (Wang et al. 2026, arXiv:2609.32534, released configurations) as rules: every published width is the
nearest legal one for 16 heads of even size and ffn_dim = ceil16(8 d / 3) (1.6B: 8 key/value heads, ffn_dim = 3 d).

The budget of a grid isn't always its name. The published widths are the nearest ones for budgets in these intervals:
400M 404.1-411.7M total; 300M_backbone 297.8-307.0M; ladder_200M 200.2-205.7M; ladder_300M 286.4-301.0M; ladder_400M
397.7-411.7M; ladder_500M 493.5-514.4M; ladder_1.6B 1.592-1.635B. So 200M itself gives width 864 in place of 896 at depth
12, and the six backbones "of 302M within 3 %" reach +3.3 % at depth 70 (311.97M): they are within 3 % of 303-306M.

`small` is a grid for two CPU cores. Its spread is real: 2.99-3.20M, +4.8 % at depth 24. No budget brings all five within
3.4 %; `ffn_slack` does better.
"""


def _nearest(target: float, by: MatchBy, depth: int, legal: Legal, cost: Callable[[Shape], Match]) -> Match:
    """The legal shape of this depth nearest to the target in log count."""

    def scored(shape: Shape) -> Match:
        match = cost(shape)
        return replace(match, mismatch=math.log(_of(match, by) / target))

    step = legal.step
    low, high = 1, 2
    while high * step < _MAX_WIDTH and scored(legal.shape(depth, high * step)).mismatch < 0:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if scored(legal.shape(depth, middle * step)).mismatch < 0 else (low, middle)
    best = min((scored(legal.shape(depth, k * step)) for k in (low, high)), key=_distance)
    if not legal.ffn_slack:
        return best
    rule, multiple = best.shape.ffn_dim, legal.ffn_multiple
    most = min(math.floor(rule * legal.ffn_slack / multiple), _MOST_WIDTHS)
    widths = (rule + multiple * k for k in sorted(range(-most, most + 1), key=abs))  # ties go to the rule
    return min((scored(replace(best.shape, ffn_dim=f)) for f in widths if f > 0), key=_distance)


def _distance(match: Match) -> float:
    return abs(match.mismatch)


def _of(match: Match, by: str) -> float:
    return match.flops if by == "flops" else float(match.params[by])

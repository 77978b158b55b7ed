"""The options of every residual topology, free of torch: configs, shape matching and the trainer share them.

An option that changes what is computed is a field here; a size (depth, width, heads) belongs to `shapes.Shape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from scalinglab.errors import ConfigError

Readout: TypeAlias = Literal["sum", "mean"]


@dataclass(frozen=True)
class PreLN:
    """h + F(norm(h)): nothing to choose."""


@dataclass(frozen=True)
class Sandwich:
    """h + norm(F(norm(h))), also known as Peri-LN.

    Parameters
    ----------
    embedding_norm : bool
        Normalise the embedding as Peri-LN does (arXiv 2502.02732); DepthBench does not.
    input_norm : bool
        False drops the inner norm: h + norm(F(h)), the reordered norm of OLMo 2.
    """

    embedding_norm: bool = False
    input_norm: bool = True


@dataclass(frozen=True)
class LNS:
    """h + F(norm(h) / sqrt(l)) with l the block counted from 1 (arXiv 2502.05795): nothing to choose."""


@dataclass(frozen=True)
class DeepNorm:
    """norm(alpha h + F(h)); None takes alpha = (2L)^(1/4) and beta = (8L)^(-1/4).

    Parameters
    ----------
    alpha : float, optional
        Weight of the stream, at least 1.
    beta : float, optional
        Initial gain of the value, attention-output and feed-forward matrices, in (0, 1].
    """

    alpha: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 1 <= self.alpha < math.inf:
            raise ConfigError(f"alpha={self.alpha} of DeepNorm must be 1 or more: it weighs the stream, (2L)^(1/4)")
        if self.beta is not None and not 0 < self.beta <= 1:
            raise ConfigError(
                f"beta={self.beta} of DeepNorm must be in (0, 1]: the initial gain shrinks as (8L)^(-1/4); "
                "a published baseline has the sign of that exponent wrong"
            )


@dataclass(frozen=True)
class PostLN:
    """norm(h + F(h)): nothing to choose."""


@dataclass(frozen=True)
class MixLN:
    """Post-LN in the first ceil(fraction L) blocks, Pre-LN above (arXiv 2412.13795)."""

    fraction: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction} of MixLN must be between 0 and 1")


@dataclass(frozen=True)
class Keel:
    """norm(alpha h + F(norm(h))); None takes alpha = 2L, the number of sublayers (arXiv 2601.19895)."""

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha={self.alpha} of Keel must be positive")


@dataclass(frozen=True)
class HyperConnections:
    """n residual streams that are read, mixed and written by learned weights (arXiv 2409.19606).

    Parameters
    ----------
    streams : int
        n.
    dynamic : bool
        Weights depend on the token through a zero-initialised projection; False keeps the static part alone.
    readout : {"sum", "mean"}
        How the streams are merged before the final norm (the same function but for eps).
    scale_outputs : bool
        Divide the initial output projections by sqrt(n) as DepthBench does. False: equals Pre-LN at init.
    tanh : bool
        Squash the dynamic part.
    dynamic_scale : float
        Initial value of the scalars in front of the dynamic part.
    norm_eps : float
        eps of the norm (without gain) in front of the dynamic projections.
    """

    streams: int = 4
    dynamic: bool = True
    readout: Readout = "sum"
    scale_outputs: bool = True
    tanh: bool = True
    dynamic_scale: float = 0.01
    norm_eps: float = 1e-8

    def __post_init__(self) -> None:
        _positive("streams", self.streams)
        _readout(self.readout)


@dataclass(frozen=True)
class StaticHyperConnections(HyperConnections):
    """Hyper-connections whose weights are the same for every token."""

    dynamic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic:
            raise ConfigError("dynamic=True contradicts hyper_connections_static; use hyper_connections")


@dataclass(frozen=True)
class MHC:
    """Manifold-constrained hyper-connections (arXiv 2512.24880).

    Parameters
    ----------
    streams : int
        n.
    iterations : int
        Sinkhorn iterations; each ends with the rows, so row sums are exact and columns carry the truncation error.
    gap : float
        Initial logits: reading +gap on one stream and -gap elsewhere, mixing 0 on and -gap off the diagonal.
    gate : float
        Initial value of the scalars in front of the dynamic part.
    readout, scale_outputs
        As in `HyperConnections`.
    """

    streams: int = 4
    iterations: int = 20
    gap: float = 8.0
    gate: float = 0.01
    readout: Readout = "mean"
    scale_outputs: bool = True

    def __post_init__(self) -> None:
        _positive("streams", self.streams)
        _positive("iterations", self.iterations)
        _readout(self.readout)


@dataclass(frozen=True)
class AttnRes:
    """Each sublayer reads a softmax mix of the embedding and all earlier sublayer outputs (arXiv 2603.15031)."""


@dataclass(frozen=True)
class BlockAttnRes:
    """Attention residuals over sums of consecutive sublayers.

    Give `size` (sublayers per block, fixed while depth grows) or `blocks` (their number, so that size grows with depth);
    the two give different depth trends. Neither: 8 blocks, the paper's recommendation.
    """

    size: int | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.blocks is not None:
            raise ConfigError("give size or blocks of BlockAttnRes, not both: one follows from the other and the depth")
        for name in ("size", "blocks"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))

    def block_size(self, depth: int) -> int:
        """Sublayers per block in a model of `depth` blocks (2 `depth` sublayers)."""
        return self.size if self.size is not None else math.ceil(2 * depth / (self.blocks or 8))


@dataclass(frozen=True)
class MoDA:
    """Mixture-of-depths attention: heads also attend to the same token in earlier sublayers (arXiv 2603.15619).

    Parameters
    ----------
    ffn_cache : bool
        Feed-forward sublayers add a key and a value too (an extra projection); False caches attention sublayers alone.
    depth_key_rope : bool
        Rotate the cached keys. DepthBench doesn't, so that its depth logits depend on the absolute position.
    """

    ffn_cache: bool = True
    depth_key_rope: bool = False


@dataclass(frozen=True)
class DenseFormer:
    """Static weighted average over the embedding and all block outputs after each block (arXiv 2402.02622).

    Parameters
    ----------
    dilation : int
        Only every `dilation`-th earlier output, counted from the newest.
    period : int
        Only after every `period`-th block.
    """

    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        _positive("dilation", self.dilation)
        _positive("period", self.period)

    def sources(self, block: int) -> list[int]:
        """States averaged after `block` (from 0): 0 is the embedding, j the output of block j - 1; newest first."""
        return list(range(block + 1, -1, -self.dilation)) if (block + 1) % self.period == 0 else []


@dataclass(frozen=True)
class LayerScale:
    """h + gamma F(norm(h)) with a small learned gamma.

    Parameters
    ----------
    initial : float
        Initial gamma; 0 with per="sublayer" is SkipInit / ReZero.
    per : {"channel", "sublayer"}
        A vector or a scalar per sublayer.
    """

    initial: float = 1e-4
    per: Literal["channel", "sublayer"] = "channel"

    def __post_init__(self) -> None:
        if self.per not in ("channel", "sublayer"):
            raise ConfigError(f"per={self.per!r} of LayerScale is unknown; choose channel or sublayer")


@dataclass(frozen=True)
class Looped:
    """Pre-LN whose L blocks share weights in groups of `repeats`; `Shape.depth` counts the unrolled blocks.

    Parameters
    ----------
    repeats : int
        How often each distinct block is used; it divides the depth.
    order : {"recurrent", "immediate"}
        "recurrent": 0 1 2 0 1 2 (weight-tied recurrent depth). "immediate": 0 0 1 1 2 2 (MobileLLM-LS).
    """

    repeats: int = 2
    order: Literal["recurrent", "immediate"] = "recurrent"

    def __post_init__(self) -> None:
        _positive("repeats", self.repeats)
        if self.order not in ("recurrent", "immediate"):
            raise ConfigError(f"order={self.order!r} of Looped is unknown; choose recurrent or immediate")

    def distinct(self, depth: int) -> int:
        """Number of distinct blocks."""
        if depth % self.repeats:
            raise ConfigError(f"repeats={self.repeats} of Looped does not divide depth={depth}")
        return depth // self.repeats

    def owner(self, block: int, depth: int) -> int:
        """Which distinct block serves as `block`."""
        distinct = self.distinct(depth)
        return block % distinct if self.order == "recurrent" else block // self.repeats


Options: TypeAlias = Any  # one of the dataclasses above

OPTIONS: dict[str, type] = {
    "pre_ln": PreLN,
    "sandwich": Sandwich,
    "lns": LNS,
    "deepnorm": DeepNorm,
    "keel": Keel,
    "hyper_connections": HyperConnections,
    "hyper_connections_static": StaticHyperConnections,
    "mhc": MHC,
    "attn_res": AttnRes,
    "block_attn_res": BlockAttnRes,
    "moda": MoDA,
    "denseformer": DenseFormer,
    "post_ln": PostLN,
    "mix_ln": MixLN,
    "layerscale": LayerScale,
    "looped": Looped,
}


def resolve_options(architecture: str, options: Options | Mapping[str, Any] | None = None) -> Options:
    """The options of an architecture as its frozen dataclass: defaults for None, checked names for a mapping.

    Raises
    ------
    ConfigError
        Unknown architecture, options of another one, or an unknown option.

    Examples
    --------
    >>> resolve_options("hyper_connections", {"streams": 2}).streams
    2
    """
    if architecture not in OPTIONS:
        raise ConfigError(f"architecture {architecture!r} is unknown; choose one of {', '.join(OPTIONS)}")
    kind = OPTIONS[architecture]
    if options is None:
        return kind()
    if isinstance(options, Mapping):
        known = [field.name for field in fields(kind)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigError(
                f"option {', '.join(map(repr, unknown))} of {architecture} is unknown; "
                + (f"choose from {', '.join(known)}" if known else "it has none")
            )
        return kind(**options)
    if type(options) is not kind:
        raise ConfigError(f"architecture {architecture!r} takes {kind.__name__} options, not {type(options).__name__}")
    return options


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a positive whole number")


def _readout(value: str) -> None:
    if value not in ("sum", "mean"):
        raise ConfigError(f"readout={value!r} is unknown; choose sum or mean")

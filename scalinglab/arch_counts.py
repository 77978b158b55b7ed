"""What a residual topology costs on top of the Pre-LN backbone of `shapes.Shape`: closed forms, free of torch.

Matched designs charge these: at equal width and depth MoDA has a sixth more backbone, hyper-connections a thousandth.
Norms, activations and other elementwise work count as zero FLOPs, as they do in `shapes.flops_per_token`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalinglab.arch_options import (
    MHC,
    BlockAttnRes,
    DenseFormer,
    HyperConnections,
    LayerScale,
    Looped,
    MoDA,
    Options,
    Sandwich,
    resolve_options,
)
from scalinglab.shapes import Shape

_TRAINING = 3  # a contraction costs its forward once and its backward twice


def extra_params(architecture: str, shape: Shape, options: Options | Mapping[str, Any] | None = None) -> int:
    """Parameters beyond `shape.params_backbone`; negative where blocks share weights.

    Parameters
    ----------
    architecture : str
        Key of `arch_options.OPTIONS`.
    shape : Shape
    options : dataclass or mapping, optional
        The architecture's options; defaults where not given.

    Raises
    ------
    ConfigError
        Unknown architecture or options that don't fit it or the shape.

    Examples
    --------
    >>> shape = Shape(24, 1024, ffn_dim=2736, heads=16, vocab=50280, context=2048)
    >>> extra_params("hyper_connections", shape), extra_params("attn_res", shape), extra_params("lns", shape)
    (296160, 98304, 0)
    """
    options = resolve_options(architecture, options)
    return int(_PARAMS[architecture](shape, options)) if architecture in _PARAMS else 0


def extra_flops(architecture: str, shape: Shape, options: Options | Mapping[str, Any] | None = None) -> float:
    """Training FLOPs (forward + backward) per token beyond `shape.flops_per_token`.

    Counted are products and sums of contractions: projections, dot products, mixing and writing of streams. Training
    costs three times the forward. A shared block is computed each time it is used, so `looped` adds nothing to the
    unrolled shape.

    Raises
    ------
    ConfigError
        Unknown architecture or options that don't fit it or the shape.

    Examples
    --------
    >>> shape = Shape(24, 1024, ffn_dim=2736, heads=16, vocab=50280, context=2048)
    >>> extra_flops("hyper_connections", shape) == 3 * 96 * 1024 * 48
    True
    """
    options = resolve_options(architecture, options)
    return float(_TRAINING * _FORWARD_FLOPS[architecture](shape, options)) if architecture in _FORWARD_FLOPS else 0.0


def architecture_params(
    architecture: str, shape: Shape, options: Options | Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Exact counts by component, with the keys of `Shape.params` (the `params_*` columns of a run table).

    The key/value projections of MoDA go to attention, shared blocks leave attention, feed-forward and norms, everything
    else that an architecture adds is `params_other`.
    """
    resolved: Any = resolve_options(architecture, options)
    counts = dict(shape.params)
    extra = extra_params(architecture, shape, resolved)
    if architecture == "looped":
        shared = shape.depth - resolved.distinct(shape.depth)
        for name, count in (
            ("params_attention", counts["params_attention"]),
            ("params_ffn", counts["params_ffn"]),
            ("params_other", 2 * shape.depth * shape.width),
        ):
            counts[name] -= count // shape.depth * shared
    else:
        counts["params_attention" if architecture == "moda" else "params_other"] += extra
    counts["params_backbone"] += extra
    counts["params_total"] += extra
    return counts


def _kv_width(shape: Shape) -> int:
    return (shape.kv_heads or shape.heads) * shape.head_dim


def _sandwich_params(shape: Shape, options: Sandwich) -> int:
    per_block = 2 * shape.width if options.input_norm else 0  # without the inner norms the outer ones replace them
    return shape.depth * per_block + (shape.width if options.embedding_norm else 0)


def _hyper_params(shape: Shape, options: HyperConnections) -> int:
    n = options.streams
    static, dynamic = n * (n + 2), shape.width * (n + 2) + 2
    return 2 * shape.depth * (static + (dynamic if options.dynamic else 0))


def _hyper_flops(shape: Shape, options: HyperConnections) -> int:
    n, d = options.streams, shape.width
    projections = 2 * n * d * (n + 2) if options.dynamic else 0
    return 2 * shape.depth * (projections + 2 * n * d * (n + 2))  # read n d, mix n² d, write n d


def _mhc_params(shape: Shape, options: MHC) -> int:
    n = options.streams
    coefficients = n * n + 2 * n
    return 2 * shape.depth * (n * shape.width * coefficients + coefficients + 3)


def _mhc_flops(shape: Shape, options: MHC) -> int:
    n, d = options.streams, shape.width
    return 2 * shape.depth * (2 * n * d * (n * n + 2 * n) + 2 * n * d * (n + 2))


def _attn_res_flops(shape: Shape, size: int) -> int:
    sources = sum(1 + -(-i // size) for i in range(1, 2 * shape.depth + 1))  # sublayers 1 .. 2L - 1 and the final mix
    return 4 * shape.width * sources  # a dot product and a weighted sum per source


def _block_attn_res_flops(shape: Shape, options: BlockAttnRes) -> int:
    return _attn_res_flops(shape, options.block_size(shape.depth))


def _moda_params(shape: Shape, options: MoDA) -> int:
    return 2 * shape.width * _kv_width(shape) * (shape.depth - 1) if options.ffn_cache else 0


def _moda_flops(shape: Shape, options: MoDA) -> int:
    slots = shape.depth * (shape.depth - 1) // 2 * (2 if options.ffn_cache else 1)  # summed over blocks
    return 2 * _moda_params(shape, options) + 4 * shape.heads * shape.head_dim * slots


def _denseformer_params(shape: Shape, options: DenseFormer) -> int:
    return sum(len(options.sources(block)) for block in range(shape.depth))


def _layerscale_params(shape: Shape, options: LayerScale) -> int:
    return 2 * shape.depth * (shape.width if options.per == "channel" else 1)


def _looped_params(shape: Shape, options: Looped) -> int:
    block = (shape.params_backbone - shape.width) // shape.depth
    return -block * (shape.depth - options.distinct(shape.depth))


_PARAMS: dict[str, Callable[[Shape, Any], int]] = {
    "sandwich": _sandwich_params,
    "keel": lambda shape, _: (2 * shape.depth - 1) * shape.width,
    "hyper_connections": _hyper_params,
    "hyper_connections_static": _hyper_params,
    "mhc": _mhc_params,
    "attn_res": lambda shape, _: 4 * shape.depth * shape.width,
    "block_attn_res": lambda shape, _: 4 * shape.depth * shape.width,
    "moda": _moda_params,
    "denseformer": _denseformer_params,
    "layerscale": _layerscale_params,
    "looped": _looped_params,
}

_FORWARD_FLOPS: dict[str, Callable[[Shape, Any], int]] = {
    "hyper_connections": _hyper_flops,
    "hyper_connections_static": _hyper_flops,
    "mhc": _mhc_flops,
    "attn_res": lambda shape, _: _attn_res_flops(shape, 1),
    "block_attn_res": _block_attn_res_flops,
    "moda": _moda_flops,
    "denseformer": lambda shape, options: 2 * shape.width * _denseformer_params(shape, options),
}

"""The shape of a decoder, and what it costs: exact parameter and FLOP counts in closed form.

The backbone is Pre-LN with RMSNorm (a gain, no bias), no biases anywhere and rotary positions (no parameters):

    N = L (2 d H h + 2 d K h + m d f + 2 d) + d,     m = 3 (SwiGLU) or 2 (GELU)

with L blocks, residual width d, H query heads and K key/value heads of size h, and feed-forward width f. With K = H and
H h = d the attention is 4 d². An embedding of V d comes on top, and a readout of V d unless it is tied.

The counts are plain functions over numbers, arrays or table columns; `Shape` and the run tables both call them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from scalinglab.errors import ConfigError

FFN: TypeAlias = Literal["swiglu", "gelu"]
FlopConvention: TypeAlias = Literal["6n", "causal", "full"]
Numbers: TypeAlias = Any  # a number, a numpy array or a pandas Series: the arithmetic is the same

FLOP_CONVENTIONS: tuple[str, ...] = get_args(FlopConvention)
_FFN_MATRICES = {"swiglu": 3, "gelu": 2}
_ATTENTION_FLOPS = {"causal": 6, "full": 12}  # per block, token, unit of width and position; forward + backward


@dataclass(frozen=True)
class Shape:
    """One decoder shape.

    Parameters
    ----------
    depth, width : int
        Number of blocks L and residual width d.
    ffn_dim : int
        Inner width f of the feed-forward.
    heads, head_dim : int, optional
        Query heads H and their size h. One of them is enough, the other follows from `width`; give both where the
        attention is wider or narrower than the residual stream.
    kv_heads : int, optional
        Key/value heads K of grouped-query attention; `heads` by default.
    vocab, context : int
        Vocabulary V and context length s, in tokens.
    ffn : {"swiglu", "gelu"}
        Three matrices or two.
    tied : bool
        The readout shares the embedding.

    Raises
    ------
    ConfigError
        A size isn't a positive whole number, or the heads do not divide.

    Examples
    --------
    >>> shape = Shape(24, 1024, ffn_dim=2736, heads=16, vocab=50280, context=2048)
    >>> shape.params_backbone, shape.params_total, round(shape.aspect, 1)
    (302433280, 405406720, 42.7)
    """

    depth: int
    width: int
    _: KW_ONLY
    ffn_dim: int
    vocab: int
    context: int
    heads: int = 0
    head_dim: int = 0
    kv_heads: int | None = None
    ffn: FFN = "swiglu"
    tied: bool = False

    def __post_init__(self) -> None:
        if self.ffn not in _FFN_MATRICES:
            raise ConfigError(f"ffn={self.ffn!r} is unknown; choose one of {', '.join(_FFN_MATRICES)}")
        _whole("width", self.width)
        if not self.heads and not self.head_dim:
            raise ConfigError("a Shape needs heads or head_dim (both only where attention isn't as wide as the stream)")
        object.__setattr__(self, "heads", self.heads or _divide(self.width, self.head_dim, "width", "head_dim"))
        object.__setattr__(self, "head_dim", self.head_dim or _divide(self.width, self.heads, "width", "heads"))
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        for name in ("depth", "ffn_dim", "vocab", "context", "heads", "head_dim", "kv_heads"):
            _whole(name, getattr(self, name))
        _divide(self.heads, self.kv_heads, "heads", "kv_heads")

    @property
    def aspect(self) -> float:
        """Aspect ratio r = width / depth."""
        return self.width / self.depth

    @property
    def params(self) -> dict[str, int]:
        """Exact counts by component: the keys are the `params_*` columns of a run table."""
        counts = parameter_counts(
            self.depth,
            self.width,
            self.ffn_dim,
            attention_width=self.heads * self.head_dim,
            kv_width=(self.kv_heads or self.heads) * self.head_dim,
            vocab=self.vocab,
            ffn=self.ffn,
            tied=self.tied,
        )
        return {name: int(count) for name, count in counts.items()}

    @property
    def params_backbone(self) -> int:
        """Backbone (non-embedding) parameters N: blocks and final norm."""
        return self.params["params_backbone"]

    @property
    def params_total(self) -> int:
        """Backbone, embedding and readout."""
        return self.params["params_total"]

    @property
    def kappa(self) -> float:
        """Block constant κ = N / (L d²); about 12 for the usual blocks."""
        return self.params_backbone / (self.depth * self.width**2)

    def flops_per_token(self, convention: FlopConvention = "causal") -> float:
        """FLOPs (forward + backward) per training token; see `flops_per_token`."""
        return float(
            flops_per_token(
                self.params_backbone,
                convention=convention,
                depth=self.depth,
                width=self.width,
                attention_width=self.heads * self.head_dim,
                vocab=self.vocab,
                context=self.context,
            )
        )


def parameter_counts(
    depth: Numbers,
    width: Numbers,
    ffn_dim: Numbers,
    *,
    attention_width: Numbers | None = None,
    kv_width: Numbers | None = None,
    vocab: Numbers | None = None,
    ffn: FFN = "swiglu",
    tied: bool = False,
) -> dict[str, Numbers]:
    """Exact parameter counts by component, elementwise over numbers, arrays or columns.

    Parameters
    ----------
    depth, width, ffn_dim
        L, d and f, broadcast against each other.
    attention_width, kv_width
        H h and K h; `width` and `attention_width` by default.
    vocab
        V. Without it embedding, readout and total are left out.

    Returns
    -------
    dict
        `params_attention`, `params_ffn`, `params_other` (norm gains), `params_backbone`, and with a vocabulary
        `params_embedding`, `params_readout`, `params_total`.
    """
    if ffn not in _FFN_MATRICES:
        raise ConfigError(f"ffn={ffn!r} is unknown; choose one of {', '.join(_FFN_MATRICES)}")
    q = width if attention_width is None else attention_width
    kv = q if kv_width is None else kv_width
    counts = {
        "params_attention": 2 * depth * width * (q + kv),
        "params_ffn": _FFN_MATRICES[ffn] * depth * width * ffn_dim,
        "params_other": (2 * depth + 1) * width,
    }
    counts["params_backbone"] = counts["params_attention"] + counts["params_ffn"] + counts["params_other"]
    if vocab is not None:
        counts["params_embedding"] = vocab * width
        counts["params_readout"] = 0 * vocab * width if tied else vocab * width
        counts["params_total"] = counts["params_backbone"] + counts["params_embedding"] + counts["params_readout"]
    return counts


def flops_per_token(
    params_backbone: Numbers,
    *,
    convention: FlopConvention = "causal",
    depth: Numbers = None,
    width: Numbers = None,
    vocab: Numbers = None,
    context: Numbers = None,
    attention_width: Numbers | None = None,
) -> Numbers:
    """Training FLOPs (forward + backward) per token, elementwise.

        "6n"      6 N
        "causal"  6 N + 6 V d +  6 L a s     (each position attends to half of the context on average)
        "full"    6 N + 6 V d + 12 L a s     (the whole s × s score matrix is computed)

    with a = `attention_width`, the width d unless given. Embedding look-ups cost nothing, recomputation is not counted.
    "6n" needs N alone.

    Raises
    ------
    ConfigError
        Unknown convention, or a size that the convention needs isn't given.
    """
    if convention == "6n":
        return 6.0 * params_backbone
    if convention not in _ATTENTION_FLOPS:
        raise ConfigError(f"FLOP convention {convention!r} is unknown; choose one of {', '.join(FLOP_CONVENTIONS)}")
    missing = [
        name
        for name, value in {"depth": depth, "width": width, "vocab": vocab, "context": context}.items()
        if value is None
    ]
    if missing:
        raise ConfigError(
            f"FLOP convention {convention!r} needs {', '.join(missing)}; '6n' needs params_backbone alone"
        )
    scores = _ATTENTION_FLOPS[convention] * depth * (width if attention_width is None else attention_width) * context
    return 6.0 * params_backbone + 6.0 * vocab * width + scores


def block_constant(params_backbone: Numbers, depth: Numbers, width: Numbers) -> Numbers:
    """Block constant κ = N / (L d²), elementwise."""
    return params_backbone / (depth * np.square(width * 1.0))


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"{name}={value!r} of a Shape must be a positive whole number")


def _divide(whole: Any, part: Any, whole_name: str, part_name: str) -> int:
    _whole(whole_name, whole)
    _whole(part_name, part)
    if whole % part:
        raise ConfigError(f"{part_name}={part} does not divide {whole_name}={whole}")
    return int(whole // part)

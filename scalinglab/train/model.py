"""The decoder: one loop over 2L sublayers, the same attention and feed-forward for every residual topology.

>>> from scalinglab.shapes import Shape
>>> shape = Shape(2, 16, ffn_dim=48, heads=2, vocab=64, context=32)
>>> model = Model(ModelConfig(shape, architecture="hyper_connections"))
>>> model(torch.zeros(1, 5, dtype=torch.long)).shape
torch.Size([1, 5, 64])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from scalinglab.arch_options import Options, resolve_options
from scalinglab.errors import ConfigError
from scalinglab.shapes import Shape
from scalinglab.train.archs import connect
from scalinglab.train.archs.connector import Branch, Connector, Stream
from scalinglab.train.layers import (
    Attention,
    DepthCache,
    FeedForward,
    RMSNorm,
    Rotary,
    Sublayer,
    at_least_float32,
    check_positions,
    linear,
    rotary,
    spread,
)
from scalinglab.train.roles import retag, tag, tags

Observer: TypeAlias = Callable[[int, Stream, Tensor, Tensor], None]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_CUT = 3.0  # initial normals are truncated at three standard deviations


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the function and its initial distribution.

    Parameters
    ----------
    shape : Shape
    architecture : str
        Key of `arch_options.OPTIONS`.
    options : dataclass or mapping, optional
        The architecture's options; defaults where not given.
    norm_eps : float
        eps of all RMSNorms; 0 is allowed. Mixes of attention residuals are so small at init that 1e-6 changes them.
    rope_theta : float
        Base of the rotary frequencies.
    positions : {"rope", "learned"}
        Learned positions add context * width parameters to the embedding, which `Shape` doesn't count.
    init : {"normal", "gpt2"}
        Truncated normals of `init_std` for every matrix; "gpt2" divides output projections by sqrt(2L).
    init_std : float
    branch_multiplier : float
        Factor on every sublayer output before it is written (c of CompleteP).
    readout_multiplier : float
        Factor on the logits.
    embedding_multiplier : float
        Factor on the embedding (with its learned positions).
    attention_scale : float, optional
        Factor on attention logits; 1 / sqrt(head_dim) unless given.
    dtype : {"float32", "float64", "bfloat16"}
        Of the parameters. Keep float32 master weights and autocast; bfloat16 parameters round small updates away.

    Raises
    ------
    ConfigError
        An option is unknown or out of range, or depth would be scaled twice (`gpt2` with a branch multiplier).
    """

    shape: Shape
    architecture: str = "pre_ln"
    options: Options = None
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    positions: Literal["rope", "learned"] = "rope"
    init: Literal["normal", "gpt2"] = "normal"
    init_std: float = 0.02
    branch_multiplier: float = 1.0
    readout_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", resolve_options(self.architecture, self.options))
        for name, known in {"positions": ("rope", "learned"), "init": ("normal", "gpt2"), "dtype": DTYPES}.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(known)}")
        for name in ("rope_theta", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
        if not 0 <= self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps={self.norm_eps} must be 0 or positive")
        if self.init == "gpt2" and self.branch_multiplier != 1:
            raise ConfigError(
                "init='gpt2' and a branch_multiplier scale branches by depth twice; use init='normal' with the multiplier"
            )
        check_positions(self.shape, self.positions)


class Block(nn.Module):
    """Attention and feed-forward with their input norms, where the topology has them."""

    def __init__(self, config: ModelConfig, attention_norm: bool, ffn_norm: bool) -> None:
        super().__init__()
        width, eps = config.shape.width, config.norm_eps
        self.attention_norm = RMSNorm(width, eps, "branch") if attention_norm else None
        self.attention = Attention(config.shape, config.attention_scale)
        self.ffn_norm = RMSNorm(width, eps, "branch") if ffn_norm else None
        self.ffn = FeedForward(config.shape)

    def sublayer(self, i: int, positions: Rotary) -> tuple[nn.Module | None, Branch]:
        """Input norm and branch of sublayer i (its parity counts)."""
        if i % 2:
            return self.ffn_norm, _without_cache(self.ffn)
        return self.attention_norm, functools.partial(_attend, self.attention, positions)


class Model(nn.Module):
    """A decoder with a residual topology.

    Weights are drawn at once from seed 0, on the CPU and in float32, so they don't depend on device or dtype; on the
    meta device they are left to `to_empty` and `init_weights`. One seed gives the same backbone to every topology.

    Parameters
    ----------
    config : ModelConfig
    """

    kernels: Any = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        connector = connect(config.architecture, shape, config.options, norm_eps=config.norm_eps)
        self.owners = [connector.owner(block) for block in range(shape.depth)]
        self.embedding_vd = tag(nn.Parameter(torch.empty(shape.vocab, shape.width)), "input", "outside", shape.vocab)
        self.positions_td = (
            tag(nn.Parameter(torch.empty(shape.context, shape.width)), "input", "outside", shape.context)
            if config.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(
            Block(config, connector.has_input_norm(2 * block), connector.has_input_norm(2 * block + 1))
            for block in (self.owners.index(owner) for owner in range(max(self.owners) + 1))
        )
        self.connector = connector
        self.final_norm = RMSNorm(shape.width, config.norm_eps, "outside")
        self.head_vd = (
            None
            if shape.tied
            else tag(nn.Parameter(torch.empty(shape.vocab, shape.width)), "readout", "outside", shape.width)
        )
        self._tags = tags(self)
        self.to(DTYPES[config.dtype])
        if self.embedding_vd.device.type != "meta":
            self.init_weights(torch.Generator().manual_seed(0))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [b, t, v] of the next token."""
        return self.logits(self.hidden(tokens_bt))

    def loss(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, computed in float32 or better."""
        return self.nats(tokens_bt, targets_bt).mean()

    def nats(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Cross-entropy of every target [b, t] in nats, in float32 or better; stacked, [K, b, t]."""
        if self.kernels is not None:
            normed, head_vd = self.final_norm(self.hidden(tokens_bt)), self._head()
            nats_bt: Tensor = self.kernels.head_loss(normed, head_vd, targets_bt, self.config.readout_multiplier)
            return nats_bt
        logits_btv = at_least_float32(self(tokens_bt))
        nats_n = functional.cross_entropy(logits_btv.flatten(0, -2), targets_bt.flatten(), reduction="none")
        return nats_n.view(targets_bt.shape)

    def logits(self, hidden_btd: Tensor) -> Tensor:
        """Final norm and readout of a state; the logit lens applies it to earlier states."""
        logits_btv = linear(self.final_norm(hidden_btd), self._head())
        multiplier = self.config.readout_multiplier
        return logits_btv if multiplier == 1 else logits_btv * multiplier

    def hidden(self, tokens_bt: Tensor, *, skip: Collection[int] = (), observe: Observer | None = None) -> Tensor:
        """State [b, t, d] before the final norm.

        Parameters
        ----------
        tokens_bt : Tensor
            Token ids.
        skip : collection of int
            Sublayers to leave out (layer removal).
        observe : callable, optional
            observe(i, stream, x, y) after sublayer i has been written: its input before the norm and its output.
        """
        embedding_btd, positions = self._embed(tokens_bt)
        stream = self.connector.start(embedding_btd)
        multiplier = self.config.branch_multiplier
        for i in range(2 * self.config.shape.depth):
            if i in skip:
                stream.skip(i)
                continue
            norm, branch = cast(Block, self.blocks[self.owners[i // 2]]).sublayer(i, positions)
            x_btd = stream.read(i)
            y_btd = stream.apply(i, branch, x_btd if norm is None else norm(x_btd))
            if multiplier != 1:
                y_btd = y_btd * multiplier
            stream.write(i, y_btd)
            if observe is not None:
                observe(i, stream, x_btd, y_btd)
        return stream.finish()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw all weights anew: truncated normals for matrices, ones for gains, the topology's own values last.

        Parameters
        ----------
        generator : torch.Generator
            On the CPU. The same state gives the same weights on every device and, up to rounding, in every dtype.
        """
        config, connector = self.config, self.connector
        draw = functools.partial(_draw, generator)
        # The order is part of the contract: backbone first, so that topologies share it under one seed.
        for table in (self.embedding_vd, self.positions_td, self.head_vd):
            if table is not None:
                draw(table, config.init_std)
        gain = functools.partial(_gain, config, connector)
        for block in cast(list[Block], self.blocks):
            block.attention.init_weights(draw, config.init_std, gain)
            block.ffn.init_weights(draw, config.init_std, gain)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.init_weights()
        connector.init_weights(draw, config.init_std)

    def use(self, kernels: Any) -> None:
        """Run the sublayers of a stacked model on fused kernels (`scalinglab.train.fused.Kernels`); None for torch."""
        self.kernels = kernels
        for module in self.modules():
            if isinstance(module, Sublayer):
                module.kernels = kernels

    def _head(self) -> Tensor:
        return self.embedding_vd if self.head_vd is None else self.head_vd

    def _embed(self, tokens_bt: Tensor) -> tuple[Tensor, Rotary]:
        length, shape = tokens_bt.shape[-1], self.config.shape
        if self.positions_td is not None and length > shape.context:
            raise ConfigError(f"{length} tokens are more than the {shape.context} learned positions of the Shape")
        embedding_btd = _look_up(tokens_bt, self.embedding_vd)
        if self.positions_td is not None:
            embedding_btd = embedding_btd + spread(self.positions_td[..., :length, :], 2, 1)
        if self.config.embedding_multiplier != 1:
            embedding_btd = embedding_btd * self.config.embedding_multiplier
        if self.positions_td is not None:
            return embedding_btd, None
        return embedding_btd, rotary(length, shape.head_dim, self.config.rope_theta, embedding_btd)

    def _apply(self, fn: Any, recurse: bool = True) -> Model:
        super()._apply(fn, recurse)
        retag(self, self._tags)  # leaving the meta device makes new parameter objects
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        retag(self, self._tags)  # deepcopy and pickle drop attributes of parameters


def _look_up(tokens_bt: Tensor, table_vd: Tensor) -> Tensor:
    if table_vd.ndim == 2:
        return functional.embedding(tokens_bt, table_vd)
    replicas, vocab, width = table_vd.shape  # stacked: one long table, each replica with its own offset
    offsets_k11 = torch.arange(replicas, device=tokens_bt.device).view(-1, 1, 1) * vocab
    return functional.embedding(tokens_bt + offsets_k11, table_vd.reshape(-1, width))


def _attend(attention: nn.Module, positions: Rotary, x: Tensor, depth: DepthCache | None = None) -> Tensor:
    y: Tensor = attention(x, positions, depth)
    return y


def _without_cache(ffn: nn.Module) -> Branch:
    def branch(x: Tensor, depth: DepthCache | None = None) -> Tensor:
        y: Tensor = ffn(x)
        return y

    return branch


def _gain(config: ModelConfig, connector: Connector, matrix: str) -> float:
    outputs = config.init == "gpt2" and matrix in ("output", "down")
    return connector.init_gain(matrix) / (math.sqrt(2 * config.shape.depth) if outputs else 1.0)


def _draw(generator: torch.Generator, param: nn.Parameter, std: float) -> None:
    values = torch.empty(param.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(values, std=1.0, a=-_CUT, b=_CUT, generator=generator)
    param.copy_(values.double().mul_(std))
